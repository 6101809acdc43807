"""Finds what an object holds that does not survive a fork.

A file that was open before a fork has one position for all processes.  If one process
seeks and another reads, they read each other's bytes without any error.  HDF5, SQLite
and LMDB forbid the use of handles that were opened before a fork.  The threads of a
pool do not exist in the new process, which would wait for their answers for ever.  The
driver of a GPU that was used before a fork cannot be used after it.
"""

from __future__ import annotations

import io
import multiprocessing.pool
import sys
import threading
import types
import warnings
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

HazardKind: TypeAlias = Literal["file", "threads", "device"]

_DEEPEST = 5
"""Levels of attributes that are searched.  Chosen: enough for a file in an archive in a
dataset in a wrapper."""
_MOST_OBJECTS = 2000
"""Objects that are looked at in all.  Chosen: a list of millions of samples must not be
searched each time a loader is built."""
_MOST_ITEMS = 100
"""Items of a list or dict that are looked at.  Chosen: if a list of samples holds
files, the first ones do."""
_FORBIDDEN = (
    ("h5py", ("File", "Group", "Dataset")),
    ("sqlite3", ("Connection", "Cursor")),
    ("lmdb", ("Environment", "Transaction", "Cursor")),
    ("tables", ("File", "Node")),
    ("netCDF4", ("Dataset",)),
)
"""Classes whose objects must not be used after a fork, by module."""
_OPAQUE = (
    str,
    bytes,
    bytearray,
    memoryview,
    int,
    float,
    complex,
    range,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
)
"""Classes whose objects hold nothing that a fork could break."""

_HOST_DEVICES = ("cpu", "meta")
"""Of torch: what lies there has no driver."""
_POOLS = (Executor, multiprocessing.pool.Pool)
"""Classes whose objects give work to threads.  Pools of processes have threads, too,
which talk to the processes."""


@dataclass(frozen=True)
class ForkHazard:
    """An object that must not be used after a fork."""

    where: str
    """The attribute and its class, such as "dataset.file (BufferedReader)"."""
    kind: HazardKind
    """It is an open file or handle, has threads, or lies on a device."""
    device: str = ""
    """Which device that is, such as "cuda:0"; empty if none, or not known."""

    @property
    def reason(self) -> str:
        """Why forked workers cannot be used."""
        if self.kind == "file":
            return f"forked workers would share the position of {self.where}"
        if self.kind == "device":
            device = self.device or "the device"
            return f"forked workers cannot use {device}, where {self.where} lies"
        return f"the threads of {self.where} do not exist in forked workers"

    @property
    def danger(self) -> str:
        """What can happen in forked workers."""
        if self.kind == "file":
            return "they can read each other's bytes"
        if self.kind == "device":
            return "its driver does not survive a fork, and reading would fail"
        return "they would wait for them for ever"

    @property
    def fix(self) -> str:
        """What the user can do."""
        if self.kind == "device":
            return "keep samples on the host"
        verb = "open" if self.kind == "file" else "start"
        return f"{verb} it when a sample is first read"


def warn_of_fork_hazard(stacklevel: int, **parts: object) -> None:
    """Warn, before processes are forked, of what does not survive that.

    Args:
        stacklevel: As of ``warnings.warn``; 2 is the caller of this function.
        parts: See ``find_fork_hazard``.
    """
    hazard = find_fork_hazard(**parts)
    if hazard is not None:
        text = (
            f"{hazard.reason}: {hazard.danger}.  {hazard.fix.capitalize()}, or begin "
            "without it (num_workers=0 or a spawned worker shares nothing)"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)


def tells_of_forked_device(text: str) -> bool:
    """Tell whether torch says that a device was used before a fork, and after it.

    Args:
        text: Of an error.

    >>> tells_of_forked_device("Cannot re-initialize CUDA in forked subprocess. To ...")
    True
    """
    return "Cannot re-initialize" in text and "in forked subprocess" in text


def find_fork_hazard(**parts: object) -> ForkHazard | None:
    """Find an open file, threads or device memory that forked processes would use.

    Args:
        parts: Objects to search, by the name that the message begins with.

    Returns:
        The first one found; None if there is none.

    >>> class Reader:
    ...     def __init__(self, path):
    ...         self.file = open(path, "rb")
    >>> reader = Reader(__file__)
    >>> find_fork_hazard(dataset=reader).reason
    'forked workers would share the position of dataset.file (BufferedReader)'
    >>> reader.file.close()
    >>> find_fork_hazard(dataset=reader) is None
    True
    """
    forbidden = _loaded_classes()
    looked_at: set[int] = set()
    level = list(parts.items())
    for _ in range(_DEEPEST):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if id(value) in looked_at or isinstance(value, _OPAQUE) or value is None:
                continue
            if len(looked_at) == _MOST_OBJECTS:
                return None
            looked_at.add(id(value))
            where = f"{path} ({type(value).__name__})"
            if _is_shared(value, forbidden):
                return ForkHazard(where, "file")
            if _has_threads(value):
                return ForkHazard(where, "threads")
            device = _device_of(value)
            if device:
                return ForkHazard(where, "device", device)
            below += _parts_of_object(path, value)
        level = below
    return None


def _has_threads(value: object) -> bool:
    """Return whether threads of this process do the work of an object.

    An executor starts its threads with its first task.  Whether it has had one cannot
    be seen, so every executor counts.
    """
    if isinstance(value, threading.Thread):
        return value.is_alive() and value is not threading.main_thread()
    return isinstance(value, _POOLS)


def _device_of(value: object) -> str:
    """Name the device that a tensor lies on; empty on the host, and of no tensor."""
    # Without torch there are no tensors, and to import it would take seconds.
    tensor_type: Any = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor_type is None or not isinstance(value, tensor_type):
        return ""
    return "" if value.device.type in _HOST_DEVICES else str(value.device)


def _is_shared(value: object, forbidden: tuple[type, ...]) -> bool:
    if value is sys.stdin or value is sys.stdout or value is sys.stderr:
        return False  # all processes share these, with or without a loader
    if isinstance(value, io.IOBase):
        try:
            value.fileno()
            return value.seekable() and value.readable()
        except (OSError, ValueError):  # in memory, or closed
            return False
    if isinstance(value, forbidden):
        # A closed file of h5py is false.  The other classes do not show whether they
        # are closed.
        return bool(value) if type(value).__module__.startswith("h5py") else True
    return False


def _loaded_classes() -> tuple[type, ...]:
    """Return the forbidden classes of modules that are imported.

    There are no objects of the others, and importing their modules would be slow.
    """
    classes = []
    for module, names in _FORBIDDEN:
        # Other versions of a library may lack a class.
        candidates = [getattr(sys.modules.get(module), name, None) for name in names]
        classes += [cls for cls in candidates if isinstance(cls, type)]
    return tuple(classes)


def _parts_of_object(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """List what an object holds, without running code of its class."""
    if type(value) in {list, tuple}:
        for number, item in enumerate(value[:_MOST_ITEMS]):
            yield f"{path}[{number}]", item
    elif type(value) is dict:
        for key, item in list(value.items())[:_MOST_ITEMS]:
            yield f"{path}[{key!r}]", item
    else:
        try:
            held = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        for name, item in list(held.items()):
            yield f"{path}.{name}", item
