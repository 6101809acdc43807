"""A pack under system calls that fail, end the process, or do half of what was asked.

The long version tries them all: tests/soak/failing_calls.py.
"""

import collections
import errno
import os
import random
import re
import resource
import shutil
import signal
import time
from dataclasses import replace

import failing_calls
import filelock
import killed_steps
import pytest
from cache_jobs import Concat, Extend, Pull, Push, moved, samples_in_order
from failing_calls import (
    FOREVER,
    Action,
    Fault,
    Pack,
    Runner,
    Scenario,
    broken_laws,
    files_of,
)
from test_reliability import FORK, in_child

from loaderkit import open_cache, pack
from loaderkit.errors import CacheError
from loaderkit.testing import assert_same

# Jobs run in a process that imports PyG: 4 s of CPU.
pytestmark = [pytest.mark.needs("cc"), pytest.mark.slow]


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    with Runner(tmp_path_factory.mktemp("runner")) as runner:
        yield runner


@pytest.fixture(scope="module")
def scenarios(runner, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenarios")
    scenarios = failing_calls.make_scenarios(runner, folder, [(None, False)])
    return {scenario.name.partition(",")[0]: scenario for scenario in scenarios}


# Where in the run, from 0 to 1: reading what is there, the shards, the last steps.
CASES = [
    ("resumed", Fault(Action.FAIL, errno.EIO), 0.1, 0),
    ("resumed", Fault(Action.FAIL, errno.EACCES), 0.2, 0),
    ("resumed over old", Fault(Action.FAIL, errno.ESTALE), 0.15, 0),
    ("resumed over old", Fault(Action.KILL), 0.9, 0),
    ("not tidied up", Fault(Action.FAIL, errno.EIO), 0.03, 0),
    ("not tidied up", Fault(Action.KILL), 0.05, 0),
    ("fresh", Fault(Action.FAIL, errno.ENOSPC), 0.4, 2),
    ("fresh", Fault(Action.FAIL, errno.ENOSPC, last=FOREVER), 0.2, 2),
    ("fresh", Fault(Action.SHORT, last=FOREVER), 0.0, 2),
    ("overwrite", Fault(Action.FAIL, errno.EINTR), 0.6, 0),
    ("overwrite", Fault(Action.FAIL, errno.EDQUOT, last=FOREVER), 0.7, 0),
    ("overwrite", Fault(Action.KILL), 0.97, 0),
]


@pytest.mark.parametrize(("state", "fault", "where", "workers"), CASES)
def test_a_failing_call_is_told_and_loses_nothing(
    runner, scenarios, tmp_path, state, fault, where, workers
):
    scenario = scenarios[state]
    calls = failing_calls.count_calls(runner, scenario, workers, tmp_path / "c.lk")
    number = max(1, round(where * calls))
    fault = replace(fault, first=number, last=max(number, fault.last))

    outcome, broken = broken_laws(runner, scenario, fault, workers, tmp_path / "c.lk")

    assert outcome.hits
    assert broken == []


def test_a_note_that_cannot_be_read_is_not_thrown_away(runner, scenarios, tmp_path):
    """Each call by which a run looks at what an earlier one finished, all of them."""
    scenario, path = scenarios["resumed"], tmp_path / "c.lk"
    failing_calls.copy_tree(scenario.before, path)
    log = runner.run(replace(scenario.pack, path=str(path))).log
    reads = [at for at, line in enumerate(log, 1) if "0001.json" in line]

    for at in reads[:4]:
        fault = Fault(Action.FAIL, errno.EIO, first=at, last=at)
        outcome, broken = broken_laws(runner, scenario, fault, 0, path)
        assert (outcome.hits, broken) == (1, [])


def test_what_libhdf5_cannot_read_back_is_an_error_of_the_disk(
    runner, scenarios, tmp_path
):
    """libhdf5 sees zeros there, and says that the file is broken."""
    scenario, path = scenarios["fresh"], tmp_path / "c.lk"
    log = runner.run(replace(scenario.pack, path=str(path))).log
    shards = [name for name in map(file_of_shard, log) if name]
    calls = [
        at
        for at, line in enumerate(log, 1)
        if file_of_shard(line) == shards[0] and line.split(" ")[1] in {"seek", "read"}
    ]
    assert len(calls) > 50

    for at in calls[::15]:
        fault = Fault(Action.FAIL, errno.EIO, first=at, last=at)
        outcome, broken = broken_laws(runner, scenario, fault, 0, path)
        assert (outcome.status, outcome.hits, broken) == ("CacheError", 1, [])


def test_a_worker_that_is_killed_at_any_rename_of_a_stream_leaves_nothing_half_done(
    runner, tmp_path
):
    """Its task is done again, and finds notes of shards: each stands for a file."""
    path = tmp_path / "c.lk"
    pack = Pack(str(path), factor=2, workers=2, spans=2)
    assert runner.run(pack).status == "ok"
    new = samples_in_order(pack)
    scenario = Scenario("stream", pack, None, files_of(path), None, new)
    endings = collections.Counter()

    for at in range(1, runner.run(pack, Fault(kinds="rename")).calls + 1):
        fault = Fault(Action.KILL, first=at, last=at, kinds="rename")
        outcome, broken = broken_laws(runner, scenario, fault, 2, path)
        assert (outcome.hits, broken) == (1, [])
        endings[outcome.status] += 1

    # Of the packing process, and of workers: in each span two shards and their notes,
    # and one shard that is numbered again.
    assert endings["killed 9"] > 2
    assert endings["ok"] >= 8


@pytest.mark.parametrize(
    ("name", "part"),
    [
        # While it removes what is needed no more.
        ("pull", 0.95),
        ("extend", 0.9),
        ("pack to a store", 0.92),
        # While it writes the manifest.
        ("mirror", 0.2),
    ],
)
def test_whatever_process_dies_a_cache_is_whole_or_absent(runner, tmp_path, name, part):
    """The long version goes through all steps of all jobs."""
    scenario = killed_steps.set_up(runner, tmp_path, killed_steps.SETTINGS[name])
    kills = [round(part * scenario.steps)]

    outcome, broken = killed_steps.broken_step_laws(
        runner, scenario, kills, tmp_path / "case"
    )

    assert (outcome.hits, broken) == (1, [])


# Which call fails, as its line in the log ends; "" for each from a part of the run on.
FAILURES = {
    "the disk is full from half of extend on": ("extend", "", 0.5),
    "the list of what concat has written": ("concat once", "readdir", 0.0),
    "the size of a shard in a store": ("push over old", "/store/00000", 0.0),
}


@pytest.mark.parametrize("name", sorted(FAILURES))
def test_calls_that_fail_in_any_job_are_told_in_our_words(runner, tmp_path, name):
    """And the same job again ends as if nothing had been."""
    setting_name, ending, part = FAILURES[name]
    scenario = killed_steps.set_up(
        runner, tmp_path, killed_steps.SETTINGS[setting_name]
    )
    folder = tmp_path / "case"
    job = moved(scenario.setting.job, "@", folder)
    failing_calls.copy_tree(scenario.before, folder)
    log = runner.run(job, top=folder).log
    kinds = {"readdir", "stat", "open"}
    numbers = [
        number
        for number, line in enumerate(log, 1)
        if line.split(" ")[1] in kinds and ending in line
    ]
    faults = [
        Fault(Action.FAIL, errno.EIO, first=number, last=number)
        for number in numbers[:: max(1, len(numbers) // 4)]
    ]
    if not ending:
        number = round(part * len(log))
        faults = [Fault(Action.FAIL, errno.ENOSPC, first=number, last=FOREVER)]

    endings = set()
    for fault in faults:
        failing_calls.copy_tree(scenario.before, folder)
        outcome = runner.run(job, fault, top=folder)
        endings.add(outcome.status)
        if outcome.status == "CacheError":
            assert "  why: " in outcome.text
            assert "  fix: " in outcome.text

    assert "CacheError" in endings
    assert endings <= {"ok", "CacheError"}
    runner.run(job, top=folder)
    assert killed_steps.what_is_seen(job.path, scenario) == "new"


def test_samples_that_were_added_are_not_added_again_where_tidying_up_fails(
    runner, tmp_path
):
    scenario = killed_steps.set_up(runner, tmp_path, killed_steps.SETTINGS["extend"])
    folder = tmp_path / "case"
    job = moved(scenario.setting.job, "@", folder)
    failing_calls.copy_tree(scenario.before, folder)
    fault = Fault(Action.FAIL, errno.ENOMEM, first=1, last=FOREVER, kinds="rmdir")

    outcome = runner.run(job, fault, top=folder)

    assert (outcome.status, outcome.hits > 0) == ("ok", True)
    assert killed_steps.what_is_seen(job.path, scenario) == "new"


def test_a_shard_that_is_none_and_a_file_that_stays_would_be_seen(runner, tmp_path):
    scenario = killed_steps.set_up(runner, tmp_path, killed_steps.SETTINGS["push"])
    shard = next(name for name in scenario.wanted if name.startswith("store/0"))
    store = scenario.before / "store"
    store.mkdir()
    # A store that shows what it has not: push asks for names and sizes.
    (scenario.before / shard).write_bytes(bytes(len(scenario.wanted[shard])))
    (store / "left").touch()

    _, broken = killed_steps.broken_step_laws(runner, scenario, [], tmp_path / "case")

    assert "a reader sees" in broken[0]
    assert broken[-1] == "other files are left: ['store/left']"


def file_of_shard(line):
    """Name the unfinished shard that a call is about; None for other files."""
    name = line.rpartition("/")[2]
    return name if re.fullmatch(r"\d{5}-[0-9a-f]{32}\.partial", name) else None


def test_a_raw_error_and_a_lost_shard_would_be_seen(runner, scenarios, tmp_path):
    scenario, path = scenarios["resumed"], tmp_path / "c.lk"
    planted = replace(scenario, pack=replace(scenario.pack, reads_around_us=True))
    log = runner.run(replace(planted.pack, path=str(path))).log
    at = next(at for at, line in enumerate(log, 1) if line.endswith("/planted"))
    fault = Fault(Action.FAIL, errno.EIO, first=at, last=at)

    _, broken = broken_laws(runner, replace(planted, before=None), fault, 0, path)

    assert "it ended with OSError" in broken[0]
    failing_calls.copy_tree(scenario.before, path)
    finished = failing_calls.finished_shards(path)
    (path / min(finished)).unlink()
    assert len(finished) == 2
    [lost] = failing_calls.lost_shards(finished, path)
    assert "was not kept" in lost


def test_a_shim_that_fails_nothing_finds_nothing(runner, scenarios, tmp_path):
    outcome, broken = broken_laws(
        runner, scenarios["overwrite"], Fault(), 2, tmp_path / "c.lk"
    )

    assert outcome.status == "ok"
    assert outcome.calls > 200
    assert outcome.hits == 0
    assert broken == []


def test_bytes_are_on_the_disk_before_the_names_that_promise_them(runner, tmp_path):
    path = tmp_path / "new" / "c.lk"

    outcome = runner.run(Pack(str(path)), top=tmp_path)

    assert outcome.status == "ok"
    assert failing_calls.unsynced(outcome.log, path, tmp_path) == []
    # The twin: take out any one sync of a file or of the cache's folder.
    syncs = [at for at, line in enumerate(outcome.log) if " fsync " in line]
    needed = [
        at
        for at in syncs
        if ".partial" in outcome.log[at] and "note." not in outcome.log[at]
    ]
    assert len(needed) > 4
    for at in needed:
        log = outcome.log[:at] + outcome.log[at + 1 :]
        assert failing_calls.unsynced(log, path, tmp_path)


@pytest.mark.parametrize(
    "job",
    [
        Push("@/new/store", "@/c.lk"),
        Pull("@/new/c.lk", "@/c.lk"),
        Concat("@/new/c.lk", ("@/c.lk", "@/c.lk")),
    ],
    ids=lambda job: type(job).__name__.lower(),
)
def test_a_copied_cache_is_on_the_disk_before_its_manifest(runner, tmp_path, job):
    job = moved(job, "@", tmp_path)
    assert runner.run(Pack(f"{tmp_path}/c.lk")).status == "ok"

    outcome = runner.run(job, top=tmp_path)

    assert outcome.status == "ok"
    keeps_notes = not isinstance(job, Concat)
    problems = failing_calls.unsynced(
        outcome.log, job.path, tmp_path, needs_notes=keeps_notes
    )
    assert problems == []


def cut_power(folder, chance, older):
    """Do to a folder what a power cut may: notes are damaged, names of links go.

    Names that were waited for stay: those in ``.building``, and files of before.
    """
    for note in sorted((folder / ".building").glob("0*.json")):
        content = note.read_bytes()
        damaged = [content, b"", content[: len(content) // 2], bytes(len(content))]
        note.write_bytes(chance.choice(damaged))
    for link in sorted(folder.glob("*.h5")):
        if link.name not in older and chance.random() < 0.5:
            link.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("has_older", [False, True])
def test_links_whose_notes_a_power_cut_has_taken_are_made_again(
    runner, tmp_path, has_older
):
    """Notes of links wait together for the disk, and their bytes do not."""
    packed, joined = tmp_path / "c.lk", tmp_path / "j.lk"
    job = Concat(str(joined), (str(packed), str(packed)))
    assert runner.run(Pack(str(packed))).status == "ok"
    log = runner.run(job, top=tmp_path).log
    renamed = [line for line in log if line.split(" ")[1] == "rename"]
    names = [line.rpartition("/")[2] for line in renamed]
    wanted, tidy = list(open_cache(joined)), files_of(joined)
    links = [at for at, name in enumerate(names, 1) if name.endswith(".h5")]
    assert len(links) > 4

    for at in [links[len(links) // 2], names.index("manifest.json") + 1]:
        for seed in range(4):
            shutil.rmtree(joined)
            if has_older:  # a cache that stays until the new one is whole
                pack(list(range(3)), joined, workers=0)
            older = files_of(joined) if has_older else {}
            fault = Fault(Action.KILL, first=at, last=at, kinds="rename")
            assert runner.run(job, fault).status == "killed 9"
            cut_power(joined, random.Random(seed), older)

            assert runner.run(job).status == "ok"

            assert_same(list(open_cache(joined)), wanted)
            assert files_of(joined).keys() == tidy.keys()

    # The twin: what is waited for, the markers' names, is what links are found by.
    shutil.rmtree(joined)
    assert runner.run(job, fault).status == "killed 9"
    for file in (joined / ".building").glob("*"):
        if file.name != "plan.json":
            file.unlink()
    assert runner.run(Concat(str(joined), (str(packed),))).status == "ok"
    assert len(files_of(joined)) > len(files_of(packed))


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_gets_a_lock_that_is_a_file(
    runner, tmp_path, error
):
    path = tmp_path / "c.lk"
    fault = Fault(Action.FAIL, error, first=1, last=FOREVER, kinds="flock")

    for job in (Pack(str(path)), Extend(str(path))):
        outcome = runner.run(job, fault)
        assert (outcome.status, outcome.hits > 0) == ("ok", True)

    assert not list(path.glob("*-soft"))
    assert len(open_cache(path)) == 2 * failing_calls.COUNT


def hold_soft_lock(path, ready):
    lock = filelock.SoftFileLock(path)
    lock.acquire()  # let go of when nobody holds the object
    ready.set()
    time.sleep(600)
    lock.release()


def test_a_lock_file_of_a_dead_process_holds_nobody_up(runner, tmp_path):
    path, ready = tmp_path / "c.lk", FORK.Event()
    path.mkdir()
    holder = FORK.Process(target=hold_soft_lock, args=(path / ".lock-soft", ready))
    holder.start()
    ready.wait()
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert (path / ".lock-soft").exists()

    fault = Fault(Action.FAIL, errno.ENOLCK, first=1, last=FOREVER, kinds="flock")
    assert runner.run(Pack(str(path)), fault).status == "ok"


def test_an_error_of_another_kind_does_not_lead_to_a_second_lock(runner, tmp_path):
    """A process that took the other lock would pack beside the one that holds this."""
    path = tmp_path / "c.lk"
    fault = Fault(Action.FAIL, errno.EIO, first=1, last=FOREVER, kinds="flock")

    outcome = runner.run(Pack(str(path)), fault)

    assert outcome.status == "CacheError"
    assert not any(".lock-soft" in line for line in outcome.log)


def pack_with_file_limit(path, limit, compression):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    message = ""
    try:
        pack(
            failing_calls.samples(6, 1),
            path,
            workers=0,
            compression=compression,
            shard_bytes=200_000,
        )
    except CacheError as error:
        message = str(error)
    assert re.search(r"could not be written|cannot be packed", message)
    assert "fix: " in message


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_disk_that_is_full_at_any_size_is_an_error_of_ours(tmp_path, compression):
    for limit in [0, 100, 3000, 10_000, 15_000]:
        path = tmp_path / f"{limit}.lk"
        assert in_child(pack_with_file_limit, path, limit, compression) == 0
        again = pack(
            failing_calls.samples(6, 1),
            path,
            workers=0,
            overwrite=True,
            compression=compression,
            shard_bytes=200_000,
        )
        assert len(again) == 6
        assert not (path / ".building").exists()


def overwrite_again_and_again(path, times):
    for number in range(times):
        pack([number] * 20, path, workers=0, overwrite=True, shard_bytes=300)


def test_a_reader_sees_one_generation_while_it_is_packed_again_and_again(tmp_path):
    path = tmp_path / "c.lk"
    overwrite_again_and_again(path, 1)
    writer = FORK.Process(target=overwrite_again_and_again, args=(path, 15))
    writer.start()
    whole, refusals = 0, []
    while writer.is_alive():
        try:
            dataset = open_cache(path)
            rows = [dataset[row] for row in range(20)]
        except CacheError as error:
            refusals.append(str(error))
        else:
            assert len(set(rows)) == 1
            whole += 1

    writer.join()
    assert writer.exitcode == 0
    assert whole
    assert [text for text in refusals if "packed again" not in text] == []
