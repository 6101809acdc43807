"""Prices any batch from its sizes alone, after a few tiny tracked steps.

A step makes the same tensors in the same order whatever its batch, and each one's bytes
are linear in the batch's sizes.  So the sum of live bytes is linear at every point of
the step, and the peak is the largest of those lines: exact, not fitted by phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.budget.peaks import PHASES, changes_of, peaks_of, phases_of, totals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from loaderkit.budget.allocation_log import Log

    Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Surrogate:
    """Lines whose largest is the peak."""

    names: tuple[str, ...]
    """What a batch is described by, such as ("graphs", "nodes", "edges")."""
    lines: Floats
    """Coefficients ``[lines, 1 + names]``: a constant, then bytes for one of each."""
    phases: tuple[str, ...]
    """The phase each line belongs to."""
    error: float
    """How wrong a price may be: the largest factor between the price of a tracked step
    and its peak, in either direction, less 1."""

    def price(self, sizes: Any) -> Floats:
        """Give the peak of batches.

        Args:
            sizes: Their sizes ``[batches, names]``.

        Returns:
            Bytes ``[batches]``.
        """
        described = np.asarray(sizes, np.float64).reshape(-1, len(self.names))
        best = np.full(len(described), -np.inf)
        for line in self.lines:  # one at a time: no [batches, lines] table
            np.maximum(best, line[0] + described @ line[1:], out=best)
        return best


def fit(
    names: Sequence[str], sizes: Any, logs: Sequence[Log],
    gaps: Mapping[str, Floats] | None = None,
) -> Surrogate:  # fmt: skip
    """Make a surrogate from tracked steps.

    Args:
        names: What batches are described by.
        sizes: Their sizes ``[steps, names]``.
        logs: What lived when, in each.
        gaps: What to add to the lines of a phase ``[1 + names]``.

    Returns:
        The surrogate; lines of whole phases where the steps differ in their order.
    """
    described = np.asarray(sizes, np.float64)
    table = np.hstack([np.ones((len(described), 1)), described])
    aligned = len({len(log.events) for log in logs}) == 1
    curves = [_sums(log) if aligned else _highest(log) for log in logs]
    values = np.stack([curve for curve, _ in curves])
    scale = np.maximum(np.abs(table).max(axis=0), 1)
    solved = np.linalg.lstsq(table / scale, values, rcond=1e-9)[0]
    lines = (solved / scale[:, None]).T
    peaks = values.max(axis=1)
    found = (table @ lines.T).max(axis=1)
    error = price_error(found, peaks)
    phases = curves[0][1]
    for number, phase in enumerate(phases):
        if gaps and phase in gaps:
            lines[number] = lines[number] + gaps[phase]
    keep = _undominated(lines)
    return Surrogate(tuple(names), lines[keep], tuple(phases[i] for i in keep), error)


def price_error(prices: Any, peaks: Any) -> float:
    """Say how far prices are from what they are for: a factor, less 1.

    A share of the peak would not do: prices of a fifth are "80 % off", and a peak may
    be five times the price.

    >>> price_error([20.0, 110.0], [100.0, 100.0])
    4.0
    """
    told, true = np.maximum(prices, 1.0), np.maximum(peaks, 1.0)
    return float(np.maximum(told / true, true / told).max()) - 1


def in_sizes(sizes: Any, amounts: Sequence[int]) -> Floats:
    """Express an amount by the sizes of batches.

    Args:
        sizes: Sizes of some batches ``[batches, names]``.
        amounts: Such as their bytes ``[batches]``.

    Returns:
        A constant, then the amount for one of each ``[1 + names]``.
    """
    described = np.asarray(sizes, np.float64)
    table = np.hstack([np.ones((len(described), 1)), described])
    solved = np.linalg.lstsq(table, np.asarray(amounts, np.float64), rcond=1e-9)[0]
    return np.asarray(solved, np.float64)


def _sums(log: Log) -> tuple[Floats, list[str]]:
    """Sum the live bytes after every event, and name the phase of each."""
    sums = np.cumsum(changes_of(log), dtype=np.float64)
    for position, held in log.inside.items():
        sums[position] += held.likely
    return sums, phases_of(log)


def _highest(log: Log) -> tuple[Floats, list[str]]:
    """Take the highest sum of each phase."""
    peaks = totals(peaks_of(log))
    return np.array([peaks.get(name, 0) for name in PHASES], np.float64), list(PHASES)


def _undominated(lines: Floats) -> list[int]:
    """Keep the lines that no other one is above everywhere (sizes are positive)."""
    order = sorted(range(len(lines)), key=lambda i: tuple(-lines[i]))
    kept: list[int] = []
    for i in order:
        if not any((lines[j] >= lines[i] - 0.5).all() for j in kept):
            kept.append(i)
    return kept
