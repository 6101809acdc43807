"""What grew since a census, and who holds it."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import mmap
import multiprocessing
import multiprocessing.synchronize
import socket
import subprocess
import threading
import types
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.leaks.census import containers_in, look_at_heap, take_census
from loaderkit.leaks.growth import Growth
from loaderkit.leaks.longest import find_longest
from loaderkit.leaks.retained import MOST_NODES, retained_bytes
from loaderkit.leaks.unrooted import is_in_autograd_cycle, may_be_exit_handlers
from loaderkit.memory.holders import holders_of
from loaderkit.memory.root_search import closest_to_a_root
from loaderkit.memory.tensors import (
    describe,
    graph_nodes,
    is_a,
    tensors_below,
    tensors_in,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loaderkit.leaks.census import Census, Heap
    from loaderkit.memory.holders import Holder

_SAMPLE = 6
"""Items of a container that are weighed: the newest."""
_APART = 4
"""Neighbours may be rows of one tensor."""
_SELDOM = 12
"""Epochs in which a container that is looked at has grown by an item: a snapshot every
tenth epoch is a leak too."""
_WEIGHED = 300
"""Containers that are weighed, those that grew by the most items."""
_BY_TYPE = (
    ("exceptions", BaseException),
    ("files", io.IOBase),
    ("sockets", socket.socket),
    ("threads", threading.Thread),
    ("children", (subprocess.Popen, multiprocessing.process.BaseProcess)),
    ("mappings", (mmap.mmap, np.memmap)),
    ("semaphores", multiprocessing.synchronize.SemLock),
)
"""Patterns of what holds more than memory."""
_LOOKED_THROUGH = 200
"""Objects below an item among which tensors are looked for."""
_NAMED = 6
"""Containers whose holders are looked for, the heaviest."""
_ROOM = __name__.rpartition(".")[0] + "."
_PLAIN = (int, float, complex, bool, type(None))


def find_growth(
    before: Census,
    epoch: int,
    *,
    most: int = 3,
    ignore: Sequence[object] = (),
    rate: float = 0.0,
    more_exit_handlers: float = 0.0,
) -> list[Growth]:
    """Compare what is alive with a census.

    Args:
        before: Taken some epochs ago.
        epoch: Epochs that have ended by now.
        most: Growths to name.
        ignore: Containers that grow because we watch.
        rate: Bytes an epoch by which memory grows, to know a single array that grows.
        more_exit_handlers: How many functions more atexit knows each epoch.

    Returns:
        What grew, the heaviest first; empty when no Python object did.
    """
    epochs = max(1, epoch - before.epoch)
    # A list that we make now can have the number of one that was freed meanwhile.
    arrays = (before.ids, before.lengths, before.tensor_ids)
    ours = {id(each) for each in (ignore, *ignore, *arrays)}
    heap = look_at_heap()
    ours |= set(map(id, heap.lists))
    found = _containers(heap, before, epochs, ours)
    chain = _chain(heap, before, epochs)
    if chain is not None:
        found.insert(0, chain)
    if not explains(found, rate):
        found = find_longest(heap, before, rate, epochs, ours) + found
    if not found or not explains(found, rate):
        found = _loose(heap, before, epochs, more_exit_handlers) + found
    heaviest = max((each.bytes_per_epoch for each in found), default=0)
    least = max(0.02 * heaviest, 0.01 * rate)
    found = [each for each in found if each.bytes_per_epoch >= least][:most]
    return [replace(each, bytes_per_epoch=_at_most(each, rate)) for each in found]


def _at_most(growth: Growth, rate: float) -> int:
    """Bound an estimate by what memory grew: rows of one tensor weigh it all."""
    return min(growth.bytes_per_epoch, round(rate)) if rate else growth.bytes_per_epoch


def explains(found: Sequence[Growth], rate: float) -> bool:
    """Tell whether what was named makes up a tenth of the growth.

    Args:
        found: Growths.
        rate: Bytes an epoch by which memory grows.

    Returns:
        Whether their bytes come to that.
    """
    return sum(each.bytes_per_epoch for each in found) >= 0.1 * rate


def _containers(
    heap: Heap, before: Census, epochs: int, ours: set[int]
) -> list[Growth]:
    """Find containers that hold more than they did, and weigh what came."""
    grown = _grown_containers(heap, before, max(2, epochs / _SELDOM), ours)
    grown.sort(key=lambda pair: -pair[0])
    weighed = []
    for count, each in grown[:_WEIGHED]:
        newest = newest_of(each)
        size = retained_bytes(_with_keys(each, newest)) * count // epochs
        weighed.append((size, count / epochs, each, newest))
    weighed.sort(key=lambda row: -row[0])
    ignore = [grown, weighed, *heap.lists]
    growths = [_growth(row, ignore) for row in weighed[:_NAMED] if row[0] > 0]
    return [growth for growth in growths if not _is_of_this_room(growth)]


def _is_of_this_room(growth: Growth) -> bool:
    """Whether a module of the detector holds it, such as a cache of its statistics.

    What judging takes is subtracted from the readings, so it never explains a growth.
    """
    return growth.holder is not None and growth.holder.path.startswith(_ROOM)


def _grown_containers(
    heap: Heap, before: Census, least: float, ours: set[int]
) -> list[tuple[int, Any]]:
    """List by how much containers grew.

    The arrays are let go of on return: what a running function has would be taken for
    something that the user keeps.
    """
    containers = containers_in(heap)
    ids = np.fromiter(map(id, containers), np.int64, len(containers))
    lengths = np.fromiter(map(len, containers), np.int64, len(containers))
    more = lengths - before.lengths_of(ids)
    return [
        (int(more[index]), containers[index])
        for index in np.flatnonzero(more >= least)
        if int(ids[index]) not in ours
    ]


def _growth(row: tuple[int, float, Any, list[Any]], ignore: Sequence[Any]) -> Growth:
    size, rate, container, newest = row
    holder = holders_of(container, most=1, ignore=[*ignore, row, newest])[0]
    left = _room(container, rate)
    pattern = _pattern(container, newest, holder) if left is None else "bounded"
    kind = type(container).__name__
    return Growth(pattern, kind, look_of(newest), rate, size, holder, left)


def newest_of(container: Any) -> list[Any]:
    """Pick the items that came last.

    Args:
        container: A list, dict, set or deque.

    Returns:
        At most six; values of a dict, any of a set.
    """
    with contextlib.suppress(RuntimeError):  # another thread changes it meanwhile
        return _last_of(container)
    return []


def _last_of(container: Any) -> list[Any]:
    """Take six of the newest, apart from each other if there are enough."""
    step = _APART if len(container) >= _SAMPLE * _APART else 1
    part = (0, _SAMPLE * step, step)
    if is_a(container, dict):
        return list(itertools.islice(reversed(container.values()), *part))
    if is_a(container, (list, deque)):
        return list(itertools.islice(reversed(container), *part))
    return list(itertools.islice(container, *part))


def _with_keys(container: Any, newest: list[Any]) -> list[Any]:
    """Pair the newest values of a dict with their keys, which weigh too."""
    if not is_a(container, dict):
        return newest
    with contextlib.suppress(RuntimeError):  # another thread changes it meanwhile
        return list(itertools.islice(reversed(container.items()), len(newest)))
    return newest


def look_of(items: Sequence[Any]) -> str:
    """Say what items are.

    Args:
        items: Some of a container.

    Returns:
        Such as "Tensor [128, 19] float32" or "dicts".
    """
    if not items:
        return "items"
    first = items[0]
    if is_a(first, (tuple, list)):
        inside = [each for each in first if is_a(each, torch.Tensor)]
        first = inside[0] if inside else first
    if is_a(first, torch.Tensor):
        kind, device, dtype, shape = describe(first)[0]
        place = "" if device == "cpu" else f" on {device}"
        return f"{kind} {list(shape)} {dtype}{place}"
    return f"{type(first).__name__}"


def _room(container: Any, rate: float) -> int | None:
    """Tell in how many epochs a bounded container is full; None if it has no bound."""
    bound = container.maxlen if is_a(container, deque) else None
    for parent in gc.get_referrers(container):
        if is_a(parent, functools._lru_cache_wrapper):
            bound = parent.cache_info().maxsize
    if bound is None:
        return None
    return max(1, -int((len(container) - bound) // max(rate, 1e-9)))


def _pattern(container: Any, newest: list[Any], holder: Holder) -> str:
    if "_hooks" in holder.path:
        return "hooks"
    if holder.path.endswith("__warningregistry__"):
        return "warnings"
    if holder.path.endswith("(its lru_cache)"):
        return "cache"
    if holder.path.endswith("param_groups") or _in_optimizer(container):
        return "optimizer"
    for pattern, kinds in _BY_TYPE:
        if all(is_a(each, kinds) for each in newest):
            return pattern
    return _pattern_of_items(newest)


def _pattern_of_items(newest: list[Any]) -> str:
    if all(_is_plain(each) for each in newest):
        return "numbers"
    tensors = [t for each in newest for t in _tensors_of(each)]
    if tensors:
        return _tensor_pattern(tensors)
    if all(is_a(each, types.FunctionType) for each in newest):
        return "closures"
    return "objects"


def _tensor_pattern(tensors: list[torch.Tensor]) -> str:
    if any(each.grad_fn is not None for each in tensors):
        return "graph"
    if any(_is_shared(each) and each.device.type == "cpu" for each in tensors):
        return "shared"
    sizes = [
        (each.numel() * each.element_size(), describe(each)[2]) for each in tensors
    ]
    if all(size * 4 < storage for size, storage in sizes):
        return "view"
    return "kept tensors"


def _is_shared(tensor: torch.Tensor) -> bool:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # it has no storage
        return bool(tensor.is_shared())  # type: ignore[no-untyped-call]
    return False


def _tensors_of(item: Any) -> list[torch.Tensor]:
    if is_a(item, types.FunctionType):
        return []
    return tensors_below(item, most=_LOOKED_THROUGH)


def _is_plain(item: Any) -> bool:
    if is_a(item, tuple):
        return len(item) < 10 and all(map(_is_plain, item))
    return is_a(item, _PLAIN) or (is_a(item, str) and len(item) < 200)


def _in_optimizer(container: Any) -> bool:
    if not is_a(container, list):
        return False
    parents = gc.get_referrers(container)
    return any(
        is_a(each, torch.optim.Optimizer)
        or (is_a(each, dict) and each.get("param_groups") is container)
        for each in parents
    )


def _chain(heap: Heap, before: Census, epochs: int) -> Growth | None:
    """Find a tensor whose autograd graph has become longer since."""
    tensors = tensors_in(heap.objects)
    with_graph = [each for each in tensors if each.grad_fn is not None]
    if not with_graph:
        return None
    longest = max(with_graph, key=graph_nodes)
    more = graph_nodes(longest) - before.graph_nodes
    if more < max(4, 2 * epochs):
        return None
    ignore = [tensors, with_graph, *heap.lists]
    holder = holders_of(longest, most=1, ignore=ignore)[0]
    walked = min(graph_nodes(longest), MOST_NODES)
    size = retained_bytes([longest]) // walked * more // epochs
    return Growth(
        "graph chain", look_of([longest]), "autograd nodes", more / epochs, size, holder
    )


def _loose(
    heap: Heap, before: Census, epochs: int, more_exit_handlers: float
) -> list[Growth]:
    """Find types that became more, though no container that was there holds more."""
    now = take_census(before.epoch + epochs, heap)
    more = [
        (size - before.tensors.get(look, (0, 0))[1], count, look)
        for look, (count, size) in now.tensors.items()
        if count - before.tensors.get(look, (0, 0))[0] >= max(2, epochs / 2)
    ]
    if more:
        size, count, look = max(more, key=lambda row: row[:2])
        rate = (count - before.tensors.get(look, (0, 0))[0]) / epochs
        alike = [t for t in tensors_in(heap.objects) if describe(t)[0] == look]
        # Not one that was there before: somebody else may keep tensors that look alike.
        old = set(before.tensor_ids.tolist())
        alike = [t for t in alike if id(t) not in old] or alike
        return [_loose_tensor(heap, alike, rate, size // epochs, more_exit_handlers)]
    for name, count in (now.kinds - before.kinds).most_common(3):
        if count >= max(8, 2 * epochs):
            alike = [e for e in heap.objects if type(e).__qualname__ == name]
            holder = _usual_holder(heap, alike)
            size = retained_bytes(alike[-1:]) * count // epochs
            if not holder.held:
                rate = count / epochs
                return [_unrooted(alike, rate, size, more_exit_handlers)]
            return [Growth("objects", holder.kind, name, count / epochs, size, holder)]
    return []


def _loose_tensor(
    heap: Heap, alike: list[torch.Tensor], rate: float, size: int,
    more_exit_handlers: float,
) -> Growth:  # fmt: skip
    """Say who holds new tensors that look alike."""
    holder = _usual_holder(heap, alike)
    if holder.held:
        pattern = "graph" if alike[-1].grad_fn is not None else "kept tensors"
        return Growth(pattern, holder.kind, look_of(alike[-1:]), rate, size, holder)
    return _unrooted(alike, rate, size, more_exit_handlers)


def _unrooted(
    alike: list[Any], rate: float, size: int, more_exit_handlers: float
) -> Growth:
    """Name what keeps objects that no variable leads to, where that can be shown."""
    look = look_of(alike[-1:])
    newest = alike[-_SAMPLE:]
    if gc.isenabled():
        gc.collect()  # the search for holders leaves cycles that refer to them
    tensors = tensors_in(newest)
    if any(is_in_autograd_cycle(tensor) for tensor in tensors):
        return Growth("autograd cycle", "a cycle", look, rate, size)
    if may_be_exit_handlers(alike[-1:], more_exit_handlers, rate):
        return Growth("exit handlers", "atexit", look, rate, size)
    return Growth("unknown holder", "something", look, rate, size)


def _usual_holder(heap: Heap, alike: list[Any]) -> Holder:
    """Ask of the first, the middle and the last who holds them; take what two say.

    Of a chain none of these may be near a variable; then the one that is tells.
    """
    asked = {id(each): each for each in (alike[-1], alike[len(alike) // 2], alike[0])}
    ignore = [alike, asked, *heap.lists]
    found = [holders_of(each, most=1, ignore=ignore)[0] for each in asked.values()]
    held = [each for each in found if each.held]
    if not held:
        close = closest_to_a_root(alike)
        held = found if close is None else holders_of(close, most=1, ignore=ignore)
    roots = [(each.kind, each.path.split("[")[0]) for each in held]
    return max(zip(roots, held, strict=True), key=lambda row: roots.count(row[0]))[1]
