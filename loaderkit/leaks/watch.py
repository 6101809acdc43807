"""Reads the counters after each epoch, and takes itself out of them."""

from __future__ import annotations

import bisect
import contextlib
import gc
import time
from array import array
from collections import Counter
from typing import TYPE_CHECKING

from loaderkit.leaks.census import Census, take_census
from loaderkit.leaks.lows import keeps_rising
from loaderkit.leaks.resources import kinds_of
from loaderkit.leaks.shared_files import SharedFiles
from loaderkit.leaks.throttle import Throttle
from loaderkit.leaks.trace import live_blocks
from loaderkit.leaks.unrooted import count_outside
from loaderkit.leaks.verdict import WORKER
from loaderkit.memory import process
from loaderkit.memory.counters import COUNTERS
from loaderkit.memory.probes import read_device, read_device_used

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from loaderkit.leaks.trace import Blocks
    from loaderkit.leaks.verdict import Series

_EXACT = ("malloc", "python_blocks")
"""Counters from which a census can be subtracted; resident pages are used again."""
_WORKERS = 64
"""Child processes that are followed one by one."""
_HELPERS = (b"multiprocessing.resource_tracker",)
"""Not the fork server: workers that it forks have its command line."""
_WORKERS_FREE_S = 0.0005
"""What reading all of them may take every epoch; each takes 0.05 ms."""
_SUSPICIOUS_BLOCKS = 128
"""Growth an epoch that is looked into; half of what would be called a leak."""
_RESIDENT = {"anonymous", "resident"}
"""Counters that jitter with free pages: they ask for no census where malloc tells."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's collector from running by itself.

    What we make would have it run, and what it frees of the user's garbage would be
    subtracted from the readings as if it had been ours.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Watch:
    """The readings of one run."""

    def __init__(self, device: torch.device, tolerance: int) -> None:
        self.device = device
        self.epoch = 0
        self._suspicious = {"bytes": tolerance / 2, "blocks": _SUSPICIOUS_BLOCKS}
        """Growth an epoch that is looked into, by unit."""
        self.censuses: list[Census] = []
        """The last two."""
        self.collected_epoch: int | None = None
        """The epoch after which garbage was collected first, for the first census."""
        self.files: Counter[str] = Counter()
        """Open when it started."""
        self.outside_counts = count_outside()
        """Exit handlers and frozen objects when it started."""
        self.shared_files = SharedFiles()
        self.begun = time.monotonic()
        self._epochs: dict[str, array[float]] = {}
        self._values: dict[str, array[float]] = {}
        self._offsets: dict[str, int] = {}
        self.starting_until: dict[str, int] = {}
        """The last epoch in which a child process was still starting up, by counter."""
        self._started: set[int] = set()
        self._throttle = Throttle()
        self._workers_throttle = Throttle(free_s=_WORKERS_FREE_S)
        self._own_s = 0.0

    def start(self) -> None:
        """Take the reading before the first epoch.

        Garbage from before is not collected yet: that takes 0.1 s, as long as five
        steps, and is of use only when memory grows.
        """
        self.files = kinds_of("files")
        self.outside_counts = count_outside()
        self._note(self._read())
        self.begun = self._ended = time.monotonic()

    def end_epoch(self) -> None:
        """Take the reading after an epoch; up to 1 ms, or 0.4 s when memory grows."""
        begun = time.monotonic()
        self.epoch += 1
        self._note(self._read())
        last = self.censuses[-1].epoch if self.censuses else 1
        if self.epoch >= 2 * last and self._grows():
            self.count_objects()
        self._ended = time.monotonic()
        self._own_s += self._ended - begun

    def seconds_per_epoch(self) -> float:
        """Give how long an epoch took, without the readings."""
        return (self._ended - self.begun - self._own_s) / max(1, self.epoch)

    def count_objects(self) -> None:
        """Take a census, whose own memory is then subtracted from all readings.

        Garbage from before the run goes first, and is subtracted too: else what the
        collector frees at the end could not be told from what grew.
        """
        is_on = gc.isenabled()
        with collector_paused(), self.own_memory():
            if not self.censuses and is_on:
                gc.collect()
                self.collected_epoch = self.epoch
            self.censuses = [*self.censuses[-1:], take_census(self.epoch)]
            self.censuses[-1].blocks = self.recorded_blocks()

    @contextlib.contextmanager
    def own_memory(self) -> Iterator[None]:
        """Subtract from all readings what is taken within: it is ours, and no jump."""
        before = process.quick_counters()
        try:
            yield
        finally:
            after = process.quick_counters()
            for name in _EXACT:
                if name in after:
                    change = after[name] - before[name]
                    self._offsets[name] = self._offsets.get(name, 0) + change

    def census(self) -> Census | None:
        """Give the latest census that is old enough to tell what came since.

        A quarter of the run is, if there is one: in two epochs nothing may have come of
        what is kept every fifth.
        """
        for age in (self.epoch / 4, 2):
            old = [each for each in self.censuses if each.epoch <= self.epoch - age]
            if old:
                return old[-1]
        return None

    def recorded_blocks(self) -> Blocks:
        """Give the device's memory by who asked for it, if somebody records that."""
        if self.last("allocated") is None:
            return {}
        blocks = live_blocks(self.device)
        return blocks if any(blocks) else {}

    def series(self) -> dict[str, Series]:
        """Give all readings by counter."""
        found: dict[str, Series] = {
            name: (self._epochs[name], values)
            for name, values in self._values.items()
            if not (name.startswith(WORKER) and _is_helper(name))
        }
        shared_files = self.shared_files.series()
        if len(shared_files[0]):
            found["shm_files"] = shared_files
        return found

    def last(self, name: str) -> float | None:
        """Look up a counter's last reading."""
        return self._values[name][-1] if name in self._values else None

    def may_leak(self) -> bool:
        """Tell, at the cost of a glance, whether the second half brought anything."""
        for name, (_, values) in self.series().items():
            middle = len(values) // 2
            unit = "bytes" if name.startswith(WORKER) else COUNTERS[name].unit
            least = self._suspicious.get(unit, 0.25)
            if values[-1] - values[middle] > least * (len(values) - 1 - middle):
                return True
        return False

    def used_bytes(self) -> float:
        """Give what counts against the limit: of the device, else of the process."""
        allocated = self.last("allocated")
        if allocated is not None:
            return allocated
        return sum(self.last(name) or 0 for name in ("anonymous", "shared", "resident"))

    def own_objects(self) -> list[object]:
        """List what grows because we watch."""
        arrays = [
            part
            for each in self.censuses
            for part in (each.ids, each.lengths, each.tensor_ids)
        ]
        own: list[object] = [self._epochs, self._values, self._offsets, *arrays]
        own += [self.starting_until, self._started]
        return own + self.shared_files.own_objects()

    def quick(self) -> dict[str, int]:
        """Read the host's counters, without what the censuses keep."""
        found = process.quick_counters()
        for name, offset in self._offsets.items():
            if name in found:
                found[name] -= offset
        return found

    def _read(self) -> dict[str, int]:
        found = self.quick()
        found |= read_device(self.device, full=False)[0]
        is_sparse = self._is_sparse()
        self.shared_files.note(self.epoch, always=is_sparse)
        if is_sparse or self._throttle.due:
            with self._throttle:
                count = process.mappings()
                if count is not None:
                    found["mappings"] = count
                used = read_device_used(self.device)
                if used is not None:
                    found["device_used"] = used
        if is_sparse or self._workers_throttle.due:
            with self._workers_throttle:
                found |= self._read_workers()
        return found

    def _read_workers(self) -> dict[str, int]:
        """Read the resident memory of child processes.

        Not their own pages (USS): a forked worker's become more for as long as it
        copies its parent's, by 60 KiB an epoch in a worker that keeps nothing.
        """
        found = {}
        for pid in process.children_of(process.own_pid())[:_WORKERS]:
            size = process.process_anonymous(pid)
            if size is not None:
                found[f"{WORKER}{pid}"] = size
                self._note_start_up(pid)
        return found

    def _note_start_up(self, pid: int) -> None:
        """Note that a child process is still importing, until it no longer is."""
        if pid in self._started:
            return
        if process.is_starting_up(pid):
            self.starting_until[f"{WORKER}{pid}"] = self.epoch
        else:
            self._started.add(pid)

    def _is_sparse(self) -> bool:
        """Tell whether this epoch is one of the few that are read in any case."""
        step = 1 if self.epoch <= 2 else 2 if self.epoch <= 8 else 4
        return self.epoch <= 60 and self.epoch % step == 0

    def _note(self, found: dict[str, int]) -> None:
        for name, value in found.items():
            if name not in self._values:
                if not (name.startswith(WORKER) or COUNTERS[name].judged):
                    continue
                self._epochs[name], self._values[name] = array("d"), array("d")
            self._epochs[name].append(self.epoch)
            self._values[name].append(value)
        if self.epoch > 8:
            self._forget_the_gone()

    def _forget_the_gone(self) -> None:
        """Drop workers that lived for an epoch or two: each epoch has new ones."""
        for name in [n for n in self._values if n.startswith(WORKER)]:
            epochs = self._epochs[name]
            if epochs[-1] < self.epoch and len(epochs) < 5:
                del self._epochs[name], self._values[name]
                self.starting_until.pop(name, None)
                self._started.discard(int(name.removeprefix(WORKER)))

    def _grows(self) -> bool:
        """Tell whether a counter keeps rising since the last census."""
        since = self.censuses[-1].epoch if self.censuses else 1
        for name, values in self._values.items():
            resident = name in _RESIDENT and "malloc" in self._values
            if resident or name.startswith(WORKER):
                continue
            least = self._suspicious.get(COUNTERS[name].unit, 0.5)
            # The reading after the first epoch is the first without its warm-up.
            first = bisect.bisect_left(self._epochs[name], since)
            if keeps_rising(values[first:], least):
                return True
        return False


def _is_helper(name: str) -> bool:
    """Tell whether a child is one of multiprocessing's own, not a worker.

    The resource tracker starts with the first shared memory, and its memory grows while
    it does: over many short epochs that looked like a leak.
    """
    command = process.command_of(int(name.removeprefix(WORKER)))
    return any(helper in command for helper in _HELPERS)
