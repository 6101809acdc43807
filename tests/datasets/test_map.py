"""``map``: when it packs again, when it opens what it packed, and what it says."""

import functools
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import types
from os import getenv

import pytest
import torch

import loaderkit
from loaderkit.errors import DatasetError, OptionError

datasets = pytest.importorskip("datasets", reason="an oracle, not in the extra test")


@pytest.fixture
def rows(tmp_path):
    samples = [{"x": torch.ones(row + 1), "row": row} for row in range(3)]
    return loaderkit.pack(samples, tmp_path / "rows.lk", workers=0)


CALLS = []
SCALES = {"by": 1}
MODEL = torch.nn.Linear(1, 1)
CONNECTION = sqlite3.connect(":memory:")


def scaled(sample):
    CALLS.append(sample["row"])
    return {"row": sample["row"] * SCALES["by"]}


def modelled(sample):
    return {"y": MODEL(sample["x"][:1]).detach()}


def connected(sample):
    [[number]] = CONNECTION.execute("select 3")
    return {"row": sample["row"] * number}


def numbers(dataset):
    return [dataset[row]["row"] for row in range(len(dataset))]


@pytest.fixture(autouse=True)
def fresh_values():
    CALLS.clear()
    SCALES["by"] = 1
    torch.nn.init.constant_(MODEL.weight, 0.0)
    torch.nn.init.constant_(MODEL.bias, 1.0)


def test_a_global_that_changed_is_packed_again_as_in_hugging_face(rows):
    theirs = datasets.Dataset.from_dict({"row": [0, 1, 2]})
    results = []
    for by in (1, 5, 1):
        SCALES["by"] = by
        ours = numbers(rows.map(scaled, workers=0))
        assert ours == theirs.map(scaled)["row"][:]
        results.append(ours)

    assert results == [[0, 1, 2], [0, 5, 10], [0, 1, 2]]


def test_weights_of_a_global_model_that_changed_are_packed_again(rows):
    assert rows.map(modelled, workers=0)[0]["y"] == 1
    torch.nn.init.constant_(MODEL.bias, 9.0)

    assert rows.map(modelled, workers=0)[0]["y"] == 9


def test_what_a_function_remembers_itself_is_not_packed_again(rows):
    """``CALLS`` grows with each call; after packing it counts as before."""
    first = rows.map(scaled, workers=0)
    called = len(CALLS)

    assert rows.map(scaled, workers=0).cache == first.cache
    assert len(CALLS) == called
    CALLS.append("changed by somebody else")
    assert rows.map(scaled, workers=0).cache != first.cache


def test_overwrite_and_version_pack_again(rows):
    first = rows.map(scaled, workers=0)

    calls_of_packing = len(CALLS)

    again = rows.map(scaled, workers=0, overwrite=True)
    other = rows.map(scaled, workers=0, version=2)
    opened = rows.map(scaled, workers=0, version=2)

    assert len(CALLS) == 3 * calls_of_packing
    assert again.cache == first.cache
    assert other.cache == opened.cache != first.cache


@pytest.mark.parametrize("version", [None, 1.5, [1]])
def test_a_version_is_a_text_or_a_number(rows, version):
    with pytest.raises(OptionError, match="version must be a text or a number"):
        rows.map(scaled, version=version)


@pytest.mark.parametrize(
    ("asked", "fix"), [(False, "overwrite=True"), (True, "drop it")]
)
def test_the_name_of_hugging_face_is_answered_with_ours(rows, asked, fix):
    with pytest.raises(OptionError) as refusal:
        rows.map(scaled, load_from_cache_file=asked)
    assert refusal.value.fix == fix

    rows.map(scaled, workers=0)
    calls_of_packing = len(CALLS)
    options = {} if fix == "drop it" else {"overwrite": True}
    rows.map(scaled, workers=0, **options)
    assert len(CALLS) == calls_of_packing * (2 if options else 1)


def test_a_cache_of_another_function_in_the_folder_is_replaced_as_the_fix_says(
    rows, tmp_path
):
    rows.map(scaled, cache=tmp_path / "m.lk", workers=0)
    SCALES["by"] = 2

    with pytest.raises(loaderkit.errors.StaleCacheError) as refusal:
        rows.map(scaled, cache=tmp_path / "m.lk", workers=0)
    code = re.match(r"map\(function, (.*)\)", refusal.value.fix).group(1)

    mapped = eval(f"rows.map(scaled, {code})")
    assert numbers(mapped) == [0, 2, 4]


SETTINGS = types.SimpleNamespace(by=2, epochs=3)


def of_settings(sample):
    return {"row": sample["row"] * SETTINGS.by}


def of_environment(sample):
    return {"row": sample["row"] * len(os.environ.get("LOADERKIT_TEST", ""))}


def of_getenv(sample):
    return {"row": sample["row"], "name": getenv("LOADERKIT_TEST")}


@pytest.mark.parametrize(
    ("function", "unread"),
    [
        (connected, r"CONNECTION \(an? sqlite3.Connection\)"),
        (of_environment, "environment variables"),
        (of_getenv, "environment variables"),
    ],
)
def test_what_cannot_be_known_is_said_where_an_old_cache_is_opened(
    rows, function, unread
):
    first = rows.map(function, workers=0)  # packed now: nothing to say

    with pytest.warns(UserWarning, match=unread):
        assert rows.map(function, workers=0).cache == first.cache
    for options in ({"overwrite": True}, {"version": 2}, {"version": 2}):
        rows.map(function, workers=0, **options)


def test_what_a_function_does_not_read_of_an_object_does_not_count(rows):
    first = rows.map(of_settings, workers=0)
    SETTINGS.epochs += 1

    assert rows.map(of_settings, workers=0).cache == first.cache
    SETTINGS.by += 1
    assert rows.map(of_settings, workers=0).cache != first.cache


def test_a_function_that_returns_none_is_refused(rows):
    """Hugging Face keeps the samples then, as they were: ours are copies."""
    with pytest.raises(DatasetError, match="returned None for sample 0"):
        rows.map(lambda sample: None, workers=0)


REMEMBERING = """
import sys
import loaderkit
class Tokenizer:
    def encode(self, text):
        self.last = text
        return len(text)
TOKENIZER = Tokenizer()
def encode(text): return whole(TOKENIZER, text)
def whole(tokenizer, text): return tokenizer.encode(text)
class Texts(loaderkit.SafeDataset):
    def keys(self): return ["a", "bb"]
    def load(self, key): return {"n": encode(key)}
packing = loaderkit.datasets.pack_options.PackOptions(workers=0)
first = Texts(cache="first.lk", packing=packing)
print(first[1])
second = Texts(cache="second.lk", packing=packing)
print(second[1], second.map(lambda s: {"n": encode("x" * s["n"])}).cache.name)
"""


@pytest.mark.slow
def test_a_program_that_packs_twice_with_what_remembers_runs_twice(tmp_path):
    (tmp_path / "program.py").write_text(REMEMBERING)
    command = [sys.executable, "program.py"]
    runs = [subprocess.check_output(command, cwd=tmp_path, text=True) for _ in range(2)]

    assert runs[0] == runs[1]


class Scaled(loaderkit.SafeDataset):
    def keys(self):
        return range(3)

    def load(self, key):
        return {"row": key * SCALES["by"]}


@pytest.mark.slow
def test_a_stale_cache_is_packed_again_as_its_fix_says(tmp_path):
    assert numbers(Scaled(cache=tmp_path / "c.lk")) == [0, 1, 2]
    SCALES["by"] = 3

    with pytest.raises(loaderkit.errors.StaleCacheError, match="a value that") as stale:
        len(Scaled(cache=tmp_path / "c.lk"))
    call, imported = re.match(r"(.*?\)\)) \((.*?)\)", stale.value.fix).groups()
    names = {"Scaled": Scaled, "path": tmp_path / "c.lk"}
    exec(imported, names)

    assert numbers(eval(call.replace("...", "cache=path"), names)) == [0, 3, 6]


OPENS_AND_MAPS = """
import os, sys
import loaderkit
opened = loaderkit.open_cache("rows.lk")
mapped = opened.map(lambda sample: {"row": sample["row"] + 1}, cache="m.lk")
print(mapped[1]["row"])
"""


@pytest.mark.slow
def test_files_of_caches_are_no_raw_data_of_what_is_mapped(rows, tmp_path):
    """A new process hashes the shards, and notes in its record that it did."""
    (tmp_path / "program.py").write_text(OPENS_AND_MAPS)
    shutil.copytree(rows.cache, tmp_path / "copies" / "rows.lk")
    command = [sys.executable, "program.py"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "home")}
    record = tmp_path / "home" / "loaderkit" / "verified.txt"
    record.parent.mkdir(parents=True)
    record.write_text("a line of another cache\n")
    run = functools.partial(
        subprocess.check_output, command, cwd=tmp_path, text=True, env=environment
    )

    first = run()
    record.write_text(record.read_text() + "one more\n")
    for file in rows.cache.iterdir():  # as a copy's times of change are others
        os.utime(file, (1, 1))

    assert run() == first == "2\n"


def counted(sample):
    sample["n"] = sample["n"] + 1
    return sample


def lengthened(sample):
    sample["tokens"] = [9]
    return sample


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize(
    "function",
    [
        lambda sample: sample,
        counted,
        lengthened,
        lambda sample: {"tokens": sample["tokens"], "m": 1},
        lambda sample: {"m": 1},
        lambda sample: dict(sample),
    ],
    ids=["same", "changed", "removed one changed", "anew", "another", "copy"],
)
def test_fields_are_removed_as_hugging_face_does(tmp_path, function):
    samples = [{"tokens": [1, 2], "n": 1}, {"tokens": [3], "n": 2}]
    theirs = datasets.Dataset.from_list(samples)
    ours = loaderkit.pack(samples, tmp_path / "samples", workers=0)

    expected = theirs.map(function, remove_columns=["tokens"])
    mapped = ours.map(function, remove_columns=["tokens"], cache=tmp_path / "mapped")

    assert sorted(mapped[0]) == sorted(expected.column_names)
