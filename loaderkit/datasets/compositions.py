"""The keys of samples in torch's compositions of datasets.

torch's ``ConcatDataset`` and ``Subset`` know rows alone.  ``key_of`` and ``row_of``
look through them, in any nest, for the datasets that know what their samples are
called; ``one + other`` gives a composition that has both as methods.
"""

from __future__ import annotations

import bisect
import functools
import operator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset
from typing_extensions import TypeVar

from loaderkit.answers import answer_wrong_calls, no_such_attribute
from loaderkit.composed_joining import check_joined_alike, own_collate
from loaderkit.datasets.rows import is_single_index, normalize_index
from loaderkit.errors import (
    DatasetError,
    NoSuchAttributeError,
    NoSuchKeyError,
    OptionError,
)
from loaderkit.joining import join
from loaderkit.memory.shm_batch import default_collate
from loaderkit.operations import answer_operations, refuse_operator
from loaderkit.units import count_of
from loaderkit.value_words import kind_of, show_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import SupportsIndex

T = TypeVar("T", default=Any)


class ReadBehind(Dataset[T]):
    """Datasets that ``+`` reads one behind the other, as torch's are."""

    def __add__(self, other: Any) -> KeyedConcatDataset[Any]:
        """Read another dataset behind this one."""
        if not has_rows(other):
            raise refuse_operator(self, "+", right=other)
        return KeyedConcatDataset([self, other])

    def __radd__(self, other: Any) -> KeyedConcatDataset[Any]:
        if not has_rows(other):
            raise refuse_operator(self, "+", left=other)
        return KeyedConcatDataset([other, self])


@answer_operations
@answer_wrong_calls
class KeyedConcatDataset(ReadBehind[T], ConcatDataset[T]):
    """Datasets read one behind the other, which know the keys of their samples.

    What ``one + other`` gives: torch's ``ConcatDataset``, for any loader, with ``key``,
    ``row_of`` and ``collate`` as a single dataset has them.
    """

    def key(self, row: SupportsIndex) -> str:
        """Name the sample of a row, as it was called when it was packed.

        Args:
            row: From 0; negative from the end.

        Raises:
            DatasetError: The row is of a dataset without keys, such as a list.
            NoSuchRowError: There is no such row.
        """
        return key_of(self, row)

    def row_of(self, key: object) -> int:
        """Find the row of the sample of a key, the other way round than ``key``.

        Args:
            key: What ``keys()`` of a part gave, or its text.

        Returns:
            The row; the first one, where several samples have the key.

        Raises:
            NoSuchKeyError: No sample of any part has it.
        """
        return row_of(self, key)

    @functools.cached_property
    def collate(self) -> Callable[[Any], Any]:
        """Joins samples of all parts, as one cache of them would; for any DataLoader.

        The ``collate`` of a part does not know which fields have other lengths in the
        other parts, and would stack them in some batches.

        Raises:
            LoaderError: The parts join a field that differs in length in two ways.
        """
        check_joined_alike(self)
        return own_collate(self) or functools.partial(join, others=default_collate)

    def __getitem__(self, idx: Any) -> T:
        if is_single_index(idx):
            # ConcatDataset subtracts lengths from it.
            row = normalize_index(idx, len(self))
            sample: T = super().__getitem__(row)  # type: ignore[no-untyped-call]
            return sample
        message = f"{type(self).__name__} gives one sample a row: [{show_value(idx)}]."
        why = "which rows are chosen is kept by each of its parts, or by torch's Subset"
        fix = "torch.utils.data.Subset(dataset, rows)"
        if isinstance(idx, str):
            why = "fields of all samples are gathered by each of its parts"
            fix = f"[part[{idx!r}] for part in dataset.datasets]"
        raise OptionError(message, why=why, fix=fix)

    if not TYPE_CHECKING:  # a type checker shall go on to find misspelt names

        def __getattr__(self, name: str) -> Any:
            # A copy that pickle is building has no attributes yet, and is asked for
            # __setstate__ first.
            members = list(_members_of(self)) if "datasets" in vars(self) else []
            # Not asked of the parts: one would gather a field that has the name.
            of_class = [getattr(type(member), name, None) for member in members]
            are_set = any(name in getattr(member, "__dict__", {}) for member in members)
            if name.startswith("_") or not (any(of_class) or are_set):
                raise no_such_attribute(self, name)
            message = f"{type(self).__name__} has no attribute {name!r}."
            why = "its parts have it, and are read one behind the other"
            call = "(...)" if any(map(callable, of_class)) else ""
            fix = f"[part.{name}{call} for part in dataset.datasets]; or "
            fix += "loaderkit.concat(caches, path), one cache of all"
            raise NoSuchAttributeError(message, why=why, fix=fix)

    def __repr__(self) -> str:
        classes = " + ".join(type(member).__name__ for member in self.datasets)
        return f"KeyedConcatDataset({count_of(len(self), 'samples')}: {classes})"


def _members_of(dataset: ConcatDataset[Any]) -> Iterator[Any]:
    """Go through the datasets of a concatenation, and of those that it is made of."""
    for member in dataset.datasets:
        if isinstance(member, ConcatDataset):
            yield from _members_of(member)
        else:
            yield member


def has_rows(other: object) -> bool:
    """Tell whether torch's ``ConcatDataset`` can read something."""
    return hasattr(other, "__len__") and hasattr(other, "__getitem__")


def key_of(dataset: Any, row: SupportsIndex) -> str:
    """Name a sample of a dataset, or of torch's compositions of some.

    Args:
        dataset: One of loaderkit's, one with a ``key(row)`` of its own, or subsets and
            concatenations of these, in any nest.
        row: From 0; negative from the end.

    Returns:
        What the sample was called when it was packed.

    Raises:
        DatasetError: The row is of a dataset without keys, such as a list.
        NoSuchRowError: There is no such row.
    """
    at = normalize_index(row, len(dataset))
    while True:
        if isinstance(dataset, Subset):
            at, dataset = int(dataset.indices[at]), dataset.dataset
        elif isinstance(dataset, ConcatDataset):
            # The rows before ``cumulative_sizes[number]`` are of that member; _right,
            # so that its last row is, and the next one's first is not.
            number = bisect.bisect_right(dataset.cumulative_sizes, at)
            if number:
                at -= dataset.cumulative_sizes[number - 1]
            dataset = dataset.datasets[number]
        elif hasattr(dataset, "key"):
            return str(dataset.key(at))
        else:
            message = f"Row {operator.index(row)} has no key."
            why = f"its sample is of {kind_of(dataset)}, which has rows alone"
            fix = "loaderkit.pack(samples, path), whose samples have keys"
            raise DatasetError(message, why=why, fix=fix)


def has_keys(dataset: object) -> bool:
    """Tell whether all samples of a dataset, or of a composition, are of ours."""
    if isinstance(dataset, Subset):
        return has_keys(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(has_keys, dataset.datasets))
    return hasattr(type(dataset), "all_rows_of")


def row_of(dataset: Any, key: object) -> int:
    """Find a sample by its key in a dataset, or in torch's compositions of some.

    Args:
        dataset: One of loaderkit's, or subsets and concatenations of these and others,
            in any nest.  Parts of other libraries are passed over: they know rows.
        key: What ``keys()`` gave, or its text, as ``key_of`` gives it.

    Returns:
        The row in ``dataset``; the first one, where several samples have the key.

    Raises:
        NoSuchKeyError: No sample has it.
    """
    rows = min(_rows_of(dataset, key), default=None)
    if rows is not None:
        return rows
    message = f"{show_value(key)} is the key of no sample here."
    why = f"none of the {count_of(len(dataset), 'samples')} has it"
    fix = "dataset.key(row) names the sample of a row"
    raise NoSuchKeyError(message, why=why, fix=fix)


def _rows_of(dataset: object, key: object) -> Iterator[int]:
    """Find all rows of a key."""
    if isinstance(dataset, Subset):
        # A subset may have a row twice, or not at all: all of them are looked through.
        inner = list(_rows_of(dataset.dataset, key))
        chosen = np.isin(np.asarray(dataset.indices), inner)
        yield from np.flatnonzero(chosen).tolist()
    elif isinstance(dataset, ConcatDataset):
        starts = [0, *dataset.cumulative_sizes]
        # One start too many: the last is the length of all.
        for start, member in zip(starts, dataset.datasets, strict=False):
            yield from (start + row for row in _rows_of(member, key))
    elif hasattr(dataset, "all_rows_of"):
        yield from dataset.all_rows_of(key)
