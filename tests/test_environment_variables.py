"""A variable of the environment that says nonsense is named, with what to do.

What is nonsense is not ours to say: Python's ``int``, by which torch reads the same
variables, and the words that the documentation lists.
"""

import ast
import logging
import os
import re
from pathlib import Path

import pytest
import torch

import loaderkit
from loaderkit.cache.verified import user_cache_folder
from loaderkit.errors import LoaderkitError
from loaderkit.loader.ranks import launched_ranks

ROOT = Path(loaderkit.__file__).parent
SAMPLES = [torch.zeros(3) for _ in range(8)]

NONSENSE = [
    *("abc", "None", "null", "yes please", "ünï", "²", "0x4", "1.5", "1e3", "nan"),
    *("-7", "-99999999999999999999", "9" * 5000, " ", "--", "=3", "2;3", "4(x2)"),
    *("\n", "a" * 9999),
]
"""Nothing that counts processors, processes or batches, nor any word for a truth."""
TOO_MANY = ["9" * 30, "9" * 400]
"""More processes than any cluster has; more batches ahead than an epoch has are all."""


class Recording(dict):
    """An environment that knows what it was asked, and answers that it is not set."""

    def __init__(self, variables):
        super().__init__(variables)
        self.asked = []

    def get(self, name, default=None):
        self.asked.append(name)
        return default


def names_of_launchers():
    # With none of them, none is looked up.
    environment = Recording({"RANK": ""})
    launched_ranks(environment)
    return sorted(set(environment.asked))


LAUNCHERS = names_of_launchers()
COUNTS = ["SLURM_CPUS_PER_TASK", "LOCAL_WORLD_SIZE"]
OURS = [
    *("LOADERKIT_NUM_WORKERS", "LOADERKIT_MAX_WORKERS", "LOADERKIT_READ_AHEAD"),
    *("LOADERKIT_PREFETCH_FACTOR", "LOADERKIT_PERSISTENT_WORKERS"),
    *("LOADERKIT_PIN_MEMORY", "LOADERKIT_IN_ORDER"),
    "LOADERKIT_MULTIPROCESSING_CONTEXT",
]
OF_TRUTHS = ["LOADERKIT_UPDATE_SNAPSHOTS"]
"""Read where a snapshot is compared; see tests/budget/test_assertions.py."""
NO_NUMBERS = ["XDG_CACHE_HOME", "LOCALAPPDATA", "LD_PRELOAD", "DYLD_INSERT_LIBRARIES"]
"""Paths; the first two have a law below, and the others are the system's."""
OF_TOOLS = ["PYTEST_CURRENT_TEST", "KINETO_LOG_LEVEL"]
"""Only whether they are there is asked."""
OTHER_TEXTS = ["SC_CLK_TCK", "O_NONBLOCK", "O_NOFOLLOW"]
"""Names of other things, in files that read variables."""


def build(**options):
    return loaderkit.build_loader(SAMPLES, batch_size=4, probe=False, **options)


def told(environment, monkeypatch):
    """Build a loader with a few more variables, and give what it says of them."""
    with monkeypatch.context() as patch:
        for name, text in environment.items():
            patch.setenv(name, text)
        with pytest.raises(LoaderkitError) as raised:
            build()
    return raised.value


@pytest.mark.parametrize("name", [*OURS, *COUNTS, *LAUNCHERS])
def test_nonsense_is_told_with_the_name_the_value_and_what_to_do(name, monkeypatch):
    texts = NONSENSE + ([] if name in OURS else TOO_MANY)
    if name in LAUNCHERS:  # these are read by one function
        texts = texts[LAUNCHERS.index(name) % 4 :: 4]
    for text in texts:
        error = told({name: text}, monkeypatch)

        assert name in error.what
        assert repr(text)[1:20].strip("'") in error.what
        assert error.why
        assert re.search(rf"unset {name}|{name}=", error.fix)
        # It fits on a screen, whatever the variable holds.
        assert len(str(error)) < 800


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_nonsense_beside_a_right_number_is_told_too(name, monkeypatch):
    for text in NONSENSE + TOO_MANY:
        error = told({"RANK": "0", "WORLD_SIZE": "2", name: text}, monkeypatch)

        assert name in error.what
        assert "unset RANK" in error.fix


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("SLURM_CPUS_PER_TASK", ["", "1", " 2 ", "+64", "1_000"]),
        ("LOCAL_WORLD_SIZE", ["", "1", "0", "-1"]),
        ("LOADERKIT_MAX_WORKERS", ["", "0", "3", str(10**30)]),
        ("LOADERKIT_PIN_MEMORY", ["", "no", "FALSE"]),
        ("LOADERKIT_MULTIPROCESSING_CONTEXT", ["", "Fork", "spawn"]),
    ],
)
def test_what_makes_sense_is_taken(name, texts, monkeypatch):
    for text in texts:
        monkeypatch.setenv(name, text)

        assert len(build()) == 2


def test_a_local_count_is_judged_behind_right_ranks_too(monkeypatch):
    ranks = {"RANK": "0", "WORLD_SIZE": "2"}
    for text in NONSENSE + TOO_MANY:
        error = told({**ranks, "LOCAL_WORLD_SIZE": text}, monkeypatch)

        assert "LOCAL_WORLD_SIZE" in error.what


@pytest.mark.parametrize("number", [10**30, 10**400])
def test_more_workers_than_any_machine_has_are_told_however_many(number):
    with pytest.raises(LoaderkitError, match="workers"):
        build(num_workers=number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [10**30, 10**400])
@pytest.mark.parametrize("option", ["read_ahead", "prefetch_factor"])
def test_more_batches_ahead_than_there_are_are_all(option, number, monkeypatch):
    if option == "prefetch_factor":
        monkeypatch.setenv("LOADERKIT_NUM_WORKERS", "1")

    assert len(list(build(**{option: number}))) == 2


@pytest.mark.parametrize("seconds", [2_147_484, 3e9, 1e300])
def test_a_timeout_that_the_system_cannot_wait_for_is_refused(seconds):
    with pytest.raises(LoaderkitError, match="timeout must be at most"):
        build(timeout=seconds, num_workers=1)
    assert build(timeout=2_147_483, num_workers=1).timeout == 2_147_483


@pytest.mark.skipif(os.name == "nt", reason="Windows has another variable for it")
def test_a_relative_folder_for_caches_is_not_used_and_told_once(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for text in ("caches", "~/caches", ".", "caches/of mine"):
        monkeypatch.setenv("XDG_CACHE_HOME", text)
        with caplog.at_level(logging.WARNING, logger="loaderkit"):
            folders = {user_cache_folder(), user_cache_folder()}

        assert folders == {tmp_path / "home" / ".cache" / "loaderkit"}
        [record] = caplog.records
        assert f"XDG_CACHE_HOME={text} is ignored" in record.getMessage()
        caplog.clear()


def possible_names(source):
    """List the texts that may name a variable, where code reads the environment."""
    if "environ" not in source and "getenv" not in source:
        return set()
    constants = (
        n.value for n in ast.walk(ast.parse(source)) if type(n) is ast.Constant
    )
    texts = {text for text in constants if isinstance(text, str)}
    return {text for text in texts if re.fullmatch(r"[A-Z]+(_[A-Z0-9]+)+", text)}


def test_no_variable_is_read_without_a_law():
    # What torch, its allocator, OpenMP and malloc read is judged by doctor.
    files = [f for f in ROOT.rglob("*.py") if "environment" not in f.parts]
    found = set().union(*(possible_names(file.read_text()) for file in files))

    known = {*LAUNCHERS, *COUNTS, *OURS, *OF_TRUTHS, *NO_NUMBERS, *OF_TOOLS}
    # The variables that say an option begin with our prefix in another place.
    known |= {name.removeprefix("LOADERKIT_") for name in OURS}
    assert found - known - {*OTHER_TEXTS} == set()
    assert {"XDG_CACHE_HOME", "PYTEST_CURRENT_TEST", "LD_PRELOAD"} <= found


def test_a_variable_without_a_law_would_be_seen():
    source = "import os\nx = os.environ.get('MY_DEPTH')\nn = 'A_B'\ny = os.getenv(n)"

    assert possible_names(source) == {"MY_DEPTH", "A_B"}
