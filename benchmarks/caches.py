"""Opening a cache, and packing one.

Run it with ``python -m benchmarks.caches [--scale 0.1] [--save]``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch_geometric.data import Data

import loaderkit
from benchmarks.harness import Row, anonymous_bytes, rates, report, scale_and_save
from benchmarks.workloads import COUNTS, make, write_files
from loaderkit.cache.files import load_manifest
from loaderkit.cache.manifest import write_manifest
from loaderkit.cache.shard_table import ShardTable
from loaderkit.datasets.sources import PtFolder

if TYPE_CHECKING:
    from loaderkit.cache.shards import Checksums

WORKERS = 2


def main() -> None:
    options = scale_and_save(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        rows = _openings(Path(folder), options.scale)
        report("opening", rows, save="opening" if options.save else None)
        for workload in ("w1", "w2"):
            count = int(
                COUNTS[workload] * options.scale * (1 if workload == "w1" else 0.5)
            )
            files = write_files(make(workload, count), Path(folder, workload))
            found = _packing(files, Path(folder))
            title = f"packing {count:,} files of {workload} with {WORKERS} processes"
            report(title, found, save=f"packing_{workload}" if options.save else None)


def _openings(folder: Path, scale: float) -> list[Row]:
    graphs = make("w1", 2_000)
    loaderkit.pack(graphs, folder / "small.lk")
    many = int(100_000 * scale)
    loaderkit.pack([graphs[i % 2_000] for i in range(many)], folder / "many.lk")
    _stretch(folder / "sparse.lk", 10**9)
    names = {
        "2,000 graphs": folder / "small.lk",
        f"{many:,} graphs": folder / "many.lk",
        "10^9 rows of a sparse file": folder / "sparse.lk",
    }
    found = []
    for name, path in names.items():
        times = []
        # Hashing the sparse file would take minutes, and nobody wrote its checksum.
        checksums: Checksums = "never" if path.name == "sparse.lk" else "once"
        for _ in range(20):
            start = time.perf_counter()
            loaderkit.open_cache(path, checksums=checksums)[0]
            times.append(1000 * (time.perf_counter() - start))
        middle = sorted(times)[10]
        found.append(Row(name, middle, min(times), max(times), "ms", 20 / middle))
    return found


def _stretch(path: Path, samples: int) -> None:
    """Make a cache of so many samples whose file takes no room on disk."""
    loaderkit.pack([Data(x=torch.zeros(1, 1)) for _ in range(1000)], path)
    manifest = load_manifest(path)
    [shard] = manifest.shards
    at = -(-shard.bytes // 64) * 64
    arrays = {}
    for name, array in shard.arrays.items():
        rows = samples + 1 if name.endswith("/offsets") else samples
        shape = (rows, *array.shape[1:])
        arrays[name] = replace(array, shape=shape, offset=at)
        at += -(-arrays[name].nbytes // 64) * 64
    stretched = replace(shard, samples=samples, bytes=at, arrays=arrays)
    os.truncate(path / shard.file, at)
    manifest = replace(manifest, shards=ShardTable.of([stretched]))
    (path / "manifest.json").write_text(write_manifest(manifest))


def _packing(files: Path, folder: Path) -> list[Row]:
    count = len(list(files.iterdir()))

    def read() -> int:
        spans = [range(start, min(start + 64, count)) for start in range(0, count, 64)]
        forks = multiprocessing.get_context("fork")
        with forks.Pool(WORKERS, _start, (PtFolder(files),)) as pool:
            return sum(pool.imap_unordered(_read, spans))

    def packed() -> int:
        loaderkit.pack(files, folder / "packed.lk", workers=WORKERS, overwrite=True)
        return count

    rows = rates({"only reading the files": read, "pack": packed}, rounds=3)
    peak = _peak(lambda: packed())
    limit = 256 * (WORKERS + 1)
    name = f"peak private memory of all processes, of {limit} MiB"
    rows.append(Row(name, peak, peak, peak, "MiB", limit / peak))
    return rows


_SOURCE: list[PtFolder] = []


def _start(source: PtFolder) -> None:
    torch.set_num_threads(1)
    _SOURCE[:] = [source]


def _read(rows: range) -> int:
    return len([_SOURCE[0].read(row) for row in rows])


def _peak(run: Any) -> float:
    """Watch this process and its children: the most they held, in MiB."""
    me, most, done = psutil.Process(), [0], threading.Event()
    start = anonymous_bytes()

    def watch() -> None:
        while not done.wait(0.01):
            total = anonymous_bytes() - start
            for child in me.children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError):
                    total += child.memory_full_info().uss  # not what a fork shares
            most[0] = max(most[0], total)

    thread = threading.Thread(target=watch)
    thread.start()
    run()
    done.set()
    thread.join()
    return most[0] / 2**20


if __name__ == "__main__":
    main()
