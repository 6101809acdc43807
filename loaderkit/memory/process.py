"""What one process holds: memory by kind, files, threads, mappings, children.

On Linux from /proc, at about 100 microseconds; elsewhere through psutil, as far as that
goes.  What cannot be read is left out, and ``missing`` says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
import re
import sys
from typing import TYPE_CHECKING

import psutil

from loaderkit.memory.clibrary import c_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_KINDS = (
    ("anonymous", rb"RssAnon:\s+(\d+)", 1024),
    ("file_backed", rb"RssFile:\s+(\d+)", 1024),
    ("shared", rb"RssShmem:\s+(\d+)", 1024),
    ("threads", rb"Threads:\s+(\d+)", 1),
)
PROC = "/proc"
_PIECE = 1 << 16
_START_UP_CPU_S = 10.0
"""Processor time in which a new program has imported what it needs: torch, PyG and h5py
take 3 to 6 s here."""
_START_UP_S = 60.0
"""The same on the clock, for programs that hardly compute."""


def quick_counters() -> dict[str, int]:
    """Count what this process holds, cheaply enough for every epoch.

    Returns:
        The counters that can be read here, by name; about 0.1 ms.
    """
    found = {"python_blocks": sys.getallocatedblocks()}
    status = _read(f"{PROC}/self/status")
    if status is None:
        found |= _through_psutil(own_pid())
        in_use = _heap_bytes()
        return found if in_use is None else found | {"malloc": in_use}
    for name, pattern, step in _KINDS:
        match = re.search(pattern, status)
        if match:
            found[name] = int(match[1]) * step
    with contextlib.suppress(OSError):
        found["files"] = len(os.listdir(f"{PROC}/self/fd")) - 1  # its own
    found["children"] = len(children_of(own_pid())) if _has_children() else 0
    in_use = malloc_bytes()
    if in_use is not None:
        found["malloc"] = in_use
    return found


def outside_counters(pid: int) -> dict[str, int]:
    """Count what another process holds, as far as it can be seen from outside.

    Args:
        pid: Its number.

    Returns:
        The counters that can be read, by name; empty when it is gone.
    """
    status = _read(f"{PROC}/{pid}/status")
    if status is None:
        return _through_psutil(pid)
    found = {}
    for name, pattern, step in _KINDS:
        match = re.search(pattern, status)
        if match:
            found[name] = int(match[1]) * step
    with contextlib.suppress(OSError):
        found["files"] = len(os.listdir(f"{PROC}/{pid}/fd"))
    children = children_of(pid)
    found["children"] = len(children)
    sizes = [process_anonymous(child) or 0 for child in children]
    return found | {"tree_anonymous": sum(sizes)} if found else {}


def open_files() -> dict[str, int]:
    """Count this process's descriptors by kind.

    Returns:
        "sockets", "pipes" and "regular_files"; what is none of these is not counted.
    """
    targets = [target for _, target in descriptors()]
    kinds = {"sockets": "socket:", "pipes": "pipe:", "regular_files": "/"}
    return {
        name: sum(target.startswith(start) for target in targets)
        for name, start in kinds.items()
    }


def descriptors() -> list[tuple[int, str]]:
    """List this process's open descriptors.

    Returns:
        Number and target, such as ``(3, "data/a.h5")`` or ``(4, "socket:[123]")``.
    """
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"{PROC}/self/fd"):
            with contextlib.suppress(OSError):
                found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
    listing = f"/proc/{os.getpid()}/fd"  # the one that os.listdir itself had open
    return [pair for pair in found if pair[1] != listing]


def mappings() -> int | None:
    """Count the mappings of this process; about 1 ms.

    Returns:
        Their number; None where it cannot be read.
    """
    text = _read(f"{PROC}/self/maps")
    return None if text is None else text.count(b"\n")


def children_of(pid: int) -> list[int]:
    """List the running children of a process and theirs, without zombies' children.

    Args:
        pid: A process of this machine.

    Returns:
        Process numbers, a parent before its children.
    """
    if not pathlib.Path(f"{PROC}/self/status").exists():
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return []
    found: list[int] = []
    for each in [pid]:
        found += _direct(each)
    for child in list(found):
        found += children_of(child)
    return found


def own_pid() -> int:
    """Give the number of this process."""
    return os.getpid()


def process_anonymous(pid: int) -> int | None:
    """Read another process's private memory.

    Pages that a forked child still shares with its parent count too: they are part of
    where it starts, and copying one on write changes nothing.  So what it keeps in
    pages that its parent had freed before the fork is not seen.

    Args:
        pid: Its number.

    Returns:
        Bytes; None when it is gone.
    """
    status = _read(f"{PROC}/{pid}/status")
    match = re.search(_KINDS[0][1], status) if status else None
    return int(match[1]) * 1024 if match else None


def is_starting_up(pid: int) -> bool:
    """Tell whether a process runs a program of its own, and may still be importing.

    A forked child has its parent's program, and its imports too.

    Args:
        pid: Its number.

    Returns:
        False too when it is gone, or where the kernel does not tell.
    """
    stat, uptime = _read(f"{PROC}/{pid}/stat"), _read(f"{PROC}/uptime")
    if not stat or not uptime:
        return False
    # The name, in parentheses, may hold blanks.  From the state on: fields 3, 4, ...
    fields = stat.rpartition(b")")[2].split()
    parent, user, system, started = (int(fields[i]) for i in (1, 11, 12, 19))
    ticks = os.sysconf("SC_CLK_TCK")
    age_s = float(uptime.split()[0]) - started / ticks
    if (user + system) / ticks > _START_UP_CPU_S or age_s > _START_UP_S:
        return False
    return command_of(pid) != command_of(parent)


def command_of(pid: int) -> bytes:
    """Read the command line of a process.

    Args:
        pid: Its number.

    Returns:
        Its arguments, each ended by a zero byte; empty when it is gone, or where the
        kernel does not tell.
    """
    return _read(f"{PROC}/{pid}/cmdline") or b""


def process_name(pid: int) -> str:
    """Say what a process is.

    Args:
        pid: Its number.

    Returns:
        Its command line, at most 60 characters; "gone" when it ended.
    """
    text = _read(f"{PROC}/{pid}/cmdline")
    if text is None:
        return "gone"
    words = text.replace(b"\0", b" ").decode(errors="replace").strip()
    if words:
        return words[:60]
    status = _read(f"{PROC}/{pid}/status") or b""
    ended = re.search(rb"State:\s+Z", status)
    return "a zombie: it ended, and nobody has waited for it" if ended else "starting"


def full_counters(pids: Iterable[int]) -> tuple[dict[str, int], dict[str, str]]:
    """Read USS and PSS of processes, which makes the kernel walk their pages.

    Args:
        pids: This process first, then its children; those that end meanwhile count
            as nothing.

    Returns:
        The counters, and for what is missing the reason.
    """
    own, *others = pids
    shares = _shares(own)
    if shares is None:
        reason = "the kernel gives no smaps_rollup of this process"
        return {}, dict.fromkeys(("private", "proportional", "tree_private"), reason)
    private, proportional = shares
    found = {"private": private, "proportional": proportional}
    for other in others:
        each = _shares(other) or (0, 0)
        private, proportional = private + each[0], proportional + each[1]
    return found | {"tree_private": private, "tree_proportional": proportional}, {}


def malloc_bytes() -> int | None:
    """Ask glibc how much memory it has given out: free pieces do not count.

    Returns:
        Bytes of all arenas and big blocks; None with another allocator.
    """
    if _is_another_allocator():
        return None
    ask = _mallinfo()
    if ask is None:
        return None
    found = ask()
    return int(found.uordblks + found.hblkhd)


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
            "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


@functools.cache
def _mallinfo() -> Callable[[], _MallInfo] | None:
    """Find glibc's ``mallinfo2``."""
    library = c_library()
    if library is None or not hasattr(library, "mallinfo2"):
        return None
    ask = library.mallinfo2
    ask.restype, ask.argtypes = _MallInfo, ()
    return ask


def _is_another_allocator() -> bool:
    """Tell whether another allocator stands in the place of the C library's own."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    preloaded += os.environ.get("DYLD_INSERT_LIBRARIES", "")
    return re.search("jemalloc|tcmalloc|mimalloc", preloaded) is not None


def _heap_bytes() -> int | None:
    """Ask psutil, which knows the heaps of macOS, Windows and the BSDs from 7.2 on.

    Not on Linux: with a glibc of before 2.33 it counts in 32 bits.
    """
    if _is_another_allocator() or not hasattr(psutil, "heap_info"):
        return None
    try:
        heap = psutil.heap_info()
    except (OSError, psutil.Error):
        return None
    return int(heap.heap_used + heap.mmap_used)


def _shares(pid: int) -> tuple[int, int] | None:
    text = _read(f"{PROC}/{pid}/smaps_rollup")
    if text is None:
        return None
    found = re.findall(rb"(\w+):\s+(\d+) kB", text)
    sizes = {name: int(size) for name, size in found}
    private = sizes.get(b"Private_Clean", 0) + sizes.get(b"Private_Dirty", 0)
    return private * 1024, sizes.get(b"Pss", 0) * 1024


def _has_children() -> bool:
    """Tell whether this process has any child, at the cost of one call."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def _direct(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"{PROC}/{pid}/task"):
            text = _read(f"{PROC}/{pid}/task/{task}/children")
            found += map(int, (text or b"").split())
    return found


def _through_psutil(pid: int) -> dict[str, int]:
    try:
        process = psutil.Process(pid)
        found = {"resident": int(process.memory_info().rss)}
        found["threads"] = int(process.num_threads())
        if hasattr(process, "num_fds"):
            found["files"] = int(process.num_fds())
    except psutil.Error:
        return {}
    return found | {"children": len(children_of(pid))}


def _read(file: str) -> bytes | None:
    """Read a file of /proc; without Python's buffers it takes a third of the time."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return None
    try:
        pieces = [os.read(descriptor, _PIECE)]
        while pieces[-1]:
            pieces.append(os.read(descriptor, _PIECE))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return b"".join(pieces)
