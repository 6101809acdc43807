"""Of those who write to a URL, a claim says who removes files there."""

import contextlib
import json
import multiprocessing
import os
import signal

import pytest

from loaderkit.cache.claims import hold_claim, refuse_if_replaced
from loaderkit.cache.folder_storage import FolderStorage
from loaderkit.cache.process_identity import ProcessIdentity
from loaderkit.errors import OtherWriterError

FORK = multiprocessing.get_context("fork")


def hold_claim_and_wait(folder, ready):
    with hold_claim(FolderStorage(folder), ()):
        ready.set()
        signal.pause()


@contextlib.contextmanager
def process_with_claim(folder):
    ready = FORK.Event()
    process = FORK.Process(target=hold_claim_and_wait, args=(folder, ready))
    process.start()
    ready.wait()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("tidies", [False, True])
def test_a_claim_of_a_process_that_was_killed_here_is_taken_over(tmp_path, tidies):
    storage = FolderStorage(tmp_path)
    with process_with_claim(tmp_path):
        pass

    refuse_if_replaced(storage)
    with hold_claim(storage, (), tidies=tidies):
        claim = json.loads((tmp_path / ".writing").read_text())

    assert claim["process"] == os.getpid()
    assert not (tmp_path / ".writing").exists()


def test_a_claim_of_a_living_process_is_not_taken_over(tmp_path):
    storage = FolderStorage(tmp_path)
    with process_with_claim(tmp_path) as process:
        words = f"process {process.pid} on .*, "
        with pytest.raises(OtherWriterError, match=words):
            refuse_if_replaced(storage)
        with pytest.raises(OtherWriterError, match=words), hold_claim(storage, ()):
            pass

        assert (tmp_path / ".writing").exists()


@pytest.mark.parametrize(
    "changed", [{"space": "of another machine"}, {"lock": "/another"}, {"lock": ""}]
)
def test_a_claim_whose_process_cannot_be_known_is_not_taken_over(tmp_path, changed):
    """By the claim of a killed process that is taken over as it is, see above."""
    storage = FolderStorage(tmp_path)
    with process_with_claim(tmp_path):
        claim = json.loads((tmp_path / ".writing").read_text())
    assert ProcessIdentity(1, claim["space"]).is_near
    (tmp_path / ".writing").write_text(json.dumps({**claim, **changed}))

    with pytest.raises(OtherWriterError, match="delete"), hold_claim(storage, ()):
        pass
    with pytest.raises(OtherWriterError, match="delete"):
        refuse_if_replaced(storage)


@pytest.mark.parametrize(
    ("content", "writer"),
    [
        # As earlier versions wrote it, which took no lock.
        ('{"host": "node7", "process": 12, "time": "Mon"}', "process 12 on node7, Mon"),
        ('{"host": "node7"}', '{"host": "node7"}'),
        ("no claim" * 100, "no claim" * 10),
    ],
)
def test_a_claim_of_an_unknown_writer_is_shown_in_a_line(tmp_path, content, writer):
    storage = FolderStorage(tmp_path)
    (tmp_path / ".writing").write_text(content)

    with pytest.raises(OtherWriterError, match="delete") as caught:
        refuse_if_replaced(storage)

    assert f"({writer})" in caught.value.what


def hold_claim_until(folder, ready, done):
    with hold_claim(FolderStorage(folder), ()):
        ready.set()
        done.wait()


def test_who_tidies_up_waits_for_one_that_replaces_a_cache(tmp_path):
    storage, ready, done = FolderStorage(tmp_path), FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold_claim_until, args=(tmp_path, ready, done))
    process.start()
    ready.wait()

    def pauses():
        done.set()
        process.join()
        yield 0.0

    with hold_claim(storage, pauses(), tidies=True):
        claim = json.loads((tmp_path / ".writing").read_text())

    assert claim["process"] == os.getpid()


def test_two_without_a_home_do_not_take_each_other_for_gone(tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    storage = FolderStorage(tmp_path / "store")

    with hold_claim(storage, ()), pytest.raises(OtherWriterError, match="delete"):
        refuse_if_replaced(storage)


def test_without_a_home_a_claim_is_taken_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    storage = FolderStorage(tmp_path / "store")

    with hold_claim(storage, ()):
        claim = json.loads((tmp_path / "store" / ".writing").read_text())

    assert claim["lock"] == ""
