"""A report as one HTML page: no script, no network, light and dark.  Pure."""

from __future__ import annotations

import html
import statistics
from typing import TYPE_CHECKING, Protocol

from loaderkit.leaks.trend import LEAKING, NEEDS_MORE, STEADY
from loaderkit.units import format_amount, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loaderkit.leaks.counter_trend import CounterTrend
    from loaderkit.leaks.trace import Site
    from loaderkit.leaks.trend import Verdict

_WIDTH, _HEIGHT = 460, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 12, 30
"""Margins of a plot, in units of its viewBox: left the amounts, below the epochs."""
_PLOT_HEIGHT = _HEIGHT - _TOP - _BOTTOM
_PADDING_SHARE = 0.08
"""Of what a counter moves, above and below its curve."""
_NEAR_LIMIT = 3.0
"""A limit is drawn when it is no further away than so many times what a counter moved:
else the curve would be a flat line."""
_GREY = 'fill="var(--line)" opacity=".45"'
_STROKE = 'fill="none" stroke-width="2" stroke-linejoin="round"'
_CURVE_COLOURS: Mapping[Verdict, str] = {
    LEAKING: "leak",
    NEEDS_MORE: "unsure",
    STEADY: "data",
}
_ORDER: Mapping[Verdict, int] = {LEAKING: 0, NEEDS_MORE: 1, STEADY: 2}
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0;
  --paper: #ffffff; --card: #f6f8fa; --leak: #b3261e; --calm: #1a7f37; --data: #0b5cad;
  --unsure: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9da7b1;
  --line: #3d444d; --paper: #0d1117; --card: #161b22; --leak: #ff8b82; --calm: #56d364;
  --data: #79b8ff; --unsure: #e3b341; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem; max-width: 1280px; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
p { margin: .25rem 0; overflow-wrap: anywhere; }
.leaking { color: var(--leak); } .steady { color: var(--calm); }
.needs { color: var(--unsure); } .soft { color: var(--soft); }
.plots { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); }
figure { margin: 0; padding: .75rem; background: var(--card); border-radius: 8px;
  border: 1px solid var(--line); min-width: 0; }
figcaption { font-size: .9rem; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 14px system-ui, sans-serif; fill: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
td.number, th.number { text-align: right; white-space: nowrap; }
code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
ol { padding-left: 1.25rem; } li { margin: .5rem 0; overflow-wrap: anywhere; }
"""


class PageContent(Protocol):
    """What a page shows: a :class:`loaderkit.LeakReport` has it all.

    The report writes its page, so that a page must not import the report.
    """

    @property
    def verdict(self) -> Verdict:
        """Does memory grow?"""

    @property
    def headline(self) -> str:
        """The verdict in a line."""

    @property
    def run(self) -> str:
        """How long it was watched, and where."""

    @property
    def notes(self) -> Sequence[str]:
        """What else decided."""

    @property
    def counters(self) -> Sequence[CounterTrend]:
        """Every counter that should be flat."""

    @property
    def growth_texts(self) -> Sequence[str]:
        """What grew, a sentence each."""

    @property
    def sites(self) -> Sequence[Site]:
        """Where what stays was allocated."""

    @property
    def limit_bytes(self) -> int | None:
        """Memory that is there to be used up."""

    @property
    def limit_from(self) -> str:
        """Which limit that is."""

    @property
    def epochs_left(self) -> int | None:
        """Until the limit is reached."""

    @property
    def period(self) -> str:
        """What is called an epoch."""

    @property
    def plural(self) -> str:
        """More than one of these."""


def page_of(report: PageContent) -> str:
    """Write a report as a page.

    Args:
        report: Any.

    Returns:
        A whole HTML document; everything in it that came from the run is escaped.
    """
    title = html.escape(report.headline)
    moving = [counter for counter in report.counters if len(set(counter.values)) > 1]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            f'<h1 class="{_class_of(report.verdict)}">{title}</h1>',
            *_summary_lines(report),
            *_growth_lines(report),
            f"<h2>Counters, {report.period} by {report.period}</h2>",
            '<p class="soft">Grey: warm-up, left out. Dashed: the trend.</p>',
            '<div class="plots">',
            *(_figure_of(counter, report) for counter in _worst_first(moving)),
            "</div>",
            f'<p class="soft">{html.escape(_name_unmoved(report.counters))}</p>',
            *_table_lines(report.counters),
            "</body></html>",
        ]
    )


def _summary_lines(report: PageContent) -> list[str]:
    lines = [f'<p class="soft">{html.escape(report.run)}</p>']
    if report.epochs_left is not None and report.limit_bytes is not None:
        limit = f"{format_bytes(report.limit_bytes)} ({report.limit_from})"
        left = f"{limit} are used up in about {report.epochs_left:,} {report.plural}"
        lines.append(f"<p>{html.escape(left)}</p>")
    lines += [f"<p>{html.escape(note)}</p>" for note in report.notes]
    return lines


def _name_unmoved(counters: Sequence[CounterTrend]) -> str:
    """Name the counters that are not worth a plot."""
    names = [counter.name for counter in counters if len(set(counter.values)) == 1]
    return f"The same in all epochs: {', '.join(names)}." if names else ""


def _growth_lines(report: PageContent) -> list[str]:
    if not report.growth_texts:
        return []
    lines = ["<h2>What grew, and who holds it</h2>", "<ol>"]
    for growth_text in report.growth_texts:
        text, _, fix = growth_text.partition(" Fix: ")
        lines.append(
            f"<li>{html.escape(text)}<br><strong>Fix:</strong> {html.escape(fix)}</li>"
        )
    lines.append("</ol>")
    lines += [f"<p>Allocated: {html.escape(str(site))}</p>" for site in report.sites]
    return lines


def _figure_of(counter: CounterTrend, report: PageContent) -> str:
    trend = counter.trend
    rate = format_amount(trend.per_epoch, counter.unit)
    limit = report.limit_bytes if counter.unit == "bytes" else None
    label = f"{counter.name}: {trend.verdict}, {rate} each {report.period}"
    plot = _plot_of(counter, limit, html.escape(label, quote=True))
    return (
        f"<figure><figcaption><strong>{html.escape(counter.name)}</strong> "
        f'<span class="soft">{html.escape(counter.words)}</span><br>'
        f'<span class="{_class_of(trend.verdict)}">{trend.verdict}</span>, '
        f"{html.escape(rate)} each {html.escape(report.period)}"
        f"</figcaption>{plot}</figure>"
    )


class _Axes:
    """Places epochs and values on a plot."""

    def __init__(self, counter: CounterTrend, limit: int | None) -> None:
        low, high = min(counter.values), max(counter.values)
        moved = high - low
        self.limit = None
        if limit and limit < high + _NEAR_LIMIT * moved:
            self.limit = limit
            high = max(high, limit)
        # A counter that never moves gets some room too: else it would divide by 0.
        padding = (high - low) * _PADDING_SHARE or max(1.0, abs(high) * 0.01)
        self.low, self.high = low - padding, high + padding
        self.first = counter.epochs[0]
        self.last = max(counter.epochs[-1], self.first + 1)

    def x(self, epoch: float) -> float:
        """Place an epoch."""
        share = (epoch - self.first) / (self.last - self.first)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        """Place a value."""
        share = (self.high - value) / (self.high - self.low)
        return round(_TOP + share * _PLOT_HEIGHT, 1)

    def line(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        look: str,
    ) -> str:
        """Draw from one epoch and value to another."""
        return (
            f'<line x1="{self.x(start[0])}" y1="{self.y(start[1])}" '
            f'x2="{self.x(end[0])}" y2="{self.y(end[1])}" {look}/>'
        )


def _plot_of(
    counter: CounterTrend,
    limit: int | None,
    label: str,
) -> str:
    """Draw a counter: its readings, the trend after the warm-up, a limit if near."""
    trend = counter.trend
    axes = _Axes(counter, limit)
    readings = list(zip(counter.epochs, counter.values, strict=True))
    points = " ".join(f"{axes.x(epoch)},{axes.y(value)}" for epoch, value in readings)
    # The line of the median slope goes through the middle of the readings it is for.
    level = statistics.median(
        value - trend.per_epoch * epoch for epoch, value in readings[trend.warmup :]
    )
    warm_at, last_epoch = counter.epochs[trend.warmup], counter.epochs[-1]
    begin = (warm_at, level + trend.per_epoch * warm_at)
    end = (last_epoch, level + trend.per_epoch * last_epoch)
    warm_width = round(axes.x(warm_at) - _LEFT, 1)
    colour = _CURVE_COLOURS[trend.verdict]
    return "".join(
        [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">',
            (
                f'<rect x="{_LEFT}" y="{_TOP}" width="{warm_width}" '
                f'height="{_PLOT_HEIGHT}" {_GREY}/>'
            ),
            *_grid_lines(counter, axes),
            f'<polyline points="{points}" stroke="var(--{colour})" {_STROKE}/>',
            axes.line(begin, end, 'stroke="var(--soft)" stroke-dasharray="5 4"'),
            "</svg>",
        ]
    )


def _grid_lines(counter: CounterTrend, axes: _Axes) -> list[str]:
    """Draw the lowest and the last value, the limit, and the epochs."""
    marked = {min(counter.values), counter.values[-1]}
    rules = [(value, "--line") for value in marked]
    if axes.limit is not None:
        rules.append((axes.limit, "--leak"))
    lines = []
    for value, colour in rules:
        amount = format_amount(value, counter.unit, short=True)
        look = f'stroke="var({colour})"'
        lines.append(axes.line((axes.first, value), (axes.last, value), look))
        lines.append(_label_at(_LEFT - 6, axes.y(value) + 4, amount, "end"))
    bottom = _HEIGHT - 8
    return [
        *lines,
        _label_at(_LEFT, bottom, f"{axes.first:g}", "start"),
        _label_at((_LEFT + _WIDTH) / 2, bottom, "epoch", "middle"),
        _label_at(_WIDTH - _RIGHT, bottom, f"{axes.last:g}", "end"),
    ]


def _label_at(
    x: float,
    y: float,
    text: str,
    anchor: str,
) -> str:
    position = f'x="{x}" y="{y}" text-anchor="{anchor}"'
    return f"<text {position}>{html.escape(text)}</text>"


def _table_lines(counters: Sequence[CounterTrend]) -> list[str]:
    columns = ("first", "last", "each", "noise")
    heads = "".join(f'<th class="number">{column}</th>' for column in columns)
    lines = [
        "<h2>Numbers</h2>",
        '<div class="scroll"><table>',
        f"<tr><th>counter</th>{heads}<th>verdict</th></tr>",
    ]
    lines += [_table_row(counter) for counter in _worst_first(counters)]
    lines.append("</table></div>")
    return lines


def _table_row(counter: CounterTrend) -> str:
    trend = counter.trend
    amounts = (counter.start, counter.values[-1], trend.per_epoch, trend.noise)
    texts = [format_amount(amount, counter.unit, short=True) for amount in amounts]
    cells = "".join(f'<td class="number">{html.escape(text)}</td>' for text in texts)
    verdict = f'<span class="{_class_of(trend.verdict)}">{trend.verdict}</span>'
    return (
        f"<tr><td>{html.escape(counter.name)}</td>{cells}"
        f"<td>{verdict}: {html.escape(trend.why)}</td></tr>"
    )


def _worst_first(counters: Sequence[CounterTrend]) -> list[CounterTrend]:
    return sorted(counters, key=lambda counter: _ORDER[counter.trend.verdict])


def _class_of(verdict: Verdict) -> str:
    """Give the class in the style sheet: "needs" of "needs more epochs"."""
    return verdict.split()[0]
