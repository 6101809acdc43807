"""What runs where batches are made: read, join, say what failed, send."""

from __future__ import annotations

import contextlib
import functools
import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch_geometric.data import InMemoryDataset

from loaderkit.errors import LoaderError, LoaderkitError
from loaderkit.joining import join, own_collate
from loaderkit.loader.randomness import Seeded
from loaderkit.memory.parcel import Parcel, Segments, packing, parcels_work, unshared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def is_gathering(dataset: Any, collate: Callable[[Any], Any] | None = None) -> bool:
    """Tell whether batches come from a cache, without running code of a user.

    Args:
        dataset: What is read.
        collate: How its samples are joined; the dataset's own way if None.  Any other
            is a user's, and gets samples.
    """
    inner = _innermost(dataset)
    if not getattr(inner, "gathers", False):
        return False
    if isinstance(collate, functools.partial):
        collate = collate.func
    return collate is None or collate == inner.collate


def _innermost(dataset: Any) -> Any:
    while type(dataset) is Subset:  # a subclass of it may change the samples
        dataset = dataset.dataset
    return dataset


def draws_nothing(dataset: Any) -> bool:
    """Tell whether reading a sample draws no random numbers: no user's code runs."""
    dataset = _innermost(dataset)
    if isinstance(dataset, InMemoryDataset):
        return dataset.transform is None
    plain = isinstance(dataset, list | tuple | TensorDataset)
    return plain or is_gathering(dataset)


def collate_of(
    dataset: Any, follow_batch: Sequence[str] | None, exclude_keys: Sequence[str] | None
) -> Callable[[Any], Any]:
    """Choose how samples are joined.

    Args:
        dataset: One of ours joins its own samples.
        follow_batch: As in PyG.
        exclude_keys: As in PyG.

    Returns:
        A function of a list of samples, that can be pickled.
    """
    collate = own_collate(dataset)
    if collate is None:
        return Join(list(follow_batch or ()), list(exclude_keys or ()))
    for_graphs = {"follow_batch": follow_batch, "exclude_keys": exclude_keys}
    given = {name: keys for name, keys in for_graphs.items() if keys is not None}
    return functools.partial(collate, **given) if given else collate


class Join:
    """Joins graphs as PyG does, and anything else as torch does.

    Args:
        follow_batch: Fields that get a ``_batch`` vector of their own.
        exclude_keys: Fields that are left out.
    """

    def __init__(self, follow_batch: list[str], exclude_keys: list[str]) -> None:
        self.follow_batch, self.exclude_keys = follow_batch, exclude_keys

    def __call__(self, samples: Any) -> Any:
        """Join a list of samples; what is joined already passes."""
        if not isinstance(samples, list):
            return samples
        with unshared():
            return join(samples, default_collate, self.follow_batch, self.exclude_keys)


def fetch(dataset: Any, rows: Sequence[int], collate: Callable[[Any], Any]) -> Any:
    """Read the samples of a batch and join them.

    Args:
        dataset: Indexed by row, or with ``__getitems__``.
        rows: Rows of the batch.
        collate: Joins a list of samples, and passes a finished batch.

    Returns:
        The batch.

    Raises:
        LoaderError: A sample cannot be read, or the samples cannot be joined; the
            message names them.
    """
    together = getattr(dataset, "__getitems__", None)
    try:
        samples = _read(dataset, rows) if together is None else together(list(rows))
        return collate(samples)
    except LoaderkitError:
        raise
    except Exception as error:
        what = f"The batch of samples {names_of(dataset, rows)} could not be made: "
        raise _told(what, error) from error


def _read(dataset: Any, rows: Sequence[int]) -> list[Any]:
    samples = []
    try:
        for row in rows:
            samples.append(dataset[row])
    except LoaderkitError:
        raise
    except Exception as error:
        what = f"Sample {name_of(dataset, row)} could not be read: "
        raise _told(what, error) from error
    return samples


def names_of(dataset: Any, rows: Sequence[int]) -> str:
    """Name the samples of a batch, the first 8 of them."""
    names = ", ".join(name_of(dataset, row) for row in rows[:8])
    return names + (f" and {len(rows) - 8:,} more" if len(rows) > 8 else "")


def name_of(dataset: Any, row: int) -> str:
    """Name a sample by its key, where the dataset knows one."""
    while isinstance(dataset, Subset):
        row, dataset = int(dataset.indices[row]), dataset.dataset
    with contextlib.suppress(Exception):
        return f"{dataset.key(row)!r} (row {row:,})"
    return f"row {row:,}"


def _told(what: str, error: Exception) -> LoaderError:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"raised at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    what += f"{type(error).__name__}: {error}"
    fix = "mend this sample, or leave it out; num_workers=0 shows it in a debugger"
    return LoaderError(what, why=where, fix=fix)


class Fetching(Dataset[Any]):
    """Stands in for the dataset where batches are made, for one iteration.

    Args:
        dataset: The user's.
        collate: How samples are joined.
        seeded: Random numbers follow from the batch alone, not from the worker.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], *, seeded: bool
    ) -> None:
        self.dataset, self.collate, self.seeded = dataset, collate, seeded

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, rows: Sequence[int]) -> Any:
        """Make a batch."""
        bound = getattr(rows, "bound", None)
        batch = self._made(rows)
        return batch if bound is None else padded_to(batch, bound)

    def _made(self, rows: Sequence[int]) -> Any:
        seed = getattr(rows, "seed", None) if self.seeded else None
        if is_gathering(self.dataset, self.collate):
            with unshared():
                return fetch(self.dataset, rows, self.collate)
        if seed is None:
            return fetch(self.dataset, rows, self.collate)
        with Seeded(seed):
            return fetch(self.dataset, rows, self.collate)


def padded_to(batch: Any, length: int) -> Any:
    """Pad the ragged fields of a batch on, so that batches have few distinct shapes.

    Args:
        batch: A nest with ``Padded`` values: ``(values, lengths, mask)``.
        length: Rows that each of them gets, at least as many as it has.

    Returns:
        The nest; other values in it are the same objects.
    """
    if getattr(batch, "_fields", None) == ("values", "lengths", "mask"):
        more = length - batch.values.shape[1]
        if more <= 0:
            return batch
        behind = batch.values.new_zeros(
            len(batch.values), more, *batch.values.shape[2:]
        )
        values = torch.cat([batch.values, behind], dim=1)
        mask = torch.cat([batch.mask, batch.mask.new_zeros(len(batch.mask), more)], 1)
        return batch._replace(values=values, mask=mask)
    if isinstance(batch, dict):
        return {key: padded_to(each, length) for key, each in batch.items()}
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return type(batch)(padded_to(each, length) for each in batch)
    return batch


class Sending:
    """The ``collate_fn`` of workers: puts a finished batch into a parcel.

    Args:
        count: Segments of a worker: batches under way at most, and one more.
        collate: How samples are joined that are not joined yet; None for finished.
    """

    def __init__(self, count: int, collate: Callable[[Any], Any] | None = None) -> None:
        self.count, self.collate = count, collate
        self.segments: Segments | None = None
        self.works = False

    def __call__(self, batch: Any) -> Any:
        """Pack a batch, in a worker; pass it, elsewhere."""
        if self.collate is not None:
            batch = self.collate(batch)
        if get_worker_info() is None:
            return batch
        if self.segments is None:
            self.segments, self.works = Segments(self.count), parcels_work()
        return Parcel(batch, self.segments) if self.works else batch

    def start(self) -> None:
        """Tell datasets in this worker that their batches will be packed."""
        packing.set(parcels_work())
