"""Which labels of a chart have room beside each other.  Pure.

A page is laid out without a script, and is read at 400 pixels and at 1,400.  What has
room in the narrowest plot has room in every other one: places are in per cent, and
words keep their size.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.pages.scales import Scale

NARROWEST_PX = 260
"""Width of a plot on a page of 400 pixels, measured in Chromium: 263."""
_LETTER_PX = 8.3
"""Of a digit or a small letter at 12.8 pixels; measured in DejaVu Sans, which is wider
than the fonts of macOS and Windows."""
_WIDE_LETTER_PX = 13.0
"""Of a "W" or "m", and of the letters of Chinese, Japanese and Korean."""
_GAP_PX = 8.0
"""Between two labels."""
_RIGHT_MARGIN_PX = 14.0
"""A label may reach so far beyond the plot, and is still in its frame."""
_MOST_ROWS = 3
"""Of names above a plot.  Chosen: more would be taller than what they explain."""


class RowLabel(NamedTuple):
    """A label above a plot, at the beginning of the stretch that it names."""

    text: str
    share: float
    """Where its stretch begins, from 0 to 1 of the width."""
    row: int
    """0 is next to the plot."""
    is_before: bool
    """It ends where its stretch begins: behind that there is no room."""


def label_px(text: str) -> float:
    """Estimate how wide a label is; most fonts are narrower.

    >>> label_px("0 s") < label_px("10 s") < 40
    True
    """
    widths = (
        _WIDE_LETTER_PX
        if letter in "mwMWQ@%" or unicodedata.east_asian_width(letter) in "WF"
        else _LETTER_PX
        for letter in text
    )
    return sum(widths)


def is_at_end(text: str, share: float) -> bool:
    """Tell whether a label that is centred on a place would leave the frame."""
    right_px = share * NARROWEST_PX + label_px(text) / 2
    return right_px > NARROWEST_PX + _RIGHT_MARGIN_PX


def scale_with_room(make_scale: Callable[[int], Scale], most_ticks: int) -> Scale:
    """Make an x axis whose labels do not touch each other.

    Args:
        make_scale: Makes it with so many ticks at most.
        most_ticks: How many there may be where labels are short.

    Returns:
        The first that has room, with two ticks at most if none has.
    """
    for ticks_allowed in range(most_ticks, 2, -1):
        scale = make_scale(ticks_allowed)
        if _has_room(scale):
            return scale
    return make_scale(2)


def _has_room(scale: Scale) -> bool:
    end_px = float("-inf")
    for tick in scale.ticks:
        share = scale.share(tick.value)
        width_px = label_px(tick.label)
        left_px = share * NARROWEST_PX - width_px / 2
        if is_at_end(tick.label, share):
            left_px = share * NARROWEST_PX - width_px
        # From left to right, each is held against the one before it alone.
        if left_px < end_px + _GAP_PX:
            return False
        end_px = left_px + width_px
    return True


def rows_of_names(names: Sequence[str], shares: Sequence[float]) -> list[RowLabel]:
    """Place the names of stretches above a plot, in rows.

    Args:
        names: Of the stretches, from left to right ``[n]``.
        shares: Where each begins, from 0 to 1 ``[n]``.

    Returns:
        A label for each, none upon another; none at all where they have no room in
        three rows, and their numbers are to be shown, see :func:`row_of_numbers`.

    >>> [label.row for label in rows_of_names(["forward", "loss"], [0.0, 0.01])]
    [0, 1]
    """
    row_ends_px = [float("-inf")] * _MOST_ROWS
    labels: list[RowLabel] = []
    for name, share in zip(names, shares, strict=True):
        box = _box_of(name, share)
        free_rows = [
            row for row, end_px in enumerate(row_ends_px) if box.left_px >= end_px
        ]
        if not free_rows or box.left_px < 0:
            return []
        row = free_rows[0]
        row_ends_px[row] = box.right_px
        labels.append(RowLabel(name, share, row, box.is_before))
    return labels


def row_of_numbers(shares: Sequence[float]) -> list[RowLabel]:
    """Place the numbers of stretches above a plot, in one row.

    Args:
        shares: Where each begins, from 0 to 1 ``[n]``, rising.

    Returns:
        "1", "2" and so on; "3-7" where the numbers of several would touch each other.

    >>> [label.text for label in row_of_numbers([0.0, 0.3, 0.301, 0.302, 0.9])]
    ['1', '2-4', '5']
    """
    groups: list[_Numbers] = []
    for number in range(1, len(shares) + 1):
        groups.append(_Numbers(number, number))
        # What is joined is wider, and may touch the one before.
        while len(groups) > 1 and _touch(groups[-2], groups[-1], shares):
            last = groups.pop().last
            groups[-1] = _Numbers(groups[-1].first, last)
    labels = []
    for group in groups:
        share = shares[group.first - 1]
        is_before = _box_of(str(group), share).is_before
        labels.append(RowLabel(str(group), share, 0, is_before))
    return labels


class _Box(NamedTuple):
    """Where a label is in the narrowest plot, with the gap behind it."""

    left_px: float
    right_px: float
    is_before: bool
    """It ends where its stretch begins."""


class _Numbers(NamedTuple):
    """Neighbours that share a label."""

    first: int
    last: int

    def __str__(self) -> str:
        if self.last == self.first:
            return f"{self.first}"
        return f"{self.first}-{self.last}"


def _box_of(text: str, share: float) -> _Box:
    width_px = label_px(text) + _GAP_PX
    start_px = share * NARROWEST_PX
    # At the right edge a label ends at its place, where it would leave the frame.
    if start_px + width_px > NARROWEST_PX + _RIGHT_MARGIN_PX:
        return _Box(start_px - width_px, start_px, is_before=True)
    return _Box(start_px, start_px + width_px, is_before=False)


def _touch(group: _Numbers, next_group: _Numbers, shares: Sequence[float]) -> bool:
    box = _box_of(str(group), shares[group.first - 1])
    next_box = _box_of(str(next_group), shares[next_group.first - 1])
    return next_box.left_px < box.right_px
