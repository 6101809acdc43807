"""How many bytes an object keeps that nothing else in a sample of its kind keeps."""

from __future__ import annotations

import contextlib
import io
import mmap
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.memory.tensors import (
    describe,
    graph_of,
    is_a,
    objects_in_array,
    referents_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

_MOST_OBJECTS = 2_000
"""Chosen: from an item the way may lead to the whole heap."""
MOST_NODES = 300
"""Nodes of an autograd graph that are weighed."""
_NODE_BYTES = 200
"""Of a node itself, about: it is an object of C++."""
_NOT_ENTERED = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType)


def retained_bytes(
    items: Sequence[Any],
    container: object = None,
    *,
    sibling_ids: AbstractSet[int] = frozenset(),
    older_ids: AbstractSet[int] = frozenset(),
) -> int:
    """Weigh items of a container, each with what it alone keeps.

    Args:
        items: A sample, such as the last eight of a list.
        container: Where they are, which is not entered: a traceback leads to the list
            that its function appends to, and from there to all other items.
        sibling_ids: ``id`` of all items that are kept alike.  They are not entered
            either: nodes of a tree refer to each other, and each counts by itself.
        older_ids: ``id`` of what was alive before the items came, as far as it is
            known; not entered.

    Returns:
        Bytes of one item, on average.  What some share counts once, what all share not
        at all: it was there before.
    """
    if not items:
        return 0
    pieces_of_items = [
        dict(_pieces_below(item, container, sibling_ids, older_ids)) for item in items
    ]
    sizes = {key: size for pieces in pieces_of_items for key, size in pieces.items()}
    if len(items) > 1:
        common = set.intersection(*(set(pieces) for pieces in pieces_of_items))
        sizes = {key: size for key, size in sizes.items() if key not in common}
    return sum(sizes.values()) // len(items)


def _pieces_below(
    item: object,
    container: object,
    sibling_ids: AbstractSet[int],
    older_ids: AbstractSet[int],
) -> Iterator[tuple[int, int]]:
    """Yield what an item keeps: a key for each piece of memory, and its bytes."""
    objects: list[object] = [item]
    if is_a(item, tuple):
        # A key with its value, or a row: what stands in it is entered, classes too,
        # which further down are what they always are, and not kept by the item.
        objects += item
    seen_ids = {id(container), *map(id, objects)}
    # The list grows while it is gone through; it keeps what it holds alive, so that no
    # number is given twice.
    for current in objects:
        yield from pieces_of(current)
        if len(objects) > _MOST_OBJECTS:
            return
        for referent in _kept_by(current):
            number = id(referent)
            if number in seen_ids or number in sibling_ids or number in older_ids:
                continue
            if not is_a(referent, _NOT_ENTERED):
                seen_ids.add(number)
                objects.append(referent)


def pieces_of(item: object) -> Iterator[tuple[int, int]]:
    """Yield the memory of one object without what it refers to."""
    with contextlib.suppress(Exception):  # __sizeof__ may be the user's code
        yield id(item), sys.getsizeof(item)
    if is_a(item, torch.Tensor):
        description = describe(item)
        yield description.storage_key, description.storage_bytes
        yield from _graph_pieces(item)
    elif is_a(item, np.ndarray):
        base = item
        while is_a(base.base, np.ndarray):
            base = base.base
        if base is not item:
            yield id(base), int(base.nbytes)
    elif is_a(item, io.StringIO):
        yield id(item) + 1, text_buffer_bytes(item)
    elif type(item) is mmap.mmap:  # a subclass may have a __len__ of its own
        with contextlib.suppress(ValueError):  # it is closed
            # The number after the object's own stands for what it maps.
            yield id(item) + 1, len(item)


def text_buffer_bytes(text: io.StringIO) -> int:
    """Weigh what was written to a text buffer, which ``sys.getsizeof`` leaves out.

    Args:
        text: Any.

    Returns:
        Characters up to where it stands: what it has after that is not seen, since
        ``getvalue()`` would copy it; 0 of a closed one.
    """
    with contextlib.suppress(ValueError):  # it is closed
        return io.StringIO.tell(text)  # a subclass may have a tell of its own
    return 0


def _graph_pieces(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the tensors that the nodes of an autograd graph have saved."""
    for node in graph_of(tensor, MOST_NODES):
        yield id(node), _NODE_BYTES
        for saved in saved_tensors(node):
            # The model keeps its parameters.  Data may be kept by the graph alone: what
            # a dataset keeps as well is shared by all items, or was there before.
            is_parameter = saved.is_leaf and saved.requires_grad
            if not is_parameter:
                description = describe(saved)
                yield description.storage_key, description.storage_bytes


def saved_tensors(node: Any) -> Iterator[torch.Tensor]:
    """Give the tensors that a node of an autograd graph has saved for backward.

    Args:
        node: From :func:`loaderkit.memory.tensors.graph_of`.

    Yields:
        Each of them; none that was freed already.
    """
    # torch documents the names _saved_<argument>, and raises where they were freed.
    for name in dir(node):
        if name.startswith("_saved_"):
            with contextlib.suppress(Exception):
                saved = getattr(node, name)
                if is_a(saved, torch.Tensor):
                    yield saved


def _kept_by(item: object) -> Sequence[Any]:
    """List what an object keeps; of functions only what they close over."""
    if is_a(item, types.FunctionType):
        return [*(item.__closure__ or ()), *(item.__defaults__ or ())]
    if is_a(item, torch.Tensor) and item.grad_fn is not None:
        return []
    if is_a(item, types.FrameType):
        # A frame keeps its variables. Its caller's frame leads to all that runs, this
        # search included, and with it to every item.
        referents = referents_of([item])
        return [value for value in referents if not is_a(value, types.FrameType)]
    if is_a(item, np.ndarray):
        # Arrays are none of the objects that the collector enters. What stands in one
        # of objects is kept by it, as is the tensor or buffer that another one shows.
        base = [] if item.base is None else [item.base]
        return [*base, *objects_in_array(item)]
    return referents_of([item])
