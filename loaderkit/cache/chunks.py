"""Compressed values, decompressed chunk by chunk as they are read.

A chunk holds a fixed number of rows.  Where it lies says an index in the shard; the
library of its compression undoes it (codecs.py), or where that is not installed
libhdf5's filters do.
"""

from __future__ import annotations

import os
import threading
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import h5py
import numpy as np

from loaderkit.cache.codecs import find_decompressor, stated_bytes
from loaderkit.cache.gather import expand_ranges
from loaderkit.cache.hdf5 import filters, joined_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from loaderkit.array_types import Ints
    from loaderkit.cache.layout import Array

    Bytes: TypeAlias = bytes | memoryview

_MAX_RATIO = {"gzip": 1032, "lzf": 88}
"""How many bytes one byte can swell to: as zlib's technical notes say; and 3 bytes of
lzf repeat at most 264."""
_RECENT_CHUNK_BYTES = 1 << 20
"""Decompressed chunks of a column that are kept for the next batch: as many as libhdf5
keeps of a dataset."""
_MAX_BYTES_AT_ONCE = 2 << 20
"""Up to so many bytes of chunks a batch decompresses at once.  More leave the
processor's cache before they are copied to their place (measured: W2 in LZ4 then had
0.28 of the uncompressed rate instead of 0.40)."""


@dataclass(frozen=True)
class ChunkFormat:
    """What the chunks of one array look like."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Shape of a chunk, uncompressed; the last one of an array is as large."""
    compression: str

    @property
    def nbytes(self) -> int:
        """Bytes of a chunk, uncompressed."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class ChunkDecoder:
    """Decompress single chunks: with the library of their compression, or libhdf5."""

    def __init__(self, chunk: ChunkFormat) -> None:
        self._chunk, self._nbytes = chunk, chunk.nbytes
        compression = chunk.compression
        self._decompress = find_decompressor(compression)
        # HDF5's filters of a chunk in their order, a bit of its mask for each.
        self._has_shuffle = compression in {"gzip", "lzf"}
        self._compressor_bit = 0b10 if self._has_shuffle else 0b01
        self._libhdf5 = _LibHdf5Filters(chunk)

    def decode(self, compressed: memoryview, filter_mask: int) -> Bytes:
        """Decompress a chunk.

        Args:
            compressed: Its bytes in the shard.
            filter_mask: HDF5's mask of the filters that were left out.

        Returns:
            The bytes of its values, exactly as many as a chunk has.

        Raises:
            OSError: They are not what the filters made, or a filter is missing.
            ValueError: They are not what the filters made.
        """
        self._check_ratio(compressed)
        content: Bytes
        if filter_mask & self._compressor_bit:
            # What a filter could not make smaller is stored as it is.
            content = compressed
        elif self._decompress is not None:
            content = self._decompress(compressed, self._nbytes)
        else:
            content = self._libhdf5.undo(compressed, filter_mask)
        if len(content) != self._nbytes:
            msg = f"it swells to {len(content):,} bytes or more, not {self._nbytes:,}"
            raise ValueError(msg)
        if not self._has_shuffle or filter_mask & 0b01:
            return content
        # HDF5 stores the first bytes of all values, then their second bytes, and so on.
        by_weight = np.frombuffer(content, np.uint8)
        by_weight = by_weight.reshape(self._chunk.dtype.itemsize, -1)
        values: bytes = by_weight.T.tobytes()
        return values

    def _check_ratio(self, compressed: memoryview) -> None:
        """Refuse a chunk that is too small to become what it shall, before it is read.

        Raises:
            ValueError: It is.
        """
        ratio = _MAX_RATIO.get(self._chunk.compression)
        if ratio is not None and self._nbytes > ratio * len(compressed):
            size = f"{self._nbytes:,} bytes"
            msg = f"{len(compressed):,} bytes cannot swell to {size}"
            raise ValueError(msg)


class _LibHdf5Filters(threading.local):
    """Undo the filters of single chunks with libhdf5, and with nothing else of it.

    A chunk is put into a file in memory that this process made, and read from there: no
    byte of a shard but the chunk itself ever reaches libhdf5.  Each thread has a file
    of its own, so that none reads what another just put there.
    """

    def __init__(self, chunk: ChunkFormat) -> None:
        self._chunk = chunk
        self._process: int | None = None
        self._dataset: h5py.Dataset | None = None

    def undo(self, compressed: memoryview, filter_mask: int) -> memoryview:
        """Undo all filters of a chunk; of lzf, all but HDF5's shuffle.

        Raises:
            OSError: They are not what the filters made, or a filter is missing.
            ValueError: They are not what the filters made.
        """
        compression = self._chunk.compression
        corner = (0,) * len(self._chunk.shape)
        if compression == "lzf":
            # lzf makes room for a whole chunk; libhdf5's shuffle only for what came
            # out, and then copies from beyond its end.  So that is not undone here.
            corner, filter_mask = (0,), 0
        else:
            # libhdf5 copies a whole chunk out of what a filter returned, even from
            # beyond its end: a chunk that says it is smaller ends the process.
            stated = stated_bytes(compression, bytes(compressed[:64]))
            if stated != self._chunk.nbytes:
                msg = f"it swells to {stated:,} bytes, not {self._chunk.nbytes:,}"
                raise ValueError(msg)

        if self._dataset is None or self._process != os.getpid():
            # A handle is never carried over a fork: libhdf5's state is not made for it.
            self._dataset, self._process = self._new_dataset(), os.getpid()
        self._dataset.id.write_direct_chunk(corner, bytes(compressed), filter_mask)
        decoded = np.empty(self._dataset.shape, self._dataset.dtype)
        # What ``self._dataset[...]`` does, without 50 us of looking at what was asked.
        self._dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, decoded)
        content: memoryview = decoded.reshape(-1).view(np.uint8).data
        return content

    def _new_dataset(self) -> h5py.Dataset:
        chunk = self._chunk
        # libhdf5 tells files in memory apart by their names alone.
        file = h5py.File(uuid.uuid4().hex, "w", driver="core", backing_store=False)
        if chunk.compression == "lzf":
            # As bytes, and without a shuffle; see ``undo``.
            size = (chunk.nbytes,)
            return file.create_dataset(
                "chunk", size, np.uint8, chunks=size, compression="lzf"
            )
        return file.create_dataset(
            "chunk",
            chunk.shape,
            chunk.dtype,
            chunks=chunk.shape,
            **filters(chunk.compression),
        )


class ChunkedValues:
    """Compressed values of one column in one shard.

    Args:
        mapped: The file of the shard ``[bytes]``.
        array: What the manifest says of the values.
        index: Where each chunk lies, how many bytes it has, and its mask of filters
            ``[chunks, 3]``.
        compression: What the chunks are compressed with.
        joined: See ``[m, k, *rest]`` as ``[m * k, *rest]``.
        damaged: Makes the error for a chunk that is none.
    """

    def __init__(
        self,
        mapped: NDArray[np.uint8],
        array: Array,
        index: NDArray[np.int64],
        compression: str,
        *,
        joined: bool,
        damaged: Callable[[str], Exception],
    ) -> None:
        self._mapped = memoryview(mapped.data)
        self._index = index
        self._damaged = damaged
        self.dtype = np.dtype(array.dtype)
        self.shape = joined_shape(array.shape) if joined else array.shape
        # A chunk is of rows as they are stored; what is asked for are rows of samples
        # ``[k, *rest]`` end to end, where those are joined.
        chunk_rows = array.chunk_rows or 1
        shape = (chunk_rows, *array.shape[1:])
        chunk = ChunkFormat(self.dtype, shape, compression.lower())
        self._chunk_bytes = chunk.nbytes
        if joined:
            chunk_rows *= array.shape[1]
        self._chunk_rows = max(1, chunk_rows)
        self._decoder = ChunkDecoder(chunk)
        self._recent: dict[int, Bytes] = {}

    def __getitem__(self, span: slice) -> NDArray[Any]:
        """Decompress the rows of a span."""
        first_chunk = span.start // self._chunk_rows
        past_chunk = max(first_chunk, -(-span.stop // self._chunk_rows))
        rows = self._decompress_chunks(
            range(first_chunk, past_chunk), self._index[first_chunk:past_chunk]
        )
        first_row = first_chunk * self._chunk_rows
        return rows[span.start - first_row : span.stop - first_row]

    def decompress(
        self, starts: Ints, lengths: Ints
    ) -> tuple[NDArray[Any], Ints] | None:
        """Decompress the chunks of some spans of rows, each chunk once.

        Args:
            starts: First row of each span ``[k]``.
            lengths: Rows of each span ``[k]``.

        Returns:
            The rows of these chunks, end to end, and the first of each span there
            ``[k]``; None where they are so many bytes that one span after the other is
            quicker.
        """
        first_chunks = starts // self._chunk_rows
        last_chunks = (starts + lengths - 1) // self._chunk_rows
        chunks = np.unique(expand_ranges(first_chunks, last_chunks - first_chunks + 1))
        if len(chunks) * self._chunk_bytes > _MAX_BYTES_AT_ONCE:
            return None
        rows = self._decompress_chunks(
            chunks.tolist(), self._index.take(chunks, axis=0)
        )
        # Chunks that follow each other in the column do so here.
        first_rows = chunks.searchsorted(first_chunks) * self._chunk_rows
        return rows, first_rows + starts % self._chunk_rows

    def _decompress_chunks(
        self, chunks: Sequence[int], locations: Ints
    ) -> NDArray[Any]:
        """Decompress chunks into one array.

        Args:
            chunks: Their numbers, in order.
            locations: Offset, size and mask of filters of each, as the index has them
                ``[chunks, 3]``.
        """
        recent = self._recent
        contents = []
        for chunk, location in zip(chunks, locations.tolist(), strict=True):
            content = recent.get(chunk)
            if content is None:
                content = self._decode_chunk(chunk, *location)
            contents.append(content)
        most_recent = max(1, _RECENT_CHUNK_BYTES // max(1, self._chunk_bytes))
        # Replaced and never changed: other threads may be reading it.
        self._recent = dict(
            zip(chunks[-most_recent:], contents[-most_recent:], strict=True)
        )
        rows = np.frombuffer(b"".join(contents), self.dtype)
        return rows.reshape(len(chunks) * self._chunk_rows, *self.shape[1:])

    def _decode_chunk(self, chunk: int, offset: int, size: int, mask: int) -> Bytes:
        lies_in_file = offset >= 0 and size > 0 and offset + size <= len(self._mapped)
        if not lies_in_file or not 0 <= mask < 1 << 32:
            raise self._damaged(f"chunk {chunk} lies outside the file")
        try:
            return self._decoder.decode(self._mapped[offset : offset + size], mask)
        except (OSError, ValueError, RuntimeError) as error:
            why = f"chunk {chunk} could not be decompressed ({error})"
            raise self._damaged(why) from error
