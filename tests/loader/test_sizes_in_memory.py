"""Limits for samples that lie in memory, which nobody has packed.

The laws: sizes are those of a cache of the same samples; batches are those of PyG's
``DynamicBatchSampler``; and each limit that a plan names is taken.
"""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.loader import DynamicBatchSampler
from torch_geometric.nn import global_add_pool

from loaderkit import build_loader, pack, plan_batch
from loaderkit.budget.remedies import REMEDIES
from loaderkit.errors import LoaderError
from loaderkit.loader.description import sizes_of

COUNT = 40
NAMES = ("nodes", "edges", "bytes", "tokens")


def graph(number):
    nodes = 2 + number * 7 % 11
    return Data(
        x=torch.rand(nodes, 3),
        edge_index=torch.arange(2 * nodes).view(2, nodes) % nodes,
        y=float(number),
        name="n" * (number % 3),
    )


def typed_graph(number):
    typed = HeteroData()
    typed["a"].x = torch.rand(2 + number % 5, 2)
    typed["b"].x = torch.rand(1 + number % 3, 4)
    typed["a", "to", "b"].edge_index = torch.zeros(2, 1 + number * 3 % 7, dtype=int)
    return typed


class Clip(NamedTuple):
    sound: torch.Tensor
    label: int


SAMPLES = {
    "graphs": graph,
    "typed graphs": typed_graph,
    "numbers": float,
    "texts": lambda i: "ö" * (1 + i % 4),
    "tensors": lambda i: torch.rand(1 + i % 9, 2),
    "equal tensors": lambda _: torch.rand(3, 8),
    "single numbers": torch.tensor,
    "half": lambda i: torch.zeros(1 + i % 3, dtype=torch.float16),
    "arrays": lambda i: np.zeros((1 + i % 5, 2), np.int32),
    "lists": lambda i: list(range(1 + i % 6)),
    "pairs": lambda i: (torch.rand(3, 8), i),
    "named tuples": lambda i: Clip(torch.rand(1 + i % 7), i),
    "dicts": lambda i: {
        "x": torch.rand(1 + i % 4, 2),
        "image": torch.rand(50),
        "rest": {"n": i, "f": 0.5, "b": True, "s": "ab" * i, "none": None},
    },
}


class InMemory(InMemoryDataset):
    def __init__(self, graphs):
        super().__init__(None)
        self.data, self.slices = self.collate(graphs)


def sizes_or_none(dataset, name):
    try:
        return sizes_of(dataset, name).tolist()
    except LoaderError:
        return None


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("kind", SAMPLES)
def test_sizes_are_those_of_a_cache_of_the_same_samples(kind, tmp_path):
    samples = [SAMPLES[kind](number) for number in range(COUNT)]

    cache = pack(samples, tmp_path / "a.lk", workers=1)
    expected = {name: sizes_or_none(cache, name) for name in NAMES}

    assert expected["bytes"] is not None
    assert {name: sizes_or_none(samples, name) for name in NAMES} == expected
    assert sizes_or_none(dict(enumerate(samples)), "bytes") == expected["bytes"]
    assert sizes_or_none(tuple(samples), "bytes") == expected["bytes"]


def test_lists_in_samples_have_lengths_too(tmp_path):
    samples = [{"ids": [1] * (number % 6), "n": number} for number in range(COUNT)]

    cache = pack(samples, tmp_path / "a.lk", workers=1)

    assert sizes_of(samples, "tokens").tolist() == [number % 6 for number in range(40)]
    assert sizes_of(cache, "tokens").tolist() == sizes_of(samples, "tokens").tolist()
    # In a cache such lists are texts; in a batch each number is one of int64.
    assert sizes_of(samples, "bytes")[5] == 6 * 8


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_as_long_as_they_have_tensors(layout):
    samples = [
        torch.nested.nested_tensor([torch.rand(2)] * (1 + i % 4), layout=layout)
        for i in range(COUNT)
    ]

    assert sizes_or_none(samples, "tokens") == [sample.size(0) for sample in samples]
    assert sizes_or_none(samples, "nodes") is None


@pytest.mark.parametrize("larger", [1, 3])
def test_larger_samples_are_counted_where_there_are_more(larger):
    samples = [torch.rand(9)] * larger + [torch.rand(2)] * 3

    with pytest.raises(LoaderError) as raised:
        build_loader(samples, max_tokens=4, num_workers=0)

    assert ("so have 2 more." in str(raised.value)) == (larger == 3)
    assert "0 more" not in str(raised.value)


def dynamic_batches(dataset, most, mode):
    # Without a number of steps it has no length, which list() would ask for.
    return [batch for batch in DynamicBatchSampler(dataset, most, mode)]  # noqa: C416


@pytest.mark.many_cases(quick=4)
@pytest.mark.parametrize("mode", ["node", "edge"])
@pytest.mark.parametrize("most", [12, 31, 100, 10**6])
def test_batches_are_those_of_pygs_sampler(mode, most):
    graphs = [graph(number) for number in range(COUNT)]
    datasets = {
        "list": graphs,
        "typed": [typed_graph(number) for number in range(COUNT)],
        "InMemoryDataset": InMemory(graphs),
        "a part of one": InMemory(graphs)[5:30],
        "Subset": Subset(graphs, range(3, 40, 3)),
        "ConcatDataset": ConcatDataset([graphs[:9], InMemory(graphs[9:])]),
    }
    for kind, dataset in datasets.items():
        loader = build_loader(dataset, num_workers=0, **{f"max_{mode}s": most})

        assert [*loader.batch_sampler] == dynamic_batches(dataset, most, mode), kind
        totals = [getattr(batch, f"num_{mode}s") for batch in loader]
        assert max(totals) <= most


@pytest.mark.parametrize("name", ["bytes", "tokens"])
def test_no_batch_is_above_a_limit_and_none_could_take_the_next_sample(name):
    samples = [SAMPLES["dicts"](number)["x"] for number in range(COUNT)]
    sizes = [len(x) if name == "tokens" else x.nbytes for x in samples]
    most = 3 * max(sizes)

    loader = build_loader(
        samples, num_workers=0, collate_fn=list, **{f"max_{name}": most}
    )
    batches = [*loader.batch_sampler]

    assert [*itertools.chain(*batches)] == [*range(COUNT)]
    for batch, following in itertools.pairwise(batches):
        total = sum(sizes[row] for row in batch)
        assert total <= most < total + sizes[following[0]]


def test_stacked_parts_count_together():
    graphs = [graph(number) for number in range(COUNT)]
    texts = [torch.rand(1 + number % 9) for number in range(COUNT)]
    stack = StackDataset(graph=graphs, text=texts, label=[*range(COUNT)])

    assert sizes_of(stack, "nodes").tolist() == [each.num_nodes for each in graphs]
    assert sizes_or_none(stack, "tokens") is None  # graphs may count, and have none
    labelled = StackDataset(texts, [*range(COUNT)])
    assert sizes_of(labelled, "tokens").tolist() == [len(text) for text in texts]
    assert sizes_of(labelled, "bytes").tolist() == [8 + text.nbytes for text in texts]


def test_rows_of_a_tensor_dataset():
    rows = TensorDataset(torch.rand(COUNT, 8), torch.arange(COUNT))

    loader = build_loader(rows, num_workers=0, max_bytes=5 * (8 * 4 + 8))

    assert [len(numbers) for _, numbers in loader] == [5] * 8


@pytest.mark.parametrize(
    ("samples", "options"),
    [
        ([graph(number) for number in range(8)], {"max_tokens": 9}),
        ([1.5, 2.5, 3.5], {"max_nodes": 9}),
        ([torch.rand(3), torch.rand(4)], {"bucket_by": "edges", "batch_size": 2}),
        ([{"x": torch.rand(3)}, {"y": 1}], {"max_tokens": 4}),
    ],
)
def test_the_fix_of_a_refusal_runs_with_the_same_samples(samples, options):
    with pytest.raises(LoaderError, match="not known") as caught:
        build_loader(samples, num_workers=0, **options)

    assert "sizes()" not in str(caught.value)  # which a list cannot have
    named = re.findall(r"max_\w+", caught.value.fix)
    assert named
    for name in named:
        build_loader(samples, num_workers=0, collate_fn=list, **{name: 10**6})


def test_samples_of_unknown_size_are_not_taken_for_empty_ones():
    samples = [Path(f"{number}.png") for number in range(4)]

    with pytest.raises(LoaderError, match="bytes of the samples are not known") as why:
        build_loader(samples, num_workers=0, max_bytes=10)

    assert "max_" not in why.value.fix


class ReadsItself(list):
    """A list by its class, whose samples a user's code makes."""

    def __getitem__(self, row):
        raise AssertionError(row)


def test_a_list_that_makes_its_samples_is_not_read_for_their_sizes():
    with pytest.raises(LoaderError, match=r"loaderkit.pack\(dataset, path\)"):
        build_loader(ReadsItself(range(9)), num_workers=0, max_nodes=10)


def test_a_list_that_grows_is_measured_again():
    samples = [graph(number) for number in range(10)]
    loader = build_loader(samples, num_workers=0, max_nodes=30)
    before = sum(batch.num_graphs for batch in loader)

    samples += [graph(number) for number in range(10, COUNT)]

    assert before == 10
    assert [*loader.batch_sampler] == dynamic_batches(samples, 30, "node")
    assert sum(batch.num_graphs for batch in loader) == COUNT


LIMITING = [remedy for remedy in REMEDIES if "build_loader(" in remedy.code]
"""Of the remedies that plans and diagnoses print, those that are about a loader."""


@pytest.mark.parametrize("remedy", LIMITING, ids=lambda remedy: remedy.name)
def test_each_limit_that_a_remedy_names_is_taken(remedy):
    graphs = [graph(number) for number in range(COUNT)]
    options = re.findall(r"(max_nodes|bucket_by)=", remedy.code)
    values = {"max_nodes": 30, "bucket_by": "nodes"}

    loader = build_loader(
        graphs, num_workers=0, **{name: values[name] for name in options}
    )

    assert sum(batch.num_graphs for batch in loader) == COUNT


def test_a_remedy_limits_the_nodes_of_a_batch():
    assert any("max_nodes=" in remedy.code for remedy in LIMITING)


class Summed(torch.nn.Module):
    """Takes bytes for each node."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 64)

    def forward(self, batch):
        return global_add_pool(self.layer(batch.x), batch.batch).sum(1)


@pytest.mark.slow
def test_each_limit_that_a_plan_names_is_taken():
    graphs = [graph(number) for number in range(COUNT)]

    plan = plan_batch(
        Summed(),
        graphs,
        "cuda",
        limit="200 KiB",
        batch_size=16,
        loss=lambda output, batch: output.sum() + batch.y.sum(),
    )

    bounds = [each.budget.loader_options() for each in plan.configurations]
    assert any(bounds)
    for options in bounds:
        loader = build_loader(graphs, num_workers=0, **options)
        assert sum(batch.num_graphs for batch in loader) == COUNT
