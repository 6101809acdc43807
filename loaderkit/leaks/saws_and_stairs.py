"""Series that grow in another shape than a line: saws and stairs.  Pure.

A list that is emptied again and again, but never whole, is a saw that falls to more
each time; something that is kept every tenth epoch makes stairs.
"""

from __future__ import annotations

import itertools
import math
import statistics
from typing import NamedTuple

from loaderkit.leaks.noise import growth_per_epoch

_DEEP_FALL_SHARE = 0.4
"""Of the whole range: a fall of a saw."""
_SURE_FALLS = 9
"""So many falls, each to more than the last, are no chance: of nine numbers in any
order one in 9! = 360,000 rises throughout, which is below ``ALPHA``; of eight not."""


class Sawtooth(NamedTuple):
    """A series that falls again and again, each time to more."""

    slope: float
    """Of what is left after each fall."""
    more_epochs: int
    """Until there are enough falls; 0 when there are."""


def sawtooth_floor(
    times: list[float],
    values: list[float],
    floor: float,
) -> Sawtooth | None:
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
    rises = growth_per_epoch(fall_times, [values[index] for index in falls])
    if len(rises) < 2 or min(rises) <= floor or max(rises) > 1.5 * min(rises):
        return None
    distances = [after - before for before, after in itertools.pairwise(fall_times)]
    is_even = max(distances) - min(distances) <= 2
    if not is_even or max(distances) > 2 * min(distances):
        return None
    missing_falls = max(0, _SURE_FALLS - len(falls))
    more_epochs = math.ceil(missing_falls * statistics.fmean(distances))
    return Sawtooth(statistics.median(rises), more_epochs)


_WARM_UP_STEPS = 3
"""Steps at the start that are no stairs: memory is taken then in any case."""
_FEWEST_STAIRS = 3
_SURE_STAIRS = 5
"""Even rises at even distances: two may be two jumps, five are no chance."""
_FLAT_SHARE = 0.25
"""What lies between stairs moves by less than so much of their height."""


def epochs_until_stairs_are_sure(
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
