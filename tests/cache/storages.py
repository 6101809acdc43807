"""Stores for tests: a server of files over HTTP, what breaks on the way, and S3."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import importlib.util
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess
    from pathlib import Path

HAS_S3 = all(importlib.util.find_spec(name) for name in ("s3fs", "moto", "flask"))
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class Faults:
    """What goes wrong with requests for shards, from now on."""

    cut: int = 0
    """So many answers end in the middle of their body."""
    wrong: int = 0
    """So many have one wrong byte, and the right length."""
    statuses: list[int] = field(default_factory=list)
    """The next are errors of these statuses."""
    stall_s: float = 0.0
    """The next is silent for so long."""
    forbidden: bool = False
    """All are 403."""
    refused: int = 0
    """So many were."""
    served: list[str] = field(default_factory=list)
    """Names of the files that were sent, whole or in part."""


class HttpServer:
    """Answers HTTP requests on threads of this process, until it is stopped."""

    def __init__(self, handler: type[QuietHandler]) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        ).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """Keeps connections open between requests, and writes no log."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def read_content(self) -> bytes:
        """Read what a request brings, whole or in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while length := int(self.rfile.readline(), 16):
            content += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return content


class FileServer(HttpServer):
    """Serves a folder over HTTP, with ranges, and breaks as it is told."""

    def __init__(self, folder: Path, *, faults: Faults) -> None:
        handler = type("Handler", (_Handler,), {"folder": folder, "faults": faults})
        super().__init__(handler)


class _Handler(QuietHandler):
    folder: Path
    faults: Faults

    def do_HEAD(self) -> None:
        self._send_file(with_body=False)

    def do_GET(self) -> None:
        self._send_file(with_body=True)

    def _send_file(self, *, with_body: bool) -> None:
        faults, name = self.faults, self.path.rsplit("/", 1)[-1]
        file = self.folder / name
        is_shard = name.endswith(".h5") and with_body
        if faults.forbidden:
            faults.refused += 1
            return self.send_error(403)
        if not file.is_file():
            return self.send_error(404)
        content = file.read_bytes()
        start, stop, status = 0, len(content), 200
        wanted = _RANGE.fullmatch(self.headers.get("Range") or "")
        if wanted:
            start = int(wanted[1])
            stop = min(stop, int(wanted[2]) + 1) if wanted[2] else stop
            status = 206
        body = content[start:stop]
        if is_shard and faults.statuses:
            return self.send_error(faults.statuses.pop(0))
        if is_shard and faults.stall_s:
            pause, faults.stall_s = faults.stall_s, 0.0
            time.sleep(pause)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header(
                "Content-Range", f"bytes {start}-{stop - 1}/{len(content)}"
            )
        self.end_headers()
        if not with_body:
            return None
        faults.served.append(name)
        if is_shard and faults.wrong:
            faults.wrong -= 1
            body = bytes([body[0] ^ 1]) + body[1:]
        if is_shard and faults.cut:
            faults.cut -= 1
            body = body[: len(body) // 2]
            self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.write(body)
        return None


@dataclass
class Break:
    """What is wrong with connections through a proxy, from now on."""

    kind: str
    """``closed``: as soon as it is made; ``cut``: in the middle of an answer;
    ``silent``: nothing more comes; ``trickle``: a byte now and then; ``wrong``: one bit
    of the answer is another; ``status``: 503, whatever is asked."""
    after_bytes: int = 0
    """So many bytes of the answers on a connection are right."""
    connections: int | None = None
    """So many connections have it; None for all."""


def connections_to(listener: socket.socket) -> Iterator[socket.socket]:
    """Give connections as they are made, until the listener is shut down."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        yield connection


class BreakingProxy:
    """Passes TCP on to a server, and breaks connections as it is told."""

    trickle_s = 0.05
    """From one byte to the next: twenty a second are as hopeless as one, for what is
    asked for here."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._break: Break | None = None
        self.connections = 0
        """So many were made."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._is_stopped = threading.Event()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept_connections, daemon=True).start()

    def break_connections(self, broken: Break | None) -> None:
        """Close the connections there are, and break those that come."""
        self._break = broken
        for end in self._ends:
            _shut_down(end)

    def stop(self) -> None:
        self._is_stopped.set()
        _shut_down(self._listener)
        for end in (self._listener, *self._ends):
            end.close()

    def _accept_connections(self) -> None:
        for client in connections_to(self._listener):
            self.connections += 1
            broken = self._break_of_next_connection()
            if broken is not None and broken.kind == "closed":
                client.close()
                continue
            if broken is not None and broken.kind == "status":
                self._ends.append(client)
                self._start(self._refuse_requests, client)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self._ends += [client, server]
            self._start(self._pass_on, client, server, None)
            self._start(self._pass_on, server, client, broken)

    def _start(self, function: Callable[..., None], *args: object) -> None:
        threading.Thread(target=function, args=args, daemon=True).start()

    def _break_of_next_connection(self) -> Break | None:
        broken = self._break
        if broken is None or broken.connections is None:
            return broken
        broken.connections -= 1
        if broken.connections < 0:
            self._break = None
        return self._break

    def _refuse_requests(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while client.recv(1 << 16):
                client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n")

    def _pass_on(
        self, source: socket.socket, sink: socket.socket, broken: Break | None
    ) -> None:
        """Pass on what one end says, right for some bytes and then broken."""
        right_bytes = None if broken is None else broken.after_bytes
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if broken is None or right_bytes is None or len(data) <= right_bytes:
                    sink.sendall(data)
                    right_bytes = right_bytes and right_bytes - len(data)
                    continue
                sink.sendall(data[:right_bytes])
                broken_data, right_bytes = data[right_bytes:], 0
                if not self._pass_on_broken(broken_data, sink, broken.kind):
                    break
                if broken.kind == "wrong":
                    broken = None
        for end in (source, sink):
            _shut_down(end)

    def _pass_on_broken(self, data: bytes, sink: socket.socket, kind: str) -> bool:
        """Pass on what comes after the right bytes; False to end the connection."""
        if kind == "cut":
            return False
        if kind == "silent":
            self._is_stopped.wait()
            return False
        if kind == "wrong":
            sink.sendall(bytes([data[0] ^ 1]) + data[1:])
            return True
        for position in range(len(data)):
            if self._is_stopped.wait(self.trickle_s):
                return False
            sink.sendall(data[position : position + 1])
        return True


def _shut_down(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


class Refusal(NamedTuple):
    """What a store answers to credentials that have expired."""

    status: int
    body: bytes
    headers: dict[str, str]


class PassingProxy(HttpServer):
    """Passes requests on to a store.

    Args:
        url: Of the store.
    """

    def __init__(self, url: str) -> None:
        proxy = self

        class Handler(QuietHandler):
            def pass_on(self) -> None:
                content = self.read_content()
                refusal = proxy.refusal_of(self.headers)
                if refusal is not None:
                    self.answer(refusal.status, refusal.body, refusal.headers)
                    return
                headers = dict(self.headers)
                headers.pop("Expect", None)
                headers.pop("Transfer-Encoding", None)
                headers["Content-Length"] = str(len(content))
                # As they came: headers are signed, that of the host too.
                host = url.removeprefix("http://")
                # Closed also where the store, or who has asked, is gone by then.
                with contextlib.closing(http.client.HTTPConnection(host)) as server:
                    server.request(self.command, self.path, content, headers)
                    answer = server.getresponse()
                    body = proxy.change_answer(self.path, answer.read())
                    proxy.note_answer()
                    self.answer(answer.status, body, answer.headers)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

            def answer(self, status: int, body: bytes, headers) -> None:
                self.send_response(status)
                hop_by_hop = {"content-length", "connection", "transfer-encoding"}
                for name, value in headers.items():
                    if name.lower() not in hop_by_hop:
                        self.send_header(name, value)
                length = len(body)
                if self.command == "HEAD":
                    length = headers.get("Content-Length", 0)
                    body = b""
                self.send_header("Content-Length", str(length))
                self.end_headers()
                what_comes = proxy.cut_answer(body)
                # Who has asked may be gone.
                with contextlib.suppress(OSError):
                    self.wfile.write(what_comes)
                if len(what_comes) < len(body):
                    self.close_connection = True

        super().__init__(Handler)

    def refusal_of(self, _headers) -> Refusal | None:
        """What is answered in place of the store; None passes the request on."""
        return None

    def note_answer(self) -> None:
        """Called when the store has answered."""

    def change_answer(self, _path: str, body: bytes) -> bytes:
        """Give what is answered, in place of what the store has said."""
        return body

    def cut_answer(self, body: bytes) -> bytes:
        """Give what comes of an answer; the connection ends where that is not all."""
        return body


class CuttingProxy(PassingProxy):
    """Cuts lists of S3 after some files, as if there were no more.

    Args:
        url: Of the store.
    """

    def __init__(self, url: str) -> None:
        self.most_files: int | None = None
        """None passes lists on whole."""
        self.says_more = False
        """The list says that it goes on, and not where."""
        self.cut_lists = 0
        super().__init__(url)

    def change_answer(self, path: str, body: bytes) -> bytes:
        """Drop what comes behind the first files of a list."""
        if self.most_files is None or "list-type=2" not in path:
            return body
        files = re.findall(rb"<Contents>.*?</Contents>", body, re.DOTALL)
        for dropped in files[self.most_files :]:
            body = body.replace(dropped, b"", 1)
            self.cut_lists += 1
        body = re.sub(rb"<NextContinuationToken>.*</NextContinuationToken>", b"", body)
        more = b"true" if self.says_more else b"false"
        return re.sub(rb"<IsTruncated>\w+<", b"<IsTruncated>" + more + b"<", body)


class ExpiringProxy(PassingProxy):
    """Refuses credentials that have expired.

    Args:
        url: Of the store.
        refusal: What it says of such credentials; by default what S3 says.
    """

    def __init__(self, url: str, refusal: Refusal | None = None) -> None:
        self._refusal = refusal or _REFUSAL_OF_S3
        self.expired: set[str] = set()
        """Names of S3's access keys."""
        self.all_expired = False
        self.refusals = 0
        super().__init__(url)

    def refusal_of(self, headers) -> Refusal | None:
        """Refuse those that have expired."""
        key = re.search(r"Credential=([^/]+)/", headers.get("Authorization") or "")
        is_expired = key is not None and key[1] in self.expired
        if not (self.all_expired or is_expired):
            return None
        self.refusals += 1
        return self._refusal


class KillingProxy(PassingProxy):
    """Kills who asks, right before one of its requests, or when it is answered."""

    def __init__(self, url: str) -> None:
        self._lock = threading.Lock()
        self._victim: BaseProcess | None = None
        self._at_request = self._at_answer = 0
        self.requests = self.answers = 0
        super().__init__(url)

    def aim_at(self, victim: BaseProcess, *, request: int = 0, answer: int = 0) -> None:
        """Count from now on, and kill at a request or an answer; 0 for none."""
        with self._lock:
            self._victim, self._at_request, self._at_answer = victim, request, answer
            self.requests = self.answers = 0

    def refusal_of(self, _headers) -> Refusal | None:
        """Kill who asks before the store is asked."""
        with self._lock:
            self.requests += 1
            is_last = self.requests == self._at_request
            if is_last:
                self._victim.kill()
        return Refusal(503, b"", {}) if is_last else None

    def note_answer(self) -> None:
        """Kill who asks when the store has done it."""
        with self._lock:
            self.answers += 1
            if self.answers == self._at_answer:
                self._victim.kill()


_REFUSAL_OF_S3 = Refusal(
    403,
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>ExpiredToken</Code>'
    b"<Message>The provided token has expired.</Message></Error>",
    {"Content-Type": "application/xml"},
)
"""S3 answers 400 or 403."""


@contextlib.contextmanager
def s3_server():
    """Run moto's S3 server in a process of its own; give its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, process)
        yield url
    finally:
        process.kill()
        process.wait()


def _wait_for(url: str, process: subprocess.Popen) -> None:
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
        else:
            return
    msg = "moto's server has ended"
    raise RuntimeError(msg)


def s3_options(url: str) -> dict:
    """Give storage_options for moto's server."""
    return {"key": "testing", "secret": "testing", "endpoint_url": url}


_POLICY_OF_READERS = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Action": ["s3:GetObject", "s3:ListBucket"],
            "Resource": "*",
        }
    ],
}


@contextlib.contextmanager
def keys_that_may_only_read(url: str) -> Iterator[dict]:
    """Make keys at moto's server that may read, and have it check all keys meanwhile.

    Args:
        url: Of the server.

    Yields:
        Their storage_options.
    """
    import boto3

    options = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
    iam = boto3.client("iam", "us-east-1", endpoint_url=url, **options)
    iam.create_user(UserName="reader")
    policy = json.dumps(_POLICY_OF_READERS)
    iam.put_user_policy(UserName="reader", PolicyName="p", PolicyDocument=policy)
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    _check_keys_from_now_on(url, after_requests="0")
    try:
        yield {
            "key": key["AccessKeyId"],
            "secret": key["SecretAccessKey"],
            "endpoint_url": url,
        }
    finally:
        _check_keys_from_now_on(url, after_requests="inf")


def _check_keys_from_now_on(url: str, *, after_requests: str) -> None:
    request = urllib.request.Request(
        f"{url}/moto-api/reset-auth",
        after_requests.encode(),
        {"Content-Type": "text/plain"},
    )
    urllib.request.urlopen(request, timeout=60).close()


def copy_files(source: Path, target: Path) -> None:
    """Copy the files of a cache, as an upload by hand would."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file():
            shutil.copy2(file, target / file.name)
