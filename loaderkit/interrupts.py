"""Keep a Ctrl-C from being lost, and from coming where something must be done whole.

Python calls the handler of a signal between any two instructions of the main thread.
If it raises inside of a hook of ``os.register_at_fork``, a destructor, or a callback of
a weak reference or of C, the exception goes nowhere: Python prints "Exception ignored
in" and goes on.  ``fork`` alone runs some 10 such hooks (logging, random, threading,
torch), and a signal that comes while the kernel copies the process is handled in the
first of them.  Of 100 interrupts that came in the first 0.15 s of ``pack``, when it
forks, 64 were lost so (2 cores at a load of 9), and 25 of 60 in the first 0.12 s of a
loader with 4 workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType

    from typing_extensions import Self


class Interrupts:
    """Takes note of each SIGINT inside of a ``with`` block, which no one can outlive.

    The handler that was there decides what an interrupt does, as before: it is called
    where the signal comes, or behind what is held.  What it raises leaves the block,
    though something inside has dropped it, or raised another error in its place.  One
    that returns has dealt with the signal.

    Where signals are not Python's to handle it does nothing: in other threads than the
    main one, and where SIGINT is ignored or ends the process.

    >>> before = signal.signal(signal.SIGINT, signal.default_int_handler)
    >>> try:
    ...     with Interrupts():
    ...         with contextlib.suppress(KeyboardInterrupt):
    ...             signal.raise_signal(signal.SIGINT)
    ...         print("dropped")
    ... except KeyboardInterrupt:
    ...     print("raised all the same")
    dropped
    raised all the same
    >>> _ = signal.signal(signal.SIGINT, before)
    """

    def __init__(self) -> None:
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._pid = os.getpid()
        self._holds = 0
        self._is_ignored_by_forked = False
        self._is_waiting = False
        """A signal has come meanwhile that the handler was not told of yet."""
        self._raised: BaseException | None = None
        """What the handler has raised last."""

    def __enter__(self) -> Self:
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous):
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGINT, self._handle)
                self._previous = previous
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is None:
            return
        # signal.signal() first has signals handled that wait, and changes nothing
        # where that raises an error.
        self._holds += 1
        # What the block has called may have set a handler of its own, to stay.
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._previous)
        self._holds -= 1
        try:
            if not isinstance(error, KeyboardInterrupt) and error is not self._raised:
                self.check()
        finally:
            # Its traceback has this object, and all that is in the frames would live
            # until the garbage collector comes: workers, say.
            self._raised = None

    @contextlib.contextmanager
    def held(self, *, ignored_by_forked: bool = False) -> Iterator[None]:
        """Have signals wait until the end of a block.

        Args:
            ignored_by_forked: Processes that are forked in the block ignore SIGINT, for
                as long as they keep the handler.  Others have the one that was there.
        """
        self._holds += 1
        self._is_ignored_by_forked = ignored_by_forked
        try:
            yield
        finally:
            self._holds -= 1
            self._is_ignored_by_forked = False
        # Not over an error of the block: then at the end of all.
        if not self._holds and self._is_waiting:
            self.check()

    def check(self) -> None:
        """Raise what the handler raised of a signal that came in this block.

        Raises:
            BaseException: It; KeyboardInterrupt, as a rule.
        """
        if self._is_waiting:
            self._is_waiting = False
            self._call_previous(signal.SIGINT, None)
        if self._raised is not None:
            raise self._raised

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A process that was forked meanwhile has this handler, and nothing to hold.
        is_forked = os.getpid() != self._pid
        if is_forked and self._is_ignored_by_forked:
            return
        if self._holds and not is_forked:
            self._is_waiting = True
        else:
            self._call_previous(number, frame)

    def _call_previous(self, number: int, frame: FrameType | None) -> None:
        if self._previous is None:
            return
        try:
            self._previous(number, frame)
        except BaseException as error:
            self._raised = error
            raise


class _ToldApart:
    """A handler of SIGINT whose frame is in the traceback of what it raises.

    Args:
        previous: What was there, and does what an interrupt does.
    """

    def __init__(self, previous: Callable[[int, FrameType | None], Any]) -> None:
        self._previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._previous(number, frame)


def tell_signals_apart() -> None:
    """Have this process know a Ctrl-C from a KeyboardInterrupt that code raises.

    Python's own handler leaves no trace of itself.
    """
    previous = signal.getsignal(signal.SIGINT)
    if callable(previous) and not isinstance(previous, _ToldApart):
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, _ToldApart(previous))


def is_of_code(error: BaseException | None) -> bool:
    """Tell whether code has raised a KeyboardInterrupt, and no signal.

    Args:
        error: As it was raised.

    Returns:
        False where that is not known: ``tell_signals_apart`` was not called, or a
        handler was set since.

    >>> before = signal.signal(signal.SIGINT, signal.default_int_handler)
    >>> tell_signals_apart()
    >>> try:
    ...     raise KeyboardInterrupt
    ... except KeyboardInterrupt as error:
    ...     is_of_code(error)
    True
    >>> try:
    ...     signal.raise_signal(signal.SIGINT)
    ... except KeyboardInterrupt as error:
    ...     is_of_code(error)
    False
    >>> _ = signal.signal(signal.SIGINT, before)
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler in {signal.SIG_IGN, signal.SIG_DFL}:
        # As in jobs of a shell that run in the background: no signal raises anything.
        return True
    if not isinstance(handler, _ToldApart):
        return False
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code is _ToldApart.__call__.__code__:
                return False
        # Code may raise another one where it has caught the signal's.
        error = error.__context__
    return True
