"""A batch on its way to the training process, with what is needed to resume after it.

The inner loader of a ``PlannedLoader`` reads from a stand-in for the user's dataset,
which gives such deliveries: ``MapBatches``, or ``IterableBatches`` of iterables.py.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field, replace
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import Dataset, get_worker_info

from loaderkit.error_texts import is_out_of_memory
from loaderkit.errors import LoaderError
from loaderkit.interrupts import tell_signals_apart
from loaderkit.loader.failures import (
    FAILURES,
    Failure,
    LocalFailure,
    NotRebuilt,
    is_sent,
)
from loaderkit.loader.page_locking import page_lock_batch
from loaderkit.loader.stateful import is_stateful, read_state
from loaderkit.loader.users_errors import error_about
from loaderkit.memory.shm_batch import NotUnpickledError, ReceivedBatch
from loaderkit.sending import SentWhole, how_to_unpickle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from loaderkit.loader.fetching import FetchingDataset, SharedMemorySender
    from loaderkit.memory.page_locked import PageLockedBatch
    from loaderkit.sending import Outbox

SKIPPED = -1
"""The number of a delivery without a batch.  After a resume, a worker whose turn was
before the state was saved sends one, so that torch goes on to the next worker."""
FAILED = -2
"""The number of a delivery that holds an error, and does not count as a batch."""


class WorkerState(NamedTuple):
    """How far a worker has come, or this process if there are no workers."""

    batches: int = 0
    """Batches of the epoch that the worker has made."""
    dataset: Any = None
    """``state_dict()`` of its dataset; None if the dataset has none."""
    iterator: Any = None
    """``state_dict()`` of the iterator over its dataset; None if it has none."""
    exhausted: bool = False
    """The iterator over its dataset has raised StopIteration in this epoch."""
    ended: bool = False
    """The states are those at the end of an epoch, after which the next one begins."""


@dataclass(frozen=True, eq=False)
class Delivery:
    """A batch, and what the training process must know to resume after it.

    It is no tuple: older versions of torch page-lock what is in a tuple, and ask only
    other objects for a ``pin_memory`` of their own.
    """

    batch: Any
    """The batch as the loop will get it, on its way there as a ``SharedBatch`` or a
    ``ReceivedBatch``, or an error."""
    number: int
    """Number of the batch in the epoch; of an iterable dataset, of this worker's."""
    worker: int
    """Number of the worker that made it."""
    state: WorkerState | None
    """State of the worker after it; None if the dataset has no state."""
    must_pin: bool = False
    """The caller asked for page-locked memory, so no part of a batch may lack it."""

    @property
    def holds_batch(self) -> bool:
        """Whether there is a batch, and no error in its place."""
        return not isinstance(self.batch, FAILURES)

    def pin_memory(self) -> Delivery:
        """Put the batch into page-locked memory: torch calls this where it is to be.

        With workers that is on a thread of torch's, which would send the text of an
        error alone; so the error goes in the place of the batch.
        """
        delivery = open_delivery(self)
        if not delivery.holds_batch:
            return delivery
        try:
            locked = page_lock_batch(delivery.batch, must_lock=self.must_pin)
        except LoaderError as error:
            return replace(delivery, batch=LocalFailure(error))
        return replace(delivery, batch=locked)


def open_delivery(delivery: Delivery) -> Delivery:
    """Put the batch of a delivery together that came in shared memory.

    An error of the user's objects goes in its place, to be raised by the epoch, which
    knows which samples are in the batch.
    """
    if not isinstance(delivery.batch, ReceivedBatch):
        return delivery
    try:
        return replace(delivery, batch=delivery.batch.open())
    except NotUnpickledError as error:
        return replace(delivery, batch=NotRebuilt(error.error))


@dataclass(frozen=True)
class Resumption:
    """Where the workers begin, as a saved state says."""

    workers: Mapping[int, WorkerState] = field(default_factory=dict)
    """The state of each worker, by its number."""
    last_worker: int = -1
    """The worker whose batch was given last; the next worker is next in turn."""

    def turned(self, workers: int) -> Resumption:
        """Renumber the workers, so that the one whose turn it is becomes worker 0.

        torch asks worker 0 for the first batch of every iteration, also of one that
        resumes where another worker was next.
        """
        first = self.last_worker + 1
        renumbered = {
            (worker - first) % max(1, workers): state
            for worker, state in self.workers.items()
        }
        return Resumption(renumbered)


def worker_number() -> int:
    """Return the number of this worker; 0 in the training process."""
    info = get_worker_info()
    return 0 if info is None else info.id


class StandIn(SentWhole):
    """What the inner loader reads in place of the user's dataset.

    Where a worker could not begin, it gives the error in place of every batch: raised
    there, torch would send its text alone.
    """

    dataset: Any
    """The user's; None where it could not be unpickled."""
    user_init: Callable[[int], None] | None = None
    """The user's ``worker_init_fn``.  It goes to a worker together with the dataset,
    since it may be a method of it, or share something with it."""
    _failure: Failure | None = None

    def fail_with(self, failure: Failure) -> None:
        """Give an error in place of every batch, because the worker could not begin."""
        self._failure = failure

    @property
    def has_failed(self) -> bool:
        """Whether it gives an error in place of every batch."""
        return self._failure is not None

    def begin_without_state(self, error: Exception) -> None:
        """Give an error in place of every batch; see ``SentWhole``."""
        self.dataset = None
        what = "The dataset, or what goes to a worker with it (worker_init_fn, "
        what += "collate_fn), could not be unpickled there: "
        fix = how_to_unpickle(error, "correct its __setstate__ or __reduce__")
        fix += ", or multiprocessing_context='fork'; num_workers=0 pickles nothing"
        self.fail_with(Failure.of_start(what, error, fix))

    def _failed_delivery(self) -> Delivery | None:
        """Give what stands for every batch where the worker could not begin."""
        if self._failure is None:
            return None
        return Delivery(self._failure, FAILED, worker_number(), None)


class MapBatches(StandIn, Dataset[Delivery]):
    """Stand-in for a map-style dataset: gives a delivery for the rows of a batch.

    Args:
        fetching: Makes the batch of some rows.
        resumption: States that the datasets of starting workers are brought to.
        user_init: See ``StandIn``.
        outbox: See ``Sent``.
    """

    def __init__(
        self,
        fetching: FetchingDataset,
        resumption: Resumption,
        user_init: Callable[[int], None] | None,
        outbox: Outbox | None = None,
    ) -> None:
        super().__init__(outbox)
        self.fetching, self.resumption = fetching, resumption
        self.user_init = user_init
        self.dataset = fetching.dataset
        self.keeps_state = is_stateful(fetching.dataset)

    def __len__(self) -> int:
        return len(self.fetching)

    def __getitems__(
        self, rows: Sequence[Any], page_locked: PageLockedBatch | None = None
    ) -> Delivery:
        """Make a batch.

        Args:
            rows: Rows of the batch.
            page_locked: Where it is made; None for ordinary memory, as in workers.
        """
        failed = self._failed_delivery()
        if failed is not None:
            return failed
        batch = self.fetching.__getitems__(rows, page_locked)
        state = None
        if self.keeps_state:
            state = WorkerState(dataset=read_state(self.dataset))
        number: int = rows.number  # type: ignore[attr-defined]
        return Delivery(batch, number, worker_number(), state)

    def restore(self, worker: int) -> None:
        """Load the saved state of a worker, if there is one."""
        state = self.resumption.workers.get(worker)
        if state is not None and state.dataset is not None:
            self.dataset.load_state_dict(state.dataset)


def _show_users_dataset() -> StandIn:
    """Let ``get_worker_info().dataset`` be the user's dataset, as torch documents it.

    User code relies on it: ``worker_init_fn`` sets attributes on it, and a dataset
    compares it with itself.  torch gives one and the same object to this field and to
    what reads in the worker, and a loader has no argument for the first alone (torch
    2.13, ``_utils/worker.py``).  So the field is written, past the ``__setattr__`` of
    torch's frozen dataclass.  That object belongs to this worker alone, and if another
    release of torch forbids this, the error is raised in the loop.

    Weighed against it, and not chosen:

    * A stand-in that passes attributes on to the dataset.  12 of 21 ways to use a
      dataset gave something else (``is``, ``type``, ``==``, ``hash``, ``copy``,
      ``pickle``, operators, walking over a data pipe), since Python looks for special
      methods in the class.  ``iter`` and ``__getitems__`` must be the stand-in's own,
      because torch calls them to read.
    * A subclass of the dataset's class, made in the worker: that changes the user's
      object itself, and ``type(dataset)``.
    * To leave the stand-in visible: ``dataset.start = ...`` in a ``worker_init_fn``
      would do nothing, and every worker would read the same samples.

    Returns:
        The stand-in that was there, which torch goes on reading from.
    """
    info: Any = get_worker_info()
    stand_in: StandIn = info.dataset
    object.__setattr__(info, "dataset", stand_in.dataset)
    return stand_in


class DeliveryCollate:
    """The ``collate_fn`` of the inner loader: packs finished batches for sending.

    Args:
        sending: Copies a batch to shared memory; None leaves sending to torch.
        must_pin: See ``Delivery``.
    """

    def __init__(
        self, sending: SharedMemorySender | None, *, must_pin: bool = False
    ) -> None:
        self.sending = sending
        self.must_pin = must_pin

    def __call__(self, delivery: Delivery) -> Delivery:
        """Pack the batch of a delivery; in its place an error, if that fails."""
        if self.must_pin:
            delivery = replace(delivery, must_pin=True)
        if self.sending is None or delivery.number == SKIPPED:
            return delivery
        try:
            return replace(delivery, batch=self.sending(delivery.batch))
        except Exception as error:  # noqa: BLE001 -- pickling calls the user's code
            return replace(delivery, batch=Failure(_not_sent(error)))


def _not_sent(error: Exception) -> LoaderError:
    """Make the error for a batch that cannot leave its worker."""
    why = "a batch is pickled to leave its worker, and something in it cannot be"
    fix = "return tensors without autograd (.detach()), and no functions, locks or "
    fix += "generators; or num_workers=0"
    if isinstance(error, OSError) or is_out_of_memory(error):
        why = "it is copied to shared memory, and the system gave none"
        fix = "a smaller batch_size, fewer workers or num_workers=0"
    message = "A batch could not be sent from its worker: "
    not_sent = error_about(message, error, fix, why=why)
    not_sent.__cause__ = error
    return not_sent


def _end_without_reader(parent_pid: int) -> None:
    """Let this worker end where its parent was killed.

    torch's worker leaves its loop then.  But as a process ends, Python waits until its
    queues are written, and the pipe of batches may be full: no one reads it, and as all
    workers hold its reading end, too, no write fails.  They would stay for ever.
    """

    def end_if_adopted() -> None:
        if os.getppid() != parent_pid:
            os._exit(1)

    # Before the queues are waited for, whose priority is -5.
    Finalize(None, end_if_adopted, exitpriority=-4)


class WorkerStart:
    """The ``worker_init_fn`` of the inner loader.

    Args:
        sending: Started in the worker; None if torch sends the batches.
        start_method: How workers start.
        warn_of_seeds: Warn if the user's ``worker_init_fn`` seeds torch, which has no
            effect here.
    """

    def __init__(
        self,
        sending: SharedMemorySender | None,
        start_method: str | None,
        *,
        warn_of_seeds: bool = False,
    ) -> None:
        self.sending = sending
        self.warn_of_seeds = warn_of_seeds
        # The parent of a worker is this process, or else the fork server.
        self.parent_pid = None if start_method == "forkserver" else os.getpid()

    def __call__(self, worker: int) -> None:
        """Prepare a worker, in its process."""
        if self.parent_pid is not None and os.getppid() != self.parent_pid:
            # The parent was killed while this worker started.  torch's watchdog reads
            # the parent's pid only after this call, so it would watch the process that
            # has adopted this one, and the worker would wait for ever.
            raise SystemExit(1)
        _end_without_reader(os.getppid())
        tell_signals_apart()
        stand_in = _show_users_dataset()
        if self.sending is not None:
            self.sending.start()
        if stand_in.has_failed:
            return
        try:
            if stand_in.user_init is not None:
                self._call_user_init(stand_in.user_init, worker)
        except BaseException as error:
            if not is_sent(error):
                raise
            if not isinstance(error, Exception):
                stand_in.fail_with(Failure(error, is_of_start=True))
                return
            # torch would send the text of the error alone.  The stand-in sends the
            # error itself, in place of the worker's batches.
            message = f"worker_init_fn failed in worker {worker}: "
            fix = (
                f"correct it; worker_init_fn({worker}) in this process to step through"
            )
            stand_in.fail_with(Failure.of_start(message, error, fix))
            return
        if isinstance(stand_in, MapBatches):
            stand_in.restore(worker)

    def _call_user_init(self, init: Callable[[int], None], worker: int) -> None:
        seed = torch.initial_seed()
        init(worker)
        # Only torch's seed is compared.  torch's documentation advises to seed numpy
        # and random from torch's seed, so that workers draw different numbers.  They do
        # here in any case, and a warning would help nobody.
        users_seed = torch.initial_seed()
        if self.warn_of_seeds and worker == 0 and users_seed != seed:
            text = f"worker_init_fn seeded torch with {users_seed}, which has no "
            text += "effect: random numbers drawn while reading follow from the "
            text += "loader's seed, the epoch and the batch; "
            text += f"build_loader(dataset, seed={users_seed})"
            warnings.warn(text, UserWarning, stacklevel=2)
