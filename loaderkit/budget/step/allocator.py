"""How torch's caching allocator on CUDA lays out a log of allocations.  Pure.

A model of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.13) without streams,
expandable segments and garbage collection; its numbers are modelled, not measured.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.step.devices import TRAITS

if TYPE_CHECKING:
    from collections.abc import Iterable

_MIB = 1 << 20
_ROUND = 512
"""Requests are rounded up to a multiple of it (``kMinBlockSize``)."""
_SMALL = _MIB
"""Requests up to here come from small segments (``kSmallSize``)."""


@dataclass
class _Block:
    """A piece of a segment."""

    size: int
    small: bool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


class _FreeBlock(NamedTuple):
    """A block in a pool, which is kept in the order of the first two."""

    size: int
    number: int
    """Tells blocks of one size apart."""
    block: _Block


def _pool_order(free: _FreeBlock) -> tuple[int, int]:
    return free.size, free.number


class CachingAllocator:
    """Segments that are split, joined and never given back."""

    def __init__(self) -> None:
        self.reserved = 0
        self.allocated = 0
        self.highest = 0
        self._pools: dict[bool, list[_FreeBlock]] = {True: [], False: []}

    def malloc(self, request: int) -> _Block:
        """Take the smallest free block that is large enough, or a new segment."""
        size = max(1, math.ceil(request / _ROUND)) * _ROUND
        small = size <= _SMALL
        pool = self._pools[small]
        best_fit = bisect.bisect_left(pool, (size, 0), key=_pool_order)
        if best_fit < len(pool):
            block = pool.pop(best_fit).block
        else:
            block = _Block(segment_of(size), small)
            self.reserved += block.size
            self.highest = max(self.highest, self.reserved)
        block.free = False
        self._split_block(block, size)
        self.allocated += block.size
        return block

    def _split_block(self, block: _Block, size: int) -> None:
        left_over = block.size - size
        # What is left of a large block stays with it up to a small block's size.
        least = _ROUND if block.small else _SMALL + 1
        if left_over < least:
            return
        block.size = size
        other = _Block(left_over, block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = other
        block.after = other
        self._put_back(other)

    def free(self, block: _Block) -> None:
        """Give a block back and join it with free neighbours."""
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take_block(other)
                block.size += other.size
                if other is block.before:
                    block.before = other.before
                    if other.before is not None:
                        other.before.after = block
                else:
                    block.after = other.after
                    if other.after is not None:
                        other.after.before = block
        self._put_back(block)

    def _put_back(self, block: _Block) -> None:
        block.free = True
        entry = _FreeBlock(block.size, id(block), block)
        bisect.insort(self._pools[block.small], entry, key=_pool_order)

    def _take_block(self, block: _Block) -> None:
        pool = self._pools[block.small]
        position = (block.size, id(block))
        pool.pop(bisect.bisect_left(pool, position, key=_pool_order))


def segment_of(size: int) -> int:
    """Say what the allocator asks the driver for.

    >>> [segment_of(n) >> 20 for n in (1 << 20, (1 << 20) + 1, (10 << 20) + 1)]
    [2, 20, 12]
    """
    if size <= _SMALL:
        return 2 * _MIB
    if size < 10 * _MIB:
        return 20 * _MIB
    return math.ceil(size / (2 * _MIB)) * 2 * _MIB


def reserved_peak(events: Iterable[tuple[int, int]], kind: str) -> int | None:
    """Replay a log.

    Args:
        events: (number of a storage, bytes), negative when it is freed.
        kind: Kind of device, a key of ``TRAITS``.

    Returns:
        The most that is held; None where no allocator is modelled.

    >>> reserved_peak([(0, 3 << 20), (1, 5 << 20), (0, -3 << 20)], "cuda") >> 20
    20
    """
    if not TRAITS[kind].caching_allocator:
        return None
    allocator, blocks = CachingAllocator(), {}
    for number, size in events:
        if size > 0:
            blocks[number] = allocator.malloc(size)
        elif number in blocks:
            # What is empty has no block.
            allocator.free(blocks.pop(number))
    return allocator.highest
