"""Which samples make up which batch, from numbers alone.  Pure.

Everything follows from the seed, the epoch and the samples' sizes, so every rank and
every resumed run works out the same batches by itself.

An epoch has an order of all samples, which knows nothing of ranks or batch sizes: the
*global order*.  Ranks take turns in it, so what all of them were given after a number
of steps is always a beginning of it.  A run that goes on needs to know only how long
that beginning is, and may share out the rest among another number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loaderkit.errors import LoaderError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """The batches of one epoch, of one rank; or those that an earlier run left."""

    order: Ints
    """Rows, batch after batch ``[n]``."""
    ends: Ints
    """Where each batch begins in ``order``, and the last ends ``[batches + 1]``."""
    skipped: int
    """Samples left out: too large for a limit, or dropped to make ranks even."""
    repeated: int
    """Samples that come twice, so that every rank has as many batches."""
    given: Ints
    """How many samples of the global order all ranks together were given before each
    batch, and after the last ``[batches + 1]``."""
    places: Ints
    """Where each batch begins in the global order ``[batches]``; behind its end for
    those that are repeated.  No two batches of all ranks have the same place."""
    first_batch: int = 0
    """The number of the first batch that is here: how many were given before."""

    def __len__(self) -> int:
        """Count the batches of the epoch, with those that were given before."""
        return self.first_batch + len(self.ends) - 1

    @property
    def numbers(self) -> range:
        """The numbers of the batches that are here."""
        return range(self.first_batch, len(self))

    def batch(self, number: int) -> list[int]:
        """Give the rows of a batch."""
        index = number - self.first_batch
        start, stop = self.ends[index], self.ends[index + 1]
        rows: list[int] = self.order[start:stop].tolist()
        return rows

    def place(self, number: int) -> int:
        """Say where a batch begins in the global order."""
        return int(self.places[number - self.first_batch])

    def samples_given(self, batches: int) -> int:
        """Count the samples that all ranks were given with so many batches each."""
        return int(self.given[batches - self.first_batch])


def make_epoch(
    rule: BatchRule, epoch: int, *, given_samples: int = 0, given_batches: int = 0
) -> Epoch:
    """Work out the batches of an epoch, or of its rest.

    Args:
        rule: How samples become batches.
        epoch: Which one, from 0.
        given_samples: How many samples of the global order were given already, by
            whatever number of ranks, in batches of whatever size.
        given_batches: How many batches each of those ranks was given.

    Returns:
        This rank's batches; every rank has the same number of them.  What is repeated
        to make ranks even is the beginning of the epoch, as of torch's
        DistributedSampler; what is dropped is the end.

    Raises:
        LoaderError: A sample is larger than a limit, and ``oversized`` is "raise"; or
            a batch neither ends nor begins where the rest would begin.
    """
    rows, alone = _rows_by_limits(rule)
    left_out = rule.samples - len(rows) - len(alone)
    chance = np.random.Generator(np.random.PCG64([rule.seed, epoch]))
    order = _order_rows(rule, rows, chance)
    if rule.plain:
        dealt = _deal_samples_to_ranks(rule, order, given_samples)
    elif rule.bucket_by is None and not len(alone):
        sequence = _cut_order(rule, order, given_samples)
        dealt = _deal_batches_to_ranks(rule, sequence)
    else:
        sequence = _shuffle_batches(rule, order, alone, chance)
        dealt = _deal_batches_to_ranks(rule, sequence.after(given_samples))
    return replace(dealt, skipped=dealt.skipped + left_out, first_batch=given_batches)


def count_ordered_samples(rule: BatchRule) -> int:
    """Count the samples of the global order: all but those that are left out."""
    return rule.samples - len(left_out_rows(rule))


def left_out_rows(rule: BatchRule) -> Ints:
    """Give the rows that no epoch has, since they are beyond a limit."""
    oversized = _oversized_rows(rule)
    return oversized if rule.oversized == "skip" else oversized[:0]


def can_be_cut_anywhere(rule: BatchRule) -> bool:
    """Tell whether batches are cut from one order of samples, one behind the other.

    The rest of such an order can become batches by any other rule.  Buckets, and
    samples that are alone, are made into batches first and shuffled then: the rest is
    whole batches, of the same rule.
    """
    has_samples_alone = rule.oversized == "alone" and len(_oversized_rows(rule)) > 0
    return rule.bucket_by is None and not has_samples_alone


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
    oversized = _oversized_rows(rule)
    rows = np.arange(rule.samples)
    if len(oversized):
        rows = np.delete(rows, oversized)
    return rows, oversized if rule.oversized == "alone" else oversized[:0]


def _oversized_rows(rule: BatchRule) -> Ints:
    """Give the rows that are beyond a limit.

    Raises:
        LoaderError: There are some, and ``oversized`` is "raise".
    """
    if not rule.limits:
        # A loader of 10^7 samples asks too, and has nothing to compare.
        return np.empty(0, np.int64)
    large = np.zeros(rule.samples, bool)
    for name, limit in rule.limits.items():
        large |= rule.sizes[name] > limit
    oversized = np.flatnonzero(large)
    if not len(oversized) or rule.oversized != "raise":
        return oversized
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


def _deal_samples_to_ranks(rule: BatchRule, order: Ints, given_samples: int) -> Epoch:
    """Batches of one size: ranks take turns, sample by sample."""
    assert rule.rank is not None  # all_ranks() makes one rank of them here
    size, ranks = rule.batch_size or 1, rule.ranks
    remaining = order[given_samples:]

    uneven = len(remaining) % ranks
    skipped = repeated = 0
    if uneven and rule.drop_last:
        remaining, skipped = remaining[: len(remaining) - uneven], uneven
    elif uneven:
        repeated = ranks - uneven
        remaining = np.concatenate([remaining, np.resize(order, repeated)])
    rank_rows = remaining[rule.rank :: ranks]
    full = len(rank_rows) // size * size
    if rule.drop_last and full < len(rank_rows):
        skipped, rank_rows = skipped + (len(rank_rows) - full) * ranks, rank_rows[:full]

    # numpy counts steps in float64: a step of 2**57 would lose the number of samples.
    size = min(size, max(len(rank_rows), 1))
    ends = np.arange(0, len(rank_rows) + size, size).clip(max=len(rank_rows))
    ends = ends if len(ends) > 1 and ends[-1] != ends[-2] else ends[:-1]
    ends = ends if len(ends) else np.zeros(1, np.int64)
    given = np.minimum(given_samples + ends * ranks, len(order))
    places = given_samples + ends[:-1] * ranks + rule.rank
    return Epoch(rank_rows, ends, skipped, repeated, given, places)


def _batch_bounds(
    rule: BatchRule, order: Ints, most_batches: int | None = None
) -> Ints:
    """Fill batch after batch until the next sample would break a limit.

    Args:
        rule: With the limits.
        order: Rows ``[n]``.
        most_batches: So many are enough; None for all.

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
    if not len(order):
        return np.array(bounds)
    if not totals:
        bounds = [*range(0, len(order), most), len(order)]
        start = len(order)
    while start < len(order):
        if most_batches is not None and len(bounds) > most_batches:
            return np.array(bounds)
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


class _BatchSequence(NamedTuple):
    """The batches of all ranks, in the order in which the ranks take them."""

    rows: Ints
    """That the batches are parts of ``[n]``."""
    starts: Ints
    """Where each batch begins in ``rows`` ``[batches]``."""
    stops: Ints
    """Where each ends ``[batches]``."""
    repeated_starts: Ints
    """Where the batches begin that come again to make ranks even ``[ranks]``."""
    repeated_stops: Ints
    """Where these end ``[ranks]``."""
    skipped: int = 0
    """Samples that ``drop_last`` leaves out."""
    given_samples: int = 0
    """How many samples were given before the first batch."""

    @property
    def given(self) -> Ints:
        """How many samples are given before each batch, and after the last."""
        sizes = self.stops - self.starts
        return self.given_samples + np.concatenate([[0], np.cumsum(sizes)])

    def after(self, given_samples: int) -> _BatchSequence:
        """Leave out the batches that were given already."""
        given = self.given
        first = int(np.searchsorted(given, given_samples))
        if first == len(given) or given[first] != given_samples:
            message = f"No batch begins behind {given_samples:,} samples of the epoch."
            why = "its batches were made by another rule"
            fix = "build the loader with the same options; or begin an epoch: "
            raise LoaderError(message, why=why, fix=f"{fix}loader.set_epoch()")
        return self._replace(
            starts=self.starts[first:],
            stops=self.stops[first:],
            given_samples=given_samples,
        )


def _cut_order(rule: BatchRule, order: Ints, given_samples: int) -> _BatchSequence:
    """Cut the rest of an order into batches, one behind the other."""
    remaining = order[given_samples:]
    bounds = given_samples + _batch_bounds(rule, remaining)
    # An epoch that was not interrupted repeats its first batches, so the rest of one
    # does, too.
    again = _batch_bounds(rule, order, rule.ranks)
    repeats = np.arange(rule.ranks) % max(len(again) - 1, 1)
    return _BatchSequence(
        rows=order,
        starts=bounds[:-1],
        stops=bounds[1:],
        repeated_starts=again[:-1][repeats] if len(again) > 1 else again[:0],
        repeated_stops=again[1:][repeats] if len(again) > 1 else again[:0],
        skipped=len(order) - int(bounds[-1]),
        given_samples=given_samples,
    )


def _shuffle_batches(
    rule: BatchRule, order: Ints, alone: Ints, chance: np.random.Generator
) -> _BatchSequence:
    """Make batches within each bucket, and put them in an order.

    Args:
        rule: How samples become batches.
        order: Rows that may share batches ``[n]``.
        alone: Rows beyond a limit, each a batch of its own.
        chance: Draws the order.
    """
    groups = [order]
    if rule.bucket_by is not None:
        bucket = bucket_of(rule.sizes[rule.bucket_by], rule.buckets)[order]
        groups = [order[bucket == number] for number in range(rule.buckets)]
    groups = [group for group in groups if len(group)]
    group_bounds = [_batch_bounds(rule, group) for group in groups]
    groups += [np.array([row]) for row in alone.tolist()]
    group_bounds += [np.array([0, 1])] * len(alone)

    skipped = 0
    first = 0
    starts, stops = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for group, bounds in zip(groups, group_bounds, strict=True):
        starts.append(first + bounds[:-1])
        stops.append(first + bounds[1:])
        skipped += len(group) - int(bounds[-1])
        first += len(group)

    turn = np.arange(sum(map(len, starts)))
    if rule.shuffle and len(groups) > 1:
        # Else the batches of one bucket would all come before those of the next.
        turn = chance.permutation(turn)
    batch_starts, batch_stops = (
        np.concatenate(starts)[turn],
        np.concatenate(stops)[turn],
    )
    return _BatchSequence(
        rows=np.concatenate([np.empty(0, np.int64), *groups]),
        starts=batch_starts,
        stops=batch_stops,
        repeated_starts=np.resize(batch_starts, rule.ranks),
        repeated_stops=np.resize(batch_stops, rule.ranks),
        skipped=skipped,
    )


def _deal_batches_to_ranks(rule: BatchRule, sequence: _BatchSequence) -> Epoch:
    """Deal whole batches out to the ranks, equally many to each."""
    starts, stops, given = sequence.starts, sequence.stops, sequence.given
    places, skipped, repeated = given[:-1], sequence.skipped, 0
    uneven = len(starts) % rule.ranks
    if uneven and rule.drop_last:
        skipped += int((stops - starts)[-uneven:].sum())
        starts, stops = starts[:-uneven], stops[:-uneven]
        places, given = places[:-uneven], given[:-uneven]
    elif uneven:
        missing = rule.ranks - uneven
        again_starts = sequence.repeated_starts[:missing]
        again_stops = sequence.repeated_stops[:missing]
        repeated = int((again_stops - again_starts).sum())
        starts = np.concatenate([starts, again_starts])
        stops = np.concatenate([stops, again_stops])
        places = np.concatenate([places, len(sequence.rows) + np.arange(missing)])
        given = np.concatenate([given, np.full(missing, given[-1])])

    step = 1
    if rule.rank is not None:
        step = rule.ranks
        starts, stops = starts[rule.rank :: step], stops[rule.rank :: step]
        places = places[rule.rank :: step]
    rows = [
        sequence.rows[start:stop]
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
    ]
    order = np.concatenate(rows) if rows else sequence.rows[:0]
    ends = np.concatenate([[0], np.cumsum(stops - starts)])
    return Epoch(order, ends, skipped, repeated, given[::step], places)


def largest_batch(sizes: Ints, batch_size: int) -> int:
    """Bound a batch: its samples could be the largest there are.

    >>> largest_batch(np.array([5, 1, 9]), 2)
    14
    """
    count = min(batch_size, len(sizes))
    if not count:
        return 0
    return int(np.partition(sizes, len(sizes) - count)[-count:].sum())
