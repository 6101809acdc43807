"""Who waits for another process's packing says for whom, and what can be done."""

import multiprocessing
import os
import signal
import subprocess
import sys

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


_WITHOUT_GUARD = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from loaderkit import pack

context = multiprocessing.get_context({method!r})
with ProcessPoolExecutor(1, mp_context=context) as executor:
    pack([1, 2, 3], {path!r}, executor={executor})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "executor"), [("spawn", "executor"), ("forkserver", "lambda: executor")]
)
def test_a_script_that_its_own_workers_run_again_ends(tmp_path, method, executor):
    """The worker comes to the same call, and would wait for who waits for it."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {method}")
    script = tmp_path / "train.py"
    path = str(tmp_path / "c")
    source = _WITHOUT_GUARD.format(method=method, path=path, executor=executor)
    script.write_text(source)

    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False
    )

    assert run.returncode == 1
    assert "A new process would wait for ever for process" in run.stderr
    last_error = run.stderr[run.stderr.rindex("DatasetError") :]
    assert "has no line if __name__" in last_error
    assert 'put what the script does behind if __name__ == "__main__"' in last_error
