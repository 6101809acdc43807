"""A file that forked workers would share is found, wherever a dataset holds it."""

import io
import mmap
import multiprocessing
import sqlite3
import sys
import tarfile
import zipfile
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from loaderkit import build_loader, pack
from loaderkit.open_files import find_shared_files


class Holder(Dataset):
    """A dataset that holds something."""

    def __init__(self, held):
        self.held = held

    def __len__(self):
        return 8

    def __getitem__(self, row):
        return torch.tensor(row)


def raw_file(folder):
    (folder / "raw").write_bytes(bytes(100))
    return (folder / "raw").open("rb")


def hdf5_file(folder):
    return h5py.File(folder / "values.h5", "w")


def hdf5_dataset(folder):
    file = hdf5_file(folder)
    file["x"] = np.zeros(3)
    return file["x"]


def archive(folder):
    with zipfile.ZipFile(folder / "values.zip", "w") as file:
        file.writestr("x", "1")
    return zipfile.ZipFile(folder / "values.zip")


def tape(folder):
    with tarfile.open(folder / "values.tar", "w") as file:
        file.addfile(tarfile.TarInfo("x"))
    return tarfile.open(folder / "values.tar")


def database(folder):
    return sqlite3.connect(folder / "values.db")


def log(folder):
    return (folder / "log").open("a")


def mapped(folder):
    with raw_file(folder) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


SHARED = [raw_file, hdf5_file, hdf5_dataset, archive, tape, database]
HARMLESS = [log, mapped, lambda _: io.BytesIO(), lambda _: sys.stderr]
WRAPPED = {
    "attribute": lambda held: Holder(held),
    "subset": lambda held: Subset(Holder(held), [0]),
    "concatenated": lambda held: ConcatDataset([Holder(None), Holder(held)]),
    "list": lambda held: Holder([1, (held, 2)]),
    "dict": lambda held: Holder({"files": {3: held}}),
    "object": lambda held: Holder(SimpleNamespace(reader=SimpleNamespace(file=held))),
}


def closed(held):
    held = held.file if isinstance(held, h5py.Dataset) else held
    held.close()


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("make", SHARED)
def test_what_is_open_is_found_and_what_is_closed_is_not(tmp_path, make, wrapped):
    held = make(tmp_path)
    dataset = WRAPPED[wrapped](held)

    assert find_shared_files(dataset=dataset).startswith("dataset.")
    closed(held)
    if make is not database:  # it does not tell
        assert find_shared_files(dataset=dataset) == ""


@pytest.mark.parametrize("make", HARMLESS)
def test_what_has_no_position_to_share_is_not(tmp_path, make):
    held = make(tmp_path)

    assert find_shared_files(dataset=Holder(held)) == ""
    if held is not sys.stderr:
        held.close()


def test_a_cycle_and_many_samples_end():
    dataset = Holder([torch.zeros(1)] * 10_000)
    dataset.myself = dataset

    assert find_shared_files(dataset=dataset) == ""


def test_workers_that_share_it_are_warned_of(tmp_path):
    with raw_file(tmp_path) as file:
        loader = build_loader(
            Holder(file), num_workers=1, multiprocessing_context="fork", probe=False
        )
        with pytest.warns(RuntimeWarning, match=r"dataset\.held \(BufferedReader\)"):
            list(loader)
        loader.close()
        with pytest.warns(RuntimeWarning, match=r"_dataset\.held"):
            pack(Holder(file), tmp_path / "cache", workers=1)
        pack(Holder(file), tmp_path / "again", workers=0)


@pytest.mark.skipif(
    multiprocessing.get_start_method() != "fork", reason="Python forks no longer"
)
def test_by_default_there_are_no_workers_to_share_it(tmp_path, caplog):
    with raw_file(tmp_path) as file:
        loader = build_loader(Holder(file))
        pack(Holder(file), tmp_path / "cache")

    assert loader.num_workers == 0
    assert "position of dataset.held" in loader.plan.reasons["num_workers"]
    assert "source._dataset.held (BufferedReader) is open" in caplog.text
