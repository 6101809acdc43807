"""Which shards of a mirror are in use, told by every process to all others.

A process that maps shards keeps a file with a byte for each shard, 1 where it is in
use, and a lock on a second file for as long as it lives.  The system lets go of the
lock when the process ends, however it ends; so a lease whose lock can be had belongs to
a process that is gone.

Beside that, an empty file of each shard tells by its time when it was last used.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from loaderkit.cache.durable import writing
from loaderkit.cache.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import BinaryIO

    from loaderkit.cache.mirror_folder import GenerationFolder
    from loaderkit.cache.shard_table import ShardTable

_LOCK, _BYTES = ".lock", ".shards"


class Lease:
    """The shards that this process uses.

    Args:
        folder: Where the leases of all processes lie.
        shards: Those in use from the beginning.
    """

    def __init__(self, folder: Path, shards: Iterable[int] = ()) -> None:
        # Where nobody needs room, nobody looks for leases of dead processes otherwise.
        shards_in_use(folder)
        self.process = os.getpid()
        name = f"{ProcessIdentity.of_this_process()}-{uuid.uuid4().hex}"
        self._bytes_file = folder / f"{name}{_BYTES}"
        self._lock = filelock.FileLock(folder / f"{name}{_LOCK}")
        self._lock.acquire()
        self._file = self._bytes_file.open("w+b", buffering=0)
        # Also when nobody closes it, and when Python ends while it is in use: __del__
        # could come when the modules that it needs are gone.
        self._let_go = weakref.finalize(
            self, _remove_lease, self.process, self._file, self._bytes_file, self._lock
        )
        for shard in shards:
            self.mark(shard, in_use=True)

    def mark(self, shard: int, *, in_use: bool) -> None:
        """Say that a shard is used from now on, or no more."""
        self._file.seek(shard)
        self._file.write(b"\1" if in_use else b"\0")

    def close(self) -> None:
        """Let go of all shards.

        In a forked process this closes what was copied, and its parent's lease stays.
        """
        self._let_go()


def _remove_lease(
    process: int, file: BinaryIO, bytes_file: Path, lock: filelock.BaseFileLock
) -> None:
    file.close()
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            _remove_files(bytes_file, lock)


class LeasedShards:
    """The shards of one generation that this process has taken into use.

    Args:
        folder: Where they are mirrored.
        table: The shards of the cache.
    """

    def __init__(self, folder: GenerationFolder, table: ShardTable) -> None:
        # Names are made when the first is asked for, not when a cache is opened.
        self._folder, self._table = folder, table
        self._lease: Lease | None = None
        """None before this process, or the one it was forked from, has used a shard."""
        self._shards: set[int] = set()
        self._thread_lock = threading.RLock()

    def has(self, shard: int) -> bool:
        """Tell whether this process has taken a shard into use."""
        lease = self._lease
        if lease is not None and lease.process == os.getpid():
            return shard in self._shards
        return False

    def add(self, shard: int) -> None:
        """Take a shard into use; the caller holds the mirror's lock.

        Raises:
            CacheError: The mirror cannot be written.
        """
        with self._thread_lock, writing(self._folder.leases):
            self._own_lease().mark(shard, in_use=True)
            self._shards.add(shard)
            self._note_use(shard)

    def let_go(self, shard: int) -> None:
        """Say that this process does not use a shard any more."""
        with self._thread_lock:
            if self.has(shard):
                self._own_lease().mark(shard, in_use=False)
                self._note_use(shard)
            self._shards.discard(shard)

    def close(self) -> None:
        """Let go of all."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None
        self._shards.clear()

    def _own_lease(self) -> Lease:
        """Give this process's lease: a forked one makes its own of what it inherits."""
        if self._lease is None or self._lease.process != os.getpid():
            inherited = self._lease
            self._lease = Lease(self._folder.leases, self._shards)
            if inherited is not None:
                inherited.close()
        return self._lease

    def _note_use(self, shard: int) -> None:
        """Note that a shard was used now."""
        # By the time of an empty file beside it: the shard's own times tell whether it
        # was changed.
        with contextlib.suppress(OSError):
            self._folder.stamp(self._table.files[shard]).touch()


def shards_in_use(
    folder: Path, *, but_of: ProcessIdentity | None = None, but_of_stopped: bool = False
) -> set[int]:
    """List the shards that any living process uses.

    Args:
        folder: Where the leases lie.  Those of dead processes are removed.
        but_of: Leases of this process do not count.
        but_of_stopped: Leases of processes that are known to be stopped do not count.

    Returns:
        Numbers of shards.
    """
    in_use: set[int] = set()
    for file in folder.glob(f"*{_BYTES}"):
        process = ProcessIdentity.read(file.name)
        if process == but_of:
            continue
        lock = filelock.FileLock(file.with_suffix(_LOCK))
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            if but_of_stopped and process.is_stopped:
                continue
            with contextlib.suppress(FileNotFoundError):
                content = file.read_bytes()
                in_use.update(at for at, byte in enumerate(content) if byte)
            continue
        # Its process is gone.
        _remove_files(file, lock)
    return in_use


def _remove_files(bytes_file: Path, lock: filelock.BaseFileLock) -> None:
    """Remove a lease, whose lock this process holds.

    The lock's file first: who is killed in between leaves a file by which the lease is
    found, and no lock that nobody looks for.
    """
    lock_file = Path(lock.lock_file)
    with contextlib.suppress(PermissionError):  # Windows removes no open file
        lock_file.unlink(missing_ok=True)
    bytes_file.unlink(missing_ok=True)
    lock.release()
    lock_file.unlink(missing_ok=True)
