"""What HDF5's filters made, undone by the libraries of the compressions themselves.

For single chunks that is quicker than libhdf5, which takes some 30 us for each: lz4 and
zstandard take 1 to 3 us for a chunk of 4 KiB (2 cores of an EPYC).
"""

from __future__ import annotations

import bz2
import threading
import zlib
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    Decompress: TypeAlias = Callable[[memoryview, int], bytes | memoryview]
    """Decompresses a chunk that shall have so many bytes.  Of one that has more it
    gives one too many, or raises ValueError as for what is damaged."""

_LZ4_HEAD_BYTES = 12
"""Size of the chunk (8 bytes) and of its blocks (4), big endian."""


def find_decompressor(compression: str) -> Decompress | None:
    """Find what undoes a compression without libhdf5.

    Args:
        compression: Its name, in small letters.

    Returns:
        The function; None where there is none, or its library is not installed.
    """
    # gzip and bzip2 are never left to libhdf5, which takes whatever memory a chunk
    # swells to.
    if compression == "gzip":
        return _inflate_zlib
    if compression == "bzip2":
        return _decompress_bzip2
    try:
        if compression == "lz4":
            return _make_lz4_decompressor()
        if compression == "zstd":
            return _ZstdDecompressor()
    except ImportError:
        return None
    return None


def _inflate_zlib(compressed: memoryview, max_bytes: int) -> bytes:
    try:
        # One byte more than fits tells a chunk that is too large from one that fits.
        return zlib.decompressobj().decompress(compressed, max_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None


def _decompress_bzip2(compressed: memoryview, max_bytes: int) -> bytes:
    try:
        return bz2.BZ2Decompressor().decompress(compressed, max_bytes + 1)
    except OSError as error:
        raise ValueError(str(error)) from None


def _make_lz4_decompressor() -> Decompress:
    """Make what undoes chunks of HDF5's LZ4 filter.

    Raises:
        ImportError: lz4 is not installed.
    """
    import lz4.block

    undo_block = lz4.block.decompress

    def decompress(compressed: memoryview, nbytes: int) -> bytes | memoryview:
        if stated_bytes("lz4", bytes(compressed[:8])) != nbytes:
            msg = "it says that it swells to another size"
            raise ValueError(msg)
        block_bytes = int.from_bytes(compressed[8:_LZ4_HEAD_BYTES], "big")
        blocks: list[bytes | memoryview] = []
        start, bytes_left = _LZ4_HEAD_BYTES, nbytes
        while bytes_left > 0:
            # A block follows its size; one that could not be made smaller is as it was.
            begin = start + 4
            start = begin + int.from_bytes(compressed[start:begin], "big")
            block = compressed[begin:start]
            size = min(block_bytes, bytes_left)
            if not size or begin + len(block) != start:
                msg = "its blocks do not fill it"
                raise ValueError(msg)
            if len(block) == size:
                blocks.append(block)
            else:
                blocks.append(undo_block(block, uncompressed_size=size))
            bytes_left -= size
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def decompress_or_refuse(compressed: memoryview, nbytes: int) -> bytes | memoryview:
        try:
            return decompress(compressed, nbytes)
        except lz4.block.LZ4BlockError as error:
            raise ValueError(str(error)) from None

    return decompress_or_refuse


class _ZstdDecompressor(threading.local):
    """Undoes chunks of HDF5's Zstd filter, each of which is one frame.

    A decompressor for each thread, as zstandard asks: making one takes longer than a
    chunk.

    Raises:
        ImportError: zstandard is not installed.
    """

    def __init__(self) -> None:
        import zstandard

        self._decompressor = zstandard.ZstdDecompressor()
        self._error = zstandard.ZstdError
        self._frame_bytes = zstandard.frame_content_size

    def __call__(self, compressed: memoryview, nbytes: int) -> bytes:
        try:
            # It makes room for what the frame says.
            stated = self._frame_bytes(compressed)
            if stated != nbytes:
                msg = f"it swells to {stated:,} bytes, not {nbytes:,}"
                raise ValueError(msg)
            content: bytes = self._decompressor.decompress(compressed)
        except self._error as error:
            raise ValueError(str(error)) from None
        return content


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
