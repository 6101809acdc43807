"""A dataset without a cache says that it reads through load(), and how to have one."""

import warnings

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset
from torch_geometric.data import Data

import loaderkit
from loaderkit.datasets.safe import SafeDataset, SafeGraphDataset

PART = "has no cache: load() makes each sample"


class Rings(SafeGraphDataset):
    def keys(self):
        return range(4)

    def load(self, key):
        return Data(x=torch.ones(key + 1, 1))


class Words(SafeDataset):
    def keys(self):
        return range(4)

    def load(self, key):
        return {"x": torch.full((2,), key)}


class FromRaw(Words):
    def load(self, key):
        return {"x": f"{self.raw} {key}"}


class FromRawInAProperty(Words):
    @property
    def folder(self):
        return self.raw


class WithAnInit(Words):
    def __init__(self, raw, scale=1):
        super().__init__(raw)
        self.scale = scale


class Inherits(FromRaw):
    pass


def plan_of(dataset):
    return str(loaderkit.build_loader(dataset, batch_size=2, num_workers=0).plan)


def wrapped(dataset):
    yield dataset
    yield dataset[[0, 1]]
    yield Subset(dataset, [0, 1])
    yield ConcatDataset([dataset, dataset])


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("kind", [Rings, Words, FromRaw])
def test_the_plan_and_the_text_of_a_dataset_say_that_there_is_no_cache(kind, tmp_path):
    packed = kind(cache=tmp_path / "a.lk")
    for dataset in wrapped(kind()):
        assert " ".join(plan_of(dataset).split()).count(PART) == 1
    for dataset in wrapped(packed):
        assert PART not in plan_of(dataset)

    assert "no cache: load() at each read" in repr(kind())
    assert "no cache" not in repr(packed)


@pytest.mark.parametrize("kind", [Rings, Words])
def test_a_folder_that_nobody_reads_is_asked_about(kind):
    name = kind.__name__
    with pytest.warns(UserWarning, match=rf"did you mean {name}\(cache='folder'\)\?"):
        kind("folder")


@pytest.mark.parametrize("kind", [FromRaw, FromRawInAProperty, WithAnInit, Inherits])
def test_a_folder_that_somebody_reads_is_not(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind("folder")


def test_raw_data_beside_a_cache_is_not_asked_about(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Words("folder", cache=tmp_path / "a.lk")


class RingsOfAnyKind(SafeDataset):
    """Graphs in a dataset that is not told of them."""

    def keys(self):
        return range(4)

    def load(self, key):
        edges = torch.tensor([[0, key], [key, 0]])
        return Data(x=torch.ones(key + 1, 1), edge_index=edges)


@pytest.mark.slow
def test_graphs_of_any_dataset_are_joined_as_by_pyg_with_a_cache_and_without(tmp_path):
    from torch_geometric.loader import DataLoader

    graphs = list(RingsOfAnyKind())
    [expected] = DataLoader(graphs, batch_size=4)

    for dataset in (RingsOfAnyKind(), RingsOfAnyKind(cache=tmp_path / "a.lk")):
        [batch] = loaderkit.build_loader(dataset, batch_size=4, num_workers=0)
        for joined in (batch, dataset.batch(range(4))):
            assert type(joined) is type(expected)
            assert joined.to_dict().keys() == expected.to_dict().keys()
            for name, value in expected.to_dict().items():
                assert torch.equal(joined[name], value)
