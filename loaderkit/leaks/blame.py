"""What grew since a census, and who holds it."""

from __future__ import annotations

import functools
import gc
import io
import itertools
import mmap
import multiprocessing
import socket
import subprocess
import threading
import types
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.leaks.census import CONTAINERS, take_census
from loaderkit.leaks.patterns import PATTERNS
from loaderkit.leaks.weigh import MOST_NODES, own_bytes
from loaderkit.memory.holders import Holder, holders_of
from loaderkit.memory.tensors import describe, graph_nodes, tensors_in
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loaderkit.leaks.census import Census

_SAMPLE = 6
"""Items of a container that are weighed: the newest."""
_WEIGHED = 60
"""Containers that are weighed, those that grew by the most items."""
RESOURCES = {
    "files": "open files",
    "sockets": "open sockets",
    "threads": "threads",
    "children": "child processes",
    "mappings": "memory mappings",
}
"""What is counted and is not memory, and how to call it."""
_BY_TYPE = (
    ("exceptions", BaseException),
    ("files", io.IOBase),
    ("sockets", socket.socket),
    ("threads", threading.Thread),
    ("children", (subprocess.Popen, multiprocessing.process.BaseProcess)),
    ("mappings", (mmap.mmap, np.memmap)),
)
"""Patterns of what holds more than memory."""
_PLAIN = (int, float, complex, bool, type(None))


@dataclass(frozen=True)
class Growth:
    """Something that became more, and who holds it."""

    pattern: str
    """A key of :data:`loaderkit.leaks.patterns.PATTERNS`."""
    what: str
    """What it is, such as "list" or "open files"."""
    items: str
    """What it holds more of, such as "Tensor [128, 19] float32"."""
    per_epoch: float
    """How many more each epoch."""
    bytes_per_epoch: int
    """What they weigh, about; 0 when unknown."""
    holder: Holder | None = None
    """Who keeps it."""
    epochs_left: int | None = None
    """Until a bounded container is full."""

    @property
    def fix(self) -> str:
        """What to change."""
        return PATTERNS[self.pattern].fix

    def __str__(self) -> str:
        return self.text()

    def text(self, each: str = "epoch") -> str:
        """Say it in a sentence.

        Args:
            each: What is called an epoch.

        Returns:
            What grew, who holds it, and the fix.
        """
        size = f", {format_bytes(self.bytes_per_epoch)}" if self.bytes_per_epoch else ""
        where = ""
        if self.holder is not None:
            place = self.holder.line or self.holder.where
            where = f" `{self.holder.path}`" + (f" in {place}" if place else "")
        more = (
            f" keeps {self.per_epoch:.4g} {self.items} more" if self.items else " grows"
        )
        if self.what in RESOURCES.values():
            where = f", kept by{where}" if where else ""
            text = f"{self.per_epoch:.4g} more {self.what} each {each}{where} ({self.items})"
        else:
            text = f"{self.what}{where}{more} each {each}{size}"
        return f"{text}: {PATTERNS[self.pattern].words}. Fix: {self.fix}"


def find_growth(
    before: Census, epoch: int, *, most: int = 3, ignore: Sequence[object] = ()
) -> list[Growth]:
    """Compare what is alive with a census.

    Args:
        before: Taken some epochs ago.
        epoch: Epochs that have ended by now.
        most: Growths to name.
        ignore: Containers that grow because we watch.

    Returns:
        What grew, the heaviest first; empty when no Python object did.
    """
    epochs = max(1, epoch - before.epoch)
    found = _containers(before, epochs, {id(each) for each in ignore})
    chain = _chain(before, epochs)
    if chain is not None:
        found.insert(0, chain)
    if not found:
        found = _loose(before, epoch, epochs)
    heaviest = max((each.bytes_per_epoch for each in found), default=0)
    return [each for each in found if each.bytes_per_epoch >= heaviest * 0.02][:most]


def _containers(before: Census, epochs: int, ours: set[int]) -> list[Growth]:
    """Find containers that hold more than they did, and weigh what came."""
    grown: list[tuple[int, Any]] = []
    for each in gc.get_objects():
        if issubclass(type(each), CONTAINERS) and id(each) not in ours:
            length = before.length(each)
            if length is not None and len(each) - length >= max(2, epochs / 2):
                grown.append((len(each) - length, each))
    grown.sort(key=lambda pair: -pair[0])
    weighed = []
    for count, each in grown[:_WEIGHED]:
        newest = newest_of(each)
        size = own_bytes(newest) * count // epochs
        weighed.append((size, count / epochs, each, newest))
    weighed.sort(key=lambda row: -row[0])
    ignore = [grown, weighed]
    return [_growth(row, ignore) for row in weighed[:4] if row[0] > 0]


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
    if isinstance(container, dict):
        return list(itertools.islice(reversed(container.values()), _SAMPLE))
    if isinstance(container, (list, deque)):
        return list(itertools.islice(reversed(container), _SAMPLE))
    return list(itertools.islice(container, _SAMPLE))


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
    if isinstance(first, (tuple, list)):
        inside = [each for each in first if isinstance(each, torch.Tensor)]
        first = inside[0] if inside else first
    if isinstance(first, torch.Tensor):
        kind, device, dtype, shape = describe(first)[0]
        place = "" if device == "cpu" else f" on {device}"
        return f"{kind} {list(shape)} {dtype}{place}"
    return f"{type(first).__name__}"


def _room(container: Any, rate: float) -> int | None:
    """Tell in how many epochs a bounded container is full; None if it has no bound."""
    bound = container.maxlen if isinstance(container, deque) else None
    for parent in gc.get_referrers(container):
        if isinstance(parent, functools._lru_cache_wrapper):
            bound = parent.cache_info().maxsize
    if bound is None:
        return None
    return max(1, -int((len(container) - bound) // max(rate, 1e-9)))


def _pattern(container: Any, newest: list[Any], holder: Holder) -> str:
    if "_hooks" in holder.path:
        return "hooks"
    if holder.path.endswith("(its lru_cache)"):
        return "cache"
    if holder.path.endswith("param_groups") or _in_optimizer(container):
        return "optimizer"
    for pattern, kinds in _BY_TYPE:
        if all(isinstance(each, kinds) for each in newest):
            return pattern
    return _pattern_of_items(newest)


def _pattern_of_items(newest: list[Any]) -> str:
    if all(_is_plain(each) for each in newest):
        return "numbers"
    tensors = [t for each in newest for t in _tensors_of(each)]
    if tensors:
        return _tensor_pattern(tensors)
    if all(isinstance(each, types.FunctionType) for each in newest):
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
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _tensors_of(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item]
    if isinstance(item, dict):
        return tensors_in(item.values())
    return tensors_in(item) if isinstance(item, (list, tuple)) else []


def _is_plain(item: Any) -> bool:
    if isinstance(item, tuple):
        return len(item) < 10 and all(map(_is_plain, item))
    return isinstance(item, _PLAIN) or (isinstance(item, str) and len(item) < 200)


def _in_optimizer(container: Any) -> bool:
    if not isinstance(container, list):
        return False
    parents = gc.get_referrers(container)
    return any(
        isinstance(each, torch.optim.Optimizer)
        or (isinstance(each, dict) and each.get("param_groups") is container)
        for each in parents
    )


def _chain(before: Census, epochs: int) -> Growth | None:
    """Find a tensor whose autograd graph has become longer since."""
    with_graph = [
        each for each in tensors_in(gc.get_objects()) if each.grad_fn is not None
    ]
    if not with_graph:
        return None
    longest = max(with_graph, key=graph_nodes)
    more = graph_nodes(longest) - before.graph_nodes
    if more < max(4, 2 * epochs):
        return None
    holder = holders_of(longest, most=1, ignore=[with_graph])[0]
    walked = min(graph_nodes(longest), MOST_NODES)
    size = own_bytes([longest]) // walked * more // epochs
    return Growth(
        "graph chain", look_of([longest]), "autograd nodes", more / epochs, size, holder
    )


def _loose(before: Census, epoch: int, epochs: int) -> list[Growth]:
    """Find types that became more, though no container that was there holds more."""
    now = take_census(epoch)
    found = []
    for look, (count, size) in now.tensors.items():
        old_count, old_size = before.tensors.get(look, (0, 0))
        if count - old_count >= max(2, epochs / 2):
            found.append((size - old_size, count - old_count, look))
    if found:
        size, count, look = max(found, key=lambda row: row[:2])
        example = [
            each for each in tensors_in(gc.get_objects()) if describe(each)[0] == look
        ][-1:]
        holder = holders_of(example[0], most=1, ignore=[example])[0]
        kind = "graph" if example[0].grad_fn is not None else "kept tensors"
        rate = count / epochs
        return [Growth(kind, "memory", look_of(example), rate, size // epochs, holder)]
    more = now.kinds - before.kinds
    for name, count in more.most_common(3):
        if count >= max(8, 2 * epochs):
            example = [e for e in gc.get_objects() if type(e).__qualname__ == name][-1:]
            holder = holders_of(example[0], most=1, ignore=[example])[0]
            size = own_bytes(example) * count // epochs
            found_one = Growth("objects", "memory", name, count / epochs, size, holder)
            return [found_one]
    return []
