"""A cache in a folder, seen as a storage: a slow disk, a network's, a mounted bucket.

Shards are mirrored from there as from an object store.  It is the shortest example of
a ``Storage``, and puts the manifest in place by one system call.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import unquote

from loaderkit.cache.durable import (
    make_folders,
    publish,
    remove,
    sync_folder,
    write_file,
    writing,
)
from loaderkit.cache.files import exists, opened, read_bounded, unreadable
from loaderkit.cache.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_PARTIAL = re.compile(
    r"\.(?P<file>.+?)-(?:(?P<writer>[0-9]+-[0-9a-f]{16})-)?[0-9a-f]{32}\.partial"
)
"""Name of a file that is being written.  Earlier versions named no writer."""
_COPIED_BYTES = 1 << 20
"""Read and written at a time.  Chosen."""
_ABANDONED_S = 3600.0
"""Whoever has written nothing to its file for so long is taken for dead, if it is of
another machine or user: a lock would tell at once, but some of the file systems that
are mounted here have none.  Chosen.

A clock that is set forward makes a file look as old.  Its writer, which lives, writes
it again (``_TRIES``): the times of that one are of the clock as it is then."""
_TRIES = 3
"""Chosen: a clock is set forward once."""


class FolderStorage:
    """The files of one cache in a folder; see ``storage.Storage``.

    Args:
        folder: The folder; made when something is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.url = os.fspath(self.folder)

    @classmethod
    def from_url(
        cls, url: str, _options: object = None, _patience: object = None
    ) -> FolderStorage:
        """Open the folder of a ``file://`` URL.

        A file system has no options, and answers or fails in its own time.

        >>> FolderStorage.from_url("file:///data/my%20cache").url
        '/data/my cache'
        >>> FolderStorage.from_url("file:///data/run#2").url
        '/data/run#2'
        """
        # As in fsspec, all behind the scheme is the path: "data" of "file://data/cache"
        # is no host, and what stands behind a "#" or "?" is part of a name.
        path = unquote(url.split("://", 1)[1])
        if os.name == "nt":
            path = path.lstrip("/")  # "/C:/data"
        return cls(Path(path))

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Read a small file whole; see ``Storage``."""
        file = self.folder / name
        try:
            return read_bounded(file, most_bytes)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(*error.args, self.url) from error
        except OSError as error:
            raise unreadable(file, error) from error

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Read some bytes of a file; see ``Storage``."""
        file = self.folder / name
        try:
            with opened(file) as descriptor:
                content = bytearray()
                os.lseek(descriptor, start, os.SEEK_SET)
                # One call gives 2 GiB at most, and less where a signal comes.
                while len(content) < stop - start:
                    chunk = os.read(descriptor, stop - start - len(content))
                    if not chunk:
                        msg = f"it ends at byte {start + len(content):,}"
                        raise unreadable(file, OSError(msg))
                    content += chunk
                return bytes(content)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unreadable(file, error) from error

    def sizes(self) -> Mapping[str, int]:
        """List the files with their bytes; see ``Storage``."""
        sizes = {}
        try:
            for entry in os.scandir(self.folder):
                # Another writer may have put its file in place meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        sizes[entry.name] = status.st_size
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise unreadable(self.folder, error) from error
        return sizes

    def write_file(self, name: str, file: Path) -> None:
        """Write a file from local disk; see ``Storage``."""

        def copy(target: BinaryIO) -> None:
            for content in _read_in_steps(file):
                target.write(content)

        def publish_file(partial: Path) -> None:
            publish(partial, self.folder / name)

        with writing(self.folder / name):
            self._write_and_place(name, copy, publish_file)

    def commit(self, name: str, content: bytes, *, replace: bool) -> None:
        """Write the file that makes all others visible; see ``Storage``."""
        file = self.folder / name
        exists_already = False

        def write(target: BinaryIO) -> None:
            target.write(content)

        def place(partial: Path) -> None:
            nonlocal exists_already
            self._remove_abandoned_files(partial)
            if replace:
                publish(partial, file)
                return
            try:
                # A rename would replace what another process has put there.
                os.link(partial, file)
            except FileExistsError:
                exists_already = True
            sync_folder(self.folder)

        with writing(file):
            self._write_and_place(name, write, place)
        # Not from within the block above, which makes a CacheError of every OSError.
        if exists_already:
            raise FileExistsError(file)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there; see ``Storage``."""
        with writing(self.folder / name):
            remove(self.folder / name)

    def _write_and_place(
        self,
        name: str,
        write: Callable[[BinaryIO], None],
        place: Callable[[Path], None],
    ) -> None:
        """Write a file under a name that nobody reads, and give it its own.

        Args:
            name: Its name.
            write: Called with the open file; again if the file was removed meanwhile.
            place: Called with its path; gives it its name.

        Raises:
            OSError: A system call failed.
        """
        make_folders(self.folder)
        for tries in range(1, _TRIES + 1):
            writer = ProcessIdentity.of_this_process()
            partial = self.folder / f".{name}-{writer}-{uuid.uuid4().hex}.partial"
            write_file(partial, write)
            try:
                place(partial)
            except FileNotFoundError:
                # Another writer has taken it for abandoned.
                if tries == _TRIES or exists(partial):
                    raise
            else:
                return
            finally:
                # What went wrong counts, not that it could not be tidied up.
                with contextlib.suppress(OSError):
                    remove(partial)

    def _remove_abandoned_files(self, just_written: Path) -> None:
        """Remove what writers were at that were killed: of each, up to a shard.

        A process of this machine is known to have ended.

        Args:
            just_written: A file there.  Its time is that of the file system's own
                clock, which that of this machine may not be.
        """
        oldest_s = just_written.stat().st_mtime - _ABANDONED_S
        for entry in os.scandir(self.folder):
            match = _PARTIAL.fullmatch(entry.name)
            if match is None:
                continue
            # Another user's may not be ours to remove: it takes room, and no more.
            with contextlib.suppress(OSError):
                is_old = entry.stat(follow_symlinks=False).st_mtime < oldest_s
                if is_old or _is_writer_gone(match):
                    remove(Path(entry.path))


def partial_file_of(name: str) -> str | None:
    """Give the file that is being written under a name; None where it is none such.

    >>> partial_file_of(".a.h5-0123456789abcdef0123456789abcdef.partial")
    'a.h5'
    >>> partial_file_of("a.h5")
    """
    match = _PARTIAL.fullmatch(name)
    return None if match is None else match["file"]


def _is_writer_gone(match: re.Match[str]) -> bool:
    """Tell whether the writer of a file is known to have ended."""
    return bool(match["writer"]) and ProcessIdentity.read(match["writer"]).is_gone


def _read_in_steps(file: Path) -> Iterator[bytes]:
    """Read a file on local disk.

    Raises:
        CacheError: It cannot be opened or read, and is at fault, not where it goes.
    """
    try:
        with file.open("rb") as source:
            while content := source.read(_COPIED_BYTES):
                yield content
    except OSError as error:
        raise unreadable(file, error) from error
