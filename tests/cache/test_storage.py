"""Storages: each keeps the contract, and what breaks is tried again or said."""

import os
import time
from pathlib import Path

import pytest
from storage_contract import check_one_of_two_commits_wins, check_storage
from storages import HAS_S3, BreakingProxy, Faults, FileServer, s3_options, s3_server

from loaderkit.cache.folder_storage import FolderStorage
from loaderkit.cache.object_store import ObjectStore
from loaderkit.cache.remote import RemoteCache, locate_cache, open_storage
from loaderkit.cache.storage import Patience
from loaderkit.errors import CacheError, OptionError

QUICK = Patience(request_s=2.0, waits_s=(0.01, 0.02, 0.04))
CONTENT = bytes(range(256)) * 400


@pytest.fixture(scope="module")
def s3():
    with s3_server() as url:
        yield url


@pytest.fixture
def served(tmp_path):
    faults = Faults()
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.h5").write_bytes(CONTENT)
    server = FileServer(tmp_path / "served", faults=faults)
    yield server, faults
    server.stop()


def test_a_folder_keeps_the_contract(tmp_path):
    (tmp_path / "local").mkdir()
    check_storage(FolderStorage(tmp_path / "store"), tmp_path / "local")
    check_one_of_two_commits_wins(FolderStorage(tmp_path / "store"), tries=20)


def test_fsspecs_memory_keeps_the_contract(tmp_path):
    check_storage(ObjectStore(f"memory://contract{tmp_path}"), tmp_path)


@pytest.mark.needs("s3")
@pytest.mark.slow
def test_s3_keeps_the_contract(tmp_path, s3):
    make_bucket(s3, "contract")
    store = ObjectStore("s3://contract/cache", s3_options(s3), QUICK)
    check_storage(store, tmp_path)
    check_one_of_two_commits_wins(store, tries=3)


@pytest.mark.needs("s3")
@pytest.mark.slow
def test_a_bucket_that_is_missing_is_a_file_that_is_missing(s3):
    store = ObjectStore("s3://nowhere/cache", s3_options(s3), QUICK)
    with pytest.raises(FileNotFoundError):
        store.read_file("manifest.json", 100)


@pytest.mark.needs("s3")
@pytest.mark.slow
def test_missing_credentials_are_said_at_once(s3, monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    store = ObjectStore("s3://contract/cache", {"endpoint_url": s3}, QUICK)
    with pytest.raises(CacheError, match="storage_options") as raised:
        store.read_file("manifest.json", 100)
    assert "s3://contract/cache/manifest.json" in str(raised.value)


@pytest.mark.parametrize(
    "broken",
    [
        {"cut": 2},
        {"statuses": [500, 503]},
        {"statuses": [503, 429, 500]},
        {"stall_s": 3.0},
    ],
    ids=str,
)
def test_what_passes_is_tried_again(served, broken):
    server, faults = served
    store = ObjectStore(server.url, patience=QUICK)
    for name, value in broken.items():
        setattr(faults, name, value)
    assert store.read_range("a.h5", 10, 9_000) == CONTENT[10:9_000]


def test_a_server_that_fails_for_good_is_an_error_with_the_url(served):
    server, faults = served
    faults.statuses = [503] * 99
    store = ObjectStore(server.url, patience=QUICK)
    with pytest.raises(CacheError, match="failed 4 times in a row") as raised:
        store.read_range("a.h5", 0, 10)
    assert f"{server.url}/a.h5" in str(raised.value)
    assert len(faults.statuses) == 99 - QUICK.tries


def test_a_store_that_does_not_let_us_in_is_not_asked_again(served):
    server, faults = served
    faults.forbidden = True
    store = ObjectStore(server.url, patience=Patience(waits_s=(60.0,)))
    with pytest.raises(CacheError, match="credentials"):
        store.read_range("a.h5", 0, 10)


@pytest.mark.parametrize("fault", ["gone", "silent", "broken"])
def test_a_network_that_breaks_for_a_while_is_waited_for(served, fault):
    server, _ = served
    proxy = BreakingProxy(int(server.url.rsplit(":", 1)[1]))
    store = ObjectStore(proxy.url, patience=Patience(1.0, (0.1, 0.3, 0.6, 1.0)))
    assert store.read_range("a.h5", 0, 100) == CONTENT[:100]

    def heal(after_s):
        time.sleep(after_s)
        proxy.is_gone = proxy.is_silent = False

    import threading

    proxy.is_gone, proxy.is_silent = fault == "gone", fault == "silent"
    proxy.bytes_until_break = 1_000 if fault == "broken" else None
    healer = threading.Thread(target=heal, args=(0.3,))
    healer.start()
    try:
        assert store.read_range("a.h5", 0, len(CONTENT)) == CONTENT
    finally:
        healer.join()
        proxy.stop()


def test_a_network_that_stays_silent_is_no_hang(served):
    server, _ = served
    proxy = BreakingProxy(int(server.url.rsplit(":", 1)[1]))
    proxy.is_silent = True
    store = ObjectStore(proxy.url, patience=Patience(0.3, (0.01, 0.01)))
    with pytest.raises(CacheError, match="3 times"):
        store.read_range("a.h5", 0, 100)
    proxy.stop()


def test_a_call_of_a_file_system_without_asyncio_that_hangs_is_left():
    import fsspec

    class Hanging(fsspec.get_filesystem_class("memory")):
        protocol = "hanging"

        def cat_file(self, *_, **__):
            time.sleep(60)

    fsspec.register_implementation("hanging", Hanging, clobber=True)
    store = ObjectStore("hanging://x", patience=Patience(0.1, (0.01,)))
    with pytest.raises(CacheError, match="no answer within"):
        store.read_range("a.h5", 0, 100)


def test_a_process_that_is_forked_reads_with_connections_of_its_own(served):
    server, _ = served
    store = ObjectStore(server.url, patience=QUICK)
    assert store.read_range("a.h5", 0, 10) == CONTENT[:10]
    child = os.fork()
    if child == 0:
        ok = store.read_range("a.h5", 5, 15) == CONTENT[5:15]
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.read_range("a.h5", 5, 15) == CONTENT[5:15]


@pytest.mark.parametrize(
    ("url", "word"),
    [("nothing://x/y", "Protocol"), ("s3", "URL")],
)
def test_a_url_that_nobody_knows_is_said(url, word):
    with pytest.raises(OptionError, match=word):
        open_storage(url)


@pytest.mark.skipif(HAS_S3, reason="its library is installed here")
def test_a_library_that_is_missing_is_named_with_its_extra():
    with pytest.raises(CacheError, match=r"loaderkit\[s3\]"):
        open_storage("s3://bucket/x")


@pytest.mark.parametrize("name", ["storage_options", "mirror", "mirror_bytes"])
def test_an_option_of_urls_is_refused_for_a_folder(name):
    with pytest.raises(OptionError, match=name):
        locate_cache("folder", **{name: {} if name == "storage_options" else "1 GB"})


@pytest.mark.parametrize("value", ["much", 0, -1, True, 1.5])
def test_mirror_bytes_that_are_no_size_are_refused(value):
    with pytest.raises(OptionError, match="mirror_bytes"):
        locate_cache("s3://b/c", mirror_bytes=value)


def test_secrets_are_not_shown():
    remote = RemoteCache("ftp://me:hush@host/x", {"password": "hush"})
    assert "hush" not in repr(remote.storage_options and str(remote))
    assert "hush" not in str(remote)


def test_a_file_url_is_the_folder(tmp_path):
    storage = open_storage(tmp_path.as_uri())
    assert isinstance(storage, FolderStorage)
    assert storage.folder == Path(tmp_path)


def make_bucket(url, name):
    import s3fs

    s3fs.S3FileSystem(**s3_options(url), skip_instance_cache=True).mkdir(name)
