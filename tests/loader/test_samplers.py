"""Which samples make up which batch, on numbers small enough to see."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.errors import LoaderError
from loaderkit.loader.resumable import EpochBatches, Position
from loaderkit.loader.samplers import (
    BatchRule,
    bucket_bounds,
    bucket_of,
    make_epoch,
    padding_waste,
)


def batches(epoch):
    return [epoch.batch(number) for number in range(len(epoch))]


def test_batches_of_one_size_in_order():
    rule = BatchRule(5, batch_size=2)

    assert batches(make_epoch(rule, 0)) == [[0, 1], [2, 3], [4]]


def test_the_last_batch_can_be_left_out():
    epoch = make_epoch(BatchRule(5, batch_size=2, drop_last=True), 0)

    assert batches(epoch) == [[0, 1], [2, 3]]
    assert epoch.skipped == 1


def test_shuffling_follows_from_seed_and_epoch():
    rule = BatchRule(50, batch_size=50, shuffle=True, seed=3)

    first, again, second = (make_epoch(rule, e).order.tolist() for e in (0, 0, 1))

    assert first == again
    assert first != second
    assert sorted(second) == list(range(50))


def test_a_batch_is_filled_up_to_every_limit():
    sizes = {"nodes": np.array([3, 3, 3, 1, 1]), "edges": np.array([1, 1, 9, 1, 1])}
    rule = BatchRule(5, limits={"nodes": 7, "edges": 10}, sizes=sizes)

    assert batches(make_epoch(rule, 0)) == [[0, 1], [2, 3], [4]]


def test_an_oversized_sample_is_named():
    sizes = {"nodes": np.array([3, 80, 3])}

    with pytest.raises(LoaderError, match=r"Sample 1 has 80 nodes.*limit of 7"):
        make_epoch(BatchRule(3, limits={"nodes": 7}, sizes=sizes), 0)


@pytest.mark.parametrize(
    ("choice", "wanted", "skipped"),
    [("alone", [[0, 2], [1]], 0), ("skip", [[0, 2]], 1)],
)
def test_an_oversized_sample_is_alone_or_skipped(choice, wanted, skipped):
    sizes = {"nodes": np.array([3, 80, 3])}
    rule = BatchRule(3, limits={"nodes": 7}, sizes=sizes, oversized=choice)

    epoch = make_epoch(rule, 0)

    assert batches(epoch) == wanted
    assert epoch.skipped == skipped


def test_buckets_hold_similar_sizes():
    sizes = np.array([1, 9, 2, 8, 3, 7])
    rule = BatchRule(
        6, batch_size=3, sizes={"nodes": sizes}, bucket_by="nodes", buckets=2
    )

    row_sets = {frozenset(rows) for rows in batches(make_epoch(rule, 0))}

    assert row_sets == {frozenset({0, 2, 4}), frozenset({1, 3, 5})}
    assert bucket_bounds(sizes, 2).tolist() == [3, 9]


def test_padding_is_the_share_of_places_behind_the_ends_of_samples():
    sizes = np.array([1, 3, 8, 8])
    rule = BatchRule(4, sizes={"nodes": sizes}, bucket_by="nodes", buckets=2)

    assert padding_waste(rule) == pytest.approx(1 - 20 / 22)
    assert padding_waste(BatchRule(4)) == 0


def test_blocks_keep_neighbours_close_and_still_mix():
    rule = BatchRule(100_000, batch_size=100, shuffle="block")

    order = make_epoch(rule, 0).order

    assert sorted(order.tolist()) == list(range(100_000))
    assert len(set((order[:8192] // 1024).tolist())) == 8
    assert order[:2].tolist() != [0, 1]


LIMITS = st.fixed_dictionaries(
    {
        "count": st.integers(1, 60),
        "ranks": st.integers(1, 4),
        "batch_size": st.one_of(st.none(), st.integers(1, 9)),
        "limit": st.one_of(st.none(), st.integers(1, 40)),
        "shuffle": st.sampled_from([True, False, "block", "batches"]),
        "drop_last": st.booleans(),
        "oversized": st.sampled_from(["alone", "skip"]),
        "bucket_by": st.sampled_from([None, "nodes"]),
        "seed": st.integers(0, 2**40),
    }
)


@given(LIMITS)
def test_ranks_share_every_sample_and_take_as_many_steps(case):
    sizes = np.random.default_rng(case["seed"]).integers(1, 50, case["count"])
    limit = case["limit"]
    size = case["batch_size"] or (None if limit else 1)
    most_samples = size or case["count"]

    def rule(rank):
        return BatchRule(
            case["count"],
            batch_size=size,
            limits={} if limit is None else {"nodes": limit},
            sizes={"nodes": sizes},
            shuffle=case["shuffle"],
            seed=case["seed"],
            drop_last=case["drop_last"],
            oversized=case["oversized"],
            bucket_by=case["bucket_by"],
            buckets=3,
            rank=rank,
            ranks=case["ranks"],
        )

    epochs = [make_epoch(rule(rank), 1) for rank in range(case["ranks"])]
    rows = [row for epoch in epochs for batch in batches(epoch) for row in batch]

    assert len({len(epoch) for epoch in epochs}) == 1
    assert all(len(batch) for epoch in epochs for batch in batches(epoch))
    assert len(rows) == case["count"] - epochs[0].skipped + epochs[0].repeated
    if not case["drop_last"] and (limit is None or case["oversized"] == "alone"):
        assert set(rows) == set(range(case["count"]))
    for epoch in epochs:
        for batch in batches(epoch):
            assert len(batch) <= most_samples
            if limit is not None and len(batch) > 1:
                assert sizes[batch].sum() <= limit


@pytest.mark.slow
@given(LIMITS, st.integers(1, 5))
def test_shuffled_batches_are_the_same_and_as_many_in_every_epoch(case, epochs):
    sizes = np.random.default_rng(case["seed"]).integers(1, 50, case["count"])
    rule = BatchRule(
        case["count"],
        batch_size=case["batch_size"],
        limits={"nodes": case["limit"] or 30},
        sizes={"nodes": sizes},
        shuffle="batches",
        seed=case["seed"],
        oversized=case["oversized"],
        bucket_by=case["bucket_by"],
        rank=None,
    )

    drawn = [list(map(tuple, batches(make_epoch(rule, e)))) for e in range(epochs + 1)]

    assert len({frozenset(batches_of_epoch) for batches_of_epoch in drawn}) == 1
    assert len({len(batches_of_epoch) for batches_of_epoch in drawn}) == 1
    if len(drawn[0]) > 20:
        assert drawn[0] != drawn[1]
    # Its twin: those of shuffled samples are others.
    twin = replace(rule, shuffle=True)
    if len(drawn[0]) > 5 and any(len(batch) > 1 for batch in drawn[0]):
        of_samples = [set(map(tuple, batches(make_epoch(twin, e)))) for e in range(9)]
        assert any(one != of_samples[0] for one in of_samples)


@given(st.lists(st.integers(0, 99), min_size=1), st.integers(1, 9))
def test_every_sample_fits_its_buckets_bound(sizes, buckets):
    sizes_array = np.array(sizes)

    bounds = bucket_bounds(sizes_array, buckets)

    assert (sizes_array <= bounds[bucket_of(sizes_array, buckets)]).all()
    assert len(set(bounds.tolist())) <= buckets


def test_the_epoch_moves_on_and_can_be_chosen():
    sampler = EpochBatches(BatchRule(20, batch_size=20, shuffle=True))

    first, second = [list(sampler) for _ in range(2)]
    sampler.set_epoch(0)

    assert first != second
    assert list(sampler) == first


def test_an_epoch_can_begin_in_the_middle():
    sampler = EpochBatches(BatchRule(6, batch_size=2))
    sampler.position.go_to(Position(batches=2, samples=4))

    assert list(sampler) == [[4, 5]]
    assert len(list(sampler)) == 3


def test_two_batches_never_share_a_seed():
    sampler = EpochBatches(BatchRule(1000, batch_size=1))

    seeds = {rows.seed for _ in range(3) for rows in sampler}

    assert len(seeds) == 3000


@pytest.mark.parametrize(
    "wrong",
    [
        {"oversized": "drop"},
        {"shuffle": "yes"},
        {"rank": 2, "ranks": 2},
        {"batch_size": 0},
        {"buckets": 0},
    ],
)
def test_wrong_values_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        BatchRule(3, **wrong)


def test_the_samples_of_an_epoch_are_not_looped_over_in_python():
    sizes = np.random.default_rng(0).integers(1, 40, 10**6)
    rule = BatchRule(
        10**6, limits={"nodes": 2000}, sizes={"nodes": sizes}, shuffle=True
    )
    calls = 0

    def count_calls(*_):
        nonlocal calls
        calls += 1

    sys.setprofile(count_calls)
    try:
        make_epoch(rule, 0)
    finally:
        sys.setprofile(None)

    # Some 14 calls for each of 10,000 batches; there are a million samples.
    assert calls < 500_000
