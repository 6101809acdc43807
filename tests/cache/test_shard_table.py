"""All shards of a cache as a table of numbers, held against one object for each."""

import base64
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import resource
import sys
import zlib
from dataclasses import asdict, replace

import numpy as np
import pytest
import strangers
from drawn_shards import caches, changed_tables, fault_of
from hypothesis import given, settings

from loaderkit import inspect_cache, open_cache, pack, verify
from loaderkit.cache.files import load_manifest
from loaderkit.cache.layout import (
    Array,
    Column,
    Shard,
    check_shard,
    shard_from,
    shard_name,
)
from loaderkit.cache.manifest import read_manifest, write_manifest
from loaderkit.cache.shard_table import ShardTable, ShardTableBuilder
from loaderkit.errors import DamagedCacheError
from loaderkit.testing import assert_same

FORK = multiprocessing.get_context("fork")


@pytest.mark.slow
@given(caches())
@settings(max_examples=60, deadline=None)
def test_a_table_says_of_each_shard_what_its_object_says(shards):
    table = ShardTable.of(shards)
    read = ShardTable.from_json(json.loads(json.dumps(table.to_json())))

    for copy in (table, read, pickle.loads(pickle.dumps(read))):
        assert list(copy) == shards
        assert [copy[number] for number in range(len(shards))] == shards
        assert copy[-1] == shards[-1]
        assert copy == table
        assert copy.files == [shard.file for shard in shards]
        assert copy.samples.tolist() == [shard.samples for shard in shards]
        assert copy.bytes.tolist() == [shard.bytes for shard in shards]
        for number, shard in enumerate(shards):
            assert vars(copy.file(number)).items() <= vars(shard).items()
            assert list(copy[number].arrays) == list(shard.arrays)
            assert list(copy[number].columns) == list(shard.columns)
    for group in read.groups:
        for row, position in enumerate(group.positions.tolist()):
            shard = shards[position]
            for name, array in shard.arrays.items():
                assert group.nbytes(name)[row] == array.nbytes
                assert group.chunk_bytes(name)[row] == array.chunk_bytes
            for name, column in shard.columns.items():
                assert group.samples_with(name)[row] == shard.samples_with(column)


@pytest.mark.slow
@given(caches())
@settings(max_examples=40, deadline=None)
def test_objects_of_version_2_give_the_same_table(shards):
    content = {"structure": {}, "fingerprint": {}, "made_with": {}}
    content |= {"compression": None, "sources": None}
    objects = {**content, "shards": [asdict(shard) for shard in shards]}

    old_cache = read_manifest(strangers.manifest_text(objects), where="here")
    new = read_manifest(write_manifest(old_cache), where="here")

    assert list(old_cache.shards) == list(new.shards) == shards
    assert old_cache.shards == new.shards
    assert new == replace(old_cache, generation=new.generation)


@pytest.mark.slow
@given(changed_tables())
@settings(max_examples=150, deadline=None)
def test_a_table_is_refused_where_one_of_its_shards_would_be(groups):
    try:
        ShardTable.from_json([group.to_json() for group in groups])
        refused = False
    except ValueError:
        refused = True

    assert refused == bool(fault_of(groups))


ONE = Shard(
    shard_name(0, "0123456789abcdef" * 2),
    9,
    1 << 20,
    "0123456789abcdef" * 2,
    {
        "x": Array("<f4", (9, 3), 64),
        "o": Array("<i8", (10,), 256),
        "r": Array("|u1", (77, 2), 512),
        "i": Array("<i8", (3, 3), 1024),
        "c": Array("<i4", (9, 4), None, chunk_rows=3, chunk_index="i"),
        "s": Array("<i8", (9, 2), 2048),
        "v": Array("<f8", (50,), 4096),
        "w": Array("<i8", (4,), 8192),
        "some": Array("|i1", (4,), 8256),
    },
    {
        "x": Column("x"),
        "r": Column("r", "o"),
        "c": Column("c"),
        "v": Column("v", "o", "s"),
        "some": Column("some", rows="w", low=0, high=4),
    },
)
FAULTS = {
    "samples that the columns do not have": {"samples": 8},
    "a negative size": {"bytes": -1},
    "a file that ends before its arrays": {"bytes": 8192},
    "a place that is no multiple of 64": {"x": Array("<f4", (9, 3), 65)},
    "a negative place": {"x": Array("<f4", (9, 3), -64)},
    "a place behind the end": {"x": Array("<f4", (9, 3), 1 << 20)},
    "a place whose end is beyond 64 bits": {"x": Array("<f4", (9, 3), (1 << 63) - 64)},
    "rows beyond the end": {"r": Array("|u1", (1 << 20, 2), 512)},
    "more rows than can be counted": {"r": Array("|u1", (1 << 61, 1 << 61), 512)},
    "a product that overflows to 0": {"r": Array("|u1", (1 << 32, 1 << 32), 512)},
    "negative rows": {"r": Array("|u1", (-1, -2), 512)},
    "too few offsets": {"o": Array("<i8", (9,), 256)},
    "chunks of no row": {"c": replace(ONE.arrays["c"], chunk_rows=0)},
    "more chunks than the index has": {"c": replace(ONE.arrays["c"], chunk_rows=2)},
    "an index of two numbers a chunk": {"i": Array("<i8", (3, 2), 1024)},
    "chunks larger than are read": {
        "c": Array("<i4", (9, 1 << 20), None, chunk_rows=3, chunk_index="i")
    },
    "shapes of fewer samples": {"s": Array("<i8", (8, 2), 2048)},
    "more rows named than there are": {"w": Array("<i8", (10,), 8192)},
    "fewer values than rows": {"some": Array("|i1", (3,), 8256)},
}


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_whichever_shard_it_is(fault, at):
    check_shard(ONE)
    shards = [replace(ONE, file=shard_name(n, ONE.xxh3)) for n in range(3)]
    ShardTable.from_json(ShardTable.of(shards).to_json())
    changes = dict(FAULTS[fault])
    values = {key: changes.pop(key) for key in ("samples", "bytes") if key in changes}
    values["arrays"] = {**ONE.arrays, **changes}

    shards[at] = replace(shards[at], **values)
    written = ShardTable.of(shards).to_json()

    with pytest.raises(ValueError, match=r".") as of_object:
        check_shard(shards[at])
    with pytest.raises(ValueError, match=r".") as of_table:
        ShardTable.from_json(written)
    assert str(of_table.value) == str(of_object.value)


def with_fields(group, **values):
    return [{**group, **values}]


ENDLESS = {"dtype": "|u1", "axes": 10**9, "chunk_index": None}
BOMBS = {
    "more shards than checksums": lambda g: with_fields(g, shards=1 << 40),
    "checksums of no bytes": lambda g: with_fields(g, widths=[0] * len(g["widths"])),
    "no shard at all": lambda g: with_fields(g, shards=0, data=""),
    "numbers that end early": lambda g: with_fields(g, data=g["data"][:-4]),
    "numbers that go on": lambda g: with_fields(g, data=g["data"] + "AAAA"),
    "numbers that are none": lambda g: with_fields(g, data="?" + g["data"][1:]),
    "numbers of three bytes": lambda g: with_fields(g, widths=[3, *g["widths"][1:]]),
    "one number too few": lambda g: with_fields(g, least=g["least"][1:]),
    "a least of 65 bits": lambda g: with_fields(g, least=[1 << 64, *g["least"][1:]]),
    "true for a number": lambda g: with_fields(g, shards=True),
    "a schema of nothing": lambda g: with_fields(g, schema={}),
    "the same shards twice": lambda g: [g, g],
    "no list": lambda g: g,
    "an array of 10^9 axes": lambda g: with_fields(
        g,
        schema={"arrays": {"x": ENDLESS}, "columns": {}},
    ),
}
# Whoever reads a manifest catches all three.
ERRORS_OF_BOMBS = {"a schema of nothing": KeyError, "no list": TypeError}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_table_that_claims_what_is_not_there_is_refused_before_room_is_made(bomb):
    shards = [replace(ONE, file=shard_name(n, ONE.xxh3)) for n in range(3)]
    [group] = ShardTable.of(shards).to_json()

    with pytest.raises(ERRORS_OF_BOMBS.get(bomb, ValueError)):
        ShardTable.from_json(BOMBS[bomb](group))


def test_a_builder_keeps_numbers_and_no_objects():
    builder = ShardTableBuilder()

    for number in range(500):
        builder.add(replace(ONE, file=shard_name(number, ONE.xxh3), samples=9))

    assert sum(type(copy) is Shard for copy in gc.get_objects()) < 50
    assert (len(builder), builder.samples, builder.nbytes) == (500, 4500, 500 << 20)
    assert builder.table()[499].file == shard_name(499, ONE.xxh3)


# Caches of many shards


def cache_of_hard_links(path, folder, count):
    """A cache of so many shards, each a name of one of the shards of another."""
    manifest, shards = load_manifest(path), []
    folder.mkdir()
    for number in range(count):
        shard = manifest.shards[number % len(manifest.shards)]
        name = shard_name(number, shard.xxh3)
        os.link(path / shard.file, folder / name)
        shards.append(replace(shard, file=name))
    manifest = replace(manifest, shards=ShardTable.of(shards))
    (folder / "manifest.json").write_text(write_manifest(manifest))
    return folder


@pytest.fixture(scope="module")
def packed_cache(tmp_path_factory):
    """A cache of a few shards, of which no two are alike."""
    path = tmp_path_factory.mktemp("packed") / "c"
    samples = [{"x": np.full(n + 1, n), "s": "a" * n} for n in range(12)]
    pack(samples, path, workers=0, shard_bytes=150)
    assert len(load_manifest(path).shards) >= 3
    return path


@pytest.fixture(scope="module")
def cache_of_many_shards(packed_cache, tmp_path_factory):
    """The same, again and again."""
    return cache_of_hard_links(
        packed_cache, tmp_path_factory.mktemp("many") / "c", 1500
    )


def calls_of(function):
    """Count the Python functions that are called by a function."""
    count = 0

    def on_event(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def calls_of_opening(path):
    open_cache(path)
    return calls_of(lambda: len(open_cache(path)))


def calls_of_a_first_batch(path):
    open_cache(path).batch([0, 3])
    dataset = open_cache(path)
    return calls_of(lambda: dataset.batch([0, 3]))


@pytest.mark.slow
def test_opening_takes_as_many_steps_whatever_the_number_of_shards(
    packed_cache, cache_of_many_shards, tmp_path
):
    more = cache_of_hard_links(packed_cache, tmp_path / "more", 3000)

    assert abs(calls_of_opening(more) - calls_of_opening(cache_of_many_shards)) < 50


@pytest.mark.slow
def test_a_first_batch_takes_as_many_steps_whatever_the_number_of_shards(
    packed_cache, cache_of_many_shards, tmp_path
):
    more = cache_of_hard_links(packed_cache, tmp_path / "more", 3000)

    assert (
        abs(calls_of_a_first_batch(more) - calls_of_a_first_batch(cache_of_many_shards))
        < 50
    )


def test_the_count_of_steps_grows_where_each_shard_is_looked_at(packed_cache, tmp_path):
    """The law above would find a step for each shard: up to 1,000, sizes are asked."""
    few, more = (
        cache_of_hard_links(packed_cache, tmp_path / str(n), n) for n in (400, 800)
    )

    assert calls_of_opening(more) - calls_of_opening(few) >= 400


def test_an_open_cache_of_many_shards_has_no_object_for_each(cache_of_many_shards):
    before = len(gc.get_objects())
    dataset = open_cache(cache_of_many_shards)
    dataset[0], dataset.batch([5, 900, 3])

    assert len(gc.get_objects()) - before < 1500


def test_many_shards_give_the_samples_of_few(packed_cache, cache_of_many_shards):
    few, repeated = open_cache(packed_cache), open_cache(cache_of_many_shards)
    shards = load_manifest(packed_cache).shards
    # Which sample of the few each sample of the many is.
    starts = np.cumsum([0, *shards.samples])
    cycle = [list(range(*pair)) for pair in itertools.pairwise(starts)]
    wanted = [row for n in range(1500) for row in cycle[n % len(shards)]]
    rows = np.random.default_rng(0).integers(len(wanted), size=200).tolist()

    assert len(repeated) == len(wanted)
    assert_same([repeated[r] for r in rows], [few[wanted[r]] for r in rows])
    assert_same(repeated.batch(rows), few.batch([wanted[r] for r in rows]))
    assert inspect_cache(cache_of_many_shards).samples == len(wanted)


def read_with_few_open_files(path):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    dataset = open_cache(path)
    dataset[0], dataset[len(dataset) - 1]
    dataset.batch(range(0, len(dataset), 40))


def test_opening_many_shards_needs_few_open_files(cache_of_many_shards):
    child = FORK.Process(target=read_with_few_open_files, args=(cache_of_many_shards,))
    child.start()
    child.join()

    assert child.exitcode == 0


@pytest.fixture
def damageable_cache(packed_cache, tmp_path):
    """Many shards, one of which may be changed."""
    path = cache_of_hard_links(packed_cache, tmp_path / "c", 1200)
    file = path / load_manifest(path).shards.files[700]
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    return path, file


def test_one_of_many_files_that_is_gone_is_named_when_the_cache_is_opened(
    damageable_cache,
):
    path, file = damageable_cache
    file.unlink()

    with pytest.raises(DamagedCacheError, match=f"{file.name} is missing"):
        open_cache(path)


def test_one_of_many_files_that_is_a_link_is_refused_when_the_cache_is_opened(
    damageable_cache, tmp_path
):
    path, file = damageable_cache
    file.rename(tmp_path / "elsewhere.h5")
    file.symlink_to(tmp_path / "elsewhere.h5")

    with pytest.raises(DamagedCacheError, match="not an ordinary file"):
        open_cache(path)


@pytest.mark.slow
def test_one_of_many_files_that_is_cut_short_is_refused_before_it_is_read(
    damageable_cache,
):
    path, file = damageable_cache
    os.truncate(file, 100)
    dataset = open_cache(path)
    row = int(load_manifest(path).shards.samples[:700].sum())

    for read in (lambda: dataset[row], lambda: dataset.batch([0, row])):
        with pytest.raises(DamagedCacheError, match="100 bytes"):
            read()
    assert not verify(path).ok


# A cache that was packed when manifests had an object for each shard


OLD_SAMPLES = [
    {"x": np.arange(n, dtype="<i8"), "y": 1.5, "s": "ab"[:n]} for n in (2, 3)
]


@pytest.fixture
def old_cache(tmp_path):
    path = tmp_path / "old"
    path.mkdir()
    (path / "manifest.json").write_text(OLD_MANIFEST)
    name = json.loads(OLD_MANIFEST)["content"]["shards"][0]["file"]
    (path / name).write_bytes(zlib.decompress(base64.b64decode(OLD_SHARD)))
    return path


def test_a_cache_with_a_manifest_of_version_2_opens(old_cache):
    dataset = open_cache(old_cache)

    assert_same([dataset[0], dataset[1]], OLD_SAMPLES)
    assert verify(old_cache).ok
    content = json.loads(OLD_MANIFEST)["content"]
    assert list(load_manifest(old_cache).shards) == [shard_from(content["shards"][0])]
    assert load_manifest(old_cache).generation == json.loads(OLD_MANIFEST)["checksum"]


def test_a_cache_of_version_2_is_replaced_by_one_of_version_4(old_cache):
    pack([1, 2, 3], old_cache, workers=0, overwrite=True)

    assert list(open_cache(old_cache)) == [1, 2, 3]
    assert json.loads((old_cache / "manifest.json").read_text())["version"] == 4
    assert len(list(old_cache.glob("*.h5"))) == 1


OLD_MANIFEST = (
    '{"format": "loaderkit-cache", "version": 2, "checksum": "dc51e65fba29c6d8499'
    '8e8ba009c0d4b", "content": {"shards":[{"file":"00000-d1a2ba9e6a8efe85.h5","s'
    'amples":2,"bytes":7752,"xxh3":"d1a2ba9e6a8efe8522952183ad89b176","arrays":{"'
    '@key/values":{"dtype":"|u1","shape":[2,1],"offset":2368,"chunk_rows":null,"c'
    'hunk_index":null},"s/values":{"dtype":"|u1","shape":[2,2],"offset":3904,"chu'
    'nk_rows":null,"chunk_index":null},"x/values":{"dtype":"|u1","shape":[5],"off'
    'set":5440,"chunk_rows":null,"chunk_index":null},"x/offsets":{"dtype":"<i8","'
    'shape":[3],"offset":6208,"chunk_rows":null,"chunk_index":null},"y/values":{"'
    'dtype":"<f8","shape":[2],"offset":7360,"chunk_rows":null,"chunk_index":null}'
    '},"columns":{"@key":{"values":"@key/values","offsets":null,"shapes":null,"ro'
    'ws":null,"low":null,"high":null},"s":{"values":"s/values","offsets":null,"sh'
    'apes":null,"rows":null,"low":null,"high":null},"x":{"values":"x/values","off'
    'sets":"x/offsets","shapes":null,"rows":null,"low":null,"high":null},"y":{"va'
    'lues":"y/values","offsets":null,"shapes":null,"rows":null,"low":null,"high":'
    'null}}}],"structure":{"variants":[["nest","dict",null,["\'x\'","\'y\'","\'s\'"],[['
    '"leaf","x","array","<i8",1,0,null],["leaf","y","float","<f8",0,null,null],["'
    'leaf","s","str","",1,0,null]],null]],"columns":{"x":["x","array","<i8",1,0],'
    '"y":["y","float","<f8",0,null],"s":["s","str","",1,0],"@variant":["@variant"'
    ',"variant","int64",0,null],"@key":["@key","str","",1,0]}},"fingerprint":{"lo'
    'ad":"99aa06d3014798d86001c324468d497f","keys":"e9aacbfc99241e26b537b6827b3a0'
    '57a","count":2,"version":""},"made_with":{"loaderkit":"0.1.0","torch":"2.13.'
    '0+cpu","torch-geometric":"2.8.1","numpy":"2.4.6","h5py":"3.16.0"},"compressi'
    'on":null,"sources":null}}\n'
)
OLD_SHARD = (
    "eNrtWMFOwkAQ3W3BFAgqQWIjanr0iAl3agKGkxr14BUSuGjioWrk1qPe/AQ+hc/yhi0727IDSCkV"
    "tZnXw8t0m9028+bNbt/bzfNi/iDPfBgGy7BdNo0xoH2sxnLcBebAIzmgs0jgk4sxE+ISrB91ntvr"
    "VsufZYwQvN+WYIsRCLNot86ufL6D+ATYQrqz73sDnx2IX4EHSP+1FddfqH+5/taa+s8JNijVhAj6"
    "l+5vId29dB6ee06o83ZC699cXDa513WkPl0d9RNUB0F3KqjP2RC7RcGynryCUp+D2C2rfcE10bpy"
    "gmq6889ZVnwzl7FwQK6JGxryNxzrXkY45IVPOU3WYz/WOOfirjmJdW7n1JnwTuJ/oXaahP556M9k"
    "1BvW//z+i/0kdv/dobQSVu+/w+Jm+m9U/1/EMfwfKiKTCv/vdDvdRP1/m2riT/g/2ifG9v8K+T8h"
    "uv9LHQ7L8/3/sd93ek9OeJ5J3P/FG4Bte6NM4Rh+X1FnkPhIjYFoa/u/Fp5r979/PvCRPaqdn9n/"
    "qPrXA90j/RsyF/Yy/Zvoj0S69I/2g9mE+m/U/y/L+i87ov5LWP38ZVV/6/yl+s/seUv4SslqBP5T"
    "L7D6WGdLfGh0qH6hxFsKsvjZUDn++cutUk3EwRfV96bY"
)
