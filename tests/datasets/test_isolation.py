"""What a reader does to a sample or batch reaches nothing else."""

import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from loaderkit import SafeDataset, SafeGraphDataset, open_cache, owned_copy, pack
from loaderkit.datasets.owned_copy import shares_memory
from loaderkit.datasets.pack import PackOptions
from loaderkit.errors import CacheError, DatasetError
from loaderkit.testing import assert_same


def samples(count=12):
    torch.manual_seed(0)
    return [
        Data(
            x=torch.randn(i + 1, 3),
            edge_index=torch.zeros(2, i, dtype=torch.long),
            y=torch.tensor([i]),
            tags={"t": [torch.ones(2)]},
            name=f"s{i}",
        )
        for i in range(count)
    ]


def spoil(value):
    """Change every tensor of a sample or batch in place."""
    for store in value.stores:
        for field in store.values():
            if isinstance(field, torch.Tensor):
                field.fill_(7)
    value.tags["t"][0].fill_(7)


class Kept(SafeGraphDataset):
    held = samples()

    def keys(self):
        return range(12)

    def load(self, key):
        return self.held[key]


@pytest.mark.parametrize("cached", [True, False])
def test_changing_what_was_read_changes_no_later_read(tmp_path, cached):
    dataset = Kept(cache=tmp_path / "c.lk" if cached else None)
    wanted = owned_copy(dataset.held)

    for _ in range(2):
        spoil(dataset[3])
        spoil(dataset.batch([3, 4]))

    assert_same(list(dataset), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_changing_a_batch_from_a_loader_changes_no_later_batch(tmp_path, workers):
    dataset = pack(samples(), tmp_path / "c.lk")
    loader = DataLoader(
        dataset, batch_size=4, num_workers=workers, collate_fn=dataset.collate
    )

    first = [owned_copy(batch) for batch in loader]
    for batch in loader:
        spoil(batch)

    assert_same(list(loader), first)


@pytest.mark.slow
def test_a_transform_that_changes_its_sample_starts_afresh_each_time(tmp_path):
    def double(data):
        data.x.mul_(2)
        return data

    dataset = Kept(cache=tmp_path / "c.lk", transform=double)

    assert_same(dataset[5].x, dataset[5].x)
    assert_same(dataset[5].x, 2 * dataset.held[5].x)


def test_a_kept_item_has_its_own_bytes_and_keeps_no_file_mapped(tmp_path):
    dataset = pack(samples(), tmp_path / "c.lk")
    sample, batch = dataset[4], dataset.batch([1, 2])
    mapped = re.compile(re.escape(str(tmp_path)))
    assert mapped.search(Path("/proc/self/maps").read_text())

    del dataset

    assert not mapped.search(Path("/proc/self/maps").read_text())
    for tensor in (sample.x, sample.edge_index, sample.y, batch.x, batch.y):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_two_reads_share_nothing(tmp_path):
    dataset = pack(samples(), tmp_path / "c.lk")

    assert not shares_memory(dataset[1], dataset[1])
    assert not shares_memory(dataset.batch([1]), dataset.batch([1]))
    item = dataset[1]
    assert shares_memory(item, item.x)


def test_a_subset_is_rows_alone(tmp_path):
    dataset = pack(samples(), tmp_path / "c.lk")

    assert [d.name for d in dataset[2:8:3]] == ["s2", "s5"]
    assert [d.name for d in dataset[[-1, 0]]] == ["s11", "s0"]
    assert [d.name for d in dataset[torch.tensor([3])]] == ["s3"]
    assert len(dataset[torch.arange(12) < 5][np.array([True] * 4 + [False])]) == 4
    assert dataset[2:][1:].batch([0]).name == ["s3"]
    assert dataset[2:].key(0) == "2"
    assert dataset[2:].sizes().nodes.tolist() == list(range(3, 13))
    assert dataset[np.int64(3)].name == dataset[torch.tensor(3)].name == "s3"


@pytest.mark.parametrize(
    ("index", "error", "pattern"),
    [
        (12, IndexError, "row 12 was asked of a dataset of 12 samples"),
        (-13, IndexError, "row -13"),
        ([0, 99], IndexError, "row 99"),
        ([True], IndexError, "a mask of 1 was given"),
        ([0.5], TypeError, "rows are integers, booleans or a slice, got list"),
        ([[0], [1, 2]], TypeError, r"or one integer, got lists within it"),
        ([[1, 1], [1, 1]], TypeError, r"shape \[2, 2\]"),
    ],
)
def test_rows_that_are_not_there_are_named(tmp_path, index, error, pattern):
    dataset = pack(samples(), tmp_path / "c.lk")

    with pytest.raises(error, match=pattern):
        dataset[index]


def test_a_batch_of_no_rows_is_refused(tmp_path):
    with pytest.raises(IndexError, match="at least one row"):
        pack(samples(), tmp_path / "c.lk").batch([])


def test_a_dataset_travels_as_its_path(tmp_path):
    dataset = pack(samples(400), tmp_path / "c.lk")
    _ = dataset[0]

    sent = pickle.dumps(dataset)

    assert len(sent) < 1000
    assert_same(pickle.loads(sent)[3], dataset[3])


def test_what_pyg_datasets_tell_is_told(tmp_path):
    dataset = pack(samples(), tmp_path / "c.lk")

    assert dataset.num_node_features == dataset.num_features == 3
    assert dataset.num_edge_features == 0
    assert dataset.num_classes == 12
    assert pack([Data(y=torch.ones(1, 5))], tmp_path / "d.lk").num_classes == 5
    assert pack([Data(y=0.5), Data(y=1.5)], tmp_path / "e.lk").num_classes == 2
    assert pack([Data(z=1)], tmp_path / "f.lk").num_classes == 0
    assert repr(dataset).startswith("SafeGraphDataset(12 samples, ")


def test_sizes_are_those_of_the_samples(tmp_path):
    dataset = pack(samples(), tmp_path / "c.lk", shard_bytes=300)

    sizes = dataset.sizes()

    assert sizes.nodes.tolist() == [d.num_nodes for d in samples()]
    assert sizes.edges.tolist() == [d.num_edges for d in samples()]
    assert sizes.bytes[3] == 4 * 3 * 4 + 2 * 3 * 8 + 8 + 2 * 4 + len("s3")


def test_sizes_without_a_cache_say_what_to_do():
    with pytest.raises(DatasetError, match="sizes of the samples are not known"):
        Kept().sizes()


class Bare(SafeDataset):
    pass


def test_a_class_that_says_nothing_is_told_what_to_write(tmp_path):
    with pytest.raises(NotImplementedError, match=r"def keys\(self\)"):
        len(Bare())
    with pytest.raises(NotImplementedError, match="def load"):
        Bare().load(1)
    with pytest.raises(DatasetError, match=r"it has no load\(key\)"):
        len(Bare(cache=tmp_path / "none"))


class Numbers(SafeGraphDataset):
    def keys(self):
        return [1]

    def load(self, key):
        return key


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_no_graph_is_refused(tmp_path, cached):
    dataset = Numbers(cache=tmp_path / "c.lk" if cached else None)

    with pytest.raises(DatasetError, match=r"load\(1\) returned a int, not a graph"):
        dataset[0]


class FromRaw(SafeDataset):
    def keys(self):
        return sorted(file.name for file in self.raw.iterdir())

    def load(self, key):
        return {"text": (self.raw / key).read_text()}


def test_a_cache_is_served_where_the_raw_data_is_not(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a").write_text("hello")
    assert FromRaw(tmp_path / "raw", tmp_path / "c.lk")[0]["text"] == "hello"

    os.rename(tmp_path / "raw", tmp_path / "gone")  # noqa: PTH104

    assert FromRaw(tmp_path / "raw", tmp_path / "c.lk")[0]["text"] == "hello"


NO_NUMBERS = [-1, 1.5, "2", True, (), float("nan"), 10**6]
WRONG = {
    "workers": NO_NUMBERS,
    "shard_bytes": [
        -1,
        1.5,
        True,
        (),
        float("nan"),
        0,
        None,
        "0 B",
        "much",
        "1.2.3 MB",
    ],
    "overwrite": ["yes", 2, None, []],
    "track_files": ["md5", None, True, ["stat"]],
    "compression": ["gzipp", "", 5, True, ("gzip", 4)],
}
"""Values that no option of packing can have."""


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]]
)
def test_values_that_packing_cannot_have_are_refused_by_name(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        PackOptions(**{name: value})
    with pytest.raises(ValueError, match=f"{name} must be"):
        pack([1], tmp_path / "c.lk", **{name: value})
    assert not (tmp_path / "c.lk").exists()


@pytest.mark.parametrize("opened", [True, False])
def test_a_relative_path_holds_when_the_current_folder_changes(
    tmp_path, monkeypatch, opened
):
    monkeypatch.chdir(tmp_path)
    pack([{"row": row} for row in range(3)], "c.lk")
    dataset = open_cache("c.lk")
    if opened:
        dataset[0]
    sent = pickle.dumps(dataset)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    assert dataset[1]["row"] == pickle.loads(sent)[1]["row"] == 1


@pytest.mark.parametrize(
    "names", [["notes.txt"], ["plan.json", "00001.json", "x.partial"], ["plan.json"]]
)
def test_a_folder_that_is_called_like_a_builds_is_left_alone(tmp_path, names):
    folder = tmp_path / "mine" / ".building"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text('{"mine": true}')

    with pytest.raises(CacheError, match="no packing run has written"):
        pack([{"x": torch.zeros(1)}], tmp_path / "mine", workers=0)

    assert sorted(file.name for file in folder.iterdir()) == sorted(names)
