"""A thousand kills of any process of a packing run, however workers are started.

``SOAK_CASES`` says how many (300), ``SOAK_SEED`` from which seed (0).  The figures go
to benchmarks/results/soak-kills.txt.
"""

import collections
import os
import platform
import random
import shutil
import sys
import time
from pathlib import Path

import torch
import torch_geometric

from loaderkit import pack

sys.path.insert(0, str(Path(__file__).parents[1] / "datasets"))
from failing_calls import files_of
from packing_kills import SHARD_BYTES, Kill, Slow, SlowSpans, broken_laws

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
METHODS = ["fork"] * 8 + ["forkserver", "spawn"]
"""The others import torch in each worker: one case takes as long as ten."""
SPANS = 6
STREAMED = {"": [0, 1], "0": [0], "1": [1]}[os.environ.get("SOAK_STREAMED", "")]
"""Whether a case packs a stream; ``SOAK_STREAMED=1`` packs nothing else."""
MOST_S = {"fork": 0.8, "forkserver": 8.0, "spawn": 8.0}
"""Seconds after which most runs have ended."""


def test_any_process_is_killed_and_nothing_hangs_or_stays(tmp_path):
    seed = int(os.environ.get("SOAK_SEED", "0"))
    cases = int(os.environ.get("SOAK_CASES", "300"))
    chance, figures, broken = random.Random(seed), collections.Counter(), []
    start, path = time.monotonic(), tmp_path / "c.lk"
    wanted = {}
    for spans in (0, SPANS):
        whole = tmp_path / f"whole-{spans}.lk"
        source, options = Slow(0.002), {"workers": 0, "shard_bytes": SHARD_BYTES}
        if spans:
            source, options["spans"] = SlowSpans(0.002), spans
        pack(source, whole, **options)
        wanted[spans] = files_of(whole)

    for case in range(cases):
        if case % 2:
            # The others go on from, or overwrite, what stands there.
            shutil.rmtree(path, ignore_errors=True)
        method = chance.choice(METHODS)
        moment = chance.uniform(0, MOST_S[method])
        spans = chance.choice(STREAMED) * SPANS
        kill = Kill(chance.choice([1, 2, 4]), method, moment, chance.random(), spans)
        ended, sentences = broken_laws(path, kill, wanted[spans])
        what = "a stream, " if spans else ""
        figures[f"{what}{method}: {ended}"] += 1
        broken.extend(f"case {case}, {kill}: {sentence}" for sentence in sentences)
        write_figures(seed, figures, broken, time.monotonic() - start)

    assert broken == []


def write_figures(seed, figures, broken, seconds):
    """Keep what was tried as text."""
    lines = [
        (
            f"{time.strftime('%Y-%m-%d')}, 2 cores, 24 GiB; Python "
            f"{platform.python_version()}, torch {torch.__version__}, "
            f"PyG {torch_geometric.__version__}"
        ),
        f"seed {seed}, {seconds:.0f} s on a busy machine",
        (
            f"one SIGKILL a run, of any of its processes; workers 1, 2, 4: "
            f"{sum(figures.values())} runs"
        ),
        "how the killed run ended, by how its workers were started:",
        *sorted(f"{name}: {n}" for name, n in figures.items()),
        (
            f"laws broken (30 s in which all only wait, an orphan that waits 10 s, "
            f"other bytes or leftovers after the next run): {len(broken)}"
        ),
        *broken,
    ]
    (RESULTS / "soak-kills.txt").write_text("\n".join(lines) + "\n")
