"""Batches ahead of time: in order, owned, and without a trace when a loop is left."""

import contextlib
import gc
import threading
import time
import weakref
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from data import graph
from torch_geometric.data import Batch, HeteroData

from loaderkit import DevicePrefetcher, build_loader
from loaderkit.loader.prefetch import ReadAhead, beside, move, pinned_ring
from loaderkit.testing import assert_same


def read_ahead_threads():
    return [t for t in threading.enumerate() if t.name == "loaderkit-read-ahead"]


def gone(count=0):
    for _ in range(100):
        gc.collect()
        if len(read_ahead_threads()) <= count:
            return True
        time.sleep(0.02)
    return False


def slowly(count, made_s=0.002):
    for number in range(count):
        time.sleep(made_s)
        yield number


def test_a_loop_that_computes_gets_a_thread():
    ahead, found = ReadAhead(slowly(12), 2), []

    for number in ahead:
        time.sleep(0.004)
        found.append(number)

    assert ahead.threaded
    assert found == list(range(12))
    ahead.close()
    assert gone()


def test_a_loop_that_does_not_gets_none():
    ahead = ReadAhead(slowly(12), 2)

    assert list(ahead) == list(range(12))
    assert not ahead.threaded


def started(items):
    ahead = ReadAhead(items, 2)
    for _ in range(6):
        next(ahead)
        time.sleep(0.005)
    assert ahead.threaded
    return ahead


def test_a_loop_that_is_left_leaves_no_thread():
    ahead = started(slowly(1000))
    assert read_ahead_threads()

    del ahead

    assert gone()


def test_the_thread_that_stays_is_seen():
    ahead = started(slowly(1000))

    assert read_ahead_threads()
    assert next(ahead) == 6
    ahead.close()
    assert gone()


def test_an_error_comes_where_it_belongs():
    def failing():
        yield from slowly(8)
        raise KeyError("lost")  # noqa: EM101

    ahead, found = started(failing()), []

    with pytest.raises(KeyError, match="lost"):
        found.extend(ahead)
    with pytest.raises(KeyError, match="lost"):
        next(ahead)
    assert found == [6, 7] or not found
    ahead.close()


def test_an_end_is_told_again():
    ahead = started(slowly(7))
    next(ahead)

    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ahead)


def test_a_loader_reads_ahead_and_nothing_stays(cache):
    loader = build_loader(cache, batch_size=2, num_workers=0)
    found = []

    for batch in loader:
        time.sleep(0.005)
        found.append(batch.y.tolist())
        if len(found) == 10:
            assert read_ahead_threads()
            state = loader.state_dict()
            break

    assert found == [[n, n + 1] for n in range(0, 20, 2)]
    assert state["batches"] == 10
    del batch
    assert gone()


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
    for each in [move(nest, torch.device("meta"))]:
        assert type(each) is type(nest)


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


class FakeEvent:
    def __init__(self, log):
        self.log = log

    def record(self):
        self.log.append("recorded")

    def synchronize(self):
        self.log.append("synchronized")


class FakeModule:
    """torch.cuda as far as a copy beside the computing needs it."""

    def __init__(self):
        self.log = []
        self.current = FakeStream(self.log, "computing")

    def Stream(self, _):  # noqa: N802
        return FakeStream(self.log, "copying")

    def Event(self):  # noqa: N802
        return FakeEvent(self.log)

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
    copies = beside(
        iter([torch.ones(1), torch.ones(2)]), torch.device("cpu"), module, lambda t: t
    )

    first = next(copies)
    log = list(module.log)

    assert len(first) == 1
    assert log == [
        "on copying", "computing waits for copying", "used by computing", "on copying",
    ]  # fmt: skip
    assert [len(each) for each in copies] == [2]


def test_a_batch_is_not_held_once_it_is_given(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    batches = ([torch.ones(3)] for _ in range(3))
    copies = beside(batches, torch.device("cpu"), FakeModule(), lambda t: t)

    first = next(copies)[0]
    seen = weakref.ref(first)
    del first
    next(copies)
    gc.collect()

    assert seen() is None


def test_page_locked_buffers_are_used_again_after_their_copy(monkeypatch):
    module = FakeModule()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
    ring = pinned_ring(module, slots=2)

    places = []
    for number in range(4):
        staged = ring(torch.full((4,), float(number)))
        ring.finished()
        assert staged.tolist() == [number] * 4
        places.append(staged.data_ptr())

    assert len(set(places)) == 2
    assert module.log.count("synchronized") == 2
    assert module.log.count("recorded") == 4
