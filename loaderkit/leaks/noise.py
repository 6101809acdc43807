"""How far the readings of a series scatter, and what is no noise of theirs.  Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loaderkit.array_types import Floats


FEWEST_READINGS = 5
"""Fewer readings than this after the warm-up say nothing."""
_DEVIATION_OF_NORMAL_NOISE = 1.4826
"""Its standard deviation, in median deviations."""
_NEIGHBOURS = 3
"""Readings on each side of one that may be a spike."""


def theil_sen(times: Sequence[float], values: Sequence[float]) -> float:
    """Find the median slope between all pairs: a few outliers do not move it.

    Args:
        times: When, rising.
        values: The readings.

    Returns:
        Growth per unit of time; 0 with fewer than two readings.

    >>> theil_sen([0, 1, 2, 3], [0, 10, 500, 30])
    10.0
    """
    slopes = []
    for first in range(len(values)):
        for second in range(first + 1, len(values)):
            rise = values[second] - values[first]
            slopes.append(rise / (times[second] - times[first]))
    return statistics.median(slopes) if slopes else 0.0


def slope_error(
    times: list[float],
    values: list[float],
    slope: float,
) -> float:
    """Give the standard error of the slope, for independent noise."""
    middle = statistics.fmean(times)
    spread = sum((t - middle) ** 2 for t in times)
    return residual_deviation(times, values, slope) / math.sqrt(spread)


def residual_deviation(
    times: list[float],
    values: list[float],
    slope: float,
) -> float:
    """Give how far readings lie from a line of this slope, as a standard deviation."""
    levels = [value - slope * time for time, value in zip(times, values, strict=True)]
    middle = statistics.median(levels)
    squares = sum((level - middle) ** 2 for level in levels)
    return math.sqrt(squares / max(1, len(levels) - 2))


def growth_per_epoch(times: list[float], values: list[float]) -> list[float]:
    """Give the growth an epoch between readings."""
    return [
        (values[index + 1] - values[index]) / (times[index + 1] - times[index])
        for index in range(len(values) - 1)
    ]


def noise_floor_of(values: Floats, floor: float) -> float:
    """Give a standard deviation below which a reading counts as exact."""
    # A millionth of the range, and above 0 in any case: variances are divided by it.
    value_range = float(values.max() - values.min())
    return max(floor / 64, 1e-6 * value_range, 1e-12)


def without_spikes(times: list[float], values: list[float]) -> tuple[Floats, Floats]:
    """Leave out readings unlike those around them, as Hampel's filter does."""
    side = _NEIGHBOURS
    distances = [
        abs(values[index] - statistics.median(values[index - side : index + side + 1]))
        for index in range(side, len(values) - side)
    ]
    spikes: set[int] = set()
    if distances:
        limit = 5 * _DEVIATION_OF_NORMAL_NOISE * statistics.median(distances)
        # Readings on a line have no deviation but that of floats.
        limit += 1e-9 * (max(values) - min(values))
        spikes = {
            index + side for index, distance in enumerate(distances) if distance > limit
        }
    if len(spikes) > len(values) // 4:
        spikes = set()  # they are no exception
    clean = [index for index in range(len(values)) if index not in spikes]
    return (
        np.asarray([times[index] for index in clean]),
        np.asarray([values[index] for index in clean]),
    )


def end_of_warmup(values: list[float], floor: float) -> int:
    """Find where the start ends: the last early step unlike those of the second half.

    The first reading always goes: it was taken before anything ran.
    """
    steps = [after - before for before, after in itertools.pairwise(values)]
    if len(steps) < FEWEST_READINGS:
        return min(1, len(steps))
    second_half = steps[len(steps) // 2 :]
    usual = statistics.median(second_half)
    distances = sorted(abs(step - usual) for step in second_half)
    # Besides, a step may differ from the usual one by half of it: what is kept has
    # sizes.
    deviation = _DEVIATION_OF_NORMAL_NOISE * statistics.median(distances)
    spread = 6 * deviation + max(floor, abs(usual) * 0.5)
    # The largest late step may be a jump; the one below it is how far steps go here, as
    # those of something that is kept every eighth epoch.
    limit = max(spread, 1.2 * distances[-2])
    early = steps[: max(1, len(steps) // 3)]
    unlike = [
        index + 1 for index, step in enumerate(early) if abs(step - usual) > limit
    ]
    return max(unlike, default=1)
