"""Shards of a store, kept whole on local disk for all processes of a node.

The folder holds one folder for each generation of a cache, and in it ``manifest.json``,
shards under their own names, and ``.mirror`` with what is not finished.  Two URLs of
one generation have the same shards, and share them.

A shard gets its name here only when all its bytes are on the disk and have the checksum
that the manifest says.  What a killed or broken download leaves is gone on with.

Two kinds of locks, always taken in this order: one for each shard, held while it is
downloaded; and one for the whole folder, held for moments, under which room is made,
and shards appear, are taken into use, and are deleted.  Nobody waits for ever: where
the holder of a shard's lock does not get on, the shard is downloaded beside it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import math
import os
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

import filelock

from loaderkit.cache.durable import (
    publish,
    remove,
    why_not_written,
    write_text,
    writing,
)
from loaderkit.cache.files import (
    digest_of_file,
    find_manifest,
    load_sources,
    unreadable,
)
from loaderkit.cache.layout import MANIFEST, is_cache_file_name
from loaderkit.cache.leases import Lease, shards_in_use
from loaderkit.cache.lock_files import (
    STOPPED,
    LockHolder,
    LockPatience,
    StuckHolderError,
    hold_lock_file,
)
from loaderkit.cache.manifest import MOST_MANIFEST_BYTES, read_manifest
from loaderkit.cache.process_identity import ProcessIdentity
from loaderkit.cache.remote_manifest import (
    load_remote_manifest,
    load_remote_manifest_text,
)
from loaderkit.cache.storage import NoAnswerError, StreamsFiles, how_to_push
from loaderkit.errors import CacheError, DamagedCacheError, StaleCacheError
from loaderkit.fixes import Fix, Open, Setting
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from loaderkit.cache.layout import ShardFile
    from loaderkit.cache.manifest import Manifest
    from loaderkit.cache.remote import RemoteCache
    from loaderkit.cache.storage import Storage

_LOG = logging.getLogger("loaderkit")
_WORK = ".mirror"
_LOCK = ".lock"
_PARTIAL = ".partial"
_WANTED = ".wanted"
"""A file that is touched by whoever needs room."""
_LOOK_AGAIN_S = 0.01
"""How often it is looked whether another process has downloaded a shard.  Chosen: a
look takes 0.1 ms."""
_WANTED_S = 1.0
"""Who needs room touches it more often than that.  Chosen."""
_LOOK_FOR_SIGNS_S = 1.0
"""How often it is looked whether it gets on."""
_STOPPED_S = 2.0
"""Who is stopped while it downloads a shard is not waited for any longer.  Chosen: to
download beside it costs nothing but the bytes."""
_TURNS = 3
"""So many locks a shard has: who finds that the holder of one does not get on takes the
next, and has a partial file of its own."""
_STEP_BYTES = 32 << 20
"""So much of a shard is asked for at a time, and held in memory.  Chosen: what comes is
on the disk every 0.3 s at 100 MB/s, so that a killed download loses little."""
_STREAMED_BYTES = 16 << 20
"""Shards up to this size go to the disk as they come.  Larger ones are asked for in
ranges of 8 MiB, several at once: a single stream of S3 carries some 80 MB/s.  Chosen:
three shards come at once, so that two parts one after the other cost nothing."""
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def _more_room(nbytes: int) -> Fix:
    """Write how a batch's shards fit: with so many bytes, or with fewer shards."""
    return Fix.of(
        Setting("mirror_bytes", nbytes),
        " at least; or fewer workers, or shuffle='block', which needs a few shards at "
        "a time",
    )


class NoRoomError(CacheError):
    """The mirror has no room for a shard, and nothing in it may go."""


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
        self._remote = remote
        self._root = remote.mirror_folder
        self._manifest_text: str | None = None
        """As it came from the store; None where it was on local disk."""
        self.manifest = self._load_manifest(generation)
        self._check_room_for_one()
        self.folder = self._root / self.manifest.generation
        self._work = self.folder / _WORK
        self._leases = self._work / "leases"
        self._announcements = self._work / "coming"
        self._lease: Lease | None = None
        self._announcement: Lease | None = None
        self._used: set[int] = set()
        """Shards that this process has taken into use."""
        self._wish_touched_ns: int | None = None
        """Time of the file that is touched by who needs room; None before a look."""
        self._wish_seen_s = -math.inf
        """When it was last seen to have changed."""
        self._thread_lock = threading.RLock()
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
        lease = self._lease
        if lease is not None and lease.process == os.getpid():
            return shard in self._used
        return False

    def missing(self) -> list[int]:
        """List the shards that are not on local disk."""
        try:
            present = {file.name for file in self.folder.iterdir()}
        except OSError as error:
            raise unreadable(self.folder, error) from error
        names = self.manifest.shards.files
        return [shard for shard, name in enumerate(names) if name not in present]

    def _check_room_for_one(self) -> None:
        """See that the largest shard can be here, as no row of it could be read else.

        Raises:
            NoRoomError: It is larger than ``mirror_bytes``.
        """
        max_bytes, sizes = self._remote.mirror_bytes, self.manifest.shards.bytes
        if max_bytes is None or not len(sizes) or max_bytes >= int(sizes.max()):
            return
        largest, total = int(sizes.max()), int(sizes.sum())
        message = (
            f"mirror_bytes is {format_bytes(max_bytes)}, and the largest shard of "
            f"{self.storage.url} has {format_bytes(largest)}."
        )
        why = "a shard is mirrored whole before a row of it is read"
        fix = Fix.of(
            Setting("mirror_bytes", total),
            f" for the whole cache, {largest} at least; or pack it with a smaller "
            "shard_bytes",
        )
        raise NoRoomError(message, why=why, fix=fix)

    def check_room_for(self, shards: Sequence[int]) -> None:
        """See that the shards of one batch could be here at once.

        Raises:
            NoRoomError: Together they are larger than ``mirror_bytes``.
        """
        max_bytes = self._remote.mirror_bytes
        if max_bytes is None:
            return
        nbytes = int(self.manifest.shards.bytes[list(shards)].sum())
        if nbytes > max_bytes:
            message = (
                f"A batch reads {count_of(len(shards), 'shards')} of "
                f"{self.storage.url}, "
                f"{format_bytes(nbytes)} together."
            )
            why = (
                f"mirror_bytes is {format_bytes(max_bytes)}, and they are mapped at "
                "once"
            )
            raise NoRoomError(message, why=why, fix=_more_room(nbytes))

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
        failure_before = self._read_failure(shard)
        if not self._leases.is_dir():  # somebody has deleted the mirror
            self._make_folders()
            self._copy_manifest()
        if self._announcement is None:
            # Who has announced a shard waits for nobody, so that no two wait for each
            # other.
            self._wait_while_coming(shard)
        # Before the shard's lock is asked for, which who brought it holds for longer.
        with self._whole_folder_locked():
            if self._use_if_present(shard):
                return
        described = self.manifest.shards.file(shard)
        with self._shard_locked(described) as partial:
            self._raise_new_failure(shard, failure_before)
            # Twice, since bytes may have been changed on the way and not in the store.
            for is_last_try in (False, True):
                with self._whole_folder_locked():
                    # Another process may have downloaded it meanwhile.
                    if self._use_if_present(shard):
                        return
                    self._reserve_room(described, partial)
                if self._download_shard(shard, described, partial):
                    return
                if is_last_try:
                    raise self._wrong_bytes(described)
                _LOG.warning("%s came with wrong bytes; again", described.file)

    def announce(self, shard: int) -> None:
        """Tell other processes that this one is about to download a shard.

        Raises:
            CacheError: The mirror cannot be written.
        """
        with self._thread_lock, writing(self._announcements):
            if self._announcement is None:
                self._announcements.mkdir(parents=True, exist_ok=True)
                self._announcement = Lease(self._announcements)
            self._announcement.mark(shard, in_use=True)

    def withdraw(self, shard: int) -> None:
        """Tell other processes that a shard is here, or that it is not on its way."""
        with self._thread_lock, writing(self._announcements):
            if self._announcement is not None:
                self._announcement.mark(shard, in_use=False)

    def _wait_while_coming(self, shard: int) -> None:
        """Wait for a shard that another process is about to download.

        Not for one of this process, whose lock for the shard is waited for; and not for
        one that is stopped, or does not get on.
        """
        file = self.folder / self.manifest.shards.files[shard]
        own = ProcessIdentity.of_this_process()
        last_signs: object = None
        silent_s, looked_s = 0.0, time.monotonic()
        while not file.exists():
            coming = shards_in_use(self._announcements, but_of=own, but_of_stopped=True)
            if shard not in coming:
                return
            now_s = time.monotonic()
            if now_s - looked_s >= _LOOK_FOR_SIGNS_S:
                signs = self._signs_of_downloads()
                silent_s = silent_s + _LOOK_FOR_SIGNS_S if signs == last_signs else 0.0
                last_signs, looked_s = signs, now_s
                if silent_s >= self._lock_patience.silent_s:
                    return
            time.sleep(_LOOK_AGAIN_S)

    @property
    def _lock_patience(self) -> LockPatience:
        """How long a process that downloads a shard is waited for.

        A request of it brings some bytes in ``longest_s``, or ends; the rest is for
        hashing and flushing.
        """
        patience = self._remote.patience
        return LockPatience(patience.longest_s + patience.request_s, _STOPPED_S)

    def _signs_of_downloads(self) -> dict[str, tuple[int, int]]:
        """Give what changes as long as any process downloads from this store."""
        files = [
            *self._announcements.glob("*"),
            *self._work.glob(f"*{_PARTIAL}"),
        ]
        return {file.name: _size_and_time(file) for file in files}

    def _use_if_present(self, shard: int) -> bool:
        """Take a shard into use if it is on local disk; the folder is locked.

        In one go: between the two, another process could delete it to make room.
        """
        if not self._is_present(shard):
            return False
        self._take_into_use(shard)
        return True

    def let_go(self, shard: int) -> None:
        """Say that this process does not use a shard any more."""
        with self._thread_lock:
            if self.uses(shard):
                self._own_lease().mark(shard, in_use=False)
                self._note_use(shard)
            self._used.discard(shard)

    def ask_for_room(self) -> None:
        """Tell those who hold shards for later that room is needed now."""
        with contextlib.suppress(OSError):
            (self._root / _WANTED).touch()

    def is_room_wanted(self) -> bool:
        """Tell whether a process has asked for room a moment ago.

        It is looked often, and a wish is known by the file's time being another than
        before.  That time is not compared with a clock, which may not be the one that
        set it, or may have been set back since.
        """
        try:
            touched_ns = (self._root / _WANTED).stat().st_mtime_ns
        except OSError:
            touched_ns = 0  # nobody has asked yet
        now_s = time.monotonic()
        if self._wish_touched_ns not in {None, touched_ns}:
            self._wish_seen_s = now_s
        self._wish_touched_ns = touched_ns
        return now_s - self._wish_seen_s < _WANTED_S

    def discard(self, shard: int) -> None:
        """Delete a shard whose bytes were changed on local disk."""
        with self._whole_folder_locked(), writing(self.folder):
            remove(self.folder / self.manifest.shards.files[shard])

    def close(self) -> None:
        """Let go of all shards."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None
        if self._announcement is not None:
            self._announcement.close()
            self._announcement = None
        self._used.clear()

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

    def _load_manifest(self, generation: str | None) -> Manifest:
        if generation is not None:
            with contextlib.suppress(DamagedCacheError):
                known = find_manifest(self._root / generation)
                if known is not None and known.generation == generation:
                    return known
        manifest, self._manifest_text = load_remote_manifest_text(self.storage)
        if generation is not None and manifest.generation != generation:
            raise self._replaced_error()
        return manifest

    def _make_folders(self) -> None:
        try:
            for folder in (self._leases, self._work / "locks"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise self._not_mirrored(self.folder, error) from error
            reason = error.strerror or error
            message = (
                f"{self.storage.url} cannot be mirrored to {self._root}: {reason}."
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
                raise self._replaced_error()
        self._write_small_file(self.folder / MANIFEST, text)

    def _write_small_file(self, file: Path, text: str) -> None:
        """Write a file that appears whole.

        One process at a time, so that who comes next replaces what a killed one left.

        Raises:
            CacheError: It cannot be written.
        """
        partial = self._work / f"{file.name}{_PARTIAL}"
        with self._whole_folder_locked():
            try:
                write_text(file, text, partial=partial)
            except CacheError as error:
                if not isinstance(error.__cause__, OSError):
                    raise
                cause = error.__cause__
                raise self._not_mirrored(file, cause) from cause

    def _read_file(self, name: str, most_bytes: int) -> bytes:
        try:
            return self.storage.read_file(name, most_bytes)
        except FileNotFoundError:
            raise self._gone_error(name) from None

    def _is_present(self, shard: int) -> bool:
        described = self.manifest.shards.file(shard)
        try:
            size = (self.folder / described.file).lstat().st_size
        except FileNotFoundError:
            return False
        except OSError as error:
            raise unreadable(self.folder / described.file, error) from error
        if size == described.bytes:
            return True
        # Somebody has cut it, or written to it.
        with writing(self.folder):
            remove(self.folder / described.file)
        return False

    def _take_into_use(self, shard: int) -> None:
        with self._thread_lock, writing(self._leases):
            self._own_lease().mark(shard, in_use=True)
            self._used.add(shard)
            self._note_use(shard)

    def _own_lease(self) -> Lease:
        """Give this process's lease: a forked one makes its own of what it inherits."""
        if self._lease is None or self._lease.process != os.getpid():
            inherited = self._lease
            self._lease = Lease(self._leases, self._used)
            if inherited is not None:
                inherited.close()
        return self._lease

    def _note_use(self, shard: int) -> None:
        """Note that a shard was used now."""
        # By the time of an empty file beside it: the shard's own times tell whether it
        # was changed.
        stamp = self._work / f"{self.manifest.shards.files[shard]}.used"
        with contextlib.suppress(OSError):
            stamp.touch()

    def _reserve_room(self, described: ShardFile, partial: Path) -> None:
        """Make room for a shard; the folder is locked.

        A file that is being downloaded counts as whole: its name says how large it
        will be.
        """
        if not partial.exists():
            max_bytes = self._remote.mirror_bytes
            if max_bytes is not None:
                self._make_room(described, max_bytes)
            with writing(partial):
                partial.touch()

    def _make_room(self, described: ShardFile, max_bytes: int) -> None:
        """Delete what is not in use, the least recently used first.

        Raises:
            NoRoomError: It does not suffice.
        """
        mirrored_files = list(_list_files(self._root))
        used = sum(file.bytes for file in mirrored_files)
        if used + described.bytes <= max_bytes:
            return
        for file in _deletable_files(mirrored_files):
            with writing(file.path):
                file.delete()
            used -= file.bytes
            if used + described.bytes <= max_bytes:
                return
        message = (
            f"The mirror {self._root} has no room for {described.file} "
            f"({format_bytes(described.bytes)}) of {self.storage.url}."
        )
        why = (
            f"mirror_bytes is {format_bytes(max_bytes)}, and {format_bytes(used)} of "
            "it are in use by this process and others"
        )
        raise NoRoomError(message, why=why, fix=_more_room(used + described.bytes))

    def _download_shard(self, shard: int, described: ShardFile, partial: Path) -> bool:
        """Download what is missing of a shard, and give it its name.

        Returns:
            False where the bytes that came are not those that were packed.
        """
        try:
            if described.bytes <= _STREAMED_BYTES and not partial.stat().st_size:
                self._stream_into(partial, described)
            with partial.open("a+b") as file:
                self._download_into(file, described)
                is_sound = digest_of_file(file.fileno()) == described.xxh3
                if is_sound:
                    os.fsync(file.fileno())
        except OSError as error:
            raise self._not_mirrored(partial, error) from error
        if not is_sound:
            with writing(partial):
                remove(partial)
            return False
        with self._whole_folder_locked(), writing(self.folder):
            if self._use_if_present(shard):
                # This process was stopped meanwhile, and another one has downloaded it.
                # Who has mapped that file would take another one for a changed one.
                remove(partial)
                return True
            publish(partial, self.folder / described.file)
            self._take_into_use(shard)
        return True

    def _stream_into(self, partial: Path, described: ShardFile) -> None:
        """Let a shard come as a stream, if the store can; ranges bring what is missing.

        After a cut body, a full disk or an answer that is an error, too: ranges know
        what to do of each.
        """
        storage = self.storage
        if isinstance(storage, StreamsFiles):
            storage.stream_file(described.file, partial)

    def _download_into(self, file: BinaryIO, described: ShardFile) -> None:
        start = file.seek(0, os.SEEK_END)
        if start > described.bytes:  # not ours
            file.truncate(0)
            start = 0
        while start < described.bytes:
            stop = min(start + _STEP_BYTES, described.bytes)
            try:
                content = self.storage.read_range(described.file, start, stop)
            except FileNotFoundError:
                raise self._gone_error(described.file) from None
            except NoAnswerError as error:
                self._note_failure(described, error)
                raise
            self._write_all(file, content, described)
            start = stop

    def _note_failure(self, described: ShardFile, error: NoAnswerError) -> None:
        """Tell those who wait for a shard that the store did not give it."""
        note = {
            "id": uuid.uuid4().hex,
            "what": error.what,
            "why": error.why,
            "fix": error.fix,
        }
        with contextlib.suppress(CacheError):
            self._write_small_file(self._failure_file(described), json.dumps(note))

    def _raise_new_failure(
        self, shard: int, failure_before: dict[str, Any] | None
    ) -> None:
        """Raise what another reader was told of a shard while this one waited for it.

        Each in turn would wait for the same silent store as long again: with 16 readers
        an hour.  No times are compared: clocks of two machines differ, and that of one
        may be set back.

        Args:
            shard: Its number.
            failure_before: What was noted when this reader began to wait.

        Raises:
            NoAnswerError: The store did not give it to the other.
        """
        failure = self._read_failure(shard)
        if failure is not None and failure != failure_before:
            raise NoAnswerError(
                str(failure.get("what")),
                why=str(failure.get("why")),
                fix=str(failure.get("fix")),
            )

    def _read_failure(self, shard: int) -> dict[str, Any] | None:
        """Read what the last reader was told whom the store did not give a shard."""
        file = self._failure_file(self.manifest.shards.file(shard))
        try:
            note = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return note if isinstance(note, dict) else None

    def _failure_file(self, described: ShardFile) -> Path:
        return self._work / f"{described.file}.failed"

    def _write_all(self, file: BinaryIO, content: bytes, described: ShardFile) -> None:
        """Write some bytes; where the disk is full, older shards make room."""
        view = memoryview(content)
        while view:
            try:
                # Unbuffered, so that what did not fit is known.
                count = os.write(file.fileno(), view)
            except OSError as error:
                if error.errno not in _NO_SPACE or not self._delete_oldest():
                    raise self._disk_full(described, error) from error
                continue
            view = view[count:]

    def _delete_oldest(self) -> bool:
        with self._whole_folder_locked():
            for file in _deletable_files(_list_files(self._root)):
                with writing(file.path):
                    file.delete()
                return True
        return False

    @contextlib.contextmanager
    def _shard_locked(self, described: ShardFile) -> Iterator[Path]:
        """Be the one who downloads a shard, as far as others get on.

        Entered, it gives the file that the shard is written to.

        Raises:
            CacheError: Several processes before do not get on.
        """
        for turn in range(_TURNS):
            name = f"{described.file}.{turn}" if turn else described.file
            partial = self._work / f"{name}.{described.bytes}{_PARTIAL}"
            with contextlib.ExitStack() as held:
                try:
                    held.enter_context(
                        self._hold_lock(
                            self._work / "locks" / f"{name}.lock",
                            self._lock_patience,
                            functools.partial(_size_and_time, partial),
                        )
                    )
                except StuckHolderError as error:
                    stuck = error
                    _LOG.warning(
                        "%s downloads %s and has not got on for %.0f s%s; it is "
                        "downloaded beside it",
                        *(_name_of(error.holder), described.file, error.waited_s),
                        ", since it is stopped" if _is_stopped(error.holder) else "",
                    )
                    continue
                yield partial
                return
        message = f"{described.file} of {self.storage.url} is not on local disk."
        raise _stuck_error(
            message, stuck, f"downloads it, as {_TURNS - 1} others do"
        ) from stuck

    @contextlib.contextmanager
    def _whole_folder_locked(self) -> Iterator[None]:
        patience = self._remote.patience
        held_for = LockPatience(patience.longest_s, patience.request_s)
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._hold_lock(self._root / _LOCK, held_for))
            except StuckHolderError as error:
                message = f"The mirror {self._root} is locked."
                raise _stuck_error(
                    message, error, "holds a lock that is needed for moments"
                ) from error
            yield

    @contextlib.contextmanager
    def _hold_lock(
        self,
        file: Path,
        patience: LockPatience,
        sign_of_life: Callable[[], object] = lambda: None,
    ) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(hold_lock_file(file, patience, sign_of_life))
            except (OSError, NotImplementedError) as error:
                message = f"The mirror {self._root} cannot be locked: {error}."
                why = "its file system has no locks, or it is not yours to write to"
                fix = "mirror='/a/folder/on/local/disk'"
                raise CacheError(message, why=why, fix=fix) from error
            yield

    def _not_mirrored(self, file: Path, error: OSError) -> CacheError:
        """Say that something could not be written to the mirror, and what it is of."""
        message = f"{file} could not be written: {error.strerror or error}."
        why = f"{why_not_written(error)}; it is to mirror {self.storage.url}"
        fix = "mirror='/a/folder/on/local/disk', which has room and is yours"
        return CacheError(message, why=why, fix=fix)

    def _disk_full(self, described: ShardFile, error: OSError) -> CacheError:
        if error.errno not in _NO_SPACE:
            return self._not_mirrored(self.folder / described.file, error)
        message = (
            f"{self.folder / described.file} could not be written: {error.strerror}."
        )
        why = "the disk of the mirror is full, and every shard in it is in use"
        fix = "free some space, or mirror='/a/larger/disk', mirror_bytes='100 GB'"
        return NoRoomError(message, why=f"{why}; {self.storage.url}", fix=fix)

    def _gone_error(self, name: str) -> CacheError:
        """Tell a cache that was replaced in the store from one that lost a file."""
        with contextlib.suppress(CacheError):
            generation = load_remote_manifest(self.storage).generation
            if generation != self.manifest.generation:
                return self._replaced_error()
        message = f"{self.storage.url}/{name} is missing."
        fix = how_to_push(self.storage.url)
        return DamagedCacheError(message, why="the manifest there names it", fix=fix)

    def _replaced_error(self) -> StaleCacheError:
        message = f"The cache {self.storage.url} was replaced while a dataset was open."
        why = "a dataset reads one cache from beginning to end, never old and new mixed"
        return StaleCacheError(
            message, why=why, fix=Fix.of("open it again: ", Open(self.storage.url))
        )

    def _wrong_bytes(self, described: ShardFile) -> DamagedCacheError:
        message = (
            f"{self.storage.url}/{described.file} is not the file that was packed."
        )
        why = "its xxh3 checksum differs, twice: bytes were changed in the store"
        fix = how_to_push(self.storage.url)
        return DamagedCacheError(message, why=why, fix=fix)


class _MirroredFile:
    """A file of a mirror that takes room: a shard, or a part of one.

    Args:
        path: Its path.
        nbytes: What it takes; of a part, what the whole will take.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.bytes = path, nbytes
        self.is_partial = path.name.endswith(_PARTIAL)
        work = path.parent if self.is_partial else path.parent / _WORK
        self.folder = work.parent
        self.stamp = work / f"{_shard_name_of(path.name)}.used"
        # A partial file's name is that of its lock, and how large it will be.
        locked_name = path.name.removesuffix(_PARTIAL).rpartition(".")[0]
        self.lock_file = work / "locks" / f"{locked_name}.lock"

    def used_ns(self) -> int:
        """Say when it was last used."""
        for file in (self.stamp, self.path):
            with contextlib.suppress(OSError):
                return file.stat().st_mtime_ns
        return 0

    def is_being_downloaded(self) -> bool:
        """Tell whether a living process is at work on it."""
        if not self.is_partial:
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
        if not self.is_partial:
            remove(self.stamp)


def _shard_name_of(name: str) -> str:
    """Give the name of a shard from that of a file beside it."""
    return name.split(".h5", 1)[0] + ".h5"


def _size_and_time(file: Path) -> tuple[int, int]:
    """Give what changes while a file is written; zeros where there is none."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _name_of(holder: LockHolder | None) -> str:
    return "another process" if holder is None else str(holder)


def _is_stopped(holder: LockHolder | None) -> bool:
    return holder is not None and holder.is_stopped


def _stuck_error(message: str, error: StuckHolderError, doing: str) -> CacheError:
    """Say who is waited for, and why no longer.

    Args:
        message: What cannot be had.
        error: Who has not got on, for how long.
        doing: What it does.
    """
    holder = error.holder
    why = f"{_name_of(holder)} {doing}, and has not got on for {error.waited_s:.0f} s"
    if holder is None:
        return CacheError(message, why=why, fix="end the processes that use the mirror")
    if holder.is_stopped:
        why += f": {STOPPED}"
    return CacheError(message, why=why, fix=holder.how_to_free)


def _list_files(root: Path) -> Iterator[_MirroredFile]:
    """List what takes room in a mirror, of all caches; the folder is locked."""
    for folder in root.iterdir():
        if not (folder / _WORK).is_dir():
            continue
        for entry in os.scandir(folder):
            if is_cache_file_name(entry.name) and entry.name.endswith(".h5"):
                yield _MirroredFile(folder / entry.name, entry.stat().st_size)
        for entry in os.scandir(folder / _WORK):
            name, _, nbytes = entry.name.removesuffix(_PARTIAL).rpartition(".")
            if is_cache_file_name(_shard_name_of(name)) and nbytes.isdecimal():
                yield _MirroredFile(folder / _WORK / entry.name, int(nbytes))


def _deletable_files(files: Iterable[_MirroredFile]) -> Iterator[_MirroredFile]:
    """Choose what may be deleted, the least recently used first."""
    in_use: dict[Path, set[str]] = {}
    for file in sorted(files, key=_MirroredFile.used_ns):
        if file.is_being_downloaded():
            continue
        if not file.is_partial:
            # Asked for when first needed: each lease of the folder is tried to lock.
            if file.folder not in in_use:
                in_use[file.folder] = _files_in_use(file.folder)
            if file.path.name in in_use[file.folder]:
                continue
        yield file


def _files_in_use(folder: Path) -> set[str]:
    shards = shards_in_use(folder / _WORK / "leases")
    if not shards:
        return set()
    manifest = find_manifest(folder)
    assert manifest is not None  # written before the first lease
    names = manifest.shards.files
    return {names[shard] for shard in shards}
