"""With 2 workers: samples a second, and the private memory of each worker.

Run it with ``python -m benchmarks.workers [--scale 0.1] [--save]``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch_geometric.loader import DataLoader as GraphLoader

import loaderkit
from benchmarks.harness import Row, anonymous_bytes, rates, report
from benchmarks.workloads import BATCH, COUNTS, InMemory, make

ROUNDS = 3
"""Times the memory is measured; a worker's own varies by 2 MiB."""


class Idle(Dataset[Any]):
    """Nothing to read, with a dataset at hand: what a worker costs by itself."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> Any:
        return torch.zeros(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        graphs = make("w1", int(COUNTS["w1"] * options.scale))
        cache = loaderkit.pack(graphs, Path(folder, "w1.lk"))
        memory = InMemory(graphs)
        shared: dict[str, Any] = {"batch_size": BATCH["w1"], "shuffle": True}
        contestants = {
            "InMemoryDataset, 0 workers": GraphLoader(memory, **shared),
            "InMemoryDataset, 2 workers": GraphLoader(memory, num_workers=2, **shared),
            "loaderkit, 0 workers": DataLoader(
                cache, collate_fn=cache.collate, **shared
            ),
            "loaderkit, 2 workers": DataLoader(
                cache, collate_fn=cache.collate, num_workers=2, **shared
            ),
        }
        rows = rates(
            {n: _reader(c) for n, c in contestants.items()}, rounds=options.rounds
        )
        title = f"w1 with workers: {len(graphs):,} graphs, batch {BATCH['w1']}"
        report(title, rows, save="workers_rate" if options.save else None)
        found = []
        for workload in ("w1", "w2"):
            for part in (0.25, 1.0):
                count = int(COUNTS[workload] * options.scale * part)
                found.append(
                    _private(workload, count, Path(folder, f"{workload}{part}"))
                )
        title = (
            "private memory of a worker above an idle one, in 3 epochs; x is batches"
        )
        report(title, found, save="workers_memory" if options.save else None)


def _reader(loader: Any) -> Any:
    return lambda: sum(batch.num_graphs for batch in loader)


def _private(workload: str, count: int, path: Path) -> Row:
    """Measure what a worker holds at most, in batches (the ratio) and MiB.

    The workers are spawned, so that no page of theirs is the parent's.
    """
    cache = loaderkit.pack(make(workload, count), path)
    batch = BATCH[workload]
    nbytes = int(cache.sizes().bytes.mean() * batch)
    shared: dict[str, Any] = {
        "num_workers": 2,
        "persistent_workers": True,
        "multiprocessing_context": "spawn",
    }
    grown = []
    for _ in range(ROUNDS):
        idle = _largest(DataLoader(Idle(cache), batch_size=1, **shared))
        loader = DataLoader(
            cache, batch_size=batch, shuffle=True, collate_fn=cache.collate, **shared
        )
        grown.append((_largest(loader) - idle) / 2**20)
    name = f"{workload}, {count:,} graphs, a batch is {nbytes / 2**20:.2f} MiB"
    middle = statistics.median(grown)
    ratio = middle * 2**20 / nbytes
    return Row(name, middle, min(grown), max(grown), "MiB", ratio)


def _largest(loader: DataLoader[Any]) -> int:
    """Read 3 epochs, and ask the workers after every 8th batch."""
    most = 0
    for _ in range(3):
        for number, _batch in enumerate(loader):
            if number % 8 == 7:
                held = [anonymous_bytes(each.pid or 0) for each in active_children()]
                most = max(most, *held)
    return most


if __name__ == "__main__":
    main()
