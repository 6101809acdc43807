"""What no waiting mends is told at once, with what to do; the rest is tried again.

Real servers on this machine: TLS with certificates made here, HTTP, and what speaks
neither.  Whether something was tried again is read from the log and from the number of
connections that a server saw, so that nothing here depends on an idle machine.
"""

import datetime
import gc
import http.server
import ipaddress
import logging
import re
import socket
import ssl
import threading
import time

import pytest
from storages import connections_to

from loaderkit.cache.object_store import ObjectStore
from loaderkit.cache.storage import Patience
from loaderkit.errors import CacheError, NoAnswerError, OptionError

QUICK = Patience(request_s=60.0, waits_s=(0.01,) * 4)
"""Tries that a client makes by itself, for 60 s, are not cut off."""
MOST_CONNECTIONS = 5
"""Of one try: s3fs makes so many of its own where redirects go in a circle."""
TOLD_WITHIN_S = 40.0
"""A bound for a loaded machine.  Told at once is told in 0.3 s on an idle one, and
was in 60 to 180 s where s3fs and botocore tried again."""


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers "/loop" with a redirect to itself, "/503" with that, and else a file."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if "/loop" in self.path:
            self.send_response(301)
            self.send_header("Location", self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status = next((s for s in (401, 403, 503) if f"/{s}" in self.path), 200)
        self.send_response(status)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"file")

    def log_message(self, *_):
        """Say nothing."""


class Server(http.server.ThreadingHTTPServer):
    """Counts connections."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, certificate=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.connections = 0
        self._tls = None
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(certificate)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def finish_request(self, request, client_address):
        self.connections += 1
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        with self._tls.wrap_socket(request, server_side=True) as encrypted:
            super().finish_request(encrypted, client_address)

    def handle_error(self, *_):
        """A client that does not trust us hangs up."""


class Speaker:
    """Says something to whoever connects, or nothing, and waits for the end."""

    def __init__(self, greeting):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.server_port = self._socket.getsockname()[1]
        self.connections = 0
        self._greeting = greeting
        self._open = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        for connection in connections_to(self._socket):
            self.connections += 1
            self._open.append(connection)
            connection.sendall(self._greeting)

    def shutdown(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        for connection in self._open:
            connection.close()

    def server_close(self):
        self._socket.close()


def make_certificate(folder, name, host, *, days):
    """Make a certificate that is signed by itself, with its key, in one file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    first, last = (now + datetime.timedelta(days=day) for day in days)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(first)
        .not_valid_after(last)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / f"{name}.pem"
    pem = serialization.Encoding.PEM
    file.write_bytes(
        key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + certificate.public_bytes(pem)
    )
    return file


CERTIFICATES = {
    "good": ("127.0.0.1", (-1, 1)),
    "expired": ("127.0.0.1", (-9, -1)),
    "too new": ("127.0.0.1", (1, 9)),
    "of another host": ("127.0.0.2", (-1, 1)),
}
GREETINGS = {
    "ssh": b"SSH-2.0-OpenSSH_9.2\r\n",
    "smtp": b"220 mail.example ESMTP\r\n",
    "tls alert": bytes([0x15, 3, 1, 0, 2, 2, 40]),
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    pytest.importorskip("cryptography")
    folder = tmp_path_factory.mktemp("certificates")
    return {
        name: make_certificate(folder, name, host, days=days)
        for name, (host, days) in CERTIFICATES.items()
    }


@pytest.fixture(scope="module")
def servers(certificates):
    servers = {name: Server(file) for name, file in certificates.items()}
    servers["plain"] = Server()
    for name, greeting in GREETINGS.items():
        servers[name] = Speaker(greeting)
    yield servers
    for server in servers.values():
        server.shutdown()
        server.server_close()


def trusting(certificate):
    """Give the options by which fsspec's HTTP trusts a certificate."""
    return {"ssl": ssl.create_default_context(cafile=certificate)}


def s3_at(endpoint, **client_options):
    return {
        "key": "a",
        "secret": "b",
        "endpoint_url": endpoint,
        "client_kwargs": client_options,
    }


def read(url, options=None, patience=QUICK):
    store = ObjectStore(url, options, patience)
    return store.read_file("manifest.json", 1000)


TOLD_AT_ONCE = [
    # the URL, whom fsspec trusts, words of the reason, and of the fix
    ("https://127.0.0.1:{good}/c", "", "nobody whom this machine trusts", "SSL_CERT"),
    ("https://127.0.0.1:{expired}/c", "expired", "has expired", "which says 20"),
    ("https://127.0.0.1:{too new}/c", "too new", "not valid yet", "which says 20"),
    (
        "https://127.0.0.1:{of another host}/c",
        "of another host",
        "of another host",
        "name the host",
    ),
    ("https://127.0.0.1:{plain}/c", "", "speaks no TLS", "http://"),
    ("https://127.0.0.1:{ssh}/c", "", "speaks no TLS", "another port"),
    ("http://127.0.0.1:{ssh}/c", "", "another protocol", "port"),
    ("http://127.0.0.1:{smtp}/c", "", "another protocol", "port"),
    ("http://127.0.0.1:{tls alert}/c", "", "another protocol", "port"),
    ("http://127.0.0.1:{plain}/loop", "", "in a circle", "URL"),
    ("http://127.0.0.1:{plain}/401", "", "does not let you in", "log in"),
    ("http://127.0.0.1:{plain}/403", "", "does not let you in", "log in"),
]


@pytest.mark.needs("s3")
@pytest.mark.parametrize(("url", "trusted", "why", "fix"), TOLD_AT_ONCE)
def test_what_no_waiting_mends_is_told_at_once(
    servers, certificates, caplog, url, trusted, why, fix
):
    [name] = re.findall(r"\{(.+?)\}", url)
    server = servers[name]
    url = url.replace(f"{{{name}}}", str(server.server_port))
    options = trusting(certificates[trusted]) if trusted else None

    check_told_at_once(server, caplog, url, options, why, fix)


def check_told_at_once(server, caplog, url, options, why, fix):
    connections = server.connections
    start_s = time.monotonic()
    with pytest.raises(CacheError) as caught:
        read(url, options)
    assert time.monotonic() - start_s < TOLD_WITHIN_S

    error = caught.value
    assert not isinstance(error, NoAnswerError)
    assert "trying again" not in caplog.text
    assert server.connections - connections <= MOST_CONNECTIONS
    assert str(error).startswith(f"{url}/manifest.json could not be read")
    assert why in error.why
    assert fix in str(error.fix)


S3_TOLD_AT_ONCE = [
    ("https://127.0.0.1:{good}", "", "nobody whom this machine trusts", "AWS_CA"),
    ("https://127.0.0.1:{expired}", "expired", "has expired", "which says 20"),
    (
        "https://127.0.0.1:{of another host}",
        "of another host",
        "of another host",
        "name the host",
    ),
    ("https://127.0.0.1:{plain}", "", "speaks no TLS", "http://"),
    ("http://127.0.0.1:{plain}/loop", "", "in a circle", "URL"),
    ("http://127.0.0.1:{plain}/403", "", "does not let you in", "log in"),
    ("127.0.0.1:{plain}", "", "no request can be made", "storage_options"),
    ("http://127.0.0.1:a{plain}", "", "no request can be made", "storage_options"),
]


@pytest.mark.needs("s3")
@pytest.mark.slow
@pytest.mark.parametrize(("endpoint", "trusted", "why", "fix"), S3_TOLD_AT_ONCE)
def test_what_no_waiting_mends_is_told_at_once_of_s3(
    servers, certificates, caplog, endpoint, trusted, why, fix
):
    [name] = re.findall(r"\{(.+?)\}", endpoint)
    server = servers[name]
    endpoint = endpoint.replace(f"{{{name}}}", str(server.server_port))
    client = {"verify": str(certificates[trusted])} if trusted else {}

    options = s3_at(endpoint, **client)
    check_told_at_once(server, caplog, "s3://bucket/c", options, why, fix)


@pytest.mark.needs("s3")
def test_a_certificate_that_is_trusted_lets_files_be_read(servers, certificates):
    url = f"https://127.0.0.1:{servers['good'].server_port}/c"
    assert read(url, trusting(certificates["good"])) == b"file"


@pytest.mark.needs("s3")
def test_what_may_pass_is_tried_again(servers, caplog):
    with socket.create_server(("127.0.0.1", 0)) as free:
        refused = free.getsockname()[1]
    plain, good = (servers[name].server_port for name in ("plain", "good"))
    # A server that is not ready, none at all, and one that hangs up: it wants TLS.
    for url in (
        f"http://127.0.0.1:{plain}/503",
        f"http://127.0.0.1:{refused}/c",
        f"http://127.0.0.1:{good}/c",
    ):
        caplog.clear()
        with pytest.raises(NoAnswerError, match="5 times in a row"):
            read(url)
        assert caplog.text.count("trying again") == QUICK.tries - 1


UNKNOWN = [
    ("http://nowhere.invalid/c", None),
    ("https://nowhere.invalid/c", None),
    ("ftp://nowhere.invalid/c", None),
    ("s3://bucket/c", s3_at("http://nowhere.invalid")),
]


def name_server_says_no():
    """Tell whether there is one: without a network nobody knows any name."""
    try:
        socket.getaddrinfo("nowhere.invalid", 80)
    except socket.gaierror as error:
        return error.errno == socket.EAI_NONAME
    return False


@pytest.mark.many_cases(quick=3)
@pytest.mark.needs("s3")
@pytest.mark.parametrize(("url", "options"), UNKNOWN)
def test_a_host_that_no_name_server_knows_is_told_after_three_tries(
    caplog, url, options
):
    if not name_server_says_no():
        pytest.skip("no name server answers here")
    with caplog.at_level(logging.WARNING), pytest.raises(NoAnswerError) as caught:
        read(url, options)

    assert caplog.text.count("trying again") == 2
    assert "no host of that name" in caught.value.why
    assert str(caught.value).startswith(url)
    assert "correct the host" in str(caught.value.fix)


NO_URLS = [
    *("s3://", "s3:///c", "gs:///c", "http:///c", "http://:80/c", "https://a b/c"),
    *("http://[::1/c", "http://host:99999/c", "http://host:port/c", "http://a..b/c"),
    *("ftp://host:port/c", f"http://{'a' * 64}.org/c", "simplecache::http:///c"),
]


@pytest.mark.parametrize("url", NO_URLS)
def test_a_url_that_names_no_place_is_refused_before_a_request(url):
    with pytest.raises(OptionError) as caught:
        ObjectStore(url)
    assert url in str(caught.value)
    assert "://" in str(caught.value.fix)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_server_that_never_answers_is_given_up_as_the_file_system_is_opened():
    server = Speaker(b"")
    url = f"ftp://127.0.0.1:{server.server_port}/c"
    start_s = time.monotonic()
    with pytest.raises(NoAnswerError) as caught:
        # ftplib itself waits for 1,000 s.
        ObjectStore(url, {"timeout": 1_000}, Patience(0.3, (0.01,) * 4))

    assert time.monotonic() - start_s < TOLD_WITHIN_S
    assert server.connections == Patience().silent_tries
    assert str(caught.value).startswith(f"{url} could not be opened")
    assert "gave no answer 3 times" in caught.value.why
    assert "host" in str(caught.value.fix)

    # Whom the server leaves has ended here, with the sockets that ftplib leaves open.
    server.shutdown()
    server.server_close()
    for thread in threading.enumerate():
        if thread.name == "loaderkit-storage":
            thread.join()
    gc.collect()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("The provided token has expired.", "expired"),
        ("Access Denied", "may read there, and not write"),
    ],
)
def test_a_token_that_expired_before_the_first_file_may_have_been_allowed_to_write(
    answer, why
):
    import fsspec

    class Refusing(fsspec.get_filesystem_class("memory")):
        protocol = "refusing"

        def pipe_file(self, *_, **__):
            raise PermissionError(answer)

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    store = ObjectStore("refusing://bucket/x", patience=QUICK)
    assert store.sizes() == {}

    with pytest.raises(CacheError) as raised:
        store.commit("manifest.json", b"{}", replace=True)

    assert why in raised.value.why
