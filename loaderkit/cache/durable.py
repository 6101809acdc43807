"""Write files that appear whole or not at all, even after a power cut."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from typing import TYPE_CHECKING

from loaderkit.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import BinaryIO

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_COPY_BYTES = 8 << 20
"""Copied at a time; chosen: the calls themselves cost nothing beside so many bytes."""
NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}
"""What the system answers where a folder is not ours to write to."""


@contextlib.contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turn a system call that fails into an error that names the file and the fix.

    Args:
        file: What is being written.

    Raises:
        CacheError: A system call failed inside the block.
    """
    try:
        yield
    except OSError as error:
        raise not_written(file, error) from error


def not_written(file: Path, error: OSError) -> CacheError:
    """Say that something could not be written, and what to do.

    >>> str(not_written("c.lk", OSError(28, "No space left on device"))).splitlines()
    ['c.lk could not be written: No space left on device.',
     '  why: the disk, or your share of it, is full; finished shards are kept',
     '  fix: free the space (or choose another folder) and run the same again']
    """
    message = f"{file} could not be written: {error.strerror or error}."
    why = f"{why_not_written(error)}; finished shards are kept"
    fix = "run the same again; if it fails again, choose another disk"
    if error.errno in _NO_SPACE:
        fix = "free the space (or choose another folder) and run the same again"
    elif error.errno in NOT_ALLOWED:
        fix = "choose a cache folder that you may write to"
    return CacheError(message, why=why, fix=fix)


def why_not_written(error: OSError) -> str:
    """Say why something could not be written."""
    if error.errno in _NO_SPACE:
        return "the disk, or your share of it, is full"
    if error.errno in NOT_ALLOWED:
        return "the folder is not writable"
    return "the disk or the network file system failed"


def write_file(partial: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a new file to the disk itself, under a name that nobody reads.

    Args:
        partial: Its path.  A file that a killed run left there is removed; a link is
            removed too, and not followed.
        write: Called with the open file.

    Raises:
        OSError: A system call failed; nothing is left of the file.
    """
    remove(partial)
    # O_EXCL: a link that appears in between is refused, not written through.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(partial, flags | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with open(descriptor, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        # What went wrong counts, not that it could not be tidied up.
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_text(file: Path, text: str, *, partial: Path) -> None:
    """Write a small file that appears whole or not at all, even after a power cut.

    Args:
        file: Its path; an older file of that name is replaced.
        text: Its content.
        partial: Where it is written first, in a folder of the same disk.

    Raises:
        CacheError: A system call failed; the older file stands as it was.
    """
    with writing(file):
        write_file(partial, lambda raw: write_all(raw, text))
        publish(partial, file)


_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}
"""What is answered where a file cannot have one more name: another disk, a file system
without hard links, or one that counts no more of them for a file."""


def link_or_copy(file: Path, partial: Path) -> bool:
    """Give a file a second name, or make a copy where it cannot have one.

    Args:
        file: A file that is on the disk, and is never written to again.
        partial: The other name; what a killed run left there is removed.

    Returns:
        Whether it is a copy.

    Raises:
        OSError: A system call failed; nothing is left of the copy.
    """
    remove(partial)
    try:
        os.link(file, partial)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    else:
        return False

    def copy(raw: BinaryIO) -> None:
        with file.open("rb") as content:
            shutil.copyfileobj(content, raw, _COPY_BYTES)

    write_file(partial, copy)
    return True


def publish(partial: Path, file: Path) -> None:
    """Give a finished file its name, and see that the name is on the disk.

    Args:
        partial: The finished file.
        file: Its name from now on.

    Raises:
        OSError: A system call failed.
    """
    partial.replace(file)
    sync_folder(file.parent)


def make_folders(folder: Path) -> bool:
    """Make a folder and those above it, and see that their names are on the disk.

    Args:
        folder: The folder.

    Returns:
        Whether any was missing.

    Raises:
        OSError: A system call failed.
    """
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)
    return bool(missing)


def sync_folder(folder: Path) -> None:
    """See that the names in a folder are on the disk.

    Args:
        folder: The folder.

    Raises:
        OSError: The disk failed.  Systems that cannot do it for folders (Windows, some
            network file systems) are passed over.
    """
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}:
            raise
    finally:
        os.close(descriptor)


def remove(file: Path) -> None:
    """Remove a file or a link, if it is there; never what a link leads to."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        file.unlink()


def is_folder(path: Path) -> bool:
    """Tell whether there is a folder, not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def write_all(raw: BinaryIO, text: str) -> None:
    """Write a text whose lone surrogates (names of files) come back as they were."""
    raw.write(text.encode("utf-8", "surrogatepass"))
