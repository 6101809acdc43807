"""Pickles with the tensors left out: what else there is, and whether it can be sent."""

from __future__ import annotations

import io
import pickle
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, cast

import torch

from loaderkit.error_texts import error_in_words


class TensorlessPickler(ForkingPickler):
    """Leaves the tensors of the CPU out, and notes them."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors = tensors
        self._numbers: dict[int, int] = {}
        """Of each tensor by its ``id``: one that is met twice stays one."""

    def persistent_id(self, obj: Any) -> int | None:
        """Give a tensor that is left out its number; None to pickle an object."""
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


class TensorUnpickler(pickle.Unpickler):
    """Puts the tensors back that were left out."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """Give the tensor of a number."""
        tensor: torch.Tensor = self.tensors[pid]
        return tensor


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
    pickler = TensorlessPickler(cast("io.BytesIO", _Nowhere()), [])
    # Classes of the user's say how they are pickled, by code that may raise anything.
    try:
        pickler.dump(batch)
    except Exception as error:  # noqa: BLE001
        # The first sentence: torch's errors go on with advice for queues of its own.
        return error_in_words(error).split(". ")[0]
    return ""


class _NoProcess:
    """Stands in for a process that is being started, and is handed descriptors."""

    def duplicate_for_child(self, handle: int) -> int:
        return handle

    def DupFd(self, fd: int) -> int:  # noqa: N802 -- multiprocessing's name
        return fd


class _NotingPickler(TensorlessPickler):
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
