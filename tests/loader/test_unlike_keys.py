"""Samples that lack a key are told with the key and the sample, in any order."""

import itertools
import random
from collections import Counter

import pytest
import torch
from torch.utils import _pytree
from torch_geometric.data import Data, HeteroData

import loaderkit
from loaderkit.datasets.safe import SafeDataset
from loaderkit.errors import DatasetError, UnlikeKeysError
from loaderkit.unlike_keys import find_unlike_key


def draw_nest(chance, depth):
    if depth == 0 or chance.random() < 0.3:
        return chance.choice([lambda: torch.ones(2), lambda: 1, lambda: "text"])()
    kind = chance.choice([dict, dict, list, tuple])
    parts = [draw_nest(chance, depth - 1) for _ in range(chance.randint(1, 3))]
    if kind is dict:
        return dict(zip("abc", parts, strict=False))
    return kind(parts)


def dicts_in(nest):
    parts = []
    if isinstance(nest, dict):
        parts = list(nest.values())
        yield nest
    elif isinstance(nest, list | tuple):
        parts = nest
    for part in parts:
        yield from dicts_in(part)


@pytest.mark.many_cases
@pytest.mark.parametrize("seed", range(40))
def test_a_key_is_found_where_nests_have_not_one_structure(seed):
    chance = random.Random(seed)
    for _ in range(5):
        state = chance.getstate()
        samples = []
        for _ in range(4):  # all alike
            chance.setstate(state)
            samples.append({"top": draw_nest(chance, 3), "x": 1})
        if chance.random() < 0.7:
            dicts = list(dicts_in(chance.choice(samples)))
            chosen = chance.choice(dicts)
            chosen.pop(chance.choice(list(chosen)), None)

        unlike = find_unlike_key(samples)

        # The oracle: how torch itself takes nests apart.
        structures = {str(_pytree.tree_structure(sample)) for sample in samples}
        assert (unlike is not None) == (len(structures) > 1)
        if unlike is not None:
            present, absent = samples[unlike.present_in], samples[unlike.absent_in]
            eval(f"present{unlike.field}", {"present": present})
            with pytest.raises(KeyError):
                eval(f"absent{unlike.field}", {"absent": absent})


def hetero(**fields):
    graph = HeteroData()
    graph["a"].x = torch.ones(2, 1)
    graph["b"].x = torch.ones(3, 1)
    for name, value in fields.items():
        graph["a"][name] = value
    return graph


class Loaded(SafeDataset):
    def __init__(self, samples):
        super().__init__()
        self.samples = samples

    def keys(self):
        return range(len(self.samples))

    def load(self, key):
        return self.samples[key]


def as_list(samples, _):
    return samples


def as_cache(samples, folder):
    return loaderkit.pack(samples, folder / "a.lk", workers=0)


def as_loaded(samples, _):
    return Loaded(samples)


X = {"x": torch.ones(2, 1)}
PAIRS = {
    "dict": (X | {"y": 1}, X),
    "nested": ({"in": X | {"y": 1}}, {"in": X}),
    "tuple": ((X | {"y": 1}, 1), (X, 1)),
    "list": ([X | {"y": 1}], [X]),
    "graph": (Data(**X, y=torch.ones(1)), Data(**X)),
    "pair": ((Data(**X, y=torch.ones(1)), 1), (Data(**X), 1)),
    "hetero": (hetero(y=torch.ones(1)), hetero()),
}


@pytest.mark.many_cases(quick=4)
@pytest.mark.parametrize("make", [as_list, as_cache, as_loaded])
@pytest.mark.parametrize("name", PAIRS)
def test_samples_and_key_are_told_in_every_order(tmp_path, name, make):
    if make is as_cache and name == "pair":
        pytest.skip("graphs beside others are not packed")
    whole, lacking = PAIRS[name]
    for number, order in enumerate(itertools.permutations([whole, whole, lacking])):
        folder = tmp_path / str(number)
        folder.mkdir()
        dataset = make(list(order), folder)
        loader = loaderkit.build_loader(dataset, batch_size=3, num_workers=0)

        with pytest.raises(DatasetError, match=r"\['y'\]") as caught:
            next(iter(loader))

        row = [id(sample) for sample in order].index(id(lacking))
        absent, _, present = caught.value.what.partition("lacks")
        assert f"row {row}" in absent
        assert f"row {row}" not in present


def test_keys_that_are_left_out_may_be_lacking():
    whole, lacking = PAIRS["graph"]
    for order in ([whole, lacking], [lacking, whole]):
        loader = loaderkit.build_loader(
            order, batch_size=2, num_workers=0, exclude_keys=["y"]
        )

        assert set(next(iter(loader)).keys()) == {"x", "batch", "ptr"}


def test_the_fix_of_graphs_leaves_the_field_out():
    whole, lacking = PAIRS["hetero"]
    with pytest.raises(UnlikeKeysError) as caught:
        next(iter(loaderkit.build_loader([lacking, whole], batch_size=2)))

    assert caught.value.fix.startswith("exclude_keys=['y']")


def test_a_counter_answers_for_what_it_lacks():
    samples = [Counter("aab"), Counter("a")]

    assert find_unlike_key(samples) is None
    assert find_unlike_key(samples[::-1])[:3] == ("['b']", 1, 0)


def test_a_collate_fn_of_the_users_gets_samples_as_they_are():
    whole, lacking = PAIRS["dict"]
    loader = loaderkit.build_loader(
        [whole, lacking], batch_size=2, num_workers=0, collate_fn=list
    )

    assert [len(sample) for sample in next(iter(loader))] == [2, 1]


FIELDS_OF_TYPES = [
    (of_type, name)
    for of_type in ("atom", "residue", ("atom", "bond", "atom"), ("atom", "in", "x"))
    for name in ("x", "edge_index", "w")
]


def hetero_graph(fields):
    graph = HeteroData()
    for of_type, name in fields:
        graph[of_type][name] = torch.zeros(2, 0, dtype=torch.int64)
    return graph


@pytest.mark.many_cases
@pytest.mark.parametrize("seed", range(40))
def test_what_is_told_to_be_left_out_is_no_field_of_another_type(seed):
    chance = random.Random(seed)
    alike = set(chance.sample(FIELDS_OF_TYPES, 4))
    only_first = set(chance.sample(FIELDS_OF_TYPES, 2)) - alike
    if not only_first:
        return
    graphs = [hetero_graph(alike | only_first), hetero_graph(alike)]
    chance.shuffle(graphs)

    fix = find_unlike_key(graphs).fix

    # exclude_keys takes a name from every type: done to the letter, it must leave all
    # that both graphs have.
    names_alike = {name for _, name in alike}
    names_unlike = {name for _, name in only_first}
    assert ("exclude_keys" in fix) == (not names_alike & names_unlike)
    if names_alike & names_unlike == {"edge_index"}:
        assert "edge_index = torch.empty(2, 0" in fix
