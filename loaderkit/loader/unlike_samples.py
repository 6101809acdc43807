"""Why samples could not be joined: in what they are unlike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loaderkit.arguments import kind_of


def difference_of(samples: Sequence[Any], path: str = "") -> str:
    """Say in what samples are unlike that cannot be joined.

    Args:
        samples: At least one.
        path: The keys that lead to them, as code; empty for the samples themselves.

    Returns:
        In words; empty where nothing is found that torch would refuse.

    >>> difference_of([{"x": [1, 2]}, {"x": [1]}])
    "['x'] has 2 items in one sample and 1 in another"
    >>> difference_of([{"x": 1, "y": 2}, {"x": 1}]), difference_of([{"x": 1}, [3]])
    ("['y'] is not in all samples", 'some samples are a dict, others a list')
    >>> difference_of([{"x": 1}, {"x": 2}])
    ''
    """
    first = samples[0]
    for sample in samples:
        if type(sample) is not type(first) and not _are_numbers(sample, first):
            kinds = kind_of(first), kind_of(sample)
            if path:
                return f"{path} is {kinds[0]} in one sample and {kinds[1]} in another"
            return f"some samples are {kinds[0]}, others {kinds[1]}"
    if hasattr(first, "shape"):
        return _difference_of_shapes([tuple(sample.shape) for sample in samples], path)
    if isinstance(first, Mapping):
        return _difference_of_mappings(samples, path)
    if isinstance(first, list | tuple):
        return _difference_of_sequences(samples, path)
    return ""


def _are_numbers(one: object, other: object) -> bool:
    return isinstance(one, int | float) and isinstance(other, int | float)


def _difference_of_shapes(shapes: Sequence[tuple[int, ...]], path: str) -> str:
    other = next((shape for shape in shapes if shape != shapes[0]), None)
    if other is None:
        return ""
    subject = f"{path} has" if path else "the samples have"
    return f"{subject} shapes {list(shapes[0])} and {list(other)}"


def _difference_of_mappings(samples: Sequence[Mapping[Any, Any]], path: str) -> str:
    for key in samples[0]:
        if any(key not in sample for sample in samples):
            return f"{path}[{key!r}] is not in all samples"
        values = [sample[key] for sample in samples]
        difference = difference_of(values, f"{path}[{key!r}]")
        if difference:
            return difference
    return ""


def _difference_of_sequences(samples: Sequence[Sequence[Any]], path: str) -> str:
    lengths = [len(sample) for sample in samples]
    other = next((length for length in lengths if length != lengths[0]), None)
    if other is not None:
        subject = f"{path} has" if path else "the samples have"
        return f"{subject} {lengths[0]} items in one sample and {other} in another"
    for number in range(lengths[0]):
        values = [sample[number] for sample in samples]
        difference = difference_of(values, f"{path}[{number}]")
        if difference:
            return difference
    return ""
