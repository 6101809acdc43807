"""Closes the gap between a tracked and a real step by small real steps on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loaderkit.budget.measure import copied, held_bytes, measure_step, tensors_of
from loaderkit.budget.peaks import peaks_of
from loaderkit.budget.pieces import count_samples, cut
from loaderkit.budget.track import track_step

if TYPE_CHECKING:
    from loaderkit.budget.steps import Step

_SMALL_BYTES = 8 << 20
"""What a small real step may take beyond the model."""


def calibrated(
    model: Any, batch: Any, step: Step, phases: dict[str, int], *, grows: bool
) -> dict[str, int] | None:
    """Add to tracked peaks what two small real steps had on top of theirs.

    Args:
        model: A module on the CPU.
        batch: What it is called with.
        step: How a step is made.
        phases: Tracked peaks by phase, of the whole batch.
        grows: Whether the gap may grow with the batch; else it is the weights'.

    Returns:
        Peaks by phase; None when the batch cannot be made smaller.
    """
    pair = _two_small(model, batch, phases)
    if pair is None:
        return None
    points = []
    for small in pair:
        real = measure_step(model, small, step)
        fake = tracked_phases(model, small, step)
        gap = {name: real.get(name, 0) - peak for name, peak in fake.items()}
        points.append((_size(small), gap))
    if not grows:
        points[0] = (points[0][0], points[1][1])
    return {
        name: round(peak + _at(_size(batch), points, name))
        for name, peak in phases.items()
    }


def measured_line(model: Any, batch: Any, step: Step) -> dict[str, int] | None:
    """Extend the peaks of two small real steps to the whole batch.

    Args:
        model: A module on the CPU.
        batch: What it is called with.
        step: How a step is made.

    Returns:
        Peaks by phase; None when the batch cannot be made smaller.
    """
    pair = _two_small(model, batch, {})
    if pair is None:
        return None
    points = [(_size(small), measure_step(model, small, step)) for small in pair]
    names = points[0][1]
    return {name: round(_at(_size(batch), points, name)) for name in names}


def tracked_phases(model: Any, batch: Any, step: Step) -> dict[str, int]:
    """Track a step and give the peaks by phase."""
    return peaks_of(track_step(model, batch, step))[1]


def _at(size: int, points: list[tuple[int, dict[str, int]]], name: str) -> float:
    """Read a straight line through two points."""
    (x0, first), (x1, second) = points
    low, high = first.get(name, 0), second.get(name, 0)
    return low + (high - low) * (size - x0) / max(x1 - x0, 1)


def _two_small(
    model: Any, batch: Any, phases: dict[str, int]
) -> tuple[Any, Any] | None:
    """Choose two sizes, never 1, which takes other kernels (measured on conv3d)."""
    total = count_samples(batch)
    if total < 4:
        return None
    weights = held_bytes(list(model.parameters()))
    grown = max(phases.values(), default=0) - 4 * weights
    most = total
    if not phases:  # nothing is known: a quarter, as long as that is little
        grown, most = 16 * _size(batch), total // 4
    more = min(total, max(4, min(most, _SMALL_BYTES * total // max(grown, 1))))
    sizes = (max(2, more // 2), more)
    return copied(cut(batch, 0, sizes[0])), copied(cut(batch, 0, sizes[1]))


def _size(batch: Any) -> int:
    return held_bytes(tensors_of(batch))
