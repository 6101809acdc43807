"""A process that holds something until it is killed, and may be stopped meanwhile."""

import contextlib
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
