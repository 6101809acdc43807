"""A dataset at the door: refused if it is none, then asked once, and described.

What is refused here would fail later, or read nonsense.  What may change while a loader
lives (how many samples there are, their sizes, a state) is asked again as each epoch
begins; all else is in the description.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import (
    ConcatDataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
)

from loaderkit.dataset_protocol import (
    ask_graph_fields,
    ask_sizes,
    ask_stored_arrays,
    ask_stored_rows,
    ask_what_is_loaded_each_time,
    innermost,
)
from loaderkit.errors import LoaderError, OptionError
from loaderkit.forking import ForkHazard, find_fork_hazard
from loaderkit.habits import SIZE_NAMES
from loaderkit.joining import check_known_keys, holds_graphs, known_keys
from loaderkit.loader.collating import is_gathering, split_transform
from loaderkit.loader.options import SIZES, START_METHOD_VARIABLE
from loaderkit.loader.pipes import as_sent, is_pipe, shares_out, with_shuffle
from loaderkit.loader.stateful import is_stateful
from loaderkit.mistaken import mistaken_for_dataset
from loaderkit.nearest_names import nearest_name
from loaderkit.sample_sizes import SizesInMemory, lengths_in, lies_in_memory
from loaderkit.sending import Obstacle, find_obstacle
from loaderkit.units import count_of
from loaderkit.value_words import kind_of, with_article

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from loaderkit.array_types import Ints
    from loaderkit.cache.download_ahead import StoredRows
    from loaderkit.cache.stored_arrays import StoredArrays
    from loaderkit.loader.collating import Collate
    from loaderkit.loader.options import LoaderOptions

_MOST_TOTAL = 2.0**61
"""Sizes of all samples together must be smaller.  Derived: where a batch ends is found
by adding a limit, which is no larger, to sums of sizes, and the result must fit int64
with its rounding in float64."""


@dataclass(frozen=True, eq=False)
class DatasetDescription:
    """What a dataset is like, asked once."""

    dataset: Any
    """What is read."""
    samples: int | None
    """How many it has; None where it does not say."""
    iterable: bool
    """It is iterated rather than indexed."""
    shares_itself_out: bool
    """It gives each rank a part by itself: a pipe with a ``sharding_filter``."""
    gathering: bool
    """Batches come from a cache, finished, and no code of the user's runs."""
    draws_no_random_numbers: bool
    """Making a batch draws no random numbers: no code of the user's runs."""
    stateful: bool
    """It has a ``state_dict``, which each worker's copy changes by itself."""
    obstacle: Obstacle | None
    """What keeps it from a spawned worker; None too when it need not go to one."""
    fork_hazard: ForkHazard | None
    """What it holds that does not survive a fork."""
    stored_rows: StoredRows | None
    """In which shards of a store its samples are; None if on this machine."""
    stored_arrays: StoredArrays | None
    """What its cache takes on local disk; None without one there."""
    loaded_each_time: str | None
    """The class of samples that are made at each read; None where they are not."""

    @property
    def is_missing_shards(self) -> bool:
        """Whether some of its shards would have to be downloaded first."""
        return self.stored_rows is not None and bool(self.stored_rows.is_missing.any())

    @property
    def later_epoch_bytes(self) -> int | None:
        """Bytes of its shards, if a mirror has room for them; None if not in a store.

        Where it has not, each epoch waits for downloads, and workers that are kept
        would hold shards between epochs.
        """
        stored = self.stored_rows
        if stored is None:
            return None
        shards = len(stored.shard_bytes)
        is_read = np.bincount(stored.shard_of_row, minlength=shards) > 0
        nbytes = int(stored.shard_bytes[is_read].sum())
        most_bytes = stored.remote.mirror_bytes
        return nbytes if most_bytes is None or nbytes <= most_bytes else None


def admit_dataset(dataset: object, options: LoaderOptions) -> Any:
    """Refuse what is no dataset, or not one for these options.

    Args:
        dataset: What was given as one.
        options: What was asked for.

    Returns:
        The dataset; a pipe with its shufflers set.

    Raises:
        OptionError: It is no dataset, or an option makes no sense for it.
        LoaderError: It cannot be read so, or is empty.
    """
    check_dataset(dataset, options)
    check_graph_fields(dataset, options)
    if isinstance(options.shuffle, bool):
        return with_shuffle(dataset, shuffle=options.shuffle)
    return dataset


def describe_dataset(
    dataset: object, options: LoaderOptions, collate: Collate
) -> DatasetDescription:
    """Ask a dataset all that is decided once.

    Args:
        dataset: Admitted.
        options: What was asked for.
        collate: How its samples are joined.

    Returns:
        The description; no sample is read for it.
    """
    joined_by_user = options.collate_fn is not None
    changed_by_user = options.batch_transform is not None
    users_code_makes_batches = joined_by_user or changed_by_user
    # All that the plan may still choose, or the user has chosen; nothing needs to be
    # pickled where it can only be forked.
    methods = {
        options.multiprocessing_context or multiprocessing.get_start_method(),
        os.environ.get(START_METHOD_VARIABLE) or "fork",
    }
    obstacle = None
    if methods != {"fork"}:
        # What stands in the way of "spawn" does so of the fork server too.
        method = "forkserver" if "forkserver" in methods else "spawn"
        sent = _sent_to_workers(dataset, collate, options)
        obstacle = find_obstacle(sent, method)
    return DatasetDescription(
        dataset=dataset,
        samples=_length(dataset),
        iterable=isinstance(dataset, IterableDataset),
        shares_itself_out=shares_out(dataset),
        gathering=is_gathering(dataset, collate),
        draws_no_random_numbers=reading_draws_no_random_numbers(dataset)
        and not users_code_makes_batches,
        stateful=is_stateful(dataset),
        obstacle=obstacle,
        fork_hazard=find_fork_hazard(dataset=dataset),
        stored_rows=ask_stored_rows(dataset),
        stored_arrays=ask_stored_arrays(dataset),
        loaded_each_time=ask_what_is_loaded_each_time(dataset),
    )


def check_dataset(dataset: object, options: LoaderOptions) -> None:
    """Refuse what is no dataset.

    Args:
        dataset: What was given as one.
        options: What was asked for; a sampler may choose keys of any kind.

    Raises:
        OptionError: It is a path, a graph, a loader or the like.
        LoaderError: It is a dataset that cannot be read so, or is empty.
    """
    if isinstance(dataset, IterableDataset):
        _check_iterable_options(options, pipe=is_pipe(dataset))
        return
    _refuse_other_things(dataset)
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
        why = "samples are read by their number: dataset[0]"
        raise _no_dataset(dataset, why, "an IterableDataset, or list(samples)")
    if options.sampler is not None or options.batch_sampler is not None:
        return

    # A sampler may choose its keys; ours chooses the numbers from 0 on.
    if isinstance(dataset, Mapping) and set(dataset) != set(range(len(dataset))):
        fix = "list(samples.values()), or sampler=list(samples)"
        raise _no_dataset(dataset, "its keys are not the numbers from 0 on", fix)
    try:
        samples = len(dataset)  # type: ignore[arg-type]
    except TypeError as error:
        fix = "give it __len__, a sampler, or make it an IterableDataset"
        raise _no_dataset(dataset, f"it has no length: {error}", fix) from error
    _check_subset_rows(dataset)
    if not samples:
        message = "The dataset has no samples."
        raise LoaderError(message, why="len(dataset) is 0", fix="look at its source")


def _check_subset_rows(dataset: object) -> None:
    """Refuse a subset of rows that what it is a part of does not have.

    Its class may take other numbers than these, as one that repeats its samples does;
    so only what is known to have no more rows is asked.
    """
    while isinstance(dataset, Subset):
        whole: Any = dataset.dataset
        indices = np.asarray(dataset.indices)
        has_known_rows = isinstance(whole, list | tuple | TensorDataset | Subset)
        if (has_known_rows or is_gathering(whole)) and indices.dtype.kind in "iu":
            samples = len(whole)
            missing = indices[(indices >= samples) | (indices < -samples)]
            if missing.size:
                message = (
                    f"A Subset names row {missing.flat[0]} of "
                    f"{count_of(samples, 'samples')}."
                )
                why = f"{missing.size:,} of its {indices.size:,} indices are not there"
                fix = f"Subset(dataset, indices) with indices from 0 to {samples - 1}"
                raise OptionError(message, why=why, fix=fix)
        dataset = whole


def check_graph_fields(dataset: Any, options: LoaderOptions) -> None:
    """Refuse names of fields that no graph has, where that is known before reading.

    Code of the user's, such as a transform, may add fields: of names that are not in a
    batch then, joining warns.

    Args:
        dataset: What is read.
        options: What was asked for.

    Raises:
        OptionError: ``follow_batch`` or ``exclude_keys`` would do nothing.
    """
    follow, exclude = options.follow_batch or (), options.exclude_keys or ()
    if not follow and not exclude:
        return
    known = ask_graph_fields(dataset)
    if isinstance(innermost(dataset), list | tuple):
        # Samples that lie in memory: looking at them costs nothing.
        samples = (dataset[row] for row in range(len(dataset)))
        known = frozenset(known_keys(samples, {*follow, *exclude}))
    if known:  # samples without a graph are refused where they are joined
        check_known_keys(follow, exclude, known)


def sizes_of(dataset: object, name: str, *, measure: bool = True) -> Ints:
    """Ask a dataset how large its samples are; look at those that lie in memory.

    Args:
        dataset: With a method ``sizes()`` whose result has them by name, or a list or
            the like.
        name: "nodes", "edges", "bytes" or "tokens".
        measure: Look at samples that lie in memory.

    Returns:
        A number for each sample ``[n]`` int64.

    Raises:
        LoaderError: It does not know, or what it says cannot be.
    """
    asked = ask_sizes(dataset)
    table = asked.sizes
    if table is None and measure and lies_in_memory(asked.dataset):
        table = SizesInMemory(asked.dataset)
    if table is None and isinstance(asked.dataset, ConcatDataset):
        of_members = [
            sizes_of(member, name, measure=measure) for member in asked.dataset.datasets
        ]
        sizes: ArrayLike | None = np.concatenate(of_members)
    elif table is None and type(asked.dataset) is StackDataset:
        sizes = _sizes_of_stack(asked.dataset, name, measure=measure)
    else:
        sizes = _sizes_in_table(table, name)
    if sizes is None:
        raise _unknown_sizes(name, asked.dataset, table)

    whole = _whole_numbers(name, sizes)
    samples = len(asked.dataset)
    if whole.shape != (samples,) or (whole < 0).any():
        smallest = whole.min() if whole.size else None
        message = f"sizes() says {name} of shape {whole.shape}, the smallest "
        message += f"{smallest}, for {samples} samples."
        fix = "one number for each sample, at least 0"
        raise LoaderError(message, why="they decide what fits a batch", fix=fix)

    numbers: Ints = whole.astype(np.int64)
    if asked.rows is not None:
        numbers = numbers[asked.rows]
    total = float(numbers.sum(dtype=np.float64))  # a sum in int64 may overflow
    if total >= _MOST_TOTAL:
        message = f"sizes() says {total:.3g} {name} in all."
        why = "batches are cut where sums of them reach a limit, in int64"
        fix = "count in larger units, or correct sizes()"
        raise LoaderError(message, why=why, fix=fix)
    return numbers


def _sizes_of_stack(
    stack: StackDataset[Any], name: str, *, measure: bool
) -> Ints | None:
    """Add up the sizes of what samples are stacked of; None where a part's matter.

    A sample has the nodes and edges of all its graphs, and the tokens of the item that
    has most, as in a cache of such samples.
    """
    members = (
        stack.datasets.values() if isinstance(stack.datasets, dict) else stack.datasets
    )
    known: list[Ints] = []
    for member in members:
        try:
            known.append(sizes_of(member, name, measure=measure))
        except LoaderError:
            # A part without graphs, such as labels, has no nodes to count, and one of
            # single numbers no tokens.  Whether it has is seen at its first sample.
            if not len(member) or _may_count(name, member[0]):
                return None
    if not known:
        return None
    total: Ints = np.max(known, axis=0) if name == "tokens" else np.sum(known, axis=0)
    return total


def _may_count(name: str, sample: object) -> bool:
    """Tell whether a sample may hold some of what is counted."""
    if name in {"nodes", "edges"}:
        return holds_graphs(sample)
    return name != "tokens" or any(True for _ in lengths_in(sample))


def _sizes_in_table(table: object, name: str) -> ArrayLike | None:
    """Look up sizes in a table, or an object with attributes; None if not there."""
    if hasattr(table, "get"):
        sizes: ArrayLike | None = table.get(name)
        return sizes
    return getattr(table, name, None)


def reading_draws_no_random_numbers(dataset: object) -> bool:
    """Tell whether reading a sample draws no random numbers: no user's code runs."""
    inner = innermost(dataset)
    return lies_in_memory(inner) or is_gathering(inner)


def _sent_to_workers(
    dataset: object, collate: Collate, options: LoaderOptions
) -> Mapping[str, object]:
    """Name what a spawned worker gets as the caller named it."""
    join, transform = split_transform(collate)
    return {
        "dataset": as_sent(dataset),
        "collate_fn": join,
        "batch_transform": transform,
        "worker_init_fn": options.worker_init_fn,
    }


def _length(dataset: object) -> int | None:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        return None


def _no_dataset(dataset: object, why: str, fix: str) -> OptionError:
    kind = with_article(type(dataset).__name__)
    message = f"{kind} is no dataset to build a loader of."
    return OptionError(message, why=why, fix=fix)


def _refuse_other_things(dataset: object) -> None:
    """Refuse things that have rows of some kind, but not samples."""
    mistake = mistaken_for_dataset(dataset)
    if mistake is None:
        return
    fix = mistake.fix("build_loader({})")
    if isinstance(dataset, Iterator):
        fix += ", or an IterableDataset that makes a new one each epoch"
    raise OptionError(mistake.message, why=mistake.why, fix=fix)


def _check_iterable_options(options: LoaderOptions, *, pipe: bool) -> None:
    meaningless = {"sampler", "batch_sampler", "shuffle", "bucket_by", "oversized"}
    meaningless |= {f"max_{name}" for name in options.limits}
    if pipe and options.shuffle is True:
        meaningless.remove("shuffle")  # a pipe has shufflers of its own, or gets one
    for name in options.given():
        if name in meaningless:
            message = f"{name} was given for an iterable dataset."
            why = "its samples come one by one, in its own order, and their sizes are "
            why += "not known before"
            fix = f"drop {name}; or pack(dataset, path), and a loader of that"
            raise OptionError(message, why=why, fix=fix)


def _unknown_sizes(name: str, dataset: object, table: object) -> LoaderError:
    verb = "are" if name.endswith("s") else "is"  # a name of the user's, as "length"
    message = f"The {name} of the samples {verb} not known."
    why = f"a {type(dataset).__name__} does not say them"
    fix = "loaderkit.pack(dataset, path), or give it sizes() -> {name: array}"
    if type(dataset) is StackDataset:
        why = f"a part of the StackDataset does not say the {name} of its items"
        fix = "loaderkit.pack(part, path) of each part"
    if table is not None:
        known = _names_in(table)
        is_measured = isinstance(table, SizesInMemory)
        why = "some sample has no such number"
        if not known and not is_measured:
            why = f"its sizes() gave {kind_of(table)}"
        if known and not is_measured:
            # A name that no sample has is one as much as a number that one lacks.
            why = f"its sizes() has {' and '.join(known)}, and no {name}"
        limits = ["batch_size", *(f"max_{size}" for size in known)]
        fix = f"limit by {' or '.join(limits)}"
        if known:
            fix += f", and {' or '.join(f'bucket_by={size!r}' for size in known)}"
        if not is_measured:
            fix += ", or give it sizes() -> {name: array}"
        nearest = _nearest_size(name, known)
        if nearest is not None:
            fix = f"did you mean {nearest!r}?"
    return LoaderError(message, why=why, fix=fix)


def _nearest_size(name: str, known: list[str]) -> str | None:
    """Find the size that was meant, which other libraries call otherwise."""
    named = next((size for size, names in SIZE_NAMES.items() if name in names), None)
    if named in known:
        return named
    return nearest_name(name, known)


def _names_in(table: object) -> list[str]:
    """Name the sizes that a dataset does say."""
    if isinstance(table, Mapping):
        return [str(name) for name in table]
    return [name for name in SIZES if getattr(table, name, None) is not None]


def _whole_numbers(name: str, sizes: ArrayLike) -> NDArray[Any]:
    """Take whole numbers; casting others would make sizes of what is none.

    NaN becomes the smallest integer, 1.9 becomes 1, and behind a mask lies anything.
    """
    array = np.asarray(sizes)
    fault = ""
    if isinstance(sizes, np.ma.MaskedArray) and np.ma.is_masked(sizes):
        fault = "masked values"
    elif array.dtype.kind == "f":
        if not np.isfinite(array).all():
            fault = "NaN or infinity"
        elif (array != np.floor(array)).any():
            fault = "fractions"
    elif array.dtype.kind not in "iu" and array.size:
        fault = f"values of type {array.dtype}"
    if not fault and array.size and float(array.max()) >= _MOST_TOTAL:
        fault = f"{array.max():.3g}"  # uint64 and floats may not fit int64
    if fault:
        message = f"sizes() says {name} with {fault} among them."
        fix = "one whole number for each sample, at least 0"
        raise LoaderError(message, why="they decide what fits a batch", fix=fix)
    return array
