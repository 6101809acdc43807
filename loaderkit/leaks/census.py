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

from loaderkit.memory.holders import running_locals
from loaderkit.memory.nearest import chunks_of_referents
from loaderkit.memory.tensors import describe, graph_nodes, is_a, objects_of, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from loaderkit.leaks.trace import Blocks
    from loaderkit.memory.tensors import Look

_ARRAYS = {np.ndarray, torch.Tensor, torch.nn.Parameter}
_TEXTS = {bytes, bytearray, str, array}
_LARGE = 16 << 10
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


def take_census(epoch: int) -> Census:
    """Count what is alive; some 0.1 s, and 2 MB, per 400,000 objects.

    Args:
        epoch: To remember.

    Returns:
        The counts.
    """
    objects = gc.get_objects()
    dicts, sizes = below(objects)
    objects += dicts
    containers = containers_in(objects)
    ids = np.fromiter(map(id, containers), np.int64, len(containers))
    lengths = np.fromiter(map(len, containers), np.int64, len(containers))
    order = np.argsort(ids)
    order = order[lengths[order] > 0]
    kinds: Counter[str] = Counter()
    for kind, count in Counter(map(type, objects)).items():
        kinds[kind.__qualname__] += count
    tensors = tensors_in(objects)
    return Census(
        epoch, ids[order], lengths[order],
        Counter({kind: n for kind, n in kinds.items() if n > 1}),
        _alike(tensors), sizes, max(map(graph_nodes, _largest(tensors)), default=0),
    )  # fmt: skip


def containers_in(objects: list[Any]) -> list[Any]:
    """Pick lists, dicts, sets and deques whose length is plain to ask for.

    Args:
        objects: Any.

    Returns:
        The containers; none of a class that has a ``__len__`` of its own.
    """
    return objects_of(objects, _is_container)


def _is_container(kind: type) -> bool:
    if not issubclass(kind, CONTAINERS):
        return False
    return any(kind.__len__ is base.__len__ for base in CONTAINERS)


def untracked_dicts(objects: list[Any]) -> list[dict[Any, Any]]:
    """Find dictionaries of arrays, numbers and texts: the collector lists none.

    Args:
        objects: Those that it does; the list is not changed.

    Returns:
        Dictionaries that these, or variables of running functions, refer to.
    """
    return below(objects)[0]


def below(objects: list[Any]) -> tuple[list[dict[Any, Any]], frozenset[int]]:
    """Look one step below objects, at what the collector does not list.

    Args:
        objects: Those that it does; the list is not changed.

    Returns:
        Untracked dictionaries, and the sizes of large single objects.
    """
    found: dict[int, dict[Any, Any]] = {}
    sizes: set[int] = set()
    # Most of some million references lead to functions, types and short texts.
    in_functions = list(running_locals())
    for chunk in itertools.chain([in_functions], chunks_of_referents(objects)):
        kinds = list(map(type, chunk))
        texts = list(_of_types(_TEXTS, chunk, kinds))
        is_large = map(_LARGE.__le__, map(len, texts))
        sizes.update(map(size_of, itertools.compress(texts, is_large)))
        sizes.update(map(size_of, _of_types(_ARRAYS, chunk, kinds)))
        dicts = _of_types({dict}, chunk, kinds)
        for each in itertools.filterfalse(gc.is_tracked, dicts):
            found[id(each)] = each
            sizes.update(size_of(v) for v in each.values() if type(v) in _ARRAYS)
    large = frozenset(size for size in sizes if size >= _LARGE)
    return list(found.values()), large


def _of_types(wanted: set[Any], objects: list[Any], kinds: list[type]) -> Iterator[Any]:
    return itertools.compress(objects, map(wanted.__contains__, kinds))


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
