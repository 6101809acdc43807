"""Where the ticks of an axis are, and what is written beside them.  Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loaderkit.digits import digits_behind_point
from loaderkit.time_units import time_unit_of
from loaderkit.units import BYTE_UNITS, format_bytes

_NICE_STEPS = (1.0, 2.0, 5.0, 10.0)
"""Times a power of ten: what people count in."""
MOST_TICKS = 6
"""Chosen: more short labels than that touch each other on a plot of 250 pixels."""
_LONGEST_LABEL = 10
"""Letters: what has room beside a plot on a telephone."""
_LONGEST_DIFFERENCE = 12
"""The same of a difference, such as "+500,000 KiB": a value of twenty digits is told in
powers of ten."""
_BASE_NAMES = {"bytes": "B", "s": "s", "percent": "%"}
"""Written behind powers of ten."""
_CLOCK_STEPS = {
    "s": (10.0, 15.0, 20.0, 30.0, 60.0),
    "min": (10.0, 15.0, 20.0, 30.0, 60.0),
    "h": (3.0, 6.0, 12.0, 24.0),
}
"""By the name of the unit: what a clock shows in place of 50 minutes or 5 hours."""
_PADDING = 0.08
"""Share of the values' span that is left free beyond both ends.  Chosen: the label of a
limit has room there."""
_PADDING_OF_FLAT = 0.01
"""Share of the value itself, where all are the same.  Chosen."""
_ROUNDING = 1e-9
"""What floats may miss a multiple of a step by: 0.3 / 0.1 is 2.9999999999999996."""
_MILLIONS_FROM = 10_000_000
"""Counts as large as this are told in millions: "20 M", and not "20,000,000"."""


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


def scale_of(
    low: float,
    high: float,
    unit: str = "",
    *,
    padded: bool = False,
    most_ticks: int = MOST_TICKS,
) -> Scale:
    """Make a scale that shows everything between two values.

    Args:
        low: The smallest value that is shown.
        high: The largest; the same as ``low`` where nothing moves.
        unit: "bytes", "s", "percent", or the plural of what is counted, which has no
            fractions.
        padded: Leave some room beyond both values.
        most_ticks: As many ticks as that, or fewer.

    Returns:
        The scale.

    >>> [tick.label for tick in scale_of(0, 3 << 29, "bytes").ticks]
    ['0 B', '0.5 GiB', '1.0 GiB', '1.5 GiB']
    >>> [tick.label for tick in scale_of(1000, 5000).ticks]
    ['1,000', '2,000', '3,000', '4,000', '5,000']

    Where labels would differ in their last digits only, they tell the difference:

    >>> [tick.label for tick in scale_of(5 << 30, (5 << 30) + 300, "bytes").ticks]
    ['5.00 GiB', '+100 B', '+200 B', '+300 B']

    What no unit makes short is told in powers of ten:

    >>> [tick.label for tick in scale_of(0, 2**70).ticks][:3]
    ['0', '5e+20', '1e+21']
    """
    low, high = min(low, high), max(low, high)
    if high == low:
        # A counter that never moves is a line in the middle.
        padding = abs(low) * _PADDING_OF_FLAT or 1.0
        low, high = low - padding, high + padding
    elif padded:
        padding = _PADDING * (high - low)
        low, high = low - padding, high + padding
    display_unit = _display_unit(max(abs(low), abs(high)), unit)
    values = _tick_values(low, high, display_unit, most_ticks)
    labels = [display_unit.label(value, values.digits) for value in values.multiples]
    ticks = tuple(
        Tick(value * display_unit.size, label)
        for value, label in zip(values.multiples, labels, strict=True)
    )
    if _longest_label(ticks) > _LONGEST_LABEL:
        ticks = _difference_ticks(low, high, unit, most_ticks)
    if _longest_label(ticks) > _LONGEST_DIFFERENCE:
        ticks = _power_ticks(low, high, unit, most_ticks)
    return Scale(low, high, ticks)


def _longest_label(ticks: tuple[Tick, ...]) -> int:
    return max((len(tick.label) for tick in ticks), default=0)


@dataclass(frozen=True)
class _DisplayUnit:
    """The unit of all labels of an axis."""

    size: float
    """In the axis's own unit."""
    name: str
    """Written behind each number; empty for what is counted."""
    name_of_zero: str
    """Written behind a 0."""
    smallest: float = 0.0
    """In this unit; there is nothing between two multiples of it.  0: there is."""

    def label(self, value: float, digits: int) -> str:
        """Write a value that is given in this unit."""
        if value == 0:
            return f"0 {self.name_of_zero}".strip()
        return f"{value:,.{digits}f} {self.name}".strip()


@dataclass(frozen=True)
class _TickValues:
    """Where ticks are, and with how many digits they differ."""

    multiples: tuple[float, ...]
    """In the display unit."""
    digits: int
    """Behind the decimal point."""


def _display_unit(largest: float, unit: str) -> _DisplayUnit:
    """Choose the unit of all labels of an axis."""
    if unit == "s":
        time_unit = time_unit_of(largest)
        return _DisplayUnit(time_unit.seconds, time_unit.name, time_unit.name)
    if unit == "percent":
        return _DisplayUnit(1.0, "%", "%")
    if unit != "bytes":
        if largest >= _MILLIONS_FROM:
            return _DisplayUnit(1e6, "M", "", smallest=1e-6)
        return _DisplayUnit(1.0, "", "", smallest=1.0)
    power = 0
    while largest >= 1000 and power < len(BYTE_UNITS) - 1:
        largest /= 1024
        power += 1
    size = float(1024**power)
    return _DisplayUnit(size, BYTE_UNITS[power], "B", smallest=1 / size)


def _tick_values(
    low: float, high: float, display_unit: _DisplayUnit, most_ticks: int
) -> _TickValues:
    """Choose round numbers between two values."""
    span = (high - low) / display_unit.size
    step = _nice_step(span, most_ticks, _CLOCK_STEPS.get(display_unit.name, ()))
    step = max(step, display_unit.smallest)
    # As many digits as the step has: 0.05 is told by two.
    digits = max(0, -math.floor(math.log10(step) + _ROUNDING))
    first = math.ceil(low / display_unit.size / step - _ROUNDING)
    last = math.floor(high / display_unit.size / step + _ROUNDING)
    # Multiplied, and not added up: errors of rounding do not add up either.
    multiples = tuple(number * step for number in range(first, last + 1))
    return _TickValues(multiples, digits)


def _difference_ticks(
    low: float, high: float, unit: str, most_ticks: int
) -> tuple[Tick, ...]:
    """Label the first tick with its value, and the others with how much more they are.

    A counter of 120 GiB that moves by 200 bytes would have labels of 14 digits.
    """
    # What is counted, bytes too, begins at a whole number.
    start = low if unit in ("s", "percent") else float(math.ceil(low))
    span_unit = _display_unit(high - low, unit)
    values = _tick_values(0.0, high - start, span_unit, most_ticks)
    ticks = []
    for value in values.multiples:
        label = _start_label(start, unit)
        if value:
            label = f"+{span_unit.label(value, values.digits)}"
        ticks.append(Tick(start + value * span_unit.size, label))
    return tuple(ticks)


def _power_ticks(
    low: float, high: float, unit: str, most_ticks: int
) -> tuple[Tick, ...]:
    """Label values that no unit makes short with powers of ten."""
    name = _BASE_NAMES.get(unit, "")
    values = _tick_values(low, high, _DisplayUnit(1.0, name, name), most_ticks)
    multiples = values.multiples
    # As few digits as tell all labels apart.
    for digits in range(3, _LONGEST_DIFFERENCE):
        labels = [f"{value:.{digits}g} {name}".strip() for value in multiples]
        if len(set(labels)) == len(labels):
            break
    ticks = tuple(map(Tick, multiples, labels))
    if _longest_label(ticks) <= _LONGEST_DIFFERENCE:
        return ticks
    # Values that differ in their last digits have no short labels: one says where.
    return (Tick(multiples[0], f"{multiples[0]:.3g} {name}".strip()),)


def _start_label(value: float, unit: str) -> str:
    """Write the value that others are told the difference to, in three digits."""
    if unit == "bytes":
        return format_bytes(round(value))
    display_unit = _display_unit(abs(value), unit)
    number = value / display_unit.size
    # Of what is counted there are no parts.
    digits = 0 if display_unit.smallest == 1.0 else digits_behind_point(number)
    return display_unit.label(number, digits)


def _nice_step(
    span: float, most_ticks: int, clock_steps: tuple[float, ...] = ()
) -> float:
    """Give the smallest of 1, 2, 5, 10, 20, ... that makes few enough ticks."""
    rough = span / (most_ticks - 1)
    # Below half of the first of them, seconds and minutes are counted like all else.
    if clock_steps and clock_steps[0] / 2 < rough <= clock_steps[-1]:
        return min(step for step in clock_steps if step >= rough)
    power = 10.0 ** math.floor(math.log10(rough))
    steps = (nice * power for nice in _NICE_STEPS)
    return next(step for step in steps if step >= rough * (1 - _ROUNDING))
