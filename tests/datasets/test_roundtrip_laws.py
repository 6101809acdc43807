"""Nothing is lost or changed in silence: a sample comes back, or packing refuses it."""

import collections
import dataclasses
import enum
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch_geometric.data import Batch, Data, HeteroData

from loaderkit import SafeDataset, owned_copy, pack
from loaderkit.datasets import encode as encode_module
from loaderkit.datasets import kinds as kinds_module
from loaderkit.datasets import shard_filling
from loaderkit.datasets.pack import PackOptions
from loaderkit.errors import DamagedCacheError, DatasetError, LoaderkitError
from loaderkit.testing import assert_same

# Texts that other keys are written as, and characters that names of columns use.
TEXTS = st.sampled_from(
    [
        "1",
        "None",
        "True",
        "1.5",
        "a__b",
        "",
        "a",
        "b",
        ".",
        "/",
        "~2",
        "a~2",
        "1~2",
        "%",
        "%2E",
        "@key",
        "@variant",
        "a@inc",
        "\ud800",
        "\\ud800",
        "%uD800",
        "\0",
        "é",
    ]
)
KEYS = st.recursive(
    TEXTS
    | st.text(max_size=3)
    | st.sampled_from([None, True, False, 0, 1, 2, -1, 1.5, 0.0, -0.0]),
    lambda inside: st.lists(inside, max_size=2).map(tuple),
    max_leaves=3,
)
NAMES = st.text("ab_", min_size=1, max_size=5)


def written(value):
    """What a value is, type by type, as Python writes it: 1, True and 1.0 differ."""
    if isinstance(value, torch.Tensor):
        return f"{type(value)} {value.dtype} {value.tolist()}"
    if isinstance(value, dict):
        return [(repr(key), written(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(written, value)]
    return f"{type(value)} {value!r}"


@st.composite
def nests(draw, depth=2):
    """Dicts with keys of mixed types, whose leaves are all different numbers."""
    count = iter(range(1000))

    def fill(depth):
        keys = draw(st.lists(KEYS, max_size=5))
        return {
            key: fill(depth - 1)
            if depth and draw(st.booleans())
            else torch.tensor([float(next(count))])
            for key in keys
        }

    return fill(depth)


@pytest.mark.slow
@given(samples=st.lists(nests(), min_size=1, max_size=4))
@settings(max_examples=100)
def test_keys_of_any_type_come_back_each_with_its_own_value(tmp_path_factory, samples):
    unpacked = pack(samples, tmp_path_factory.mktemp("k") / "c.lk", workers=0)

    for row, sample in enumerate(samples):
        assert written(unpacked[row]) == written(sample)


@pytest.mark.slow
@given(sample=nests(), inside=st.booleans())
@settings(max_examples=60)
def test_keys_of_any_type_batch_as_without_a_cache(tmp_path_factory, sample, inside):
    path = tmp_path_factory.mktemp("k") / "c.lk"
    samples = [Data(x=torch.ones(1, 1), d=sample) if inside else sample] * 3

    unpacked = pack(samples, path, workers=0).batch([0, 1, 2])

    wanted = Batch.from_data_list(samples).d if inside else default_collate(samples)
    assert written(unpacked.d if inside else unpacked) == written(wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There exist type names")
@given(
    nodes=st.lists(NAMES, unique=True, max_size=4),
    edges=st.lists(st.tuples(NAMES, NAMES, NAMES), unique=True, max_size=5),
    fields=st.lists(NAMES.filter(lambda n: n[0] != "_"), unique=True, max_size=2),
)
@settings(max_examples=60)
def test_node_and_edge_types_come_back_each_with_its_own_values(
    tmp_path_factory, nodes, edges, fields
):
    graph, count = HeteroData(), iter(range(100))
    for name in fields:
        if name not in nodes:
            graph[name] = {"w": torch.tensor([float(next(count))])}
    for key in [*nodes, *edges]:
        graph[key].w = torch.tensor([float(next(count))])

    unpacked = pack([graph], tmp_path_factory.mktemp("h") / "c.lk", workers=0)[0]

    assert written(unpacked.to_dict()) == written(graph.to_dict())


def test_names_of_ordinary_columns_stay_as_they_are(tmp_path):
    sample = {"a": {"b": 1}, "c.d": [torch.ones(1)], 3: 2, ("e", "f"): 1.5}

    dataset = pack([sample], tmp_path / "c.lk", workers=0)

    assert set(dataset._open_cache().structure.columns) >= {
        "a.b",
        "c%2Ed.0",
        "3",
        "e__f",
    }


class MyInt(int): ...


class MyStr(str): ...


class MyBytes(bytes): ...


class MyFloat(float): ...


class MyList(list): ...


class MyTuple(tuple): ...


class Mixin: ...


class MixedList(list, Mixin): ...


class MyDict(dict): ...


class NeedsMore(dict):
    def __init__(self, more):
        super().__init__()
        self.more = more


class Doubling(dict):
    """A dict that changes what is put into it."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value * 2)


class Attributes(dict):
    """A dict whose items are its attributes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Kind(enum.Enum):
    A = 1


class IntKind(enum.IntEnum):
    A = 1


class StrKind(str, enum.Enum):
    A = "x"


class FloatKind(float, enum.Enum):
    A = 1.5


class Base(NamedTuple):
    a: Any
    b: Any


class Scaled(Base):
    """A namedtuple whose ``__new__`` changes a field."""

    __slots__ = ()

    def __new__(cls, a, b):
        return super().__new__(cls, a * 2, b)


class Loose(Base):
    """A namedtuple with attributes."""


@dataclasses.dataclass
class Derived:
    a: int

    def __post_init__(self):
        self.twice = self.a * 2


class Hidden(Data):
    """A graph whose constructor sets a private attribute, always the same."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._unit = "eV"


def with_attribute(value):
    value.extra = 1
    return value


def private_graph():
    graph = Data(x=torch.ones(2, 1))
    graph._unit = "eV"
    return graph


def nested(depth, inside):
    for _ in range(depth):
        inside = [inside]
    return inside


CLASSES = [MyDict, Doubling, Attributes, Scaled, Derived, Hidden, Base]

KEPT = [
    collections.defaultdict(list, a=[1]),
    collections.defaultdict(None, a=1),
    collections.Counter("aab"),
    collections.OrderedDict(b=1, a=2),
    MyDict(a=1),
    Doubling(a=1),
    Attributes(a=1),
    Scaled(1, "x"),
    Scaled(1, torch.ones(1)),
    Derived(2),
    Hidden(x=torch.ones(2, 1)),
    ["\ud83d\ude00", "😀"],
    [{"\ud83d\ude00": "é"}],
    {True: None},
    np.float32(1.5),
    np.array(3, ">i4"),
    nested(90, 1),
    nested(90, torch.ones(1)),
    torch.ones([1] * 31),
    10**4000,
]

REFUSED = [
    (MyInt(3), "int(x)"),
    (MyStr("q"), "str(x)"),
    (MyBytes(b"q"), "bytes(x)"),
    (MyFloat(3.5), "float(x)"),
    (IntKind.A, ".value"),
    (StrKind.A, ".value"),
    (FloatKind.A, ".value"),
    (Kind.A, ".value"),
    (MyList([1]), "list(x)"),
    (MyTuple((1,)), "tuple(x)"),
    (MixedList([1]), "list(x)"),
    (torch.Size([1, 2]), "tuple(x)"),
    (torch.ones(2, 2).max(0), "tuple(x)"),
    (np.ma.masked_array([1.0, -999.0], [0, 1]), "getmaskarray"),
    (np.ones((1, 2)).view(np.matrix), "np.asarray(x)"),
    (np.longlong(1), "np.int64(x)"),
    (with_attribute(MyDict(a=1)), "dict(x)"),
    (NeedsMore(3), "dict(x)"),
    (collections.ChainMap({"a": 1}, {"b": 2}), "dict(x)"),
    (collections.defaultdict(lambda: 0), "dict(x)"),
    (with_attribute(Loose(1, 2)), ""),
    (private_graph(), "to_dict"),
    ({math.inf: 1}, "str(key)"),
    ({math.nan: 1}, "str(key)"),
    ({10**5000: 1}, "str(key)"),
    (10**5000, "hex(x)"),
    ([10**5000], "hex(x)"),
    (nested(300, torch.ones(1)), "flatten"),
    (nested(5000, 1), "flatten"),
    (torch.ones([1] * 33), "flat"),
    (np.ones([1] * 33), "flat"),
]


def fields_of(value):
    """All that there is to a value, as plain nests that can be compared."""
    if isinstance(value, dict | collections.UserDict):
        inside = [(repr(key), fields_of(item)) for key, item in value.items()]
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        names = [] if attributes is value else sorted(attributes)
        return type(value), inside, names, getattr(value, "default_factory", None)
    if isinstance(value, list | tuple):
        return type(value), [fields_of(item) for item in value]
    if dataclasses.is_dataclass(value):
        return type(value), fields_of(vars(value))
    if isinstance(value, Data):
        return type(value), fields_of(value.to_dict()), getattr(value, "_unit", None)
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return type(value), str(value.dtype), tuple(value.shape), value.tolist()
    return type(value), repr(value) if not isinstance(value, int) else value


@pytest.mark.many_cases
@pytest.mark.parametrize("where", ["v", "list"])
@pytest.mark.parametrize("value", KEPT, ids=lambda v: type(v).__name__)
def test_what_is_packed_comes_back_with_all_there_is_to_it(tmp_path, value, where):
    if isinstance(value, Data) and where == "list":
        pytest.skip("a graph is a sample of its own")
    sample = value if isinstance(value, Data) else {"v": value}
    sample = {"v": [value, torch.ones(1)]} if where == "list" else sample

    unpacked = pack([sample] * 2, tmp_path / "c.lk", workers=0)

    assert fields_of(unpacked[1]) == fields_of(sample)


@pytest.mark.many_cases
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a list"])
@pytest.mark.parametrize(
    ("value", "fix"), REFUSED, ids=[type(value).__name__ for value, _ in REFUSED]
)
def test_what_would_change_is_refused_at_the_first_sample(tmp_path, value, fix, inside):
    if isinstance(value, Data):
        sample = value
    else:
        sample = {"v": [value, torch.ones(1)] if inside else value}

    refusal = r"Sample '1'.*A cache cannot hold"
    with pytest.raises(DatasetError, match=refusal) as caught:
        pack([{"v": 1}, sample, sample], tmp_path / "c.lk", workers=0)

    assert fix in caught.value.fix
    assert not (tmp_path / "c.lk" / "manifest.json").exists()


def test_keys_that_python_holds_equal_are_told_apart_across_samples(tmp_path):
    samples = [{key: None} for key in (1, True, 1.0, "1", 0, False, 0.0, -0.0, None)]

    unpacked = pack(samples, tmp_path / "c.lk", workers=0, shard_bytes=1)

    assert [repr(unpacked[row]) for row in range(9)] == [repr(s) for s in samples]


class Counted(SafeDataset):
    def keys(self):
        return [0, 1]

    def load(self, _key):
        return collections.Counter("aab")


def test_a_counter_is_not_added_to_itself_without_a_cache():
    dataset = Counted()

    assert dataset[0] == collections.Counter("aab")
    assert {k: v.tolist() for k, v in dataset.batch([0, 1]).items()} == {
        "a": [2, 2],
        "b": [1, 1],
    }


@pytest.mark.parametrize(
    "value",
    [v for v in KEPT if not isinstance(v, torch.Tensor | Data)]
    + [np.ma.masked_array([1.0, -999.0], [0, 1]), with_attribute(MyDict(a=1))],
    ids=lambda v: type(v).__name__,
)
def test_a_copy_has_all_there_is_to_a_value(value):
    copied = owned_copy(value)

    assert fields_of(copied) == fields_of(value)
    if isinstance(value, np.ma.MaskedArray):
        assert copied.mask.tolist() == [0, 1]


def test_a_mapping_that_keeps_more_than_pairs_is_not_copied():
    with pytest.raises(DatasetError, match="how a ChainMap keeps its items"):
        owned_copy({"v": collections.ChainMap({"a": 1}, {"b": 2})})


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.slow
@given(
    dtype=st.sampled_from(INTEGERS),
    nodes=st.lists(st.integers(1, 120), min_size=1, max_size=6),
    columns=st.integers(0, 9000),
)
@settings(max_examples=40)
def test_narrow_indices_are_incremented_as_pyg_does(
    tmp_path_factory, dtype, nodes, columns
):
    samples = [
        Data(
            x=torch.ones(count, 1),
            edge_index=torch.full((2, columns), count - 1, dtype=dtype),
        )
        for count in nodes
    ]
    dataset = pack(samples, tmp_path_factory.mktemp("i") / "c.lk", workers=0)

    unpacked = dataset.batch(range(len(samples)))

    assert_same(unpacked, Batch.from_data_list(samples))


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    trailing_shape=st.sampled_from([(0,), (2, 0), (0, 3)]),
    ragged=st.sampled_from(["padded", "packed", "jagged"]),
)
@settings(max_examples=40)
def test_rows_without_numbers_batch_with_a_cache_as_without(
    tmp_path_factory, lengths, trailing_shape, ragged
):
    class Empty(SafeDataset):
        def keys(self):
            return range(len(lengths))

        def load(self, key):
            return {"v": torch.zeros(lengths[key], *trailing_shape)}

    rows = list(range(len(lengths)))
    plain = Empty(ragged=ragged)
    try:
        wanted = plain.batch(rows)["v"]
    except RuntimeError:  # torch's jagged layout cannot hold it either
        return

    cached = Empty(
        ragged=ragged,
        cache=tmp_path_factory.mktemp("e") / "c.lk",
        packing=PackOptions(workers=0),
    )
    batch = cached.batch(rows)["v"]

    assert type(batch) is type(wanted)
    assert [tuple(part.shape) for part in _tensors_of_batch(batch)] == [
        tuple(part.shape) for part in _tensors_of_batch(wanted)
    ]


def _tensors_of_batch(batch):
    if isinstance(batch, torch.Tensor):
        return batch.unbind() if batch.is_nested else [batch]
    return [part for part in batch if isinstance(part, torch.Tensor)]


def test_graphs_with_rows_without_numbers_batch_as_with_pyg(tmp_path):
    samples = [Data(x=torch.ones(2, 1), v=torch.zeros(i, 0)) for i in range(4)]

    unpacked = pack(samples, tmp_path / "c.lk", workers=0).batch([3, 1, 0])

    assert_same(unpacked, Batch.from_data_list([samples[i] for i in (3, 1, 0)]))


HOSTILE = [
    '{"c":[1' + "0" * 400 + ",0]}",
    '{"c":["x"]}',
    '{"c":{"real":1}}',
    "[" * 100_000,
    "[" * 900 + "]" * 900,
    '{"b":1}',
    '{"b":"%%%"}',
    '{"d":[[[],1]]}',
    '{"t":5}',
    '{"d":5}',
    "{}",
    '{"a":1,"b":2}',
    "NaN",
    "9" * 5000,
    '"\\ud800"',
    '{"c":[1,2,3]}',
    '{"c":[null,null]}',
    "1e400",
    "true",
    "null",
]


@pytest.mark.many_cases(quick=14)
@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:16])
def test_plain_values_that_pack_never_writes_are_an_error_of_ours(
    tmp_path, monkeypatch, text
):
    # Written so, the checksum of the file is right and only its values are strange.
    monkeypatch.setattr(kinds_module, "to_bytes", lambda _value: text.encode())
    # Packing looks at lists as they are written, and would find it out.
    monkeypatch.setattr(shard_filling, "form_of_bytes", lambda *_: "[]")
    dataset = pack([{"v": [1]}] * 2, tmp_path / "c.lk", workers=0)

    for read in (lambda: dataset[0], lambda: dataset.batch([0, 1])):
        try:
            read()
        except LoaderkitError as error:
            assert error.fix  # noqa: PT017 -- some of these texts are values


PARTS = [
    3,
    "x",
    None,
    [1],
    {"a": 1},
    {},
    torch.ones(2),
    1.5,
    10**30,
    (1, 2),
    (-1, -1),
    (None, "x"),
    (10**30, 2),
    torch.tensor([0, 2**62]),
    b"x",
]
COMPOSITES = {
    "edge_index": {
        "data": torch.tensor([[0], [1]]),
        "sparse_size": (2, 2),
        "sort_order": "row",
        "is_undirected": False,
    },
    "index": {"data": torch.tensor([0, 1]), "dim_size": 2, "is_sorted": True},
    "sparse_tensor": {
        "row": torch.tensor([0]),
        "col": torch.tensor([1]),
        "value": torch.ones(1),
        "sizes": (2, 2),
    },
    "sparse_coo": {
        "indices": torch.tensor([[0], [1]]),
        "values": torch.ones(1),
        "size": (2, 2),
        "coalesced": True,
    },
    "sparse_csr": {
        "compressed": torch.tensor([0, 1, 1]),
        "plain": torch.tensor([0]),
        "values": torch.ones(1),
        "size": (2, 2),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "part"),
    [(kind, part) for kind, parts in COMPOSITES.items() for part in parts],
)
def test_parts_that_make_no_tensor_are_an_error_of_ours(
    tmp_path, monkeypatch, kind, part
):
    stand_in = object()
    for at, wrong in enumerate(PARTS):
        parts = {**COMPOSITES[kind], part: wrong}
        written_as = dataclasses.replace(
            kinds_module.NEST_KINDS[kind],
            flatten=lambda _, parts=parts: kinds_module.Container(
                tuple(parts), list(parts.values())
            ),
            unflatten=lambda *_, **__: None,  # which encode would see them refused by
        )
        monkeypatch.setattr(
            encode_module,
            "find_nest_kind",
            lambda value, row=written_as: (
                row if value is stand_in else kinds_module.find_nest_kind(value)
            ),
        )
        dataset = pack([{"v": stand_in}], tmp_path / f"{at}.lk", workers=0)
        try:
            dataset[0]
        except DamagedCacheError as error:
            assert kind in error.why  # noqa: PT017 -- a part may fit after all
        except DatasetError as error:  # SparseTensor without torch-sparse
            assert "sparse" in error.why  # noqa: PT017
