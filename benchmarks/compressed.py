"""Shuffled batches of compressed caches, of the rate of the same cache uncompressed.

Run it with ``python -m benchmarks.compressed [--scale 0.1] [--save]``.  Each compressed
cache takes turns with the uncompressed one, pair by pair, in CPU time.  W1 and W2 are
random numbers, most of which hardly become smaller and so stay as they are.  Of both
there is a second form, whose numbers do become smaller.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import loaderkit
from benchmarks.harness import Row, compare_in_pairs, parse_scale_and_save, report
from benchmarks.workloads import BATCH, COUNTS, epoch_reader, make_graphs

if TYPE_CHECKING:
    from torch_geometric.data import Data

COMPRESSIONS = ("LZ4", "Zstd", "gzip")
PAIRS = 10
MIB = 1 << 20


def main() -> None:
    options = parse_scale_and_save(__doc__)
    torch.set_num_threads(1)
    rounds = max(4, round(PAIRS * options.scale))

    rows: list[Row] = []
    for workload in ("w1", "w2"):
        count = max(256, round(COUNTS[workload] * options.scale))
        graphs = make_graphs(workload, count)
        rows += _compare_compressions(workload.upper(), graphs, BATCH[workload], rounds)
        for graph in graphs:
            _make_compressible(graph)
        label = f"{workload.upper()} that becomes smaller"
        rows += _compare_compressions(label, graphs, BATCH[workload], rounds)
    title = "compressed caches, shuffled, 0 workers, CPU time"
    report(title, rows, save="compressed" if options.save else None)


def _make_compressible(graph: Data) -> None:
    """Give a graph a tenth of its features, and what belongs to edges to a decimal."""
    graph.x *= torch.rand_like(graph.x) < 0.1
    graph.edge_attr = (10 * graph.edge_attr).round() / 10


def _compare_compressions(
    workload: str, graphs: list[Data], batch_size: int, rounds: int
) -> list[Row]:
    """Hold each compression against the uncompressed cache."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for compression in COMPRESSIONS:
            contestants = {}
            for name, kind in ((compression, compression), ("uncompressed", None)):
                path = Path(folder, name)
                cache = loaderkit.pack(
                    graphs, path, compression=kind, workers=0, overwrite=True
                )
                loader = loaderkit.build_loader(
                    cache, batch_size=batch_size, shuffle=True, num_workers=0
                )
                nbytes = sum(file.stat().st_size for file in path.glob("*.h5"))
                label = f"{workload}, {name} ({nbytes / MIB:.0f} MiB)"
                contestants[label] = epoch_reader(loader)
            rows += compare_in_pairs(
                contestants, rounds=rounds, clock=time.process_time
            )
    return rows


if __name__ == "__main__":
    main()
