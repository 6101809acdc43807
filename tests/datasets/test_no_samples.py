"""Keys that come twice, and None in the place of a sample, are refused when packing."""

import enum
import math
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data

import loaderkit
from loaderkit.datasets.compact_keys import compact_keys
from loaderkit.datasets.key_index import first_doubled
from loaderkit.datasets.key_texts import key_text
from loaderkit.errors import DatasetError

UTC, EAST = timezone.utc, timezone(timedelta(hours=1))


class Name(str):
    pass


class Size(enum.IntEnum):
    SMALL = 1


MIXED = st.sampled_from(
    [
        *(0, 1, 2, True, False, 0.0, -0.0, 1.0, 1 + 0j, 0.5, math.nan),
        *(Fraction(1, 2), Decimal(1), Size.SMALL, np.int8(1), np.float32(0.5)),
        *("1", "a", np.str_("a"), Name("a"), b"a", PurePath("a"), None, "None"),
        *(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 1, tzinfo=EAST)),
        *(frozenset({1}), frozenset({True})),
    ]
)
"""Keys of which Python says that some are equal, or that are called alike."""
KEYS = st.one_of(
    st.lists(st.integers(-3, 3)),
    st.lists(st.integers()),
    st.lists(st.text(max_size=2)),
    st.lists(st.tuples(st.integers(0, 2), st.text(max_size=1))),
    st.lists(st.integers(-3, 3)).map(lambda keys: np.array(keys, np.int8)),
    st.lists(st.text("ab", max_size=2)).map(lambda keys: list(map(PurePath, keys))),
    st.lists(st.floats(allow_nan=False)),
    st.lists(st.floats(allow_nan=False)).map(np.array),
    st.lists(st.one_of(MIXED, st.just(np.array([1]))), max_size=6),
    st.lists(st.tuples(MIXED), max_size=6),
    st.lists(st.tuples(MIXED).map(list), max_size=6),
)


def are_one_key(one, other):
    # numpy and torch compare item by item.
    is_equal = np.array_equal(one, other) and type(one) is type(other)
    if not isinstance(one, np.ndarray) and not isinstance(other, np.ndarray):
        is_equal = one == other
    return is_equal or key_text(one) == key_text(other)


def first_of_one_key(keys):
    """Compare each pair."""
    for second, key in enumerate(keys):
        for first, other in enumerate(keys[:second]):
            if are_one_key(other, key):
                return first, second
    return None


@given(KEYS)
def test_the_first_key_that_comes_twice_is_found_as_comparing_all_pairs_does(keys):
    assert first_doubled(compact_keys(keys)) == first_of_one_key(list(keys))


class Named(loaderkit.SafeDataset):
    def __init__(self, names, *, without=None, **options):
        super().__init__(**options)
        self.names, self.without = names, without

    def keys(self):
        return self.names

    def load(self, key):
        return None if key == self.without else {"key": str(key)}


@pytest.mark.slow
def test_a_key_that_comes_twice_is_told_with_its_rows(tmp_path):
    for pack in (lambda d: loaderkit.pack(d, tmp_path / "other.lk"), len):
        with pytest.raises(DatasetError, match=r"'a' twice: in rows 0 and 2") as error:
            pack(Named(["a", "b", "a"], cache=tmp_path / "c.lk"))
    names = eval(
        error.value.fix.split(";")[0].removeprefix("return "),
        {"keys": ["a", "b", "a"]},
    )

    dataset = Named(names, cache=tmp_path / "c.lk")
    assert [dataset.row_of(name) for name in names] == [0, 1]
    # Rows may be chosen twice, of a cache too.
    twice = loaderkit.pack(dataset[[0, 1, 0]], tmp_path / "twice.lk")
    assert twice.all_rows_of("a") == [0, 2]


def test_keys_of_one_name_are_told(tmp_path):
    with pytest.raises(DatasetError, match=r"gives 1 in row 0 and '1' in row 1"):
        len(Named([1, "1"], cache=tmp_path / "c.lk"))


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize(
    "keys",
    [
        [1, True],
        [0, False, "b"],
        [1.0, 1],
        [0.0, -0.0],
        [(1, "a"), (True, "a")],
        [Size.SMALL, 1],
        [Fraction(1, 2), 0.5],
        [1, "1"],
        ["a", PurePath("a")],
        [1, np.int64(1)],
        ["a", Name("a")],
        [[1], [1]],
        [np.array([1]), np.array([1])],
        [math.nan, -math.nan],
        [torch.tensor(1), torch.tensor(1)],
    ],
    ids=str,
)
def test_keys_that_are_one_are_refused_and_what_the_fix_returns_is_not(keys, tmp_path):
    dataset = Named(keys, cache=tmp_path / "c.lk")
    with pytest.raises(DatasetError, match=r"twice|in row 0 and") as error:
        loaderkit.pack(dataset, tmp_path / "c.lk", workers=0)

    fix = error.value.fix.split(";")[0].removesuffix(", or other names")
    names = eval(fix.removeprefix("return "), {"keys": keys})

    packed = Named(names, cache=tmp_path / "c.lk")
    assert [packed.row_of(name) for name in names] == list(range(len(packed)))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, row):
        return None if row == 1 else {"row": row}


def generated():
    yield {"row": 0}
    yield None


def saved(folder):
    folder.mkdir()
    for row, sample in enumerate([{"row": 0}, None]):
        torch.save(sample, folder / f"{row}.pt")
    return folder


SOURCES = {
    "load": (lambda _: Named(["a", "b"], without="b"), "'b'"),
    "a list": (lambda _: [{"row": 0}, None], "'1'"),
    "Nones alone": (lambda _: [None] * 3, "'0'"),
    "a dataset of torch's": (lambda _: Rows(), "'1'"),
    "a generator": (lambda _: generated(), "1"),
    "a folder": (lambda folder: saved(folder / "pt"), "'1.pt'"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_none_is_no_sample(source, tmp_path):
    make, key = SOURCES[source]

    with pytest.raises(DatasetError, match="None") as error:
        loaderkit.pack(make(tmp_path), tmp_path / "c.lk", workers=0)

    assert key in error.value.what
    assert "return the sample" in error.value.fix


def test_none_is_no_sample_of_a_dataset_without_a_cache():
    with pytest.raises(DatasetError, match=r"Named.load\('b'\) returned None"):
        Named(["a", "b"], without="b")[1]


def test_none_is_kept_as_the_fix_says(tmp_path):
    packed = loaderkit.pack([{"value": None}] * 2, tmp_path / "c.lk", workers=0)

    assert packed[1] == {"value": None}


JOINED = {
    "samples in memory": [{"x": torch.ones(2)}] * 2,
    "texts": ["a", "b"],
    "numbers": [1, 2],
    "graphs": [Data(x=torch.ones(2, 1))] * 2,
}


@pytest.mark.parametrize("name", JOINED)
def test_a_batch_of_no_samples_is_told_as_one(name, tmp_path):
    packed = loaderkit.pack(JOINED[name], tmp_path / "c", workers=0)
    transformed = loaderkit.open_cache(tmp_path / "c", transform=lambda sample: sample)

    for dataset in (packed, packed[:1], transformed, packed + packed):
        with pytest.raises(DatasetError, match="needs at least one sample, got none"):
            dataset.collate([])
    for dataset in (packed, packed[:1], transformed):
        with pytest.raises(DatasetError, match="needs at least one"):
            dataset.collate(dataset.__getitems__([]))
