"""A gathered batch is the batch PyG would make, in every attribute."""

import itertools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Paired, graphs, hetero_graphs, paired_graphs
from torch.utils.data import DataLoader, Subset
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.datasets import FakeDataset, FakeHeteroDataset
from torch_geometric.loader import DataLoader as GraphDataLoader

from loaderkit import SafeGraphDataset, open_cache, owned_copy, pack
from loaderkit.errors import DatasetError, OptionError
from loaderkit.testing import assert_batch_parity, assert_same


def result(make):
    """What a call returns, or the kind of error it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return make()
        except (
            RuntimeError,
            LookupError,
            TypeError,
            AttributeError,
            AssertionError,
        ) as error:
            return type(error)
        except ValueError as error:
            return (
                type(error).__mro__[-4]
                if "loaderkit" in repr(type(error))
                else ValueError
            )


def assert_parity(samples, path, rows, follow=(), exclude=(), **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = pack(samples, path, workers=0, **options)
    stores = [store for sample in samples for store in sample.stores]
    known = set().union(*(store.keys() for store in stores))
    if not {*follow, *exclude} <= known:  # PyG ignores them
        with pytest.raises(OptionError, match="a field that no graph of the dataset"):
            dataset.batch(rows, follow_batch=follow, exclude_keys=exclude)
        follow, exclude = known.intersection(follow), known.intersection(exclude)
    chosen = [owned_copy(samples[row]) for row in rows]  # a cache keeps no autograd
    wanted = result(lambda: Batch.from_data_list(chosen, list(follow), list(exclude)))
    gathered = result(
        lambda: dataset.batch(rows, follow_batch=follow, exclude_keys=exclude)
    )
    if isinstance(wanted, type):
        assert isinstance(gathered, type), (
            f"PyG raises {wanted}, the gathered batch is {gathered}"
        )
        return
    assert_same(gathered, wanted, "batch")
    assert_same(
        result(gathered.to_data_list), result(wanted.to_data_list), "to_data_list"
    )


ROWS = st.lists(st.integers(0, 8), min_size=1, max_size=12)
FOLLOW = st.sets(st.sampled_from(["x", "name", "nested", "edge_index", "y", "tensors"]))
EXCLUDE = st.sets(st.sampled_from(["pos", "k", "adj", "edges_index", "sometimes"]))


@pytest.fixture
def fresh(tmp_path_factory):
    return lambda: tmp_path_factory.mktemp("cache") / "c.lk"


@pytest.mark.slow
@given(samples=graphs(), rows=ROWS, follow=FOLLOW, exclude=EXCLUDE)
@settings(max_examples=100)
def test_any_list_of_graphs_batches_as_with_pyg(fresh, samples, rows, follow, exclude):
    rows = [row % len(samples) for row in rows]

    assert_parity(samples, fresh(), rows, follow, exclude)


@pytest.mark.slow
@given(samples=graphs(), rows=ROWS, small=st.integers(1, 600))
@settings(max_examples=30)
def test_a_batch_across_shards_is_the_same(fresh, samples, rows, small):
    rows = [row % len(samples) for row in rows]

    assert_parity(samples, fresh(), rows, shard_bytes=small)


FIELDS_OF_SHARDS = {
    "x": torch.arange(6.0).reshape(3, 2),
    "pos": torch.arange(3.0).reshape(3, 1),
    "y": torch.tensor([4.0]),
    "k": 7,
}
NAMES_OF_FIELDS = [
    names
    for count in (1, 2)
    for names in itertools.combinations(FIELDS_OF_SHARDS, count)
]
"""Any two of the fields, or one: any two columns are in the first shard, in the second
or in both, in every way in which they can be."""


@pytest.mark.slow
def test_shards_that_lack_fields_of_each_other_batch_as_with_pyg(fresh):
    """Rows of one column lie as those of another do, and yet it is in fewer shards."""
    for first_names, second_names in itertools.product(NAMES_OF_FIELDS, repeat=2):
        first = Data(num_nodes=3, **{n: FIELDS_OF_SHARDS[n] for n in first_names})
        second = Data(num_nodes=3, **{n: FIELDS_OF_SHARDS[n] for n in second_names})
        if "x" in second:
            # Columns as wide in both shards would be read as one array.
            second.x = second.x.repeat(1, 2)

        cache = pack([first, second], fresh(), workers=0, shard_bytes=1)

        for row, sample in enumerate([first, second]):
            assert_same(cache.batch([row, row]), Batch.from_data_list([sample] * 2))


@pytest.mark.slow
@given(samples=graphs(), rows=ROWS)
@settings(max_examples=25)
def test_a_batch_from_compressed_columns_is_the_same(fresh, samples, rows):
    rows = [row % len(samples) for row in rows]

    assert_parity(samples, fresh(), rows, compression="gzip", shard_bytes=500)


@pytest.mark.slow
@given(samples=hetero_graphs(), rows=ROWS, follow=FOLLOW)
@settings(max_examples=15)
def test_any_list_of_heterogeneous_graphs_batches_as_with_pyg(
    fresh, samples, rows, follow
):
    rows = [row % len(samples) for row in rows]

    assert_parity(samples, fresh(), rows, follow, shard_bytes=700)


@pytest.mark.slow
@given(samples=paired_graphs(), rows=ROWS)
@settings(max_examples=15)
def test_a_class_with_its_own_increments_batches_as_with_pyg(fresh, samples, rows):
    rows = [row % len(samples) for row in rows]

    assert_parity(samples, fresh(), rows, follow=["x_s"])


@pytest.mark.slow
@pytest.mark.parametrize("make", [FakeDataset, FakeHeteroDataset])
def test_the_fake_datasets_of_pyg_batch_as_with_pyg(tmp_path, make):
    dataset = pack(make(num_graphs=20), tmp_path / "c.lk", shard_bytes=20_000)

    assert_batch_parity(dataset)


def test_large_graphs_are_copied_slice_by_slice_and_are_the_same(tmp_path):
    samples = [
        Data(
            x=torch.randn(n, 64),
            edge_index=torch.randint(n, (2, 20 * n)),
            y=torch.ones(1, 9),
        )
        for n in (300, 201, 444, 390)
    ]

    dataset = pack(samples, tmp_path / "c.lk", shard_bytes=400_000)

    rows = [2, 0, 3, 3, 1]
    wanted = Batch.from_data_list([samples[row] for row in rows])
    assert_same(dataset.batch(rows), wanted)


def test_shapes_that_cannot_be_joined_are_named(tmp_path):
    samples = [Data(x=torch.ones(2, 3)), Data(x=torch.ones(2, 4))]
    dataset = pack(samples, tmp_path / "c.lk")

    told = r"'x' has shapes in these samples .*: \[2, 3\] and \[2, 4\]"
    for read in (lambda: dataset.batch([0, 1]), lambda: dataset.x):
        with pytest.raises(DatasetError, match=told):
            read()
    assert_same(dataset[1], samples[1])


def test_shapes_of_a_node_type_that_cannot_be_joined_are_named(tmp_path):
    samples = [HeteroData(a={"x": torch.ones(2, width)}) for width in (3, 4)]
    dataset = pack(samples, tmp_path / "c.lk", workers=0)

    told = r"x' has shapes in these samples .*: \[2, 3\] and \[2, 4\]"
    for read in (lambda: dataset.batch([0, 1]), lambda: dataset["a"].x):
        with pytest.raises(DatasetError, match=told):
            read()


def make_samples(count=40):
    torch.manual_seed(0)
    return [
        Data(
            x=torch.randn(3 + i % 5, 4),
            edge_index=torch.randint(3, (2, 6 + i % 3)),
            y=torch.tensor([i]),
            name=f"g{i}",
        )
        for i in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_give_the_batches_that_the_process_itself_gives(tmp_path, context):
    samples = make_samples()
    dataset = pack(samples, tmp_path / "c.lk")
    loader = DataLoader(
        dataset,
        batch_size=8,
        collate_fn=dataset.collate,
        num_workers=2 if context == "fork" else 1,  # others import PyG in each
        multiprocessing_context=context,
    )

    batches = list(loader)

    for number, batch in enumerate(batches):
        rows = range(8 * number, 8 * number + 8)
        assert_same(batch, Batch.from_data_list([samples[row] for row in rows]))


def test_a_batch_from_a_worker_lies_in_one_shared_segment(tmp_path):
    dataset = pack(make_samples(), tmp_path / "c.lk")
    loader = DataLoader(
        dataset, batch_size=8, num_workers=1, collate_fn=dataset.collate
    )

    batch = list(loader)[1]  # of the first, the samples are read

    tensors = [batch.x, batch.edge_index, batch.y, batch.batch, batch.ptr]
    tensors += [*batch._slice_dict.values(), *batch._inc_dict.values()]
    held = {t.untyped_storage().data_ptr() for t in tensors if t is not None}
    assert len(held) == 1


def test_the_loader_of_pyg_works_on_our_dataset_and_its_subsets(tmp_path):
    samples = make_samples()
    dataset = pack(samples, tmp_path / "c.lk")
    wanted = Batch.from_data_list(samples[:4])

    whole = next(iter(GraphDataLoader(dataset, batch_size=4)))
    some = next(iter(GraphDataLoader(Subset(dataset, range(4)), batch_size=4)))

    assert_same(whole, wanted)
    assert_same(some, wanted)


def test_a_transform_sees_each_graph_and_the_batch_is_made_of_what_it_returns(tmp_path):
    samples = make_samples()
    pack(samples, tmp_path / "c.lk")

    def double(data):
        data.x *= 2
        return data

    dataset = open_cache(tmp_path / "c.lk", transform=double)

    assert_same(dataset.batch([0, 1]).x, 2 * torch.cat([samples[0].x, samples[1].x]))
    assert_same(dataset.batch([0, 1]).x, 2 * torch.cat([samples[0].x, samples[1].x]))


def test_without_a_cache_a_batch_is_the_same():
    samples = make_samples()

    class Bare(SafeGraphDataset):
        def keys(self):
            return range(len(samples))

        def load(self, key):
            return samples[key]

    dataset = Bare(follow_batch=["x"], exclude_keys=["name"])

    wanted = Batch.from_data_list(samples[3:6], ["x"], ["name"])
    assert_same(dataset.batch([3, 4, 5]), wanted)


def test_a_pair_of_graphs_with_a_class_of_its_own_comes_back_as_that_class(tmp_path):
    sample = Paired(x_s=torch.ones(2, 1), x_t=torch.ones(3, 1), num_nodes=2)

    dataset = pack([sample], tmp_path / "c.lk")

    assert_same(dataset[0], sample)


def test_assert_same_finds_a_planted_difference(tmp_path):
    samples = make_samples(4)
    dataset = pack(samples, tmp_path / "c.lk")
    batch, wanted = dataset.batch([0, 1]), Batch.from_data_list(samples[:2])
    assert_same(batch, wanted)

    batch._slice_dict["x"][1] += 1

    with pytest.raises(AssertionError, match="_slice_dict"):
        assert_same(batch, wanted)


def test_a_heterogeneous_graph_with_counted_nodes_alone_is_measured(tmp_path):
    data = HeteroData()
    data["a"].num_nodes = 3
    data["a", "to", "a"].edge_index = torch.zeros(2, 5, dtype=torch.long)

    sizes = pack([data, data], tmp_path / "c.lk").sizes()

    assert sizes.nodes.tolist() == [3, 3]
    assert sizes.edges.tolist() == [5, 5]


@pytest.mark.needs("torch_sparse")
def test_sparse_tensors_of_torch_sparse_come_back_and_batch_as_with_pyg(tmp_path):
    from torch_sparse import SparseTensor

    def sample(nodes, weighted):
        row, col = torch.arange(nodes), torch.arange(nodes).roll(1)
        value = torch.rand(nodes) if weighted else None
        adj = SparseTensor(
            row=row, col=col, value=value, sparse_sizes=(nodes, nodes + 1)
        )
        return Data(x=torch.rand(nodes, 2), adj_t=adj)

    for weighted in (False, True):
        samples = [sample(n, weighted) for n in (3, 7, 1, 4)]
        packed = pack(samples, tmp_path / f"{weighted}.lk")

        for got, wanted in zip(packed, samples, strict=True):
            assert_same(got.x, wanted.x)
            assert got.adj_t == wanted.adj_t
            assert got.adj_t.sizes() == wanted.adj_t.sizes()
        got = packed.batch([2, 0, 3])
        wanted = Batch.from_data_list([samples[i] for i in (2, 0, 3)])
        assert got.adj_t == wanted.adj_t
        assert_same(got.ptr, wanted.ptr)
        assert [
            d.adj_t == s.adj_t
            for d, s in zip(
                got.to_data_list(), [samples[2], samples[0], samples[3]], strict=True
            )
        ] == [True] * 3
        assert owned_copy(samples[0]).adj_t == samples[0].adj_t
