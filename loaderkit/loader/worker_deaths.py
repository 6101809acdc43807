"""Workers that died: told with the samples that they were reading, and the cause."""

from __future__ import annotations

import multiprocessing.context
import re
import signal
import sys
import threading
import traceback
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch.utils.data

from loaderkit.errors import LoaderError
from loaderkit.loader.resumable import EpochBatches
from loaderkit.loader.sample_names import names_of
from loaderkit.memory.host import read_host, signal_name
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from loaderkit.loader.loader_state import Progress
    from loaderkit.loader.user_batches import UserBatches
    from loaderkit.memory.machine import Host

_DEATH = "DataLoader worker (pid"
"""How torch begins its error for a worker that died."""
_TORCHS_FOLDER = Path(torch.utils.data.__file__).parent
"""Whose code raises it: the handler of a signal, or the wait for a batch."""
_JOIN_S = 0.2
"""How long a dead worker's exit code is waited for: from the signal to the code takes a
few milliseconds."""
_SLOW_JOIN_S = 0.5
"""The same where no signal told of a death, so that it may still be under way.  Chosen:
an error that is no death is raised so much later."""
_NO_ANSWER = 255
"""The exit code that Python gives a worker whose fork server is gone."""
_SHM_NEARLY_FULL_BYTES = 64 << 20
"""/dev/shm with less left is what SIGBUS is about.  Chosen: Docker's default size."""

_WATCHED: weakref.WeakSet[WorkerDeaths] = weakref.WeakSet()
"""Of running iterations: a signal tells of a death, and not whose worker it was."""
_STARTED: weakref.WeakSet[Any] = weakref.WeakSet()
"""torch's iterators that have workers: kept ones outlive the iterations they serve."""
_PIDS: set[int] = set()
"""Of all workers of ours: some outlive the iterator that would say whose they are."""


class WorkerDeaths:
    """Explains the deaths of the workers of one iteration.

    Args:
        torch_iterator: torch's iterator, which knows its workers and what it has asked
            them for; without workers nothing is ever explained.
        dataset: Names its samples.
        batches: Gives the rows of each batch; None for iterable datasets.
        progress: How far the iteration has come; stopped once a death is told.
        oom_kills: How often the kernel had killed for memory before; None if unknown.
    """

    def __init__(
        self,
        torch_iterator: Any,
        dataset: object,
        batches: EpochBatches | UserBatches | None,
        progress: Progress,
        oom_kills: int | None,
    ) -> None:
        self._torch_iterator = torch_iterator
        self._dataset = dataset
        self._batches = batches
        self._progress = progress
        self._oom_kills = oom_kills
        # An error holds the frames that it went through, and they hold the iterator:
        # kept here, it would keep the other workers until Python collects cycles.
        self._told_ref: Callable[[], LoaderError | None] = _nothing_told
        # Kept workers have served another iteration.
        self._has_new_workers = torch_iterator not in _STARTED

    @property
    def is_over(self) -> bool:
        """All batches were given, though somebody still holds the iteration."""
        return self._progress.has_ended

    def watch(self) -> None:
        """Tell of a death wherever the main thread is, not only when a batch is due."""
        _WATCHED.add(self)
        _STARTED.add(self._torch_iterator)
        started = {worker.pid for worker in workers_of(self._torch_iterator)}
        # Of a process that is gone torch does not tell: one number a worker that was
        # ever started would grow with the epochs.
        _PIDS.intersection_update(set(filter(psutil.pid_exists, _PIDS)))
        _PIDS.update(started)
        _handle_deaths()

    def explain_torchs_error(self, error: RuntimeError) -> LoaderError | None:
        """Return what to raise in the place of an error of torch's.

        Args:
            error: As it came from torch's iterator.

        Returns:
            None if it is no death of a worker of this iteration.
        """
        death = self._told_ref()
        if death is not None and death in (error, error.__cause__):
            return death
        # A death may have been told before, elsewhere in the main thread.  This error
        # came later and is explained anew.
        return self.explain(error)

    def explain_lost_message(self) -> LoaderError | None:
        """Explain a batch whose worker died before its tensors were fetched from it.

        torch sends a tensor as a name for a descriptor that the worker keeps.

        Returns:
            None if all workers live.
        """
        known_death = self._told_ref()
        if known_death is not None:
            return known_death
        for worker in workers_of(self._torch_iterator):
            try:
                worker.join(timeout=_SLOW_JOIN_S)
            except LoaderError as death:  # the signal came meanwhile
                return death
            if worker.exitcode is not None:
                error = RuntimeError(f"{_DEATH} {worker.pid}) exited")
                return self.explain(error)
        return None

    def explain(self, error: RuntimeError) -> LoaderError | None:
        """Explain a worker's death; None when it is something else, or not ours.

        Called from a signal handler too, so it must not wait for a lock or a queue.

        Args:
            error: As torch raised it.
        """
        workers = workers_of(self._torch_iterator)
        if not pids_in(error) & {worker.pid for worker in workers}:
            return None  # the user's own error, or ours, or of another iteration
        dead = dead_of(workers, error)

        host = read_host()
        code = workers[dead[0]].exitcode if dead else None
        kills_before = self._oom_kills
        was_killed = kills_before is not None and (host.oom_kills or 0) > kills_before
        cause = cause_of(code, host, out_of_memory=was_killed)
        if dead and is_lost_with_its_server(workers[dead[0]]):
            cause = SERVER_LOST
        batches = self._batches_under_way(dead[0]) if dead else []
        who = f"Worker {dead[0]}" if dead else "A worker"
        which = "the batch" if len(batches) == 1 else "one of the batches"
        when = "while it made"
        if dead and self._may_not_have_begun(dead[0]):
            when = "as it unpickled the dataset, or while it made"
        message = f"{who} died {when} {which} of {'; or '.join(batches)}."
        death = LoaderError(message, why=cause.why, fix=cause.fix)
        self._told_ref = weakref.ref(death)
        # Batches of the epoch are left: a state that is saved now goes on with them.
        self._progress.stop()
        return death

    def _may_not_have_begun(self, worker: int) -> bool:
        """Whether a worker was started anew, and none of its batches has come.

        A forked one has the dataset from its first moment.
        """
        if not self._has_new_workers or not _is_started_anew(
            workers_of(self._torch_iterator)[worker]
        ):
            return False
        # torch asks each worker for one batch first, in turn.
        tasks = getattr(self._torch_iterator, "_task_info", {})
        return len(tasks.get(worker, ())) == 1

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
        start = self._progress.start
        epoch = self._batches.epoch_from(start)
        # torch counts the batches that it asked for; some were given before.
        numbers = [number for number in epoch.numbers if number not in start.ahead]
        return [
            names_of(self._dataset, epoch.batch(numbers[index]))
            for index in sorted(indices)
        ]


def _nothing_told() -> None:
    """Stand in for the error of a death where none was told."""


def workers_of(torch_iterator: Any) -> list[Any]:
    """Give torch's processes, which it shows to nobody; none without workers."""
    return list(getattr(torch_iterator, "_workers", []))


def pids_in(error: BaseException) -> set[int]:
    """Read the workers that an error of torch's names; none in other errors.

    >>> pids_in(RuntimeError("DataLoader worker (pid(s) 12, 15) exited unexpectedly"))
    {12, 15}
    >>> pids_in(RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed."))
    {12}
    >>> pids_in(ValueError("12"))
    set()
    """
    text = str(error)
    if not text.startswith(_DEATH):
        return set()
    pids_in_words, _, _ = text.replace("pid(s)", "pids").partition(")")
    return {int(digits) for digits in re.findall(r"\d+", pids_in_words)}


def dead_of(workers: list[Any], error: BaseException) -> list[int]:
    """Give the numbers of the workers that have ended as they should not.

    Args:
        workers: Of one iteration.
        error: torch's, which names some of them.
    """
    pids = pids_in(error)
    for worker in workers:
        worker.join(timeout=_JOIN_S)
    return [
        number
        for number, worker in enumerate(workers)
        # One that was interrupted ends with 0, as one that has no more to do.
        if worker.exitcode or (worker.exitcode == 0 and worker.pid in pids)
    ]


def _is_started_anew(worker: Any) -> bool:
    """Whether a process was sent what it works with, and has not inherited it."""
    names = ("SpawnProcess", "ForkServerProcess")
    # Not all systems have all of them.
    kinds = [getattr(multiprocessing.context, name, None) for name in names]
    return isinstance(worker, tuple(kind for kind in kinds if kind is not None))


def have_died(torch_iterator: Any) -> bool:
    """Say whether a worker that is kept for the next epoch has ended."""
    return any(worker.exitcode is not None for worker in workers_of(torch_iterator))


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
        # torch raises again at the end of each later child process, whosever it is, as
        # long as the iterator of the dead worker is there.
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, number: int, frame: Any) -> None:
        """Pass the signal on; tell of a worker of ours with the samples' names."""
        # Ctrl-C ends workers too.  Their end must not be told in its place, while its
        # exception is on the way out.
        is_interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        try:
            self.torchs_handler(number, frame)
        except RuntimeError as error:
            if is_interrupted:
                return
            if not pids_in(error) & _PIDS:
                raise
            dead = _needed_worker(error)
            if dead is None:
                return
            worker, is_idle = dead
            death = None if is_idle else _explain_running(error)
            if death is None:
                if worker in self._told:
                    return
                death = _explain_idle(worker)
            self._told.add(worker)
            try:
                raise death from error
            finally:
                # The error holds this frame, which must not hold the error in turn.
                del death


def _explain_running(error: RuntimeError) -> LoaderError | None:
    """Explain the death of a worker that reads an epoch; None if it was another one."""
    for deaths in list(_WATCHED):
        death = None if deaths.is_over else deaths.explain(error)
        if death is not None:
            return death
    return None


class _Needed(NamedTuple):
    """A worker that more batches are wanted of."""

    worker: Any
    is_idle: bool
    """Of this epoch it has given its share; it is kept for the next one."""


def _needed_worker(error: RuntimeError) -> _Needed | None:
    """Find the dead worker that torch names; None if no more was wanted of it.

    That is so once all batches were given, or its share of a stream, or the loop was
    left.  A library that crashes as its process ends must not take the epoch with it.
    """
    pids = pids_in(error)
    for torch_iterator in list(_STARTED):
        if getattr(torch_iterator, "_shutdown", False):
            continue
        workers = workers_of(torch_iterator)
        # torch's own note of the workers that it waits for, made behind their start.
        has_more = getattr(torch_iterator, "_workers_status", [True] * len(workers))
        for worker, is_waited_for in zip(workers, has_more, strict=True):
            if worker.pid not in pids:
                continue
            if is_waited_for or torch_iterator._persistent_workers:
                return _Needed(worker, is_idle=not is_waited_for)
    return None


def _explain_idle(worker: Any) -> LoaderError:
    worker.join(timeout=_JOIN_S)
    cause = cause_of(worker.exitcode, read_host(), out_of_memory=False)
    if is_lost_with_its_server(worker):
        cause = SERVER_LOST
    message = "A worker that was kept for the next epoch died."
    fix = f"{cause.fix}; if you go on, nothing is lost: the next epoch starts new ones"
    return LoaderError(message, why=cause.why, fix=fix)


def _handle_deaths() -> None:
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


def death_at_start(error: BaseException) -> LoaderError | None:
    """Tell of a worker that died before its iteration could name its samples.

    Args:
        error: What was raised as the iteration began.

    Returns:
        What to raise from it; None where it is something else.
    """
    if not isinstance(error, RuntimeError) or not str(error).startswith(_DEATH):
        return None
    # Code of the user's, such as a sampler, may raise an error of these words.  Which
    # processes torch has started is not known yet, but it is where the error began.
    raising = traceback.extract_tb(error.__traceback__)[-1]
    if not Path(raising.filename).is_relative_to(_TORCHS_FOLDER):
        return None
    message = "A worker died as the epoch began."
    return LoaderError(message, why=str(error), fix="num_workers=0 shows where")


class DeathCause(NamedTuple):
    """Why a worker died."""

    why: str
    fix: str
    """What to do."""


SERVER_LOST = DeathCause(
    "the fork server, which started it, has ended: probably the kernel killed it, out "
    "of memory",
    "num_workers=1 or 0, a smaller batch, or the next epoch, which starts another one",
)


def is_lost_with_its_server(worker: Any) -> bool:
    """Tell whether it is the fork server that ended: who tells of its workers' ends."""
    # 255 is what Python then says of them.  A name without a type for mypy on Windows.
    server_process = getattr(multiprocessing.context, "ForkServerProcess", None)
    is_of_server = server_process is not None and isinstance(worker, server_process)
    return is_of_server and worker.exitcode == _NO_ANSWER


def cause_of(code: int | None, host: Host, *, out_of_memory: bool) -> DeathCause:
    """Say why a worker probably died, and what to do.

    Args:
        code: Its exit code; negative for a signal; None if unknown.
        host: The limits of this process, read after the death.
        out_of_memory: The kernel has killed for memory since the epoch began.

    Returns:
        The cause; it is "probably" one unless something proves it.
    """
    name = signal_name(-code) if code is not None and code < 0 else ""
    if out_of_memory or name == "SIGKILL":
        killer = "SIGKILL: probably the kernel, out of memory"
        if out_of_memory:
            killer = "the kernel killed it, out of memory"
        left = f"{format_bytes(host.available_bytes)} are left ({host.available_from})"
        fix = "num_workers=1 or 0, or a smaller batch"
        return DeathCause(f"{killer}; {left}", fix)
    if name == "SIGBUS":
        free = host.shm_free_bytes
        if free is not None and free < _SHM_NEARLY_FULL_BYTES:
            why = f"SIGBUS: /dev/shm has {format_bytes(free)} left"
            return DeathCause(why, "docker run --shm-size=2g, or num_workers=0")
        why = "SIGBUS: probably a mapped file was cut while it was read"
        fix = "loaderkit verify CACHE; never change a cache that is in use"
        return DeathCause(why, fix)
    if name == "SIGSEGV":
        why = "SIGSEGV: a crash in native code that reading a sample calls"
        fix = "python -X faulthandler with num_workers=0 shows where"
        return DeathCause(why, fix)
    if name:
        return DeathCause(f"signal {name}", "num_workers=0 shows where")
    if code == 0:
        why = "it was interrupted (SIGINT, as by Ctrl-C)"
        fix = "interrupt the training process, which ends its workers"
        return DeathCause(why, fix)
    why = f"it ended itself with exit code {code}"
    if code == 1:
        # torch's loop in a worker sends errors of reading on, and lets SystemExit pass.
        why += ": by sys.exit, or by an error before it began, whose traceback is on "
        why += "stderr (a worker that is not forked imports the main module anew)"
    fix = "look for sys.exit or os._exit in the dataset; num_workers=0 shows it"
    return DeathCause(why, fix)
