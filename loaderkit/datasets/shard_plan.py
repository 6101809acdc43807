"""Which samples go into which shard: a function of the source alone.  Pure.

So the bytes of a cache are the same whoever packs it, and a shard can be written before
those in front of it.
"""

from __future__ import annotations

import bisect
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
_LEAST_LOOKED_AT, _LEAST_LOOKED_AT_OF = 8, 4
"""Of fewer than 256 samples up to 8 are looked at, one in 4: a first one that is small
must not stand for a hundred large ones, which would be one shard, held in memory."""
BLOCK_BYTES = 4 << 20
"""Samples wait in memory until they are about so many bytes; then in a file.  Chosen: a
task holds two of them, and a write of a millisecond costs little beside reading."""
_MOST_BLOCK_SAMPLES = 512
"""Of small samples a block has fewer bytes, so that a bar moves and work is shared."""
_LEAST_BLOCKS = 16
"""Small sources are cut so that several workers have something to read."""
_MOST_SPAN_BLOCKS = 16
"""A worker reads so many blocks in one task, 64 MiB.  Chosen: a task costs a
millisecond, and with it is lost what a worker that is killed had read."""
_ENOUGH_SPANS = 64
"""Into more spans than these a source is cut only where they would be too large.
Chosen: sixteen for each of four workers, so that none waits long for the last."""


def rows_to_look_at(samples: int) -> list[int]:
    """Choose samples that stand for all: the first, and one of each equal segment.

    Args:
        samples: How many there are, at least one.

    Returns:
        Their rows, in order.

    >>> rows_to_look_at(5), len(rows_to_look_at(100)), len(rows_to_look_at(10**6))
    ([0], 8, 32)
    """
    few = min(_LEAST_LOOKED_AT, samples // _LEAST_LOOKED_AT_OF)
    segments = max(1, few, min(_MOST_LOOKED_AT, samples // _LOOKED_AT_OF))
    # Not the same row of each segment: sizes may repeat in step with the segments.
    generator = random.Random(0)
    rows = [0]
    for segment in range(1, segments):
        start = samples * segment // segments
        stop = samples * (segment + 1) // segments
        rows.append(start + int(generator.random() * (stop - start)))
    return rows


@dataclass(frozen=True)
class ShardPlan:
    """How a source's samples are cut into shards, and these into blocks.

    The samples that were looked at stand each for one of as many equal parts of the
    source.  So a source that is sorted by size has shards of about one size, and many
    more samples in its first than in its last.
    """

    samples: int
    part_bytes: tuple[int, ...]
    """Bytes of a sample in each equal part of the source, at most ``shard_bytes``."""
    shard_count: int
    """How many shards there are."""
    block_samples: int
    """Samples that are read at a time."""

    @classmethod
    def of(cls, samples: int, sizes: Sequence[int], shard_bytes: int) -> ShardPlan:
        """Cut a source into shards of about the same number of bytes.

        Args:
            samples: How many there are.
            sizes: Bytes of a sample in each equal part of the source ``[parts]``.
            shard_bytes: Bytes that a shard should have.

        Returns:
            The plan.  Each shard has at least one sample.

        >>> plan = ShardPlan.of(1000, sizes=[50, 150], shard_bytes=30_000)
        >>> [plan.rows_of(shard) for shard in range(plan.shard_count)]
        [range(0, 500), range(500, 666), range(666, 833), range(833, 1000)]
        """
        # A sample that is larger than a shard has one of its own, however large it is.
        part_bytes = tuple(min(max(1, size), shard_bytes) for size in sizes)
        total_bytes = _bytes_of_segments(samples, part_bytes)
        # The second keeps a shard from being smaller than one of the largest samples.
        shard_count = max(
            1, min(-(-total_bytes // shard_bytes), total_bytes // max(part_bytes))
        )
        mean_bytes = -(-sum(sizes) // len(sizes))
        fitting = min(BLOCK_BYTES, shard_bytes) // max(1, mean_bytes)
        block_samples = min(fitting, _MOST_BLOCK_SAMPLES, -(-samples // _LEAST_BLOCKS))
        return cls(samples, part_bytes, shard_count, max(1, block_samples))

    def rows_of(self, shard: int) -> range:
        """Say which samples a shard has."""
        return range(self._first_row(shard), self._first_row(shard + 1))

    def shard_of(self, row: int) -> int:
        """Say which shard a sample goes to."""
        shards = range(self.shard_count)
        return bisect.bisect_right(shards, row, key=self._first_row) - 1

    def _first_row(self, shard: int) -> int:
        """Find the row before which lie ``shard`` of ``shard_count`` of all bytes."""
        segments = len(self.part_bytes)
        total_bytes = _bytes_of_segments(self.samples, self.part_bytes)
        bytes_before = total_bytes * shard // self.shard_count
        for segment, sample_bytes in enumerate(self.part_bytes):
            start = self.samples * segment // segments
            stop = self.samples * (segment + 1) // segments
            if bytes_before < (stop - start) * sample_bytes:
                return start + bytes_before // sample_bytes
            bytes_before -= (stop - start) * sample_bytes
        return self.samples

    def blocks_of(self, rows: range) -> Iterator[range]:
        """Cut samples into blocks.

        Args:
            rows: Which samples, of one shard.
        """
        for start in rows[:: self.block_samples]:
            yield range(start, min(rows.stop, start + self.block_samples))

    def spans_of(self, shard: int) -> Iterator[range]:
        """Cut a shard into spans, which several processes read at a time.

        A span has whole blocks; its length does not matter to the bytes of the shard.
        """
        rows, step = self.rows_of(shard), self._span_samples
        for start in rows[::step]:
            yield range(start, min(rows.stop, start + step))

    def bytes_kept_of_span(self, shard: int) -> int:
        """Say how many bytes of a span may wait in memory until its shard is written.

        All spans of a shard together have no more than a block then.  More of one go to
        a file: to make and remove that takes as long as to copy a megabyte.

        >>> ShardPlan.of(1000, [1300], 10**8).bytes_kept_of_span(0) == BLOCK_BYTES // 16
        True
        """
        spans = len(self.rows_of(shard)[:: self._span_samples])
        return BLOCK_BYTES // max(1, spans)

    @property
    def _span_samples(self) -> int:
        blocks = -(-self.samples // self.block_samples)
        span_blocks = max(1, min(_MOST_SPAN_BLOCKS, blocks // _ENOUGH_SPANS))
        return span_blocks * self.block_samples


def _bytes_of_segments(samples: int, part_bytes: Sequence[int]) -> int:
    """Add up the bytes of a source, of whose equal parts the samples' size is known."""
    segments = len(part_bytes)
    total_bytes = 0
    for segment, sample_bytes in enumerate(part_bytes):
        start = samples * segment // segments
        stop = samples * (segment + 1) // segments
        total_bytes += (stop - start) * sample_bytes
    return total_bytes
