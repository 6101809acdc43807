"""Shuffled batches of W1 at several sizes, kept as each library keeps its samples.

``python -m benchmarks.rivals FOLDER [--samples 10000 100000] [--save]`` writes W1 into
FOLDER in every format, a folder for each size, and reads batches in turn, in page
cache, without workers.  It can be stopped: what is written stays, and a size that was
measured is not measured again (delete FOLDER/SIZE/rates.json for that).  A million
graphs take about 3 GB of disk in each of eight formats; those that keep all graphs in
memory take no part beyond 10^5.  Graphs repeat from 10,000 on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pickle
import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader as GraphLoader

import loaderkit
from benchmarks.harness import Row, measure_rates, report
from benchmarks.read_epoch import (
    LmdbItems,
    litdata_loader,
    sqlite_dataset,
    write_litdata,
)
from benchmarks.workloads import BATCH, InMemory, count_samples, make_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.harness import ReadSamples

DISTINCT_GRAPHS = 10_000
MOST_IN_MEMORY = 10**5
TURN_S = 2.0
"""How long a contestant reads a turn, however slow it is."""
ROUNDS = 5
BATCH_SIZE = BATCH["w1"]
SHARD_BYTES = 64 << 20
SHUFFLE_BUFFER = 5_000
"""Samples among which webdataset draws: it reads tars in order."""
CONTENT = "content"
WRITTEN = "written"
"""Name of the file that says a format is written whole."""


class Format(NamedTuple):
    """One way to keep graphs."""

    package: str
    """What must be installed for it."""
    write: Callable[[Sequence[Data], Path], object]
    """Writes graphs into a new folder."""
    open: Callable[[Sequence[Data], Path], Any]
    """Makes a loader of shuffled batches of what lies there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, nargs="+", default=[10**4, 10**5])
    names = [kept.package for kept in FORMATS.values()]
    parser.add_argument("--without", nargs="+", default=[], choices=names)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    for count in options.samples:
        folder: Path = options.folder.absolute() / str(count)
        folder.mkdir(parents=True, exist_ok=True)
        rates = folder / "rates.json"
        if rates.exists():
            rows = [Row(**fields) for fields in json.loads(rates.read_text())]
        else:
            rows = _compare_formats(count, folder, options.without)
            rates.write_text(json.dumps([asdict(row) for row in rows]))
        title = f"w1: {count:,} graphs, batch {BATCH_SIZE}, shuffled, 0 workers"
        report(title, rows, save=f"rivals_{count}" if options.save else None)


class RepeatedGraphs(Sequence[Data]):
    """So many graphs, of which only some differ."""

    def __init__(self, count: int) -> None:
        self._graphs = make_graphs("w1", min(count, DISTINCT_GRAPHS))
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, rows: int) -> Data: ...

    @overload
    def __getitem__(self, rows: slice) -> list[Data]: ...

    def __getitem__(self, rows: int | slice) -> Data | list[Data]:
        if isinstance(rows, slice):
            return [self[row] for row in range(*rows.indices(self._count))]
        if rows >= self._count:
            raise IndexError(rows)
        return self._graphs[rows % len(self._graphs)]


def _compare_formats(count: int, folder: Path, without: list[str]) -> list[Row]:
    graphs = RepeatedGraphs(count)
    contestants: dict[str, ReadSamples] = {}
    if count <= MOST_IN_MEMORY:
        in_memory = InMemory(list(graphs))
        loader = GraphLoader(in_memory, batch_size=BATCH_SIZE, shuffle=True)
        contestants["PyG InMemoryDataset"] = _turn_reader(loader)
    for name, kept in FORMATS.items():
        if kept.package in without:
            continue
        if not importlib.util.find_spec(kept.package):
            print(f"{name} takes no part: there is no module {kept.package}")
            continue
        path = folder / kept.package
        _write_once(kept, graphs, path)
        contestants[name] = _turn_reader(kept.open(graphs, path / CONTENT))
    return measure_rates(contestants, rounds=ROUNDS)


def _write_once(kept: Format, graphs: Sequence[Data], path: Path) -> None:
    if (path / WRITTEN).exists():
        return
    shutil.rmtree(path, ignore_errors=True)  # what was not finished
    path.mkdir()
    start = time.perf_counter()
    kept.write(graphs, path / CONTENT)
    print(f"{path.name}: written in {time.perf_counter() - start:.0f} s")
    (path / WRITTEN).touch()


def _turn_reader(loader: Any) -> ReadSamples:
    """Make a contestant that reads for a while, on from where it was in its epoch."""
    batches = _endless(loader)

    def read_turn() -> int:
        samples = 0
        end = time.perf_counter() + TURN_S
        while time.perf_counter() < end:
            samples += count_samples(next(batches))
        return samples

    return read_turn


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


# Formats.


def _pack(graphs: Any, path: Path) -> None:
    loaderkit.pack(graphs, path, workers=0)


def _open_cache(graphs: Sequence[Data], path: Path) -> Any:
    del graphs
    cache = loaderkit.open_cache(path)
    return loaderkit.build_loader(
        cache, batch_size=BATCH_SIZE, shuffle=True, num_workers=0
    )


def _open_sqlite(graphs: Sequence[Data], path: Path) -> Any:
    dataset = sqlite_dataset(graphs[0], path)
    return GraphLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)


def _write_sqlite(graphs: Sequence[Data], path: Path) -> None:
    dataset = sqlite_dataset(graphs[0], path)
    for start in range(0, len(graphs), DISTINCT_GRAPHS):
        dataset.extend(graphs[start : start + DISTINCT_GRAPHS])
    dataset.close()


def _open_lmdb(graphs: Sequence[Data], path: Path) -> Any:
    items = LmdbItems(len(graphs), path)
    return GraphLoader(items, batch_size=BATCH_SIZE, shuffle=True)


def _open_litdata(graphs: Sequence[Data], path: Path) -> Any:
    del graphs
    return litdata_loader(path, batch_size=BATCH_SIZE, shuffle=True)


def _write_mds(graphs: Sequence[Data], path: Path) -> None:
    import streaming

    columns = dict.fromkeys(_as_arrays(graphs[0]), "ndarray")
    columns |= {"name": "str", "smiles": "str"}
    with streaming.MDSWriter(
        out=str(path), columns=columns, size_limit=SHARD_BYTES
    ) as writer:
        for row in range(len(graphs)):
            writer.write(_as_arrays(graphs[row]))


def _open_mds(graphs: Sequence[Data], path: Path) -> Any:
    import streaming

    del graphs
    # It keeps names in shared memory that a process before may have left.
    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(
        local=str(path), shuffle=True, batch_size=BATCH_SIZE
    )
    return DataLoader(dataset, batch_size=BATCH_SIZE, collate_fn=_join_arrays)


def _write_tars(graphs: Sequence[Data], path: Path) -> None:
    import webdataset

    path.mkdir()
    pattern = str(path / "%05d.tar")
    with webdataset.ShardWriter(pattern, maxsize=SHARD_BYTES, verbose=0) as writer:
        for row in range(len(graphs)):
            content = pickle.dumps(graphs[row].to_dict())
            writer.write({"__key__": f"{row:09}", "graph.pickle": content})


def _open_tars(graphs: Sequence[Data], path: Path) -> Any:
    import webdataset

    del graphs
    tars = sorted(map(str, path.glob("*.tar")))
    dataset = webdataset.WebDataset(tars, shardshuffle=len(tars))
    dataset = dataset.shuffle(SHUFFLE_BUFFER).map(_unpickle)
    return DataLoader(dataset, batch_size=BATCH_SIZE, collate_fn=Batch.from_data_list)


def _unpickle(sample: dict[str, Any]) -> Data:
    return Data.from_dict(pickle.loads(sample["graph.pickle"]))


def _write_arrow(graphs: Sequence[Data], path: Path) -> None:
    import datasets

    def rows() -> Iterator[dict[str, Any]]:
        for row in range(len(graphs)):
            yield _as_arrays(graphs[row])

    made = datasets.Dataset.from_generator(rows, cache_dir=f"{path}-made")
    made.save_to_disk(str(path))


def _open_arrow(graphs: Sequence[Data], path: Path) -> Any:
    import datasets

    del graphs
    dataset = datasets.load_from_disk(str(path)).with_format("numpy")
    return DataLoader(
        dataset, batch_size=BATCH_SIZE, shuffle=True, collate_fn=_join_arrays
    )


def _as_arrays(graph: Data) -> dict[str, Any]:
    return {
        name: value.numpy() if isinstance(value, torch.Tensor) else value
        for name, value in graph.to_dict().items()
    }


def _join_arrays(samples: list[dict[str, Any]]) -> Batch:
    """Join arrays, which may not be writable."""
    return Batch.from_data_list([_graph_of_arrays(sample) for sample in samples])


def _graph_of_arrays(sample: dict[str, Any]) -> Data:
    fields = {}
    for name, value in sample.items():
        is_array = isinstance(value, np.ndarray)
        if is_array and value.dtype == object:  # rows of a table, as Arrow gives them
            value = np.stack(value)
        fields[name] = torch.from_numpy(value.copy()) if is_array else value
    return Data.from_dict(fields)


FORMATS = {
    "loaderkit": Format("loaderkit", _pack, _open_cache),
    "PyG OnDiskDataset": Format("torch_geometric", _write_sqlite, _open_sqlite),
    "LMDB + pickle": Format("lmdb", LmdbItems.write, _open_lmdb),
    "litdata": Format("litdata", write_litdata, _open_litdata),
    "MDS": Format("streaming", _write_mds, _open_mds),
    "datasets (Arrow)": Format("datasets", _write_arrow, _open_arrow),
    f"webdataset, within {SHUFFLE_BUFFER:,}": Format(
        "webdataset", _write_tars, _open_tars
    ),
}


if __name__ == "__main__":
    main()
