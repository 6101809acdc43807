"""Batches ahead of time: in order, owned, and without a trace when a loop is left."""

import contextlib
import dataclasses
import gc
import io
import itertools
import threading
import time
import warnings
import weakref
import zipfile
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from data import graph
from tensor_kinds import KINDS, tensors_of_all_kinds
from torch.masked import MaskedTensor
from torch_geometric.data import Batch, HeteroData

from loaderkit import build_loader
from loaderkit.errors import LoaderError
from loaderkit.loader.device_prefetch import (
    CopiedBatches,
    DevicePrefetcher,
    move,
    page_locked,
)
from loaderkit.loader.read_ahead import TIMED_STEPS, ReadAhead
from loaderkit.testing import assert_same


def read_ahead_threads():
    return [t for t in threading.enumerate() if t.name == "loaderkit-read-ahead"]


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def pass_by(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    """Put the clock by which steps and batches are timed in the test's hands.

    A thread is started where steps take half as long as batches, and on a busy machine
    sleeping says nothing about how long either takes.
    """
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def batches_of_2_ms(count, clock):
    for number in range(count):
        clock.pass_by(0.002)
        yield number


@pytest.mark.parametrize(
    ("step_s", "is_threaded"),
    [(0.004, True), (0.0011, True), (0.0009, False), (0.0, False)],
)
def test_a_loop_that_computes_gets_a_thread_and_one_that_does_not_none(
    clock, step_s, is_threaded
):
    ahead, received = ReadAhead(batches_of_2_ms(12, clock), 2), []

    for number in ahead:
        clock.pass_by(step_s)
        received.append(number)

    assert ahead.threaded == is_threaded
    assert received == list(range(12))
    ahead.close()
    assert not read_ahead_threads()


@pytest.mark.parametrize("short_steps", range(2 * TIMED_STEPS + 1))
def test_a_loop_that_begins_to_compute_gets_a_thread_before_long(clock, short_steps):
    """Within twice the steps that are timed, wherever their turn is by then."""
    ahead = ReadAhead(batches_of_2_ms(1000, clock), 2)

    for step in range(short_steps + 2 * TIMED_STEPS):
        next(ahead)
        clock.pass_by(0.004 if step >= short_steps else 0.0)
    next(ahead)

    assert ahead.threaded
    ahead.close()


def started(items, clock):
    ahead = ReadAhead(items, 2)
    for _ in range(6):
        next(ahead)
        clock.pass_by(0.004)
    assert ahead.threaded
    return ahead


def test_a_loop_that_is_left_leaves_no_thread(clock):
    ahead = started(batches_of_2_ms(1000, clock), clock)
    assert read_ahead_threads()

    del ahead

    assert not read_ahead_threads()


def test_the_thread_that_stays_is_seen(clock):
    ahead = started(batches_of_2_ms(1000, clock), clock)

    assert read_ahead_threads()
    assert next(ahead) == 6
    ahead.close()
    assert not read_ahead_threads()


def test_an_error_comes_where_it_belongs(clock):
    def failing():
        yield from batches_of_2_ms(8, clock)
        raise KeyError("lost")  # noqa: EM101

    ahead, received = started(failing(), clock), []

    with pytest.raises(KeyError, match="lost"):
        received.extend(ahead)
    with pytest.raises(KeyError, match="lost"):
        next(ahead)
    assert received == [6, 7]
    ahead.close()


def test_an_end_is_told_again(clock):
    ahead = started(batches_of_2_ms(7, clock), clock)
    next(ahead)

    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ahead)


@pytest.mark.slow
def test_a_loader_reads_ahead_and_nothing_stays(cache, clock):
    loader = build_loader(cache, batch_size=2, num_workers=0)
    received = []

    for batch in loader:
        clock.pass_by(1.0)
        received.append(batch.y.tolist())
        if len(received) == 10:
            assert read_ahead_threads()
            state = loader.state_dict()
            break

    assert received == [[n, n + 1] for n in range(0, 20, 2)]
    assert state["batches"] == 10
    del batch
    gc.collect()
    assert not read_ahead_threads()


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


def nests():
    data = HeteroData()
    data["a"].x = torch.ones(2, 1)
    data["a", "to", "a"].edge_index = torch.zeros(2, 3, dtype=torch.long)
    return {
        "graph": graph(3),
        "batch": Batch.from_data_list([graph(1), graph(2)]),
        "hetero": Batch.from_data_list([data, data]),
        "nest": {"a": [torch.ones(2), "x"], "b": Pair(torch.ones(1), None)},
        "ordered": OrderedDict(a=torch.ones(1)),
        "sparse": torch.eye(3).to_sparse(),
    }


@pytest.mark.parametrize("name", nests())
def test_a_batch_moves_whole(name):
    nest = nests()[name]

    assert_same(move(nest, torch.device("cpu")), nest)
    for moved in [move(nest, torch.device("meta"))]:
        assert type(moved) is type(nest)


def test_a_prefetcher_is_as_long_as_its_loader(cache):
    loader = build_loader(cache, batch_size=7)
    moved = DevicePrefetcher(loader, "cpu")

    assert len(moved) == len(loader)
    assert moved.plan is loader.plan
    assert [b.y.tolist() for b in moved] == [b.y.tolist() for b in loader]
    with pytest.raises(AttributeError):
        _ = moved.nothing


def test_a_prefetcher_refuses_a_device_that_is_not_here():
    with pytest.raises(ValueError, match="device"):
        DevicePrefetcher([], "nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="there is no device"):
            DevicePrefetcher([], "cuda")


class FakeStream:
    """A stream that notes what is asked of it."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        return FakeEvent(self.log)


class FakeEvent:
    """The end of what is queued; the log has which of them the loop waited for."""

    def __init__(self, log):
        self.log, self.number = log, log.count("an end is marked")
        log.append("an end is marked")

    def synchronize(self):
        self.log.append(f"waited for end {self.number}")


class FakeModule:
    """torch.cuda as far as a copy beside the computing needs it."""

    def __init__(self):
        self.log = []
        self.current = FakeStream(self.log, "computing")

    def Stream(self, _):  # noqa: N802
        return FakeStream(self.log, "copying")

    def current_stream(self, _):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        self.log.append(f"on {stream.name}")
        yield


def test_the_next_batch_is_copied_before_the_last_is_done(monkeypatch):
    module = FakeModule()
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda _, s: module.log.append(f"used by {s.name}"),
    )
    copies = CopiedBatches(
        iter([torch.ones(1), torch.ones(2)]), torch.device("cpu"), module, lambda t: t
    )

    first = next(copies)
    log = list(module.log)

    assert len(first) == 1
    assert log == [
        "on copying",
        "an end is marked",
        "computing waits for copying",
        "used by computing",
        "on copying",
    ]
    assert [len(copied) for copied in copies] == [2]


def test_a_loop_is_at_most_two_steps_ahead_of_the_device():
    module = FakeModule()
    copies = CopiedBatches(
        iter([[]] * 9), torch.device("cpu"), module, lambda tensor: tensor
    )

    for number, _ in enumerate(copies):
        # End 0 is before the first step, so end n is that of step n - 1.
        waits = [line for line in module.log if line.startswith("waited")]
        assert waits == [f"waited for end {end}" for end in range(number - 1)]


def storage_sizes(tensor):
    """Ask torch.save what storages a tensor is made of; bytes of each, rising."""
    file = io.BytesIO()
    torch.save(tensor, file)
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if "/data/" in name]
        sizes = [archive.getinfo(name).file_size for name in names]
    return sorted(size for size in sizes if size)


@pytest.fixture
def recorded(monkeypatch):
    """Storages whose use is recorded, by a function that takes what CUDA's does."""
    storages = {}

    def record_stream(tensor, _):
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise NotImplementedError("aten::record_stream")  # noqa: EM101
        if isinstance(tensor, MaskedTensor):
            raise TypeError("Multiple dispatch failed")  # noqa: EM101
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return storages


def copy_with_log(batches):
    """Copy batches as a card's prefetcher does; give them, and what streams did."""
    module = FakeModule()
    copies = CopiedBatches(
        iter(batches), torch.device("cpu"), module, lambda tensor: tensor
    )
    return list(copies), module.log


@pytest.mark.parametrize("kind", KINDS)
def test_all_memory_of_a_tensor_is_kept_until_the_step_is_done(kind, recorded):
    tensor = tensors_of_all_kinds()[kind]

    [[moved]], log = copy_with_log([[tensor]])

    expected = storage_sizes(moved)
    if kind == "nested":
        # Its shapes, strides and offsets stay on the host, wherever its values are.
        expected = [size for size in expected if size == moved.values().nbytes]
    assert sorted(size for size in recorded.values() if size) == expected
    assert "copying waits for computing" not in log


class Boxed:
    """A batch of another library: only it knows how it is moved."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return type(self)(self.tensor.to(device))


class BoxedAndRecorded(Boxed):
    def record_stream(self, stream):
        self.tensor.record_stream(stream)


def leaves_that_keep_their_parts():
    """What torch's record_stream refuses, and no protocol takes apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mask = torch.tensor([True, False])
        return [
            Boxed(torch.ones(2)),
            torch.masked.masked_tensor(torch.ones(2), mask),
        ]


@pytest.mark.parametrize("leaf", leaves_that_keep_their_parts(), ids=["object", "mask"])
def test_memory_that_cannot_be_kept_is_not_copied_to_before_the_step_is_done(
    leaf, recorded
):
    moved, log = copy_with_log([leaf, leaf, leaf])

    assert len(moved) == 3
    assert not recorded
    # Each copy but the first two, which find nothing to overwrite.
    assert log.count("copying waits for computing") == 3
    copies = [place for place, entry in enumerate(log) if entry == "on copying"]
    assert all(log[place - 1] == "copying waits for computing" for place in copies[1:])


def test_an_object_that_records_its_use_is_copied_beside_the_step(recorded):
    moved, log = copy_with_log([BoxedAndRecorded(torch.ones(5)) for _ in range(3)])

    assert len(moved) == 3
    assert 20 in recorded.values()
    assert "copying waits for computing" not in log


@pytest.mark.slow
def test_a_batch_is_not_held_once_it_is_given(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    batches = ([torch.ones(3)] for _ in range(3))
    device = torch.device("cpu")
    copies = CopiedBatches(batches, device, FakeModule(), lambda t: t)

    first = next(copies)[0]
    seen = weakref.ref(first)
    del first
    next(copies)
    gc.collect()

    assert seen() is None


class FailsOnce(torch.utils.data.Dataset):
    """Twelve numbers, of which reading one fails the first time."""

    def __init__(self, row):
        self.row = row

    def __len__(self):
        return 12

    def __getitem__(self, row):
        if row == self.row:
            self.row = None
            raise KeyError(row)
        return torch.tensor(row)


def copied_as_on_a_card(loader):
    def unchanged(tensor):
        return tensor

    return CopiedBatches(iter(loader), torch.device("cpu"), FakeModule(), unchanged)


def moved_when_asked(loader):
    return iter(DevicePrefetcher(loader, "cpu"))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("moved", [copied_as_on_a_card, moved_when_asked])
@pytest.mark.parametrize("given", range(5))
def test_a_state_goes_on_behind_what_the_loop_was_given_not_what_was_copied(
    moved, given
):
    def make():
        return build_loader(FailsOnce(None), batch_size=3, num_workers=0, seed=0)

    loader = make()
    batches = moved(loader)
    first = [batch.tolist() for batch in itertools.islice(batches, given)]
    if given < 4:
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        rest = [batch.tolist() for batch in moved(resumed)]
        assert first + rest == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("moved", [copied_as_on_a_card, moved_when_asked])
@pytest.mark.parametrize("row", [0, 4, 11])
def test_an_error_comes_behind_the_batch_before_it_and_the_loop_reads_on(moved, row):
    loader = build_loader(FailsOnce(row), batch_size=3, num_workers=0, seed=0)
    plain = build_loader(FailsOnce(row), batch_size=3, num_workers=0, seed=0)

    assert what_comes_of(moved(loader)) == what_comes_of(iter(plain))


def what_comes_of(iterator):
    outcomes = []
    while True:
        try:
            outcomes.append(next(iterator).tolist())
        except StopIteration:
            return outcomes
        except KeyError as error:
            outcomes.append(str(error))


def test_the_state_of_a_loader_that_counts_what_is_copied_is_refused(monkeypatch):
    class Stateful(list):
        def state_dict(self):
            return {"batches": 2}

    moved = DevicePrefetcher(Stateful([torch.ones(1)]), "cpu")
    assert moved.state_dict() == {"batches": 2}

    with_streams = dataclasses.replace(moved.capability, asynchronous=True)
    # Of a device with streams only what it says matters here.
    monkeypatch.setattr(moved, "capability", with_streams)
    with pytest.raises(LoaderError, match="cannot tell the state of a Stateful"):
        moved.state_dict()


def test_a_batch_of_none_is_no_end():
    device = torch.device("cpu")

    copies = CopiedBatches(iter([None, 3, None]), device, FakeModule())

    assert list(copies) == [None, 3, None]


def test_what_is_page_locked_is_copied_there_once(monkeypatch):
    locked = set()

    def pin_memory(tensor):
        copied = tensor.clone()
        locked.add(id(copied))
        return copied

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: id(t) in locked)
    tensor, empty = torch.ones(3), torch.ones(0)

    copied = page_locked(tensor)

    assert copied is not tensor
    assert copied.tolist() == tensor.tolist()
    assert page_locked(copied) is copied
    assert page_locked(empty) is empty


@pytest.mark.needs("cuda")
def test_no_page_locked_block_is_used_again_before_its_copy_is_done():
    batches = [torch.full((1 << 22,), float(number)) for number in range(40)]

    sums = [batch.double().mean() for batch in DevicePrefetcher(batches, "cuda")]

    assert [value.item() for value in sums] == list(range(40))


def test_batches_are_not_fetched_ahead_twice():
    loader = build_loader(list(range(6)), batch_size=2, num_workers=0, lookahead=True)

    with pytest.raises(LoaderError, match="build it without lookahead=True"):
        copied_as_on_a_card(loader)
    moved = moved_when_asked(loader)  # one at a time, so the loop alone looks ahead

    assert len(list(moved)) == 3
