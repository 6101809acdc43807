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
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from loaderkit.cache.columns import ShardBuffer, Shelf
from loaderkit.cache.durable import not_written, publish, remove, write_file, write_text
from loaderkit.cache.files import digest_of
from loaderkit.cache.layout import ALIGNMENT, Array, Shard, shard_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from numpy.typing import NDArray

_PLUGINS = {"bitshuffle", "blosc", "blosc2", "bzip2", "lz4", "zstd"}
"""Filters of hdf5plugin that lose nothing, and whose chunks say how large they are."""
_MOST_RATIO = {"gzip": 1032, "lzf": 88}
"""How many bytes one byte can swell to: as zlib's technical notes say; and 3 bytes of
lzf repeat at most 264."""
_CHUNK_BYTES = 128 << 10
"""Uncompressed bytes of a chunk: what reading one sample decompresses at least."""


_ALIGNMENTS = ((0, ALIGNMENT), (512, 4096), (1 << 20, 64 << 10))
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
    note: Callable[[Shard], str],
) -> Shard:
    """Write the buffered samples as one HDF5 file, durably, under its final name.

    Args:
        buffer: The samples, at least one.
        folder: The cache's folder, where the file goes.
        number: Which shard of the cache it is, from 0.
        compression: A name from ``filters()``; None maps the values instead.
        scratch: A folder of the same disk for what is not finished.
        note: Makes the text that tells a later run of the shard.  It is on the disk
            before the shard has its name, so that no shard lies about unknown.

    Returns:
        The description of the file for the manifest.

    Raises:
        CacheError: A system call failed, such as on a full disk; nothing is left.
    """
    partial = scratch / f"{number:05}.partial"
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
        noted = scratch / f"{number:05}.json"
        write_text(noted, note(shard), partial=scratch / "note.partial")
        publish(partial, file)
    except OSError as error:
        # What went wrong counts, not that it could not be tidied up.
        with contextlib.suppress(OSError):
            remove(partial)
        raise not_written(folder / f"shard {number}", error) from error
    return shard


@dataclass
class Layout:
    """A shard before it is written: what goes where."""

    arrays: dict[str, Array] = field(default_factory=dict)
    """Every array of the shard, as the manifest describes it."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    metadata: list[tuple[int, bytes]] = field(default_factory=list)
    """What libhdf5 wrote: first byte and bytes, the later ones over the earlier."""
    values: list[tuple[int, NDArray[Any]]] = field(default_factory=list)
    """Values of the mapped arrays, by the byte where they start."""
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
    layout, shelf, memory = Layout(), Shelf(), _MemoryFile()
    mapped: dict[str, NDArray[Any]] = {}
    with h5py.File(
        memory, "w", alignment_threshold=1, alignment_interval=ALIGNMENT
    ) as file:
        for column, parts in buffer.columns():
            for name, array in shelf.place(column, parts).items():
                if options and _worth_compressing(name, array):
                    rows = _chunk_rows(array)
                    index_name = f"{name}.chunks"
                    mapped[index_name] = _write_chunks(file, name, array, rows, options)
                    layout.arrays[name] = Array(
                        array.dtype.str,
                        array.shape,
                        offset=None,
                        chunk_rows=rows,
                        chunk_index=index_name,
                    )
                else:
                    mapped[name] = array
    _reserve(memory, mapped)
    with h5py.File(memory, "r") as file:
        for name, array in mapped.items():
            # libhdf5 gives no place to an array without values.
            offset = file[name].id.get_offset() if array.size else 0
            layout.arrays[name] = Array(array.dtype.str, array.shape, offset)
            if array.size:
                layout.values.append((offset, array))
    layout.columns = shelf.columns
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
    wanted = name.lower() if isinstance(name, str) else ""
    if wanted in {"gzip", "lzf"}:
        return {"compression": wanted, "shuffle": True}
    try:
        import hdf5plugin
    except ImportError:
        known: dict[str, Any] = {}
    else:
        found = {each.__name__.lower(): each for each in hdf5plugin.get_filters()}
        known = {name: found[name] for name in sorted(_PLUGINS & set(found))}
    if wanted in known:
        return dict(known[wanted]())
    names = ", ".join(["gzip", "lzf", *sorted(known)])
    more = "" if known else ' (more with: pip install "loaderkit[hdf5plugin]")'
    msg = f"compression must be None or one of {names}{more}, got {name!r}"
    raise ValueError(msg)


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
        self.writes: list[tuple[int, bytes]] = []
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
        self.writes.append((self._position, content))
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
        for offset, content in layout.metadata:
            raw.seek(offset)
            raw.write(content)
        for offset, array in layout.values:
            raw.seek(offset)
            raw.write(np.ascontiguousarray(array).data)
        raw.truncate(layout.size)
        raw.flush()
        digests.append(digest_of(raw.fileno()))

    digests: list[str] = []
    write_file(partial, write)
    return digests[0]


def _worth_compressing(name: str, array: NDArray[Any]) -> bool:
    """Keep what every batch looks up (offsets, increments) mapped."""
    column, _, part = name.rpartition("/")
    return part == "values" and "@" not in column and array.size > 0


def _chunk_rows(array: NDArray[Any]) -> int:
    row_bytes = max(1, array.nbytes // array.shape[0])
    return int(min(array.shape[0], max(1, _CHUNK_BYTES // row_bytes)))


def _reserve(memory: _MemoryFile, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Give arrays their places in a file, but no values yet."""
    for from_bytes, alignment in _ALIGNMENTS:
        sized = {n: a for n, a in arrays.items() if _alignment(a) == alignment}
        # libhdf5 has one alignment for everything while a file is open, its own notes
        # from that size on too: so they come in small blocks.
        with h5py.File(
            memory,
            "r+",
            alignment_threshold=max(1, from_bytes),
            alignment_interval=alignment,
            meta_block_size=256,
        ) as file:
            for name, array in sized.items():
                _reserve_array(file, name, array)


def _alignment(array: NDArray[Any]) -> int:
    return next(a for size, a in reversed(_ALIGNMENTS) if array.nbytes >= size)


def _reserve_array(file: h5py.File, name: str, array: NDArray[Any]) -> None:
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plan.set_obj_track_times(False)
    parents = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    parents.set_create_intermediate_group(True)
    space = h5py.h5s.create_simple(array.shape)
    kind = h5py.h5t.py_create(array.dtype, logical=True)
    h5py.h5d.create(file.id, name.encode(), kind, space, plan, parents)


def _write_chunks(
    file: h5py.File,
    name: str,
    array: NDArray[Any],
    rows: int,
    options: Mapping[str, Any],
) -> NDArray[np.int64]:
    """Compress an array into a file in memory.

    Returns:
        Where its chunks lie ``[chunks, 3]``, as the manifest's ``chunk_index`` says.
    """
    dataset = file.create_dataset(
        name, data=array, chunks=(rows, *array.shape[1:]), track_times=False, **options
    )
    file.flush()
    index = np.zeros((-(-array.shape[0] // rows), 3), "<i8")

    def note(chunk: Any) -> None:
        place = (chunk.byte_offset, chunk.size, chunk.filter_mask)
        index[chunk.chunk_offset[0] // rows] = place

    dataset.id.chunk_iter(note)
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
        self._dataset: Any = None

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
        ratio = _MOST_RATIO.get(self._chunk.compression)
        if ratio is not None and self._chunk.nbytes > ratio * len(compressed):
            size = f"{self._chunk.nbytes:,} bytes"
            msg = f"{len(compressed):,} bytes cannot swell to {size}"
            raise ValueError(msg)
        shuffles = self._chunk.compression in {"gzip", "lzf"}
        compressor_left_out = filter_mask & (0b10 if shuffles else 0b01)
        if compressor_left_out or self._chunk.compression == "gzip":
            # What a filter could not make smaller is stored as it is.  And gzip is
            # undone here, since libhdf5 takes whatever memory a chunk swells to.
            flat = compressed
            if not compressor_left_out:
                flat = _inflated(compressed, self._chunk.nbytes)
            shuffled = shuffles and not filter_mask & 0b01
            return _array_of(flat, self._chunk, shuffled=shuffled)
        if self._chunk.compression == "bzip2":
            flat = _bunzipped(compressed, self._chunk.nbytes)
            return _array_of(flat, self._chunk, shuffled=False)
        if self._chunk.compression != "lzf":
            # libhdf5 copies a whole chunk out of what a filter returned, even from
            # beyond its end: a chunk that says it is smaller ends the process.
            stated = stated_bytes(self._chunk.compression, compressed)
            if stated != self._chunk.nbytes:
                msg = f"it swells to {stated:,} bytes, not {self._chunk.nbytes:,}"
                raise ValueError(msg)
        if self._process != os.getpid():
            # A handle is never carried over a fork: libhdf5's state is not made for it.
            self._dataset, self._process = self._new_dataset(), os.getpid()
        if self._chunk.compression == "lzf":
            # lzf makes room for a whole chunk; libhdf5's shuffle only for what came
            # out, and then copies from beyond its end.  So that is undone here.
            self._dataset.id.write_direct_chunk((0,), compressed, 0)
            shuffled = not filter_mask & 0b01
            return _array_of(
                self._dataset[...].tobytes(), self._chunk, shuffled=shuffled
            )
        corner = (0,) * len(self._chunk.shape)
        self._dataset.id.write_direct_chunk(corner, compressed, filter_mask)
        decoded: NDArray[Any] = self._dataset[...]
        return decoded

    def _new_dataset(self) -> Any:
        chunk = self._chunk
        # libhdf5 tells files in memory apart by their names alone.
        file = h5py.File(uuid.uuid4().hex, "w", driver="core", backing_store=False)
        if chunk.compression == "lzf":
            size = (chunk.nbytes,)
            return file.create_dataset(
                "chunk", size, np.uint8, chunks=size, compression="lzf"
            )
        return file.create_dataset(
            "chunk", chunk.shape, chunk.dtype, chunks=chunk.shape,
            **filters(chunk.compression),
        )  # fmt: skip


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
    descriptor = frame[4]
    single_segment = bool(descriptor & 0x20)
    start = 5 + (0 if single_segment else 1) + (0, 1, 2, 4)[descriptor & 3]
    width = (1 if single_segment else 0, 2, 4, 8)[descriptor >> 6]
    size = int.from_bytes(frame[start : start + width], "little")
    return size + 256 if width == 2 else size


def _bunzipped(compressed: bytes, most: int) -> bytes:
    try:
        return bz2.BZ2Decompressor().decompress(compressed, most + 1)
    except OSError as error:
        raise ValueError(str(error)) from None


def _inflated(compressed: bytes, most: int) -> bytes:
    try:
        # One byte more than fits tells a chunk that is too large from one that fits.
        return zlib.decompressobj().decompress(compressed, most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None


def _array_of(flat: bytes, chunk: ChunkFormat, *, shuffled: bool) -> NDArray[Any]:
    """See the bytes of a chunk as its values; undo HDF5's shuffle."""
    if len(flat) != chunk.nbytes:
        msg = f"it swells to {len(flat):,} bytes or more, not {chunk.nbytes:,}"
        raise ValueError(msg)
    values = np.frombuffer(flat, np.uint8)
    if shuffled:
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
        per_sample = max(1, self._rows_per_sample)  # spans begin and end with a sample
        start, stop = span.start // per_sample, span.stop // per_sample
        if stop <= start:
            return np.empty((span.stop - span.start, *self.shape[1:]), self.dtype)
        rows = np.empty((stop - start, *self._row_shape), self.dtype)
        first, last = start // self._chunk_rows, (stop - 1) // self._chunk_rows
        for number in range(first, last + 1):
            begin = number * self._chunk_rows
            low, high = max(start, begin), min(stop, begin + self._chunk_rows)
            chunk = self._chunk(number)
            rows[low - start : high - start] = chunk[low - begin : high - begin]
        cut: NDArray[Any] = rows.reshape(span.stop - span.start, *self.shape[1:])
        return cut

    def _chunk(self, number: int) -> NDArray[Any]:
        chunk = self._recent.get(number)
        if chunk is None:
            chunk = self._decode(number)
            # As many as libhdf5 itself keeps of a dataset: 1 MiB.
            while len(self._recent) >= max(1, (1 << 20) // max(1, chunk.nbytes)):
                self._recent.popitem(last=False)
            self._recent[number] = chunk
        return chunk

    def _decode(self, number: int) -> NDArray[Any]:
        offset, size, mask = self._index[number].tolist()
        inside = offset >= 0 and size > 0 and offset + size <= len(self._mapped)
        if not inside or not 0 <= mask < 1 << 32:
            raise self._damaged(f"chunk {number} lies outside the file")
        try:
            return self._decoder.decode(
                self._mapped[offset : offset + size].tobytes(), mask
            )
        except (OSError, ValueError, RuntimeError) as error:
            why = f"chunk {number} could not be decompressed ({error})"
            raise self._damaged(why) from error
