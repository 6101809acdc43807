"""What a manifest says of all shards of a cache, as columns of numbers.  Pure.

A cache may have 10,000 shards of some 20 arrays each.  As objects, which is how
manifests of version 2 have them, they take seconds to read and 100 MB in each process
that opens the cache.  But shards of one dataset differ in nothing but numbers, so they
are kept as *groups* of shards of one *schema*: what has no number is said once, and
each number (samples, checksum, size of an axis, place in the file ...) is a vector
``[k]`` over the shards of the group.  A ``Shard`` is made when one is asked for.

In JSON, each vector is its least value and the differences to it, little endian in 0,
1, 2, 4 or 8 bytes each, base64.  This was measured against plain base64 of 64 bits and
against zlib of differences (docs/cache.md).
"""

from __future__ import annotations

import base64
import binascii
from array import array as growing_array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from loaderkit.cache.layout import (
    ALIGNMENT,
    MOST_AXES,
    MOST_CHUNK_BYTES,
    MOST_COUNT,
    MOST_SHARDS,
    MOST_SHARED_CHUNK_BYTES,
    Array,
    Column,
    Shard,
    ShardFile,
    check_shard,
    shard_name,
)
from loaderkit.cache.parsed import (
    boolean,
    integer,
    integers,
    list_of_values,
    optional_text,
    record,
    text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from loaderkit.array_types import Bools, Ints


_POSITION, _NUMBER, _SAMPLES, _BYTES, _XXH3_HIGH, _XXH3_LOW = range(6)
"""The first numbers of every shard: where it stands in the cache, the number in its
name, its samples, its bytes, and the two halves of its checksum."""
_FIRST_NUMBER_OF_ARRAYS = 6
"""Behind these, numbers of each array follow."""
_WIDTHS = (0, 1, 2, 4, 8)
"""Bytes that a stored number may take."""
_FEW_NAMES = 50
"""So many names are made sooner one by one than by numpy."""
_MAX_RECENT_SHARDS = 1024
"""So many ``Shard`` objects are kept: some 10 MB.  Chosen; making one takes 0.1 ms."""


@dataclass(frozen=True)
class ArraySchema:
    """What shards have in common of one array."""

    dtype: str
    axes: int
    chunk_index: str | None
    """As in ``Array``; None when the values are mapped."""


@dataclass(frozen=True)
class ColumnSchema:
    """What shards have in common of one column; names of arrays, as in ``Column``."""

    values: str
    offsets: str | None
    shapes: str | None
    rows: str | None
    bounded: bool
    """True when its least and greatest value are known."""

    @classmethod
    def of(cls, column: Column) -> ColumnSchema:
        """Take the schema of a column that was checked."""
        bounded = column.low is not None
        names = (column.values, column.offsets, column.shapes, column.rows)
        return cls(*names, bounded=bounded)


@dataclass(frozen=True)
class Schema:
    """All that is said of a shard but numbers."""

    arrays: tuple[tuple[str, ArraySchema], ...]
    columns: tuple[tuple[str, ColumnSchema], ...]

    @cached_property
    def array(self) -> Mapping[str, ArraySchema]:
        """The arrays by name."""
        return dict(self.arrays)

    @cached_property
    def column(self) -> Mapping[str, ColumnSchema]:
        """The columns by name."""
        return dict(self.columns)

    @cached_property
    def first_number_of_array(self) -> Mapping[str, int]:
        """Where the numbers of an array begin: its axes, then its place.

        The place is the offset of an array that is mapped, and ``chunk_rows`` of one
        that is in chunks.
        """
        first_numbers, number = {}, _FIRST_NUMBER_OF_ARRAYS
        for name, array in self.arrays:
            first_numbers[name] = number
            number += array.axes + 1
        return first_numbers

    @cached_property
    def first_number_of_column(self) -> Mapping[str, int]:
        """Where the bounds of a column begin, ``low`` and then ``high``."""
        first_numbers, number = {}, self._first_number_of_columns
        for name, column in self.columns:
            if column.bounded:
                first_numbers[name] = number
                number += 2
        return first_numbers

    @cached_property
    def numbers_per_shard(self) -> int:
        """How many numbers a shard has."""
        bounded_columns = [column for _, column in self.columns if column.bounded]
        return self._first_number_of_columns + 2 * len(bounded_columns)

    @cached_property
    def _first_number_of_columns(self) -> int:
        return _FIRST_NUMBER_OF_ARRAYS + sum(array.axes + 1 for _, array in self.arrays)

    @classmethod
    def of(cls, shard: Shard) -> Schema:
        """Take the schema of a shard that was checked."""
        arrays = tuple(
            (name, ArraySchema(array.dtype, len(array.shape), array.chunk_index))
            for name, array in shard.arrays.items()
        )
        columns = tuple(
            (name, ColumnSchema.of(column)) for name, column in shard.columns.items()
        )
        return cls(arrays, columns)

    def to_json(self) -> dict[str, Any]:
        """Write it as JSON."""
        return {
            "arrays": {name: vars(array) for name, array in self.arrays},
            "columns": {name: vars(column) for name, column in self.columns},
        }

    @classmethod
    def from_json(cls, content: object) -> Schema:
        """Read it; that it makes sense is seen when its first shard is checked."""
        fields = record(content)
        arrays = record(fields["arrays"]).items()
        columns = record(fields["columns"]).items()
        return cls(
            tuple((name, _array_schema_from_json(array)) for name, array in arrays),
            tuple((name, _column_schema_from_json(column)) for name, column in columns),
        )


class ShardGroup:
    """The shards of one schema.

    Args:
        schema: What they have in common.
        numbers: Their numbers: ``schema.numbers_per_shard`` vectors ``[k]``.
    """

    def __init__(self, schema: Schema, numbers: Sequence[Ints]) -> None:
        self.schema, self.numbers = schema, tuple(numbers)

    def __len__(self) -> int:
        return len(self.numbers[_POSITION])

    @property
    def positions(self) -> Ints:
        """Where the shards stand in the cache ``[k]``."""
        return self.numbers[_POSITION]

    @property
    def samples(self) -> Ints:
        """Samples of each shard ``[k]``."""
        return self.numbers[_SAMPLES]

    @property
    def bytes(self) -> Ints:
        """Size of each file ``[k]``."""
        return self.numbers[_BYTES]

    @cached_property
    def files(self) -> list[str]:
        """Name of each file."""
        numbers = self.numbers[_NUMBER]
        digits = self.numbers[_XXH3_HIGH].astype(">i8").tobytes().hex("-", 8)
        few = len(self) < _FEW_NAMES
        if few or numbers.min() < 0 or numbers.max() >= 10**5:
            pairs = zip(numbers.tolist(), digits.split("-"), strict=True)
            return [shard_name(number, xxh3) for number, xxh3 in pairs]
        # The same by numpy, since 8,000 calls would take a quarter of opening a cache.
        # A row of letters each: "00042-0123456789abcdef.h5" and the end of a line.
        letters = np.empty((len(self), 26), np.uint8)
        powers_of_ten = 10 ** np.arange(4, -1, -1)
        letters[:, :5] = ord("0") + numbers[:, None] // powers_of_ten % 10
        letters[:, 5:] = np.frombuffer(b"-0123456789abcdef.h5\n", np.uint8)
        hexadecimal = np.frombuffer(digits.encode() + b"-", np.uint8).reshape(-1, 17)
        letters[:, 6:22] = hexadecimal[:, :16]
        return letters.tobytes().decode("ascii").splitlines()

    def shape(self, array: str) -> Sequence[Ints]:
        """Give the sizes of an array: a vector ``[k]`` for each axis."""
        start = self.schema.first_number_of_array[array]
        return self.numbers[start : start + self.schema.array[array].axes]

    def offset_or_chunk_rows(self, array: str) -> Ints:
        """Give an array's offset if it is mapped, else its ``chunk_rows`` ``[k]``."""
        start = self.schema.first_number_of_array[array]
        return self.numbers[start + self.schema.array[array].axes]

    def row_size(self, array: str) -> Ints:
        """Count the numbers of a row of an array, up to ``MOST_COUNT`` ``[k]``."""
        return _saturating_product(self.shape(array)[1:], len(self))

    def by_row_shape(
        self, array: str, leading_axes: int
    ) -> Iterator[tuple[tuple[int, ...], Ints]]:
        """Sort the shards by the shape of an array's rows.

        Args:
            array: Its name.
            leading_axes: So many axes of a row may differ.

        Yields:
            A shape, and the shards of the group that have it.
        """
        sizes = self.shape(array)[1 + leading_axes :]
        varying = [size for size in sizes if (size != size[0]).any()]
        if not varying:
            yield tuple(int(size[0]) for size in sizes), np.arange(len(self))
            return
        order = np.lexsort(varying)
        differs_from_next = np.zeros(len(self) - 1, bool)
        for size in varying:
            differs_from_next |= np.diff(size[order]) != 0
        for rows in np.split(order, differs_from_next.nonzero()[0] + 1):
            yield tuple(int(size[rows[0]]) for size in sizes), rows

    def nbytes(self, array: str) -> Ints:
        """Count the bytes of an array, uncompressed, up to ``MOST_COUNT`` ``[k]``."""
        itemsize = np.dtype(self.schema.array[array].dtype).itemsize
        return _saturating_product(
            [*self.shape(array), np.array([itemsize])], len(self)
        )

    def chunk_bytes(self, array: str) -> Ints:
        """Count the bytes of a chunk of an array, up to ``MOST_COUNT`` ``[k]``."""
        if self.schema.array[array].chunk_index is None:
            return np.zeros(len(self), np.int64)
        itemsize = np.dtype(self.schema.array[array].dtype).itemsize
        sizes = [
            self.offset_or_chunk_rows(array),
            *self.shape(array)[1:],
            np.array([itemsize]),
        ]
        return _saturating_product(sizes, len(self))

    def samples_with(self, column: str) -> Ints:
        """Count the samples that have a column ``[k]``."""
        rows = self.schema.column[column].rows
        return self.samples if rows is None else self.shape(rows)[0]

    def low(self, column: str) -> Ints:
        """Give the least value of a column that is bounded ``[k]``."""
        return self.numbers[self.schema.first_number_of_column[column]]

    def high(self, column: str) -> Ints:
        """Give the greatest value of a column that is bounded ``[k]``."""
        return self.numbers[self.schema.first_number_of_column[column] + 1]

    def file(self, row: int) -> ShardFile:
        """Describe the file of a shard of the group, seen from outside."""
        halves = [self.numbers[half][row] for half in (_XXH3_HIGH, _XXH3_LOW)]
        xxh3 = np.array(halves, ">i8").tobytes().hex()
        return ShardFile(
            shard_name(int(self.numbers[_NUMBER][row]), xxh3),
            int(self.samples[row]),
            int(self.bytes[row]),
            xxh3,
        )

    def shard(self, row: int) -> Shard:
        """Describe a shard of the group in full."""
        schema = self.schema
        numbers = [int(vector[row]) for vector in self.numbers]
        arrays, columns = {}, {}
        for name, array in schema.arrays:
            start = schema.first_number_of_array[name]
            *shape, offset_or_chunk_rows = numbers[start : start + array.axes + 1]
            is_mapped = array.chunk_index is None
            arrays[name] = Array(
                array.dtype,
                tuple(shape),
                offset=offset_or_chunk_rows if is_mapped else None,
                chunk_rows=None if is_mapped else offset_or_chunk_rows,
                chunk_index=array.chunk_index,
            )
        for name, column in schema.columns:
            low = high = None
            if column.bounded:
                start = schema.first_number_of_column[name]
                low, high = numbers[start], numbers[start + 1]
            columns[name] = Column(
                column.values,
                column.offsets,
                column.shapes,
                column.rows,
                low=low,
                high=high,
            )
        return Shard(**vars(self.file(row)), arrays=arrays, columns=columns)

    def check(self) -> None:
        """See that the arrays of every shard lie in its file and fit each other.

        ``check_shard`` says what must hold.  It is asked of the first shard, which
        settles all that has no number; of the others, numbers are compared.

        Raises:
            ValueError: A value contradicts another.
        """
        check_shard(self.shard(0))
        if len(self) == 1:
            return
        wrong = ~self._are_sound()
        if wrong.any():
            check_shard(self.shard(int(wrong.argmax())))
            msg = "the numbers of its shards do not fit each other"
            raise ValueError(msg)

    def _are_sound(self) -> Bools:
        """Tell of which shards ``check_shard`` would find nothing wrong ``[k]``.

        Its first shard was checked, so names and numbers of axes fit.
        """
        numbers = self.numbers[_NUMBER]
        # Vectors of equal numbers are looked at once (see ``_are_counts``), so what is
        # combined here is ``[k]`` or ``[1]``.
        sound: Bools = (numbers >= 0) & (numbers < MOST_SHARDS)
        sound &= _are_counts(self.samples) & _are_counts(self.bytes)
        for name, array in self.schema.arrays:
            for sizes in (*self.shape(name), self.offset_or_chunk_rows(name)):
                sound &= _are_counts(sizes)
            # Below, numbers may be of any size, so sums and products are of no meaning
            # where ``sound`` is false already; where it is true they are exact.
            nbytes = self.nbytes(name)
            sound &= nbytes < MOST_COUNT
            if array.chunk_index is None:
                sound &= self.offset_or_chunk_rows(name) % ALIGNMENT == 0
                sound &= self.offset_or_chunk_rows(name) + nbytes <= self.bytes
            else:
                sound &= self._have_indexed_chunks(name, array.chunk_index)
        for name, column in self.schema.columns:
            sound &= self._have_fitting_arrays(name, column)
        return sound

    def _have_indexed_chunks(self, name: str, index: str) -> Bools:
        """Tell of which shards the index names all chunks of an array ``[k]``."""
        chunk_rows = self.offset_or_chunk_rows(name)
        divisor = np.maximum(chunk_rows, 1)  # zero is refused below
        chunk_count = -(-self.shape(name)[0] // divisor)
        # A chunk of one sample is as large as that is; more share a smaller one.
        max_bytes = np.where(divisor == 1, MOST_CHUNK_BYTES, MOST_SHARED_CHUNK_BYTES)
        entries, width = self.shape(index)
        fits: Bools = chunk_rows > 0
        fits &= (entries == chunk_count) & (width == 3)
        fits &= self.chunk_bytes(name) <= max_bytes
        return fits

    def _have_fitting_arrays(self, name: str, column: ColumnSchema) -> Bools:
        """Tell of which shards the arrays of a column fit each other ``[k]``."""
        samples = self.samples_with(name)
        fits: Bools = samples <= self.samples
        if column.offsets is None:
            fits &= self.shape(column.values)[0] == samples
            return fits
        fits &= self.shape(column.offsets)[0] == samples + 1
        if column.shapes is not None:
            fits &= self.shape(column.shapes)[0] == samples
        return fits

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardGroup):
            return NotImplemented
        if self.schema != other.schema:
            return False
        vectors = zip(self.numbers, other.numbers, strict=True)
        return all(
            np.array_equal(vector, counterpart) for vector, counterpart in vectors
        )

    # Its vectors cannot be hashed; Python says so by None, which no checker expects.
    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        """Write it as JSON."""
        least, widths, blocks = [], [], []
        for number, vector in enumerate(self.numbers):
            low, width = int(vector.min()), 8
            # Checksums use all their bits: where they do not, by chance, they are
            # stored in full all the same, since ``from_json`` counts shards by them.
            if number not in {_XXH3_HIGH, _XXH3_LOW}:
                width = _width_of(int(vector.max()) - low)
            if width == 8:
                low = 0
            least.append(low)
            widths.append(width)
            if width:
                # Differences fit, so bits that are cut off are zeros.
                differences = (vector - low).astype("<i8").view(np.uint8)
                blocks.append(differences.reshape(-1, 8)[:, :width].tobytes())
        return {
            "schema": self.schema.to_json(),
            "shards": len(self),
            "least": least,
            "widths": widths,
            "data": base64.b64encode(b"".join(blocks)).decode("ascii"),
        }

    @classmethod
    def from_json(cls, content: object) -> ShardGroup:
        """Read it; ``check`` says whether its numbers fit each other.

        Raises:
            KeyError: A value is missing.
            TypeError: A value is of another type.
            ValueError: A value contradicts another.
        """
        fields = record(content)
        schema, count = Schema.from_json(fields["schema"]), integer(fields["shards"])
        least, widths = integers(fields["least"]), integers(fields["widths"])
        if not len(least) == len(widths) == schema.numbers_per_shard:
            msg = (
                f"its shards have {schema.numbers_per_shard} numbers, got "
                f"{len(least)} least values and {len(widths)} widths"
            )
            raise ValueError(msg)
        # Checksums take 16 bytes a shard, so the number of shards is no larger than
        # what is there, and neither is the memory that the numbers take.
        are_whole = widths[_XXH3_HIGH] == widths[_XXH3_LOW] == 8
        if not are_whole or not set(widths) <= set(_WIDTHS) or count < 1:
            msg = f"the numbers of {count} shards cannot take {widths} bytes each"
            raise ValueError(msg)
        try:
            data = base64.b64decode(text(fields["data"]), validate=True)
        except binascii.Error as error:
            msg = f"the numbers of its shards are no base64 ({error})"
            raise ValueError(msg) from None
        if len(data) != count * sum(widths):
            msg = f"the numbers of {count} shards take {len(data):,} bytes"
            raise ValueError(msg)
        # Of a single shard, most numbers are the least; this gives them all at once.
        numbers: list[Ints] = list(np.array(least, np.int64).reshape(-1, 1))
        start = 0
        for number, (low, width) in enumerate(zip(least, widths, strict=True)):
            if width or count > 1:
                numbers[number] = _read_vector(data, start, count, low, width)
            start += count * width
        return cls(schema, numbers)


class ShardTable(Sequence[Shard]):
    """All shards of a cache, in order; each is made when it is asked for.

    Args:
        groups: The shards by schema.  Their positions are 0 to n - 1, each once.
    """

    def __init__(self, groups: Sequence[ShardGroup]) -> None:
        self.groups = tuple(groups)
        self._recent_shards: dict[int, Shard] = {}

    @classmethod
    def of(cls, shards: Iterable[Shard]) -> ShardTable:
        """Make a table of shards that were checked."""
        builder = ShardTableBuilder()
        for shard in shards:
            builder.add(shard)
        return builder.table()

    def __len__(self) -> int:
        return sum(len(group) for group in self.groups)

    @overload
    def __getitem__(self, position: int) -> Shard: ...
    @overload
    def __getitem__(self, position: slice) -> tuple[Shard, ...]: ...
    def __getitem__(self, position: int | slice) -> Shard | tuple[Shard, ...]:
        """Describe one shard, or some."""
        if isinstance(position, slice):
            return tuple(self[number] for number in range(len(self))[position])
        position = range(len(self))[position]  # from the end, or an IndexError
        shard = self._recent_shards.get(position)
        if shard is None:
            if len(self._recent_shards) >= _MAX_RECENT_SHARDS:
                self._recent_shards.clear()
            group, row = self._group_and_row(position)
            shard = self._recent_shards[position] = group.shard(row)
        return shard

    def __iter__(self) -> Iterator[Shard]:
        for position in range(len(self)):
            group, row = self._group_and_row(position)
            yield group.shard(row)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardTable):
            return NotImplemented
        return self.groups == other.groups

    # Its vectors cannot be hashed; Python says so by None, which no checker expects.
    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as the manifest has it."""
        return _table_from_checked_json, (self.to_json(),)

    @cached_property
    def samples(self) -> Ints:
        """Samples of each shard ``[n]``."""
        return self.spread(lambda group: group.samples)

    @cached_property
    def bytes(self) -> Ints:
        """Size of each file ``[n]``."""
        return self.spread(lambda group: group.bytes)

    @cached_property
    def files(self) -> list[str]:
        """Name of each file."""
        if len(self.groups) == 1 and _is_range(self.groups[0].positions):
            return self.groups[0].files
        files = [""] * len(self)
        for group in self.groups:
            pairs = zip(group.positions.tolist(), group.files, strict=True)
            for position, file in pairs:
                files[position] = file
        return files

    @cached_property
    def column_names(self) -> frozenset[str]:
        """Names of the columns that some shard has."""
        return frozenset(name for group in self.groups for name in group.schema.column)

    def file(self, position: int) -> ShardFile:
        """Describe the file of a shard, seen from outside."""
        group, row = self._group_and_row(position)
        return group.file(row)

    def spread(self, numbers_of: Callable[[ShardGroup], Ints]) -> Ints:
        """Give a number of each shard in the order of the cache ``[n]``.

        Args:
            numbers_of: Gives the numbers of a group ``[k]``.
        """
        spread = np.zeros(len(self), np.int64)
        for group in self.groups:
            spread[group.positions] = numbers_of(group)
        return spread

    def _group_and_row(self, position: int) -> tuple[ShardGroup, int]:
        group_of, row_of = self._groups_and_rows
        return self.groups[int(group_of[position])], int(row_of[position])

    @cached_property
    def _groups_and_rows(self) -> tuple[Ints, Ints]:
        """Number of the group of each shard, and its row in there ``[n]``."""
        group_of = np.empty(len(self), np.int64)
        row_of = np.empty(len(self), np.int64)
        for number, group in enumerate(self.groups):
            group_of[group.positions] = number
            row_of[group.positions] = np.arange(len(group))
        return group_of, row_of

    def check(self) -> None:
        """See that every shard is sound, and that they can be those of one cache.

        Raises:
            ValueError: A value contradicts another.
        """
        for group in self.groups:
            group.check()
        positions = [group.positions for group in self.groups]
        if positions and not _is_range(np.sort(np.concatenate(positions))):
            msg = "its shards are in no order"
            raise ValueError(msg)
        if len(set(self.files)) < len(self):
            msg = "it names a shard twice"
            raise ValueError(msg)
        if sum(self.samples.tolist()) >= MOST_COUNT:
            msg = "its shards hold more samples than can be counted"
            raise ValueError(msg)

    def to_json(self) -> list[Any]:
        """Write it as JSON."""
        return [group.to_json() for group in self.groups]

    @classmethod
    def from_json(cls, content: object) -> ShardTable:
        """Read it and check every number.

        Raises:
            KeyError: A value is missing.
            TypeError: A value is of another type.
            ValueError: A value contradicts another.
        """
        groups = [ShardGroup.from_json(group) for group in list_of_values(content)]
        table = cls(groups)
        table.check()
        return table


class ShardTableBuilder:
    """Takes shards one after the other, and keeps their numbers only."""

    def __init__(self) -> None:
        self._numbers: dict[Schema, list[growing_array[int]]] = {}
        self._count = 0
        self.samples = 0
        """Samples in all of them."""
        self.nbytes = 0
        """Bytes of all files."""

    def __len__(self) -> int:
        return self._count

    def add(self, shard: Shard) -> None:
        """Add the next shard, which was checked."""
        schema = Schema.of(shard)
        vectors = self._numbers.get(schema)
        if vectors is None:
            vectors = [growing_array("q") for _ in range(schema.numbers_per_shard)]
            self._numbers[schema] = vectors
        numbers = _numbers_of(shard, self._count)
        for vector, number in zip(vectors, numbers, strict=True):
            vector.append(number)
        self._count += 1
        self.samples += shard.samples
        self.nbytes += shard.bytes

    def table(self) -> ShardTable:
        """Give all shards that were added so far."""
        return ShardTable(
            [
                ShardGroup(schema, [np.array(vector, np.int64) for vector in vectors])
                for schema, vectors in self._numbers.items()
            ]
        )


def _numbers_of(shard: Shard, position: int) -> list[int]:
    """List the numbers of a shard in the order that its schema says."""
    high, low = np.frombuffer(bytes.fromhex(shard.xxh3), ">i8").tolist()
    number = int(shard.file.partition("-")[0])
    numbers = [position, number, shard.samples, shard.bytes, high, low]
    for array in shard.arrays.values():
        numbers += array.shape
        # One or the other; a shard that was checked has no chunks of 0 rows.
        is_mapped = array.offset is not None
        numbers.append((array.offset if is_mapped else array.chunk_rows) or 0)
    for column in shard.columns.values():
        if column.low is not None and column.high is not None:
            numbers += [column.low, column.high]
    return numbers


def _table_from_checked_json(content: list[Any]) -> ShardTable:
    """Read a table that was checked when it was read first."""
    return ShardTable([ShardGroup.from_json(group) for group in content])


def _array_schema_from_json(content: object) -> ArraySchema:
    fields = record(content)
    axes = integer(fields["axes"])
    if not 0 <= axes <= MOST_AXES:
        msg = f"an array cannot have {axes} axes"
        raise ValueError(msg)
    return ArraySchema(
        text(fields["dtype"]), axes, optional_text(fields["chunk_index"])
    )


def _column_schema_from_json(content: object) -> ColumnSchema:
    fields = record(content)
    return ColumnSchema(
        values=text(fields["values"]),
        offsets=optional_text(fields["offsets"]),
        shapes=optional_text(fields["shapes"]),
        rows=optional_text(fields["rows"]),
        bounded=boolean(fields["bounded"]),
    )


def _width_of(span: int) -> int:
    """Say in how many bytes all differences up to one are stored.

    >>> [_width_of(span) for span in (0, 255, 256, 1 << 32, 1 << 63)]
    [0, 1, 2, 8, 8]
    """
    # Differences of 64 bits may be larger than an int64; 8 bytes hold the numbers.
    return next(width for width in _WIDTHS if span < 1 << 8 * width or width == 8)


def _read_vector(data: bytes, start: int, count: int, low: int, width: int) -> Ints:
    """Read a vector ``[count]``; equal numbers take no memory."""
    if not width:
        # One number, read again and again; ``np.broadcast_to`` takes 20 times as long.
        number = low.to_bytes(8, "little", signed=True)
        constant: Ints = np.ndarray(count, "<i8", number, strides=(0,))
        return constant
    if width == 8:
        # Differences of 64 bits would overflow, so numbers are stored as they are.
        if low:
            msg = f"numbers of 8 bytes cannot be stored as differences to {low}"
            raise ValueError(msg)
        return np.frombuffer(data, "<i8", count, start).astype(np.int64)
    vector: Ints = np.frombuffer(data, f"<u{width}", count, start).astype(np.int64)
    vector += low  # what is too large becomes negative, and is no count
    return vector


def _are_counts(numbers: Ints) -> Bools:
    """Tell which numbers are counts ``[k]``, or ``[1]`` where they are all one."""
    numbers = _without_repeats(numbers)
    return (numbers >= 0) & (numbers < MOST_COUNT)


def _without_repeats(numbers: Ints) -> Ints:
    """Take one number of those that are all one (see ``_read_vector``)."""
    return numbers[:1] if numbers.strides == (0,) else numbers


def _saturating_product(factors: Sequence[Ints], count: int) -> Ints:
    """Multiply counts; what is larger than ``MOST_COUNT`` becomes ``MOST_COUNT``.

    >>> _saturating_product(
    ...     [np.array([3, 1 << 40, 1 << 40]), np.array([4, 1 << 40, 0])], 3
    ... )
    array([                 12, 4611686018427387904,                   0])
    """
    product = np.ones(1, np.int64)
    for factor in factors:
        # Numbers that are no counts are refused elsewhere; here they must not warn.
        factor = np.maximum(_without_repeats(factor), 0)
        fits = product <= MOST_COUNT // np.maximum(factor, 1)
        product = np.where(fits, product * np.where(fits, factor, 0), MOST_COUNT)
    return product if len(product) == count else np.full(count, product[0])


def _is_range(positions: Ints) -> bool:
    """Tell whether numbers are 0, 1, 2 ... in order."""
    return bool((positions == np.arange(len(positions))).all())
