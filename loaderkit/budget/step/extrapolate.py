"""Extends small real steps to a whole batch, where tracking is not possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.cutting import count_samples, cut
from loaderkit.budget.step.bounded_run import runs_within
from loaderkit.budget.step.measure import copied, held_bytes, measure_step
from loaderkit.budget.step.step_copies import bytes_of_loss
from loaderkit.nests import flatten_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

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
_MUCH_BETTER = 4
"""How many times closer a parabola must be than a line; chosen: all pairs of a batch
are exactly one, and what is padded is no curve at all."""
_COPIES = 5
"""The model, its gradients, two moments, and the original beside them."""


class Points(NamedTuple):
    """Peaks by phase of small real steps."""

    sizes: tuple[int, ...]
    """Bytes of their batches."""
    peaks: tuple[dict[Phase, int], ...]
    """What each took, by phase."""

    def extended(self, size: int, degree: int | None = None) -> dict[Phase, int]:
        """Draw a line, or a parabola, through the last points, to a larger batch.

        Args:
            size: Bytes of the batch.
            degree: 1 for the line, 2 for the parabola; what fits best if None.

        Returns:
            Peaks by phase.
        """
        # A line goes through two points, a parabola through three; the largest are
        # nearest to what is asked about.
        if degree is None:
            degree = self.degree
        count = degree + 1
        sizes, peaks = self.sizes[-count:], self.peaks[-count:]
        extended: dict[Phase, int] = {}
        for phase in peaks[0]:
            terms = [
                peak.get(phase, 0) * _lagrange_weight(sizes, number, size)
                for number, peak in enumerate(peaks)
            ]
            extended[phase] = round(sum(terms))
        return extended

    @property
    def degree(self) -> int:
        """2 where a parabola told the last point much better than a line, else 1."""
        if len(self.sizes) < 4:
            return 1
        return 2 if self._error_of(2) < self._error_of(1) / _MUCH_BETTER else 1

    def error(self) -> float:
        """Give how far the line through all points but the last misses that one."""
        if len(self.sizes) < 3:
            return _LEAST_ERROR
        return self._error_of(self.degree)

    def _error_of(self, degree: int) -> float:
        before = Points(self.sizes[:-1], self.peaks[:-1])
        expected = max(before.extended(self.sizes[-1], degree).values())
        return abs(expected / max(self.peaks[-1].values()) - 1)


def _lagrange_weight(sizes: Sequence[int], number: int, size: int) -> float:
    """Weigh a point in the curve through some, at another place.

    >>> _lagrange_weight([1, 2], 1, 3)
    2.0
    """
    weight = 1.0
    for other in (*sizes[:number], *sizes[number + 1 :]):
        # Parts of a batch may be equally large; then they count as one byte apart.
        weight *= (size - other) / ((sizes[number] - other) or 1)
    return weight


def measure_points(model: torch.nn.Module, batch: object, step: Step) -> Points | None:
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
    model_bytes += bytes_of_loss(model, batch, step)
    usable_bytes = _bytes_for_activations(model, batch, step)
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
        if not runs_within(model, small, step, usable_bytes):
            break
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
    model: torch.nn.Module, batch: object, step: Step
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
    usable_bytes = _bytes_for_activations(model, batch, step)
    if usable_bytes is None or size_of(batch) * _BYTES_FOR_BATCH_BYTE > usable_bytes:
        return None
    if not runs_within(model, batch, step, usable_bytes):
        return None
    return measure_step(model, batch, step)


def _bytes_for_activations(
    model: torch.nn.Module, batch: object, step: Step
) -> int | None:
    """Tell what a real step may take beside the model; None where it cannot be made."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    own_bytes = held_bytes(tensors) + bytes_of_loss(model, batch, step)
    copies_bytes = _COPIES * own_bytes
    if copies_bytes > REAL_BYTES // 2:
        return None
    return REAL_BYTES - copies_bytes


def size_of(batch: object) -> int:
    """Sum the bytes of a batch."""
    return held_bytes(flatten_tensors(batch))
