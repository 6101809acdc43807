"""Growth that began late in a run, and may be the beginning of a leak.  Pure.

A run that is flat and grows in its last epochs is fitted badly by a line, and so little
of it grew that its average growth is hardly above its noise.  Here a *line that begins
late* is fitted: flat, and rising from some reading on until the end.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.leaks.shapes import best_ended, fit_bend
from loaderkit.leaks.students_t import upper_tail

if TYPE_CHECKING:
    from loaderkit.array_types import Floats
    from loaderkit.leaks.shapes import Bend

_CHANCE = 0.001
"""Chance at which noise looks like late growth, of one bend; those that are tried are
much alike.  Of 1,000 runs of 30 epochs 1 does where noise is normal, and 19 where it is
heavy, by a last reading that is far off (measured)."""
_FEWEST_FLAT = 3
"""Readings before the bend; fewer do not tell how far readings lie apart.  Of a run of
six epochs, the fewest of a test, the warm-up may leave three."""
_FEWEST_IN_HALF = 10
"""Readings of a half that is looked at by itself."""
_ENDED_NATS = 3.0
"""By so much a shape that is flat at the end must fit better: odds of 20 to 1."""
_TIMES_AS_LONG = 1.1
"""Growth must last for so many times as long as nothing grew before, to be called a
leak; measured on counters without noise."""


class LateGrowth(NamedTuple):
    """Growth in the last epochs of a run."""

    per_epoch: float
    """How much comes with each of them."""
    epochs: float
    """For how long it has gone on."""
    more_epochs: int
    """After which it is a leak, if it goes on."""


def find_late_growth(
    times: Floats, values: Floats, *, floor: float, noise_floor: float
) -> LateGrowth | None:
    """Tell whether a series that was flat rises at its end.

    Args:
        times: When, rising [readings].
        values: The readings [readings].
        floor: Growth per unit of time that nobody minds.
        noise_floor: Standard deviation below which residuals count as none.

    Returns:
        None where it does not, or where a shape that is flat at the end, such as a
        jump, fits clearly better.

    >>> import numpy as np
    >>> flat, steps = [100.0] * 7, np.arange(9.0)
    >>> values = np.array([*flat, 140, 180])
    >>> late = find_late_growth(steps, values, floor=1, noise_floor=0.1)
    >>> round(late.per_epoch, 6), round(late.epochs, 6), late.more_epochs
    (40.0, 2.0, 5)
    >>> find_late_growth(steps, np.array([*flat, 140, 140]), floor=1, noise_floor=0.1)
    """
    half = len(times) // 2
    # What a cache did in the first half says nothing of growth in the second.
    begins = [0, half] if half >= _FEWEST_IN_HALF else [0]
    for begin in begins:
        bend = _significant_bend(times[begin:], values[begin:], floor, noise_floor)
        if bend is not None:
            grown_for = float(times[-1] - times[begin + bend.at])
            flat_for = float(times[begin + bend.at] - times[0])
            more = math.ceil(_TIMES_AS_LONG * flat_for - grown_for)
            return LateGrowth(bend.slope, grown_for, max(3, more))
    return None


def _significant_bend(
    times: Floats, values: Floats, floor: float, noise_floor: float
) -> Bend | None:
    """Give the line that begins late, unless noise or an ended shape explains it."""
    first = max(_FEWEST_FLAT - 1, len(times) // 2)
    if first > len(times) - 2:
        return None
    bend = fit_bend(times, values, noise_floor, first=first)
    if bend.slope <= floor:
        return None
    chance = upper_tail((bend.slope - floor / 2) / bend.slope_error, len(times) - 3)
    if chance > _CHANCE:
        return None
    ended = best_ended(times, values, noise_floor, stopped_late=True)
    return bend if bend.criterion - ended <= _ENDED_NATS else None
