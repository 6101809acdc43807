"""Who holds an array or a tuple of numbers, which the collector does not list."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from loaderkit.memory.holders import holders_of, label_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loaderkit.leaks.census import Heap
    from loaderkit.memory.holder import Holder


def holder_of_array(array: object, heap: Heap, ignore: Sequence[object] = ()) -> Holder:
    """Find who holds an array, also where a dictionary of arrays does.

    Args:
        array: Or a buffer, tensor, text or a tuple of these.
        heap: What is alive; its lists do not count as holders.
        ignore: What else refers to it because of this search.

    Returns:
        The nearest holder; one that holds nothing if no variable leads to it.
    """
    ignore = [*ignore, *heap.lists]  # they refer to it because of this search
    holder = holders_of(array, most=1, ignore=ignore)[0]
    if holder.held:
        return holder
    # The collector lists no dictionary that holds nothing but arrays, numbers and
    # texts, so that a search from the array upwards ends before it.
    for outer in heap.unlisted_dicts():
        if any(value is array for value in outer.values()):
            outer_holder = holders_of(outer, most=1, ignore=ignore)[0]
            if outer_holder.held:
                label = label_of(outer, array) or ""
                if outer_holder.path.endswith("."):
                    # The variables of an object, whose names follow the dot.
                    label = next(k for k, value in outer.items() if value is array)
                return replace(outer_holder, path=f"{outer_holder.path}{label}")
    return holder
