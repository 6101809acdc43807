"""Files that go to local disk as they come: whole, or the beginning of what is there.

The bytes are those of a real server, moto's, behind a proxy that breaks connections.
"""

from typing import ClassVar

import pytest
from storages import Break, BreakingProxy, s3_options, s3_server
from test_mirror import make_cache, read_labels

from loaderkit.cache.folder_storage import FolderStorage
from loaderkit.cache.object_store import ObjectStore
from loaderkit.cache.remote import STORAGES, RemoteCache
from loaderkit.cache.storage import Patience, StreamsFiles
from loaderkit.cache.store import Store
from loaderkit.cache.transfer import copy_to_store

pytestmark = [pytest.mark.needs("s3"), pytest.mark.slow]

CONTENT = bytes(range(256)) * 4096  # 1 MiB: many pieces of 64 KiB
SHORT = Patience(request_s=1.0, waits_s=(0.01, 0.01))
"""For what never comes; what comes may take a minute on a busy machine."""


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """Serve one file, behind a proxy."""
    import s3fs

    file = tmp_path_factory.mktemp("sent") / "shard"
    file.write_bytes(CONTENT)
    with s3_server() as url:
        options = s3_options(url)
        s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir("streams")
        ObjectStore("s3://streams/c", options).write_file("shard", file)
        proxy = BreakingProxy(int(url.rsplit(":", 1)[1]))
        yield proxy
        proxy.stop()


def open_store(proxy, patience=None):
    return ObjectStore("s3://streams/c", s3_options(proxy.url), patience)


def test_a_file_comes_as_it_is(s3, tmp_path):
    s3.break_connections(None)
    target = tmp_path / "shard"
    target.write_bytes(b"what was there before")

    assert open_store(s3).stream_file("shard", target)

    assert target.read_bytes() == CONTENT


@pytest.mark.long_cases
@pytest.mark.parametrize("kind", ["closed", "cut", "status", "silent", "trickle"])
@pytest.mark.parametrize("after_bytes", [0, 40, 300_000])
def test_what_breaks_leaves_a_beginning_that_ranges_go_on_from(
    s3, tmp_path, kind, after_bytes
):
    store, target = open_store(s3, SHORT), tmp_path / "shard"
    target.touch()
    s3.break_connections(Break(kind, after_bytes))

    assert not store.stream_file("shard", target)

    content = target.read_bytes()
    assert CONTENT.startswith(content)
    assert len(content) < len(CONTENT)
    s3.break_connections(None)
    missing = open_store(s3).read_range("shard", len(content), len(CONTENT))
    assert content + missing == CONTENT


def test_a_store_that_was_silent_is_asked_for_no_more_streams(s3, tmp_path):
    """Each would take a whole try longer than what is promised of a request."""
    store, target = open_store(s3, SHORT), tmp_path / "shard"
    s3.break_connections(Break("silent", 300_000))
    target.touch()
    assert not store.stream_file("shard", target)
    s3.break_connections(None)
    connections = s3.connections

    assert not store.stream_file("shard", target)

    assert s3.connections == connections
    assert open_store(s3).stream_file("shard", target)


def test_a_missing_file_is_left_to_ranges(s3, tmp_path):
    s3.break_connections(None)
    store = open_store(s3)

    assert not store.stream_file("no such shard", tmp_path / "shard")

    with pytest.raises(FileNotFoundError):
        store.read_range("no such shard", 0, 1)


def test_only_what_can_stream_says_so(tmp_path):
    assert isinstance(open_store(BreakingProxy(1)), StreamsFiles)
    assert not isinstance(FolderStorage(tmp_path), StreamsFiles)
    # fsspec's other file systems hold parts in memory.
    assert not ObjectStore("memory://c").stream_file("shard", tmp_path / "shard")


class NotingStore(ObjectStore):
    """Notes which ranges it is asked for."""

    ranges: ClassVar[list] = []

    def read_range(self, name, start, stop):
        self.ranges.append((name, start, stop))
        return super().read_range(name, start, stop)


@pytest.mark.parametrize("rows", [2_000, 450_000])  # 80 kB a shard, and 18 MB
def test_small_shards_are_streamed_and_large_ones_read_by_ranges(
    s3, tmp_path, monkeypatch, rows
):
    s3.break_connections(None)
    monkeypatch.setitem(STORAGES, "s3", NotingStore)
    options = s3_options(s3.url)
    first = 1 << 40  # smaller numbers are stored in fewer bytes
    packed = make_cache(tmp_path / "c", rows=rows, first=first)
    url = f"s3://streams/{rows}"
    copy_to_store(packed, ObjectStore(url, options), overwrite=False)
    NotingStore.ranges.clear()
    remote = RemoteCache(url, storage_options=options, mirror=tmp_path / "m")

    assert read_labels(Store(remote), [7, 5]) == [first + 7, first + 5]

    assert bool(NotingStore.ranges) is (rows > 2_000)
