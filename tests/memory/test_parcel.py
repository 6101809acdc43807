"""Batches through one segment: equal, owned, and nothing left open."""

import dataclasses
import multiprocessing
import os
import pickle
from collections import OrderedDict
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData

from loaderkit import LoaderError, shares
from loaderkit.memory.parcel import Parcel, Segments, forget, parcels_work
from loaderkit.testing import assert_same


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Item:
    x: Any


def graphs():
    return [
        Data(x=torch.rand(n, 30), edge_index=torch.randint(n, (2, 9)), name=f"g{n}")
        for n in (300, 400)
    ]


def hetero():
    data = HeteroData()
    data["a"].x = torch.rand(90, 100)
    data["a", "to", "a"].edge_index = torch.randint(90, (2, 40))
    return data


BATCHES = {
    "large": torch.rand(100, 300),
    "small": torch.arange(3),
    "graphs": Batch.from_data_list(graphs()),
    "hetero": Batch.from_data_list([hetero(), hetero()]),
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


def posted(parcel):
    return pickle.loads(bytes(ForkingPickler.dumps(parcel)))


def sent(batch):
    segments = Segments(1)
    found = posted(Parcel(batch, segments))
    segments.close()
    forget([os.getpid()])
    return found


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_arrives_as_it_was(name):
    found = sent(BATCHES[name])

    assert_same(found, BATCHES[name])


def test_one_tensor_in_two_places_stays_one():
    tensor = torch.rand(200, 200)

    left, right = sent([tensor, tensor])

    assert left is right


def test_what_arrives_is_owned_and_keeps_no_file_open():
    before = set(os.listdir("/proc/self/fd"))

    found = sent({"x": torch.rand(500, 500), "y": torch.rand(3)})

    assert set(os.listdir("/proc/self/fd")) == before
    assert found["y"].untyped_storage().nbytes() == 12
    assert not shares(found["x"], found["y"])
    found["x"] += 1


def test_a_few_segments_are_filled_in_turn():
    segments, before = Segments(2), len(os.listdir("/proc/self/fd"))

    def passed(number):
        batch = torch.full((200, 200), float(number))
        return posted(Parcel(batch, segments))[0, 0].item()

    found = [passed(number) for number in range(2)]
    few = len(os.listdir("/proc/self/fd"))
    found += [passed(number) for number in range(2, 9)]

    assert found == list(range(9))
    assert before < len(os.listdir("/proc/self/fd")) == few
    segments.close()
    forget([os.getpid()])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_segment_grows_with_its_batches():
    segments = Segments(1)

    for rows in (200, 900, 300):
        batch = torch.rand(rows, 200)
        assert torch.equal(posted(Parcel(batch, segments)), batch)

    segments.close()
    forget([os.getpid()])


def test_a_batch_that_was_overwritten_is_never_given():
    segments = Segments(1)
    late = Parcel(torch.zeros(200, 200), segments)
    Parcel(torch.ones(200, 200), segments)

    with pytest.raises(LoaderError, match="overwritten by a later one"):
        posted(late)

    segments.close()
    forget([os.getpid()])


def give(queue, works):
    works.put(parcels_work())
    segments = Segments(4)
    for _ in range(3):
        queue.put(Parcel(Batch.from_data_list(graphs()), segments))
    works.get()  # ends only when all have arrived


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_parcels_pass_between_processes(method):
    context = multiprocessing.get_context(method)
    queue, works = context.Queue(), context.Queue()
    child = context.Process(target=give, args=(queue, works))
    child.start()

    assert works.get(timeout=60)
    found = [queue.get(timeout=60) for _ in range(3)]
    works.put("done")
    child.join()

    assert [each.num_graphs for each in found] == [2, 2, 2]
