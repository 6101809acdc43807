"""The names of everything we count, in which unit, and in words.  Pure.

A name is a ``Literal`` and no enum: it reads as itself in JSON, in a table and in
``sample.values["malloc"]``, and a type checker still refuses one that does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Self

CounterName: TypeAlias = Literal[
    "malloc",
    "malloc_free",
    "anonymous",
    "shared",
    "file_backed",
    "resident",
    "python_blocks",
    "files",
    "regular_files",
    "pipes",
    "sockets",
    "threads",
    "children",
    "mappings",
    "mappings_limit",
    "tree_anonymous",
    "private",
    "proportional",
    "tree_private",
    "tree_proportional",
    "shm_used",
    "shm_files",
    "group_used",
    "group_limit",
    "oom_kills",
    "tensors",
    "tensor_bytes",
    "pinned",
    "allocated",
    "reserved",
    "driver",
    "device_used",
    "device_free",
    "device_limit",
    "peak",
    "inactive_split",
    "largest_free",
]
"""One thing that can be counted, of this process, its machine or its device."""


class WorkerName(str):
    """The private memory of one child process, by its number: "worker 1234"."""

    __slots__ = ()

    @classmethod
    def of(cls, pid: int) -> Self:
        """Name the counter of the process with this number.

        >>> WorkerName.of(1234), WorkerName.of(1234).pid
        ('worker 1234', 1234)
        """
        return cls(f"worker {pid}")

    @property
    def pid(self) -> int:
        """The number of the process."""
        return int(self.rpartition(" ")[2])


AnyCounter: TypeAlias = CounterName | WorkerName
Readings: TypeAlias = Mapping[CounterName, int]
"""What was read at one moment; a counter that could not be read is not in it."""
Unit: TypeAlias = Literal[
    "bytes", "blocks", "descriptors", "threads", "processes", "mappings", "tensors"
]


@dataclass(frozen=True)
class CounterInfo:
    """What a counter counts."""

    words: str
    """What it is, as a report says it."""
    unit: Unit = "bytes"
    """"bytes" or the plural of what is counted."""
    judged: bool = False
    """A leak detector looks at it: it should be flat from epoch to epoch."""


# Judged are those that stay flat in a program that holds as much after each epoch as
# before it.  Others move by themselves: the kernel and malloc take back what they like
# (file_backed, malloc_free), and other programs come and go (shm_used).  Others again
# would say a second time what one that is judged says (regular_files, of files).
COUNTERS: Mapping[CounterName, CounterInfo] = {
    "malloc": CounterInfo("memory that malloc gave out and nobody freed", judged=True),
    "malloc_free": CounterInfo("memory that malloc keeps for later"),
    "anonymous": CounterInfo("private memory (RssAnon)", judged=True),
    "shared": CounterInfo("shared memory (RssShmem)", judged=True),
    "file_backed": CounterInfo(
        "pages of mapped files (RssFile), which can go any time"
    ),
    "resident": CounterInfo("resident memory (RSS), not told apart", judged=True),
    "python_blocks": CounterInfo("small Python objects", "blocks", judged=True),
    "files": CounterInfo("open files, pipes and sockets", "descriptors", judged=True),
    "regular_files": CounterInfo("of these, files", "descriptors"),
    "pipes": CounterInfo("of these, pipes", "descriptors"),
    "sockets": CounterInfo("of these, sockets", "descriptors"),
    "threads": CounterInfo("running in this process", "threads", judged=True),
    "children": CounterInfo("running below this process", "processes", judged=True),
    "mappings": CounterInfo(
        "of memory and files; vm.max_map_count limits them", "mappings", judged=True
    ),
    "mappings_limit": CounterInfo("allowed (vm.max_map_count)", "mappings"),
    "tree_anonymous": CounterInfo("private memory of the child processes"),
    "private": CounterInfo("memory that only this process has (USS)"),
    "proportional": CounterInfo("this process's share of memory (PSS)"),
    "tree_private": CounterInfo("USS of this process and its children"),
    "tree_proportional": CounterInfo("PSS of this process and its children"),
    "shm_used": CounterInfo("taken in /dev/shm, by anybody"),
    "shm_files": CounterInfo("files left in /dev/shm since the start", judged=True),
    "group_used": CounterInfo("used by the cgroup"),
    "group_limit": CounterInfo("limit of the cgroup"),
    "oom_kills": CounterInfo("processes the kernel killed for memory", "processes"),
    "tensors": CounterInfo("that Python can reach", "tensors"),
    "tensor_bytes": CounterInfo("live tensors, each storage once"),
    "pinned": CounterInfo("page-locked host memory", judged=True),
    "allocated": CounterInfo("tensors on the device", judged=True),
    "reserved": CounterInfo("taken from the device by torch's allocator", judged=True),
    "driver": CounterInfo("taken from the device by this process", judged=True),
    "device_used": CounterInfo("taken on the device, by anybody", judged=True),
    "device_free": CounterInfo("free on the device"),
    "device_limit": CounterInfo("memory of the device"),
    "peak": CounterInfo("most that was allocated on the device"),
    "inactive_split": CounterInfo("free, but in pieces between used ones"),
    "largest_free": CounterInfo("largest piece that is free in torch's cache"),
}
"""In the order in which a table shows them."""


def unit_of(name: AnyCounter) -> Unit:
    """Tell the unit of a counter.

    Args:
        name: One of :data:`COUNTERS`, or a worker's.

    Returns:
        "bytes", or the plural of what is counted.
    """
    return "bytes" if isinstance(name, WorkerName) else COUNTERS[name].unit


def words_of(name: AnyCounter) -> str:
    """Tell in words what a counter counts.

    Args:
        name: One of :data:`COUNTERS`, or a worker's.

    Returns:
        A noun phrase.
    """
    if isinstance(name, WorkerName):
        return f"private memory of {name}"
    return COUNTERS[name].words


def is_judged(name: AnyCounter) -> bool:
    """Tell whether a leak detector looks at a counter."""
    # A worker's counter is the private memory of a process, as "anonymous" is.
    return isinstance(name, WorkerName) or COUNTERS[name].judged
