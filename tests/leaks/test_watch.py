"""When objects are counted: where a counter keeps rising, and hardly ever in noise."""

import random
from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderkit import LeakDetector
from loaderkit.leaks.lows import keeps_rising


def epochs_looked_at(values, least=10.0):
    return [n for n in range(2, len(values)) if keeps_rising(values[1 : n + 1], least)]


@given(rate=st.floats(20, 1e6), period=st.integers(1, 6))
@settings(max_examples=30)
def test_what_is_kept_every_few_epochs_is_looked_at_in_time(rate, period):
    values = [rate * period * (i // period) for i in range(31)]

    assert epochs_looked_at(values)[0] <= 4 * period


def test_noise_of_two_hundred_epochs_is_hardly_ever_looked_at():
    looked = 0
    for seed in range(100):
        r = random.Random(seed)
        looked += bool(epochs_looked_at([r.gauss(0, 1000) for _ in range(200)]))

    assert looked <= 10


def test_one_jump_and_a_saw_are_not_looked_at():
    assert not epochs_looked_at([1e6 * (i > 9) for i in range(60)])
    assert max(epochs_looked_at([1e5 * (i % 7) for i in range(60)])) <= 6  # one tooth


def test_growth_below_half_of_the_tolerance_is_not_looked_at():
    assert not epochs_looked_at([9.0 * i for i in range(200)])


def largest_deviation_of_40_kb_an_epoch():
    """Keep 40 kB an epoch until it is called a leak; how far one step was from that."""
    detector = LeakDetector("cpu", on_leak=id)
    retained = deque()
    for _ in detector.epochs(range(34)):
        retained.append(bytearray(40_000))
    malloc = next(c for c in detector.report().counters if c.name == "malloc")

    assert len(retained) == 34
    assert detector.report().leaking  # after 30 epochs it was too, with holders
    late = malloc.values[5:]
    return max(abs(b - a - 40_000) for a, b in pairwise(late))


@pytest.mark.slow
def test_our_own_census_does_not_show_in_the_readings():
    # Threads that others left in this process, pytest-xdist's too, may take memory in
    # one run; our own would show in every one.
    deviations = (largest_deviation_of_40_kb_an_epoch() for _ in range(3))

    assert any(deviation < 20_000 for deviation in deviations)
