"""The DataLoader that reads: iterations beside each other, and what workers see."""

import copy
import itertools
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from fresh_process import in_fresh_process
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from loaderkit import build_loader
from loaderkit.errors import LoaderError
from loaderkit.loader.worker_deaths import is_lost_with_its_server
from loaderkit.loader.worker_processes import NotingContext
from loaderkit.sending import Outbox

pytestmark = pytest.mark.filterwarnings("ignore:. workers share")


class DrawsOrder(IterableDataset):
    """Nine numbers in an order that is drawn anew in each epoch."""

    def __iter__(self):
        yield from torch.randperm(9).tolist()


def loader_of(kind, **settings_):
    dataset = list(range(9)) if kind == "rows" else DrawsOrder()
    shuffle = {"shuffle": True} if kind == "rows" else {}
    return build_loader(
        dataset, batch_size=2, seed=3, num_workers=1, **shuffle, **settings_
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "stream"])
@pytest.mark.parametrize("draw", [1, pytest.param(7, marks=pytest.mark.slow)])
def test_the_nth_iterator_gives_the_nth_epoch_whatever_runs_beside_it(kind, draw):
    turns = random.Random(draw).choices(range(3), k=9)
    alone = loader_of(kind, persistent_workers=False)
    epochs = [[batch.tolist() for batch in alone] for _ in range(len(turns) + 2)]
    loader = loader_of(kind, persistent_workers=True)
    iterators, given_batches = {}, {}

    # A turn reads a batch of one of three loops, and begins it if it is not there.
    for turn in turns:
        if turn not in iterators:
            iterators[turn] = (len(given_batches), iter(loader))
            given_batches[len(given_batches)] = []
        number, iterator = iterators[turn]
        batch = next(iterator, None)
        if batch is None:
            del iterators[turn]
        else:
            given_batches[number].append(batch.tolist())

    for number, iterator in iterators.values():
        given_batches[number] += [batch.tolist() for batch in iterator]
    iterators.clear()
    following = [batch.tolist() for batch in loader]
    loader.close()

    count = len(given_batches)
    assert list(given_batches.values()) == epochs[:count]
    assert following == epochs[count]


class Used(Dataset):
    """Has what a class of a user's may have, for ``worker_init_fn`` to use."""

    def __init__(self):
        self.start = 1

    def __len__(self):
        return 4

    def __getitem__(self, row):
        return self.start + row

    def __contains__(self, number):
        return number < 4

    def __call__(self):
        return "called"

    def __eq__(self, other):
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self):
        return 7


class UsedStream(Used, IterableDataset):
    def __iter__(self):
        yield from (self.start + row for row in range(4))


def set_start(dataset):
    dataset.start = 5


USES = {
    "an attribute is read": lambda dataset: dataset.start,
    "an attribute is set": set_start,
    "its class": lambda dataset: type(dataset).__name__,
    "isinstance": lambda dataset: isinstance(dataset, Used),
    "vars": lambda dataset: vars(dataset),
    "len": len,
    "in": lambda dataset: (3 in dataset, 9 in dataset),
    "called": lambda dataset: dataset(),
    "equal": lambda dataset: dataset == type(dataset)(),
    "in a table": lambda dataset: {type(dataset)(): "there"}.get(dataset),
    "copied": lambda dataset: copy.copy(dataset) == dataset,
    "pickled": lambda dataset: pickle.loads(pickle.dumps(dataset)) == dataset,
    "joined with another": lambda dataset: type(dataset + dataset).__name__,
    "iterated": lambda dataset: list(itertools.islice(dataset, 2)),
}


class UsesDataset:
    """A ``worker_init_fn`` that writes down what each use came to."""

    def __init__(self, path):
        self.path = path

    def __call__(self, _):
        dataset = get_worker_info().dataset
        results = {name: use(dataset) for name, use in USES.items()}
        self.path.write_text(repr(results))


@pytest.mark.parametrize("kind", [Used, UsedStream])
def test_a_worker_uses_its_dataset_as_with_torchs_loader(kind, tmp_path):
    init = UsesDataset(tmp_path / "ours")
    theirs = UsesDataset(tmp_path / "theirs")
    settings_ = {"batch_size": 2, "num_workers": 1}

    batches = list(build_loader(kind(), worker_init_fn=init, **settings_))
    wanted = list(DataLoader(kind(), worker_init_fn=theirs, **settings_))

    assert init.path.read_text() == theirs.path.read_text()
    assert [batch.tolist() for batch in batches] == [[5, 6], [7, 8]]
    assert torch.equal(torch.cat(batches), torch.cat(wanted))


def names_of_profiled_ranges(loader):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        list(loader)
    return {event.key for event in p.key_averages() if "DataLoader" in event.key}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_profiler_sees_the_wait_for_a_batch_under_torchs_name(num_workers):
    samples = list(range(9))
    torchs = names_of_profiled_ranges(DataLoader(samples, num_workers=num_workers))
    ours = names_of_profiled_ranges(build_loader(samples, num_workers=num_workers))

    # TensorBoard and HTA look for the part before "#".
    assert {name.split("#")[0] for name in torchs} == {"enumerate(DataLoader)"}
    assert {name.split("#")[0] for name in ours} == {"enumerate(DataLoader)"}


def test_without_a_profiler_no_range_is_recorded_and_batches_are_the_same(monkeypatch):
    entered = []

    class CountedRange(torch.autograd.profiler.record_function):
        def __enter__(self):
            entered.append(self.name)
            return super().__enter__()

    monkeypatch.setattr(torch.autograd.profiler, "record_function", CountedRange)
    samples = list(range(9))
    ours = [
        batch.tolist() for batch in build_loader(samples, batch_size=2, num_workers=0)
    ]
    entered_by_ours = len(entered)
    torchs = [batch.tolist() for batch in DataLoader(samples, batch_size=2)]

    assert ours == torchs
    assert entered_by_ours == 0
    # What torch's own loader enters is seen, so the count can tell.
    assert len(entered) > 0


class LargeRows(Dataset):
    """Samples that travel in shared memory, some of which take longer to make."""

    def __len__(self):
        return 40

    def __getitem__(self, row):
        time.sleep(0.004 * (row % 5 == 3))
        return torch.full((20_000,), row)


@pytest.mark.long_cases
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("prefetch_factor", [1, 2, 4])
@pytest.mark.parametrize("is_kept", [False, True])
def test_no_batch_is_written_over_before_it_is_received(
    workers, prefetch_factor, is_kept
):
    """A worker has as many segments as batches may be asked of it, and not one more."""
    turns = random.Random(workers + 10 * prefetch_factor)
    loader = build_loader(
        LargeRows(),
        batch_size=1,
        num_workers=workers,
        prefetch_factor=prefetch_factor,
        persistent_workers=is_kept,
    )
    rows = []
    for number, batch in enumerate(loader):  # left with batches on their way
        rows.append(batch.unique().tolist())
        if number == 9:
            break
    assert rows == [[row] for row in range(10)]

    rows = []
    for batch in loader:
        # The loop is slower than the workers at times, so that they run ahead.
        time.sleep(turns.choice([0, 0, 0, 0.02]))
        rows.append(batch.unique().tolist())

    assert rows == [[row] for row in range(40)]
    loader.close()


class MadeBy(Dataset):
    """Eight samples of a function."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 8

    def __getitem__(self, row):
        return self.make(row)


UNSENDABLE = {
    "function": lambda row: lambda: row,
    "lock": lambda row: threading.Lock(),
    "generator": lambda row: (part for part in [row]),
    "graph of autograd": lambda row: torch.ones(1, requires_grad=True) * row,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNSENDABLE)
def test_a_batch_that_cannot_leave_its_worker_is_told(kind):
    make = UNSENDABLE[kind]
    dataset = MadeBy(lambda row: make(row) if row in {2, 3} else torch.tensor([row]))
    loader = build_loader(dataset, batch_size=2, num_workers=1, collate_fn=list)
    iterator = iter(loader)
    assert [int(row) for row in next(iterator)] == [0, 1]

    with pytest.raises(LoaderError, match="could not be sent from its worker") as told:
        next(iterator)

    assert re.search("Cowardly refusing|[Cc]an't pickle|cannot pickle", str(told.value))
    assert len(list(build_loader(dataset, batch_size=2, collate_fn=list))) == 4


def may_write_no_more_than_a_mebibyte(_worker):
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


@pytest.mark.slow
@pytest.mark.needs("proc")  # a segment of shared memory is a file of Linux
def test_a_batch_that_the_system_has_no_shared_memory_for_is_told():
    loader = build_loader(
        MadeBy(lambda row: torch.ones(1_000_000)),
        batch_size=2,
        num_workers=1,
        worker_init_fn=may_write_no_more_than_a_mebibyte,
    )

    with pytest.raises(LoaderError, match="File too large") as told:
        list(loader)

    assert isinstance(told.value, OSError)
    assert "shared memory" in told.value.why
    assert "batch_size" in told.value.fix


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts the files of a process")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@in_fresh_process
def test_workers_that_the_system_refuses_are_told_and_can_be_started_later(method):
    """Whoever lacks the files: this process, or the fork server."""
    import resource

    loader = build_loader(list(range(8)), num_workers=3, multiprocessing_context=method)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))

    # Kept below, as by a notebook.
    with pytest.raises(LoaderError, match="3 workers could not start: ") as refused:
        list(loader)

    assert "fix: ulimit -n 4096, or fewer workers" in str(refused.value)
    assert multiprocessing.active_children() == []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # A fork server that lives keeps the limit that it was started with.
    if method != "forkserver":
        assert len(list(loader)) == 8


ENDS_ANEW = """
import os, signal, sys
import loaderkit, loaderkit.errors

method, way = sys.argv[1:]
if __name__ == "__mp_main__":
    if way == "raises":
        raise RuntimeError("main fails anew")
    if way == "exits":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    # More than the pipe holds that Python starts processes through.
    loader = loaderkit.build_loader(
        list(range(100_000)), num_workers=2, multiprocessing_context=method
    )
    try:
        list(loader)
    except loaderkit.errors.LoaderkitError as error:
        print(error)
"""


def run_file(folder, text, *arguments):
    """Run a script as a file, which new processes import."""
    script = folder / "script.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


ENDS = {
    "raises": "a worker ended with exit code 1 before it was sent the dataset",
    "exits": "a worker ended with exit code 3 before it was sent the dataset",
    "is killed": "a worker ended before it was sent the dataset: SIGKILL",
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="has a fork server, and signals")
@pytest.mark.parametrize(
    ("method", "way"),
    [("spawn", "raises"), ("spawn", "is killed"), ("forkserver", "exits")],
)
def test_a_worker_that_ends_before_it_is_sent_the_dataset_is_told(
    method, way, tmp_path
):
    """Up to Python 3.13 multiprocessing alone waits for a spawned one for ever."""
    done = run_file(tmp_path, ENDS_ANEW, method, way)

    assert done.stdout.startswith("2 workers could not start: "), done.stderr
    assert f"why: {ENDS[way]}" in done.stdout
    assert ("RuntimeError: main fails anew" in done.stderr) == (way == "raises")
    assert "Exception ignored" not in done.stderr


def test_what_no_process_reads_is_told_at_once_and_no_pipe_is_left():
    before = psutil.Process().num_fds()
    outbox = Outbox()
    outbox.put(bytes(1 << 20))
    outbox.put(b"of another process")

    with pytest.raises(BrokenPipeError):
        outbox.send()

    assert outbox.waiting == 1
    outbox.clear()
    assert psutil.Process().num_fds() == before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="has a fork server")
@in_fresh_process  # later tests need the server of this process
def test_a_worker_that_is_lost_with_its_fork_server_is_known():
    context = multiprocessing.get_context("forkserver")
    lost, ended = (context.Process(target=time.sleep, args=(600,)) for _ in range(2))
    lost.start()
    ended.start()
    ended.kill()
    ended.join()
    for child in psutil.Process().children():
        if any("forkserver" in word for word in child.cmdline()):
            child.kill()

    lost.join()

    assert is_lost_with_its_server(lost)
    assert not is_lost_with_its_server(ended)
    os.kill(lost.pid, signal.SIGKILL)  # nobody else would


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_loops_inside_a_loop_take_nothing_from_it(num_workers):
    """Also the second, which begins when the first has ended and the outer runs."""
    loader = build_loader(
        list(range(12)),
        batch_size=3,
        num_workers=num_workers,
        persistent_workers=True,
    )
    outer, inner = [], []
    for batch in loader:
        outer += batch.tolist()
        if len(inner) < 3:
            inner.append([row for rows in loader for row in rows.tolist()])

    assert outer == list(range(12))
    assert inner == [list(range(12))] * 3


SPAWNS_IN_VAIN = """
import signal, time, loaderkit

# Where tests run in the background, it is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

if __name__ == "__mp_main__":
    print("begun", flush=True)
    time.sleep(600)
if __name__ == "__main__":
    loader = loaderkit.build_loader(
        list(range(100_000)), num_workers=2, multiprocessing_context="spawn"
    )
    try:
        list(loader)
    except KeyboardInterrupt:
        print("ended")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends itself a SIGINT")
def test_a_ctrl_c_ends_the_wait_for_a_worker_that_takes_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SPAWNS_IN_VAIN)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "begun\n"
        # Until it gets there; where it has ended, it has no more need of them.
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        last_line = process.stdout.read().splitlines()[-1]

    assert last_line == "ended"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked here")
def test_processes_of_a_context_are_ended_and_those_of_others_are_not():
    fork = multiprocessing.get_context("fork")
    context = NotingContext(fork)
    own = [context.Process(target=time.sleep, args=(600,)) for _ in range(3)]
    other = fork.Process(target=time.sleep, args=(600,))
    for process in (*own[:2], other):  # the third could not start
        process.start()

    context.end_processes()

    assert [process.exitcode for process in own[:2]] == [-signal.SIGTERM] * 2
    assert other.is_alive()
    other.kill()
    other.join()


@pytest.mark.skipif(sys.platform != "linux", reason="its locks are files")
def test_where_no_lock_can_be_made_no_worker_is_planned_or_started():
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A full /dev/shm that needs no rights: files, and so locks, may have no bytes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        planned = build_loader(list(range(8))).plan.num_workers
        with pytest.raises(LoaderError, match="1 worker") as raised:
            build_loader(list(range(8)), num_workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert planned.value == 0
    assert raised.value.why in planned.reason
    assert raised.value.why.endswith("/dev/shm: File too large")
    assert build_loader(list(range(8)), num_workers=1).plan.num_workers.value == 1
