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

ROUNDS = 3
SAMPLE_FLOATS = 25_000
"""100 kB a sample."""
CHILD = """
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
            os.environ["XDG_CACHE_HOME"] = str(Path(folder, "home"))
            lines += _measure(Path(folder, "cache"), megabytes)
    print("\n".join(lines))
    if options.save:
        (RESULTS / "checksums.txt").write_text("\n".join([*lines, ""]))


def _measure(path: Path, megabytes: int) -> list[str]:
    samples = [{"x": torch.rand(SAMPLE_FLOATS)} for _ in range(64)]
    loaderkit.pack(samples * (megabytes * 10 // 64), path, workers=0)
    files = list(path.glob("*.h5"))
    size = sum(file.stat().st_size for file in files)
    time.sleep(2.5)  # a file is remembered when it is two seconds old

    warm = _median(lambda: _hash_all(path))
    cold = _median(lambda: _hash_all(path), before=lambda: _drop(files))
    never = _median_of_children(path, "never")
    always = _median_of_children(path, "always")
    first = _first_batch_s(path, "once")
    second = _median_of_children(path, "once")
    return [
        f"{size / 1e6:,.0f} MB in {len(files)} shards",
        f"  hashing, in page cache      {size / warm / 1e9:8.2f} GB/s",
        f"  hashing, dropped from it    {size / cold / 1e9:8.2f} GB/s",
        f"  first batch, never          {never * 1e3:8.1f} ms",
        f"  first batch, always         {always * 1e3:8.1f} ms",
        f"  first batch, once: first    {first * 1e3:8.1f} ms",
        f"  first batch, once: second   {second * 1e3:8.1f} ms",
    ]


def _hash_all(path: Path) -> None:
    for shard in load_manifest(path).shards:
        check_digest(path, shard)


def _drop(files: list[Path]) -> None:
    """Ask the kernel to forget the files' pages."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _median(
    run: Callable[[], None], before: Callable[[], None] = lambda: None
) -> float:
    times = []
    for _ in range(ROUNDS):
        before()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _median_of_children(path: Path, checksums: str) -> float:
    return statistics.median(_first_batch_s(path, checksums) for _ in range(ROUNDS))


def _first_batch_s(path: Path, checksums: str) -> float:
    """Measure the first batch of 32 samples in a new process."""
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(path), checksums]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(told.stdout)


if __name__ == "__main__":
    main()
