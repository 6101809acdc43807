"""PlannedLoader: a torch DataLoader with a plan, epochs, and a state to go on from."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from loaderkit.errors import LoaderError
from loaderkit.loader.epochs import LoaderEpoch
from loaderkit.loader.fetching import Fetching, Sending

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loaderkit.loader.plan import LoaderPlan


class PlannedLoader(DataLoader[Any]):
    """A DataLoader with a plan, an epoch, and a state that can be saved.

    Made by ``build_loader``.
    """

    plan: LoaderPlan
    """The settings, each with its reason."""
    _epoch: LoaderEpoch | None = None
    _resumed: Mapping[str, int] | None = None

    def __iter__(self) -> Any:
        if not hasattr(self, "plan"):  # built again from its arguments by a trainer
            return super().__iter__()
        live = self._epoch
        busy = self.persistent_workers and live is not None and live.running
        at = self._position()
        inner: Any = self._get_iterator() if busy else super().__iter__()
        epoch = LoaderEpoch(self, inner, *at, alone=busy)
        self._epoch = epoch
        return epoch

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
        if self._epoch is not None and self._resumed is None:
            epoch, batches = self._epoch.epoch, self._epoch.given
            if self._epoch.ended:
                epoch, batches = epoch + 1, 0
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
        ours = {"seed": self.plan.seed, "batching": self.plan.batching}
        for name, value in ours.items():
            if state.get(name) != value:
                what = (
                    f"The state has {name} {state.get(name)!r}, this loader {value!r}."
                )
                why = "the batches that are missing cannot be told"
                fix = "build the loader with the same dataset, options and seed"
                raise LoaderError(what, why=why, fix=fix)
        sampler: Any = self.batch_sampler
        if hasattr(sampler, "start"):
            sampler.epoch, sampler.start = int(state["epoch"]), int(state["batches"])
        self._resumed = {"epoch": int(state["epoch"]), "batches": int(state["batches"])}

    def close(self) -> None:
        """End the workers that are kept between epochs, and a running epoch."""
        if self._epoch is not None:
            self._epoch.close()
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
        return (0 if self._epoch is None else self._epoch.epoch + 1), 0

    def _get_iterator(self) -> Any:
        """Let torch iterate over a stand-in that names samples and packs batches."""
        if not hasattr(self, "plan"):
            return super()._get_iterator()
        inside = copy.copy(self)
        parcels = self.plan.sharing == "parcel"
        held = self.num_workers * (self.prefetch_factor or 0) + 2
        if isinstance(self.dataset, IterableDataset):
            sending = Sending(held, self.collate_fn)
        else:
            seeded = not self.dataset_gathers
            inside.__dict__["dataset"] = Fetching(
                self.dataset, self.collate_fn, seeded=seeded
            )
            sending = Sending(held)
        if parcels or not isinstance(self.dataset, IterableDataset):
            inside.__dict__["collate_fn"] = sending if parcels else _as_it_is
        if parcels:
            init = _Starting(sending, self.worker_init_fn)
            inside.__dict__["worker_init_fn"] = init
        return DataLoader._get_iterator(inside)

    dataset_gathers: bool = False
    """Reading draws no random numbers, since no code of the user's runs."""


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
