"""PlannedLoader: a torch DataLoader with a plan, epochs, and a state to go on from.

torch's DataLoader makes batches and sends them; nothing of that is done again here.  A
``PlannedLoader`` shows torch's attributes as they were asked for, and each iteration
reads from an inner, ordinary DataLoader, whose dataset is a stand-in: it makes a batch
of rows, and gives it with what the training process must know to go on behind it (see
``delivery``).
"""

from __future__ import annotations

import copy
import os
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from loaderkit.answers import answer_wrong_calls, no_such_attribute
from loaderkit.arguments import show_value
from loaderkit.dataset_protocol import ask_identity, let_go_of_shards
from loaderkit.errors import LoaderError, NoSuchAttributeError, OptionError
from loaderkit.forking import warn_of_fork_hazard
from loaderkit.habits import LOADER
from loaderkit.loader.collating import OneByOne
from loaderkit.loader.delivery import (
    DeliveryCollate,
    MapBatches,
    Resumption,
    WorkerStart,
    WorkerState,
)
from loaderkit.loader.epochs import (
    LoaderEpoch,
    Progress,
    announce_downloads,
    death_at_start,
)
from loaderkit.loader.fetching import Fetching, Sending
from loaderkit.loader.iterables import IterableBatches, IterableRule, ToldLength
from loaderkit.loader.loader_states import (
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
from loaderkit.loader.ranks import read_ranks
from loaderkit.loader.resumable import EpochBatches, IterationBatches, Position
from loaderkit.loader.sampler_epochs import set_sampler_epoch
from loaderkit.loader.stateful import (
    digest_of,
    is_own_iterator,
    is_stateful,
    length_of,
    read_state,
)
from loaderkit.loader.user_batches import UserBatches
from loaderkit.memory.host import read_host
from loaderkit.memory.shm_batch import forget
from loaderkit.randomness import mix_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loaderkit.loader.agreement import OrderAgreement
    from loaderkit.loader.limits import LimitCheck
    from loaderkit.loader.plan import LoaderPlan


class ShownBatching(NamedTuple):
    """What a loader shows of its batches, under torch's names."""

    batch_size: int | None
    """As it was asked for."""
    drop_last: bool
    """As it was asked for."""
    sampler: Any
    """Gives the rows of this rank, one by one."""


@dataclass(frozen=True)
class LoaderSetup:
    """What ``build_loader`` decided, besides the settings of torch's DataLoader."""

    plan: LoaderPlan
    """The settings, each with its reason."""
    batches: EpochBatches | UserBatches | None
    """The batches of this rank; None for iterable datasets."""
    iterable: IterableRule | None
    """How the samples of an iterable dataset become batches; None for others."""
    position: Position
    """Where the first iteration begins."""
    shown: ShownBatching | None
    """What is shown of the batches; None shows what torch makes of the settings."""
    batched: bool
    """Samples are joined into batches; else each is given by itself."""
    batching: str
    """How samples become batches, the same on every rank: states must agree on it."""
    seeded: bool
    """Random numbers drawn while reading follow from each batch alone."""
    seed_asked: bool
    """The seed was given, so that another run's is a mistake."""
    agreement: OrderAgreement
    """Compares the order with that of the other ranks."""
    limit_check: LimitCheck | None = None
    """What the samples of a batch must keep to; None where they are known to."""
    stream_length: int | None = None
    """What an iterable dataset said its length is; None if it may differ by rank."""


@answer_wrong_calls
class PlannedLoader(DataLoader[Any]):
    """A DataLoader with a plan, an epoch, and a state that can be saved.

    Made by ``build_loader``.  ``sampler``, ``batch_size`` and torch's other attributes
    say what was asked for; ``batch_sampler`` gives the batches of all ranks, since
    trainers that share batches out themselves take it.

    A trainer may build it again from these attributes, as it does with any DataLoader.
    It is a plain DataLoader then, without a plan.

    Args:
        dataset: As for a DataLoader.
        *args: As for a DataLoader.
        setup: What ``build_loader`` decided; None makes a plain DataLoader.
        **settings: As for a DataLoader.
    """

    def __init__(
        self,
        dataset: Any,
        *args: Any,
        setup: LoaderSetup | None = None,
        **settings: Any,
    ) -> None:
        # Before torch's constructor, whose assignments __setattr__ looks at.
        self._setup = setup
        super().__init__(dataset, *args, **settings)
        if setup is None:
            return
        self._position = setup.position
        self._resumption = Resumption()
        self._progress: Progress | None = None
        # The running iteration is known, not held: a loop that is left frees it.
        self._running_epoch: Callable[[], LoaderEpoch | None] = _no_epoch
        self._iteration: IterationBatches | None = None
        self._order_at_start: dict[str, Any] = {}
        self._told_length: ToldLength | None = None
        self._warned_of_seeds = False
        self._epoch_number = torch.zeros((), dtype=torch.int64)
        self._share_epoch_number()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; of those that say how rows are chosen, to what is shown.

        torch's constructor takes either a ``batch_sampler`` or the other three, and
        sets the others to values of its own.  Here all four describe the same batches,
        and trainers read any of them.  Once it is constructed, torch lets nobody
        change them.
        """
        setup = vars(self).get("_setup")
        if setup is not None and setup.shown is not None:
            value = setup.shown._asdict().get(name, value)
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # a type checker shall go on to find misspelt names

        def __getattr__(self, name: str) -> Any:
            """Answer an attribute that other loaders have with what there is here."""
            hint = LOADER.get(name)
            if name.startswith("_") or hasattr(type(self), name):
                # Also a property that raised an AttributeError of its own: again.
                return object.__getattribute__(self, name)
            if hint is None:
                raise no_such_attribute(self, name)
            message = f"A loader has no attribute {name!r}."
            raise NoSuchAttributeError(message, why=hint.why, fix=hint.fix)

        def __getitem__(self, index: object) -> Any:
            """Answer ``loader[0]``; ``next(loader)`` is left to Python's own words.

            A ``__next__`` would make this an iterator for trainers that ask.
            """
            message = f"A loader has no batch of its own at [{show_value(index)}]."
            why = "batches are made one after the other, in an order that epochs change"
            fix = "next(iter(loader)); loader.dataset[0] is a sample"
            raise OptionError(message, why=why, fix=fix)

    @property
    def plan(self) -> LoaderPlan:
        """The settings, each with its reason."""
        if self._setup is None:
            msg = "a loader that a trainer built again has no plan"
            raise AttributeError(msg)
        return self._setup.plan

    @property
    def batches(self) -> EpochBatches | UserBatches | None:
        """What gives the rows of each batch; None for iterable datasets."""
        return None if self._setup is None else self._setup.batches

    def _repr_html_(self) -> str | None:
        return None if self._setup is None else self._setup.plan._repr_html_()

    def __getstate__(self) -> dict[str, Any]:
        """Travel, or be copied, as what it was built of, without workers.

        A copy begins where this loader's next iteration would: with the next epoch, or
        in the middle of one if a state was loaded.  It moves on by itself.
        """
        attributes = {**vars(self), "_iterator": None}
        if self._setup is None:
            return attributes
        attributes |= {
            "_iteration": None,
            "_progress": None,
            "_running_epoch": _no_epoch,
        }
        if self._position.is_in_epoch:
            # Samplers of the user's travel as they stand, and workers do not at all:
            # the copy is brought to the middle of an epoch as another run would be.
            attributes["_state"] = self.state_dict()
        return attributes

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        state = attributes.pop("_state", None)
        vars(self).update(attributes)
        if self._setup is None:
            return
        self._share_epoch_number()
        if state is not None:
            self.load_state_dict(state)

    def __copy__(self) -> PlannedLoader:
        """Make a loader of the same dataset and functions that moves on by itself."""
        shared_with_copy = (self.dataset, self.collate_fn, self.worker_init_fn)
        memo = {id(shared): shared for shared in shared_with_copy}
        return copy.deepcopy(self, memo)

    def _share_epoch_number(self) -> None:
        if self.persistent_workers and self._planned().iterable is not None:
            # Workers that are kept are told of the next epoch by nothing else: torch
            # sends them no rows, which tell those of map-style datasets.
            self._epoch_number.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        if self._setup is None:
            return super().__len__()
        batches = self._setup.batches
        if isinstance(batches, EpochBatches):
            # Not len(batches), which follows whoever loops over loader.batch_sampler.
            return len(batches.current())
        if batches is not None:
            return len(batches)
        rule = self._setup.iterable
        assert rule is not None
        samples = len(self.dataset)  # type: ignore[arg-type]
        self._told_length = rule.told_length(samples, self.num_workers)
        return self._told_length.batches

    def check_length(self, batches: int) -> None:
        """Warn where an iterable dataset gives more than ``len(loader)`` said."""
        if self._told_length is not None:
            self._told_length.check(batches, stacklevel=4)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next.

        The epoch in whose middle a state was loaded goes on there.
        """
        if self._setup is None:
            set_sampler_epoch(self.batch_sampler, epoch)
            return
        if epoch != self._position.epoch:
            self._resumption = Resumption()
        self._position.set_epoch(epoch)
        self._progress = None

    def __iter__(self) -> Any:
        setup = self._setup
        if setup is None:
            return super().__iter__()
        setup.agreement.check_ranks(os.environ)
        self._agree_with_ranks(setup)

        # Workers that are kept serve one loop.  A second one beside it gets its own.
        running = self._running_epoch()
        is_alone = (
            self.persistent_workers
            and running is not None
            and not running.progress.ended
        )
        start = self._begin_epoch(setup, is_alone=is_alone)

        if self.num_workers:
            let_go_of_shards(self.dataset)
        kills_before = read_host().oom_kills if self.num_workers else None
        downloads = announce_downloads(self, start)
        try:
            torch_iterator: Any = (
                self._get_iterator() if is_alone else super().__iter__()
            )
            self._progress = Progress(start, self._workers_at_start())
            self._resumption = Resumption()
            epoch = LoaderEpoch(
                self,
                torch_iterator,
                self._progress,
                alone=is_alone,
                kills=kills_before,
                downloads=downloads,
            )
        except RuntimeError as error:
            if downloads is not None:
                downloads.close()
            death = death_at_start(error)
            if death is None:
                raise
            raise death from error
        self._running_epoch = weakref.ref(epoch)
        return epoch

    def _begin_epoch(self, setup: LoaderSetup, *, is_alone: bool) -> Position:
        """Move on to the next epoch.

        Args:
            setup: What the loader was built of.
            is_alone: The iteration does not use the workers that are kept.

        Returns:
            Where the iteration begins.
        """
        order = self._order()
        if self._position.is_in_epoch and order != self._order_at_start:
            raise changed_since_loading(self._order_at_start, order)
        start = self._position.advance()
        self._epoch_number.fill_(start.epoch)
        self._order_at_start = order
        if setup.batches is not None:
            keeps_iterator = self._iterator is not None and not is_alone
            if keeps_iterator and self._iteration is not None:
                # torch's iterator, which is kept, asks the object it was made with.
                self._iteration.begin_at(start)
            else:
                self._iteration = IterationBatches(setup.batches, start)
        return start

    def _agree_with_ranks(self, setup: LoaderSetup) -> None:
        """Compare what this epoch follows from with the other ranks."""
        if not setup.agreement.can_ask:
            return
        order: dict[str, Any] = {
            "seed": setup.plan.seed.value,
            "epoch": self._position.epoch,
            "samples given before": self._position.samples,
            "batches given before": self._position.batches,
            "batches": setup.batching,
            "orders": self._order(),
        }
        if setup.agreement.is_first:
            # Its rows may be millions; what changes later, such as a generator that
            # draws the order, goes on alike where it began alike.
            order["datasets"] = ask_identity(self.dataset)
            if isinstance(setup.batches, UserBatches):
                order["samplers"] = digest_of(setup.batches.sampler)
        setup.agreement.check(order)

    def _order(self) -> dict[str, Any]:
        """Say what the order follows from that the words do not name.

        Without it another number of buckets, or other sizes of as many samples, would
        end batches elsewhere: some samples twice, others never.
        """
        setup = self._planned()
        if isinstance(setup.batches, EpochBatches):
            return setup.batches.order_facts()
        if setup.iterable is None:
            return {"samples": length_of(self.dataset)}
        return {"samples": setup.stream_length}

    def state_dict(self) -> dict[str, Any]:
        """Say where the current epoch stands: after the batches that were given.

        Returns:
            Plain values, and the states of a dataset, sampler or iterator that has a
            ``state_dict``; following torchdata's StatefulDataLoader.
        """
        setup = self._planned()
        progress = self._progress
        position = self._position
        is_running = progress is not None and not progress.ended
        if progress is not None and is_running:
            position = progress.position
            if isinstance(setup.batches, EpochBatches):
                position = replace(
                    position,
                    samples=setup.batches.consumed_samples(
                        progress.start, position.batches
                    ),
                )

        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "seed": setup.plan.seed.value,
            "epoch": position.epoch,
            "batches": position.batches,
            # Of the epoch's order, by all ranks: what another number of ranks, or
            # another batch size, goes on from.
            "samples": position.samples,
            "batching": setup.batching,
            # What the dataset was like as the epoch began: it may have grown since.
            "order": self._order_at_start if is_running else self._order(),
        }
        if position.ahead:
            state["ahead"] = sorted(position.ahead)
        own_rank = self._rank_of_state()
        if own_rank is not None and position.is_in_epoch:
            state["rank"] = list(own_rank)
        if isinstance(setup.batches, UserBatches):
            state["sampler"] = setup.batches.state_after(position, running=is_running)
        if self._depends_on_workers:
            state["num_workers"] = self.num_workers
            resumption = self._resumption if progress is None else progress.resumption()
            is_begun = position.batches > 0
            state |= self._state_of_workers(resumption, is_begun=is_begun)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader, or another run, stood.

        Args:
            state: What its ``state_dict`` gave, on any rank.

        Raises:
            LoaderError: It is no such state, its batches were made in another way, or
                something cannot be brought to where it stood.
        """
        self._check_state(state)
        setup = self._adopt_seed(int(state["seed"]))
        self.close()

        position = position_of(state)
        if isinstance(setup.batches, UserBatches):
            setup.batches.restore(state["sampler"], position)
        self._position.go_to(position)  # shared with the samplers, so not replaced
        self._order_at_start = self._order()
        self._progress = None
        self._resumption = Resumption()
        if "main" in state:
            dataset: Any = self.dataset
            dataset.load_state_dict(state["main"])
        if "workers" in state:
            self._resumption = read_workers(state)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        setup = self._planned()
        num_workers = self.num_workers if self._depends_on_workers else None
        expected = ExpectedState(
            batching=setup.batching,
            counts_samples=isinstance(setup.batches, EpochBatches),
            rank=self._rank_of_state(),
            order=self._order(),
            seed=setup.plan.seed.value if setup.seed_asked else None,
            has_sampler=isinstance(setup.batches, UserBatches),
            num_workers=num_workers,
        )
        check_state(state, expected)
        if isinstance(setup.batches, EpochBatches):
            # A user's sampler is drawn again, and streams tell by ending early.
            check_consumed_samples(state, setup.batches.count_samples())
            setup.batches.check_position(position_of(state), int(state["seed"]))
        if num_workers is not None:
            check_worker_states(state, num_workers)

    def _rank_of_state(self) -> RankOfState | None:
        """Say whose states these are; None where those of one rank are every rank's.

        With ``in_order=False`` ranks are given their batches out of turn, each as its
        workers happen to be; and of a stream that shares itself out, each has a part.
        """
        setup = self._planned()
        ranks = setup.agreement.ranks
        if setup.iterable is not None and ranks.world_size == 1 and ranks.launched > 1:
            # A stream that shares itself out among ranks that the loader ignores.
            here = read_ranks(None, None, os.environ)
            return RankOfState(here.rank, here.world_size)
        if setup.plan.in_order.value or ranks.world_size == 1 or not self.num_workers:
            return None
        return RankOfState(ranks.rank, ranks.world_size)

    def _adopt_seed(self, seed: int) -> LoaderSetup:
        """Take over another run's seed, where none was asked for."""
        setup = self._planned()
        if setup.batches is not None:
            setup.batches.reseed(seed)
        iterable = setup.iterable
        if iterable is not None:
            iterable = replace(iterable, seed=seed)
        plan = replace(setup.plan, seed=replace(setup.plan.seed, value=seed))
        self._setup = replace(setup, plan=plan, iterable=iterable)
        return self._setup

    def close(self) -> None:
        """End the workers that are kept between epochs, and a running epoch."""
        if self._setup is not None:
            running = self._running_epoch()
            if running is not None:
                running.close()
            # An iterator that somebody still holds is over; the next is not beside it.
            self._running_epoch = _no_epoch
        kept_iterator: Any = self._iterator
        self._iterator = None
        if kept_iterator is not None:
            kept_iterator._shutdown_workers()

    @property
    def _depends_on_workers(self) -> bool:
        """Whether each worker goes its own way, so that a state needs all of them."""
        return self._planned().iterable is not None or is_stateful(self.dataset)

    def _planned(self) -> LoaderSetup:
        if self._setup is None:
            message = "A loader that a trainer built again has no state."
            fix = "keep the loader that build_loader gave, and ask that one"
            raise LoaderError(message, why="it is a plain DataLoader", fix=fix)
        return self._setup

    def _workers_at_start(self) -> Resumption:
        """Say how the workers stand as an iteration begins."""
        if self._progress is None or not self.persistent_workers:
            return self._fresh_workers()
        # Workers that are kept go on with their datasets, in a new epoch.
        return _at_end_of_epoch(self._progress.resumption())

    def _fresh_workers(self) -> Resumption:
        """Say where workers that are started for the next iteration begin."""
        if self._planned().iterable is not None:
            return self._resumption
        return self._resumption.turned(self.num_workers)

    def _state_of_workers(
        self, resumption: Resumption, *, is_begun: bool
    ) -> dict[str, Any]:
        """Say how the workers stand, or the dataset here between two epochs.

        Args:
            resumption: How the workers stand.
            is_begun: Batches of the epoch were given.
        """
        if is_begun:
            return write_workers(resumption)
        if self.persistent_workers:
            # They go on with their datasets.
            return write_workers(_at_end_of_epoch(resumption))

        # Fresh workers begin with a copy of the dataset that is here.
        dataset_state = self._read_dataset_state()
        if dataset_state is None:
            return {}
        if not is_own_iterator(self.dataset):
            return {"main": dataset_state}
        # Such a dataset is its own iterator, whose state is put back once it was begun.
        progress = None if self.num_workers else self._progress
        has_ended = progress is not None and progress.ended
        stands = WorkerState(
            iterator=dataset_state, exhausted=has_ended, ended=has_ended
        )
        workers = range(max(1, self.num_workers))
        return write_workers(Resumption(dict.fromkeys(workers, stands)))

    def _read_dataset_state(self) -> Any:
        """Read the state of the dataset in this process."""
        try:
            return read_state(self.dataset)
        except Exception:
            # An iterable dataset that was not begun here may have no state to tell.
            # Another run's is as this one then.
            begun_here = self._progress is not None and not self.num_workers
            if begun_here or self._planned().iterable is None:
                raise
            return None

    def _get_iterator(self) -> Any:
        """Give torch's iterator over an inner loader.  torch's ``__iter__`` calls this.

        Overridden rather than ``__iter__``, so that torch goes on deciding when the
        iterator of workers that are kept is used again.
        """
        setup = self._setup
        if setup is None:
            return super()._get_iterator()
        if self.num_workers and setup.plan.multiprocessing_context.value == "fork":
            warn_of_fork_hazard(5, dataset=self.dataset)  # where the loop is

        sending = self._sending(setup)
        iterator: Any = self._inner_loader(setup, sending)._get_iterator()
        if self.num_workers:
            # An error that is kept (by a notebook, a debugger, pytest) keeps the frames
            # of the loop, and these the iterator: a cycle.  The collector would end the
            # queues before the iterator, which then tells its workers to stop through
            # them in vain, and waits for each for 5 s.
            keep_open = weakref.finalize(iterator, list, iterator._index_queues)
            keep_open.atexit = False
        if sending is not None:
            # Segments that were mapped for these workers' batches serve nobody else.
            pids = [worker.pid for worker in iterator._workers]
            weakref.finalize(iterator, forget, pids).atexit = False
        return iterator

    def _sending(self, setup: LoaderSetup) -> Sending | None:
        """Make what packs batches in workers; None where torch sends them."""
        if setup.plan.sharing.value != "parcel":
            return None
        # torch asks a worker for the next batch once its oldest was received; where
        # workers are asked out of turn, one could be asked for all under way.
        is_in_turn = setup.plan.in_order.value and setup.iterable is None
        workers_asked = 1 if is_in_turn else self.num_workers
        # One more is being made, and one is with the loop.
        return Sending((self.prefetch_factor or 0) * workers_asked + 2)

    def _inner_loader(
        self, setup: LoaderSetup, sending: Sending | None
    ) -> DataLoader[Any]:
        """Make the loader that reads: the same settings, over a stand-in."""
        stand_in: Any = self._stand_in(setup)
        settings: dict[str, Any] = {"batch_sampler": self._iteration}
        if setup.iterable is not None:
            settings = {"batch_size": None}  # the stand-in gives whole batches
        if self.num_workers:
            settings["prefetch_factor"] = self.prefetch_factor
            settings["persistent_workers"] = self.persistent_workers
            settings["multiprocessing_context"] = self.multiprocessing_context
            if not setup.plan.in_order.value:  # torch 2.5 does not know it
                settings["in_order"] = False
        elif isinstance(stand_in, MapBatches):
            stand_in.restore(0)

        # Workers read with numbers of ours, so what the user seeds there has no effect.
        replaces_seeds = setup.seeded or setup.iterable is not None
        warn_of_seeds = replaces_seeds and not self._warned_of_seeds
        self._warned_of_seeds = True
        worker_start = WorkerStart(
            sending,
            self.worker_init_fn,
            setup.plan.multiprocessing_context.value,
            warn_of_seeds=warn_of_seeds,
        )
        collate: Any = DeliveryCollate(sending)
        seed = mix_seed(setup.plan.seed.value, int(self._epoch_number), 0)
        return DataLoader(
            stand_in,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            collate_fn=collate,
            worker_init_fn=worker_start,
            generator=torch.Generator().manual_seed(seed),
            **settings,
        )

    def _stand_in(self, setup: LoaderSetup) -> MapBatches | IterableBatches:
        """Make what stands in for the dataset in the inner loader."""
        collate: Any = self.collate_fn
        if not setup.batched:
            collate = OneByOne(collate)
        if setup.iterable is not None:
            return IterableBatches(
                self.dataset,
                collate,
                setup.iterable,
                self._epoch_number,
                self._resumption,
            )
        fetching = Fetching(
            self.dataset, collate, seeded=setup.seeded, limits=setup.limit_check
        )
        return MapBatches(fetching, self._fresh_workers())


def _no_epoch() -> None:
    """Stand in for the running epoch where there is none."""


def _at_end_of_epoch(resumption: Resumption) -> Resumption:
    """Say how workers stand between two epochs if they go on with their datasets."""
    workers = {
        worker: state._replace(batches=0, ended=True)
        for worker, state in resumption.workers.items()
    }
    return Resumption(workers)
