"""Code of a caller's: draws numbers, keeps things, and fails if it shall."""

import random
import warnings

import numpy as np
import torch
from torch import nn

import loaderkit

WIDTH, COUNT = 4, 12


class OfTheCallerError(Exception):
    """What code of the caller's raises."""


FAILURES = {
    "done": None,
    "failed": OfTheCallerError,
    "interrupted": KeyboardInterrupt,
}


class Code:
    """Draws a number of each kind, notes its calls, and fails if it shall."""

    def __init__(self, failure, at=None):
        self.failure, self.at = failure, at
        self.calls = []

    def run(self, *noted):
        torch.rand(1)
        np.random.rand()
        random.random()
        self.calls.append(noted)
        if self.failure is not None and (self.at is None or noted == (self.at,)):
            raise self.failure


class Model(nn.Module):
    """Has all that a step changes."""

    def __init__(self, failure=None):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout().eval()
        self.code = Code(failure)
        self.generator = torch.Generator().manual_seed(1)
        self.numbers = np.random.default_rng(0)
        self.first.weight.grad = torch.ones(WIDTH, WIDTH)
        self.kept = []
        self.first.register_forward_hook(lambda *seen: self.kept.append(seen))

    def forward(self, rows):
        self.code.run(rows)
        torch.rand(1, generator=self.generator)
        self.numbers.random()
        return self.drop(self.norm(self.frozen(self.first(rows)))).mean()


class Samples(torch.utils.data.Dataset):
    """Reading them changes them, in the process that reads."""

    def __init__(self, failure=None, at=None):
        self.code = Code(failure, at)
        self.rows = torch.arange(COUNT * WIDTH).float().view(COUNT, WIDTH)
        self.generator = random.Random(0)

    def __len__(self):
        return COUNT

    def __getitem__(self, row):
        self.generator.random()
        self.code.run(row)
        return self.rows[row]


class Stream(torch.utils.data.IterableDataset):
    """Goes on in the next epoch where the last one ended."""

    def __init__(self, failure=None, at=None):
        self.samples, self.epochs = Samples(failure, at), 0

    def __iter__(self):
        self.epochs += 1
        for row in range(COUNT):
            yield self.samples[row] + self.epochs


class Keyed(loaderkit.SafeDataset):
    """Loads samples as the others read them."""

    def __init__(self, failure=None, at=None):
        super().__init__()
        self.samples = Samples(failure, at)

    def keys(self):
        return list(range(COUNT))

    def load(self, key):
        return self.samples[key]


class Join(Code):
    """Joins samples."""

    def __call__(self, samples):
        self.run(len(samples))
        return torch.utils.data.default_collate(samples)


def outcome_of(call):
    """Give what a call gives; None where it fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except (Exception, KeyboardInterrupt, SystemExit):  # noqa: BLE001 -- or not
            return None
