"""Verdicts over thousands of generated leaks and look-alikes.

``python -m pytest tests/soak/leak_series.py``; a quarter of an hour.  The figures of
benchmarks/results/soak-leak-series.txt come from ``benchmarks.leak_verdicts --save``.
"""

import pytest
from series import EPOCHS, KIB, LOOKALIKES, any_leak, lookalike

from loaderkit.leaks.trend import fit_trend

FLOOR = 16 * KIB
LEAKS = 2_000
CLEAN = 2_000
"""Look-alikes, spread over all kinds."""


def last_verdict(seed):
    """Judge a leak, and go on for as long as the verdict asks for."""
    leak, epochs = any_leak(seed), EPOCHS
    for _ in range(6):
        trend = fit_trend(leak.readings(seed, epochs), floor=FLOOR)
        if trend.verdict != "needs more epochs":
            break
        epochs += trend.more_epochs
    return trend.verdict


def test_leaks_from_five_standard_errors_are_found():
    verdicts = [last_verdict(seed) for seed in range(1_000, 1_000 + LEAKS)]

    assert verdicts.count("leaking") >= 0.98 * LEAKS


@pytest.mark.parametrize("name", LOOKALIKES)
def test_no_lookalike_is_called_a_leak(name):
    seeds = range(1_000, 1_000 + CLEAN // len(LOOKALIKES))

    alarms = [
        seed for seed in seeds if fit_trend(lookalike(name, seed), floor=FLOOR).rising
    ]

    assert alarms == []
