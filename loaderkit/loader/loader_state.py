"""Where a loader stands: between two epochs, or in the middle of one.

``LoaderState`` gives and takes ``state_dict``, whose form is in ``state_format``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from loaderkit.dataset_protocol import ask_identity
from loaderkit.loader.delivery import Resumption, WorkerState
from loaderkit.loader.ranks import read_ranks
from loaderkit.loader.resumable import EpochBatches
from loaderkit.loader.state_format import (
    STATE_VERSION,
    ExpectedState,
    RankOfState,
    changed_since_loading,
    check_consumed_samples,
    check_state,
    check_worker_states,
    position_of,
    read_workers,
    write_workers,
)
from loaderkit.loader.stateful import (
    digest_of_sampler,
    is_own_iterator,
    is_stateful,
    length_of,
    read_state,
)
from loaderkit.loader.user_batches import UserBatches

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loaderkit.loader.decisions import Decision
    from loaderkit.loader.delivery import Delivery
    from loaderkit.loader.loader_setup import LoaderSetup
    from loaderkit.loader.resumable import Position


IterationWorkers: TypeAlias = Literal["new", "kept", "beside"]
"""Which workers serve an iteration: new ones, those that torch kept from the epoch
before, or new ones beside these, which serve another iteration at the same time."""


class Standing(NamedTuple):
    """Where an iteration stands after the batches that the loop was given."""

    position: Position
    """The batches of the epoch that were given."""
    workers: Resumption
    """Where the workers stood when they had made these."""

    def after(self, delivery: Delivery, *, numbered: bool) -> Standing:
        """Return where the iteration stands once a batch is given too.

        Args:
            delivery: The batch.
            numbered: Its number is that of a batch of the epoch.
        """
        batches, ahead = self.position.batches, self.position.ahead
        if numbered and delivery.number != batches:
            ahead |= {delivery.number}  # out of turn
        else:
            batches += 1
            while batches in ahead:
                ahead -= {batches}
                batches += 1
        workers = self.workers
        if delivery.state is not None:
            states = {**workers.workers, delivery.worker: delivery.state}
            workers = Resumption(states, delivery.worker)
        elif delivery.worker != workers.last_worker:
            workers = Resumption(workers.workers, delivery.worker)
        return Standing(self.position.after(batches, ahead), workers)


class Progress:
    """How far an iteration has come.

    Args:
        start: Where it begins.
        resumption: Where the workers begin.
        dataset_at_start: What a saved state says of the dataset until a batch is given.
    """

    def __init__(
        self,
        start: Position,
        resumption: Resumption,
        dataset_at_start: Mapping[str, Any],
    ) -> None:
        self.start = replace(start)
        self.dataset_at_start = dataset_at_start
        self.standing = Standing(self.start, resumption)
        """Replaced as a whole: Ctrl-C and the death of a worker raise between any two
        instructions, and a state that is saved then must not be half of one batch and
        half of the next."""
        self.has_stopped = False
        """No more batches come: all were given, or a worker has died."""
        self.has_ended = False
        """All batches of the epoch were given."""
        self.has_lost_worker = False
        """A worker could not begin: kept for later epochs, it would fail in each."""

    @property
    def has_given(self) -> bool:
        """Whether the loop was given a batch."""
        return self.standing.position != self.start

    def lose_worker(self) -> None:
        """Note that a worker could not begin."""
        self.has_lost_worker = True

    def stop(self) -> None:
        """Note that no more batches come, though some of the epoch are left."""
        self.has_stopped = True

    def end(self) -> None:
        """Note that all batches of the epoch were given."""
        self.has_stopped = self.has_ended = True


class SeedChoice(NamedTuple):
    """What order and random numbers follow from, and what they are to follow next."""

    seed: Decision[int]
    next_seed: Decision[int] | None
    progress: Progress | None
    """The iteration that began last."""


class LoaderState:
    """Where a loader stands.

    Args:
        setup: What the loader was built of.
        dataset: What it reads.
    """

    def __init__(self, setup: LoaderSetup, dataset: Any) -> None:
        self.seed = setup.plan.seed
        """What order and random numbers follow from: a state may bring another."""
        self._setup = setup
        self._dataset = dataset
        # Chosen since the epoch began whose batches the loop is given.
        self._next_seed: Decision[int] | None = None
        # Where the next epoch begins.  The samplers that the loader shows hold the same
        # object, so it is moved and never replaced.
        self._position = setup.position
        # What the order followed from as the epoch began, or as a state was loaded.
        self._order_at_start: Mapping[str, Any] = {}
        # Where workers begin that are started next: a state may say it.
        self._loaded_workers = Resumption()
        # The iteration that began last; None if the next epoch was chosen since.
        self._progress: Progress | None = None
        # The last iteration of the workers that torch keeps.  It may be another one: an
        # iteration beside it has workers of its own.
        self._kept_progress: Progress | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle where the next epoch begins, and no iteration or workers."""
        return {**vars(self), "_progress": None, "_kept_progress": None}

    @property
    def is_in_epoch(self) -> bool:
        """Whether the next iteration begins in the middle of an epoch."""
        return self._position.is_in_epoch

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that begins next, or in whose middle one does."""
        return self._position.epoch

    @property
    def lost_kept_workers(self) -> bool:
        """Whether one of the workers that torch keeps has died, or could not begin."""
        kept = self._kept_progress
        if kept is None:
            return False
        has_died = kept.has_stopped and not kept.has_ended
        return has_died or kept.has_lost_worker

    def is_reading(self, progress: Progress) -> bool:
        """Tell whether an iteration goes on, and no epoch was chosen since it began."""
        return progress is self._progress and not progress.has_stopped

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next; the one that it is in already goes on.

        Raises:
            OptionError: It is no integer from 0 that int64 holds.
        """
        goes_on = epoch == self._position.epoch
        self._position.set_epoch(epoch)
        self._progress = None
        if not goes_on:
            self._loaded_workers = Resumption()

    def choose_next_seed(self, seed: Decision[int]) -> None:
        """Choose another seed; an epoch that has begun goes on with its own."""
        self._next_seed = seed
        if self._progress is None or self._progress.has_ended:
            self.take_next_seed()

    def take_next_seed(self) -> None:
        """Follow the seed that was chosen, unless in the middle of an epoch."""
        if self._next_seed is None or self.is_in_epoch:
            return
        self.seed, self._next_seed = self._next_seed, None
        if self._setup.batches is not None:
            self._setup.batches.reseed(self.seed.value)

    @property
    def seed_choice(self) -> SeedChoice:
        """What seeds are followed, to go back to where an iteration fails to begin."""
        return SeedChoice(self.seed, self._next_seed, self._progress)

    def go_back_to(self, choice: SeedChoice) -> None:
        """Follow the seed of before, unless an iteration has begun since."""
        if self._progress is not choice.progress or self.seed is choice.seed:
            return
        self.seed, self._next_seed = choice.seed, choice.next_seed
        if self._setup.batches is not None:
            self._setup.batches.reseed(self.seed.value)

    def agree_with_ranks(self) -> None:
        """Compare what the next epoch follows from with the other ranks.

        Raises:
            LoaderError: This process is another rank than it was, or a rank differs.
        """
        setup = self._setup
        setup.agreement.check_ranks(os.environ)
        if not setup.agreement.can_ask:
            return
        compared: dict[str, Any] = {
            "seed": self.seed.value,
            "epoch": self._position.epoch,
            "samples given before": self._position.samples,
            "batches given before": self._position.batches,
            "batches": setup.batching,
            "orders": self._order(),
        }
        if setup.agreement.is_first:
            # Only once, because a sampler may have millions of rows.  What changes
            # later, such as a generator that draws the order, changes alike on ranks
            # where it began alike.
            compared["datasets"] = self._identity
            if isinstance(setup.batches, UserBatches):
                compared["samplers"] = digest_of_sampler(setup.batches.sampler)
        setup.agreement.check(compared)

    def next_start(self) -> Position:
        """Return where the next iteration begins.

        Raises:
            LoaderError: A state was loaded in the middle of this epoch, and the dataset
                has changed since.
        """
        order = self._order()
        if self.is_in_epoch and order != self._order_at_start:
            raise changed_since_loading(self._order_at_start, order)
        return replace(self._position)

    def progress_from(
        self, start: Position, num_workers: int, which_workers: IterationWorkers
    ) -> Progress:
        """Make the counter of an iteration, whose workers have been started.

        Args:
            start: Where it begins.
            num_workers: Number of workers.
            which_workers: That serve the iteration.
        """
        workers = self.workers_to_start(num_workers)
        if which_workers == "kept" and self._kept_progress is not None:
            # They go on with their copies of the dataset.
            workers = _at_end_of_epoch(self._kept_progress.standing.workers)
        dataset_at_start: dict[str, Any] = {}
        if self._depends_on_workers and not workers.workers:
            # Read before the first batch, which may move the dataset and never come.
            dataset_at_start = self._state_of_dataset(num_workers)
        return Progress(start, workers, dataset_at_start)

    def begin_iteration(
        self, progress: Progress, which_workers: IterationWorkers
    ) -> None:
        """Move on to the next epoch, and say from now on where this iteration stands.

        The last step: until then an error, Ctrl-C or a worker's death leaves the loader
        where it was, and the next iteration begins the same epoch.

        Args:
            progress: How far the iteration has come; counted up by whoever gives its
                batches.
            which_workers: That serve the iteration.
        """
        if which_workers != "beside":
            self._kept_progress = progress
        self._order_at_start = self._order()
        self._progress = progress
        self._loaded_workers = Resumption()
        self._position.advance()

    def workers_to_start(self, num_workers: int) -> Resumption:
        """Return where workers begin that are started for the next iteration.

        Args:
            num_workers: Number of workers.
        """
        if self._setup.iterable is not None:
            return self._loaded_workers  # its stand-in passes on the turns of workers
        return self._loaded_workers.turned(num_workers)

    def save(self, num_workers: int, *, has_kept_workers: bool) -> dict[str, Any]:
        """Write where the loader stands, after the batches that the loop was given.

        Args:
            num_workers: Number of workers.
            has_kept_workers: torch keeps workers, which will read the next epoch.
        """
        setup = self._setup
        progress = self._progress
        is_in_epoch = progress is not None and not progress.has_ended
        position = self._position
        if progress is not None and is_in_epoch:
            position = self._running_position(progress)

        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "seed": self.seed.value,
            "epoch": position.epoch,
            "batches": position.batches,
            # Of the epoch's order, by all ranks: what another number of ranks, or
            # another batch size, goes on from.
            "samples": position.samples,
            "batching": setup.batching,
            # What the dataset was like as the epoch began: it may have grown since.
            "order": self._order_at_start if is_in_epoch else self._order(),
            "dataset": self._identity,
        }
        if position.ahead:
            state["ahead"] = sorted(position.ahead)
        rank = self._rank_of_state(num_workers)
        if rank is not None and position.is_in_epoch:
            state["rank"] = list(rank)
        if isinstance(setup.batches, UserBatches):
            state["sampler"] = setup.batches.state_after(position, running=is_in_epoch)
        if self._depends_on_workers:
            state["num_workers"] = num_workers
            standing = self._workers_standing(has_kept_workers=has_kept_workers)
            if position.batches or standing.workers:
                state |= write_workers(standing)
            elif progress is not None and is_in_epoch:
                state |= progress.dataset_at_start
            else:
                state |= self._state_of_dataset(num_workers)
        return state

    def check(self, state: Mapping[str, Any], num_workers: int) -> None:
        """Refuse a state that this loader cannot go on from.

        Args:
            state: What ``save`` returned, here or in another run.
            num_workers: Number of workers.

        Raises:
            LoaderError: It is no such state, or that of another order of batches.
        """
        setup = self._setup
        expected = ExpectedState(
            batching=setup.batching,
            counts_samples=isinstance(setup.batches, EpochBatches),
            rank=self._rank_of_state(num_workers),
            order=self._order(),
            dataset=self._identity,
            seed=self.seed.value if setup.seed_asked else None,
            has_sampler=isinstance(setup.batches, UserBatches),
            num_workers=num_workers if self._depends_on_workers else None,
        )
        check_state(state, expected)
        if isinstance(setup.batches, EpochBatches):
            # A user's sampler is drawn again, and streams tell by ending early.
            check_consumed_samples(state, setup.batches.count_samples())
            setup.batches.check_position(position_of(state), int(state["seed"]))
        if self._depends_on_workers:
            check_worker_states(state, num_workers)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that ``check`` let pass.  No iteration may be running.

        Args:
            state: What ``save`` returned.

        Raises:
            LoaderError: The sampler cannot be brought to where it stood.
        """
        batches = self._setup.batches
        seed = int(state["seed"])
        self.seed, self._next_seed = replace(self.seed, value=seed), None
        if batches is not None:
            batches.reseed(seed)

        position = position_of(state)
        if isinstance(batches, UserBatches):
            batches.restore(state["sampler"], position)
        self._position.go_to(position)
        self._order_at_start = self._order()
        self._progress = None

        self._loaded_workers = Resumption()
        if "main" in state:
            self._dataset.load_state_dict(state["main"])
        if "workers" in state:
            self._loaded_workers = read_workers(state)

    @cached_property
    def _identity(self) -> str | None:
        """What tells the samples from those of another cache.

        Asked once: an open dataset stays what it is, and hashing which of ten million
        rows were selected takes longer than a training step.
        """
        return ask_identity(self._dataset)

    def _order(self) -> dict[str, Any]:
        """Return what the order follows from that the words for it do not name.

        Without it another number of buckets, or other sizes of as many samples, would
        end batches elsewhere: some samples would come twice, others never.
        """
        setup = self._setup
        if isinstance(setup.batches, EpochBatches):
            return setup.batches.order_facts()
        if setup.iterable is None:
            return {"samples": length_of(self._dataset)}
        return {"samples": setup.stream_length}

    def _running_position(self, progress: Progress) -> Position:
        """Return where an iteration stands, with the samples that were consumed."""
        batches, position = self._setup.batches, progress.standing.position
        if not isinstance(batches, EpochBatches):
            return position
        samples = batches.consumed_samples(progress.start, position.batches)
        return replace(position, samples=samples)

    def _rank_of_state(self, num_workers: int) -> RankOfState | None:
        """Return whose states these are; None if those of one rank are every rank's.

        With ``in_order=False`` ranks are given their batches out of turn, each as its
        workers happen to be.  Of a stream that shares itself out, each has a part.
        """
        setup = self._setup
        ranks = setup.agreement.ranks
        if setup.iterable is not None and ranks.world_size == 1 and ranks.launched > 1:
            # A stream that shares itself out among ranks that the loader ignores.
            here = read_ranks(None, None, os.environ)
            return RankOfState(here.rank, here.world_size)
        if setup.plan.in_order.value or ranks.world_size == 1 or not num_workers:
            return None
        return RankOfState(ranks.rank, ranks.world_size)

    @property
    def _depends_on_workers(self) -> bool:
        """Whether each worker goes its own way, so that a state needs all of them."""
        return self._setup.iterable is not None or is_stateful(self._dataset)

    def _workers_standing(self, *, has_kept_workers: bool) -> Resumption:
        """Return where the workers of this epoch stand, or of the next if none runs.

        Args:
            has_kept_workers: torch keeps workers, which will read the next epoch.
        """
        if self._progress is not None and not self._progress.has_ended:
            return self._progress.standing.workers
        goes_on_with_kept = has_kept_workers and not self.lost_kept_workers
        if goes_on_with_kept and self._kept_progress is not None:
            return _at_end_of_epoch(self._kept_progress.standing.workers)
        return self._loaded_workers

    def _state_of_dataset(self, num_workers: int) -> dict[str, Any]:
        """Write the state of the dataset here, of which new workers get copies.

        Args:
            num_workers: Number of workers.
        """
        dataset_state = self._read_dataset_state(num_workers)
        if dataset_state is None:
            return {}
        if not is_own_iterator(self._dataset):
            return {"main": dataset_state}

        # The state of a dataset that is its own iterator is restored after it has
        # begun, as that of a worker is.
        has_ended = False
        if self._progress is not None and not num_workers:
            has_ended = self._progress.has_ended
        worker_state = WorkerState(
            iterator=dataset_state, exhausted=has_ended, ended=has_ended
        )
        workers = range(max(1, num_workers))
        return write_workers(Resumption(dict.fromkeys(workers, worker_state)))

    def _read_dataset_state(self, num_workers: int) -> Any:
        """Read the state of the dataset in this process; None if it has none."""
        try:
            return read_state(self._dataset)
        except Exception:
            # An iterable dataset that was not begun in this process may have no state
            # to tell yet.  In another run it will not have been begun either.
            was_begun_here = self._progress is not None and not num_workers
            if was_begun_here or self._setup.iterable is None:
                raise
            return None


def _at_end_of_epoch(resumption: Resumption) -> Resumption:
    """Return how workers stand between two epochs if they go on with their datasets."""
    workers = {
        worker: state._replace(batches=0, ended=True)
        for worker, state in resumption.workers.items()
    }
    return Resumption(workers)
