"""Says whether pieces equal the whole, and what an update that ran out left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loaderkit.budget.pieces import count_samples, cut
from loaderkit.errors import BudgetError

if TYPE_CHECKING:
    import torch


def unequal_halves(part: Any) -> list[Any]:
    """Cut off the first sample: pieces of unequal sizes show wrong weights."""
    return [cut(part, 0, 1), cut(part, 1, count_samples(part))]


def tolerance_of(gradients: list[torch.Tensor]) -> float:
    """Give the share by which rounding may part two sums of the same gradients.

    They were computed in float32 at best; 2e-3 is what sums of some thousand terms of
    float32 stay well below; the smallest deviation that was seen to matter is 1.3 %.
    """
    return 2e-3 if gradients else 0.0


def deviation_error(share: float, weigh: Any) -> BudgetError:
    """Say by how much pieces differ from the whole, and what may be the cause."""
    what = f"Pieces do not equal the whole: their gradients differ by {share:.1%}."
    why = (
        f"the loss is no mean over {weigh!r} (a sum, a class weight, ignore_index), or "
        "a layer or loss mixes samples (a norm without batch=, contrastive losses)"
    )
    fix = (
        "weigh=lambda piece: ... counts what the loss is a mean over; independent="
        "False where samples are mixed; verify=False where the difference is meant"
    )
    return BudgetError(what, why=why, fix=fix)


def update_error(optimizer: Any, *, undone: bool) -> BudgetError:
    """Say what an update that ran out of memory left behind."""
    name = type(optimizer).__name__
    if undone:
        what = f"The first update of {name} ran out of memory, and was undone."
        why = "the optimizer makes its state then"
    else:
        what = f"An update of {name} ran out of memory half-way."
        why = "parameters may be updated in part: go on from the last checkpoint"
    fix = f"torch.optim.{name}(..., fused=True), or foreach=False, takes less"
    return BudgetError(what, why=why, fix=fix)
