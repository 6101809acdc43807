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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from loaderkit.memory.process import children_of
from loaderkit.memory.release import release

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Self

ReadSamples: TypeAlias = Callable[[], int]
"""A contestant: reads samples when it is called, and returns how many."""

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
_LIBRARIES = (
    "loaderkit",
    "torch",
    "torch-geometric",
    "numpy",
    "h5py",
    "lmdb",
    "litdata",
)
_PAUSE_S = 0.3
"""Between two contestants: the workers of the one before are still ending.  Chosen."""
_SAMPLING_INTERVAL_S = 0.02
_NEAR_BEST = 0.8
"""From this part of the best rate on, a comparison pair by pair may change the order:
rates of whole tables move by 10 % and more with the machine."""
_MEDIAN_BOUND_Z = 0.98
"""Half of the normal distribution's 1.96: the number of values below the median has a
standard deviation of half the square root of their count."""


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

    @classmethod
    def of_values(
        cls, name: str, values: Sequence[float], unit: str, *, baseline: float
    ) -> Row:
        """Summarize what was measured in several turns.

        Args:
            name: The contestant's.
            values: One a turn.
            unit: Of the values.
            baseline: The median is divided by it.

        Returns:
            The median with the lowest and the highest value.
        """
        median = statistics.median(values)
        return cls(name, median, min(values), max(values), unit, median / baseline)

    @classmethod
    def of_one_value(cls, name: str, value: float, unit: str, *, ratio: float) -> Row:
        """Make the row of what was measured once.

        Args:
            name: The contestant's.
            value: What was measured.
            unit: Of the value.
            ratio: What to print beside it.

        Returns:
            A row without a spread.
        """
        return cls(name, value, value, value, unit, ratio)


def parse_scale_and_save(description: str | None) -> argparse.Namespace:
    """Read the two options that most benchmarks have.

    Args:
        description: The benchmark's docstring.

    Returns:
        ``scale``, of the numbers of samples and turns, and ``save``.
    """
    return make_scale_and_save_parser(description).parse_args()


def make_scale_and_save_parser(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of these two options, for a benchmark that adds its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--save", action="store_true")
    return parser


def measure_rates(
    contestants: Mapping[str, ReadSamples],
    *,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Measure samples a second, turn by turn; the first contestant is the baseline.

    Args:
        contestants: What to call, by the name to print; each returns the number of
            samples it read.
        rounds: Turns each gets, after one that is not counted.
        clock: As for ``compare_in_pairs``.

    Returns:
        A row a contestant.
    """
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for turn, name in _shuffled_turns(contestants, rounds):
        rate = _samples_per_second(contestants[name], clock)
        if turn > 0:
            rates[name].append(rate)

    baseline = statistics.median(next(iter(rates.values())))
    return [
        Row.of_values(name, values, "samples/s", baseline=baseline)
        for name, values in rates.items()
    ]


def rivals_near_best(rows: list[Row]) -> list[str]:
    """Name those that came near the best, the first aside.

    Args:
        rows: Rates; the first is the one to compare with.

    Returns:
        The others within 20 % of the best of them.
    """
    best = max(row.median for row in rows[1:])
    return [row.name for row in rows[1:] if row.median > _NEAR_BEST * best]


def compare_in_pairs(
    contestants: Mapping[str, ReadSamples],
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
    first, *rivals = contestants
    rows = []
    for rival in rivals:
        ratios = []
        for turn in range(rounds + 1):
            pair = [first, rival] if turn % 2 else [rival, first]
            rates = {
                name: _samples_per_second(contestants[name], clock) for name in pair
            }
            # The first pair warms up what both read.
            if turn > 0:
                ratios.append(rates[first] / rates[rival])
        rows.append(_row_of_ratios(f"{first}, of {rival}", ratios))
    return rows


def _row_of_ratios(name: str, ratios: list[float]) -> Row:
    """Give the median with its 95 % bounds, which are order statistics."""
    ordered = sorted(ratios)
    half_width = _MEDIAN_BOUND_Z * len(ordered) ** 0.5
    values_beyond = max(1, round(len(ordered) / 2 - half_width))
    median = statistics.median(ordered)
    low, high = ordered[values_beyond - 1], ordered[-values_beyond]
    return Row(name, median, low, high, "x", median)


def measure_peaks(
    contestants: Mapping[str, ReadSamples], *, rounds: int = 3
) -> list[Row]:
    """Measure the memory that each takes on top, over the tree of processes.

    Args:
        contestants: What to call, by the name to print; the first is the baseline.
        rounds: Turns each gets, after one that is not counted.

    Returns:
        A row a contestant: the median of the highest sum of PSS without mapped files,
        less what it was before, in MiB.
    """
    peaks: dict[str, list[float]] = {name: [] for name in contestants}
    for turn, name in _shuffled_turns(contestants, rounds):
        gc.collect()
        release()
        time.sleep(_PAUSE_S)

        bytes_before = process_tree_bytes(os.getpid())
        with PeakSampler(os.getpid()) as sampler:
            contestants[name]()
        if turn > 0:
            peaks[name].append(max(0, sampler.peak_bytes - bytes_before) / MIB)

    # A baseline that took nothing at all must not be divided by.
    baseline = statistics.median(next(iter(peaks.values()))) or 1
    return [
        Row.of_values(name, values, "MiB", baseline=baseline)
        for name, values in peaks.items()
    ]


def _shuffled_turns(
    contestants: Mapping[str, ReadSamples], rounds: int
) -> Iterator[tuple[int, str]]:
    """Yield turn 0, which is not counted, and the others, with who is next.

    Each turn has another order, since a contestant finds the heap and the caches as the
    one before left them.
    """
    for turn in range(rounds + 1):
        names = list(contestants)
        random.Random(turn).shuffle(names)
        for name in names:
            yield turn, name


def _samples_per_second(
    read_samples: ReadSamples, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Run a contestant after a collection and a pause."""
    gc.collect()
    time.sleep(_PAUSE_S)
    start = clock()
    samples = read_samples()
    return samples / (clock() - start)


class PeakSampler:
    """A thread that looks at a tree of processes, about 30 times a second.

    Args:
        pid: Its first process.  One that is timed is looked at from outside: a look
            takes milliseconds, in which its own threads would wait for Python's lock.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(_SAMPLING_INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, process_tree_bytes(self._pid))


def process_tree_bytes(first_pid: int) -> int:
    """Add up anonymous and shared PSS: a page that two have counts half for each."""
    total_bytes = 0
    for pid in [first_pid, *children_of(first_pid)]:
        # A worker may end between the listing and the reading.
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            kilobytes = re.findall(r"Pss_(?:Anon|Shmem):\s+(\d+)", rollup)
            total_bytes += sum(map(int, kilobytes)) * 1024
    return total_bytes


def report(title: str, rows: list[Row], *, save: str | None) -> None:
    """Print a table, and keep it as JSON with the machine and versions.

    Args:
        title: What was measured.
        rows: One a contestant, the baseline first.
        save: Name of the file below ``benchmarks/results``; None keeps nothing.
    """
    print(f"\n{title}\n{describe_machine()}")
    for row in rows:
        print(
            f"{row.name:<44}{row.median:>14,.4g} {row.unit:<10}"
            f"({row.low:,.4g} to {row.high:,.4g}){row.ratio:>9.2f} x"
        )

    if save is not None:
        content = {
            "title": title,
            "machine": describe_machine(),
            "rows": [asdict(row) for row in rows],
        }
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{save}.json").write_text(json.dumps(content, indent=1) + "\n")


def describe_machine() -> str:
    """Name the processor, cores, memory and versions."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model_name = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        cpu = model_name[1] if model_name else cpu

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = ", ".join(f"{name} {_installed_version(name)}" for name in _LIBRARIES)
    return (
        f"{cpu}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"{memory_bytes / (1 << 30):.0f} GiB; "
        f"Python {platform.python_version()}, {versions}"
    )


def _installed_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def anonymous_bytes(pid: int | str = "self") -> int:
    """Read how much memory of a process no file backs (RssAnon)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024
