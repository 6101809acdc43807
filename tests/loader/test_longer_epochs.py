"""What was told of an epoch's length before a state made it longer."""

import warnings

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
