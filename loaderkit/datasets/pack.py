"""Pack samples into a cache, and open it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar, overload

from loaderkit.cache.files import refuse_cut_url, url_meant_by
from loaderkit.cache.remote import RemoteCache, locate_cache
from loaderkit.call_keywords import suggest_keywords
from loaderkit.datasets.block_readers import read_sample
from loaderkit.datasets.encode import encode
from loaderkit.datasets.open import open_cache
from loaderkit.datasets.pack_options import PackOptions as PackOptions
from loaderkit.datasets.packing import (
    finish_killed_run,
    has_cache,
    job_of,
    pack_source,
)
from loaderkit.datasets.sources import as_source
from loaderkit.datasets.streams import StreamSource
from loaderkit.errors import CacheError
from loaderkit.fixes import Fix, Open, Pack, Setting
from loaderkit.path_arguments import check_cache_path, check_order

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Executor

    from torch.utils.data import Dataset
    from typing_extensions import Unpack

    from loaderkit.cache.remote import CacheLocation
    from loaderkit.datasets.block_readers import PackJob
    from loaderkit.datasets.safe import SafeDataset, SafeGraphDataset
    from loaderkit.datasets.source_files import TrackFiles

_REPLACE = Fix.of(
    Setting("overwrite", value=True, within="pack(..., {})"), " to replace it"
)

T = TypeVar("T")
G = TypeVar("G", bound="Graph")


# PyG has no types of its own: mypy skips it, and pyright reads its source.  Named in an
# overload, its classes would be Any to mypy, and Any takes samples of every kind.
class Graph(Protocol):
    """What a type checker tells PyG's ``Data`` and ``HeteroData`` by."""

    def __inc__(self, key: str, value: object, *args: Any, **kwargs: Any) -> Any:
        """By how much a batch raises a field's numbers, from graph to graph."""

    def __cat_dim__(self, key: str, value: object, *args: Any, **kwargs: Any) -> Any:
        """Along which dimension a batch joins a field."""


class PackKeywords(TypedDict, total=False):
    """Options of ``pack``, where what each one means is told."""

    workers: int | None
    compression: str | None
    shard_bytes: int | str
    overwrite: bool
    track_files: TrackFiles
    executor: Executor | Callable[[], Executor] | None
    spans: int | None
    storage_options: Mapping[str, Any] | None
    mirror: str | os.PathLike[str] | None
    mirror_bytes: int | str | None


@overload
def pack(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    **options: Unpack[PackKeywords],
) -> SafeDataset[Any]: ...
@overload
def pack(
    source: Iterable[G] | Dataset[G] | Callable[[int, int], Iterable[G]],
    path: str | os.PathLike[str],
    **options: Unpack[PackKeywords],
) -> SafeGraphDataset[G]: ...
@overload
def pack(
    source: Iterable[T] | Dataset[T] | Callable[[int, int], Iterable[T]],
    path: str | os.PathLike[str],
    **options: Unpack[PackKeywords],
) -> SafeDataset[T]: ...
@overload
def pack(
    source: object, path: str | os.PathLike[str], **options: Unpack[PackKeywords]
) -> SafeDataset[Any]: ...
@suggest_keywords
def pack(
    source: object,
    path: str | os.PathLike[str],
    *,
    workers: int | None = PackOptions.workers,
    compression: str | None = PackOptions.compression,
    shard_bytes: int | str = PackOptions.shard_bytes,
    overwrite: bool = PackOptions.overwrite,
    track_files: TrackFiles = PackOptions.track_files,
    executor: Executor | Callable[[], Executor] | None = PackOptions.executor,
    spans: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    mirror: str | os.PathLike[str] | None = None,
    mirror_bytes: int | str | None = None,
) -> Any:
    """Pack a dataset into a cache, and open it.

    Random numbers that a sample draws (of torch, numpy and random) follow from
    ``torch.initial_seed()`` and its row: ``torch.manual_seed`` before makes the same
    cache again, whatever the number of workers.

    Args:
        source: A list of samples, any map-style dataset, a PyG dataset, or a folder
            of ``.pt`` files (a path, or ``PtFolder`` to say more).  Or an iterable of
            samples (``IterableDataset``, generator), which is read in order by this
            process; or, with ``spans=``, a function ``source(span, spans)`` that
            returns the iterable of one span, from 0 to ``spans - 1``.
        path: The cache's folder; new, or with an unfinished build to go on with.  Or a
            URL that fsspec knows: packed in a folder beside the mirror, which has to
            have room for it, and copied to the store when it is whole.
        workers: Processes that read samples; 0 reads in this one; None: up to 4, one
            for each CPU.
        compression: "gzip", "lzf", a filter of hdf5plugin, or None to map values.
            Arrays of which it saves less than an eighth are mapped all the same.
        shard_bytes: Bytes after which a file is finished, or a text such as "1 GB".
        overwrite: Pack again though there is a cache; it stays until the new one is
            whole.
        track_files: How the files that samples are made from are known again: "stat",
            "hash" or "none".
        executor: Who packs the shards in place of ``workers``: any executor with the
            methods of ``concurrent.futures.Executor`` (processes, threads, loky, dask,
            MPI), whose workers see the folder.  Or a function that makes one: then a
            pool that broke is replaced.  The bytes are the same whoever packs.
        spans: How many spans a function cuts the samples into; each is read by one
            worker, and they follow each other in the cache.
        storage_options: What fsspec makes the file system of a URL with.
        mirror: Folder on local disk in which the shards of a URL are kept.
        mirror_bytes: The most it may take, such as "200 GB"; None for all there is.

    Returns:
        A ``SafeGraphDataset`` over the cache, or a ``SafeDataset`` for other samples.

    Raises:
        CacheError: There is a cache already, or the folder cannot be written.
        DatasetError: A sample cannot be read or stored; the message names it.
        OptionError: An option cannot have this value; also a ``ValueError``.
    """
    _check_target(source, path)
    options = PackOptions(
        workers, compression, shard_bytes, overwrite, track_files, executor
    )
    location = locate_cache(path, storage_options, mirror, mirror_bytes)
    if not overwrite and has_cache(location):
        finish_killed_run(location)
        message = f"There is a cache at {location} already."
        fix = Fix.of(Open(str(location)), ", or ", _REPLACE)
        raise CacheError(message, why="packing again would replace it", fix=fix)
    samples = as_source(source, spans)
    packed = pack_source(samples, location, options)
    cache = open_cache(location, classes=packed.classes)
    if not packed.is_ours:
        _check_samples(cache, job_of(samples, location, options), location)
    return cache


def _check_target(source: object, path: object) -> None:
    """Refuse a path in the place of the samples, and a URL with a slash too few."""
    if isinstance(path, RemoteCache):
        return
    check_order("pack", source, path, "pack(samples, {path})")
    check_cache_path(path)
    url = url_meant_by(path)  # type: ignore[arg-type]  # its type was checked above
    refuse_cut_url("path", path, Pack(path=url or ""))


def _check_samples(cache: SafeDataset[Any], job: PackJob, path: CacheLocation) -> None:
    """See that what another process has packed meanwhile is the same samples.

    All are compared: code and keys tell nothing about what a list holds.
    """
    with job.turn_to_read():
        same = _has_samples(cache, job)
    if not same:
        message = f"Another process has packed other samples into {path} meanwhile."
        fix = Fix.of("choose another folder, or ", _REPLACE)
        raise CacheError(message, why="a cache holds samples of one source", fix=fix)


def _has_samples(cache: Any, job: PackJob) -> bool:
    """Tell whether a cache holds the samples of a source, and no others."""
    source = job.source
    if not isinstance(source, StreamSource) and len(cache) != len(source):
        return False
    row = -1
    for row, (key, sample) in enumerate(_samples_of(job)):
        if row >= len(cache) or cache.key(row) != key:
            return False
        if not _is_same(cache[row], sample):
            return False
    return row + 1 == len(cache)


def _samples_of(job: PackJob) -> Iterator[tuple[str, Any]]:
    """Read all samples of a source, each with its key."""
    source = job.source
    if isinstance(source, StreamSource):
        yield from source.samples(job.seed)
        return
    for row in range(len(source)):
        yield source.key(row), read_sample(source, row, job.seed)


def _is_same(sample: object, other: object) -> bool:
    """Tell whether two samples would be stored as the same bytes."""
    (tree, values), (other_tree, other_values) = encode(sample), encode(other)
    return tree == other_tree and all(
        values[column].tobytes() == other_values[column].tobytes() for column in values
    )
