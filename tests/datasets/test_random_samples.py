"""Samples that draw random numbers: each has its own, whoever reads it."""

import os
import random

import numpy as np
import pytest
import torch

from loaderkit import SafeDataset, pack
from loaderkit.errors import DatasetError
from loaderkit.testing import assert_same

COUNT = 40
DRAWS = {
    "torch": lambda: torch.rand(3),
    "torch normal": lambda: torch.randn(()),
    "torch permutation": lambda: torch.randperm(50),
    "numpy": lambda: np.random.rand(),
    "numpy normal": lambda: np.random.standard_normal(3),
    "numpy integers": lambda: np.random.randint(1 << 30, size=3),
    "random": random.random,
    "random normal": lambda: random.gauss(0.0, 1.0),
    "random choice": lambda: random.sample(range(1000), 3),
}


class Noisy(torch.utils.data.Dataset):
    """Each sample is drawn; some draw more than others."""

    def __len__(self):
        return COUNT

    def __getitem__(self, row):
        for _ in range(row % 3):
            [draw() for draw in DRAWS.values()]
        return {"row": row, **{name: draw() for name, draw in DRAWS.items()}}


class NoisyFiles(SafeDataset):
    """The same by ``load``; one of its samples fails until a file says it is mended."""

    def __init__(self, mended):
        super().__init__()
        self.mended = mended

    def keys(self):
        return range(COUNT)

    def load(self, key):
        if key == COUNT // 2 and not self.mended.exists():
            msg = "not yet"
            raise ValueError(msg)
        return {**Noisy()[key], "bulk": torch.rand(500)}


def packed(path, dataset=None, *, seed=1, **options):
    torch.manual_seed(seed)
    return list(pack(dataset or Noisy(), path, **options))


@pytest.mark.slow
def test_no_sample_has_the_numbers_of_another(tmp_path):
    samples = packed(tmp_path / "c.lk", workers=2)

    for name in DRAWS:
        drawn = {repr(sample[name]) for sample in samples}
        assert len(drawn) == COUNT, name


@pytest.mark.slow
def test_the_samples_are_the_same_for_every_number_of_workers(tmp_path):
    here, *others = (
        packed(tmp_path / str(workers), workers=workers) for workers in (0, 1, 3)
    )

    for other in others:
        assert_same(here, other)


def test_its_twin_with_another_seed_differs(tmp_path):
    first = packed(tmp_path / "1", seed=1, workers=0)
    second = packed(tmp_path / "2", seed=2, workers=0)

    for name in DRAWS:
        assert repr(first[7][name]) != repr(second[7][name])


@pytest.mark.parametrize("workers", [0, 1])
def test_packing_draws_none_of_the_callers_numbers(tmp_path, workers):
    def numbers():
        return [draw() for draw in DRAWS.values()]

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    numbers()
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())

    pack(Noisy(), tmp_path / "c.lk", workers=workers)

    now = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    assert_same(list(states), list(now))


@pytest.mark.slow
@pytest.mark.parametrize("again_seed", [1, 2])
def test_a_build_of_drawn_samples_goes_on_where_they_are_drawn_again(
    tmp_path, again_seed, caplog
):
    torch.manual_seed(1)
    dataset = NoisyFiles(tmp_path / "mended")
    options = {"workers": 0, "shard_bytes": 8_000}
    with pytest.raises(DatasetError, match="not yet"):
        pack(dataset, tmp_path / "c.lk", **options)
    dataset.mended.touch()

    samples = packed(tmp_path / "c.lk", dataset, seed=again_seed, **options)

    assert_same(samples, packed(tmp_path / "d.lk", dataset, seed=again_seed, **options))
    assert ("anew" in caplog.text) == (again_seed != 1)


class Exits(torch.utils.data.Dataset):
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 8

    def __getitem__(self, row):
        if row == 5:
            raise self.error
        return {"row": row}


def test_seeds_of_rows_cost_nothing_where_nobody_draws(tmp_path, monkeypatch):
    seeded = []
    # Seeds are set and taken back at once: nothing is left to see them by.
    monkeypatch.setattr("loaderkit.datasets.block_readers.seed_all", seeded.append)

    pack([Noisy()[row] for row in range(5)], tmp_path / "list.lk", workers=0)
    assert seeded == []

    pack(Noisy(), tmp_path / "dataset.lk", workers=0)
    assert len(set(seeded)) == COUNT


@pytest.mark.slow
def test_a_worker_that_ends_itself_is_not_called_killed(tmp_path):
    with pytest.raises(DatasetError, match=r"worker ended .*exit status 3"):
        pack(EndsItself(), tmp_path / "c.lk", workers=1)


class EndsItself(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, row):
        os._exit(3)
