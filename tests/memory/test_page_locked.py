"""Page-locked memory: what is locked in a nest, and what happens when there is none."""

import logging
from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from page_locking import ReplayedAllocator, dense_tensors
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data._utils.pin_memory import pin_memory
from torch_geometric.data import Batch, Data, HeteroData

from loaderkit.memory.page_locked import PageLockedMemory
from loaderkit.nests import flatten
from loaderkit.testing import assert_same


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


class PinsItself:
    """A batch of a class of one's own, as torch's documentation has it."""

    def __init__(self, pinned=False):
        self.tensor, self.pinned = torch.ones(2), pinned

    def pin_memory(self):
        return PinsItself(pinned=True)


class Fields(dict):
    """A dict that pins itself: torch calls it, and does not look inside."""

    def pin_memory(self):
        return Fields(pinned=True)


class PinnedData(Data):
    """A graph that pins in its own way."""

    def pin_memory(self, *_):
        return "pinned"


def hetero():
    data = HeteroData()
    data["a"].x, data["a", "b"].edge_index = torch.ones(2), torch.zeros(2, 1)
    return data


NESTS = {
    "tensor": lambda: torch.ones(3),
    "strided": lambda: torch.arange(12).view(3, 4).t(),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(2.5),
    "grad": lambda: torch.ones(2, requires_grad=True),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "dict": lambda: {"a": torch.ones(2), "texts": ["x", "y"], "n": None},
    "tuple": lambda: (torch.ones(1), [torch.zeros(2), b"z", 3]),
    "named": lambda: Pair(torch.ones(2), ("a", torch.ones(1))),
    "userdict": lambda: UserDict(a=torch.ones(2)),
    "graph": lambda: Data(x=torch.ones(2, 3), name="g", list=[torch.ones(1), "t"]),
    "batch": lambda: Batch.from_data_list([Data(x=torch.ones(n, 3)) for n in (1, 2)]),
    "hetero": hetero,
}


@pytest.mark.parametrize("kind", sorted(NESTS))
def test_all_dense_tensors_of_a_nest_are_locked_and_the_rest_is_the_same(kind):
    allocator = ReplayedAllocator()
    memory = PageLockedMemory(allocator)
    nest = NESTS[kind]()

    locked = memory.lock(nest)

    assert [str(leaf) for leaf in flatten(locked)] == [
        str(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
        for leaf in flatten(nest)
    ]
    assert type(locked) is type(nest)
    assert all(map(allocator.has, filter(torch.numel, dense_tensors(locked))))
    copied = len(allocator.copied)
    again = memory.lock(locked)
    if kind not in {"sparse", "empty"}:
        assert len(allocator.copied) == copied
        pairs = zip(dense_tensors(again), dense_tensors(locked), strict=True)
        assert all(second is first for second, first in pairs)


@pytest.mark.needs("cuda")
@pytest.mark.parametrize("kind", sorted(NESTS))
def test_a_nest_is_what_torch_makes_of_it(kind):
    locked, by_torch = PageLockedMemory().lock(NESTS[kind]()), pin_memory(NESTS[kind]())

    assert_same(locked, by_torch)
    pairs = zip(dense_tensors(locked), dense_tensors(by_torch), strict=True)
    assert all(ours.is_pinned() == torchs.is_pinned() for ours, torchs in pairs)


@pytest.mark.parametrize("make", [PinsItself, Fields, PinnedData])
def test_what_pins_itself_is_asked_to_as_by_torch(make):
    locked = PageLockedMemory(ReplayedAllocator()).lock([make(), {"a": make()}])

    for part in (locked[0], locked[1]["a"]):
        by_torch = pin_memory(make())
        assert type(part) is type(by_torch)
        assert part == "pinned" or getattr(part, "pinned", None) or part["pinned"]


def test_an_error_of_its_own_reaches_the_user():
    class Fails:
        def pin_memory(self):
            msg = "mine"
            raise RuntimeError(msg)

    memory = PageLockedMemory(ReplayedAllocator())

    with pytest.raises(RuntimeError, match="mine"):
        memory.lock([Fails()])
    assert memory.refusal is None


def test_tensors_on_a_device_stay_there():
    tensor = torch.ones(2, device="meta")

    assert PageLockedMemory(ReplayedAllocator()).lock([tensor])[0] is tensor


@pytest.mark.parametrize("blocks", range(5))
def test_a_refusal_is_told_once_and_loses_nothing(blocks, caplog):
    allocator = ReplayedAllocator(blocks)
    memory = PageLockedMemory(allocator)
    nest = [torch.full((3,), float(n)) for n in range(3)]

    with caplog.at_level(logging.WARNING, "loaderkit"):
        locked = [memory.lock(nest) for _ in range(3)]
        made = memory.empty((2, 3), torch.int16)

    assert_same(locked, [nest] * 3)
    assert (made.shape, made.dtype) == ((2, 3), torch.int16)
    assert memory.refusal == "CUDA error: out of memory"
    assert allocator.refused == len(caplog.records) == 1
    assert "no page-locked memory: CUDA error: out of memory" in caplog.text


def test_packed_sequences_pin_themselves():
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    calls = []

    class Noting(PackedSequence):
        def pin_memory(self):
            calls.append(self)
            return self

    noting = Noting(*packed)

    assert PageLockedMemory(ReplayedAllocator()).lock((noting,)) == (noting,)
    assert calls == [noting]
