"""Nests: a container comes back as its own class, with the leaves that were given."""

import collections
import dataclasses
import types
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch_geometric.data import Batch, Data, HeteroData, TemporalData
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from loaderkit.datasets.ragged import Padded
from loaderkit.nests import (
    flatten,
    flatten_tensors,
    map_leaves,
    map_tensors,
    rebuild,
    tensor_bytes,
)
from loaderkit.pyg import is_pyg_data
from loaderkit.testing import assert_same


class Point(NamedTuple):
    x: torch.Tensor
    name: str


class Checked(Point):
    """A named tuple that takes other arguments than its parts."""

    def __new__(cls, x):
        return super().__new__(cls, x, "checked")


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    parts: tuple = ()


@dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor


@dataclass
class Computed:
    x: torch.Tensor
    scale: InitVar[float]
    mask: torch.Tensor = field(init=False)

    def __post_init__(self, scale):
        self.x = self.x * scale
        self.mask = self.x > 0


class Names(list):
    """A list that knows more than its items."""

    language = "none"


CONTAINERS = {
    "dict": lambda leaves: dict(enumerate(leaves)),
    "ordered": lambda leaves: collections.OrderedDict(enumerate(leaves)),
    "user": lambda leaves: collections.UserDict(enumerate(leaves)),
    "proxy": lambda leaves: types.MappingProxyType(dict(enumerate(leaves))),
    "list": list,
    "names": Names,
    "tuple": tuple,
    "named": lambda leaves: Point(leaves, "a"),
    "frozen": lambda leaves: Frozen(tuple(leaves), tuple(leaves)),
    "slotted": lambda leaves: Slotted(list(leaves)),
    "graph": lambda leaves: Data(x=torch.ones(2), parts=list(leaves)),
}
LEAVES = st.one_of(
    st.integers(0, 9).map(lambda number: torch.full((2,), float(number))),
    st.integers(),
    st.text(max_size=2),
    st.none(),
    st.just(np.arange(3)),
)


@st.composite
def containers(draw, children):
    make = CONTAINERS[draw(st.sampled_from(sorted(CONTAINERS)))]
    return make(draw(st.lists(children, max_size=3)))


NESTS = st.recursive(LEAVES, containers, max_leaves=8)


@pytest.mark.slow
@given(NESTS)
def test_what_is_flattened_is_rebuilt(nest):
    again = rebuild(nest, flatten(nest))

    assert type(again) is type(nest)
    assert_same_nest(again, nest)


@pytest.mark.slow
@given(NESTS)
def test_a_map_changes_each_tensor_and_nothing_else(nest):
    before = flatten(nest)

    after = flatten(map_tensors(lambda tensor: tensor + 1, nest))

    assert len(after) == len(before)
    for new, old in zip(after, before, strict=True):
        if isinstance(old, torch.Tensor):
            assert torch.equal(new, old + 1)
        else:
            assert new is old
    for leaf, old in zip(flatten(nest), before, strict=True):
        assert leaf is old


@pytest.mark.slow
@given(st.recursive(LEAVES, lambda c: st.lists(c) | st.dictionaries(st.text(), c)))
def test_dicts_and_lists_are_flattened_as_torch_flattens_them(nest):
    wanted = torch.utils._pytree.tree_leaves(nest)

    # torch's trees take None for a leaf too, in releases of today.
    assert [id(leaf) for leaf in flatten(nest)] == [id(leaf) for leaf in wanted]


def assert_same_nest(nest, other):
    """Compare by leaves and by the classes of what they are in."""
    assert [id(leaf) for leaf in flatten(nest)] == [id(leaf) for leaf in flatten(other)]
    assert type(nest) is type(other)


@pytest.mark.parametrize(
    "nest",
    [
        collections.defaultdict(list, x=torch.ones(2)),
        Names([torch.ones(2)]),
        Checked(torch.ones(2)),
        Frozen(torch.ones(2)),
        Slotted(torch.ones(2)),
        Padded(torch.ones(1, 2), torch.tensor([2]), torch.ones(1, 2) > 0),
        BatchEncoding({"input_ids": torch.ones(2)}),
        torch.max(torch.ones(2, 2), dim=0),
        types.MappingProxyType({"x": torch.ones(2)}),
    ],
    ids=lambda nest: type(nest).__name__,
)
def test_a_container_keeps_its_class(nest):
    doubled = map_tensors(lambda tensor: tensor.double() * 2, nest)

    assert type(doubled) is type(nest)
    assert doubled is not nest
    for new, old in zip(flatten_tensors(doubled), flatten_tensors(nest), strict=True):
        assert torch.equal(new, old.double() * 2)


def test_what_a_container_knows_beside_its_parts_stays():
    lists = collections.defaultdict(list, x=torch.ones(2))
    names = Names([torch.ones(2)])
    names.language = "English"

    assert map_tensors(torch.clone, lists)["absent"] == []
    assert map_tensors(torch.clone, names).language == "English"


def test_a_dataclass_is_not_initialised_twice():
    value = Computed(torch.tensor([-1.0, 2.0]), scale=3.0)

    moved = map_tensors(lambda tensor: tensor.to("meta"), value)
    copied = map_tensors(torch.clone, value)

    assert moved.x.is_meta
    assert moved.mask.is_meta
    assert copied.x.tolist() == [-3.0, 6.0]
    assert value.x.tolist() == [-3.0, 6.0]


def test_items_and_attributes_of_a_model_output_agree():
    output = BaseModelOutput(last_hidden_state=torch.ones(2))

    doubled = map_tensors(lambda tensor: tensor * 2, output)

    assert type(doubled) is BaseModelOutput
    assert doubled.last_hidden_state is doubled["last_hidden_state"]
    assert doubled.last_hidden_state.tolist() == [2, 2]
    assert output.last_hidden_state.tolist() == [1, 1]


def pyg_graphs():
    edges = torch.tensor([[0, 1], [1, 0]])
    plain = Data(x=torch.ones(2, 3), edge_index=edges, name="a")
    typed = HeteroData()
    typed["atom"].x = torch.ones(2, 3)
    typed["atom", "bond", "atom"].edge_index = edges
    typed.y = torch.ones(1)
    times = torch.arange(2)
    temporal = TemporalData(src=times, dst=times, t=times)
    return [plain, typed, temporal, Batch.from_data_list([plain, plain])]


@pytest.mark.parametrize("graph", pyg_graphs(), ids=lambda graph: type(graph).__name__)
def test_a_graph_is_copied_as_pyg_clones_it(graph):
    copied = map_tensors(torch.clone, graph)

    assert_same(copied.to_dict(), graph.clone().to_dict())
    for new, old in zip(flatten_tensors(copied), flatten_tensors(graph), strict=True):
        assert new.data_ptr() != old.data_ptr()


def test_a_batch_of_graphs_comes_apart_after_a_map():
    batch = pyg_graphs()[-1]

    first, second = map_tensors(lambda tensor: tensor + 0, batch).to_data_list()

    assert_same(first.x, second.x)
    assert first.name == "a"


def test_a_tuple_in_a_graph_stays_a_tuple():
    graph = Data(pair=(torch.ones(1), 2))

    assert type(map_tensors(torch.clone, graph).pair) is tuple


def test_an_error_on_a_leaf_in_a_graph_reaches_the_caller():
    def refuse(leaf):
        raise RuntimeError(leaf)

    with pytest.raises(RuntimeError):
        map_leaves(refuse, Data(name="a"))


def test_a_packed_sequence_moves_and_its_sizes_stay_on_the_cpu():
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)

    moved = map_tensors(lambda tensor: tensor.to("meta"), packed)
    doubled = map_tensors(
        lambda tensor: tensor * 2, PackedSequence(packed.data, packed[1])
    )

    assert type(moved) is PackedSequence
    assert moved.data.is_meta
    assert moved.batch_sizes.device.type == "cpu"
    values, lengths = pad_packed_sequence(doubled)
    assert values.max() == 2
    assert lengths.tolist() == [3, 2]


def test_leaves_may_be_chosen():
    graph = pyg_graphs()[0]
    nest = {"graph": graph, "names": ["a", "b"]}

    assert flatten(nest, is_pyg_data) == [graph, "a", "b"]
    assert rebuild(nest, [1, 2, 3], is_pyg_data) == {"graph": 1, "names": [2, 3]}


@pytest.mark.parametrize("leaves", [[1], [1, 2, 3]])
def test_another_number_of_leaves_is_refused(leaves):
    with pytest.raises(ValueError, match="2 leaves cannot be rebuilt"):
        rebuild([0, 0], leaves)


def test_a_class_in_a_nest_is_a_leaf():
    nest = [Frozen, Point, dict]

    assert flatten(nest) == nest
    assert dataclasses.is_dataclass(flatten(nest)[0])


@given(
    shape=st.lists(st.integers(0, 3), max_size=3),
    expands=st.booleans(),
    flips=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.int16, torch.complex64, torch.bool]),
)
def test_the_bytes_of_a_tensor_are_numpys_whatever_its_strides(
    shape, expands, flips, dtype
):
    tensor = torch.arange(30).to(dtype)[: int(np.prod(shape))].reshape(shape)
    if expands:
        tensor = torch.tensor(7).to(dtype).expand(shape)
    if flips:
        tensor = tensor.transpose(0, -1) if shape else tensor
        tensor = tensor.conj()

    content = tensor_bytes(tensor)

    assert content.numpy().tobytes() == tensor.resolve_conj().numpy().tobytes()
