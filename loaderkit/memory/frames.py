"""The local variables of functions that run, looked at without being kept.

A frame that runs is not among the objects of Python's collector until it ends, so what
it holds is found only by walking the stacks of all threads.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loaderkit.library_files import is_own_file
from loaderkit.memory.tensors import is_a

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_SHARED = (types.ModuleType, type, types.NoneType, int, float, str, bytes)
"""A value of these is found under its own name, or is the same in many places."""


@dataclass(frozen=True)
class NamedArguments:
    """What a function is called with again and again, by the names that it has there.

    Between two calls the function does not run, so none of its variables leads to them.
    """

    code: types.CodeType
    """Of the function."""
    ids: Mapping[str, int]
    """The ``id`` of each value.  Whoever calls the function keeps the values."""


_named_arguments: list[NamedArguments] = []
"""Of the calls that are judged now, the innermost last."""


@contextlib.contextmanager
def naming_arguments(
    function: Callable[..., object], values: Mapping[str, Any]
) -> Iterator[None]:
    """Have searches for holders call values what a function calls them.

    Args:
        function: It is called with them again and again.  One that has no code of
            Python's has no names for them either.
        values: The values by these names; they must live as long as the block.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if not isinstance(code, types.CodeType):
        yield
        return
    ids = {
        name: id(value) for name, value in values.items() if not is_a(value, _SHARED)
    }
    arguments = NamedArguments(code, ids)
    _named_arguments.append(arguments)
    try:
        yield
    finally:
        _named_arguments.remove(arguments)


def named_arguments() -> tuple[NamedArguments, ...]:
    """Give what functions are called with now, of the blocks that have not ended."""
    return tuple(_named_arguments)


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
