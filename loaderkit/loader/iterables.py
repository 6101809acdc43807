"""Batches of an iterable dataset: shared out to ranks, seeded, resumable."""

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
from loaderkit.loader.ranks import Deal, Ranks, share_length
from loaderkit.loader.stateful import is_own_iterator, read_state
from loaderkit.loader.users_errors import error_about
from loaderkit.randomness import Seeded, mix_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


_MEND_STREAM = "mend the dataset; num_workers=0 to step through"


def _continue_iterating(source: Iterator[Any]) -> Iterator[Any]:
    """Read on without calling ``iter``: a dataset's own would begin anew.

    An error does not end it, as it would end a generator.
    """
    return starmap(next, repeat((source,)))


def _delivery_of_failure(error: Exception, worker: int) -> Delivery:
    """Send an error in place of a batch; torch would send its text alone."""
    alone = get_worker_info() is None
    failure = LocalFailure(error) if alone else Failure(error)
    return Delivery(failure, FAILED, worker, None)


@contextlib.contextmanager
def _naming_user_code(what: str, fix: str) -> Iterator[None]:
    """Tell an error of the user's code, its type kept, as for map-style datasets."""
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
    """Leave out a last batch that is not full, and a last round of uneven ranks."""
    seed: int = 0
    """What random numbers drawn while reading follow from."""
    ranks: Ranks = field(default_factory=Ranks)
    """Who takes which samples: each rank reads all of them and keeps every n-th."""

    def told_length(self, samples: int, workers: int) -> ToldLength:
        """Say how long an epoch is, if it has as many samples as the dataset says."""
        count = share_length(samples, self.ranks.world_size, drop_last=self.drop_last)
        batches = share_length(count, self.batch_size, drop_last=self.drop_last)
        # Each worker ends with a batch, or a round of the ranks, that may not be full.
        uneven = self.batch_size > 1 or self.ranks.world_size > 1
        spare = max(0, workers - 1) if uneven and not self.drop_last else 0
        return ToldLength(samples, batches, batches + spare, workers)


@dataclass(frozen=True)
class ToldLength:
    """What ``len(loader)`` said of an iterable dataset, whose own length is a claim."""

    samples: int
    """That the dataset says it has."""
    batches: int
    """Of these samples, on this rank."""
    most_batches: int
    """That workers can make of them, if each reads a part of its own."""
    workers: int
    """How many there are."""

    def check(self, batches: int, *, stacklevel: int) -> None:
        """Warn of more batches than that, as torch's DataLoader does.

        Args:
            batches: Given so far.
            stacklevel: As for ``warnings.warn``, counted from here.
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
    """Stands in for an iterable dataset where batches are made.

    Args:
        dataset: The user's.
        collate: How samples are joined.
        rule: How they become batches.
        epoch: Which one it gives ``[]`` int64; shared with workers that are kept.
        resumption: Where the workers stand.
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
        """Give this in place of every batch: the worker could not begin."""
        self._failure = failure

    def __iter__(self) -> Iterator[Delivery]:
        """Begin the user's dataset at once, as torch does, and give its batches."""
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
            # torch asks worker 0 first; those who had their turn pass it on.
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
        """Iterate over the user's dataset, from where a state says."""
        with (
            _naming_user_code("The dataset could not begin: ", _MEND_STREAM),
            Seeded(mix_seed(self.rule.seed, epoch, -1 - worker)),
        ):
            source = self._restore_dataset(epoch, state)
            if state.exhausted:
                # It gives nothing in this epoch, and begins the next one by itself.
                return self._begin_iterating(epoch) if state.ended else iter(())
            if state.ended:
                # What a dataset does behind its last sample, such as counting the
                # epoch or beginning anew, is not in its state yet.
                for _ in _continue_iterating(source):
                    pass
                return self._begin_iterating(epoch)
            return source

    def _begin_iterating(self, epoch: int) -> Iterator[Any]:
        # Other numbers than those of samples (seed) and of joining (seed + 1).
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
            """Read with equal numbers on all ranks.

            Each reads the whole dataset, which may choose its order by them.
            """
            return Seeded(mix_seed(self.rule.seed, epoch, number * workers + worker))

        def joining(number: int) -> contextlib.AbstractContextManager[None]:
            """Join with numbers that no other rank has."""
            if ranks.world_size == 1:
                return contextlib.nullcontext()
            unique = (number * workers + worker) * ranks.world_size + ranks.rank
            return Seeded(mix_seed(self.rule.seed + 1, epoch, unique))

        samples = _continue_iterating(source)
        if ranks.world_size > 1:
            samples = Deal(samples, ranks, drop_last=self.rule.drop_last)

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
                        continue  # given before the state was saved; only read on
                    with joining(number):
                        batch = self._join_samples(full, number)
                except LoaderkitError as error:
                    failure = error
            if failure is not None:
                # The dataset may have more, as torch's DataLoader allows.  Samples
                # read before the error wait for the rest of their batch.
                yield _delivery_of_failure(failure, worker)
                continue
            exhausted = len(full) < size
            state_after = self._worker_state(number, source)
            state_after = state_after._replace(exhausted=exhausted)
            yield Delivery(batch, number, worker, state_after)
            if exhausted:
                return  # not every iterator says twice that it has ended

    def _fill_batch(
        self, samples: Iterator[Any], size: int, rows: list[Any], number: int
    ) -> None:
        """Fill a batch up; what was read before an error stays in it."""
        try:
            rows.extend(islice(samples, size - len(rows)))
        except LoaderkitError:
            raise
        except Exception as error:
            count = number * size + len(rows)
            what = f"The dataset failed after {count:,} samples: "
            raise error_about(what, error, _MEND_STREAM) from error

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
