"""A Hugging Face Hub for tests: what huggingface_hub asks of data sets, in memory.

Each repository has one branch.  All files are sent as small ones are; the Hub has large
ones sent to another server, by xet, which is not here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import urllib.parse
from typing import TYPE_CHECKING

from storages import HttpServer, QuietHandler

if TYPE_CHECKING:
    from collections.abc import Callable

TOKEN = "hf_let_me_in"
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
        super().__init__(type("Handler", (_Handler,), {"hub": self}))

    @property
    def options(self) -> dict[str, str]:
        """What fsspec's file system is made with."""
        return {"endpoint": self.url, "token": TOKEN}


class _Handler(QuietHandler):
    hub: Hub

    def _do_get(self) -> None:
        self._answer_one_of(
            {
                r"/api/datasets/([^/]+/[^/]+)(?:/revision/main)?": self._send_info,
                r"/api/datasets/([^/]+/[^/]+)/tree/main/?(.*)": self._send_tree,
                r"/datasets/([^/]+/[^/]+)/resolve/main/(.+)": self._send_file,
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
            _file_entry(name, files[name])
            for name in names
            if "/" not in name[len(start) :]
        ]
        return self._send_json(entries)

    def _send_paths_info(self, files: dict[str, bytes], content: bytes) -> None:
        form = urllib.parse.parse_qs(content.decode())
        names = form.get("paths") or json.loads(content)["paths"]
        self._send_json([_file_entry(n, files[n]) for n in names if n in files])

    def _send_file(self, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            return self._send_error(404, "EntryNotFound", f"no {name}")
        content = files[name]
        wanted = _RANGE.fullmatch(self.headers.get("Range") or "")
        if wanted:
            return self._send(206, content[int(wanted[1]) : int(wanted[2]) + 1])
        return self._send(200, content)

    def _say_how_to_upload(self, _: dict[str, bytes], content: bytes) -> None:
        modes = [
            {
                "path": file["path"],
                "uploadMode": "regular",
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
            elif kind == "deletedFile":
                del files[value["path"]]
            if kind != "header":
                names.append(value["path"])
        self.hub.commits.append(names)
        sha = f"{len(self.hub.commits):040x}"
        user, name = self.path.split("/")[3:5]
        url = f"{self.hub.url}/datasets/{user}/{name}/commit/{sha}"
        return self._send_json({"commitUrl": url, "commitOid": sha, "success": True})

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


def _file_entry(name: str, content: bytes) -> dict[str, object]:
    digest = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    return {"type": "file", "path": name, "oid": digest, "size": len(content)}
