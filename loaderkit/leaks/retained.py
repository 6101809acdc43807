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
MOST_NODES = 300
"""Nodes of an autograd graph that are weighed."""
_NOT_OWNED = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType)


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
    weights = [dict(_pieces(item)) for item in items]
    common = set.intersection(*(set(weight) for weight in weights))
    sizes = {key: size for weight in weights for key, size in weight.items()}
    if len(items) > 1:
        sizes = {key: size for key, size in sizes.items() if key not in common}
    return sum(sizes.values()) // len(items)


def _pieces(item: Any) -> Iterator[tuple[int, int]]:
    """Yield what an item keeps: a key for each piece of memory, and its bytes."""
    level, seen = [item], {id(item)}
    for each in level:
        yield from _piece(each)
        if len(level) > _MOST_OBJECTS:
            return
        for part in _parts(each):
            if id(part) not in seen and not is_a(part, _NOT_OWNED):
                seen.add(id(part))
                level.append(part)


def _piece(each: Any) -> Iterator[tuple[int, int]]:
    kind = type(each)
    with contextlib.suppress(Exception):
        yield id(each), sys.getsizeof(each)
    if issubclass(kind, torch.Tensor):
        _, storage, size = describe(each)
        yield storage, size
        yield from _graph_pieces(each)
    elif issubclass(kind, np.ndarray):
        base = each
        while is_a(base.base, np.ndarray):
            base = base.base
        if base is not each:
            yield id(base), int(base.nbytes)
    elif kind is mmap.mmap:
        with contextlib.suppress(ValueError):
            yield id(each) + 1, len(each)


def _graph_pieces(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the tensors that the nodes of an autograd graph have saved."""
    for node in graph_of(tensor, MOST_NODES):
        yield id(node), 200
        for name in dir(node):
            if name.startswith("_saved_"):
                with contextlib.suppress(Exception):  # freed, or no tensor
                    saved = getattr(node, name)
                    if is_a(saved, torch.Tensor) and not saved.is_leaf:
                        _, storage, size = describe(saved)
                        yield storage, size


def _parts(each: Any) -> Sequence[Any]:
    """List what an object keeps; of functions only what they close over."""
    if is_a(each, types.FunctionType):
        return [*(each.__closure__ or ()), *(each.__defaults__ or ())]
    if is_a(each, torch.Tensor) and each.grad_fn is not None:
        return []
    return gc.get_referents(each)
