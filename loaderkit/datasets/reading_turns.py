"""Threads of one process take turns to read samples.

The random numbers that a sample draws are the process's, and so is the position of a
file that its dataset keeps open.  While one thread reads, the generators have the seed
of a sample: another must not take that for the seed that the user has set.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from loaderkit.datasets.own_samples import count_nested_packings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LOG = logging.getLogger("loaderkit")


@contextmanager
def turn_to_read(cache: Path) -> Iterator[None]:
    """Have the process's random numbers, and its open files, to oneself.

    Code that makes samples may have another cache packed, in its own thread or in one
    that it has started: that has a turn within its turn.

    Args:
        cache: What is packed, for messages.
    """
    lock = _reading_lock(os.getpid(), count_nested_packings())
    if not lock.acquire(timeout=_SAY_AFTER_S):
        _LOG.warning(
            "%s waits until another thread of this process has read samples; %.0f s so "
            "far (if that one waits for this thread, neither ends: in load(), have no "
            "other cache packed by a thread that was there before)",
            cache,
            _SAY_AFTER_S,
        )
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


_SAY_AFTER_S = 10
"""Chosen: few samples take longer to read."""


@functools.cache
def _reading_lock(
    pid: int,  # noqa: ARG001 -- the cache's key
    nested_packings: int,  # noqa: ARG001
) -> threading.Lock:
    """Give the lock of a process; one that was forked while it was held has another.

    One for each depth is enough: who is deeper was started by who has the one above.
    """
    return threading.Lock()
