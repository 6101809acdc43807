"""What data of other sizes costs: many shards, and a cache larger than memory.

``python -m benchmarks.scale shards``: shuffled batches of W1 from 1, 10, 60 and 500
files, in page cache.  ``python -m benchmarks.scale open``: opening caches of up to
10,000 files where a process may have 256 open; the files are names of a few, so they
take 1 GB of disk at most.  ``python -m benchmarks.scale samples``: W1 of 10^4 to 10^7
graphs, in page cache and from disk, in the orders that a loader reads in; it empties
the page cache, as root, and takes 3 GB of disk.  ``python -m benchmarks.scale memory``:
W2 in a process that may use less memory than the cache has bytes; it makes a memory
cgroup (version 1, as root), and takes 1.6 GB of disk.  ``--save`` keeps the tables.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch_geometric.data import Data

import loaderkit
from benchmarks.harness import Row, measure_rates, report
from benchmarks.memory_cgroup import READER_BYTES, disk_bytes_read, run_within
from benchmarks.workloads import BATCH, COUNTS, PtFiles, make_graphs
from loaderkit.cache.files import load_manifest
from loaderkit.cache.layout import shard_name
from loaderkit.cache.manifest import write_manifest
from loaderkit.cache.shard_table import ShardTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from benchmarks.harness import ReadSamples

Order: TypeAlias = Literal["in order", "blocks", "shuffled"]

SHARD_BYTES = {1: 256 << 20, 10: 5_200_000, 60: 480_000, 500: 90_000}
"""Bytes as packed, before they are narrowed, for about so many files of W1."""
MOST_OPEN_FILES = 256
TINY_SAMPLES = 10**9 // 8_000
"""Samples of a shard of which 8,000 make 10^9."""
ROWS_OF_FIRST_EPOCH = 1_000
BATCHES_OF_MANY = 400
"""Read a turn of each cache, however many batches it has."""
COLD_CACHE = "1,000,000 graphs"
"""Which of them is read from disk."""
READING_S = 10.0
"""How long each contestant reads a turn where data exceed memory."""
POCKETS = 4_000
DISTINCT_POCKETS = 100
"""The pockets repeat so many graphs: making all of them would take minutes."""
BLOCK_ROWS = 64
WINDOW_ROWS = 1024
"""As ``shuffle="block"``: blocks are drawn, and rows within a window of them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["shards", "open", "samples", "memory"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory() as folder:
        if options.what == "shards":
            compare_shard_counts(Path(folder), options.rounds, save=options.save)
        elif options.what == "open":
            compare_openings(Path(folder), options.rounds, save=options.save)
        elif options.what == "samples":
            compare_sample_counts(Path(folder), options.rounds, save=options.save)
        else:
            read_larger_than_memory(Path(folder), options.rounds, save=options.save)


# Batches from many files.


def compare_shard_counts(folder: Path, rounds: int, *, save: bool) -> None:
    """Compare batches from one file with those from many."""
    graphs = make_graphs("w1", COUNTS["w1"])
    contestants: dict[str, ReadSamples] = {}
    for shards, shard_bytes in SHARD_BYTES.items():
        path = folder / str(shards)
        dataset = loaderkit.pack(graphs, path, workers=0, shard_bytes=shard_bytes)
        files = len(list(path.glob("*.h5")))
        contestants[f"{files} shards"] = _shuffled_reader(dataset, BATCH["w1"])

    rows = measure_rates(contestants, rounds=rounds)
    title = f"w1: {len(graphs):,} graphs, batch {BATCH['w1']}, shuffled, 0 workers"
    report(title, rows, save="scale_shards" if save else None)


def _shuffled_reader(dataset: Any, batch_size: int) -> ReadSamples:
    def read_epoch() -> int:
        rows = np.random.default_rng(0).permutation(len(dataset))
        for start in range(0, len(rows), batch_size):
            dataset.batch(rows[start : start + batch_size])
        return len(rows)

    return read_epoch


# Opening many files.


class OpeningTimes(NamedTuple):
    """Of one opening of a cache."""

    open_ms: float
    """``open_cache``, the length and the first sample."""
    first_batch_ms: float
    """And then the first shuffled batch."""


def compare_openings(folder: Path, rounds: int, *, save: bool) -> None:
    """Compare opening one file with opening thousands."""
    caches = _write_caches_of_many_shards(folder)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_OPEN_FILES, MOST_OPEN_FILES))

    times: dict[str, list[OpeningTimes]] = {name: [] for name in caches}
    generator = np.random.default_rng(0)
    for turn in range(rounds + 1):
        for name, path in caches.items():
            opening = _time_opening(path, generator)
            # Each file is hashed in the first turn.
            if turn > 0:
                times[name].append(opening)

    open_ms = {
        name: [opening.open_ms for opening in openings]
        for name, openings in times.items()
    }
    first_batch_ms = {
        name: [opening.first_batch_ms for opening in openings]
        for name, openings in times.items()
    }
    title = f"where {MOST_OPEN_FILES} files may be open"
    report(
        f"open_cache, len and [0], {title}",
        _rows_of_times(open_ms),
        save="scale_open" if save else None,
    )
    report(
        f"the first shuffled batch, {title}",
        _rows_of_times(first_batch_ms),
        save="scale_open_first_batch" if save else None,
    )


def _write_caches_of_many_shards(folder: Path) -> dict[str, Path]:
    graphs = make_graphs("w1", COUNTS["w1"])
    w1_cache = folder / "w1"
    loaderkit.pack(graphs, w1_cache, workers=0, shard_bytes=SHARD_BYTES[60])
    tiny_cache = folder / "tiny"
    tiny_graphs = [Data(x=torch.zeros(1, 1)) for _ in range(TINY_SAMPLES)]
    loaderkit.pack(tiny_graphs, tiny_cache, workers=0)

    caches = {}
    for shards in (1, 100, 1_000, 10_000):
        path = folder / str(shards)
        _repeat_shards(w1_cache, path, shards, os.link)
        caches[f"{shards:,} shards"] = path
    path = folder / "billion"
    _repeat_shards(tiny_cache, path, 8_000, os.link)
    caches["8,000 shards of 10^9 samples"] = path
    return caches


def _repeat_shards(
    cache: Path, path: Path, count: int, make_file: Callable[[Path, Path], object]
) -> None:
    """Make a cache of so many shards, each another name or a copy of a cache's."""
    path.mkdir()
    manifest = load_manifest(cache)
    packed_shards = list(manifest.shards)
    shards = []
    for number in range(count):
        shard = packed_shards[number % len(packed_shards)]
        name = shard_name(number, shard.xxh3)
        make_file(cache / shard.file, path / name)
        shards.append(replace(shard, file=name))
    manifest = replace(manifest, shards=ShardTable.of(shards))
    (path / "manifest.json").write_text(write_manifest(manifest))


def _time_opening(path: Path, generator: np.random.Generator) -> OpeningTimes:
    # The dataset is dropped on return: its files are unmapped after the clock is read,
    # not in the time of the next one.
    start = time.perf_counter()
    dataset = loaderkit.open_cache(path)
    len(dataset)
    dataset[0]
    opened = time.perf_counter()
    dataset.batch(generator.integers(len(dataset), size=BATCH["w1"]))
    end = time.perf_counter()
    return OpeningTimes(1000 * (opened - start), 1000 * (end - opened))


def _rows_of_times(times_ms: dict[str, list[float]]) -> list[Row]:
    """Make rows whose ratio says how many times as fast as the first one is."""
    baseline_ms = statistics.median(next(iter(times_ms.values())))
    rows = []
    for name, values in times_ms.items():
        median_ms = statistics.median(values)
        low_ms, high_ms = min(values), max(values)
        ratio = baseline_ms / median_ms
        rows.append(Row(name, median_ms, low_ms, high_ms, "ms", ratio))
    return rows


# Many samples.


def compare_sample_counts(folder: Path, rounds: int, *, save: bool) -> None:
    """Compare batches of 10^4 graphs with those of many more, warm and from disk."""
    caches = _write_caches_of_many_samples(folder)
    _compare_in_page_cache(caches, rounds, save=save)
    _compare_first_epochs(caches[COLD_CACHE], rounds, save=save)


def _compare_in_page_cache(caches: dict[str, Path], rounds: int, *, save: bool) -> None:
    contestants = {name: _reader_of_batches(path) for name, path in caches.items()}
    rows = measure_rates(contestants, rounds=rounds)
    title = f"w1, batch {BATCH['w1']}, shuffled, 0 workers, in page cache"
    report(title, rows, save="scale_samples" if save else None)


def _reader_of_batches(path: Path) -> ReadSamples:
    """Make what reads some shuffled batches: a whole epoch of 10^7 takes a minute."""
    dataset = loaderkit.open_cache(path, checksums="never")
    # The first epoch maps pages; this is about those after it.
    for start in range(0, len(dataset), ROWS_OF_FIRST_EPOCH):
        dataset.batch(np.arange(start, min(start + ROWS_OF_FIRST_EPOCH, len(dataset))))
    generator = np.random.default_rng(0)

    def read_batches() -> int:
        rows = generator.integers(len(dataset), size=(BATCHES_OF_MANY, BATCH["w1"]))
        for batch_rows in rows:
            dataset.batch(batch_rows)
        return rows.size

    return read_batches


def _compare_first_epochs(cache: Path, rounds: int, *, save: bool) -> None:
    cache_bytes = sum(file.stat().st_size for file in cache.glob("*.h5"))
    sample_bytes = cache_bytes / len(loaderkit.open_cache(cache))
    orders: tuple[Order, ...] = ("in order", "blocks", "shuffled")
    rates: dict[str, list[float]] = {order: [] for order in orders}
    read_ratios: dict[str, list[float]] = {order: [] for order in orders}
    for _ in range(rounds):
        for order in orders:
            read_epoch = functools.partial(_read_cache, cache, order, "w1", epochs=1)
            figures = run_within(None, read_epoch)
            rates[order].append(figures.samples_per_s)
            read_ratios[order].append(figures.disk_bytes_per_sample / sample_bytes)

    title = f"w1, first epoch of {COLD_CACHE} from disk, {cache_bytes >> 20:,} MiB"
    _report_rates(title, rates, "scale_samples_cold" if save else None)
    _report_read_ratios(title, read_ratios, "scale_samples_bytes" if save else None)


def _write_caches_of_many_samples(folder: Path) -> dict[str, Path]:
    graphs = make_graphs("w1", COUNTS["w1"])
    small = folder / "10,000"
    loaderkit.pack(graphs[:10_000], small, workers=0)
    large = folder / "100,000"
    repeated = [graphs[number % len(graphs)] for number in range(100_000)]
    loaderkit.pack(repeated, large, workers=0)
    # Files of their own: each takes its own part of the page cache and of the disk.
    copied = folder / "1,000,000"
    _repeat_shards(large, copied, 10 * len(load_manifest(large).shards), shutil.copy)
    # All of 10^7 would not fit in memory here: ten names for each file of 10^6.
    linked = folder / "10,000,000"
    _repeat_shards(copied, linked, 10 * len(load_manifest(copied).shards), os.link)
    return {f"{path.name} graphs": path for path in (small, large, copied, linked)}


# A cache larger than memory.


class ReadingFigures(NamedTuple):
    """Of reading for some seconds."""

    samples_per_s: float
    disk_bytes_per_sample: float


def read_larger_than_memory(folder: Path, rounds: int, *, save: bool) -> None:
    """Read a cache, and files, in a process that can keep a part of them."""
    distinct = make_graphs("w2", DISTINCT_POCKETS)
    graphs = [distinct[number % len(distinct)] for number in range(POCKETS)]
    cache = folder / "cache"
    loaderkit.pack(graphs, cache, workers=0)
    files = folder / "pt"
    files.mkdir()
    for number, graph in enumerate(graphs):
        torch.save(graph, files / f"{number:06}.pt")

    cache_bytes = sum(file.stat().st_size for file in cache.glob("*.h5"))
    limit_bytes = cache_bytes // 4 + READER_BYTES
    contestants: dict[str, Callable[[], ReadingFigures]] = {
        "torch.load per item, shuffled": functools.partial(_read_files, files),
        "loaderkit, shuffled": functools.partial(_read_cache, cache, "shuffled", "w2"),
        "loaderkit, blocks": functools.partial(_read_cache, cache, "blocks", "w2"),
        "loaderkit, in order": functools.partial(_read_cache, cache, "in order", "w2"),
    }
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    read_ratios: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, read_for_seconds in contestants.items():
            figures = run_within(limit_bytes, read_for_seconds)
            rates[name].append(figures.samples_per_s)
            sample_bytes = cache_bytes / POCKETS
            read_ratios[name].append(figures.disk_bytes_per_sample / sample_bytes)

    title = (
        f"w2 of {cache_bytes >> 20:,} MiB where {limit_bytes >> 20:,} MiB may be used"
    )
    _report_rates(title, rates, "scale_memory" if save else None)
    _report_read_ratios(title, read_ratios, "scale_memory_bytes" if save else None)


def _report_rates(title: str, rates: dict[str, list[float]], save: str | None) -> None:
    baseline = statistics.median(next(iter(rates.values())))
    rows = [
        Row.of_values(name, values, "samples/s", baseline=baseline)
        for name, values in rates.items()
    ]
    report(title, rows, save=save)


def _report_read_ratios(
    title: str, read_ratios: dict[str, list[float]], save: str | None
) -> None:
    rows = [
        Row.of_values(name, values, "x", baseline=1)
        for name, values in read_ratios.items()
    ]
    report(f"{title}, bytes read for each byte of the samples", rows, save=save)


def _read_files(folder: Path) -> ReadingFigures:
    files = PtFiles(folder)

    def load_rows(rows: NDArray[np.int64]) -> None:
        for row in rows.tolist():
            files[row]

    return _measure_reading(len(files), load_rows, "shuffled", BATCH["w2"])


def _read_cache(
    path: Path, order: Order, workload: str, epochs: int | None = None
) -> ReadingFigures:
    dataset = loaderkit.open_cache(path, checksums="never")
    batch_size = BATCH[workload]
    return _measure_reading(len(dataset), dataset.batch, order, batch_size, epochs)


def _measure_reading(
    count: int,
    read_rows: Callable[[NDArray[np.int64]], object],
    order: Order,
    batch_size: int,
    epochs: int | None = None,
) -> ReadingFigures:
    """Read so many epochs; where none are given, for ``READING_S``."""
    disk_bytes_before = disk_bytes_read()
    start = time.perf_counter()
    samples = 0
    last_sample = None if epochs is None else epochs * (count - count % batch_size)
    for rows in _endless_batches(count, order, batch_size):
        read_rows(rows)
        samples += len(rows)
        is_over = time.perf_counter() - start > READING_S
        if samples == last_sample or (last_sample is None and is_over):
            break
    seconds = time.perf_counter() - start
    disk_bytes = disk_bytes_read() - disk_bytes_before
    return ReadingFigures(samples / seconds, disk_bytes / samples)


def _endless_batches(
    count: int, order: Order, batch_size: int
) -> Iterator[NDArray[np.int64]]:
    generator = np.random.default_rng(0)
    while True:
        rows = np.arange(count)
        if order == "shuffled":
            rows = generator.permutation(count)
        elif order == "blocks":
            rows = _shuffle_in_blocks(rows, generator)
        for start in range(0, count - batch_size + 1, batch_size):
            yield rows[start : start + batch_size]


def _shuffle_in_blocks(
    rows: NDArray[np.int64], generator: np.random.Generator
) -> NDArray[np.int64]:
    blocks = np.array_split(rows, len(rows) // BLOCK_ROWS)
    block_order = generator.permutation(len(blocks))
    drawn = np.concatenate([blocks[number] for number in block_order])
    windows = np.array_split(drawn, max(1, len(rows) // WINDOW_ROWS))
    return np.concatenate([generator.permutation(window) for window in windows])


if __name__ == "__main__":
    main()
