"""PlannedLoader: a torch DataLoader with a plan, epochs, and a state to go on from."""

from __future__ import annotations

import copy
import dataclasses
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from loaderkit.arguments import check_integer
from loaderkit.errors import LoaderError
from loaderkit.forking import warn_of_fork_hazard
from loaderkit.loader.collating import OneByOne
from loaderkit.loader.delivery import (
    DeliveryCollate,
    MapBatches,
    Resumption,
    WorkerStart,
    WorkerState,
)
from loaderkit.loader.epochs import LoaderEpoch, Progress, death_at_start
from loaderkit.loader.fetching import Fetching, Sending
from loaderkit.loader.iterables import IterableBatches, IterableRule, ToldLength
from loaderkit.loader.resumable import (
    EpochBatches,
    IterationBatches,
    Position,
    check_epoch,
)
from loaderkit.loader.sampler_epochs import set_sampler_epoch
from loaderkit.loader.stateful import (
    digest_of,
    is_own_iterator,
    is_stateful,
    length_of,
    read_state,
)
from loaderkit.loader.subject import let_go_of_shards
from loaderkit.loader.user_batches import UserBatches
from loaderkit.memory.host import read_host
from loaderkit.memory.shm_batch import forget
from loaderkit.randomness import mix_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loaderkit.loader.agreement import OrderAgreement
    from loaderkit.loader.limits import LimitCheck
    from loaderkit.loader.plan import LoaderPlan

STATE_VERSION = 6
"""Of what ``state_dict`` gives."""


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
    batch_size: int | None
    """As it was asked for."""
    drop_last: bool
    """As it was asked for."""
    sampler: Any
    """What the loader shows as such."""
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

    plan: LoaderPlan
    """The settings, each with its reason."""

    def _repr_html_(self) -> str | None:
        return None if self._setup is None else self.plan._repr_html_()

    def __init__(
        self,
        dataset: Any,
        *args: Any,
        setup: LoaderSetup | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(dataset, *args, **settings)
        self._setup = setup
        if setup is None:
            return
        self.plan = setup.plan
        if setup.batches is not None:
            # torch takes either a batch_sampler or these, and then guards them; here
            # all of them describe the same batches.
            vars(self).update(
                batch_size=setup.batch_size,
                drop_last=setup.drop_last,
                sampler=setup.sampler,
            )
        self._position = setup.position
        self._resumption = Resumption()
        self._progress: Progress | None = None
        # The running iteration is known, not held: a loop that is left frees it.
        self._live: Callable[[], LoaderEpoch | None] = _no_epoch
        self._iteration: IterationBatches | None = None
        self._order_begun: dict[str, Any] = {}
        self._told_length: ToldLength | None = None
        self._warned_of_seeds = False
        self._epoch_number = torch.zeros((), dtype=torch.int64)
        self._share_epoch_number()

    def _share_epoch_number(self) -> None:
        if self.persistent_workers and self._planned().iterable is not None:
            # Workers that are kept are told of the next epoch by nothing else: torch
            # sends them no rows, which tell those of map-style datasets.
            self._epoch_number.share_memory_()  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """Travel, or be copied, as what it was built of, without workers.

        A copy begins where this loader's next iteration would: with the next epoch, or
        in the middle of one if a state was loaded.  It moves on by itself.
        """
        here = {**vars(self), "_iterator": None}
        if self._setup is None:
            return here
        here |= {"_iteration": None, "_progress": None, "_live": _no_epoch}
        if self._position.start:
            here["_state"] = self.state_dict()
        return here

    def __setstate__(self, here: dict[str, Any]) -> None:
        state = here.pop("_state", None)
        vars(self).update(here)
        if self._setup is None:
            return
        self._share_epoch_number()
        if state is not None:
            self.load_state_dict(state)

    def __copy__(self) -> PlannedLoader:
        """Make a loader of the same dataset and functions that moves on by itself."""
        shared = (self.dataset, self.collate_fn, self.worker_init_fn)
        return copy.deepcopy(self, {id(each): each for each in shared})

    def __len__(self) -> int:
        if self._setup is None:
            return super().__len__()
        batches = self._setup.batches
        if batches is not None:
            if isinstance(batches, EpochBatches):
                return len(batches.current())  # len(batches) follows who looks at it
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

    def __iter__(self) -> Any:
        if self._setup is None:
            return super().__iter__()
        self._setup.agreement.check_ranks(os.environ)
        self._agree()
        live = self._live()
        busy = self.persistent_workers and live is not None and not live.progress.ended
        order = self._order()
        if self._position.start and order != self._order_begun:
            raise _changed_since_loading(self._order_begun, order)
        here = self._position.advance()
        self._epoch_number.fill_(here.epoch)
        self._order_begun = order
        if self._setup.batches is not None:
            if busy or self._iteration is None or self._iterator is None:
                self._iteration = IterationBatches(self._setup.batches, here)
            else:  # the iterator that is kept asks the one it was made with
                self._iteration.position = here
        if self.num_workers:
            let_go_of_shards(self.dataset)
        kills = read_host().oom_kills if self.num_workers else None
        try:
            inner: Any = self._get_iterator() if busy else super().__iter__()
            self._progress = Progress(here, self._standing_workers())
            self._resumption = Resumption()
            epoch = LoaderEpoch(self, inner, self._progress, alone=busy, kills=kills)
            # Behind the start of the workers, since it starts a thread.
            epoch.download_ahead()
        except RuntimeError as error:
            death = death_at_start(error)
            if death is None:
                raise
            raise death from error
        self._live = weakref.ref(epoch)
        return epoch

    def _agree(self) -> None:
        """Compare what the order follows from with the other ranks, once."""
        setup = self._planned()
        if not setup.agreement.due():
            return
        order: dict[str, Any] = {"seed": self.plan.seed, "batches": setup.batching}
        if isinstance(setup.batches, UserBatches):
            order["samplers"] = digest_of(setup.batches.sampler)
        setup.agreement.check(order)

    @property
    def batches(self) -> EpochBatches | UserBatches | None:
        """What gives the rows of each batch; None for iterable datasets."""
        return None if self._setup is None else self._setup.batches

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

    def state_dict(self) -> dict[str, Any]:
        """Say where the current epoch stands: after the batches that were given.

        Returns:
            Plain values, and the states of a dataset, sampler or iterator that has a
            ``state_dict``; following torchdata's StatefulDataLoader.
        """
        setup, at = self._planned(), self._position
        progress = self._progress
        running = progress is not None and not progress.ended
        if progress is not None and running:
            at = progress.position
        state: dict[str, Any] = {
            "version": STATE_VERSION, "seed": self.plan.seed, "epoch": at.epoch,
            "batches": at.start, "batching": setup.batching,
            # What the dataset was like as the epoch began: it may have grown since.
            "order": self._order_begun if running else self._order(),
        }  # fmt: skip
        if at.ahead:
            state["ahead"] = sorted(at.ahead)
        if isinstance(setup.batches, UserBatches):
            state["sampler"] = setup.batches.state_after(at, running=running)
        if self._depends_on_workers:
            state["num_workers"] = self.num_workers
            resumption = self._resumption if progress is None else progress.resumption()
            state |= self._worker_states(resumption, running=at.start > 0)
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
        self._adopt_seed(int(state["seed"]))
        self.close()
        at = Position(
            int(state["epoch"]),
            int(state["batches"]),
            frozenset(state.get("ahead", ())),
        )
        setup = self._planned()
        if isinstance(setup.batches, UserBatches):
            setup.batches.restore(state["sampler"], at)
        self._position.go_to(at)  # shared with the samplers, so not replaced
        self._order_begun = self._order()
        self._progress, self._resumption = None, Resumption()
        if "main" in state:
            dataset: Any = self.dataset
            dataset.load_state_dict(state["main"])
        if "workers" in state:
            workers = {
                int(each["worker"]): WorkerState(
                    each["batches"],
                    each["dataset"],
                    each["iterator"],
                    each["exhausted"],
                    each["ended"],
                )
                for each in state["workers"]
            }
            self._resumption = Resumption(workers, int(state["last_worker"]))

    def close(self) -> None:
        """End the workers that are kept between epochs, and a running epoch."""
        if self._setup is not None:
            live = self._live()
            if live is not None:
                live.close()
            # An iterator that somebody still holds is over; the next is not beside it.
            self._live = _no_epoch
        kept: Any = self._iterator
        self._iterator = None
        if kept is not None:
            kept._shutdown_workers()

    @property
    def _depends_on_workers(self) -> bool:
        """Whether each worker goes its own way, so that a state needs all of them."""
        return self._planned().iterable is not None or is_stateful(self.dataset)

    def _planned(self) -> LoaderSetup:
        if self._setup is None:
            what = "A loader that a trainer built again has no state."
            fix = "keep the loader that build_loader gave, and ask that one"
            raise LoaderError(what, why="it is a plain DataLoader", fix=fix)
        return self._setup

    def _standing_workers(self) -> Resumption:
        """Say how the workers stand as an iteration begins."""
        if self._progress is None or not self.persistent_workers:
            return self._turned()
        # Workers that are kept go on with their datasets, in a new epoch.
        kept = self._progress.resumption().workers
        return Resumption(
            {
                worker: state._replace(batches=0, ended=True)
                for worker, state in kept.items()
            }
        )

    def _turned(self) -> Resumption:
        """Say where the workers of the next iteration begin."""
        if self._planned().iterable is not None:
            return self._resumption
        return self._resumption.turned(self.num_workers)

    def _worker_states(
        self, resumption: Resumption, *, running: bool
    ) -> dict[str, Any]:
        """Say how the workers stand, or the dataset here between two epochs."""
        if not running and not self.persistent_workers:
            # Fresh workers begin with a copy of the dataset that is here.
            own = self._main_state()
            if own is None:
                return {}
            if not is_own_iterator(self.dataset):
                return {"main": own}
            here = self._progress is not None and not self.num_workers
            ended = here and self._progress is not None and self._progress.ended
            begun = WorkerState(iterator=own, exhausted=ended, ended=ended)
            fresh = dict.fromkeys(range(max(1, self.num_workers)), begun)
            resumption, running = Resumption(fresh), True
        workers = [
            {"worker": worker, **state._asdict()}
            for worker, state in sorted(resumption.workers.items())
        ]
        if not running:  # workers that are kept go on with their datasets
            workers = [each | {"batches": 0, "ended": True} for each in workers]
        last = resumption.last_worker if running else Resumption().last_worker
        return {"workers": workers, "last_worker": last}

    def _main_state(self) -> Any:
        """Read the state of the dataset in this process."""
        try:
            return read_state(self.dataset)
        except Exception:
            # An iterable dataset that was not begun here may have no state to tell.
            # Another run's is as this one then.
            begun = self._progress is not None and not self.num_workers
            if begun or self._planned().iterable is None:
                raise
            return None

    def _check_state(self, state: Mapping[str, Any]) -> None:
        setup = self._planned()
        required = {"version", "seed", "epoch", "batches", "batching", "order"}
        if isinstance(setup.batches, UserBatches):
            required.add("sampler")
        given: set[str] = set(state) if hasattr(state, "keys") else set()
        if missing := required - given:
            what = (
                f"This is no state of a loader: it lacks {', '.join(sorted(missing))}."
            )
            fix = "load_state_dict(loader.state_dict())"
            raise LoaderError(what, why=f"got a {type(state).__name__}", fix=fix)
        ours: dict[str, Any] = {"version": STATE_VERSION, "batching": setup.batching}
        ours["order"] = self._order()
        if setup.seed_asked:
            ours["seed"] = self.plan.seed
        for name, value in ours.items():
            if state[name] != value:
                theirs, value = _differing_parts(state[name], value)
                what = f"The state has {name} {theirs!r}, this loader {value!r}."
                why = "the batches that are missing cannot be told"
                fix = "build the loader with the same dataset, options and seed"
                raise LoaderError(what, why=why, fix=fix)
        for name in ("epoch", "batches"):
            check_epoch(f"the state's {name}", state[name])
        check_integer("the state's seed", state["seed"])
        self._check_keys(state, required)
        self._check_given(state)
        self._check_workers(state)

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

    def _check_keys(self, state: Mapping[str, Any], required: set[str]) -> None:
        """Refuse what this loader would not look at."""
        known = {*required, "ahead"}
        if self._depends_on_workers:
            known |= {"num_workers", "workers", "last_worker", "main"}
        if extra := sorted(map(str, set(state) - known)):
            what = (
                f"The state has {', '.join(extra)}, for which this loader has no use."
            )
            why = "it is that of another kind of dataset or sampler, or was added to"
            fix = "load_state_dict(loader.state_dict()) of a loader built alike"
            raise LoaderError(what, why=why, fix=fix)

    def _check_given(self, state: Mapping[str, Any]) -> None:
        """Refuse batches that the epoch does not have."""
        batches, ahead = int(state["batches"]), state.get("ahead", ())
        if not isinstance(ahead, list | tuple):
            wanted = "a list of numbers of batches"
            raise _wrong_part(ahead, "ahead", wanted)
        for number in ahead:
            check_integer("each of the state's ahead", number, least=batches + 1)
        chosen = self._planned().batches
        if not isinstance(chosen, EpochBatches):
            return  # a sampler's are drawn again, and streams tell by ending early
        count = chosen.count_of(int(state["seed"]), int(state["epoch"]))
        if max([batches - 1, *ahead]) >= max(count, 1):
            what = f"The state has {max([batches, *ahead]):,} batches of epoch "
            what += f"{state['epoch']}, which has {count:,}."
            fix = "load_state_dict(loader.state_dict())"
            raise LoaderError(what, why="there is no rest to give", fix=fix)

    def _check_workers(self, state: Mapping[str, Any]) -> None:
        if not self._depends_on_workers:
            return
        if "workers" in state:
            _check_worker_states(state)
        elif state["batches"]:
            wanted = "a list of how each worker stands"
            raise _wrong_part(None, "workers", wanted)
        workers = state.get("num_workers")
        # No worker and one read the same samples; more split them among themselves.
        if workers == self.num_workers or {workers, self.num_workers} == {0, 1}:
            return
        what = f"The state is that of {workers} workers, this loader has "
        what += f"{self.num_workers}."
        why = "each worker reads a part of its own, so what is missing cannot be told"
        raise LoaderError(what, why=why, fix=f"num_workers={workers}")

    def _adopt_seed(self, seed: int) -> None:
        """Take over another run's seed, where none was asked for."""
        setup = self._planned()
        if setup.batches is not None:
            setup.batches.reseed(seed)
        iterable = setup.iterable and dataclasses.replace(setup.iterable, seed=seed)
        self.plan = dataclasses.replace(self.plan, seed=seed)
        self._setup = dataclasses.replace(setup, plan=self.plan, iterable=iterable)

    def _get_iterator(self) -> Any:
        """Let torch iterate over an inner loader, which packs batches and says more."""
        if self._setup is None:
            return super()._get_iterator()
        if self.num_workers and self.plan.multiprocessing_context == "fork":
            warn_of_fork_hazard(5, dataset=self.dataset)  # where the loop is
        sending = None
        if self.plan.sharing == "parcel":
            # torch asks a worker for the next batch once its oldest was received; where
            # workers are asked out of turn, one could be asked for all under way.
            in_turn = self.plan.in_order and self._setup.iterable is None
            workers_asked = 1 if in_turn else self.num_workers
            sending = Sending((self.prefetch_factor or 0) * workers_asked + 2)
        iterator: Any = self._inner_loader(sending)._get_iterator()
        if self.num_workers:
            # An error that is kept (by a notebook, a debugger, pytest) keeps the frames
            # of the loop, and these the iterator: a cycle.  The collector would end the
            # queues before the iterator, which then tells its workers to stop through
            # them in vain, and waits for each for 5 s.
            kept_open = weakref.finalize(iterator, list, iterator._index_queues)
            kept_open.atexit = False
        if sending is not None:
            pids = [worker.pid for worker in iterator._workers]
            weakref.finalize(iterator, forget, pids).atexit = False
        return iterator

    def _inner_loader(self, sending: Sending | None) -> DataLoader[Any]:
        """Make the loader that reads: the same settings, over a stand-in."""
        setup = self._planned()
        dataset: Any = self._stand_in(setup)
        settings: dict[str, Any] = {"batch_sampler": self._iteration}
        if setup.iterable is not None:
            settings = {"batch_size": None}  # the stand-in gives whole batches
        if self.num_workers:
            settings |= {
                "prefetch_factor": self.prefetch_factor,
                "persistent_workers": self.persistent_workers,
                "multiprocessing_context": self.multiprocessing_context,
            }
            if not self.plan.in_order:  # torch 2.5 does not know it
                settings["in_order"] = False
        elif isinstance(dataset, MapBatches):
            dataset.restore(0)
        draws = setup.seeded or setup.iterable is not None
        warns, self._warned_of_seeds = draws and not self._warned_of_seeds, True
        seed = mix_seed(self.plan.seed, int(self._epoch_number), 0)
        collate: Any = DeliveryCollate(sending)
        return DataLoader(
            dataset, num_workers=self.num_workers, pin_memory=self.pin_memory,
            timeout=self.timeout, collate_fn=collate,
            worker_init_fn=WorkerStart(
                sending, self.worker_init_fn, self.plan.multiprocessing_context,
                warn_of_seeds=warns,
            ),
            generator=torch.Generator().manual_seed(seed), **settings,
        )  # fmt: skip

    def _stand_in(self, setup: LoaderSetup) -> MapBatches | IterableBatches:
        collate: Any = self.collate_fn
        if not setup.batched:
            collate = OneByOne(collate)
        if setup.iterable is None:
            fetching = Fetching(
                self.dataset, collate, seeded=setup.seeded, limits=setup.limit_check
            )
            return MapBatches(fetching, self._turned())
        return IterableBatches(
            self.dataset, collate, setup.iterable, self._epoch_number, self._resumption
        )


def _no_epoch() -> None:
    """Stand in for the running epoch where there is none."""


def _differing_parts(theirs: Any, ours: Any) -> tuple[Any, Any]:
    """Leave out of two tables what is equal in them."""
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return theirs, ours
    names = [n for n in {**theirs, **ours} if theirs.get(n) != ours.get(n)]
    return {n: theirs.get(n) for n in names}, {n: ours.get(n) for n in names}


def _changed_since_loading(theirs: Any, ours: Any) -> LoaderError:
    theirs, ours = _differing_parts(theirs, ours)
    what = "A state was loaded in the middle of an epoch, and the dataset has changed "
    what += f"since: from {theirs} to {ours}."
    why = "the rest of that epoch would be that of another order"
    fix = "load_state_dict of the dataset as it was, or loader.set_epoch() of another"
    return LoaderError(what, why=why, fix=f"{fix} epoch")


def _wrong_part(value: object, name: str, wanted: str) -> LoaderError:
    what = f"The state's {name} must be {wanted}, got {value!s:.80}."
    why = f"its type is {type(value).__name__}"
    return LoaderError(what, why=why, fix="load_state_dict(loader.state_dict())")


def _check_worker_states(state: Mapping[str, Any]) -> None:
    """Refuse states of workers that cannot be read."""
    workers, wanted = state["workers"], {"worker", *WorkerState._fields}
    if not isinstance(workers, list | tuple):
        asked = "a list of states"
        raise _wrong_part(workers, "workers", asked)
    for each in workers:
        if not isinstance(each, dict) or set(each) != wanted:
            asked = f"a list of tables of {', '.join(sorted(wanted))}"
            raise _wrong_part(each, "workers", asked)
        for name in ("worker", "batches"):
            check_integer(f"the state's {name} of a worker", each[name], least=0)
    last = state.get("last_worker")
    check_integer("the state's last_worker", last, least=-1)
