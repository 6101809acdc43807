"""A leak report as a page: what grew, every counter as a curve, the numbers.  Pure."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from loaderkit.leaks.periods import noun_of, plural_of
from loaderkit.leaks.trend import LEAKING, NEEDS_MORE, STEADY
from loaderkit.pages.charts import Band, Curves, Limit, Segment, Series
from loaderkit.pages.document import Section, Table
from loaderkit.units import format_amount, is_known

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loaderkit.leaks.counter_trend import CounterTrend
    from loaderkit.leaks.trace import Site
    from loaderkit.leaks.trend import Verdict
    from loaderkit.pages.charts import Colour
    from loaderkit.pages.document import Block

_NEAR_LIMIT = 3.0
"""A limit is drawn when it is no further away than so many times what a counter moved:
else the curve would be a flat line."""
_CURVE_COLOURS: Mapping[Verdict, Colour] = {
    LEAKING: "red",
    NEEDS_MORE: "orange",
    STEADY: "blue",
}
_ORDER: Mapping[Verdict, int] = {LEAKING: 0, NEEDS_MORE: 1, STEADY: 2}


def growth_sections(texts: Sequence[str], sites: Sequence[Site]) -> tuple[Section, ...]:
    """Say what grew and who holds it.

    Args:
        texts: A sentence for each, with its fix behind "Fix: ".
        sites: Where what stays was allocated.

    Returns:
        One section; none where nothing grew.
    """
    if not texts:
        return ()
    rows = []
    for number, growth_text in enumerate(texts, 1):
        text, _, fix = growth_text.partition(" Fix: ")
        rows.append((f"{number}", text, fix))
    blocks: list[Block] = [
        Table(("", "what grew, and who holds it", "fix"), tuple(rows))
    ]
    blocks += [f"Allocated: {site}" for site in sites]
    return (Section("What grew, and who holds it", tuple(blocks)),)


def curves_sections(
    counters: Sequence[CounterTrend], *, period: str, limit: Limit | None
) -> tuple[Section, ...]:
    """Draw every counter that moved, the worst first.

    Args:
        counters: All of them.
        period: What is called an epoch.
        limit: Of memory, in bytes.

    Returns:
        One section; none where no counter moved.
    """
    moving = [counter for counter in counters if _has_moved(counter)]
    if not moving:
        return ()
    charts = [_curve_of(counter, period, limit) for counter in worst_first(moving)]
    still = [counter.name for counter in counters if not _has_moved(counter)]
    caption = (
        "Grey: warm-up, which is left out. Dashed: the trend. Dotted red: a limit. "
        "The axis of a counter begins where its readings do, not at 0."
    )
    if still:
        caption += f" The same all the time, and not drawn: {', '.join(still)}."
    noun = noun_of(period)
    heading = f"Counters, {noun} by {noun}"
    return (Section(heading, tuple(charts), caption=caption, side_by_side=True),)


def numbers_section(counters: Sequence[CounterTrend], *, period: str) -> Section:
    """List every counter with its verdict.

    Args:
        counters: All of them.
        period: What is called an epoch.

    Returns:
        A section with a table.
    """
    rows = tuple(_table_row(counter, period) for counter in worst_first(counters))
    heads = ("counter", "first", "last", f"each {noun_of(period)}", "noise", "verdict")
    return Section("Numbers", (Table(heads, rows, frozenset({1, 2, 3, 4})),))


def verdict_in_words(verdict: Verdict, period: str) -> str:
    """Write a verdict where windows of time stand for epochs.

    >>> verdict_in_words(NEEDS_MORE, "window of 500 ms")
    'needs more windows of 500 ms'
    """
    return verdict.replace("epochs", plural_of(period))


def worst_first(counters: Sequence[CounterTrend]) -> list[CounterTrend]:
    """Sort what leaks before what is undecided, and that before what is steady."""
    return sorted(counters, key=lambda counter: _ORDER[counter.trend.verdict])


def _has_moved(counter: CounterTrend) -> bool:
    # NaN stands for a reading that failed, and is unequal to itself: two are one here.
    values = {value if is_known(value) else None for value in counter.values}
    return len(values) > 1


def _curve_of(counter: CounterTrend, period: str, limit: Limit | None) -> Curves:
    """Draw one counter: its readings, the trend after the warm-up, a limit if near."""
    trend = counter.trend
    rate = format_amount(trend.per_epoch, counter.unit)
    first_judged, last = counter.epochs[trend.warmup], counter.epochs[-1]
    # The line of the median slope goes through the middle of the readings it is for.
    judged = list(zip(counter.epochs, counter.values, strict=True))[trend.warmup :]
    levels = [
        value - trend.per_epoch * epoch for epoch, value in judged if is_known(value)
    ]
    level = statistics.median(levels) if levels else math.nan
    warmup = Band(counter.epochs[0], first_judged, "", shaded=True)
    return Curves(
        label=(
            f"`{counter.name}`, {counter.words}: "
            f"{verdict_in_words(trend.verdict, period)}, {rate} each {period}"
        ),
        x=counter.epochs,
        x_name=plural_of(period),
        x_unit="epochs",
        series=(Series(counter.name, counter.values, _CURVE_COLOURS[trend.verdict]),),
        unit=counter.unit,
        readouts=tuple(
            f"{noun_of(period)} {epoch:g}: {format_amount(value, counter.unit)}"
            for epoch, value in zip(counter.epochs, counter.values, strict=True)
        ),
        bands=(warmup,) if trend.warmup else (),
        limits=_limits_near(counter, limit),
        trend=Segment(
            (first_judged, level + trend.per_epoch * first_judged),
            (last, level + trend.per_epoch * last),
        ),
    )


def _limits_near(counter: CounterTrend, limit: Limit | None) -> tuple[Limit, ...]:
    if limit is None or counter.unit != "bytes":
        return ()
    values = [value for value in counter.values if is_known(value)]
    if not values:
        return ()
    low, high = min(values), max(values)
    is_near = limit.value < high + _NEAR_LIMIT * (high - low)
    return (limit,) if is_near else ()


def _table_row(counter: CounterTrend, period: str) -> tuple[str, ...]:
    trend = counter.trend
    amounts = (counter.start, counter.values[-1], trend.per_epoch, trend.noise)
    texts = [format_amount(amount, counter.unit, short=True) for amount in amounts]
    verdict = verdict_in_words(trend.verdict, period)
    return (counter.name, *texts, f"{verdict}: {trend.why}")
