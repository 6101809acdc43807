"""Whatever breaks between us and a store: right data, or an error, within a bound.

A proxy breaks what a real server says.  What never heals must be an error that names
the URL, the shard and what to do; what heals must be waited for.  That the bound is
kept is shown on a clock that the test moves: nothing here depends on an idle machine.
"""

import re
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storages import (
    Break,
    BreakingProxy,
    Faults,
    FileServer,
    copy_files,
    s3_options,
    s3_server,
)
from test_mirror import make_cache, read_labels

from loaderkit.cache.folder_storage import FolderStorage
from loaderkit.cache.object_store import ObjectStore
from loaderkit.cache.remote import STORAGES, RemoteCache
from loaderkit.cache.storage import MOST_JITTER, Patience, Retries
from loaderkit.cache.store import Store
from loaderkit.cache.transfer import copy_from_store, copy_to_store
from loaderkit.errors import CacheError, DamagedCacheError, NoAnswerError

HOPELESS = Patience(request_s=1.0, waits_s=(0.01,))
"""For what never answers: on a busy machine too few bytes come all the more.  A try
takes a second, since opening a file system, without any request, took 0.3 s there."""
REFUSED = Patience(request_s=30.0, waits_s=(0.01, 0.01))
"""For what fails at once: no try runs out of time, so that all three are made."""
STUBBORN = Patience(request_s=1.0, waits_s=(0.01,) * 60, silent_tries=60)
"""For what heals: on a busy machine a request may need many tries of a second."""
FAST_FAULTS = ["closed", "cut", "status", "wrong"]
SILENT_FAULTS = ["silent", "trickle"]
BEFORE_HEADER, IN_HEADER, IN_BODY = 0, 40, 320
"""Bytes of an answer that come before it breaks; a header has some 150 to 250."""


# ---- the bound, on a clock of the test -----------------------------------------------


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self):
        return self.now_s


@pytest.mark.slow
@given(
    st.floats(0.1, 100),
    st.lists(st.floats(0, 20), max_size=8),
    st.integers(1, 5),
    st.lists(st.one_of(st.none(), st.floats(0, 150)), min_size=20, max_size=20),
    st.lists(st.floats(1, MOST_JITTER), min_size=20, max_size=20),
)
def test_all_tries_of_a_request_end_within_what_is_said(
    request_s, waits_s, silent_tries, tries_s, jitters
):
    clock, jitter = Clock(), iter(jitters)
    patience = Patience(request_s, tuple(waits_s), silent_tries)
    retries = Retries(patience, clock, lambda: next(jitter))

    silent = count = 0
    pause = 0.0
    for try_s in tries_s:  # None: nothing ever comes
        clock.now_s += pause
        retries.begin_try()
        count += 1
        left_s = retries.seconds_left
        is_silent = try_s is None or try_s >= left_s
        clock.now_s += left_s if is_silent else try_s
        silent += is_silent
        pause = retries.pause_s(is_silent=is_silent)
        if pause is None:
            break

    assert pause is None
    assert clock.now_s <= patience.longest_s * (1 + 1e-9)
    assert count <= patience.tries
    assert silent <= silent_tries


@given(st.integers(1, 40), st.floats(0, 0.99))
def test_an_upload_is_given_up_so_long_after_its_last_part(parts, share):
    clock = Clock()
    patience = Patience(request_s=10, waits_s=(1,))
    retries = Retries(patience, clock)
    retries.begin_try()
    for _ in range(parts):
        clock.now_s += share * patience.request_s
        assert retries.seconds_left > 0
        retries.note_progress()

    assert retries.seconds_left == pytest.approx(patience.request_s)
    clock.now_s += patience.request_s
    with pytest.raises(TimeoutError, match="no answer within 10 s"):
        _ = retries.seconds_left


def test_a_request_of_a_store_as_it_is_opened_ends_within_four_minutes():
    assert Patience().longest_s <= 4 * 60


# ---- over HTTP -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return make_cache(tmp_path_factory.mktemp("packed") / "c")


@pytest.fixture(scope="module")
def served(packed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    copy_files(packed, folder)
    server = FileServer(folder, faults=Faults())
    yield server
    server.stop()


@pytest.fixture
def proxy(served):
    proxy = BreakingProxy(served.port)
    yield proxy
    proxy.stop()


def open_cold(url, mirror, patience):
    """Read the manifest from the store."""
    return Store(RemoteCache(url, mirror=mirror, patience=patience))


def read_shard(url, mirror, patience, *, healthy_url):
    """Read a shard, where the manifest is in the mirror already."""
    generation = open_cold(healthy_url, mirror, Patience()).manifest.generation
    remote = RemoteCache(url, mirror=mirror, patience=patience)
    return read_labels(Store(remote, generation=generation), [7, 5])


def check_error(error, url, *, name):
    """See that a message says what broke, and what to do."""
    first, *others = str(error).splitlines()
    assert f"{url}/{name}" in first
    assert re.search(r"^  why: .{20,}", "\n".join(others), re.MULTILINE)
    assert re.search(r"^  fix: .{20,}", "\n".join(others), re.MULTILINE)


NEVER_HEALS = [
    ("closed", BEFORE_HEADER),
    ("status", BEFORE_HEADER),
    *(
        (kind, after)
        for kind in ("cut", "silent", "trickle")
        for after in (BEFORE_HEADER, IN_HEADER, IN_BODY)
    ),
    ("wrong", BEFORE_HEADER),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "after"), NEVER_HEALS)
def test_what_never_heals_is_an_error(proxy, served, packed, tmp_path, kind, after):
    shard = Store(packed).manifest.shards.files[1]
    proxy.break_connections(Break(kind, after))
    patience = HOPELESS if kind in {"silent", "trickle"} else REFUSED

    # At once, since each waits for two tries of a second where nothing is said.
    with ThreadPoolExecutor(3) as threads:
        opening = threads.submit(open_cold, proxy.url, tmp_path / "cold", patience)
        reading = threads.submit(
            read_shard, proxy.url, tmp_path / "m", patience, healthy_url=served.url
        )
        pulling = threads.submit(
            copy_from_store, ObjectStore(proxy.url, patience=patience), tmp_path / "c"
        )

    for future, name in (
        (opening, "manifest.json"),
        (reading, shard),
        (pulling, "manifest.json"),
    ):
        with pytest.raises(NoAnswerError) as failed:
            future.result()
        check_error(failed.value, proxy.url, name=name)
    assert not list(tmp_path.rglob("*.h5"))
    # The store is asked again, and goes on where it was.
    proxy.break_connections(None)
    rows = read_shard(proxy.url, tmp_path / "m", Patience(), healthy_url=served.url)
    assert rows == [7, 5]


@pytest.mark.parametrize("name", ["refused", "no such host"])
def test_a_server_that_is_not_there_is_an_error(served, packed, tmp_path, name):
    with socket.create_server(("127.0.0.1", 0)) as free:
        refusing = f"http://127.0.0.1:{free.getsockname()[1]}"
    url = refusing if name == "refused" else "http://nowhere.invalid"

    # Without a name server it is not known that there is no such host.
    why = "failed 3 times|looked up 3 times"
    with pytest.raises(NoAnswerError, match=why) as opening:
        open_cold(url, tmp_path / "m", REFUSED)
    with pytest.raises(NoAnswerError, match=why) as reading:
        read_shard(url, tmp_path / "m", REFUSED, healthy_url=served.url)

    check_error(opening.value, url, name="manifest.json")
    check_error(reading.value, url, name=Store(packed).manifest.shards.files[1])


@pytest.mark.slow
@settings(max_examples=10)  # each takes a second and a half, of waiting
@given(
    st.lists(
        st.tuples(
            st.sampled_from(FAST_FAULTS), st.integers(0, 20_000), st.integers(1, 3)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_heals_gives_right_rows(served, tmp_path_factory, faults):
    proxy = BreakingProxy(served.port)
    mirror = tmp_path_factory.mktemp("mirror")
    try:
        for number, (kind, after, connections) in enumerate(faults):
            proxy.break_connections(Break(kind, after, connections))
            folder = mirror / str(number)
            try:
                rows = read_labels(open_cold(proxy.url, folder, STUBBORN), [7, 5])
            except DamagedCacheError:
                # Bytes that came wrong twice: the store is believed to have them so.
                assert kind == "wrong"
                assert connections >= 2
            else:
                assert rows == [7, 5]
    finally:
        proxy.stop()


@pytest.mark.slow
def test_a_silence_that_ends_gives_right_rows(served, tmp_path):
    """All at once: each waits for two tries of a second."""
    faults = list(product(SILENT_FAULTS, [BEFORE_HEADER, IN_HEADER, IN_BODY]))

    def read_through_proxy(fault):
        kind, after = fault
        proxy = BreakingProxy(served.port)
        proxy.break_connections(Break(kind, after, connections=2))
        try:
            store = open_cold(proxy.url, tmp_path / f"{kind} {after}", STUBBORN)
            return read_labels(store, [7, 5])
        finally:
            proxy.stop()

    with ThreadPoolExecutor(len(faults)) as threads:
        rows = dict(zip(faults, threads.map(read_through_proxy, faults), strict=True))

    assert rows == {fault: [7, 5] for fault in faults}


def test_an_object_that_is_missing_is_named(packed, tmp_path):
    copy_files(packed, tmp_path / "served")
    server = FileServer(tmp_path / "served", faults=Faults())
    shard = Store(packed).manifest.shards.files[1]
    (tmp_path / "served" / shard).unlink()

    with pytest.raises(DamagedCacheError) as reading:
        read_labels(open_cold(server.url, tmp_path / "m", STUBBORN), [5])
    (tmp_path / "served" / "manifest.json").unlink()
    with pytest.raises(CacheError, match="There is no cache") as opening:
        open_cold(server.url, tmp_path / "n", STUBBORN)

    check_error(reading.value, server.url, name=shard)
    assert server.url in str(opening.value)
    server.stop()


def test_a_manifest_that_came_wrong_once_is_read_again(proxy, tmp_path, caplog):
    # HEAD and GET share a connection: of the answer to the second the body is wrong.
    proxy.break_connections(Break("wrong", IN_BODY + 100, connections=1))

    store = open_cold(proxy.url, tmp_path / "m", STUBBORN)

    assert read_labels(store, [7]) == [7]
    assert "It is read once more." in caplog.text


# ---- several readers -----------------------------------------------------------------


class SilentStorage(FolderStorage):
    """Gives the manifest, and no answer when it is asked for shards."""

    asked = 0
    may_fail = threading.Event()

    def read_range(self, name, *_):
        type(self).asked += 1
        self.may_fail.wait()
        # Meanwhile the others come to wait: those that need longer ask themselves.
        time.sleep(0.2)
        raise NoAnswerError(f"{self.url}/{name} could not be read.", why="silent")


@pytest.mark.slow
def test_readers_that_wait_for_one_download_fail_with_it(packed, tmp_path, monkeypatch):
    class Silent(SilentStorage):
        asked, may_fail = 0, threading.Event()

    monkeypatch.setitem(STORAGES, "silent", Silent.from_url)
    remote = RemoteCache(f"silent://{packed}", mirror=tmp_path / "m")
    stores = [Store(remote) for _ in range(8)]
    errors = []

    def read(store):
        with pytest.raises(NoAnswerError) as raised:
            read_labels(store, [0])
        errors.append(str(raised.value))

    threads = [threading.Thread(target=read, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    Silent.may_fail.set()
    for thread in threads:
        thread.join()

    # Each would ask for itself, one after the other, if they did not hear of it.
    assert Silent.asked < len(stores)
    assert len(set(errors)) == 1
    assert len(errors) == len(stores)


@pytest.mark.slow
def test_a_reader_that_comes_later_asks_again(packed, tmp_path, monkeypatch):
    class Silent(SilentStorage):
        asked, may_fail = 0, threading.Event()

    Silent.may_fail.set()
    monkeypatch.setitem(STORAGES, "silent", Silent.from_url)
    store = Store(RemoteCache(f"silent://{packed}", mirror=tmp_path / "m"))
    for _ in range(2):
        with pytest.raises(NoAnswerError):
            read_labels(store, [0])

    assert Silent.asked == 2


# ---- writing, to S3 ------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3_port():
    with s3_server() as url:
        yield int(url.rsplit(":", 1)[1])


@pytest.fixture
def s3(s3_port):
    import s3fs

    proxy = BreakingProxy(s3_port)
    system = s3fs.S3FileSystem(
        **s3_options(f"http://127.0.0.1:{s3_port}"), skip_instance_cache=True
    )
    if not system.exists("faults"):
        system.mkdir("faults")
    yield proxy
    proxy.stop()


def write_to(operation, store, packed, tmp_path):
    """Write a cache to a store, or read it from there."""
    if operation == "push":
        copy_to_store(packed, store, overwrite=False)
    elif operation == "replace":
        copy_to_store(packed, store, overwrite=True)
    elif operation == "pull":
        copy_from_store(store, tmp_path / "pulled")


@pytest.mark.needs("s3")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("push", "silent"),
        ("push", "status"),
        ("replace", "closed"),
        ("replace", "trickle"),
        ("pull", "silent"),
        ("pull", "cut"),
    ],
)
def test_of_writing_and_pulling_what_never_heals_is_an_error(
    s3, packed, tmp_path, operation, kind
):
    url = f"s3://faults/{tmp_path.name}"
    # What fails at once takes the time of a try too: botocore goes on asking.
    store = ObjectStore(url, s3_options(s3.url), HOPELESS)
    s3.break_connections(Break(kind))

    with pytest.raises(NoAnswerError) as raised:
        write_to(operation, store, packed, tmp_path)

    check_error(raised.value, url, name="")
    # Nothing is left that keeps the next one from success.
    s3.break_connections(None)
    healthy = ObjectStore(url, s3_options(s3.url))
    copy_to_store(packed, healthy, overwrite=operation == "replace")
    copy_from_store(healthy, tmp_path / "copy")
    assert read_labels(Store(tmp_path / "copy"), [7, 5]) == [7, 5]
    shutil.rmtree(tmp_path / "copy")


@pytest.mark.needs("s3")
@pytest.mark.slow
def test_a_bucket_that_is_missing_is_said_by_writing(s3, packed):
    store = ObjectStore("s3://no-such-bucket/c", s3_options(s3.url), STUBBORN)
    with pytest.raises(CacheError, match="bucket") as raised:
        copy_to_store(packed, store, overwrite=False)
    assert "s3://no-such-bucket/c" in str(raised.value)
