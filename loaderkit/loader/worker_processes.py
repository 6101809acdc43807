"""The processes of a loader's workers, noted so that they can be ended.

torch ends the workers of its iterator.  Where one of them could not be started there is
no iterator, and an error that is kept (by a notebook, a debugger, pytest) would keep
the workers before it until Python ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any

from loaderkit.sending import Outbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess

_ENDING_S = 5.0
"""What a worker is given to end by itself.  Chosen, as torch gives it."""
_MOST_WAITING_BYTES = 64 << 20
"""Workers start side by side, and wait for what they are sent.  Of a dataset with more
bytes than these, one copy is here at a time, and they start one after the other."""


class NotingContext(BaseContext):
    """A context of multiprocessing that notes the processes it makes.

    Args:
        context: What makes them, and all else.
        outbox: What the process that is started last is still to be sent.
    """

    def __init__(self, context: BaseContext, outbox: Outbox | None = None) -> None:
        self._context = context
        self._outbox = outbox or Outbox()
        self._processes: list[BaseProcess] = []
        self._queues: list[Any] = []
        self.lost_process: BaseProcess | None = None
        """One that has ended before it had read what it was sent."""

    def get_context(self, method: str | None = None) -> Any:
        """Give the context that queues, locks and events are made with."""
        return self._context if method is None else self._context.get_context(method)

    def get_start_method(self, allow_none: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Say how its processes start."""
        return self._context.get_start_method(allow_none)

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802
        """Make a queue, as ``multiprocessing.Queue`` does, and note it."""
        queue: Any = self._context.Queue(maxsize)
        self._queues.append(queue)
        return queue

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:  # noqa: N802
        """Make a process, as ``multiprocessing.Process`` does, and note it."""
        if self._outbox.waiting_bytes > _MOST_WAITING_BYTES:
            self.send_rest()
        context: Any = self._context
        process: BaseProcess = context.Process(*args, **kwargs)
        self._processes.append(process)
        return process

    def send_rest(self) -> None:
        """Send to processes that were started what they wait for.

        Raises:
            ConnectionError: One has ended before.  The others are ended too.
        """
        with _ends_of_children_held():
            try:
                self._outbox.send()
            except ConnectionError:
                # Each of these processes was to be sent something.
                self.lost_process = self._processes[-1 - self._outbox.waiting]
                # Before it is ended with the others, so that its exit code is its own.
                self.lost_process.join(_ENDING_S)
                self.end_processes()
                raise

    def end_processes(self) -> None:
        """End those that run, and wait until they have."""
        self._outbox.clear()
        with _ends_of_children_held():
            running = [process for process in self._processes if process.is_alive()]
            for process in running:
                process.terminate()
            for process in running:
                process.join(_ENDING_S)
                # A handler of the user's may have kept it from ending.
                if process.is_alive():
                    process.kill()
                    process.join()
        # torch's half-made iterator is in a cycle with the error, and puts an end mark
        # into its queues as it is collected.  Queues collected with it would be closed
        # under the threads that this starts, and their descriptors closed twice.  Its
        # processes live as long as it does.
        for process in self._processes:
            weakref.finalize(process, list, self._queues).atexit = False


@contextlib.contextmanager
def _ends_of_children_held() -> Iterator[None]:
    """Have the ends of child processes told behind a block.

    torch's handler of SIGCHLD raises an error wherever the main thread is, if one of
    its workers was ended by a signal.  That one would stand in the place of the error
    for which these are ended.  Behind the block they have been waited for, and torch
    finds none of them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if not callable(handler):  # nobody is told
        yield
        return
    ends: list[int] = []
    signal.signal(signal.SIGCHLD, lambda number, _: ends.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        if ends:
            handler(signal.SIGCHLD, None)
