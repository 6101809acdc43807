"""CPU that packing a few molecules takes, with the workers that ``pack`` starts itself.

Run it with ``python -m benchmarks.packing_few [--scale 0.1] [--save]``.  Each source is
packed without workers and with the default number of them, in turns; the CPU time of
workers counts too.
"""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch_geometric.data import Data

import loaderkit
from benchmarks.harness import Row, parse_scale_and_save, report
from benchmarks.workloads import make_graphs
from loaderkit.datasets.safe import SafeDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES = 1_000
TURNS = 30


def main() -> None:
    options = parse_scale_and_save(__doc__)
    torch.set_num_threads(1)
    count = max(100, round(SAMPLES * options.scale))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, source in (
            ("in a list", make_graphs("w1", count)),
            ("made by code", _MakesMolecules(count)),
        ):
            name = f"{count:,} molecules {kind}"
            rows += _compare_workers(name, source, Path(folder, "cache.lk"))
    title = "CPU of packing a few samples, with that of workers"
    report(title, rows, save="packing_few" if options.save else None)


class _MakesMolecules(SafeDataset[Data]):
    """Molecules of W1's sizes, of which none lies in memory."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def keys(self) -> range:
        return range(self.count)

    def load(self, number: int) -> Data:
        nodes = 10 + number % 17
        return Data(
            x=torch.full((nodes, 11), 0.5 * number),
            edge_index=torch.arange(4 * nodes).reshape(2, -1) % nodes,
            edge_attr=torch.ones(2 * nodes, 4),
            y=torch.full((1, 19), 0.5),
            pos=torch.full((nodes, 3), 0.1 * number),
            z=torch.full((nodes,), number % 9),
            name=f"gdb_{number}",
            smiles="C" * (nodes // 2) + "O",
        )


def _compare_workers(name: str, source: Any, cache_path: Path) -> list[Row]:
    """Pack without workers, and with those that ``pack`` starts, in turns."""
    cpu_ms: dict[int | None, list[float]] = {0: [], None: []}
    for turn in range(TURNS + 1):
        for workers in _in_turns(turn):
            start_s = _cpu_s_with_children()
            loaderkit.pack(source, cache_path, workers=workers, overwrite=True)
            # The first turn imports what packing needs.
            if turn > 0:
                cpu_ms[workers].append(1000 * (_cpu_s_with_children() - start_s))
    without = sorted(cpu_ms[0])[TURNS // 2]
    rows = []
    for label, workers in (("no workers", 0), ("default workers", None)):
        values = sorted(cpu_ms[workers])
        median = values[TURNS // 2]
        row = Row(
            f"{name}: {label}", median, values[0], values[-1], "ms", without / median
        )
        rows.append(row)
    return rows


def _in_turns(turn: int) -> Iterator[int | None]:
    yield from (0, None) if turn % 2 else (None, 0)


def _cpu_s_with_children() -> float:
    """Add up the CPU time of this process and of its children that have ended."""
    # os.times() counts hundredths of a second.
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
