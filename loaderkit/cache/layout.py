"""What a cache directory holds, as frozen values, and their JSON.  Pure.

A cache is ``manifest.json`` beside shards ``00000.h5`` ...  A shard holds *arrays*
(HDF5 datasets); a *column* says which arrays hold one field of its samples:

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
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from loaderkit.errors import CacheVersionError, DamagedCacheError

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "loaderkit-cache"
VERSION = 1
MANIFEST = "manifest.json"
BUILDING = ".building"
"""Folder inside a cache where the shards of an unfinished build wait."""
ALIGNMENT = 64
"""Every mapped array starts at a multiple of this many bytes (a cache line)."""

DTYPES = frozenset(
    "|b1 |i1 |u1 <i2 <u2 <i4 <u4 <i8 <u8 <f2 <f4 <f8 <c8 <c16".split()  # noqa: SIM905
)
_SHARD_NAME = re.compile(r"\d{5,}\.h5")


@dataclass(frozen=True)
class Array:
    """One HDF5 dataset of a shard."""

    dtype: str
    """numpy's name, little endian, one of ``DTYPES``."""
    shape: tuple[int, ...]
    offset: int | None
    """Byte at which the values start in the file; None when stored in chunks."""

    @property
    def nbytes(self) -> int:
        """Bytes of the values, uncompressed."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Column:
    """Which arrays of a shard hold one field of its samples."""

    values: str
    offsets: str | None = None
    shapes: str | None = None
    rows: str | None = None


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

    @property
    def samples(self) -> int:
        """Samples in all shards together."""
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of all shards on disk."""
        return sum(shard.bytes for shard in self.shards)


def write_manifest(manifest: Manifest) -> str:
    """Write a manifest as JSON text that carries its own checksum."""
    content = json.dumps(asdict(manifest), separators=(",", ":"), allow_nan=False)
    head = {"format": FORMAT, "version": VERSION, "checksum": _checksum(content)}
    return json.dumps(head)[:-1] + f', "content": {content}}}\n'


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
    if isinstance(version, int) and version > VERSION:
        what = f"{where} has format version {version}; this loaderkit reads {VERSION}."
        why = "a newer loaderkit wrote the cache"
        raise CacheVersionError(what, why=why, fix="pip install --upgrade loaderkit")
    if version != VERSION:
        raise _damaged(where, f"its version is {version!r}, not {VERSION}")
    content = outer.get("content")
    again = json.dumps(content, separators=(",", ":"))
    if outer.get("checksum") != _checksum(again):
        raise _damaged(where, "its checksum is not that of its content")
    return manifest_from(content, where=where)


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
        return Manifest(
            shards=tuple(shard_from(each) for each in _list(fields["shards"])),
            structure=_record(fields["structure"]),
            fingerprint=_record(fields["fingerprint"]),
            made_with={k: _text(v) for k, v in _record(fields["made_with"]).items()},
            compression=_name(fields["compression"]),
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
    for name, array in shard.arrays.items():
        if array.offset is not None and array.offset + array.nbytes > shard.bytes:
            msg = f"array {name!r} ends beyond the {shard.bytes} bytes of {shard.file}"
            raise ValueError(msg)
    for name, column in shard.columns.items():
        _check_column(shard, name, column)
    return shard


def _check_column(shard: Shard, name: str, column: Column) -> None:
    named = [column.values, column.offsets, column.shapes, column.rows]
    if missing := [n for n in named if n is not None and n not in shard.arrays]:
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
    index = [shard.arrays[n] for n in named[1:] if n]
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
    array = Array(dtype, shape, None if offset is None else _count(offset))
    if len(shape) > 32 or array.nbytes >= 1 << 62:
        msg = f"an array of shape {shape} cannot be"
        raise ValueError(msg)
    if array.offset is not None and array.offset % ALIGNMENT:
        msg = f"an array starts at byte {array.offset}, no multiple of {ALIGNMENT}"
        raise ValueError(msg)
    return array


def _column(content: object) -> Column:
    fields = _record(content)
    index = (_name(fields[part]) for part in ("offsets", "shapes", "rows"))
    return Column(_text(fields["values"]), *index)


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
