"""What is done for packing, piece by piece, in whatever process it is to be done.

A task is some hundred bytes, and finds the rest in what all tasks of a run have in
common.  Its result is as small: what was read waits in files.  Run twice, or at once
with itself, it leaves the same.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from loaderkit.cache.durable import remove, writing
from loaderkit.datasets.block_readers import (
    EncodedSpan,
    PackJob,
    digests_of_rows,
    read_span,
)
from loaderkit.datasets.compiled_encoding import SampleEncoder
from loaderkit.datasets.shard_filling import ShardFiller, learn_trees
from loaderkit.datasets.structure import Structure
from loaderkit.error_texts import error_in_words
from loaderkit.errors import DatasetError
from loaderkit.fixes import Fix, Setting
from loaderkit.library_files import where_raised
from loaderkit.sending import how_to_unpickle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from loaderkit.cache.build import ShardWriter
    from loaderkit.datasets.shard_plan import ShardPlan
    from loaderkit.datasets.source_files import FileTracker, FileVersion
    from loaderkit.datasets.structure import Node


@dataclass(frozen=True)
class CommonPart:
    """What all tasks of a run have in common."""

    job: PackJob
    writer: ShardWriter
    state: str | None
    """What the source says that its samples are made from."""


class PackTask(Protocol):
    """A piece of work."""

    @property
    def common(self) -> Path:
        """The file with what all tasks have in common."""

    @property
    def name(self) -> str:
        """What tells it from the other tasks of its run; part of a file's name."""

    @property
    def rows(self) -> range:
        """The samples it is about."""

    def run(self) -> Any:
        """Do it."""


class WrittenShard(NamedTuple):
    """What a task tells of its shard; the rest is in the shard's note on disk."""

    number: int
    samples: int
    nbytes: int
    xxh3: str


@dataclass(frozen=True)
class ShardTask:
    """One shard to write."""

    common: Path
    number: int
    plan: ShardPlan
    structure: Mapping[str, Any]
    """What is known of how samples are built; JSON."""
    spans: Sequence[Path] | None = None
    """Where its samples wait that other tasks have read; None reads them here."""
    files: Mapping[str, FileVersion] = field(default_factory=dict)
    """Files that are known to be opened for its samples, beyond those noted here."""

    @property
    def name(self) -> str:
        """Its number."""
        return f"shard-{self.number}"

    @property
    def rows(self) -> range:
        """The samples of the shard."""
        return self.plan.rows_of(self.number)

    def run(self) -> WrittenShard:
        """Write it; spans that other tasks have read stay where they are.

        Raises:
            DatasetError: A sample cannot be read or stored.
            CacheError: The shard cannot be written.
        """
        run = run_of(self.common)
        common = run.common
        filler = ShardFiller(Structure.from_json(self.structure))
        filler.files.update(self.files)
        scratch = common.job.block(f"{self.name}-{uuid.uuid4().hex}")
        try:
            if self.spans is None:
                filler.add(_read_rows(self, scratch))
            else:
                for span in self.spans:
                    filler.add(run.take_up(span))
            evidence = filler.evidence(common.state)
            shard = filler.write(self.number, common.writer, evidence)
        finally:
            remove(scratch)
        return WrittenShard(self.number, shard.samples, shard.bytes, shard.xxh3)


class ReadSpan(NamedTuple):
    """What a task tells of samples that it has read."""

    start: int
    samples: int
    nbytes: int
    file: Path
    """Where they wait."""
    trees: Sequence[Node]
    """The ways in which they are built, in the order in which they were met."""
    first_keys: Sequence[str]
    """Key of the first sample that is built like each."""


@dataclass(frozen=True)
class SpanTask:
    """Samples of one shard to read."""

    common: Path
    shard: int
    plan: ShardPlan
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Its first row."""
        return f"span-{self.start}"

    @property
    def rows(self) -> range:
        """Its samples."""
        return range(self.start, self.stop)

    def run(self) -> ReadSpan:
        """Read them, and put them into files.

        Raises:
            DatasetError: A sample cannot be read or stored.
            CacheError: The files cannot be written.
        """
        run = run_of(self.common)
        job = run.common.job
        # A task that is given out twice must not write to the files of the other.
        file = job.block(f"{self.name}-{uuid.uuid4().hex}")
        values_file = values_file_of(file)
        try:
            span = _read_rows(self, values_file)
            with writing(file):
                most_bytes = self.plan.bytes_kept_of_span(self.shard)
                if span.block.bytes_in_memory > most_bytes or span.block.file:
                    span.block.spill(values_file)
                run.set_aside(file, span)
        except BaseException:
            # What went wrong counts, not that it could not be tidied up.
            with suppress(OSError):
                remove(values_file)
                remove(file)
            raise
        return ReadSpan(
            self.start,
            len(span.tree_of_sample),
            span.block.nbytes,
            file,
            span.trees,
            span.first_keys,
        )


def values_file_of(span: Path) -> Path:
    """Name the file beside a span's, with its values."""
    return span.with_suffix(".values.block")


@dataclass(frozen=True)
class Look:
    """What some samples show of all."""

    sizes: list[int]
    """Bytes of each that can be read ``[k]``."""
    structure: Structure
    files: Mapping[int, Mapping[str, FileVersion]] = field(default_factory=dict)
    """Files that were opened for the first time, by the row that was read."""


@dataclass(frozen=True)
class LookTask:
    """Samples to read for their sizes and how they are built."""

    common: Path
    looked_at: Sequence[int]
    """Their rows, in order."""

    @property
    def name(self) -> str:
        """Its first row."""
        return f"look-{self.looked_at[0]}"

    @property
    def rows(self) -> range:
        """From the first to the last of them."""
        return range(self.looked_at[0], self.looked_at[-1] + 1)

    def run(self) -> Look:
        """Look at them.

        Raises:
            DatasetError: The source's first sample cannot be read or stored.
        """
        run = run_of(self.common)
        look = Look([], Structure(), files := {})
        with run.reading() as tracker:
            for row in self.looked_at:
                try:
                    rows = range(row, row + 1)
                    span = read_span(run.common.job, rows, tracker, encoder=run.encoder)
                except DatasetError:
                    if row == 0:
                        raise
                    # Whoever packs it says so.
                    continue
                learn_trees(look.structure, span.trees, span.first_keys)
                # Beside these it will have the number of its variant.
                look.sizes.append(span.block.nbytes + 8)
                files[row] = span.files
        return look


class Digests(NamedTuple):
    """Hashes of samples, and the files that were opened for them."""

    digests: bytes
    """16 bytes each."""
    files: Mapping[str, FileVersion]


@dataclass(frozen=True)
class DigestTask:
    """Samples to read for their hashes alone."""

    common: Path
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Its first row."""
        return f"digests-{self.start}"

    @property
    def rows(self) -> range:
        """Its samples."""
        return range(self.start, self.stop)

    def run(self) -> Digests:
        """Read them.

        Raises:
            DatasetError: A sample cannot be read or stored.
        """
        run = run_of(self.common)
        with run.reading() as tracker:
            span = digests_of_rows(run.common.job, self.rows, tracker)
        return Digests(bytes(span.digests), span.files)


def _read_rows(task: ShardTask | SpanTask, scratch: Path) -> EncodedSpan:
    """Read the samples of a task block by block."""
    run = run_of(task.common)
    span = EncodedSpan(task.rows.start)
    for rows in task.plan.blocks_of(task.rows):
        # Threads take turns, block by block.
        with run.reading() as tracker:
            read_span(
                run.common.job,
                rows,
                tracker,
                encoder=run.encoder,
                into=span,
                scratch=scratch,
            )
    return span


def started_file(task: PackTask) -> Path:
    """Name the file that lies there while an executor's worker is at a task."""
    return task.common.with_name(f"{task.common.stem}-{task.name}-started.block")


# What all tasks have in common.


class CommonRun:
    """A run of packing, as the process sees it that does a task of it.

    Args:
        common: What its tasks have in common.
        tracker: What notes the files that the process opens, where it does nothing but
            read samples; else each task has its own.
        is_alone: No other process does tasks of the run, until ``share`` is called.
    """

    def __init__(
        self,
        common: CommonPart,
        tracker: FileTracker | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        self.common, self._tracker, self._is_alone = common, tracker, is_alone
        self.pid = os.getpid()
        self.encoder = SampleEncoder()
        """Used while ``reading``."""
        self._spans: dict[Path, EncodedSpan] = {}
        """Those that need no file, since this process puts them together too."""

    def set_aside(self, file: Path, span: EncodedSpan) -> None:
        """Keep samples until their shard is put together; large values are in a file.

        Raises:
            OSError: They cannot be written.
        """
        if self._is_alone:
            self._spans[file] = span
        else:
            _write_span(file, span)

    def share(self) -> None:
        """Let other processes take up what was set aside here, and what will be.

        Raises:
            CacheError: It cannot be written.
        """
        self._is_alone = False
        for file in list(self._spans):
            with writing(file):
                _write_span(file, self._spans[file])
            del self._spans[file]

    def take_up(self, file: Path) -> EncodedSpan:
        """Give samples that were set aside.

        Raises:
            OSError: Their file cannot be read.
        """
        if self._is_alone:
            return self._spans.pop(file)
        with file.open("rb") as raw:
            span: EncodedSpan = pickle.load(raw)
        return span

    @contextmanager
    def reading(self) -> Iterator[FileTracker]:
        """Have files noted while samples are read."""
        job = self.common.job
        if self._tracker is not None:
            with job.making_samples():
                yield self._tracker
            return
        # In this order: what others open before their turn ends is no file of ours.
        with job.turn_to_read(), job.tracker(all_threads=False) as tracker:
            yield tracker


def _write_span(file: Path, span: EncodedSpan) -> None:
    with file.open("wb") as raw:
        pickle.dump(span, raw, pickle.HIGHEST_PROTOCOL)


_OWN_RUNS: dict[Path, CommonRun] = {}
"""Runs whose tasks this process does with the objects it has: threads use the user's
dataset itself, but a forked process must not share the files it has open."""


@contextmanager
def doing_tasks_of(
    common: CommonPart,
    file: Path,
    tracker: FileTracker | None = None,
    *,
    is_alone: bool = False,
) -> Iterator[None]:
    """Let tasks that are done in this process find what they have in common.

    Args:
        common: It.
        file: What the tasks call it.
        tracker: As ``CommonRun`` has it.
        is_alone: As ``CommonRun`` has it.
    """
    _OWN_RUNS[file] = CommonRun(common, tracker, is_alone=is_alone)
    try:
        yield
    finally:
        del _OWN_RUNS[file]


def lay_out_for_workers(common: CommonPart, file: Path) -> None:
    """Put what all tasks have in common where the workers of an executor find it.

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
        content = pickle.dumps(error_in_words(error))
    with writing(file):
        file.write_bytes(content)


def _pickle_common_part(common: CommonPart) -> bytes:
    """Pickle what tasks need, with classes of ``__main__`` where that can be done."""
    try:
        # dask, loky and submitit bring it; nobody is asked to install it.
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        return pickle.dumps(common, pickle.HIGHEST_PROTOCOL)
    content: bytes = cloudpickle.dumps(common, pickle.HIGHEST_PROTOCOL)
    return content


def run_of(file: Path) -> CommonRun:
    """Find what a task has in common with the others of its run.

    Args:
        file: What the task calls it.

    Raises:
        DatasetError: This process cannot have it.
    """
    run = _OWN_RUNS.get(file)
    if run is not None and run.pid == os.getpid():
        return run
    return CommonRun(_unpickle_common_part(file, os.getpid()))


def not_unpickled(error: Exception) -> DatasetError:
    """Say that a worker could not be sent the dataset.

    Args:
        error: As code of the user's objects raised it.
    """
    message = (
        "The dataset could not be unpickled in a packing worker: "
        f"{error_in_words(error)}"
    )
    alone = Setting("workers", 0)
    mend = how_to_unpickle(error, "correct its __setstate__ or __reduce__")
    fix = Fix.of(f"{mend}, or pack with ", alone)
    return DatasetError(message, why=where_raised(error), fix=fix)


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
    try:
        common: CommonPart | str = pickle.loads(content)
    except Exception as error:
        raise not_unpickled(error) from error
    if isinstance(common, str):
        message = f"The dataset cannot be sent to the executor's workers: {common}"
        fix = "open files and connections when a sample is first read, or use threads"
        raise DatasetError(message, why="it is sent pickled", fix=fix)
    return common
