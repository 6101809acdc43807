"""The union of what ranks read, over many drawn datasets, options and samplers.

``SOAK_CASES`` says how many of each kind (4000), ``SOAK_SEED`` from which seed (0).
The figures go to benchmarks/results/soak-ranks.txt.
"""

import collections
import os
import platform
import random
import time
from pathlib import Path

import pytest
import test_ranks
import torch
from torch.utils.data import BatchSampler

from loaderkit import build_loader
from loaderkit.errors import LoaderkitError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "soak-ranks.txt"
SEED = int(os.environ.get("SOAK_SEED", "0"))
CASES = int(os.environ.get("SOAK_CASES", "4000"))


def draw_options(chance):
    """Draw options of a dataset that says its sizes; many are of no use together."""
    options = {"shuffle": chance.choice([False, True, "block"])}
    rules = {
        "batch_size": chance.randint(1, 12),
        "max_nodes": chance.randint(9, 40),
        "bucket_by": "nodes",
        "drop_last": chance.random() < 0.5,
        "seed": chance.randrange(100),
    }
    drawn = [name for name in rules if chance.random() < 0.5]
    return options | {name: rules[name] for name in drawn}


def draw_sized(chance):
    """Draw a dataset that is read by options of the loader's own."""
    samples, ranks = chance.randint(1, 120), chance.randint(1, 6)
    options = draw_options(chance)

    def make(rank):
        data = test_ranks.Sized(range(samples))
        shared = {"rank": rank, "world_size": ranks, "num_workers": 0, "probe": False}
        return build_loader(data, **shared, **options)

    def check(found):
        whole = not options.get("drop_last")
        test_ranks.check_union(found, samples, whole=whole, repeats=repeats)

    place = f"{samples} samples, {ranks} ranks, {options}"
    repeats = 0
    if ranks > 1:
        plan = make(0).plan.batching
        repeats = int(plan.split(" repeated")[0].rsplit(" ", 1)[-1])
    return place, make, ranks, check


def draw_sampled(chance):
    """Draw a dataset that is read by a sampler of torch's."""
    samples, ranks = chance.randint(1, 90), chance.randint(1, 6)
    kind = chance.choice(sorted(test_ranks.SAMPLERS))
    size, drop = chance.randint(1, 9), chance.random() < 0.3
    batched = chance.random() < 0.5
    data = list(range(samples))

    def make(rank):
        sampler = test_ranks.SAMPLERS[kind](data)
        options = {"sampler": sampler, "batch_size": size, "drop_last": drop}
        if batched:
            options = {"batch_sampler": BatchSampler(sampler, size, drop)}
        shared = {"rank": rank, "world_size": ranks, "num_workers": 0, "probe": False}
        return build_loader(data, **shared, **options)

    def check(found):
        if batched and drop:  # what the batch sampler leaves out is its own affair
            rows = [row for rank in found for batch in rank for row in batch]
            assert len({len(rank) for rank in found}) == 1
            assert len(set(rows)) == samples // size * size
            assert len(rows) - len(set(rows)) <= (ranks - 1) * size
        else:
            whole, repeats = not drop, ranks * size
            test_ranks.check_union(found, samples, whole=whole, repeats=repeats)

    place = (
        f"{samples} samples, {ranks} ranks, {kind}, batches of {size}, "
        f"drop_last={drop}, batch_sampler: {batched}"
    )
    return place, make, ranks, check


KINDS = {"sizes and options": draw_sized, "samplers": draw_sampled}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_ranks_read_each_sample_as_often_as_the_plan_says(kind):
    chance, start = random.Random(SEED), time.monotonic()
    figures, broken = collections.Counter(), []

    for _ in range(CASES):
        place = "drawing"
        try:
            place, make, ranks, check = KINDS[kind](chance)
            check(test_ranks.rows_of_ranks(make, ranks))
            figures[f"{ranks} ranks: shared out"] += 1
        except LoaderkitError as error:
            figures[f"refused: {str(error)[:50]} ..."] += 1
        except Exception as error:  # noqa: BLE001 -- all are listed, none ends the run
            first = str(error).partition("\n")[0]
            broken.append(f"{place}: {type(error).__name__}: {first}")

    lines = [
        (
            f"{kind}: {time.strftime('%Y-%m-%d')}, 2 cores, 24 GiB; Python "
            f"{platform.python_version()}, torch {torch.__version__}"
        ),
        f"seed {SEED}, {time.monotonic() - start:.0f} s",
        *(f"{name}: {count}" for name, count in sorted(figures.items())),
        f"laws broken: {len(broken)}",
        *broken,
    ]
    kept = RESULTS.read_text().split("\n\n") if RESULTS.exists() else []
    kept = [each.strip() for each in kept if not each.startswith(f"{kind}: ")]
    RESULTS.write_text("\n\n".join([*kept, "\n".join(lines)]) + "\n")
    assert broken == []
