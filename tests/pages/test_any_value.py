"""Whatever is read, a page is made, and shows what it can within its axes."""

import dataclasses
import itertools
import math
import re

import pytest

from loaderkit.leaks.report import LeakReport
from loaderkit.leaks.verdict import judge_counters
from loaderkit.pages.charts import (
    Bar,
    Bars,
    Curves,
    HistogramChart,
    Limit,
    Segment,
    Series,
    chart_html,
)
from loaderkit.pages.scales import scale_of
from loaderkit.units import format_amount, format_seconds

VALUES = [
    *(0, 1, -5, 1e-300, 2**62, 2**70, 1e30, 1e300, -(2.0**70)),
    *(math.inf, -math.inf, math.nan, None),
]
UNITS = ["bytes", "s", "percent", "threads"]
LONGEST_LABEL = 12
"""Letters of a label beside a plot."""


def is_known(value):
    return value is not None and math.isfinite(value)


def check(markup, *, drawn):
    points = re.findall(r'points="([^"]*)"', markup)
    numbers = [float(n) for p in points for n in re.split("[ ,]", p)]
    assert all(0 <= number <= 1000 for number in numbers)
    shares = re.findall(r"(?:left|right|bottom|width): (-?[\w.]+)%", markup)
    assert all(0 <= float(share) <= 100 for share in shares)
    labels = re.findall(r'<span class="[xy][^"]*"[^>]*>([^<]*)<', markup)
    assert max(map(len, labels), default=0) <= LONGEST_LABEL, labels
    assert not re.search(r"\b(nan|inf|None)\b", markup)
    if drawn:
        assert re.search('class="(line|area)', markup)


@pytest.mark.many_cases(quick=6)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("stacked", [False, True])
def test_curves_show_every_value_that_there_is(unit, stacked):
    for one, other in itertools.product(VALUES, VALUES):
        values = (one, other, one, 3)
        chart = Curves(
            label="some",
            x=(0, 1, 2, 3),
            x_name="epochs",
            series=(Series("a", values, "blue"), Series("b", values[::-1], "red")),
            unit=unit,
            readouts=tuple(format_amount(value, unit) for value in values),
            stacked=stacked,
            limits=(Limit(other, "limit"),) if other is not None else (),
            trend=Segment((0, one or 0), (3, other or 0)),
        )

        check(chart_html(chart), drawn=True)


def test_bars_and_histograms_are_drawn_too():
    for value, limit in itertools.product(VALUES, VALUES):
        text = format_amount(value, "bytes")
        known = [] if limit is None else [Limit(limit, "limit")]
        bars = (Bar("a", value, text), Bar("b", 2, "2"))
        check(chart_html(Bars("some", bars, known[0] if known else None)), drawn=False)

        histogram = HistogramChart(
            "some", (1, 2, 4), (3, 1), "nodes", limits=tuple(known)
        )
        check(chart_html(histogram), drawn=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["malloc", "threads"])
def test_a_leak_page_is_made_of_any_readings(tmp_path, name):
    # Squares of 1e300 are no floats; no counter counts so far.
    numbers = [value for value in VALUES if value is not None and value != 1e300]
    for one, other in itertools.product(numbers, numbers):
        readings = [one, other, *([one, other, 7.0] * 4)]
        trends = judge_counters({name: (list(range(len(readings))), readings)})
        report = LeakReport("steady", 14, 1.0, "cpu", trends, limit_bytes=2**70)

        page = report.to_html(tmp_path / "a.html").read_text()

        body = page.split("<body")[1].split("As text")[0]
        check(body.split("<script>")[0], drawn="<svg" in body)
        assert str(report)


def test_a_reading_that_is_no_number_is_a_gap_in_a_counters_curve(tmp_path):
    readings = [float(100 + epoch) for epoch in range(14)]
    [trend] = judge_counters({"malloc": (list(range(14)), readings)})
    for value in (math.nan, math.inf, None):
        broken = dataclasses.replace(
            trend, values=(*readings[:5], value, *readings[6:])
        )
        report = LeakReport("steady", 14, 1.0, "cpu", (broken,), limit_bytes=2**70)

        page = report.to_html(tmp_path / "a.html").read_text()

        assert page.count('<polyline class="line') == 2


@pytest.mark.parametrize("unit", UNITS)
def test_no_label_is_longer_than_its_room(unit):
    known = [value for value in VALUES if is_known(value)]
    for low, high in itertools.product(known, known):
        scale = scale_of(low, max(low, high), unit)
        assert all(len(tick.label) <= LONGEST_LABEL for tick in scale.ticks)
        assert all(0 <= scale.share(tick.value) <= 1 for tick in scale.ticks)


def test_what_is_no_number_is_said_in_words():
    assert [format_amount(v, "bytes") for v in VALUES[-4:]] == [
        *("infinite", "-infinite", "unknown", "unknown")
    ]
    assert [format_seconds(v) for v in (math.nan, math.inf, None, -5)] == [
        *("unknown", "infinite", "unknown", "-5.00 s")
    ]
    assert format_amount(2**70, "bytes") == "1.00 ZiB"
    assert format_amount(1e30, "threads") == "1.00e+30 threads"
