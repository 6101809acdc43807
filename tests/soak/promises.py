"""A plan's promises, held against real steps under the profiler.

``DRAWS=0:12 pytest tests/soak/promises.py -s``: so many draws of each family of
``drawn_plans.py``, as lists and packed into caches, a line for each.
"""

import os
import random

import pytest
from drawn_plans import FAMILIES, draw_plan
from torch.utils._pytree import tree_iter

from loaderkit import assert_fits, build_loader, open_cache, pack, plan_batch
from loaderkit.budget.batch.samples import read_samples
from loaderkit.budget.step.measure import measure_step
from loaderkit.errors import DoesNotFitError

FIRST, END = map(int, os.environ.get("DRAWS", "0:8").split(":"))


@pytest.mark.parametrize("seed", range(FIRST, END))
@pytest.mark.parametrize("family", FAMILIES)
def test_no_real_batch_breaks_a_promise(family, seed):
    drawn, r = draw_plan(seed, family), random.Random(seed)
    samples = read_samples(drawn.data, collate=drawn.collate_fn)
    total = len(drawn.data)

    def peak(rows):
        batch = samples.join(list(rows))
        return max(measure_step(drawn.model, batch, drawn.step).values())

    def shuffled(size):
        return r.sample(range(total), size)

    largest_first = sorted(range(total), key=lambda row: -samples.sizes[row].sum())
    size = min(drawn.batch_size, total)
    # Of one epoch: a chance of 1 is that of an epoch, which its batches share.
    epoch = shuffled(total)
    batches = [epoch[size * number :][:size] for number in range(5)]
    batches = [rows for rows in batches if rows] + [largest_first[:size]]
    peaks = [peak(rows) for rows in batches]
    share = r.choice([0.5, 0.9, 1.0, 1.05, 1.5])
    limit = int(sorted(peaks)[len(peaks) // 2] * share)

    plan = plan_batch(
        drawn.model,
        drawn.data,
        "cpu",
        limit=limit,
        batch_size=drawn.batch_size,
        collate_fn=drawn.collate_fn,
        **drawn.options,
    )

    chance, count = plan.chances[1], plan.micro_batch
    over = sum(each > limit for each in peaks[:-1]) / len(peaks[:-1])
    print(
        f"\n{drawn}: {count} of {size} samples fit, chance {chance.likely:.2f} "
        f"({chance.low:.2f} to {chance.high:.2f}), {over:.0%} of "
        f"{len(peaks) - 1} batches exceed"
    )
    if chance.high == 0.0:
        assert max(peaks) <= limit
    # What is certain to exceed shows in the five batches, where these are the epoch.
    if chance.low == 1.0 and total <= 5 * size:
        assert over > 0
    if count:
        pieces = [shuffled(count) for _ in range(4)] + [largest_first[:count]]
        assert max(map(peak, pieces)) <= limit
        loader = build_loader(
            drawn.data,
            "cpu",
            shuffle=True,
            seed=seed,
            num_workers=0,
            **({"collate_fn": drawn.collate_fn} if drawn.collate_fn else {}),
            **plan.configurations[0].budget.loader_options(),
        )
        for _, batch in zip(range(5), loader, strict=False):
            assert max(measure_step(drawn.model, batch, drawn.step).values()) <= limit
    for rows, real in zip(batches, peaks, strict=True):
        try:
            assert_fits(drawn.model, samples.join(rows), limit, **drawn.options)
        except DoesNotFitError:
            continue
        assert real <= limit


def size_of(batch):
    """About how much a batch holds, to find the dearest of an epoch."""
    return getattr(batch, "num_nodes", None) or sum(
        tensor.numel() for tensor in tree_iter(batch)
    )


@pytest.mark.parametrize("seed", range(FIRST, END))
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_plan_gives_the_loader_of_a_cache_fits(family, seed, tmp_path):
    drawn, r = draw_plan(seed, family), random.Random(seed)
    dataset = pack(drawn.data, tmp_path / "cache", workers=0)
    collate = drawn.collate_fn
    if drawn.ragged is not None:  # the cache joins these samples itself
        dataset = open_cache(tmp_path / "cache", ragged=drawn.ragged)
        collate = None
    samples = read_samples(dataset, collate=collate)
    joined = {"collate_fn": collate} if collate else {}

    def peak(batch):
        return max(measure_step(drawn.model, batch, drawn.step).values())

    size = min(drawn.batch_size, len(dataset))
    usual = peak(samples.join(r.sample(range(len(dataset)), size)))
    limit = int(usual * r.choice([0.3, 0.7, 1.0, 1.5, 4.0]))

    plan = plan_batch(
        drawn.model,
        dataset,
        "cpu",
        limit=limit,
        batch_size=drawn.batch_size,
        **joined,
        **drawn.options,
    )

    bounds = plan.configurations[0].budget.loader_options()
    chance = plan.chances[1]
    print(
        f"\n{drawn}, cached: {bounds}, {limit / usual:.1f} of a usual batch, chance "
        f"{chance.likely:.2f} ({chance.low:.2f} to {chance.high:.2f})",
        end="",
    )
    if chance.high == 0.0:
        dearest = sorted(range(len(dataset)), key=lambda row: -samples.sizes[row].sum())
        drawn_rows = [r.sample(range(len(dataset)), size) for _ in range(4)]
        for rows in (dearest[:size], *drawn_rows):
            assert peak(samples.join(rows)) <= limit
    if not plan.ok:
        return
    loader = build_loader(
        dataset, "cpu", shuffle=True, seed=seed, num_workers=0, **joined, **bounds
    )
    batches = sorted(loader, key=size_of)
    peaks = [peak(batch) for batch in [*batches[-4:], *batches[:1]]]
    print(f", {len(batches)} batches up to {max(peaks) / limit:.0%} of the limit")
    assert max(peaks) <= limit
