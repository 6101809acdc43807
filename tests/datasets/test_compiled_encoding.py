"""What is taken apart by a compiled tree is what ``encode`` gives, or nothing."""

import collections
import dataclasses
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import Paired
from torch_geometric.data import Data, HeteroData

from loaderkit import open_cache, pack
from loaderkit.datasets.compiled_encoding import SampleEncoder
from loaderkit.datasets.encode import encode
from loaderkit.errors import DatasetError


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    first: Any
    second: Any


def conjugated(generator):
    return torch.tensor([complex(1, generator.random())]).conj()


def sparse(generator):
    index = torch.tensor([[generator.randrange(3)]])
    return torch.sparse_coo_tensor(index, torch.ones(1), (3,))


# Makers of values that are easily taken for each other.
LEAVES = {
    "f4": lambda g: torch.rand(g.randrange(3)),
    "f4 2d": lambda g: torch.rand(g.randrange(3), 2),
    "f4 0d": lambda g: torch.tensor(g.random()),
    "f8": lambda g: torch.rand(2, dtype=torch.float64),
    "i8": lambda g: torch.tensor([g.randrange(9)]),
    "u2": lambda g: torch.tensor([g.randrange(9)], dtype=torch.uint16),
    "bf16": lambda g: torch.rand(2).bfloat16(),
    "bool": lambda g: torch.rand(3) > 0.5,
    "transposed": lambda g: torch.rand(2, 3).t(),
    "expanded": lambda g: torch.rand(1, 2).expand(3, 2),
    "with gradient": lambda g: torch.rand(2, requires_grad=True),
    "parameter": lambda g: torch.nn.Parameter(torch.rand(2)),
    "conjugated": conjugated,
    "sparse": sparse,
    "array": lambda g: np.full(g.randrange(3), g.random(), np.float32),
    "array, other end first": lambda g: np.full(2, g.random(), ">f4"),
    "array 2d, columns first": lambda g: np.full((2, 3), g.random()).T,
    "array 0d": lambda g: np.array(g.random()),
    "scalar": lambda g: np.float32(g.random()),
    "scalar i8": lambda g: np.int64(g.randrange(9)),
    "int": lambda g: g.randrange(9),
    "int of 64 bits": lambda g: g.choice([2**63 - 1, -(2**63)]),
    "larger int": lambda g: 2**63,
    "float": lambda g: g.choice([g.random(), -0.0, float("nan")]),
    "complex": lambda g: complex(0, g.random()),
    "flag": lambda g: g.random() > 0.5,
    "text": lambda g: "é" * g.randrange(3),
    "half a character": lambda g: "\ud800",
    "bytes": lambda g: bytes(g.randrange(3)),
    "None": lambda g: None,
    "numbers": lambda g: [g.randrange(9) for _ in range(g.randrange(3))],
    "texts": lambda g: [g.choice("ab") for _ in range(g.randrange(4))],
    "tuple": lambda g: (g.randrange(9), "a", None),
    "plain nest": lambda g: [{"a": (1, b"x")}, [g.random()]],
}
NESTS = {
    "dict": lambda parts: dict(zip("ab", parts, strict=True)),
    "dict, other order": lambda parts: dict(zip("ba", parts, strict=True)),
    "dict of numbers": lambda parts: dict(zip((0, True), parts, strict=True)),
    "dict of other numbers": lambda parts: dict(zip((0, 1), parts, strict=True)),
    "ordered": lambda parts: collections.OrderedDict(zip("ab", parts, strict=True)),
    "list": list,
    "tuple": tuple,
    "named": lambda parts: Point(*parts),
    "dataclass": lambda parts: Record(*parts),
}
forms = st.recursive(
    st.sampled_from(sorted(LEAVES)),
    lambda parts: st.tuples(st.sampled_from(sorted(NESTS)), parts, parts),
    max_leaves=6,
)


def sample_of(form, generator):
    """Make a sample of a form: the name of a leaf, or of a nest with two forms."""
    if isinstance(form, str):
        return LEAVES[form](generator)
    nest, *parts = form
    return NESTS[nest]([sample_of(part, generator) for part in parts])


def with_another_leaf(form, leaf, generator):
    """Change one leaf, or one nest, of a form."""
    if isinstance(form, str):
        return leaf
    parts = list(form)
    position = generator.randrange(3)
    if position == 0:
        parts[0] = generator.choice(sorted(NESTS))
    else:
        parts[position] = with_another_leaf(parts[position], leaf, generator)
    return tuple(parts)


def difference(sample, encoder):
    """Say how an encoder takes a sample apart in another way than ``encode``."""
    try:
        tree, values = encode(sample)
    except DatasetError as error:
        with pytest.raises(DatasetError) as caught:
            encoder.encode(sample)
        return "" if str(caught.value) == str(error) else "another error"
    encoded = encoder.encode(sample)
    # Texts, since 1, True and 1.0 are equal as keys.
    if repr(encoded.layout.tree) != repr(tree):
        return f"built otherwise: {encoded.layout.tree}, not {tree}"
    columns = [
        (column, array.dtype.str, array.ndim) for column, array in values.items()
    ]
    if [tuple(column) for column in encoded.layout.columns[:-1]] != columns:
        return f"other columns: {encoded.layout.columns}"
    if encoded.shapes != [size for array in values.values() for size in array.shape]:
        return f"other shapes: {encoded.shapes}"
    if encoded.values != [array.tobytes() for array in values.values()]:
        return "other values"
    return ""


def encoder_of(*samples):
    """Make an encoder that has compiled the trees of samples."""
    encoder = SampleEncoder()
    for sample in samples:
        for _ in range(2):
            encoder.encode(sample)
    return encoder


@pytest.mark.slow
@settings(deadline=None)
@given(form=forms, leaf=st.sampled_from(sorted(LEAVES)), seed=st.integers(0, 999))
def test_samples_are_taken_apart_as_encode_does_after_others_were(form, leaf, seed):
    generator = random.Random(seed)
    torch.manual_seed(seed)
    other_form = with_another_leaf(form, leaf, generator)
    assume("None" not in {form, other_form})  # no sample, but what may be in one
    first, second = sample_of(form, generator), sample_of(other_form, generator)
    encoder = encoder_of(first, second)

    for _ in range(2):
        for each in (form, other_form):
            assert difference(sample_of(each, generator), encoder) == ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
@pytest.mark.parametrize("first", sorted(LEAVES))
def test_a_value_is_not_taken_for_another_one(first):
    generator = random.Random(0)
    torch.manual_seed(0)
    containers = [
        lambda value: {"x": value},
        lambda value: [value, torch.ones(1)],
        lambda value: Data(x=value, num_nodes=3),
        lambda value: Data(edge_index=value, num_nodes=generator.randrange(4)),
        lambda value: Data(parts={"index": value}, num_nodes=2),
    ]
    for contained in containers:
        for second in sorted(LEAVES):
            value = LEAVES[first](generator)
            try:
                encoder = encoder_of(contained(value))
            except DatasetError:
                continue
            assert difference(contained(LEAVES[second](generator)), encoder) == ""


def test_a_difference_would_be_seen():
    class Wrong(SampleEncoder):
        def encode(self, sample):
            return super().encode({**sample, **self.instead})

    encoder = Wrong()
    for instead, what in [
        ({"x": torch.ones(2, 1)}, "built otherwise"),
        ({"x": torch.ones(3)}, "other shapes"),
        ({"x": torch.zeros(2)}, "other values"),
    ]:
        encoder.instead = instead
        assert difference({"x": torch.ones(2)}, encoder).startswith(what)


class Answering(Data):
    """A graph whose rules follow from its own numbers."""

    def __inc__(self, key, value, *args, **kwargs):
        answers = {"a": 3, "b": torch.tensor(4), "c": [1], "d": 2**70}
        return answers.get(self.mood, 0) if key == "x" else self.step

    def __cat_dim__(self, key, value, *args, **kwargs):
        if key == "pos":
            return {"a": 0, "b": -1, "c": None, "d": (0, 1)}.get(self.mood, 1)
        return super().__cat_dim__(key, value, *args, **kwargs)


def graph(cls, generator, mood):
    nodes = generator.randrange(1, 4)
    data = cls(
        x=torch.rand(nodes, 2),
        pos=torch.rand(2, 2),
        edge_index=torch.randint(nodes, (2, generator.randrange(4))),
        edge_index_s=torch.zeros(2, 1, dtype=torch.long),
        batch_of=torch.arange(nodes),
        face=torch.zeros(3, generator.randrange(2), dtype=torch.long),
        y=generator.randrange(9),
        row_index=generator.randrange(9),
        parts={"index": torch.arange(2), "z": torch.rand(1), "n": 1.5},
        rows=[torch.rand(1), torch.rand(2)],
        mood=mood,
        step=generator.randrange(3),
    )
    if cls is Paired:
        data.x_s = torch.rand(nodes, 1)
        data.graph_level = torch.rand(3)
    if mood == "e":
        data.num_nodes = nodes + 1
    if mood == "f":
        del data.x
    return data


def hetero(generator, mood):
    data = HeteroData(y=generator.randrange(9), index=torch.arange(2))
    for key in ("a", "b"):
        data[key].x = torch.rand(generator.randrange(1, 4), 2)
    data["a", "to", "b"].edge_index = torch.zeros(2, generator.randrange(3)).long()
    data["a", "to", "b"].weight = torch.rand(generator.randrange(3))
    if mood == "b":
        data["b"].node_index = torch.arange(2)
    if mood == "c":
        data["b", "to", "a"].edge_index = torch.zeros(2, 1).long()
    return data


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
@settings(deadline=None, max_examples=60)
@given(
    cls=st.sampled_from([Data, Paired, Answering, HeteroData]),
    moods=st.lists(st.sampled_from("abcdef"), min_size=2, max_size=4),
    seed=st.integers(0, 999),
)
def test_graphs_are_taken_apart_as_encode_does_after_others_were(cls, moods, seed):
    generator = random.Random(seed)
    torch.manual_seed(seed)

    def make(mood):
        if cls is HeteroData:
            return hetero(generator, mood)
        return graph(cls, generator, mood)

    encoder = encoder_of(*map(make, moods))

    for mood in "abcdef":
        assert difference(make(mood), encoder) == ""


@pytest.mark.parametrize("cls", [Data, Paired, HeteroData])
def test_graphs_of_a_kind_are_taken_apart_by_one_compiled_tree(cls):
    generator = random.Random(0)
    make = hetero if cls is HeteroData else lambda g, mood: graph(cls, g, mood)
    encoder = encoder_of(make(generator, "g"))

    [compiled] = encoder._compiled
    assert all(compiled.encode(make(generator, "g")) is not None for _ in range(9))


def test_a_private_attribute_of_a_later_graph_is_refused():
    encoder = encoder_of(Data(x=torch.ones(2, 1)))
    later = Data(x=torch.ones(2, 1))
    later._secret = 3

    with pytest.raises(DatasetError, match="_secret"):
        encoder.encode(later)


class OneBuffer(torch.utils.data.Dataset):
    """Gives the same memory each time, with another sample in it."""

    def __init__(self):
        self.buffer, self.array = torch.zeros(3), np.zeros(2)

    def __len__(self):
        return 40

    def __getitem__(self, row):
        self.buffer.fill_(row)
        self.array.fill(row)
        return {"x": self.buffer, "t": self.buffer.reshape(3, 1).t(), "a": self.array}


def test_samples_whose_memory_is_used_again_are_packed_as_they_were(tmp_path):
    pack(OneBuffer(), tmp_path / "c.lk", workers=0)

    cache = open_cache(tmp_path / "c.lk")
    assert [int(sample["x"].sum()) for sample in cache] == [3 * n for n in range(40)]
    assert [int(sample["t"].sum()) for sample in cache] == [3 * n for n in range(40)]
    assert [int(sample["a"].sum()) for sample in cache] == [2 * n for n in range(40)]


def test_thousands_of_trees_are_not_compiled():
    encoder = SampleEncoder()
    for number in [*range(200), *range(200)]:
        encoder.encode({f"key {number}": 1})

    assert len(encoder._compiled) == 16
