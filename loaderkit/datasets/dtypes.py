"""torch's dtypes as numpy's, bit for bit.  Pure.

numpy has no bfloat16, no float8 and no complex32: those are kept as unsigned integers
of their width and seen as themselves again when read.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NATIVE = {
    "bool": "|b1",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}
_CARRIERS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
"""By bytes of a number: as what the bits of dtypes travel that numpy does not have."""


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype: ``torch.float32`` is "float32"."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """Find a dtype by its name.

    Args:
        name: Such as "float32".

    Returns:
        torch's dtype.

    Raises:
        ValueError: This torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    msg = f"torch {torch.__version__} has no dtype {name!r}"
    raise ValueError(msg)


def is_native(name: str) -> bool:
    """Tell whether numpy has a dtype of torch's, by name."""
    return name in _NATIVE


@functools.cache
def carrier(dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype numpy can hold a tensor's bits in.

    >>> carrier(torch.float32), carrier(torch.bfloat16)
    (torch.float32, torch.uint16)
    """
    return dtype if dtype_name(dtype) in _NATIVE else _CARRIERS[dtype.itemsize]


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """See a tensor as a C-contiguous array of the same bits.

    Args:
        tensor: On the CPU, strided, without autograd; any shape.

    Returns:
        An array ``tensor.shape``; it may share the tensor's memory.
    """
    # A conjugated or negated view has its numbers as they were, and a bit that says so.
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    held = carrier(tensor.dtype)
    if held is not tensor.dtype:
        tensor = tensor.view(held)
    return tensor.numpy()


def as_tensor(array: NDArray[Any], name: str) -> torch.Tensor:
    """See an array as a tensor of the dtype it was made from.

    Args:
        array: What ``as_array`` gave, writable; integers may be narrower.
        name: The tensor's dtype, such as "bfloat16".

    Returns:
        A tensor over the array's memory.
    """
    tensor = torch.from_numpy(array.astype(disk_dtype(name), copy=False))
    return tensor if name in _NATIVE else tensor.view(torch_dtype(name))


@functools.cache
def disk_dtype(name: str) -> np.dtype[Any]:
    """Say which numpy dtype a torch dtype is kept in."""
    held = carrier(torch_dtype(name))
    return np.dtype(_NATIVE[dtype_name(held)])
