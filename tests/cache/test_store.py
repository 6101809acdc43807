"""Both ways of storing columns keep the contract; opening reads no sample."""

import os
from dataclasses import replace

import numpy as np
import pytest

from loaderkit import open_cache, pack, verify
from loaderkit.cache.build import open_build
from loaderkit.cache.columns import Block, Bounds, ShardBuffer, narrowest_dtype
from loaderkit.cache.files import load_manifest
from loaderkit.cache.layout import Array
from loaderkit.cache.manifest import read_manifest, write_manifest
from loaderkit.cache.shard_table import ShardTable
from loaderkit.cache.store import Store
from loaderkit.errors import CacheError, DamagedCacheError
from loaderkit.testing import ColumnContract


class WrittenByBuild(ColumnContract):
    compression = None

    def write(self, path, samples):
        plan = {"compression": self.compression}
        with open_build(path, overwrite=False) as build:
            build.resume(plan)
            for start in (0, 4):
                block = Block()
                for sample in samples[start : start + (4 if start == 0 else 9)]:
                    block.append(sample)
                buffer = ShardBuffer()
                buffer.append(block)
                build.add(buffer, state={}, evidence={})
            build.commit(structure={}, fingerprint={}, made_with={})


class TestMapped(WrittenByBuild):
    pass


class TestGzip(WrittenByBuild):
    compression = "gzip"


def first_shard(path):
    return min(path.glob("*.h5"))


def only_shard(path):
    """The one file of a small cache that holds its samples."""
    [file] = path.glob("*.h5")
    return file


def test_mapped_columns_cannot_be_written_to(tmp_path):
    TestMapped().write(tmp_path / "c", [{"x": np.ones(3)}] * 9)

    values = Store(tmp_path / "c").column("x").shard_part(0).values

    with pytest.raises(ValueError, match="read-only"):
        values[0] = 2


def test_an_ordinary_hdf5_reader_sees_the_same_numbers(tmp_path):
    import h5py

    TestMapped().write(tmp_path / "c", [{"x": np.full(3, i / 2)} for i in range(9)])

    with h5py.File(first_shard(tmp_path / "c")) as file:
        assert file["x/values"][2].tolist() == [1.0, 1.0, 1.0]
        assert file["x/values"].id.get_offset() % 64 == 0


def test_integers_are_kept_in_the_fewest_bytes():
    int64 = np.dtype(np.int64)
    assert narrowest_dtype(int64, Bounds(0, 255)) == np.uint8
    assert narrowest_dtype(int64, Bounds(0, 256)) == np.uint16
    assert narrowest_dtype(int64, Bounds(-1, 127)) == np.int8
    assert narrowest_dtype(int64, Bounds(2**40, 2**40)) == np.int64


def test_a_cache_that_is_not_there_says_how_to_make_one(tmp_path):
    with pytest.raises(CacheError, match="no such folder"):
        Store(tmp_path / "none")
    with pytest.raises(CacheError, match=r"no manifest\.json"):
        Store(tmp_path)


def test_a_file_in_the_place_of_a_cache_is_called_one(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import loaderkit")

    with pytest.raises(CacheError, match="it is a file, and a cache is a folder"):
        open_cache(script)


def test_the_manifest_of_a_cache_leads_to_its_folder(tmp_path):
    folder = pack([1, 2], tmp_path / "ones.lk").cache

    with pytest.raises(CacheError) as raised:
        open_cache(folder / "manifest.json")

    assert f"fix: open_cache({str(folder)!r})" in str(raised.value)


def test_a_shard_that_is_gone_is_named(tmp_path):
    pack([1, 2], tmp_path / "c")
    only_shard(tmp_path / "c").unlink()

    with pytest.raises(DamagedCacheError, match=r"00000-\w+\.h5 is missing"):
        Store(tmp_path / "c")


def sparse_cache(path, samples):
    """A cache of so many samples whose file takes no room on disk."""
    pack([{"x": i} for i in range(1000)], path, workers=0)
    manifest = load_manifest(path)
    shard = manifest.shards[0]
    start = -(-shard.bytes // 64) * 64
    values = Array("|u1", (samples,), offset=start)
    stretched = replace(
        shard,
        samples=samples,
        bytes=start + samples,
        columns={"x": shard.columns["x"]},
        arrays={"x/values": values},
    )
    os.truncate(only_shard(path), stretched.bytes)
    manifest = replace(manifest, shards=ShardTable.of([stretched]))
    (path / "manifest.json").write_text(write_manifest(manifest))


def test_a_billion_samples_open_without_being_read(tmp_path):
    sparse_cache(tmp_path / "c", 10**9)

    # Hashing would read it, and nobody has.
    store = Store(tmp_path / "c", checksums="never")
    ranges = store.select(np.array([999_999_999, 3])).row_ranges(
        store.column("x", stacked=True)
    )
    out = np.empty(2, np.int64)
    store.column("x", stacked=True).gather(ranges, out)

    assert len(store) == 10**9
    assert out.tolist() == [0, 0]
    assert read_manifest((tmp_path / "c" / "manifest.json").read_text(), where="")


def test_verify_names_the_file_that_was_changed(tmp_path):
    pack([{"x": "abc"}], tmp_path / "c")
    assert str(verify(tmp_path / "c")).endswith("hashed")
    file = only_shard(tmp_path / "c")
    file.write_bytes(file.read_bytes()[:-1] + b"!")

    verification = verify(tmp_path / "c")

    assert not verification.ok
    assert f"{file.name} is not the file that was packed" in str(verification)
    assert not verify(tmp_path / "none").ok


def test_offsets_that_lead_outside_are_refused_even_where_nothing_is_hashed(
    tmp_path, monkeypatch
):
    # The limit itself is a million samples.
    monkeypatch.setattr(
        "loaderkit.cache.column_parts._MAX_OFFSETS_CHECKED_ON_OPENING", 0
    )
    pack([{"x": "a" * i} for i in range(9)], tmp_path / "c", workers=0)
    store = Store(tmp_path / "c")
    shard = store.manifest.shards[0]
    at = shard.arrays[shard.columns["x"].offsets].offset
    with (tmp_path / "c" / shard.file).open("r+b") as file:
        file.seek(at + 8 * 4)
        file.write((1 << 40).to_bytes(8, "little"))

    store = Store(tmp_path / "c", checksums="never")
    column = store.column("x")
    ranges = store.select(np.array([3])).row_ranges(column)

    with pytest.raises(DamagedCacheError, match="point outside"):
        column.gather(ranges, np.empty(1, np.uint8))
    with pytest.raises(DamagedCacheError, match="point outside"):
        column.read(0, 3)
