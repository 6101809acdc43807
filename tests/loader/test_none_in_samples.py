"""None in samples that nobody packed is told with the sample and the key."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader

from loaderkit import build_loader
from loaderkit.errors import LoaderError

GRAPH = Data(x=torch.ones(2, 1), edge_index=torch.zeros(2, 1, dtype=torch.int64))
NESTS = {
    "": lambda value: value,
    "['y']": lambda value: {"x": 1, "y": value},
    "[1]": lambda value: (torch.ones(2), value),
    "['a']['b'][1]": lambda value: {"a": {"b": [torch.ones(1), value]}},
    "[1] beside a graph": lambda value: (GRAPH, value),
}
VALUES = {
    "tensor": torch.ones(2),
    "number": 1.5,
    "integer": 3,
    "list": [1, 2],
    "dict": {"z": 1},
    "graph": GRAPH,
}


class Rows(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, row):
        return self.samples[row]


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


SOURCES = {
    "list": list,
    "tuple": tuple,
    "dataset": Rows,
    "part": lambda samples: Subset(samples, range(len(samples))),
    "stream": Stream,
}


def is_refused_by_torch(samples):
    kind = GraphLoader if "Data(" in str(samples) else DataLoader
    try:
        list(kind(samples, batch_size=len(samples)))
    except (TypeError, RuntimeError, AttributeError):
        return True
    return False


@pytest.mark.many_cases(quick=4)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("nest", NESTS)
def test_what_torch_refuses_is_told_with_the_sample_and_the_key(nest, value):
    for place in (0, 2):
        values = [VALUES[value]] * 4
        values[place] = None
        samples = list(map(NESTS[nest], values))
        assert is_refused_by_torch(samples)
        for name, source in SOURCES.items():
            dataset = source(samples)
            loader = build_loader(dataset, batch_size=4, num_workers=0)
            with pytest.raises(LoaderError, match="NoneType") as raised:
                list(loader)

            field = nest.removesuffix(" beside a graph")
            where = f"{field or 'the sample'} is None in"
            where += f" sample {place} of" if name == "stream" else f" row {place},"
            assert raised.value.why.startswith(where)
            if name == "stream":
                assert f"if sample{field} is not None: yield" in raised.value.fix
                continue
            names = {"dataset": dataset, "torch": torch}
            exec(raised.value.fix.split("; or put")[0], names)
            [batch] = build_loader(names["dataset"], batch_size=4, num_workers=0)
            assert len(names["dataset"]) == 3
            assert batch is not None


@pytest.mark.parametrize("nest", NESTS)
def test_what_is_none_in_all_samples_is_told(nest):
    samples = [NESTS[nest](None)] * 3
    assert is_refused_by_torch(samples)
    for source in SOURCES.values():
        with pytest.raises(LoaderError, match="NoneType") as raised:
            list(build_loader(source(samples), batch_size=3, num_workers=0))
        field = nest.removesuffix(" beside a graph")
        what = field or "each"
        assert raised.value.why.startswith(f"{what} is None in all samples")


def test_none_among_texts_is_joined_as_torch_joins_it_and_not_blamed_for_another():
    samples = [{"t": "a", "x": torch.ones(1)}, {"t": None, "x": torch.ones(1)}]
    [ours] = build_loader(samples, batch_size=2, num_workers=0)
    [theirs] = DataLoader(samples, batch_size=2)
    assert ours["t"] == theirs["t"] == ["a", None]

    samples[0]["x"] = torch.ones(2)
    with pytest.raises(LoaderError) as raised:
        list(build_loader(samples, batch_size=2, num_workers=0))
    assert raised.value.why == "['x'] has shapes [2] and [1]"
