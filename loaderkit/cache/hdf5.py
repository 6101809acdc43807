"""Shards as ordinary HDF5 files: written here, and read back where compressed.

A contiguous dataset is laid out by libhdf5 and filled by plain writes at its byte
offset: a full disk is then an ``OSError`` with a name, not a file handle that libhdf5
cannot close, and readers need no libhdf5 at all.  Compressed values are written and
read through h5py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import xxhash

from loaderkit.cache.columns import ShardBuffer, Shelf
from loaderkit.cache.layout import ALIGNMENT, Array, Shard
from loaderkit.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

_CHUNK_BYTES = 128 << 10
"""Uncompressed bytes of a chunk: what reading one sample decompresses at least."""
_HASH_BYTES = 1 << 20


def write_shard(
    buffer: ShardBuffer, path: Path, *, compression: str | None = None
) -> Shard:
    """Write the buffered samples as one HDF5 file, durably, under its final name.

    Args:
        buffer: The samples, at least one.
        path: Where the file goes; it appears there whole or not at all.
        compression: A name from ``filters()``; None maps the values instead.

    Returns:
        The description of the file for the manifest.

    Raises:
        CacheError: The disk is full or the folder cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        arrays, shelf = _write(buffer, partial, filters(compression))
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        size, digest = partial.stat().st_size, file_digest(partial)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        what = f"{path} could not be written: {error.strerror or error}."
        why = f"the shard needs about {buffer.nbytes:,} bytes; finished shards are kept"
        fix = "free the space (or choose another cache folder) and run the same again"
        raise CacheError(what, why=why, fix=fix) from error
    return Shard(path.name, buffer.samples, size, digest, arrays, shelf.columns)


def filters(name: str | None) -> Mapping[str, Any]:
    """Look up what h5py needs to know for a compression by name.

    Args:
        name: "gzip", "lzf", a filter class of hdf5plugin such as "Zstd", or None.

    Returns:
        Keyword arguments of ``create_dataset``; empty for None.

    Raises:
        ValueError: There is no such compression here.
    """
    if name is None:
        return {}
    if name in {"gzip", "lzf"}:
        return {"compression": name, "shuffle": True}
    try:
        import hdf5plugin
    except ImportError:
        known: dict[str, Any] = {}
    else:
        known = {each.__name__.lower(): each for each in hdf5plugin.get_filters()}
    if name.lower() in known:
        return dict(known[name.lower()]())
    names = ", ".join(["gzip", "lzf", *sorted(known)])
    more = "" if known else ' (more with: pip install "loaderkit[hdf5plugin]")'
    msg = f"compression must be None or one of {names}{more}, got {name!r}"
    raise ValueError(msg)


def file_digest(path: Path) -> str:
    """Hash a whole file: xxh3-128 in hexadecimal."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_HASH_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _write(
    buffer: ShardBuffer, path: Path, options: Mapping[str, Any]
) -> tuple[dict[str, Array], Shelf]:
    shelf, arrays = Shelf(), {}
    later: dict[str, NDArray[Any]] = {}
    with h5py.File(
        path, "w", alignment_threshold=1, alignment_interval=ALIGNMENT
    ) as file:
        for column, parts in buffer.columns():
            for name, array in shelf.place(column, parts).items():
                if options and _worth_packing(name, array):
                    _write_chunked(file, name, array, options)
                    arrays[name] = Array(array.dtype.str, array.shape, None)
                else:
                    _reserve(file, name, array)
                    later[name] = array
        for name, array in later.items():
            offset = file[name].id.get_offset() if array.size else 0
            arrays[name] = Array(array.dtype.str, array.shape, offset)
    with path.open("r+b") as raw:
        for name, array in later.items():
            raw.seek(arrays[name].offset or 0)
            if array.size:
                raw.write(np.ascontiguousarray(array).data)
    return arrays, shelf


def _worth_packing(name: str, array: NDArray[Any]) -> bool:
    """Keep what every batch looks up (offsets, increments) mapped."""
    column, _, part = name.rpartition("/")
    return part == "values" and "@" not in column and array.size > 0


def _reserve(file: h5py.File, name: str, array: NDArray[Any]) -> None:
    """Make a contiguous dataset that has its place in the file, but no values yet."""
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plan.set_obj_track_times(False)
    parents = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    parents.set_create_intermediate_group(True)
    space = h5py.h5s.create_simple(array.shape)
    kind = h5py.h5t.py_create(array.dtype, logical=True)
    h5py.h5d.create(file.id, name.encode(), kind, space, plan, parents)


def _write_chunked(
    file: h5py.File, name: str, array: NDArray[Any], options: Mapping[str, Any]
) -> None:
    row_bytes = max(1, array.nbytes // array.shape[0])
    rows = min(array.shape[0], max(1, _CHUNK_BYTES // row_bytes))
    chunks = (rows, *array.shape[1:])
    file.create_dataset(name, data=array, chunks=chunks, track_times=False, **options)


def joined_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Turn ``[m, k, *rest]`` into ``[m * k, *rest]``."""
    return (shape[0] * shape[1], *shape[2:])


class ChunkedValues:
    """Compressed values of one column, read span by span through h5py.

    The file is opened by the process that reads: a handle is never carried over a
    fork, where two processes would share one file position and one chunk cache.
    """

    def __init__(self, path: Path, name: str, array: Array, *, joined: bool) -> None:
        self._path, self._name = path, name
        self.dtype = np.dtype(array.dtype)
        self._each = array.shape[1] if joined else 1
        self.shape = joined_shape(array.shape) if joined else array.shape
        self._open_in: int | None = None
        self._dataset: Any = None

    def __getitem__(self, span: slice) -> NDArray[Any]:
        """Decompress the rows of a span into a new array."""
        if self._open_in != os.getpid():
            self._dataset, self._open_in = self._opened(), os.getpid()
        try:
            rows: NDArray[Any] = self._dataset[self._samples(span)]
        except OSError as error:
            what = f"{self._name!r} of {self._path} could not be decompressed: {error}."
            why = "the file is damaged, or its compression filter is not installed"
            fix = 'loaderkit verify CACHE; pip install "loaderkit[hdf5plugin]"'
            raise CacheError(what, why=why, fix=fix) from error
        cut: NDArray[Any] = rows.reshape(span.stop - span.start, *self.shape[1:])
        return cut

    def _samples(self, span: slice) -> slice:
        each = max(1, self._each)  # spans begin and end with a sample
        return slice(span.start // each, span.stop // each)

    def _opened(self) -> Any:
        import contextlib

        with contextlib.suppress(ImportError):
            import hdf5plugin  # noqa: F401 -- registers its filters with libhdf5
        try:
            return h5py.File(self._path, "r", locking=False)[self._name]
        except (OSError, KeyError) as error:
            what = f"{self._path} could not be opened as HDF5: {error}."
            fix = "loaderkit verify CACHE, then pack it again"
            raise CacheError(what, why="the file is damaged", fix=fix) from error
