"""With 2 workers: samples a second, and the private memory of each worker.

Run it with ``python -m benchmarks.workers [--scale 0.1] [--save]``.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from multiprocessing import active_children
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch_geometric.loader import DataLoader as GraphLoader

import loaderkit
from benchmarks.harness import MIB, Row, anonymous_bytes, measure_rates, report
from benchmarks.workloads import BATCH, COUNTS, InMemory, epoch_reader, make_graphs

if TYPE_CHECKING:
    from loaderkit.datasets.safe import SafeDataset

MEMORY_ROUNDS = 3
"""Times the memory is measured; a worker's own varies by 2 MiB."""
MEMORY_EPOCHS = 3
BATCHES_BETWEEN_READINGS = 8
"""Reading /proc after every batch would slow the workers down.  Chosen."""


class IdleDataset(Dataset[torch.Tensor]):
    """Nothing to read, with a dataset at hand: what a worker costs by itself."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.zeros(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    with tempfile.TemporaryDirectory() as folder:
        count = int(COUNTS["w1"] * options.scale)
        rows = _measure_rates_of_w1(count, Path(folder), options.rounds)
        title = f"w1 with workers: {count:,} graphs, batch {BATCH['w1']}"
        report(title, rows, save="workers_rate" if options.save else None)

        rows = []
        for workload in ("w1", "w2"):
            for share in (0.25, 1.0):
                count = int(COUNTS[workload] * options.scale * share)
                cache_path = Path(folder, f"{workload}{share}")
                rows.append(_measure_worker_memory(workload, count, cache_path))
        title = (
            "private memory of a worker above an idle one, in 3 epochs; x is batches"
        )
        report(title, rows, save="workers_memory" if options.save else None)


def _measure_rates_of_w1(count: int, folder: Path, rounds: int) -> list[Row]:
    graphs = make_graphs("w1", count)
    cache = loaderkit.pack(graphs, folder / "w1.lk")
    in_memory = InMemory(graphs)
    batching: dict[str, Any] = {"batch_size": BATCH["w1"], "shuffle": True}

    contestants = {}
    for num_workers in (0, 2):
        loader = GraphLoader(in_memory, num_workers=num_workers, **batching)
        name = f"InMemoryDataset, {num_workers} workers"
        contestants[name] = epoch_reader(loader)
    for num_workers in (0, 2):
        loader = DataLoader(
            cache, collate_fn=cache.collate, num_workers=num_workers, **batching
        )
        contestants[f"loaderkit, {num_workers} workers"] = epoch_reader(loader)
    return measure_rates(contestants, rounds=rounds)


def _measure_worker_memory(workload: str, count: int, cache_path: Path) -> Row:
    """Measure what a worker holds at most, in batches (the ratio) and MiB."""
    cache = loaderkit.pack(make_graphs(workload, count), cache_path)
    batch_size = BATCH[workload]
    batch_mib = int(cache.sizes().bytes.mean() * batch_size) / MIB

    above_idle_mib = []
    for _ in range(MEMORY_ROUNDS):
        idle_bytes = _largest_worker_bytes(_spawned_loader(IdleDataset(cache), 1))
        reading_bytes = _largest_worker_bytes(_cache_loader(cache, batch_size))
        above_idle_mib.append((reading_bytes - idle_bytes) / MIB)

    name = f"{workload}, {count:,} graphs, a batch is {batch_mib:.2f} MiB"
    return Row.of_values(name, above_idle_mib, "MiB", baseline=batch_mib)


def _cache_loader(cache: SafeDataset[Any], batch_size: int) -> DataLoader[Any]:
    return _spawned_loader(cache, batch_size, shuffle=True, collate_fn=cache.collate)


def _spawned_loader(
    dataset: Dataset[Any], batch_size: int, **options: Any
) -> DataLoader[Any]:
    """Make a loader whose workers are spawned: no page of theirs is the parent's."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="spawn",
        **options,
    )


def _largest_worker_bytes(loader: DataLoader[Any]) -> int:
    """Read some epochs, and look at the workers every few batches."""
    largest = 0
    for _ in range(MEMORY_EPOCHS):
        for batch_number, _batch in enumerate(loader, 1):
            if batch_number % BATCHES_BETWEEN_READINGS == 0:
                for worker in active_children():
                    largest = max(largest, anonymous_bytes(worker.pid or 0))
    return largest


if __name__ == "__main__":
    main()
