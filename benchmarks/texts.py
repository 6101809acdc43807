"""W2 with a list of texts for each graph, one for each atom, without workers.

Run it with ``python -m benchmarks.texts [--scale 0.1] [--save]``.  A cache takes turns
with a list of graphs in PyG's DataLoader, pair by pair, in CPU time: of the same
graphs without texts, with 37 names of atoms, and with texts that are all different.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch_geometric.loader import DataLoader

import loaderkit
from benchmarks.harness import duels, report, scale_and_save
from benchmarks.workloads import BATCH, make

if TYPE_CHECKING:
    from collections.abc import Callable

GRAPHS = 1_000
PAIRS = 40
NAMES = [f"{element}{place}" for element in "CNOS" for place in ["", *"ABDEGHXZ1"]][:37]


def main() -> None:
    options = scale_and_save(__doc__)
    torch.set_num_threads(1)
    rows = []
    for name, texts in {"no texts": None, "37 names": _few, "all other": _all}.items():
        graphs = make("w2", max(64, round(GRAPHS * options.scale)))
        for number, graph in enumerate(graphs):
            if texts is not None:
                graph.atoms = texts(number, graph.num_nodes)
        with tempfile.TemporaryDirectory() as folder:
            cache = loaderkit.pack(graphs, Path(folder, "cache.lk"))
            ours = loaderkit.build_loader(
                cache, batch_size=BATCH["w2"], shuffle=True, num_workers=0
            )
            theirs = DataLoader(graphs, batch_size=BATCH["w2"], shuffle=True)
            entrants = {name: _epoch(ours), "list[Data]": _epoch(theirs)}
            rounds = max(4, round(PAIRS * options.scale))
            rows += duels(entrants, rounds=rounds, clock=time.process_time)
    title = "W2 with texts for each atom, 0 workers, CPU time"
    report(title, rows, save="texts" if options.save else None)


def _few(number: int, count: int) -> list[str]:
    return random.Random(number).choices(NAMES, k=count)


def _all(number: int, count: int) -> list[str]:
    return [f"{NAMES[place % 37]}{number}:{place}" for place in range(count)]


def _epoch(loader: Any) -> Callable[[], int]:
    return lambda: sum(batch.num_graphs for batch in loader)


if __name__ == "__main__":
    main()
