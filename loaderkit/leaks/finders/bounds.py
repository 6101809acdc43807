"""Tells how many items a container can have at most, and when it has them."""

from __future__ import annotations

import asyncio
import functools
import gc
import queue
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

from loaderkit.leaks.growth import Bound
from loaderkit.memory.tensors import is_a

if TYPE_CHECKING:
    from collections.abc import Iterator

_CACHE_TYPE: type[Any] = type(functools.lru_cache(maxsize=1)(abs))
"""Of functions with an ``lru_cache``, whose name is private."""
_LEAST_ITEMS_PER_EPOCH = 1e-9
"""Chosen: so that nothing is divided by 0."""


def bound_of(container: Any, items_per_epoch: float) -> Bound | None:
    """Tell how far a container is from its bound.

    Bounds that are known are those of Python's ``deque(maxlen)``, ``lru_cache`` and
    queues, and of the caches of cachetools.  A class of the user's may have a number
    that is called so, and nothing says that it keeps to it.

    Args:
        container: A list, dict or deque that grows.
        items_per_epoch: By how many items.

    Returns:
        None where no bound is known.
    """
    most_items = _most_items(container)
    if most_items is None:
        return None
    return _bound(len(container), most_items, items_per_epoch)


def bound_of_cached(value: object, items_per_epoch: float) -> Bound | None:
    """Tell how far an ``lru_cache`` with a bound is from it, by a value in it.

    To the collector, which does not see the links between them, the cache itself
    holds its values.

    Args:
        value: Of which there are more each epoch.
        items_per_epoch: How many.

    Returns:
        None where no such cache holds it.
    """
    for owner in gc.get_referrers(value):
        if is_a(owner, _CACHE_TYPE):
            info = owner.cache_info()
            if info.maxsize is not None:
                return _bound(info.currsize, info.maxsize, items_per_epoch)
    return None


def _bound(items: int, most_items: int, items_per_epoch: float) -> Bound:
    # Rounded up, by the floor of what is negative.
    free_items = most_items - items
    epochs = -int(-free_items // max(items_per_epoch, _LEAST_ITEMS_PER_EPOCH))
    return Bound(items, most_items, max(1, epochs))


def _most_items(container: Any) -> int | None:
    if is_a(container, deque) and container.maxlen is not None:
        return int(container.maxlen)
    for owner in _owners_of(container):
        if is_a(owner, _CACHE_TYPE):
            most_items: int | None = owner.cache_info().maxsize
            if most_items is not None:
                return most_items
        elif is_a(owner, (queue.Queue, asyncio.Queue)) and owner.maxsize > 0:
            # 0 and less are no bound, in both.
            return int(owner.maxsize)
        elif _is_of_cachetools(owner):
            return _most_items_of_cache(owner, len(container))
    return None


def _owners_of(container: object) -> Iterator[Any]:
    """Give what refers to a container, itself or by its attributes."""
    for parent in gc.get_referrers(container):
        if is_a(parent, dict):
            # Attributes are in a dict once somebody has asked for them in one.
            for owner in gc.get_referrers(parent):
                if getattr(owner, "__dict__", None) is parent:
                    yield owner
        else:
            yield parent


def _is_of_cachetools(owner: object) -> bool:
    # Whoever has not imported it has no cache of it.
    cache_type = getattr(sys.modules.get("cachetools"), "Cache", None)
    return isinstance(cache_type, type) and is_a(owner, cache_type)


def _most_items_of_cache(cache: Any, items: int) -> int | None:
    """Give how many items like those of now are a cache's bound.

    With ``getsizeof`` the bound is a sum of sizes, in any unit.
    """
    size_now, most_size = cache.currsize, cache.maxsize
    is_bounded = 0 < size_now <= most_size < float("inf")
    return int(items * most_size / size_now) if is_bounded else None
