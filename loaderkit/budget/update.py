"""An optimizer's update that runs out of memory: what it left behind."""

from __future__ import annotations

from typing import Any

import torch

from loaderkit.budget.measure import state_of
from loaderkit.errors import BudgetError


class Update:
    """One update of an optimizer, which is undone or told exactly if it fails.

    The first update makes the optimizer's state, which is what most often does not fit:
    that one is undone from a copy of the parameters.  Later there is no copy, since it
    would take the model's memory again, at every step.  But every tensor counts the
    writes to it, so that what was changed until then is known.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.parameters = [p for g in optimizer.param_groups for p in g["params"]]
        self.is_first = not optimizer.state
        self._copies = [
            p.detach().to("cpu", copy=True) for p in self.parameters if self.is_first
        ]
        self._state = state_of(optimizer)
        self._versions = _versions([*self.parameters, *self._state])

    def failed(self) -> BudgetError:
        """Undo what can be undone, and say what was changed."""
        name = type(self.optimizer).__name__
        less = f"torch.optim.{name}(..., foreach=False), or fused=True, takes less"
        if self.is_first:
            self._undo()
            what = f"The first update of {name} ran out of memory, and was undone."
            return BudgetError(what, why="the optimizer makes its state then", fix=less)
        again = "load model and optimizer from the last checkpoint"
        if not type(self.optimizer).__module__.startswith("torch.optim"):
            # it may write through ``.data``, which counts for itself
            what = f"An update of {name} ran out of memory half-way."
            why = "parameters and state may be changed in part"
            return BudgetError(what, why=why, fix=f"{again}; {less}")
        parameters = self._changed(self.parameters)
        state = self._changed(self._state)
        if not parameters and not state:
            what = f"An update of {name} ran out of memory before it changed anything."
            why = "parameters, gradients and state are as before the update"
            fix = f"free memory and call optimizer.step() again; {less}"
            return BudgetError(what, why=why, fix=fix)
        what = f"An update of {name} ran out of memory half-way."
        why = (
            f"{parameters} of {len(self.parameters)} parameters and {state} of "
            f"{len(self._state)} tensors of its state were changed"
        )
        return BudgetError(what, why=why, fix=f"{again}; {less}")

    def _undo(self) -> None:
        self.optimizer.state.clear()
        with torch.no_grad():
            for parameter, copy in zip(self.parameters, self._copies, strict=True):
                parameter.copy_(copy)

    def _changed(self, tensors: list[Any]) -> int:
        now = _versions(tensors)
        return sum(now[key] != self._versions[key] for key in now)


def _versions(tensors: list[Any]) -> dict[int, int]:
    """Count the writes to each tensor so far."""
    # ``_version`` is what autograd's own check of in-place writes reads, and documented
    # nowhere else; there is no public way to ask.
    return {id(tensor): tensor._version for tensor in tensors}  # noqa: SLF001
