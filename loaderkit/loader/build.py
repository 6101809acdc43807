"""build_loader: read the facts, decide, and build a torch DataLoader that says why."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.data import default_convert

from loaderkit.cache.stored_arrays import measure_disk
from loaderkit.call_keywords import parse_arguments, suggest_keywords
from loaderkit.composed_joining import check_joined_alike
from loaderkit.errors import LoaderError, OptionError
from loaderkit.loader.agreement import OrderAgreement
from loaderkit.loader.batching import choose_batching
from loaderkit.loader.collating import (
    JoinThenTransform,
    OneByOne,
    collate_of,
    is_gathering,
    split_transform,
)
from loaderkit.loader.decisions import batches_per_s
from loaderkit.loader.description import admit_dataset, describe_dataset, sizes_of
from loaderkit.loader.downloads import Readers, plan_downloads
from loaderkit.loader.limits import limit_check_of
from loaderkit.loader.loader_setup import LoaderSetup, ShownBatching
from loaderkit.loader.options import LoaderOptions, check_variables
from loaderkit.loader.plan import decide
from loaderkit.loader.planned import PlannedLoader
from loaderkit.loader.ranks import read_ranks
from loaderkit.loader.read_facts import read_facts
from loaderkit.loader.reading import forecast_reading
from loaderkit.loader.resumable import EpochBatches, Position
from loaderkit.loader.samplers import largest_batch
from loaderkit.loader.seeds import choose_seed
from loaderkit.memory.host import check_host_variables
from loaderkit.memory.page_locked import PageLockedMemory
from loaderkit.value_words import kind_of, show_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack

    from loaderkit.loader.batching import Batching
    from loaderkit.loader.decisions import Decision
    from loaderkit.loader.description import DatasetDescription
    from loaderkit.loader.downloads import DownloadPlan
    from loaderkit.loader.facts import Facts
    from loaderkit.loader.keywords import LoaderKeywords
    from loaderkit.loader.plan import LoaderPlan
    from loaderkit.loader.ranks import Ranks
    from loaderkit.loader.reading import Order, ReadingForecast

D = TypeVar("D")


@suggest_keywords
def build_loader(
    dataset: D,
    device: str | torch.device = "cpu",
    **options: Unpack[LoaderKeywords],
) -> PlannedLoader[D]:
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
    asked = parse_arguments(LoaderOptions, options, build_loader)
    _check_device_argument(device, dataset)
    check_variables(os.environ)
    check_host_variables(os.environ)
    admitted = admit_dataset(dataset, asked)
    ranks = read_ranks(asked.rank, asked.world_size, os.environ)
    seed = choose_seed(asked, ranks)
    collate = _choose_collate(admitted, asked)

    # Without batches torch gives collate_fn a sample, and who measures here a list.
    reading_collate = collate if asked.batched else OneByOne(collate)
    description = describe_dataset(admitted, asked, reading_collate)
    batching = choose_batching(description, asked, seed.value, ranks)
    facts = read_facts(
        description,
        device,
        collate=reading_collate,
        typical=batching.typical_batch(description, asked),
        largest_bytes=_largest_batch_bytes(description, asked),
        options=asked,
    )
    plan = _make_plan(description, facts, asked, batching, seed)
    for text in plan.warnings:
        warnings.warn(text, RuntimeWarning, stacklevel=3)  # past the decorator
    return _make_loader(description, collate, batching, plan, asked, ranks)


def _check_device_argument(device: object, dataset: object) -> None:
    """Refuse what is given in the place of the device: often a batch size."""
    if isinstance(device, str | torch.device):
        return
    message = "device must be a name such as 'cpu' or 'cuda', got "
    message += f"{show_value(device)}."
    why, fix = f"it is {kind_of(device)}", "device='cpu'"
    if isinstance(device, int) and device >= 1:
        why = "the options of build_loader are given by name"
        fix = f"build_loader(dataset, batch_size={int(device)})"
    elif isinstance(device, int):
        # Lightning and Hugging Face's pipelines take -1 for the processor or for all.
        fix = "device='cpu'" if device < 0 else f"device='cuda:{int(device)}'"
    elif first_device := _first_device(device):
        why = "each process trains on one device, and has a loader of its own"
        fix = f"device={first_device!r}"
    elif isinstance(device, bytes):
        fix = f"device={device.decode(errors='replace')!r}"
    elif device is not dataset and _are_columns(dataset, device):
        why = "it has as many items as the dataset: both are probably a part of each "
        why += "sample"
        kind = "TensorDataset" if isinstance(device, torch.Tensor) else "StackDataset"
        fix = f"build_loader(torch.utils.data.{kind}(inputs, targets), batch_size=32)"
    elif hasattr(device, "__getitem__") and hasattr(device, "__len__"):
        why, fix = "the dataset comes first", "build_loader(dataset, 'cpu')"
    raise OptionError(message, why=why, fix=fix)


def _first_device(value: object) -> str:
    """Name the first of several devices, as ``DataParallel`` takes them; else empty."""
    if not isinstance(value, list | tuple) or not value:
        return ""
    if not isinstance(value[0], str | torch.device):
        return ""
    try:
        return str(torch.device(value[0]))
    except RuntimeError:  # a text, and no device
        return ""


def _are_columns(one: object, other: object) -> bool:
    """Tell whether two values hold as many items, and are probably inputs and targets.

    Tensors, as ``TensorDataset`` takes them; arrays and lists, as ``StackDataset``.
    """
    are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    kinds = (np.ndarray, list, tuple)
    if not are_tensors and not (isinstance(one, kinds) and isinstance(other, kinds)):
        return False
    columns: Any = (one, other)
    if any(getattr(column, "ndim", 1) == 0 for column in columns):
        return False
    return len(columns[0]) == len(columns[1])


def _choose_collate(dataset: Any, options: LoaderOptions) -> Callable[[Any], Any]:
    collate = options.collate_fn
    if collate is None and not options.batched:
        collate = default_convert
    if collate is None:
        check_joined_alike(dataset)
        collate = collate_of(dataset, options.follow_batch, options.exclude_keys)
    if options.batch_transform is not None:
        collate = JoinThenTransform(collate, options.batch_transform)
    return collate


def _largest_batch_bytes(
    description: DatasetDescription, options: LoaderOptions
) -> int | None:
    """Bound the bytes of a batch; None where they cannot be known."""
    limit = options.limits.get("bytes")
    if description.is_missing_shards:
        return limit  # sizes are read from all shards: no plan is worth a download
    # The user asked for no sizes: where ``sizes()`` is wrong, or a name means something
    # else in their dataset, or each sample would have to be looked at, the plan does
    # without.
    try:
        sizes = sizes_of(description.dataset, "bytes", measure=limit is not None)
    except (LoaderError, ValueError, AttributeError):
        return limit
    samples = options.most_samples
    if limit is not None:
        # "64GB" of a small dataset bounds nothing: no batch has more than all samples.
        return min(limit, largest_batch(sizes, samples or len(sizes)))
    return None if samples is None else largest_batch(sizes, samples)


def _make_plan(
    description: DatasetDescription,
    facts: Facts,
    options: LoaderOptions,
    batching: Batching,
    seed: Decision[int],
) -> LoaderPlan:
    """Decide the settings, and say what epochs read, download or lack."""
    count = batching.count()
    plan = decide(facts, options, batching=batching.in_words, batches=count, seed=seed)
    reading = _forecast_reading(description, batching, plan, facts)
    downloads = _plan_downloads(description, batching, plan)
    more_warnings = []
    if downloads is not None and downloads.warning:
        more_warnings.append(downloads.warning)
    if count == 0:
        more_warnings.append(_no_batches_in_words(options))
    return replace(
        plan,
        reading=reading,
        loading=_loading_in_words(description.loaded_each_time),
        downloads=downloads,
        warnings=(*plan.warnings, *more_warnings),
    )


def _loading_in_words(class_name: str | None) -> str:
    """Say that there is no cache, and how to have one."""
    if class_name is None:
        return ""
    return (
        f"{class_name} has no cache: load() makes each sample each time it is read; "
        f"{class_name}(..., cache={class_name.lower() + '.lk'!r}) packs them once"
    )


def _no_batches_in_words(options: LoaderOptions) -> str:
    # The last that applies: drop_last empties an epoch that has samples left.
    why = "the sampler gives no rows"
    if options.oversized == "skip":
        why = "all samples are above the limits, and oversized='skip' leaves out such "
        why += "samples"
    if options.drop_last:
        why = "drop_last leaves out all samples"
    return f"an epoch has no batches: {why}"


def _forecast_reading(
    description: DatasetDescription, batching: Batching, plan: LoaderPlan, facts: Facts
) -> ReadingForecast | None:
    """Say what epochs read from disk; None where samples are not in a cache on it."""
    stored, batches = description.stored_arrays, batching.count()
    if stored is None or facts.samples is None or not batches:
        return None
    order: Order = "shuffled"
    samples = facts.samples
    if isinstance(batching.batches, EpochBatches):
        rule = batching.batches.rule
        # Rounded up: the last ranks repeat samples where they do not come out even.
        samples = -(-samples // rule.ranks)
        if rule.shuffle == "block":
            order = "shuffled in blocks"
        elif not rule.shuffle and not rule.bucket_by:
            order = "in order"
    samples_per_s = None
    if facts.measured is not None:
        rate = batches_per_s(facts, plan.num_workers.value)
        samples_per_s = rate * samples / batches
    # How fast the disk is matters where files do not stay in memory, and is measured
    # only where the user lets us measure.
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
    description: DatasetDescription, batching: Batching, plan: LoaderPlan
) -> DownloadPlan | None:
    """Count what epochs download; None where the samples are on local disk."""
    stored, batches = description.stored_rows, batching.batches
    if stored is None or not isinstance(batches, EpochBatches):
        return None
    readers = Readers(plan.num_workers.value, plan.prefetch_factor.value or 1)
    return plan_downloads(stored, batches.current(), batches.rule, readers)


def _choose_page_locked(
    description: DatasetDescription,
    collate: Callable[[Any], Any],
    plan: LoaderPlan,
    options: LoaderOptions,
) -> PageLockedMemory | None:
    """Choose where batches are made; None for ordinary memory."""
    # Workers cannot lock pages for this process; and only what our ``collate`` gathers
    # is made where we say.
    joined, _ = split_transform(collate)
    gathers = options.batched and is_gathering(description.dataset, joined)
    is_made_here = plan.pin_memory.value and not plan.num_workers.value
    return PageLockedMemory() if is_made_here and gathers else None


def _make_loader(
    description: DatasetDescription,
    collate: Callable[[Any], Any],
    batching: Batching,
    plan: LoaderPlan,
    options: LoaderOptions,
    ranks: Ranks,
) -> PlannedLoader:
    batches, public = batching.batches, batching.public
    batch_size = options.most_samples if options.batched else None
    shown = None
    if batches is not None:
        shown = ShownBatching(batch_size, options.drop_last, public.sampler)
    position = Position()
    if isinstance(batches, EpochBatches):
        position = batches.position  # which the samplers that are shown stand at, too
    setup = LoaderSetup(
        asked=options,
        plan=plan,
        batches=batches,
        iterable=batching.iterable,
        position=position,
        shown=shown,
        batched=options.batched,
        batching=batching.rule_in_words,
        seeded=not description.draws_no_random_numbers,
        seed_asked=options.seed is not None,
        agreement=OrderAgreement(ranks),
        must_pin=options.pin_memory is True,
        limit_check=limit_check_of(
            description.dataset, options.limits, options.oversized
        ),
        # Ranks that were given parts of their own may have parts of other lengths.
        stream_length=None if ranks.is_distributed else description.samples,
        page_locked=_choose_page_locked(description, collate, plan, options),
    )

    settings: dict[str, Any] = {
        "num_workers": plan.num_workers.value,
        "pin_memory": plan.pin_memory.value,
        "collate_fn": collate,
        "worker_init_fn": options.worker_init_fn,
        "generator": options.generator,
        "timeout": options.timeout,
    }
    # Without workers torch refuses a start method, to keep them and to prefetch.
    if plan.num_workers.value:
        start_method = plan.multiprocessing_context.value
        context = multiprocessing.get_context(start_method)
        settings["multiprocessing_context"] = context
        settings["persistent_workers"] = plan.persistent_workers.value
        settings["prefetch_factor"] = plan.prefetch_factor.value
        if not plan.in_order.value:  # torch 2.5 does not know it
            settings["in_order"] = False
    # torch takes a batch_sampler alone: with batch_size, shuffle, sampler or drop_last
    # beside it it raises.
    if batches is None:
        settings |= {"batch_size": batch_size, "drop_last": options.drop_last}
    elif options.batched:
        settings["batch_sampler"] = public.batch_sampler
    else:
        settings |= {"batch_size": None, "sampler": public.sampler}
    return PlannedLoader(description.dataset, setup=setup, **settings)
