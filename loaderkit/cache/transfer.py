"""Copy whole caches to a store and from it: shards first, the manifest last.

A reader of the store finds the cache that was there before, or the new one.  Of several
processes that write one URL at once, each succeeds or gets an error.

A process removes files only while it holds the claim (claims.py), and only those that
the manifest there does not name.  One that replaces a cache takes the claim before it
lists what is there, so that the files it finds stay.  One that writes to where there is
no cache needs no claim: once another manifest stands, its own is refused.
"""

from __future__ import annotations

import logging
import os
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import xxhash

from loaderkit.answers import answer_wrong_names
from loaderkit.arguments import check_truth
from loaderkit.cache.build import open_build
from loaderkit.cache.claims import CLAIM_WAITS_S, hold_claim, refuse_if_replaced
from loaderkit.cache.durable import publish, remove, write_file, writing
from loaderkit.cache.files import (
    check_digest,
    check_files,
    load_manifest,
    load_manifest_text,
    refuse_cut_url,
)
from loaderkit.cache.layout import MANIFEST, is_cache_file_name
from loaderkit.cache.manifest import MOST_MANIFEST_BYTES, read_manifest
from loaderkit.cache.remote import open_storage
from loaderkit.cache.remote_manifest import (
    find_remote_manifest,
    load_remote_manifest,
)
from loaderkit.cache.storage import KeepsHistory, KeepsParts, is_url
from loaderkit.cache.stored_files import files_of, is_stored, read_in_steps
from loaderkit.call_keywords import suggest_keywords
from loaderkit.errors import (
    CacheError,
    DamagedCacheError,
    OptionError,
    OtherWriterError,
)
from loaderkit.fixes import OVERWRITE, Either, Fix, Open
from loaderkit.notebook import HasCard, repr_in_a_line
from loaderkit.path_arguments import check_cache_path
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import BinaryIO

    from loaderkit.cache.build import Build
    from loaderkit.cache.layout import ShardFile
    from loaderkit.cache.manifest import Manifest
    from loaderkit.cache.storage import Storage

_LOG = logging.getLogger("loaderkit")
_PROBE = ".writable"
"""A file that is written and removed, to see whether that is possible."""


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
        fix = _call_or_command("push", os.fspath(url), os.fspath(cache))
        raise OptionError(message, why="the two were exchanged", fix=fix)
    check_cache_path(cache)
    if is_url(cache):
        message = f"push copies a folder to a store, and {cache} is in a store."
        why = "a cache goes from store to store by way of local disk"
        fix = _two_steps(os.fspath(cache), os.fspath(url))
        raise OptionError(message, why=why, fix=fix)
    check_truth("overwrite", overwrite)
    storage = open_storage(url, storage_options)
    return copy_to_store(Path(cache), storage, overwrite=overwrite)


def copy_to_store(folder: Path, storage: Storage, *, overwrite: bool) -> Transfer:
    """Copy a cache to a store that is open; see ``push``."""
    # Whether there is anything to copy is asked first, since it costs no request.
    check_files(folder, load_manifest(folder).shards)
    return copy_to_target(folder, ask_to_write(storage, overwrite=overwrite))


@dataclass(frozen=True)
class WritableTarget:
    """A URL at which a cache can be written; ``ask_to_write`` has asked the store."""

    storage: Storage
    overwrite: bool
    """A cache that is there is replaced."""
    may_remove: bool
    """Files can be removed there, too."""


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
        refuse_if_replaced(storage)
    elif find_remote_manifest(storage) is not None:
        raise _cache_exists(storage)
    may_remove = True
    # The Hub would keep a commit of each.
    if not (isinstance(storage, KeepsHistory) and storage.keeps_history):
        storage.commit(_PROBE, b"", replace=True)
        try:
            storage.remove(_PROBE)
        except CacheError:
            # Without the right to remove a cache can still be created.  To replace one
            # is to remove its shards.
            if overwrite:
                raise
            may_remove = False
    return WritableTarget(storage, overwrite, may_remove)


def copy_to_target(
    folder: Path,
    target: WritableTarget,
    claim_waits_s: Sequence[float] = CLAIM_WAITS_S,
) -> Transfer:
    """Copy a cache to where a store lets it be written.

    Args:
        folder: The cache's.
        target: Where to.
        claim_waits_s: Pauses while another process tidies up there.

    Raises:
        OtherWriterError: Another process has written a cache there meanwhile, or
            replaces it.
        CacheError: There is no whole cache in the folder, or the store does not answer.
    """
    # Text and manifest of one reading: another process may pack the folder again.
    text, manifest = load_manifest_text(folder)
    check_files(folder, manifest.shards)
    content = text.encode("utf-8", "surrogatepass")
    upload = _Upload(folder, manifest, target.storage)
    if target.overwrite:
        _replace_cache(upload, content, claim_waits_s)
    else:
        _create_cache(upload, content, target, claim_waits_s)
    return Transfer(
        str(folder),
        target.storage.url,
        manifest.samples,
        1 + len(upload.copied_bytes),
        len(content) + sum(upload.copied_bytes.values()),
    )


def _replace_cache(
    upload: _Upload, manifest_text: bytes, claim_waits_s: Sequence[float]
) -> None:
    """Put a cache in the place of the one that is there, if any."""
    storage = upload.storage
    with hold_claim(storage, claim_waits_s):
        upload.copy_missing(storage.sizes())
        storage.commit(MANIFEST, manifest_text, replace=True)
        sizes = storage.sizes()
        # An older version removes its own files without a claim when it has lost.
        upload.copy_missing(sizes)
        # Files of the cache before, of a writer that was killed, and of one that writes
        # now and will be refused.
        _remove_unnamed(upload.manifest, storage, sizes)
        _give_up_uploads(storage, _unfinished_uploads(storage))


def _create_cache(
    upload: _Upload,
    manifest_text: bytes,
    target: WritableTarget,
    claim_waits_s: Sequence[float],
) -> None:
    """Put a cache where there is none; of several writers the commit lets one win."""
    storage = target.storage
    sizes = storage.sizes()
    is_refused = False
    try:
        sizes = upload.copy_missing(sizes)
        storage.commit(MANIFEST, manifest_text, replace=False)
    except FileExistsError:
        is_refused = True
    except _LostFileError:
        # Perhaps another writer has won meanwhile, and tidied up.
        if find_remote_manifest(storage) is None:
            raise
        is_refused = True
    unnamed = set(filter(is_cache_file_name, sizes)) - set(upload.manifest.files)
    is_untidy = is_refused or bool(unnamed) or bool(_unfinished_uploads(storage))
    if target.may_remove and is_untidy:
        _tidy_up(storage, claim_waits_s)
    if is_refused:
        raise _cache_exists(storage)


def _tidy_up(storage: Storage, claim_waits_s: Sequence[float]) -> None:
    """Remove what losers and killed writers have left beside a cache that stands.

    What is left takes room and does no harm: the next one that replaces the cache
    removes it.
    """
    try:
        with hold_claim(storage, claim_waits_s, tidies=True):
            # Read under the claim: nobody replaces it meanwhile.
            standing = find_remote_manifest(storage)
            if standing is not None:
                _remove_unnamed(standing, storage, storage.sizes())
                _give_up_uploads(storage, _unfinished_uploads(storage))
    except CacheError as error:
        _LOG.warning("%s: files of no cache stay there (%s)", storage.url, error.what)


def _remove_unnamed(manifest: Manifest, storage: Storage, names: Iterable[str]) -> None:
    """Remove files of caches that a manifest does not name; the claim is held."""
    for name in sorted(set(names) - set(manifest.files)):
        if is_cache_file_name(name):
            storage.remove(name)


def _unfinished_uploads(storage: Storage) -> Mapping[str, list[str]]:
    """List uploads of a cache's files that have not ended; none where that is unknown.

    With keys that may not, or stores that cannot, parts stay: a rule of the bucket is
    what is meant for them.
    """
    if not isinstance(storage, KeepsParts):
        return {}
    try:
        uploads = storage.unfinished_uploads()
    except CacheError as error:
        _LOG.info("%s: parts of files may stay there (%s)", storage.url, error.what)
        return {}
    return {name: ids for name, ids in uploads.items() if is_cache_file_name(name)}


def _give_up_uploads(storage: Storage, uploads: Mapping[str, list[str]]) -> None:
    """Remove parts of files whose writer was killed; the claim is held.

    A writer that is at one of them uploads it again, and is refused then: a cache
    stands.
    """
    if not isinstance(storage, KeepsParts):
        return
    try:
        for name, ids in uploads.items():
            for upload in ids:
                storage.give_up_upload(name, upload)
    except CacheError as error:
        _LOG.warning("%s: parts of files stay there (%s)", storage.url, error.what)


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
        fix = _call_or_command("pull", os.fspath(cache), os.fspath(url))
        raise OptionError(message, why="the two were exchanged", fix=fix)
    check_cache_path(cache)
    if is_url(cache):
        message = f"pull copies a cache to a folder, and {cache} is in a store."
        why = "a cache goes from store to store by way of local disk"
        fix = _two_steps(os.fspath(url), os.fspath(cache))
        raise OptionError(message, why=why, fix=fix)
    refuse_cut_url("cache", cache)
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


class _LostFileError(CacheError):
    """A file is not in the store any more."""


class _Upload:
    """The copying of a cache's files to a store.

    Args:
        folder: The cache's.
        manifest: Of the cache.
        storage: Where to.
    """

    def __init__(self, folder: Path, manifest: Manifest, storage: Storage) -> None:
        self._folder = folder
        self.manifest = manifest
        self.storage = storage
        self.copied_bytes: dict[str, int] = {}
        """By name of what was copied."""

    def copy_missing(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """Copy the files that the store lacks.

        A name ends in the checksum of its file, so that what has the name and the size
        is the file, or was cut by nobody: a store shows what it has whole.

        Args:
            sizes: The files that are there.

        Returns:
            Those that are there now.

        Raises:
            CacheError: The store does not answer, or does not keep what it got.
        """
        missing = [
            file
            for file in files_of(self.manifest)
            if sizes.get(file.file) != file.bytes
        ]
        if not missing:
            return sizes
        for file in missing:
            # A damaged file is not passed on.
            check_digest(self._folder, file)
            self.storage.write_file(file.file, self._folder / file.file)
            self.copied_bytes[file.file] = file.bytes
        # Where another writer has won meanwhile, it removes what it does not name.
        sizes = self.storage.sizes()
        for file in files_of(self.manifest):
            if sizes.get(file.file) == file.bytes:
                continue
            if file.file in sizes or not is_stored(self.storage, file):
                message = f"{self.storage.url}/{file.file} is not there after it was "
                message += "written."
                why = "another process has removed it, or the store lost it"
                raise _LostFileError(message, why=why, fix="run the same again")
        return sizes


def _call_or_command(name: str, *paths: str) -> Either:
    """Write a call of ``push`` or ``pull``."""
    command = shlex.join(["loaderkit", name, *paths])
    return Either(f"{name}({', '.join(map(repr, paths))})", command)


def _two_steps(source: str, target: str) -> Either:
    """Write how a cache is copied from one store to another."""
    folder = PurePosixPath(source).name or "cache"
    pulled = _call_or_command("pull", source, folder)
    pushed = _call_or_command("push", folder, target)
    code = f"{pulled.code}; {pushed.code}"
    return Either(code, f"{pulled.command} && {pushed.command}")


def _cache_exists(storage: Storage) -> OtherWriterError:
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
