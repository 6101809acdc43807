"""Finds child processes that grow, and says which worker of which loader each is."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from loaderkit.leaks.growth import Growth
from loaderkit.memory import process
from loaderkit.memory.counters import WorkerName

if TYPE_CHECKING:
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
            what = f"child process {name.pid} ({describe_worker(name.pid)})"
            growths.append(Growth("worker", what, "", 0, round(trend.per_epoch)))
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
                dataset = type(getattr(item, "_dataset", None)).__name__
                return f"worker {pids.index(pid)} of the DataLoader over {dataset}"
    return process.process_name(pid)
