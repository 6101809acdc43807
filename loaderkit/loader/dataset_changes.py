"""What was assigned to a dataset since workers that are kept got their copy of it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN = (int, float, complex, str, bytes, type(None))
_MOST_LEVELS = 4
"""Chosen: a subset of a concatenation of datasets with a transform of several."""
_MOST_ITEMS = 64
"""Of a list: longer ones hold samples, and no transforms or datasets."""


def assigned_values(dataset: object) -> dict[str, object]:
    """Give what a dataset, its parts and its transforms have under public names.

    Private names are left out: code of the dataset's own fills them as it reads.

    Args:
        dataset: Map-style.

    Returns:
        The values, so that another one can be told from them.  They are not kept
        alive: an array may be as large as the dataset.

    >>> class Rows(Dataset):
    ...     transform = None
    ...     _read = 0
    >>> rows = Rows()
    >>> before = assigned_values(rows)
    >>> rows._read = 1
    >>> differ(before, assigned_values(rows))
    False
    >>> rows.transform = str
    >>> differ(before, assigned_values(rows))
    True
    """
    values = _values_of(dataset, "", _MOST_LEVELS)
    return {path: _without_keeping(value) for path, value in values}


def differ(before: dict[str, object], after: dict[str, object]) -> bool:
    """Tell whether another value was assigned; what is in an array is not compared."""
    if before.keys() != after.keys():
        return True
    return any(_is_another(before[name], value) for name, value in after.items())


def _without_keeping(value: object) -> object:
    """Give a weak reference; of what takes none, such as lists, the value."""
    if isinstance(value, _PLAIN):
        return value
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def _is_another(before: object, after: object) -> bool:
    if isinstance(before, weakref.ref) and isinstance(after, weakref.ref):
        # Not ==, which asks the objects.
        return before() is not after()
    if before is after:
        return False
    is_plain = type(before) is type(after) and isinstance(before, _PLAIN)
    return not is_plain or before != after


def _values_of(owner: object, path: str, levels: int) -> Iterator[tuple[str, object]]:
    """Give the public attributes of an object, and of those in them that have some."""
    for name, value in _attributes_of(owner):
        value_path = f"{path}.{name}"
        yield value_path, value
        if not levels:
            continue
        parts = value if isinstance(value, list | tuple) else [value]
        if len(parts) > _MOST_ITEMS:
            continue
        for number, part in enumerate(parts):
            # Datasets, and transforms that are objects.
            if isinstance(part, Dataset) or callable(part):
                if parts is value:
                    yield f"{value_path}[{number}]", part
                yield from _values_of(part, f"{value_path}[{number}]", levels - 1)


def _attributes_of(owner: object) -> list[tuple[str, object]]:
    if isinstance(owner, type):
        return []
    attributes = getattr(owner, "__dict__", None)
    if not isinstance(attributes, dict):
        return []
    # Keys of a namespace need not be texts.
    return [
        (name, value)
        for name, value in list(attributes.items())
        if isinstance(name, str) and not name.startswith("_")
    ]
