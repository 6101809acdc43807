"""What keeps objects that no variable leads to: proof, or nothing.

An object that is alive though no variable, module, closure or traceback leads to it is
held by a cycle that the collector cannot see, or by C code: an exit handler, an
extension, a reference that was never given back.  Which of these is said only where it
can be shown.
"""

from __future__ import annotations

import atexit
import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loaderkit.leaks.retained import saved_tensors
from loaderkit.memory.frames import running_locals
from loaderkit.memory.tensors import is_a

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOST_WALKED = 2_000
"""Nodes and tensors of an autograd graph that are walked."""
_MOST_LEVELS = 12
"""References that are followed from an object upwards."""


@dataclass(frozen=True)
class OutsideCounts:
    """What is held outside of Python's objects, as far as Python counts it."""

    exit_handlers: int
    """Functions registered with ``atexit``."""
    frozen_objects: int
    """Objects that ``gc.freeze()`` hid from the collector."""


def count_outside() -> OutsideCounts:
    """Count exit handlers and frozen objects; some microseconds.

    Returns:
        The counts; 0 exit handlers where this Python does not tell.
    """
    # CPython's own tests use it; the handlers themselves cannot be listed.
    count = getattr(atexit, "_ncallbacks", None)
    exit_handlers = 0 if count is None else int(count())
    return OutsideCounts(exit_handlers, gc.get_freeze_count())


def is_in_autograd_cycle(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's autograd graph leads back to it.

    So do ``backward(create_graph=True)``, whose gradient's graph refers to the
    parameter, and a ``Function`` that keeps its output on ``ctx``.  The way leads
    through C++, where Python's collector does not look.

    Args:
        tensor: Any.

    Returns:
        Whether a way back was found within 2,000 nodes.
    """
    seen_ids: set[int] = set()
    # The list grows while it is gone through, and keeps what it holds alive, so that
    # an id stays its object's own.
    objects: list[Any] = [tensor]
    for item in objects:
        for referent in _autograd_referents(item):
            if referent is tensor:
                return True
            if id(referent) not in seen_ids and len(objects) < _MOST_WALKED:
                seen_ids.add(id(referent))
                objects.append(referent)
    return False


def _autograd_referents(item: Any) -> Iterator[Any]:
    """Give the tensors and nodes that a tensor or node refers to."""
    referents: list[Any] = []
    if is_a(item, torch.Tensor):
        # Of a tensor that is no leaf, torch warns when it is asked for .grad.
        referents = [item.grad_fn, item.grad if item.is_leaf else None]
    else:
        referents = [next_node for next_node, _ in item.next_functions]
        referents.append(getattr(item, "variable", None))
        # A Function that is written in Python keeps there what was put on ctx.
        on_ctx = getattr(item, "__dict__", {}).values()
        referents += [value for value in on_ctx if is_a(value, torch.Tensor)]
        referents += saved_tensors(item)
    yield from (referent for referent in referents if referent is not None)


def may_be_exit_handlers(
    items: Sequence[Any],
    more_handlers: float,
    more_items: float,
) -> bool:
    """Tell whether exit handlers can hold items that no variable leads to.

    ``atexit`` keeps a function, the tuple and the dict of its arguments.  So the last
    object on the way up from an item must be one of these, which nothing refers to; and
    as many handlers must have come as items.

    Args:
        items: The newest items; the list itself is not followed.
        more_handlers: How many more each epoch.
        more_items: How many more each epoch.

    Returns:
        Whether all of this is so.
    """
    if not more_items / 2 <= more_handlers <= 2 * more_items:
        return False
    ignored_ids = {id(items), *map(id, running_locals())}
    for item in items:
        top = _top_of(item, ignored_ids)
        if not (callable(top) or is_a(top, (tuple, dict))):
            return False
    return True


def _top_of(item: object, ignored_ids: set[int]) -> object:
    """Follow references upwards to an object that nothing refers to."""
    top, seen_ids = item, {id(item)}
    for _ in range(_MOST_LEVELS):
        referrers = [
            referrer
            for referrer in gc.get_referrers(top)
            if id(referrer) not in seen_ids | ignored_ids
            and not _is_frame_or_list(referrer)
        ]
        if not referrers:
            return top
        top = referrers[0]
        seen_ids.add(id(top))
    return top


def _is_frame_or_list(item: object) -> bool:
    # Lists are those that this search and its callers made: the collector lists no exit
    # handler's.
    return type(item).__name__ in {"frame", "list", "list_iterator", "generator"}
