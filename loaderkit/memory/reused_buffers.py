"""Memory for the large tensors of batches that is used again when they are gone.

glibc's malloc gives a mapping of its own to a block of 128 KiB or more, until the first
of them is freed.  From then on blocks of up to 32 MiB come from the heap (mallopt(3),
M_MMAP_THRESHOLD).  torch asks for them by posix_memalign, which before glibc 2.38 needs
a larger hole than the block that left it.  Batches are of about one size, and one is
made while the last one is still held: so holes stay.  Measured with 7.7 MiB a batch, of
which two live at once: 45 MiB of holes after 30 batches.

Here each such tensor has a mapping of its own.  When nothing refers to the tensor any
more, the mapping serves the next one of about its size: fresh pages take longer than
the bytes that are written to them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_LEAST_BYTES = 128 << 10
_MOST_BYTES = 32 << 20
"""Between these two malloc takes blocks from its heap."""
_SIZES_A_DOUBLING = 16
"""Mappings have few sizes, so that they do not grow page by page with the largest batch
so far.  Chosen: at most 6 % of a mapping is behind its tensor, and not touched."""
_MOST_SPARE = 1.5
"""A mapping serves a tensor that is this much smaller, too.  Where only the same size
did, batches whose bytes differ by a tenth seldom found one, and a warm epoch took 1.7
times as much of the processor."""
_MOST_UNUSED_BYTES = 64 << 20
"""What waits for the next batch has so many bytes together.  Chosen: two batches of 30
MiB, the one that was dropped and one that was read ahead."""
_MOST_IN_USE = 1_024
"""Who keeps more tensors gets them from malloc: a process may have 65,530 mappings."""


class ReusedBuffers:
    """Mappings that are given out, and taken back when their tensor is gone.

    Nobody ever waits for its lock.  The garbage collector may end a tensor in the
    middle of another call, and a forked process may have a copy of a lock that is held
    by a thread which it has not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: dict[int, tuple[weakref.ref[Any], mmap.mmap]] = {}
        """What is in use, by the ``id`` of a reference to the array that was given.  It
        takes a fifth of the time that ``weakref.finalize`` does."""
        self._returned: deque[mmap.mmap] = deque()
        """What was given back while another call had the lock, too."""
        self._unused: list[mmap.mmap] = []
        """Those that were given back last come last."""
        self._unused_bytes = 0

    @property
    def unused_bytes(self) -> int:
        """What waits for the next tensors."""
        return self._unused_bytes

    def take(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Give memory that holds whatever it held before.

        Args:
            nbytes: How much.

        Returns:
            ``[nbytes]``, whose memory is given back when the last reference to it or to
            a view of it goes; None where malloc is to be asked.
        """
        if not (_CAN_MAP and _LEAST_BYTES <= nbytes <= _MOST_BYTES):
            return None
        if len(self._lent) >= _MOST_IN_USE or not self._lock.acquire(blocking=False):
            return None
        try:
            self._sort_in_returned()
            buffer = self._take_or_map(_round_up(nbytes))
        finally:
            self._lock.release()
        if buffer is None:
            return None
        array = np.frombuffer(buffer, np.uint8, count=nbytes)
        reference = weakref.ref(array, self._give_back)
        self._lent[id(reference)] = reference, buffer
        return array

    def clear(self) -> None:
        """Return what is not used to the system."""
        if self._lock.acquire(blocking=False):
            try:
                self._sort_in_returned()
                self._drop_oldest(self._unused_bytes)
            finally:
                self._lock.release()

    def _give_back(self, reference: weakref.ref[Any]) -> None:
        _, buffer = self._lent.pop(id(reference))
        self._returned.append(buffer)
        if self._lock.acquire(blocking=False):
            try:
                self._sort_in_returned()
            finally:
                self._lock.release()

    def _sort_in_returned(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._unused.append(buffer)
            self._unused_bytes += len(buffer)
        if self._unused_bytes > _MOST_UNUSED_BYTES:
            self._drop_oldest(self._unused_bytes - _MOST_UNUSED_BYTES)

    def _take_or_map(self, size: int) -> mmap.mmap | None:
        fitting = [
            (len(buffer), place)
            for place, buffer in enumerate(self._unused)
            if size <= len(buffer) <= _MOST_SPARE * size
        ]
        if fitting:
            nbytes, place = min(fitting)
            self._unused_bytes -= nbytes
            return self._unused.pop(place)
        # In place of some that fit nothing any more, so that they do not add up.
        self._drop_oldest(size)
        with contextlib.suppress(OSError):
            return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return None

    def _drop_oldest(self, nbytes: int) -> None:
        """Unmap so much of what is not used, if there is so much."""
        dropped_bytes = 0
        while self._unused and dropped_bytes < nbytes:
            dropped_bytes += len(self._unused.pop(0))
        self._unused_bytes -= dropped_bytes


_CAN_MAP = hasattr(mmap, "MAP_PRIVATE")
"""Not on Windows, whose heap has other habits."""
REUSED_BUFFERS = ReusedBuffers()
"""Those of this process."""


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor like ``torch.empty``, in memory that is used again if it is large.

    Args:
        shape: Its shape.
        dtype: Of its numbers.

    Returns:
        A new contiguous tensor.  The storage of a large one cannot be resized, as that
        of one which a worker of torch has sent.
    """
    import torch

    array = REUSED_BUFFERS.take(math.prod(shape) * dtype.itemsize)
    if array is None:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(array).view(dtype).view(shape)


def _round_up(nbytes: int) -> int:
    """Round up to one of sixteen sizes between two powers of two.

    >>> [_round_up(nbytes) >> 10 for nbytes in (128 << 10, 130 << 10, 257 << 10)]
    [128, 136, 272]
    """
    step = (1 << (nbytes.bit_length() - 1)) // _SIZES_A_DOUBLING
    return -(-nbytes // step) * step
