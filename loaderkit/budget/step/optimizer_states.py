"""Gives an optimizer the state that it has from its second step on.

Torch's own optimizers keep tensors for each parameter whose shapes follow from the
parameter and from the options of its group.  What they keep is looked at once for each
kind of parameter, in a step of fake gradients, and remembered: a plan tracks a dozen
steps of one model, and making the state anew took a seventh of their time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from loaderkit.budget.step.newest import newest
from loaderkit.budget.step.optimizer_copies import is_torchs

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping
    from typing import TypeAlias

    _State: TypeAlias = dict[str, Any]
    """What is kept for one parameter, by name: tensors and numbers."""

_MOST_REMEMBERED = 5_000
"""Kinds of parameters; chosen."""
_MOST_KEPT = 500
"""Those that are kept from one estimate to the next; chosen: those of a few models."""


class _FakeSpec(NamedTuple):
    """A fake tensor of a state, which belongs to no mode."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Count(NamedTuple):
    """A number in a real tensor, such as that of the steps: no result of fakes."""

    number: float
    dtype: torch.dtype


class OptimizerStates:
    """Learns what torch's optimizers keep, and remembers it."""

    def __init__(self) -> None:
        self._states: dict[Hashable, _State] = {}
        """By kind of parameter, without fakes."""

    def clear(self) -> None:
        """Forget everything."""
        self._states.clear()

    def trim(self) -> None:
        """Forget all but the newest kinds."""
        self._states = newest(self._states, _MOST_KEPT)

    def give(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the parameters of a new optimizer their states; no gradient is left.

        Args:
            optimizer: Of fake parameters, while fakes are made of new floats.
        """
        if not is_torchs(optimizer):
            # Others may do as they like: each parameter may have a state of its own.
            _take_first_step(optimizer, _parameters_of(optimizer))
            return

        kinds = {
            parameter: _kind_of(parameter, optimizer, group)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        if len(self._states) > _MOST_REMEMBERED:
            self._states.clear()
        examples: dict[Hashable, torch.Tensor] = {}
        for parameter, kind in kinds.items():
            if kind not in self._states:
                examples.setdefault(kind, parameter)
        # Adagrad has a state from the beginning on.
        had_none = [p for p in examples.values() if not optimizer.state[p]]
        if examples:
            _take_first_step(optimizer, examples.values())
        for kind, example in examples.items():
            self._states[kind] = _describe_state(optimizer.state[example])
        for example in had_none:
            # Made below as the others are: an estimate is the same whether its kinds of
            # parameters are known already or not.
            del optimizer.state[example]

        for parameter, kind in kinds.items():
            # Adagrad makes the states of all at once.
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = _make_state(self._states[kind])


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]


def _take_first_step(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]
) -> None:
    """Update some parameters by gradients of zeros; an optimizer skips the others."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _kind_of(
    parameter: torch.Tensor, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
) -> Hashable:
    """Give all that the state of a parameter depends on."""
    options = tuple(
        (name, _hashable_option(value))
        for name, value in group.items()
        if name != "params"
    )
    layout = (tuple(parameter.shape), parameter.stride(), parameter.dtype)
    # The number of steps is counted in torch's default type.
    return (type(optimizer), torch.get_default_dtype(), options, layout)


def _hashable_option(option: object) -> Hashable:
    if isinstance(option, torch.Tensor):
        # Such as a learning rate: whether it is one decides, its value does not.
        return torch.Tensor
    if isinstance(option, (list, tuple)):
        return tuple(_hashable_option(value) for value in option)
    return repr(option)


def _describe_state(state: _State) -> _State:
    """Describe a state without its tensors."""
    described: _State = {}
    for name, value in state.items():
        if isinstance(value, FakeTensor):
            shape, stride = tuple(value.shape), value.stride()
            described[name] = _FakeSpec(shape, stride, value.dtype)
        elif isinstance(value, torch.Tensor):
            described[name] = _Count(value.item(), value.dtype)
        else:
            described[name] = value
    return described


def _make_state(described: _State) -> _State:
    """Make a state as it was described."""
    state: _State = {}
    for name, value in described.items():
        if isinstance(value, _FakeSpec):
            state[name] = torch.empty_strided(
                value.shape, value.stride, dtype=value.dtype
            )
        elif isinstance(value, _Count):
            # By an operator, so that it is logged.
            state[name] = torch.full((), value.number, dtype=value.dtype)
        else:
            state[name] = value
    return state


STATES = OptimizerStates()
"""What this process has learnt so far."""
