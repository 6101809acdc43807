"""Copies of modules and batches whose floats are fake: shapes without memory."""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._subclasses.fake_tensor import FakeTensorMode

    from loaderkit.budget.log import Log
    from loaderkit.budget.steps import Step

_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p")


def fake_model(fake: FakeTensorMode, model: Any) -> Any:
    """Copy a module with fake floats; integers are copied.

    Args:
        fake: Makes the fakes.
        model: The module.

    Returns:
        The copy, which shares nothing with it.

    Raises:
        ValueError: A lazy module has no parameters yet.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            msg = f"parameter {name} has no shape yet: call the model once first"
            raise ValueError(msg)  # noqa: TRY004 -- its shape is wrong, not its type
        if id(parameter) not in memo:
            made = fake.from_tensor(parameter.detach())
            twin = torch.nn.Parameter(made, requires_grad=parameter.requires_grad)
            memo[id(parameter)] = twin
    for module in model.modules():
        held = [*module.buffers(recurse=False), *vars(module).values()]
        tensors = (value for value in held if isinstance(value, torch.Tensor))
        for tensor in tensors:
            memo.setdefault(id(tensor), _faked(fake, tensor, copied=True))
    return copy.deepcopy(model, memo)


def fake_batch(fake: FakeTensorMode, batch: Any) -> Any:
    """Copy a batch with fake floats; integers are shared with it."""
    if hasattr(batch, "apply") and hasattr(batch, "to_dict"):  # PyG
        return copy.copy(batch).apply(lambda t: _faked(fake, t))
    return tree_map(
        lambda t: _faked(fake, t) if isinstance(t, torch.Tensor) else t, batch
    )


def _faked(fake: FakeTensorMode, tensor: Any, *, copied: bool = False) -> Any:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.clone() if copied else tensor
    return fake.from_tensor(tensor.detach())


@contextmanager
def attention_of(step: Step, log: Log) -> Iterator[None]:
    """Choose the kernel of attention that the target would.

    Args:
        step: It says the target.
        log: Gets the assumption, where another kernel stands for it.
    """
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    original = functional.scaled_dot_product_attention
    target = step.target

    def flash(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip(_ATTENTION, args, strict=False))
        named |= kwargs
        if named.get("dropout_p") and named.get("attn_mask") is None:
            log.assumptions["the flash kernel, as on " + target.kind, "attention"] += 1
            named["dropout_p"] = 0.0  # the CPU's flash kernel cannot; bytes are equal
        return original(**named)

    if target.flash:
        functional.scaled_dot_product_attention = flash
    kernel = ExitStack()
    if target.kind == "mps":
        kernel.enter_context(sdpa_kernel(SDPBackend.MATH))
    try:
        with kernel:
            yield
    finally:
        functional.scaled_dot_product_attention = original
