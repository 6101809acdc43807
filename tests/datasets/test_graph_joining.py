"""Graphs in memory are joined to the batch that PyG would make, or left to it."""

import random
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, FIELDS, graphs
from torch_geometric.data import Batch, Data, HeteroData

from loaderkit.graph_joining import join_graphs
from loaderkit.joining import join
from loaderkit.testing import assert_same

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
USUAL_FIELDS = ["ascii", "edge_attr", "face", "flag", "k", "my_index", "pos", "real"]
USUAL_FIELDS += ["scalar", "small_index", "stride", "y", "z"]
LEFT_TO_PYG = ["adj", "array", "cluster_index", "edges_index", "float_index", "nested"]
LEFT_TO_PYG += ["index_mask", "pair", "tensors", "words", "x_batch"]


def joined(samples, exclude=()):
    """The batch that is made here; None where it is left to PyG."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return join_graphs(samples, exclude)


def assert_as_pyg(batch, samples, exclude=()):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = Batch.from_data_list(samples, exclude_keys=list(exclude))
        assert_same(batch, wanted, "batch")
        assert_same(batch.to_data_list(), wanted.to_data_list(), "to_data_list")
    assert list(batch.keys()) == list(wanted.keys())


@pytest.mark.slow
@given(
    samples=graphs(),
    exclude=st.sets(st.sampled_from(["x", "pos", "num_nodes", "edge_index", "k"])),
)
@settings(max_examples=40)
def test_what_is_joined_here_is_as_with_pyg(samples, exclude):
    batch = joined(samples, exclude)

    if batch is not None:
        assert_as_pyg(batch, samples, exclude)


def make_graphs(name, dtype=torch.float32, *, with_x=True):
    torch.manual_seed(0)
    samples = []
    for number, nodes in enumerate([3, 2, 6, 4]):
        data = Data(num_nodes=nodes)
        if with_x:
            data = Data(x=torch.randn(nodes, 2))
        data.edge_index = torch.randint(nodes, (2, 4))
        data[name] = FIELDS[name](number, nodes, dtype)
        samples.append(data)
    return samples


@pytest.mark.parametrize("with_x", [True, False])
@pytest.mark.parametrize("name", USUAL_FIELDS)
def test_usual_fields_are_joined_here(name, with_x):
    samples = make_graphs(name, with_x=with_x)

    assert_as_pyg(joined(samples), samples)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_dtype_are_joined_here(dtype):
    samples = make_graphs("y", dtype)

    assert_as_pyg(joined(samples), samples)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_node_numbers_are_added_in_the_dtype_of_the_indices(dtype):
    samples = make_graphs("z")
    for sample in [*samples, *samples]:
        sample.edge_index = sample.edge_index.to(dtype)
    # 8-bit numbers run over, with PyG too.
    samples = samples * 40

    assert_as_pyg(joined(samples), samples)


@pytest.mark.parametrize("name", LEFT_TO_PYG)
def test_what_has_rules_of_its_own_is_left_to_pyg(name):
    samples = make_graphs(name)

    assert joined(samples) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(join(samples, others=list), Batch.from_data_list(samples))


def test_only_data_itself_is_joined_here():
    class Pair(Data):
        pass

    assert joined([Pair(x=torch.ones(2, 1))]) is None
    assert joined([Data(x=torch.ones(2, 1)), Pair(x=torch.ones(2, 1))]) is None
    assert joined([HeteroData()]) is None
    assert joined([Batch.from_data_list([Data(x=torch.ones(2, 1))])]) is None


def test_numbers_of_nodes_that_are_no_integers_are_left_to_pyg():
    samples = [Data(num_nodes=2), Data(num_nodes=2.0)]

    assert joined(samples) is None
    assert joined(samples[:1]).num_nodes == 2


def test_another_default_device_is_left_to_pyg():
    with torch.device("meta"):
        assert joined([Data(y=1)]) is None
    assert joined([Data(y=1)]).y.is_cpu


def test_what_cannot_be_joined_fails_as_with_pyg():
    for samples in (
        [Data(x=torch.ones(2, 1)), Data(x=torch.ones(2, 2))],
        [Data(x=torch.ones(2, 1)), Data(x=torch.tensor(1.0))],
    ):
        with pytest.raises((RuntimeError, KeyError, IndexError)) as wanted:
            Batch.from_data_list(samples)
        with pytest.raises(type(wanted.value)) as raised:
            join(samples, others=list)
        assert str(raised.value) == str(wanted.value)


def test_the_order_of_the_fields_of_each_graph_says_which_counts_the_nodes():
    """Of a graph whose ``x`` and ``pos`` have several lengths, PyG takes the first."""
    generator = random.Random(0)
    for _ in range(20):
        samples = []
        for _ in range(3):
            fields = {
                "x": torch.ones(generator.randrange(5), 1),
                "pos": torch.ones(generator.randrange(5), 1),
                "edge_index": torch.zeros(2, 1, dtype=torch.int64),
            }
            if generator.random() < 0.3:
                fields["num_nodes"] = generator.randrange(9)
            names = generator.sample(list(fields), len(fields))
            data = Data()
            for name in names:
                data[name] = fields[name]
            samples.append(data)
        if "num_nodes" in samples[0]:
            samples = [sample for sample in samples if "num_nodes" in sample]

        assert_as_pyg(joined(samples), samples)


def test_tensors_of_a_batch_are_new():
    sample = Data(x=torch.ones(2, 1), edge_index=torch.zeros(2, 1, dtype=torch.int64))

    batch = joined([sample])
    batch.x.zero_()
    batch.edge_index.add_(1)

    assert sample.x.all()
    assert not sample.edge_index.any()


def test_gradients_reach_the_tensors_of_graphs_that_are_joined():
    weight = torch.ones(3, requires_grad=True)

    joined([Data(x=weight[:1]), Data(x=weight[1:])]).x.sum().backward()

    assert weight.grad.tolist() == [1, 1, 1]
