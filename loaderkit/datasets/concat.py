"""Join caches into one, and add samples to a cache.

Shards are reused as they are, as hard links where the file system supports them.  A
column says of each sample, by number, which structure it has (its *variant*, see
structure.py).  Where a cache numbers its variants or names its columns differently from
the joined cache, its shards are rewritten, one at a time.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from loaderkit.arguments import check_truth, refuse_value
from loaderkit.cache.build import (
    ShardElsewhere,
    finish_killed_commit,
    open_build,
    remove_cache,
)
from loaderkit.cache.durable import writing
from loaderkit.cache.files import exists, find_manifest, refuse_cut_url
from loaderkit.cache.layout import MANIFEST, SHARD_FORMAT
from loaderkit.cache.lock_files import hold_lock_for_work
from loaderkit.cache.remote import RemoteCache, locate_cache
from loaderkit.cache.store import Store
from loaderkit.call_keywords import suggest_keywords
from loaderkit.datasets.classes import check_classes
from loaderkit.datasets.fingerprint import Fingerprint
from loaderkit.datasets.open import open_cache
from loaderkit.datasets.pack import pack
from loaderkit.datasets.pack_options import PackOptions
from loaderkit.datasets.packing import library_versions
from loaderkit.datasets.renaming import Renaming, read_renamed
from loaderkit.datasets.safe import SafeDataset
from loaderkit.datasets.structure import Structure, is_graph
from loaderkit.errors import CacheError, DatasetError, OptionError
from loaderkit.fixes import Open, Pack, Python
from loaderkit.path_arguments import check_order
from loaderkit.units import count_of
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from loaderkit.cache.layout import Shard
    from loaderkit.datasets.source_files import TrackFiles

_LOG = logging.getLogger("loaderkit")
_EXTENDED_WITH = "extended with"
"""Key in a manifest's ``made_with``: the generation of the samples added last."""


@suggest_keywords
def concat(
    caches: Iterable[SafeDataset[Any] | str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    classes: Iterable[type] = (),
    overwrite: bool = False,
) -> SafeDataset[Any]:
    """Join caches into a new one, with their samples one after the other.

    Within one file system no sample is copied: the new cache holds hard links to the
    shards of the given caches, which you may then delete.  Across file systems the
    shards are copied.  Shards are rewritten, with one in memory at a time, if their
    samples have a structure that no cache before them has (another field, another
    dtype), or if they are compressed with another filter.

    The new cache is not compared with raw files or code when it is opened.  Open it
    with ``open_cache``.

    Args:
        caches: Folders of caches, or datasets over whole caches.
        path: Folder of the new cache.
        classes: Classes that samples are made of, in addition to PyG's and to those of
            the given datasets.
        overwrite: Replace a cache at ``path``.  It stays in place until the new one is
            complete.

    Returns:
        The new cache, opened.

    Raises:
        CacheError: A cache is missing or damaged, there is already one at ``path``, or
            the folder cannot be written.
        DatasetError: ``caches`` is empty, or some caches hold graphs and others do not.
        OptionError: A dataset has a transform, covers only a part of its cache, or is
            in an object store.

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
    # It comes from the user, and types are not checked when a program runs.
    unchecked: object = caches
    if not isinstance(unchecked, Iterable):
        name = "caches"
        raise refuse_value(name, unchecked, "a list of caches", ["day1.lk", "day2.lk"])
    if hasattr(unchecked, "cache"):
        message = f"concat takes a list of caches, got {show_value(unchecked)}."
        fix = 'concat([dataset, other], "both.lk")'
        raise OptionError(message, why="it is one dataset", fix=fix)
    check_truth("overwrite", overwrite)
    classes = check_classes(classes)
    originals = list(caches)
    if not originals:
        message = "There are no caches to concatenate."
        fix = 'concat(["day1.lk", "day2.lk"], "both.lk")'
        raise DatasetError(message, why="the list is empty", fix=fix)
    refuse_cut_url("path", path)
    target = _local_folder(path)
    stores = [_open_whole_cache(cache) for cache in originals]

    if not overwrite and exists(target / MANIFEST):
        finish_killed_commit(target)
        message = f"There is a cache at {target} already."
        fix = "concat(..., overwrite=True) to replace it, or extend() to add to it"
        raise CacheError(message, why="concatenating would replace it", fix=fix)

    _check_same_kind(stores, "The samples of these caches")
    _write_joined(_plan_join(stores), target, overwrite=overwrite)
    return open_cache(target, classes=[*_passed_classes(originals), *classes])


@suggest_keywords
def extend(
    cache: SafeDataset[Any] | str | os.PathLike[str],
    more: object,
    *,
    spans: int | None = None,
    workers: int | None = None,
    shard_bytes: int | str = PackOptions.shard_bytes,
    track_files: TrackFiles = "stat",
    classes: Iterable[type] = (),
) -> SafeDataset[Any]:
    """Append samples to a cache.

    The new samples are packed into shards of their own, in a folder inside the cache's
    folder.  They are then added to the cache in one step, so that a reader who opens it
    finds either all of them or none.  If the call is killed, call it again: samples
    that were already added are not added twice, unless it was killed behind its last
    step, in the moment before it returns.

    A field that had tensors or lists of one length, and gets others, is from then on
    joined as one of several lengths in all batches.

    Datasets and loaders that are open keep reading the samples that they had.

    Args:
        cache: Folder of the cache, or a dataset over the whole of it.
        more: What ``pack`` takes: a list of samples, any map-style dataset, a folder of
            ``.pt`` files, an iterable, or a function that gives one a span.
        spans: As for ``pack``.
        workers: Processes that read samples; 0 reads in this process, None uses up
            to 4.
        shard_bytes: Size in bytes from which on a shard is finished.
        track_files: As for ``pack``.
        classes: Classes that samples are made of, in addition to PyG's.

    Returns:
        The cache with the new samples, opened.

    Raises:
        CacheError: There is no cache, or the folder cannot be written.
        DatasetError: A sample cannot be read or stored, or is a graph where the cache
            holds none, or the other way round; nothing was added.
        OptionError: An option has a value that is not allowed, or the cache is in an
            object store.
    """
    if not isinstance(cache, SafeDataset | RemoteCache):
        check_order("extend", more, cache, "extend({path}, samples)", where="first")
    classes = check_classes(classes)
    location = _open_whole_cache(cache).path
    added_folder = location / ".extending"
    with hold_lock_for_work(location / ".extending.lock", f"extends {location}"):
        killed_run = find_manifest(added_folder)
        try:
            packed = pack(
                more,
                added_folder,
                spans=spans,
                workers=workers,
                compression=Store(location).manifest.compression,
                shard_bytes=shard_bytes,
                track_files=track_files,
                overwrite=True,
            )
        except DatasetError as error:
            reworded = reworded_for_extend(error)
            if reworded is error:
                raise
            raise reworded from reworded.__cause__
        original, added = Store(location), Store(added_folder)
        try:
            _check_same_kind([original, added], f"The samples to add to {location}")
        except DatasetError:
            with writing(added_folder):
                remove_cache(added_folder)
            raise

        # A call that ends normally deletes the folder.  One that is found here was left
        # by a call that was killed, either before or after it added the samples.
        generation = added.manifest.generation
        was_added = original.manifest.made_with.get(_EXTENDED_WITH) == generation
        if was_added and killed_run is not None:
            _LOG.info("a killed call has added these samples to %s already", location)
            finish_killed_commit(location)
        else:
            plan = _plan_join([original, added])
            made_with = {**plan.made_with, _EXTENDED_WITH: generation}
            plan = replace(plan, made_with=made_with)
            _write_joined(plan, location, overwrite=True)

        all_classes = [*_passed_classes([cache, packed]), *classes]
        extended = open_cache(location, classes=all_classes)
        try:
            remove_cache(added_folder)
        except OSError as error:
            # Too late to say it failed: who calls again would add the samples twice.
            _LOG.warning(
                "%s: the samples were added, and leftovers stay in %s (%s)",
                location,
                added_folder.name,
                error,
            )
    return extended


def _check_same_kind(stores: Sequence[Store], subject: str) -> None:
    """Refuse to mix graphs with samples that are not graphs.

    A cache that holds a graph is opened as a graph dataset, with the batches and sizes
    of graphs.  A single number among its samples would raise an error only in the batch
    that contains it, perhaps hours into an epoch.

    Args:
        stores: The caches that would become one.
        subject: Subject of the error message.

    Raises:
        DatasetError: Some hold graphs and others do not.
    """
    holds_graphs = [_kinds_of_samples(store) for store in stores]
    first = holds_graphs[0]
    is_mixed = len(frozenset().union(*holds_graphs)) > 1
    # The owner of a cache that already holds both kinds wanted it so.
    first_is_mixed = len(first) > 1
    if not is_mixed or first_is_mixed:
        return

    message = f"{subject} are not of one kind."
    first_path = stores[0].path
    if True in first:
        why = f"the samples of {first_path} are graphs, and some of the others are not"
    else:
        why = f"the samples of {first_path} are not graphs, and some of the others are"
    fix = "pack(samples, another_path), a cache of their own"
    raise DatasetError(message, why=why, fix=fix)


def _kinds_of_samples(store: Store) -> frozenset[bool]:
    """Tell whether the samples of a cache are graphs: ``{True}``, ``{False}`` or both.

    Read from the manifest; no shard is opened.
    """
    structure = Structure.from_json(store.manifest.structure)
    return frozenset(is_graph(variant) for variant in structure.variants)


class _Extending(Python):
    """How a user writes what to add to a cache."""

    def pack(self, call: Pack) -> str:
        """Have samples added, and not packed into a cache of their own."""
        arguments = ["cache", call.source or "samples", *map(str, call.options)]
        return f"extend({', '.join(arguments)})"

    def open(self, call: Open) -> str:
        """Have the samples of a cache added."""
        return f"extend(cache, {call})"


def reworded_for_extend(error: DatasetError) -> DatasetError:
    """Have the fix of an error say the call that the user has made.

    Args:
        error: What packing the samples raised.
    """
    fix = error.fix_in(_Extending())
    if fix == error.fix:
        return error
    reworded = type(error)(error.what, why=error.why, fix=fix)
    if hasattr(reworded, "add_note"):  # Python 3.11
        for note in getattr(error, "__notes__", ()):
            reworded.add_note(note)
    reworded.__cause__ = error.__cause__
    return reworded


def _open_whole_cache(cache: SafeDataset[Any] | str | os.PathLike[str]) -> Store:
    """Open a cache whose shards are to be joined with others.

    Raises:
        OptionError: The dataset has no cache, or gives other samples than its cache.
    """
    if not isinstance(cache, SafeDataset):
        return Store(_local_folder(cache))

    name = type(cache).__name__
    fix = "pack(dataset, path), and give that path"
    if cache.cache is None:
        message = f"{name} has no cache to join with others."
        raise OptionError(message, why="its samples are loaded each time", fix=fix)

    store = Store(_local_folder(cache.cache))
    if not cache.has_whole_cache:
        message = f"This {name} does not give the samples of its cache as they are."
        raise OptionError(message, why=_what_changes(cache, len(store)), fix=fix)
    return store


def _what_changes(cache: SafeDataset[Any], stored_count: int) -> str:
    """Say by what a dataset gives other samples than its cache has."""
    if cache.transform is not None:
        return "it has a transform, and a cache has samples as they were packed"
    if len(cache) != stored_count:
        return f"it has {len(cache):,} of the {count_of(stored_count, 'samples')}"
    if cache.reads_cache:
        return "it has other rows than the cache, or has them in another order"
    return f"{type(cache).__name__} makes its samples in a method of its own"


def _local_folder(cache: str | os.PathLike[str] | RemoteCache) -> Path:
    location = locate_cache(cache)
    if isinstance(location, RemoteCache):
        message = f"{location} cannot be joined with others."
        why = "it is in an object store, and caches are joined on local disk"
        fix = f"loaderkit.pull({str(location)!r}, folder), then push() the result"
        raise OptionError(message, why=why, fix=fix)
    return location.absolute()


def _passed_classes(caches: Iterable[object]) -> list[type]:
    classes: list[type] = []
    for cache in caches:
        if isinstance(cache, SafeDataset):
            classes += cache.classes.passed
    return classes


@dataclass(frozen=True)
class _JoinPlan:
    """A cache that is to be made of several."""

    stores: Sequence[Store]
    renamings: Sequence[Renaming]
    """One for each store."""
    structure: Structure
    """All variants of all stores."""
    compression: str | None
    made_with: Mapping[str, str]
    """Versions of libraries, and what the cache was last extended with."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Made of the stores' generations.

        No code and no keys belong to the joined cache that could be compared later.
        """
        digest = xxhash.xxh3_128()
        for store in self.stores:
            digest.update(store.manifest.generation.encode())
        samples = sum(store.manifest.samples for store in self.stores)
        return Fingerprint(digest.hexdigest(), digest.hexdigest(), samples)


def _plan_join(stores: Sequence[Store]) -> _JoinPlan:
    """Merge the structures of the stores, from their manifests alone."""
    structure = Structure.from_json(stores[0].manifest.structure)
    renamings = []
    for store in stores:
        store_structure = Structure.from_json(store.manifest.structure)
        renaming = Renaming.between(store_structure, structure, f"of {store.path}")
        renamings.append(renaming)

    compressions = [store.manifest.compression for store in stores]
    return _JoinPlan(
        stores,
        renamings,
        structure,
        compression=next(filter(None, compressions), None),
        made_with=library_versions(),
    )


class _ShardToJoin(NamedTuple):
    """One of the shards that the joined cache consists of."""

    store: Store
    """The cache that it is of."""
    number: int
    """Its number there."""
    described: Shard
    renaming: Renaming
    can_be_adopted: bool
    """Its file is right as it is."""


def _shards_to_join(plan: _JoinPlan) -> Iterator[_ShardToJoin]:
    """List all shards of the joined cache, in order."""
    for store, renaming in zip(plan.stores, plan.renamings, strict=True):
        # Shards without compression can be read beside compressed ones.
        same_filter = store.manifest.compression in {None, plan.compression}
        is_right = renaming.changes_nothing and same_filter
        for number, shard in enumerate(store.manifest.shards):
            yield _ShardToJoin(store, number, shard, renaming, is_right)


def _write_joined(plan: _JoinPlan, path: Path, *, overwrite: bool) -> None:
    """Write the joined cache, continuing where a killed call stopped."""
    build_settings = {
        "format": SHARD_FORMAT,
        "fingerprint": plan.fingerprint.to_json(),
        "samples": plan.fingerprint.count,
        "compression": plan.compression,
    }
    with open_build(path, overwrite=overwrite) as build:
        if build is None:
            message = f"Another process has packed a cache into {path} meanwhile."
            why = "joining these caches would replace it"
            fix = "choose another folder, or concat(..., overwrite=True) to replace it"
            raise CacheError(message, why=why, fix=fix)

        build.resume(build_settings)
        # A call that was killed has written the first ones.
        shards = itertools.islice(_shards_to_join(plan), len(build.shards), None)
        by_kind = itertools.groupby(shards, key=lambda shard: shard.can_be_adopted)
        for can_be_adopted, neighbours in by_kind:
            if can_be_adopted:
                build.adopt(
                    ShardElsewhere(shard.described, shard.store.path)
                    for shard in neighbours
                )
                continue
            for shard in neighbours:
                column = functools.partial(shard.store.column, stacked=True)
                buffer = read_renamed(
                    column, shard.number, shard.described, shard.renaming
                )
                build.add(buffer, state={}, evidence={})

        build.commit(
            structure=plan.structure.to_json(),
            fingerprint=plan.fingerprint.to_json(),
            made_with=plan.made_with,
        )
