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
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

_MAX_ALIKE_ROW_BYTES = 16 << 10
"""Rows up to here are placed so that columns with as many rows a shard lie alike.
The gap behind a shard is at most a page's number of rows: 64 MiB of addresses."""
_MAX_BYTES = 1 << 44
"""An eighth of the addresses that a process has on today's systems."""


@dataclass(frozen=True)
class Window:
    """Which piece of a file is mapped, and to which bytes of the range."""

    file_start: int
    """First byte in the file."""
    range_start: int
    """First byte in the range of addresses."""
    nbytes: int


@dataclass(frozen=True, eq=False)
class Placement:
    """How the rows of several shards lie in one range of addresses."""

    first_rows: Ints
    """Number of the first row of each shard ``[n]``, gaps counted as rows."""
    row_count: int
    """Rows up to the end of the last shard, gaps included."""
    file_starts: Ints
    """Byte of each file from which on it is mapped ``[n]``."""
    window_starts: Ints
    """Byte of the range to which that is mapped ``[n]``."""
    nbytes: int
    """Bytes of the range."""

    def window(self, shard: int) -> Window:
        """Say what is mapped of a shard, up to where the next one's begins.

        A gap of its own would be one more mapping, of which a process may have 65,530.
        """
        start, stop = int(self.window_starts[shard]), self.nbytes
        if shard + 1 < len(self.window_starts):
            stop = int(self.window_starts[shard + 1])
        return Window(int(self.file_starts[shard]), start, stop - start)


def can_be_placed(
    starts: Ints, counts: Ints, row_bytes: int | Ints, page: int
) -> Bools:
    """Tell which rows can lie a whole number of rows behind any page.

    Args:
        starts: Byte of its file at which the rows of each shard begin ``[n]``.
        counts: How many they are ``[n]``.
        row_bytes: Bytes of a row, at least one; in each shard ``[n]`` if they differ.
        page: Bytes of a page, a power of two.

    Returns:
        True for each shard of which they can ``[n]``.

    >>> import numpy as np
    >>> starts, counts = np.array([8192, 64]), np.array([10, 10])
    >>> can_be_placed(starts, counts, row_bytes=44, page=4096)
    array([ True, False])
    """
    can_lie_at_pages: Bools = counts > 0
    can_lie_at_pages &= starts % page % row_bytes == 0
    return can_lie_at_pages


def place_side_by_side(
    starts: Ints, counts: Ints, row_bytes: int, page: int
) -> Placement | None:
    """Find addresses at which the rows of all shards are rows of one array.

    Args:
        starts: Byte of its file at which the rows of each shard begin ``[n]``.
        counts: How many they are ``[n]``; all of them ``can_be_placed``.
        row_bytes: Bytes of a row, at least one.
        page: Bytes of a page, a power of two.

    Returns:
        The placement; None where it takes too many addresses.

    >>> import numpy as np
    >>> starts, counts = np.array([4096, 8192]), np.array([100, 50])
    >>> placement = place_side_by_side(starts, counts, row_bytes=44, page=4096)
    >>> placement.first_rows.tolist(), placement.row_count
    ([0, 4096], 4146)
    >>> placement.window(1)
    Window(file_start=8192, range_start=180224, nbytes=4096)
    """
    # So many rows are a whole number of pages.  A page's number of rows always is, so
    # columns of different rows can agree on it; for large rows it would be a waste.
    step = page
    if row_bytes > _MAX_ALIKE_ROW_BYTES:
        step = page // math.gcd(page, row_bytes)
    # Before anything is added up, which could overflow.
    if (counts.astype(float) + 2.0 * step).sum() * row_bytes > 2.0 * _MAX_BYTES:
        return None
    in_page = starts % page
    rows_before = in_page // row_bytes
    # Each shard begins a whole number of steps behind the one before.
    steps = (rows_before + counts + step - 1) // step
    first_rows = step * (steps.cumsum() - steps) + rows_before
    row_count = int(first_rows[-1] + counts[-1])
    nbytes = round_up(row_count * row_bytes, page)
    if nbytes > _MAX_BYTES:
        return None
    return Placement(
        first_rows,
        row_count,
        starts - in_page,
        first_rows * row_bytes - in_page,
        nbytes,
    )
