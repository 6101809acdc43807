"""What can be page-locked is, and what cannot is left alone or refused in words.

Tensors of a GPU are replayed by torch's fake ones, which need no driver, and torch's
``pin_memory`` by one that refuses what a real one refuses.
"""

import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import NamedTuple

import pytest
import torch
from data import graph
from torch._subclasses import FakeTensorMode
from torch.utils.data import TensorDataset
from torch.utils.data._utils.pin_memory import pin_memory as torch_pins
from torch_geometric.data import Data

from loaderkit import build_loader
from loaderkit.errors import LoaderError
from loaderkit.loader import read_facts
from loaderkit.loader.delivery import Delivery
from loaderkit.loader.failures import LocalFailure
from loaderkit.loader.page_locking import page_lock_batch
from loaderkit.memory.machine import Capability
from loaderkit.memory.shm_batch import SharedBatch
from loaderkit.memory.shm_segments import SegmentRing
from loaderkit.nests import flatten_tensors
from loaderkit.testing import assert_same

ON_CUDA = Capability("cuda", pins=True, asynchronous=True, unified=False, started=True)


def on_cuda(*shape):
    with FakeTensorMode():
        return torch.ones(shape, device="cuda:0")


@pytest.fixture
def locked(monkeypatch):
    """Numbers of the tensors in page-locked memory, as a torch for CUDA keeps them."""
    numbers = set()

    def pin_memory(tensor):
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            kind = f"torch.{tensor.device.type}.FloatTensor"
            message = f"cannot pin '{kind}' only dense CPU tensors can be pinned"
            raise RuntimeError(message)
        copied = tensor.clone()
        kept.append(copied)  # so that its number is not given again
        numbers.add(id(copied))
        return copied

    kept = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return numbers


class Pair(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass
class Record:
    field: object


def graph_with(tensor):
    return Data(x=torch.ones(2, 1), other=tensor)


HOLDERS = {
    "itself": lambda tensor: tensor,
    "list": lambda tensor: [torch.ones(3), tensor],
    "tuple": lambda tensor: (tensor, torch.ones(3), "text"),
    "named tuple": lambda tensor: Pair(tensor, torch.ones(2)),
    "dict": lambda tensor: {"a": [tensor], "b": torch.ones(2), "c": None},
    "dataclass": lambda tensor: Record([tensor, torch.ones(1)]),
    "graph": graph_with,
}
UNLOCKABLE = {
    "on the GPU": lambda: on_cuda(4, 3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", UNLOCKABLE)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_what_cannot_be_page_locked_is_left_alone_and_the_rest_is_locked(
    kind, holder, locked
):
    unlockable = UNLOCKABLE[kind]()
    batch = HOLDERS[holder](unlockable)

    result = page_lock_batch(batch)

    assert type(result) is type(batch)
    tensors = flatten_tensors(result)
    assert sum(tensor is unlockable for tensor in tensors) == 1
    assert all(id(tensor) in locked for tensor in tensors if tensor is not unlockable)


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", UNLOCKABLE)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.usefixtures("locked")
def test_where_it_was_asked_for_what_cannot_be_page_locked_is_refused_in_words(
    kind, holder
):
    batch = HOLDERS[holder](UNLOCKABLE[kind]())

    # As torch's loop and its thread call it.
    delivery = torch_pins(Delivery(batch, 3, 0, None, must_pin=True))

    assert isinstance(delivery.batch, LocalFailure)
    error = delivery.batch.rebuilt()
    assert isinstance(error, LoaderError)
    assert str(error).startswith("A batch cannot be page-locked: its ")
    assert error.why
    assert error.fix.startswith("pin_memory=False")


@pytest.mark.parametrize("holder", HOLDERS)
def test_all_of_a_batch_on_the_host_is_page_locked(holder, locked):
    batch = HOLDERS[holder](torch.arange(6.0))

    delivery = torch_pins(Delivery(batch, 3, 0, None))

    assert_same(delivery.batch, batch)
    assert all(id(tensor) in locked for tensor in flatten_tensors(delivery.batch))


def test_what_came_in_shared_memory_is_opened_and_page_locked(locked):
    segments = SegmentRing(1)
    batch = {"names": ["a", "b"], "x": torch.arange(9_000.0)}
    message = bytes(ForkingPickler.dumps(SharedBatch(batch, segments)))

    delivery = torch_pins(Delivery(pickle.loads(message), 3, 0, None))

    assert_same(delivery.batch, batch)
    assert id(delivery.batch["x"]) in locked
    segments.close()


def test_no_torch_looks_for_tensors_in_a_delivery():
    """Older ones enter tuples, mappings and sequences before they ask an object."""
    delivery = Delivery(torch.ones(3), 3, 0, None)

    assert not isinstance(delivery, tuple | Mapping | Sequence)


def test_that_memory_was_short_is_told(monkeypatch):
    def out_of_memory(_):
        raise RuntimeError("CUDA error: out of memory")  # noqa: EM101

    monkeypatch.setattr(torch.Tensor, "pin_memory", out_of_memory)

    with pytest.raises(RuntimeError, match="out of memory"):
        page_lock_batch({"x": torch.ones(3)})


def samples_on_cuda():
    """Datasets whose samples lie on the GPU."""
    graphs = [graph(nodes) for nodes in (2, 3)]
    for sample in graphs:
        sample.x = on_cuda(2, 1)
    return {
        "tensors": [on_cuda(3) for _ in range(4)],
        "dicts": [{"x": torch.ones(3), "y": on_cuda(1)} for _ in range(4)],
        "tuples": [(on_cuda(3), number) for number in range(4)],
        "TensorDataset": TensorDataset(on_cuda(4, 3)),
        "graphs": graphs,
    }


@pytest.fixture
def cuda_is_here(monkeypatch):
    # torch has no card here; its tensors are fakes on one.
    monkeypatch.setattr(read_facts, "read_capability", lambda _: ON_CUDA)


@pytest.mark.parametrize("name", samples_on_cuda())
@pytest.mark.usefixtures("cuda_is_here")
def test_samples_on_the_gpu_are_neither_page_locked_nor_read_by_forked_workers(name):
    samples = samples_on_cuda()[name]

    plan = build_loader(samples, "cuda", batch_size=2).plan

    assert not plan.pin_memory
    assert "batches are made on cuda:0" in plan.pin_memory.reason
    assert plan.num_workers == 0
    for asked, fix in (
        ({"num_workers": 2}, "num_workers=0"),
        ({"pin_memory": True}, "pin_memory=False"),
    ):
        with pytest.raises(LoaderError) as caught:
            build_loader(samples, "cuda", batch_size=2, **asked)
        assert "cuda:0" in caught.value.why
        assert caught.value.fix == f"{fix}, or keep samples on the host"


@pytest.mark.usefixtures("cuda_is_here")
def test_samples_on_the_host_are_page_locked():
    samples = [{"x": torch.ones(3), "y": torch.ones(1)} for _ in range(4)]

    plan = build_loader(samples, "cuda", batch_size=2).plan

    assert plan.pin_memory


class HostSamples:
    """Holds something on the GPU, and gives samples on the host."""

    def __init__(self):
        self.table = on_cuda(3)

    def __len__(self):
        return 400

    def __getitem__(self, row):
        return torch.full((3,), float(row))


@pytest.mark.usefixtures("cuda_is_here")
def test_what_a_dataset_holds_on_the_gpu_says_nothing_of_where_its_samples_lie():
    for asked in ({}, {"pin_memory": True}):
        plan = build_loader(HostSamples(), "cuda", batch_size=2, **asked).plan

        assert plan.pin_memory
        assert plan.num_workers == 0
        assert "forked workers cannot use cuda:0" in plan.num_workers.reason


def move_to_cuda(batch):
    return on_cuda(*batch.shape)


def use_a_device_after_the_fork(_):
    message = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
    raise RuntimeError(message + "multiprocessing, you must use the 'spawn' start")


@pytest.mark.usefixtures("cuda_is_here")
@pytest.mark.parametrize(
    ("transform", "device"),
    [(move_to_cuda, "cuda:0"), (use_a_device_after_the_fork, "a device")],
)
def test_batches_that_are_moved_as_they_are_made_are_known_by_the_probe(
    transform, device
):
    samples = [torch.ones(3) for _ in range(400)]

    plan = build_loader(samples, "cuda", batch_size=2, batch_transform=transform).plan

    assert not plan.pin_memory
    assert f"batches are made on {device}" in plan.pin_memory.reason
    assert plan.num_workers == 0


def test_a_device_that_a_forked_worker_cannot_use_is_told_with_the_fix():
    samples = [torch.ones(3) for _ in range(4)]
    loader = build_loader(
        samples,
        batch_size=2,
        num_workers=1,
        batch_transform=use_a_device_after_the_fork,
    )

    with pytest.raises(LoaderError) as caught:
        list(loader)

    assert "before the workers were forked" in caught.value.why
    assert caught.value.fix == "num_workers=0, or keep samples on the host"
