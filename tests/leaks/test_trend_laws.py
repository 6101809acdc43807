"""Laws of verdicts on series made by chance; tests/soak has the long version."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from series import BASE, EPOCHS, KIB, LOOKALIKES, MIB, Leak, any_leak, lookalike

from loaderkit import fit_trend
from loaderkit.leaks.trend import LEAKING, NEEDS_MORE, STEADY

FLOOR = 16 * KIB


def verdict(values):
    return fit_trend(values, floor=FLOOR).verdict


def decided(leak, seed, looks=6):
    """Run on for as long as the verdict asks for."""
    epochs = EPOCHS
    for _ in range(looks):
        trend = fit_trend(leak.readings(seed, epochs), floor=FLOOR)
        if trend.verdict != NEEDS_MORE:
            break
        epochs += trend.more_epochs
    return trend.verdict


@pytest.mark.slow
def test_leaks_of_five_standard_errors_are_found_in_the_epochs_that_are_asked_for():
    verdicts = [decided(any_leak(seed), seed) for seed in range(150)]

    assert verdicts.count(LEAKING) >= 0.98 * 150


def test_leaks_of_thirty_standard_errors_are_mostly_found_in_thirty_epochs():
    leak = Leak(rate=80 * KIB, signal=30)

    verdicts = [verdict(leak.readings(seed)) for seed in range(60)]

    assert verdicts.count(LEAKING) >= 54
    assert STEADY not in verdicts


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_only_looks_like_a_leak_is_none(name):
    verdicts = [verdict(lookalike(name, seed)) for seed in range(40)]

    assert LEAKING not in verdicts


@given(period=st.integers(1, 12), epochs=st.integers(30, 60), cut=st.booleans())
@settings(max_examples=40)
def test_what_is_kept_every_few_epochs_is_never_steady(period, epochs, cut):
    values = Leak(rate=205 * KIB, period=period).readings(0, epochs)
    if cut:
        values = values[1:]

    found = verdict(values)

    # Two stairs cannot be told from two jumps.
    assert found != STEADY or epochs // period < 3
    assert found == LEAKING or epochs // period < 5


@given(fall=st.floats(0.0, 0.55), fall_at=st.integers(3, 28), period=st.integers(1, 3))
@settings(max_examples=40)
def test_one_fall_does_not_clear_a_leak(fall, fall_at, period):
    leak = Leak(160 * KIB, period=period, fall=fall, fall_at=fall_at)

    assert verdict(leak.readings(0)) != STEADY


def test_a_list_that_is_emptied_once_needs_more_epochs():
    values = [BASE + MIB * (epoch % 20) for epoch in range(31)]

    trend = fit_trend(values, floor=FLOOR)

    assert trend.verdict == NEEDS_MORE
    assert 10 < trend.more_epochs <= 20
    assert verdict([BASE + MIB * (epoch % 20) for epoch in range(60)]) == STEADY


def test_noise_says_which_leak_would_have_shown():
    quiet = fit_trend(Leak(rate=1, signal=20).readings(0), floor=FLOOR)
    noisy = fit_trend(
        [value + (i * 7919 % 13) * MIB for i, value in enumerate([BASE] * 31)],
        floor=FLOOR,
    )

    assert quiet.detectable == FLOOR
    assert noisy.verdict == STEADY
    assert noisy.detectable > 100 * KIB
