"""What the items of a container are, in words and as a pattern of leaks."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import mmap
import multiprocessing.process
import multiprocessing.synchronize
import socket
import subprocess
import threading
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.leaks.census import item_count
from loaderkit.leaks.retained import retained_bytes
from loaderkit.memory.tensors import (
    describe,
    is_a,
    objects_in_array,
    tensors_below,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from loaderkit.leaks.patterns import PatternName
    from loaderkit.memory.holder import Holder

LEAST_SHARE = 0.8
MOST_SHARE = 1.2
"""Of all that grew since the run began, which a value holds that takes another one's
place in each epoch.  Chosen: rates are known to some percent, and an item that was
there before is a share, too."""
EPOCHS_AN_ITEM = 12
"""Epochs in which a container that is looked at has grown by an item: a snapshot every
tenth epoch is a leak too."""
MOST_WEIGHED = 300
"""Containers that are weighed, those that grew by the most items."""
_MOST_SIBLINGS = 20_000
"""Items of a container, the newest, that do not weigh for each other.  Chosen: ten
times the objects that are looked at below one item."""
_MOST_LOOKED_AT = 100_000
"""Items of a container among which new ones are looked for.  Chosen: 10 ms."""
_SAMPLED_ITEMS = 6
"""Items of a container that are weighed: the newest."""
_SAMPLING_STEP = 4
"""Only every fourth item, where there are enough: neighbours may be rows of one tensor,
which would all weigh as much as the tensor."""
_MOST_OBJECTS_BELOW = 200
"""Objects below an item among which tensors are looked for."""
_VIEW_SHARE = 4
"""A storage so many times as large as its tensor is what a small view keeps."""
_PATTERN_OF_TYPE: tuple[tuple[PatternName, type | tuple[type, ...]], ...] = (
    ("exceptions", BaseException),
    ("files", io.IOBase),
    ("sockets", socket.socket),
    ("threads", threading.Thread),
    ("children", (subprocess.Popen, multiprocessing.process.BaseProcess)),
    ("mappings", (mmap.mmap, np.memmap)),
    ("semaphores", multiprocessing.synchronize.SemLock),
)
"""Patterns of what holds more than memory."""
_PLAIN_TYPES = (int, float, complex, bool, type(None))
_SHORT_TEXT = 200
_SHORT_TUPLE = 10
"""Characters and items up to which it is a metric or a key.  Both chosen."""


def newest_of(
    container: object,
    more_items: int | None = None,
    is_older: Callable[[object], bool] = lambda _: False,
) -> list[Any]:
    """Pick items that came last.

    Args:
        container: A list, dict, set, deque or array of objects.
        more_items: So many have come; None for all.
        is_older: Tells what was alive before they came, as far as it is known.

    Returns:
        At most six; values of a dict.
    """
    with contextlib.suppress(RuntimeError):  # another thread changes it meanwhile
        count = item_count(container)
        if more_items is None or more_items >= count:
            return _sample_from_end(_from_end(container), count)
        # What was there before may be of another kind, and weigh otherwise.
        newest = _sample_from_end(_from_end(container), more_items)
        if all(_is_new(item, is_older) for item in newest):
            return newest
        # It grows at its beginning, or is a set; or its items tell nothing.
        looked_at = itertools.islice(_from_end(container), _MOST_LOOKED_AT)
        new_items = [item for item in looked_at if _is_new(item, is_older)]
        if LEAST_SHARE * more_items <= len(new_items) <= MOST_SHARE * more_items:
            return _sample_from_end(iter(new_items), len(new_items))
        return newest
    return []


def _is_new(item: object, is_older: Callable[[object], bool]) -> bool:
    """Tell whether it came since; of numbers, texts and arrays nobody knows."""
    return gc.is_tracked(item) and not is_older(item)


def last_items(container: object, most: int) -> list[Any]:
    """Pick items from the end.

    Args:
        container: A list, dict, set, deque or array of objects.
        most: How many at most.

    Returns:
        The last ones, the newest first; values of a dict, any of a set.
    """
    with contextlib.suppress(RuntimeError):  # another thread changes it meanwhile
        return list(itertools.islice(_from_end(container), most))
    return []


def weigh_item(
    container: object, newest: list[Any], older_ids: AbstractSet[int]
) -> int:
    """Weigh an item of a container by those that came last.

    Args:
        container: A list, dict, set or deque.
        newest: From :func:`newest_of`.
        older_ids: ``id`` of what was alive before they came.

    Returns:
        Bytes that one item alone keeps, on average.
    """
    return retained_bytes(
        with_keys(container, newest),
        container,
        sibling_ids=frozenset(map(id, last_items(container, _MOST_SIBLINGS))),
        older_ids=older_ids,
    )


def with_keys(container: object, newest: list[Any]) -> list[Any]:
    """Give what a container would let go of: of a dict keys, too.

    Args:
        container: A list, dict, set or deque.
        newest: From :func:`newest_of`.

    Returns:
        The items to weigh.
    """
    if not is_a(container, dict):
        return newest
    with contextlib.suppress(RuntimeError):  # as above
        return list(itertools.islice(reversed(container.items()), len(newest)))
    return newest


def describe_items(items: Sequence[Any]) -> str:
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
        tensors = [item for item in first if is_a(item, torch.Tensor)]
        first = tensors[0] if tensors else first
    if is_a(first, torch.Tensor):
        kind, device, dtype, shape = describe(first).signature
        on_device = "" if device == "cpu" else f" on {device}"
        return f"{kind} {list(shape)} {dtype}{on_device}"
    return f"{type(first).__name__}"


def pattern_of(
    container: Any,
    newest: list[Any],
    holder: Holder,
) -> PatternName:
    """Tell by which pattern a container leaks.

    Args:
        container: That holds more than it did.
        newest: Its newest items.
        holder: Who holds the container.

    Returns:
        The pattern; the holder's name counts before the items.
    """
    # Names that torch and Python give: "_forward_hooks", "__warningregistry__".  What
    # they hold (closures, texts) would say less.
    if "_hooks" in holder.path:
        return "hooks"
    if holder.path.endswith("__warningregistry__"):
        return "warnings"
    if holder.path.endswith("(its lru_cache)"):
        return "cache"
    if holder.path.endswith("param_groups") or _is_of_optimizer(container):
        return "optimizer"
    for pattern, kinds in _PATTERN_OF_TYPE:
        if all(is_a(item, kinds) for item in newest):
            return pattern
    return _pattern_of_items(newest)


def _from_end(container: Any) -> Iterator[Any]:
    """Go through a container from its newest item on."""
    if is_a(container, dict):
        container = container.values()
    if is_a(container, (set, frozenset)):
        return iter(container)  # a set does not know which item is new
    if is_a(container, np.ndarray):
        return iter(reversed(objects_in_array(container)))
    return iter(reversed(container))


def _sample_from_end(items: Iterator[Any], count: int) -> list[Any]:
    step = _SAMPLING_STEP if count >= _SAMPLED_ITEMS * _SAMPLING_STEP else 1
    return list(itertools.islice(items, 0, min(_SAMPLED_ITEMS * step, count), step))


def _pattern_of_items(newest: list[Any]) -> PatternName:
    if all(_is_plain(item) for item in newest):
        return "numbers"
    tensors = []
    for item in newest:
        tensors += _tensors_of(item)
    if tensors:
        return _pattern_of_tensors(tensors)
    if all(is_a(item, types.FunctionType) for item in newest):
        return "closures"
    return "objects"


def _pattern_of_tensors(tensors: list[torch.Tensor]) -> PatternName:
    # From what keeps most to what keeps least: a graph keeps all that it has saved.
    if any(tensor.grad_fn is not None for tensor in tensors):
        return "graph"
    if any(_is_shared(tensor) for tensor in tensors):
        return "shared"
    if all(_is_small_view(tensor) for tensor in tensors):
        return "view"
    return "kept tensors"


def _is_small_view(tensor: torch.Tensor) -> bool:
    own_bytes = tensor.numel() * tensor.element_size()
    return own_bytes * _VIEW_SHARE < describe(tensor).storage_bytes


def _is_shared(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor lies in memory that processes share."""
    if tensor.device.type != "cpu":
        return False  # torch calls all memory of a card shared
    with contextlib.suppress(RuntimeError, NotImplementedError):  # it has no storage
        return bool(tensor.is_shared())  # type: ignore[no-untyped-call]
    return False


def _tensors_of(item: object) -> list[torch.Tensor]:
    # A function's tensors are told by what it closes over.
    if is_a(item, types.FunctionType):
        return []
    return tensors_below(item, most=_MOST_OBJECTS_BELOW)


def _is_plain(item: object) -> bool:
    """Tell whether an item is a number, a short text, or a few of these."""
    if is_a(item, tuple):
        return len(item) < _SHORT_TUPLE and all(map(_is_plain, item))
    if is_a(item, str):
        return len(item) < _SHORT_TEXT
    return is_a(item, _PLAIN_TYPES)


def _is_of_optimizer(container: Collection[Any]) -> bool:
    """Tell whether a list is an optimizer's list of parameter groups."""
    if not is_a(container, list):
        return False
    return any(
        is_a(parent, torch.optim.Optimizer)
        or (is_a(parent, dict) and parent.get("param_groups") is container)
        for parent in gc.get_referrers(container)
    )
