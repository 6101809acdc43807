"""Who keeps an object is named by its variable, with the line that grows it."""

import dataclasses
import gc
import importlib
import random
import re
import sys
import threading
from typing import ClassVar

import pytest
import torch

from loaderkit import holders_of
from loaderkit.memory.frames import local_ids, naming_arguments, running_locals
from loaderkit.memory.source import mutation_line

GLOBAL = {}
HERE = "test_holders.py"


class Owner:
    shared: ClassVar[list] = []

    def __init__(self):
        self.cache = {}


def kinds_and_paths(target):
    return {(holder.kind, holder.path) for holder in holders_of(target)}


@pytest.mark.slow
def test_a_local_variable_is_named_with_its_line():
    target = torch.zeros(1)

    (holder,) = holders_of(target)

    assert holder.kind == "local variable"
    assert holder.path == "target"
    assert HERE in holder.where


@pytest.mark.slow
def test_a_way_through_containers_and_attributes():
    owner = Owner()
    owner.cache["batch"] = [None, torch.zeros(1)]

    (holder,) = holders_of(owner.cache["batch"][1])

    assert holder.path == "owner.cache['batch'][1]"
    assert holder.line.startswith(HERE)


@pytest.mark.slow
def test_a_global_and_a_class_attribute():
    target = torch.zeros(1)
    GLOBAL["retained"] = target
    Owner.shared.append(target)

    holder_kinds = kinds_and_paths(target)

    paths_of_globals = [path for kind, path in holder_kinds if kind == "global"]
    assert any(path.endswith("GLOBAL['retained']") for path in paths_of_globals)
    assert ("class", "Owner.shared[0]") in holder_kinds
    GLOBAL.clear()
    Owner.shared.clear()


class Slotted:
    __slots__ = ("cache", "history")


class SlotOfOneName:
    __slots__ = "cache"


class BelowSlotted(Slotted):
    __slots__ = ("extra",)


class BelowWithDictionary(Slotted):
    pass


class PrivateSlot:
    __slots__ = ("__cache",)

    def __init__(self):
        self.__cache = []

    def retain(self, value):
        self.__cache.append(value)


@dataclasses.dataclass(slots=True)
class SlottedRecord:
    cache: list = dataclasses.field(default_factory=list)


class OfItsClass:
    cache: ClassVar[list] = []


class BelowOfItsClass(OfItsClass):
    pass


def _keep_in(owner, target):
    if isinstance(owner, PrivateSlot):
        owner.retain(target)
    elif isinstance(owner, type):
        owner.cache.append(target)
    else:
        owner.cache = [target]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_owner", "outside"),
    [
        (Slotted, "in a list"),
        (SlotOfOneName, "local"),
        (BelowSlotted, "in a dict"),
        (BelowWithDictionary, "in a slot"),
        (PrivateSlot, "in a slot"),
        (SlottedRecord, "local"),
        (lambda: OfItsClass, "in a list"),
        (lambda: BelowOfItsClass, "in a dict"),
    ],
)
def test_the_path_through_slots_and_class_attributes_leads_to_the_object(
    make_owner, outside
):
    target, owner = torch.zeros(1), make_owner()
    _keep_in(owner, target)
    outer = {
        "local": lambda: owner,
        "in a list": lambda: [None, owner],
        "in a dict": lambda: {"owner": owner},
        "in a slot": lambda: _with_history(owner),
    }[outside]()

    paths = [holder.path for holder in holders_of(target) if holder.path != "target"]

    # As Python reads a path: it is the object, and no description of the way.
    names = {"owner": owner, "outer": outer, **globals()}
    found = [eval(path, names) for path in paths]
    assert any(value is target for value in found)
    if isinstance(owner, type):
        OfItsClass.cache.clear()


def _with_history(owner):
    outer = Slotted()
    outer.history = owner
    return outer


@pytest.mark.slow
def test_a_closure_is_named_by_its_variable():
    def make_step():
        retained = []

        def step():
            retained.append(1)

        return step, retained

    step, retained = make_step()

    assert ("closure", "retained") in kinds_and_paths(retained)
    assert step


@pytest.mark.slow
def test_the_traceback_of_an_error_that_was_kept():
    def work():
        big = torch.zeros(3)
        raise ValueError(big.shape)

    errors = []
    try:
        work()
    except ValueError as error:
        errors.append(error)
    frame = errors[0].__traceback__.tb_next.tb_frame

    (holder,) = holders_of(frame.f_locals["big"])

    assert holder.kind == "traceback"
    assert holder.path == "big"
    assert "in work" in holder.where


@pytest.mark.slow
def test_a_cycle_that_nothing_else_holds():
    class Node:
        pass

    node = Node()
    node.me, node.load = node, torch.zeros(1)
    number = id(node.load)
    del node

    # In no variable of this test: that would hold it, too.
    holders = holders_of(object_with(number))

    assert [holder.kind for holder in holders] == ["cycle"]


def object_with(number):
    return next(value for value in gc.get_objects() if id(value) == number)


@pytest.mark.slow
def test_a_variable_of_another_threads_function_is_named():
    ready, stop = threading.Event(), threading.Event()
    targets = []

    def work():
        mine = torch.zeros(1)
        targets.append(mine)
        ready.set()
        stop.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()

    assert ("local variable", "mine") in kinds_and_paths(targets[0])

    stop.set()
    thread.join()


@pytest.mark.slow
def test_looking_leaves_nothing_behind():
    import weakref

    def look():
        target = torch.zeros(1)
        holders_of(target)
        return weakref.ref(target)

    gc.collect()
    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_local_variables_are_read_without_being_kept():
    def work():
        target = torch.zeros(1)
        frame = sys._getframe()
        is_running = any(value is target for value in running_locals())
        number = local_ids(frame)["target"]
        # Before Python 3.13 f_locals is a copy that the frame keeps.
        del target
        return is_running, number in map(id, gc.get_objects())

    is_running, is_kept = work()

    assert is_running
    assert not is_kept


def test_all_lines_that_grow_a_name_are_named(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("a = []\na.append(1)\nb = 2\nself.c['x'] += 1\na.append(2)\n")

    assert mutation_line(str(file), "a") == "train.py:2 or train.py:5"
    assert mutation_line(str(file), "b") == "train.py:3"
    assert mutation_line(str(file), ".c") == "train.py:4"
    assert mutation_line(str(file), "d") == ""


ATTRIBUTES = """
class Registry:
    items = []

    def add(self, item):
        pass

class Trainer:
    def __init__(self):
        self.history, self.table = [], {}

trainer = Trainer()

def train(item):
    Registry.items.append(item)
    trainer.history.append(item)
    trainer.table[len(trainer.table)] = item
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("find", "path", "line"),
    [
        (lambda module: module.Registry.items, "Registry.items", 15),
        (lambda module: module.trainer.history, "trainer.history", 16),
        (lambda module: module.trainer.table, "trainer.table", 17),
    ],
)
def test_an_attribute_that_grows_outside_of_its_class_has_its_line(
    find, path, line, tmp_path, monkeypatch
):
    (tmp_path / "grown_outside.py").write_text(ATTRIBUTES)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("grown_outside")
    try:
        [holder, *_] = holders_of(find(module))
    finally:
        del sys.modules["grown_outside"]

    assert holder.path.endswith(path)
    assert holder.line == f"grown_outside.py:{line}"


GROWING_CLASSES = """
import collections
class Kept({base}):
    def keep(self, key, value):
        {growth}
    def look(self, key):
        found = self.__class__
        return found
def run():
    memo = Kept()
    memo.keep(1, 2)
    return lambda: memo
class Trainer:
    def __init__(self):
        self.memo = Kept()
MEMO = Kept()
trainer = Trainer()
inner = run()
"""
WAYS_TO_GROW = [
    ("dict", "self[key] = value"),
    ("dict", "self.setdefault(key, value)"),
    ("dict", "super().__setitem__(key, value)"),
    ("dict", "dict.__setitem__(self, key, value)"),
    ("dict", "self.update({key: value})"),
    ("list", "self.append(value)"),
    ("list", "super().append(value)"),
    ("list", "list.append(self, value)"),
    ("list", "self += [value]"),
    ("set", "self.add(value)"),
    ("collections.deque", "self.appendleft(value)"),
    ("collections.OrderedDict", "self[key] = value"),
    ("collections.UserDict", "self[key] = value"),
    ("collections.UserDict", "self.data[key] = value"),
    ("collections.UserList", "self.append(value)"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("base", "growth"), WAYS_TO_GROW)
def test_a_container_that_its_own_class_fills_has_the_line_of_the_class(
    base, growth, tmp_path, monkeypatch
):
    source = GROWING_CLASSES.format(base=base, growth=growth)
    (tmp_path / "filled_by_class.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("filled_by_class")
    # Not in variables of this function, which would be their nearest holders.
    finds = (lambda: module.MEMO, lambda: module.trainer.memo, lambda: module.inner())
    attribute = "data" if "User" in base else None
    try:
        holders = [
            holders_of(getattr(find(), attribute) if attribute else find(), most=1)[0]
            for find in finds
        ]
    finally:
        del sys.modules["filled_by_class"]

    assert [holder.line for holder in holders] == ["filled_by_class.py:5"] * 3


def test_a_local_variable_grows_in_its_own_function_and_not_in_one_beside_it(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "def first():\n    retained = []\n    return lambda: retained.append(1)\n"
        "@wrapped\ndef second():\n    retained = table()\n"
        "    return lambda: retained[new()]\n"
        "def third():\n    return lambda: retained\n"
    )

    lines = [
        mutation_line(str(file), "retained", near=near, is_local=True)
        for near in (3, 4, 7)
    ]

    assert lines == ["train.py:3", "train.py:6", "train.py:6"]
    assert mutation_line(str(file), "retained", near=9, is_local=True) == ""


def test_a_global_does_not_grow_where_a_function_has_its_own_of_the_same_name(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "rows = []\n"
        "def other():\n    rows = []\n    rows.append(1)\n"
        "def third(rows):\n    rows.append(1)\n"
        "def step():\n    rows.append(2)\n"
    )

    assert mutation_line(str(file), "rows") == "train.py:8"

    file = tmp_path / "with_global.py"
    file.write_text(
        "def step():\n    global rows\n    rows = rows or []\n    rows.append(2)\n"
    )

    assert mutation_line(str(file), "rows") == "with_global.py:4"


def test_an_attribute_grows_in_its_own_class_and_not_in_one_beside_it(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "class First:\n    def add(self):\n        self.rows.append(1)\n"
        "class Second:\n    def add(self):\n        self.rows.append(2)\n"
        "class Third:\n    rows = []\n"
        "heapq.heappush(best, 1)\n"
    )

    lines = [
        mutation_line(str(file), ".rows", class_name=name)
        for name in ("First", "Second", "Third")
    ]

    assert lines == ["train.py:3", "train.py:6", ""]
    assert mutation_line(str(file), "best") == "train.py:9"


@pytest.mark.parametrize("seed", range(12))
def test_no_line_is_named_alone_that_adds_less_than_another(tmp_path, seed):
    """Several places append to one list, at different rates, one perhaps never."""
    rng = random.Random(seed)
    rates = [rng.choice([0, 1, 4, 50]) for _ in range(rng.randint(1, 5))]
    calls = "".join(
        f"def step_{number}(rows):\n    for _ in range({rate}):\n"
        f"        table.append(rows)\n"
        for number, rate in enumerate(rates)
    )
    file = tmp_path / "train.py"
    file.write_text(f"table = []\n{calls}")
    appending = [2 + 3 * number + 2 for number in range(len(rates))]
    heaviest = appending[rates.index(max(rates))]

    named = mutation_line(str(file), "table")

    numbers = [int(number) for number in re.findall(r"train\.py:(\d+)", named)]
    assert min(numbers) <= heaviest <= max(numbers)
    assert len(numbers) == (len(rates) if len(rates) <= 3 else 2)


def test_a_file_that_is_no_python_has_no_lines(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("def (")

    assert mutation_line(str(file), "a") == ""


class Framework:
    """Keeps what tests are called with, as pytest's fixtures are kept."""

    def __init__(self, values):
        self.results = {name: (value, 0) for name, value in values.items()}


def judged(store, owner, pair):
    """Name what a test is called with; it does not run while memory is looked at."""
    store.append(owner)
    owner.cache["batch"] = 1
    pair[1].append(1)


ARGUMENT_PATHS = {
    "store[0]": lambda values: values["store"][0],
    "owner.cache": lambda values: values["owner"].cache,
    "owner.cache['batch']": lambda values: values["owner"].cache["batch"],
    "pair[1]": lambda values: values["pair"][1],
    "pair[1][0]": lambda values: values["pair"][1][0],
}


@pytest.mark.parametrize("path", ARGUMENT_PATHS)
@pytest.mark.parametrize("is_named", [True, False])
def test_what_a_function_is_called_with_has_the_functions_names(path, is_named):
    owner = Owner()
    owner.cache["batch"] = torch.zeros(1)
    framework = Framework(
        {"store": [[0]], "owner": owner, "pair": (0, [torch.zeros(1)])}
    )
    del owner
    kept = {name: value for name, (value, _) in framework.results.items()}
    target = ARGUMENT_PATHS[path](kept)
    if is_named:
        with naming_arguments(judged, {**kept, "number": 1, "module": sys}):
            del kept
            first = holders_of(target, most=20)
        named = [holder for holder in first if holder.kind == "fixture"]
        assert [holder.path for holder in named] == [path]
        assert all("in judged" in holder.where for holder in named)
    else:  # the twin: nothing of it stays behind
        del kept
        assert all(holder.kind != "fixture" for holder in holders_of(target, most=20))
    assert any("framework.results" in str(h) for h in holders_of(target, most=20))
