"""States of samplers that are not ours: read as plain values, and put back."""

import itertools
import json
import random
import tracemalloc
import types

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from loaderkit.errors import LoaderError
from loaderkit.loader.digests import digest_of_plain
from loaderkit.loader.stateful import (
    SamplerState,
    digest_of_sampler,
    is_own_iterator,
    is_stateful,
    read_sampler,
    read_state,
    restore_sampler,
)


class Drawing:
    """A sampler that draws its rows from a random generator."""

    def __init__(self, generator, draw, rows=100):
        self.generator, self.rows = generator, rows
        self._draw = draw

    def __iter__(self):
        for _ in range(5):
            yield self._draw(self.generator)


def torch_generator(seed):
    return torch.Generator().manual_seed(seed)


def with_half_of_a_pair(seed):
    """A generator that keeps the second of two normal numbers for the next call."""
    generator = random.Random(seed)
    generator.gauss(0, 1)
    return generator


GENERATORS = {
    "legacy": (np.random.RandomState, lambda g: int(g.randint(1 << 30))),
    "torch": (torch_generator, lambda g: int(torch.randint(1 << 30, (), generator=g))),
    "python": (random.Random, lambda g: g.getrandbits(30)),
    "python, half of a pair": (with_half_of_a_pair, lambda g: g.gauss(0, 1)),
    "PCG64": (np.random.default_rng, lambda g: int(g.integers(1 << 30))),
    # Its state holds an array of 624 words.
    "MT19937": (
        lambda seed: np.random.Generator(np.random.MT19937(seed)),
        lambda g: int(g.integers(1 << 30)),
    ),
    # Its state holds several arrays, one of four words.
    "Philox": (
        lambda seed: np.random.Generator(np.random.Philox(seed)),
        lambda g: int(g.integers(1 << 30)),
    ),
    "SFC64": (
        lambda seed: np.random.Generator(np.random.SFC64(seed)),
        lambda g: int(g.integers(1 << 30)),
    ),
}


def through_json(state):
    """Write a state as JSON and read it again, as a checkpoint would."""
    return SamplerState.from_dict(json.loads(json.dumps(state.to_dict())))


# Generators


@pytest.mark.parametrize("name", GENERATORS)
def test_a_sampler_goes_on_where_another_stood(name):
    make, draw = GENERATORS[name]
    stopped, resumed = Drawing(make(1), draw), Drawing(make(2), draw)
    list(stopped)

    restore_sampler(resumed, through_json(read_sampler(stopped)))

    assert list(resumed) == list(stopped)


@pytest.mark.parametrize("name", GENERATORS)
def test_reading_a_state_draws_nothing_and_is_not_changed_by_drawing(name):
    make, draw = GENERATORS[name]
    sampler, twin = Drawing(make(1), draw), Drawing(make(1), draw)

    state = read_sampler(sampler)
    first = list(sampler)
    restore_sampler(sampler, state)

    assert first == list(twin)
    assert list(sampler) == first


def test_a_generator_of_the_sampler_within_a_batch_sampler_is_restored_too():
    def batches(seed):
        rows = RandomSampler(range(20), generator=torch_generator(seed))
        return BatchSampler(rows, 4, drop_last=False)

    stopped, resumed = batches(1), batches(2)
    list(stopped)
    state = read_sampler(stopped)

    restore_sampler(resumed, through_json(state))

    assert list(state.generators) == ["sampler.generator"]
    assert list(resumed) == list(stopped)


def test_a_sampler_without_the_generator_is_refused_with_the_fix():
    state = read_sampler(Drawing(torch_generator(1), None))

    with pytest.raises(LoaderError, match="generator at generator") as caught:
        restore_sampler(Drawing(None, None), state)

    assert caught.value.fix == "give the loader the same sampler"


# Plain values


def test_a_sampler_whose_values_follow_another_plan_is_refused_with_both():
    state = read_sampler(Drawing(None, None, rows=100))

    with pytest.raises(LoaderError, match="rows is 50, the state has 100") as caught:
        restore_sampler(Drawing(None, None, rows=50), state)

    assert caught.value.why == "other rows would follow"
    assert "load_state_dict()" in caught.value.fix


def test_a_sampler_that_lacks_a_value_is_refused():
    state = read_sampler(Drawing(None, None))

    with pytest.raises(LoaderError, match="rows is None, the state has 100"):
        restore_sampler(SequentialSampler(range(3)), state)


def test_a_value_that_only_the_new_sampler_has_does_not_matter():
    state, sampler = read_sampler(types.SimpleNamespace()), Drawing(None, None)

    restore_sampler(sampler, state)

    assert sampler.rows == 100


# State dictionaries


class Stateful:
    """A sampler that follows torchdata's protocol."""

    def __init__(self, position=0):
        self.position, self.inside = position, {"seen": []}

    def state_dict(self):
        return {"position": self.position, "inside": self.inside}

    def load_state_dict(self, state):
        self.position, self.inside = state["position"], state["inside"]


def test_a_state_is_a_copy_that_its_owner_cannot_change():
    sampler = Stateful(3)

    state = read_state(sampler)
    sampler.inside["seen"].append(1)

    assert state == {"position": 3, "inside": {"seen": []}}


def test_a_sampler_says_its_own_state_also_from_within_a_batch_sampler():
    stopped, resumed = (BatchSampler(Stateful(n), 4, drop_last=True) for n in (3, 0))

    state = read_sampler(stopped)
    restore_sampler(resumed, state)
    resumed.sampler.inside["seen"].append(1)

    assert state.generators == state.values == {}
    assert resumed.sampler.position == 3
    assert state.own["inside"] == {"seen": []}


def test_a_state_of_its_own_needs_a_sampler_that_takes_one():
    state = read_sampler(Stateful())

    with pytest.raises(LoaderError, match="this SequentialSampler has none") as caught:
        restore_sampler(SequentialSampler(range(3)), state)

    assert caught.value.fix == "give the loader the same sampler"


@pytest.mark.parametrize("value", [None, [1], SequentialSampler(range(3)), object()])
def test_what_tells_no_state_has_none(value):
    assert not is_stateful(value)
    assert read_state(value) is None


def test_both_halves_of_the_protocol_are_needed():
    class Half:
        def state_dict(self):
            return {}

    assert is_stateful(Stateful())
    assert not is_stateful(Half())


def test_only_what_gives_its_samples_itself_is_its_own_iterator():
    assert is_own_iterator(iter([1]))
    assert not is_own_iterator([1])


# Telling samplers apart


class Rows:
    """A sampler of given rows."""

    def __init__(self, rows):
        self.rows = rows


@pytest.mark.parametrize("kind", [list, tuple, np.asarray, torch.tensor])
def test_samplers_of_other_rows_are_told_apart(kind):
    ours = digest_of_sampler(Rows(kind([1, 2, 3])))

    assert digest_of_sampler(Rows(kind([1, 2, 3]))) == ours
    assert digest_of_sampler(Rows(kind([1, 2, 4]))) != ours
    assert digest_of_sampler(kind([1, 2, 3])) != digest_of_sampler(kind([1, 2, 4]))


def test_ranges_are_told_apart_by_their_rows():
    assert digest_of_sampler(range(3)) == digest_of_sampler(range(0, 3, 1))
    assert digest_of_sampler(range(3)) != digest_of_sampler(range(4))


@pytest.mark.parametrize("name", GENERATORS)
def test_samplers_of_other_seeds_are_told_apart(name):
    make, draw = GENERATORS[name]

    assert digest_of_sampler(Drawing(make(1), draw)) == digest_of_sampler(
        Drawing(make(1), draw)
    )
    assert digest_of_sampler(Drawing(make(1), draw)) != digest_of_sampler(
        Drawing(make(2), draw)
    )


def test_samplers_of_other_kinds_are_told_apart():
    class OtherRows(Rows):
        pass

    assert digest_of_sampler(Rows([1])) != digest_of_sampler(OtherRows([1]))


KINDS = {
    "legacy": np.random.RandomState,
    "torch": torch.Generator,
    "python": random.Random,
    "PCG64": np.random.default_rng,
    "MT19937": lambda: np.random.Generator(np.random.MT19937()),
    "Philox": lambda: np.random.Generator(np.random.Philox()),
}


@pytest.mark.parametrize(("kind", "other"), list(itertools.permutations(KINDS, 2)))
def test_the_state_of_another_kind_of_generator_is_refused(kind, other):
    saved, taking_over = types.SimpleNamespace(), types.SimpleNamespace()
    saved.generator, taking_over.generator = KINDS[kind](), KINDS[other]()

    with pytest.raises(LoaderError, match="of another kind") as caught:
        restore_sampler(taking_over, read_sampler(saved))

    assert "same sampler" in caught.value.fix


def test_a_digest_sees_every_place_of_a_long_list():
    rows = list(range(200_000))
    digest = digest_of_plain(rows)

    for position in (0, 65_535, 65_536, 131_072, 199_999):
        changed = rows.copy()
        changed[position] += 1
        assert digest_of_plain(changed) != digest
    assert digest_of_plain(rows[:-1]) != digest
    assert digest_of_plain([rows[:100_000], rows[100_000:]]) != digest
    assert digest_of_plain(list(rows)) == digest
    huge = [2**70, *rows]
    assert digest_of_plain(huge) == digest_of_plain(huge.copy()) != digest


@pytest.mark.parametrize("rows", [list(range(10**6)), np.arange(10**6)])
def test_a_digest_copies_no_rows(rows):
    digest_of_plain(rows[:10])

    tracemalloc.start()
    digest_of_plain(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 2 << 20
