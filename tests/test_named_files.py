"""A file that the caller named is written, or the error says what would make it so."""

import os
import pathlib
import pickle

import pytest

import loaderkit
from loaderkit.errors import CacheError, NotWrittenError, OptionError
from loaderkit.named_files import write_named_file


def test_a_text_is_written_and_replaces_what_was_there(tmp_path):
    file = write_named_file(tmp_path / "a.html", "first and longer")

    assert write_named_file(str(file), "then") == file
    assert file.read_text() == "then"


PLACES = {
    "missing": "there is no folder",
    "file": "is a file, and no folder",
    "folder": "it is a folder",
}


@pytest.fixture
def places(tmp_path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").mkdir()
    return {
        "missing": tmp_path / "out" / "deeper" / "page.html",
        "file": tmp_path / "a" / "page.html",
        "folder": tmp_path / "b",
    }


@pytest.mark.parametrize(("place", "why"), PLACES.items())
def test_a_place_that_cannot_be_written_is_told_with_the_reason(places, place, why):
    with pytest.raises(NotWrittenError) as caught:
        write_named_file(places[place], "text")

    error = caught.value
    assert why in error.why
    assert error.errno == error.__cause__.errno
    assert error.filename == str(places[place])
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_fix_for_a_missing_folder_is_one(places):
    with pytest.raises(OSError, match="cannot be written") as caught:
        write_named_file(places["missing"], "text")

    exec(caught.value.fix, {"pathlib": pathlib})

    assert write_named_file(places["missing"], "text").exists()


@pytest.mark.parametrize("path", [None, 3, ["page.html"]])
def test_what_is_no_path_is_told(path):
    with pytest.raises(OptionError, match="named by a path"):
        write_named_file(path, "text")


RESULTS = [
    "budget/batch/plan.py",
    "budget/diagnosis/diagnose.py",
    "datasets/sizes.py",
    "leaks/report.py",
    "loader/plan.py",
    "memory/meter.py",
    "pages/document.py",
]


@pytest.mark.parametrize("file", RESULTS)
def test_results_write_their_files_so(file):
    text = (pathlib.Path(__file__).parents[1] / "loaderkit" / file).read_text()

    assert ".write_text(" not in text


HOMES = ["~/data/rows", "~", "~root/rows", pathlib.Path("~") / "rows"]
TAKING_PATHS = {
    "mirror": lambda path: loaderkit.open_cache("s3://bucket/rows", mirror=path),
    "raw": lambda path: loaderkit.SafeDataset(path),
    "cache": lambda path: loaderkit.SafeDataset(cache=path),
    "open_cache": loaderkit.open_cache,
    "pack": lambda path: loaderkit.pack([1], path),
    "pack to": lambda path: loaderkit.pack(loaderkit.PtFolder(path), "rows.lk"),
    "concat": lambda path: loaderkit.concat(["a.lk"], path),
    "extend": lambda path: loaderkit.extend(path, [1]),
    "push": lambda path: loaderkit.push(path, "memory://rows"),
    "pull": lambda path: loaderkit.pull("memory://rows", path),
    "verify": loaderkit.verify,
    "inspect_cache": loaderkit.inspect_cache,
    "PtFolder": loaderkit.PtFolder,
    "to_html": lambda path: write_named_file(path, "text"),
}


@pytest.mark.parametrize("call", TAKING_PATHS)
@pytest.mark.parametrize("path", HOMES, ids=str)
def test_a_path_that_only_a_shell_reads_is_answered(call, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(OptionError, match="begins with the home folder") as raised:
        TAKING_PATHS[call](path)

    expanded = eval(raised.value.fix, {"os": os})
    assert expanded == str(pathlib.Path(path).expanduser())
    assert list(tmp_path.iterdir()) == []


VARIABLES = ["$DATA/rows", "rows/${DATA}", pathlib.Path("a") / "$DATA" / "rows"]


@pytest.mark.parametrize("call", TAKING_PATHS)
@pytest.mark.parametrize("path", VARIABLES, ids=str)
def test_a_variable_of_a_shell_in_a_path_is_answered(call, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA", "/data/of/mine")

    with pytest.raises(OptionError, match="names the variable") as raised:
        TAKING_PATHS[call](path)

    expanded = eval(raised.value.fix, {"os": os})
    assert expanded == str(path).replace("${DATA}", "$DATA").replace(
        "$DATA", "/data/of/mine"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["$", "a$b", "$Recycle.Bin", "$5", "$a b", "{a}"])
def test_a_dollar_that_no_shell_would_read_is_part_of_a_name(name, tmp_path):
    assert len(loaderkit.pack([1, 2], tmp_path / name / "rows.lk", workers=0)) == 2


@pytest.mark.parametrize("target", ["nowhere", "nowhere/deeper", "."])
def test_a_link_to_nowhere_is_told_from_a_file(target, tmp_path):
    link = tmp_path / "rows.lk"
    link.symlink_to(target)

    with pytest.raises(CacheError, match="There is no cache at") as raised:
        loaderkit.open_cache(link)

    assert ("link to nowhere" in raised.value.why) == (target != ".")
    assert "it is a file" not in raised.value.why


@pytest.mark.parametrize("given", ["", 3, ["a"], "s3://bucket/mirror"], ids=repr)
def test_a_mirror_is_a_folder_of_this_machine(given, tmp_path):
    with pytest.raises(OptionError, match="mirror must be") as raised:
        loaderkit.open_cache("s3://bucket/rows", mirror=given)
    assert raised.value.fix == "mirror='/local/disk/mirror'"

    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="names a file") as raised:
        loaderkit.open_cache("s3://bucket/rows", mirror=tmp_path / "file")
    assert raised.value.fix == f"mirror={str(tmp_path)!r}"
