"""Graphs that PyG cannot join are told with the field; kinds of graphs, with both."""

import random

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData, TemporalData

from loaderkit import build_loader, pack
from loaderkit.errors import DatasetError, LoaderkitError, UnlikeKeysError
from loaderkit.unlike_graphs import find_unlike_field

SHAPES = [(), (1,), (3,), (3, 2), (3, 4), (3, 1), (2, 3), (4, 2, 2), (0, 2)]
NAMES = ["x", "edge_index", "y", "mask", "face", "label"]


def draw_value(chance):
    choice = chance.randrange(12)
    if choice == 0:
        return 2.5
    if choice == 1:
        return "text"
    if choice == 2:
        return {"z": draw_value(chance), "w": torch.ones(2, 2)}
    if choice == 3:
        return [torch.ones(chance.choice(SHAPES)), torch.ones(2)]
    return torch.ones(chance.choice(SHAPES), dtype=torch.int64)


def draw_graph(chance, fields):
    """A graph of one type; or of several, where the fields say so."""
    if None in fields:
        return Data(**{name: draw_value(chance) for name in fields[None]})
    graph = HeteroData()
    for of_type, names in fields.items():
        for name in names:
            graph[of_type][name] = draw_value(chance)
    return graph


def draw_alike(seed, fields, count=3):
    return [draw_graph(random.Random(seed), fields) for _ in range(count)]


def is_joined_by_pyg(graphs):
    try:
        Batch.from_data_list(graphs)
    except Exception:  # noqa: BLE001 -- whatever PyG and torch say
        return False
    return True


@pytest.mark.many_cases
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.filterwarnings("ignore")
def test_the_field_that_pyg_cannot_join_is_named(seed):
    chance = random.Random(seed)
    for number in range(10):
        names = chance.sample(NAMES, 3)
        fields = {None: names}
        if chance.random() < 0.5:
            fields = {"atom": names[:2], "bond": names[1:]}
        graphs = draw_alike(1000 * seed + number, fields)
        assert is_joined_by_pyg(graphs) == (find_unlike_field(graphs) is None)
        if not is_joined_by_pyg(graphs):
            continue

        of_type = chance.choice(list(fields))
        name = chance.choice(fields[of_type])
        changed = graphs[chance.randrange(3)]
        store = changed if of_type is None else changed[of_type]
        store[name] = draw_value(chance)

        field = find_unlike_field(graphs)

        # The oracle: PyG's own word, with this field and without.
        assert is_joined_by_pyg(graphs) == (field is None)
        if field is not None:
            path = f"[{name!r}]" if of_type is None else f"[{of_type!r}][{name!r}]"
            assert field.words.startswith((path, f"[{name!r}]"))
            # It takes a name from every type: no advice where another type has it.
            is_of_one_type = sum(name in names for names in fields.values()) == 1
            assert (f"exclude_keys=[{name!r}]" in field.fix) == is_of_one_type


def told(graphs, path, *, packed):
    dataset = pack(graphs, path, workers=0) if packed else graphs
    with pytest.raises(LoaderkitError) as caught:
        next(iter(build_loader(dataset, batch_size=3, num_workers=0)))
    return caught.value


@pytest.mark.parametrize("packed", [False, True])
def test_graphs_of_two_numbers_of_axes_are_told_by_field(tmp_path, packed):
    graphs = [Data(x=torch.ones(3, 2), y=y) for y in (torch.ones(3), torch.ones(3, 1))]

    error = told(graphs, tmp_path / "c.lk", packed=packed)

    assert "['y'] has shapes [3] and [3, 1]" in error.why
    assert "exclude_keys=['y']" in error.fix


def test_a_graph_in_a_pair_is_told_by_its_field(tmp_path):
    samples = [(Data(x=torch.ones(3, width)), 1.0) for width in (2, 3)]

    error = told(samples, tmp_path, packed=False)

    assert error.why.startswith("[0]['x'] has shapes [3, 2] and [3, 3]")


GRAPHS = {
    "Data": lambda: Data(x=torch.ones(3, 2)),
    "HeteroData": lambda: draw_graph(random.Random(0), {"atom": ["x"]}),
    "TemporalData": lambda: TemporalData(src=torch.ones(2).long(), num_nodes=3),
}


@pytest.mark.parametrize("first", GRAPHS)
@pytest.mark.parametrize("second", GRAPHS)
def test_kinds_of_graphs_in_one_batch_are_told_by_both(first, second):
    graphs = [GRAPHS[first](), GRAPHS[second]()]
    loader = build_loader(graphs, batch_size=2, num_workers=0)
    if first == second:
        next(iter(loader))  # these are joined, or the test would see what is not there
        return

    with pytest.raises(UnlikeKeysError) as caught:
        next(iter(loader))

    assert f"has a {second}, and row 0 a {first}" in str(caught.value)
    assert "exclude_keys" not in caught.value.fix
    assert isinstance(caught.value, DatasetError)
