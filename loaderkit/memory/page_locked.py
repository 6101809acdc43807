"""Page-locked memory that batches are made in, where a device copies from it.

A device copies from page-locked memory by itself, beside the computing.  A batch that
is made in ordinary memory has to be copied there first, by the thread that trains: of
16 pockets, 11 MiB, that takes as long as to gather them.  So a loader that makes its
batches in the training process, for a device that wants them page-locked, has them
gathered there.

Every tensor has a block of torch's caching host allocator to itself.  One block for all
tensors of a batch would save some calls, but a loop that keeps the labels of each batch
would keep all its batches page-locked, and ``torch.save(batch.y)`` would write a whole
one.  torch gives no block out again while a tensor holds it, nor before the copies with
``non_blocking=True`` from it are done, so nothing has to be waited for here.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol, TypeVar

import torch

from loaderkit.nests import map_leaves

T = TypeVar("T")

_LOG = logging.getLogger("loaderkit")
_NEVER_HOLDS_TENSORS = (str, bytes, int, float, complex, type(None))
"""Most of what is no tensor.  A walk that asks of each text whether it is one of eight
kinds of container takes 460 us for the 256 texts of 128 molecules, and PyG's
``Batch.pin_memory`` 416; to gather them takes 258."""
_WALKED_MODULES = ("loaderkit.", "torch_geometric.data.")
"""Whose classes pin what is in them, and nothing else, as is done here."""


class HostAllocator(Protocol):
    """What makes page-locked tensors: torch, or a replay where there is no device."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make a page-locked tensor, without values.

        Raises:
            RuntimeError: The system gives none.
        """

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor; one that is page-locked already is given back as it is.

        Raises:
            RuntimeError: The system gives none.
        """


class CachingHostAllocator:
    """torch's, which keeps its blocks: after some batches nothing is locked anew."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make a page-locked tensor, without values."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor; one that is page-locked already is given back as it is."""
        return tensor.pin_memory()


class PageLockedMemory:
    """Where the tensors of batches are made: page-locked, as long as there is any.

    Once the system refuses, batches are made in ordinary memory, from which a device
    copies too: that is logged, and no batch is lost.

    Args:
        allocator: Makes the tensors; torch's own if None.
    """

    def __init__(self, allocator: HostAllocator | None = None) -> None:
        self._allocator = allocator or CachingHostAllocator()
        self.refusal: str | None = None
        """Why the system gave none; None while it gives some."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor, without values; it is the caller's.

        Args:
            shape: Any.
            dtype: Any.
        """
        if self.refusal is None:
            try:
                return self._allocator.empty(shape, dtype)
            except RuntimeError as error:
                self._give_up(error)
        return torch.empty(shape, dtype=dtype)

    def lock(self, nest: T) -> T:
        """Page-lock what was not made here.

        Args:
            nest: A batch, or a part of one; it is not changed.

        Returns:
            The same nest.  Tensors that were page-locked are the same objects, others
            are copied.  Objects that have a ``pin_memory`` of their own are what that
            returns, as torch's DataLoader has it.
        """
        if self.refusal is not None:
            return nest
        return map_leaves(self._lock_leaf, nest, _is_entered_no_further)

    def _lock_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._lock_tensor(leaf) if leaf.device.type == "cpu" else leaf
        pin_memory = getattr(type(leaf), "pin_memory", None)
        return leaf if pin_memory is None else pin_memory(leaf)

    def _lock_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            # A sparse tensor, say.  torch cannot page-lock every kind, and says so:
            # that is no reason to do without for all others.
            return self._allocator.pin(tensor)
        return self._pin(tensor)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.refusal is None:
            try:
                return self._allocator.pin(tensor)
            except RuntimeError as error:
                self._give_up(error)
        return tensor

    def _give_up(self, error: RuntimeError) -> None:
        self.refusal = str(error)
        text = "batches are not page-locked any more, and copied to the device "
        text += "without: the system gave no page-locked memory: %s"
        _LOG.warning(text, error)


def _is_entered_no_further(part: object) -> bool:
    """Tell what is taken as a whole: what holds no tensor, or pins itself."""
    if isinstance(part, _NEVER_HOLDS_TENSORS):
        return True
    pin_memory = getattr(type(part), "pin_memory", None)
    if pin_memory is None:
        return False
    return not str(pin_memory.__module__).startswith(_WALKED_MODULES)
