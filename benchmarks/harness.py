"""Run contestants in turn, print one table.  A baseline to read, not a gate."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import random
import re
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit.memory.process import children_of
from loaderkit.memory.release import release

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

RESULTS = Path(__file__).parent / "results"
LIBRARIES = (
    "loaderkit",
    "torch",
    "torch-geometric",
    "numpy",
    "h5py",
    "lmdb",
    "litdata",
)


_REST_S = 0.3
_NEAR = 0.8


@dataclass(frozen=True)
class Row:
    """How one contestant did."""

    name: str
    median: float
    low: float
    high: float
    unit: str
    ratio: float
    """Of the baseline's median; above 1 is better than the baseline."""


def scale_and_save(description: str | None) -> argparse.Namespace:
    """Read the two options that most benchmarks have.

    Args:
        description: The benchmark's docstring.

    Returns:
        ``scale``, of the numbers of samples and turns, and ``save``.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--save", action="store_true")
    return parser.parse_args()


def rates(
    contestants: Mapping[str, Callable[[], int]], *, rounds: int = 5
) -> list[Row]:
    """Measure samples a second, turn by turn; the first contestant is the baseline.

    Each turn has another order, since a contestant finds the heap and the caches as
    the one before left them, and each rests before it starts.

    Args:
        contestants: What to call, by the name to print; each returns the number of
            samples it read.
        rounds: Turns each gets, after one that is not counted.

    Returns:
        A row a contestant.
    """
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        names = random.Random(turn).sample(list(contestants), len(contestants))
        for name in names:
            speed = _rate(contestants[name])
            if turn:
                found[name].append(speed)
    base = statistics.median(next(iter(found.values())))
    return [
        Row(
            n,
            statistics.median(r),
            min(r),
            max(r),
            "samples/s",
            statistics.median(r) / base,
        )
        for n, r in found.items()
    ]


def rivals(rows: list[Row]) -> list[str]:
    """Name those that came near the best, the first aside.

    Args:
        rows: Rates; the first is the one to compare with.

    Returns:
        The others within 20 % of the best of them.
    """
    best = max(row.median for row in rows[1:])
    return [row.name for row in rows[1:] if row.median > _NEAR * best]


def duels(
    contestants: Mapping[str, Callable[[], int]],
    *,
    rounds: int = 40,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Compare the first contestant with each other, pair by pair.

    Rates of whole tables move by 10 % and more with the machine; two runs one after the
    other see the same machine, and each goes first every other time.

    Args:
        contestants: What to call, by name.
        rounds: Pairs of runs for each rival.
        clock: Gives seconds; ``time.process_time`` where others use the machine and
            nobody has workers.

    Returns:
        A row a rival: the median of the first's rate divided by the rival's, with the
        bounds that hold this median with a chance of 95 %.
    """
    first, *others = contestants
    found = []
    for rival in others:
        ratios = []
        for turn in range(rounds + 1):
            pair = [first, rival] if turn % 2 else [rival, first]
            speed = {name: _rate(contestants[name], clock) for name in pair}
            if turn:
                ratios.append(speed[first] / speed[rival])
        ratios.sort()
        beyond = max(1, round(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))
        low, high = ratios[beyond - 1], ratios[-beyond]
        middle = statistics.median(ratios)
        found.append(Row(f"{first}, of {rival}", middle, low, high, "x", middle))
    return found


def _rate(
    run: Callable[[], int], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Run a contestant on a machine that is at rest: samples a second."""
    gc.collect()
    time.sleep(_REST_S)  # the workers of the one before are still ending
    start = clock()
    count = run()
    return count / (clock() - start)


def peaks(
    contestants: Mapping[str, Callable[[], int]], *, rounds: int = 3
) -> list[Row]:
    """Measure the memory that each takes on top, over the tree of processes.

    Args:
        contestants: What to call, by the name to print; the first is the baseline.
        rounds: Turns each gets, after one that is not counted.

    Returns:
        A row a contestant: the median of the highest sum of PSS without mapped files,
        less what it was before, in MiB.
    """
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        names = random.Random(turn).sample(list(contestants), len(contestants))
        for name in names:
            gc.collect()
            release()
            time.sleep(_REST_S)
            before = _tree_bytes()
            with _Peak() as peak:
                contestants[name]()
            if turn:
                found[name].append(max(0, peak.highest - before) / (1 << 20))
    base = statistics.median(next(iter(found.values()))) or 1
    return [
        Row(n, statistics.median(v), min(v), max(v), "MiB", statistics.median(v) / base)
        for n, v in found.items()
    ]


class _Peak:
    """A thread that looks at the tree of processes, about 30 times a second."""

    def __enter__(self) -> Self:
        self.highest, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            self.highest = max(self.highest, _tree_bytes())


def _tree_bytes() -> int:
    """Add up anonymous and shared PSS: a page that two have counts half for each."""
    total = 0
    own = os.getpid()
    for pid in [own, *children_of(own)]:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            sizes = re.findall(r"Pss_(?:Anon|Shmem):\s+(\d+)", text)
            total += sum(map(int, sizes)) * 1024
    return total


def report(title: str, rows: list[Row], *, save: str | None) -> None:
    """Print a table, and keep it as JSON with the machine and versions.

    Args:
        title: What was measured.
        rows: One a contestant, the baseline first.
        save: Name of the file below ``benchmarks/results``; None keeps nothing.
    """
    print(f"\n{title}\n{machine()}")
    for row in rows:
        print(
            f"{row.name:<44}{row.median:>14,.4g} {row.unit:<10}"
            f"({row.low:,.4g} to {row.high:,.4g}){row.ratio:>9.2f} x"
        )
    if save is not None:
        content = {
            "title": title,
            "machine": machine(),
            "rows": [asdict(r) for r in rows],
        }
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{save}.json").write_text(json.dumps(content, indent=1) + "\n")


def machine() -> str:
    """Name the processor, cores, memory and versions."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*:\s*(.+)", info.read_text())
        cpu = found[1] if found else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    versions = ", ".join(f"{name} {_version(name)}" for name in LIBRARIES)
    python = platform.python_version()
    return (
        f"{cpu}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"{memory:.0f} GiB; Python {python}, {versions}"
    )


def _version(name: str) -> Any:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def anonymous_bytes(pid: int | str = "self") -> int:
    """Read how much memory of a process no file backs (RssAnon)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024
