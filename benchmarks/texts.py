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
from typing import TYPE_CHECKING

import torch
from torch_geometric.loader import DataLoader

import loaderkit
from benchmarks.harness import compare_in_pairs, parse_scale_and_save, report
from benchmarks.workloads import BATCH, epoch_reader, make_graphs

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.harness import Row

    MakeTexts = Callable[[int, int], list[str]]
    """Texts for a graph: of its number and its number of atoms."""

GRAPHS = 1_000
PAIRS = 40
# As many as there are names of heavy atoms in the residues of a protein: N, CA, CB ...
ATOM_NAMES = [
    f"{element}{position}" for element in "CNOS" for position in ["", *"ABDEGHXZ1"]
][:37]


def main() -> None:
    options = parse_scale_and_save(__doc__)
    torch.set_num_threads(1)
    count = max(64, round(GRAPHS * options.scale))
    rounds = max(4, round(PAIRS * options.scale))

    rows: list[Row] = []
    for name, make_texts in (
        ("no texts", None),
        ("37 names", _draw_atom_names),
        ("all other", _make_distinct_texts),
    ):
        rows += _compare_with_list(name, make_texts, count, rounds)

    title = "W2 with texts for each atom, 0 workers, CPU time"
    report(title, rows, save="texts" if options.save else None)


def _compare_with_list(
    name: str, make_texts: MakeTexts | None, count: int, rounds: int
) -> list[Row]:
    graphs = make_graphs("w2", count)
    if make_texts is not None:
        for number, graph in enumerate(graphs):
            graph.atoms = make_texts(number, graph.num_nodes)

    with tempfile.TemporaryDirectory() as folder:
        cache = loaderkit.pack(graphs, Path(folder, "cache.lk"))
        from_cache = loaderkit.build_loader(
            cache, batch_size=BATCH["w2"], shuffle=True, num_workers=0
        )
        from_list = DataLoader(graphs, batch_size=BATCH["w2"], shuffle=True)
        contestants = {
            name: epoch_reader(from_cache),
            "list[Data]": epoch_reader(from_list),
        }
        return compare_in_pairs(contestants, rounds=rounds, clock=time.process_time)


def _draw_atom_names(graph_number: int, atoms: int) -> list[str]:
    return random.Random(graph_number).choices(ATOM_NAMES, k=atoms)


def _make_distinct_texts(graph_number: int, atoms: int) -> list[str]:
    return [
        f"{ATOM_NAMES[atom % len(ATOM_NAMES)]}{graph_number}:{atom}"
        for atom in range(atoms)
    ]


if __name__ == "__main__":
    main()
