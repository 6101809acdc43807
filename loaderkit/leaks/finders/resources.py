"""Finds files, sockets, threads, child processes and mappings that became more."""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from loaderkit.leaks.growth import RESOURCES, Growth
from loaderkit.memory import process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from loaderkit.leaks.finders.evidence import CounterEvidence
    from loaderkit.leaks.growth import Resource


def find_resources(evidence: CounterEvidence) -> list[Growth]:
    """Name the resources that leak, and who keeps them if an object does.

    Args:
        evidence: Counters that leak, and objects that grow.

    Returns:
        Causes before effects: a process has files, a thread has a mapping.
    """
    growths: list[Growth] = []
    for name in RESOURCES:
        if name not in evidence.leaking:
            continue
        # Almost everything that is kept is mapped somewhere: mappings are a cause only
        # where nothing else is one.
        if name == "mappings" and (evidence.objects or growths):
            continue
        before = evidence.files_before if name == "files" else Counter[str]()
        growth = resource_growth(name, evidence.leaking[name].per_epoch, before)
        keepers = [
            other.holder
            for other in evidence.objects
            if other.pattern == growth.pattern and not _is_of_python(other)
        ]
        growths.append(replace(growth, holder=keepers[0] if keepers else None))
    return growths


def _is_of_python(growth: Growth) -> bool:
    """Tell whether it is the table in which Python itself lists all threads."""
    return growth.holder is not None and growth.holder.path.startswith("threading.")


def resource_growth(
    name: Resource,
    per_epoch: float,
    before: Counter[str],
) -> Growth:
    """Name what a growing resource consists of now.

    Args:
        name: Of the resource.
        per_epoch: How fast it grows.
        before: What there was at the start, from :func:`kinds_of`.

    Returns:
        A growth whose items name the most frequent kind.
    """
    kinds = (kinds_of(name) - before).most_common(1)
    items = kinds[0][0] if kinds else "items"
    if items == "socket":
        return Growth("sockets", RESOURCES[name], "sockets", per_epoch, 0)
    # torch keeps the file of a tensor open that a worker sent.
    pattern = "shared" if items.startswith("/dev/shm/torch_") else name
    return Growth(pattern, RESOURCES[name], items, per_epoch, 0)


def kinds_of(name: Resource) -> Counter[str]:
    """Count what a resource consists of.

    Args:
        name: Of the resource.

    Returns:
        How many of each kind; numbers in names are left out.
    """
    return Counter(_LIST_OF[name]())


def _list_files() -> Iterable[str]:
    targets = [target for _, target in process.descriptors()]
    return [
        "socket" if target.startswith("socket:") else _without_numbers(target)
        for target in targets
    ]


def _list_threads() -> Iterable[str]:
    return [_describe_thread(thread) for thread in threading.enumerate()]


def _describe_thread(thread: threading.Thread) -> str:
    # Python keeps what a thread runs under a private name, and drops it at the end.
    target = getattr(thread, "_target", None)
    code = getattr(target, "__code__", None)
    if target is None or code is None:
        return f"thread {re.sub('[0-9]+', 'N', thread.name)}"
    location = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    return f"thread of {target.__qualname__} ({location})"


def _list_children() -> Iterable[str]:
    return [process.process_name(pid) for pid in process.children_of(process.own_pid())]


def _list_mappings() -> Iterable[str]:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    # Address, rights, offset, device and inode come before the name, if there is one.
    kinds = []
    for line in maps.read_text().splitlines():
        words = line.split(None, 5)
        if len(words) > 5:
            kinds.append(_without_numbers(words[5].strip()))
        else:
            kinds.append("anonymous memory")
    return kinds


def _without_numbers(target: str) -> str:
    """Leave out what differs between files of one kind."""
    folder, slash, name = target.rpartition("/")
    return folder + slash + re.sub(r"\d+(_\d+)*|\[\d+\]", "*", name)


_LIST_OF: Mapping[Resource, Callable[[], Iterable[str]]] = {
    "files": _list_files,
    "threads": _list_threads,
    "children": _list_children,
    "mappings": _list_mappings,
}
