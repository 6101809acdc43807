"""What goes into a cache comes out again, exactly, or is refused by name."""

import builtins
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Batch, Data, HeteroData

from loaderkit import open_cache, pack
from loaderkit.errors import DatasetError
from loaderkit.testing import assert_same

NO_NUMBERS = ("torch.q", "torch.bits", "torch.int1", "torch.uint1")
"""Dtypes that begin with one of these are quantized or bits that torch cannot fill."""


def has_values(dtype):
    """Say whether torch can make a tensor of this dtype and read its numbers."""
    name = str(dtype)
    of_few_bits = {
        f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(2, 8)
    }
    return (
        dtype.itemsize <= 16
        and not name.startswith(NO_NUMBERS)
        and name not in of_few_bits
        and "float4" not in name
    )


TORCH_DTYPES = [
    value for value in vars(torch).values() if isinstance(value, torch.dtype)
]
# "torch.int1" is also how the name of int16 begins.
DTYPES = {dtype for dtype in TORCH_DTYPES if has_values(dtype)}
DTYPES = sorted(DTYPES | {torch.int16, torch.uint16}, key=str)


def through_a_cache(samples, path, **options):
    dataset = pack(samples, path, workers=0, **options)
    return [dataset[row] for row in range(len(samples))]


@pytest.mark.many_cases
@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype, compression):
    bits = torch.randint(0, 2, (4, 3, 16), dtype=torch.uint8)[..., : dtype.itemsize]
    tensor = bits.contiguous().view(dtype).squeeze(-1)
    samples = [
        {
            "t": tensor,
            "row": tensor[1],
            "zero": tensor[0, 0].clone(),
            "none": tensor[:0],
        },
        {
            "t": tensor.t(),
            "row": tensor[:, 2],
            "zero": tensor[2, 1],
            "none": tensor[:, :0],
        },
    ]

    unpacked = through_a_cache(samples, tmp_path / "c.lk", compression=compression)

    assert_same(unpacked, samples)


@pytest.mark.needs("hdf5plugin")
@pytest.mark.parametrize("name", ["Zstd", "blosc2", "LZ4"])
def test_the_filters_of_hdf5plugin_come_back_bit_for_bit(tmp_path, name):
    samples = [{"t": torch.randn(i, 5), "s": "a" * i} for i in range(9)]

    unpacked = through_a_cache(samples, tmp_path / "c.lk", compression=name)

    assert_same(unpacked, samples)


def test_an_unknown_compression_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"None or one of gzip, lzf.*got 'zip'"):
        pack([1], tmp_path / "c.lk", compression="zip")


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers(),
    lambda inside: (
        st.lists(inside, max_size=4)
        | st.tuples(inside, inside)
        | st.dictionaries(st.text() | st.integers(), inside, max_size=3)
    ),
    max_leaves=8,
)
TENSORS = st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.zeros(shape))


@pytest.mark.slow
@given(
    samples=st.lists(
        st.dictionaries(st.text(), PLAIN | TENSORS), min_size=1, max_size=5
    )
)
@settings(max_examples=150)
def test_any_nest_of_plain_values_comes_back(tmp_path_factory, samples):
    unpacked = through_a_cache(samples, tmp_path_factory.mktemp("p") / "c.lk")

    assert_same(unpacked, samples)


@pytest.mark.many_cases(quick=20)
@pytest.mark.parametrize(
    "value",
    [
        "\ud800",
        "",
        "naïve\0text",
        b"",
        math.nan,
        -0.0,
        2**80,
        [2**80, None, (1,)],
        (),
        [],
        {},
        {"a": {}},
        [[torch.ones(1)], []],
        np.float16(2),
        np.array(3, ">i4"),
        np.zeros((0, 2), bool),
        torch.ones(1).expand(5, 4),
        torch.ones(6)[::2],
        torch.tensor([1 + 2j]).conj(),
        torch.nn.Parameter(torch.ones(2)).detach(),
        torch.eye(3).to_sparse(),
        torch.eye(4).to_sparse_csr(),
        torch.eye(4).to_sparse_csc(),
        torch.eye(4).to_sparse_bsr((2, 2)),
        EdgeIndex([[0, 1], [1, 0]], sort_order="row"),
        EdgeIndex([[0, 1], [1, 0]], sparse_size=(2, 3), is_undirected=False),
        Index([0, 0, 1], dim_size=4, is_sorted=True),
    ],
)
def test_one_value_comes_back(tmp_path, value):
    assert_same(through_a_cache([{"v": value}], tmp_path / "c.lk"), [{"v": value}])


def test_samples_may_be_built_differently(tmp_path):
    samples = [
        {"a": torch.ones(1), "b": 1},
        {"a": torch.ones(1)},
        {"a": None, "b": 1.5},
        {"b": "text", "a": torch.ones(2, 2).double()},
        {"a": [torch.ones(1), torch.ones(2)]},
        {"a": torch.ones(1), "b": 2},
    ]

    unpacked = through_a_cache(samples, tmp_path / "c.lk", shard_bytes=40)

    assert_same(unpacked, samples)


class Stranger:
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Stranger(), "a Stranger"),
        (np.array(["a"]), "an ndarray"),
        (np.array([Stranger()], object), "an ndarray"),
        ({Stranger(): 1}, "a dict"),
        (torch.ones(2, device="meta"), "a Tensor"),
        (print, "a builtin_function_or_method"),
    ],
)
def test_what_a_cache_cannot_hold_is_refused_by_name(tmp_path, value, named):
    samples = [{"v": {"w": [torch.ones(1), 1]}}, {"v": {"w": [torch.ones(1), value]}}]

    with pytest.raises(DatasetError, match=rf"Sample '1' .*'v\.w\.1', {named}"):
        pack(samples, tmp_path / "c.lk")


def test_a_batch_is_refused_as_a_sample(tmp_path):
    batch = Batch.from_data_list([Data(x=torch.ones(1, 1))])

    with pytest.raises(DatasetError, match="to_data_list"):
        pack([batch], tmp_path / "c.lk")


@pytest.mark.slow
def test_a_dict_with_ids_for_keys_is_refused_with_the_fix(tmp_path):
    samples = [{f"id{i}": 1} for i in range(4100)]

    with pytest.raises(DatasetError, match="4,097th that is built differently"):
        pack(samples, tmp_path / "c.lk", workers=0)


def test_nothing_is_pickled_and_nothing_imported(tmp_path, monkeypatch):
    pack([{"a": torch.ones(1), "b": [1, "x"], "c": None}], tmp_path / "c.lk", workers=0)

    def forbidden(*_args, **_kwargs):
        raise AssertionError

    monkeypatch.setattr(pickle, "loads", forbidden)
    monkeypatch.setattr(pickle, "load", forbidden)
    monkeypatch.setattr(builtins, "eval", forbidden)
    monkeypatch.setattr(builtins, "exec", forbidden)

    assert open_cache(tmp_path / "c.lk")[0]["b"] == [1, "x"]


def test_a_class_that_is_not_known_is_named_with_the_argument_to_pass(tmp_path):
    pack([Data(x=torch.ones(1, 1))], tmp_path / "c.lk")
    dataset = open_cache(tmp_path / "c.lk")

    node = dataset._loaderkit.opened.structure.variants[0]
    dataset._loaderkit.opened.structure.variants[0] = node._replace(cls="os:system")

    with pytest.raises(DatasetError, match="not known here: system of os") as caught:
        dataset[0]
    assert "classes=[system]" in caught.value.fix


def test_a_field_of_the_graph_may_be_called_as_a_node_type_is(tmp_path):
    graph = HeteroData()
    graph["atom"].num_nodes = graph["bond"].num_nodes = 3
    graph["atom", "in", "bond"].edge_index = torch.zeros(2, 4, dtype=torch.long)
    graph._global_store["bond"] = torch.arange(3)  # PyG then gives it as graph["bond"]

    pack([graph], tmp_path / "c", workers=0)

    assert_same(open_cache(tmp_path / "c")[0], graph)
