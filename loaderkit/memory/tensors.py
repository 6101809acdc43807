"""Which tensors are alive, by type, device, dtype and shape; storages counted once."""

from __future__ import annotations

import gc
import itertools
import types
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_NOT_FOLLOWED = (type, types.ModuleType, types.FunctionType, types.CodeType)
_MOST_NODES = 20_000
"""Autograd nodes that are walked; a longer graph is long enough."""
Look = tuple[str, str, str, tuple[int, ...]]
"""Type, device, dtype and shape of a tensor."""


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
    counts: dict[Look, int] = defaultdict(int)
    sizes: dict[Look, int] = defaultdict(int)
    seen: set[int] = set()
    candidates = gc.get_objects() if objects is None else list(objects)
    for tensor in tensors_in(candidates):
        key, storage, size = describe(tensor)
        counts[key] += 1
        sizes[key] += 0 if storage in seen else size
        seen.add(storage)
    groups = [
        TensorGroup(
            kind, device, dtype, shape, count, sizes[kind, device, dtype, shape]
        )
        for (kind, device, dtype, shape), count in counts.items()
    ]
    return sorted(groups, key=lambda group: -group.bytes)


def is_a(each: object, kinds: type | tuple[type, ...]) -> bool:
    """Tell an object's type without asking the object.

    ``isinstance`` reads ``__class__``, which some objects of torch answer with a
    warning, and others by importing modules.

    Args:
        each: Any object at all.
        kinds: Types.

    Returns:
        Whether its type is, or derives from, one of them.
    """
    return issubclass(type(each), kinds)


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


def describe(tensor: torch.Tensor) -> tuple[Look, int, int]:
    """Say what a tensor looks like and which storage it keeps.

    Args:
        tensor: Any, sparse and fake ones included.

    Returns:
        Type, device, dtype and shape; a key of the storage; the storage's bytes.
    """
    try:
        key = (
            type(tensor).__name__, str(tensor.device),
            str(tensor.dtype).removeprefix("torch."), tuple(map(int, tensor.shape)),
        )  # fmt: skip
    except (RuntimeError, TypeError, AttributeError):
        key = (type(tensor).__name__, "unknown", "unknown", ())
    try:
        storages = [part.untyped_storage() for part in _strided(tensor)]
        number = storages[0].data_ptr() or id(tensor)
        return key, number, sum(int(each.nbytes()) for each in storages)
    except (RuntimeError, NotImplementedError, AttributeError):
        return key, id(tensor), 0


def _strided(tensor: torch.Tensor) -> list[torch.Tensor]:
    """List what has a storage: the tensor itself, or the parts of a sparse one."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._values(), tensor._indices()]  # noqa: SLF001 -- uncoalesced too
    parts = [tensor.values()]
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return [*parts, tensor.crow_indices(), tensor.col_indices()]
    return [*parts, tensor.ccol_indices(), tensor.row_indices()]


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
    found = [tensor.grad_fn]
    for node in found:
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                found.append(following)
        if len(found) >= most:
            break
    return found


def tensors_below(each: object, *, most: int = 200_000) -> list[torch.Tensor]:
    """List the tensors that an object reaches: of a module its parameters, and so on.

    Args:
        each: Any object; functions, classes and modules of code are not entered.
        most: Objects after which to stop.

    Returns:
        The tensors, their gradients included.
    """
    met: set[int] = {id(each)}
    level: list[Any] = [each]
    found: list[torch.Tensor] = []
    for one in level:
        if is_a(one, torch.Tensor):
            found.append(one)
            parts = [one.grad] if one.is_leaf and one.grad is not None else []
        else:
            parts = gc.get_referents(one)
        for part in parts:
            if id(part) not in met and not is_a(part, _NOT_FOLLOWED):
                met.add(id(part))
                level.append(part)
        if len(level) > most:
            break
    return found
