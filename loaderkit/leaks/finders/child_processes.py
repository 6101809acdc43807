"""Finds child processes that grow, and says which worker of which loader each is."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING

from loaderkit.leaks.growth import Growth
from loaderkit.memory import process
from loaderkit.memory.counters import WorkerName

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loaderkit.leaks.finders.evidence import CounterEvidence


def find_growing_children(evidence: CounterEvidence) -> list[Growth]:
    """Name the child processes whose private memory leaks.

    Args:
        evidence: Counters that leak.

    Returns:
        A growth a process.
    """
    growths = []
    for name, trend in evidence.leaking.items():
        if isinstance(name, WorkerName):
            description = f"child process {name.pid} ({describe_worker(name.pid)})"
            growths.append(Growth("worker", description, "", 0, round(trend.per_epoch)))
    return growths


def describe_worker(pid: int) -> str:
    """Say what a child process is.

    Args:
        pid: Its number.

    Returns:
        "worker 0 of the DataLoader over Pockets" if it is one, else its command line.
    """
    # torch has no public way from a process to its loader.  By name, since a loader
    # may come from another library that copied the class.
    for item in gc.get_objects():
        if type(item).__name__ == "_MultiProcessingDataLoaderIter":
            workers = getattr(item, "_workers", ())
            pids = [getattr(worker, "pid", None) for worker in workers]
            if pid in pids:
                names = dict.fromkeys(_users_classes(getattr(item, "_dataset", None)))
                number = pids.index(pid)
                return f"worker {number} of the DataLoader over {' and '.join(names)}"
    return process.process_name(pid)


_LIBRARIES = ("torch", "loaderkit")
"""What of theirs stands around datasets: subsets, concatenations, our batches."""


def _users_classes(dataset: object) -> Iterator[str]:
    """Give the classes whose code a worker runs: those of the user's, within others."""
    kind = type(dataset)
    is_library = kind.__module__.partition(".")[0] in _LIBRARIES
    # Of torch's classes: Subset has one, ConcatDataset and ChainDataset have a list,
    # StackDataset has a tuple or a dict.
    inner = getattr(dataset, "dataset", None) if is_library else None
    members = getattr(dataset, "datasets", None) if is_library else None
    if isinstance(members, Mapping):
        members = list(members.values())
    if inner is not None:
        yield from _users_classes(inner)
    elif isinstance(members, list | tuple) and members:
        for member in members:
            yield from _users_classes(member)
    else:
        yield kind.__name__
