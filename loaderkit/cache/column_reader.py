"""One column of a cache, read from all its shards.

The shards of a column fall into *parts* (column_parts.py).  Shards whose rows have one
dtype and shape are one part: mapped side by side and read as one array, so that a batch
takes as long from 500 files as from one.  What cannot be joined is a part for each
shard: compressed values, values of several shapes, columns that only some samples have,
and everything on systems that cannot map side by side.
"""

from __future__ import annotations

import math
import mmap
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from loaderkit.cache.address_space import PageReadAhead, read_at_random
from loaderkit.cache.chunks import ChunkedValues
from loaderkit.cache.column_parts import (
    ABSENT,
    ROWS_OF_SHARD,
    JoinableRows,
    JoinedPart,
    Part,
    ShardPart,
    are_few_enough_to_check,
    are_offsets,
    bytes_of_row,
    column_is_missing,
    damaged_offsets,
    join_arrays,
)
from loaderkit.cache.gather import (
    RowRanges,
    Values,
    gather,
    gather_padded,
    gather_separately,
)
from loaderkit.cache.placement import (
    MAX_COPIED_SHARDS,
    are_placed_alike,
    can_be_placed,
    place_shards,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from loaderkit.array_types import Ints
    from loaderkit.cache.shard_table import ColumnSchema, ShardGroup
    from loaderkit.cache.shards import Shards


@dataclass(frozen=True, eq=False)
class Grouping:
    """Which part of a column the rows of each shard are in."""

    first_shards: list[int]
    """Number of the first shard of each part."""
    part_of_shard: Ints | None
    """Number of the part of each shard, or ``ABSENT``; None where all are in one."""
    key: int
    """Equal for columns whose shards are grouped alike."""


class _RowLayout(NamedTuple):
    """What rows must have in common to be joined."""

    dtype: str
    row_shape: tuple[int, ...]
    begins_at_page: bool


class _RowsOfGroup(NamedTuple):
    """Rows of one layout in some shards of a group."""

    offsets: str | None
    """Name of their array of offsets."""
    of_shards: NDArray[Any]
    """``ROWS_OF_SHARD`` of each shard."""


class ColumnReader:
    """One column across all shards, opened shard by shard as rows are asked for."""

    def __init__(self, shards: Shards, name: str, *, stacked: bool) -> None:
        self._shards, self.name, self._stacked = shards, name, stacked
        self._shard_parts: dict[int, ShardPart] = {}
        self._joined_parts: dict[int, JoinedPart] = {}
        """By the first shard of each: a tuple of all 500 would be hashed each time."""
        self._read_ahead: defaultdict[int, PageReadAhead] = defaultdict(PageReadAhead)
        shards.add_reader(self)

    def close_shard(self, shard: int) -> None:
        """Unmap a shard; it is opened again when it is read again."""
        self._shard_parts.pop(shard, None)
        for joined in self._joined_parts.values():
            joined.close_shard(shard)

    def part(self, number: int, shards: Iterable[int]) -> Part:
        """Give a part of the column, opened as far as a batch needs it.

        Args:
            number: Which part of ``grouping``.
            shards: The shards of the part that the batch touches.

        Returns:
            Its arrays, mapped.

        Raises:
            CacheError: A file cannot be read, or is damaged.
        """
        first_shard = self.grouping.first_shards[number]
        joined = self._joined_parts.get(first_shard)
        if joined is not None:
            joined.open(shards)
            return joined
        part = self._shard_parts.get(first_shard)
        return self.shard_part(first_shard) if part is None else part

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
        ranges: RowRanges,
        out: NDArray[Any],
        *,
        add: Ints | None = None,
    ) -> None:
        """Copy the rows of a batch.

        Args:
            ranges: Where they lie, from ``SampleSelection.row_ranges`` for this column.
            out: Where they go ``[ranges.total, *rest]``.
            add: What to add to the rows of each sample ``[B]`` or ``[B, *rest]``.

        Raises:
            DamagedCacheError: The offsets on disk point outside the column.
        """
        values, ranges = self._values_of_parts(ranges)
        gather(values, ranges, out, add)

    def gather_padded(self, ranges: RowRanges, out: NDArray[Any]) -> None:
        """Copy the rows of a batch side by side, with zeros behind each sample.

        Args:
            ranges: Where they lie, from ``SampleSelection.row_ranges`` for this column.
            out: Where they go ``[B, L, *rest]``, contiguous.

        Raises:
            DamagedCacheError: The offsets on disk point outside the column.
        """
        values, ranges = self._values_of_parts(ranges)
        gather_padded(values, ranges, out)

    def gather_separately(
        self, ranges: RowRanges, outs: Sequence[NDArray[Any]]
    ) -> None:
        """Copy the rows of each sample of a batch into an array of its own.

        Args:
            ranges: Where they lie, from ``SampleSelection.row_ranges`` for this column.
            outs: Where those of each sample go ``[B]`` of ``[n, *rest]``.

        Raises:
            DamagedCacheError: The offsets on disk point outside the column.
        """
        values, ranges = self._values_of_parts(ranges)
        gather_separately(values, ranges, outs)

    def _values_of_parts(
        self, ranges: RowRanges
    ) -> tuple[dict[int, Values], RowRanges]:
        """Give the values of the parts of a batch, opened, checked and asked for.

        Returns:
            The values by the number of their part, and where the rows lie in them: a
            compressed part gives the chunks that the batch touches.
        """
        values: dict[int, Values] = {}
        moved: dict[int, Ints] = {}
        for part_ranges in ranges.parts:
            number = part_ranges.number
            part = self.part(number, part_ranges.unique_shards)
            values[number] = part.values
            starts, lengths = part_ranges.starts, part_ranges.lengths
            if not part.offsets_are_checked and not part.contains(part_ranges):
                # Any of its shards may be the one; ``verify`` says which.
                shard = part_ranges.unique_shards[0]
                raise damaged_offsets(self._shards, shard, self.name)
            if isinstance(part.values, ChunkedValues):
                decompressed = part.values.decompress(starts, lengths)
                if decompressed is not None:
                    values[number], moved[number] = decompressed
            # Files that fit memory are left to the kernel: it keeps their pages, and a
            # call for each range of pages would cost more than finding them there.
            elif self._shards.larger_than_memory and isinstance(
                part.values, np.ndarray
            ):
                self._read_ahead[number].ask(part.values, starts, lengths)
        return values, ranges.moved(moved) if moved else ranges

    @cached_property
    def row_shape(self) -> tuple[int, ...] | None:
        """Shape of a row behind its first axis; None where samples differ in that."""
        row_shapes: set[tuple[int, ...]] = set()
        for group, column in self._groups_with_column():
            has_many_shapes = column.shapes is not None
            if has_many_shapes or (self._stacked and column.offsets):
                return None
            row_shapes |= self._row_shapes_in_group(group, column)
        # None too where no shard has the column, as in a cache without samples.
        return row_shapes.pop() if len(row_shapes) == 1 else None

    @cached_property
    def reads_pages_as_they_come(self) -> bool:
        """Whether no page is asked for before it is read: the files fit memory."""
        return not self._shards.larger_than_memory

    @cached_property
    def grouping(self) -> Grouping:
        """Group the shards: those that can be read as one array are one part."""
        shard_count = len(self._shards.manifest.shards)
        part_of_shard = np.full(shard_count, ABSENT, np.int64)
        # Until parts are numbered, each is called after its first shard.
        for group, _ in self._groups_with_column():
            part_of_shard[group.positions] = group.positions
        if self._shards.can_be_joined:
            for joinable in self._find_joinable_rows():
                part = self._join_parts(joinable)
                if part is not None:
                    shards = joinable.of_shards["shard"]
                    first_shard = int(shards[0])
                    self._joined_parts[first_shard] = part
                    part_of_shard[shards] = first_shard

        is_present = part_of_shard != ABSENT
        # np.unique sorts: parts are numbered in the order of their first shards.
        first_shards, parts = np.unique(part_of_shard[is_present], return_inverse=True)
        part_of_shard[is_present] = parts
        # A small number in place of 8 bytes a shard: batches compare it, and hash it.
        key = self._shards.number_of(part_of_shard.tobytes())
        numbers: list[int] = first_shards.tolist()
        if len(numbers) == 1 and is_present.all():
            return Grouping(numbers, None, key)
        return Grouping(numbers, part_of_shard, key)

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
            # Damaged rows may lack the sample; whatever is found lies in the column.
            sample = min(int(np.searchsorted(part.rows, sample)), len(part.rows) - 1)
        if part.offsets is None:
            start = sample * part.rows_per_sample
            self._ask_for_pages(part, start, part.rows_per_sample)
            rows = np.array(part.values[start : start + part.rows_per_sample])
            return rows.reshape(part.dense_shape)

        start, stop = part.offsets[sample : sample + 2].tolist()
        length = stop - start
        # Seen here even where all offsets were checked on opening: a slice of numpy's
        # would not complain, and give fewer rows, or those of another sample.
        if start < 0 or length < 0 or stop > part.values.shape[0]:
            raise damaged_offsets(self._shards, shard, self.name)
        self._ask_for_pages(part, start, length)
        flat: NDArray[Any] = np.array(part.values[start:stop])
        if part.shapes is None:
            return flat

        shape = part.shapes[sample].tolist()
        if min(shape, default=0) < 0 or math.prod(shape) != length:
            why = f"a value has {length:,} numbers, and the shape {shape}"
            raise self._shards.damaged(shard, self.name, why)
        shaped: NDArray[Any] = flat.reshape(shape)
        return shaped

    def numbers_of_samples(
        self, part: Part, samples: Ints, shards: Ints
    ) -> NDArray[Any]:
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
        rows, _ = part.locate_rows(samples, shards)
        numbers: NDArray[Any] = values.take(rows, axis=0)
        wrong = part.first_out_of_bounds(numbers, shards)
        if wrong is not None:
            # ``wrong`` counts single numbers, of which a sample may have k.
            numbers_per_sample = numbers.size // len(numbers)
            sample = wrong // numbers_per_sample
            shard = int(shards[sample])
            column = self._shards.manifest.shards[shard].columns[self.name]
            why = (
                f"it holds the number {numbers.flat[wrong]:,}, "
                f"and was packed with {column.low:,} to {column.high:,}"
            )
            raise self._shards.damaged(shard, self.name, why)
        return numbers

    def _ask_for_pages(self, part: ShardPart, start: int, length: int) -> None:
        """Read the pages of one run together, where the files exceed memory."""
        if self._shards.larger_than_memory and isinstance(part.values, np.ndarray):
            # A new one each time, which has no run before this one to go on from: the
            # next single sample may be anywhere.
            PageReadAhead().ask(part.values, np.array([start]), np.array([length]))

    def _groups_with_column(self) -> Iterator[tuple[ShardGroup, ColumnSchema]]:
        """List the groups of shards that have the column."""
        for group in self._shards.manifest.shards.groups:
            column = group.schema.column.get(self.name)
            if column is not None:
                yield group, column

    def _find_joinable_rows(self) -> Iterator[JoinableRows]:
        """Find shards whose rows can be read as one array, at least two each time."""
        for layout, groups in self._group_alike_rows().items():
            row_bytes = bytes_of_row(layout.dtype, layout.row_shape)
            shard_count = sum(len(rows.of_shards) for rows in groups)
            # Rows without a byte have no address; a shard alone is mapped as it is.
            if not row_bytes or shard_count < 2:
                continue
            of_shards = np.concatenate([rows.of_shards for rows in groups])
            # Groups take turns in the cache; rows lie in the order of the shards, so
            # that one epoch in order goes through the addresses in order.
            of_shards = of_shards[of_shards["shard"].argsort()]
            starts, counts = of_shards["start"], of_shards["count"]
            fits = can_be_placed(starts, counts, row_bytes, mmap.PAGESIZE)
            fits |= of_shards["is_copied"]
            if np.count_nonzero(fits) > 1:
                offsets = tuple(rows.offsets for rows in groups)
                yield JoinableRows(
                    layout.dtype, layout.row_shape, offsets, of_shards[fits]
                )

    def _group_alike_rows(self) -> Mapping[_RowLayout, list[_RowsOfGroup]]:
        """Group the shards in which the column's rows could lie in one array.

        Columns that share offsets are looked up once if they are placed alike: in the
        same shards, all of which begin at whole pages.  Where fewer than half of the
        shards do, none counts as such: a part of its own for the few would be touched
        by every other batch, and gathering from two parts takes twice as long.
        """
        few_are_alike = 2 * self._count_placed_alike() < self._count_shards()
        most_copied = 0 if few_are_alike else MAX_COPIED_SHARDS
        alike: dict[_RowLayout, list[_RowsOfGroup]] = defaultdict(list)
        for group, column in self._groups_with_column():
            array = group.schema.array[column.values]
            every_sample_has_rows = column.rows is None and column.shapes is None
            # Compressed chunks are undone into memory of their own, wherever they lie.
            if not every_sample_has_rows or array.chunk_index is not None:
                continue
            of_shards = self._describe_rows(group, column)
            leading_axes = self._leading_axes(column.offsets, array.axes)
            begins_at_page, is_copied = place_shards(
                group, column, most_copied, is_of_one_length=leading_axes > 0
            )
            of_shards["is_copied"] = is_copied
            if few_are_alike:
                begins_at_page[:] = False
            for row_shape, in_group in group.by_row_shape(column.values, leading_axes):
                for at_page in (True, False):
                    chosen = in_group[begins_at_page[in_group] == at_page]
                    layout = _RowLayout(array.dtype, row_shape, at_page)
                    rows = _RowsOfGroup(column.offsets, of_shards[chosen])
                    alike[layout].append(rows)
        return alike

    def _count_placed_alike(self) -> int:
        """Count the shards where the columns that share offsets all begin at pages."""
        placed_alike = [
            are_placed_alike(group, column.offsets)
            for group, column in self._groups_with_column()
        ]
        return sum(int(np.count_nonzero(alike)) for alike in placed_alike)

    def _count_shards(self) -> int:
        """Count the shards that have the column."""
        return sum(len(group) for group, _ in self._groups_with_column())

    def _describe_rows(self, group: ShardGroup, column: ColumnSchema) -> NDArray[Any]:
        """Take what is said of the column in each shard of a group."""
        of_shards = np.zeros(len(group), ROWS_OF_SHARD)
        sizes = group.shape(column.values)
        leading_axes = self._leading_axes(column.offsets, len(sizes))
        of_shards["rows_per_sample"] = sizes[1] if leading_axes else 1
        of_shards["shard"] = group.positions
        of_shards["start"] = group.offset_or_chunk_rows(column.values)
        of_shards["count"] = sizes[0] * of_shards["rows_per_sample"]
        if column.offsets is not None:
            of_shards["has_offsets"] = True
            of_shards["offset_start"] = group.offset_or_chunk_rows(column.offsets)
            of_shards["offset_count"] = group.shape(column.offsets)[0]
        if column.bounded:
            of_shards["is_bounded"] = True
            of_shards["low"] = group.low(self.name)
            of_shards["high"] = group.high(self.name)
        return of_shards

    def _join_parts(self, joinable: JoinableRows) -> JoinedPart | None:
        """Read rows of several shards as one array; None where there is no room."""
        of_shards = joinable.of_shards
        starts, counts = of_shards["start"], of_shards["count"]
        is_copied = of_shards["is_copied"]
        values = join_arrays(
            joinable.dtype, joinable.row_shape, starts, counts, is_copied
        )
        if values is None:
            return None
        offsets = None
        if of_shards["has_offsets"].any():
            ragged = of_shards[of_shards["has_offsets"]]
            starts, counts = ragged["offset_start"], ragged["offset_count"]
            offsets = join_arrays("<i8", (), starts, counts)
            # The values stay as parts then, too: a batch that looks rows up shard by
            # shard gains nothing from values in one array.
            if offsets is None:
                return None
        return JoinedPart(
            self._shards,
            self.name,
            joinable,
            values=values,
            offsets=offsets,
            unstackable=self._stacked and offsets is not None,
        )

    def _leading_axes(self, offsets: str | None, axes: int) -> int:
        """Count the axes of a sample ``[k, *rest]`` that are joined to rows."""
        return 1 if offsets is None and not self._stacked and axes > 1 else 0

    def _row_shapes_in_group(
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
            raise column_is_missing(described.file, self.name)
        array = described.arrays[column.values]
        joined = self._leading_axes(column.offsets, len(array.shape)) > 0
        rows_per_sample = array.shape[1] if joined else 1

        offsets = self._index_array(shard, column.offsets)
        shapes = self._index_array(shard, column.shapes)
        rows = self._index_array(shard, column.rows)
        values = self._shards.values(shard, column.values, joined=joined)
        if rows is not None and not _are_sample_numbers(rows, described.samples):
            raise self._shards.damaged(shard, self.name, "its rows are in no order")
        if self._shards.larger_than_memory and isinstance(values, np.ndarray):
            read_at_random(values)

        # Without offsets rows follow from the sample's number, which was checked.
        offsets_are_checked = True
        if offsets is not None:
            offsets_are_checked = are_few_enough_to_check(offsets)
            if offsets_are_checked and not are_offsets(offsets, values.shape[0]):
                raise damaged_offsets(self._shards, shard, self.name)
        can_be_taken_from = (
            isinstance(values, np.ndarray)
            and offsets_are_checked
            and not self._shards.larger_than_memory
        )
        return ShardPart(
            values,
            offsets,
            shapes,
            rows,
            rows_per_sample,
            layout_key=(shard, column.offsets, rows_per_sample, column.rows),
            unstackable=self._stacked and column.offsets is not None,
            offsets_are_checked=offsets_are_checked,
            has_single_rows=offsets is None and rows_per_sample == 1,
            dense_shape=array.shape[1:],
            low=column.low,
            high=column.high,
            ready_values=cast("NDArray[Any]", values) if can_be_taken_from else None,
        )

    def _index_array(self, shard: int, name: str | None) -> Ints | None:
        return None if name is None else self._shards.index_array(shard, name)


def _are_sample_numbers(rows: Ints, sample_count: int) -> bool:
    """Tell whether rows name samples of the shard, each once, in order."""
    if not len(rows):
        return True
    is_ordered = bool((rows[1:] > rows[:-1]).all())
    return is_ordered and rows[0] >= 0 and bool(rows[-1] < sample_count)
