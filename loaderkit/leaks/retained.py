"""How many bytes an object keeps that nothing else in a sample of its kind keeps."""

from __future__ import annotations

import contextlib
import gc
import mmap
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.memory.tensors import describe, graph_of, is_a

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOST_OBJECTS = 2_000
"""Chosen: from an item the way may lead to the whole heap."""
MOST_NODES = 300
"""Nodes of an autograd graph that are weighed."""
_NODE_BYTES = 200
"""Of a node itself, about: it is an object of C++."""
_NOT_ENTERED = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType)


def retained_bytes(items: Sequence[Any]) -> int:
    """Weigh items of a container, each with what it alone keeps.

    Args:
        items: A sample, such as the last eight of a list.

    Returns:
        Bytes of one item, on average.  What some share counts once, what all share not
        at all: it was there before.
    """
    if not items:
        return 0
    pieces_of_items = [dict(_pieces_below(item)) for item in items]
    sizes = {key: size for pieces in pieces_of_items for key, size in pieces.items()}
    if len(items) > 1:
        common = set.intersection(*(set(pieces) for pieces in pieces_of_items))
        sizes = {key: size for key, size in sizes.items() if key not in common}
    return sum(sizes.values()) // len(items)


def _pieces_below(item: object) -> Iterator[tuple[int, int]]:
    """Yield what an item keeps: a key for each piece of memory, and its bytes."""
    objects: list[object] = [item]
    seen_ids = {id(item)}
    # The list grows while it is gone through; it keeps what it holds alive, so that no
    # number is given twice.
    for current in objects:
        yield from _pieces_of(current)
        if len(objects) > _MOST_OBJECTS:
            return
        for referent in _kept_by(current):
            if id(referent) not in seen_ids and not is_a(referent, _NOT_ENTERED):
                seen_ids.add(id(referent))
                objects.append(referent)


def _pieces_of(item: object) -> Iterator[tuple[int, int]]:
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
    elif type(item) is mmap.mmap:  # a subclass may have a __len__ of its own
        with contextlib.suppress(ValueError):  # it is closed
            # The number after the object's own stands for what it maps.
            yield id(item) + 1, len(item)


def _graph_pieces(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the tensors that the nodes of an autograd graph have saved."""
    for node in graph_of(tensor, MOST_NODES):
        yield id(node), _NODE_BYTES
        for saved in saved_tensors(node):
            # Leaves are parameters and data, which somebody else keeps.
            if not saved.is_leaf:
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
    return gc.get_referents(item)
