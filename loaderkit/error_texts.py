"""The text of an error, whoever wrote its class.  Pure."""

from __future__ import annotations

import re


def text_of_error(error: BaseException) -> str:
    """Print an error whose own ``__str__`` may fail: that must not hide the error.

    >>> text_of_error(ValueError("no molecule"))
    'no molecule'
    """
    try:
        return str(error)
    except Exception:  # noqa: BLE001 -- code of the user's class
        return "<str() of it failed>"


def error_in_words(error: BaseException | None) -> str:
    """Write an error as the last line of its traceback.

    >>> error_in_words(ValueError("no molecule"))
    'ValueError: no molecule'
    """
    text = "" if error is None else text_of_error(error)
    return f"{type(error).__name__}: {text}"


_NO_MEMORY = re.compile(
    "can't allocate memory|cannot allocate memory|not enough memory|out of memory|"
    "bad_alloc|allocate shared memory",
    re.IGNORECASE,
)
"""In the RuntimeErrors of torch's allocators: of the host on Linux and Windows, of
devices, of C++ and of shared memory."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether memory could not be had, rather than something be done with values.

    Only what an allocator raises itself: what any program may print of it is read by
    ``loaderkit.diagnose_oom``.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    True
    >>> is_out_of_memory(RuntimeError("stack expects each tensor to be equal size"))
    False
    """
    if isinstance(error, RuntimeError):
        return _NO_MEMORY.search(text_of_error(error)) is not None
    return isinstance(error, MemoryError)
