"""Page-locked memory, replayed where there is no device: plain memory that is noted."""

import torch

from loaderkit.nests import flatten_tensors

GARBAGE = 0xA7
"""In every byte that was not written."""


class ReplayedAllocator:
    """Makes tensors as ``CachingHostAllocator`` does, in plain memory.

    It keeps all of them, so that none of their addresses comes again.

    Args:
        blocks: So many are given; the system refuses more.  None for any number.
    """

    def __init__(self, blocks=None):
        self.blocks = blocks
        self.made = {}
        """The tensors by their addresses."""
        self.copied = []
        """Dense tensors that came to be page-locked and had to be copied."""
        self.refused = 0

    def empty(self, shape, dtype):
        if self.blocks is not None and len(self.made) >= self.blocks:
            self.refused += 1
            msg = "CUDA error: out of memory"
            raise RuntimeError(msg)
        # One number more: memory of no bytes has no address of its own.
        size = max(1, torch.Size(shape).numel()) * dtype.itemsize
        block = torch.full((size,), GARBAGE, dtype=torch.uint8)
        self.made[block.data_ptr()] = block
        return block[: size * bool(torch.Size(shape).numel())].view(dtype).view(shape)

    def pin(self, tensor):
        if not is_dense(tensor):
            return tensor.clone()
        if self.has(tensor):
            return tensor
        self.copied.append(tensor)
        copied = self.empty(tensor.shape, tensor.dtype)
        return copied.copy_(tensor.detach())

    def has(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.made


def is_dense(tensor):
    """Whether a device copies a tensor as one run of bytes."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def dense_tensors(batch):
    """The dense tensors of a batch."""
    return [tensor for tensor in flatten_tensors(batch) if is_dense(tensor)]


def blocks_of(batch):
    """Addresses of the memory of the dense tensors of a batch that have numbers."""
    return {
        tensor.untyped_storage().data_ptr()
        for tensor in dense_tensors(batch)
        if tensor.numel()
    }
