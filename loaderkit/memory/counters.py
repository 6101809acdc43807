"""The names of everything we count, in which unit, and in words.  Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counter:
    """One thing that can be counted."""

    words: str
    """What it is, as a report says it."""
    unit: str = "bytes"
    """"bytes" or the plural of what is counted."""
    judged: bool = False
    """A leak detector looks at it: it should be flat from epoch to epoch."""


COUNTERS = {
    "malloc": Counter("memory that malloc gave out and nobody freed", judged=True),
    "anonymous": Counter("private memory (RssAnon)", judged=True),
    "shared": Counter("shared memory (RssShmem)", judged=True),
    "file_backed": Counter("pages of mapped files (RssFile), which can go any time"),
    "resident": Counter("resident memory (RSS), not told apart", judged=True),
    "python_blocks": Counter("small Python objects", "blocks", judged=True),
    "files": Counter("open files, pipes and sockets", "descriptors", judged=True),
    "regular_files": Counter("of these, files", "descriptors"),
    "pipes": Counter("of these, pipes", "descriptors"),
    "sockets": Counter("of these, sockets", "descriptors"),
    "threads": Counter("running in this process", "threads", judged=True),
    "children": Counter("running below this process", "processes", judged=True),
    "mappings": Counter(
        "of memory and files; vm.max_map_count limits them", "mappings", judged=True
    ),
    "mappings_limit": Counter("allowed (vm.max_map_count)", "mappings"),
    "tree_anonymous": Counter("private memory of the child processes"),
    "private": Counter("memory that only this process has (USS)"),
    "proportional": Counter("this process's share of memory (PSS)"),
    "tree_private": Counter("USS of this process and its children"),
    "tree_proportional": Counter("PSS of this process and its children"),
    "shm_used": Counter("taken in /dev/shm, by anybody"),
    "shm_files": Counter("files left in /dev/shm since the start", judged=True),
    "group_used": Counter("used by the cgroup"),
    "group_limit": Counter("limit of the cgroup"),
    "oom_kills": Counter("processes the kernel killed for memory", "processes"),
    "tensors": Counter("that Python can reach", "tensors"),
    "tensor_bytes": Counter("live tensors, each storage once"),
    "pinned": Counter("page-locked host memory", judged=True),
    "allocated": Counter("tensors on the device", judged=True),
    "reserved": Counter("taken from the device by torch's allocator", judged=True),
    "driver": Counter("taken from the device by this process", judged=True),
    "device_used": Counter("taken on the device, by anybody", judged=True),
    "device_free": Counter("free on the device"),
    "device_limit": Counter("memory of the device"),
    "peak": Counter("most that was allocated on the device"),
    "inactive_split": Counter("free, but in pieces between used ones"),
    "largest_free": Counter("largest piece that is free in torch's cache"),
}
"""In the order in which a table shows them."""


def unit_of(name: str) -> str:
    """Tell the unit of a counter.

    Args:
        name: One of :data:`COUNTERS`, or a worker's counter such as "worker 12".

    Returns:
        "bytes", or the plural of what is counted.
    """
    return COUNTERS[name].unit if name in COUNTERS else "bytes"


def words_of(name: str) -> str:
    """Tell in words what a counter counts.

    Args:
        name: One of :data:`COUNTERS`, or a worker's counter such as "worker 12".

    Returns:
        A noun phrase.
    """
    return COUNTERS[name].words if name in COUNTERS else f"private memory of {name}"
