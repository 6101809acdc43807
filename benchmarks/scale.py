"""What data of other sizes costs: many shards, and a cache larger than memory.

``python -m benchmarks.scale shards``: shuffled batches of W1 from 1, 10, 60 and 500
files, in page cache.  ``python -m benchmarks.scale open``: opening caches of up to
10,000 files where a process may have 256 open; the files are names of a few, so they
take 1 GB of disk at most.  ``python -m benchmarks.scale memory``: W2 in a process that
may use less memory than the cache has bytes; it makes a memory cgroup (version 1, as
root), and takes 1.6 GB of disk.  ``--save`` keeps the tables.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch_geometric.data import Data

import loaderkit
from benchmarks.harness import Row, rates, report
from benchmarks.workloads import BATCH, COUNTS, PtFiles, make
from loaderkit.cache.files import load_manifest
from loaderkit.cache.layout import shard_name
from loaderkit.cache.manifest import write_manifest
from loaderkit.cache.shard_table import ShardTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

SHARD_BYTES = {1: 256 << 20, 10: 5_200_000, 60: 480_000, 500: 90_000}
"""Bytes as packed, before they are narrowed, for about so many files of W1."""
CGROUPS = Path("/sys/fs/cgroup/memory")
OWN_BYTES = 96 << 20
"""What a forked reader needs of its own: batches, and what it writes to."""
SECONDS = 10.0
"""How long each contestant reads a turn where data exceed memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["shards", "open", "memory"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "shards":
            many_shards(Path(folder), options.rounds, save=options.save)
        elif options.what == "open":
            many_openings(Path(folder), options.rounds, save=options.save)
        else:
            larger_than_memory(Path(folder), options.rounds, save=options.save)


def many_shards(folder: Path, rounds: int, *, save: bool) -> None:
    """Compare batches from one file with those from many."""
    graphs = make("w1", COUNTS["w1"])
    contestants: dict[str, Callable[[], int]] = {}
    for shards, shard_bytes in SHARD_BYTES.items():
        path = folder / str(shards)
        dataset = loaderkit.pack(graphs, path, workers=0, shard_bytes=shard_bytes)
        files = len(list(path.glob("*.h5")))
        contestants[f"{files} shards"] = _shuffled(dataset, BATCH["w1"])
    rows = rates(contestants, rounds=rounds)
    title = f"w1: {len(graphs):,} graphs, batch {BATCH['w1']}, shuffled, 0 workers"
    report(title, rows, save="scale_shards" if save else None)


def _shuffled(dataset: Any, batch: int) -> Callable[[], int]:
    def read() -> int:
        rows = np.random.default_rng(0).permutation(len(dataset))
        for start in range(0, len(rows), batch):
            dataset.batch(rows[start : start + batch])
        return len(rows)

    return read


def many_openings(folder: Path, rounds: int, *, save: bool) -> None:
    """Compare opening one file with opening thousands."""
    graphs = make("w1", COUNTS["w1"])
    loaderkit.pack(graphs, folder / "some", workers=0, shard_bytes=480_000)
    tiny = [Data(x=torch.zeros(1, 1)) for _ in range(10**9 // 8_000)]
    loaderkit.pack(tiny, folder / "large", workers=0)
    caches = {}
    for shards in (1, 100, 1_000, 10_000):
        caches[f"{shards:,} shards"] = folder / str(shards)
        _repeat(folder / "some", folder / str(shards), shards)
    caches["8,000 shards of 10^9 samples"] = folder / "billion"
    _repeat(folder / "large", folder / "billion", 8_000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    opened: dict[str, list[float]] = {name: [] for name in caches}
    first: dict[str, list[float]] = {name: [] for name in caches}
    generator = np.random.default_rng(0)
    for turn in range(rounds + 1):
        for name, path in caches.items():
            start = time.perf_counter()
            dataset = loaderkit.open_cache(path)
            len(dataset), dataset[0]
            middle = time.perf_counter()
            dataset.batch(generator.integers(len(dataset), size=BATCH["w1"]))
            end = time.perf_counter()
            del dataset  # its files are unmapped here, not in the next one's time
            if turn:  # each file is hashed in the first
                opened[name].append(1000 * (middle - start))
                first[name].append(1000 * (end - middle))
    kinds = {"open_cache, len and [0]": opened, "the first shuffled batch": first}
    for kind, times in kinds.items():
        base = float(np.median(times["1 shards"]))
        rows = []
        for name, each in times.items():
            median = float(np.median(each))
            rows.append(Row(name, median, min(each), max(each), "ms", base / median))
        saved = "scale_open" if times is opened else "scale_open_first_batch"
        title = f"{kind}, where 256 files may be open"
        report(title, rows, save=saved if save else None)


def _repeat(cache: Path, path: Path, count: int) -> None:
    """Make a cache of so many shards, each another name of one of a cache's."""
    path.mkdir()
    manifest = load_manifest(cache)
    packed, shards = list(manifest.shards), []
    for number in range(count):
        shard = packed[number % len(packed)]
        name = shard_name(number, shard.xxh3)
        os.link(cache / shard.file, path / name)
        shards.append(replace(shard, file=name))
    manifest = replace(manifest, shards=ShardTable.of(shards))
    (path / "manifest.json").write_text(write_manifest(manifest))


def larger_than_memory(folder: Path, rounds: int, *, save: bool) -> None:
    """Read a cache, and files, in a process that can keep a part of them."""
    few = make("w2", 100)
    count = 4000
    source = [few[number % len(few)] for number in range(count)]
    cache = folder / "cache"
    loaderkit.pack(source, cache, workers=0)
    files = folder / "pt"
    files.mkdir()
    for number in range(count):
        torch.save(few[number % len(few)], files / f"{number:06}.pt")
    cache_bytes = sum(file.stat().st_size for file in cache.glob("*.h5"))
    limit = cache_bytes // 4 + OWN_BYTES
    ways = {
        "torch.load per item, shuffled": (files, "shuffled"),
        "loaderkit, shuffled": (cache, "shuffled"),
        "loaderkit, blocks": (cache, "blocks"),
        "loaderkit, in order": (cache, "in order"),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (path, order) in ways.items():
            speed, read_bytes = _in_a_cgroup(limit, path, order)
            speeds[name].append(speed)
            ratios[name].append(read_bytes / (cache_bytes / count))
    base = float(np.median(speeds["torch.load per item, shuffled"]))
    title = f"w2 of {cache_bytes >> 20:,} MiB where {limit >> 20:,} MiB may be used"
    for kind, unit, values in (
        ("", "samples/s", speeds),
        (", bytes read for each byte of the samples", "x", ratios),
    ):
        rows = [
            Row(
                name,
                float(np.median(each)),
                min(each),
                max(each),
                unit,
                float(np.median(each)) / (base if not kind else 1),
            )
            for name, each in values.items()
        ]
        kept = f"scale_memory{'_bytes' if kind else ''}" if save else None
        report(title + kind, rows, save=kept)


def _in_a_cgroup(limit: int, path: Path, order: str) -> tuple[float, float]:
    """Read for some seconds where so many bytes may be used.

    Returns:
        Samples a second, and bytes that the disk gave for each sample.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_read_limited, args=(limit, path, order, theirs)
    )
    process.start()
    found: tuple[float, float] = ours.recv()
    process.join()
    leave_cgroup(process.pid)
    return found


def _read_limited(limit: int, path: Path, order: str, answers: Any) -> None:
    enter_cgroup(limit)
    if path.name == "pt":
        files = PtFiles(path)
        count = len(files)

        def read(rows: NDArray[np.int64]) -> Any:
            return [files[row] for row in rows.tolist()]
    else:
        dataset = loaderkit.open_cache(path, checksums="never")
        count, read = len(dataset), dataset.batch
    before, start, samples = disk_bytes_read(), time.perf_counter(), 0
    for rows in _batches(count, order):
        read(rows)
        samples += len(rows)
        if time.perf_counter() - start > SECONDS:
            break
    seconds = time.perf_counter() - start
    answers.send((samples / seconds, (disk_bytes_read() - before) / samples))


def _batches(count: int, order: str) -> Iterator[NDArray[np.int64]]:
    """Give batches without an end, in an order."""
    generator, batch = np.random.default_rng(0), BATCH["w2"]
    while True:
        rows = np.arange(count)
        if order == "shuffled":
            rows = generator.permutation(count)
        elif order == "blocks":
            blocks = np.array_split(rows, count // 64)
            order_of_blocks = generator.permutation(len(blocks))
            rows = np.concatenate([blocks[number] for number in order_of_blocks])
            windows = np.array_split(rows, max(1, count // 1024))
            rows = np.concatenate([generator.permutation(each) for each in windows])
        for start in range(0, count - batch + 1, batch):
            yield rows[start : start + batch]


def enter_cgroup(limit: int | None) -> None:
    """Have this process use so many bytes at most, and begin with no file in memory.

    Args:
        limit: Bytes, pages of files included; None for no limit.
    """
    os.sync()  # pages that wait to be written are not dropped
    Path("/proc/sys/vm/drop_caches").write_text("1")
    if limit is None:
        return
    group = CGROUPS / f"loaderkit-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(limit))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def leave_cgroup(pid: int | None) -> None:
    """Remove the group of a process that has ended, if it made one."""
    group = CGROUPS / f"loaderkit-{pid}"
    if group.exists():
        group.rmdir()


def disk_bytes_read() -> int:
    """Count the bytes that this process had the disk read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


if __name__ == "__main__":
    main()
