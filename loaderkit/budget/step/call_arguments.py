"""The arguments of an operator's call: as leaves and back, and which are written to.

An operator takes values and lists of values, nothing that is nested deeper.  Torch's
own trees ask of each value whether it is one of many containers: they take 20 us of CPU
for four arguments, this takes 3, and every operator of a step is looked at.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from torch._ops import OpOverload

    Args: TypeAlias = tuple[Any, ...]
    """Positional arguments of an operator, as a dispatch mode gets them."""
    Kwargs: TypeAlias = dict[str, Any]
    """Its named arguments."""


class CallStructure(NamedTuple):
    """Where the leaves of a call stand among its arguments."""

    positional: tuple[int | None, ...]
    """Of each positional argument how many values its list has; None for a value."""
    named: tuple[tuple[str, int | None], ...]
    """The same of the named ones, with their names."""


class FlatCall(NamedTuple):
    """The arguments of a call, as leaves."""

    leaves: list[Any]
    structure: CallStructure


def flatten_call(args: Sequence[Any], kwargs: Kwargs) -> FlatCall:
    """List the values among the arguments of an operator.

    Args:
        args: The positional ones.
        kwargs: The named ones.

    Returns:
        The values, and how to put them back.

    >>> flat = flatten_call((1, [2, 3]), {"dim": 4})
    >>> flat.leaves
    [1, 2, 3, 4]
    >>> rebuild_call(flat.leaves, flat.structure)
    ([1, [2, 3]], {'dim': 4})
    """
    leaves: list[Any] = []
    positional = tuple([_add_leaves(value, leaves) for value in args])
    named = tuple([(name, _add_leaves(kwargs[name], leaves)) for name in kwargs])
    return FlatCall(leaves, CallStructure(positional, named))


def _add_leaves(value: object, leaves: list[Any]) -> int | None:
    """Add one argument to the leaves; count its values if it is a list of them."""
    if isinstance(value, (list, tuple)):
        leaves.extend(value)
        return len(value)
    leaves.append(value)
    return None


def rebuild_call(
    leaves: Sequence[Any], structure: CallStructure
) -> tuple[list[Any], Kwargs]:
    """Put leaves back among arguments.

    Args:
        leaves: As :func:`flatten_call` lists them.
        structure: As it gives it.

    Returns:
        The positional arguments and the named ones.
    """
    remaining = iter(leaves)

    def next_argument(length: int | None) -> Any:
        if length is None:
            return next(remaining)
        return [next(remaining) for _ in range(length)]

    args = [next_argument(length) for length in structure.positional]
    kwargs = {name: next_argument(length) for name, length in structure.named}
    return args, kwargs


def arguments_by_name(func: OpOverload, args: Args, kwargs: Kwargs) -> Kwargs:
    """Give the arguments of a call by their names, with those that have a default.

    >>> add, x = torch.ops.aten.add.Tensor, torch.zeros(2)
    >>> sorted(arguments_by_name(add, (x, x), {}))
    ['alpha', 'other', 'self']
    """
    arguments = func._schema.arguments  # noqa: SLF001 -- the way to ask
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    positional = {a.name: value for a, value in zip(arguments, args, strict=False)}
    return defaults | positional | kwargs


def tensors_in(nest: object) -> list[torch.Tensor]:
    """List tensors of an operator's arguments or outputs."""
    if isinstance(nest, torch.Tensor):
        return [nest]
    if isinstance(nest, dict):
        nest = nest.values()
    elif not isinstance(nest, (tuple, list)):
        return []
    return [tensor for value in nest for tensor in tensors_in(value)]


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


@functools.cache
def count_arguments_with_mask(func: OpOverload) -> int | None:
    """Count the arguments of a backward operator that is told what to give.

    Returns:
        How many it has; None of operators whose last one is no mask of outputs.

    >>> count_arguments_with_mask(torch.ops.aten.convolution_backward.default)
    11
    >>> count_arguments_with_mask(torch.ops.aten.add.Tensor)
    """
    arguments = func._schema.arguments  # noqa: SLF001 -- the way to ask
    if not arguments or arguments[-1].name != "output_mask":
        return None
    return len(arguments)
