"""One shared segment for all tensors of a batch that a worker sends.

A tensor made in a DataLoader worker travels to the training process as a file
descriptor.  Cut from one segment, all tensors of a batch travel as one.  Where our own
loader sends them, they are cut from the segment that it sends next (shm_segments.py).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.utils.data import get_worker_info

from loaderkit.datasets.room import UNASKED_BYTES, check_room
from loaderkit.memory.shm_batch import sends_shared_batches
from loaderkit.memory.shm_segments import reserve_segment

if TYPE_CHECKING:
    from collections.abc import Callable

_ALIGNMENT_BYTES = 64
"""A cache line, which torch's own allocator aligns to as well."""


class Arena:
    """A segment from which tensors are cut.

    Args:
        content: Its memory ``[bytes]`` uint8.
    """

    def __init__(self, content: torch.Tensor) -> None:
        self._bytes = content
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


def make_arena(count_bytes: Callable[[], int]) -> Arena | None:
    """Choose where the tensors of a batch are made.

    Args:
        count_bytes: Says how many bytes they have, each with room to be aligned.

    Returns:
        A segment in a DataLoader's worker; None for memory of their own.

    Raises:
        DatasetError: So many bytes are not free.
    """

    def count_bytes_with_room() -> int:
        nbytes = count_bytes()
        if nbytes > UNASKED_BYTES:
            check_room(nbytes, "A batch")
        return nbytes

    if get_worker_info() is None:
        return None
    if not sends_shared_batches.get():
        # torch itself sends the batch.
        return Arena(_new_shared_bytes(count_bytes_with_room()))
    content = reserve_segment(count_bytes_with_room)
    return None if content is None else Arena(content)


def _new_shared_bytes(nbytes: int) -> torch.Tensor:
    # torch has no public way to make a segment that is shared from the start;
    # share_memory_() would copy.
    storage = torch.UntypedStorage._new_shared(max(nbytes, 1))  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)
