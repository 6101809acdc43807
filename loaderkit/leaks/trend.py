"""Does a series of readings grow?  Pure.

Memory of a run that does not leak still moves: it warms up, fills caches, jumps when
the batch doubles, swings with the size of the last batch, is a saw when the collector
comes by.  A leak is growth that goes on: at the end as before, not all in one jump,
and by more than the run's own noise explains.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAKING, STEADY, NEEDS_MORE = "leaking", "steady", "needs more epochs"
ALPHA = 1e-5
"""Chance to call noise a leak, per counter; a run has about ten of them."""
LEAST = 5
"""Fewer readings than this after the warm-up say nothing."""
_STILL = 0.4
"""The last part must grow at least so much of the average, or it is levelling off."""
_JUMP = 0.6
"""More of the growth than this in one step is a jump and not a trend."""

_FALL = 0.4
"""Of the whole range: a fall of a saw."""
_FALLS = 9
"""So many falls, each to more than the last, are no chance."""
_MANY = 12
"""Of so many blocks, one may be unlike the others."""
_INDEPENDENT = 1.2
"""Von Neumann's ratio above which the noise of a long run counts as independent."""


@dataclass(frozen=True)
class Trend:
    """How one counter moved over the epochs."""

    verdict: str
    """"leaking", "steady" or "needs more epochs"."""
    per_epoch: float
    """Median slope after the warm-up, in the counter's unit."""
    low: float
    """The slope is above this with 99 % confidence."""
    noise: float
    """How far readings lie from the line, as a standard deviation."""
    warmup: int
    """Readings left out at the start."""
    more_epochs: int
    """How many more would decide it; 0 when it is decided."""
    why: str
    """What decided, in words."""

    @property
    def rising(self) -> bool:
        """Whether it is a leak."""
        return self.verdict == LEAKING


def fit_trend(
    readings: Sequence[float],
    *,
    floor: float = 0.0,
    warmup: int | None = None,
    at: Sequence[float] | None = None,
) -> Trend:
    """Judge one counter.

    Args:
        readings: One an epoch, the oldest first; the first is taken before or after the
            first epoch.
        floor: Growth an epoch that nobody minds, in the counter's unit.
        warmup: Readings to leave out at the start; found from the data if None.
        at: The epoch of each reading, when some have none; 0, 1, 2, ... if None.

    Returns:
        The verdict with its numbers.

    >>> fit_trend([50, 90, 100, 108, 116, 124, 132, 140]).verdict
    'leaking'
    >>> fit_trend([50, 90, 100, 100, 100, 100, 100, 100]).verdict
    'steady'
    """
    times = list(map(float, range(len(readings)) if at is None else at))
    values = list(map(float, readings))
    cut = _warmup(values, floor) if warmup is None else warmup
    cut = max(0, min(cut, len(values) - 1))
    bottom = _bottom_of_saw(times, values, floor)
    times, values = times[cut:], values[cut:]
    if len(values) < LEAST:
        why = f"{len(values)} readings after the warm-up are too few"
        return Trend(NEEDS_MORE, 0.0, 0.0, 0.0, cut, LEAST - len(values), why)
    slope = theil_sen(times, values)
    noise = _noise(times, values, slope)
    low = slope - _quantile(len(values) - 2, 0.01) * _slope_error(times, values, slope)
    verdict, more, why = _judge(times, values, slope, floor)
    if bottom is not None and verdict != LEAKING:
        slope, more = bottom
        low = min(low, slope)
        verdict = NEEDS_MORE if more else LEAKING
        why = "it is a saw that falls to more each time"
    return Trend(verdict, slope, low, noise, cut, more, why)


def _judge(
    times: list[float], values: list[float], slope: float, floor: float
) -> tuple[str, int, str]:
    """Ask the questions in turn; each can only clear the counter, none convict it."""
    count = len(values)
    if slope <= floor:
        little = slope > 0 and values[-1] - values[0] > floor
        return (
            STEADY,
            0,
            "it grows too little to mind" if little else "it does not grow",
        )
    steps = _steps(times, values)
    if _jumped(steps, floor):
        return STEADY, 0, "all its growth is one or two jumps"
    if not _goes_on(steps, slope):
        return STEADY, 0, "it grew, and has levelled off"
    if _consistent(steps, floor) or _above_noise(times, values, slope, floor):
        return LEAKING, 0, "it grows as much in the last epochs as before"
    more = max(3, round(count * 0.5))
    return NEEDS_MORE, more, "its growth is not yet clear of its noise"


def _bottom_of_saw(
    times: list[float], values: list[float], floor: float
) -> tuple[float, int] | None:
    """Tell whether what is left after each deep fall grows, by about as much each time.

    Falls must come at equal times, give or take an epoch.  Three of them happen in some
    clean runs, which then need more epochs; nine, each to more, once in 360,000.
    """
    deep = _FALL * (max(values) - min(values))
    falls = [i for i in range(1, len(values)) if values[i - 1] - values[i] > deep]
    when = [times[i] for i in falls]
    rises = _steps(when, [values[i] for i in falls])
    if len(rises) < 2 or min(rises) <= floor or max(rises) > 1.5 * min(rises):
        return None
    apart = [b - a for a, b in itertools.pairwise(when)]
    if max(apart) - min(apart) > 2 or max(apart) > 2 * min(apart):
        return None
    missing = max(0, _FALLS - len(falls)) * statistics.fmean(apart)
    return statistics.median(rises), math.ceil(missing)


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
    pairs = [
        (values[j] - values[i]) / (times[j] - times[i])
        for i in range(len(values))
        for j in range(i + 1, len(values))
    ]
    return statistics.median(pairs) if pairs else 0.0


def _warmup(values: list[float], floor: float) -> int:
    """Find where the start ends: the last early step unlike those of the second half.

    The first reading always goes: it was taken before anything ran.
    """
    steps = [b - a for a, b in itertools.pairwise(values)]
    if len(steps) < LEAST:
        return min(1, len(steps))
    late = steps[len(steps) // 2 :]
    usual = statistics.median(late)
    spread = statistics.median(abs(step - usual) for step in late)
    limit = 6 * 1.48 * spread + max(floor, abs(usual) * 0.5)
    early = steps[: max(1, len(steps) // 3)]
    unlike = [i + 1 for i, step in enumerate(early) if abs(step - usual) > limit]
    return max(unlike, default=1)


def _steps(times: list[float], values: list[float]) -> list[float]:
    """Give the growth an epoch between readings."""
    return [
        (values[i + 1] - values[i]) / (times[i + 1] - times[i])
        for i in range(len(values) - 1)
    ]


def _jumped(steps: list[float], floor: float) -> bool:
    """Tell whether little growth is left without the greatest steps."""
    ordered = sorted(steps)
    growth = sum(steps)
    without = ordered[:-1] if len(steps) < 10 else ordered[:-2]
    rest = sum(without)
    return rest < (1 - _JUMP) * growth or rest / len(without) <= floor / 2


def _goes_on(steps: list[float], slope: float) -> bool:
    """Tell whether the last quarter and the last half still grow like the whole."""
    for part in (2, 4):
        last = steps[-max(2, len(steps) // part) :]
        if sum(last) / len(last) < _STILL * slope:
            return False
        if len(last) >= 4 and statistics.median(_pairs(last)) < _STILL / 2 * slope:
            return False
    return True


def _pairs(steps: list[float]) -> list[float]:
    """Average neighbours, so that stairs two steps long have no flat parts."""
    width = max(2, len(steps) // 2)
    return [
        sum(steps[i : i + width]) / width for i in range(len(steps) - width + 1)
    ] or steps


def _consistent(steps: list[float], floor: float) -> bool:
    """Tell whether the growth repeats itself, per epoch or per few epochs.

    The growth of blocks of 1 to 6 epochs is put to a t test.  It holds for a random
    walk too, whose steps have no direction; for readings with independent noise it asks
    for more than needed.
    """
    for width in range(1, 7):
        count = len(steps) // width
        if count < LEAST - 1:
            return False
        recent = steps[len(steps) - count * width :]
        blocks = [sum(recent[i * width : (i + 1) * width]) for i in range(count)]
        blocks = _without_outlier(blocks)
        count = len(blocks)
        mean = statistics.fmean(blocks)
        error = statistics.stdev(blocks) / math.sqrt(count)
        if mean - floor * width * 0.5 > _quantile(count - 1, ALPHA / 3) * error:
            return True
    return False


def _without_outlier(blocks: list[float]) -> list[float]:
    """Leave out the strangest of many: a single big allocation, or the collector."""
    if len(blocks) < _MANY:
        return blocks
    usual = statistics.median(blocks)
    strangest = max(range(len(blocks)), key=lambda i: abs(blocks[i] - usual))
    return blocks[:strangest] + blocks[strangest + 1 :]


def _above_noise(
    times: list[float], values: list[float], slope: float, floor: float
) -> bool:
    """Tell whether a line explains the readings far better than noise does.

    Only where the noise is independent from reading to reading (von Neumann's ratio,
    2 for such noise and near 0 for a random walk): a walk is not taken for a line.
    """
    rest = [v - slope * t for t, v in zip(times, values, strict=True)]
    centre = statistics.fmean(rest)
    power = sum((r - centre) ** 2 for r in rest)
    turns = sum((b - a) ** 2 for a, b in itertools.pairwise(rest))
    if power and turns / power < _INDEPENDENT + 8 / len(values):
        return False
    error = _slope_error(times, values, slope)
    return slope - floor * 0.5 > _quantile(len(values) - 2, ALPHA) * error


def _slope_error(times: list[float], values: list[float], slope: float) -> float:
    """Give the standard error of the slope, for independent noise."""
    middle = statistics.fmean(times)
    spread = sum((t - middle) ** 2 for t in times)
    return _noise(times, values, slope) / math.sqrt(spread)


def _noise(times: list[float], values: list[float], slope: float) -> float:
    rest = [v - slope * t for t, v in zip(times, values, strict=True)]
    middle = statistics.median(rest)
    return math.sqrt(sum((r - middle) ** 2 for r in rest) / max(1, len(rest) - 2))


@functools.cache
def _quantile(freedom: int, alpha: float) -> float:
    """Give Student's t that noise exceeds with a chance of ``alpha``.

    >>> round(_quantile(10, 0.01), 2), round(_quantile(3, 0.01), 2)
    (2.76, 4.54)
    """
    low, high = 0.0, 1 / math.tan(math.pi * alpha)  # exact for one degree of freedom
    for _ in range(60):
        middle = (low + high) / 2
        beyond = _beyond(middle, max(1, freedom)) > alpha
        low, high = (middle, high) if beyond else (low, middle)
    return high


def _beyond(t: float, freedom: int) -> float:
    """Give the chance of a Student's t above ``t``, by its finite series."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = total = 0.0
    if freedom > 1:
        term = total = cosine if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    inside = total * math.sin(angle)
    if odd:
        inside = 2 / math.pi * (angle + inside)
    return (1 - inside) / 2
