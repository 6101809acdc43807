"""Reading shuffled epochs, 0 workers, in page cache: all ways to keep graphs, in turn.

Run it with ``python -m benchmarks.read_epoch [--scale 0.1] [--workload w1] [--save]``.
"""

from __future__ import annotations

import argparse
import importlib.util
import pickle
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import torch
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Batch, Data, OnDiskDataset
from torch_geometric.loader import DataLoader as GraphLoader

import loaderkit
from benchmarks.harness import rates, report
from benchmarks.workloads import BATCH, COUNTS, InMemory, PtFiles, make, write_files

if TYPE_CHECKING:
    from collections.abc import Callable

SLOW = 0.1
"""Part of an epoch that the slow contestants read a turn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=["w1", "w2", "all"], default="all")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for workload in ("w1", "w2") if options.workload == "all" else (options.workload,):
        count = int(COUNTS[workload] * options.scale)
        with tempfile.TemporaryDirectory() as folder:
            contestants = entrants(make(workload, count), BATCH[workload], Path(folder))
            rows = rates(contestants, rounds=options.rounds)
            title = f"{workload}: {count:,} graphs, batch {BATCH[workload]}, 0 workers"
            report(title, rows, save=f"read_{workload}" if options.save else None)


def entrants(
    graphs: list[Data], batch: int, folder: Path
) -> dict[str, Callable[[], int]]:
    """Set up every way to keep the graphs; the first is the baseline."""
    files = write_files(graphs, folder / "pt")
    cache = loaderkit.pack(graphs, folder / "cache.lk")
    packed = loaderkit.pack(graphs, folder / "gzip.lk", compression="gzip")
    whole = {"PyG InMemoryDataset": InMemory(graphs), "list[Data]": graphs}
    slow = {
        "torch.load per item": PtFiles(files),
        "PyG OnDiskDataset (SQLite)": _sqlite(graphs, folder / "sqlite"),
        "h5py per item": H5Items(graphs, folder / "items.h5"),
    }
    slow |= _if_installed("lmdb", lambda: LmdbItems(graphs, folder / "lmdb"))
    slow |= _if_installed("litdata", lambda: litdata_items(graphs, folder / "litdata"))
    found: dict[str, Callable[[], int]] = {}
    for name, dataset in whole.items():
        found[name] = _epoch(GraphLoader(dataset, batch_size=batch, shuffle=True), 1.0)
    for name, dataset in slow.items():
        loader = streamed if name == "litdata" else GraphLoader
        epoch = _epoch(loader(dataset, batch_size=batch, shuffle=True), SLOW)
        found[f"{name}, {SLOW:.0%} of an epoch"] = epoch
    for name, ours in (("loaderkit", cache), ("loaderkit, gzip", packed)):
        loader = DataLoader(
            ours, batch_size=batch, shuffle=True, collate_fn=ours.collate
        )
        slowly = "" if ours is cache else f", {SLOW:.0%} of an epoch"
        found[name + slowly] = _epoch(loader, 1.0 if ours is cache else SLOW)
    return found


def _if_installed(name: str, make: Callable[[], Any]) -> dict[str, Any]:
    if importlib.util.find_spec(name):
        return {name: make()}
    print(f"{name} takes no part: pip install {name}")
    return {}


def _epoch(loader: Any, part: float) -> Callable[[], int]:
    def read() -> int:
        count, batches = 0, max(1, int(len(loader) * part))
        for _, batch in zip(range(batches), loader, strict=False):
            count += batch.num_graphs
        return count

    return read


def _sqlite(graphs: list[Data], folder: Path) -> Any:
    first = graphs[0].to_dict()
    schema = {
        key: {"dtype": value.dtype, "size": [-1, *value.shape[1:]]}
        if key != "edge_index"
        else {"dtype": value.dtype, "size": [2, -1]}
        for key, value in first.items()
        if isinstance(value, torch.Tensor)
    }
    schema |= {key: str for key, value in first.items() if isinstance(value, str)}

    class Rows(OnDiskDataset):  # type: ignore[misc]
        def serialize(self, data: Data) -> Any:
            return data.to_dict()

        def deserialize(self, data: Any) -> Any:
            return type(graphs[0]).from_dict(data)

    dataset = Rows(str(folder), schema=schema)
    dataset.extend(graphs)
    return dataset


class H5Items(Dataset[Any]):
    """One HDF5 dataset a field, read row by row through h5py."""

    def __init__(self, graphs: list[Data], path: Path) -> None:
        self.kind, self.ends = type(graphs[0]), {}
        with h5py.File(path, "w") as file:
            for key, value in graphs[0].to_dict().items():
                if not isinstance(value, torch.Tensor):
                    file[key] = [graph[key] for graph in graphs]
                    continue
                rows = [g[key].t() if key == "edge_index" else g[key] for g in graphs]
                file[key] = torch.cat(rows).numpy()
                ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
                self.ends[key] = ends.tolist()
        self.count, self.file = len(graphs), h5py.File(path)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        found = {}
        for key in self.file:
            ends = self.ends.get(key)
            if ends is None:
                found[key] = self.file[key][row].decode()
            else:
                tensor = torch.from_numpy(self.file[key][ends[row] : ends[row + 1]])
                found[key] = tensor.t() if key == "edge_index" else tensor
        return self.kind.from_dict(found)


class LmdbItems(Dataset[Any]):
    """One pickle a graph in LMDB."""

    def __init__(self, graphs: list[Data], path: Path) -> None:
        import lmdb

        size = 1 << 34
        self.store = lmdb.open(str(path), map_size=size, readahead=False, lock=False)
        with self.store.begin(write=True) as change:
            for number, graph in enumerate(graphs):
                change.put(str(number).encode(), pickle.dumps(graph))
        self.count = len(graphs)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        with self.store.begin() as view:
            return pickle.loads(view.get(str(row).encode()) or b"")


def litdata_items(graphs: list[Any], path: Path) -> Any:
    """Write chunks of litdata's own format, a dict of tensors a graph.

    Whole graphs it takes apart field by field, and reads at a third of this speed.
    """
    import litdata

    litdata.optimize(
        fn=_as_dict, inputs=graphs, output_dir=str(path), chunk_bytes="64MB",
        num_workers=1, verbose=False,
    )  # fmt: skip
    return path


def _as_dict(sample: Data | dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = sample if isinstance(sample, dict) else sample.to_dict()
    return found


def streamed(path: Path, *, batch_size: int, shuffle: bool, collate: Any = None) -> Any:
    import litdata

    dataset = litdata.StreamingDataset(str(path), shuffle=shuffle)
    return litdata.StreamingDataLoader(
        dataset, batch_size=batch_size, collate_fn=collate or _from_dicts, num_workers=0
    )


def _from_dicts(found: list[dict[str, Any]]) -> Any:
    return Batch.from_data_list([Data.from_dict(each) for each in found])


if __name__ == "__main__":
    main()
