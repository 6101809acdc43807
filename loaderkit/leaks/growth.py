"""``Growth``: something that became more, in words.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loaderkit.leaks.patterns import PATTERNS
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from loaderkit.memory.holders import Holder

RESOURCES = {
    "children": "child processes",
    "threads": "threads",
    "files": "open files",
    "mappings": "memory mappings",
}
"""What is counted and is not memory, and how to call it; causes before effects."""


@dataclass(frozen=True)
class Growth:
    """Something that became more, and who holds it."""

    pattern: str
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
    epochs_left: int | None = None
    """Until a bounded container is full."""

    @property
    def fix(self) -> str:
        """What to change."""
        return PATTERNS[self.pattern].fix

    def __str__(self) -> str:
        return self.text()

    def text(self, each: str = "epoch") -> str:
        """Say it in a sentence.

        Args:
            each: What is called an epoch.

        Returns:
            What grew, who holds it, and the fix.
        """
        size = f", {format_bytes(self.bytes_per_epoch)}" if self.bytes_per_epoch else ""
        where = ""
        if self.holder is not None:
            place = self.holder.line or self.holder.where
            where = f" `{self.holder.path}`" + (f" in {place}" if place else "")
        more = (
            f" keeps {self.per_epoch:.4g} {self.items} more" if self.items else " grows"
        )
        if self.what in RESOURCES.values():
            where = f", kept by{where}" if where else ""
            count = f"{self.per_epoch:.4g} more {self.what}"
            text = f"{count} each {each}{where} ({self.items})"
        else:
            text = f"{self.what}{where}{more} each {each}{size}"
        return f"{text}: {PATTERNS[self.pattern].words}. Fix: {self.fix}"
