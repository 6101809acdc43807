"""The fields of one batch, gathered from the columns of a store into new tensors.

In a DataLoader worker all tensors of a batch lie in one shared segment: it then
travels to the training process as one file descriptor instead of one a tensor.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from loaderkit.cache.gather import Runs
from loaderkit.datasets.decode import decode, decode_bytes
from loaderkit.datasets.dtypes import carrier, torch_dtype
from loaderkit.datasets.plain import decode_text
from loaderkit.datasets.room import UNASKED_BYTES, Room, check_room
from loaderkit.datasets.structure import TEXT_KINDS, Leaf
from loaderkit.memory.shm_batch import sends_shared_batches

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from loaderkit.cache.column_reader import ColumnReader
    from loaderkit.cache.store import Store
    from loaderkit.datasets.classes import ClassRegistry
    from loaderkit.datasets.structure import Nest

    Ints = NDArray[np.int64]

_ALIGNMENT = 64


class UnlikeShapesError(Exception):
    """The samples of a batch cannot be joined; caught, and told better."""


class Gathering:
    """One batch in the making.

    Every tensor it gives out is new and owned by the caller.
    """

    def __init__(self, store: Store, rows: Ints, arena: Arena | None = None) -> None:
        self.store, self.rows = store, rows
        self.pick = store.pick(rows)
        self.arena, self.room = arena, Room(len(rows))
        self._numbers: dict[int, Ints] = {}
        self._sums: dict[int, Ints] = {}
        self._slices: dict[Runs, torch.Tensor] = {}
        self._plain: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make room for a tensor, in the shared segment where there is one."""
        held = carrier(dtype)
        self.room.take(math.prod(shape) * held.itemsize)
        if self.arena is not None:
            return self.arena.empty(shape, held)
        return torch.empty(shape, dtype=held)

    def keep(self, array: NDArray[Any]) -> torch.Tensor:
        """Make a tensor of a small new array."""
        if self.arena is None:
            return torch.from_numpy(array)
        kept = self.empty(array.shape, torch.from_numpy(array).dtype)
        kept.numpy()[...] = array
        return kept

    def tensor(
        self, leaf: Leaf, dtype: torch.dtype | None = None, add: Ints | None = None
    ) -> tuple[torch.Tensor, Runs]:
        """Join a leaf's values along its axis, or stack them where it has none.

        Args:
            leaf: A tensor, array or number that all samples of the batch have.
            dtype: What to widen to while copying; its own if None.
            add: What to add to each sample ``[B]`` or ``[B, k]``; needs ``dtype`` and
                integers.

        Returns:
            The joined tensor, contiguous, and where each sample's rows are in it.

        Raises:
            UnlikeShapesError: The samples differ in another axis than that one.
        """
        column = self.store.column(leaf.column, stacked=leaf.axis is None)
        (runs, rest), axis = self.layout(column), leaf.axis
        wanted = leaf_dtype(leaf) if dtype is None else dtype
        if axis:
            made = self.empty((*rest[:axis], runs.total, *rest[axis:]), wanted)
            column.gather(runs, np.moveaxis(made.numpy(), axis, 0), add=add)
        else:
            made = self.empty((runs.total, *rest), wanted)
            column.gather(runs, made.numpy(), add=add)
        return (made if made.dtype is wanted else made.view(wanted)), runs

    def padded(self, leaf: Leaf) -> tuple[torch.Tensor, Runs]:
        """Put a leaf's values side by side, copying each sample straight to its place.

        Args:
            leaf: A tensor whose first axis varies.

        Returns:
            ``[B, L, *rest]`` with zeros behind a sample's end, and where the rows lie.

        Raises:
            UnlikeShapesError: The samples differ in another axis than the first.
        """
        column = self.store.column(leaf.column)
        (runs, rest), dtype = self.layout(column), leaf_dtype(leaf)
        longest = int(runs.lengths.max()) if len(self) else 0
        made = self.empty((len(self), longest, *rest), dtype)
        column.gather_padded(runs, made.numpy())
        return (made if made.dtype is dtype else made.view(dtype)), runs

    def mean_bytes(self, leaf: Leaf) -> int:
        """Say how many bytes a tensor of a sample has on average.

        Raises:
            UnlikeShapesError: The samples differ in another axis than the leaf's.
        """
        runs, rest = self.layout(
            self.store.column(leaf.column, stacked=leaf.axis is None)
        )
        numel = math.prod(rest) * runs.total
        return numel * leaf_dtype(leaf).itemsize // max(1, len(self))

    def apart(self, leaf: Leaf) -> list[torch.Tensor]:
        """Copy each sample's tensor into memory of its own.

        Args:
            leaf: A tensor that all samples have.

        Returns:
            Tensors ``[B]``, contiguous.

        Raises:
            UnlikeShapesError: The samples differ in another axis than the leaf's.
        """
        column = self.store.column(leaf.column, stacked=leaf.axis is None)
        (runs, rest), dtype = self.layout(column), leaf_dtype(leaf)
        axis = leaf.axis or 0
        tensors = [
            self.empty((*rest[:axis], length, *rest[axis:]), dtype)
            for length in runs.lengths.tolist()
        ]
        # What np.moveaxis(array, axis, 0) does, its 10 us spent once for all samples.
        rows_first = (axis, *(each for each in range(len(rest) + 1) if each != axis))
        rows = [tensor.numpy().transpose(rows_first) for tensor in tensors]
        column.gather_apart(runs, rows)
        if leaf.axis is None:
            tensors = [tensor[0] for tensor in tensors]
        if dtype == carrier(dtype):
            return tensors
        return [tensor.view(dtype) for tensor in tensors]

    def layout(self, column: ColumnReader) -> tuple[Runs, tuple[int, ...]]:
        """Say where each sample's rows are, and the shape of a row.

        Args:
            column: The column.

        Returns:
            The rows of the batch, and their shape, the same in all shards touched.

        Raises:
            UnlikeShapesError: The samples differ in another axis than the first.
        """
        try:
            return self.pick.runs(column), self.rest(column)
        except UnlikeShapesError:
            # Rows without a number, such as [3, 0] and [5, 0], are kept as shapes.
            shapes = [
                column.read(*self.store.locate(int(row))).shape for row in self.rows
            ]
            rests = {shape[1:] for shape in shapes}
            if len(rests) > 1 or 0 not in shapes[0][1:]:
                raise
            lengths = np.array([shape[0] for shape in shapes], np.int64)
            return Runs((), lengths), shapes[0][1:]

    def rest(self, column: ColumnReader) -> tuple[int, ...]:
        """Give the shape of one row of a column, the same in all shards touched.

        Args:
            column: The column.

        Returns:
            Its shape behind the first axis.

        Raises:
            UnlikeShapesError: It is not the same, or more than one axis varies.
        """
        if column.rest is not None:
            return column.rest
        parts = [share.part for share in self.pick.shares(column)]
        rests = {part.values.shape[1:] for part in parts}
        apart = any(p.shapes is not None or p.unstackable for p in parts)
        if len(rests) > 1 or apart:
            raise UnlikeShapesError(column.name)
        return rests.pop()

    def slices(self, runs: Runs) -> torch.Tensor:
        """Give ``runs.ends`` as a tensor ``[B + 1]``, once for all fields it serves."""
        found = self._slices.get(runs)
        if found is None:
            found = self._slices[runs] = self.keep(runs.ends)
        return found

    def count_up(self) -> torch.Tensor:
        """Give 0, 1 ... B ``[B + 1]``, the slices of values that are stacked."""
        return self._once("up", lambda: np.arange(len(self) + 1))

    def zeros(self) -> torch.Tensor:
        """Give B zeros, the increments of fields that have none."""
        return self._once("zeros", lambda: np.zeros(len(self), np.int64))

    def numbers(self, name: str, width: int = 0) -> Ints:
        """Look up one small number a sample; zero where the column was left out.

        Args:
            name: A column of ``[]`` or ``[width]`` int64 a sample.
            width: 0 for single numbers.

        Returns:
            ``[B]`` or ``[B, width]``, in the order of the batch; do not write to it.
        """
        column = self.store.column(name, stacked=True)
        # Columns that are equal are kept once, and looked up once.
        found = self._numbers.get(column.array_key)
        if found is None:
            found = self._look_up(column, width)
            self._numbers[column.array_key] = found
        return found

    def _look_up(self, column: ColumnReader, width: int) -> Ints:
        shares = self.pick.shares(column, absent_allowed=True)
        if len(shares) == 1 and shares[0].places is None:
            share = shares[0]
            numbers = column.numbers(share.part, share.samples, share.shards)
            return numbers.astype(np.int64, copy=False)
        found = np.zeros((len(self), width) if width else len(self), np.int64)
        for share in shares:
            numbers = column.numbers(share.part, share.samples, share.shards)
            found[... if share.places is None else share.places] = numbers
        return found

    def sums(self, name: str, width: int = 0) -> Ints:
        """Sum up ``numbers`` from sample to sample.

        Args:
            name: A column of numbers.
            width: As for ``numbers``.

        Returns:
            The sum before each sample, and after the last ``[B + 1]`` or
            ``[B + 1, width]``; do not write to it.
        """
        each = self.numbers(name, width)
        found = self._sums.get(id(each))
        if found is None:
            found = np.zeros((len(each) + 1, *each.shape[1:]), np.int64)
            each.cumsum(axis=0, out=found[1:])
            self._sums[id(each)] = found
        return found

    def texts(self, leaf: Leaf) -> list[str]:
        """Decode a string of every sample."""
        raw, ends = self._joined_bytes(leaf)
        if raw.isascii():
            text = raw.decode("ascii")
            return [text[a:b] for a, b in itertools.pairwise(ends)]
        return [decode_text(leaf.column, raw[a:b]) for a, b in itertools.pairwise(ends)]

    def raw_bytes(self, leaf: Leaf) -> list[bytes]:
        """Copy the bytes of every sample, out of a column of bytes."""
        raw, ends = self._joined_bytes(leaf)
        return [raw[a:b] for a, b in itertools.pairwise(ends)]

    def _joined_bytes(self, leaf: Leaf) -> tuple[bytes, list[int]]:
        """Join the bytes of all samples, and say where each begins and ends."""
        column = self.store.column(leaf.column)
        runs = self.pick.runs(column)
        self.room.take(2 * runs.total)
        joined = np.empty(runs.total, np.uint8)
        column.gather(runs, joined)
        return joined.tobytes(), runs.ends.tolist()

    def values(self, node: Leaf | Nest, classes: ClassRegistry) -> list[Any]:
        """Put a part of every sample together, one by one."""
        if isinstance(node, Leaf) and node.kind == "str":
            return self.texts(node)
        if isinstance(node, Leaf) and node.kind in TEXT_KINDS:
            return [decode_bytes(node, raw) for raw in self.raw_bytes(node)]
        return [
            decode(node, reader(self.store, int(row)), classes) for row in self.rows
        ]

    def _once(self, name: str, make: Callable[[], NDArray[Any]]) -> torch.Tensor:
        if name not in self._plain:
            self._plain[name] = self.keep(make())
        return self._plain[name]


def reader(store: Store, row: int) -> Callable[[Leaf], NDArray[Any]]:
    """Make the function that reads one sample's leaves."""
    shard, sample = store.locate(row)

    def read(leaf: Leaf) -> NDArray[Any]:
        column = store.column(leaf.column, stacked=leaf.axis is None)
        return column.read(shard, sample)

    return read


@functools.lru_cache(maxsize=1024)
def leaf_dtype(leaf: Leaf) -> torch.dtype:
    """Say which dtype a leaf has in a batch."""
    if leaf.kind == "tensor":
        return torch_dtype(leaf.dtype)
    return torch.from_numpy(np.empty(0, np.dtype(leaf.dtype).newbyteorder("="))).dtype


class Arena:
    """One shared segment from which the tensors of a batch are cut."""

    def __init__(self, nbytes: int) -> None:
        if nbytes > UNASKED_BYTES:
            check_room(nbytes, "A batch")
        storage = torch.UntypedStorage._new_shared(max(nbytes, 1))  # type: ignore[no-untyped-call]
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Cut out room for a tensor; an ordinary one when the segment is used up."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        start, stop = self._used, self._used + nbytes
        if stop > len(self._bytes):
            return torch.empty(shape, dtype=dtype)
        self._used = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return self._bytes[start:stop].view(dtype).view(shape)


def in_worker() -> bool:
    """Tell whether this is a DataLoader's worker whose batches torch itself sends."""
    return get_worker_info() is not None and not sends_shared_batches.get()
