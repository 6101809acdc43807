"""Hand the tasks of a packing run to an executor.

An executor is whatever has the methods of ``concurrent.futures.Executor``: pools of
threads or processes, loky, dask, MPI, and others behind an adapter.
"""

from __future__ import annotations

import contextlib
import queue
from concurrent.futures import BrokenExecutor
from typing import TYPE_CHECKING, Any

from loaderkit.cache.durable import remove, writing
from loaderkit.datasets.packing_failures import TaskFailure
from loaderkit.datasets.packing_tasks import started_file
from loaderkit.datasets.packing_team import MOST_TRIES
from loaderkit.datasets.sources import describe_rows
from loaderkit.error_texts import error_in_words
from loaderkit.errors import DatasetError, OptionError
from loaderkit.spawning import GUARD_MAIN, why_no_new_process
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

    from loaderkit.datasets.packing_tasks import PackTask
    from loaderkit.datasets.sources import Source
    from loaderkit.datasets.streams import StreamSource
    from loaderkit.interrupts import Interrupts

_QUIET_S = 60.0
"""So long nothing was answered when an executor is asked whether it is still there.
Chosen: longer than most tasks take, and short beside a run."""
_MOST_OUTSTANDING = 1024
"""Tasks that the executor knows of at a time.  Chosen: more than the slots of the
clusters we know, and a future with its task takes some kilobytes."""


def run_for_executor(task: PackTask) -> Any:
    """Do a task; runs in a worker of an executor.

    Returns:
        What the task gives, or a ``TaskFailure``.
    """
    started = started_file(task)
    try:
        with writing(started):
            # Where a worker dies, this tells whose samples it was reading.
            started.touch()
        result = task.run()
        remove(started)
    # SystemExit ends no worker of an executor: the packing process is to end by it.
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- the packing process raises it
        remove(started)
        return TaskFailure.of(error, "In a task of the executor")
    return result


class ExecutorEngine:
    """An executor that does the tasks of one packing run.

    Args:
        executor: The executor, or what makes one: then one that broke is replaced.
        source: Where samples come from, for messages.
        interrupts: A Ctrl-C waits while a task is given out: pools fork there, and a
            hook of fork that is cut short leaves a lock that others wait for.
        quiet_s: After so many seconds without an answer the executor is asked whether
            it is still there.
    """

    is_local = False

    def __init__(
        self,
        executor: Executor | Callable[[], Executor],
        source: Source | StreamSource,
        interrupts: Interrupts,
        quiet_s: float = _QUIET_S,
    ) -> None:
        # A class, such as ProcessPoolExecutor itself, has the method and makes one.
        is_one = hasattr(executor, "submit") and not isinstance(executor, type)
        self._make: Any = None if is_one else executor
        self._executor: Any = None if self._make else executor
        self._source, self._interrupts, self._quiet_s = source, interrupts, quiet_s
        self._done: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._refusal: Exception | None = None

    @property
    def most_outstanding(self) -> int:
        """How many tasks it may be given before one is done."""
        return _MOST_OUTSTANDING

    @property
    def identity(self) -> object:
        """The executor that is used now."""
        return self._executor

    def stop(self) -> None:
        """End an executor that was made here; the user's own goes on."""
        if self._make is not None and self._executor is not None:
            self._executor.shutdown(wait=True)

    def submit(self, task: PackTask) -> Future[Any] | None:
        """Give a task to the executor; to another one where that broke meanwhile.

        Returns:
            What will hold the result; None where tasks are refused.
        """
        for _ in range(MOST_TRIES):
            if self._executor is None and self._make is not None:
                executor = self._make()
                _refuse_no_executor(executor)
                self._executor = executor
            try:
                # A worker of Python's pools that is interrupted while it takes a task
                # may keep the lock of the queue, and the pool waits for ever (2 of 60
                # interrupts).  The workers of the user's own pool are the user's.
                is_ours = self._make is not None
                with self._interrupts.held(ignored_by_forked=is_ours):
                    future: Future[Any] = self._executor.submit(run_for_executor, task)
            # A pool that broke or was closed raises a RuntimeError; dask, whose client
            # was closed, an error of its own; and some pickle here.
            except Exception as error:  # noqa: BLE001 -- told, see ``refused``
                self._refusal = error
                if self._make is None:
                    return None
                # Its workers may have died between two tasks: nobody's samples are
                # to blame, and what it was given before comes back by its futures.
                self.drop_broken(self._executor)
            else:
                future.add_done_callback(self._done.put)
                return future
        return None

    def wait(self) -> Future[Any]:
        """Wait until one of the tasks is done.

        Raises:
            DatasetError: None will be: the executor has lost what it was given.
        """
        while True:
            with contextlib.suppress(queue.Empty):
                return self._done.get(timeout=self._quiet_s)
            self._ask_whether_it_is_there()

    def _ask_whether_it_is_there(self) -> None:
        """Give the executor a task that is nothing, and take it back.

        Where dask's client was closed, what it was given is never done nor cancelled.

        Raises:
            DatasetError: It cannot be reached any more.
        """
        if self._executor is None:
            return
        try:
            with self._interrupts.held(ignored_by_forked=self._make is not None):
                self._executor.submit(abs, 0).cancel()
        except RuntimeError:
            return  # a pool that was shut down, or broke, ends what it has
        except Exception as error:
            self._refusal = error
            raise self.refused() from error

    def drop_broken(self, broken: Any) -> None:
        """Have another executor made in place of a broken one, where that can be."""
        if self._make is not None and broken is self._executor:
            self._executor.shutdown(wait=False)
            self._executor = None

    def refused(
        self, error: BaseException | None = None, *, blamed_rows: range | None = None
    ) -> DatasetError:
        """Say that the executor takes no tasks, or that its workers end at once."""
        if error is not None:
            return self._workers_end_at_once(error)
        refusal = self._refusal
        if blamed_rows is not None and refusal is not None:
            # The engine's own words: loky tells the exit status of the lost worker.
            return self.lost(blamed_rows, refusal)
        message = f"The executor takes no tasks: {error_in_words(refusal)}"
        why = "it was shut down, or a worker of it died before it had a task of ours"
        if not isinstance(refusal, RuntimeError):
            why = "its submit() raised that; probably what it hands tasks to was closed"
        fix = "executor=lambda: ... makes a new one where one broke"
        if self._make is not None:
            why = f"{MOST_TRIES} executors in a row were made that take none"
            fix = "see that what makes the executor gives one that is open"
        elif isinstance(refusal, BrokenExecutor):
            why = "a worker of it died before it had a task of ours"
        if isinstance(refusal, BrokenExecutor):
            why, fix = _why_none_begins(why, fix)
        return DatasetError(message, why=why, fix=fix)

    def _workers_end_at_once(self, error: BaseException) -> DatasetError:
        """Say that executors broke one after the other before a task was begun."""
        message = "The executor's workers end before they begin a task: "
        message += error_in_words(error)
        why = f"so it was with {MOST_TRIES} executors in a row; probably their "
        why += "initializer fails, or their machine has no memory left"
        fix = "see that a task runs: executor.submit(abs, -1).result()"
        why, fix = _why_none_begins(why, fix)
        return DatasetError(message, why=why, fix=fix)

    def lost(self, rows: range, error: BaseException) -> DatasetError:
        """Say with which samples a worker was lost."""
        message = (
            f"The executor lost a worker while it packed "
            f"{describe_rows(self._source, rows)}: {error_in_words(error)}"
        )
        why = "probably out of memory, a crash in native code that load() calls, or a "
        why += "machine that was taken away"
        fix = "run the same again: finished shards are kept"
        if self._make is None:
            fix += "; executor=lambda: ... makes a new one where one broke"
        return DatasetError(message, why=why, fix=fix)


def _why_none_begins(why: str, fix: str) -> tuple[str, str]:
    """Say why workers end before a task, where the main script may be why.

    Nobody outside an executor can tell how it starts its workers.

    Args:
        why: What is known.
        fix: What to do about anything else.

    Returns:
        Both, with what the main script lacks.
    """
    reason = why_no_new_process("spawn")
    if not reason:
        return why, fix
    return f"{why}; where workers start anew, {reason}", f"{GUARD_MAIN}; or {fix}"


def _refuse_no_executor(executor: object) -> None:
    """Refuse what a user's function made in place of an executor.

    Raises:
        OptionError: It takes no tasks.
    """
    if not hasattr(executor, "submit"):
        message = f"executor=... made {show_value(executor)}, which is no executor."
        why = "it has no submit(), which gives a task to a worker"
        fix = "executor=lambda: ProcessPoolExecutor(8)"
        raise OptionError(message, why=why, fix=fix)
