"""Forecast of what an epoch reads from disk, and of the samples per second.  Pure."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from loaderkit.cache.stored_arrays import PAGE_BYTES
from loaderkit.loader.samplers import BLOCK, MIXED_BLOCKS
from loaderkit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from typing import TypeAlias

    from loaderkit.array_types import Floats
    from loaderkit.cache.stored_arrays import DiskSpeed, StoredArrays

    Order: TypeAlias = Literal["in order", "shuffled in blocks", "shuffled"]
    Regime: TypeAlias = Literal[
        "fits memory", "fits memory compressed", "larger than memory"
    ]

_WORTHWHILE_SPEEDUP = 1.2
"""Reading in blocks is recommended if it promises this many times the samples per
second.  Chosen: forecasts were off by up to a quarter (docs/loader.md), so a smaller
promise may be no gain at all."""
_BISECTION_STEPS = 30
"""Derived: 30 halvings narrow an interval of 2 epochs to 2e-9 of an epoch."""


@dataclass(frozen=True)
class ReadingForecast:
    """What each epoch after the first reads from disk, and how fast it is."""

    regime: Regime
    """Whether the files fit the memory that the system may use for their pages."""
    order: Order
    """The order in which samples are read."""
    file_bytes: int
    """Bytes of the files that are read."""
    free_bytes: int
    """Memory that the system may use for pages of files."""
    first_epoch_bytes: int
    """Bytes that the first epoch reads from disk if no page is in memory before it."""
    epoch_bytes: int
    """Bytes that each later epoch reads from disk."""
    samples_per_s: float | None
    """Samples per second of later epochs; None if that was not measured."""
    disk: DiskSpeed | None = None
    """Measured speed of the disk; None if the files fit memory."""
    better: ReadingForecast | None = None
    """The forecast for reading in blocks, if that is much faster."""
    compressed_bytes: int | None = None
    """Size of the files if they were compressed, if they would fit memory then."""

    def __str__(self) -> str:
        files, free = format_bytes(self.file_bytes), format_bytes(self.free_bytes)
        if self.regime != "larger than memory":
            once = format_bytes(self.first_epoch_bytes)
            text = f"{self.regime}: {files} of {free}; from disk {once} in the first "
            return f"{text}epoch at most, then nothing{self._speed_in_words()}"

        text = f"larger than memory: {files} of files, {free} for their pages; "
        text += f"from disk {format_bytes(self.epoch_bytes)} an epoch {self.order}"
        text += self._speed_in_words()
        if self.disk is not None:
            disk = self.disk
            text += f" (disk: {disk.bytes_per_s / 1e6:,.0f} MB/s in order, "
            text += f"{disk.pieces_per_s:,.0f} pages/s at random, measured in "
            text += f"{format_seconds(disk.measured_s)})"
        if self.better is not None:
            text += '; shuffle="block" would read '
            text += format_bytes(self.better.epoch_bytes)
            text += self.better._speed_in_words()
        if self.compressed_bytes is not None:
            text += '; pack(compression="gzip") would make some '
            text += f"{format_bytes(self.compressed_bytes)} of them, which fit"
        return text

    def _speed_in_words(self) -> str:
        if self.samples_per_s is None:
            return ""
        return f", about {self.samples_per_s:,.0f} samples/s"


def forecast_reading(
    stored: StoredArrays,
    *,
    samples: int,
    batches: int,
    order: Order,
    samples_per_s: float | None,
    disk: DiskSpeed | None,
) -> ReadingForecast:
    """Forecast what an epoch reads from disk.

    Args:
        stored: The cache on local disk.
        samples: Samples of the cache that an epoch reads.
        batches: Number of batches of an epoch.
        order: The order in which samples are read.
        samples_per_s: Samples per second, measured with all pages in memory; None if
            not measured.
        disk: Measured speed of the disk; None if not measured.

    Returns:
        The forecast.  If the files are larger than memory and the samples shuffled, it
        assumes that the system drops the page that was used least recently.
    """
    share = min(1.0, samples / max(1, stored.samples))
    file_bytes = round(stored.file_bytes * share)
    if file_bytes <= stored.free_bytes:
        unpacked_fits = stored.unpacked_bytes * share <= stored.free_bytes
        return ReadingForecast(
            "fits memory" if unpacked_fits else "fits memory compressed",
            order,
            file_bytes,
            stored.free_bytes,
            first_epoch_bytes=file_bytes,
            epoch_bytes=0,
            samples_per_s=samples_per_s,
        )

    forecast_order = functools.partial(
        _forecast_larger_than_memory,
        stored,
        samples=samples,
        batches=batches,
        file_bytes=file_bytes,
        samples_per_s=samples_per_s,
        disk=disk,
    )
    requested = forecast_order(order)

    better = None
    if order == "shuffled":
        in_blocks = forecast_order("shuffled in blocks")
        least_speed = _WORTHWHILE_SPEEDUP * _relative_speed(requested)
        if _relative_speed(in_blocks) > least_speed:
            better = in_blocks

    compressed_bytes = None
    if disk is not None and not stored.is_compressed:
        nbytes = round(file_bytes * disk.compressed_share)
        compressed_bytes = nbytes if nbytes <= stored.free_bytes else None
    return replace(requested, better=better, compressed_bytes=compressed_bytes)


def _relative_speed(forecast: ReadingForecast) -> float:
    """Return a number that is larger the faster reading is.

    Where no speed was measured, epochs that read fewer bytes count as faster.
    """
    if forecast.samples_per_s is not None:
        return forecast.samples_per_s
    return 1 / max(1, forecast.epoch_bytes)


def _forecast_larger_than_memory(
    stored: StoredArrays,
    order: Order,
    *,
    samples: int,
    batches: int,
    file_bytes: int,
    samples_per_s: float | None,
    disk: DiskSpeed | None,
) -> ReadingForecast:
    in_blocks = order == "shuffled in blocks"
    # Within the blocks that are mixed samples come in any order.  If these blocks do
    # not fit memory together, their pages are read again as in a full shuffle.
    mixed_bytes = MIXED_BLOCKS * BLOCK * stored.file_bytes / max(1, stored.samples)
    if order == "shuffled" or (in_blocks and mixed_bytes > stored.free_bytes):
        share = file_bytes / stored.file_bytes
        reads = _count_random_reads(stored, samples, share=share)
        nbytes, pieces = reads.pages * PAGE_BYTES, reads.pieces
    else:
        nbytes = float(file_bytes)
        pieces = _count_pieces_read_once(stored, samples, batches, in_blocks=in_blocks)

    speed = None
    if samples_per_s is not None and disk is not None:
        # The times are added: a batch is made from mapped files, and the process waits
        # for each page that is not in memory.
        disk_s = nbytes / disk.bytes_per_s + pieces / disk.pieces_per_s
        speed = samples / (samples / samples_per_s + disk_s)
    return ReadingForecast(
        "larger than memory",
        order,
        file_bytes,
        stored.free_bytes,
        first_epoch_bytes=round(nbytes),
        epoch_bytes=round(nbytes),
        samples_per_s=speed,
        disk=disk,
    )


def _count_pieces_read_once(
    stored: StoredArrays, samples: int, batches: int, *, in_blocks: bool
) -> float:
    """Count the contiguous pieces of an epoch that reads each page once.

    In order, each batch reads one piece of each array.  In blocks, the samples of a
    batch are not neighbours: a piece is then one value, or one page if several values
    share it.
    """
    if not in_blocks:
        return float(batches * len(stored.array_bytes))
    pieces_by_array = [
        min(samples, nbytes / PAGE_BYTES) for nbytes in _disk_bytes(stored)
    ]
    return sum(pieces_by_array)


@dataclass(frozen=True)
class _PageGroup:
    """Pages that an epoch reads equally often, each time for another sample.

    Time is measured in epochs.  The samples on a page are read at random moments of an
    epoch, in a new permutation each epoch.
    """

    count: float
    """Number of pages."""
    touches: float
    """How often an epoch reads each page, at least once."""

    def touched_share(self, epochs: float) -> float:
        """Return the share of the pages that are read within a time.

        Args:
            epochs: The time, from 0 to 2.
        """
        untouched_within_epoch = (1 - min(1.0, epochs)) ** self.touches
        untouched_until_end = _MOMENTS**self.touches
        return 1 - _mean_untouched(
            epochs, untouched_within_epoch, untouched_until_end, self.touches
        )

    def missed_share(self, epochs: float) -> float:
        """Return the share of the reads that come later than a time after the last.

        These are the reads that go to disk if a page is kept for that time.

        Args:
            epochs: The time, from 0 to 2.
        """
        other_touches = self.touches - 1
        untouched_within_epoch = (1 - min(1.0, epochs)) ** other_touches
        untouched_until_end = _MOMENTS**other_touches
        return _mean_untouched(
            epochs, untouched_within_epoch, untouched_until_end, self.touches
        )


_MOMENTS = (np.arange(256) + 0.5) / 256
"""Moments of an epoch over which probabilities are averaged.  Measured: with 4,096 of
them the bytes of an epoch change by less than 0.01 %."""


def _mean_untouched(
    epochs: float,
    untouched_within_epoch: float,
    untouched_until_end: Floats,
    touches: float,
) -> float:
    """Average the probability that a page is not read for a time.

    The time begins at each of ``_MOMENTS`` of an epoch, and the results are averaged.

    Args:
        epochs: The time, below 2.
        untouched_within_epoch: The probability if the time ends in the epoch in which
            it began.
        untouched_until_end: The probability up to the end of that epoch ``[moments]``,
            for a time that ends in the next one.
        touches: How often the next epoch reads the page.
    """
    next_epoch_left = np.maximum(0.0, 2 - _MOMENTS - epochs)
    across = untouched_until_end * np.minimum(1.0, next_epoch_left) ** touches
    ends_in_epoch = _MOMENTS + epochs <= 1
    return float(np.where(ends_in_epoch, untouched_within_epoch, across).mean())


class _DiskReads(NamedTuple):
    """What an epoch reads from disk."""

    pieces: float
    """Runs of neighbouring pages."""
    pages: float
    """Pages in all."""


def _count_random_reads(
    stored: StoredArrays, samples: int, *, share: float
) -> _DiskReads:
    """Count what a shuffled epoch reads from disk.

    The pages of all arrays share the memory, and the system drops the page that was
    used least recently.  Each page is then kept for about the same time, whichever
    array it belongs to (H. Che et al., Hierarchical Web Caching Systems, 2002).  So the
    one unknown is that time, and it is found by bisection.

    Args:
        stored: The cache.
        samples: Samples that an epoch reads.
        share: Share of the cache's bytes that they are.
    """
    groups: list[_PageGroup] = []
    pieces_per_page: list[float] = []
    for nbytes, value_bytes in zip(_disk_bytes(stored), stored.read_bytes, strict=True):
        pages = nbytes * share / PAGE_BYTES
        if not pages:
            continue
        if value_bytes <= PAGE_BYTES:
            groups.append(_PageGroup(pages, touches=1 + samples / pages))
            pieces_per_page.append(1.0)
        else:
            # A value of several pages shares the pages at its two ends with its
            # neighbours, and has those between to itself.
            groups.append(_PageGroup(samples, touches=2.0))
            pieces_per_page.append(0.5)
            groups.append(_PageGroup(pages - samples, touches=1.0))
            pieces_per_page.append(0.0)

    # The longer pages are kept, the more of them are in memory at once.
    free_pages = stored.free_bytes / PAGE_BYTES
    low, high = 0.0, 2.0
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        kept_pages = sum(group.count * group.touched_share(middle) for group in groups)
        if kept_pages <= free_pages:
            low = middle
        else:
            high = middle

    missed_pages = [
        group.count * group.touches * group.missed_share(low) for group in groups
    ]
    missed_pieces = map(operator.mul, missed_pages, pieces_per_page)
    return _DiskReads(sum(missed_pieces), sum(missed_pages))


def _disk_bytes(stored: StoredArrays) -> list[float]:
    """Share the bytes of the files among the arrays.

    What the files have beside the arrays (names, room up to whole pages) is shared out
    with them.
    """
    share = stored.file_bytes / max(1, sum(stored.disk_bytes))
    return [nbytes * share for nbytes in stored.disk_bytes]
