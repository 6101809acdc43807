"""Each setting by its own: what it follows from, to the number, and what it says."""

import dataclasses
import itertools
import json

import pytest
from test_plan import CPU, CUDA, GIB, MIB, SLOW, facts
from torch.utils.data import DataLoader

from loaderkit import build_loader
from loaderkit.errors import LoaderError
from loaderkit.forking import ForkHazard
from loaderkit.loader.decisions import (
    Decision,
    batches_per_s,
    choose_in_order,
    choose_num_workers,
    choose_persistent_workers,
    choose_pin_memory,
    choose_prefetch_factor,
    choose_read_ahead,
    choose_sharing,
    choose_start_method,
)
from loaderkit.loader.forecast import FORKED_BYTES, SPAWNED_BYTES
from loaderkit.loader.options import SettingOverrides

NOTHING_ASKED = SettingOverrides()


def asked(**overrides):
    return SettingOverrides(**overrides)


def every_decision(known, overrides=NOTHING_ASKED):
    """Choose each setting behind the one that it follows from."""
    workers = choose_num_workers(known, overrides)
    number = {"num_workers": workers.value}
    prefetch = choose_prefetch_factor(known, overrides, **number)
    read_ahead = choose_read_ahead(known, overrides, **number)
    start_method = choose_start_method(known, overrides, **number)
    return {
        "num_workers": workers,
        "read_ahead": read_ahead,
        "prefetch_factor": prefetch,
        "multiprocessing_context": start_method,
        "persistent_workers": choose_persistent_workers(
            known, overrides, **number, start_method=start_method.value, batches=100
        ),
        "pin_memory": choose_pin_memory(
            known,
            overrides,
            **number,
            prefetch_factor=prefetch.value,
            read_ahead=read_ahead.value,
        ),
        "in_order": choose_in_order(known, overrides),
        "sharing": choose_sharing(known, **number),
    }


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("measured", [None, SLOW])
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_every_setting_has_a_value_of_its_type_and_a_reason(
    device, measured, start_method
):
    kinds = {
        "num_workers": int,
        "read_ahead": int,
        "prefetch_factor": int | None,
        "multiprocessing_context": str | None,
        "persistent_workers": bool,
        "pin_memory": bool,
        "in_order": bool,
        "sharing": str,
    }
    for daemonic in (False, True):
        known = facts(
            device=device,
            measured=measured,
            start_method=start_method,
            daemonic=daemonic,
        )
        for name, decision in every_decision(known).items():
            assert isinstance(decision.value, kinds[name]), name
            assert isinstance(decision.value, bool) == (kinds[name] is bool), name
            assert isinstance(decision.reason, str), name
            assert len(decision.reason) > 10, name


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("num_workers", "3", 3),
        ("read_ahead", "1", 1),
        ("prefetch_factor", "7", 7),
        ("multiprocessing_context", "spawn", "spawn"),
        ("persistent_workers", "1", True),
        ("persistent_workers", "0", False),
        ("pin_memory", "0", False),
        ("in_order", "0", False),
    ],
)
def test_each_variable_of_the_environment_is_followed_and_named(name, text, value):
    variable = f"LOADERKIT_{name.upper()}"
    known = facts(device=CUDA, start_method="fork", environment={variable: text})
    if name == "read_ahead":
        known = dataclasses.replace(known, daemonic=True)

    decision = every_decision(known)[name]

    assert decision.value == value
    assert decision.reason == f"{variable} asks for it"


def test_what_is_asked_for_in_code_wins_over_the_environment():
    known = facts(environment={"LOADERKIT_NUM_WORKERS": "3"})

    decision = choose_num_workers(known, asked(num_workers=1))

    assert (decision.value, decision.reason) == (1, "you asked for it")


def test_workers_take_at_most_half_of_the_memory_that_is_left():
    """A worker holds the batch it makes and two that wait, and its own pages."""
    for start_method, own_bytes in (("fork", FORKED_BYTES), ("spawn", SPAWNED_BYTES)):
        worker_bytes = own_bytes + 3 * SLOW.batch_bytes
        for count in (3, 5):
            known = facts(
                host={"available_bytes": 2 * count * worker_bytes},
                start_method=start_method,
            )
            less = facts(
                host={"available_bytes": 2 * count * worker_bytes - 2},
                start_method=start_method,
            )

            assert choose_num_workers(known, NOTHING_ASKED).value == count
            assert choose_num_workers(less, NOTHING_ASKED).value == count - 1


def test_pressure_allows_one_worker_from_ten_percent_on():
    numbers = [
        choose_num_workers(
            facts(host={"pressure": pressure}, measured=None), NOTHING_ASKED
        ).value
        for pressure in (10.0, 10.1)
    ]

    assert numbers == [2, 1]


def test_the_rate_is_that_of_what_is_slowest():
    """Making takes 204 ms with sending, and taking 4.3 ms with waking up."""
    taking_s = 0.0043
    for cpus, workers in itertools.product((1, 2, 100), (1, 2, 60)):
        known = facts(host={"cpus": cpus})
        slowest_s = max(taking_s, 0.204 / workers, (0.204 + taking_s) / cpus)

        assert batches_per_s(known, workers) == pytest.approx(1 / slowest_s)
    assert batches_per_s(facts(), 0) == pytest.approx(5)


def test_ranks_have_a_whole_number_of_processors_each():
    three_of_eight = facts(host={"cpus": 8, "local_ranks": 3})
    two = facts(host={"cpus": 2})

    assert batches_per_s(three_of_eight, 2) == batches_per_s(two, 2)
    many = facts(host={"cpus": 1, "local_ranks": 8})
    assert batches_per_s(many, 2) == batches_per_s(facts(host={"cpus": 1}), 2)


@pytest.mark.parametrize(("method", "start_s"), [("fork", 0.05), ("spawn", 4.0)])
@pytest.mark.parametrize("workers", [1, 4])
def test_workers_are_kept_where_starting_them_takes_a_hundredth_of_an_epoch(
    method, start_s, workers
):
    known = facts()
    rate = batches_per_s(known, workers)
    batches = round(100 * workers * start_s * rate)

    decisions = [
        choose_persistent_workers(
            known, NOTHING_ASKED, num_workers=workers, start_method=method, batches=n
        )
        for n in (batches - 1, batches + 1)
    ]

    assert [decision.value for decision in decisions] == [True, False]
    for decision in decisions:
        assert decision.reason.startswith("an epoch takes")
        assert "starting workers" in decision.reason


@pytest.mark.parametrize("known", [facts(measured=None), facts()])
def test_forked_workers_of_an_unknown_epoch_end_with_it(known):
    batches = None if known.measured else 10
    for method, is_kept in (("fork", False), ("spawn", True)):
        decision = choose_persistent_workers(
            known, NOTHING_ASKED, num_workers=2, start_method=method, batches=batches
        )

        assert decision.value is is_kept
        assert (
            decision.reason == f"starting takes {'100 ms' if not is_kept else '8.00 s'}"
        )


@pytest.mark.parametrize(("method", "start_s"), [("fork", 0.05), ("spawn", 4.0)])
def test_workers_of_a_store_that_is_not_here_are_kept_for_short_epochs(method, start_s):
    """The next run finds the shards, measures, and would keep them too."""
    nbytes = round(100 * 2 * start_s * 2e9)

    decisions = [
        choose_persistent_workers(
            facts(measured=None, later_epoch_bytes=later_epoch_bytes),
            NOTHING_ASKED,
            num_workers=2,
            start_method=method,
            batches=10,
        )
        for later_epoch_bytes in (nbytes - 10, nbytes + 10)
    ]

    assert [decision.value for decision in decisions] == [True, False]
    for decision in decisions:
        assert decision.reason.startswith("a later epoch reads ")


@pytest.mark.parametrize(
    ("num_workers", "prefetch_factor", "read_ahead"), [(2, 3, 0), (0, None, 6)]
)
def test_page_locked_batches_take_at_most_a_tenth_of_the_memory(
    num_workers, prefetch_factor, read_ahead
):
    """One for each that waits and one in use, each rounded up to a power of two."""
    batch_bytes = 32 * MIB
    assert SLOW.batch_bytes == batch_bytes
    needed_bytes = (6 + 1) * batch_bytes
    for available_bytes, is_pinned in (
        (10 * needed_bytes + 10, True),
        (10 * needed_bytes - 10, False),
    ):
        decision = choose_pin_memory(
            facts(device=CUDA, host={"available_bytes": available_bytes}),
            NOTHING_ASKED,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            read_ahead=read_ahead,
        )

        assert decision.value is is_pinned
        assert decision.reason.startswith("224 MiB page-locked of 224 MiB")


def test_batches_ahead_take_a_twentieth_of_the_memory_and_a_gibibyte_at_most():
    factors = [
        choose_prefetch_factor(
            facts(host={"available_bytes": available_bytes}, largest_bytes=largest),
            NOTHING_ASKED,
            num_workers=2,
        ).value
        for available_bytes, largest in (
            (20 * 4 * 100 * MIB + 20, 100 * MIB),
            (20 * 4 * 100 * MIB - 20, 100 * MIB),
            (1000 * GIB, GIB // 4),
            (1000 * GIB, GIB // 4 + 1),
            (1 * GIB, 9 * GIB),
        )
    ]

    assert factors == [2, 1, 2, 1, 1]


DATABASE = ForkHazard("dataset.database (Connection)", "file")


def test_what_cannot_be_sent_is_forked_where_that_can_be():
    known = facts(unsendable="a lambda", start_method="spawn")

    assert choose_num_workers(known, NOTHING_ASKED).value > 0
    decision = choose_start_method(known, NOTHING_ASKED, num_workers=1)
    assert decision.value == "fork"
    assert decision.reason == "'spawn' is not possible: a lambda"


@pytest.mark.parametrize(
    "changes",
    [
        {"device": CUDA},
        {"start_methods": ("spawn",)},
        {"fork_is_sound": False},
        {"fork_hazard": DATABASE},
        {"environment": {"LOADERKIT_MULTIPROCESSING_CONTEXT": "spawn"}},
    ],
    ids=["device in use", "no fork", "unsound fork", "open database", "variable"],
)
def test_what_can_neither_be_sent_nor_forked_is_read_here(changes):
    known = facts(
        unsendable="a lambda", sending_fix="def f", start_method="spawn", **changes
    )

    decision = choose_num_workers(known, NOTHING_ASKED)

    assert decision.value == 0
    assert decision.reason == "workers cannot start: a lambda"
    with pytest.raises(LoaderError, match="No worker can start by 'spawn'") as caught:
        choose_start_method(known, NOTHING_ASKED, num_workers=1)
    assert caught.value.why == "a lambda"
    assert caught.value.fix == "def f; or num_workers=0"


def test_workers_that_are_forked_in_place_of_spawned_ones_count_as_forked():
    close = dataclasses.replace(
        SLOW, fetch_s=0.0095, send_s=0.001, receive_s=0.0066, batch_bytes=MIB
    )
    spawned = facts(measured=close, start_method="spawn")
    forked = dataclasses.replace(spawned, unsendable="a lambda")

    assert choose_num_workers(spawned, NOTHING_ASKED).value == 0
    assert choose_num_workers(forked, NOTHING_ASKED).value > 0


def test_what_does_not_survive_a_fork_is_read_here_unless_workers_are_spawned():
    hazard = ForkHazard("dataset.file (BufferedReader)", "file")
    known = facts(fork_hazard=hazard)

    forked = choose_num_workers(known, NOTHING_ASKED)
    spawned = choose_num_workers(known, asked(multiprocessing_context="spawn"))

    assert forked.value == 0
    assert forked.reason == f"{hazard.reason}; {hazard.fix}"
    assert spawned.value > 0


def test_an_option_that_needs_a_worker_has_one_where_one_can_start():
    needs_one = asked(prefetch_factor=3)
    quick = facts(gathering=True, measured=None)

    decision = choose_num_workers(quick, needs_one)

    assert (decision.value, decision.reason) == (1, "prefetch_factor needs one")
    for nowhere in (
        facts(gathering=True, measured=None, daemonic=True),
        facts(gathering=True, measured=None, host={"available_bytes": 0}),
    ):
        assert choose_num_workers(nowhere, needs_one).value == 0


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_an_epoch_that_is_over_before_a_worker_runs_has_none(start_method):
    known = facts(
        measured=dataclasses.replace(SLOW, fetch_s=0.01), start_method=start_method
    )

    short, long, unknown = (
        choose_num_workers(known, NOTHING_ASKED, batches=batches)
        for batches in (4, 6, None)
    )

    reason = "a whole epoch takes 40.0 ms, starting one worker 50.0 ms"
    assert (short.value, short.reason) == (0, reason)
    assert long == unknown


def test_why_nothing_was_measured_is_told():
    known = facts(measured=None, unmeasured="there are no rows")

    reason = choose_num_workers(known, NOTHING_ASKED).reason

    assert reason.endswith("(not measured: there are no rows)")


def test_batches_leave_workers_as_this_system_can():
    sharing = [
        choose_sharing(facts(parcels=parcels), num_workers=number).value
        for number, parcels in ((0, True), (1, True), (1, False))
    ]

    assert sharing == ["none", "parcel", "torch"]


@pytest.mark.parametrize("value", [0, 3, True, False, None, "fork"])
def test_a_decision_compares_and_hashes_as_its_value(value):
    decision = Decision(value, "because")

    for other in (0, 1, 3, True, None, "fork", "spawn", [3]):
        assert (decision == other) is (value == other)
        assert (other == decision) is (other == value)
        assert (decision != other) is (value != other)
    assert hash(decision) == hash(value)
    assert decision in {value}


def test_decisions_are_equal_with_equal_reasons():
    assert Decision(2, "because") == Decision(2, "because")
    assert Decision(2, "because") != Decision(2, "asked for")


def test_a_decision_counts_as_its_value():
    decision = Decision(3, "because")

    assert (decision > 2, decision >= 3, decision < 4, decision <= 2) == (1, 1, 1, 0)
    assert (decision > 2, decision > Decision(2, "x")) == (True, True)
    assert list(range(decision)) == [0, 1, 2]
    assert (decision + 1, 1 + decision, decision * 2, 7 // decision) == (4, 4, 6, 2)
    assert (decision - Decision(1, "x"), 6 / decision, 7 % decision) == (2, 2, 1)
    assert (int(decision), float(decision), "abcdef"[decision]) == (3, 3.0, "d")
    assert f"{decision:>4}|{decision}" == "   3|3: because"
    assert json.dumps({"workers": int(decision)}) == '{"workers": 3}'


def test_torch_takes_decisions_as_settings():
    plan = build_loader([1, 2, 3], num_workers=0, batch_size=2).plan

    loader = DataLoader([1, 2, 3], 2, num_workers=plan.num_workers)

    assert [batch.tolist() for batch in loader] == [[1, 2], [3]]


def test_an_attribute_of_the_value_is_named():
    with pytest.raises(AttributeError, match=r"value\.upper"):
        Decision("fork", "because").upper  # noqa: B018
