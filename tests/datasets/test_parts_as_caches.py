"""A part of a dataset is never taken for the whole cache that it is a part of.

Oracle: the samples that a list with the same rows has.
"""

import itertools

import pytest

from loaderkit import concat, extend, inspect_cache, open_cache, pack, push, verify
from loaderkit.errors import OptionError

COUNT = 3
CHOICES = [*itertools.product(range(COUNT), repeat=COUNT), (0, 1), (), (0, 1, 2, 0)]


def samples(count=COUNT):
    return [{"n": number} for number in range(count)]


def numbers(dataset):
    return [sample["n"] for sample in dataset]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return pack(samples(), tmp_path_factory.mktemp("parts") / "rows.lk", workers=0)


def part_of(dataset, rows):
    part = dataset[list(rows)]
    assert numbers(part) == list(rows)
    return part


@pytest.mark.parametrize("rows", CHOICES, ids=repr)
def test_a_choice_of_rows_is_joined_as_it_is_or_refused(dataset, tmp_path, rows):
    part = part_of(dataset, rows)
    if rows == tuple(range(COUNT)):
        assert numbers(concat([part, part], tmp_path / "joined.lk")) == [*rows, *rows]
        return
    with pytest.raises(OptionError, match="does not give the samples of its cache"):
        concat([part, part], tmp_path / "joined.lk")
    with pytest.raises(OptionError, match="does not give the samples of its cache"):
        extend(part, samples())
    assert len(open_cache(dataset.cache)) == COUNT


@pytest.mark.parametrize(
    "call",
    [open_cache, inspect_cache, verify, lambda part: push(part, "memory://parts.lk")],
)
def test_the_path_of_a_cache_is_offered_for_all_of_it_alone(dataset, call):
    with pytest.raises(OptionError) as caught:
        call(dataset)
    assert caught.value.fix == "dataset.cache is its path"
    changed = dataset[:]
    changed.transform = dict
    for part in (dataset[::-1], dataset[:2], dataset[[0, 0, 1]], changed):
        with pytest.raises(OptionError) as caught:
            call(part)
        assert caught.value.fix == "pack(dataset, path), and give that path"


def test_one_dataset_is_no_list_of_caches(dataset, tmp_path):
    with pytest.raises(OptionError, match="takes a list of caches") as caught:
        concat(dataset, tmp_path / "joined.lk")
    assert caught.value.why == "it is one dataset"
