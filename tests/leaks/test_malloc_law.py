"""Private memory that grows while malloc stands still: a leak, or malloc's free memory.

malloc gives out pieces of its own heap that nobody has written to yet.  A loop that
keeps nothing may touch more of them for some epochs; what maps memory by itself grows
on.
"""

import random

import pytest

from loaderkit.leaks.trend import LEAKING, NEEDS_MORE, STEADY
from loaderkit.leaks.verdict import judge_counters, overall
from loaderkit.leaks.watch import EpochRecorder

KIB, MIB = 1 << 10, 1 << 20
BASE = 150 * MIB
PAGE = 4096


class Run:
    """A loop whose tensors are all dropped, drawn by chance."""

    def __init__(self, seed):
        r = random.Random(seed)
        self.free = r.uniform(0.5, 64) * MIB
        self.touched_share = r.uniform(0.1, 1.0)
        """Of what malloc keeps free, in the end."""
        self.rate = max(24 * KIB, self.free * r.uniform(0.01, 0.3))
        self.seed = seed

    def series(self, epochs, mapped_per_epoch=0.0):
        """Draw readings; with what native code maps each epoch, and never unmaps."""
        times = range(epochs + 1)
        malloc = [80 * MIB + 90.0 * epoch for epoch in times]
        jitter, anonymous = random.Random(self.seed), []
        for epoch in times:
            touched = min(self.rate * epoch, self.free * self.touched_share)
            pages = PAGE * jitter.randrange(2)
            anonymous.append(BASE + touched + mapped_per_epoch * epoch + pages)
        return {
            "malloc": (times, malloc),
            "malloc_free": (times, [self.free] * len(times)),
            "anonymous": (times, anonymous),
        }


def private_memory(counters):
    return next(counter for counter in counters if counter.name == "anonymous")


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("epochs", [6, 8, 12, 20, 30, 60])
def test_what_malloc_kept_free_is_no_leak_when_it_is_used(epochs):
    for seed in range(60):
        counters = judge_counters(Run(seed).series(epochs))

        verdict, more_epochs = overall(counters)
        assert verdict != LEAKING, seed
        assert (more_epochs > 0) == (verdict == NEEDS_MORE)
        if private_memory(counters).doubt is not None:
            assert verdict == NEEDS_MORE


@pytest.mark.slow
def test_its_twin_that_maps_memory_is_found_in_the_epochs_that_are_asked_for():
    for seed in range(20):
        run, epochs = Run(seed), 30
        mapped_per_epoch = max(64 * KIB, 2 * run.rate)
        for _ in range(6):
            counters = judge_counters(run.series(epochs, mapped_per_epoch))
            verdict, more_epochs = overall(counters)
            assert verdict != STEADY, seed
            epochs += more_epochs

        assert verdict == LEAKING, seed
        assert private_memory(counters).growth > run.free


def readings_beside_malloc(epochs, rate, free):
    times = range(epochs + 1)
    return {
        "malloc": (times, [80.0 * MIB] * len(times)),
        "malloc_free": (times, [free] * len(times)),
        "anonymous": (times, [BASE + rate * epoch for epoch in times]),
    }


def test_more_than_malloc_keeps_free_is_a_leak_after_ten_readings():
    few = judge_counters(readings_beside_malloc(7, rate=640 * KIB, free=0.6 * MIB))
    enough = judge_counters(readings_beside_malloc(11, rate=640 * KIB, free=0.6 * MIB))

    assert overall(few) == (NEEDS_MORE, 3)
    assert private_memory(few).doubt == "too few readings beside malloc"
    assert overall(enough) == (LEAKING, 0)


def test_a_big_mapping_an_epoch_is_a_leak_at_once():
    counters = judge_counters(readings_beside_malloc(7, rate=10 * MIB, free=2 * MIB))

    assert overall(counters) == (LEAKING, 0)


def test_it_is_said_how_many_epochs_would_use_up_what_malloc_keeps():
    counters = judge_counters(readings_beside_malloc(30, rate=MIB, free=45 * MIB))

    verdict, more_epochs = overall(counters)
    later = judge_counters(
        readings_beside_malloc(30 + more_epochs + 2, rate=MIB, free=45 * MIB)
    )
    assert verdict == NEEDS_MORE
    assert 10 < more_epochs < 20
    assert "keeps as much free" in private_memory(counters).trend.why
    assert overall(later)[0] == LEAKING


def test_a_run_of_seven_epochs_that_once_was_called_a_leak():
    """As it was read in a test of a method that drops its tensor at once."""
    series = readings_beside_malloc(7, rate=117 * KIB, free=4 * MIB)
    series["malloc"] = (range(8), [80 * MIB + 90.0 * epoch for epoch in range(8)])
    series["mappings"] = ([0, 1, 2, 4, 6], [800.0] * 5)

    verdict, more_epochs = overall(judge_counters(series))

    assert verdict == NEEDS_MORE
    assert more_epochs >= 3


def test_where_malloc_grows_too_its_free_memory_excuses_nothing():
    series = readings_beside_malloc(30, rate=MIB, free=100 * MIB)
    series["malloc"] = (range(31), [80.0 * MIB + MIB * epoch for epoch in range(31)])

    counters = judge_counters(series)

    assert private_memory(counters).trend.rising
    assert overall(counters)[0] == LEAKING


def readings_of_a_cache_that_fills(seed, epochs, mapped_per_epoch=0.0):
    """Draw a cache with a bound, whose pages come later than its pieces."""
    r = random.Random(seed)
    rate, full_at = r.uniform(40, 900) * KIB, epochs * r.uniform(0.4, 0.75)
    free, delay = r.uniform(0.3, 4) * MIB, r.uniform(0.5, 6)
    times = range(epochs + 1)
    taken = [rate * min(epoch, full_at) for epoch in times]
    # Of what is given out again when the cache is full, some pages are new.
    slower = r.uniform(0.2, 0.6)
    touched = [
        rate * min(max(0.0, epoch - delay), full_at - delay)
        + min(slower * rate * max(0.0, epoch - full_at), free)
        for epoch in times
    ]
    return {
        "malloc": (times, [80 * MIB + size + 90.0 * r.random() for size in taken]),
        "malloc_free": (times, [free] * len(times)),
        "anonymous": (
            times,
            [
                BASE + size + mapped_per_epoch * epoch + PAGE * r.randrange(2)
                for epoch, size in zip(times, touched, strict=True)
            ],
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [20, 30, 60])
def test_pages_of_a_cache_that_is_full_are_no_leak(epochs):
    for seed in range(12):
        counters = judge_counters(readings_of_a_cache_that_fills(seed, epochs))

        if not next(c for c in counters if c.name == "malloc").trend.rising:
            assert overall(counters)[0] != LEAKING, seed


@pytest.mark.slow
def test_a_mapping_beside_a_cache_that_is_full_is_a_leak_in_the_end():
    for seed in range(6):
        epochs = 30
        for _ in range(6):
            readings = readings_of_a_cache_that_fills(seed, epochs, 2 * MIB)
            verdict, more_epochs = overall(judge_counters(readings))
            assert verdict != STEADY, seed
            epochs += more_epochs

        assert verdict == LEAKING, seed


def test_a_run_with_a_full_cache_that_once_was_called_a_leak():
    """As it was read of an ``lru_cache`` on a busy machine, in KiB."""
    malloc = [91_258 + 200 * min(epoch, 20) for epoch in range(31)]
    rising = [156_624 + 197 * epoch for epoch in range(16)]
    late = [59_740, 59_776, 59_856, 59_952, 60_112, 60_148, 60_156, 60_176, 60_328]
    anonymous = [156_500, *[156_516] * 4, *rising, *[100_000 + at for at in late]]
    anonymous.append(160_364)
    series = {
        name: (range(31), [KIB * value for value in values])
        for name, values in (("malloc", malloc), ("anonymous", anonymous))
    }
    series["malloc_free"] = (range(31), [700.0 * KIB] * 31)

    counters = judge_counters(series)

    assert private_memory(counters).doubt == "grows with malloc"
    assert overall(counters)[0] == NEEDS_MORE


@pytest.mark.slow
@pytest.mark.needs("proc")
def test_what_malloc_keeps_free_is_recorded_with_each_epoch():
    import torch

    watch = EpochRecorder(torch.device("cpu"), tolerance=16 * KIB)
    watch.start()
    for _ in range(3):
        watch.end_epoch()

    series = watch.series()
    assert list(series["malloc_free"][0]) == list(series["malloc"][0]) == [0, 1, 2, 3]
    assert min(series["malloc_free"][1]) > 0
