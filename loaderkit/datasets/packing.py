"""Pack a source of samples: in parallel, in order, to a folder or to a store.

What goes into which shard depends on the samples alone (``shard_plan``), so the bytes
on disk are the same whoever packs, and also after a run that was killed and started
again (``packing_run``).

Streams are cut otherwise: where a shard of one ends follows from the samples in front
of it, and a task reads a span and writes its shards (``packing_streams``).

There is one way to do it.  A task reads a span of samples, and another puts the spans
of a shard together and writes it; or one task does both (``packing_tasks``).  Tasks are
done by this process or others of this machine (``packing_workers``), or by an executor
(``packing_executors``); which ones, in which order, and what is done when who does them
dies, says ``packing_team``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    NamedTuple,
)

import filelock
import xxhash

from loaderkit.cache.build import (
    ShardWriter,
    finish_killed_commit,
    open_build,
    remove_cache,
)
from loaderkit.cache.durable import not_written, writing
from loaderkit.cache.files import exists, find_manifest
from loaderkit.cache.layout import BUILDING, MANIFEST
from loaderkit.cache.lock_files import hold_lock_for_work
from loaderkit.cache.remote import RemoteCache
from loaderkit.cache.remote_manifest import find_remote_manifest
from loaderkit.cache.transfer import ask_to_write, copy_to_target
from loaderkit.datasets.block_readers import PackJob, read_span, seed_of
from loaderkit.datasets.classes import loaded_classes
from loaderkit.datasets.encode import encode
from loaderkit.datasets.own_samples import refuse_own_samples
from loaderkit.datasets.packing_executors import ExecutorEngine
from loaderkit.datasets.packing_run import PackingRun
from loaderkit.datasets.packing_streams import StreamRun
from loaderkit.datasets.packing_tasks import (
    CommonPart,
    doing_tasks_of,
    lay_out_for_workers,
)
from loaderkit.datasets.packing_team import PackingTeam
from loaderkit.datasets.packing_workers import LocalEngine
from loaderkit.datasets.shard_filling import learn_trees
from loaderkit.datasets.shard_plan import BLOCK_BYTES
from loaderkit.datasets.sources import KeyedSource
from loaderkit.datasets.streams import StreamSource
from loaderkit.datasets.structure import Structure
from loaderkit.errors import CacheError, DatasetError, OtherWriterError
from loaderkit.fixes import Fix, Setting
from loaderkit.forking import find_fork_hazard, warn_of_fork_hazard
from loaderkit.interrupts import Interrupts
from loaderkit.library_files import installed_version

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from loaderkit.cache.remote import CacheLocation
    from loaderkit.datasets.pack_options import PackOptions
    from loaderkit.datasets.sources import Source

_ALONE = Setting("workers", 0)
_LOG = logging.getLogger("loaderkit")


def has_cache(location: CacheLocation) -> bool:
    """Tell whether there is a cache at a place, or one that is damaged.

    Raises:
        CacheError: The store does not answer.
    """
    if isinstance(location, RemoteCache):
        return find_remote_manifest(location.storage) is not None
    return exists(location / MANIFEST)


class PackOutcome(NamedTuple):
    """What came of packing a source."""

    classes: tuple[type, ...]
    """Those that the samples read here are made of, as far as they are loaded."""
    is_ours: bool
    """False when another process has packed meanwhile, maybe another source."""


def pack_source(
    source: Source | StreamSource, location: CacheLocation, options: PackOptions
) -> PackOutcome:
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
    folder = _staging_of(location) if isinstance(location, RemoteCache) else location
    refuse_own_samples(folder, location)
    with Interrupts() as interrupts:
        if isinstance(location, RemoteCache):
            return _pack_to_store(source, location, options, interrupts)
        return _pack_to_folder(source, location, options, interrupts)


def _pack_to_store(
    source: Source | StreamSource,
    remote: RemoteCache,
    options: PackOptions,
    interrupts: Interrupts,
) -> PackOutcome:
    """Pack into a folder on local disk, and copy that to the store when it is whole."""
    storage, staging = remote.storage, _staging_of(remote)
    lock = staging.with_suffix(".lock")
    with writing(staging):
        staging.parent.mkdir(parents=True, exist_ok=True)
    # Of several ranks on a node one packs; the others wait, and find the cache.
    with hold_lock_for_work(lock, f"packs {remote} on this node"):
        try:
            target = ask_to_write(storage, overwrite=options.overwrite)
        except OtherWriterError:
            if options.overwrite:
                raise
            job = job_of(source, staging, options)
            return PackOutcome(_classes_read_here(job), is_ours=False)
        # What lies there whole was never pushed, and may be of other samples.
        options_here = replace(options, overwrite=True)
        packed = _pack_to_folder(source, staging, options_here, interrupts)
        try:
            # Another node may have been quicker; then no shard is copied for nothing.
            if not options.overwrite and has_cache(remote):
                packed = packed._replace(is_ours=False)
            else:
                copy_to_target(staging, target)
        except CacheError as error:
            if options.overwrite or not isinstance(error, OtherWriterError):
                # Hours of packing must not be for nothing.
                whole = "; what was packed is whole, and can be copied: "
                push = f"loaderkit push {staging} {remote}"
                fix = Fix.of(error.advice, whole, push)
                raise type(error)(error.what, why=error.why, fix=fix) from error
            # Another node was quicker; the caller sees whether it packed the same.
            packed = packed._replace(is_ours=False)
        with contextlib.suppress(OSError):
            remove_cache(staging)
    return packed


def _staging_of(remote: RemoteCache) -> Path:
    """Name the folder on local disk in which a cache is packed for a store."""
    digest = xxhash.xxh3_64_hexdigest(remote.url.encode())
    return remote.mirror_folder / "packing" / digest


def finish_killed_run(location: CacheLocation) -> None:
    """Clean up behind a run that was killed when its cache stood, if nobody packs.

    Args:
        location: Where the cache is.
    """
    if not isinstance(location, RemoteCache):
        finish_killed_commit(location)
        return
    # What cannot be removed now can wait.
    with contextlib.suppress(OSError, CacheError, filelock.Timeout):
        staging = _staging_of(location)
        if not staging.is_dir():
            return
        with filelock.FileLock(staging.with_suffix(".lock"), timeout=0):
            packed, copied = (
                find_manifest(staging),
                find_remote_manifest(location.storage),
            )
            # What was not copied may be the work of hours.
            if packed and copied and packed.generation == copied.generation:
                remove_cache(staging)


def job_of(
    source: Source | StreamSource, location: CacheLocation, options: PackOptions
) -> PackJob:
    """Say what is read to pack a source, or to see whether a cache is packed of it."""
    path = _staging_of(location) if isinstance(location, RemoteCache) else location
    return PackJob(
        source,
        BLOCK_BYTES,
        path / BUILDING,
        track_files=options.track_files,
        seed=seed_of(source, path),
    )


def _pack_to_folder(
    source: Source | StreamSource,
    path: Path,
    options: PackOptions,
    interrupts: Interrupts,
) -> PackOutcome:
    options = _with_possible_workers(source, path, options)
    stack = contextlib.ExitStack()
    try:
        return _pack_within(stack, source, path, options, interrupts)
    except OSError as error:
        # Whatever system call it was: pipes, processes, the build's own files.
        raise not_written(path, error) from error
    finally:
        # Written twice, as a Ctrl-C may come right before the first is held.
        try:
            _close(stack, options, interrupts)
        finally:
            _close(stack, options, interrupts)


def _close(
    stack: contextlib.ExitStack, options: PackOptions, interrupts: Interrupts
) -> None:
    """End the workers, and let go of the folder; what was closed stays closed."""
    if options.executor is not None:
        # The tasks of an executor are waited for, however long they take.
        stack.close()
        return
    with interrupts.held():
        stack.close()


def _pack_within(
    stack: contextlib.ExitStack,
    source: Source | StreamSource,
    path: Path,
    options: PackOptions,
    interrupts: Interrupts,
) -> PackOutcome:
    """Pack into a folder; the stack is given what is to be closed behind it."""
    fingerprint = source.fingerprint().to_json()
    build = stack.enter_context(open_build(path, overwrite=options.overwrite))
    # Behind the wait for another packer of this cache, who may be reading samples now.
    job = job_of(source, path, options)
    if build is None:
        return PackOutcome(_classes_read_here(job), is_ours=False)
    stack.callback(job.clear)
    writer = ShardWriter(path, options.compression)
    common = CommonPart(job, writer, source.state())
    file = job.block("common")
    # Until workers are started.  Those of an executor may be threads of this process,
    # of which others know nothing.
    is_alone = options.executor is None
    stack.enter_context(doing_tasks_of(common, file, is_alone=is_alone))
    engine: LocalEngine | ExecutorEngine
    if options.executor is None:
        workers, most_tasks = options.workers, _most_tasks(source)
        engine = LocalEngine(common, file, interrupts, workers, most_tasks)
    else:
        lay_out_for_workers(common, file)
        engine = ExecutorEngine(options.executor, source, interrupts)
    stack.callback(engine.stop)
    team = PackingTeam(engine, file, interrupts)
    run: PackingRun | StreamRun
    if isinstance(source, StreamSource):
        run = StreamRun(source, team, build, options, file)
    else:
        run = PackingRun(job, team, build, options)
    structure = run.pack(fingerprint)
    if isinstance(source, KeyedSource):
        source.note_values_left()
    if isinstance(run, StreamRun):
        fingerprint = {**fingerprint, "count": run.sample_count}
    if isinstance(engine, LocalEngine):
        engine.dismiss()
    build.commit(
        structure=structure,
        fingerprint=fingerprint,
        made_with=library_versions(),
        sources=run.list_sources(),
    )
    return PackOutcome(loaded_classes(run.structure), is_ours=True)


def _with_possible_workers(
    source: Source | StreamSource, path: Path, options: PackOptions
) -> PackOptions:
    """Read in this process where workers cannot be, or would harm.

    Raises:
        DatasetError: They were asked for where they cannot be.
    """
    if isinstance(source, StreamSource):
        options = _with_workers_for_stream(source, options)
    if options.workers == 0 or options.executor is not None:
        return options
    if multiprocessing.current_process().daemon:
        if options.workers is None:
            return replace(options, workers=0)
        message = (
            f"{options.workers} packing workers were asked for in a daemonic process"
            ", such as a worker of a DataLoader."
        )
        fix = Fix.of(_ALONE, ", or pack in the process that starts this one")
        raise DatasetError(message, why="it may not have children", fix=fix)
    if multiprocessing.get_start_method() != "fork":
        return options
    if options.workers is not None:
        warn_of_fork_hazard(5, **_parts_of(source))  # where pack() is called
        return options
    if not source.runs_user_code():
        # Nobody uses what lies in a list but for reading it.  To search 1,000 graphs
        # takes a tenth of the time that packing them does.
        return options
    hazard = find_fork_hazard(**_parts_of(source))
    if hazard is None:
        return options
    _LOG.warning("packing %s without workers: %s; %s", path, hazard.reason, hazard.fix)
    return replace(options, workers=0)


def _parts_of(source: Source | StreamSource) -> dict[str, object]:
    """Give what a source reads from: the user never saw the source around it."""
    return {name.lstrip("_"): value for name, value in vars(source).items()}


def _most_tasks(source: Source | StreamSource) -> int | None:
    """Say how many tasks there are at most; None where that does not bound workers."""
    return source.span_count if isinstance(source, StreamSource) else None


def _with_workers_for_stream(source: StreamSource, options: PackOptions) -> PackOptions:
    """Read a stream in this process where it is a single one.

    Raises:
        DatasetError: Others were to read it.
    """
    if source.takes_workers:
        return options
    if options.executor is not None or options.workers:
        message = "An iterable is read by one process, from the first sample on."
        why = "who reads it from the middle would have to read all in front of it"
        fix = Fix.of(_ALONE, "; or give a function source(span, spans)")
        fix = Fix.of(fix, " that returns the samples of one span, and spans=8")
        raise DatasetError(message, why=why, fix=fix)
    return replace(options, workers=0)


def _classes_read_here(job: PackJob) -> tuple[type, ...]:
    """Read the first sample in this process, which starts no workers behind it.

    Returns:
        The classes that it is made of.
    """
    structure = Structure()
    with job.turn_to_read(), job.tracker(all_threads=False) as tracker:
        if isinstance(job.source, StreamSource):
            first = job.source.first_sample(job.seed)
            if first is not None:
                structure.number(encode(first.sample)[0], first.key)
        else:
            span = read_span(job, range(1), tracker)
            learn_trees(structure, span.trees, span.first_keys)
    return loaded_classes(structure)


_LIBRARIES = ("loaderkit", "torch", "torch-geometric", "numpy", "h5py")


@functools.cache
def library_versions() -> Mapping[str, str]:
    """Say with which versions a cache is written, for its manifest.

    Looked up once in a process: five files of metadata are parsed, which takes as long
    as packing 100 graphs.
    """
    return {name: installed_version(name) or "not installed" for name in _LIBRARIES}
