"""Page-locked memory that batches are made in, where a device copies from it.

A device copies from page-locked memory by itself, beside the computing.  A batch that
is made in ordinary memory has to be copied there first, by the thread that trains.  So
a loader that makes its batches in the training process, for a device that wants them
page-locked, has them gathered there (docs/loader.md says what that saves).

Every tensor has a block of torch's caching host allocator to itself.  One block for all
tensors of a batch would save some calls, but a loop that keeps the labels of each batch
would keep all its batches page-locked, and ``torch.save(batch.y)`` would write a whole
one.  torch gives no block out again while a tensor holds it, nor before the copies with
``non_blocking=True`` from it are done, so nothing has to be waited for here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

import torch

MakePageLocked: TypeAlias = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Makes a page-locked tensor of a shape and dtype, without values.  A ``RuntimeError``
says that the system gives none."""

_LOG = logging.getLogger("loaderkit")


def make_page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a page-locked tensor, without values.

    torch keeps the blocks: after some batches nothing is locked anew.

    Raises:
        RuntimeError: The system gives none.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=True)


class PageLockedMemory:
    """Gives page-locked tensors, as long as the system has any.

    Once it refuses, tensors are ordinary, from which a device copies too: that is
    logged, and no batch is lost.

    Args:
        make: Makes the tensors.
    """

    def __init__(self, make: MakePageLocked = make_page_locked) -> None:
        self._make = make
        self.refusal: str | None = None
        """Why the system gave none; None while it gives some."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor, without values; it is the caller's."""
        if self.refusal is None:
            try:
                return self._make(shape, dtype)
            except RuntimeError as error:
                self.refusal = str(error)
                text = "batches are not page-locked any more, and copied to the device "
                text += "from ordinary memory: the system refused more: %s"
                _LOG.warning(text, error)
        return torch.empty(shape, dtype=dtype)


class PageLockedBatch:
    """What one batch is made in, and whether all of it was.

    Args:
        memory: Gives the tensors.
    """

    __slots__ = ("_memory", "is_whole")

    def __init__(self, memory: PageLockedMemory) -> None:
        self._memory = memory
        self.is_whole = True
        """No part of the batch was made elsewhere, by PyG, torch or the user."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor of the batch, without values."""
        return self._memory.empty(shape, dtype)

    def note_others(self) -> None:
        """Say that a part of the batch was made elsewhere."""
        self.is_whole = False

    @property
    def lacks_locking(self) -> bool:
        """Whether something is still to be copied to page-locked memory."""
        return not self.is_whole and self._memory.refusal is None
