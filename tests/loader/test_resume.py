"""A run that stops, or is killed, goes on with exactly the missing batches."""

import json
import multiprocessing
import os
import signal
import time

import pytest
import torch
from data import Counting, Noisy
from torch.utils.data import RandomSampler

from loaderkit import LoaderError, build_loader

FORK = multiprocessing.get_context("fork")


def rows_of(loader):
    return [batch.y.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{"batch_size": 3}, {"max_nodes": 13}])
def test_the_missing_batches_follow(cache, workers, options):
    options |= {"shuffle": True, "seed": 9, "num_workers": workers}
    whole = build_loader(cache, **options)
    wanted = [rows_of(whole) for _ in range(3)]
    first, second = (build_loader(cache, **options) for _ in range(2))
    list(first)
    iterator = iter(first)
    seen = [next(iterator).y.tolist() for _ in range(4)]

    second.load_state_dict(json.loads(json.dumps(first.state_dict())))

    assert seen + rows_of(second) == wanted[1]
    assert rows_of(second) == wanted[2]


def test_a_seed_that_nobody_chose_is_taken_over(cache):
    first, second = (build_loader(cache, batch_size=3, shuffle=True) for _ in range(2))
    iterator = iter(first)
    next(iterator)

    second.load_state_dict(first.state_dict())

    assert rows_of(second) == [batch.y.tolist() for batch in iterator]
    assert second.plan.seed == first.plan.seed


def test_between_two_epochs_the_next_one_follows(cache):
    first, second = (
        build_loader(cache, batch_size=9, shuffle=True, seed=2) for _ in range(2)
    )
    list(first)
    state = first.state_dict()

    second.load_state_dict(state)

    assert (state["epoch"], state["batches"]) == (1, 0)
    assert rows_of(second) == rows_of(first)


def test_random_numbers_of_reading_go_on_too():
    options = {"batch_size": 4, "seed": 3, "num_workers": 0}
    wanted = [each["drawn"].tolist() for each in build_loader(Noisy(), **options)]
    loader = build_loader(Noisy(), **options)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()

    again = build_loader(Noisy(), **options)
    again.load_state_dict(state)

    assert [each["drawn"].tolist() for each in again] == wanted[1:]


def test_a_sampler_of_the_users_is_read_on():
    def loader():
        order = RandomSampler(range(10), generator=torch.Generator().manual_seed(1))
        return build_loader(list(range(10)), sampler=order, batch_size=3, seed=0)

    wanted = [each.tolist() for each in loader()]
    stopped, again = loader(), loader()
    iterator = iter(stopped)
    next(iterator)
    again.load_state_dict(stopped.state_dict())

    assert [each.tolist() for each in again] == wanted[1:]


def test_an_iterable_dataset_is_read_on():
    stopped, again = (build_loader(Counting(), batch_size=4) for _ in range(2))
    next(iter(stopped))

    again.load_state_dict(stopped.state_dict())

    assert [each.tolist() for each in again] == [[4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("options", [{"seed": 2}, {"seed": 1, "batch_size": 5}])
def test_another_loaders_state_is_refused(cache, options):
    loader = build_loader(cache, batch_size=3, seed=1)
    other = build_loader(cache, **{"batch_size": 3, **options})

    with pytest.raises(LoaderError, match="The state has"):
        other.load_state_dict(loader.state_dict())


def train(cache, workers, log, state):
    """Read on from the state that is there, noting each batch before the next."""
    loader = build_loader(
        cache, batch_size=3, shuffle=True, seed=7, num_workers=workers
    )
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    for batch in loader:
        time.sleep(0.02)
        new = state.with_suffix(".new")
        new.write_text(json.dumps(loader.state_dict()))
        log.joinpath(str(loader.state_dict()["batches"])).write_text(
            str(batch.y.tolist())
        )
        new.replace(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_goes_on(cache, tmp_path, workers):
    log, state = tmp_path / "log", tmp_path / "state.json"
    log.mkdir()
    loader = build_loader(cache, batch_size=3, shuffle=True, seed=7, num_workers=0)
    wanted = [str(rows) for rows in rows_of(loader)]

    kills = 0
    for pause in (0.15, 0.2, 0.25):
        child = FORK.Process(target=train, args=(cache, workers, log, state))
        child.start()
        child.join(pause)
        if child.exitcode is None:
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        child.join()
    last = FORK.Process(target=train, args=(cache, workers, log, state))
    last.start()
    last.join()

    found = [log.joinpath(str(n + 1)).read_text() for n in range(len(wanted))]
    assert kills
    assert last.exitcode == 0
    assert found == wanted
