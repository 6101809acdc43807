"""Is what a plan says of reading true?  Its forecast against epochs that are read.

``python -m benchmarks.forecast [--scale 0.2] [--save]``: W1 and W2, in memory and in
processes that may use less memory than the cache has bytes, in order, in blocks and
shuffled.  Each plan's bytes from disk and samples a second stand beside those of the
epochs after the first.  It makes memory cgroups (version 1, as root), and takes 3 GB of
disk.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import loaderkit
from benchmarks.harness import Row, report, scale_and_save
from benchmarks.scale import OWN_BYTES, disk_bytes_read, enter_cgroup, leave_cgroup
from benchmarks.workloads import BATCH, make

SAMPLES = {"w1": 400_000, "w2": 4_000}
ORDERS: dict[str, Any] = {"in order": False, "in blocks": "block", "shuffled": True}
SECONDS = 6.0
"""How long epochs after the first are read."""
MIB = 1 << 20


def main() -> None:
    options = scale_and_save(__doc__)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    speeds: list[Row] = []
    amounts: list[Row] = []
    for workload, count in SAMPLES.items():
        few = make(workload, 100)
        samples = max(1000, round(count * options.scale))
        source = [few[number % len(few)] for number in range(samples)]
        with tempfile.TemporaryDirectory() as folder:
            loaderkit.pack(source, folder + "/cache")
            files = Path(folder, "cache").glob("*.h5")
            cache_bytes = sum(file.stat().st_size for file in files)
            for part, limit in (("all", None), ("a quarter", cache_bytes // 4)):
                for order, shuffle in ORDERS.items():
                    said, was = _in_a_child(folder + "/cache", workload, shuffle, limit)
                    name = f"{workload.upper()} {order}, {part} of it in memory"
                    speeds += _pair(name, said[0], was[0], "samples/s")
                    amounts += _pair(name, said[1], was[1], "MiB")
    save = "forecast" if options.save else None
    report("samples a second, forecast and read", speeds, save=save)
    save = f"{save}_bytes" if save else None
    report("from disk in an epoch, forecast and read", amounts, save=save)


def _pair(name: str, said: float, was: float, unit: str) -> list[Row]:
    ratio = said / was if was else float(said < 1)
    return [
        Row(f"{name}: read", was, was, was, unit, 1.0),
        Row("the plan's forecast", said, said, said, unit, ratio),
    ]


def _in_a_child(path: str, *settings: Any) -> Any:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_read, args=(path, *settings, theirs))
    process.start()
    answer = ours.recv()
    process.join()
    leave_cgroup(process.pid)
    return answer


def _read(
    path: str, workload: str, shuffle: Any, limit: int | None, answers: Any
) -> None:
    enter_cgroup(None if limit is None else limit + OWN_BYTES)
    dataset = loaderkit.open_cache(path, checksums="never")
    loader = loaderkit.build_loader(
        dataset, batch_size=BATCH[workload], shuffle=shuffle, num_workers=0,
        read_ahead=0,
    )  # fmt: skip
    forecast = loader.plan.reading
    assert forecast is not None
    begun = time.perf_counter()
    for _ in loader:  # the first epoch fills the page cache
        if time.perf_counter() - begun > 3 * SECONDS:
            break
    before, begun, samples = disk_bytes_read(), time.perf_counter(), 0
    while time.perf_counter() - begun < SECONDS:
        for batch in loader:
            samples += batch.num_graphs
            if time.perf_counter() - begun >= SECONDS:
                break
    seconds = time.perf_counter() - begun
    of_an_epoch = (disk_bytes_read() - before) * len(dataset) / samples
    said = (forecast.samples_per_s, forecast.epoch_bytes / MIB)
    print(forecast, file=sys.stderr)
    answers.send((said, (samples / seconds, of_an_epoch / MIB)))


if __name__ == "__main__":
    main()
