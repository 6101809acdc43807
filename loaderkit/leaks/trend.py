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

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from loaderkit.answers import answer_wrong_names
from loaderkit.leaks.late_growth import find_late_growth
from loaderkit.leaks.noise import (
    FEWEST_READINGS,
    end_of_warmup,
    growth_per_epoch,
    noise_floor_of,
    residual_deviation,
    slope_error,
    theil_sen,
    without_spikes,
)
from loaderkit.leaks.saws_and_stairs import (
    Sawtooth,
    epochs_until_stairs_are_sure,
    sawtooth_floor,
)
from loaderkit.leaks.shapes import LineFit, best_ended, criterion_of, fit_line
from loaderkit.leaks.significance import (
    ALPHA,
    Significance,
    autocorrelation,
    effective_share,
    significance_of_line,
    significance_of_steps,
)
from loaderkit.leaks.students_t import quantile
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
_CHANCE_OF_HINT = 0.03
"""Chance at which noise looks like growth, so that the run needs more epochs.  At 0.01
one in 25 lines of 5 standard errors is missed."""
FEWEST_EPOCHS = 6
"""Of a test: one or two are warm-up."""
_GOES_ON_NATS = 1.0
"""By so much a line must fit better than any ended shape.  Chosen: at 0.5 twice as many
of the clean series in tests/leaks/series.py are called leaks; at 3 a noisy line of 8
standard errors hardly ever is."""
_ENDED_NATS = 3.0
"""By so much an ended shape must fit better than any line: odds of 20 to 1."""
_EMPTIED_SHARE = 0.6
"""A fall by this share of what had grown may be a list that was emptied."""
_LONG_CLIMB = 18
"""Steps of a climb; independent noise climbs so far once in 10^15 runs."""
_CLIMB_SHARE = 0.5
"""The last third of a climb must grow at least so much of the average."""
_CLIMB_NATS = 4.0
"""By so much a line must fit a climb better than any ended shape."""
_CHANCE_BELOW_LOW = 0.01
"""That the slope is below ``Trend.low``."""
_CHANCE_OF_SEEMING = 0.001
"""That a run without growth is told to seem to grow: it has some eight counters."""
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

    @property
    def may_be_tolerated(self) -> bool:
        """Whether it seems to grow, by less than anybody minds, and is not sure yet."""
        return self.why.startswith(_MAY_BE_TOLERATED)

    def __str__(self) -> str:
        return f"{self.verdict}: {self.why}"


_TOLERATED = "it grows too little to mind: less than the tolerance"
_MAY_BE_TOLERATED = "it seems to grow by less than the tolerance"
_NOT_CLEAR_OF_NOISE = "it does not grow clear of its noise"


@dataclass(frozen=True)
class _Decision:
    verdict: Verdict
    why: str
    more_epochs: int = 0

    @property
    def tolerated(self) -> bool:
        return self.why == _TOLERATED


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
    cut = end_of_warmup(values, floor) if warmup is None else warmup
    cut = max(0, min(cut, len(values) - 1))
    # Saws and stairs are looked for in all readings: their first tooth or step may lie
    # in what the warm-up takes away.
    sawtooth = sawtooth_floor(times, values, floor)
    epochs_until_sure = epochs_until_stairs_are_sure(times, values, floor)

    times, values = times[cut:], values[cut:]
    count = len(values)
    if count < FEWEST_READINGS:
        verb = "is" if count == 1 else "are"
        why = f"{count_of(count, 'readings')} after the warm-up {verb} too few"
        return Trend(NEEDS_MORE, 0.0, 0.0, 0.0, cut, FEWEST_READINGS - count, why)
    slope = theil_sen(times, values)
    error = slope_error(times, values, slope)
    low = slope - quantile(count - 2, _CHANCE_BELOW_LOW) * error
    detectable = floor / 2 + quantile(count - 2, ALPHA) * error
    noise = residual_deviation(times, values, slope)

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
    clean_times, clean_values = without_spikes(times, values)
    noise_floor = noise_floor_of(clean_values, floor)
    line = fit_line(clean_times, clean_values, noise_floor)
    if max(slope, line.slope) <= floor:
        return _below_tolerance(times, values, slope, floor)

    growths = growth_per_epoch(times, values)
    from_steps = significance_of_steps(growths, floor)
    from_line = significance_of_line(line, clean_times, floor, noise_floor)
    if min(from_line.chance, from_steps.chance) > _CHANCE_OF_HINT:
        return _Decision(STEADY, _NOT_CLEAR_OF_NOISE)

    emptied_for = _epochs_until_a_tooth_would_be_over(line, clean_times)
    line_criterion = criterion_of(line, noise_floor)
    line_ahead = best_ended(clean_times, clean_values, noise_floor) - line_criterion
    # Readings that echo each other are worth fewer independent ones, and so is the
    # difference between two fits of them.
    share = effective_share(autocorrelation(line, noise_floor, cautious=True))
    steps_go_on = from_steps.significant and from_steps.goes_on and line_ahead > 0
    climbs_on = _climbs_without_fall(growths, floor) and line_ahead > _CLIMB_NATS
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
    clean_times, clean_values = without_spikes(times, values)
    noise_floor = noise_floor_of(clean_values, floor)
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


def _decide_sawtooth(sawtooth: Sawtooth) -> _Decision:
    why = "it is a saw that falls to more each time"
    if sawtooth.more_epochs:
        return _Decision(NEEDS_MORE, why, sawtooth.more_epochs)
    return _Decision(LEAKING, why)


def _ask_for_more(
    epochs: float,
    emptied_for: float,
    views: tuple[Significance, ...],
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
    for growths in (growth_per_epoch, late):
        rises = sum(growth > 0 for growth in growths)
        if rises < len(growths) * 2 / 3:
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
    if slope <= 0:
        return _Decision(STEADY, "it does not grow")
    count = len(values)
    error = slope_error(times, values, slope)
    least_sure = quantile(count - 2, ALPHA) * error
    if slope <= floor / 16:
        if slope > least_sure:
            return _Decision(STEADY, "it grows by less than a 16th of the tolerance")
        return _Decision(STEADY, _NOT_CLEAR_OF_NOISE)
    if slope > least_sure:
        return _Decision(STEADY, _TOLERATED)
    if slope <= quantile(count - 2, _CHANCE_OF_SEEMING) * error:
        return _Decision(STEADY, _NOT_CLEAR_OF_NOISE)
    # The error of a slope falls with the length to the power of 1.5.
    epochs = times[-1] - times[0]
    needed = epochs * (least_sure / slope) ** (2 / 3)
    more = count_of(max(2, math.ceil(needed - epochs)), "more epochs")
    return _Decision(STEADY, f"{_MAY_BE_TOLERATED}: about {more} would tell")
