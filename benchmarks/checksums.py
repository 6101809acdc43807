"""What hashing at first use costs: the first batch of a new cache, and of a known one.

Run it with ``python -m benchmarks.checksums [--megabytes 100 1000] [--save]``.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import loaderkit
from benchmarks.harness import RESULTS
from loaderkit.cache.files import check_digest, load_manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from loaderkit.cache.shards import Checksums

ROUNDS = 3
SAMPLE_FLOATS = 25_000
"""100 kB a sample."""
SAMPLES_A_MEGABYTE = 10
SETTLING_S = 2.5
"""A file's checksum is remembered only when the file is two seconds old."""
FIRST_BATCH_PROGRAM = """
import sys, time
import loaderkit
dataset = loaderkit.open_cache(sys.argv[1], checksums=sys.argv[2])
started = time.perf_counter()
dataset.batch(range(32))
print(time.perf_counter() - started)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()

    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    machine = f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    lines = [f"{versions}, {machine}; medians of {ROUNDS}"]
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            # What is remembered of checked files lies there: each size starts anew.
            os.environ["XDG_CACHE_HOME"] = str(Path(folder, "home"))
            lines += _measure_cache(Path(folder, "cache"), megabytes)

    print("\n".join(lines))
    if options.save:
        (RESULTS / "checksums.txt").write_text("\n".join([*lines, ""]))


def _measure_cache(path: Path, megabytes: int) -> list[str]:
    samples = [{"x": torch.rand(SAMPLE_FLOATS)} for _ in range(64)]
    repeats = megabytes * SAMPLES_A_MEGABYTE // len(samples)
    loaderkit.pack(samples * max(1, repeats), path, workers=0)
    files = list(path.glob("*.h5"))
    size_bytes = sum(file.stat().st_size for file in files)
    time.sleep(SETTLING_S)

    warm_s = _median_seconds(lambda: _hash_all_shards(path))
    cold_s = _median_seconds(
        lambda: _hash_all_shards(path),
        prepare=lambda: _drop_from_page_cache(files),
    )

    never_s = _median_first_batch_s(path, "never")
    always_s = _median_first_batch_s(path, "always")
    # The first reader of all hashes the files; the others trust what it remembered.
    first_once_s = _first_batch_s(path, "once")
    second_once_s = _median_first_batch_s(path, "once")
    return [
        f"{size_bytes / 1e6:,.0f} MB in {len(files)} shards",
        f"  hashing, in page cache      {size_bytes / warm_s / 1e9:8.2f} GB/s",
        f"  hashing, dropped from it    {size_bytes / cold_s / 1e9:8.2f} GB/s",
        f"  first batch, never          {never_s * 1e3:8.1f} ms",
        f"  first batch, always         {always_s * 1e3:8.1f} ms",
        f"  first batch, once: first    {first_once_s * 1e3:8.1f} ms",
        f"  first batch, once: second   {second_once_s * 1e3:8.1f} ms",
    ]


def _hash_all_shards(path: Path) -> None:
    for shard in load_manifest(path).shards:
        check_digest(path, shard)


def _drop_from_page_cache(files: list[Path]) -> None:
    """Ask the kernel to forget the files' pages."""
    for file in files:
        with file.open("rb") as stream:
            # Pages that are not on the disk yet are not dropped.
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _median_seconds(
    run: Callable[[], None], prepare: Callable[[], None] = lambda: None
) -> float:
    seconds = []
    for _ in range(ROUNDS):
        prepare()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _median_first_batch_s(path: Path, checksums: Checksums) -> float:
    return statistics.median(_first_batch_s(path, checksums) for _ in range(ROUNDS))


def _first_batch_s(path: Path, checksums: Checksums) -> float:
    """Measure the first batch of 32 samples in a new process."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        FIRST_BATCH_PROGRAM,
        str(path),
        checksums,
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(process.stdout)


if __name__ == "__main__":
    main()
