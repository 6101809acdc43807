"""Shapes and types of what operators give, where torch's rules for fakes are wrong."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from loaderkit.budget.step.call_arguments import count_arguments_with_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload

_aten = torch.ops.aten
_NORMS = (
    _aten.native_layer_norm.default,
    _aten.native_group_norm.default,
    _aten.native_batch_norm.default,
    _aten._native_batch_norm_legit.default,  # noqa: SLF001 -- an operator
    _aten._native_batch_norm_legit.no_stats,  # noqa: SLF001 -- an operator
)
"""They give the mean and the deviation after the output."""


def shape_rule(func: OpOverload) -> Callable[..., Any]:
    """Give what makes outputs of the right shapes and types, for fake tensors.

    Args:
        func: An operator.

    Returns:
        To be called with its arguments: our rule where there is one, else itself.
    """
    return _RULES.get(func, func)


def values_decide_shapes(func: OpOverload) -> bool:
    """Tell whether nobody knows an operator's shapes without its operands' values."""
    return torch.Tag.dynamic_output_shape in func.tags and func not in _RULES


def without_unasked_gradients(func: OpOverload, args: Sequence[Any], out: Any) -> Any:
    """Leave out gradients that a backward operator was not asked for.

    Its rule for tensors without memory may make them all the same (that of batch
    normalisation does), where the kernel makes none.  Others make them and give them
    back (that of a sampling grid does): autograd drops these when the kernel has ended.

    Args:
        func: An operator.
        args: With which it was called.
        out: What it gave.

    Returns:
        The same, with None for each of these.
    """
    if not isinstance(out, tuple) or len(args) != count_arguments_with_mask(func):
        return out
    output_mask = args[-1]
    return tuple(
        gradient if is_asked else None
        for gradient, is_asked in zip(out, output_mask, strict=True)
    )


_DRIVERS_WITH_SINGULAR_VALUES = frozenset({"gelsd", "gelss"})


def _least_squares(
    left: torch.Tensor,
    right: torch.Tensor,
    _rcond: float | None = None,
    *,
    driver: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Solve equations as well as can be: LAPACK's driver says what else is given.

    Residuals are given where there are more equations than unknowns, but not by the
    driver that is used where none is asked for.  Matrices without a full rank have
    none either, which their values say; those of others are counted.
    """
    *batch, equations, unknowns = left.shape
    is_vector = right.dim() == left.dim() - 1
    width = 1 if is_vector else right.shape[-1]
    # The solution lies in the copy that LAPACK made of the right side.
    rows = max(equations, unknowns)
    whole = left.new_empty((*batch, width, rows)).mT
    solution = whole[..., :unknowns, :]
    solution = solution.squeeze(-1) if is_vector else solution
    has_values = driver in _DRIVERS_WITH_SINGULAR_VALUES
    has_residuals = equations > unknowns and (has_values or driver == "gels")
    # What LAPACK's driver does not compute, torch gives as an empty tensor.
    residuals_shape = (*batch, width) if has_residuals else (0,)
    residuals = left.new_empty(residuals_shape)
    rank_shape = (0,) if driver == "gels" else tuple(batch)
    rank = left.new_empty(rank_shape, dtype=torch.int64)
    smallest = min(equations, unknowns)
    values_shape = (*batch, smallest) if has_values else (0,)
    values = left.new_empty(values_shape)
    # Singular values are real, of complex matrices too.
    if values.is_complex():
        values = values.real
    return solution, residuals, rank, values


def _grouped_product(
    left: torch.Tensor,
    right: torch.Tensor,
    offsets: torch.Tensor | None = None,
    _bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply groups of rows, such as each expert's: the sizes are in the offsets.

    Torch's rule takes bfloat16 alone, with rows of whole 16 bytes, as CUDA does.
    """
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim():
        groups = left.shape[0] if offsets is None else offsets.shape[0]
        shape = (groups, *shape)
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def _norm(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Normalise: of a short input, kernels keep float32 if the weights are float32.

    Torch's rule gives the input's type.  A gradient of the gradient then refused it.
    """
    output, mean, deviation = func(*args, **kwargs)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if output.itemsize < torch.float32.itemsize and len(tensors) > 1:
        kept_type = tensors[1].dtype
        mean, deviation = mean.to(kept_type), deviation.to(kept_type)
    return output, mean, deviation


def _vector_norm(
    vectors: torch.Tensor,
    order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,  # noqa: FBT001, FBT002 -- torch's
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Take the norm of vectors of one number, too: torch 2.11 keeps all axes of these.

    ``SAGPooling`` divides its scores by one, so that no plan could be made there.
    """
    norm: torch.Tensor = _aten.linalg_vector_norm.default(
        vectors, order, dim, keepdim, dtype=dtype
    )
    if keepdim or not vectors.dim():
        return norm
    axes = {axis % vectors.dim() for axis in dim or range(vectors.dim())}
    kept = [size for axis, size in enumerate(vectors.shape) if axis not in axes]
    return norm.reshape(kept)


_RULES: dict[OpOverload, Callable[..., Any]] = {
    func: functools.partial(_norm, func) for func in _NORMS
}
_RULES[_aten.linalg_lstsq.default] = _least_squares
_RULES[_aten.linalg_vector_norm.default] = _vector_norm
if hasattr(_aten, "_grouped_mm"):
    # Torch 2.9 and later.
    _RULES[_aten._grouped_mm.default] = _grouped_product  # noqa: SLF001 -- F.grouped_mm
