"""Finds a single array, tensor or text that is as large as what grew."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.leaks.census import size_of
from loaderkit.leaks.growth import Growth
from loaderkit.memory.holders import holders_of, label_of
from loaderkit.memory.tensors import is_a

if TYPE_CHECKING:
    from loaderkit.leaks.census import Heap
    from loaderkit.leaks.finders.evidence import HeapEvidence
    from loaderkit.memory.holder import Holder

_LEAST_SHARE = 0.5
"""Of what grew: an array that is joined to itself is as large as all that came, and an
array that is there twice, while it is copied, is no smaller than half."""


def find_growing_array(evidence: HeapEvidence) -> list[Growth]:
    """Look for what is joined to itself, epoch after epoch.

    Args:
        evidence: What is alive now, and was then: what was as large then has not grown.

    Returns:
        The largest object that is at least half as large as what grew, and its holder;
        empty when there is none.
    """
    grown_bytes = evidence.bytes_per_epoch * evidence.epochs
    if grown_bytes <= 0:
        return []
    candidates = [
        item
        for item in evidence.heap.large
        if id(item) not in evidence.ignored_ids
        and size_of(item) not in evidence.before.sizes
    ]
    largest = max(candidates, key=size_of, default=None)
    if largest is None or size_of(largest) <= _LEAST_SHARE * grown_bytes:
        return []
    words = type(largest).__name__
    if is_a(largest, np.ndarray) or is_a(largest, torch.Tensor):
        words += f" {list(largest.shape)}"
    # What refers to it because of this search is no holder.
    ignore = [*evidence.heap.lists, candidates]
    holder = _holder_of_array(largest, evidence.heap, ignore)
    bytes_per_epoch = round(evidence.bytes_per_epoch)
    return [Growth("longer", words, "", 0, bytes_per_epoch, holder)]


def _holder_of_array(
    array: Any,
    heap: Heap,
    ignore: list[list[Any]],
) -> Holder:
    holder = holders_of(array, most=1, ignore=ignore)[0]
    if holder.held:
        return holder
    # The collector lists no dictionary that holds nothing but arrays, numbers and
    # texts, so that a search from the array upwards ends before it.
    for outer in heap.dicts:
        if any(value is array for value in outer.values()):
            holder = holders_of(outer, most=1, ignore=ignore)[0]
            label = label_of(outer, array) or ""
            return replace(holder, path=holder.path + label)
    return holder
