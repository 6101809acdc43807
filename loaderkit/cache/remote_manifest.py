"""Reads the manifest of a cache in a store, and tells what became of the cache."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.cache.layout import MANIFEST
from loaderkit.cache.manifest import MOST_MANIFEST_BYTES, read_manifest
from loaderkit.cache.storage import how_to_push
from loaderkit.errors import CacheError, DamagedCacheError, StaleCacheError
from loaderkit.fixes import Fix, Open, Pack

if TYPE_CHECKING:
    from loaderkit.cache.manifest import Manifest
    from loaderkit.cache.storage import Storage

_LOG = logging.getLogger("loaderkit")


class RemoteManifest(NamedTuple):
    """The manifest of a cache in a store."""

    manifest: Manifest
    text: str
    """What it was read from."""


def load_remote_manifest(storage: Storage) -> Manifest:
    """Read the manifest of a cache in a store.

    Args:
        storage: The store.

    Returns:
        The checked manifest.

    Raises:
        CacheError: There is no cache, or the store does not answer.
    """
    return load_remote_manifest_text(storage).manifest


def load_remote_manifest_text(storage: Storage) -> RemoteManifest:
    """Read the manifest of a cache in a store, and what it was read from.

    Raises:
        CacheError: There is no cache, or the store does not answer.
    """
    remote_manifest = _find_remote_manifest_text(storage)
    if remote_manifest is None:
        message = f"There is no cache at {storage.url}."
        why = f"the store, or its bucket, has no {MANIFEST} there"
        push = f"{how_to_push(storage.url, overwrite=False)}, or "
        fix = Fix.of(push, Pack(path=storage.url))
        raise CacheError(message, why=why, fix=fix)
    return remote_manifest


def find_remote_manifest(storage: Storage) -> Manifest | None:
    """Read the manifest at a URL where there may be no cache yet; None without one.

    Raises:
        CacheError: The store does not answer.
        DamagedCacheError: What lies there is no manifest.
    """
    remote_manifest = _find_remote_manifest_text(storage)
    return None if remote_manifest is None else remote_manifest.manifest


def _find_remote_manifest_text(storage: Storage) -> RemoteManifest | None:
    try:
        return _read_remote_manifest(storage)
    except DamagedCacheError as error:
        # Bytes may have been changed on the way and not in the store.
        _LOG.warning("%s It is read once more.", error.what)
        return _read_remote_manifest(storage)


def _read_remote_manifest(storage: Storage) -> RemoteManifest | None:
    try:
        content = storage.read_file(MANIFEST, MOST_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    where = f"{storage.url}/{MANIFEST}"
    try:
        text = content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        message = f"{where} is not the manifest of a loaderkit cache."
        fix = how_to_push(storage.url)
        raise DamagedCacheError(
            message, why=f"it is no text ({error})", fix=fix
        ) from None
    return RemoteManifest(read_manifest(text, where=where), text)


def missing_file_error(storage: Storage, name: str, manifest: Manifest) -> CacheError:
    """Tell a cache that was replaced in the store from one that lost a file.

    Args:
        storage: The store.
        name: Name of the file that is not there.
        manifest: What the cache was when it was opened.
    """
    with contextlib.suppress(CacheError):
        if load_remote_manifest(storage).generation != manifest.generation:
            return replaced_error(storage)
    message = f"{storage.url}/{name} is missing."
    fix = how_to_push(storage.url)
    return DamagedCacheError(message, why="the manifest there names it", fix=fix)


def replaced_error(storage: Storage) -> StaleCacheError:
    """Say that another generation is in the store than was opened."""
    message = f"The cache {storage.url} was replaced while a dataset was open."
    why = "a dataset reads one cache from beginning to end, never old and new mixed"
    return StaleCacheError(
        message, why=why, fix=Fix.of("open it again: ", Open(storage.url))
    )
