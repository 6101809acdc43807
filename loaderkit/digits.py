"""With how many digits numbers are written.  Pure."""

from __future__ import annotations


def digits_behind_point(number: float) -> int:
    """Say how many digits behind the point make three in all, at least.

    >>> digits_behind_point(1.5), digits_behind_point(-15.0), digits_behind_point(150.0)
    (2, 1, 0)
    """
    if abs(number) >= 100:
        return 0
    return 1 if abs(number) >= 10 else 2
