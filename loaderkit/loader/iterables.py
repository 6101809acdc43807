"""Batches of an iterable dataset: shared out to ranks, seeded, and resumable."""

from __future__ import annotations

import contextlib
import warnings
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
    WorkerState,
)
from loaderkit.loader.failures import Failure, LocalFailure
from loaderkit.loader.fetching import how_to_join, transform_batch
from loaderkit.loader.pipes import prepare_pipe
from loaderkit.loader.ranks import Ranks, RankShare, count_groups
from loaderkit.loader.stateful import is_own_iterator, read_state
from loaderkit.loader.users_errors import error_about
from loaderkit.randomness import Seeded, mix_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


_MEND_DATASET = "mend the dataset; num_workers=0 to step through"


def _continue_iterating(source: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator that reads on from ``source``.

    ``iter(source)`` could begin anew, if a dataset is its own iterator.  A generator
    would end with the first error, and torch's DataLoader can read on after one.
    """
    return starmap(next, repeat((source,)))


def _delivery_of_failure(error: Exception, worker: int) -> Delivery:
    """Return a delivery of an error; torch would send the text of the error alone."""
    is_local = get_worker_info() is None
    failure = LocalFailure(error) if is_local else Failure(error)
    return Delivery(failure, FAILED, worker, None)


@contextlib.contextmanager
def _naming_user_code(what: str, fix: str) -> Iterator[None]:
    """Raise errors of the user's code again with ``what`` and ``fix``.

    They keep their type, as errors of map-style datasets do.
    """
    try:
        yield
    except LoaderkitError:
        raise
    except Exception as error:
        raise error_about(what, error, fix) from error


def _ended_early(number: int, given: int) -> LoaderError:
    message = f"The dataset ended after {number:,} batches; the state has {given:,}."
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
        text += f"{self.samples:,} samples, but more batches than that have come: "
        if self.workers > 1:
            text += "probably each of its workers reads all of it; share it out by "
            text += "get_worker_info()"
        else:
            text += "mend its __len__"
        warnings.warn(text, UserWarning, stacklevel=stacklevel + 1)


class IterableBatches(IterableDataset[Delivery]):
    """Stand-in for an iterable dataset: gives deliveries of whole batches.

    Args:
        dataset: The user's dataset.
        collate: Joins a list of samples.
        rule: How samples become batches.
        epoch: Number of the epoch ``[]`` int64, in memory that is shared with workers
            that are kept.
        resumption: Where the workers begin.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        rule: IterableRule,
        epoch: torch.Tensor,
        resumption: Resumption,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.rule = rule
        self.epoch = epoch
        self.resumption = resumption
        self._failure: Failure | None = None
        self._resumed_epoch = int(epoch)

    def fail_with(self, failure: Failure) -> None:
        """Give an error in place of every batch, because the worker could not start."""
        self._failure = failure

    def __iter__(self) -> Iterator[Delivery]:
        """Call ``iter`` of the user's dataset, and give its batches.

        It is called now and not with the first batch, as torch does.
        """
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch, state = int(self.epoch), WorkerState()
        last_worker = SKIPPED
        if epoch == self._resumed_epoch:
            state = self.resumption.workers.get(worker, state)
            last_worker = self.resumption.last_worker
        if self._failure is not None:
            return iter([Delivery(self._failure, FAILED, worker, None)])
        turn_passed_on: list[Delivery] = []
        if worker <= last_worker:
            # torch asks worker 0 first.  Workers that had their turn before the state
            # was saved pass it on to the next one.
            turn_passed_on = [Delivery(None, SKIPPED, worker, None)]
        try:
            source = self._begin_dataset(worker, epoch, state)
        except LoaderkitError as error:
            if info is None:
                raise
            return iter([_delivery_of_failure(error, worker)])
        batches = self._make_batches(worker, workers, epoch, state, source)
        return chain(turn_passed_on, batches)

    def _begin_dataset(self, worker: int, epoch: int, state: WorkerState) -> Any:
        """Return an iterator over the user's dataset that begins at a saved state."""
        with (
            _naming_user_code("The dataset could not begin: ", _MEND_DATASET),
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
        return iter(self.dataset)

    def _restore_dataset(self, epoch: int, state: WorkerState) -> Any:
        if state.dataset is not None:
            self.dataset.load_state_dict(state.dataset)
        source: Any = self._begin_iterating(epoch)
        if state.iterator is not None:
            source.load_state_dict(state.iterator)
        return source

    def _make_batches(
        self, worker: int, workers: int, epoch: int, state: WorkerState, source: Any
    ) -> Iterator[Delivery]:
        ranks = self.rule.ranks

        def seeded(number: int) -> Seeded:
            """Return a block whose random numbers are equal on all ranks.

            Each rank reads the whole dataset, which may draw its order from them.
            """
            return Seeded(mix_seed(self.rule.seed, epoch, number * workers + worker))

        def joining(number: int) -> contextlib.AbstractContextManager[None]:
            """Return a block whose random numbers differ between ranks."""
            if ranks.world_size == 1:
                return contextlib.nullcontext()
            unique = (number * workers + worker) * ranks.world_size + ranks.rank
            return Seeded(mix_seed(self.rule.seed + 1, epoch, unique))

        samples = _continue_iterating(source)
        if ranks.world_size > 1:
            samples = RankShare(samples, ranks, drop_last=self.rule.drop_last)

        restored = state.dataset is not None or state.iterator is not None
        number = state.batches if restored else 0
        size = self.rule.batch_size
        rows: list[Any] = []
        while True:
            batch, full = None, rows
            failure: LoaderkitError | None = None
            with seeded(number):
                try:
                    self._fill_batch(samples, size, rows, number)
                    if not rows or (self.rule.drop_last and len(rows) < size):
                        skips = not (restored or state.exhausted)
                        if skips and number < state.batches:
                            missing_from, number = number, state.batches
                            raise _ended_early(missing_from, state.batches)
                        return
                    full, rows = rows, []
                    number += 1
                    if number <= state.batches and not restored:
                        continue  # given before the state was saved, so not joined
                    with joining(number):
                        batch = self._join_samples(full, number)
                except LoaderkitError as error:
                    failure = error
            if failure is not None:
                # Not raised: the dataset may go on after an error, as with torch's
                # DataLoader.  Samples that were read before the error stay in ``rows``
                # and become part of the next batch.
                yield _delivery_of_failure(failure, worker)
                continue
            exhausted = len(full) < size
            state_after = self._worker_state(number, source)
            state_after = state_after._replace(exhausted=exhausted)
            yield Delivery(batch, number, worker, state_after)
            if exhausted:
                # The iterator is not asked again: it may raise StopIteration only once.
                return

    def _fill_batch(
        self, samples: Iterator[Any], size: int, rows: list[Any], number: int
    ) -> None:
        """Read samples until a batch is full; ``rows`` keeps those before an error."""
        try:
            rows.extend(islice(samples, size - len(rows)))
        except LoaderkitError:
            raise
        except Exception as error:
            count = number * size + len(rows)
            what = f"The dataset failed after {count:,} samples: "
            raise error_about(what, error, _MEND_DATASET) from error

    def _join_samples(self, rows: list[Any], number: int) -> Any:
        collate, transform = split_transform(self.collate)
        what = f"The samples of batch {number:,} were read, but not joined: "
        named: Any = collate
        if isinstance(collate, OneByOne):
            what = f"Sample {number:,} was read, but not converted: "
            named = collate.convert
        with _naming_user_code(what, how_to_join(named)):
            batch = collate(rows)
        if transform is None:
            return batch
        return transform_batch(transform, batch, f"batch {number:,}")

    def _worker_state(self, number: int, source: Iterator[Any]) -> WorkerState:
        if is_own_iterator(self.dataset):
            return WorkerState(number, None, read_state(source))
        return WorkerState(number, read_state(self.dataset), read_state(source))
