"""Packs at once in one process: each lists the files that its own samples are made of.

The oracle is the same pack alone.  Other threads of the user's program open files too.
"""

import json
import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import h5py
import numpy as np
import pytest
from failing_calls import files_of

from loaderkit import SafeDataset, pack
from loaderkit.datasets.source_files import FileTracker

SAMPLES = 12


class Reads(SafeDataset):
    """Each sample is made of a file of its own, and of one that stays open."""

    def __init__(self, folder, way, **options):
        super().__init__(**options)
        self.folder, self.way = folder, way

    def keys(self):
        return range(SAMPLES)

    def load(self, key):
        return {"x": WAYS[self.way](self, key), "more": np.zeros(300)}


def by_python(source, key):
    with (source.folder / f"{key}.npy").open("rb") as file:
        return np.load(file)


def by_mapping(source, key):
    return np.array(np.load(source.folder / f"{key}.npy", mmap_mode="r+"))


def by_thread(source, key):
    arrays = []
    thread = threading.Thread(target=lambda: arrays.append(by_python(source, key)))
    thread.start()
    thread.join()
    return arrays[0]


def by_database(source, key):
    with closing(sqlite3.connect(source.folder / "samples.db")) as database:
        [(value,)] = database.execute("SELECT x FROM samples WHERE key = ?", (key,))
    return np.full(3, value)


_KEPT = {}


def by_library(source, key):
    """HDF5 opens files without a word, and this one stays open."""
    name = str(source.folder / "samples.h5")
    if name not in _KEPT:
        _KEPT[name] = h5py.File(name, "r")
    return _KEPT[name]["x"][key]


def by_nothing(_, key):
    return np.full(3, key)


WAYS = {
    way.__name__.removeprefix("by_"): way
    for way in (by_python, by_mapping, by_thread, by_database, by_library, by_nothing)
}


def lay_out(folder):
    """Write what all ways read."""
    folder.mkdir()
    for key in range(SAMPLES):
        np.save(folder / f"{key}.npy", np.full(3, key))
    with h5py.File(folder / "samples.h5", "w") as file:
        file["x"] = np.arange(SAMPLES)[:, None].repeat(3, axis=1)
    with closing(sqlite3.connect(folder / "samples.db")) as database:
        database.execute("CREATE TABLE samples (key, x)")
        rows = [(key, key) for key in range(SAMPLES)]
        database.executemany("INSERT INTO samples VALUES (?, ?)", rows)
        database.commit()


def close_kept_files():
    for file in _KEPT.values():
        file.close()
    _KEPT.clear()


SHARD_BYTES = 6_000


def sources_listed(cache):
    names = [
        name
        for file in cache.glob("sources-*.json")
        for name in json.loads(file.read_bytes())["files"]
    ]
    return sorted(Path(name).name for name in names)


def pack_alone(folder, ways):
    """Pack one source after the other, without any thread."""
    files = []
    for number, way in enumerate(ways):
        path = folder / f"alone {number}"
        pack(Reads(folder / way, way), path, workers=0, shard_bytes=SHARD_BYTES)
        files.append(files_of(path))
        close_kept_files()
    return files


def pack_at_once(folder, ways, engine):
    """Pack all sources at the same time, each as its caller's thread asks for."""
    with ExitStack() as stack:

        def threads(count):
            return stack.enter_context(ThreadPoolExecutor(count))

        one_pool, callers = threads(3), threads(len(ways))
        packs = []
        for number, way in enumerate(ways):
            options = {
                "one pool": lambda: {"executor": one_pool},
                "pool each": lambda: {"executor": threads(2)},
                "no pool": lambda: {"workers": 0},
            }[engine]()
            packs.append(
                callers.submit(
                    pack,
                    Reads(folder / way, way),
                    folder / f"beside {number}",
                    shard_bytes=SHARD_BYTES,
                    **options,
                )
            )
        for packing in packs:
            packing.result()
    close_kept_files()
    return [files_of(folder / f"beside {number}") for number in range(len(ways))]


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize("engine", ["pool each", "one pool", "no pool"])
@pytest.mark.parametrize(
    "ways",
    [
        ("library", "python", "database"),
        ("nothing", "library"),
        ("thread", "mapping", "library", "nothing"),
    ],
    ids=" ".join,
)
def test_each_pack_lists_its_own_files_whoever_packs_beside_it(tmp_path, ways, engine):
    for way in ways:
        lay_out(tmp_path / way)

    wanted = pack_alone(tmp_path, ways)

    assert pack_at_once(tmp_path, ways, engine) == wanted


def test_what_a_pack_alone_lists_is_what_its_samples_are_made_of(tmp_path):
    """Twin: lists without any file would be equal too."""
    for way in WAYS:
        lay_out(tmp_path / way)

    pack_alone(tmp_path, WAYS)

    one_each = sorted(f"{key}.npy" for key in range(SAMPLES))
    assert {
        way: sources_listed(tmp_path / f"alone {number}")
        for number, way in enumerate(WAYS)
    } == {
        "python": one_each,
        "mapping": one_each,
        "thread": one_each,
        "database": ["samples.db"],
        "library": ["samples.h5"],
        "nothing": [],
    }


def in_new_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


def rename_while_open(stack, file):
    written = file.with_suffix(".partial")
    stack.enter_context(written.open("w")).write("more")
    written.replace(file)


@pytest.mark.parametrize(
    ("opened_by", "counts"),
    [
        ("load", True),
        ("a thread of load", True),
        ("another thread", False),
        # Python tells who starts a thread since 3.12.
        ("a thread of another thread", sys.version_info < (3, 12)),
        ("another thread, which renames it", False),
    ],
)
def test_a_file_that_stays_open_counts_where_load_has_opened_it(
    tmp_path, opened_by, counts
):
    file = tmp_path / "run.log"
    file.touch()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        # A pool starts its thread for its first task: that one is waiting from now on.
        pool.submit(int).result()

        def open_file():
            stack.enter_context(file.open())

        with FileTracker([], "stat", all_threads=False) as tracker:
            if opened_by == "load":
                open_file()
            elif opened_by == "a thread of load":
                in_new_thread(open_file)
            elif opened_by == "another thread":
                pool.submit(open_file).result()
            elif opened_by == "a thread of another thread":
                pool.submit(in_new_thread, open_file).result()
            else:
                pool.submit(rename_while_open, stack, file).result()
            names = list(tracker.new_files())

    assert names == [str(file)] * counts
