"""A thread that makes batches ahead of time, if the training step is long enough."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

TIMED_STEPS = 3
"""Steps that are timed before a thread is started.  Chosen: the smallest number whose
median does not follow a single slow step, such as the first one."""
_LEAST_STEP_SHARE = 0.5
"""A thread is started if a step takes at least this share of the time that making a
batch takes.  Chosen: the thread and the training share the interpreter lock, so beside
shorter steps the thread gets too little time to be worth its cost."""
_STOP_POLL_S = 0.05
"""How often a thread that waits for room in the queue checks whether it is to stop.
Chosen: short enough that ending an epoch does not feel slow."""
_JOIN_TIMEOUT_S = 10.0
"""How long ``close`` waits for the thread, which may be reading a slow sample.  Chosen:
after that the daemon thread is left to end by itself."""


class ReadAhead(Iterator[Any]):
    """Iterator that makes batches in a thread while the training computes.

    The thread is started only after the first steps were timed.  In a loop that does
    almost nothing with its batches, a thread would compete with the loop for the
    interpreter lock and make it slower, so such a loop gets none.

    Args:
        batches: Makes the batches; it is used by one thread at a time.
        depth: Maximum number of batches that wait in the queue.
    """

    def __init__(self, batches: Iterator[Any], depth: int) -> None:
        self._batches = batches
        self._depth = depth
        self._batch_times_s: deque[float] = deque(maxlen=TIMED_STEPS)
        self._step_times_s: deque[float] = deque(maxlen=TIMED_STEPS)
        self._returned_at: float | None = None
        self._queue: queue.Queue[_Item] | None = None
        self._stop_thread: Callable[[], Any] | None = None

    @property
    def threaded(self) -> bool:
        """Whether a thread makes the batches."""
        return self._queue is not None

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._queue is None:
            return self._make_batch_here()
        return self._take_from_queue(self._queue)

    def close(self) -> None:
        """Stop the thread, and drop the batches that wait in the queue."""
        if self._stop_thread is not None:
            self._stop_thread()

    def _make_batch_here(self) -> Any:
        """Make a batch in the calling thread, and time it and the step before it."""
        asked_at = time.perf_counter()
        if self._returned_at is not None:
            self._step_times_s.append(asked_at - self._returned_at)
        if self._thread_is_worthwhile():
            return self._take_from_queue(self._start_thread())

        batch = next(self._batches)
        self._returned_at = time.perf_counter()
        self._batch_times_s.append(self._returned_at - asked_at)
        return batch

    def _take_from_queue(self, batch_queue: queue.Queue[_Item]) -> Any:
        item = batch_queue.get()
        if isinstance(item, _Batch):
            return item.batch

        # The thread has ended.  Every later call must get the same answer, and would
        # wait for ever on an empty queue.
        batch_queue.put(item)
        if isinstance(item, _Failed):
            raise item.error
        raise StopIteration

    def _thread_is_worthwhile(self) -> bool:
        if len(self._step_times_s) < TIMED_STEPS:
            return False
        step_s = _median_of_odd(self._step_times_s)
        # Asked again once as many steps more were timed, and not for each batch: where
        # batches are large the processor's caches have lost by then what this needs.
        self._step_times_s.clear()
        return step_s > _LEAST_STEP_SHARE * _median_of_odd(self._batch_times_s)

    def _start_thread(self) -> queue.Queue[_Item]:
        batch_queue: queue.Queue[_Item] = queue.Queue(self._depth)
        stop = threading.Event()
        thread = threading.Thread(
            target=_fill_queue,
            args=(self._batches, batch_queue, stop),
            daemon=True,
            name="loaderkit-read-ahead",
        )
        thread.start()
        self._queue = batch_queue
        # Nobody calls close() when a loop is left by break: its iterator is collected.
        self._stop_thread = weakref.finalize(
            self, _stop_and_join, batch_queue, stop, thread
        )
        return batch_queue


def _median_of_odd(times_s: deque[float]) -> float:
    """Give the median of an odd number of times: ``statistics`` takes 5 us a batch."""
    return sorted(times_s)[len(times_s) // 2]


@dataclass(frozen=True)
class _Batch:
    """A batch in the queue."""

    batch: Any


@dataclass(frozen=True)
class _Failed:
    """The error that making a batch raised; it is raised again in the loop."""

    error: BaseException


class _Ended:
    """The mark in the queue after the last batch."""


_Item: TypeAlias = "_Batch | _Failed | _Ended"


def _fill_queue(
    batches: Iterator[Any], batch_queue: queue.Queue[_Item], stop: threading.Event
) -> None:
    """Make batches until there are no more, or ``stop`` is set.  Runs in the thread.

    This is no method of ``ReadAhead``: a running thread that referred to its owner
    would keep it alive, and the owner's finalizer, which stops the thread, would never
    run.
    """
    while not stop.is_set():
        item = _next_item(batches)
        _put_unless_stopped(item, batch_queue, stop)
        if not isinstance(item, _Batch):
            return
        # Without this the frame would hold the batch while the next one is made, so
        # that one batch more than ``depth`` is in memory.
        del item


def _next_item(batches: Iterator[Any]) -> _Item:
    try:
        return _Batch(next(batches))
    except StopIteration:
        return _Ended()
    except BaseException as error:  # noqa: BLE001 - raised again by _take_from_queue
        return _Failed(error)


def _put_unless_stopped(
    item: _Item, batch_queue: queue.Queue[_Item], stop: threading.Event
) -> None:
    while not stop.is_set():
        try:
            batch_queue.put(item, timeout=_STOP_POLL_S)
        except queue.Full:
            continue
        return


def _stop_and_join(
    batch_queue: queue.Queue[_Item], stop: threading.Event, thread: threading.Thread
) -> None:
    stop.set()
    with contextlib.suppress(queue.Empty):
        while True:
            batch_queue.get_nowait()
    # The garbage collector may run the finalizer in the thread itself, and a thread
    # cannot join itself.
    if thread is not threading.current_thread():
        thread.join(timeout=_JOIN_TIMEOUT_S)
