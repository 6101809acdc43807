"""Random numbers within a block follow from its seed, and go on behind it as before."""

import contextlib
import random

import numpy as np
import pytest
import torch

from loaderkit.randomness import Seeded


def draw_all():
    """Draw from every generator; normal numbers too, which are drawn in pairs."""
    return (
        torch.rand(()).item(),
        random.random(),
        random.gauss(0.0, 1.0),
        np.random.rand(),
        np.random.randn(),
    )


def seed_all(seed=3):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def numbers_of_training(block, steps=6):
    """Draw between blocks, an odd number of normal numbers every other time."""
    seed_all()
    numbers = []
    for step in range(steps):
        numbers.append(draw_all())
        if step % 2:
            numbers.append((np.random.randn(), random.gauss(0.0, 1.0)))
        block(step)
    return numbers


def numbers_without_blocks():
    return numbers_of_training(lambda _: None)


@pytest.mark.parametrize("draws", [0, 1, 2, 700])
def test_what_is_drawn_within_does_not_show_behind(draws):
    def block(step):
        with Seeded(step):
            for _ in range(draws):
                draw_all()

    assert numbers_of_training(block) == numbers_without_blocks()


def test_its_twin_that_seeds_without_putting_back_shows():
    assert numbers_of_training(seed_all) != numbers_without_blocks()


def test_the_same_seed_gives_the_same_numbers_whatever_waits():
    numbers = []
    seed_all()
    for step in range(4):
        np.random.randn(step)
        random.gauss(0.0, 1.0)
        with Seeded(77):
            numbers.append(draw_all())

    assert len(set(numbers)) == 1


def test_a_training_that_draws_nothing_is_left_as_it_was():
    seed_all()
    np.random.randn(2)
    expected = np.random.get_state(legacy=False)

    for step in range(3):
        with Seeded(step):
            pass

    state = np.random.get_state(legacy=False)
    assert np.array_equal(state["state"]["key"], expected["state"]["key"])
    assert state["state"]["pos"] == expected["state"]["pos"]
    assert state["has_gauss"] == expected["has_gauss"]


def test_blocks_within_blocks_put_back_what_each_found():
    def block(step):
        with Seeded(step):
            first = draw_all()
            with Seeded(step + 100):
                draw_all()
            second = draw_all()
        with Seeded(step):
            assert (draw_all(), draw_all()) == (first, second)

    assert numbers_of_training(block) == numbers_without_blocks()


def test_an_error_within_puts_back_too():
    def block(step):
        with contextlib.suppress(ZeroDivisionError), Seeded(step):
            draw_all()
            _ = step / 0

    assert numbers_of_training(block) == numbers_without_blocks()


def test_another_generator_behind_numpys_functions_is_put_back_too():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        expected = list(np.random.rand(3))
        np.random.set_bit_generator(np.random.PCG64(5))
        numbers = []
        for _ in range(3):
            numbers.append(np.random.rand())
            with Seeded(1):
                np.random.rand()
    finally:
        np.random.set_bit_generator(before)

    assert numbers == expected
