"""The contract of storages, and a cache's whole life, on emulators of GCS and Azure.

``tox -e stores`` installs what it can; azurite comes from npm (``npm install azurite``,
and its folder ``node_modules/.bin`` in PATH).  What is not there is skipped.
"""

import contextlib
import re
import shutil
import socket
import subprocess
import threading
import time

import pytest
import torch
from storages import ExpiringProxy, Refusal

import loaderkit
from loaderkit.cache.object_store import ObjectStore
from loaderkit.cache.remote import RemoteCache
from loaderkit.cache.storage import Patience
from loaderkit.errors import CacheError
from loaderkit.testing import StorageContract

QUICK = Patience(request_s=10.0, waits_s=(0.1, 0.1))
SAMPLES = [{"x": torch.full((n % 5 + 1,), n)} for n in range(300)]
ACCOUNT = "devstoreaccount1"
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/"
    "KBHBeksoGMGw=="
)
"""The key that azurite's manual names for everybody."""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def gs():
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    pytest.importorskip("gcsfs")
    port = free_port()
    server = emulator.create_server(
        "127.0.0.1", port, in_memory=True, default_bucket="bucket"
    )
    server.start()
    yield gs_options(port)
    server.stop()


def gs_options(port):
    url = f"http://127.0.0.1:{port}"
    return {"endpoint_url": url, "token": "anon", "project": "test"}


def az_options(port):
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    connection = {
        "DefaultEndpointsProtocol": "http",
        "AccountName": ACCOUNT,
        "AccountKey": AZURITE_KEY,
        "BlobEndpoint": endpoint,
    }
    text = ";".join(f"{name}={value}" for name, value in connection.items())
    return {"connection_string": text}


@pytest.fixture(scope="module")
def az(tmp_path_factory):
    pytest.importorskip("adlfs")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not in PATH")
    port, folder = free_port(), tmp_path_factory.mktemp("azurite")
    command = [program, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    command += ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    server = subprocess.Popen([*command, "--location", str(folder)])
    for _ in range(200):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port)),
        ):
            break
        time.sleep(0.1)
    import fsspec

    fsspec.filesystem("az", **az_options(port)).mkdir("bucket")
    yield az_options(port)
    server.kill()
    server.wait()


@pytest.mark.filterwarnings("ignore")
class TestGcs(StorageContract):
    @pytest.fixture
    def storage(self, gs, tmp_path):
        return ObjectStore(f"gs://bucket/{tmp_path.name}", gs, QUICK)


@pytest.mark.filterwarnings("ignore")
class TestAzure(StorageContract):
    @pytest.fixture
    def storage(self, az, tmp_path):
        return ObjectStore(f"az://bucket/{tmp_path.name}", az, QUICK)


@pytest.fixture(params=["gs", "az"])
def store(request, tmp_path):
    options = request.getfixturevalue(request.param)
    return f"{request.param}://bucket/{tmp_path.name}", options


@pytest.mark.filterwarnings("ignore")
def test_a_cache_is_packed_pushed_read_and_pulled(store, tmp_path):
    url, options = store
    pack = {"storage_options": options, "mirror": tmp_path / "mirror"}
    packed = loaderkit.pack(SAMPLES, url, shard_bytes=2_000, **pack)
    loader = loaderkit.build_loader(
        packed, batch_size=16, shuffle="block", seed=0, num_workers=2
    )
    read = [int(n) for batch in loader for n in batch["x"].values[:, 0]]
    loaderkit.pull(url, tmp_path / "pulled", storage_options=options)

    assert sorted(read) == list(range(300))
    assert len(loaderkit.open_cache(tmp_path / "pulled")) == 300
    with pytest.raises(CacheError, match="There is a cache at"):
        loaderkit.push(tmp_path / "pulled", url, storage_options=options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("protocol", ["gs", "az"])
def test_a_bucket_that_is_missing_and_a_server_that_is_gone_are_said(
    protocol, request, tmp_path
):
    options = request.getfixturevalue(protocol)
    gone = {"gs": gs_options, "az": az_options}[protocol](free_port())
    patience = Patience(request_s=2.0, waits_s=(0.1, 0.1))

    for url, given, words in (
        (f"{protocol}://nowhere/cache", options, "There is no cache at"),
        (f"{protocol}://bucket/cache", gone, "3 times in a row"),
    ):
        cache = RemoteCache(url, given, tmp_path / "mirror", patience=patience)
        with pytest.raises(CacheError, match=words) as raised:
            loaderkit.open_cache(cache)
        assert url in str(raised.value)


REFUSALS = {
    "gs": Refusal(
        401,
        b'{"error": {"code": 401, "message": "Invalid Credentials"}}',
        {"Content-Type": "application/json"},
    ),
    "az": Refusal(
        403,
        b'<?xml version="1.0"?><Error><Code>AuthenticationFailed</Code>'
        b"<Message>Signed expiry time has to be after now.</Message></Error>",
        {"Content-Type": "application/xml", "x-ms-error-code": "AuthenticationFailed"},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("protocol", ["gs", "az"])
def test_credentials_that_expire_are_read_anew_and_then_an_error(
    protocol, request, tmp_path
):
    options = request.getfixturevalue(protocol)
    port = re.search(r"127\.0\.0\.1:(\d+)", str(options))[1]
    proxy = ExpiringProxy(f"http://127.0.0.1:{port}", REFUSALS[protocol])
    make_options = {"gs": gs_options, "az": az_options}[protocol]
    url = f"{protocol}://bucket/{tmp_path.name}"
    # gcsfs itself tries again for half a minute.
    patience = Patience(request_s=60.0, waits_s=(0.5,))
    store = ObjectStore(url, make_options(proxy.port), patience)
    store.commit("manifest.json", b"{}", replace=True)
    assert store.read_file("manifest.json", 100) == b"{}"

    proxy.all_expired = True
    renewal = threading.Timer(0.3, setattr, (proxy, "all_expired", False))
    renewal.start()
    assert store.read_file("manifest.json", 100) == b"{}"
    renewal.join()
    assert proxy.refusals > 0

    proxy.all_expired = True
    for request_of in (
        lambda: store.read_range("manifest.json", 0, 2),
        lambda: store.commit("b.json", b"{}", replace=True),
    ):
        with pytest.raises(CacheError, match="credentials have expired") as raised:
            request_of()
        assert url in str(raised.value)
        assert "log in again" in raised.value.fix
    proxy.stop()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("protocol", ["gs", "az"])
def test_a_bucket_that_is_missing_is_said_by_writing(protocol, request):
    options = request.getfixturevalue(protocol)
    store = ObjectStore(f"{protocol}://nowhere/cache", options, QUICK)

    with pytest.raises(CacheError, match=f"{protocol}://nowhere/cache") as raised:
        store.commit("manifest.json", b"{}", replace=True)
    assert "bucket" in raised.value.why


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_key_is_said_at_once(az, tmp_path):
    text = az["connection_string"].replace("Eby8", "AAAA")
    wrong = {"connection_string": text}
    cache = RemoteCache("az://bucket/cache", wrong, tmp_path, patience=QUICK)

    with pytest.raises(CacheError, match="does not let you in"):
        loaderkit.open_cache(cache)
