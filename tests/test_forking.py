"""What forked workers would share or miss is found, wherever a dataset holds it."""

import io
import mmap
import multiprocessing
import multiprocessing.pool
import sqlite3
import sys
import tarfile
import threading
import zipfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from loaderkit import build_loader, pack
from loaderkit.forking import find_fork_hazard


class Holder(Dataset):
    """A dataset that holds something."""

    def __init__(self, resource):
        self.held = resource

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


def zip_archive(folder):
    with zipfile.ZipFile(folder / "values.zip", "w") as file:
        file.writestr("x", "1")
    return zipfile.ZipFile(folder / "values.zip")


def tar_archive(folder):
    with tarfile.open(folder / "values.tar", "w") as file:
        file.addfile(tarfile.TarInfo("x"))
    return tarfile.open(folder / "values.tar")


def database(folder):
    return sqlite3.connect(folder / "values.db")


def log_file(folder):
    return (folder / "log").open("a")


def mapped_file(folder):
    with raw_file(folder) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


SHARED = [raw_file, hdf5_file, hdf5_dataset, zip_archive, tar_archive, database]
HARMLESS = [log_file, mapped_file, lambda _: io.BytesIO(), lambda _: sys.stderr]
WRAPPED = {
    "attribute": lambda resource: Holder(resource),
    "subset": lambda resource: Subset(Holder(resource), [0]),
    "concatenated": lambda resource: ConcatDataset([Holder(None), Holder(resource)]),
    "list": lambda resource: Holder([1, (resource, 2)]),
    "dict": lambda resource: Holder({"files": {3: resource}}),
    "object": lambda resource: Holder(
        SimpleNamespace(reader=SimpleNamespace(file=resource))
    ),
}


class Pooled(Dataset):
    """Its samples are made by a pool that it has from the start."""

    def __init__(self, pool):
        self.pool = pool

    def __len__(self):
        return 40

    def __getitem__(self, row):
        answer = self.pool.submit(torch.tensor, row)
        return {"row": answer.result()}


def thread_pool():
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    return pool, pool.shutdown


def thread_pool_of_multiprocessing():
    pool = multiprocessing.pool.ThreadPool(1)
    return pool, pool.terminate


def process_pool():
    pool = ProcessPoolExecutor(1)
    return pool, pool.shutdown


def running_thread():
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    return thread, lambda: (end.set(), thread.join())


THREADS = [thread_pool, thread_pool_of_multiprocessing, process_pool, running_thread]


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("make", THREADS)
def test_what_runs_threads_is_a_hazard_wherever_it_is_kept(make, wrapped):
    resource, end = make()

    hazard = find_fork_hazard(dataset=WRAPPED[wrapped](resource))
    end()

    assert hazard.where.endswith(f"({type(resource).__name__})")
    assert "threads" in hazard.reason


def test_a_thread_that_has_ended_or_not_begun_is_no_hazard():
    thread, end = running_thread()
    end()

    assert find_fork_hazard(dataset=Holder(thread)) is None
    assert find_fork_hazard(dataset=Holder(threading.Thread())) is None


@pytest.mark.skipif(
    multiprocessing.get_start_method() != "fork", reason="Python forks no longer"
)
def test_a_dataset_with_a_pool_is_read_where_its_threads_are(tmp_path, caplog):
    pool, end = thread_pool()
    loader = build_loader(Pooled(pool), batch_size=10)
    packed = pack(Pooled(pool), tmp_path / "cache")
    rows = [int(row) for batch in loader for row in batch["row"]]
    end()

    assert rows == [int(sample["row"]) for sample in packed] == list(range(40))
    assert loader.num_workers == 0
    assert "threads of dataset.pool" in loader.plan.num_workers.reason
    assert "threads of dataset.pool (ThreadPoolExecutor)" in caplog.text


def close_file(resource):
    resource = resource.file if isinstance(resource, h5py.Dataset) else resource
    resource.close()


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("make", SHARED)
def test_what_is_open_is_found_and_what_is_closed_is_not(tmp_path, make, wrapped):
    resource = make(tmp_path)
    dataset = WRAPPED[wrapped](resource)

    assert find_fork_hazard(dataset=dataset).where.startswith("dataset.")
    close_file(resource)
    if make is not database:  # it does not tell
        assert find_fork_hazard(dataset=dataset) is None


@pytest.mark.parametrize("make", HARMLESS)
def test_what_has_no_position_to_share_is_not(tmp_path, make):
    resource = make(tmp_path)

    assert find_fork_hazard(dataset=Holder(resource)) is None
    if resource is not sys.stderr:
        resource.close()


def test_a_cycle_and_many_samples_end():
    dataset = Holder([torch.zeros(1)] * 10_000)
    dataset.myself = dataset

    assert find_fork_hazard(dataset=dataset) is None


@pytest.mark.slow
@pytest.mark.skipif(
    multiprocessing.get_start_method() != "fork", reason="Python forks no longer"
)
def test_workers_that_share_it_are_warned_of(tmp_path):
    with raw_file(tmp_path) as file:
        loader = build_loader(
            Holder(file), num_workers=1, multiprocessing_context="fork", probe=False
        )
        with pytest.warns(RuntimeWarning, match=r"dataset\.held \(BufferedReader\)"):
            list(loader)
        loader.close()
        with pytest.warns(RuntimeWarning, match=r" dataset\.held"):
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
    assert "position of dataset.held" in loader.plan.num_workers.reason
    assert "position of dataset.held (BufferedReader)" in caplog.text
