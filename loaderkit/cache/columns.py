"""Collect samples into columns: what a packing worker and a shard fill up.

A shard may be larger than memory.  Values wait in a file, a few megabytes of all
columns at a time, and are copied to the shard piece by piece; what stays in memory is
the index: the shape of each sample's value, 8 bytes an axis.
"""

from __future__ import annotations

import errno
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from loaderkit.cache.layout import Column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from io import FileIO
    from pathlib import Path

    from numpy.typing import NDArray
    from typing_extensions import Buffer

_PIECE_BYTES = 1 << 20
"""Values are copied to a shard so many bytes at a time.  Chosen: a call costs nothing
beside so many bytes, and they stay in the processor's cache."""
_LARGE_VALUE_BYTES = 16 << 10
"""Values that are larger, on average, are not joined in memory, which would copy them.
Chosen: a write of so many bytes costs little beside the call."""
_COMPARED_BYTES = 4 << 10
"""So many bytes of two arrays are compared before all.  Chosen: a page."""
_MOST_WAITING_BYTES = 1 << 20
"""Values wait for others up to so many bytes.  Chosen: hundreds of small samples."""


class FileSpan(NamedTuple):
    """Some consecutive values in a file."""

    start: int
    """The first byte."""
    stop: int
    dtype: str
    """What they are written as: integers in the fewest bytes that hold them all."""


class Bounds(NamedTuple):
    """The least and the greatest of some numbers."""

    low: int
    high: int


class ColumnLayout(NamedTuple):
    """What the values of a column are."""

    key: Any
    """Whatever the packer tells columns apart by; see ``Block.renamed``."""
    dtype: str
    ndim: int


@dataclass
class BlockColumn:
    """The values of one column for the samples of a block, end to end."""

    dtype: str
    ndim: int
    chunks: list[bytes | bytearray] = field(default_factory=list)
    """Values that are in memory: those behind all that were spilled."""
    spans: list[FileSpan] = field(default_factory=list)
    """Where the values lie in the block's file that were spilled."""
    shapes: array[int] = field(default_factory=lambda: array("q"))
    """Shape after shape, ``ndim`` numbers each."""
    count: int = 0
    """How many samples have the column."""
    rows: array[int] | None = None
    """Which samples have it, counted from the start of the block; None for the first
    ``count``."""
    spilled_bounds: Bounds | None = None
    """Of the spilled values, where they are integers."""

    def extend(self, rows: range, shapes: bytes, values: Sequence[bytes]) -> None:
        """Add the values of consecutive samples.

        Args:
            rows: The samples' numbers in the block.
            shapes: Shape after shape, ``ndim`` int64 each.
            values: Each sample's value, C-contiguous, of ``dtype``.
        """
        if sum(map(len, values)) >= _LARGE_VALUE_BYTES * len(values):
            self.chunks += filter(None, values)
        elif joined := b"".join(values):
            if not self.chunks or type(self.chunks[-1]) is bytes:
                self.chunks.append(bytearray())
            self.chunks[-1] += joined
        self.shapes.frombytes(shapes)
        if self.rows is None and rows.start != self.count:
            self.rows = array("q", range(self.count))
        if self.rows is not None:
            self.rows.extend(rows)
        self.count += len(rows)

    def spill(self, raw: FileIO) -> None:
        """Move the values that are in memory to the end of a file."""
        stored = np.dtype(self.dtype)
        bounds = self._bounds_in_memory()
        if bounds is not None:
            # What is written is read again soon: an edge_index in a quarter of its
            # bytes takes a quarter of the time.
            stored = narrowest_dtype(stored, bounds)
        start = stop = raw.tell()
        for chunk in self.chunks:
            values = np.frombuffer(chunk, self.dtype).astype(stored, copy=False)
            write_fully(raw, values.data)
            stop += values.nbytes
        self.spilled_bounds = _joint_bounds([self.spilled_bounds, bounds])
        self.spans.append(FileSpan(start, stop, stored.str))
        self.chunks = []

    def bounds(self) -> Bounds | None:
        """Say between what the values lie; None where there are no integers."""
        return _joint_bounds([self.spilled_bounds, self._bounds_in_memory()])

    def _bounds_in_memory(self) -> Bounds | None:
        if np.dtype(self.dtype).kind not in "iu":
            return None
        return _joint_bounds(
            Bounds(int(values.min()), int(values.max()))
            for chunk in self.chunks
            if len(values := np.frombuffer(chunk, self.dtype))
        )

    def pieces(self, file: Path | None) -> Iterator[NDArray[Any]]:
        """Go through the values, flat; integers may be narrower than the column's.

        Args:
            file: Where those that were spilled lie.

        Raises:
            OSError: The file cannot be read.
        """
        if self.spans and file is not None:
            with file.open("rb", buffering=0) as raw:
                for span in self.spans:
                    dtype = np.dtype(span.dtype)
                    step = dtype.itemsize * max(1, _PIECE_BYTES // dtype.itemsize)
                    raw.seek(span.start)
                    for start in range(span.start, span.stop, step):
                        values = np.empty(min(step, span.stop - start), np.uint8)
                        _read_fully(raw, values.data)
                        yield values.view(dtype)
        for chunk in self.chunks:
            if chunk:
                yield np.frombuffer(chunk, self.dtype)


@dataclass
class _AlikeSamples:
    """Samples in a row that have the same columns, before their values are sorted.

    A list of all values is cut into columns by a few calls for hundreds of samples.  A
    call for each value took a quarter of the time that packing a molecule took.
    """

    columns: tuple[ColumnLayout, ...] = ()
    count: int = 0
    nbytes: int = 0
    shapes: list[bytes] = field(default_factory=list)
    """Of each sample: the shapes of its values, in the order of the columns."""
    values: list[bytes] = field(default_factory=list)
    """Sample after sample: a value a column."""


@dataclass
class Block:
    """The columns of some consecutive samples."""

    samples: int = 0
    nbytes: int = 0
    """Bytes of the values, wherever they are."""
    _columns: dict[Any, BlockColumn] = field(default_factory=dict)
    file: Path | None = None
    """Where values wait that were spilled."""
    spilled_bytes: int = 0
    _waiting: _AlikeSamples = field(default_factory=_AlikeSamples)
    """The last samples of all, which are not in the columns yet."""

    @property
    def columns(self) -> Mapping[Any, BlockColumn]:
        """By key: whatever the packer tells columns apart by; see ``renamed``."""
        self._sort_waiting()
        return self._columns

    def append(self, values: Mapping[Any, NDArray[Any]]) -> None:
        """Add one sample: its values by column; columns it lacks are left out."""
        self.annotate(self.samples, values)
        self.samples += 1

    def append_alike(
        self, columns: tuple[ColumnLayout, ...], shapes: bytes, values: Sequence[bytes]
    ) -> None:
        """Add one sample that has the same columns as others.

        Args:
            columns: Its columns; the same object for all samples that have these.
            shapes: Shapes of its values end to end, as little-endian int64.
            values: A C-contiguous value for each column.
        """
        waiting = self._waiting
        if waiting.columns is not columns or waiting.nbytes >= _MOST_WAITING_BYTES:
            self._sort_waiting()
            waiting = self._waiting
            waiting.columns = columns
        nbytes = sum(map(len, values))
        waiting.shapes.append(shapes)
        waiting.values += values
        waiting.count += 1
        # A value in a list takes some 40 bytes more than it has.
        waiting.nbytes += nbytes + 40 * len(values)
        self.nbytes += nbytes
        self.samples += 1

    def annotate(self, row: int, values: Mapping[Any, NDArray[Any]]) -> None:
        """Add columns to a sample that is in the block already.

        Args:
            row: The sample's number in the block; rows come in order.
            values: Its values in those columns, C-contiguous.
        """
        self._sort_waiting()
        for key, value in values.items():
            column = self._column(ColumnLayout(key, value.dtype.str, value.ndim))
            shape = array("q", value.shape).tobytes()
            column.extend(range(row, row + 1), shape, [value.tobytes()])
            self.nbytes += value.nbytes

    def add_numbers(self, key: object, numbers: NDArray[np.int64]) -> None:
        """Add a column with one number for each sample.

        Args:
            key: The column, which the block has not.
            numbers: ``[samples]``.
        """
        content = np.ascontiguousarray(numbers, "<i8").tobytes()
        self._columns[key] = BlockColumn("<i8", 0, [content], count=len(numbers))
        self.nbytes += len(content)

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of the values that were not spilled."""
        return self.nbytes - self.spilled_bytes

    def spill(self, file: Path) -> None:
        """Move the values that are in memory to the end of a file.

        480 MiB of blocks take 0.11 s this way, and 1.1 s through a pipe to another
        process.

        Args:
            file: The file; the same one each time.

        Raises:
            OSError: It cannot be written.
        """
        with file.open("ab", buffering=0) as raw:
            for column in self.columns.values():
                if column.chunks:
                    column.spill(raw)
        self.file, self.spilled_bytes = file, self.nbytes

    def renamed(self, names: Mapping[Any, str]) -> Block:
        """Give the columns the names they have in the cache."""
        columns: dict[Any, BlockColumn] = {
            names[key]: column for key, column in self.columns.items()
        }
        return Block(self.samples, self.nbytes, columns, self.file, self.spilled_bytes)

    def _column(self, layout: ColumnLayout) -> BlockColumn:
        column = self._columns.get(layout.key)
        if column is None:
            column = BlockColumn(layout.dtype, layout.ndim)
            self._columns[layout.key] = column
        return column

    def _sort_waiting(self) -> None:
        """Put the samples that wait into their columns."""
        waiting, self._waiting = self._waiting, _AlikeSamples()
        if not waiting.count:
            return
        first_row = self.samples - waiting.count
        axes = sum(layout.ndim for layout in waiting.columns)
        shapes = np.frombuffer(b"".join(waiting.shapes), "<i8")
        shapes = shapes.reshape(waiting.count, axes)
        axes_before = 0
        for number, layout in enumerate(waiting.columns):
            axes_behind = axes_before + layout.ndim
            self._column(layout).extend(
                range(first_row, self.samples),
                shapes[:, axes_before:axes_behind].tobytes(),
                waiting.values[number :: len(waiting.columns)],
            )
            axes_before = axes_behind


def write_fully(raw: FileIO, content: Buffer) -> None:
    """Write bytes to a file: one call takes 2 GiB at most, or less as it likes."""
    left = memoryview(content).cast("B")
    while len(left):
        left = left[raw.write(left) :]


def _read_fully(raw: FileIO, into: memoryview) -> None:
    """Fill memory from a file: one call reads 2 GiB at most, or less as it likes."""
    filled = 0
    while filled < len(into):
        count = raw.readinto(into[filled:])
        if not count:
            raise OSError(errno.EIO, "What a packing worker spilled was cut short")
        filled += count


def _joint_bounds(bounds: Iterable[Bounds | None]) -> Bounds | None:
    """Give bounds within which all values lie; None where no part has any."""
    known_bounds = [part_bounds for part_bounds in bounds if part_bounds is not None]
    if not known_bounds:
        return None
    lows, highs = zip(*known_bounds, strict=True)
    return Bounds(min(lows), max(highs))


@dataclass(frozen=True, eq=False)
class ShardArray:
    """An array of a shard, whose values come piece by piece."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[NDArray[Any]]]
    """Gives the values from the first to the last, flat; as often as it is called."""
    bounds: Bounds | None = None
    """Between what the values lie, where they are integers, and there are any."""

    @classmethod
    def of(cls, values: NDArray[Any]) -> ShardArray:
        """See an array in memory so."""
        flat = np.ascontiguousarray(values).reshape(-1)
        return cls(values.dtype, values.shape, lambda: iter((flat,)))

    @property
    def size(self) -> int:
        """How many values there are."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.size * self.dtype.itemsize

    def digest(self) -> bytes:
        """Hash the values."""
        digest = xxhash.xxh3_128()
        for piece in self.pieces():
            digest.update(piece.data)
        return digest.digest()

    def slices(self, rows: int) -> Iterator[NDArray[Any]]:
        """Go through the values so many rows at a time.

        Args:
            rows: How many ``[rows, *shape[1:]]``; the last has fewer.
        """
        row_size = int(np.prod(self.shape[1:], dtype=np.int64))
        waiting: list[NDArray[Any]] = []
        waiting_size, wanted_size = 0, rows * row_size
        for piece in self.pieces():
            while waiting_size + len(piece) >= wanted_size:
                taken = wanted_size - waiting_size
                yield np.concatenate([*waiting, piece[:taken]]).reshape(
                    rows, *self.shape[1:]
                )
                piece = piece[taken:]
                waiting, waiting_size = [], 0
            if len(piece):
                waiting.append(piece)
                waiting_size += len(piece)
        if waiting:
            yield np.concatenate(waiting).reshape(-1, *self.shape[1:])


class ShardBuffer:
    """Blocks that will become one shard."""

    def __init__(self) -> None:
        self.samples = 0
        self.nbytes = 0
        self._blocks: list[tuple[int, Block]] = []

    def append(self, block: Block) -> None:
        """Add a block whose columns bear their final names."""
        self._blocks.append((self.samples, block))
        self.samples += block.samples
        self.nbytes += block.nbytes

    def columns(self) -> Iterator[tuple[str, dict[str, ShardArray]]]:
        """Go through the columns, each as the arrays that will hold it.

        Yields:
            The column's name, and its arrays: ``values``, and where they are needed
            ``offsets``, ``shapes``, ``rows`` (see layout.py).  A column ``@inc`` or
            ``@variant`` that holds zeros alone is left out: absent means zero.
        """
        names = {str(name) for _, block in self._blocks for name in block.columns}
        for name in sorted(names):
            arrays = self._arrays_of_column(name)
            is_on_all_samples = "rows" not in arrays
            if (
                is_on_all_samples
                and name.endswith(_ZERO_IF_ABSENT)
                and arrays["values"].bounds in {None, Bounds(0, 0)}
            ):
                continue
            yield name, arrays

    def _arrays_of_column(self, name: str) -> dict[str, ShardArray]:
        """Lay out a column of all blocks that have it."""
        block_parts = [
            _BlockPart(first_sample, block.columns[name], block.file)
            for first_sample, block in self._blocks
            if name in block.columns
        ]
        # Columns that loaderkit counts with keep their int64: a batch sums them up.
        arrays = _arrays_of_parts(block_parts, narrows="@" not in name)
        if sum(block_part.column.count for block_part in block_parts) < self.samples:
            rows = np.concatenate([block_part.rows() for block_part in block_parts])
            arrays["rows"] = ShardArray.of(rows)
        return arrays


_ZERO_IF_ABSENT = ("@inc", "@variant")
"""Ends of the names of columns that are zero where they are left out."""


class _BlockPart(NamedTuple):
    """What a block has of a column."""

    first_sample: int
    """The shard's sample with which the block begins."""
    column: BlockColumn
    file: Path | None

    def rows(self) -> NDArray[np.int64]:
        """Say which samples of the shard have it."""
        rows = self.column.rows
        if rows is None:
            return np.arange(self.column.count, dtype="<i8") + self.first_sample
        return np.frombuffer(rows, "<i8") + self.first_sample


def _arrays_of_parts(
    block_parts: list[_BlockPart], *, narrows: bool
) -> dict[str, ShardArray]:
    """Lay out a column by how its samples differ in shape (see layout.py).

    Args:
        block_parts: What each block has of it.
        narrows: Keep integers in the fewest bytes that hold them.

    Returns:
        ``values``, and where they are needed ``offsets`` and ``shapes``.
    """
    ndim = block_parts[0].column.ndim
    sample_count = sum(block_part.column.count for block_part in block_parts)
    shapes = np.empty((sample_count, ndim), "<i8")
    filled = 0
    for block_part in block_parts:
        shape_of_sample = np.frombuffer(block_part.column.shapes, "<i8")
        stop = filled + block_part.column.count
        shapes[filled:stop] = shape_of_sample.reshape(block_part.column.count, ndim)
        filled = stop

    first = shapes[0].tolist()
    if (shapes == first).all():
        shape = (sample_count, *first)
        return {"values": _values_of_parts(block_parts, shape, narrows=narrows)}

    # Rows without a number in them, such as [3, 0], would not say how many they are.
    rows_are_alike = (shapes[:, 1:] == first[1:]).all() and shapes[:, 1:].all()
    if rows_are_alike:
        offsets = _exclusive_cumsum(shapes[:, 0])
        values = _values_of_parts(
            block_parts, (int(offsets[-1]), *first[1:]), narrows=narrows
        )
        return {"values": values, "offsets": ShardArray.of(offsets)}

    offsets = _exclusive_cumsum(shapes.prod(axis=1))
    return {
        "values": _values_of_parts(block_parts, (int(offsets[-1]),), narrows=narrows),
        "offsets": ShardArray.of(offsets),
        "shapes": ShardArray.of(shapes),
    }


def _values_of_parts(
    block_parts: list[_BlockPart], shape: tuple[int, ...], *, narrows: bool
) -> ShardArray:
    """Join the values of a column."""
    bounds = _joint_bounds(block_part.column.bounds() for block_part in block_parts)
    dtype = np.dtype(block_parts[0].column.dtype)
    if narrows and bounds is not None:
        dtype = narrowest_dtype(dtype, bounds)

    def pieces() -> Iterator[NDArray[Any]]:
        for block_part in block_parts:
            for piece in block_part.column.pieces(block_part.file):
                yield piece.astype(dtype, copy=False)

    return ShardArray(dtype, shape, pieces, bounds)


def narrowest_dtype(dtype: np.dtype[Any], bounds: Bounds) -> np.dtype[Any]:
    """Choose the fewest bytes that hold all integers of a column.

    Readers widen them while they copy.  An ``edge_index`` of molecules takes an eighth
    of its bytes, which is an eighth of the cache lines that a shuffled batch waits for.

    >>> int64 = np.dtype("<i8")
    >>> narrowest_dtype(int64, Bounds(3, 255)), narrowest_dtype(int64, Bounds(-1, 300))
    (dtype('uint8'), dtype('int16'))
    """
    if dtype not in _NARROWABLE:
        return dtype
    kinds = "|u1 <u2 <u4" if bounds.low >= 0 else "|i1 <i2 <i4"
    for kind in kinds.split():
        limits = np.iinfo(kind)
        if limits.min <= bounds.low and bounds.high <= limits.max:
            return np.dtype(kind)
    return dtype


_NARROWABLE = (np.dtype("<i4"), np.dtype("<i8"))


def _exclusive_cumsum(
    lengths: NDArray[np.int64] | Sequence[int],
) -> NDArray[np.int64]:
    """Sum up lengths, from zero on.

    >>> _exclusive_cumsum([2, 0, 3])
    array([0, 2, 2, 5])
    """
    ends = np.zeros(len(lengths) + 1, "<i8")
    np.cumsum(lengths, out=ends[1:])
    return ends


class ArrayDeduplicator:
    """Arrays of one shard by name, where equal arrays are kept once.

    Fields of one graph share their offsets (``x``, ``pos`` and ``z`` all have a row
    per node), so a shared array is both smaller on disk and quicker in a batch: its
    rows are looked up once.
    """

    def __init__(self) -> None:
        self.columns: dict[str, Column] = {}
        self._arrays: dict[tuple[str, tuple[int, ...]], list[_NamedArray]] = {}
        """By dtype and shape."""

    def add(self, name: str, arrays: Mapping[str, ShardArray]) -> dict[str, ShardArray]:
        """Note a column and return those of its arrays that are new.

        Args:
            name: The column's name.
            arrays: Its arrays by what they are for, such as ``offsets``.

        Returns:
            The arrays to write, by their name in the shard.
        """
        name_of_role: dict[str, str] = {}
        new_arrays: dict[str, ShardArray] = {}
        for role, values in arrays.items():
            own_name = f"{name}/{role}"
            array_name = self._name_of_equal(_NamedArray(own_name, values))
            if array_name == own_name:
                new_arrays[array_name] = values
            name_of_role[role] = array_name

        low, high = _bounds_of_column(name, arrays["values"])
        self.columns[name] = Column(
            values=name_of_role["values"],
            offsets=name_of_role.get("offsets"),
            shapes=name_of_role.get("shapes"),
            rows=name_of_role.get("rows"),
            low=low,
            high=high,
        )
        return new_arrays

    def _name_of_equal(self, new: _NamedArray) -> str:
        """Name the first array that holds the same; note it where it is the first."""
        key = (new.values.dtype.str, new.values.shape)
        known = self._arrays.setdefault(key, [])
        # Values are read for their hash only where there is one they may be equal to,
        # and all of them where the first are equal.
        equal = [
            named
            for named in known
            if named.first_digest() == new.first_digest()
            and named.digest() == new.digest()
        ]
        if equal:
            return equal[0].name
        known.append(new)
        return new.name


class _NamedArray:
    """An array and its name in the shard."""

    def __init__(self, name: str, values: ShardArray) -> None:
        self.name, self.values = name, values
        self._first_digest: bytes | None = None
        self._digest: bytes | None = None

    def first_digest(self) -> bytes:
        """Hash the first values, once."""
        if self._first_digest is None:
            first_bytes = b""
            for piece in self.values.pieces():
                first_bytes += piece.data[:_COMPARED_BYTES].tobytes()
                # As many of each array, however its values are cut into pieces.
                if len(first_bytes) >= _COMPARED_BYTES:
                    break
            content = first_bytes[:_COMPARED_BYTES]
            self._first_digest = xxhash.xxh3_128_digest(content)
        return self._first_digest

    def digest(self) -> bytes:
        """Hash the values, once."""
        if self._digest is None:
            self._digest = self.values.digest()
        return self._digest


def _bounds_of_column(name: str, values: ShardArray) -> tuple[int | None, int | None]:
    """Note between what the numbers lie that a batch's size is computed from.

    A reader holds them against this before it makes room for a batch: one flipped bit
    in a number of nodes would ask for terabytes.
    """
    if not name.endswith(("@nodes", "@inc", "@variant")) or values.bounds is None:
        return None, None
    return values.bounds.low, values.bounds.high
