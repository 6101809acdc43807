"""The limits of a process and the abilities of a device, as values.  Pure.

``host`` and ``probes`` read them.  They are here so that code that only decides can
take them without importing torch or psutil.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

CpuLimit: TypeAlias = Literal["the machine", "affinity", "SLURM", "cgroup quota"]
MemoryLimit: TypeAlias = Literal["cgroup", "the machine"]


@dataclass(frozen=True)
class Host:
    """The limits of this process, read once."""

    cpus: int
    """Processors it may keep busy, at least 1."""
    cpus_from: CpuLimit
    """Which limit that is."""
    available_bytes: int
    """Memory that can still be used before something is killed."""
    available_from: MemoryLimit
    """Which limit that is."""
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


@dataclass(frozen=True)
class Capability:
    """What a device can do for a loader."""

    device: str
    """As torch writes it, such as "cuda:0"."""
    pins: bool
    """Copies from page-locked memory are faster."""
    asynchronous: bool
    """Copies can run beside the computing, on a stream of their own."""
    unified: bool
    """Its memory is the host's: what a batch takes there is missing here."""
    started: bool
    """Its driver is in use by this process, which a forked child must not touch."""
