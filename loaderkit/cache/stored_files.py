"""The files of a whole cache in a store, one after the other, and what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from loaderkit.cache.layout import ShardFile
from loaderkit.cache.storage import how_to_push
from loaderkit.errors import CacheError, DamagedCacheError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loaderkit.cache.manifest import Manifest
    from loaderkit.cache.storage import Storage

_STEP_BYTES = 32 << 20
"""So much of a file is held in memory.  Chosen, as in shard_download.py."""


def files_of(manifest: Manifest) -> Iterator[ShardFile]:
    """Describe all files of a cache but the manifest.

    Args:
        manifest: The cache.

    Yields:
        The shards, and then the list of the files that it was made from, which has no
        samples.
    """
    for position in range(len(manifest.shards)):
        yield manifest.shards.file(position)
    sources = manifest.sources
    if sources is not None:
        yield ShardFile(sources.file, 0, sources.bytes, sources.xxh3)


def read_in_steps(storage: Storage, file: ShardFile) -> Iterator[bytes]:
    """Read a file of a store, without holding it in memory.

    Args:
        storage: The store.
        file: What is read.

    Yields:
        Its bytes, in order.

    Raises:
        DamagedCacheError: It is missing.
        CacheError: The store does not answer.
    """
    # As many as the manifest says: one that grows must not be read for ever.
    for start in range(0, file.bytes, _STEP_BYTES):
        stop = min(start + _STEP_BYTES, file.bytes)
        try:
            yield storage.read_range(file.file, start, stop)
        except FileNotFoundError:
            message = f"{storage.url}/{file.file} is missing."
            fix = how_to_push(storage.url)
            why = "the manifest there names it"
            raise DamagedCacheError(message, why=why, fix=fix) from None


def is_stored(storage: Storage, file: ShardFile) -> bool:
    """Tell whether a store has a file that its list lacks: the file's end is read.

    A list that was cut on its way looks whole, as one that goes on, of which a proxy
    has dropped what tells so.

    Raises:
        CacheError: The store does not answer.
    """
    try:
        storage.read_range(file.file, max(0, file.bytes - 1), file.bytes)
    except FileNotFoundError:
        return False
    return True


def find_damage(storage: Storage, file: ShardFile, nbytes: int | None) -> str:
    """Say what is wrong with one file of a store; "" when nothing is.

    Args:
        storage: The store.
        file: The file as the manifest describes it.
        nbytes: What the store says of its size; None where its list lacks it.  Lists
            that were cut on their way look whole, so it is asked for by its name.
    """
    where = f"{storage.url}/{file.file}"
    # Without reading it, where its size tells already.
    if nbytes is not None and nbytes != file.bytes:
        return f"{where} has {nbytes:,} bytes, not {file.bytes:,}."
    digest = xxhash.xxh3_128()
    try:
        for content in read_in_steps(storage, file):
            digest.update(content)
    except CacheError as error:
        return str(error)
    if digest.hexdigest() != file.xxh3:
        return f"{where} is not the file that was packed: its xxh3 checksum differs."
    return ""
