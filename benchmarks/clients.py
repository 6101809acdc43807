"""Samples of a cache that somebody else joins or transforms, without workers.

Run it with ``python -m benchmarks.clients [--scale 0.1] [--save]``.  PyG's own
DataLoader reads a cache, and ``build_loader`` reads one with four of PyG's transforms,
called with each sample or with each batch; each takes turns with PyG's DataLoader over
an ``InMemoryDataset``, pair by pair, in CPU time.  An ``InMemoryDataset`` keeps each
sample it was asked for, so that all epochs but the first, which is not counted, only
copy objects.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import (
    AddSelfLoops,
    Compose,
    Distance,
    NormalizeFeatures,
    RandomRotate,
)

import loaderkit
from benchmarks.harness import duels, report, scale_and_save
from benchmarks.workloads import BATCH, InMemory, make

if TYPE_CHECKING:
    from collections.abc import Callable

GRAPHS = {"w1": 4_000, "w2": 400}
PAIRS = 20


def main() -> None:
    options = scale_and_save(__doc__)
    torch.set_num_threads(1)
    rounds = max(4, round(PAIRS * options.scale))
    rows = []
    for workload, count in GRAPHS.items():
        graphs = make(workload, max(256, round(count * options.scale)))
        if workload == "w2":  # it has no places
            for graph in graphs:
                graph.pos = torch.randn(graph.num_nodes, 3)
        transform = Compose(
            [RandomRotate(180), Distance(), NormalizeFeatures(), AddSelfLoops()]
        )
        wanted: dict[str, Any] = {"batch_size": BATCH[workload], "shuffle": True}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "cache.lk")
            cache = loaderkit.pack(graphs, path)
            changed = loaderkit.open_cache(path, transform=transform)
            in_memory = InMemory(graphs)
            transformed = InMemory(graphs)
            transformed.transform = transform
            name = workload.upper()
            entrants = {
                f"{name}, PyG's loader": _epoch(DataLoader(cache, **wanted)),
                "InMemoryDataset": _epoch(DataLoader(in_memory, **wanted)),
            }
            rows += duels(entrants, rounds=rounds, clock=time.process_time)
            ours = loaderkit.build_loader(changed, num_workers=0, **wanted)
            entrants = {
                f"{name}, four transforms": _epoch(ours),
                "InMemoryDataset": _epoch(DataLoader(transformed, **wanted)),
            }
            rows += duels(entrants, rounds=rounds, clock=time.process_time)
            batches = loaderkit.build_loader(
                cache, num_workers=0, batch_transform=transform, **wanted
            )
            entrants = {
                f"{name}, four transforms of batches": _epoch(batches),
                "InMemoryDataset": _epoch(DataLoader(transformed, **wanted)),
            }
            rows += duels(entrants, rounds=rounds, clock=time.process_time)
    title = "samples that others join or transform, 0 workers, CPU time"
    report(title, rows, save="clients" if options.save else None)


def _epoch(loader: Any) -> Callable[[], int]:
    return lambda: sum(batch.num_graphs for batch in loader)


if __name__ == "__main__":
    main()
