"""Have the tasks of a packing run done, and bear the loss of who does them.

Whoever that is: this process, worker processes of this machine, or an executor.  What a
sample raises comes back as a task's result, so an error of a future tells that a worker
was lost.  Its task is given out again.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
from concurrent.futures import BrokenExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from loaderkit.cache.durable import remove
from loaderkit.datasets.packing_failures import TaskFailure
from loaderkit.datasets.packing_tasks import (
    DigestTask,
    Look,
    LookTask,
    ReadSpan,
    ShardTask,
    SpanTask,
    WrittenShard,
    started_file,
    values_file_of,
)
from loaderkit.datasets.shard_filling import learn_trees, take_over
from loaderkit.datasets.structure import Structure
from loaderkit.errors import DatasetError, LoaderkitError
from loaderkit.units import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from loaderkit.datasets.packing_tasks import Digests, PackTask
    from loaderkit.datasets.shard_plan import ShardPlan
    from loaderkit.datasets.source_files import FileVersion
    from loaderkit.interrupts import Interrupts

MOST_TRIES = 3
"""How often a task whose worker is lost is given out.  Chosen: a node that is taken
away costs one try; three in a row are probably the samples' fault."""
_WORKERS_ERRORS = (Exception, asyncio.CancelledError)
"""What a future raises.  dask's are cancelled with asyncio's error, which is no
``Exception``."""
_ROWS_OF_LOOK = 8
"""Samples are looked at so many in a task: up to 4 tasks, one for each worker that is
started by default."""
_MANY_SHARDS = 64
"""An executor whose workers may be on many machines is given whole shards where there
are so many: nothing goes from one machine to another then.  Chosen: of fewer, some of
its workers would have none."""


class Engine(Protocol):
    """Who does tasks."""

    is_local: bool
    """It is on this machine alone."""

    @property
    def most_outstanding(self) -> int:
        """How many tasks it may be given before one is done."""

    def submit(self, task: PackTask) -> Future[Any] | None:
        """Give it a task; None where it takes none any more."""

    def wait(self) -> Future[Any]:
        """Wait until one of the tasks is done.

        Raises:
            DatasetError: None will be.
        """

    @property
    def identity(self) -> object:
        """What has the tasks that are given to it now: another one, once it broke."""

    def drop_broken(self, broken: object) -> None:
        """Have a broken one replaced, where that can be."""

    def lost(self, rows: range, error: BaseException) -> DatasetError:
        """Say with which samples a worker was lost."""

    def refused(
        self, error: BaseException | None = None, *, blamed_rows: range | None = None
    ) -> DatasetError:
        """Say that it takes no tasks, or that its workers end before they do one.

        Args:
            error: How its workers end.
            blamed_rows: Samples that have probably cost it a worker before.
        """


class _Outstanding(NamedTuple):
    """A task that was given out."""

    task: PackTask
    identity: object


class _Outcome(NamedTuple):
    """What became of a task."""

    task: PackTask
    result: Any
    error: BaseException | None = None


class PackingTeam:
    """Has the tasks of one packing run done.

    Args:
        engine: Who does them.
        common: The file with what they have in common.
        interrupts: A Ctrl-C that a task, or who does it, has dropped.
    """

    def __init__(self, engine: Engine, common: Path, interrupts: Interrupts) -> None:
        self._engine, self._common = engine, common
        self.interrupts = interrupts

    def look(self, rows: list[int]) -> Look:
        """Read some samples for their sizes and how they are built."""
        starts = range(0, len(rows), _ROWS_OF_LOOK)
        tasks = [
            LookTask(self._common, rows[start : start + _ROWS_OF_LOOK])
            for start in starts
        ]
        sizes: list[int] = []
        structure = Structure()
        files: dict[int, Mapping[str, FileVersion]] = {}
        looks: list[Look] = self._results_in_order(tasks)
        for look in looks:
            sizes += look.sizes
            files.update(look.files)
            take_over(structure, look.structure, "that was looked at")
        return Look(sizes, structure, files)

    def digests(self, spans: Iterable[range]) -> list[Digests]:
        """Read samples for their hashes."""
        tasks = [DigestTask(self._common, rows.start, rows.stop) for rows in spans]
        return self._results_in_order(tasks)

    def do(self, tasks: Iterable[PackTask]) -> Iterator[Any]:
        """Have tasks done.

        Yields:
            What each gives, in whatever order they are done.

        Raises:
            BaseException: What a task raised: the first of them, by their rows.  On
                this machine none is begun behind it; elsewhere all others are done.
            DatasetError: A worker was lost with a task each time that it was given out,
                or nobody takes tasks any more.
        """
        errors: dict[int, BaseException] = {}
        is_local = self._engine.is_local
        fresh = itertools.takewhile(lambda _: not (errors and is_local), tasks)
        for outcome in self._outcomes_of_tasks(fresh, collections.deque()):
            if outcome.error is None:
                yield outcome.result
            else:
                errors[outcome.task.rows.start] = outcome.error
        if errors:
            first = errors[min(errors)]
            if len(errors) > 1 and hasattr(first, "add_note"):  # Python 3.11
                first.add_note(f"{len(errors) - 1:,} more could not be packed.")
            raise first

    def write(
        self,
        plan: ShardPlan,
        numbers: list[int],
        structure: Structure,
        files: Mapping[int, Mapping[str, FileVersion]],
        finished: Callable[[int], Mapping[str, Any]],
    ) -> Iterator[WrittenShard | ReadSpan]:
        """Have shards written.

        Args:
            plan: What goes into which shard.
            numbers: Which ones to write, in order.
            structure: What is known of how samples are built; it learns, where shards
                are made of spans.
            files: Files that are known to be opened for the samples of a shard.
            finished: Gives what was learned with each of the other shards.

        Yields:
            What became of each, in whatever order they are finished; and of spans, as
            they are read.

        Raises:
            BaseException: What a sample raised: the first such.  On this machine no
                shard is begun behind it; elsewhere all others are written.
            DatasetError: A worker was lost with a task each time that it was given out,
                or nobody takes tasks any more.
        """
        shards = _Shards(self._common, plan, numbers, structure, files, finished)
        if not self._engine.is_local and plan.shard_count >= _MANY_SHARDS:
            fresh: Iterator[PackTask] = shards.whole()
        else:
            fresh = shards.spans()
        errors: dict[int, BaseException] = {}
        for outcome in self._outcomes_of_tasks(fresh, shards.ready):
            if outcome.error is not None:
                errors[outcome.task.rows.start] = outcome.error
                shards.give_up(outcome.task, others_too=self._engine.is_local)
            else:
                shards.take(outcome.task, outcome.result)
                yield outcome.result
        if errors:
            first = errors[min(errors)]
            more_shards = len({plan.shard_of(row) for row in errors}) - 1
            if more_shards and hasattr(first, "add_note"):  # Python 3.11
                first.add_note(
                    f"{count_of(more_shards, 'more shards')} could not be packed."
                )
            raise first

    def _results_in_order(self, tasks: Iterable[PackTask]) -> list[Any]:
        """Have tasks done; give what came of each, in the order of the tasks."""
        results: dict[str, Any] = {}
        errors: dict[int, BaseException] = {}
        in_order = list(tasks)
        for outcome in self._outcomes_of_tasks(iter(in_order), collections.deque()):
            if outcome.error is not None:
                errors[outcome.task.rows.start] = outcome.error
            results[outcome.task.name] = outcome.result
        if errors:
            raise errors[min(errors)]
        return [results[task.name] for task in in_order]

    def _outcomes_of_tasks(
        self, fresh: Iterator[PackTask], ready: collections.deque[PackTask]
    ) -> Iterator[_Outcome]:
        """Have tasks done.

        Args:
            fresh: Which ones.
            ready: More of them, which go first; they come while the others are done.

        Yields:
            What became of each, in whatever order they are done.

        Raises:
            DatasetError: Nobody takes tasks any more.
        """
        engine = self._engine
        queues = _Queues(fresh, ready, engine)
        outstanding: dict[Future[Any], _Outstanding] = {}
        try:
            while True:
                for task in queues.next_tasks(outstanding):
                    future = engine.submit(task)
                    if future is None:
                        if not outstanding:
                            raise self._refusal_of_engine(queues.blamed_rows(task))
                        # What it had before comes back first: that says whose samples
                        # have cost the worker.
                        queues.put_back(task)
                        break
                    outstanding[future] = _Outstanding(task, engine.identity)
                if not outstanding:
                    return

                # Before it waits, as long as a task may take; and what was done here,
                # as it was submitted, ran code of the user's, which may drop all.
                self.interrupts.check()
                future = engine.wait()
                task, identity = outstanding.pop(future)
                try:
                    result: Any = future.result()
                except _WORKERS_ERRORS as error:
                    if isinstance(error, LoaderkitError):
                        # No worker was lost: this process could not go on.
                        raise
                    is_broken = isinstance(error, BrokenExecutor)
                    if is_broken:
                        engine.drop_broken(identity)
                    if not queues.give_out_again(task, identity, is_broken=is_broken):
                        yield _Outcome(task, None, engine.lost(task.rows, error))
                    # Workers that cannot even start, as with an initializer that fails,
                    # would be made anew for ever.
                    if queues.breaks_without_work >= MOST_TRIES:
                        raise engine.refused(error) from error
                    continue
                queues.note_answer()
                if isinstance(result, TaskFailure):
                    yield _Outcome(task, None, result.rebuild())
                else:
                    yield _Outcome(task, result)
        finally:
            for future in outstanding:
                future.cancel()

    def _refusal_of_engine(self, blamed_rows: range | None) -> DatasetError:
        return self._engine.refused(blamed_rows=blamed_rows)


class _Shards:
    """Which tasks make shards: whole ones, or spans that are put together.

    Shards that are made of spans are put together when all in front of them are known:
    what they add to the structure has its number then.

    Args: as ``PackingTeam.write`` has them.
    """

    def __init__(
        self,
        common: Path,
        plan: ShardPlan,
        numbers: list[int],
        structure: Structure,
        files: Mapping[int, Mapping[str, FileVersion]],
        finished: Callable[[int], Mapping[str, Any]],
    ) -> None:
        self._common, self._plan, self._numbers = common, plan, numbers
        self._structure, self._files, self._finished = structure, files, finished
        self.ready: collections.deque[PackTask] = collections.deque()
        """Tasks that others have made possible."""
        self._wanted = set(numbers)
        self._given_up: set[int] = set()
        self._gives_up_others = False
        self._spans_read: dict[int, list[ReadSpan]] = {}
        """Of each shard of which some span is being read, or was."""
        self._span_counts: dict[int, int] = {}
        self._next = 0
        """The first shard that is not being put together yet."""

    def whole(self) -> Iterator[PackTask]:
        """List the tasks that each read and write a shard."""
        content = self._structure.to_json()
        for number in self._numbers:
            yield self._shard_task(number, content, None)

    def spans(self) -> Iterator[PackTask]:
        """List the tasks that each read a part of a shard."""
        for number in self._numbers:
            if self._gives_up_others:
                return
            spans = list(self._plan.spans_of(number))
            self._spans_read[number] = []
            self._span_counts[number] = len(spans)
            for rows in spans:
                if number in self._given_up:
                    break
                yield SpanTask(self._common, number, self._plan, rows.start, rows.stop)

    def give_up(self, task: PackTask, *, others_too: bool) -> None:
        """Note that a shard cannot be written, since one of its tasks failed.

        Args:
            task: The task.
            others_too: Begin no other shard behind it.
        """
        self._gives_up_others = others_too
        if isinstance(task, ShardTask):
            self._remove_spans(task)
            self._given_up.add(task.number)
        elif isinstance(task, SpanTask):
            self._given_up.add(task.shard)
        self._put_together()

    def take(self, task: PackTask, result: object) -> None:
        """Take in what a task has given."""
        if isinstance(task, SpanTask) and isinstance(result, ReadSpan):
            if task.shard in self._given_up:
                _remove_span(result.file)
                return
            self._spans_read[task.shard].append(result)
            self._put_together()
        elif isinstance(task, ShardTask):
            self._remove_spans(task)

    def _put_together(self) -> None:
        """Make tasks of the shards whose turn has come."""
        while self._next < self._plan.shard_count:
            number = self._next
            if number in self._given_up:
                for span in self._spans_read.pop(number, []):
                    _remove_span(span.file)
            elif number not in self._wanted:
                # It is numbered behind what the shards in front of it add.
                learned = Structure.from_json(self._finished(number))
                take_over(self._structure, learned, f"of shard {number}")
            else:
                spans = self._spans_read.get(number)
                if spans is None or len(spans) < self._span_counts[number]:
                    return
                del self._spans_read[number]
                spans.sort(key=lambda span: span.start)
                content = self._structure.to_json()
                files = [span.file for span in spans]
                self.ready.append(self._shard_task(number, content, files))
                for span in spans:
                    learn_trees(self._structure, span.trees, span.first_keys)
            self._next += 1

    def _shard_task(
        self, number: int, structure: Mapping[str, Any], spans: list[Path] | None
    ) -> ShardTask:
        files = self._files.get(number, {})
        return ShardTask(self._common, number, self._plan, structure, spans, files)

    def _remove_spans(self, task: ShardTask) -> None:
        for file in task.spans or ():
            _remove_span(file)


def _remove_span(file: Path) -> None:
    # What cannot be removed now is removed with all that the run leaves.
    with contextlib.suppress(OSError):
        remove(file)
        remove(values_file_of(file))


class _Queues:
    """Which task is given out next.

    When one process of Python's pool dies, the pool ends all others, and nobody says
    which task it was.  Those that had been begun are suspects: they go alone, one at a
    time, and only what is lost there counts against one.

    Args:
        fresh: Tasks that were not given out yet.
        ready: More of them, which go first.
        engine: Who does them.
    """

    def __init__(
        self,
        fresh: Iterator[PackTask],
        ready: collections.deque[PackTask],
        engine: Engine,
    ) -> None:
        self._fresh, self._ready, self._engine = fresh, ready, engine
        self._again: collections.deque[PackTask] = collections.deque()
        self._suspects: collections.deque[PackTask] = collections.deque()
        self._is_alone = False
        """What is being done is one suspect, and nothing beside it."""
        self._lost: set[str] = set()
        """Names of the tasks that were begun when a worker was lost."""
        self._own_losses: collections.Counter[str] = collections.Counter()
        """How often the worker of a task was lost, and not that of another one."""
        self.breaks_without_work = 0
        """Executors in a row that broke before a worker of theirs began a task."""
        self._last_broken: Any = None

    def next_tasks(self, outstanding: Collection[object]) -> Iterator[PackTask]:
        """Take the tasks that may be given out now."""
        if self._is_alone:
            return
        if self._suspects:
            if not outstanding:
                self._is_alone = True
                yield self._suspects.popleft()
            return
        while len(outstanding) < self._engine.most_outstanding:
            waiting = self._ready or self._again
            task = waiting.popleft() if waiting else next(self._fresh, None)
            if task is None:
                return
            yield task

    def blamed_rows(self, task: PackTask) -> range | None:
        """Say which samples have probably cost a worker; None where none was lost.

        Args:
            task: What is to be given out now.
        """
        lost_tasks = [
            suspect for suspect in (task, *self._suspects) if suspect.name in self._lost
        ]
        if not lost_tasks:
            return None
        return min(lost_tasks, key=lambda suspect: suspect.rows.start).rows

    def put_back(self, task: PackTask) -> None:
        """Take back a task that no executor was given."""
        self._is_alone = False
        self._again.appendleft(task)

    def note_answer(self) -> None:
        """Note that a worker has answered: its executor can do work."""
        self._is_alone = False
        self.breaks_without_work = 0

    def give_out_again(
        self, task: PackTask, identity: object, *, is_broken: bool
    ) -> bool:
        """Take back a task whose worker was lost.

        Args:
            task: The task.
            identity: Who had it.
            is_broken: All workers are lost, and not that of this task alone.

        Returns:
            False where it was given out often enough.
        """
        is_own_loss = self._is_alone or not is_broken
        self._is_alone = False
        started = started_file(task)
        was_started = started.exists()
        with contextlib.suppress(OSError):
            started.unlink()
        if is_broken and not was_started:
            if identity is not self._last_broken:
                self.breaks_without_work += 1
                self._last_broken = identity
            self._again.append(task)
            return True
        self.breaks_without_work = 0
        self._lost.add(task.name)
        self._own_losses[task.name] += is_own_loss
        if self._own_losses[task.name] == MOST_TRIES:
            return False
        (self._suspects if is_broken else self._again).append(task)
        return True
