"""Wrong uses of a dataset's methods: ours is the error, and its fix works.

Each method is called with values of all kinds.  What it refuses it refuses with an
error of ours that says why; a fix that is code of the dataset is followed.
"""

import math
import pathlib
import re

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import loaderkit
from loaderkit.errors import LoaderkitError

VALUES = [
    *(None, True, 1, -1, 99, -99, 1.0, 0.5, -0.5, math.nan, 2.5, 10**30, 1j),
    *("x", "3", "zz", "0.2", "20%", "", b"x", ..., object(), len, int),
    *((), (0, 1), [], [1], [1.0], [0.5], ["x"], [None], [[0, 1]], [[0], [1, 2]]),
    *({}, {1}, {"x": 1}, range(2), range(9), pathlib.Path("x"), lambda: 1),
    *(slice("a", "b"), slice(1.5), slice(None, None, 0), slice(0, 2)),
    *(np.ones(2), np.array(["x"]), np.array([None, 1], object), np.zeros(3, bool)),
    *(np.array(1), np.array(1.0), np.float32(1), np.int64(1)),
    *(torch.ones(2), torch.tensor(1), torch.tensor(1.0), torch.ones(2, 2).long()),
    torch.ones(9).bool(),
]

METHODS = {
    "[]": lambda d, v: d[v],
    "column": lambda d, v: d.column(v),
    "batch": lambda d, v: d.batch(v),
    "select": lambda d, v: d.select(v),
    "index_select": lambda d, v: d.index_select(v),
    "take": lambda d, v: d.take(v),
    "skip": lambda d, v: d.skip(v),
    "shard": lambda d, v: d.shard(v, 0),
    "shard(index)": lambda d, v: d.shard(2, v),
    "shuffle": lambda d, v: d.shuffle(v),
    "shuffle(seed)": lambda d, v: d.shuffle(seed=v),
    "shuffle(generator)": lambda d, v: d.shuffle(generator=v),
    "split": lambda d, v: d.train_test_split(v),
    "split(train_size)": lambda d, v: d.train_test_split(train_size=v),
    "split(shuffle)": lambda d, v: d.train_test_split(shuffle=v),
    "key": lambda d, v: d.key(v),
    "row_of": lambda d, v: d.row_of(v),
    "all_rows_of": lambda d, v: d.all_rows_of(v),
    "in": lambda d, v: v in d,
    "pad_value": lambda d, v: loaderkit.open_cache(d.cache, pad_value=v).batch([0]),
    "ragged": lambda d, v: loaderkit.open_cache(d.cache, ragged=v),
    "follow_batch": lambda d, v: loaderkit.open_cache(d.cache, follow_batch=v).batch(
        [0]
    ),
    "exclude_keys": lambda d, v: loaderkit.open_cache(d.cache, exclude_keys=v).batch(
        [0]
    ),
    "classes": lambda d, v: loaderkit.open_cache(d.cache, classes=v),
    "open_cache": lambda _, v: loaderkit.open_cache(v),
    "map": lambda d, v: d.map(v) if not callable(v) else None,
    "map(remove_columns)": lambda d, v: d.map(print, remove_columns=v, workers="no"),
    "map(with_indices)": lambda d, v: d.map(dict, with_indices=v, workers="no"),
    "map(version)": lambda d, v: d.map(dict, version=v, workers="no"),
    "map(overwrite)": lambda d, v: d.map(dict, overwrite=v, workers="no"),
}
REFUSES_NOTHING = {"all_rows_of"}
"""What is no key has no rows."""


class Named(loaderkit.SafeDataset):
    def keys(self):
        return [3, 5, 7]

    def load(self, key):
        return {"v": torch.ones(key), "n": key}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fixes")

    def packed(name, samples):
        return loaderkit.pack(samples, folder / name, workers=0)

    graphs = [
        Data(x=torch.ones(n, 2), **({"y": torch.tensor([n])} if n else {}))
        for n in range(5)
    ]
    return [
        packed("d.lk", [{"x": torch.ones(n + 1), "n": n} for n in range(5)]),
        packed("g.lk", graphs),
        packed("n.lk", [0.0, 1.0, 2.0]),
        packed("t.lk", [(torch.ones(2), 1)] * 4),
        Named(cache=folder / "named.lk"),
    ]


def follow(fix, dataset, value):
    """Run the code that a fix begins with, where it is code of the dataset alone."""
    code = re.split(r"; |, or |, which| for | is | asks| where ", fix)[0]
    names = {"dataset": dataset, "loaderkit": loaderkit}
    names |= dict.fromkeys(("rows", "index", "mask"), value)
    if not code.startswith("dataset") or "[name]" in code:
        return False
    try:
        eval(compile(code, "fix", "eval"), names)
    except (SyntaxError, NameError):  # words, or a name that the user has
        return False
    return True


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_refuses_it_refuses_with_a_fix_that_works(method, datasets):
    errors = []
    for dataset in datasets:
        for value in VALUES:
            try:
                METHODS[method](dataset, value)
            except LoaderkitError as error:
                errors.append(error)
                follow(error.fix, dataset, value)

    assert all(error.why and error.fix for error in errors)
    assert bool(errors) == (method not in REFUSES_NOTHING)


def test_a_fix_that_does_not_work_would_be_found(datasets):
    with pytest.raises(IndexError):
        follow("dataset[[0, 99]], for one", datasets[0], None)
    assert follow("dataset[[0, -1]]; or others", datasets[0], None)
    assert not follow("give it a name", datasets[0], None)


def test_a_field_that_some_graphs_lack_is_a_column_of_the_others(datasets):
    graphs = datasets[1]

    with pytest.raises(LoaderkitError, match="Not all samples have a field 'y'") as e:
        graphs.y  # noqa: B018

    column = eval(e.value.fix, {"dataset": graphs})
    assert column.tolist() == [1, 2, 3, 4]


def test_the_key_is_named_as_keys_gives_it(datasets):
    named = datasets[-1]
    for key, is_there in ((3, True), ("3", True), (9, False)):
        with pytest.raises(LoaderkitError) as error:
            key in named  # noqa: B015
        assert eval(error.value.fix, {"dataset": named}) is is_there


@pytest.mark.parametrize("name", ["imdb", "stanfordnlp/imdb", "glue"])
def test_the_name_of_a_dataset_of_the_hub_is_answered_with_what_loads_it(name):
    with pytest.raises(LoaderkitError) as error:
        loaderkit.pack(name, "unused.lk")

    assert f"pack(datasets.load_dataset({name!r}, split=" in error.value.fix


@pytest.mark.skipif(not pathlib.Path("/proc/self").exists(), reason="Linux's folder")
def test_a_place_where_nothing_can_be_made_is_no_broken_disk():
    with pytest.raises(LoaderkitError, match="no folder can be made in /proc"):
        loaderkit.pack([1], "/proc/x.lk")


# ---- options that would do nothing


@pytest.mark.parametrize("samples", [[{"n": [1]}, {"n": [2]}], [1.0, 2.0]])
def test_a_pad_value_that_pads_nothing_is_refused(samples, tmp_path):
    loaderkit.pack(samples, tmp_path / "a.lk", workers=0)

    with pytest.raises(LoaderkitError, match="pad_value=7 pads nothing"):
        loaderkit.open_cache(tmp_path / "a.lk", pad_value=7)


@pytest.mark.parametrize("pad_value", [7, {"x": 7, "z": 5}, {"x": 7}])
def test_map_keeps_of_a_pad_value_what_pads_the_new_samples(pad_value, tmp_path):
    samples = [{"x": torch.ones(n), "z": torch.ones(n)} for n in (1, 3)]
    loaderkit.pack(samples, tmp_path / "a.lk", workers=0)
    dataset = loaderkit.open_cache(tmp_path / "a.lk", pad_value=pad_value)

    mapped = dataset.map(lambda sample: {"y": 1.0}, remove_columns="x", workers=0)
    numbers = mapped.map(lambda sample: 1.0, workers=0)

    number = pad_value.get("z", 0) if isinstance(pad_value, dict) else pad_value
    wanted = torch.nn.utils.rnn.pad_sequence(
        [sample["z"] for sample in samples], batch_first=True, padding_value=number
    )
    assert torch.equal(mapped.batch([0, 1])["z"].values, wanted)
    assert numbers.batch([0, 1]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("samples", [[{"x": 1}], [(1, 2)]])
def test_columns_that_are_not_there_are_not_removed(samples, tmp_path):
    """Hugging Face's ``map`` raises a ValueError too."""
    dataset = loaderkit.pack(samples, tmp_path / "a.lk", workers=0)

    with pytest.raises(ValueError, match="remove_columns"):
        dataset.map(lambda sample: sample, remove_columns=["zz"])


PANDAS_NAMES = [
    *("columns", "dtypes", "head", "tail", "sample", "sort_values", "drop", "rename"),
    *("apply", "fillna", "dropna", "query", "groupby", "value_counts", "iterrows"),
    *("to_numpy", "iloc", "loc", "mean", "describe", "values", "shape"),
]


@pytest.mark.parametrize("name", PANDAS_NAMES)
def test_a_name_of_pandas_is_answered_with_what_does_it_here(name, datasets):
    with pytest.raises(AttributeError) as error:
        getattr(datasets[0], name)

    assert "help(dataset)" not in error.value.fix
    assert "did you mean" not in error.value.fix
    follow(error.value.fix, datasets[0], [0])


class Pairs(loaderkit.SafeDataset):
    def keys(self):
        return [("a.npz", 0), ("a.npz", 4), pathlib.Path("b.npz"), b"c", 2.5]

    def load(self, key):
        return {"name": str(key)}


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize("row", range(5))
def test_a_key_that_is_given_for_rows_is_answered_with_its_row(row, tmp_path):
    pairs = Pairs(cache=tmp_path / "pairs.lk")
    key = pairs.keys()[row]

    with pytest.raises(LoaderkitError, match="is the key of a sample") as error:
        pairs[key]

    code = error.value.fix.split(", or ")
    names = {"dataset": pairs, "PosixPath": pathlib.Path}
    assert [eval(part, names) for part in code] == [{"name": str(key)}] * 2
