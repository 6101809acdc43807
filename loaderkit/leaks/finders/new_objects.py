"""Finds types of which there are more, though no container that was there holds more.

Such are the links of a chain, objects that attributes refer to, and what no variable
leads to at all.
"""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loaderkit.leaks.census import is_builtin, take_census
from loaderkit.leaks.finders.array_holder import holder_of_array
from loaderkit.leaks.finders.bounds import bound_of_cached
from loaderkit.leaks.finders.items import describe_items
from loaderkit.leaks.growth import Growth, explains
from loaderkit.leaks.own_objects import is_own_type
from loaderkit.leaks.retained import MOST_NODES, retained_bytes, saved_tensors
from loaderkit.leaks.unrooted import is_in_autograd_cycle, may_be_exit_handlers
from loaderkit.memory.holders import holders_of
from loaderkit.memory.root_search import closest_to_a_root
from loaderkit.memory.tensors import (
    describe,
    graph_of,
    objects_in_array,
    tensors_in,
)

if TYPE_CHECKING:
    import torch

    from loaderkit.leaks.census import Census
    from loaderkit.leaks.finders.evidence import HeapEvidence
    from loaderkit.leaks.patterns import PatternName
    from loaderkit.memory.holder import Holder
    from loaderkit.memory.tensors import TensorSignature

_FEWEST_TENSORS = 2
_FEWEST_OBJECTS = 8
"""Of one kind.  Chosen: Python makes no tensors by itself, but some objects of many
types."""
_MOST_TYPES = 3
"""Types that are looked at, those of which most came."""
_LEAST_SHARE_OF_NEW = 0.5
"""Of the objects of a type of Python's own, so that those which are asked are new: a
process has 10,000 tuples and dicts of its modules."""
_MOST_GRAPHS = 20
"""Tensors, the newest, in whose autograd graphs saved tensors are looked for."""
_MOST_ASKED = 6
"""Objects without a holder among which a cycle through autograd is looked for."""


def find_new_objects(evidence: HeapEvidence) -> list[Growth]:
    """Find tensors that look alike, or else objects of a type, that became more.

    Args:
        evidence: What is alive now, and was then.

    Returns:
        At most one growth: the heaviest tensors, or the most frequent type.
    """
    now = take_census(evidence.run_epochs, evidence.heap)
    signature = _heaviest_new_signature(evidence, now)
    if signature is not None:
        return [_growth_of_tensors(evidence, now, signature)]
    more_of_type = now.kinds - evidence.before.kinds
    for name, count in more_of_type.most_common(_MOST_TYPES):
        if count >= max(_FEWEST_OBJECTS, 2 * evidence.epochs):
            growth = _growth_of_type(evidence, name, count)
            if growth is not None:
                return [growth]
    return []


def _heaviest_new_signature(
    evidence: HeapEvidence, now: Census
) -> TensorSignature | None:
    """Pick the kind of tensors by which most bytes came."""
    fewest = max(_FEWEST_TENSORS, evidence.epochs / 2)
    more_bytes: dict[TensorSignature, int] = {}
    for signature, (count, size) in now.tensors.items():
        count_before, size_before = evidence.before.tensors.get(signature, (0, 0))
        if count - count_before >= fewest:
            more_bytes[signature] = size - size_before
    if not more_bytes:
        return None
    return max(
        more_bytes,
        key=lambda signature: (more_bytes[signature], now.tensors[signature]),
    )


def _growth_of_tensors(
    evidence: HeapEvidence,
    now: Census,
    signature: TensorSignature,
) -> Growth:
    """Say who holds new tensors that look alike."""
    count, size = now.tensors[signature]
    count_before, size_before = evidence.before.tensors.get(signature, (0, 0))
    per_epoch = (count - count_before) / evidence.epochs
    bytes_per_epoch = (size - size_before) // evidence.epochs
    tensors: list[torch.Tensor] = [
        tensor
        for tensor in tensors_in(evidence.heap.objects)
        if describe(tensor).signature == signature
    ]
    # Not one that was there before: somebody else may keep tensors that look alike.
    old_ids = set(evidence.before.tensor_ids.tolist())
    tensors = [tensor for tensor in tensors if id(tensor) not in old_ids] or tensors
    holder = _most_named(_some_holders(evidence, tensors))
    if not holder.held:
        return _growth_without_holder(evidence, tensors, per_epoch, bytes_per_epoch)
    pattern: PatternName = "kept tensors" if tensors[-1].grad_fn is None else "graph"
    bound = bound_of_cached(tensors[-1], per_epoch)
    return Growth(
        pattern=pattern if bound is None else "bounded",
        what=holder.kind,
        items=describe_items(tensors[-1:]),
        per_epoch=per_epoch,
        bytes_per_epoch=bytes_per_epoch,
        holder=holder,
        bound=bound,
    )


def _growth_of_type(
    evidence: HeapEvidence,
    name: str,
    count: int,
) -> Growth | None:
    """Say who holds new objects of a type.

    Which objects are new is not known of a class that had many before.  Where those
    that are asked name a holder each, they were there before: others of the type came
    once, with an imported module, or native code keeps them.  None then, and where they
    weigh next to nothing of what grows.
    """
    objects = [
        item
        for item in evidence.heap.objects
        if type(item).__qualname__ == name
        and id(item) not in evidence.ignored_ids
        and not is_own_type(type(item))
    ]
    old_ids = set(evidence.before.object_ids.tolist())
    objects = [item for item in objects if id(item) not in old_ids] or objects
    if not objects:
        return None
    count = min(count, len(objects))
    if is_builtin(type(objects[-1])) and count < _LEAST_SHARE_OF_NEW * len(objects):
        return None
    per_epoch = count / evidence.epochs
    item_bytes = retained_bytes(
        objects[-1:],
        sibling_ids=frozenset(map(id, objects)),
        older_ids=evidence.older_ids,
    )
    bytes_per_epoch = item_bytes * count // evidence.epochs
    holders = _some_holders(evidence, objects)
    roots = {_root_of(holder) for holder in holders}
    if len(holders) > 1 and len(roots) == len(holders):
        return None
    holder = _most_named(holders)
    if not holder.held:
        return _growth_without_holder(evidence, objects, per_epoch, bytes_per_epoch)
    bound = bound_of_cached(objects[-1], per_epoch)
    growth = Growth(
        pattern="objects" if bound is None else "bounded",
        what=holder.kind,
        items=name,
        per_epoch=per_epoch,
        bytes_per_epoch=bytes_per_epoch,
        holder=holder,
        bound=bound,
    )
    return growth if explains([growth], evidence.bytes_per_epoch) else None


def _growth_without_holder(
    evidence: HeapEvidence,
    objects: list[Any],
    per_epoch: float,
    bytes_per_epoch: int,
) -> Growth:
    """Name what keeps objects that no variable leads to, where that can be shown."""
    items = describe_items(objects[-1:])
    newest = objects[-_MOST_ASKED:]
    if evidence.collects_by_itself:
        gc.collect()  # the search for holders leaves cycles that refer to them
    if any(is_in_autograd_cycle(tensor) for tensor in tensors_in(newest)):
        return Growth("autograd cycle", "a cycle", items, per_epoch, bytes_per_epoch)
    if may_be_exit_handlers(objects[-1:], evidence.more_exit_handlers, per_epoch):
        return Growth("exit handlers", "atexit", items, per_epoch, bytes_per_epoch)
    return Growth("unknown holder", "something", items, per_epoch, bytes_per_epoch)


def _some_holders(evidence: HeapEvidence, objects: list[Any]) -> list[Holder]:
    """Ask of the first, the middle and the last who holds them.

    Of a chain none of these may be near a variable; then the one that is tells.

    Returns:
        Who holds those that something holds; one that holds nothing if there are none.
    """
    asked = [objects[-1], objects[len(objects) // 2], objects[0]]
    # Of few objects two of these are the same, which must not count twice.
    asked_by_id = {id(item): item for item in asked}
    ignore = [objects, asked, asked_by_id, *evidence.heap.lists]
    holders = [
        holders_of(item, most=1, ignore=ignore)[0] for item in asked_by_id.values()
    ]
    held = [holder for holder in holders if holder.held]
    # Then from the outside in, through what no search upwards comes past.
    if not held:
        held = _holders_of_arrays_with(evidence, asked)
    if not held:
        held = _holders_of_graphs_with(evidence, asked)
    if not held:
        closest = closest_to_a_root(objects)
        if closest is None:
            return holders[:1]
        held = holders_of(closest, most=1, ignore=ignore)
    return held


def _holders_of_arrays_with(evidence: HeapEvidence, objects: list[Any]) -> list[Holder]:
    """Ask who holds the arrays of Python objects in which objects stand.

    The collector does not enter arrays, so that no search upwards comes past them.
    """
    wanted_ids = set(map(id, objects))
    holders = [
        holder_of_array(array, evidence.heap)
        for array in evidence.heap.object_arrays
        if not wanted_ids.isdisjoint(map(id, objects_in_array(array)))
    ]
    return [holder for holder in holders if holder.held]


def _holders_of_graphs_with(evidence: HeapEvidence, objects: list[Any]) -> list[Holder]:
    """Ask who holds the newest autograd graphs that have saved tensors for backward.

    Their nodes are objects of C++: no search upwards comes past them either.
    """
    wanted = {describe(tensor).storage_key for tensor in tensors_in(objects)}
    with_graph = [
        tensor
        for tensor in tensors_in(evidence.heap.objects)
        if tensor.grad_fn is not None
    ]
    for tensor in with_graph[: -_MOST_GRAPHS - 1 : -1]:
        saved = itertools.chain.from_iterable(
            map(saved_tensors, graph_of(tensor, MOST_NODES))
        )
        if any(describe(tensor).storage_key in wanted for tensor in saved):
            ignore = [with_graph, *evidence.heap.lists]
            holder = holders_of(tensor, most=1, ignore=ignore)[0]
            if holder.held:
                return [replace(holder, through_graph=True)]
    return []


def _most_named(holders: list[Holder]) -> Holder:
    roots = [_root_of(holder) for holder in holders]
    return max(holders, key=lambda holder: roots.count(_root_of(holder)))


def _root_of(holder: Holder) -> tuple[str, str]:
    """Give the variable at which a way begins."""
    return holder.kind, holder.path.split("[")[0]
