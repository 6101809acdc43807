"""What lived when in a training step.  Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

End = Literal["low", "likely", "high"]
"""Which end of what is not known exactly."""


class Bounds(NamedTuple):
    """Bytes that are not known exactly."""

    low: int
    likely: int
    high: int

    @classmethod
    def exactly(cls, size: int) -> Bounds:
        """Bytes that are."""
        return cls(size, size, size)

    def at(self, end: End) -> int:
        """Give one end."""
        return int(getattr(self, end))


@dataclass
class Log:
    """What lived when.  Sizes in bytes."""

    events: list[tuple[int, int]] = field(default_factory=list)
    """(number of the storage, bytes), negative when it is freed.  What is empty as a
    fake, such as the workspace of a recurrent kernel, is made and freed with 0 bytes:
    its size is in ``corrections``."""
    marks: list[tuple[int, str]] = field(default_factory=list)
    """(events so far, phase that begins)."""
    owners: dict[int, str] = field(default_factory=dict)
    """What a storage is, where that is known: "parameters", "batch", ..."""
    modules: dict[int, str] = field(default_factory=dict)
    """Module that made a storage: its name in ``named_modules`` and its class."""
    assumptions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(what was assumed, operator) and how often."""
    inside: dict[int, Bounds] = field(default_factory=dict)
    """What a kernel held inside, right after the event at this position."""
    corrections: dict[int, Bounds] = field(default_factory=dict)
    """What a storage takes more (or less) than its event says, by its number."""
    checkpoints: int = 0
    """Blocks that compute their activations again."""
    real_bytes: int = 0
    """Largest sum of real memory the tracking itself took."""

    def holds_inside(self, position: int, more: Bounds) -> None:
        """Note what a kernel holds; of several at one position the highest counts.

        Args:
            position: Of the last event before it returned.
            more: Bytes beside its operands and outputs.
        """
        before = self.inside.get(position)
        if before is not None:
            more = Bounds(*map(max, zip(before, more, strict=True)))
        if more.high:
            self.inside[position] = more
