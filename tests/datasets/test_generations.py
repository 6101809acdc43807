"""A cache is whole, of one run of one source, and takes nothing that is not its own."""

import gzip
import io
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from loaderkit import SafeDataset, build_loader, concat, open_cache, pack, verify
from loaderkit.datasets.pack import PackOptions
from loaderkit.errors import CacheError, StaleCacheError
from loaderkit.testing import assert_same

FORK = multiprocessing.get_context("fork")
COUNT = 60
SHARD_BYTES = 2500


def sample(value, row):
    return {"x": torch.full((20,), float(value)), "row": row}


def content(path):
    """Every file of a cache's folder but its lock, by name."""
    names = set(os.listdir(path)) - {".lock", ".lock-soft"}
    return {name: (path / name).read_bytes() for name in names}


# How sources hold their data; each gives 60 samples that say which data they are of.


class InMemory(SafeDataset):
    """Samples made from an attribute, of which neither code nor keys tell."""

    def __init__(self, value, **options):
        super().__init__(**options)
        self.value = torch.tensor(float(value))

    def keys(self):
        return range(COUNT)

    def load(self, key):
        die(key)
        return sample(self.value, key)


class FromFile(SafeDataset):
    """Samples made from a file that ``load`` opens."""

    def __init__(self, file, **options):
        super().__init__(**options)
        self.file = file

    def keys(self):
        return range(COUNT)

    def load(self, key):
        die(key)
        return sample(float(self.file.read_text()), key)


class Numbered(Dataset):
    """A plain dataset of torch's."""

    def __init__(self, value):
        self.value = value

    def __len__(self):
        return COUNT

    def __getitem__(self, row):
        die(row)
        return sample(self.value, row)


class DyingList(list):
    def __getitem__(self, row):
        die(row)
        return super().__getitem__(row)


DIE_AT = "LOADERKIT_TEST_DIES_AT"
"""The environment variable with the row at which this process ends; a fingerprint has
the variables of modules, and not these."""


def die(row):
    if os.environ.get(DIE_AT) == str(row):
        os.kill(os.getpid(), signal.SIGKILL)


def write_once(file, data):
    """Leave a file alone that holds this already: its time of change stays."""
    if not file.exists() or file.read_bytes() != data:
        file.write_bytes(data)


def pack_memory(folder, value, **options):
    len(InMemory(value, cache=folder / "c.lk", packing=PackOptions(**options)))


def pack_file(folder, value, **options):
    write_once(folder / "raw.txt", str(value).encode())
    options = {"cache": folder / "c.lk", "packing": PackOptions(**options)}
    len(FromFile(folder / "raw.txt", **options))


def pack_dataset(folder, value, **options):
    pack(Numbered(value), folder / "c.lk", **options)


def pack_list(folder, value, **options):
    source = DyingList(sample(value, row) for row in range(COUNT))
    pack(source, folder / "c.lk", **options)


def pack_folder(folder, value, **options):
    (folder / "pt").mkdir(exist_ok=True)
    for row in range(COUNT):
        saved = io.BytesIO()
        torch.save(sample(value, row), saved)
        write_once(folder / "pt" / f"{row:02}.pt", saved.getvalue())
        # PtFolder runs no code of ours: a bad file ends the run
        if os.environ.get(DIE_AT) == str(row):
            (folder / "pt" / f"{row:02}.pt").write_bytes(b"")
    pack(folder / "pt", folder / "c.lk", **options)


PACKERS = [pack_memory, pack_file, pack_dataset, pack_list, pack_folder]


def killed(packer, folder, value, *, at, **options):
    """Run a packer in a process that dies when it reads a row."""

    def run():
        os.environ[DIE_AT] = str(at)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        packer(folder, value, **options)

    child = FORK.Process(target=run)
    child.start()
    child.join()
    assert child.exitcode != 0


@pytest.mark.long_cases
@pytest.mark.slow
@pytest.mark.parametrize("packer", PACKERS, ids=lambda packer: packer.__name__)
@pytest.mark.parametrize("second", [1, 2])
def test_a_run_that_follows_a_killed_one_holds_its_own_samples_alone(
    tmp_path, packer, second, caplog
):
    """With the same data it goes on; with other data of the same shape, it does not."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    options = {"workers": 0, "shard_bytes": SHARD_BYTES}
    packer(tmp_path / "b", second, **options)
    die_at = random.Random(second).randrange(30, COUNT)
    killed(packer, tmp_path / "a", 1, at=die_at, **options)
    assert list((tmp_path / "a" / "c.lk").glob("*.h5"))

    with caplog.at_level(logging.WARNING, "loaderkit"):
        packer(tmp_path / "a", second, overwrite=second == 2, **options)

    values = {float(s["x"][0]) for s in open_cache(tmp_path / "a" / "c.lk")}
    assert values == {float(second)}
    ours, fresh = content(tmp_path / "a" / "c.lk"), content(tmp_path / "b" / "c.lk")
    shards = {name: data for name, data in fresh.items() if name.endswith(".h5")}
    assert shards == {name: ours[name] for name in shards}
    assert len(ours) == len(fresh)
    messages = [record.message for record in caplog.records if "anew" in record.message]
    assert bool(messages) == (second == 2), messages


@pytest.mark.slow
def test_the_check_itself_would_see_a_mix(tmp_path, monkeypatch):
    """Twin: believe every finished shard, and the cache holds both."""
    from loaderkit.datasets.packing_run import PackingRun

    options = {"workers": 0, "shard_bytes": SHARD_BYTES}
    killed(pack_list, tmp_path, 1, at=40, **options)
    # The comparison is what the law is about: no folder makes it say nothing.
    monkeypatch.setattr(PackingRun, "_difference_from_source", lambda *_: "")

    pack_list(tmp_path, 2, **options)

    values = {float(graph["x"][0]) for graph in open_cache(tmp_path / "c.lk")}
    assert values == {1.0, 2.0}


@pytest.mark.slow
def test_a_worker_that_starts_later_reads_the_same_generation_or_none(tmp_path):
    old = pack([sample(1, row) for row in range(COUNT)], tmp_path / "c.lk", workers=0)
    pack_list(tmp_path, 2, workers=0, overwrite=True)

    loader = DataLoader(
        old, 4, num_workers=1, multiprocessing_context="spawn", collate_fn=old.collate
    )
    with pytest.raises(StaleCacheError):
        next(iter(loader))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_open_dataset_reads_one_generation_or_says_that_there_is_another(
    tmp_path, workers
):
    path = tmp_path / "c.lk"
    old = pack([sample(1, row) for row in range(COUNT)], path, shard_bytes=SHARD_BYTES)
    untouched = pickle.loads(pickle.dumps(old))
    old[0]

    pack_list(tmp_path, 2, workers=workers, overwrite=True)

    seen = set()
    for read in (lambda row: old[row], lambda row: old.batch([row, 0])):
        for row in range(COUNT):
            try:
                seen.add(float(read(row)["x"].flatten()[0]))
            except StaleCacheError:
                seen.add("told")
    assert seen == {1.0, "told"}
    with pytest.raises(StaleCacheError, match="again while this dataset was open"):
        untouched[0]
    assert {float(graph["x"][0]) for graph in open_cache(path)} == {2.0}


def overwrite_again_and_again(path):
    for value in itertools.count(2):
        pack(
            [sample(value, row) for row in range(COUNT)],
            path,
            workers=0,
            shard_bytes=SHARD_BYTES,
            overwrite=True,
        )


@pytest.mark.slow
def test_a_reader_finds_the_old_cache_or_the_new_one_at_every_moment(tmp_path):
    path = tmp_path / "c.lk"
    pack_list(tmp_path, 1, workers=0, shard_bytes=SHARD_BYTES)
    writer = FORK.Process(target=overwrite_again_and_again, args=(path,))
    writer.start()
    generations = set()
    try:
        while len(generations) < 20:
            dataset = open_cache(path)
            try:
                values = {float(graph["x"][0]) for graph in dataset}
            except StaleCacheError:
                continue
            assert len(values) == 1
            assert len(dataset) == COUNT
            generations |= values
    finally:
        writer.kill()
        writer.join()


NAMES = [
    "raw.h5",
    "00000.h5",
    "results_2024.h5",
    "notes.txt",
    "x.partial",
    "00000.json",
    "plan.json",
    "a.block",
    "00000-0123456789abcdef.h5",
    "sources-0123456789abcdef.json",
]


@pytest.mark.slow
@settings(max_examples=15)
@given(names=st.sets(st.sampled_from(NAMES), min_size=1), link=st.booleans())
def test_what_is_not_the_caches_own_is_never_touched(names, link, tmp_path_factory):
    folder = tmp_path_factory.mktemp("f")
    path, elsewhere = folder / "c.lk", folder / "elsewhere"
    elsewhere.write_text("years of work")
    pack([1, 2, 3], path, workers=0)
    for name in names:
        if link:
            (path / name).symlink_to(elsewhere)
        else:
            (path / name).write_text("years of work")

    for value in (4, 5):
        pack([value], path, workers=0, overwrite=True)

    assert {(path / name).read_text() for name in names} == {"years of work"}
    assert open_cache(path)[0] == 5


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_holds_anything_else_is_not_packed_into(tmp_path, name):
    (tmp_path / name).write_text("years of work")

    with pytest.raises(CacheError, match="which is not a cache's"):
        pack([1], tmp_path, workers=0)

    assert (tmp_path / name).read_text() == "years of work"


@pytest.mark.parametrize("name", [".building", "manifest.json", ".lock"])
def test_a_planted_link_is_not_followed(tmp_path, name):
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "c.lk"
    elsewhere.mkdir()
    for inside in ("00000.partial", "plan.json", "00000.json"):
        (elsewhere / inside).write_text("years of work")
    path.mkdir()
    (path / name).symlink_to(elsewhere)

    with pytest.raises(CacheError):
        pack([1], path, workers=0, overwrite=True)

    assert {file.read_text() for file in elsewhere.iterdir()} == {"years of work"}
    assert len(list(elsewhere.iterdir())) == 3


def test_a_manifest_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "my web page"}')

    with pytest.raises(CacheError, match="not the manifest of a loaderkit cache"):
        pack([1], tmp_path, workers=0, overwrite=True)

    assert "web page" in (tmp_path / "manifest.json").read_text()


def test_a_damaged_cache_is_packed_again_when_asked(tmp_path):
    for damage in (b"", b'{"format": "loaderkit-cache", "ver'):
        pack([1, 2], tmp_path / "c.lk", workers=0, overwrite=True)
        (tmp_path / "c.lk" / "manifest.json").write_bytes(damage)
        with pytest.raises(CacheError):
            open_cache(tmp_path / "c.lk")

        assert pack([3], tmp_path / "c.lk", workers=0, overwrite=True)[0] == 3


# Which files samples are made from: how they are opened, and how they are named.


def with_open(file):
    with open(file, "rb") as raw:  # noqa: PTH123 -- one of the ways
        return raw.read(1)[0]


def with_os_open(file):
    descriptor = os.open(file, os.O_RDONLY)
    value = os.read(descriptor, 1)[0]
    os.close(descriptor)
    return value


def with_memmap(file):
    return int(np.memmap(file, np.uint8, "r")[0])


def with_gzip(file):
    with gzip.open(file) as raw:
        return raw.read(1)[0]


def with_a_thread(file):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(with_open, file).result()


def with_torch(file):
    return int(torch.load(file)[0])


def with_sqlite(file):
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    [[value]] = connection.execute("select v from t")
    connection.close()
    return value


def with_hdf5(file):
    with h5py.File(file) as raw:
        return int(raw["v"][()])


KEPT_OPEN = {}


def with_hdf5_kept_open(file):
    if str(file) not in KEPT_OPEN:
        KEPT_OPEN[str(file)] = h5py.File(file)
    return int(KEPT_OPEN[str(file)]["v"][()])


def write(how, file, value):
    """Write a value so that ``how`` reads it; always as many bytes."""
    file.unlink(missing_ok=True)
    if how is with_torch:
        torch.save(torch.tensor([value]), file)
    elif how is with_gzip:
        with gzip.open(file, "wb") as raw:
            raw.write(bytes([value]))
    elif how is with_sqlite:
        connection = sqlite3.connect(file)
        connection.execute("create table t (v)")
        connection.execute("insert into t values (?)", (value,))
        connection.commit()
        connection.close()
    elif how in {with_hdf5, with_hdf5_kept_open}:
        with h5py.File(file, "w") as raw:
            raw["v"] = value
    else:
        file.write_bytes(bytes([value]))


READERS = [
    with_open,
    with_os_open,
    with_a_thread,
    with_memmap,
    with_gzip,
    with_torch,
    with_sqlite,
    with_hdf5,
    with_hdf5_kept_open,
]


class Named(SafeDataset):
    """Samples read from one file, named in one of several ways."""

    def __init__(self, how, where, file, cache, **options):
        raw = {"raw file": file, "raw folder": file.parent}.get(where)
        super().__init__(raw=raw, cache=cache, packing=PackOptions(0, **options))
        self.how, self.where = how, where
        self.file = file if where == "attribute" else None
        self.names = [str(file)] if where == "key" else ["v"]

    def keys(self):
        return self.names

    def load(self, key):
        files = {
            "raw file": lambda: self.raw,
            "raw folder": lambda: self.raw / "v",
            "attribute": lambda: self.file,
            "key": lambda: key,
        }
        return {"v": self.how(files[self.where]())}


WHERE = ["raw file", "raw folder", "attribute", "key"]


@pytest.mark.many_cases
@pytest.mark.parametrize("how", READERS, ids=lambda how: how.__name__)
@pytest.mark.parametrize("where", WHERE)
def test_a_raw_file_that_is_replaced_makes_the_cache_stale(tmp_path, how, where):
    file = tmp_path / "raw" / "v"
    file.parent.mkdir()
    write(how, file, 1)
    os.utime(file, ns=(1, 1))
    assert Named(how, where, file, tmp_path / "c.lk")[0] == {"v": 1}
    assert Named(how, where, file, tmp_path / "c.lk")[0] == {"v": 1}
    for handle in KEPT_OPEN.values():
        handle.close()
    KEPT_OPEN.clear()

    write(how, file, 2)

    with pytest.raises(StaleCacheError, match="packed"):
        Named(how, where, file, tmp_path / "c.lk")[0]
    again = Named(how, where, file, tmp_path / "c.lk", overwrite=True)
    assert again[0] == {"v": 2}


class OpensEarly(SafeDataset):
    """Keeps a file open from the beginning, as many datasets over HDF5 do."""

    def __init__(self, opened, **options):
        super().__init__(packing=PackOptions(workers=0), **options)
        self.opened = opened

    def keys(self):
        return ["v"]

    def load(self, key):
        if isinstance(self.opened, list):
            return {"v": with_hdf5(self.opened[0])}
        values = self.opened[key] if isinstance(self.opened, h5py.File) else self.opened
        return {"v": int(values[()] if values.shape == () else values[0])}


@pytest.mark.parametrize(
    ("how", "opens"),
    [
        (with_hdf5, h5py.File),
        (with_open, lambda file: np.memmap(file, np.uint8, "r")),
        (with_hdf5, lambda file: [str(file)]),
    ],
    ids=["h5py.File", "memmap", "list of paths"],
)
def test_a_file_that_was_open_before_packing_counts_too(tmp_path, how, opens):
    write(how, tmp_path / "v", 1)
    os.utime(tmp_path / "v", ns=(1, 1))
    opened = opens(tmp_path / "v")
    assert OpensEarly(opened, cache=tmp_path / "c.lk")[0] == {"v": 1}
    if isinstance(opened, h5py.File):
        opened.close()

    write(how, tmp_path / "v", 2)

    with pytest.raises(StaleCacheError):
        OpensEarly(opens(tmp_path / "v"), cache=tmp_path / "c.lk")[0]


def test_raw_data_that_moves_or_is_deleted_is_not_stale(tmp_path):
    (tmp_path / "raw").mkdir()
    write(with_open, tmp_path / "raw" / "v", 1)
    cache = tmp_path / "c.lk"
    Named(with_open, "raw folder", tmp_path / "raw" / "v", cache)[0]

    (tmp_path / "raw").rename(tmp_path / "moved")
    assert Named(with_open, "raw folder", tmp_path / "moved" / "v", cache)[0]["v"] == 1
    (tmp_path / "moved" / "v").unlink()
    assert Named(with_open, "raw folder", tmp_path / "moved" / "v", cache)[0]["v"] == 1


@pytest.mark.parametrize("mode", ["stat", "hash", "none"])
def test_a_file_that_is_only_touched_is_known_again_by_its_hash(tmp_path, mode):
    file, cache = tmp_path / "v", tmp_path / "c.lk"
    write(with_open, file, 1)
    os.utime(file, ns=(1, 1))
    options = {"track_files": mode}
    Named(with_open, "attribute", file, cache, **options)[0]

    os.utime(file)

    if mode == "stat":
        with pytest.raises(StaleCacheError, match="written to after it was packed"):
            Named(with_open, "attribute", file, cache, **options)[0]
    else:
        assert Named(with_open, "attribute", file, cache, **options)[0]["v"] == 1
    write(with_open, file, 2)
    if mode == "none":
        assert Named(with_open, "attribute", file, cache, **options)[0]["v"] == 1
    else:
        with pytest.raises(StaleCacheError):
            Named(with_open, "attribute", file, cache, **options)[0]


def test_the_list_of_sources_is_part_of_what_is_verified(tmp_path):
    file = tmp_path / "v"
    write(with_open, file, 1)
    Named(with_open, "attribute", file, tmp_path / "c.lk")[0]
    [sources] = (tmp_path / "c.lk").glob("sources-*.json")
    sources.write_text(sources.read_text().replace("v", "w"))

    assert "sources-" in str(verify(tmp_path / "c.lk"))


@pytest.mark.slow
def test_a_sample_keeps_its_value_and_its_place(tmp_path):
    samples = [sample(row, row) for row in range(COUNT)]

    assert_same(list(pack(samples, tmp_path / "c.lk", workers=2)), samples)


def all_readings(dataset):
    """Read every sample in each way there is."""
    rows = range(len(dataset))
    yield [int(dataset[row]) for row in rows]
    yield dataset.batch(rows).tolist()
    yield [int(dataset.batch([row])[0]) for row in rows]
    for workers in (0, 1):
        loader = build_loader(dataset, batch_size=3, num_workers=workers, probe=False)
        yield torch.cat(list(loader)).tolist()


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, "1 MiB"], ids=["many", "one"])
@pytest.mark.parametrize("links", [0, 1], ids=["deleted", "linked elsewhere"])
def test_a_dataset_that_was_read_goes_on_when_its_cache_is_packed_again(
    tmp_path, shard_bytes, links
):
    path = tmp_path / "c.lk"
    numbers = list(range(300))
    dataset = pack(numbers, path, workers=0, shard_bytes=shard_bytes)
    assert list(dataset) == numbers
    if links:
        concat([path], tmp_path / "links.lk")
    half_read = iter(build_loader(dataset, batch_size=3, num_workers=0))
    first = next(half_read)

    pack([-1] * 5, path, workers=0, overwrite=True)

    assert torch.cat([first, *half_read]).tolist() == numbers
    for read in all_readings(dataset):
        assert read == numbers
    assert list(open_cache(path)) == [-1] * 5
