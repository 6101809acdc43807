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
from typing import NamedTuple

import torch

import loaderkit
from benchmarks.harness import Row, report, scale_and_save
from benchmarks.read_epoch import litdata_items

SAMPLES = 1_000
BATCH = 32
ROUNDS = 10

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


class Seconds(NamedTuple):
    """What one process took, from its start to its end."""

    wall: float
    cpu: float
    """Of all its threads, in user and in system mode."""


def main() -> None:
    options = scale_and_save(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        programs = dict(PROGRAMS)
        samples = [{"x": torch.rand(64), "label": i} for i in range(SAMPLES)]
        loaderkit.pack(samples, Path(folder, "dicts.lk"))
        if importlib.util.find_spec("litdata") is None:
            print("litdata takes no part: pip install litdata")
            del programs["litdata, the same dicts"]
        else:
            litdata_items(samples, Path(folder, "dicts.litdata"))
        rounds = max(1, round(ROUNDS * options.scale))
        turns = _take_turns(programs, Path(folder), rounds)
    for clock in Seconds._fields:
        title = f"first batch of a new process, seconds of {clock}"
        rows = _rows(turns, clock)
        report(title, rows, save=f"startup_{clock}" if options.save else None)


def _take_turns(
    programs: dict[str, str], folder: Path, rounds: int
) -> dict[str, list[Seconds]]:
    """Run each program once a turn, after one turn that is not counted.

    That one reads every file from disk, and compiles what was not compiled yet.
    """
    turns: dict[str, list[Seconds]] = {name: [] for name in programs}
    for turn in range(rounds + 1):
        for name in random.Random(turn).sample(list(programs), len(programs)):
            seconds = _run(programs[name], folder)
            if turn:
                turns[name].append(seconds)
    return turns


def _run(program: str, folder: Path) -> Seconds:
    """Run a program in a new process, and wait for its end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Python keeps compiled modules unless told not to; a user's Python is not.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=folder, env=environment
    )
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, program)
    return Seconds(wall, used.ru_utime + used.ru_stime)


def _rows(turns: dict[str, list[Seconds]], clock: str) -> list[Row]:
    """Give what each took, then how much more that is than the baseline's.

    Differences are taken turn by turn, and the machine's own ups and downs with them.
    """
    taken = {
        name: [getattr(each, clock) for each in seconds]
        for name, seconds in turns.items()
    }
    base = taken[BASELINE]
    found = [_row(name, values, base) for name, values in taken.items()]
    for name, values in taken.items():
        if name != BASELINE:
            more = [value - least for value, least in zip(values, base, strict=True)]
            found.append(_row(f"on top: {name}", more, base))
    return found


def _row(name: str, values: list[float], base: list[float]) -> Row:
    middle = statistics.median(values)
    ratio = middle / statistics.median(base)
    return Row(name, middle, min(values), max(values), "s", ratio)


if __name__ == "__main__":
    main()
