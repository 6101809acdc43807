"""A run that stops, or is killed, goes on with exactly the missing batches."""

import itertools
import json
import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest
import torch
from data import Counting, Noisy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch_geometric.loader import DynamicBatchSampler

from loaderkit import build_loader
from loaderkit.errors import LoaderError, LoaderkitError

pytestmark = pytest.mark.filterwarnings("ignore:. workers share")
FORK = multiprocessing.get_context("fork")


def rows_of(loader):
    return [batch.y.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
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
    assert second.plan.seed.value == first.plan.seed.value


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
    wanted = [batch["drawn"].tolist() for batch in build_loader(Noisy(), **options)]
    loader = build_loader(Noisy(), **options)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()

    again = build_loader(Noisy(), **options)
    again.load_state_dict(state)

    assert [batch["drawn"].tolist() for batch in again] == wanted[1:]


def test_a_sampler_of_the_users_is_read_on():
    def loader():
        order = RandomSampler(range(10), generator=torch.Generator().manual_seed(1))
        return build_loader(list(range(10)), sampler=order, batch_size=3, seed=0)

    wanted = [batch.tolist() for batch in loader()]
    stopped, again = loader(), loader()
    iterator = iter(stopped)
    next(iterator)
    again.load_state_dict(stopped.state_dict())

    assert [batch.tolist() for batch in again] == wanted[1:]


def test_an_iterable_dataset_is_read_on():
    stopped, again = (build_loader(Counting(), batch_size=4) for _ in range(2))
    next(iter(stopped))

    again.load_state_dict(stopped.state_dict())

    assert [batch.tolist() for batch in again] == [[4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("options", [{"seed": 2}, {"seed": 1, "shuffle": True}])
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


def values_of(batches):
    return [batch.tolist() for batch in batches]


def check_rest_is_equal(make, *, epoch, given):
    """Stop a loader after some batches, load its state into another, and compare."""
    stopped, again = make(), make()
    for _ in range(epoch):
        list(stopped)
    iterator = iter(stopped)
    for _ in itertools.islice(iterator, given):
        pass
    state = json.loads(json.dumps(stopped.state_dict()))
    remaining, after = values_of(iterator), values_of(stopped)
    torch.manual_seed(given)

    again.load_state_dict(state)

    saved = again.state_dict()
    for name in set(state) - {"workers", "last_worker"}:  # those are numbered anew
        assert saved[name] == state[name]
    if state["epoch"] == epoch:
        assert values_of(again) == remaining
    else:  # so few batches that they were all given
        assert not remaining
    assert values_of(again) == after


class Cycle(Sampler):
    """Keeps a generator of Python's."""

    def __init__(self, data):
        self.size, self.random = len(data), random.Random(5)

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(self.random.sample(range(self.size), self.size))


class NumpyOrder(Cycle):
    """Keeps a generator of numpy's."""

    def __init__(self, data):
        self.size, self.chance = len(data), np.random.default_rng(3)

    def __iter__(self):
        return iter(self.chance.permutation(self.size).tolist())


class Stateful(Cycle):
    """Says its state, as torchdata asks for it."""

    def __init__(self, data):
        self.size, self.next, self.turn = len(data), 0, 0

    def __iter__(self):
        while self.next < self.size:
            self.next += 1
            yield (self.next * 7 + self.turn) % self.size
        self.next, self.turn = 0, self.turn + 1

    def state_dict(self):
        return {"next": self.next, "turn": self.turn}

    def load_state_dict(self, state):
        self.next, self.turn = state["next"], state["turn"]


class ToldItsEpoch(Cycle):
    """Is told the epoch, and keeps it under a name of its own."""

    def __init__(self, data):
        self.size, self.turn = len(data), 0

    def set_epoch(self, epoch):
        self.turn = epoch

    def __iter__(self):
        return iter([(row * 3 + self.turn) % self.size for row in range(self.size)])


def seeded():
    return torch.Generator().manual_seed(3)


SAMPLERS = {
    "random": lambda data: RandomSampler(data),
    "random, a generator": lambda data: RandomSampler(data, generator=seeded()),
    "weighted": lambda data: WeightedRandomSampler(torch.arange(1.0, 41), 40),
    "weighted, a generator": lambda data: WeightedRandomSampler(
        torch.arange(1.0, 41), 40, generator=seeded()
    ),
    "subset": lambda data: SubsetRandomSampler(range(0, 40, 3)),
    "python": Cycle,
    "numpy": NumpyOrder,
    "stateful": Stateful,
    "list": list,
    "distributed": lambda data: DistributedSampler(data, 2, 1, seed=4),
    "told another name": ToldItsEpoch,
}


@pytest.mark.slow
@given(
    st.sampled_from(sorted(SAMPLERS)),
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 6),
    st.integers(1, 7),
)
@settings(max_examples=40)
def test_the_rest_of_a_samplers_choice_is_equal(kind, batched, epoch, given, size):
    data = list(range(40))

    def make():
        sampler = SAMPLERS[kind](data)
        options = {"sampler": sampler, "batch_size": size}
        if batched:
            options = {"batch_sampler": BatchSampler(sampler, size, drop_last=False)}
        return build_loader(data, num_workers=0, probe=False, **options)

    check_rest_is_equal(make, epoch=epoch, given=given)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distributed", "told another name"])
@pytest.mark.parametrize(("epoch", "given"), [(1, 0), (2, 0), (1, 2)])
def test_a_sampler_that_is_told_its_epoch_goes_on_between_two(kind, epoch, given):
    data = list(range(40))

    def make():
        return build_loader(data, sampler=SAMPLERS[kind](data), batch_size=3)

    check_rest_is_equal(make, epoch=epoch, given=given)


def test_a_sampler_of_graphs_without_length_is_read_on():
    from data import graph

    graphs = [graph(number) for number in range(30)]
    loader = build_loader(
        graphs,
        batch_sampler=DynamicBatchSampler(graphs, 9, shuffle=True),
        num_workers=0,
    )
    again = build_loader(
        graphs,
        batch_sampler=DynamicBatchSampler(graphs, 9, shuffle=True),
        num_workers=0,
    )
    iterator = iter(loader)
    seen = [next(iterator).y.tolist() for _ in range(3)]

    again.load_state_dict(loader.state_dict())
    remaining = rows_of(again)

    assert remaining == [batch.y.tolist() for batch in iterator]
    assert sorted(row for rows in seen + remaining for row in rows) == list(range(30))


class Hidden(Cycle):
    """Gives another order each time, and shows nobody why."""

    turns = itertools.count()

    def __init__(self, data):
        self.size = len(data)

    def __iter__(self):
        turn = next(Hidden.turns)
        return iter([(row + turn) % self.size for row in range(self.size)])


class Counted(Cycle):
    """Counts its epochs, in the open."""

    def __init__(self, data):
        self.size, self.turn = len(data), 0

    def __iter__(self):
        self.turn += 1
        return iter([(row + self.turn) % self.size for row in range(self.size)])


@pytest.mark.parametrize(
    ("kind", "epoch", "given", "why"),
    [
        (Hidden, 0, 2, "gives other batches"),
        (Counted, 1, 2, "turn is 0, the state has"),
        (Counted, 1, 0, "turn is 0, the state has 1"),
    ],
)
def test_a_sampler_that_cannot_be_brought_back_is_refused(kind, epoch, given, why):
    data = list(range(10))
    stopped, again = (
        build_loader(data, sampler=kind(data), batch_size=2, seed=1) for _ in range(2)
    )
    for _ in range(epoch):
        list(stopped)
    if given:
        iterator = iter(stopped)
        for _ in range(given):
            next(iterator)

    with pytest.raises(LoaderError, match=why) as caught:
        again.load_state_dict(stopped.state_dict())

    assert "state_dict()" in caught.value.fix


class Split(IterableDataset):
    """40 numbers, each with a random one, split among the workers."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, 40, step):
            drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
            yield torch.tensor([number, *drawn], dtype=torch.float64)


class SaysItsState(Split):
    """Goes on by its own state, and counts what is read again."""

    def __init__(self):
        self.read = 0

    def __iter__(self):
        info = get_worker_info()
        step = info.num_workers if info else 1
        first = info.id if info else 0
        while first + self.read * step < 40:
            self.read += 1
            yield torch.tensor([first + (self.read - 1) * step, torch.rand(()).item()])
        self.read = 0

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


@pytest.mark.long_cases
@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [Split, SaysItsState])
def test_the_rest_of_an_iterable_dataset_is_equal(kind, workers, persistent):
    if persistent and not workers:
        return

    def make():
        return build_loader(
            kind(),
            batch_size=3,
            seed=1,
            num_workers=workers,
            persistent_workers=persistent or None,
        )

    for epoch, count in ((0, 4), (1, 2), (1, 0)):
        check_rest_is_equal(make, epoch=epoch, given=count)


class OwnIterator(IterableDataset):
    """Is its own iterator, begins anew in ``__iter__``, and has no state before."""

    def __iter__(self):
        info = get_worker_info()
        self.next, self.step = (info.id, info.num_workers) if info else (0, 1)
        return self

    def __next__(self):
        if self.next >= 20:
            raise StopIteration
        self.next += self.step
        return torch.tensor([self.next - self.step])

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        assert self.step
        self.next = state["next"]


class CountsEpochs(SaysItsState):
    """Counts its epochs behind the last sample."""

    def __init__(self):
        super().__init__()
        self.epoch = 0

    def __iter__(self):
        for sample in super().__iter__():
            yield torch.cat([sample, torch.tensor([self.epoch])])
        self.epoch += 1

    def state_dict(self):
        return super().state_dict() | {"epoch": self.epoch}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.epoch = state["epoch"]


@pytest.mark.slow
@pytest.mark.long_cases
@pytest.mark.parametrize(
    ("workers", "persistent"), [(0, False), (1, False), (2, False), (2, True)]
)
@pytest.mark.parametrize("kind", [OwnIterator, CountsEpochs])
@pytest.mark.parametrize(("epoch", "given"), [(0, 0), (0, 2), (1, 0), (1, 3)])
def test_the_rest_of_datasets_with_habits_is_equal(
    kind, workers, persistent, epoch, given
):
    def make():
        return build_loader(
            kind(),
            batch_size=3,
            seed=1,
            num_workers=workers,
            persistent_workers=persistent or None,
        )

    check_rest_is_equal(make, epoch=epoch, given=given)


@pytest.mark.slow
def test_a_sampler_of_which_workers_were_asked_ahead_goes_back_to_its_start():
    def make():
        order = RandomSampler(range(20), generator=torch.Generator().manual_seed(1))
        data = list(range(20))
        return build_loader(data, sampler=order, batch_size=3, num_workers=1)

    check_rest_is_equal(make, epoch=0, given=0)
    check_rest_is_equal(make, epoch=1, given=0)


@pytest.mark.slow
def test_workers_are_kept_beside_an_iterator_that_a_loaded_state_ended():
    loader = build_loader(CountsEpochs(), num_workers=1, persistent_workers=True)
    held = iter(loader)
    next(held)
    state = loader.state_dict()

    loader.load_state_dict(state)
    remaining, after = list(loader), list(loader)

    assert len(remaining) == 39
    assert {batch[0, -1].item() for batch in after} == {1}
    loader.close()


def test_an_iterable_datasets_own_state_spares_reading_again():
    stopped, again = (build_loader(SaysItsState(), batch_size=4) for _ in range(2))
    iterator = iter(stopped)
    next(iterator), next(iterator)

    again.load_state_dict(stopped.state_dict())
    next(iter(again))

    assert again.dataset.read == 12


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (1, 2)])
def test_another_number_of_workers_is_refused_for_an_iterable(before, after):
    stopped, again = (
        build_loader(Split(), batch_size=4, seed=1, num_workers=count)
        for count in (before, after)
    )
    next(iter(stopped))

    with pytest.raises(LoaderError, match="workers") as caught:
        again.load_state_dict(stopped.state_dict())

    assert caught.value.fix == f"num_workers={before}"


class Reader(Dataset):
    """Counts the samples that it gave, and says so."""

    def __init__(self):
        self.given = 0

    def __len__(self):
        return 30

    def __getitem__(self, row):
        self.given += 1
        return torch.tensor([row, self.given])

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("given", [0, 5])
def test_a_datasets_own_state_is_saved_and_restored(workers, persistent, given):
    if persistent and not workers:
        return

    def make():
        return build_loader(
            Reader(),
            batch_size=3,
            seed=1,
            num_workers=workers,
            shuffle=True,
            persistent_workers=persistent or None,
        )

    check_rest_is_equal(make, epoch=1, given=given)


class OneIsSlow(Dataset):
    """Waits in its first samples, so that others come first."""

    def __init__(self, slow):
        self.slow = slow

    def __len__(self):
        return 16

    def __getitem__(self, row):
        if row in self.slow:
            time.sleep(0.15)
        return row


@pytest.mark.slow
@pytest.mark.parametrize(("slow", "given"), [({0}, 4), ({3, 4}, 9), (set(), 1)])
def test_batches_out_of_order_are_neither_lost_nor_repeated(slow, given):
    stopped, again = (
        build_loader(OneIsSlow(slow), num_workers=2, in_order=False, seed=1)
        for _ in range(2)
    )
    iterator = iter(stopped)
    seen = [next(iterator).item() for _ in range(given)]

    again.load_state_dict(json.loads(json.dumps(stopped.state_dict())))

    assert sorted(seen + [batch.item() for batch in again]) == list(range(16))
    assert len(again) == 16


def test_the_epoch_that_was_resumed_goes_on_when_a_loop_names_it(cache):
    def make():
        return build_loader(cache, batch_size=9, shuffle=True, seed=2)

    stopped, again = make(), make()
    stopped.set_epoch(3)
    iterator = iter(stopped)
    next(iterator)
    again.load_state_dict(stopped.state_dict())

    again.set_epoch(3)

    assert rows_of(again) == [batch.y.tolist() for batch in iterator]
    again.set_epoch(3)
    assert len(rows_of(again)) == 5


def test_a_seed_that_nobody_chose_is_taken_over_by_batches_of_any_size(cache):
    first, second = (build_loader(cache, max_nodes=13, shuffle=True) for _ in range(2))
    iterator = iter(first)
    next(iterator)

    second.load_state_dict(first.state_dict())

    assert rows_of(second) == [batch.y.tolist() for batch in iterator]


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        [],
        "state",
        {"version": 2},
        {"version": 1, "seed": 1, "epoch": 0, "batches": 0, "batching": ""},
    ],
    ids=str,
)
def test_what_is_no_state_is_refused(cache, state):
    with pytest.raises(LoaderError, match="state"):
        build_loader(cache, batch_size=3).load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "value"), [("epoch", -1), ("batches", "2"), ("seed", 1.5), ("epoch", None)]
)
def test_a_state_with_a_wrong_value_is_refused(cache, name, value):
    loader = build_loader(cache, batch_size=3)

    with pytest.raises(ValueError, match=f"the state's {name} must be"):
        loader.load_state_dict(loader.state_dict() | {name: value})


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
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

    logged = [log.joinpath(str(n + 1)).read_text() for n in range(len(wanted))]
    assert kills
    assert last.exitcode == 0
    assert logged == wanted


# What the order follows from


class SizedRows(list):
    """Rows that say how many nodes they have."""

    def __init__(self, sizes):
        super().__init__(range(len(sizes)))
        self.nodes = sizes

    def sizes(self):
        return {"nodes": self.nodes}


class Attribute(Sampler):
    """Keeps its rows in the open, and changes them in place."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        random.shuffle(self.rows)
        return iter(list(self.rows))


TWENTY = list(range(20))


def read_by(sampler):
    return lambda: build_loader(
        TWENTY, sampler=sampler(), batch_size=5, seed=0, num_workers=0, probe=False
    )


def in_batches(rows, **options):
    return lambda: build_loader(rows, num_workers=0, seed=0, **options)


def by_buckets(count):
    rows = SizedRows([5, 1, 4, 4, 4, 2, 4, 3, 5, 1, 1, 5])
    return in_batches(rows, bucket_by="nodes", buckets=count, batch_size=2)


def weighted(weights):
    return read_by(lambda: WeightedRandomSampler(weights, 20, generator=seeded()))


OTHER_ORDERS = {
    "buckets": (by_buckets(3), by_buckets(4)),
    "smaller sizes": (
        in_batches(SizedRows([2] * 8), max_nodes=4),
        in_batches(SizedRows([1] * 8), max_nodes=4),
    ),
    "larger sizes": (
        in_batches(SizedRows([1] * 8), max_nodes=4),
        in_batches(SizedRows([2] * 8), max_nodes=4),
    ),
    "fewer rows": (
        read_by(lambda: SequentialList(TWENTY)),
        read_by(lambda: SequentialList(TWENTY[:10])),
    ),
    "list": (read_by(lambda: TWENTY), read_by(lambda: TWENTY[:5] + TWENTY[:15])),
    "subset": (
        read_by(lambda: SubsetRandomSampler(range(10))),
        read_by(lambda: SubsetRandomSampler(range(10, 20))),
    ),
    "weights": (weighted(torch.ones(20)), weighted([1.0] * 10)),
    "kind of generator": (
        read_by(lambda: NumpyOrder(TWENTY)),
        read_by(lambda: LegacyOrder(TWENTY)),
    ),
    "dataset": (
        lambda: build_loader(TWENTY, sampler=[3, 1, 2], num_workers=0),
        lambda: build_loader(TWENTY[:10], sampler=[3, 1, 2], num_workers=0),
    ),
}


class SequentialList(Sampler):
    def __init__(self, data):
        self.data_source = data

    def __len__(self):
        return len(self.data_source)

    def __iter__(self):
        return iter(range(len(self.data_source)))


class LegacyOrder(Cycle):
    """Keeps a generator of the older kind of numpy's."""

    def __init__(self, data):
        self.size, self.chance = len(data), np.random.RandomState(3)

    def __iter__(self):
        return iter(self.chance.permutation(self.size).tolist())


@pytest.mark.parametrize("given", [0, 1, 2])
@pytest.mark.parametrize("name", OTHER_ORDERS)
def test_a_state_of_another_order_is_refused(name, given):
    stopped, other = (make() for make in OTHER_ORDERS[name])
    iterator = iter(stopped)
    for _ in range(given):
        next(iterator)

    with pytest.raises(LoaderError):
        other.load_state_dict(json.loads(json.dumps(stopped.state_dict())))


@pytest.mark.many_cases
@pytest.mark.parametrize("name", OTHER_ORDERS)
def test_a_state_of_the_same_order_is_accepted(name):
    for make in OTHER_ORDERS[name]:
        check_rest_is_equal(make, epoch=0, given=1)
        check_rest_is_equal(make, epoch=1, given=0)


def test_rows_that_a_sampler_changed_in_place_are_refused():
    stopped, again = (read_by(lambda: Attribute(list(TWENTY)))() for _ in range(2))
    list(stopped)

    with pytest.raises(LoaderError, match="rows is not what it was"):
        again.load_state_dict(stopped.state_dict())


@pytest.mark.parametrize(("epoch", "given"), [(0, 2), (1, 0), (2, 3)])
def test_a_legacy_generator_goes_on(epoch, given):
    check_rest_is_equal(read_by(lambda: LegacyOrder(TWENTY)), epoch=epoch, given=given)


BROKEN = {
    "batches": 100,
    "ahead": 5,
    "workers": 3,
    "main": 1,
    "extra": 1,
    "order": 3,
    "epoch": 2**63,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_state_with_a_part_that_cannot_be_is_refused(name):
    loader = build_loader(TWENTY, batch_size=5, num_workers=0)

    with pytest.raises(LoaderkitError):
        loader.load_state_dict(loader.state_dict() | {name: BROKEN[name]})


@pytest.mark.parametrize("ahead", [[1, "x"], [-3], [2.5], [9], None, [0]])
def test_batches_ahead_that_cannot_be_are_refused(ahead):
    loader = build_loader(TWENTY, batch_size=5, num_workers=0)

    with pytest.raises(LoaderkitError):
        loader.load_state_dict(loader.state_dict() | {"ahead": ahead})


@pytest.mark.parametrize("value", [None, {"x": 1}, 3])
def test_the_state_of_a_sampler_must_be_one(value):
    loader = read_by(lambda: TWENTY)()
    state = loader.state_dict()
    state["sampler"] = value

    with pytest.raises(LoaderError, match="no state of a sampler"):
        loader.load_state_dict(state)
    del state["sampler"]
    with pytest.raises(LoaderError, match="lacks sampler"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("kind", ["random, a generator", "list", "distributed"])
def test_the_state_of_rank_0_is_every_ranks(kind):
    def make(rank):
        sampler = SAMPLERS[kind](TWENTY)
        if kind == "distributed":
            sampler = DistributedSampler(TWENTY, 2, rank, seed=4)
        return build_loader(
            TWENTY,
            sampler=sampler,
            batch_size=3,
            rank=rank,
            world_size=2,
            num_workers=0,
            seed=1,
        )

    first = make(0)
    next(iter(first))
    for rank in range(2):
        again = make(rank)
        again.load_state_dict(first.state_dict())
        assert values_of(again) == values_of(make(rank))[1:]


# Epochs that somebody else sets


class Stage(Sampler):
    """Is told its epoch, which it calls a stage."""

    def __init__(self):
        self.stage = 0

    def set_epoch(self, epoch):
        self.stage = epoch

    def __len__(self):
        return 6

    def __iter__(self):
        return iter([self.stage] * 6)


TOLD = {
    "epoch": lambda: DistributedSampler(TWENTY, 1, 0, seed=4),
    "another name": Stage,
}


@pytest.mark.parametrize("kind", TOLD)
@pytest.mark.parametrize("epochs", [[7, 8], [0, 5, 5], [3, 0], [0, 1, 2]])
@pytest.mark.parametrize("early", [False, True])
def test_an_epoch_that_the_user_sets_is_that_of_torchs_loader(kind, epochs, early):
    ours, theirs = TOLD[kind](), TOLD[kind]()
    # Under another name nothing shows it before the loader was built.
    if early and kind == "epoch":
        ours.set_epoch(epochs[0])
    loader = build_loader(TWENTY, sampler=ours, batch_size=3, num_workers=0)
    expected = DataLoader(TWENTY, sampler=theirs, batch_size=3)

    for epoch in epochs:
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)

        assert values_of(loader) == values_of(expected)


@pytest.mark.parametrize("again_by_hand", [False, True])
def test_a_sampler_whose_epoch_was_set_by_hand_goes_on(again_by_hand):
    def make():
        sampler = TOLD["epoch"]()
        loader = build_loader(TWENTY, sampler=sampler, batch_size=3, num_workers=0)
        return sampler, loader

    sampler, stopped = make()
    sampler.set_epoch(7)
    iterator = iter(stopped)
    next(iterator)
    state, (other, again) = stopped.state_dict(), make()
    if again_by_hand:
        other.set_epoch(7)

    again.load_state_dict(state)

    assert values_of(again) == values_of(iterator)
    for distributed_sampler in (sampler, other):
        distributed_sampler.set_epoch(9)
    assert values_of(again) == values_of(stopped)


def test_another_epoch_set_by_hand_is_refused_in_the_middle_of_one():
    stopped, again = (TOLD["epoch"]() for _ in range(2))
    loaders = [
        build_loader(TWENTY, sampler=sampler_of_run, batch_size=3, num_workers=0)
        for sampler_of_run in (stopped, again)
    ]
    next(iter(loaders[0]))
    loaders[1].load_state_dict(loaders[0].state_dict())
    again.set_epoch(4)

    with pytest.raises(LoaderError, match="told another epoch"):
        values_of(loaders[1])


def test_a_stream_that_ends_before_the_state_says_so():
    class Short(IterableDataset):
        def __init__(self, count):
            self.count = count

        def __iter__(self):
            return iter(range(self.count))

    stopped, again = (build_loader(Short(n), batch_size=2) for n in (12, 5))
    iterator = iter(stopped)
    for _ in range(4):
        next(iterator)
    again.load_state_dict(stopped.state_dict())
    remaining = iter(again)

    with pytest.raises(LoaderError, match="ended after 3 batches; the state has 4"):
        next(remaining)
    assert not list(remaining)


def test_a_samplers_state_of_another_number_of_ranks_is_refused_with_the_way_on():
    rows = list(range(20))
    options = {"batch_size": 2, "sampler": rows, "seed": 0, "rank": 0}
    state = build_loader(rows, world_size=2, **options).state_dict()
    other = build_loader(rows, world_size=4, **options)

    with pytest.raises(LoaderError, match=r"2 ranks.*4 ranks") as told:
        other.load_state_dict(state)

    assert "ranks" in told.value.fix
    other.set_epoch(state["epoch"] + 1)  # what the message says
    assert len(list(other)) == 3
