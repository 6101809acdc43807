"""Axes: every value has its place, and labels are few, ordered and readable."""

import math

from hypothesis import given
from hypothesis import strategies as st

from loaderkit.pages.scales import scale_of

AMOUNTS = st.floats(min_value=-1e15, max_value=1e15, allow_nan=False)
UNITS = st.sampled_from(["bytes", "s", "samples", ""])


@given(AMOUNTS, AMOUNTS, UNITS, st.booleans())
def test_a_scale_holds_both_ends_and_few_distinct_labels(first, second, unit, padded):
    low, high = sorted((first, second))

    scale = scale_of(low, high, unit, padded=padded)

    assert scale.low < scale.high
    assert scale.low <= low
    assert high <= scale.high
    assert len(scale.ticks) <= 7
    values = [tick.value for tick in scale.ticks]
    assert values == sorted(values)
    labels = [tick.label for tick in scale.ticks]
    assert len(set(labels)) == len(labels)
    for tick in scale.ticks:
        assert 0 <= scale.share(tick.value) <= 1


def test_all_labels_of_an_axis_have_one_unit():
    labels = [tick.label for tick in scale_of(100 << 20, 103 << 20, "bytes").ticks]

    assert labels == ["100 MiB", "101 MiB", "102 MiB", "103 MiB"]


def test_differences_of_what_is_counted_begin_at_a_whole_number():
    [only] = scale_of(59_199.5, 59_200.5, "bytes").ticks

    assert (only.value, only.label) == (59_200, "57.8 KiB")


MOST = {"bytes": 400 << 40, "s": 3e7, "percent": 50, "samples": 5e8}
"""Half of what axes are made for: 800 TiB, two years, 1,000 million samples."""


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(sorted(MOST)))
def test_no_label_is_longer_than_its_margin(low, span, unit):
    scale = scale_of(low * MOST[unit], (low + span) * MOST[unit], unit)

    assert max((len(tick.label) for tick in scale.ticks), default=0) <= 10


def test_things_are_counted_whole():
    labels = [tick.label for tick in scale_of(0, 2, "threads").ticks]

    assert labels == ["0", "1", "2"]


def test_what_never_moves_is_in_the_middle():
    scale = scale_of(7.0, 7.0, "threads")

    assert math.isclose(scale.share(7.0), 0.5)


def test_percents_are_told_by_their_labels():
    labels = [tick.label for tick in scale_of(0, 100, "percent").ticks]

    assert labels[0] == "0 %"
    assert labels[-1] == "100 %"
