"""The files of a cache: found, measured, hashed and mapped, or refused with the fix."""

from __future__ import annotations

import mmap
import sys
from typing import TYPE_CHECKING

import numpy as np

from loaderkit.cache.hdf5 import file_digest
from loaderkit.cache.layout import BUILDING, MANIFEST, Manifest, Shard, read_manifest
from loaderkit.errors import CacheError, DamagedCacheError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def load_manifest(path: Path) -> Manifest:
    """Read the manifest of a cache folder.

    Args:
        path: The cache's folder.

    Returns:
        The checked manifest.

    Raises:
        CacheError: There is no cache, or not a whole one, in the folder.
    """
    file = path / MANIFEST
    try:
        text = file.read_bytes().decode("utf-8", "surrogatepass")
    except (FileNotFoundError, NotADirectoryError):
        raise _no_cache(path) from None
    except UnicodeDecodeError as error:
        what = f"{file} is not the manifest of a loaderkit cache."
        fix = "pack(source, path, overwrite=True)"
        raise DamagedCacheError(what, why=f"it is no text ({error})", fix=fix) from None
    return read_manifest(text, where=str(file))


def _no_cache(path: Path) -> CacheError:
    if (path / BUILDING).exists():
        why = "a packing run was stopped before it ended; what it finished is kept"
        return CacheError(f"{path} is half packed.", why=why, fix="run the same again")
    what = f"There is no cache at {path}."
    why = (
        f"the folder has no {MANIFEST}" if path.exists() else "there is no such folder"
    )
    return CacheError(what, why=why, fix=f"pack(source, {str(path)!r})")


def check_size(path: Path, shard: Shard) -> None:
    """Refuse a shard that is missing or has another size than when it was packed.

    Args:
        path: The cache's folder.
        shard: The shard as the manifest describes it.

    Raises:
        DamagedCacheError: It would fault (SIGBUS) when mapped and read.
    """
    file = path / shard.file
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        what, why = f"{file} is missing.", "the manifest names it"
    else:
        if size == shard.bytes:
            return
        what = f"{file} has {size:,} bytes, not {shard.bytes:,}."
        why = "it was cut short or changed, probably by an unfinished copy"
    fix = "copy the cache again, or pack(source, path, overwrite=True)"
    raise DamagedCacheError(what, why=why, fix=fix)


def check_digest(path: Path, shard: Shard) -> None:
    """Hash a shard and compare with the manifest.

    Args:
        path: The cache's folder.
        shard: The shard as the manifest describes it.

    Raises:
        DamagedCacheError: The bytes are not those that were packed.
    """
    if file_digest(path / shard.file) != shard.xxh3:
        what = f"{path / shard.file} is not the file that was packed."
        why = "its xxh3 checksum differs: bytes were changed on disk or in a copy"
        fix = "copy the cache again, or pack(source, path, overwrite=True)"
        raise DamagedCacheError(what, why=why, fix=fix)


def map_file(path: Path, shard: Shard) -> NDArray[np.uint8]:
    """Map a whole shard, read-only.

    Args:
        path: The cache's folder.
        shard: The shard as the manifest describes it.

    Returns:
        Its bytes; the size is checked again on the open file, so that no mapped page
        lies behind the end.

    Raises:
        CacheError: The system has no descriptor or mapping left.
    """
    check_size(path, shard)
    keep_open = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    try:
        with (path / shard.file).open("rb") as file:
            mapped = mmap.mmap(
                file.fileno(), shard.bytes, access=mmap.ACCESS_READ, **keep_open
            )
    except OSError as error:
        what = f"{path / shard.file} could not be mapped: {error.strerror}."
        why = "the process has too many open files or mappings"
        fix = "ulimit -n 4096, or pack again with a larger shard_bytes"
        raise CacheError(what, why=why, fix=fix) from error
    return np.frombuffer(mapped, np.uint8)
