"""Caches on the Hugging Face Hub: huggingface_hub itself, and a Hub in this process."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hub import TOKEN, Hub

import loaderkit
from loaderkit.cache.object_store import ObjectStore
from loaderkit.cache.remote import RemoteCache
from loaderkit.cache.storage import Patience
from loaderkit.errors import CacheError, NoAnswerError
from loaderkit.testing import StorageContract

pytestmark = [pytest.mark.slow, pytest.mark.needs("hf")]

QUICK = Patience(waits_s=(0.01, 0.02, 0.04))
SAMPLES = [{"x": torch.full((n % 5 + 1,), n)} for n in range(60)]
URL = "hf://datasets/user/name/cache"


@pytest.fixture
def hub():
    hub = Hub()
    hub.repositories["user/name"] = {"README.md": b"of its own"}
    yield hub
    hub.stop()


class TestHub(StorageContract):
    @pytest.fixture
    def storage(self, hub):
        return ObjectStore(URL, hub.options, QUICK)


def test_a_cache_is_packed_pushed_read_and_pulled(hub, tmp_path):
    options = {"storage_options": hub.options, "mirror": tmp_path / "mirror"}
    packed = loaderkit.pack(SAMPLES, URL, shard_bytes=2_000, **options)
    loader = loaderkit.build_loader(packed, batch_size=16, shuffle="block", seed=0)
    read = [int(n) for batch in loader for n in batch["x"].values[:, 0]]
    loaderkit.pull(URL, tmp_path / "pulled", storage_options=hub.options)

    assert sorted(read) == list(range(60))
    assert len(loaderkit.open_cache(tmp_path / "pulled")) == 60
    assert hub.repositories["user/name"]["README.md"] == b"of its own"
    assert hub.commits[-1] == ["cache/manifest.json"]
    with pytest.raises(CacheError, match="There is a cache at"):
        loaderkit.push(tmp_path / "pulled", URL, storage_options=hub.options)


def test_a_cache_is_replaced_and_what_it_had_is_removed(hub, tmp_path):
    for name, samples in (("a", SAMPLES), ("b", SAMPLES[::-1])):
        loaderkit.pack(samples, tmp_path / name)
        loaderkit.push(
            tmp_path / name, URL, storage_options=hub.options, overwrite=True
        )

    files = {name for name in hub.repositories["user/name"] if "/" in name}
    cache = loaderkit.open_cache(
        URL, storage_options=hub.options, mirror=tmp_path / "mirror"
    )
    assert len(files) == 2
    assert int(cache[0]["x"][0]) == 59


def test_what_another_process_has_written_is_seen(hub, tmp_path):
    loaderkit.pack(SAMPLES, tmp_path / "a")
    reader = ObjectStore(URL, hub.options, QUICK)
    with pytest.raises(FileNotFoundError):
        reader.read_file("manifest.json", 1 << 20)

    loaderkit.push(tmp_path / "a", URL, storage_options=hub.options)

    assert reader.read_file("manifest.json", 1 << 20)


def open_there(url, options, mirror, patience=QUICK):
    return loaderkit.open_cache(RemoteCache(url, options, mirror, patience=patience))


def test_no_cache_in_a_repository_is_said(hub, tmp_path):
    with pytest.raises(CacheError, match="There is no cache at hf://datasets/user"):
        open_there(URL, hub.options, tmp_path)


OTHER_URL = "hf://datasets/user/other/cache"


@pytest.mark.parametrize(
    ("url", "token", "why", "fix"),
    [
        (OTHER_URL, TOKEN, "no such repository", "hf repos create"),
        (URL, False, "no such repository, or it is private", "hf auth login"),
        (URL, "hf_wrong", "does not let you in", "log in again"),
    ],
)
def test_a_repository_that_does_not_let_us_in_is_said_at_once(
    hub, tmp_path, url, token, why, fix
):
    loaderkit.pack(SAMPLES, tmp_path / "a")
    options = {**hub.options, "token": token}
    requests = {
        "open": lambda: open_there(url, options, tmp_path / "m"),
        "push": lambda: loaderkit.push(tmp_path / "a", url, storage_options=options),
    }
    for request in requests.values():
        with pytest.raises(CacheError, match=url) as raised:
            request()
        assert why in raised.value.why
        assert fix in raised.value.fix


def test_a_token_that_expires_is_read_anew_and_then_an_error(hub):
    store = ObjectStore(URL, hub.options, Patience(waits_s=(0.3,) * 9))
    store.commit("manifest.json", b"{}", replace=True)
    assert store.read_file("manifest.json", 100) == b"{}"

    hub.expired = True
    renewal = threading.Timer(0.5, setattr, (hub, "expired", False))
    renewal.start()
    assert store.read_file("manifest.json", 100) == b"{}"
    renewal.join()

    hub.expired = True
    store = ObjectStore(URL, hub.options, QUICK)
    hub.expired = False
    assert store.read_file("manifest.json", 100) == b"{}"
    hub.expired = True
    with pytest.raises(CacheError, match="expired") as raised:
        store.read_file("manifest.json", 100)
    assert URL in str(raised.value)
    assert "log in again" in raised.value.fix


@pytest.mark.parametrize("statuses", [[500, 503], [429, 500], [503] * 3])
def test_errors_of_the_hub_that_pass_are_tried_again(hub, statuses):
    store = ObjectStore(URL, hub.options, QUICK)
    store.commit("manifest.json", b"{}", replace=True)
    hub.statuses = statuses

    assert store.read_file("manifest.json", 100) == b"{}"


def test_a_hub_that_is_gone_is_an_error(hub, tmp_path):
    options = hub.options
    hub.stop()
    patience = Patience(request_s=2.0, waits_s=(0.01, 0.01))

    with pytest.raises(NoAnswerError) as raised:
        open_there(URL, options, tmp_path / "m", patience)
    assert f"{URL}/manifest.json" in str(raised.value)


# Large files, which the Hub keeps by xet.


def test_large_files_come_in_ranges_from_where_the_hub_sends_us(hub, tmp_path):
    loaderkit.pack(SAMPLES, tmp_path / "a", shard_bytes=2_000)
    loaderkit.push(tmp_path / "a", URL, storage_options=hub.options)
    hub.large_bytes = 4_000
    shards = [file.stat().st_size for file in (tmp_path / "a").glob("*.h5")]
    assert (
        min(shards)
        > hub.large_bytes
        > len(hub.repositories["user/name"]["cache/manifest.json"])
    )

    cache = open_there(URL, hub.options, tmp_path / "m")

    assert [int(cache[row]["x"][0]) for row in range(60)] == list(range(60))
    assert sorted(map(len, hub.contents.ranges)) == sorted(shards)
    # Neither the library nor its tokens are needed to read.
    assert hub.tokens_for_xet == []


def test_no_byte_of_a_large_file_comes_twice(hub):
    """Files of the Hub's file system read 5 MiB ahead, wherever it is asked to read."""
    content = np.random.default_rng(0).bytes(20 << 20)
    hub.repositories["user/name"]["cache/a.h5"] = content
    hub.large_bytes = 1 << 20

    store = ObjectStore(URL, hub.options, QUICK)

    assert store.read_range("a.h5", 5, len(content) - 5) == content[5:-5]
    assert sum(map(len, hub.contents.ranges)) == len(content) - 10
    assert len(hub.contents.ranges) == 3


@pytest.mark.parametrize(("expired", "is_read"), [(2, True), (9, False)])
def test_a_signed_url_that_has_expired_is_asked_for_again(hub, expired, is_read):
    hub.repositories["user/name"] |= {"cache/a.h5": b"a" * 100, "cache/b": b"b"}
    hub.large_bytes = 50
    store = ObjectStore(URL, hub.options, QUICK)
    assert store.read_file("b", 100) == b"b"
    hub.contents.expired = expired

    if is_read:
        assert store.read_range("a.h5", 0, 100) == b"a" * 100
        return
    with pytest.raises(CacheError, match="cache/a") as raised:
        store.read_range("a.h5", 0, 100)
    assert "expired" in str(raised.value)


@pytest.mark.needs("xet")
def test_large_files_are_pushed_by_xet(hub, tmp_path):
    loaderkit.pack(SAMPLES, tmp_path / "a", shard_bytes=2_000)
    hub.large_bytes, hub.xet_folder = 4_000, str(tmp_path / "chunks")
    command = [sys.executable, "-m", "loaderkit", "push", str(tmp_path / "a"), URL]
    for name, value in hub.options.items():
        command += ["--storage-option", f"{name}={value}"]

    # hf_xet has threads, which processes that tests fork later would lack.
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    shards = {f"cache/{file.name}": file for file in (tmp_path / "a").glob("*.h5")}
    assert shards.keys() == hub.sha256_of_large.keys()
    assert set(hub.tokens_for_xet) == {"write"}
    hub.take_from_xet("user/name", shards)
    cache = open_there(URL, hub.options, tmp_path / "m")
    assert [int(cache[row]["x"][0]) for row in range(60)] == list(range(60))
