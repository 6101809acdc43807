"""The newest entries of what is remembered.  Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

    _Key = TypeVar("_Key", bound=Hashable)
    _Value = TypeVar("_Value")


def newest(table: dict[_Key, _Value], most: int) -> dict[_Key, _Value]:
    """Give the entries of a table that came last.

    Args:
        table: By the order in which they came; not changed.
        most: Entries to keep.

    Returns:
        The table itself where it has no more; else another one, since a table from
        which entries are deleted stays as large as it was.

    >>> newest({"a": 1, "b": 2, "c": 3}, 2)
    {'b': 2, 'c': 3}
    """
    if len(table) <= most:
        return table
    return dict(itertools.islice(table.items(), len(table) - most, None))
