"""Caches in stores: read, packed, pushed and pulled as those in folders are."""

import json
import multiprocessing
import os
import pickle
import random
import re
import threading
import time
import warnings
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from storages import (
    CuttingProxy,
    Faults,
    FileServer,
    copy_files,
    keys_that_may_only_read,
    s3_options,
    s3_server,
)
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

from loaderkit import (
    SafeDataset,
    build_loader,
    inspect_cache,
    open_cache,
    pack,
    pull,
    push,
    verify,
)
from loaderkit.cache.folder_storage import FolderStorage
from loaderkit.cache.object_store import ObjectStore
from loaderkit.cache.remote import STORAGES
from loaderkit.cache.storage import Patience
from loaderkit.cache.transfer import copy_from_store, copy_to_store
from loaderkit.cli.main import main
from loaderkit.errors import CacheError, DatasetError, OptionError, StaleCacheError

COUNT, SHARD_BYTES = 96, 60_000


def samples(first=0):
    """Make samples whose every number says which one it is."""
    return [
        {"x": torch.full((3_000,), float(first + number)), "n": first + number}
        for number in range(COUNT)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("caches") / "c"
    pack(samples(), path, workers=0, shard_bytes=SHARD_BYTES)
    return path


@pytest.fixture
def url(folder, tmp_path):
    copy_files(folder, tmp_path / "store")
    return (tmp_path / "store").as_uri()


def numbers(loader):
    return [number for batch in loader for number in batch["n"].tolist()]


def test_samples_and_batches_are_those_of_the_folder(folder, url, tmp_path):
    local, remote = open_cache(folder), open_cache(url, mirror=tmp_path / "m")
    assert len(remote) == COUNT
    for row in (0, 50, COUNT - 1):
        assert torch.equal(remote[row]["x"], local[row]["x"])
        assert remote.key(row) == local.key(row)
    ours, theirs = remote.batch([3, 90, 3]), local.batch([3, 90, 3])
    assert torch.equal(ours["x"], theirs["x"])
    assert remote.sizes().bytes.tolist() == local.sizes().bytes.tolist()
    assert [s["n"] for s in remote[10:13]] == [10, 11, 12]


def test_graphs_from_a_store_are_batched_as_pyg_does(tmp_path):
    graphs = [
        Data(x=torch.randn(n, 3), edge_index=torch.randint(0, n, (2, 2 * n)))
        for n in range(2, 40)
    ]
    url = (tmp_path / "store").as_uri()
    dataset = pack(graphs, url, workers=0, shard_bytes=5_000, mirror=tmp_path / "m")
    rows = [30, 2, 17]
    expected = Batch.from_data_list([graphs[row] for row in rows])
    batch = dataset.batch(rows)
    assert torch.equal(batch.x, expected.x)
    assert torch.equal(batch.edge_index, expected.edge_index)
    assert not list((tmp_path / "m" / "packing").glob("*/*.h5"))


@pytest.mark.slow
def test_sizes_of_graphs_are_read_shard_by_shard_where_the_mirror_is_small(tmp_path):
    graphs = [
        Data(x=torch.ones(n, 9), edge_index=torch.zeros(2, n, dtype=torch.long))
        for n in range(2, 80)
    ]
    pack(graphs, tmp_path / "c", workers=0, shard_bytes=10_000)
    copy_files(tmp_path / "c", tmp_path / "store")
    largest = max(file.stat().st_size for file in (tmp_path / "c").glob("*.h5"))
    dataset = open_cache(
        (tmp_path / "store").as_uri(), mirror=tmp_path / "m", mirror_bytes=2 * largest
    )
    assert dataset.sizes().nodes.tolist() == list(range(2, 80))
    assert dataset[[70, 3, 40]].sizes().nodes.tolist() == [72, 5, 42]


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [False, True, "block"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_gives_every_sample_once(url, tmp_path, shuffle, workers):
    dataset = open_cache(url, mirror=tmp_path / "m")
    loader = build_loader(
        dataset, batch_size=8, shuffle=shuffle, num_workers=workers, seed=3
    )
    first, second = numbers(loader), numbers(loader)
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert (first == second) == (shuffle is False)


@pytest.mark.slow
def test_spawned_workers_open_the_store_for_themselves(folder, tmp_path):
    copy_files(folder, tmp_path / "served")
    server = FileServer(tmp_path / "served", faults=Faults())
    dataset = open_cache(server.url, mirror=tmp_path / "m")
    loader = build_loader(
        dataset, batch_size=8, num_workers=1, multiprocessing_context="spawn"
    )
    assert numbers(loader) == list(range(COUNT))
    server.stop()


@pytest.mark.slow
def test_forked_workers_read_over_http_while_this_process_downloads(folder, tmp_path):
    copy_files(folder, tmp_path / "served")
    faults = Faults()
    server = FileServer(tmp_path / "served", faults=faults)
    dataset = open_cache(server.url, mirror=tmp_path / "m")
    assert dataset[0]["n"] == 0  # a connection is open here
    loader = build_loader(dataset, batch_size=8, num_workers=2, shuffle="block")
    for _ in range(3):
        assert sorted(numbers(loader)) == list(range(COUNT))
    shards = [name for name in faults.served if name.endswith(".h5")]
    assert len(shards) == len(set(shards))
    server.stop()


@pytest.mark.slow
def test_blocks_go_shard_by_shard_so_that_a_small_mirror_downloads_each_once(
    folder, tmp_path
):
    copy_files(folder, tmp_path / "served")
    faults = Faults()
    server = FileServer(tmp_path / "served", faults=faults)
    shards = sorted(file.stat().st_size for file in folder.glob("*.h5"))
    most = sum(shards[-10:])
    dataset = open_cache(server.url, mirror=tmp_path / "m", mirror_bytes=most)
    loader = build_loader(dataset, batch_size=4, shuffle="block", seed=1, num_workers=0)
    for epoch in range(2):
        faults.served.clear()
        assert sorted(numbers(loader)) == list(range(COUNT))
        served = [name for name in faults.served if name.endswith(".h5")]
        if epoch == 0:
            assert len(served) == len(set(served)) == len(shards)
        taken = sum(f.stat().st_size for f in (tmp_path / "m").rglob("*.h5"))
        assert taken <= most
    text = str(loader.plan)
    assert 0 < loader.plan.downloads.ahead_bytes <= loader.plan.downloads.read_bytes
    assert "are downloaded in the first epoch" in text
    assert f"{server.url}" in text
    server.stop()


@pytest.mark.parametrize("share", [0.001, 0.5, 0.99])
def test_a_mirror_below_one_shard_is_refused_when_the_cache_is_opened(
    share, url, folder, tmp_path
):
    largest = max(file.stat().st_size for file in folder.glob("*.h5"))

    with pytest.raises(CacheError, match="the largest shard of") as raised:
        open_cache(url, mirror=tmp_path / "m", mirror_bytes=int(share * largest))

    # As the fix says: all rows in one batch, or one row after the other.
    whole, least = map(int, re.findall(r"\d{3,}", raised.value.fix))
    assert least == largest
    rows = open_cache(url, mirror=tmp_path / "whole", mirror_bytes=whole)
    assert len(rows.batch(range(COUNT))["n"]) == COUNT
    rows = open_cache(url, mirror=tmp_path / "least", mirror_bytes=least)
    assert [rows[row]["n"] for row in (0, 50, COUNT - 1)] == [0, 50, COUNT - 1]


def test_a_batch_that_a_mirror_cannot_hold_is_told_how_much_it_needs(
    url, folder, tmp_path
):
    largest = max(file.stat().st_size for file in folder.glob("*.h5"))
    rows = open_cache(url, mirror=tmp_path / "m", mirror_bytes=largest)

    with pytest.raises(CacheError, match="A batch reads") as raised:
        rows.batch([0, 50, COUNT - 1])

    [needed] = map(int, re.findall(r"mirror_bytes=(\d+)", raised.value.fix))
    rows = open_cache(url, mirror=tmp_path / "m2", mirror_bytes=needed)
    assert rows.batch([0, 50, COUNT - 1])["n"].tolist() == [0, 50, COUNT - 1]


@pytest.mark.parametrize("batch_size", [12, 40])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mirror_as_large_as_the_plan_says_reads_every_batch(
    batch_size, shuffle, url, folder, tmp_path
):
    limit = {"batch_size": batch_size, "shuffle": shuffle, "num_workers": 0}
    largest = max(file.stat().st_size for file in folder.glob("*.h5"))
    small = open_cache(url, mirror=tmp_path / "small", mirror_bytes=largest)
    with pytest.warns(RuntimeWarning, match="workers may map") as warned:
        loader = build_loader(small, seed=1, **limit)
    if shuffle:  # the twin: the warning is right
        with pytest.raises(CacheError, match="A batch reads"):
            list(loader)

    [needed] = re.findall(r"mirror_bytes=([\d_]+)", str(warned[0].message))
    enough = open_cache(url, mirror=tmp_path / "m", mirror_bytes=int(needed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what is read twice
        loader = build_loader(enough, seed=1, **limit)
    assert sorted(numbers(loader)) == list(range(COUNT))


def test_what_a_thrashing_order_costs_is_warned_of(url, folder, tmp_path):
    sizes = sorted(file.stat().st_size for file in folder.glob("*.h5"))
    most = sum(sizes[-10:])
    dataset = open_cache(url, mirror=tmp_path / "m", mirror_bytes=most)
    with pytest.warns(RuntimeWarning, match="shuffle='block' reads each once"):
        loader = build_loader(dataset, batch_size=2, shuffle=True, num_workers=0)
    downloads = loader.plan.downloads
    assert downloads.later_epoch_bytes > 1.2 * downloads.read_bytes
    assert downloads.ahead_bytes == 0


@pytest.mark.slow
def test_the_next_shards_come_while_the_loop_does_nothing(folder, tmp_path):
    copy_files(folder, tmp_path / "served")
    faults = Faults()
    server = FileServer(tmp_path / "served", faults=faults)
    dataset = open_cache(server.url, mirror=tmp_path / "m")
    loader = build_loader(dataset, batch_size=2, num_workers=0)
    epoch = iter(loader)
    next(epoch)
    mirrored = list((tmp_path / "m").rglob("*.h5"))
    while len(mirrored) < len(list(folder.glob("*.h5"))):  # until the runner's end
        threading.Event().wait(0.01)
        mirrored = list((tmp_path / "m").rglob("*.h5"))
    assert sorted(numbers(epoch)) == list(range(2, COUNT))
    server.stop()


@pytest.mark.slow
def test_a_dataset_travels_without_connections_and_keeps_its_generation(url, tmp_path):
    dataset = open_cache(url, mirror=tmp_path / "m", storage_options={})
    assert dataset[1]["n"] == 1
    travelled = pickle.loads(pickle.dumps(dataset))
    assert travelled[40]["n"] == 40
    again = pickle.dumps(dataset)
    other = tmp_path / "other"
    pack(samples(first=1000), other, workers=0, shard_bytes=SHARD_BYTES)
    push(other, url, overwrite=True)
    # What is mirrored can still be read; the rest is gone from the store.
    reader = pickle.loads(again)
    assert reader[1]["n"] == 1
    with pytest.raises(StaleCacheError):
        [reader[row] for row in range(COUNT)]
    assert open_cache(url, mirror=tmp_path / "m")[0]["n"] == 1000


def test_push_and_pull_keep_every_byte(folder, tmp_path):
    url = (tmp_path / "store").as_uri()
    pushed = push(folder, url)
    assert pushed.samples == COUNT
    again = push(folder, url, overwrite=True)
    assert again.files == 1  # shards that are there are not copied
    pulled = pull(url, tmp_path / "back")
    assert pulled.files == pushed.files
    for file in folder.glob("*.*"):
        if file.is_file() and not file.name.startswith("."):
            assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()
    assert verify(tmp_path / "back").ok
    assert verify(url).ok
    assert not list((tmp_path / "store").glob(".*"))


@pytest.mark.slow
def test_a_second_push_is_refused_and_leaves_the_first(folder, tmp_path):
    url = (tmp_path / "store").as_uri()
    push(folder, url)
    other = tmp_path / "other"
    pack(samples(first=500), other, workers=0, shard_bytes=SHARD_BYTES)
    with pytest.raises(CacheError, match="already"):
        push(other, url)
    with pytest.raises(CacheError, match="already"):
        pack(samples(), url, workers=0)
    with pytest.raises(CacheError, match="already"):
        pull(url, folder)
    assert verify(url).ok
    push(other, url, overwrite=True)
    assert open_cache(url, mirror=tmp_path / "m")[0]["n"] == 500
    names = {file.name for file in other.iterdir() if file.is_file()}
    assert {f.name for f in (tmp_path / "store").iterdir()} <= names


@pytest.mark.slow
def test_of_writers_at_once_one_wins_and_the_cache_is_whole(folder, tmp_path):
    other = tmp_path / "other"
    pack(samples(first=500), other, workers=0, shard_bytes=SHARD_BYTES)
    for number in range(4):
        storage = FolderStorage(tmp_path / f"store{number}")
        outcomes, start = [], threading.Barrier(2)

        def write(path, storage=storage, outcomes=outcomes, start=start):
            start.wait()
            try:
                copy_to_store(path, storage, overwrite=False)
            except CacheError as error:
                outcomes.append(str(error))
            else:
                outcomes.append("won")

        threads = [threading.Thread(target=write, args=(p,)) for p in (folder, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count("won") == 1
        assert "already" in " ".join(outcomes)
        assert verify(storage.folder).ok
        manifest = json.loads((storage.folder / "manifest.json").read_text())
        assert manifest["content"]["shards"]


CLOCKS = {
    "a day ahead": lambda now_s: now_s + 86_400,
    "a day behind": lambda now_s: now_s - 86_400,
    "jumping": lambda now_s: now_s + random.choice([-1, 1]) * 20_000,
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_what_another_is_writing_stays_whatever_the_clock_says(
    folder, tmp_path, monkeypatch, clock
):
    storage = FolderStorage(tmp_path / "store")
    storage.folder.mkdir()
    being_written, abandoned = (
        storage.folder / f".00000-{letter * 16}.h5-{letter * 32}.partial"
        for letter in "ab"
    )
    for file in (being_written, abandoned):
        file.write_bytes(b"half a shard")
    os.utime(abandoned, (time.time() - 7_200,) * 2)
    read_clock = time.time
    monkeypatch.setattr(time, "time", lambda: CLOCKS[clock](read_clock()))

    copy_to_store(folder, storage, overwrite=False)
    copy_to_store(folder, storage, overwrite=True)

    assert being_written.exists()
    assert not abandoned.exists()
    assert verify(storage.folder).ok


def test_two_who_replace_a_cache_at_once_are_told_apart(folder, tmp_path):
    storage = FolderStorage(tmp_path / "store")
    copy_to_store(folder, storage, overwrite=False)
    storage.commit(".writing", b'{"host": "another"}', replace=False)
    with pytest.raises(CacheError, match="another") as raised:
        copy_to_store(folder, storage, overwrite=True)
    assert f"{storage.url}/.writing" in str(raised.value)


def test_a_push_that_broke_shows_no_cache_and_is_gone_on_with(folder, tmp_path):
    class Breaking(FolderStorage):
        writes = 0

        def write_file(self, name, file):
            type(self).writes += 1
            if self.writes == 5:
                what = "The store does not answer."
                raise CacheError(what)
            super().write_file(name, file)

    storage = Breaking(tmp_path / "store")
    with pytest.raises(CacheError, match="does not answer"):
        copy_to_store(folder, storage, overwrite=False)
    with pytest.raises(CacheError, match="There is no cache"):
        open_cache(storage.folder.as_uri(), mirror=tmp_path / "m")
    copied = copy_to_store(folder, FolderStorage(tmp_path / "store"), overwrite=False)
    shards = len(list(folder.glob("*.h5")))
    assert copied.files == shards - 4 + 1  # and the manifest
    assert verify(storage.folder).ok


def test_what_a_killed_writer_left_goes_when_the_cache_is_replaced(folder, tmp_path):
    store = tmp_path / "store"
    push(folder, store.as_uri())
    wanted = {file.name for file in store.iterdir()}
    (store / "00007-0123456789abcdef.h5").write_bytes(b"of a push that was killed")
    (store / "notes.h5").write_bytes(b"of the user")
    abandoned = store / f".00000-0123456789abcdef.h5-{'0' * 32}.partial"
    in_the_making = store / f".00001-0123456789abcdef.h5-{'1' * 32}.partial"
    for file in (abandoned, in_the_making):
        file.touch()
    os.utime(abandoned, (0, 0))

    push(folder, store.as_uri(), overwrite=True)

    left = {file.name for file in store.iterdir()}
    assert left == wanted | {"notes.h5", in_the_making.name}


@pytest.mark.parametrize("is_copied", [True, False])
def test_what_was_packed_for_a_store_goes_when_it_was_copied(tmp_path, is_copied):
    """A run may be killed behind its last step, or not have come to copying."""
    url, mirror = (tmp_path / "store").as_uri(), tmp_path / "m"
    pack([1, 2, 3], url, workers=0, mirror=mirror)
    [lock] = (mirror / "packing").glob("*.lock")
    packed = lock.with_suffix("")
    pack([1, 2, 3] if is_copied else [4], packed, workers=0)

    with pytest.raises(CacheError, match="There is a cache at"):
        pack([1, 2, 3], url, workers=0, mirror=mirror)

    assert packed.exists() == (not is_copied)
    pack([5], url, workers=0, mirror=mirror, overwrite=True)
    assert not packed.exists()


class LosingItsConnection(FolderStorage):
    """A store that gives some pieces of files, and then nothing more."""

    pieces = 1

    def read_range(self, name, start, stop):
        if not self.pieces:
            message = f"{self.url}/{name} could not be read."
            raise CacheError(message, why="no network", fix="run the same again")
        self.pieces -= 1
        return super().read_range(name, start, stop)


@pytest.mark.parametrize("then", [pull, pack], ids=["pull", "pack"])
def test_what_a_broken_pull_left_goes_when_another_cache_comes(folder, tmp_path, then):
    target, other = tmp_path / "target", tmp_path / "other"
    pack([1, 2, 3], other, workers=0)
    with pytest.raises(CacheError, match="no network"):
        copy_from_store(LosingItsConnection(folder), target)
    assert len(list(target.glob("*.h5"))) == 1

    if then is pull:
        pull(other.as_uri(), target)
    else:
        pack([1, 2, 3], target, workers=0)

    assert {file.name for file in target.iterdir()} - {".lock"} == {
        file.name for file in other.iterdir()
    } - {".lock"}


def test_pull_keeps_shards_that_a_run_of_pack_had_finished(tmp_path):
    """They have the names of those that come, and are as good."""
    whole, target = tmp_path / "whole", tmp_path / "target"
    numbers = [torch.arange(row, row + 100) for row in range(20)]
    pack(numbers, whole, workers=0, shard_bytes=4_000)
    with pytest.raises(DatasetError):
        pack([*numbers[:-1], object()], target, workers=0, shard_bytes=4_000)
    before = {file.name: file.stat().st_ino for file in target.glob("*.h5")}

    pull(whole.as_uri(), target)

    names = {file.name for file in whole.glob("*.h5")}
    after = {file.name: file.stat().st_ino for file in target.glob("*.h5")}
    assert after.keys() == names
    common = before.keys() & names
    assert common
    assert {name: after[name] for name in common} == {
        name: before[name] for name in common
    }
    assert len(open_cache(target, checksums="always")) == 20


def test_damage_in_a_store_is_found_and_not_pulled(folder, tmp_path):
    copy_files(folder, tmp_path / "store")
    url = (tmp_path / "store").as_uri()
    first, second, *_ = sorted((tmp_path / "store").glob("*.h5"))
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    second.unlink()
    verification = verify(url)
    assert not verification.ok
    assert {f.name in str(verification) for f in (first, second)} == {True}
    with pytest.raises(CacheError, match="checksum"):
        pull(url, tmp_path / "back")
    with pytest.raises(CacheError, match=r"There is no cache|half"):
        open_cache(tmp_path / "back")


class Loaded(SafeDataset):
    loads = multiprocessing.get_context("fork").Value("i", 0)

    def keys(self):
        return range(10)

    def load(self, key):
        with self.loads.get_lock():
            self.loads.value += 1
        return {"n": int(key), "x": torch.ones(3) * key}


@pytest.mark.slow
def test_a_dataset_packs_to_its_url_once_for_all_processes(tmp_path):
    url = (tmp_path / "store").as_uri()

    def read():
        dataset = Loaded(cache=url, mirror=tmp_path / "m")
        assert [dataset[row]["n"] for row in range(10)] == list(range(10))

    Loaded.loads.value = 0
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=read) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    # Whoever packs looks at the sizes of two before.  Each of the others reads one, to
    # know the classes of samples.
    assert Loaded.loads.value <= 10 + 2 + 2
    assert verify(url).ok


@pytest.mark.slow
def test_another_load_makes_the_cache_at_a_url_stale(tmp_path):
    url = (tmp_path / "store").as_uri()
    assert Loaded(cache=url, mirror=tmp_path / "m")[3]["n"] == 3

    class Other(Loaded):
        version = "2"

    with pytest.raises(StaleCacheError, match="file://"):
        Other(cache=url, mirror=tmp_path / "m")[0]


def test_options_of_urls_need_one():
    with pytest.raises(OptionError, match="mirror_bytes"):
        SafeDataset(mirror_bytes="1 GB")
    with pytest.raises(OptionError, match="storage_options"):
        open_cache("folder", storage_options={"key": "x"})


def test_inspecting_a_url_reads_the_manifest_alone(folder, tmp_path):
    copy_files(folder, tmp_path / "served")
    faults = Faults()
    server = FileServer(tmp_path / "served", faults=faults)
    summary = inspect_cache(server.url)
    assert summary.samples == COUNT
    assert summary.path == server.url
    assert set(faults.served) == {"manifest.json"}
    server.stop()


def test_the_command_line_pushes_and_pulls(folder, tmp_path, capsys):
    url = (tmp_path / "store").as_uri()
    assert main(["push", str(folder), url]) == 0
    assert main(["push", str(folder), url]) == 1
    assert main(["verify", url]) == 0
    assert main(["inspect", url, "--storage-option", "auto_mkdir=true"]) == 0
    assert main(["pull", url, str(tmp_path / "back"), "--json"]) == 0
    out = capsys.readouterr().out
    assert ": sound; 96 samples" in out
    assert json.loads(out.splitlines()[-1])["samples"] == COUNT
    assert open_cache(tmp_path / "back")[5]["n"] == 5


class Expensive(Dataset):
    """Samples that take a day."""

    def __len__(self):
        return 3

    def __getitem__(self, row):
        message = "a sample was read"
        raise ValueError(message)


def _plant_file(store):
    store.write_text("a file where the folder should be")


def _plant_claim(store):
    FolderStorage(store).commit(".writing", b"host 1", replace=False)


@pytest.mark.parametrize(
    ("plant", "overwrite", "error", "text"),
    [
        (_plant_file, False, CacheError, "store"),
        (_plant_file, True, CacheError, "store"),
        (_plant_claim, True, CacheError, "host 1"),
        # Who does not overwrite needs no claim; and a sound target is read for.
        (_plant_claim, False, DatasetError, "a sample was read"),
        (Path.mkdir, False, DatasetError, "a sample was read"),
        (Path.mkdir, True, DatasetError, "a sample was read"),
    ],
    ids=["file", "file-overwrite", "claimed", "unclaimed", "sound", "sound-overwrite"],
)
def test_a_target_that_cannot_be_written_is_said_before_a_sample_is_read(
    tmp_path, plant, overwrite, error, text
):
    store = tmp_path / "store"
    plant(store)

    with pytest.raises(error, match=text):
        pack(
            Expensive(),
            store.as_uri(),
            workers=0,
            overwrite=overwrite,
            mirror=tmp_path / "m",
        )

    assert not (store / ".writable").exists()


class NotingStorage(FolderStorage):
    """A folder that notes what it was asked to put in place."""

    committed: ClassVar[list[str]] = []

    def commit(self, name, content, *, replace):
        self.committed.append(name)
        super().commit(name, content, replace=replace)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("write", [pack, push])
def test_a_store_is_asked_once_whether_it_can_be_written_to(
    folder, tmp_path, monkeypatch, write, overwrite
):
    monkeypatch.setitem(STORAGES, "noting", NotingStorage.from_url)
    monkeypatch.setattr(NotingStorage, "committed", [])
    url = f"noting://{tmp_path / 'store'}"

    if write is push:
        push(folder, url, overwrite=overwrite)
    else:
        pack([1, 2], url, workers=0, overwrite=overwrite, mirror=tmp_path / "m")

    claims = [".writing"] * overwrite
    assert NotingStorage.committed == [".writable", *claims, "manifest.json"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_store_that_is_for_reading_alone_is_said_before_a_sample_is_read(
    tmp_path, overwrite
):
    server = FileServer(tmp_path, faults=Faults())

    with pytest.raises(CacheError, match="could not be written"):
        pack(
            Expensive(),
            f"{server.url}/cache",
            workers=0,
            overwrite=overwrite,
            mirror=tmp_path / "m",
        )

    server.stop()


def test_what_was_packed_for_a_store_that_fails_at_the_end_is_named(
    tmp_path, monkeypatch
):
    class Full(FolderStorage):
        def write_file(self, name, _):
            message = f"{name} could not be written."
            raise CacheError(message, why="the store is full", fix="make room")

    monkeypatch.setitem(STORAGES, "full", Full.from_url)

    with pytest.raises(CacheError, match="make room") as caught:
        pack(samples(), f"full://{tmp_path}/store", workers=0, mirror=tmp_path / "m")

    [command] = re.findall(r"loaderkit push (\S+) full://", caught.value.fix)
    assert len(open_cache(command)) == COUNT


@pytest.fixture(scope="module")
def s3():
    """Give moto's server with one bucket, as storage_options."""
    import s3fs

    with s3_server() as server:
        options = s3_options(server)
        s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir("bucket")
        yield options


@pytest.mark.needs("s3")
@pytest.mark.slow
def test_s3_end_to_end(folder, s3, tmp_path):
    import s3fs

    url = "s3://bucket/deep/cache"
    push(folder, url, storage_options=s3)
    with pytest.raises(CacheError, match="already"):
        push(folder, url, storage_options=s3)
    assert verify(url, storage_options=s3).ok
    dataset = open_cache(url, storage_options=s3, mirror=tmp_path / "m")
    for context in ("fork", "spawn"):
        loader = build_loader(
            dataset,
            batch_size=8,
            shuffle="block",
            num_workers=2,
            multiprocessing_context=context,
        )
        assert sorted(numbers(loader)) == list(range(COUNT))
    packed = pack(
        samples(),
        "s3://bucket/packed",
        workers=0,
        storage_options=s3,
        mirror=tmp_path / "m",
    )
    assert packed[3]["n"] == 3
    with pytest.raises(CacheError, match="s3://nowhere"):
        open_cache("s3://nowhere/cache", storage_options=s3)
    for overwrite in (False, True):
        with pytest.raises(CacheError, match="no such bucket"):
            pack(
                Expensive(),
                "s3://nowhere/cache",
                workers=0,
                overwrite=overwrite,
                storage_options=s3,
                mirror=tmp_path / "m",
            )
    names = s3fs.S3FileSystem(**s3).ls("bucket/packed")
    assert not [name for name in names if name.endswith(".writable")]


@pytest.fixture
def cut(s3, tmp_path):
    """Give a cache in S3, and options by which its lists come through a proxy."""
    url = f"s3://bucket/{tmp_path.name}"
    pack(samples(), tmp_path / "c", workers=0, shard_bytes=4 * SHARD_BYTES)
    push(tmp_path / "c", url, storage_options=s3)
    proxy = CuttingProxy(s3["endpoint_url"])
    yield url, {**s3, "endpoint_url": proxy.url}, proxy
    proxy.stop()


@pytest.mark.needs("s3")
@pytest.mark.slow
@pytest.mark.parametrize("most_files", [0, 2])
def test_a_list_that_is_cut_loses_no_shard(cut, s3, tmp_path, most_files):
    url, options, proxy = cut
    other = tmp_path / "other"
    pack(samples(first=500), other, workers=0, shard_bytes=4 * SHARD_BYTES)
    proxy.most_files = most_files

    dataset = open_cache(url, storage_options=options, mirror=tmp_path / "m")
    assert [sample["n"] for sample in dataset] == list(range(COUNT))
    pull(url, tmp_path / "pulled", storage_options=options)
    assert verify(tmp_path / "pulled").ok
    push(other, url, storage_options=options, overwrite=True)

    assert proxy.cut_lists
    assert verify(url, storage_options=options).ok
    assert verify(url, storage_options=s3).ok
    after = open_cache(url, storage_options=s3, mirror=tmp_path / "m2")
    assert after[3]["n"] == 503


@pytest.mark.needs("s3")
@pytest.mark.slow
def test_a_shard_that_a_cut_list_lacks_is_missing_only_if_it_is(cut, s3):
    import s3fs

    url, options, proxy = cut
    proxy.most_files = 1
    system = s3fs.S3FileSystem(**s3, skip_instance_cache=True)
    shard = sorted(name for name in system.ls(url) if name.endswith(".h5"))[4]
    system.rm_file(shard)

    [finding] = verify(url, storage_options=options).findings

    assert "missing" in finding
    assert shard.rsplit("/", 1)[1] in finding


@pytest.mark.needs("s3")
@pytest.mark.slow
def test_a_list_that_goes_on_and_does_not_say_where_is_an_error(cut, s3, tmp_path):
    url, options, proxy = cut
    pack(samples(first=500), tmp_path / "other", workers=0)
    proxy.most_files, proxy.says_more = 3, True
    storage = ObjectStore(url, options, Patience(waits_s=(0.01, 0.01)))

    with pytest.raises(CacheError, match="NextContinuationToken"):
        copy_to_store(tmp_path / "other", storage, overwrite=True)

    assert verify(url, storage_options=s3).ok
    assert open_cache(url, storage_options=s3, mirror=tmp_path / "m")[3]["n"] == 3


@pytest.mark.needs("s3")
@pytest.mark.slow
@pytest.mark.parametrize("key", ["a b/Größe", "50%/%20+x/", "a?b#c*[d]", "x//y/../z"])
def test_names_on_s3_are_taken_as_they_are(folder, s3, tmp_path, key):
    """Also of two that differ in case alone, which share a mirror."""
    other = tmp_path / "other"
    pack(samples(first=500), other, workers=0, shard_bytes=SHARD_BYTES)
    first_numbers = {f"s3://bucket/{key}Mol": 0, f"s3://bucket/{key}mol": 500}
    for url, first in first_numbers.items():
        push(other if first else folder, url, storage_options=s3)
    for url, first in first_numbers.items():
        dataset = open_cache(url, storage_options=s3, mirror=tmp_path / "m")
        assert dataset[0]["n"] == first


@pytest.mark.needs("s3")
@pytest.mark.slow
def test_keys_of_s3_that_may_only_read_are_told_from_those_that_may_write(
    folder, s3, tmp_path
):
    url = "s3://bucket/of-readers"
    push(folder, url, storage_options=s3)
    damaged = tmp_path / "damaged"
    copy_files(folder, damaged)
    for shard in damaged.glob("*.h5"):
        shard.write_bytes(bytes(shard.stat().st_size))

    with keys_that_may_only_read(s3["endpoint_url"]) as keys:
        remote = {"storage_options": keys, "mirror": tmp_path / "m"}
        assert open_cache(url, **remote)[3]["n"] == 3
        # What cannot be written is said before a sample is read ...
        for target, overwrite in [(url, True), (f"{url}-2", True), (f"{url}-2", False)]:
            with pytest.raises(CacheError, match="may read there, and not write"):
                pack(Expensive(), target, workers=0, overwrite=overwrite, **remote)
            # ... and before a shard is hashed: nothing is left of these.
            with pytest.raises(CacheError, match="may read there, and not write"):
                push(damaged, target, storage_options=keys, overwrite=overwrite)

    assert verify(url, storage_options=s3).ok
