"""One shared segment for all tensors of a batch that a worker sends.

A tensor made in a DataLoader worker travels to the training process as a file
descriptor.  Cut from one segment, all tensors of a batch travel as one.
"""

from __future__ import annotations

import math

import torch
from torch.utils.data import get_worker_info

from loaderkit.datasets.room import UNASKED_BYTES, check_room
from loaderkit.memory.shm_batch import sends_shared_batches

_ALIGNMENT_BYTES = 64
"""A cache line, which torch's own allocator aligns to as well."""


class Arena:
    """A segment from which tensors are cut.

    Args:
        nbytes: Bytes of all tensors, each with room to be aligned.

    Raises:
        DatasetError: So many bytes are not free.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes > UNASKED_BYTES:
            check_room(nbytes, "A batch")
        # torch has no public way to make a segment that is shared from the start;
        # share_memory_() would copy.
        storage = torch.UntypedStorage._new_shared(max(nbytes, 1))  # type: ignore[no-untyped-call]
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._used_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Cut out room for a tensor; an ordinary one when the segment is used up."""
        nbytes = math.prod(shape) * dtype.itemsize
        start = self._used_bytes
        stop = start + nbytes
        if stop > len(self._bytes):
            return torch.empty(shape, dtype=dtype)
        self._used_bytes = -(-stop // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self._bytes[start:stop].view(dtype).view(shape)


def in_worker() -> bool:
    """Tell whether this is a DataLoader's worker whose batches torch itself sends."""
    return get_worker_info() is not None and not sends_shared_batches.get()
