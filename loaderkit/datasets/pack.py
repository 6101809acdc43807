"""Pack samples into a cache: in parallel, in order, resumable after any kill.

Worker processes read samples and take them apart; this process puts the columns
together and writes the shards.  What goes into which shard depends on the samples
alone, so the bytes on disk are the same whatever the number of workers, and also after
a run that was killed and started again.

A run that was killed is gone on with where its samples are shown to be the same: the
files they were made from are as they were, and so are code, keys and settings; or else
the samples, read again, have the same hash.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import logging
import multiprocessing
import os
import shutil
import threading
from dataclasses import dataclass, replace
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    TypedDict,
    TypeVar,
    get_args,
    overload,
)

import filelock
import numpy as np
import xxhash
from tqdm import auto, std

from loaderkit.arguments import check_choice, check_integer, check_truth
from loaderkit.cache.build import Build, FinishedShard, building
from loaderkit.cache.columns import ShardBuffer
from loaderkit.cache.durable import not_written, writing
from loaderkit.cache.files import exists
from loaderkit.cache.hdf5 import filters
from loaderkit.cache.layout import BUILDING, MANIFEST, SHARD_FORMAT
from loaderkit.cache.mirror import find_remote_manifest
from loaderkit.cache.remote import RemoteCache, locate_cache
from loaderkit.cache.transfer import OtherWriterError, copy_to_store
from loaderkit.datasets.block_readers import (
    BLOCK_BYTES,
    EncodedBlock,
    PackJob,
    Span,
    Task,
    content_digest,
    read_sample,
    read_span,
    seed_of,
)
from loaderkit.datasets.classes import import_classes, loaded_classes
from loaderkit.datasets.encode import encode
from loaderkit.datasets.packing_workers import reading
from loaderkit.datasets.source_files import (
    FileVersion,
    SourceFileList,
    TrackFiles,
    files_below,
    hashed,
    version_of,
)
from loaderkit.datasets.sources import as_source
from loaderkit.datasets.structure import KEY, VARIANT, Structure
from loaderkit.errors import CacheError, DatasetError
from loaderkit.forking import find_fork_hazard, warn_of_fork_hazard
from loaderkit.randomness import quiet
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch.utils.data import Dataset
    from typing_extensions import Unpack

    from loaderkit.cache.remote import CacheLocation
    from loaderkit.datasets.base import SafeDataset
    from loaderkit.datasets.packing_workers import SpanReader
    from loaderkit.datasets.sources import Source

T = TypeVar("T")
_MOST_WORKERS = 4096
"""More packing workers are a mistake: the first thousand of a million took minutes to
start, and the machine with them."""
_MOST_LOOKED_AT = 100_000
"""Raw files that are looked at before they are read; 200 bytes each."""
_LOG = logging.getLogger("loaderkit")
_KEY_COLUMN: tuple[Any, ...] = (KEY, "str", "", 1, 0)
_VARIANT_COLUMN: tuple[Any, ...] = (VARIANT, "variant", "int64", 0, None)


@dataclass(frozen=True)
class PackOptions:
    """How a cache is packed."""

    workers: int | None = None
    """Processes that read samples; 0 reads in this one; None: up to 4, one a CPU."""
    compression: str | None = None
    """"gzip", "lzf", a filter of hdf5plugin such as "Zstd", or None to map values."""
    shard_bytes: int = 256 << 20
    """Bytes after which a file is finished: what a killed run loses at most."""
    overwrite: bool = False
    """Pack again though there is a cache."""
    track_files: TrackFiles = "stat"
    """How the files that samples are made from are known again when the cache is
    opened: "stat" by size and time of change, "hash" by their content too (for data
    that is copied without its times), "none" not at all."""

    def __post_init__(self) -> None:
        filters(self.compression)
        check_choice("track_files", self.track_files, get_args(TrackFiles))
        check_truth("overwrite", self.overwrite)
        check_integer("shard_bytes", self.shard_bytes, least=1)
        if self.workers is not None:
            check_integer("workers", self.workers, least=0, most=_MOST_WORKERS)


class PackKeywords(TypedDict, total=False):
    """Options of ``pack``, where what each one means is told."""

    workers: int | None
    compression: str | None
    shard_bytes: int
    overwrite: bool
    track_files: TrackFiles
    storage_options: Mapping[str, Any] | None
    mirror: str | os.PathLike[str] | None
    mirror_bytes: int | str | None


# PyG has no types that a checker sees: graphs are told from other samples only when a
# program runs, and SafeGraphDataset is a SafeDataset.
@overload
def pack(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    **options: Unpack[PackKeywords],
) -> SafeDataset[Any]: ...
@overload
def pack(
    source: Sequence[T] | Dataset[T],
    path: str | os.PathLike[str],
    **options: Unpack[PackKeywords],
) -> SafeDataset[T]: ...
@overload
def pack(
    source: object, path: str | os.PathLike[str], **options: Unpack[PackKeywords]
) -> SafeDataset[Any]: ...
def pack(
    source: object,
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    compression: str | None = None,
    shard_bytes: int = 256 << 20,
    overwrite: bool = False,
    track_files: TrackFiles = "stat",
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
            of ``.pt`` files (a path, or ``PtFolder`` to say more).
        path: The cache's folder; new, or with an unfinished build to go on with.  Or a
            URL that fsspec knows: packed in a folder beside the mirror, which has to
            have room for it, and copied to the store when it is whole.
        workers: Processes that read samples; 0 reads in this one; None: up to 4, one
            for each CPU.
        compression: "gzip", "lzf", a filter of hdf5plugin, or None to map values.
        shard_bytes: Bytes after which a file is finished.
        overwrite: Pack again though there is a cache; it stays until the new one is
            whole.
        track_files: How the files that samples are made from are known again: "stat",
            "hash" or "none".
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
    from loaderkit.datasets.open import open_cache

    options = PackOptions(workers, compression, shard_bytes, overwrite, track_files)
    location = locate_cache(path, storage_options, mirror, mirror_bytes)
    if not overwrite and has_cache(location):
        what = f"There is a cache at {location} already."
        fix = (
            f"open_cache({str(location)!r}), or pack(..., overwrite=True) to replace it"
        )
        raise CacheError(what, why="packing again would replace it", fix=fix)
    samples = as_source(source)
    packed = pack_source(samples, location, options)
    cache = open_cache(location, classes=packed.classes)
    if not packed.is_ours:
        _check_samples(cache, samples, location)
    return cache


def has_cache(location: CacheLocation) -> bool:
    """Tell whether there is a cache at a place, or one that is damaged.

    Raises:
        CacheError: The store does not answer.
    """
    if isinstance(location, RemoteCache):
        return find_remote_manifest(location.open_storage()) is not None
    return exists(location / MANIFEST)


def _check_samples(cache: Any, source: Source, path: CacheLocation) -> None:
    """See that what another process has packed meanwhile is the same samples.

    All are compared: code and keys tell nothing about what a list holds.
    """
    seed = seed_of(source)
    with quiet():
        same = len(cache) == len(source) and all(
            cache.key(row) == source.key(row)
            and _is_same(cache[row], read_sample(source, row, seed))
            for row in range(len(source))
        )
    if not same:
        what = f"Another process has packed other samples into {path} meanwhile."
        fix = "choose another folder, or pack(..., overwrite=True) to replace it"
        raise CacheError(what, why="a cache holds samples of one source", fix=fix)


def _is_same(sample: object, other: object) -> bool:
    """Tell whether two samples would be stored as the same bytes."""
    (tree, values), (other_tree, other_values) = encode(sample), encode(other)
    return tree == other_tree and all(
        values[raw].tobytes() == other_values[raw].tobytes() for raw in values
    )


class Packed(NamedTuple):
    """What came of packing a source."""

    classes: tuple[type, ...]
    """Those that the samples read here are made of, as far as they are loaded."""
    is_ours: bool
    """False when another process has packed meanwhile, maybe another source."""


def pack_source(
    source: Source, location: CacheLocation, options: PackOptions
) -> Packed:
    """Pack a source unless another process does so first.

    Args:
        source: What to read.
        location: The cache's folder, or the store that it goes to.
        options: How.

    Returns:
        The classes of the samples, and whether this process has packed them.

    Raises:
        DatasetError: A sample cannot be read or stored.
        CacheError: The folder or the store cannot be written.
    """
    if isinstance(location, RemoteCache):
        return _pack_to_store(source, location, options)
    return _pack_to_folder(source, location, options)


def _pack_to_store(source: Source, remote: RemoteCache, options: PackOptions) -> Packed:
    """Pack into a folder on local disk, and copy that to the store when it is whole."""
    storage = remote.open_storage()
    digest = xxhash.xxh3_64_hexdigest(remote.url.encode())
    staging = remote.mirror_folder / "packing" / digest
    lock = staging.with_suffix(".lock")
    with writing(staging):
        staging.parent.mkdir(parents=True, exist_ok=True)
    # Of several ranks on a node one packs; the others wait, and find the cache.
    with filelock.FileLock(lock):
        if not options.overwrite and has_cache(remote):
            job = _job_of(source, staging, options)
            return Packed(_classes_of(_read_here(job)), is_ours=False)
        # What lies there whole was never pushed, and may be of other samples.
        packed = _pack_to_folder(source, staging, replace(options, overwrite=True))
        try:
            copy_to_store(staging, storage, overwrite=options.overwrite)
        except OtherWriterError:
            if options.overwrite:
                raise
            # Another node was quicker; the caller sees whether it packed the same.
            packed = packed._replace(is_ours=False)
        shutil.rmtree(staging, ignore_errors=True)
    return packed


def _job_of(source: Source, path: Path, options: PackOptions) -> PackJob:
    return PackJob(
        source,
        min(BLOCK_BYTES, options.shard_bytes),
        path / BUILDING,
        track_files=options.track_files,
        seed=seed_of(source),
    )


def _pack_to_folder(source: Source, path: Path, options: PackOptions) -> Packed:
    options = _with_possible_workers(source, path, options)
    fingerprint = source.fingerprint().to_json()
    job = _job_of(source, path, options)
    try:
        with contextlib.ExitStack() as stack:
            build = stack.enter_context(building(path, anew=options.overwrite))
            if build is None:
                return Packed(_classes_of(_read_here(job)), is_ours=False)
            stack.callback(job.clear)
            reader = stack.enter_context(reading(job, options.workers))
            packing = _Packing(job, reader, build, options)
            structure = packing.run(fingerprint)
            build.commit(
                structure=structure,
                fingerprint=fingerprint,
                made_with={name: _version(name) for name in _LIBRARIES},
                sources=packing.list_sources(),
            )
            return Packed(loaded_classes(packing.structure), is_ours=True)
    except OSError as error:
        # Whatever system call it was: pipes, processes, the build's own files.
        raise not_written(path, error) from error


def _with_possible_workers(
    source: Source, path: Path, options: PackOptions
) -> PackOptions:
    """Read in this process where workers cannot be, or would harm.

    Raises:
        DatasetError: They were asked for where they cannot be.
    """
    if options.workers == 0:
        return options
    if multiprocessing.current_process().daemon:
        if options.workers is None:
            return replace(options, workers=0)
        what = f"{options.workers} packing workers were asked for in a daemonic process"
        what += ", such as a worker of a DataLoader."
        fix = "workers=0, or pack in the process that starts this one"
        raise DatasetError(what, why="it may not have children", fix=fix)
    if multiprocessing.get_start_method() != "fork":
        return options
    if options.workers is not None:
        warn_of_fork_hazard(5, source=source)  # where pack() is called
        return options
    found = find_fork_hazard(source=source)
    if found is None:
        return options
    _LOG.warning("packing %s without workers: %s; %s", path, found.reason, found.fix)
    return replace(options, workers=0)


def _read_here(job: PackJob) -> Span:
    """Read the first sample in this process, which starts no workers behind it."""
    with job.tracker(all_threads=False) as tracker, quiet():
        return read_span(job, Task(0, 1), tracker)


class _Packing:
    """One run of packing: where it stands between two shards."""

    def __init__(
        self, job: PackJob, reader: SpanReader, build: Build, options: PackOptions
    ) -> None:
        self.source, self.reader = job.source, reader
        self.build, self.options = build, options
        self.block_samples = 1
        """Samples that a worker reads at a time."""
        self.structure = Structure()
        self.buffer = ShardBuffer()
        self._versions = self._look_at_files()
        root = self.source.root()
        self.sources = SourceFileList("" if root is None else os.path.abspath(root))
        self._state = self.source.state()
        self._digests: list[bytes] = []
        self._files: dict[str, FileVersion] = {}
        """Files noted since the last shard was finished."""
        if self.sources.root in self._versions:
            # A single raw file, whatever library reads it.
            self._files[self.sources.root] = self._versions[self.sources.root]

    def _look_at_files(self) -> dict[str, FileVersion]:
        """Look at raw files before they are read: one may be replaced meanwhile."""
        if self.options.track_files == "none":
            return {}
        root = self.source.root()
        ours = [os.path.abspath(self.build.path)]
        below_root = [] if root is None else files_below(root, ours)
        paths = itertools.chain(self.source.named_files(), below_root)
        versions = ((path, version_of(path)) for path in paths)
        looked_at = itertools.islice(versions, _MOST_LOOKED_AT)
        return {path: version for path, version in looked_at if version is not None}

    def run(self, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """Pack what an earlier run has not packed.

        Args:
            fingerprint: What the samples are made from.

        Returns:
            How columns make up a sample.
        """
        first = self._first_sample()
        self.block_samples = _block_samples(first, len(self.source), self.options)
        plan = {
            "format": SHARD_FORMAT,
            "fingerprint": fingerprint,
            "samples": len(self.source),
            "block_samples": self.block_samples,
            "compression": self.options.compression,
            "shard_bytes": self.options.shard_bytes,
        }
        self.build.resume(plan)
        self._keep_what_is_shown_to_be_the_same()
        if not self.build.shards.samples:
            self._add(first)
        start = self.build.shards.samples + self.buffer.samples
        total = len(self.source)
        with _bar(start, total, self.build.path) as bar:
            for encoded in self._read(start, total):
                self._add(encoded)
                bar.update(len(encoded.which))
                bar.set_postfix_str(format_bytes(self._bytes()), refresh=False)
        if self.buffer.samples:
            self._finish_shard()
        return self.structure.to_json()

    def _first_sample(self) -> EncodedBlock:
        """Read the first sample, and import what the user's code imported for it."""
        [first] = self._read(0, 1)
        structure = Structure()
        for tree in first.trees:
            structure.number(tree, first.keys[0])
        import_classes(structure)
        return first

    def _keep_what_is_shown_to_be_the_same(self) -> None:
        """Go on with a killed run's shards whose samples are still the source's."""
        start = 0
        for number, finished in enumerate(self.build.finished()):
            reason = self._difference(finished, start)
            if reason:
                _LOG.warning(
                    "packing %s: finished shards (%d) are packed anew, since %s",
                    self.build.path,
                    len(self.build.shards) - number,
                    reason,
                )
                self.build.discard_from(number)
                break
            self.sources.update(_files_of(finished))
            start += finished.shard.samples
        if len(self.build.shards):
            self.structure = Structure.from_json(self.build.state)

    def list_sources(self) -> str | None:
        """Write down which files samples were made from; None where none is known."""
        if self.options.track_files == "none":
            return None
        by_hash = self.options.track_files == "hash"
        root = self.source.root()
        paths = list(self.source.named_files())
        if root is not None and not paths and not self.sources.any_below_root():
            # A library in C has read them, and told nobody which.
            paths = list(files_below(root, [os.path.abspath(self.build.path)]))
        for path in paths:
            version = self._versions.get(path) or version_of(path)
            if version is not None:
                known = hashed(path, version) if by_hash else version
                self.sources.add(path, known)
        return self.sources.to_json() if self.sources.files else None

    def _read(
        self, start: int, stop: int, *, digests_only: bool = False
    ) -> Iterator[EncodedBlock]:
        """Read samples, noting the files that are opened for them."""
        spans = _spans(start, stop, self.block_samples)
        for span in self.reader.read(spans, digests_only=digests_only):
            self._files.update(span.files)
            yield from span.blocks

    def _difference(self, finished: FinishedShard, start: int) -> str:
        """Say how the source differs from what a shard was made of; "" if it does not.

        Args:
            finished: The shard.
            start: Its first row.
        """
        for path, packed in _files_of(finished).items():
            if version_of(path, hashed=bool(packed.xxh3)) != packed:
                return f"{path} has changed"
        evidence, stop = finished.evidence, start + finished.shard.samples
        known = bool(self.sources.files) or bool(_files_of(finished))
        if known and self._state is not None and evidence.get("state") == self._state:
            # Files, code, keys and settings are the same.  Two samples are read again
            # all the same, for what none of these shows (a database, a clock).
            for row, wanted in ((start, "first"), (stop - 1, "last")):
                if self._digests_of(row, row + 1)[0].hex() != evidence.get(wanted):
                    return f"sample {self.source.key(row)!r} is another one now"
            return ""
        if content_digest(self._digests_of(start, stop)) != evidence.get("content"):
            return f"samples {start:,} to {stop - 1:,} are not the same as before"
        return ""

    def _digests_of(self, start: int, stop: int) -> list[bytes]:
        """Read samples again for their hashes alone."""
        blocks = self._read(start, stop, digests_only=True)
        return [digest for encoded in blocks for digest in encoded.digests]

    def _bytes(self) -> int:
        return self.buffer.nbytes + self.build.shards.nbytes

    def _add(self, encoded: EncodedBlock) -> None:
        first_keys: dict[int, str] = {}
        for row, tree in enumerate(encoded.which):
            first_keys.setdefault(tree, encoded.keys[row])
        numbers = [
            self.structure.number(tree, first_keys[at])
            for at, tree in enumerate(encoded.trees)
        ]
        block = encoded.block
        for row, tree in enumerate(encoded.which):
            values: dict[Hashable, NDArray[Any]] = {}
            values[_VARIANT_COLUMN] = np.array(numbers[tree], "<i8")
            key = encoded.keys[row].encode("utf-8", "surrogatepass")
            values[_KEY_COLUMN] = np.frombuffer(key, np.uint8)
            block.annotate(row, values)
        names = {raw: self.structure.name(raw) for raw in block.runs}
        self.buffer.append(block.renamed(names))
        self._digests += encoded.digests
        if self.buffer.nbytes >= self.options.shard_bytes:
            self._finish_shard()

    def _finish_shard(self) -> None:
        evidence = {
            "content": content_digest(self._digests),
            "first": self._digests[0].hex(),
            "last": self._digests[-1].hex(),
            "state": self._state,
            "files": self._files,
        }
        self.build.add(self.buffer, state=self.structure.to_json(), evidence=evidence)
        self.sources.update(self._files)
        self.buffer = ShardBuffer()
        self._digests, self._files = [], {}


def _classes_of(span: Span) -> tuple[type, ...]:
    structure = Structure()
    for encoded in span.blocks:
        for tree in encoded.trees:
            structure.number(tree, encoded.keys[0])
    return loaded_classes(structure)


def _files_of(finished: FinishedShard) -> dict[str, FileVersion]:
    """Read the files noted with a shard."""
    files = finished.evidence.get("files") or {}
    return {path: FileVersion(*version) for path, version in files.items()}


def _block_samples(first: EncodedBlock, count: int, options: PackOptions) -> int:
    """Choose how many samples a worker takes at a time, from the first one's size."""
    fitting = min(BLOCK_BYTES, options.shard_bytes) // max(1, first.block.nbytes)
    return max(1, min(fitting, 512, -(-count // 16)))


def _spans(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut rows into spans whose ends do not depend on where a run goes on."""
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        yield start, end
        start = end


_IN_TERMINAL = auto.notebook_tqdm is std.tqdm
"""Where a bar is drawn for people alone; in a notebook stderr is no terminal either."""


class _Bar(auto.tqdm):  # type: ignore[misc]
    """A progress bar that no other process can hold up.

    tqdm's own lock is shared with forked processes: one that is killed while it holds
    the lock would hang every other that packs.
    """

    _lock = threading.RLock()
    monitor_interval = 0


def _bar(done: int, total: int, path: Path) -> Any:
    return _Bar(
        total=total, initial=done, desc=f"packing {path.name}", unit=" samples",
        disable=None if _IN_TERMINAL else False, smoothing=0.1,
    )  # fmt: skip


_LIBRARIES = ("loaderkit", "torch", "torch-geometric", "numpy", "h5py")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
