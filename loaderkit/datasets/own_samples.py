"""Samples are not asked for by the code that makes them, or says which there are.

``load`` that asks for ``len(self)`` or ``self[0]`` asks for the cache that is packed of
what it returns.  Nobody packs it but the caller of ``load``, who waits for ``load``.
``keys`` that asks for them would be called again, to say how many there are.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from typing import TYPE_CHECKING

from loaderkit.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FOLDERS: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "folders_packed_by_the_callers", default=frozenset()
)
"""Folders that are packed of the samples which the code that runs now makes.  A context
is a thread's own: other threads of the process may wait for the one that packs."""


@contextlib.contextmanager
def making_samples_for(folder: Path) -> Iterator[None]:
    """Have the user's code make samples of a cache.

    Args:
        folder: In which the cache is packed.
    """
    token = _FOLDERS.set(_FOLDERS.get() | {os.path.realpath(folder)})
    try:
        yield
    finally:
        _FOLDERS.reset(token)


def refuse_own_samples(folder: Path, location: object) -> None:
    """Refuse to pack a cache, or to wait for it, for the code that makes its samples.

    Args:
        folder: In which it would be packed.
        location: What the caller calls it.

    Raises:
        DatasetError: It is packed by a caller of this function.
    """
    if os.path.realpath(folder) not in _FOLDERS.get():
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
