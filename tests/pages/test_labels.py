"""Labels that are placed have room beside each other, and none is left out."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from loaderkit.pages.labels import (
    NARROWEST_PX,
    label_px,
    row_of_numbers,
    rows_of_names,
    scale_with_room,
)
from loaderkit.pages.scales import scale_of

SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=60).map(sorted)


def box_of(label, width_px):
    """Left and right end of a label in a plot of some width."""
    start_px = label.share * width_px
    if label.is_before:
        return start_px - label_px(label.text), start_px
    return start_px, start_px + label_px(label.text)


def assert_no_label_is_upon_another(labels):
    for width_px in (NARROWEST_PX, 3 * NARROWEST_PX):
        for row in {label.row for label in labels}:
            boxes = [box_of(label, width_px) for label in labels if label.row == row]
            for (_, end_px), (start_px, _) in itertools.pairwise(boxes):
                assert end_px <= start_px


@given(SHARES)
def test_every_stretch_has_a_number_and_no_number_is_upon_another(shares):
    labels = row_of_numbers(shares)

    numbers = []
    for label in labels:
        first, _, last = label.text.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    assert numbers == list(range(1, len(shares) + 1))
    assert_no_label_is_upon_another(labels)


@given(SHARES, st.text("abm W", min_size=1, max_size=12))
def test_names_are_all_placed_or_none_is(shares, name):
    labels = rows_of_names([name] * len(shares), shares)

    assert len(labels) in (0, len(shares))
    assert_no_label_is_upon_another(labels)


def test_short_stretches_have_their_names_in_rows():
    names = ["forward", "loss", "backward", "step"]

    labels = rows_of_names(names, [0.0, 0.44, 0.45, 1.0])

    assert [label.text for label in labels] == names
    assert [label.row for label in labels] == [0, 0, 1, 0]
    assert [label.is_before for label in labels] == [False, False, False, True]


@given(st.floats(0, 1e9), st.floats(1, 1e9), st.sampled_from(["bytes", "s", ""]))
def test_numbers_of_an_x_axis_do_not_touch(low, span, unit):
    def make_scale(most_ticks):
        return scale_of(low, low + span, unit, most_ticks=most_ticks)

    scale = scale_with_room(make_scale, 6)

    places = [scale.share(tick.value) * NARROWEST_PX for tick in scale.ticks]
    widths = [label_px(tick.label) for tick in scale.ticks]
    assert len(places) >= 1
    for index in range(len(places) - 1):
        room_px = places[index + 1] - places[index]
        assert room_px >= min(widths[index], widths[index + 1]) / 2
