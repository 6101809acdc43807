"""What a batch travels with: its number, who made it, and the states after it."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import Dataset, get_worker_info

from loaderkit.loader.failures import Failure
from loaderkit.loader.stateful import is_stateful, read_state

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from loaderkit.loader.fetching import Fetching, Sending

SKIPPED = -1
"""The number of a delivery without a batch, which only keeps workers in turn."""
FAILED = -2
"""The number of a delivery of an error that is not about one batch of the epoch."""


class WorkerState(NamedTuple):
    """How far one worker has come, or this process where there are none."""

    batches: int = 0
    """Batches of the epoch that it has made."""
    dataset: Any = None
    """What ``state_dict`` of its dataset says; None if it has none."""
    iterator: Any = None
    """The same, of the iterator over its dataset."""
    exhausted: bool = False
    """Its dataset had no more samples in the epoch, and had noticed."""
    ended: bool = False
    """These are states at the end of an epoch; the next one begins anew."""


class Delivery(NamedTuple):
    """A batch, and what the training process must know to go on after it."""

    batch: Any
    """As the loop will get it."""
    number: int
    """Which batch of the epoch, or of the worker's part of it, it is."""
    worker: int
    """Who made it."""
    state: WorkerState | None
    """How its worker stood after it; None where nothing has to be kept."""


@dataclass(frozen=True)
class Resumption:
    """Where workers stood when a state was saved."""

    workers: Mapping[int, WorkerState] = field(default_factory=dict)
    """Each, by its number."""
    last_worker: int = -1
    """Whose batch was given last; the next one is another's turn."""

    def turned(self, workers: int) -> Resumption:
        """Number the workers anew, so that the one whose turn it is becomes the first.

        torch asks worker 0 for the first batch of an iteration, wherever it begins.
        """
        first = self.last_worker + 1
        turned = {
            (worker - first) % max(1, workers): state
            for worker, state in self.workers.items()
        }
        return Resumption(turned)


def worker_number() -> int:
    """Tell which worker this is; 0 in the training process."""
    info = get_worker_info()
    return 0 if info is None else info.id


class MapBatches(Dataset[Delivery]):
    """Stands in for a map-style dataset where batches are made.

    Args:
        fetching: Makes the batch of some rows.
        resumption: States that the workers' datasets are brought to as they start.
    """

    def __init__(self, fetching: Fetching, resumption: Resumption) -> None:
        self.fetching, self.resumption = fetching, resumption
        self.dataset = fetching.dataset
        self.keeps_state = is_stateful(fetching.dataset)
        self._failure: Failure | None = None

    def __len__(self) -> int:
        return len(self.fetching)

    def fail_with(self, failure: Failure) -> None:
        """Give this in place of every batch: the worker could not begin."""
        self._failure = failure

    def __getitems__(self, rows: Sequence[Any]) -> Delivery:
        """Make a batch."""
        if self._failure is not None:
            return Delivery(self._failure, FAILED, worker_number(), None)
        batch = self.fetching.__getitems__(rows)
        state = None
        if self.keeps_state:
            state = WorkerState(dataset=read_state(self.dataset))
        number: int = rows.number  # type: ignore[attr-defined]
        return Delivery(batch, number, worker_number(), state)

    def restore(self, worker: int) -> None:
        """Bring the dataset to where another worker's stood."""
        state = self.resumption.workers.get(worker)
        if state is not None and state.dataset is not None:
            self.dataset.load_state_dict(state.dataset)


class DeliveryCollate:
    """The ``collate_fn`` of the inner loader: puts a finished batch into a parcel.

    Args:
        sending: Makes the parcels; None leaves batches to torch.
    """

    def __init__(self, sending: Sending | None) -> None:
        self.sending = sending

    def __call__(self, delivery: Any) -> Any:
        """Pack the batch of a delivery."""
        if self.sending is None or delivery.number == SKIPPED:
            return delivery
        return delivery._replace(batch=self.sending(delivery.batch))


class WorkerStart:
    """The ``worker_init_fn`` of the inner loader.

    Args:
        sending: Told that this is a worker; None where batches are left to torch.
        user_init: The user's own ``worker_init_fn``.
        start_method: How workers start; those of a fork server have it as parent.
        warn_of_seeds: Say where ``user_init`` seeds torch, which has no effect here.
    """

    def __init__(
        self,
        sending: Sending | None,
        user_init: Callable[[int], None] | None,
        start_method: str | None,
        *,
        warn_of_seeds: bool = False,
    ) -> None:
        self.sending, self.user_init = sending, user_init
        self.warn_of_seeds = warn_of_seeds
        self.parent_pid = None if start_method == "forkserver" else os.getpid()

    def __call__(self, worker: int) -> None:
        """Begin, in a worker."""
        if self.parent_pid is not None and os.getppid() != self.parent_pid:
            # It was killed while this worker started.  torch's watchdog notes who the
            # parent is only behind this: it would watch whoever adopted this process,
            # and the worker would wait for ever.
            raise SystemExit(1)
        info: Any = get_worker_info()
        stand_in = info.dataset
        # Code of the user's asks get_worker_info() for its dataset, and must find it
        # rather than our stand-in.  The object is this worker's own; torch forbids
        # plain assignment in some versions.
        object.__setattr__(info, "dataset", stand_in.dataset)
        if self.sending is not None:
            self.sending.start()
        try:
            if self.user_init is not None:
                self._call_user_init(self.user_init, worker)
        except Exception as error:  # noqa: BLE001 -- raised where the loop is
            # torch would send its text alone.  The stand-in sends it in place of the
            # worker's batches.
            what = f"worker_init_fn failed in worker {worker}: "
            fix = f"mend it; worker_init_fn({worker}) in this process to step through"
            stand_in.fail_with(Failure.about(what, error, fix))
            return
        if isinstance(stand_in, MapBatches):
            stand_in.restore(worker)

    def _call_user_init(self, init: Callable[[int], None], worker: int) -> None:
        seed = torch.initial_seed()
        init(worker)
        # Code that seeds numpy and random from torch's seed, as torch's documentation
        # has it, gets what it is for: numbers that differ between workers.
        given = torch.initial_seed()
        if self.warn_of_seeds and worker == 0 and given != seed:
            text = f"worker_init_fn seeded torch with {given}, which does nothing: "
            text += "random numbers drawn while reading follow from the loader's seed, "
            text += f"the epoch and the batch; build_loader(dataset, seed={given})"
            warnings.warn(text, UserWarning, stacklevel=2)
