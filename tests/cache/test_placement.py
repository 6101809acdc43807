"""Rows of many files become rows of one array, at every size of row and page."""

from hypothesis import assume, given
from hypothesis import strategies as st

from loaderkit.cache.placement import Rows, can_be_placed, place

PAGES = st.sampled_from([4096, 16384, 65536])


@st.composite
def columns(draw):
    page = draw(PAGES)
    row_bytes = draw(st.integers(1, 300) | st.integers(1, 1 << 20))
    starts = st.integers(0, 40).map(lambda n: n * 4096) | st.just(64)
    drawn = draw(st.lists(st.tuples(starts, st.integers(1, 9999)), min_size=1))
    shards = [Rows(*each) for each in drawn]
    shards = [rows for rows in shards if can_be_placed(rows, row_bytes, page)]
    assume(shards)
    return shards, row_bytes, page


@given(columns())
def test_every_row_lies_where_its_number_says(column):
    shards, row_bytes, page = column

    placement = place(shards, row_bytes, page)

    firsts, windows = placement.first_rows, placement.windows
    for rows, first, window in zip(shards, firsts, windows, strict=True):
        # byte of the range = byte of the file, moved by what the window was moved
        assert first * row_bytes - window.at == rows.start - window.file_start
        assert first * row_bytes + rows.count * row_bytes <= window.at + window.nbytes


@given(columns())
def test_windows_are_whole_pages_side_by_side(column):
    shards, row_bytes, page = column

    placement = place(shards, row_bytes, page)

    assert placement.nbytes % page == 0
    ends = [0]
    for window in placement.windows:
        assert window.at % page == window.file_start % page == 0
        assert window.at >= ends[-1]
        ends.append(window.at + window.nbytes)
    assert ends[-1] <= placement.nbytes


def test_columns_with_as_many_rows_are_placed_alike_whatever_a_row_has():
    counts = [100, 5000, 1, 4096]

    placements = [
        place([Rows(8192 * n, c) for n, c in enumerate(counts)], row_bytes, page=4096)
        for row_bytes in (1, 12, 44, 4096, 16384)
    ]

    assert len({placement.first_rows for placement in placements}) == 1


def test_more_addresses_than_there_are_is_no_placement():
    assert place([Rows(0, 1 << 40)], row_bytes=1 << 10, page=4096) is None
