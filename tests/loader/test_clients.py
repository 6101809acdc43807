"""Other people's code sees a packed dataset as it sees a list of the same samples."""

import collections
import heapq
import marshal

import clients
import numpy as np
import pytest
import torch
from fresh_process import CONTEXT
from torch.utils.data import DataLoader, Dataset

from loaderkit import SafeGraphDataset, build_loader, open_cache, pack
from loaderkit.datasets.ragged import Padded
from loaderkit.errors import DatasetError, OptionError
from loaderkit.testing import assert_same


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Pack every kind of samples once."""
    folder = tmp_path_factory.mktemp("clients")
    return {
        kind: pack(clients.samples_of(kind), folder / kind, workers=0)
        for kind in clients.SAMPLES
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_row_of_the_table_gives_what_it_gives_over_a_list(packed):
    compared = collections.Counter()

    for row in clients.rows(450, seed=1):
        batches = clients.wanted(row)
        if batches is not None:
            assert_same(row.epoch(packed[row.samples]), batches, str(row))
            compared.update([row.samples, row.composition, row.sampler])

    names = [*clients.SAMPLES, *clients.COMPOSITIONS, *clients.SAMPLERS]
    assert [name for name in names if not compared[name]] == []


class Finished(Dataset):
    """Gives a finished batch, whatever the collate function expects."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, row):
        return self.data[row]

    def __getitems__(self, rows):
        return self.data.batch(rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_table_finds_a_dataset_that_gives_finished_batches(packed):
    row = clients.Row("dicts", "itself", "DataLoader(counted) 4", "in order")

    with pytest.raises(AssertionError):
        assert_same(row.epoch(Finished(packed["dicts"])), clients.wanted(row))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_workers_see_it_too(packed):
    number = 0
    for row in clients.rows(60, seed=2):
        batches = clients.wanted(row)
        if batches is not None and number < 6:
            number += 1
            batches_of_client = row.epoch(packed[row.samples], num_workers=2)
            assert_same(batches_of_client, batches, str(row))
    assert number == 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_workers_that_are_sent_all_by_pickle_see_it_too(packed):
    row = clients.Row("dicts", "subset", "DataLoader(counted) 4", "in order")

    batches_of_client = row.epoch(
        packed["dicts"], num_workers=1, multiprocessing_context=CONTEXT
    )

    assert_same(batches_of_client, clients.wanted(row))


@pytest.mark.parametrize("kind", ["graphs", "dicts", "tuples", "named"])
def test_a_chain_of_streams_is_a_chain_of_the_samples(packed, kind):
    collate = clients.pyg.dataloader.Collater(None)
    chains = [
        DataLoader(clients.chained(data), batch_size=3, collate_fn=collate)
        for data in (packed[kind], clients.samples_of(kind))
    ]
    if kind == "tuples":  # PyG's collate takes no arrays
        chains = [DataLoader(chain.dataset, batch_size=3) for chain in chains]

    assert_same(list(chains[0]), list(chains[1]))


def test_only_the_datasets_own_collate_leaves_the_samples_unread(packed):
    data = packed["graphs"]
    samples = data.unread([3, 1])

    batch = data.collate(samples)

    assert samples.dataset is data
    assert_same(batch, data.batch([3, 1]))
    assert samples[0].name == "g3"
    assert samples.dataset is None


@pytest.mark.parametrize("kind", ["graphs", "dicts", "tensors", "texts"])
def test_samples_come_unread_only_where_the_dataset_joined_those_before(packed, kind):
    data = packed[kind]
    part = data[2:9]

    first = part.__getitems__([3, 1])
    assert type(first) is list
    joined = data.collate(first)  # that of the whole serves its parts
    second = part.__getitems__([3, 1])
    assert type(second) is not list
    assert_same(data.collate(second), joined)
    assert type(part.__getitems__([0])) is not list

    assert second[0] is not None  # somebody looks inside: they need samples
    assert type(part.__getitems__([3, 1])) is list
    assert type(data.__getitems__([3, 1])) is list


def test_a_loader_of_torchs_gathers_from_its_second_batch_on(packed):
    given = []

    class Telling(SafeGraphDataset):
        def __getitems__(self, rows):
            given.append(super().__getitems__(rows))
            return given[-1]

    data = Telling(cache=packed["graphs"].cache)
    wanted = [data.batch(rows) for rows in (range(5), range(5, 10), range(10, 14))]

    assert_same(list(DataLoader(data, 5, collate_fn=data.collate)), wanted)
    assert [type(samples) is list for samples in given] == [True, False, False]
    assert [samples.dataset is data for samples in given[1:]] == [True, True]

    def wrapped(samples):
        return data.collate(samples), len(samples)

    assert len(list(DataLoader(data, 5, collate_fn=wrapped))) == 3
    assert type(given[-1]) is not list
    list(DataLoader(data, 5, collate_fn=list))
    assert type(given[-1]) is list


PAST_THE_METHODS = {
    "heapq": lambda samples: heapq.heapify(samples),
    "an unbound method": lambda samples: list.sort(samples, key=lambda s: s["a"]),
    "a copy of the memory": lambda samples: [s["a"] for s in list.copy(samples)],
    "marshal": marshal.dumps,
    "a field": lambda samples: [s.a for s in list.__iter__(samples)],
    "text": lambda samples: [str(s) for s in list.__iter__(samples)],
}


@pytest.mark.parametrize("use", PAST_THE_METHODS)
def test_code_that_reads_a_lists_memory_finds_no_empty_list(tmp_path, use):
    rows = [{"a": i, "b": f"s{i}"} for i in range(4)]
    data = pack(rows, tmp_path / "c.lk", workers=0)

    error = ValueError if use == "marshal" else DatasetError  # it takes no subclass
    with pytest.raises(error):
        PAST_THE_METHODS[use](data.unread([2, 1]))
    assert list.__len__(data.unread([2, 1])) == 2


def test_samples_that_were_changed_before_they_are_joined_stay_changed(packed):
    for kind, field in (("graphs", "y"), ("dicts", "x")):
        data = packed[kind]
        samples = data.__getitems__([3, 1])
        samples[0][field] += 10

        assert data.collate(samples)[field][0].tolist() != data[3][field].tolist()


USES = {
    "length": len,
    "truth": bool,
    "text": repr,
    "first": lambda samples: samples[0],
    "last": lambda samples: samples[-1],
    "slice": lambda samples: samples[::2],
    "iteration": lambda samples: [*samples],
    "unpacking": lambda samples: (lambda *items: items)(*samples),
    "names": lambda samples: [name for name, *_ in [samples]],
    "tuple": tuple,
    "set of lengths": lambda samples: {len(sample) for sample in samples},
    "reversed": lambda samples: list(reversed(samples)),
    "sorted": lambda samples: sorted(samples, key=str),
    "sum": lambda samples: sum([samples, samples], []),  # noqa: RUF017
    "before": lambda samples: samples + [1],  # noqa: RUF005
    "behind": lambda samples: [1] + samples,  # noqa: RUF005
    "twice": lambda samples: 2 * samples + samples * 2,
    "in": lambda samples: {"a": 1, "b": "s1"} in samples,
    "index": lambda samples: samples.index({"a": 1, "b": "s1"}),
    "count": lambda samples: samples.count({"a": 1, "b": "s1"}),
    "equal": lambda samples: samples == [{"a": 2, "b": "s2"}, {"a": 1, "b": "s1"}],
    "equal, the other way": lambda s: s == [{"a": 2, "b": "s2"}, {"a": 1, "b": "s1"}],
    "copied": lambda samples: samples.copy(),
    "shallow": lambda samples: __import__("copy").copy(samples),
    "deep": lambda samples: __import__("copy").deepcopy(samples),
    "pickled": lambda s: __import__("pickle").loads(__import__("pickle").dumps(s)),
    "json": lambda samples: __import__("json").dumps(samples),
    "array": lambda samples: np.array(samples).tolist(),
    "extended": lambda samples: [0, *samples, 0],
    "extend": lambda samples: (lambda all_: (all_.extend(samples), all_)[1])([7]),
    "appended": lambda samples: (samples.append(3), samples)[1],
    "inserted": lambda samples: (samples.insert(1, 3), samples)[1],
    "popped": lambda samples: (samples.pop(), samples),
    "removed": lambda samples: (samples.remove({"a": 1, "b": "s1"}), samples),
    "cleared": lambda samples: (samples.clear(), samples),
    "turned": lambda samples: (samples.reverse(), samples),
    "deleted": lambda samples: (samples.__delitem__(0), samples),
    "set": lambda samples: (samples.__setitem__(0, None), samples),
    "assigned": lambda samples: (samples.__setitem__(slice(0, 1), [1, 2]), samples),
    "by its type": lambda samples: list(type(samples)(sample for sample in samples)),
    "is a list": lambda samples: isinstance(samples, list),
    "collated": torch.utils.data.default_collate,
}


@pytest.mark.many_cases
@pytest.mark.parametrize("use", USES)
def test_whatever_is_done_with_a_list_is_done_with_the_samples(tmp_path, use):
    rows = [{"a": i, "b": f"s{i}"} for i in range(4)]
    data = pack(rows, tmp_path / "c.lk", workers=0)

    wanted = USES[use]([{"a": 2, "b": "s2"}, {"a": 1, "b": "s1"}])
    assert_same(USES[use](data.unread([2, 1])), wanted)
    assert_same(USES[use](data.__getitems__([2, 1])), wanted)


RESULTS = {
    "a pair": lambda g: (g, g.clone()),
    "a dict": lambda g: {"g": g, "n": g.num_nodes},
    "a list": lambda g: [g, g.x.sum()],
    "a tensor": lambda g: g.x.sum(0),
    "a dict of tensors": lambda g: {"x": g.x.sum(0), "y": g.y},
    "a number": lambda g: g.num_nodes,
    "a text": lambda g: g.name,
    "another graph": lambda g: clients.hetero(g.num_nodes),
    "a named pair": lambda g: clients.Point(g, g.num_nodes),
    "a deep nest": lambda g: {"in": ({"g": g}, [g, (g, 0.5)])},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("result", "workers"),
    [*((result, 0) for result in RESULTS), ("a pair", 1), ("a tensor", 1)],
)
def test_a_transform_returns_whatever_the_loader_joins(packed, result, workers):
    changed = open_cache(packed["graphs"].cache, transform=RESULTS[result])
    alike = [RESULTS[result](g) for g in clients.samples_of("graphs")]
    options = {"batch_size": 4, "num_workers": workers}

    assert_same(
        list(clients.pyg.DataLoader(changed, **options)),
        list(clients.pyg.DataLoader(alike, batch_size=4)),
    )
    assert_same(
        list(build_loader(changed, probe=False, **options)),
        list(build_loader(alike, probe=False, batch_size=4, num_workers=0)),
    )


def without_none(samples):
    return torch.stack([sample.x.sum() for sample in samples if sample is not None])


def test_a_transform_may_drop_samples_that_the_collate_function_leaves_out(packed):
    def large(g):
        return g if g.num_nodes > 2 else None

    changed = open_cache(packed["graphs"].cache, transform=large)
    alike = [large(g) for g in clients.samples_of("graphs")]

    for make in (DataLoader, build_loader):
        options = {} if make is DataLoader else {"probe": False}
        batches_of_client = make(
            changed, batch_size=4, collate_fn=without_none, num_workers=0, **options
        )
        wanted = DataLoader(alike, batch_size=4, collate_fn=without_none)
        assert_same(list(batches_of_client), list(wanted))


@pytest.mark.parametrize("name", ["follow_batch", "exclude_keys"])
def test_fields_of_graphs_are_refused_where_there_are_none(packed, name):
    for data in (packed["dicts"], clients.samples_of("dicts")):
        loader = build_loader(data, probe=False, num_workers=0, **{name: ["x"]})
        with pytest.raises(DatasetError, match=f"{name}=.*without a graph"):
            list(loader)


def test_fields_of_graphs_are_refused_where_somebody_else_joins_them(packed):
    with pytest.raises(OptionError, match="collate_fn was given with follow_batch"):
        build_loader(packed["graphs"], collate_fn=list, follow_batch=["x"])


def test_a_subclass_that_reads_in_its_own_way_is_batched_in_that_way(packed):
    from loaderkit import SafeGraphDataset

    class Shifted(SafeGraphDataset):
        def __getitem__(self, row):
            graph = super().__getitem__(row)
            graph.x = graph.x + 100
            return graph

    class Marked(SafeGraphDataset):
        def batch(self, rows, **options):
            batch = super().batch(rows, **options)
            batch.mark = len(rows)
            return batch

    shifted = Shifted(cache=packed["graphs"].cache)
    marked = Marked(cache=packed["graphs"].cache)

    for data in (shifted, torch.utils.data.Subset(shifted, range(14))):
        [batch] = build_loader(data, batch_size=14, num_workers=0)
        assert float(batch.x.min()) >= 100
    for loader in (
        DataLoader(marked, batch_size=14, collate_fn=marked.collate),
        build_loader(marked, batch_size=14, num_workers=0),
    ):
        [batch] = loader
        assert batch.mark == 14


@pytest.mark.parametrize("size", [1, 3])
def test_a_ragged_field_is_padded_in_every_batch(packed, size):
    loader = build_loader(packed["ragged dicts"], batch_size=size, probe=False)

    batches = list(loader)

    assert {type(batch["x"]) for batch in batches} == {Padded}
    for number, row in enumerate(row for b in batches for row in b["x"].to_list()):
        assert torch.equal(row, torch.arange(1 + number % 4))
