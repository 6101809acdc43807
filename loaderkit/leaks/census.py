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
from loaderkit.memory.nearest import referents_of
from loaderkit.memory.tensors import describe, graph_nodes, is_a

if TYPE_CHECKING:
    from collections.abc import Iterable

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

    def length(self, container: object) -> int | None:
        """Look up how long a container was.

        Args:
            container: One that is alive now.

        Returns:
            Its length then; None when it was empty or not there.
        """
        place = int(np.searchsorted(self.ids, id(container)))
        if place < len(self.ids) and self.ids[place] == id(container):
            return int(self.lengths[place])
        return None


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
    ids, lengths = [], []
    kinds: Counter[str] = Counter()
    tensors: list[torch.Tensor] = []
    sorts = _Sorts()
    for each in objects:
        kind = type(each)
        kinds[kind.__qualname__] += 1
        sort = sorts[kind]
        if sort == "container" and len(each):
            ids.append(id(each))
            lengths.append(len(each))
        elif sort == "tensor":
            tensors.append(each)
    order = np.argsort(np.asarray(ids, np.int64))
    return Census(
        epoch, np.asarray(ids, np.int64)[order], np.asarray(lengths, np.int64)[order],
        Counter({kind: n for kind, n in kinds.items() if n > 1}),
        _alike(tensors), sizes, max(map(graph_nodes, _largest(tensors)), default=0),
    )  # fmt: skip


class _Sorts(dict[type, str]):
    """What a census does with objects of a type, worked out once a type."""

    def __missing__(self, kind: type) -> str:
        sort = ""
        if issubclass(kind, CONTAINERS):
            plain = any(kind.__len__ is base.__len__ for base in CONTAINERS)
            sort = "container" if plain else ""
        elif issubclass(kind, torch.Tensor):
            sort = "tensor"
        self[kind] = sort
        return sort


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
    for each in itertools.chain(running_locals(), referents_of(objects)):
        kind = type(each)
        if kind in _TEXTS:
            if len(each) >= _LARGE:
                sizes.add(size_of(each))
        elif kind in _ARRAYS:
            sizes.add(size_of(each))
        elif kind is dict and not gc.is_tracked(each):
            found[id(each)] = each
            sizes.update(size_of(v) for v in each.values() if type(v) in _ARRAYS)
    large = frozenset(size for size in sizes if size >= _LARGE)
    return list(found.values()), large


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
