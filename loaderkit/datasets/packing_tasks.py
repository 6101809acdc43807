"""What an executor's workers do: read a span of samples, and write its shard.

A task is a few hundred bytes: which shard, and a file that says what all tasks have in
common.  Its result is as small.  Run twice, or at once with itself, it leaves the same.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.cache.durable import remove, writing
from loaderkit.datasets.block_readers import PackJob, Task, read_span
from loaderkit.datasets.packing_workers import Failure
from loaderkit.datasets.shard_filling import ShardFiller
from loaderkit.datasets.structure import Structure
from loaderkit.errors import DatasetError
from loaderkit.randomness import quiet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from loaderkit.cache.build import ShardWriter
    from loaderkit.datasets.block_readers import Span
    from loaderkit.datasets.shard_plan import ShardPlan
    from loaderkit.datasets.source_files import FileVersion


@dataclass(frozen=True)
class CommonPart:
    """What all tasks of a run have in common."""

    job: PackJob
    writer: ShardWriter
    state: str | None
    """What the source says that its samples are made from."""
    first_files: Mapping[str, FileVersion] = field(default_factory=dict)
    """Files known without being opened; noted with the first shard."""


class ShardTask(NamedTuple):
    """One shard to write."""

    common: Path
    """The file with what all tasks have in common."""
    plan: ShardPlan
    number: int
    structure: Mapping[str, Any]
    """What is known of how samples are built; JSON."""


class WrittenShard(NamedTuple):
    """What a task tells of its shard; the rest is in the shard's note on disk."""

    number: int
    samples: int
    nbytes: int
    xxh3: str


class Look(NamedTuple):
    """What some samples show of all."""

    sizes: list[int]
    """Bytes of each ``[k]``."""
    structure: Structure


class RowDigests(NamedTuple):
    """Samples to read for their hashes alone."""

    common: Path
    start: int
    stop: int


class RowsToLookAt(NamedTuple):
    """Samples to read for their sizes and how they are built."""

    common: Path
    rows: list[int]


def started_file(common: Path, number: int) -> Path:
    """Name the file that lies there while a shard is being written."""
    return common.with_name(f"{common.stem}-{number}-started.block")


def write_shard_of(task: ShardTask) -> WrittenShard | Failure:
    """Read the samples of a shard and write it; runs in a worker."""
    started = started_file(task.common, task.number)
    try:
        with writing(started):
            # Where a worker dies, this tells whose samples it was reading.
            started.touch()
        written = _write_shard(task)
        remove(started)
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- the packing process raises it
        remove(started)
        return Failure.of(error, "In a task of the executor")
    return written


def digests_of(task: RowDigests) -> list[bytes] | Failure:
    """Read samples for their hashes; runs in a worker."""
    try:
        job = _common_part(task.common).job
        blocks = (Task(task.start, task.stop, digests_only=True),)
        return [
            digest
            for span in _read_here(job, blocks)
            for encoded in span.blocks
            for digest in encoded.digests
        ]
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- as above
        return Failure.of(error, "In a task of the executor")


def look_at(task: RowsToLookAt) -> Look | Failure:
    """Read some samples for their sizes; runs in a worker."""
    try:
        job = _common_part(task.common).job
        tasks = [Task(row, row + 1, skips_failing=row > 0) for row in task.rows]
        return look_of(_read_here(job, tasks))
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- as above
        return Failure.of(error, "In a task of the executor")


def look_of(spans: Iterable[Span]) -> Look:
    """Say what samples that were read one by one show of all.

    Args:
        spans: One sample each; none where it cannot be read.
    """
    sizes, structure = [], Structure()
    for span in spans:
        for encoded in span.blocks:
            for tree in encoded.trees:
                structure.number(tree, encoded.keys[0])
            if encoded.keys:
                # Beside its values it has a key, and the number of its variant.
                sizes.append(encoded.block.nbytes + len(encoded.keys[0]) + 8)
    return Look(sizes, structure)


def _write_shard(task: ShardTask) -> WrittenShard:
    job, writer, state, first_files = _fields_of(_common_part(task.common))
    filler = ShardFiller(Structure.from_json(task.structure))
    if task.number == 0:
        filler.files.update(first_files)
    blocks = (Task(*block) for block in task.plan.blocks_of(task.number))
    for span in _read_here(job, blocks):
        filler.files.update(span.files)
        for encoded in span.blocks:
            filler.add(encoded)
    shard = filler.write(task.number, writer, state)
    return WrittenShard(task.number, shard.samples, shard.bytes, shard.xxh3)


def _fields_of(
    common: CommonPart,
) -> tuple[PackJob, ShardWriter, str | None, Mapping[str, FileVersion]]:
    return common.job, common.writer, common.state, common.first_files


def _read_here(job: PackJob, tasks: Iterable[Task]) -> Iterator[Span]:
    """Read samples in this process, whose other threads may be reading too."""
    with job.tracker(all_threads=False) as tracker:
        for task in tasks:
            # The random numbers that a sample draws are the process's, and so is the
            # position of a file that the dataset keeps open.
            with _reading_lock(os.getpid()), quiet():
                span = read_span(job, task, tracker)
            yield span


@functools.cache
def _reading_lock(pid: int) -> threading.Lock:  # noqa: ARG001 -- the cache's key
    """Give the lock of a process; one that was forked while it was held has another."""
    return threading.Lock()


_OWN_RUNS: dict[Path, tuple[int, CommonPart]] = {}
"""What tasks of this process's own runs have in common, with its id: threads use the
user's dataset itself, but a forked process must not share the files it has open."""


@contextmanager
def shared_with_tasks(common: CommonPart, file: Path) -> Iterator[None]:
    """Lay what all tasks have in common where each worker finds it.

    Args:
        common: It; pickled where other processes need it.
        file: Where, in a folder that all workers see.

    Raises:
        CacheError: The file cannot be written.
    """
    try:
        content = _pickle_common_part(common)
    except Exception as error:  # noqa: BLE001 -- pickling runs code of the user's objects
        # Threads need none.  Another process is told why there is none for it.
        content = pickle.dumps(f"{type(error).__name__}: {error}")
    with writing(file):
        file.write_bytes(content)
    _OWN_RUNS[file] = (os.getpid(), common)
    try:
        yield
    finally:
        del _OWN_RUNS[file]


def _pickle_common_part(common: CommonPart) -> bytes:
    """Pickle what tasks need, with classes of ``__main__`` where that can be done."""
    try:
        # dask, loky and submitit bring it; nobody is asked to install it.
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        return pickle.dumps(common, pickle.HIGHEST_PROTOCOL)
    content: bytes = cloudpickle.dumps(common, pickle.HIGHEST_PROTOCOL)
    return content


def _common_part(file: Path) -> CommonPart:
    pid, common = _OWN_RUNS.get(file, (0, None))
    if common is not None and pid == os.getpid():
        return common
    return _unpickle_common_part(file, os.getpid())


@functools.lru_cache(maxsize=1)
def _unpickle_common_part(
    file: Path,
    pid: int,  # noqa: ARG001 -- the cache's key
) -> CommonPart:
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        message = f"A worker of the executor does not see {file}."
        why = "its machine has another disk there, or the packing process has ended"
        fix = "pack to a folder of a file system that all machines share"
        raise DatasetError(message, why=why, fix=fix) from error
    common: CommonPart | str = pickle.loads(content)
    if isinstance(common, str):
        message = f"The dataset cannot be sent to the executor's workers: {common}"
        fix = "open files and connections when a sample is first read, or use threads"
        raise DatasetError(message, why="it is sent pickled", fix=fix)
    return common
