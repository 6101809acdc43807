"""The long version of the law of mutated caches, run by ``tox -e soak``.

Each block of mutants is read by a process of its own, which ends with its memory.  The
figures go to ``benchmarks/results/soak-strangers.txt``.  SOAK_FIRST and SOAK_MUTANTS
say which mutants are tried: a number makes the same mutant everywhere.  SOAK_LARGE says
how many of large caches are read, each question to them in twice the shard's memory.
"""

import os
import platform
import shutil
import time
from pathlib import Path

import large_strangers
import pytest
import strangers
import torch
import torch_geometric

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "soak-strangers.txt"
FIRST = int(os.environ.get("SOAK_FIRST", "0"))
MUTANTS = int(os.environ.get("SOAK_MUTANTS", "1000000"))
LARGE = int(os.environ.get("SOAK_LARGE", "3000"))
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


@pytest.mark.needs("proc")
def test_large_mutants_take_at_most_twice_their_shard(tmp_path, monkeypatch):
    for name, value in large_strangers.ALLOCATOR.items():
        monkeypatch.setenv(name, value)
    started, numbers = time.monotonic(), range(FIRST, FIRST + LARGE)

    trial = large_strangers.Trial(numbers, times=2)
    (figures,) = large_strangers.try_in_child(tmp_path, [trial])

    seconds = time.monotonic() - started
    most = (
        f"each question within twice its shard and {large_strangers.HEAP_BYTES} bytes"
    )
    lines = [
        f"Mutants of large caches, {machine_line()}",
        f"seeds {FIRST} to {FIRST + LARGE - 1}; {seconds:,.0f} s",
        f"{figures}; {most}",
        *map(str, figures.failures),
        "",
    ]
    keep_run(lines)
    assert not figures.failures, "\n".join(map(str, figures.failures[:20]))


def write_figures(total, seconds):
    peak, room = total.peak_bytes >> 20, strangers.ROOM_BYTES >> 20
    memory = f"most resident memory of a process {peak} MiB, with torch"
    lines = [
        f"Mutated caches, {machine_line()}",
        f"seeds {FIRST} to {FIRST + total.mutants - 1}; {seconds:,.0f} s",
        str(total),
        f"{memory}; allowed beyond what it had before reading: {room} MiB",
        *map(str, total.failures),
        "",
    ]
    keep_run(lines)


def machine_line():
    """Say when and where figures were taken."""
    versions = f"torch {torch.__version__}, PyG {torch_geometric.__version__}"
    python = platform.python_version()
    return f"{time.strftime('%Y-%m-%d')}: 2 cores, 24 GiB; Python {python}, {versions}"


def keep_run(lines):
    """Write what came of a run, in place of what it had written before."""
    what, numbers = lines[0].partition(",")[0], lines[1].partition(" to ")[0] + " to "
    kept = RESULTS.read_text().split("\n\n") if RESULTS.exists() else []
    kept = [each for each in kept if not (each.startswith(what) and numbers in each)]
    kept = [each.strip() for each in kept if each.strip()]
    RESULTS.write_text("\n\n".join([*kept, "\n".join(lines)]))
