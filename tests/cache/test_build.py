"""A build keeps numbers of its finished shards in memory, and the rest on disk."""

import gc

import numpy as np
import pytest

from loaderkit.cache.build import open_build
from loaderkit.cache.columns import Block, ShardBuffer
from loaderkit.errors import CacheError

PLAN = {"compression": None, "fingerprint": {}, "samples": 9}


def add_shard(build, number):
    """Write a shard of a single sample."""
    block, buffer = Block(), ShardBuffer()
    block.append({"x": np.full(3, number)})
    buffer.append(block)
    evidence = {"files": {f"raw/{number}/{part}.pt": [1, 2] for part in range(20)}}
    build.add(buffer, state={"last": number}, evidence=evidence)


def notes_of(build):
    """Read what is noted of each finished shard."""
    return [build.read_note(number) for number in range(len(build.shards))]


@pytest.mark.slow
def test_memory_stays_flat_however_many_shards_are_finished(tmp_path):
    counts = {}
    with open_build(tmp_path / "c", overwrite=False) as build:
        build.resume(PLAN)
        for number in range(80):
            add_shard(build, number)
            counts[number] = len(gc.get_objects())

    # Notes of 60 shards more would be dicts of 20 lists each.
    assert counts[79] - counts[19] < 60


def test_what_is_noted_of_finished_shards_is_read_when_it_is_asked_for(tmp_path):
    with open_build(tmp_path / "c", overwrite=False) as build:
        build.resume(PLAN)
        for number in range(5):
            add_shard(build, number)
    with open_build(tmp_path / "c", overwrite=False) as build:
        build.resume(PLAN)
        finished = notes_of(build)

        assert [note.state["last"] for note in finished] == [0, 1, 2, 3, 4]
        assert [note.shard for note in finished] == list(build.shards.table())
        assert len(finished[3].evidence["files"]) == 20


def test_a_note_that_something_else_took_away_is_an_error(tmp_path):
    with open_build(tmp_path / "c", overwrite=False) as build:
        build.resume(PLAN)
        add_shard(build, 0)
        (build.folder / "00000.json").unlink()

        with pytest.raises(CacheError, match=r"00000\.json is gone, or was changed"):
            notes_of(build)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_finished_shard_that_was_damaged_is_written_again(tmp_path, damage):
    with open_build(tmp_path / "c", overwrite=False) as build:
        build.resume(PLAN)
        for number in range(4):
            add_shard(build, number)
        damaged = tmp_path / "c" / list(build.shards.table())[2].file
    content = bytearray(damaged.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    elif damage == "cut":
        damaged.write_bytes(content[:-1])
    else:
        damaged.unlink()

    with open_build(tmp_path / "c", overwrite=False) as build:
        build.resume(PLAN)

        assert len(build.shards) == 2
        assert notes_of(build)[-1].state == {"last": 1}
