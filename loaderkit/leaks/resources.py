"""Which files, sockets, threads, processes and mappings became more, by name."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from loaderkit.leaks.growth import RESOURCES, Growth
from loaderkit.memory import process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SHM = "/dev/shm"
_MOST_FILES = 20_000
_LITTLE_S = 0.001
"""What a look at the files may take every epoch."""
_CLOCK_S = 0.01
"""A file's time can be so much behind."""


def resource_growth(name: str, per_epoch: float, before: Counter[str]) -> Growth:
    """Name what a growing resource consists of now.

    Args:
        name: "files", "threads", "children" or "mappings".
        per_epoch: How fast it grows.
        before: What there was at the start, from :func:`kinds_of`.

    Returns:
        A growth whose items name the most frequent kind.
    """
    kinds = (kinds_of(name) - before).most_common(1)
    items = kinds[0][0] if kinds else "items"
    if items == "socket":
        return Growth("sockets", RESOURCES[name], "sockets", per_epoch, 0)
    pattern = "shared" if items.startswith("/dev/shm/torch_") else name
    return Growth(pattern, RESOURCES[name], items, per_epoch, 0)


def kinds_of(name: str) -> Counter[str]:
    """Count what a resource consists of.

    Args:
        name: "files", "threads", "children" or "mappings".

    Returns:
        How many of each kind; numbers in names are left out.
    """
    return Counter(_LISTS[name]())


class Throttle:
    """Work that takes long: due as often as comes to a share of the time.

    Args:
        max_share: Of the time.
        free_s: Work that takes no longer is always due.
    """

    def __init__(self, max_share: float = 0.001, free_s: float = 0.0) -> None:
        self.max_share, self.free_s = max_share, free_s
        self.next_due = 0.0
        self._begun = 0.0

    @property
    def due(self) -> bool:
        """Whether its time has come again."""
        return time.monotonic() >= self.next_due

    def __enter__(self) -> None:
        self._begun = time.monotonic()

    def __exit__(self, *_: object) -> None:
        took = time.monotonic() - self._begun
        pause = took / self.max_share if took > self.free_s else 0.0
        self.next_due = self._begun + pause


class SharedFiles:
    """Files in /dev/shm that this user has made since: memory, though no process's.

    The file system tells in a microsecond whether anything changed; only then its
    files are looked at, and not those in folders that are as they were.
    """

    def __init__(self) -> None:
        self.since = time.time() - _CLOCK_S
        self._state: tuple[int, int] | None = None
        self._bytes: int | None = None
        self._throttle = Throttle(free_s=_LITTLE_S)

    def reading(self) -> int | None:
        """Add them up; None where there is no such folder, and while it costs much."""
        if not self._throttle.due:
            return None
        with self._throttle:
            return self.bytes()

    def bytes(self) -> int | None:
        """Add up what they take; None where there is no such folder."""
        try:
            now = os.statvfs(SHM)
        except (OSError, AttributeError):
            return None
        if (now.f_bfree, now.f_ffree) != self._state:
            self._state = now.f_bfree, now.f_ffree
            self._bytes = sum(size for _, size in self._files())
        return self._bytes

    def grows_by_itself(self, seconds: float) -> bool:
        """Wait and tell whether there are more: then another process makes them."""
        before = self.bytes()
        time.sleep(seconds)
        return self.bytes() != before

    def growth(self, per_epoch: float) -> Growth:
        """Name those that take most, in one growth."""
        kinds: Counter[str] = Counter()
        for name, size in self._files():
            kinds[_plain(name)] += size
        names = ", ".join(name for name, _ in kinds.most_common(2))
        return Growth("shm", f"files {names}", "", 0, round(per_epoch))

    def _files(self) -> Iterator[tuple[str, int]]:
        made = _made_since(SHM, self.since)
        return itertools.islice(made, _MOST_FILES)


def _made_since(folder: str, since: float) -> Iterator[tuple[str, int]]:
    """List this user's new files below a folder, and the bytes that each takes."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for each in entries:
        with contextlib.suppress(OSError):  # it is gone already
            found = each.stat(follow_symlinks=False)
            if each.is_dir(follow_symlinks=False):
                if found.st_mtime >= since:
                    yield from _made_since(each.path, since)
            elif found.st_uid == os.getuid() and found.st_ctime >= since:
                yield each.path, found.st_blocks * 512


def worker_words(pid: int) -> str:
    """Say what a child process is.

    Args:
        pid: Its number.

    Returns:
        "worker 0 of the DataLoader over Pockets" if it is one, else its command line.
    """
    for each in gc.get_objects():
        if type(each).__name__ == "_MultiProcessingDataLoaderIter":
            workers = getattr(each, "_workers", ())
            pids = [getattr(worker, "pid", None) for worker in workers]
            if pid in pids:
                dataset = type(getattr(each, "_dataset", None)).__name__
                return f"worker {pids.index(pid)} of the DataLoader over {dataset}"
    return process.process_name(pid)


def _files() -> Iterable[str]:
    targets = [target for _, target in process.descriptors()]
    return ["socket" if t.startswith("socket:") else _plain(t) for t in targets]


def _threads() -> Iterable[str]:
    return [_thread(each) for each in threading.enumerate()]


def _thread(thread: threading.Thread) -> str:
    target = getattr(thread, "_target", None)
    code = getattr(target, "__code__", None)
    if target is None or code is None:
        return f"thread {re.sub('[0-9]+', 'N', thread.name)}"
    place = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    return f"thread of {target.__qualname__} ({place})"


def _children() -> Iterable[str]:
    return [process.process_name(pid) for pid in process.children_of(process.own_pid())]


def _mappings() -> Iterable[str]:
    text = Path("/proc/self/maps")
    if not text.exists():
        return []
    names = [line.split(None, 5)[5:] for line in text.read_text().splitlines()]
    return [_plain(name[0].strip()) if name else "anonymous memory" for name in names]


def _plain(target: str) -> str:
    """Leave out what differs between files of one kind."""
    folder, slash, name = target.rpartition("/")
    return folder + slash + re.sub(r"\d+(_\d+)*|\[\d+\]", "*", name)


_LISTS: dict[str, Callable[[], Iterable[str]]] = {
    "files": _files,
    "threads": _threads,
    "children": _children,
    "mappings": _mappings,
}
