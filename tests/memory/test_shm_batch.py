"""Batches through one segment: equal, owned, and nothing left open."""

import dataclasses
import math
import multiprocessing
import os
import pickle
import random
import threading
from collections import OrderedDict
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sender import send_batches
from torch.utils.data._utils.collate import default_collate_fn_map

from loaderkit.datasets.owned_copy import shares_memory
from loaderkit.errors import LoaderError
from loaderkit.memory.process import quick_counters
from loaderkit.memory.shm_batch import (
    SharedBatch,
    default_collate,
    sends_shared_batches,
)
from loaderkit.memory.shm_segments import (
    SegmentRing,
    filling_segments,
    forget,
    give_segments,
    reserve_segment,
)
from loaderkit.testing import assert_same


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Item:
    x: Any


# PyG is imported where it is used: the leak detector's tests, which run beside these,
# walk every object that there is.
def batch_of_graphs():
    from torch_geometric.data import Batch, Data

    graphs = [
        Data(x=torch.rand(n, 30), edge_index=torch.randint(n, (2, 9)), name=f"g{n}")
        for n in (300, 400)
    ]
    return Batch.from_data_list(graphs)


def heterogeneous_batch():
    from torch_geometric.data import Batch, HeteroData

    data = HeteroData()
    data["a"].x = torch.rand(90, 100)
    data["a", "to", "a"].edge_index = torch.randint(90, (2, 40))
    return Batch.from_data_list([data, data])


BATCHES = {
    "large": torch.rand(100, 300),
    "small": torch.arange(3),
    "graphs": batch_of_graphs,
    "hetero": heterogeneous_batch,
    "nest": {"a": [torch.rand(99, 300), ("x", None)], "b": Pair(torch.ones(2), 3)},
    "ordered": OrderedDict(a=torch.rand(200, 200)),
    "dataclass": Item(torch.rand(200, 200)),
    "strided": torch.rand(200, 200).t(),
    "empty": torch.empty(0, 3),
    "number": torch.tensor(2.0),
    "bfloat16": torch.rand(200, 200).bfloat16(),
    "bool": torch.rand(300, 300) > 0.5,
    "sparse": {"adj": torch.eye(300).to_sparse(), "x": torch.rand(300, 300)},
    "complex": torch.rand(200, 200).to(torch.complex64).conj(),
}


def pickled_and_read(shared_batch):
    return pickle.loads(bytes(ForkingPickler.dumps(shared_batch))).open()


def received_batch(batch):
    segments = SegmentRing(1)
    arrived = pickled_and_read(SharedBatch(batch, segments))
    segments.close()
    forget([os.getpid()])
    return arrived


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_arrives_as_it_was(name):
    batch = BATCHES[name]() if callable(BATCHES[name]) else BATCHES[name]

    assert_same(received_batch(batch), batch)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_axes_stay_in_the_order_in_which_they_lie_in_memory_as_torch_sends_them(data):
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    axes = data.draw(st.permutations(range(len(shape))))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bool, torch.complex64]))
    padding = data.draw(st.sampled_from([[], [torch.ones(20_000)]]))
    tensor = torch.arange(math.prod(shape)).to(dtype).view(shape).permute(axes)

    arrived = received_batch([tensor, *padding])[0]

    # torch's own message keeps strides; those of axes of one number say nothing.
    as_torch = pickle.loads(bytes(ForkingPickler.dumps(tensor)))
    assert torch.equal(arrived, as_torch)
    if tensor.numel():
        assert arrived.squeeze().stride() == as_torch.squeeze().stride()


def test_images_stay_channels_last():
    images = torch.rand(2, 3, 40, 40).to(memory_format=torch.channels_last)

    arrived = received_batch({"images": images})["images"]

    assert arrived.is_contiguous(memory_format=torch.channels_last)
    assert not arrived.is_contiguous()
    assert torch.equal(arrived, images)


def test_one_tensor_in_two_places_stays_one():
    tensor = torch.rand(200, 200)

    left, right = received_batch([tensor, tensor])

    assert left is right


def test_what_arrives_is_owned_and_keeps_no_file_open():
    before = set(os.listdir("/proc/self/fd"))

    arrived = received_batch({"x": torch.rand(500, 500), "y": torch.rand(3)})

    assert set(os.listdir("/proc/self/fd")) == before
    assert arrived["y"].untyped_storage().nbytes() == 12
    assert not shares_memory(arrived["x"], arrived["y"])
    arrived["x"] += 1


def test_a_few_segments_are_filled_in_turn():
    segments, before = SegmentRing(2), len(os.listdir("/proc/self/fd"))

    def passed(number):
        batch = torch.full((200, 200), float(number))
        return pickled_and_read(SharedBatch(batch, segments))[0, 0].item()

    arrived = [passed(number) for number in range(2)]
    few = len(os.listdir("/proc/self/fd"))
    arrived += [passed(number) for number in range(2, 9)]

    assert arrived == list(range(9))
    assert before < len(os.listdir("/proc/self/fd")) == few
    segments.close()
    forget([os.getpid()])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_segment_grows_with_its_batches():
    segments = SegmentRing(1)

    for rows in (200, 900, 300):
        batch = torch.rand(rows, 200)
        assert torch.equal(pickled_and_read(SharedBatch(batch, segments)), batch)

    segments.close()
    forget([os.getpid()])


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.lists(
        st.sampled_from(["whole", "transposed", "part", "copied", "negated", "twice"]),
        max_size=8,
    ),
    st.integers(1, 3),
)
def test_tensors_made_in_a_segment_arrive_as_they_were(uses, turns):
    """Whatever of a segment a batch holds, with whatever else."""
    segments = SegmentRing(2)
    give_segments(segments)

    for turn in range(turns):
        with filling_segments():
            content = reserve_segment(lambda: 80_000)
        content.copy_(torch.arange(80_000).add(turn).byte())
        numbers = content.view(torch.int64).view(100, 100)
        batch = [torch.full((10_000,), turn)]
        batch += [view_of(numbers, use) for use in uses]
        wanted = pickle.loads(pickle.dumps(batch))
        arrived = pickled_and_read(SharedBatch(batch, segments))
        assert all(map(torch.equal, arrived, wanted))
        assert not any(shares_memory(tensor, numbers) for tensor in arrived)

    give_segments(None)
    segments.close()
    forget([os.getpid()])


def view_of(numbers, use):
    if use == "transposed":
        return numbers.t()
    if use == "part":
        return numbers[3:70]
    if use == "copied":
        return numbers.clone()
    if use == "negated":
        return torch.view_as_complex(numbers.double().view(-1, 2)).conj()
    return numbers


def test_a_segment_is_given_to_one_batch_once_and_to_no_code_of_users():
    segments = SegmentRing(2)
    give_segments(segments)

    assert reserve_segment(lambda: 128_000) is None
    with filling_segments():
        assert reserve_segment(lambda: 100) is None
        assert reserve_segment(lambda: 128_000) is not None
        # Half of a batch, which is joined with the other half by torch.
        assert reserve_segment(lambda: 128_000) is None
    # What was not sent does not stand in the way of the next batch.
    with filling_segments():
        assert reserve_segment(lambda: 128_000) is not None

    give_segments(None)
    segments.close()


def test_a_batch_that_was_overwritten_is_never_given():
    segments = SegmentRing(1, opening_s=0.0)
    late = SharedBatch(torch.zeros(200, 200), segments)
    # One is made in a segment more.
    for _ in range(2):
        SharedBatch(torch.ones(200, 200), segments)

    with pytest.raises(LoaderError, match="overwritten by a later one"):
        pickled_and_read(late)

    segments.close()
    forget([os.getpid()])


@pytest.mark.parametrize("seed", range(6))
def test_batches_wait_where_they_are_in_any_order_and_arrive_as_sent(seed):
    """As torch asks: at most one more is under way than there are segments."""
    rng = random.Random(seed)
    count = rng.randrange(1, 4)
    # Nobody opens one meanwhile, so there is nothing to wait for.
    segments = SegmentRing(count, opening_s=0.0)
    descriptors = set()
    under_way = []

    for number in range(40):
        # Some are dropped: a loop was left.  torch gives them in their turn, or not.
        while under_way and (len(under_way) > count or rng.random() < 0.4):
            arrived, expected = under_way.pop(rng.randrange(len(under_way)))
            if rng.random() < 0.8:
                assert_same(arrived.open(), expected)
            del arrived
        batch = {"x": torch.full((rng.randrange(100, 300), 99), float(number))}
        shared_batch = SharedBatch(batch, segments)
        if shared_batch.segment is not None:
            descriptors.add(shared_batch.segment.descriptor)
        message = bytes(ForkingPickler.dumps(shared_batch))
        under_way.append((pickle.loads(message), batch))

    for arrived, expected in under_way:
        assert_same(arrived.open(), expected)
    assert 1 <= len(descriptors) <= count + 1
    segments.close()
    forget([os.getpid()])


@pytest.mark.slow
def test_a_batch_is_not_copied_before_it_is_opened():
    segments = SegmentRing(1)
    # 36 MB: malloc maps what is larger than 32 MiB, and reuses no hole for it.
    batch = torch.ones(3_000, 3_000)
    message = bytes(ForkingPickler.dumps(SharedBatch(batch, segments)))
    before = anonymous_bytes()

    arrived = [pickle.loads(message) for _ in range(3)]

    assert anonymous_bytes() - before < 1 << 20
    # The twin: what it costs when each is copied.
    opened = [received.open() for received in arrived]
    assert anonymous_bytes() - before > 100_000_000
    assert all(torch.equal(tensor, batch) for tensor in opened)
    segments.close()
    forget([os.getpid()])


def anonymous_bytes():
    return quick_counters()["anonymous"]


def test_a_worker_waits_for_the_batch_that_is_being_opened():
    segments = SegmentRing(1, opening_s=60.0)
    shared_batch = SharedBatch(torch.zeros(200, 200), segments)
    arrived = pickle.loads(bytes(ForkingPickler.dumps(shared_batch)))
    opening = threading.Timer(0.01, arrived.open)
    opening.start()

    next_batch = SharedBatch(torch.ones(200, 200), segments)

    assert next_batch.segment.descriptor == shared_batch.segment.descriptor
    opening.join()
    segments.close()
    forget([os.getpid()])


@pytest.mark.parametrize(
    "method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_batches_pass_between_processes(method):
    context = multiprocessing.get_context(method)
    queue, works = context.Queue(), context.Queue()
    child = context.Process(target=send_batches, args=(queue, works))
    child.start()

    assert works.get()
    arrived = [queue.get().open() for _ in range(3)]
    works.put("done")
    child.join()

    assert [batch["x"].mean().item() for batch in arrived] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("in_worker_that_packs", [False, True])
def test_samples_join_as_torch_joins_them(in_worker_that_packs):
    nests = [
        [torch.rand(2, 3) for _ in range(4)],
        [torch.rand(5, 4).t() for _ in range(2)],
        [{"x": np.arange(3), "s": "a", "f": 0.5, "p": (1, torch.ones(2))}] * 3,
        [[torch.ones(2, dtype=torch.bool), np.float32(2)]] * 2,
        [torch.ones(2).to_sparse()] * 2,
        [torch.ones(2), torch.ones(3)],
        [torch.rand(2, requires_grad=True)] * 2,
        [object()],
    ]
    token = sends_shared_batches.set(in_worker_that_packs)

    for samples in nests:
        try:
            wanted = torch.utils.data.default_collate(samples)
        except Exception as error:  # noqa: BLE001 -- whatever torch says
            with pytest.raises(type(error)):
                default_collate(samples)
            continue
        assert_same(default_collate(samples), wanted)

    sends_shared_batches.reset(token)


def test_a_function_that_was_registered_with_torch_joins_in_a_worker(monkeypatch):
    def joined(tensors, *, collate_fn_map):
        return len(tensors), torch.Tensor in collate_fn_map

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, joined)
    token = sends_shared_batches.set(True)

    assert default_collate([{"x": torch.ones(2)}]) == {"x": (1, True)}

    sends_shared_batches.reset(token)


class JoinedInWorker(torch.utils.data.Dataset):
    """Joins in a worker that packs, or in one that does not, and says where it lies."""

    def __init__(self, packs):
        self.packs = packs

    def __len__(self):
        return 1

    def __getitem__(self, row):
        sends_shared_batches.set(self.packs)
        batch = default_collate([{"x": torch.ones(3), "y": np.ones(2)}] * 2)
        return [value.is_shared() for value in batch.values()]


@pytest.mark.parametrize(("packs", "shared"), [(False, True), (True, False)])
def test_a_worker_that_packs_writes_nothing_to_shm_before(packs, shared):
    loader = torch.utils.data.DataLoader(
        JoinedInWorker(packs), num_workers=1, batch_size=None
    )

    assert list(loader) == [[shared, shared]]
