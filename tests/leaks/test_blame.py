"""What grew between two censuses, and which pattern it is: many planted at once."""

import dataclasses
import functools
import gc
import itertools
import mmap
import types
import weakref
from array import array
from collections import Counter, deque
from typing import NamedTuple, get_args

import numpy as np
import pytest
import torch
from fresh_process import in_fresh_process

from loaderkit import LeakDetector
from loaderkit.leaks import blame
from loaderkit.leaks.blame import find_growth
from loaderkit.leaks.census import Census, Heap, look_at_heap, take_census
from loaderkit.leaks.finders.autograd_chain import find_autograd_chain
from loaderkit.leaks.finders.child_processes import describe_worker
from loaderkit.leaks.finders.evidence import HeapEvidence
from loaderkit.leaks.finders.growing_array import find_growing_array
from loaderkit.leaks.finders.resources import kinds_of, resource_growth
from loaderkit.leaks.own_objects import ids_of_own_objects
from loaderkit.leaks.patterns import PATTERNS, PatternName
from loaderkit.leaks.retained import retained_bytes
from loaderkit.leaks.students_t import quantile
from loaderkit.leaks.watch import EpochRecorder
from loaderkit.memory.process import malloc_heap

BIG = 20_000
NO_IDS = np.zeros(0, np.int64)


@pytest.mark.slow
def test_each_pattern_is_known_by_what_is_kept():
    model = torch.nn.Linear(4, 4)
    closures, graphs, views, maps = ([0, 0] for _ in range(4))
    make = functools.lru_cache(maxsize=None)(lambda key: torch.ones(BIG) * key)
    hook = model.register_forward_hook(lambda *_, x=None: None)
    make(0)
    before = take_census(0)
    for number in range(1, 9):
        big = torch.ones(BIG)
        closures.append(lambda big=big: big)
        graphs.append((model(torch.ones(200, 4)) * 2).sum())
        views.append(torch.ones(BIG)[:2])
        maps.append(mmap.mmap(-1, 4 * BIG))
        make(number)
        model.register_forward_hook(functools.partial(print, np.ones(BIG)))

    growths = {growth.pattern: growth for growth in find_growth(before, 8, most=9)}

    assert {"closures", "view", "mappings"} <= set(growths)
    assert growths["view"].bytes_per_epoch == pytest.approx(4 * BIG, rel=0.1)
    assert "`views`" in str(growths["view"])
    hook.remove()


def test_of_every_pattern_something_is_said():
    assert set(PATTERNS) == set(get_args(PatternName))


@pytest.mark.parametrize("name", ["kept", "others"])
def test_a_finder_that_knows_more_of_a_container_is_heard_in_place_of_the_usual_one(
    name, monkeypatch
):
    kept, others = [0], [0]

    def find_closures(evidence):
        """Says of one of the lists what it is filled with."""
        named = blame.OBJECT_FINDERS[0].find(evidence)
        return [
            dataclasses.replace(growth, pattern="closures")
            for growth in named
            if growth.holder.path.endswith(name)
        ]

    row = blame.OBJECT_FINDERS[0]._replace(find=find_closures)
    # A row as a maintainer adds it.
    monkeypatch.setattr(blame, "OBJECT_FINDERS", (*blame.OBJECT_FINDERS, row))
    before = take_census(0)
    for _ in range(8):
        kept.append(torch.ones(BIG))
        others.append(torch.ones(BIG))

    growths = find_growth(before, 8, most=9)

    patterns = {growth.holder.path: growth.pattern for growth in growths}
    assert len(growths) == len(patterns) == 2
    for path, pattern in patterns.items():
        assert pattern == ("closures" if path.endswith(name) else "kept tensors")


@pytest.mark.parametrize(("numbers", "is_named"), [(1_000, True), (100, False)])
def test_what_grows_by_a_hundredth_of_the_heaviest_is_noise(numbers, is_named):
    heavy, light = [0], [0]
    before = take_census(0)
    for _ in range(8):
        heavy.append(torch.ones(BIG))
        light.append(np.ones(numbers))

    named = " ".join(map(str, find_growth(before, 8, most=9)))

    assert "`heavy`" in named
    assert ("`light`" in named) is is_named


GROWN = {
    "list": (list, lambda items, item, _: items.append(item)),
    "list, at its beginning": (list, lambda items, item, _: items.insert(0, item)),
    "deque": (deque, lambda items, item, _: items.append(item)),
    "deque, at its beginning": (deque, lambda items, item, _: items.appendleft(item)),
    "dict": (
        lambda items: dict(enumerate(items)),
        lambda items, item, key: items.update({f"new {key}": item}),
    ),
    "set": (set, lambda items, item, _: items.add(item)),
}
THERE_BEFORE = {
    "losses": lambda: [torch.ones(8, requires_grad=True).sum() for _ in range(60)],
    "texts": lambda: [f"text {number}" for number in range(60)],
    "numbers": lambda: list(range(60)),
    "other tensors": lambda: [torch.zeros(3) for _ in range(60)],
}
"""Items that are of another kind than those that come, or weigh otherwise."""


@pytest.mark.parametrize("kind", GROWN)
@pytest.mark.parametrize("there_before", THERE_BEFORE)
def test_what_was_there_before_says_nothing_of_what_came(kind, there_before):
    make, add = GROWN[kind]
    kept = types.SimpleNamespace(items=make(THERE_BEFORE[there_before]()))
    before = take_census(4)
    for number in range(8):
        add(kept.items, torch.zeros(BIG), number)

    growths = find_growth(before, 8, rate=2 * 4 * BIG)

    [growth] = [growth for growth in growths if "`kept.items`" in str(growth)]
    assert growth.pattern == "kept tensors"
    assert growth.items == f"Tensor [{BIG}] float32"
    assert growth.bytes_per_epoch == pytest.approx(2 * 4 * BIG, rel=0.05)


REPLACED = {
    "list": (list, lambda items, item, _: [*items, item]),
    "dict": (dict, lambda items, item, key: {**items, key: item}),
    "copied dict": (dict, lambda items, item, key: dict([*items.items(), (key, item)])),
}
ITEMS = {
    "array": lambda: np.ones(BIG),
    "text": lambda: "x" * np.random.randint(8 * BIG, 8 * BIG + 9),
    "tuple": lambda: (1, np.ones(BIG)),
    "dict": lambda: {"loss": 0.5, "x": np.ones(BIG)},
}


@pytest.mark.parametrize("kind", REPLACED)
@pytest.mark.parametrize("item", ITEMS)
def test_a_container_that_a_longer_one_replaces_is_named(kind, item):
    make, longer = REPLACED[kind]
    kept = types.SimpleNamespace(history=make())
    for epoch in range(8):
        # The old one lives until then, so that no new one gets its number.
        old, kept.history = kept.history, longer(kept.history, ITEMS[item](), epoch)
        if epoch == 3:
            before = take_census(4)
    del old

    named = " ".join(map(str, find_growth(before, 8, rate=8 * BIG)))

    assert "`kept.history`" in named


@pytest.mark.parametrize("share", [0.1, 0.5, 2.0, 8.0])
def test_a_container_of_the_epoch_that_weighs_something_else_is_not_named(share):
    kept = types.SimpleNamespace(predictions=[])
    before = take_census(4)
    kept.predictions = [np.ones(BIG) for _ in range(8)]

    named = " ".join(map(str, find_growth(before, 8, rate=8 * BIG / share)))

    assert "predictions" not in named


class Pair(NamedTuple):
    rest: object
    item: object


class Counted(NamedTuple):
    items: tuple
    count: int


@dataclasses.dataclass(frozen=True)
class State:
    items: tuple = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    item: object
    rest: object


REBUILT = {
    "tuple": ((), lambda old, item: (*old, item)),
    "tuple in a tuple": (((), 0), lambda old, item: ((*old[0], item), old[1] + 1)),
    "pairs": (None, lambda old, item: (old, item)),
    "cells": (None, lambda old, item: (item, old)),
    "triples": (None, lambda old, item: (old, item, 1)),
    "named tuple": (
        Counted((), 0),
        lambda old, item: old._replace(items=(*old[0], item)),
    ),
    "named pairs": (None, Pair),
    "frozen record": (State(), lambda old, item: State((*old.items, item))),
    "frozen links": (None, lambda old, item: Cell(item, old)),
    "nested lists": ([], lambda old, item: [old, item]),
    "nested dicts": ({}, lambda old, item: {"rest": old, "item": item}),
}
HOLDERS = ("kept.history", "table['history']")


def rebuild(shape, item, holder, *, is_bounded=False, is_collected=False):
    """Make a value longer for eight epochs; find what has grown since the fourth."""
    empty, longer = REBUILT[shape]
    kept, table = types.SimpleNamespace(history=empty), {"history": empty}
    for epoch in range(8):
        value = table["history"] if holder.startswith("table") else kept.history
        if is_bounded and epoch % 2 == 0:
            value = empty
        # The old one lives until then, so that no new one gets its number.
        old, value = value, longer(value, ITEMS[item]())
        if holder.startswith("table"):
            table["history"] = value
        else:
            kept.history = value
        if epoch == 3:
            before = take_census(4)
    del old, value
    if is_collected:
        gc.collect()
    return find_growth(before, 8, rate=8 * BIG)


@pytest.mark.many_cases(quick=11)
@pytest.mark.parametrize("shape", REBUILT)
@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_value_that_is_rebuilt_longer_is_named(holder, item, shape):
    growths = rebuild(shape, item, holder)

    paths = [growth.holder.path for growth in growths if growth.holder is not None]
    assert len(paths) == 1
    assert paths[0].startswith(holder)
    assert growths[0].bytes_per_epoch == 8 * BIG


@pytest.mark.parametrize("shape", ["tuple", "pairs", "named tuple"])
@pytest.mark.parametrize("item", ITEMS)
def test_it_is_named_where_the_collector_lists_its_table_no_more(item, shape):
    # After a whole collection a dict of tuples of texts is in no list of Python's.
    growths = rebuild(shape, item, "table['history']", is_collected=True)

    [growth] = growths
    assert growth.holder.path.startswith("table['history']")
    assert growth.bytes_per_epoch == 8 * BIG


@pytest.mark.parametrize("shape", ["tuple", "pairs", "frozen links"])
def test_a_value_that_is_made_anew_is_not_named(shape):
    growths = rebuild(shape, "array", "kept.history", is_bounded=True)

    assert [growth for growth in growths if growth.holder is not None] == []


@pytest.mark.slow
def test_a_constant_of_tensors_that_weighs_what_grew_is_not_named():
    constants = types.SimpleNamespace(table=tuple(torch.ones(BIG) for _ in range(16)))
    before = take_census(4)

    growths = find_growth(before, 8, rate=8 * BIG)

    assert [growth for growth in growths if growth.holder is not None] == []
    assert len(constants.table) == 16


def test_the_few_new_ones_of_many_tuples_are_not_asked_who_holds_them_all():
    bystanders = [(number, []) for number in range(3_000)]
    kept = types.SimpleNamespace(history=None)
    for epoch in range(8):
        for _ in range(5):
            kept.history = (kept.history, np.ones(BIG))
        if epoch == 3:
            before = take_census(4)

    growths = find_growth(before, 8, rate=5 * 8 * BIG)

    paths = [growth.holder.path for growth in growths if growth.holder is not None]
    assert [path.split("[")[0] for path in paths] == ["kept.history"]
    assert len(bystanders) == 3_000


@pytest.mark.parametrize("epochs_since", range(3))
def test_a_census_of_the_epoch_in_which_a_run_ends_is_no_obstacle(epochs_since):
    joined = np.ones(BIG)
    before = take_census(4)
    for _ in range(4):
        joined = np.concatenate([joined, np.ones(BIG)])
    at_the_end = take_census(8)

    growths = find_growth(
        before, 8 + epochs_since, rate=BIG * 8, other_censuses=[at_the_end]
    )

    named = " ".join(map(str, growths))
    assert ("`joined`" in named) == (epochs_since == 0)


KIB = 1024


def named_as_longer(size, sizes_in_censuses):
    """Ask of an array of a size whether it is what 16 KiB an epoch went into."""
    array_now = np.zeros(size, np.uint8)
    censuses = [
        Census(epoch, NO_IDS, NO_IDS, Counter(), sizes=frozenset(sizes))
        for epoch, sizes in zip((16, 8), sizes_in_censuses, strict=True)
    ]
    evidence = HeapEvidence(
        heap=Heap([], [], [array_now], []),
        before=censuses[0],
        epochs=14,
        ignored_ids=frozenset(),
        bytes_per_epoch=16 * KIB,
        other_censuses=(censuses[1],),
    )
    return bool(find_growing_array(evidence))


def test_a_batch_of_another_size_is_no_array_that_gets_longer():
    draw = np.random.default_rng(0)
    batch_sizes = draw.integers(100 * KIB, 4_000 * KIB, (400, 9)).tolist()

    alarms = sum(
        named_as_longer(sizes[0], (sizes[1:5], sizes[5:])) for sizes in batch_sizes
    )

    assert alarms <= 0.03 * len(batch_sizes)
    # Its twins: an array from nothing, and one that was large when the run began.
    assert named_as_longer(480 * KIB, ([256 * KIB], [128 * KIB]))
    assert named_as_longer(2_480 * KIB, ([2_256 * KIB], [2_128 * KIB]))


def joined_dataset():
    """A dataset that each epoch is joined to what came before."""
    state = {"dataset": torch.utils.data.TensorDataset(torch.ones(4, 8))}

    def grow():
        new = torch.utils.data.TensorDataset(torch.ones(333, 8))
        state["dataset"] = torch.utils.data.ConcatDataset([state["dataset"], new])

    return grow, "state['dataset'].datasets[1].tensors[0]"


def sparse_matrices():
    retained = [0]
    return lambda: retained.append(torch.ones(40, 40).to_sparse()), "retained"


def numbers_in_an_array():
    numbers = array("d", [0.0])
    return lambda: numbers.extend([1.0] * 2_000), "numbers"


def rows_of_a_table():
    pandas = pytest.importorskip("pandas")
    state = {"table": pandas.DataFrame({"a": [0.0], "b": [0.0]})}

    def grow():
        more = pandas.DataFrame({"a": np.ones(2_000), "b": np.ones(2_000)})
        state["table"] = pandas.concat([state["table"], more])

    return grow, "state['table']"


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [joined_dataset, sparse_matrices, numbers_in_an_array, rows_of_a_table]
)
def test_the_variable_is_named(make):
    grow, name = make()
    grow()
    gc.collect()  # garbage of other tests would go meanwhile, and the rate with it
    before, used = take_census(0), malloc_heap().used_bytes
    for _ in range(30):
        grow()
    rate = (malloc_heap().used_bytes - used) / 30

    main, *_ = find_growth(before, 30, rate=rate)

    assert main.holder.path.startswith(name)
    assert main.bytes_per_epoch == pytest.approx(rate, rel=0.6)


def test_tensors_that_were_there_before_are_not_asked_who_holds_new_ones():
    # the first, the middle and the last of all that look alike would mostly be old ones
    old = [torch.zeros(4099) for _ in range(200)]
    head = [None]
    before = take_census(0)

    for _ in range(40):
        head[0] = (torch.zeros(4099), head[0])

    main, *_ = find_growth(before, 40, rate=4 * 4099)
    assert len(old) == 200
    assert main.holder.path.startswith("head")


def test_what_the_detector_remembers_of_its_statistics_is_nobodys_leak():
    retained = [0.0]
    before = take_census(0)

    for number in range(1, 41):
        quantile(number, 1e-5 / number)
        retained.append(float(number))

    assert quantile.cache_info().currsize >= 40
    growths = find_growth(before, 40)
    assert any(growth.holder.path == "retained" for growth in growths)
    assert not any("quantile" in growth.holder.path for growth in growths)


@pytest.mark.parametrize("name", ["files", "threads", "children", "mappings"])
def test_a_resource_is_named_by_its_most_frequent_kind(name):
    growth = resource_growth(name, 3.0, Counter())

    assert growth.per_epoch == 3.0
    assert growth.items
    assert "3 more" in str(growth)


def test_sockets_are_told_from_files():
    import socket

    before = kinds_of("files")
    pairs = [socket.socketpair() for _ in range(3)]

    assert resource_growth("files", 6.0, before).pattern == "sockets"
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_process_that_is_no_worker_is_told_by_its_command():
    assert describe_worker(2**30) == "gone"


def test_items_weigh_what_each_alone_keeps():
    shared = np.ones(BIG)
    items = [[np.ones(100)[:3], shared] for _ in range(3)]

    assert 800 < retained_bytes(items) < 1400
    assert retained_bytes([]) == 0
    assert retained_bytes([mmap.mmap(-1, 8192)]) >= 8192


LOAD_BYTES = 4096


class Node:
    """A row with a load of its own, and whatever it refers to."""

    def __init__(self):
        self.load, self.others = bytes(LOAD_BYTES), []


def leave_apart(_nodes):
    pass


def join_to_the_next(nodes):
    for before, after in itertools.pairwise(nodes):
        before.others.append(after)


def join_to_both_sides(nodes):
    for before, after in itertools.pairwise(nodes):
        before.others.append(after)
        after.others.append(before)


def join_in_a_ring(nodes):
    join_to_the_next(nodes)
    nodes[-1].others.append(nodes[0])


def join_all_to_all(nodes):
    for node in nodes:
        node.others = nodes


def join_below_a_parent(nodes):
    parent = Node()
    parent.others = nodes
    for node in nodes:
        node.others = [parent]


TIES = [
    leave_apart,
    join_to_the_next,
    join_to_both_sides,
    join_in_a_ring,
    join_all_to_all,
    join_below_a_parent,
]
CONTAINERS = [
    list,
    dict,
    set,
    deque,
    type("Rows", (list,), {"__slots__": ()}),
    type("Table", (dict,), {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tie", "make"),
    [(tie, list) for tie in TIES]
    + [(join_to_both_sides, make) for make in CONTAINERS[1:]],
    ids=lambda part: part.__name__,
)
def test_an_item_weighs_the_same_whatever_the_items_refer_to(tie, make):
    nodes = [Node() for _ in range(301)]
    kept = make() if issubclass(make, dict) else make(nodes[:1])
    if issubclass(make, dict):
        kept[0] = nodes[0]
    later = nodes[1:]
    del nodes[1:]
    before = take_census(0)
    for number, node in enumerate(later, start=1):
        if issubclass(make, dict):
            kept[number] = node
        elif issubclass(make, set):
            kept.add(node)
        else:
            kept.append(node)
    tie([*nodes, *later])
    del nodes, later, node

    main, *_ = find_growth(before, 30)

    assert "`kept" in str(main)
    assert main.per_epoch == 10
    # The node, its dict and its list weigh some hundred bytes.
    assert 10 * LOAD_BYTES < main.bytes_per_epoch < 10 * (LOAD_BYTES + 800)


@pytest.mark.slow
def test_finalizers_of_what_is_kept_are_named_only_where_they_keep_more():
    kept = [Node()]
    gc.unfreeze()  # the registry is there since Python began

    def keep(finalizer_bytes):
        before = take_census(0)
        for _ in range(80):
            node = Node()
            weakref.finalize(node, len, bytes(finalizer_bytes))
            kept.append(node)
        rate = 10.0 * (LOAD_BYTES + finalizer_bytes)
        return [str(growth) for growth in find_growth(before, 8, rate=rate)]

    (only_cause,) = keep(finalizer_bytes=10)
    heaviest, *_ = keep(finalizer_bytes=10 * LOAD_BYTES)

    assert "`kept`" in only_cause
    assert "finalize._registry" in heaviest
    kept.clear()


def test_small_objects_bound_what_is_said_of_them():
    before = take_census(0)
    kept = [Node() for _ in range(80)]
    more = [kept[0], kept]

    bounded = find_growth(before, 8, most_bytes_per_epoch=1000.0)

    assert all(growth.bytes_per_epoch <= 1000 for growth in bounded)
    assert more


@pytest.mark.parametrize("rows", [8, 64, 512])
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh data", "same data"])
def test_a_loss_weighs_the_data_that_only_its_graph_keeps(rows, is_fresh):
    model = torch.nn.Linear(64, 1)
    data = torch.randn(rows, 64)
    losses = [model(data).sum()]
    before = take_census(0)
    for _ in range(80):
        batch = torch.randn(rows, 64) if is_fresh else data
        losses.append(model(batch).sum())
    del batch
    data_bytes = 10 * 4 * 64 * rows if is_fresh else 0

    main, *_ = find_growth(before, 8, rate=data_bytes + 10_000.0)

    assert "`losses`" in str(main)
    assert main.pattern == "graph"
    assert data_bytes < main.bytes_per_epoch < data_bytes + 10_001


@dataclasses.dataclass
class Statistics:
    """A record of a user's, of the same form as a census."""

    epoch: int
    ids: np.ndarray
    lengths: np.ndarray
    kinds: Counter
    tensor_ids: np.ndarray


def named_for_a_record(make, hold):
    """Ask what grew where a record of five epochs weighs just that much."""
    before = take_census(4)
    keeper = hold(
        make(
            epoch=8,
            ids=np.ones(2 * BIG),
            lengths=np.ones(2 * BIG),
            kinds=Counter("ab"),
            tensor_ids=np.ones(2 * BIG),
        )
    )

    named = find_growth(before, 8, rate=3 * 8 * 2 * BIG / 8)

    assert keeper is not None
    return [str(growth) for growth in named if growth.holder is not None]


def held_by_a_finalizer(record):
    keeper = Node()
    weakref.finalize(keeper, print, record)
    return keeper


HOLD = {
    "a variable": lambda record: record,
    "a list": lambda record: [record],
    "a closure": lambda record: lambda: record,
    "a finalizer": held_by_a_finalizer,
}


# A process that has run other tests has other values of the same weight, and looks for
# the holders of all of them: a minute of CPU.
@pytest.mark.slow
@pytest.mark.parametrize("held_by", HOLD)
@in_fresh_process
def test_what_a_detector_keeps_is_never_blamed_however_it_is_held(held_by):
    if held_by != "a finalizer":  # their registry is there since Python began
        # What importing torch and PyG made holds none of the others: without it a
        # search takes a sixth of the time.
        gc.freeze()

    of_detector = named_for_a_record(Census, HOLD[held_by])
    of_user = named_for_a_record(Statistics, HOLD[held_by])

    assert of_detector == []
    assert of_user != []


@pytest.mark.slow
def test_all_that_a_run_keeps_is_known_as_its_own_and_nothing_of_the_users():
    rows = [[np.ones(BIG)] for _ in range(10)]
    detector = LeakDetector("cpu", on_leak=lambda _: None)
    detector.run(lambda: rows.append([np.ones(BIG)]), epochs=8)
    (recorder,) = [item for item in gc.get_objects() if type(item) is EpochRecorder]
    kept = [*vars(recorder).values(), *recorder.censuses]
    for census in recorder.censuses:
        kept += vars(census).values()

    own_ids = ids_of_own_objects(gc.get_objects())

    mutable = (list, dict, set, Counter, np.ndarray, Census)
    assert {id(item) for item in kept if type(item) in mutable} <= own_ids
    assert own_ids.isdisjoint([id(rows), *map(id, rows)])


def test_what_a_search_leaves_behind_makes_nothing_of_the_users_a_detectors_own():
    """Python 3.13 frees it later: a second search began while it was there."""
    rows = [[np.ones(BIG)] for _ in range(80)]
    heap = look_at_heap()
    evidence = HeapEvidence(heap, take_census(0), 8, ignored_ids=frozenset())

    own_ids = ids_of_own_objects(gc.get_objects())

    assert own_ids.isdisjoint([id(rows), *map(id, rows)])
    assert id(evidence.before) in own_ids


def _chain_of(nodes: int) -> torch.Tensor:
    """Sum up: a scalar whose autograd graph has some more nodes than that."""
    total = torch.zeros((), requires_grad=True)
    for _ in range(nodes):
        total = total + 1.0
    return total


# What a test, a notebook or an earlier training left behind, all of it still kept.
GRAPHS_OF_BEFORE = {
    "nothing": list,
    "a sum": lambda: [_chain_of(900)],
    "a sum behind many losses": lambda: [*map(_chain_of, [3] * 30), _chain_of(900)],
    "a sum as long as is counted": lambda: [_chain_of(21_000)],
    "states of a recurrent net": lambda: [
        torch.ones(8) * _chain_of(40 * step) for step in range(1, 9)
    ],
}


@pytest.mark.parametrize("graphs", GRAPHS_OF_BEFORE)
def test_graphs_that_were_kept_before_the_run_are_not_blamed(graphs):
    kept = GRAPHS_OF_BEFORE[graphs]()
    leaked = []
    censuses = []
    for epoch in range(9):
        leaked.append(bytearray(BIG))
        if epoch in (2, 4):
            censuses.append(take_census(epoch))

    growths = find_growth(censuses[0], 8, rate=BIG, most=9, other_censuses=censuses[1:])

    assert "graph chain" not in {growth.pattern for growth in growths}
    assert "`leaked`" in str(growths[0])
    assert len(kept) == len(GRAPHS_OF_BEFORE[graphs]())


@pytest.mark.parametrize("graphs", ["nothing", "a sum", "a sum behind many losses"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_sum_that_grows_is_found_beside_graphs_of_before(graphs, in_place):
    kept = GRAPHS_OF_BEFORE[graphs]()
    total = torch.zeros((), requires_grad=True) * 1.0
    censuses = []
    for epoch in range(9):
        for _ in range(10):
            if in_place:
                total += torch.ones(()) * 2.0
            else:
                total = total + torch.ones(()) * 2.0
        if epoch in (2, 4):
            censuses.append(take_census(epoch))

    growths = find_growth(censuses[0], 8, most=9, other_censuses=censuses[1:])

    [chain] = [growth for growth in growths if growth.pattern == "graph chain"]
    assert chain.per_epoch == 10
    assert chain.holder is not None
    assert chain.holder.path == "total"
    assert kept is not None


@pytest.mark.parametrize("deep", [1, 4, 30])
@pytest.mark.parametrize("graphs", GRAPHS_OF_BEFORE)
def test_losses_that_are_kept_are_no_sum_that_grows(graphs, deep):
    kept = GRAPHS_OF_BEFORE[graphs]()
    losses = [_chain_of(deep) for _ in range(5)]
    before = take_census(2)
    losses += [_chain_of(deep) for _ in range(10)]

    evidence = HeapEvidence(look_at_heap(), before, epochs=2, ignored_ids=frozenset())

    assert find_autograd_chain(evidence) == []
    assert (len(losses), kept) == (15, kept)


class Link:
    """One of a chain, or something else of the same class."""

    def __init__(self, behind=None):
        self.behind = behind
        self.content = bytearray(BIG)


KEPT_BEFORE = {
    "none": lambda: None,
    "one": Link,
    "some in a list": lambda: [Link() for _ in range(5)],
    "a short chain": lambda: Link(Link(Link())),
}
HOW_A_CHAIN_GROWS = {
    "links": lambda head, _step: Link(head),
    "pairs": lambda head, _step: (head, Link()),
}


@pytest.mark.parametrize("before", KEPT_BEFORE)
@pytest.mark.parametrize("how", HOW_A_CHAIN_GROWS)
def test_a_chain_is_not_blamed_on_what_was_there_before(before, how):
    older = KEPT_BEFORE[before]()
    place = {"head": None}
    censuses = []
    for epoch in range(40):
        for step in range(8):
            place["head"] = HOW_A_CHAIN_GROWS[how](place["head"], step)
        if epoch in (2, 4):
            censuses.append(take_census(epoch))

    growths = find_growth(
        censuses[0], 38, rate=8 * BIG, most=9, other_censuses=censuses[1:]
    )

    paths = [growth.holder.path for growth in growths if growth.holder is not None]
    assert growths
    assert [path for path in paths if "older" in path] == []
    del older
    while place["head"] is not None:  # Python frees a long chain by recursion
        head = place["head"]
        place["head"] = head[0] if isinstance(head, tuple) else head.behind
