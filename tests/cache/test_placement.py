"""Rows of many files become rows of one array, at every size of row and page."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loaderkit.cache.placement import can_be_placed, place_side_by_side

PAGES = st.sampled_from([4096, 16384, 65536])


@st.composite
def columns(draw):
    page = draw(PAGES)
    row_bytes = draw(st.integers(1, 300) | st.integers(1, 1 << 20))
    starts = st.integers(0, 40).map(lambda n: n * 4096) | st.just(64)
    drawn = draw(st.lists(st.tuples(starts, st.integers(0, 9999)), min_size=1))
    starts, counts = np.array(drawn, np.int64).T
    fitting = can_be_placed(starts, counts, row_bytes, page)
    assume(fitting.any())
    return starts[fitting], counts[fitting], row_bytes, page


@pytest.mark.slow
@given(columns())
def test_every_row_lies_where_its_number_says(column):
    starts, counts, row_bytes, _page = column

    placement = place_side_by_side(*column)

    for number, first in enumerate(placement.first_rows.tolist()):
        window = placement.window(number)
        # byte of the range = byte of the file, moved by what the window was moved
        in_window = starts[number] - window.file_start
        assert first * row_bytes - window.range_start == in_window
        end = (first + counts[number]) * row_bytes
        assert end <= window.range_start + window.nbytes


@pytest.mark.slow
@given(columns())
def test_windows_are_whole_pages_side_by_side(column):
    starts, _, _, page = column

    placement = place_side_by_side(*column)

    assert placement.nbytes % page == 0
    end = 0
    for number in range(len(starts)):
        window = placement.window(number)
        assert window.range_start % page == window.file_start % page == 0
        assert window.range_start >= end
        end = window.range_start + window.nbytes
    assert end <= placement.nbytes


def test_columns_with_as_many_rows_are_placed_alike_whatever_a_row_has():
    starts, counts = 8192 * np.arange(4), np.array([100, 5000, 1, 4096])

    placements = [
        place_side_by_side(starts, counts, row_bytes, page=4096)
        for row_bytes in (1, 12, 44, 4096, 16384)
    ]

    assert len({tuple(placement.first_rows) for placement in placements}) == 1


def test_more_addresses_than_there_are_is_no_placement():
    for rows in ([1 << 40], [1 << 61] * 8):
        starts = np.zeros(len(rows), np.int64)
        assert (
            place_side_by_side(starts, np.array(rows), row_bytes=1 << 10, page=4096)
            is None
        )
