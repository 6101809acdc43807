"""Batches made ahead by a thread, where the training leaves it the time."""

from __future__ import annotations

import contextlib
import queue
import statistics
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
"""Steps that are timed before a thread is started.  Chosen: the fewest with a median
that one slow step, such as the first, does not move."""
_LEAST_STEP_SHARE = 0.5
"""A thread pays once a step takes this part of the time that making a batch takes.
Chosen: both take turns at the interpreter; a shorter step leaves too little."""
_LOOK_AGAIN_S = 0.05
"""How often a thread with a full queue looks whether it is to end."""
_END_S = 10.0
"""How long an owner waits for its thread, which may be reading a slow sample."""


class ReadAhead(Iterator[Any]):
    """Makes batches in a thread while the training computes, once that pays.

    The first steps are timed.  A loop that does nothing with its batches would only be
    held up by a thread (the two take turns at the interpreter), so it gets none.

    Args:
        batches: Where they come from; used by one thread at a time.
        depth: Batches that wait at most.
    """

    def __init__(self, batches: Iterator[Any], depth: int) -> None:
        self._batches = batches
        self._depth = depth
        self._making_s: deque[float] = deque(maxlen=TIMED_STEPS)
        self._step_s: deque[float] = deque(maxlen=TIMED_STEPS)
        self._handed_out_at: float | None = None
        self._waiting: queue.Queue[_Item] | None = None
        self._end_thread: Callable[[], Any] | None = None

    @property
    def threaded(self) -> bool:
        """Whether a thread makes the batches by now."""
        return self._waiting is not None

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._waiting is None:
            return self._make_batch_here()
        return self._take_waiting_batch(self._waiting)

    def close(self) -> None:
        """End the thread; batches that wait are dropped."""
        if self._end_thread is not None:
            self._end_thread()

    def _make_batch_here(self) -> Any:
        """Make a batch in the thread that asks, and time it and the step before."""
        asked_at = time.perf_counter()
        if self._handed_out_at is not None:
            self._step_s.append(asked_at - self._handed_out_at)
        if self._thread_pays():
            return self._take_waiting_batch(self._start_thread())
        batch = next(self._batches)
        self._handed_out_at = time.perf_counter()
        self._making_s.append(self._handed_out_at - asked_at)
        return batch

    def _take_waiting_batch(self, waiting: queue.Queue[_Item]) -> Any:
        item = waiting.get()
        if isinstance(item, _Batch):
            return item.batch
        # The thread is over.  Whoever asks again is to hear the same.
        waiting.put(item)
        if isinstance(item, _Failed):
            raise item.error
        raise StopIteration

    def _thread_pays(self) -> bool:
        if len(self._step_s) < TIMED_STEPS:
            return False
        step_s = statistics.median(self._step_s)
        return step_s > _LEAST_STEP_SHARE * statistics.median(self._making_s)

    def _start_thread(self) -> queue.Queue[_Item]:
        waiting: queue.Queue[_Item] = queue.Queue(self._depth)
        stop = threading.Event()
        thread = threading.Thread(
            target=_fill_queue,
            args=(self._batches, waiting, stop),
            daemon=True,
            name="loaderkit-read-ahead",
        )
        thread.start()
        self._waiting = waiting
        # A loop that is left early closes nothing: its iterator is collected.
        self._end_thread = weakref.finalize(self, _end_thread, waiting, stop, thread)
        return waiting


@dataclass(frozen=True)
class _Batch:
    """A batch that waits."""

    batch: Any


@dataclass(frozen=True)
class _Failed:
    """What making a batch raised, to be raised where the batch is asked for."""

    error: BaseException


class _Ended:
    """There are no more batches."""


_Item: TypeAlias = "_Batch | _Failed | _Ended"


def _fill_queue(
    batches: Iterator[Any], waiting: queue.Queue[_Item], stop: threading.Event
) -> None:
    """Make batches until there are no more, or somebody says stop.  Runs in the thread.

    It knows nothing of its owner: a reference from a running thread would keep an owner
    alive that everybody else has let go of.
    """
    while not stop.is_set():
        item = _next_item(batches)
        _put_unless_stopped(item, waiting, stop)
        if not isinstance(item, _Batch):
            return
        # Else this frame would hold the batch while the next one is made.
        del item


def _next_item(batches: Iterator[Any]) -> _Item:
    try:
        return _Batch(next(batches))
    except StopIteration:
        return _Ended()
    except BaseException as error:  # noqa: BLE001 - raised where it is asked for
        return _Failed(error)


def _put_unless_stopped(
    item: _Item, waiting: queue.Queue[_Item], stop: threading.Event
) -> None:
    while not stop.is_set():
        try:
            waiting.put(item, timeout=_LOOK_AGAIN_S)
        except queue.Full:
            continue
        return


def _end_thread(
    waiting: queue.Queue[_Item], stop: threading.Event, thread: threading.Thread
) -> None:
    stop.set()
    with contextlib.suppress(queue.Empty):
        while True:
            waiting.get_nowait()
    # The collector may run in the thread itself, which cannot wait for itself.
    if thread is not threading.current_thread():
        thread.join(timeout=_END_S)
