"""A process that holds something until it is killed, and may be stopped meanwhile."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading

FORK = multiprocessing.get_context("fork")


@contextlib.contextmanager
def process_that_holds(take):
    """Run a process that enters a context and stays in it.

    Args:
        take: Makes the context, in that process.

    Yields:
        The process, once it is in; it is killed at the end.
    """
    is_held = FORK.Event()

    def hold_for_ever():
        with take():
            is_held.set()
            threading.Event().wait()

    process = FORK.Process(target=hold_for_ever)
    process.start()
    while not is_held.wait(0.1):
        assert process.is_alive()  # or this would wait for ever
    try:
        yield process
    finally:
        process.kill()
        process.join()


def stop_process(process):
    """Stop a process, and wait until it is."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


class _Listener(logging.Handler):
    def __init__(self, text, function):
        super().__init__()
        self.lines = []
        self._text, self._function = text, function

    def emit(self, record):
        line = record.getMessage()
        self.lines.append(line)
        if self._text in line:
            self._function()


@contextlib.contextmanager
def call_when_logged(text, function):
    """Call a function at each line of loaderkit's log that has a text.

    Yields:
        The lines so far.
    """
    logger, listener = logging.getLogger("loaderkit"), _Listener(text, function)
    logger.addHandler(listener)
    try:
        yield listener.lines
    finally:
        logger.removeHandler(listener)
