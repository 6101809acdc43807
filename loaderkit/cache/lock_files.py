"""Lock files that threads of one process wait for too."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING

import filelock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_POLL_S = 0.02
"""How often a lock is asked for that another process has.  filelock's own 50 ms would
be most of what taking a shard into use takes."""


class _ThreadLocks:
    """One lock of threading for each lock file that is wanted now.

    A second thread of a process would poll for the file like another process, and sleep
    longer than the first one holds it: of a cold epoch of 12 shards 0.6 s of 2.4.
    """

    def __init__(self) -> None:
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Begin anew: a forked process has copies of locks whose threads it has not."""
        self._guard = threading.Lock()
        # A lock goes with the last thread that holds it or waits for it.
        self._locks: weakref.WeakValueDictionary[str, threading.Lock] = (
            weakref.WeakValueDictionary()
        )

    def lock_of(self, file: Path) -> threading.Lock:
        """Give the lock that all threads of this process share for a file."""
        with self._guard:
            return self._locks.setdefault(os.fspath(file), threading.Lock())


_THREAD_LOCKS = _ThreadLocks()


@contextlib.contextmanager
def hold_lock_file(file: Path) -> Iterator[None]:
    """Hold a lock that no other thread and no other process has.

    Args:
        file: Made if it is not there.

    Raises:
        OSError: The file system has no locks, or the file cannot be made.
        NotImplementedError: The same, where filelock says so.
    """
    with _THREAD_LOCKS.lock_of(file):
        lock = filelock.FileLock(file)
        lock.acquire(poll_interval=_POLL_S)
        try:
            yield
        finally:
            lock.release()
