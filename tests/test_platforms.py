"""The main paths work where Python lacks what it lacks on Windows and on macOS."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from loaderkit.cache.durable import sync_folder
from loaderkit.memory.clibrary import c_library

SIMULATION = Path(__file__).with_name("simulated_platform.py")


@pytest.fixture
def folder_on_disk():
    """A folder outside of /dev/shm, which the other platforms do not have."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["windows", "macos"])
def test_every_main_path_works_without_what_the_platform_lacks(
    folder_on_disk, platform
):
    # A home of its own: what tests on this system have mirrored has left lock files of
    # fcntl's, and without fcntl a lock file that is there means that it is held.
    environment = os.environ | {"XDG_CACHE_HOME": str(folder_on_disk / "home")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SIMULATION, platform, folder_on_disk],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = json.loads((folder_on_disk / "outcomes.json").read_text())
    assert "has no attribute 'memfd_create'" in outcomes.pop("planted")
    failures = {k: v for k, v in outcomes.items() if v != "fine"}
    # What the commands printed says more than that they failed.
    assert failures == {}, done.stdout[-3000:]
    assert "pack with a spawned worker" in outcomes


@pytest.mark.slow
def test_the_c_library_is_this_processes():
    assert c_library() is c_library()
    assert hasattr(c_library(), "malloc")


def test_a_folder_that_is_not_there_cannot_be_synced(tmp_path):
    sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "nowhere")
