"""Finds a single array, tensor or text that is as large as what grew."""

from __future__ import annotations

import gc
import types
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from loaderkit.leaks.census import Census, size_of, untracked_dicts
from loaderkit.leaks.growth import Growth
from loaderkit.memory.holders import holders_of, label_of, running_locals
from loaderkit.memory.tensors import is_a

_KINDS = (np.ndarray, torch.Tensor, bytes, bytearray, str)
_HOLDING = (dict, list, tuple, types.CellType)


def find_longest(before: Census, rate: float, epochs: int) -> list[Growth]:
    """Look for what is joined to itself, epoch after epoch.

    Args:
        before: A census: what was as large then has not grown.
        rate: Bytes an epoch by which memory grows.
        epochs: Since when.

    Returns:
        The largest object that is at least half as large as what grew, and its holder;
        empty when there is none.
    """
    least = rate * epochs * 0.5
    if least <= 0:
        return []
    found = _largest(least, before.sizes)
    if found is None:
        return []
    each, container = found
    ignore = [found]
    holder = holders_of(each, most=1, ignore=ignore)[0]
    if holder.kind in {
        "native code",
        "cycle",
    }:  # the collector does not know the container
        outer = holders_of(container, most=1, ignore=ignore)[0]
        holder = replace(outer, path=outer.path + (label_of(container, each) or ""))
    look = type(each).__name__
    if is_a(each, (np.ndarray, torch.Tensor)):
        look += f" {list(each.shape)}"
    return [Growth("longer", look, "", 0, round(rate), holder)]


def _largest(least: float, known: frozenset[int]) -> tuple[Any, Any] | None:
    """Find the largest object from some size on, and what holds it."""
    objects = gc.get_objects()
    most, found = least, None
    for container in [*objects, *untracked_dicts(objects), running_locals()]:
        if is_a(container, _HOLDING):
            for each in gc.get_referents(container):
                if is_a(each, _KINDS) and most < size_of(each) not in known:
                    most, found = size_of(each), (each, container)
    return found
