"""build_loader: read the facts, decide, and build a torch DataLoader that says why."""

from __future__ import annotations

import dataclasses
import multiprocessing
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset

from loaderkit.arguments import parse_arguments
from loaderkit.errors import LoaderError
from loaderkit.loader.facts import read_facts
from loaderkit.loader.fetching import collate_of
from loaderkit.loader.options import LoaderOptions
from loaderkit.loader.plan import LoaderPlan, decide
from loaderkit.loader.planned import PlannedLoader
from loaderkit.loader.resumable import EpochBatches, GivenBatches
from loaderkit.loader.samplers import (
    BatchRule,
    bucket_bounds,
    largest_batch,
    padding_waste,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LIMITS = ("nodes", "edges", "bytes", "tokens")


def build_loader(
    dataset: Any, device: str | torch.device = "cpu", **options: Any
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
        TypeError: There is no such option.
        ValueError: An option has a value it cannot have, or there is no such device.
        LoaderError: What was asked for cannot work here.
    """
    chosen = parse_arguments(LoaderOptions, options, "build_loader")
    seed = chosen.seed
    if seed is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
    collate = chosen.collate_fn
    if collate is None:
        collate = collate_of(dataset, chosen.follow_batch, chosen.exclude_keys)
    elif chosen.follow_batch or chosen.exclude_keys:
        what = "collate_fn was given with follow_batch or exclude_keys."
        why = "the function joins the samples, and does not know of them"
        fix = "drop them, or drop collate_fn and let the graphs be joined as in PyG"
        raise LoaderError(what, why=why, fix=fix)
    batches = _batches(dataset, chosen, seed)
    first = _first_batch(batches, dataset) if chosen.probe else None
    facts = read_facts(
        dataset, device, collate=collate, rows=first,
        largest_bytes=_largest(dataset, chosen),
        context=chosen.multiprocessing_context,
    )  # fmt: skip
    if chosen.collate_fn is not None:  # the user's code may draw random numbers
        facts = dataclasses.replace(facts, quiet=False)
    plan = decide(
        facts, chosen, batching=_in_words(batches, dataset, chosen),
        batches=_count(batches), seed=seed,
    )  # fmt: skip
    for text in plan.warnings:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    loader = _loader(dataset, collate, batches, plan, chosen)
    loader.plan, loader.seeded = plan, not facts.quiet
    loader.seed_asked = chosen.seed is not None
    return loader


def _batches(dataset: Any, chosen: LoaderOptions, seed: int) -> Any:
    """Choose what gives the rows of each batch; None for iterable datasets."""
    if isinstance(dataset, IterableDataset):
        _refuse_for_iterable(chosen)
        return None
    limits = {n: getattr(chosen, f"max_{n}") for n in _LIMITS}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    if chosen.sampler is not None or chosen.batch_sampler is not None:
        return GivenBatches.of(chosen, limits, seed)
    rank, ranks = _ranks(chosen)
    needed = {*limits, *([chosen.bucket_by] if chosen.bucket_by else [])}
    size = chosen.batch_size
    if size is None and not limits:
        size = 1
    rule = BatchRule(
        samples=len(dataset), batch_size=size, limits=limits,
        sizes={name: sizes_of(dataset, name) for name in sorted(needed)},
        shuffle=chosen.shuffle, seed=seed % 2**63, drop_last=chosen.drop_last,
        oversized=chosen.oversized, bucket_by=chosen.bucket_by, buckets=chosen.buckets,
        rank=rank, ranks=ranks,
    )  # fmt: skip
    if not rule.samples:
        what = "The dataset has no samples."
        raise LoaderError(what, why="len(dataset) is 0", fix="look at its source")
    batches = EpochBatches(rule)
    len(batches)  # an oversized sample is told now, not in the first epoch
    return batches


def _refuse_for_iterable(chosen: LoaderOptions) -> None:
    for name in ("sampler", "batch_sampler", "bucket_by", "shuffle"):
        if getattr(chosen, name):
            what = f"{name} was given for an iterable dataset."
            why = "its samples come in its own order"
            raise LoaderError(what, why=why, fix="use it with a map-style dataset")


def _ranks(chosen: LoaderOptions) -> tuple[int, int]:
    if (chosen.rank is None) != (chosen.world_size is None):
        msg = f"give rank and world_size together, got {chosen.rank} and "
        msg += f"{chosen.world_size}"
        raise ValueError(msg)
    if chosen.rank is not None and chosen.world_size is not None:
        return chosen.rank, chosen.world_size
    spread = torch.distributed
    if spread.is_available() and spread.is_initialized():
        return spread.get_rank(), spread.get_world_size()
    return 0, 1


def sizes_of(dataset: Any, name: str) -> Any:
    """Ask a dataset how large its samples are, without reading one.

    Args:
        dataset: With a method ``sizes()`` whose result has them by name.
        name: "nodes", "edges", "bytes" or "tokens".

    Returns:
        A number for each sample ``[n]`` int64.

    Raises:
        LoaderError: It does not know.
    """
    rows = None
    while isinstance(dataset, Subset) and not hasattr(dataset, "sizes"):
        indices = np.asarray(dataset.indices, np.int64)
        rows = indices if rows is None else indices[rows]
        dataset = dataset.dataset
    sizes: Any = dataset.sizes() if hasattr(dataset, "sizes") else None
    found = sizes.get(name) if hasattr(sizes, "get") else getattr(sizes, name, None)
    if found is None:
        what = f"The {name} of the samples are not known."
        why = f"a {type(dataset).__name__} does not say them"
        fix = "loaderkit.pack(dataset, path), or give it sizes() -> {name: array}"
        raise LoaderError(what, why=why, fix=fix)
    array = np.asarray(found, np.int64)
    return array if rows is None else array[rows]


def _first_batch(batches: Any, dataset: Any) -> Sequence[int] | None:
    """Give the rows of a typical batch, without moving the sampler."""
    if isinstance(batches, EpochBatches):
        epoch = batches.current()
        return epoch.batch(len(epoch) // 2) if len(epoch) else None
    if isinstance(batches, GivenBatches):
        return range(min(batches.batch_size or 1, len(dataset)))
    return None


def _largest(dataset: Any, chosen: LoaderOptions) -> int | None:
    if chosen.max_bytes is not None:
        return chosen.max_bytes
    try:
        sizes = sizes_of(dataset, "bytes")
    except (LoaderError, ValueError, AttributeError):
        return None
    return largest_batch(sizes, chosen.batch_size) if chosen.batch_size else None


def _count(batches: Any) -> int | None:
    try:
        return len(batches)
    except TypeError:
        return None


def _in_words(batches: Any, dataset: Any, chosen: LoaderOptions) -> str:
    if batches is None:
        return f"{chosen.batch_size or 1} samples each, in the dataset's order"
    if isinstance(batches, GivenBatches):
        return f"{len(dataset):,} samples, chosen by {batches.name}"
    rule, epoch = batches.rule, batches.current()
    most = [f"at most {limit:,} {name}" for name, limit in rule.limits.items()]
    if rule.batch_size:
        size = f"{rule.batch_size:,} samples"
        most.insert(0, f"at most {size}" if most else f"{size} each")
    order = {True: "shuffled", False: "in order", "block": "shuffled in blocks"}
    parts = [f"{rule.samples:,} samples", " and ".join(most), order[rule.shuffle]]
    parts.append(f"{len(epoch):,} batches an epoch")
    if rule.bucket_by:
        bounds = len(set(bucket_bounds(rule.sizes[rule.bucket_by], rule.buckets)))
        waste = f"{padding_waste(rule):.1%} of padded batches is padding"
        parts.append(f"{bounds} buckets by {rule.bucket_by}, {waste}")
    if epoch.skipped:
        parts.append(f"{epoch.skipped:,} samples left out")
    if rule.ranks > 1:
        parts.append(f"rank {rule.rank} of {rule.ranks}, {epoch.repeated} repeated")
    return ", ".join(parts)


def _loader(
    dataset: Any, collate: Callable[[Any], Any], batches: Any, plan: LoaderPlan,
    chosen: LoaderOptions,
) -> PlannedLoader:  # fmt: skip
    settings: dict[str, Any] = {
        "num_workers": plan.num_workers, "pin_memory": plan.pin_memory,
        "collate_fn": collate, "worker_init_fn": chosen.worker_init_fn,
        "generator": torch.Generator().manual_seed(plan.seed % 2**63),
        "timeout": chosen.timeout,
    }  # fmt: skip
    if plan.num_workers:
        settings |= {
            "persistent_workers": plan.persistent_workers, "in_order": plan.in_order,
            "prefetch_factor": plan.prefetch_factor,
            "multiprocessing_context": multiprocessing.get_context(
                plan.multiprocessing_context
            ),
        }  # fmt: skip
    if batches is None:
        settings |= {
            "batch_size": chosen.batch_size or 1, "drop_last": chosen.drop_last
        }  # fmt: skip
    else:
        settings["batch_sampler"] = batches
    return PlannedLoader(dataset, **settings)
