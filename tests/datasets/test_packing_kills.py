"""A few kills of packing processes; tests/soak/kills.py has a thousand.

Here, too: workers that end in other ways than by SIGKILL.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
from failing_calls import files_of
from packing_kills import (
    FORK,
    SHARD_BYTES,
    Gated,
    GatedSpans,
    Kill,
    MadeOnlyHere,
    Slow,
    SlowSpans,
    broken_laws,
    pack_slowly,
    sent_file,
)
from process_family import Family, family_of

from loaderkit import SafeDataset, open_cache, pack
from loaderkit.datasets.pack import PackOptions
from loaderkit.errors import DatasetError


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "c.lk"
    pack(Slow(0), path, workers=0, shard_bytes=300_000)
    return files_of(path)


@pytest.mark.slow
def test_the_next_run_of_a_stream_ends_the_same_whoever_was_killed(
    tmp_path, every_case
):
    chance, ends = random.Random(0), set()
    kills = 7 if every_case else 4
    whole, path = tmp_path / "whole.lk", tmp_path / "c.lk"
    pack(SlowSpans(0.002), whole, spans=6, workers=0, shard_bytes=SHARD_BYTES)

    for number in range(kills):
        kill = Kill(2, "fork", number * 0.3 / kills, chance.random(), spans=6)

        ended, broken = broken_laws(path, kill, files_of(whole))

        ends.add(ended)
        assert broken == []
    assert ends != {"ok"}, "every kill came too late to hit a run"


@pytest.mark.slow
def test_any_process_is_killed_at_any_moment_and_the_next_run_ends_the_same(
    tmp_path, wanted, every_case
):
    chance, ends = random.Random(0), set()
    kills = 14 if every_case else 7
    for number in range(kills):
        moment_s = number * 0.35 / kills
        kill = Kill(chance.choice([1, 2, 4]), "fork", moment_s, chance.random())

        ended, broken = broken_laws(tmp_path / "c.lk", kill, wanted)

        ends.add(ended)
        assert broken == []
    assert ends != {"ok"}, "every kill came too late to hit a run"


def test_a_run_that_leaves_an_orphan_would_be_seen():
    def leave_an_orphan():
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)

    run = FORK.Process(target=leave_an_orphan)
    run.start()
    while len(processes := family_of(run.pid)) < 2:
        time.sleep(0.01)
    run.kill()
    run.join()

    alive = Family(run.pid, processes).living()
    processes[1].kill()
    assert alive == [processes[1]]


class Ends(SafeDataset):
    """A dataset whose worker ends in the middle."""

    how = "exit"
    held_open = (-1, -1)
    """A pipe: of the test, and of what a worker starts."""

    def keys(self):
        return range(40)

    def load(self, key):
        if key == 30:
            END[self.how]()
        return key


def leave_a_child_behind():
    """What load() started holds the worker's pipes, and outlives it."""
    if os.fork() == 0:
        os.close(Ends.held_open[1])
        os.read(Ends.held_open[0], 1)  # until the test has closed its end
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def without_a_dump(end):
    """End the process, without pytest's pages about where it was."""

    def quietly():
        faulthandler.disable()
        end()

    return quietly


END = {
    "exit": lambda: os._exit(0),
    "segfault": without_a_dump(lambda: ctypes.string_at(0)),
    "abort": without_a_dump(os.abort),
    "terminated": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "child": leave_a_child_behind,
}


@pytest.fixture
def held_open(monkeypatch):
    ends = os.pipe()
    monkeypatch.setattr(Ends, "held_open", ends)
    yield
    for end in ends:
        os.close(end)


@pytest.mark.slow
@pytest.mark.usefixtures("held_open")
@pytest.mark.parametrize("how", END)
def test_a_worker_that_ends_is_told_of_with_its_samples(tmp_path, how):
    dataset = Ends(cache=tmp_path / "c.lk", packing=PackOptions(workers=2))
    dataset.how = how

    ended = "ended" if how == "exit" else "was killed"
    with pytest.raises(DatasetError, match=f"packing worker {ended}") as caught:
        len(dataset)

    assert "workers=1" in caught.value.fix
    assert not list((tmp_path / "c.lk").rglob("*.block"))


class UnpicklableError(ValueError):
    def __init__(self, number, text):
        super().__init__(f"number {number}: {text}")

    def __reduce__(self):
        msg = "cannot be pickled"
        raise TypeError(msg)


class UnprintableError(ValueError):
    def __str__(self):
        msg = "cannot be printed"
        raise RuntimeError(msg)


class Raises(SafeDataset):
    def keys(self):
        return range(40)

    def load(self, key):
        if key == 30:
            raise self.error
        return key


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        UnpicklableError(3, "x"),
        UnprintableError(),
        ValueError("y" * 1_000_000),
        KeyError(3),
    ],
    ids=["unpicklable", "unprintable", "huge", "plain"],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_users_code_names_the_sample(tmp_path, error, workers):
    dataset = Raises(cache=tmp_path / "c.lk", packing=PackOptions(workers=workers))
    Raises.error = error

    with pytest.raises(DatasetError, match="Sample '30'") as caught:
        len(dataset)

    assert type(error).__name__ in str(caught.value)


# KeyboardInterrupt is the user's own, and reaches him as it is.
INTERRUPTED = (None, ["it ended with status 2", "KeyboardInterrupt: "])
ENDINGS = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: ("ended", []),
}


@pytest.mark.slow
@pytest.mark.parametrize("sent", ENDINGS)
def test_a_run_that_is_asked_to_end_leaves_no_process(tmp_path, sent, wanted):
    kill = Kill(2, "fork", 0.0, 0.0, signal=sent, pause_s=0.05, waits_for_workers=True)

    outcome = broken_laws(tmp_path / "c.lk", kill, wanted)

    assert outcome == ENDINGS[sent]


def packed_with_gate(path, kind, **options):
    """The files of an undisturbed run, of samples that wait for a signal."""
    whole = path.with_name("whole.lk")
    sent_file(path).touch()
    pack(kind(sent_file(path), Kill.pause_s), whole, shard_bytes=SHARD_BYTES, **options)
    return files_of(whole)


@pytest.mark.slow
@pytest.mark.parametrize("to_group", [False, True], ids=["process", "group"])
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_an_interrupt_at_any_moment_ends_the_run_and_leaves_no_process(
    tmp_path, workers, to_group, every_case
):
    """Workers are forked within the first 0.1 s, where hooks drop what is raised."""
    chance = random.Random(2 * workers + to_group)
    path = tmp_path / "c.lk"
    wanted = packed_with_gate(path, Gated, workers=0)
    for _ in range(4 if every_case else 2):
        kill = Kill(
            workers,
            "fork",
            chance.random() / 10,
            0.0,
            signal=signal.SIGINT,
            waits_for_signal=True,
            to_group=to_group,
        )

        outcome = broken_laws(path, kill, wanted)

        assert outcome == INTERRUPTED


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupt_at_any_moment_ends_the_run_of_a_stream(
    tmp_path, workers, every_case
):
    chance, path = random.Random(workers), tmp_path / "c.lk"
    wanted = packed_with_gate(path, GatedSpans, spans=6, workers=0)
    for number in range(4 if every_case else 2):
        kill = Kill(
            workers,
            "fork",
            chance.random() / 10,
            0.0,
            spans=6,
            signal=signal.SIGINT,
            waits_for_signal=True,
            to_group=number % 2 == 0,
        )

        outcome = broken_laws(path, kill, wanted)

        assert outcome == INTERRUPTED


@pytest.mark.slow
def test_an_interrupt_that_is_lost_would_be_seen(tmp_path):
    path = tmp_path / "c.lk"
    wanted = packed_with_gate(path, Gated, workers=0)
    no_signal = Kill(1, "fork", 0.0, 0.0, signal=0, waits_for_signal=True)

    assert broken_laws(path, no_signal, wanted) == ("ok", [])


@pytest.mark.slow
def test_a_stopped_worker_is_waited_for_and_goes_on(tmp_path, wanted):
    """Stopping is how people make room on a machine; nothing is lost by it."""
    path = tmp_path / "c.lk"
    kill = Kill(2, "fork", 0, 0, pause_s=0.05)
    run = FORK.Process(target=pack_slowly, args=(path, kill))
    run.start()
    while len(processes := family_of(run.pid)) < 3:
        time.sleep(0.01)
    processes[1].suspend()
    waits_for_it = not Family(run.pid).wait_while(run.is_alive, most_idle_looks=25)
    processes[1].resume()
    run.join()

    assert waits_for_it
    assert run.exitcode == 0
    assert files_of(path) == wanted


@pytest.mark.slow
def test_of_two_packers_one_is_killed_and_the_other_ends_the_work(tmp_path, wanted):
    path = tmp_path / "c.lk"
    kill = Kill(1, "fork", 0, 0)
    first, second = (
        FORK.Process(target=pack_slowly, args=(path, kill)) for _ in range(2)
    )
    first.start()
    while not (path / ".building").exists():
        time.sleep(0.01)
    second.start()
    time.sleep(0.1)  # the second waits, as a rule; it must go well at any moment
    first.kill()
    first.join()
    second.join()

    assert second.exitcode == 0
    assert files_of(path) == wanted


class Local(Slow):
    """Cannot be pickled."""

    def __init__(self):
        super().__init__(0)
        self.function = lambda: None


class Database(Local):
    """Cannot be pickled, and does not survive a fork."""

    def __init__(self):
        super().__init__()
        self.database = sqlite3.connect(":memory:")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.database.close()


@pytest.fixture
def spawning():
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("spawning")
def test_a_dataset_that_cannot_be_sent_to_workers_is_told(tmp_path):
    refused = pytest.raises(DatasetError, match="can start by 'spawn'")
    with Database() as dataset, refused as caught:
        pack(dataset, tmp_path / "c.lk", workers=1)

    assert caught.value.why.startswith("dataset._dataset.function: ")
    assert "workers=0" in caught.value.fix
    with pytest.raises(ValueError, match="There is no cache at"):
        open_cache(tmp_path / "c.lk")


@pytest.mark.usefixtures("spawning")
def test_a_dataset_that_cannot_be_sent_is_packed_here_where_no_workers_were_asked_for(
    tmp_path, caplog
):
    with Database() as dataset:
        pack(dataset, tmp_path / "c.lk")

    pack(Local(), tmp_path / "wanted.lk", workers=0)
    assert files_of(tmp_path / "c.lk") == files_of(tmp_path / "wanted.lk")
    assert "packing without workers" in caplog.text


@pytest.mark.usefixtures("spawning")
@pytest.mark.parametrize("workers", [None, 1])
def test_a_dataset_that_cannot_be_sent_is_packed_by_forked_workers_where_they_can_be(
    tmp_path, caplog, workers
):
    pack(Local(), tmp_path / "c.lk", workers=workers)

    pack(Local(), tmp_path / "wanted.lk", workers=0)
    assert files_of(tmp_path / "c.lk") == files_of(tmp_path / "wanted.lk")
    assert "packing by forked workers" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("spawning")
def test_a_dataset_that_cannot_be_unpickled_in_a_worker_is_told(tmp_path):
    """What it is sent looks sound here, and cannot be made again there."""
    words = "could not be unpickled in a packing worker: OSError: this machine's"
    with pytest.raises(DatasetError, match=words) as caught:
        pack(MadeOnlyHere(), tmp_path / "c.lk", workers=1)

    assert "packing_kills.py" in caught.value.why
    assert "workers=0" in caught.value.fix
