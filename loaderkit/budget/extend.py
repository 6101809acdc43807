"""Extends small real steps to a whole batch, where tracking is not possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.budget.measure import copied, held_bytes, measure_step, tensors_of
from loaderkit.budget.pieces import count_samples, cut

if TYPE_CHECKING:
    from loaderkit.budget.train_step import Step

REAL_BYTES = 12 << 20
"""What a real step may take; with what small calls of kernels take, an estimate stays
below the 16 MB that the documentation states."""
_COPIES = 5
"""The model, its gradients, two moments, and the original beside them."""


class Points(NamedTuple):
    """Peaks by phase of small real steps."""

    sizes: tuple[int, ...]
    """Bytes of their batches."""
    peaks: tuple[dict[str, int], ...]
    """What each took, by phase."""

    def extended(self, size: int) -> dict[str, int]:
        """Draw a straight line through the last two, to a batch of so many bytes."""
        (x0, x1), (first, second) = self.sizes[-2:], self.peaks[-2:]
        extended = {}
        for name in first:
            low, high = first.get(name, 0), second.get(name, 0)
            slope = (high - low) / max(x1 - x0, 1)
            extended[name] = round(high + slope * (size - x1))
        return extended

    def error(self) -> float:
        """Give how far the line through all points but the last misses that one."""
        if len(self.sizes) < 3:
            return 0.05
        before = Points(self.sizes[:-1], self.peaks[:-1])
        expected = max(before.extended(self.sizes[-1]).values())
        return abs(expected / max(self.peaks[-1].values()) - 1)


def measure_points(model: Any, batch: Any, step: Step) -> Points | None:
    """Run three small steps of growing size for real.

    Args:
        model: A module on the CPU; a copy is trained.
        batch: What it is called with.
        step: How a step is made.

    Returns:
        What they took; None when the model or the smallest batch is too large to be run
        within :data:`REAL_BYTES`, or the batch cannot be made smaller.
    """
    total, weights = count_samples(batch), _weights(model)
    if total < 4 or _COPIES * weights > REAL_BYTES // 2:
        return None
    room = REAL_BYTES - _COPIES * weights
    # never one sample: it takes other kernels (measured on conv3d)
    count = 2
    sizes: list[int] = []
    peaks: list[dict[str, int]] = []
    while True:
        small = copied(cut(batch, 0, count))
        if not sizes and size_of(small) * 16 > room:
            return None
        phases = measure_step(model, small, step)
        sizes.append(size_of(small))
        peaks.append(phases)
        # the next batch takes twice as much, at most: stop before the room is used up
        if count == total or 2 * (max(phases.values()) - weights) > room:
            break
        count = min(2 * count, total)
    if len(sizes) < 2:
        return None
    return Points(tuple(sizes), tuple(peaks))


def _weights(model: Any) -> int:
    return held_bytes([*model.parameters(), *model.buffers()])


def size_of(batch: Any) -> int:
    """Sum the bytes of a batch."""
    return held_bytes(tensors_of(batch))
