"""Trainers that stop and go on, on as many or other processes: nothing goes in silence.

Three trainers, batches by number, by size and in fixed batches, accumulation, stopped
in the first and second epoch and between two.  Each sample of an epoch is trained on
once by the run that stopped and the one that went on (a few twice, where processes
would have unlike numbers of steps), or somebody was told: an error before it trains, or
a warning.

But where Hugging Face's Trainer goes on with other processes without ``WholeEpochs``:
it counts steps, and no loader is told how many it skips.  These are counted alone.

The figures go to benchmarks/results/soak-trainers.txt.
"""

import collections
import functools
import itertools
import json
import os
import platform
import time
from pathlib import Path

import pytest
import torch
import trainer_runs
from process_groups import connected, launched

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "soak-trainers.txt"
KINDS = ["count", "size", "batches"]
WAYS = ["plain", "callback"]
RANKS_AFTER = {1: [1, 2], 2: [1, 2, 3]}


def runs_before(trainer):
    """Give the trainings that stop, by name."""
    runs = {}
    for kind, accumulate in itertools.product(KINDS, [1, 3]):
        # In the first epoch, in the second, and between them.  Batches, or optimizer
        # steps of three.
        for stop in [2, 9, "epoch"] if accumulate == 3 else [4, 18, "epoch"]:
            runs[f"{kind}-{accumulate}-{stop}"] = {
                "trainer": trainer,
                "kind": kind,
                "accumulate": accumulate,
                "way": "plain",
                "save_after": stop,
            }
    return runs


def on_ranks(folder, ranks, runs):
    """Train on ranks of a group, and give what each training's ranks answered."""
    asked = folder / f"runs on {ranks}.json"
    asked.write_text(json.dumps(runs))
    connected(lambda _: launched(trainer_runs.__file__, (folder, asked), ranks, folder))
    return {
        name: [
            json.loads((folder / f"{name}.{rank}.json").read_text())
            for rank in range(ranks)
        ]
        for name in runs
    }


@functools.cache
def largest_batch(kind):
    """Count the samples of the largest batch of any epoch."""
    loader = trainer_runs.build(kind)
    return max(len(rows) for _ in range(5) for rows in loader.batch_sampler)


def judge(kind, before, after, ranks):
    """Say what became of the samples: whole, refused, told, lost or twice."""
    if any(answer["error"] for answer in after):
        return "refused"
    counts = collections.Counter()
    for answer in before:
        for epoch, rows in answer["saved"].items():
            counts.update((epoch, row) for row in rows)
    for answer in after:
        for epoch, rows in answer["seen"].items():
            counts.update((epoch, row) for row in rows)
    samples, epochs = trainer_runs.COUNT, trainer_runs.EPOCHS
    wanted = {(str(e), row) for e in range(epochs) for row in range(samples)}
    lost = wanted - counts.keys()
    twice = collections.Counter(key[0] for key, times in counts.items() if times > 1)
    # In the last round of an epoch each process but one may repeat a batch.
    most_repeated = largest_batch(kind) * (max(ranks, len(before)) - 1)
    is_twice = counts.keys() - wanted or max(twice.values(), default=0) > most_repeated
    if not lost and not is_twice:
        return "whole"
    if any(answer["told"] for answer in [*before, *after]):
        return "told"
    return f"{len(lost)} lost, {sum(twice.values())} twice, in silence"


@pytest.mark.parametrize("trainer", list(trainer_runs.TRAINERS))
def test_no_sample_is_lost_or_read_twice_in_silence(trainer, tmp_path):
    began = time.monotonic()
    outcomes, silent, unexpected = collections.Counter(), [], []

    for ranks_before, ranks_after in RANKS_AFTER.items():
        runs = {
            f"{ranks_before}-{name}": {
                **run,
                "save": f"{ranks_before}-{name}",
                "load": None,
            }
            for name, run in runs_before(trainer).items()
        }
        before = on_ranks(tmp_path, ranks_before, runs)
        for ranks in ranks_after:
            rests = {
                f"{name} on {ranks} {way}": {
                    **run,
                    "way": way,
                    "save_after": None,
                    "save": None,
                    "load": name,
                }
                for name, run in runs.items()
                for way in WAYS
            }
            after = on_ranks(tmp_path, ranks, rests)
            for name, answers in after.items():
                origin, way = name.split(" on ")[0], name.rpartition(" ")[2]
                kind = runs[origin]["kind"]
                outcome = judge(kind, before[origin], answers, ranks)
                silently = outcome.endswith("silence")
                key = "in silence" if silently else outcome
                outcomes[f"{ranks_before} to {ranks}", way, key] += 1
                if silently:
                    silent.append(f"{name}: {outcome}")
                    knows_nothing = trainer == "transformers" and way == "plain"
                    if not knows_nothing or ranks == ranks_before:
                        unexpected.append(f"{name}: {outcome}")

    cpus, version = os.cpu_count(), platform.python_version()
    lines = [
        (
            f"{trainer}: {outcomes.total()} runs that went on, "
            f"{time.monotonic() - began:.0f} s, {cpus} CPUs, Python {version}, "
            f"torch {torch.__version__}"
        ),
        *(f"  {' '.join(key)}: {number}" for key, number in sorted(outcomes.items())),
        *(f"  {line}" for line in silent),
    ]
    with RESULTS.open("a") as file:
        file.write("\n".join(lines) + "\n")
    assert unexpected == []
