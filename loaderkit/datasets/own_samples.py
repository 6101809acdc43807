"""Samples are not asked for by the code that makes them, or says which there are.

``load`` that asks for ``len(self)`` or ``self[0]`` asks for the cache that is packed of
what it returns.  Nobody packs it but the caller of ``load``, who waits for ``load``.
``keys`` that asks for them would be called again, to say how many there are.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import sys
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from loaderkit.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FOLDERS: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "folders_packed_by_the_callers", default=frozenset()
)
"""Folders that are packed of the samples which the code that runs now makes.  A context
is a thread's own: other threads of the process may wait for the one that packs."""

_OF_THREADS: weakref.WeakKeyDictionary[threading.Thread, frozenset[str]]
_OF_THREADS = weakref.WeakKeyDictionary()
"""The same of threads that such code has started: it may wait for them."""

_BEING_MADE: Counter[str] = Counter()
"""Folders whose samples code of the user's makes now, in any thread of this process; a
thread that it started may live longer, and read the cache then."""


@functools.cache
def _install_hook() -> None:
    # A thread does not know who started it, and does not inherit its context.  Python
    # takes no hook out again; this one costs a comparison for each event.  Before 3.12
    # Python tells of no thread: such a one waits, and the line that is logged for those
    # who wait says what may be wrong.
    sys.addaudithook(_on_audit_event)


def have_all_threads_make_samples() -> None:
    """Say that whatever runs in this process was started by code that makes samples.

    It is so in packing workers, also of threads of which nothing else is known.
    """
    global _only_makes_samples
    _only_makes_samples = True


_only_makes_samples = False


def _on_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
    # The second is that of Python 3.13 and later.
    if event not in {"_thread.start_new_thread", "_thread.start_joinable_thread"}:
        return
    folders = _folders_of_this_code()
    thread = getattr(arguments[0], "__self__", None)
    if folders and isinstance(thread, threading.Thread):
        _OF_THREADS[thread] = folders


def _folders_of_this_code() -> frozenset[str]:
    """Give the folders that are packed of what this code makes, or its starter did."""
    folders = _FOLDERS.get()
    if _only_makes_samples:
        folders |= {folder for folder, count in _BEING_MADE.items() if count}
    if _OF_THREADS:
        of_starter = _OF_THREADS.get(threading.current_thread(), frozenset())
        folders |= {folder for folder in of_starter if _BEING_MADE[folder]}
    return folders


@contextlib.contextmanager
def making_samples_for(folder: Path) -> Iterator[None]:
    """Have the user's code make samples of a cache.

    Args:
        folder: In which the cache is packed.
    """
    _install_hook()
    path = os.path.realpath(folder)
    token = _FOLDERS.set(_FOLDERS.get() | {path})
    _BEING_MADE[path] += 1
    try:
        yield
    finally:
        _BEING_MADE[path] -= 1
        _FOLDERS.reset(token)


def count_nested_packings() -> int:
    """Count the caches that are packed of what this code makes, or its starter does."""
    return len(_folders_of_this_code())


def refuse_own_samples(folder: Path, location: object) -> None:
    """Refuse to pack a cache, or to wait for it, for the code that makes its samples.

    Args:
        folder: In which it would be packed.
        location: What the caller calls it.

    Raises:
        DatasetError: It is packed by a caller of this function.
    """
    if os.path.realpath(folder) not in _folders_of_this_code():
        return
    message = f"{location} was read by the code that makes its samples."
    why = "they are there once load() has made all of them"
    fix = "in load(): self.load(key) in place of self[row], len(list(self.keys())) in "
    fix += "place of len(self)"
    raise DatasetError(message, why=why, fix=fix)


_ASKED_FOR_KEYS: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "datasets_asked_for_keys_by_the_callers", default=frozenset()
)
"""``id`` of datasets whose ``keys`` runs now; they live as long."""


@contextlib.contextmanager
def asking_for_keys(dataset: object) -> Iterator[None]:
    """Have a dataset of the user's say which samples it has.

    Raises:
        DatasetError: It is asked already, by a caller of this function.
    """
    asked = _ASKED_FOR_KEYS.get()
    if id(dataset) in asked:
        kind = type(dataset).__name__
        message = f"{kind}.keys() asked {kind} itself for its samples, or how many."
        why = "there are those that keys() lists, and it has not said so yet"
        fix = "list them from what they are made of: range(1000), "
        fix += "sorted(os.listdir(self.raw))"
        raise DatasetError(message, why=why, fix=fix)
    token = _ASKED_FOR_KEYS.set(asked | {id(dataset)})
    try:
        yield
    finally:
        _ASKED_FOR_KEYS.reset(token)
