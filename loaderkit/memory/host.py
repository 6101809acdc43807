"""What this process may use: processors, memory, shared memory, files, mappings.

The numbers of a container come from its cgroups, version 1, 2 or both, along the whole
path to the root: the tightest limit counts.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63."""


@dataclass(frozen=True)
class Host:
    """The limits of this process, read once."""

    cpus: int
    """Processors it may keep busy, at least 1."""
    cpus_from: str
    """Which limit that is: "affinity", "cgroup quota", "SLURM" or "the machine"."""
    available_bytes: int
    """Memory that can still be used before something is killed."""
    available_from: str
    """Which limit that is: "cgroup" or "the machine"."""
    limit_bytes: int | None
    """The cgroup's limit; None where there is none."""
    used_bytes: int | None
    """What the cgroup with that limit uses, file pages included; None if unknown."""
    oom_kills: int | None
    """Processes of this cgroup the kernel has killed so far; None if unknown."""
    pressure: float | None
    """Percent of the last 10 s that tasks waited for memory (PSI); None if unknown."""
    shm_bytes: int | None
    """Size of /dev/shm; None where there is none."""
    shm_free_bytes: int | None
    """Room left in it."""
    files: int | None
    """Open files allowed (RLIMIT_NOFILE, soft); None for no limit."""
    files_open: int
    """Open now."""
    mappings: int | None
    """Mappings allowed (vm.max_map_count); None if unknown."""
    local_ranks: int
    """Processes of one training run on this machine (LOCAL_WORLD_SIZE)."""


def signal_name(number: int) -> str:
    """Name a signal that ended a process; not every system knows every signal.

    >>> signal_name(11), signal_name(1_000)
    ('SIGSEGV', 'signal 1000')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_host(root: str | os.PathLike[str] = "/") -> Host:
    """Read the limits of this process.

    Args:
        root: Where ``proc``, ``sys`` and ``dev`` lie; another folder in tests.

    Returns:
        The limits; what cannot be read is None.
    """
    top = Path(root)
    groups = list(_groups(top))
    cpus, cpus_from = _cpus(groups)
    limit, used, _ = _memory(groups)
    available, available_from = available_memory(root)
    shm, shm_free = _shm(top / "dev/shm")
    return Host(
        cpus=cpus,
        cpus_from=cpus_from,
        available_bytes=available,
        available_from=available_from,
        limit_bytes=limit,
        used_bytes=used,
        oom_kills=_oom_kills(groups),
        pressure=_pressure(top, groups),
        shm_bytes=shm,
        shm_free_bytes=shm_free,
        files=_file_limit(),
        files_open=_files_open(),
        mappings=_number(top / "proc/sys/vm/max_map_count"),
        local_ranks=max(1, _environment("LOCAL_WORLD_SIZE") or 1),
    )


def available_memory(root: str | os.PathLike[str] = "/") -> tuple[int, str]:
    """Say how much memory can still be used before something is killed.

    Args:
        root: Where ``proc`` and ``sys`` lie; another folder in tests.

    Returns:
        Bytes, and which limit that is: "cgroup" or "the machine".
    """
    available = _memory(list(_groups(Path(root))))[2]
    free = psutil.virtual_memory().available
    if available is not None and available < free:
        return available, "cgroup"
    return free, "the machine"


def _groups(top: Path) -> Iterator[Path]:
    """List the folders of this process's cgroups, each with those above it."""
    text = _text(top / "proc/self/cgroup") or ""
    base = top / "sys/fs/cgroup"
    for line in text.splitlines():
        _, controllers, inner = [*line.split(":", 2), "", ""][:3]
        names = [*controllers.split(","), controllers] if controllers else [""]
        for name in names:
            mount = base / name if name else base
            found = (mount / inner.lstrip("/")).resolve()
            mount = mount.resolve()
            while found != mount and found.is_relative_to(mount):
                yield found
                found = found.parent
            if mount.is_dir():
                yield mount


def _cpus(groups: list[Path]) -> tuple[int, str]:
    found = [(float(os.cpu_count() or 1), "the machine")]
    if hasattr(os, "sched_getaffinity"):
        found.append((float(len(os.sched_getaffinity(0))), "affinity"))
    slurm = _environment("SLURM_CPUS_PER_TASK")
    if slurm:
        found.append((float(slurm), "SLURM"))
    for group in groups:
        quota = _quota(group)
        if quota is not None:
            found.append((quota, "cgroup quota"))
    count, name = min(found, key=lambda pair: pair[0])
    return max(1, int(count)), name


def _quota(group: Path) -> float | None:
    words = (_text(group / "cpu.max") or "").split()
    if len(words) == 2 and words[0].isdigit() and int(words[1]):
        return int(words[0]) / int(words[1])
    quota = _number(group / "cpu.cfs_quota_us")
    period = _number(group / "cpu.cfs_period_us")
    return quota / period if quota and quota > 0 and period else None


def _memory(groups: list[Path]) -> tuple[int | None, int | None, int | None]:
    """Find the tightest limit, its use, and what is left below any limit.

    File pages can go, so they count as left.
    """
    limits: list[tuple[int, int | None]] = []
    left = []
    for group in groups:
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")
        caps = [_number(group / name) for name in names]
        cap = min((c for c in caps if c is not None and c < _UNLIMITED), default=None)
        if cap is None:
            continue
        used = _number(group / "memory.current")
        if used is None:
            used = _number(group / "memory.usage_in_bytes")
        limits.append((cap, used))
        if used is not None:
            left.append(max(0, cap - used + _reclaimable(group)))
    tightest, its_use = min(limits, default=(None, None), key=lambda pair: pair[0])
    return tightest, its_use, min(left, default=None)


def _reclaimable(group: Path) -> int:
    text = _text(group / "memory.stat") or ""
    found = dict(re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE))
    total = 0
    for name in ("inactive_file", "active_file"):
        total += int(found.get(f"total_{name}") or found.get(name) or 0)
    return total


def _oom_kills(groups: list[Path]) -> int | None:
    for group in groups:
        for name in ("memory.events", "memory.oom_control"):
            found = re.search(r"^oom_kill (\d+)$", _text(group / name) or "", re.M)
            if found:
                return int(found[1])
    return None


def _pressure(top: Path, groups: list[Path]) -> float | None:
    places = [group / "memory.pressure" for group in groups]
    for place in [*places, top / "proc/pressure/memory"]:
        found = re.search(r"^some avg10=([\d.]+)", _text(place) or "", re.MULTILINE)
        if found:
            return float(found[1])
    return None


def _shm(folder: Path) -> tuple[int | None, int | None]:
    if not folder.is_dir():
        return None, None
    try:
        found = psutil.disk_usage(str(folder))
    except OSError:
        return None, None
    return int(found.total), int(found.free)


def _file_limit() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _files_open() -> int:
    process = psutil.Process()
    return int(process.num_fds()) if hasattr(process, "num_fds") else 0


def _environment(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None


def _number(file: Path) -> int | None:
    text = (_text(file) or "").strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _text(file: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text()
    return None
