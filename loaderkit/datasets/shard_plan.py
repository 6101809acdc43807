"""Which samples go into which shard: a function of the source alone.  Pure.

So the bytes of a cache are the same whoever packs it, and a shard can be written before
those in front of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOST_LOOKED_AT = 32
"""Samples whose size is looked at.  Chosen: the mean of 32 samples whose sizes spread
as far as their mean is off by 18 % as a rule, and shards are larger or smaller so."""
_LOOKED_AT_OF = 32
"""One sample in so many is looked at, since it is read twice: 3 % more reading."""
BLOCK_BYTES = 4 << 20
"""A worker hands over samples when it holds about so many bytes of them."""
_MOST_BLOCK_SAMPLES = 512
_LEAST_BLOCKS = 16
"""Small sources are cut so that several workers have something to read."""


def rows_to_look_at(samples: int) -> list[int]:
    """Choose samples that stand for all: the first, and one of each equal part.

    Args:
        samples: How many there are, at least one.

    Returns:
        Their rows, in order.

    >>> rows_to_look_at(20), len(rows_to_look_at(10**6))
    ([0], 32)
    """
    parts = max(1, min(_MOST_LOOKED_AT, samples // _LOOKED_AT_OF))
    # Not the same place in each part: sizes may repeat in step with the parts.
    places = random.Random(0)
    rows = [0]
    for part in range(1, parts):
        start, stop = samples * part // parts, samples * (part + 1) // parts
        rows.append(start + int(places.random() * (stop - start)))
    return rows


@dataclass(frozen=True)
class ShardPlan:
    """How a source's samples are cut into shards, and these into blocks."""

    samples: int
    shard_samples: int
    """Samples of each shard but the last."""
    block_samples: int
    """Samples that are read at a time."""

    @classmethod
    def of(cls, samples: int, sizes: Sequence[int], shard_bytes: int) -> ShardPlan:
        """Cut a source into shards of about the same number of bytes.

        Args:
            samples: How many there are.
            sizes: Bytes of the samples that were looked at ``[k]``.
            shard_bytes: Bytes that a shard should have.

        Returns:
            The plan; its shards differ by less than one sample in a shard.

        >>> plan = ShardPlan.of(1000, sizes=[90, 110], shard_bytes=30_000)
        >>> plan.shard_samples, plan.shard_count, plan.rows_of(3)
        (250, 4, range(750, 1000))
        """
        mean_bytes = max(1, -(-sum(sizes) // len(sizes)))
        most_samples = max(1, -(-shard_bytes // mean_bytes))
        shard_count = -(-samples // most_samples)
        shard_samples = -(-samples // shard_count)
        fitting = min(BLOCK_BYTES, shard_bytes) // mean_bytes
        block_samples = min(fitting, _MOST_BLOCK_SAMPLES, -(-samples // _LEAST_BLOCKS))
        return cls(samples, shard_samples, max(1, min(block_samples, shard_samples)))

    @property
    def shard_count(self) -> int:
        """How many shards there are."""
        return -(-self.samples // self.shard_samples)

    def rows_of(self, shard: int) -> range:
        """Say which samples a shard has."""
        start = shard * self.shard_samples
        return range(start, min(self.samples, start + self.shard_samples))

    def blocks_of(self, shard: int) -> Iterator[tuple[int, int]]:
        """Cut a shard into blocks: first row, and the row behind the last."""
        rows = self.rows_of(shard)
        for start in rows[:: self.block_samples]:
            yield start, min(rows.stop, start + self.block_samples)
