"""What a cache directory holds, as frozen values, and their JSON.  Pure.

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
so that no later read can leave its file.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from loaderkit.errors import CacheVersionError, DamagedCacheError

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "loaderkit-cache"
VERSION = 2
MANIFEST = "manifest.json"
BUILDING = ".building"
"""Folder inside a cache where the shards of an unfinished build wait."""
MOST_CHUNK_BYTES = 1 << 32
"""HDF5's own limit of a chunk, uncompressed."""
MOST_SHARED_CHUNK_BYTES = 1 << 20
"""The same for a chunk of several rows: what reading one sample swells to beyond the
sample.  Chunks are written with 128 KiB."""
ALIGNMENT = 64
"""Every mapped array starts at a multiple of this many bytes (a cache line)."""

DTYPES = frozenset(
    "|b1 |i1 |u1 <i2 <u2 <i4 <u4 <i8 <u8 <f2 <f4 <f8 <c8 <c16".split()  # noqa: SIM905
)
_SHARD_NAME = re.compile(r"\d{5,9}-[0-9a-f]{16}\.h5")
_SOURCES_NAME = re.compile(r"sources-[0-9a-f]{16}\.json")
MOST_MANIFEST_BYTES = 256 << 20
"""A larger manifest is not read: 10^5 shards of some 30 fields take about 200 MB."""


def shard_name(number: int, xxh3: str) -> str:
    """Name a shard.

    >>> shard_name(3, "1f0c83d2a97b6e451f0c83d2a97b6e45")
    '00003-1f0c83d2a97b6e45.h5'
    """
    return f"{number:05}-{xxh3[:16]}.h5"


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
class SourceFiles:
    """The list of the files that the samples were made from, in a file of its own.

    A million raw files would make a manifest of 100 MB, which every worker would read.
    """

    file: str
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Shard:
    """One file of consecutive samples."""

    file: str
    samples: int
    bytes: int
    """Size of the file; one that is shorter is refused before it is mapped."""
    xxh3: str
    """xxh3-128 of the whole file, in hexadecimal."""
    arrays: Mapping[str, Array]
    columns: Mapping[str, Column]

    def held(self, column: Column) -> int:
        """Count the samples of the shard that have the column."""
        return self.arrays[column.rows].shape[0] if column.rows else self.samples


@dataclass(frozen=True)
class Manifest:
    """Everything that is known of a cache without reading a sample."""

    shards: tuple[Shard, ...]
    structure: Mapping[str, Any]
    """How columns make up a sample; written and read by ``loaderkit.datasets``."""
    fingerprint: Mapping[str, Any]
    """What the samples were made from; compared by ``loaderkit.datasets``."""
    made_with: Mapping[str, str]
    """Versions of the libraries that packed it, for people to read."""
    compression: str | None = None
    sources: SourceFiles | None = None
    """Which files it was made from; None where none is known."""
    generation: str = ""
    """Checksum of everything above: equal for equal caches, other for any other."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files of the cache but the manifest."""
        names = tuple(shard.file for shard in self.shards)
        return names if self.sources is None else (*names, self.sources.file)

    @cached_property
    def samples(self) -> int:
        """Samples in all shards together."""
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of all shards on disk."""
        return sum(shard.bytes for shard in self.shards)


def write_manifest(manifest: Manifest) -> str:
    """Write a manifest as JSON text that carries its own checksum."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "checksum": generation_of(manifest),
    }
    return json.dumps(head)[:-1] + f', "content": {_content_of(manifest)}}}\n'


def generation_of(manifest: Manifest) -> str:
    """Name the generation that a manifest will have once it is written."""
    return _checksum(_content_of(manifest))


def _content_of(manifest: Manifest) -> str:
    fields = asdict(manifest)
    del fields["generation"]  # it is the checksum of the rest
    return json.dumps(fields, separators=(",", ":"), allow_nan=False)


def read_manifest(text: str, *, where: str) -> Manifest:
    """Read a manifest and check every number in it.

    Args:
        text: The JSON text of ``manifest.json``.
        where: The file's path, for messages.

    Returns:
        A manifest whose arrays all lie inside their files.

    Raises:
        CacheVersionError: A newer loaderkit wrote it.
        DamagedCacheError: It is not a manifest of ours, or was changed.
    """
    try:
        outer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"it is not JSON ({error})") from None
    if not isinstance(outer, dict) or outer.get("format") != FORMAT:
        raise _damaged(where, f'it has no "format": "{FORMAT}"')
    version = outer.get("version")
    if version == 1:
        what = f"{where} has format version 1; this loaderkit reads {VERSION}."
        why = "it was packed before shards were named after their content"
        raise CacheVersionError(what, why=why, fix="pack(source, path, overwrite=True)")
    if isinstance(version, int) and version > VERSION:
        what = f"{where} has format version {version}; this loaderkit reads {VERSION}."
        why = "a newer loaderkit wrote the cache"
        raise CacheVersionError(what, why=why, fix="pip install --upgrade loaderkit")
    if version != VERSION:
        raise _damaged(where, f"its version is {version!r}, not {VERSION}")
    content = outer.get("content")
    generation = _checksum(json.dumps(content, separators=(",", ":")))
    if outer.get("checksum") != generation:
        raise _damaged(where, "its checksum is not that of its content")
    return replace(manifest_from(content, where=where), generation=generation)


def manifest_from(content: object, *, where: str) -> Manifest:
    """Build a manifest from parsed JSON, trusting nothing.

    Args:
        content: What ``json.loads`` returned.
        where: The file's path, for messages.

    Returns:
        The checked manifest.

    Raises:
        DamagedCacheError: A value is missing, of another type, or contradicts another.
    """
    try:
        fields = _record(content)
        shards = tuple(shard_from(each) for each in _list(fields["shards"]))
        names = [shard.file for shard in shards]
        if len(set(names)) < len(names):
            msg = "it names a shard twice"
            raise ValueError(msg)
        if sum(shard.samples for shard in shards) >= 1 << 62:
            msg = "its shards hold more samples than can be counted"
            raise ValueError(msg)
        return Manifest(
            shards=shards,
            structure=_record(fields["structure"]),
            fingerprint=_record(fields["fingerprint"]),
            made_with={k: _text(v) for k, v in _record(fields["made_with"]).items()},
            compression=_name(fields["compression"]),
            sources=_sources(fields["sources"]),
        )
    except KeyError as error:
        raise _damaged(where, f"{error} is missing") from None
    except (TypeError, ValueError) as error:
        raise _damaged(where, str(error)) from None


def shard_from(content: object) -> Shard:
    """Build one shard's description from parsed JSON and check it.

    Args:
        content: What ``json.loads`` returned for it.

    Returns:
        A shard whose arrays lie in its file and whose columns name fitting arrays.

    Raises:
        ValueError: A value contradicts another.
    """
    fields = _record(content)
    shard = Shard(
        file=_text(fields["file"]),
        samples=_count(fields["samples"]),
        bytes=_count(fields["bytes"]),
        xxh3=_text(fields["xxh3"]),
        arrays={k: _array(v) for k, v in _record(fields["arrays"]).items()},
        columns={k: _column(v) for k, v in _record(fields["columns"]).items()},
    )
    if not _SHARD_NAME.fullmatch(shard.file):
        msg = f"{shard.file!r} is not the name of a shard"
        raise ValueError(msg)
    if shard.file.partition("-")[2] != f"{shard.xxh3[:16]}.h5":
        msg = f"{shard.file!r} is not named after its checksum {shard.xxh3}"
        raise ValueError(msg)
    for name, array in shard.arrays.items():
        if array.offset is not None and array.offset + array.nbytes > shard.bytes:
            msg = f"array {name!r} ends beyond the {shard.bytes} bytes of {shard.file}"
            raise ValueError(msg)
        _check_chunks(shard, name, array)
    for name, column in shard.columns.items():
        _check_column(shard, name, column)
    return shard


def _check_chunks(shard: Shard, name: str, array: Array) -> None:
    """Check that an array is either mapped or a row of chunks with an index."""
    if array.offset is not None:
        if array.chunk_rows is not None or array.chunk_index is not None:
            msg = f"array {name!r} is both mapped and in chunks"
            raise ValueError(msg)
        return
    index = shard.arrays.get(array.chunk_index or "")
    fits = index is not None and index.dtype == "<i8" and index.offset is not None
    if not fits or index is None or not array.chunk_rows or not array.shape:
        msg = f"array {name!r} is in chunks, but no index says where they lie"
        raise ValueError(msg)
    chunks = -(-array.shape[0] // array.chunk_rows)
    most = MOST_CHUNK_BYTES if array.chunk_rows == 1 else MOST_SHARED_CHUNK_BYTES
    if index.shape != (chunks, 3) or array.chunk_bytes > most:
        msg = f"array {name!r} has {chunks:,} chunks, its index {index.shape}"
        raise ValueError(msg)


def _check_column(shard: Shard, name: str, column: Column) -> None:
    if missing := [n for n in column.arrays if n not in shard.arrays]:
        msg = f"column {name!r} names the array {missing[0]!r}, which is not there"
        raise ValueError(msg)
    if column.rows and len(shard.arrays[column.rows].shape) != 1:
        msg = f"the rows of column {name!r} are no list"
        raise ValueError(msg)
    held, values = shard.held(column), shard.arrays[column.values]
    fits = len(values.shape) > 0 and (column.offsets or values.shape[0] == held)
    fits = fits and not (column.shapes and not column.offsets) and held <= shard.samples
    if column.offsets:
        fits = fits and shard.arrays[column.offsets].shape == (held + 1,)
    if column.shapes:
        shapes = shard.arrays[column.shapes].shape
        fits = fits and len(shapes) == 2 and shapes[0] == held
        fits = fits and len(values.shape) == 1
    index = [shard.arrays[n] for n in column.arrays[1:]]
    if (column.low is None) != (column.high is None) or (
        column.low is not None and shard.arrays[column.values].dtype[1] not in "iu"
    ):
        msg = f"the bounds of column {name!r} in {shard.file} make no sense"
        raise ValueError(msg)
    if not fits or any(a.dtype != "<i8" or a.offset is None for a in index):
        msg = f"the arrays of column {name!r} in {shard.file} do not fit each other"
        raise ValueError(msg)


def _array(content: object) -> Array:
    fields = _record(content)
    dtype, offset = _text(fields["dtype"]), fields["offset"]
    if dtype not in DTYPES:
        msg = f"{dtype!r} is not a dtype of a cache"
        raise ValueError(msg)
    shape = tuple(_count(size) for size in _list(fields["shape"]))
    rows = fields["chunk_rows"]
    array = Array(
        dtype,
        shape,
        offset=None if offset is None else _count(offset),
        chunk_rows=None if rows is None else _count(rows),
        chunk_index=_name(fields["chunk_index"]),
    )
    if len(shape) > 32 or array.nbytes >= 1 << 62:
        msg = f"an array of shape {shape} cannot be"
        raise ValueError(msg)
    if array.offset is not None and array.offset % ALIGNMENT:
        msg = f"an array starts at byte {array.offset}, no multiple of {ALIGNMENT}"
        raise ValueError(msg)
    return array


def _column(content: object) -> Column:
    fields = _record(content)
    return Column(
        values=_text(fields["values"]),
        offsets=_name(fields["offsets"]),
        shapes=_name(fields["shapes"]),
        rows=_name(fields["rows"]),
        low=_integer(fields["low"]),
        high=_integer(fields["high"]),
    )


def _sources(content: object) -> SourceFiles | None:
    if content is None:
        return None
    fields = _record(content)
    sources = SourceFiles(
        file=_text(fields["file"]),
        bytes=_count(fields["bytes"]),
        xxh3=_text(fields["xxh3"]),
    )
    if sources.file != sources_name(sources.xxh3) or not is_cache_file_name(
        sources.file
    ):
        msg = f"{sources.file!r} is not the name of a list of sources"
        raise ValueError(msg)
    return sources


def _record(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        msg = f"{str(value)[:40]!r} stands where an object should"
        raise TypeError(msg)
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        msg = f"{str(value)[:40]!r} stands where a list should"
        raise TypeError(msg)
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        msg = f"{str(value)[:40]!r} stands where a text should"
        raise TypeError(msg)
    return value


def _name(value: object) -> str | None:
    return None if value is None else _text(value)


def _integer(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value.bit_length() > 63:
        msg = f"{str(value)[:40]!r} stands where a whole number should"
        raise ValueError(msg)
    return value


def _count(value: object) -> int:
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not 0 <= value < 1 << 62
    ):
        msg = f"{str(value)[:40]!r} stands where a count should"
        raise ValueError(msg)
    return value


def _checksum(content: str) -> str:
    return xxhash.xxh3_128_hexdigest(content.encode("utf-8", "surrogatepass"))


def _damaged(where: str, why: str) -> DamagedCacheError:
    what = f"{where} is not the manifest of a loaderkit cache."
    return DamagedCacheError(what, why=why, fix="pack(source, path, overwrite=True)")
