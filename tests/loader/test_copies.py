"""Loaders that are pickled, copied or looked at: none of it moves the loader."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.multiprocessing
from data import Counting
from fresh_process import CONTEXT
from process_groups import connected
from sent_loaders import COUNT, Rows, epochs, read_as_rank
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from loaderkit import build_loader


def drawn(generator):
    return RandomSampler(Rows(), generator=generator)


OPTIONS = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "in blocks": lambda: {"shuffle": "block", "drop_last": True},
    "by size": lambda: {"max_nodes": 9, "shuffle": True, "batch_size": None},
    "in buckets": lambda: {"bucket_by": "nodes", "buckets": 3, "shuffle": True},
    "one by one": lambda: {"batch_size": None, "shuffle": True},
    "rank 1 of 3": lambda: {"shuffle": True, "rank": 1, "world_size": 3},
    "rank 1 of 2, by size": lambda: {
        "max_nodes": 9,
        "shuffle": True,
        "batch_size": None,
        "rank": 1,
        "world_size": 2,
    },
    "generator": lambda: {
        "generator": torch.Generator().manual_seed(3),
        "shuffle": True,
        "seed": None,
    },
    "RandomSampler": lambda: {"sampler": drawn(None)},
    "RandomSampler, own generator": lambda: {
        "sampler": drawn(torch.Generator().manual_seed(4))
    },
    "weighted": lambda: {"sampler": WeightedRandomSampler(torch.ones(COUNT), COUNT)},
    "batches": lambda: {
        "batch_sampler": BatchSampler(SequentialSampler(Rows()), 3, drop_last=False),
        "batch_size": "auto",
    },
}
WAYS = {
    "pickled": lambda loader: pickle.loads(pickle.dumps(loader)),
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
}
MOMENTS = ["new", "behind an epoch", "in the middle", "where a state was loaded"]


def built(name, **more):
    options = {"batch_size": 3, "num_workers": 0, "seed": 1, "probe": False} | more
    return build_loader(Rows(), **(options | OPTIONS[name]()))


def bring(loader, moment):
    """Bring a loader to a place; gives what must be held for it."""
    if moment == "behind an epoch":
        list(loader)
    running = iter(loader) if moment in MOMENTS[2:] else None
    if running is not None:
        next(running)
    if moment == "where a state was loaded":
        loader.load_state_dict(loader.state_dict())
    return running


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_copy_gives_what_the_loader_gives_and_neither_moves_the_other(name):
    for way, moment in itertools.product(WAYS, MOMENTS):
        loader, alone = built(name), built(name)
        running, other = bring(loader, moment), bring(alone, moment)

        again = WAYS[way](loader)

        wanted = epochs(alone)
        assert epochs(again) == wanted, f"{way}, {moment}"
        assert epochs(loader) == wanted, f"{way}, {moment}"
        del running, other


class Transformed(Rows):
    """Has what a loader holds weakly, to see whether it is replaced."""

    def __init__(self):
        super().__init__()
        self.transform, self.parts = pickle.dumps, [torch.ones(3), self.__class__]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [{}, {"persistent_workers": True}])
def test_a_loader_with_workers_travels_without_them(workers):
    loaders = [
        build_loader(data, batch_size=3, num_workers=1, seed=1, **workers)
        for data in (Rows(), Counting(), Transformed())
    ]
    for loader in loaders:
        wanted = epochs(loader)
        running = iter(loader)
        next(running)

        again = pickle.loads(pickle.dumps(loader))
        again.set_epoch(0)

        assert epochs(again) == wanted
        again.close()
        loader.close()


def test_a_trainers_own_loader_travels_too():
    plain = type(built("shuffled"))(Rows(), batch_size=4)

    assert epochs(pickle.loads(pickle.dumps(plain))) == epochs(plain)


@pytest.mark.slow
def test_a_loader_sent_to_ranks_is_refused_unless_that_was_asked_for(tmp_path):
    asked = built("shuffled", rank=0, world_size=1)
    loaders = {"found": built("shuffled"), "asked": asked}

    connected(
        # As torch.multiprocessing.spawn, but from a server that has imported torch.
        lambda attempt: torch.multiprocessing.start_processes(
            read_as_rank,
            (loaders, tmp_path, f"store {attempt}"),
            nprocs=2,
            start_method=CONTEXT.get_start_method(),
        )
    )

    for rank in (0, 1):
        text = (tmp_path / f"found {rank}").read_text()
        assert f"was built for rank 0 of 1, and this is rank {rank} of 2" in text
        assert (tmp_path / f"asked {rank}").read_text() == str(epochs(copy.copy(asked)))


@pytest.mark.many_cases
@pytest.mark.filterwarnings("ignore:the batches of all ranks are given")
# a length is asked for between epochs of other lengths
@pytest.mark.filterwarnings("ignore:epoch .* the last length that was asked for")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_look_at_the_samplers_does_not_move_the_loader(name):
    if name == "RandomSampler, own generator":
        pytest.skip("a look draws from the user's generator, as in torch")
    for moment in MOMENTS:
        loader, alone = built(name), built(name)
        running, other = bring(loader, moment), bring(alone, moment)
        length = len(loader)

        for sampler in (loader.sampler, loader.batch_sampler):
            for _ in range(0 if sampler is None else 3):
                list(sampler)
                list(itertools.islice(sampler, 1))
                len(sampler)

        assert len(loader) == length == len(alone)
        assert loader.state_dict() == alone.state_dict(), moment
        assert epochs(loader) == epochs(alone), moment
        del running, other


@pytest.mark.parametrize("name", ["shuffled", "in blocks", "by size", "in buckets"])
def test_whoever_loops_over_the_sampler_gets_every_epoch_of_the_loader(name):
    loader = built(name)
    again = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)

    wanted = epochs(built(name))
    assert epochs(again) == wanted
    loader.set_epoch(0)
    assert epochs(again) == wanted
    stopped = built(name)
    iterator = iter(stopped)
    next(iterator), next(iterator)
    loader.load_state_dict(stopped.state_dict())
    assert epochs(again)[0] == wanted[0][2:]
    loader.set_epoch(1)
    assert epochs(again)[0] == wanted[1]
