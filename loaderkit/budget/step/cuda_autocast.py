"""The types that autocast gives functions on a CUDA GPU.

A step for CUDA is tracked with fake tensors of the CPU, and autocast has other lists
for the CPU: there a layer norm, a softmax or a sum stays in bfloat16, and on CUDA it is
computed, and kept for the backward pass, in float32.  The lists are those of torch's
documentation ("CUDA Ops that can autocast to float32" and the like); the tests compare
them with what torch's own autocast makes of fake tensors that lie on CUDA.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from loaderkit.budget.step.call_arguments import Args, Kwargs

NARROW_FLOATS = frozenset({torch.bfloat16, torch.float16})


class CastPolicy(Enum):
    """What autocast does with the arguments of a function, by torch's own names.

    They are those of ``CastPolicy`` in torch's ``aten/src/ATen/autocast_mode.h``.
    """

    FP32 = "narrow arguments are cast to float32"
    FP32_SET_OPT_DTYPE = "it is called with dtype=torch.float32, and nothing is cast"
    # Norms have fp32_append_dtype, which comes to the same.
    PROMOTE = "all are cast to the widest type among them"
    LOWER_PRECISION_FP = "all are cast to the type of autocast"
    FALLTHROUGH = "nothing, where autocast on the CPU would cast"


_NAMESPACES = (torch, torch.Tensor, torch.special, torch.linalg, functional)


def _functions(names: str) -> set[Any]:
    """Give the functions and methods of torch that have one of some names."""
    functions: set[Any] = set()
    for name in names.split():
        functions |= {getattr(namespace, name, None) for namespace in _NAMESPACES}
    return functions - {None}


_POLICIES: dict[Any, CastPolicy] = {
    **dict.fromkeys(
        _functions(
            # element by element
            "acos arccos asin arcsin cosh erfinv exp expm1 log log10 log1p log2 "
            "reciprocal rsqrt sinh tan pow square softplus "
            "__pow__ __rpow__ __rdiv__ __rtruediv__ "
            # norms, distances and what they are made of
            "layer_norm group_norm renorm logsumexp cosine_similarity "
            "pairwise_distance pdist cdist dist normalize "
            "lp_pool1d lp_pool2d lp_pool3d "
            # a softmax inside
            "softmin gumbel_softmax multilabel_soft_margin_loss "
            # sizes of images
            "interpolate upsample "
            # losses
            "nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div "
            "poisson_nll_loss hinge_embedding_loss cosine_embedding_loss "
            "margin_ranking_loss multilabel_margin_loss soft_margin_loss "
            "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits"
        ),
        CastPolicy.FP32,
    ),
    **dict.fromkeys(
        _functions(
            "softmax log_softmax sum prod cumsum cumprod norm vector_norm matrix_norm"
        ),
        CastPolicy.FP32_SET_OPT_DTYPE,
    ),
    **dict.fromkeys(
        _functions(
            "addcdiv addcmul atan2 bilinear cross dot vdot inner grid_sample "
            "index_put tensordot scatter_add"
        ),
        CastPolicy.PROMOTE,
    ),
    **dict.fromkeys(
        _functions("addmv addr mv prelu chain_matmul multi_dot"),
        CastPolicy.LOWER_PRECISION_FP,
    ),
    **dict.fromkeys(
        _functions("pad avg_pool3d trace quantile nanquantile"),
        CastPolicy.FALLTHROUGH,
    ),
}
"""Of functions that autocast treats otherwise on CUDA than on the CPU."""


def cast_policy_of(func: Callable[..., Any], kwargs: Kwargs) -> CastPolicy | None:
    """Say how autocast changes the arguments of a function on CUDA.

    Args:
        func: A function or method of torch's.
        kwargs: Its keywords: with ``out`` nothing is changed, nor with a ``dtype``.

    Returns:
        None where it is the same as on the CPU, or autocast is off.
    """
    if not torch.is_autocast_enabled("cpu") or kwargs.get("out") is not None:
        return None
    policy = _POLICIES.get(func)
    if policy is CastPolicy.FP32_SET_OPT_DTYPE and kwargs.get("dtype") is not None:
        return CastPolicy.FALLTHROUGH
    return policy


def run_by_policy(
    func: Callable[..., Any], policy: CastPolicy, args: Args, kwargs: Kwargs
) -> Any:
    """Run a function with its arguments as CUDA's autocast makes them.

    Args:
        func: Of torch's.
        policy: As :func:`cast_policy_of` says.
        args: As it was called.
        kwargs: The same.

    Returns:
        What it returns.
    """
    if policy is CastPolicy.FP32_SET_OPT_DTYPE:
        # Each of them takes one tensor, by position or by name.
        if any(map(_is_narrow, [*args, *kwargs.values()])):
            kwargs = {**kwargs, "dtype": torch.float32}
    else:
        dtype = _choose_dtype(policy, [*args, *kwargs.values()])
        args = tuple(_cast(argument, dtype) for argument in args)
        kwargs = {name: _cast(argument, dtype) for name, argument in kwargs.items()}
    # Or the CPU's autocast would cast them again.
    with torch.autocast("cpu", enabled=False):
        return func(*args, **kwargs)


def _choose_dtype(policy: CastPolicy, arguments: Iterable[Any]) -> torch.dtype | None:
    """Choose what floats are cast to; None leaves them as they are."""
    if policy is CastPolicy.FP32:
        return torch.float32
    if policy is CastPolicy.LOWER_PRECISION_FP:
        return torch.get_autocast_dtype("cpu")
    if policy is CastPolicy.PROMOTE:
        floats = {argument.dtype for argument in arguments if _is_castable(argument)}
        return torch.float32 if torch.float32 in floats else None
    return None


def cast_to_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor to the type of autocast, if that is on and changes such tensors."""
    if not torch.is_autocast_enabled("cpu") or not _is_castable(tensor):
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _cast(argument: Any, dtype: torch.dtype | None) -> Any:
    """Cast a tensor, or those in a list or tuple; None casts nothing."""
    if dtype is not None and _is_castable(argument):
        return argument.to(dtype)
    if isinstance(argument, list | tuple) and dtype is not None:
        return type(argument)(_cast(item, dtype) for item in argument)
    return argument


def _is_castable(argument: Any) -> bool:
    """Tell whether autocast changes an argument: floats, but none of double."""
    is_tensor = isinstance(argument, torch.Tensor)
    return is_tensor and (argument.dtype is torch.float32 or _is_narrow(argument))


def _is_narrow(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.dtype in NARROW_FLOATS
