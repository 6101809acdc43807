"""Stores for tests: a server of files over HTTP, what breaks on the way, and S3."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


class FileServer:
    """Serves a folder over HTTP, with ranges, and breaks as it is told."""

    def __init__(self, folder: Path, *, faults: Faults) -> None:
        handler = type("Handler", (_Handler,), {"folder": folder, "faults": faults})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        ).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    folder: Path
    faults: Faults
    protocol_version = "HTTP/1.1"

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

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class BreakingProxy:
    """Passes TCP on to a server; connections can be refused, stalled or broken."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.is_gone = False
        """Connections are closed as soon as they are made."""
        self.is_silent = False
        """Nothing comes back."""
        self.bytes_until_break: int | None = None
        """The connection breaks after so many bytes of answers; once."""
        self.connections_until_healed: int | None = None
        """So many more are made before all is well again."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept_connections, daemon=True).start()

    def stop(self) -> None:
        for end in (self._listener, *self._ends):
            end.close()

    def _accept_connections(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._heal_after_a_while()
            if self.is_gone:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self._ends += [client, server]
            for source, sink in ((client, server), (server, client)):
                answers = source is server
                threading.Thread(
                    target=self._pass_on, args=(source, sink, answers), daemon=True
                ).start()

    def _heal_after_a_while(self) -> None:
        if self.connections_until_healed is None:
            return
        self.connections_until_healed -= 1
        if self.connections_until_healed <= 0:
            self.is_gone = self.is_silent = False

    def _pass_on(
        self, source: socket.socket, sink: socket.socket, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while answers and self.is_silent:
                    time.sleep(0.02)
                if self.is_gone:
                    break
                if answers and self.bytes_until_break is not None:
                    self.bytes_until_break -= len(data)
                    if self.bytes_until_break < 0:
                        self.bytes_until_break = None
                        break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class ExpiringProxy:
    """Passes requests on to an S3 server, but for credentials that have expired."""

    def __init__(self, url: str) -> None:
        self.expired: set[str] = set()
        """Names of access keys."""
        self.refusals = 0
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                content = self.read_content()
                key = re.search(r"Credential=([^/]+)/", self.headers["Authorization"])
                if key and key[1] in proxy.expired:
                    proxy.refusals += 1
                    self.answer(403, _EXPIRED, {"Content-Type": "application/xml"})
                    return
                headers = dict(self.headers)
                # urllib would say that it is a form, of which moto reads no body.
                headers.setdefault("Content-Type", "application/octet-stream")
                headers.pop("Expect", None)
                headers.pop("Transfer-Encoding", None)
                request = urllib.request.Request(
                    url + self.path, content or None, headers, method=self.command
                )
                try:
                    with urllib.request.urlopen(request) as answer:
                        self.answer(answer.status, answer.read(), answer.headers)
                except urllib.error.HTTPError as error:
                    self.answer(error.code, error.read(), error.headers)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

            def read_content(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers["Content-Length"] or 0))
                content = b""
                while length := int(self.rfile.readline(), 16):
                    content += self.rfile.read(length)
                    self.rfile.readline()
                self.rfile.readline()
                return content

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
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        ).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


_EXPIRED = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message>
</Error>"""
"""As S3 words it, which answers 400 or 403."""


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


def copy_files(source: Path, target: Path) -> None:
    """Copy the files of a cache, as an upload by hand would."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file():
            shutil.copy2(file, target / file.name)
