"""torch's ConcatDataset of our datasets, in any nest, is batched as one of them is."""

import random

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split
from torch_geometric.data import Batch, Data

from loaderkit import build_loader, pack
from loaderkit.composed_joining import own_collate
from loaderkit.dataset_protocol import ask_identity
from loaderkit.errors import LoaderError
from loaderkit.loader.description import sizes_of


def ring(nodes):
    order = torch.arange(nodes)
    edges = torch.stack([order, order.roll(1)])
    return Data(x=torch.full((nodes, 2), nodes), edge_index=edges)


def text(length):
    return {"ids": torch.arange(length) + 1, "label": length}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    counts = [range(3, 10), range(20, 26), range(5, 8)]
    return [
        pack([ring(nodes) for nodes in some], folder / f"{number}.lk", workers=0)
        for number, some in enumerate(counts)
    ]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    counts = [range(3, 10), range(2, 6)]
    return [
        pack([text(length) for length in some], folder / f"{number}.lk", workers=0)
        for number, some in enumerate(counts)
    ]


def nest_of(parts, chance, depth=3):
    """Draw a nest of subsets, splits and concatenations, repeats allowed."""
    kind = chance.choice(["part", "subset", "split", "concat"])
    if depth == 0 or kind == "part":
        return chance.choice(parts)
    if kind == "concat":
        count = chance.randint(1, 3)
        return ConcatDataset([nest_of(parts, chance, depth - 1) for _ in range(count)])
    inner = nest_of(parts, chance, depth - 1)
    if kind == "split" and len(inner) > 1:
        generator = torch.Generator().manual_seed(chance.randrange(100))
        return random_split(inner, [len(inner) - 1, 1], generator)[0]
    rows = [chance.randrange(len(inner)) for _ in range(max(1, len(inner) // 2))]
    return Subset(inner, rows)


@pytest.mark.parametrize("number", range(40))
def test_sizes_of_any_nest_are_those_of_its_samples(graphs, texts, number):
    chance = random.Random(number)
    some_graphs, some_texts = nest_of(graphs, chance), nest_of(texts, chance)

    nodes = [graph.num_nodes for graph in some_graphs]
    tokens = [len(sample["ids"]) for sample in some_texts]
    assert sizes_of(some_graphs, "nodes").tolist() == nodes
    assert sizes_of(some_texts, "tokens").tolist() == tokens


@pytest.mark.many_cases
@pytest.mark.parametrize("number", range(15))
def test_batches_of_any_nest_are_limited_and_equal_to_pygs(graphs, number):
    nest = nest_of(graphs, random.Random(number))
    loader = build_loader(nest, max_nodes=60, num_workers=0, probe=False)

    row = 0
    for batch in loader:
        samples = [nest[at] for at in range(row, row + batch.num_graphs)]
        expected = Batch.from_data_list(samples)
        assert batch.num_nodes <= 60
        assert torch.equal(batch.x, expected.x)
        assert torch.equal(batch.edge_index, expected.edge_index)
        row += batch.num_graphs
    assert row == len(nest)


@pytest.mark.parametrize("number", range(15))
def test_texts_of_any_nest_are_padded(texts, number):
    nest = nest_of(texts, random.Random(number))
    loader = build_loader(nest, batch_size=3, num_workers=0, probe=False)

    labels = [label for batch in loader for label in batch["label"].tolist()]
    lengths = [n for batch in loader for n in batch["ids"].lengths.tolist()]
    assert labels == lengths == [sample["label"] for sample in nest]


def test_a_sum_of_datasets_is_one_of_these(graphs):
    loader = build_loader(graphs[0] + graphs[1], max_nodes=50, num_workers=0)

    assert sum(batch.num_graphs for batch in loader) == 13


def test_padding_of_the_users_is_that_of_all_parts(texts):
    first, second = (copy_with_padding(dataset, -100) for dataset in texts)

    batch = build_loader(first + second, batch_size=2, num_workers=0, seed=0)
    [joined, *_] = batch

    assert joined["ids"].values[0].tolist() == [1, 2, 3, -100]


def copy_with_padding(dataset, pad_value):
    return type(dataset)(cache=dataset.cache, pad_value=pad_value)


def test_datasets_that_pad_otherwise_are_not_joined_as_one_of_them(texts):
    first, second = texts[0], copy_with_padding(texts[1], -100)

    assert own_collate(ConcatDataset([first, texts[1]])) is not None
    assert own_collate(ConcatDataset([first, second])) is None
    assert own_collate(ConcatDataset([first, [text(3)]])) is None


@pytest.mark.slow
def test_a_state_over_other_parts_is_refused(graphs):
    def loader_of(*parts):
        concatenated = ConcatDataset(parts)
        return build_loader(concatenated, batch_size=2, shuffle=True, seed=0)

    state = loader_of(graphs[0], graphs[0]).state_dict()

    loader_of(graphs[0], graphs[0]).load_state_dict(state)
    other = loader_of(graphs[0], Subset(graphs[0], [6, 5, 4, 3, 2, 1, 0]))
    with pytest.raises(LoaderError):
        other.load_state_dict(state)
    assert ask_identity(ConcatDataset([graphs[0], [ring(3)]])) is None


def test_one_part_without_sizes_is_named(graphs):
    class MadeWhenRead(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, row):
            return ring(3)

    with pytest.raises(LoaderError, match="a MadeWhenRead does not say them"):
        build_loader(ConcatDataset([graphs[0], MadeWhenRead()]), max_nodes=50)
