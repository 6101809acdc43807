"""Batches of an iterable dataset: shared out to ranks, seeded, and resumable."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, repeat, starmap
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from loaderkit.errors import LoaderError, LoaderkitError
from loaderkit.loader.collating import OneByOne, split_transform
from loaderkit.loader.delivery import (
    FAILED,
    SKIPPED,
    Delivery,
    Resumption,
    StandIn,
    WorkerState,
)
from loaderkit.loader.digests import digest_of_plain
from loaderkit.loader.failures import Failure, LocalFailure, is_sent
from loaderkit.loader.fetching import transform_batch, why_not_joined
from loaderkit.loader.pipes import prepare_pipe
from loaderkit.loader.ranks import Ranks, RankShare, count_groups
from loaderkit.loader.stateful import is_own_iterator, read_state
from loaderkit.loader.users_errors import error_about, to_correct
from loaderkit.randomness import Seeded, mix_seed
from loaderkit.units import count_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from loaderkit.loader.collating import Collate
    from loaderkit.sending import Outbox


def _continue_iterating(source: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator that reads on from ``source``.

    ``iter(source)`` could begin anew, if a dataset is its own iterator.  A generator
    would end with the first error, and torch's DataLoader can read on after one.
    """
    return starmap(next, repeat((source,)))


def _delivery_of_failure(error: BaseException, worker: int) -> Delivery:
    """Return a delivery of an error; torch would send the text of the error alone."""
    is_local = get_worker_info() is None
    failure = LocalFailure(error) if is_local else Failure(error)
    return Delivery(failure, FAILED, worker, None)


class _NamingUserCode:
    """Raises errors of the user's code again with ``what`` and ``fix``.

    They keep their type, as errors of map-style datasets do.

    It is no function with ``contextmanager``, which takes a RuntimeError that is raised
    from a StopIteration for Python's own, and lets the StopIteration out in its place.

    Args:
        what: What could not be done.
        fix: What the user can do.
    """

    def __init__(self, what: str, fix: str) -> None:
        self._what, self._fix = what, fix

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, LoaderkitError):
            raise error_about(self._what, error, self._fix) from error


def _ended_early(number: int, given: int) -> LoaderError:
    message = (
        f"The dataset ended after {count_of(number, 'batches')}; the state has "
        f"{given:,}."
    )
    fix = "read the dataset that the state is of, or begin the epoch anew"
    return LoaderError(message, why="it has fewer samples than it had then", fix=fix)


@dataclass(frozen=True)
class IterableRule:
    """How the samples of an iterable dataset become batches."""

    batch_size: int = 1
    """Samples of a batch."""
    drop_last: bool = False
    """Leave out a last batch that is not full; among ranks, also the last samples that
    not every rank gets one of."""
    seed: int = 0
    """Seed of the random numbers that are drawn while reading."""
    ranks: Ranks = field(default_factory=Ranks)
    """The ranks that share the samples: each reads all of them and keeps every n-th."""

    def told_length(self, samples: int, workers: int) -> ToldLength:
        """Return the length of an epoch with as many samples as the dataset reports."""
        count = count_groups(samples, self.ranks.world_size, drop_last=self.drop_last)
        batches = count_groups(count, self.batch_size, drop_last=self.drop_last)
        # The last batch of each worker may not be full, and so may its last round of
        # the ranks.  Together the workers then make more batches.
        can_be_short = self.batch_size > 1 or self.ranks.world_size > 1
        has_short_batches = can_be_short and not self.drop_last
        more_batches = max(0, workers - 1) if has_short_batches else 0
        return ToldLength(samples, batches, batches + more_batches, workers)


@dataclass(frozen=True)
class ToldLength:
    """What ``len(loader)`` was, for an iterable dataset whose length may be wrong."""

    samples: int
    """Number of samples that the dataset reports."""
    batches: int
    """Number of batches that these samples make on this rank."""
    most_batches: int
    """Most batches that the workers can make of them, if they share the dataset."""
    workers: int
    """Number of workers."""

    def check(self, batches: int, *, stacklevel: int) -> None:
        """Warn if there are more batches, as torch's DataLoader does.

        Args:
            batches: Number of batches given so far.
            stacklevel: As for ``warnings.warn``, counted from the caller of this.
        """
        if batches <= self.most_batches:
            return
        text = f"len(loader) was {self.batches:,}, since the dataset says that it has "
        text += (
            f"{count_of(self.samples, 'samples')}, but more batches than that "
            "have come: "
        )
        if self.workers > 1:
            text += "probably each of its workers reads all of it; share it out by "
            text += "get_worker_info()"
        else:
            text += "correct its __len__"
        warnings.warn(text, UserWarning, stacklevel=stacklevel + 1)


class EqualBatches:
    """Sees whether the workers of a stream each read all of it.

    An iterable dataset that does not ask ``get_worker_info`` gives each sample once a
    worker, in torch as here.  Its first batches show it: the first ones of all workers
    are equal, and the second ones too, which differ from the first.

    Args:
        workers: Number of workers; batches come from one after the other.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._digests: list[str | None] = []

    def note(self, batch: Any, *, stacklevel: int) -> bool:
        """Look at the next batch; warn if it is the last of such ones.

        Args:
            batch: As it is given.
            stacklevel: As for ``warnings.warn``, counted from the caller of this.

        Returns:
            Whether there is more to be looked at.
        """
        self._digests.append(digest_of_plain(batch))
        first, second = self._digests[: self._workers], self._digests[self._workers :]
        if None in self._digests or len(set(first)) > 1 or len(set(second)) > 1:
            return False
        if len(second) < self._workers:
            return True
        if first[0] != second[0]:
            text = f"the {self._workers} workers give the same batches: probably each "
            text += "of them reads the whole dataset, and an epoch has each sample "
            text += f"{self._workers} times; share it out in __iter__ by torch.utils."
            text += "data.get_worker_info(), or num_workers=1"
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
        return False


class IterableBatches(StandIn, IterableDataset[Delivery]):
    """Stand-in for an iterable dataset: gives deliveries of whole batches.

    Args:
        dataset: The user's dataset.
        collate: Joins a list of samples.
        rule: How samples become batches.
        epoch: Number of the epoch ``[]`` int64, in memory that is shared with workers
            that are kept.
        resumption: Where the workers begin.
        user_init: See ``StandIn``.
        outbox: See ``Sent``.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        rule: IterableRule,
        epoch: torch.Tensor,
        resumption: Resumption,
        user_init: Callable[[int], None] | None,
        outbox: Outbox | None = None,
    ) -> None:
        super().__init__(outbox)
        self.dataset = dataset
        self.collate = collate
        self.rule = rule
        self.epoch = epoch
        self.resumption = resumption
        self.user_init = user_init
        self._resumed_epoch = int(epoch)

    def __iter__(self) -> Iterator[Delivery]:
        """Call ``iter`` of the user's dataset, and give its batches.

        It is called now and not with the first batch, as torch does.
        """
        failed = self._failed_delivery()
        if failed is not None:
            return iter([failed])
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch, state = int(self.epoch), WorkerState()
        last_worker = SKIPPED
        if epoch == self._resumed_epoch:
            state = self.resumption.workers.get(worker, state)
            last_worker = self.resumption.last_worker
        turn_passed_on: list[Delivery] = []
        if worker <= last_worker:
            # torch asks worker 0 first.  Workers that had their turn before the state
            # was saved pass it on to the next one.
            turn_passed_on = [Delivery(None, SKIPPED, worker, None)]
        try:
            source = self._begin_dataset(worker, epoch, state)
        except BaseException as error:
            if not is_sent(error):
                raise
            return iter([_delivery_of_failure(error, worker)])
        batches = _WorkerBatches(
            self, source, state, epoch=epoch, worker=worker, workers=workers
        )
        return chain(turn_passed_on, batches)

    def _begin_dataset(self, worker: int, epoch: int, state: WorkerState) -> Any:
        """Return an iterator over the user's dataset that begins at a saved state."""
        with (
            _NamingUserCode("The dataset could not begin: ", to_correct("the dataset")),
            Seeded(mix_seed(self.rule.seed, epoch, -1 - worker)),
        ):
            source = self._restore_dataset(epoch, state)
            if state.exhausted:
                # Nothing is left of this epoch.  If the next one has begun, the dataset
                # is iterated over anew.
                return self._begin_iterating(epoch) if state.ended else iter(())
            if state.ended:
                # The state was saved before the dataset saw its end.  What it does
                # after its last sample, such as counting the epoch, is done now.
                for _ in _continue_iterating(source):
                    pass
                return self._begin_iterating(epoch)
            return source

    def _begin_iterating(self, epoch: int) -> Iterator[Any]:
        # seed is used to read samples and seed + 1 to join them.
        seed = mix_seed(self.rule.seed + 2, epoch, 0)
        prepare_pipe(self.dataset, get_worker_info(), seed)
        try:
            return iter(self.dataset)
        except TypeError as error:
            if not str(error).startswith("iter() returned non-iterator"):
                raise
            message = f"{type(self.dataset).__name__}.__iter__: {error}."
            why = "a loop asks what it returns for one sample after the other"
            fix = "return iter(samples), or yield each sample, in __iter__"
            raise LoaderError(message, why=why, fix=fix) from error

    def _restore_dataset(self, epoch: int, state: WorkerState) -> Any:
        if state.dataset is not None:
            self.dataset.load_state_dict(state.dataset)
        source: Any = self._begin_iterating(epoch)
        if state.iterator is not None:
            source.load_state_dict(state.iterator)
        return source


class _WorkerBatches(Iterator[Delivery]):
    """The batches that one worker makes in one epoch.

    This is a class because a generator ends with the first error.  A dataset may go on
    after one, as with torch's DataLoader.

    Args:
        stand_in: Has the dataset, and the rule for batches.
        source: The iterator over the dataset, where the saved state says.
        state: Where the worker begins.
        epoch: Number of the epoch.
        worker: Number of the worker.
        workers: Number of workers.
    """

    def __init__(
        self,
        stand_in: IterableBatches,
        source: Any,
        state: WorkerState,
        *,
        epoch: int,
        worker: int,
        workers: int,
    ) -> None:
        self._dataset = stand_in.dataset
        self._collate = stand_in.collate
        self._rule = stand_in.rule
        self._source = source
        self._epoch = epoch
        self._worker = worker
        self._workers = workers

        ranks = self._rule.ranks
        self._samples = _continue_iterating(source)
        if ranks.world_size > 1:
            self._samples = RankShare(
                self._samples, ranks, drop_last=self._rule.drop_last
            )

        # Of a dataset without a state, the batches that were given before the state was
        # saved are read again, and not joined.
        is_restored = state.dataset is not None or state.iterator is not None
        self._number = state.batches if is_restored else 0
        self._batches_to_skip = 0 if is_restored else state.batches
        self._was_exhausted = state.exhausted
        # Samples of the next batch.  Those that were read before an error stay here.
        self._rows: list[Any] = []
        self._has_ended = False

    def __next__(self) -> Delivery:
        if self._has_ended:
            # The source is not asked again: it may raise StopIteration only once.
            raise StopIteration
        try:
            delivery = self._make_delivery()
        except BaseException as error:
            # A generator that raised an error would end with it; see LocalFailure.
            if not (isinstance(error, LoaderkitError) or is_sent(error)):
                raise
            return _delivery_of_failure(error, self._worker)
        if delivery is None:
            self._has_ended = True
            raise StopIteration
        assert delivery.state is not None
        self._has_ended = delivery.state.exhausted
        return delivery

    def _make_delivery(self) -> Delivery | None:
        """Make the next batch; None if there is none.

        Raises:
            LoaderkitError: The dataset failed, or samples could not be joined.
        """
        while True:
            with self._seeded_reading():
                rows = self._read_rows()
                if rows is None:
                    return None
                self._number += 1
                if self._number <= self._batches_to_skip:
                    continue
                with self._seeded_joining():
                    batch = self._join_samples(rows)
            state = self._state_after_batch()
            is_last = len(rows) < self._rule.batch_size
            return Delivery(
                batch, self._number, self._worker, state._replace(exhausted=is_last)
            )

    def _seeded_reading(self) -> Seeded:
        """Return a block whose random numbers are equal on all ranks.

        Each rank reads the whole dataset, which may draw its order from them.
        """
        unique = self._number * self._workers + self._worker
        return Seeded(mix_seed(self._rule.seed, self._epoch, unique))

    def _seeded_joining(self) -> contextlib.AbstractContextManager[None]:
        """Return a block whose random numbers differ between ranks."""
        ranks = self._rule.ranks
        if ranks.world_size == 1:
            return contextlib.nullcontext()
        unique = self._number * self._workers + self._worker
        unique = unique * ranks.world_size + ranks.rank
        return Seeded(mix_seed(self._rule.seed + 1, self._epoch, unique))

    def _read_rows(self) -> list[Any] | None:
        """Read the samples of a batch; None if there are too few for one."""
        size = self._rule.batch_size
        try:
            # extend() keeps the samples that were read before one of them raised.
            self._rows.extend(islice(self._samples, size - len(self._rows)))
        except LoaderkitError:
            raise
        except Exception as error:
            count = self._number * size + len(self._rows)
            message = f"The dataset failed after {count_of(count, 'samples')}: "
            raise error_about(message, error, to_correct("the dataset")) from error

        rows = self._rows
        if rows and not (self._rule.drop_last and len(rows) < size):
            self._rows = []
            return rows
        if self._number < self._batches_to_skip and not self._was_exhausted:
            missing_from, self._number = self._number, self._batches_to_skip
            raise _ended_early(missing_from, self._batches_to_skip)
        return None

    def _join_samples(self, rows: list[Any]) -> Any:
        collate, transform = split_transform(self._collate)
        number = self._number
        message = f"The samples of batch {number:,} were read, but not joined: "
        users_function = collate
        if isinstance(collate, OneByOne):
            message = f"Sample {number:,} was read, but not converted: "
            users_function = collate.convert
        try:
            batch = collate(rows)
        except LoaderkitError:
            raise
        except Exception as error:
            name_sample = "sample {} of the batch".format
            reason = why_not_joined(rows, users_function, error, name_sample)
            raise error_about(message, error, reason.fix, why=reason.why) from error
        if transform is None:
            return batch
        return transform_batch(transform, batch, f"batch {number:,}")

    def _state_after_batch(self) -> WorkerState:
        if is_own_iterator(self._dataset):
            return WorkerState(self._number, None, read_state(self._source))
        dataset_state = read_state(self._dataset)
        return WorkerState(self._number, dataset_state, read_state(self._source))
