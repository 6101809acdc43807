"""Is this a dataset?  What is refused here would fail later, or read nonsense."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset, Subset

from loaderkit.errors import LoaderError, OptionError
from loaderkit.joining import check_known_keys, known_keys
from loaderkit.loader.pipes import is_pipe
from loaderkit.mistaken import mistaken_for_dataset

if TYPE_CHECKING:
    from loaderkit.cache.download_ahead import StoredRows
    from loaderkit.cache.stored_arrays import StoredArrays
    from loaderkit.loader.options import LoaderOptions


def check_dataset(dataset: Any, options: LoaderOptions) -> None:
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
        raise _refuse(
            dataset, "samples are read by their number: dataset[0]",
            "an IterableDataset, or list(samples)",
        )  # fmt: skip
    if options.sampler is not None or options.batch_sampler is not None:
        return
    if isinstance(dataset, Mapping) and set(dataset) != set(range(len(dataset))):
        fix = "list(samples.values()), or sampler=list(samples)"
        raise _refuse(dataset, "its keys are not the numbers from 0 on", fix)
    try:
        samples = len(dataset)
    except TypeError as error:
        fix = "give it __len__, a sampler, or make it an IterableDataset"
        raise _refuse(dataset, f"it has no length: {error}", fix) from error
    if not samples:
        what = "The dataset has no samples."
        raise LoaderError(what, why="len(dataset) is 0", fix="look at its source")


def _refuse(dataset: object, why: str, fix: str) -> OptionError:
    what = f"A {type(dataset).__name__} is no dataset to build a loader of."
    return OptionError(what, why=why, fix=fix)


def _refuse_other_things(dataset: Any) -> None:
    """Refuse things that have rows of some kind, but not samples."""
    mistake = mistaken_for_dataset(dataset)
    if mistake is not None:
        fix = f"build_loader({mistake.instead})"
        if isinstance(dataset, Iterator):
            fix += ", or an IterableDataset that makes a new one each epoch"
        raise OptionError(mistake.what, why=mistake.why, fix=fix)


def _check_iterable_options(options: LoaderOptions, *, pipe: bool) -> None:
    meaningless = {"sampler", "batch_sampler", "shuffle", "bucket_by", "oversized"}
    meaningless |= {f"max_{name}" for name in options.limits}
    if pipe and options.shuffle is True:
        meaningless.remove("shuffle")  # a pipe has shufflers of its own, or gets one
    for name in options.given():
        if name in meaningless:
            what = f"{name} was given for an iterable dataset."
            why = "its samples come one by one, in its own order, and their sizes are "
            why += "not known before"
            fix = "batch_size=..., or pack(list(dataset), path): a map-style dataset"
            raise OptionError(what, why=why, fix=fix)


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
    samples = dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    known = None
    if isinstance(dataset, list | tuple):
        known = known_keys(
            (samples[i] for i in range(len(samples))), {*follow, *exclude}
        )
    elif callable(getattr(dataset, "graph_fields", None)):
        known = dataset.graph_fields()
    if known:  # samples without a graph are refused where they are joined
        check_known_keys(follow, exclude, known)


def sizes_of(dataset: Any, name: str) -> Any:
    """Ask a dataset how large its samples are, without reading one.

    Args:
        dataset: With a method ``sizes()`` whose result has them by name.
        name: "nodes", "edges", "bytes" or "tokens".

    Returns:
        A number for each sample ``[n]`` int64.

    Raises:
        LoaderError: It does not know, or what it says cannot be.
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
        if sizes is not None:
            why = f"its sizes() says nothing of {name}: some sample has no such number"
            fix = (
                "limit by batch_size or max_bytes, or give it sizes() -> {name: array}"
            )
        raise LoaderError(what, why=why, fix=fix)
    array = _whole_numbers(name, found)
    if array.shape != (len(dataset),) or (array < 0).any():
        what = f"sizes() says {name} of shape {array.shape}, the smallest "
        what += f"{array.min() if array.size else None}, for {len(dataset)} samples."
        fix = "one number for each sample, at least 0"
        raise LoaderError(what, why="they decide what fits a batch", fix=fix)
    array = array.astype(np.int64)
    array = array if rows is None else array[rows]
    total = float(array.sum(dtype=np.float64))
    if total >= _MOST_IN_ALL:
        what = f"sizes() says {total:.3g} {name} in all."
        why = "batches are cut where sums of them reach a limit, in int64"
        raise LoaderError(what, why=why, fix="count in larger units, or mend sizes()")
    return array


def stored_rows_of(dataset: Any) -> StoredRows | None:
    """Ask a dataset in which shards of a store its samples are.

    Args:
        dataset: With a method ``stored_rows()``, or torch's ``Subset`` of one.

    Returns:
        Where they are; None where they are on this machine, or it does not say.
    """
    rows = None
    while type(dataset) is Subset:
        indices = np.asarray(dataset.indices, np.int64)
        rows = indices if rows is None else indices[rows]
        dataset = dataset.dataset
    ask = getattr(dataset, "stored_rows", None)
    stored: StoredRows | None = ask() if callable(ask) else None
    if stored is None or rows is None:
        return stored
    return replace(stored, shard_of_row=stored.shard_of_row[rows])


def stored_arrays_of(dataset: Any) -> StoredArrays | None:
    """Ask a dataset how many bytes its cache has on local disk.

    Args:
        dataset: With a method ``stored_arrays()``, or torch's ``Subset`` of one.

    Returns:
        The sums; None where there is no such cache, or it does not say.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    ask = getattr(dataset, "stored_arrays", None)
    stored: StoredArrays | None = ask() if callable(ask) else None
    return stored


def let_go_of_shards(dataset: Any) -> None:
    """Have a dataset leave room to workers, if it holds what they may need."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    let_go = getattr(dataset, "let_go_of_shards", None)
    if callable(let_go):
        let_go()


_MOST_IN_ALL = 2.0**61
"""Sums of sizes must fit int64, a limit added to them, too."""


def _whole_numbers(name: str, found: Any) -> Any:
    """Take whole numbers; casting others would make sizes of what is none.

    NaN becomes the smallest integer, 1.9 becomes 1, and behind a mask lies anything.
    """
    array = np.asarray(found)
    bad = ""
    if isinstance(found, np.ma.MaskedArray) and np.ma.is_masked(found):
        bad = "masked values"
    elif array.dtype.kind == "f":
        if not np.isfinite(array).all():
            bad = "NaN or infinity"
        elif (array != np.floor(array)).any():
            bad = "fractions"
    elif array.dtype.kind not in "iu" and array.size:
        bad = f"values of type {array.dtype}"
    if not bad and array.size and float(array.max()) >= _MOST_IN_ALL:
        bad = f"{array.max():.3g}"  # uint64 and floats may not fit int64
    if bad:
        what = f"sizes() says {name} with {bad} among them."
        fix = "one whole number for each sample, at least 0"
        raise LoaderError(what, why="they decide what fits a batch", fix=fix)
    return array
