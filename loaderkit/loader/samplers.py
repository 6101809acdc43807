"""Which samples make up which batch, worked out from numbers alone.  Pure.

The batches follow from the seed, the epoch and the sizes of the samples.  So every rank
and every resumed run works out the same batches by itself.

An epoch has an order of all samples that depends neither on the number of ranks nor on
the batch size: the *global order*.  Ranks take turns in it, so after any number of
steps the samples that all ranks together have consumed are the beginning of the global
order.  A resumed run only needs the length of that beginning, and may share out the
rest among another number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loaderkit.errors import LoaderError
from loaderkit.units import count_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sized

    from loaderkit.array_types import Ints
    from loaderkit.loader.options import Oversized, Shuffle

BLOCK = 1024
"""Neighbouring samples that make a block of ``shuffle="block"``.  Chosen: at 4 KiB a
sample and more, reading a block is mostly sequential reading."""
MIXED_BLOCKS = 8
"""Blocks whose samples are mixed with each other.  Chosen between order and memory: a
batch draws from 8,192 samples, and so many must fit the page cache."""
MIXED_SHARDS = 4
"""Shards of an object store whose blocks are mixed with each other, so that 1 GiB of
shards of the usual size is on local disk at once.  It is a constant because every rank
must make the same choice, whatever the size of its disk."""


@dataclass(frozen=True)
class BatchRule:
    """How samples become batches."""

    samples: int
    """Samples of the dataset."""
    batch_size: int | None = None
    """Samples of a batch; beside ``limits``, the most samples of a batch."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """The most that a batch may hold, by what is counted: "nodes", "edges", "bytes",
    "tokens" or a name that the dataset's ``sizes()`` has."""
    sizes: Mapping[str, Ints] = field(default_factory=dict)
    """What each sample holds ``[samples]``, for each limit and for ``bucket_by``."""
    shuffle: Shuffle = False
    """True, False, "block" for files that are not in memory, or "batches" to shuffle
    batches that are the same in every epoch, so that there are always as many."""
    seed: int = 0
    """Seed of the order, together with the epoch."""
    drop_last: bool = False
    """Leave out a last batch (of each bucket) that is not full; among ranks, also the
    samples or batches that not every rank gets one of."""
    oversized: Oversized = "raise"
    """What happens to a sample above a limit: "raise", "alone" (a batch of its own) or
    "skip"."""
    bucket_by: str | None = None
    """Batch samples of similar size together; one of ``sizes``."""
    buckets: int = 8
    """Number of buckets: padded batches have at most so many shapes."""
    shard_of_row: Ints | None = None
    """The shard of an object store that each sample is in ``[samples]``: "block" then
    reads shard after shard.  None if the samples are on local disk."""
    rank: int | None = 0
    """Rank of this process; None gives the batches of all ranks, in turn."""
    ranks: int = 1
    """Number of ranks."""

    def __post_init__(self) -> None:
        if self.oversized not in {"raise", "alone", "skip"}:
            msg = f"oversized must be 'raise', 'alone' or 'skip', got {self.oversized}"
            raise ValueError(msg)
        if self.shuffle not in {True, False, "block", "batches"}:
            msg = "shuffle must be True, False, 'block' or 'batches', got "
            msg += repr(self.shuffle)
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
        """Whether all batches but the last have the same number of samples."""
        return not self.limits and self.bucket_by is None

    def all_ranks(self) -> BatchRule:
        """Return the rule for the batches of all ranks, in one process.

        Trainers that share batches out to the ranks themselves take these.  Batches of
        one size are those of a single process, because such a trainer expects that only
        the very last batch is short.  Batches limited by size are those of the ranks in
        turn, so that sharing them out gives each rank its own batches.
        """
        if self.plain:
            return replace(self, rank=0, ranks=1)
        return replace(self, rank=None)


@dataclass(frozen=True)
class Epoch:
    """The batches of one rank in one epoch, or those that an earlier run left."""

    order: Ints
    """Rows, batch after batch ``[n]``."""
    bounds: Ints
    """Where each batch begins in ``order``, and the last one ends ``[batches + 1]``."""
    skipped: int
    """Samples left out: above a limit, or dropped to give each rank as many."""
    repeated: int
    """Samples that occur twice, so that every rank has as many batches."""
    consumed: Ints
    """How many samples of the global order all ranks together have consumed before each
    batch, and after the last one ``[batches + 1]``."""
    offsets: Ints
    """Where each batch begins in the global order ``[batches]``; beyond its end for
    repeated batches.  No two batches of all ranks have the same offset."""
    first_batch: int = 0
    """Number of the first batch: how many an earlier run has consumed."""

    def __len__(self) -> int:
        """Count the batches of the epoch, those of earlier runs included."""
        return self.first_batch + len(self.bounds) - 1

    @property
    def numbers(self) -> range:
        """The numbers of the batches that are left."""
        return range(self.first_batch, len(self))

    def batch(self, number: int) -> list[int]:
        """Return the rows of a batch."""
        index = number - self.first_batch
        start, stop = self.bounds[index], self.bounds[index + 1]
        rows: list[int] = self.order[start:stop].tolist()
        return rows

    def offset(self, number: int) -> int:
        """Return where a batch begins in the global order."""
        return int(self.offsets[number - self.first_batch])

    def consumed_samples(self, batches: int) -> int:
        """Count the samples that all ranks have consumed after so many batches each."""
        return int(self.consumed[batches - self.first_batch])


def make_epoch(
    rule: BatchRule, epoch: int, *, consumed_samples: int = 0, consumed_batches: int = 0
) -> Epoch:
    """Work out the batches of an epoch, or of what is left of it.

    Args:
        rule: How samples become batches.
        epoch: Number of the epoch, from 0.
        consumed_samples: How many samples of the global order earlier runs consumed,
            with any number of ranks and any batch size.
        consumed_batches: How many batches each rank of these runs consumed.

    Returns:
        The batches of this rank; every rank has the same number of them.  Samples that
        are repeated for this are those at the beginning of the epoch, as in torch's
        DistributedSampler; those that are dropped are at its end.

    Raises:
        LoaderError: A sample is above a limit, and ``oversized`` is "raise".  Or no
            batch begins after ``consumed_samples``.
    """
    rows, oversized = _split_by_limits(rule)
    left_out = rule.samples - len(rows) - len(oversized)
    generator = np.random.Generator(np.random.PCG64([rule.seed, epoch]))
    order_generator = generator
    if rule.shuffle == "batches":
        # They stay as they are: the epoch draws nothing but their order.
        order_generator = np.random.Generator(np.random.PCG64([rule.seed]))
    order = _order_rows(rule, rows, order_generator)

    if rule.plain:
        epoch_of_rank = _share_samples(rule, order, consumed_samples)
    elif not _are_batches_made_first(rule, oversized):
        sequence = _cut_order(rule, order, consumed_samples)
        epoch_of_rank = _share_batches(rule, sequence)
    else:
        sequence = _shuffle_batches(rule, order, oversized, generator)
        epoch_of_rank = _share_batches(rule, sequence.after(consumed_samples))
    return replace(
        epoch_of_rank,
        skipped=epoch_of_rank.skipped + left_out,
        first_batch=consumed_batches,
    )


def count_ordered_samples(rule: BatchRule) -> int:
    """Count the samples of the global order: all but those that are left out."""
    return rule.samples - len(left_out_rows(rule))


def left_out_rows(rule: BatchRule) -> Ints:
    """Return the rows that no epoch has, because they are above a limit."""
    oversized = _oversized_rows(rule)
    return oversized if rule.oversized == "skip" else oversized[:0]


def can_be_cut_anywhere(rule: BatchRule) -> bool:
    """Return whether batches are cut one after the other from one order of samples.

    What is left of such an order can become batches by any other rule.  With buckets,
    with samples that get a batch of their own, or with ``shuffle="batches"``, batches
    are made first and shuffled afterwards: what is left are whole batches of the same
    rule.
    """
    alone = _oversized_rows(rule) if rule.oversized == "alone" else ()
    return not _are_batches_made_first(rule, alone)


def _are_batches_made_first(rule: BatchRule, alone: Sized) -> bool:
    """Tell whether whole batches are put into an order, and not cut from one.

    Args:
        rule: How samples become batches.
        alone: Rows that get a batch of their own.
    """
    return rule.bucket_by is not None or rule.shuffle == "batches" or len(alone) > 0


def most_rows_of_a_batch(rule: BatchRule) -> int:
    """Return how many samples a batch can have at most, in whichever epoch.

    >>> sizes = {"nodes": np.array([9, 2, 3, 4])}
    >>> rule = BatchRule(samples=4, limits={"nodes": 10}, sizes=sizes)
    >>> most_rows_of_a_batch(rule)
    3
    """
    most = rule.samples if rule.batch_size is None else rule.batch_size
    for name, limit in rule.limits.items():
        # As many as there can be: the smallest ones.
        totals = np.cumsum(np.sort(rule.sizes[name]))
        most = min(most, int(totals.searchsorted(limit, side="right")))
    return max(1, min(most, rule.samples))


def bucket_of(sizes: Ints, buckets: int) -> Ints:
    """Sort samples by size into buckets of equally many.

    Args:
        sizes: What each sample holds ``[n]``.
        buckets: Number of buckets.

    Returns:
        The bucket of each sample ``[n]``, from the smallest samples to the largest.
        Samples of equal size are always in the same bucket.
    """
    bounds = bucket_bounds(sizes, buckets)
    return np.searchsorted(bounds, sizes, side="left").clip(0, buckets - 1)


def bucket_bounds(sizes: Ints, buckets: int) -> Ints:
    """Return the largest size of each bucket, to which its samples are padded.

    >>> bucket_bounds(np.array([1, 2, 3, 4, 5, 60]), 3)
    array([ 2,  4, 60])
    """
    if not len(sizes):
        return np.zeros(buckets, np.int64)
    ordered = np.sort(sizes)
    samples_up_to = np.ceil(np.arange(1, buckets + 1) * len(sizes) / buckets)
    last_of_bucket = samples_up_to.astype(np.int64) - 1
    # With more buckets than samples the first ones are empty.
    bounds: Ints = ordered[last_of_bucket.clip(0)]
    return bounds


def padding_waste(rule: BatchRule) -> float:
    """Return the share of padded batches that would be padding.

    Args:
        rule: A rule with ``bucket_by``.

    Returns:
        From 0 to 1, if every sample is padded to the bound of its bucket.
    """
    if rule.bucket_by is None or not rule.samples:
        return 0.0
    sizes = rule.sizes[rule.bucket_by]
    padded = bucket_bounds(sizes, rule.buckets)[bucket_of(sizes, rule.buckets)].sum()
    return 1.0 - float(sizes.sum()) / float(padded) if padded else 0.0


class _RowsByLimits(NamedTuple):
    """The rows of a dataset, without those that no epoch has."""

    within: Ints
    """Rows that fit every limit."""
    oversized: Ints
    """Rows above a limit that get a batch of their own."""


def _split_by_limits(rule: BatchRule) -> _RowsByLimits:
    oversized = _oversized_rows(rule)
    rows = np.arange(rule.samples)
    if len(oversized):
        rows = np.delete(rows, oversized)
    alone = oversized if rule.oversized == "alone" else oversized[:0]
    return _RowsByLimits(rows, alone)


def _oversized_rows(rule: BatchRule) -> Ints:
    """Return the rows that are above a limit.

    Raises:
        LoaderError: There are some, and ``oversized`` is "raise".
    """
    if not rule.limits:
        # Loaders without limits ask too.  Of 10^7 samples the mask below takes 10 MB.
        return np.empty(0, np.int64)

    if rule.samples and not any(rule.sizes[name].any() for name in rule.limits):
        raise _nothing_limited(rule)
    is_oversized = np.zeros(rule.samples, bool)
    for name, limit in rule.limits.items():
        is_oversized |= rule.sizes[name] > limit
    oversized = np.flatnonzero(is_oversized)
    if not len(oversized) or rule.oversized != "raise":
        return oversized

    row = int(oversized[0])
    exceeded_names = (
        name for name, limit in rule.limits.items() if rule.sizes[name][row] > limit
    )
    name = next(exceeded_names)
    message = f"Sample {row:,} has {rule.sizes[name][row]:,} {name}, above the limit "
    message += f"of {rule.limits[name]:,}"
    if len(oversized) > 1:
        message += f"; so have {len(oversized) - 1:,} more"
    fix = f"raise max_{name}, or oversized='alone' (a batch of its own) or 'skip'"
    raise LoaderError(f"{message}.", why="no batch can hold it", fix=fix)


def _nothing_limited(rule: BatchRule) -> LoaderError:
    """Make the error for limits that no sample counts towards."""
    names = list(rule.limits)
    asked = ", ".join(f"max_{name}={limit:,}" for name, limit in rule.limits.items())
    message = f"{asked} would limit nothing: no sample has {' or '.join(names)}."
    why = "they are counted before a transform, and all samples would make one batch"
    if "nodes" in names:
        why = "a Data's nodes are counted by num_nodes or by a field such as x or pos; "
        why += "none is there, and all samples would make one batch"
    fix = "batch_size=32; or give the dataset sizes() -> {name: array}"
    if "nodes" in names:
        fix = f"data.num_nodes = ... before pack() or in load(); or {fix}"
    elif "edges" in names:
        fix = f"make the edges before pack() or in load(); or max_nodes=...; or {fix}"
    return LoaderError(message, why=why, fix=fix)


def _order_rows(rule: BatchRule, rows: Ints, generator: np.random.Generator) -> Ints:
    if not rule.shuffle:
        return rows
    if rule.shuffle in {True, "batches"}:
        return generator.permutation(rows)
    if rule.shard_of_row is None:
        return _mix_blocks(rows, generator)
    return _mix_shards(rows, rule.shard_of_row[rows], generator)


def _mix_shards(rows: Ints, shards: Ints, generator: np.random.Generator) -> Ints:
    """Shuffle shards, and mix blocks within a few of them at a time.

    Each shard is downloaded once in this order.

    Args:
        rows: Rows ``[n]``.
        shards: The shard of each row ``[n]``.
        generator: Draws the order.
    """
    rows_by_shard = rows[np.argsort(shards, kind="stable")]
    shard_ends = np.cumsum(np.bincount(shards))
    rows_of_shards = [
        rows_of_shard
        for rows_of_shard in np.split(rows_by_shard, shard_ends[:-1])
        if len(rows_of_shard)
    ]

    permutation = generator.permutation(len(rows_of_shards)).tolist()
    mixed = []
    for start in range(0, len(permutation), MIXED_SHARDS):
        mixed_shards = permutation[start : start + MIXED_SHARDS]
        neighbours = np.concatenate([rows_of_shards[shard] for shard in mixed_shards])
        mixed.append(_mix_blocks(neighbours, generator))
    return np.concatenate(mixed) if mixed else rows


def _mix_blocks(rows: Ints, generator: np.random.Generator) -> Ints:
    """Shuffle blocks of neighbouring rows, and the rows within a few blocks."""
    block_starts = generator.permutation(np.arange(0, len(rows), BLOCK))
    blocks = [rows[start : start + BLOCK] for start in block_starts]
    mixed = [
        generator.permutation(np.concatenate(blocks[start : start + MIXED_BLOCKS]))
        for start in range(0, len(blocks), MIXED_BLOCKS)
    ]
    return np.concatenate(mixed) if mixed else rows


def _share_samples(rule: BatchRule, order: Ints, consumed_samples: int) -> Epoch:
    """Make batches of one size: ranks take turns, sample by sample."""
    assert rule.rank is not None  # all_ranks() makes a single rank of a plain rule
    size, ranks = rule.batch_size or 1, rule.ranks
    remaining = order[consumed_samples:]

    # Give every rank as many samples.
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
        skipped += (len(rank_rows) - full) * ranks
        rank_rows = rank_rows[:full]

    # np.arange counts its steps in float64.  With a step of 2**57, which means "all
    # samples in one batch", it would lose the number of samples.
    size = min(size, max(len(rank_rows), 1))
    bounds = np.arange(0, len(rank_rows), size)
    bounds = np.append(bounds, len(rank_rows)) if len(rank_rows) else np.zeros(1, int)
    consumed = np.minimum(consumed_samples + bounds * ranks, len(order))
    offsets = consumed_samples + bounds[:-1] * ranks + rule.rank
    return Epoch(rank_rows, bounds, skipped, repeated, consumed, offsets)


def _batch_bounds(
    rule: BatchRule, order: Ints, most_batches: int | None = None
) -> Ints:
    """Fill batch after batch until the next sample would break a limit.

    Args:
        rule: A rule with limits.
        order: Rows ``[n]``.
        most_batches: Stop after so many batches; None makes all of them.

    Returns:
        Where each batch begins, and the last one ends ``[batches + 1]``.  With
        ``drop_last`` the samples of a last batch that is not full come after that.
    """
    if not len(order):
        return np.zeros(1, np.int64)

    most_samples = rule.batch_size or len(order)
    if rule.limits:
        totals = _running_totals(rule, order)
        bounds = _cut_at_limits(totals, len(order), most_samples, most_batches)
    else:
        bounds = [*range(0, len(order), most_samples), len(order)]

    is_whole = bounds[-1] == len(order)
    if is_whole and rule.drop_last and not _is_full(rule, order[bounds[-2] :]):
        bounds.pop()
    return np.array(bounds)


class _RunningTotal(NamedTuple):
    """What the samples of an order hold up to each of them, and the limit for it."""

    total: Ints
    """Sum of the samples before each one, and of all of them ``[n + 1]``."""
    limit: int
    """The most that a batch may hold."""


def _running_totals(rule: BatchRule, order: Ints) -> list[_RunningTotal]:
    """Add up what the samples of an order hold, for each limit."""
    totals = []
    for name, limit in rule.limits.items():
        total = np.zeros(len(order) + 1, np.int64)
        np.cumsum(rule.sizes[name][order], out=total[1:])
        # A limit above all samples together never cuts a batch.  It is lowered because
        # adding it to a sum could overflow int64.
        totals.append(_RunningTotal(total, min(limit, int(total[-1]))))
    return totals


def _cut_at_limits(
    totals: list[_RunningTotal],
    samples: int,
    most_samples: int,
    most_batches: int | None,
) -> list[int]:
    """Return where each batch begins, and the last one ends.

    Args:
        totals: What the samples hold up to each of them.
        samples: Samples of the order.
        most_samples: The most samples of a batch.
        most_batches: Stop after so many batches; None makes all of them.
    """
    bounds = [0]
    while bounds[-1] < samples:
        if most_batches is not None and len(bounds) > most_batches:
            break
        start = bounds[-1]
        stop = min(start + most_samples, samples)
        for total, limit in totals:
            # The last sample up to which the sum since ``start`` is within the limit.
            within_limit = total.searchsorted(total[start] + limit, side="right") - 1
            stop = min(stop, int(within_limit))
        # A sample above the limit is a batch of its own.
        bounds.append(max(stop, start + 1))
    return bounds


def _is_full(rule: BatchRule, rows: Ints) -> bool:
    """Return whether no sample at all could be added to a batch."""
    if len(rows) == rule.batch_size:
        return True
    totals = {name: int(rule.sizes[name][rows].sum()) for name in rule.limits}
    return any(totals[name] == limit for name, limit in rule.limits.items())


class _BatchSequence(NamedTuple):
    """The batches of all ranks, in the order in which the ranks take them."""

    rows: Ints
    """The rows of all batches ``[n]``."""
    starts: Ints
    """Where each batch begins in ``rows`` ``[batches]``."""
    stops: Ints
    """Where each batch ends in ``rows`` ``[batches]``."""
    repeated_starts: Ints
    """Where the batches begin that may be repeated, so that every rank gets as many
    ``[ranks]``."""
    repeated_stops: Ints
    """Where these batches end ``[ranks]``."""
    skipped: int = 0
    """Samples that ``drop_last`` leaves out."""
    consumed_samples: int = 0
    """How many samples of the global order come before the first batch."""

    @property
    def consumed(self) -> Ints:
        """How many samples come before each batch, and after the last."""
        sizes = self.stops - self.starts
        return self.consumed_samples + np.concatenate([[0], np.cumsum(sizes)])

    def after(self, consumed_samples: int) -> _BatchSequence:
        """Leave out the batches that earlier runs consumed.

        Raises:
            LoaderError: No batch begins after so many samples.
        """
        consumed = self.consumed
        first = int(np.searchsorted(consumed, consumed_samples))
        if first == len(consumed) or consumed[first] != consumed_samples:
            message = (
                f"No batch begins after {count_of(consumed_samples, 'samples')} of the "
                "epoch."
            )
            why = "its batches were made by another rule"
            fix = "build the loader with the same options; or begin an epoch: "
            raise LoaderError(message, why=why, fix=f"{fix}loader.set_epoch()")
        return self._replace(
            starts=self.starts[first:],
            stops=self.stops[first:],
            consumed_samples=consumed_samples,
        )


def _cut_order(rule: BatchRule, order: Ints, consumed_samples: int) -> _BatchSequence:
    """Cut what is left of an order into batches, one after the other."""
    remaining = order[consumed_samples:]
    bounds = consumed_samples + _batch_bounds(rule, remaining)

    # An uninterrupted epoch repeats its own first batches, so a resumed one must
    # repeat the same: they are cut from the beginning of the whole order.
    first_bounds = _batch_bounds(rule, order, rule.ranks)
    first_starts, first_stops = first_bounds[:-1], first_bounds[1:]
    return _BatchSequence(
        rows=order,
        starts=bounds[:-1],
        stops=bounds[1:],
        repeated_starts=np.resize(first_starts, rule.ranks),
        repeated_stops=np.resize(first_stops, rule.ranks),
        skipped=len(order) - int(bounds[-1]),
        consumed_samples=consumed_samples,
    )


def _shuffle_batches(
    rule: BatchRule, order: Ints, oversized: Ints, generator: np.random.Generator
) -> _BatchSequence:
    """Make batches within each bucket, and shuffle the batches.

    Args:
        rule: How samples become batches.
        order: Rows that may share batches ``[n]``.
        oversized: Rows above a limit, each a batch of its own.
        generator: Draws the order of the batches.
    """
    groups = [order]
    if rule.bucket_by is not None:
        bucket = bucket_of(rule.sizes[rule.bucket_by], rule.buckets)[order]
        groups = [order[bucket == number] for number in range(rule.buckets)]
    groups = [group for group in groups if len(group)]
    group_bounds = [_batch_bounds(rule, group) for group in groups]
    groups += [np.array([row]) for row in oversized.tolist()]
    group_bounds += [np.array([0, 1])] * len(oversized)

    skipped = 0
    group_start = 0
    # Begin with an empty array, so that np.concatenate accepts no groups, too.
    starts, stops = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for group, bounds in zip(groups, group_bounds, strict=True):
        starts.append(group_start + bounds[:-1])
        stops.append(group_start + bounds[1:])
        skipped += len(group) - int(bounds[-1])
        group_start += len(group)
    batch_starts, batch_stops = np.concatenate(starts), np.concatenate(stops)

    if rule.shuffle == "batches" or (rule.shuffle and len(groups) > 1):
        # Of buckets, all batches of one would come before those of the next.
        permutation = generator.permutation(np.arange(len(batch_starts)))
        batch_starts, batch_stops = batch_starts[permutation], batch_stops[permutation]
    return _BatchSequence(
        rows=np.concatenate([np.empty(0, np.int64), *groups]),
        starts=batch_starts,
        stops=batch_stops,
        repeated_starts=np.resize(batch_starts, rule.ranks),
        repeated_stops=np.resize(batch_stops, rule.ranks),
        skipped=skipped,
    )


class _EvenBatches(NamedTuple):
    """Batches of all ranks, as many as give each rank the same number."""

    starts: Ints
    """Where each batch begins in the rows of the sequence ``[batches]``."""
    stops: Ints
    """Where it ends ``[batches]``."""
    offsets: Ints
    """What the random numbers of each batch follow from ``[batches]``."""
    consumed: Ints
    """How many samples come before each batch, and after the last ``[batches + 1]``."""
    skipped: int
    """Samples that are left out."""
    repeated: int = 0
    """Samples that are in two batches."""


def _share_batches(rule: BatchRule, sequence: _BatchSequence) -> Epoch:
    """Share whole batches out to the ranks, equally many to each."""
    even = _make_even(rule, sequence)
    first, step = (0, 1) if rule.rank is None else (rule.rank, rule.ranks)
    starts, stops = even.starts[first::step], even.stops[first::step]

    # Begin with an empty array, so that np.concatenate accepts no batches, too.
    batch_rows = [sequence.rows[:0]]
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        batch_rows.append(sequence.rows[start:stop])
    return Epoch(
        np.concatenate(batch_rows),
        np.concatenate([[0], np.cumsum(stops - starts)]),
        even.skipped,
        even.repeated,
        even.consumed[::step],
        even.offsets[first::step],
    )


def _make_even(rule: BatchRule, sequence: _BatchSequence) -> _EvenBatches:
    """Leave out the last batches, or repeat some, so that ranks have equally many."""
    starts, stops, consumed = sequence.starts, sequence.stops, sequence.consumed
    offsets = consumed[:-1]
    uneven = len(starts) % rule.ranks
    if not uneven:
        return _EvenBatches(starts, stops, offsets, consumed, sequence.skipped)

    if rule.drop_last:
        left_out = int((stops - starts)[-uneven:].sum())
        return _EvenBatches(
            starts[:-uneven],
            stops[:-uneven],
            offsets[:-uneven],
            consumed[:-uneven],
            sequence.skipped + left_out,
        )

    missing = rule.ranks - uneven
    repeated_starts = sequence.repeated_starts[:missing]
    repeated_stops = sequence.repeated_stops[:missing]
    # Offsets beyond the end, so that no other batch has the same.
    offsets_beyond_end = len(sequence.rows) + np.arange(missing)
    return _EvenBatches(
        np.concatenate([starts, repeated_starts]),
        np.concatenate([stops, repeated_stops]),
        np.concatenate([offsets, offsets_beyond_end]),
        np.concatenate([consumed, np.full(missing, consumed[-1])]),
        sequence.skipped,
        repeated=int((repeated_stops - repeated_starts).sum()),
    )


def largest_batch(sizes: Ints, batch_size: int) -> int:
    """Return an upper bound of a batch: the sum of the largest samples.

    Args:
        sizes: What each sample holds ``[n]``.
        batch_size: Samples of a batch.

    >>> largest_batch(np.array([5, 1, 9]), 2)
    14
    """
    count = min(batch_size, len(sizes))
    if not count:
        return 0
    return int(np.partition(sizes, len(sizes) - count)[-count:].sum())
