"""Pictures for a page: curves, stacked areas, histograms and bars.  Pure.

Lines and areas are SVG that stretches with its frame.  Words are HTML that is placed in
per cent, so that they keep their size.  ``readout.js`` moves the cursor of a chart and
shows the readout of where it is; the first readout is there without it too.
"""

from __future__ import annotations

import html
import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from loaderkit.html_words import escape_words
from loaderkit.pages.labels import (
    is_at_end,
    label_px,
    row_of_numbers,
    rows_of_names,
    scale_with_room,
)
from loaderkit.pages.scales import MOST_TICKS, scale_of
from loaderkit.units import count_of, format_amount, is_known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loaderkit.pages.labels import RowLabel
    from loaderkit.pages.scales import Scale

Colour: TypeAlias = Literal[
    "blue", "orange", "green", "purple", "teal", "brown", "grey", "olive", "red"
]
"""Each has a shade for light and one for dark paper, in ``page.css``."""
COLOURS: tuple[Colour, ...] = (
    "blue",
    "orange",
    "green",
    "purple",
    "teal",
    "brown",
    "grey",
    "olive",
)
"""In the order in which series take them; red is kept for limits and what is wrong."""
_VIEW = 1000
"""Width and height of a plot in the units of its SVG, whatever size it is shown in."""
_LOW_LINE = 0.15
"""Share of the height up to which the label of a limit stands above its line: below it
would be on the numbers of the x axis."""
_HEADROOM = 1.04
"""How far an axis goes beyond the highest of its values; chosen: a line along the upper
edge, or a bar up to it, would look cut off."""
_LETTERS_OF_LINE = 40
"""Of a readout, about: what a line break of it takes where lines are broken anyway."""
_TICKS_WITH_UNIT = ("bytes", "s", "percent")
"""Units that are written behind each number of an axis; others are its name."""


@dataclass(frozen=True)
class Series:
    """One curve, or one layer of a stack."""

    name: str
    """What the legend calls it."""
    values: tuple[float | None, ...]
    """One for each x of its chart ``[n]``; where it is None or no finite number, there
    is a gap in a line, and nothing of a layer."""
    colour: Colour
    """Of the line or the area."""


@dataclass(frozen=True)
class Limit:
    """A line that must not be crossed."""

    value: float
    """In the unit of the axis that it crosses."""
    label: str
    """What it is the limit of."""


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis that has a name."""

    start: float
    """First x."""
    end: float
    """Last x."""
    label: str
    """Written at its top."""
    shaded: bool = False
    """Drawn grey, because it does not count."""


@dataclass(frozen=True)
class Segment:
    """A dashed straight line, such as a trend."""

    start: tuple[float, float]
    """x and y."""
    end: tuple[float, float]
    """x and y."""


@dataclass(frozen=True)
class Curves:
    """Values over an x axis: lines, or layers stacked on each other."""

    label: str
    """What it shows, in a sentence, for those who cannot see it."""
    x: tuple[float, ...]
    """Where the values are, rising ``[n]``."""
    x_name: str
    """Name of the x axis."""
    series: tuple[Series, ...]
    """From the bottom up where they are stacked."""
    unit: str
    """Of the values: "bytes", or the plural of what is counted."""
    readouts: tuple[str, ...]
    """What is said of each x ``[n]``."""
    first_readout: int = -1
    """Which one is shown at first, such as that of the peak."""
    x_unit: str = ""
    """Of the x axis."""
    stacked: bool = False
    """Areas that add up, from 0; each value holds until the next x."""
    bands: tuple[Band, ...] = ()
    """Named stretches of the x axis."""
    limits: tuple[Limit, ...] = ()
    """Lines across; they are always in the picture."""
    trend: Segment | None = None
    """Drawn dashed."""


@dataclass(frozen=True)
class HistogramChart:
    """How often a size occurs."""

    label: str
    """What it shows, in a sentence."""
    edges: tuple[float, ...]
    """Whole numbers: where the bins begin, and the first behind the last one
    ``[n + 1]``."""
    counts: tuple[int, ...]
    """How many are in each bin ``[n]``."""
    x_name: str
    """What is measured."""
    x_unit: str = ""
    """Of what is measured."""
    y_name: str = "samples"
    """What is counted."""
    limits: tuple[Limit, ...] = ()
    """Sizes that are drawn as lines."""


@dataclass(frozen=True)
class Bar:
    """One row of bars."""

    name: str
    """What it is of."""
    value: float | None
    """How long it is; one that is None or no finite number is not drawn."""
    text: str
    """The value with its unit, and what else belongs beside it."""
    colour: Colour = "blue"
    """Of the bar."""


@dataclass(frozen=True)
class Bars:
    """Values side by side, each with its name and its amount."""

    label: str
    """What they show, in a sentence."""
    bars: tuple[Bar, ...]
    """From top to bottom."""
    limit: Limit | None = None
    """A mark across all of them."""


Chart: TypeAlias = Curves | HistogramChart | Bars


def chart_html(chart: Chart) -> str:
    """Draw a chart.

    Args:
        chart: What it shows.

    Returns:
        HTML; every text in it is escaped.
    """
    if isinstance(chart, Curves):
        return _curves_html(chart)
    if isinstance(chart, HistogramChart):
        return _histogram_html(chart)
    return _bars_html(chart)


def _curves_html(chart: Curves) -> str:
    x_scale = scale_with_room(
        lambda most_ticks: scale_of(
            chart.x[0], chart.x[-1], chart.x_unit, most_ticks=most_ticks
        ),
        MOST_TICKS,
    )
    y_scale = _scale_of_values(chart)
    shapes = [_shaded_html(band, x_scale) for band in chart.bands if band.shaded]
    if chart.stacked:
        shapes += _areas_html(chart, x_scale, y_scale)
    else:
        for series in chart.series:
            shapes += _lines_html(chart.x, series, x_scale, y_scale)
    if chart.trend is not None and is_known(chart.trend.start[1] + chart.trend.end[1]):
        shapes.append(_trend_html(chart.trend, x_scale, y_scale))
    named_bands = [band for band in chart.bands if band.label]
    shapes += [
        _line_html(
            "edge", (x_scale.share(band.start), 0), (x_scale.share(band.start), 1)
        )
        for band in named_bands
    ]
    names = _label_bands(named_bands, x_scale)
    limit_labels = []
    for limit in _drawn_limits(chart.limits):
        height = y_scale.share(limit.value)
        shapes.append(_line_html("limit", (0, height), (1, height)))
        side = "above" if height < _LOW_LINE else "below"
        limit_labels.append(
            f'<span class="limit-label {side}" style="bottom: {height:.2%}">'
            f"{escape_words(limit.label)}</span>"
        )
    frame = _frame_html(
        chart.label,
        x_scale,
        y_scale,
        "".join(shapes),
        names.labels_html + "".join(limit_labels),
        rows_above=names.rows,
        x_name=chart.x_name,
        y_name="" if chart.unit in _TICKS_WITH_UNIT else chart.unit,
        positions=[x_scale.share(x) for x in chart.x],
        readouts=chart.readouts,
        first=chart.first_readout % len(chart.x),
    )
    legend = _legend_html(chart.series) if len(chart.series) > 1 else ""
    return f"{legend}{frame}{names.list_html}"


@dataclass(frozen=True)
class _BandNames:
    """What names the stretches of an x axis."""

    labels_html: str
    """Above the plot."""
    rows: int
    """How many lines they take."""
    list_html: str
    """What the numbers mean, where numbers stand for names; empty otherwise."""


def _label_bands(bands: Sequence[Band], x_scale: Scale) -> _BandNames:
    """Write the names of stretches above a plot, or numbers where they have no room."""
    shares = [x_scale.share(band.start) for band in bands]
    list_html = ""
    labels = rows_of_names([band.label for band in bands], shares)
    if bands and not labels:
        labels = row_of_numbers(shares)
        items = "".join(
            f"<li><span>{number}</span> {escape_words(band.label)}</li>"
            for number, band in enumerate(bands, 1)
        )
        list_html = f'<ol class="band-names">{items}</ol>'
    rows = max((label.row + 1 for label in labels), default=0)
    return _BandNames("".join(map(_row_label_html, labels)), rows, list_html)


def _row_label_html(label: RowLabel) -> str:
    side = "before" if label.is_before else "behind"
    edge = f"left: {label.share:.2%}"
    if label.is_before:
        edge = f"right: {1 - label.share:.2%}"
    return (
        f'<span class="band {side}" style="{edge}; --row: {label.row}">'
        f"{escape_words(label.text)}</span>"
    )


def _drawn_limits(limits: Sequence[Limit]) -> list[Limit]:
    """Leave out limits that are nowhere, such as an infinite one."""
    return [limit for limit in limits if is_known(limit.value)]


def _scale_of_values(chart: Curves) -> Scale:
    """Make the y axis, with room for every curve and every limit."""
    limits = [limit.value for limit in _drawn_limits(chart.limits)]
    if chart.stacked:
        # From 0, even where all layers are far above it: areas are compared by size.
        shown = [0.0, *limits]
        layers = [_layer_of(series) for series in chart.series]
        for values in zip(*layers, strict=True):
            shown += itertools.accumulate(values)
        low, high = min(shown), max(shown)
        return scale_of(low * _HEADROOM, high * _HEADROOM or 1.0, chart.unit)

    shown = limits
    for series in chart.series:
        shown += filter(is_known, series.values)
    # Without a reading there is an empty plot.
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    return scale_of(low, high, chart.unit, padded=True)


def _layer_of(series: Series) -> list[float]:
    """Give the heights of a layer, none where there is no value."""
    return [value if is_known(value) else 0.0 for value in series.values]


def _lines_html(
    x: Sequence[float], series: Series, x_scale: Scale, y_scale: Scale
) -> list[str]:
    """Draw a curve, in pieces where values are missing."""
    pieces: list[list[str]] = [[]]
    for position, value in zip(x, series.values, strict=True):
        if is_known(value):
            point = _svg_point(x_scale.share(position), y_scale.share(value))
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    lines = []
    for piece in filter(None, pieces):
        # A single point is drawn twice: a line's round end makes a dot of it.
        points = piece * 2 if len(piece) == 1 else piece
        lines.append(
            f'<polyline class="line {series.colour}" points="{" ".join(points)}"/>'
        )
    return lines


def _areas_html(chart: Curves, x_scale: Scale, y_scale: Scale) -> list[str]:
    """Draw layers as stairs: a value holds until the next one."""
    areas = []
    floor = [0.0] * len(chart.x)
    for series in chart.series:
        layer = _layer_of(series)
        top = [low + value for low, value in zip(floor, layer, strict=True)]
        # Around the area: along its top, and back along the layer below.
        upper_edge = _stair_points(chart.x, top, x_scale, y_scale)
        lower_edge = _stair_points(chart.x, floor, x_scale, y_scale)[::-1]
        outline = " ".join([*upper_edge, *lower_edge])
        areas.append(f'<polygon class="area {series.colour}" points="{outline}"/>')
        floor = top
    return areas


def _stair_points(
    x: Sequence[float], values: Sequence[float], x_scale: Scale, y_scale: Scale
) -> list[str]:
    points = []
    for index, value in enumerate(values):
        height = y_scale.share(value)
        points.append(_svg_point(x_scale.share(x[index]), height))
        if index + 1 < len(x):
            points.append(_svg_point(x_scale.share(x[index + 1]), height))
    return points


def _sizes_in_words(smallest: float, largest: float, chart: HistogramChart) -> str:
    """Say which sizes a bin holds, in the unit of the axis."""
    shown = [
        format_amount(size, chart.x_unit)
        if chart.x_unit == "bytes"
        else f"{size:,.0f} {chart.x_name}"
        for size in (smallest, largest)
    ]
    if shown[0] == shown[1]:
        return shown[0]
    first = shown[0].removesuffix(f" {chart.x_name}")
    return f"{first} to {shown[1]}"


def _histogram_html(chart: HistogramChart) -> str:
    # A size is a whole number, and stands in the middle of its bar.
    edges = [edge - 0.5 for edge in chart.edges]
    # A limit is behind the bar of the last size that is within it.
    drawn_limits = _drawn_limits(chart.limits)
    limits = [limit.value + 0.5 for limit in drawn_limits]
    low = min([edges[0], *limits])
    high = max([edges[-1], *limits])
    x_scale = scale_with_room(
        lambda most_ticks: scale_of(low, high, chart.x_unit, most_ticks=most_ticks),
        MOST_TICKS,
    )
    y_scale = scale_of(0, max(chart.counts) * _HEADROOM)
    shapes, readouts, positions = [], [], []
    for index, count in enumerate(chart.counts):
        left, right = x_scale.share(edges[index]), x_scale.share(edges[index + 1])
        top = y_scale.share(count)
        if count:
            shapes.append(
                f'<rect class="area blue" x="{left * _VIEW:.1f}" '
                f'y="{(1 - top) * _VIEW:.1f}" width="{(right - left) * _VIEW:.1f}" '
                f'height="{top * _VIEW:.1f}"/>'
            )
        positions.append((left + right) / 2)
        # A bin ends before the next one begins.
        first, last = chart.edges[index], chart.edges[index + 1] - 1
        sizes = _sizes_in_words(first, max(first, last), chart)
        readouts.append(f"{sizes}: {count_of(count, chart.y_name)}")
    labels = []
    for limit, value in zip(drawn_limits, limits, strict=True):
        share = x_scale.share(value)
        shapes.append(_line_html("limit", (share, 0), (share, 1)))
        # Over its line, and within the plot.
        width_px = label_px(limit.label)
        css_position = (
            f"left: clamp(0px, {share:.2%} - {width_px / 2:.0f}px, "
            f"100% - {width_px:.0f}px); width: {width_px:.0f}px"
        )
        labels.append(
            f'<span class="limit-label over" style="{css_position}">'
            f"{escape_words(limit.label)}</span>"
        )
    return _frame_html(
        chart.label,
        x_scale,
        y_scale,
        "".join(shapes),
        "".join(labels),
        rows_above=1 if labels else 0,
        x_name=chart.x_name,
        y_name=chart.y_name,
        positions=positions,
        readouts=readouts,
        first=max(range(len(chart.counts)), key=chart.counts.__getitem__),
    )


def _bars_html(chart: Bars) -> str:
    # A limit far away makes the bars short: that is what it is to show.
    longest = max((bar.value for bar in chart.bars if is_known(bar.value)), default=0)
    has_mark = chart.limit is not None and is_known(chart.limit.value)
    if chart.limit is not None and has_mark:
        longest = max(longest, chart.limit.value)
    scale = scale_of(0, longest if longest > 0 else 1)
    mark = ""
    if chart.limit is not None and has_mark:
        css_position = f"left: {scale.share(chart.limit.value):.2%}"
        mark = f'<span class="mark" style="{css_position}"></span>'
    rows = [_bar_html(bar, scale, mark) for bar in chart.bars]
    below = ""
    if chart.limit is not None:
        key = '<span class="key limit-key"></span>'
        below = f'<p class="soft">{key}{escape_words(chart.limit.label)}</p>'
    label = _spoken(chart.label)
    return f'<ul class="bars" aria-label="{label}">{"".join(rows)}</ul>{below}'


def _bar_html(bar: Bar, scale: Scale, mark: str) -> str:
    fill = ""
    if is_known(bar.value) and bar.value > 0:
        width = f"width: {scale.share(bar.value):.2%}"
        fill = f'<span class="fill {bar.colour}" style="{width}"></span>'
    return (
        f'<li><span class="name">{escape_words(bar.name)}</span>'
        f'<span class="track">{fill}{mark}</span>'
        f'<span class="amount">{escape_words(bar.text)}</span></li>'
    )


def _frame_html(
    label: str,
    x_scale: Scale,
    y_scale: Scale,
    shapes: str,
    labels: str,
    *,
    rows_above: int,
    x_name: str,
    y_name: str,
    positions: Sequence[float],
    readouts: Sequence[str],
    first: int,
) -> str:
    """Put axes around shapes, and the readouts where the script finds them."""
    grid = "".join(
        _line_html(
            "grid", (0, y_scale.share(tick.value)), (1, y_scale.share(tick.value))
        )
        for tick in y_scale.ticks
    )
    y_labels = "".join(
        f'<span class="y" style="bottom: {y_scale.share(tick.value):.2%}">'
        f"{escape_words(tick.label)}</span>"
        for tick in y_scale.ticks
    )
    x_labels = "".join(
        _x_label_html(tick.label, x_scale.share(tick.value)) for tick in x_scale.ticks
    )
    data = {
        "at": [round(position, 4) for position in positions],
        "says": list(readouts),
        "first": first,
    }
    # A text of the user's must not end the script element that it is in.
    encoded = json.dumps(data).replace("<", "\\u003c")
    cursor = f'<span class="cursor" style="left: {positions[first]:.2%}"></span>'
    y_title = f'<p class="axis y-name">{escape_words(y_name)}</p>' if y_name else ""
    # The longest readout keeps its room, so that nothing jumps when another is shown.
    longest = max(
        readouts, key=lambda text: len(text) + _LETTERS_OF_LINE * text.count("\n")
    )
    return (
        f"{y_title}"
        f'<div class="plot" role="group" aria-roledescription="chart" '
        f'aria-label="{_spoken(label)}" style="--rows: {rows_above}">'
        f'<svg viewBox="0 0 {_VIEW} {_VIEW}" preserveAspectRatio="none" '
        f'aria-hidden="true">{grid}{shapes}</svg>'
        f"{y_labels}{x_labels}{labels}{cursor}"
        f'<script type="application/json">{encoded}</script></div>'
        f'<p class="axis x-name">{escape_words(x_name)}</p>'
        # Not live: what changes is the value of the script's slider, said once.
        f'<div class="readout"><output aria-live="off">'
        f"{escape_words(readouts[first])}</output>"
        f'<span aria-hidden="true">{escape_words(longest)}</span></div>'
    )


def _spoken(label: str) -> str:
    """Escape a label for an attribute: nobody wants to hear its backticks."""
    return html.escape(label.replace("`", ""), quote=True)


def _x_label_html(text: str, share: float) -> str:
    at_end = " at-end" if is_at_end(text, share) else ""
    return (
        f'<span class="x{at_end}" style="left: {share:.2%}">{escape_words(text)}</span>'
    )


def _shaded_html(band: Band, x_scale: Scale) -> str:
    left, right = x_scale.share(band.start), x_scale.share(band.end)
    return (
        f'<rect class="shaded" x="{left * _VIEW:.1f}" y="0" '
        f'width="{(right - left) * _VIEW:.1f}" height="{_VIEW}"/>'
    )


def _trend_html(trend: Segment, x_scale: Scale, y_scale: Scale) -> str:
    ends = [
        (x_scale.share(x), y_scale.share(value))
        for x, value in (trend.start, trend.end)
    ]
    return _line_html("trend", ends[0], ends[1])


def _line_html(kind: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    """Draw from one point to another, in shares of the plot's width and height."""
    return (
        f'<polyline class="{kind}" points="{_svg_point(*start)} {_svg_point(*end)}"/>'
    )


def _svg_point(x_share: float, y_share: float) -> str:
    # SVG counts from the top.
    return f"{x_share * _VIEW:.1f},{(1 - y_share) * _VIEW:.1f}"


def _legend_html(series: Sequence[Series]) -> str:
    keys = "".join(
        f'<li><span class="key {layer.colour}"></span>{escape_words(layer.name)}</li>'
        for layer in series
    )
    return f'<ul class="legend">{keys}</ul>'
