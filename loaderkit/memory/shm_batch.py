"""A batch as one segment of shared memory, on its way out of a worker.

torch sends every tensor of a batch by itself: a file in /dev/shm, a descriptor, a
socket with a handshake, a mapping each, some 20 for a batch of graphs.  A shared batch
is one anonymous segment that is not in /dev/shm (a container's 64 MiB are no limit),
mapped by the receiver straight from the worker's descriptors.  When it is the batch's
turn (``ReceivedBatch.open``), the receiver copies the tensors out: what it keeps is its
own, and costs no descriptor however many batches are kept.  Until then a batch that
came before its turn stays where it is: copied at once, it would be there twice.

A worker has a few segments and fills them again, since fresh pages cost more than the
bytes in them (10 MiB: 5 ms fresh, 1 ms used again, either end).  A segment begins with
the number of the batch in it, which the receiver looks at before and after it copies,
and the number of the last one that was copied out, which the worker looks at.

A batch of a cache is gathered straight into a segment (``filling_segments``).  Of any
other the tensors are copied there.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import math
import mmap
import os
import pickle
import sys
import time
import weakref
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data._utils.collate import (
    collate,
    collate_tensor_fn,
)
from torch.utils.data._utils.collate import (
    default_collate_fn_map as collate_functions,
)

from loaderkit.errors import LoaderError
from loaderkit.nests import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

_ALIGNMENT = 64
"""Where a tensor begins in a segment: a line of a core's cache."""
_HEADER_BYTES = 64
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
_INLINE_BYTES = 64 << 10
"""Smaller batches travel with the message itself: a pipe of Linux holds so much."""
_SPARE_SHARE = 4
"""A segment that is too small becomes larger than asked for by the fourth part, so that
batches of about one size seldom make it grow."""

sends_shared_batches: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "sends_shared_batches", default=False
)
"""True in a worker whose batches travel as one segment: nobody else need share them."""
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


class TensorSlot(NamedTuple):
    """Where in a segment a tensor lies, and what it looks like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Bytes from the end of the header."""
    nbytes: int
    axes: tuple[int, ...] = ()
    """Its axes in the order in which they lie in memory, such as (0, 2, 3, 1) of
    channels_last; empty: as they are."""

    @classmethod
    def of(cls, tensor: torch.Tensor, start: int) -> TensorSlot:
        """Describe a tensor that is to lie at some place."""
        nbytes = tensor.numel() * tensor.element_size()
        shape, axes = tuple(tensor.shape), _axes_in_memory(tensor)
        return cls(tensor.dtype, shape, start, nbytes, axes)

    @property
    def end(self) -> int:
        """Where the next tensor may begin: the end, aligned."""
        return self.start + _aligned(self.nbytes)


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
        descriptor, memory = self._segment_of(self._turn, _HEADER_BYTES + total)
        if not is_reserved:
            self._write_next_number(memory)
        fill(memoryview(memory)[_HEADER_BYTES : _HEADER_BYTES + total])
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
        memory = self._segment_of(self._turn, _HEADER_BYTES + nbytes).memory
        self._write_next_number(memory)
        self._numbers[self._turn] = 0
        self._reserved = torch.frombuffer(
            memory, dtype=torch.uint8, count=nbytes, offset=_HEADER_BYTES
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
    return segments.reserve(nbytes) if nbytes > _INLINE_BYTES else None


class SharedBatch:
    """A batch, pickled with its tensors left out and put into one segment.

    Args:
        batch: Any nest that pickles.
        segments: Those of this worker.
    """

    def __init__(self, batch: object, segments: SegmentRing) -> None:
        tensors: list[torch.Tensor] = []
        pickled = io.BytesIO()
        _TensorlessPickler(pickled, tensors).dump(batch)
        self.pickled = pickled.getvalue()
        self.slots = _lay_out_tensors(tensors)
        self.nbytes = _last_end(self.slots)
        self.inline: bytes | None = None
        self.segment: SegmentRef | None = None
        if self.nbytes <= _INLINE_BYTES:
            segments.drop_reserved()
            buffer = bytearray(self.nbytes)
            _copy_tensors_into(tensors, self.slots, buffer)
            self.inline = bytes(buffer)
            return
        copied = list(range(len(tensors)))
        if segments.reserved is not None:
            self.slots, copied = _lay_out_around(segments.reserved, tensors)
        fill = functools.partial(
            _copy_tensors_into,
            [tensors[number] for number in copied],
            [self.slots[number] for number in copied],
        )
        self.segment = segments.put(_last_end(self.slots), fill)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReceivedBatch, (self.pickled, self.slots, self.inline, self.segment)


def default_collate(samples: Any) -> Any:
    """Join samples as torch's ``default_collate`` does.

    In a worker torch writes each tensor of the batch to /dev/shm, from where a shared
    batch would copy it once more: 200 x 128 rows of 17 floats take 2.7 ms, not 0.7.  So
    where batches are shared, tensors are stacked in ordinary memory, by the table of
    functions that torch has for such needs.  PyG's ``Collater`` has no such table: its
    batches go through /dev/shm (docs/loader.md says what that costs).

    Args:
        samples: As for torch's.
    """
    if not sends_shared_batches.get():
        return torch.utils.data.default_collate(samples)
    functions = dict(collate_functions)
    # Somebody may have registered a function of their own in place of torch's.
    if functions.get(torch.Tensor) is collate_tensor_fn:
        functions[torch.Tensor] = _stack_in_plain_memory
    return collate(samples, collate_fn_map=functions)


def _stack_in_plain_memory(
    tensors: Sequence[torch.Tensor], *, collate_fn_map: Any = None
) -> Any:
    first = tensors[0]
    if first.is_nested or first.layout is not torch.strided:
        # torch refuses these, with a message of its own.
        return collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
    return torch.stack(list(tensors))


def can_share_batches() -> bool:
    """Tell whether the process that started this one can open its segments."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return False
    # The parent reads this process's descriptors in /proc; whether it may is the same
    # question as whether this process may read the parent's.
    with contextlib.suppress(OSError):
        return any(Path(f"/proc/{os.getppid()}/fd").iterdir())
    return False


class _TensorlessPickler(ForkingPickler):
    """Leaves the tensors of the CPU out, and notes them."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors = tensors
        self._numbers: dict[int, int] = {}
        """Of each tensor by its ``id``: one that is met twice stays one."""

    def persistent_id(self, obj: Any) -> int | None:
        if not _is_plain_run_of_bytes(obj):
            return None  # pickled as torch does it
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number


def _is_plain_run_of_bytes(obj: object) -> bool:
    """Tell whether an object is a tensor that its bytes alone make again."""
    if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
        return False
    if obj.device.type != "cpu" or obj.requires_grad:
        return False
    return not (obj.is_quantized or obj.is_nested)


def named_in_pickle(nest: object) -> list[type | FunctionType]:
    """Pickle a nest without copying or sharing its tensors, and forget it.

    torch's own pickling for other processes moves every tensor to shared memory.

    Args:
        nest: What would be sent.

    Returns:
        The classes and functions that whoever unpickles it has to import.

    Raises:
        Exception: Whatever its parts raise that cannot be pickled.
    """
    pickler = _NotingPickler(cast("io.BytesIO", _Nowhere()), [])
    # Locks, queues and shared values let themselves be pickled for a process that is
    # being started, and at no other time.
    starting = context.get_spawning_popen()
    no_process: Any = _NoProcess()
    context.set_spawning_popen(no_process)
    try:
        pickler.dump(nest)
    finally:
        context.set_spawning_popen(starting)
    return pickler.named


def why_unsendable(batch: object) -> str:
    """Say why a batch cannot be pickled to leave a worker; empty if it can.

    >>> why_unsendable([torch.ones(2), {"name": "a"}])
    ''
    >>> why_unsendable(number for number in range(3))
    "TypeError: cannot pickle 'generator' object"
    """
    pickler = _TensorlessPickler(cast("io.BytesIO", _Nowhere()), [])
    # Classes of the user's say how they are pickled, by code that may raise anything.
    try:
        pickler.dump(batch)
    except Exception as error:  # noqa: BLE001
        # The first sentence: torch's errors go on with advice for queues of its own.
        return f"{type(error).__name__}: {error}".split(". ")[0]
    return ""


class _NoProcess:
    """Stands in for a process that is being started, and is handed descriptors."""

    def duplicate_for_child(self, handle: int) -> int:
        return handle

    def DupFd(self, fd: int) -> int:  # noqa: N802 -- multiprocessing's name
        return fd


class _NotingPickler(_TensorlessPickler):
    """Notes what it sends by name."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file, tensors)
        self.named: list[type | FunctionType] = []

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, type | FunctionType):
            self.named.append(obj)
        return NotImplemented  # pickled as ever


class _Nowhere(io.RawIOBase):
    """A file that takes everything and keeps nothing.

    A pickler calls nothing but its ``write``, and is annotated to want more.  From
    64 KiB on that gets an array as a ``PickleBuffer``, which has no ``len``.
    """

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class _TensorUnpickler(pickle.Unpickler):
    """Puts the tensors back that were left out."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.tensors[pid]
        return tensor


def _lay_out_tensors(tensors: list[torch.Tensor]) -> list[TensorSlot]:
    """Say where each tensor will lie, one after the other."""
    slots: list[TensorSlot] = []
    start = 0
    for tensor in tensors:
        slot = TensorSlot.of(tensor, start)
        slots.append(slot)
        start = slot.end
    return slots


def _axes_in_memory(tensor: torch.Tensor) -> tuple[int, ...]:
    """Say in which order the axes of a tensor lie in memory; empty: as they are.

    torch's own loader keeps strides, and convolutions choose their kernels by them.

    >>> _axes_in_memory(torch.ones(2, 3).T), _axes_in_memory(torch.ones(2, 3))
    ((1, 0), ())
    >>> _axes_in_memory(torch.ones(2, 3)[:, ::2])  # copied, without the gaps
    ()
    """
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    axes = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    return tuple(axes) if tensor.permute(axes).is_contiguous() else ()


def _lay_out_around(
    reserved: torch.Tensor, tensors: list[torch.Tensor]
) -> tuple[list[TensorSlot], list[int]]:
    """Say where each tensor lies or will lie, where some lie in a segment already.

    Args:
        reserved: That memory ``[bytes]``.
        tensors: Of the batch.

    Returns:
        A slot for each tensor, and the numbers of those that are to be copied.
    """
    slots: list[TensorSlot] = []
    copied: list[int] = []
    # Behind all of it: what is copied may be a view of a part that is in no slot.
    free_start = _aligned(len(reserved))
    for number, tensor in enumerate(tensors):
        if _is_run_within(tensor, reserved):
            start = tensor.data_ptr() - reserved.data_ptr()
        else:
            copied.append(number)
            start = free_start
        slot = TensorSlot.of(tensor, start)
        slots.append(slot)
        free_start = max(free_start, slot.end)
    return slots, copied


def _is_run_within(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Tell whether a tensor's numbers lie in some memory, one after the other."""
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        return False
    storage = tensor.untyped_storage()
    return storage.data_ptr() == memory.untyped_storage().data_ptr()


def _last_end(slots: list[TensorSlot]) -> int:
    """Give where the last tensor of a segment ends, in whatever order they lie."""
    return max((slot.end for slot in slots), default=0)


def _aligned(nbytes: int) -> int:
    """Round up to where a tensor may begin."""
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT


class NotUnpickledError(Exception):
    """Code of the user's objects failed as a batch was put together again.

    Args:
        error: What it raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class ReceivedBatch:
    """A batch that came from a worker, and is not put together yet.

    Args:
        pickled: The batch without its tensors.
        slots: What they look like, and where they are.
        inline: Their bytes, where they came with the message.
        segment: Where they lie otherwise.
    """

    def __init__(
        self,
        pickled: bytes,
        slots: list[TensorSlot],
        inline: bytes | None,
        segment: SegmentRef | None,
    ) -> None:
        self._pickled, self._slots, self._inline = pickled, slots, inline
        self._number = 0
        self._memory: mmap.mmap | None = None
        if segment is not None:
            # As long as the worker lives, who may end before the batch is opened.
            self._memory = _map_segment(segment)
            self._number = segment.number
            # Of a batch that nobody opens, too: a loop was left.
            free = weakref.finalize(
                self, _write_number, self._memory, _OPENED, segment.number
            )
            free.atexit = False
            self._free = free

    def open(self) -> Any:
        """Put the batch together again, in memory of its own; once.

        Raises:
            LoaderError: Its segment was filled again.
            NotUnpickledError: Code of the user's objects failed.
        """
        if self._memory is None:
            content = np.frombuffer(self._inline or b"", np.uint8)
            tensors = _copy_tensors_from(content, self._slots)
        else:
            content = np.frombuffer(self._memory, np.uint8, offset=_HEADER_BYTES)
            tensors = _copy_tensors_from(content, self._slots)
            # After the copy: what was written over meanwhile would be half of each.
            if _read_number(self._memory, _SENT) != self._number:
                message = "A batch was overwritten by a later one before it was read."
                raise LoaderError(
                    message,
                    why="a worker ran further ahead than torch says",
                    fix="report this with your versions of torch and loaderkit; "
                    "num_workers=0",
                )
            self._free()
        try:
            return _TensorUnpickler(io.BytesIO(self._pickled), tensors).load()
        except Exception as error:
            raise NotUnpickledError(error) from error


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


def _map_segment(segment: SegmentRef) -> mmap.mmap:
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


def _copy_tensors_into(
    tensors: list[torch.Tensor],
    slots: list[TensorSlot],
    buffer: Any,
) -> None:
    target = np.frombuffer(buffer, np.uint8)
    for tensor, slot in zip(tensors, slots, strict=True):
        # numpy refuses a view of no bytes at the end of a buffer.
        if slot.nbytes:
            in_order = tensor.permute(slot.axes) if slot.axes else tensor
            content = tensor_bytes(in_order).numpy()
            target[slot.start : slot.start + slot.nbytes] = content


def _copy_tensors_from(content: Any, slots: list[TensorSlot]) -> list[torch.Tensor]:
    tensors = []
    for slot in slots:
        flat = torch.empty(math.prod(slot.shape), dtype=slot.dtype)
        if slot.nbytes:
            source = content[slot.start : slot.start + slot.nbytes]
            flat.view(torch.uint8).numpy()[:] = source
        tensors.append(_shaped(flat, slot))
    return tensors


def _shaped(flat: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
    """View numbers in the order of memory as the tensor that was sent."""
    if not slot.axes:
        return flat.view(slot.shape)
    in_order = flat.view([slot.shape[axis] for axis in slot.axes])
    return in_order.permute([slot.axes.index(axis) for axis in range(len(slot.axes))])
