"""Which samples make up which batch, from numbers alone.  Pure.

Everything follows from the seed, the epoch and the samples' sizes, so every rank and
every resumed run works out the same batches by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loaderkit.errors import LoaderError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

BLOCK = 1024
"""Samples that lie side by side in a block of ``shuffle="block"``."""
MIXED_BLOCKS = 8
"""Blocks whose samples are mixed with each other."""
MIXED_SHARDS = 4
"""Shards of a store whose blocks are mixed with each other: 1 GiB of the usual size is
on local disk at once.  Chosen: every rank must choose alike, whatever its disk."""


@dataclass(frozen=True)
class BatchRule:
    """How samples become batches."""

    samples: int
    """Samples of the dataset."""
    batch_size: int | None = None
    """Samples of a batch; with limits, the most of them."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """The most a batch may hold, by what is counted: nodes, edges, bytes, tokens."""
    sizes: Mapping[str, Ints] = field(default_factory=dict)
    """What each sample holds ``[samples]``, for each limit and for ``bucket_by``."""
    shuffle: bool | str = False
    """True, False, or "block" for files that are not in memory."""
    seed: int = 0
    """What the order follows from, with the epoch."""
    drop_last: bool = False
    """Leave out a last batch that the end cut short (of each bucket); among ranks, what
    is uneven."""
    oversized: str = "raise"
    """A sample beyond a limit: "raise", a batch of its own ("alone"), or "skip"."""
    bucket_by: str | None = None
    """Batch samples of similar size; one of ``sizes``."""
    buckets: int = 8
    """Distinct shapes that padded batches can have then."""
    shard_of_row: Ints | None = None
    """In which shard of a store each sample is ``[samples]``: "block" then reads shard
    after shard.  None where the samples are on local disk."""
    rank: int | None = 0
    """Which of the processes this is; None gives the batches of all, in turn."""
    ranks: int = 1
    """How many train together."""

    def __post_init__(self) -> None:
        if self.oversized not in {"raise", "alone", "skip"}:
            msg = f"oversized must be 'raise', 'alone' or 'skip', got {self.oversized}"
            raise ValueError(msg)
        if self.shuffle not in {True, False, "block"}:
            msg = f"shuffle must be True, False or 'block', got {self.shuffle!r}"
            raise ValueError(msg)
        if self.rank is not None and not 0 <= self.rank < self.ranks:
            msg = f"rank must be from 0 to {self.ranks - 1}, got {self.rank}"
            raise ValueError(msg)
        size = 1 if self.batch_size is None else self.batch_size
        counts = [size, self.buckets, *self.limits.values()]
        if min(counts) < 1:
            msg = f"batch_size, buckets and limits must be at least 1, got {counts}"
            raise ValueError(msg)

    @property
    def plain(self) -> bool:
        """Whether all batches have the same number of samples, but for the last."""
        return not self.limits and self.bucket_by is None

    def all_ranks(self) -> BatchRule:
        """Make the rule for the batches of all ranks, in one process.

        A trainer that deals batches out to the ranks itself takes these.  Batches of
        one size are as in a single process, since such a trainer expects that only
        the very last one is short.  Batches by size are those that the ranks give, in
        turn, so that dealing them out gives each rank its own.
        """
        if self.plain:
            return replace(self, rank=0, ranks=1)
        return replace(self, rank=None)


@dataclass(frozen=True)
class Epoch:
    """The batches of one epoch, of one rank."""

    order: Ints
    """Rows, batch after batch ``[n]``."""
    ends: Ints
    """Where each batch begins in ``order``, and the last ends ``[batches + 1]``."""
    skipped: int
    """Samples left out: too large for a limit, or dropped to make ranks even."""
    repeated: int
    """Samples that come twice, so that every rank has as many batches."""

    def __len__(self) -> int:
        return len(self.ends) - 1

    def batch(self, number: int) -> list[int]:
        """Give the rows of a batch."""
        start, stop = self.ends[number], self.ends[number + 1]
        rows: list[int] = self.order[start:stop].tolist()
        return rows


def make_epoch(rule: BatchRule, epoch: int) -> Epoch:
    """Work out the batches of an epoch.

    Args:
        rule: How samples become batches.
        epoch: Which one, from 0.

    Returns:
        This rank's batches; every rank has the same number of them.

    Raises:
        LoaderError: A sample is larger than a limit, and ``oversized`` is "raise".
    """
    rows, alone = _rows_by_limits(rule)
    skipped = rule.samples - len(rows) - len(alone)
    chance = np.random.Generator(np.random.PCG64([rule.seed, epoch]))
    order = _order_rows(rule, rows, chance)
    if rule.plain:
        return _deal_samples_to_ranks(rule, order, skipped)
    if rule.bucket_by is None:
        groups = [order]
    else:
        bucket = bucket_of(rule.sizes[rule.bucket_by], rule.buckets)[order]
        groups = [order[bucket == number] for number in range(rule.buckets)]
    parts = [
        _Group(group, _batch_bounds(rule, group)) for group in groups if len(group)
    ]
    skipped += sum(len(part.rows) - int(part.bounds[-1]) for part in parts)
    # Samples beyond a limit, each a batch of its own.
    parts += [_Group(np.array([row]), np.array([0, 1])) for row in alone.tolist()]
    return _deal_batches_to_ranks(rule, parts, chance, skipped)


def bucket_of(sizes: Ints, buckets: int) -> Ints:
    """Sort samples into buckets of equally many, by size.

    Args:
        sizes: What each sample holds ``[n]``.
        buckets: How many there are.

    Returns:
        The bucket of each ``[n]``, from the smallest samples to the largest; equal
        sizes always share one.
    """
    bounds = bucket_bounds(sizes, buckets)
    return np.searchsorted(bounds, sizes, side="left").clip(0, buckets - 1)


def bucket_bounds(sizes: Ints, buckets: int) -> Ints:
    """Give the largest size of each bucket, to which its samples are padded.

    >>> bucket_bounds(np.array([1, 2, 3, 4, 5, 60]), 3)
    array([ 2,  4, 60])
    """
    if not len(sizes):
        return np.zeros(buckets, np.int64)
    ordered = np.sort(sizes)
    at = np.ceil(np.arange(1, buckets + 1) * len(sizes) / buckets).astype(np.int64) - 1
    bounds: Ints = ordered[at.clip(0)]
    return bounds


def padding_waste(rule: BatchRule) -> float:
    """Tell which part of padded batches would be padding.

    Args:
        rule: With ``bucket_by``.

    Returns:
        From 0 to 1, when every sample is padded to its bucket's bound.
    """
    if rule.bucket_by is None or not rule.samples:
        return 0.0
    sizes = rule.sizes[rule.bucket_by]
    padded = bucket_bounds(sizes, rule.buckets)[bucket_of(sizes, rule.buckets)].sum()
    return 1.0 - float(sizes.sum()) / float(padded) if padded else 0.0


def _rows_by_limits(rule: BatchRule) -> tuple[Ints, Ints]:
    """Give the rows that fit every limit, and those that get a batch of their own."""
    large = np.zeros(rule.samples, bool)
    for name, limit in rule.limits.items():
        large |= rule.sizes[name] > limit
    rows = np.flatnonzero(~large) if large.any() else np.arange(rule.samples)
    oversized = np.flatnonzero(large)
    if not len(oversized) or rule.oversized == "skip":
        return rows, oversized[:0]
    if rule.oversized == "alone":
        return rows, oversized
    row = int(oversized[0])
    exceeded = (
        name for name, limit in rule.limits.items() if rule.sizes[name][row] > limit
    )
    name = next(exceeded)
    message = (
        f"Sample {row:,} has {rule.sizes[name][row]:,} {name}, above the limit of "
    )
    message += f"{rule.limits[name]:,}; so have {len(oversized) - 1:,} more."
    fix = f"raise max_{name}, or oversized='alone' (a batch of its own) or 'skip'"
    raise LoaderError(message, why="no batch can hold it", fix=fix)


def _order_rows(rule: BatchRule, rows: Ints, chance: np.random.Generator) -> Ints:
    if not rule.shuffle:
        return rows
    if rule.shuffle is True:
        return chance.permutation(rows)
    if rule.shard_of_row is None:
        return _mixed_blocks(rows, chance)
    # Shards in any order, a few at a time, so that each is downloaded once.
    shards = rule.shard_of_row[rows]
    by_shard = rows[np.argsort(shards, kind="stable")]
    ends = np.cumsum(np.bincount(shards))
    groups = [part for part in np.split(by_shard, ends[:-1]) if len(part)]
    turn = chance.permutation(len(groups)).tolist()
    mixed = []
    for at in range(0, len(turn), MIXED_SHARDS):
        together = [groups[number] for number in turn[at : at + MIXED_SHARDS]]
        mixed.append(_mixed_blocks(np.concatenate(together), chance))
    return np.concatenate(mixed) if mixed else rows


def _mixed_blocks(rows: Ints, chance: np.random.Generator) -> Ints:
    starts = np.arange(0, len(rows), BLOCK)
    blocks = [rows[start : start + BLOCK] for start in chance.permutation(starts)]
    mixed = [
        chance.permutation(np.concatenate(blocks[at : at + MIXED_BLOCKS]))
        for at in range(0, len(blocks), MIXED_BLOCKS)
    ]
    return np.concatenate(mixed) if mixed else rows


def _deal_samples_to_ranks(rule: BatchRule, order: Ints, skipped: int) -> Epoch:
    """Batches of one size: ranks take turns, sample by sample."""
    assert rule.rank is not None  # all_ranks() makes one rank of them here
    size, ranks = rule.batch_size or 1, rule.ranks
    uneven = len(order) % ranks
    repeated = 0
    if uneven and rule.drop_last:
        order, skipped = order[: len(order) - uneven], skipped + uneven
    elif uneven:
        repeated = ranks - uneven
        order = np.concatenate([order, np.resize(order, repeated)])
    mine = order[rule.rank :: ranks]
    full = len(mine) // size * size
    if rule.drop_last and full < len(mine):
        skipped, mine = skipped + (len(mine) - full) * ranks, mine[:full]
    # numpy counts steps in float64: a step of 2**57 would lose the number of samples.
    size = min(size, max(len(mine), 1))
    ends = np.arange(0, len(mine) + size, size).clip(max=len(mine))
    ends = ends if len(ends) > 1 and ends[-1] != ends[-2] else ends[:-1]
    return Epoch(mine, ends if len(ends) else np.zeros(1, np.int64), skipped, repeated)


def _batch_bounds(rule: BatchRule, order: Ints) -> Ints:
    """Fill batch after batch until the next sample would break a limit.

    Returns:
        Where each batch begins, and the last one ends ``[batches + 1]``; with
        ``drop_last`` that is before the samples of a batch that the end cut short.
    """
    totals = []
    for name, limit in rule.limits.items():
        total = np.zeros(len(order) + 1, np.int64)
        np.cumsum(rule.sizes[name][order], out=total[1:])
        # A limit above all samples together is none; adding it could overflow int64.
        totals.append((total, min(limit, int(total[-1]))))
    most = rule.batch_size or len(order)
    start, bounds = 0, [0]
    if not totals:
        bounds = [*range(0, len(order), most), len(order)]
        start = len(order)
    while start < len(order):
        stop = min(start + most, len(order))
        for total, limit in totals:
            within_limit = total.searchsorted(total[start] + limit, side="right") - 1
            stop = min(stop, int(within_limit))
        start = max(stop, start + 1)
        bounds.append(start)
    if rule.drop_last and not _is_full(rule, order[bounds[-2] :]):
        bounds.pop()
    return np.array(bounds)


def _is_full(rule: BatchRule, rows: Ints) -> bool:
    """Tell whether no sample at all could be added to a batch."""
    if len(rows) == rule.batch_size:
        return True
    totals = {name: int(rule.sizes[name][rows].sum()) for name in rule.limits}
    return any(totals[name] == limit for name, limit in rule.limits.items())


class _Group(NamedTuple):
    """Samples that only share batches with each other: a bucket, or all of them."""

    rows: Ints
    """In their order ``[n]``."""
    bounds: Ints
    """Where each batch begins, and the last ends ``[batches + 1]``."""


def _deal_batches_to_ranks(
    rule: BatchRule,
    groups: Sequence[_Group],
    chance: np.random.Generator,
    skipped: int,
) -> Epoch:
    """Deal whole batches out to the ranks, equally many to each."""
    no_rows = np.empty(0, np.int64)
    rows = np.concatenate([no_rows, *(group.rows for group in groups)])
    offsets = np.cumsum([0, *(len(group.rows) for group in groups)])
    starts, stops = [no_rows], [no_rows]
    for offset, group in zip(offsets, groups, strict=False):
        starts.append(offset + group.bounds[:-1])
        stops.append(offset + group.bounds[1:])
    batch_starts, batch_stops = np.concatenate(starts), np.concatenate(stops)
    batch_sizes = batch_stops - batch_starts

    turn = np.arange(len(batch_sizes))
    if rule.shuffle and len(groups) > 1:
        # Else the batches of one bucket would all come before those of the next.
        turn = chance.permutation(turn)
    uneven = len(turn) % rule.ranks
    repeated = 0
    if uneven and rule.drop_last:
        turn, dropped = turn[:-uneven], turn[-uneven:]
        skipped += int(batch_sizes[dropped].sum())
    elif uneven:
        again = np.resize(turn, rule.ranks - uneven)
        repeated = int(batch_sizes[again].sum())
        turn = np.concatenate([turn, again])

    mine = turn if rule.rank is None else turn[rule.rank :: rule.ranks]
    batches = [
        rows[batch_starts[number] : batch_stops[number]] for number in mine.tolist()
    ]
    ends = np.cumsum([0, *map(len, batches)])
    order = np.concatenate(batches) if batches else rows[:0]
    return Epoch(order, ends, skipped, repeated)


def largest_batch(sizes: Ints, batch_size: int) -> int:
    """Bound a batch: its samples could be the largest there are.

    >>> largest_batch(np.array([5, 1, 9]), 2)
    14
    """
    count = min(batch_size, len(sizes))
    if not count:
        return 0
    return int(np.partition(sizes, len(sizes) - count)[-count:].sum())
