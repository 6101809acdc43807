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

_NARROW = {torch.bfloat16, torch.float16}


class AutocastTypes(Enum):
    """What happens to the arguments of a function."""

    IN_FLOAT32 = "its narrow arguments are made float32"
    INTO_FLOAT32 = "it reads them as they are, and adds up and returns float32"
    WIDEST = "they are made the widest type among them"
    NARROW = "they are made the type of autocast"
    AS_THEY_ARE = "nothing: only the CPU's autocast changes them"


def _functions(names: str, *places: Any) -> set[Any]:
    found = [getattr(place, name, None) for place in places for name in names.split()]
    return {function for function in found if function is not None}


_PLACES = (torch, torch.Tensor, torch.special, torch.linalg, functional)
_TYPES: dict[Any, AutocastTypes] = {
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
            "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits",
            *_PLACES,
        ),
        AutocastTypes.IN_FLOAT32,
    ),
    **dict.fromkeys(
        _functions(
            "softmax log_softmax sum prod cumsum cumprod norm vector_norm matrix_norm",
            *_PLACES,
        ),
        AutocastTypes.INTO_FLOAT32,
    ),
    **dict.fromkeys(
        _functions(
            "addcdiv addcmul atan2 bilinear cross dot vdot inner grid_sample "
            "index_put tensordot scatter_add",
            *_PLACES,
        ),
        AutocastTypes.WIDEST,
    ),
    **dict.fromkeys(
        _functions("addmv addr mv prelu chain_matmul multi_dot", *_PLACES),
        AutocastTypes.NARROW,
    ),
    **dict.fromkeys(
        _functions("pad avg_pool3d trace quantile nanquantile", *_PLACES),
        AutocastTypes.AS_THEY_ARE,
    ),
}


def autocast_types(func: Callable[..., Any], kwargs: Kwargs) -> AutocastTypes | None:
    """Say how autocast changes the arguments of a function on CUDA.

    Args:
        func: A function or method of torch's.
        kwargs: Its keywords: with ``out`` nothing is changed, nor with a ``dtype``.

    Returns:
        None where it is the same as on the CPU, or autocast is off.
    """
    if not torch.is_autocast_enabled("cpu") or kwargs.get("out") is not None:
        return None
    types = _TYPES.get(func)
    if types is AutocastTypes.INTO_FLOAT32 and kwargs.get("dtype") is not None:
        return AutocastTypes.AS_THEY_ARE
    return types


def run_in_types(
    func: Callable[..., Any], types: AutocastTypes, args: Args, kwargs: Kwargs
) -> Any:
    """Run a function with its arguments in the types of CUDA's autocast.

    Args:
        func: Of torch's.
        types: As :func:`autocast_types` says.
        args: As it was called.
        kwargs: The same.

    Returns:
        What it returns.
    """
    if types is AutocastTypes.INTO_FLOAT32:
        if any(_is_narrow(argument) for argument in args[:1]):
            kwargs = {**kwargs, "dtype": torch.float32}
    else:
        dtype = _dtype_of(types, [*args, *kwargs.values()])
        args = tuple(_cast(argument, dtype) for argument in args)
        kwargs = {name: _cast(argument, dtype) for name, argument in kwargs.items()}
    with torch.autocast("cpu", enabled=False):
        return func(*args, **kwargs)


def _dtype_of(types: AutocastTypes, arguments: Iterable[Any]) -> torch.dtype | None:
    """Choose what floats are made; None leaves them as they are."""
    if types is AutocastTypes.IN_FLOAT32:
        return torch.float32
    if types is AutocastTypes.NARROW:
        return torch.get_autocast_dtype("cpu")
    if types is AutocastTypes.WIDEST:
        floats = {argument.dtype for argument in arguments if _is_castable(argument)}
        return torch.float32 if torch.float32 in floats else None
    return None


def cast_to_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor the type of autocast, if that is on and can change it."""
    if not torch.is_autocast_enabled("cpu") or not _is_castable(tensor):
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _cast(argument: Any, dtype: torch.dtype | None) -> Any:
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
    return isinstance(argument, torch.Tensor) and argument.dtype in _NARROW
