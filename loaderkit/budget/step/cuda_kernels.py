"""What kernels of a CUDA GPU take beside their operands and outputs.  Pure.

Read in torch's source (2.11), and held against the allocator's own record of 217 steps
on an H100.  What a library chooses by itself, such as cuDNN's algorithm, is within
bounds only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from loaderkit.budget.step.allocation_log import UncertainBytes
from loaderkit.budget.step.call_arguments import rebuild_call
from loaderkit.budget.step.kernel_calls import TensorSpec, operator_name
from loaderkit.budget.step.reductions import Reduction, staging_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.budget.step.kernel_calls import KernelCall

_NOTHING = UncertainBytes.exactly(0)
_LIBRARY_BYTES = 4 << 20
"""What a call of a library may take however small it is; chosen: cuSOLVER took 3 MiB
for a matrix of 64 numbers, cuBLASLt 1 MiB for the first product of a thread."""

_SUMS = (
    "aten::sum",
    "aten::mean",
    "aten::prod",
    "aten::linalg_vector_norm",
    "aten::norm.",
    "aten::amax",
    "aten::amin",
    "aten::any.",
    "aten::all.",
)
_POSITIONS = ("aten::max.dim", "aten::min.dim", "aten::argmax", "aten::argmin")
_MOMENTS = ("aten::var", "aten::std")
_OF_POSITION = 16
"""Bytes of a value with its position, or of a mean with its spread and its count."""
_OF_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
_QUERIES_OF_BLOCK, _WIDTH_OF_BLOCK = 64, 64
"""Numbers that a block of the backward pass of attention works on."""
_WIDTHS_OF_TALL_BLOCKS = range(65, 97)
"""For heads of such widths a block has twice the queries (an H200: heads of 96)."""
_BLOCK_BYTES = 16
"""Beside them, of each block."""
_FLASH_QUERIES, _FLASH_WIDTH = 128, 32
"""What flash attention pads queries and their numbers to a multiple of."""
_SOFTMAX_BACKWARD = "aten::_softmax_backward_data"
_LOG_SOFTMAX_BACKWARD = "aten::_log_softmax_backward_data"
_SOFT_MARGIN = "aten::soft_margin_loss_backward"
_SAFE_SOFTMAX = "aten::_safe_softmax"
_SORTS = (
    "aten::sort",
    "aten::topk",
    "aten::median",
    "aten::nanmedian",
    "aten::mode",
    "aten::kthvalue",
    "aten::unique",
    "aten::_unique",
    "aten::nonzero",
    "aten::masked_scatter",
    "aten::index_put",
    "aten::_index_put",
    "aten::embedding_dense_backward",
    "aten::_embedding_bag",
    "aten::_coalesce",
)
"""They sort, or list positions."""
_TIMES_SORTED = 8
"""What such kernels may take of what they touch; chosen: keys, positions of 8 bytes for
each number, and the other half of both."""
_SOLVERS = (
    "aten::linalg_",
    "aten::_linalg_",
    "aten::cholesky",
    "aten::triangular_solve",
    "aten::geqrf",
    "aten::ormqr",
    "aten::lu_",
)
_TIMES_SOLVED = 4
_CONVOLUTIONS = ("aten::convolution", "aten::_convolution")
_TIMES_CONVOLVED = 3
"""The same of solvers and of cuDNN's convolutions; chosen."""
_UNREDUCED = {
    "aten::mse_loss",
    "aten::smooth_l1_loss",
    "aten::soft_margin_loss",
    "aten::binary_cross_entropy",
}
"""Losses whose result keeps the storage that it was reduced in (measured)."""


_MEAN = 1
"""torch's number of the reduction that losses have by default."""


def inside_cuda_kernel(call: KernelCall, touched_bytes: int) -> UncertainBytes:
    """Say what a kernel takes while it runs.

    Args:
        call: Without values.
        touched_bytes: Of its operands and outputs.

    Returns:
        Bytes beside these.
    """
    name = operator_name(call.func)
    for begins, rule in _RULES.items():
        if name.startswith(begins):
            return rule(call)
    # What these take is their library's choice: none is likely, and what there may be
    # is at the upper end alone.
    high = 0
    if name.startswith(_SOLVERS):
        high = _TIMES_SOLVED * touched_bytes + _LIBRARY_BYTES
    elif name.startswith(_CONVOLUTIONS):
        high = _TIMES_CONVOLVED * touched_bytes + _LIBRARY_BYTES
    elif name.startswith(_SORTS):
        high = _TIMES_SORTED * touched_bytes
    return UncertainBytes(0, 0, high)


def kept_by_cuda(call: KernelCall) -> int:
    """Say how many bytes an output takes more than its size, as long as it lives."""
    if operator_name(call.func) not in _UNREDUCED:
        return 0
    args, named = rebuild_call(call.leaves, call.structure)
    # The reduction is the argument behind the operands: 0 stands for none.
    numbers = [arg for arg in args if type(arg) is int]
    reduction = numbers[0] if numbers else _MEAN
    is_reduced = named.get("reduction", reduction) != 0
    return call.tensors[0].nbytes if is_reduced else 0


def _of_reduction(call: KernelCall) -> UncertainBytes:
    args, kwargs = rebuild_call(call.leaves, call.structure)
    tensor = args[0]
    if not isinstance(tensor, TensorSpec):
        return _NOTHING
    name = operator_name(call.func)
    axes = _axes_of(name, args[1:], kwargs, len(tensor.shape))
    if name.startswith((*_POSITIONS, *_MOMENTS)):
        accumulated_bytes = _OF_POSITION
    else:
        # Halves are added up as float32 (torch's acc_type).
        accumulated_bytes = max(tensor.dtype.itemsize, torch.float32.itemsize)
    reduction = Reduction(tensor.shape, tensor.stride, axes, accumulated_bytes)
    return staging_bytes(reduction)


def _axes_of(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], count: int
) -> tuple[int, ...]:
    """Find the axes that go among the arguments; all where none are named."""
    if "vector_norm" in name or name.startswith("aten::norm."):
        args = args[1:]  # the first is the order of the norm
    first = args[0] if args else None
    named = kwargs.get("dim", first)
    # ``std(x, unbiased)`` has a bool there: an int to isinstance, and no axis.
    if isinstance(named, int) and not isinstance(named, bool):
        return (named,)
    if isinstance(named, list | tuple) and named:
        return tuple(named)
    return tuple(range(count))


def attention_workspace(groups: int, length: int, width: int) -> int:
    """Compute what the backward pass of attention adds gradients up in.

    Args:
        groups: Samples times heads.
        length: Queries of each.
        width: Numbers of a query.

    Returns:
        Bytes: float32, padded to whole blocks.

    >>> attention_workspace(512, 14, 8)
    8396800
    """
    is_tall = width in _WIDTHS_OF_TALL_BLOCKS
    queries = _QUERIES_OF_BLOCK * (2 if is_tall else 1)
    blocks = groups * math.ceil(length / queries)
    padded_width = math.ceil(width / _WIDTH_OF_BLOCK) * _WIDTH_OF_BLOCK
    numbers = queries * padded_width
    return blocks * (numbers * torch.float32.itemsize + _BLOCK_BYTES)


def flash_attention_workspace(groups: int, length: int, width: int) -> int:
    """Compute the same of flash attention, as ``mha_bwd`` of torch's source does.

    Args:
        groups: Samples times heads.
        length: Queries of each.
        width: Numbers of a query.

    Returns:
        Bytes: float32 for the gradients of queries, which are padded to 128, and for a
        number beside each query.

    >>> flash_attention_workspace(512, 300, 16) / 2**20
    24.75
    """
    rows = groups * math.ceil(length / _FLASH_QUERIES) * _FLASH_QUERIES
    padded_width = math.ceil(width / _FLASH_WIDTH) * _FLASH_WIDTH
    return rows * (padded_width + 1) * torch.float32.itemsize


def _of_attention(call: KernelCall) -> UncertainBytes:
    # Its operands are the gradient, queries, keys, values ...
    _, queries, *_ = call.tensors
    *groups, length, width = queries.shape
    workspace = attention_workspace(math.prod(groups), length, width)
    return UncertainBytes(0, workspace, 2 * workspace)


def _of_softmax_backward(call: KernelCall) -> UncertainBytes:
    # The kernel is given ``grad * output`` (``SoftMax.cu``; an H200's allocator showed
    # the product beside all others).
    return UncertainBytes.exactly(call.tensors[0].nbytes)


def _of_log_softmax_backward(call: KernelCall) -> UncertainBytes:
    # The kernel begins with ``grad.contiguous()`` (``SoftMax.cu``).
    return UncertainBytes.exactly(_copied_bytes(call.tensors[0]))


def _of_safe_softmax(call: KernelCall) -> UncertainBytes:
    """A byte for each number, which says whether it is minus infinity."""
    return UncertainBytes.exactly(math.prod(call.tensors[0].shape))


def copy_if_strided(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Make what ``contiguous()`` makes: a copy, where numbers do not lie in a row.

    Args:
        tensor: A gradient, say; None where there is none.

    Returns:
        Memory of its size; None where nothing is copied.
    """
    if tensor is None or tensor.is_contiguous():
        return None
    return tensor.new_empty(tensor.shape)


def _copied_bytes(spec: TensorSpec) -> int:
    """Say what a copy takes of numbers that do not lie one after the other."""
    expected = 1
    axes = zip(spec.shape, spec.stride, strict=True)
    for size, stride in reversed(list(axes)):
        if size != 1 and stride != expected:
            return math.prod(spec.shape) * spec.dtype.itemsize
        expected *= size
    return 0


def _of_soft_margin(call: KernelCall) -> UncertainBytes:
    """Two steps of the formula beside the gradient."""
    return UncertainBytes.exactly(2 * call.tensors[1].nbytes)


_RULES: dict[str | tuple[str, ...], Callable[[KernelCall], UncertainBytes]] = {
    (*_SUMS, *_POSITIONS, *_MOMENTS): _of_reduction,
    (_SOFTMAX_BACKWARD,): _of_softmax_backward,
    (_LOG_SOFTMAX_BACKWARD,): _of_log_softmax_backward,
    _OF_ATTENTION: _of_attention,
    (_SOFT_MARGIN,): _of_soft_margin,
    (_SAFE_SOFTMAX,): _of_safe_softmax,
}
"""By the beginnings of operators' names."""
