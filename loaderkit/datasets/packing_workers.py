"""Processes that do the tasks of a packing run, and that may die at any moment.

Python's process pools share one pipe and its lock among all workers: a worker that is
killed while it writes leaves half a message, and everybody waits for the rest (1 run in
40, measured).  Here each worker has pipes of its own, and an answer is a few hundred
bytes, which a pipe takes whole or not at all (PIPE_BUF); a longer one waits in a file.
Nothing that a worker can leave behind is waited for.  Who dies is replaced.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
import uuid
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from loaderkit.cache.durable import not_written, remove
from loaderkit.datasets.own_samples import have_all_threads_make_samples
from loaderkit.datasets.packing_failures import TaskFailure, pickle_or_nothing
from loaderkit.datasets.packing_tasks import doing_tasks_of, not_unpickled, run_of
from loaderkit.datasets.sources import describe_rows
from loaderkit.error_texts import error_in_words
from loaderkit.errors import DatasetError
from loaderkit.fixes import Fix, Setting
from loaderkit.sending import NotReceived, Outbox, Sent, can_fork, find_obstacle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext

    from loaderkit.datasets.block_readers import PackJob
    from loaderkit.datasets.packing_tasks import CommonPart, PackTask
    from loaderkit.interrupts import Interrupts

_LOG = logging.getLogger("loaderkit")

_NOT_PICKLED = (pickle.PicklingError, AttributeError, TypeError)
"""What ``pickle`` raises about an object that cannot be sent to another process."""
_TASKS_AHEAD = 2
"""Tasks that a worker knows of: the one that it does, and one that waits for it."""
_MOST_MESSAGE_BYTES = 2048
"""A larger answer goes through a file: POSIX promises 512 whole bytes, Linux 4096,
macOS and the BSDs at least 512, of which one write to a pipe is never torn."""
_ALONE_S = 0.5
"""How long samples in memory are packed without workers: as long as these take to start
and end.  1,000 molecules are read in 0.2 s, and took three times as long with them."""
_ONE_WORKER_S = 0.5
"""How long one worker is the only one, where nobody asked for more.  Chosen, as above:
1,000 molecules are packed by then, and a second worker takes a fifth of the CPU that
these take; a long run ends at most 0.4 s later for it."""
_LIVENESS_CHECK_S = 1.0
"""How often processes are looked at that should have told of their end.  They tell by a
pipe that closes when nobody holds it; a process that load() started, or a worker that
was started later, may hold it longer."""
_GRACE_S = 5.0
"""How long a worker may take to end when asked to, before it is killed."""


class WorkerEndedError(Exception):
    """A worker ended in the middle of a task.

    Args:
        status: Its exit status; negative for a signal, None where it is not known.
    """

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status


class LocalEngine:
    """Does the tasks of a packing run here, or in processes started for it.

    They start when the first task is to be done that this process does not do itself.
    The user's code runs in them alone, unless there are none: a file that it opens and
    keeps would be open in this process when workers are forked from it, all of them
    would share one position in the file, and read each other's bytes.

    Args:
        common: What the tasks have in common; ``doing_tasks_of`` is on.
        file: What the tasks call it.
        interrupts: A Ctrl-C waits while a worker is started: it comes to be known, and
            is not cut off half made.
        workers: Processes; 0 does all here; None: up to 4, one for each CPU.
        most_tasks: No more processes than that have something to do; None where it is
            not known.
    """

    is_local = True

    def __init__(
        self,
        common: CommonPart,
        file: Path,
        interrupts: Interrupts,
        workers: int | None,
        most_tasks: int | None = None,
    ) -> None:
        self._common, self._file, self._asked_for = common, file, workers
        self._interrupts = interrupts
        self._workers: list[_Worker] = []
        self._waiting: collections.deque[_PendingTask] = collections.deque()
        self._done: collections.deque[Future[Any]] = collections.deque()
        self._alone_until: float | None = None
        self._all_start_at: float | None = None
        """When the processes behind the first are started."""
        self._does_all_here = workers == 0
        count = workers or min(4, _usable_cpus())
        self._count = count if most_tasks is None else min(count, most_tasks)
        self._context: BaseContext = multiprocessing.get_context()

    @property
    def most_outstanding(self) -> int:
        """How many tasks it may be given before one is done."""
        # What is done here is done when it is given: an error must not keep what was
        # done before from being put together.
        return _TASKS_AHEAD * self._count if self._workers else 1

    @property
    def identity(self) -> object:
        """It never breaks as a whole."""
        return self

    def submit(self, task: PackTask) -> Future[Any] | None:
        """Take a task; what it raises is raised here, where it is done here.

        Raises:
            DatasetError: No worker could be started.
            CacheError: What was read here cannot be written for the workers.
        """
        future: Future[Any] = Future()
        if self._does_here():
            future.set_result(task.run())
            self._done.append(future)
        else:
            self._waiting.append(_PendingTask(task, future))
        return future

    def wait(self) -> Future[Any]:
        """Wait until one of the tasks is done."""
        while not self._done:
            self._hand_out()
            if not self._done:
                self._receive_answers()
        return self._done.popleft()

    def drop_broken(self, broken: object) -> None:
        """It never breaks as a whole."""

    def refused(
        self,
        error: BaseException | None = None,
        *,
        blamed_rows: range | None = None,  # noqa: ARG002
    ) -> DatasetError:
        """It takes all tasks."""
        return _start_failed(error, "no packing worker is left")

    def dismiss(self) -> None:
        """Let the processes end by themselves, so that their own clean-up runs."""
        for worker in self._workers:
            try:
                worker.tasks.send(None)
            except OSError:
                continue  # it has ended already
        for worker in self._workers:
            worker.process.join(_GRACE_S)

    def stop(self) -> None:
        """End the processes, whatever they are doing."""
        for worker in self._workers:
            if worker.process.is_alive():
                worker.process.terminate()
        for worker in self._workers:
            _end_worker(worker)
        self._workers = []

    def lost(self, rows: range, error: BaseException) -> DatasetError:
        """Say at which samples a worker ended, and what its exit status suggests."""
        status = error.status if isinstance(error, WorkerEndedError) else None
        ended = "ended" if status is not None and status >= 0 else "was killed"
        message = (
            f"A packing worker {ended} while it read "
            f"{describe_rows(self._common.job.source, rows)} (exit status {status})."
        )
        why = "probably out of memory, or a crash in native code that load() calls"
        if ended == "ended":
            why = "load(), or a library that it calls, ends the process (os._exit)"
        one_worker, no_worker = Setting("workers", 1), Setting("workers", 0)
        see = " to see the crash; finished shards are kept"
        fix = Fix.of("pack with ", one_worker, ", or ", no_worker, see)
        return DatasetError(message, why=why, fix=fix)

    def _does_here(self) -> bool:
        """Tell whether this process does the next task itself."""
        if self._does_all_here or self._workers:
            return self._does_all_here
        source = self._common.job.source
        if self._asked_for is None and not source.runs_user_code():
            if self._alone_until is None:
                self._alone_until = time.monotonic() + _ALONE_S
            if time.monotonic() < self._alone_until:
                return True
        method = self._choose_start_method()
        if method is None:
            self._does_all_here = True
        else:
            self._context = multiprocessing.get_context(method)
            self._all_start_at = time.monotonic()
            if self._asked_for is None:
                self._all_start_at += _ONE_WORKER_S
            run_of(self._file).share()
            self._start_missing_workers()
        return self._does_all_here

    def _choose_start_method(self) -> str | None:
        """Say how workers start, as torch starts a DataLoader's; None for no workers.

        Raises:
            DatasetError: Workers were asked for, and cannot be sent the dataset.
        """
        method = multiprocessing.get_start_method()
        source = self._common.job.source
        if method == "fork":
            return method
        if self._asked_for is None and not source.runs_user_code():
            # To send samples that lie in memory takes longer than to pack them.
            return None
        obstacle = find_obstacle({"dataset": source}, method)
        if obstacle is None:
            return method
        reason = obstacle.why
        if can_fork(source=source):
            _LOG.warning(
                "packing by forked workers rather than by %s: %s", method, reason
            )
            return "fork"
        if self._asked_for is not None:
            message = f"No packing worker can start by {method!r}."
            fix = Fix.of(f"{obstacle.fix}; or pack with ", Setting("workers", 0))
            raise DatasetError(message, why=reason, fix=fix)
        # An open database or a lambda is no reason to refuse what one process can pack,
        # where nobody asked for more.
        _LOG.warning("packing without workers, which cannot start: %s", reason)
        return None

    def _start_missing_workers(self) -> None:
        """Start the processes that are missing."""
        context = self._context
        count = self._count if self._seconds_until_all_start() <= 0 else 1
        try:
            while len(self._workers) < count:
                with self._interrupts.held():
                    worker = _start_worker(self._common, self._file, context)
                    self._workers.append(worker)
        except (OSError, EOFError) as error:
            # EOFError: the server that forks for "forkserver" was killed.
            why = "no room for another process, or what starts them was killed"
            raise _start_failed(error, why) from error
        except _NOT_PICKLED as error:
            method = context.get_start_method()
            why = f"{method!r} sends the dataset to its processes, pickled"
            raise _start_failed(error, why) from error

    def _seconds_until_all_start(self) -> float:
        if self._all_start_at is None:
            return 0
        return self._all_start_at - time.monotonic()

    def _hand_out(self) -> None:
        """Give tasks to the workers; start the others where there is more to do."""
        self._give_to_started()
        # The last task of a run comes alone: one that has nothing to do takes it.
        if self._waiting and self._seconds_until_all_start() <= 0:
            self._start_missing_workers()
            self._give_to_started()

    def _give_to_started(self) -> None:
        """Give tasks to the workers that have the fewest before them."""
        # What the first has not begun, the others take when they are started.
        tasks_ahead = _TASKS_AHEAD if len(self._workers) == self._count else 1
        while self._waiting:
            worker = min(self._workers, key=lambda worker: len(worker.unanswered))
            if len(worker.unanswered) >= tasks_ahead:
                return
            pending = self._waiting.popleft()
            worker.unanswered.append(pending)
            try:
                worker.tasks.send(pending.task)
            except OSError:
                return  # it has ended, which is told where its answers are read

    def _receive_answers(self) -> None:
        """Wait until a worker answers or ends."""
        sentinels = [worker.process.sentinel for worker in self._workers]
        answers = [worker.answers for worker in self._workers]
        timeout_s = _LIVENESS_CHECK_S
        if self._waiting and len(self._workers) < self._count:
            timeout_s = max(0, min(timeout_s, self._seconds_until_all_start()))
        wait([*answers, *sentinels], timeout=timeout_s)
        for worker in list(self._workers):
            is_dead = not worker.process.is_alive()
            # A dead worker's last answers are read before its death is told of.
            while worker.answers.poll():
                try:
                    answer: _Answer = worker.answers.recv()
                except (EOFError, OSError):
                    break
                if answer == _BEGUN:
                    worker.has_begun = True
                    continue
                future = worker.unanswered.popleft().future
                future.set_result(_open_answer(answer))
                self._done.append(future)
            status = worker.process.exitcode
            if is_dead and not worker.has_begun and status is not None and status > 0:
                raise _never_began(status, self._context.get_start_method())
            if is_dead:
                self._replace_dead_worker(worker)

    def _replace_dead_worker(self, dead: _Worker) -> None:
        """Start another worker; the task that the dead one was at is lost."""
        _end_worker(dead)
        self._workers.remove(dead)
        if dead.unanswered:
            lost = dead.unanswered.popleft()
            lost.future.set_exception(WorkerEndedError(dead.process.exitcode))
            self._done.append(lost.future)
        self._waiting.extendleft(reversed(dead.unanswered))
        self._start_missing_workers()


class _PendingTask(NamedTuple):
    """A task, and what will hold its result."""

    task: PackTask
    future: Future[Any]


@dataclass
class _Worker:
    process: Any
    tasks: Connection[Any, Any]
    """Where this process writes what is to be done."""
    answers: Connection[Any, Any]
    """Where this process reads what came of it."""
    has_begun: bool = False
    """It has all that it needs to do tasks."""
    unanswered: collections.deque[_PendingTask] = field(
        default_factory=collections.deque
    )
    """Tasks that it has and has not answered, in order."""


@dataclass(frozen=True)
class _Answer:
    pickled: bytes = b""
    """What came of a task; empty where it is in the file."""
    file: str = ""


_BEGUN = _Answer()
"""Sent by a worker that has all that it needs, before it does anything."""


def _open_answer(answer: _Answer) -> Any:
    """Give what a task gave, or the ``TaskFailure`` of what it raised."""
    if answer.pickled:
        return pickle.loads(answer.pickled)
    file = Path(answer.file)
    result = pickle.loads(file.read_bytes())
    remove(file)
    return result


def _end_worker(worker: _Worker) -> None:
    """Wait for a worker that was asked to end, or is dead; kill it if it lives on."""
    worker.process.join(_GRACE_S)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
    worker.tasks.close()
    worker.answers.close()


def _start_failed(error: BaseException | None, why: str) -> DatasetError:
    message = f"A packing worker could not be started: {error_in_words(error)}"
    fix = Fix.of("pack with ", Setting("workers", 0), "; finished shards are kept")
    return DatasetError(message, why=why, fix=fix)


def _never_began(status: int, method: str) -> DatasetError:
    """Say that a process ended by an error before any line of ours ran in it."""
    message = f"A packing worker ended before it began (exit status {status})."
    why = f"{method!r} starts Python anew, which imports the main module and what the "
    why += "dataset is made of; one of these failed, with a traceback on stderr"
    alone = Setting("workers", 0)
    fix = Fix.of("correct that, or pack with ", alone, "; finished shards are kept")
    return DatasetError(message, why=why, fix=fix)


def _start_worker(common: CommonPart, file: Path, context: BaseContext) -> _Worker:
    task_reader, task_writer = context.Pipe(duplex=False)
    answer_reader, answer_writer = context.Pipe(duplex=False)
    outbox = Outbox()
    arguments = (Sent(common, outbox), file, task_reader, answer_writer)
    process: Any = context.Process(target=_run_worker, args=arguments)  # type: ignore[attr-defined]
    try:
        with _sigint_blocked(context):
            process.start()
        # One that has ended is told as its answers are waited for.
        with contextlib.suppress(ConnectionError):
            outbox.send()
    except BaseException:
        outbox.clear()
        task_writer.close()
        answer_reader.close()
        raise
    finally:
        task_reader.close()
        answer_writer.close()
    return _Worker(process, task_writer, answer_reader)


@contextlib.contextmanager
def _sigint_blocked(context: BaseContext) -> Iterator[None]:
    """Keep a Ctrl-C from a forked process until it has said that it ignores it.

    In between it would end it, with a traceback.  One that is started anew inherits
    what is blocked too, and so would all that it starts.
    """
    if context.get_start_method() != "fork":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_worker(
    sent: Sent,
    file: Path,
    tasks: Connection[Any, Any],
    answers: Connection[Any, Any],
) -> None:
    """Do tasks until there are no more; runs in a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # A handler of the user's, which a fork has too, would raise SystemExit anywhere
    # here, or save a checkpoint in each worker.  torch's workers go without it as well.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answers.send(_BEGUN)
    torch.set_num_threads(1)
    if isinstance(sent.value, NotReceived):
        _refuse_tasks(sent.value.error, tasks, answers)
        return
    common: CommonPart = sent.value
    job = common.job
    have_all_threads_make_samples()
    with (
        job.tracker(all_threads=True) as tracker,
        doing_tasks_of(common, file, tracker),
    ):
        while (task := _next_task(tasks)) is not None:
            try:
                answer = _answer_of(task.run(), job)
            except BaseException as error:  # noqa: BLE001 -- the parent raises it
                answer = _answer_with(error, job)
            answers.send(answer)


def _refuse_tasks(
    error: Exception, tasks: Connection[Any, Any], answers: Connection[Any, Any]
) -> None:
    """Answer each task with the error for which the dataset could not be unpickled."""
    try:
        raise not_unpickled(error) from error
    except DatasetError as refusal:
        failure = pickle.dumps(TaskFailure.of(refusal, "In a packing worker"))
        if len(failure) > _MOST_MESSAGE_BYTES:
            failure = pickle.dumps(TaskFailure("", pickle_or_nothing(refusal)))
    while _next_task(tasks) is not None:
        answers.send(_Answer(failure))


def _next_task(tasks: Connection[Any, Any]) -> PackTask | None:
    try:
        task: PackTask | None = tasks.recv()
    except EOFError:  # the packing process is gone
        return None
    return task


def _answer_of(result: object, job: PackJob) -> _Answer:
    """Send what a task gave.

    Raises:
        CacheError: It is long, and there is no room for a file.
    """
    pickled = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    if len(pickled) <= _MOST_MESSAGE_BYTES:
        return _Answer(pickled)
    file = job.block(f"answer-{uuid.uuid4().hex}")
    try:
        file.write_bytes(pickled)
    except OSError as error:
        raise not_written(file, error) from error
    return _Answer(file=str(file))


def _answer_with(error: BaseException, job: PackJob) -> _Answer:
    """Send an error on, with the traceback that pickling would lose."""
    text = traceback.format_exc()
    without_traceback = pickle_or_nothing(error)
    failure = pickle.dumps(TaskFailure.of(error, "In a packing worker"))
    if len(failure) <= _MOST_MESSAGE_BYTES:
        return _Answer(failure)
    file = job.block(f"error-{uuid.uuid4().hex}")
    try:
        file.write_bytes(failure)
    except OSError:
        # No room for a long error: without its traceback, or else the end of that,
        # where the cause stands.
        short = pickle.dumps(TaskFailure("", without_traceback))
        if not without_traceback or len(short) > _MOST_MESSAGE_BYTES:
            end = "... " + text[-_MOST_MESSAGE_BYTES // 8 :]
            short = pickle.dumps(TaskFailure(end))
        return _Answer(short)
    return _Answer(file=str(file))


def _end_with_parent() -> None:
    """Stop this worker when the packing process is killed, which tells nobody."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    starter = os.getppid()
    # The packing process, or the server that forks for it and ends with it: who is
    # orphaned gets another parent.
    while os.getppid() == starter:
        parent.join(_LIVENESS_CHECK_S)
        if not parent.is_alive():
            break
    os._exit(1)


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
