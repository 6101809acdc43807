"""What can be packed, from real files and PyG's own datasets."""

import multiprocessing
import os
import pickle
import time

import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData, InMemoryDataset, OnDiskDataset

from loaderkit import PtFolder, SafeDataset, pack
from loaderkit.datasets.pack import PackOptions
from loaderkit.datasets.sources import as_source
from loaderkit.errors import CacheError, DatasetError, StaleCacheError
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


def test_an_in_memory_dataset_that_is_read_keeps_no_copies():
    read_by_us, read_by_a_loop = InMemory(graphs()), InMemory(graphs())

    list(map(as_source(read_by_us).read, range(6)))
    list(read_by_a_loop)

    # PyG's own list of the graphs that were read.
    assert read_by_us._data_list == [None] * 6
    assert None not in read_by_a_loop._data_list


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


@pytest.mark.slow
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
    folder = PtFolder(tmp_path, pattern="**/*.pt")

    assert [folder.key(row) for row in range(2)] == ["a/00.pt", "a/01.pt"]


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


@pytest.mark.slow
def test_files_that_hold_many_graphs_say_what_to_do(tmp_path):
    with pytest.raises(DatasetError, match="a list of 6 graphs"):
        pack(write(tmp_path / "a", [graphs()]), tmp_path / "c.lk")
    source = InMemory(graphs())
    with pytest.raises(DatasetError, match="a whole InMemoryDataset"):
        pack(write(tmp_path / "b", [(source._data, source.slices)]), tmp_path / "d.lk")


class Empty(IterableDataset):
    def __iter__(self):
        return iter(())


class OnlyLong:
    def __len__(self):
        return 3


class NoLength:
    def __getitem__(self, row):
        return row


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        (OnlyLong(), r"pack\(list\(samples\)"),
        (Empty(), "give it at least one sample"),
        ((i for i in ()), "empty once it was read"),
        ({"a": 1}, r"pack\(\[sample\]"),
        ({"a": {"x": 1}, "b": {"x": 2}}, r"samples\.values"),
        (NoLength(), "__len__"),
        ([], "give it at least one sample"),
        ("/nowhere", "There is no folder"),
    ],
)
def test_what_cannot_be_packed_says_what_to_do(tmp_path, source, fix):
    with pytest.raises(DatasetError, match=fix):
        pack(source, tmp_path / "c.lk")


class Numbers(SafeDataset):
    """Ten numbers by ``load``."""

    def keys(self):
        return [f"n{i}" for i in range(10)]

    def load(self, key):
        return {"x": torch.tensor([int(key[1:])])}


class Doubled(Numbers):
    """Whose samples are not what ``load`` gives."""

    def __getitem__(self, index):
        return {"x": 2 * super().__getitem__(index)["x"]}


PARTS = {
    "all": lambda: Numbers(),
    "a slice": lambda: Numbers()[2:5],
    "rows": lambda: Numbers()[[7, 1, 1]],
    "a slice of a slice": lambda: Numbers()[::-1][3:],
    "a transform": lambda: Numbers(transform=lambda sample: {"x": sample["x"] + 100}),
    "its own __getitem__": Doubled,
}


@pytest.mark.many_cases
@pytest.mark.parametrize("kind", sorted(PARTS))
@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_packed_is_what_the_dataset_gives(tmp_path, kind, workers):
    source = PARTS[kind]()
    wanted = [source[row] for row in range(len(source))]

    packed = pack(source, tmp_path / "c.lk", workers=workers)

    assert_same(list(packed), wanted)


@pytest.mark.parametrize("part", [slice(None), slice(1, 4), [3, 0]], ids=str)
def test_a_cache_is_packed_again_as_any_dataset(tmp_path, part):
    cache = pack(graphs(), tmp_path / "c.lk", workers=0)

    again = pack(cache[part], tmp_path / "again.lk", workers=0)

    assert_same(list(again), list(cache[part]))


def pack_slowly(path, begun):
    class Slow(Numbers):
        def load(self, key):
            if key != "n0":  # the first is read before the folder is taken
                begun.set()
            time.sleep(0.05)
            return super().load(key)

    pack(Slow(), path, workers=0)


OTHERS = {
    "fewer": lambda: [{"x": torch.tensor([i])} for i in range(9)],
    "as many": lambda: [{"x": torch.tensor([-i])} for i in range(10)],
    "other names": lambda: [{"x": torch.tensor([i])} for i in range(10)],
    "the same": Numbers,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_a_cache_that_another_process_packs_meanwhile_is_of_the_same_samples(
    tmp_path, kind
):
    fork, source = multiprocessing.get_context("fork"), OTHERS[kind]()
    begun = fork.Event()
    other = fork.Process(target=pack_slowly, args=(tmp_path / "c.lk", begun))
    other.start()
    begun.wait()

    if kind == "the same":
        packed = pack(source, tmp_path / "c.lk", workers=0)
        assert_same(list(packed), list(source))
    else:
        with pytest.raises(CacheError, match="other samples") as caught:
            pack(source, tmp_path / "c.lk", workers=0)
        assert "another folder" in caught.value.fix
    other.join()


class Renamed(Numbers):
    """Another source, of as many samples."""

    version = "2"


@pytest.mark.slow
def test_a_dataset_refuses_what_another_process_packs_from_another_source(tmp_path):
    fork = multiprocessing.get_context("fork")
    begun = fork.Event()
    other = fork.Process(target=pack_slowly, args=(tmp_path / "c.lk", begun))
    other.start()
    begun.wait()

    with pytest.raises(StaleCacheError, match="version '2' now"):
        len(Renamed(cache=tmp_path / "c.lk", packing=PackOptions(workers=0)))
    other.join()
