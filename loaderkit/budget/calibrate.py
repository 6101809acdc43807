"""Closes the gap between a tracked and a real step by small real steps on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loaderkit.budget.measure import copied, held_bytes, measure_step, tensors_of
from loaderkit.budget.peaks import peaks_of
from loaderkit.budget.pieces import count_samples, cut
from loaderkit.budget.track import track_step

if TYPE_CHECKING:
    from loaderkit.budget.log import Log
    from loaderkit.budget.steps import Step

_SMALL_BYTES = 8 << 20
"""What a small real step may take beyond the model."""


@dataclass(frozen=True)
class Gap:
    """What real steps take on top of tracked ones: a line in the batch's bytes."""

    lines: dict[str, tuple[float, float]]
    """(bytes of an empty batch, bytes for each byte of a batch) by phase."""

    def add(self, phases: dict[str, int], size: int) -> dict[str, int]:
        """Add it to tracked peaks of a batch of so many bytes."""
        return {
            name: round(peak + self.lines[name][0] + self.lines[name][1] * size)
            for name, peak in phases.items()
        }


def measured_gap(model: Any, batch: Any, step: Step, log: Log) -> Gap | None:
    """Measure by two small real steps what tracking cannot know.

    Args:
        model: A module on the CPU.
        batch: What it is called with.
        step: How a step is made.
        log: The tracked step of the whole batch, which says what was assumed.

    Returns:
        The gap; None when nothing was assumed that can be measured here, or the batch
        cannot be made smaller.
    """
    unknown = {what for what, _ in log.assumptions}
    if not unknown or step.target.kind != "cpu":
        return None
    phases = peaks_of(log)[1]
    pair = _two_small(model, batch, max(*phases.values(), log.workspace))
    if pair is None:
        return None
    try:
        points = [(size_of(small), _gap(model, small, step)) for small in pair]
    except Exception:  # noqa: BLE001 -- a model may need more samples than that
        return None
    if all("weights" in what for what in unknown):  # those do not grow with a batch
        points[0] = (points[0][0], points[1][1])
    return Gap({name: _line(points, name) for name in phases})


def _gap(model: Any, batch: Any, step: Step) -> dict[str, int]:
    real, fake = measure_step(model, batch, step), tracked_phases(model, batch, step)
    return {name: real.get(name, 0) - peak for name, peak in fake.items()}


def measured_line(model: Any, batch: Any, step: Step) -> dict[str, int] | None:
    """Extend the peaks of two small real steps to the whole batch.

    Args:
        model: A module on the CPU.
        batch: What it is called with.
        step: How a step is made.

    Returns:
        Peaks by phase; None when the batch cannot be made smaller.
    """
    pair = _two_small(model, batch, None)
    if pair is None:
        return None
    points = [(size_of(small), measure_step(model, small, step)) for small in pair]
    lines = {name: _line(points, name) for name in points[0][1]}
    return Gap(lines).add(dict.fromkeys(lines, 0), size_of(batch))


def tracked_phases(model: Any, batch: Any, step: Step) -> dict[str, int]:
    """Track a step and give the peaks by phase."""
    return peaks_of(track_step(model, batch, step))[1]


def _line(points: list[tuple[int, dict[str, int]]], name: str) -> tuple[float, float]:
    """Draw a straight line through two points."""
    (x0, first), (x1, second) = points
    low, high = first.get(name, 0), second.get(name, 0)
    slope = (high - low) / max(x1 - x0, 1)
    return low - slope * x0, slope


def _two_small(model: Any, batch: Any, expected: int | None) -> tuple[Any, Any] | None:
    """Choose two sizes, never 1, which takes other kernels (measured on conv3d)."""
    total = count_samples(batch)
    if total < 4:
        return None
    weights = held_bytes(list(model.parameters()))
    if expected is None:  # nothing is known: a quarter, as long as that is little
        grown, most = 16 * size_of(batch), total // 4
    else:
        grown, most = expected - 4 * weights, total
    more = min(total, max(4, min(most, _SMALL_BYTES * total // max(grown, 1))))
    sizes = (max(2, more // 2), more)
    return copied(cut(batch, 0, sizes[0])), copied(cut(batch, 0, sizes[1]))


def size_of(batch: Any) -> int:
    """Sum the bytes of a batch."""
    return held_bytes(tensors_of(batch))
