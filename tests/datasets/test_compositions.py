"""Keys of samples in torch's compositions, against lists that torch composes."""

import copy
import pickle
import random

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from loaderkit import SafeDataset, build_loader, concat, extend, pack
from loaderkit.dataset_protocol import ask_identity
from loaderkit.datasets.compositions import KeyedConcatDataset, key_of, row_of
from loaderkit.errors import (
    DatasetError,
    NoSuchAttributeError,
    NoSuchKeyError,
    NoSuchRowError,
    OptionError,
)


class Named(SafeDataset[dict]):
    def __init__(self, names, cache):
        self.names = names
        super().__init__(cache=cache)

    def keys(self):
        return self.names

    def load(self, key):
        return {"x": torch.full((len(key),), 1.0)}


NAMES = [["a", "bb", "c"], ["d", "a", "a", "e"], ["f"]]
"""Keys of three datasets; one of them twice in one, and in another."""


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    folder = tmp_path_factory.mktemp("named")
    return [with_rows_twice(keys, folder / f"{len(keys)}.lk") for keys in NAMES]


def with_rows_twice(keys, cache):
    """Give a dataset of these keys; what ``keys()`` gives is distinct, rows are not."""
    distinct = list(dict.fromkeys(keys))
    dataset = Named(distinct, cache)
    return dataset[[distinct.index(key) for key in keys]]


def compose(datasets, keys, chance, depth=3):
    """Draw a composition, of datasets and, likewise, of the lists of their keys."""
    kind = chance.choice(["part", "subset", "rows", "concat", "plus"])
    if depth == 0 or kind == "part":
        number = chance.randrange(len(datasets))
        return datasets[number], keys[number]
    one, keys_of_one = compose(datasets, keys, chance, depth - 1)
    if kind in {"subset", "rows"}:
        rows = [chance.randrange(len(one)) for _ in range(max(1, len(one) // 2))]
        chosen = one[rows] if isinstance(one, Named) else Subset(one, rows)
        return chosen, Subset(keys_of_one, rows)
    other, keys_of_other = compose(datasets, keys, chance, depth - 1)
    both = ConcatDataset([keys_of_one, keys_of_other])
    if kind == "plus":
        return one + other, both
    return ConcatDataset([one, other]), both


@pytest.mark.parametrize("seed", range(40))
def test_keys_are_found_through_any_composition(named, seed):
    dataset, composed_keys = compose(named, NAMES, random.Random(seed))
    keys = [composed_keys[row] for row in range(len(composed_keys))]

    assert [key_of(dataset, row) for row in range(len(dataset))] == keys
    assert {key: row_of(dataset, key) for key in keys} == {
        key: keys.index(key) for key in keys
    }
    for key in {"a", "bb", "c", "d", "e", "f", "g"} - set(keys):
        with pytest.raises(NoSuchKeyError):
            row_of(dataset, key)


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("seed", range(0, 40, 8))
def test_what_is_packed_of_packed_samples_keeps_their_keys(named, seed, tmp_path):
    dataset, composed_keys = compose(named, NAMES, random.Random(seed))
    keys = [composed_keys[row] for row in range(len(composed_keys))]

    packed = pack(dataset, tmp_path / "a.lk", workers=0)
    mapped = packed.map(dict, cache=tmp_path / "b.lk")
    joined = concat([tmp_path / "a.lk", tmp_path / "b.lk"], tmp_path / "c.lk")
    grown = extend(tmp_path / "c.lk", dataset, workers=0)

    assert [packed.key(row) for row in range(len(packed))] == keys
    assert [mapped.key(row) for row in range(len(mapped))] == keys
    assert [joined.key(row) for row in range(len(joined))] == keys * 2
    assert [grown.key(row) for row in range(len(grown))] == keys * 3


def test_all_rows_of_a_key_are_found(named):
    assert named[1].all_rows_of("a") == [1, 2]
    assert named[1][[2, 0, 1, 2]].all_rows_of("a") == [0, 2, 3]
    assert named[1].all_rows_of("g") == []


@pytest.mark.slow
def test_a_sum_of_datasets_knows_its_samples_and_is_loaded_as_torchs(named):
    both = named[0] + named[1] + [{"x": torch.ones(3)}]

    assert isinstance(both, KeyedConcatDataset)
    assert [both.key(3), both.key(-2), both.row_of("e")] == ["d", "e", 6]
    assert pickle.loads(pickle.dumps(both)).row_of("e") == 6
    assert copy.copy(both).key(3) == "d"
    assert repr(both) == "KeyedConcatDataset(8 samples: KeyedConcatDataset + list)"
    torchs = ConcatDataset([named[0], named[1]])
    plan = build_loader(named[0] + named[1], max_tokens=4).plan
    assert plan.batching == build_loader(torchs, max_tokens=4).plan.batching
    assert ask_identity(named[0] + named[1]) == ask_identity(torchs)


def test_a_row_of_a_list_has_no_key(named):
    both = named[0] + [{"x": torch.ones(3)}]

    with pytest.raises(DatasetError, match="of a list"):
        both.key(3)
    with pytest.raises(NoSuchRowError):
        both.key(4)


def test_what_only_a_single_dataset_has_is_answered_with_its_parts(named, tmp_path):
    dataset = named[0] + named[2]
    names = {name for name in dir(Named) if name[0] != "_" and hasattr(Named, name)}

    names -= {name for name in names if getattr(Named, name) in (False, None, "")}
    for name in sorted(names - set(dir(dataset)) | {"cache", "raw", "names"}):
        with pytest.raises(NoSuchAttributeError) as raised:
            getattr(dataset, name)
        assert raised.value.fix.startswith(f"[part.{name}")
    with pytest.raises(NoSuchAttributeError, match="did you mean 'row_of'"):
        dataset.rowof  # noqa: B018
    for index in (slice(1, 3), [0, 1], torch.tensor([True] * 4)):
        with pytest.raises(OptionError, match="Subset"):
            dataset[index]
    with pytest.raises(OptionError) as field:
        dataset["x"]

    assert len(eval(field.value.fix, {"dataset": dataset})) == 2
    caches = [part.cache for part in dataset.datasets]
    assert len(concat(caches, tmp_path / "all.lk")) == len(dataset)
    assert len(pack(dataset, tmp_path / "packed.lk", workers=0)) == len(dataset)
