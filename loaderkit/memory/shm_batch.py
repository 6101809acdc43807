"""A batch as one segment of shared memory, on its way out of a worker.

torch sends every tensor of a batch by itself: a file in /dev/shm, a descriptor, a
socket with a handshake, a mapping each, some 20 for a batch of graphs.  A parcel is one
anonymous segment that is not in /dev/shm (a container's 64 MiB are no limit), opened
by the receiver straight from the worker's descriptors.  The receiver copies the tensors
out: what it keeps is its own, and costs no descriptor however many batches are kept.

A worker has a few segments and fills them in turn, since fresh pages cost more than the
bytes in them (10 MiB: 5 ms fresh, 1 ms used again, either end).  A segment begins with
the number of the batch in it, which the receiver looks at before and after it copies.
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
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
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

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    Place = tuple[torch.dtype, tuple[int, ...], int, int]

_ALIGNMENT = 64
_HEADER = 64
_INLINE_BYTES = 64 << 10
"""Smaller batches travel with the message itself."""

packing: contextvars.ContextVar[bool] = contextvars.ContextVar("packing", default=False)
"""True in a worker whose batches travel as parcels: nobody else need share them."""


class SegmentRing:
    """The segments of one worker, filled in turn.

    Args:
        count: How many: batches that may be under way, and one more.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._rooms: list[tuple[int, mmap.mmap]] = []
        self._turn = 0
        self._number = int.from_bytes(os.urandom(6), "little")

    def put(self, total: int, fill: Callable[[Any], None]) -> Where:
        """Fill the next segment.

        Args:
            total: Bytes it must hold.
            fill: Writes them ``[total]``.

        Returns:
            Where the receiver finds them.
        """
        self._turn = (self._turn + 1) % self._count
        while len(self._rooms) <= self._turn:
            file = os.memfd_create("loaderkit", os.MFD_CLOEXEC)
            os.ftruncate(file, mmap.PAGESIZE)
            self._rooms.append((file, mmap.mmap(file, mmap.PAGESIZE)))
        file, room = self._rooms[self._turn]
        if len(room) < _HEADER + total:
            room.close()
            size = _HEADER + total + total // 4
            os.ftruncate(file, size)
            room = mmap.mmap(file, size)
            self._rooms[self._turn] = (file, room)
        self._number += 1
        _write_number(room, self._number)
        fill(memoryview(room)[_HEADER : _HEADER + total])
        return Where(os.getpid(), file, len(room), self._number)

    def close(self) -> None:
        """Give the memory back; what has not been received is lost."""
        while self._rooms:
            file, room = self._rooms.pop()
            room.close()
            os.close(file)


class Where(NamedTuple):
    """Where a batch lies."""

    pid: int
    file: int
    size: int
    number: int


class SharedBatch:
    """A batch, pickled with its tensors left out and put into one segment.

    Args:
        batch: Any nest that pickles.
        segments: Those of this worker.
    """

    def __init__(self, batch: Any, segments: SegmentRing) -> None:
        tensors: list[torch.Tensor] = []
        text = io.BytesIO()
        _Pickler(text, tensors).dump(batch)
        self.text = text.getvalue()
        self.places, total = _places(tensors)
        self.nbytes = total
        self.inline: bytes | None = None
        self.where: Where | None = None
        fill = functools.partial(_fill, tensors, self.places)
        if total <= _INLINE_BYTES:
            room = bytearray(total)
            fill(room)
            self.inline = bytes(room)
        else:
            self.where = segments.put(total, fill)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.text, self.places, self.inline, self.where)


def default_collate(samples: Any) -> Any:
    """Join samples as torch's ``default_collate`` does.

    In a worker torch writes each tensor of the batch to /dev/shm, from where a parcel
    would copy it once more: 200 x 128 rows of 17 floats take 2.7 ms, not 0.7.  So
    where batches are packed, tensors are stacked in ordinary memory, by the table of
    functions that torch has for such needs.  PyG's ``Collater`` has no such table: its
    batches go through /dev/shm (docs/loader.md says what that costs).

    Args:
        samples: As for torch's.
    """
    if not packing.get():
        return torch.utils.data.default_collate(samples)
    functions = dict(collate_functions)
    # Somebody may have registered a function of their own in place of torch's.
    if functions.get(torch.Tensor) is collate_tensor_fn:
        functions[torch.Tensor] = _stack
    return collate(samples, collate_fn_map=functions)


def _stack(tensors: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
    first = tensors[0]
    if first.is_nested or first.layout is not torch.strided:
        return collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)  # it refuses
    return torch.stack(list(tensors))


def parcels_work() -> bool:
    """Tell whether the process that started this one can open its segments."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return False
    with contextlib.suppress(OSError):
        return any(Path(f"/proc/{os.getppid()}/fd").iterdir())
    return False


class _Pickler(ForkingPickler):
    """Leaves the tensors of the CPU out, and notes them."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors = tensors
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        plain = type(obj) is torch.Tensor and obj.layout is torch.strided
        if not plain or obj.device.type != "cpu" or obj.requires_grad:
            return None
        if obj.is_quantized or obj.is_nested:
            return None  # no plain run of bytes; torch sends them in its own way
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number


def check_pickles(nest: Any) -> None:
    """Pickle a nest without copying or sharing its tensors, and forget it.

    torch's own pickling for other processes moves every tensor to shared memory.

    Args:
        nest: What would be sent.

    Raises:
        Exception: Whatever its parts raise that cannot be pickled.
    """
    _Pickler(cast("io.BytesIO", _Nowhere()), []).dump(nest)


class _Nowhere(io.RawIOBase):
    """Takes everything and keeps nothing."""

    def write(self, text: Any) -> int:
        return len(text)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        found: torch.Tensor = self.tensors[pid]
        return found


def _places(
    tensors: list[torch.Tensor],
) -> tuple[list[Place], int]:
    found, at = [], 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        found.append((tensor.dtype, tuple(tensor.shape), at, nbytes))
        at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return found, at


def _bits(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).numpy()


def _open(
    text: bytes,
    places: list[Place],
    inline: bytes | None,
    where: Where | None,
) -> Any:
    """Put the batch together again, in memory of its own."""
    if where is None:
        tensors = _copied(np.frombuffer(inline or b"", np.uint8), places)
    else:
        room = _mapped(where)
        tensors = _copied(np.frombuffer(room, np.uint8, offset=_HEADER), places)
        if _read_number(room) != where.number:
            what = "A batch was overwritten by a later one while it was received."
            fix = "report this with your versions of torch and loaderkit; num_workers=0"
            raise LoaderError(what, why="a worker ran further ahead than torch says",
                              fix=fix)  # fmt: skip
    return _Unpickler(io.BytesIO(text), tensors).load()


_MAPPED: dict[tuple[int, int], mmap.mmap] = {}
"""Segments of workers, mapped once; ``forget`` clears them."""


def forget(pids: Collection[int]) -> None:
    """Let go of the segments of workers that have ended.

    Args:
        pids: Their process numbers.
    """
    for key in [key for key in list(_MAPPED) if key[0] in pids]:
        _MAPPED.pop(key, None)


def _mapped(where: Where) -> mmap.mmap:
    key = (where.pid, where.file)
    room = _MAPPED.get(key)
    if room is None or len(room) != where.size or _read_number(room) != where.number:
        file = os.open(f"/proc/{where.pid}/fd/{where.file}", os.O_RDWR)
        try:
            room = _MAPPED[key] = mmap.mmap(file, where.size)
        finally:
            os.close(file)
    return room


def _read_number(room: mmap.mmap) -> int:
    return int.from_bytes(room[:8], "little")


def _write_number(room: mmap.mmap, number: int) -> None:
    room[:8] = number.to_bytes(8, "little")


def _fill(tensors: list[torch.Tensor], places: list[Place], room: Any) -> None:
    into = np.frombuffer(room, np.uint8)
    for tensor, (_, _, start, nbytes) in zip(tensors, places, strict=True):
        if nbytes:
            into[start : start + nbytes] = _bits(tensor)


def _copied(source: Any, places: list[Place]) -> list[torch.Tensor]:
    found = []
    for dtype, shape, start, nbytes in places:
        made = torch.empty(math.prod(shape), dtype=dtype)
        if nbytes:
            made.view(torch.uint8).numpy()[:] = source[start : start + nbytes]
        found.append(made.view(shape))
    return found
