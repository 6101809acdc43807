"""What a dataset of graphs tells of its graphs, also behind a transform."""

import pytest
import torch
from torch.utils.data import default_collate
from torch_geometric.data import Data, HeteroData, InMemoryDataset

from loaderkit import SafeGraphDataset, open_cache, pack
from loaderkit.datasets import shard_filling
from loaderkit.errors import DatasetError
from loaderkit.testing import assert_same


def graph(label):
    return Data(x=torch.ones(2, 3), edge_attr=torch.ones(4, 5), y=label)


def packed(tmp_path, labels, transform=None):
    pack([graph(label) for label in labels], tmp_path / "c.lk", workers=0)
    return open_cache(tmp_path / "c.lk", transform=transform)


TRANSFORMS = {
    "a pair": lambda g: (torch.zeros(1), g),
    "a list": lambda g: [g, "name"],
    "a dict": lambda g: {"name": "a", "graph": g},
    "a dict of pairs": lambda g: {"pair": (g, 1)},
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_features_are_those_of_the_graph_that_a_transform_hands_on(tmp_path, name):
    dataset = packed(tmp_path, [0, 1, 6], TRANSFORMS[name])

    assert dataset.num_node_features == dataset.num_features == 3
    assert dataset.num_edge_features == 5
    assert dataset.num_classes == 7


def test_classes_are_counted_over_both_graphs_of_a_pair(tmp_path):
    dataset = packed(tmp_path, [0, 1], lambda g: (g, graph(8)))

    assert dataset.num_classes == 9


@pytest.mark.parametrize("returned", ["a text", torch.ones(2), [1, 2], {}])
def test_features_of_what_is_no_graph_are_refused_by_its_type(tmp_path, returned):
    dataset = packed(tmp_path, [0], lambda _: returned)

    with pytest.raises(DatasetError, match="without a graph") as caught:
        _ = dataset.num_node_features

    assert f"returned a {type(returned).__name__} " in caught.value.what
    assert caught.value.fix == "ask the dataset that has no transform"
    assert dataset.num_classes == 0


@pytest.mark.parametrize("labels", [[0.5, 1.5, 0.5], [torch.tensor([0.0]), 1.0]])
def test_two_float_labels_are_two_classes(tmp_path, labels):
    # Without a warning: the suite makes one an error.
    assert packed(tmp_path, labels).num_classes == 2


LABELS = {
    "numbers": [3, 0, 5],
    "floats": [0.5, 1.5, 0.5],
    "tensors [1]": [torch.tensor([label]) for label in (4, 0)],
    "tensors []": [torch.tensor(label) for label in (2, 6)],
    "a label for each node": [torch.tensor([0, 7]), torch.tensor([1, 2])],
    "rows of classes": [torch.zeros(1, 5), torch.ones(1, 5)],
    "labels in two ways": [3, torch.tensor([8])],
    "some without": [3, None, 5],
    "truths": [True, False],
}


@pytest.mark.parametrize("name", LABELS)
def test_classes_are_those_that_pyg_counts_however_labels_are_kept(tmp_path, name):
    class InMemory(InMemoryDataset):
        def __init__(self, graphs):
            super().__init__()
            self.data, self.slices = self.collate(graphs)

    labels = LABELS[name]
    dataset = packed(tmp_path, labels)
    behind_transform = open_cache(tmp_path / "c.lk", transform=lambda graph: graph)
    of_part = dataset[[len(labels) - 1]]

    assert dataset.num_classes == behind_transform.num_classes
    assert of_part.num_classes == behind_transform[[len(labels) - 1]].num_classes
    if name not in {"labels in two ways", "some without", "truths"}:
        assert dataset.num_classes == InMemory(list(behind_transform)).num_classes


def test_many_float_labels_are_counted_with_a_warning_as_in_pyg(tmp_path):
    dataset = packed(tmp_path, [0.5, 1.5, 2.5, 0.5])

    with pytest.warns(UserWarning, match="counts its 3 unique elements") as caught:
        count = dataset.num_classes

    assert count == 3
    assert caught[0].filename == __file__


def test_a_load_that_returns_no_graph_is_refused_with_what_to_return():
    class Tables(SafeGraphDataset):
        def keys(self):
            return ["a"]

        def load(self, key):
            return {"x": key}

    with pytest.raises(DatasetError, match=r"load\('a'\) returned a dict") as caught:
        Tables()[0]

    assert "subclass SafeDataset instead" in caught.value.fix


def test_features_of_a_heterogeneous_graph_are_by_type(tmp_path):
    data = HeteroData()
    data["atom"].x = torch.ones(2, 3)
    data["atom", "in", "bond"].edge_attr = torch.ones(4, 5)
    dataset = pack([data], tmp_path / "c.lk", workers=0)

    assert dataset.num_node_features == {"atom": 3}
    assert dataset.num_edge_features == {("atom", "in", "bond"): 5}


@pytest.mark.parametrize(
    "samples",
    [
        [{"a": torch.full((2,), n), "b": n} for n in range(4)],
        [torch.full((2,), n) for n in range(4)],
        [(torch.full((2,), n), float(n)) for n in range(4)],
    ],
    ids=["dicts", "tensors", "pairs"],
)
def test_samples_that_are_no_graphs_are_joined_as_torchs_loader_joins_them(
    tmp_path, samples
):
    pack(samples, tmp_path / "c", workers=0)
    dataset = SafeGraphDataset(cache=tmp_path / "c")

    batch = dataset.batch([3, 0, 1])

    assert_same(batch, default_collate([samples[3], samples[0], samples[1]]))
    with pytest.raises(DatasetError, match=r"Sample 0 of .* is no graph"):
        dataset.sizes()


def test_one_sample_that_is_no_graph_beside_graphs_says_so(tmp_path, monkeypatch):
    samples = [Data(x=torch.ones(3, 2)), {"a": torch.ones(2)}]
    # As a cache that was packed before it was refused.
    monkeypatch.setattr(shard_filling, "check_kind", lambda *_: None)
    pack(samples, tmp_path / "c", workers=0)
    dataset = open_cache(tmp_path / "c")

    assert_same(dataset.batch([1]), {"a": torch.ones(1, 2)})
    with pytest.raises(DatasetError, match=r"Sample 1 of .* is no graph"):
        dataset.sizes()


@pytest.mark.parametrize("rows", [None, [1, 2], slice(1, None), torch.tensor([2, 0])])
def test_copy_gives_what_pygs_gives(tmp_path, rows):
    graphs = [Data(x=torch.full((2, 1), float(i))) for i in range(4)]
    ours = pack(graphs, tmp_path / "c.lk", workers=0)
    pygs = InMemoryDataset()
    pygs.data, pygs.slices = pygs.collate(graphs)

    copied = ours.copy(rows)
    wanted = pygs.copy(rows)
    copied.transform = lambda graph: None

    assert copied is not ours
    assert ours.transform is None
    assert len(copied) == len(wanted)
    assert copied[0] is None
    assert [g.x.tolist() for g in ours.copy(rows)] == [g.x.tolist() for g in wanted]
