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
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from loaderkit.answers import answer_wrong_names
from loaderkit.leaks.late_growth import find_late_growth
from loaderkit.leaks.shapes import LineFit, best_ended, criterion_of, fit_line
from loaderkit.leaks.students_t import quantile, upper_tail
from loaderkit.notebook import HasCard
from loaderkit.units import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loaderkit.array_types import Floats
    from loaderkit.leaks.late_growth import LateGrowth

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
FEWEST_EPOCHS = 6
"""Of a test: one or two are warm-up."""
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
"""So many falls, each to more than the last, are no chance: of nine numbers in any
order one in 9! = 360,000 rises throughout, which is below ``ALPHA``; of eight not."""
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
_FEWEST_STAIRS = 3
_SURE_STAIRS = 5
"""Even rises at even distances: two may be two jumps, five are no chance."""
_FLAT_SHARE = 0.25
"""What lies between stairs moves by less than so much of their height."""
_NEIGHBOURS = 3
"""Readings on each side of one that may be a spike."""
_CHANCE_BELOW_LOW = 0.01
"""That the slope is below ``Trend.low``."""
_MOST_TIMES_LONGER = 10
"""Times as long a run as now is the most that is asked for."""


@answer_wrong_names()
@dataclass(frozen=True)
class Trend(HasCard):
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

    def __str__(self) -> str:
        return f"{self.verdict}: {self.why}"


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

    @property
    def strength(self) -> tuple[bool, float]:
        """What is significant comes first, and then what noise does most seldom."""
        return self.significant, -self.chance

    def epochs_needed(self, epochs: float) -> float:
        """Tell the length of a run that would make it significant, probably."""
        # What was seen is itself uncertain by one standard error; two more make the
        # next look significant in 98 of 100 runs.
        wanted_t = self.threshold + 3.0
        times_longer: float = (wanted_t / max(self.t, 1.0)) ** (1 / self.exponent)
        return epochs * times_longer


class _Sawtooth(NamedTuple):
    """A series that falls again and again, each time to more."""

    slope: float
    """Of what is left after each fall."""
    more_epochs: int
    """Until there are enough falls; 0 when there are."""


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
    if not readings:
        return Trend(NEEDS_MORE, 0.0, 0.0, 0.0, 0, FEWEST_READINGS, "it was not read")
    times = list(map(float, range(len(readings)) if at is None else at))
    values = list(map(float, readings))
    cut = _end_of_warmup(values, floor) if warmup is None else warmup
    cut = max(0, min(cut, len(values) - 1))
    # Saws and stairs are looked for in all readings: their first tooth or step may lie
    # in what the warm-up takes away.
    sawtooth = _sawtooth_floor(times, values, floor)
    epochs_until_sure = _epochs_until_stairs_are_sure(times, values, floor)

    times, values = times[cut:], values[cut:]
    count = len(values)
    if count < FEWEST_READINGS:
        verb = "is" if count == 1 else "are"
        why = f"{count_of(count, 'readings')} after the warm-up {verb} too few"
        return Trend(NEEDS_MORE, 0.0, 0.0, 0.0, cut, FEWEST_READINGS - count, why)
    slope = theil_sen(times, values)
    error = _slope_error(times, values, slope)
    low = slope - quantile(count - 2, _CHANCE_BELOW_LOW) * error
    detectable = floor / 2 + quantile(count - 2, ALPHA) * error
    noise = _residual_deviation(times, values, slope)

    decision = _choose_verdict(times, values, slope, floor)
    late = None if decision.verdict == LEAKING else _late_growth(times, values, floor)
    if late is not None:
        decision = _unless_begun_late(decision, late)
        slope = late.per_epoch
    if sawtooth is not None:
        # What is left after each fall says how fast it grows beneath the saw.
        slope = sawtooth.slope
        low = min(low, slope)
        if decision.verdict != LEAKING:
            decision = _decide_sawtooth(sawtooth)
    is_calm = decision.verdict == STEADY and not decision.tolerated
    if epochs_until_sure is not None and is_calm:
        why = "it grows in even steps, too few of them to be sure"
        decision = _Decision(NEEDS_MORE, why, epochs_until_sure)
    return Trend(
        verdict=decision.verdict,
        per_epoch=slope,
        low=low,
        noise=noise,
        warmup=cut,
        more_epochs=decision.more_epochs,
        why=decision.why,
        detectable=max(floor, detectable),
    )


def _choose_verdict(
    times: list[float],
    values: list[float],
    slope: float,
    floor: float,
) -> _Decision:
    """Ask whether the growth is significant, and then whether it goes on."""
    if max(values) == min(values):
        return _Decision(STEADY, "it does not grow")
    clean_times, clean_values = _without_spikes(times, values)
    noise_floor = _noise_floor(clean_values, floor)
    line = fit_line(clean_times, clean_values, noise_floor)
    if max(slope, line.slope) <= floor:
        return _below_tolerance(times, values, slope, floor)

    growth_per_epoch = _growth_per_epoch(times, values)
    from_steps = _evidence_of_steps(growth_per_epoch, floor)
    from_line = _evidence_of_line(line, clean_times, floor, noise_floor)
    if min(from_line.chance, from_steps.chance) > _CHANCE_OF_HINT:
        return _Decision(STEADY, "it does not grow clear of its noise")

    emptied_for = _epochs_until_a_tooth_would_be_over(line, clean_times)
    line_criterion = criterion_of(line, noise_floor)
    line_ahead = best_ended(clean_times, clean_values, noise_floor) - line_criterion
    # Readings that echo each other are worth fewer independent ones, and so is the
    # difference between two fits of them.
    share = _effective_share(_autocorrelation(line, noise_floor, cautious=True))
    steps_go_on = from_steps.significant and from_steps.goes_on and line_ahead > 0
    climbs_on = (
        _climbs_without_fall(growth_per_epoch, floor) and line_ahead > _CLIMB_NATS
    )
    line_goes_on = (
        from_line.significant
        and from_line.goes_on
        and line_ahead * share > _GOES_ON_NATS
        and not emptied_for
    )
    if steps_go_on or climbs_on or line_goes_on:
        return _Decision(LEAKING, "it grows as much at the end as before")

    # A ramp that stopped late counts here only: it is weak evidence that growth has
    # ended, but any evidence of that keeps a line from being called a leak above.
    ended_criterion = best_ended(
        clean_times, clean_values, noise_floor, stopped_late=True
    )
    has_ended = line_criterion - ended_criterion > _ENDED_NATS
    if has_ended and not from_line.goes_on:
        return _Decision(STEADY, "it grew, and has levelled off")
    return _ask_for_more(times[-1] - times[0], emptied_for, (from_line, from_steps))


def _late_growth(
    times: list[float], values: list[float], floor: float
) -> LateGrowth | None:
    """Look whether the last epochs may be the beginning of a leak."""
    if max(values) == min(values):
        return None
    clean_times, clean_values = _without_spikes(times, values)
    noise_floor = _noise_floor(clean_values, floor)
    return find_late_growth(
        clean_times, clean_values, floor=floor, noise_floor=noise_floor
    )


def _unless_begun_late(decision: _Decision, late: LateGrowth) -> _Decision:
    """Take a verdict back where the last epochs may be the beginning of a leak."""
    # A line through what was flat and rises would need far longer to be sure of.
    if decision.verdict == NEEDS_MORE and decision.more_epochs <= late.more_epochs:
        return decision
    since = count_of(round(late.epochs), "epochs")
    why = f"it has grown for {since} only, and may go on"
    return _Decision(NEEDS_MORE, why, late.more_epochs)


def _decide_sawtooth(sawtooth: _Sawtooth) -> _Decision:
    why = "it is a saw that falls to more each time"
    if sawtooth.more_epochs:
        return _Decision(NEEDS_MORE, why, sawtooth.more_epochs)
    return _Decision(LEAKING, why)


def _ask_for_more(
    epochs: float,
    emptied_for: float,
    views: tuple[_Evidence, ...],
) -> _Decision:
    """Say how many more epochs would decide it."""
    if emptied_for:
        why = "it fell once, and has not grown for as long since"
        return _Decision(NEEDS_MORE, why, max(3, math.ceil(emptied_for)))
    needed = min(view.epochs_needed(epochs) for view in views)
    why = "its growth is not yet clear of its noise"
    if any(view.significant for view in views):
        # So the question is whether it goes on.  The difference from a ramp that has
        # ended grows with the cube of the length: 1.3 times as long, and it is twice as
        # large.
        needed = max(needed, 1.3 * epochs)
        why = "it may have levelled off"
    more = min(needed, _MOST_TIMES_LONGER * epochs) - epochs
    return _Decision(NEEDS_MORE, why, max(3, math.ceil(more)))


def _climbs_without_fall(growth_per_epoch: list[float], floor: float) -> bool:
    """Tell whether it never falls and goes up most of the time, at the end as before.

    Pages of a worker grow like this: unevenly, so that no line fits them well, though
    no noise of any kind climbs for twenty epochs without a fall.
    """
    if len(growth_per_epoch) < _LONG_CLIMB:
        return False
    # A quarter of the tolerance: pages that another process gave back.
    if min(growth_per_epoch) < -floor / 4:
        return False
    late = growth_per_epoch[-(len(growth_per_epoch) // 3) :]
    for part in (growth_per_epoch, late):
        rises = sum(growth > 0 for growth in part)
        if rises < len(part) * 2 / 3:
            return False
    average = statistics.fmean(growth_per_epoch)
    return statistics.fmean(late) >= _CLIMB_SHARE * average


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
    # A fifth longer, chosen: it may be emptied again where it was before.
    return max(0.0, 1.2 * float(before) - since)


def _below_tolerance(
    times: list[float],
    values: list[float],
    slope: float,
    floor: float,
) -> _Decision:
    """Say of growth below the tolerance whether it is there, and worth a word.

    Our own readings take some 100 bytes an epoch.
    """
    error = _slope_error(times, values, slope)
    if slope > max(floor / 16, quantile(len(values) - 2, ALPHA) * error):
        return _Decision(STEADY, _TOLERATED)
    return _Decision(STEADY, "it does not grow")


def _evidence_of_line(
    line: LineFit,
    times: Floats,
    floor: float,
    noise_floor: float,
) -> _Evidence:
    """Test a line against noise that is independent, or echoes a little.

    The echo is estimated twice: as it is most likely for the chance that noise grows so
    much, and bounded from above for what a leak must exceed.
    """
    centred = times - times.mean()
    least_error = noise_floor / math.sqrt(float(centred @ centred))
    error = max(line.slope_error, least_error)
    # Half of the tolerance: growth just above it is to be found, too.
    growth = line.slope - floor / 2

    likely = _effective_share(_autocorrelation(line, noise_floor, cautious=False))
    t = growth * math.sqrt(likely) / error
    chance = upper_tail(t, _effective_freedom(line, likely))

    cautious = _effective_share(_autocorrelation(line, noise_floor, cautious=True))
    cautious_error = error / math.sqrt(cautious)
    return _Evidence(
        chance=chance,
        t=growth / cautious_error,
        threshold=quantile(_effective_freedom(line, cautious), ALPHA / 2),
        goes_on=_late_part_agrees(line, times, cautious_error),
        # A slope's error falls with the length of the run to the power of 1.5.
        exponent=1.5,
    )


def _effective_freedom(line: LineFit, share: float) -> int:
    freedom = max(_FEWEST_FREEDOM, round(line.freedom * share))
    return min(line.freedom, freedom)


def _late_part_agrees(
    line: LineFit,
    times: Floats,
    error: float,
) -> bool:
    """Tell whether the slope at the end can be that of the whole.

    Seen in two ways: the slope of the last quarter, and that of a parabola at its end,
    which uses all readings and sees a cache that fills ever more slowly.
    """
    count = max(FEWEST_READINGS - 1, len(times) // 4)
    last_quarter = times[-count:] - times[-count:].mean()
    whole = times - times.mean()
    whole_power = float(whole @ whole)
    quarter_power = float(last_quarter @ last_quarter)
    late_slope = line.slope
    late_slope += float(last_quarter @ line.residuals[-count:]) / quarter_power
    late_error = error * math.sqrt(whole_power / quarter_power)

    # The parabola, made orthogonal to the line that is fitted already.
    parabola = whole**2 - (whole**2).mean()
    parabola -= whole * float(parabola @ whole) / whole_power
    parabola_power = float(parabola @ parabola)
    curvature = float(parabola @ line.residuals) / parabola_power
    curvature_error = error * math.sqrt(whole_power / parabola_power)
    # The parabola less its line has its own slope at the end.
    end_slope = line.slope + curvature * _end_slope(parabola, times)
    end_error = curvature_error * _end_slope(parabola, times)

    # Within two standard errors.
    least = _LATE_SHARE * line.slope
    return late_slope + 2 * late_error > least and end_slope + 2 * end_error > least


def _end_slope(curve: Floats, times: Floats) -> float:
    rise = float(curve[-1]) - float(curve[-2])
    return rise / (float(times[-1]) - float(times[-2]))


def _autocorrelation(
    line: LineFit,
    noise_floor: float,
    *,
    cautious: bool,
) -> float:
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
    estimate = float(residuals[1:] @ residuals[:-1]) / power
    # A fitted line takes out slow noise, so the estimate is too low by about this much
    # (Kendall 1954, for a trend).
    correlation = max(0.0, estimate + (2 + 4 * estimate) / len(residuals))
    if cautious:
        # Both chosen by the table in docs/leaks.md; a shift takes out more slow noise.
        correlation += max(0.0, estimate)
        correlation += 0.0 if line.shift_at is None else 0.4
    # At 1 no reading would count for itself, and the error have no end.
    return min(0.98, correlation)


def _effective_share(correlation: float) -> float:
    """Give the independent readings that one of a series with echo is worth."""
    return (1 - correlation) / (1 + correlation)


def _evidence_of_steps(growth_per_epoch: list[float], floor: float) -> _Evidence:
    """Test the growth of blocks of epochs.

    It holds for a random walk too, whose steps have no direction.  Stairs are even in
    blocks as long as a stair; one or two jumps among many blocks are insignificant.
    """
    best = _Evidence(1.0, 0.0, math.inf, goes_on=False, exponent=0.5)
    widest = len(growth_per_epoch) // (FEWEST_READINGS - 1)
    for width in range(1, widest + 1):
        count = len(growth_per_epoch) // width
        # What does not fill a block is left out at the start.
        recent = growth_per_epoch[len(growth_per_epoch) - count * width :]
        blocks = [
            sum(recent[block * width : (block + 1) * width]) for block in range(count)
        ]
        evidence = _evidence_of_blocks(blocks, floor * width)
        if evidence.significant and evidence.goes_on:
            return evidence
        if evidence.strength > best.strength:
            best = evidence
    return best


def _evidence_of_blocks(blocks: list[float], floor: float) -> _Evidence:
    usual = _without_outlier(blocks)
    count = len(usual)
    mean = statistics.fmean(usual)
    error = statistics.stdev(usual) / math.sqrt(count)
    growth = mean - floor / 2
    if error > 0:
        t = growth / error
    elif growth > 0:
        t = math.inf  # all blocks are alike: without noise, any growth is certain
    else:
        t = 0.0
    late_quarter = blocks[-max(1, len(blocks) // 4) :]
    late_half = blocks[-max(2, len(blocks) // 2) :]
    goes_on = all(
        statistics.fmean(late) >= _LATE_SHARE * mean
        for late in (late_quarter, late_half)
    )
    return _Evidence(
        chance=0.0 if math.isinf(t) else upper_tail(t, count - 1),
        t=t,
        # A third of the chance for each of about three widths that are unlike each
        # other, and half of it for the line.
        threshold=quantile(count - 1, ALPHA / 6),
        goes_on=goes_on,
        exponent=0.5,
    )


def _without_outlier(blocks: list[float]) -> list[float]:
    """Leave out the strangest of many: a single big allocation, or the collector."""
    if len(blocks) < _MANY_BLOCKS:
        return blocks
    usual = statistics.median(blocks)
    distances = [abs(block - usual) for block in blocks]
    strangest = distances.index(max(distances))
    return blocks[:strangest] + blocks[strangest + 1 :]


def _epochs_until_stairs_are_sure(
    times: list[float],
    values: list[float],
    floor: float,
) -> int | None:
    """Find three or more even rises at even distances, the last of them lately.

    Something that is kept every tenth epoch looks like this, and a run of thirty epochs
    has but three of them.

    Returns:
        Epochs until there are five; None where these are no stairs.
    """
    steps = [after - before for before, after in itertools.pairwise(values)]
    all_rises = [
        index
        for index, step in enumerate(steps)
        if step > floor and index >= _WARM_UP_STEPS
    ]
    rises = _without_jumps(all_rises, steps)
    if len(rises) < _FEWEST_STAIRS:
        return None
    height = sum(steps[index] for index in all_rises)
    others = sorted(
        abs(step)
        for index, step in enumerate(steps)
        if index >= _WARM_UP_STEPS and index not in rises
    )
    # The largest of the other steps may be a fall, or a jump.
    if sum(others[:-1]) >= _FLAT_SHARE * height:
        return None
    distances = [
        times[after] - times[before] for before, after in itertools.pairwise(rises)
    ]
    # Even, give or take an epoch: a rise counts for the reading behind it.
    if max(distances) > 1.5 * min(distances) + 1:
        return None
    since_last = times[-1] - times[rises[-1] + 1]
    # A fifth late, chosen: then it does not come any more.
    if since_last > 1.2 * max(distances):
        return None  # the next one did not come
    missing = _SURE_STAIRS - len(rises)
    return max(3, math.ceil(missing * statistics.fmean(distances) - since_last + 1))


def _without_jumps(rises: list[int], steps: list[float]) -> list[int]:
    """Keep the steps that rise by about as much as the usual one."""
    if not rises:
        return []
    heights = sorted(steps[index] for index in rises)
    usual = heights[len(heights) // 2]
    return [index for index in rises if 0.5 * usual < steps[index] < 1.5 * usual]


def _without_spikes(times: list[float], values: list[float]) -> tuple[Floats, Floats]:
    """Leave out readings unlike those around them, as Hampel's filter does."""
    side = _NEIGHBOURS
    distances = [
        abs(values[index] - statistics.median(values[index - side : index + side + 1]))
        for index in range(side, len(values) - side)
    ]
    spikes: set[int] = set()
    if distances:
        # 1.4826 times the median deviation is the standard deviation of normal noise.
        limit = 5 * 1.4826 * statistics.median(distances)
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


def _noise_floor(values: Floats, floor: float) -> float:
    """Give a standard deviation below which a reading counts as exact."""
    # A millionth of the range, and above 0 in any case: variances are divided by it.
    value_range = float(values.max() - values.min())
    return max(floor / 64, 1e-6 * value_range, 1e-12)


def _sawtooth_floor(
    times: list[float],
    values: list[float],
    floor: float,
) -> _Sawtooth | None:
    """Tell whether what is left after each deep fall grows, by about as much each time.

    Falls must come at equal times, give or take an epoch.  Three of them happen in some
    clean runs, which then need more epochs; nine, each to more, once in 360,000.

    Returns:
        None where it is no saw, or one that falls to the same each time.
    """
    deep = _DEEP_FALL_SHARE * (max(values) - min(values))
    falls = [
        index
        for index in range(1, len(values))
        if values[index - 1] - values[index] > deep
    ]
    fall_times = [times[index] for index in falls]
    rises = _growth_per_epoch(fall_times, [values[index] for index in falls])
    if len(rises) < 2 or min(rises) <= floor or max(rises) > 1.5 * min(rises):
        return None
    distances = [after - before for before, after in itertools.pairwise(fall_times)]
    is_even = max(distances) - min(distances) <= 2
    if not is_even or max(distances) > 2 * min(distances):
        return None
    missing_falls = max(0, _SURE_FALLS - len(falls))
    more_epochs = math.ceil(missing_falls * statistics.fmean(distances))
    return _Sawtooth(statistics.median(rises), more_epochs)


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


def _end_of_warmup(values: list[float], floor: float) -> int:
    """Find where the start ends: the last early step unlike those of the second half.

    The first reading always goes: it was taken before anything ran.
    """
    steps = [after - before for before, after in itertools.pairwise(values)]
    if len(steps) < FEWEST_READINGS:
        return min(1, len(steps))
    second_half = steps[len(steps) // 2 :]
    usual = statistics.median(second_half)
    distances = sorted(abs(step - usual) for step in second_half)
    # 1.48 times the median deviation is the standard deviation of normal noise.  Beside
    # that a step may differ from the usual one by half of it: what is kept has sizes.
    spread = 6 * 1.48 * statistics.median(distances) + max(floor, abs(usual) * 0.5)
    # The largest late step may be a jump; the one below it is how far steps go here, as
    # those of something that is kept every eighth epoch.
    limit = max(spread, 1.2 * distances[-2])
    early = steps[: max(1, len(steps) // 3)]
    unlike = [
        index + 1 for index, step in enumerate(early) if abs(step - usual) > limit
    ]
    return max(unlike, default=1)


def _growth_per_epoch(times: list[float], values: list[float]) -> list[float]:
    """Give the growth an epoch between readings."""
    return [
        (values[index + 1] - values[index]) / (times[index + 1] - times[index])
        for index in range(len(values) - 1)
    ]


def _slope_error(
    times: list[float],
    values: list[float],
    slope: float,
) -> float:
    """Give the standard error of the slope, for independent noise."""
    middle = statistics.fmean(times)
    spread = sum((t - middle) ** 2 for t in times)
    return _residual_deviation(times, values, slope) / math.sqrt(spread)


def _residual_deviation(
    times: list[float],
    values: list[float],
    slope: float,
) -> float:
    """Give how far readings lie from a line of this slope, as a standard deviation."""
    levels = [value - slope * time for time, value in zip(times, values, strict=True)]
    middle = statistics.median(levels)
    squares = sum((level - middle) ** 2 for level in levels)
    return math.sqrt(squares / max(1, len(levels) - 2))
