"""Student's t distribution, which the standard library lacks.  Pure."""

from __future__ import annotations

import functools
import math


@functools.cache
def quantile(freedom: int, alpha: float) -> float:
    """Give the t that noise exceeds with a chance of ``alpha``.

    Args:
        freedom: Degrees of freedom; fewer than 1 count as 1.
        alpha: Chance, one-sided.

    Returns:
        The quantile.

    >>> round(quantile(10, 0.01), 2), round(quantile(3, 0.01), 2)
    (2.76, 4.54)
    """
    # Bisection, since the inverse has no finite series; below the quantile of one
    # degree of freedom, which is the largest.
    low, high = 0.0, 1 / math.tan(math.pi * alpha)
    for _ in range(60):
        middle = (low + high) / 2
        if upper_tail(middle, max(1, freedom)) > alpha:
            low = middle
        else:
            high = middle
    return high


def upper_tail(t: float, freedom: int) -> float:
    """Give the chance of a Student's t above ``t``, by its finite series.

    Args:
        t: Any number.
        freedom: Degrees of freedom, from 1.

    Returns:
        The chance.

    >>> upper_tail(0.0, 5), round(upper_tail(2.015, 5), 4)
    (0.5, 0.05)
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = total = 0.0
    if freedom > 1:
        term = total = cosine if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    # The chance of lying between -t and t (Abramowitz and Stegun 1964, 26.7.3 and 4).
    central = total * math.sin(angle)
    if odd:
        central = 2 / math.pi * (angle + central)
    return (1 - central) / 2
