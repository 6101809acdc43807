"""One iteration over a loader: what was given, what failed, and a tidy end."""

from __future__ import annotations

import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loaderkit.cache.download_ahead import DownloadAhead
from loaderkit.errors import LoaderError
from loaderkit.loader.delivery import SKIPPED, Delivery, Resumption
from loaderkit.loader.downloads import shard_uses
from loaderkit.loader.fetching import Failure, LocalFailure, names_of
from loaderkit.loader.prefetch import ReadAhead
from loaderkit.loader.resumable import EpochBatches
from loaderkit.loader.subject import stored_rows_of
from loaderkit.memory.host import Host, read_host, signal_name
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from loaderkit.loader.planned import PlannedLoader
    from loaderkit.loader.resumable import Position


class Progress:
    """How far an iteration has come.

    Args:
        start: Where it begins.
        resumption: Where the workers stand.
    """

    def __init__(self, start: Position, resumption: Resumption) -> None:
        self.position = replace(start)
        self.ended = False
        self._workers = dict(resumption.workers)
        self._last_worker = resumption.last_worker

    def note(self, delivery: Delivery, *, numbered: bool) -> None:
        """Count a batch that the loop gets.

        Args:
            delivery: The batch.
            numbered: Its number is that of a batch of the epoch.
        """
        at = self.position
        if not numbered or delivery.number == at.start:
            at.start += 1
            while at.start in at.ahead:
                at.ahead -= {at.start}
                at.start += 1
        else:
            at.ahead |= {delivery.number}
        self._last_worker = delivery.worker
        if delivery.state is not None:
            self._workers[delivery.worker] = delivery.state

    def resumption(self) -> Resumption:
        """Say where the workers stand after the batches that were given."""
        return Resumption(dict(self._workers), self._last_worker)


_EPOCHS: weakref.WeakSet[LoaderEpoch] = weakref.WeakSet()
"""Running iterations with workers: a signal tells of a death, and not whose it is."""


_DEATH = "DataLoader worker (pid"
"""How torch begins its error for a worker that died."""


class _DeathTeller:
    """Stands before torch's handler of SIGCHLD, and says more than it does.

    torch raises from that handler, wherever the main thread happens to be: in the
    middle of a training step, or before a line of ours could catch it.  Handlers are
    chained as torch chains its own to the one before it.

    Args:
        before: The handler that was there, torch's.
    """

    def __init__(self, before: Callable[[int, Any], Any]) -> None:
        self.before = before

    def __call__(self, number: int, frame: Any) -> None:
        """Pass the signal on; tell of a worker of ours with the samples' names."""
        try:
            self.before(number, frame)
        except RuntimeError as error:
            for epoch in list(_EPOCHS):
                told = epoch.told(error)
                if told is not None:
                    raise told from error
            raise


def tell_of_deaths() -> None:
    """Have deaths of workers told wherever the main thread is."""
    if threading.current_thread() is not threading.main_thread():
        return  # signals are the main thread's; torch does not set a handler either
    if not hasattr(signal, "SIGCHLD"):
        return
    before = signal.getsignal(signal.SIGCHLD)
    # Only torch's raises, and it is not there before torch has started a worker.
    if isinstance(before, _DeathTeller) or not callable(before):
        return
    signal.signal(signal.SIGCHLD, _DeathTeller(before))


class LoaderEpoch(Iterator[Any]):
    """Batches of one epoch; counts them, and explains a worker's death.

    Args:
        loader: The loader.
        inner: torch's own iterator, over deliveries.
        progress: Where it begins; counted up here.
        alone: The iterator is not the one that the loader keeps.
        kills: How often the kernel had killed for memory before; None if unknown.
    """

    def __init__(
        self,
        loader: PlannedLoader,
        inner: Any,
        progress: Progress,
        *,
        alone: bool,
        kills: int | None,
    ) -> None:
        self.progress = progress
        self._inner, self._alone = inner, alone
        self._dataset, self._chosen = loader.dataset, loader.batches
        self._start = replace(progress.position)
        self._length, self._check_length = loader.__len__, loader.check_length
        self._kills = kills
        self._deliveries: Iterator[Delivery] = inner
        downloads = loader.plan.downloads
        self._downloads_ahead = downloads is not None and downloads.ahead_bytes > 0
        self._ahead: DownloadAhead | None = None
        self._death: LoaderError | None = None
        if loader.num_workers:
            # As soon as it can tell of a death: workers are at work already.
            _EPOCHS.add(self)
            tell_of_deaths()
        if loader.plan.read_ahead:
            self._deliveries = ReadAhead(inner, loader.plan.read_ahead)

    def download_ahead(self) -> None:
        """Begin to download what the epoch reads from a store, if it reads from one."""
        stored = stored_rows_of(self._dataset) if self._downloads_ahead else None
        if stored is None or not isinstance(self._chosen, EpochBatches):
            return
        if not stored.is_missing.any():
            return
        epoch = self._chosen.epoch_of(self._start.epoch)
        uses = shard_uses(stored.shard_of_row, epoch, self._start.start)
        self._ahead = DownloadAhead(stored, uses)
        # A loop that is left early lets go of its iterator, and says no more.
        weakref.finalize(self, self._ahead.close)

    def __iter__(self) -> LoaderEpoch:
        return self

    def __len__(self) -> int:
        if isinstance(self._chosen, EpochBatches):
            # The loader itself tells the length of the epoch that comes next.
            return len(self._chosen.epoch_of(self._start.epoch))
        return self._length()

    def __next__(self) -> Any:
        try:
            delivery = next(self._deliveries)
            while delivery.number == SKIPPED:
                delivery = next(self._deliveries)
        except StopIteration:
            self.progress.ended = True
            self.close()
            raise
        except RuntimeError as error:
            death = self._death
            if death is None or (error is not death and error.__cause__ is not death):
                death = self.told(error)
            if death is None:
                raise
            self.progress.ended = True
            self.close()
            self._inner._shutdown_workers()
            # torch's wait raises another error from the one that the signal raised.
            raise death from (death.__cause__ or error)
        except (EOFError, ConnectionError, FileNotFoundError) as error:
            death = self._death or self._death_while_sending()
            if death is None:
                raise
            self.progress.ended = True
            self.close()
            self._inner._shutdown_workers()
            raise death from error
        if isinstance(delivery.batch, Failure | LocalFailure):
            raise delivery.batch.rebuilt()
        self.progress.note(delivery, numbered=self._chosen is not None)
        if self._ahead is not None:
            self._ahead.advance(self.progress.position.start)
        if self._chosen is None:
            self._check_length(self.progress.position.start)
        return delivery.batch

    def close(self) -> None:
        """Let go of threads and workers, but for those the loader keeps."""
        if self._ahead is not None:
            self._ahead.close()
        if isinstance(self._deliveries, ReadAhead):
            self._deliveries.close()
        if self._alone and hasattr(self._inner, "_shutdown_workers"):
            self._inner._shutdown_workers()

    def _death_while_sending(self) -> LoaderError | None:
        """Explain a batch whose worker died before its tensors were fetched from it.

        torch sends a tensor as a name for a descriptor that the worker keeps.
        """
        for worker in getattr(self._inner, "_workers", []):
            try:
                worker.join(timeout=0.5)
            except LoaderError as death:  # the signal came meanwhile
                return death
            if worker.exitcode is not None:
                return self.told(RuntimeError(f"{_DEATH} {worker.pid}) exited"))
        return None

    def told(self, error: RuntimeError) -> LoaderError | None:
        """Explain a worker's death; None when it is something else, or not ours.

        Called from a signal handler too, so it must not wait for a lock or a queue.
        """
        text = str(error)
        if not text.startswith(_DEATH):
            return None  # the user's own error, or ours
        workers = list(getattr(self._inner, "_workers", []))
        named, _, _ = text.replace("pid(s)", "pids").partition(")")
        numbers = re.findall(r"\d+", named)
        pids = {int(number) for number in numbers}
        if not pids & {worker.pid for worker in workers}:
            return None
        for worker in workers:
            worker.join(timeout=0.2)
        dead = [
            number
            for number, worker in enumerate(workers)
            # One that was interrupted ends with 0, as one that has no more to do.
            if worker.exitcode or (worker.exitcode == 0 and worker.pid in pids)
        ]
        host = read_host()
        codes = [workers[number].exitcode for number in dead]
        killed = self._kills is not None and (host.oom_kills or 0) > self._kills
        why, fix = cause_of(codes[0] if codes else None, host, out_of_memory=killed)
        batches = self._under_way(dead[0]) if dead else []
        which = f"Worker {dead[0]}" if dead else "A worker"
        one = "the batch" if len(batches) == 1 else "one of the batches"
        what = f"{which} died while it made {one} of {'; or '.join(batches)}."
        self._death = LoaderError(what, why=why, fix=fix)
        return self._death

    def _under_way(self, worker: int) -> list[str]:
        """Name the samples of each batch that was asked of a worker and never came."""
        tasks = getattr(self._inner, "_task_info", {})
        own = [n for n, task in tasks.items() if task[0] == worker and len(task) == 1]
        if not own or not isinstance(self._chosen, EpochBatches):
            return ["unknown samples"]
        epoch = self._chosen.epoch_of(self._start.epoch)
        # torch counts the batches that it asked for; some were given before.
        asked = [
            number
            for number in range(self._start.start, len(epoch))
            if number not in self._start.ahead
        ]
        batches = (epoch.batch(asked[index]) for index in sorted(own))
        return [names_of(self._dataset, rows) for rows in batches]


def death_at_start(error: RuntimeError) -> LoaderError | None:
    """Tell of a worker that died before its iteration could name its samples.

    Args:
        error: What was raised as the iteration began.

    Returns:
        What to raise from it; None where it is something else.
    """
    if not str(error).startswith(_DEATH):
        return None
    what = "A worker died as the epoch began."
    return LoaderError(what, why=str(error), fix="num_workers=0 shows where")


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
        sure = "the kernel killed it, out of memory" if out_of_memory else (
            "SIGKILL: probably the kernel, out of memory"
        )  # fmt: skip
        left = f"{format_bytes(host.available_bytes)} are left ({host.available_from})"
        return f"{sure}; {left}", "num_workers=1 or 0, or a smaller batch"
    if name == "SIGBUS":
        free = host.shm_free_bytes
        if free is not None and free < 64 << 20:
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
    return why, "look for sys.exit or os._exit in the dataset; num_workers=0 shows it"
