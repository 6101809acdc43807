"""The local variables of functions that run, looked at without being kept.

A frame that runs is not among the objects of Python's collector until it ends, so what
it holds is found only by walking the stacks of all threads.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

from loaderkit.library_files import is_own_file
from loaderkit.memory.tensors import is_a

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator


def running_frames() -> Iterator[types.FrameType]:
    """Give the frames of all functions that run, of every thread, ours too.

    Yields:
        Each thread's frames, the innermost first.
    """
    stacks = list(sys._current_frames().values())
    while stacks:
        # Nothing here keeps a frame that was given: it may be the caller's own, and a
        # frame whose variable refers to itself is a cycle that keeps all its callers.
        frame: types.FrameType | None = stacks.pop()
        while frame is not None:
            yield frame
            frame = frame.f_back


def running_locals() -> list[Any]:
    """List the values of the local variables of all functions that run, but ours.

    Returns:
        The values; the list keeps them.
    """
    values: list[Any] = []
    for frame in running_frames():
        if not is_own_file(frame.f_code.co_filename):
            variables = frame.f_locals
            values += variables.values()
            _forget_copies(frame, variables)
    return values


def local_ids(frame: types.FrameType) -> dict[str, int]:
    """List a frame's variables without keeping their values.

    Before Python 3.13 ``f_locals`` leaves a copy of all variables with the frame, which
    would keep what the frame lets go of; it is emptied again.

    Args:
        frame: Of a function that runs.

    Returns:
        The ``id`` of each variable's value.
    """
    variables = frame.f_locals
    ids = {name: id(value) for name, value in list(variables.items())}
    _forget_copies(frame, variables)
    return ids


def _forget_copies(frame: types.FrameType, variables: object) -> None:
    """Empty a copy of a frame's variables; of a module they are no copy."""
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and is_a(variables, dict):
        variables.clear()
