"""Reads the counters after each epoch, and takes itself out of them."""

from __future__ import annotations

import bisect
import contextlib
import gc
import time
from collections import Counter
from typing import TYPE_CHECKING

from loaderkit.leaks.census import Census, take_census
from loaderkit.leaks.finders.resources import kinds_of
from loaderkit.leaks.lows import keeps_rising
from loaderkit.leaks.own_objects import KeptByDetector
from loaderkit.leaks.recorded_series import RecordedSeries
from loaderkit.leaks.shared_files import SharedFiles
from loaderkit.leaks.throttle import Throttle
from loaderkit.leaks.trace import live_blocks
from loaderkit.leaks.unrooted import count_outside
from loaderkit.memory import process
from loaderkit.memory.counters import WorkerName, is_judged, unit_of
from loaderkit.memory.probes import read_device, read_device_used, with_index

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from loaderkit.leaks.counter_trend import Series
    from loaderkit.leaks.trace import Blocks
    from loaderkit.memory.counters import AnyCounter, CounterName, Unit

_EXACT: tuple[CounterName, ...] = ("malloc", "python_blocks")
"""Counters from which a census can be subtracted; resident pages are used again."""
_EVIDENCE: frozenset[AnyCounter] = frozenset({"malloc_free"})
"""Counters that are recorded though they are not judged: a verdict asks for them."""
_MOST_WORKERS = 64
"""Child processes that are followed one by one."""
_HELPERS = (b"multiprocessing.resource_tracker",)
"""Not the fork server: workers that it forks have its command line."""
_WORKERS_FREE_S = 0.0005
"""What reading all of them may take every epoch; each takes 0.05 ms."""
_SLOW_SHARE = 0.0005
"""Of the time, for what takes long.  A tenth of what watching may cost in all: where
epochs take 0.2 s, mappings are then read in the sparse epochs alone."""
_READ_EACH_UNTIL = 8
"""Until then everything is read after each epoch: a test has no more, and from six on
each counter has the readings that a verdict needs."""
_SUSPICIOUS_BLOCKS = 128
"""Growth an epoch that is looked into; half of what would be called a leak."""
_SUSPICIOUS_OTHERS = 0.25
"""The same of descriptors, threads and their like."""
_JITTERING: frozenset[AnyCounter] = frozenset({"anonymous", "resident"})
"""Counters that jitter with free pages: they ask for no census where malloc tells."""
_FORGOTTEN_AFTER = 8
"""Epochs after which workers that are gone are forgotten: until then a worker that was
read seldom may live on."""
_FEWEST_READINGS = 5
"""Of such a worker: with fewer nothing could be said of it."""


class EpochRecorder(KeptByDetector):
    """The readings of one run.

    Args:
        device: Read beside the host.
        tolerance: Bytes an epoch that do not count as a leak.
    """

    def __init__(self, device: torch.device, tolerance: int) -> None:
        self._device = device
        self.epoch = 0
        self.censuses: list[Census] = []
        """The last two."""
        self.collected_epoch: int | None = None
        """The epoch after which garbage was collected first, for the first census."""
        self.files: Counter[str] = Counter()
        """Open when it started, by kind."""
        self.outside_counts = count_outside()
        """Exit handlers and frozen objects when it started."""
        self.shared_files = SharedFiles()
        self.begun = time.monotonic()
        self.starting_until: dict[WorkerName, int] = {}
        """The last epoch in which a child process was still starting up, by counter."""
        self._suspicious_growth: dict[Unit, float] = {
            "bytes": tolerance / 2,
            "blocks": _SUSPICIOUS_BLOCKS,
        }
        """Growth an epoch that is looked into."""
        self._recorded = RecordedSeries()
        self._own_bytes: dict[CounterName, int] = {}
        """What censuses and verdicts keep, by the counter in which it shows."""
        self._started_pids: set[int] = set()
        """Child processes that no longer import what they need."""
        self._throttle = Throttle(max_share=_SLOW_SHARE)
        self._virtual_pages: int | None = None
        self._mapping_count: int | None = None
        """Mappings when the address space had so many pages."""
        self._workers_throttle = Throttle(free_s=_WORKERS_FREE_S)
        self._own_s = 0.0
        """Seconds that the readings took."""
        self.collects_by_itself = gc.isenabled()
        """Whether Python's collector runs by itself, as the user has set it."""
        self._pauses = 0
        """How many ``with collector_paused()`` are entered now."""

    @property
    def device(self) -> torch.device:
        """What is read beside the host.

        "cuda" is the device that is current when the process first uses one, and stays
        that one, whatever is current later.
        """
        self._device = with_index(self._device)
        return self._device

    def start(self) -> None:
        """Take the reading before the first epoch.

        Garbage from before is not collected yet: that takes 0.1 s, as long as five
        steps, and is of use only when memory grows.
        """
        self.files = kinds_of("files")
        self.outside_counts = count_outside()
        self._record_readings(self._read_counters())
        self.begun = self._ended = time.monotonic()

    def end_epoch(self) -> None:
        """Take the reading after an epoch; up to 1 ms, or 0.4 s when memory grows."""
        begun = time.monotonic()
        self.epoch += 1
        self._record_readings(self._read_counters())
        last_census = self.censuses[-1].epoch if self.censuses else 1
        if self.epoch >= 2 * last_census and self._keeps_growing():
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
        with self.collector_paused(), self.own_memory():
            if not self.censuses and self.collects_by_itself:
                gc.collect()
                self.collected_epoch = self.epoch
            self.censuses = [*self.censuses[-1:], take_census(self.epoch)]
            self.censuses[-1].blocks = self.recorded_blocks()

    @contextlib.contextmanager
    def collector_paused(self) -> Iterator[None]:
        """Keep Python's collector from running by itself; may be entered again within.

        What we make would have it run, and what it frees of the user's garbage would be
        subtracted from the readings as if it had been ours.
        """
        if not self._pauses:
            self.collects_by_itself = gc.isenabled()
        self._pauses += 1
        gc.disable()
        try:
            yield
        finally:
            self._pauses -= 1
            if self.collects_by_itself and not self._pauses:
                gc.enable()

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
                    self._own_bytes[name] = self._own_bytes.get(name, 0) + change

    def census(self) -> Census | None:
        """Give the latest census that is old enough to tell what came since.

        A quarter of the run is, if there is one: in two epochs nothing may have come of
        what is kept every fifth.
        """
        for age in (self.epoch / 4, 2):
            old = [
                census for census in self.censuses if census.epoch <= self.epoch - age
            ]
            if old:
                return old[-1]
        return None

    def recorded_blocks(self) -> Blocks:
        """Give the device's memory by who asked for it, if somebody records that."""
        if self.last("allocated") is None:
            return {}
        blocks = live_blocks(self.device)
        return blocks if any(blocks) else {}

    def series(self) -> dict[AnyCounter, Series]:
        """Give all readings by counter."""
        series = {
            name: readings
            for name, readings in self._recorded.by_name().items()
            if not (isinstance(name, WorkerName) and _is_helper(name))
        }
        shared_files = self.shared_files.series()
        if len(shared_files[0]):
            series["shm_files"] = shared_files
        return series

    def last(self, name: CounterName) -> float | None:
        """Look up a counter's last reading."""
        return self._recorded.last(name)

    def might_leak(self) -> bool:
        """Tell, at the cost of a glance, whether the second half brought anything."""
        for name, (_, values) in self.series().items():
            middle = len(values) // 2
            epochs = len(values) - 1 - middle
            growth = values[-1] - values[middle]
            if is_judged(name) and growth > self._least_suspicious(name) * epochs:
                return True
        return False

    def used_bytes(self) -> float:
        """Give what counts against the limit: of the device, else of the process."""
        allocated = self.last("allocated")
        if allocated is not None:
            return allocated
        names: tuple[CounterName, ...] = ("anonymous", "shared", "resident")
        return sum(self.last(name) or 0 for name in names)

    def quick(self) -> dict[CounterName, int]:
        """Read the host's counters, without what the censuses keep."""
        readings = process.quick_counters()
        for name, own_bytes in self._own_bytes.items():
            if name in readings:
                readings[name] -= own_bytes
        return readings

    def _read_counters(self) -> dict[AnyCounter, int]:
        readings: dict[AnyCounter, int] = dict(self.quick().items())
        readings.update(read_device(self.device, full=False).values.items())
        # What costs much is read in few epochs: as many as a verdict needs at first,
        # then as often as comes to a small share of the time.
        is_sparse_epoch = self._is_sparse_epoch()
        self.shared_files.note(self.epoch, always=is_sparse_epoch)
        if is_sparse_epoch or self._throttle.due:
            with self._throttle:
                readings.update(self._read_slow_counters())
        # To list children is a walk over all threads: only where there is one.
        has_children = readings.get("children", 1) > 0
        if has_children and (is_sparse_epoch or self._workers_throttle.due):
            with self._workers_throttle:
                readings.update(self._read_workers())
        return readings

    def _read_slow_counters(self) -> dict[AnyCounter, int]:
        """Count mappings, and ask the device's driver: milliseconds each."""
        readings: dict[AnyCounter, int] = {}
        pages = process.virtual_pages()
        if pages is None or pages != self._virtual_pages:
            # The kernel walks its tables to count them. What is mapped and kept makes
            # the address space larger: while that stands still, so does their number.
            self._virtual_pages = pages
            self._mapping_count = process.mappings()
        if self._mapping_count is not None:
            readings["mappings"] = self._mapping_count
        device_used = read_device_used(self.device)
        if device_used is not None:
            readings["device_used"] = device_used
        return readings

    def _read_workers(self) -> dict[AnyCounter, int]:
        """Read the resident memory of child processes.

        Not their own pages (USS): a forked worker's become more for as long as it
        copies its parent's, by 60 KiB an epoch in a worker that keeps nothing.
        """
        readings: dict[AnyCounter, int] = {}
        for pid in process.children_of(process.own_pid())[:_MOST_WORKERS]:
            size = process.process_anonymous(pid)
            if size is not None:
                readings[WorkerName.of(pid)] = size
                self._note_start_up(pid)
        return readings

    def _note_start_up(self, pid: int) -> None:
        """Note that a child process is still importing, until it no longer is."""
        if pid in self._started_pids:
            return
        if process.is_starting_up(pid):
            self.starting_until[WorkerName.of(pid)] = self.epoch
        else:
            self._started_pids.add(pid)

    def _is_sparse_epoch(self) -> bool:
        """Tell whether this epoch is one of the few that are read in any case."""
        if self.epoch > 60:
            return False
        return self.epoch <= _READ_EACH_UNTIL or self.epoch % 4 == 0

    def _record_readings(self, readings: dict[AnyCounter, int]) -> None:
        for name, value in readings.items():
            if is_judged(name) or name in _EVIDENCE:
                self._recorded.record(name, epoch=self.epoch, value=value)
        if self.epoch > _FORGOTTEN_AFTER:
            self._forget_short_lived_workers()

    def _forget_short_lived_workers(self) -> None:
        """Drop workers that lived for an epoch or two: each epoch has new ones."""
        for name, (epochs, _) in self._recorded.by_name().items():
            is_short_lived = len(epochs) < _FEWEST_READINGS
            has_ended = epochs[-1] < self.epoch
            if isinstance(name, WorkerName) and is_short_lived and has_ended:
                self._recorded.forget(name)
                self.starting_until.pop(name, None)
                self._started_pids.discard(name.pid)

    def _keeps_growing(self) -> bool:
        """Tell whether a counter keeps rising since the last census."""
        since = self.censuses[-1].epoch if self.censuses else 1
        recorded = self._recorded.by_name()
        for name, (epochs, values) in recorded.items():
            is_jittering = name in _JITTERING and "malloc" in recorded
            if is_jittering or isinstance(name, WorkerName) or not is_judged(name):
                continue
            # Of what is counted one by one, every second epoch is often enough here:
            # a census takes long, and is taken again when the run is twice as long.
            least = self._suspicious_growth.get(unit_of(name), 2 * _SUSPICIOUS_OTHERS)
            # The reading after the first epoch is the first without its warm-up.
            first = bisect.bisect_left(epochs, since)
            if keeps_rising(values[first:], least):
                return True
        return False

    def _least_suspicious(self, name: AnyCounter) -> float:
        return self._suspicious_growth.get(unit_of(name), _SUSPICIOUS_OTHERS)


def _is_helper(name: WorkerName) -> bool:
    """Tell whether a child is one of multiprocessing's own, not a worker.

    The resource tracker starts with the first shared memory, and its memory grows while
    it does: over many short epochs that looked like a leak.
    """
    command = process.command_of(name.pid)
    return any(helper in command for helper in _HELPERS)
