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
import functools
import mmap
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PROT_NONE = 0
_MAP_FIXED = 0x10
"""Linux, macOS and the BSDs agree on this number; Python's ``mmap`` has no name for
it."""
_USUAL_MOST_MAPPINGS = 65_530
"""Linux's default of vm.max_map_count; other systems have no such limit."""


def is_available() -> bool:
    """Tell whether this system can lay files side by side."""
    return os.name == "posix" and sys.maxsize > 1 << 32


def free_mappings() -> int:
    """Say how many more pieces of files this process may map.

    Returns:
        What Linux allows less what the process has; elsewhere Linux's default.
    """
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as lines:
            return most - sum(1 for _ in lines)
    except (OSError, ValueError):
        return _USUAL_MOST_MAPPINGS


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
        self._unmap = _libc().munmap

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
        if self._address is None or at < 0 or at + nbytes > self._nbytes:
            msg = f"bytes {at:,} to {at + nbytes:,} of a range of {self._nbytes:,}"
            raise ValueError(msg)
        flags = mmap.MAP_SHARED | _MAP_FIXED
        address = self._address + at
        _system_mmap(address, nbytes, mmap.PROT_READ, flags, descriptor, file_start)

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


def round_up(number: int, multiple: int) -> int:
    """Go up to the next multiple.

    >>> round_up(1, 4096), round_up(8192, 4096)
    (4096, 8192)
    """
    return -(-number // multiple) * multiple


@functools.cache
def _libc() -> Any:
    """The C library, as it is loaded in this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
        # off_t has 64 bits wherever addresses have
        ctypes.c_int64,
    )  # fmt: skip
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def _system_mmap(
    address: int | None, nbytes: int, protection: int, flags: int, descriptor: int,
    file_start: int,
) -> int:  # fmt: skip
    mapped = _libc().mmap(address, nbytes, protection, flags, descriptor, file_start)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(mapped)
