"""All counters of a run: which leak, and when the memory is used up.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loaderkit.leaks.trend import (
    LEAKING,
    LEAST,
    NEEDS_MORE,
    STEADY,
    Trend,
    fit_trend,
)
from loaderkit.memory.counters import COUNTERS, unit_of, words_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Series = tuple["Sequence[float]", "Sequence[float]"]
"""Epochs, and the reading after each."""
TOLERANCE = 16 << 10
"""Bytes an epoch that nobody minds: four pages, 80 bytes a step of an epoch of 200."""
_FLOORS = {
    "blocks": 256.0, "descriptors": 0.5, "threads": 0.5, "processes": 0.5,
    "mappings": 1.0,
}  # fmt: skip
_MOST_POINTS = 64
"""A longer run is thinned to this many readings: the slope takes all pairs."""
_ENOUGH = 10
"""Readings with which a counter is judged though most epochs have none."""
EFFECTS = {
    "reserved": "allocated",
    "driver": "allocated",
    "device_used": "reserved",
}
"""Counters that grow with another one: what torch's allocator takes for tensors, what
the driver gives to it."""
_EXPLAINED_TIMES = 4.0
"""A counter grows with another one if it grows by no more than so many times as much:
chosen above what rounding to segments and pieces that are lost between them add."""
WORKER = "worker "
"""Counters of child processes are called "worker" and the process's number."""


@dataclass(frozen=True)
class CounterTrend:
    """One counter over the run."""

    name: str
    """As in :data:`loaderkit.memory.counters.COUNTERS`, or "worker" and its number."""
    trend: Trend
    """What it does."""
    epochs: tuple[float, ...]
    """When it was read."""
    values: tuple[float, ...]
    """What was read."""

    @property
    def unit(self) -> str:
        """In what it counts: "bytes", or a plural."""
        return unit_of(self.name)

    @property
    def words(self) -> str:
        """What it counts."""
        return words_of(self.name)

    @property
    def start(self) -> float:
        """The first reading after the warm-up."""
        return self.values[self.trend.warmup]

    @property
    def growth(self) -> float:
        """From the end of the warm-up to the last reading."""
        return self.values[-1] - self.start

    @property
    def judged_epochs(self) -> float:
        """How many epochs have ended since the warm-up."""
        return self.epochs[-1] - self.epochs[self.trend.warmup]


def judge(
    series: Mapping[str, Series],
    *,
    tolerance: float = TOLERANCE,
    warmup: int | None = None,
    starting_until: Mapping[str, int] | None = None,
) -> tuple[CounterTrend, ...]:
    """Judge every counter that should be flat.

    Args:
        series: Epochs and readings by counter.
        tolerance: Bytes an epoch that nobody minds.
        warmup: Readings to leave out at the start; found counter by counter if None.
        starting_until: The last epoch in which a child process was still starting up,
            by counter: growth until then is what it imports.

    Returns:
        A trend a counter, in the order given; those not judged are left out.
    """
    found = []
    seldom = read_too_seldom(series)
    for name, (epochs, values) in series.items():
        if name in seldom or not (name.startswith(WORKER) or COUNTERS[name].judged):
            continue
        start_up = (starting_until or {}).get(name, -1)
        first = sum(epoch <= start_up for epoch in epochs)
        is_starting = first > 0 and len(epochs) - first < LEAST
        if not is_starting:
            epochs, values = epochs[first:], values[first:]
        epochs, values = _thin(epochs), _thin(values)
        floor = floor_of(name, tolerance)
        trend = fit_trend(values, floor=floor, warmup=warmup, at=epochs)
        if is_starting and trend.verdict != STEADY:
            trend = replace(
                trend, verdict=NEEDS_MORE, more_epochs=max(len(values), _ENOUGH),
                why="it is still starting up: what it imports is no leak",
            )  # fmt: skip
        counter = CounterTrend(name, trend, tuple(epochs), tuple(values))
        found.append(_undecided(counter) if name == "device_used" else counter)
    return tuple(found)


def floor_of(name: str, tolerance: float = TOLERANCE) -> float:
    """Give the growth an epoch that nobody minds.

    Args:
        name: Of a counter.
        tolerance: For those that count bytes.

    Returns:
        In the counter's own unit.
    """
    return _FLOORS.get(unit_of(name), tolerance)


def read_too_seldom(series: Mapping[str, Series]) -> dict[str, int]:
    """Find the counters that cannot be judged.

    Args:
        series: Epochs and readings by counter.

    Returns:
        By counter, how often it was read: a worker that lived for an epoch, a device
        that was used late, what takes too long to be read every epoch.

    >>> read_too_seldom({"malloc": (range(9), range(9)), "shm_files": ([0, 8], [0, 0])})
    {'shm_files': 2}
    """
    counts = {name: len(epochs) for name, (epochs, _) in series.items()}
    least = min(max(counts.values(), default=0) / 3, _ENOUGH)
    return {name: count for name, count in counts.items() if count < least}


def effects(rates: Mapping[str, float]) -> set[str]:
    """Find the counters that grow only because another one does.

    Args:
        rates: Growth an epoch of all counters that leak.

    Returns:
        Those of :data:`EFFECTS` whose cause leaks too, and explains as much.

    >>> effects({"allocated": 1e6, "driver": 1.5e6})
    {'driver'}
    >>> effects({"allocated": 1e6, "driver": 9e6})
    set()
    """
    return {
        name
        for name, cause in EFFECTS.items()
        if name in rates and rates[name] <= _EXPLAINED_TIMES * rates.get(cause, 0.0)
    }


def overall(trends: Iterable[CounterTrend]) -> tuple[str, int]:
    """Sum the verdicts up.

    Args:
        trends: Of all counters.

    Returns:
        "leaking" if one leaks, else "needs more epochs" if one does and how many, else
        "steady".
    """
    found = list(trends)
    calm = {each.name for each in found if each.trend.verdict == STEADY}
    if "malloc" in calm:  # exact, while pages come and go with what is free in between
        found = [
            each for each in found
            if each.name != "anonymous" or each.trend.verdict == LEAKING
        ]  # fmt: skip
    verdicts = {each.trend.verdict for each in found}
    if LEAKING in verdicts:
        return LEAKING, 0
    if NEEDS_MORE in verdicts:
        return NEEDS_MORE, max(each.trend.more_epochs for each in found)
    return STEADY, 0


def _undecided(counter: CounterTrend) -> CounterTrend:
    """Take a leak for growth that may be another process's."""
    trend = counter.trend
    if not trend.rising:
        return counter
    more = max(_ENOUGH, len(counter.values))
    undecided = replace(
        trend, verdict=NEEDS_MORE, more_epochs=more,
        why="it grows outside of torch's allocator, or by another process",
    )  # fmt: skip
    return replace(counter, trend=undecided)


def epochs_until(room_bytes: float, bytes_per_epoch: float) -> int | None:
    """Tell when memory is used up.

    Args:
        room_bytes: What is left.
        bytes_per_epoch: What an epoch adds.

    Returns:
        Epochs; None when it does not grow.

    >>> epochs_until(1000, 300), epochs_until(1000, 0)
    (3, None)
    """
    return max(0, int(room_bytes // bytes_per_epoch)) if bytes_per_epoch > 0 else None


def _thin(values: Sequence[float]) -> list[float]:
    """Keep at most 64 of them, evenly spaced, the last included."""
    count = len(values)
    if count <= _MOST_POINTS:
        return list(values)
    step = (count - 1) / (_MOST_POINTS - 1)
    return [values[round(i * step)] for i in range(_MOST_POINTS)]
