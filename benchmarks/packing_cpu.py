"""CPU that packing takes, of samples of several kinds, without workers.

Run it with ``python -m benchmarks.packing_cpu [--scale 0.1] [--save]``.  CPU time, so
that it can be read where others use the machine.  Packing samples that are in memory
takes turns with ``pickle.dumps`` of each, which whoever keeps samples in a database
pays.  Packing files of W2 takes turns with only reading them.
"""

from __future__ import annotations

import pickle
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch_geometric.data import HeteroData

import loaderkit
from benchmarks.harness import Row, parse_scale_and_save, report
from benchmarks.workloads import make_graphs, write_pt_files
from loaderkit.datasets.pt_folder import PtFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SAMPLES = 4_000
W2_FILES = 400
TURNS = 5


def main() -> None:
    options = parse_scale_and_save(__doc__)
    torch.set_num_threads(1)
    count = max(200, round(SAMPLES * options.scale))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, samples in _samples_by_kind(count).items():
            rows += _compare(
                name, samples, Path(folder, "c.lk"), "pickle", _pickle_all(samples)
            )
        graphs = make_graphs("w2", max(40, round(W2_FILES * options.scale)))
        files = PtFolder(write_pt_files(graphs, Path(folder, "w2")))
        rows += _compare("w2 files", files, Path(folder, "c.lk"), "read", _read(files))
    report(
        "CPU of packing, 0 workers",
        rows,
        save="packing_cpu" if options.save else None,
    )


def _compare(
    kind: str,
    source: Any,
    cache_path: Path,
    other_name: str,
    other: Callable[[], object],
) -> list[Row]:
    """Measure packing and something else in turns; the rate of the other is 1."""
    packing_us: list[float] = []
    other_us: list[float] = []
    for turn in range(TURNS + 1):
        for values, run in (
            (other_us, other),
            (packing_us, lambda: _pack(source, cache_path)),
        ):
            start_s = time.process_time()
            run()
            if turn > 0:
                elapsed_us = 1e6 * (time.process_time() - start_s)
                values.append(elapsed_us / len(source))
    ratios = [
        other / packing for other, packing in zip(other_us, packing_us, strict=True)
    ]
    return [
        _row(f"{kind}: {other_name}", other_us, 1),
        _row(f"{kind}: pack", packing_us, statistics.median(ratios)),
    ]


def _row(name: str, values: Sequence[float], ratio: float) -> Row:
    median = statistics.median(values)
    return Row(name, median, min(values), max(values), "us a sample", ratio)


def _pack(source: Any, cache_path: Path) -> None:
    loaderkit.pack(source, cache_path, workers=0, overwrite=True)


def _pickle_all(samples: list[Any]) -> Callable[[], object]:
    return lambda: [len(pickle.dumps(sample, protocol=5)) for sample in samples]


def _read(files: PtFolder) -> Callable[[], object]:
    return lambda: [files.read(row) is None for row in range(len(files))]


def _samples_by_kind(count: int) -> dict[str, list[Any]]:
    generator = random.Random(0)
    molecules = make_graphs("w1", count)
    with_more = [graph.clone() for graph in molecules]
    for number, graph in enumerate(with_more):
        graph.energy, graph.charge, graph.is_ring = 0.5 * number, number % 3, True
        graph.bonds = list(range(5))
        graph.fragment = {"mask": torch.ones(3), "name": "x"}
        graph.fingerprint = np.zeros(32, np.uint8)
    rows = range(count)
    return {
        "w1": molecules,
        "w1 with six more attributes": with_more,
        "dict of tensors": [_make_tokens(generator) for _ in rows],
        "dict of arrays": [_make_arrays(generator) for _ in rows],
        "nest of lists and texts": [_make_nest(generator, row) for row in rows],
        "HeteroData": [_make_hetero(generator) for _ in rows],
    }


def _make_tokens(generator: random.Random) -> dict[str, Any]:
    length = generator.randrange(5, 60)
    return {
        "ids": torch.arange(length),
        "mask": torch.ones(length, dtype=torch.bool),
        "embedding": torch.rand(16),
        "label": length % 7,
    }


def _make_arrays(generator: random.Random) -> dict[str, Any]:
    length = generator.randrange(5, 60)
    return {
        "tokens": np.arange(length),
        "features": np.ones((length, 8), np.float32),
        "label": np.int64(length % 5),
        "weight": 0.5 * length,
    }


def _make_nest(generator: random.Random, row: int) -> dict[str, Any]:
    length = generator.randrange(2, 9)
    return {
        "text": "word " * length,
        "tags": [f"t{position}" for position in range(length)],
        "scores": [0.5 * position for position in range(length)],
        "meta": {"id": row, "source": "abc", "box": (1, 2, 3)},
        "x": torch.ones(length, 4),
    }


def _make_hetero(generator: random.Random) -> HeteroData:
    nodes = generator.randrange(5, 20)
    graph = HeteroData(y=nodes)
    graph["paper"].x, graph["author"].x = torch.rand(nodes, 4), torch.rand(3, 4)
    edges = torch.stack([torch.randint(nodes, (6,)), torch.randint(3, (6,))])
    graph["paper", "by", "author"].edge_index = edges
    return graph


if __name__ == "__main__":
    main()
