"""Reading shuffled epochs, 0 workers, in page cache: all ways to keep graphs, in turn.

Run it with ``python -m benchmarks.read_epoch [--scale 0.1] [--workload w1] [--save]``.
With ``--cpu`` it counts CPU time, on one thread of torch's, for machines that others
use too.
"""

from __future__ import annotations

import argparse
import importlib.util
import pickle
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import torch
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Batch, Data, OnDiskDataset
from torch_geometric.loader import DataLoader as GraphLoader

import loaderkit
from benchmarks.harness import measure_rates, report
from benchmarks.workloads import (
    BATCH,
    COUNTS,
    InMemory,
    PtFiles,
    epoch_reader,
    make_graphs,
    write_pt_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.harness import ReadSamples

SLOW_SHARE = 0.1
"""Part of an epoch that the slow contestants read a turn."""
LMDB_MAP_BYTES = 1 << 34
"""LMDB reserves addresses of this size and no memory; more than any workload has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=["w1", "w2", "all"], default="all")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    clock, suffix = time.perf_counter, ""
    if options.cpu:
        torch.set_num_threads(1)
        clock, suffix = time.process_time, "_cpu"

    workloads = ("w1", "w2") if options.workload == "all" else (options.workload,)
    for workload in workloads:
        count = int(COUNTS[workload] * options.scale)
        batch_size = BATCH[workload]
        with tempfile.TemporaryDirectory() as folder:
            graphs = make_graphs(workload, count)
            contestants = make_contestants(graphs, batch_size, Path(folder))
            rows = measure_rates(contestants, rounds=options.rounds, clock=clock)
        title = f"{workload}: {count:,} graphs, batch {batch_size}, 0 workers"
        if options.cpu:
            title += ", CPU time"
        save = f"read_{workload}{suffix}" if options.save else None
        report(title, rows, save=save)


def make_contestants(
    graphs: list[Data], batch_size: int, folder: Path
) -> dict[str, ReadSamples]:
    """Set up every way to keep the graphs; the first is the baseline."""
    batching: dict[str, Any] = {"batch_size": batch_size, "shuffle": True}
    contestants: dict[str, ReadSamples] = {}

    for name, in_memory in (
        ("PyG InMemoryDataset", InMemory(graphs)),
        ("list[Data]", graphs),
    ):
        contestants[name] = epoch_reader(GraphLoader(in_memory, **batching))

    for name, on_disk in _slow_datasets(graphs, folder).items():
        make_loader = litdata_loader if name == "litdata" else GraphLoader
        loader = make_loader(on_disk, **batching)
        contestants[_slow_name(name)] = epoch_reader(loader, share=SLOW_SHARE)

    cache = loaderkit.pack(graphs, folder / "cache.lk")
    loader = DataLoader(cache, collate_fn=cache.collate, **batching)
    contestants["loaderkit"] = epoch_reader(loader)

    compressed = loaderkit.pack(graphs, folder / "gzip.lk", compression="gzip")
    loader = DataLoader(compressed, collate_fn=compressed.collate, **batching)
    contestants[_slow_name("loaderkit, gzip")] = epoch_reader(loader, share=SLOW_SHARE)
    return contestants


def _slow_name(name: str) -> str:
    return f"{name}, {SLOW_SHARE:.0%} of an epoch"


def _slow_datasets(graphs: list[Data], folder: Path) -> dict[str, Any]:
    """Write the graphs in every format that is read one graph at a time."""
    on_disk = sqlite_dataset(graphs[0], folder / "sqlite")
    on_disk.extend(graphs)
    datasets = {
        "torch.load per item": PtFiles(write_pt_files(graphs, folder / "pt")),
        "PyG OnDiskDataset (SQLite)": on_disk,
        "h5py per item": H5Items(graphs, folder / "items.h5"),
    }
    datasets |= _if_installed("lmdb", lambda: _write_lmdb(graphs, folder / "lmdb"))
    datasets |= _if_installed(
        "litdata", lambda: write_litdata(graphs, folder / "litdata")
    )
    return datasets


def _if_installed(package: str, make_dataset: Callable[[], Any]) -> dict[str, Any]:
    if importlib.util.find_spec(package):
        return {package: make_dataset()}
    print(f"{package} takes no part: pip install {package}")
    return {}


def sqlite_dataset(graph: Data, folder: Path) -> OnDiskDataset:
    """Open PyG's database in a folder, new where there is none.

    Args:
        graph: One of the graphs that are in it, or will be.
        folder: Where it is.
    """
    graph_class = type(graph)

    class SqliteGraphs(OnDiskDataset):  # type: ignore[misc]
        def serialize(self, data: Data) -> dict[str, Any]:
            fields: dict[str, Any] = data.to_dict()
            return fields

        def deserialize(self, data: dict[str, Any]) -> Data:
            return graph_class.from_dict(data)

    return SqliteGraphs(str(folder), schema=_sqlite_schema(graph))


def _sqlite_schema(graph: Data) -> dict[str, Any]:
    """Describe each field with -1 for the dimension in which graphs differ."""
    schema: dict[str, Any] = {}
    for name, value in graph.to_dict().items():
        if isinstance(value, torch.Tensor):
            shape = [2, -1] if name == "edge_index" else [-1, *value.shape[1:]]
            schema[name] = {"dtype": value.dtype, "size": shape}
        elif isinstance(value, str):
            schema[name] = str
    return schema


class H5Items(Dataset[Any]):
    """One HDF5 dataset a field, read row by row through h5py."""

    def __init__(self, graphs: list[Data], path: Path) -> None:
        self.graph_class = type(graphs[0])
        self.count = len(graphs)
        self.row_offsets: dict[str, list[int]] = {}
        with h5py.File(path, "w") as file:
            for name, value in graphs[0].to_dict().items():
                values = [graph[name] for graph in graphs]
                if not isinstance(value, torch.Tensor):
                    file[name] = values
                    continue
                if name == "edge_index":
                    # A graph's edges must be rows, to be one range of the file.
                    values = [edge_index.t() for edge_index in values]
                file[name] = torch.cat(values).numpy()
                lengths = torch.tensor([0, *map(len, values)])
                self.row_offsets[name] = lengths.cumsum(0).tolist()
        self.file = h5py.File(path)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        fields = {}
        for name in self.file:
            offsets = self.row_offsets.get(name)
            if offsets is None:
                fields[name] = self.file[name][row].decode()
                continue
            start, end = offsets[row], offsets[row + 1]
            tensor = torch.from_numpy(self.file[name][start:end])
            fields[name] = tensor.t() if name == "edge_index" else tensor
        return self.graph_class.from_dict(fields)


def _write_lmdb(graphs: list[Data], path: Path) -> LmdbItems:
    LmdbItems.write(graphs, path)
    return LmdbItems(len(graphs), path)


class LmdbItems(Dataset[Any]):
    """One pickle a graph in LMDB."""

    def __init__(self, count: int, path: Path) -> None:
        self.count = count
        self.environment = self._open(path)

    @classmethod
    def write(cls, graphs: Sequence[Data], path: Path) -> None:
        """Write graphs into a new database."""
        environment = cls._open(path)
        with environment.begin(write=True) as transaction:
            for number in range(len(graphs)):
                content = pickle.dumps(graphs[number])
                transaction.put(str(number).encode(), content)
        environment.close()

    @staticmethod
    def _open(path: Path) -> Any:
        import lmdb

        return lmdb.open(
            str(path), map_size=LMDB_MAP_BYTES, readahead=False, lock=False
        )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        with self.environment.begin() as transaction:
            return pickle.loads(transaction.get(str(row).encode()) or b"")


def write_litdata(samples: Sequence[Any], path: Path) -> Path:
    """Write chunks of litdata's own format, a dict of tensors a graph.

    Whole graphs it takes apart field by field, and reads at a third of this speed.
    """
    import litdata

    litdata.optimize(
        fn=_as_dict,
        inputs=list(samples),
        output_dir=str(path),
        chunk_bytes="64MB",
        num_workers=1,
        verbose=False,
    )
    return path


def _as_dict(sample: Data | dict[str, Any]) -> dict[str, Any]:
    if isinstance(sample, dict):
        return sample
    fields: dict[str, Any] = sample.to_dict()
    return fields


def litdata_loader(
    path: Path,
    *,
    batch_size: int,
    shuffle: bool,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Any:
    """Open what ``write_litdata`` wrote, with litdata's loader."""
    import litdata

    dataset = litdata.StreamingDataset(str(path), shuffle=shuffle)
    return litdata.StreamingDataLoader(
        dataset,
        batch_size=batch_size,
        collate_fn=collate_fn or _batch_from_dicts,
        num_workers=0,
    )


def _batch_from_dicts(samples: list[dict[str, Any]]) -> Batch:
    return Batch.from_data_list([Data.from_dict(sample) for sample in samples])


if __name__ == "__main__":
    main()
