"""What was told of an epoch's length before a state made it longer."""

import operator
import random
import warnings

import numpy as np
import pytest

from loaderkit import build_loader

COUNT = 48


def loader_of(ranks, batch_size=4):
    return build_loader(
        list(range(COUNT)),
        batch_size=batch_size,
        num_workers=0,
        rank=0,
        world_size=ranks,
        seed=1,
        shuffle=True,
    )


def state_after(steps, ranks):
    loader = loader_of(ranks)
    for _ in zip(range(steps), loader, strict=False):
        pass
    return loader.state_dict()


@pytest.mark.parametrize("batch_size", [3, 4, 6, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("ranks_before", [1, 2, 3])
def test_a_length_that_leaves_out_batches_is_told(ranks_before, ranks, batch_size):
    state = state_after(3, ranks_before)
    loader = loader_of(ranks, batch_size)
    told = len(loader)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader.load_state_dict(state)

    rest = sum(1 for _ in loader)
    # As Lightning counts: so many steps of the epoch are done, and ``told`` are all.
    leaves_out = 3 + rest > told
    assert len(caught) == leaves_out
    if leaves_out:
        begin = f"len(loader) was {told} before this state was loaded, and is "
        assert str(caught[0].message).startswith(f"{begin}{3 + rest} now")


def test_nobody_is_told_of_a_length_that_nobody_asked_for():
    loader = loader_of(2)

    loader.load_state_dict(state_after(3, 1))  # warnings are errors

    assert len(list(loader)) > 3


class Sized(list):
    """Rows of 1 to 60 nodes: epochs have 29 to 31 batches of at most 130."""

    def sizes(self):
        chance = random.Random(1)
        return {"nodes": np.array([chance.randint(1, 60) for _ in self])}


def sized_loader(ranks):
    rows = Sized(range(100))
    options = {"batch_size": 100, "max_nodes": 130, "num_workers": 0, "seed": 0}
    return build_loader(rows, shuffle=True, rank=0, world_size=ranks, **options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_length_asked_while_an_epoch_is_read_leaves_out_none_of_its_batches(ranks):
    loader = sized_loader(ranks)
    alone = [len(list(loader)) for _ in range(12)]
    loader = sized_loader(ranks)

    told_before, told_within, told_behind = [], [], []
    for _ in alone:
        told_before.append(len(loader))
        epoch = iter(loader)
        told_within.append(len(loader))
        for _ in range(len(epoch)):
            next(epoch)
        told_behind.append(len(loader))  # the last batch came, and it is still held

    assert len(set(alone)) > 1
    assert told_before == alone
    assert all(map(operator.ge, told_within, alone))
    assert told_behind[:-1] == alone[1:]


def test_a_length_asked_behind_set_epoch_is_that_of_the_epoch_that_was_set():
    alone = sized_loader(1)
    lengths = [len(list(alone)) for _ in range(12)]
    longest, shortest = lengths.index(max(lengths)), lengths.index(min(lengths))
    loader = sized_loader(1)
    loader.set_epoch(longest)
    begun = iter(loader)
    next(begun)

    loader.set_epoch(shortest)

    assert len(loader) == min(lengths)
