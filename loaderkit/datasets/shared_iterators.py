"""Whether several spans of a stream would read one iterator.

Each span is read to its end, perhaps in a process of its own, which has a copy of what
the user's function holds.  So of spans that read one iterator the first gets all of its
samples, or each of them does, and nothing in the samples shows it.
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
"""Of ``map``, ``enumerate``, ``islice`` and the like, which read other iterators.  They
tell nobody but the garbage collector what they hold."""
_MOST_ITERATORS = 100
"""So many are looked at behind one; chosen, for a ``chain`` of thousands."""


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
    # The list grows while it is gone through.
    for known in iterators:
        if len(iterators) > _MOST_ITERATORS:
            break
        for source in _iterators_read_by(known):
            if not _is_among(source, iterators):
                iterators.append(source)
    return iterators


def _iterators_read_by(iterator: Iterator[Any]) -> list[Iterator[Any]]:
    """List the iterators that one asks for its next value."""
    if isinstance(iterator, types.GeneratorType):
        code, values = iterator.gi_code, inspect.getgeneratorlocals(iterator)
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        # An argument that was deleted has no value.
        held = [values[name] for name in arguments if name in values]
    elif type(iterator).__module__ in _MODULES_OF_WRAPPERS:
        held = gc.get_referents(iterator)
        for items in _tuples_of(iterator):
            held += items
    else:
        return []
    return [value for value in held if isinstance(value, Iterator)]


def _tuples_of(iterator: Iterator[Any]) -> list[tuple[Any, ...]]:
    """List the tuples that an iterator holds: ``map`` and ``zip`` have one each."""
    return [value for value in gc.get_referents(iterator) if type(value) is tuple]


def _is_among(iterator: Iterator[Any], iterators: list[Iterator[Any]]) -> bool:
    """Tell whether a list has this very iterator; a class may have its own ``==``."""
    return any(iterator is other for other in iterators)


def are_held_elsewhere(iterators: list[Iterator[Any]]) -> bool:
    """Tell whether an object holds one of some iterators that is none of them.

    It goes through all objects of the process, a million in 50 ms.

    Args:
        iterators: What ``iterators_behind`` lists.
    """
    own_ids = {id(iterators), *map(id, iterators)}
    for iterator in iterators:
        own_ids |= set(map(id, _tuples_of(iterator)))
        if isinstance(iterator, types.GeneratorType):
            # Up to Python 3.12 a frame keeps the dict in which it has shown its locals.
            own_ids.add(id(inspect.getgeneratorlocals(iterator)))
    # From Python 3.14 on the tuple of the call's arguments is among the holders.
    arguments = tuple(iterators)
    own_ids.add(id(arguments))
    return any(
        # A frame holds them for as long as its function runs, as this one's does.
        id(holder) not in own_ids and not isinstance(holder, types.FrameType)
        for holder in gc.get_referrers(*arguments)
    )


def other_span_reads(
    function: Callable[[int, int], Any],
    other_span: int,
    spans: int,
    iterators: list[Iterator[Any]],
) -> bool:
    """Tell whether another span would read one of the iterators of a span.

    Args:
        function: Gives an iterable a span; called once, for the other span.
        other_span: Its number.
        spans: How many there are.
        iterators: What the first of the two spans reads; see ``iterators_behind``.
    """
    iterable = function(other_span, spans)
    if not hasattr(iterable, "__iter__"):
        return False
    others = iterators_behind(iter(iterable))
    return any(_is_among(iterator, others) for iterator in iterators)
