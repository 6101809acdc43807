"""Hand the tasks of a packing run to an executor, and bear the loss of its workers.

An executor is whatever has the methods of ``concurrent.futures.Executor``: pools of
threads or processes, loky, dask, MPI, and others behind an adapter.  What a sample
raises comes back as a task's result, so an error of a future is the executor's own: a
worker was lost.  Its span is given out again.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import queue
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.datasets.packing_tasks import (
    RowDigests,
    RowsToLookAt,
    digests_of,
    look_at,
    started_file,
    write_shard_of,
)
from loaderkit.datasets.packing_workers import Failure
from loaderkit.errors import DatasetError, LoaderkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

    from loaderkit.datasets.packing_tasks import Look, ShardTask, WrittenShard
    from loaderkit.datasets.sources import Source

_MOST_OUTSTANDING = 1024
"""Tasks that the executor knows of at a time.  Chosen: more than the slots of the
clusters we know, and a future with its task takes some kilobytes."""
_MOST_TRIES = 3
"""How often a span whose worker is lost is given out.  Chosen: a node that is taken
away costs one try; three in a row are probably the samples' fault."""
_EXECUTORS_ERRORS = (Exception, asyncio.CancelledError)
"""What a future raises.  dask's are cancelled with asyncio's error, which is no
``Exception``."""


class ExecutorTeam:
    """The workers of an executor, for one packing run.

    Args:
        executor: The executor, or what makes one: then one that broke is replaced.
        common: The file with what all tasks have in common.
        source: Where samples come from, for messages.
    """

    def __init__(
        self,
        executor: Executor | Callable[[], Executor],
        common: Path,
        source: Source,
    ) -> None:
        self._make = None if hasattr(executor, "submit") else executor
        self._executor: Any = None if self._make else executor
        self.common, self._source = common, source

    def stop(self) -> None:
        """End an executor that was made here; the user's own goes on."""
        if self._make is not None and self._executor is not None:
            self._executor.shutdown(wait=True)

    def look(self, rows: list[int]) -> Look:
        """Read some samples for their sizes and how they are built."""
        task = RowsToLookAt(self.common, rows)
        look: Look = self._run_one(look_at, task, range(rows[0], rows[-1] + 1))
        return look

    def digests(self, rows: range) -> list[bytes]:
        """Read samples for their hashes."""
        task = RowDigests(self.common, rows.start, rows.stop)
        digests: list[bytes] = self._run_one(digests_of, task, rows)
        return digests

    def write(self, tasks: Iterable[ShardTask]) -> Iterator[WrittenShard]:
        """Have shards written.

        Args:
            tasks: Which ones.

        Yields:
            What became of each, in whatever order they are finished.

        Raises:
            BaseException: What a sample raised: that of the first such shard, when all
                others are written.
            DatasetError: A worker was lost with a span each time that it was given out,
                or the executor broke.
        """
        queues = _Queues(iter(tasks))
        errors: dict[int, BaseException] = {}
        outstanding: dict[Future[Any], _Outstanding] = {}
        done: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        try:
            while True:
                for task in queues.next_tasks(outstanding):
                    try:
                        blamed_rows = queues.blamed_rows(task)
                        future = self._submit(write_shard_of, task, blamed_rows)
                    except DatasetError:
                        if not outstanding:
                            raise
                        # What it had before comes back first: that says whose samples
                        # have cost the worker.
                        queues.put_back(task)
                        break
                    outstanding[future] = _Outstanding(task, self._executor)
                    future.add_done_callback(done.put)
                if not outstanding:
                    break

                future = done.get()
                task, executor = outstanding.pop(future)
                try:
                    result: WrittenShard | Failure = future.result()
                except _EXECUTORS_ERRORS as error:
                    is_broken = isinstance(error, BrokenExecutor)
                    if is_broken:
                        self._drop_broken(executor)
                    if not queues.give_out_again(task, executor, is_broken=is_broken):
                        errors[task.number] = self._lost(_rows_of(task), error)
                    # Workers that cannot even start, as with an initializer that fails,
                    # would be made anew for ever.
                    if queues.breaks_without_work >= _MOST_TRIES:
                        raise self._workers_end_at_once(error) from error
                    continue
                queues.note_answer()
                if isinstance(result, Failure):
                    errors[task.number] = result.rebuild()
                else:
                    yield result
        finally:
            for future in outstanding:
                future.cancel()

        if errors:
            first = errors[min(errors)]
            if len(errors) > 1 and hasattr(first, "add_note"):  # Python 3.11
                first.add_note(f"{len(errors) - 1:,} more shards could not be packed.")
            raise first

    def _run_one(self, work: Callable[..., Any], task: Any, rows: range) -> Any:
        """Have one task done, again if its worker is lost."""
        lost: DatasetError | None = None
        for _ in range(_MOST_TRIES):
            future = self._submit(work, task, None if lost is None else rows)
            try:
                result = future.result()
            except _EXECUTORS_ERRORS as error:
                if isinstance(error, LoaderkitError):
                    raise
                lost = self._lost(rows, error)
                if isinstance(error, BrokenExecutor):
                    self._drop_broken(self._executor)
                continue
            if isinstance(result, Failure):
                raise result.rebuild()
            return result
        assert lost is not None
        raise lost

    def _submit(
        self, work: Callable[..., Any], task: Any, blamed_rows: range | None
    ) -> Future[Any]:
        """Give a task to the executor; to another one where that broke meanwhile.

        Args:
            work: What is called.
            task: With what.
            blamed_rows: Samples that have probably cost the last worker; None where
                none was lost.

        Raises:
            DatasetError: The executor takes no tasks any more.
        """
        for _ in range(_MOST_TRIES):
            if self._executor is None and self._make is not None:
                self._executor = self._make()
            try:
                future: Future[Any] = self._executor.submit(work, task)
            except RuntimeError as error:  # BrokenExecutor is one, as of a closed pool
                refusal = error
                if self._make is None:
                    break
                # Its workers may have died between two tasks: nobody's samples are
                # to blame, and what it was given before comes back by its futures.
                self._drop_broken(self._executor)
            else:
                return future
        if blamed_rows is not None:
            raise self._lost(blamed_rows, refusal) from refusal
        raise self._takes_no_tasks(refusal) from refusal

    def _drop_broken(self, broken: Any) -> None:
        """Have another executor made in place of a broken one, where that can be."""
        if self._make is not None and broken is self._executor:
            self._executor.shutdown(wait=False)
            self._executor = None

    def _takes_no_tasks(self, error: RuntimeError) -> DatasetError:
        """Say that an executor refuses tasks, though it has lost none of ours."""
        message = f"The executor takes no tasks: {type(error).__name__}: {error}"
        why = "it was shut down, or a worker of it died before it had a task of ours"
        fix = "executor=lambda: ... makes a new one where one broke"
        if self._make is not None:
            why = f"{_MOST_TRIES} executors in a row were made that take none"
            fix = "see that what makes the executor gives one that is open"
        return DatasetError(message, why=why, fix=fix)

    def _workers_end_at_once(self, error: BaseException) -> DatasetError:
        """Say that executors broke one after the other before a task was begun."""
        message = "The executor's workers end before they begin a task: "
        message += f"{type(error).__name__}: {error}"
        why = f"so it was with {_MOST_TRIES} executors in a row; probably their "
        why += "initializer fails, or their machine has no memory left"
        fix = "see that a task runs: executor.submit(abs, -1).result()"
        return DatasetError(message, why=why, fix=fix)

    def _lost(self, rows: range, error: BaseException) -> DatasetError:
        """Say with which samples a worker was lost."""
        key = self._source.key(rows.start)
        message = (
            f"The executor lost a worker while it packed samples {rows.start:,} to "
            f"{rows.stop - 1:,}, from {key!r} on: {type(error).__name__}: {error}"
        )
        why = "probably out of memory, a crash in native code that load() calls, or a "
        why += "machine that was taken away"
        fix = "run the same again: finished shards are kept"
        if self._make is None:
            fix += "; executor=lambda: ... makes a new one where one broke"
        return DatasetError(message, why=why, fix=fix)


class _Outstanding(NamedTuple):
    """A task that an executor was given."""

    task: ShardTask
    executor: Any


class _Queues:
    """Which task is given out next.

    When one process of a pool dies, the pool ends all others, and nobody says which
    task it was.  Those that had been begun are suspects: they go alone, one at a time,
    until one of them is lost again and again.

    Args:
        fresh: Tasks that were not given out yet.
    """

    def __init__(self, fresh: Iterator[ShardTask]) -> None:
        self._fresh = fresh
        self._again: collections.deque[ShardTask] = collections.deque()
        self._suspects: collections.deque[ShardTask] = collections.deque()
        self._tries: collections.Counter[int] = collections.Counter()
        self.breaks_without_work = 0
        """Executors in a row that broke before a worker of theirs began a task."""
        self._last_broken: Any = None

    def next_tasks(self, outstanding: Collection[object]) -> Iterator[ShardTask]:
        """Take the tasks that may be given out now."""
        if self._suspects:
            if not outstanding:
                yield self._suspects.popleft()
            return
        while len(outstanding) < _MOST_OUTSTANDING:
            task = self._again.popleft() if self._again else next(self._fresh, None)
            if task is None:
                return
            yield task

    def blamed_rows(self, task: ShardTask) -> range | None:
        """Say which samples have probably cost a worker; None where none was lost.

        Args:
            task: What is to be given out now.
        """
        lost_tasks = [
            suspect
            for suspect in (task, *self._suspects)
            if self._tries[suspect.number]
        ]
        if not lost_tasks:
            return None
        return _rows_of(min(lost_tasks, key=lambda suspect: suspect.number))

    def put_back(self, task: ShardTask) -> None:
        """Take back a task that no executor was given."""
        self._again.appendleft(task)

    def note_answer(self) -> None:
        """Note that a worker has answered: its executor can do work."""
        self.breaks_without_work = 0

    def give_out_again(
        self, task: ShardTask, executor: object, *, is_broken: bool
    ) -> bool:
        """Take back a task whose worker was lost.

        Args:
            task: The task.
            executor: Who had it.
            is_broken: All workers are lost, and not that of this task alone.

        Returns:
            False where it was given out often enough.
        """
        started = started_file(task.common, task.number)
        was_started = started.exists()
        with contextlib.suppress(OSError):
            started.unlink()
        if is_broken and not was_started:
            if executor is not self._last_broken:
                self.breaks_without_work += 1
                self._last_broken = executor
            self._again.append(task)
            return True
        self.breaks_without_work = 0
        self._tries[task.number] += 1
        if self._tries[task.number] == _MOST_TRIES:
            return False
        (self._suspects if is_broken else self._again).append(task)
        return True


def _rows_of(task: ShardTask) -> range:
    return task.plan.rows_of(task.number)
