"""A run goes on with other ranks, other workers, another batch size.

The law: whatever ranks and batch sizes read the parts of an epoch, one after the other,
together they read its global order, each sample once.  The last of them repeats the
beginning of that order to make ranks even, as torch's DistributedSampler does, or with
``drop_last`` leaves out the end.
"""

import itertools
import json
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ranks import run_ranks
from torch.utils.data import DistributedSampler, IterableDataset

from loaderkit import build_loader
from loaderkit.errors import LoaderError


class Sized(list):
    """Rows that say how many nodes they have."""

    def sizes(self):
        return {"nodes": np.random.default_rng(len(self)).integers(1, 9, len(self))}


@dataclass
class Part:
    """A part of an epoch, read by some ranks."""

    ranks: int
    options: dict = field(default_factory=dict)
    steps: int | None = None
    """Batches that each rank is given; None for the rest."""


def draw_parts(choose, kind):
    """Draw how an epoch is read: the division may change, its order may not."""
    fixed = {}
    if kind == "buckets":
        fixed = {"batch_size": choose(1, 9), "bucket_by": "nodes", "buckets": 3}
        fixed["drop_last"] = choose(0, 1) == 1
    if kind == "alone":
        fixed = {"max_nodes": choose(5, 20), "oversized": "alone"}
    if kind == "same batches":
        fixed = {"max_nodes": choose(9, 30), "shuffle": "batches"}

    parts = []
    for _ in range(choose(1, 4)):
        options = dict(fixed)
        if kind == "samples":
            options["batch_size"] = choose(1, 9)
        if kind == "nodes":
            options["max_nodes"] = choose(9, 30)
        if kind in {"samples", "nodes"}:
            options["drop_last"] = choose(0, 1) == 1
        parts.append(Part(choose(1, 4), options, choose(0, 5)))
    parts[-1].steps = None
    return parts


def global_order(samples, shuffle, seed, epoch, options):
    """Say the order by numpy alone; of blocks and whole batches, by one rank."""
    has_whole_batches = bool({"bucket_by", "oversized", "shuffle"} & set(options))
    if shuffle != "block" and not has_whole_batches:
        if not shuffle:
            return list(range(samples))
        chance = np.random.Generator(np.random.PCG64([seed, epoch]))
        return chance.permutation(samples).tolist()
    if not has_whole_batches:
        options = {"batch_size": 1}
    whole = make_loader(samples, shuffle, seed, Part(1, options), 0)
    whole.set_epoch(epoch)
    return [row for batch in whole for row in batch.tolist()]


def make_loader(samples, shuffle, seed, part, rank, workers=0):
    return build_loader(
        Sized(range(samples)),
        seed=seed,
        rank=rank,
        world_size=part.ranks,
        num_workers=workers,
        probe=False,
        **{"shuffle": shuffle, **part.options},
    )


def take_turns(batches_of_ranks, *, by_sample):
    """Bring what ranks read into the order in which they take turns."""
    rows = []
    for step in zip(*batches_of_ranks, strict=True):
        if by_sample:
            assert len(set(map(len, step))) == 1
            rows += [row for turn in zip(*step, strict=True) for row in turn]
        else:
            rows += [row for batch in step for row in batch]
    return rows


def read_in_parts(samples, shuffle, seed, epoch, parts, *, workers=0, shift=0):
    """Read an epoch part by part, each from the state of the one before.

    Returns:
        The rows, in the order in which ranks take turns, and whether the last part is
        the one that came to the end.
    """
    rows, places, state = [], [], None
    for part in parts:
        loaders = [
            make_loader(samples, shuffle, seed, part, rank, workers)
            for rank in range(part.ranks)
        ]
        for loader in loaders:
            if state is None:
                loader.set_epoch(epoch)
            else:
                loader.load_state_dict(state)
        rest = [loader.batches.current() for loader in loaders]
        steps = [len(loader) for loader in loaders]
        iterators = [iter(loader) for loader in loaders]
        given = [
            [batch.tolist() for batch in itertools.islice(iterator, part.steps)]
            for iterator in iterators
        ]
        assert len(set(steps)) == 1
        for rank_rest in rest:
            places += rank_rest.offsets[: len(given[0])].tolist()
        if part.steps is None:
            before = 0 if state is None else state["batches"]
            assert steps[0] == before + len(given[0])
        is_by_sample = not {"max_nodes", "bucket_by"} & set(part.options)
        rows += take_turns(given, by_sample=is_by_sample)

        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        assert states == states[:1] * part.ranks  # one state is every rank's
        state = states[0]
        if state["epoch"] != epoch:  # the end was seen
            assert (state["samples"], state["batches"]) == (0, 0)
            break
        assert state["samples"] == min(len(rows), state["order"]["samples"])
        state["samples"] += shift
    assert len(places) == len(set(places))  # each batch draws numbers of its own
    return rows, part


def check_parts(samples, shuffle, seed, epoch, parts, **reading):
    rows, last = read_in_parts(samples, shuffle, seed, epoch, parts, **reading)
    order = global_order(samples, shuffle, seed, epoch, last.options)

    assert rows == np.resize(order, len(rows)).tolist()
    # Ranks are made even by the part that comes to the end, which may be an earlier
    # one than the last: nothing is left then.
    most_ranks = max(part.ranks for part in parts)
    most_samples = 30  # of a batch, since each has a node at least
    if last.options.get("drop_last"):
        assert len(order) - len(rows) < most_ranks * most_samples
    else:
        assert len(rows) >= len(order)
    is_by_sample = not {"max_nodes", "bucket_by"} & set(last.options)
    most_repeated = (most_ranks - 1) * (1 if is_by_sample else most_samples)
    assert len(rows) - len(order) <= most_repeated


KINDS = ["samples", "nodes", "buckets", "alone", "same batches"]


@given(
    st.integers(1, 60),
    st.sampled_from([False, True, "block"]),
    st.integers(0, 99),
    st.integers(0, 2),
    st.sampled_from(KINDS),
    st.data(),
)
@settings(max_examples=30)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:an epoch has no batches")
def test_whoever_reads_the_parts_of_an_epoch_reads_its_order(
    samples, shuffle, seed, epoch, kind, data
):
    def choose(least, most):
        return data.draw(st.integers(least, most))

    check_parts(samples, shuffle, seed, epoch, draw_parts(choose, kind))


@pytest.mark.slow
def test_workers_may_be_others_too():
    parts = [Part(2, {"batch_size": 3}, 2), Part(1, {"batch_size": 5}, 1)]

    for before, after in ((2, 0), (0, 2)):
        first = make_loader(40, True, 5, parts[0], 1, before)
        iterator = iter(first)
        next(iterator), next(iterator)
        second = make_loader(40, True, 5, parts[1], 0, after)
        second.load_state_dict(first.state_dict())

        rows = [row for batch in second for row in batch.tolist()]
        assert rows == global_order(40, True, 5, 0, {})[12:]


def test_a_state_that_counts_one_sample_too_many_breaks_the_law():
    parts = [Part(2, {"batch_size": 3}, 2), Part(3, {"batch_size": 2})]

    check_parts(40, True, 5, 0, parts)
    with pytest.raises(AssertionError):
        check_parts(40, True, 5, 0, parts, shift=1)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_an_epoch_is_padded_and_dropped_as_by_torchs_sampler(ranks, drop_last):
    order = global_order(22, True, 3, 0, {})
    part = Part(ranks, {"batch_size": 1, "drop_last": drop_last})

    for rank in range(ranks):
        theirs = DistributedSampler(
            order, ranks, rank, shuffle=False, drop_last=drop_last
        )
        wanted = [order[place] for place in theirs]
        loader = make_loader(22, True, 3, part, rank)
        assert [row for batch in loader for row in batch.tolist()] == wanted


def test_whole_batches_are_not_cut_anew_by_another_rule():
    first, other = (
        make_loader(40, True, 5, Part(1, {"batch_size": size, "bucket_by": "nodes"}), 0)
        for size in (3, 4)
    )
    next(iter(first))

    with pytest.raises(LoaderError, match="'batch_size': 3"):
        other.load_state_dict(first.state_dict())


def test_batches_out_of_turn_belong_to_one_rank():
    def make(rank, ranks, size=2):
        return build_loader(
            list(range(40)),
            batch_size=size,
            rank=rank,
            world_size=ranks,
            num_workers=2,
            in_order=False,
            seed=1,
        )

    first = make(0, 2)
    next(iter(first))
    state = first.state_dict()

    for other in (make(1, 2), make(0, 3), make(0, 2, 3)):
        with pytest.raises(LoaderError, match="The state has"):
            other.load_state_dict(state)
    make(0, 2).load_state_dict(state)


class Stream(IterableDataset):
    """A part for each rank, chosen by itself."""

    def __iter__(self):
        return iter(range(20))


def test_the_state_of_a_stream_that_shares_itself_out_is_of_one_rank(monkeypatch):
    def make(rank, ranks=2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        return build_loader(Stream(), batch_size=2, rank=0, world_size=1)

    first = make(0)
    next(iter(first))
    state = first.state_dict()

    make(0).load_state_dict(state)
    for rank, ranks in ((1, 2), (0, 4)):
        other = make(rank, ranks)
        with pytest.raises(LoaderError, match=r"The state has rank \[0, 2\]"):
            other.load_state_dict(state)


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"world_size": 2}])
def test_a_stream_in_other_batches_is_refused_when_it_is_loaded(options):
    given = {"batch_size": 2, "rank": 0, "world_size": 1, "seed": 1}
    first, other = (build_loader(Stream(), **given | new) for new in ({}, options))
    next(iter(first))

    with pytest.raises(LoaderError, match="The state has batching"):
        other.load_state_dict(first.state_dict())


def test_a_state_of_an_earlier_release_is_refused_with_the_way_on():
    loader = make_loader(40, True, 5, Part(1, {"batch_size": 3}), 0)
    state = loader.state_dict() | {"version": 6}

    with pytest.raises(
        LoaderError, match="version 6, this loader reads 8 and 7"
    ) as told:
        loader.load_state_dict(state)

    assert "set_epoch(state['epoch'] + 1)" in told.value.fix


GOES_ON = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
import loaderkit

dist.init_process_group("gloo")
rank = dist.get_rank()
folder, steps, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
loader = loaderkit.build_loader(
    list(range(50)), shuffle=True, seed=4, batch_size=size, num_workers=0, probe=False
)
state = folder / "state.json"
if state.exists():
    loader.load_state_dict(json.loads(state.read_text()))
dist.barrier()
rows = []
for batch in loader:
    rows.append(batch.tolist())
    if len(rows) == steps:
        break
if rank == 0:
    state.write_text(json.dumps(loader.state_dict()))
every = [None] * dist.get_world_size()
dist.all_gather_object(every, rows)
if rank == 0:
    print(json.dumps(every))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_real_ranks_go_on_where_others_stopped(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(GOES_ON)

    rows = []
    for ranks, steps, size in ((2, 3, 4), (3, 2, 2), (1, 99, 7)):
        [every] = run_ranks(script, tmp_path, steps, size, ranks=ranks)
        rows += take_turns(every, by_sample=True)

    assert rows == global_order(50, True, 4, 0, {})
    assert json.loads((tmp_path / "state.json").read_text())["epoch"] == 1


APART = """
import json, os, sys
import torch.distributed as dist
import loaderkit

dist.init_process_group("gloo")
rank = dist.get_rank()
data = list(range(20))

def outcome(loader):
    try:
        return [len(list(loader))]
    except loaderkit.errors.LoaderError as error:
        return error.what

def epoch():
    loader = loaderkit.build_loader(data, num_workers=0, probe=False)
    list(loader)
    loader.set_epoch(1 + rank)
    return loader

def state():
    loader = loaderkit.build_loader(data, num_workers=0, probe=False)
    saved = loader.state_dict() | {"batches": 2, "samples": 4}
    if rank == 1:
        loader.load_state_dict(saved)
    return loader

def length():
    return loaderkit.build_loader(data[: 20 - rank], num_workers=0, probe=False)

def size():
    return loaderkit.build_loader(data, batch_size=1 + rank, num_workers=0)

def cache():
    return loaderkit.build_loader(
        loaderkit.open_cache(sys.argv[1 + rank]), num_workers=0, probe=False
    )

def equal():
    return loaderkit.build_loader(loaderkit.open_cache(sys.argv[1]), num_workers=0)

for way in (epoch, state, length, size, cache, equal):
    every = [None] * 2
    dist.all_gather_object(every, outcome(way()))
    if rank == 0:
        print(json.dumps([way.__name__, every]))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_that_begin_different_epochs_are_told_on_all_of_them(cache, tmp_path):
    from data import graph

    from loaderkit import pack

    len(cache)
    pack([graph(number + 1) for number in range(40)], tmp_path / "other", workers=0)
    script = tmp_path / "train.py"
    script.write_text(APART)

    outcomes = dict(run_ranks(script, cache.cache, tmp_path / "other"))

    words = {
        "epoch": "different epoch: 1 on rank 0, 2 on rank 1",
        "state": "different samples given before: 0 on rank 0, 4 on rank 1",
        "length": "different orders",
        "size": "different batches",
        "cache": "different datasets",
    }
    for way, (first, second) in outcomes.items():
        assert first == second, way
        if way == "equal":
            assert first == [20]
        else:
            assert words[way] in first
