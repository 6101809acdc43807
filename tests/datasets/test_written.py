"""An edit of what load uses makes a cache stale; what fills while it runs does not."""

import importlib
import sys

import pytest

from loaderkit.datasets.fingerprint import fingerprint_of
from loaderkit.datasets.written import find_written
from loaderkit.library_files import is_users_module

SETTINGS = """
LEVELS = ["low", "high"]
NESTED = {"a": [1, 2], "b": {3}}
"""
MODULE = """
import argparse
import collections
import settings
from settings import LEVELS as levels, NESTED

CLASSES = ["cat", "dog"]
SCALES: dict = {"x": 1.0}
SCALES["y"] = 2.0
TABLE = []
for number in range(4):
    TABLE.append(number * 2)
try:
    import json
    UNITS = {"m": 1}
except ImportError:
    UNITS = {}
SIZES = [3, 4]
MADE = collections.Counter(SIZES)
PARSER = argparse.ArgumentParser()
PARSER.add_argument("--rate", default=0.1)
PARSER.add_argument("--root", default="data")
ARGUMENTS = PARSER.parse_args([])
SEEN = {}
UNUSED = [1]


class Tool:
    weights = [0.5, 0.5]

    def use(self):
        return self.weights


class Reader:
    order = ["first", "second"]

    def load(self, key):
        SEEN[key] = len(SEEN)
        used = CLASSES, SCALES, TABLE, UNITS, MADE, levels, NESTED, settings.LEVELS
        return used, self.order, Tool().use(), ARGUMENTS.root
"""
EDITS = {
    "a list": ('["cat", "dog"]', '["cat", "dog", "bird"]'),
    "a dict": ('{"x": 1.0}', '{"x": 1.5}'),
    "an item": ('SCALES["y"] = 2.0', 'SCALES["y"] = 2.5'),
    "a loop": ("number * 2", "number * 3"),
    "in a try": ('{"m": 1}', '{"m": 1000}'),
    "of a call": ("[3, 4]", "[3, 5]"),
    "a class's own": ('["first", "second"]', '["second", "first"]'),
    "another class's": ("[0.5, 0.5]", "[0.25, 0.75]"),
    "what makes an object": (
        "PARSER.parse_args([])",
        'PARSER.parse_args(["--root", "x"])',
    ),
    "imported": ('["low", "high"]', '["low", "middle", "high"]'),
    "imported and nested": ('"b": {3}', '"b": {4}'),
}
NO_EDITS = {
    "a comment": ('CLASSES = ["cat", "dog"]', 'CLASSES = [  # two\n "cat", "dog"]'),
    "what is not used": ("UNUSED = [1]", "UNUSED = [2]"),
    "another argument's default": ("default=0.1", "default=0.2"),
}


@pytest.fixture
def fingerprint(tmp_path, monkeypatch):
    """Take the fingerprint of a module's source, written to a file anew each time."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def take(source, settings, *, loads=0):
        for name in ("readers", "settings"):
            sys.modules.pop(name, None)
        (tmp_path / "readers.py").write_text(source)
        (tmp_path / "settings.py").write_text(settings)
        importlib.invalidate_caches()
        reader = importlib.import_module("readers").Reader()
        for key in range(loads):
            reader.load(key)
        return fingerprint_of(getattr(reader, "load", len), ["a"])

    yield take
    for name in ("readers", "settings"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_seen(fingerprint, edit):
    old, new = EDITS[edit]
    edited = MODULE.replace(old, new), SETTINGS.replace(old, new)
    assert edited != (MODULE, SETTINGS)

    assert fingerprint(*edited) != fingerprint(MODULE, SETTINGS)


@pytest.mark.parametrize("edit", NO_EDITS)
def test_what_changes_no_value_is_not(fingerprint, edit):
    old, new = NO_EDITS[edit]
    assert old in MODULE

    assert fingerprint(MODULE.replace(old, new), SETTINGS) == fingerprint(
        MODULE, SETTINGS
    )


def test_modules_of_libraries_are_not_looked_into(fingerprint):
    fingerprint("from keyword import kwlist\nclass Reader:\n    pass\n", SETTINGS)
    module = sys.modules["readers"]

    assert find_written(module, "kwlist", lambda _: True).scope.__name__ == "keyword"
    assert find_written(module, "kwlist", is_users_module) is None


def test_what_fills_while_samples_are_loaded_is_not(fingerprint):
    assert fingerprint(MODULE, SETTINGS, loads=5) == fingerprint(MODULE, SETTINGS)
