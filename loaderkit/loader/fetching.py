"""Making a batch: read its samples, join them, name what failed, pack the result."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

from torch.utils.data import (
    Dataset,
    StackDataset,
    Subset,
    default_collate,
    get_worker_info,
)

from loaderkit.composed_joining import fill_padding
from loaderkit.dataset_protocol import (
    PaddedValues,
    as_cached,
    gathers_batches,
    innermost,
)
from loaderkit.errors import LoaderError, LoaderkitError, UnlikeKeysError
from loaderkit.joining import unlike_keys_error
from loaderkit.loader.collating import (
    DefaultCollate,
    OneByOne,
    is_gathering,
    split_transform,
)
from loaderkit.loader.failures import Failure, is_sent
from loaderkit.loader.missing_rows import (
    error_of_missing_rows,
    error_of_no_row,
    gives_truths,
)
from loaderkit.loader.resumable import SeededRows
from loaderkit.loader.sample_names import name_of, name_of_function, names_of
from loaderkit.loader.unlike_samples import (
    ONE_SHAPE,
    Unjoined,
    explain_difference,
    explain_none,
)
from loaderkit.loader.users_errors import error_about, to_correct
from loaderkit.memory.shm_batch import SharedBatch, sends_shared_batches
from loaderkit.memory.shm_segments import (
    SegmentRing,
    can_share_batches,
    filling_segments,
    give_segments,
    segments_of_worker,
)
from loaderkit.nests import map_leaves
from loaderkit.pyg import is_pyg_data
from loaderkit.randomness import Seeded
from loaderkit.units import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.dataset_protocol import IndexedSamples
    from loaderkit.loader.collating import Collate
    from loaderkit.loader.limits import LimitCheck
    from loaderkit.loader.missing_rows import RowChooser
    from loaderkit.memory.page_locked import PageLockedBatch

_NOTHING_TO_FILL = contextlib.nullcontext()
_SAMPLE = "this sample, or leave it out"
_IS_TORCHS = "torch's default_collate stacks tensors of one shape, and nothing else"
_WITHOUT_COLLATE = (
    "leave collate_fn out: build_loader joins them in the dataset's own way, and pads "
    "what differs in length; another loader takes collate_fn=dataset.collate"
)


class BatchedSamples(Protocol):
    """A dataset that reads the samples of a batch together, by torch's protocol."""

    def __getitems__(self, rows: list[Any], /) -> Any:
        """Read samples."""


def fetch(
    dataset: IndexedSamples,
    rows: Sequence[Any],
    collate: Collate,
    limits: LimitCheck | None = None,
    page_locked: PageLockedBatch | None = None,
) -> Any:
    """Read the samples of a batch and join them.

    Args:
        dataset: Indexed by row, or with ``__getitems__``.
        rows: Rows of the batch.
        collate: Joins a list of samples.
        limits: Compares the samples with the limits of a batch; None if their sizes
            are known.
        page_locked: Where the batch is made; None for ordinary memory.

    Returns:
        The batch.

    Raises:
        LoaderError: A sample cannot be read, the samples cannot be joined, or they
            exceed a limit.  The message names the samples.  The user's own error is its
            ``__cause__``, and ``except`` with the type of that error catches it, too.
    """
    collate, transform = split_transform(collate)
    # Asked once for a batch: the answer takes 2 us, and samples cannot change it.
    gathers = is_gathering(dataset, collate)
    samples = _read_samples(dataset, rows, collate, page_locked, gathers=gathers)
    if limits is not None:
        limits.check(samples, names_of(dataset, rows))

    # A user's transform might keep a tensor of the batch.
    fills_segment = transform is None and gathers and segments_of_worker() is not None
    try:
        with filling_segments() if fills_segment else _NOTHING_TO_FILL:
            batch = collate(samples)
    except UnlikeKeysError as error:
        raise _named_unlike_keys(dataset, rows, error) from None
    except LoaderkitError as error:
        if not len(rows) and gathers:
            raise _error_of_joining(dataset, rows, samples, collate, error) from None
        raise
    except Exception as error:
        raise _error_of_joining(dataset, rows, samples, collate, error) from error

    if transform is not None:
        which_samples = f"the samples {names_of(dataset, rows)}"
        batch = transform_batch(transform, batch, which_samples)
    if page_locked is not None and not (gathers and transform is None):
        page_locked.note_others()
    return batch


def _read_samples(
    dataset: IndexedSamples,
    rows: Sequence[Any],
    collate: Collate,
    page_locked: PageLockedBatch | None,
    *,
    gathers: bool,
) -> Any:
    """Read the samples of a batch in the quickest way that ``collate`` can take.

    Args:
        dataset: As for ``fetch``.
        rows: As for ``fetch``.
        collate: As for ``fetch``.
        page_locked: As for ``fetch``.
        gathers: ``is_gathering``.

    Returns:
        What ``collate`` is to be called with: a list, or what ``__getitems__`` gave.

    Raises:
        LoaderError: A sample cannot be read.
    """
    try:
        if gathers:
            return _unread_samples(dataset, rows, page_locked)
        if reads_together(dataset) and not isinstance(collate, OneByOne):
            return dataset.__getitems__(list(rows))
    except LoaderkitError:
        raise
    except Exception as error:
        message = f"The samples {names_of(dataset, rows)} could not be read: "
        raise error_about(message, error, to_correct(_SAMPLE)) from error
    return _read_one_by_one(dataset, rows)


def _named_unlike_keys(
    dataset: IndexedSamples, rows: Sequence[Any], error: UnlikeKeysError
) -> UnlikeKeysError:
    """Name the samples by their keys or rows, in place of their places in the batch."""
    unlike = error.unlike
    if unlike is None or max(unlike.present_in, unlike.absent_in) >= len(rows):
        return error  # told by a collate_fn of the user's
    absent, present = (
        name_of(dataset, rows[position])
        for position in (unlike.absent_in, unlike.present_in)
    )
    return unlike_keys_error(unlike, f"The sample {absent}", present)


def _error_of_joining(
    dataset: IndexedSamples,
    rows: Sequence[Any],
    samples: Any,
    collate: Collate,
    error: Exception,
) -> LoaderError:
    """Say which samples were not joined, and by which function, or why not."""
    message = f"The samples {names_of(dataset, rows)} were read, but not joined: "
    if isinstance(collate, OneByOne):
        message = f"Sample {names_of(dataset, rows)} was read, but not converted: "
        collate = collate.convert
    if not len(rows):
        fix = "leave empty batches out of the batch_sampler"
        if isinstance(collate, DefaultCollate) or isinstance(error, LoaderkitError):
            message = "A batch without samples could not be joined."
            return LoaderError(message, why="no rows were chosen for it", fix=fix)
        return error_about("A batch without samples could not be joined: ", error, fix)
    reason = why_not_joined(
        samples,
        collate,
        error,
        lambda position: name_of(dataset, rows[position]),
        dataset,
    )
    return error_about(message, error, reason.fix, why=reason.why)


def why_not_joined(
    samples: Any,
    collate: Collate,
    error: Exception,
    name_sample: Callable[[int], str],
    dataset: object = None,
) -> Unjoined:
    """Say why samples could not be joined, and what to do.

    Args:
        samples: What ``collate`` was called with.
        collate: The user's ``collate_fn``, or our own ``DefaultCollate``.
        error: That it raised.
        name_sample: Names a sample by its place in the batch.
        dataset: That they are of; None for a stream.
    """
    unknown = Unjoined(None, how_to_join(collate))
    if collate is default_collate and gathers_batches(dataset):
        # No code of the user's ran, and without it the same samples are joined.
        return Unjoined(_IS_TORCHS, _WITHOUT_COLLATE)
    if (
        not isinstance(collate, DefaultCollate)
        or type(samples) is not list
        or not samples
    ):
        return unknown
    # No code of the user ran: which line of ours raised it would say nothing.
    try:
        reason = None
        # None among texts is joined to a list, and may not be what was refused.
        if "NoneType" in str(error):
            reason = explain_none(samples, name_sample, dataset)
        if reason is None:
            reason = explain_difference(samples, dataset, collate.exclude_keys)
    except Exception:  # noqa: BLE001 -- samples may be of any class
        return unknown
    return reason or unknown


def how_to_join(collate: Collate) -> str:
    """Return the fix to suggest if samples could not be joined.

    Args:
        collate: The user's ``collate_fn``, or our own ``DefaultCollate``.
    """
    if isinstance(collate, DefaultCollate):
        return ONE_SHAPE  # no code of the user ran, so it cannot be at fault
    return to_correct(f"{name_of_function(collate)}, or the samples")


def transform_batch(
    transform: Callable[[Any], Any], batch: Any, which_batch: str
) -> Any:
    """Call the user's ``batch_transform``.

    Args:
        transform: The user's function.
        batch: The joined batch.
        which_batch: Name of the batch in an error.

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
        message = f"Joined, but not transformed: {which_batch}: "
        fix = to_correct(
            f"{name} for a whole batch, or call it sample by sample, as transform= of "
            "the dataset"
        )
        raise error_about(message, error, fix) from error
    if transformed is None:
        message = f"batch_transform {name} returned None for {which_batch}."
        why = "what it returns is the batch that the loop gets"
        fix = "return the batch, also one that was changed in place"
        raise LoaderError(message, why=why, fix=fix)
    return transformed


def reads_together(dataset: object) -> TypeGuard[BatchedSamples]:
    """Return whether a dataset reads all samples of a batch at once.

    If it would read them one after the other, the loader does so itself, and then knows
    which one failed.

    Args:
        dataset: A map-style dataset.
    """
    if not callable(getattr(dataset, "__getitems__", None)):
        return False
    # torch's own datasets of datasets have __getitems__, and read one by one if their
    # parts do.  Their subclasses may do anything.
    if type(dataset) is Subset:
        return reads_together(dataset.dataset)
    if type(dataset) is StackDataset:
        members = dataset.datasets
        in_order = members.values() if isinstance(members, dict) else members
        return any(reads_together(member) for member in in_order)
    cached = as_cached(dataset)
    return cached is None or cached.reads_cache


def _unread_samples(
    dataset: Any, rows: Sequence[Any], page_locked: PageLockedBatch | None
) -> Any:
    """Return samples that a packed dataset gathers only when it joins them.

    Args:
        dataset: One for which ``is_gathering``.
        rows: Its rows.
        page_locked: Where they are gathered; None for ordinary memory.
    """
    while isinstance(dataset, Subset):
        rows = [dataset.indices[row] for row in rows]
        dataset = dataset.dataset
    return dataset.unread(rows, page_locked)


def _read_one_by_one(dataset: IndexedSamples, rows: Sequence[Any]) -> list[Any]:
    samples: list[Any] = []
    untransformed = _read_untransformed(dataset, rows)
    try:
        # A plain loop: StopIteration raised by the user's code would end a generator.
        for number, row in enumerate(rows):
            if untransformed is None:
                sample = dataset[row]
            else:
                sample = untransformed.transform(untransformed.samples[number])
            samples.append(sample)
    except LoaderkitError:
        raise
    except Exception as error:
        message = f"Sample {name_of(dataset, row)} could not be read: "
        raise error_about(message, error, to_correct(_what_made(dataset))) from error
    return samples


def _what_made(dataset: object) -> str:
    """Name what a sample that could not be read is made by, and what else helps."""
    cached = as_cached(innermost(dataset))
    if cached is None or cached.transform is None:
        return _SAMPLE
    return f"{name_of_function(cached.transform)}, or {_SAMPLE}"


class _Untransformed(NamedTuple):
    """Samples that were read together, and the transform still to be called on each."""

    samples: list[Any]
    transform: Callable[[Any], Any]


def _read_untransformed(dataset: object, rows: Sequence[Any]) -> _Untransformed | None:
    """Read samples of a cache together, if each goes through a transform.

    Returns:
        The samples; None if they must be read one by one.  That is also so if one of
        them cannot be read, because reading them singly shows which one it is.
    """
    try:
        while type(dataset) is Subset:  # a subclass may change the samples
            rows = [dataset.indices[row] for row in rows]
            dataset = dataset.dataset
    except (LookupError, TypeError):
        return None
    cached = as_cached(dataset)
    if cached is None or not cached.transforms_cache:
        return None
    samples, transform = cached.read_untransformed(rows), cached.transform
    if samples is None or transform is None:
        return None
    return _Untransformed(samples, transform)


class FetchingDataset(Dataset[Any]):
    """Makes the batches of one iteration over a map-style dataset.

    Args:
        dataset: The user's dataset.
        collate: Joins a list of samples.
        seeded: Read each batch with random numbers that follow from the batch alone,
            whichever worker makes it.
        limits: Compares the samples with the limits of a batch; None if their sizes
            are known.
        chooser: The user's sampler that gives the rows; None where there is none.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        *,
        seeded: bool,
        limits: LimitCheck | None = None,
        chooser: RowChooser | None = None,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seeded = seeded
        self.limits = limits
        self.chooser = chooser

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(
        self, rows: Sequence[int], page_locked: PageLockedBatch | None = None
    ) -> Any:
        """Make a batch.

        In a worker an error is returned as a ``Failure``, since torch would send the
        text of a raised error alone.

        Args:
            rows: Rows of the batch.
            page_locked: Where it is made; None for ordinary memory, as in workers.
        """
        # A trainer that takes the dataset may give a plain list.
        padded_length = rows.bound if isinstance(rows, SeededRows) else None
        try:
            batch = self._fetch_seeded(rows, page_locked)
            if padded_length is None:
                return batch
            padded = padded_to(batch, padded_length)
            fill_padding(self.dataset, padded)
            if page_locked is not None:
                page_locked.note_others()
        except BaseException as error:
            if not is_sent(error):
                raise
            return Failure(error)
        return padded

    def _fetch_seeded(
        self, rows: Sequence[int], page_locked: PageLockedBatch | None
    ) -> Any:
        if not (self.seeded and isinstance(rows, SeededRows)):
            return self._fetch(rows, page_locked)
        with Seeded(rows.seed):
            return self._fetch(rows, page_locked)

    def _fetch(self, rows: Sequence[int], page_locked: PageLockedBatch | None) -> Any:
        if self.chooser is not None and gives_truths(rows):
            no_row = error_of_no_row(self.chooser, self.dataset, rows)
            if no_row is not None:
                raise no_row
        try:
            return fetch(self.dataset, rows, self.collate, self.limits, page_locked)
        except Exception as error:
            by_sampler = error_of_missing_rows(self.chooser, self.dataset, rows, error)
            if by_sampler is None:
                raise
            raise by_sampler from error.__cause__ or error


def padded_to(batch: Any, length: int) -> Any:
    """Pad the ragged fields of a batch further, so that batches have few shapes.

    Args:
        batch: A nest with ``Padded`` values.
        length: Rows that each ragged field is padded to.

    Returns:
        The nest with longer fields; its other values are the same objects.

    Raises:
        LoaderError: A field has more rows than ``length``.
    """

    def pad_leaf(leaf: Any) -> Any:
        return _pad_field(leaf, length) if _is_padded(leaf) else leaf

    # No graph has such fields, and making one again takes longer than all the rest.
    return map_leaves(
        pad_leaf, batch, is_leaf=lambda part: _is_padded(part) or is_pyg_data(part)
    )


def _is_padded(value: object) -> bool:
    # Python asks for each name of a protocol, 11 us for a text of a list of texts.
    return isinstance(value, tuple) and isinstance(value, PaddedValues)


def _pad_field(field: PaddedValues, length: int) -> Any:
    longest = field.values.shape[1]
    if longest == length:
        return field
    if longest > length:
        message = (
            f"A padded batch has {count_of(longest, 'rows')}, its bucket {length:,}."
        )
        why = "buckets follow from sizes(), and a transform probably made samples "
        why += "longer; batches would have other shapes than those of the buckets"
        fix = "do that in load() or before pack(), or drop bucket_by"
        raise LoaderError(message, why=why, fix=fix)
    return field.pad_to(length)


class SharedMemorySender:
    """Copies finished batches of a worker to shared memory.

    It has no segments of its own: they are those of the process that it is called in,
    which are the ones that batches are gathered into.  Whoever is sent to a worker may
    be there twice, and a batch that was gathered into the segments of one, and handed
    on by another, would be written over before it was received.

    Args:
        count: Segments of shared memory in a worker: the most batches that are being
            written, or are not yet received.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, batch: Any) -> Any:
        """Pack a batch in a worker; return it unchanged in the training process."""
        segments = segments_of_worker()
        if get_worker_info() is None or segments is None:
            return batch
        return SharedBatch(batch, segments)

    def start(self) -> None:
        """Make segments for this worker, and let datasets know that they are used.

        They may then join in ordinary memory, which is faster than shared memory.
        """
        can_share = can_share_batches()
        sends_shared_batches.set(can_share)
        give_segments(SegmentRing(self.count) if can_share else None)
