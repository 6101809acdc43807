"""Hints of attributes that are expressions of the object itself can be evaluated."""

import ast
import dataclasses

import pytest
import torch
from torch_geometric.data import Data, TemporalData

from loaderkit import SafeDataset, build_loader, pack
from loaderkit.errors import NoSuchAttributeError, OptionError
from loaderkit.habits import ATTRIBUTES


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hints")
    rows = [{"x": torch.ones(n)} for n in (2, 3)]
    rows = pack(rows, folder / "rows.lk", workers=0)
    graphs = [Data(x=torch.ones(n, 1)) for n in (2, 3)]
    graphs = pack(graphs, folder / "graphs.lk", workers=0)
    return {
        "Padded": {"padded": rows.batch([0, 1])["x"]},
        "SampleSizes": {"sizes": rows.sizes()},
        "GraphSizes": {"sizes": graphs.sizes()},
    }


def names_in(code):
    return {node.id for node in ast.walk(ast.parse(code)) if type(node) is ast.Name}


@pytest.mark.parametrize("kind", ["Padded", "SampleSizes", "GraphSizes"])
def test_a_hint_that_is_an_expression_can_be_followed(objects, kind, tmp_path):
    known = {"torch": torch, "dataclasses": dataclasses, "path": tmp_path / "a.html"}
    known |= objects[kind] | {"len": len, "vars": vars}
    followed = 0
    for name, hint in ATTRIBUTES[kind].items():
        thing = next(iter(objects[kind].values()))
        for fix in hint.fix.split(", or "):
            try:
                used = names_in(fix)
            except SyntaxError:  # of words
                continue
            is_complete = used <= known.keys() and bool(used & objects[kind].keys())
            if not is_complete or "cuda" in fix:
                continue
            eval(fix, dict(known))
            followed += 1
        with pytest.raises(NoSuchAttributeError):
            getattr(thing, name)
    assert followed > 4


def test_sizes_are_equal_where_all_their_numbers_are(objects):
    for kind in ("SampleSizes", "GraphSizes"):
        sizes = objects[kind]["sizes"]
        assert sizes == dataclasses.replace(sizes, bytes=sizes.bytes.copy())
        assert sizes != dataclasses.replace(sizes, bytes=sizes.bytes + 1)
        assert sizes != 3


@pytest.mark.parametrize("cached", [True, False])
def test_the_edges_of_streams_of_events_are_their_events(tmp_path, cached):
    streams = [
        TemporalData(src=ends, dst=ends, t=ends, msg=torch.ones(len(ends), 2))
        for ends in map(torch.arange, (3, 5, 4, 1))
    ]
    data = pack(streams, tmp_path / "streams.lk", workers=0) if cached else streams
    if cached:
        assert data.sizes().edges.tolist() == [stream.num_edges for stream in streams]
    batches = list(build_loader(data, max_edges=8))
    assert [batch.num_edges for batch in batches] == [8, 5]


def test_a_method_called_on_its_class_says_so():
    with pytest.raises(OptionError, match="load was called") as caught:
        SafeDataset.load("a.lk")
    assert "called on the class" in caught.value.why
    assert "str" not in str(caught.value)


def test_the_names_of_a_split_are_no_datasets(tmp_path):
    rows = [{"n": n} for n in range(10)]
    dataset = pack(rows, tmp_path / "rows.lk", workers=0)
    split = dataset.train_test_split(0.2)
    for name in split:
        with pytest.raises(OptionError, match="no dataset") as caught:
            build_loader(name)
        loader = eval(caught.value.fix, {"split": split, "build_loader": build_loader})
        assert len(loader.dataset) == len(split[name])


def test_rows_of_masks_for_batches_are_lists_of_rows():
    masks = [[True, False, True], [False, True, False]]
    loader = build_loader([0, 1, 2], batch_sampler=masks)
    with pytest.raises(OptionError, match="gave True as a row") as caught:
        list(loader)
    code = caught.value.fix.removeprefix("batch_sampler=")
    rows = eval(code, {"masks": masks})
    assert [b.tolist() for b in build_loader([0, 1, 2], batch_sampler=rows)] == [
        [0, 2],
        [1],
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda functions: SafeDataset(cache="none.lk", transform=functions),
        lambda functions: build_loader([1], batch_transform=functions),
    ],
)
def test_a_list_of_transforms_is_to_be_one_function(call):
    with pytest.raises(OptionError, match="must be a function") as caught:
        call([str, len])
    assert "transforms.Compose([...])" in caught.value.fix


@pytest.mark.parametrize("name", ["max_length", "max_len", "max_seq_len"])
def test_the_longest_sample_is_no_limit_of_batches(tmp_path, name):
    lengths = [300, 600, 512]
    rows = [{"x": torch.ones(n)} for n in lengths]
    dataset = pack(rows, tmp_path / "rows.lk", workers=0)
    with pytest.raises(OptionError, match="limits are those of batches") as caught:
        build_loader(dataset, batch_size=1, **{name: 512})
    given = {"dataset": dataset, "build_loader": build_loader}
    loader = eval(caught.value.fix.split(", or ")[0], given)
    assert len(loader.dataset) == sum(n <= 512 for n in lengths)
