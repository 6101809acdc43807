"""What an epoch reads from disk, and how many samples a second that leaves.  Pure."""

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

    from numpy.typing import NDArray

    from loaderkit.cache.stored_arrays import DiskSpeed, StoredArrays

    Floats: TypeAlias = NDArray[np.float64]
    Order: TypeAlias = Literal["in order", "shuffled in blocks", "shuffled"]

_WORTHWHILE_SPEEDUP = 1.2
"""Another order is named where it promises so many times the samples a second."""
_ROUNDS = 30
"""Halvings of an interval: to a billionth of it."""


@dataclass(frozen=True)
class ReadingForecast:
    """What the epochs after the first read, and how fast."""

    regime: Literal["fits memory", "fits memory compressed", "larger than memory"]
    """The files against the memory that the system may use for their pages."""
    order: Order
    """In which samples are read."""
    file_bytes: int
    """Bytes of the files."""
    free_bytes: int
    """What the system may use for their pages."""
    first_epoch_bytes: int
    """What the first epoch reads from disk, if no page of the files is in memory."""
    epoch_bytes: int
    """What each later epoch reads from disk."""
    samples_per_s: float | None
    """Samples a second in later epochs; None where that was not measured."""
    disk: DiskSpeed | None = None
    """What the disk was seen to give; None where that decides nothing."""
    better: ReadingForecast | None = None
    """The same in blocks, where that is much faster."""
    compressed_bytes: int | None = None
    """What the files would take compressed, where they would fit memory then."""

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
    """Say what reading will take.

    Args:
        stored: The cache.
        samples: How many of its samples an epoch reads.
        batches: In how many batches.
        order: In which it reads them.
        samples_per_s: What was measured with the samples in memory.
        disk: What the disk was seen to give.

    Returns:
        The forecast.  Larger than memory, shuffled, it is that of pages that are
        kept by when they were last used.
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
    larger = functools.partial(
        _larger_than_memory,
        stored,
        samples=samples,
        batches=batches,
        file_bytes=file_bytes,
        samples_per_s=samples_per_s,
        disk=disk,
    )
    requested = larger(order)

    better = None
    if order == "shuffled":
        in_blocks = larger("shuffled in blocks")
        least_speed = _WORTHWHILE_SPEEDUP * _speed_or_bytes(requested)
        if _speed_or_bytes(in_blocks) > least_speed:
            better = in_blocks

    compressed_bytes = None
    if disk is not None and not stored.is_compressed:
        nbytes = round(file_bytes * disk.compressed_share)
        compressed_bytes = nbytes if nbytes <= stored.free_bytes else None
    return replace(requested, better=better, compressed_bytes=compressed_bytes)


def _speed_or_bytes(forecast: ReadingForecast) -> float:
    """Give what is compared: samples a second, or the inverse of bytes."""
    if forecast.samples_per_s is not None:
        return forecast.samples_per_s
    return 1 / max(1, forecast.epoch_bytes)


def _larger_than_memory(
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
    mixed_bytes = MIXED_BLOCKS * BLOCK * stored.file_bytes / max(1, stored.samples)
    if order == "shuffled" or (in_blocks and mixed_bytes > stored.free_bytes):
        pieces, pages = _count_disk_reads(
            stored, samples, share=file_bytes / stored.file_bytes
        )
        nbytes = pages * PAGE_BYTES
    else:
        nbytes = float(file_bytes)
        pieces = _pieces_read_once(stored, samples, batches, in_blocks=in_blocks)
    rate = samples_per_s
    if rate is not None and disk is not None:
        disk_s = nbytes / disk.bytes_per_s + pieces / disk.pieces_per_s
        rate = samples / (samples / rate + disk_s)
    return ReadingForecast(
        "larger than memory",
        order,
        file_bytes,
        stored.free_bytes,
        first_epoch_bytes=round(nbytes),
        epoch_bytes=round(nbytes),
        samples_per_s=rate if disk is not None else None,
        disk=disk,
    )


def _pieces_read_once(
    stored: StoredArrays, samples: int, batches: int, *, in_blocks: bool
) -> float:
    """Count the pieces that an epoch asks for where it reads each page once.

    In order that is one an array for each batch.  In blocks the samples of a batch lie
    apart: a piece is a value, or the page on which several lie, whichever is larger.
    """
    if not in_blocks:
        return float(batches * len(stored.array_bytes))
    return sum(min(samples, nbytes / PAGE_BYTES) for nbytes in _disk_bytes(stored))


@dataclass(frozen=True)
class _PageGroup:
    """Pages that an epoch touches equally often, each time for another sample.

    An epoch takes one unit of time, and a page's samples lie anywhere in it, in a new
    permutation each epoch.
    """

    count: float
    """How many they are."""
    touches: float
    """How often an epoch touches each, at least once."""

    def touched_share(self, epochs: float) -> float:
        """Say which part of them was touched within so much time."""
        in_one_epoch = (1 - min(1.0, epochs)) ** self.touches
        before = _MOMENTS**self.touches
        return 1 - _mean_over_moments(epochs, in_one_epoch, before, self.touches)

    def missed_share(self, epochs: float) -> float:
        """Say how many touches come later after the one before than this time."""
        others = self.touches - 1
        in_one_epoch = (1 - min(1.0, epochs)) ** others
        before = _MOMENTS**others
        return _mean_over_moments(epochs, in_one_epoch, before, self.touches)


_MOMENTS = (np.arange(256) + 0.5) / 256
"""Moments of an epoch, over which chances are averaged."""


def _mean_over_moments(
    epochs: float, in_one_epoch: float, before: Floats, touches: float
) -> float:
    """Average the chance that a page is not touched for some time from now on.

    Args:
        epochs: The time, below 2.
        in_one_epoch: The chance where the time ends in the epoch in which it began.
        before: Where it does not: the chance up to the epoch's end ``[moments]``.
        touches: How often the next epoch touches the page.
    """
    left = np.maximum(0.0, 2 - _MOMENTS - epochs)
    across = before * np.minimum(1.0, left) ** touches
    chances = np.where(_MOMENTS + epochs <= 1, in_one_epoch, across)
    return float(chances.mean())


class _DiskReads(NamedTuple):
    """What an epoch reads from disk."""

    pieces: float
    """Runs of neighbouring pages."""
    pages: float


def _count_disk_reads(
    stored: StoredArrays, samples: int, *, share: float
) -> _DiskReads:
    """Count what an epoch in any order reads from disk.

    The pages of all arrays share the memory, and those go first that were not used for
    longest: then each page is kept for about the same time, whatever array it is of
    (H. Che et al., Hierarchical Web Caching Systems, 2002).

    Args:
        stored: The cache.
        samples: How many of its samples an epoch reads.
        share: Which part of its bytes they are.

    Returns:
        Pieces and pages.
    """
    groups: list[_PageGroup] = []
    pieces_of_a_page: list[float] = []
    for nbytes, value in zip(_disk_bytes(stored), stored.read_bytes, strict=True):
        pages = nbytes * share / PAGE_BYTES
        value_pages = value / PAGE_BYTES
        if not pages:
            continue
        if value_pages <= 1:
            groups.append(_PageGroup(pages, touches=1 + samples / pages))
            pieces_of_a_page.append(1.0)
        else:
            # Pages inside a value are its own; those at its ends are a neighbour's too.
            groups += [_PageGroup(samples, 2.0), _PageGroup(pages - samples, 1.0)]
            pieces_of_a_page += [0.5, 0.0]

    # The longer pages are kept, the more of them there are: halve the interval of times
    # until those that were touched within it just fit.
    free_pages = stored.free_bytes / PAGE_BYTES
    low, high = 0.0, 2.0
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        kept_pages = sum(group.count * group.touched_share(middle) for group in groups)
        if kept_pages <= free_pages:
            low = middle
        else:
            high = middle

    missed_pages = [
        group.count * group.touches * group.missed_share(low) for group in groups
    ]
    missed_pieces = map(operator.mul, missed_pages, pieces_of_a_page)
    return _DiskReads(sum(missed_pieces), sum(missed_pages))


def _disk_bytes(stored: StoredArrays) -> list[float]:
    """Share the files' bytes among the arrays, as they are once decompressed."""
    share = stored.file_bytes / max(1, stored.unpacked_bytes)
    return [nbytes * share for nbytes in stored.array_bytes]
