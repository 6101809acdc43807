"""Of all processes that write to a URL, the one that may remove files there.

It is the one that has made a file, the claim, which one at a time can.  A process that
is killed leaves it behind, and a store cannot tell.  So a process holds a lock on its
machine, too, as long as it has a claim: who can take that lock there sees that the
writer of the claim is gone, and puts its own in its place.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from typing import TYPE_CHECKING

import filelock
import xxhash

from loaderkit.cache.lock_files import let_go
from loaderkit.cache.process_identity import ProcessIdentity
from loaderkit.cache.verified import user_cache_folder
from loaderkit.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loaderkit.cache.storage import Storage

_CLAIM = ".writing"
"""A file that says who replaces the cache at a URL, or tidies up there.  It is
committed, which of several processes succeeds for one, so that there is one at a
time."""
_TIDIES = "removes what no cache needs"
"""Noted in the claim of who does not replace a cache, and holds it for moments."""
CLAIM_WAITS_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Pauses of who waits for the claim of another that tidies up, or of one that ends.
Chosen: removing takes 30 ms a file on moto's server, of 200 shards as long as this."""
_MAX_CLAIM_BYTES = 1 << 16
"""A claim is one line; what is longer is none of ours, and must not fill the memory."""


class OtherWriterError(CacheError):
    """Another process has written, or writes, a cache to the same URL."""


@contextlib.contextmanager
def claim_of(
    storage: Storage, waits_s: Sequence[float], *, tidies: bool = False
) -> Iterator[None]:
    """Be the only one who may remove files at a URL.

    Args:
        storage: The URL.
        waits_s: Pauses while another is.
        tidies: No cache is replaced: it is held for moments.

    Raises:
        OtherWriterError: Another process is, and goes on replacing the cache.
    """
    with _lock_on_this_machine(storage) as lock:
        _take_claim(storage, waits_s, tidies=tidies, lock=lock)
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
    # Who tidies up is gone before a shard is copied.
    if claim is None or _TIDIES in claim:
        return
    with _lock_on_this_machine(storage) as lock:
        if not _is_of_the_dead(claim, lock):
            raise _other_replaces(storage, claim)


@contextlib.contextmanager
def _lock_on_this_machine(storage: Storage) -> Iterator[str]:
    """Hold the lock of those who write to a URL from this machine.

    Yields:
        Its file; "" where another process has it, or there can be none.  A claim is
        taken all the same, and stays where this process is killed.
    """
    lock = _try_to_lock(storage)
    if lock is None:
        yield ""
        return
    try:
        yield lock.lock_file
    finally:
        let_go(lock)


def _try_to_lock(storage: Storage) -> filelock.BaseFileLock | None:
    folder = user_cache_folder()
    if folder is None:
        return None
    name = xxhash.xxh3_64_hexdigest(storage.url.encode("utf-8", "surrogatepass"))
    lock = filelock.FileLock(folder / "claims" / f"{name}.lock", timeout=0)
    # Another has it; or the folder cannot be written to, or has no locks.
    with contextlib.suppress(OSError, NotImplementedError):
        (folder / "claims").mkdir(parents=True, exist_ok=True)
        lock.acquire()
        return lock
    return None


def _is_of_the_dead(claim: str, lock: str) -> bool:
    """Tell whether the writer of a claim is known to be gone.

    Args:
        claim: The claim.
        lock: The file of a lock that this process holds; "" for none.
    """
    try:
        written = json.loads(claim)
        space, its_lock = written["space"], written["lock"]
    except (ValueError, KeyError, TypeError):
        return False  # taken without a lock, or by an older version
    # The system lets go of a lock when its holder ends, however it does.
    is_near = ProcessIdentity(0, space).is_near
    return bool(lock) and is_near and its_lock == lock


def _take_claim(
    storage: Storage, waits_s: Sequence[float], *, tidies: bool, lock: str
) -> None:
    this_process = ProcessIdentity.of_this_process()
    this_writer = {
        "host": socket.gethostname(),
        "process": this_process.number,
        "space": this_process.space,
        "lock": lock,
        "time": time.ctime(),
        # A try whose answer was lost knows its claim again, and no other's.
        "token": uuid.uuid4().hex,
    }
    if tidies:
        this_writer["doing"] = _TIDIES
    content = json.dumps(this_writer).encode()
    for wait_s in (*waits_s, None):
        try:
            _commit_claim(storage, content, lock)
        except FileExistsError:
            claim = _read_claim(storage)
        else:
            return
        # Who replaces a cache may take hours, and another who would replace it is not
        # let in.  Who tidies up waits for its end, behind which nobody else would.
        is_brief = claim is None or _TIDIES in claim
        if wait_s is None or not (tidies or is_brief):
            raise _other_replaces(storage, claim or "which has ended meanwhile")
        time.sleep(wait_s)


def _commit_claim(storage: Storage, content: bytes, lock: str) -> None:
    """Put a claim where there is none, or that of a writer which is gone.

    Raises:
        FileExistsError: Another process has the claim.
    """
    try:
        storage.commit(_CLAIM, content, replace=False)
    except FileExistsError:
        claim = _read_claim(storage)
        if claim is None or not _is_of_the_dead(claim, lock):
            raise
        # Nobody else does so: it is of this machine, whose lock is held here.
        storage.remove(_CLAIM)
        storage.commit(_CLAIM, content, replace=False)


def _read_claim(storage: Storage) -> str | None:
    """Read who holds the claim; None where nobody does."""
    try:
        return storage.read_file(_CLAIM, _MAX_CLAIM_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None


def _other_replaces(storage: Storage, writer: str) -> OtherWriterError:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        written = json.loads(writer)
        writer = f"process {written['process']} on {written['host']}, {written['time']}"
    message = f"Another process is replacing the cache at {storage.url} ({writer})."
    why = "of two at once one would delete the other's files"
    fix = f"wait for it; if it was killed, delete {storage.url}/{_CLAIM}"
    return OtherWriterError(message, why=why, fix=fix)
