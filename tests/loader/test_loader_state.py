"""States of loaders whose workers live on, and whose seeds are any that torch takes."""

import copy

import pytest
import torch
from data import Noisy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from loaderkit import build_loader

pytestmark = pytest.mark.filterwarnings("ignore:. workers share")


class CountsReads(Dataset):
    """Gives with each row how often this copy of the dataset was read."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 8

    def __getitem__(self, row):
        self.reads += 1
        return row, self.reads

    def state_dict(self):
        return {"reads": self.reads}

    def load_state_dict(self, state):
        self.reads = state["reads"]


class CountsEpochs(IterableDataset):
    """Gives with each row which epoch of this copy of the dataset it is."""

    def __init__(self):
        self.epoch = self.row = 0

    def __iter__(self):
        while self.row < 5:
            self.row += 1
            yield self.row, self.epoch
        self.row = 0
        self.epoch += 1

    def state_dict(self):
        return {"epoch": self.epoch, "row": self.row}

    def load_state_dict(self, state):
        self.epoch, self.row = state["epoch"], state["row"]


def batches_of(iterator):
    return [[column.tolist() for column in batch] for batch in iterator]


BETWEEN_EPOCHS = {
    "nothing": lambda loader, epoch: None,
    "set_epoch": lambda loader, epoch: loader.set_epoch(epoch),
    "close": lambda loader, epoch: loader.close(),
    "close, set_epoch": lambda loader, epoch: (loader.close(), loader.set_epoch(epoch)),
}


@pytest.mark.slow
@pytest.mark.long_cases
@pytest.mark.filterwarnings("ignore:the . workers give the same batches")
@pytest.mark.parametrize("between", BETWEEN_EPOCHS)
@pytest.mark.parametrize("kind", [CountsReads, CountsEpochs])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_state_holds_how_far_the_copies_in_kept_workers_have_come(
    workers, kind, between
):
    def make():
        return build_loader(
            kind(), batch_size=2, num_workers=workers, persistent_workers=True
        )

    for given_batches in (0, 1, 3):
        loader, again = make(), make()
        list(loader)
        BETWEEN_EPOCHS[between](loader, 1)
        iterator = iter(loader) if given_batches else None
        for _ in range(given_batches):
            next(iterator)

        state = copy.deepcopy(loader.state_dict())
        again.load_state_dict(state)

        assert again.state_dict() == state
        remaining = batches_of(loader if iterator is None else iterator)
        assert batches_of(again) == remaining, given_batches
        assert batches_of(again) == batches_of(loader), given_batches
        again.close()
        loader.close()


class NoisyStream(IterableDataset):
    def __iter__(self):
        yield from (Noisy()[row] for row in range(4))


DATASETS = {
    "rows": lambda: (Noisy(), {"shuffle": True}),
    "rows of a sampler": lambda: (Noisy(), {"sampler": [5, 3, 9, 1]}),
    "stream": lambda: (NoisyStream(), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DATASETS)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(-(2**63), 2**64 - 1))
@example(-5)
@example(2**63)
def test_a_seed_comes_with_a_state_whatever_it_is(name, seed):
    dataset, options = DATASETS[name]()
    seeded = build_loader(dataset, seed=seed, batch_size=2, probe=False, **options)
    other = build_loader(dataset, batch_size=2, probe=False, **options)

    other.load_state_dict(seeded.state_dict())

    assert other.plan.seed.value == seed
    for ours, theirs in zip(other, seeded, strict=True):
        assert torch.equal(ours["row"], theirs["row"])
        assert torch.equal(ours["drawn"], theirs["drawn"])
