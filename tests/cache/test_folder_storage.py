"""Writers of one folder at once, and a clock that is set forward meanwhile.

Times of files are those of the file system's clock.  That it was set forward is what
the times of all files tell who looks later: they are set back here, while a process is
in the middle of its upload.
"""

import multiprocessing
import os
import threading
import time

import pytest
import torch

from loaderkit import inspect_cache, pack, push, verify
from loaderkit.cache.folder_storage import FolderStorage
from loaderkit.cache.process_identity import ProcessIdentity
from loaderkit.errors import CacheError

FORK = multiprocessing.get_context("fork")
HALF = b"h" * (2 << 20)
"""Two of the pieces that are copied at a time: all of it goes to the file."""


def partial_files(folder):
    return list(folder.glob(".*.partial"))


def wait_for_partial_file(folder, writer, nbytes):
    """Wait until a writer has begun, and written what it has got."""
    while [file.stat().st_size for file in partial_files(folder)] != [nbytes]:
        assert writer.is_alive()  # or this would wait for ever
        time.sleep(0.005)


def set_clock_forward(folder, hours):
    """Make all files as old as they look after that."""
    for file in folder.iterdir():
        seconds = file.lstat().st_mtime - hours * 3600
        os.utime(file, (seconds, seconds))


def upload(folder, source):
    FolderStorage(folder).write_file("shard.h5", source)


def feed(pipe, sizes, between):
    """Write halves to a pipe, and do something in between."""
    with pipe.open("wb", buffering=0) as target:
        target.write(HALF)
        between()
        for _ in range(sizes - 1):
            target.write(HALF)


@pytest.fixture
def uploading(tmp_path):
    """A process that uploads what is written to a pipe; the folder, and the pipe."""
    folder, pipe = tmp_path / "store", tmp_path / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)
    process = FORK.Process(target=upload, args=(folder, pipe))
    process.start()
    yield process, folder, pipe
    process.kill()
    process.join()


@pytest.mark.parametrize("hours", [0, 0.9, 1.1, 30])
@pytest.mark.parametrize("replace", [False, True])
def test_an_upload_outlives_a_clock_that_is_set_forward(uploading, hours, replace):
    process, folder, pipe = uploading
    was_removed = threading.Event()

    def other_writes():
        wait_for_partial_file(folder, process, len(HALF))
        set_clock_forward(folder, hours)
        FolderStorage(folder).commit("manifest.json", b"other", replace=replace)
        if not partial_files(folder):
            was_removed.set()

    feed(pipe, 2, other_writes)
    if was_removed.is_set():
        wait_for_partial_file(folder, process, 0)
        feed(pipe, 2, lambda: None)
    process.join()

    assert was_removed.is_set() == (hours > 1)
    assert process.exitcode == 0
    assert (folder / "shard.h5").read_bytes() == 2 * HALF
    assert not partial_files(folder)


def kill_while_writing(process, folder, pipe, *, is_waited_for=True):
    """Kill an upload in its middle; one that is not waited for stays a zombie."""

    def kill():
        wait_for_partial_file(folder, process, len(HALF))
        process.kill()
        if is_waited_for:
            process.join()
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    with pytest.raises(BrokenPipeError):
        feed(pipe, 2, kill)


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_what_a_killed_writer_left_goes_with_the_next_one(uploading, is_waited_for):
    process, folder, pipe = uploading

    kill_while_writing(process, folder, pipe, is_waited_for=is_waited_for)
    FolderStorage(folder).commit("manifest.json", b"next", replace=True)

    assert not partial_files(folder)


def test_what_a_writer_elsewhere_left_goes_after_an_hour(uploading):
    process, folder, pipe = uploading
    kill_while_writing(process, folder, pipe)
    here = ProcessIdentity.of_this_process().space
    [file] = partial_files(folder)
    file.rename(folder / file.name.replace(here, "0123456789abcdef"))

    store = FolderStorage(folder)
    store.commit("manifest.json", b"early", replace=True)
    assert len(partial_files(folder)) == 1
    set_clock_forward(folder, 1.1)
    store.commit("manifest.json", b"late", replace=True)
    assert not partial_files(folder)


def test_what_lives_stays_and_another_users_file_stops_nobody(tmp_path):
    own, hexes = ProcessIdentity.of_this_process(), 32 * "0"
    stays = [f".a.h5-{own}-{hexes}.partial", f".b.h5-1-{own.space}-{hexes}.partial"]
    for name in stays:
        (tmp_path / name).write_bytes(b"")
    # A folder cannot be removed as a file is: as little as another user's file.
    (tmp_path / f".c.h5-{2**22 + 1}-{own.space}-{hexes}.partial").mkdir()

    FolderStorage(tmp_path).commit("manifest.json", b"", replace=True)

    assert {file.name for file in tmp_path.iterdir()} > {"manifest.json", *stays}


def test_a_killed_upload_is_told_and_removed(tmp_path):
    local, stored = tmp_path / "local.lk", tmp_path / "stored.lk"
    pack([{"x": torch.ones(4)}], local, workers=0)
    pack([{"x": torch.zeros(4)}], stored, workers=0)
    here = ProcessIdentity.of_this_process().space
    partial = f".00000-0123456789abcdef.h5-{2**22 + 1}-{here}-{32 * '0'}.partial"
    (stored / partial).write_bytes(b"half")

    for path in (stored, stored.as_uri()):
        for told in (inspect_cache(path), verify(path)):
            assert told.unfinished == ("00000-0123456789abcdef.h5",)
            assert "1 unfinished file" in str(told)
        assert verify(path).ok
    push(local, stored.as_uri(), overwrite=True)

    assert not partial_files(stored)
    assert verify(stored).unfinished == inspect_cache(stored).unfinished == ()


def test_a_file_that_is_always_removed_is_an_error_in_the_end(tmp_path):
    class Removing(FolderStorage):
        tries = 0

        def _remove_abandoned_files(self, just_written):
            type(self).tries += 1
            just_written.unlink()

    with pytest.raises(CacheError, match=r"manifest\.json could not be written"):
        Removing(tmp_path).commit("manifest.json", b"", replace=True)
    assert Removing.tries == 3
