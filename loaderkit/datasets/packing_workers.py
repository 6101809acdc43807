"""Processes that read samples for packing, and that may die at any moment.

Python's process pools share one pipe and its lock among all workers: a worker that is
killed while it writes leaves half a message, and everybody waits for the rest (1 run in
40, measured).  Here each worker has pipes of its own, and a message is a few hundred
bytes, which a pipe takes whole or not at all (PIPE_BUF); what was read waits in a file.
Nothing that a worker can leave behind is waited for.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loaderkit.datasets.block_readers import Span, Task, read_span, set_aside, take_up
from loaderkit.errors import DatasetError
from loaderkit.randomness import quiet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext

    from loaderkit.datasets.block_readers import PackJob

_LOG = logging.getLogger("loaderkit")

_NOT_PICKLED = (pickle.PicklingError, AttributeError, TypeError)
"""What ``pickle`` raises about an object that cannot be sent to another process."""
_AHEAD = 16
"""Spans asked of each worker at a time: they wait in files while a shard is written,
which takes as long as some 10 of them."""
_MOST_MESSAGE_BYTES = 2048
"""A larger error goes through a file: POSIX promises 512 whole bytes, Linux 4096, macOS
and the BSDs at least 512, of which one write to a pipe is never torn."""
_ALONE_S = 0.5
"""How long samples in memory are read without workers: as long as these take to start
and end.  1,000 molecules are read in 0.2 s, and took three times as long with them."""
_LOOK_S = 1.0
"""How often processes are looked at that should have told of their end.  They tell by a
pipe that closes when nobody holds it; a process that load() started, or a worker that
was started later, may hold it longer."""
_GRACE_S = 5.0
"""How long a worker may take to end when asked to, before it is killed."""


@contextlib.contextmanager
def reading(job: PackJob, workers: int | None) -> Iterator[SpanReader]:
    """Have samples read until the context ends, and the processes with it.

    Args:
        job: What is read, and where blocks wait.
        workers: Processes; 0 reads here; None: up to 4, one for each CPU.

    Yields:
        What reads them.
    """
    reader = SpanReader(job, workers)
    try:
        yield reader
        reader.dismiss()
    finally:
        reader.stop()


class SpanReader:
    """Reads spans of samples, in processes that start when the first is needed.

    The user's code runs in these alone, unless there are none: a file that it opens and
    keeps would be open in this process when workers are forked from it, all of them
    would share one position in the file, and read each other's bytes.
    """

    def __init__(self, job: PackJob, workers: int | None) -> None:
        self._job, self._workers = job, workers
        self._team: _WorkerTeam | None = None

    def dismiss(self) -> None:
        """Let the processes end by themselves, so that their own clean-up runs."""
        if self._team is not None:
            self._team.dismiss()

    def stop(self) -> None:
        """End the processes, whatever they are doing."""
        if self._team is not None:
            self._team.stop()

    def read(self, tasks: Iterable[Task]) -> Iterator[Span]:
        """Read spans, several at a time, and give them in order.

        Args:
            tasks: Which ones, in order.

        Yields:
            Each span; the next call comes behind the last.

        Raises:
            DatasetError: A sample cannot be read or stored, or a worker was killed.
            CacheError: What was read cannot be set aside.
        """
        tasks = iter(tasks)
        if self._workers == 0:
            yield from self._read_here(tasks)
            return
        if self._workers is None and not self._job.source.runs_user_code():
            yield from self._read_here(tasks, seconds=_ALONE_S)
        first = next(tasks, None)
        if first is None:
            return
        tasks = itertools.chain([first], tasks)
        if self._team is None:
            team = _WorkerTeam(self._job)
            try:
                team.start(self._workers or min(4, _usable_cpus()))
            except DatasetError as error:
                team.stop()
                reason = error.__cause__
                if self._workers is not None or not isinstance(reason, _NOT_PICKLED):
                    raise
                # An open database or a lambda is no reason to refuse what one process
                # can pack, where nobody asked for more.
                text = (
                    "packing without workers, which the dataset cannot be sent to: %s"
                )
                _LOG.warning(text, reason)
                self._workers = 0
                yield from self._read_here(tasks)
                return
            self._team = team
        yield from self._team.read(tasks)

    def _read_here(
        self, tasks: Iterator[Task], seconds: float = math.inf
    ) -> Iterator[Span]:
        """Read spans in this process, and begin none after so many seconds."""
        end = time.monotonic() + seconds
        with self._job.tracker(all_threads=False) as tracker, quiet():
            while time.monotonic() < end:
                task = next(tasks, None)
                if task is None:
                    return
                yield read_span(self._job, task, tracker)


@dataclass
class _Worker:
    process: Any
    tasks: Connection[Any, Any]
    """Where this process writes which span to read."""
    answers: Connection[Any, Any]
    """Where this process reads what became of it."""
    asked: collections.deque[Task] = field(default_factory=collections.deque)
    """Spans it was asked for and has not answered, in order."""


@dataclass(frozen=True)
class _Answer:
    start: int
    file: str = ""
    """Where the span, or a large error, waits."""
    error: bytes | None = None
    """The pickled error, where it is small; b"" where it is in the file."""


@dataclass(frozen=True)
class Failure:
    """An error of a worker, on its way."""

    text: str
    """Its traceback."""
    pickled: bytes = b""
    """The error itself; empty where it cannot be pickled."""

    @classmethod
    def of(cls, error: BaseException, where: str) -> Failure:
        """Take up an error that is being handled, with the traceback as its note."""
        text = traceback.format_exc()
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"{where}:\n{text}")
        return cls(text, _pickle_or_nothing(error))

    def rebuild(self) -> BaseException:
        """Make the error anew, or one that holds its traceback."""
        try:
            error: object = pickle.loads(self.pickled)
        except Exception:  # noqa: BLE001 -- unpickling runs code of the user's error
            error = None
        if isinstance(error, BaseException):
            return error
        why = "the error itself could not be sent to this process"
        fix = "pack with workers=0 to have it raised here; finished shards are kept"
        message = f"A packing worker failed.\n{self.text}"
        return DatasetError(message, why=why, fix=fix)


class _WorkerTeam:
    """The workers of one packing run."""

    def __init__(self, job: PackJob) -> None:
        self._job = job
        self._workers: list[_Worker] = []
        self._answers: dict[int, _Answer] = {}

    def start(self, count: int) -> None:
        """Start the processes, as torch starts a DataLoader's."""
        context = multiprocessing.get_context()
        try:
            for _ in range(count):
                self._workers.append(_start_worker(self._job, context))
        except (OSError, EOFError) as error:
            # EOFError: the server that forks for "forkserver" was killed.
            why = "no room for another process, or what starts them was killed"
            raise _start_failed(error, why) from error
        except _NOT_PICKLED as error:
            method = context.get_start_method()
            why = f"{method!r} sends the dataset to its processes, pickled"
            raise _start_failed(error, why) from error

    def read(self, tasks: Iterator[Task]) -> Iterator[Span]:
        """Have spans read; give them in order."""
        in_order: collections.deque[int] = collections.deque()
        while True:
            while len(in_order) < _AHEAD * len(self._workers):
                task = next(tasks, None)
                if task is None:
                    break
                self._send_task(task)
                in_order.append(task.start)
            if not in_order:
                return
            while in_order[0] not in self._answers:
                self._receive_answers()
            yield self._take_span(self._answers.pop(in_order.popleft()))

    def dismiss(self) -> None:
        """Let the workers end by themselves, so that their own clean-up runs."""
        for worker in self._workers:
            try:
                worker.tasks.send(None)
            except OSError:
                continue  # it has ended already
        for worker in self._workers:
            worker.process.join(_GRACE_S)

    def stop(self) -> None:
        """End the workers, whatever they are doing."""
        for worker in self._workers:
            if worker.process.is_alive():
                worker.process.terminate()
        for worker in self._workers:
            worker.process.join(_GRACE_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.tasks.close()
            worker.answers.close()

    def _send_task(self, task: Task) -> None:
        """Ask the worker that has the fewest spans before it."""
        worker = min(self._workers, key=lambda worker: len(worker.asked))
        worker.asked.append(task)
        try:
            worker.tasks.send(task)
        except OSError:
            raise self._death_of(worker) from None

    def _receive_answers(self) -> None:
        """Wait until a worker answers or ends."""
        sentinels = [worker.process.sentinel for worker in self._workers]
        answers = [worker.answers for worker in self._workers]
        wait([*answers, *sentinels], timeout=_LOOK_S)
        for worker in self._workers:
            dead = not worker.process.is_alive()
            # A dead worker's last answers are read before its death is told of.
            while worker.answers.poll():
                try:
                    answer: _Answer = worker.answers.recv()
                except (EOFError, OSError):
                    break
                worker.asked.popleft()
                self._answers[answer.start] = answer
            if dead and worker.asked:
                raise self._death_of(worker)

    def _take_span(self, answer: _Answer) -> Span:
        """Read the span that a worker has set aside, or raise what it raised."""
        if answer.error is None:
            return take_up(Path(answer.file))
        failure: Failure = pickle.loads(answer.error or Path(answer.file).read_bytes())
        raise failure.rebuild()

    def _death_of(self, worker: _Worker) -> DatasetError:
        """Say at which samples a worker ended, and what its exit status suggests."""
        start, stop = worker.asked[0][:2]
        key = self._job.source.key(start)
        worker.process.join(_GRACE_S)
        status = worker.process.exitcode
        ended = "ended" if status is not None and status >= 0 else "was killed"
        message = (
            f"A packing worker {ended} while it read samples {start:,} to "
            f"{stop - 1:,}, from {key!r} on (exit status {status})."
        )
        why = "probably out of memory, or a crash in native code that load() calls"
        if ended == "ended":
            why = "load(), or a library that it calls, ends the process (os._exit)"
        fix = "pack with workers=1 (or 0 to see the crash); finished shards are kept"
        return DatasetError(message, why=why, fix=fix)


def _start_failed(error: Exception, why: str) -> DatasetError:
    message = f"A packing worker could not be started: {type(error).__name__}: {error}"
    fix = "pack with workers=0; finished shards are kept"
    return DatasetError(message, why=why, fix=fix)


def _start_worker(job: PackJob, context: BaseContext) -> _Worker:
    task_reader, task_writer = context.Pipe(duplex=False)
    answer_reader, answer_writer = context.Pipe(duplex=False)
    arguments = (job, task_reader, answer_writer)
    process: Any = context.Process(target=_run_worker, args=arguments)  # type: ignore[attr-defined]
    try:
        process.start()
    except BaseException:
        task_writer.close()
        answer_reader.close()
        raise
    finally:
        task_reader.close()
        answer_writer.close()
    return _Worker(process, task_writer, answer_reader)


def _run_worker(
    job: PackJob, tasks: Connection[Any, Any], answers: Connection[Any, Any]
) -> None:
    """Read spans until there are no more; runs in a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with job.tracker(all_threads=True) as tracker:
        while (task := _next_task(tasks)) is not None:
            try:
                file = set_aside(job, read_span(job, task, tracker))
                answer = _Answer(task.start, str(file))
            except BaseException as error:  # noqa: BLE001 -- the parent raises it
                answer = _answer_with(error, task.start, job)
            answers.send(answer)


def _next_task(tasks: Connection[Any, Any]) -> Task | None:
    try:
        task: Task | None = tasks.recv()
    except EOFError:  # the packing process is gone
        return None
    return task


def _answer_with(error: BaseException, start: int, job: PackJob) -> _Answer:
    """Send an error on, with the traceback that pickling would lose."""
    text = traceback.format_exc()
    without_traceback = _pickle_or_nothing(error)
    failure = pickle.dumps(Failure.of(error, "In a packing worker"))
    if len(failure) <= _MOST_MESSAGE_BYTES:
        return _Answer(start, error=failure)
    file = job.block(f"{start}-error")
    try:
        file.write_bytes(failure)
    except OSError:
        # No room for a long error: without its traceback, or else the end of that,
        # where the cause stands.
        short = pickle.dumps(Failure("", without_traceback))
        if not without_traceback or len(short) > _MOST_MESSAGE_BYTES:
            end = "... " + text[-_MOST_MESSAGE_BYTES // 8 :]
            short = pickle.dumps(Failure(end))
        return _Answer(start, error=short)
    return _Answer(start, str(file), error=b"")


def _pickle_or_nothing(error: BaseException) -> bytes:
    """Pickle an error; b"" where that cannot be done, or not be undone."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 -- pickling runs code of the user's error
        return b""
    return pickled


def _end_with_parent() -> None:
    """Stop this worker when the packing process is killed, which tells nobody."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    starter = os.getppid()
    # The packing process, or the server that forks for it and ends with it: who is
    # orphaned gets another parent.
    while os.getppid() == starter:
        parent.join(_LOOK_S)
        if not parent.is_alive():
            break
    os._exit(1)


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
