"""A report as one HTML page: no script, no network, light and dark.  Pure."""

from __future__ import annotations

import html
import statistics
from typing import TYPE_CHECKING

from loaderkit.leaks.trend import LEAKING, NEEDS_MORE
from loaderkit.units import format_amount, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loaderkit.leaks.report import LeakReport
    from loaderkit.leaks.verdict import CounterTrend

_WIDTH, _HEIGHT = 460, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 12, 30
_ROOM = _HEIGHT - _TOP - _BOTTOM
_GREY = 'fill="var(--line)" opacity=".45"'
_STROKE = 'fill="none" stroke-width="2" stroke-linejoin="round"'
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


def page_of(report: LeakReport) -> str:
    """Write a report as a page.

    Args:
        report: Any.

    Returns:
        A whole HTML document; everything in it that came from the run is escaped.
    """
    title = html.escape(report.headline)
    moving = [each for each in report.counters if len(set(each.values)) > 1]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            f'<h1 class="{_class(report.verdict)}">{title}</h1>',
            *_summary(report),
            *_growths(report),
            f"<h2>Counters, {report.each} by {report.each}</h2>",
            '<p class="soft">Grey: warm-up, left out. Dashed: the trend.</p>',
            '<div class="plots">',
            *(_figure(each, report) for each in _in_order(moving)),
            "</div>",
            f'<p class="soft">{html.escape(_still(report.counters))}</p>',
            *_table(report.counters),
            "</body></html>",
        ]
    )


def _summary(report: LeakReport) -> list[str]:
    lines = [f'<p class="soft">{html.escape(report.run)}</p>']
    if report.epochs_left is not None and report.limit_bytes is not None:
        limit = f"{format_bytes(report.limit_bytes)} ({report.limit_from})"
        left = f"{limit} are used up in about {report.epochs_left:,} {report.plural}"
        lines.append(f"<p>{html.escape(left)}</p>")
    return lines + [f"<p>{html.escape(note)}</p>" for note in report.notes]


def _still(counters: Sequence[CounterTrend]) -> str:
    """Name the counters that are not worth a plot."""
    names = [each.name for each in counters if len(set(each.values)) == 1]
    return f"The same in all epochs: {', '.join(names)}." if names else ""


def _growths(report: LeakReport) -> list[str]:
    if not report.growths:
        return []
    rows = []
    for growth in report.growths:
        text, _, fix = growth.text(report.each).partition(" Fix: ")
        rows.append(
            f"<li>{html.escape(text)}<br><strong>Fix:</strong> {html.escape(fix)}</li>"
        )
    places = [f"<p>Allocated: {html.escape(str(site))}</p>" for site in report.sites]
    return ["<h2>What grew, and who holds it</h2>", "<ol>", *rows, "</ol>", *places]


def _figure(counter: CounterTrend, report: LeakReport) -> str:
    trend = counter.trend
    rate = format_amount(trend.per_epoch, counter.unit)
    kind = _class(trend.verdict)
    limit = report.limit_bytes if counter.unit == "bytes" else None
    label = f"{counter.name}: {trend.verdict}, {rate} each {report.each}"
    return (
        f"<figure><figcaption><strong>{html.escape(counter.name)}</strong> "
        f'<span class="soft">{html.escape(counter.words)}</span><br>'
        f'<span class="{kind}">{trend.verdict}</span>, {html.escape(rate)} an epoch'
        f"</figcaption>{_plot(counter, limit, html.escape(label, quote=True))}</figure>"
    )


class _Axes:
    """Places epochs and values on a plot."""

    def __init__(self, counter: CounterTrend, limit: int | None) -> None:
        low, high = min(counter.values), max(counter.values)
        self.limit = limit if limit and limit < high + 3 * (high - low) else None
        high = max(high, self.limit or high)
        pad = (high - low) * 0.08 or max(1.0, abs(high) * 0.01)
        self.low, self.high = low - pad, high + pad
        self.first = counter.epochs[0]
        self.last = max(counter.epochs[-1], self.first + 1)

    def x(self, epoch: float) -> float:
        """Place an epoch."""
        share = (epoch - self.first) / (self.last - self.first)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        """Place a value."""
        share = (self.high - value) / (self.high - self.low)
        return round(_TOP + share * _ROOM, 1)

    def line(
        self, start: tuple[float, float], end: tuple[float, float], look: str
    ) -> str:
        """Draw from one epoch and value to another."""
        return (
            f'<line x1="{self.x(start[0])}" y1="{self.y(start[1])}" '
            f'x2="{self.x(end[0])}" y2="{self.y(end[1])}" {look}/>'
        )


def _plot(counter: CounterTrend, limit: int | None, label: str) -> str:
    """Draw a counter: its readings, the trend after the warm-up, a limit if near."""
    epochs, values, trend = counter.epochs, counter.values, counter.trend
    axes = _Axes(counter, limit)
    colour = {LEAKING: "leak", NEEDS_MORE: "unsure"}.get(trend.verdict, "data")
    pairs = list(zip(epochs, values, strict=True))
    points = " ".join(f"{axes.x(e)},{axes.y(v)}" for e, v in pairs)
    start = epochs[trend.warmup]
    middle = statistics.median(
        v - trend.per_epoch * e for e, v in pairs[trend.warmup :]
    )
    begin = (start, middle + trend.per_epoch * start)
    end = (epochs[-1], middle + trend.per_epoch * epochs[-1])
    width = round(axes.x(start) - _LEFT, 1)
    return "".join(
        [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">',
            f'<rect x="{_LEFT}" y="{_TOP}" width="{width}" height="{_ROOM}" {_GREY}/>',
            *_grid(counter, axes),
            f'<polyline points="{points}" stroke="var(--{colour})" {_STROKE}/>',
            axes.line(begin, end, 'stroke="var(--soft)" stroke-dasharray="5 4"'),
            "</svg>",
        ]
    )


def _grid(counter: CounterTrend, axes: _Axes) -> list[str]:
    """Draw the lowest and the last value, the limit, and the epochs."""
    rules = [(value, "--line") for value in {min(counter.values), counter.values[-1]}]
    if axes.limit is not None:
        rules.append((axes.limit, "--leak"))
    parts = []
    for value, colour in rules:
        amount = format_amount(value, counter.unit, short=True)
        across = (axes.first, value), (axes.last, value)
        parts.append(axes.line(*across, f'stroke="var({colour})"'))
        parts.append(_text(_LEFT - 6, axes.y(value) + 4, amount, "end"))
    bottom = _HEIGHT - 8
    return [
        *parts,
        _text(_LEFT, bottom, f"{axes.first:g}", "start"),
        _text((_LEFT + _WIDTH) / 2, bottom, "epoch", "middle"),
        _text(_WIDTH - _RIGHT, bottom, f"{axes.last:g}", "end"),
    ]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    place = f'x="{x}" y="{y}" text-anchor="{anchor}"'
    return f"<text {place}>{html.escape(text)}</text>"


def _table(counters: Sequence[CounterTrend]) -> list[str]:
    names = ("first", "last", "each", "noise")
    heads = "".join(f'<th class="number">{name}</th>' for name in names)
    rows = [f"<tr><th>counter</th>{heads}<th>verdict</th></tr>"]
    for each in _in_order(counters):
        trend = each.trend
        amounts = (
            each.values[trend.warmup],
            each.values[-1],
            trend.per_epoch,
            trend.noise,
        )
        texts = [format_amount(a, each.unit, short=True) for a in amounts]
        cells = "".join(f'<td class="number">{html.escape(t)}</td>' for t in texts)
        verdict = f'<span class="{_class(trend.verdict)}">{trend.verdict}</span>'
        rows.append(
            f"<tr><td>{html.escape(each.name)}</td>{cells}"
            f"<td>{verdict}: {html.escape(trend.why)}</td></tr>"
        )
    return ["<h2>Numbers</h2>", '<div class="scroll"><table>', *rows, "</table></div>"]


def _in_order(counters: Sequence[CounterTrend]) -> list[CounterTrend]:
    order = {LEAKING: 0, NEEDS_MORE: 1}
    return sorted(counters, key=lambda each: order.get(each.trend.verdict, 2))


def _class(verdict: str) -> str:
    return verdict.split()[0]
