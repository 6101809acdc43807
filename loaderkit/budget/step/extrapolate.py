"""Extends small real steps to a whole batch, where tracking is not possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.budget.cutting import count_samples, cut
from loaderkit.budget.step.measure import copied, held_bytes, measure_step
from loaderkit.nests import flatten_tensors

if TYPE_CHECKING:
    import torch

    from loaderkit.budget.step.allocation_log import Phase
    from loaderkit.budget.step.train_step import Step

REAL_BYTES = 12 << 20
"""What a real step may take; derived: with what small calls of kernels take, an
estimate stays below the 16 MB that the documentation states."""
_LEAST_ERROR = 0.05
"""Share of the peak by which a line may be off that no third point tells of; chosen."""
_FEWEST_SAMPLES = 4
"""Of a batch: fewer give no two smaller ones."""
_BYTES_FOR_BATCH_BYTE = 16
"""What a step may take for a byte of its batch before it was tried; chosen."""
_COPIES = 5
"""The model, its gradients, two moments, and the original beside them."""


class Points(NamedTuple):
    """Peaks by phase of small real steps."""

    sizes: tuple[int, ...]
    """Bytes of their batches."""
    peaks: tuple[dict[Phase, int], ...]
    """What each took, by phase."""

    def extended(self, size: int) -> dict[Phase, int]:
        """Draw a straight line through the last two, to a batch of so many bytes."""
        (x0, x1), (first, second) = self.sizes[-2:], self.peaks[-2:]
        extended: dict[Phase, int] = {}
        for phase in first:
            low, high = first.get(phase, 0), second.get(phase, 0)
            slope = (high - low) / max(x1 - x0, 1)
            extended[phase] = round(high + slope * (size - x1))
        return extended

    def error(self) -> float:
        """Give how far the line through all points but the last misses that one."""
        if len(self.sizes) < 3:
            return _LEAST_ERROR
        before = Points(self.sizes[:-1], self.peaks[:-1])
        expected = max(before.extended(self.sizes[-1]).values())
        return abs(expected / max(self.peaks[-1].values()) - 1)


def measure_points(model: torch.nn.Module, batch: Any, step: Step) -> Points | None:
    """Run three small steps of growing size for real.

    Args:
        model: A module on the CPU; a copy is trained.
        batch: What it is called with.
        step: How a step is made.

    Returns:
        What they took; None when the model or the smallest batch is too large to be run
        within :data:`REAL_BYTES`, or the batch cannot be made smaller.
    """
    total = count_samples(batch)
    model_bytes = held_bytes([*model.parameters(), *model.buffers()])
    usable_bytes = _bytes_for_activations(model)
    if total < _FEWEST_SAMPLES or usable_bytes is None:
        return None
    # Never one sample: it takes other kernels (measured on conv3d).
    count = 2
    sizes: list[int] = []
    peaks: list[dict[Phase, int]] = []
    while True:
        small = copied(cut(batch, 0, count))
        if not sizes and size_of(small) * _BYTES_FOR_BATCH_BYTE > usable_bytes:
            return None
        phases = measure_step(model, small, step)
        sizes.append(size_of(small))
        peaks.append(phases)
        # The next batch takes twice as much, at most: stop before the room is used up.
        next_bytes = 2 * (max(phases.values()) - model_bytes)
        if count == total or next_bytes > usable_bytes:
            break
        count = min(2 * count, total)
    if len(sizes) < 2:
        return None
    return Points(tuple(sizes), tuple(peaks))


def measure_whole(
    model: torch.nn.Module, batch: Any, step: Step
) -> dict[Phase, int] | None:
    """Run the step itself for real, if it is small.

    Args:
        model: A module on the CPU; a copy is trained.
        batch: What it is called with.
        step: How a step is made.

    Returns:
        Bytes by phase; None when model or batch are too large for
        :data:`REAL_BYTES`.
    """
    usable_bytes = _bytes_for_activations(model)
    if usable_bytes is None or size_of(batch) * _BYTES_FOR_BATCH_BYTE > usable_bytes:
        return None
    return measure_step(model, batch, step)


def _bytes_for_activations(model: torch.nn.Module) -> int | None:
    """Tell what a real step may take beside the model; None where it cannot be made."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    copies_bytes = _COPIES * held_bytes(tensors)
    if copies_bytes > REAL_BYTES // 2:
        return None
    return REAL_BYTES - copies_bytes


def size_of(batch: Any) -> int:
    """Sum the bytes of a batch."""
    return held_bytes(flatten_tensors(batch))
