"""A manifest that contradicts itself is refused at open, with what contradicts."""

import pytest
import strangers
import torch

from loaderkit import open_cache
from loaderkit.errors import CacheVersionError, DamagedCacheError, LoaderkitError
from loaderkit.testing import assert_same

REMOVED = object()
"""In the place of a value: the key is taken out."""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Sound caches by name, each made once and held in memory."""
    seeds = {}

    def seed_of(name):
        if name not in seeds:
            folder = tmp_path_factory.mktemp("seeds")
            seeds[name] = strangers.Seed.make(name, folder)
        return seeds[name]

    return seed_of


def write(seed, folder, changes=()):
    """Write a cache as a stranger could: values changed, and a checksum that fits.

    Args:
        seed: The sound cache.
        folder: Where to.
        changes: New values, by the keys that lead to them, with spaces between.
    """
    content = seed.content
    for path, value in dict(changes).items():
        *parents, last = path.split()
        where = content
        for key in parents:
            where = where[int(key) if isinstance(where, list) else key]
        last = int(last) if isinstance(where, list) else last
        if value is REMOVED:
            del where[last]
        else:
            where[last] = value
    for name, data in seed.files.items():
        (folder / name).write_bytes(data)
    (folder / "manifest.json").write_text(strangers.manifest_text(content))
    return folder


SEEDS = ["numbers", "variants", "hetero", "tensors", "texts", "sparse"]


@pytest.mark.parametrize("name", SEEDS)
def test_an_unchanged_manifest_written_by_a_stranger_opens(tmp_path, seeds, name):
    make, _ = strangers.SEEDS[name]
    torch.manual_seed(0)
    wanted = [make(i) for i in range(5)]

    opened = open_cache(write(seeds(name), tmp_path), classes=strangers.CLASSES)

    assert_same([opened[row] for row in range(5)], wanted)


ARRAYS, COLUMNS = "shards 0 arrays", "shards 0 columns"
KINDS, TREE = "structure columns", "structure variants 0"
PATHS, CLASS, KEYS, PARTS, NODES = (f"{TREE} {number}" for number in range(1, 6))
FULL = {"dtype": "|u1", "offset": 64, "chunk_rows": None, "chunk_index": None}
PLAIN = {"offsets": None, "shapes": None, "rows": None, "low": None, "high": None}
EDGE = "atom__in__bond.edge_index"

COLUMNS_THAT_CANNOT_BE = {
    "keys that are no texts": (
        "numbers",
        {f"{KINDS} @key 1": "bytes"},
        "column '@key' is not what it is always for",
    ),
    "numbers of variants that count nodes": (
        "variants",
        {f"{KINDS} @variant 1": "nodes"},
        "column '@variant' is not what it is always for",
    ),
    "no keys": ("numbers", {f"{COLUMNS} @key": REMOVED}, "holds no keys"),
    "keys of some samples": (
        "variants",
        {f"{COLUMNS} @key rows": "@variant/values"},
        "not of all samples",
    ),
    # Without values a shard could stand for any number of samples.
    "samples without bytes": (
        "numbers",
        {
            "shards 0 samples": 20_000,
            ARRAYS: {"@key/values": FULL | {"shape": [20_000, 0]}},
            COLUMNS: {"@key": PLAIN | {"values": "@key/values"}},
        },
        "has fewer bytes than samples",
    ),
    "a column that nothing describes": (
        "numbers",
        {f"{COLUMNS} other": PLAIN | {"values": "complex/values"}},
        "nothing says what column 'other' is for",
    ),
    "a column in no shard": (
        "numbers",
        {f"{COLUMNS} complex": REMOVED},
        "column 'complex' is in no shard",
    ),
    "another dtype": (
        "numbers",
        {f"{ARRAYS} complex/values dtype": "<c8"},
        "column 'complex' holds complex64 for complex128",
    ),
    # Only integers are stored in fewer bytes than they have.
    "floats in fewer bytes": (
        "numbers",
        {f"{ARRAYS} ordered.a/values dtype": "<f4"},
        "column 'ordered.a' holds float32 for float64",
    ),
    "counts in fewer bytes": (
        "hetero",
        {f"{ARRAYS} atom.@nodes/values dtype": "<i4"},
        "column 'atom.@nodes' holds int32 for int64",
    ),
    "one more axis of equal samples": (
        "numbers",
        {f"{ARRAYS} scalar/values shape": [5, 1]},
        "column 'scalar' has values of 1 axes, not 0",
    ),
    "one more axis of ragged samples": (
        "numbers",
        {f"{ARRAYS} tokens/values shape": [11, 1]},
        "column 'tokens' has values of 2 axes, not 1",
    ),
    "one axis less of samples with shapes": (
        "tensors",
        {f"{ARRAYS} ragged/shapes shape": [5, 2]},
        "column 'ragged' has values of 2 axes, not 3",
    ),
    "increments of another shape": (
        "hetero",
        {f"{ARRAYS} {EDGE}@inc/values shape": [5, 1]},
        f"column '{EDGE}@inc' is no column of counts",
    ),
    "rows that no byte stands for": (
        "hetero",
        {f"{ARRAYS} atom.x/values shape": [1 << 40, 0]},
        "column 'atom.x' has 1,099,511,627,776 rows without numbers",
    ),
    "a row larger than memory": (
        "hetero",
        {f"{ARRAYS} atom.x/values shape": [0, 1 << 41]},
        "a row of column 'atom.x' has the shape (2199023255552,)",
    ),
    "counts without bounds": (
        "hetero",
        {f"{COLUMNS} atom.@nodes low": None, f"{COLUMNS} atom.@nodes high": None},
        "nothing says how large the numbers of column 'atom.@nodes' are",
    ),
    "a variant that there is not": (
        "variants",
        {f"{COLUMNS} @variant high": 3},
        "the numbers of column '@variant' are from 0 to 3",
    ),
    "bounds in the wrong order": (
        "hetero",
        {f"{COLUMNS} atom.@nodes low": 7},
        "the numbers of column 'atom.@nodes' are from 7 to 3",
    ),
}


@pytest.mark.parametrize("name", COLUMNS_THAT_CANNOT_BE)
def test_a_column_that_cannot_be_what_samples_take_it_for_is_refused(
    tmp_path, seeds, name
):
    seed, changes, text = COLUMNS_THAT_CANNOT_BE[name]
    path = write(seeds(seed), tmp_path, changes)

    with pytest.raises(DamagedCacheError) as caught:
        open_cache(path, classes=strangers.CLASSES)

    assert caught.value.what == "The manifest contradicts itself."
    assert text in caught.value.why
    assert caught.value.fix == "pack(source, path, overwrite=True)"


def test_counts_of_no_sample_need_no_bounds_and_are_missed_by_a_batch(tmp_path, seeds):
    none = FULL | {"dtype": "<i8", "shape": [0]}
    column = {"values": "none", "rows": "none"}
    changes = {
        f"{ARRAYS} none": none,
        f"{COLUMNS} atom.@nodes": PLAIN | column,
    }

    opened = open_cache(write(seeds("hetero"), tmp_path, changes))

    with pytest.raises(LoaderkitError):
        opened.batch([0, 1])


# ``load`` is a name of torch's, but no dtype; it is looked up and never called.
@pytest.mark.parametrize("dtype", ["float256", "load"])
def test_a_dtype_of_a_newer_torch_is_told_apart_from_damage(tmp_path, seeds, dtype):
    changes = {f"{KINDS} tokens 2": dtype, f"{PARTS} 4 3": dtype}
    path = write(seeds("numbers"), tmp_path, changes)

    with pytest.raises(
        CacheVersionError, match=f"tensors of dtype '{dtype}'"
    ) as caught:
        open_cache(path)

    assert torch.__version__ in caught.value.why
    assert caught.value.fix == "pip install -U torch"


ATOMS = f"{PARTS} 1"
"""The store of a heterogeneous graph that holds ``atom``."""

TREES_THAT_CANNOT_BE = {
    "no variants": ("numbers", {"structure variants": []}, "it has 0 variants"),
    "a variant that is no list": (
        "numbers",
        {TREE: {"leaf": 1}},
        "stands where a list should",
    ),
    "a number for a text": ("numbers", {PATHS: 7}, "7 stands where a text should"),
    "a leaf unlike its column": (
        "numbers",
        {f"{PARTS} 2 2": "float"},
        "column 'complex' is described in two ways",
    ),
    "a leaf without a column": ("numbers", {f"{PARTS} 2 1": "lost"}, "KeyError"),
    "values for increments": (
        "numbers",
        {f"{PARTS} 4 6": "scalar"},
        "'scalar' is no column of increments",
    ),
    "an unknown container": (
        "numbers",
        {PATHS: "frozenset"},
        "'frozenset' is no kind of container",
    ),
    "a part without a key": (
        "numbers",
        {f"{KEYS} 4": REMOVED},
        "a dict has 5 parts, keys ('array'",
    ),
    "two parts of one key": ("numbers", {f"{KEYS} 4": "'array'"}, "a dict has 5 parts"),
    "keys that call": ("numbers", {f"{KEYS} 4": "print('x')"}, "malformed node"),
    "keys that are no Python": ("numbers", {f"{KEYS} 4": "'"}, "SyntaxError"),
    "keys that no dict takes": ("numbers", {f"{KEYS} 4": "[1]"}, "unhashable"),
    "keys in a nest too deep": ("numbers", {f"{KEYS} 4": "(" * 9_999}, "Error"),
    "edges of other parts": (
        "sparse",
        {f"{PARTS} 0 4 1 3 0": "'rows'"},
        "a edge_index has parts ('rows', 'sparse_size', 'sort_order', 'is_undirected')",
    ),
    "a list of a class": (
        "variants",
        {"structure variants 2 2": "collections:OrderedDict"},
        "a list has the class 'collections:OrderedDict'",
    ),
    "a graph of no class": ("hetero", {CLASS: None}, "a graph has the class None"),
    "a class of no module": (
        "hetero",
        {CLASS: "HeteroData"},
        "'HeteroData' is no class",
    ),
    "increments for numbers of nodes": (
        "hetero",
        {f"{ATOMS} 5": "atom.x@inc"},
        "'atom.x@inc' is no column of node counts",
    ),
    "a dict with nodes": (
        "numbers",
        {NODES: "tokens@inc"},
        "'tokens@inc' is no column of node counts",
    ),
    "a field that is a number": (
        "texts",
        {f"{PARTS} 5 3 0": "0"},
        "the fields of a named are (0, 'tag')",
    ),
    "a store in a dict": (
        "numbers",
        {f"{PARTS} 3 1": "store", f"{PARTS} 3 2": None},
        "a store is outside of a graph",
    ),
    "a graph of dicts": (
        "hetero",
        {f"{ATOMS} 1": "dict", f"{ATOMS} 5": None},
        "a graph has another part",
    ),
    "an edge type of two": (
        "hetero",
        {f"{KEYS} 3": "('atom', 'bond')"},
        "a graph has the stores",
    ),
    "a node type that is a number": (
        "hetero",
        {f"{KEYS} 1": "7"},
        "a graph has the stores (None, 7,",
    ),
    "an unknown kind of value": (
        "numbers",
        {f"{KINDS} complex 1": "quaternion"},
        "'quaternion' is no kind of value",
    ),
    "too many axes": ("numbers", {f"{KINDS} tokens 3": 33}, "a column has 33 axes"),
    "no number of axes": ("numbers", {f"{KINDS} tokens 3": True}, "has True axes"),
    "an axis that is not there": (
        "numbers",
        {f"{KINDS} tokens 4": 1},
        "a column of 1 axes is joined along axis 1",
    ),
    "a number with axes": (
        "numbers",
        {f"{KINDS} complex 3": 1},
        "a column of kind 'complex' has the dtype '<c16' and 1 axes",
    ),
    "an array of objects": (
        "numbers",
        {f"{KINDS} array 2": "|O"},
        "a column of kind 'array' has the dtype '|O'",
    ),
}


@pytest.mark.parametrize("name", TREES_THAT_CANNOT_BE)
def test_a_tree_that_no_sample_can_have_is_refused(tmp_path, seeds, name):
    seed, changes, text = TREES_THAT_CANNOT_BE[name]
    path = write(seeds(seed), tmp_path, changes)

    with pytest.raises(DamagedCacheError) as caught:
        open_cache(path, classes=strangers.CLASSES)

    assert caught.value.what.startswith("The manifest's structure makes no sense: ")
    assert text in caught.value.what
    assert caught.value.fix == "pack(source, path, overwrite=True)"
