"""Shards as ordinary HDF5 files, laid out by libhdf5 and written by us.

libhdf5 lays a shard out in memory: where each dataset lies, what describes it.  The
bytes reach the disk by plain writes, since libhdf5 does not survive a disk that fills
up under it: it raises what has no name, cannot close the file, or ends the process.

Readers need no libhdf5 to find things either: the manifest says where they lie, for
compressed chunks an index does.  A file made by a stranger may hold links to other
files, external storage, or metadata that crashes libhdf5; none of it is looked at.
"""

from __future__ import annotations

import bz2
import contextlib
import io
import os
import uuid
import zlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import h5py
import numpy as np

from loaderkit.cache.columns import ArrayDeduplicator, ShardBuffer
from loaderkit.cache.durable import not_written, publish, remove, write_file, write_text
from loaderkit.cache.files import digest_of
from loaderkit.cache.layout import (
    ALIGNMENT,
    WRITTEN_SUFFIX,
    Array,
    Column,
    Shard,
    shard_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from numpy.typing import NDArray

_PLUGINS = {"bitshuffle", "blosc", "blosc2", "bzip2", "lz4", "zstd"}
"""Filters of hdf5plugin that lose nothing, and whose chunks say how large they are."""
_MAX_RATIO = {"gzip": 1032, "lzf": 88}
"""How many bytes one byte can swell to: as zlib's technical notes say; and 3 bytes of
lzf repeat at most 264."""
_CHUNK_BYTES = 128 << 10
"""Uncompressed bytes of a chunk: what reading one sample decompresses at least."""
_RECENT_CHUNK_BYTES = 1 << 20
"""Decompressed chunks of a column that are kept: as many as libhdf5 keeps of a
dataset."""


class _Alignment(NamedTuple):
    """Arrays of so many bytes and more begin at multiples of an interval."""

    from_bytes: int
    interval: int


_ALIGNMENTS = (
    _Alignment(0, ALIGNMENT),
    _Alignment(512, 4096),
    _Alignment(1 << 20, 64 << 10),
)
"""Arrays from a size on begin at multiples of so many bytes of the file: whole pages,
so that those of many shards can be mapped side by side (placement.py).  64 KiB is the
page of some ARM machines, 16 KiB Apple's.  What this wastes is a quarter of a shard of
36 molecules, and 0.3 % of one of 256 MiB."""


def write_shard(
    buffer: ShardBuffer,
    folder: Path,
    *,
    number: int,
    compression: str | None,
    scratch: Path,
    make_note: Callable[[Shard], str],
) -> Shard:
    """Write the buffered samples as one HDF5 file, durably, under its final name.

    Args:
        buffer: The samples, at least one.
        folder: The cache's folder, where the file goes.
        number: Which shard of the cache it is, from 0.
        compression: A name from ``filters()``; None maps the values instead.
        scratch: A folder of the same disk for what is not finished.
        make_note: Makes the text that tells a later run of the shard.  It is on the
            disk before the shard has its name, so that no shard lies about unknown.

    Returns:
        The description of the file for the manifest.

    Raises:
        CacheError: A system call failed, such as on a full disk; nothing is left.
    """
    # Several processes may be writing shards there, even this one.
    own_name = f"{number:05}-{uuid.uuid4().hex}"
    partial = scratch / f"{own_name}.partial"
    try:
        layout = lay_out(buffer, filters(compression))
        digest = _write_layout(layout, partial)
        file = folder / shard_name(number, digest)
        shard = Shard(
            file=file.name,
            samples=buffer.samples,
            bytes=partial.stat().st_size,
            xxh3=digest,
            arrays=layout.arrays,
            columns=layout.columns,
        )
        # A task that is run again, with other samples than the first time, replaces the
        # note: this still names the file that the first run wrote.
        (scratch / f"{file.name}{WRITTEN_SUFFIX}").touch()
        note = scratch / f"{number:05}.json"
        note_partial = scratch / f"{own_name}-note.partial"
        write_text(note, make_note(shard), partial=note_partial)
        publish(partial, file)
    except OSError as error:
        # What went wrong counts, not that it could not be tidied up.
        with contextlib.suppress(OSError):
            remove(partial)
        raise not_written(folder / f"shard {number}", error) from error
    return shard


class _PlacedBytes(NamedTuple):
    """Bytes, and the byte of the file where they start."""

    offset: int
    content: bytes


class _PlacedValues(NamedTuple):
    """Values of an array, and the byte of the file where they start."""

    offset: int
    array: NDArray[Any]


@dataclass
class Layout:
    """A shard before it is written: what goes where."""

    arrays: dict[str, Array] = field(default_factory=dict)
    """Every array of the shard, as the manifest describes it."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    metadata: list[_PlacedBytes] = field(default_factory=list)
    """What libhdf5 wrote, the later over the earlier."""
    values: list[_PlacedValues] = field(default_factory=list)
    """Values of the mapped arrays."""
    size: int = 0
    """Bytes of the file."""


def lay_out(buffer: ShardBuffer, options: Mapping[str, Any]) -> Layout:
    """Decide where everything in a shard lies.

    Args:
        buffer: The samples; each column is let go as it passes.
        options: What ``filters`` gave; empty maps the values.

    Returns:
        The layout; it holds the values.
    """
    layout, deduplicator, memory = Layout(), ArrayDeduplicator(), _MemoryFile()
    mapped: dict[str, NDArray[Any]] = {}
    with h5py.File(
        memory, "w", alignment_threshold=1, alignment_interval=ALIGNMENT
    ) as file:
        for column, arrays in buffer.columns():
            for name, array in deduplicator.add(column, arrays).items():
                if not options or not _is_worth_compressing(name, array):
                    mapped[name] = array
                    continue
                chunk_rows = _rows_of_chunk(array)
                index_name = f"{name}.chunks"
                mapped[index_name] = _write_chunks(
                    file, name, array, chunk_rows, options
                )
                layout.arrays[name] = Array(
                    array.dtype.str,
                    array.shape,
                    offset=None,
                    chunk_rows=chunk_rows,
                    chunk_index=index_name,
                )

    # What is mapped gets its place behind all chunks, whose sizes nobody knew before.
    _reserve_arrays(memory, mapped)
    with h5py.File(memory, "r") as file:
        for name, array in mapped.items():
            # libhdf5 gives no place to an array without values.
            offset = file[name].id.get_offset() if array.size else 0
            layout.arrays[name] = Array(array.dtype.str, array.shape, offset)
            if array.size:
                layout.values.append(_PlacedValues(offset, array))
    layout.columns = deduplicator.columns
    layout.metadata, layout.size = memory.writes, memory.size
    return layout


def filters(name: object) -> Mapping[str, Any]:
    """Look up what h5py needs to know for a compression by name.

    Args:
        name: "gzip", "lzf", a lossless filter of hdf5plugin such as "Zstd", or None.

    Returns:
        Keyword arguments of ``create_dataset``; empty for None.

    Raises:
        ValueError: There is no such compression here.
    """
    if name is None:
        return {}
    lower_name = name.lower() if isinstance(name, str) else ""
    if lower_name in {"gzip", "lzf"}:
        return {"compression": lower_name, "shuffle": True}
    plugins = _lossless_plugins()
    if lower_name in plugins:
        return dict(plugins[lower_name]())
    names = ", ".join(["gzip", "lzf", *sorted(plugins)])
    hint = "" if plugins else ' (more with: pip install "loaderkit[hdf5plugin]")'
    msg = f"compression must be None or one of {names}{hint}, got {name!r}"
    raise ValueError(msg)


def _lossless_plugins() -> Mapping[str, Any]:
    """List the filters of hdf5plugin that lose nothing, by name in small letters."""
    try:
        # Importing it registers its filters with libhdf5: only where one is asked for.
        import hdf5plugin
    except ImportError:
        return {}
    plugins = {plugin.__name__.lower(): plugin for plugin in hdf5plugin.get_filters()}
    return {name: plugins[name] for name in _PLUGINS & set(plugins)}


def joined_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Turn ``[m, k, *rest]`` into ``[m * k, *rest]``."""
    return (shape[0] * shape[1], *shape[2:])


class _MemoryFile(io.RawIOBase):
    """A file in memory that holds only what was written to it.

    libhdf5 leaves out the values of arrays that it only makes room for, so a shard of
    256 MiB takes a few KiB here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[_PlacedBytes] = []
        self.size = 0
        self._position = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}
        self._position = start[whence] + offset
        return self._position

    def write(self, data: Any) -> int:
        content = bytes(data)
        self.writes.append(_PlacedBytes(self._position, content))
        self._position += len(content)
        self.size = max(self.size, self._position)
        return len(content)

    def readinto(self, buffer: Any) -> int:
        """Read back, as libhdf5 does now and then with its own metadata."""
        start, stop = self._position, min(self._position + len(buffer), self.size)
        out = bytearray(max(0, stop - start))
        for offset, content in self.writes:
            low, high = max(offset, start), min(offset + len(content), stop)
            if low < high:
                out[low - start : high - start] = content[low - offset : high - offset]
        buffer[: len(out)] = out
        self._position += len(out)
        return len(out)

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size


def _write_layout(layout: Layout, partial: Path) -> str:
    """Write a laid-out shard to the disk; give its checksum."""

    def write(raw: BinaryIO) -> None:
        for placed in layout.metadata:
            raw.seek(placed.offset)
            raw.write(placed.content)
        for values in layout.values:
            raw.seek(values.offset)
            raw.write(np.ascontiguousarray(values.array).data)
        raw.truncate(layout.size)
        raw.flush()
        digests.append(digest_of(raw.fileno()))

    digests: list[str] = []
    write_file(partial, write)
    return digests[0]


def _is_worth_compressing(name: str, array: NDArray[Any]) -> bool:
    """Keep what every batch looks up (offsets, increments) mapped."""
    column, _, part = name.rpartition("/")
    return part == "values" and "@" not in column and array.size > 0


def _rows_of_chunk(array: NDArray[Any]) -> int:
    row_bytes = max(1, array.nbytes // array.shape[0])
    return int(min(array.shape[0], max(1, _CHUNK_BYTES // row_bytes)))


def _reserve_arrays(memory: _MemoryFile, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Give arrays their places in a file, but no values yet."""
    for alignment in _ALIGNMENTS:
        # libhdf5 has one alignment for everything while a file is open, its own notes
        # from that size on too: so they come in small blocks.
        with h5py.File(
            memory,
            "r+",
            alignment_threshold=max(1, alignment.from_bytes),
            alignment_interval=alignment.interval,
            meta_block_size=256,
        ) as file:
            for name, array in arrays.items():
                if _alignment_of_array(array) == alignment:
                    _reserve_array(file, name, array)


def _alignment_of_array(array: NDArray[Any]) -> _Alignment:
    return next(
        alignment
        for alignment in reversed(_ALIGNMENTS)
        if array.nbytes >= alignment.from_bytes
    )


def _reserve_array(file: h5py.File, name: str, array: NDArray[Any]) -> None:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    # A place now, and no zeros in it: the values are written by ``_write_layout``.
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    # Equal samples make equal files, whenever they are packed.
    creation.set_obj_track_times(False)
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    space = h5py.h5s.create_simple(array.shape)
    dtype = h5py.h5t.py_create(array.dtype, logical=True)
    h5py.h5d.create(file.id, name.encode(), dtype, space, creation, link)


def _write_chunks(
    file: h5py.File,
    name: str,
    array: NDArray[Any],
    chunk_rows: int,
    options: Mapping[str, Any],
) -> NDArray[np.int64]:
    """Compress an array into a file in memory.

    Returns:
        Where its chunks lie ``[chunks, 3]``, as the manifest's ``chunk_index`` says.
    """
    dataset = file.create_dataset(
        name,
        data=array,
        chunks=(chunk_rows, *array.shape[1:]),
        track_times=False,
        **options,
    )
    file.flush()  # before that, chunks are in libhdf5's cache and have no place
    chunk_count = -(-array.shape[0] // chunk_rows)
    index = np.zeros((chunk_count, 3), "<i8")

    def note_chunk(chunk: h5py.h5d.StoreInfo) -> None:
        entry = (chunk.byte_offset, chunk.size, chunk.filter_mask)
        index[chunk.chunk_offset[0] // chunk_rows] = entry

    dataset.id.chunk_iter(note_chunk)
    return index


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
    """Decompress single chunks with libhdf5's filters, and with nothing else of it.

    A compressed chunk is put into a file in memory that this process made, and read
    from there: no byte of a shard but the chunk itself ever reaches libhdf5.
    """

    def __init__(self, chunk: ChunkFormat) -> None:
        self._chunk = chunk
        self._process: int | None = None
        self._dataset: h5py.Dataset | None = None

    def decode(self, compressed: bytes, filter_mask: int) -> NDArray[Any]:
        """Decompress a chunk.

        Args:
            compressed: Its bytes in the shard.
            filter_mask: HDF5's mask of the filters that were left out.

        Returns:
            A new array of the chunk's shape.

        Raises:
            OSError: They are not what the filters made, or a filter is missing.
            ValueError: They are not what the filters made.
        """
        self._check_ratio(compressed)
        compression = self._chunk.compression
        has_shuffle = compression in {"gzip", "lzf"}  # the first filter, where there
        is_shuffled = has_shuffle and not filter_mask & 0b01
        compressor_left_out = filter_mask & (0b10 if has_shuffle else 0b01)
        if compressor_left_out:
            # What a filter could not make smaller is stored as it is.
            return _array_of_chunk(compressed, self._chunk, is_shuffled=is_shuffled)

        # gzip and bzip2 are undone here, since libhdf5 takes whatever memory a chunk
        # swells to.
        if compression == "gzip":
            flat = _inflate(compressed, self._chunk.nbytes)
            return _array_of_chunk(flat, self._chunk, is_shuffled=is_shuffled)
        if compression == "bzip2":
            flat = _decompress_bzip2(compressed, self._chunk.nbytes)
            return _array_of_chunk(flat, self._chunk, is_shuffled=False)
        if compression == "lzf":
            # lzf makes room for a whole chunk; libhdf5's shuffle only for what came
            # out, and then copies from beyond its end.  So that is undone here.
            flat = self._filter((0,), compressed, 0).tobytes()
            return _array_of_chunk(flat, self._chunk, is_shuffled=is_shuffled)

        # libhdf5 copies a whole chunk out of what a filter returned, even from beyond
        # its end: a chunk that says it is smaller ends the process.
        stated = stated_bytes(compression, compressed)
        if stated != self._chunk.nbytes:
            msg = f"it swells to {stated:,} bytes, not {self._chunk.nbytes:,}"
            raise ValueError(msg)
        corner = (0,) * len(self._chunk.shape)
        return self._filter(corner, compressed, filter_mask)

    def _check_ratio(self, compressed: bytes) -> None:
        """Refuse a chunk that is too small to become what it shall, before it is read.

        Raises:
            ValueError: It is.
        """
        ratio = _MAX_RATIO.get(self._chunk.compression)
        if ratio is not None and self._chunk.nbytes > ratio * len(compressed):
            size = f"{self._chunk.nbytes:,} bytes"
            msg = f"{len(compressed):,} bytes cannot swell to {size}"
            raise ValueError(msg)

    def _filter(
        self, corner: tuple[int, ...], compressed: bytes, filter_mask: int
    ) -> NDArray[Any]:
        """Have libhdf5 undo the filters of a chunk."""
        if self._dataset is None or self._process != os.getpid():
            # A handle is never carried over a fork: libhdf5's state is not made for it.
            self._dataset, self._process = self._new_dataset(), os.getpid()
        self._dataset.id.write_direct_chunk(corner, compressed, filter_mask)
        decoded = np.empty(self._dataset.shape, self._dataset.dtype)
        # What ``self._dataset[...]`` does, without 50 us of looking at what was asked.
        self._dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, decoded)
        return decoded

    def _new_dataset(self) -> h5py.Dataset:
        chunk = self._chunk
        # libhdf5 tells files in memory apart by their names alone.
        file = h5py.File(uuid.uuid4().hex, "w", driver="core", backing_store=False)
        if chunk.compression == "lzf":
            # As bytes, and without a shuffle; see ``decode``.
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


def stated_bytes(compression: str, compressed: bytes) -> int:
    """Read from the head of a chunk how many bytes its filter makes of it.

    The filters make room for as many, and no more.

    Args:
        compression: The filter, in small letters.
        compressed: The chunk.

    Returns:
        Bytes; 0 where the chunk does not say.

    Raises:
        ValueError: Chunks of that filter do not say.
    """
    if compression in {"lz4", "bitshuffle"}:
        return int.from_bytes(compressed[:8], "big")
    if compression == "blosc":
        return int.from_bytes(compressed[4:8], "little")
    if compression == "blosc2":  # a frame: its field ``uncompressed_size``
        return int.from_bytes(compressed[30:38], "big")
    if compression == "zstd":
        return _zstd_content_size(compressed)
    msg = f"no chunks of compression {compression!r} are read"
    raise ValueError(msg)


def _zstd_content_size(frame: bytes) -> int:
    """Read Frame_Content_Size (RFC 8878, 3.1.1.1); 0 where it is left out."""
    if frame[:4] != b"\x28\xb5\x2f\xfd" or len(frame) < 6:
        return 0
    # magic (4 bytes), descriptor (1), window (0 or 1), dictionary (0 to 4), then size
    descriptor = frame[4]
    is_single_segment = bool(descriptor & 0x20)
    window_bytes = 0 if is_single_segment else 1
    dictionary_bytes = (0, 1, 2, 4)[descriptor & 0b11]
    size_bytes = (1 if is_single_segment else 0, 2, 4, 8)[descriptor >> 6]
    start = 5 + window_bytes + dictionary_bytes
    size = int.from_bytes(frame[start : start + size_bytes], "little")
    # A size in two bytes is stored less 256, since smaller ones take one byte.
    return size + 256 if size_bytes == 2 else size


def _decompress_bzip2(compressed: bytes, max_bytes: int) -> bytes:
    try:
        # One byte more than fits tells a chunk that is too large from one that fits.
        return bz2.BZ2Decompressor().decompress(compressed, max_bytes + 1)
    except OSError as error:
        raise ValueError(str(error)) from None


def _inflate(compressed: bytes, max_bytes: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(compressed, max_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None


def _array_of_chunk(
    flat: bytes, chunk: ChunkFormat, *, is_shuffled: bool
) -> NDArray[Any]:
    """See the bytes of a chunk as its values; undo HDF5's shuffle."""
    if len(flat) != chunk.nbytes:
        msg = f"it swells to {len(flat):,} bytes or more, not {chunk.nbytes:,}"
        raise ValueError(msg)
    values = np.frombuffer(flat, np.uint8)
    if is_shuffled:
        # HDF5 stores the first bytes of all values, then their second bytes, and so on.
        values = values.reshape(chunk.dtype.itemsize, -1).T
    contiguous = np.ascontiguousarray(values).reshape(-1)
    return contiguous.view(chunk.dtype).reshape(chunk.shape)


class ChunkedValues:
    """Compressed values of one column, decompressed chunk by chunk as they are read."""

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
        self._mapped, self._index, self._damaged = mapped, index, damaged
        self.dtype = np.dtype(array.dtype)
        # [m, k, *rest] seen as [m * k, *rest]: rows of a sample are k rows here.
        self._rows_per_sample = array.shape[1] if joined else 1
        self._row_shape = array.shape[1:]
        self.shape = joined_shape(array.shape) if joined else array.shape
        self._chunk_rows = array.chunk_rows or 1
        shape = (self._chunk_rows, *array.shape[1:])
        chunk = ChunkFormat(self.dtype, shape, compression.lower())
        self._decoder = ChunkDecoder(chunk)
        self._recent: OrderedDict[int, NDArray[Any]] = OrderedDict()

    def __getitem__(self, span: slice) -> NDArray[Any]:
        """Decompress the rows of a span into a new array."""
        rows_per_sample = max(1, self._rows_per_sample)
        # Spans begin and end with a sample.
        start, stop = span.start // rows_per_sample, span.stop // rows_per_sample
        if stop <= start:
            return np.empty((span.stop - span.start, *self.shape[1:]), self.dtype)

        rows = np.empty((stop - start, *self._row_shape), self.dtype)
        first_chunk, last_chunk = (
            start // self._chunk_rows,
            (stop - 1) // self._chunk_rows,
        )
        for number in range(first_chunk, last_chunk + 1):
            begin = number * self._chunk_rows
            low, high = max(start, begin), min(stop, begin + self._chunk_rows)
            chunk = self._recent_or_decoded_chunk(number)
            rows[low - start : high - start] = chunk[low - begin : high - begin]
        joined: NDArray[Any] = rows.reshape(span.stop - span.start, *self.shape[1:])
        return joined

    def _recent_or_decoded_chunk(self, number: int) -> NDArray[Any]:
        chunk = self._recent.get(number)
        if chunk is None:
            chunk = self._decode_chunk(number)
            max_recent = max(1, _RECENT_CHUNK_BYTES // max(1, chunk.nbytes))
            while len(self._recent) >= max_recent:
                self._recent.popitem(last=False)
            self._recent[number] = chunk
        return chunk

    def _decode_chunk(self, number: int) -> NDArray[Any]:
        offset, size, mask = self._index[number].tolist()
        lies_in_file = offset >= 0 and size > 0 and offset + size <= len(self._mapped)
        if not lies_in_file or not 0 <= mask < 1 << 32:
            raise self._damaged(f"chunk {number} lies outside the file")
        try:
            return self._decoder.decode(
                self._mapped[offset : offset + size].tobytes(), mask
            )
        except (OSError, ValueError, RuntimeError) as error:
            why = f"chunk {number} could not be decompressed ({error})"
            raise self._damaged(why) from error
