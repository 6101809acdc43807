"""Law: what is advised for the path of a field gives what lies at that path.

Each leaf of samples of any nest is asked for by its path, and the advice is run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import default_collate

import loaderkit
from loaderkit.errors import DatasetError, NoSuchAttributeError, OptionError
from loaderkit.testing import assert_same

if TYPE_CHECKING:
    from pathlib import Path

_SAMPLE: dict[str, Any] = {
    "dict": {"a": torch.ones(2), "b": {"c": 1}},
    "list": [torch.ones(2), 1, [torch.zeros(1)]],
    "tuple": (torch.ones(2), {"x": 2}),
    "plain": [1, [2, 3]],
    "numbers": {0: torch.ones(1), 1: 2},
}


def _paths(value: Any, keys: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, list | tuple):
        parts = list(enumerate(value))
    else:
        return [keys]
    return [path for key, part in parts for path in _paths(part, (*keys, key))]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize("path", _paths(_SAMPLE), ids=str)
def test_the_advice_for_a_path_gives_what_is_there(
    tmp_path: Path, path: tuple[Any, ...]
) -> None:
    samples = [_SAMPLE] * 3
    dataset = loaderkit.pack(samples, tmp_path / "a.lk", workers=0)

    with pytest.raises(DatasetError, match="probably within it") as told:
        dataset[".".join(map(str, path))]

    given = eval(str(told.value.fix), {"dataset": dataset})
    assert_same(given, _at(default_collate(samples), path))


def test_the_advice_for_an_item_of_lists_of_many_lengths_is_of_each_sample(
    tmp_path: Path,
) -> None:
    samples = [{"c": ["a"]}, {"c": ["b", "c"]}]
    dataset = loaderkit.pack(samples, tmp_path / "a.lk", workers=0)

    with pytest.raises(DatasetError) as told:
        dataset["c.0"]

    assert eval(str(told.value.fix), {"dataset": dataset}) == ["a", "b"]


@pytest.mark.parametrize("item", [0, 1])
def test_an_item_of_tuples_is_no_sample(tmp_path: Path, item: int) -> None:
    samples = [(torch.full((2,), float(i)), i) for i in range(4)]
    dataset = loaderkit.pack(samples, tmp_path / "a.lk", workers=0)

    with pytest.raises(DatasetError, match="whose items have numbers") as told:
        dataset.column(str(item))

    given = eval(str(told.value.fix), {"dataset": dataset})
    assert_same(given, default_collate(samples)[item])


def test_pygs_loaders_and_sklearns_stratify_have_an_answer(tmp_path: Path) -> None:
    dataset = loaderkit.pack([{"y": i % 2} for i in range(9)], tmp_path / "a.lk")

    with pytest.raises(NoSuchAttributeError, match="it samples from one graph"):
        _ = loaderkit.NeighborLoader  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match=r"stratify=dataset\.column"):
        dataset.train_test_split(0.5, stratify="y")
