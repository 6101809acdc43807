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

from loaderkit.cache.folder_storage import FolderStorage
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


def test_what_a_killed_writer_left_goes_after_an_hour(uploading):
    process, folder, pipe = uploading

    def kill():
        wait_for_partial_file(folder, process, len(HALF))
        process.kill()
        process.join()

    with pytest.raises(BrokenPipeError):
        feed(pipe, 2, kill)
    store = FolderStorage(folder)
    store.commit("manifest.json", b"early", replace=True)
    assert len(partial_files(folder)) == 1
    set_clock_forward(folder, 1.1)
    store.commit("manifest.json", b"late", replace=True)
    assert not partial_files(folder)


def test_a_file_that_is_always_removed_is_an_error_in_the_end(tmp_path):
    class Removing(FolderStorage):
        tries = 0

        def _remove_abandoned_files(self, just_written):
            type(self).tries += 1
            just_written.unlink()

    with pytest.raises(CacheError, match=r"manifest\.json could not be written"):
        Removing(tmp_path).commit("manifest.json", b"", replace=True)
    assert Removing.tries == 3
