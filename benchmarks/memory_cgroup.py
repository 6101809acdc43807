"""Processes that may use less memory than the data that they read.

Memory cgroups of version 1, so this needs root.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

Result = TypeVar("Result")

_CGROUPS = Path("/sys/fs/cgroup/memory")
READER_BYTES = 96 << 20
"""What a forked reader needs of its own: batches, and what it writes to."""


def run_within(limit_bytes: int | None, function: Callable[[], Result]) -> Result:
    """Call a function in a forked process that may use so many bytes.

    Args:
        limit_bytes: Pages of files included; None for no limit.
        function: What to call; no file is in memory when it begins.

    Returns:
        What it returned.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_call_within, args=(limit_bytes, function, sender))
    process.start()
    # Only the child may hold it open: if it ends early, ``recv`` raises.
    sender.close()
    result: Result = receiver.recv()
    process.join()
    _remove_cgroup(process.pid)
    return result


def _call_within(
    limit_bytes: int | None, function: Callable[[], object], sender: Connection
) -> None:
    # Pages that wait to be written are not dropped.
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")
    if limit_bytes is not None:
        _enter_cgroup(limit_bytes)
    sender.send(function())


def _enter_cgroup(limit_bytes: int) -> None:
    group = _cgroup_of(os.getpid())
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _remove_cgroup(pid: int | None) -> None:
    """Remove the group of a process that has ended, if it made one."""
    group = _cgroup_of(pid)
    if group.exists():
        group.rmdir()


def _cgroup_of(pid: int | None) -> Path:
    return _CGROUPS / f"loaderkit-{pid}"


def disk_bytes_read() -> int:
    """Count the bytes that this process had the disk read."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, count = line.partition(":")
        if name == "read_bytes":
            return int(count)
    msg = "/proc/self/io has no line read_bytes"
    raise OSError(msg)
