"""A manifest is trusted in nothing."""

import copy
import json
import random
from dataclasses import replace

import pytest
import strangers

from loaderkit import pack
from loaderkit.cache.manifest import (
    Manifest,
    manifest_from,
    read_manifest,
    write_manifest,
)
from loaderkit.cache.shard_table import ShardTable
from loaderkit.errors import CacheVersionError, DamagedCacheError


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "c.lk"
    samples = [{"x": [1.0] * i, "s": "a" * i, "n": i} for i in range(9)]
    pack(samples, path, shard_bytes=200, workers=0)
    return path


@pytest.fixture(scope="module")
def text(path):
    return (path / "manifest.json").read_text()


@pytest.fixture(scope="module", params=[2, 3, 4])
def version(request):
    """Of the manifest's format: shards as objects, or as a table of numbers."""
    return request.param


@pytest.fixture(scope="module")
def content(path, version):
    objects = strangers.content_with_objects(path)
    return objects if version == 2 else strangers.content_with_table(objects)


def test_a_manifest_reads_back_as_it_was_written(text):
    manifest = read_manifest(text, where="here")

    assert read_manifest(write_manifest(manifest), where="here") == manifest
    assert len(manifest.generation) == 32


@pytest.mark.parametrize("wrong", ["", "{", "[]", "3", '{"format": "zip"}', "[" * 9999])
def test_what_is_no_manifest_is_said_to_be_none(wrong):
    with pytest.raises(DamagedCacheError, match="here is not the manifest"):
        read_manifest(wrong, where="here")


def test_a_manifest_changed_by_hand_is_noticed(text):
    changed = text.replace('"samples":', '"samples": ', 1).replace('"gzip"', '"lzf"')
    content = json.loads(text)
    content["content"]["shards"][0]["least"][2] += 1

    assert read_manifest(changed, where="here")  # white space is no change
    with pytest.raises(DamagedCacheError, match="checksum"):
        read_manifest(json.dumps(content), where="here")


def test_a_newer_format_is_told_from_damage(text):
    newer = {**json.loads(text), "version": 5}

    with pytest.raises(CacheVersionError, match="upgrade loaderkit"):
        read_manifest(json.dumps(newer), where="here")


NUMBERS = [-1, 0, 1, 2, 4, 7, 8, 63, 64, 65, 0.5]
LARGE_NUMBERS = [1 << 20, 1 << 61, 1 << 62, 1 << 80, -(1 << 63)]
TEXTS = ["", "x", "../../etc/passwd", "|O8", "<i8", "|u1", "AAAA"]
LISTS = [[], [1], [0, 0], [1 << 40, 1 << 40]]
VALUES = [None, True, {}, *NUMBERS, *LARGE_NUMBERS, *TEXTS, *LISTS]


def mutate_somewhere(chance, content):
    """Change, drop or add one thing somewhere."""
    at = content
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = chance.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and chance.random() < 0.8:
            at = at[key]
            continue
        what = chance.random()
        if what < 0.8:
            at[key] = chance.choice(VALUES)
        elif what < 0.9:
            del at[key]
        elif isinstance(at, dict):
            at[chance.choice(["x", "values", "n"])] = chance.choice(VALUES)
        return


def assert_inside(manifest):
    """No array of the manifest leaves its file."""
    assert isinstance(manifest, Manifest)
    for shard in manifest.shards:
        assert "/" not in shard.file
        for array in shard.arrays.values():
            assert array.nbytes >= 0
            if array.offset is not None:
                assert 0 <= array.offset <= array.offset + array.nbytes <= shard.bytes
        for column in shard.columns.values():
            assert column.values in shard.arrays


@pytest.mark.slow
def test_none_of_3_000_mutated_manifests_leads_out_of_its_file(content, version):
    chance, refused = random.Random(0), 0

    for _ in range(3_000):
        mutant = copy.deepcopy(content)
        for _ in range(chance.randint(1, 3)):
            mutate_somewhere(chance, mutant)
        try:
            manifest = manifest_from(mutant, where="here", version=version)
        except DamagedCacheError:
            refused += 1
        else:
            assert_inside(manifest)

    assert 1_500 < refused < 3_000


def test_the_check_itself_notices_an_array_outside(content, version):
    manifest = manifest_from(content, where="here", version=version)
    shard = manifest.shards[0]
    name, array = next(iter(shard.arrays.items()))

    arrays = {**shard.arrays, name: replace(array, offset=shard.bytes)}
    outside = ShardTable.of([replace(shard, arrays=arrays)])

    with pytest.raises(AssertionError):
        assert_inside(replace(manifest, shards=outside))
