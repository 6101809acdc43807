"""Which tensors are alive, by type, device, dtype and shape; storages counted once."""

from __future__ import annotations

import gc
import itertools
import types
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import torch

from loaderkit.nests import dense_parts
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from typing_extensions import TypeIs

T = TypeVar("T")
_NOT_ENTERED = (type, types.ModuleType, types.FunctionType, types.CodeType)
_MOST_NODES = 20_000
"""Autograd nodes that are walked, which takes 5 ms (measured); a longer graph is long
enough."""


class TensorSignature(NamedTuple):
    """What a tensor looks like: those that are equal in this are grouped."""

    kind: str
    """Name of its type."""
    device: str
    dtype: str
    shape: tuple[int, ...]


class TensorDescription(NamedTuple):
    """What a tensor looks like, and which storage it keeps."""

    signature: TensorSignature
    storage_key: int
    """The same for tensors that share a storage."""
    storage_bytes: int


@dataclass(frozen=True)
class TensorGroup:
    """Live tensors that look alike."""

    kind: str
    """"Tensor", "Parameter" or the name of a subclass."""
    device: str
    """Such as "cpu" or "cuda:0"."""
    dtype: str
    """Such as "float32"."""
    shape: tuple[int, ...]
    """Of each."""
    count: int
    """How many."""
    bytes: int
    """Their storages; one that several tensors share counts for the first only."""

    def __str__(self) -> str:
        shape = list(self.shape)
        return (
            f"{self.count} x {self.kind} {shape} {self.dtype} on {self.device}, "
            f"{format_bytes(self.bytes)}"
        )


def live_tensors(objects: Iterable[Any] | None = None) -> list[TensorGroup]:
    """Group the tensors that Python can reach; takes some 0.1 s.

    Args:
        objects: Where to look; everything the collector knows if None.

    Returns:
        The groups, the largest first.
    """
    counts: dict[TensorSignature, int] = defaultdict(int)
    sizes: dict[TensorSignature, int] = defaultdict(int)
    counted_storages: set[int] = set()
    candidates = gc.get_objects() if objects is None else list(objects)
    for tensor in tensors_in(candidates):
        signature, storage_key, size = describe(tensor)
        counts[signature] += 1
        if storage_key not in counted_storages:
            sizes[signature] += size
        counted_storages.add(storage_key)
    groups = [
        TensorGroup(*signature, count=count, bytes=sizes[signature])
        for signature, count in counts.items()
    ]
    return sorted(groups, key=lambda group: -group.bytes)


@overload
def is_a(item: object, kinds: type[T]) -> TypeIs[T]: ...


@overload
def is_a(item: object, kinds: tuple[type, ...]) -> bool: ...


def is_a(item: object, kinds: type | tuple[type, ...]) -> bool:
    """Tell an object's type without asking the object.

    ``isinstance`` reads ``__class__``, which some objects of torch answer with a
    warning, and others by importing modules.

    Args:
        item: Any object at all.
        kinds: Types.

    Returns:
        Whether its type is, or derives from, one of them.
    """
    return issubclass(type(item), kinds)


def tensors_in(objects: Sequence[Any]) -> list[torch.Tensor]:
    """Pick the tensors out of objects, without asking objects for their class.

    Args:
        objects: Any.

    Returns:
        The tensors.
    """
    return objects_of(objects, lambda kind: issubclass(kind, torch.Tensor))


def objects_of(objects: Sequence[Any], is_wanted: Callable[[type], bool]) -> list[Any]:
    """Pick objects by type, each type looked at once.

    A heap has a million objects: a Python loop over them takes half a second, and four
    times as long under coverage or a profiler; this one runs in C.

    Args:
        objects: Any.
        is_wanted: Tells by type; a ``TypeTest`` remembers it for the next objects.

    Returns:
        Those whose type is wanted, in their order.
    """
    test = is_wanted if isinstance(is_wanted, TypeTest) else TypeTest(is_wanted)
    return list(itertools.compress(objects, map(test.__getitem__, map(type, objects))))


def referents_of(objects: Sequence[Any]) -> list[Any]:
    """List what objects refer to directly, as often as they do.

    It is ``gc.get_referents`` for all but modules, of which it gives the variables.
    Python 3.12's ``_asyncio`` shows its freed objects too, which must not be referred
    to: once a coroutine had waited, as in any notebook, the list of them went in a
    circle, and took all memory.

    Args:
        objects: Any; those that the collector does not enter refer to nothing.
    """
    modules = objects_of(objects, _IS_MODULE)
    if not modules:
        return gc.get_referents(*objects)
    others = objects_of(objects, _IS_NO_MODULE)
    return [*gc.get_referents(*others), *map(_variables_of, modules)]


def _variables_of(module: types.ModuleType) -> Any:
    # Not by an attribute: a module may have a class with code of its own.
    return object.__getattribute__(module, "__dict__")


_PLAIN_TYPES = (type(None), bool, int, float)


def objects_in_array(array: np.ndarray[Any, Any]) -> list[Any]:
    """List what stands in an array of Python objects, in order, without plain numbers.

    Args:
        array: Of any dtype.

    Returns:
        The objects that are no number and not None; none of an array of numbers.
    """
    if array.dtype != object:
        return []
    # What is broadcast stands in memory once: 10^9 items of a view may be one object.
    axes = (slice(1) if stride == 0 else slice(None) for stride in array.strides)
    once = (..., *axes)  # with "...", what is left of an array [] is an array too
    items: list[Any] = array[once].ravel().tolist()
    return objects_of(items, lambda kind: kind not in _PLAIN_TYPES)


class TypeTest(dict[type, bool]):
    """What a function tells of types, asked once for each.

    Args:
        is_wanted: Tells by type.
    """

    def __init__(self, is_wanted: Callable[[type], bool]) -> None:
        super().__init__()
        self._is_wanted = is_wanted

    def __missing__(self, kind: type) -> bool:
        """Ask about a type that is new."""
        answer = self[kind] = self._is_wanted(kind)
        return answer

    def __call__(self, kind: type) -> bool:
        """Tell of one type."""
        return self[kind]


_IS_MODULE = TypeTest(lambda kind: issubclass(kind, types.ModuleType))
_IS_NO_MODULE = TypeTest(lambda kind: not issubclass(kind, types.ModuleType))


def describe(tensor: torch.Tensor) -> TensorDescription:
    """Say what a tensor looks like and which storage it keeps.

    Args:
        tensor: Any, sparse and fake ones included.

    Returns:
        Its signature; a key of the storage; the storage's bytes.
    """
    signature = _signature_of(tensor)
    try:
        components = dense_parts(tensor)
        storages = [component.untyped_storage() for component in components]
        storage_key = id(tensor)
        # Storages on "meta", which those of fake tensors are, have no memory: torch
        # warns of a fake tensor's address.
        if storages[0].device.type != "meta":
            storage_key = storages[0].data_ptr() or storage_key
        size = sum(int(storage.nbytes()) for storage in storages)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return TensorDescription(signature, id(tensor), 0)
    return TensorDescription(signature, storage_key, size)


def _signature_of(tensor: torch.Tensor) -> TensorSignature:
    """Ask a tensor for its device, dtype and shape; some subclasses do not tell."""
    kind = type(tensor).__name__
    try:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return TensorSignature(
            kind, str(tensor.device), dtype, tuple(map(int, tensor.shape))
        )
    except (RuntimeError, TypeError, AttributeError):
        return TensorSignature(kind, "unknown", "unknown", ())


def graph_nodes(tensor: torch.Tensor) -> int:
    """Count the nodes of the autograd graph that a tensor keeps.

    Args:
        tensor: Any.

    Returns:
        Their number, at most 20,000; 0 when it keeps none.
    """
    return len(graph_of(tensor))


def graph_of(tensor: torch.Tensor, most: int = _MOST_NODES) -> list[Any]:
    """List the nodes of the autograd graph that a tensor keeps, nearest first.

    Args:
        tensor: Any.
        most: Nodes after which to stop.

    Returns:
        torch's nodes; holding the list keeps the graph.
    """
    if tensor.grad_fn is None:
        return []
    seen = {tensor.grad_fn}
    nodes = [tensor.grad_fn]
    # The list grows while it is gone through: breadth first, without recursion, since
    # a graph may be deeper than Python's stack.
    for node in nodes:
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                nodes.append(next_node)
        if len(nodes) >= most:
            break
    return nodes


def tensors_below(root: object, *, most: int = 200_000) -> list[torch.Tensor]:
    """List the tensors that an object reaches: of a module its parameters, and so on.

    Args:
        root: Any object; functions, classes and modules of code are not entered.
        most: Objects after which to stop.

    Returns:
        The tensors, their gradients included.
    """
    seen_ids: set[int] = {id(root)}
    objects: list[Any] = [root]
    tensors: list[torch.Tensor] = []
    # The list grows while it is gone through, as above.
    for item in objects:
        if is_a(item, torch.Tensor):
            tensors.append(item)
            # Of a tensor that is no leaf, torch warns when it is asked for .grad.
            referents = [item.grad] if item.is_leaf and item.grad is not None else []
        else:
            referents = referents_of([item])
        for referent in referents:
            if id(referent) not in seen_ids and not is_a(referent, _NOT_ENTERED):
                seen_ids.add(id(referent))
                objects.append(referent)
        if len(objects) > most:
            break
    return tensors
