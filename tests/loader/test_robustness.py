"""Workers that die, loops that are left: told with names, and nothing stays behind."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess

import psutil
import pytest
import torch
from data import Doomed, Prepared, Slow
from fresh_process import in_fresh_process
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import _utils as utils_of_torch
from torch.utils.data._utils import worker as worker_of_torch

from loaderkit import build_loader, open_cache, pack
from loaderkit.errors import LoaderError
from loaderkit.loader.device_prefetch import DevicePrefetcher
from loaderkit.loader.worker_deaths import cause_of
from loaderkit.memory.host import read_host


class Endless(IterableDataset):
    """Gives a sample every 5 ms."""

    def __iter__(self):
        for number in itertools.count():
            time.sleep(0.005)
            yield number


def segments_of_ours():
    """torch's shared memory that is not of another training on this machine."""
    own_pids = {os.getpid(), *(p.pid for p in psutil.Process().children())}
    segments = []
    for name in os.listdir("/dev/shm"):
        maker = re.match(r"torch_(\d+)_", name)
        if maker is not None:
            pid = int(maker[1])
            if pid in own_pids or not psutil.pid_exists(pid):
                segments.append(name)
    return segments


def belongings():
    """Count what a loader could leave behind."""
    gc.collect()
    return {
        "children": len(psutil.Process().children(recursive=True)),
        "files": len(os.listdir("/proc/self/fd")),
        "segments": len(segments_of_ours()),
        "threads": threading.active_count(),
    }


def wait_until_gone(before):
    """Wait until no more is there than before; the runner has the deadline."""
    left_behind = True
    while left_behind:
        time.sleep(0.01)
        now = belongings()
        left_behind = [name for name in before if now[name] > before[name]]


def left_early(loader):
    for _ in loader:
        break


def left_by_an_error(loader):
    with contextlib.suppress(ZeroDivisionError):
        for _ in loader:
            1 / 0  # noqa: B018


def read_twice(loader):
    for _ in range(2):
        assert sum(1 for _ in loader) == 20


def two_at_once(loader):
    assert len(list(zip(loader, loader, strict=True))) == 20


def let_go(loader):
    iterator = iter(loader)
    next(iterator)
    del iterator


def through_a_prefetcher(loader):
    for batch in DevicePrefetcher(loader, "cpu"):
        assert batch.num_graphs == 2
        break


WAYS = [left_early, left_by_an_error, read_twice, two_at_once, let_go]
WAYS += [through_a_prefetcher]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_loop_leaves_nothing_behind_however_it_ends(cache, way, persistent):
    settings = {"batch_size": 2, "num_workers": 2, "persistent_workers": persistent}
    warm = build_loader(cache, **settings)
    next(iter(warm))
    del warm
    before = belongings()
    loader = build_loader(cache, **settings)

    way(loader)
    del loader

    wait_until_gone(before)


@pytest.mark.slow
def test_what_stays_behind_is_seen(cache):
    list(build_loader(cache, batch_size=2, num_workers=2))
    before = belongings()
    loader = build_loader(cache, batch_size=2, num_workers=2)

    iterator = iter(loader)
    next(iterator)

    assert belongings()["children"] == before["children"] + 2
    assert belongings()["files"] > before["files"]
    del iterator, loader
    wait_until_gone(before)


def collect_an_error_that_is_kept(loader):
    """Leave a loop by an error whose frames refer to it, as a notebook's do."""

    def loop():
        batches = iter(loader)
        next(batches)
        try:
            raise KeyError
        except KeyError as error:
            # In a frame of its own traceback: a cycle with the iterator.
            stored_error = error
            raise stored_error from None

    others = set(multiprocessing.active_children())
    with contextlib.suppress(KeyError):
        loop()
    assert set(multiprocessing.active_children()) - others
    gc.collect()
    assert not set(multiprocessing.active_children()) - others


@pytest.mark.slow
@pytest.mark.parametrize("collate", [None, torch.utils.data.default_collate])
def test_workers_are_told_to_end_where_an_error_was_kept(monkeypatch, collate):
    # torch's workers look up every 5 s whether they are to end, and are terminated if
    # they have not ended 5 s later.  Those that are told need neither.
    monkeypatch.setattr(worker_of_torch, "MP_STATUS_CHECK_INTERVAL", 3600)
    terminated = []
    terminate = BaseProcess.terminate

    def note_and_terminate(process):
        terminated.append(process.pid)
        terminate(process)

    monkeypatch.setattr(BaseProcess, "terminate", note_and_terminate)
    options = {"batch_size": 2, "num_workers": 1, "collate_fn": collate}
    data = list(torch.arange(64.0))
    torchs = torch.utils.data.DataLoader(data, **options)
    ours = build_loader(data, probe=False, persistent_workers=False, **options)

    monkeypatch.setattr(utils_of_torch, "MP_STATUS_CHECK_INTERVAL", 3600)
    collect_an_error_that_is_kept(ours)
    assert terminated == []
    monkeypatch.setattr(utils_of_torch, "MP_STATUS_CHECK_INTERVAL", 0.5)
    collect_an_error_that_is_kept(torchs)
    assert len(terminated) == 1


@pytest.mark.slow
def test_workers_that_are_kept_end_when_asked(cache):
    loader = build_loader(cache, batch_size=2, num_workers=1, persistent_workers=True)
    before = belongings()["children"]
    list(loader)
    assert belongings()["children"] == before + 1

    loader.close()

    assert belongings()["children"] == before
    assert len(list(loader)) == 20
    loader.close()


@pytest.mark.slow
def test_every_batch_can_be_kept(cache):
    # The first epoch opens what stays open, such as the files of the cache.
    list(build_loader(cache, batch_size=2, num_workers=1))
    before = belongings()
    loader = build_loader(cache, batch_size=2, num_workers=1)

    batches = list(loader)

    del loader
    assert len(batches) == 20
    # the threads of queues close their pipes when they end, a moment later
    wait_until_gone({"files": before["files"]})


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("SIGKILL", "SIGKILL: probably the kernel, out of memory"),
        ("SIGSEGV", "a crash in native code"),
        ("exit", "it ended itself with exit code 3"),
        ("SIGINT", "it was interrupted"),
    ],
)
def test_a_worker_that_dies_is_told_with_its_samples(way, why):
    loader = build_loader(
        Doomed(way), batch_size=4, num_workers=2, probe=False, persistent_workers=False
    )

    with pytest.raises(
        LoaderError, match=r"made .*'sample-12' \(row 12\), 'sample-13'"
    ) as caught:
        list(loader)

    assert why in str(caught.value)
    assert caught.value.fix


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("make", [DataLoader, build_loader])
def test_an_interrupt_that_code_raises_comes_as_from_torch_without_workers(make):
    """With workers, torch tells it as the worker's death: see ``SIGINT`` above."""
    workers = 0 if make is DataLoader else 2
    batches = iter(make(Doomed("interrupt"), batch_size=4, num_workers=workers))
    before = [next(batches)[:, 0].tolist() for _ in range(3)]

    with pytest.raises(KeyboardInterrupt) as caught:
        next(batches)

    assert caught.value.args == (13,)
    assert before == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    if workers:
        assert "raise KeyboardInterrupt(row)" in str(caught.value.__cause__)


@pytest.mark.slow
# Python drops what the handler raises inside of a destructor, and says so.  The loop
# raises it then, when torch looks after its workers, every 5 s.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <Finalize:pytest.PytestUnraisableExceptionWarning"
)
def test_a_death_is_told_however_often_it_happens(every_case):
    """torch's signal handler raises at any line of the main thread."""
    loader = build_loader(
        Doomed("exit"),
        batch_size=4,
        num_workers=2,
        probe=False,
        persistent_workers=False,
    )

    for _ in range(20 if every_case else 10):
        with pytest.raises(LoaderError, match=r"(?s)'sample-12' .*exit code 3"):
            list(loader)


@pytest.fixture
def interruptible():
    """Heed SIGINT, as a terminal's processes do; background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("data", [Slow(), Endless()], ids=["rows", "stream"])
@pytest.mark.parametrize("persistent", [False, True])
def test_ctrl_c_reaches_the_loop_and_leaves_no_worker(data, persistent):
    loader = build_loader(
        data, batch_size=4, num_workers=1, probe=False, persistent_workers=persistent
    )
    others = psutil.Process().children()  # such as the server of "forkserver"
    running = [iter(loader)]
    next(running[0])
    workers = [child for child in psutil.Process().children() if child not in others]

    def interrupted_step():
        signal.raise_signal(signal.SIGINT)
        next(running[0])

    with pytest.raises(KeyboardInterrupt):
        interrupted_step()
    assert len(list(itertools.islice(loader, 3))) == 3  # the loop may go on
    running.clear()
    loader.close()

    _, alive = psutil.wait_procs(workers)
    assert alive == []


class Gated:
    """Samples that cannot be read before something has happened."""

    def __init__(self, gate):
        self._gate = gate

    def __len__(self):
        return 8

    def __getitem__(self, row):
        self._gate.wait()
        return torch.tensor(row)


def begin_to_read(gate, pipe):
    """Say when a loader is begun to be read, how that ended, and what is left of it."""
    os.setsid()  # a group of its own, as a terminal's command has
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    loader = build_loader(Gated(gate), batch_size=2, num_workers=3, probe=False)
    pipe.send("begun")
    try:
        ended = f"{len(list(loader))} batches"
    except BaseException as error:  # noqa: BLE001 -- the test looks at it
        ended = type(error).__name__
    pipe.send(ended)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loader.close()
    pipe.send(len(multiprocessing.active_children()))


def kill_and_wait(worker):
    worker.kill()
    # The signal of its end is handled between two instructions, as soon as it is there.
    while psutil.pid_exists(worker.pid) and worker.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    for _ in range(10):
        time.sleep(0.01)


def kill_on_the_way_out(error, worker):
    try:
        raise error
    finally:
        kill_and_wait(worker)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyboardInterrupt, KeyboardInterrupt), (ValueError, LoaderError)],
)
def test_the_end_of_a_worker_is_not_told_in_the_place_of_ctrl_c(error, told):
    """Ctrl-C ends both, and the signal of the worker's end comes on the way out."""
    others = psutil.Process().children()
    batches = iter(build_loader(Slow(), batch_size=2, num_workers=2))
    next(batches)
    workers = [child for child in psutil.Process().children() if child not in others]

    with pytest.raises(told):
        kill_on_the_way_out(error, workers[0])


@pytest.mark.slow
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["process", "group"])
def test_ctrl_c_while_workers_are_started_is_not_lost(send):
    """Hooks of fork drop it: 25 of 60 that came in the first 0.12 s were lost."""
    fork, chance = multiprocessing.get_context("fork"), random.Random(0)
    for _ in range(5):
        gate = fork.Event()
        here, there = fork.Pipe()
        reader = fork.Process(target=begin_to_read, args=(gate, there))
        reader.start()
        assert here.recv() == "begun"
        time.sleep(chance.random() / 10)
        send(reader.pid, signal.SIGINT)
        gate.set()

        assert (here.recv(), here.recv()) == ("KeyboardInterrupt", 0)
        reader.join()


@pytest.mark.slow
def test_a_ctrl_c_that_is_lost_would_be_seen():
    fork = multiprocessing.get_context("fork")
    gate = fork.Event()
    here, there = fork.Pipe()
    reader = fork.Process(target=begin_to_read, args=(gate, there))
    reader.start()
    gate.set()

    assert [here.recv() for _ in range(3)] == ["begun", "4 batches", 0]
    reader.join()


def train_on():
    """Do a training step that does not end, far from the loader."""
    while True:
        time.sleep(0.01)


@pytest.mark.slow
def test_a_death_during_a_step_is_told_there():
    loader = build_loader(Doomed("SIGKILL"), batch_size=4, num_workers=1, probe=False)
    batches = iter(loader)

    def step_twice():
        next(batches), next(batches)  # now the worker is asked for the fourth
        train_on()

    with pytest.raises(LoaderError, match=r"(?s)'sample-12' .*SIGKILL"):
        step_twice()
    with pytest.raises(LoaderError, match=r"(?s)'sample-12' .*SIGKILL"):
        list(batches)


def see_another_loaders_worker_die():
    # Batches without tensors: torch's worker may die while it hands over one's memory,
    # and then torch raises ConnectionResetError.
    plain = torch.utils.data.DataLoader(
        Doomed("exit"), batch_size=4, num_workers=1, collate_fn=len
    )
    ours = iter(build_loader(Slow(), batch_size=4, num_workers=1, probe=False))
    next(ours)

    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        list(plain)

    assert not isinstance(caught.value, LoaderError)
    assert len(list(ours)) == 15
    os._exit(0)


@pytest.mark.slow
def test_the_death_of_another_loaders_worker_is_left_to_torch():
    # In a process of its own: torch's handler raises again with each child that ends.
    child = multiprocessing.get_context("fork").Process(
        target=see_another_loaders_worker_die
    )
    child.start()
    child.join()

    assert child.exitcode == 0


def train_and_be_killed_as_the_worker_starts(noted):
    main = os.getpid()

    def kill_main():
        if os.getppid() == main:  # in the worker, before anything of torch's runs
            noted.write_text(str(os.getpid()))
            os.kill(main, signal.SIGKILL)
            while os.getppid() == main:
                pass

    os.register_at_fork(after_in_child=kill_main)
    list(build_loader(Slow(), batch_size=4, num_workers=1, probe=False))


def workers_left_by(train_and_be_killed, folder):
    """Let a training process be killed, and give the workers that it noted."""
    noted = folder / "pids"
    training = multiprocessing.get_context("fork").Process(
        target=train_and_be_killed, args=(noted,)
    )

    training.start()
    training.join()

    assert training.exitcode == -signal.SIGKILL
    return [int(pid) for pid in noted.read_text().split()]


@pytest.mark.slow
def test_a_worker_whose_parent_is_killed_as_it_starts_ends_too(tmp_path):
    workers = workers_left_by(train_and_be_killed_as_the_worker_starts, tmp_path)

    assert len(workers) == 1
    while any(map(psutil.pid_exists, workers)):  # until the runner's deadline
        time.sleep(0.01)


def train_and_be_killed_with_a_full_pipe(noted):
    texts = ["x" * 300_000] * 40  # sent as they are: in a pipe, which holds 64 KiB
    loader = build_loader(texts, batch_size=1, num_workers=2, probe=False)
    batches = iter(loader)
    next(batches)
    children = psutil.Process().children()
    noted.write_text(" ".join(str(child.pid) for child in children))
    time.sleep(0.5)  # the pipe fills meanwhile
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_workers_end_whose_parent_is_killed_while_batches_wait(tmp_path):
    workers = workers_left_by(train_and_be_killed_with_a_full_pipe, tmp_path)

    assert len(workers) >= 2
    while any(map(psutil.pid_exists, workers)):  # until the runner's deadline
        time.sleep(0.05)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_fails_is_named(workers):
    loader = build_loader(
        Doomed("raise"), batch_size=4, num_workers=workers, probe=False
    )

    with pytest.raises(LoaderError, match=r"Sample 'sample-13' \(row 13\).*KeyError"):
        list(loader)


def test_samples_that_do_not_fit_together_are_named():
    loader = build_loader(
        [torch.ones(2), torch.ones(3)], batch_size=2, num_workers=0, probe=False
    )

    with pytest.raises(LoaderError, match=r"samples row 0, row 1 were read, but"):
        list(loader)


def test_the_kernels_count_of_kills_makes_it_sure():
    host = read_host()

    sure, _ = cause_of(-signal.SIGKILL, host, out_of_memory=True)
    bus, fix = cause_of(-signal.SIGBUS, host, out_of_memory=False)
    other, _ = cause_of(-signal.SIGTERM, host, out_of_memory=False)

    assert sure.startswith("the kernel killed it")
    assert "mapped file" in bus
    assert "verify" in fix
    assert "SIGTERM" in other


def test_a_full_dev_shm_is_told_from_a_cut_file():
    import dataclasses

    host = dataclasses.replace(read_host(), shm_free_bytes=0)

    why, fix = cause_of(-signal.SIGBUS, host, out_of_memory=False)

    assert "/dev/shm has 0 B left" in why
    assert "--shm-size" in fix


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_start_method_gives_the_same_batches(cache, method):
    loader = build_loader(
        cache,
        batch_size=8,
        num_workers=1,
        multiprocessing_context=method,
        shuffle=True,
        seed=4,
    )
    alone = build_loader(cache, batch_size=8, num_workers=0, shuffle=True, seed=4)

    assert [b.y.tolist() for b in loader] == [b.y.tolist() for b in alone]


def test_what_cannot_be_sent_is_named_by_its_path():
    dataset = Slow()
    dataset.scale = lambda x: x

    with pytest.raises(LoaderError, match=r"dataset\.scale: "):
        build_loader(
            dataset, num_workers=1, multiprocessing_context="spawn", probe=False
        )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_planning_opens_no_file_for_a_list_of_tensors(method):
    tensors = [torch.ones(3) for _ in range(3000)]
    before = len(os.listdir("/proc/self/fd"))

    build_loader(tensors, num_workers=1, multiprocessing_context=method)

    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert not any(tensor.is_shared() for tensor in tensors)


@pytest.mark.slow
def test_128_open_files_are_enough_for_any_number_of_batches(cache):
    len(cache)

    read_with_few_files(str(cache.cache))


@in_fresh_process
def read_with_few_files(folder):
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    loader = build_loader(open_cache(folder), batch_size=2, num_workers=2)
    batches = [batch for _ in range(12) for batch in loader]

    assert len(batches) == 240
    assert loader.plan.sharing.value == "parcel"


NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
cell = '''
import torch, loaderkit
class Mine(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, row): return torch.tensor([row])
loader = loaderkit.build_loader(Mine(), batch_size=4, num_workers=1)
rows = [batch.flatten().tolist() for batch in loader]
from loaderkit.loader.read_facts import _in_notebook
print(rows, _in_notebook())
'''
result = shell.run_cell(cell)
result.raise_error()
"""


@pytest.mark.slow
@pytest.mark.needs("IPython")
def test_a_class_typed_into_a_notebook_is_loaded():
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, check=False
    )

    assert "[[0, 1, 2, 3], [4, 5, 6, 7]] True" in done.stdout, done.stderr[-800:]


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_batches_that_wait_for_a_late_loop_stay_as_they_were_made(
    tmp_path, start_method
):
    """Each is gathered where it is sent from: 96 kB, four of them ahead of the loop."""
    samples = [
        {"x": torch.full((3000,), float(row)), "row": torch.tensor(row)}
        for row in range(64)
    ]
    cache = pack(samples, tmp_path / "c.lk", workers=0)
    loader = build_loader(
        cache, batch_size=8, num_workers=1, prefetch_factor=4,
        multiprocessing_context=start_method,
    )  # fmt: skip

    iterator = iter(loader)
    batches = [next(iterator)]
    time.sleep(0.5)
    batches += iterator

    assert torch.cat([batch["row"] for batch in batches]).tolist() == list(range(64))
    for batch in batches:
        assert torch.equal(batch["x"], batch["row"][:, None].float().expand(-1, 3000))


@pytest.mark.slow
def test_a_method_that_prepares_a_spawned_worker_prepares_its_dataset():
    """As in torch's loader: it is a method of the dataset that the worker reads."""
    dataset = Prepared()
    options = {
        "batch_size": 3,
        "num_workers": 2,
        "worker_init_fn": dataset.prepare,
        "multiprocessing_context": "spawn",
    }

    ours = list(build_loader(dataset, **options))

    expected = [[[0, 0], [1, 0], [2, 0]], [[3, 1], [4, 1], [5, 1]]]
    assert [batch.tolist() for batch in ours] == expected
    assert [batch.tolist() for batch in DataLoader(dataset, **options)] == expected
