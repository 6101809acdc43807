"""What can be packed, from real files and PyG's own datasets."""

import os
import pickle

import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData, InMemoryDataset, OnDiskDataset

from loaderkit import DatasetError, PtFolder, pack
from loaderkit.datasets.sources import as_source
from loaderkit.testing import assert_same


def graphs(count=6):
    torch.manual_seed(0)
    return [
        Data(x=torch.randn(i + 1, 2), edge_index=EdgeIndex([[0], [0]]).as_tensor(), y=i)
        for i in range(count)
    ]


class InMemory(InMemoryDataset):
    def __init__(self, samples):
        super().__init__(None)
        self.data, self.slices = self.collate(samples)


class OnDisk(OnDiskDataset):
    def __init__(self, root):
        super().__init__(str(root))


def test_a_list_is_packed_in_its_order(tmp_path):
    samples = graphs()

    dataset = pack(samples, tmp_path / "c.lk")

    assert_same(list(dataset), samples)
    assert dataset.key(3) == "3"


def test_an_in_memory_dataset_is_packed_and_does_not_grow(tmp_path):
    source = InMemory(graphs())

    dataset = pack(source[1:4], tmp_path / "c.lk", workers=0)

    assert_same(list(dataset), [source[i] for i in (1, 2, 3)])
    fresh = InMemory(graphs())
    list(map(as_source(fresh).read, range(6)))
    assert not any(fresh._data_list or [])


def test_an_on_disk_dataset_is_packed(tmp_path):
    source = OnDisk(tmp_path / "sqlite")
    source.extend(graphs())

    dataset = pack(source, tmp_path / "c.lk", workers=0)

    assert_same(list(dataset), graphs())
    source.close()


@pytest.mark.parametrize(
    "wrap", [lambda d: Subset(d, [2, 0]), lambda d: ConcatDataset([d, d])]
)
def test_any_map_style_dataset_is_packed(tmp_path, wrap):
    source = wrap(TensorDataset(torch.arange(3), torch.ones(3, 2)))

    dataset = pack(source, tmp_path / "c.lk")

    assert_same(list(dataset), [source[i] for i in range(len(source))])


def write(folder, samples):
    folder.mkdir()
    for number, sample in enumerate(samples):
        torch.save(sample, folder / f"{number:02}.pt")
    return folder


def test_a_folder_of_files_is_packed_in_the_order_of_their_names(tmp_path):
    hetero = HeteroData()
    hetero["a"].x = torch.ones(2, 1)
    hetero["a", "to", "a"].edge_index = torch.zeros(2, 1, dtype=torch.long)
    edge_index = EdgeIndex([[0, 1], [1, 0]], sparse_size=(2, 2), sort_order="row")
    samples = [*graphs(2), hetero, Data(edge_index=edge_index, num_nodes=2)]
    samples += [Data(a=torch.ones(2).numpy(), n=2)]

    dataset = pack(write(tmp_path / "pt", samples), tmp_path / "c.lk")

    assert_same(list(dataset), samples)
    assert dataset.key(1) == "01.pt"


def test_files_in_folders_below_are_found_by_a_pattern(tmp_path):
    write(tmp_path / "a", graphs(2))

    with pytest.raises(DatasetError, match="it holds a"):
        PtFolder(tmp_path)
    found = PtFolder(tmp_path, pattern="**/*.pt")

    assert [found.key(row) for row in range(2)] == ["a/00.pt", "a/01.pt"]


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.makedirs, (str(self.path), 0o777, True)


def test_a_file_that_runs_code_is_refused_until_it_is_trusted(tmp_path):
    folder = write(tmp_path / "pt", [{"x": Payload(tmp_path / "ran")}])

    with pytest.raises(DatasetError, match=r"needs os\.makedirs") as caught:
        pack(folder, tmp_path / "c.lk", workers=0)

    assert not (tmp_path / "ran").exists()
    assert "weights_only=False" in caught.value.fix
    pack(
        PtFolder(folder, weights_only=False),
        tmp_path / "c.lk",
        workers=0,
        overwrite=True,
    )
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a zip", pickle.dumps(3)])
def test_a_file_that_torch_did_not_write_is_named(tmp_path, content):
    folder = write(tmp_path / "pt", graphs(1))
    (folder / "01.pt").write_bytes(content)

    with pytest.raises(DatasetError, match=r"01\.pt"):
        pack(folder, tmp_path / "c.lk", workers=0)


def test_files_that_hold_many_graphs_say_what_to_do(tmp_path):
    with pytest.raises(DatasetError, match="a list of 6 graphs"):
        pack(write(tmp_path / "a", [graphs()]), tmp_path / "c.lk")
    source = InMemory(graphs())
    with pytest.raises(DatasetError, match="a whole InMemoryDataset"):
        pack(write(tmp_path / "b", [(source._data, source.slices)]), tmp_path / "d.lk")


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


class NoLength:
    def __getitem__(self, row):
        return row


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ((i for i in range(3)), r"pack\(list\(samples\)"),
        (Endless(), r"pack\(list\(samples\)"),
        ({"a": 1}, r"samples\.values"),
        (NoLength(), "__len__"),
        ([], "give it at least one sample"),
        ("/nowhere", "There is no folder"),
    ],
)
def test_what_cannot_be_packed_says_what_to_do(tmp_path, source, fix):
    with pytest.raises(DatasetError, match=fix):
        pack(source, tmp_path / "c.lk")
