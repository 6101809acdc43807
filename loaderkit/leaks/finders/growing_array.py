"""Finds single arrays, tensors, buffers or texts that get longer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from loaderkit.leaks.census import LARGE_BYTES, memory_of, size_of
from loaderkit.leaks.finders.array_holder import holder_of_array
from loaderkit.leaks.growth import Growth
from loaderkit.memory.tensors import is_a

if TYPE_CHECKING:
    from loaderkit.leaks.census import Census
    from loaderkit.leaks.finders.evidence import HeapEvidence

_LEAST_SHARE = 0.1
"""Of what grew, by which a buffer has grown in place.  As in ``growth.explains``."""
_MOST_SHARE = 1.5
"""The same: one that grew by more is another buffer at the same address, or varies.
Chosen above the eighth that Python's buffers take in advance."""
_LEAST_JOINED_SHARE = 0.5
_MOST_JOINED_SHARE = 1.15
"""The same of what is joined to itself: a table's index and columns grow beside its
largest column, and rates are known to some percent."""
_SHARE_ERROR = 0.05
"""By how much its share since one census may differ from that since another.  Chosen:
of batches whose sizes vary by megabytes one in a hundred fits two censuses by chance.
"""
_MOST_NAMED = 3
"""As many as ``find_growth`` names."""


def find_growing_array(evidence: HeapEvidence) -> list[Growth]:
    """Look for what grows in place, or is joined to itself, epoch after epoch.

    Args:
        evidence: What is alive now, and was then: what was as large then has not grown.

    Returns:
        Buffers that grew in place; else the largest array whose earlier sizes show that
        it grew by as much as memory did; else nothing.
    """
    if evidence.bytes_per_epoch * evidence.epochs <= 0:
        return []
    return _grown_in_place(evidence) or _joined_to_itself(evidence)


def _grown_in_place(evidence: HeapEvidence) -> list[Growth]:
    """Find buffers that are the same objects as then, and longer."""
    growths = []
    for item in evidence.heap.large:
        size_before = evidence.before.buffers.get(id(item))
        if size_before is None or id(item) in evidence.ignored_ids:
            continue
        bytes_per_epoch = (size_of(item) - size_before) / evidence.epochs
        share = bytes_per_epoch / evidence.bytes_per_epoch
        if _LEAST_SHARE <= share <= _MOST_SHARE:
            growths.append(_growth_of(item, evidence, round(bytes_per_epoch)))
    growths.sort(key=lambda growth: -growth.bytes_per_epoch)
    return growths[:_MOST_NAMED]


def _joined_to_itself(evidence: HeapEvidence) -> list[Growth]:
    """Find the largest array that was shorter in each census by what had grown since.

    That it is large and of a new size shows nothing: so is every batch.
    """
    candidates = [
        item
        for item in evidence.heap.large
        if id(item) not in evidence.ignored_ids
        and memory_of(item) == evidence.memory
        and size_of(item) not in evidence.before.sizes
        and _was_shorter(size_of(item), evidence)
    ]
    largest = max(candidates, key=size_of, default=None)
    if largest is None:
        return []
    # What refers to it because of this search is no holder.
    candidates.clear()
    return [_growth_of(largest, evidence, round(evidence.bytes_per_epoch))]


def _was_shorter(size_now: int, evidence: HeapEvidence) -> bool:
    """Tell whether the censuses have an array that grew to this size, evenly."""
    shares = _shares_since(evidence.before, size_now, evidence)
    for census in evidence.other_censuses:
        others = _shares_since(census, size_now, evidence)
        shares = [
            share
            for share in shares
            if any(abs(share - other) <= _SHARE_ERROR for other in others)
        ]
    return bool(shares)


def _shares_since(census: Census, size_now: int, evidence: HeapEvidence) -> list[float]:
    """Give the shares of what grew that an array has grown by, for each it may be."""
    epochs = evidence.run_epochs - census.epoch
    grown_bytes = evidence.bytes_per_epoch * epochs
    # What is smaller than 16 KiB is in no census: half of that is near enough.
    sizes_then = [*census.sizes, LARGE_BYTES // 2]
    shares = [(size_now - size) / grown_bytes for size in sizes_then]
    return [
        share for share in shares if _LEAST_JOINED_SHARE <= share <= _MOST_JOINED_SHARE
    ]


def _growth_of(item: object, evidence: HeapEvidence, bytes_per_epoch: int) -> Growth:
    """Say what gets longer, and who holds it."""
    words = type(item).__name__
    if is_a(item, np.ndarray) or is_a(item, torch.Tensor):
        words += f" {list(item.shape)}"
    holder = holder_of_array(item, evidence.heap)
    if not holder.held:
        return Growth("unknown holder", f"a {words}", "", 0, bytes_per_epoch)
    return Growth("longer", words, "", 0, bytes_per_epoch, holder)
