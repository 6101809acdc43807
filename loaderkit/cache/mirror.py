"""The shards of one generation of a cache, kept whole on local disk for all processes.

What lies where is in mirror_folder.py.  A shard gets its name there only when all its
bytes are on the disk and have the checksum that the manifest says: a process that needs
one takes the shard's lock (mirror_locks.py), reserves room (mirror_room.py), brings it
(shard_download.py), gives it its name and takes it into use (leases.py).
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from loaderkit.cache.announcements import Announcements
from loaderkit.cache.durable import publish, remove, write_text, writing
from loaderkit.cache.files import find_manifest, load_sources, unreadable
from loaderkit.cache.layout import MANIFEST
from loaderkit.cache.leases import LeasedShards
from loaderkit.cache.manifest import MOST_MANIFEST_BYTES, read_manifest
from loaderkit.cache.mirror_folder import NO_SPACE, GenerationFolder, not_mirrored
from loaderkit.cache.mirror_locks import MirrorLock, ShardLocks
from loaderkit.cache.mirror_room import MirrorRoom, RoomWishes
from loaderkit.cache.remote_manifest import (
    load_remote_manifest_text,
    missing_file_error,
    replaced_error,
)
from loaderkit.cache.shard_download import FailureNotes, ShardDownloads
from loaderkit.errors import CacheError, DamagedCacheError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from loaderkit.cache.layout import ShardFile
    from loaderkit.cache.manifest import Manifest
    from loaderkit.cache.remote import RemoteCache
    from loaderkit.cache.storage import Storage

_LOG = logging.getLogger("loaderkit")


class Mirror:
    """The shards of one generation of a cache on local disk.

    Args:
        remote: The cache, and where it is mirrored.
        generation: Read this one or none; None for the one that is in the store.

    Raises:
        CacheError: There is no cache at the URL, or it cannot be read; or the mirror
            cannot be written.
        StaleCacheError: Another generation is in the store now.
    """

    def __init__(self, remote: RemoteCache, generation: str | None = None) -> None:
        root = remote.mirror_folder
        self._remote = remote
        self._manifest_text: str | None = None
        """As it came from the store; None where it was on local disk."""
        self.manifest = self._load_manifest(root, generation)
        self._lock = MirrorLock(root, remote.patience)
        self._room = MirrorRoom(root, remote, self._lock)
        self._room.check_largest(self.manifest.shards.bytes)
        self._wishes = RoomWishes(root)
        self.folder = root / self.manifest.generation
        self._files = GenerationFolder(self.folder)
        self._shard_locks = ShardLocks(root, remote, self._files)
        self._announcements = Announcements(self._files, remote.patience)
        self._leased = LeasedShards(self._files, self.manifest.shards)
        self._failures = FailureNotes(self._files, self._lock)
        self._downloads = ShardDownloads(
            remote, self.manifest, self._files, self._room, self._failures
        )
        self._make_folders()
        if find_manifest(self.folder) is None:
            self._copy_manifest()

    @property
    def storage(self) -> Storage:
        """The store, which all mirrors of this cache in this process share."""
        return self._remote.storage

    @property
    def is_capped(self) -> bool:
        """Whether the whole cache cannot be here at once."""
        max_bytes = self._remote.mirror_bytes
        return max_bytes is not None and max_bytes < self.manifest.bytes

    @property
    def patience_s(self) -> float:
        """How long other processes are waited for to let go of shards."""
        return self._remote.patience.request_s

    def uses(self, shard: int) -> bool:
        """Tell whether this process has taken a shard into use."""
        return self._leased.has(shard)

    def missing(self) -> list[int]:
        """List the shards that are not on local disk."""
        try:
            present = {file.name for file in self.folder.iterdir()}
        except OSError as error:
            raise unreadable(self.folder, error) from error
        names = self.manifest.shards.files
        return [shard for shard, name in enumerate(names) if name not in present]

    def use(self, shard: int) -> None:
        """Have a shard on local disk, whole and sound, until it is let go of.

        Args:
            shard: Its number.

        Raises:
            NoRoomError: ``mirror_bytes``, or the disk, is too small.
            StaleCacheError: The cache was replaced in the store.
            DamagedCacheError: The store does not have the bytes that were packed.
            CacheError: The store does not answer, or the disk fails.
        """
        described = self.manifest.shards.file(shard)
        failure_before = self._failures.last(described)
        if not self._files.leases.is_dir():  # somebody has deleted the mirror
            self._make_folders()
            self._copy_manifest()
        self._announcements.wait_for(shard, self.folder / described.file)
        # Before the shard's lock is asked for, which who brought it holds for longer.
        with self._lock.hold():
            if self._use_if_present(shard, described):
                return
        with self._shard_locks.hold(described) as partial:
            self._failures.raise_new(described, failure_before)
            # Twice, since bytes may have been changed on the way and not in the store.
            for is_last_try in (False, True):
                with self._lock.hold():
                    # Another process may have downloaded it meanwhile.
                    if self._use_if_present(shard, described):
                        return
                    self._room.reserve(described, partial)
                if self._downloads.bring(described, partial):
                    self._publish(shard, described, partial)
                    return
                if is_last_try:
                    raise self._downloads.wrong_bytes_error(described)
                _LOG.warning("%s came with wrong bytes; again", described.file)

    def _use_if_present(self, shard: int, described: ShardFile) -> bool:
        """Take a shard into use if it is on local disk; the mirror is locked.

        In one go: between the two, another process could delete it to make room.
        """
        if not self._is_present(described):
            return False
        self._leased.add(shard)
        return True

    def _is_present(self, described: ShardFile) -> bool:
        file = self.folder / described.file
        try:
            size = file.lstat().st_size
        except FileNotFoundError:
            return False
        except OSError as error:
            raise unreadable(file, error) from error
        if size == described.bytes:
            return True
        # Somebody has cut it, or written to it.
        with writing(self.folder):
            remove(file)
        return False

    def _publish(self, shard: int, described: ShardFile, partial: Path) -> None:
        """Give a shard that has come its name, and take it into use."""
        with self._lock.hold(), writing(self.folder):
            if self._use_if_present(shard, described):
                # This process was stopped meanwhile, and another one has downloaded it.
                # Who has mapped that file would take another one for a changed one.
                remove(partial)
                return
            publish(partial, self.folder / described.file)
            self._leased.add(shard)

    def let_go(self, shard: int) -> None:
        """Say that this process does not use a shard any more."""
        self._leased.let_go(shard)

    def discard(self, shard: int) -> None:
        """Delete a shard whose bytes were changed on local disk."""
        with self._lock.hold(), writing(self.folder):
            remove(self.folder / self.manifest.shards.files[shard])

    def close(self) -> None:
        """Let go of all shards."""
        self._leased.close()
        self._announcements.close()

    def announce(self, shard: int) -> None:
        """Tell other processes that this one is about to download a shard.

        Raises:
            CacheError: The mirror cannot be written.
        """
        self._announcements.add(shard)

    def withdraw(self, shard: int) -> None:
        """Tell other processes that a shard is here, or that it is not on its way."""
        self._announcements.withdraw(shard)

    def check_room_for(self, shards: Sequence[int]) -> None:
        """See that the shards of one batch could be here at once.

        Raises:
            NoRoomError: Together they are larger than ``mirror_bytes``.
        """
        self._room.check_batch(self.manifest.shards.bytes[list(shards)])

    def ask_for_room(self) -> None:
        """Tell those who hold shards for later that room is needed now."""
        self._wishes.add()

    def is_room_wanted(self) -> bool:
        """Tell whether a process has asked for room a moment ago."""
        return self._wishes.is_new()

    def load_sources(self) -> str | None:
        """Read the list of the files that the cache was made from; None without one."""
        sources = self.manifest.sources
        if sources is None:
            return None
        if not (self.folder / sources.file).exists():
            content = self._read_file(sources.file, sources.bytes)
            text = content.decode("utf-8", "surrogatepass")
            self._write_small_file(self.folder / sources.file, text)
        return load_sources(self.folder, sources)

    def _load_manifest(self, root: Path, generation: str | None) -> Manifest:
        if generation is not None:
            with contextlib.suppress(DamagedCacheError):
                known = find_manifest(root / generation)
                if known is not None and known.generation == generation:
                    return known
        manifest, self._manifest_text = load_remote_manifest_text(self.storage)
        if generation is not None and manifest.generation != generation:
            raise replaced_error(self.storage)
        return manifest

    def _make_folders(self) -> None:
        try:
            self._files.make()
        except OSError as error:
            if error.errno in NO_SPACE:
                raise not_mirrored(self.folder, error, self._remote) from error
            reason = error.strerror or error
            message = (
                f"{self.storage.url} cannot be mirrored to {self.folder.parent}: "
                f"{reason}."
            )
            why = "it is no folder that can be written to, or a link that leads nowhere"
            fix = "mirror='/a/folder/on/local/disk'"
            raise CacheError(message, why=why, fix=fix) from error

    def _copy_manifest(self) -> None:
        # The bytes of the store, which carry their own checksum.
        text, self._manifest_text = self._manifest_text, None
        if text is None:
            content = self._read_file(MANIFEST, MOST_MANIFEST_BYTES)
            text = content.decode("utf-8", "surrogatepass")
            if read_manifest(text, where=self.storage.url) != self.manifest:
                raise replaced_error(self.storage)
        self._write_small_file(self.folder / MANIFEST, text)

    def _write_small_file(self, file: Path, text: str) -> None:
        """Write a file that appears whole.

        One process at a time, so that who comes next replaces what a killed one left.

        Raises:
            CacheError: It cannot be written.
        """
        with self._lock.hold():
            try:
                write_text(file, text, partial=self._files.unfinished(file.name))
            except CacheError as error:
                if not isinstance(error.__cause__, OSError):
                    raise
                cause = error.__cause__
                raise not_mirrored(file, cause, self._remote) from cause

    def _read_file(self, name: str, most_bytes: int) -> bytes:
        try:
            return self.storage.read_file(name, most_bytes)
        except FileNotFoundError:
            raise missing_file_error(self.storage, name, self.manifest) from None
