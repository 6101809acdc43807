"""Seeds that ``worker_init_fn`` sets, where random numbers follow from the batch."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from loaderkit import build_loader


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


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_seed_that_worker_init_fn_sets_is_said_to_do_nothing(workers):
    expected = list(build_loader(Draws(), num_workers=0, seed=5))
    loader = build_loader(
        Draws(), num_workers=workers, worker_init_fn=seed_torch, seed=5
    )

    with pytest.raises(UserWarning, match="seeded torch with 5, which has no effect"):
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
