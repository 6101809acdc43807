"""Lock files that threads of one process wait for too, and not for ever.

The holder of one says who it is in a file beside it.  So a process that waits can tell
a lock that passes from process to process, or whose holder gets on, from one whose
holder is stopped.

A wait for a lock that is held for moments ends in an error where the holder is stuck
(``hold_lock_file``).  Locks that are held for hours of work are waited for, and the log
says for whom (``hold_lock_for_work``, ``take_lock_of_any_kind``).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import filelock

from loaderkit.cache.durable import not_written, writing
from loaderkit.cache.process_identity import ProcessIdentity
from loaderkit.errors import CacheError
from loaderkit.spawning import GUARD_MAIN, is_run_again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_LOG = logging.getLogger("loaderkit")
_POLL_S = 0.02
"""Between two tries to take a lock that another process has.  filelock's own 50 ms
would be most of the time that a shard takes to be taken into use."""
_LOOK_S = 1.0
"""Between two looks whether the holder gets on."""
_SAY_AGAIN_S = 60.0
"""A process that waits for hours of work logs that again after this time, and then each
time after twice as long.  Chosen: the log of a day gets eleven lines."""
_STOPPED_LOOKS = 2
"""A holder that is stopped at so many looks in a row is said to be: a debugger, or a
snapshot of a container, stops one for a moment."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
"""What file systems without locks answer when they are asked for one."""
_HOLDER = ".holder"
"""Ends the name of the note that lies beside a lock file; see ``write_holder``."""
STOPPED = "it is stopped (SIGSTOP, Ctrl-Z or a debugger)"
"""What messages say of such a holder."""


@dataclass(frozen=True)
class LockPatience:
    """How long a holder of a lock may be without a sign of life."""

    silent_s: float
    """Whoever it is."""
    stopped_s: float
    """One that is known to be stopped: by SIGSTOP, Ctrl-Z or a debugger."""


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock, as it has written itself."""

    process: ProcessIdentity
    host: str
    """The name of its machine, for people."""
    since_ns: int
    """When it took the lock.  Another number is another turn."""

    def __str__(self) -> str:
        name = f"process {self.process.number} on {self.host}"
        is_told_by_host = self.process.is_near or self.host != socket.gethostname()
        return name if is_told_by_host else f"{name}, in another container"

    @property
    def how_to_free(self) -> str:
        """What makes a holder that is stopped let go of its locks."""
        number = self.process.number
        if self.process.is_near:
            return f"kill -CONT {number}, or end it: its locks go with it"
        where = "in that container" if self.host == socket.gethostname() else "there"
        return f"kill -CONT {number} {where}, or end it: its locks go with it"

    @property
    def is_stopped(self) -> bool:
        """Whether it is known to be stopped; False where that cannot be known."""
        return self.process.is_stopped


class StuckHolderError(Exception):
    """Who holds a lock has not got on for longer than was to be waited.

    Args:
        holder: Who it is; None where it has not said so.
        waited_s: Seconds without a sign of life.
    """

    def __init__(self, holder: LockHolder | None, waited_s: float) -> None:
        super().__init__(f"{holder} has held a lock for {waited_s:.0f} s")
        self.holder, self.waited_s = holder, waited_s


class _ThreadLocks:
    """One lock of threading for each lock file that is wanted now.

    A second thread of a process would poll for the file like another process, and sleep
    longer than the first one holds it: of a cold epoch of 12 shards 0.6 s of 2.4.
    """

    def __init__(self) -> None:
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Begin anew: a forked process has copies of locks whose threads it has not."""
        self._guard = threading.Lock()
        # A lock goes with the last thread that holds it or waits for it.
        self._locks: weakref.WeakValueDictionary[str, threading.Lock] = (
            weakref.WeakValueDictionary()
        )

    def lock_of(self, file: Path) -> threading.Lock:
        """Give the lock that all threads of this process share for a file."""
        with self._guard:
            return self._locks.setdefault(os.fspath(file), threading.Lock())


_THREAD_LOCKS = _ThreadLocks()


@contextlib.contextmanager
def hold_lock_file(
    file: Path,
    patience: LockPatience | None = None,
    sign_of_life: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Hold a lock that no other thread and no other process has.

    Args:
        file: Made if it is not there.
        patience: How long its holder may be without a sign of life; None for ever.
        sign_of_life: Gives something that changes while the holder gets on.

    Raises:
        StuckHolderError: Its holder does not get on.
        OSError: The file system has no locks, or the file cannot be made.
        NotImplementedError: The same, where filelock says so.
    """
    with _THREAD_LOCKS.lock_of(file):
        lock = filelock.FileLock(file)
        note = _note_beside(file)
        if patience is None:
            lock.acquire(poll_interval=_POLL_S)
        else:
            _acquire_from_living(lock, note, patience, sign_of_life)
        try:
            write_holder(note)
            yield
        finally:
            lock.release()


@contextlib.contextmanager
def hold_lock_for_work(file: Path, work: str) -> Iterator[None]:
    """Hold a lock for as long as work takes; say whose work is waited for.

    Args:
        file: Made if it is not there.
        work: What its holder does, such as "packs /data/molecules.lk".

    Raises:
        CacheError: The file cannot be made.
    """
    note = _note_beside(file)
    lock = take_lock_of_any_kind(file, note, work)
    try:
        write_holder(note)
        yield
    finally:
        # Before the lock is released: after that, another holder may have written its
        # own note there.
        with contextlib.suppress(OSError):
            note.unlink(missing_ok=True)
        release_lock(lock)


def take_lock_of_any_kind(file: Path, note: Path, work: str) -> filelock.BaseFileLock:
    """Take a lock of the system's, or where it has none one that is a file.

    NFS without a lock daemon (ENOLCK), FUSE and object stores (EOPNOTSUPP) have none;
    there a file that must not exist yet serves as the lock.  Two processes that took
    locks of different kinds would both work.  So the system is asked three times before
    it is believed to have none, and any other failure (a full disk, too many open
    files) is an error.

    Args:
        file: Made if it is not there.
        note: Where its holder says who it is; see ``write_holder``.
        work: What its holder does, such as "packs /data/molecules.lk".

    Returns:
        The lock, to be given to ``release_lock``.

    Raises:
        CacheError: The file cannot be made.
    """
    lock = filelock.FileLock(file)
    for pause_s in (0.0, 0.01, 0.1):
        time.sleep(pause_s)
        try:
            take_lock(lock, note, work)
        except NotImplementedError as error:
            refusal: Exception = error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise not_written(file, error) from error
            refusal = error
        else:
            return lock
    soft_file = file.with_name(soft_lock_name(file.name))
    _LOG.info("%s cannot be locked (%s); %s is used", file, refusal, soft_file.name)
    soft_lock = filelock.SoftFileLock(soft_file)
    with writing(soft_file):
        take_lock(soft_lock, note, work)
    return soft_lock


def soft_lock_name(name: str) -> str:
    """Name the file that is the lock where the system has none.

    >>> soft_lock_name(".lock")
    '.lock-soft'
    """
    return f"{name}-soft"


def release_lock(lock: filelock.BaseFileLock) -> None:
    """Release a lock; where that fails, log it."""
    try:
        lock.release()
    except OSError as error:
        # The system releases it when this process ends, if not before.
        _LOG.warning("the lock %s could not be released: %s", lock.lock_file, error)


def take_lock(lock: filelock.BaseFileLock, note: Path, work: str) -> None:
    """Wait for a lock however long its holder works, and say for whom.

    Args:
        lock: The lock.
        note: Where its holder says who it is; see ``write_holder``.
        work: What its holder does, such as "packs /data/molecules.lk".

    Raises:
        OSError: The file system has no locks, or the file cannot be made.
        NotImplementedError: The same, where filelock says so.
        CacheError: Its holder waits for this process.
    """
    start_s = next_line_s = time.monotonic()
    pause_s = _SAY_AGAIN_S
    stopped_looks = 0
    timeout_s = 0.0
    while not _acquire_within(lock, timeout_s):
        timeout_s = _LOOK_S
        holder = _read_holder(note)
        _refuse_to_wait_for_starter(holder, work)
        is_stopped = holder is not None and holder.is_stopped
        stopped_looks = stopped_looks + 1 if is_stopped else 0

        now_s = time.monotonic()
        is_due = now_s >= next_line_s
        if is_due:
            next_line_s = now_s + pause_s
            pause_s *= 2
        if is_due or stopped_looks == _STOPPED_LOOKS:
            _LOG.warning(
                "waiting for %s, which %s; %.0f s so far%s",
                holder or "another process",
                work,
                now_s - start_s,
                _advice(lock, holder, is_stopped=stopped_looks >= _STOPPED_LOOKS),
            )


def _refuse_to_wait_for_starter(holder: LockHolder | None, work: str) -> None:
    """Refuse to wait for the process that waits for this one.

    The worker of an executor that is started anew runs a script without a main guard
    from its first line.  So it comes to the call in which the script gave the executor
    its tasks, and waits for who waits for the tasks.

    Raises:
        CacheError: This process is such a worker.
    """
    if holder is None or not is_run_again():
        return
    if not holder.process.has_started_this_one:
        return
    message = f"A new process would wait for ever for {holder}, which {work}."
    why = "that process started it for work of its own; it runs the script again from "
    why += "its first line, and has come to the same call"
    raise CacheError(message, why=why, fix=GUARD_MAIN)


def _acquire_within(lock: filelock.BaseFileLock, timeout_s: float) -> bool:
    try:
        lock.acquire(timeout=timeout_s)
    except filelock.Timeout:
        return False
    return True


def _advice(
    lock: filelock.BaseFileLock, holder: LockHolder | None, *, is_stopped: bool
) -> str:
    """Say what can be done about a lock that is waited for; "" for nothing."""
    if holder is not None and is_stopped:
        return f"; {STOPPED}: {holder.how_to_free}"
    if isinstance(lock, filelock.SoftFileLock):
        # A file, which outlives a process that was killed on another machine.
        return f" (it has ended? delete {lock.lock_file})"
    if holder is not None and holder.process == ProcessIdentity.of_this_process():
        return (
            " (this process, in another thread; if that one waits for this thread, "
            "neither ends: in load(), self.load(key) in place of self[row])"
        )
    return ""


def _acquire_from_living(
    lock: filelock.BaseFileLock,
    note: Path,
    patience: LockPatience,
    sign_of_life: Callable[[], object],
) -> None:
    """Wait for a lock as long as its holders get on.

    Raises:
        StuckHolderError: One does not.
    """
    last_sign: object = None
    silent_s = stopped_s = 0.0
    while True:
        try:
            lock.acquire(timeout=_LOOK_S, poll_interval=_POLL_S)
        except filelock.Timeout:
            holder = _read_holder(note)
            sign = (holder, sign_of_life())
            # Looks are counted, not time: this process may have been stopped as well.
            silent_s = silent_s + _LOOK_S if sign == last_sign else 0.0
            is_stopped = holder is not None and holder.is_stopped
            stopped_s = stopped_s + _LOOK_S if is_stopped else 0.0
            last_sign = sign
            if silent_s >= patience.silent_s or stopped_s >= patience.stopped_s:
                raise StuckHolderError(holder, max(silent_s, stopped_s)) from None
        else:
            return


def write_holder(note: Path) -> None:
    """Say that this process holds a lock; where that cannot be written, nobody knows.

    Args:
        note: The file that those who wait read.  A link there is not followed.
    """
    identity = ProcessIdentity.of_this_process()
    holder = {
        "process": identity.number,
        "space": identity.space,
        "host": socket.gethostname(),
        "since_ns": time.time_ns(),
    }
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
    with contextlib.suppress(OSError):
        descriptor = os.open(note, flags, 0o666)
        try:
            os.write(descriptor, json.dumps(holder).encode())
        finally:
            os.close(descriptor)


def _note_beside(file: Path) -> Path:
    return file.with_name(f"{file.name}{_HOLDER}")


def _read_holder(note: Path) -> LockHolder | None:
    # Its holder may be writing it at this moment.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        written = json.loads(note.read_text("utf-8"))
        # Earlier versions wrote no space: of their processes less is known.
        number, space = int(written["process"]), str(written.get("space", ""))
        return LockHolder(
            ProcessIdentity(number, space),
            str(written["host"]),
            int(written["since_ns"]),
        )
    return None
