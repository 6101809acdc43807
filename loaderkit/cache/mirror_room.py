"""What takes room in a mirror, what of it may be deleted, and how room is made.

``mirror_bytes`` is for all caches of a mirror together.  Where they would take more, or
the disk is full, what no process uses is deleted, the least recently used first.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import filelock

from loaderkit.cache.durable import remove, writing
from loaderkit.cache.files import find_manifest
from loaderkit.cache.layout import is_cache_file_name
from loaderkit.cache.leases import shards_in_use
from loaderkit.cache.mirror_folder import WANTED, GenerationFolder
from loaderkit.errors import NoRoomError
from loaderkit.fixes import Fix, Setting
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from loaderkit.array_types import Ints
    from loaderkit.cache.layout import ShardFile
    from loaderkit.cache.mirror_locks import MirrorLock
    from loaderkit.cache.remote import RemoteCache

_WANTED_S = 1.0
"""Who needs room touches the file more often than that.  Chosen."""


class MirrorRoom:
    """The room that a mirror may take, as readers of one cache ask for it.

    Args:
        root: The folder of the mirror.
        remote: That cache, and how much the mirror may take.
        lock: The lock of the mirror.
    """

    def __init__(self, root: Path, remote: RemoteCache, lock: MirrorLock) -> None:
        self._root, self._lock = root, lock
        self._max_bytes = remote.mirror_bytes
        # Messages name its store, which is opened for that: a reader of shards that
        # are here never opens it.
        self._remote = remote

    def check_largest(self, shard_bytes: Ints) -> None:
        """See that the largest shard can be here, as no row of it could be read else.

        Args:
            shard_bytes: Bytes of each shard of the cache ``[shards]``.

        Raises:
            NoRoomError: It is larger than ``mirror_bytes``.
        """
        max_bytes = self._max_bytes
        if max_bytes is None or not len(shard_bytes):
            return
        largest = int(shard_bytes.max())
        if max_bytes >= largest:
            return
        total = int(shard_bytes.sum())
        message = (
            f"mirror_bytes is {format_bytes(max_bytes)}, and the largest shard of "
            f"{self._remote.storage.url} has {format_bytes(largest)}."
        )
        why = "a shard is mirrored whole before a row of it is read"
        fix = Fix.of(
            Setting("mirror_bytes", total),
            f" for the whole cache, {largest} at least; or pack it with a smaller "
            "shard_bytes",
        )
        raise NoRoomError(message, why=why, fix=fix)

    def check_batch(self, shard_bytes: Ints) -> None:
        """See that the shards of one batch could be here at once.

        Args:
            shard_bytes: Bytes of each of them ``[k]``.

        Raises:
            NoRoomError: Together they are larger than ``mirror_bytes``.
        """
        max_bytes = self._max_bytes
        if max_bytes is None:
            return
        nbytes = int(shard_bytes.sum())
        if nbytes > max_bytes:
            message = (
                f"A batch reads {count_of(len(shard_bytes), 'shards')} of "
                f"{self._remote.storage.url}, "
                f"{format_bytes(nbytes)} together."
            )
            why = (
                f"mirror_bytes is {format_bytes(max_bytes)}, and they are mapped at "
                "once"
            )
            raise NoRoomError(message, why=why, fix=_more_room(nbytes))

    def reserve(self, shard: ShardFile, partial: Path) -> None:
        """Make room for a shard, and take it; the caller holds the mirror's lock.

        A file that is being downloaded counts as whole: its name says how large it
        will be.

        Args:
            shard: The shard.
            partial: The file that it is written to.

        Raises:
            NoRoomError: What may be deleted does not suffice.
            CacheError: The mirror cannot be written.
        """
        if not partial.exists():
            if self._max_bytes is not None:
                self._make_room(shard, self._max_bytes)
            with writing(partial):
                partial.touch()

    def _make_room(self, shard: ShardFile, max_bytes: int) -> None:
        """Delete what is not in use, the least recently used first.

        Raises:
            NoRoomError: It does not suffice.
        """
        mirrored_files = list(_list_files(self._root))
        used = sum(file.bytes for file in mirrored_files)
        if used + shard.bytes <= max_bytes:
            return
        for file in _deletable_files(mirrored_files):
            with writing(file.path):
                file.delete()
            used -= file.bytes
            if used + shard.bytes <= max_bytes:
                return
        message = (
            f"The mirror {self._root} has no room for {shard.file} "
            f"({format_bytes(shard.bytes)}) of {self._remote.storage.url}."
        )
        why = (
            f"mirror_bytes is {format_bytes(max_bytes)}, and {format_bytes(used)} of "
            "it are in use by this process and others"
        )
        raise NoRoomError(message, why=why, fix=_more_room(used + shard.bytes))

    def delete_oldest(self) -> bool:
        """Delete what was not used for longest, since the disk is full.

        Returns:
            False where all is in use.

        Raises:
            CacheError: It cannot be deleted, or the mirror cannot be locked.
        """
        with self._lock.hold():
            for file in _deletable_files(_list_files(self._root)):
                with writing(file.path):
                    file.delete()
                return True
        return False

    def disk_is_full(self, file: Path, error: OSError) -> NoRoomError:
        """Say that the disk is full, and that ``delete_oldest`` does not help."""
        message = f"{file} could not be written: {error.strerror}."
        why = "the disk of the mirror is full, and every shard in it is in use"
        fix = "free some space, or mirror='/a/larger/disk', mirror_bytes='100 GB'"
        return NoRoomError(message, why=f"{why}; {self._remote.storage.url}", fix=fix)


class RoomWishes:
    """What processes tell each other that need room, and those that can let go of some.

    Args:
        root: The folder of the mirror.
    """

    def __init__(self, root: Path) -> None:
        self._file = root / WANTED
        self._touched_ns: int | None = None
        """Time of the file; None before a look."""
        self._seen_s = -math.inf
        """When it was last seen to have changed."""

    def add(self) -> None:
        """Tell those who hold shards for later that room is needed now."""
        with contextlib.suppress(OSError):
            self._file.touch()

    def is_new(self) -> bool:
        """Tell whether a process has asked for room a moment ago.

        It is looked often, and a wish is known by the file's time being another than
        before.  That time is not compared with a clock, which may not be the one that
        set it, or may have been set back since.
        """
        try:
            touched_ns = self._file.stat().st_mtime_ns
        except OSError:
            touched_ns = 0  # nobody has asked yet
        now_s = time.monotonic()
        if self._touched_ns not in {None, touched_ns}:
            self._seen_s = now_s
        self._touched_ns = touched_ns
        return now_s - self._seen_s < _WANTED_S


def _more_room(nbytes: int) -> Fix:
    """Write how a batch's shards fit: with so many bytes, or with fewer shards."""
    return Fix.of(
        Setting("mirror_bytes", nbytes),
        " at least; or fewer workers, or shuffle='block', which needs a few shards at "
        "a time",
    )


@dataclass(frozen=True)
class _MirroredFile:
    """A file of a mirror that takes room: a shard, or a part of one."""

    folder: GenerationFolder
    path: Path
    shard: str
    """Name of the shard."""
    bytes: int
    """What it takes; of a part, what the whole will take."""
    lock_file: Path | None = None
    """The lock of who downloads it; None for a whole shard."""

    def used_ns(self) -> int:
        """Say when it was last used."""
        for file in (self.folder.stamp(self.shard), self.path):
            with contextlib.suppress(OSError):
                return file.stat().st_mtime_ns
        return 0

    def is_being_downloaded(self) -> bool:
        """Tell whether a living process is at work on it."""
        if self.lock_file is None:
            return False
        lock = filelock.FileLock(self.lock_file)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return True
        lock.release()
        return False

    def delete(self) -> None:
        """Delete it."""
        remove(self.path)
        if self.lock_file is None:
            remove(self.folder.stamp(self.shard))


def _list_files(root: Path) -> Iterator[_MirroredFile]:
    """List what takes room in a mirror, of all caches; the mirror is locked."""
    for path in root.iterdir():
        folder = GenerationFolder(path)
        if not folder.exists():
            continue
        for entry in os.scandir(path):
            name = entry.name
            if is_cache_file_name(name) and name.endswith(".h5"):
                nbytes = entry.stat().st_size
                yield _MirroredFile(folder, path / name, name, nbytes)
        for partial in folder.list_partials():
            yield _MirroredFile(
                folder, partial.path, partial.shard, partial.bytes, partial.lock
            )


def _deletable_files(files: Iterable[_MirroredFile]) -> Iterator[_MirroredFile]:
    """Choose what may be deleted, the least recently used first."""
    in_use: dict[Path, set[str]] = {}
    for file in sorted(files, key=_MirroredFile.used_ns):
        if file.is_being_downloaded():
            continue
        if file.lock_file is None:
            # Asked for when first needed: each lease of the folder is tried to lock.
            folder = file.folder.path
            if folder not in in_use:
                in_use[folder] = _files_in_use(file.folder)
            if file.shard in in_use[folder]:
                continue
        yield file


def _files_in_use(folder: GenerationFolder) -> set[str]:
    shards = shards_in_use(folder.leases)
    if not shards:
        return set()
    manifest = find_manifest(folder.path)
    assert manifest is not None  # written before the first lease
    names = manifest.shards.files
    return {names[shard] for shard in shards}
