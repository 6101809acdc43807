"""A mirror: whole shards or none, whatever breaks, and never more than it may take."""

import contextlib
import errno
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from held_locks import process_that_holds, stop_process
from hypothesis import given, settings
from hypothesis import strategies as st
from storages import Faults, FileServer, copy_files

from loaderkit.cache.build import open_build
from loaderkit.cache.columns import Block, ShardBuffer
from loaderkit.cache.files import check_digest
from loaderkit.cache.lock_files import hold_lock_file
from loaderkit.cache.mirror import Mirror
from loaderkit.cache.remote import RemoteCache
from loaderkit.cache.storage import Patience
from loaderkit.cache.store import Store
from loaderkit.errors import CacheError, DamagedCacheError, NoRoomError, StaleCacheError

QUICK = Patience(waits_s=(0.01, 0.02, 0.04))
"""Tries follow soon, and each may take a minute on a busy machine."""
SHARDS, SAMPLES = 6, 5
FORK = multiprocessing.get_context("fork")


def make_cache(path, *, rows=2_000, first=0):
    """Write a cache whose every number says which sample it is of."""
    with open_build(path, overwrite=True) as build:
        build.resume({"compression": None, "rows": rows, "first": first})
        for shard in range(SHARDS):
            block = Block()
            for number in range(shard * SAMPLES, (shard + 1) * SAMPLES):
                block.append({"x": np.full(rows, first + number, np.int64)})
            buffer = ShardBuffer()
            buffer.append(block)
            build.add(buffer, state={}, evidence={})
        build.commit(structure={}, fingerprint={}, made_with={})
    return path


def read_labels(store, samples):
    """Read a batch: the number that each sample's rows have, all alike."""
    selection = store.select(np.asarray(samples, np.int64))
    column = store.column("x")
    ranges = selection.row_ranges(column)
    out = np.empty(ranges.total, np.int64)
    column.gather(ranges, out)
    by_sample = out.reshape(len(samples), -1)
    assert (by_sample == by_sample[:, :1]).all()
    return by_sample[:, 0].tolist()


def shard_bytes(folder):
    return sum(f.stat().st_size for f in folder.rglob("*.h5"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return make_cache(tmp_path_factory.mktemp("packed") / "c")


@pytest.fixture
def file_server(packed, tmp_path):
    faults = Faults()
    copy_files(packed, tmp_path / "served")
    server = FileServer(tmp_path / "served", faults=faults)
    yield server.url, faults
    server.stop()


def test_opening_reads_the_manifest_and_a_batch_its_shards(file_server, tmp_path):
    url, faults = file_server
    store = Store(RemoteCache(url, mirror=tmp_path / "m", patience=QUICK))
    assert set(faults.served) == {"manifest.json"}
    assert len(store) == SHARDS * SAMPLES
    faults.served.clear()

    assert read_labels(store, [7, 5]) == [7, 5]

    assert set(faults.served) == {store.manifest.shards.files[1]}


@pytest.mark.parametrize("leads_to", ["nowhere", "itself", "a file"])
def test_a_mirror_that_can_be_no_folder_is_said_with_the_url(
    packed, tmp_path, leads_to
):
    link = tmp_path / "mirror"
    target = {"nowhere": tmp_path / "gone", "itself": link, "a file": __file__}
    link.symlink_to(target[leads_to])

    with pytest.raises(CacheError, match="cannot be mirrored to") as raised:
        Store(RemoteCache(packed.as_uri(), mirror=link))

    assert str(packed) in str(raised.value)
    assert "mirror=" in raised.value.fix


def read_where_files_are_short(url, mirror, longest_bytes, results):
    """Read a cache in a process whose files may have so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest_bytes, longest_bytes))
    try:
        store = Store(RemoteCache(url, mirror=mirror, patience=QUICK))
        results.put(str(read_labels(store, range(len(store)))))
    except CacheError as error:
        results.put(str(error))


@pytest.mark.slow
@pytest.mark.needs("proc")
def test_a_mirror_that_cannot_be_written_to_is_said_with_the_url(packed, tmp_path):
    """Of every file in turn: locks and notes, the manifest, the shards."""
    results, answers = FORK.SimpleQueue(), []
    for longest_bytes in (0, 10, 100, 1_000, 10_000, 10**7):
        mirror = tmp_path / f"m{longest_bytes}"
        arguments = (packed.as_uri(), mirror, longest_bytes, results)
        child = FORK.Process(target=read_where_files_are_short, args=arguments)
        child.start()
        child.join()
        assert child.exitcode == 0
        answers.append(results.get())

    *errors, labels = answers
    assert labels == str([*range(SHARDS * SAMPLES)])
    for error in errors:
        assert str(packed) in error
        assert "mirror=" in error


@pytest.mark.slow
def test_a_shard_is_downloaded_once_for_all_processes(file_server, tmp_path):
    url, faults = file_server
    remote = RemoteCache(url, mirror=tmp_path / "m", patience=QUICK)

    def read_all(results):
        store = Store(remote)
        for start in range(0, len(store), SAMPLES):
            rows = list(range(start, start + SAMPLES))
            if read_labels(store, rows) != rows:
                os._exit(1)
        results.put("ok")

    results = FORK.SimpleQueue()
    processes = [FORK.Process(target=read_all, args=(results,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    # Each shard here is smaller than a part, so that a request is a download.
    shards = [name for name in faults.served if name.endswith(".h5")]
    assert sorted(shards) == sorted(set(shards))
    assert len(shards) == SHARDS


@pytest.mark.slow
@settings(max_examples=4)
@given(
    st.lists(
        st.sampled_from(["cut", "wrong", 500, 503, 429, "changed", "deleted", None]),
        min_size=4,
        max_size=8,
    ),
    st.integers(0, 99),
)
def test_whatever_breaks_right_rows_come_back_or_an_error(broken, seed):
    import tempfile
    from pathlib import Path

    generator = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_cache(folder / "served", rows=200)
        faults = Faults()
        server = FileServer(folder / "served", faults=faults)
        try:
            remote = RemoteCache(server.url, mirror=folder / "m", patience=QUICK)
            store = Store(remote)
            for fault in broken:
                _plant_fault(fault, faults, store)
                rows = generator.integers(0, len(store), 3).tolist()
                if fault == "changed" and not _can_be_read(store, rows):
                    # A file was cut while it was mapped, which is said.
                    store = Store(remote)
                assert read_labels(store, rows) == rows
                _check_all_are_whole(store)
        finally:
            server.stop()


def _can_be_read(store, rows):
    try:
        return read_labels(store, rows) == rows
    except DamagedCacheError:
        return False


def _plant_fault(fault, faults, store):
    if isinstance(fault, int):
        faults.statuses = [fault]
    elif fault in {"cut", "wrong"}:
        setattr(faults, fault, 1)
    elif fault in {"changed", "deleted"}:
        for file in store.path.glob("*.h5"):
            if fault == "deleted":
                file.unlink()
            else:
                os.truncate(file, 100)


def _check_all_are_whole(store):
    sizes = dict(
        zip(
            store.manifest.shards.files,
            store.manifest.shards.bytes.tolist(),
            strict=True,
        )
    )
    for file in store.path.glob("*.h5"):
        if file.stat().st_size == sizes[file.name]:
            number = store.manifest.shards.files.index(file.name)
            check_digest(store.path, store.manifest.shards.file(number))


def test_wrong_bytes_in_the_store_are_never_mapped(file_server, tmp_path):
    url, faults = file_server
    faults.wrong = 10**6
    store = Store(RemoteCache(url, mirror=tmp_path / "m", patience=QUICK))
    with pytest.raises(DamagedCacheError, match="xxh3") as raised:
        read_labels(store, [0])
    assert f"{url}/{store.manifest.shards.files[0]}" in str(raised.value)
    assert not list(store.path.glob("*.h5"))
    assert not list(store.path.rglob("*.partial"))


def test_a_download_that_broke_is_gone_on_with(tmp_path):
    make_cache(tmp_path / "served", rows=400_000)  # 16 MB a shard
    faults = Faults()
    server = FileServer(tmp_path / "served", faults=faults)
    remote = RemoteCache(server.url, mirror=tmp_path / "m", patience=QUICK)
    store = Store(remote)
    [size] = {*store.manifest.shards.bytes.tolist()}
    partial = (
        store.path / ".mirror" / f"{store.manifest.shards.files[0]}.{size}.partial"
    )
    content = (tmp_path / "served" / store.manifest.shards.files[0]).read_bytes()
    partial.write_bytes(content[: size - 1000])

    assert read_labels(store, [0]) == [0]

    assert faults.served.count(store.manifest.shards.files[0]) == 1
    server.stop()


def test_a_partial_file_of_other_bytes_is_dropped(file_server, tmp_path):
    url, _ = file_server
    store = Store(RemoteCache(url, mirror=tmp_path / "m", patience=QUICK))
    shard = store.manifest.shards.file(0)
    partial = store.path / ".mirror" / f"{shard.file}.{shard.bytes}.partial"
    partial.write_bytes(b"x" * 5_000)

    assert read_labels(store, [0]) == [0]


def test_a_shard_changed_in_the_mirror_is_downloaded_again(file_server, tmp_path):
    url, _ = file_server
    remote = RemoteCache(url, mirror=tmp_path / "m", patience=QUICK)
    store = Store(remote)
    read_labels(store, [0])
    file = store.path / store.manifest.shards.files[0]
    content = bytearray(file.read_bytes())
    content[5_000] ^= 1
    file.write_bytes(content)

    assert read_labels(Store(remote, checksums="always"), [0]) == [0]


HOURS_APART = (-30, -2, 0, 2, 30)
"""How far the clocks of two machines that share a folder are apart."""


def set_times(folder, seconds):
    """Have all files be of another time, as from a machine with another clock."""
    times = (time.time() + seconds,) * 2
    for file in folder.rglob("*"):
        os.utime(file, times)


@pytest.mark.parametrize("hours", HOURS_APART)
def test_what_a_store_did_not_give_at_another_clock_is_asked_for(
    packed, tmp_path, hours
):
    remote = RemoteCache(packed.as_uri(), mirror=tmp_path / "m")
    mirror = Store(remote).mirror
    for name in mirror.manifest.shards.files:
        note = {"time": time.time() + hours * 3600, "what": "", "why": "", "fix": ""}
        (mirror.folder / ".mirror" / f"{name}.failed").write_text(json.dumps(note))
    set_times(tmp_path / "m", hours * 3600)

    samples = list(range(SHARDS * SAMPLES))

    assert read_labels(Store(remote), samples) == samples


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize("hours", HOURS_APART)
def test_a_mirror_with_times_of_another_clock_gives_right_rows(packed, tmp_path, hours):
    cap = 2 * shard_bytes(packed) // SHARDS + (16 << 10)
    remote = RemoteCache(packed.as_uri(), mirror=tmp_path / "m", mirror_bytes=cap)
    for number in np.random.default_rng(0).permutation(SHARDS * SAMPLES)[:8].tolist():
        assert read_labels(Store(remote), [number]) == [number]
        set_times(tmp_path / "m", hours * 3600)
        assert shard_bytes(tmp_path / "m") <= cap


@pytest.mark.parametrize("hours", HOURS_APART)
def test_a_wish_for_room_is_seen_whatever_the_clocks_say(packed, tmp_path, hours):
    remote = RemoteCache(packed.as_uri(), mirror=tmp_path / "m")
    asking, holding = (Mirror(remote) for _ in range(2))
    asking.ask_for_room()
    wish = tmp_path / "m" / ".wanted"
    times_ns = time.time_ns() + hours * 3600 * 10**9
    os.utime(wish, ns=(times_ns, times_ns))

    # An old one, as far as anybody can tell; then one that is touched again.
    assert not holding.is_room_wanted()
    os.utime(wish, ns=(times_ns + 1_000_000, times_ns + 1_000_000))
    assert holding.is_room_wanted()


@pytest.mark.slow
def test_keys_that_differ_in_case_alone_share_no_file_of_a_mirror(tmp_path):
    """On a disk that does not tell capitals from small letters, too."""
    mirror, files = tmp_path / "m", []
    for number, name in enumerate(["Mol", "mol", "MOL", "mOl"]):
        path = make_cache(tmp_path / str(number) / name, rows=10, first=100 * number)
        remote = RemoteCache(path.as_uri(), mirror=mirror)
        assert read_labels(Store(remote), [1, 7]) == [100 * number + i for i in (1, 7)]
        manifest = Mirror(remote).manifest
        files += [f"{manifest.generation}/{file}" for file in manifest.shards.files]

    names = {path.relative_to(mirror).as_posix() for path in mirror.rglob("*.h5")}
    assert names <= set(files)
    assert len({name.casefold() for name in files}) == len(files) == 4 * SHARDS


@pytest.mark.slow
def test_the_mirror_keeps_its_cap_and_rows_stay_right(file_server, tmp_path):
    url, _ = file_server
    [size] = {*Store(RemoteCache(url, mirror=tmp_path / "x")).manifest.shards.bytes}
    most = int(3 * size)
    remote = RemoteCache(url, mirror=tmp_path / "m", mirror_bytes=most, patience=QUICK)
    store = Store(remote)
    generator = np.random.default_rng(0)
    for _ in range(25):
        shards = generator.choice(SHARDS, 2)
        rows = (shards * SAMPLES + generator.integers(0, SAMPLES, 2)).tolist()
        assert read_labels(store, rows) == rows
        shard, sample = store.locate(rows[0])
        assert store.column("x").read(shard, sample)[0] == rows[0]
        assert shard_bytes(tmp_path / "m") <= most


@pytest.mark.slow
def test_the_least_recently_used_shard_goes_first(file_server, tmp_path):
    url, _ = file_server
    [size] = {*Store(RemoteCache(url, mirror=tmp_path / "x")).manifest.shards.bytes}
    remote = RemoteCache(
        url, mirror=tmp_path / "m", mirror_bytes=int(3 * size), patience=QUICK
    )
    for shard in (0, 1, 2, 0, 3):  # each time another process, so to speak
        store = Store(remote)
        assert read_labels(store, [shard * SAMPLES]) == [shard * SAMPLES]
        del store
        time.sleep(0.02)

    here = Store(remote).path.glob("*.h5")
    assert sorted(int(file.name[:5]) for file in here) == [0, 2, 3]


@pytest.mark.slow
def test_what_another_process_has_mapped_is_not_deleted(file_server, tmp_path):
    url, _ = file_server
    [size] = {*Store(RemoteCache(url, mirror=tmp_path / "x")).manifest.shards.bytes}
    remote = RemoteCache(
        url,
        mirror=tmp_path / "m",
        mirror_bytes=int(2 * size),
        # As long the second process waits for room; on a busy machine a request may
        # take longer, and is made again.
        patience=Patience(3.0, (0.01,) * 50, silent_tries=50),
    )
    holds, may_end = FORK.Event(), FORK.Event()

    def hold():
        store = Store(remote)
        read_labels(store, [0, SAMPLES])
        holds.set()
        may_end.wait()
        os._exit(0 if read_labels(store, [0, SAMPLES]) == [0, SAMPLES] else 1)

    holder = FORK.Process(target=hold)
    holder.start()
    while not holds.wait(0.1):
        assert holder.is_alive()  # or this would wait for ever
    with pytest.raises(NoRoomError, match="in use by this process and others"):
        read_labels(Store(remote), [2 * SAMPLES])
    may_end.set()
    holder.join()
    assert holder.exitcode == 0
    # What a process that is gone had mapped may go.
    assert read_labels(Store(remote), [2 * SAMPLES]) == [2 * SAMPLES]


def test_a_batch_that_is_larger_than_the_mirror_is_said_at_once(file_server, tmp_path):
    url, _ = file_server
    store = Store(RemoteCache(url, mirror=tmp_path / "m", mirror_bytes=20_000))
    with pytest.raises(NoRoomError, match="A batch reads 6 shards"):
        read_labels(store, list(range(0, SHARDS * SAMPLES, SAMPLES)))


@pytest.mark.slow
def test_a_cache_that_was_replaced_is_stale_and_never_mixed(file_server, tmp_path):
    url, _ = file_server
    remote = RemoteCache(url, mirror=tmp_path / "m", patience=QUICK)
    store = Store(remote)
    assert read_labels(store, [0]) == [0]
    for file in (tmp_path / "served").iterdir():
        file.unlink()
    make_cache(tmp_path / "other", first=1000)
    copy_files(tmp_path / "other", tmp_path / "served")

    assert read_labels(store, [1]) == [1]  # it is mapped
    with pytest.raises(StaleCacheError):
        read_labels(store, [SAMPLES])
    with pytest.raises(StaleCacheError):
        Store(RemoteCache(url, mirror=tmp_path / "n"), generation="0" * 32)
    assert read_labels(Store(remote), [SAMPLES]) == [1000 + SAMPLES]


def test_a_shard_that_is_missing_in_the_store_is_named(file_server, tmp_path):
    url, _ = file_server
    store = Store(RemoteCache(url, mirror=tmp_path / "m", patience=QUICK))
    name = store.manifest.shards.files[2]
    (tmp_path / "served" / name).unlink()
    with pytest.raises(DamagedCacheError, match=name):
        read_labels(store, [2 * SAMPLES])


def test_no_cache_at_a_url_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    server = FileServer(tmp_path / "empty", faults=Faults())
    with pytest.raises(CacheError, match="There is no cache at http"):
        Store(RemoteCache(server.url, mirror=tmp_path / "m", patience=QUICK))
    server.stop()


@pytest.mark.slow
def test_a_full_disk_makes_old_shards_go_and_then_says_so(
    file_server, tmp_path, monkeypatch
):
    url, _ = file_server
    store = Store(RemoteCache(url, mirror=tmp_path / "m", patience=QUICK))
    read_labels(store, [0])
    old = store.path / store.manifest.shards.files[0]
    store.mirror.let_go(0)
    real_write, room = os.write, [old.stat().st_size]

    def write(descriptor, content):
        """Stand in for a disk that has room for one shard."""
        if len(content) > 1000 and old.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if len(content) > 1000 and room[0] < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real_write(descriptor, content)
        room[0] -= count if len(content) > 1000 else 0
        return count

    monkeypatch.setattr(os, "write", write)
    # It is waited for room for so long as a request may take.
    patience = Patience(1.0, (0.01,) * 50, silent_tries=50)
    other = Store(RemoteCache(url, mirror=tmp_path / "m", patience=patience))
    assert read_labels(other, [SAMPLES]) == [SAMPLES]
    assert not old.exists()
    with pytest.raises(CacheError, match="disk of the mirror is full"):
        read_labels(other, [2 * SAMPLES])
    monkeypatch.undo()
    assert read_labels(other, [2 * SAMPLES]) == [2 * SAMPLES]


@pytest.mark.slow
def test_two_threads_read_at_once(file_server, tmp_path):
    url, _ = file_server
    [size] = {*Store(RemoteCache(url, mirror=tmp_path / "x")).manifest.shards.bytes}
    store = Store(
        RemoteCache(
            url, mirror=tmp_path / "m", mirror_bytes=int(4 * size), patience=QUICK
        )
    )
    wrong = []

    def read_many(seed):
        generator = np.random.default_rng(seed)
        for _ in range(40):
            rows = generator.integers(0, len(store), 1).tolist()
            if read_labels(store, rows) != rows:
                wrong.append(rows)

    threads = [threading.Thread(target=read_many, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_a_shard_is_downloaded_beside_a_process_that_is_stopped(file_server, tmp_path):
    url, faults = file_server
    remote = RemoteCache(url, mirror=tmp_path / "m", patience=QUICK)
    store = Store(remote)
    faults.stall_s = 2.0  # so long the process is in the middle of its download

    def read():
        rows = list(range(SAMPLES))
        os._exit(0 if read_labels(Store(remote), rows) == rows else 1)

    stopped = FORK.Process(target=read)
    stopped.start()
    # Not before it has asked: while it makes room it has locked the whole mirror.
    while faults.stall_s:
        assert stopped.is_alive()  # or this would wait for ever
        time.sleep(0.01)
    stop_process(stopped)

    assert read_labels(store, [1, 0]) == [1, 0]

    [shard] = (tmp_path / "m").glob("*/*.h5")
    inode = shard.stat().st_ino
    os.kill(stopped.pid, signal.SIGCONT)
    stopped.join()
    assert stopped.exitcode == 0
    # What is mapped stays what it was: a new file would look like a changed one.
    assert shard.stat().st_ino == inode
    assert not [*(tmp_path / "m").glob("*/.mirror/*.partial")]


@pytest.mark.slow
def test_a_stopped_process_that_has_announced_a_shard_is_not_waited_for(
    file_server, tmp_path
):
    url, _ = file_server
    remote = RemoteCache(url, mirror=tmp_path / "m", patience=QUICK)
    store = Store(remote)

    def announce():
        Mirror(remote).announce(0)
        return contextlib.nullcontext()

    with process_that_holds(announce) as announcer:
        stop_process(announcer)

        assert read_labels(store, [1, 0]) == [1, 0]


@pytest.mark.slow
def test_a_stopped_process_that_has_locked_the_mirror_is_named(file_server, tmp_path):
    url, _ = file_server
    store = Store(
        RemoteCache(
            url,
            mirror=tmp_path / "m",
            patience=Patience(1.0, (0.01,) * 50, silent_tries=50),
        )
    )
    lock = tmp_path / "m" / ".lock"

    with process_that_holds(lambda: hold_lock_file(lock)) as holder:
        stop_process(holder)
        with pytest.raises(CacheError, match="is locked") as caught:
            read_labels(store, [0])

    assert f"process {holder.pid}" in caught.value.why
    assert "stopped" in caught.value.why
    assert f"kill -CONT {holder.pid}" in caught.value.fix
    assert read_labels(store, [1, 0]) == [1, 0]


_READER = """
import sys, pathlib
sys.path[:0] = sys.argv[4:]
import test_mirror
from loaderkit.cache.remote import RemoteCache
from loaderkit.cache.store import Store
remote = RemoteCache(
    sys.argv[1], mirror=pathlib.Path(sys.argv[2]), mirror_bytes=int(sys.argv[3])
)
print("ready", flush=True)
store = Store(remote)
for epoch in range(1000):
    for row in range(0, len(store), 3):
        assert test_mirror.read_labels(store, [row]) == [row]
"""


@pytest.mark.slow
def test_killed_at_random_moments_nothing_is_left_half(file_server, tmp_path):
    url, _ = file_server
    check_kills(url, tmp_path / "m", kills=1, seed=1)


def check_kills(url, mirror, *, kills, seed):
    """Kill a process that downloads and deletes; then look at what it left."""
    from pathlib import Path

    generator = np.random.default_rng(seed)
    here = Path(__file__).parent
    manifest = Store(RemoteCache(url, mirror=mirror.parent / "x")).manifest
    most = 3 * int(manifest.shards.bytes[0])
    for _ in range(kills):
        command = [
            sys.executable,
            "-c",
            _READER,
            url,
            str(mirror),
            str(most),
            str(here),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(float(generator.uniform(0, 0.4)))
        assert process.poll() is None  # one that has ended cannot be killed
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = Store(RemoteCache(url, mirror=mirror, mirror_bytes=most))
        _check_all_are_whole(store)
        assert shard_bytes(mirror) <= most
        rows = generator.integers(0, len(store), 2).tolist()
        assert read_labels(store, rows) == rows
        assert shard_bytes(mirror) <= most
