"""What some kernels hold inside, which the values of their operands decide.

Small calls with invented values (``kernel_calls``) cannot show it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

from loaderkit.budget.step.call_arguments import arguments_by_name

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from loaderkit.budget.step.call_arguments import Args, Kwargs

_MAXIMUM_OF_BAG = 2
"""The number of the mode "max" among the arguments of torch's bags."""


def bytes_of_bags(func: OpOverload, args: Args, kwargs: Kwargs) -> int:
    """Count what the backward pass of bags holds by the words that are in them.

    Small calls, with words and bags of zeros, cannot show it (``EmbeddingBag.cpp``).

    Args:
        func: Any operator.
        args: Its positional arguments.
        kwargs: Its named ones.

    Returns:
        Bytes; 0 of other operators, and where words do not decide.
    """
    if func is not torch.ops.aten._embedding_bag_backward.default:
        return 0
    named = arguments_by_name(func, args, kwargs)
    if named["mode"] == _MAXIMUM_OF_BAG:
        return _bytes_of_full_bags(named)
    gradient, words, padding = named["grad"], named["indices"], named["padding_idx"]
    if not named["sparse"] or padding < 0:
        return 0
    # A gradient and a mask of all words, and a list of those that are no padding.
    words_listed = len(words)
    if not isinstance(words, FakeTensor):
        words_listed = int(torch.count_nonzero(words != padding))
    row_bytes = gradient.shape[-1] * gradient.itemsize + torch.bool.itemsize
    return int(len(words) * row_bytes + words_listed * torch.int64.itemsize)


def _bytes_of_full_bags(named: Kwargs) -> int:
    """Count what the backward pass of bags' maxima takes out of those not empty.

    A position of each such bag, its gradient, and which rows had the maxima.
    """
    gradient, rows_of_maxima = named["grad"], named["maximum_indices"]
    words, offsets, padding = named["indices"], named["offsets"], named["padding_idx"]
    full_bags = len(gradient)
    if not isinstance(words, FakeTensor) and not isinstance(offsets, FakeTensor):
        counted = (words != padding).cumsum(0)
        counted = torch.nn.functional.pad(counted, (1, 0))
        ends = torch.nn.functional.pad(offsets[1:], (0, 1), value=len(words))
        full_bags = int(torch.count_nonzero(counted[ends] > counted[offsets]))
    row_bytes = gradient.itemsize + rows_of_maxima.itemsize
    width = gradient.shape[-1]
    return int(full_bags * (torch.int64.itemsize + width * row_bytes))


def bytes_of_packed_copies(
    padded: torch.Tensor, batch_sizes: torch.Tensor, time_axis: int
) -> int:
    """Count what is copied while sequences are packed, beside the result.

    Steps that as many sequences have are taken out together, and copied if they do not
    lie one after the other (``PackedSequence.cpp``).

    Args:
        padded: What is packed, ``[T, B, ...]`` or ``[B, T, ...]``.
        batch_sizes: How many sequences have each step.
        time_axis: That of the steps.

    Returns:
        Bytes.
    """
    # A "meta" tensor: a fake takes 50 times as long for a part of it.
    shape, stride, dtype = padded.shape, padded.stride(), padded.dtype
    padded = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    padded = padded.transpose(0, time_axis)
    sizes, step_counts = torch.unique_consecutive(batch_sizes, return_counts=True)
    start = copied_bytes = 0
    for size, step_count in zip(sizes.tolist(), step_counts.tolist(), strict=True):
        block = padded[start : start + step_count, :size]
        start += step_count
        if not block.is_contiguous():
            copied_bytes += block.numel() * block.itemsize
    return copied_bytes
