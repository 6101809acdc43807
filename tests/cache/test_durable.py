"""Files appear whole or not at all, and what fails is told with the fix."""

import errno
import os

import pytest

from loaderkit.cache.durable import (
    is_folder,
    publish,
    remove,
    sync_folder,
    write_file,
    write_text,
    writing,
)
from loaderkit.errors import CacheError


def with_failure(file, failure):
    """Fail while a file is written."""
    with writing(file):
        raise failure


@pytest.mark.parametrize(
    ("number", "why", "fix"),
    [
        (errno.ENOSPC, "is full", "free the space"),
        (errno.EDQUOT, "your share of it, is full", "free the space"),
        (errno.EFBIG, "is full", "choose another folder"),
        (errno.EACCES, "not writable", "a cache folder that you may write to"),
        (errno.EROFS, "not writable", "a cache folder that you may write to"),
        (errno.EIO, "the disk or the network file system failed", "another disk"),
    ],
)
def test_a_system_call_that_fails_is_told_with_its_fix(tmp_path, number, why, fix):
    failure = OSError(number, os.strerror(number))

    with pytest.raises(CacheError) as caught:
        with_failure(tmp_path / "c", failure)

    assert caught.value.what == (
        f"{tmp_path / 'c'} could not be written: {os.strerror(number)}."
    )
    assert why in caught.value.why
    assert caught.value.why.endswith("finished shards are kept")
    assert fix in caught.value.fix
    assert caught.value.__cause__ is failure


def test_an_error_without_a_number_is_told_by_its_text(tmp_path):
    failure = OSError("a pipe broke")

    with pytest.raises(CacheError, match="a pipe broke") as caught:
        with_failure(tmp_path / "c", failure)

    assert caught.value.what == f"{tmp_path / 'c'} could not be written: a pipe broke."


def test_an_error_of_other_code_passes_as_it_is(tmp_path):
    failure = KeyError("x")

    with pytest.raises(KeyError) as caught:
        with_failure(tmp_path / "c", failure)

    assert caught.value is failure


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=repr
)
def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path, failure):
    def half(raw):
        raw.write(b"half")
        raise failure

    with pytest.raises(type(failure)):
        write_file(tmp_path / "c.partial", half)

    assert list(tmp_path.iterdir()) == []


def test_what_went_wrong_counts_and_not_that_tidying_up_failed(tmp_path):
    file = tmp_path / "c.partial"

    def gone_and_full(_raw):
        file.unlink()
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full") as caught:
        write_file(file, gone_and_full)

    assert caught.value.errno == errno.ENOSPC


def test_a_link_in_the_place_of_a_file_is_not_written_through(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "c.partial"
    victim.write_text("precious")
    link.symlink_to(victim)

    write_file(link, lambda raw: raw.write(b"new"))

    assert victim.read_text() == "precious"
    assert not link.is_symlink()
    assert link.read_bytes() == b"new"


def test_what_a_killed_run_left_is_replaced(tmp_path):
    partial, file = tmp_path / "c.partial", tmp_path / "c"
    partial.write_text("half, and longer than the new text")
    file.write_text("old")

    write_text(file, "new", partial=partial)

    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_an_older_file_stands_where_the_new_one_cannot_be_written(tmp_path):
    file = tmp_path / "c"
    file.write_text("old")

    with pytest.raises(CacheError, match="could not be written"):
        write_text(file, "new", partial=tmp_path / "missing" / "c.partial")

    assert file.read_text() == "old"


def test_a_name_that_is_no_text_is_written_as_it_came(tmp_path):
    name = os.fsdecode(b"\xff.csv")

    write_text(tmp_path / "c", name, partial=tmp_path / "c.partial")

    again = (tmp_path / "c").read_bytes().decode("utf-8", "surrogatepass")
    assert os.fsencode(again) == b"\xff.csv"


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot sync folders")
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_file_systems_that_cannot_sync_folders_are_passed_over(
    tmp_path, monkeypatch, number
):
    def unable(_descriptor):
        raise OSError(number, os.strerror(number))

    (tmp_path / "c.partial").write_text("whole")
    monkeypatch.setattr(os, "fsync", unable)

    publish(tmp_path / "c.partial", tmp_path / "c")

    assert (tmp_path / "c").read_text() == "whole"


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot sync folders")
def test_a_disk_that_fails_to_sync_is_told_and_no_descriptor_stays(
    tmp_path, monkeypatch
):
    synced = []

    def failing(descriptor):
        synced.append(descriptor)
        raise OSError(errno.EIO, "the disk failed")

    monkeypatch.setattr(os, "fsync", failing)

    with pytest.raises(OSError, match="the disk failed"):
        sync_folder(tmp_path)

    [descriptor] = synced
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_removing_takes_a_link_and_leaves_what_it_leads_to(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")

    remove(tmp_path / "link")
    remove(tmp_path / "missing")

    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_only_a_folder_itself_is_one(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)

    assert is_folder(tmp_path)
    for name in ("file", "link", "missing", "file/below"):
        assert not is_folder(tmp_path / name)
