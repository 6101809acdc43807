"""Where the arrays of many shards lie so that they are one array.  Pure.

Rows of a column that lie in many files become rows of one array when each file is
mapped at an address that is a whole number of rows behind the first one's.  A file can
be mapped only at whole pages, so there are gaps between them: addresses, not memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loaderkit.cache.address_space import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_ALIKE_ROW_BYTES = 16 << 10
"""Rows up to here are placed so that columns with as many rows a shard lie alike.
The gap behind a shard is at most a page's number of rows: 64 MiB of addresses."""
_MOST_BYTES = 1 << 44
"""An eighth of the addresses that a process has on today's systems."""


@dataclass(frozen=True)
class Rows:
    """The rows of a column in one shard's file."""

    start: int
    """Byte of the file at which they begin."""
    count: int


@dataclass(frozen=True)
class Window:
    """Which piece of a file is mapped, and to which bytes of the range."""

    file_start: int
    at: int
    nbytes: int


@dataclass(frozen=True)
class Placement:
    """How the rows of several shards lie in one range of addresses."""

    first_rows: tuple[int, ...]
    """Number of the first row of each shard, gaps counted as rows."""
    row_count: int
    """Rows up to the end of the last shard, gaps included."""
    windows: tuple[Window, ...]
    """What is mapped of each shard, up to where the next one's begins: a gap of its own
    would be one more mapping, of which a process may have 65,530."""
    nbytes: int
    """Bytes of the range."""


def can_be_placed(rows: Rows, row_bytes: int, page: int) -> bool:
    """Tell whether rows can lie a whole number of rows behind any page.

    >>> can_be_placed(Rows(8192, 10), row_bytes=44, page=4096)
    True
    >>> can_be_placed(Rows(64, 10), row_bytes=44, page=4096)
    False
    """
    return rows.count > 0 and rows.start % page % row_bytes == 0


def place(shards: Sequence[Rows], row_bytes: int, page: int) -> Placement | None:
    """Find addresses at which the rows of all shards are rows of one array.

    Args:
        shards: The rows of each, at least one, all of which ``can_be_placed``.
        row_bytes: Bytes of a row, at least one.
        page: Bytes of a page, a power of two.

    Returns:
        The placement; None where it takes too many addresses.

    >>> two = place([Rows(4096, 100), Rows(8192, 50)], row_bytes=44, page=4096)
    >>> two.first_rows, two.row_count
    ((0, 4096), 4146)
    >>> two.windows[1]
    Window(file_start=8192, at=180224, nbytes=4096)
    """
    # So many rows are a whole number of pages.  A page's number of rows always is, so
    # columns of different rows can agree on it; for large rows it would be a waste.
    step = page
    if row_bytes > _MOST_ALIKE_ROW_BYTES:
        step = page // math.gcd(page, row_bytes)
    first_rows: list[int] = []
    row_count = 0
    for rows in shards:
        first_rows.append(round_up(row_count, step) + rows.start % page // row_bytes)
        row_count = first_rows[-1] + rows.count
    nbytes = round_up(row_count * row_bytes, page)
    if nbytes > _MOST_BYTES:
        return None
    pairs = zip(shards, first_rows, strict=True)
    starts = [first * row_bytes - rows.start % page for rows, first in pairs]
    windows = [
        Window(rows.start - rows.start % page, start, stop - start)
        for rows, start, stop in zip(shards, starts, [*starts[1:], nbytes], strict=True)
    ]
    return Placement(tuple(first_rows), row_count, tuple(windows), nbytes)
