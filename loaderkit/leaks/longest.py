"""Finds a single array, tensor or text that is as large as what grew."""

from __future__ import annotations

import gc
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from loaderkit.leaks.census import Census, size_of, untracked_dicts
from loaderkit.leaks.growth import Growth
from loaderkit.memory.holders import holders_of, label_of, running_locals
from loaderkit.memory.nearest import referents_of
from loaderkit.memory.tensors import is_a

_KINDS = (np.ndarray, torch.Tensor, bytes, bytearray, str, array)


def find_longest(
    before: Census, rate: float, epochs: int, ours: set[int]
) -> list[Growth]:
    """Look for what is joined to itself, epoch after epoch.

    Args:
        before: A census: what was as large then has not grown.
        rate: Bytes an epoch by which memory grows.
        epochs: Since when.
        ours: ``id`` of what is there because we watch.

    Returns:
        The largest object that is at least half as large as what grew, and its holder;
        empty when there is none.
    """
    least = rate * epochs * 0.5
    if least <= 0:
        return []
    objects = gc.get_objects()
    dicts = untracked_dicts(objects)
    each = _largest([*objects, *dicts, running_locals()], least, before.sizes, ours)
    if each is None:
        return []
    del objects
    holder = holders_of(each, most=1)[0]
    if not holder.held:  # the collector lists no such dict
        for outer in dicts:
            if any(value is each for value in outer.values()):
                holder = holders_of(outer, most=1, ignore=[dicts])[0]
                label = label_of(outer, each) or ""
                holder = replace(holder, path=holder.path + label)
                break
    look = type(each).__name__
    if is_a(each, (np.ndarray, torch.Tensor)):
        look += f" {list(each.shape)}"
    return [Growth("longer", look, "", 0, round(rate), holder)]


def _largest(
    objects: list[Any], least: float, known: frozenset[int], ours: set[int]
) -> Any | None:
    """Find the largest object from some size on, among what others refer to."""
    most, found = least, None
    sought = _Sought()
    for each in referents_of(objects):
        if not sought[type(each)] or id(each) in ours:
            continue
        if most < size_of(each) not in known:
            most, found = size_of(each), each
    return found


class _Sought(dict[type, bool]):
    """Whether objects of a type are looked at, worked out once a type."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, _KINDS)
        return self[kind]
