"""A loop that fetches a batch before it uses the one before, and states of it.

The law: whenever a state is saved, whoever goes on from it is given all batches that
were not used, each once, as if nobody had fetched ahead.
"""

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler

from loaderkit import build_loader
from loaderkit.loader.device_prefetch import DevicePrefetcher

COUNT = 14


class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, COUNT, step))


class StatefulStream(IterableDataset):
    """Says its own state."""

    def __init__(self):
        self.given = 0

    def __iter__(self):
        while self.given < COUNT:
            self.given += 1
            yield self.given - 1
        self.given = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def rows(**options):
    return build_loader(
        list(range(COUNT)), batch_size=3, seed=1, lookahead=True, **options
    )


def stream(dataset, **options):
    return build_loader(dataset, batch_size=3, lookahead=True, **options)


def with_sampler():
    sampler = RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(3))
    return rows(num_workers=0, sampler=sampler)


LOADERS = {
    "rows": lambda: rows(num_workers=0),
    "shuffled": lambda: rows(num_workers=0, shuffle=True),
    "sampler": with_sampler,
    "stream": lambda: stream(Stream(), num_workers=0),
    "stateful stream": lambda: stream(StatefulStream(), num_workers=0),
    "prefetched": lambda: DevicePrefetcher(rows(num_workers=0), "cpu"),
    "rows, 2 workers": lambda: rows(num_workers=2, shuffle=True),
    "stream, 2 workers": lambda: stream(Stream(), num_workers=2),
}


def use_fetched_ahead(loader, epochs, states):
    """Use batches as Lightning does, and note the state behind each."""
    used = []
    for _ in range(epochs):
        batches = iter(loader)
        fetched = next(batches, None)
        while fetched is not None:
            batch, fetched = fetched, next(batches, None)
            used.append(np.asarray(batch).tolist())
            states.append(loader.state_dict())
    return used


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] if "workers" in kind else [])
        for kind in LOADERS
    ],
)
def test_whoever_goes_on_is_given_what_was_not_used(kind):
    states = []
    used = use_fetched_ahead(LOADERS[kind](), 2, states)
    chosen = (
        range(len(states) - 1) if "workers" not in kind else (0, len(used) // 2 - 1)
    )

    for saved_behind in chosen:
        loader = LOADERS[kind]()
        loader.load_state_dict(states[saved_behind])
        epochs = 2 if saved_behind < len(used) // 2 - 1 else 1
        rest = use_fetched_ahead(loader, epochs, [])

        assert rest == used[saved_behind + 1 :]


def test_without_lookahead_such_a_loop_loses_a_batch():
    states = []
    loader = build_loader(list(range(COUNT)), batch_size=3, num_workers=0)
    used = use_fetched_ahead(loader, 1, states)

    loader.load_state_dict(states[1])

    assert use_fetched_ahead(loader, 1, []) == used[3:]  # and not used[2:]
