"""The long version of the law of mutated caches, run by ``tox -e soak``.

Each block of mutants is read by a process of its own, which ends with its memory.  The
figures go to ``benchmarks/results/soak-strangers.txt``.  SOAK_FIRST and SOAK_MUTANTS
say which mutants are tried: a number makes the same mutant everywhere.
"""

import os
import platform
import shutil
import time
from pathlib import Path

import strangers
import torch
import torch_geometric

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "soak-strangers.txt"
FIRST = int(os.environ.get("SOAK_FIRST", "0"))
MUTANTS = int(os.environ.get("SOAK_MUTANTS", "1000000"))
BLOCK = 10_000


def test_mutants_are_read_or_refused(tmp_path):
    started = time.monotonic()
    total = strangers.Figures()

    for first in range(FIRST, FIRST + MUTANTS, BLOCK):
        folder = tmp_path / str(first)
        folder.mkdir()
        numbers = range(first, min(first + BLOCK, FIRST + MUTANTS))
        total += strangers.try_in_child(folder, numbers)
        shutil.rmtree(folder)
        write_figures(total, time.monotonic() - started)

    assert not total.failures, "\n".join(map(str, total.failures[:20]))


def write_figures(total, seconds):
    versions = f"torch {torch.__version__}, PyG {torch_geometric.__version__}"
    today = time.strftime("%Y-%m-%d")
    peak, room = total.peak_bytes >> 20, strangers.ROOM_BYTES >> 20
    machine = f"2 cores, 24 GiB; Python {platform.python_version()}, {versions}"
    memory = f"most resident memory of a process {peak} MiB, with torch"
    lines = [
        f"Mutated caches, {today}: {machine}",
        f"seeds {FIRST} to {FIRST + total.mutants - 1}; {seconds:,.0f} s",
        str(total),
        f"{memory}; allowed beyond what it had before reading: {room} MiB",
        *map(str, total.failures),
        "",
    ]
    kept = RESULTS.read_text().split("\n\n") if RESULTS.exists() else []
    same_run = f"seeds {FIRST} to "
    kept = [each for each in kept if each.strip() and same_run not in each]
    RESULTS.write_text("\n\n".join([*map(str.strip, kept), "\n".join(lines)]))
