"""A batch as one segment of shared memory, on its way out of a worker.

torch sends every tensor of a batch by itself: a file in /dev/shm, a descriptor, a
socket with a handshake, a mapping each, some 20 for a batch of graphs.  A shared batch
is one anonymous segment that is not in /dev/shm (a container's 64 MiB are no limit),
mapped by the receiver straight from the worker's descriptors.  When it is the batch's
turn (``ReceivedBatch.open``), the receiver copies the tensors out: what it keeps is its
own, and costs no descriptor however many batches are kept.  Until then a batch that
came before its turn stays where it is: copied at once, it would be there twice.

The segments are those of ``shm_segments``.  A batch of a cache is gathered straight
into one (``filling_segments``).  Of any other the tensors are copied there.
"""

from __future__ import annotations

import contextvars
import functools
import io
import math
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

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
from loaderkit.memory.shm_segments import (
    HEADER_BYTES,
    INLINE_BYTES,
    SegmentRef,
    SegmentRing,
    map_segment,
    note_opened,
    number_in,
)
from loaderkit.memory.tensorless_pickles import TensorlessPickler, TensorUnpickler
from loaderkit.nests import tensor_bytes

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

_ALIGNMENT = 64
"""Where a tensor begins in a segment: a line of a core's cache."""

sends_shared_batches: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "sends_shared_batches", default=False
)
"""True in a worker whose batches travel as one segment: nobody else need share them."""


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


class SharedBatch:
    """A batch, pickled with its tensors left out and put into one segment.

    Args:
        batch: Any nest that pickles.
        segments: Those of this worker.
    """

    def __init__(self, batch: object, segments: SegmentRing) -> None:
        tensors: list[torch.Tensor] = []
        pickled = io.BytesIO()
        TensorlessPickler(pickled, tensors).dump(batch)
        self.pickled = pickled.getvalue()
        self.slots = _lay_out_tensors(tensors)
        self.nbytes = _last_end(self.slots)
        self.inline: bytes | None = None
        self.segment: SegmentRef | None = None
        if self.nbytes <= INLINE_BYTES:
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
            self._memory = map_segment(segment)
            self._number = segment.number
            # Of a batch that nobody opens, too: a loop was left.
            free = weakref.finalize(self, note_opened, self._memory, segment.number)
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
            content = np.frombuffer(self._memory, np.uint8, offset=HEADER_BYTES)
            tensors = _copy_tensors_from(content, self._slots)
            # After the copy: what was written over meanwhile would be half of each.
            if number_in(self._memory) != self._number:
                message = "A batch was overwritten by a later one before it was read."
                raise LoaderError(
                    message,
                    why="a worker ran further ahead than torch says",
                    fix="report this with your versions of torch and loaderkit; "
                    "num_workers=0",
                )
            self._free()
        try:
            return TensorUnpickler(io.BytesIO(self._pickled), tensors).load()
        except Exception as error:
            raise NotUnpickledError(error) from error


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
