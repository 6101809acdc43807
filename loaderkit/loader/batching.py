"""How samples become batches, as it was asked for, and what a plan says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.utils.data import BatchSampler, SequentialSampler

from loaderkit.errors import LoaderError
from loaderkit.loader.description import sizes_of
from loaderkit.loader.iterables import IterableRule
from loaderkit.loader.read_facts import TypicalBatch
from loaderkit.loader.resumable import EpochBatches, PublicSamplers
from loaderkit.loader.samplers import (
    MIXED_SHARDS,
    BatchRule,
    bucket_bounds,
    padding_waste,
)
from loaderkit.loader.user_batches import UserBatches, rows_without_drawing
from loaderkit.units import count_of

if TYPE_CHECKING:
    from loaderkit.loader.description import DatasetDescription
    from loaderkit.loader.options import LoaderOptions
    from loaderkit.loader.ranks import Ranks


@dataclass(frozen=True)
class Batching:
    """How samples become batches."""

    rule_in_words: str
    """What every rank, and every run that goes on, must agree on."""
    in_words: str
    """The same, with what it comes to here."""
    batches: EpochBatches | UserBatches | None
    """The batches of this rank; None for iterable datasets."""
    iterable: IterableRule | None
    """The rule of iterable datasets; None for others."""
    public: PublicSamplers
    """What the loader shows."""

    def count(self) -> int | None:
        """Count the batches of an epoch; None where the sampler does not know."""
        try:
            return None if self.batches is None else len(self.batches)
        except (TypeError, ValueError, NotImplementedError):
            return None  # torch says TypeError, PyG's DynamicBatchSampler ValueError

    def typical_batch(
        self, description: DatasetDescription, options: LoaderOptions
    ) -> TypicalBatch:
        """Choose rows to measure, without moving a sampler or downloading a shard."""
        if description.is_missing_shards:
            why = "the samples are in a store, and not mirrored yet"
            return TypicalBatch(None, why)
        if isinstance(self.batches, EpochBatches):
            # One in the middle: buckets begin with the shortest, and the last batch may
            # not be full.
            epoch = self.batches.current()
            return TypicalBatch(epoch.batch(len(epoch) // 2) if len(epoch) else None)
        if self.batches is None:
            return TypicalBatch(None)
        rows = rows_without_drawing(
            self.batches.sampler, description.dataset, options.most_samples
        )
        why = "the sampler's rows are not known before it draws them"
        return TypicalBatch(rows, why)


def choose_batching(
    description: DatasetDescription, options: LoaderOptions, seed: int, ranks: Ranks
) -> Batching:
    """Choose how samples become batches.

    Args:
        description: Of what is read.
        options: What was asked for.
        seed: What the order follows from.
        ranks: Who this process is.

    Returns:
        The batches of this rank, described.

    Raises:
        LoaderError: The sizes that batches follow from are not known, a sample is
            larger than a limit, or it is not clear what a rank reads.
    """
    if description.iterable:
        return _batching_of_stream(description, options, seed, ranks)
    if options.sampler is not None or options.batch_sampler is not None:
        return _batching_of_users_sampler(description, options, seed, ranks)
    return _batching_of_rule(description, options, seed, ranks)


def _batching_of_stream(
    description: DatasetDescription, options: LoaderOptions, seed: int, ranks: Ranks
) -> Batching:
    _check_iterable_ranks(description, options, ranks)
    batch_size = options.most_samples or 1
    # A user's seed may be negative, or of 64 bits and more.
    rule = IterableRule(batch_size, options.drop_last, seed % 2**63, ranks)
    in_words = _joined_words(
        _batch_size_in_words(options),
        "in the dataset's order",
        _drop_last_in_words(options),
        _shared_in_words(ranks),
    )
    return Batching(
        in_words,
        _joined_words(in_words, _rank_in_words(ranks)),
        batches=None,
        iterable=rule,
        public=PublicSamplers(None, None),
    )


def _batching_of_users_sampler(
    description: DatasetDescription, options: LoaderOptions, seed: int, ranks: Ranks
) -> Batching:
    sampler, batch_size = options.sampler, _batch_size_in_words(options)
    if sampler is None:
        sampler, batch_size = options.batch_sampler, ""
    assert sampler is not None
    public = _public_samplers_of_user(description, options)
    batches = UserBatches(
        sampler,
        options.most_samples,
        drop_last=options.drop_last,
        seed=seed,
        ranks=ranks,
        dataset=description.dataset,
    )
    shared = _shared_in_words(ranks)
    if shared and batches.shares_itself:
        shared = f"{shared} by {batches.name}"
    in_words = _joined_words(
        f"samples chosen by {batches.name}",
        batch_size,
        _drop_last_in_words(options),
        shared,
    )
    return Batching(
        in_words,
        _joined_words(in_words, _rank_in_words(ranks)),
        batches=batches,
        iterable=None,
        public=public,
    )


def _batching_of_rule(
    description: DatasetDescription, options: LoaderOptions, seed: int, ranks: Ranks
) -> Batching:
    batches = _epoch_batches(description, options, seed, ranks)
    rule = batches.rule
    # How many samples there are is no part of the rule: a dataset may grow.
    in_words = _joined_words(
        _rule_in_words(rule, _batch_size_in_words(options)),
        _drop_last_in_words(options),
        _shared_in_words(ranks),
    )
    with_outcome = _joined_words(
        f"{count_of(rule.samples, 'samples')}",
        in_words,
        *_outcome_in_words(batches),
        _rank_in_words(ranks),
    )
    public = PublicSamplers.of_rule(
        description.dataset, batches, batched=options.batched
    )
    return Batching(in_words, with_outcome, batches, iterable=None, public=public)


def _epoch_batches(
    description: DatasetDescription, options: LoaderOptions, seed: int, ranks: Ranks
) -> EpochBatches:
    dataset = description.dataset
    counted = set(options.limits)
    if options.bucket_by is not None:
        counted.add(options.bucket_by)
    stored = description.stored_rows
    # Of a store blocks are cut at its shards, so that each is downloaded once an epoch.
    shard_of_row = None
    if options.shuffle == "block" and stored is not None:
        shard_of_row = stored.shard_of_row
    rule = BatchRule(
        samples=len(dataset),
        batch_size=options.most_samples,
        limits=options.limits,
        sizes={name: sizes_of(dataset, name) for name in sorted(counted)},
        shuffle=options.shuffle or False,
        seed=seed % 2**63,
        drop_last=options.drop_last,
        oversized=options.oversized,
        bucket_by=options.bucket_by,
        buckets=options.buckets,
        shard_of_row=shard_of_row,
        rank=ranks.rank,
        ranks=ranks.world_size,
    )
    batches = EpochBatches(rule, dataset=dataset)
    len(batches)  # an oversized sample is told now, not in the first epoch
    return batches


def _check_iterable_ranks(
    description: DatasetDescription, options: LoaderOptions, ranks: Ranks
) -> None:
    is_told = options.rank is not None or description.shares_itself_out
    if is_told or ranks.world_size == 1:
        return
    message = (
        f"An iterable dataset on rank {ranks.rank} of {ranks.world_size}: it is not "
        "known whether it gives every rank its own part."
    )
    fix = f"rank={ranks.rank}, world_size={ranks.world_size} if it gives every rank "
    fix += "everything (each then keeps its share), or rank=0, world_size=1 if it "
    raise LoaderError(message, why=ranks.source, fix=f"{fix}shares itself out")


def _public_samplers_of_user(
    description: DatasetDescription, options: LoaderOptions
) -> PublicSamplers:
    if options.sampler is None:
        # torch has one beside a batch_sampler, too, and reads nothing from it.
        in_order = SequentialSampler(description.dataset)
        return PublicSamplers(in_order, options.batch_sampler)
    if not options.batched:
        return PublicSamplers(options.sampler, None)
    batch_size = options.most_samples or 1
    batch_sampler = BatchSampler(options.sampler, batch_size, options.drop_last)
    return PublicSamplers(options.sampler, batch_sampler)


def _joined_words(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _batch_size_in_words(options: LoaderOptions) -> str:
    """Say how many samples a batch has, where their number is fixed."""
    if not options.batched:
        return "samples one by one, not joined"
    if options.most_samples is None:
        return ""
    return f"{count_of(options.most_samples, 'samples')} each"


def _drop_last_in_words(options: LoaderOptions) -> str:
    return "a last one that is not full is left out" if options.drop_last else ""


def _shared_in_words(ranks: Ranks) -> str:
    return (
        f"shared by {count_of(ranks.world_size, 'ranks')}"
        if ranks.world_size > 1
        else ""
    )


def _rank_in_words(ranks: Ranks) -> str:
    if ranks.world_size == 1:
        return ""
    return f"rank {ranks.rank} of {ranks.world_size}"


def _rule_in_words(rule: BatchRule, batch_size: str) -> str:
    """Say what does not change from epoch to epoch, or from seed to seed."""
    bounds = [f"at most {count_of(limit, name)}" for name, limit in rule.limits.items()]
    if not bounds:
        bounds = [batch_size]
    elif rule.batch_size:
        bounds.insert(0, f"at most {count_of(rule.batch_size, 'samples')}")
    order = {
        True: "shuffled",
        False: "in order",
        "block": "shuffled in blocks",
        "batches": "the same batches in every epoch, shuffled",
    }
    if rule.shard_of_row is not None:
        order["block"] = (
            f"shuffled in blocks of {count_of(MIXED_SHARDS, 'shards')} at a time"
        )
    parts = [_joined_words(" and ".join(bounds), order[rule.shuffle])]
    if rule.bucket_by:
        lengths = bucket_bounds(rule.sizes[rule.bucket_by], rule.buckets)
        parts.append(f"{count_of(len(set(lengths)), 'buckets')} by {rule.bucket_by}")
    if rule.limits and rule.oversized != "raise":
        fates = {"alone": "in batches of their own", "skip": "left out"}
        parts.append(f"larger samples {fates[rule.oversized]}")
    return ", ".join(parts)


def _outcome_in_words(batches: EpochBatches) -> list[str]:
    """Say what the rule comes to in the first epoch."""
    rule, epoch = batches.rule, batches.current()
    parts = [f"{count_of(len(epoch), 'batches')} an epoch"]
    if rule.bucket_by:
        parts.append(f"{padding_waste(rule):.1%} of padded batches is padding")
    if epoch.skipped:
        parts.append(f"{count_of(epoch.skipped, 'samples')} left out")
    if rule.ranks > 1:
        parts.append(f"{epoch.repeated} repeated")
    return parts
