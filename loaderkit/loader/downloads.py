"""What an epoch downloads from a store, and in which order.  Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loaderkit.cache.download_ahead import ShardUse
from loaderkit.cache.mirrored_shards import KEPT_BATCHES, KEPT_SHARDS
from loaderkit.loader.samplers import (
    MIXED_SHARDS,
    can_be_cut_anywhere,
    most_rows_of_a_batch,
)
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from loaderkit.array_types import Ints
    from loaderkit.cache.download_ahead import StoredRows
    from loaderkit.loader.samplers import BatchRule, Epoch

_MOST_SIMULATED = 10_000
"""So many batches of an epoch are played through to count what is downloaded twice;
what more there are is counted like them.  Each takes some 20 us."""


@dataclass(frozen=True)
class DownloadPlan:
    """What reading an epoch takes from a store."""

    url: str
    read_bytes: int
    """Bytes of the shards that an epoch reads, each once."""
    first_epoch_bytes: int
    """Bytes that the first epoch downloads, from what is on local disk now."""
    later_epoch_bytes: int
    """Bytes that every other epoch downloads."""
    most_bytes: int | None
    """What the mirror may take; None for all the disk has."""
    mirror: str
    """Its folder."""
    ahead_bytes: int
    """How much is downloaded before it is needed at most; 0 where the order is not
    known, or needs all shards at once."""

    needed_bytes: int
    """What the mirror has to hold so that every batch can be read, and no process waits
    for another's shards."""

    @property
    def warning(self) -> str:
        """What is wrong with it; "" when nothing is."""
        if self.most_bytes is not None and self.most_bytes < self.needed_bytes:
            needed = format_bytes(self.needed_bytes)
            return (
                f"mirror_bytes is {format_bytes(self.most_bytes)}, and workers may map "
                f"{needed} at once: mirror_bytes={self.needed_bytes:_}, or smaller "
                "shards (shard_bytes of pack)"
            )
        if self.later_epoch_bytes <= self.read_bytes:
            return ""
        times = self.later_epoch_bytes / max(self.read_bytes, 1)
        return (
            f"an epoch downloads {format_bytes(self.later_epoch_bytes)}, each shard "
            f"{times:.1f} times: the mirror holds too few at once; shuffle='block' "
            "reads each once"
        )

    def __str__(self) -> str:
        most = "all the disk has"
        if self.most_bytes is not None:
            most = format_bytes(self.most_bytes)
        ahead = "nothing is downloaded ahead"
        if self.ahead_bytes:
            ahead = f"up to {format_bytes(self.ahead_bytes)} are downloaded ahead"
        return (
            f"{self.url}: {format_bytes(self.first_epoch_bytes)} are downloaded in the "
            f"first epoch, {format_bytes(self.later_epoch_bytes)} in each other, of "
            f"{format_bytes(self.read_bytes)}; the mirror {self.mirror} may take "
            f"{most}; {ahead}"
        )


@dataclass(frozen=True)
class Readers:
    """Who reads the batches of an epoch."""

    workers: int
    """Number of workers; 0 where the training process reads."""
    prefetch_factor: int = 1
    """Batches that each worker is asked for ahead."""

    @property
    def kept_batches(self) -> int:
        """Neighbouring batches of an epoch whose shards all workers hold together.

        A worker that waits to be asked for the next batch holds what its last batches
        read.  It may be as far ahead of the slowest as the batches that it is asked for
        at once; with the training process alone, nobody waits for another.
        """
        if not self.workers:
            return 1
        return self.workers * (self.prefetch_factor + KEPT_BATCHES - 1)


def plan_downloads(
    rows: StoredRows, epoch: Epoch, rule: BatchRule, readers: Readers
) -> DownloadPlan:
    """Count what epochs download.

    Args:
        rows: Where the samples are.
        epoch: The first one.
        rule: How samples become batches, in every epoch.
        readers: Who reads them.

    Returns:
        The counts.
    """
    shards = rows.shard_of_row[epoch.order]
    read = np.unique(shards)
    read_bytes = int(rows.shard_bytes[read].sum())
    most = rows.remote.mirror_bytes
    missing = read[rows.is_missing[read]]
    first_epoch_bytes = int(rows.shard_bytes[missing].sum())
    later_epoch_bytes = needed_bytes = 0
    is_capped = most is not None and most < read_bytes
    if is_capped and most is not None:
        # Both are counted from an empty mirror: what it holds now is soon dropped.
        later_epoch_bytes = _simulate_downloaded_bytes(
            shards, epoch.bounds, rows.shard_bytes, most
        )
        first_epoch_bytes = later_epoch_bytes
        most_shards = _most_shards_at_once(rows.shard_of_row, rule, readers)
        largest = np.sort(rows.shard_bytes[np.unique(rows.shard_of_row)])[-most_shards:]
        needed_bytes = int(largest.sum())
    ahead_bytes = 0
    if reads_shard_after_shard(rule) or not is_capped:
        # No more can be ahead than an epoch reads at all.
        ahead_bytes = min(rows.remote.ahead_bytes, read_bytes)
    return DownloadPlan(
        url=str(rows.remote),
        read_bytes=read_bytes,
        first_epoch_bytes=first_epoch_bytes,
        later_epoch_bytes=later_epoch_bytes,
        most_bytes=most,
        mirror=str(rows.remote.mirror_folder),
        needed_bytes=needed_bytes,
        ahead_bytes=ahead_bytes,
    )


def reads_shard_after_shard(rule: BatchRule) -> bool:
    """Tell whether neighbouring batches read the same few shards."""
    if rule.shuffle not in {False, "block"}:
        return False
    return can_be_cut_anywhere(rule)


def _most_shards_at_once(shard_of_row: Ints, rule: BatchRule, readers: Readers) -> int:
    """Count the shards that readers map at once, in whichever epoch.

    In order they are at the end of one mix of shards and at the beginning of the next,
    with whole mixes between if shards are small; and one shard is downloaded beside.
    Rows from anywhere may each be in another shard.

    >>> from loaderkit.loader.samplers import BatchRule
    >>> shard_of_row = np.repeat(np.arange(100), 50)
    >>> block = BatchRule(samples=5_000, batch_size=32, shuffle="block")
    >>> anywhere = BatchRule(samples=5_000, batch_size=32, shuffle=True)
    >>> _most_shards_at_once(shard_of_row, block, Readers(workers=0))
    9
    >>> _most_shards_at_once(shard_of_row, block, Readers(workers=2, prefetch_factor=2))
    13
    >>> _most_shards_at_once(shard_of_row, anywhere, Readers(workers=2))
    64
    """
    least = 2 * MIXED_SHARDS + 1
    batch_rows = most_rows_of_a_batch(rule)
    if not reads_shard_after_shard(rule):
        return max(least, max(readers.workers, 1) * max(batch_rows, KEPT_SHARDS))
    # Ranks take turns, so that neighbouring rows of one are further apart.
    window_rows = batch_rows * readers.kept_batches * rule.ranks
    mixed = MIXED_SHARDS if rule.shuffle else 1
    rows_of_shards = np.bincount(shard_of_row)
    fewest = np.cumsum(np.sort(rows_of_shards[rows_of_shards > 0]))
    rows_of_mixes = fewest[mixed - 1 :: mixed]
    # A row at least is in the mix before them, and one in the mix behind.
    mixes_between = int(rows_of_mixes.searchsorted(window_rows - 2, side="right"))
    return max(least, mixed * (mixes_between + 2) + 1)


def shard_uses(shard_of_row: Ints, epoch: Epoch, start: int = 0) -> list[ShardUse]:
    """Say when each shard is read.

    Args:
        shard_of_row: Number of the shard of each sample of the dataset ``[n]``.
        epoch: Rows of batches.
        start: The first batch that is read.

    Returns:
        In the order of the first batch that reads each.

    >>> from loaderkit.loader.samplers import BatchRule, make_epoch
    >>> epoch = make_epoch(BatchRule(samples=6, batch_size=2), 0)
    >>> shard_uses(np.array([1, 1, 0, 0, 0, 0]), epoch)
    [ShardUse(shard=1, first_batch=0, last_batch=0),
     ShardUse(shard=0, first_batch=1, last_batch=2)]
    """
    batches = np.repeat(np.array(epoch.numbers), np.diff(epoch.bounds))
    coming = batches >= start
    batches, shards = batches[coming], shard_of_row[epoch.order][coming]
    numbers, firsts = np.unique(shards, return_index=True)
    # numpy gives the first place of each number: those from behind are the last ones.
    _, places_from_behind = np.unique(shards[::-1], return_index=True)
    lasts = len(shards) - 1 - places_from_behind
    order = np.argsort(firsts)
    return [
        ShardUse(
            int(numbers[index]), int(batches[firsts[index]]), int(batches[lasts[index]])
        )
        for index in order.tolist()
    ]


def _simulate_downloaded_bytes(shards: Ints, ends: Ints, sizes: Ints, most: int) -> int:
    """Play an epoch through with a mirror that keeps what was used last."""
    mirrored: OrderedDict[int, None] = OrderedDict()  # the last used last
    mirrored_bytes = 0
    downloaded_bytes = 0
    batches = len(ends) - 1
    simulated = min(batches, _MOST_SIMULATED)
    for batch in range(simulated):
        for shard in set(shards[ends[batch] : ends[batch + 1]].tolist()):
            if shard in mirrored:
                mirrored.move_to_end(shard)
                continue
            mirrored[shard] = None
            mirrored_bytes += int(sizes[shard])
            downloaded_bytes += int(sizes[shard])
            while mirrored_bytes > most and len(mirrored) > 1:
                oldest, _ = mirrored.popitem(last=False)
                mirrored_bytes -= int(sizes[oldest])
    return downloaded_bytes * batches // max(simulated, 1)
