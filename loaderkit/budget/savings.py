"""What each remedy saves for one model and batch: computed by estimating it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loaderkit.budget.estimate import estimate
from loaderkit.budget.measure import copied
from loaderkit.budget.pieces import count_samples, cut
from loaderkit.budget.remedies import REMEDIES, Remedy
from loaderkit.budget.train_step import Step, blocks_of, device_spec, dtype_of
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from loaderkit.budget.estimate import StepEstimate


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


def savings(
    model: Any, batch: Any, step: Step, base: StepEstimate
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
    found = []
    for remedy in REMEDIES:
        changed = _changed(model, batch, step, remedy)
        if changed is None:
            continue
        try:
            other = estimate(model, *changed)
        except RuntimeError:
            continue  # of torch: a fused update of sparse gradients, a loss in bfloat16
        if other.method == "formula" != base.method:
            continue  # it did not even run with small batches
        saves = base.peak - other.peak
        found.append(RemedySaving(remedy, saves, other.peak, other.phase))
    return found


def _changed(
    model: Any, batch: Any, step: Step, remedy: Remedy
) -> tuple[Any, Step] | None:
    """Apply a remedy; None where it changes nothing."""
    change = remedy.change
    if not change or (remedy.backends and step.target.kind not in remedy.backends):
        return None
    if "batch" in change:
        count = count_samples(batch)
        return None if count < 2 else (copied(cut(batch, 0, count // 2)), step)
    if "optimizer" in change:
        none = step.optimizer is None or step.variant == change["optimizer"]
        return None if none else (batch, step.but(variant=change["optimizer"]))
    if "autocast" in change:
        kind = dtype_of(change["autocast"])
        return None if step.autocast is not None else (batch, step.but(autocast=kind))
    if "checkpoint" in change:
        return (batch, step.but(checkpoint=True)) if blocks_of(model) else None
    if step.target.kind == change.get("target"):
        return None
    return batch, step.but(target=device_spec(change["target"]))


def explain_peak(base: StepEstimate, found: list[RemedySaving]) -> str:
    """Say what the peak is made of, and whether the batch is its cause.

    Args:
        base: The estimate.
        found: What remedies save.

    Returns:
        One sentence.
    """
    largest = max(base.parts, key=lambda name: base.parts[name])
    said = f"The peak is in {base.phase}, mostly {largest}"
    half = next((g for g in found if g.remedy.name == "micro-batches"), None)
    if half is None:
        return said + "."
    share = half.saves / max(base.peak, 1)
    if share < 0.05:
        said += "; the batch is not the cause"
        return f"{said}: half of it saves {format_bytes(half.saves)}."
    return f"{said}; half the batch saves {format_bytes(half.saves)}."
