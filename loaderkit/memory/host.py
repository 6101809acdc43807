"""What this process may use: processors, memory, shared memory, files, mappings.

The numbers of a container come from its cgroups, version 1, 2 or both, along the whole
path to the root: the tightest limit counts.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from loaderkit.arguments import check_integer, check_variable
from loaderkit.errors import VariableError
from loaderkit.memory.machine import Host

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from loaderkit.memory.machine import CpuLimit, MemoryLimit

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63."""


class _CountVariable(NamedTuple):
    """A variable by which a launcher says how much of the machine is ours."""

    least: int
    """The smallest number that means something."""
    meaning: str
    """What it counts."""


_COUNTS = {
    "SLURM_CPUS_PER_TASK": _CountVariable(1, "processors that are ours"),
    # Before torchrun, scripts took 0 and -1 for "not distributed".
    "LOCAL_WORLD_SIZE": _CountVariable(-1, "processes of a training run here"),
}
_HIGHEST_COUNT = 1 << 20
"""More than any machine has of either."""


def check_host_variables(environment: Mapping[str, str]) -> None:
    """Refuse variables of launchers that ought to say how much of the machine is ours.

    ``read_host`` goes without them, since it is also called to explain why a process
    ended.

    Args:
        environment: Variables of the environment, by name.

    Raises:
        VariableError: The value of one is no count.
    """
    for name, count in _COUNTS.items():
        if not environment.get(name):
            continue
        try:
            _read_count(name, environment[name])
        except VariableError as refused:
            why = f"{refused.why}, and it counts {count.meaning}"
            fix = f"unset {name}, or {refused.fix}"
            raise VariableError(refused.what, why=why, fix=fix) from None


def _read_count(name: str, text: str) -> int:
    least = _COUNTS[name].least

    def check(name: str, value: object) -> int:
        return check_integer(name, value, least=least, most=_HIGHEST_COUNT)

    number: int = check_variable(name, text, int, check)
    return number


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
    groups = _cgroup_folders(top)
    cpus, cpus_from = _usable_cpus(groups)
    memory = _tightest_memory(groups)
    available, available_from = _available_memory(memory)
    shm_bytes, shm_free_bytes = _folder_space(top / "dev/shm")
    return Host(
        cpus=cpus,
        cpus_from=cpus_from,
        available_bytes=available,
        available_from=available_from,
        limit_bytes=memory.limit_bytes,
        used_bytes=memory.used_bytes,
        oom_kills=_count_oom_kills(groups),
        pressure=_memory_pressure(top, groups),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        files=_file_limit(),
        files_open=_count_open_files(),
        mappings=_read_number(top / "proc/sys/vm/max_map_count"),
        local_ranks=max(1, _environment_count("LOCAL_WORLD_SIZE") or 1),
    )


def available_memory(
    root: str | os.PathLike[str] = "/",
) -> tuple[int, MemoryLimit]:
    """Say how much memory can still be used before something is killed.

    Args:
        root: Where ``proc`` and ``sys`` lie; another folder in tests.

    Returns:
        Bytes, and which limit that is: "cgroup" or "the machine".
    """
    return _available_memory(_tightest_memory(_cgroup_folders(Path(root))))


def _available_memory(memory: _GroupMemory) -> tuple[int, MemoryLimit]:
    """Compare what cgroups leave with what the machine has."""
    machine_bytes = int(psutil.virtual_memory().available)
    if memory.left_bytes is not None and memory.left_bytes < machine_bytes:
        return memory.left_bytes, "cgroup"
    return machine_bytes, "the machine"


def _cgroup_folders(top: Path) -> list[Path]:
    """List the folders of this process's cgroups, each with those above it."""
    text = _read_text(top / "proc/self/cgroup") or ""
    base = top / "sys/fs/cgroup"
    folders: dict[Path, None] = {}  # in order, each once: "cpu" may be a link
    for line in text.splitlines():
        # "4:cpu,cpuacct:/api" in version 1, "0::/api" in version 2.
        _, controllers, inner = [*line.split(":", 2), "", ""][:3]
        names = set(controllers.split(","))
        mounts = [base]
        if controllers:
            # Version 1 has a hierarchy for every controller, often eleven, and only
            # these two hold what is read here.  Looking for it in all of them took
            # 40 % of the time of building a loader.
            if names.isdisjoint({"cpu", "memory"}):
                continue
            # It mounts each controller apart, or "cpu,cpuacct" as one folder.
            mounts = [base / name for name in (*sorted(names), controllers)]
        for mount in mounts:
            folders.update(
                dict.fromkeys(_folders_up_to(mount.resolve(), inner.lstrip("/")))
            )
    return list(folders)


def _folders_up_to(mount: Path, inner: str) -> Iterator[Path]:
    """List a cgroup's folder and those above it, as far as they are mounted here.

    A container sees the name that its cgroup has outside; only the folders above may be
    there, and the limit of each holds.
    """
    folder = (mount / inner).resolve()
    while folder != mount and folder.is_relative_to(mount):
        yield folder
        folder = folder.parent
    if mount.is_dir():
        yield mount


def _usable_cpus(groups: list[Path]) -> tuple[int, CpuLimit]:
    """Count the processors that may be kept busy, and say which limit that is."""
    limits: list[tuple[float, CpuLimit]] = []
    limits.append((float(os.cpu_count() or 1), "the machine"))
    if hasattr(os, "sched_getaffinity"):
        limits.append((float(len(os.sched_getaffinity(0))), "affinity"))
    slurm_cpus = _environment_count("SLURM_CPUS_PER_TASK")
    if slurm_cpus:
        limits.append((float(slurm_cpus), "SLURM"))
    for group in groups:
        quota = _cpu_quota(group)
        if quota is not None:
            limits.append((quota, "cgroup quota"))
    count, name = min(limits, key=lambda limit: limit[0])
    return max(1, int(count)), name


def _cpu_quota(group: Path) -> float | None:
    """Read how many processors' time a cgroup may use; None for no limit."""
    # Version 2 writes "<quota> <period>" in microseconds, or "max <period>".
    words = (_read_text(group / "cpu.max") or "").split()
    if len(words) == 2 and words[0].isdigit() and int(words[1]):
        return int(words[0]) / int(words[1])
    # Version 1 has a file for each, and a quota of -1 for no limit.
    quota = _read_number(group / "cpu.cfs_quota_us")
    period = _read_number(group / "cpu.cfs_period_us")
    if not quota or not period or quota < 0:
        return None
    return quota / period


class _GroupMemory(NamedTuple):
    """What cgroups allow; each None where it is not known."""

    limit_bytes: int | None
    """The tightest limit."""
    used_bytes: int | None
    """What the group with that limit uses."""
    left_bytes: int | None
    """What is left below any limit, which need not be the tightest one."""


def _tightest_memory(groups: list[Path]) -> _GroupMemory:
    """Find the tightest limit, its use, and what is left below any limit.

    File pages can go, so they count as left.
    """
    tightest = _GroupMemory(None, None, None)
    least_left: int | None = None
    for group in groups:
        limit_bytes = _memory_limit(group)
        if limit_bytes is None:
            continue
        used_bytes = _read_number(group / "memory.current")
        if used_bytes is None:
            used_bytes = _read_number(group / "memory.usage_in_bytes")
        if tightest.limit_bytes is None or limit_bytes < tightest.limit_bytes:
            tightest = _GroupMemory(limit_bytes, used_bytes, None)
        if used_bytes is not None:
            left_bytes = max(0, limit_bytes - used_bytes + _reclaimable_bytes(group))
            if least_left is None or left_bytes < least_left:
                least_left = left_bytes
    return tightest._replace(left_bytes=least_left)


def _memory_limit(group: Path) -> int | None:
    """Read the memory that a cgroup may use; None for no limit."""
    files = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [_read_number(group / file) for file in files]
    return min(
        (limit for limit in limits if limit is not None and limit < _UNLIMITED),
        default=None,
    )


def _reclaimable_bytes(group: Path) -> int:
    """Add up the pages of files, which the kernel drops before it kills."""
    text = _read_text(group / "memory.stat") or ""
    statistics = dict(re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE))
    total_bytes = 0
    for name in ("inactive_file", "active_file"):
        # Version 1 counts the groups below apart, as "total_...".
        total_bytes += int(statistics.get(f"total_{name}") or statistics.get(name) or 0)
    return total_bytes


def _count_oom_kills(groups: list[Path]) -> int | None:
    """Read how many processes of the innermost cgroup that tells were killed."""
    for group in groups:
        for name in ("memory.events", "memory.oom_control"):
            text = _read_text(group / name) or ""
            match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
            if match:
                return int(match[1])
    return None


def _memory_pressure(top: Path, groups: list[Path]) -> float | None:
    """Read the share of time in which tasks waited, of the innermost that tells."""
    files = [group / "memory.pressure" for group in groups]
    files.append(top / "proc/pressure/memory")
    for file in files:
        text = _read_text(file) or ""
        match = re.search(r"^some avg10=([\d.]+)", text, re.MULTILINE)
        if match:
            return float(match[1])
    return None


def _folder_space(folder: Path) -> tuple[int | None, int | None]:
    """Ask a file system for its size and what is free of it."""
    if not folder.is_dir():
        return None, None
    try:
        usage = psutil.disk_usage(str(folder))
    except OSError:
        return None, None
    return int(usage.total), int(usage.free)


def _file_limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _count_open_files() -> int:
    process = psutil.Process()
    return int(process.num_fds()) if hasattr(process, "num_fds") else 0


def _environment_count(name: str) -> int | None:
    """Read a variable; None where it is not set, or says what it cannot."""
    try:
        return _read_count(name, os.environ.get(name, ""))
    except VariableError:
        return None


def _read_number(file: Path) -> int | None:
    text = (_read_text(file) or "").strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _read_text(file: Path) -> str | None:
    # What cannot be read is unknown: a container may hide any of these files.
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text()
    return None
