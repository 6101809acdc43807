"""torch's profiler of memory, without lines of its own on stderr, or old garbage."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import TYPE_CHECKING

from torch.autograd.profiler import profile

if TYPE_CHECKING:
    from collections.abc import Iterator

_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "6"
"""The level above the last one, USDT (5)."""


@contextlib.contextmanager
def memory_profile() -> Iterator[profile]:
    """Profile the memory that operators take and give back.

    The profiler of torch 2.13 writes two lines to stderr each time it is used, and an
    estimate uses it dozens of times.  Its level is read from the environment once in a
    process, at the first use; a level that the user has set is left alone.

    Python collects no cycles meanwhile.  Torch knows the blocks that were allocated
    under an earlier profile, and reports that they are freed: what a step that failed
    had left in a cycle was taken off the peak of the next one, which came out as 0.

    Yields:
        The profile, whose events can be read after the block.
    """
    is_set = _LEVEL in os.environ
    if not is_set:
        os.environ[_LEVEL] = _SILENT
    try:
        with no_collection(), profile(profile_memory=True) as profiled:
            yield profiled
    finally:
        if not is_set:
            os.environ.pop(_LEVEL, None)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Let Python collect no cycles meanwhile, unless the step asks for it itself.

    When it collects depends on all that the process has made before.  What is counted
    must not: the garbage of a step lives to its end.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
