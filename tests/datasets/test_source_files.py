"""Which files count as sources of samples, and how they are known again.

The interpreter calls an audit hook where no tool that counts lines looks, so ``note``
is called here as the hook calls it, beside real reading.
"""

import functools
import gc
import importlib.metadata
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import warnings
import zipfile
from pathlib import Path
from urllib.parse import quote

import h5py
import numpy as np
import pytest
import xxhash

from loaderkit import SafeDataset
from loaderkit.datasets.pack import PackOptions
from loaderkit.datasets.source_files import (
    FileTracker,
    FileVersion,
    SourceFileList,
    _library_folders,
    _on_audit_event,
    files_below,
    files_named_by,
    hashed,
    version_of,
)
from loaderkit.errors import DamagedCacheError, StaleCacheError

READ, WRITE, APPEND = os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_APPEND


@pytest.fixture
def raw(tmp_path):
    """A file of raw data."""
    file = tmp_path / "raw.csv"
    file.write_text("1,2\n")
    return file


def tracker(ignored=(), mode="stat", *, all_threads=True):
    return FileTracker(ignored, mode, all_threads=all_threads)


# What a file is like


def test_a_file_is_known_by_its_size_and_time_or_by_its_hash_too(raw):
    status = raw.stat()
    digest = xxhash.xxh3_128_hexdigest(raw.read_bytes())

    assert version_of(str(raw)) == (4, status.st_mtime_ns, "")
    assert version_of(str(raw), hashed=True) == (4, status.st_mtime_ns, digest)


@pytest.mark.parametrize("name", ["", "missing", "a\0b", "raw.csv/below"])
def test_what_is_no_regular_file_has_no_version(raw, name):
    assert version_of(f"{raw.parent}/{name}") is None


# Which files are noted


@pytest.mark.parametrize("form", [str, Path, os.fsencode])
def test_a_file_opened_for_reading_is_noted_by_its_absolute_path(
    raw, monkeypatch, form
):
    monkeypatch.chdir(raw.parent)
    files = tracker()

    files.note(form("raw.csv"), READ)

    assert files.new_files() == {str(raw): version_of(str(raw))}


def test_a_file_is_told_of_once(raw):
    files = tracker()
    files.note(str(raw), READ)
    files.new_files()

    files.note(str(raw), READ)

    assert files.new_files() == {}


def test_a_file_is_looked_at_before_it_is_read_so_that_a_later_change_shows(raw):
    files = tracker()
    before = version_of(str(raw))

    files.note(str(raw), READ)
    raw.write_text("longer than before\n")
    files.note(str(raw), READ)

    assert files.new_files() == {str(raw): before}


@pytest.mark.parametrize("flags", [WRITE, APPEND])
def test_a_file_that_load_writes_is_no_source_even_if_it_is_read_back(raw, flags):
    files = tracker()

    files.note(str(raw), READ)
    files.note(str(raw), flags)
    files.note(str(raw), READ)

    assert files.new_files() == {}


@pytest.mark.parametrize("name", ["module.py", "module.pyc", "library.so"])
def test_code_is_no_source(tmp_path, name):
    (tmp_path / name).touch()
    files = tracker()

    files.note(str(tmp_path / name), READ)

    assert files.new_files() == {}


@pytest.mark.parametrize("path", ["/proc/self/status", "/dev/null", "/etc/hosts"])
def test_files_of_the_system_are_no_sources(path):
    files = tracker()

    files.note(path, READ)

    assert files.new_files() == {}


def test_files_of_installed_libraries_are_no_sources():
    _library_folders.cache_clear()  # asked anew, whatever ran before
    files = tracker()
    table = Path(np.__file__).with_name("py.typed")

    files.note(str(table), READ)

    assert table.exists()
    assert files.new_files() == {}


METADATA = "Metadata-Version: 2.1\nName: someones-package\nVersion: 1.2\n"


def installed_as_folder(folder, suffix):
    record = folder / f"someones_package-1.2{suffix}"
    record.mkdir()
    name = "METADATA" if suffix == ".dist-info" else "PKG-INFO"
    (record / name).write_text(METADATA)
    (record / "top_level.txt").write_text("someones_package\n")
    (record / "entry_points.txt").write_text("[console_scripts]\nrun = a:b\n")
    return folder


def installed_as_file(folder):
    (folder / "someones_package-1.2.egg-info").write_text(METADATA)
    return folder


def installed_as_archive(folder):
    path = folder / "someones_package-1.2-py3.egg"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("EGG-INFO/PKG-INFO", METADATA)
    return path


INSTALLED = {
    "wheel": lambda folder: installed_as_folder(folder, ".dist-info"),
    "to be edited": lambda folder: installed_as_folder(folder, ".egg-info"),
    "as of old": installed_as_file,
    "archive": installed_as_archive,
}


@pytest.mark.parametrize("form", INSTALLED)
def test_what_python_reads_of_an_installed_package_is_no_source(
    tmp_path, raw, monkeypatch, form
):
    """transformers asks for versions as it is imported, which ``load`` may do."""
    monkeypatch.syspath_prepend(INSTALLED[form](tmp_path))
    importlib.invalidate_caches()

    with tracker() as files:
        version = importlib.metadata.version("someones-package")
        list(importlib.metadata.distribution("someones-package").entry_points)
        raw.read_text()
    with warnings.catch_warnings():
        # Python 3.13 leaves an egg open that it has looked into.
        warnings.simplefilter("ignore", ResourceWarning)
        importlib.invalidate_caches()
        gc.collect()

    assert version == "1.2"
    assert list(files.new_files()) == [str(raw)]


@pytest.mark.parametrize("end", ["", os.sep])
def test_a_folder_is_ignored_with_what_is_in_it_and_not_its_neighbour(tmp_path, end):
    cache, neighbour = tmp_path / "c.lk", tmp_path / "c.lk.raw"
    for folder in (cache, neighbour):
        folder.mkdir()
        (folder / "data").touch()
    files = tracker([str(cache) + end])

    files.note(str(cache / "data"), READ)
    files.note(str(neighbour / "data"), READ)

    assert list(files.new_files()) == [str(neighbour / "data")]


class Unnamed:
    """A path that fails to say what it is."""

    def __fspath__(self):
        msg = "no name"
        raise ValueError(msg)


os.PathLike.register(Unnamed)


@pytest.mark.parametrize("path", [3, None, 1.5, Unnamed()])
def test_what_is_no_path_is_left_to_open_to_refuse(path):
    files = tracker()

    files.note(path, READ)

    assert files.new_files() == {}


def test_a_file_that_was_not_there_is_no_source(tmp_path):
    files = tracker()

    files.note(str(tmp_path / "missing"), READ)

    assert files.new_files() == {}


@pytest.mark.parametrize("all_threads", [False, True])
def test_threads_that_ran_before_count_only_where_all_do(raw, all_threads):
    begin, other = threading.Event(), raw.with_name("other.csv")
    other.touch()

    def read_when_told():
        begin.wait()
        files.note(str(other), READ)

    thread = threading.Thread(target=read_when_told)
    thread.start()
    files = tracker(all_threads=all_threads)
    begin.set()
    thread.join()
    files.note(str(raw), READ)

    assert files.new_files().keys() == {str(raw), *[str(other)] * all_threads}


def test_threads_that_load_starts_count(raw):
    files = tracker(all_threads=False)

    thread = threading.Thread(target=files.note, args=(str(raw), READ))
    thread.start()
    thread.join()

    assert list(files.new_files()) == [str(raw)]


def test_opening_is_heard_while_the_tracker_is_entered_and_not_after(raw):
    after = raw.with_name("after.csv")
    after.touch()

    with tracker(all_threads=False) as files:
        raw.read_text()
        raw.with_name("written.csv").write_text("1")
        # A descriptor: its file was opened by name before.
        with raw.open() as opened, open(os.dup(opened.fileno())):  # noqa: PTH123
            pass
    after.read_text()

    assert list(files.new_files()) == [str(raw)]


def test_every_tracker_hears_of_opening_and_of_no_other_event(raw):
    other = raw.with_name("other.csv")
    other.touch()
    with tracker() as first, tracker() as second:
        _on_audit_event("open", (str(raw), "r", READ))
        _on_audit_event("os.remove", (str(other), -1))

    assert list(first.new_files()) == list(second.new_files()) == [str(raw)]


def test_a_tracker_that_is_to_note_nothing_notes_nothing(raw):
    with tracker(mode="none") as files:
        raw.read_text()

    assert files.new_files() == {}


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"),  # noqa: PTH112
    reason="the system does not tell which files are open",
)
def test_a_file_that_stays_open_is_found_without_a_word_from_python(raw):
    # ``os.dup`` stands for a library in C: no event of opening goes with it.
    kept_file, deleted_file = raw.with_name("kept.h5"), raw.with_name("deleted.h5")
    for file in (kept_file, deleted_file):
        file.touch()
    before = os.open(raw, READ)
    files = tracker(all_threads=False)
    descriptors = [before, os.open(kept_file, READ), os.open(deleted_file, READ)]
    deleted_file.unlink()

    recorded = files.new_files()

    for descriptor in descriptors:
        os.close(descriptor)
    assert recorded == {str(kept_file): version_of(str(kept_file))}


def test_where_the_system_does_not_tell_what_is_open_the_rest_is_noted(
    raw, monkeypatch
):
    def untold(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "listdir", untold)
    files = tracker()

    files.note(str(raw), READ)

    assert list(files.new_files()) == [str(raw)]


def test_a_hash_is_of_what_the_file_holds_when_it_is_told_of(raw):
    files = tracker(mode="hash")
    files.note(str(raw), READ)

    assert files.new_files() == {str(raw): version_of(str(raw), hashed=True)}


def test_a_file_that_is_gone_before_it_is_hashed_keeps_its_size_and_time(raw):
    files = tracker(mode="hash")
    files.note(str(raw), READ)
    before = version_of(str(raw))
    raw.unlink()

    assert files.new_files() == {str(raw): before}


# Which files values name


class Library:
    """An open file of a library: it says one name, and raises for the other."""

    def __init__(self, filename=None, name=None):
        self._filename, self._name = filename, name

    @property
    def filename(self):
        return self._check_open(self._filename)

    @property
    def name(self):
        return self._check_open(self._name)

    def _check_open(self, name):
        if name is None:
            msg = "the file is closed"
            raise RuntimeError(msg)
        return name


@pytest.mark.parametrize(
    "value",
    [
        "raw.csv",
        Path("raw.csv"),
        ["raw.csv", 7],
        ("raw.csv",),
        {"raw.csv"},
        {"train": "raw.csv", "rows": 3},
        Library(filename="raw.csv"),
        Library(name=Path("raw.csv")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_names_files_below_the_root(raw, value):
    assert list(files_named_by([value], raw.parent)) == [str(raw)]


def test_an_open_file_names_itself_wherever_the_root_is(raw, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with raw.open() as opened:
        assert list(files_named_by([opened], elsewhere)) == [str(raw)]
    mapped = np.memmap(raw, np.uint8, "r")
    assert list(files_named_by([mapped], None)) == [str(raw)]


def test_relative_paths_begin_in_the_current_folder_where_there_is_no_root(
    raw, monkeypatch
):
    monkeypatch.chdir(raw.parent)

    assert list(files_named_by(["raw.csv"], None)) == [str(raw)]


@pytest.mark.parametrize(
    "value", ["", "a" * 5_000, "missing", "a\0b", 7, None, [["raw.csv"]], Library()]
)
def test_what_names_no_file_is_passed_over(raw, value):
    assert list(files_named_by([value], raw.parent)) == []


def test_all_files_below_a_folder_are_listed_but_those_ignored(tmp_path):
    for name in ("a/1", "a/b/2", "cache/3", "cached/4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a/link").symlink_to(tmp_path / "cache")

    files = set(files_below(tmp_path, [str(tmp_path / "cache")]))

    wanted = {str(tmp_path / name) for name in ("a/1", "a/b/2", "cached/4")}
    # The link itself is no folder to go into, and no regular file either.
    assert {path for path in files if version_of(path) is not None} == wanted


def test_a_file_is_all_that_is_below_itself(raw):
    assert list(files_below(raw, [])) == [str(raw)]


# The list that a cache keeps


def listed(raw, root="", *, hashed=False):
    files = SourceFileList(str(root))
    files.update({str(raw): version_of(str(raw), hashed=hashed)})
    return files


def test_files_below_the_root_are_named_from_there_so_that_raw_data_may_move(raw):
    files = listed(raw, raw.parent)
    moved = raw.parent / "moved"
    moved.mkdir()
    raw.rename(moved / "raw.csv")
    (moved / "raw.csv").write_text("1,2,3\n")

    assert files.any_below_root()
    assert list(files.files) == ["./raw.csv"]
    assert list(files.changed(str(moved))) == [
        f"{moved / 'raw.csv'} has 6 bytes, 4 when packed"
    ]


def test_a_root_that_is_one_file_is_known_wherever_it_is(raw):
    files = listed(raw, raw)
    moved = raw.with_name("moved.csv")
    moved.write_text("1,2,3\n")

    assert list(files.files) == ["./."]
    assert list(files.changed(str(moved))) == [f"{moved} has 6 bytes, 4 when packed"]


def test_a_folder_whose_name_only_begins_like_the_roots_is_not_below_it(raw):
    files = listed(raw, str(raw.parent)[:-1])

    assert not files.any_below_root()
    assert list(files.files) == [str(raw)]


def test_an_empty_list_names_nothing_below_the_root(raw):
    assert not SourceFileList(str(raw.parent)).any_below_root()


def test_the_first_look_at_a_file_counts(raw):
    files = listed(raw)

    files.add(str(raw), FileVersion(99, 99))

    assert list(files.changed("")) == []


def test_a_file_that_is_not_here_is_passed_over(raw):
    files = listed(raw)
    raw.unlink()

    assert list(files.changed("")) == []


@pytest.mark.parametrize("hashed", [False, True])
def test_a_file_that_is_only_touched_is_another_unless_its_hash_is_known(raw, hashed):
    files = listed(raw, hashed=hashed)
    os.utime(raw, ns=(1, 1))

    changes = list(files.changed(""))

    wanted = [] if hashed else [f"{raw} was written to after it was packed"]
    assert changes == wanted


def test_another_content_of_the_same_size_is_found_by_its_hash(raw):
    files = listed(raw, hashed=True)
    raw.write_text("3,4\n")
    os.utime(raw, ns=(1, 1))

    [change] = files.changed("")

    assert change == f"{raw} has another content than when it was packed"


def test_a_list_is_read_back_as_it_was_written(raw):
    files = listed(raw, hashed=True)
    files.add("/b", FileVersion(1, 2))

    text = files.to_json()
    again = SourceFileList.from_json(text, where="sources.json")

    assert again.files == files.files
    assert again.to_json() == text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[",
        "[" * 100_000,
        "[]",
        "7",
        "{}",
        json.dumps({"files": []}),
        json.dumps({"files": {"/a": 7}}),
        json.dumps({"files": {"/a": [1, 2]}}),
        json.dumps({"files": {"/a": ["1", 2, ""]}}),
        json.dumps({"files": {"/a": [1, 2.5, ""]}}),
    ],
)
def test_a_list_that_is_none_is_refused_by_its_name(content):
    with pytest.raises(
        DamagedCacheError, match=r"^sources\.json is not a list"
    ) as caught:
        SourceFileList.from_json(content, where="sources.json")

    assert caught.value.fix == "pack(source, path, overwrite=True)"


@pytest.mark.parametrize("name", ["weights.pth", "scan.pt", "table.csv", "no_suffix"])
def test_raw_data_is_a_source_whatever_it_is_called(tmp_path, name):
    (tmp_path / name).touch()
    files = tracker()

    files.note(str(tmp_path / name), READ)

    assert list(files.new_files()) == [str(tmp_path / name)]


def test_a_file_on_a_disk_in_memory_is_a_source():
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("there is no disk in memory here")
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".csv") as file:
        files = tracker()
        files.note(file.name, READ)

        assert list(files.new_files()) == [file.name]


@pytest.mark.parametrize("written", [False, True])
def test_a_file_opened_for_updating_is_a_source_unless_it_is_written_to(raw, written):
    files = tracker()

    files.note(str(raw), os.O_RDWR)
    if written:
        raw.write_text("longer than it was")

    assert (str(raw) in files.new_files()) is not written


def test_a_file_that_is_replaced_before_it_is_hashed_keeps_no_hash(raw):
    before = version_of(str(raw))
    raw.write_text(raw.read_text()[::-1])
    os.utime(raw, ns=(1, 1))

    assert hashed(str(raw), before) == before


def test_a_folder_that_holds_other_files_only_is_not_the_one_that_was_packed(tmp_path):
    packed, other, emptied = (tmp_path / name for name in ("a", "b", "c"))
    for folder in (packed, other, emptied):
        folder.mkdir()
    (packed / "1.txt").write_text("1")
    (other / "2.txt").write_text("2")
    files = SourceFileList(str(packed))
    files.add(str(packed / "1.txt"), version_of(str(packed / "1.txt")))

    assert not list(files.changed(str(packed)))
    assert "none of the files" in "".join(files.changed(str(other)))
    assert not list(files.changed(str(emptied)))


def by_sqlite(path):
    sqlite3.connect(path).execute("select * from sqlite_master").connection.close()


def connect_by_uri(path, *, before=""):
    name = f"file:{before}{quote(str(path))}?mode=ro"
    sqlite3.connect(name, uri=True).execute("select 1").connection.close()


by_uri_of_this_machine = functools.partial(connect_by_uri, before="//localhost")
by_uri_of_no_machine = functools.partial(connect_by_uri, before="//")


def by_a_program(path):
    subprocess.run([sys.executable, "-c", "", path], check=True)


def by_a_shell(path):
    subprocess.run(
        f"true < '{path}' && true {path} 2>/dev/null", shell=True, check=True
    )


@pytest.mark.parametrize(
    "read",
    [
        by_sqlite,
        connect_by_uri,
        by_uri_of_this_machine,
        by_uri_of_no_machine,
        by_a_program,
        by_a_shell,
    ],
)
def test_databases_and_files_of_other_programs_are_sources(tmp_path, read):
    path = tmp_path / "values.db"
    sqlite3.connect(path).execute("create table t (x)").connection.close()
    with FileTracker([], "stat", all_threads=True) as tracker:
        read(path)

        assert str(path) in tracker.new_files()


def test_a_database_that_load_writes_is_no_source(tmp_path):
    path = tmp_path / "memo.db"
    sqlite3.connect(path).close()
    with FileTracker([], "stat", all_threads=True) as tracker:
        database = sqlite3.connect(path)
        database.execute("create table t (x)")
        database.commit()
        database.close()

        assert tracker.new_files() == {}


RAW = "raw/constants.h5"
FOLDER = Path("raw")


class ReadsH5(SafeDataset):
    """Opens a file by a library in C, and closes it."""

    SHARD = Path("raw") / "of_class.h5"

    def keys(self):
        return range(3)


class ByGlobal(ReadsH5):
    def load(self, key):
        return {"row": key, "x": numbers_of(RAW)}


class ByLiteral(ReadsH5):
    def load(self, key):
        return {"row": key, "x": numbers_of("raw/literal.h5")}


class ByFolder(ReadsH5):
    def load(self, key):
        return {"row": key, "x": numbers_of(FOLDER / "joined.h5")}


class ByClass(ReadsH5):
    def load(self, key):
        return {"row": key, "x": numbers_of(self.SHARD)}


class ByDefault(ReadsH5):
    def load(self, key, path="raw/default.h5"):
        return {"row": key, "x": numbers_of(path)}


class ByHelper(ReadsH5):
    def load(self, key):
        return {"row": key, "x": helped()}


def helped():
    return numbers_of("raw/helper.h5")


def numbers_of(path):
    with h5py.File(path, "r") as file:
        return file["x"][:]


def closure():
    path = Path("raw/closure.h5")

    class ByClosure(ReadsH5):
        def load(self, key):
            return {"row": key, "x": numbers_of(path)}

    return ByClosure


@pytest.mark.parametrize(
    "dataset",
    [ByGlobal, ByLiteral, ByFolder, ByClass, ByDefault, ByHelper, closure()],
)
def test_a_file_that_the_code_names_counts_whoever_opens_it(
    tmp_path, monkeypatch, dataset
):
    monkeypatch.chdir(tmp_path)
    names = [
        "constants",
        "literal",
        "joined",
        "of_class",
        "default",
        "helper",
        "closure",
    ]
    (tmp_path / "raw").mkdir()
    for name in names:
        with h5py.File(f"raw/{name}.h5", "w") as file:
            file["x"] = np.zeros(3)
    packing = PackOptions(workers=0)
    assert dataset(cache="c.lk", packing=packing)[0]["x"].sum() == 0
    assert dataset(cache="c.lk", packing=packing)[0]["x"].sum() == 0

    for name in names:
        with h5py.File(f"raw/{name}.h5", "w") as file:
            file["x"] = np.ones(4)

    with pytest.raises(StaleCacheError, match="when packed"):
        dataset(cache="c.lk", packing=packing)[0]
