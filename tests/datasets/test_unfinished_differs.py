"""An unfinished build is gone on with, or what has changed since is said."""

import functools
import itertools
import logging
import os
import sys
import threading
import time

import numpy as np
import pytest
import torch

from loaderkit import SafeDataset, pack
from loaderkit.errors import DatasetError

COUNT, BREAKS_AT = 40, 30
SCALES = [1.0]


class Rows(SafeDataset):
    """Fails at a sample while a variable of the environment is set."""

    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)

    def keys(self):
        return range(COUNT)

    def whole(self, key):
        if key == BREAKS_AT and os.getenv("ROWS_BREAK"):
            msg = "gone"
            raise OSError(msg)
        return torch.full((300,), float(key))


def packed_twice(folder, caplog, first, second, before=None, **options):
    """Pack until a sample fails, then with another dataset; gives what was logged."""
    settings = {"workers": 0, "shard_bytes": 8000}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROWS_BREAK", "yes")
        with pytest.raises(DatasetError):
            pack(first, folder, **settings)
    if before is not None:
        before(second)
    with caplog.at_level(logging.WARNING, logger="loaderkit"):
        cache = pack(second, folder, **(settings | options))
    assert len(cache) == COUNT
    return "\n".join(record.getMessage() for record in caplog.records)


class Scaled(Rows):
    def load(self, key):
        return self.whole(key) * self.scale * self.weights[0]


class ScaledByAVariable(Rows):
    def load(self, key):
        return self.whole(key) * SCALES[0]


class Whole(Rows):
    def load(self, key):
        return self.whole(key)


def scaled(scale=1.0, weight=1.0):
    return Scaled(scale=scale, weights=[weight], made=time.time())


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"scale": 2.0}, "(self.made, self.scale)"),
        ({"weight": 2.0}, "(self.made, self.weights)"),
        ({"scale": 2.0, "weight": 3.0}, "(self.made, self.scale, self.weights)"),
    ],
)
def test_the_attributes_that_have_changed_are_named(changed, names, tmp_path, caplog):
    told = packed_twice(tmp_path / "a.lk", caplog, scaled(), scaled(**changed))

    assert "starts anew, and deletes " in told
    end = "changed since: the code of load, or what it reads "
    assert sorted(told.partition(end)[2].strip("()").split(", ")) == sorted(
        names.strip("()").split(", ")
    )


def test_settings_that_have_changed_are_named(tmp_path, caplog):
    told = packed_twice(tmp_path / "a.lk", caplog, Whole(), Whole(), shard_bytes=9000)

    assert told.endswith("changed since: shard_bytes (8000, now 9000)")


def test_versions_and_keys_that_have_changed_are_named(tmp_path, caplog):
    class Later(Whole):
        version = "2"

        def keys(self):
            return reversed(range(COUNT))

    told = packed_twice(tmp_path / "a.lk", caplog, Whole(), Later())

    assert told.endswith(f"the keys ({COUNT}, now {COUNT}); version ('', now '2')")


def test_a_variable_that_has_changed_is_named(tmp_path, caplog, monkeypatch):
    first, second = ScaledByAVariable(), ScaledByAVariable()

    def change(_):
        monkeypatch.setattr(sys.modules[__name__], "SCALES", [2.0])

    told = packed_twice(tmp_path / "a.lk", caplog, first, second, before=change)

    assert told.endswith(".SCALES)")


SELF_CHANGING = {
    "a counter": (itertools.count().__next__, "self.value"),
    "a time": (time.time, "0"),
    "a lock": (threading.Lock, "self.value.acquire(); self.value.release()"),
    "a generator": (np.random.default_rng, "self.value.random()"),
    "a memory": (dict, "self.value.setdefault(key, 0)"),
    "a cached function": (lambda: functools.lru_cache(abs), "self.value(key)"),
    "a buffer": (lambda: torch.rand(3), "self.value.fill_(key)"),
}


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize("make", SELF_CHANGING, ids=SELF_CHANGING)
def test_what_changes_by_itself_keeps_no_run_from_going_on(make, tmp_path, caplog):
    make_value, use = SELF_CHANGING[make]
    if make == "a counter":
        use = "0"  # one that load does not read
    text = f"def load(self, key):\n    {use}\n    return self.whole(key)\n"
    file = tmp_path / "loads.py"
    file.write_text(text)
    scope = {}
    exec(compile(text, file, "exec"), scope)

    class Own(Rows):
        load = scope["load"]

    first, second = Own(value=make_value()), Own(value=make_value())
    told = packed_twice(tmp_path / "a.lk", caplog, first, second)

    assert told == ""
