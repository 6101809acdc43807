"""Caches under kill -9, cut files, flipped bytes, full disks, two packers at once."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from typing import ClassVar

import h5py
import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from loaderkit import SafeDataset, SafeGraphDataset, open_cache, pack, verify
from loaderkit.datasets.pack import PackOptions
from loaderkit.errors import CacheError, DatasetError, LoaderkitError, StaleCacheError
from loaderkit.testing import assert_same

FORK = multiprocessing.get_context("fork")


class Graphs(SafeGraphDataset):
    count, pause_s, broken, seen = 120, 0.0, (), None

    def keys(self):
        return [f"g{i:03}" for i in range(self.count)]

    def load(self, key):
        i = int(key[1:])
        if self.seen is not None:
            self.seen.append(i)
        time.sleep(self.pause_s)
        if i in self.broken:
            msg = f"cannot parse {key}"
            raise ValueError(msg)
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(3 + i % 5, 4, generator=generator)
        return Data(x=x, edge_index=torch.zeros(2, i % 7, dtype=torch.long), name=key)


def bytes_of(path):
    """The files of a cache that are its content."""
    files = [*sorted(path.glob("*.h5")), path / "manifest.json"]
    return {file.name: file.read_bytes() for file in files}


def in_child(function, *arguments):
    """Run in a process of its own; give its exit status (negative: a signal)."""
    child = FORK.Process(target=run_and_leave, args=(function, *arguments))
    child.start()
    child.join()
    return child.exitcode


def run_and_leave(function, *arguments):
    """End at once when all is well: a child may not be able to write anything more."""
    function(*arguments)
    os._exit(0)


def pack_graphs(path, workers, count=120, shard_bytes=1500):
    dataset = Graphs(
        cache=path, packing=PackOptions(workers=workers, shard_bytes=shard_bytes)
    )
    dataset.count, dataset.pause_s = count, 0.0005
    len(dataset)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A cache of several shards, packed in one process without a break."""
    path = tmp_path_factory.mktemp("whole") / "c.lk"
    pack_graphs(path, workers=0)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path, whole, workers):
    pack_graphs(tmp_path / "c.lk", workers)

    assert len(bytes_of(whole)) > 5
    assert bytes_of(tmp_path / "c.lk") == bytes_of(whole)


@pytest.mark.slow
def test_a_run_killed_again_and_again_goes_on_and_ends_with_the_same_bytes(
    tmp_path, whole, every_case
):
    chance, wanted, kills, finished = random.Random(0), bytes_of(whole), 0, 0
    path = tmp_path / "c.lk"
    while kills < (50 if every_case else 18):  # with no worker, one, and two in turn
        child = FORK.Process(target=pack_graphs, args=(path, kills % 3))
        child.start()
        child.join(chance.uniform(0.0, 0.25))
        if child.exitcode is None:
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            kills += 1
            if (path / "manifest.json").exists():  # killed behind the last step
                assert bytes_of(path) == wanted
                continue
            with pytest.raises(CacheError, match=r"half packed|no cache"):
                open_cache(path)
        else:
            assert child.exitcode == 0
            assert bytes_of(path) == wanted
            shutil.rmtree(path)
            finished += 1
    pack_graphs(path, 2)

    assert bytes_of(path) == wanted
    assert not (path / ".building").exists()


class FromFiles(SafeGraphDataset):
    """Graphs that are made from a file each; a folder says which cannot be read."""

    loaded: ClassVar[list[str]] = []

    def keys(self):
        return sorted(file.name for file in self.raw.iterdir())

    def load(self, key):
        if (self.raw.parent / "broken" / key).exists():
            msg = f"cannot parse {key}"
            raise ValueError(msg)
        self.loaded.append(key)
        return Data(x=torch.full((9, 4), float((self.raw / key).read_text())))


@pytest.mark.slow
def test_what_was_finished_is_not_loaded_again_where_its_files_are_known(tmp_path):
    (tmp_path / "raw").mkdir()
    for i in range(120):
        (tmp_path / "raw" / f"g{i:03}").write_text(str(i))
    packing = PackOptions(workers=0, shard_bytes=1500)
    dataset = FromFiles(tmp_path / "raw", tmp_path / "c.lk", packing=packing)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "g100").touch()
    with pytest.raises(DatasetError, match="g100"):
        len(dataset)
    with pytest.raises(CacheError, match="half packed"):
        open_cache(tmp_path / "c.lk")
    (tmp_path / "broken" / "g100").unlink()
    FromFiles.loaded.clear()

    assert len(dataset) == 120

    # The first and the last sample of each finished shard are read again, to see that
    # nothing but the files decides what a sample is.
    assert len(FromFiles.loaded) < 60
    assert FromFiles.loaded[-1] == "g119"


@pytest.mark.slow
def test_a_sample_that_fails_is_named_with_the_place_in_the_code(tmp_path):
    dataset = Graphs(cache=tmp_path / "c.lk", packing=PackOptions(workers=2))
    dataset.broken = [37]

    with pytest.raises(DatasetError) as caught:
        dataset[0]

    assert (
        "'g037' (row 37 of 120) could not be loaded: ValueError: cannot parse g037"
        in str(caught.value)
    )
    assert "test_reliability.py:" in caught.value.why


@pytest.mark.slow
def test_keys_that_change_make_the_cache_stale(tmp_path):
    pack_graphs(tmp_path / "c.lk", 0)
    dataset = Graphs(cache=tmp_path / "c.lk")
    dataset.count = 121

    with pytest.raises(
        StaleCacheError, match="121 keys now, 120 when packed"
    ) as caught:
        dataset[0]

    assert "overwrite=True" in caught.value.fix
    fresh = Graphs(cache=tmp_path / "c.lk", packing=PackOptions(overwrite=True))
    fresh.count = 121
    assert len(fresh) == 121


@pytest.mark.slow
def test_load_that_changes_makes_the_cache_stale(tmp_path):
    pack_graphs(tmp_path / "c.lk", 0)

    class Other(Graphs):
        def load(self, key):
            return Data(x=torch.ones(1, 1), name=key)

    with pytest.raises(StaleCacheError, match=r"load\(\) has changed"):
        Other(cache=tmp_path / "c.lk")[0]


def cut_everywhere(source, path):
    for name, content in bytes_of(source).items():
        shutil.copytree(source, path)
        whole = len(content.rstrip())
        # All lengths take minutes: those at the ends, and some of any remainder.
        lengths = [*range(64), *range(64, whole - 64, 37), *range(whole - 64, whole)]
        for length in lengths:
            (path / name).write_bytes(content[:length])
            with pytest.raises(CacheError):
                read_all(path)
        shutil.rmtree(path)


def read_all(path, checksums="once"):
    dataset = open_cache(path, checksums=checksums)
    items = [dataset[row] for row in range(len(dataset))]
    return items, dataset.batch(range(len(dataset))), dataset.sizes()


@pytest.mark.slow
def test_a_cache_that_is_cut_is_refused(tmp_path):
    pack_graphs(tmp_path / "small.lk", 0, count=4, shard_bytes=1 << 20)

    assert in_child(cut_everywhere, tmp_path / "small.lk", tmp_path / "cut.lk") == 0


def flip_bytes(source, path, flips, seed, *, hashed):
    """Flip one byte at a time; reading gives equal data or a clear error."""
    chance, wanted = random.Random(seed), read_all(source)
    files = bytes_of(source)
    shutil.copytree(source, path)
    checksums = "once" if hashed else "never"
    refused = []
    for _ in range(flips):
        name = chance.choice(sorted(files))
        content = bytearray(files[name])
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        (path / name).write_bytes(content)
        try:
            values = read_all(path, checksums)
        except LoaderkitError as error:
            refused.append(error)
        else:
            if hashed:
                assert_same(values[0], wanted[0])
                assert_same(values[1], wanted[1])
        assert not verify(path).ok
        (path / name).write_bytes(files[name])
    assert verify(path).ok
    if hashed:
        assert refused
        assert all(isinstance(error, CacheError) for error in refused)


@pytest.mark.slow
def test_each_flipped_byte_is_a_clear_error_or_does_no_harm(
    tmp_path, whole, every_case
):
    flips = 300 if every_case else 150

    code = in_child(lambda: flip_bytes(whole, tmp_path / "f.lk", flips, 0, hashed=True))

    assert code == 0


@pytest.mark.slow
def test_a_flipped_byte_where_nothing_is_hashed_is_an_error_of_ours_or_other_numbers(
    tmp_path, whole, every_case
):
    flips = 200 if every_case else 80

    code = in_child(
        lambda: flip_bytes(whole, tmp_path / "f.lk", flips, 1, hashed=False)
    )

    assert code == 0


@pytest.mark.slow
def test_two_processes_that_pack_at_once_make_one_cache(tmp_path, whole):
    children = [
        FORK.Process(target=pack_graphs, args=(tmp_path / "c.lk", 1)) for _ in "ab"
    ]

    for child in children:
        child.start()
    for child in children:
        child.join()

    assert [child.exitcode for child in children] == [0, 0]
    assert bytes_of(tmp_path / "c.lk") == bytes_of(whole)


def pack_with_file_limit(path, limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(CacheError, match="could not be written"):
        pack_graphs(path, 0, shard_bytes=100_000)


@pytest.mark.slow
def test_a_full_disk_is_said_and_what_was_finished_stays(tmp_path, whole):
    assert in_child(pack_with_file_limit, tmp_path / "c.lk", 9000) == 0

    assert not list((tmp_path / "c.lk").rglob("*.partial"))
    pack_graphs(tmp_path / "c.lk", 0)  # there is room again
    assert bytes_of(tmp_path / "c.lk") == bytes_of(whole)


@pytest.mark.slow
@pytest.mark.needs("mounts")
def test_a_full_file_system_is_said(tmp_path):
    code = in_child(pack_on_a_small_tmpfs, tmp_path)

    if code == 77:
        pytest.skip("this machine does not let a test mount a tmpfs")
    assert code == 0


def pack_on_a_small_tmpfs(folder):
    if os.system(f"mount -t tmpfs -o size=64k none {folder} 2>/dev/null"):
        os._exit(77)
    try:
        with pytest.raises(CacheError, match="No space left on device"):
            pack_graphs(folder / "c.lk", 0, count=2000, shard_bytes=10_000)
        assert list((folder / "c.lk").glob("*.h5"))
    finally:
        os.system(f"umount {folder}")


def as_nobody(function, *arguments):
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    function(*arguments)


def pack_into_what_is_not_ours(path):
    with pytest.raises(CacheError, match=r"cannot be packed into .*denied"):
        pack([1, 2], path / "c.lk")


@pytest.mark.slow
def test_a_read_only_folder_cannot_be_packed_into_but_can_be_read(tmp_path, whole):
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == os.getuid() and str(folder) != "/":
            folder.chmod(folder.stat().st_mode | 0o555)
    shutil.copytree(whole, tmp_path / "ro.lk")
    (tmp_path / "ro.lk").chmod(0o555)
    tmp_path.chmod(0o555)

    refused = in_child(as_nobody, pack_into_what_is_not_ours, tmp_path)
    read = in_child(as_nobody, read_all, tmp_path / "ro.lk")

    tmp_path.chmod(0o755)
    assert (refused, read) == (0, 0)


def test_a_packed_cache_is_not_replaced_unasked(tmp_path):
    first = pack([1, 2], tmp_path / "c.lk")

    with pytest.raises(CacheError, match="There is a cache at") as caught:
        pack([3], tmp_path / "c.lk")

    assert "overwrite=True" in caught.value.fix
    assert first[1] == 2
    assert pack([3], tmp_path / "c.lk", overwrite=True)[0] == 3


def test_a_replacement_that_fails_leaves_the_old_cache(tmp_path):
    pack([1, 2], tmp_path / "c.lk")

    with pytest.raises(DatasetError):
        pack([3, object()], tmp_path / "c.lk", overwrite=True)

    assert open_cache(tmp_path / "c.lk")[1] == 2


def test_a_folder_with_other_files_is_not_packed_into(tmp_path):
    (tmp_path / "thesis.tex").write_text("")

    with pytest.raises(CacheError, match=r"holds 'thesis\.tex'"):
        pack([1], tmp_path)


def test_a_cache_of_a_newer_loaderkit_is_refused(tmp_path):
    pack([1], tmp_path / "c.lk")
    file = tmp_path / "c.lk" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 9}))

    with pytest.raises(CacheError, match="format version 9; this loaderkit reads 4"):
        open_cache(tmp_path / "c.lk")


class Dies(SafeDataset):
    def keys(self):
        return range(40)

    def load(self, key):
        if key == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(key)


@pytest.mark.slow
def test_a_packing_worker_that_dies_is_told_from_one_that_raises(tmp_path):
    with pytest.raises(DatasetError, match="packing worker was killed"):
        len(Dies(cache=tmp_path / "c.lk", packing=PackOptions(workers=1)))


@pytest.mark.parametrize("track_files", ["stat", "hash"])
def test_a_raw_file_that_is_replaced_while_it_is_packed_makes_the_cache_stale(
    tmp_path, track_files
):
    """libhdf5 opens files without a word to Python, so all are looked at before."""
    raw = tmp_path / "raw"
    raw.mkdir()

    def write(value):
        with h5py.File(raw / "new.h5", "w") as file:
            file["x"] = np.full(3, value)
        (raw / "new.h5").replace(raw / "data.h5")

    class Columns(SafeDataset):
        def keys(self):
            return range(3)

        def load(self, key):
            if key == 2:
                write(2)
            with h5py.File(self.raw / "data.h5") as file:
                return {"x": torch.from_numpy(file["x"][...])}

    write(1)
    packing = PackOptions(workers=0, track_files=track_files)
    len(Columns(raw, tmp_path / "c.lk", packing=packing))

    with pytest.raises(StaleCacheError, match=r"data\.h5"):
        len(Columns(raw, tmp_path / "c.lk", packing=packing))


RAW_IS_NO_PATH = [("version", "2", "version"), ("keys", lambda self: range(5), "keys")]


@pytest.mark.parametrize(("name", "value", "pattern"), RAW_IS_NO_PATH)
def test_a_change_is_told_where_the_raw_data_is_no_path(tmp_path, name, value, pattern):
    class Rows(SafeDataset):
        def keys(self):
            return range(3)

        def load(self, key):
            return {"x": torch.tensor([key])}

    packing = PackOptions(workers=0)
    assert len(Rows("db://table", tmp_path / "c.lk", packing=packing)) == 3
    assert len(Rows("db://table", tmp_path / "c.lk", packing=packing)) == 3
    setattr(Rows, name, value)

    with pytest.raises(StaleCacheError, match=pattern):
        len(Rows("db://table", tmp_path / "c.lk", packing=packing))


def test_a_cache_is_read_where_its_raw_data_and_keys_are_not(tmp_path):
    class Files(SafeDataset):
        def keys(self):
            return sorted(path.name for path in self.raw.glob("*.txt"))

        def load(self, key):
            return {"text": (self.raw / key).read_text()}

    raw = tmp_path / "raw"
    raw.mkdir()
    for name in "ab":
        (raw / f"{name}.txt").write_text(name)
    packing = PackOptions(workers=0)
    len(Files(raw, tmp_path / "c.lk", packing=packing))
    shutil.rmtree(raw)

    dataset = Files(raw, tmp_path / "c.lk", packing=packing)

    assert [sample["text"] for sample in dataset] == ["a", "b"]
