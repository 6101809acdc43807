"""``Growth``: something that became more, in words.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, TypeAlias

from loaderkit.answers import answer_wrong_names
from loaderkit.leaks.patterns import PATTERNS, PatternName
from loaderkit.leaks.periods import plural_of
from loaderkit.notebook import HasCard, repr_in_a_line
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from loaderkit.memory.holder import Holder

Resource: TypeAlias = Literal["children", "threads", "files", "mappings"]
RESOURCES: Mapping[Resource, str] = {
    "children": "child processes",
    "threads": "threads",
    "files": "open files",
    "mappings": "memory mappings",
}
"""What is counted and is not memory, and how to call it; causes before effects."""
_EXPLAINED_SHARE = 0.1
"""Chosen: items are weighed by a sample, and what they share counts once."""

_WHOLE_SHARE = 0.005
"""Chosen: a count that is so near to a whole number is said as that."""
_MOST_EPOCHS_NAMED = 1_000
"""Chosen: what comes less often than once in so many epochs is hardly counted."""


@dataclass(frozen=True)
class Bound:
    """How far a container is from the most that it can hold."""

    items: int
    """What it holds now."""
    most_items: int
    """What it can hold."""
    epochs_left: int
    """Until it is full."""


@answer_wrong_names()
@dataclass(frozen=True)
class Growth(HasCard):
    """Something that became more, and who holds it."""

    pattern: PatternName
    """A key of :data:`loaderkit.leaks.patterns.PATTERNS`."""
    what: str
    """What it is, such as "list" or "open files"."""
    items: str
    """What it holds more of, such as "Tensor [128, 19] float32"."""
    per_epoch: float
    """How many more each epoch."""
    bytes_per_epoch: int
    """What they weigh, about; 0 when unknown."""
    holder: Holder | None = None
    """Who keeps it."""
    bound: Bound | None = None
    """What a container can hold at most, where that is known."""

    @property
    def epochs_left(self) -> int | None:
        """Until a bounded container is full."""
        return None if self.bound is None else self.bound.epochs_left

    @property
    def bytes_until_full(self) -> int | None:
        """What a bounded container will take besides, if its items stay as large."""
        if self.bound is None or self.per_epoch <= 0:
            return None
        return self._bytes_of(self.bound.most_items - self.bound.items)

    def _bytes_of(self, items: int) -> int:
        return round(max(items, 0) * self.bytes_per_epoch / self.per_epoch)

    def bound_text(self, period: str = "epoch") -> str:
        """Say how large a bounded container is now, and when it is full.

        Args:
            period: What is called an epoch.

        Returns:
            Empty where there is no bound.

        >>> Growth(
        ...     *("bounded", "deque", "bytes", 10, 10_000), bound=Bound(40, 1_000, 96)
        ... ).bound_text()
        '40 items of 1,000 now (39.1 KiB of 977 KiB), full in 96 epochs'
        """
        if self.bound is None:
            return ""
        amounts = ""
        if self.bytes_per_epoch and self.per_epoch > 0:
            now, most = map(self._bytes_of, (self.bound.items, self.bound.most_items))
            amounts = f" ({format_bytes(now)} of {format_bytes(most)})"
        items = f"{count_of(self.bound.items, 'items')} of {self.bound.most_items:,}"
        epochs = count_of(self.bound.epochs_left, plural_of(period))
        return f"{items} now{amounts}, full in {epochs}"

    @property
    def fix(self) -> str:
        """What to change."""
        return PATTERNS[self.pattern].fix

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        return self.text()

    def text(self, period: str = "epoch") -> str:
        """Say it in a sentence.

        Args:
            period: What is called an epoch.

        Returns:
            What grew, who holds it, and the fix.
        """
        holder = ""
        if self.holder is not None:
            holder = f" `{self.holder.path}`"
            location = self.holder.line or self.holder.where
            if location:
                holder += f" in {location}"
        count, interval = self._count_and_time(period)
        if self.what in RESOURCES.values():
            # "1 open file", of which the noun is wanted.
            noun = self.what if count != "1" else count_of(1, self.what)[2:]
            subject = f"{count} more {noun} {interval}"
            subject += f", kept by{holder}" if holder else ""
            subject += f" ({self.items})"
        else:
            subject = f"{self.what}{holder}"
            if self.items:
                subject += f" keeps {count} {self.items} more {interval}"
            else:
                subject += f" grows each {period}"
            if self.bytes_per_epoch:
                subject += f", {format_bytes(self.bytes_per_epoch)}"
                # Beside a count of several epochs it is to be said of how many.
                subject += "" if interval == f"each {period}" else f" each {period}"
        words = PATTERNS[self.pattern].words
        bound = self.bound_text(period)
        words += f": {bound}" if bound else ""
        return f"{subject}: {words}. Fix: {self.fix}"

    def _count_and_time(self, period: str) -> tuple[str, str]:
        """Say how many came in which time: "7", "in 6 epochs" is no 1.167 an epoch."""
        nearest = round(self.per_epoch)
        if nearest and abs(self.per_epoch - nearest) <= _WHOLE_SHARE * nearest:
            return f"{nearest:,}", f"each {period}"
        if self.per_epoch <= 0:
            return f"{self.per_epoch:.3g}", f"each {period}"
        share = Fraction(self.per_epoch).limit_denominator(_MOST_EPOCHS_NAMED)
        if not share:
            return "less than 1", f"each {period}"
        epochs = share.denominator
        return f"{share.numerator:,}", f"in {epochs:,} {plural_of(period)}"


def is_held(growth: Growth) -> bool:
    """Tell whether a growth leads to a variable that can be changed.

    Args:
        growth: Any.

    Returns:
        False where the holder is not known.
    """
    return growth.holder is not None and growth.holder.held


def explains(growths: Iterable[Growth], bytes_per_epoch: float) -> bool:
    """Tell whether what was named makes up a tenth of the growth.

    Args:
        growths: What was named.
        bytes_per_epoch: By how much memory grows.

    Returns:
        Whether their bytes come to that.
    """
    named_bytes = sum(growth.bytes_per_epoch for growth in growths)
    return named_bytes >= _EXPLAINED_SHARE * bytes_per_epoch
