"""A process that uses datasets of everything but graphs, without PyG; then graphs.

Workers that it spawns import this module too, to unpickle the dataset, and refuse PyG
as it does.
"""

import dataclasses
import json
import sys
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import loaderkit
from loaderkit.datasets.owned_copy import shares_memory
from loaderkit.datasets.pack import PackOptions
from loaderkit.testing import assert_same

SAMPLES = 7
BATCH = 3


class PygRefused(BaseException):
    """PyG was imported; nothing that tries one library after another catches this."""


class RefusePyg:
    """The first finder of modules that Python asks."""

    def find_spec(self, name, _path=None, _target=None):
        if name.partition(".")[0] == "torch_geometric":
            raise PygRefused(name)


sys.meta_path.insert(0, RefusePyg())


@dataclasses.dataclass
class Clip:
    sound: torch.Tensor
    label: int


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


KINDS = {
    "tensor": lambda i: torch.full((2, 3), i),
    "ragged": lambda i: torch.arange(i + 1),
    "array": lambda i: np.full((i % 2 + 1, 2), i),
    "number": float,
    "text": "sample {}".format,
    "bytes": lambda i: bytes([i]),
    "none": lambda i: {"value": None if i % 2 else i},
    "tuple": lambda i: (torch.ones(3), i),
    "list": lambda i: [torch.ones(3), [i, 2.5]],
    "named": lambda i: Pair(torch.ones(2), i),
    "dict": lambda i: {"x": torch.ones(3), "deep": {"tokens": torch.arange(i + 2)}},
    "ordered": lambda i: OrderedDict(x=torch.ones(i + 1)),
    "default": lambda i: defaultdict(list, x=[i]),
    "dataclass": lambda i: Clip(torch.ones(i + 1), i),
    "sparse": lambda i: {"a": torch.eye(i + 1).to_sparse()},
}


class Loaded(loaderkit.SafeDataset):
    """Samples that hold all kinds at once, made by ``load``."""

    def keys(self):
        return range(SAMPLES)

    def load(self, key):
        return {name: make(key) for name, make in KINDS.items() if name not in ALONE}


ALONE = {"none", "sparse"}
"""Kinds of which torch joins no batch: read one by one."""


def whole_batches(dataset, **options):
    return list(loaderkit.build_loader(dataset, batch_size=BATCH, **options))


def use_all_kinds(folder):
    known = [Clip, Pair]
    for name, make in KINDS.items():
        samples = [make(i) for i in range(SAMPLES)]
        loaderkit.pack(samples, folder / name, workers=0)
        dataset = loaderkit.open_cache(folder / name, classes=known)
        for row, sample in enumerate(samples):
            assert_same(dataset[row], sample)
            assert not shares_memory(loaderkit.owned_copy(sample), dataset[row])
        dataset.sizes()
        loaderkit.inspect_cache(folder / name)
        if name not in ALONE:
            assert len(whole_batches(dataset, num_workers=0)) == 3

    assert len(whole_batches([KINDS["dict"](1)] * SAMPLES, num_workers=0)) == 3

    loaded = Loaded(cache=folder / "all", packing=PackOptions(workers=2))
    here = whole_batches(loaded, num_workers=0)
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
    assert_same(whole_batches(loaded, **spawned), here)

    torch.save({"x": torch.ones(3), "i": 1}, folder / "one.pt")
    loaderkit.pack(loaderkit.PtFolder(folder), folder / "files", workers=0)


def use_graphs(folder):
    """PyG is imported for the first file that names it, before workers are forked."""
    source = loaderkit.PtFolder(folder / "graphs")
    assert "torch_geometric" in sys.modules
    packed = loaderkit.pack(source, folder / "packed", workers=2)
    [sources] = (folder / "packed").glob("sources-*.json")
    files = json.loads(sources.read_text())["files"]
    assert all(name.endswith(".pt") for name in files), f"opened by an import: {files}"
    from torch_geometric.data import Batch

    opened = loaderkit.open_cache(folder / "graphs.lk")
    rows = list(range(len(opened)))
    wanted = Batch.from_data_list([opened[row] for row in rows])
    for dataset in (opened, packed):
        [batch] = loaderkit.build_loader(dataset, batch_size=len(rows), num_workers=0)
        assert_same(batch, wanted)


def main(folder):
    """Use everything.

    Args:
        folder: Holds ``graphs.lk``, a cache of graphs, and ``graphs``, files of them.
    """
    folder = Path(folder)
    use_all_kinds(folder)
    assert "torch_geometric" not in sys.modules
    try:
        loaderkit.open_cache(folder / "graphs.lk")
    except PygRefused:
        sys.meta_path.pop(0)
        use_graphs(folder)
        return "PyG came with the graphs"
    return "PyG was not needed for graphs"
