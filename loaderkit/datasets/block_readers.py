"""Read samples and take them apart: here, or in several processes, in order."""

from __future__ import annotations

import contextlib
import os
import pickle
import traceback
import uuid
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash

from loaderkit.cache.columns import Block
from loaderkit.cache.durable import not_written, remove
from loaderkit.datasets.encode import encode
from loaderkit.datasets.source_files import FileTracker, FileVersion, TrackFiles
from loaderkit.errors import DatasetError, LoaderkitError
from loaderkit.randomness import mix_seed, seed_all

if TYPE_CHECKING:
    from pathlib import Path

    from loaderkit.datasets.sources import Source

_SMALL_BYTES = 4 << 10
"""Values below this are joined before they are hashed: copying them costs less."""
_SET_ASIDE_BYTES = 64 << 10
"""Blocks larger than this wait in a file of their own until the shard is written, so
that the packing process holds one column of a shard in memory and not all of it."""


@dataclass
class EncodedBlock:
    """Samples as a worker returns them: columns, and how each sample was built."""

    block: Block = field(default_factory=Block)
    trees: list[Any] = field(default_factory=list)
    which: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    tree_digests: list[bytes] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    """Hash of each sample's key, tree and values."""


@dataclass
class Span:
    """What reading some consecutive samples gave."""

    start: int
    """First row."""
    blocks: list[EncodedBlock]
    files: dict[str, FileVersion]
    """Files opened for the first time while they were read, by absolute path."""


@dataclass(frozen=True)
class PackJob:
    """What all packing workers do."""

    source: Source
    limit: int
    """Bytes after which a new block is begun."""
    folder: Path
    """Where blocks wait for the process that writes them."""
    track_files: TrackFiles = "stat"
    seed: int | None = None
    """What the random numbers that samples draw follow from; see ``seed_of``."""
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """In the names of blocks: a worker of a killed run may still write its own."""

    def block(self, name: str) -> Path:
        """Name a file in which something waits for the process that writes."""
        return self.folder / f"{self.run}-{name}.block"

    def clear(self) -> None:
        """Remove blocks that nobody took, after an error.

        The next run removes what cannot be removed now: what went wrong counts.
        """
        with contextlib.suppress(OSError):
            for file in self.folder.glob("*.block"):
                remove(file)

    def tracker(self, *, all_threads: bool) -> FileTracker:
        """Make what notes the files that the source opens."""
        cache = os.path.abspath(self.folder.parent)
        return FileTracker([cache], self.track_files, all_threads=all_threads)


class Task(NamedTuple):
    """Samples to read."""

    start: int
    """The first row."""
    stop: int
    """The row behind the last."""
    digests_only: bool = False
    """Read them for their hashes, and keep nothing else of them."""
    skips_failing: bool = False
    """Leave out samples that cannot be read: whoever packs them says so."""


def read_span(job: PackJob, task: Task, tracker: FileTracker) -> Span:
    """Read and take apart some samples.

    Args:
        job: Where they come from, and how large a block gets.
        task: Which ones.
        tracker: What notes the files that are opened meanwhile.

    Returns:
        The samples in order, in one block or more.

    Raises:
        DatasetError: A sample cannot be read or stored.
    """
    blocks = [EncodedBlock()]
    seen: dict[Any, int] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unable to accurately infer")
        for row in range(task.start, task.stop):
            if blocks[-1].block.nbytes >= job.limit:
                blocks.append(EncodedBlock())
                seen = {}
            try:
                encode_one(job, row, blocks[-1], seen)
            except DatasetError:
                if not task.skips_failing:
                    raise
            if task.digests_only:
                blocks[-1].block = Block()
    return Span(task.start, blocks, tracker.new_files())


def set_aside(job: PackJob, span: Span) -> Path:
    """Put a span into files for the process that writes the shards.

    Args:
        job: Says where they wait.
        span: What was read; its large blocks are emptied.

    Returns:
        The file from which ``take_up`` reads it.

    Raises:
        CacheError: The files cannot be written.
    """
    file = job.block(str(span.start))
    try:
        for number, encoded in enumerate(span.blocks):
            if encoded.block.nbytes >= _SET_ASIDE_BYTES:
                encoded.block.spill(job.block(f"{span.start}-{number}"))
        with file.open("wb") as raw:
            pickle.dump(span, raw, pickle.HIGHEST_PROTOCOL)
    except OSError as error:
        raise not_written(file, error) from error
    return file


def take_up(file: Path) -> Span:
    """Read a span that ``set_aside`` wrote, and remove its file."""
    with file.open("rb") as raw:
        span: Span = pickle.load(raw)
    remove(file)
    return span


def seed_of(source: Source) -> int | None:
    """Say what the random numbers of a source's samples follow from; None: of nothing.

    Ask in the process that packs: ``torch.manual_seed`` there is what the user sets.
    """
    return torch.initial_seed() if source.runs_user_code() else None


def read_sample(source: Source, row: int, seed: int | None) -> Any:
    """Read one sample.

    The random numbers it draws follow from its row, so that samples are the same for
    every number of workers, and when an unfinished build goes on.  Whoever goes on
    drawing behind it puts back the states (``randomness.quiet``).

    Args:
        source: Where it comes from.
        row: Which one.
        seed: What ``seed_of`` says of the source.

    Returns:
        What the source gives.
    """
    if seed is not None:
        seed_all(mix_seed(seed, 0, row))
    return source.read(row)


def encode_one(
    job: PackJob, row: int, into: EncodedBlock, seen: dict[Any, int]
) -> None:
    """Read one sample, take it apart and add it to a block.

    Args:
        job: Where it comes from.
        row: Which one.
        into: The block.
        seen: Numbers of the ways of being built that the block knows.

    Raises:
        DatasetError: The sample cannot be read or stored; the message names it.
    """
    source = job.source
    key = source.key(row)
    try:
        tree, values = encode(read_sample(source, row, job.seed))
    except DatasetError as error:
        message = f"Sample {key!r} (row {row:,} of {len(source):,}): {error.what}"
        raise DatasetError(message, why=error.why, fix=error.fix) from error
    except LoaderkitError:
        raise
    except (Exception, SystemExit) as error:
        raise _not_loaded(source, row, error) from error
    number = seen.get(tree)
    if number is None:
        number = seen[tree] = len(into.trees)
        into.trees.append(tree)
        into.tree_digests.append(xxhash.xxh3_128_digest(_encode_text(repr(tree))))
    into.block.append(values)
    into.which.append(number)
    into.keys.append(key)
    into.digests.append(_sample_digest(key, into.tree_digests[number], values))


def content_digest(digests: list[bytes]) -> str:
    """Hash many samples by their hashes, in order."""
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def _sample_digest(key: str, tree_digest: bytes, values: dict[Any, Any]) -> bytes:
    # One call for all small values: an update each would take longer than encoding.
    small = [_encode_text(key), tree_digest]
    large = []
    for value in values.values():
        small.append(repr(value.shape).encode())
        if value.nbytes < _SMALL_BYTES:
            small.append(value.tobytes())
        else:
            large.append(np.ascontiguousarray(value).data)
    digest = xxhash.xxh3_128(b"".join(small))
    for data in large:
        digest.update(data)
    return digest.digest()


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _not_loaded(source: Source, row: int, error: BaseException) -> DatasetError:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
    message = (
        f"Sample {source.key(row)!r} (row {row:,} of {len(source):,}) could not be "
        f"loaded: {type(error).__name__}: {_text_of(error)}"
    )
    fix = "mend or leave out this sample and run again; finished shards are kept"
    return DatasetError(message, why=f"raised at {where}", fix=fix)


def _text_of(error: BaseException) -> str:
    """Print an error whose own ``__str__`` may fail."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 -- the user's code
        return "<its text cannot be printed>"
