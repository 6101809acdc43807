"""Whether several spans of a stream would read one iterator.

Each span is read to its end, perhaps in a process of its own with a copy of what the
user's function holds.  Spans that read one iterator divide its samples among them, or
each has all; the samples do not show it.
"""

from __future__ import annotations

import gc
import inspect
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MODULES_OF_WRAPPERS = {"builtins", "itertools"}
"""Of ``map``, ``enumerate``, ``islice`` and the like, which read other iterators."""
_MOST_WRAPPERS = 100
"""Iterators that one reads; chosen.  ``chain`` of more is not looked at to its end."""


def iterators_behind(iterator: Iterator[Any]) -> list[Iterator[Any]]:
    """List an iterator, and those that it takes its samples from.

    They are known of ``itertools``, of built-in functions, and of generators by their
    arguments, among which is what a generator expression reads.

    >>> rows = iter([1, 2])
    >>> rows in iterators_behind(enumerate(map(str, rows)))
    True
    >>> rows in iterators_behind(row + 1 for row in rows)
    True
    """
    iterators: list[Iterator[Any]] = [iterator]
    # It grows while it is gone through.
    for known in iterators:
        if len(iterators) > _MOST_WRAPPERS:
            break
        for source in _read_by(known):
            if not any(source is other for other in iterators):
                iterators.append(source)
    return iterators


def _read_by(iterator: Iterator[Any]) -> list[Iterator[Any]]:
    if isinstance(iterator, types.GeneratorType):
        code, values = iterator.gi_code, inspect.getgeneratorlocals(iterator)
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [values[name] for name in arguments if name in values]
    elif type(iterator).__module__ in _MODULES_OF_WRAPPERS:
        given = gc.get_referents(iterator)
        # ``map`` and ``zip`` have theirs in a tuple.
        given += [part for group in given if type(group) is tuple for part in group]
    else:
        return []
    return [value for value in given if isinstance(value, Iterator)]


def are_held_elsewhere(iterators: list[Iterator[Any]]) -> bool:
    """Tell whether anything but one of them, or a function that runs, holds one.

    It goes through all objects of the process, a million in 50 ms.
    """
    own = {id(iterators), *map(id, iterators)}
    for iterator in iterators:
        # ``map`` and ``zip`` hold theirs in a tuple of their own.
        parts = gc.get_referents(iterator)
        own |= {id(part) for part in parts if type(part) is tuple}
    return any(
        id(holder) not in own and not isinstance(holder, types.FrameType)
        for holder in gc.get_referrers(*iterators)
    )


def gives_it_again(
    function: Callable[[int, int], Any],
    span: int,
    spans: int,
    iterators: list[Iterator[Any]],
) -> bool:
    """Tell whether a function gives another span one of the iterators of this one.

    Args:
        function: Called once, for the other span.
        span: This one.
        spans: How many there are, two at least.
        iterators: What it gave this one, and what that reads.
    """
    other = function((span + 1) % spans, spans)
    if not hasattr(other, "__iter__"):
        return False
    others = iterators_behind(iter(other))
    return any(one is another for one in iterators for another in others)
