"""An optimizer's update that runs out of memory: undone, or its traces reported."""

from __future__ import annotations

from typing import Any

import torch

from loaderkit.budget.step.measure import optimizer_state
from loaderkit.errors import BudgetError
from loaderkit.units import count_of


class Update:
    """One update of an optimizer, which is undone if it fails, or reported exactly.

    The first update allocates the optimizer's state, which is what most often does not
    fit.  That update is undone from a copy of the parameters.  Later updates make no
    copy, since it would take the memory of the model again at every step.  But every
    tensor counts the writes to it, so that an error can say which tensors were changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: list[Any] = []
        for group in optimizer.param_groups:
            self.parameters += group["params"]

        self.is_first = not optimizer.state
        self._copies: list[torch.Tensor] = []
        if self.is_first:
            # On the CPU, since the device is what may be full.
            self._copies = [
                parameter.detach().to("cpu", copy=True) for parameter in self.parameters
            ]
        self._state = optimizer_state(optimizer)
        self._tensor_versions = _tensor_versions([*self.parameters, *self._state])

    def failed(self) -> BudgetError:
        """Undo what can be undone, and say what was changed."""
        name = type(self.optimizer).__name__
        less = f"torch.optim.{name}(..., foreach=False), or fused=True, takes less"
        if self.is_first:
            self._undo_update()
            message = f"The first update of {name} ran out of memory, and was undone."
            return BudgetError(
                message, why="the optimizer makes its state then", fix=less
            )

        again = "load model and optimizer from the last checkpoint"
        if not type(self.optimizer).__module__.startswith("torch.optim"):
            # Others may write through ``.data``, and such writes are not counted.
            message = f"An update of {name} ran out of memory half-way."
            why = "parameters and state may be changed in part"
            return BudgetError(message, why=why, fix=f"{again}; {less}")

        parameters_changed = self._count_changed(self.parameters)
        state_changed = self._count_changed(self._state)
        if not parameters_changed and not state_changed:
            message = (
                f"An update of {name} ran out of memory before it changed anything."
            )
            why = "parameters, gradients and state are as before the update"
            fix = f"free memory and call optimizer.step() again; {less}"
            return BudgetError(message, why=why, fix=fix)

        message = f"An update of {name} ran out of memory half-way."
        why = (
            f"{parameters_changed} of {len(self.parameters)} parameters and "
            f"{state_changed} of "
            f"{count_of(len(self._state), 'tensors')} of its state were changed"
        )
        return BudgetError(message, why=why, fix=f"{again}; {less}")

    def _undo_update(self) -> None:
        self.optimizer.state.clear()
        with torch.no_grad():
            for parameter, copy in zip(self.parameters, self._copies, strict=True):
                parameter.copy_(copy)

    def _count_changed(self, tensors: list[Any]) -> int:
        changed = 0
        for key, version in _tensor_versions(tensors).items():
            if version != self._tensor_versions[key]:
                changed += 1
        return changed


def _tensor_versions(tensors: list[Any]) -> dict[int, int]:
    """Give the number of writes to each tensor so far, by its ``id``."""
    # Autograd's check for in-place writes reads ``_version`` too.  There is no public
    # way to ask for it.
    return {id(tensor): tensor._version for tensor in tensors}  # noqa: SLF001
