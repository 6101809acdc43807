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
                    future = self._submit(write_shard_of, task, queues.blamed(task))
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
                        self._give_up(executor)
                    if not queues.give_out_again(task, is_broken=is_broken):
                        errors[task.number] = self._lost(_rows_of(task), error)
                    continue
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
        for _ in range(_MOST_TRIES):
            try:
                result = self._submit(work, task, rows).result()
            except _EXECUTORS_ERRORS as error:
                if isinstance(error, LoaderkitError):
                    raise
                lost = self._lost(rows, error)
                if isinstance(error, BrokenExecutor):
                    self._give_up(self._executor)
                continue
            if isinstance(result, Failure):
                raise result.rebuild()
            return result
        raise lost

    def _submit(
        self, work: Callable[..., Any], task: Any, blamed: range
    ) -> Future[Any]:
        """Give a task to the executor.

        Args:
            work: What is called.
            task: With what.
            blamed: Samples that have probably cost the last worker, if any has ended.

        Raises:
            DatasetError: The executor takes no tasks any more.
        """
        if self._executor is None and self._make is not None:
            self._executor = self._make()
        try:
            future: Future[Any] = self._executor.submit(work, task)
        except RuntimeError as error:  # BrokenExecutor is one, and so is a closed pool
            raise self._lost(blamed, error) from error
        return future

    def _give_up(self, broken: Any) -> None:
        """Have another executor made in place of a broken one, where that can be."""
        if self._make is not None and broken is self._executor:
            self._executor.shutdown(wait=False)
            self._executor = None

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

    def blamed(self, task: ShardTask) -> range:
        """Say which samples have probably cost a worker, if not those of this task."""
        suspects = [
            suspect for suspect in self._suspects if self._tries[suspect.number]
        ]
        return _rows_of(min(suspects, key=lambda each: each.number, default=task))

    def give_out_again(self, task: ShardTask, *, is_broken: bool) -> bool:
        """Take back a task whose worker was lost.

        Args:
            task: The task.
            is_broken: All workers are lost, and not that of this task alone.

        Returns:
            False where it was given out often enough.
        """
        started = started_file(task.common, task.number)
        was_started = started.exists()
        with contextlib.suppress(OSError):
            started.unlink()
        if is_broken and not was_started:
            self._again.append(task)
            return True
        self._tries[task.number] += 1
        if self._tries[task.number] == _MOST_TRIES:
            return False
        (self._suspects if is_broken else self._again).append(task)
        return True


def _rows_of(task: ShardTask) -> range:
    return task.plan.rows_of(task.number)
