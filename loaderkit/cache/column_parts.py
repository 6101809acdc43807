"""Parts of a column: shards whose rows are read as one array, or one shard alone.

A ``ShardPart`` is a column in one shard, mapped or decompressed as it is read.  A
``JoinedPart`` is the same column in many shards, whose files are mapped side by side in
one range of addresses; where each lies there follows from placement.py.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.cache.address_space import AddressRange, read_at_random
from loaderkit.cache.placement import Placement, place_side_by_side
from loaderkit.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from loaderkit.array_types import Bools, Ints
    from loaderkit.cache.gather import PartRanges, Values
    from loaderkit.cache.shards import Shards
    from loaderkit.errors import DamagedCacheError

_MAX_OFFSETS_CHECKED_ON_OPENING = 1 << 20
"""So many offsets of a shard are checked when it is opened (4 ms).  Where there are
more, each batch checks its own, which costs it 5 us a column."""
_NEVER_ALL_OPEN = 1 << 62
"""A count of shards to open that no number of openings brings to zero."""
ABSENT = -1
"""Stands for the part of a shard that lacks the column."""


@dataclass(frozen=True)
class ShardPart:
    """One column in one shard."""

    values: Values
    """Rows end to end ``[n, *rest]``."""
    offsets: Ints | None
    shapes: Ints | None
    rows: Ints | None
    """Samples of the shard that have the column; None for all."""
    rows_per_sample: int
    """Where there are no offsets."""
    layout_key: object
    """Equal for parts whose rows lie alike."""
    unstackable: bool
    """True when samples that should be stacked have different shapes."""
    offsets_are_checked: bool
    """True when no offset can point outside the values."""
    has_single_rows: bool
    """True when every sample is one row."""
    dense_shape: tuple[int, ...]
    """Shape of every sample, where there are no offsets."""
    low: int | None
    """Least and greatest value of a column that loaderkit counts with; else None."""
    high: int | None
    ready_values: NDArray[Any] | None
    """The values where a batch may take rows without looking further: neither
    compressed, nor with offsets to check, nor larger than memory.  Else None."""

    def locate_rows(self, samples: Ints, _shards: Ints) -> tuple[Ints, Ints]:
        """Say where the rows of samples lie.

        Args:
            samples: Sample numbers in the shard ``[B]``; all have the column.

        Returns:
            First row and number of rows of each ``[B]``.
        """
        if self.rows is not None:
            # Damaged rows may lack a sample; whatever is found lies in the column.
            samples = np.searchsorted(self.rows, samples).clip(0, len(self.rows) - 1)
        if self.offsets is None:
            if self.rows_per_sample == 1:
                return samples, np.ones(len(samples), np.int64)
            lengths = np.full(len(samples), self.rows_per_sample, np.int64)
            return samples * self.rows_per_sample, lengths
        starts = self.offsets.take(samples)
        lengths = self.offsets.take(samples + 1)
        lengths -= starts
        return starts, lengths

    def contains(self, ranges: PartRanges) -> bool:
        """Tell whether all ranges lie in the values."""
        return ranges.lies_within(0, self.values.shape[0])

    def first_out_of_bounds(self, numbers: Ints, _shards: Ints) -> int | None:
        """Give the index of a number that was never packed; None where all were."""
        if self.low is None or self.high is None or not numbers.size:
            return None
        if self.low <= numbers.min() and numbers.max() <= self.high:
            return None
        return int(((numbers < self.low) | (numbers > self.high)).argmax())


class JoinedPart:
    """One column in several shards, as one array.

    Args:
        shards: The files of the cache.
        name: The column.
        joinable: Which shards, and what the manifest says of the column in each.
        values: Its values, joined.
        offsets: Its offsets, joined; None where no shard has any.
        unstackable: As in ``ShardPart``.
    """

    shapes = None
    rows = None

    def __init__(
        self,
        shards: Shards,
        name: str,
        joinable: JoinableRows,
        *,
        values: JoinedArray,
        offsets: JoinedArray | None,
        unstackable: bool,
    ) -> None:
        self._shards, self._name = shards, name
        self._values, self._offsets = values, offsets
        self.values: NDArray[Any] = values.rows
        self.unstackable, self.offsets_are_checked = unstackable, True
        self.ready_values = None if shards.larger_than_memory else values.rows

        # What a batch looks up is an array over all shards of the cache, indexed by
        # the number of a shard.
        of_shards = joinable.of_shards
        shard_count = len(shards.manifest.shards)
        numbers, rows_per_sample = of_shards["shard"], of_shards["rows_per_sample"]
        self._index_in_values = _by_shard(numbers, np.arange(len(numbers)), shard_count)
        self._first_rows = _by_shard(numbers, values.first_rows, shard_count)
        self._row_counts = _by_shard(numbers, values.row_counts, shard_count)
        self._rows_per_sample = _by_shard(numbers, rows_per_sample, shard_count)
        self.has_single_rows = offsets is None and bool((rows_per_sample == 1).all())

        self._index_in_offsets = np.full(shard_count, ABSENT)
        self._has_offsets: Bools | None = None
        """Which shards have offsets ``[n]``; None where all do."""
        if offsets is not None:
            with_offsets = numbers[of_shards["has_offsets"]]
            self._index_in_offsets[with_offsets] = np.arange(len(with_offsets))
            self._first_offsets = _by_shard(
                with_offsets, offsets.first_rows, shard_count
            )
            if len(with_offsets) < len(numbers):
                self._has_offsets = self._index_in_offsets != ABSENT

        self._lows: Ints | None = None
        self._highs: Ints | None = None
        if of_shards["is_bounded"].all():
            self._lows = _by_shard(numbers, of_shards["low"], shard_count)
            self._highs = _by_shard(numbers, of_shards["high"], shard_count)

        self.layout_key: object = shards.number_of(
            (
                numbers.tobytes(),
                joinable.offsets_of_groups,
                rows_per_sample.tobytes(),
                values.first_rows.tobytes(),
            )
        )
        self._is_open = np.zeros(shard_count, bool)
        self._unopened_count = len(numbers)

    def open(self, shards: Iterable[int]) -> None:
        """Map the shards that a batch touches, if they are not mapped yet.

        Raises:
            CacheError: A shard cannot be read, or is damaged.
        """
        if not self._unopened_count:
            return
        for shard in shards:
            if not self._is_open[shard]:
                self._open_shard(shard)
                self._is_open[shard] = True
                self._unopened_count -= 1

    def close_shard(self, shard: int) -> None:
        """Unmap a shard, if it is mapped; what was there cannot be read any more."""
        if not self._is_open[shard]:
            return
        self._is_open[shard] = False
        # From now on every batch looks: two threads may count at once, and one shard
        # too few would be read where nothing is mapped.
        self._unopened_count = _NEVER_ALL_OPEN
        self._values.unmap_shard(int(self._index_in_values[shard]))
        index = int(self._index_in_offsets[shard])
        if self._offsets is not None and index != ABSENT:
            self._offsets.unmap_shard(index)

    def locate_rows(self, samples: Ints, shards: Ints) -> tuple[Ints, Ints]:
        """Say where the rows of samples lie.

        Args:
            samples: Sample numbers, each in its shard ``[B]``.
            shards: Numbers of their shards ``[B]``.

        Returns:
            First row and number of rows of each ``[B]``.
        """
        if self._offsets is None:
            lengths = self._rows_per_sample.take(shards)
            starts = samples * lengths
        elif self._has_offsets is None:
            starts, lengths = self._read_offsets(self._offsets.rows, samples, shards)
        else:
            lengths = self._rows_per_sample.take(shards)
            starts = samples * lengths
            [ragged] = self._has_offsets.take(shards).nonzero()
            starts[ragged], lengths[ragged] = self._read_offsets(
                self._offsets.rows, samples.take(ragged), shards.take(ragged)
            )
        starts += self._first_rows.take(shards)
        return starts, lengths

    def _read_offsets(
        self, offsets: Ints, samples: Ints, shards: Ints
    ) -> tuple[Ints, Ints]:
        """Read first row, counted in its shard, and rows of samples ``[B]``."""
        # In place where it can be: each new array of a batch costs 0.5 us.
        index = self._first_offsets.take(shards)
        index += samples
        starts = offsets.take(index)
        index += 1
        lengths = offsets.take(index)
        lengths -= starts
        return starts, lengths

    def contains(self, ranges: PartRanges) -> bool:
        """Tell whether all ranges lie in the values of their shards."""
        first_rows = self._first_rows.take(ranges.shards)
        return ranges.lies_within(first_rows, self._row_counts.take(ranges.shards))

    def first_out_of_bounds(self, numbers: Ints, shards: Ints) -> int | None:
        """Give the index of a number that was never packed; None where all were."""
        if self._lows is None or self._highs is None:
            return None
        lows, highs = self._lows.take(shards), self._highs.take(shards)
        if numbers.ndim > 1:
            lows, highs = lows[:, None], highs[:, None]
        is_wrong = (numbers < lows) | (numbers > highs)
        return int(is_wrong.argmax()) if is_wrong.any() else None

    def _open_shard(self, shard: int) -> None:
        index_in_values = int(self._index_in_values[shard])
        index_in_offsets = int(self._index_in_offsets[shard])
        with self._shards.opened(shard) as descriptor:
            self._values.map_shard(index_in_values, descriptor)
            if self._shards.larger_than_memory:
                read_at_random(self._values.rows_of(index_in_values))
            if self._offsets is None or index_in_offsets == ABSENT:
                return
            self._offsets.map_shard(index_in_offsets, descriptor)

        offsets = self._offsets.rows_of(index_in_offsets)
        if not are_few_enough_to_check(offsets):
            self.offsets_are_checked, self.ready_values = False, None
        elif not are_offsets(offsets, int(self._row_counts[shard])):
            raise damaged_offsets(self._shards, shard, self._name)


Part = ShardPart | JoinedPart


ROWS_OF_SHARD = np.dtype(
    [
        ("shard", "<i8"),
        ("start", "<i8"),  # byte of the file at which the rows begin
        ("count", "<i8"),
        ("is_copied", "?"),  # they are read into memory, since they cannot be mapped
        ("rows_per_sample", "<i8"),  # where there are no offsets; else 1
        ("has_offsets", "?"),
        ("offset_start", "<i8"),  # byte of the file at which the offsets begin
        ("offset_count", "<i8"),
        ("is_bounded", "?"),  # the least and greatest value of the column are known
        ("low", "<i8"),
        ("high", "<i8"),
    ]
)
"""What the manifest says of a column in one shard, as a record of an array."""


@dataclass(frozen=True, eq=False)
class JoinableRows:
    """Rows of a column in several shards that can be read as one array."""

    dtype: str
    row_shape: tuple[int, ...]
    offsets_of_groups: tuple[str | None, ...]
    """Name of their array of offsets in each group of shards."""
    of_shards: NDArray[Any]
    """``ROWS_OF_SHARD`` of each shard ``[n]``, in the order of the cache."""


class JoinedArray:
    """Arrays of several shards in one range of addresses.

    Args:
        dtype: Their dtype.
        row_shape: Shape of their rows.
        row_counts: How many rows each has ``[n]``.
        placement: Where each lies.
        copied_from: Byte of the file at which the rows begin, of those that are read
            into memory instead of mapped, by their index.

    Raises:
        OSError: The process may not have so many addresses.
    """

    def __init__(
        self,
        dtype: str,
        row_shape: tuple[int, ...],
        row_counts: Ints,
        placement: Placement,
        copied_from: Mapping[int, int],
    ) -> None:
        self._placement, self.row_counts = placement, row_counts
        self._copied_from = copied_from
        self._addresses = AddressRange(placement.nbytes)
        self.first_rows = placement.first_rows
        self._row_bytes = bytes_of_row(dtype, row_shape)
        flat = self._addresses.as_array()[: placement.row_count * self._row_bytes]
        self.rows: NDArray[Any] = flat.view(dtype).reshape(-1, *row_shape)
        """``[n, *row_shape]``; between the shards lies what must not be read."""

    def map_shard(self, index: int, descriptor: int) -> None:
        """Map the rows of one shard, or read them.

        Args:
            index: Which of the shards.
            descriptor: Its file.
        """
        window = self._placement.window(index)
        if index not in self._copied_from:
            self._addresses.map_file(
                descriptor,
                window.file_start,
                nbytes=window.nbytes,
                at=window.range_start,
            )
        elif self.row_counts[index]:
            self._addresses.copy_file(
                descriptor,
                self._copied_from[index],
                nbytes=int(self.row_counts[index]) * self._row_bytes,
                at=window.range_start,
            )

    def unmap_shard(self, index: int) -> None:
        """Unmap the rows of one shard; its addresses stay reserved."""
        window = self._placement.window(index)
        if window.nbytes:
            self._addresses.unmap(nbytes=window.nbytes, at=window.range_start)

    def rows_of(self, index: int) -> NDArray[Any]:
        """Give the rows of one shard, which is mapped."""
        first = int(self.first_rows[index])
        rows: NDArray[Any] = self.rows[first : first + int(self.row_counts[index])]
        return rows


def join_arrays(
    dtype: str,
    row_shape: tuple[int, ...],
    starts: Ints,
    counts: Ints,
    is_copied: Bools | None = None,
) -> JoinedArray | None:
    """Make room for arrays side by side.

    Args:
        dtype: Their dtype.
        row_shape: Shape of their rows.
        starts: Byte of its file at which each begins ``[n]``.
        counts: How many rows each has ``[n]``.
        is_copied: Which are read into memory instead of mapped ``[n]``; None for none.

    Returns:
        The arrays, not mapped yet; None where there is no room.
    """
    row_bytes = bytes_of_row(dtype, row_shape)
    copied_from: dict[int, int] = {}
    if is_copied is not None:
        [copied] = is_copied.nonzero()
        copied_from = dict(zip(copied.tolist(), starts[copied].tolist(), strict=True))
        starts = np.where(is_copied, 0, starts)  # a copy begins at a page
    placement = place_side_by_side(starts, counts, row_bytes, mmap.PAGESIZE)
    if placement is None:
        return None
    try:
        return JoinedArray(dtype, row_shape, counts, placement, copied_from)
    except OSError:
        return None  # a limit on addresses (ulimit -v): shard by shard needs fewer


def bytes_of_row(dtype: str, row_shape: tuple[int, ...]) -> int:
    """Count the bytes of a row.

    >>> bytes_of_row("<f4", (2, 3))
    24
    """
    return math.prod(row_shape) * np.dtype(dtype).itemsize


def are_few_enough_to_check(offsets: Ints) -> bool:
    """Tell whether offsets are checked when a shard is opened, not in each batch."""
    return len(offsets) <= _MAX_OFFSETS_CHECKED_ON_OPENING


def are_offsets(offsets: Ints, row_count: int) -> bool:
    """Tell whether offsets go up and stay inside the values.

    >>> are_offsets(np.array([0, 2, 2, 5]), 5), are_offsets(np.array([0, 3, 2]), 5)
    (True, False)
    """
    is_ordered = bool((offsets[1:] >= offsets[:-1]).all())
    return is_ordered and int(offsets[0]) >= 0 and int(offsets[-1]) <= row_count


def damaged_offsets(shards: Shards, shard: int, name: str) -> DamagedCacheError:
    """Say that the offsets of a column are damaged."""
    return shards.damaged(shard, name, "its offsets point outside it")


def column_is_missing(file: str, name: str) -> CacheError:
    """Say that a column was asked of samples that do not have it."""
    message = f"{file} holds no column {name!r}."
    fix = "ask for a column that its samples have, or pack them with that field"
    return CacheError(message, why="none of its samples has it", fix=fix)


def _by_shard(numbers: Ints, values: Ints, shard_count: int) -> Ints:
    """Spread values of some shards over all shards of a cache."""
    spread = np.zeros(shard_count, np.int64)
    spread[numbers] = values
    return spread
