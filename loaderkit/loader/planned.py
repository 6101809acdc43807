"""PlannedLoader: a torch DataLoader with a plan, epochs, and a state to go on from."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from loaderkit.errors import LoaderError
from loaderkit.loader.epochs import LoaderEpoch, Progress
from loaderkit.loader.fetching import Fetching, Sending
from loaderkit.loader.resumable import Turn
from loaderkit.memory.parcel import forget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loaderkit.loader.plan import LoaderPlan


class PlannedLoader(DataLoader[Any]):
    """A DataLoader with a plan, an epoch, and a state that can be saved.

    Made by ``build_loader``.
    """

    plan: LoaderPlan
    """The settings, each with its reason."""
    seeded: bool = True
    """Random numbers drawn while reading follow from each batch alone."""
    seed_asked: bool = False
    """The seed was given, so that another run's is a mistake."""
    _progress: Progress | None = None
    _live: Callable[[], LoaderEpoch | None] = staticmethod(lambda: None)
    """The running iteration: known, not held, so that a loop that is left frees it."""
    _turn: Turn | None = None
    _resumed: Mapping[str, int] | None = None

    def __iter__(self) -> Any:
        if not hasattr(self, "plan"):  # built again from its arguments by a trainer
            return super().__iter__()
        live = self._live()
        busy = self.persistent_workers and live is not None and not live.progress.ended
        epoch, start = self._position()
        sampler: Any = self.batch_sampler
        self._resumed = None
        if hasattr(sampler, "batches_of"):
            sampler.epoch, sampler.start = epoch + 1, 0
            if busy or self._turn is None or self._iterator is None:
                self._turn = Turn(sampler, epoch, start)
            else:  # the iterator that is kept asks the turn it was made with
                self._turn.epoch, self._turn.start = epoch, start
        inner: Any = self._get_iterator() if busy else super().__iter__()
        self._progress = Progress(epoch, start)
        found = LoaderEpoch(self, inner, self._progress, alone=busy)
        self._live = weakref.ref(found)
        return found

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next."""
        sampler: Any = self.batch_sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        self._resumed = None

    def state_dict(self) -> dict[str, Any]:
        """Say where the current epoch stands: after the batches that were given.

        Returns:
            Numbers only; following torchdata's StatefulDataLoader.
        """
        epoch, batches = self._position()
        done = self._progress
        if done is not None and self._resumed is None:
            epoch, batches = (
                (done.epoch + 1, 0) if done.ended else (done.epoch, done.given)
            )
        return {
            "version": 1, "seed": self.plan.seed, "epoch": epoch, "batches": batches,
            "batching": self.plan.batching,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader, or another run, stood.

        Args:
            state: What its ``state_dict`` gave.

        Raises:
            LoaderError: Its batches were made in another way.
        """
        ours: dict[str, Any] = {"batching": self.plan.batching}
        if self.seed_asked:
            ours["seed"] = self.plan.seed
        for name, value in ours.items():
            if state.get(name) != value:
                what = (
                    f"The state has {name} {state.get(name)!r}, this loader {value!r}."
                )
                why = "the batches that are missing cannot be told"
                fix = "build the loader with the same dataset, options and seed"
                raise LoaderError(what, why=why, fix=fix)
        self._adopt(int(state["seed"]))
        sampler: Any = self.batch_sampler
        if hasattr(sampler, "start"):
            sampler.epoch, sampler.start = int(state["epoch"]), int(state["batches"])
        self._resumed = {"epoch": int(state["epoch"]), "batches": int(state["batches"])}

    def _adopt(self, seed: int) -> None:
        """Take over another run's seed, where none was asked for."""
        sampler: Any = self.batch_sampler
        if hasattr(sampler, "reseed"):
            sampler.reseed(seed)
        self.plan = dataclasses.replace(self.plan, seed=seed)
        self.generator = torch.Generator().manual_seed(seed % 2**63)

    def close(self) -> None:
        """End the workers that are kept between epochs, and a running epoch."""
        live = self._live()
        if live is not None:
            live.close()
        kept: Any = self._iterator
        self._iterator = None
        if kept is not None:
            kept._shutdown_workers()

    def _position(self) -> tuple[int, int]:
        """Give the epoch and the batch that the next iteration begins with."""
        sampler: Any = self.batch_sampler
        if hasattr(sampler, "start"):
            return sampler.epoch, sampler.start
        if self._resumed is not None:
            return self._resumed["epoch"], self._resumed["batches"]
        return (0 if self._progress is None else self._progress.epoch + 1), 0

    def _get_iterator(self) -> Any:
        """Let torch iterate over a stand-in that names samples and packs batches."""
        if not hasattr(self, "plan"):
            return super()._get_iterator()
        inside = copy.copy(self)
        if self._turn is not None:
            inside.__dict__["batch_sampler"] = self._turn
        parcels = self.plan.sharing == "parcel"
        # torch asks a worker for the next batch once its oldest was received; where
        # workers are asked out of turn, one could be asked for all that are under way.
        turns = self.plan.in_order and not isinstance(self.dataset, IterableDataset)
        under_way = (self.prefetch_factor or 0) * (1 if turns else self.num_workers)
        count = under_way + 2
        if isinstance(self.dataset, IterableDataset):
            sending = Sending(count, self.collate_fn)
        else:
            inside.__dict__["dataset"] = Fetching(
                self.dataset, self.collate_fn, seeded=self.seeded
            )
            sending = Sending(count)
        if parcels or not isinstance(self.dataset, IterableDataset):
            inside.__dict__["collate_fn"] = sending if parcels else _as_it_is
        if parcels:
            init = _Starting(sending, self.worker_init_fn)
            inside.__dict__["worker_init_fn"] = init
        found: Any = DataLoader._get_iterator(inside)
        if parcels:
            pids = [worker.pid for worker in found._workers]
            weakref.finalize(found, forget, pids).atexit = False
        return found


class _Starting:
    """The ``worker_init_fn`` of workers that send parcels."""

    def __init__(self, sending: Sending, then: Callable[[int], None] | None) -> None:
        self.sending, self.then = sending, then

    def __call__(self, worker: int) -> None:
        self.sending.start()
        if self.then is not None:
            self.then(worker)


def _as_it_is(batch: Any) -> Any:
    return batch
