"""Read samples and take them apart: here, or in several processes, in order."""

from __future__ import annotations

import collections
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from loaderkit.cache.columns import Block
from loaderkit.datasets.encode import encode
from loaderkit.errors import CacheError, DatasetError, LoaderkitError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from loaderkit.datasets.sources import Source

BLOCK_BYTES = 4 << 20
"""A worker hands over samples when it holds about so many bytes of them."""
_SET_ASIDE_BYTES = 64 << 10
"""Larger blocks wait in a file, smaller ones travel through a pipe."""
_AHEAD = 16
"""Blocks asked of each worker at a time: they wait in files while a shard is written,
which takes as long as some 10 of them."""


@dataclass
class Encoded:
    """Samples as a worker returns them: columns, and how each sample was built."""

    block: Block = field(default_factory=Block)
    trees: list[Any] = field(default_factory=list)
    which: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """What all packing workers do."""

    source: Source
    limit: int
    """Bytes after which a new block is begun."""
    folder: Path
    """Where blocks wait for the process that writes them."""

    def clear(self) -> None:
        """Remove blocks that nobody took, after an error."""
        for file in self.folder.glob("*.block"):
            file.unlink()


def encode_all(
    job: Job, spans: Iterator[tuple[int, int]], workers: int | None
) -> Generator[list[Encoded], None, None]:
    """Encode spans of samples in order, several at a time.

    Args:
        job: What is read, and where blocks wait.
        spans: First row and the row behind the last, in order.
        workers: Processes; 0 encodes here; None: up to 4, one for each CPU.

    Yields:
        The blocks of a span.

    Raises:
        DatasetError: A sample cannot be read or stored, or a worker was killed.
    """
    if workers is None:
        workers = min(4, _usable_cpus())
    if workers == 0:
        for start, stop in spans:
            yield _encode_span(job, start, stop)
        return
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context(), _start_worker, (job,)
    )
    try:
        waiting: collections.deque[Future[list[Encoded]]] = collections.deque()
        for span in spans:
            waiting.append(pool.submit(_encode_here, *span))
            if len(waiting) >= _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        what = "A packing worker was killed while it read samples."
        why = "probably out of memory, or a crash in native code that load() calls"
        fix = "pack with workers=1 (or 0 to see the crash); finished shards are kept"
        raise DatasetError(what, why=why, fix=fix) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_HERE: list[Job] = []
"""In a packing worker: what it was started for."""


def _start_worker(job: Job) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _HERE[:] = [job]


def _end_with_parent() -> None:
    """Stop this worker when the packing process is killed, which tells nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_here(start: int, stop: int) -> list[Encoded]:
    [job] = _HERE
    found = _encode_span(job, start, stop)
    for number, encoded in enumerate(found):
        if encoded.block.nbytes >= _SET_ASIDE_BYTES:
            file = job.folder / f"{start}-{number}.block"
            try:
                encoded.block.set_aside(file)
            except OSError as error:
                what = f"{file} could not be written: {error.strerror or error}."
                fix = "free the space (or choose another folder) and run it again"
                why = "finished shards are kept"
                raise CacheError(what, why=why, fix=fix) from error
    return found


def _encode_span(job: Job, start: int, stop: int) -> list[Encoded]:
    """Read and take apart some samples.

    Args:
        job: Where they come from, and how large a block gets.
        start: First row.
        stop: The row behind the last.

    Returns:
        The samples in order, in one block or more.

    Raises:
        DatasetError: A sample cannot be read or stored.
    """
    done = [Encoded()]
    seen: dict[Any, int] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unable to accurately infer")
        for row in range(start, stop):
            if done[-1].block.nbytes >= job.limit:
                done.append(Encoded())
                seen = {}
            encode_one(job.source, row, done[-1], seen)
    return done


def encode_one(source: Source, row: int, into: Encoded, seen: dict[Any, int]) -> None:
    """Read one sample, take it apart and add it to a block.

    Args:
        source: Where it comes from.
        row: Which one.
        into: The block.
        seen: Numbers of the ways of being built that the block knows.

    Raises:
        DatasetError: The sample cannot be read or stored; the message names it.
    """
    key = source.key(row)
    try:
        tree, values = encode(source.read(row))
    except DatasetError as error:
        what = f"Sample {key!r} (row {row:,} of {len(source):,}): {error.what}"
        raise DatasetError(what, why=error.why, fix=error.fix) from error
    except LoaderkitError:
        raise
    except Exception as error:
        raise _not_loaded(source, row, error) from error
    number = seen.get(tree)
    if number is None:
        number = seen[tree] = len(into.trees)
        into.trees.append(tree)
    into.block.append(values)
    into.which.append(number)
    into.keys.append(key)


def _not_loaded(source: Source, row: int, error: Exception) -> DatasetError:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
    what = (
        f"Sample {source.key(row)!r} (row {row:,} of {len(source):,}) could not be "
        f"loaded: {type(error).__name__}: {error}"
    )
    fix = "mend or leave out this sample and run again; finished shards are kept"
    return DatasetError(what, why=f"raised at {where}", fix=fix)
