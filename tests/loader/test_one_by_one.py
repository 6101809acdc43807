"""batch_size=None gives the samples themselves, as torch's DataLoader does."""

import itertools
import json

import clients
import numpy as np
import pytest
from data import Counting, Noisy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
)

from loaderkit import build_loader, pack
from loaderkit.errors import OptionError
from loaderkit.testing import assert_same

ALONE = {"batch_size": None, "probe": False}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_by_one")
    return {
        kind: pack(clients.samples_of(kind), folder / kind, workers=0)
        for kind in clients.SAMPLES
    }


@pytest.mark.many_cases
@pytest.mark.parametrize("kind", clients.SAMPLES)
def test_samples_are_those_that_torch_gives(packed, kind):
    wanted = list(DataLoader(clients.samples_of(kind), batch_size=None))

    for data in (packed[kind], clients.samples_of(kind)):
        loader = build_loader(data, num_workers=0, **ALONE)
        assert len(loader) == len(wanted)
        assert_same(list(loader), wanted)


@pytest.mark.parametrize("kind", ["graphs", "tuples", "texts"])
def test_workers_give_them_too(packed, kind):
    wanted = list(DataLoader(clients.samples_of(kind), batch_size=None))

    assert_same(list(build_loader(packed[kind], num_workers=1, **ALONE)), wanted)


def test_the_attributes_are_those_of_torch():
    for options in ({}, {"shuffle": True}, {"sampler": [3, 1]}):
        ours = build_loader(list(range(5)), num_workers=0, **ALONE, **options)
        theirs = DataLoader(list(range(5)), batch_size=None, **options)

        assert (ours.batch_size, ours.drop_last) == (None, False)
        assert ours.batch_sampler is None
        assert len(ours) == len(theirs)
        assert sorted(ours.sampler) == sorted(theirs.sampler)
    assert "samples one by one, not joined" in ours.plan.batching


def test_a_function_gets_one_sample():
    loader = build_loader([1, 2], collate_fn=lambda x: (x, type(x)), **ALONE)

    assert list(loader) == [(1, int), (2, int)]


class Bulk(Dataset):
    """Takes several rows as one key, and gives a finished batch."""

    def __len__(self):
        return 12

    def __getitem__(self, rows):
        return np.array(rows) * 10

    def __getitems__(self, rows):
        raise AssertionError  # torch asks for it only where it makes batches


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_may_give_whole_batches_as_keys(workers):
    data = Bulk()
    order = BatchSampler(SequentialSampler(data), 5, drop_last=False)

    loaded = list(build_loader(data, sampler=order, num_workers=workers, **ALONE))

    assert_same(loaded, list(DataLoader(data, batch_size=None, sampler=order)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_given_as_it_is(workers):
    loaded = list(build_loader(Counting(), num_workers=workers, **ALONE))

    assert_same(loaded, list(DataLoader(Counting(), batch_size=None)))


MAKERS = {
    "shuffled": lambda: (list(range(20)), {"shuffle": True}),
    "a sampler": lambda: (list(range(20)), {"sampler": RandomSampler(range(20))}),
    "noise": lambda: (Noisy(), {"shuffle": True}),
    "stream": lambda: (Counting(), {}),
}


@pytest.mark.many_cases
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", MAKERS)
def test_the_rest_follows_from_a_state(kind, workers):
    def make():
        data, options = MAKERS[kind]()
        return build_loader(data, seed=3, num_workers=workers, **ALONE, **options)

    stopped, again = make(), make()
    iterator = iter(stopped)
    list(itertools.islice(iterator, 4))
    again.load_state_dict(json.loads(json.dumps(stopped.state_dict())))

    assert_same(list(again), list(iterator))
    if kind != "stream":
        assert_same(list(again), list(stopped))


def test_samples_go_on_where_batches_stopped():
    first = build_loader([1, 2, 3], batch_size=2, seed=1)
    next(iter(first))
    other = build_loader([1, 2, 3], batch_size=None, seed=1)

    other.load_state_dict(first.state_dict())

    assert list(other) == [3]


@pytest.mark.parametrize("stream", [False, True])
def test_ranks_share_the_samples_out(stream):
    data = Counting() if stream else list(range(10))
    order = {} if stream else {"shuffle": True}

    loaded = [
        list(build_loader(data, rank=rank, world_size=3, **ALONE, **order))
        for rank in range(3)
    ]

    assert {len(part) for part in loaded} == {4}
    assert {int(sample) for part in loaded for sample in part} == set(range(10))


def test_random_numbers_do_not_depend_on_the_workers():
    alone, sent = (
        list(build_loader(Noisy(), seed=2, num_workers=n, **ALONE)) for n in (0, 1)
    )

    assert_same(sent, alone)
    assert len({sample["drawn"][0].item() for sample in alone}) == 24


@pytest.mark.parametrize(
    "options",
    [
        {"drop_last": True},
        {"bucket_by": "nodes"},
        {"follow_batch": ["x"]},
        {"exclude_keys": ["x"]},
    ],
    ids=str,
)
def test_what_only_batches_have_is_refused(options):
    with pytest.raises(OptionError, match="batch_size=None was given with") as caught:
        build_loader([1, 2], **ALONE, **options)

    assert next(iter(options)) in caught.value.fix


def test_none_beside_another_limit_asks_for_no_number_of_samples(packed):
    by_size = build_loader(packed["graphs"], max_nodes=9, num_workers=0, **ALONE)
    chosen = build_loader([1, 2, 3], batch_sampler=[[0, 2]], num_workers=0, **ALONE)

    assert sum(batch.num_graphs for batch in by_size) == clients.COUNT
    assert [batch.tolist() for batch in chosen] == [[1, 3]]


def test_a_sample_that_fails_is_named():
    def explode(sample):
        raise KeyError(sample)

    with pytest.raises(KeyError) as caught:
        list(build_loader([7], collate_fn=explode, num_workers=0, **ALONE))

    assert caught.value.what.startswith("Sample row 0 was read, but not converted: ")
    assert "explode" in caught.value.fix
