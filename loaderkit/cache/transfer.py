"""Copy whole caches to a store and from it: shards first, the manifest last.

A reader of the store finds the cache that was there before, or the new one.  Of two
processes that write one URL at once, one succeeds and the other gets an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from loaderkit.answers import answer_wrong_names
from loaderkit.arguments import check_cache_path, suggest_keywords
from loaderkit.cache.build import open_build
from loaderkit.cache.durable import publish, remove, write_file, writing
from loaderkit.cache.files import (
    check_digest,
    check_files,
    load_manifest,
    read_bounded,
)
from loaderkit.cache.layout import MANIFEST, is_cache_file_name
from loaderkit.cache.manifest import MOST_MANIFEST_BYTES, read_manifest
from loaderkit.cache.mirror import find_remote_manifest, load_remote_manifest
from loaderkit.cache.remote import open_storage
from loaderkit.cache.storage import KeepsHistory, is_url
from loaderkit.cache.stored_files import files_of, read_in_steps
from loaderkit.errors import CacheError, DamagedCacheError, OptionError
from loaderkit.fixes import OVERWRITE, Either, Fix, Open
from loaderkit.notebook import HasCard, repr_in_a_line
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

    from loaderkit.cache.build import Build
    from loaderkit.cache.layout import ShardFile
    from loaderkit.cache.manifest import Manifest
    from loaderkit.cache.storage import Storage

_CLAIM = ".writing"
"""A file that says who replaces the cache at a URL.  It is committed, which of several
processes succeeds for one, so that there is one at a time."""
_PROBE = ".writable"
"""A file that is written and removed, to see whether that is possible."""
_MAX_CLAIM_BYTES = 1 << 16
"""A claim is one line; what is longer is none of ours, and must not fill the memory."""


class OtherWriterError(CacheError):
    """Another process has written, or writes, a cache to the same URL."""


@answer_wrong_names()
@dataclass(frozen=True)
class Transfer(HasCard):
    """What was copied."""

    source: str
    target: str
    samples: int
    files: int
    """Files that were copied; others were there already."""
    bytes: int
    """Their bytes."""

    def to_json(self) -> dict[str, Any]:
        """Write it for programs."""
        return dict(vars(self))

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        copied = f"{count_of(self.files, 'files')}, {format_bytes(self.bytes)} copied"
        return (
            f"{self.source} -> {self.target}: "
            f"{count_of(self.samples, 'samples')}; {copied}"
        )


@suggest_keywords
def push(
    cache: str | os.PathLike[str],
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Transfer:
    """Copy a cache to a store.

    Files that a broken run left there are not copied again.

    Args:
        cache: The cache's folder.
        url: Where it goes; any URL that fsspec knows.
        storage_options: What fsspec makes the file system with.
        overwrite: Replace a cache that is there; datasets that have it open get a
            ``StaleCacheError`` when they next read a shard they have not mirrored.

    Returns:
        What was copied.

    Raises:
        CacheError: There is no whole cache in the folder; there is one in the store
            already, or another process writes one; or the store does not answer.
    """
    if is_url(cache) and not is_url(url):
        message = f"push takes the folder first, and the URL second, got {url!r} there."
        fix = _call("push", os.fspath(url), os.fspath(cache))
        raise OptionError(message, why="the two were exchanged", fix=fix)
    check_cache_path(cache)
    storage = open_storage(url, storage_options)
    return copy_to_store(Path(cache), storage, overwrite=overwrite)


def copy_to_store(folder: Path, storage: Storage, *, overwrite: bool) -> Transfer:
    """Copy a cache to a store that is open; see ``push``."""
    # Whether there is anything to copy is asked first, since it costs no request.
    _load_whole(folder)
    return copy_to_target(folder, ask_to_write(storage, overwrite=overwrite))


@dataclass(frozen=True)
class WritableTarget:
    """A URL at which a cache can be written; ``ask_to_write`` has asked the store."""

    storage: Storage
    overwrite: bool
    """A cache that is there is replaced."""


def ask_to_write(storage: Storage, *, overwrite: bool) -> WritableTarget:
    """See that a cache can be written to a store, before any work is done for it.

    A small file is written and removed: that needs what shards need.

    Args:
        storage: Where it is to go.
        overwrite: It is to replace one that is there.

    Returns:
        What ``copy_to_target`` takes.

    Raises:
        OtherWriterError: There is a cache, or another process replaces it.
        CacheError: There is no bucket, or it cannot be written to.
    """
    if overwrite:
        with contextlib.suppress(FileNotFoundError):
            claim = storage.read_file(_CLAIM, _MAX_CLAIM_BYTES)
            raise _other_replaces(storage, claim.decode())
    elif find_remote_manifest(storage) is not None:
        raise _other_was_quicker(storage)
    # The Hub would keep a commit of each.
    if not (isinstance(storage, KeepsHistory) and storage.keeps_history):
        storage.commit(_PROBE, b"", replace=True)
        # Who may write, and not remove, can copy a cache all the same.
        with contextlib.suppress(CacheError):
            storage.remove(_PROBE)
    return WritableTarget(storage, overwrite)


def copy_to_target(folder: Path, target: WritableTarget) -> Transfer:
    """Copy a cache to where a store lets it be written.

    Raises:
        OtherWriterError: Another process has written a cache there meanwhile, or
            replaces it.
        CacheError: There is no whole cache in the folder, or the store does not answer.
    """
    manifest = _load_whole(folder)
    storage, overwrite = target.storage, target.overwrite
    # Without overwriting, the commit itself lets one writer win.
    with _claim_of(storage) if overwrite else contextlib.nullcontext():
        sizes_before = storage.sizes()
        uploaded = _upload_missing(folder, manifest, storage, sizes_before)
        content = read_bounded(folder / MANIFEST, MOST_MANIFEST_BYTES)
        try:
            storage.commit(MANIFEST, content, replace=overwrite)
        except FileExistsError:
            _remove_unnamed(storage, set(uploaded))
            raise _other_was_quicker(storage) from None
        if overwrite:
            # What the cache before named, and what a writer that was killed has left.
            for name in sorted(set(sizes_before) - set(manifest.files)):
                if is_cache_file_name(name):
                    storage.remove(name)
    return Transfer(
        str(folder),
        storage.url,
        manifest.samples,
        1 + len(uploaded),
        len(content) + sum(uploaded.values()),
    )


def _load_whole(folder: Path) -> Manifest:
    """Read the manifest of a cache whose files are all there."""
    manifest = load_manifest(folder)
    check_files(folder, manifest.shards)
    return manifest


@suggest_keywords
def pull(
    url: str,
    cache: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Transfer:
    """Copy a cache from a store to a folder.

    Shards that a broken run has copied are not copied again.

    Args:
        url: Where it is; any URL that fsspec knows.
        storage_options: What fsspec makes the file system with.
        cache: The new cache's folder.

    Returns:
        What was copied.

    Raises:
        CacheError: There is no whole cache in the store, or one in the folder already.
        DamagedCacheError: A file in the store is not the one that was packed.
    """
    if is_url(cache) and not is_url(url):
        message = f"pull takes the URL first, and the folder second, got {url!r} there."
        fix = _call("pull", os.fspath(cache), os.fspath(url))
        raise OptionError(message, why="the two were exchanged", fix=fix)
    check_cache_path(cache)
    return copy_from_store(open_storage(url, storage_options), Path(cache))


def copy_from_store(storage: Storage, folder: Path) -> Transfer:
    """Copy a cache from a store that is open; see ``pull``."""
    manifest = load_remote_manifest(storage)
    copied: dict[str, int] = {}
    with open_build(folder, overwrite=False) as build:
        if build is None:
            message = f"There is a cache at {folder} already."
            fix = "name another folder, or delete that one"
            raise CacheError(message, why="it would be replaced", fix=fix)
        for file in files_of(manifest):
            if not _was_copied_before(folder, file):
                _download_file(storage, file, build)
                copied[file.file] = file.bytes
        text = _read_text(storage, MANIFEST, MOST_MANIFEST_BYTES)
        if read_manifest(text, where=storage.url).generation != manifest.generation:
            message = f"The cache {storage.url} was replaced while it was copied."
            why = "what was copied is of the cache before"
            raise CacheError(message, why=why, fix="run the same again")
        build.put_in_place(manifest, text)
    return Transfer(
        storage.url,
        str(folder),
        manifest.samples,
        1 + len(copied),
        len(text) + sum(copied.values()),
    )


def _download_file(storage: Storage, file: ShardFile, build: Build) -> None:
    """Copy a file out of a store; it gets its name when its bytes are right."""
    folder, partial = build.path, build.folder / f"{file.file}.partial"
    digest = xxhash.xxh3_128()

    def copy(target: BinaryIO) -> None:
        for content in read_in_steps(storage, file):
            digest.update(content)
            target.write(content)

    with writing(folder / file.file):
        write_file(partial, copy)
        if digest.hexdigest() == file.xxh3:
            build.note_written(file.file)
            publish(partial, folder / file.file)
            return
        remove(partial)
    message = f"{storage.url}/{file.file} is not the file that was packed."
    why = "its xxh3 checksum differs: bytes were changed in the store or on the way"
    fix = f"loaderkit verify {storage.url}"
    raise DamagedCacheError(message, why=why, fix=fix)


def _was_copied_before(folder: Path, file: ShardFile) -> bool:
    """Tell whether an earlier run has copied a file."""
    try:
        check_digest(folder, file)
    except CacheError:
        return False
    return True


def _upload_missing(
    folder: Path,
    manifest: Manifest,
    storage: Storage,
    sizes_before: Mapping[str, int],
) -> dict[str, int]:
    """Copy the files that the store lacks; say which, and how large they are.

    A name ends in the checksum of its file, so that what has the name and the size is
    the file, or was cut by nobody: a store shows what it has whole.
    """
    uploaded: dict[str, int] = {}
    for file in files_of(manifest):
        if sizes_before.get(file.file) != file.bytes:
            # A damaged file is not passed on.
            check_digest(folder, file)
            storage.write_file(file.file, folder / file.file)
            uploaded[file.file] = file.bytes
    if uploaded:
        # Another writer that lost removes what its winner does not name.
        sizes_now = storage.sizes()
        for file in files_of(manifest):
            if sizes_now.get(file.file) != file.bytes:
                message = (
                    f"{storage.url}/{file.file} is not there after it was written."
                )
                why = "another process has removed it, or the store lost it"
                raise CacheError(message, why=why, fix="run the same again")
    return uploaded


def _remove_unnamed(storage: Storage, names: set[str]) -> None:
    """Remove files that were written for nothing, but for those the winner has too."""
    winner = find_remote_manifest(storage)
    if winner is not None:
        for name in names - set(winner.files):
            storage.remove(name)


@contextlib.contextmanager
def _claim_of(storage: Storage) -> Iterator[None]:
    """Be the only one who replaces the cache at a URL.

    Raises:
        OtherWriterError: Another process is.
    """
    this_writer = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "time": time.ctime(),
    }
    try:
        storage.commit(_CLAIM, json.dumps(this_writer).encode(), replace=False)
    except FileExistsError:
        try:
            writer = storage.read_file(_CLAIM, _MAX_CLAIM_BYTES).decode()
        except FileNotFoundError:
            writer = "which has ended meanwhile"
        raise _other_replaces(storage, writer) from None
    try:
        yield
    except BaseException:
        # What went wrong is what is said, also where the store has gone meanwhile.
        with contextlib.suppress(CacheError):
            storage.remove(_CLAIM)
        raise
    storage.remove(_CLAIM)


def _other_replaces(storage: Storage, writer: str) -> OtherWriterError:
    message = f"Another process is replacing the cache at {storage.url} ({writer})."
    why = "of two at once one would delete the other's files"
    fix = f"wait for it; if it was killed, delete {storage.url}/{_CLAIM}"
    return OtherWriterError(message, why=why, fix=fix)


def _call(name: str, *paths: str) -> Either:
    """Write a call of ``push`` or ``pull``."""
    command = shlex.join(["loaderkit", name, *paths])
    return Either(f"{name}({', '.join(map(repr, paths))})", command)


def _other_was_quicker(storage: Storage) -> OtherWriterError:
    message = f"There is a cache at {storage.url} already."
    why = "writing there would replace it; perhaps another process was quicker"
    fix = Fix.of(Open(storage.url), ", or ", OVERWRITE, " to replace it")
    return OtherWriterError(message, why=why, fix=fix)


def _read_text(storage: Storage, name: str, most_bytes: int) -> str:
    try:
        return storage.read_file(name, most_bytes).decode("utf-8", "surrogatepass")
    except FileNotFoundError:
        message = f"The cache {storage.url} was removed while it was copied."
        why = "another process deleted it, or packs it again"
        raise CacheError(message, why=why, fix="run the same again") from None
