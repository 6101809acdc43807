"""How many bytes a cache has on disk, array by array, and how fast its disk is."""

from __future__ import annotations

import mmap
import os
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import Self

from loaderkit.cache.layout import LEAST_SAVED_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from loaderkit.cache.manifest import Manifest

PAGE_BYTES = 4096
"""What the disk gives at least, and the page cache keeps."""
_STRETCH_PAGES = 2048
"""What is asked for at once to measure reading in order: 8 MiB, as a batch of large
graphs has."""
_PAGES_AT_RANDOM = 128
"""Pages that are asked for at once to measure reading at random: a batch of small
graphs has more, one of large graphs fewer."""
_MEASURE_S = 0.04
"""Each of the two is repeated for so long, or until the files are read once."""
_MEASURED_FILES = 4
"""The largest ones.  Chosen: the page cache may have one of them whole."""
_TRIED_BYTES = 256 << 10
"""So much is compressed to see what compression would bring; it takes 10 ms."""


@dataclass(frozen=True)
class StoredArrays:
    """What of a cache lies on local disk."""

    samples: int
    """Samples of the whole cache."""
    file_bytes: int
    """Bytes of its files."""
    array_bytes: tuple[int, ...]
    """Bytes of each array over all files, once decompressed."""
    disk_bytes: tuple[float, ...]
    """What each array has of the bytes of the files.  Compressed arrays are taken to
    compress equally well: the manifest does not say more."""
    read_bytes: tuple[float, ...]
    """What one value of each array makes the disk give: the value's own bytes, or its
    chunk where arrays are compressed."""
    is_compressed: bool
    """Whether the files hold compressed chunks."""
    free_bytes: int
    """What the system may use for pages of files."""
    files: tuple[Path, ...]
    """Some of the files, for :func:`measure_disk`."""

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of all arrays, once decompressed."""
        return sum(self.array_bytes)


@dataclass(frozen=True)
class DiskSpeed:
    """What a disk was seen to give."""

    bytes_per_s: float
    """In order, megabytes asked for at once."""
    pieces_per_s: float
    """Pages anywhere, many asked for at once."""
    compressed_share: float
    """Part of its size that a piece of a file takes, compressed by zlib at level 1; 1
    where that is so little less that the values would stay as they are."""
    measured_s: float
    """Time that measuring took."""


def stored_arrays(manifest: Manifest, folder: Path, *, free_bytes: int) -> StoredArrays:
    """Add up what the manifest says of each array.

    Args:
        manifest: Of a cache on local disk.
        folder: Where its files lie.
        free_bytes: What the system may use for pages of files.

    Returns:
        The sums; nothing is read.
    """
    samples, file_bytes = manifest.samples, manifest.bytes
    array_bytes: dict[str, int] = {}
    chunked_bytes: dict[str, int] = {}
    chunk_bytes: dict[str, int] = {}
    for group in manifest.shards.groups:
        for name, array in group.schema.arrays:
            nbytes = int(group.nbytes(name).sum())
            array_bytes[name] = array_bytes.get(name, 0) + nbytes
            if array.chunk_index is not None:
                chunked_bytes[name] = chunked_bytes.get(name, 0) + nbytes
                largest = int(group.chunk_bytes(name).max())
                chunk_bytes[name] = max(chunk_bytes.get(name, 0), largest)

    # A compressed cache has arrays that are mapped as they are; some of them only in
    # some of its shards.
    saved_bytes = max(0, sum(array_bytes.values()) - file_bytes)
    saved_share = min(1.0, saved_bytes / max(1, sum(chunked_bytes.values())))

    disk_bytes, read_bytes = [], []
    for name, nbytes in array_bytes.items():
        chunked_share = chunked_bytes.get(name, 0) / max(1, nbytes)
        share = 1 - saved_share * chunked_share
        disk_bytes.append(nbytes * share)
        value_bytes = nbytes / max(1, samples)
        # A compressed value is read with its whole chunk.
        read_bytes.append(max(value_bytes, chunk_bytes.get(name, 0)) * share)

    shards = manifest.shards
    largest_shards = np.argsort(shards.bytes)[::-1][:_MEASURED_FILES].tolist()
    return StoredArrays(
        samples=samples,
        file_bytes=file_bytes,
        array_bytes=tuple(array_bytes.values()),
        disk_bytes=tuple(disk_bytes),
        read_bytes=tuple(read_bytes),
        is_compressed=bool(chunk_bytes),
        free_bytes=free_bytes,
        files=tuple(folder / shards.file(shard).file for shard in largest_shards),
    )


def measure_disk(files: Sequence[Path]) -> DiskSpeed | None:
    """Read some of the files as batches do, past what the page cache has of them.

    Args:
        files: Of a cache that is larger than memory: what is dropped from the page
            cache for the measurement would not have stayed there.

    Returns:
        What the disk gave; None where the system does not say which pages it shall
        drop (macOS, Windows), or a file cannot be read.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    begun = time.perf_counter()
    try:
        in_order, at_random = _Reading(), _Reading()
        for file in files:
            with _MappedFile(file) as mapped:
                _read_in_order(mapped, in_order)
                _read_at_random(mapped, at_random)
        compressed_share = _compressed_share(files[0])
    except (OSError, ValueError):  # ValueError: a file is empty
        return None
    return DiskSpeed(
        bytes_per_s=in_order.pages * PAGE_BYTES / max(in_order.seconds, 1e-9),
        pieces_per_s=at_random.pages / max(at_random.seconds, 1e-9),
        compressed_share=compressed_share,
        measured_s=time.perf_counter() - begun,
    )


@dataclass
class _Reading:
    """What was read so far, and how long it took."""

    pages: int = 0
    seconds: float = 0.0

    @property
    def is_enough(self) -> bool:
        return self.seconds > _MEASURE_S


class _MappedFile:
    """A file that is read through a map, page by page, as a cache's are."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDONLY)
        try:
            self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            os.close(self._descriptor)
            raise
        self._map.madvise(mmap.MADV_RANDOM)
        self.pages = len(self._map) // PAGE_BYTES

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()
        os.close(self._descriptor)

    def drop(self, first: int, pages: int) -> None:
        """Have the system forget pages, so that it must read them from disk."""
        start, nbytes = first * PAGE_BYTES, pages * PAGE_BYTES
        self._map.madvise(mmap.MADV_DONTNEED, start, nbytes)
        os.posix_fadvise(self._descriptor, start, nbytes, os.POSIX_FADV_DONTNEED)

    def ask(self, first: int, pages: int) -> None:
        """Tell the system that pages are going to be read."""
        self._map.madvise(mmap.MADV_WILLNEED, first * PAGE_BYTES, pages * PAGE_BYTES)

    def touch(self, first: int, pages: int) -> None:
        """Read a byte of each page, which waits for the disk."""
        stop = (first + pages) * PAGE_BYTES
        self._map[first * PAGE_BYTES : stop : PAGE_BYTES]


def _read_in_order(mapped: _MappedFile, reading: _Reading) -> None:
    for first in range(0, mapped.pages, _STRETCH_PAGES):
        if reading.is_enough:
            return
        pages = min(_STRETCH_PAGES, mapped.pages - first)
        mapped.drop(first, pages)
        begun = time.perf_counter()
        mapped.ask(first, pages)
        mapped.touch(first, pages)
        # When memory is full, a page goes for each one that comes.
        mapped.drop(first, pages)
        reading.seconds += time.perf_counter() - begun
        reading.pages += pages


def _read_at_random(mapped: _MappedFile, reading: _Reading) -> None:
    order = np.random.default_rng(0).permutation(mapped.pages).tolist()
    for start in range(0, len(order), _PAGES_AT_RANDOM):
        if reading.is_enough:
            return
        pages = order[start : start + _PAGES_AT_RANDOM]
        for page in pages:
            mapped.drop(page, 1)
        begun = time.perf_counter()
        for page in pages:
            mapped.ask(page, 1)
        for page in pages:
            mapped.touch(page, 1)
            mapped.drop(page, 1)
        reading.seconds += time.perf_counter() - begun
        reading.pages += len(pages)


def _compressed_share(file: Path) -> float:
    with file.open("rb") as stream:
        # Values: the beginning holds HDF5's notes, and zeros up to a page.
        stream.seek(file.stat().st_size // 2)
        content = stream.read(_TRIED_BYTES)
    share = len(zlib.compress(content, 1)) / max(1, len(content))
    return share if share <= 1 - LEAST_SAVED_SHARE else 1.0
