"""Of those who write to a URL, a claim says who removes files there."""

import contextlib
import json
import multiprocessing
import os
import signal

import pytest

from loaderkit.cache.claims import OtherWriterError, claim_of, refuse_if_replaced
from loaderkit.cache.folder_storage import FolderStorage
from loaderkit.cache.process_identity import ProcessIdentity

FORK = multiprocessing.get_context("fork")


def hold_claim(folder, ready):
    with claim_of(FolderStorage(folder), ()):
        ready.set()
        signal.pause()


@contextlib.contextmanager
def process_with_claim(folder):
    ready = FORK.Event()
    process = FORK.Process(target=hold_claim, args=(folder, ready))
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
    with claim_of(storage, (), tidies=tidies):
        claim = json.loads((tmp_path / ".writing").read_text())

    assert claim["process"] == os.getpid()
    assert not (tmp_path / ".writing").exists()


def test_a_claim_of_a_living_process_is_not_taken_over(tmp_path):
    storage = FolderStorage(tmp_path)
    with process_with_claim(tmp_path) as process:
        words = f"process {process.pid} on .*, "
        with pytest.raises(OtherWriterError, match=words):
            refuse_if_replaced(storage)
        with pytest.raises(OtherWriterError, match=words), claim_of(storage, ()):
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

    with pytest.raises(OtherWriterError, match="delete"), claim_of(storage, ()):
        pass
    with pytest.raises(OtherWriterError, match="delete"):
        refuse_if_replaced(storage)


def test_without_a_home_a_claim_is_taken_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    storage = FolderStorage(tmp_path / "store")

    with claim_of(storage, ()):
        claim = json.loads((tmp_path / "store" / ".writing").read_text())

    assert claim["lock"] == ""
