"""A Hugging Face Hub for tests: what huggingface_hub asks of data sets, in memory.

Each repository has one branch.  Large files are kept by xet: whoever reads one is sent
to another server by a signed URL, and whoever writes one is sent to a store of chunks,
which here is hf_xet's own, in a folder.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse
import uuid
from typing import TYPE_CHECKING

from storages import HttpServer, QuietHandler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

TOKEN = "hf_let_me_in"
_READ_FROM_XET = """
import sys
from pathlib import Path
import hf_xet

folder, *paths = sys.argv[1:]
wanted = [
    hf_xet.PyXetDownloadInfo(str(Path(path).with_suffix(".of-xet")), hashed.hash, size)
    for path in paths
    for size in [Path(path).stat().st_size]
    for hashed in hf_xet.hash_files([path])
]
hf_xet.download_files(wanted, f"local://{folder}", None, None, None)
"""
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Hub(HttpServer):
    """A Hub whose files are private to whoever has ``TOKEN``."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        """Files by name, of each "user/name"."""
        self.commits: list[list[str]] = []
        """Names of the files that each commit has changed."""
        self.expired = False
        """``TOKEN`` is of no use any more."""
        self.statuses: list[int] = []
        """The next answers are errors of these statuses."""
        self.lock = threading.Lock()
        self.large_bytes = 1 << 60
        """Files of so many bytes and more are kept by xet."""
        self.xet_folder = ""
        """Of the store of chunks."""
        self.tokens_for_xet: list[str] = []
        """Kinds of the tokens that were asked for: "read" or "write"."""
        self.sha256_of_large: dict[str, str] = {}
        """What commits say of files that are kept by xet, by name."""
        self.contents = ContentServer(self)
        super().__init__(type("Handler", (_Handler,), {"hub": self}))

    def stop(self) -> None:
        self.contents.stop()
        super().stop()

    def take_from_xet(self, repository: str, sources: Mapping[str, Path]) -> None:
        """Read large files out of the store of chunks.

        By a process that ends: hf_xet has threads, which forked processes lack.

        Args:
            repository: Where they are to be sent from.
            sources: The files that were sent, by their names there.  Xet's hash, by
                which a file is found, follows from what is in it.
        """
        paths = [os.fspath(source) for source in sources.values()]
        arguments = [sys.executable, "-c", _READ_FROM_XET, self.xet_folder, *paths]
        subprocess.run(arguments, check=True)
        for name, source in sources.items():
            content = source.with_suffix(".of-xet").read_bytes()
            assert hashlib.sha256(content).hexdigest() == self.sha256_of_large[name]
            self.repositories[repository][name] = content

    @property
    def options(self) -> dict[str, str]:
        """What fsspec's file system is made with."""
        return {"endpoint": self.url, "token": TOKEN}


class ContentServer(HttpServer):
    """Sends large files to whoever has a signed URL, and no other credentials."""

    def __init__(self, hub: Hub) -> None:
        self.ranges: list[range] = []
        """Bytes that were sent, in the order of the requests."""
        self.expired = 0
        """So many of the next URLs are of no use any more."""
        self._files: dict[str, bytes] = {}
        server = self

        class Handler(QuietHandler):
            def send_content(self) -> None:
                with hub.lock:
                    content = server._files.pop(self.path.partition("/")[2], None)
                # As S3 does of two ways to sign at once.
                status = 400 if "Authorization" in self.headers else 403
                wanted = _RANGE.fullmatch(self.headers.get("Range") or "")
                if content is None or wanted is None or status == 400:
                    self.send_response(status)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                stop = min(len(content), int(wanted[2]) + 1)
                sent = range(int(wanted[1]), stop)
                with hub.lock:
                    server.ranges.append(sent)
                self.send_response(206)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(content[sent.start : sent.stop])

            do_GET = send_content  # noqa: N815

        super().__init__(Handler)

    def sign(self, content: bytes) -> str:
        """Give a URL for one request."""
        name = uuid.uuid4().hex
        if self.expired:
            self.expired -= 1
        else:
            self._files[name] = content
        return f"{self.url}/{name}"


class _Handler(QuietHandler):
    hub: Hub

    def _do_get(self) -> None:
        self._answer_one_of(
            {
                r"/api/datasets/([^/]+/[^/]+)(?:/revision/main)?": self._send_info,
                r"/api/datasets/([^/]+/[^/]+)/tree/main/?(.*)": self._send_tree,
                r"/datasets/([^/]+/[^/]+)/resolve/main/(.+)": self._send_file,
                r"/api/datasets/([^/]+/[^/]+)/xet-(\w+)-token/main": self._send_token,
            }
        )

    def _do_post(self) -> None:
        self._answer_one_of(
            {
                r"/api/datasets/([^/]+/[^/]+)/preupload/main": self._say_how_to_upload,
                r"/api/datasets/([^/]+/[^/]+)/commit/main": self._commit,
                r"/api/datasets/([^/]+/[^/]+)/paths-info/main": self._send_paths_info,
            }
        )

    def _answer_one_of(self, answers: dict[str, Callable[..., None]]) -> None:
        content = self.read_content()
        path = urllib.parse.unquote(self.path.partition("?")[0])
        if self.hub.statuses:
            return self._send(self.hub.statuses.pop(0), b"{}")
        if "Authorization" not in self.headers:
            return self._send_error(401, "RepoNotFound", "Repository not found")
        if self.headers["Authorization"] != f"Bearer {TOKEN}" or self.hub.expired:
            message = "Invalid credentials in Authorization header"
            return self._send(401, b"{}", {"X-Error-Message": message})
        for pattern, answer in answers.items():
            match = re.fullmatch(pattern, path)
            if match is None:
                continue
            if match[1] not in self.hub.repositories:
                return self._send_error(404, "RepoNotFound", "Repository not found")
            with self.hub.lock:
                files = self.hub.repositories[match[1]]
                extra = (content,) if self.command == "POST" else match.groups()[1:]
                return answer(files, *extra)
        return self._send_error(404, "EntryNotFound", f"no {path}")

    def _send_info(self, files: dict[str, bytes]) -> None:
        repository = re.fullmatch(r"/api/datasets/([^/]+/[^/?]+).*", self.path)
        info = {
            "_id": "0",
            "id": repository and repository[1],
            "sha": f"{len(self.hub.commits):040x}",
            "siblings": [{"rfilename": name} for name in files],
        }
        self._send_json(info)

    def _send_tree(self, files: dict[str, bytes], folder: str) -> None:
        start = f"{folder}/" if folder else ""
        names = [name for name in files if name.startswith(start)]
        if folder and not names:
            return self._send_error(404, "EntryNotFound", f"no folder {folder}")
        folders = {
            start + name[len(start) :].split("/")[0]
            for name in names
            if "/" in name[len(start) :]
        }
        entries = [
            {"type": "directory", "path": name, "oid": "0", "size": 0}
            for name in sorted(folders)
        ]
        entries += [
            self._file_entry(name, files[name])
            for name in names
            if "/" not in name[len(start) :]
        ]
        return self._send_json(entries)

    def _send_paths_info(self, files: dict[str, bytes], content: bytes) -> None:
        form = urllib.parse.parse_qs(content.decode())
        names = form.get("paths") or json.loads(content)["paths"]
        self._send_json([self._file_entry(n, files[n]) for n in names if n in files])

    def _send_file(self, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            return self._send_error(404, "EntryNotFound", f"no {name}")
        content = files[name]
        if len(content) >= self.hub.large_bytes:
            headers = {
                "Location": self.hub.contents.sign(content),
                "X-Linked-Size": str(len(content)),
                "X-Xet-Hash": _xet_hash(content),
            }
            return self._send(302, b"", headers)
        wanted = _RANGE.fullmatch(self.headers.get("Range") or "")
        if wanted:
            return self._send(206, content[int(wanted[1]) : int(wanted[2]) + 1])
        return self._send(200, content)

    def _say_how_to_upload(self, _: dict[str, bytes], content: bytes) -> None:
        modes = [
            {
                "path": file["path"],
                "uploadMode": (
                    "lfs" if file["size"] >= self.hub.large_bytes else "regular"
                ),
                "shouldIgnore": False,
            }
            for file in json.loads(content)["files"]
        ]
        self._send_json({"files": modes})

    def _commit(self, files: dict[str, bytes], content: bytes) -> None:
        names = []
        for line in content.splitlines():
            operation = json.loads(line)
            kind, value = operation["key"], operation["value"]
            if kind == "deletedFile" and value["path"] not in files:
                message = "A file with this name doesn't exist"
                return self._send_error(404, "EntryNotFound", message)
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                # Its bytes are in the store of chunks: see take_from_xet.
                files[value["path"]] = bytes(value["size"])
                self.hub.sha256_of_large[value["path"]] = value["oid"]
            elif kind == "deletedFile":
                del files[value["path"]]
            if kind != "header":
                names.append(value["path"])
        self.hub.commits.append(names)
        sha = f"{len(self.hub.commits):040x}"
        user, name = self.path.split("/")[3:5]
        url = f"{self.hub.url}/datasets/{user}/{name}/commit/{sha}"
        return self._send_json({"commitUrl": url, "commitOid": sha, "success": True})

    def _send_token(self, _: dict[str, bytes], kind: str) -> None:
        self.hub.tokens_for_xet.append(kind)
        self._send_json(
            {
                "casUrl": f"local://{self.hub.xet_folder}",
                "accessToken": "of xet",
                "exp": 1 << 40,
            }
        )

    do_GET = do_HEAD = _do_get  # noqa: N815
    do_POST = _do_post  # noqa: N815

    def _send_json(self, value: object) -> None:
        self._send(
            200, json.dumps(value).encode(), {"Content-Type": "application/json"}
        )

    def _send_error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _file_entry(self, name: str, content: bytes) -> dict[str, object]:
        digest = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        entry = {"type": "file", "path": name, "oid": digest, "size": len(content)}
        if len(content) < self.hub.large_bytes:
            return entry
        sha256 = hashlib.sha256(content).hexdigest()
        lfs = {"oid": sha256, "size": len(content), "pointerSize": 134}
        return {**entry, "lfs": lfs, "xetHash": _xet_hash(content)}


def _xet_hash(content: bytes) -> str:
    """Give what stands for xet's hash: nobody here has the file by it."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()
