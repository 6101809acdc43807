"""Law: what a batch makes of a field does not depend on the order of its samples.

Whatever two values a field has in two samples: both orders are joined to the same, or
both are refused, with what to do.  What torch joins in both orders is joined.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import loaderkit
from loaderkit.datasets.dict_batches import collate_samples
from loaderkit.errors import DatasetError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Point:
    """A dataclass with one field."""

    x: float


_VALUES: dict[str, Any] = {
    "float": 1.0,
    "int": 2,
    "bool": True,
    "numpy's": np.float32(1.5),
    "text": "a",
    "bytes": b"a",
    "tensor": torch.ones(2),
    "integers": torch.ones(2, dtype=torch.int64),
    "long tensor": torch.ones(3),
    "tensor []": torch.tensor(3.0),
    "array": np.ones(2, np.float32),
    "array []": np.array(1.0),
    "list": [1, 2],
    "tensors": [torch.ones(2)],
    "tuple": (1, 2),
    "dict": {"a": 1},
    "dataclass": Point(1.0),
    "none": None,
}
_PAIRS = list(itertools.combinations(_VALUES, 2))


def _joined(values: list[Any], path: Path | None) -> Any:
    """Join them as samples of a packed dataset, or in memory; None if refused."""
    samples = [{"y": value} for value in values]
    try:
        if path is None:
            return collate_samples(samples, "padded")["y"]
        loaderkit.pack(samples, path, workers=0, overwrite=True)
        return loaderkit.open_cache(path, classes=[Point]).batch([0, 1])["y"]
    except DatasetError as error:
        assert error.fix  # noqa: PT017 -- those that are joined raise none
        return None
    except (TypeError, RuntimeError, AttributeError):
        assert path is None  # a dataset words them, in ``Collating``
        return None


def _torch_joins(values: list[Any]) -> bool:
    try:
        kinds = _kind(default_collate(values)), _kind(default_collate(values[::-1]))
    except (TypeError, RuntimeError, ValueError, AttributeError):
        return False
    return kinds[0] == kinds[1]


def _kind(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return ("tensor", tuple(batch.shape))
    return type(batch)


@pytest.mark.many_cases(quick=20)
@pytest.mark.parametrize("is_packed", [False, True], ids=["memory", "packed"])
@pytest.mark.parametrize(("one", "other"), _PAIRS)
def test_both_orders_are_joined_alike_or_refused(
    tmp_path: Path, one: str, other: str, *, is_packed: bool
) -> None:
    path = tmp_path / "a.lk" if is_packed else None
    values = [_VALUES[one], _VALUES[other]]

    there, back = _joined(values, path), _joined(values[::-1], path)

    assert (there is None) == (back is None), (there, back)
    assert _kind(there) == _kind(back)
    if _torch_joins(values):
        assert there is not None


def test_a_number_beside_tensors_is_told_with_what_to_give(tmp_path: Path) -> None:
    samples = [{"y": 1.0}, {"y": torch.ones(2)}]
    dataset = loaderkit.pack(samples, tmp_path / "a.lk", workers=0)

    for rows in ([0, 1], [1, 0]):
        with pytest.raises(DatasetError, match=r"float.*Tensor|Tensor.*float") as told:
            dataset.batch(rows)

        given = eval(str(told.value.fix).rpartition(": ")[2])
        assert given.shape == (2,)
        assert torch.isnan(given).all()


@pytest.mark.parametrize("value", ["tensor", "integers", "array", "float", "int"])
def test_what_is_advised_in_place_of_none_is_joined(tmp_path: Path, value: str) -> None:
    samples = [{"y": _VALUES[value]}, {"y": None}]
    dataset = loaderkit.pack(samples, tmp_path / "a.lk", workers=0)
    if not hasattr(_VALUES[value], "shape"):
        assert dataset.batch([0, 1])["y"] == [_VALUES[value], None]
        return

    with pytest.raises(DatasetError, match="is None in sample 1") as told:
        dataset.batch([0, 1])

    code = str(told.value.fix).partition("dtype (")[2].partition(") in its place")[0]
    samples[1] = {"y": eval(code)}
    mended = loaderkit.pack(samples, tmp_path / "b.lk", workers=0)
    assert mended.batch([0, 1])["y"].shape == (2, 2)


def test_torchs_own_joining_depends_on_the_order() -> None:
    """The twin: what the law is held against."""
    with pytest.raises(TypeError):
        default_collate([torch.tensor(1.0), 1.0])
    assert torch.equal(
        default_collate([1.0, torch.tensor(1.0)]), torch.ones(2, dtype=torch.float64)
    )
