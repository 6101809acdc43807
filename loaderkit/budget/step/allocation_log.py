"""What lived when in a training step.  Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from typing import TypeAlias

Phase = Literal["forward", "loss", "backward", "step"]
"""A phase of a training step."""
LogPhase: TypeAlias = Literal["base", "zero_grad", Phase, "end"]
"""The same with what lies around them: before the first step, between two steps and
after the last."""
Part = Literal[
    "parameters",
    "buffers",
    "gradients",
    "optimizer state",
    "activations",
    "temporaries",
    "batch",
    "captured",
]
"""What memory is used for.  Captured is what a step reads and that is neither its
model's nor its batch's nor a parameter: a graph in a global, a table in a closure."""
End = Literal["low", "likely", "high"]
"""Which end of what is not known exactly."""


class UncertainBytes(NamedTuple):
    """Bytes that are not known exactly."""

    low: int
    likely: int
    high: int

    @classmethod
    def exactly(cls, size: int) -> UncertainBytes:
        """Bytes that are."""
        return cls(size, size, size)

    def at(self, end: End) -> int:
        """Give one end."""
        return int(getattr(self, end))


class Event(NamedTuple):
    """A storage is made or freed."""

    number: int
    """Of the storage: the position of the event that made it."""
    change: int
    """Bytes, negative when it is freed.  What is empty as a fake, such as the workspace
    of a recurrent kernel, is made and freed with 0 bytes: its size is in
    ``corrections``."""


class PhaseStart(NamedTuple):
    """A phase begins."""

    position: int
    """Events so far."""
    phase: LogPhase


@dataclass
class Log:
    """What lived when.  Sizes in bytes."""

    events: list[Event] = field(default_factory=list)
    """Storages that were made and freed, in their order."""
    marks: list[PhaseStart] = field(default_factory=list)
    """Where phases begin."""
    owners: dict[int, Part] = field(default_factory=dict)
    """What a storage is used for, where that is known when it is made."""
    modules: dict[int, str] = field(default_factory=dict)
    """Module that made a storage: its name in ``named_modules`` and its class."""
    forwards: dict[str, str] = field(default_factory=dict)
    """By the name in ``modules``: file and line of the ``forward`` that calls it."""
    assumptions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(what was assumed, operator) and how often."""
    inside: dict[int, UncertainBytes] = field(default_factory=dict)
    """What a kernel held inside, right after the event at this position."""
    corrections: dict[int, UncertainBytes] = field(default_factory=dict)
    """What a storage takes more (or less) than its event says, by its number."""
    assumed_numbers: int = 0
    """Floats of unknown value that the step read, which are no counts."""
    assumed_conditions: int = 0
    """Conditions of unknown value that it read."""
    sparse_bytes: int = 0
    """Sparse tensors whose elements are not followed, as they are read and made."""
    has_unknown_sparse_calls: bool = False
    """Whether a kernel read or made sparse tensors that was not tried."""
    lacks_autocast: bool = False
    """Whether the model asked for CUDA's autocast, which has no effect on fakes."""
    checkpoints: int = 0
    """Blocks that compute their activations again."""
    real_bytes: int = 0
    """Largest sum of real memory the tracking itself took."""

    def order_frees(self) -> None:
        """Put what is freed between two operators in the order in which it was made.

        Autocast forgets the weights that it cast in the order of their addresses, which
        are others in each run.
        """
        ends = {mark.position - 1 for mark in self.marks} | set(self.inside)
        begin = 0
        for position, event in enumerate(self.events):
            is_made = event.number == position
            if is_made or position in ends:
                end = position if is_made else position + 1
                self.events[begin:end] = sorted(self.events[begin:end])
                begin = position + 1
        self.events[begin:] = sorted(self.events[begin:])

    def holds_inside(self, position: int, more: UncertainBytes) -> None:
        """Note what a kernel holds; of several at one position the highest counts.

        Args:
            position: Of the last event before it returned.
            more: Bytes beside its operands and outputs.
        """
        before = self.inside.get(position)
        if before is not None:
            more = UncertainBytes(*map(max, zip(before, more, strict=True)))
        if more.high:
            self.inside[position] = more
