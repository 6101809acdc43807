"""In what samples are unlike that torch cannot join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from loaderkit.value_words import kind_of


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
