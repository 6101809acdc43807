"""Page-locked memory, replayed where there is no device: plain memory that is noted."""

import torch

from loaderkit.memory.page_locked import PageLockedBatch, PageLockedMemory
from loaderkit.nests import flatten_tensors

GARBAGE = 0xA7
"""In every byte that was not written."""


class ReplayedMemory:
    """Makes tensors as ``make_page_locked`` does, and pins as torch does.

    It keeps all of them, so that none of their addresses comes again.

    Args:
        blocks: So many are given; the system refuses more.  None for any number.
    """

    def __init__(self, blocks=None):
        self.blocks = blocks
        self.made = {}
        """The tensors by their addresses."""
        self.copied = []
        """Dense tensors that were made elsewhere, and copied."""
        self.refused = 0

    def make(self, shape, dtype):
        if self.blocks is not None and len(self.made) >= self.blocks:
            self.refused += 1
            msg = "CUDA error: out of memory"
            raise RuntimeError(msg)
        numbers = torch.Size(shape).numel()
        # Memory of no bytes has no address of its own.
        block = torch.empty(max(numbers, 1) * dtype.itemsize, dtype=torch.uint8)
        block.fill_(GARBAGE)
        self.made[block.data_ptr()] = block
        return block[: numbers * dtype.itemsize].view(dtype).view(shape)

    def pin(self, tensor):
        """Do what ``Tensor.pin_memory`` does."""
        if not is_dense(tensor) or self.has(tensor):
            return tensor
        self.copied.append(tensor)
        return self.make(tensor.shape, tensor.dtype).copy_(tensor.detach())

    def has(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.made

    def batch(self):
        return PageLockedBatch(PageLockedMemory(self.make))


def is_dense(tensor):
    """Whether a device copies a tensor as one run of bytes."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def dense_tensors(batch):
    """The dense tensors of a batch that have numbers."""
    tensors = flatten_tensors(batch)
    return [tensor for tensor in tensors if is_dense(tensor) and tensor.numel()]


def blocks_of(batch):
    """Addresses of the memory of the dense tensors of a batch."""
    return [t.untyped_storage().data_ptr() for t in dense_tensors(batch)]
