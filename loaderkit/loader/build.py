"""build_loader: read the facts, decide, and build a torch DataLoader that says why."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    SequentialSampler,
    default_convert,
)

from loaderkit.arguments import parse_arguments, show_value
from loaderkit.cache.stored_arrays import measure_disk
from loaderkit.errors import LoaderError, OptionError
from loaderkit.loader.agreement import OrderAgreement
from loaderkit.loader.collating import JoinThenTransform, OneByOne, collate_of
from loaderkit.loader.downloads import plan_downloads
from loaderkit.loader.facts import read_facts
from loaderkit.loader.iterables import IterableRule
from loaderkit.loader.limits import limit_check_of
from loaderkit.loader.options import LoaderOptions, check_variables
from loaderkit.loader.pipes import shares_out, with_shuffle
from loaderkit.loader.plan import decide, rate
from loaderkit.loader.planned import LoaderSetup, PlannedLoader
from loaderkit.loader.ranks import Ranks, read_ranks
from loaderkit.loader.reading import forecast_reading
from loaderkit.loader.resumable import EpochBatches, Position, PublicSamplers
from loaderkit.loader.samplers import (
    MIXED_SHARDS,
    BatchRule,
    bucket_bounds,
    largest_batch,
    padding_waste,
)
from loaderkit.loader.stateful import length_of
from loaderkit.loader.subject import (
    check_dataset,
    check_graph_fields,
    sizes_of,
    stored_arrays_of,
    stored_rows_of,
)
from loaderkit.loader.user_batches import UserBatches, rows_without_drawing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from loaderkit.loader.downloads import DownloadPlan
    from loaderkit.loader.facts import Facts
    from loaderkit.loader.keywords import LoaderKeywords
    from loaderkit.loader.plan import LoaderPlan
    from loaderkit.loader.reading import Order, ReadingForecast

    Ints = NDArray[np.int64]


def build_loader(
    dataset: Any,
    device: str | torch.device = "cpu",
    **options: Unpack[LoaderKeywords],
) -> PlannedLoader:
    """Build a DataLoader whose settings fit the dataset, the device and the machine.

    Args:
        dataset: Any dataset: ours, PyG's, map-style, a list, or iterable.
        device: Where the batches go; they are made on the CPU.
        **options: See ``LoaderOptions``: ``batch_size``, ``max_nodes``, ``shuffle``,
            ``seed``, ``num_workers`` ...  What is given wins over the plan.

    Returns:
        A torch ``DataLoader``; ``print(loader.plan)`` says why it is as it is.

    Raises:
        OptionError: There is no such option, or it cannot have this value; also a
            ``TypeError`` and a ``ValueError``.  Or there is no such device.
        LoaderError: What was asked for cannot work here.
    """
    chosen = parse_arguments(LoaderOptions, options, "build_loader")
    given_device: object = device
    if not isinstance(given_device, str | torch.device):
        what = "device must be a name such as 'cpu' or 'cuda', got "
        what += f"{show_value(device)}."
        why = "the options of build_loader are given by name"
        raise OptionError(
            what, why=why, fix=f"build_loader(dataset, batch_size={show_value(device)})"
        )
    check_variables(os.environ)
    check_dataset(dataset, chosen)
    check_graph_fields(dataset, chosen)
    if isinstance(chosen.shuffle, bool):
        dataset = with_shuffle(dataset, shuffle=chosen.shuffle)
    ranks = read_ranks(chosen.rank, chosen.world_size, os.environ)
    seed = choose_seed(chosen, ranks)
    collate = chosen.collate_fn
    if collate is None and not chosen.batched:
        collate = default_convert
    if collate is None:
        collate = collate_of(dataset, chosen.follow_batch, chosen.exclude_keys)
    if chosen.batch_transform is not None:
        collate = JoinThenTransform(collate, chosen.batch_transform)
    batching = _choose_batching(dataset, chosen, seed.value, ranks)
    why_no_rows = ""
    if not batching.iterable and not isinstance(batching.batches, EpochBatches):
        why_no_rows = "the sampler's rows are not known before it draws them"
    rows = batching.typical_rows(dataset, chosen)
    stored = stored_rows_of(dataset)
    if stored is not None and stored.is_missing.any():
        rows, why_no_rows = None, "the samples are in a store, and not mirrored yet"
    facts = read_facts(
        dataset, device, collate=collate if chosen.batched else OneByOne(collate),
        rows=rows, why_no_rows=why_no_rows,
        largest_bytes=_largest(dataset, chosen), options=chosen,
    )  # fmt: skip
    if chosen.collate_fn is not None or chosen.batch_transform is not None:
        # The user's code may draw random numbers.
        facts = replace(facts, quiet=False)
    plan = decide(
        facts, chosen, batching=batching.in_words, batches=batching.count(),
        seed=seed.value, seed_reason=seed.reason,
    )  # fmt: skip
    plan = replace(plan, reading=_forecast_reading(dataset, batching, plan, facts))
    downloads = _plan_downloads(dataset, batching.batches)
    if downloads is not None:
        warned = (*plan.warnings, downloads.warning) if downloads.warning else ()
        plan = replace(plan, downloads=downloads, warnings=warned or plan.warnings)
    if batching.count() == 0:
        why = "the sampler gives no rows"
        if chosen.oversized == "skip":
            why = "all samples are above the limits, and oversized='skip' leaves out "
            why += "such samples"
        if chosen.drop_last:
            why = "drop_last leaves out all samples"
        text = f"an epoch has no batches: {why}"
        plan = replace(plan, warnings=(*plan.warnings, text))
    for text in plan.warnings:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return _make_loader(dataset, collate, batching, plan, chosen, facts, ranks)


@dataclass(frozen=True)
class Seed:
    """What the order and all random numbers of a loader follow from."""

    value: int
    """The seed."""
    reason: str
    """Why this one."""


def choose_seed(options: LoaderOptions, ranks: Ranks) -> Seed:
    """Choose a seed that every rank chooses alike.

    Args:
        options: What was asked for.
        ranks: Who this process is.

    Returns:
        The one that was asked for, else one that torch draws.  Several ranks cannot
        draw one, since as a rule each has seeded torch with another number, so that
        they would shuffle apart; asking the others would hang where only some build
        a loader.  They take 0, as torch's DistributedSampler does.
    """
    if options.seed is not None:
        reason = "order and random numbers follow from it alone"
        if ranks.several:
            reason += "; the same on every rank, which is compared when the first "
            reason += "epoch begins if torch.distributed is initialized then"
        return Seed(options.seed, reason)
    if ranks.several and options.generator is None:
        reason = "the same on every rank, as in torch's DistributedSampler; ask for "
        return Seed(0, f"{reason}another")
    drawn = torch.empty((), dtype=torch.int64).random_(generator=options.generator)
    return Seed(int(drawn), "order and random numbers follow from it alone")


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

    def typical_rows(
        self, dataset: Any, options: LoaderOptions
    ) -> Sequence[int] | None:
        """Give the rows of a batch to measure, without moving a sampler."""
        if isinstance(self.batches, EpochBatches):
            epoch = self.batches.current()
            return epoch.batch(len(epoch) // 2) if len(epoch) else None
        if self.batches is None:
            return None
        return rows_without_drawing(self.batches.sampler, dataset, options.most_samples)


def _choose_batching(
    dataset: Any, options: LoaderOptions, seed: int, ranks: Ranks
) -> Batching:
    size, each = options.most_samples, _each_in_words(options)
    shared = f"shared by {ranks.world_size} ranks" if ranks.world_size > 1 else ""
    mine = f"rank {ranks.rank} of {ranks.world_size}" if ranks.world_size > 1 else ""
    full = "a last one that is not full is left out" if options.drop_last else ""
    if isinstance(dataset, IterableDataset):
        _check_iterable_ranks(dataset, options, ranks)
        rule = IterableRule(size or 1, options.drop_last, seed % 2**63, ranks)
        words = _listed(each, "in the dataset's order", full, shared)
        return Batching(
            words, _listed(words, mine), None, rule, PublicSamplers(None, None)
        )
    if options.sampler is not None or options.batch_sampler is not None:
        public = _public_of_user(dataset, options)
        given = options.sampler
        if given is None:
            given, each = options.batch_sampler, ""
        chosen = UserBatches(
            given, size, drop_last=options.drop_last, seed=seed, ranks=ranks,
            dataset=dataset,
        )  # fmt: skip
        if chosen.shares_itself:
            shared = shared and f"{shared} by {chosen.name}"
        words = _listed(f"samples chosen by {chosen.name}", each, full, shared)
        return Batching(words, _listed(words, mine), chosen, None, public)
    batches = _batches_of_rule(dataset, options, seed, ranks)
    # How many samples there are is no part of the rule: a dataset may grow.
    words = _listed(_rule_in_words(batches.rule, each), full, shared)
    count = f"{batches.rule.samples:,} samples"
    outcome = _outcome_in_words(batches)
    return Batching(
        words, _listed(count, words, *outcome, mine), batches, None,
        PublicSamplers.of_rule(dataset, batches, batched=options.batched),
    )  # fmt: skip


def _each_in_words(options: LoaderOptions) -> str:
    """Say how many samples a batch has, where their number is fixed."""
    if not options.batched:
        return "samples one by one, not joined"
    most = options.most_samples
    return "" if most is None else f"{most} samples each"


def _listed(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _check_iterable_ranks(dataset: Any, options: LoaderOptions, ranks: Ranks) -> None:
    if options.rank is not None or ranks.world_size == 1 or shares_out(dataset):
        return
    what = f"An iterable dataset on rank {ranks.rank} of {ranks.world_size}: it is not "
    what += "known whether it gives every rank its own part."
    fix = f"rank={ranks.rank}, world_size={ranks.world_size} if it gives every rank "
    fix += "everything (each then keeps its share), or rank=0, world_size=1 if it "
    raise LoaderError(what, why=ranks.told_by, fix=f"{fix}shares itself out")


def _public_of_user(dataset: Any, options: LoaderOptions) -> PublicSamplers:
    if options.sampler is None:
        # torch has one beside a batch_sampler, too, and reads nothing from it.
        return PublicSamplers(SequentialSampler(dataset), options.batch_sampler)
    if not options.batched:
        return PublicSamplers(options.sampler, None)
    size, drop_last = options.most_samples or 1, options.drop_last
    return PublicSamplers(
        options.sampler, BatchSampler(options.sampler, size, drop_last)
    )


def _batches_of_rule(
    dataset: Any, options: LoaderOptions, seed: int, ranks: Ranks
) -> EpochBatches:
    limits = options.limits
    needed = {*limits, *([options.bucket_by] if options.bucket_by else [])}
    rule = BatchRule(
        samples=len(dataset), batch_size=options.most_samples, limits=limits,
        sizes={name: sizes_of(dataset, name) for name in sorted(needed)},
        shuffle=options.shuffle or False, seed=seed % 2**63,
        drop_last=options.drop_last,
        oversized=options.oversized, bucket_by=options.bucket_by,
        buckets=options.buckets, rank=ranks.rank, ranks=ranks.world_size,
        shard_of_row=_shard_of_row(dataset) if options.shuffle == "block" else None,
    )  # fmt: skip
    batches = EpochBatches(rule, dataset=dataset)
    len(batches)  # an oversized sample is told now, not in the first epoch
    return batches


def _shard_of_row(dataset: Any) -> Ints | None:
    stored = stored_rows_of(dataset)
    return None if stored is None else stored.shard_of_row


def _forecast_reading(
    dataset: Any, batching: Batching, plan: LoaderPlan, facts: Facts
) -> ReadingForecast | None:
    """Say what epochs read from disk; None where samples are not in a cache on it."""
    stored, batches = stored_arrays_of(dataset), batching.count()
    if stored is None or facts.samples is None or not batches:
        return None
    order: Order = "shuffled"
    samples = facts.samples
    if isinstance(batching.batches, EpochBatches):
        rule = batching.batches.rule
        samples = -(-samples // rule.ranks)
        if rule.shuffle == "block":
            order = "shuffled in blocks"
        elif not rule.shuffle and not rule.bucket_by:
            order = "in order"
    samples_per_s = None
    if facts.measured is not None:
        samples_per_s = rate(facts, plan.num_workers) * samples / batches
    is_larger = stored.file_bytes > stored.free_bytes
    disk = measure_disk(stored.files) if is_larger and facts.measured else None
    return forecast_reading(
        stored,
        samples=samples,
        batches=batches,
        order=order,
        samples_per_s=samples_per_s,
        disk=disk,
    )


def _plan_downloads(
    dataset: Any, batches: EpochBatches | UserBatches | None
) -> DownloadPlan | None:
    """Count what epochs download; None where the samples are on local disk."""
    stored = stored_rows_of(dataset)
    if stored is None or not isinstance(batches, EpochBatches):
        return None
    rule = batches.rule
    is_local = rule.shuffle is not True and rule.bucket_by is None
    return plan_downloads(stored, batches.current(), is_local=is_local)


def _largest(dataset: Any, options: LoaderOptions) -> int | None:
    if options.max_bytes is not None:
        return options.max_bytes
    stored = stored_rows_of(dataset)
    if stored is not None and stored.is_missing.any():
        return None  # sizes are read from all shards: no plan is worth downloading them
    try:
        sizes = sizes_of(dataset, "bytes")
    except (LoaderError, ValueError, AttributeError):
        return None
    most = options.most_samples
    return None if most is None else largest_batch(sizes, most)


def _rule_in_words(rule: BatchRule, each: str) -> str:
    """Say what does not change from epoch to epoch, or from seed to seed."""
    most = [f"at most {limit:,} {name}" for name, limit in rule.limits.items()]
    if not most:
        most = [each]
    elif rule.batch_size:
        most.insert(0, f"at most {rule.batch_size:,} samples")
    order = {True: "shuffled", False: "in order", "block": "shuffled in blocks"}
    if rule.shard_of_row is not None:
        order["block"] = f"shuffled in blocks of {MIXED_SHARDS} shards at a time"
    parts = [_listed(" and ".join(most), order[rule.shuffle])]
    if rule.bucket_by:
        bounds = len(set(bucket_bounds(rule.sizes[rule.bucket_by], rule.buckets)))
        parts.append(f"{bounds} buckets by {rule.bucket_by}")
    if rule.limits and rule.oversized != "raise":
        words = {"alone": "in batches of their own", "skip": "left out"}
        parts.append(f"larger samples {words[rule.oversized]}")
    return ", ".join(parts)


def _outcome_in_words(batches: EpochBatches) -> list[str]:
    """Say what the rule comes to in the first epoch."""
    rule, epoch = batches.rule, batches.current()
    parts = [f"{len(epoch):,} batches an epoch"]
    if rule.bucket_by:
        parts.append(f"{padding_waste(rule):.1%} of padded batches is padding")
    if epoch.skipped:
        parts.append(f"{epoch.skipped:,} samples left out")
    if rule.ranks > 1:
        parts.append(f"{epoch.repeated} repeated")
    return parts


def _order_is_chosen(
    options: LoaderOptions, batches: EpochBatches | UserBatches | None
) -> bool:
    """Tell whether the order follows from something that may differ between ranks."""
    if options.seed is not None or options.generator is not None:
        return True
    return isinstance(batches, UserBatches) and not batches.shares_itself


def _make_loader(
    dataset: Any, collate: Callable[[Any], Any], batching: Batching, plan: LoaderPlan,
    chosen: LoaderOptions, facts: Facts, ranks: Ranks,
) -> PlannedLoader:  # fmt: skip
    batches, public = batching.batches, batching.public
    settings: dict[str, Any] = {
        "num_workers": plan.num_workers, "pin_memory": plan.pin_memory,
        "collate_fn": collate, "worker_init_fn": chosen.worker_init_fn,
        "generator": chosen.generator, "timeout": chosen.timeout,
    }  # fmt: skip
    if plan.num_workers:
        context = multiprocessing.get_context(plan.multiprocessing_context)
        settings |= {
            "persistent_workers": plan.persistent_workers,
            "prefetch_factor": plan.prefetch_factor,
            "multiprocessing_context": context,
        }
        if not plan.in_order:  # torch 2.5 does not know it
            settings["in_order"] = False
    size = chosen.most_samples if chosen.batched else None
    if batches is None:
        settings |= {"batch_size": size, "drop_last": chosen.drop_last}
    elif chosen.batched:
        settings["batch_sampler"] = public.batch_sampler
    else:
        settings |= {"batch_size": None, "sampler": public.sampler}
    position = Position()
    if isinstance(batches, EpochBatches):
        position = batches.position
    setup = LoaderSetup(
        plan=plan, batches=batches, iterable=batching.iterable, position=position,
        batch_size=size, drop_last=chosen.drop_last, sampler=public.sampler,
        batched=chosen.batched,
        batching=batching.rule_in_words, seeded=not facts.quiet,
        seed_asked=chosen.seed is not None,
        agreement=OrderAgreement(ranks, chosen=_order_is_chosen(chosen, batches)),
        limit_check=limit_check_of(dataset, chosen.limits, chosen.oversized),
        # Ranks that were given parts of their own may have parts of other lengths.
        stream_length=None if ranks.several else length_of(dataset),
    )  # fmt: skip
    return PlannedLoader(dataset, setup=setup, **settings)
