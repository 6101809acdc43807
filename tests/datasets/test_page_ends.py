"""Nothing is read behind the last row of a file, however samples are read.

The shards of these caches end with whole pages in every column, and a batch of the
first shard leaves the files of the others unmapped: a byte more ends the process.
"""

import faulthandler
import os

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

import loaderkit
from loaderkit.cache.address_space import is_available

# Nodes of each sample of a shard: 4,096, so that a byte a node is a page.
NODES = {
    "all alike": [32] * 128,
    "an empty sample at the end": [64, *[32] * 126, 0],
    "an empty sample at the beginning": [0, *[32] * 126, 64],
}
ROWS = [0, 1, 125, 126, 127]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_available(), reason="files cannot lie side by side here"),
]


def graph(nodes):
    return Data(
        x=torch.rand(nodes, 3),
        z=torch.randint(0, 9, (nodes,), dtype=torch.uint8),
        edge_index=torch.randint(0, max(1, nodes), (2, nodes)),
        y=torch.rand(1, 8),
        name="n" * nodes,
    )


def dict_sample(nodes):
    return {
        "ids": torch.randint(0, 9, (nodes,), dtype=torch.uint8),
        "features": np.ones((nodes, 2), np.float32),
        "text": "t" * nodes,
        "raw": b"r" * nodes,
        "words": ["w"] * nodes,
        "label": torch.rand(8),
    }


READERS = {
    "batch": lambda dataset: dataset.batch(ROWS),
    "samples together": lambda dataset: list(dataset.__getitems__(ROWS)),
    "samples one by one": lambda dataset: [dataset[row] for row in ROWS],
    "a loader": lambda dataset: next(
        iter(loaderkit.build_loader(dataset, batch_size=128, shuffle=False))
    ),
    "PyG's loader": lambda dataset: next(iter(DataLoader(dataset, 128))),
}
WAYS = [
    (kind, reader)
    for kind in ("graphs", "dicts")
    for reader in READERS
    if (kind, reader) != ("dicts", "PyG's loader")  # it joins no dicts of arrays
]


@pytest.fixture(scope="module", params=NODES.values(), ids=NODES)
def nodes(request):
    return request.param


@pytest.fixture(scope="module")
def caches(nodes, tmp_path_factory):
    """Two caches of three shards; ``extend`` adds a shard of what it is given."""
    folder = tmp_path_factory.mktemp("caches")
    paths = {}
    for kind, make in (("graphs", graph), ("dicts", dict_sample)):
        paths[kind] = folder / kind
        loaderkit.pack([make(count) for count in nodes], paths[kind], workers=0)
        for _ in range(2):
            loaderkit.extend(paths[kind], [make(count) for count in nodes], workers=0)
    return paths


def status_in_a_fork(read):
    """Call a function in a child process; 0, or how it ended."""
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        code = 1
        try:
            read()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


@pytest.mark.long_cases
@pytest.mark.parametrize(("kind", "reader"), WAYS)
def test_a_shard_is_read_to_its_end_and_no_further(caches, kind, reader):
    dataset = loaderkit.open_cache(caches[kind])

    assert status_in_a_fork(lambda: READERS[reader](dataset)) == 0


@pytest.mark.parametrize("kind", ["graphs", "dicts"])
def test_the_files_end_with_whole_pages(caches, kind):
    store = loaderkit.open_cache(caches[kind])._open_cache().store

    assert len(store.manifest.shards) == 3
    ends = {
        name: array.offset + array.nbytes
        for name, array in store.manifest.shards[0].arrays.items()
        if name.endswith("/values") and "@" not in name and name != "words/values"
    }
    assert {name: end % 4096 for name, end in ends.items()} == dict.fromkeys(ends, 0)
