"""The C library of this process, where Python can give it."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def c_library() -> ctypes.CDLL | None:
    """Give the C library that is loaded in this process.

    Returns:
        It; None where the system has none under no name: Windows raises a TypeError.
    """
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
