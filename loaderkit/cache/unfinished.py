"""Files at a store that a writer has not finished, or left when it was killed.

Nobody reads them, and they take room.  The next one that writes a cache there removes
those of writers that are gone (folder_storage.py, transfer.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.cache.folder_storage import FolderStorage, partial_file_of
from loaderkit.cache.layout import is_cache_file_name
from loaderkit.cache.storage import KeepsParts
from loaderkit.errors import CacheError
from loaderkit.units import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loaderkit.cache.storage import Storage

_SHOWN_NAMES = 3
"""Chosen: a line has room for them."""


def unfinished_files(storage: Storage) -> tuple[str, ...]:
    """Name the files of caches that are not whole yet; none where that is unknown.

    Args:
        storage: Where they would be.  Of S3 the uploads in parts are listed.
    """
    try:
        if isinstance(storage, FolderStorage):
            files = [partial_file_of(name) for name in storage.sizes()]
        elif isinstance(storage, KeepsParts):
            files = list(storage.unfinished_uploads())
        else:
            return ()
    except CacheError:
        return ()  # who may read a cache may not be allowed to list these
    return tuple(sorted(file for file in files if file and is_cache_file_name(file)))


def unfinished_in_words(files: Sequence[str]) -> str:
    """Write which files are unfinished.

    >>> unfinished_in_words(["a.h5"])
    '1 unfinished file: a.h5 (its writer is at work, or was killed)'
    >>> unfinished_in_words(list("abcde"))
    '5 unfinished files: a, b, c, ... (their writers are at work, or were killed)'
    """
    names = list(files[:_SHOWN_NAMES])
    if len(files) > _SHOWN_NAMES:
        names.append("...")
    writers = "its writer is at work, or was killed"
    if len(files) > 1:
        writers = "their writers are at work, or were killed"
    count = count_of(len(files), "unfinished files")
    return f"{count}: {', '.join(names)} ({writers})"
