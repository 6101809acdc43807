"""Loaders as they are used: batches, epochs, options, mistakes."""

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from data import Counting, Noisy, Slow, graph
from torch.utils.data import (
    DataLoader,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch_geometric.data import Batch, InMemoryDataset
from torch_geometric.loader import DataLoader as GraphLoader

import loaderkit
from loaderkit import build_loader
from loaderkit.datasets.ragged import Padded
from loaderkit.errors import LoaderError, OptionError
from loaderkit.nests import flatten
from loaderkit.testing import assert_same


class Memory(InMemoryDataset):
    def __init__(self, graphs):
        super().__init__(None)
        self.data, self.slices = self.collate(graphs)


def rows_of(loader):
    return [batch.y.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_pyg(cache, workers):
    loader = build_loader(cache, batch_size=7, num_workers=workers)
    wanted = GraphLoader([graph(n) for n in range(40)], batch_size=7)

    assert isinstance(loader, DataLoader)
    assert len(loader) == len(wanted)
    for ours, theirs in zip(loader, wanted, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_datasets_of_pyg_and_lists_are_joined_as_pyg_does(workers):
    graphs = [graph(n) for n in range(10)]

    for dataset in (Memory(graphs), graphs, Subset(graphs, range(10))):
        loader = build_loader(dataset, batch_size=5, num_workers=workers)
        assert_same(next(iter(loader)), Batch.from_data_list(graphs[:5]))


def test_other_samples_are_joined_as_torch_does():
    data = TensorDataset(torch.arange(6), torch.rand(6, 2))

    batch = next(iter(build_loader(data, batch_size=4)))

    assert_same(batch, default_collate([data[n] for n in range(4)]))


def test_graphs_inside_tuples_are_joined_too():
    pairs = [(graph(n), n) for n in range(4)]

    batch, numbers = next(iter(build_loader(pairs, batch_size=4)))

    assert batch.num_graphs == 4
    assert numbers.tolist() == [0, 1, 2, 3]


def test_a_subset_of_a_cache_is_gathered(cache):
    loader = build_loader(Subset(cache, [5, 3, 1]), batch_size=2)

    assert rows_of(loader) == [[5, 3], [1]]
    assert loader.plan.read_ahead.value == 2


def test_follow_batch_and_exclude_keys_reach_pyg():
    graphs = [graph(n) for n in range(4)]

    options = {"follow_batch": ["x"], "exclude_keys": ["y"]}
    batch = next(iter(build_loader(graphs, batch_size=4, **options)))

    assert "x_batch" in batch
    assert "y" not in batch


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_random_numbers_do_not_depend_on_the_worker_count(workers):
    def drawn(count):
        loader = build_loader(
            Noisy(), batch_size=4, shuffle=True, seed=5, num_workers=count
        )
        return [batch["drawn"].tolist() for _ in range(2) for batch in loader]

    alone = drawn(0)

    assert drawn(workers) == alone
    assert alone[:6] != alone[6:]


def test_reading_here_leaves_the_trainings_random_numbers_alone():
    torch.manual_seed(1)
    loader = build_loader(Noisy(), batch_size=4, seed=5, num_workers=0)
    torch.manual_seed(1)
    before = torch.rand(3).tolist()
    torch.manual_seed(1)

    for _ in loader:
        pass

    assert torch.rand(3).tolist() == before


def test_every_epoch_has_its_own_order(cache):
    loader = build_loader(cache, batch_size=40, shuffle=True, seed=1)

    first, second = rows_of(loader), rows_of(loader)
    loader.set_epoch(0)

    assert first != second
    assert rows_of(loader) == first


def test_batches_are_filled_by_size(cache):
    loader = build_loader(cache, max_nodes=12, shuffle=True, seed=0)
    nodes = [batch.num_nodes for batch in loader]

    assert max(nodes) <= 12
    assert sum(nodes) == int(cache.sizes().nodes.sum())
    assert "at most 12 nodes" in loader.plan.batching


def test_bytes_edges_and_buckets(cache):
    loader = build_loader(
        cache, max_edges=9, max_bytes=4096, bucket_by="nodes", buckets=2
    )

    assert max(batch.num_edges for batch in loader) <= 9
    assert "2 buckets by nodes" in loader.plan.batching
    assert "is padding" in loader.plan.batching


def test_tokens_of_samples_that_are_no_graphs(tmp_path):
    clips = [{"text": torch.ones(n, 4), "label": n} for n in (2, 5, 3, 1)]
    cache = loaderkit.pack(clips, tmp_path / "c.lk")

    loader = build_loader(cache, max_tokens=7)

    assert [batch["label"].tolist() for batch in loader] == [[2, 5], [3, 1]]
    assert cache.sizes().tokens.tolist() == [2, 5, 3, 1]
    assert cache.sizes().bytes.tolist() == [40, 88, 56, 24]


def test_sizes_of_a_subset_are_those_of_its_rows(cache):
    loader = build_loader(Subset(cache, [4, 9, 14]), max_nodes=6)

    assert rows_of(loader) == [[4], [9], [14]]


class MadeWhenRead(torch.utils.data.Dataset):
    """Makes its graphs as they are read."""

    def __len__(self):
        return 3

    def __getitem__(self, row):
        return graph(row)


def test_a_dataset_that_does_not_know_its_sizes_is_refused():
    with pytest.raises(LoaderError, match=r"nodes of the samples are not known"):
        build_loader(MadeWhenRead(), max_nodes=10)


def test_a_size_that_is_not_known_is_answered_with_those_that_are(tmp_path):
    rows = [{"x": torch.zeros(n)} for n in (1, 2, 3)]
    packed = loaderkit.pack(rows, tmp_path / "c")

    with pytest.raises(LoaderError, match="did you mean 'tokens'"):
        build_loader(packed, batch_size=2, bucket_by="token")
    with pytest.raises(LoaderError, match="by batch_size or max_bytes or max_tokens"):
        build_loader(packed, max_nodes=10)


def test_an_oversized_sample_is_told_at_once(cache):
    with pytest.raises(LoaderError, match="has 5 nodes, above the limit of 4"):
        build_loader(cache, max_nodes=4)


def test_a_samplers_choice_passes_through(cache):
    only = WeightedRandomSampler([0.0] * 7 + [1.0] + [0.0] * 32, 6)

    loader = build_loader(cache, sampler=only, batch_size=4)

    assert rows_of(loader) == [[7, 7, 7, 7], [7, 7]]
    assert "WeightedRandomSampler" in loader.plan.batching


def test_whole_batches_can_be_chosen(cache):
    loader = build_loader(cache, batch_sampler=[[3, 1], [2]])

    assert rows_of(loader) == [[3, 1], [2]]
    assert len(loader) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": [1], "shuffle": True},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"sampler": [1], "max_nodes": 5},
        {"sampler": [1], "batch_sampler": [[1]]},
    ],
)
def test_two_rules_for_batches_contradict_each_other(cache, options):
    with pytest.raises(OptionError, match="another rule"):
        build_loader(cache, **options)


@pytest.mark.parametrize("workers", ["auto", 1])
def test_iterable_datasets_are_read_in_their_order(workers):
    loader = build_loader(Counting(), batch_size=4, num_workers=workers)

    assert [rows.tolist() for rows in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_an_iterable_dataset_cannot_be_shuffled():
    with pytest.raises(OptionError, match="iterable"):
        build_loader(Counting(), shuffle=True)


@pytest.mark.needs("two CPUs")
def test_slow_samples_get_workers_and_the_plan_says_why():
    plan = build_loader(Slow(), batch_size=4).plan

    assert plan.num_workers.value >= 1
    assert "times the rate of none" in plan.num_workers.reason


def test_nothing_is_read_without_the_probe():
    class Silent(Slow):
        def __getitem__(self, row):
            raise AssertionError

    # "(not measured: ...)" where reading was tried and failed.
    plan = build_loader(Silent(), probe=False).plan
    assert plan.num_workers.reason.endswith("(not measured)")


def test_a_wrong_name_gets_a_hint():
    with pytest.raises(TypeError, match="did you mean 'batch_size'"):
        build_loader([1], batchsize=3)


def test_no_samples_at_all_are_refused():
    with pytest.raises(LoaderError, match="no samples"):
        build_loader([])


def test_a_collate_of_the_users_is_called():
    loader = build_loader([1, 2, 3], batch_size=3, collate_fn=sum, num_workers=0)

    assert list(loader) == [6]


@pytest.mark.slow
def test_two_iterators_at_once_do_not_disturb_each_other(cache):
    for workers in (0, 1):
        loader = build_loader(
            cache, batch_size=20, num_workers=workers, persistent_workers=bool(workers)
        )
        pairs = [
            (a.y[0].item(), b.y[0].item()) for a, b in zip(loader, loader, strict=True)
        ]
        assert pairs == [(0, 0), (20, 20)]
        loader.close()


def test_a_trainer_may_build_it_again_from_its_parts(cache):
    loader = build_loader(cache, batch_size=8, num_workers=0)

    again = DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn
    )

    assert [b.num_graphs for b in again] == [8] * 5
    assert [b.num_graphs for b in type(loader)(cache, 8, collate_fn=cache.collate)]


@dataclasses.dataclass
class Clip:
    text: torch.Tensor


class NamedClip(NamedTuple):
    text: torch.Tensor
    n: int


SAMPLES_WITH_TEXT = {
    "tensor": lambda text: text,
    "dict": lambda text: {"text": text},
    "ordered dict": lambda text: collections.OrderedDict(text=text),
    "dataclass": Clip,
    "named tuple": lambda text: NamedClip(text, len(text)),
    "tuple": lambda text: (text, 1),
    "nest": lambda text: {"clips": [Clip(text), (len(text), {"text": text})]},
}


@pytest.mark.parametrize("kind", SAMPLES_WITH_TEXT)
def test_buckets_leave_few_padded_shapes_in_samples_of_any_container(tmp_path, kind):
    texts = [torch.ones(n) for n in range(1, 21)]
    clips = [SAMPLES_WITH_TEXT[kind](text) for text in texts]
    loaderkit.pack(clips, tmp_path / "c.lk", workers=0)
    cache = loaderkit.open_cache(tmp_path / "c.lk", classes=[Clip, NamedClip])

    loader = build_loader(
        cache, batch_size=4, bucket_by="tokens", buckets=2, num_workers=0, probe=False
    )

    lengths = {
        leaf.values.shape[1]
        for batch in loader
        for leaf in flatten(batch, is_leaf=lambda part: isinstance(part, Padded))
        if isinstance(leaf, Padded)
    }
    assert lengths == {10, 20}


@pytest.mark.parametrize("workers", [0, 1])
def test_buckets_leave_few_padded_shapes(tmp_path, workers):
    clips = [{"text": torch.ones(n, 4), "n": n} for n in range(1, 41)]
    cache = loaderkit.pack(clips, tmp_path / "c.lk")

    loader = build_loader(
        cache,
        batch_size=4,
        bucket_by="tokens",
        buckets=3,
        shuffle=True,
        seed=0,
        num_workers=workers,
    )
    batches = list(loader)

    assert len({batch["text"].values.shape[1] for batch in batches}) == 3
    for batch in batches:
        assert batch["text"].mask.sum(1).tolist() == batch["n"].tolist()
        assert batch["text"].values[..., 0].bool().equal(batch["text"].mask)
    assert (
        len({b["text"].values.shape[1] for b in build_loader(cache, batch_size=1)})
        == 40
    )
