"""One column of a cache, read from all its shards.

The shards of a column fall into *parts*.  Shards whose rows have one dtype and shape
are one part: mapped side by side and read as one array, so that a batch takes as long
from 500 files as from one.  What cannot be joined is a part for each shard: compressed
values, values of several shapes, columns that only some samples have, a few hundred
bytes at the end of a cache, and everything on systems that cannot map side by side.
"""

from __future__ import annotations

import math
import mmap
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.cache.address_space import AddressRange, ReadAhead, read_at_random
from loaderkit.cache.gather import (
    Piece,
    Runs,
    Values,
    gather,
    gather_apart,
    gather_padded,
)
from loaderkit.cache.placement import Placement, can_be_placed, place
from loaderkit.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from loaderkit.cache.shard_table import ColumnSchema, ShardGroup
    from loaderkit.cache.shards import Shards
    from loaderkit.errors import DamagedCacheError

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

_CHECKED_AT_ONCE = 1 << 20
"""So many offsets of a shard are checked when it is opened (4 ms).  Where there are
more, each batch checks its own, which costs it 5 us a column."""
_ALWAYS_SOME_LEFT = 1 << 62
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
    key: object
    """Equal for parts whose rows lie alike."""
    unstackable: bool
    """True when samples that should be stacked have different shapes."""
    is_checked: bool
    """True when no offset can point outside the values."""
    has_single_rows: bool
    """True when every sample is one row."""
    dense_shape: tuple[int, ...]
    """Shape of every sample, where there are no offsets."""
    low: int | None
    """Least and greatest value of a column that loaderkit counts with; else None."""
    high: int | None

    def find(self, samples: Ints, _shards: Ints) -> tuple[Ints, Ints]:
        """Say where the rows of samples lie.

        Args:
            samples: Sample numbers in the shard ``[B]``; all have the column.

        Returns:
            First row and number of rows of each ``[B]``.
        """
        if self.rows is not None:
            samples = np.searchsorted(self.rows, samples).clip(0, len(self.rows) - 1)
        if self.offsets is None:
            lengths = np.full(len(samples), self.rows_per_sample, np.int64)
            one = self.rows_per_sample == 1
            return (samples if one else samples * self.rows_per_sample), lengths
        starts = self.offsets.take(samples)
        lengths = self.offsets.take(samples + 1)
        lengths -= starts
        return starts, lengths

    def holds(self, piece: Piece) -> bool:
        """Tell whether all runs of a piece lie in the values."""
        return piece.lies_within(0, self.values.shape[0])

    def first_outside(self, numbers: Ints, _shards: Ints) -> int | None:
        """Give the place of a number that was never packed; None where all were."""
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
        described: Which shards, and what the manifest says of the column in each.
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
        described: JoinableRows,
        *,
        values: JoinedArray,
        offsets: JoinedArray | None,
        unstackable: bool,
    ) -> None:
        self._shards, self._name = shards, name
        self._values, self._offsets = values, offsets
        self.values: NDArray[Any] = values.rows
        self.unstackable, self.is_checked = unstackable, True

        of_shards, count = described.of_shards, len(shards.manifest.shards)
        numbers, rows_per_sample = of_shards["shard"], of_shards["rows_per_sample"]
        self._at = _by_shard(numbers, np.arange(len(numbers)), count)
        self._first_rows = _by_shard(numbers, values.first_rows, count)
        self._row_counts = _by_shard(numbers, values.row_counts, count)
        self._rows_per_sample = _by_shard(numbers, rows_per_sample, count)
        self.has_single_rows = offsets is None and bool((rows_per_sample == 1).all())
        self._at_of_offsets = np.full(count, ABSENT)
        self._has_offsets: Bools | None = None
        if offsets is not None:
            with_offsets = numbers[of_shards["has_offsets"]]
            self._at_of_offsets[with_offsets] = np.arange(len(with_offsets))
            self._first_offsets = _by_shard(with_offsets, offsets.first_rows, count)
            if len(with_offsets) < len(numbers):
                self._has_offsets = self._at_of_offsets != ABSENT
        self._lows = self._highs = None
        if of_shards["is_bounded"].all():
            self._lows = _by_shard(numbers, of_shards["low"], count)
            self._highs = _by_shard(numbers, of_shards["high"], count)
        self.key: object = shards.number_of(
            (
                numbers.tobytes(),
                described.offsets_of_groups,
                rows_per_sample.tobytes(),
                values.first_rows.tobytes(),
            )
        )

        self._is_open = np.zeros(count, bool)
        self._left = len(numbers)

    def open(self, touched: Iterable[int]) -> None:
        """Map the shards that a batch touches, if they are not mapped yet.

        Raises:
            CacheError: A shard cannot be read, or is damaged.
        """
        if not self._left:
            return
        for shard in touched:
            if not self._is_open[shard]:
                self._open_shard(shard)
                self._is_open[shard] = True
                self._left -= 1

    def close_shard(self, shard: int) -> None:
        """Unmap a shard, if it is mapped; what was there cannot be read any more."""
        if not self._is_open[shard]:
            return
        self._is_open[shard] = False
        # From now on every batch looks: two threads may count at once, and one shard
        # too few would be read where nothing is mapped.
        self._left = _ALWAYS_SOME_LEFT
        self._values.unmap_shard(int(self._at[shard]))
        at = int(self._at_of_offsets[shard])
        if self._offsets is not None and at != ABSENT:
            self._offsets.unmap_shard(at)

    def find(self, samples: Ints, shards: Ints) -> tuple[Ints, Ints]:
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
            starts, lengths = self._from_offsets(self._offsets.rows, samples, shards)
        else:
            lengths = self._rows_per_sample.take(shards)
            starts = samples * lengths
            [some] = self._has_offsets.take(shards).nonzero()
            starts[some], lengths[some] = self._from_offsets(
                self._offsets.rows, samples.take(some), shards.take(some)
            )
        starts += self._first_rows.take(shards)
        return starts, lengths

    def _from_offsets(
        self, offsets: Ints, samples: Ints, shards: Ints
    ) -> tuple[Ints, Ints]:
        at = self._first_offsets.take(shards)
        at += samples
        starts = offsets.take(at)
        at += 1
        lengths = offsets.take(at)
        lengths -= starts
        return starts, lengths

    def holds(self, piece: Piece) -> bool:
        """Tell whether all runs of a piece lie in the values of their shards."""
        first_rows = self._first_rows.take(piece.shards)
        return piece.lies_within(first_rows, self._row_counts.take(piece.shards))

    def first_outside(self, numbers: Ints, shards: Ints) -> int | None:
        """Give the place of a number that was never packed; None where all were."""
        if self._lows is None or self._highs is None:
            return None
        lows, highs = self._lows.take(shards), self._highs.take(shards)
        if numbers.ndim > 1:
            lows, highs = lows[:, None], highs[:, None]
        wrong = (numbers < lows) | (numbers > highs)
        return int(wrong.argmax()) if wrong.any() else None

    def _open_shard(self, shard: int) -> None:
        at_of_values = int(self._at[shard])
        at = int(self._at_of_offsets[shard])
        with self._shards.opened(shard) as descriptor:
            self._values.map_shard(at_of_values, descriptor)
            if self._shards.larger_than_memory:
                read_at_random(self._values.rows_of(at_of_values))
            if self._offsets is None or at == ABSENT:
                return
            self._offsets.map_shard(at, descriptor)
        offsets: Ints = self._offsets.rows_of(at)
        if len(offsets) > _CHECKED_AT_ONCE:
            self.is_checked = False
        elif not _are_offsets(offsets, int(self._row_counts[shard])):
            raise outside(self._shards, shard, self._name)


Part = ShardPart | JoinedPart


class JoinedArray:
    """Arrays of several shards in one range of addresses.

    Args:
        dtype: Their dtype.
        row_shape: Shape of their rows.
        row_counts: How many rows each has ``[n]``.
        placement: Where each lies.

    Raises:
        OSError: The process may not have so many addresses.
    """

    def __init__(
        self,
        dtype: str,
        row_shape: tuple[int, ...],
        row_counts: Ints,
        placement: Placement,
    ) -> None:
        self._placement, self.row_counts = placement, row_counts
        self._addresses = AddressRange(placement.nbytes)
        self.first_rows = placement.first_rows
        row_bytes = _row_bytes(dtype, row_shape)
        flat = self._addresses.as_array()[: placement.row_count * row_bytes]
        self.rows: NDArray[Any] = flat.view(dtype).reshape(-1, *row_shape)
        """``[n, *row_shape]``; between the shards lies what must not be read."""

    def map_shard(self, at: int, descriptor: int) -> None:
        """Map the rows of one shard.

        Args:
            at: Which of the shards.
            descriptor: Its file.
        """
        window = self._placement.window(at)
        self._addresses.map_file(
            descriptor, window.file_start, nbytes=window.nbytes, at=window.at
        )

    def unmap_shard(self, at: int) -> None:
        """Unmap the rows of one shard; its addresses stay reserved."""
        window = self._placement.window(at)
        self._addresses.unmap(nbytes=window.nbytes, at=window.at)

    def rows_of(self, at: int) -> NDArray[Any]:
        """Give the rows of one shard, which is mapped."""
        first = int(self.first_rows[at])
        rows: NDArray[Any] = self.rows[first : first + int(self.row_counts[at])]
        return rows


@dataclass(frozen=True, eq=False)
class Grouping:
    """Which part of a column the rows of each shard are in."""

    first_shards: Ints
    """Number of the first shard of each part."""
    part_of_shard: Ints | None
    """Number of the part of each shard, or ``ABSENT``; None where all are in one."""
    key: int
    """Equal for columns whose shards are grouped alike."""


_ROWS_OF_SHARD = np.dtype(
    [
        ("shard", "<i8"),
        ("start", "<i8"),  # byte of the file at which the rows begin
        ("count", "<i8"),
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
    """``_ROWS_OF_SHARD`` of each shard ``[n]``, in the order of the cache."""


class ColumnReader:
    """One column across all shards, opened shard by shard as rows are asked for."""

    def __init__(self, shards: Shards, name: str, *, stacked: bool) -> None:
        self._shards, self.name, self._stacked = shards, name, stacked
        self._shard_parts: dict[int, ShardPart] = {}
        self._joined_parts: dict[int, JoinedPart] = {}
        """By the first shard of each: a tuple of all 500 is hashed anew each time."""
        self._read_ahead: defaultdict[int, ReadAhead] = defaultdict(ReadAhead)
        shards.add_reader(self)

    def close_shard(self, shard: int) -> None:
        """Unmap a shard; it is opened again when it is read again."""
        self._shard_parts.pop(shard, None)
        for joined in self._joined_parts.values():
            joined.close_shard(shard)

    def part(self, number: int, touched: Iterable[int]) -> Part:
        """Give a part of the column, opened as far as a batch needs it.

        Args:
            number: Which part of ``grouping``.
            touched: The shards of the part that the batch touches.

        Returns:
            Its arrays, mapped.

        Raises:
            CacheError: A file cannot be read, or is damaged.
        """
        first = int(self.grouping.first_shards[number])
        joined = self._joined_parts.get(first)
        if joined is None:
            return self.shard_part(first)
        joined.open(touched)
        return joined

    def shard_part(self, shard: int) -> ShardPart:
        """Give the column in one shard.

        Args:
            shard: Number of the shard.

        Returns:
            Its arrays, mapped.

        Raises:
            CacheError: The shard has no such column.
        """
        part = self._shard_parts.get(shard)
        if part is None:
            part = self._shard_parts[shard] = self._open_shard(shard)
        return part

    def gather(
        self,
        runs: Runs,
        out: NDArray[Any],
        *,
        add: Ints | None = None,
    ) -> None:
        """Copy the rows of a batch.

        Args:
            runs: Where they lie, from ``Pick.runs`` for this column.
            out: Where they go ``[runs.total, *rest]``.
            add: What to add to the rows of each sample ``[B]`` or ``[B, *rest]``.

        Raises:
            DamagedCacheError: The offsets on disk point outside the column.
        """
        gather(self._values_of(runs), runs, out, add)

    def gather_padded(self, runs: Runs, out: NDArray[Any]) -> None:
        """Copy the rows of a batch side by side, with zeros behind each sample.

        Args:
            runs: Where they lie, from ``Pick.runs`` for this column.
            out: Where they go ``[B, L, *rest]``, contiguous.

        Raises:
            DamagedCacheError: The offsets on disk point outside the column.
        """
        gather_padded(self._values_of(runs), runs, out)

    def gather_apart(self, runs: Runs, outs: Sequence[NDArray[Any]]) -> None:
        """Copy the rows of each sample of a batch into an array of its own.

        Args:
            runs: Where they lie, from ``Pick.runs`` for this column.
            outs: Where those of each sample go ``[B]`` of ``[n, *rest]``.

        Raises:
            DamagedCacheError: The offsets on disk point outside the column.
        """
        gather_apart(self._values_of(runs), runs, outs)

    def _values_of(self, runs: Runs) -> dict[int, Values]:
        """Give the values of the parts of a batch, opened, checked and asked for."""
        values: dict[int, Values] = {}
        for piece in runs.pieces:
            part = self.part(piece.part, piece.touched)
            values[piece.part] = part.values
            if not part.is_checked and not part.holds(piece):
                raise outside(self._shards, piece.touched[0], self.name)
            if self._shards.larger_than_memory and isinstance(part.values, np.ndarray):
                ahead = self._read_ahead[piece.part]
                ahead.ask(part.values, piece.starts, piece.lengths)
        return values

    @cached_property
    def rest(self) -> tuple[int, ...] | None:
        """Shape of a row behind its first axis; None where samples differ in that."""
        shapes: set[tuple[int, ...] | None] = set()
        for group, column in self._groups():
            if column.shapes is not None or (self._stacked and column.offsets):
                shapes.add(None)
            else:
                shapes |= self._row_shapes(group, column)
        return shapes.pop() if len(shapes) == 1 else None

    @cached_property
    def grouping(self) -> Grouping:
        """Group the shards: those that can be read as one array are one part."""
        count = len(self._shards.manifest.shards)
        part_of_shard = np.full(count, ABSENT, np.int64)
        # Until parts are numbered, each is called after its first shard.
        for group, _ in self._groups():
            part_of_shard[group.positions] = group.positions
        if self._shards.can_be_joined:
            for rows in self._joinable_rows():
                part = self._join(rows)
                if part is not None:
                    shards = rows.of_shards["shard"]
                    first = int(shards[0])
                    self._joined_parts[first] = part
                    part_of_shard[shards] = first
        present = part_of_shard != ABSENT
        first_shards, parts = np.unique(part_of_shard[present], return_inverse=True)
        part_of_shard[present] = parts
        key = self._shards.number_of(part_of_shard.tobytes())
        if len(first_shards) == 1 and present.all():
            return Grouping(first_shards, None, key)
        return Grouping(first_shards, part_of_shard, key)

    @cached_property
    def array_key(self) -> int:
        """Equal for columns that are kept as the same arrays in every shard."""
        groups = self._shards.manifest.shards.groups
        columns = [group.schema.column.get(self.name) for group in groups]
        return self._shards.number_of(
            tuple(column and (column.values, column.rows) for column in columns)
        )

    def read(self, shard: int, sample: int) -> NDArray[Any]:
        """Copy one sample's value out of the column.

        Args:
            shard: Number of the shard.
            sample: The sample's number in it.

        Returns:
            A new array of the shape that was packed; it keeps nothing mapped.
        """
        part = self.shard_part(shard)
        if part.rows is not None:
            sample = min(int(np.searchsorted(part.rows, sample)), len(part.rows) - 1)
        if part.offsets is None:
            start = sample * part.rows_per_sample
            self._ask_for(part, start, part.rows_per_sample)
            rows = np.array(part.values[start : start + part.rows_per_sample])
            return rows.reshape(part.dense_shape)
        start, stop = part.offsets[sample : sample + 2].tolist()
        length = stop - start
        if start < 0 or length < 0 or stop > part.values.shape[0]:
            raise outside(self._shards, shard, self.name)
        self._ask_for(part, start, length)
        flat: NDArray[Any] = np.array(part.values[start:stop])
        if part.shapes is None:
            return flat
        shape = part.shapes[sample].tolist()
        if min(shape, default=0) < 0 or math.prod(shape) != length:
            why = f"a value has {length:,} numbers, and the shape {shape}"
            raise self._shards.damaged(shard, self.name, why)
        shaped: NDArray[Any] = flat.reshape(shape)
        return shaped

    def numbers(self, part: Part, samples: Ints, shards: Ints) -> NDArray[Any]:
        """Look up one small number, or row of numbers, of some samples.

        Args:
            part: The part that they are in.
            samples: Sample numbers, each in its shard ``[B]``; all have the column.
            shards: Numbers of their shards ``[B]``.

        Returns:
            ``[B]`` or ``[B, k]``, new.

        Raises:
            DamagedCacheError: A number is smaller or larger than any that was packed.
        """
        values: Any = part.values
        numbers: NDArray[Any] = values.take(part.find(samples, shards)[0], axis=0)
        wrong = part.first_outside(numbers, shards)
        if wrong is not None:
            row = wrong // (numbers.size // len(numbers))
            shard = int(shards[row])
            column = self._shards.manifest.shards[shard].columns[self.name]
            why = (
                f"it holds the number {numbers.flat[wrong]:,}, "
                f"and was packed with {column.low:,} to {column.high:,}"
            )
            raise self._shards.damaged(shard, self.name, why)
        return numbers

    def _ask_for(self, part: ShardPart, start: int, length: int) -> None:
        """Read the pages of one run together, where the files exceed memory."""
        if self._shards.larger_than_memory and isinstance(part.values, np.ndarray):
            ReadAhead().ask(part.values, np.array([start]), np.array([length]))

    def _groups(self) -> Iterator[tuple[ShardGroup, ColumnSchema]]:
        """List the groups of shards that have the column."""
        for group in self._shards.manifest.shards.groups:
            column = group.schema.column.get(self.name)
            if column is not None:
                yield group, column

    def _joinable_rows(self) -> Iterator[JoinableRows]:
        """Find the shards whose rows can be read as one array, at least two each time.

        Columns that share offsets are looked up once if they are placed alike: in the
        same shards, all of which begin at whole pages.
        """
        alike: dict[Any, list[tuple[str | None, NDArray[Any]]]] = defaultdict(list)
        for group, column in self._groups():
            array = group.schema.array[column.values]
            whole = column.rows is None and column.shapes is None
            if not whole or array.chunk_index is not None:
                continue
            of_shards = self._describe(group, column)
            at_pages = are_placed_alike(group, column.offsets)
            leading_axes = self._leading_axes(column.offsets, array.axes)
            for row_shape, rows in group.by_row_shape(column.values, leading_axes):
                for begins_at_page in (True, False):
                    kind = (array.dtype, row_shape, begins_at_page)
                    some = of_shards[rows[at_pages[rows] == begins_at_page]]
                    alike[kind].append((column.offsets, some))
        for (dtype, row_shape, _), parts in alike.items():
            row_bytes = _row_bytes(dtype, row_shape)
            if row_bytes and sum(len(some) for _, some in parts) > 1:
                of_shards = np.concatenate([some for _, some in parts])
                of_shards = of_shards[of_shards["shard"].argsort()]
                starts, counts = of_shards["start"], of_shards["count"]
                fits = can_be_placed(starts, counts, row_bytes, mmap.PAGESIZE)
                if np.count_nonzero(fits) > 1:
                    offsets = tuple(offsets for offsets, _ in parts)
                    yield JoinableRows(dtype, row_shape, offsets, of_shards[fits])

    def _describe(self, group: ShardGroup, column: ColumnSchema) -> NDArray[Any]:
        """Take what is said of the column in each shard of a group."""
        of_shards = np.zeros(len(group), _ROWS_OF_SHARD)
        sizes = group.shape(column.values)
        leading_axes = self._leading_axes(column.offsets, len(sizes))
        of_shards["rows_per_sample"] = sizes[1] if leading_axes else 1
        of_shards["shard"] = group.positions
        of_shards["start"] = group.place(column.values)
        of_shards["count"] = sizes[0] * of_shards["rows_per_sample"]
        if column.offsets is not None:
            of_shards["has_offsets"] = True
            of_shards["offset_start"] = group.place(column.offsets)
            of_shards["offset_count"] = group.shape(column.offsets)[0]
        if column.bounded:
            of_shards["is_bounded"] = True
            of_shards["low"] = group.low(self.name)
            of_shards["high"] = group.high(self.name)
        return of_shards

    def _join(self, rows: JoinableRows) -> JoinedPart | None:
        """Read rows of several shards as one array; None where there is no room."""
        of_shards = rows.of_shards
        starts, counts = of_shards["start"], of_shards["count"]
        values = _join_arrays(rows.dtype, rows.row_shape, starts, counts)
        if values is None:
            return None
        offsets = None
        if of_shards["has_offsets"].any():
            some = of_shards[of_shards["has_offsets"]]
            starts, counts = some["offset_start"], some["offset_count"]
            offsets = _join_arrays("<i8", (), starts, counts)
            if offsets is None:
                return None
        return JoinedPart(
            self._shards,
            self.name,
            rows,
            values=values,
            offsets=offsets,
            unstackable=self._stacked and offsets is not None,
        )

    def _leading_axes(self, offsets: str | None, axes: int) -> int:
        """Count the axes of a sample ``[k, *rest]`` that are joined to rows."""
        return 1 if offsets is None and not self._stacked and axes > 1 else 0

    def _row_shapes(
        self, group: ShardGroup, column: ColumnSchema
    ) -> set[tuple[int, ...]]:
        axes = group.schema.array[column.values].axes
        leading_axes = self._leading_axes(column.offsets, axes)
        shapes = group.by_row_shape(column.values, leading_axes)
        return {shape for shape, _ in shapes}

    def _open_shard(self, shard: int) -> ShardPart:
        described = self._shards.manifest.shards[shard]
        column = described.columns.get(self.name)
        if column is None:
            raise lacks_column(described.file, self.name)
        array = described.arrays[column.values]
        joined = self._leading_axes(column.offsets, len(array.shape)) > 0
        offsets, shapes, rows = (
            None if name is None else self._shards.index_array(shard, name)
            for name in (column.offsets, column.shapes, column.rows)
        )
        values = self._shards.values(shard, column.values, joined=joined)
        if rows is not None and not _are_sample_numbers(rows, described.samples):
            raise self._shards.damaged(shard, self.name, "its rows are in no order")
        if self._shards.larger_than_memory and isinstance(values, np.ndarray):
            read_at_random(values)
        per_sample = array.shape[1] if joined else 1
        few = offsets is not None and len(offsets) <= _CHECKED_AT_ONCE
        if offsets is not None and few and not _are_offsets(offsets, values.shape[0]):
            raise outside(self._shards, shard, self.name)
        return ShardPart(
            values,
            offsets,
            shapes,
            rows,
            per_sample,
            key=(shard, column.offsets, per_sample, column.rows),
            unstackable=self._stacked and column.offsets is not None,
            is_checked=offsets is None or few,
            has_single_rows=offsets is None and per_sample == 1,
            dense_shape=array.shape[1:],
            low=column.low,
            high=column.high,
        )


def outside(shards: Shards, shard: int, name: str) -> DamagedCacheError:
    """Say that the offsets of a column are damaged."""
    return shards.damaged(shard, name, "its offsets point outside it")


def lacks_column(file: str, name: str) -> CacheError:
    """Say that a column was asked of samples that do not have it."""
    what = f"{file} holds no column {name!r}."
    return CacheError(what, why="none of its samples has it")


def are_placed_alike(group: ShardGroup, offsets: str | None) -> Bools:
    """Tell in which shards the columns that share offsets all begin at pages ``[k]``.

    A column that shares its offsets with no other is placed as it can be.
    """
    columns = [column for _, column in group.schema.columns]
    sharing = [column for column in columns if column.offsets == offsets]
    alike = np.ones(len(group), bool)
    if offsets is None or len(sharing) == 1:
        return alike
    for column in sharing:
        if group.schema.array[column.values].chunk_index is None:
            alike &= group.place(column.values) % mmap.PAGESIZE == 0
    return alike


def _row_bytes(dtype: str, row_shape: tuple[int, ...]) -> int:
    return math.prod(row_shape) * np.dtype(dtype).itemsize


def _join_arrays(
    dtype: str, row_shape: tuple[int, ...], starts: Ints, counts: Ints
) -> JoinedArray | None:
    """Make room for arrays side by side; None where there is none."""
    placement = place(starts, counts, _row_bytes(dtype, row_shape), mmap.PAGESIZE)
    if placement is None:
        return None
    try:
        return JoinedArray(dtype, row_shape, counts, placement)
    except OSError:
        return None  # a limit on addresses (ulimit -v): shard by shard needs fewer


def _by_shard(numbers: Ints, values: Ints, count: int) -> Ints:
    """Spread values of some shards over all shards of a cache."""
    spread = np.zeros(count, np.int64)
    spread[numbers] = values
    return spread


def _are_offsets(offsets: Ints, rows: int) -> bool:
    """Check that offsets go up and stay inside the values."""
    ordered = bool((offsets[1:] >= offsets[:-1]).all())
    return ordered and int(offsets[0]) >= 0 and int(offsets[-1]) <= rows


def _are_sample_numbers(rows: Ints, samples: int) -> bool:
    """Check that rows name samples of the shard, each once, in order."""
    ordered = bool((rows[1:] > rows[:-1]).all())
    return ordered and (not len(rows) or (rows[0] >= 0 and rows[-1] < samples))
