"""Which shards this machine has hashed already, so that each is hashed once.

A line for each, in a file of the user's own.  A file is known again by its device,
inode, size and times of change, and by the checksum it was found to have; a copy, or
the same file after a change, is another.  The record itself may be damaged, cut, of any
size, or no file at all: then shards are hashed once more, and nothing else happens.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from loaderkit.cache.files import opened
from loaderkit.errors import DamagedCacheError

if TYPE_CHECKING:
    from loaderkit.cache.files import FileIdentity

_LOG = logging.getLogger("loaderkit")

_FOLDER, _RECORD = "loaderkit", "verified.txt"
_MAX_BYTES = 8 << 20
"""Longer, the file is begun anew: some 80,000 shards, each then hashed once more."""
_FEW_SEARCHES = 8
"""So many shards are looked for in the record as it stands.  For more, its lines become
a set, which takes ten times as long as a search (24 ms for 4 MB)."""
_RACY_NS = 2_000_000_000
"""A file changed less than so long ago is not remembered: a second change within one
tick of the file system's clock (1 ms on ext4, 2 s on FAT) would leave its time as it
is.  git does the same for its index."""


class VerifiedFiles:
    """Files whose content was compared with its checksum."""

    def __init__(self, record: Path | None) -> None:
        self._record = record
        self._known: set[str] = set()
        self._unparsed = b"\n"
        """Whole lines of the record that are not in ``_known``."""
        self._searches = 0
        self._bytes_read = 0

    def __contains__(self, item: tuple[FileIdentity, str]) -> bool:
        line = _line_of(*item)
        if line in self._known:
            return True
        self._read_on()
        self._searches += 1
        if self._searches <= _FEW_SEARCHES:
            return f"\n{line}\n".encode() in self._unparsed
        self._known.update(self._unparsed.decode("ascii", "replace").splitlines())
        self._unparsed = b"\n"
        return line in self._known

    def add(self, identity: FileIdentity, xxh3: str) -> None:
        """Remember that a file has the content of a checksum.

        Args:
            identity: The file, as it was before it was hashed.
            xxh3: The checksum it was found to have.
        """
        changed_ns = max(identity.mtime_ns, identity.ctime_ns)
        if time.time_ns() - changed_ns < _RACY_NS:
            return
        line = _line_of(identity, xxh3)
        self._known.add(line)
        if self._record is None:
            return
        try:
            self._record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Not blocking: a FIFO there would wait for a reader.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
            descriptor = os.open(self._record, flags, 0o600)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    self._record = None
                    return
                if status.st_size > _MAX_BYTES:
                    os.ftruncate(descriptor, 0)
                # One write of a short line to a file opened for appending is whole,
                # however many processes write at once.  The empty line before it ends
                # one that was cut.
                os.write(descriptor, b"\n" + line.encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError:
            # A home that cannot be written to: each process hashes for itself.
            self._record = None

    def _read_on(self) -> None:
        """Take over what other processes have added since the last look."""
        if self._record is None:
            return
        try:
            with opened(self._record) as descriptor:
                size = os.fstat(descriptor).st_size
                if size < self._bytes_read:
                    self._bytes_read = 0
                if size > 2 * _MAX_BYTES:
                    return  # not ours; it is begun anew
                os.lseek(descriptor, self._bytes_read, os.SEEK_SET)
                with open(descriptor, "rb", closefd=False) as file:
                    content = file.read(size - self._bytes_read)
        except (OSError, DamagedCacheError):
            return
        whole_lines = content[: content.rfind(b"\n") + 1]
        self._bytes_read += len(whole_lines)
        self._unparsed += whole_lines


def user_cache_folder() -> Path | None:
    """Say where loaderkit's files lie among the user's caches; None without a home."""
    variable = "LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME"
    base = os.environ.get(variable, "")
    if base and not Path(base).is_absolute():
        # The XDG specification asks to ignore such a path: each folder in which a
        # program is started would get caches of its own.
        _warn_of_relative_path(variable, base)
        base = ""
    try:
        folder = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:  # no home is known
        return None
    return folder / _FOLDER


@functools.cache
def _warn_of_relative_path(variable: str, path: str) -> None:
    """Say once in a process that a variable is ignored."""
    _LOG.warning(
        "%s=%s is ignored: it is no absolute path; unset it, or set it to one",
        variable,
        path,
    )


def record_path() -> Path | None:
    """Say where it is recorded which files were hashed; None without a home."""
    folder = user_cache_folder()
    return None if folder is None else folder / _RECORD


def is_record(path: str) -> bool:
    """Tell whether a path is that of such a record, of any user and machine.

    >>> is_record("/home/me/.cache/loaderkit/verified.txt"), is_record("verified.txt")
    (True, False)
    """
    return Path(path).parts[-2:] == (_FOLDER, _RECORD)


def _line_of(identity: FileIdentity, xxh3: str) -> str:
    return " ".join([*map(str, identity), xxh3])
