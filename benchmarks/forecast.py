"""Is what a plan says of reading true?  Its forecast against epochs that are read.

``python -m benchmarks.forecast [--scale 0.2] [--save]``: W1 and W2, in memory and in
processes that may use less memory than the cache has bytes, in order, in blocks and
shuffled.  Each plan's bytes from disk and samples a second stand beside those of the
epochs after the first.  It makes memory cgroups (version 1, as root), and takes 3 GB of
disk.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch

import loaderkit
from benchmarks.harness import MIB, Row, parse_scale_and_save, report
from benchmarks.memory_cgroup import READER_BYTES, disk_bytes_read, run_within
from benchmarks.workloads import BATCH, count_samples, make_graphs

if TYPE_CHECKING:
    from collections.abc import Iterable

Shuffle: TypeAlias = bool | Literal["block"]

SAMPLES = {"w1": 400_000, "w2": 4_000}
DISTINCT_GRAPHS = 100
"""The samples repeat so many graphs: making all of them would take minutes."""
ORDERS: dict[str, Shuffle] = {"in order": False, "in blocks": "block", "shuffled": True}
READING_S = 6.0
"""How long epochs after the first are read."""
MOST_FIRST_EPOCH_S = 3 * READING_S


class EpochFigures(NamedTuple):
    """What is forecast of an epoch, or was measured."""

    samples_per_s: float
    disk_mib: float
    """From disk in an epoch."""


class Comparison(NamedTuple):
    """A plan's forecast, and what came of it."""

    forecast: EpochFigures
    measured: EpochFigures


def main() -> None:
    options = parse_scale_and_save(__doc__)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    rate_rows: list[Row] = []
    disk_rows: list[Row] = []
    for workload, most_samples in SAMPLES.items():
        samples = max(1000, round(most_samples * options.scale))
        for name, comparison in _compare_workload(workload, samples).items():
            forecast, measured = comparison
            rate_rows += _pair_of_rows(
                name, forecast.samples_per_s, measured.samples_per_s, "samples/s"
            )
            disk_rows += _pair_of_rows(
                name, forecast.disk_mib, measured.disk_mib, "MiB"
            )

    save = "forecast" if options.save else None
    report("samples a second, forecast and read", rate_rows, save=save)
    save = "forecast_bytes" if options.save else None
    report("from disk in an epoch, forecast and read", disk_rows, save=save)


def _compare_workload(workload: str, samples: int) -> dict[str, Comparison]:
    """Read a workload in each order, with all of it in memory and with a quarter."""
    distinct = make_graphs(workload, DISTINCT_GRAPHS)
    graphs = [distinct[number % len(distinct)] for number in range(samples)]
    comparisons = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cache")
        loaderkit.pack(graphs, path)
        cache_bytes = sum(file.stat().st_size for file in path.glob("*.h5"))
        quarter_bytes = cache_bytes // 4 + READER_BYTES
        for part, limit_bytes in (("all", None), ("a quarter", quarter_bytes)):
            for order, shuffle in ORDERS.items():
                compare = functools.partial(
                    _compare_forecast, path, BATCH[workload], shuffle
                )
                name = f"{workload.upper()} {order}, {part} of it in memory"
                comparisons[name] = run_within(limit_bytes, compare)
    return comparisons


def _compare_forecast(path: Path, batch_size: int, shuffle: Shuffle) -> Comparison:
    """Plan, read for some seconds, and give both figures."""
    dataset = loaderkit.open_cache(path, checksums="never")
    loader = loaderkit.build_loader(
        dataset, batch_size=batch_size, shuffle=shuffle, num_workers=0, read_ahead=0
    )
    forecast = loader.plan.reading
    # A cache was opened, and no code of a user's reads it: both are known.
    assert forecast is not None
    assert forecast.samples_per_s is not None
    print(forecast, file=sys.stderr)

    # The first epoch fills the page cache; the forecast is of the epochs after it.
    start = time.perf_counter()
    for _ in loader:
        if time.perf_counter() - start > MOST_FIRST_EPOCH_S:
            break

    disk_bytes_before = disk_bytes_read()
    start = time.perf_counter()
    samples = _count_samples_until(loader, start + READING_S)
    seconds = time.perf_counter() - start
    disk_bytes_per_sample = (disk_bytes_read() - disk_bytes_before) / samples

    return Comparison(
        EpochFigures(forecast.samples_per_s, forecast.epoch_bytes / MIB),
        EpochFigures(samples / seconds, disk_bytes_per_sample * len(dataset) / MIB),
    )


def _count_samples_until(loader: Iterable[object], deadline: float) -> int:
    """Read epoch after epoch until the clock shows so much."""
    samples = 0
    while time.perf_counter() < deadline:
        for batch in loader:
            samples += count_samples(batch)
            if time.perf_counter() >= deadline:
                break
    return samples


def _pair_of_rows(name: str, forecast: float, measured: float, unit: str) -> list[Row]:
    # Where nothing came from disk, the forecast is right if it says less than one.
    is_right = 1.0 if forecast < 1 else 0.0
    ratio = forecast / measured if measured else is_right
    return [
        Row.of_one_value(f"{name}: read", measured, unit, ratio=1.0),
        Row.of_one_value("the plan's forecast", forecast, unit, ratio=ratio),
    ]


if __name__ == "__main__":
    main()
