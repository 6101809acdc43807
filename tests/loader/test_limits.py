"""A batch keeps to its limits, whatever a transform does, or the loader says so."""

import functools
import itertools

import clients
import pytest
import torch
from torch.utils.data import Subset
from torch_geometric.data import Batch, Data

from loaderkit import SafeDataset, SafeGraphDataset, build_loader, open_cache, pack
from loaderkit.errors import LoaderError

COUNT = 24


def clip(i):
    return {
        "text": torch.ones(1 + i % 7, 2),
        "ids": list(range(1 + i % 3)),
        "image": torch.ones(50, 2),
        "n": i,
    }


def unchanged(sample):
    return sample


def without_all_but_two_nodes(graph):
    return graph.subgraph(torch.arange(2))


def with_more_nodes(graph, every=1):
    """Add nodes to some graphs, as virtual nodes and paddings are added."""
    if int(graph.name[1:]) % every == 0:
        graph.x = torch.cat([graph.x, graph.x, graph.x])
    return graph


def with_more_edges(graph):
    graph.edge_index = graph.edge_index.repeat(1, 4)
    return graph


def two_views(graph):
    return graph, graph.clone()


def by_name(graph):
    return {"first": graph, "second": {"again": graph}}


GRAPH_CHANGES = {
    "none": unchanged,
    "fewer nodes": without_all_but_two_nodes,
    "more nodes": with_more_nodes,
    "two views": two_views,
    "by name": by_name,
    "some with more nodes": functools.partial(with_more_nodes, every=7),
    "more edges": with_more_edges,
}


def repeated(sample):
    return sample | {"text": sample["text"].repeat(3, 1)}


def of_one_length(sample):
    return sample | {"text": torch.zeros(20, 2)}


def of_another_name(sample):
    return {"words": sample["text"].repeat(4, 1)}


def cut(sample):
    return sample | {"text": sample["text"][:1]}


def longer_list(sample):
    return sample | {"ids": sample["ids"] * 9}


CLIP_CHANGES = {
    "none": unchanged,
    "repeated": repeated,
    "of one length": of_one_length,
    "of another name": of_another_name,
    "cut": cut,
    "longer list": longer_list,
}


class OwnReading:
    """Changes samples in a ``__getitem__`` of its own."""

    change = staticmethod(unchanged)

    def __getitem__(self, row):
        return self.change(super().__getitem__(row))


class Changing(OwnReading, SafeDataset):
    """Clips."""


class ChangingGraphs(OwnReading, SafeGraphDataset):
    """Graphs."""


class ChangingPart(Subset):
    """Changes samples as torch's forum says: in a subclass of Subset."""

    def __init__(self, data, rows, change):
        super().__init__(data, rows)
        self.change = change

    def __getitem__(self, row):
        return self.change(self.dataset[self.indices[row]])

    def __getitems__(self, rows):
        return [self[row] for row in rows]


def changed_by(cache, change):
    graphs = isinstance(open_cache(cache), SafeGraphDataset)
    own = (ChangingGraphs if graphs else Changing)(cache=cache)
    own.change = change
    return {
        "transform": open_cache(cache, transform=change),
        "part": open_cache(cache, transform=change)[3:20],
        "subset": Subset(open_cache(cache, transform=change), range(2, 19)),
        "own __getitem__": own,
        "own Subset": ChangingPart(open_cache(cache), range(COUNT), change),
    }


def totals(samples):
    """Count what is in samples, as PyG counts it."""
    graphs = []
    stack = list(samples)
    while stack:
        value = stack.pop()
        if isinstance(value, (list, tuple)):
            stack += value
        elif isinstance(value, dict):
            stack += value.values()
        else:
            graphs.append(value)
    whole = Batch.from_data_list(graphs)
    return {"nodes": whole.num_nodes, "edges": whole.num_edges}


def outcome(data, **options):
    """Give the samples of every batch, or the error."""
    loader = build_loader(
        data, collate_fn=list, num_workers=0, probe=False, seed=0, **options
    )
    try:
        return list(loader)
    except LoaderError as error:
        return error


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["nodes", "edges"])
def test_no_batch_of_changed_graphs_is_beyond_its_limit(tmp_path, limit):
    pack([clients.graph(i) for i in range(COUNT)], tmp_path / "c.lk", workers=0)
    refused = set()

    for name, change in GRAPH_CHANGES.items():
        for way, data in changed_by(tmp_path / "c.lk", change).items():
            outcome_of_way = outcome(data, shuffle=True, **{f"max_{limit}": 13})
            if isinstance(outcome_of_way, LoaderError):
                assert f"{limit}, above max_{limit}=13: " in outcome_of_way.what, way
                refused.add(name)
            else:
                assert all(totals(batch)[limit] <= 13 for batch in outcome_of_way), (
                    name,
                    way,
                )

    larger = {"two views", "by name"}
    larger |= {"more nodes", "some with more nodes"} if limit == "nodes" else set()
    larger |= {"more edges"} if limit == "edges" else set()
    assert refused == larger


@pytest.mark.slow
def test_no_batch_of_changed_clips_is_beyond_its_limit(tmp_path):
    pack([clip(i) for i in range(COUNT)], tmp_path / "c.lk", workers=0)
    refused = set()

    for name, change in CLIP_CHANGES.items():
        for way, data in changed_by(tmp_path / "c.lk", change).items():
            outcome_of_way = outcome(data, shuffle=True, max_tokens=15)
            if isinstance(outcome_of_way, LoaderError):
                assert "tokens, above max_tokens=15: " in outcome_of_way.what, way
                refused.add(name)

    assert refused == set(CLIP_CHANGES) - {"none", "cut"}


def test_a_sample_beyond_a_limit_may_still_have_a_batch_of_its_own(tmp_path):
    pack([clients.graph(i) for i in range(COUNT)], tmp_path / "c.lk", workers=0)
    data = open_cache(tmp_path / "c.lk", transform=with_more_nodes)

    alone = outcome(data, max_nodes=13, batch_size=1, oversized="alone")

    assert len(alone) == COUNT
    assert isinstance(outcome(data, max_nodes=13, batch_size=1), LoaderError)


@pytest.mark.slow
def test_bytes_are_counted_too_and_workers_tell_what_grew(tmp_path):
    pack([clients.graph(i) for i in range(COUNT)], tmp_path / "c.lk", workers=0)
    grown = open_cache(tmp_path / "c.lk", transform=with_more_nodes)
    same = open_cache(tmp_path / "c.lk", transform=unchanged)

    for workers in (0, 1):
        options = {"max_bytes": 700, "num_workers": workers, "probe": False}
        with pytest.raises(LoaderError, match="bytes, above max_bytes=700: '0' "):
            list(build_loader(grown, **options))
    assert len(list(build_loader(same, **options))) > 1


@pytest.mark.parametrize("change", [unchanged, cut, repeated])
def test_buckets_keep_their_promise_or_say_why_not(tmp_path, change):
    pack([clip(i) for i in range(COUNT)], tmp_path / "c.lk", workers=0)
    data = open_cache(tmp_path / "c.lk", transform=change)
    loader = build_loader(
        data, bucket_by="tokens", buckets=3, batch_size=4, num_workers=0, probe=False
    )

    if change is repeated:
        with pytest.raises(LoaderError, match="its bucket"):
            list(loader)
    else:
        texts = [batch["text"] for batch in loader]
        tensors = [t if isinstance(t, torch.Tensor) else t.values for t in texts]
        assert len({tensor.shape[1] for tensor in tensors}) <= 3


def test_sizes_of_the_users_own_are_believed(tmp_path):
    class Sized(SafeGraphDataset):
        def sizes(self):
            return {"nodes": [1] * COUNT}

    pack([clients.graph(i) for i in range(COUNT)], tmp_path / "c.lk", workers=0)
    data = Sized(cache=tmp_path / "c.lk", transform=with_more_nodes)

    batches = outcome(data, max_nodes=4)

    assert [len(batch) for batch in batches] == [4] * 6
    assert len(list(itertools.chain(*batches))) == COUNT


@pytest.mark.many_cases(quick=5)
@pytest.mark.parametrize("limit", ["1 TB", "9 EB", 2**62, 10**30])
@pytest.mark.parametrize("name", ["max_bytes", "max_tokens", "batch_size"])
def test_a_limit_far_above_the_data_is_none(tmp_path, name, limit):
    if isinstance(limit, str) and name != "max_bytes":
        limit = 2**40
    cache = pack([clip(i) for i in range(COUNT)], tmp_path / "a.lk")

    loader = build_loader(cache, num_workers=0, **{name: limit})

    [batch] = loader
    assert len(batch["n"]) == COUNT


FIELDS_WITHOUT_SIZE = {
    "nodes": [{"x_s": (3, 2), "x_t": (2, 2)}, {"z": (4,)}, {"label": (1,)}],
    "edges": [{"x": (4, 2)}, {"pos": (2, 3), "z": (2,)}, {"label": (1,)}],
}


@pytest.mark.filterwarnings("ignore:.*num_nodes:UserWarning")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("size", "shapes"),
    [(size, each) for size, cases in FIELDS_WITHOUT_SIZE.items() for each in cases],
)
def test_a_limit_that_no_sample_counts_towards_is_refused(
    tmp_path, size, shapes, packed
):
    graphs = [
        Data(**{name: torch.zeros(shape) for name, shape in shapes.items()})
        for _ in range(6)
    ]
    # The oracle: PyG counts none either.
    assert not any(getattr(graph, f"num_{size}") for graph in graphs)
    dataset = pack(graphs, tmp_path / "c.lk") if packed else graphs

    for options in ({}, {"shuffle": True}, {"batch_size": 4}):
        with pytest.raises(LoaderError, match=f"max_{size}=8 would limit nothing"):
            build_loader(dataset, **{f"max_{size}": 8}, **options)

    # The twin: one sample that counts is enough.
    graphs[3].num_nodes = 2
    graphs[3].edge_index = torch.tensor([[0, 1], [1, 0]])
    if packed:
        dataset = pack(graphs, tmp_path / "c2.lk")
    assert len(build_loader(dataset, **{f"max_{size}": 8})) == 1


def test_a_limit_of_nothing_beside_one_that_counts_is_no_mistake():
    # A plan of clouds of points has both: plan_batch knows no edges, and no fewer.
    clouds = [Data(x=torch.zeros(3, 1)) for _ in range(6)]

    loader = build_loader(clouds, max_nodes=6, max_edges=8)

    assert len(loader) == 3
