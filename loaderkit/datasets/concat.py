"""Make one cache of several, and add samples to a cache.

Shards are taken over as they are, by hard links where the file system has them.  Only
where a cache numbers its samples' structures otherwise than the first one (their
*variants*, see structure.py) are its shards written anew, one at a time.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import filelock
import numpy as np
import xxhash

from loaderkit.arguments import suggest_keywords
from loaderkit.cache.build import open_build
from loaderkit.cache.columns import Block, ShardBuffer
from loaderkit.cache.files import exists, find_manifest
from loaderkit.cache.layout import MANIFEST, SHARD_FORMAT
from loaderkit.cache.remote import RemoteCache, locate_cache
from loaderkit.cache.store import Store
from loaderkit.datasets.base import SafeDataset
from loaderkit.datasets.fingerprint import Fingerprint
from loaderkit.datasets.open import open_cache
from loaderkit.datasets.pack import pack
from loaderkit.datasets.structure import VARIANT, Structure, is_graph
from loaderkit.errors import CacheError, DatasetError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from loaderkit.cache.layout import Shard
    from loaderkit.datasets.source_files import TrackFiles

_LOG = logging.getLogger("loaderkit")
_EXTENDED_WITH = "extended with"
"""Notes in a cache the generation of the samples that were added last."""
_LIBRARIES = ("loaderkit", "torch", "torch-geometric", "numpy", "h5py")


@suggest_keywords
def concat(
    caches: Iterable[SafeDataset[Any] | str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    classes: Iterable[type] = (),
    overwrite: bool = False,
) -> SafeDataset[Any]:
    """Make one cache of several, their samples one after the other.

    On one file system no sample is copied: the new cache has hard links to the shards
    of the others, which may be deleted.  Across file systems the shards are copied.
    Shards are written anew, one in memory at a time, where their samples are built in
    other ways than those of the caches before (another field, another dtype), or are
    compressed by another filter.

    The new cache is not held against raw files or code when it is opened: open it with
    ``open_cache``.

    Args:
        caches: Folders of caches, or datasets over whole caches.
        path: The new cache's folder.
        classes: Classes that samples are made of, beyond PyG's own and those of the
            given datasets.
        overwrite: Replace the cache that is there; it stays until the new one is whole.

    Returns:
        The new cache, open.

    Raises:
        CacheError: A cache is not there or damaged, there is one at ``path`` already,
            or the folder cannot be written.
        DatasetError: There is nothing to concatenate.
        OptionError: A dataset has a transform or is a part of its cache, or lies in an
            object store.

    Example:
        >>> import loaderkit, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> for name in ("a", "b"):
        ...     sample = {"x": torch.ones(2)}
        ...     _ = loaderkit.pack([sample, sample], f"{folder}/{name}", workers=0)
        >>> len(concat([f"{folder}/a", f"{folder}/b"], f"{folder}/both"))
        4
    """
    if isinstance(caches, str | os.PathLike):
        message = f"concat takes a list of caches, got {caches!r}."
        fix = 'concat(["day1.lk", "day2.lk"], "both.lk")'
        raise OptionError(message, why="it is one path", fix=fix)
    originals = list(caches)
    if not originals:
        message = "There are no caches to concatenate."
        fix = 'concat(["day1.lk", "day2.lk"], "both.lk")'
        raise DatasetError(message, why="the list is empty", fix=fix)
    parts = [_open_part(cache) for cache in originals]

    target = _local_folder(path)
    if not overwrite and exists(target / MANIFEST):
        message = f"There is a cache at {target} already."
        fix = "concat(..., overwrite=True) to replace it, or extend() to add to it"
        raise CacheError(message, why="concatenating would replace it", fix=fix)

    _refuse_other_kind(parts, "The samples of these caches")
    _write_merged(_merge_structures(parts), target, overwrite=overwrite)
    return open_cache(target, classes=[*_passed_classes(originals), *classes])


@suggest_keywords
def extend(
    cache: SafeDataset[Any] | str | os.PathLike[str],
    more: object,
    *,
    workers: int | None = None,
    shard_bytes: int = 256 << 20,
    track_files: TrackFiles = "stat",
    classes: Iterable[type] = (),
) -> SafeDataset[Any]:
    """Add samples behind those of a cache.

    They are packed into shards of their own in a folder inside the cache's, and become
    part of it in one step: whoever opens the cache finds all of them or none.  A call
    that was killed is called again; samples that it had added are not added twice.

    Datasets and loaders that are open go on reading the samples they had.

    Args:
        cache: The cache's folder, or a dataset over the whole of it.
        more: What ``pack`` takes: a list of samples, any map-style dataset, a folder of
            ``.pt`` files.
        workers: Processes that read samples; 0 reads in this one; None: up to 4.
        shard_bytes: Bytes after which a file is finished.
        track_files: As for ``pack``.
        classes: Classes that samples are made of, beyond PyG's own.

    Returns:
        The cache with the new samples, open.

    Raises:
        CacheError: There is no cache, or the folder cannot be written.
        DatasetError: A sample cannot be read or stored; nothing was added.
        OptionError: An option cannot have this value, or the cache lies in a store.
    """
    location = _open_part(cache).path
    added_folder = location / ".extending"
    with filelock.FileLock(location / ".extending.lock"):
        left_behind = find_manifest(added_folder)
        packed = pack(
            more,
            added_folder,
            workers=workers,
            compression=Store(location).manifest.compression,
            shard_bytes=shard_bytes,
            track_files=track_files,
            overwrite=True,
        )
        parts = [Store(location), Store(added_folder)]
        _refuse_other_kind(parts, f"The samples to add to {location}", added_folder)
        generation = parts[1].manifest.generation
        # A call that ends by itself leaves no folder: what lies there was packed by one
        # that was killed, before or behind the step that added it.
        was_added = parts[0].manifest.made_with.get(_EXTENDED_WITH) == generation
        if was_added and left_behind is not None:
            _LOG.info("a killed call has added these samples to %s already", location)
        else:
            merged = _merge_structures(parts)
            made_with = {**merged.made_with, _EXTENDED_WITH: generation}
            extended = replace(merged, made_with=made_with)
            _write_merged(extended, location, overwrite=True)
        shutil.rmtree(added_folder)

    all_classes = [*_passed_classes([cache, packed]), *classes]
    return open_cache(location, classes=all_classes)


def _refuse_other_kind(
    parts: Sequence[Store], subject: str, packed_folder: Path | None = None
) -> None:
    """Refuse graphs beside samples that are none.

    A cache of graphs is a graph dataset, whose batches and sizes are those of graphs:
    one number among them ends an epoch hours later.

    Args:
        parts: Caches that would become one.
        subject: What the message is about.
        packed_folder: Deleted where they are refused.
    """
    kinds: dict[bool, Store] = {}
    for part in parts:
        for variant in Structure.from_json(part.manifest.structure).variants:
            kinds.setdefault(is_graph(variant), part)
    first_kinds = Structure.from_json(parts[0].manifest.structure).variants
    # A cache that was packed of both kinds holds what its owner wanted.
    if len(kinds) < 2 or len({is_graph(variant) for variant in first_kinds}) == 2:
        return
    if packed_folder is not None:
        shutil.rmtree(packed_folder)
    wanted, other = (
        ("graphs", "none") if kinds[True] is parts[0] else ("no graphs", "some")
    )
    message = f"{subject} are not of one kind."
    why = (
        f"the samples of {parts[0].path} are {wanted}, and {other} are among the others"
    )
    fix = "pack(samples, another_path), a cache of their own"
    raise DatasetError(message, why=why, fix=fix)


def _open_part(cache: SafeDataset[Any] | str | os.PathLike[str]) -> Store:
    """Open a cache that is to be a part of another."""
    if not isinstance(cache, SafeDataset):
        return Store(_local_folder(cache))
    if cache.cache is None:
        message = (
            f"{type(cache).__name__} has no cache: its samples are loaded each time."
        )
        raise OptionError(message, fix="pack(dataset, path), and give that path")
    store = Store(_local_folder(cache.cache))
    is_whole = cache.reads_cache and len(cache) == len(store)
    if not is_whole:
        message = f"This {type(cache).__name__} is not the whole of its cache as it is."
        why = "it has a transform, samples were chosen, or it reads in its own way"
        raise OptionError(
            message, why=why, fix="pack(dataset, path), and give that path"
        )
    return store


def _local_folder(cache: str | os.PathLike[str] | RemoteCache) -> Path:
    location = locate_cache(cache)
    if isinstance(location, RemoteCache):
        message = f"{location} is in an object store; caches are joined on local disk."
        fix = f"loaderkit.pull({str(location)!r}, folder), then push() the result"
        raise OptionError(message, fix=fix)
    return location.absolute()


def _passed_classes(caches: Iterable[object]) -> list[type]:
    classes: list[type] = []
    for cache in caches:
        if isinstance(cache, SafeDataset):
            classes += cache.classes.passed
    return classes


class _Numbering(NamedTuple):
    """What the columns and variants of one cache are called in the new one."""

    column_names: Mapping[str, str]
    variant_numbers: Sequence[int]

    @property
    def is_the_same(self) -> bool:
        """Whether shards can be taken over as they are."""
        same_names = all(old == new for old, new in self.column_names.items())
        first_numbers = list(range(len(self.variant_numbers)))
        return same_names and list(self.variant_numbers) == first_numbers


@dataclass(frozen=True)
class _Merged:
    """A cache that is to be made of several."""

    parts: Sequence[Store]
    numberings: Sequence[_Numbering]
    structure: Structure
    compression: str | None
    made_with: Mapping[str, str]

    @property
    def fingerprint(self) -> Fingerprint:
        """Of no code and no keys that could be compared: of what the parts are."""
        digest = xxhash.xxh3_128()
        for part in self.parts:
            digest.update(part.manifest.generation.encode())
        samples = sum(part.manifest.samples for part in self.parts)
        return Fingerprint(digest.hexdigest(), digest.hexdigest(), samples)


def _merge_structures(parts: Sequence[Store]) -> _Merged:
    """Decide what is called how in the new cache; no shard is read for that."""
    structure = Structure.from_json(parts[0].manifest.structure)
    numberings = []
    for part in parts:
        part_structure = Structure.from_json(part.manifest.structure)
        column_names = {
            name: structure.name(column)
            for name, column in part_structure.columns.items()
        }
        variant_numbers = [
            structure.number(variant, key=f"of {part.path}")
            for variant in part_structure.variants
        ]
        numberings.append(_Numbering(column_names, variant_numbers))

    compressions = [part.manifest.compression for part in parts]
    return _Merged(
        parts,
        numberings,
        structure,
        compression=next(filter(None, compressions), None),
        made_with={name: _installed_version(name) for name in _LIBRARIES},
    )


def _write_merged(merged: _Merged, path: Path, *, overwrite: bool) -> None:
    """Write the new cache, going on where a killed call had stopped."""
    plan = {
        "format": SHARD_FORMAT,
        "fingerprint": merged.fingerprint.to_json(),
        "samples": merged.fingerprint.count,
        "compression": merged.compression,
    }
    with open_build(path, overwrite=overwrite) as build:
        if build is None:
            message = f"Another process has packed a cache into {path} meanwhile."
            fix = "choose another folder, or concat(..., overwrite=True) to replace it"
            raise CacheError(message, fix=fix)

        build.resume(plan)
        finished_shards = len(build.shards)
        position = 0
        for part, numbering in zip(merged.parts, merged.numberings, strict=True):
            # Shards without compression are read beside compressed ones.
            same_filter = part.manifest.compression in {None, merged.compression}
            can_adopt = numbering.is_the_same and same_filter
            for number, shard in enumerate(part.manifest.shards):
                if position >= finished_shards and can_adopt:
                    build.adopt(shard, part.path)
                elif position >= finished_shards:
                    buffer = _read_shard(part, number, shard, numbering)
                    build.add(buffer, state={}, evidence={})
                position += 1

        build.commit(
            structure=merged.structure.to_json(),
            fingerprint=merged.fingerprint.to_json(),
            made_with=merged.made_with,
        )


def _read_shard(
    part: Store, number: int, shard: Shard, numbering: _Numbering
) -> ShardBuffer:
    """Read the samples of a shard under the names and numbers of the new cache."""
    block = Block(shard.samples)
    variants = np.zeros(shard.samples, np.int64)  # a column of zeros is not written
    for name in shard.columns:
        reader = part.column(name, stacked=True)
        rows_with_column = reader.shard_part(number).rows
        if rows_with_column is None:  # all have it
            rows_with_column = np.arange(shard.samples)
        for row in rows_with_column.tolist():
            value = reader.read(number, row)
            if name == VARIANT:
                variants[row] = value
            else:
                block.annotate(row, {numbering.column_names[name]: value})

    new_numbers = np.array(numbering.variant_numbers, np.int64)
    for row, variant in enumerate(variants):
        block.annotate(row, {VARIANT: new_numbers[variant : variant + 1].reshape(())})

    buffer = ShardBuffer()
    buffer.append(block)
    return buffer


def _installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
