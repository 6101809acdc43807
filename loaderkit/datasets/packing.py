"""Pack a source of samples: in parallel, in order, to a folder or to a store.

What goes into which shard depends on the samples alone (``shard_plan``), so the bytes
on disk are the same whoever packs, and also after a run that was killed and started
again (see ``packing_run``).

On one machine worker processes read samples and take them apart, and this process puts
the columns together and writes the shards: so several read even for a single shard.  On
an executor each task reads the samples of a shard and writes it (``packing_tasks``).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import multiprocessing
import shutil
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    NamedTuple,
)

import filelock
import xxhash

from loaderkit.cache.build import ShardWriter, open_build
from loaderkit.cache.durable import not_written, writing
from loaderkit.cache.files import exists
from loaderkit.cache.layout import BUILDING, MANIFEST
from loaderkit.cache.mirror import find_remote_manifest
from loaderkit.cache.remote import RemoteCache
from loaderkit.cache.transfer import OtherWriterError, copy_to_store
from loaderkit.datasets.block_readers import (
    PackJob,
    Span,
    Task,
    read_span,
    seed_of,
)
from loaderkit.datasets.classes import loaded_classes
from loaderkit.datasets.packing_executors import ExecutorTeam
from loaderkit.datasets.packing_run import PackingRun, root_file
from loaderkit.datasets.packing_tasks import CommonPart, shared_with_tasks
from loaderkit.datasets.packing_workers import reading
from loaderkit.datasets.shard_plan import BLOCK_BYTES
from loaderkit.datasets.structure import Structure
from loaderkit.errors import DatasetError
from loaderkit.forking import find_fork_hazard, warn_of_fork_hazard
from loaderkit.randomness import quiet

if TYPE_CHECKING:
    from pathlib import Path

    from loaderkit.cache.remote import CacheLocation
    from loaderkit.datasets.pack_options import PackOptions
    from loaderkit.datasets.sources import Source

_LOG = logging.getLogger("loaderkit")


def has_cache(location: CacheLocation) -> bool:
    """Tell whether there is a cache at a place, or one that is damaged.

    Raises:
        CacheError: The store does not answer.
    """
    if isinstance(location, RemoteCache):
        return find_remote_manifest(location.storage) is not None
    return exists(location / MANIFEST)


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
    storage = remote.storage
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
            build = stack.enter_context(open_build(path, overwrite=options.overwrite))
            if build is None:
                return Packed(_classes_of(_read_here(job)), is_ours=False)
            stack.callback(job.clear)
            reader = stack.enter_context(reading(job, options.workers))
            team = None
            if options.executor is not None:
                common = CommonPart(
                    job,
                    ShardWriter(path, options.compression),
                    source.state(),
                    root_file(source, options),
                )
                file = job.block("common")
                stack.enter_context(shared_with_tasks(common, file))
                team = ExecutorTeam(options.executor, file, source)
                stack.callback(team.stop)
            run = PackingRun(job, reader, team, build, options)
            structure = run.pack(fingerprint)
            build.commit(
                structure=structure,
                fingerprint=fingerprint,
                made_with={name: _version(name) for name in _LIBRARIES},
                sources=run.list_sources(),
            )
            return Packed(loaded_classes(run.structure), is_ours=True)
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
    if options.workers == 0 or options.executor is not None:
        return options
    if multiprocessing.current_process().daemon:
        if options.workers is None:
            return replace(options, workers=0)
        message = (
            f"{options.workers} packing workers were asked for in a daemonic process"
        )
        message += ", such as a worker of a DataLoader."
        fix = "workers=0, or pack in the process that starts this one"
        raise DatasetError(message, why="it may not have children", fix=fix)
    if multiprocessing.get_start_method() != "fork":
        return options
    if options.workers is not None:
        warn_of_fork_hazard(5, source=source)  # where pack() is called
        return options
    hazard = find_fork_hazard(source=source)
    if hazard is None:
        return options
    _LOG.warning("packing %s without workers: %s; %s", path, hazard.reason, hazard.fix)
    return replace(options, workers=0)


def _read_here(job: PackJob) -> Span:
    """Read the first sample in this process, which starts no workers behind it."""
    with job.tracker(all_threads=False) as tracker, quiet():
        return read_span(job, Task(0, 1), tracker)


def _classes_of(span: Span) -> tuple[type, ...]:
    structure = Structure()
    for encoded in span.blocks:
        for tree in encoded.trees:
            structure.number(tree, encoded.keys[0])
    return loaded_classes(structure)


_LIBRARIES = ("loaderkit", "torch", "torch-geometric", "numpy", "h5py")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
