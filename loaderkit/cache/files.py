"""Open, measure, hash and map the files of a cache; refuse what is not one.

A cache may come from a stranger, so only regular files are opened.  A symbolic link
could point to any file that the reader may read, opening a FIFO would block for ever,
and a device has no end.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from loaderkit.cache.address_space import map_whole_file
from loaderkit.cache.layout import BUILDING, MANIFEST
from loaderkit.cache.manifest import MOST_MANIFEST_BYTES, read_manifest
from loaderkit.errors import CacheError, DamagedCacheError, OptionError
from loaderkit.fixes import PACK_AGAIN, Fix, Open, Pack, Setting
from loaderkit.habits import reader_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from loaderkit.cache.layout import ShardFile
    from loaderkit.cache.manifest import Manifest, SourceFiles
    from loaderkit.cache.shard_table import ShardTable
    from loaderkit.fixes import Part

_HASH_BYTES = 256 << 10
"""Bytes that are read and hashed at a time.  Chosen: they fit the cache of a CPU core.
"""
_MAX_SIZES_AT_OPEN = 1000
"""If a cache has more shards, opening it checks only that the files exist, from one
listing of the folder.  Measured: a size takes 3 us, and up to 1 ms on a network file
system.  The size of each file is checked again at its first use in any case."""
_COPY_OR_PACK_AGAIN = Fix.of("copy the cache again, or ", PACK_AGAIN)


class FileIdentity(NamedTuple):
    """What identifies a file and its content: it differs once the file is changed."""

    device: int
    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int
    """Changes with every write, and cannot be set.  ``cp -p`` and ``rsync -t`` give a
    damaged copy the modification time, and often the inode, of the file it replaces."""


def identity_of(status: os.stat_result) -> FileIdentity:
    """Take a file's identity from the result of ``os.stat``."""
    return FileIdentity(
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


@contextlib.contextmanager
def opened(file: Path) -> Iterator[int]:
    """Open a regular file for reading.

    Args:
        file: Its path.

    Yields:
        The file descriptor.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedCacheError: It is a link, a folder, a FIFO or a device.
        OSError: It may not be read, or too many files are open.
    """
    # O_NONBLOCK, since opening a FIFO would wait for a writer.  Windows has neither.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(file, flags)
    except OSError as error:
        # A symbolic link is ELOOP on Linux and EMLINK on FreeBSD; a socket is ENXIO.
        if error.errno == errno.ELOOP and not file.is_symlink():
            raise unreadable(file, error) from None  # a folder on the way to it
        if error.errno in {errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR}:
            raise _not_regular(file) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _not_regular(file)
        yield descriptor
    finally:
        os.close(descriptor)


def load_manifest(path: Path) -> Manifest:
    """Read the manifest of a cache folder.

    Args:
        path: The cache's folder.

    Returns:
        The checked manifest.

    Raises:
        CacheError: There is no cache in the folder, or an incomplete one.
    """
    return load_manifest_text(path)[1]


def load_manifest_text(path: Path) -> tuple[str, Manifest]:
    """Read the manifest of a cache folder, and what it says, at once.

    Args:
        path: The cache's folder.

    Returns:
        The text as it stands there, and the checked manifest.

    Raises:
        CacheError: There is no cache in the folder, or an incomplete one.
    """
    found = find_manifest_text(path)
    if found is None:
        raise _no_cache(path)
    return found


def find_manifest(path: Path) -> Manifest | None:
    """Read the manifest of a folder that may hold no cache yet.

    Args:
        path: The folder.

    Returns:
        The checked manifest; None where there is none.

    Raises:
        DamagedCacheError: The file is not a manifest.
        CacheError: The file exists, but cannot be read.
    """
    found = find_manifest_text(path)
    return None if found is None else found[1]


def find_manifest_text(path: Path) -> tuple[str, Manifest] | None:
    """Read the manifest of a folder, and what it says, at once.

    Args:
        path: The folder.

    Returns:
        The text as it stands there, and the checked manifest; None where there is none.

    Raises:
        DamagedCacheError: The file is not a manifest.
        CacheError: The file exists, but cannot be read.
    """
    file = path / MANIFEST
    try:
        content = read_bounded(file, MOST_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(file, error) from error
    try:
        text = content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        message = f"{file} is not the manifest of a loaderkit cache."
        fix = PACK_AGAIN
        raise DamagedCacheError(
            message, why=f"it is no text ({error})", fix=fix
        ) from None
    return text, read_manifest(text, where=str(file))


def load_sources(path: Path, sources: SourceFiles) -> str:
    """Read the list of the files that a cache was packed from.

    Args:
        path: The cache's folder.
        sources: Name, size and checksum of the list, from the manifest.

    Returns:
        The list as JSON.

    Raises:
        DamagedCacheError: The list is missing, or was changed.
        CacheError: It cannot be read.
    """
    file = path / sources.file
    try:
        content = read_bounded(file, sources.bytes)
    except FileNotFoundError:
        message = f"{file} is missing."
        why = "the manifest names it"
        raise DamagedCacheError(message, why=why, fix=_COPY_OR_PACK_AGAIN) from None
    except OSError as error:
        raise unreadable(file, error) from error
    if xxhash.xxh3_128_hexdigest(content) != sources.xxh3:
        raise _wrong_checksum(file)
    return content.decode("utf-8", "surrogatepass")


def read_bounded(file: Path, max_bytes: int) -> bytes:
    """Read all of a regular file.

    Args:
        file: Its path.
        max_bytes: The largest size it may have.

    Returns:
        Its content.

    Raises:
        DamagedCacheError: It is larger, or not a regular file.
        OSError: It does not exist, or cannot be read.
    """
    with opened(file) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > max_bytes:
            raise wrong_size(file, size, max_bytes)
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read(size)


def check_files(path: Path, shards: ShardTable) -> None:
    """Check that the files of a cache exist and have the size they were packed with.

    Args:
        path: The cache's folder.
        shards: Its shards.

    Raises:
        DamagedCacheError: A file is missing, not a regular file, or has another size.
            Of more than 1,000 files, sizes are not checked here but at their first use.
    """
    listed: set[str] = set()
    if len(shards) > _MAX_SIZES_AT_OPEN:
        # A folder may be readable file by file but not listable: then check each file.
        with contextlib.suppress(PermissionError):
            listed = _regular_files(path)

    folder, sizes = os.fspath(path), shards.bytes.tolist()
    for position, file in enumerate(shards.files):
        if file in listed:
            continue
        # os.path, since pathlib takes ten times as long.
        name = os.path.join(folder, file)  # noqa: PTH118
        if not _is_file_of_size(name, sizes[position]):
            # This raises the error that says what is wrong.
            check_size(path, shards.file(position))


def _is_file_of_size(file: str, nbytes: int) -> bool:
    """Tell whether there is a regular file of a name and a size in bytes."""
    try:
        status = os.lstat(file)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == nbytes


def _regular_files(path: Path) -> set[str]:
    """List the names of the regular files in a folder, in one system call or few.

    Raises:
        PermissionError: The folder may not be listed.
        CacheError: It cannot be read.
    """
    try:
        with os.scandir(path) as entries:
            return {
                entry.name for entry in entries if entry.is_file(follow_symlinks=False)
            }
    except PermissionError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


def check_size(path: Path, shard: ShardFile) -> None:
    """Check that a shard exists and has the size it was packed with.

    Args:
        path: The cache's folder.
        shard: The shard as the manifest describes it.

    Raises:
        DamagedCacheError: It does not.  To map and read it could kill the process
            (SIGBUS).
        CacheError: The system cannot tell.
    """
    file = path / shard.file
    try:
        status = file.lstat()
    except FileNotFoundError:
        raise missing(file) from None
    except OSError as error:
        raise unreadable(file, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise _not_regular(file)
    if status.st_size != shard.bytes:
        raise wrong_size(file, status.st_size, shard.bytes)


def check_digest(path: Path, shard: ShardFile) -> FileIdentity:
    """Hash a shard and compare the hash with the manifest.

    Args:
        path: The cache's folder.
        shard: The shard as the manifest describes it.

    Returns:
        The identity of the file that was hashed.

    Raises:
        DamagedCacheError: The file is missing, or its bytes were changed.
        CacheError: It cannot be read.
    """
    file = path / shard.file
    try:
        with opened(file) as descriptor:
            return check_open_digest(descriptor, file, shard)
    except FileNotFoundError:
        raise missing(file) from None
    except OSError as error:
        raise unreadable(file, error) from error


def check_open_digest(descriptor: int, file: Path, shard: ShardFile) -> FileIdentity:
    """Hash an open shard and compare the hash with the manifest.

    Args:
        descriptor: Its file descriptor.
        file: Its path, for messages.
        shard: The shard as the manifest describes it.

    Returns:
        The identity that the file had before it was hashed.  If it is written to
        meanwhile, its identity differs afterwards.

    Raises:
        DamagedCacheError: Its bytes were changed.
        OSError: It cannot be read.
    """
    identity = identity_of(os.fstat(descriptor))
    if identity.bytes != shard.bytes:
        raise wrong_size(file, identity.bytes, shard.bytes)
    if digest_of_file(descriptor) != shard.xxh3:
        raise _wrong_checksum(file)
    return identity


def digest_of_file(descriptor: int) -> str:
    """Compute the xxh3-128 hash of an open file, in hexadecimal."""
    digest = xxhash.xxh3_128()
    os.lseek(descriptor, 0, os.SEEK_SET)
    # One buffer for all reads: allocating one for each would take half of the time.
    buffer = bytearray(_HASH_BYTES)
    view = memoryview(buffer)
    with open(descriptor, "rb", buffering=0, closefd=False) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def map_open_file(descriptor: int, shard: ShardFile) -> NDArray[np.uint8]:
    """Map all of an open shard, read-only.

    Args:
        descriptor: Its file descriptor.  It may be closed afterwards.
        shard: The shard as the manifest describes it.  The caller has checked that the
            file has this size.

    Returns:
        Its bytes ``[bytes]``.

    Raises:
        OSError: The process has too many open files or mappings.
    """
    if not shard.bytes:
        return np.empty(0, np.uint8)
    return map_whole_file(descriptor, shard.bytes)


def check_readable(file: Path) -> None:
    """Read a file from beginning to end.

    Raises:
        CacheError: It cannot be opened or read.
    """
    try:
        with file.open("rb", buffering=0) as source:
            while source.read(_HASH_BYTES):
                pass
    except OSError as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: OSError) -> CacheError:
    """Make the error for a file that cannot be opened, read or mapped."""
    message = f"{file} could not be read: {error.strerror or error}."
    if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
        why = "the process has too many open files or mappings"
        larger = Setting("shard_bytes", "1 GB")
        fix = Fix.of("ulimit -n 4096, or pack again with ", larger)
    elif error.errno in {errno.EACCES, errno.EPERM}:
        why = "you may not read it"
        fix = Fix.of(f"chmod u+r {file}, or ask its owner")
    elif error.errno == errno.ELOOP:
        why = "a link on the way to it leads back to itself"
        fix = Fix.of(f"find it with namei {file}, and remove it")
    elif error.errno == errno.ENAMETOOLONG:
        why = "file systems take names of up to 255 bytes, and paths of up to 4,096"
        fix = Fix.of("choose a shorter path")
    else:
        why = "the disk or the network file system failed"
        fix = Fix.of("try again; if it fails again: ", _COPY_OR_PACK_AGAIN)
    return CacheError(message, why=why, fix=fix)


def folder_is_gone(path: Path) -> DamagedCacheError:
    """Make the error for a cache whose folder is no longer there."""
    message = f"{path} is not there any more."
    why = "the folder was moved, renamed or deleted after it was opened"
    fix = Fix.of("open_cache() with its new path, or ", PACK_AGAIN)
    return DamagedCacheError(message, why=why, fix=fix)


def missing(file: Path) -> DamagedCacheError:
    """Make the error for a file that the manifest names and that does not exist."""
    message = f"{file} is missing."
    return DamagedCacheError(
        message, why="the manifest names it", fix=_COPY_OR_PACK_AGAIN
    )


def wrong_size(file: Path, size: int, packed: int) -> DamagedCacheError:
    """Make the error for a file that does not have the size it was packed with."""
    message = f"{file} has {size:,} bytes, not {packed:,}."
    why = "it was cut short or changed, probably by an unfinished copy"
    return DamagedCacheError(message, why=why, fix=_COPY_OR_PACK_AGAIN)


def _wrong_checksum(file: Path) -> DamagedCacheError:
    message = f"{file} is not the file that was packed."
    why = "its xxh3 checksum differs: bytes were changed on disk or in a copy"
    return DamagedCacheError(message, why=why, fix=_COPY_OR_PACK_AGAIN)


def _not_regular(file: Path) -> DamagedCacheError:
    message = f"{file} is a link, a folder or a device, not an ordinary file."
    why = "a cache reads nothing outside its folder, and nothing without an end"
    fix = "copy the files themselves: cp -rL CACHE COPY"
    return DamagedCacheError(message, why=why, fix=fix)


def exists(path: Path) -> bool:
    """Tell whether there is a file, a folder or a link at a path.

    Unlike ``Path.exists``, errors of the system are raised with advice.

    Args:
        path: The path.

    Returns:
        False only if the system says that there is nothing.

    Raises:
        CacheError: The system cannot tell: a parent folder may not be entered, say.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable(path, error) from error
    return True


def url_meant_by(path: str | os.PathLike[str]) -> str | None:
    """Recognise a URL with a slash too few, which would name a folder.

    Args:
        path: As it was given, or as pathlib made it: of "s3://bucket" it makes
            "s3:/bucket".

    Returns:
        The URL; None where there is such a folder, or it looks like none.
    """
    looks_remote = re.search(
        r"(^|/)(s3a?|gs|gcs|az|abfss?|hf|https?):?/+(.+)",
        os.fspath(path),
        re.IGNORECASE,
    )
    # A URL of a file has three slashes, or one (RFC 8089); "file/..." is a folder.
    looks_local = re.search(r"(?:^|/)(?:file|local):(/.+)", os.fspath(path))
    if exists(Path(path)):
        return None
    if looks_remote is not None:
        return f"{looks_remote[2].lower()}://{looks_remote[3]}"
    return None if looks_local is None else f"file://{looks_local[1]}"


def refuse_cut_url(name: str, path: object, fix: Part | None = None) -> None:
    """Refuse to make a folder of a URL with a slash too few.

    pathlib makes "s3:/bucket" of "s3://bucket", and a cache that was meant for a bucket
    would be on a disk that goes with the job.

    Args:
        name: The option.
        path: Where something is to be written.
        fix: What to write; the option with the URL if None.

    Raises:
        OptionError: It is such a URL, and there is no such folder.
    """
    if not isinstance(path, str | os.PathLike):
        return  # whoever takes it says what is wrong with it
    written = os.fspath(path)
    # "s3/bucket" may well be a new folder; with a colon behind its name it is none.
    is_cut = re.search(r"(^|[/\\])[a-z][a-z0-9+.-]+:[/\\]", written, re.IGNORECASE)
    has_scheme = re.match(r"[a-z0-9+.:-]+://", written, re.IGNORECASE)
    url = url_meant_by(written) if is_cut and not has_scheme else None
    if url is not None:
        message = f"{written!r} is no folder to write into."
        raise OptionError(
            message, why="a URL begins with ://", fix=fix or Setting(name, url)
        )


def _caches_named_like(path: Path) -> list[Path]:
    """Find caches beside a path that is not there, the name most like it first."""
    try:
        beside = {sibling.name: sibling for sibling in path.parent.iterdir()}
    except OSError:
        return []
    # "rows" may be short for "rows.lk".
    names = [path.name, f"{path.name}.lk"]
    near = [name for name in names if name in beside]
    near += difflib.get_close_matches(path.name, beside, cutoff=0.75)
    return [beside[name] for name in near if exists(beside[name] / MANIFEST)]


def _caches_in(folder: Path) -> list[Path]:
    """List the caches that lie in a folder, by name."""
    try:
        return sorted(manifest.parent for manifest in folder.glob(f"*/{MANIFEST}"))
    except OSError:
        return []


def _no_cache(path: Path) -> CacheError:
    """Make the error for a path without a manifest, by what is there instead."""
    if exists(path / BUILDING):
        why = "a packing run was stopped before it ended; what it finished is kept"
        again: Part = Pack(path=str(path))
        fix_of_half = Fix.of(again, " with the same source goes on")
        return CacheError(f"{path} is half packed.", why=why, fix=fix_of_half)
    message = f"There is no cache at {path}."
    fix: Part = Pack(path=str(path))
    url = url_meant_by(path)
    if url is not None:
        why = "there is no such folder, and a URL begins with ://"
        return CacheError(message, why=why, fix=Open(url, instead=True))
    is_part_of_cache = exists(path.parent / MANIFEST)
    if is_part_of_cache:
        fix = Open(str(path.parent), instead=True)
    if not exists(path):
        similar = _caches_named_like(path)
        if similar and not is_part_of_cache:
            fix = f"did you mean {str(similar[0])!r}?"
        return CacheError(message, why="there is no such folder", fix=fix)
    if path.is_dir():
        why = f"the folder has no {MANIFEST}"
        caches = [] if is_part_of_cache else _caches_in(path)
        if caches:
            names = ", ".join(cache.name for cache in caches[:3])
            why += f"; it holds {names}"
            fix = Open(str(caches[0]), instead=True)
        return CacheError(message, why=why, fix=fix)
    if path.is_symlink() and not path.exists():
        why = f"it is a link to {path.readlink()}, which is not there"
        return CacheError(message, why=why, fix="make the link anew, or remove it")
    why = "it is a file, and a cache is a folder"
    if is_part_of_cache:
        return CacheError(message, why=why, fix=fix)
    fix = Pack(reader_of(str(path)), path=f"{path}.lk")
    return CacheError(message, why=why, fix=fix)
