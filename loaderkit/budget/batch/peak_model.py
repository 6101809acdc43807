"""Predicts the peak of any batch from its sizes alone, after a few tiny tracked steps.

A step makes the same tensors in the same order whatever its batch, and each one's bytes
are linear in the batch's sizes.  So the sum of live bytes is linear at every point of
the step, and the peak is the largest of those lines: exact, not fitted by phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loaderkit.budget.step.peaks import PHASES, changes_of, peaks_of, totals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from loaderkit.array_types import Floats
    from loaderkit.budget.step.allocation_log import Log

_SAME_LINE_BYTES = 0.5
"""A line that is above another by less than half a byte is not above it: fitted
coefficients of equal tensors differ by rounding."""
_SMALLEST_SINGULAR_VALUE = 1e-9
"""Share of the largest, below which sizes count as dependent (all graphs have four
edges a node); chosen far above rounding and far below any two sizes that differ."""


@dataclass(frozen=True)
class PeakModel:
    """Lines whose largest is the peak."""

    names: tuple[str, ...]
    """What a batch is described by, such as ("graphs", "nodes", "edges")."""
    lines: Floats
    """Coefficients ``[lines, 1 + names]``: a constant, then bytes for one of each."""
    error: float
    """How wrong a prediction may be: the largest factor between the prediction for a
    tracked step and its peak, in either direction, less 1."""
    of_phases: bool = False
    """Whether there is a line for each phase only and not for each moment: the steps
    differ in their operators, as those of a loop over time steps do."""

    def predict(self, sizes: ArrayLike) -> Floats:
        """Predict the peak of batches.

        Args:
            sizes: Their sizes ``[batches, names]``.

        Returns:
            Bytes ``[batches]``.
        """
        described = np.asarray(sizes, np.float64).reshape(-1, len(self.names))
        peaks = np.full(len(described), -np.inf)
        # Line by line: a table [batches, lines] of a simulated epoch would take GBs.
        for line in self.lines:
            np.maximum(peaks, line[0] + described @ line[1:], out=peaks)
        return peaks


def fit_peak_model(
    names: Sequence[str], sizes: ArrayLike, logs: Sequence[Log]
) -> PeakModel:
    """Fit the lines to tracked steps.

    Args:
        names: What batches are described by.
        sizes: Their sizes ``[steps, names]``.
        logs: What lived when, in each.

    Returns:
        The model; of a line for each phase where the steps differ in their order.
    """
    described = np.asarray(sizes, np.float64)
    table = np.hstack([np.ones((len(described), 1)), described])
    curves = [_live_bytes(log) for log in logs]
    of_phases = len({len(curve) for curve in curves}) > 1
    if of_phases:
        curves = [_phase_peaks(log) for log in logs]
    values = np.stack(curves)

    # Squares of lengths are millions of times the number of samples: without scaling
    # the small ones would count as dependent.
    scale = np.maximum(np.abs(table).max(axis=0), 1)
    scaled = np.linalg.lstsq(table / scale, values, rcond=_SMALLEST_SINGULAR_VALUE)[0]
    lines = (scaled / scale[:, None]).T

    predicted = (table @ lines.T).max(axis=1)
    error = prediction_error(predicted, values.max(axis=1))
    return PeakModel(tuple(names), _upper_lines(lines), error, of_phases)


def prediction_error(predicted: ArrayLike, peaks: ArrayLike) -> float:
    """Say how far predictions are from the peaks: a factor, less 1.

    A share of the peak would not do: predictions of a fifth are "80 % off", and a peak
    may be five times the prediction.

    >>> prediction_error([20.0, 110.0], [100.0, 100.0])
    4.0
    """
    predicted, peaks = np.maximum(predicted, 1.0), np.maximum(peaks, 1.0)
    factors = np.maximum(predicted / peaks, peaks / predicted)
    return float(factors.max()) - 1


def _live_bytes(log: Log) -> Floats:
    """Sum the live bytes as the step begins and after every event of it ``[events]``.

    What lies before is no part of it, and not the same in all logs: an optimizer may
    have made its state in an update of its own, in the first of them alone.
    """
    sums = np.cumsum(changes_of(log), dtype=np.float64)
    for position, held in log.inside.items():
        sums[position] += held.likely
    begins_at = log.marks[0].position if log.marks else 0
    return sums[max(0, begins_at - 1) :]


def _phase_peaks(log: Log) -> Floats:
    """Give the highest sum of each phase ``[phases]``."""
    peaks = totals(peaks_of(log))
    return np.array([peaks.get(name, 0) for name in PHASES], np.float64)


def _upper_lines(lines: Floats) -> Floats:
    """Leave out lines that another one is above everywhere (sizes are positive)."""
    # In falling order, a line can only be below one that came before.
    falling = sorted(range(len(lines)), key=lambda number: tuple(-lines[number]))
    upper: list[int] = []
    for number in falling:
        is_below = any(
            (lines[other] >= lines[number] - _SAME_LINE_BYTES).all() for other in upper
        )
        if not is_below:
            upper.append(number)
    return lines[upper]
