"""What samples and functions are called in messages."""

from __future__ import annotations

import bisect
import contextlib
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import ConcatDataset, Subset

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_NAMED = 8
"""Samples of a batch that are named: what fits a few lines."""


class SourceRow(NamedTuple):
    """Where a sample comes from."""

    dataset: Any
    """What subsets and chains are made of."""
    row: Any
    """Its row there."""


def names_of(dataset: object, rows: Sequence[Any]) -> str:
    """Name the samples of a batch, the first 8 of them."""
    names = ", ".join(name_of(dataset, row) for row in rows[:_MOST_NAMED])
    unnamed = len(rows) - _MOST_NAMED
    return f"{names} and {unnamed:,} more" if unnamed > 0 else names


def name_of(dataset: object, row: object) -> str:
    """Name a sample by its key, where the dataset knows one.

    Args:
        dataset: What is read.
        row: An integer, or whatever the user's sampler gives to the user's dataset.
    """
    name = _name_of_row(row)
    with contextlib.suppress(Exception):  # a name must not hide the error it is for
        source = source_row(dataset, row)
        name = _name_of_row(source.row)
        return f"{source.dataset.key(source.row)!r} ({name})"
    return name


def _name_of_row(row: Any) -> str:
    """Name a row as a number, also one of numpy or torch; or as the user's key.

    >>> import numpy as np
    >>> _name_of_row(np.int64(1200)), _name_of_row("a.pt")
    ('row 1,200', "row 'a.pt'")
    """
    try:
        return f"row {operator.index(row):,}"
    except TypeError:
        return f"row {row!r}"


def source_row(dataset: object, row: Any) -> SourceRow:
    """Look up where a row of a subset, or of datasets in a chain, comes from."""
    while True:
        if isinstance(dataset, Subset):
            row = int(dataset.indices[row])
            dataset = dataset.dataset
        elif isinstance(dataset, ConcatDataset):
            number = bisect.bisect_right(dataset.cumulative_sizes, row)
            row -= dataset.cumulative_sizes[number - 1] if number else 0
            dataset = dataset.datasets[number]
        else:
            return SourceRow(dataset, row)


def name_of_function(function: object) -> str:
    """Name a function, or the class of something that can be called."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name)
