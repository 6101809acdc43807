"""Storages: each keeps the contract, and what breaks is tried again or said."""

import builtins
import gc
import multiprocessing
import os
import threading
import time
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from storages import (
    HAS_S3,
    ExpiringProxy,
    Faults,
    FileServer,
    Refusal,
    s3_options,
    s3_server,
)

from loaderkit.cache.folder_storage import FolderStorage
from loaderkit.cache.object_store import ObjectStore
from loaderkit.cache.remote import STORAGES, RemoteCache, locate_cache, open_storage
from loaderkit.cache.storage import Patience
from loaderkit.cache.store_answers import TRIES_OF_LAPSED_CREDENTIALS
from loaderkit.errors import CacheError, OptionError
from loaderkit.testing import StorageContract

FORK = multiprocessing.get_context("fork")
QUICK = Patience(waits_s=(0.01, 0.02, 0.04))
"""Tries follow soon, and each may take a minute on a busy machine."""
CONTENT = bytes(range(256)) * 400


@pytest.fixture(scope="module")
def s3():
    with s3_server() as url:
        make_bucket(url, "contract")
        yield url


@pytest.fixture
def file_server(tmp_path):
    faults = Faults()
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.h5").write_bytes(CONTENT)
    server = FileServer(tmp_path / "served", faults=faults)
    yield server, faults
    server.stop()


class TestFolder(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return FolderStorage(tmp_path / "store")


class TestMemoryOfFsspec(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return ObjectStore(f"memory://contract{tmp_path}", patience=QUICK)


@pytest.mark.needs("s3")
@pytest.mark.slow
class TestS3(StorageContract):
    @pytest.fixture
    def storage(self, s3, tmp_path):
        # Each try opens the file system anew, which takes s3fs most of a second.
        patience = Patience(request_s=20.0, waits_s=(0.01,))
        return ObjectStore(f"s3://contract/{tmp_path.name}", s3_options(s3), patience)


@pytest.mark.slow
@pytest.mark.needs("s3")
def test_a_bucket_that_is_missing_is_a_file_that_is_missing(s3):
    store = ObjectStore("s3://nowhere/cache", s3_options(s3), QUICK)
    with pytest.raises(FileNotFoundError):
        store.read_file("manifest.json", 100)


@pytest.mark.slow
@pytest.mark.needs("s3")
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


def write_credentials(file, key):
    file.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=x\n")


@pytest.fixture
def expiring(s3, monkeypatch, tmp_path):
    """A store whose credentials are those of a file, and what lets them expire."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    write_credentials(file, "FIRST")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    proxy = ExpiringProxy(s3)
    patience = Patience(request_s=20.0, waits_s=(0.5, 0.5, 0.5))
    url = f"s3://contract/{tmp_path.name}"
    store = ObjectStore(url, {"endpoint_url": proxy.url}, patience)
    (tmp_path / "a.h5").write_bytes(CONTENT)
    store.write_file("a.h5", tmp_path / "a.h5")
    store.commit("manifest.json", b"{}", replace=True)
    yield store, proxy, file
    proxy.stop()


REQUESTS = {
    "a range": lambda store: store.read_range("a.h5", 5, 500) == CONTENT[5:500],
    "a file": lambda store: store.read_file("manifest.json", 100) == b"{}",
    "a list": lambda store: set(store.sizes()) == {"a.h5", "manifest.json"},
    "writing": lambda store: store.commit("b.json", b"{}", replace=True) is None,
}


@pytest.mark.needs("s3")
@pytest.mark.slow
@pytest.mark.parametrize("request_of", sorted(REQUESTS))
def test_credentials_that_expire_are_read_anew(expiring, request_of):
    store, proxy, file = expiring
    assert REQUESTS[request_of](store)

    proxy.expired = {"FIRST"}
    renewal = threading.Timer(0.6, write_credentials, (file, "SECOND"))
    renewal.start()
    answered = REQUESTS[request_of](store)
    renewal.join()

    assert answered
    assert proxy.refusals > 0


@pytest.mark.needs("s3")
@pytest.mark.slow
@pytest.mark.parametrize("request_of", sorted(REQUESTS))
def test_credentials_that_nobody_renews_are_an_error_after_some_tries(
    expiring, request_of
):
    store, proxy, _ = expiring
    assert REQUESTS[request_of](store)
    proxy.expired = {"FIRST"}

    with pytest.raises(CacheError, match="credentials have expired") as raised:
        REQUESTS[request_of](store)

    assert store.url in str(raised.value)
    assert "log in again" in raised.value.fix
    assert proxy.refusals == TRIES_OF_LAPSED_CREDENTIALS


@pytest.mark.needs("s3")
@pytest.mark.slow
def test_credentials_that_never_worked_are_an_error_at_once(expiring):
    store, proxy, _ = expiring
    proxy.expired = {"FIRST"}
    other = ObjectStore(store.url, {"endpoint_url": proxy.url}, Patience(20.0, (60,)))

    for request in (REQUESTS["a range"], REQUESTS["a list"]):
        with pytest.raises(CacheError, match="does not let you in"):
            request(other)


@pytest.mark.parametrize(
    "broken",
    [{"cut": 2}, {"statuses": [500, 503]}, {"statuses": [503, 429, 500]}],
    ids=str,
)
def test_what_passes_is_tried_again(file_server, broken):
    server, faults = file_server
    store = ObjectStore(server.url, patience=QUICK)
    for name, value in broken.items():
        setattr(faults, name, value)
    assert store.read_range("a.h5", 10, 9_000) == CONTENT[10:9_000]


def test_a_server_that_fails_for_good_is_an_error_with_the_url(file_server):
    server, faults = file_server
    faults.statuses = [503] * 99
    store = ObjectStore(server.url, patience=QUICK)
    with pytest.raises(CacheError, match="failed 4 times in a row") as raised:
        store.read_range("a.h5", 0, 10)
    assert f"{server.url}/a.h5" in str(raised.value)
    assert len(faults.statuses) == 99 - QUICK.tries


def test_a_store_that_does_not_let_us_in_is_not_asked_again(file_server):
    server, faults = file_server
    faults.forbidden = True
    store = ObjectStore(server.url, patience=Patience(waits_s=(60.0,)))
    with pytest.raises(CacheError, match="credentials"):
        store.read_range("a.h5", 0, 10)
    assert faults.refused == 1


def test_a_file_here_that_cannot_be_opened_is_no_failure_of_the_store(tmp_path, caplog):
    store = ObjectStore(f"memory://gone{tmp_path}", patience=QUICK)
    assert store.sizes() == {}

    with pytest.raises(CacheError) as raised:
        store.write_file("a.h5", tmp_path / "a.h5")

    assert str(raised.value).startswith(f"{tmp_path / 'a.h5'} could not be read")
    assert "trying again" not in caplog.text


@pytest.mark.needs("proc")
@pytest.mark.parametrize("store", ["memory", "file", "folder"])
def test_a_file_here_that_cannot_be_read_is_no_failure_of_the_store(
    tmp_path, caplog, store
):
    """One that opens, and whose bytes the kernel refuses: address 0 of a process."""
    file = Path("/proc/self/mem")
    stores = {
        "memory": ObjectStore(f"memory://gone{tmp_path}", patience=QUICK),
        "file": ObjectStore(f"local://{tmp_path}/store", patience=QUICK),
        "folder": FolderStorage(tmp_path / "store"),
    }

    with pytest.raises(CacheError) as raised:
        stores[store].write_file("a.h5", file)

    assert str(raised.value).startswith(f"{file} could not be read: Input/output error")
    assert "trying again" not in caplog.text


@pytest.mark.slow
def test_of_two_threads_that_commit_one_succeeds_where_looking_takes_time():
    import fsspec

    class SlowToLook(fsspec.get_filesystem_class("memory")):
        protocol = "slow"

        def exists(self, *args, **options):
            answer = super().exists(*args, **options)
            time.sleep(0.02)  # another thread may write meanwhile
            return answer

    fsspec.register_implementation("slow", SlowToLook, clobber=True)
    store = ObjectStore("slow://commits", patience=QUICK)
    StorageContract().test_of_several_commits_at_once_one_succeeds(store)


def test_a_call_of_a_file_system_without_asyncio_that_hangs_is_left():
    import fsspec

    is_over = threading.Event()

    class Hanging(fsspec.get_filesystem_class("memory")):
        protocol = "hanging"

        def cat_file(self, *_, **__):
            is_over.wait()

    fsspec.register_implementation("hanging", Hanging, clobber=True)
    store = ObjectStore("hanging://x", patience=Patience(0.1, (0.01,)))
    with pytest.raises(CacheError, match="no answer within"):
        store.read_range("a.h5", 0, 100)
    is_over.set()


MISTAKES = [
    *["TypeError", "AttributeError", "NameError", "UnboundLocalError", "ImportError"],
    *["ModuleNotFoundError", "SyntaxError", "AssertionError", "ArithmeticError"],
    *["ZeroDivisionError", "OverflowError", "BufferError", "RecursionError"],
    *["StopAsyncIteration", "NotImplementedError"],
]
"""What Python raises of code that is wrong."""
ANSWERS = [
    *["OSError", "ConnectionError", "ConnectionResetError", "BrokenPipeError"],
    *["InterruptedError", "TimeoutError", "EOFError"],
    # A client makes these of answers that it cannot read.
    *["ValueError", "KeyError", "IndexError", "RuntimeError"],
]


SKEWED = {
    "RequestTimeTooSkewed": "The difference between the request time and the current "
    "time is too large.",
    "SignatureDoesNotMatch": "Signature expired: 20261126T101500Z is now earlier than "
    "20261126T131500Z",
    "InvalidSignatureException": "Signature not yet current: 20261126T161500Z",
}
"""What AWS and its likes answer to requests that are signed at another time."""


@pytest.mark.needs("s3")
@pytest.mark.slow
@pytest.mark.parametrize("code", SKEWED)
def test_a_clock_that_is_wrong_is_named(s3, code):
    body = f"<Error><Code>{code}</Code><Message>{SKEWED[code]}</Message></Error>"
    refusal = Refusal(403, body.encode(), {"Content-Type": "application/xml"})
    proxy = ExpiringProxy(s3, refusal)
    proxy.all_expired = True
    store = ObjectStore("s3://contract/x", s3_options(proxy.url), QUICK)

    with pytest.raises(CacheError, match="the clock of this machine") as raised:
        store.sizes()
    assert "set the clock" in raised.value.fix
    proxy.stop()


@pytest.mark.parametrize("name", [*MISTAKES, *ANSWERS])
def test_what_is_wrong_in_a_client_is_not_tried_again(name):
    import fsspec

    class Failing(fsspec.get_filesystem_class("memory")):
        protocol = "failing"
        calls = 0

        def ls(self, *_, **__):
            type(self).calls += 1
            message = "no such thing"
            raise getattr(builtins, name)(message)

    fsspec.register_implementation("failing", Failing, clobber=True)
    store = ObjectStore("failing://x", patience=Patience(1.0, (0.001, 0.001)))
    with pytest.raises(CacheError, match="no such thing") as raised:
        store.sizes()

    assert Failing.calls == (1 if name in MISTAKES else 3)
    assert store.url in str(raised.value)
    assert type(raised.value.__cause__) is getattr(builtins, name)
    if name in MISTAKES and name != "NotImplementedError":
        assert __file__ in raised.value.why


def test_a_mistake_while_a_file_is_created_does_not_replace_one():
    import fsspec

    class Mistaken(fsspec.get_filesystem_class("memory")):
        protocol = "mistaken"
        written = 0

        def pipe_file(self, *_, mode="overwrite"):
            if mode == "create":
                len(3)
            type(self).written += 1

    fsspec.register_implementation("mistaken", Mistaken, clobber=True)
    store = ObjectStore("mistaken://x", patience=QUICK)
    with pytest.raises(CacheError, match="TypeError"):
        store.commit("manifest.json", b"{}", replace=False)

    assert Mistaken.written == 0


def test_memory_that_is_short_is_said_as_it_is():
    import fsspec

    class Large(fsspec.get_filesystem_class("memory")):
        protocol = "large"

        def ls(self, *_, **__):
            raise MemoryError

    fsspec.register_implementation("large", Large, clobber=True)
    with pytest.raises(MemoryError):
        ObjectStore("large://x", patience=Patience(waits_s=(60.0,))).sizes()


@pytest.mark.slow
def test_a_process_that_is_forked_reads_with_connections_of_its_own(file_server):
    server, _ = file_server
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


def test_a_storage_is_registered_by_one_line(monkeypatch):
    class Mine(FolderStorage):
        pass

    monkeypatch.setitem(STORAGES, "mine", Mine.from_url)

    assert isinstance(open_storage("mine:///data"), Mine)
    assert isinstance(RemoteCache("MINE:///data").storage, Mine)


def test_a_file_url_is_the_folder(tmp_path):
    storage = open_storage(tmp_path.as_uri())
    assert isinstance(storage, FolderStorage)
    assert storage.folder == Path(tmp_path)


@given(name=st.text("ab #?;&%:@[]*\u00e4+=", min_size=1))
def test_a_file_url_names_the_folder_that_pathlib_and_fsspec_say(name):
    folder = Path("/data", name)

    assert FolderStorage.from_url(folder.as_uri()).folder == folder
    # fsspec takes "%20" by the letter, and "::" for what joins two URLs.
    if "%" not in name and "::" not in name:
        url = f"file://{folder}"
        fsspecs = fsspec.url_to_fs(url)[1]
        assert str(FolderStorage.from_url(url).folder) == fsspecs


def make_bucket(url, name):
    import s3fs

    s3fs.S3FileSystem(**s3_options(url), skip_instance_cache=True).mkdir(name)


@pytest.mark.slow
def test_a_forked_process_leaves_the_connections_of_its_parent(file_server, caplog):
    server, _ = file_server
    store = ObjectStore(server.url)
    assert store.read_range("a.h5", 0, 1000) == CONTENT[:1000]

    def read_with_a_file_system_of_its_own():
        is_right = store.read_range("a.h5", 0, 1000) == CONTENT[:1000]
        gc.collect()
        os._exit(0 if is_right else 1)

    process = FORK.Process(target=read_with_a_file_system_of_its_own)
    process.start()
    process.join()
    assert process.exitcode == 0
    # A request that gets no answer is made again after a minute.
    with caplog.at_level("WARNING", logger="loaderkit"):
        assert store.read_range("a.h5", 0, 1000) == CONTENT[:1000]
    assert not caplog.records
