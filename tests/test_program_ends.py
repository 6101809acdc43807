"""What is no ``Exception`` passes through everything that reads samples, as it is.

``sys.exit`` of a handler of SIGTERM, or of a user's code, a skip of pytest's and Ctrl-C
end the program, and are no errors of the sample that was being read.  The oracle is
torch's DataLoader without workers.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from loaderkit import LeakDetector, build_loader, pack, plan_batch


class EndedError(BaseException):
    """As pytest.skip and asyncio.CancelledError: no Exception."""


ENDS = [SystemExit(7), GeneratorExit(), EndedError("over"), KeyboardInterrupt()]
"""The last is torch's own in a worker of a loader, which it ends quietly."""


class Ending(Dataset):
    """Its sixth sample raises."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 8

    def __getitem__(self, row):
        if row == 5:
            raise self.error
        return {"x": torch.full((4,), float(row))}


class EndingStream(IterableDataset):
    def __init__(self, error):
        self.dataset = Ending(error)

    def __iter__(self):
        yield from map(self.dataset.__getitem__, range(8))


class Terminated(Ending):
    """SIGTERM comes while the sixth sample is read by the process that it is sent to.

    In a worker, which is another process, it is sent to the parent.
    """

    def __init__(self):
        super().__init__(None)
        self.pid = os.getpid()

    def __getitem__(self, row):
        if row == 5:
            os.kill(self.pid, signal.SIGTERM)
            time.sleep(0.2)
            return super().__getitem__(0)
        return super().__getitem__(row)


def read_all(dataset, **options):
    for _ in build_loader(dataset, batch_size=2, **options):
        pass


def pack_with_threads(dataset, path):
    with ThreadPoolExecutor(1) as threads:
        pack(dataset, path, executor=threads)


def watch_loop(dataset):
    for _ in LeakDetector("cpu").epochs(range(2)):
        list(dataset)


def watch_block(dataset):
    with LeakDetector("cpu") as detector:
        detector.end_epoch()
        list(dataset)


READERS = {
    "loader": lambda dataset, _: read_all(dataset, num_workers=0),
    "pack": lambda dataset, path: pack(dataset, path, workers=0),
    "pack with workers": lambda dataset, path: pack(dataset, path, workers=1),
    "pack with threads": pack_with_threads,
    "plan_batch": lambda dataset, _: plan_batch(
        torch.nn.Linear(4, 1), dataset, "cpu", limit="1 GiB"
    ),
    "run of a detector": lambda dataset, _: LeakDetector("cpu").run(
        lambda: list(dataset), epochs=2
    ),
    "loop of a detector": lambda dataset, _: watch_loop(dataset),
    "block of a detector": lambda dataset, _: watch_block(dataset),
}
STREAM_READERS = {
    "loader": lambda stream, _: read_all(stream, num_workers=0),
    "pack": lambda stream, path: pack(stream, path, workers=0),
}


def what_ends(read, *arguments):
    """Give the error that reading ends by, as type and arguments."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 -- which one is asked
        read(*arguments)
    return type(caught.value), caught.value.args


def torchs_end(dataset):
    return what_ends(lambda: list(DataLoader(dataset, batch_size=2)))


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("error", ENDS, ids=repr)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore::loaderkit.errors.NotJudgedWarning")
def test_what_is_no_exception_ends_reading_as_it_is(tmp_path, reader, error):
    dataset = Ending(error)

    ended_by = what_ends(READERS[reader], dataset, tmp_path / "c.lk")

    assert ended_by == torchs_end(dataset)


@pytest.mark.parametrize("error", ENDS, ids=repr)
@pytest.mark.parametrize("reader", STREAM_READERS)
def test_what_is_no_exception_ends_a_stream_as_it_is(tmp_path, reader, error):
    stream = EndingStream(error)

    ended_by = what_ends(STREAM_READERS[reader], stream, tmp_path / "c.lk")

    assert ended_by == torchs_end(stream)


@pytest.mark.parametrize("kind", [Ending, EndingStream])
@pytest.mark.parametrize("error", ENDS[:-1:2], ids=repr)
def test_with_workers_it_comes_as_without(kind, error):
    dataset = kind(error)

    ended_by = what_ends(lambda: read_all(dataset, num_workers=1))

    assert ended_by == torchs_end(dataset)


def end_program(_worker):
    raise SystemExit(7)


def test_a_worker_init_fn_that_ends_the_program_ends_the_loop_as_it_is():
    options = {"num_workers": 1, "worker_init_fn": end_program}

    assert what_ends(lambda: read_all(list(range(8)), **options)) == (SystemExit, (7,))


def join_and_end(_samples):
    raise SystemExit(7)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_fn_that_ends_the_program_ends_the_loop_as_it_is(workers):
    options = {"num_workers": workers, "collate_fn": join_and_end}

    assert what_ends(lambda: read_all(list(range(8)), **options)) == (SystemExit, (7,))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_handler_that_ends_the_program_ends_packing_as_it_is(tmp_path, workers):
    def end(_, __):
        raise SystemExit(7)

    before = signal.signal(signal.SIGTERM, end)
    try:
        ended_by = what_ends(
            lambda: pack(Terminated(), tmp_path / "c.lk", workers=workers)
        )
    finally:
        signal.signal(signal.SIGTERM, before)

    assert ended_by == (SystemExit, (7,))


def test_the_sample_that_ended_packing_is_logged(tmp_path, caplog):
    what_ends(READERS["pack"], Ending(SystemExit(7)), tmp_path / "c.lk")

    assert "Sample '5' (row 5 of 8) was being read at SystemExit(7)" in caplog.text
