"""The fields of one batch, gathered from the columns of a store into new tensors."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from loaderkit.cache.gather import (
    RowRanges,
    expand_ranges,
    gather_from_array,
    touch_runs,
)
from loaderkit.datasets.decode import decode
from loaderkit.datasets.dtypes import carrier
from loaderkit.datasets.kinds import LEAF_KINDS, DictJoin
from loaderkit.datasets.plain import decode_text
from loaderkit.datasets.room import Room
from loaderkit.datasets.structure import Leaf
from loaderkit.nests import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from loaderkit.array_types import Ints
    from loaderkit.cache.column_parts import Part
    from loaderkit.cache.column_reader import ColumnReader
    from loaderkit.cache.store import Store
    from loaderkit.datasets.arena import Arena
    from loaderkit.datasets.kinds import Classes, ColumnSpec
    from loaderkit.datasets.structure import Node
    from loaderkit.memory.page_locked import PageLockedBatch

T = TypeVar("T")

_SHORT_TEXT_BYTES = 64
"""Up to this mean length texts are decoded together.  128 texts of 9 bytes take 18 us
together and 41 one by one, of 60 bytes 34 and 42, of 1,000 bytes 300 and 73: the index
of bytes takes eight times what the texts do."""


class UnlikeShapesError(Exception):
    """The samples of a batch cannot be joined; caught, and told better."""


class BatchColumn:
    """A column of tensors, arrays or numbers, as every batch of a recipe joins it.

    What of that follows from the cache alone is looked up once, not in each batch.

    Args:
        store: The cache.
        spec: The column.
    """

    __slots__ = ("axis", "dtype", "held_as", "reader")

    def __init__(self, store: Store, spec: ColumnSpec) -> None:
        self.reader = store.column(spec.name, stacked=spec.axis is None)
        self.axis = spec.axis
        """Along which samples are joined; None where they are stacked."""
        self.dtype = batch_dtype(spec)
        """What the values have in a batch."""
        self.held_as = carrier(self.dtype)
        """What they are copied as, where numpy does not know that dtype."""


class BatchGather:
    """One batch in the making.

    Every tensor it gives out is new and owned by the caller.

    Args:
        store: The cache.
        rows: Numbers of the batch's samples in it ``[B]``.
        page_locked: Where the tensors of the batch are made; None for ordinary memory,
            as always in workers.
    """

    def __init__(
        self, store: Store, rows: Ints, page_locked: PageLockedBatch | None = None
    ) -> None:
        self.store, self.rows = store, rows
        self.page_locked = page_locked
        self.selection = store.select(rows)
        self.arena: Arena | None = None
        """Where a worker makes tensors; None for memory of their own.  How large it has
        to be is known once some columns were looked up."""
        self.room = Room(len(rows))
        self._per_sample: dict[int, Ints] = {}
        self._cumsums: dict[int, Ints] = {}
        self._slices: dict[RowRanges, torch.Tensor] = {}
        self._arange: torch.Tensor | None = None
        self._zeros: torch.Tensor | None = None
        self._located: dict[object, tuple[Ints, Ints]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make room for a tensor, in the memory that the batch is made in."""
        return self._make_room(shape, carrier(dtype))

    def _make_room(self, shape: tuple[int, ...], held_as: torch.dtype) -> torch.Tensor:
        self.room.take(math.prod(shape) * held_as.itemsize)
        if self.arena is not None:
            return self.arena.empty(shape, held_as)
        if self.page_locked is not None:
            return self.page_locked.empty(shape, held_as)
        # Unpacked: torch parses a tuple beside a dtype in twice the time.
        return torch.empty(*shape, dtype=held_as)

    def to_tensor(self, array: NDArray[Any]) -> torch.Tensor:
        """Make a tensor of a small new array, which is a field of the batch."""
        tensor = torch.from_numpy(array)
        if self.arena is None and self.page_locked is None:
            return tensor
        copied = self.empty(array.shape, tensor.dtype)
        copied.numpy()[...] = array
        return copied

    def bookkeeping(self, array: NDArray[Any]) -> torch.Tensor:
        """Make a tensor of a small new array, which goes to no device.

        Such as PyG's slices and increments: workers send them, but PyG page-locks and
        moves the fields alone.
        """
        return torch.from_numpy(array) if self.arena is None else self.to_tensor(array)

    def take_in(self, nest: T) -> T:
        """Copy dense tensors that were computed to where the batch is page-locked."""
        page_locked = self.page_locked
        if page_locked is None:
            return nest
        return map_tensors(
            lambda t: page_locked.empty(tuple(t.shape), t.dtype).copy_(t), nest
        )

    def note_others(self) -> None:
        """Say that a part of the batch was made by PyG, by torch or by its class."""
        if self.page_locked is not None:
            self.page_locked.note_others()

    def tensor(
        self,
        column: BatchColumn,
        dtype: torch.dtype | None = None,
        add: Ints | None = None,
    ) -> tuple[torch.Tensor, RowRanges]:
        """Join a column's values along its axis, or stack them where it has none.

        Args:
            column: One that all samples of the batch have.
            dtype: What to widen to while copying; its own if None.
            add: What to add to each sample ``[B]`` or ``[B, k]``; needs ``dtype`` and
                integers.

        Returns:
            The joined tensor, contiguous, and where each sample's rows are in it.

        Raises:
            UnlikeShapesError: The samples differ in another axis than that one.
        """
        reader, axis = column.reader, column.axis
        row_shape = reader.row_shape
        if row_shape is None:
            array = None
            ranges, row_shape = self.layout(reader)
        else:
            array, ranges = self.selection.locate(reader)
        held_as = column.held_as
        if dtype is None:
            dtype = column.dtype
        else:
            held_as = carrier(dtype)
        if axis:
            shape = (*row_shape[:axis], ranges.total, *row_shape[axis:])
            tensor = self._make_room(shape, held_as)
            out = _axis_first(tensor.numpy(), axis)
        else:
            tensor = self._make_room((ranges.total, *row_shape), held_as)
            out = tensor.numpy()
        if array is None:
            reader.gather(ranges, out, add=add)
        else:
            gather_from_array(array, ranges, out, add)
        return (tensor if held_as is dtype else tensor.view(dtype)), ranges

    def padded(self, column: BatchColumn) -> tuple[torch.Tensor, RowRanges]:
        """Pad a column's values, copying each sample straight to where it goes.

        Args:
            column: One whose first axis varies.

        Returns:
            ``[B, L, *row_shape]`` with zeros behind a sample's end, and where the rows
            lie.

        Raises:
            UnlikeShapesError: The samples differ in another axis than the first.
        """
        ranges, row_shape = self.layout(column.reader)
        longest = int(ranges.lengths.max()) if len(self) else 0
        tensor = self._make_room((len(self), longest, *row_shape), column.held_as)
        column.reader.gather_padded(ranges, tensor.numpy())
        return _seen_as(tensor, column.dtype), ranges

    def mean_bytes(self, column: BatchColumn) -> int:
        """Say how many bytes a tensor of a sample has on average.

        Raises:
            UnlikeShapesError: The samples differ in another axis than the column's.
        """
        return self.total_bytes(column) // max(1, len(self))

    def total_bytes(self, column: BatchColumn) -> int:
        """Say how many bytes the tensors of all samples have.

        Raises:
            UnlikeShapesError: The samples differ in another axis than the column's.
        """
        return self.count_numbers(column) * column.dtype.itemsize

    def count_numbers(self, column: BatchColumn) -> int:
        """Count the numbers in the tensors of all samples.

        Raises:
            UnlikeShapesError: The samples differ in another axis than the column's.
        """
        ranges, row_shape = self.layout(column.reader)
        return math.prod(row_shape) * ranges.total

    def separate_tensors(self, column: BatchColumn) -> list[torch.Tensor]:
        """Copy each sample's tensor into memory of its own.

        Args:
            column: One that all samples have.

        Returns:
            Tensors ``[B]``, contiguous.

        Raises:
            UnlikeShapesError: The samples differ in another axis than the column's.
        """
        ranges, row_shape = self.layout(column.reader)
        axis, held_as = column.axis or 0, column.held_as
        before, behind = row_shape[:axis], row_shape[axis:]
        # Asked once for all, and no helper for each tensor: an epoch of W2 in PyG's
        # DataLoader calls an eighth fewer functions, and takes 2 % less.
        self.room.take(math.prod(row_shape) * ranges.total * held_as.itemsize)
        tensors = [
            torch.empty(*before, length, *behind, dtype=held_as)
            for length in ranges.lengths.tolist()
        ]
        rows = [tensor.numpy() for tensor in tensors]
        if axis:
            rows = [_axis_first(array, axis) for array in rows]
        column.reader.gather_separately(ranges, rows)
        if column.axis is None:
            tensors = [tensor[0] for tensor in tensors]
        if held_as is column.dtype:
            return tensors
        return [tensor.view(column.dtype) for tensor in tensors]

    def located_rows(self, part: Part) -> tuple[Ints, Ints]:
        """Say where the rows of the samples lie in the only part of a column.

        Args:
            part: A part that has all samples of the batch.

        Returns:
            First row and number of rows of each ``[B]``; do not write to them, since
            columns that share their offsets get the same.
        """
        located = self._located.get(part.layout_key)
        if located is None:
            selection = self.selection
            located = part.locate_rows(selection.samples, selection.shards)
            self._located[part.layout_key] = located
        return located

    def layout(self, column: ColumnReader) -> tuple[RowRanges, tuple[int, ...]]:
        """Say where each sample's rows are, and the shape of a row.

        Args:
            column: The column.

        Returns:
            The rows of the batch, and their shape, the same in all shards touched.

        Raises:
            UnlikeShapesError: The samples differ in another axis than the first.
        """
        try:
            return self.selection.row_ranges(column), self.row_shape(column)
        except UnlikeShapesError:
            # Rows without a number, such as [3, 0] and [5, 0], are kept as shapes.
            shapes = [
                column.read(*self.store.locate(int(row))).shape for row in self.rows
            ]
            row_shapes = {shape[1:] for shape in shapes}
            if len(row_shapes) > 1 or 0 not in shapes[0][1:]:
                raise
            lengths = np.array([shape[0] for shape in shapes], np.int64)
            return RowRanges((), lengths), shapes[0][1:]

    def row_shape(self, column: ColumnReader) -> tuple[int, ...]:
        """Give the shape of one row of a column, the same in all shards touched.

        Args:
            column: The column.

        Returns:
            Its shape behind the first axis.

        Raises:
            UnlikeShapesError: It is not the same: an axis behind the first varies.
        """
        if column.row_shape is not None:
            return column.row_shape
        row_shapes = set()
        for share in self.selection.by_part(column):
            column_part = share.part
            if column_part.shapes is not None or column_part.unstackable:
                raise UnlikeShapesError(column.name)
            row_shapes.add(column_part.values.shape[1:])
        if len(row_shapes) > 1:
            raise UnlikeShapesError(column.name)
        return row_shapes.pop()

    def slices(self, runs: RowRanges) -> torch.Tensor:
        """Give ``runs.ends`` as a tensor ``[B + 1]``, once for all fields it serves."""
        slices = self._slices.get(runs)
        if slices is None:
            slices = self._slices[runs] = self.bookkeeping(runs.ends)
        return slices

    def arange(self) -> torch.Tensor:
        """Give 0, 1 ... B ``[B + 1]``, the slices of values that are stacked."""
        if self._arange is None:
            self._arange = self.bookkeeping(np.arange(len(self) + 1))
        return self._arange

    def zeros(self) -> torch.Tensor:
        """Give B zeros, the increments of fields that have none."""
        if self._zeros is None:
            self._zeros = self.bookkeeping(np.zeros(len(self), np.int64))
        return self._zeros

    def per_sample(self, name: str, width: int = 0) -> Ints:
        """Look up one small number a sample; zero where the column was left out.

        Args:
            name: A column of ``[]`` or ``[width]`` int64 a sample.
            width: 0 for single numbers.

        Returns:
            ``[B]`` or ``[B, width]``, in the order of the batch; do not write to it.
        """
        column = self.store.column(name, stacked=True)
        # Columns that are equal are kept once, and looked up once.
        numbers = self._per_sample.get(column.array_key)
        if numbers is None:
            numbers = self._look_up(column, width)
            self._per_sample[column.array_key] = numbers
        return numbers

    def _look_up(self, column: ColumnReader, width: int) -> Ints:
        shares = self.selection.by_part(column, absent_allowed=True)
        if len(shares) == 1 and shares[0].positions is None:
            share = shares[0]
            numbers = column.numbers_of_samples(share.part, share.samples, share.shards)
            return numbers.astype(np.int64, copy=False)
        shape = (len(self), width) if width else (len(self),)
        per_sample = np.zeros(shape, np.int64)
        for share in shares:
            numbers = column.numbers_of_samples(share.part, share.samples, share.shards)
            per_sample[... if share.positions is None else share.positions] = numbers
        return per_sample

    def exclusive_cumsum(self, name: str, width: int = 0) -> Ints:
        """Sum up ``per_sample`` from sample to sample.

        Args:
            name: A column of numbers.
            width: As for ``per_sample``.

        Returns:
            The sum before each sample, and after the last ``[B + 1]`` or
            ``[B + 1, width]``; do not write to it.
        """
        numbers = self.per_sample(name, width)
        # By identity: the arrays live as long as this object, in ``_per_sample``.
        cumsum = self._cumsums.get(id(numbers))
        if cumsum is None:
            cumsum = np.zeros((len(numbers) + 1, *numbers.shape[1:]), np.int64)
            np.add.accumulate(numbers, out=cumsum[1:])
            self._cumsums[id(numbers)] = cumsum
        return cumsum

    def texts(self, spec: ColumnSpec) -> list[str]:
        """Decode a string of every sample."""
        values, starts, ranges = self._locate_bytes(spec)
        if 0 < ranges.total < _SHORT_TEXT_BYTES * len(self):
            # Bytes that are no UTF-8 are told below, text by text.
            with contextlib.suppress(UnicodeDecodeError):
                texts = _decode_together(values, starts, ranges)
                if len(texts) == len(self):
                    return texts
        return [
            decode_text(spec.name, raw)
            for raw in _bytes_of_samples(values, starts, ranges)
        ]

    def raw_bytes(self, spec: ColumnSpec) -> list[bytes]:
        """Copy the bytes of every sample, out of a column of bytes."""
        return list(map(bytes, _bytes_of_samples(*self._locate_bytes(spec))))

    def _locate_bytes(
        self, spec: ColumnSpec
    ) -> tuple[NDArray[np.uint8], Ints, RowRanges]:
        """Say where the bytes of every sample are.

        Returns:
            An array of bytes, where in it each sample begins ``[B]``, and how many
            bytes each has.  Do not write to them.
        """
        column = self.store.column(spec.name)
        values, ranges = self.selection.locate(column)
        self.room.take(2 * ranges.total)
        if values is not None:
            return values, ranges.parts[0].starts, ranges
        joined = np.empty(ranges.total, np.uint8)
        column.gather(ranges, joined)
        return joined, ranges.ends[:-1], ranges

    def values(self, node: Node, classes: Classes) -> list[Any]:
        """Put a part of every sample together, one by one."""
        if isinstance(node, Leaf):
            spec = node.column
            kind = LEAF_KINDS[spec.kind]
            if kind.in_dicts is DictJoin.TEXTS:
                return self.texts(spec)
            if kind.from_bytes is not None:
                return [kind.from_bytes(spec.name, raw) for raw in self.raw_bytes(spec)]
        return [
            decode(node, leaf_reader(self.store, int(row)), classes)
            for row in self.rows
        ]


def _decode_together(
    values: NDArray[np.uint8], starts: Ints, ranges: RowRanges
) -> list[str]:
    """Decode short texts in one call, with a NUL behind each, at which they are split.

    Returns:
        The texts; too many where one of them has a NUL in itself.

    Raises:
        UnicodeDecodeError: They are no UTF-8.
    """
    begins = ranges.ends + np.arange(len(ranges.ends))
    index = expand_ranges(starts, ranges.lengths + 1, begins[:-1])
    # What lies behind a text may be no memory: where a file ends with its page, the
    # next is perhaps not mapped yet.  So any byte of a text is read there.
    behind = begins[1:] - 1
    index[behind] = starts[ranges.lengths.argmax()]
    touch_runs(values, index.take(begins[:-1]))
    joined = values.take(index, mode="clip")
    joined[behind] = 0
    texts = joined.tobytes().decode().split("\0")
    texts.pop()  # what is behind the last NUL
    return texts


def _bytes_of_samples(
    values: NDArray[np.uint8], starts: Ints, ranges: RowRanges
) -> Iterator[memoryview]:
    """Give the bytes of every sample where they lie."""
    view = values.data
    spans = zip(starts.tolist(), (starts + ranges.lengths).tolist(), strict=True)
    return (view[begin:end] for begin, end in spans)


def leaf_reader(store: Store, row: int) -> Callable[[Leaf], NDArray[Any]]:
    """Make the function that reads one sample's leaves."""
    shard, sample = store.locate(row)

    def read(leaf: Leaf) -> NDArray[Any]:
        spec = leaf.column
        return store.column(spec.name, stacked=spec.axis is None).read(shard, sample)

    return read


@functools.lru_cache(maxsize=1024)
def batch_dtype(spec: ColumnSpec) -> torch.dtype:
    """Say which dtype a column of tensors, arrays or numbers has in a batch."""
    torch_dtype = LEAF_KINDS[spec.kind].torch_dtype
    assert torch_dtype is not None, spec
    return torch_dtype(spec.dtype)


def _axis_first(array: NDArray[Any], axis: int) -> NDArray[Any]:
    """See an array as ``np.moveaxis(array, axis, 0)`` does, which takes 10 us.

    >>> (
    ...     _axis_first(np.empty((2, 3, 5)), 2).shape,
    ...     _axis_first(np.empty((2, 3)), 0).shape,
    ... )
    ((5, 2, 3), (2, 3))
    """
    others = [other for other in range(array.ndim) if other != axis]
    transposed: NDArray[Any] = array.transpose(axis, *others)
    return transposed


def _seen_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See a tensor's bits as the dtype that numpy could not hold."""
    return tensor if tensor.dtype is dtype else tensor.view(dtype)
