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
from benchmarks.harness import compare_in_pairs, parse_scale_and_save, report
from benchmarks.workloads import BATCH, InMemory, epoch_reader, make_graphs

if TYPE_CHECKING:
    from torch_geometric.data import Data

    from benchmarks.harness import Row

GRAPHS = {"w1": 2_000, "w2": 200}
PAIRS = 12
"""With so many graphs and pairs a run takes 2 minutes of CPU; most are transforms."""


def main() -> None:
    options = parse_scale_and_save(__doc__)
    torch.set_num_threads(1)
    rounds = max(4, round(PAIRS * options.scale))

    rows: list[Row] = []
    for workload, count in GRAPHS.items():
        graphs = make_graphs(workload, max(256, round(count * options.scale)))
        if workload == "w2":
            # The pockets of W2 have no positions, and Distance needs them.
            for graph in graphs:
                graph.pos = torch.randn(graph.num_nodes, 3)
        with tempfile.TemporaryDirectory() as folder:
            rows += _compare_clients(workload, graphs, Path(folder, "cache.lk"), rounds)

    title = "samples that others join or transform, 0 workers, CPU time"
    report(title, rows, save="clients" if options.save else None)


def _compare_clients(
    workload: str, graphs: list[Data], cache_path: Path, rounds: int
) -> list[Row]:
    """Hold three ways to read a cache against PyG's loader over the same graphs."""
    transform = Compose(
        [RandomRotate(180), Distance(), NormalizeFeatures(), AddSelfLoops()]
    )
    batching: dict[str, Any] = {"batch_size": BATCH[workload], "shuffle": True}

    cache = loaderkit.pack(graphs, cache_path)
    transformed_cache = loaderkit.open_cache(cache_path, transform=transform)
    in_memory = InMemory(graphs)
    transformed_in_memory = InMemory(graphs)
    transformed_in_memory.transform = transform

    plain_baseline = DataLoader(in_memory, **batching)
    transformed_baseline = DataLoader(transformed_in_memory, **batching)
    ours_by_sample = loaderkit.build_loader(
        transformed_cache, num_workers=0, **batching
    )
    ours_by_batch = loaderkit.build_loader(
        cache, num_workers=0, batch_transform=transform, **batching
    )

    rows: list[Row] = []
    for kind, loader, baseline in (
        ("PyG's loader", DataLoader(cache, **batching), plain_baseline),
        ("four transforms", ours_by_sample, transformed_baseline),
        ("four transforms of batches", ours_by_batch, transformed_baseline),
    ):
        contestants = {
            f"{workload.upper()}, {kind}": epoch_reader(loader),
            "InMemoryDataset": epoch_reader(baseline),
        }
        compared = compare_in_pairs(contestants, rounds=rounds, clock=time.process_time)
        # As they come: a run on a busy machine takes minutes, and may be cut short.
        for row in compared:
            print(f"{row.name}: {row.median:.2f}", flush=True)
        rows += compared
    return rows


if __name__ == "__main__":
    main()
