"""Read a whole cache again and say whether every byte is what was packed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.answers import answer_wrong_names
from loaderkit.cache.files import (
    check_digest,
    check_size,
    load_manifest,
    load_sources,
    map_open_file,
    opened,
)
from loaderkit.cache.folder_storage import FolderStorage
from loaderkit.cache.remote import RemoteCache, locate_cache
from loaderkit.cache.remote_manifest import load_remote_manifest
from loaderkit.cache.stored_files import files_of, find_damage
from loaderkit.cache.unfinished import unfinished_files, unfinished_in_words
from loaderkit.call_keywords import suggest_keywords
from loaderkit.errors import CacheError, DamagedCacheError
from loaderkit.notebook import HasCard, repr_in_a_line
from loaderkit.path_arguments import check_cache_path
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from loaderkit.cache.layout import Shard
    from loaderkit.cache.storage import Storage
    from loaderkit.fixes import Dialect


@answer_wrong_names()
@dataclass(frozen=True)
class Verification(HasCard):
    """What ``verify`` found."""

    path: str
    samples: int
    """Samples the manifest promises; 0 when it cannot be read."""
    bytes: int
    """Bytes that were hashed."""
    findings: tuple[str, ...]
    """What is wrong, a file each; empty when nothing is."""
    errors: tuple[CacheError | None, ...] = field(default=(), compare=False, repr=False)
    """The error that each finding is the text of, where there is one."""
    unfinished: tuple[str, ...] = ()
    """Files that a writer is at, or left when it was killed; no damage of the cache."""

    @property
    def ok(self) -> bool:
        """True when every byte is what was packed."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Write it for programs."""
        return {
            "path": self.path,
            "samples": self.samples,
            "bytes": self.bytes,
            "findings": self.findings,
            "ok": self.ok,
            "unfinished": self.unfinished,
        }

    def in_dialect(self, dialect: Dialect) -> Verification:
        """Write what to do as the users of a dialect would."""
        findings = list(self.findings)
        for number, error in enumerate(self.errors):
            if error is not None:
                fix = error.fix_in(dialect)
                findings[number] = str(CacheError(error.what, why=error.why, fix=fix))
        return replace(self, findings=tuple(findings))

    def _what_is_wrong(self) -> str:
        """Say in a word whether bytes are wrong, or were not looked at."""
        errors = [error for error in self.errors if error is not None]
        if len(errors) < len(self.findings):
            return "damaged"
        # A cache that is not there, one of a newer version, or a store that is silent.
        was_read = any(isinstance(error, DamagedCacheError) for error in errors)
        return "damaged" if was_read else "not verified"

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        if self.ok:
            size = format_bytes(self.bytes)
            samples = count_of(self.samples, "samples")
            lines = [f"{self.path}: sound; {samples}, {size} hashed"]
        else:
            lines = [f"{self.path}: {self._what_is_wrong()}", *self.findings]
        if self.unfinished:
            lines.append(unfinished_in_words(self.unfinished))
        return "\n".join(lines)


@suggest_keywords
def verify(
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Verification:
    """Hash every shard and check that its offsets fit its values.

    Args:
        path: The cache's folder, or a URL: every byte is read there, and none kept.
        storage_options: What fsspec makes the file system of a URL with.

    Returns:
        What is wrong, if anything; damage is told, not raised.
    """
    if not isinstance(path, RemoteCache):
        check_cache_path(path)
    location = locate_cache(path, storage_options)
    if isinstance(location, RemoteCache):
        storage = location.storage
        verification = _verify_stored(storage)
    else:
        # Perhaps somebody has copied to it by its file:// URL.
        storage = FolderStorage(Path(path))
        verification = _verify_folder(path)
    return replace(verification, unfinished=unfinished_files(storage))


def _verify_folder(path: str | os.PathLike[str]) -> Verification:
    folder = Path(path)
    try:
        manifest = load_manifest(folder)
    except CacheError as error:
        return _verification_of(str(path), [error])
    # One damaged shard is no reason to stop: whoever packs again, or copies files back,
    # wants to know all of them.
    findings: list[str | CacheError] = []
    hashed_bytes = 0
    for shard in manifest.shards:
        damage = _find_damage_in_folder(folder, shard)
        if damage:
            findings.append(damage)
        else:
            hashed_bytes += shard.bytes
    if manifest.sources is not None:
        try:
            load_sources(folder, manifest.sources)
        except CacheError as error:
            findings.append(error)
    return _verification_of(str(path), findings, manifest.samples, hashed_bytes)


def _verify_stored(storage: Storage) -> Verification:
    try:
        manifest = load_remote_manifest(storage)
        # One list of all sizes: a file that was cut short is known without reading
        # its gigabytes.
        sizes = storage.sizes()
    except CacheError as error:
        return _verification_of(storage.url, [error])
    findings: list[str | CacheError] = []
    hashed_bytes = 0
    for file in files_of(manifest):
        damage = find_damage(storage, file, sizes.get(file.file))
        if damage:
            findings.append(damage)
        else:
            hashed_bytes += file.bytes
    return _verification_of(storage.url, findings, manifest.samples, hashed_bytes)


def _verification_of(
    path: str, findings: list[str | CacheError], samples: int = 0, nbytes: int = 0
) -> Verification:
    errors = tuple(
        finding if isinstance(finding, CacheError) else None for finding in findings
    )
    return Verification(path, samples, nbytes, tuple(map(str, findings)), errors)


def _find_damage_in_folder(folder: Path, shard: Shard) -> CacheError | None:
    """Say what is wrong with one shard; None when nothing is."""
    try:
        # In the order of their cost, and the offsets last: those of a file that is not
        # what was packed would only be a second name for the same damage.
        check_size(folder, shard)
        check_digest(folder, shard)
        _check_offsets(folder, shard)
    except CacheError as error:
        return error
    return None


def _check_offsets(folder: Path, shard: Shard) -> None:
    with opened(folder / shard.file) as descriptor:
        mapped = map_open_file(descriptor, shard)
    for name, column in shard.columns.items():
        if column.offsets is None:
            continue
        array = shard.arrays[column.offsets]
        # Offsets are mapped, never in chunks (layout.py): "or" is for the type checker.
        start = array.offset or 0
        offsets = mapped[start : start + array.nbytes].view("<i8")
        row_count = shard.arrays[column.values].shape[0]
        is_falling = bool((np.diff(offsets) < 0).any())
        # Not damage on the disk, since the checksum holds: whoever packed it did so.
        if offsets[0] != 0 or offsets[-1] != row_count or is_falling:
            message = (
                f"The offsets of column {name!r} in {shard.file} do not fit its values."
            )
            raise CacheError(message, why="it was packed wrongly", fix="pack it again")
