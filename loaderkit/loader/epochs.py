"""One iteration over a loader: what was given, what failed, and a tidy end."""

from __future__ import annotations

import logging
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from loaderkit.cache.download_ahead import DownloadAhead
from loaderkit.dataset_protocol import ask_stored_rows
from loaderkit.errors import CacheError, LoaderError
from loaderkit.loader.delivery import SKIPPED, Delivery
from loaderkit.loader.downloads import shard_uses
from loaderkit.loader.failures import Failure, LocalFailure
from loaderkit.loader.read_ahead import ReadAhead
from loaderkit.loader.resumable import EpochBatches
from loaderkit.loader.sample_names import names_of
from loaderkit.memory.host import read_host, signal_name
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from loaderkit.loader.loader_state import Progress
    from loaderkit.loader.plan import LoaderPlan
    from loaderkit.loader.resumable import Position
    from loaderkit.loader.user_batches import UserBatches
    from loaderkit.memory.machine import Host

_LOG = logging.getLogger("loaderkit")


class IteratedLoader(Protocol):
    """What an iteration asks of its loader."""

    @property
    def dataset(self) -> Any:
        """What is read."""

    @property
    def batches(self) -> EpochBatches | UserBatches | None:
        """What gives the rows of each batch; None for iterable datasets."""

    @property
    def plan(self) -> LoaderPlan:
        """The settings."""

    @property
    def num_workers(self) -> int:
        """Number of workers."""

    def __len__(self) -> int:
        """Count the batches of an epoch."""

    def check_length(self, batches: int) -> None:
        """Warn if there are more batches than ``len`` said."""


_DEATH = "DataLoader worker (pid"
"""How torch begins its error for a worker that died."""
_JOIN_S = 0.2
"""How long a dead worker's exit code is waited for: from the signal to the code takes a
few milliseconds."""
_SLOW_JOIN_S = 0.5
"""The same where no signal told of a death, so that it may still be under way."""
_SHM_NEARLY_FULL_BYTES = 64 << 20
"""/dev/shm with less left is what SIGBUS is about.  Chosen: Docker's default size."""

_EPOCHS_WITH_WORKERS: weakref.WeakSet[LoaderEpoch] = weakref.WeakSet()
"""Running iterations: a signal tells of a death, and not whose worker it was."""


class _DeathHandler:
    """Stands before torch's handler of SIGCHLD, and says more than it does.

    torch raises from that handler, wherever the main thread happens to be: in the
    middle of a training step, or before a line of ours could catch it.  Handlers are
    chained as torch chains its own to the one before it.

    Args:
        torchs_handler: The handler that was there.
    """

    def __init__(self, torchs_handler: Callable[[int, Any], Any]) -> None:
        self.torchs_handler = torchs_handler

    def __call__(self, number: int, frame: Any) -> None:
        """Pass the signal on; tell of a worker of ours with the samples' names."""
        try:
            self.torchs_handler(number, frame)
        except RuntimeError as error:
            for epoch in list(_EPOCHS_WITH_WORKERS):
                death = epoch.explain_death(error)
                if death is not None:
                    raise death from error
            raise


def handle_deaths() -> None:
    """Have deaths of workers told wherever the main thread is."""
    if threading.current_thread() is not threading.main_thread():
        return  # signals are the main thread's; torch does not set a handler either
    if not hasattr(signal, "SIGCHLD"):
        return
    handler = signal.getsignal(signal.SIGCHLD)
    # Only torch's raises, and it is not there before torch has started a worker.
    if isinstance(handler, _DeathHandler) or not callable(handler):
        return
    signal.signal(signal.SIGCHLD, _DeathHandler(handler))


def announce_downloads(loader: IteratedLoader, start: Position) -> DownloadAhead | None:
    """Get ready to download what an epoch reads from a store, if it reads from one.

    Args:
        loader: The loader.
        start: Where the epoch begins.

    Returns:
        What downloads it once it is started; its workers should be started before, and
        know from here on what to wait for.  None where there is nothing to download.
    """
    plan, batches = loader.plan.downloads, loader.batches
    if plan is None or not plan.ahead_bytes or not isinstance(batches, EpochBatches):
        return None
    stored = ask_stored_rows(loader.dataset)
    if stored is None or not stored.is_missing.any():
        return None
    uses = shard_uses(stored.shard_of_row, batches.epoch_from(start), start.batches)
    try:
        return DownloadAhead(stored, uses)
    except CacheError as error:
        # Whoever reads a shard gets the error.
        _LOG.warning("nothing is downloaded ahead: %s", error)
        return None


class LoaderEpoch(Iterator[Any]):
    """Batches of one epoch; counts them, and explains a worker's death.

    Args:
        loader: The loader.
        torch_iterator: torch's own iterator, over deliveries.
        progress: Where it begins; counted up here.
        alone: The iterator is not the one that the loader keeps.
        kills: How often the kernel had killed for memory before; None if unknown.
        downloads: What downloads shards of the epoch before they are read; started
            here, behind the start of the workers, since it starts threads.
    """

    def __init__(
        self,
        loader: IteratedLoader,
        torch_iterator: Any,
        progress: Progress,
        *,
        alone: bool,
        kills: int | None,
        downloads: DownloadAhead | None,
    ) -> None:
        self.progress = progress
        self._torch_iterator = torch_iterator
        self._alone = alone
        self._dataset = loader.dataset
        self._batches = loader.batches
        self._start = replace(progress.position)
        self._loader_length = loader.__len__
        self._check_length = loader.check_length
        self._kills = kills
        self._deliveries: Iterator[Delivery] = torch_iterator
        self._download_ahead = downloads
        if downloads is not None:
            downloads.start()
            # A loop that is left early lets go of its iterator, and says no more.
            weakref.finalize(self, downloads.close)
        self._death: LoaderError | None = None
        if loader.num_workers:
            # As soon as it can tell of a death: workers are at work already.
            _EPOCHS_WITH_WORKERS.add(self)
            handle_deaths()
        depth = loader.plan.read_ahead.value
        if depth:
            self._deliveries = ReadAhead(torch_iterator, depth)

    def __iter__(self) -> LoaderEpoch:
        return self

    def __len__(self) -> int:
        if isinstance(self._batches, EpochBatches):
            # The loader itself tells the length of the epoch that comes next.
            return len(self._batches.epoch_from(self._start))
        return self._loader_length()

    def __next__(self) -> Any:
        delivery = self._next_delivery()
        if isinstance(delivery.batch, Failure | LocalFailure):
            raise delivery.batch.rebuilt()
        is_stream = self._batches is None
        self.progress.note(delivery, numbered=not is_stream)
        if self._download_ahead is not None:
            self._download_ahead.advance(self.progress.position.batches)
        if is_stream:
            self._check_length(self.progress.position.batches)
        return delivery.batch

    def _next_delivery(self) -> Delivery:
        """Wait for the next delivery with a batch, or explain why none will come."""
        try:
            delivery = next(self._deliveries)
            while delivery.number == SKIPPED:
                delivery = next(self._deliveries)
        except StopIteration:
            self.progress.end()
            self.close()
            raise
        except RuntimeError as error:
            death = self._death
            # The signal may have come before, with a death that was raised elsewhere.
            if death is None or (error is not death and error.__cause__ is not death):
                death = self.explain_death(error)
            if death is None:
                raise
            self._end_after_death()
            # torch's wait raises another error from the one that the signal raised.
            raise death from (death.__cause__ or error)
        except (EOFError, ConnectionError, FileNotFoundError) as error:
            death = self._death or self._death_while_sending()
            if death is None:
                raise
            self._end_after_death()
            raise death from error
        return delivery

    def _end_after_death(self) -> None:
        self.progress.end()
        self.close()
        self._torch_iterator._shutdown_workers()

    def close(self) -> None:
        """Let go of threads and workers, but for those the loader keeps."""
        if self._download_ahead is not None:
            self._download_ahead.close()
        if isinstance(self._deliveries, ReadAhead):
            self._deliveries.close()
        # torch's iterator without workers has none to shut down.
        if self._alone and hasattr(self._torch_iterator, "_shutdown_workers"):
            self._torch_iterator._shutdown_workers()

    def _workers(self) -> list[Any]:
        """Give torch's processes, which it shows to nobody; none without workers."""
        return list(getattr(self._torch_iterator, "_workers", []))

    def _death_while_sending(self) -> LoaderError | None:
        """Explain a batch whose worker died before its tensors were fetched from it.

        torch sends a tensor as a name for a descriptor that the worker keeps.
        """
        for worker in self._workers():
            try:
                worker.join(timeout=_SLOW_JOIN_S)
            except LoaderError as death:  # the signal came meanwhile
                return death
            if worker.exitcode is not None:
                error = RuntimeError(f"{_DEATH} {worker.pid}) exited")
                return self.explain_death(error)
        return None

    def explain_death(self, error: RuntimeError) -> LoaderError | None:
        """Explain a worker's death; None when it is something else, or not ours.

        Called from a signal handler too, so it must not wait for a lock or a queue.

        Args:
            error: As torch raised it.
        """
        text = str(error)
        if not text.startswith(_DEATH):
            return None  # the user's own error, or ours
        workers = self._workers()
        pids_in_words, _, _ = text.replace("pid(s)", "pids").partition(")")
        pids = {int(digits) for digits in re.findall(r"\d+", pids_in_words)}
        if not pids & {worker.pid for worker in workers}:
            return None
        for worker in workers:
            worker.join(timeout=_JOIN_S)
        dead = [
            number
            for number, worker in enumerate(workers)
            # One that was interrupted ends with 0, as one that has no more to do.
            if worker.exitcode or (worker.exitcode == 0 and worker.pid in pids)
        ]

        host = read_host()
        code = workers[dead[0]].exitcode if dead else None
        killed = self._kills is not None and (host.oom_kills or 0) > self._kills
        why, fix = cause_of(code, host, out_of_memory=killed)
        batches = self._batches_under_way(dead[0]) if dead else []
        who = f"Worker {dead[0]}" if dead else "A worker"
        which = "the batch" if len(batches) == 1 else "one of the batches"
        message = f"{who} died while it made {which} of {'; or '.join(batches)}."
        self._death = LoaderError(message, why=why, fix=fix)
        return self._death

    def _batches_under_way(self, worker: int) -> list[str]:
        """Name the samples of each batch that was asked of a worker and never came."""
        # torch: the batch's index -> (worker,), or (worker, batch) once it came.
        tasks = getattr(self._torch_iterator, "_task_info", {})
        indices = [
            index
            for index, task in tasks.items()
            if task[0] == worker and len(task) == 1
        ]
        if not indices or not isinstance(self._batches, EpochBatches):
            return ["unknown samples"]
        epoch = self._batches.epoch_from(self._start)
        # torch counts the batches that it asked for; some were given before.
        numbers = [
            number for number in epoch.numbers if number not in self._start.ahead
        ]
        return [
            names_of(self._dataset, epoch.batch(numbers[index]))
            for index in sorted(indices)
        ]


def death_at_start(error: RuntimeError) -> LoaderError | None:
    """Tell of a worker that died before its iteration could name its samples.

    Args:
        error: What was raised as the iteration began.

    Returns:
        What to raise from it; None where it is something else.
    """
    if not str(error).startswith(_DEATH):
        return None
    message = "A worker died as the epoch began."
    return LoaderError(message, why=str(error), fix="num_workers=0 shows where")


def cause_of(code: int | None, host: Host, *, out_of_memory: bool) -> tuple[str, str]:
    """Say why a worker probably died, and what to do.

    Args:
        code: Its exit code; negative for a signal; None if unknown.
        host: The limits of this process, read after the death.
        out_of_memory: The kernel has killed for memory since the epoch began.

    Returns:
        Why, and the fix.
    """
    name = signal_name(-code) if code is not None and code < 0 else ""
    if out_of_memory or name == "SIGKILL":
        killer = "SIGKILL: probably the kernel, out of memory"
        if out_of_memory:
            killer = "the kernel killed it, out of memory"
        left = f"{format_bytes(host.available_bytes)} are left ({host.available_from})"
        return f"{killer}; {left}", "num_workers=1 or 0, or a smaller batch"
    if name == "SIGBUS":
        free = host.shm_free_bytes
        if free is not None and free < _SHM_NEARLY_FULL_BYTES:
            why = f"SIGBUS: /dev/shm has {format_bytes(free)} left"
            return why, "docker run --shm-size=2g, or num_workers=0"
        why = "SIGBUS: probably a mapped file was cut while it was read"
        return why, "loaderkit verify CACHE; never change a cache that is in use"
    if name == "SIGSEGV":
        why = "SIGSEGV: a crash in native code that reading a sample calls"
        return why, "python -X faulthandler with num_workers=0 shows where"
    if name:
        return f"signal {name}", "num_workers=0 shows where"
    if code == 0:
        why = (
            "it was interrupted (SIGINT, as by Ctrl-C), or KeyboardInterrupt was raised"
        )
        return why, "interrupt the training process, which ends its workers"
    why = f"it ended itself with exit code {code}"
    if code == 1:
        # torch's loop in a worker sends errors of reading on, and lets SystemExit pass.
        why += ": by sys.exit, or by an error before it began, whose traceback is on "
        why += "stderr (a worker that is not forked imports the main module anew)"
    return why, "look for sys.exit or os._exit in the dataset; num_workers=0 shows it"
