"""Where the arrays of many shards lie so that they are one array.  Pure.

Rows of a column that lie in many files become rows of one array when each file is
mapped at an address that is a whole number of rows behind the first one's.  A file can
be mapped only at whole pages, so there are gaps between them: addresses, not memory.
What begins within a page is read to where it would be mapped, if it is small.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loaderkit.cache.address_space import round_up

if TYPE_CHECKING:
    from loaderkit.array_types import Bools, Ints
    from loaderkit.cache.shard_table import ColumnSchema, ShardGroup

_MAX_ALIKE_ROW_BYTES = 16 << 10
"""Rows up to here are placed so that columns with as many rows a shard lie alike.
The gap behind a shard is at most a page's number of rows: 64 MiB of addresses."""
_MAX_BYTES = 1 << 44
"""An eighth of the addresses that a process has on today's systems."""
MAX_COPIED_SHARDS = 256
"""Of a column, so many shards are read into memory at most: 1 MiB of pages."""
MAX_COPIED_BYTES = 4096
"""Chosen: what is larger begins at a page, or was packed by an old release."""


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


def are_placed_alike(group: ShardGroup, offsets: str | None) -> Bools:
    """Tell in which shards the columns that share offsets all begin at pages ``[k]``.

    A column that shares its offsets with no other is placed as it can be.
    """
    alike = np.ones(len(group), bool)
    for column in _columns_placed_together(group, offsets):
        alike &= _begins_at_page(group, column)
    return alike


def place_shards(
    group: ShardGroup,
    column: ColumnSchema,
    most_copied: int,
    *,
    is_of_one_length: bool,
) -> tuple[Bools, Bools]:
    """Say how the rows of a column are brought side by side in the shards of a group.

    Arrays of less than 512 B begin within a page, and a part of its own for each of
    them would slow down every batch: 5 of 500 shards whose samples have a byte an atom
    made a batch of molecules take half as long again.  So they are read into memory,
    a page each, where they are few.

    Args:
        group: The shards.
        column: One that is mapped, and of which every sample has rows.
        most_copied: If more shards than this are concerned, none is read.
        is_of_one_length: The samples of each shard are joined and have no offsets, as
            in a shard of one sample; in others they may share theirs.

    Returns:
        Where it is placed like those that share its offsets ``[k]``, and where it has
        to be read for that ``[k]``.
    """
    begins_at_page = _begins_at_page(group, column)
    no_shard = np.zeros(len(group), bool)
    together = _columns_placed_together(group, column.offsets)
    if not together:
        is_mapped = begins_at_page
        if not is_of_one_length:
            is_mapped = begins_at_page | _fits_any_page(group, column)
        is_copied = ~is_mapped & _is_small(group, column)
        are_few = np.count_nonzero(~is_mapped) <= most_copied
        return ~no_shard, is_copied if are_few else no_shard

    alike = are_placed_alike(group, column.offsets)
    if not 0 < np.count_nonzero(~alike) <= most_copied:
        return alike, no_shard
    # Of all of them the same shards: what lies alike is looked up once.
    can_be_alike = ~no_shard
    for sharing in together:
        can_be_alike &= _begins_at_page(group, sharing) | _is_small(group, sharing)
    return can_be_alike, can_be_alike & ~begins_at_page


def _columns_placed_together(
    group: ShardGroup, offsets: str | None
) -> list[ColumnSchema]:
    """List the mapped columns that share offsets; none if it is only one."""
    columns = [column for _, column in group.schema.columns]
    sharing = [column for column in columns if column.offsets == offsets]
    if offsets is None or len(sharing) == 1:
        return []
    return [
        column
        for column in sharing
        if group.schema.array[column.values].chunk_index is None
    ]


def _begins_at_page(group: ShardGroup, column: ColumnSchema) -> Bools:
    at_page: Bools = group.offset_or_chunk_rows(column.values) % mmap.PAGESIZE == 0
    return at_page & (group.nbytes(column.values) > 0)  # what is empty has no place


def _fits_any_page(group: ShardGroup, column: ColumnSchema) -> Bools:
    """Tell where a column can lie a whole number of rows behind any page ``[k]``."""
    sizes = group.shape(column.values)
    starts = group.offset_or_chunk_rows(column.values)
    row_bytes = group.nbytes(column.values) // np.maximum(sizes[0], 1)
    return can_be_placed(starts, sizes[0], np.maximum(row_bytes, 1), mmap.PAGESIZE)


def _is_small(group: ShardGroup, column: ColumnSchema) -> Bools:
    is_small: Bools = group.nbytes(column.values) <= MAX_COPIED_BYTES
    return is_small
