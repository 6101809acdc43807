"""Seconds until a new process has its first batch of dicts, beside ``import torch``.

Run it with ``python -m benchmarks.startup [--scale 0.1] [--save]``.
"""

from __future__ import annotations

import importlib.util
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import torch

import loaderkit
from benchmarks.harness import Row, parse_scale_and_save, report
from benchmarks.read_epoch import write_litdata

SAMPLES = 1_000
BATCH = 32
ROUNDS = 10

Clock: TypeAlias = Literal["wall", "cpu"]
CLOCKS: Final[tuple[Clock, ...]] = ("wall", "cpu")

BASELINE = "import torch"
PROGRAMS = {
    BASELINE: "import torch",
    "torch DataLoader, list of dicts": f"""
import torch
from torch.utils.data import DataLoader
samples = [{{"x": torch.rand(64), "label": i}} for i in range({SAMPLES})]
next(iter(DataLoader(samples, batch_size={BATCH})))
""",
    "build_loader, cache of dicts": f"""
import loaderkit
dataset = loaderkit.open_cache("dicts.lk")
next(iter(loaderkit.build_loader(dataset, batch_size={BATCH})))
""",
    "litdata, the same dicts": f"""
from litdata import StreamingDataLoader, StreamingDataset
dataset = StreamingDataset("dicts.litdata")
next(iter(StreamingDataLoader(dataset, batch_size={BATCH})))
""",
    "import torch_geometric.data": "import torch_geometric.data",
}


class ProcessSeconds(NamedTuple):
    """What one process took, from its start to its end."""

    wall: float
    cpu: float
    """Of all its threads, in user and in system mode."""

    def by_clock(self, clock: Clock) -> float:
        """Give what one of the clocks showed."""
        return self.wall if clock == "wall" else self.cpu


def main() -> None:
    options = parse_scale_and_save(__doc__)
    rounds = max(1, round(ROUNDS * options.scale))
    with tempfile.TemporaryDirectory() as folder:
        programs = _write_datasets(Path(folder))
        turns = _run_in_turns(programs, Path(folder), rounds)

    for clock in CLOCKS:
        title = f"first batch of a new process, seconds of {clock}"
        rows = _table_of_clock(turns, clock)
        report(title, rows, save=f"startup_{clock}" if options.save else None)


def _write_datasets(folder: Path) -> dict[str, str]:
    """Write what the programs read; give those that can run here."""
    programs = dict(PROGRAMS)
    samples = [{"x": torch.rand(64), "label": i} for i in range(SAMPLES)]
    loaderkit.pack(samples, folder / "dicts.lk")
    if importlib.util.find_spec("litdata") is None:
        print("litdata takes no part: pip install litdata")
        del programs["litdata, the same dicts"]
    else:
        write_litdata(samples, folder / "dicts.litdata")
    return programs


def _run_in_turns(
    programs: dict[str, str], folder: Path, rounds: int
) -> dict[str, list[ProcessSeconds]]:
    """Run each program once a turn, after one turn that is not counted.

    That one reads every file from disk, and compiles what was not compiled yet.
    """
    turns: dict[str, list[ProcessSeconds]] = {name: [] for name in programs}
    for turn in range(rounds + 1):
        for name in random.Random(turn).sample(list(programs), len(programs)):
            seconds = _run_program(programs[name], folder)
            if turn > 0:
                turns[name].append(seconds)
    return turns


def _run_program(program: str, folder: Path) -> ProcessSeconds:
    """Run a program in a new process, and wait for its end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Python keeps compiled modules unless told not to; a user's Python is not.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=folder, env=environment
    )
    # Popen.wait would not say what the process used.
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start

    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, program)
    return ProcessSeconds(wall_s, usage.ru_utime + usage.ru_stime)


def _table_of_clock(turns: dict[str, list[ProcessSeconds]], clock: Clock) -> list[Row]:
    """Give what each took, then how much more that is than the baseline's.

    Differences are taken turn by turn, and the machine's own ups and downs with them.
    """
    seconds = {
        name: [turn.by_clock(clock) for turn in program_turns]
        for name, program_turns in turns.items()
    }
    baseline_turns = seconds[BASELINE]
    baseline = statistics.median(baseline_turns)

    rows = [
        Row.of_values(name, values, "s", baseline=baseline)
        for name, values in seconds.items()
    ]
    for name, values in seconds.items():
        if name == BASELINE:
            continue
        on_top = [
            value - baseline_value
            for value, baseline_value in zip(values, baseline_turns, strict=True)
        ]
        rows.append(Row.of_values(f"on top: {name}", on_top, "s", baseline=baseline))
    return rows


if __name__ == "__main__":
    main()
