"""What stands behind the ends of padded samples: the option ``pad_value``.  Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch

from loaderkit.datasets.column_names import escape
from loaderkit.datasets.ragged import PADDED, Padded, bits_of
from loaderkit.errors import DatasetError, OptionError

if TYPE_CHECKING:
    Path: TypeAlias = tuple[Any, ...]
    """The keys, names of attributes and numbers that lead to a field of a sample."""

Number: TypeAlias = int | float | bool
PadValue: TypeAlias = Number | Mapping[str, Number]
"""What stands behind a sample's end in padded batches: of all fields, or by the name or
path of a field."""


def check_pad_value(pad_value: PadValue, ragged: str) -> PadValue:
    """Take what can fill up samples, as numbers of Python's.

    Args:
        pad_value: A number, or numbers by the names of fields.
        ragged: What batches hold for samples of different lengths.

    Returns:
        The same, where scalars of numpy's and torch's are Python's numbers.

    Raises:
        OptionError: It holds something else than numbers, or nothing is padded.
    """
    # These come from the user, and types are not checked when a program runs.
    names: list[object] = []
    numbers: list[object] = [pad_value]
    if isinstance(pad_value, Mapping):
        names, numbers = list(pad_value), list(pad_value.values())
    numbers = [_python_number(number) for number in numbers]
    are_names = all(isinstance(name, str) for name in names)
    if not are_names or not all(isinstance(number, int | float) for number in numbers):
        message = f"pad_value must be a number, or numbers by field, got {pad_value!r}."
        why = "it is written behind the end of shorter samples"
        raise OptionError(message, why=why, fix='pad_value={"labels": -100}')
    if ragged not in PADDED and (names or pad_value != 0):
        message = f"pad_value={pad_value!r} was given beside ragged={ragged!r}."
        why = "only padded batches have places to fill"
        raise OptionError(message, why=why, fix='ragged="padded"')
    if isinstance(pad_value, Mapping):
        return cast("PadValue", dict(zip(names, numbers, strict=True)))
    return cast("PadValue", numbers[0])


def _python_number(value: object) -> object:
    """Take the number out of a scalar of numpy's or torch's."""
    is_scalar = isinstance(value, np.generic)
    if isinstance(value, torch.Tensor | np.ndarray):
        is_scalar = value.ndim == 0
    return cast("np.generic", value).item() if is_scalar else value


def fill_padding(batch: object, pad_value: PadValue, path: Path = ()) -> None:
    """Write a value behind the end of each sample, in place.

    Args:
        batch: A nest with ``Padded`` values in it.
        pad_value: A number for all of them, or numbers by fields: by the name of one,
            wherever it is, or by its path, such as "answer.ids", as ``inspect`` shows
            it.  What is nearest to a value counts.  Fields that it does not name keep
            what they have.
        path: The keys that lead to the nest.

    Raises:
        DatasetError: A field's dtype cannot hold its number.

    >>> from loaderkit.datasets.ragged import pad
    >>> one, other = (pad([torch.tensor([1]), torch.tensor([2, 3])]) for _ in range(2))
    >>> batch = {"question": {"ids": one}, "answer": {"ids": other}}
    >>> fill_padding(batch, {"answer.ids": -100})
    >>> one.values[0], other.values[0]
    (tensor([1, 0]), tensor([   1, -100]))
    """
    if isinstance(batch, tuple(PADDED.values())):
        number = padding_of(path, pad_value)
        if number is not None:
            _fill_outside_samples(cast("Padded", batch), number, path_text(path))
        return
    for key, value in parts_with_keys(batch):
        fill_padding(value, pad_value, (*path, key))


def padding_of(path: Path, pad_value: PadValue) -> Number | None:
    """Look up what stands behind the ends of a field's samples.

    Args:
        path: The keys that lead to it.
        pad_value: As for ``fill_padding``.

    Returns:
        None where the field is not named, nor anything that it is in.

    >>> padding_of(("a", "x", 0), {"x": 1, "a": 2}), padding_of(("a", 0), {"b": 2})
    (1, None)
    >>> padding_of(("a", "x"), {"x": 1, "a.x": 3})
    3
    """
    if not isinstance(pad_value, Mapping):
        return pad_value
    for depth in range(len(path), 0, -1):
        name = path_text(path[:depth])
        if name in pad_value:
            return pad_value[name]
        key = path[depth - 1]
        if isinstance(key, str) and key in pad_value:
            return pad_value[key]
    return None


def path_text(path: Path) -> str:
    """Write the keys that lead to a field, as a cache calls its column."""
    return ".".join(map(escape, path))


def parts_with_keys(batch: object) -> Iterator[tuple[Any, Any]]:
    """Go through what is in a container, with its keys, names or numbers."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            # A number is a name in a dict, and no place in a list.
            yield str(key) if not isinstance(key, tuple) else key, value
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        yield from vars(batch).items()
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        yield from zip(batch._fields, batch, strict=True)
    elif isinstance(batch, list | tuple):
        yield from enumerate(batch)


def _fill_outside_samples(padded: Padded, number: Number, name: str) -> None:
    values, mask = padded.values, padded.mask
    value = _as_dtype(number, values.dtype, name)
    bits = bits_of(values.dtype)
    axes_behind = (1,) * (values.dim() - mask.dim())
    is_outside = ~mask.reshape(*mask.shape, *axes_behind)
    values.view(bits).masked_fill_(is_outside, value.view(bits))


def _as_dtype(number: Number, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Give a number as a tensor ``[]`` of a dtype that can hold it."""
    if dtype is torch.bool:
        fits = number in {0, 1}
    elif dtype.is_floating_point or dtype.is_complex:
        largest = torch.finfo(dtype).max
        fits = not math.isfinite(number) or abs(number) <= largest
    else:
        bounds = torch.iinfo(dtype)
        fits = number == number // 1 and bounds.min <= number <= bounds.max
    if not fits:
        field = f"field {name!r}" if name else "the samples"
        message = f"pad_value {number!r} cannot be written into {field}, of {dtype}."
        why = "a value of that dtype cannot be it"
        nearest = _nearest_of_dtype(number, dtype)
        fix = f"pad_value={{{name!r}: {nearest}}}" if name else f"pad_value={nearest}"
        raise DatasetError(message, why=why, fix=fix)
    # An integer beyond 64 bits fits into a float, and not into torch's integers.
    is_integer = not dtype.is_floating_point and not dtype.is_complex
    return torch.tensor(number if is_integer else float(number)).to(dtype)


def _nearest_of_dtype(number: Number, dtype: torch.dtype) -> Number:
    """Give the number nearest to one that a dtype cannot hold; 0 for NaN."""
    if dtype is torch.bool or math.isnan(number):
        return 0
    if dtype.is_floating_point or dtype.is_complex:
        largest = torch.finfo(dtype).max
        return min(max(number, -largest), largest)
    bounds = torch.iinfo(dtype)
    return int(min(max(number, bounds.min), bounds.max))
