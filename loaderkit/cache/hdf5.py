"""Shards as ordinary HDF5 files, laid out by libhdf5 and written by us.

libhdf5 lays a shard out: where each dataset lies, what describes it.  The bytes reach
the disk by plain writes, since libhdf5 does not survive a disk that fills up under it:
it raises what has no name, cannot close the file, or ends the process.  Values are
copied piece by piece, so that a shard may be larger than memory.

Readers need no libhdf5 to find things either: the manifest says where they lie, for
compressed chunks an index does.  A file made by a stranger may hold links to other
files, external storage, or metadata that crashes libhdf5; none of it is looked at.
"""

from __future__ import annotations

import contextlib
import errno
import io
import operator
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import h5py
import numpy as np
import xxhash

from loaderkit.cache.codecs import find_decompressor
from loaderkit.cache.columns import (
    ArrayDeduplicator,
    ShardArray,
    ShardBuffer,
    write_fully,
)
from loaderkit.cache.durable import (
    not_written,
    publish,
    remove,
    sync_folder,
    write_all,
    write_file,
)
from loaderkit.cache.layout import (
    ALIGNMENT,
    LEAST_SAVED_SHARE,
    Array,
    Column,
    Shard,
    note_name,
    shard_name,
    written_marker_name,
)
from loaderkit.errors import OptionError
from loaderkit.fixes import Fix, Setting
from loaderkit.nearest_names import nearest_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from numpy.typing import NDArray
    from typing_extensions import Buffer

_PLUGINS = {"bitshuffle", "blosc", "blosc2", "bzip2", "lz4", "zstd"}
"""Filters of hdf5plugin that lose nothing, and whose chunks say how large they are."""
_FAST = {"lz4", "zstd", "gzip"}
"""What small chunks are made of, where their library is installed.  bzip2 needs large
ones: it takes its time for each, and finds little in a few KiB."""
_CHUNK_BYTES = 128 << 10
"""Uncompressed bytes of a chunk, at most: what reading one sample decompresses at
least.  libhdf5 takes some 30 us a chunk whatever its size, so where it undoes chunks
they all have as many."""
_LEAST_CHUNK_BYTES = 4 << 10
"""Smaller chunks are decompressed no quicker, and become larger files.  Measured."""
_CHUNKS_OF_SAMPLE = 8
"""A sample begins and ends within a chunk: of so many chunks for each, it decompresses
an eighth more than it has.  Chosen."""
_SMALL_VALUE_BYTES = 1 << 10
_SMALL_VALUES_SHARE = 1 / 8
"""The columns whose values are smaller stay uncompressed, from the smallest on, as long
as they are no more than this share of a shard: each would cost a batch as much time as
the large ones, and makes the files little smaller.  Chosen."""
_TRIED_CHUNKS = 16
"""So many chunks of an array, at most, say what compression would save of all.  Chosen:
if chunks save between 0 and 1/4, the mean of 16 is off by 0.018 (calculated)."""


_WRITTEN_BYTES = 1 << 20
"""Values are given to libhdf5 so many bytes at a time.  Chosen: a call takes 50 us."""


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
        make_note: Makes the text that tells a later run of the shard.  It stands in
            ``scratch`` only where the shard stands in ``folder``.

    Returns:
        The description of the file for the manifest.

    Raises:
        CacheError: A system call failed, such as on a full disk; what is left of the
            shard is known, and deleted by the run that comes next.
    """
    # Several processes may be writing shards there, even this one.
    own_name = f"{number:05}-{uuid.uuid4().hex}"
    partial = scratch / f"{own_name}.partial"
    note_partial = scratch / f"{own_name}-note.partial"
    layouts: list[Layout] = []

    def write(raw: BinaryIO) -> None:
        layouts.append(_write_buffer(buffer, compression, raw))

    try:
        write_file(partial, write)
        [layout] = layouts
        file = folder / shard_name(number, layout.xxh3)
        shard = Shard(
            file=file.name,
            samples=buffer.samples,
            bytes=partial.stat().st_size,
            xxh3=layout.xxh3,
            arrays=layout.arrays,
            columns=layout.columns,
        )
        (scratch / written_marker_name(file.name)).touch()
        note = make_note(shard)
        write_file(note_partial, lambda raw: write_all(raw, note))
        sync_folder(scratch)
        publish(partial, file)
        # A task that is done again, since its worker died, trusts the note: so the
        # note appears behind the file.  After a power cut it may be gone, and the
        # shard is written again.
        note_partial.replace(scratch / note_name(number))
    except OSError as error:
        # What went wrong counts, not that it could not be tidied up.
        with contextlib.suppress(OSError):
            remove(partial)
            remove(note_partial)
        raise not_written(folder / f"shard {number}", error) from error
    return shard


class _PlacedBytes(NamedTuple):
    """Bytes, and the byte of the file where they start."""

    offset: int
    content: bytes


@dataclass
class Layout:
    """What lies in a shard."""

    arrays: dict[str, Array] = field(default_factory=dict)
    """Every array of the shard, as the manifest describes it."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    xxh3: str = ""
    """The hash of its bytes, in hexadecimal."""


def _write_buffer(
    buffer: ShardBuffer, compression: str | None, file_of_shard: BinaryIO
) -> Layout:
    """Decide where everything in a shard lies, and write it there.

    Args:
        buffer: The samples.
        compression: A name from ``filters()``; None maps the values.
        file_of_shard: The shard's file, empty.

    Returns:
        What lies in it.

    Raises:
        OSError: It cannot be written, or what it is made from not be read.
    """
    layout, deduplicator = Layout(), ArrayDeduplicator()
    # Without a buffer: one that cannot be written raises again with every call.
    raw = io.FileIO(file_of_shard.fileno(), "r+", closefd=False)
    image = _FileImage(raw)
    mapped: dict[str, ShardArray] = {}
    for column, parts in buffer.columns():
        mapped.update(deduplicator.add(column, parts))
    with image.raising_its_error():
        layout.arrays = _place_arrays(image, mapped, buffer.samples, compression)
    layout.columns = deduplicator.columns

    raw.truncate(image.size)
    layout.xxh3 = _write_values(raw, image.size, layout, mapped)
    return layout


def _place_arrays(
    image: _FileImage,
    mapped: dict[str, ShardArray],
    samples: int,
    compression: str | None,
) -> dict[str, Array]:
    """Have libhdf5 write what is compressed, and make room for the rest.

    Args:
        image: The shard's file, empty.
        mapped: All arrays by name.  Those that are compressed are taken out, and the
            indices of their chunks put in.
        samples: Samples of the shard.
        compression: A name from ``filters()``; None maps the values.

    Returns:
        Every array, as the manifest describes it.
    """
    described: dict[str, Array] = {}
    names = _names_to_compress(mapped, samples) if compression else []
    options = filters(compression)
    with h5py.File(
        image, "w", alignment_threshold=1, alignment_interval=ALIGNMENT
    ) as file:
        for name in names:
            array = mapped[name]
            chunk_rows = _rows_of_chunk(array, samples, compression)
            if _saved_share(array, chunk_rows, options) < LEAST_SAVED_SHARE:
                continue
            del mapped[name]
            index_name = f"{name}.chunks"
            chunk_index = _write_chunks(file, name, array, chunk_rows, options)
            image.raise_error()
            mapped[index_name] = ShardArray.of(chunk_index)
            described[name] = Array(
                array.dtype.str,
                array.shape,
                offset=None,
                chunk_rows=chunk_rows,
                chunk_index=index_name,
            )

    # What is mapped gets its place behind all chunks, whose sizes nobody knew before.
    _reserve_arrays(image, mapped)
    with h5py.File(image, "r") as file:
        for name, array in mapped.items():
            # libhdf5 gives no place to an array without values.
            offset = file[name].id.get_offset() if array.size else 0
            described[name] = Array(array.dtype.str, array.shape, offset)
    return described


def _write_values(
    raw: io.FileIO, file_bytes: int, layout: Layout, arrays: Mapping[str, ShardArray]
) -> str:
    """Write the values of arrays to their places, and hash the file meanwhile.

    Reading all of it again for its hash took as long as writing it.

    Args:
        raw: The file, complete but for these values.
        file_bytes: Bytes of the file.
        layout: Where the arrays lie.
        arrays: Those that are written now.

    Returns:
        The hash of the file, in hexadecimal.
    """
    digest, hashed_bytes = xxhash.xxh3_128(), 0
    placed = [
        (layout.arrays[name].offset or 0, array)
        for name, array in arrays.items()
        if array.size
    ]
    placed.sort(key=operator.itemgetter(0))
    for offset, array in placed:
        _hash_bytes(raw, hashed_bytes, offset, digest)
        raw.seek(offset)
        for piece in array.pieces():
            digest.update(piece.data)
            write_fully(raw, piece.data)
        hashed_bytes = offset + array.nbytes
    _hash_bytes(raw, hashed_bytes, file_bytes, digest)
    return digest.hexdigest()


def _hash_bytes(raw: io.FileIO, start: int, stop: int, digest: xxhash.xxh3_128) -> None:
    """Hash a part of a file."""
    raw.seek(start)
    while start < stop:
        content = raw.read(min(_WRITTEN_BYTES, stop - start))
        if not content:
            raise OSError(errno.EIO, "A shard was cut short while it was written")
        digest.update(content)
        start += len(content)


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
    names = ["gzip", "lzf", *sorted(plugins)]
    message = f"compression must be None or one of {', '.join(names)}, got {name!r}."
    why = "there is no filter of that name that loses nothing"
    nearest = Setting("compression", nearest_name(lower_name, names) or "gzip")
    fix = Fix.of(nearest)
    if not plugins:
        fix = Fix.of(nearest, '; pip install "loaderkit[hdf5plugin]" for more')
    raise OptionError(message, why=why, fix=fix)


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


class _FileImage(io.RawIOBase):
    """What libhdf5 takes for the shard's file: it never hears of a disk that fails.

    What could not be written stays in memory, until ``raise_error`` is asked.  libhdf5
    leaves out the values of arrays that it only makes room for.

    Args:
        raw: The file.
    """

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__()
        self._raw = raw
        self._error: OSError | None = None
        self._unwritten: list[_PlacedBytes] = []
        """The later over the earlier."""
        self.size = 0
        self._position = 0

    def raise_error(self) -> None:
        """Raise what went wrong while libhdf5 was writing.

        Raises:
            OSError: The file could not be written.
        """
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def raising_its_error(self) -> Iterator[None]:
        """Let libhdf5 write, and raise what went wrong meanwhile.

        What could not be read back is zeros to libhdf5, which calls the file broken
        then, in many ways: what counts is the disk's own answer.

        Raises:
            OSError: The file could not be written, or not be read back.
        """
        try:
            yield
        except Exception:
            self.raise_error()
            raise
        self.raise_error()

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

    def write(self, data: Buffer) -> int:
        content = bytes(data)
        if self._error is None:
            try:
                self._raw.seek(self._position)
                write_fully(self._raw, content)
            except OSError as error:
                self._error = error
        if self._error is not None:
            self._unwritten.append(_PlacedBytes(self._position, content))
        self._position += len(content)
        self.size = max(self.size, self._position)
        return len(content)

    def readinto(self, buffer: Buffer) -> int:
        """Read back, as libhdf5 does now and then with what it has written."""
        wanted = memoryview(buffer).cast("B")
        start, stop = self._position, min(self._position + len(wanted), self.size)
        out = bytearray(max(0, stop - start))
        try:
            self._raw.seek(start)
            # What lies behind the end of the file was not written yet.
            self._raw.readinto(out)
        except OSError as error:
            self._error = self._error or error
        for offset, content in self._unwritten:
            low, high = max(offset, start), min(offset + len(content), stop)
            if low < high:
                out[low - start : high - start] = content[low - offset : high - offset]
        wanted[: len(out)] = out
        self._position += len(out)
        return len(out)

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size


def _names_to_compress(arrays: Mapping[str, ShardArray], samples: int) -> list[str]:
    """Choose the arrays of a shard that are compressed, in their order.

    What every batch looks up (offsets, increments) stays mapped, and so do small
    values.
    """
    names = []
    for name, array in arrays.items():
        column, _, role = name.rpartition("/")
        if role == "values" and "@" not in column and array.size > 0:
            names.append(name)

    nbytes = {name: arrays[name].nbytes for name in names}
    most_mapped_bytes = _SMALL_VALUES_SHARE * sum(nbytes.values())
    mapped_bytes = 0
    for name in sorted(names, key=nbytes.__getitem__):
        mapped_bytes += nbytes[name]
        is_small = nbytes[name] < _SMALL_VALUE_BYTES * samples
        if not is_small or mapped_bytes > most_mapped_bytes:
            break
        names.remove(name)
    return names


def _rows_of_chunk(array: ShardArray, samples: int, compression: str | None) -> int:
    """Say how many rows are compressed together."""
    chunk_bytes = _CHUNK_BYTES
    name = (compression or "").lower()
    if name in _FAST and find_decompressor(name) is not None:
        fitting_bytes = array.nbytes // (_CHUNKS_OF_SAMPLE * samples)
        chunk_bytes = min(max(fitting_bytes, _LEAST_CHUNK_BYTES), _CHUNK_BYTES)
    row_bytes = max(1, array.nbytes // array.shape[0])
    return int(min(array.shape[0], max(1, chunk_bytes // row_bytes)))


def _saved_share(
    array: ShardArray, chunk_rows: int, options: Mapping[str, Any]
) -> float:
    """Compress some chunks of an array in memory, to see what part of it that saves.

    Returns:
        From 0 to 1; below 0 where the chunks become larger.
    """
    chunk_count = -(-array.shape[0] // chunk_rows)
    chunk_bytes = max(1, array.nbytes // array.shape[0]) * chunk_rows
    # The first chunk of each piece is tried; of every so many pieces, where an array
    # has more than shall be tried.
    most_chunks = max(1, _WRITTEN_BYTES // chunk_bytes)
    piece_chunks = min(-(-chunk_count // _TRIED_CHUNKS), most_chunks)
    piece_count = -(-chunk_count // piece_chunks)
    tried_interval = -(-piece_count // _TRIED_CHUNKS)
    tried_chunks = [
        piece[:chunk_rows]
        for number, piece in enumerate(array.slices(piece_chunks * chunk_rows))
        if number % tried_interval == 0
    ]
    tried = np.concatenate(tried_chunks)

    # libhdf5 tells files in memory apart by their names alone.
    with h5py.File(uuid.uuid4().hex, "w", driver="core", backing_store=False) as file:
        dataset = file.create_dataset(
            "tried", data=tried, chunks=(chunk_rows, *array.shape[1:]), **options
        )
        file.flush()  # before that, chunks are in libhdf5's cache and have no size
        compressed_bytes: int = dataset.id.get_storage_size()
    return 1 - compressed_bytes / tried.nbytes


def _reserve_arrays(image: _FileImage, arrays: Mapping[str, ShardArray]) -> None:
    """Give arrays their places in a file, but no values yet."""
    for alignment in _ALIGNMENTS:
        # libhdf5 has one alignment for everything while a file is open, its own notes
        # from that size on too: so they come in small blocks.
        with h5py.File(
            image,
            "r+",
            alignment_threshold=max(1, alignment.from_bytes),
            alignment_interval=alignment.interval,
            meta_block_size=256,
        ) as file:
            for name, array in arrays.items():
                if _alignment_of_array(array) == alignment:
                    _reserve_array(file, name, array)


def _alignment_of_array(array: ShardArray) -> _Alignment:
    return next(
        alignment
        for alignment in reversed(_ALIGNMENTS)
        if array.nbytes >= alignment.from_bytes
    )


def _reserve_array(file: h5py.File, name: str, array: ShardArray) -> None:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    # A place now, and no zeros in it: the values are written by ``_write_buffer``.
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
    array: ShardArray,
    chunk_rows: int,
    options: Mapping[str, Any],
) -> NDArray[np.int64]:
    """Compress an array.

    Returns:
        Where its chunks lie ``[chunks, 3]``, as the manifest's ``chunk_index`` says.
    """
    dataset = file.create_dataset(
        name,
        array.shape,
        array.dtype,
        chunks=(chunk_rows, *array.shape[1:]),
        track_times=False,
        **options,
    )
    # Whole chunks at a time: the bytes must not depend on how the values are cut.
    chunk_bytes = max(1, array.nbytes // array.shape[0]) * chunk_rows
    step = chunk_rows * max(1, _WRITTEN_BYTES // chunk_bytes)
    for number, rows in enumerate(array.slices(step)):
        dataset[number * step : number * step + len(rows)] = rows
    file.flush()  # before that, chunks are in libhdf5's cache and have no place
    chunk_count = -(-array.shape[0] // chunk_rows)
    index = np.zeros((chunk_count, 3), "<i8")

    def note_chunk(chunk: h5py.h5d.StoreInfo) -> None:
        entry = (chunk.byte_offset, chunk.size, chunk.filter_mask)
        index[chunk.chunk_offset[0] // chunk_rows] = entry

    dataset.id.chunk_iter(note_chunk)
    return index
