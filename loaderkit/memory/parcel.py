"""A batch as one segment of shared memory, on its way out of a worker.

torch sends every tensor of a batch by itself: a file in /dev/shm, a descriptor, a
socket with a handshake, a mapping each, some 20 for a batch of graphs.  A parcel is one
anonymous segment that is not in /dev/shm (a container's 64 MiB are no limit), opened
by the receiver straight from the worker's descriptors.  The receiver copies the tensors
out and closes it: what it keeps is its own, and costs no descriptor.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import math
import mmap
import os
import pickle
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections import deque

_ALIGNMENT = 64
_INLINE_BYTES = 64 << 10
"""Smaller batches travel with the message itself."""

packing: contextvars.ContextVar[bool] = contextvars.ContextVar("packing", default=False)
"""True in a worker whose batches travel as parcels: nobody else need share them."""


class Parcel:
    """A batch, pickled with its tensors left out and put into one segment.

    Args:
        batch: Any nest that pickles.
        sent: The segments this worker still holds open for the receiver; the oldest
            is closed when there are more than fit.
    """

    def __init__(self, batch: Any, sent: deque[int]) -> None:
        self.tensors: list[torch.Tensor] = []
        text = io.BytesIO()
        pickler = _Pickler(text, self.tensors)
        pickler.dump(batch)
        self.text = text.getvalue()
        self.places, total = _places(self.tensors)
        self.nbytes = total
        self.inline: bytes | None = None
        self.where: tuple[int, int] | None = None
        if total <= _INLINE_BYTES:
            room = bytearray(total)
            self._fill(room)
            self.inline = bytes(room)
        else:
            self.where = (os.getpid(), self._segment(total, sent))
        self.tensors = []

    def _segment(self, total: int, sent: deque[int]) -> int:
        file = os.memfd_create("loaderkit", os.MFD_CLOEXEC)
        os.ftruncate(file, total)
        with mmap.mmap(file, total) as room:
            self._fill(room)
        if sent.maxlen is not None and len(sent) == sent.maxlen:
            os.close(sent.popleft())
        sent.append(file)
        return file

    def _fill(self, room: Any) -> None:
        into = np.frombuffer(room, np.uint8)
        for tensor, (_, _, start, nbytes) in zip(
            self.tensors, self.places, strict=True
        ):
            if nbytes:
                into[start : start + nbytes] = _bits(tensor)
        del into

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.text, self.places, self.inline, self.where)


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
        if obj.is_quantized:
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        found: torch.Tensor = self.tensors[pid]
        return found


def _places(
    tensors: list[torch.Tensor],
) -> tuple[list[tuple[torch.dtype, tuple[int, ...], int, int]], int]:
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
    places: list[tuple[torch.dtype, tuple[int, ...], int, int]],
    inline: bytes | None,
    where: tuple[int, int] | None,
) -> Any:
    """Put the batch together again, in memory of its own."""
    with contextlib.ExitStack() as stack:
        room: Any = inline
        if where is not None:
            file = os.open(f"/proc/{where[0]}/fd/{where[1]}", os.O_RDWR)
            stack.callback(os.close, file)
            room = stack.enter_context(mmap.mmap(file, os.fstat(file).st_size))
        tensors = _copied(np.frombuffer(room or b"", np.uint8), places)
    return _Unpickler(io.BytesIO(text), tensors).load()


def _copied(
    source: Any, places: list[tuple[torch.dtype, tuple[int, ...], int, int]]
) -> list[torch.Tensor]:
    found = []
    for dtype, shape, start, nbytes in places:
        made = torch.empty(math.prod(shape), dtype=dtype)
        if nbytes:
            made.view(torch.uint8).numpy()[:] = source[start : start + nbytes]
        found.append(made.view(shape))
    return found
