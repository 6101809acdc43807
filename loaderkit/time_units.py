"""In which unit people tell a time: 60,000 s are 16.7 h.  Pure."""

from typing import NamedTuple


class TimeUnit(NamedTuple):
    """A unit in which people tell a time."""

    name: str
    seconds: float
    """How long it is."""


_DAY = TimeUnit("d", 86_400.0)
_TIME_UNITS = (
    # what is shorter than this; below 1 s so that 999.7 us is not "1000 us"
    (TimeUnit("us", 1e-6), 0.9995e-3),
    (TimeUnit("ms", 1e-3), 0.9995),
    (TimeUnit("s", 1.0), 120.0),
    (TimeUnit("min", 60.0), 7_200.0),
    (TimeUnit("h", 3_600.0), 172_800.0),
)
"""Each with the time from which on the next one is told: two of it, above seconds."""


def time_unit_of(seconds: float) -> TimeUnit:
    """Choose the unit in which a time is told.

    Args:
        seconds: From 0.

    Returns:
        From "us" to "d".

    >>> time_unit_of(119).name, time_unit_of(120).name, time_unit_of(7_000_000).name
    ('s', 'min', 'd')
    """
    for unit, longest_s in _TIME_UNITS:
        if seconds < longest_s:
            return unit
    return _DAY
