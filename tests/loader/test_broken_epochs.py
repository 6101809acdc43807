"""Epochs that are broken off: no sample is lost to a state that is saved afterwards.

A worker is killed, Ctrl-C comes between any two instructions of the loader, or workers
cannot start.  Whoever catches the error and saves ``state_dict()``, to go on in this
process or in another, gets every sample that the loop was not given, and each once.
"""

import dis
import gc
import json
import multiprocessing.util
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import loaderkit
from loaderkit import build_loader
from loaderkit.errors import LoaderError

SAMPLES = 12
LIBRARY = str(Path(loaderkit.__file__).parent)


class Numbers(Dataset):
    """Reading one of the samples kills the worker that reads it, once."""

    def __init__(self, kills=None):
        self.kills = kills

    def __len__(self):
        return SAMPLES

    def __getitem__(self, row):
        if self.kills is not None and get_worker_info() is not None:
            self.kills.at(row)
        return torch.tensor(row)


class Kills:
    """Kills the process that comes to a sample, unless one was killed already.

    Args:
        row: The sample.
        note: File that is there once a process was killed.
    """

    def __init__(self, row, note):
        self.row, self.note = row, note

    def at(self, row):
        if row == self.row and not self.note.exists():
            self.note.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Stream(IterableDataset):
    """Each worker reads its share of the samples."""

    def __init__(self, kills=None):
        self.samples = Numbers(kills)

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.samples[row] for row in range(first, SAMPLES, step))


class StatefulStream(Stream):
    """Says itself how far it has come."""

    position = 0

    def __iter__(self):
        for number, sample in enumerate(super().__iter__()):
            if number >= self.position:
                self.position = number + 1
                yield sample
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


KINDS = [Numbers, Stream, StatefulStream]


def samples_of(batches):
    return [sample for batch in batches for sample in batch.tolist()]


def sent(state):
    """Give a state as it comes out of a file."""
    return json.loads(json.dumps(state))


def check_all_once(samples):
    assert Counter(samples) == Counter(range(SAMPLES))


def go_on(make, state):
    """Give the samples that a loader in another process would go on with."""
    resumed = make()
    resumed.load_state_dict(sent(state))
    return samples_of(resumed)


# torch raises where the signal comes.  In a destructor, such as that of the iterator of
# the epoch before, Python drops it with a warning, and the next batch tells the death.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    batch_size=st.integers(1, 4),
    row=st.integers(0, SAMPLES - 1),
    options=st.fixed_dictionaries(
        {"persistent_workers": st.booleans(), "in_order": st.booleans()}
    ),
    epochs_before=st.integers(0, 1),
    told_in_the_loop=st.booleans(),
)
def test_a_state_saved_after_a_workers_death_goes_on_with_all_that_was_not_given(
    tmp_path_factory, kind, batch_size, row, options, epochs_before, told_in_the_loop
):
    note = tmp_path_factory.mktemp("killed") / "note"
    options |= {"batch_size": batch_size, "num_workers": 2, "seed": 0}
    loader = build_loader(kind(Kills(row, note)), **options)
    note.touch()
    for _ in range(epochs_before):
        check_all_once(samples_of(loader))
    note.unlink()

    given = []

    def read_all():
        for batch in loader:
            # A death is told wherever the main thread is, but not before this call is
            # done: CPython looks for signals behind it.
            given.append(batch)
            if told_in_the_loop:
                time.sleep(0.1)

    with pytest.raises(LoaderError, match="died"):
        read_all()
    state = loader.state_dict()

    assert state["epoch"] == epochs_before
    check_all_once(
        samples_of(given) + go_on(lambda: build_loader(kind(), **options), state)
    )
    # The same loader has an epoch after it, with new workers.
    check_all_once(samples_of(loader))


@pytest.mark.slow
@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_so_does_the_loader_itself(tmp_path, kind, persistent_workers):
    loader = build_loader(
        kind(Kills(7, tmp_path / "note")),
        batch_size=2,
        num_workers=2,
        persistent_workers=persistent_workers,
    )
    given = []
    with pytest.raises(LoaderError, match="died"):
        given.extend(loader)

    loader.load_state_dict(loader.state_dict())

    check_all_once(samples_of(given) + samples_of(loader))


def worker_pids():
    children = psutil.Process().children()
    return {child.pid for child in children if child.name() == "pt_data_worker"}


@pytest.mark.slow
@pytest.mark.parametrize("told_in_the_loop", [False, True])
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_after_a_death_the_other_workers_end_with_the_loader_without_a_collection(
    tmp_path, persistent_workers, told_in_the_loop
):
    others = worker_pids()
    gc.disable()  # a worker in a reference cycle lives until a collection
    try:
        loader = build_loader(
            Numbers(Kills(5, tmp_path / "note")),
            batch_size=1,
            num_workers=2,
            persistent_workers=persistent_workers,
        )

        def read_all(loader):
            for _ in loader:
                if told_in_the_loop:
                    time.sleep(0.1)

        with pytest.raises(LoaderError, match="died") as caught:
            read_all(loader)
        del caught, loader

        # Ended, and waited for, or on the way.
        until = time.monotonic() + 20
        while worker_pids() - others and time.monotonic() < until:
            time.sleep(0.05)
        assert not worker_pids() - others
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_death_that_was_told_in_the_loop_is_not_told_again_behind_it(tmp_path):
    loader = build_loader(
        Numbers(Kills(5, tmp_path / "note")),
        batch_size=1,
        num_workers=2,
        persistent_workers=True,
    )

    def read_all():
        for _ in loader:
            time.sleep(0.1)

    with pytest.raises(LoaderError, match="died while it made"):
        read_all()

    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    check_all_once(samples_of(loader))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_worker_that_dies_between_epochs_is_told_once_and_replaced(kind):
    others = worker_pids()
    loader = build_loader(
        kind(), batch_size=2, num_workers=2, persistent_workers=True, seed=0
    )
    check_all_once(samples_of(loader))
    victim = min(worker_pids() - others)

    def kill_and_wait():
        os.kill(victim, signal.SIGKILL)
        time.sleep(20)  # the signal of its end wakes this up

    with pytest.raises(LoaderError, match="was kept for the next epoch died") as caught:
        kill_and_wait()

    assert "SIGKILL" in caught.value.why
    # torch's handler raises anew at the end of any child process.
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    state = loader.state_dict()
    check_all_once(samples_of(loader))
    check_all_once(
        go_on(lambda: build_loader(kind(), batch_size=2, num_workers=2), state)
    )


class CrashesAtItsEnd(IterableDataset):
    """A worker gives all its samples, and is killed as its process ends.

    So does a library whose clean-up crashes.
    """

    def __iter__(self):
        self.end = multiprocessing.util.Finalize(
            None, os.kill, args=(os.getpid(), signal.SIGKILL), exitpriority=0
        )
        return iter(Stream())


def read_whole(loader):
    check_all_once(samples_of(loader))


def leave_the_loop(loader):
    for _ in loader:
        break


def leave_a_cycle(loader):
    iterator = iter(loader)
    next(iterator)
    cycle = [iterator]
    cycle.append(cycle)
    del iterator, cycle
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("read", [read_whole, leave_the_loop, leave_a_cycle])
def test_a_worker_that_crashes_as_it_ends_is_no_news(
    monkeypatch, read, persistent_workers
):
    others = worker_pids()
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    loader = build_loader(
        CrashesAtItsEnd(),
        batch_size=2,
        num_workers=2,
        persistent_workers=persistent_workers,
    )

    read(loader)
    read_whole(loader)
    del loader
    gc.collect()

    assert not dropped
    assert not worker_pids() - others


class Interrupt:
    """Raises KeyboardInterrupt at one of the places where Python handles signals.

    CPython looks for them as a function begins, behind a call, and before a loop goes
    on; a trace function is called before each instruction, and may raise there.

    Args:
        place: Which of the places inside of these files, counted as they are reached;
            None raises nowhere and counts them.
        inside: How the names of the files begin.
    """

    def __init__(self, place=None, inside=LIBRARY):
        self.place, self.places, self.inside = place, 0, inside

    def __enter__(self):
        self._last_instruction = {}
        # Python 3.12 tells of instructions only if a frame asked for them before.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, _):
        code = frame.f_code
        # Python drops what is raised in a destructor: nobody has broken off anything.
        if not code.co_filename.startswith(self.inside) or code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            name = dis.opname[code.co_code[frame.f_lasti]]
            before = self._last_instruction.get(frame, "RESUME")
            self._last_instruction[frame] = name
            if "CALL" in before or before in {"RESUME", "JUMP_BACKWARD"}:
                self.places += 1
                if self.places - 1 == self.place:
                    raise KeyboardInterrupt
        return self._trace


def broken_off(loader, batches, place):
    """Read some batches, and interrupt the beginning or the next batch.

    Args:
        batches: How many the loop is given before; None interrupts ``iter(loader)``.
        place: Where it is interrupted; None nowhere.

    Returns:
        The samples that were given, and the number of places.
    """
    interrupt = Interrupt(place)
    given = []
    try:
        if batches is None:
            with interrupt:
                iterator = iter(loader)
        else:
            iterator = iter(loader)
            given += [next(iterator) for _ in range(batches)]
            with interrupt:
                given.append(next(iterator))
    except KeyboardInterrupt:
        pass
    return samples_of(given), interrupt.places


@pytest.mark.slow
@pytest.mark.parametrize("batches", [None, 0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_anywhere_loses_nothing(request, kind, batches):
    def make():
        return build_loader(kind(), batch_size=3, num_workers=0, seed=0)

    given, places = broken_off(make(), batches, None)
    assert places > 10
    assert len(given) == (0 if batches is None else 3 * batches + 3)

    # Every eighth; all of them with --every-case.
    step = 1 if request.config.getoption("every_case") else 8
    for place in range(KINDS.index(kind), places, step):
        loader = make()
        given, _ = broken_off(loader, batches, place)
        check_all_once(given + go_on(make, loader.state_dict()))


class CountsFirst:
    """A loader that counts a batch, and then does something else before it gives it."""

    batches_counted = 0

    def __next__(self):
        self.batches_counted += 1
        return self.look_at(torch.tensor([0]))

    def look_at(self, batch):
        return batch


def test_a_loader_that_counts_a_batch_first_would_be_seen_to_lose_it():
    def is_lost(place):
        loader = CountsFirst()
        try:
            with Interrupt(place, inside=__file__):
                next(loader)
        except KeyboardInterrupt:
            return loader.batches_counted == 1
        return False

    assert any(is_lost(place) for place in range(4))


# Where the second worker could not start, torch's iterator is half made, and fails in
# its destructor: it has no "_workers_status" yet.  The loader has ended the first one.
drops_half_made_iterators = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


def check_workers_cannot_start(loader):
    """Begin an epoch in a process that may open two files more."""
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is of a file's number: those that are free below the highest would do.
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers = []
    while not fillers or fillers[-1] < highest:
        fillers.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 3, most_files[1]))
    try:
        with pytest.raises(LoaderError, match="could not start"):
            iter(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most_files)
        for filler in fillers:
            os.close(filler)


@pytest.mark.slow
@drops_half_made_iterators
@pytest.mark.parametrize("given_before", [0, 2])
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_that_cannot_start_take_no_epoch_with_them(
    given_before, persistent_workers
):
    loader = build_loader(
        Numbers(),
        batch_size=2,
        shuffle=True,
        num_workers=2,
        seed=0,
        persistent_workers=persistent_workers,
    )
    iterator = iter(loader)
    given = [next(iterator) for _ in range(given_before)]
    loader.load_state_dict(loader.state_dict())
    state = loader.state_dict()

    check_workers_cannot_start(loader)

    assert loader.state_dict() == state
    check_all_once(samples_of(given) + samples_of(loader))


class FailsOnce:
    """Raises an error where it is called first, in whichever process.

    Args:
        error: One like it is raised: a parameter of a test lives as long as all tests,
            and would hold the loader by its traceback.
        note: File that is there once it was raised.
    """

    def __init__(self, error, note):
        self.error, self.note = error, note

    def __call__(self, _=None):
        if not self.note.exists():
            self.note.touch()
            raise type(self.error)(*self.error.args)


class BatchesThatFail:
    """A batch sampler."""

    def __init__(self, fail):
        self.fail = fail

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        self.fail()
        return ([row] for row in range(SAMPLES))


class FailsToBegin(Stream):
    def __init__(self, fail):
        super().__init__()
        self.fail = fail

    def __iter__(self):
        if get_worker_info().id == 0:
            self.fail()
        return super().__iter__()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_users_in_torchs_words_is_no_death(tmp_path, workers):
    """Told as the death of a worker, it had neither its type's text nor its place."""
    error = RuntimeError("DataLoader worker (pid 1) exited: mine")
    sampler = BatchesThatFail(FailsOnce(error, tmp_path / "note"))
    loader = build_loader(Numbers(), batch_sampler=sampler, num_workers=workers)

    with pytest.raises(RuntimeError, match="mine") as caught:
        list(loader)

    assert "died" not in str(caught.value)
    check_all_once(samples_of(loader))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["batch_sampler", "worker_init_fn", "begin"])
@pytest.mark.parametrize("error", [ValueError("mine"), StopIteration("mine")])
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_what_fails_as_an_epoch_begins_is_told_as_itself_and_once(
    tmp_path, place, error, persistent_workers
):
    if place == "batch_sampler" and isinstance(error, StopIteration):
        error = MemoryError("mine")  # that one ends a loop over any sampler
    fail = FailsOnce(error, tmp_path / "note")
    options = {"num_workers": 2, "persistent_workers": persistent_workers}
    if place == "batch_sampler":
        loader = build_loader(Numbers(), batch_sampler=BatchesThatFail(fail), **options)
    elif place == "worker_init_fn":
        loader = build_loader(Numbers(), batch_size=2, worker_init_fn=fail, **options)
    else:
        loader = build_loader(FailsToBegin(fail), batch_size=2, **options)
        # Workers that are kept begin a second epoch elsewhere in torch.
        fail.note.touch()
        check_all_once(samples_of(loader))
        fail.note.unlink()

    # Once would do where the error is; a death in its place came in one of three.
    for _ in range(4 if place == "batch_sampler" else 1):
        fail.note.unlink(missing_ok=True)
        with pytest.raises(Exception, match="mine") as caught:
            list(loader)
        assert "died" not in str(caught.value)
        if not isinstance(error, StopIteration):
            assert isinstance(caught.value, type(error))

    for _ in range(2):
        check_all_once(samples_of(loader))


@pytest.mark.slow
@drops_half_made_iterators
def test_a_seed_is_not_taken_by_an_epoch_that_cannot_start():
    loader = build_loader(
        Numbers(),
        batch_size=2,
        shuffle=True,
        num_workers=2,
        generator=torch.Generator().manual_seed(0),
    )
    seed = loader.plan.seed.value
    iterator = iter(loader)
    given = [next(iterator)]
    state = loader.state_dict()

    loader.generator = torch.Generator().manual_seed(5)
    check_workers_cannot_start(loader)

    assert loader.state_dict() == state
    check_all_once(samples_of(given) + samples_of(iterator))
    list(loader)
    assert loader.plan.seed.value != seed
