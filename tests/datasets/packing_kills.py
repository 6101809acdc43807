"""Kill processes of a packing run at any moment, and look at what is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import warnings
from dataclasses import dataclass, replace

import psutil
from failing_calls import COUNT, files_of, samples

FORK = multiprocessing.get_context("fork")
MOST_IDLE_S = 30
"""A run hangs when none of its processes computes for so long.  The clock alone does
not tell: on a busy machine a spawned worker imports torch for half a minute."""
MOST_ORPHAN_IDLE_S = 10
SHARD_BYTES = 300_000


@dataclass(frozen=True)
class Kill:
    """One kill of one process of a run."""

    workers: int
    method: str
    """How workers are started."""
    after: float
    """Seconds after the run began."""
    victim: float
    """From 0 to 1: which of the processes that live then, the packing one first."""
    spans: int = 0
    """Pack a stream of so many spans; 0 packs by number."""
    signal: int = signal.SIGKILL


class Slow:
    """Samples that take a moment each, as those of a real dataset."""

    def __init__(self, pause_s):
        self._rows, self._pause_s = samples(COUNT, 2), pause_s

    def __len__(self):
        return 3 * COUNT

    def __getitem__(self, row):
        time.sleep(self._pause_s)
        return self._rows[row % COUNT]


class MadeOnlyHere(Slow):
    """Can be pickled, and made again in a process that was not started anew alone."""

    def __init__(self):
        super().__init__(0)

    def __setstate__(self, state):
        self.__dict__.update(state)
        if multiprocessing.current_process().name != "MainProcess":
            msg = "this machine's licence is in use"
            raise OSError(msg)


class SlowSpans(Slow):
    """The same samples, read in order."""

    def __call__(self, span, spans):
        return (self[row] for row in range(span, len(self), spans))


def pack_slowly(path, kill):
    """Pack; the exit status is 0, 1 for an error of ours, 2 for any other."""
    from loaderkit import pack
    from loaderkit.errors import LoaderkitError

    # Tracebacks of killed workers are not what is looked at here.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.setsid()
    # pytest makes errors of warnings; Python warns when its resource tracker is killed.
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method(kill.method, force=True)
    source, options = Slow(0.002), {"overwrite": True, "shard_bytes": SHARD_BYTES}
    if kill.spans:
        source, options["spans"] = SlowSpans(0.002), kill.spans
    try:
        pack(source, path, workers=kill.workers, **options)
    except LoaderkitError:
        os._exit(1)
    except BaseException as error:  # noqa: BLE001
        (path.parent / "raw-error").write_text(f"{type(error).__name__}: {error}")
        os._exit(2)
    os._exit(0)


def broken_laws(path, kill, wanted):
    """Start a run, kill one of its processes, pack again, and look.

    Args:
        path: Where; what an earlier run left there stays.
        kill: Which process, and when.
        wanted: The files of an undisturbed run.

    Returns:
        How the run ended, and a sentence for each law that it breaks.
    """
    broken = []

    run = FORK.Process(target=pack_slowly, args=(path, kill))
    run.start()
    time.sleep(kill.after)
    processes = family_of(run.pid)
    if processes:
        victim = processes[int(kill.victim * len(processes))]
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(kill.signal)

    family = Family(run.pid, processes)
    family.wait_while_it_computes(run.is_alive, MOST_IDLE_S)
    if run.exitcode is None:
        broken.append(f"it hangs: {MOST_IDLE_S} s without computing")
        run.kill()
        run.join()
    ended = {0: "ok", 1: "error of ours", -9: "killed", -15: "ended"}.get(run.exitcode)
    if ended is None:
        broken.append(f"it ended with status {run.exitcode}")
        with contextlib.suppress(FileNotFoundError):
            broken.append((path.parent / "raw-error").read_text())

    # Workers may outlive a killed parent for a moment, until they notice.
    family.wait_while_it_computes(family.living, MOST_ORPHAN_IDLE_S)
    for process in family.living():
        broken.append(f"an orphan lives on: {process.cmdline()}")
        process.kill()

    again = FORK.Process(
        target=pack_slowly, args=(path, replace(kill, workers=0, method="fork"))
    )
    again.start()
    Family(again.pid).wait_while_it_computes(again.is_alive, MOST_IDLE_S)
    if again.exitcode != 0:
        broken.append(f"the next run ended with status {again.exitcode}")
    elif files_of(path) != wanted:
        broken.append("the next run left other files")
    elif (path / ".building").exists():
        broken.append("the next run left .building")
    return ended, broken


class Family:
    """The processes of a run, also those that outlive it."""

    def __init__(self, pid, processes=()):
        self._pid, self._processes = pid, set(processes)

    def wait_while_it_computes(self, goes_on, most_idle_s):
        """Wait for the end of something, as long as the processes get on with it."""
        last_cpu_s = -1.0
        busy_at = time.monotonic()
        while goes_on() and time.monotonic() - busy_at < most_idle_s:
            time.sleep(0.02)
            # Those that are known stay known: an orphan has no parent to be found by.
            self._processes.update(family_of(self._pid))
            cpu_s = sum(map(cpu_seconds, self._processes))
            if cpu_s != last_cpu_s:
                last_cpu_s = cpu_s
                busy_at = time.monotonic()

    def living(self):
        """Those that have not ended."""
        return [process for process in self._processes if is_alive(process)]


def is_alive(process):
    """Whether it runs, and is not only waiting for its parent to ask how it ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def cpu_seconds(process):
    """What a process has computed; 0 when it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return times.user + times.system
    return 0.0


def family_of(pid):
    """The processes of a run, the packing one first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    return []
