"""Open files that an object holds, and that forked processes would share.

A file that was open before a fork has one position for all processes: where one seeks
and another reads, each gets the other's bytes, and nobody is told.  HDF5, SQLite and
LMDB forbid the use of what was opened before a fork.
"""

from __future__ import annotations

import io
import sys
import types
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEEPEST = 5
"""Attributes of attributes that are looked into: a file in an archive in a dataset in
a wrapper."""
_MOST_OBJECTS = 2000
"""Looked at in all; of a list of samples, the first few tell."""
_MOST_ITEMS = 100
_FORBIDDEN = (
    ("h5py", ("File", "Group", "Dataset")),
    ("sqlite3", ("Connection", "Cursor")),
    ("lmdb", ("Environment", "Transaction", "Cursor")),
    ("tables", ("File", "Node")),
    ("netCDF4", ("Dataset",)),
)
"""Classes whose objects must not be used after a fork, by the module they are in."""
_OPAQUE = (
    str, bytes, bytearray, memoryview, int, float, complex, type, types.ModuleType,
    types.FunctionType, types.BuiltinFunctionType, range,
)  # fmt: skip


def warn_of_shared_files(stacklevel: int, **parts: object) -> None:
    """Warn of an open file before processes are forked that would share it.

    Args:
        stacklevel: As of ``warnings.warn``; 2 is the caller.
        parts: See ``find_shared_files``.
    """
    found = find_shared_files(**parts)
    if found:
        text = f"{found} is open, and forked workers will share its position: they can "
        text += "read each other's bytes.  Open it when a sample is first read, or "
        text += "begin without it (num_workers=0 or a spawned worker shares nothing)"
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)


def find_shared_files(**parts: object) -> str:
    """Find an open file that processes forked from this one would share.

    Args:
        parts: Objects to look into, by the name that the message begins with.

    Returns:
        Where it is and what it is, such as "dataset.file (BufferedReader)"; empty when
        none was found.

    >>> class Reader:
    ...     def __init__(self, path):
    ...         self.file = open(path, "rb")
    >>> reader = Reader(__file__)
    >>> find_shared_files(dataset=reader)
    'dataset.file (BufferedReader)'
    >>> reader.file.close()
    >>> find_shared_files(dataset=reader)
    ''
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
                return ""
            looked_at.add(id(value))
            if _is_shared(value, forbidden):
                return f"{path} ({type(value).__name__})"
            below += _inside(path, value)
        level = below
    return ""


def _is_shared(value: Any, forbidden: tuple[type, ...]) -> bool:
    if value is sys.stdin or value is sys.stdout or value is sys.stderr:
        return False  # shared by all processes anyway
    if isinstance(value, io.IOBase):
        try:
            value.fileno()
            return value.seekable() and value.readable()
        except (OSError, ValueError):  # in memory, or closed
            return False
    if isinstance(value, forbidden):
        # A closed file of h5py is false; others are not asked, and do not tell.
        return bool(value) if type(value).__module__.startswith("h5py") else True
    return False


def _loaded_classes() -> tuple[type, ...]:
    """Give the classes of which there can be objects: of modules that are imported."""
    return tuple(
        getattr(sys.modules[module], name)
        for module, names in _FORBIDDEN
        if module in sys.modules
        for name in names
        if isinstance(getattr(sys.modules[module], name, None), type)
    )


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """List what an object holds, without running code of its own."""
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
