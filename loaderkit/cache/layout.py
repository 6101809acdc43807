"""What a cache directory holds: names of files, and what is in a shard.  Pure.

A cache is ``manifest.json`` beside shards ``00000-1f0c83d2a97b6e45.h5`` ...  A shard's
name ends in its checksum, so two caches share a name only where they share the bytes:
a new cache is written beside the old one, and replaces it when its manifest does.  The
checksum of the manifest names the *generation* that all of it belongs to.

A shard holds *arrays* (HDF5 datasets); a *column* says which arrays hold one field of
its samples:

    dense    values [m, *shape]                 every sample has one shape
    ragged   values [sum, *rest], offsets [m+1]  the first axis differs
    shaped   values [sum], offsets, shapes [m, d]  several axes differ

``rows [m]`` names the samples that have the column, when not all of them do.
Nothing read from a manifest is trusted: every number is checked against the others,
so that no later read can leave its file.  ``check_shard`` says what must hold of one
shard; shard_table.py holds all shards of a cache, manifest.py what is known beside.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loaderkit.cache.parsed import (
    integer,
    list_of_values,
    optional_integer,
    optional_text,
    record,
    text,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARD_FORMAT = 3
"""How shards are written: a build goes on with finished shards of its own format only.
The manifest has a version of its own."""
MANIFEST = "manifest.json"
BUILDING = ".building"
"""Folder inside a cache where the shards of an unfinished build wait."""
WRITTEN_SUFFIX = ".written"
"""Ends the names of such files, which are empty: see :func:`written_marker_name`."""
MOST_CHUNK_BYTES = 1 << 32
"""HDF5's own limit of a chunk, uncompressed."""
MOST_SHARED_CHUNK_BYTES = 1 << 20
"""The same for a chunk of several rows: what reading one sample swells to beyond the
sample.  Chosen: eight times the 128 KiB that are written at most."""
ALIGNMENT = 64
"""Every mapped array starts at a multiple of this many bytes (a cache line)."""
LEAST_SAVED_SHARE = 1 / 8
"""Values of which compression would save less stay as they are.  Zstd saves 6 to 10 %
of floats that are noise in their last bits, and decompresses them at 1 GB/s, where they
are copied at 10.  Chosen, as ZFS has it."""

# All that HDF5 and numpy write alike.  Big-endian values are turned when packed,
# bfloat16 and the 8-bit floats travel as integers (loaderkit.datasets.dtypes).
DTYPES = frozenset(
    "|b1 |i1 |u1 <i2 <u2 <i4 <u4 <i8 <u8 <f2 <f4 <f8 <c8 <c16".split()  # noqa: SIM905
)
_SHARD_NAME = re.compile(r"[0-9]{5,9}-[0-9a-f]{16}\.h5")
_SOURCES_NAME = re.compile(r"sources-[0-9a-f]{16}\.json")
_XXH3 = re.compile(r"[0-9a-f]{32}")
MOST_SHARDS = 10**9
"""A shard's number has nine digits at most."""
MOST_COUNT = 1 << 62
"""Sizes, counts and places are smaller, so that two of them can be added in 64 bits."""
MOST_AXES = 32
"""HDF5's own limit (H5S_MAX_RANK)."""


def shard_name(number: int, xxh3: str) -> str:
    """Name a shard.

    >>> shard_name(3, "1f0c83d2a97b6e451f0c83d2a97b6e45")
    '00003-1f0c83d2a97b6e45.h5'
    """
    return f"{number:05}-{xxh3[:16]}.h5"


def note_name(number: int) -> str:
    """Name the note that a build makes of a finished shard."""
    return f"{number:05}.json"


def written_marker_name(name: str) -> str:
    """Name the file by which a build says that it wrote a file of a cache.

    It is there before the file has its name, which no note may tell: the process is
    killed before the note stands, or a later task's note replaces this one.
    """
    return f"{name}{WRITTEN_SUFFIX}"


def sources_name(xxh3: str) -> str:
    """Name the list of the files that a cache was made from."""
    return f"sources-{xxh3[:16]}.json"


def is_cache_file_name(name: str) -> bool:
    """Tell whether a name is one that only a cache gives.

    >>> is_cache_file_name("00003-1f0c83d2a97b6e45.h5"), is_cache_file_name("raw.h5")
    (True, False)
    """
    return bool(_SHARD_NAME.fullmatch(name) or _SOURCES_NAME.fullmatch(name))


@dataclass(frozen=True)
class Array:
    """One HDF5 dataset of a shard."""

    dtype: str
    """numpy's name, little endian, one of ``DTYPES``."""
    shape: tuple[int, ...]
    offset: int | None
    """Byte at which the values start in the file; None when stored in chunks."""
    chunk_rows: int | None = None
    """Rows of each compressed chunk; None when the values are mapped."""
    chunk_index: str | None = None
    """Name of the array that says where the chunks lie ``[chunks, 3]``: first byte,
    bytes, and HDF5's mask of the filters that were left out."""

    @property
    def nbytes(self) -> int:
        """Bytes of the values, uncompressed."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk, uncompressed; 0 when the values are mapped."""
        rows = self.chunk_rows or 0
        return rows * math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Column:
    """Which arrays of a shard hold one field of its samples."""

    values: str
    offsets: str | None = None
    shapes: str | None = None
    rows: str | None = None
    low: int | None = None
    """Least value of a column that loaderkit itself counts with (``@nodes``, ``@inc``,
    ``@variant``); None for other columns."""
    high: int | None = None
    """Greatest value of such a column."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays it is made of."""
        named = (self.values, self.offsets, self.shapes, self.rows)
        return tuple(name for name in named if name is not None)


@dataclass(frozen=True)
class ShardFile:
    """One file of consecutive samples, seen from outside."""

    file: str
    samples: int
    bytes: int
    """Size of the file; one that is shorter is refused before it is mapped."""
    xxh3: str
    """xxh3-128 of the whole file, in hexadecimal."""


@dataclass(frozen=True)
class Shard(ShardFile):
    """One file of consecutive samples, and what is in it."""

    arrays: Mapping[str, Array]
    columns: Mapping[str, Column]

    def samples_with(self, column: Column) -> int:
        """Count the samples of the shard that have the column."""
        if column.rows is None:
            return self.samples
        return self.arrays[column.rows].shape[0]


def shard_from(content: object) -> Shard:
    """Build one shard's description from parsed JSON and check it.

    Args:
        content: What ``json.loads`` returned for it.

    Returns:
        A shard whose arrays lie in its file and whose columns name fitting arrays.

    Raises:
        KeyError: A value is missing.
        TypeError: A value is of another type.
        ValueError: A value contradicts another.
    """
    fields = record(content)
    shard = Shard(
        file=text(fields["file"]),
        samples=integer(fields["samples"]),
        bytes=integer(fields["bytes"]),
        xxh3=text(fields["xxh3"]),
        arrays={
            name: _array_from_json(array)
            for name, array in record(fields["arrays"]).items()
        },
        columns={
            name: _column_from_json(column)
            for name, column in record(fields["columns"]).items()
        },
    )
    check_shard(shard)
    return shard


def check_shard(shard: Shard) -> None:
    """See that a shard's arrays lie in its file, and that its columns fit them.

    Args:
        shard: A description whose values are of the right types.

    Raises:
        ValueError: A value contradicts another.
    """
    if not _SHARD_NAME.fullmatch(shard.file):
        msg = f"{shard.file!r} is not the name of a shard"
        raise ValueError(msg)
    number = int(shard.file.partition("-")[0])
    # The name is what other caches, mirrors and a build that goes on take for granted:
    # equal names, equal bytes.
    if not _XXH3.fullmatch(shard.xxh3) or shard.file != shard_name(number, shard.xxh3):
        msg = f"{shard.file!r} is not named after its checksum {shard.xxh3}"
        raise ValueError(msg)
    _check_counts(shard.samples, shard.bytes)
    for name, array in shard.arrays.items():
        _check_array(name, array)
        if array.offset is not None and array.offset + array.nbytes > shard.bytes:
            msg = f"array {name!r} ends beyond the {shard.bytes} bytes of {shard.file}"
            raise ValueError(msg)
        _check_chunks(shard, name, array)
    for name, column in shard.columns.items():
        _check_column(shard, name, column)


def _check_counts(*counts: int) -> None:
    for count in counts:
        if not 0 <= count < MOST_COUNT:
            msg = f"{count} stands where a count should"
            raise ValueError(msg)


def _check_array(name: str, array: Array) -> None:
    if array.dtype not in DTYPES:
        msg = f"{array.dtype!r} is not a dtype of a cache"
        raise ValueError(msg)
    if len(array.shape) > MOST_AXES:
        msg = f"array {name!r} has {len(array.shape)} axes"
        raise ValueError(msg)
    _check_counts(*array.shape, array.offset or 0, array.chunk_rows or 0)
    # Each axis alone may be small enough, and their product not.  It is one of Python's
    # integers here, which do not wrap around as numpy's will.
    if array.nbytes >= MOST_COUNT:
        msg = f"an array of shape {array.shape} cannot be"
        raise ValueError(msg)
    if array.offset is not None and array.offset % ALIGNMENT:
        msg = f"an array starts at byte {array.offset}, no multiple of {ALIGNMENT}"
        raise ValueError(msg)


def _check_chunks(shard: Shard, name: str, array: Array) -> None:
    """Check that an array is either mapped or a row of chunks with an index."""
    if array.offset is not None:
        if array.chunk_rows is not None or array.chunk_index is not None:
            msg = f"array {name!r} is both mapped and in chunks"
            raise ValueError(msg)
        return
    index = None
    if array.chunk_index is not None:
        index = shard.arrays.get(array.chunk_index)
    # The index itself is never in chunks: it would need an index to be found.
    has_index = index is not None and _is_mapped_integers(index)
    if not has_index or index is None or not array.chunk_rows or not array.shape:
        msg = f"array {name!r} is in chunks, but no index says where they lie"
        raise ValueError(msg)
    # Rounded up: the last chunk may have fewer rows.
    chunk_count = -(-array.shape[0] // array.chunk_rows)
    # A chunk is undone whole, so this is what a manifest can make a reader allocate.
    max_bytes = MOST_SHARED_CHUNK_BYTES
    if array.chunk_rows == 1:
        # A sample that is larger than that has a chunk, and swells to itself.
        max_bytes = MOST_CHUNK_BYTES
    if index.shape != (chunk_count, 3) or array.chunk_bytes > max_bytes:
        msg = f"array {name!r} has {chunk_count:,} chunks, its index {index.shape}"
        raise ValueError(msg)


def _check_column(shard: Shard, name: str, column: Column) -> None:
    missing = [array for array in column.arrays if array not in shard.arrays]
    if missing:
        msg = f"column {name!r} names the array {missing[0]!r}, which is not there"
        raise ValueError(msg)
    if column.rows is not None and len(shard.arrays[column.rows].shape) != 1:
        msg = f"the rows of column {name!r} are no list"
        raise ValueError(msg)
    values = shard.arrays[column.values]
    # Readers compare with both bounds or with none.
    has_one_bound = (column.low is None) != (column.high is None)
    has_integers = values.dtype[1] in "iu"
    if has_one_bound or (column.low is not None and not has_integers):
        msg = f"the bounds of column {name!r} in {shard.file} make no sense"
        raise ValueError(msg)
    # The first of a column's arrays is its values, which may be of any dtype.
    index_arrays = [shard.arrays[array] for array in column.arrays[1:]]
    are_mapped_integers = all(_is_mapped_integers(array) for array in index_arrays)
    if not are_mapped_integers or not _have_fitting_shapes(shard, column):
        msg = f"the arrays of column {name!r} in {shard.file} do not fit each other"
        raise ValueError(msg)


def _is_mapped_integers(array: Array) -> bool:
    """Tell whether an array can be an index: every batch reads it where it lies."""
    return array.dtype == "<i8" and array.offset is not None


def _have_fitting_shapes(shard: Shard, column: Column) -> bool:
    """Tell whether the shapes of a column's arrays can be those of one column."""
    samples = shard.samples_with(column)
    values = shard.arrays[column.values]
    # Values are rows end to end: even those of numbers have an axis.
    if samples > shard.samples or not values.shape:
        return False
    if column.offsets is None:
        return column.shapes is None and values.shape[0] == samples
    # What the offsets say is not known here: they are in the file, and are held against
    # the number of rows when it is opened.
    if shard.arrays[column.offsets].shape != (samples + 1,):
        return False
    if column.shapes is None:
        return True
    shapes = shard.arrays[column.shapes].shape
    return len(values.shape) == 1 and len(shapes) == 2 and shapes[0] == samples


def _array_from_json(content: object) -> Array:
    fields = record(content)
    return Array(
        text(fields["dtype"]),
        tuple(integer(size) for size in list_of_values(fields["shape"])),
        offset=optional_integer(fields["offset"]),
        chunk_rows=optional_integer(fields["chunk_rows"]),
        chunk_index=optional_text(fields["chunk_index"]),
    )


def _column_from_json(content: object) -> Column:
    fields = record(content)
    return Column(
        values=text(fields["values"]),
        offsets=optional_text(fields["offsets"]),
        shapes=optional_text(fields["shapes"]),
        rows=optional_text(fields["rows"]),
        low=optional_integer(fields["low"]),
        high=optional_integer(fields["high"]),
    )
