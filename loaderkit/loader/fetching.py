"""What runs where batches are made: read, join, say what failed, send."""

from __future__ import annotations

import bisect
import contextlib
import pickle
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from loaderkit.errors import LoaderError, LoaderkitError
from loaderkit.loader.collating import (
    OneByOne,
    innermost,
    is_gathering,
    split_transform,
)
from loaderkit.loader.users_errors import error_about
from loaderkit.memory.shm_batch import (
    SegmentRing,
    SharedBatch,
    can_share_batches,
    sends_shared_batches,
)
from loaderkit.pyg import loaded_pyg
from loaderkit.randomness import Seeded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.loader.limits import LimitCheck


def draws_nothing(dataset: Any) -> bool:
    """Tell whether reading a sample draws no random numbers: no user's code runs."""
    dataset = innermost(dataset)
    pyg = loaded_pyg()
    if pyg is not None and isinstance(dataset, pyg.in_memory_dataset):
        transform: Any = getattr(dataset, "transform", None)
        return transform is None
    plain = isinstance(dataset, list | tuple | TensorDataset)
    return plain or is_gathering(dataset)


def fetch(
    dataset: Any,
    rows: Sequence[int],
    collate: Callable[[Any], Any],
    limits: LimitCheck | None = None,
) -> Any:
    """Read the samples of a batch and join them.

    Args:
        dataset: Indexed by row, or with ``__getitems__``.
        rows: Rows of the batch.
        collate: Joins a list of samples.
        limits: What the samples must keep to; None where they are known to.

    Returns:
        The batch.

    Raises:
        LoaderError: A sample cannot be read, the samples cannot be joined, or they hold
            more than a batch may; the message names them, and the user's own error is
            its cause.  ``except`` with the type of that error catches it, too.
    """
    collate, transform = split_transform(collate)
    if is_gathering(dataset, collate):
        samples = _read_together(_unread, dataset, rows)
    elif reads_together(dataset) and not isinstance(collate, OneByOne):
        samples = _read_together(_samples_of, dataset, rows)
    else:
        samples = _read(dataset, rows)
    if limits is not None:
        limits.check(samples, names_of(dataset, rows))
    try:
        batch = collate(samples)
    except LoaderkitError:
        raise
    except Exception as error:
        what = f"The samples {names_of(dataset, rows)} were read, but not joined: "
        if isinstance(collate, OneByOne):
            what = f"Sample {names_of(dataset, rows)} was read, but not converted: "
            collate = collate.convert
        fix = f"mend {name_of_function(collate)}, or the samples; num_workers=0 to "
        fix += "step through"
        if not len(rows):
            what = "A batch without samples could not be joined: "
            fix = "leave empty batches out of the batch_sampler"
        raise error_about(what, error, fix) from error
    if transform is None:
        return batch
    return transform_batch(transform, batch, f"the samples {names_of(dataset, rows)}")


def transform_batch(
    transform: Callable[[Any], Any], batch: Any, which_batch: str
) -> Any:
    """Call the user's ``batch_transform``.

    Args:
        transform: As the user gave it.
        batch: What the samples were joined to.
        which_batch: Names it in the error.

    Returns:
        What the transform returns.

    Raises:
        LoaderError: The transform raised, or returned None.
    """
    name = name_of_function(transform)
    try:
        transformed = transform(batch)
    except LoaderkitError:
        raise
    except Exception as error:
        what = f"Joined, but not transformed: {which_batch}: "
        fix = f"mend {name} for a whole batch, or call it sample by sample, as "
        fix += "transform= of the dataset; num_workers=0 to step through"
        raise error_about(what, error, fix) from error
    if transformed is None:
        what = f"batch_transform {name} returned None for {which_batch}."
        why = "what it returns is the batch that the loop gets"
        fix = "return the batch, also one that was changed in place"
        raise LoaderError(what, why=why, fix=fix)
    return transformed


def reads_together(dataset: Any) -> bool:
    """Tell whether a dataset reads the samples of a batch all at once.

    Where it would read them one after the other, we do so ourselves, and know which
    of them failed.

    Args:
        dataset: Any that is indexed.
    """
    if not callable(getattr(dataset, "__getitems__", None)):
        return False
    if type(dataset) is Subset:
        return reads_together(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        in_order = parts.values() if isinstance(parts, dict) else parts
        return any(reads_together(part) for part in in_order)
    return bool(getattr(dataset, "reads_cache", True))


def _samples_of(dataset: Any, rows: Sequence[int]) -> Any:
    return dataset.__getitems__(list(rows))


def _unread(dataset: Any, rows: Sequence[int]) -> Any:
    """Name the samples to a dataset that gathers them from its cache when it joins."""
    while isinstance(dataset, Subset):
        rows = [dataset.indices[row] for row in rows]
        dataset = dataset.dataset
    return dataset.unread(rows)


def _read_together(
    read: Callable[[Any, Sequence[int]], Any], dataset: Any, rows: Sequence[int]
) -> Any:
    try:
        return read(dataset, rows)
    except LoaderkitError:
        raise
    except Exception as error:
        what = f"The samples {names_of(dataset, rows)} could not be read: "
        raise error_about(what, error, _MEND_SAMPLE) from error


def _read(dataset: Any, rows: Sequence[int]) -> list[Any]:
    samples: list[Any] = []
    inner, untransformed = _read_untransformed(dataset, rows)
    try:
        # A loop, and no generator: the user's code may raise StopIteration.
        for at, row in enumerate(rows):
            if untransformed is None:
                samples.append(dataset[row])
            else:
                samples.append(inner.transform(untransformed[at]))
    except LoaderkitError:
        raise
    except Exception as error:
        what = f"Sample {name_of(dataset, row)} could not be read: "
        raise error_about(what, error, _MEND_SAMPLE) from error
    return samples


def _read_untransformed(
    dataset: Any, rows: Sequence[int]
) -> tuple[Any, list[Any] | None]:
    """Read samples at once where a transform is all that is to be done with each.

    Returns:
        The dataset whose transform that is, and the samples; None for them where each
        is to be read by itself, which tells which one cannot be.
    """
    try:
        while type(dataset) is Subset:  # a subclass of it may change the samples
            rows = [dataset.indices[row] for row in rows]
            dataset = dataset.dataset
    except (LookupError, TypeError):
        return dataset, None
    if not getattr(dataset, "transforms_cache", False):
        return dataset, None
    return dataset, dataset.read_untransformed(rows)


_MEND_SAMPLE = "mend this sample, or leave it out; num_workers=0 to step through"


def names_of(dataset: Any, rows: Sequence[int]) -> str:
    """Name the samples of a batch, the first 8 of them."""
    names = ", ".join(name_of(dataset, row) for row in rows[:8])
    return names + (f" and {len(rows) - 8:,} more" if len(rows) > 8 else "")


def name_of(dataset: Any, row: Any) -> str:
    """Name a sample by its key, where the dataset knows one.

    Args:
        dataset: What is read.
        row: An integer, or whatever the user's sampler gives to the user's dataset.
    """
    number = f"row {row:,}" if isinstance(row, int | np.integer) else f"row {row!r}"
    with contextlib.suppress(Exception):  # a name must not hide the error it is for
        dataset, inner_row = innermost_row(dataset, row)
        if isinstance(inner_row, int | np.integer):
            number = f"row {inner_row:,}"
        return f"{dataset.key(inner_row)!r} ({number})"
    return number


def innermost_row(dataset: Any, row: Any) -> tuple[Any, Any]:
    """Look up where a row of a subset, or of datasets in a chain, comes from."""
    while True:
        if isinstance(dataset, Subset):
            row, dataset = int(dataset.indices[row]), dataset.dataset
        elif isinstance(dataset, ConcatDataset):
            number = bisect.bisect_right(dataset.cumulative_sizes, row)
            row -= dataset.cumulative_sizes[number - 1] if number else 0
            dataset = dataset.datasets[number]
        else:
            return dataset, row


def name_of_function(function: Any) -> str:
    """Name a function, or the class of something that can be called."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name)


class WorkerTraceback(Exception):  # noqa: N818 -- a text that stands where errors do
    """The traceback of an error in a worker, shown as the error's cause.

    A traceback cannot be sent between processes; ``multiprocessing.Pool`` and
    ``concurrent.futures`` show theirs in this way too.
    """

    def __str__(self) -> str:
        return f"in a worker of the loader:\n\n{self.args[0]}"


class Failure:
    """An error of a worker, sent in place of the batch that could not be made.

    torch would send its text alone, and raise another error with that text.

    Args:
        error: As it was raised; what caused it goes along.
    """

    def __init__(self, error: Exception) -> None:
        self.traceback = "".join(traceback.format_exception(error))
        self.error = _pickled(error) or _pickled(self._without_its_type(error))
        self.cause = b"" if error.__cause__ is None else _pickled(error.__cause__)

    @classmethod
    def about(cls, what: str, error: Exception, fix: str) -> Failure:
        """Tell an error of the user's code that is not about a sample.

        Args:
            what: What could not be done, to be followed by the error.
            error: As the user's code raised it; one of ours says all that itself.
            fix: What to do.
        """
        if isinstance(error, LoaderkitError):
            return cls(error)
        told = error_about(what, error, fix)
        told.__cause__ = error
        return cls(told)

    def _without_its_type(self, error: Exception) -> LoaderError:
        """Say the same in an error that can be sent: a local class cannot."""
        if isinstance(error, LoaderkitError):
            return LoaderError(error.what, why=error.why, fix=error.fix)
        return LoaderError(self.traceback)

    def rebuilt(self) -> Exception:
        """Make the error again, in the process that trains."""
        error: Exception = pickle.loads(self.error)
        cause: BaseException = WorkerTraceback(self.traceback)
        if self.cause:
            users_error: BaseException = pickle.loads(self.cause)
            # As ``raise ... from`` sets it: the class may guard its attributes.
            BaseException.__setattr__(users_error, "__cause__", cause)
            cause = users_error
        error.__cause__ = cause
        return error


class LocalFailure:
    """An error of a stream in this process, on its way to the loop.

    A generator that raised it would end with it, but the stream may have more.

    Args:
        error: As it was raised.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def rebuilt(self) -> Exception:
        """Give the error."""
        return self.error


def _pickled(error: BaseException) -> bytes:
    """Pickle an error; nothing where it cannot be built again from that."""
    try:
        text = pickle.dumps(error)
        again = pickle.loads(text)
    except Exception:  # noqa: BLE001 -- its class is the user's, and may raise anything
        return b""
    # A __reduce__ of the user's may make something else of it; its traceback does not.
    same = type(again) is type(error) or str(again) == str(error)
    return text if isinstance(again, BaseException) and same else b""


class Fetching(Dataset[Any]):
    """Stands in for the dataset where batches are made, for one iteration.

    Args:
        dataset: The user's.
        collate: How samples are joined.
        seeded: Random numbers follow from the batch alone, not from the worker.
        limits: What the samples of a batch must keep to; None where they are known to.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        *,
        seeded: bool,
        limits: LimitCheck | None = None,
    ) -> None:
        self.dataset, self.collate, self.seeded = dataset, collate, seeded
        self.limits = limits

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, rows: Sequence[int]) -> Any:
        """Make a batch; in a worker, what went wrong instead if something does."""
        bound = getattr(rows, "bound", None)
        try:
            batch = self._made(rows)
            return batch if bound is None else self._padded_to(batch, bound)
        except Exception as error:
            if get_worker_info() is None:
                raise
            return Failure(error)

    def _padded_to(self, batch: Any, length: int) -> Any:
        padded = padded_to(batch, length)
        fill_padding_of(self.dataset, padded)
        return padded

    def _made(self, rows: Sequence[int]) -> Any:
        seed = getattr(rows, "seed", None) if self.seeded else None
        if seed is None:
            return fetch(self.dataset, rows, self.collate, self.limits)
        with Seeded(seed):
            return fetch(self.dataset, rows, self.collate, self.limits)


def padded_to(batch: Any, length: int) -> Any:
    """Pad the ragged fields of a batch on, so that batches have few distinct shapes.

    Args:
        batch: A nest with ``Padded`` values: ``(values, lengths, mask)``.
        length: Rows that each of them gets.

    Returns:
        The nest; other values in it are the same objects.

    Raises:
        LoaderError: A field has more rows than that.
    """
    if getattr(batch, "_fields", None) == ("values", "lengths", "mask"):
        more = length - batch.values.shape[1]
        if more == 0:
            return batch
        if more < 0:
            what = f"A padded batch has {batch.values.shape[1]:,} rows, its bucket "
            what += f"{length:,}."
            why = "buckets follow from sizes(), and a transform probably made samples "
            why += "longer; batches would have other shapes than those of the buckets"
            fix = "do that in load() or before pack(), or drop bucket_by"
            raise LoaderError(what, why=why, fix=fix)
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


def fill_padding_of(dataset: Any, batch: Any) -> None:
    """Have a dataset that pads with values of its own fill what was padded on.

    Args:
        dataset: The user's; where it, or what a torch ``Subset`` of it stands on, has a
            method ``fill_padding(batch)``, it is called.
        batch: Padded with zeros; changed in place.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    fill = getattr(dataset, "fill_padding", None)
    if fill is not None:
        fill(batch)


class Sending:
    """The ``collate_fn`` of workers: puts a finished batch into a parcel.

    Args:
        count: Segments of a worker: batches under way at most, and one more.
        collate: How samples are joined that are not joined yet; None for finished.
    """

    def __init__(self, count: int, collate: Callable[[Any], Any] | None = None) -> None:
        self.count, self.collate = count, collate
        self.segments: SegmentRing | None = None
        self.works = False

    def __call__(self, batch: Any) -> Any:
        """Pack a batch, in a worker; pass it, elsewhere."""
        if self.collate is not None:
            batch = self.collate(batch)
        if get_worker_info() is None:
            return batch
        if self.segments is None:
            self.segments, self.works = SegmentRing(self.count), can_share_batches()
        return SharedBatch(batch, self.segments) if self.works else batch

    def start(self) -> None:
        """Tell datasets in this worker that their batches will be packed."""
        sends_shared_batches.set(can_share_batches())
