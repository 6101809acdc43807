"""The tensors of an operator's call, and those that it writes to."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from loaderkit.budget.step.kernel_calls import Args, Kwargs


def tensors_in(nest: Any) -> list[torch.Tensor]:
    """List tensors of an operator's arguments or outputs; torch's trees take longer."""
    if isinstance(nest, torch.Tensor):
        return [nest]
    if isinstance(nest, dict):
        nest = nest.values()
    elif not isinstance(nest, (tuple, list)):
        return []
    return [tensor for part in nest for tensor in tensors_in(part)]


def written_tensors(func: OpOverload, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """List the tensors that a call writes to.

    >>> x = torch.zeros(2)
    >>> len(written_tensors(torch.ops.aten.add_.Tensor, (x, torch.ones(2)), {}))
    1
    """
    written: list[Any] = []
    for position, name in _written_arguments(func):
        written.append(args[position] if position < len(args) else kwargs.get(name))
    return tensors_in(written)


@functools.cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """List position and name of the arguments that an operator writes to."""
    arguments = func._schema.arguments  # noqa: SLF001 -- the way to ask
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
