"""Jobs on caches in S3 that are killed, or harmed, at any of their requests.

``SOAK_CASES`` says how many are drawn (150), ``SOAK_SEED`` from which seed (0).  The
figures go to benchmarks/results/soak-s3-jobs.txt.
"""

import collections
import os
import platform
import random
import time
from pathlib import Path

import pytest
from s3_jobs import SETTINGS, Harm, Jobs
from storages import s3_server

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
KILLS = [Harm.KILL_BEFORE, Harm.KILL_AFTER]
OTHERS = [Harm.LOST, Harm.CLOSED, Harm.STATUS, Harm.CUT, Harm.WRONG]
LASTING = 0.05
"""So many of the others last: each of these takes a minute."""


@pytest.mark.needs("s3")
def test_whatever_is_killed_or_harmed_a_cache_is_whole_or_absent(tmp_path):
    seed = int(os.environ.get("SOAK_SEED", "0"))
    cases = int(os.environ.get("SOAK_CASES", "150"))
    chance, counts = random.Random(seed), {}
    figures, broken, start = collections.Counter(), [], time.monotonic()
    with s3_server() as server:
        jobs = Jobs(server, tmp_path)
        for _ in range(cases):
            name = chance.choice(list(SETTINGS))
            if name not in counts:
                counts[name] = jobs.count_requests(SETTINGS[name])
            harm = chance.choice(KILLS * 3 + OTHERS)
            lasting = harm in OTHERS and chance.random() < LASTING
            number = chance.randint(1, counts[name])
            ending, _, sentences = jobs.broken_laws(
                SETTINGS[name], harm, number, lasting=lasting
            )
            how_long = ", and so on" if lasting else ""
            figures[f"{harm.value}{how_long}: {ending.status}"] += 1
            case = f"{name}, {harm.name}{how_long} at {number} of {counts[name]}"
            broken += [f"{case}: {sentence}" for sentence in sentences]
            lines = [
                (
                    f"{time.strftime('%Y-%m-%d')}, 2 cores, 24 GiB; Python "
                    f"{platform.python_version()}, moto's S3 server"
                ),
                f"seed {seed}, {time.monotonic() - start:.0f} s on a busy machine",
                f"jobs: {', '.join(SETTINGS)}",
                f"one of the requests of each: {figures.total()} runs",
                *sorted(f"{what}: {n}" for what, n in figures.items()),
                f"laws broken: {len(broken)}",
                *broken,
            ]
            (RESULTS / "soak-s3-jobs.txt").write_text("\n".join(lines) + "\n")
        jobs.close()

    assert broken == []
