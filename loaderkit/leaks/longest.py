"""Finds a single array, tensor or text that is as large as what grew."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from loaderkit.leaks.census import size_of
from loaderkit.leaks.growth import Growth
from loaderkit.memory.holders import holders_of, label_of
from loaderkit.memory.tensors import is_a

if TYPE_CHECKING:
    from loaderkit.leaks.census import Census, Heap


def find_longest(
    heap: Heap, before: Census, rate: float, epochs: int, ours: set[int]
) -> list[Growth]:
    """Look for what is joined to itself, epoch after epoch.

    Args:
        heap: What is alive now.
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
    sizes = [
        0 if id(each) in ours or size_of(each) in before.sizes else size_of(each)
        for each in heap.large
    ]
    if max(sizes, default=0) <= least:
        return []
    each = heap.large[sizes.index(max(sizes))]
    holder = holders_of(each, most=1, ignore=heap.lists)[0]
    if not holder.held:  # the collector lists no such dict
        for outer in heap.dicts:
            if any(value is each for value in outer.values()):
                holder = holders_of(outer, most=1, ignore=heap.lists)[0]
                label = label_of(outer, each) or ""
                holder = replace(holder, path=holder.path + label)
                break
    look = type(each).__name__
    if is_a(each, (np.ndarray, torch.Tensor)):
        look += f" {list(each.shape)}"
    return [Growth("longer", look, "", 0, round(rate), holder)]
