"""``CounterTrend``: one counter over the run.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from loaderkit.answers import answer_wrong_names
from loaderkit.memory.counters import AnyCounter, unit_of, words_of
from loaderkit.notebook import HasCard, repr_in_a_line
from loaderkit.units import format_amount

if TYPE_CHECKING:
    from loaderkit.leaks.trend import Trend
    from loaderkit.memory.counters import Unit

Series: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Epochs, and the reading after each."""
SeriesByCounter: TypeAlias = Mapping[AnyCounter, Series]
Doubt: TypeAlias = Literal[
    "still starting up",
    "maybe another process",
    "fits into what malloc keeps",
    "grows with malloc",
    "too few readings beside malloc",
]
"""Why growth that is significant and goes on is no leak yet."""
TOLERANCE = 16 << 10
"""Bytes an epoch that nobody minds: four pages, 80 bytes a step of an epoch of 200."""
_FLOORS: Mapping[Unit, float] = {
    "blocks": 256.0,
    "descriptors": 0.5,
    "threads": 0.5,
    "processes": 0.5,
    "mappings": 1.0,
}
"""Growth an epoch that nobody minds, of what is no memory.  Of descriptors and the like
one every second epoch is a leak; 256 small objects are 16 KiB, the tolerance."""
_MOST_POINTS = 64
"""A longer run is thinned to this many readings: the slope takes all pairs."""
ENOUGH_READINGS = 10
"""With so many a counter is judged though most epochs have none.  Chosen: a third of a
run of thirty epochs."""


@answer_wrong_names("trend")
@dataclass(frozen=True)
class CounterTrend(HasCard):
    """One counter over the run."""

    name: AnyCounter
    """As in :data:`loaderkit.memory.counters.COUNTERS`, or a worker's."""
    trend: Trend
    """What it does."""
    epochs: tuple[float, ...]
    """When it was read."""
    values: tuple[float, ...]
    """What was read."""
    doubt: Doubt | None = None
    """Why it is no leak yet though it grows."""

    @property
    def unit(self) -> Unit:
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

    def growth_since(self, epoch: float) -> float:
        """From the first reading at an epoch or behind it to the last reading."""
        since = [
            value
            for at, value in zip(self.epochs, self.values, strict=True)
            if at >= epoch
        ]
        return since[-1] - since[0] if since else 0.0

    @property
    def judged_epochs(self) -> float:
        """How many epochs have ended since the warm-up."""
        return self.epochs[-1] - self.epochs[self.trend.warmup]

    @property
    def judged_readings(self) -> int:
        """How many readings there are since the warm-up."""
        return len(self.values) - self.trend.warmup

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        first, last = (
            format_amount(value, self.unit) for value in (self.start, self.values[-1])
        )
        return f"{self.name}, {first} to {last}; {self.trend}"


def floor_of(name: AnyCounter, tolerance: float = TOLERANCE) -> float:
    """Give the growth an epoch that nobody minds.

    Args:
        name: Of a counter.
        tolerance: For those that count bytes.

    Returns:
        In the counter's own unit.
    """
    return _FLOORS.get(unit_of(name), tolerance)


def read_too_seldom(series: SeriesByCounter) -> dict[AnyCounter, int]:
    """Find the counters that cannot be judged.

    Args:
        series: Epochs and readings by counter.

    Returns:
        By counter, how often it was read: a worker that lived for an epoch, a device
        that was used late, what takes too long to be read every epoch.

    >>> read_too_seldom({"malloc": (range(9), range(9)), "shm_files": ([0, 8], [0, 0])})
    {'shm_files': 2}
    """
    # Held against the counter that was read most often, which is every epoch as a rule.
    counts = {name: len(epochs) for name, (epochs, _) in series.items()}
    longest = max(counts.values(), default=0)
    fewest = min(longest / 3, ENOUGH_READINGS)
    return {name: count for name, count in counts.items() if count < fewest}


def thin_out(values: Sequence[float]) -> list[float]:
    """Keep at most 64 of them, evenly spaced, the last included.

    >>> len(thin_out(range(1000))), thin_out(range(1000))[-1]
    (64, 999)
    """
    count = len(values)
    if count <= _MOST_POINTS:
        return list(values)
    # From the first to the last, both included: the slope rests on the ends.
    step = (count - 1) / (_MOST_POINTS - 1)
    return [values[round(point * step)] for point in range(_MOST_POINTS)]
