"""Every kind of value has one row in the table, and a sample of it comes back."""

import dataclasses
import json
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Data

from loaderkit import pack
from loaderkit.datasets.encode import encode
from loaderkit.datasets.inspect import inspect_cache
from loaderkit.datasets.kinds import (
    COUNTER_KINDS,
    LEAF_KINDS,
    NEST_KINDS,
    Kind,
    find_leaf_kind,
    find_nest_kind,
    flatten_composite,
    unflatten_composite,
)
from loaderkit.datasets.structure import Leaf, Structure
from loaderkit.testing import assert_same


class Point(NamedTuple):
    x: torch.Tensor
    label: str


@dataclasses.dataclass
class Molecule:
    pos: torch.Tensor
    name: str


def of_layout(layout):
    dense = torch.eye(4)
    if layout in {torch.sparse_bsr, torch.sparse_bsc}:
        return dense.to_sparse(layout=layout, blocksize=(2, 2))
    return dense.to_sparse(layout=layout)


EXAMPLES = {
    Kind.TENSOR: torch.arange(6.0).reshape(2, 3),
    Kind.ARRAY: np.arange(4, dtype=">i2"),
    Kind.SCALAR: np.float32(1.5),
    Kind.INT: -7,
    Kind.FLOAT: 0.1,
    Kind.COMPLEX: 1 - 2j,
    Kind.BOOL: True,
    Kind.STR: "é \ud800",
    Kind.BYTES: b"\xff\0",
    Kind.BIGINT: 1 << 70,
    Kind.JSON: ["C", 1, (None, {"a": 2.5})],
    Kind.NONE: None,
    Kind.DICT: {"x": torch.ones(2), 1: "one", False: "false", 0.5: None},
    Kind.LIST: [torch.ones(1), "a"],
    Kind.TUPLE: (torch.ones(1), "a"),
    Kind.NAMED: Point(torch.ones(1), "a"),
    Kind.DATACLASS: Molecule(torch.ones(2, 3), "water"),
    Kind.EDGE_INDEX: EdgeIndex([[0, 1], [1, 0]], sparse_size=(2, 2)),
    Kind.INDEX: Index([0, 0, 1], dim_size=2, is_sorted=True),
    Kind.SPARSE_COO: of_layout(torch.sparse_coo),
    Kind.SPARSE_CSR: of_layout(torch.sparse_csr),
    Kind.SPARSE_CSC: of_layout(torch.sparse_csc),
    Kind.SPARSE_BSR: of_layout(torch.sparse_bsr),
    Kind.SPARSE_BSC: of_layout(torch.sparse_bsc),
}
GRAPHS_ALONE = {Kind.GRAPH, Kind.STORE}
"""Parts of no other sample."""
NEED_A_LIBRARY = {Kind.SPARSE_TENSOR}


def test_every_kind_has_its_row_in_one_table():
    tables = [LEAF_KINDS, NEST_KINDS, COUNTER_KINDS]

    rows = [kind for table in tables for kind in table]

    assert sorted(rows) == sorted(Kind)
    for table in tables:
        assert all(row.kind is kind for kind, row in table.items())


def test_every_kind_of_a_table_has_an_example_here():
    of_values = {*LEAF_KINDS, *NEST_KINDS}

    assert of_values == {*EXAMPLES, *GRAPHS_ALONE, *NEED_A_LIBRARY}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_an_example_is_found_by_its_row_alone(kind):
    value = EXAMPLES[kind]

    kind_row = find_leaf_kind(value) or find_nest_kind(value)

    assert kind_row is not None
    assert kind_row.kind is kind
    holding = [row.kind for row in NEST_KINDS.values() if row.holds(value)]
    if kind in NEST_KINDS:
        assert holding == [kind]


@pytest.mark.many_cases
@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_value_of_every_kind_comes_back_one_by_one_and_together(tmp_path, kind):
    samples = [{"v": EXAMPLES[kind], "row": row} for row in range(3)]

    dataset = pack(samples, tmp_path / "c.lk", workers=0)

    for row, sample in enumerate(samples):
        assert_same(dataset[row], sample)
    assert_same(dataset.read_together([2, 0]), [samples[2], samples[0]])


@pytest.mark.needs("torch_sparse")
def test_a_sparse_tensor_of_torch_sparse_comes_back(tmp_path):
    from torch_sparse import SparseTensor

    sample = {"v": SparseTensor.from_dense(torch.eye(3))}

    assert_same(pack([sample], tmp_path / "c.lk", workers=0)[0], sample)


@pytest.mark.parametrize(
    "kind", [k for k, row in NEST_KINDS.items() if row.is_composite]
)
def test_a_composite_has_the_parts_that_its_row_names(kind):
    if kind in NEED_A_LIBRARY:
        pytest.skip("a SparseTensor needs torch_sparse")

    composite = flatten_composite(EXAMPLES[kind])

    assert composite.kind is kind
    assert composite.parts.keys() == NEST_KINDS[kind].part_names
    assert_same(unflatten_composite(*composite, checked=True), EXAMPLES[kind])


@pytest.mark.parametrize("kind", LEAF_KINDS)
def test_what_a_row_writes_is_what_it_says_fits_and_decodes(kind):
    leaf, values = encode({"v": EXAMPLES[kind]})
    [leaf] = leaf.children

    assert isinstance(leaf, Leaf)
    row, column = LEAF_KINDS[kind], leaf.column
    assert column.kind is kind
    assert row.fits(column)
    assert row.disk_dtype(column.dtype) == values[column].dtype
    assert_same(row.decode(column, values[column].copy()), EXAMPLES[kind])


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_structure_is_the_same_after_json(kind):
    structure = Structure()
    structure.number(encode({"v": EXAMPLES[kind]}).tree, key="0")

    written = json.dumps(structure.to_json())
    again = Structure.from_json(json.loads(written))

    assert again == structure
    assert json.dumps(again.to_json()) == written


def test_kinds_are_plain_text_in_json():
    structure = Structure()
    graph = Data(x=torch.ones(2, 3), edge_index=torch.zeros(2, 4).long(), name="a")
    structure.number(encode(graph).tree, key="0")

    written = json.dumps(structure.to_json())

    # As loaderkit 0.1 wrote it: caches on disk say this.
    fields = (
        '["leaf", "x", "tensor", "float32", 2, 0, "x@inc"], '
        '["leaf", "edge_index", "tensor", "int64", 2, 1, "edge_index@inc"], '
        '["leaf", "name", "str", "", 1, 0, null]'
    )
    assert written == (
        '{"variants": [["nest", "graph", "torch_geometric.data.data:Data", ["None"], '
        '[["nest", "store", null, ["\'x\'", "\'edge_index\'", "\'name\'"], '
        f'[{fields}], "@nodes"]], null]], '
        '"columns": {"x@inc": ["x@inc", "inc", "int64", 0, null], '
        '"x": ["x", "tensor", "float32", 2, 0], '
        '"edge_index@inc": ["edge_index@inc", "inc", "int64", 0, null], '
        '"edge_index": ["edge_index", "tensor", "int64", 2, 1], '
        '"name": ["name", "str", "", 1, 0], '
        '"@nodes": ["@nodes", "nodes", "int64", 0, null]}}'
    )


def test_keys_that_python_finds_equal_are_variants_of_their_own():
    structure = Structure()
    keys = [1, True, 1.0, 0.0, -0.0, "1"]

    numbers = [
        structure.number(encode({key: torch.ones(1)}).tree, key=repr(key))
        for key in keys
    ]

    assert numbers == list(range(len(keys)))
    again = Structure.from_json(json.loads(json.dumps(structure.to_json())))
    assert [
        again.number(encode({key: torch.ones(1)}).tree, key=repr(key)) for key in keys
    ] == numbers


def test_inspection_names_the_kind_as_plain_text(tmp_path):
    pack([{"v": 1, "t": "a"}], tmp_path / "c.lk", workers=0)

    fields = inspect_cache(tmp_path / "c.lk").to_json()["fields"]

    assert {(field["name"], field["kind"]) for field in fields} == {
        ("v", "int"),
        ("t", "str"),
    }
    assert all(type(field["kind"]) is str for field in fields)
