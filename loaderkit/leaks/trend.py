"""Does a series of readings grow?  Pure.

Memory of a run that does not leak still moves: it warms up, fills caches, jumps when
the batch doubles, swings with the size of the last batch, is a saw when the collector
comes by.  A leak is growth that goes on.

Two questions are asked, in this order.  *Is the growth significant?*  Against noise
that is independent from reading to reading (a line through the readings), and against
noise that adds up (the growth of blocks of epochs).  *Does it go on?*  Lines are
compared with shapes that are flat at the end (:mod:`loaderkit.leaks.shapes`).  What is
significant and goes on is a leak; what is not significant, or has clearly ended, is
steady; all between needs more epochs, and says how many.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from loaderkit.leaks.shapes import LineFit, best_ended, criterion_of, fit_line
from loaderkit.leaks.students_t import quantile, upper_tail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Verdict: TypeAlias = Literal["leaking", "steady", "needs more epochs"]
LEAKING: Final = "leaking"
STEADY: Final = "steady"
NEEDS_MORE: Final = "needs more epochs"
ALPHA = 1e-5
"""Chance to call noise a leak, per counter; a run has about ten of them."""
_CHANCE_OF_HINT = 0.03
"""Chance at which noise looks like growth, so that the run needs more epochs.  At 0.01
one in 25 lines of 5 standard errors is missed."""
FEWEST_READINGS = 5
"""Fewer readings than this after the warm-up say nothing."""
_GOES_ON_NATS = 1.0
"""By so much a line must fit better than any ended shape.  Chosen: at 0.5 twice as many
of the clean series in tests/leaks/series.py are called leaks; at 3 a noisy line of 8
standard errors hardly ever is."""
_ENDED_NATS = 3.0
"""By so much an ended shape must fit better than any line: odds of 20 to 1."""
_LATE_SHARE = 0.4
"""The last part must grow at least so much of the average, or it is levelling off."""
_EMPTIED_SHARE = 0.6
"""A fall by this share of what had grown may be a list that was emptied."""
_DEEP_FALL_SHARE = 0.4
"""Of the whole range: a fall of a saw."""
_SURE_FALLS = 9
"""So many falls, each to more than the last, are no chance."""
_MANY_BLOCKS = 12
"""Of so many blocks, one may be unlike the others."""
_LONG_CLIMB = 18
"""Steps of a climb; independent noise climbs so far once in 10^15 runs."""
_CLIMB_SHARE = 0.5
"""The last third of a climb must grow at least so much of the average."""
_CLIMB_NATS = 4.0
"""By so much a line must fit a climb better than any ended shape."""
_FEWEST_FREEDOM = 6
"""Degrees of freedom of a line whose readings echo: the echo is in its error already,
and with 1 or 2 degrees no growth at all is significant."""
_WARM_UP_STEPS = 3
"""Steps at the start that are no stairs: memory is taken then in any case."""
_MOST_TIMES_LONGER = 10
"""Times as long a run as now is the most that is asked for."""


@dataclass(frozen=True)
class Trend:
    """How one counter moved over the epochs."""

    verdict: Verdict
    """Whether it is a leak, or how sure that is not."""
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
    detectable: float = 0.0
    """Growth an epoch that would have been called a leak in this noise."""

    @property
    def rising(self) -> bool:
        """Whether it is a leak."""
        return self.verdict == LEAKING

    @property
    def tolerated(self) -> bool:
        """Whether it grows beyond doubt, by less than anybody minds."""
        return self.why == _TOLERATED


_TOLERATED = "it grows too little to mind: less than the tolerance"


@dataclass(frozen=True)
class _Decision:
    verdict: Verdict
    why: str
    more_epochs: int = 0

    @property
    def tolerated(self) -> bool:
        return self.why == _TOLERATED


@dataclass(frozen=True)
class _Evidence:
    """What one view of the noise says of a series."""

    chance: float
    """That such noise alone grows so much."""
    t: float
    """Growth above half of the tolerance, in standard errors."""
    threshold: float
    """What ``t`` must exceed to be significant."""
    goes_on: bool
    """Whether the growth clearly goes on."""
    exponent: float
    """``t`` grows with this power of the length of the run."""

    @property
    def significant(self) -> bool:
        return self.t > self.threshold

    def epochs_needed(self, epochs: float) -> float:
        """Tell the length of a run that would make it significant, probably."""
        # What was seen is itself uncertain by one standard error; two more make the
        # next look significant in 98 of 100 runs.
        wanted = self.threshold + 3.0
        longer: float = (wanted / max(self.t, 1.0)) ** (1 / self.exponent)
        return epochs * longer


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
    cut = _end_of_warmup(values, floor) if warmup is None else warmup
    cut = max(0, min(cut, len(values) - 1))
    bottom = _sawtooth_floor(times, values, floor)
    stairs = _epochs_until_stairs_are_sure(times, values, floor)
    times, values = times[cut:], values[cut:]
    if len(values) < FEWEST_READINGS:
        why = f"{len(values)} readings after the warm-up are too few"
        return Trend(NEEDS_MORE, 0.0, 0.0, 0.0, cut, FEWEST_READINGS - len(values), why)
    slope = theil_sen(times, values)
    noise = _residual_deviation(times, values, slope)
    error = _slope_error(times, values, slope)
    low = slope - quantile(len(values) - 2, 0.01) * error
    detectable = floor / 2 + quantile(len(values) - 2, ALPHA) * error
    decision = _decide(times, values, slope, floor)
    if bottom is not None:
        # What is left after each fall says how fast it grows beneath the saw.
        slope, more = bottom
        low = min(low, slope)
        if decision.verdict != LEAKING:
            why = "it is a saw that falls to more each time"
            decision = _Decision(NEEDS_MORE if more else LEAKING, why, more)
    if stairs is not None and decision.verdict == STEADY and not decision.tolerated:
        why = "it grows in even steps, too few of them to be sure"
        decision = _Decision(NEEDS_MORE, why, stairs)
    return Trend(
        decision.verdict, slope, low, noise, cut, decision.more_epochs, decision.why,
        max(floor, detectable),
    )  # fmt: skip


def _decide(
    times: list[float], values: list[float], slope: float, floor: float
) -> _Decision:
    """Ask whether the growth is significant, and then whether it goes on."""
    if max(values) == min(values):
        return _Decision(STEADY, "it does not grow")
    kept_times, kept_values = _without_spikes(times, values)
    noise_floor = _noise_floor(kept_values, floor)
    line = fit_line(kept_times, kept_values, noise_floor)
    if max(slope, line.slope) <= floor:
        return _below_tolerance(times, values, slope, floor)
    from_steps = _evidence_of_steps(_growth_per_epoch(times, values), floor)
    from_line = _evidence_of_line(line, kept_times, floor, noise_floor)
    if min(from_line.chance, from_steps.chance) > _CHANCE_OF_HINT:
        return _Decision(STEADY, "it does not grow clear of its noise")

    emptied_for = _epochs_until_a_tooth_would_be_over(line, kept_times)
    nats = best_ended(kept_times, kept_values, noise_floor)
    nats -= criterion_of(line, noise_floor)
    # Readings that echo each other are worth fewer independent ones.
    worth = _effective_share(_autocorrelation(line, noise_floor, cautious=True))
    line_goes_on = from_line.goes_on and nats * worth > _GOES_ON_NATS
    goes_on = (
        (from_steps.significant and from_steps.goes_on and nats > 0)
        or (
            _climbs_without_fall(_growth_per_epoch(times, values), floor)
            and nats > _CLIMB_NATS
        )
        or (from_line.significant and line_goes_on and not emptied_for)
    )
    if goes_on:
        return _Decision(LEAKING, "it grows as much in the last epochs as before")
    late = best_ended(kept_times, kept_values, noise_floor, stopped_late=True)
    ended_is_better = criterion_of(line, noise_floor) - late > _ENDED_NATS
    if ended_is_better and not from_line.goes_on:
        return _Decision(STEADY, "it grew, and has levelled off")
    return _ask_for_more(times[-1] - times[0], emptied_for, (from_line, from_steps))


def _ask_for_more(
    epochs: float, emptied_for: float, views: tuple[_Evidence, ...]
) -> _Decision:
    """Say how many more epochs would decide it."""
    if emptied_for:
        why = "it fell once, and has not grown for as long since"
        return _Decision(NEEDS_MORE, why, max(3, math.ceil(emptied_for)))
    needed = min(view.epochs_needed(epochs) for view in views)
    why = "its growth is not yet clear of its noise"
    if any(view.significant for view in views):
        # The difference from a ramp that has ended grows with the cube of the length.
        needed = max(needed, 1.3 * epochs)
        why = "it may have levelled off"
    more = min(needed, _MOST_TIMES_LONGER * epochs) - epochs
    return _Decision(NEEDS_MORE, why, max(3, math.ceil(more)))


def _climbs_without_fall(steps: list[float], floor: float) -> bool:
    """Tell whether it never falls and goes up most of the time, at the end as before.

    Pages of a worker grow like this: unevenly, so that no line fits them well, though
    no noise of any kind climbs for twenty epochs without a fall.
    """
    if len(steps) < _LONG_CLIMB or min(steps) < -floor / 4:
        return False
    late = steps[-(len(steps) // 3) :]
    return all(
        sum(step > 0 for step in part) >= len(part) * 2 / 3 for part in (steps, late)
    ) and statistics.fmean(late) >= _CLIMB_SHARE * statistics.fmean(steps)


def _epochs_until_a_tooth_would_be_over(line: LineFit, times: Floats) -> float:
    """Tell apart one fall of a leak and a list that was emptied once.

    Where a fall took most of what had grown, what comes after it must grow for longer
    than what came before did.

    Returns:
        Epochs until it has; 0 where there is no such fall, or it already has.
    """
    if line.shift_at is None or line.shift >= 0:
        return 0.0
    before = times[line.shift_at] - times[0]
    if -line.shift < _EMPTIED_SHARE * line.slope * before:
        return 0.0
    since = float(times[-1]) - float(times[line.shift_at])
    return max(0.0, 1.2 * float(before) - since)


def _below_tolerance(
    times: list[float], values: list[float], slope: float, floor: float
) -> _Decision:
    """Say of growth below the tolerance whether it is there, and worth a word.

    Our own readings take some 100 bytes an epoch.
    """
    error = _slope_error(times, values, slope)
    if slope > max(floor / 16, quantile(len(values) - 2, ALPHA) * error):
        return _Decision(STEADY, _TOLERATED)
    return _Decision(STEADY, "it does not grow")


def _evidence_of_line(
    line: LineFit, times: Floats, floor: float, noise_floor: float
) -> _Evidence:
    """Test a line against noise that is independent, or echoes a little."""
    centred = times - times.mean()
    least_error = noise_floor / math.sqrt(float(centred @ centred))
    error = max(line.slope_error, least_error)
    growth = line.slope - floor / 2

    worth = _effective_share(_autocorrelation(line, noise_floor, cautious=False))
    freedom = min(line.freedom, max(_FEWEST_FREEDOM, round(line.freedom * worth)))
    chance = upper_tail(growth * math.sqrt(worth) / error, freedom)

    worth = _effective_share(_autocorrelation(line, noise_floor, cautious=True))
    freedom = min(line.freedom, max(_FEWEST_FREEDOM, round(line.freedom * worth)))
    error /= math.sqrt(worth)
    return _Evidence(
        chance=chance, t=growth / error, threshold=quantile(freedom, ALPHA / 2),
        goes_on=_late_part_agrees(line, times, error), exponent=1.5,
    )  # fmt: skip


def _late_part_agrees(line: LineFit, times: Floats, error: float) -> bool:
    """Tell whether the slope at the end can be that of the whole.

    Seen in two ways: the slope of the last quarter, and that of a parabola at its end,
    which uses all readings and sees a cache that fills ever more slowly.
    """
    count = max(FEWEST_READINGS - 1, len(times) // 4)
    late = times[-count:] - times[-count:].mean()
    whole = times - times.mean()
    late_slope = line.slope + float(late @ line.residuals[-count:]) / float(late @ late)
    late_error = error * math.sqrt(float(whole @ whole) / float(late @ late))

    bend = whole**2 - (whole**2).mean()
    bend -= whole * float(bend @ whole) / float(whole @ whole)
    curvature = float(bend @ line.residuals) / float(bend @ bend)
    curvature_error = error * math.sqrt(float(whole @ whole) / float(bend @ bend))
    # The parabola less its line has its own slope at the end.
    end_slope = line.slope + curvature * _end_slope(bend, times)
    end_error = curvature_error * _end_slope(bend, times)
    least = _LATE_SHARE * line.slope
    return late_slope + 2 * late_error > least and end_slope + 2 * end_error > least


def _end_slope(curve: Floats, times: Floats) -> float:
    rise = float(curve[-1]) - float(curve[-2])
    return rise / (float(times[-1]) - float(times[-2]))


def _autocorrelation(line: LineFit, noise_floor: float, *, cautious: bool) -> float:
    """Estimate the correlation of neighbours, from 0 to 0.98.

    Args:
        line: A fit with its residuals.
        noise_floor: Standard deviation below which residuals count as none.
        cautious: Bound it from above, so that a random walk does not pass for a line in
            independent noise: of 600 walks of 31 readings 1 does, without it 12 do.
    """
    residuals = line.residuals
    power = float(residuals @ residuals)
    if power < len(residuals) * noise_floor**2:
        return 0.0  # they are rounding errors
    seen = float(residuals[1:] @ residuals[:-1]) / power
    # A fitted line takes out slow noise, so the estimate is too low by about this much
    # (Kendall 1954, for a trend).
    echo = max(0.0, seen + (2 + 4 * seen) / len(residuals))
    if cautious:
        # Both chosen by the table in docs/leaks.md; a shift takes out more slow noise.
        echo += max(0.0, seen) + (0.0 if line.shift_at is None else 0.4)
    return min(0.98, echo)


def _effective_share(echo: float) -> float:
    """Give the independent readings that one of a series with echo is worth."""
    return (1 - echo) / (1 + echo)


def _evidence_of_steps(steps: list[float], floor: float) -> _Evidence:
    """Test the growth of blocks of epochs.

    It holds for a random walk too, whose steps have no direction.  Stairs are even in
    blocks as long as a stair; one or two jumps among many blocks are insignificant.
    """
    best = _Evidence(1.0, 0.0, math.inf, goes_on=False, exponent=0.5)
    for width in range(1, len(steps) // (FEWEST_READINGS - 1) + 1):
        count = len(steps) // width
        recent = steps[len(steps) - count * width :]
        blocks = [sum(recent[i * width : (i + 1) * width]) for i in range(count)]
        found = _evidence_of_blocks(blocks, floor * width)
        if (found.significant, -found.chance) > (best.significant, -best.chance):
            best = found
        if found.significant and found.goes_on:
            return found
    return best


def _evidence_of_blocks(blocks: list[float], floor: float) -> _Evidence:
    usual = _without_outlier(blocks)
    count = len(usual)
    mean = statistics.fmean(usual)
    error = statistics.stdev(usual) / math.sqrt(count)
    if error == 0:
        t = math.inf if mean > floor / 2 else 0.0
    else:
        t = (mean - floor / 2) / error
    late = max(1, len(blocks) // 4), max(2, len(blocks) // 2)
    goes_on = all(
        statistics.fmean(blocks[-part:]) >= _LATE_SHARE * mean for part in late
    )
    chance = 0.0 if math.isinf(t) else upper_tail(t, count - 1)
    # A third of the chance for each of about three widths that are unlike each other.
    return _Evidence(chance, t, quantile(count - 1, ALPHA / 6), goes_on, exponent=0.5)


def _without_outlier(blocks: list[float]) -> list[float]:
    """Leave out the strangest of many: a single big allocation, or the collector."""
    if len(blocks) < _MANY_BLOCKS:
        return blocks
    usual = statistics.median(blocks)
    strangest = max(range(len(blocks)), key=lambda i: abs(blocks[i] - usual))
    return blocks[:strangest] + blocks[strangest + 1 :]


def _epochs_until_stairs_are_sure(
    times: list[float], values: list[float], floor: float
) -> int | None:
    """Find three or more even rises at even distances, the last of them lately.

    Something that is kept every tenth epoch looks like this, and a run of thirty epochs
    has but three of them.

    Returns:
        Epochs until there are five; None where these are no stairs.
    """
    steps = [b - a for a, b in itertools.pairwise(values)]
    rises = [i for i, step in enumerate(steps) if step > floor and i >= _WARM_UP_STEPS]
    heights = sorted(steps[i] for i in rises)
    # A rise that is far larger than the usual one was a jump.
    usual = heights[len(heights) // 2] if heights else 0.0
    rises = [i for i in rises if 0.5 * usual < steps[i] < 1.5 * usual]
    if len(rises) < 3:
        return None
    others = sorted(
        abs(step)
        for i, step in enumerate(steps)
        if i >= _WARM_UP_STEPS and i not in set(rises)
    )
    apart = [times[b] - times[a] for a, b in itertools.pairwise(rises)]
    since = times[-1] - times[rises[-1] + 1]
    # The largest of the other steps may be a fall, or a jump.
    even = max(apart) <= 1.5 * min(apart) + 1 and sum(others[:-1]) < 0.25 * sum(heights)
    if not even or since > 1.2 * max(apart):
        return None
    return max(3, math.ceil((5 - len(rises)) * statistics.fmean(apart) - since + 1))


def _without_spikes(times: list[float], values: list[float]) -> tuple[Floats, Floats]:
    """Leave out readings unlike those around them, as Hampel's filter does."""
    side = 3
    median_near = [
        statistics.median(values[i - side : i + side + 1])
        for i in range(side, len(values) - side)
    ]
    away = [abs(values[i + side] - near) for i, near in enumerate(median_near)]
    if not away:
        return np.asarray(times), np.asarray(values)
    # 1.4826 times the median deviation is the standard deviation of normal noise.
    limit = 5 * 1.4826 * statistics.median(away) + 1e-9 * (max(values) - min(values))
    spikes = {i + side for i, distance in enumerate(away) if distance > limit}
    if len(spikes) > len(values) // 4:
        spikes = set()  # they are no exception
    kept = [i for i in range(len(values)) if i not in spikes]
    return np.asarray([times[i] for i in kept]), np.asarray([values[i] for i in kept])


def _noise_floor(values: Floats, floor: float) -> float:
    """Give a standard deviation below which a reading counts as exact."""
    return max(floor / 64, 1e-6 * float(values.max() - values.min()), 1e-12)


def _sawtooth_floor(
    times: list[float], values: list[float], floor: float
) -> tuple[float, int] | None:
    """Tell whether what is left after each deep fall grows, by about as much each time.

    Falls must come at equal times, give or take an epoch.  Three of them happen in some
    clean runs, which then need more epochs; nine, each to more, once in 360,000.
    """
    deep = _DEEP_FALL_SHARE * (max(values) - min(values))
    falls = [i for i in range(1, len(values)) if values[i - 1] - values[i] > deep]
    when = [times[i] for i in falls]
    rises = _growth_per_epoch(when, [values[i] for i in falls])
    if len(rises) < 2 or min(rises) <= floor or max(rises) > 1.5 * min(rises):
        return None
    apart = [b - a for a, b in itertools.pairwise(when)]
    if max(apart) - min(apart) > 2 or max(apart) > 2 * min(apart):
        return None
    missing = max(0, _SURE_FALLS - len(falls)) * statistics.fmean(apart)
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


def _end_of_warmup(values: list[float], floor: float) -> int:
    """Find where the start ends: the last early step unlike those of the second half.

    The first reading always goes: it was taken before anything ran.
    """
    steps = [b - a for a, b in itertools.pairwise(values)]
    if len(steps) < FEWEST_READINGS:
        return min(1, len(steps))
    late = steps[len(steps) // 2 :]
    usual = statistics.median(late)
    spread = statistics.median(abs(step - usual) for step in late)
    # 1.48 times the median deviation is the standard deviation of normal noise.  The
    # largest late step may be a jump; the one below it is how far steps go here, as
    # those of something that is kept every eighth epoch.
    usual_reach = sorted(abs(step - usual) for step in late)[-2]
    limit = max(6 * 1.48 * spread + max(floor, abs(usual) * 0.5), 1.2 * usual_reach)
    early = steps[: max(1, len(steps) // 3)]
    unlike = [i + 1 for i, step in enumerate(early) if abs(step - usual) > limit]
    return max(unlike, default=1)


def _growth_per_epoch(times: list[float], values: list[float]) -> list[float]:
    """Give the growth an epoch between readings."""
    return [
        (values[i + 1] - values[i]) / (times[i + 1] - times[i])
        for i in range(len(values) - 1)
    ]


def _slope_error(times: list[float], values: list[float], slope: float) -> float:
    """Give the standard error of the slope, for independent noise."""
    middle = statistics.fmean(times)
    spread = sum((t - middle) ** 2 for t in times)
    return _residual_deviation(times, values, slope) / math.sqrt(spread)


def _residual_deviation(times: list[float], values: list[float], slope: float) -> float:
    rest = [v - slope * t for t, v in zip(times, values, strict=True)]
    middle = statistics.median(rest)
    return math.sqrt(sum((r - middle) ** 2 for r in rest) / max(1, len(rest) - 2))
