"""PlannedLoader: a torch DataLoader with a plan, epochs, and a state to go on from.

It shows torch's attributes as they were asked for, and begins iterations.  What it
does not do itself: ``LoaderState`` knows where the loader stands and gives its
``state_dict``, ``inner_loader`` makes the DataLoader that reads, and ``LoaderEpoch``
gives the batches of one iteration to the loop.
"""

from __future__ import annotations

import copy
import difflib
import warnings
import weakref
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Generic

from torch.utils.data import DataLoader
from typing_extensions import TypeVar

from loaderkit.answers import answer_wrong_calls, no_such_attribute
from loaderkit.dataset_protocol import let_go_of_shards
from loaderkit.errors import (
    LoaderError,
    NoSuchAttributeError,
    NotChangeableError,
    OptionError,
)
from loaderkit.forking import warn_of_fork_hazard
from loaderkit.habits import LOADER
from loaderkit.loader.assigned import MAY_BE_ASSIGNED, check_assigned
from loaderkit.loader.dataset_changes import assigned_values, differ
from loaderkit.loader.epochs import LoaderEpoch, announce_downloads
from loaderkit.loader.inner_loader import EpochSource, open_inner_iterator
from loaderkit.loader.lengths_told import LengthsTold
from loaderkit.loader.loader_state import LoaderState
from loaderkit.loader.options import LoaderOptions
from loaderkit.loader.resumable import EpochBatches
from loaderkit.loader.sampler_epochs import set_sampler_epoch
from loaderkit.loader.seeds import choose_seed
from loaderkit.loader.stateful import length_of
from loaderkit.loader.worker_deaths import death_at_start, have_died
from loaderkit.memory.host import read_host
from loaderkit.operations import answer_operations
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from loaderkit.loader.iterables import ToldLength
    from loaderkit.loader.loader_setup import LoaderSetup
    from loaderkit.loader.loader_state import IterationWorkers
    from loaderkit.loader.plan import LoaderPlan
    from loaderkit.loader.resumable import Position
    from loaderkit.loader.user_batches import UserBatches


D = TypeVar("D", default=Any)
"""The dataset of a loader."""


@answer_operations
@answer_wrong_calls
class PlannedLoader(DataLoader[Any], Generic[D]):
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

    # torch's is a Dataset, which has no length for a type checker.
    dataset: D  # type: ignore[assignment]
    """What was given."""

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
        # torch wraps data pipes, so the dataset is taken from where it put it.
        self._state = LoaderState(setup, self.dataset)
        # The epoch of the iterator that torch keeps in ``_iterator``, if it keeps one.
        self._source: EpochSource | None = None
        # The running iteration is known, not held: a loop that is left frees it.
        self._running_epoch: Callable[[], LoaderEpoch | None] = _no_epoch
        # The one that the workers torch keeps serve: not the one that began last where
        # that ran beside it.
        self._epoch_of_kept: Callable[[], LoaderEpoch | None] = _no_epoch
        self._told_length: ToldLength | None = None
        # Batches of the epoch when somebody asked, since a state was loaded.
        self._length_asked: int | None = None
        self.lengths_told = LengthsTold()
        self._warned_of_seeds = False
        # Something was assigned since the kept workers were started.
        self._has_changed = False
        # How many samples the dataset had that these have copies of.
        self._samples_of_workers: int | None = None
        self._values_of_workers: dict[str, object] = {}
        # From here on, what was decided stays as it is: __setattr__ looks for this.
        self._is_built = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; of those that say how rows are chosen, to what is shown.

        torch's constructor takes either a ``batch_sampler`` or the other three, and
        sets the others to values of its own.  Here all four describe the same batches,
        and trainers read any of them.  They also read ``vars(loader)``, where a
        property would not be.

        Once it is constructed, what was decided then stays: torch would take another
        ``num_workers`` or ``shuffle`` without a word, and nobody would read it, or half
        of the settings would be of the one number and half of the other.  A function
        that is called with each batch or in each worker may be another one, from the
        next epoch on.
        """
        if "_is_built" in vars(self) and not name.startswith("_"):
            if name in MAY_BE_ASSIGNED:
                value = self._take_change(name, value)
            else:
                self._refuse_change(name, f"loader.{name} = {show_value(value)}", value)
        setup = vars(self).get("_setup")
        if setup is not None and setup.shown is not None:
            value = setup.shown._asdict().get(name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse to delete what was decided."""
        if "_is_built" in vars(self):
            self._refuse_change(name, f"del loader.{name}")
        super().__delattr__(name)

    def _take_change(self, name: str, value: Any) -> Any:
        """Take another value for what the next epoch reads as it begins."""
        setup = self._setup
        assert setup is not None  # since it is built
        # A generator may have been seeded since.
        if name != "generator" and value is vars(self).get(name):
            return value
        value = check_assigned(setup, name, value)
        if name == "generator":
            asked, ranks = replace(setup.asked, generator=value), setup.agreement.ranks
            self._state.choose_next_seed(choose_seed(asked, ranks))
        # Workers that torch keeps have the old one.
        self._has_changed = True
        return value

    def _refuse_change(self, name: str, wish: str, value: object = None) -> None:
        """Refuse to change what was decided when the loader was built.

        Raises:
            NotChangeableError: It is an option, an attribute or a method of a loader,
                or spelt like one.
        """
        options = [option.name for option in fields(LoaderOptions)]
        nearest = difflib.get_close_matches(name, options, 1, cutoff=0.85)
        why = "what it reads and how was decided when it was built"
        if nearest:
            example = f"{nearest[0]}={show_value(value)}"
            fix = f"loader = build_loader(dataset, {example})"
        elif name in LOADER or hasattr(type(self), name) or name in vars(self):
            fix = "loader = build_loader(dataset, ...)"
        else:
            return  # a note of its owner's
        message = f"A loader cannot be changed: {wish}."
        raise NotChangeableError(message, why=why, fix=fix)

    if not TYPE_CHECKING:  # a type checker shall go on to find misspelt names

        def __getattr__(self, name: str) -> Any:
            """Answer an attribute that other loaders have with what there is here."""
            hint = LOADER.get(name)
            if name.startswith("_") or hasattr(type(self), name):
                # Also a property that raised an AttributeError of its own: again.
                return object.__getattribute__(self, name)
            message = f"A loader has no attribute {name!r}."
            if hint is not None:
                why = hint.why or "it has another name here"
                raise NoSuchAttributeError(message, why=why, fix=hint.fix)
            if name in {option.name for option in fields(LoaderOptions)}:
                why = "it is an option of build_loader, and the plan says what it did"
                fix = f"print(loader.plan), or build_loader(dataset, {name}=...)"
                raise NoSuchAttributeError(message, why=why, fix=fix)
            # Looked for without being asked for: a field of all samples would be read.
            dataset = vars(self).get("dataset")
            if hasattr(type(dataset), name) or name in getattr(dataset, "__dict__", ()):
                why, fix = "its dataset has it", f"loader.dataset.{name}"
                raise NoSuchAttributeError(message, why=why, fix=fix)
            raise no_such_attribute(self, name)

        def __getitem__(self, index: object) -> Any:
            """Answer ``loader[0]``; ``next(loader)`` is left to Python's own words.

            A ``__next__`` would make this an iterator for trainers that ask.
            """
            message = f"A loader has no batch of its own at [{show_value(index)}]."
            why = "batches are made one after the other, in an order that epochs change"
            fix = "next(iter(loader)); loader.dataset[0] is a sample, and a Trainer "
            fix += "takes loader.dataset"
            raise OptionError(message, why=why, fix=fix)

    # With a length and __getitem__, Python would take it for a sequence.
    __reversed__ = None

    @property
    def plan(self) -> LoaderPlan:
        """The settings, each with its reason, as they are followed by now."""
        if self._setup is None:
            message = "A loader that a trainer built again has no plan."
            fix = "keep the loader that build_loader gave, and print its plan"
            raise NoSuchAttributeError(message, why=_BUILT_AGAIN, fix=fix)
        return self._setup.current_plan(self._state.seed)

    @property
    def batches(self) -> EpochBatches | UserBatches | None:
        """What gives the rows of each batch; None for iterable datasets."""
        return None if self._setup is None else self._setup.batches

    def __repr__(self) -> str:
        if self._setup is None:
            return super().__repr__()
        return f"PlannedLoader({self._setup.plan.batching})"

    def _repr_html_(self) -> str | None:
        return None if self._setup is None else self.plan._repr_html_()

    def __getstate__(self) -> dict[str, Any]:
        """Travel, or be copied, as what it was built of, without workers.

        A copy begins where this loader's next iteration would: with the next epoch, or
        in the middle of one if a state was loaded.  It moves on by itself.
        """
        attributes = {**vars(self), "_iterator": None}
        if self._setup is None:
            return attributes
        attributes |= {"_source": None, "_running_epoch": _no_epoch}
        attributes["_epoch_of_kept"] = _no_epoch
        # What the workers were started with is held weakly, which pickle refuses.
        attributes |= {"_values_of_workers": {}, "_samples_of_workers": None}
        if self._state.is_in_epoch:
            # Samplers of the user's travel as they stand, and workers do not at all:
            # the copy is brought to the middle of an epoch as another run would be.
            attributes["saved_state"] = self.state_dict()
        return attributes

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        saved_state = attributes.pop("saved_state", None)
        vars(self).update(attributes)
        if saved_state is not None:
            self.load_state_dict(saved_state)

    def __copy__(self) -> PlannedLoader:
        """Make a loader of the same dataset and functions that moves on by itself."""
        shared_with_copy = (self.dataset, self.collate_fn, self.worker_init_fn)
        memo = {id(shared): shared for shared in shared_with_copy}
        return copy.deepcopy(self, memo)

    def __len__(self) -> int:
        """Count the batches of the epoch that comes next.

        While one is being read that has more, count those: who asks then may count by
        it in the epoch that is being read.
        """
        if self._setup is None:
            return super().__len__()
        batches = self._setup.batches
        if isinstance(batches, EpochBatches):
            # Not len(batches), which follows whoever loops over loader.batch_sampler.
            length = max(len(batches.current()), self._length_of_running())
            self.lengths_told.tell(length, self._epoch_asked_for())
            self._length_asked = length
            return length
        if batches is not None:
            return len(batches)
        rule = self._setup.iterable
        assert rule is not None
        samples = len(self.dataset)  # type: ignore[arg-type]
        self._told_length = rule.told_length(samples, self.num_workers)
        return self._told_length.batches

    def _length_of_running(self) -> int:
        """Count the batches of the epoch that is being read; 0 if none is, or all came.

        Epochs differ where batches are limited by size, and where one goes on that
        other ranks began.  Lightning asks for the length behind ``iter(loader)``, and
        trains on as many batches: the next epoch's might leave out the last of this.
        """
        running = self._running_epoch()
        if running is None or not self._state.is_reading(running.progress):
            return 0
        length = len(running)
        is_over = running.progress.standing.position.batches >= length
        return 0 if is_over else length

    def _epoch_asked_for(self) -> int | None:
        """Tell of which epoch a length is asked; None once one has begun.

        Lightning asks in each epoch, behind ``iter(loader)``, and counts by the first.
        """
        running = self._running_epoch()
        is_reading = running is not None and self._state.is_reading(running.progress)
        return None if is_reading else self._state.next_epoch

    def check_length(self, batches: int) -> None:
        """Warn where an iterable dataset gives more than ``len(loader)`` said."""
        if self._told_length is not None:
            self._told_length.check(batches, stacklevel=5)

    def _warn_of_longer_epoch(self) -> None:
        """Warn where an epoch has more batches than were told before its state came.

        It has where more ranks go on, or larger batches: those that are done held fewer
        samples, and count.  Lightning asks for the length before it loads the state,
        and trains on as many batches.
        """
        asked, self._length_asked = self._length_asked, None
        assert self._setup is not None  # since a state was loaded
        batches = self._setup.batches
        if asked is None or not isinstance(batches, EpochBatches):
            return
        length = len(batches.current())
        if length > asked:
            self.lengths_told.has_warned = True
            message = f"len(loader) was {asked:,} before this state was loaded, and is "
            message += f"{length:,} now: who counts batches by the first, as Lightning "
            message += "does, leaves out the last ones of this epoch. Lightning: "
            message += "Trainer(callbacks=[WholeEpochs(loader)], "
            message += "reload_dataloaders_every_n_epochs=1), from "
            message += "loaderkit.integrations.lightning; in a loop of your own count "
            message += "by the batches that come"
            warnings.warn(message, stacklevel=3)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next.

        The epoch in whose middle a state was loaded goes on there.
        """
        if self._setup is None:
            set_sampler_epoch(self.batch_sampler, epoch)
        else:
            self._state.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Say where the current epoch stands: after the batches that were given.

        Returns:
            Plain values, and the states of a dataset, sampler or iterator that has a
            ``state_dict``; following torchdata's StatefulDataLoader.
        """
        state = self._planned_state()
        return state.save(self.num_workers, has_kept_workers=self._iterator is not None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader, or another run, stood.

        Args:
            state: What its ``state_dict`` gave, on any rank.

        Raises:
            LoaderError: It is no such state, its batches were made in another way, or
                something cannot be brought to where it stood.
        """
        planned_state = self._planned_state()
        planned_state.check(state, self.num_workers)
        self.close()
        planned_state.load(state)
        self._warn_of_longer_epoch()

    def _planned_state(self) -> LoaderState:
        if self._setup is None:
            message = "A loader that a trainer built again has no state."
            fix = "keep the loader that build_loader gave, and ask that one"
            raise LoaderError(message, why=_BUILT_AGAIN, fix=fix)
        return self._state

    def __iter__(self) -> Any:
        setup = self._setup
        if setup is None:
            return super().__iter__()
        seeds_before = self._state.seed_choice
        try:
            return self._begin_epoch(setup)
        except BaseException:
            # A state that is saved now is that of the epoch before.
            self._state.go_back_to(seeds_before)
            raise

    def _begin_epoch(self, setup: LoaderSetup) -> LoaderEpoch:
        """Begin the epoch that comes next; an error leaves the loader where it was."""
        self._state.take_next_seed()
        self._state.agree_with_ranks()

        which_workers = self._choose_workers()
        start = self._state.next_start()

        if self.num_workers:
            let_go_of_shards(self.dataset)
        kills_before = read_host().oom_kills if self.num_workers else None
        downloads = announce_downloads(self, start)
        try:
            torch_iterator = self._begin_reading(setup, start, which_workers)
            epoch = LoaderEpoch(
                self,
                torch_iterator,
                self._state.progress_from(start, self.num_workers, which_workers),
                ends_workers=which_workers == "beside",
                lookahead=setup.asked.lookahead,
                oom_kills=kills_before,
                downloads=downloads,
            )
            self._running_epoch = weakref.ref(epoch)
            if which_workers != "beside":
                self._epoch_of_kept = weakref.ref(epoch)
            self._state.begin_iteration(epoch.progress, which_workers)
        except BaseException as error:
            if downloads is not None:
                downloads.close()
            death = death_at_start(error)
            if death is not None or which_workers == "kept":
                # Some of them may have been told to begin, and others not.
                self.close()
            if death is None:
                raise
            raise death from error
        return epoch

    def _choose_workers(self) -> IterationWorkers:
        """Choose which workers serve the next iteration: kept ones serve one loop."""
        if not self.persistent_workers:
            return "new"
        running = self._epoch_of_kept()
        if running is not None and not running.progress.has_stopped:
            return "beside"
        has_lost_workers = self._state.lost_kept_workers or have_died(self._iterator)
        # A stream goes on in a kept worker.
        is_stream = self.batches is None
        samples = None if is_stream else length_of(self.dataset)
        values = {} if is_stream else assigned_values(self.dataset)
        has_other_samples = samples != self._samples_of_workers
        has_other_samples |= differ(self._values_of_workers, values)
        if self._has_changed or has_lost_workers or has_other_samples:
            # They have the old value of something, or a copy of a dataset that has
            # grown since, or was given another transform, say; or one of them has
            # died: in an epoch, or since.
            self._end_kept_workers()
            self._has_changed = False
        self._samples_of_workers, self._values_of_workers = samples, values
        return "new" if self._iterator is None else "kept"

    def _begin_reading(
        self, setup: LoaderSetup, start: Position, which_workers: IterationWorkers
    ) -> Any:
        """Begin to read an epoch.

        Args:
            setup: What the loader was built of.
            start: The epoch, and its first batch.
            which_workers: That serve it.

        Returns:
            torch's iterator, over deliveries.
        """
        if which_workers == "kept":
            assert self._source is not None  # made with the iterator that is kept
            self._source.begin_at(start)
            return super().__iter__()

        is_forked = setup.plan.multiprocessing_context.value == "fork"
        if self.num_workers and is_forked:
            warn_of_fork_hazard(4, dataset=self.dataset)  # where the loop is
        source = EpochSource(setup, start, keeps_workers=self.persistent_workers)
        if which_workers == "beside":
            return self._open_iterator(setup, source)
        self._source = source
        return super().__iter__()

    def _get_iterator(self) -> Any:
        """Give torch's iterator over an inner loader.  torch's ``__iter__`` calls this.

        It has no public name.  It is overridden rather than ``__iter__`` alone, so that
        torch keeps the iterator of ``persistent_workers`` in ``_iterator``, where
        trainers look for it to end its workers (Lightning does).
        """
        if self._setup is None:
            return super()._get_iterator()
        assert self._source is not None
        return self._open_iterator(self._setup, self._source)

    def _open_iterator(self, setup: LoaderSetup, source: EpochSource) -> Any:
        warn_of_seeds = not self._warned_of_seeds
        self._warned_of_seeds = True
        return open_inner_iterator(
            self,
            setup,
            source,
            seed=self._state.seed.value,
            workers=self._state.workers_to_start(self.num_workers),
            warn_of_seeds=warn_of_seeds,
        )

    def __enter__(self) -> Self:
        """Give the loader itself, which is closed when the block ends."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers, as ``close`` does."""
        self.close()

    def close(self) -> None:
        """End the workers that are kept between epochs, and a running epoch."""
        if self._setup is not None:
            for running in (self._running_epoch(), self._epoch_of_kept()):
                if running is not None:
                    running.abandon()
            # An iterator that somebody still holds is over; the next is not beside it.
            self._running_epoch = self._epoch_of_kept = _no_epoch
        self._end_kept_workers()

    def _end_kept_workers(self) -> None:
        kept_iterator: Any = self._iterator
        self._iterator = None
        if kept_iterator is not None:
            # torch has no public way to end them before the iterator is collected.
            kept_iterator._shutdown_workers()


_BUILT_AGAIN = "it is a plain DataLoader"


def _no_epoch() -> None:
    """Stand in for the running epoch where there is none."""
