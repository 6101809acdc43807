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
from typing import TYPE_CHECKING

import psutil
import torch
from torch_geometric.data import Data

import loaderkit
from benchmarks.harness import (
    MIB,
    Row,
    anonymous_bytes,
    measure_rates,
    parse_scale_and_save,
    report,
)
from benchmarks.workloads import COUNTS, make_graphs, write_pt_files
from loaderkit.cache.files import load_manifest
from loaderkit.cache.layout import ALIGNMENT
from loaderkit.cache.manifest import write_manifest
from loaderkit.cache.shard_table import ShardTable
from loaderkit.datasets.pt_folder import PtFolder

if TYPE_CHECKING:
    from collections.abc import Callable

    from loaderkit.cache.shards import Checksums

WORKERS = 2
PACKED_SHARE = {"w1": 1.0, "w2": 0.5}
"""Part of a workload's graphs that is packed; files of W2 are 20 times larger."""
OPENINGS = 20
OPENING_LIMIT_MS = 20
PROCESS_LIMIT_MIB = 256
"""What a packing process may take."""
FILES_A_TASK = 64


def main() -> None:
    options = parse_scale_and_save(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        rows = _time_openings(Path(folder), options.scale)
        report("opening", rows, save="opening" if options.save else None)

        for workload, share in PACKED_SHARE.items():
            count = int(COUNTS[workload] * options.scale * share)
            graphs = make_graphs(workload, count)
            files = write_pt_files(graphs, Path(folder, workload))
            rows = _measure_packing(files, Path(folder, "packed.lk"))
            title = f"packing {count:,} files of {workload} with {WORKERS} processes"
            report(title, rows, save=f"packing_{workload}" if options.save else None)


def _time_openings(folder: Path, scale: float) -> list[Row]:
    graphs = make_graphs("w1", 2_000)
    loaderkit.pack(graphs, folder / "small.lk")
    many = int(100_000 * scale)
    repeated = [graphs[number % len(graphs)] for number in range(many)]
    loaderkit.pack(repeated, folder / "many.lk")
    _write_sparse_cache(folder / "sparse.lk", 10**9)

    return [
        _time_opening("2,000 graphs", folder / "small.lk"),
        _time_opening(f"{many:,} graphs", folder / "many.lk"),
        # Hashing the sparse file would take minutes, and nobody wrote its checksum.
        _time_opening("10^9 rows of a sparse file", folder / "sparse.lk", "never"),
    ]


def _time_opening(name: str, path: Path, checksums: Checksums = "once") -> Row:
    """Time opening a cache and reading its first sample."""
    times_ms = []
    for _ in range(OPENINGS):
        start = time.perf_counter()
        loaderkit.open_cache(path, checksums=checksums)[0]
        times_ms.append(1000 * (time.perf_counter() - start))
    median_ms = sorted(times_ms)[OPENINGS // 2]
    low_ms, high_ms = min(times_ms), max(times_ms)
    return Row(name, median_ms, low_ms, high_ms, "ms", OPENING_LIMIT_MS / median_ms)


def _write_sparse_cache(path: Path, samples: int) -> None:
    """Make a cache of so many samples whose file takes no room on disk.

    The manifest of a small cache is changed to say that its arrays are long and lie
    behind the end of the file, which then is extended by a hole.
    """
    loaderkit.pack([Data(x=torch.zeros(1, 1)) for _ in range(1000)], path)
    manifest = load_manifest(path)
    [shard] = manifest.shards

    offset = _align(shard.bytes)
    arrays = {}
    for name, array in shard.arrays.items():
        rows = samples + 1 if name.endswith("/offsets") else samples
        shape = (rows, *array.shape[1:])
        arrays[name] = replace(array, shape=shape, offset=offset)
        offset += _align(arrays[name].nbytes)

    os.truncate(path / shard.file, offset)
    sparse_shard = replace(shard, samples=samples, bytes=offset, arrays=arrays)
    manifest = replace(manifest, shards=ShardTable.of([sparse_shard]))
    (path / "manifest.json").write_text(write_manifest(manifest))


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _measure_packing(files: Path, cache_path: Path) -> list[Row]:
    """Hold packing against only reading the files, with as many processes."""
    count = len(list(files.iterdir()))

    def read_files() -> int:
        tasks = [
            range(start, min(start + FILES_A_TASK, count))
            for start in range(0, count, FILES_A_TASK)
        ]
        fork = multiprocessing.get_context("fork")
        with fork.Pool(WORKERS, _start_reader, (PtFolder(files),)) as pool:
            return sum(pool.imap_unordered(_read_rows, tasks))

    def pack_files() -> int:
        loaderkit.pack(files, cache_path, workers=WORKERS, overwrite=True)
        return count

    rows = measure_rates(
        {"only reading the files": read_files, "pack": pack_files}, rounds=3
    )

    peak_mib = _peak_private_bytes(pack_files) / MIB
    # The workers, and the process that writes.
    limit_mib = PROCESS_LIMIT_MIB * (WORKERS + 1)
    name = f"peak private memory of all processes, of {limit_mib} MiB"
    rows.append(Row.of_one_value(name, peak_mib, "MiB", ratio=limit_mib / peak_mib))
    return rows


_SOURCES: list[PtFolder] = []
"""Of a reading process: what ``_start_reader`` was given."""


def _start_reader(source: PtFolder) -> None:
    torch.set_num_threads(1)
    _SOURCES[:] = [source]


def _read_rows(rows: range) -> int:
    [source] = _SOURCES
    return len([source.read(row) for row in rows])


def _peak_private_bytes(run: Callable[[], object]) -> int:
    """Watch this process and its children: the most they held beyond the start."""
    own_process = psutil.Process()
    bytes_at_start = anonymous_bytes()
    peak_bytes = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak_bytes
        while not done.wait(0.01):
            total_bytes = anonymous_bytes() - bytes_at_start
            for child in own_process.children(recursive=True):
                # A worker may end while it is looked at.  Its USS leaves out what a
                # fork shares with this process, which was counted already.
                with contextlib.suppress(psutil.Error, OSError):
                    total_bytes += child.memory_full_info().uss
            peak_bytes = max(peak_bytes, total_bytes)

    thread = threading.Thread(target=watch)
    thread.start()
    run()
    done.set()
    thread.join()
    return peak_bytes


if __name__ == "__main__":
    main()
