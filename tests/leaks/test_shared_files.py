"""Files in /dev/shm: ours are found and named, whatever else lies or comes there."""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from loaderkit import LeakDetector
from loaderkit.leaks.shared_files import SharedFiles, kind_of_file

pytestmark = pytest.mark.skipif(
    not Path("/dev/shm").exists(), reason="there is no /dev/shm here"
)
PREFIX = f"loaderkit_test_{os.getpid()}_"
OLD_FILES = 600
BESIDE = """
import os, sys, time
prefix, newest_files = sys.argv[1], int(sys.argv[2])
for n in range(100_000):
    open(f"/dev/shm/{prefix}beside_{n}", "wb").write(bytes(50_000))
    if n >= newest_files:
        os.unlink(f"/dev/shm/{prefix}beside_{n - newest_files}")
    time.sleep(0.005)
"""


@pytest.fixture(autouse=True)
def no_files_stay():
    yield
    for file in Path("/dev/shm").glob(f"{PREFIX}*"):
        file.unlink()


@pytest.fixture
def old_files():
    """Leave hundreds of files of somebody else, made before anything is watched."""
    for n in range(OLD_FILES):
        Path(f"/dev/shm/{PREFIX}old_{n}").write_bytes(b"old")
    time.sleep(0.05)


@pytest.fixture
def beside(request):
    """Run another process that makes files there all the time."""
    newest_files = getattr(request, "param", 100_000)
    command = [sys.executable, "-c", BESIDE, PREFIX, str(newest_files)]
    with subprocess.Popen(command) as other:
        while not Path(f"/dev/shm/{PREFIX}beside_0").exists():
            time.sleep(0.01)
        yield
        other.kill()


def sharing_memory(*, unlink):
    """Make a shared segment an epoch, as workers do that send arrays.

    Names are our own: psm_ is what other processes of this machine make, too.
    """
    numbers = itertools.count()

    def epoch():
        name = f"{PREFIX}segment_{next(numbers)}"
        segment = SharedMemory(name, create=True, size=200_000)
        resource_tracker.unregister(f"/{name}", "shared_memory")
        segment.buf[:] = bytes(200_000)
        segment.close()
        if unlink:
            Path(f"/dev/shm/{name}").unlink()

    return epoch


def assert_named(report):
    assert report.leaking, str(report)
    assert [counter.name for counter in report.leaks] == ["shm_files"]
    assert report.bytes_per_epoch == 200_704
    kind = kind_of_file(f"/dev/shm/{PREFIX}segment_0")
    assert f"files {kind} grows" in str(report)
    assert "unlink()" in str(report)


@pytest.mark.slow
def test_shared_memory_that_is_never_unlinked_is_named_with_its_file():
    report = LeakDetector("cpu", on_leak=id).run(
        sharing_memory(unlink=False), epochs=12
    )

    assert_named(report)
    assert report.notes == ()


@pytest.mark.slow
def test_its_twin_that_unlinks_is_steady():
    epoch = sharing_memory(unlink=True)

    assert LeakDetector("cpu").run(epoch, epochs=12).ok


@pytest.mark.slow
@pytest.mark.usefixtures("old_files")
def test_it_is_named_among_hundreds_of_old_files():
    report = LeakDetector("cpu", on_leak=id).run(
        sharing_memory(unlink=False), epochs=12
    )

    assert_named(report)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [100_000, 10], indirect=True)
@pytest.mark.usefixtures("old_files", "beside")
def test_it_is_named_while_another_process_makes_files():
    report = LeakDetector("cpu", on_leak=id).run(
        sharing_memory(unlink=False), epochs=12
    )

    assert_named(report)
    kind = kind_of_file(f"/dev/shm/{PREFIX}beside_0")
    assert report.notes == (f"files {kind} are made by another process: left out",)


@pytest.mark.slow
@pytest.mark.usefixtures("old_files", "beside")
def test_what_another_process_leaves_there_is_no_leak_of_ours():
    report = LeakDetector("cpu").run(lambda: time.sleep(0.02), epochs=12)

    assert report.verdict == "steady"
    assert "are made by another process: left out" in str(report)


@pytest.mark.usefixtures("old_files")
def test_a_look_asks_new_files_for_their_size_and_no_old_ones():
    asked = []

    class Entry:
        """What os.scandir gives, and notes who is asked for more than a name."""

        def __init__(self, entry):
            self.entry = entry
            self.path = entry.path
            self.inode, self.is_dir = entry.inode, entry.is_dir

        def stat(self, *, follow_symlinks):
            asked.append(self.path)
            return self.entry.stat(follow_symlinks=follow_symlinks)

    files = SharedFiles(scan=lambda folder: map(Entry, os.scandir(folder)))
    at_first = [path for path in asked if PREFIX in path]
    asked.clear()
    for n in range(3):
        Path(f"/dev/shm/{PREFIX}new_{n}").write_bytes(bytes(4096))
    files.note(1, always=True)

    assert len(at_first) == OLD_FILES
    paths = sorted(path for path in asked if PREFIX in path)
    assert paths == [f"/dev/shm/{PREFIX}new_{n}" for n in range(3)]
    epochs, values = files.series_by_kind()[kind_of_file(paths[0])]
    assert (list(epochs), list(values)) == ([1], [3 * 4096])


def test_a_name_that_is_used_again_is_a_new_file():
    file = Path(f"/dev/shm/{PREFIX}again")
    file.write_bytes(b"old")
    time.sleep(0.05)
    files = SharedFiles()
    Path(f"{file}_2").write_bytes(bytes(8192))  # takes the next inode
    file.unlink()
    file.write_bytes(bytes(4096))
    files.note(1, always=True)

    assert list(files.series_by_kind()[kind_of_file(str(file))][1]) == [4096]


def test_new_files_are_found_in_folders_too_and_old_folders_are_not_entered():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=PREFIX) as folder:
        Path(folder, "old").mkdir()
        Path(folder, "old", "file").write_bytes(bytes(4096))
        time.sleep(0.05)
        files = SharedFiles()
        files.note(0, always=True)
        Path(folder, "new").write_bytes(bytes(8192))
        files.note(1, always=True)
        grown = files.grown_late()
    files.note(2, always=True)

    kinds = {kind for kind in files.series_by_kind() if kind_of_file(folder) in kind}
    assert kinds == {kind_of_file(folder) + "/new"}
    assert list(files.series(kinds)[1]) == [0, 8192, 0]
    assert grown[kind_of_file(folder) + "/new"] == 8192


def test_looking_at_many_files_waits_until_it_costs_little():
    def slow(folder):
        time.sleep(0.05)  # the next look is due after 50 s
        return os.scandir(folder)

    files = SharedFiles(scan=slow)
    for epoch in range(3):
        Path(f"/dev/shm/{PREFIX}{epoch}").write_bytes(b"new")
        files.note(epoch, always=False)
    Path(f"/dev/shm/{PREFIX}3").write_bytes(b"new")
    files.note(3, always=True)

    assert list(files.series()[0]) == [0, 3]


def test_kinds_beyond_the_sixteenth_are_summed_up():
    files = SharedFiles()
    for letter in "abcdefghijklmnopqrst":
        Path(f"/dev/shm/{PREFIX}{letter}").write_bytes(bytes(4096))
    files.note(1, always=True)

    own = {k: v for k, (_, v) in files.series_by_kind().items() if "_test_" in k}
    assert len(files.series_by_kind()) == 17
    assert next(iter(files.series()[1])) >= 20 * 4096
    assert len(own) <= 16


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["psm_0a1b2c3d", "psm_deadbeef"], "psm_*"),
        (["sem.mp-uc15als3", "sem.mp-abcdefgh"], "sem.mp-*"),
        (["tmpx7p6f84y", "tmp_ssmsqzp"], "tmp*"),
        (["torch_12_3456_7", "torch_9_1_10"], "torch_*_*_*"),
        (["cache_c0ffee00c0ffee00", "cache_17"], "cache_*"),
    ],
)
def test_names_differ_in_numbers_and_random_parts(names, kind):
    assert {kind_of_file(f"/dev/shm/{name}") for name in names} == {f"/dev/shm/{kind}"}
