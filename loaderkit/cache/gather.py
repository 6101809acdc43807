"""Copy many short runs of rows out of columns, in one go.  Pure: arrays in and out.

Two ways, chosen by the mean size of a run (measured on 2 cores, 128 runs of a mapped
column in page cache; in us, of the index what it takes to make it, and to use it):

    a run of                    an index     slices
    10 rows of 44 B              7 +   5         55
    100 rows of 12 B            15 +  39         61
    300 rows of 1 B             35 +  28         48
    300 rows of 12 B            35 + 119         79
    300 rows of 44 B            34 + 153        128
    1,000 rows of 4 B          116 +  99         77
    3,000 rows of 8 B          340 + 345        199
    30 rows of 512 B            11 + 135        146
    1 row of 50 KiB              0 + 330        280

so small runs are taken through an expanded index, which all fields with the same rows
share, and large ones are sliced, and the slices joined where they go.

Of a cache that is larger than the processor's, the beginning of each run has to come
from memory, and numpy's loop reaches one beginning after the other.  So the first rows
of all runs are taken before, in a call of their own: its loads do not wait for each
other, and the processor fetches the rest of a run by itself.  128 runs of 12 rows of
1 B take 5 us instead of 11, of 18 rows of 44 B 29 instead of 40, of 250 rows of 16 B
85 instead of 99.  To touch more of a run, its half or every 64th byte, took longer.

Side by side, for padded batches, runs of any size are copied slice by slice: an index
would be needed on both sides.  32 runs of 32 B take 40 us by slices and 24 us by an
index, 32 of 512 B take 20 us either way, 32 of 8 KiB 47 us by slices and 410 us by an
index (measured on 2 busy cores).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from loaderkit.array_types import Ints

    PartValues = Mapping[int, "Values"]
    """Rows of the parts of a column, by the number of the part."""

SLICE_BYTES = 16 << 10
"""From this mean run size on, slices beat an index."""
_SLICE_ROWS = 300
"""And from this mean number of rows on, where they are copied as they are."""
_TOUCHED_ROWS = 12
"""From this mean number of rows on, the first rows of all runs are touched before.  Of
8 rows it is as fast either way, and of 4 a tenth slower."""
FEWEST_SAMPLES = 4
"""Fewer samples of one part are copied slice by slice, whatever their size."""
_CACHED_BYTES = 1 << 20
"""A padded batch up to this size is filled with zeros first: it saves a call a sample,
a third of the time of small ones.  A larger one leaves the processor's cache meanwhile,
and writing it twice costs up to a third more than zeros behind each sample."""


class Values(Protocol):
    """Rows ``[n, *rest]`` that can be sliced: an array, or decompressed on the way."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``(n, *rest)``."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """What the numbers are kept in."""

    def __getitem__(self, span: slice, /) -> NDArray[Any]:
        """Give the rows of a span, without a promise about who owns them."""


class PartRanges:
    """The rows of a batch that lie in one part of a column, a range for each sample.

    A plain class whose index is made when first asked for: in Python 3.11 a
    ``cached_property`` takes a lock, 15 of which cost 20 us a batch.
    """

    __slots__ = (
        "_row_index",
        "has_single_rows",
        "lengths",
        "number",
        "positions",
        "shards",
        "starts",
        "unique_shards",
    )

    def __init__(
        self,
        number: int,
        starts: Ints,
        lengths: Ints,
        positions: Ints | None,
        *,
        shards: Ints,
        unique_shards: Sequence[int],
        has_single_rows: bool,
    ) -> None:
        self.number = number
        """Number of the part."""
        self.starts, self.lengths = starts, lengths
        """First row, and number of rows, of each range ``[k]``."""
        self.positions = positions
        """Where its samples stand in the batch ``[k]``; None when they are all of it,
        in order."""
        self.shards = shards
        """In which shard each sample is ``[k]``."""
        self.unique_shards = unique_shards
        """Those shards, each once."""
        self.has_single_rows = has_single_rows
        """True when every range has one row."""
        # Then the starts are the index.
        self._row_index: Ints | None = starts if has_single_rows else None

    def lies_within(self, first_rows: Ints | int, row_counts: Ints | int) -> bool:
        """Tell whether every range lies in so many rows from a first one on."""
        if not len(self.starts):
            return True
        if int(self.lengths.min()) < 0:
            return False
        begins = self.starts - first_rows
        fits = begins + self.lengths <= row_counts
        return int(begins.min()) >= 0 and bool(fits.all())

    def moved(self, starts: Ints) -> PartRanges:
        """Give the same ranges where they begin at other rows ``[k]``."""
        return PartRanges(
            self.number,
            starts,
            self.lengths,
            self.positions,
            shards=self.shards,
            unique_shards=self.unique_shards,
            has_single_rows=self.has_single_rows,
        )

    def row_index(self, begins: Ints | None = None) -> Ints:
        """Give every row of every range, one after the other.

        Args:
            begins: How many of them come before each range ``[k]``, where that is
                known.
        """
        if self._row_index is None:
            self._row_index = expand_ranges(self.starts, self.lengths, begins)
        return self._row_index


class RowRanges:
    """Where the rows of a batch lie, for all columns that share their offsets."""

    __slots__ = ("_output_rows", "ends", "lengths", "parts", "total")

    def __init__(self, parts: tuple[PartRanges, ...], lengths: Ints) -> None:
        self.parts = parts
        self.lengths = lengths
        """Rows of each sample ``[B]``, in the order of the batch."""
        self.ends = np.zeros(len(lengths) + 1, np.int64)
        """Where each sample begins and ends in the batch ``[B + 1]``."""
        np.add.accumulate(lengths, out=self.ends[1:])
        self.total = int(self.ends[-1])
        """Rows in the batch."""
        self._output_rows: list[Ints] | None = None

    def row_index(self) -> Ints:
        """Give the rows of a batch that lies in one part, sample after sample."""
        [part_ranges] = self.parts
        return part_ranges.row_index(self.ends[:-1])

    def moved(self, starts_of_parts: Mapping[int, Ints]) -> RowRanges:
        """Give the same rows where some parts hold them elsewhere.

        Args:
            starts_of_parts: First row of each range of such a part ``[k]``, by the
                number of the part.
        """
        parts = []
        for part_ranges in self.parts:
            starts = starts_of_parts.get(part_ranges.number)
            parts.append(part_ranges if starts is None else part_ranges.moved(starts))
        return RowRanges(tuple(parts), self.lengths)

    def output_rows(self, part: int) -> Ints:
        """Give the rows of the batch to which the rows of a part go.

        Args:
            part: Which of ``parts``; none of them is all of the batch.
        """
        if self._output_rows is None:
            self._output_rows = [
                expand_ranges(self.ends[ranges.positions], ranges.lengths)
                for ranges in self.parts
            ]
        output_rows: Ints = self._output_rows[part]
        return output_rows


def expand_ranges(starts: Ints, lengths: Ints, begins: Ints | None = None) -> Ints:
    """Give every number of every range, one range after the other.

    Args:
        starts: First number of each range ``[k]``.
        lengths: How many each has ``[k]``.
        begins: How many come before each range ``[k]``; summed up here if None.

    >>> expand_ranges(np.array([5, 0]), np.array([3, 2]))
    array([5, 6, 7, 0, 1])
    """
    if begins is None:
        begins = lengths.cumsum() - lengths
    # Counting up from 0 over all ranges, each begins at a number that is too large by
    # what came before it.
    index: Ints = (starts - begins).repeat(lengths)
    index += np.arange(len(index))
    return index


def gather(
    values_of_parts: PartValues,
    ranges: RowRanges,
    out: NDArray[Any],
    add: Ints | None = None,
) -> None:
    """Copy the rows of a batch into ``out``, adding each sample's increment.

    Args:
        values_of_parts: The parts of the column by their number, each ``[n, *rest]``.
        ranges: Where the rows lie.
        out: Where they go ``[ranges.total, *rest]``; any strides, and a wider integer
            type than the column's where an increment asks for it.
        add: What to add to all rows of a sample ``[B]`` or ``[B, *rest]``; None for
            nothing.
    """
    if not ranges.total or not out.size:
        return
    if _are_slices_faster(values_of_parts, ranges, out, add):
        _copy_slices(values_of_parts, ranges, out, add)
    else:
        _gather_by_index(values_of_parts, ranges, out, add)


def _copy_slices(
    values_of_parts: PartValues, ranges: RowRanges, out: NDArray[Any], add: Ints | None
) -> None:
    if add is not None:
        _gather_slices_and_add(values_of_parts, ranges, out, add)
    elif out.flags.c_contiguous:
        _gather_slices(values_of_parts, ranges, out)
    else:
        _gather_slices_in_memory_order(values_of_parts, ranges, out)


def gather_from_array(
    values: NDArray[Any],
    ranges: RowRanges,
    out: NDArray[Any],
    add: Ints | None = None,
) -> None:
    """Do what ``gather`` does where all rows lie in one array, in fewer calls.

    Args:
        values: The only part of the column that has rows of the batch ``[n, *rest]``.
        ranges: Where the rows lie in it; the samples are in the order of the batch.
        out: As for ``gather``.
        add: As for ``gather``.
    """
    if not out.size:
        return
    if len(ranges.lengths) < FEWEST_SAMPLES or _are_runs_long(ranges, out, add):
        _copy_slices({ranges.parts[0].number: values}, ranges, out, add)
    else:
        _take_rows(values, ranges, out, add)


def gather_padded(
    values_of_parts: PartValues, ranges: RowRanges, out: NDArray[Any]
) -> None:
    """Copy the rows of a batch side by side, with zeros behind each sample.

    Args:
        values_of_parts: The parts of the column by their number, each ``[n, *rest]``.
        ranges: Where the rows lie.
        out: Where they go ``[B, L, *rest]``, contiguous; no sample has more than
            ``L`` rows.
    """
    if not out.size:
        return
    rows, is_zeroed = _rows_to_pad(out)
    for values, samples in _slices_by_part(values_of_parts, ranges):
        _copy_side_by_side(values, samples, rows, out.shape[1], is_zeroed=is_zeroed)


def pad_runs(
    values: NDArray[Any], starts: Ints, lengths: Ints, out: NDArray[Any]
) -> None:
    """Copy runs of one array side by side, with zeros behind each.

    Args:
        values: The array ``[n, *rest]``, in which all runs lie.
        starts: First row of each run ``[B]``.
        lengths: Rows of each ``[B]``.
        out: Where they go ``[B, L, *rest]``, contiguous; no run has more than ``L``
            rows.
    """
    if not out.size:
        return
    rows, is_zeroed = _rows_to_pad(out)
    samples = zip(range(len(starts)), starts.tolist(), lengths.tolist(), strict=True)
    _copy_side_by_side(values, samples, rows, out.shape[1], is_zeroed=is_zeroed)


def _rows_to_pad(out: NDArray[Any]) -> tuple[NDArray[Any], bool]:
    """See a padded batch as rows ``[B * L, *rest]``; fill it with zeros if it is small.

    Returns:
        The rows, and whether they are zeros.
    """
    is_zeroed = out.nbytes <= _CACHED_BYTES
    if is_zeroed:
        out.fill(0)
    return out.reshape(-1, *out.shape[2:]), is_zeroed


def _copy_side_by_side(
    values: Values,
    samples: Iterable[tuple[int, int, int]],
    rows: NDArray[Any],
    row_stride: int,
    *,
    is_zeroed: bool,
) -> None:
    """Copy samples to their places in a padded batch.

    Args:
        values: Their rows.
        samples: Position, first row and rows of each.
        rows: The batch, seen as rows.
        row_stride: Rows that the batch has for each sample.
        is_zeroed: Nothing need be written behind the ends.
    """
    for position, start, length in samples:
        begin = position * row_stride
        end = begin + length
        rows[begin:end] = values[start : start + length]
        if not is_zeroed and length < row_stride:
            rows[end : begin + row_stride] = 0


def gather_separately(
    values_of_parts: PartValues, ranges: RowRanges, outs: Sequence[NDArray[Any]]
) -> None:
    """Copy the rows of each sample of a batch into an array of its own.

    Args:
        values_of_parts: The parts of the column by their number, each ``[n, *rest]``.
        ranges: Where the rows lie.
        outs: Where those of each sample go ``[B]`` of ``[n, *rest]``; any strides, all
            in the same order, and a wider integer type than the column's if need be.
    """
    if not outs:
        return
    axes = _memory_order(outs[0])
    is_in_order = axes == list(range(len(axes)))
    for values, samples in _slices_by_part(values_of_parts, ranges):
        for position, start, length in samples:
            rows, out = values[start : start + length], outs[position]
            # As nearly always; two views less for each sample.
            if is_in_order:
                out[...] = rows
            else:
                out.transpose(axes)[...] = rows.transpose(axes)


def _are_slices_faster(
    values_of_parts: PartValues, ranges: RowRanges, out: NDArray[Any], add: Ints | None
) -> bool:
    """Choose between slices and an index, as measured above."""
    if not _are_arrays(values_of_parts, ranges):
        return True  # decompressed on the way, and cannot be indexed
    # An index costs some numpy calls a part, which few samples do not pay for.
    has_few_samples_a_part = len(ranges.lengths) < FEWEST_SAMPLES * len(ranges.parts)
    return has_few_samples_a_part or _are_runs_long(ranges, out, add)


def _are_runs_long(ranges: RowRanges, out: NDArray[Any], add: Ints | None) -> bool:
    """Tell whether the samples have so many rows or bytes that slices are faster."""
    samples = len(ranges.lengths)
    if ranges.total >= _SLICE_ROWS * samples and add is None:
        return out.flags.c_contiguous
    return out.nbytes >= SLICE_BYTES * samples


def _are_arrays(values_of_parts: PartValues, ranges: RowRanges) -> bool:
    for part_ranges in ranges.parts:
        values: object = values_of_parts[part_ranges.number]
        if not isinstance(values, np.ndarray):
            return False
    return True


def _gather_by_index(
    values_of_parts: PartValues, ranges: RowRanges, out: NDArray[Any], add: Ints | None
) -> None:
    if ranges.parts[0].positions is None:
        only_values: Any = values_of_parts[ranges.parts[0].number]
        _take_rows(only_values, ranges, out, add)
        return
    addends = _addends(add, ranges, out)
    for number, part_ranges in enumerate(ranges.parts):
        values: Any = values_of_parts[part_ranges.number]
        rows = values.take(part_ranges.row_index(), axis=0, mode="clip")
        output_rows = ranges.output_rows(number)
        if addends is None:
            out[output_rows] = rows
        else:
            # unsafe: bytes wrap around, as they do in torch
            out[output_rows] = np.add(
                rows, addends[output_rows], dtype=out.dtype, casting="unsafe"
            )


def _take_rows(
    values: NDArray[Any], ranges: RowRanges, out: NDArray[Any], add: Ints | None
) -> None:
    """Copy the rows of a whole batch out of one array through an index."""
    index = ranges.row_index()
    if ranges.total >= _TOUCHED_ROWS * len(ranges.lengths):
        # By the index: a sample without rows may begin where no file is mapped.
        touch_runs(values, index.take(ranges.ends[:-1], mode="clip"))
    # With mode="raise" numpy gathers into a buffer and copies it: twice the time.  That
    # the rows lie in the column was seen from its offsets.
    if add is None and values.dtype == out.dtype and out.flags.c_contiguous:
        values.take(index, axis=0, out=out, mode="clip")
    else:
        rows = values.take(index, axis=0, mode="clip")
        _store_rows(rows, _addends(add, ranges, out), out)


def touch_runs(values: NDArray[Any], starts: Ints) -> None:
    """Bring the first row of each run to the processor's cache, all at once.

    Args:
        values: The array ``[n, *rest]`` that the runs lie in.
        starts: A row of each ``[k]``, such as its first.
    """
    values.take(starts, axis=0, mode="clip")


def _addends(add: Ints | None, ranges: RowRanges, out: NDArray[Any]) -> Ints | None:
    """Repeat what is added to a sample for each of its rows ``[total, *rest]``.

    Returns:
        Axes that it lacks have length 1; None where nothing is added.
    """
    if add is None:
        return None
    addends: Ints = add.repeat(ranges.lengths, axis=0)
    return addends.reshape(addends.shape + (1,) * (out.ndim - add.ndim))


def _store_rows(rows: NDArray[Any], addends: Ints | None, out: NDArray[Any]) -> None:
    """Copy the rows of a whole batch to their place, adding what is to be added."""
    if addends is None:
        out[...] = rows
        return
    if not out.flags.c_contiguous:
        axes = _memory_order(out)
        rows, addends = rows.transpose(axes), addends.transpose(axes)
        out = out.transpose(axes)
    # unsafe: bytes wrap around, as they do in torch
    np.add(rows, addends, out, dtype=out.dtype, casting="unsafe")


def _gather_slices(
    values_of_parts: PartValues, ranges: RowRanges, out: NDArray[Any]
) -> None:
    if _are_arrays(values_of_parts, ranges):
        runs = _runs_in_order(values_of_parts, ranges)
        # One call for all of them takes a third less than one for each.  unsafe: as an
        # assignment casts.
        np.concatenate(runs, out=out, casting="unsafe")
        return
    begins = ranges.ends.tolist()
    for values, samples in _slices_by_part(values_of_parts, ranges):
        for position, start, length in samples:
            begin = begins[position]
            out[begin : begin + length] = values[start : start + length]


def _runs_in_order(
    values_of_parts: PartValues, ranges: RowRanges
) -> list[NDArray[Any]]:
    """See the rows of each sample of a batch ``[B]`` where they lie."""
    runs: list[Any] = [None] * len(ranges.lengths)
    for values, samples in _slices_by_part(values_of_parts, ranges):
        for position, start, length in samples:
            runs[position] = values[start : start + length]
    return runs


def _gather_slices_in_memory_order(
    values_of_parts: PartValues, ranges: RowRanges, out: NDArray[Any]
) -> None:
    axes, begins = _memory_order(out), ranges.ends.tolist()
    for values, samples in _slices_by_part(values_of_parts, ranges):
        for position, start, length in samples:
            begin = begins[position]
            target = out[begin : begin + length].transpose(axes)
            target[...] = values[start : start + length].transpose(axes)


def _gather_slices_and_add(
    values_of_parts: PartValues, ranges: RowRanges, out: NDArray[Any], add: Ints
) -> None:
    axes, begins = _memory_order(out), ranges.ends.tolist()
    # One sample's addend, shaped to meet its rows [n, *rest] in that order.
    shape = (len(add), 1, *add.shape[1:], *(1,) * (out.ndim - add.ndim))
    addends = add.reshape(shape).transpose(0, *(axis + 1 for axis in axes))

    for values, samples in _slices_by_part(values_of_parts, ranges):
        for position, start, length in samples:
            begin = begins[position]
            target = out[begin : begin + length].transpose(axes)
            rows = values[start : start + length].transpose(axes)
            if rows.dtype != out.dtype:
                # Widened first: the sum may not fit what the column is kept in.
                target[...] = rows
                rows = target
            # unsafe: bytes wrap around, as they do in torch
            np.add(rows, addends[position], out=target, casting="unsafe")


def _slices_by_part(
    values_of_parts: PartValues, ranges: RowRanges
) -> Iterator[tuple[Values, Iterator[tuple[int, int, int]]]]:
    """Give for each part its values, and position, first row and rows of each sample.

    Plain tuples of Python numbers, and no generator that yields each sample: a named
    tuple costs 0.3 us more a sample, and a generator 0.15, where the copy of a small
    sample takes as long.
    """
    for part_ranges in ranges.parts:
        values = values_of_parts[part_ranges.number]
        starts, lengths = part_ranges.starts, part_ranges.lengths
        positions = part_ranges.positions
        if not isinstance(values, np.ndarray):
            # Samples of one compressed chunk follow each other: it is undone once.
            order = starts.argsort(kind="stable")
            starts, lengths = starts.take(order), lengths.take(order)
            positions = order if positions is None else positions.take(order)
        numbers: Sequence[int] = range(len(ranges.lengths))
        if positions is not None:
            numbers = positions.tolist()
        yield values, zip(numbers, starts.tolist(), lengths.tolist(), strict=True)


def _memory_order(array: NDArray[Any]) -> list[int]:
    """List the axes from the slowest to the fastest.

    Adding in this order takes 4 us instead of 18 for the edge_index [2, n] of 128
    molecules: numpy would follow the [n, 2] of the column.
    """
    return sorted(range(array.ndim), key=array.strides.__getitem__, reverse=True)
