"""What a dataset may answer besides giving samples, and the one place that asks it.

torch asks a dataset for its length and its samples.  A dataset of loaderkit answers all
of ``CachedSamples``.  One of the user's may answer ``sizes()`` and ``key(row)``, and
any other dataset nothing at all: the functions here then give the answer that costs
nothing but speed.  Whoever wants to know something of a dataset asks them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    Protocol,
    TypeGuard,
    cast,
    runtime_checkable,
)

import numpy as np
import xxhash
from torch.utils.data import ConcatDataset, Subset

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from loaderkit.array_types import Ints
    from loaderkit.cache.download_ahead import StoredRows
    from loaderkit.cache.stored_arrays import StoredArrays
    from loaderkit.memory.page_locked import PageLockedBatch


class IndexedSamples(Protocol):
    """Samples that are read by their row, as torch reads a map-style dataset."""

    def __getitem__(self, row: Any, /) -> Any:
        """Read a sample.  A row is a number, or what the user's sampler gives."""


class SizedSamples(Protocol):
    """Samples whose sizes are known without reading them."""

    def sizes(self) -> Any:
        """Give one whole number for each sample ``[n]``, by what is counted.

        Returns:
            A table, or an object with attributes, of "nodes", "edges", "bytes",
            "tokens" or names of its own.
        """


class NamedSamples(Protocol):
    """Samples that have names, which errors tell."""

    def key(self, row: int) -> str:
        """Name the sample of a row."""


class SizeCounter(Protocol):
    """Counts what samples hold, whatever a transform made of them."""

    def totals(self, samples: object) -> dict[str, int]:
        """Add up what a batch of samples holds, by what is counted."""


class CachedSamples(SizedSamples, NamedSamples, Protocol):
    """Samples that may lie in a cache: what the datasets of loaderkit answer."""

    @property
    def gathers(self) -> bool:
        """Whether batches come from the cache, with no code of the user's between."""

    @property
    def reads_cache(self) -> bool:
        """Whether samples come from the cache, with no code of the user's between."""

    @property
    def transforms_cache(self) -> bool:
        """Whether samples come from the cache, and then go through ``transform``."""

    @property
    def loads_each_time(self) -> bool:
        """Whether a sample is made again each time that it is read, without a cache."""

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """What the user's code does to each sample that was read."""

    def collate(self, samples: object) -> Any:
        """Join samples in the dataset's own way; gathers those of ``unread``."""

    def joins_with(self, others: Sequence[Any]) -> CachedSamples:
        """Give a dataset whose ``collate`` joins these samples and those of others."""

    def ragged_field(self, others: Sequence[Any]) -> str | None:
        """Name a field that differs in length among these samples and others'."""

    def unread(
        self, rows: Sequence[int], page_locked: PageLockedBatch | None = None
    ) -> Any:
        """Name samples to ``collate``, which gathers them without reading each.

        Args:
            rows: Rows of the batch.
            page_locked: Where all its tensors are made; None for ordinary memory.
        """

    def read_untransformed(self, rows: Sequence[int]) -> list[Any] | None:
        """Read samples at once; None where they are to be read one by one."""

    def fill_padding(self, batch: object) -> None:
        """Write the padding of the dataset into what was padded on with zeros."""

    def size_counter(self) -> SizeCounter | None:
        """Give what counts transformed samples; None where that is not known."""

    def graph_fields(self) -> frozenset[str] | None:
        """Name the fields of the graphs in the samples; None where not known."""

    def identity(self) -> str:
        """Hash what tells these samples from others, in every process."""

    def stored_rows(self) -> StoredRows | None:
        """Say in which shards of a store the samples are; None if on this machine."""

    def stored_arrays(self) -> StoredArrays | None:
        """Say how many bytes the cache has on local disk; None without one there."""

    def let_go_of_shards(self) -> None:
        """Leave the room that shards of a store take to workers."""


@runtime_checkable
class PaddedValues(Protocol):
    """A field of a batch whose samples were filled up to the longest."""

    values: torch.Tensor
    """``[B, L, *rest]``."""
    lengths: torch.Tensor
    """Rows of each sample ``[B]``."""
    mask: torch.Tensor
    """True where ``values`` holds a sample's row ``[B, L]``."""

    def pad_to(self, length: int) -> Any:
        """Fill each sample up further, to so many rows."""


def innermost(dataset: object) -> Any:
    """Give what the subsets of subsets are parts of."""
    while type(dataset) is Subset:  # a subclass of it may change the samples
        dataset = dataset.dataset
    return dataset


def as_cached(dataset: object) -> CachedSamples | None:
    """Take a dataset as one of loaderkit's; None where it is another."""
    # By one name that nobody else's datasets have, and not by runtime_checkable, which
    # would ask for all twenty.
    return cast("CachedSamples", dataset) if hasattr(dataset, "gathers") else None


def gathers_batches(dataset: object) -> bool:
    """Tell whether a dataset, or what subsets are parts of, gathers its batches."""
    # Asked for each batch, so with one look rather than through as_cached.
    return bool(getattr(innermost(dataset), "gathers", False))


class AskedSizes(NamedTuple):
    """What a dataset says of its samples' sizes."""

    sizes: Any
    """As ``sizes()`` gave them; None where there is no such method."""
    dataset: Any
    """The dataset that was asked."""
    rows: Ints | None
    """Those of its rows that the subset has; None for all of them."""


def ask_sizes(dataset: object) -> AskedSizes:
    """Ask a dataset, or what it is a subset of, for its samples' sizes.

    Args:
        dataset: Any; a subset of any class that has no ``sizes`` of its own, too.
    """
    # A subclass of Subset with sizes() of its own knows what it made of the samples.
    rows = None
    while isinstance(dataset, Subset) and not hasattr(dataset, "sizes"):
        rows = _rows_of(dataset, rows)
        dataset = dataset.dataset
    sizes = dataset.sizes() if hasattr(dataset, "sizes") else None
    return AskedSizes(sizes, dataset, rows)


def ask_size_counter(dataset: object) -> SizeCounter | None:
    """Ask for what counts samples whose sizes in the cache no longer hold.

    Returns:
        None where samples are read as they were measured, or whoever wrote the dataset
        says their sizes.
    """
    is_changed = False
    while isinstance(dataset, Subset) and not hasattr(dataset, "sizes"):
        is_changed = is_changed or type(dataset) is not Subset
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset) and not hasattr(dataset, "sizes"):
        # Any of them: a batch is counted whole, whichever parts its samples are of.
        counters = map(ask_size_counter, dataset.datasets)
        return next((counter for counter in counters if counter is not None), None)
    cached = as_cached(dataset)
    if cached is None or (cached.reads_cache and not is_changed):
        return None
    return cached.size_counter()


def ask_graph_fields(dataset: object) -> frozenset[str] | None:
    """Ask for the fields of the graphs in the samples; None where not known."""
    cached = as_cached(innermost(dataset))
    return None if cached is None else cached.graph_fields()


def ask_identity(dataset: object) -> str | None:
    """Ask for what tells a dataset's samples from others, in every process.

    Returns:
        None where they do not come from a cache: nothing tells then.
    """
    rows = None
    while type(dataset) is Subset:
        rows = _rows_of(dataset, rows)
        dataset = dataset.dataset
    if is_plain_concatenation(dataset):
        identities = [ask_identity(member) for member in dataset.datasets]
        known = [identity for identity in identities if identity is not None]
        # One part that cannot tell may have changed: then nothing can be said.
        if len(known) < len(identities):
            return None
        identity = f"({'; '.join(known)})"
    else:
        cached = as_cached(dataset)
        if cached is None or not (cached.reads_cache or cached.transforms_cache):
            return None
        identity = cached.identity()
    if rows is None:
        return identity
    return f"{identity}, rows {xxhash.xxh3_64_hexdigest(rows.tobytes())}"


def is_plain_concatenation(dataset: object) -> TypeGuard[ConcatDataset[Any]]:
    """Tell whether samples of torch's ``ConcatDataset`` are those of its parts.

    A subclass of the user's may read others; ours has the same, and keys.
    """
    if not isinstance(dataset, ConcatDataset):
        return False
    # By who wrote the method, and not by the class: a subclass may add one of another
    # kind, and read samples as its base does.
    module = type(dataset).__getitem__.__module__
    return module == ConcatDataset.__module__ or module.startswith("loaderkit.")


def ask_stored_rows(dataset: object) -> StoredRows | None:
    """Ask in which shards of a store the samples are.

    Returns:
        Where they are; None where they are on this machine, or it does not say.
    """
    rows = None
    while type(dataset) is Subset:
        rows = _rows_of(dataset, rows)
        dataset = dataset.dataset
    cached = as_cached(dataset)
    stored = None if cached is None else cached.stored_rows()
    if stored is None or rows is None:
        return stored
    return replace(stored, shard_of_row=stored.shard_of_row[rows])


def ask_stored_arrays(dataset: object) -> StoredArrays | None:
    """Ask how many bytes the cache has on local disk; None without one there."""
    cached = as_cached(innermost(dataset))
    return None if cached is None else cached.stored_arrays()


def ask_what_is_loaded_each_time(dataset: object) -> str | None:
    """Name the class of samples that are made again each time that they are read.

    Returns:
        None where they come from a cache, or are another library's.
    """
    inner = innermost(dataset)
    if is_plain_concatenation(inner):
        names = map(ask_what_is_loaded_each_time, inner.datasets)
        return next((name for name in names if name is not None), None)
    cached = as_cached(inner)
    is_loaded = cached is not None and cached.loads_each_time
    return type(inner).__name__ if is_loaded else None


def let_go_of_shards(dataset: object) -> None:
    """Have a dataset leave room to workers, if it holds what they may need."""
    inner = innermost(dataset)
    if isinstance(inner, ConcatDataset):
        for member in inner.datasets:
            let_go_of_shards(member)
    # A concatenation of ours answers neither: it has no shards beside its parts'.
    cached = as_cached(inner)
    if cached is not None:
        cached.let_go_of_shards()


def _rows_of(subset: Subset[Any], rows: Ints | None) -> Ints:
    """Look up which rows of what a subset is a part of its rows are."""
    # From the outermost subset inwards: ``rows`` are those that it has of this one.
    indices = np.asarray(subset.indices, np.int64)
    return indices if rows is None else indices[rows]
