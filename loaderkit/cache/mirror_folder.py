"""What lies where in the folder of a mirror, and the error where it is not written.

The folder holds one folder for each generation of a cache, and in it ``manifest.json``,
shards under their own names, and ``.mirror`` with what is not finished.  Two URLs of
one generation have the same shards, and share them.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.cache.durable import why_not_written
from loaderkit.cache.layout import is_cache_file_name
from loaderkit.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from loaderkit.cache.layout import ShardFile
    from loaderkit.cache.remote import RemoteCache

LOCK = ".lock"
"""The lock of the whole mirror."""
WANTED = ".wanted"
"""A file that is touched by whoever needs room."""
_WORK = ".mirror"
_PARTIAL = ".partial"
NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
"""What the system answers where the disk, or a user's share of it, is full."""


class PartialFile(NamedTuple):
    """The file that a process writes of a shard that is not whole."""

    path: Path
    shard: str
    """The name that it gets when it is whole."""
    bytes: int
    """How large it will be, which its name says."""
    lock: Path
    """The lock of the process that is at work on it."""


class GenerationFolder:
    """The folder that a mirror has for one generation of a cache.

    Args:
        path: Its path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._work = path / _WORK
        self.leases = self._work / "leases"
        """What each process has in use."""
        self.announcements = self._work / "coming"
        """What each process is about to download."""
        self._locks = self._work / "locks"

    def exists(self) -> bool:
        """Tell whether a mirror has made it: others may lie beside it."""
        return self._work.is_dir()

    def make(self) -> None:
        """Make it where it is not there.

        Raises:
            OSError: It cannot be made.
        """
        for folder in (self.leases, self._locks):
            folder.mkdir(parents=True, exist_ok=True)

    def stamp(self, shard: str) -> Path:
        """Name the empty file whose time says when a shard was last used."""
        return self._work / f"{shard}.used"

    def failure_note(self, shard: str) -> Path:
        """Name the note on how the store last failed to give a shard."""
        return self._work / f"{shard}.failed"

    def unfinished(self, name: str) -> Path:
        """Name the file in which a small file is written until it is whole."""
        return self._work / f"{name}{_PARTIAL}"

    def partial(self, shard: ShardFile, turn: int) -> PartialFile:
        """Name the file in which a shard is written until it is whole.

        Args:
            shard: The shard.
            turn: 0 for the first process; another for each that downloads it beside
                one that does not get on.
        """
        name = f"{shard.file}.{turn}" if turn else shard.file
        # A partial file's name is that of its lock, and how large it will be.
        path = self._work / f"{name}.{shard.bytes}{_PARTIAL}"
        return PartialFile(path, shard.file, shard.bytes, self._lock_of(name))

    def list_partials(self) -> Iterator[PartialFile]:
        """List what is there of shards that are not whole."""
        for entry in os.scandir(self._work):
            name, _, nbytes = entry.name.removesuffix(_PARTIAL).rpartition(".")
            # Without the number of its turn.
            shard = name.split(".h5", 1)[0] + ".h5"
            if is_cache_file_name(shard) and nbytes.isdecimal():
                path = self._work / entry.name
                yield PartialFile(path, shard, int(nbytes), self._lock_of(name))

    def _lock_of(self, name: str) -> Path:
        return self._locks / f"{name}.lock"

    def list_unfinished(self) -> Iterator[Path]:
        """List all files that are being written, or were left by a killed process."""
        return self._work.glob(f"*{_PARTIAL}")


def not_mirrored(file: Path, error: OSError, remote: RemoteCache) -> CacheError:
    """Say that something could not be written to the mirror, and what it is of."""
    message = f"{file} could not be written: {error.strerror or error}."
    why = f"{why_not_written(error)}; it is to mirror {remote.storage.url}"
    fix = "mirror='/a/folder/on/local/disk', which has room and is yours"
    return CacheError(message, why=why, fix=fix)
