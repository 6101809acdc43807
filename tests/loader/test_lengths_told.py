"""Loops that count by the length of another epoch are told what they left unread."""

import gc
import itertools
import random
import warnings

import numpy as np
import pytest

from loaderkit import build_loader

EPOCHS = 5
LEFT = "was left after"


class Sized(list):
    """Rows of as many nodes and edges as their numbers draw."""

    def sizes(self):
        chance = random.Random(len(self))
        return {
            name: np.array([chance.randint(1, 30) for _ in self])
            for name in ("nodes", "edges")
        }


def draw_loader(chance):
    """Draw a loader, of which most have epochs of unlike lengths."""
    options = chance.choice(
        [
            {"max_nodes": 60},
            {"max_nodes": 60, "batch_size": 5},
            {"max_nodes": 70, "max_edges": 60},
            {"max_nodes": 60, "bucket_by": "nodes", "buckets": 2},
            {"max_nodes": 25, "oversized": "alone"},
            {"max_edges": 28, "oversized": "skip"},
            {"max_edges": 60, "drop_last": True},
            {"batch_size": 4},
        ]
    )
    shuffles = [True, True, True, "block", False]
    if "max_nodes" in options:
        shuffles.append("batches")
    options["shuffle"] = chance.choice(shuffles)
    ranks = chance.choice([1, 1, 2, 3])
    options |= {"seed": chance.randrange(99), "num_workers": 0}
    options |= {"rank": chance.randrange(ranks), "world_size": ranks}
    return build_loader(Sized(range(chance.randint(40, 80))), **options)


def count_by_the_first(loader):
    batches = len(loader)
    for _ in range(EPOCHS):
        yield list(itertools.islice(iter(loader), batches))


def count_by_the_first_as_lightning_does(loader):
    """It asks for the length of each epoch, too, and holds the iterator of the last."""
    batches = len(loader)
    for _ in range(EPOCHS):
        begun = iter(loader)
        len(loader)
        yield list(itertools.islice(begun, batches))


def count_by_the_first_and_log(loader):
    batches = len(loader)
    for _ in range(EPOCHS):
        rows = []
        for batch, _ in zip(loader, range(batches), strict=False):
            rows.append(batch)
            if len(rows) == batches:
                break
            len(loader)
        yield rows


COUNTED_BY_ANOTHER = [
    count_by_the_first,
    count_by_the_first_as_lightning_does,
    count_by_the_first_and_log,
]


def read_whole(loader):
    for _ in range(EPOCHS):
        yield list(loader)


def plan_steps_and_read_whole(loader):
    len(loader)  # for a schedule, say
    yield from read_whole(loader)


def ask_in_each_and_stop_early(loader):
    """As a progress bar does; and a budget ends the loop wherever it is."""
    for epoch in range(EPOCHS):
        batches = len(loader)
        yield list(itertools.islice(iter(loader), max(1, batches - epoch)))


def read_a_part(loader):
    part = len(loader) // 2
    for _ in range(EPOCHS):
        yield list(itertools.islice(iter(loader), part))


def look_at_the_first(loader):
    len(loader)
    for _ in range(EPOCHS):
        next(iter(loader))
        yield []


LOOK_ALIKES = [
    read_whole,
    plan_steps_and_read_whole,
    ask_in_each_and_stop_early,
    read_a_part,
    look_at_the_first,
]


def run(loop, loader):
    """Give the batches of each epoch, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epochs = [sum(map(len, epoch)) for epoch in loop(loader)]
        gc.collect()
    return epochs, [str(warning.message) for warning in caught]


def samples_of_epochs(seed):
    """Count the samples that epochs read to their ends have."""
    return run(read_whole, draw_loader(random.Random(seed)))[0]


@pytest.mark.slow
@pytest.mark.parametrize("loop", COUNTED_BY_ANOTHER)
def test_a_loop_is_told_of_samples_that_it_leaves_out(loop, every_case):
    found = 0
    for seed in range(150 if every_case else 30):
        whole = samples_of_epochs(seed)

        read, told = run(loop, draw_loader(random.Random(seed)))

        left_out = [epoch for epoch in range(EPOCHS) if read[epoch] < whole[epoch]]
        assert len(told) == bool(left_out), (seed, told)
        if left_out:
            found += 1
            first = left_out[0]
            missing = whole[first] - read[first]
            assert told[0].startswith(f"epoch {first} {LEFT} "), seed
            assert f": {missing} sample" in told[0], (seed, told)
            assert "shuffle='batches'" in told[0], seed
    assert found >= 5


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("loop", LOOK_ALIKES)
def test_other_loops_are_told_nothing(loop, every_case):
    for seed in range(150 if every_case else 30):
        _, told = run(loop, draw_loader(random.Random(seed)))

        assert told == [], seed


def test_a_list_that_grows_is_told_of_as_what_it_is():
    data = list(range(12))
    loader = build_loader(data, batch_size=4, num_workers=0)
    batches = len(loader)
    list(loader)
    data.extend(range(5))

    with pytest.warns(UserWarning, match="The dataset has probably grown") as caught:
        list(itertools.islice(iter(loader), batches))

    assert "epoch 1 was left after 3 of its 5 batches" in str(caught[0].message)
    assert "5 samples of it were not read" in str(caught[0].message)


def sampler_of(shuffle):
    data = Sized(range(60))
    loader = build_loader(
        data, max_nodes=60, shuffle=shuffle, seed=7, num_workers=0, rank=0, world_size=2
    )
    return loader.batch_sampler


@pytest.mark.parametrize("asks", ["once", "each", "never"])
@pytest.mark.parametrize("shuffle", [True, "batches"])
def test_passes_over_the_batches_of_all_ranks_are_told_where_they_begin(shuffle, asks):
    """accelerate reads these, and how far is not seen."""
    sampler = sampler_of(shuffle)
    lengths = []
    for epoch in range(8):
        sampler.set_epoch(epoch)
        lengths.append(sum(1 for _ in sampler))
    sampler = sampler_of(shuffle)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if asks == "once":
            len(sampler)
        for epoch in range(8):
            sampler.set_epoch(epoch)
            if asks == "each":
                len(sampler)
            assert sum(1 for _ in sampler) == lengths[epoch]

    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (max(lengths) > lengths[0] and asks == "once")
    assert (max(lengths) > lengths[0]) == (shuffle is True)
    if texts:
        longer = next(e for e in range(8) if lengths[e] > lengths[0])
        begin = f"epoch {longer} has {lengths[longer]} batches, and the last length "
        assert texts[0].startswith(f"{begin}that was asked for was {lengths[0]}")
