"""What finders are given: live objects, or counters that leak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from loaderkit.leaks.census import Census, Heap
    from loaderkit.leaks.growth import Growth
    from loaderkit.leaks.shared_files import SharedFiles
    from loaderkit.leaks.trend import Trend
    from loaderkit.memory.counters import AnyCounter


Memory: TypeAlias = Literal["host", "device"]
"""The two that objects can take: the process's own, and that of the device."""


@dataclass(frozen=True)
class HeapEvidence:
    """What is alive now, and what was when a census was taken."""

    heap: Heap
    """Now; searches for holders must ignore its lists."""
    before: Census
    """Some epochs ago."""
    epochs: int
    """Since then, at least 1."""
    ignored_ids: AbstractSet[int]
    """``id`` of what is there because we watch."""
    bytes_per_epoch: float = 0.0
    """By which memory grows; 0 when unknown."""
    memory: Memory = "host"
    """Which memory that is."""
    more_exit_handlers: float = 0.0
    """How many functions more atexit knows each epoch."""
    other_censuses: tuple[Census, ...] = ()
    """Taken before or after ``before``, and before now."""
    collects_by_itself: bool = True
    """Python's collector is on; else garbage stays, and is to be seen as such."""
    older_ids: AbstractSet[int] = frozenset()
    """``id`` of the containers that ``before`` counted, which no new object alone
    keeps."""

    @property
    def run_epochs(self) -> int:
        """Epochs since the run began."""
        return self.before.epoch + self.epochs

    @property
    def grown_bytes(self) -> float:
        """What memory has grown by since the run began."""
        return self.bytes_per_epoch * self.run_epochs


@dataclass(frozen=True)
class CounterEvidence:
    """Counters that leak, and the objects that were found to grow."""

    leaking: Mapping[AnyCounter, Trend]
    """By name."""
    objects: Sequence[Growth]
    """What finders found among live objects."""
    objects_counted: bool
    """A census was there to compare with."""
    files_before: Counter[str]
    """Open files when the run began, by kind."""
    shared_files: SharedFiles
    """Files in /dev/shm."""
    named: tuple[Growth, ...] = ()
    """What the finders before this one have named."""


EvidenceT = TypeVar("EvidenceT", contravariant=True)


class Finder(Protocol[EvidenceT]):
    """Finds one kind of what grew: a function with this signature."""

    def __call__(self, evidence: EvidenceT, /) -> list[Growth]:
        """Name what grew, the heaviest first; nothing when this kind did not."""
