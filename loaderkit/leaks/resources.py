"""Which files, sockets, threads, processes and mappings became more, by name."""

from __future__ import annotations

import gc
import re
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from loaderkit.leaks.growth import RESOURCES, Growth
from loaderkit.memory import process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


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
