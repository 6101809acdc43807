"""Batches through one segment: equal, owned, and nothing left open."""

import dataclasses
import multiprocessing
import os
import pickle
from collections import OrderedDict, deque
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData

from loaderkit import shares
from loaderkit.memory.parcel import Parcel, parcels_work
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


def sent(batch):
    kept = deque(maxlen=4)
    text = bytes(ForkingPickler.dumps(Parcel(batch, kept)))
    found = pickle.loads(text)
    while kept:
        os.close(kept.pop())
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


def test_the_sender_keeps_only_so_many_segments_open():
    kept = deque(maxlen=2)
    before = len(os.listdir("/proc/self/fd"))

    parcels = [Parcel(torch.rand(200, 200), kept) for _ in range(5)]

    assert len(os.listdir("/proc/self/fd")) == before + 2
    assert len(parcels) == 5
    while kept:
        os.close(kept.pop())


def give(queue, works):
    works.put(parcels_work())
    kept = deque(maxlen=4)
    for _ in range(3):
        queue.put(Parcel(Batch.from_data_list(graphs()), kept))
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
