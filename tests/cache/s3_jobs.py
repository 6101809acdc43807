"""Jobs on caches in S3 that are killed, or that something fails in, at any moment.

A job runs in a process of its own, and talks to the store through a proxy which does
harm at one request.  Then a reader looks, and the job is done again.
"""

from __future__ import annotations

import contextlib
import enum
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from storages import PassingProxy, Refusal, s3_options

sys.path.insert(0, str(Path(__file__).parents[1] / "datasets"))
from cache_jobs import (
    COUNT,
    SHARD_BYTES,
    Job,
    PackToStore,
    Pull,
    Push,
    ReadMirrored,
    samples,
)
from failing_calls import files_of

FORK = multiprocessing.get_context("fork")
BUCKET = "jobs"
_IS_THERE = "There is a cache at"
_PARTED = {"count": 3, "times": 110}
"""Samples of 9 MB, whose shards are sent in parts."""
_PARTED_BYTES = 18 << 20
_STOPPED_S = 120.0
"""A job that takes longer hangs."""


class Harm(enum.Enum):
    """What happens at a request."""

    NONE = "nothing"
    KILL_BEFORE = "who asks is killed before the store hears of it"
    KILL_AFTER = "who asks is killed when the store has done it"
    LOST = "the store has done it, and the answer is lost"
    CLOSED = "the connection is closed before the store hears of it"
    STATUS = "503"
    CUT = "half of the answer comes"
    WRONG = "one bit of the answer is another"


@dataclass(frozen=True)
class Setting:
    """A job, and what is there when it begins; local files are in the folder "@"."""

    job: Job
    stored: str = ""
    """Which cache stands at the URL: "one", "two" or "parted"; "" for none."""
    left: str = ""
    """Which one stands there afterwards."""


_URL = "s3://@"

SETTINGS = {
    "pull": Setting(Pull("@/pulled", _URL), "one", "one"),
    "pull in parts": Setting(Pull("@/pulled", _URL), "parted", "parted"),
    "push": Setting(Push(_URL, "@/one"), "", "one"),
    "push in parts": Setting(Push(_URL, "@/parted"), "", "parted"),
    "push over another": Setting(Push(_URL, "@/two", True), "one", "two"),
    "push what was extended": Setting(Push(_URL, "@/both", True), "one", "both"),
    "push what was joined": Setting(Push(_URL, "@/joined"), "", "joined"),
    "pack": Setting(PackToStore(_URL, "@/mirror", 2), "", "two"),
    "pack over another": Setting(
        PackToStore(_URL, "@/mirror", 2, overwrite=True), "one", "two"
    ),
    "pack in parts": Setting(
        PackToStore(_URL, "@/mirror", shard_bytes=_PARTED_BYTES, **_PARTED),
        "",
        "parted",
    ),
    "read": Setting(ReadMirrored("@/mirror", _URL), "one", "one"),
    "read with little room": Setting(
        ReadMirrored("@/mirror", _URL, mirror_bytes=800_000), "one", "one"
    ),
    "read in parts": Setting(
        ReadMirrored("@/mirror", _URL, **_PARTED), "parted", "parted"
    ),
}


class HarmfulProxy(PassingProxy):
    """Does harm at one request of a job, or at that and all that follow."""

    def __init__(self, url: str) -> None:
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._harm, self._number, self._is_lasting = Harm.NONE, 0, False
        self.victim = None
        self.requests = self.hits = 0
        super().__init__(url)
        # What is raised below ends a connection, and is no news.
        self._server.handle_error = lambda *_: None

    def begin(self, harm: Harm = Harm.NONE, number: int = 0, *, lasting=False) -> None:
        """Count from now on, and do harm at a request."""
        with self._lock:
            self._harm, self._number, self._is_lasting = harm, number, lasting
            self.victim = None
            self.requests = self.hits = 0

    def refusal_of(self, _headers) -> Refusal | None:
        """Do harm before the store is asked."""
        with self._lock:
            self.requests += 1
            is_later = self._is_lasting and self.requests > self._number
            is_hit = self.requests == self._number or is_later
            self.hits += is_hit
        self._thread.harm = harm = self._harm if is_hit else Harm.NONE
        if harm is Harm.KILL_BEFORE:
            os.kill(self.victim.pid, signal.SIGKILL)
        if harm in {Harm.KILL_BEFORE, Harm.CLOSED}:
            raise ConnectionAbortedError
        return Refusal(503, b"", {}) if harm is Harm.STATUS else None

    def note_answer(self) -> None:
        """Do harm when the store has done what was asked."""
        if self._thread.harm is Harm.KILL_AFTER:
            os.kill(self.victim.pid, signal.SIGKILL)
        if self._thread.harm in {Harm.KILL_AFTER, Harm.LOST}:
            raise ConnectionAbortedError

    def change_answer(self, _path: str, body: bytes) -> bytes:
        """Spoil the answer."""
        if self._thread.harm is Harm.WRONG and body:
            return body[:-1] + bytes([body[-1] ^ 1])
        return body

    def cut_answer(self, body: bytes) -> bytes:
        """Say what comes of an answer."""
        return body[: len(body) // 2] if self._thread.harm is Harm.CUT else body


class Ending(NamedTuple):
    """How a job ended."""

    status: str
    """"ok", "killed", "hangs", or the name of an exception."""
    text: str


class Jobs:
    """Does jobs on a store, and looks at what they leave.

    Args:
        server: URL of an S3 server.
        folder: An empty one on local disk.
    """

    def __init__(self, server: str, folder: Path) -> None:
        import s3fs

        from loaderkit import concat, extend, pack

        self._folder = folder
        self._direct = s3_options(server)
        self.bucket = s3fs.S3FileSystem(**self._direct, skip_instance_cache=True)
        if not self.bucket.exists(BUCKET):
            self.bucket.mkdir(BUCKET)
        self.proxy = HarmfulProxy(server)
        self._case = 0
        self.requests = 0
        """Of the last job, as it was done first."""
        caches = folder / "caches"
        small = {"workers": 0, "shard_bytes": SHARD_BYTES}
        parted = {"workers": 0, "shard_bytes": _PARTED_BYTES}
        one, two = samples(COUNT, 1), samples(COUNT, 2)
        nine = samples(_PARTED["count"], 1, _PARTED["times"])
        pack(one, caches / "one", **small)
        pack(two, caches / "two", **small)
        pack(one, caches / "both", **small)
        extend(caches / "both", two, workers=0, shard_bytes=SHARD_BYTES)
        pack(nine, caches / "parted", **parted)
        concat([caches / "two", caches / "one"], caches / "joined")
        self._caches = caches
        self.rows = {
            "one": one,
            "two": two,
            "both": one + two,
            "joined": two + one,
            "parted": nine,
        }

    def close(self) -> None:
        """End the proxy."""
        self.proxy.stop()

    def count_requests(self, setting: Setting) -> int:
        """Say how many requests a job makes that nothing happens to."""
        self.broken_laws(setting, Harm.NONE, 0)
        return self.requests

    def broken_laws(
        self, setting: Setting, harm: Harm, number: int, *, lasting=False, plant=None
    ):
        """Do a job while something is harmed, do it again, and look each time.

        Args:
            setting: The job.
            harm: What happens.
            number: At which of its requests.
            lasting: At all that follow, too.
            plant: Called with the URL before.

        Returns:
            How it ended, how often it was harmed, and a sentence for each law that is
            broken.
        """
        self._case += 1
        folder = self._folder / f"case-{self._case}"
        # Caches are not written to, but for locks.
        shutil.copytree(self._caches, folder, copy_function=os.link)
        job = self._job_in(setting, folder)
        if setting.stored:
            self._do(self._stored(setting))
        if plant is not None:
            plant(self._url)
        self.proxy.begin(harm, number, lasting=lasting)
        ending = self._do(job)
        hits, self.requests = self.proxy.hits, self.proxy.requests
        self.proxy.begin()

        broken = list(_wrong_ending(ending, harm, job, lasting=lasting))
        is_done = ending.status == "ok"
        broken += self._what_readers_see(setting, job, folder / "seen", is_done)
        if ending.status != "ok":
            again = self._do(job)
            if again.status != "ok" and _IS_THERE not in again.text:
                broken.append(f"again it ended with {again.status}: {again.text}")
        broken += self._what_readers_see(setting, job, folder / "again", is_done=True)
        broken += self._leftovers(setting, job, folder)
        shutil.rmtree(folder)
        self.bucket.rm(self._url, recursive=True)
        self.bucket.clear_multipart_uploads(BUCKET)
        return ending, hits, broken

    @property
    def _url(self) -> str:
        return f"s3://{BUCKET}/{self._case}"

    def _job_in(self, setting: Setting, folder: Path) -> Job:
        return _in_place(setting.job, folder, self._url, s3_options(self.proxy.url))

    def _stored(self, setting: Setting) -> Job:
        cache = os.fspath(self._caches / setting.stored)
        return Push(self._url, cache, options=self._direct)

    def _do(self, job: Job) -> Ending:
        """Do a job in a process of its own."""
        reader, writer = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_tell_how_it_went, args=(job, writer))
        process.start()
        self.proxy.victim = process
        writer.close()
        process.join(_STOPPED_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            return Ending("hangs", "")
        if process.exitcode == -signal.SIGKILL:
            return Ending("killed", "")
        return Ending(*reader.recv())

    def _what_readers_see(self, setting, job, mirror, is_done):
        """Say what is wrong with what a reader finds, there and in a folder."""
        from loaderkit import verify

        seen = self._seen(
            self._url, {"storage_options": self._direct, "mirror": mirror}
        )
        if seen not in ({setting.left} if is_done else {setting.stored, setting.left}):
            yield f"in the store a reader sees {seen!r}"
        if is_done and seen:
            report = verify(self._url, storage_options=self._direct)
            if not report.ok:
                yield str(report)
        if isinstance(job, Pull):
            seen = self._seen(job.path, {})
            if seen not in ({setting.left} if is_done else {"", setting.left}):
                yield f"in the folder a reader sees {seen!r}"
        if isinstance(job, ReadMirrored):
            for file in Path(job.path).glob("*/*.h5"):
                packed = self._caches / setting.stored / file.name
                if file.read_bytes() != packed.read_bytes():
                    yield f"{file.name} in the mirror has other bytes"

    def _seen(self, path, options) -> str:
        from loaderkit import open_cache
        from loaderkit.errors import CacheError
        from loaderkit.testing import assert_same

        try:
            dataset = open_cache(path, **options)
            rows = [dataset[row] for row in range(len(dataset))]
        except CacheError as error:
            known = "half packed" in str(error) or "There is no cache" in str(error)
            return "" if known else str(error)
        for name, whole in self.rows.items():
            with contextlib.suppress(AssertionError):
                assert_same(rows, whole)
                return name
        return "a mix"

    def _leftovers(self, setting, job, folder):
        """Say which files stay that no undisturbed run leaves."""
        names = {Path(name).name for name in self.bucket.find(self._url)}
        wanted = {file.name for file in (self._caches / setting.left).glob("[!.]*")}
        if names != wanted:
            yield f"other files are in the store: {sorted(names ^ wanted)}"
        uploads = _uploads(self)
        if uploads:
            yield f"parts stay in the store: {uploads}"
        if isinstance(job, Pull):
            left = set(files_of(job.path))
            if left != wanted:
                yield f"other files are in the folder: {sorted(left ^ wanted)}"
        for file in folder.rglob("*.partial"):
            yield f"{file.name} stays"
        if any((folder / "mirror").glob("packing/*/*")):
            yield "what was packed stays on local disk"


def _uploads(jobs: Jobs) -> list[str]:
    """The files whose upload in parts has neither ended nor been given up."""
    found = jobs.bucket.list_multipart_uploads(BUCKET)
    prefix = jobs._url.removeprefix(f"s3://{BUCKET}/")
    return [each["Key"] for each in found if each["Key"].startswith(prefix)]


def _in_place(job: Job, folder: Path, url: str, options: dict) -> Job:
    """The job in a case's folder and at its URL."""
    fields = {"options": options}
    for name in ("path", "cache", "store", "mirror", "url"):
        text = getattr(job, name, None)
        if text is not None:
            text = text.replace(_URL, url)
            fields[name] = text.replace("@/", f"{folder}/")
    return replace(job, **fields)


def _tell_how_it_went(job: Job, writer) -> None:
    """Do a job, say how that went, and end this process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    status, text = "ok", ""
    try:
        job.run()
    except BaseException as error:  # noqa: BLE001 -- whatever it is, it is told
        status, text = type(error).__name__, str(error)
        if status not in _TOLD:
            text += "\n" + traceback.format_exc()
    writer.send((status, text))
    os._exit(0)


_TOLD = {
    "CacheError",
    "DamagedCacheError",
    "DatasetError",
    "NoAnswerError",
    "NoRoomError",
    "OtherWriterError",
    "StaleCacheError",
}


def _wrong_ending(ending: Ending, harm: Harm, job: Job, *, lasting: bool):
    """Say in which way a job must not end."""
    kills = {Harm.KILL_BEFORE, Harm.KILL_AFTER}
    allowed = {"ok", "killed"} if harm in kills else {"ok"}
    if lasting or harm is Harm.WRONG:
        allowed |= _TOLD
    if ending.status not in allowed:
        yield f"it ended with {ending.status}: {ending.text}"
    if ending.status in _TOLD:
        url = next(
            value
            for value in (getattr(job, n, "") for n in ("url", "store", "path"))
            if value.startswith("s3://")
        )
        parts = (url, "  why: ", "  fix: ")
        if not all(part in ending.text for part in parts):
            yield f"the error lacks URL, why or fix: {ending.text}"
