"""What a reduction takes on a CUDA GPU beside its operands.  Pure.

Where the outputs are too few to keep a GPU busy, several blocks of threads share one,
and each writes what it has into a buffer first.  That buffer can be as large as what is
summed, or larger: the gradient of a bias, 4,096 rows of 256 floats summed (4 MiB),
takes 8 MiB.  The sizes follow ``setReduceConfig`` of torch's ``Reduce.cuh`` (2.11); on
an H100 they were equal to what the allocator recorded in each of 45 steps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from loaderkit.budget.step.allocation_log import UncertainBytes

_THREADS = 512
"""Of a block, at most."""
_WARP = 32
"""Threads that run together."""
_THREADS_OF_MULTIPROCESSOR = 2048
"""That it holds at once, on a V100, A100 and H100."""
_FEWEST_VALUES, _MOST_VALUES = 16, 256
"""Values of a thread between which the input is divided among blocks."""
_LONG_ROW = 128
"""Values from which on a row is read several at a time."""
_VECTOR = 4
"""Values that are read, or outputs that are made, at a time."""

MULTIPROCESSORS = UncertainBytes(low=20, likely=132, high=192)
"""Of a GPU: small ones, an H100, and more than any has."""


class Reduction(NamedTuple):
    """What is reduced."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    axes: tuple[int, ...]
    """Those that go."""
    accumulated_bytes: int
    """Of what is added up for one output; 16 where its position is kept beside it."""


def staging_bytes(reduction: Reduction) -> UncertainBytes:
    """Compute the buffer that blocks of threads write to.

    Args:
        reduction: Of a tensor whose axes lie in any order.

    Returns:
        Bytes: of a small GPU, of an H100, and of the largest.

    >>> staging_bytes(Reduction((4096, 256), (256, 1), (0,), 4)).likely
    8388608
    >>> staging_bytes(Reduction((8192, 4096), (4096, 1), (0,), 4)).likely
    138412032
    """
    sizes = [_staging_bytes(reduction, count) for count in MULTIPROCESSORS]
    return UncertainBytes(min(sizes), sizes[1], max(sizes))


class _Axis(NamedTuple):
    stride: int
    size: int
    is_reduced: bool


def _staging_bytes(reduction: Reduction, multiprocessors: int) -> int:
    # Step by step as torch does it, with its names beside ours where they differ.
    axes = _joined_axes(reduction)
    inputs = math.prod(axis.size for axis in axes if axis.is_reduced)
    outputs = math.prod(axis.size for axis in axes if not axis.is_reduced)
    if not axes or not inputs or not outputs:
        return 0
    # dim0 and dim1: a block's width goes along the axis whose numbers lie side by side,
    # so that neighbouring threads read neighbouring numbers.
    reduces_rows = axes[0].is_reduced
    width, height = (inputs, outputs) if reduces_rows else (outputs, inputs)
    # output_vec_size
    outputs_at_once = 1
    if axes[0].stride == 1:
        is_one_axis = sum(axis.is_reduced for axis in axes) == 1
        if reduces_rows and width >= _LONG_ROW and is_one_axis:
            width //= _VECTOR
        elif not reduces_rows:
            outputs_at_once = _vector_of(axes)
            width //= outputs_at_once
    block_width, block_height = _block_of(width, height, _THREADS // outputs_at_once)

    # Threads beside each other share an output, or have one each.
    inputs_at_once, outputs_of_block = 1, 1
    if reduces_rows:
        inputs_at_once *= block_width
    else:
        outputs_of_block *= block_width
    values = math.ceil(inputs / inputs_at_once)
    # split_across_warps: only then does torch ask whether blocks shall share an output.
    is_split_by_warps = values >= min(block_height * _FEWEST_VALUES, _MOST_VALUES)
    if not is_split_by_warps:
        return 0
    inputs_at_once *= block_height
    values = math.ceil(inputs / inputs_at_once)

    # Enough blocks for outputs alone (target_grid_size) keep all multiprocessors busy.
    grid = math.ceil(outputs / outputs_at_once / outputs_of_block)
    threads = block_width * block_height
    most_blocks = multiprocessors * (_THREADS_OF_MULTIPROCESSOR // threads)
    if values < _MOST_VALUES or grid > most_blocks:
        return 0
    # ctas_per_output1, 2 and 3: as many as fill the GPU, but no fewer than 16 values
    # for a thread; and whatever that gives, no more than 256.
    to_fill_the_gpu = math.ceil(most_blocks / grid)
    with_fewest_values = math.ceil(values / _FEWEST_VALUES)
    with_most_values = math.ceil(values / _MOST_VALUES)
    blocks_an_output = max(min(to_fill_the_gpu, with_fewest_values), with_most_values)
    if blocks_an_output == 1:
        return 0
    # global_memory_size, to the letter: where threads beside each other have outputs of
    # their own it counts a block's outputs twice over, and the GPU allocates that.
    size = reduction.accumulated_bytes * outputs * blocks_an_output
    return size if reduces_rows else size * block_width * outputs_at_once


def _joined_axes(reduction: Reduction) -> list[_Axis]:
    """Order the axes by their strides, and join those that lie one after the other."""
    reduced = {axis % len(reduction.shape) for axis in reduction.axes}
    axes = []
    for number, size in enumerate(reduction.shape):
        # As TensorIterator does: an axis of one is not gone along, whatever its stride.
        if size != 1:
            axes.append(_Axis(reduction.stride[number], size, number in reduced))
    axes.sort()
    joined: list[_Axis] = []
    for axis in axes:
        if joined:
            last = joined[-1]
            follows = last.stride * last.size == axis.stride
            if follows and last.is_reduced == axis.is_reduced:
                joined[-1] = last._replace(size=last.size * axis.size)
                continue
        joined.append(axis)
    return joined


def _vector_of(axes: list[_Axis]) -> int:
    """Say how many outputs a thread makes at a time."""
    # get_output_vec_size: a vector is read from an address that is a multiple of it, so
    # rows must begin at such addresses too.
    vector = _VECTOR
    sizes = [axes[0].size, *(axis.stride for axis in axes[1:])]
    while vector > 1 and any(size % vector for size in sizes):
        vector //= 2
    return vector


def _block_of(width: int, height: int, threads: int) -> tuple[int, int]:
    """Say how many threads of a block are beside each other, and how many rows."""
    most_beside, most_rows = (
        min(_power_of_two_below(size), threads) for size in (width, height)
    )
    # set_block_dimension: a warp's width first, then rows with what threads are left,
    # and where there are too few rows the width may grow again.
    block_width = min(most_beside, _WARP)
    block_height = min(most_rows, threads // block_width)
    return min(most_beside, threads // block_height), block_height


def _power_of_two_below(size: int) -> int:
    return 1 << max(0, size.bit_length() - 1)
