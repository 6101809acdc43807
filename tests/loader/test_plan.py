"""Facts in, settings and reasons out: no machine, no device, no mock."""

import dataclasses

import pytest
import torch

from loaderkit import build_loader
from loaderkit.errors import LoaderError, OptionError
from loaderkit.loader.decisions import Decision, batches_per_s
from loaderkit.loader.facts import Facts, ReadCost
from loaderkit.loader.options import SettingOverrides
from loaderkit.loader.plan import decide
from loaderkit.memory.machine import Capability, Host

MIB, GIB = 1 << 20, 1 << 30
HOST = Host(
    cpus=8,
    cpus_from="affinity",
    available_bytes=32 * GIB,
    available_from="cgroup",
    limit_bytes=32 * GIB,
    used_bytes=None,
    oom_kills=0,
    pressure=0.0,
    shm_bytes=16 * GIB,
    shm_free_bytes=16 * GIB,
    files=1024,
    files_open=20,
    mappings=65530,
    local_ranks=1,
)
CPU = Capability("cpu", pins=False, asynchronous=False, unified=True, started=False)
CUDA = Capability("cuda", pins=True, asynchronous=True, unified=False, started=True)
MPS = Capability("mps", pins=False, asynchronous=False, unified=True, started=False)
QUICK = ReadCost(128, 2600, MIB // 3, 0.0004, 0.0001, send_s=0.0005, receive_s=0.0002)
SLOW = ReadCost(32, 10**6, 32 * MIB, 0.2, 0.01, send_s=0.004, receive_s=0.004)


def facts(*, host=None, **changes):
    known = {"device": CPU, "samples": 1000, "measured": SLOW, **changes}
    return Facts(host=dataclasses.replace(HOST, **(host or {})), **known)


def plan(overrides=None, batches=1000, **changes):
    host = changes.pop("host", None)
    changed_facts = facts(host=host, **changes)
    return decide(changed_facts, SettingOverrides(**(overrides or {})), batches=batches)


def test_gathering_is_quicker_than_sending():
    planned = plan(measured=QUICK, gathering=True, draws_no_random_numbers=True)

    assert planned.num_workers.value == 0
    assert planned.read_ahead.value == 2
    assert "400 us to make and 1.00 ms to send" in planned.num_workers.reason


def test_what_is_only_copied_is_not_copied_again():
    copied = dataclasses.replace(SLOW, fetch_s=0.004, batch_bytes=32 * MIB)

    planned = plan(measured=copied)

    assert planned.num_workers.value == 0
    assert "copying memory, at 8.4 GB/s" in planned.num_workers.reason


def test_slow_reading_is_spread_over_the_processors():
    planned = plan()

    assert planned.num_workers.value == 8
    assert "times the rate of none" in planned.num_workers.reason


def test_two_processors_give_two_workers():
    assert plan(host={"cpus": 2, "cpus_from": "cgroup quota"}).num_workers.value == 2


def test_ranks_share_the_processors():
    assert plan(host={"local_ranks": 4}).num_workers.value == 2


def test_without_a_measurement_there_are_at_most_two():
    planned = plan(measured=None)

    assert planned.num_workers.value == 2
    assert "not measured" in planned.num_workers.reason
    assert plan(measured=None, gathering=True).num_workers.value == 0


def test_little_memory_means_fewer_workers():
    # Each takes 30 MiB, and 96 MiB for the batch that it makes and the two that wait.
    # They get half of what is left; one alone would not be quicker than none.
    for free_mib, workers in [(600, 2), (4 * 126 - 2, 0), (4 * 126, 2), (6 * 126, 3)]:
        planned = plan(host={"available_bytes": free_mib * MIB})

        assert planned.num_workers.value == workers


def test_a_machine_that_waits_for_memory_gets_one_at_most():
    planned = plan(host={"pressure": 30.0}, start_method="spawn", measured=QUICK)

    assert plan(host={"pressure": 30.0}).num_workers.value <= 1
    assert "30 % of the time" in planned.num_workers.reason


def test_a_variable_caps_them_and_says_so():
    planned = plan(measured=SLOW, environment={"LOADERKIT_MAX_WORKERS": "0"})

    assert planned.num_workers.value == 0
    assert "LOADERKIT_MAX_WORKERS" in planned.num_workers.reason


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("0", 0)])
def test_a_variable_chooses_unless_the_caller_does(text, value):
    variables = {"LOADERKIT_NUM_WORKERS": text}

    assert plan(environment=variables).num_workers.value == value
    assert plan({"num_workers": 1}, environment=variables).num_workers.value == 1
    assert "NUM_WORKERS asks" in plan(environment=variables).num_workers.reason


def test_a_variable_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="LOADERKIT_NUM_WORKERS must be"):
        plan(environment={"LOADERKIT_NUM_WORKERS": "many"})


def test_what_the_caller_asks_for_wins():
    planned = plan(
        {"num_workers": 3, "prefetch_factor": 5, "persistent_workers": False}
    )

    assert (planned.num_workers.value, planned.prefetch_factor.value) == (3, 5)
    assert not planned.persistent_workers.value
    assert planned.num_workers.reason == "you asked for it"


def test_more_workers_than_processors_is_told():
    assert "20 workers share 8 CPUs" in plan({"num_workers": 20}).warnings[0]


def test_a_daemon_has_no_children():
    assert plan(daemonic=True).num_workers.value == 0
    with pytest.raises(LoaderError, match="daemonic"):
        plan({"num_workers": 1}, daemonic=True)


def test_without_locks_there_are_no_workers():
    reason = "they need locks, and none can be made in /dev/shm: Read-only file system"
    planned = plan(lockless=reason)

    assert planned.num_workers.value == 0
    assert reason in planned.num_workers.reason
    with pytest.raises(LoaderError, match="2 workers were asked for") as raised:
        plan({"num_workers": 2}, lockless=reason)
    assert raised.value.why == reason


def test_an_iterable_dataset_is_not_read_twice():
    planned = plan(iterable=True, measured=None)

    assert planned.num_workers.value == 0
    assert "get_worker_info" in planned.num_workers.reason


@pytest.mark.parametrize("device", [CPU, MPS])
def test_only_devices_that_use_it_get_page_locked_memory(device):
    assert not plan(device=device).pin_memory.value
    planned = plan({"pin_memory": True}, device=device)
    assert not planned.pin_memory.value
    assert "not followed" in planned.warnings[0]


def test_a_card_gets_page_locked_memory_when_it_fits():
    assert plan(device=CUDA).pin_memory.value
    tight = plan(device=CUDA, host={"available_bytes": 2 * GIB})
    assert not tight.pin_memory.value
    assert "too much" in tight.pin_memory.reason


def test_batches_that_wait_are_bounded_in_bytes():
    large = dataclasses.replace(SLOW, batch_bytes=GIB)

    planned = plan({"num_workers": 2}, measured=large)

    assert planned.prefetch_factor.value == 1


def test_workers_are_kept_when_epochs_are_short():
    short = plan({"num_workers": 2}, batches=10)
    long = plan({"num_workers": 2}, batches=100_000)

    assert short.persistent_workers.value
    assert not long.persistent_workers.value
    assert "give back what they held" in long.persistent_workers.reason


def test_spawned_workers_must_bring_more():
    close = dataclasses.replace(
        SLOW, fetch_s=0.0095, send_s=0.001, receive_s=0.0066, batch_bytes=MIB
    )

    forked = plan(measured=close)
    spawned = plan(measured=close, start_method="spawn")

    assert forked.num_workers.value > spawned.num_workers.value == 0


def test_a_dataset_that_cannot_be_sent_is_forked_where_that_is_safe():
    known = {"start_method": "forkserver", "unsendable": "dataset.f: a lambda"}

    planned = plan(**known)

    assert planned.multiprocessing_context.value == "fork"
    assert "a lambda" in planned.multiprocessing_context.reason
    assert plan(device=CUDA, **known).num_workers.value == 0
    assert (
        plan(
            start_methods=("spawn",), **known | {"start_method": "spawn"}
        ).num_workers.value
        == 0
    )


def test_asking_for_what_cannot_start_is_refused():
    with pytest.raises(LoaderError, match="No worker can start by 'spawn'"):
        plan({"num_workers": 1, "multiprocessing_context": "spawn"}, unsendable="x")
    with pytest.raises(ValueError, match="multiprocessing_context must be"):
        plan({"num_workers": 1, "multiprocessing_context": "thread"})
    with pytest.raises(OptionError, match="cannot be 'fork' here") as raised:
        plan(
            {"num_workers": 1, "multiprocessing_context": "fork"},
            start_methods=("spawn",),
        )
    assert raised.value.fix.startswith("multiprocessing_context='spawn'")
    with pytest.raises(OptionError, match="without workers"):
        plan({"num_workers": 0, "persistent_workers": True})
    with pytest.raises(OptionError, match="prefetch_factor was given without"):
        plan({"num_workers": 0, "prefetch_factor": 2})
    with pytest.raises(
        ValueError, match="num_workers must be an integer of at least 0"
    ):
        plan({"num_workers": -1})


def test_a_small_dev_shm_is_refused_only_where_it_is_used():
    small = {"shm_free_bytes": 64 * MIB}

    assert plan({"num_workers": 2}, host=small).sharing.value == "parcel"
    with pytest.raises(LoaderError, match="/dev/shm") as caught:
        plan({"num_workers": 2}, host=small, parcels=False)
    assert "--shm-size" in caught.value.fix


def test_too_few_open_files_are_refused():
    with pytest.raises(LoaderError, match="ulimit"):
        plan({"num_workers": 8}, host={"files": 40})


def test_memory_that_may_run_out_is_told_and_what_must_is_refused():
    tight = {"available_bytes": 400 * MIB}

    planned = plan({"num_workers": 4}, host=tight)

    assert "memory (cgroup)" in planned.warnings[-1]
    with pytest.raises(LoaderError, match="This loader needs"):
        plan({"num_workers": 8, "prefetch_factor": 9}, host=tight)


def test_the_plan_prints_every_setting_with_a_reason():
    text = str(plan())

    for name in ("num_workers", "pin_memory", "prefetch_factor", "seed", "sharing"):
        assert any(
            line.startswith(name) and len(line) > 40 for line in text.split("\n")
        )
    assert "first limit to break" in text
    assert "MiB" in text


@pytest.mark.parametrize("seed", [0, 2**31, 2**62])
def test_the_reasons_of_a_plan_stand_below_each_other(seed):
    decided = decide(facts(), SettingOverrides(), seed=Decision(seed, "of the order"))
    settings = decided.settings()

    text = str(decided)
    lines = [line for line in text.split("\n") if line.split()[0] in settings]

    reasons = [decision.reason for decision in settings.values()]
    assert len(lines) == len(reasons)
    begins = {line.index(why[:30]) for line, why in zip(lines, reasons, strict=True)}
    assert len(begins) == 1
    # What is too long for a line goes on below its beginning.
    last = text.index(lines[-1]) + len(lines[-1])
    ends = [line for line in text[:last].split("\n")[1:] if line not in lines]
    assert {len(line) - len(line.lstrip()) for line in ends} <= begins
    assert all(why in " ".join(text.split()) for why in reasons)


def test_the_rate_has_three_limits():
    two = facts(host={"cpus": 2})

    assert batches_per_s(two, 0) == pytest.approx(5)
    assert batches_per_s(two, 1) == pytest.approx(1 / 0.204)
    assert batches_per_s(two, 4) == pytest.approx(1 / (0.2083 / 2))


@pytest.mark.parametrize("batches", [1, 20, 500, 2000])
@pytest.mark.parametrize("files", [100, 300, 1000])
@pytest.mark.parametrize("prefetch_factor", [2, 100, 10**5])
def test_no_more_batches_are_in_flight_than_an_epoch_has(
    batches, files, prefetch_factor
):
    """Where prefetch_factor is larger, torch asks for all of the epoch at once."""
    in_flight = min(2 * prefetch_factor, batches)
    asked = {"num_workers": 2, "prefetch_factor": prefetch_factor}
    host = {"files": files, "files_open": 0}

    if in_flight + 16 > files:  # each worker takes eight
        with pytest.raises(LoaderError, match="of open files") as raised:
            plan(asked, host=host, batches=batches)
        assert f"{in_flight:,} batch" in raised.value.why
    else:
        planned = plan(asked, host=host, batches=batches)
        assert planned.prefetch_factor.value == prefetch_factor


@pytest.mark.slow
def test_a_prefetch_factor_that_torch_runs_with_is_run_with():
    dataset = torch.utils.data.TensorDataset(torch.arange(40))
    options = {"batch_size": 2, "num_workers": 2, "prefetch_factor": 10**5}

    ours = list(build_loader(dataset, **options))

    theirs = list(torch.utils.data.DataLoader(dataset, **options))
    assert [batch.tolist() for [batch] in ours] == [b.tolist() for [b] in theirs]
