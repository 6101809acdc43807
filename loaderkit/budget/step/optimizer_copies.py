"""Makes an optimizer like the user's, for the parameters of a copy of their model."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from loaderkit.nests import flatten_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch.optim import Optimizer

    from loaderkit.budget.step.step_copies import StepCopies

    _Group = dict[str, Any]


def is_torchs(optimizer: Optimizer | None) -> bool:
    """Tell whether an optimizer's class is one of torch's own.

    Some say that they are of ``torch.optim`` itself, others name their file.
    """
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def optimizer_like(
    optimizer: Optimizer, model: torch.nn.Module, copies: StepCopies
) -> Any:
    """Make an optimizer like another one; nothing of that one is changed.

    Args:
        optimizer: To be like: its class, groups of parameters and their settings.
        model: What it was made for.
        copies: Of it and of a loss, real or fake.

    Returns:
        The optimizer of those parameters of the copies that the other one has of the
        model and the loss.  One that was made for another model altogether lends its
        class and settings; then all parameters that are trained are updated.
    """
    by_name = dict(copies.model.named_parameters(remove_duplicate=False))
    twins: dict[int, torch.Tensor] = {
        id(parameter): by_name[name]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in by_name
    }
    twins.update(copies.loss_parameters)
    groups = _groups_of_twins(optimizer, twins)
    if not groups:
        trained = [p for p in copies.all_parameters() if p.requires_grad]
        groups = [copy.deepcopy(optimizer.defaults) | {"params": trained}]

    if is_torchs(optimizer):
        return _constructed(optimizer, groups)
    try:
        return _copied(optimizer, groups, twins)
    except (TypeError, RuntimeError):
        # It holds what cannot be copied, such as a lock or a group of processes.
        return _constructed(optimizer, groups)


def _groups_of_twins(
    optimizer: Optimizer, twins: Mapping[int, torch.Tensor]
) -> list[_Group]:
    """Give the groups with their settings; those without a parameter are left out.

    Others than the model's and the loss's are no part of the step.
    """
    groups = []
    for group in optimizer.param_groups:
        parameters = [twins[id(p)] for p in group["params"] if id(p) in twins]
        if parameters:
            # Names are those of all parameters of the group.
            others = {"params", "param_names"}
            settings = {k: v for k, v in group.items() if k not in others}
            groups.append(copy.deepcopy(settings) | {"params": parameters})
    return groups


def _constructed(optimizer: Optimizer, groups: list[_Group]) -> Any:
    """Call the class with what it takes of the defaults.

    AdamW has a default ``decoupled_weight_decay``, which is no argument of its own.
    """
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    return type(optimizer)(groups, **settings)


def _copied(
    optimizer: Optimizer, groups: list[_Group], twins: Mapping[int, torch.Tensor]
) -> Any:
    """Copy an optimizer of the user's own: its arguments are not known any more."""
    # deepcopy takes what is in the memo for copied already.
    memo: dict[int, Any] = dict(twins)
    example = groups[0]["params"][0]
    held = [*_parameters_in(optimizer.param_groups)]
    held += flatten_tensors(list(vars(optimizer).values()))
    held += flatten_tensors(list(optimizer.state.values()))
    for tensor in held:
        if id(tensor) not in memo:
            memo[id(tensor)] = _tensor_for(example, tensor)

    twin = copy.deepcopy(optimizer, memo)
    # torch copies what all optimizers have, without hooks and what a scheduler puts
    # before ``step``.
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and not hasattr(type(optimizer), name):
            setattr(twin, name, copy.deepcopy(value, memo))
    twin.param_groups = groups
    ids_in_groups = set(map(id, _parameters_in(groups)))
    for parameter in list(twin.state):
        # What an optimizer keeps for all of them, it has under names.
        is_parameter = not isinstance(parameter, str)
        if is_parameter and id(parameter) not in ids_in_groups:
            del twin.state[parameter]
    return twin


def _parameters_in(groups: Iterable[Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    for group in groups:
        yield from group["params"]


def _tensor_for(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of an optimizer; without memory, where the parameter has none."""
    has_values = not isinstance(parameter, FakeTensor) and not parameter.is_meta
    # A scalar, such as the number of steps, is read.
    if has_values or tensor.ndim == 0 or tensor.layout is not torch.strided:
        return tensor.detach().clone()
    return parameter.new_empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, requires_grad=False
    )
