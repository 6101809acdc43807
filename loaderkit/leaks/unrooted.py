"""What keeps objects that no variable leads to: proof, or nothing.

An object that is alive though no variable, module, closure or traceback leads to it is
held by a cycle that the collector cannot see, or by C code: an exit handler, an
extension, a reference that was never given back.  Which of these is said only where it
can be shown.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loaderkit.memory.frames import running_locals
from loaderkit.memory.tensors import is_a

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOST = 2_000
"""Nodes and tensors of an autograd graph that are walked."""
_HIGHEST = 12
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
    return OutsideCounts(0 if count is None else int(count()), gc.get_freeze_count())


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
    seen: set[int] = set()
    level: list[Any] = [tensor]
    for each in level:
        for part in _autograd_references(each):
            if part is tensor:
                return True
            if id(part) not in seen and len(level) < _MOST:
                seen.add(id(part))
                level.append(part)  # keeps it alive, so that its id stays its own
    return False


def _autograd_references(each: Any) -> Iterator[Any]:
    """Give the tensors and nodes that a tensor or node refers to."""
    if is_a(each, torch.Tensor):
        parts = [each.grad_fn, each.grad if each.is_leaf else None]
    else:
        parts = [following for following, _ in each.next_functions]
        parts.append(getattr(each, "variable", None))
        # A Function that is written in Python keeps what was put on ctx there.
        kept = getattr(each, "__dict__", {}).values()
        parts += [part for part in kept if is_a(part, torch.Tensor)]
        for name in dir(each):
            if name.startswith("_saved_"):
                with contextlib.suppress(Exception):  # freed, or no tensor
                    saved = getattr(each, name)
                    parts += [saved] if is_a(saved, torch.Tensor) else []
    yield from (part for part in parts if part is not None)


def may_be_exit_handlers(
    items: Sequence[Any], more_handlers: float, more_items: float
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
    ignored = {id(items), *map(id, running_locals())}
    return all(
        callable(top) or is_a(top, (tuple, dict))
        for top in (_top_of(item, ignored) for item in items)
    )


def _top_of(item: Any, ignored: set[int]) -> Any:
    """Follow references upwards to an object that nothing refers to."""
    top, met = item, {id(item)}
    for _ in range(_HIGHEST):
        above = [
            each
            for each in gc.get_referrers(top)
            if id(each) not in met | ignored and not _is_frame_or_list(each)
        ]
        if not above:
            return top
        top = above[0]
        met.add(id(top))
    return top


def _is_frame_or_list(each: Any) -> bool:
    # Lists are those that this search and its callers made: the collector lists no exit
    # handler's.
    return type(each).__name__ in {"frame", "list", "list_iterator", "generator"}
