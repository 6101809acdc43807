"""What each remedy saves for one model and batch: computed by estimating it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.budget.cutting import count_samples, cut, name_of_batch_norm
from loaderkit.budget.remedies import PIECES_WITH_OWN_STATISTICS, REMEDIES, Remedy
from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.measure import copied
from loaderkit.budget.step.train_step import (
    Step,
    blocks_of,
    device_spec,
    dtype_of,
)
from loaderkit.errors import StepError
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from loaderkit.budget.step.estimate import StepEstimate

_BATCH_SHARE = 0.05
"""Of the peak: where half the batch saves less, a smaller one is no remedy.  Chosen:
the batch is then less than a tenth of the peak."""


@dataclass(frozen=True)
class RemedySaving:
    """One remedy and its bytes."""

    remedy: Remedy
    """What to change."""
    saves: int
    """Bytes less at the peak; negative when it costs."""
    peak: int
    """The peak with it."""
    phase: str
    """Where that is."""

    def __str__(self) -> str:
        return (
            f"{self.remedy.name}: saves {format_bytes(self.saves)}, leaves "
            f"{format_bytes(self.peak)} in {self.phase} [{self.remedy.cost}]\n"
            f"       {self.remedy.code}"
        )


def estimate_savings(
    model: torch.nn.Module, batch: object, step: Step, base: StepEstimate
) -> list[RemedySaving]:
    """Estimate the step again with each remedy.

    Args:
        model: A module on the CPU.
        batch: What it is called with.
        step: How a step is made.
        base: The estimate without any.

    Returns:
        Remedies that apply, in the catalogue's order; those that save nothing too, and
        none that torch refuses for this model.
    """
    savings = []
    for remedy in _remedies_for(model):
        remedied = _apply_remedy(remedy, model, batch, step)
        if remedied is None:
            continue
        try:
            with_remedy = estimate(model, remedied.batch, remedied.step)
        except (RuntimeError, StepError):
            # Torch refuses a fused update of sparse gradients, a loss in bfloat16 ...
            continue
        if with_remedy.method == "formula" != base.method:
            # It did not even run with small batches; a formula saves nothing surely.
            continue
        saved_bytes = base.peak - with_remedy.peak
        savings.append(
            RemedySaving(remedy, saved_bytes, with_remedy.peak, with_remedy.phase)
        )
    return savings


def _remedies_for(model: torch.nn.Module) -> Iterator[Remedy]:
    for remedy in REMEDIES:
        is_pieces = remedy.name == PIECES_WITH_OWN_STATISTICS.name
        if is_pieces and name_of_batch_norm(model) is not None:
            yield PIECES_WITH_OWN_STATISTICS
        else:
            yield remedy


class _RemediedStep(NamedTuple):
    """A batch and a step with one thing changed."""

    batch: Any
    step: Step


def _apply_remedy(
    remedy: Remedy, model: torch.nn.Module, batch: object, step: Step
) -> _RemediedStep | None:
    """Apply a remedy; None where it changes nothing."""
    change = remedy.change
    if change is None or (remedy.backends and step.target.kind not in remedy.backends):
        return None
    if change.half_batch:
        count = count_samples(batch)
        if count < 2:
            return None
        # A copy: views would still hold the whole batch.
        return _RemediedStep(copied(cut(batch, 0, count // 2)), step)
    if change.optimizer is not None:
        if step.optimizer is None or step.variant == change.optimizer:
            return None
        return _RemediedStep(batch, step.replace(variant=change.optimizer))
    if change.autocast is not None:
        if step.autocast is not None:
            return None
        return _RemediedStep(batch, step.replace(autocast=dtype_of(change.autocast)))
    if change.checkpoint:
        if not blocks_of(model):
            return None
        return _RemediedStep(batch, step.replace(checkpoint=True))
    if change.target is None or change.target == step.target.kind:
        return None
    return _RemediedStep(batch, step.replace(target=device_spec(change.target)))


def explain_peak(base: StepEstimate, savings: list[RemedySaving]) -> str:
    """Say what the peak is made of, and whether the batch is its cause.

    Args:
        base: The estimate.
        savings: What remedies save.

    Returns:
        One sentence.
    """
    largest = max(base.parts, key=lambda name: base.parts[name])
    sentence = f"The peak is in {base.phase}, mostly {largest}"
    of_half_batch = [s for s in savings if s.remedy.name == "micro-batches"]
    if not of_half_batch:
        return f"{sentence}."
    saved_bytes = of_half_batch[0].saves
    if saved_bytes < _BATCH_SHARE * max(base.peak, 1):
        sentence += "; the batch is not the cause"
        return f"{sentence}: half of it saves {format_bytes(saved_bytes)}."
    return f"{sentence}; half the batch saves {format_bytes(saved_bytes)}."
