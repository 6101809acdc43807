"""Segments of shared memory that a worker fills and the training process maps.

A worker has a few segments and fills them again, since fresh pages cost more than the
bytes in them (10 MiB: 5 ms fresh, 1 ms used again, either end).  A segment begins with
the number of the batch in it, which the receiver looks at before and after it copies,
and the number of the last one that was copied out, which the worker looks at.

What is in a segment says ``shm_batch``.
"""

from __future__ import annotations

import contextlib
import contextvars
import mmap
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

HEADER_BYTES = 64
"""Two numbers of batches, and then nothing up to the first tensor."""
_NUMBER_BYTES = 8
"""Numbers begin below 2**48 and rise by one: they never come again."""
_SENT, _OPENED = 0, _NUMBER_BYTES
"""Where the number of the batch in a segment is, and that of the last batch of it that
the receiver does not need any more."""
_OPENING_S = 1.0
"""A worker that was asked for one more batch than it has segments waits so long for the
receiver, which opens a batch next.  That takes 1 ms for 10 MiB, and longer where others
use the processor: with 50 ms, at a load of 9, each worker soon had a segment more."""
_LOOK_AGAIN_S = 0.0005
"""How often it looks.  Chosen: half of what is waited for."""
INLINE_BYTES = 64 << 10
"""Smaller batches travel with the message itself: a pipe of Linux holds so much."""
_SPARE_SHARE = 4
"""A segment that is too small becomes larger than asked for by the fourth part, so that
batches of about one size seldom make it grow."""
_segments_of_worker: contextvars.ContextVar[SegmentRing | None] = (
    contextvars.ContextVar("segments_of_worker", default=None)
)
_segments_to_fill: contextvars.ContextVar[SegmentRing | None] = contextvars.ContextVar(
    "segments_to_fill", default=None
)


class SegmentRef(NamedTuple):
    """Where a batch lies."""

    pid: int
    """The worker whose segment it is."""
    descriptor: int
    """The segment's, in that worker."""
    size: int
    """Of the segment, in bytes."""
    number: int
    """Of the batch; another one means that a later batch has taken its place."""


class _Segment(NamedTuple):
    """A piece of memory that another process can open."""

    descriptor: int
    memory: mmap.mmap


class SegmentRing:
    """The segments of one worker, each filled again when its batch was received.

    Args:
        count: How many: batches that may be under way, with the one being written.  One
            more is made where the receiver is late: torch asks for the next batch
            before it gives the oldest, which is then still to be copied.
        opening_s: So long it is waited for the receiver before that.
    """

    def __init__(self, count: int, opening_s: float = _OPENING_S) -> None:
        self._count = count
        self._opening_s = opening_s
        self._segments: list[_Segment] = []
        self._numbers: list[int] = []
        """Of the batch that was sent in each segment; 0 if none was."""
        self._turn = 0
        """Index of the segment of the batch in the making."""
        self._reserved: torch.Tensor | None = None
        # A worker that is started anew may get the process number of one that ended:
        # its batches must not have the numbers of the other's.
        self._last_number = int.from_bytes(os.urandom(6), "little")

    def put(self, total: int, fill: Callable[[Any], None]) -> SegmentRef:
        """Fill a segment.

        Args:
            total: Bytes it must hold.
            fill: Writes them ``[total]``.

        Returns:
            Where the receiver finds them.
        """
        is_reserved = self._reserved is not None
        self._reserved = None
        if not is_reserved:
            self._turn = self._choose_segment()
        # A segment that becomes larger keeps what was written to it.
        descriptor, memory = self._segment_of(self._turn, HEADER_BYTES + total)
        if not is_reserved:
            self._write_next_number(memory)
        fill(memoryview(memory)[HEADER_BYTES : HEADER_BYTES + total])
        self._numbers[self._turn] = self._last_number
        return SegmentRef(os.getpid(), descriptor, len(memory), self._last_number)

    def reserve(self, nbytes: int) -> torch.Tensor | None:
        """Give the memory of the segment that the next batch is put into.

        Args:
            nbytes: So much of it may be written to.

        Returns:
            ``[nbytes]`` uint8; None where the batch in the making has it already.
        """
        if self._reserved is not None:
            return None
        self._turn = self._choose_segment()
        memory = self._segment_of(self._turn, HEADER_BYTES + nbytes).memory
        self._write_next_number(memory)
        self._numbers[self._turn] = 0
        self._reserved = torch.frombuffer(
            memory, dtype=torch.uint8, count=nbytes, offset=HEADER_BYTES
        )
        return self._reserved

    @property
    def reserved(self) -> torch.Tensor | None:
        """What was reserved for the batch in the making; None if nothing was."""
        return self._reserved

    def drop_reserved(self) -> None:
        """Begin another batch: what was reserved for the last one is not used."""
        self._reserved = None

    def _choose_segment(self) -> int:
        """Choose the segment that is filled next: one that nobody needs, if any."""
        turn = self._find_free()
        if turn is None and len(self._segments) < self._count:
            return len(self._segments)
        deadline = time.monotonic() + self._opening_s
        while turn is None and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
            turn = self._find_free()
        if turn is not None:
            return turn
        if len(self._segments) <= self._count:
            return len(self._segments)
        # So many cannot be under way: the oldest was dropped without being received.
        return self._numbers.index(min(self._numbers))

    def _find_free(self) -> int | None:
        for turn, (number, segment) in enumerate(
            zip(self._numbers, self._segments, strict=True)
        ):
            if not number or _read_number(segment.memory, _OPENED) == number:
                return turn
        return None

    def _write_next_number(self, memory: mmap.mmap) -> None:
        # The number goes first: who reads the segment meanwhile sees that it changed.
        self._last_number += 1
        _write_number(memory, _SENT, self._last_number)

    def close(self) -> None:
        """Give the memory back; what has not been received is lost."""
        self._numbers.clear()
        while self._segments:
            # Unmapped with the last tensor in it.
            os.close(self._segments.pop().descriptor)

    def _segment_of(self, turn: int, size: int) -> _Segment:
        """Give the segment of a turn, made larger if it has to hold more."""
        while len(self._segments) <= turn:
            descriptor = os.memfd_create("loaderkit", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, mmap.PAGESIZE)
            memory = mmap.mmap(descriptor, mmap.PAGESIZE)
            self._segments.append(_Segment(descriptor, memory))
            self._numbers.append(0)
        segment = self._segments[turn]
        if len(segment.memory) < size:
            # The smaller mapping goes with the last tensor in it.
            new_size = size + size // _SPARE_SHARE
            os.ftruncate(segment.descriptor, new_size)
            memory = mmap.mmap(segment.descriptor, new_size)
            segment = self._segments[turn] = _Segment(segment.descriptor, memory)
        return segment


def give_segments(segments: SegmentRing | None) -> None:
    """Say which segments the batches of this worker are put into."""
    _segments_of_worker.set(segments)


def segments_of_worker() -> SegmentRing | None:
    """Give the segments of this process; None where it is no worker of ours."""
    return _segments_of_worker.get()


@contextlib.contextmanager
def filling_segments() -> Iterator[None]:
    """Let the tensors of one batch be made where it is going to be sent from.

    Only while no code runs that may keep one of them: the segment is filled again.
    """
    segments = _segments_of_worker.get()
    if segments is not None:
        # Of a batch that was not finished.
        segments.drop_reserved()
    token = _segments_to_fill.set(segments)
    try:
        yield
    finally:
        _segments_to_fill.reset(token)


def reserve_segment(count_bytes: Callable[[], int]) -> torch.Tensor | None:
    """Give the memory that the tensors of a batch are to be made in.

    Args:
        count_bytes: Says how many bytes they have; called where it matters.

    Returns:
        ``[bytes]`` uint8; None where they are to be made in memory of their own.
    """
    segments = _segments_to_fill.get()
    if segments is None:
        return None
    nbytes = count_bytes()
    return segments.reserve(nbytes) if nbytes > INLINE_BYTES else None


def can_share_batches() -> bool:
    """Tell whether the process that started this one can open its segments."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return False
    # The parent reads this process's descriptors in /proc; whether it may is the same
    # question as whether this process may read the parent's.
    with contextlib.suppress(OSError):
        return any(Path(f"/proc/{os.getppid()}/fd").iterdir())
    return False


_MAPPED_SEGMENTS: dict[tuple[int, int], mmap.mmap] = {}
"""Segments of workers, by process and descriptor: mapping one anew for each batch would
cost what its pages cost.  ``forget`` clears them."""


def forget(pids: Collection[int]) -> None:
    """Let go of the segments of workers that have ended.

    Args:
        pids: Their process numbers.
    """
    ended = [key for key in list(_MAPPED_SEGMENTS) if key[0] in pids]
    for key in ended:
        _MAPPED_SEGMENTS.pop(key, None)


def map_segment(segment: SegmentRef) -> mmap.mmap:
    """Map a worker's segment, or give it as it was mapped before."""
    key = (segment.pid, segment.descriptor)
    memory = _MAPPED_SEGMENTS.get(key)
    is_current = (
        memory is not None
        and len(memory) == segment.size
        # Another process, or another descriptor, may have the numbers by now.
        and _read_number(memory, _SENT) == segment.number
    )
    if memory is None or not is_current:
        file = f"/proc/{segment.pid}/fd/{segment.descriptor}"
        descriptor = os.open(file, os.O_RDWR)
        try:
            memory = _MAPPED_SEGMENTS[key] = mmap.mmap(descriptor, segment.size)
        finally:
            os.close(descriptor)
    return memory


def _read_number(memory: mmap.mmap, place: int) -> int:
    return int.from_bytes(memory[place : place + _NUMBER_BYTES], "little")


def _write_number(memory: mmap.mmap, place: int, number: int) -> None:
    memory[place : place + _NUMBER_BYTES] = number.to_bytes(_NUMBER_BYTES, "little")


def number_in(memory: mmap.mmap) -> int:
    """Read the number of the batch that is in a segment."""
    return _read_number(memory, _SENT)


def note_opened(memory: mmap.mmap, number: int) -> None:
    """Tell the worker that a batch is not needed any more: its segment is free."""
    _write_number(memory, _OPENED, number)
