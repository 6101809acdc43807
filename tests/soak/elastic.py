"""Epochs whose parts are read by other ranks in other batches, over many drawn cases.

``SOAK_CASES`` says how many (2000), ``SOAK_SEED`` from which seed (0).  The figures go
to benchmarks/results/soak-elastic.txt.
"""

import collections
import os
import platform
import random
import time
from pathlib import Path

import pytest
import test_elastic
import torch

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "soak-elastic.txt"
SEED = int(os.environ.get("SOAK_SEED", "0"))
CASES = int(os.environ.get("SOAK_CASES", "2000"))


@pytest.mark.filterwarnings("ignore")
def test_whoever_reads_the_parts_of_an_epoch_reads_its_order():
    chance, start = random.Random(SEED), time.monotonic()
    figures, broken = collections.Counter(), []

    for _ in range(CASES):
        kind = chance.choice(test_elastic.KINDS)
        parts = test_elastic.draw_parts(chance.randint, kind)
        drawn = {
            "samples": chance.randint(1, 300),
            "shuffle": chance.choice([False, True, "block"]),
            "seed": chance.randrange(1000),
            "epoch": chance.randrange(4),
        }
        try:
            test_elastic.check_parts(**drawn, parts=parts)
            figures[f"{kind}, in {len(parts)} parts"] += 1
        except Exception as error:  # noqa: BLE001 -- all are listed, none ends the run
            first = str(error).partition("\n")[0]
            broken.append(f"{kind}: {drawn}, {parts}: {type(error).__name__}: {first}")

    lines = [
        (
            f"{time.strftime('%Y-%m-%d')}, 2 cores; Python "
            f"{platform.python_version()}, torch {torch.__version__}"
        ),
        f"seed {SEED}, {time.monotonic() - start:.0f} s",
        *(f"{name}: {count}" for name, count in sorted(figures.items())),
        f"laws broken: {len(broken)}",
        *broken,
    ]
    RESULTS.write_text("\n".join(lines) + "\n")
    assert broken == []
