"""Bringing one shard from a store into its partial file, and telling of failures.

It comes as a stream or in ranges, and counts as whole when all its bytes have the
checksum that the manifest says.  What a killed or broken download leaves is gone on
with.  A store that did not give a shard is noted beside it, for those who wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.cache.durable import remove, write_text, writing
from loaderkit.cache.files import digest_of_file
from loaderkit.cache.mirror_folder import NO_SPACE, not_mirrored
from loaderkit.cache.remote_manifest import missing_file_error
from loaderkit.cache.storage import StreamsFiles, how_to_push
from loaderkit.errors import CacheError, DamagedCacheError, NoAnswerError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from loaderkit.cache.layout import ShardFile
    from loaderkit.cache.manifest import Manifest
    from loaderkit.cache.mirror_folder import GenerationFolder
    from loaderkit.cache.mirror_locks import MirrorLock
    from loaderkit.cache.mirror_room import MirrorRoom
    from loaderkit.cache.remote import RemoteCache

_STEP_BYTES = 32 << 20
"""So much of a shard is asked for at a time, and held in memory.  Chosen: what comes is
on the disk every 0.3 s at 100 MB/s, so that a killed download loses little."""
_STREAMED_BYTES = 16 << 20
"""Shards up to this size go to the disk as they come.  Larger ones are asked for in
ranges of 8 MiB, several at once: a single stream of S3 carries some 80 MB/s.  Chosen:
three shards come at once, so that two parts one after the other cost nothing."""


class ShardDownloads:
    """Brings shards of one generation into their partial files.

    Args:
        remote: The cache.
        manifest: What it was when it was opened.
        folder: Where its shards are mirrored.
        room: Where room is made when the disk is full.
        failures: Where it is noted that the store did not give a shard.
    """

    def __init__(
        self,
        remote: RemoteCache,
        manifest: Manifest,
        folder: GenerationFolder,
        room: MirrorRoom,
        failures: FailureNotes,
    ) -> None:
        self._remote, self._manifest, self._folder = remote, manifest, folder
        self._room, self._failures = room, failures

    def bring(self, shard: ShardFile, partial: Path) -> bool:
        """Download what is missing of a shard.

        Args:
            shard: The shard.
            partial: Its partial file, which is there and is this process's to write.

        Returns:
            Whether the partial file is the shard now, on the disk itself.  Where the
            bytes that came are not those that were packed, it is removed.

        Raises:
            NoRoomError: The disk is full, and all that is mirrored is in use.
            StaleCacheError: The cache was replaced in the store.
            CacheError: The store does not answer, or the disk fails.
        """
        try:
            if shard.bytes <= _STREAMED_BYTES and not partial.stat().st_size:
                self._stream_into(partial, shard)
            with partial.open("a+b") as file:
                self._download_into(file, shard)
                is_sound = digest_of_file(file.fileno()) == shard.xxh3
                if is_sound:
                    os.fsync(file.fileno())
        except OSError as error:
            raise not_mirrored(partial, error, self._remote) from error
        if not is_sound:
            with writing(partial):
                remove(partial)
        return is_sound

    def _stream_into(self, partial: Path, shard: ShardFile) -> None:
        """Let a shard come as a stream, if the store can; ranges bring what is missing.

        After a cut body, a full disk or an answer that is an error, too: ranges know
        what to do of each.
        """
        storage = self._remote.storage
        if isinstance(storage, StreamsFiles):
            storage.stream_file(shard.file, partial)

    def _download_into(self, file: BinaryIO, shard: ShardFile) -> None:
        storage = self._remote.storage
        start = file.seek(0, os.SEEK_END)
        if start > shard.bytes:  # not ours
            file.truncate(0)
            start = 0
        while start < shard.bytes:
            stop = min(start + _STEP_BYTES, shard.bytes)
            try:
                content = storage.read_range(shard.file, start, stop)
            except FileNotFoundError:
                raise missing_file_error(storage, shard.file, self._manifest) from None
            except NoAnswerError as error:
                self._failures.note(shard, error)
                raise
            self._write_all(file, content, shard)
            start = stop

    def _write_all(self, file: BinaryIO, content: bytes, shard: ShardFile) -> None:
        """Write some bytes; where the disk is full, older shards make room."""
        view = memoryview(content)
        while view:
            try:
                # Unbuffered, so that what did not fit is known.
                count = os.write(file.fileno(), view)
            except OSError as error:
                mirrored_file = self._folder.path / shard.file
                if error.errno not in NO_SPACE:
                    raise not_mirrored(mirrored_file, error, self._remote) from error
                if not self._room.delete_oldest():
                    raise self._room.disk_is_full(mirrored_file, error) from error
                continue
            view = view[count:]

    def wrong_bytes_error(self, shard: ShardFile) -> DamagedCacheError:
        """Say that a shard came twice with bytes that were not packed."""
        url = self._remote.storage.url
        message = f"{url}/{shard.file} is not the file that was packed."
        why = "its xxh3 checksum differs, twice: bytes were changed in the store"
        return DamagedCacheError(message, why=why, fix=how_to_push(url))


class FailureNote(NamedTuple):
    """What a reader was told whom the store did not give a shard."""

    text: str
    """As it was written.  No two are alike."""
    what: str
    why: str
    fix: str


class FailureNotes:
    """Tells all who wait for a shard that the store did not give it to one of them.

    Each in turn would wait for the same silent store as long again: with 16 readers an
    hour.  No times are compared: clocks of two machines differ, and that of one may be
    set back.

    Args:
        folder: Where the shards are mirrored.
        lock: The lock of the mirror.
    """

    def __init__(self, folder: GenerationFolder, lock: MirrorLock) -> None:
        self._folder, self._lock = folder, lock

    def note(self, shard: ShardFile, error: NoAnswerError) -> None:
        """Tell those who wait for a shard that the store did not give it."""
        note = {
            "id": uuid.uuid4().hex,
            "what": error.what,
            "why": error.why,
            "fix": error.fix,
        }
        file = self._folder.failure_note(shard.file)
        partial = self._folder.unfinished(file.name)
        with contextlib.suppress(CacheError), self._lock.hold():
            write_text(file, json.dumps(note), partial=partial)

    def last(self, shard: ShardFile) -> FailureNote | None:
        """Read what the last reader was told whom the store did not give a shard."""
        try:
            text = self._folder.failure_note(shard.file).read_text("utf-8")
            note = json.loads(text)
        except (OSError, ValueError):
            return None
        if not isinstance(note, dict):
            return None
        what, why, fix = (str(note.get(key)) for key in ("what", "why", "fix"))
        return FailureNote(text, what, why, fix)

    def raise_new(self, shard: ShardFile, before: FailureNote | None) -> None:
        """Raise what another reader was told of a shard while this one waited for it.

        Args:
            shard: The shard.
            before: What was noted when this reader began to wait.

        Raises:
            NoAnswerError: The store did not give it to the other.
        """
        note = self.last(shard)
        if note is not None and note != before:
            raise NoAnswerError(note.what, why=note.why, fix=note.fix)
