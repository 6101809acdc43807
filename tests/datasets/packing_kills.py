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
from process_family import Family, family_of, sleeps

FORK = multiprocessing.get_context("fork")
SHARD_BYTES = 300_000
MOST_IDLE_LOOKS_OF_ORPHANS = 500
"""Workers that outlive a killed parent notice it in a moment: a third of the patience
with a run."""


@dataclass(frozen=True)
class Kill:
    """One kill of one process of a run."""

    workers: int
    method: str
    """How workers are started."""
    after_s: float
    """Seconds after the run began, or after its workers were started."""
    victim: float
    """From 0 to 1: which of the processes that live then, the packing one first."""
    spans: int = 0
    """Pack a stream of so many spans; 0 packs by number."""
    signal: int = signal.SIGKILL
    pause_s: float = 0.002
    """What a sample of the run takes."""
    waits_for_workers: bool = False
    """Until the packing process has started all and waits for them."""
    waits_for_signal: bool = False
    """The run begins before time is counted, and cannot end before the signal."""
    to_group: bool = False
    """The signal goes to all processes of the run, as from a terminal."""


class Slow:
    """Samples that take a moment each, as those of a real dataset."""

    def __init__(self, pause_s):
        self._rows, self._pause_s = samples(COUNT, 2), pause_s

    def __len__(self):
        return 3 * COUNT

    def __getitem__(self, row):
        time.sleep(self._pause_s)
        return self._rows[row % COUNT]


class Gated(Slow):
    """Samples that cannot be read before something is there."""

    def __init__(self, gate, pause_s):
        super().__init__(pause_s)
        self._gate = gate

    def __getitem__(self, row):
        while not self._gate.exists():
            time.sleep(0.001)
        return super().__getitem__(row)


class GatedSpans(Gated):
    """The same samples, read in order."""

    def __call__(self, span, spans):
        return (self[row] for row in range(span, len(self), spans))


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
    # What a background job starts ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # pytest makes errors of warnings; Python warns when its resource tracker is killed.
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method(kill.method, force=True)
    source = Slow(kill.pause_s)
    options = {"overwrite": True, "shard_bytes": SHARD_BYTES}
    if kill.waits_for_signal:
        kind = GatedSpans if kill.spans else Gated
        source = kind(sent_file(path), kill.pause_s)
    elif kill.spans:
        source = SlowSpans(kill.pause_s)
    if kill.spans:
        options["spans"] = kill.spans
    try:
        begun_file(path).touch()
        pack(source, path, workers=kill.workers, **options)
    except LoaderkitError:
        os._exit(1)
    except BaseException as error:  # noqa: BLE001
        text = f"{type(error).__name__}: {error}"
        # Here, and not when this process has ended: a notebook's lives on.
        workers_left = len(multiprocessing.active_children())
        if workers_left:
            text += f", and {workers_left} workers live on"
        (path.parent / "raw-error").write_text(text)
        os._exit(2)
    os._exit(0)


def begun_file(path):
    """There once a run has begun."""
    return path.parent / "begun"


def sent_file(path):
    """There once the signal was sent."""
    return path.parent / "sent"


def waits_for_its_workers(pid, workers):
    """Whether a packing process has started its workers, and does nothing else."""
    processes = family_of(pid)
    return len(processes) > workers and sleeps(processes[0])


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

    begun_file(path).unlink(missing_ok=True)
    sent_file(path).unlink(missing_ok=True)
    run = FORK.Process(target=pack_slowly, args=(path, kill))
    run.start()
    while kill.waits_for_signal and not begun_file(path).exists():
        time.sleep(0.001)
    while kill.waits_for_workers and not waits_for_its_workers(run.pid, kill.workers):
        time.sleep(0.01)
    time.sleep(kill.after_s)
    processes = family_of(run.pid)
    if processes:
        victim = processes[int(kill.victim * len(processes))]
        with contextlib.suppress(psutil.NoSuchProcess):
            if kill.to_group:
                os.killpg(run.pid, kill.signal)
            else:
                victim.send_signal(kill.signal)
    sent_file(path).touch()

    family = Family(run.pid, processes)
    if not family.wait_while(run.is_alive):
        broken.append("it hangs: its processes only wait")
        run.kill()
    run.join()
    ended = {0: "ok", 1: "error of ours", -9: "killed", -15: "ended"}.get(run.exitcode)
    if ended is None:
        broken.append(f"it ended with status {run.exitcode}")
        with contextlib.suppress(FileNotFoundError):
            broken.append((path.parent / "raw-error").read_text())

    # Workers may outlive a killed parent for a moment, until they notice.
    family.wait_while(family.living, MOST_IDLE_LOOKS_OF_ORPHANS)
    for process in family.living():
        broken.append(f"an orphan lives on: {process.cmdline()}")
        process.kill()

    again = FORK.Process(
        target=pack_slowly, args=(path, replace(kill, workers=0, method="fork"))
    )
    again.start()
    if not Family(again.pid).wait_while(again.is_alive):
        broken.append("the next run hangs: its processes only wait")
        again.kill()
    again.join()
    if again.exitcode != 0:
        broken.append(f"the next run ended with status {again.exitcode}")
    elif files_of(path) != wanted:
        broken.append("the next run left other files")
    elif (path / ".building").exists():
        broken.append("the next run left .building")
    return ended, broken
