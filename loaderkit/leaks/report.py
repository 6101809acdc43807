"""``LeakReport``: the verdict with its numbers, as text and JSON.  Pure."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from loaderkit.answers import answer_wrong_names
from loaderkit.leaks.page import (
    curves_sections,
    growth_sections,
    numbers_section,
    verdict_in_words,
)
from loaderkit.leaks.periods import noun_of, plural_of
from loaderkit.leaks.trend import LEAKING, NEEDS_MORE, STEADY, Verdict
from loaderkit.leaks.verdict import effects_among
from loaderkit.named_files import write_named_file
from loaderkit.notebook import Mood, card, repr_in_a_line
from loaderkit.pages.charts import Limit
from loaderkit.pages.document import HasPage, Page
from loaderkit.units import count_of, format_amount, format_bytes, format_seconds
from loaderkit.wrapping import wrap_lines

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from loaderkit.leaks.counter_trend import CounterTrend
    from loaderkit.leaks.growth import Growth
    from loaderkit.leaks.trace import Site
    from loaderkit.leaks.trend import Trend
    from loaderkit.memory.counters import AnyCounter

_MOST_ROWS = 8
_MOST_LINES = 25
"""A screen: the text is printed into logs.  All counters are on the page."""
_MOODS: Mapping[Verdict, Mood] = {LEAKING: "bad", STEADY: "good"}
_SHOWN_IF_STEADY: frozenset[AnyCounter] = frozenset(
    {"malloc", "anonymous", "shared", "allocated", "files"}
)


@answer_wrong_names()
@dataclass(frozen=True)
class LeakReport(HasPage):
    """Does memory grow, what grew, and who holds it."""

    verdict: Verdict
    """Does memory grow from epoch to epoch?"""
    epochs: int
    """Epochs watched."""
    seconds: float
    """How long that took."""
    device: str
    """Device watched beside the host."""
    counters: tuple[CounterTrend, ...]
    """Every counter that should be flat."""
    growths: tuple[Growth, ...] = ()
    """What grew and who holds it, the heaviest first; empty when nothing leaks."""
    sites: tuple[Site, ...] = ()
    """Where what stays was allocated, when it was traced."""
    notes: tuple[str, ...] = ()
    """What else decided."""
    more_epochs: int = 0
    """Epochs that would decide it, when it needs more."""
    limit_bytes: int | None = None
    """Memory that is there to be used up; None if unknown."""
    limit_from: str = ""
    """Which limit that is."""
    used_bytes: int | None = None
    """What counts against that limit, at the end."""
    epochs_left: int | None = None
    """Until the limit is reached; None when nothing grows."""
    period: str = "epoch"
    """What is called an epoch here, such as "window of 500 ms"."""

    @property
    def leaking(self) -> bool:
        """Whether memory grows from epoch to epoch."""
        return self.verdict == LEAKING

    @property
    def ok(self) -> bool:
        """Whether there is nothing to complain of."""
        return not self.leaking

    @property
    def leaks(self) -> tuple[CounterTrend, ...]:
        """The counters that leak: causes first, then bytes, then the fastest."""
        if not self.leaking:
            return ()
        rising = [counter for counter in self.counters if counter.trend.rising]
        # What torch's allocator takes grows with the tensors: the cause comes first.
        effects = effects_among(
            {counter.name: counter.trend.per_epoch for counter in rising}
        )
        rising.sort(key=lambda counter: (counter.name in effects, _by_size(counter)))
        return tuple(rising)

    @property
    def tolerated(self) -> tuple[CounterTrend, ...]:
        """The counters of bytes that grow beyond doubt, by less than the tolerance."""
        return self._of_bytes(lambda trend: trend.tolerated)

    @property
    def may_be_tolerated(self) -> tuple[CounterTrend, ...]:
        """The counters of bytes that seem to grow, by less than the tolerance."""
        return self._of_bytes(lambda trend: trend.may_be_tolerated)

    def _of_bytes(self, is_chosen: Callable[[Trend], bool]) -> tuple[CounterTrend, ...]:
        """Choose counters of bytes by their trends, the fastest first."""
        chosen = [
            counter
            for counter in self.counters
            if counter.unit == "bytes" and is_chosen(counter.trend)
        ]
        return tuple(sorted(chosen, key=_by_size))

    @property
    def bytes_per_epoch(self) -> int:
        """How fast the fastest counter of bytes grows; 0 when none does."""
        rates = [
            counter.trend.per_epoch for counter in self.leaks if counter.unit == "bytes"
        ]
        return round(max(rates, default=0))

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        lines = [f"{self.headline}  ({self.run})"]
        if self.epochs_left and self.limit_bytes is not None:
            lines.append(
                f"  {format_bytes(self.limit_bytes)} ({self.limit_from}) are used up "
                f"in about {self._count(self.epochs_left)}"
            )
        lines += [f"  {note}" for note in self.notes]
        lines += self._table_lines()
        for number, text in enumerate(self.growth_texts, 1):
            lines.append(f"{number}. {text}")
        lines += [f"allocated: {site}" for site in self.sites]
        # A path that is broken cannot be clicked on, nor pasted.
        paths = list(self._paths())
        entries = [wrap_lines(line, unbroken=paths) for line in lines]
        # What would not end on the screen is left out as a whole.
        ends = accumulate(entry.count("\n") + 1 for entry in entries)
        shown = sum(end <= _MOST_LINES for end in ends)
        return "\n".join(entries[:shown])

    def _repr_html_(self) -> str:
        rows = [
            (
                counter.name,
                counter.trend.verdict,
                format_amount(counter.trend.per_epoch, counter.unit),
                counter.trend.why,
            )
            for counter in (*self.leaks, *self.tolerated)
        ]
        return card(
            self.headline,
            mood=_MOODS.get(self.verdict, "unsure"),
            heads=("counter", "verdict", f"each {self.period}", "why"),
            rows=rows,
            notes=[self.run, *self.notes, *self.growth_texts],
            text=str(self),
        )

    def to_json(self) -> dict[str, Any]:
        """Give it as plain values.

        Returns:
            Ready for :func:`json.dumps`; None for a number that is not finite, which
            JSON has no word for.
        """
        values: dict[str, Any] = _finite_or_none(asdict(self))
        for row, text in zip(values["growths"], self.growth_texts, strict=True):
            row["text"] = text
        return values | {"bytes_per_epoch": self.bytes_per_epoch, "text": str(self)}

    def page(self) -> Page:
        """Show every counter as a curve, what grew, and who holds it."""
        lead = [self.run]
        limit = None
        if self.limit_bytes is not None:
            limit = Limit(
                self.limit_bytes,
                f"{format_bytes(self.limit_bytes)} ({self.limit_from})",
            )
        if limit is not None and self.epochs_left:
            lead.append(
                f"{limit.label} are used up in about {self._count(self.epochs_left)}"
            )
        return Page(
            self.headline,
            mood=_MOODS.get(self.verdict, "unsure"),
            lead=(*lead, *self.notes),
            sections=(
                *growth_sections(self.growth_texts, self.sites),
                *curves_sections(self.counters, period=self.period, limit=limit),
                numbers_section(self.counters, period=self.period),
            ),
        )

    def save_json(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON.

        Args:
            path: Of the file; replaced if it is there.

        Returns:
            The path.

        Raises:
            NotWrittenError: The file cannot be written; also an ``OSError``.
        """
        return write_named_file(
            path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
        )

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        if self.leaking and not self.leaks:
            return self._over_limit
        if self.leaking:
            return f"leaking: {self._growth_of(self.leaks[0])}"
        if self.verdict == NEEDS_MORE:
            return (
                f"needs more {self.plural}: about {self.more_epochs} to decide"
                f"{self._undecided_growth()}"
            )
        if self.tolerated:
            growth = self._growth_of(self.tolerated[0])
            hint = "a smaller tolerance= would call it a leak"
            return f"steady within the tolerance: {growth}; {hint}"
        if self.may_be_tolerated:
            growth = self._growth_of(self.may_be_tolerated[0])
            hint = "a longer run would tell"
            return f"steady within the tolerance: perhaps {growth}; {hint}"
        noun = noun_of(self.period)
        return f"steady: nothing grows from {noun} to {noun}"

    def _growth_of(self, counter: CounterTrend, until: str = "") -> str:
        """Say how fast a counter grows, and what it counts.

        Args:
            counter: It grows.
            until: Words behind the period, such as " so far".
        """
        rate = format_amount(counter.trend.per_epoch, counter.unit)
        return f"{rate} more each {self.period}{until}, {counter.words}"

    @property
    def _over_limit(self) -> str:
        """Say that more is used than may be, where nothing is known to leak."""
        if self.used_bytes is None or self.limit_bytes is None:
            return "over the limit: more memory is used than it allows"
        used, allowed = map(format_bytes, (self.used_bytes, self.limit_bytes))
        return f"over the limit: {used} are used, and {allowed} are allowed"

    def _count(self, epochs: int) -> str:
        """Count epochs, or what else the readings are taken after."""
        return f"{epochs:,} {self.period if epochs == 1 else self.plural}"

    @property
    def plural(self) -> str:
        """More than one of what is called an epoch."""
        return plural_of(self.period)

    @property
    def run(self) -> str:
        """How long it was watched, and where."""
        seconds = format_seconds(self.seconds)
        return f"{self._count(self.epochs)}, {seconds}, {self.device}"

    @property
    def growth_texts(self) -> list[str]:
        """What grew, a sentence each."""
        return [growth.text(self.period) for growth in self.growths]

    def _paths(self) -> Iterator[str]:
        """Give what stays in one line: paths, files and lines are copied as a whole."""
        yield f"({self.run})"
        for growth in self.growths:
            if growth.holder is not None:
                yield f"`{growth.holder.path}`"
                yield growth.holder.line
                yield growth.holder.where
        for site in self.sites:
            yield from site.lines

    def _undecided_growth(self) -> str:
        """Say what grew so far, where that decides nothing yet."""
        undecided = [
            counter
            for counter in self.counters
            if counter.trend.verdict == NEEDS_MORE and counter.trend.per_epoch > 0
        ]
        if not undecided:
            return ""
        fastest = min(undecided, key=_by_size)
        return f"; {self._growth_of(fastest, until=' so far')}"

    def _table_lines(self) -> list[str]:
        """Write the counters that moved, then the main ones, at most eight."""
        # The worst first, as only eight have room; then those that people want to
        # see where nothing grows.
        rows = list(self.leaks)
        rows += [
            counter for counter in self.counters if counter.trend.verdict == NEEDS_MORE
        ]
        rows += self.tolerated
        rows += self.may_be_tolerated
        rows += [
            counter
            for counter in self.counters
            if counter.name in _SHOWN_IF_STEADY and counter not in rows
        ]
        shown = rows[:_MOST_ROWS]
        lines = [f"  {'counter':<14}{'first':>11}{'last':>11}{'each':>12}  verdict"]
        lines += [_table_line(counter, self.period) for counter in shown]
        hidden_count = len(self.counters) - len(shown)
        if hidden_count:
            are_steady = all(
                counter.trend.verdict == STEADY
                for counter in self.counters
                if counter not in rows
            )
            verb = "is" if hidden_count == 1 else "are"
            words = f" {verb} steady" if are_steady else ""
            lines.append(f"  {count_of(hidden_count, 'more counters')}{words}")
        return lines


def _finite_or_none(value: object) -> Any:
    """Copy plain values, with None in the place of infinity and of what is no number.

    >>> _finite_or_none({"noise": float("nan"), "values": (1.5, float("inf"))})
    {'noise': None, 'values': [1.5, None]}
    """
    if isinstance(value, dict):
        return {key: _finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_or_none(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _table_line(counter: CounterTrend, period: str) -> str:
    first = format_amount(counter.start, counter.unit, short=True)
    last = format_amount(counter.values[-1], counter.unit, short=True)
    rate = format_amount(counter.trend.per_epoch, counter.unit, short=True)
    verdict = verdict_in_words(counter.trend.verdict, period)
    start = f"  {counter.name:<14}{first:>11}{last:>11}{rate:>12}"
    return f"{start}  {verdict}: {counter.trend.why}"


def _by_size(counter: CounterTrend) -> tuple[bool, float]:
    """Sort bytes before what is no memory, and the fastest first."""
    return counter.unit != "bytes", -counter.trend.per_epoch
