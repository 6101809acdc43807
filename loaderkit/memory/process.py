"""What one process holds: memory by kind, files, threads, mappings, children.

On Linux from /proc, at about 100 microseconds; elsewhere through psutil, as far as that
goes.  What cannot be read is left out of the readings.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
import re
import sys
from typing import TYPE_CHECKING, NamedTuple

import psutil

from loaderkit.memory.clibrary import c_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from loaderkit.memory.counters import CounterName, Readings


class _StatusField(NamedTuple):
    """A line of /proc/<pid>/status."""

    counter: CounterName
    pattern: re.Pattern[bytes]
    unit_size: int
    """What a one in the file stands for: the kernel counts memory in KiB."""


_ANONYMOUS = _StatusField("anonymous", re.compile(rb"RssAnon:\s+(\d+)"), 1024)
_STATUS_FIELDS = (
    _ANONYMOUS,
    _StatusField("file_backed", re.compile(rb"RssFile:\s+(\d+)"), 1024),
    _StatusField("shared", re.compile(rb"RssShmem:\s+(\d+)"), 1024),
    _StatusField("threads", re.compile(rb"Threads:\s+(\d+)"), 1),
)
_DESCRIPTOR_KINDS: tuple[tuple[CounterName, str], ...] = (
    ("sockets", "socket:"),
    ("pipes", "pipe:"),
    ("regular_files", "/"),
)
"""How the target of a descriptor begins, by what it is."""
PROC = "/proc"
_READ_BYTES = 1 << 16
"""At once.  Chosen: all but the mappings of a process are shorter than that."""
_START_UP_CPU_S = 10.0
"""Processor time in which a new program has imported what it needs: torch, PyG and h5py
take 3 to 6 s here."""
_START_UP_S = 60.0
"""The same on the clock, for programs that hardly compute."""
_NAME_LENGTH = 60
"""Of a command line, as a report shows it."""


def quick_counters() -> dict[CounterName, int]:
    """Count what this process holds, cheaply enough for every epoch.

    Returns:
        The counters that can be read here; about 0.1 ms.
    """
    readings: dict[CounterName, int] = {"python_blocks": sys.getallocatedblocks()}
    status = _read_proc_file(f"{PROC}/self/status")
    if status is None:
        readings |= _read_through_psutil(own_pid())
        heap_bytes = _heap_bytes_through_psutil()
        if heap_bytes is not None:
            readings["malloc"] = heap_bytes
        return readings
    readings |= _parse_status(status)
    with contextlib.suppress(OSError):
        # One of the descriptors is os.listdir's own.
        readings["files"] = len(os.listdir(f"{PROC}/self/fd")) - 1
    # Most processes have no child, and to find that out costs one call instead of a
    # walk over all threads.
    readings["children"] = len(children_of(own_pid())) if _has_children() else 0
    heap = malloc_heap()
    if heap is not None:
        readings["malloc"] = heap.used_bytes
        readings["malloc_free"] = heap.free_bytes
    return readings


def counters_of(pid: int) -> Readings:
    """Count what another process holds, as far as it can be seen from outside.

    Args:
        pid: Its number.

    Returns:
        The counters that can be read; empty when it is gone.
    """
    status = _read_proc_file(f"{PROC}/{pid}/status")
    if status is None:
        return _read_through_psutil(pid)
    readings = _parse_status(status)
    with contextlib.suppress(OSError):
        readings["files"] = len(os.listdir(f"{PROC}/{pid}/fd"))
    if not readings:
        return {}
    children = children_of(pid)
    readings["children"] = len(children)
    sizes = [process_anonymous(child) or 0 for child in children]
    readings["tree_anonymous"] = sum(sizes)
    return readings


def open_files() -> Readings:
    """Count this process's descriptors by kind.

    Returns:
        "sockets", "pipes" and "regular_files"; what is none of these is not counted.
    """
    targets = [target for _, target in descriptors()]
    return {
        name: sum(target.startswith(beginning) for target in targets)
        for name, beginning in _DESCRIPTOR_KINDS
    }


def descriptors() -> list[tuple[int, str]]:
    """List this process's open descriptors.

    Returns:
        Number and target, such as ``(3, "data/a.h5")`` or ``(4, "socket:[123]")``.
    """
    pairs = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"{PROC}/self/fd"):
            # One that was closed since the names were listed.
            with contextlib.suppress(OSError):
                pairs.append((int(name), os.readlink(f"{PROC}/self/fd/{name}")))
    # The descriptor that os.listdir itself had open while it listed them.
    listing = f"{PROC}/{os.getpid()}/fd"
    return [(number, target) for number, target in pairs if target != listing]


def mappings() -> int | None:
    """Count the mappings of this process; about 1 ms.

    Returns:
        Their number; None where it cannot be read.
    """
    text = _read_proc_file(f"{PROC}/self/maps")
    return None if text is None else text.count(b"\n")


def virtual_pages() -> int | None:
    """Count the pages of this process's address space; 20 us.

    Returns:
        Resident or not; None where it cannot be read.
    """
    text = _read_proc_file(f"{PROC}/self/statm")
    return None if text is None else int(text.split()[0])


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
    pids = _direct_children(pid)
    # The list grows while it is gone through, so that grandchildren come too.
    for child in pids:
        pids += _direct_children(child)
    return pids


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
    status = _read_proc_file(f"{PROC}/{pid}/status")
    match = _ANONYMOUS.pattern.search(status) if status else None
    return int(match[1]) * _ANONYMOUS.unit_size if match else None


def is_starting_up(pid: int) -> bool:
    """Tell whether a process runs a program of its own, and may still be importing.

    A forked child has its parent's program, and its imports too.

    Args:
        pid: Its number.

    Returns:
        False too when it is gone, or where the kernel does not tell.
    """
    stat = _read_proc_file(f"{PROC}/{pid}/stat")
    uptime = _read_proc_file(f"{PROC}/uptime")
    if not stat or not uptime:
        return False
    # The name, in parentheses, may hold blanks.  From the state on: fields 3, 4, ...
    fields = stat.rpartition(b")")[2].split()
    parent, user_ticks, system_ticks, start_tick = (
        int(fields[index]) for index in (1, 11, 12, 19)
    )
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    cpu_s = (user_ticks + system_ticks) / ticks_per_s
    age_s = float(uptime.split()[0]) - start_tick / ticks_per_s
    if cpu_s > _START_UP_CPU_S or age_s > _START_UP_S:
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
    return _read_proc_file(f"{PROC}/{pid}/cmdline") or b""


def process_name(pid: int) -> str:
    """Say what a process is.

    Args:
        pid: Its number.

    Returns:
        Its command line, at most 60 characters; "gone" when it ended.
    """
    command = _read_proc_file(f"{PROC}/{pid}/cmdline")
    if command is None:
        return "gone"
    words = command.replace(b"\0", b" ").decode(errors="replace").strip()
    if words:
        return words[:_NAME_LENGTH]
    # A zombie has no command line any more, a process that is being started none yet.
    status = _read_proc_file(f"{PROC}/{pid}/status") or b""
    if re.search(rb"State:\s+Z", status):
        return "a zombie: it ended, and nobody has waited for it"
    return "starting"


def full_counters(
    pids: Iterable[int],
) -> tuple[Readings, Mapping[CounterName, str]]:
    """Read USS and PSS of processes, which makes the kernel walk their pages.

    Args:
        pids: This process first, then its children; those that end meanwhile count
            as nothing.

    Returns:
        The counters, and for what is missing the reason.
    """
    own, *children = pids
    own_shares = _page_shares(own)
    if own_shares is None:
        names: tuple[CounterName, ...] = ("private", "proportional", "tree_private")
        reason = "the kernel gives no smaps_rollup of this process"
        return {}, dict.fromkeys(names, reason)
    tree_private, tree_proportional = own_shares
    for child in children:
        shares = _page_shares(child)
        if shares is not None:
            tree_private += shares.private_bytes
            tree_proportional += shares.proportional_bytes
    readings: Readings = {
        "private": own_shares.private_bytes,
        "proportional": own_shares.proportional_bytes,
        "tree_private": tree_private,
        "tree_proportional": tree_proportional,
    }
    return readings, {}


class MallocHeap(NamedTuple):
    """What glibc's malloc holds."""

    used_bytes: int
    """Given out to somebody, in all arenas and as mappings of their own."""
    free_bytes: int
    """In its arenas and given out to nobody.  Pieces of these that were never written
    to are no resident memory yet, and become so when they are given out."""


def malloc_heap() -> MallocHeap | None:
    """Ask glibc how much memory it has given out, and how much it keeps for later.

    Returns:
        The bytes; None with another allocator.
    """
    if _has_other_allocator():
        return None
    ask_mallinfo = _find_mallinfo()
    if ask_mallinfo is None:
        return None
    info = ask_mallinfo()
    return MallocHeap(int(info.uordblks + info.hblkhd), int(info.fordblks))


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    )


@functools.cache
def _find_mallinfo() -> Callable[[], _MallInfo] | None:
    """Find glibc's ``mallinfo2``, which is there from 2.33 on."""
    library = c_library()
    if library is None or not hasattr(library, "mallinfo2"):
        return None
    mallinfo = library.mallinfo2
    mallinfo.restype, mallinfo.argtypes = _MallInfo, ()
    return mallinfo


def _has_other_allocator() -> bool:
    """Tell whether another allocator stands in the place of the C library's own."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    preloaded += os.environ.get("DYLD_INSERT_LIBRARIES", "")
    return re.search("jemalloc|tcmalloc|mimalloc", preloaded) is not None


def _heap_bytes_through_psutil() -> int | None:
    """Ask psutil, which knows the heaps of macOS, Windows and the BSDs from 7.2 on.

    Not on Linux: with a glibc of before 2.33 it counts in 32 bits.
    """
    if _has_other_allocator() or not hasattr(psutil, "heap_info"):
        return None
    try:
        heap = psutil.heap_info()
    except (OSError, psutil.Error):
        return None
    return int(heap.heap_used + heap.mmap_used)


class _PageShares(NamedTuple):
    private_bytes: int
    """Pages that no other process maps (USS)."""
    proportional_bytes: int
    """Each page divided by how many processes map it (PSS)."""


def _page_shares(pid: int) -> _PageShares | None:
    """Add up a process's pages, as the kernel's smaps_rollup tells of them."""
    text = _read_proc_file(f"{PROC}/{pid}/smaps_rollup")
    if text is None:
        return None
    kib_of = {name: int(kib) for name, kib in re.findall(rb"(\w+):\s+(\d+) kB", text)}
    private_kib = kib_of.get(b"Private_Clean", 0) + kib_of.get(b"Private_Dirty", 0)
    return _PageShares(private_kib * 1024, kib_of.get(b"Pss", 0) * 1024)


def _has_children() -> bool:
    """Tell whether this process has any child, at the cost of one call."""
    with contextlib.suppress(ChildProcessError):
        # WNOWAIT leaves a child that has ended to whoever waits for it.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def _direct_children(pid: int) -> list[int]:
    """List the children that each thread of a process has started."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"{PROC}/{pid}/task"):
            text = _read_proc_file(f"{PROC}/{pid}/task/{thread}/children")
            pids += map(int, (text or b"").split())
    return pids


def _parse_status(status: bytes) -> dict[CounterName, int]:
    """Read the counters out of the text of /proc/<pid>/status."""
    readings: dict[CounterName, int] = {}
    for field in _STATUS_FIELDS:
        match = field.pattern.search(status)
        if match:
            readings[field.counter] = int(match[1]) * field.unit_size
    return readings


def _read_through_psutil(pid: int) -> dict[CounterName, int]:
    """Read what psutil tells where there is no /proc; empty when a process is gone."""
    try:
        process = psutil.Process(pid)
        readings: dict[CounterName, int] = {
            "resident": int(process.memory_info().rss),
            "threads": int(process.num_threads()),
        }
        if hasattr(process, "num_fds"):
            readings["files"] = int(process.num_fds())
    except psutil.Error:
        return {}
    readings["children"] = len(children_of(pid))
    return readings


def _read_proc_file(file: str) -> bytes | None:
    """Read a file of /proc; without Python's buffers it takes a third of the time."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return None
    try:
        pieces = [os.read(descriptor, _READ_BYTES)]
        while pieces[-1]:
            pieces.append(os.read(descriptor, _READ_BYTES))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return b"".join(pieces)
