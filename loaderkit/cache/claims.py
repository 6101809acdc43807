"""Of all processes that write to a URL, the one that may remove files there.

It is the one that has made a file, the claim, which one at a time can.  A process that
is killed leaves its claim behind, and a store cannot tell.  So a writer also holds a
lock on its machine for as long as it has the claim.  Another process of that machine
that gets this lock knows that the writer is gone, and replaces the claim by its own.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import filelock
import xxhash

from loaderkit.cache.lock_files import release_lock
from loaderkit.cache.process_identity import ProcessIdentity
from loaderkit.cache.verified import user_cache_folder
from loaderkit.errors import CacheError, OtherWriterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loaderkit.cache.storage import Storage

_CLAIM = ".writing"
"""The file in which a process says that it replaces the cache at a URL, or tidies up
there.  It is written by ``Storage.commit`` without ``replace``, in which one of several
processes succeeds."""
_TIDIES = "removes what no cache needs"
"""Written in the claim of a process that replaces no cache."""
CLAIM_WAITS_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Pauses in which a process waits for another one to tidy up, or to end.  Chosen: they
add up to what 200 shards take to be removed from moto's server, at 30 ms a file."""
_MAX_CLAIM_BYTES = 1 << 16
"""A claim is one line; what is longer is none of ours, and must not fill the memory."""
_SHOWN_LETTERS = 80
"""Of what lies there and is no claim of ours, in messages; chosen: a line."""


@dataclass(frozen=True)
class _Claim:
    """What a writer has said of itself in its claim."""

    writer: str
    """Who it is, for people."""
    process: ProcessIdentity | None = None
    """None where that is not known."""
    lock_file: str = ""
    """Of the lock that it holds on its machine; "" for none."""
    tidies: bool = False
    """It replaces no cache, and has the claim for moments."""

    @classmethod
    def read(cls, content: bytes) -> _Claim:
        """Read what ``_write_claim`` wrote, or something else that lies there."""
        text = content.decode(errors="replace")
        try:
            written = json.loads(text)
            number, host = written["process"], written["host"]
            return cls(
                f"process {number} on {host}, {written['time']}",
                # Earlier versions wrote no space, and took no lock.
                ProcessIdentity(number, written.get("space", "")),
                written.get("lock", ""),
                tidies=written.get("doing") == _TIDIES,
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls(text[:_SHOWN_LETTERS])

    def is_left_behind(self, held_lock_file: str) -> bool:
        """Tell whether its writer is known to be gone.

        Args:
            held_lock_file: Of the lock that this process holds; "" for none.
        """
        # The system releases a lock when its holder ends, in whatever way.
        has_its_lock = held_lock_file != "" and held_lock_file == self.lock_file
        return has_its_lock and self.process is not None and self.process.is_near


def _write_claim(lock_file: str, *, tidies: bool) -> bytes:
    """Write the claim of this process.

    Args:
        lock_file: Of the lock that it holds on this machine; "" for none.
        tidies: See ``_Claim``.
    """
    process = ProcessIdentity.of_this_process()
    written = {
        "host": socket.gethostname(),
        "process": process.number,
        "space": process.space,
        "lock": lock_file,
        "time": time.ctime(),
        # A store may have written it and lost its answer: by this number the next try
        # knows that the claim is its own.
        "token": uuid.uuid4().hex,
    }
    if tidies:
        written["doing"] = _TIDIES
    return json.dumps(written).encode()


@contextlib.contextmanager
def hold_claim(
    storage: Storage, waits_s: Sequence[float], *, tidies: bool = False
) -> Iterator[None]:
    """Be the only process that may remove files at a URL.

    Args:
        storage: The URL.
        waits_s: Pauses while another process has the claim.
        tidies: No cache is replaced: the claim is held for moments.

    Raises:
        OtherWriterError: Another process has it, and goes on replacing the cache.
    """
    with _lock_on_this_machine(storage) as lock_file:
        _take_claim(storage, waits_s, lock_file, tidies=tidies)
        try:
            yield
        except BaseException:
            # What went wrong is what is said, also where the store has gone meanwhile.
            with contextlib.suppress(CacheError):
                storage.remove(_CLAIM)
            raise
        storage.remove(_CLAIM)


def refuse_if_replaced(storage: Storage) -> None:
    """See that no process is replacing the cache at a URL.

    Raises:
        OtherWriterError: One is.
    """
    claim = _read_claim(storage)
    # A process that tidies up is done before a shard is copied.
    if claim is None or claim.tidies:
        return
    with _lock_on_this_machine(storage) as lock_file:
        if not claim.is_left_behind(lock_file):
            raise _other_replaces(storage, claim)


@contextlib.contextmanager
def _lock_on_this_machine(storage: Storage) -> Iterator[str]:
    """Hold the lock of those who write to a URL from this machine.

    Yields:
        Its file; "" where another process has it, or there can be none.  A claim is
        taken all the same, and stays behind if this process is killed.
    """
    lock = _try_to_lock(storage)
    if lock is None:
        yield ""
        return
    try:
        yield lock.lock_file
    finally:
        release_lock(lock)


def _try_to_lock(storage: Storage) -> filelock.BaseFileLock | None:
    folder = user_cache_folder()
    if folder is None:
        return None
    name = xxhash.xxh3_64_hexdigest(storage.url.encode("utf-8", "surrogatepass"))
    lock = filelock.FileLock(folder / "claims" / f"{name}.lock", timeout=0)
    # Another process has it; or the folder cannot be written to, or has no locks.
    with contextlib.suppress(OSError, NotImplementedError):
        (folder / "claims").mkdir(parents=True, exist_ok=True)
        lock.acquire()
        return lock
    return None


def _take_claim(
    storage: Storage, waits_s: Sequence[float], lock_file: str, *, tidies: bool
) -> None:
    """Put a claim at a URL, and wait a little for another that is there.

    Raises:
        OtherWriterError: Another process goes on replacing the cache.
    """
    content = _write_claim(lock_file, tidies=tidies)
    pauses_s = iter(waits_s)
    while True:
        try:
            _commit_claim(storage, content, lock_file)
        except FileExistsError:
            other = _read_claim(storage)
        else:
            return
        # To replace a cache may take hours: a second process that would replace it is
        # refused at once.  One that tidies up waits, since nobody tidies up after it.
        is_brief = other is None or other.tidies
        pause_s = next(pauses_s, None)
        if pause_s is None or not (tidies or is_brief):
            raise _other_replaces(storage, other)
        time.sleep(pause_s)


def _commit_claim(storage: Storage, content: bytes, held_lock_file: str) -> None:
    """Put a claim where there is none, or in the place of one that was left behind.

    Raises:
        FileExistsError: Another process has the claim.
    """
    try:
        storage.commit(_CLAIM, content, replace=False)
    except FileExistsError:
        other = _read_claim(storage)
        if other is None or not other.is_left_behind(held_lock_file):
            raise
        # No second process does so: the lock that it takes is held here.
        storage.remove(_CLAIM)
        storage.commit(_CLAIM, content, replace=False)


def _read_claim(storage: Storage) -> _Claim | None:
    """Read who has the claim; None where nobody has."""
    try:
        return _Claim.read(storage.read_file(_CLAIM, _MAX_CLAIM_BYTES))
    except FileNotFoundError:
        return None


def _other_replaces(storage: Storage, claim: _Claim | None) -> OtherWriterError:
    """Say who replaces a cache; None where it has ended since it was met."""
    writer = "which has ended meanwhile" if claim is None else claim.writer
    message = f"Another process is replacing the cache at {storage.url} ({writer})."
    why = "of two at once one would delete the other's files"
    fix = f"wait for it; if it was killed, delete {storage.url}/{_CLAIM}"
    return OtherWriterError(message, why=why, fix=fix)
