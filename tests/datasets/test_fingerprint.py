"""What makes a cache stale, and what does not."""

import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import json
import random
import re
import sqlite3
import subprocess
import sys
import threading
import types
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import pytest
import torch

import loaderkit
from loaderkit.datasets.fingerprint import (
    Fingerprint,
    differences,
    fingerprint_of,
    fingerprint_value,
)
from loaderkit.errors import DamagedCacheError


def imported_from(source, tmp_path, name="load"):
    """Define a function in a module of its own."""
    imported_from.count = getattr(imported_from, "count", 0) + 1
    # A file of its own: no stale bytecode.
    file = tmp_path / f"imported{imported_from.count}.py"
    file.write_text(source)
    spec = __import__("importlib.util").util.spec_from_file_location("imported", file)
    module = __import__("importlib.util").util.module_from_spec(spec)
    sys.modules["imported"] = module
    __import__("linecache").clearcache()
    spec.loader.exec_module(module)
    return getattr(module, name)


BASE = '''
SCALE = 2
LEVELS = (1, "a")
def helper(x):
    return x + 1
class Tool:
    size = 3
    def use(self): return 1
def load(key, *, more=1):
    """Load."""
    return helper(key) * SCALE, Tool().use(), LEVELS, [x for x in range(more)]
'''


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ('"""Load."""', '"""Load one."""', False),
        (
            "return helper(key) * SCALE",
            "return (helper(key)  *  SCALE  # twice\n    )",
            None,
        ),
        ("x + 1", "x + 2", True),
        ("SCALE = 2", "SCALE = 3", True),
        ('(1, "a")', '(1, "b")', True),
        ("size = 3", "size = 4", True),
        ("return 1", "return 2", True),
        ("more=1", "more=2", True),
        ("def helper", "UNUSED = 1\ndef helper", False),
    ],
)
def test_the_code_counts_and_its_looks_do_not(tmp_path, old, new, changed):
    before = fingerprint_of(imported_from(BASE, tmp_path), ["a"])

    if changed is None:
        old, new, changed = "helper(key) * SCALE", "( helper(key)*SCALE )", False
    after = fingerprint_of(imported_from(BASE.replace(old, new), tmp_path), ["a"])

    assert (before.load != after.load) is changed


METHOD = """
class Data:
    def load(self, key): return self.parse(key)
    def parse(self, key): return key * 2
    def other(self): return 0
"""


def test_a_method_that_load_calls_counts(tmp_path):
    def of(source):
        return fingerprint_of(imported_from(source, tmp_path, "Data")().load, [1]).load

    before = of(METHOD)

    assert of(METHOD.replace("key * 2", "key * 3")) != before
    assert of(METHOD.replace("return 0", "return 1")) == before


def test_a_value_that_a_closure_binds_counts():
    def maker(scale):
        return lambda key: key * scale

    assert fingerprint_of(maker(2), [1]).load != fingerprint_of(maker(3), [1]).load


def test_a_function_without_source_counts_by_its_bytecode():
    spaces = {}, {}
    exec("def load(key): return key + 1", spaces[0])
    exec("def load(key): return key + 2", spaces[1])

    prints = [fingerprint_of(space["load"], [1]).load for space in spaces]

    assert prints[0] != prints[1]


@pytest.mark.slow
def test_it_is_the_same_in_another_process():
    code = (
        "import json; from loaderkit.datasets.fingerprint import *; "
        "print(json.dumps(fingerprint_of(json.dumps, ['a', 1, 2]).to_json()))"
    )

    printed = subprocess.check_output([sys.executable, "-c", code], text=True)

    assert json.loads(printed) == fingerprint_of(json.dumps, ["a", 1, 2]).to_json()


def test_keys_count_in_their_order():
    prints = [
        fingerprint_of(len, keys).keys for keys in (["a", "b"], ["b", "a"], ["ab", ""])
    ]

    assert len(set(prints)) == 3
    assert fingerprint_of(len, [PurePosixPath("x/y")]) == fingerprint_of(len, ["x/y"])


def test_differences_are_told_in_words():
    packed = fingerprint_of(len, ["a"], version="1")
    now = fingerprint_of(len, ["b"], version="2")

    assert differences(packed, packed) == ()
    assert differences(packed, now) == (
        "version '2' now, '1' when packed",
        "as many keys as when packed, but others or in another order",
    )


@pytest.mark.parametrize(
    "content", [{}, {"load": 1, "keys": "", "count": 1, "version": ""}]
)
def test_a_fingerprint_that_was_changed_is_refused(content):
    with pytest.raises(DamagedCacheError, match="makes no sense"):
        Fingerprint.from_json(content)


DEEP = """
import math, tools
class Base:
    cutoff = 5.0
    def load(self, key): return 1
class Data(Base):
    def __init__(self): self.hops = 2
    @property
    def scale(self): return 3
    @staticmethod
    def twice(x): return 2 * x
    def load(self, key):
        first = super().load(key), self.scale, self.twice(key)
        return first, self.cutoff, tools.mend(key), self.hops
"""
TOOLS = """
def mend(x): return x + 7
def unused(x): return x
"""


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("return 1", "return 9", True),
        ("return 3", "return 9", True),
        ("2 * x", "9 * x", True),
        ("5.0", "9.0", True),
        ("hops = 2", "hops = 9", True),
        ("x + 7", "x + 9", True),
        ("return x\n", "return -x\n", False),
    ],
)
def test_everything_that_load_reaches_counts(tmp_path, monkeypatch, old, new, changed):
    def of(deep, tools):
        imported_from.count = getattr(imported_from, "count", 0) + 1
        folder = tmp_path / f"tools{imported_from.count}"
        folder.mkdir()
        (folder / "tools.py").write_text(tools)
        monkeypatch.syspath_prepend(str(folder))
        sys.modules.pop("tools", None)
        return fingerprint_of(imported_from(deep, tmp_path, "Data")().load, [1]).load

    before = of(DEEP, TOOLS)

    assert (of(DEEP.replace(old, new), TOOLS.replace(old, new)) != before) is changed


def test_a_number_and_its_name_are_two_keys():
    assert fingerprint_of(len, [1]).keys != fingerprint_of(len, ["1"]).keys


def test_a_newer_library_makes_no_cache_stale():
    read = pytest.Item.__init__

    assert fingerprint_of(read, [1]).load == fingerprint_of(len, [1]).load


class Settings(NamedTuple):
    rate: float
    names: tuple


@dataclasses.dataclass
class Options:
    sizes: list
    kind: str = "a"


class Mode(enum.Enum):
    FAST, EXACT = 1, 2


def scaled(value, by):
    return value * by


class Scaler:
    def __init__(self, mean):
        self.mean = mean


class Slotted:
    __slots__ = ("mean",)

    def __init__(self, mean):
        self.mean = mean


class OwnList(list):
    pass


class Locked:
    """Cannot be pickled, for its lock; copied as a user's ``__deepcopy__`` would."""

    def __init__(self, words):
        self.words = {word: at for at, word in enumerate(words)}
        self.lock = threading.Lock()

    def __deepcopy__(self, memo):
        return Locked(self.words)


class Drawing:
    """Holds a generator, whose state is another one in every process."""

    def __init__(self, values):
        self.values = values
        self.rng = np.random.default_rng()

    def __deepcopy__(self, memo):
        return Drawing(self.values)


def layer(weight):
    """A layer as a user trains one before its outputs are cached."""
    imported_from = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(imported_from.weight, weight)
    torch.nn.init.constant_(imported_from.bias, 0.0)
    return imported_from


def filled_lists(value):
    imported_from = collections.defaultdict(list)
    imported_from["a"].append(value)
    return imported_from


PAIRS = {
    "a unit": ("m/s", "km/h"),
    "a name with a slash": ("facebook/esm2", "facebook/esm1"),
    "a list": ([1, 2], [2, 1]),
    "a nested list": ([[1], ["a"]], [[1], ["b"]]),
    "a tuple": ((1, 2), (1, 3)),
    "a dict": ({"a": 1}, {"a": 2}),
    "a dict's keys": ({"a": 1}, {"b": 1}),
    "a set": ({1, 2}, {1, 3}),
    "bytes": (b"a", b"b"),
    "complex": (1j, 2j),
    "an enum": (Mode.FAST, Mode.EXACT),
    "a dtype": (torch.float32, torch.float64),
    "numpy's dtype": (np.dtype("f4"), np.dtype("f8")),
    "numpy's number": (np.float32(1), np.float32(2)),
    "an array": (np.arange(3), np.arange(3)[::-1]),
    "a tensor": (torch.zeros(2), torch.ones(2)),
    "a shape": (torch.zeros(2), torch.zeros(2, 1)),
    "bfloat16": (torch.zeros(2).bfloat16(), torch.ones(2).bfloat16()),
    "a dataclass": (Options([1]), Options([2])),
    "a named tuple": (Settings(1, ()), Settings(1, ("a",))),
    "a function": (lambda x: x, lambda x: x + 1),
    "a partial": (functools.partial(scaled, by=2), functools.partial(scaled, by=3)),
    "None inside": ([None], [1]),
    "a deque": (collections.deque([1]), collections.deque([2])),
    "an ordered dict": (collections.OrderedDict(a=1), collections.OrderedDict(a=2)),
    "a counter": (collections.Counter("aab"), collections.Counter("abb")),
    "a dict of lists": (filled_lists(1), filled_lists(2)),
    "a date": (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
    "a decimal": (decimal.Decimal("0.1"), decimal.Decimal("0.2")),
    "a pattern": (re.compile("a+"), re.compile("a*")),
    "a range": (range(3), range(4)),
    "a slice": (slice(3), slice(4)),
    "a relative path": (Path("raw/a"), Path("raw/b")),
    "which file": (Path("/data/a"), [Path("/data/b")]),
    "weights": (layer(1.0), layer(2.0)),
    "a setting of a layer": (torch.nn.Dropout(0.1), torch.nn.Dropout(0.2)),
    "an object": (Scaler(1), Scaler(2)),
    "an object in a list": ([Scaler([1])], [Scaler([2])]),
    "an object of slots": (Slotted(1), Slotted(2)),
    "a namespace": (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    "a list of one's own": (OwnList([1]), OwnList([2])),
    "an array of objects": (np.array([1, "a"], object), np.array([2, "a"], object)),
    "a table": (np.array([(1,)], [("a", "i4")]), np.array([(2,)], [("a", "i4")])),
    "a sparse tensor": (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse()),
    "another class": (Scaler(1), Slotted(1)),
    "an object beside a lock": (Locked("ab"), Locked("bc")),
    "an object beside a generator": (Drawing([1]), Drawing([2])),
}
"""Values that differ."""


class Reader:
    """Whose ``load`` names what it reads."""

    def __init__(self, value):
        self.setting = value

    def load(self, key):
        return self.setting, key


@pytest.mark.parametrize("kind", sorted(PAIRS))
def test_a_value_of_self_counts_by_its_content(kind):
    value, other = PAIRS[kind]

    packed, now, again = (
        fingerprint_of(Reader(attribute).load, [1])
        for attribute in (value, other, copy.deepcopy(value))
    )

    assert differences(packed, now) == ("load() has changed, or a value that it reads",)
    assert again == packed


HELPED = """
class Base:
    def scaled(self, x):
        return x * 2

class Helper(Base):
    def __init__(self):
        self.offset = 1

    def __call__(self, x):
        return self.scaled(x) + self.offset

class Reader:
    def __init__(self, inside):
        self.helper = inside(Helper())

    def load(self, key):
        return self.helper(key)
"""
INSIDE = {
    "itself": lambda reader: reader,
    "a list": lambda reader: [reader],
    "a dict": lambda reader: {"a": (reader,)},
    "an object": lambda reader: types.SimpleNamespace(a=reader),
}


@pytest.mark.parametrize("inside", sorted(INSIDE))
@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("x * 2", "x * 3", True),
        ("+ self.offset", "- self.offset", True),
        ("self.offset = 1", "self.offset = 2", True),
        ("x * 2", "x * 2  # why", False),
    ],
)
def test_the_code_of_an_object_on_self_counts(inside, old, new, counts, tmp_path):
    texts = (HELPED, HELPED.replace(old, new))
    packed, now = (
        fingerprint_of(
            imported_from(text, tmp_path, "Reader")(INSIDE[inside]).load, [1]
        )
        for text in texts
    )

    assert (packed != now) == counts


OPENED = [
    sqlite3.connect(":memory:"),
    threading.Lock(),
    random.Random(),
    (i for i in ()),
]


@pytest.mark.parametrize(
    "value",
    [
        "/data/raw",
        "C:\\data",
        None,
        Path("/data/raw"),
        *OPENED,
        [OPENED[1]],
        np.random.default_rng(),
        {"seed": OPENED[2]},
        torch.Generator(),
    ],
)
def test_where_data_lies_and_what_is_opened_later_do_not_count(value):
    packed, now = (
        fingerprint_of(Reader(attribute).load, [1]) for attribute in (value, None)
    )

    assert packed == now


def noisy(by):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*arguments):
            return function(*arguments), by

        return wrapper

    return decorate


def decorated(by):
    class Decorated:
        @noisy(by)
        def load(self, key):
            return key

    return Decorated().load


def computed(by):
    class Computed:
        step = (1, by)

        @functools.cached_property
        def factor(self):
            return by

        def load(self, key):
            return key * self.factor, self.step

    return Computed().load


@pytest.mark.parametrize("make", [decorated, computed])
def test_decorators_and_what_is_computed_once_count(make):
    packed, now, again = (fingerprint_of(make(by), [1]) for by in (1, 2, 1))

    assert packed != now
    assert packed == again


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "project"])
def test_a_library_of_another_environment_is_no_code_of_the_users(tmp_path, folder):
    # An environment made with --system-site-packages has its libraries elsewhere.
    (tmp_path / folder).mkdir()

    def fingerprint(number):
        library = imported_from(
            f"def helper(): return {number}", tmp_path / folder, "helper"
        )
        sys.modules["their_library"] = sys.modules.pop("imported")
        library.__module__ = "their_library"
        load = imported_from("def load(key): return helper()", tmp_path)
        load.__globals__["helper"] = library
        return fingerprint_of(load, ())

    changed = fingerprint(1) != fingerprint(2)

    assert changed == (folder == "project")


LAYOUTS = {
    "one line": "first = lambda s: {a}; second = lambda s: {b}",
    "arguments of one call": "def pair(*functions): return functions\n"
    "first, second = pair(lambda s: {a}, lambda s: {b})",
    "one inside the other": "second = (lambda: lambda s: {b})()\nfirst = lambda s: {a}",
    "a list": "first, second = [lambda s: {a}, lambda s: {b}]",
    "items of a dict, a line each": "both = {{\n    0: lambda s: {a},\n"
    "    1: lambda s: {b},\n}}\nfirst, second = both.values()",
    "a bracket that joins lines": "def one(function): return function\n"
    "first = one(\n    lambda s: {a}\n    or s\n)\n"
    "second = one(\n    lambda s: {b}\n    or s\n)",
    "the difference on a later line": "def one(function): return function\n"
    "first = one(\n    lambda s: s\n    or {a}\n)\n"
    "second = one(\n    lambda s: s\n    or {b}\n)",
    "a text that goes on": "def one(function): return function\n"
    "first = one(\n    lambda s: 'text'\n    '{a}'\n)\n"
    "second = one(\n    lambda s: 'text'\n    '{b}'\n)",
}
"""Ways to write two lambdas, with places for what they return."""

RETURNS = {
    "numbers": ("s + 1", "s + 2"),
    "keys": ("s[1]", "s[2]"),
    "sets": ("s in (3, 4) and s in {5, 6}", "s in (3, 4) and s in {5, 7}"),
    "nested": ("[x + 1 for x in s]", "[x + 2 for x in s]"),
}


@pytest.mark.many_cases(quick=12)
@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lambdas_that_return_different_values_differ(tmp_path, layout, returns):
    a, b = RETURNS[returns]
    prints = {}
    for name, values in {"different": (a, b), "equal": (a, a)}.items():
        source = LAYOUTS[layout].format(a=values[0], b=values[1])
        prints[name] = [
            fingerprint_value(imported_from(source, tmp_path, function))
            for function in ("first", "second", "first")
        ]

    first, second, again = prints["different"]

    assert first != second
    assert first == again
    assert prints["equal"][0] == prints["equal"][2]


def test_a_lambda_that_stands_alone_counts_by_its_syntax_tree(tmp_path):
    source = "first = lambda s: s + 1  # a comment"
    formatted = "first = lambda s: (\n    s + 1\n)"

    assert fingerprint_value(imported_from(source, tmp_path, "first")) == (
        fingerprint_value(imported_from(formatted, tmp_path, "first"))
    )


class Scale:
    def __init__(self, by):
        self.by = by

    def __getitem__(self, index):
        return self.by


class SlottedScale:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by

    def __getitem__(self, index):
        return self.by


def first_of(key, values=(0,)):
    return key * values[0]


def with_closure(values):
    return lambda key: key * values[0]


def with_default(values):
    def load(key, values=values):
        return key * values[0]

    return load


def with_keyword_default(values):
    def load(key, *, values=values):
        return key * values[0]

    return load


def behind_a_closure(values):
    inner = with_closure(values)
    return lambda key: inner(key)


def cached(values):
    return functools.lru_cache(with_closure(values))


BINDINGS = {
    "a closure": with_closure,
    "a default": with_default,
    "a default by keyword": with_keyword_default,
    "a closure's closure": behind_a_closure,
    "a partial": lambda values: functools.partial(first_of, values=values),
    "a partial by place": lambda values: functools.partial(
        lambda values, key: key * values[0], values
    ),
    "a cached function": cached,
}
"""Ways in which a function has a value with it."""

BOUND_VALUES = {
    "numbers": lambda by: by,
    "lists": lambda by: [by],
    "dicts": lambda by: {0: by},
    "dicts of texts": lambda by: {0: 1, "words": {"word": by}},
    "tuples of lists": lambda by: (by, [by]),
    "arrays": lambda by: np.array([by]),
    "tensors": lambda by: torch.tensor([by]),
    "modules": lambda by: torch.nn.Sequential(torch.nn.Linear(by, 1)),
    "objects": Scale,
    "objects with slots": SlottedScale,
}


@pytest.mark.parametrize("values", BOUND_VALUES)
@pytest.mark.parametrize("binding", BINDINGS)
def test_what_a_function_has_with_it_counts(binding, values):
    bind, make = BINDINGS[binding], BOUND_VALUES[values]

    torch.manual_seed(0)
    before = bind(make(2))
    torch.manual_seed(0)
    same = bind(make(2))
    other = bind(make(3))

    for fingerprint in (fingerprint_value, lambda f: fingerprint_of(f, [1]).load):
        assert fingerprint(before) == fingerprint(same)
        assert fingerprint(before) != fingerprint(other)


def remember_items(cache):
    def load(key):
        if key not in cache:
            cache[key] = key * 2
        return cache[key]

    return load


def remember_by_setdefault(cache):
    return lambda key: cache.setdefault(key, key * 2)


@pytest.mark.parametrize("remember", [remember_items, remember_by_setdefault])
def test_a_cache_that_a_function_fills_does_not_count(remember):
    load = remember({})
    before = fingerprint_of(load, [1])

    load(1)

    assert fingerprint_of(load, [1]) == before


CACHED = """
import functools
@functools.lru_cache
def helper(x): return x * 2
class Data:
    @functools.cache
    def parse(self, key): return key + 3
    def load(self, key): return helper(key) + self.parse(key)
"""


@pytest.mark.parametrize("change", [("x * 2", "x * 4"), ("key + 3", "key + 5")])
def test_the_code_of_cached_functions_counts(tmp_path, change):
    def of(source):
        return fingerprint_of(imported_from(source, tmp_path, "Data")().load, [1]).load

    assert of(CACHED) == of(CACHED)
    assert of(CACHED) != of(CACHED.replace(*change))


@pytest.mark.slow
def test_a_dataset_that_a_function_has_with_it_counts_as_its_cache_does(tmp_path):
    words = loaderkit.pack([{"word": 1}], tmp_path / "words.lk", workers=0)
    rows = loaderkit.pack([{"x": 1}, {"x": 2}], tmp_path / "rows.lk", workers=0)

    def mapped(other):
        return rows.map(lambda sample: {"x": sample["x"] + other[0]["word"]}).cache

    first = mapped(loaderkit.open_cache(words.cache))

    words[0]
    assert mapped(words) == first
    assert mapped(loaderkit.open_cache(words.cache)) == first


class Stream:
    """An iterator, as ``itertools.count`` is: its class has a ``__next__`` too."""

    def __init__(self, start):
        self.start = start

    def __next__(self):
        raise AssertionError

    def __reduce__(self):
        return Stream, (self.start,)


@pytest.mark.parametrize("hold", [with_closure, with_default, Scale])
def test_an_iterator_that_code_holds_is_not_read(hold):
    prints = [fingerprint_value(hold(Stream(start))) for start in (1, 1, 2)]

    assert prints[0] == prints[1]
    assert prints[0] != prints[2]
