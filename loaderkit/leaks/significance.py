"""Is the growth of a series significant, and does it go on?  Pure.

It is tested in two views of the noise: independent from reading to reading, or with an
echo (a line through the readings), and adding up as a random walk does (the growth of
blocks of epochs).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.leaks.noise import FEWEST_READINGS
from loaderkit.leaks.students_t import quantile, upper_tail

if TYPE_CHECKING:
    from loaderkit.array_types import Floats
    from loaderkit.leaks.shapes import LineFit


ALPHA = 1e-5
"""Chance to call noise a leak, per counter; a run has about ten of them."""
_LATE_SHARE = 0.4
"""The last part must grow at least so much of the average, or it is levelling off."""
_MANY_BLOCKS = 12
"""Of so many blocks, one may be unlike the others."""
_FEWEST_FREEDOM = 6
"""Degrees of freedom of a line whose readings echo: the echo is in its error already,
and with 1 or 2 degrees no growth at all is significant."""


@dataclass(frozen=True)
class Significance:
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
        """Whether noise alone hardly ever grows so much."""
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


def significance_of_line(
    line: LineFit,
    times: Floats,
    floor: float,
    noise_floor: float,
) -> Significance:
    """Test a line against noise that is independent, or echoes a little.

    The echo is estimated twice: as it is most likely for the chance that noise grows so
    much, and bounded from above for what a leak must exceed.
    """
    centred = times - times.mean()
    least_error = noise_floor / math.sqrt(float(centred @ centred))
    error = max(line.slope_error, least_error)
    # Half of the tolerance: growth just above it is to be found, too.
    growth = line.slope - floor / 2

    likely = effective_share(autocorrelation(line, noise_floor, cautious=False))
    t = growth * math.sqrt(likely) / error
    chance = upper_tail(t, _effective_freedom(line, likely))

    cautious = effective_share(autocorrelation(line, noise_floor, cautious=True))
    cautious_error = error / math.sqrt(cautious)
    return Significance(
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
    least = _LATE_SHARE * line.slope
    ways = (_slope_of_last_quarter, _slope_of_parabola)
    slopes = [slope_of(line, times, error) for slope_of in ways]
    # Within two standard errors.
    return all(slope.value + 2 * slope.error > least for slope in slopes)


class _Slope(NamedTuple):
    """A slope, and its standard error."""

    value: float
    error: float


def _slope_of_last_quarter(line: LineFit, times: Floats, error: float) -> _Slope:
    count = max(FEWEST_READINGS - 1, len(times) // 4)
    last_quarter = times[-count:] - times[-count:].mean()
    whole = times - times.mean()
    whole_power = float(whole @ whole)
    quarter_power = float(last_quarter @ last_quarter)
    more = float(last_quarter @ line.residuals[-count:]) / quarter_power
    return _Slope(line.slope + more, error * math.sqrt(whole_power / quarter_power))


def _slope_of_parabola(line: LineFit, times: Floats, error: float) -> _Slope:
    """Fit a parabola besides, and give the slope at its end."""
    whole = times - times.mean()
    whole_power = float(whole @ whole)
    # Made orthogonal to the line that is fitted already.
    parabola = whole**2 - (whole**2).mean()
    parabola -= whole * float(parabola @ whole) / whole_power
    parabola_power = float(parabola @ parabola)
    curvature = float(parabola @ line.residuals) / parabola_power
    curvature_error = error * math.sqrt(whole_power / parabola_power)
    # The parabola less its line has its own slope at the end.
    at_end = _end_slope(parabola, times)
    return _Slope(line.slope + curvature * at_end, curvature_error * at_end)


def _end_slope(curve: Floats, times: Floats) -> float:
    rise = float(curve[-1]) - float(curve[-2])
    return rise / (float(times[-1]) - float(times[-2]))


def autocorrelation(
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


def effective_share(correlation: float) -> float:
    """Give the independent readings that one of a series with echo is worth."""
    return (1 - correlation) / (1 + correlation)


def significance_of_steps(growth_per_epoch: list[float], floor: float) -> Significance:
    """Test the growth of blocks of epochs.

    It holds for a random walk too, whose steps have no direction.  Stairs are even in
    blocks as long as a stair; one or two jumps among many blocks are insignificant.
    """
    best = Significance(1.0, 0.0, math.inf, goes_on=False, exponent=0.5)
    widest = len(growth_per_epoch) // (FEWEST_READINGS - 1)
    for width in range(1, widest + 1):
        count = len(growth_per_epoch) // width
        # What does not fill a block is left out at the start.
        recent = growth_per_epoch[len(growth_per_epoch) - count * width :]
        blocks = [
            sum(recent[block * width : (block + 1) * width]) for block in range(count)
        ]
        significance = _significance_of_blocks(blocks, floor * width)
        if significance.significant and significance.goes_on:
            return significance
        if significance.strength > best.strength:
            best = significance
    return best


def _significance_of_blocks(blocks: list[float], floor: float) -> Significance:
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
    return Significance(
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
