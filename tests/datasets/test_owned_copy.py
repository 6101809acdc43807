"""A copy that shares nothing, and the proof of it."""

import dataclasses
import datetime
import enum
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Batch, Data, HeteroData

from loaderkit import owned_copy
from loaderkit.datasets.owned_copy import shares_memory
from loaderkit.errors import DatasetError
from loaderkit.testing import assert_same


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Item:
    x: Any


class Color(enum.Enum):
    RED = 1


def hetero():
    data = HeteroData()
    data["a"].x = torch.ones(2, 1)
    data["a", "to", "a"].edge_index = torch.zeros(2, 3, dtype=torch.long)
    return data


NESTS = [
    torch.ones(3),
    torch.tensor(2.0),
    torch.empty(0, 3),
    torch.ones(2).bfloat16(),
    torch.eye(3).to_sparse(),
    torch.eye(4).to_sparse_csr(),
    torch.eye(4).to_sparse_csc(),
    EdgeIndex([[0, 1], [1, 0]], sparse_size=(2, 2), sort_order="row"),
    Index([0, 1], dim_size=3),
    np.ones(3),
    np.float32(2),
    {"a": torch.ones(1)},
    OrderedDict(a=torch.ones(1)),
    defaultdict(list, a=[torch.ones(1)]),
    [torch.ones(1), (torch.ones(2), "x")],
    Pair(torch.ones(1), 2),
    Item(torch.ones(2)),
    Data(x=torch.ones(2, 1), name="a", adj=torch.eye(2).to_sparse()),
    hetero(),
    Batch.from_data_list([Data(x=torch.ones(2, 1), num_nodes=2)] * 2),
    {1, 2},
    datetime.date(2026, 1, 1),
    Color.RED,
    None,
    "x",
    3,
]


@pytest.mark.parametrize("nest", NESTS, ids=lambda n: type(n).__name__)
def test_a_copy_is_equal_and_shares_nothing(nest):
    copied = owned_copy(nest)

    assert_same(copied, nest)
    assert not shares_memory(copied, nest)


def test_sharing_is_found_where_it_is():
    base = torch.arange(10.0)

    assert shares_memory(base[:2], {"deep": [(base[5:],)]})
    assert shares_memory(base, base.numpy())
    assert shares_memory(base.numpy()[1:3], base.numpy()[8:])
    assert shares_memory(base.to_sparse(), [base, Data(x=base)][1]) is False
    assert shares_memory(Data(x=base), Item(base.view(2, 5)))


def test_a_copy_of_a_view_has_its_own_bytes_alone():
    view = torch.ones(1000)[:2]

    assert view.untyped_storage().nbytes() == 4000
    assert owned_copy(view).untyped_storage().nbytes() == 8


def test_a_copy_is_off_the_graph():
    weight = torch.ones(2, requires_grad=True)

    copied = owned_copy(
        {"loss": weight * 2, "weight": torch.nn.Parameter(torch.ones(1))}
    )

    assert not copied["loss"].requires_grad
    assert type(copied["weight"]) is torch.Tensor


def test_jagged_tensors_are_copied():
    jagged = torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    )

    copied = owned_copy(jagged)

    assert not shares_memory(copied, jagged)
    assert shares_memory(jagged, jagged)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), r"sample\['v'\] is a builtins.object"),
        (np.array([{}], object), r"sample\['v'\] is a numpy.ndarray"),
    ],
)
def test_what_may_hold_memory_unseen_is_refused_by_name(value, named):
    with pytest.raises(DatasetError, match=named):
        owned_copy({"v": value})


def test_a_nest_that_contains_itself_is_refused():
    nest = []
    nest.append(nest)

    with pytest.raises(DatasetError, match="contains itself"):
        owned_copy(nest)


def test_a_device_tensor_in_a_worker_is_refused(monkeypatch):
    class OnDevice:
        device = torch.device("cuda", 0)

    from loaderkit.datasets.owned_copy import _own_tensor

    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", object())

    with pytest.raises(DatasetError, match="is on cuda:0 inside a DataLoader worker"):
        _own_tensor(OnDevice(), "sample['x']")


def test_a_jagged_tensor_keeps_its_holes_and_its_axis():
    values, offsets = torch.arange(12.0).view(6, 2), torch.tensor([0, 3, 6])
    holes = torch.nested.nested_tensor_from_jagged(
        values, offsets, torch.tensor([2, 1])
    )

    copied = owned_copy(holes)

    assert copied.lengths().tolist() == [2, 1]
    assert not shares_memory(copied, holes)
    assert shares_memory(copied, copied.values())


def test_tensors_without_memory_share_none():
    assert not shares_memory(
        torch.empty(3, device="meta"), torch.empty(3, device="meta")
    )


def test_what_cannot_be_looked_into_is_no_proof():
    with pytest.raises(DatasetError, match="cannot be told"):
        shares_memory(object(), torch.ones(1))
