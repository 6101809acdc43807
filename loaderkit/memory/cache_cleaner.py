"""``EpochCacheCleaner``: empties caches between epochs, only where that pays."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loaderkit.answers import answer_wrong_calls
from loaderkit.errors import OptionError
from loaderkit.memory.reading import device_of
from loaderkit.memory.release import cached_bytes, release
from loaderkit.notebook import HasCard, repr_in_a_line
from loaderkit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import torch

_MOST_IDLE_RELEASES = 3
"""Releases in a row that bring nothing before it stops.  Chosen: one may be chance, and
each makes the next epoch ask the driver for its memory again."""
_LEAST_UNUSED_SHARE = 0.1
"""Part of the taken memory that must lie unused for an emptying to be tried.  Chosen:
below it the next batches take what was given back at once."""
_LEAST_UNUSED_BYTES = 64 << 20
"""What a release must bring to count.  Chosen: to write to as many fresh pages takes
30 ms, by the measure in ``shm_segments``."""


@answer_wrong_calls
@dataclass(frozen=True)
class HygieneReport(HasCard):
    """What hygiene brought and cost so far."""

    times: int
    """Releases done."""
    skipped: int
    """Ends of epochs at which nothing would have come back."""
    returned_bytes: int
    """What came back, all together."""
    seconds: float
    """What that took, all together."""
    active: bool
    """Whether it still tries."""

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        state = "" if self.active else "; switched off, since it brought nothing"
        return (
            f"hygiene: {self.times} releases gave back "
            f"{format_bytes(self.returned_bytes)} in {format_seconds(self.seconds)}, "
            f"{self.skipped} were not worth it{state}"
        )


@answer_wrong_calls
class EpochCacheCleaner:
    """Collects garbage and empties caches at the end of epochs, or every N batches.

    Emptying a cache costs time, and the next batch takes the memory again: it is done
    only where a tenth of what torch has taken, and 64 MiB, lie unused.  After three
    releases that brought nothing it switches itself off.

    Args:
        device: Whose cache is looked at; the current one if None.
        every: Batches between two looks, for :meth:`step`; only epoch ends if None.
        freeze: Take what exists at the first epoch's end out of the collector's sight
            (``gc.freeze``): model, dataset and modules stay, and each collection then
            looks at what is new only.

    Raises:
        ValueError: ``every`` is no number of batches.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        every: int | None = None,
        freeze: bool = False,
    ) -> None:
        if every is not None and every < 1:
            message = f"every must be a number of batches from 1, got {every!r}."
            why = "it cleans behind so many"
            raise OptionError(message, why=why, fix="every=100, or None for epochs")
        self.device, self.every, self.freeze = device_of(device), every, freeze
        self._batches = 0
        self._releases = 0
        self._skipped = 0
        self._idle_releases = 0
        """In a row, up to now."""
        self._returned_bytes = 0
        self._seconds = 0.0

    @property
    def report(self) -> HygieneReport:
        """What it brought and cost so far."""
        return HygieneReport(
            times=self._releases,
            skipped=self._skipped,
            returned_bytes=self._returned_bytes,
            seconds=self._seconds,
            active=self.active,
        )

    @property
    def active(self) -> bool:
        """Whether it still tries."""
        return self._idle_releases < _MOST_IDLE_RELEASES

    def step(self) -> None:
        """Say that a batch has ended."""
        self._batches += 1
        if self.every is not None and self._batches % self.every == 0:
            self._release_if_worth_it()

    def end_epoch(self) -> None:
        """Say that an epoch has ended."""
        if self.freeze:
            gc.collect()
            gc.freeze()
            self.freeze = False
        self._release_if_worth_it()

    def _release_if_worth_it(self) -> None:
        """Release if enough would come back; count it as idle if it did not."""
        if not self.active:
            return
        cached = cached_bytes(self.device)
        # Of the host nobody knows before what would come back: there it is tried.
        if cached.taken is not None:
            least = max(_LEAST_UNUSED_BYTES, cached.taken * _LEAST_UNUSED_SHARE)
            if cached.unused < least:
                self._skipped += 1
                return
        released = release()
        # It is below 0 where another thread has taken memory meanwhile.
        returned_bytes = sum(
            max(0, size_bytes) for size_bytes in released.returned_bytes.values()
        )
        self._releases += 1
        self._returned_bytes += returned_bytes
        self._seconds += released.seconds
        if returned_bytes >= _LEAST_UNUSED_BYTES:
            self._idle_releases = 0
        else:
            self._idle_releases += 1
