"""What code reads counts, by whichever way it reads it: a change is seen.

The oracle is the code itself: where it returns something else, it has read a change.
"""

import importlib
import itertools
import os
import sqlite3
import subprocess
import sys

import pytest

from loaderkit.datasets.fingerprint import fingerprint_of, fingerprint_value, read_value

WAYS = {
    "a global": "VALUE = {0}\ndef f(s): return {use:VALUE}",
    "a global of another function": "VALUE = {0}\ndef g(s): return {use:VALUE}\n"
    "def f(s): return g(s)",
    "a function's function's": "VALUE = {0}\ndef h(): return {use:VALUE}\n"
    "def g(s): return h()\ndef f(s): return g(s)",
    "a nested function's": "VALUE = {0}\ndef f(s):\n"
    "    def inner(): return {use:VALUE}\n    return inner()",
    "a comprehension's": "VALUE = {0}\n"
    "def f(s): return [{use:VALUE} for _ in range(2)]",
    "a lambda's": "VALUE = {0}\nf = lambda s: {use:VALUE}",
    "a global behind an alias": "VALUE = {0}\ndef f(s):\n    v = VALUE\n"
    "    return {use:v}",
    "an attribute": "class Box: pass\nBOX = Box()\nBOX.value = {0}\n"
    "def f(s): return {use:BOX.value}",
    "an attribute of an attribute": "class Box: pass\nBOX = Box()\nBOX.inner = Box()\n"
    "BOX.inner.value = {0}\ndef f(s): return {use:BOX.inner.value}",
    "an attribute by its name": "class Box: pass\nBOX = Box()\nBOX.value = {0}\n"
    "def f(s): return {use:getattr(BOX, 'value')}",
    "an attribute of what is passed on": "class Box: pass\nBOX = Box()\n"
    "BOX.value = {0}\ndef g(b): return {use:b.value}\ndef f(s): return g(BOX)",
    "a namespace": "import types\nBOX = types.SimpleNamespace(value={0}, other=1)\n"
    "def f(s): return {use:BOX.value}",
    "a dataclass": "import dataclasses\n@dataclasses.dataclass\nclass Box:\n"
    "    value: object\nBOX = Box({0})\ndef f(s): return {use:BOX.value}",
    "an object's method": "class Box:\n    def get(self): return {use:self.value}\n"
    "BOX = Box()\nBOX.value = {0}\ndef f(s): return BOX.get()",
    "an object's property": "class Box:\n    @property\n"
    "    def it(self): return {use:self.value}\n"
    "BOX = Box()\nBOX.value = {0}\ndef f(s): return BOX.it",
    "an object that is called": "class Box:\n"
    "    def __call__(self, s): return {use:self.value}\n"
    "BOX = Box()\nBOX.value = {0}\ndef f(s): return BOX(s)",
    "an object that is the function": "class Box:\n"
    "    def __call__(self, s): return {use:self.value}\nf = Box()\nf.value = {0}",
    "a bound method's self": "class Box:\n"
    "    def get(self, s): return {use:self.value}\n"
    "BOX = Box()\nBOX.value = {0}\nf = BOX.get",
    "a bound method's self passed on": "def g(b): return {use:b.value}\nclass Box:\n"
    "    def get(self, s): return g(self)\nBOX = Box()\nBOX.value = {0}\nf = BOX.get",
    "a bound method in a closure": "class Box:\n"
    "    def get(self, s): return {use:self.value}\nBOX = Box()\nBOX.value = {0}\n"
    "def make(get):\n    return lambda s: get(s)\nf = make(BOX.get)",
    "a class's attribute": "class Box:\n    value = {0}\n"
    "def f(s): return {use:Box.value}",
    "a class's attribute by an object": "class Box:\n    value = {0}\n"
    "    def get(self): return {use:self.value}\nBOX = Box()\n"
    "def f(s): return BOX.get()",
    "a base's attribute": "class Base:\n    value = {0}\nclass Box(Base): pass\n"
    "def f(s): return {use:Box.value}",
    "a class method": "class Box:\n    value = {0}\n    @classmethod\n"
    "    def get(cls): return {use:cls.value}\ndef f(s): return Box.get()",
    "a module's attribute": "import read_settings\nread_settings.value = {0}\n"
    "def f(s): return {use:read_settings.value}",
    "a module's function": "import read_settings\nread_settings.VALUE = {0}\n"
    "def f(s): return {use:read_settings.get()}",
    "an imported function": "import read_settings\nfrom read_settings import get\n"
    "read_settings.VALUE = {0}\ndef f(s): return {use:get()}",
    "a module of a package": "import read_package.settings\n"
    "read_package.settings.VALUE = {0}\n"
    "def f(s): return {use:read_package.settings.VALUE}",
    "a function for a type": "import functools\nVALUE = {0}\n"
    "@functools.singledispatch\ndef g(s): return s\n@g.register\n"
    "def _(s: int): return {use:VALUE}\n"
    "def f(s): return g(s)",
    "an attribute in a closure": "class Box: pass\nBOX = Box()\nBOX.value = {0}\n"
    "def make(box):\n    return lambda s: {use:box.value}\nf = make(BOX)",
    "a closure": "def make(value):\n    return lambda s: {use:value}\n"
    "HELD = {0}\nf = make(HELD)",
    "a closure that its line changes": "HELD = {0}\ndef make(held):\n"
    "    f = lambda s: {use:held}; 0 and held.append(0)\n    return f\n"
    "f = make(HELD)",
    "a default": "HELD = {0}\ndef f(s, value=HELD): return {use:value}",
    "a default by keyword": "HELD = {0}\ndef f(s, *, value=HELD): return {use:value}",
    "a partial": "import functools\nHELD = {0}\ndef g(value, s): return {use:value}\n"
    "f = functools.partial(g, HELD)",
    "a partial's keyword": "import functools\nHELD = {0}\n"
    "def g(s, value): return {use:value}\nf = functools.partial(g, value=HELD)",
    "a function's attribute": "def f(s): return {use:f.value}\nf.value = {0}",
    "a decorator": "HELD = {0}\ndef with_value(value):\n    def decorate(g):\n"
    "        def wrapper(s): return {use:value}\n        return wrapper\n"
    "    return decorate\n@with_value(HELD)\ndef f(s): return s",
    "a table of functions": "VALUE = {0}\ndef g(s): return {use:VALUE}\n"
    "TABLE = {{'g': g}}\ndef f(s): return TABLE['g'](s)",
    "a list of lambdas": "VALUE = {0}\nTABLE = [lambda s: {use:VALUE}]\n"
    "def f(s): return TABLE[0](s)",
    "a lambda beside another": "VALUE = {0}\n"
    "first, f = lambda s: 0, lambda s: {use:VALUE}",
    "a change on the same line": "VALUE = {0}\n"
    "f = lambda s: {use:VALUE}; made = [0]; made[0] = 1",
    "a dictionary of the module's": "TABLE = {{'value': {0}}}\n"
    "def f(s): return {use:TABLE['value']}",
}
"""Ways in which a function reads a value; ``{use:x}`` is how it is used."""

MODULE_OF_SETTINGS = "VALUE = value = None\ndef get(): return VALUE\n"

PREPARATION = """
import collections, numpy as np, torch
class Held:
    def __init__(self, by): self.by = by
class Deep:
    def __init__(self, by, depth):
        self.inside = Deep(by, depth - 1) if depth else by
def model(by):
    made = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1)))
    for parameter in made.parameters(): torch.nn.init.constant_(parameter, by)
    return made
def table(by):
    import pandas
    return pandas.DataFrame({"a": [by]})
def nested(by, depth):
    made = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(made.weight, by)
    for _ in range(depth): made = torch.nn.Sequential(made)
    return made
def weight_of(made):
    while isinstance(made, torch.nn.Sequential): made = made[0]
    return made.weight.sum().item()
"""

VALUES = {
    "a number": ("1", None, "{}"),
    "a text": ("'a'", "'b'", "{}"),
    "a tuple": ("(1, [2])", "(1, [3])", "repr({})"),
    "a list": ("[1]", "{}.append(2)", "list({})"),
    "a dict": ("{'k': 1}", "{}.update(k=2)", "{}['k']"),
    "a dict in a dict": ("{'a': {'k': 1}}", "{}['a'].update(k=2)", "{}['a']['k']"),
    "a set": ("{1, 'a'}", "{}.add(2)", "sorted(map(str, {}))"),
    "a default dict": (
        "collections.defaultdict(int)",
        "{}.update(k=2)",
        "{}.get('k')",
    ),
    "an array": ("np.ones(2)", "{}.fill(2)", "{}.sum()"),
    "a tensor": ("torch.ones(2)", "{}.fill_(2)", "{}.sum().item()"),
    "weights": (
        "model(1.0)",
        "torch.nn.init.constant_({}[0][0].bias, 2.0)",
        "{}(torch.ones(1)).item()",
    ),
    "weights far inside": (
        "nested(1.0, 9)",
        "torch.nn.init.constant_({}" + "[0]" * 9 + ".weight, 2.0)",
        "weight_of({})",
    ),
    "an object": ("Held(1)", "setattr({}, 'by', 2)", "{}.by"),
    "an object in a list": ("[Held(1)]", "setattr({}[0], 'by', 2)", "{}[0].by"),
    "objects far inside": (
        "Deep(1, 30)",
        "setattr({}" + ".inside" * 30 + ", 'inside', 2)",
        "{}" + ".inside" * 31,
    ),
    "a table": ("table(1)", "{}.__setitem__('a', 2)", "{}['a'].tolist()"),
    "many numbers": ("list(range(120_000))", "{}.__setitem__(99_999, 0)", "sum({})"),
    "many texts by name": (
        "{str(n): n for n in range(120_000)}",
        "{}.__setitem__('5', 0)",
        "sum({}.values())",
    ),
    "a large array": (
        "np.zeros(1 << 28, np.bool_)",
        "{}.__setitem__(5, True)",
        "{}.any()",
    ),
}
"""An expression, what changes its value in place, and how it is used."""

BINDS_AT_ONCE = {
    *(
        "a closure",
        "a closure that its line changes",
        "a default",
        "a default by keyword",
        "a partial",
    ),
    *("a partial's keyword", "a decorator"),
}
"""Ways whose value is bound once: of another value they are other functions."""


_CONSTANTS = ("'", "(")
"""What texts and tuples begin with: such a value is replaced by another."""


def is_bound_anew(value):
    _, change, _ = VALUES[value]
    return change is None or change.startswith(_CONSTANTS)


class _Use:
    def __init__(self, use):
        self._use = use

    def __format__(self, variable):
        return self._use.replace("{}", variable)


def module_of(way, value):
    first, change, use = VALUES[value]
    source = WAYS[way].format(first, use=_Use(use))
    return PREPARATION + source, change


def place_of(way):
    """Where the value lies that a way reads, as the module names it."""
    source = WAYS[way]
    places = ("HELD", "read_settings.VALUE", "read_settings.value", "BOX.inner.value")
    places += ("read_package.settings.VALUE",)
    places += ("BOX.value", "TABLE['value']", "f.value")
    for place in places:
        if f"{place} = {{0}}" in source:
            return place
    if "Base" in source:
        return "Base.value"
    if "value = {0}" in source:
        return "Box.value"
    if "value={0}" in source or "BOX = Box({0})" in source:
        return "BOX.value"
    return "TABLE['value']" if "TABLE = {{'value'" in source else "VALUE"


def write_settings(folder):
    """Write the modules that the ways import."""
    (folder / "read_settings.py").write_text(MODULE_OF_SETTINGS)
    (folder / "read_package").mkdir()
    (folder / "read_package" / "__init__.py").touch()
    (folder / "read_package" / "settings.py").write_text(MODULE_OF_SETTINGS)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Import a text as a module of the user's."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write_settings(tmp_path)
    counter = itertools.count()
    names = []

    def make(text):
        name = f"read_values_{next(counter)}"
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        names.extend((name, "read_settings", "read_package", "read_package.settings"))
        return importlib.import_module(name)

    yield make
    for name in names:
        sys.modules.pop(name, None)


def change_of(way, change):
    place = place_of(way)
    if change is None or change.startswith(_CONSTANTS):
        return f"{place} = {change or 2}"
    return change.replace("{}", place)


def prints_of(function):
    """Take the fingerprints of a function of ``map``, and of a ``load``."""
    return [fingerprint_value(function), fingerprint_of(function, ()).load]


FEW_WAYS = ("a global", "an object's method", "a closure")
LARGE = ("many texts by name", "many numbers", "a large array")
FEW_VALUES = ("a number", "a dict", "an object")
CASES = [
    *itertools.product(WAYS, FEW_VALUES),
    *itertools.product(
        FEW_WAYS, [value for value in VALUES if value not in FEW_VALUES + LARGE]
    ),
    *itertools.product(FEW_WAYS[:1], LARGE),
]
CASES = [
    (way, value)
    for way, value in CASES
    # What is bound once is not bound to another value.
    if way not in BINDS_AT_ONCE or not is_bound_anew(value)
]
"""All 760 pairs take a minute of CPU time."""


@pytest.mark.many_cases(quick=19)
@pytest.mark.parametrize(("way", "value"), CASES)
def test_a_change_of_what_code_reads_is_seen(way, value, module):
    text, change = module_of(way, value)
    imported = module(text)
    statement = change_of(way, change)
    before, same = prints_of(imported.f), prints_of(imported.f)
    returned = imported.f(0)

    exec(statement, vars(imported))

    after = prints_of(imported.f)
    assert returned != imported.f(0)
    assert before == same
    assert before[0] != after[0]
    if way != "an object that is the function":  # no class has such a load
        assert before[1] != after[1]


IN_A_PROCESS = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
from loaderkit.datasets.fingerprint import fingerprint_of, fingerprint_value
for number in range(int(sys.argv[2])):
    f = importlib.import_module(f"case_{number}").f
    print(fingerprint_value(f), fingerprint_of(f, ()).load)
"""


@pytest.mark.slow
def test_an_unchanged_program_has_the_fingerprints_of_its_last_run(tmp_path):
    write_settings(tmp_path)
    for number, (way, value) in enumerate(CASES):
        (tmp_path / f"case_{number}.py").write_text(module_of(way, value)[0])

    runs = []
    for seed in "01":
        command = [sys.executable, "-c", IN_A_PROCESS, str(tmp_path), str(len(CASES))]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        runs.append(subprocess.check_output(command, env=environment, text=True))

    assert len(set(runs[0].split())) > len(CASES) / 2
    assert runs[0].splitlines() == runs[1].splitlines()


MEMORIES = {
    "a dict": "SEEN = {}\ndef f(s):\n    SEEN[s] = s\n    return SEEN[s]",
    "a dict of another function": "SEEN = {}\ndef remember(s): SEEN.setdefault(s, s)\n"
    "def f(s):\n    remember(s)\n    return SEEN[s]",
    "a dict on an object": "class Box: pass\nBOX = Box()\nBOX.seen = {}\n"
    "def f(s):\n    BOX.seen[s] = s\n    return BOX.seen[s]",
    "an object's own": "class Box:\n    def __init__(self): self.seen = {}\n"
    "    def get(self, s):\n        self.seen[s] = s\n        return self.seen[s]\n"
    "BOX = Box()\ndef f(s): return BOX.get(s)",
    "a called object's own": "class Box:\n    def __init__(self): self.seen = {}\n"
    "    def __call__(self, s):\n        self.seen[s] = s\n"
    "        return self.seen[s]\nBOX = Box()\ndef f(s): return BOX(s)",
    "a count": "class Box:\n    def __init__(self): self.count = 0\n"
    "    def get(self, s):\n        self.count += 1\n        return s\n"
    "BOX = Box()\ndef f(s): return BOX.get(s)",
    "a class's by self": "class Box:\n    seen = {}\n    def get(self, s):\n"
    "        self.seen[s] = s\n        return self.seen[s]\n"
    "BOX = Box()\nf = BOX.get",
    "a class's": "class Box:\n    seen = {}\n"
    "def f(s):\n    Box.seen[s] = s\n    return Box.seen[s]",
}
"""What fills while samples are loaded, without packing."""


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_memory_that_load_fills_makes_no_cache_stale(memory, module):
    imported = module(MEMORIES[memory])
    before = fingerprint_of(imported.f, ())

    assert [imported.f(row) for row in range(3)] == [0, 1, 2]

    assert fingerprint_of(imported.f, ()) == before


BOX = "class Box: pass\nBOX = Box()\nBOX.value, BOX.other = 1, 1\n"
NOT_READ = {
    "a number with an attribute's name": (
        f"{BOX}value = 1\ndef f(s): return BOX.value",
        "value = 2",
    ),
    "a list with an attribute's name": (
        f"{BOX}value = [1]\ndef f(s): return BOX.value",
        "value.append(2)",
    ),
    "a number with a method's name": (
        "import numpy as np\nmean = 1\ndef f(s): return np.ones(3).mean()",
        "mean = 2",
    ),
    "a variable of a module with an attribute's name": (
        f"{BOX}import read_settings as m\ndef f(s): return m.VALUE, BOX.value",
        "m.value = 2",
    ),
    "another attribute": (f"{BOX}def f(s): return BOX.value", "BOX.other = 2"),
    "another attribute in a closure": (
        f"{BOX}def make(box):\n    return lambda s: box.value\nf = make(BOX)",
        "BOX.other = 2",
    ),
    "another attribute of a default": (
        f"{BOX}def f(s, box=BOX): return box.value",
        "BOX.other = 2",
    ),
}
"""What code does not read, and what changes it."""


@pytest.mark.parametrize("case", NOT_READ)
def test_a_change_of_what_code_does_not_read_is_none(case, module):
    text, change = NOT_READ[case]
    imported = module(text)
    before, returned = prints_of(imported.f), imported.f(0)

    exec(change, vars(imported))

    assert imported.f(0) == returned
    assert prints_of(imported.f) == before


def test_classes_derived_from_abstract_ones_are_read_whole(module):
    imported = module(
        "from torch_geometric.transforms import BaseTransform, Compose\n"
        "class Mine(BaseTransform):\n    def forward(self, data): return data\n"
        "f = Compose([Mine()])"
    )

    assert read_value(imported.f).unread == ()
    with sqlite3.connect(":memory:") as connection:
        imported.f.transforms.append(connection)
        assert "sqlite3.Connection" in read_value(imported.f).unread[0]
    connection.close()
