"""Which files were hashed is remembered, and no record of it can do harm."""

import os
from pathlib import Path

import pytest

from loaderkit.cache.files import FileIdentity
from loaderkit.cache.verified import _MAX_BYTES, VerifiedFiles, record_path

DIGEST = "1f0c83d2a97b6e451f0c83d2a97b6e45"
OLD = FileIdentity(1, 2, 3, 4, 5)
OTHER = FileIdentity(1, 99, 3, 4, 5)
"""Files that were last changed in 1970, so that they are remembered."""


def record_of(record, *identities):
    known = VerifiedFiles(record)
    for identity in identities:
        known.add(identity, DIGEST)
    return known


def test_a_file_is_known_again_by_other_processes(tmp_path):
    record = tmp_path / "home" / "verified.txt"
    reader = VerifiedFiles(record)
    assert (OLD, DIGEST) not in reader

    record_of(record, OLD, OTHER)

    assert (OLD, DIGEST) in reader
    assert (OTHER, DIGEST) in reader


def test_one_file_among_many_is_known_however_many_were_looked_for(tmp_path):
    files = [OLD._replace(inode=10 * number) for number in range(60)]
    others = [OLD._replace(inode=10 * number + 1) for number in range(60)]
    record_of(tmp_path / "verified.txt", *files)
    reader = VerifiedFiles(tmp_path / "verified.txt")

    for file, other in zip(files[::-1], others, strict=True):
        assert (file, DIGEST) in reader
        assert (other, DIGEST) not in reader
        assert (file._replace(device=11), DIGEST) not in reader

    record_of(tmp_path / "verified.txt", *others)
    assert all((other, DIGEST) in reader for other in others)


@pytest.mark.parametrize("field", FileIdentity._fields)
def test_a_file_that_differs_in_anything_is_another(tmp_path, field):
    known = record_of(tmp_path / "verified.txt", OLD)

    assert (OLD._replace(**{field: 77}), DIGEST) not in known
    assert (OLD, DIGEST[::-1]) not in known


def test_a_file_that_was_just_changed_is_not_remembered(tmp_path):
    file = tmp_path / "file"
    file.touch()
    now = file.stat()
    fresh = OLD._replace(mtime_ns=0, ctime_ns=now.st_ctime_ns)

    known = record_of(tmp_path / "verified.txt", fresh)

    assert (fresh, DIGEST) not in known
    assert not (tmp_path / "verified.txt").exists()


def test_the_record_is_the_users_own(tmp_path):
    record = tmp_path / "home" / "loaderkit" / "verified.txt"

    record_of(record, OLD)

    assert record.stat().st_mode & 0o077 == 0
    assert record.parent.stat().st_mode & 0o077 == 0


def test_without_a_home_a_process_remembers_for_itself():
    known = record_of(None, OLD)

    assert (OLD, DIGEST) in known
    assert (OTHER, DIGEST) not in known


def file_in_place_of_folder(path):
    path.parent.write_text("a file, where a folder should be")


def fifo_at(path):
    path.parent.mkdir()
    os.mkfifo(path)


def folder_at(path):
    path.mkdir(parents=True)


def link_at(path):
    path.parent.mkdir()
    path.with_name("precious").write_text("precious\n")
    path.symlink_to(path.with_name("precious"))


@pytest.mark.parametrize("kind", [file_in_place_of_folder, fifo_at, folder_at, link_at])
def test_a_record_that_is_no_file_is_given_up_and_not_written_to(tmp_path, kind):
    record = tmp_path / "home" / "verified.txt"
    kind(record)

    known = record_of(record, OLD, OTHER)

    assert (OLD, DIGEST) in known
    assert (OTHER, DIGEST) in known
    assert (OLD, DIGEST) not in VerifiedFiles(record)
    if kind is link_at:
        assert record.read_text() == "precious\n"


def test_a_fifo_that_somebody_reads_is_given_up_too(tmp_path):
    record = tmp_path / "verified.txt"
    os.mkfifo(record)
    reader = os.open(record, os.O_RDONLY | os.O_NONBLOCK)
    try:
        known = record_of(record, OLD)

        assert (OLD, DIGEST) in known
        assert os.read(reader, 100) == b""
    finally:
        os.close(reader)


def test_a_record_that_grew_too_long_is_begun_anew(tmp_path):
    record = tmp_path / "verified.txt"
    record_of(record, OLD)
    os.truncate(record, _MAX_BYTES + 1)  # a hole: it takes no space

    record_of(record, OTHER)

    assert record.stat().st_size < 1000
    reader = VerifiedFiles(record)
    assert (OTHER, DIGEST) in reader
    assert (OLD, DIGEST) not in reader


def test_a_record_begun_anew_by_another_process_is_read_from_its_start(tmp_path):
    record = tmp_path / "verified.txt"
    reader = record_of(record, OLD, OTHER)
    assert (OLD._replace(inode=5), DIGEST) not in reader  # it has read all there is
    record.unlink()
    late = OLD._replace(inode=6)

    record_of(record, late)

    assert (late, DIGEST) in reader


def test_a_record_of_any_size_is_not_read(tmp_path):
    record = tmp_path / "verified.txt"
    record_of(record, OLD)
    os.truncate(record, 1 << 40)

    assert (OLD, DIGEST) not in VerifiedFiles(record)


def test_a_line_that_is_not_finished_is_waited_for(tmp_path):
    record = tmp_path / "verified.txt"
    record_of(record, OLD)
    whole = record.read_bytes()
    record.write_bytes(whole[:-5])
    reader = VerifiedFiles(record)
    assert (OLD, DIGEST) not in reader

    record.write_bytes(whole)

    assert (OLD, DIGEST) in reader


def test_bytes_that_are_no_text_are_passed_over(tmp_path):
    record = tmp_path / "verified.txt"
    record.write_bytes(b"\xff\xfe\n\0\n")

    record_of(record, OLD)

    assert (OLD, DIGEST) in VerifiedFiles(record)


@pytest.mark.skipif(os.name == "nt", reason="Windows has another place for it")
def test_the_record_lies_where_the_user_keeps_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = record_path()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    usual = record_path()

    assert chosen == tmp_path / "loaderkit" / "verified.txt"
    assert usual == tmp_path / ".cache" / "loaderkit" / "verified.txt"


@pytest.mark.skipif(os.name == "nt", reason="Windows has another place for it")
def test_a_user_without_a_home_has_no_record(monkeypatch):
    def homeless():
        msg = "Could not determine home directory."
        raise RuntimeError(msg)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)

    assert record_path() is None
