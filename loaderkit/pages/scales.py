"""Where the ticks of an axis are, and what is written beside them.  Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_NICE_STEPS = (1.0, 2.0, 5.0, 10.0)
"""Times a power of ten: what people count in."""
_MOST_TICKS = 6
"""Chosen: more labels than that touch each other on a plot of 250 pixels."""


@dataclass(frozen=True)
class Tick:
    """A value of an axis that has a label."""

    value: float
    """In the axis's own unit."""
    label: str
    """With the unit, where it has one."""


@dataclass(frozen=True)
class Scale:
    """The values that an axis shows, from one end to the other."""

    low: float
    """Value at the beginning: left, or at the bottom."""
    high: float
    """Value at the end; larger than ``low``."""
    ticks: tuple[Tick, ...]
    """Within both ends."""

    def share(self, value: float) -> float:
        """Place a value on the axis.

        Args:
            value: In the axis's own unit; outside of the ends it is put on the end.

        Returns:
            From 0, the beginning, to 1, the end.

        >>> scale_of(0, 10).share(2.5), scale_of(0, 10).share(99)
        (0.25, 1.0)
        """
        share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)


def scale_of(low: float, high: float, unit: str = "", *, padded: bool = False) -> Scale:
    """Make a scale that shows everything between two values.

    Args:
        low: The smallest value that is shown.
        high: The largest; the same as ``low`` where nothing moves.
        unit: "bytes", "s", "percent", or the plural of what is counted, which has no
            fractions.
        padded: Leave some room beyond both values.

    Returns:
        The scale, with six ticks at most.

    >>> [tick.label for tick in scale_of(0, 3 << 29, "bytes").ticks]
    ['0 B', '0.5 GiB', '1 GiB', '1.5 GiB']
    >>> [tick.label for tick in scale_of(1000, 5000).ticks]
    ['1,000', '2,000', '3,000', '4,000', '5,000']
    """
    if high <= low:
        # A counter that never moves is a line in the middle.
        padding = abs(low) * 0.01 or 1.0
        low, high = low - padding, high + padding
    elif padded:
        padding = 0.08 * (high - low)
        low, high = low - padding, high + padding
    unit_size, unit_label = _display_unit(max(abs(low), abs(high)), unit)
    step = _nice_step((high - low) / unit_size)
    if unit not in ("bytes", "s"):
        step = max(step, 1.0)  # things are counted whole
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first = math.ceil(low / unit_size / step - 1e-9)
    last = math.floor(high / unit_size / step + 1e-9)
    ticks = [
        Tick(number * step * unit_size, _tick_label(number * step, digits, unit_label))
        for number in range(first, last + 1)
    ]
    return Scale(low, high, tuple(ticks))


def _display_unit(largest: float, unit: str) -> tuple[float, str]:
    """Choose the unit of all labels of an axis: its size, and its name."""
    if unit == "s":
        return (1.0, "s") if largest >= 1 else (1e-3, "ms")
    if unit == "percent":
        return 1.0, "%"
    if unit != "bytes":
        return 1.0, ""
    power = 0
    while largest >= 1000 and power < len(_BYTE_UNITS) - 1:
        largest /= 1024
        power += 1
    return float(1024**power), _BYTE_UNITS[power]


def _nice_step(span: float) -> float:
    """Give the smallest of 1, 2, 5, 10, 20, ... that makes few enough ticks."""
    rough = span / (_MOST_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(
        nice * power for nice in _NICE_STEPS if nice * power >= rough * (1 - 1e-9)
    )


def _tick_label(value: float, digits: int, unit_label: str) -> str:
    if value == 0:
        smallest_unit = "B" if unit_label in _BYTE_UNITS else unit_label
        return f"0 {smallest_unit}".strip()
    # "1 GiB" between "0.5 GiB" and "1.5 GiB": zeros at the end say nothing
    number = f"{value:,.{digits}f}"
    if digits:
        number = number.rstrip("0").rstrip(".")
    return f"{number} {unit_label}".strip()
