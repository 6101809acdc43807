"""How many of what is alive: taken twice, the difference says what grew."""

from __future__ import annotations

import gc
import io
import itertools
import sys
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.leaks.own_objects import KeptByDetector
from loaderkit.leaks.retained import text_buffer_bytes
from loaderkit.memory.frames import running_locals
from loaderkit.memory.root_search import chunks_of_referents
from loaderkit.memory.tensors import (
    TypeTest,
    describe,
    graph_nodes,
    is_a,
    objects_in_array,
    objects_of,
    tensors_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from loaderkit.leaks.finders.evidence import Memory
    from loaderkit.leaks.trace import Blocks
    from loaderkit.memory.tensors import TensorSignature

LARGE_BYTES = 16 << 10
"""Bytes from which a single array, tensor or text is looked at."""
_TEXTS = (bytes, bytearray, str)
_ARRAYS = (np.ndarray, torch.Tensor, array, io.BytesIO, io.StringIO)
_BUFFERS = (bytearray, array, io.BytesIO, io.StringIO)
"""What grows in place and keeps its ``id``."""
CONTAINERS = (list, dict, set, deque)


@dataclass
class Census(KeptByDetector):
    """Live objects at the end of an epoch, as numbers: it keeps none of them."""

    epoch: int
    """After how many epochs."""
    ids: NDArray[np.int64]
    """``id`` of each container, rising."""
    lengths: NDArray[np.int64]
    """Its length then."""
    kinds: Counter[str]
    """Objects by type, of those that the collector knows."""
    tensors: dict[TensorSignature, tuple[int, int]] = field(default_factory=dict)
    """Count and storage bytes of tensors that look alike."""
    tensor_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """``id`` of each tensor."""
    object_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """``id`` of each object of a class, if the class had at most 200."""
    sizes: frozenset[int] = frozenset()
    """Sizes of single arrays, tensors, buffers and texts, from 16 KiB on."""
    buffers: dict[int, int] = field(default_factory=dict)
    """Size of each of these that can grow in place, by ``id``."""
    graph_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """``id`` of each tensor whose autograd graph was walked."""
    graph_nodes: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )
    """Nodes of each of these graphs."""
    has_all_graphs: bool = True
    """Every graph that was kept was walked."""
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
        lengths = np.full(len(ids), np.iinfo(np.int64).max)
        if len(self.ids):
            positions = np.searchsorted(self.ids, ids)
            # One behind the last stands for none; its id is another one anyway.
            positions = positions.clip(max=len(self.ids) - 1)
            is_known = self.ids[positions] == ids
            lengths[is_known] = self.lengths[positions[is_known]]
        return lengths


@dataclass(frozen=True)
class Heap:
    """Everything that is alive: it is kept for as long as this is."""

    objects: list[Any]
    """What the collector lists."""
    dicts: list[dict[Any, Any]]
    """Dictionaries of arrays, numbers and texts: the collector lists none."""
    large: list[Any]
    """Single arrays, tensors, buffers and texts of 16 KiB or more."""
    object_arrays: list[Any]
    """Arrays of Python objects: what is in them the collector does not see."""

    @property
    def lists(self) -> list[list[Any]]:
        """Its own lists, which hold everything and are nobody's leak."""
        return [self.objects, self.dicts, self.large, self.object_arrays]

    def unlisted_dicts(self) -> list[dict[Any, Any]]:
        """Give the dictionaries that the collector does not list, or lists no more.

        A whole collection since has taken those off its lists that hold no container.
        """
        listed = objects_of(self.objects, TypeTest(_is_dict))
        return [*self.dicts, *itertools.filterfalse(gc.is_tracked, listed)]

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
    object_arrays: dict[int, Any] = {}
    # They stand in cells of the function below, among what the collector lists.
    own_ids = {id(dicts), id(large), id(object_arrays)}
    is_looked_at, is_dict = TypeTest(_is_looked_at), TypeTest(_is_dict)
    is_text, is_array = TypeTest(_is_text), TypeTest(_is_array)

    def note_large(candidates: list[Any]) -> None:
        texts = objects_of(candidates, is_text)
        # In C: there are a million texts.
        is_large = map(LARGE_BYTES.__le__, map(len, texts))
        for text in itertools.compress(texts, is_large):
            large[id(text)] = text
        for array_like in objects_of(candidates, is_array):
            if size_of(array_like) >= LARGE_BYTES:
                large[id(array_like)] = array_like
            if is_a(array_like, np.ndarray) and array_like.dtype == object:
                object_arrays[id(array_like)] = array_like

    # What functions that run hold in variables is among no object's referents.
    chunks = itertools.chain([list(running_locals())], chunks_of_referents(objects))
    for chunk in chunks:
        # Most of a million references lead to functions, types and short texts, so
        # nothing of Python runs for these.
        chosen = objects_of(chunk, is_looked_at)
        note_large(chosen)
        # The collector does not list a dict that holds no container.
        untracked = itertools.filterfalse(gc.is_tracked, objects_of(chosen, is_dict))
        new = {id(item): item for item in untracked if id(item) not in own_ids}
        new = {number: item for number, item in new.items() if number not in dicts}
        dicts.update(new)
        note_large(list(itertools.chain.from_iterable(map(dict.values, new.values()))))
    return Heap(
        objects,
        list(dicts.values()),
        list(large.values()),
        list(object_arrays.values()),
    )


def _is_looked_at(kind: type) -> bool:
    return _is_dict(kind) or _is_text(kind) or _is_array(kind)


def _is_dict(kind: type) -> bool:
    return kind is dict


def _is_text(kind: type) -> bool:
    """Tell whether objects of a type are texts whose length is plain to ask for."""
    # A subclass may have a __len__ of its own, which is the user's code.
    return any(
        issubclass(kind, text) and kind.__len__ is text.__len__ for text in _TEXTS
    )


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
    lengths = np.fromiter(map(item_count, containers), np.int64, len(containers))
    order = np.argsort(ids)
    # Most containers are empty; what an empty one gets later is found all the same.
    order = order[lengths[order] > 0]
    tensors = tensors_in(heap.objects)
    types = Counter(map(type, heap.objects))
    return Census(
        epoch=epoch,
        ids=ids[order],
        lengths=lengths[order],
        kinds=_count_by_name(types, heap),
        tensors=_group_tensors(tensors),
        tensor_ids=np.fromiter(map(id, tensors), np.int64, len(tensors)),
        object_ids=_ids_of_few(types, heap),
        sizes=frozenset(map(size_of, heap.large)),
        buffers={
            id(item): size_of(item) for item in heap.large if is_a(item, _BUFFERS)
        },
        **vars(count_graph_nodes(tensors)),
    )


def _count_by_name(types: Counter[type], heap: Heap) -> Counter[str]:
    """Count objects by the name of their type, without those that are there once."""
    counts: Counter[str] = Counter({"dict": len(heap.dicts)})
    for kind, count in types.items():
        counts[kind.__qualname__] += count
    return Counter({name: count for name, count in counts.items() if count > 1})


_MOST_OF_A_CLASS = 200
"""Objects of one class whose ``id`` is remembered.  Chosen: a class that grows has few
when a run begins, and of all classes together this is a tenth of a census."""


def _ids_of_few(types: Counter[type], heap: Heap) -> NDArray[np.int64]:
    """List the ``id`` of objects of classes that have few, none of Python's own."""
    few = {
        kind
        for kind, count in types.items()
        if count <= _MOST_OF_A_CLASS and not is_builtin(kind)
    }
    objects = objects_of(heap.objects, few.__contains__)
    return np.fromiter(map(id, objects), np.int64, len(objects))


def is_builtin(kind: type) -> bool:
    """Tell whether a type is one of Python's own that need no import."""
    # A metaclass may have its own way to look up attributes.
    return bool(type.__getattribute__(kind, "__module__") == "builtins")


def containers_in(heap: Heap) -> list[Any]:
    """Pick lists, dicts, sets and deques whose length is plain to ask for, and arrays.

    Args:
        heap: Where to look.

    Returns:
        The containers, arrays of Python objects last; none of a class that has a
        ``__len__`` of its own.
    """
    return heap.select(_is_container) + heap.object_arrays


def item_count(container: Any) -> int:
    """Count the items of a container; of an array of objects those that are set.

    Args:
        container: From :func:`containers_in`.

    Returns:
        Items; None and numbers in an array do not count.
    """
    if is_a(container, np.ndarray):
        return len(objects_in_array(container))
    return len(container)


def _is_container(kind: type) -> bool:
    if not issubclass(kind, CONTAINERS):
        return False
    return any(kind.__len__ is base.__len__ for base in CONTAINERS)


def memory_of(item: object) -> Memory:
    """Tell in which memory an object has its values.

    Args:
        item: An array, tensor, text or bytes.

    Returns:
        "device" for a tensor that does not lie on the host.
    """
    if not is_a(item, torch.Tensor):
        return "host"
    return "host" if describe(item).signature.device == "cpu" else "device"


def size_of(item: object) -> int:
    """Weigh one object without what it refers to.

    Args:
        item: An array, tensor, text or bytes.

    Returns:
        Bytes.
    """
    if is_a(item, torch.Tensor):
        return describe(item).storage_bytes
    if is_a(item, np.ndarray):
        return int(item.nbytes)
    if is_a(item, io.StringIO):
        return text_buffer_bytes(item)
    return sys.getsizeof(item)


_MOST_NODES_WALKED = 400_000
"""Of all autograd graphs that are kept; 0.2 s.  Chosen: twenty of the longest."""


@dataclass(frozen=True)
class GraphCounts:
    """How large the autograd graphs are that tensors keep."""

    graph_ids: NDArray[np.int64]
    """``id`` of each tensor whose graph was walked."""
    graph_nodes: NDArray[np.int64]
    """Nodes of each."""
    has_all_graphs: bool
    """No graph was left out."""


def count_graph_nodes(tensors: Iterable[torch.Tensor]) -> GraphCounts:
    """Walk the autograd graphs of tensors, scalars first, since losses are summed up.

    Args:
        tensors: Any.

    Returns:
        The nodes of each that has a graph, until 400,000 nodes were walked.
    """
    with_graph = [tensor for tensor in tensors if tensor.grad_fn is not None]
    counts: dict[int, int] = {}
    left = _MOST_NODES_WALKED
    for tensor in sorted(with_graph, key=lambda tensor: tensor.numel()):
        if left <= 0:
            break
        nodes = graph_nodes(tensor)
        counts[id(tensor)] = nodes
        left -= nodes
    return GraphCounts(
        graph_ids=np.fromiter(counts.keys(), np.int64, len(counts)),
        graph_nodes=np.fromiter(counts.values(), np.int64, len(counts)),
        has_all_graphs=len(counts) == len(with_graph),
    )


def _group_tensors(
    tensors: Iterable[torch.Tensor],
) -> dict[TensorSignature, tuple[int, int]]:
    """Count tensors that look alike, and add up their storages, each once."""
    groups: dict[TensorSignature, tuple[int, int]] = {}
    counted_storages: set[int] = set()
    for tensor in tensors:
        signature, storage_key, size = describe(tensor)
        count, total = groups.get(signature, (0, 0))
        if storage_key not in counted_storages:
            total += size
        groups[signature] = count + 1, total
        counted_storages.add(storage_key)
    return groups
