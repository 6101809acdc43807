"""A mirror of the size that the plan advises reads every batch of every epoch."""

import random
import re
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from storages import Faults, FileServer, copy_files

from loaderkit import build_loader, open_cache, pack
from loaderkit.cache.download_ahead import DownloadAhead, ShardUse, StoredRows
from loaderkit.cache.mirror import Mirror
from loaderkit.cache.mirrored_shards import KEPT_BATCHES
from loaderkit.cache.remote import RemoteCache
from loaderkit.cache.storage import Patience
from loaderkit.cache.store import Store
from loaderkit.errors import NoRoomError
from loaderkit.loader.downloads import (
    Readers,
    _most_shards_at_once,
    reads_shard_after_shard,
)
from loaderkit.loader.samplers import BatchRule, make_epoch

PATIENT = Patience(request_s=30.0)
"""Long enough for a busy machine: who waits so long finds no room at all."""


def make_store(folder, *, rows, rows_of_shard):
    """Pack samples of 4 KB that say their numbers, so many in each shard."""
    samples = [
        {"x": torch.full((1_000,), float(row)), "n": row, "text": "a" * (row % 40)}
        for row in range(rows)
    ]
    pack(samples, folder / "c", workers=0, shard_bytes=4_100 * rows_of_shard)
    copy_files(folder / "c", folder / "store")
    sizes = [file.stat().st_size for file in (folder / "c").glob("*.h5")]
    return (folder / "store").as_uri(), sizes


def advised_bytes(url, mirror, largest, options):
    """Ask the plan of a mirror of one shard how much it needs."""
    small = RemoteCache(url, mirror=mirror, mirror_bytes=largest, patience=PATIENT)
    with pytest.warns(RuntimeWarning, match="workers may map") as warned:
        build_loader(open_cache(small), **options)
    [needed] = re.findall(r"mirror_bytes=([\d_]+)", str(warned[0].message))
    return int(needed)


def drawn_options(generator):
    """Draw an order, and batches of a size or of a limit in bytes."""
    batch_rows = generator.choice([3, 8, 17, 30])
    options = {"seed": generator.randrange(99)}
    orders = ["block", "block", "block", True, False, "batches"]
    options["shuffle"] = generator.choice(orders)
    if options["shuffle"] == "batches" or generator.random() < 0.3:
        options["max_bytes"] = 4_100 * batch_rows
    else:
        options["batch_size"] = batch_rows
    return options


def check_every_epoch_is_read(tmp_path, case, *, workers):
    generator = random.Random(case)
    rows = generator.randint(30, 50)
    url, sizes = make_store(
        tmp_path, rows=rows, rows_of_shard=generator.choice([2, 3, 5])
    )
    options = {**drawn_options(generator), "num_workers": workers}
    needed = advised_bytes(url, tmp_path / "small", max(sizes), options)
    enough = RemoteCache(
        url, mirror=tmp_path / "m", mirror_bytes=needed, patience=PATIENT
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what is read twice
        loader = build_loader(open_cache(enough), **options)
    for _ in range(2):
        # The steps take a while, so that a thread reads ahead from the third on.
        numbers = []
        for batch in loader:
            numbers += batch["n"].tolist()
            time.sleep(0.002)
        assert sorted(numbers) == list(range(rows))
        mirrored = (tmp_path / "m").rglob("*.h5")
        assert sum(file.stat().st_size for file in mirrored) <= needed


@pytest.mark.long_cases
@pytest.mark.slow
@pytest.mark.parametrize("case", range(16))
def test_a_mirror_as_the_plan_advises_reads_every_epoch(case, tmp_path):
    check_every_epoch_is_read(tmp_path, case, workers=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(100, 102))
def test_a_mirror_as_the_plan_advises_is_enough_for_workers(case, tmp_path):
    check_every_epoch_is_read(tmp_path, case, workers=2)


@pytest.mark.parametrize("case", range(20))
def test_no_epoch_maps_more_shards_at_once_than_are_counted(case):
    generator = random.Random(case)
    shards = generator.randint(10, 60)
    rows_of_shards = [generator.randint(1, 40) for _ in range(shards)]
    shard_of_row = np.repeat(np.arange(shards), rows_of_shards)
    samples = len(shard_of_row)
    rule = BatchRule(
        samples=samples,
        batch_size=generator.choice([None, 1, 7, 40]),
        limits={"nodes": 60},
        sizes={"nodes": np.array([generator.randint(1, 30) for _ in range(samples)])},
        shuffle=generator.choice([False, "block", "block", True, "batches"]),
        shard_of_row=shard_of_row,
        ranks=generator.choice([1, 1, 3]),
    )
    workers, prefetch_factor = generator.choice([(0, 1), (1, 2), (3, 2)])
    counted = _most_shards_at_once(
        shard_of_row, rule, Readers(workers, prefetch_factor)
    )
    # What a plain walk over the batches finds: where rows come from anywhere, each
    # worker reads one of them; otherwise all that are kept or asked for are together.
    window = 1
    if workers and reads_shard_after_shard(rule):
        window = workers * (prefetch_factor + KEPT_BATCHES - 1)
    for epoch in range(4):
        drawn = make_epoch(rule, epoch)
        for first in drawn.numbers:
            batches = range(first, min(first + window, len(drawn)))
            together = [row for batch in batches for row in drawn.batch(batch)]
            assert len(set(shard_of_row[together].tolist())) <= counted


def rows_of(remote):
    """Say in which shards a store's samples are, as a dataset would."""
    manifest = Mirror(remote).manifest
    shard_bytes = np.asarray(manifest.shards.bytes)
    shard_of_row = np.repeat(np.arange(len(shard_bytes)), manifest.shards.samples)
    is_missing = np.ones(len(shard_bytes), bool)
    return StoredRows(
        remote, manifest.generation, shard_of_row, shard_bytes, is_missing
    )


def wait_until(condition):
    while not condition():  # until the runner's end
        time.sleep(0.01)


@pytest.mark.slow
def test_nothing_is_downloaded_ahead_while_a_reader_asks_for_room(tmp_path):
    _, sizes = make_store(tmp_path, rows=80, rows_of_shard=2)
    faults = Faults()
    server = FileServer(tmp_path / "store", faults=faults)
    remote = RemoteCache(
        server.url, mirror=tmp_path / "m", mirror_bytes=8 * max(sizes), patience=PATIENT
    )
    rows = rows_of(remote)
    count = len(sizes)
    ahead = DownloadAhead(rows, [ShardUse(shard, 0, 9) for shard in range(count)])
    reader = Mirror(remote, rows.generation)
    ahead.start()
    wait_until(lambda: count - len(reader.missing()) == 4)  # half of the mirror

    wanted = range(count - 8, count)
    # The twin: who asks nobody finds no room.
    has_got = {shard: _has_got(reader, shard, asks=False) for shard in wanted}
    assert not all(has_got.values())
    faults.served.clear()
    for shard in wanted:
        wait_until(lambda shard=shard: _has_got(reader, shard))
    assert all(reader.uses(shard) for shard in wanted)
    # Those that the threads were at when they were asked may come, and no others.
    ahead_of_time = set(faults.served) - {
        reader.manifest.shards.files[shard] for shard in wanted
    }
    assert len(ahead_of_time) <= 3
    ahead.close()
    server.stop()


def _has_got(mirror, shard, *, asks=True):
    try:
        mirror.use(shard)
    except NoRoomError:
        if asks:
            mirror.ask_for_room()
            time.sleep(0.05)
        return False
    return True


def test_a_thread_that_has_read_its_batch_leaves_room_to_others(tmp_path):
    url, sizes = make_store(tmp_path, rows=24, rows_of_shard=2)
    remote = RemoteCache(
        url, mirror=tmp_path / "m", mirror_bytes=4 * max(sizes), patience=PATIENT
    )
    store = Store(remote)
    selection = store.select(np.arange(0, 6))  # three shards
    results = []

    def read_others():
        try:
            store.select(np.arange(8, 16))  # four, in another thread
        except NoRoomError:
            results.append("no room")
        else:
            results.append("read")

    def read_in_thread():
        thread = threading.Thread(target=read_others)
        thread.start()
        thread.join()
        return results.pop()

    del selection
    assert read_in_thread() == "read"


def test_a_batch_that_is_being_read_keeps_its_shards(tmp_path):
    url, sizes = make_store(tmp_path, rows=24, rows_of_shard=2)
    impatient = Patience(request_s=0.2)
    remote = RemoteCache(
        url, mirror=tmp_path / "m", mirror_bytes=4 * max(sizes), patience=impatient
    )
    store = Store(remote)
    selection = store.select(np.arange(0, 6))
    results = []

    def read_others():
        try:
            store.select(np.arange(8, 16))
        except NoRoomError:
            results.append("no room")

    thread = threading.Thread(target=read_others)
    thread.start()
    thread.join()
    assert results == ["no room"]
    assert len(selection) == 6


@pytest.mark.parametrize("shuffle", ["block", True, False])
def test_sizes_and_rows_are_read_whole_through_a_mirror_of_one_shard(shuffle, tmp_path):
    url, sizes = make_store(tmp_path, rows=24, rows_of_shard=3)
    local = open_cache(tmp_path / "c")
    rows = open_cache(url, mirror=tmp_path / "m", mirror_bytes=max(sizes))
    assert rows.sizes().bytes.tolist() == local.sizes().bytes.tolist()
    assert rows.sizes().tokens.tolist() == local.sizes().tokens.tolist()
    assert [rows.key(row) for row in range(24)] == [local.key(row) for row in range(24)]
    assert [sample["n"] for sample in rows] == list(range(24))
    with pytest.warns(RuntimeWarning, match="workers may map"):
        loader = build_loader(
            rows, max_bytes=9_000, shuffle=shuffle, num_workers=0, seed=1
        )
    assert len(loader) > 1
