"""``LeakReport``: the verdict with its numbers, as text and JSON.  Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit.leaks.trend import LEAKING, NEEDS_MORE, STEADY
from loaderkit.leaks.verdict import effects
from loaderkit.notebook import Mood, card
from loaderkit.units import format_amount, format_bytes, format_seconds

if TYPE_CHECKING:
    import os

    from loaderkit.leaks.growth import Growth
    from loaderkit.leaks.trace import Site
    from loaderkit.leaks.verdict import CounterTrend

_SHOWN = 8
_MOODS: dict[str, Mood] = {LEAKING: "bad", STEADY: "good"}
_MAIN = ("malloc", "anonymous", "shared", "allocated", "files")


@dataclass(frozen=True)
class LeakReport:
    """Does memory grow, what grew, and who holds it."""

    verdict: str
    """"leaking", "steady" or "needs more epochs"."""
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
    epochs_left: int | None = None
    """Until the limit is reached; None when nothing grows."""
    each: str = "epoch"
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
        found = [each for each in self.counters if each.trend.rising]
        # What torch's allocator takes grows with the tensors: the cause comes first.
        secondary = effects({each.name: each.trend.per_epoch for each in found})
        return tuple(sorted(found, key=lambda c: (c.name in secondary, _by_size(c))))

    @property
    def tolerated(self) -> tuple[CounterTrend, ...]:
        """The counters of bytes that grow beyond doubt, by less than the tolerance."""
        found = [
            each
            for each in self.counters
            if each.trend.tolerated and each.unit == "bytes"
        ]
        return tuple(sorted(found, key=_by_size))

    @property
    def bytes_per_epoch(self) -> int:
        """How fast the fastest counter of bytes grows; 0 when none does."""
        sizes = [each.trend.per_epoch for each in self.leaks if each.unit == "bytes"]
        return round(max(sizes, default=0))

    def __str__(self) -> str:
        lines = [f"{self.headline}  ({self.run})"]
        if self.epochs_left is not None and self.limit_bytes is not None:
            lines.append(
                f"  {format_bytes(self.limit_bytes)} ({self.limit_from}) are used up "
                f"in about {self.epochs_left:,} {self.plural}"
            )
        lines += [f"  {note}" for note in self.notes]
        lines += self._table()
        lines += [f"{i}. {g.text(self.each)}" for i, g in enumerate(self.growths, 1)]
        lines += [f"allocated: {site}" for site in self.sites]
        return "\n".join(lines[:25])

    def _repr_html_(self) -> str:
        return card(
            self.headline,
            mood=_MOODS.get(self.verdict, "unsure"),
            heads=("counter", "verdict", f"each {self.each}", "why"),
            rows=[
                (
                    each.name,
                    each.trend.verdict,
                    format_amount(each.trend.per_epoch, each.unit),
                    each.trend.why,
                )
                for each in (*self.leaks, *self.tolerated)
            ],
            notes=[self.run, *self.notes, *(g.text(self.each) for g in self.growths)],
            text=str(self),
        )

    def to_json(self) -> dict[str, Any]:
        """Give it as plain values.

        Returns:
            Ready for :func:`json.dumps`.
        """
        found = asdict(self)
        for row, growth in zip(found["growths"], self.growths, strict=True):
            row["text"] = growth.text(self.each)
        return found | {"bytes_per_epoch": self.bytes_per_epoch, "text": str(self)}

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one page with plots, that needs nothing else.

        Args:
            path: Of the file; replaced if it is there.

        Returns:
            The path.
        """
        from loaderkit.leaks.page import page_of

        file = Path(path)
        file.write_text(page_of(self), encoding="utf-8")
        return file

    def save_json(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON.

        Args:
            path: Of the file; replaced if it is there.

        Returns:
            The path.
        """
        file = Path(path)
        file.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        return file

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        if self.leaking and not self.leaks:
            return "leaking: more memory is used than the limit allows"
        if self.leaking:
            fastest = self.leaks[0]
            rate = format_amount(fastest.trend.per_epoch, fastest.unit)
            return f"leaking: {rate} more each {self.each}, {fastest.words}"
        if self.verdict == NEEDS_MORE:
            return (
                f"needs more {self.plural}: about {self.more_epochs} to decide"
                f"{self._undecided()}"
            )
        if self.tolerated:
            fastest = self.tolerated[0]
            rate = format_amount(fastest.trend.per_epoch, fastest.unit)
            return (
                f"steady within the tolerance: {rate} more each {self.each}, "
                f"{fastest.words}; a smaller tolerance= would call it a leak"
            )
        return f"steady: nothing grows from {self.each} to {self.each}"

    @property
    def plural(self) -> str:
        """More than one of what is called an epoch."""
        head, _, rest = self.each.partition(" ")
        return f"{head}s {rest}".strip()

    @property
    def run(self) -> str:
        """How long it was watched, and where."""
        time = format_seconds(self.seconds)
        return f"{self.epochs} {self.plural}, {time}, {self.device}"

    def _undecided(self) -> str:
        """Say what grew so far, where that decides nothing yet."""
        found = [each for each in self.counters if each.trend.verdict == NEEDS_MORE]
        grown = [each for each in found if each.trend.per_epoch > 0]
        if not grown:
            return ""
        fastest = min(grown, key=_by_size)
        rate = format_amount(fastest.trend.per_epoch, fastest.unit)
        return f"; {rate} more each {self.each} so far, {fastest.words}"

    def _table(self) -> list[str]:
        shown = list(self.leaks)
        shown += [c for c in self.counters if c.trend.verdict == NEEDS_MORE]
        shown += self.tolerated
        shown += [c for c in self.counters if c.name in _MAIN and c not in shown]
        lines = [f"  {'counter':<14}{'first':>12}{'last':>12}{'each':>14}  verdict"]
        for each in shown[:_SHOWN]:
            first, last = each.values[each.trend.warmup], each.values[-1]
            rate = format_amount(each.trend.per_epoch, each.unit, short=True)
            lines.append(
                f"  {each.name:<14}{format_amount(first, each.unit, short=True):>12}"
                f"{format_amount(last, each.unit, short=True):>12}{rate:>14}"
                f"  {each.trend.verdict}: {each.trend.why}"
            )
        rest = len(self.counters) - len(shown[:_SHOWN])
        if rest:
            calm = all(
                c.trend.verdict == STEADY for c in self.counters if c not in shown
            )
            lines.append(f"  {rest} more counters{' are steady' if calm else ''}")
        return lines


def _by_size(counter: CounterTrend) -> tuple[bool, float]:
    return counter.unit != "bytes", -counter.trend.per_epoch
