"""The processes of a run: which they are, who lives, and whether the run hangs."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil

LOOK_S = 0.02
MOST_IDLE_LOOKS = 1500
"""A run hangs when its processes idle at so many looks in a row: half a minute on an
idle machine.  Looks are counted, not seconds: where others compute, ours wait too."""


class Family:
    """The processes of a run, also those that outlive it."""

    def __init__(self, pid, processes=()):
        self._pid, self._processes = pid, set(processes)

    def wait_while(self, goes_on, most_idle_looks=MOST_IDLE_LOOKS):
        """Wait for the end of something, as long as the processes get on with it.

        Returns:
            Whether it ended; False where the processes only wait.
        """
        last_cpu_s, idle_looks = -1.0, 0
        while goes_on():
            if idle_looks == most_idle_looks:
                return False
            time.sleep(LOOK_S)
            # Those that are known stay known: an orphan has no parent to be found by.
            self._processes.update(family_of(self._pid))
            cpu_s = sum(map(cpu_seconds, self._processes))
            is_idle = cpu_s == last_cpu_s and all(map(sleeps, self._processes))
            idle_looks = idle_looks + 1 if is_idle else 0
            last_cpu_s = cpu_s
        return True

    def living(self):
        """Those that have not ended."""
        return [process for process in self._processes if is_alive(process)]


def family_of(pid):
    """The processes of a run, the first of them first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        if Path(f"/proc/{pid}/task/{pid}/children").exists():
            return [top, *descendants_by_proc(pid)]
        return [top, *top.children(recursive=True)]
    return []


def descendants_by_proc(pid):
    """The children of a process, and theirs.

    psutil looks at every process of the machine to find them, which takes four times as
    long on a machine of 130.
    """
    descendants = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread, or the process, may end meanwhile.
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    descendants.append(psutil.Process(child))
                descendants += descendants_by_proc(child)
    return descendants


def is_alive(process):
    """Whether it runs, and is not only waiting for its parent to ask how it ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def sleeps(process):
    """Whether it waits for something other than a processor or the disk."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() not in {psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP}
    return True


def cpu_seconds(process):
    """What a process has computed; 0 when it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return times.user + times.system
    return 0.0
