"""Finds files, sockets, threads, child processes and mappings that became more."""

from __future__ import annotations

import functools
import re
import threading
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit.leaks.growth import RESOURCES, Growth
from loaderkit.library_files import is_library_file, is_own_file
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


_NAME_OF_PYTHON = re.compile(r"Thread-\d+( \(.*\))?|MainThread")
"""What threads are called that nobody gave a name."""


def _describe_thread(thread: threading.Thread) -> str:
    """Say what a thread runs, what it is called, and where it was made if known.

    >>> thread = threading.Thread(target=print, name="prefetch 12")
    >>> _describe_thread(thread)
    "thread 'prefetch N' of print"
    """
    name, text = thread.name, "thread"
    if not _NAME_OF_PYTHON.fullmatch(name):
        text += f" {re.sub('[0-9]+', 'N', name)!r}"
    function = _function_of(thread)
    if function is not None:
        text += f" of {_name_in_file(function)}"
    made_at = _line_that_made(thread)
    if made_at:
        text += f", made in {made_at}"
    return text if text != "thread" else "threads without a name"


def _function_of(thread: threading.Thread) -> Any:
    """Give what a thread runs; None where that is not known."""
    run = type(thread).run
    if isinstance(thread, threading.Timer):
        return _without_partial(thread.function)
    if run is not threading.Thread.run:
        return run  # of a subclass
    # Python keeps what a thread runs under a private name, and drops it at the end.
    return _without_partial(getattr(thread, "_target", None))


def _without_partial(function: object) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _name_in_file(function: object) -> str:
    """Name a function, with its file and line where Python has its code."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if code is None:
        # An object with __call__, or a function that is written in C.
        code = getattr(getattr(type(function), "__call__", None), "__code__", None)  # noqa: B004
    if code is None:
        return str(name)
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _line_that_made(thread: threading.Thread) -> str:
    """Name the user's line that made a thread; empty unless tracemalloc saw it."""
    frames = tracemalloc.get_object_traceback(thread) or ()
    lines = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in frames
        if not is_library_file(frame.filename) and not is_own_file(frame.filename)
    ]
    return lines[-1] if lines else ""


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
