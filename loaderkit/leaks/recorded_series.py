"""``RecordedSeries``: readings of counters, each with the epochs it was read after."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loaderkit.leaks.counter_trend import Series
    from loaderkit.memory.counters import AnyCounter


class RecordedSeries:
    """What was read of each counter, in the order of the epochs.

    Arrays, since a run may have a million epochs: 16 bytes a reading.

    >>> recorded = RecordedSeries()
    >>> recorded.record("malloc", epoch=1, value=5)
    >>> recorded.record("malloc", epoch=2, value=7)
    >>> recorded.last("malloc"), recorded.last("files")
    (7.0, None)
    """

    def __init__(self) -> None:
        self._epochs: dict[AnyCounter, array[float]] = {}
        self._values: dict[AnyCounter, array[float]] = {}

    def record(self, name: AnyCounter, *, epoch: float, value: float) -> None:
        """Add a reading."""
        if name not in self._values:
            self._epochs[name], self._values[name] = array("d"), array("d")
        self._epochs[name].append(epoch)
        self._values[name].append(value)

    def forget(self, name: AnyCounter) -> None:
        """Drop all readings of a counter."""
        del self._epochs[name], self._values[name]

    def last(self, name: AnyCounter) -> float | None:
        """Give a counter's last reading; None before its first."""
        return self._values[name][-1] if name in self._values else None

    def by_name(self) -> dict[AnyCounter, Series]:
        """Give all readings: epochs and values."""
        return {
            name: (self._epochs[name], values) for name, values in self._values.items()
        }
