"""Random numbers within a block follow from its seed, and go on behind it as before."""

import contextlib
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from loaderkit import build_loader
from loaderkit.loader.randomness import Seeded


def draw_all():
    """One number of each kind, and a normal one, which are made in pairs."""
    return (
        torch.rand(()).item(), random.random(), random.gauss(), np.random.rand(),
        np.random.randn(),
    )  # fmt: skip


def seed_all(seed=3):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def training(block, steps=6):
    """Draw between blocks, an odd number of normal numbers every other time."""
    seed_all()
    found = []
    for step in range(steps):
        found.append(draw_all())
        if step % 2:
            found.append((np.random.randn(), random.gauss()))
        block(step)
    return found


def undisturbed():
    return training(lambda _: None)


@pytest.mark.parametrize("draws", [0, 1, 2, 700])
def test_what_is_drawn_within_does_not_show_behind(draws):
    def block(step):
        with Seeded(step):
            for _ in range(draws):
                draw_all()

    assert training(block) == undisturbed()


def test_its_twin_that_seeds_without_putting_back_shows():
    assert training(seed_all) != undisturbed()


def test_the_same_seed_gives_the_same_numbers_whatever_waits():
    found = []
    seed_all()
    for step in range(4):
        np.random.randn(step)
        random.gauss()
        with Seeded(77):
            found.append(draw_all())

    assert len(set(found)) == 1


def test_a_training_that_draws_nothing_is_left_as_it_was():
    seed_all()
    np.random.randn(2)
    expected = np.random.get_state(legacy=False)

    for step in range(3):
        with Seeded(step):
            pass

    found = np.random.get_state(legacy=False)
    assert np.array_equal(found["state"]["key"], expected["state"]["key"])
    assert found["state"]["pos"] == expected["state"]["pos"]
    assert found["has_gauss"] == expected["has_gauss"]


def test_blocks_within_blocks_put_back_what_each_found():
    def block(step):
        with Seeded(step):
            first = draw_all()
            with Seeded(step + 100):
                draw_all()
            second = draw_all()
        with Seeded(step):
            assert (draw_all(), draw_all()) == (first, second)

    assert training(block) == undisturbed()


def test_an_error_within_puts_back_too():
    def block(step):
        with contextlib.suppress(ZeroDivisionError), Seeded(step):
            draw_all()
            _ = step / 0

    assert training(block) == undisturbed()


def test_another_generator_behind_numpys_functions_is_put_back_too():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        expected = list(np.random.rand(3))
        np.random.set_bit_generator(np.random.PCG64(5))
        found = []
        for _ in range(3):
            found.append(np.random.rand())
            with Seeded(1):
                np.random.rand()
    finally:
        np.random.set_bit_generator(before)

    assert found == expected


class Draws(Dataset):
    """Gives random numbers."""

    def __len__(self):
        return 3

    def __getitem__(self, row):
        return torch.rand(())


def seed_torch(_):
    torch.manual_seed(5)


def seed_numpy_and_random_from_torch(_):
    """As torch's page on reproducibility has it."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


# A warning is an error in these tests, also in a forked worker, which sends it.


@pytest.mark.parametrize("workers", [1, 2])
def test_a_seed_that_worker_init_fn_sets_is_said_to_do_nothing(workers):
    expected = list(build_loader(Draws(), num_workers=0, seed=5))
    loader = build_loader(
        Draws(), num_workers=workers, worker_init_fn=seed_torch, seed=5
    )

    with pytest.raises(UserWarning, match="seeded torch with 5, which does nothing"):
        list(loader)

    loader.set_epoch(0)
    assert list(loader) == expected  # it is said once


@pytest.mark.parametrize(
    ("data", "init"),
    [(Draws(), seed_numpy_and_random_from_torch), ([1, 2], seed_torch)],
    ids=["nothing else is seeded", "nothing is drawn"],
)
def test_other_seeds_in_worker_init_fn_are_left_alone(data, init):
    list(build_loader(data, num_workers=1, worker_init_fn=init))
