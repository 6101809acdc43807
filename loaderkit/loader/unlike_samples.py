"""Why samples were not joined: in what they are unlike, or what torch never joins."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from loaderkit.arguments import kind_of
from loaderkit.stand_ins import stand_in_for
from loaderkit.unlike_keys import find_none, find_only_none

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MOST_COLUMNS = 8
"""More arrays of one length are taken for samples.  Chosen: (X, y) has two."""


class Difference(NamedTuple):
    """In what samples are unlike that cannot be joined."""

    words: str
    is_length: bool = False
    """Only the first axis of tensors differs: a packed dataset pads that."""


def difference_of(samples: Sequence[Any], path: str = "") -> Difference | None:
    """Say in what samples are unlike that cannot be joined.

    Args:
        samples: At least one.
        path: The keys that lead to them, as code; empty for the samples themselves.

    Returns:
        None where nothing is found that torch would refuse.

    >>> difference_of([{"x": [1, 2]}, {"x": [1]}]).words
    "['x'] has 2 items in one sample and 1 in another"
    >>> difference_of([{"x": 1, "y": 2}, {"x": 1}]).words
    "['y'] is not in all samples"
    >>> difference_of([{"x": 1}, {"x": 2}])
    """
    first = samples[0]
    if path and isinstance(first, str | bytes):
        return None  # torch leaves a list that begins with a text as it is
    for sample in samples:
        if type(sample) is not type(first) and not _are_numbers(sample, first):
            kinds = kind_of(first), kind_of(sample)
            if path:
                words = f"{path} is {kinds[0]} in one sample and {kinds[1]} in another"
                return Difference(words)
            return Difference(f"some samples are {kinds[0]}, others {kinds[1]}")
    if isinstance(first, torch.Tensor) and first.is_nested:
        return None  # its shape has no numbers to compare
    if hasattr(first, "shape"):
        return _difference_of_shapes([tuple(sample.shape) for sample in samples], path)
    if isinstance(first, Mapping):
        return _difference_of_mappings(samples, path)
    if isinstance(first, list | tuple):
        return _difference_of_sequences(samples, path)
    return None


class Unjoined(NamedTuple):
    """Why samples could not be joined, and what to do."""

    why: str | None
    """In what they are unlike; None where that is not known."""
    fix: str


_OWN_FUNCTION = "collate_fn=... that joins them"
ONE_SHAPE = (
    f"give the samples one shape; or {_OWN_FUNCTION}; or "
    "loaderkit.pack(dataset, path), whose batches are padded"
)
"""What to do where nothing more is known."""


def explain_difference(
    samples: Sequence[Any], dataset: object = None
) -> Unjoined | None:
    """Say in what samples are unlike, or what torch joins in no batch.

    Args:
        samples: Those of the batch, at least one.
        dataset: That they are of; None for a stream.

    Returns:
        None where nothing is found.
    """
    difference = difference_of(samples)
    if len(set(map(type, samples))) > 1:
        fix = f"read each kind of samples by a loader of its own; or {_OWN_FUNCTION}"
        return Unjoined(difference and difference.words, fix)
    if difference is None:
        return _explain_unjoinable(samples)
    if _are_columns(dataset):
        why = f"{difference.words}: the dataset is a {type(dataset).__name__} of "
        why += "columns, and the loader reads its items as samples"
        return Unjoined(why, "torch.utils.data.TensorDataset(*dataset)")
    if difference.is_length:
        return Unjoined(difference.words, ONE_SHAPE)
    fix = f"give the samples one shape, kind and length; or {_OWN_FUNCTION}"
    return Unjoined(difference.words, fix)


def _are_columns(dataset: object) -> bool:
    """Tell whether a list or tuple holds arrays of one length, as (X, y) does."""
    if not isinstance(dataset, list | tuple) or not 1 < len(dataset) <= _MOST_COLUMNS:
        return False
    if not all(isinstance(item, torch.Tensor) and item.dim() for item in dataset):
        return False
    return len({len(column) for column in dataset}) == 1


def _explain_unjoinable(samples: Sequence[Any]) -> Unjoined | None:
    """Say which value is such that torch joins no samples that have one."""
    unjoinable = _find_unjoinable(samples)
    if unjoinable is None:
        return None
    value = unjoinable.value
    why = f"{unjoinable.path or 'a sample'} is {_described(value)}, and torch joins "
    why += "tensors, arrays of its own dtypes, numbers of 64 bits, texts, and nests of "
    why += "these"
    code = _joinable_stand_in(value)
    if not code:
        return Unjoined(why, f"leave it out; or {_OWN_FUNCTION}")
    return Unjoined(why, f"give {code} in place of it, x; or {_OWN_FUNCTION}")


class _Unjoinable(NamedTuple):
    """A value that torch does not join."""

    path: str
    """The keys that lead to it, as code; empty for a sample itself."""
    value: object


def _find_unjoinable(samples: Sequence[Any], path: str = "") -> _Unjoinable | None:
    """Find the first field that torch does not join, by asking torch."""
    first = samples[0]
    if isinstance(first, Mapping):
        keys: Iterable[Any] = first
    elif isinstance(first, list | tuple):
        keys = range(len(first))
    else:
        # Values of any class, in functions that anyone may have registered.
        try:
            default_collate(list(samples))
        except Exception:  # noqa: BLE001
            return _Unjoinable(path, first)
        return None
    for key in keys:
        values = [sample[key] for sample in samples]
        unjoinable = _find_unjoinable(values, f"{path}[{key!r}]")
        if unjoinable is not None:
            return unjoinable
    return None


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        layout = "nested" if value.is_nested else str(value.layout)
        return f"a tensor ({layout})"
    if not isinstance(value, np.ndarray | np.generic):
        return kind_of(value)
    is_reversed = isinstance(value, np.ndarray) and min(value.strides, default=0) < 0
    order = ", backwards" if is_reversed else ""
    return f"{kind_of(value)} of {value.dtype}{order}"


def _joinable_stand_in(value: object) -> str:
    """Say what torch joins in place of a value, as code in which that is ``x``."""
    if isinstance(value, torch.Tensor):
        return "" if value.is_nested else "x.to_dense()"
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        if not value.dtype.isnative:
            return 'x.astype(x.dtype.newbyteorder("="))'
        if isinstance(value, np.ndarray) and min(value.strides, default=0) < 0:
            return "x.copy()"
    if isinstance(value, complex):
        return "torch.tensor(x)"
    if isinstance(value, int):
        return "float(x), or str(x)"
    if dataclasses.is_dataclass(value):
        return "dataclasses.asdict(x)"
    return str(stand_in_for(value))


def explain_none(
    samples: Sequence[Any], name_sample: Callable[[int], str], dataset: object = None
) -> Unjoined | None:
    """Say where None is among samples that torch or PyG could not join.

    Args:
        samples: Those of the batch, at least one.
        name_sample: Names one by its place in the batch.
        dataset: That they are of; None for a stream.

    Returns:
        None where there is no None.
    """
    beside = find_none(samples)
    if beside is None:
        field = find_only_none(samples)
        if field is None:
            return None
        why = f"{field or 'each'} is None in all samples of the batch; torch and PyG "
        why += "join tensors and numbers"
        fix = f"leave {field} out of the samples, or put a value in its place"
        return Unjoined(why, fix if field else "return the sample in __getitem__")

    field = beside.field
    why = f"{field or 'the sample'} is None in {name_sample(beside.none_in)}, and "
    why += f"{kind_of(beside.value)} in {name_sample(beside.beside)}; torch and PyG "
    why += "join tensors and numbers"
    is_there = f"sample{field} is not None"
    if isinstance(dataset, list | tuple):
        fix = f"dataset = [sample for sample in dataset if {is_there}]"
    elif dataset is not None:
        is_there = f"dataset[row]{field} is not None"
        fix = f"rows = [row for row in range(len(dataset)) if {is_there}]; dataset = "
        fix += "torch.utils.data.Subset(dataset, rows)"
    else:
        fix = f"leave out in __iter__ what has None: if {is_there}: yield sample"
    return Unjoined(why, f"{fix}; or put a value in its place, such as nan")


def _are_numbers(one: object, other: object) -> bool:
    return isinstance(one, int | float) and isinstance(other, int | float)


def _difference_of_shapes(
    shapes: Sequence[tuple[int, ...]], path: str
) -> Difference | None:
    other = next((shape for shape in shapes if shape != shapes[0]), None)
    if other is None:
        return None
    subject = f"{path} has" if path else "the samples have"
    words = f"{subject} shapes {list(shapes[0])} and {list(other)}"
    is_length = len({(len(shape), shape[1:]) for shape in shapes}) == 1
    return Difference(words, is_length)


def _difference_of_mappings(
    samples: Sequence[Mapping[Any, Any]], path: str
) -> Difference | None:
    for key in samples[0]:
        if any(key not in sample for sample in samples):
            return Difference(f"{path}[{key!r}] is not in all samples")
        values = [sample[key] for sample in samples]
        difference = difference_of(values, f"{path}[{key!r}]")
        if difference is not None:
            return difference
    return None


def _difference_of_sequences(
    samples: Sequence[Sequence[Any]], path: str
) -> Difference | None:
    lengths = [len(sample) for sample in samples]
    other = next((length for length in lengths if length != lengths[0]), None)
    if other is not None:
        subject = f"{path} has" if path else "the samples have"
        words = f"{subject} {lengths[0]} items in one sample and {other} in another"
        return Difference(words)
    for number in range(lengths[0]):
        values = [sample[number] for sample in samples]
        difference = difference_of(values, f"{path}[{number}]")
        if difference is not None:
            return difference
    return None
