"""Who waits for another process's packing says for whom, and what can be done."""

import multiprocessing
import os
import signal

import pytest
from held_locks import call_when_logged

from loaderkit import extend, open_cache, pack

FORK = multiprocessing.get_context("fork")


def two_of_which_the_packer_is_stopped():
    """Give two samples; who reads them stops itself in between."""
    yield 1
    os.kill(os.getpid(), signal.SIGSTOP)
    yield 2


def pack_to_folder(source, folder):
    pack(source, folder / "c", workers=0)
    return folder / "c"


def pack_to_store(source, folder):
    url = (folder / "store").as_uri()
    pack(source, url, workers=0, mirror=folder / "mirror")
    return url


def add_to_cache(source, folder):
    extend(folder / "c", source, workers=0)
    return folder / "c"


@pytest.mark.slow
@pytest.mark.parametrize("write", [pack_to_folder, pack_to_store, add_to_cache])
def test_a_packer_that_is_stopped_is_named_by_who_waits_for_it(write, tmp_path):
    if write is add_to_cache:
        pack([0], tmp_path / "c", workers=0)
    source = two_of_which_the_packer_is_stopped
    packer = FORK.Process(target=lambda: write(source(), tmp_path))
    packer.start()
    os.waitpid(packer.pid, os.WUNTRACED)

    # Killed when it is said to be stopped, so that this test ends.
    with call_when_logged("it is stopped", packer.kill) as lines:
        path = write([3, 4], tmp_path)

    packer.join()
    assert f"waiting for process {packer.pid} on" in lines[0]
    assert f"kill -CONT {packer.pid}" in lines[1]
    assert list(open_cache(path))[-2:] == [3, 4]
