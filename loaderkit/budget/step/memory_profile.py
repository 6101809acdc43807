"""torch's profiler of memory, without lines of its own on stderr."""

from __future__ import annotations

import contextlib
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

    Yields:
        The profile, whose events can be read after the block.
    """
    is_set = _LEVEL in os.environ
    if not is_set:
        os.environ[_LEVEL] = _SILENT
    try:
        with profile(profile_memory=True) as profiled:
            yield profiled
    finally:
        if not is_set:
            os.environ.pop(_LEVEL, None)
