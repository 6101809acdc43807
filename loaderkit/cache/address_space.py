"""Map pieces of many files side by side, so that numpy sees them as one array.

numpy gathers rows of a batch from one array in one call.  From 500 files it takes 500
calls, each 2 us and more, which is 16 times the batch.  The standard library's ``mmap``
cannot say where a mapping shall lie, so this asks the system's own ``mmap`` (POSIX) to
lay the pieces into a range of addresses that was reserved for them before.

Nor does it keep a file open, as ``mmap.mmap`` does before Python 3.13: more shards than
open files are allowed can be mapped.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from loaderkit.array_types import Ints

_PROT_NONE = 0
"""Reserved, but neither read nor written; 0 on all systems with ``mmap``."""
_MAP_FIXED = 0x10
"""Linux, macOS and the BSDs agree on this number; Python's ``mmap`` has no name for
it."""
_DEFAULT_MAX_MAPPINGS = 65_530
"""Linux's default of vm.max_map_count; other systems have no such limit."""


def is_available() -> bool:
    """Tell whether this system can lay files side by side."""
    return hasattr(mmap, "MAP_SHARED") and sys.maxsize > 1 << 32


def free_mappings() -> int:
    """Say how many more pieces of files this process may map.

    Returns:
        What Linux allows less what the process has; elsewhere Linux's default.
    """
    try:
        max_mappings = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as lines:
            return max_mappings - sum(1 for _ in lines)
    except (OSError, ValueError):
        return _DEFAULT_MAX_MAPPINGS


class AddressRange:
    """A range of addresses, reserved, into which pieces of files are mapped read-only.

    What no file is mapped to cannot be read: the system would end the process.

    Args:
        nbytes: Its size, rounded up to whole pages; it takes no memory.

    Raises:
        OSError: The process may not have so many addresses (``ulimit -v``).
    """

    def __init__(self, nbytes: int) -> None:
        # First, since __del__ runs even where the system refuses.
        self._address: int | None = None
        self._nbytes = round_up(max(1, nbytes), mmap.PAGESIZE)
        # Linux counts addresses that may be written against its memory; these may not.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._address = _system_mmap(None, self._nbytes, _PROT_NONE, flags, -1, 0)
        self._unmap = _load_libc().munmap

    def map_file(
        self, descriptor: int, file_start: int, *, nbytes: int, at: int
    ) -> None:
        """Map a piece of an open file.

        Args:
            descriptor: The file; it may be closed afterwards.
            file_start: First byte of the piece in the file, a multiple of a page.
            nbytes: Bytes of the piece.  It may end beyond the file; what lies there
                cannot be read.
            at: Where in the range the piece begins, a multiple of a page.

        Raises:
            OSError: The system has no mapping left.
            ValueError: The piece would not lie in the range.
        """
        address = self._address_of_piece(nbytes, at)
        flags = mmap.MAP_SHARED | _MAP_FIXED
        _system_mmap(address, nbytes, mmap.PROT_READ, flags, descriptor, file_start)

    def copy_file(
        self, descriptor: int, file_start: int, *, nbytes: int, at: int
    ) -> None:
        """Read a piece of an open file into memory of the range.

        For what begins within a page of the file, where it cannot be mapped.

        Args:
            descriptor: The file; it may be closed afterwards.
            file_start: First byte of the piece in the file.
            nbytes: Bytes of the piece.
            at: Where in the range it begins, a multiple of a page.

        Raises:
            OSError: The system has no memory left, or the file cannot be read.
            ValueError: The piece would not lie in the range.
        """
        address = self._address_of_piece(nbytes, at)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        _system_mmap(address, nbytes, writable, flags, -1, 0)
        target = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        while target:
            content = os.pread(descriptor, len(target), file_start)
            if not content:
                raise OSError(errno.EIO, "A file ended before what it is said to hold")
            target[: len(content)] = content
            target, file_start = target[len(content) :], file_start + len(content)

    def unmap(self, *, nbytes: int, at: int) -> None:
        """Let go of a piece; its addresses stay reserved.

        Args:
            nbytes: Bytes of the piece.
            at: Where in the range it begins, a multiple of a page.
        """
        address = self._address_of_piece(nbytes, at)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _system_mmap(address, nbytes, _PROT_NONE, flags, -1, 0)

    def _address_of_piece(self, nbytes: int, at: int) -> int:
        if self._address is None or at < 0 or at + nbytes > self._nbytes:
            msg = f"bytes {at:,} to {at + nbytes:,} of a range of {self._nbytes:,}"
            raise ValueError(msg)
        return self._address + at

    def as_array(self) -> NDArray[np.uint8]:
        """See the range as bytes ``[nbytes]``, read-only; the array keeps it alive."""
        return np.asarray(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """What numpy asks for; see "The array interface protocol" in its manual."""
        return {
            "version": 3,
            "shape": (self._nbytes,),
            "typestr": "|u1",
            "data": (self._address, True),
        }

    def __del__(self) -> None:
        if self._address is not None:
            self._unmap(self._address, self._nbytes)
            self._address = None


def map_whole_file(descriptor: int, nbytes: int) -> NDArray[np.uint8]:
    """Map an open file from its first byte on.

    Args:
        descriptor: The file; it may be closed afterwards.
        nbytes: Bytes of the file, at least one.

    Returns:
        Its bytes, read-only.

    Raises:
        OSError: The system has no descriptor or mapping left.
    """
    if not is_available():
        mapped = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, np.uint8)
    addresses = AddressRange(nbytes)
    addresses.map_file(descriptor, 0, nbytes=nbytes, at=0)
    return addresses.as_array()[:nbytes]


def read_at_random(mapped: NDArray[Any]) -> None:
    """Tell the system to read single pages of a mapped file, none around them.

    Of a file larger than memory, read in any order, those around would push out others
    that are wanted: 23 bytes were read for each that was needed.

    Args:
        mapped: Contiguous; pages that it only touches are left as they are.
    """
    _advise_kernel(_address_of(mapped), 1, _last_page(mapped) - 1, mmap.MADV_RANDOM)


class PageReadAhead:
    """Tells the system which rows of a mapped file are going to be read.

    It then reads them all at once, where touching them would wait for page after page.
    Batches that follow each other in the file are asked for one ahead, so that the disk
    works while one is copied.
    """

    def __init__(self) -> None:
        self._read_to = -1
        self._asked_to = -1

    def ask(self, rows: NDArray[Any], starts: Ints, lengths: Ints) -> None:
        """Ask for runs of rows.

        Args:
            rows: Contiguous ``[n, *rest]``, the same array each time.
            starts: First row of each run ``[B]``.
            lengths: Rows of each run ``[B]``; all lie in ``rows``.
        """
        row_bytes = rows.nbytes // len(rows) if len(rows) else 0
        has_rows = lengths > 0
        begins = starts[has_rows] * row_bytes
        ends = begins + lengths[has_rows] * row_bytes
        first, last = _pages_of_bytes(rows, begins, ends)
        ranges = list(merged(first, last))
        if len(ranges) == 1:
            [(start, stop)] = ranges
            # One range, right behind that of the batch before: they are in the order of
            # the file, and as much again will be wanted next.
            if self._read_to <= start <= self._read_to + 1:
                ahead = min(stop + (stop - start + 1), _last_page(rows))
                ranges = [(max(start, self._asked_to + 1), ahead)]
                self._asked_to = ahead
            self._read_to = stop
        address = _address_of(rows)
        for start, stop in ranges:
            _advise_kernel(address, start, stop, mmap.MADV_WILLNEED)


def merged(first: Ints, last: Ints) -> Iterator[tuple[int, int]]:
    """Join ranges of pages that touch or overlap.

    Args:
        first: First page of each range ``[n]``, in any order.
        last: Last page of each range ``[n]``.

    Yields:
        First and last page, in order.

    >>> list(merged(np.array([7, 0, 2, 8]), np.array([9, 1, 3, 8])))
    [(0, 3), (7, 9)]
    """
    if not len(first):
        return
    order = first.argsort()
    first = first[order]
    # The last page of a range, or of one before it that reaches further.
    last = np.maximum.accumulate(last[order])
    [gaps] = (first[1:] > last[:-1] + 1).nonzero()
    first_of_joined = first[np.concatenate([[0], gaps + 1])]
    last_of_joined = last[np.concatenate([gaps, [len(last) - 1]])]
    yield from zip(first_of_joined.tolist(), last_of_joined.tolist(), strict=True)


def _pages_of_bytes(
    mapped: NDArray[Any], begins: Ints, ends: Ints
) -> tuple[Ints, Ints]:
    """Give the first and last page of ranges of bytes, counted from the array's."""
    in_page = _address_of(mapped) % mmap.PAGESIZE
    return (begins + in_page) // mmap.PAGESIZE, (ends + in_page - 1) // mmap.PAGESIZE


def _last_page(mapped: NDArray[Any]) -> int:
    return (_address_of(mapped) % mmap.PAGESIZE + mapped.nbytes - 1) // mmap.PAGESIZE


def _address_of(mapped: NDArray[Any]) -> int:
    return int(mapped.__array_interface__["data"][0])


def _advise_kernel(address: int, first: int, last: int, advice: int) -> None:
    """Give advice for pages, counted from the one in which an address lies."""
    if last < first:
        return
    start = address - address % mmap.PAGESIZE + first * mmap.PAGESIZE
    # Only advice: where the system cannot follow it, all is as it was.
    _load_libc().madvise(start, (last - first + 1) * mmap.PAGESIZE, advice)


def round_up(number: int, multiple: int) -> int:
    """Go up to the next multiple.

    >>> round_up(1, 4096), round_up(8192, 4096)
    (4096, 8192)
    """
    return -(-number // multiple) * multiple


@functools.cache
def _load_libc() -> Any:
    """The C library, as it is loaded in this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,  # address
        ctypes.c_size_t,  # bytes
        ctypes.c_int,  # protection
        ctypes.c_int,  # flags
        ctypes.c_int,  # file descriptor
        ctypes.c_int64,  # first byte: off_t has 64 bits wherever addresses have
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _system_mmap(
    address: int | None,
    nbytes: int,
    protection: int,
    flags: int,
    descriptor: int,
    file_start: int,
) -> int:
    """Call the system's ``mmap``.

    Raises:
        OSError: It refused.
    """
    mapped = _load_libc().mmap(
        address, nbytes, protection, flags, descriptor, file_start
    )
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(mapped)
