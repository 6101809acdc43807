"""Other people's collate functions, loaders, samplers and compositions, in a table.

Each entry is what torch and PyG offer, or a habit of their users.  A row of the table
is one of each; over a packed dataset it must give what it gives over a list.
"""

import functools
import itertools
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torch_geometric import loader as pyg
from torch_geometric.data import Batch, Data, HeteroData

from loaderkit import build_loader

COUNT = 14


class Point(NamedTuple):
    """A pair whose parts have names."""

    x: Any
    y: Any


class Paired(Data):
    """Two graphs in one, as PyG's documentation has it."""

    def __inc__(self, key, value, *args, **kwargs):
        if key == "edge_index_t":
            return self.x.size(0)
        return super().__inc__(key, value, *args, **kwargs)


def graph(i: int) -> Data:
    nodes = 2 + i % 4
    return Data(
        x=torch.arange(3.0 * nodes).view(nodes, 3) + i,
        edge_index=torch.arange(2 * i % 6 + 2).view(1, -1).repeat(2, 1) % nodes,
        y=torch.tensor([i % 3]),
        name=f"g{i}",
        weight=i / 3,
    )


def dense_graph(i: int) -> Data:
    return Data(x=torch.full((4, 2), i), adj=torch.eye(4) * i, y=torch.tensor([i % 3]))


def paired(i: int) -> Paired:
    base = graph(i)
    return Paired(
        x=base.x,
        edge_index=base.edge_index,
        y=base.y,
        edge_index_t=base.edge_index.clone(),
    )


def hetero(i: int) -> HeteroData:
    data = HeteroData()
    data["a"].x = torch.full((1 + i % 3, 2), float(i))
    data["b"].x = torch.full((2, 1), float(i))
    data["a", "to", "b"].edge_index = torch.zeros(2, i % 4, dtype=torch.long)
    data["a"].y = torch.tensor([i])
    return data


def features(i: int) -> dict[str, Any]:
    """What a tokenizer gives."""
    return {"input_ids": list(range(1, 3 + i % 5)), "label": i % 2}


SAMPLES = {
    "graphs": graph,
    "dense graphs": dense_graph,
    "paired graphs": paired,
    "hetero": hetero,
    "dicts": lambda i: {"x": torch.full((3,), i), "y": i % 2, "s": f"s{i}", "f": i / 7},
    "ragged dicts": lambda i: {"x": torch.arange(1 + i % 4), "y": i % 2},
    "tuples": lambda i: (torch.full((2, 2), i), i, np.full(3, i)),
    "named": lambda i: Point(torch.tensor(i), {"z": [torch.ones(2), i]}),
    "features": features,
    "tensors": lambda i: torch.full((2,), i),
    "ragged tensors": lambda i: torch.arange(1 + i % 3),
    "arrays": lambda i: np.full((2,), i / 3),
    "numbers": lambda i: i,
    "texts": lambda i: f"text {i}",
}


def halves(data):
    return random_split(data, [9, len(data) - 9], torch.Generator().manual_seed(3))[0]


def twice_stacked(data):
    return StackDataset(data, Subset(data, range(len(data))[::-1]))


COMPOSITIONS = {
    "itself": lambda data: data,
    "subset": lambda data: Subset(data, [5, 1, 1, 12, 0, 7, 3]),
    "subset of a subset": lambda d: Subset(Subset(d, range(12)[::-1]), [0, 2, 9, 2]),
    "random split": halves,
    "concatenated": lambda data: ConcatDataset([Subset(data, range(3)), data]),
    "stacked": twice_stacked,
    "stacked by name": lambda d: StackDataset(a=d, n=list(range(len(d)))),
    "stacked with a list": lambda d: StackDataset(d, list(range(len(d)))),
}


def as_it_is(samples):
    return samples


def reversed_in_place(samples):
    samples.reverse()
    samples.append(samples.pop(0))
    return samples


def sorted_by_text(samples):
    samples.sort(key=str)
    return [str(sample) for sample in samples]


def counted(samples):
    assert isinstance(samples, list)
    return len(samples), type(samples[0]).__name__, samples[-1]


def without_odd(samples):
    return [sample for number, sample in enumerate(samples) if number % 2 == 0]


def stacked(samples):
    return torch.stack(samples)


def tensor_of(samples):
    return torch.tensor(samples)


def transposed(samples):
    return list(zip(*samples, strict=True))


def padded(samples):
    """As torch's tutorials on text do it."""
    samples.sort(key=lambda sample: len(sample["x"]), reverse=True)
    sequences = [sample["x"] for sample in samples]
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)


def with_one_spoilt(samples):
    """Change the first sample, then join: the change must be in the batch."""
    samples[0] = samples[1]
    return default_collate(samples)


def two_views(samples):
    return Batch.from_data_list(samples + samples), [samples[0]] + samples  # noqa: RUF005


def concatenated_behind(samples):
    return [0, *samples] == [0] + samples, (1,) + tuple(samples)  # noqa: RUF005


def first_alone(samples):
    return samples[0]


def stacked_arrays(samples):
    array = np.stack(samples)
    return array.tolist() if array.dtype == object else array


COLLATES = [
    default_collate,
    as_it_is,
    reversed_in_place,
    sorted_by_text,
    counted,
    without_odd,
    stacked,
    tensor_of,
    transposed,
    padded,
    with_one_spoilt,
    two_views,
    first_alone,
    concatenated_behind,
    stacked_arrays,
    pyg.dataloader.Collater(None),
    pyg.dataloader.Collater(None, ["x"], ["y"]),
]


def torch_loaders(collate):
    return {
        f"DataLoader({_function_name(collate)})": functools.partial(
            DataLoader, collate_fn=collate
        ),
        f"build_loader({_function_name(collate)})": functools.partial(
            build_loader, collate_fn=collate, probe=False, seed=0
        ),
    }


def _function_name(function):
    return getattr(function, "__name__", type(function).__name__)


LOADERS: dict[str, Any] = {}
for number, collate in enumerate(COLLATES):
    # Some collate functions are of one class: only the number tells them apart.
    for name, loader in torch_loaders(collate).items():
        LOADERS[f"{name} {number}"] = loader
LOADERS |= {
    "DataLoader": DataLoader,
    "pyg.DataLoader": pyg.DataLoader,
    "pyg.DataLoader(follow_batch)": functools.partial(
        pyg.DataLoader, follow_batch=["x", "edge_index"]
    ),
    "pyg.DataLoader(exclude_keys)": functools.partial(
        pyg.DataLoader, exclude_keys=["y", "name"]
    ),
    "pyg.DataListLoader": pyg.DataListLoader,
    "pyg.DenseDataLoader": pyg.DenseDataLoader,
    "build_loader": functools.partial(build_loader, probe=False, seed=0),
    "build_loader(follow_batch)": functools.partial(
        build_loader, probe=False, seed=0, follow_batch=["x", "edge_index"]
    ),
    "build_loader(exclude_keys)": functools.partial(
        build_loader, probe=False, seed=0, exclude_keys=["y", "name"]
    ),
}


def weighted(data):
    weights = torch.arange(1.0, len(data) + 1)
    return {"sampler": WeightedRandomSampler(weights, 9), "batch_size": 4}


def some(data):
    return {"sampler": SubsetRandomSampler(range(len(data) - 1)), "batch_size": 3}


def ranked(data):
    return {"sampler": DistributedSampler(data, 2, 1, seed=4), "batch_size": 2}


def in_batches(data):
    return {"batch_sampler": BatchSampler(SequentialSampler(data), 3, drop_last=True)}


def by_class(data):
    return {"sampler": pyg.ImbalancedSampler(data), "batch_size": 5}


def by_nodes(data):
    return {"batch_sampler": pyg.DynamicBatchSampler(data, 10, num_steps=4)}


SAMPLERS = {
    "in order": lambda _: {"batch_size": 4},
    "one by one": lambda _: {},
    "random": lambda data: {"sampler": RandomSampler(data), "batch_size": 4},
    "weighted": weighted,
    "some": some,
    "ranked": ranked,
    "in batches": in_batches,
    "ImbalancedSampler": by_class,
    "DynamicBatchSampler": by_nodes,
}


class Stream(IterableDataset):
    """Gives the samples of another dataset one after the other."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)

    def __len__(self):
        return len(self.data)


def chained(data):
    return ChainDataset([Stream(data), Stream(data)])


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    samples: str
    composition: str
    loader: str
    sampler: str

    def epoch(self, data, num_workers=0, **options):
        """Give all batches over a dataset."""
        torch.manual_seed(11)
        composed = COMPOSITIONS[self.composition](data)
        options |= SAMPLERS[self.sampler](composed)
        loader = LOADERS[self.loader](composed, num_workers=num_workers, **options)
        return list(loader)

    def __str__(self):
        return f"{self.samples}, {self.composition}, {self.loader}, {self.sampler}"


def rows(count, seed):
    """Draw rows of the table.

    Args:
        count: How many.
        seed: What the choice follows from.

    Returns:
        Different rows, and the number of rows that there are.
    """
    table = list(itertools.product(SAMPLES, COMPOSITIONS, LOADERS, SAMPLERS))
    drawn = random.Random(seed).sample(table, min(count, len(table)))
    return [Row(*names) for names in drawn]


def samples_of(kind):
    """Make a list of samples, new ones each time: some functions change them."""
    return [SAMPLES[kind](i) for i in range(COUNT)]


def wanted(row, **workers):
    """Say what a row gives over a list; None where torch refuses it."""
    if row.samples.startswith("ragged") and row.loader == "build_loader":
        # torch refuses such samples, unless one or several happen to be of one length.
        # Gathered, a field has one type in every batch: padded, with a mask.
        return None
    try:
        return row.epoch(samples_of(row.samples), **workers)
    except Exception:  # noqa: BLE001 -- whatever collate functions and samplers raise
        return None
