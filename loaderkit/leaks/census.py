"""How many of what is alive: taken twice, the difference says what grew."""

from __future__ import annotations

import gc
import itertools
import sys
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.memory.frames import running_locals
from loaderkit.memory.root_search import chunks_of_referents
from loaderkit.memory.tensors import (
    TypeTest,
    describe,
    graph_nodes,
    is_a,
    objects_of,
    tensors_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from loaderkit.leaks.trace import Blocks
    from loaderkit.memory.tensors import Look

_LARGE = 16 << 10
"""Bytes from which a single array, tensor or text is looked at."""
_TEXTS = (bytes, bytearray, str)
_ARRAYS = (np.ndarray, torch.Tensor, array)
CONTAINERS = (list, dict, set, deque)


@dataclass
class Census:
    """Live objects at the end of an epoch, as numbers: it keeps none of them."""

    epoch: int
    """After how many epochs."""
    ids: NDArray[np.int64]
    """``id`` of each container, rising."""
    lengths: NDArray[np.int64]
    """Its length then."""
    kinds: Counter[str]
    """Objects by type, of those that the collector knows."""
    tensors: dict[Look, tuple[int, int]] = field(default_factory=dict)
    """Count and storage bytes of tensors that look alike."""
    tensor_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """``id`` of each tensor."""
    sizes: frozenset[int] = frozenset()
    """Sizes of single arrays, tensors and texts, from 16 KiB on."""
    graph_nodes: int = 0
    """Nodes of the largest autograd graph that is kept."""
    blocks: Blocks = field(default_factory=dict)
    """Memory of the device by who asked for it, if that is recorded anyway."""

    def lengths_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Look up how long containers were.

        Args:
            ids: The ``id`` of each, alive now [containers].

        Returns:
            Their lengths then; the largest integer for those that were empty or not
            there [containers].
        """
        found = np.full(len(ids), np.iinfo(np.int64).max)
        if len(self.ids):
            places = np.searchsorted(self.ids, ids).clip(max=len(self.ids) - 1)
            same = self.ids[places] == ids
            found[same] = self.lengths[places[same]]
        return found


@dataclass(frozen=True)
class Heap:
    """Everything that is alive: it is kept for as long as this is."""

    objects: list[Any]
    """What the collector lists."""
    dicts: list[dict[Any, Any]]
    """Dictionaries of arrays, numbers and texts: the collector lists none."""
    large: list[Any]
    """Single arrays, tensors and texts of 16 KiB or more."""

    @property
    def lists(self) -> list[list[Any]]:
        """Its own lists, which hold everything and are nobody's leak."""
        return [self.objects, self.dicts, self.large]

    def select(self, is_wanted: Callable[[type], bool]) -> list[Any]:
        """Pick objects and dictionaries by type."""
        return objects_of(self.objects, is_wanted) + objects_of(self.dicts, is_wanted)


def look_at_heap() -> Heap:
    """List what is alive, and look one step below what the collector lists.

    Returns:
        The objects; some 0.1 s per 100,000.
    """
    objects = gc.get_objects()
    dicts: dict[int, dict[Any, Any]] = {}
    large: dict[int, Any] = {}
    is_looked_at, is_dict = TypeTest(_is_looked_at), TypeTest(_is_dict)
    is_text, is_array = TypeTest(_is_text), TypeTest(_is_array)

    def keep_large(candidates: list[Any]) -> None:
        texts = objects_of(candidates, is_text)
        is_large = map(_LARGE.__le__, map(len, texts))
        arrays = objects_of(candidates, is_array)
        large_arrays = [each for each in arrays if size_of(each) >= _LARGE]
        for each in [*itertools.compress(texts, is_large), *large_arrays]:
            large[id(each)] = each

    in_functions = list(running_locals())
    for chunk in itertools.chain([in_functions], chunks_of_referents(objects)):
        # Most of a million references lead to functions, types and short texts, so
        # nothing of Python runs for these.
        chosen = objects_of(chunk, is_looked_at)
        untracked = itertools.filterfalse(gc.is_tracked, objects_of(chosen, is_dict))
        new = {id(each): each for each in untracked if id(each) not in dicts}
        dicts.update(new)
        keep_large(chosen)
        keep_large(list(itertools.chain.from_iterable(map(dict.values, new.values()))))
    return Heap(objects, list(dicts.values()), list(large.values()))


def _is_looked_at(kind: type) -> bool:
    return _is_dict(kind) or _is_text(kind) or _is_array(kind)


def _is_dict(kind: type) -> bool:
    return kind is dict


def _is_text(kind: type) -> bool:
    """Tell whether objects of a type are texts whose length is plain to ask for."""
    return any(issubclass(kind, t) and kind.__len__ is t.__len__ for t in _TEXTS)


def _is_array(kind: type) -> bool:
    return issubclass(kind, _ARRAYS)


def take_census(epoch: int, heap: Heap | None = None) -> Census:
    """Count what is alive; it takes 2 MB per 400,000 objects.

    Args:
        epoch: To remember.
        heap: What is alive; looked at if None.

    Returns:
        The counts.
    """
    heap = look_at_heap() if heap is None else heap
    containers = containers_in(heap)
    ids = np.fromiter(map(id, containers), np.int64, len(containers))
    lengths = np.fromiter(map(len, containers), np.int64, len(containers))
    order = np.argsort(ids)
    order = order[lengths[order] > 0]
    kinds: Counter[str] = Counter()
    types = itertools.chain(map(type, heap.objects), map(type, heap.dicts))
    for kind, count in Counter(types).items():
        kinds[kind.__qualname__] += count
    tensors = tensors_in(heap.objects)
    return Census(
        epoch, ids[order], lengths[order],
        Counter({kind: n for kind, n in kinds.items() if n > 1}), _alike(tensors),
        np.fromiter(map(id, tensors), np.int64, len(tensors)),
        frozenset(map(size_of, heap.large)),
        max(map(graph_nodes, _largest(tensors)), default=0),
    )  # fmt: skip


def containers_in(heap: Heap) -> list[Any]:
    """Pick lists, dicts, sets and deques whose length is plain to ask for.

    Args:
        heap: Where to look.

    Returns:
        The containers; none of a class that has a ``__len__`` of its own.
    """
    return heap.select(_is_container)


def _is_container(kind: type) -> bool:
    if not issubclass(kind, CONTAINERS):
        return False
    return any(kind.__len__ is base.__len__ for base in CONTAINERS)


def size_of(each: Any) -> int:
    """Weigh one object without what it refers to.

    Args:
        each: An array, tensor, text or bytes.

    Returns:
        Bytes.
    """
    if is_a(each, torch.Tensor):
        return describe(each)[2]
    if is_a(each, np.ndarray):
        return int(each.nbytes)
    return sys.getsizeof(each)


def _largest(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Pick tensors to walk the graph of: scalars first, since losses are summed up."""
    with_graph = [each for each in tensors if each.grad_fn is not None]
    return sorted(with_graph, key=lambda each: each.numel())[:20]


def _alike(tensors: Iterable[torch.Tensor]) -> dict[Look, tuple[int, int]]:
    found: dict[Look, tuple[int, int]] = {}
    seen: set[int] = set()
    for tensor in tensors:
        key, storage, size = describe(tensor)
        count, total = found.get(key, (0, 0))
        found[key] = count + 1, total + (0 if storage in seen else size)
        seen.add(storage)
    return found
