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
from loaderkit.cache.gather import Piece, Runs, Values, gather, gather_padded
from loaderkit.cache.placement import Placement, Rows, can_be_placed, place
from loaderkit.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from loaderkit.cache.layout import Array, Column
    from loaderkit.cache.shards import Shards
    from loaderkit.errors import DamagedCacheError

    Ints = NDArray[np.int64]

_CHECKED_AT_ONCE = 1 << 20
"""So many offsets of a shard are checked when it is opened (4 ms).  Where there are
more, each batch checks its own, which costs it 5 us a column."""
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
        numbers: The shards of the part.
        values: Its values, joined.
        offsets: Its offsets, joined; None where no shard has any.
        with_offsets: The shards that have offsets.
        rows_per_sample: Rows of a sample in each shard without offsets.
        unstackable: As in ``ShardPart``.
    """

    shapes = None
    rows = None

    def __init__(
        self,
        shards: Shards,
        name: str,
        numbers: Sequence[int],
        *,
        values: JoinedArray,
        offsets: JoinedArray | None,
        with_offsets: Sequence[int],
        rows_per_sample: Sequence[int],
        unstackable: bool,
    ) -> None:
        self._shards, self._name = shards, name
        self._values, self._offsets = values, offsets
        self._at = {number: at for at, number in enumerate(numbers)}
        self._at_of_offsets = {number: at for at, number in enumerate(with_offsets)}
        self.values: NDArray[Any] = values.rows
        self.unstackable, self.is_checked = unstackable, True

        count = len(shards.manifest.shards)
        columns = [shards.manifest.shards[number].columns[name] for number in numbers]
        self._first_rows = _by_shard(numbers, values.first_rows, count)
        self._row_counts = _by_shard(numbers, values.row_counts, count)
        self._rows_per_sample = _by_shard(numbers, rows_per_sample, count)
        self.has_single_rows = not with_offsets and set(rows_per_sample) == {1}
        self._has_offsets: NDArray[np.bool_] | None = None
        if offsets is not None:
            self._first_offsets = _by_shard(with_offsets, offsets.first_rows, count)
            if len(with_offsets) < len(numbers):
                self._has_offsets = np.zeros(count, bool)
                self._has_offsets[list(with_offsets)] = True
        self._lows = self._highs = None
        if all(column.low is not None for column in columns):
            self._lows = _by_shard(numbers, [c.low or 0 for c in columns], count)
            self._highs = _by_shard(numbers, [c.high or 0 for c in columns], count)
        lengths = tuple(
            c.offsets or k for c, k in zip(columns, rows_per_sample, strict=True)
        )
        alike = (tuple(numbers), lengths, values.first_rows)
        self.key: object = shards.number_of(alike)

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
        at = self._at_of_offsets.get(shard)
        with self._shards.opened(shard) as descriptor:
            self._values.map_shard(self._at[shard], descriptor)
            if self._shards.larger_than_memory:
                read_at_random(self._values.rows_of(self._at[shard]))
            if self._offsets is None or at is None:
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
        arrays: The arrays, of one dtype and one shape behind the first axis.
        placement: Where each lies.
        row_shape: Shape of a row.

    Raises:
        OSError: The process may not have so many addresses.
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        placement: Placement,
        row_shape: tuple[int, ...],
    ) -> None:
        self._windows = placement.windows
        self._addresses = AddressRange(placement.nbytes)
        row_bytes = _row_bytes(arrays[0], row_shape)
        self.first_rows = placement.first_rows
        self.row_counts = [each.nbytes // row_bytes for each in arrays]
        flat = self._addresses.as_array()[: placement.row_count * row_bytes]
        self.rows: NDArray[Any] = flat.view(arrays[0].dtype).reshape(-1, *row_shape)
        """``[n, *row_shape]``; between the shards lies what must not be read."""

    def map_shard(self, at: int, descriptor: int) -> None:
        """Map the rows of one shard.

        Args:
            at: Which of the shards.
            descriptor: Its file.
        """
        window = self._windows[at]
        self._addresses.map_file(
            descriptor, window.file_start, nbytes=window.nbytes, at=window.at
        )

    def rows_of(self, at: int) -> NDArray[Any]:
        """Give the rows of one shard, which is mapped."""
        first = self.first_rows[at]
        rows: NDArray[Any] = self.rows[first : first + self.row_counts[at]]
        return rows


@dataclass(frozen=True)
class Grouping:
    """Which part of a column the rows of each shard are in."""

    parts: tuple[tuple[int, ...], ...]
    """Numbers of the shards of each part."""
    part_of_shard: Ints | None
    """Number of the part of each shard, or ``ABSENT``; None where all are in one."""
    key: int
    """Equal for columns whose shards are grouped alike."""


class ColumnReader:
    """One column across all shards, opened shard by shard as rows are asked for."""

    def __init__(self, shards: Shards, name: str, *, stacked: bool) -> None:
        self._shards, self.name, self._stacked = shards, name, stacked
        self._shard_parts: dict[int, ShardPart] = {}
        self._joined_parts: dict[int, JoinedPart] = {}
        """By the first shard of each: a tuple of all 500 is hashed anew each time."""
        self._read_ahead: defaultdict[int, ReadAhead] = defaultdict(ReadAhead)

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
        first = self.grouping.parts[number][0]
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
        for shard in self._shards.manifest.shards:
            column = shard.columns.get(self.name)
            if column is not None:
                unlike = column.shapes or (self._stacked and column.offsets)
                array = shard.arrays[column.values]
                shapes.add(None if unlike else self._row_shape(column, array))
        return shapes.pop() if len(shapes) == 1 else None

    @cached_property
    def grouping(self) -> Grouping:
        """Group the shards: those that can be read as one array are one part."""
        alike: dict[object, list[int]] = {}
        for number, shard in enumerate(self._shards.manifest.shards):
            column = shard.columns.get(self.name)
            if column is None:
                continue
            array = shard.arrays[column.values]
            row_shape = self._row_shape(column, array)
            whole = column.rows is None and column.shapes is None
            if not whole or not _can_be_joined(array, row_shape):
                alike[number] = [number]
                continue
            # Columns that share offsets are looked up once if they are placed alike: in
            # the same shards, all of which begin at whole pages.
            placed_alike = column.offsets is None or self._shards.can_be_placed_alike(
                number, column.offsets
            )
            kind = (array.dtype, row_shape, placed_alike)
            alike.setdefault(kind, []).append(number)
        parts = tuple(tuple(p) for group in alike.values() for p in self._joined(group))
        count = len(self._shards.manifest.shards)
        key = self._shards.number_of(parts)
        if len(parts) == 1 and len(parts[0]) == count:
            return Grouping(parts, None, key)
        part_of_shard = np.full(count, ABSENT, np.int64)
        for number, shards in enumerate(parts):
            part_of_shard[list(shards)] = number
        return Grouping(parts, part_of_shard, key)

    @cached_property
    def array_key(self) -> int:
        """Equal for columns that are kept as the same arrays in every shard."""
        columns = [s.columns.get(self.name) for s in self._shards.manifest.shards]
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
            return rows.reshape(self._dense_shape(shard))
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

    def _joined(self, numbers: list[int]) -> Iterable[Sequence[int]]:
        """Join the arrays of shards; give the parts that come of it."""
        if len(numbers) > 1 and self._shards.can_be_joined:
            part = self._join(numbers)
            if part is not None:
                self._joined_parts[numbers[0]] = part
                return [numbers]
        return [[number] for number in numbers]

    def _join(self, numbers: list[int]) -> JoinedPart | None:
        shards = [self._shards.manifest.shards[number] for number in numbers]
        columns = [shard.columns[self.name] for shard in shards]
        pairs = list(zip(shards, columns, strict=True))
        arrays = [shard.arrays[column.values] for shard, column in pairs]
        values = _join_arrays(arrays, self._row_shape(columns[0], arrays[0]))
        indices = {
            number: shard.arrays[column.offsets]
            for number, (shard, column) in zip(numbers, pairs, strict=True)
            if column.offsets is not None
        }
        offsets = _join_arrays(list(indices.values()), ()) if indices else None
        if values is None or (indices and offsets is None):
            return None
        rows_per_sample = [
            self._rows_per_sample(column, array)
            for column, array in zip(columns, arrays, strict=True)
        ]
        return JoinedPart(
            self._shards,
            self.name,
            numbers,
            values=values,
            offsets=offsets,
            with_offsets=list(indices),
            rows_per_sample=rows_per_sample,
            unstackable=self._stacked and bool(indices),
        )

    def _is_stack_of_rows(self, column: Column, array: Array) -> bool:
        """Tell whether samples ``[k, *rest]`` of one shape are joined to rows."""
        return column.offsets is None and not self._stacked and len(array.shape) > 1

    def _row_shape(self, column: Column, array: Array) -> tuple[int, ...]:
        return array.shape[1 + self._is_stack_of_rows(column, array) :]

    def _rows_per_sample(self, column: Column, array: Array) -> int:
        """Rows of every sample; of no meaning where offsets say it."""
        return array.shape[1] if self._is_stack_of_rows(column, array) else 1

    def _dense_shape(self, shard: int) -> tuple[int, ...]:
        described = self._shards.manifest.shards[shard]
        return described.arrays[described.columns[self.name].values].shape[1:]

    def _open_shard(self, shard: int) -> ShardPart:
        described = self._shards.manifest.shards[shard]
        column = described.columns.get(self.name)
        if column is None:
            raise lacks_column(described.file, self.name)
        array = described.arrays[column.values]
        joined = self._is_stack_of_rows(column, array)
        offsets, shapes, rows = (
            self._shards.index_array(shard, name) if name else None
            for name in (column.offsets, column.shapes, column.rows)
        )
        values = self._shards.values(shard, column.values, joined=joined)
        if rows is not None and not _are_sample_numbers(rows, described.samples):
            raise self._shards.damaged(shard, self.name, "its rows are in no order")
        if self._shards.larger_than_memory and isinstance(values, np.ndarray):
            read_at_random(values)
        per_sample = self._rows_per_sample(column, array)
        few = offsets is not None and len(offsets) <= _CHECKED_AT_ONCE
        if offsets is not None and few and not _are_offsets(offsets, values.shape[0]):
            raise outside(self._shards, shard, self.name)
        return ShardPart(
            values,
            offsets,
            shapes,
            rows,
            per_sample,
            key=(shard, column.offsets or per_sample, column.rows),
            unstackable=self._stacked and column.offsets is not None,
            is_checked=offsets is None or few,
            has_single_rows=offsets is None and per_sample == 1,
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


def _row_bytes(array: Array, row_shape: tuple[int, ...]) -> int:
    return math.prod(row_shape) * np.dtype(array.dtype).itemsize


def _rows(array: Array, row_shape: tuple[int, ...]) -> Rows:
    return Rows(array.offset or 0, array.nbytes // _row_bytes(array, row_shape))


def _can_be_joined(array: Array, row_shape: tuple[int, ...]) -> bool:
    """Tell whether an array can be one of several that are mapped side by side."""
    if not array.nbytes or array.offset is None:
        return False
    row_bytes = _row_bytes(array, row_shape)
    return can_be_placed(_rows(array, row_shape), row_bytes, mmap.PAGESIZE)


def _join_arrays(
    arrays: Sequence[Array], row_shape: tuple[int, ...]
) -> JoinedArray | None:
    """Make room for arrays side by side; None where there is none."""
    rows = [_rows(array, row_shape) for array in arrays]
    placement = place(rows, _row_bytes(arrays[0], row_shape), mmap.PAGESIZE)
    if placement is None:
        return None
    try:
        return JoinedArray(arrays, placement, row_shape)
    except OSError:
        return None  # a limit on addresses (ulimit -v): shard by shard needs fewer


def _by_shard(numbers: Sequence[int], values: Sequence[int], count: int) -> Ints:
    """Spread values of some shards over all shards of a cache."""
    spread = np.zeros(count, np.int64)
    spread[list(numbers)] = values
    return spread


def _are_offsets(offsets: Ints, rows: int) -> bool:
    """Check that offsets go up and stay inside the values."""
    ordered = bool((offsets[1:] >= offsets[:-1]).all())
    return ordered and int(offsets[0]) >= 0 and int(offsets[-1]) <= rows


def _are_sample_numbers(rows: Ints, samples: int) -> bool:
    """Check that rows name samples of the shard, each once, in order."""
    ordered = bool((rows[1:] > rows[:-1]).all())
    return ordered and (not len(rows) or (rows[0] >= 0 and rows[-1] < samples))
