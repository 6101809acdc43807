"""What reads in the place of a ``PlannedLoader``.

torch's DataLoader makes batches in workers and sends them; nothing of that is done
again here.  Each iteration of a planned loader reads from an ordinary DataLoader, the
inner loader, which has the same settings and a stand-in for the dataset.  The stand-in
gives each batch together with what the training process must know to resume after it
(see ``delivery``).  Without workers there is nothing to send, and the batches are asked
of the stand-in itself (``BatchesOfThisProcess``).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from loaderkit.interrupts import Interrupts
from loaderkit.loader.collating import OneByOne
from loaderkit.loader.delivery import DeliveryCollate, MapBatches, WorkerStart
from loaderkit.loader.fetching import FetchingDataset, SharedMemorySender
from loaderkit.loader.iterables import IterableBatches
from loaderkit.loader.resumable import IterationBatches
from loaderkit.loader.user_batches import UserBatches
from loaderkit.loader.worker_processes import NotingContext
from loaderkit.loader.worker_start import start_workers
from loaderkit.memory.page_locked import PageLockedBatch
from loaderkit.memory.shm_segments import forget
from loaderkit.randomness import mix_seed
from loaderkit.sending import Outbox

if TYPE_CHECKING:
    from loaderkit.loader.delivery import Delivery, Resumption
    from loaderkit.loader.loader_setup import LoaderSetup
    from loaderkit.loader.resumable import Position
    from loaderkit.memory.page_locked import PageLockedMemory


class EpochSource:
    """The epoch that an inner loader reads.

    With ``persistent_workers`` torch keeps an iterator, and its workers, from epoch to
    epoch.  They go on asking the objects that they were made with, so it is these that
    are told of the next epoch.

    Args:
        setup: What the planned loader was built of.
        start: The epoch, and its first batch.
        keeps_workers: torch keeps the iterator that reads from this.
    """

    def __init__(
        self, setup: LoaderSetup, start: Position, *, keeps_workers: bool
    ) -> None:
        self.batches: IterationBatches | None = None
        """The ``batch_sampler`` of the inner loader; None for iterable datasets."""
        self.number = torch.tensor(start.epoch, dtype=torch.int64)
        """Number of the epoch ``[]``, read when an iterable dataset is begun."""
        if setup.batches is not None:
            self.batches = IterationBatches(setup.batches, start)
        elif keeps_workers:
            # torch sends the workers of an iterable dataset no rows, which could tell
            # them of the next epoch.
            self.number.share_memory_()  # type: ignore[no-untyped-call]

    def begin_at(self, start: Position) -> None:
        """Go on with another epoch."""
        self.number.fill_(start.epoch)
        if self.batches is not None:
            self.batches.begin_at(start)


class BatchesOfThisProcess(Iterator["Delivery"]):
    """Deliveries that this process makes, one after the other.

    What torch's iterator does without workers.  torch also enters a ``record_function``
    for each batch.  That takes 10 us, and pushes so much out of the processor's caches
    that what follows takes another 30 to 60 us: a third of a batch of 32 texts.  So it
    is entered only where a profiler looks at it.

    Nor is a batch walked through that was made in page-locked memory, all of it: of 128
    graphs with two texts each PyG's walk takes longer than gathering them.

    Args:
        batches: Gives the rows of each batch.
        stand_in: Makes the delivery of some rows.
        page_locked: Where batches are made; None for ordinary memory.
        must_pin: See ``Delivery``.
    """

    def __init__(
        self,
        batches: IterationBatches,
        stand_in: MapBatches,
        page_locked: PageLockedMemory | None,
        *,
        must_pin: bool,
    ) -> None:
        self._rows = iter(batches)
        self._stand_in = stand_in
        self._page_locked = page_locked
        self._must_pin = must_pin

    def __next__(self) -> Delivery:
        # A private name of torch, which has no public way to ask.  A torch without it
        # has every batch recorded.
        profiler = torch.autograd.profiler
        if getattr(profiler, "_is_profiler_enabled", True):
            with profiler.record_function(_PROFILED_AS):
                return self._deliver(next(self._rows))
        return self._deliver(next(self._rows))

    def _deliver(self, rows: Any) -> Delivery:
        if self._page_locked is None:
            return self._stand_in.__getitems__(rows)
        page_locked = PageLockedBatch(self._page_locked)
        delivery = self._stand_in.__getitems__(rows, page_locked)
        if page_locked.lacks_locking:
            # What is page-locked already passes.
            return replace(delivery, must_pin=self._must_pin).pin_memory()
        return delivery


_MOST_BATCHES_AHEAD = 1 << 20
"""Asked of a worker.  torch goes round a loop as often as it may ask, 0.4 s for 10**6,
also where an epoch has two batches; and a batch on its way takes an open file, of which
Linux gives a process no more than these."""
_PROFILED_AS = "enumerate(DataLoader)#PlannedLoader.__next__"
"""The beginning is torch's: TensorBoard and HTA know by it what waits for data."""


def open_inner_iterator(
    outer: DataLoader[Any],
    setup: LoaderSetup,
    source: EpochSource,
    *,
    seed: int,
    workers: Resumption,
    warn_of_seeds: bool,
) -> Any:
    """Make an inner loader, and begin to iterate over it.

    Args:
        outer: The planned loader, whose settings the inner loader takes.
        setup: What the planned loader was built of.
        source: The epoch to read.
        seed: What random numbers follow from.
        workers: Where the workers begin.
        warn_of_seeds: Warn if the user's ``worker_init_fn`` sets a seed that has no
            effect.

    Returns:
        An iterator over deliveries; torch's, unless this process makes the batches.
    """
    sending = _choose_sending(outer, setup)
    page_locked = None
    if outer.pin_memory and not outer.num_workers:
        page_locked = setup.page_locked
    outbox = Outbox()
    stand_in = _make_stand_in(outer, setup, source, seed, workers, outbox)
    if not outer.num_workers and isinstance(stand_in, MapBatches):
        stand_in.restore(0)  # as WorkerStart does in each worker
        is_done_here = not outer.pin_memory or page_locked is not None
        if is_done_here and source.batches is not None:
            return BatchesOfThisProcess(
                source.batches, stand_in, page_locked, must_pin=setup.must_pin
            )
    # Workers read with numbers of ours, so what the user seeds there has no effect.
    replaces_seeds = setup.seeded or setup.iterable is not None
    method = setup.plan.multiprocessing_context.value
    worker_start = WorkerStart(
        sending,
        method,
        warn_of_seeds=warn_of_seeds and replaces_seeds,
    )
    # torch draws the seed of its workers from this, another one in each epoch.
    generator = torch.Generator().manual_seed(mix_seed(seed, int(source.number), 0))
    # torch's type is that of a function of a list of samples.
    collate: Any = DeliveryCollate(sending, must_pin=setup.must_pin)
    inner_loader: DataLoader[Any] = DataLoader(
        stand_in,
        num_workers=outer.num_workers,
        pin_memory=outer.pin_memory,
        timeout=outer.timeout,
        collate_fn=collate,
        worker_init_fn=worker_start,
        generator=generator,
        **_batch_settings(source),
        **_worker_settings(outer, setup, outbox),
    )
    with Interrupts() as interrupts:
        # A Ctrl-C waits until all workers are forked and can be ended: hooks of fork
        # would drop it, and of a worker that is half started nobody would know.  Not
        # where Python writes the dataset to new processes: up to Python 3.13 it waits
        # for ever for one that ended before it had read all.
        is_held = outer.num_workers and method == "fork"
        with interrupts.held() if is_held else contextlib.nullcontext():
            iterator = start_workers(inner_loader)
            if outer.num_workers:
                _keep_queues_open(iterator)
            if sending is not None:
                # Shared memory that was mapped for these workers' batches serves no
                # others.
                pids = [worker.pid for worker in iterator._workers]
                weakref.finalize(iterator, forget, pids).atexit = False
    return iterator


def _make_stand_in(
    outer: DataLoader[Any],
    setup: LoaderSetup,
    source: EpochSource,
    seed: int,
    workers: Resumption,
    outbox: Outbox,
) -> MapBatches | IterableBatches:
    """Make what stands in for the dataset."""
    collate: Any = outer.collate_fn
    if not setup.batched:
        collate = OneByOne(collate)

    if setup.iterable is not None:
        # A state may have brought another seed than the loader was built with.
        rule = replace(setup.iterable, seed=seed % 2**63)
        return IterableBatches(
            outer.dataset,
            collate,
            rule,
            source.number,
            workers,
            outer.worker_init_fn,
            outbox,
        )
    batches = setup.batches
    fetching = FetchingDataset(
        outer.dataset,
        collate,
        seeded=setup.seeded,
        limits=setup.limit_check,
        chooser=batches.chooser if isinstance(batches, UserBatches) else None,
    )
    return MapBatches(fetching, workers, outer.worker_init_fn, outbox)


def _choose_sending(
    outer: DataLoader[Any], setup: LoaderSetup
) -> SharedMemorySender | None:
    """Make what packs batches in workers; None if torch sends them."""
    if setup.plan.sharing.value != "parcel":
        return None
    batches_asked = _batches_ahead(outer)
    if setup.plan.in_order.value and setup.iterable is None:
        # torch asks a worker for the next batch once its oldest was received, and it is
        # copied out as it is received.  So while one is written, all the others that
        # were asked of the worker may be on their way, and no more.
        return SharedMemorySender(batches_asked)
    # Where workers are asked out of turn, one could be asked for all batches under way;
    # one more is being made.
    return SharedMemorySender(batches_asked * outer.num_workers + 2)


def _batches_ahead(outer: DataLoader[Any]) -> int:
    """Say how many batches torch asks of each worker ahead of time."""
    return min(outer.prefetch_factor or 1, _MOST_BATCHES_AHEAD)


def _batch_settings(source: EpochSource) -> dict[str, Any]:
    """Choose the arguments that say what a batch is."""
    if source.batches is None:
        return {"batch_size": None}  # an iterable stand-in gives whole batches
    return {"batch_sampler": source.batches}


def _worker_settings(
    outer: DataLoader[Any], setup: LoaderSetup, outbox: Outbox
) -> dict[str, Any]:
    """Choose the arguments that torch takes with workers only."""
    if not outer.num_workers:
        return {}
    settings = {
        "prefetch_factor": _batches_ahead(outer),
        "persistent_workers": outer.persistent_workers,
        "multiprocessing_context": NotingContext(outer.multiprocessing_context, outbox),
    }
    if not setup.plan.in_order.value:  # torch 2.5 does not know it
        settings["in_order"] = False
    return settings


def _keep_queues_open(iterator: Any) -> None:
    """Let torch's iterator end before the queues through which it stops its workers.

    An error that is kept (by a notebook, a debugger, pytest) keeps the frames of the
    loop, and these the iterator: a cycle.  The garbage collector would end the queues
    first.  The iterator would then tell its workers to stop in vain, and wait 5 s for
    each.

    Args:
        iterator: torch's.  Its queues have no public name.
    """
    keep_open = weakref.finalize(iterator, list, iterator._index_queues)
    keep_open.atexit = False
