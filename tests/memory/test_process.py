"""What a process holds: each counter moves when the thing is planted."""

import mmap
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from loaderkit.memory import process
from loaderkit.memory.counters import COUNTERS, WorkerName, unit_of, words_of

MIB = 1 << 20


def change_since(name, before):
    return process.quick_counters()[name] - before[name]


@pytest.fixture
def before():
    process.quick_counters()
    return process.quick_counters()


def test_every_counter_has_words_and_a_unit():
    for name in process.quick_counters():
        assert words_of(name)
        assert unit_of(name) == COUNTERS[name].unit
    assert words_of(WorkerName.of(12)) == "private memory of worker 12"


def test_memory_that_is_given_out_counts_and_is_gone_when_it_is_freed(before):
    tensor = torch.ones(16 * MIB)  # past 32 MiB malloc asks the kernel for fresh pages

    assert change_since("malloc", before) == pytest.approx(64 * MIB, abs=MIB)
    assert change_since("anonymous", before) > 32 * MIB

    del tensor
    assert change_since("malloc", before) < MIB


def test_free_pieces_do_not_count_as_given_out():
    blocks = [bytearray(3000) for _ in range(2000)]
    full = process.malloc_heap()

    del blocks[::2]

    holed = process.malloc_heap()
    assert holed.used_bytes < full.used_bytes - 2 * MIB
    assert holed.free_bytes > full.free_bytes + 2 * MIB


def test_shared_memory_counts_apart(before):
    with mmap.mmap(-1, 8 * MIB) as shared:
        shared.write(b"x" * 8 * MIB)

        assert change_since("shared", before) >= 8 * MIB
        assert change_since("malloc", before) < MIB


@pytest.fixture
def folder_on_disk():
    """A folder apart from those of tests, which a quick run has in memory."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_pages_of_a_file_are_no_private_memory(before, folder_on_disk):
    file = folder_on_disk / "pages"
    # In pieces: malloc may have 32 MiB in a hole of its heap, and then keeps the pages.
    with file.open("wb") as pages:
        for _ in range(32):
            pages.write(b"x" * MIB)

    mapped = np.memmap(file, mode="r")

    assert mapped.sum() > 0
    assert change_since("file_backed", before) > 16 * MIB
    assert change_since("anonymous", before) < 8 * MIB


def test_files_and_sockets_count(before, tmp_path):
    kinds = process.open_files()
    with (tmp_path / "a").open("w"), socket.socket():
        assert change_since("files", before) == 2
        assert process.open_files()["sockets"] == kinds["sockets"] + 1
        assert process.open_files()["regular_files"] == kinds["regular_files"] + 1

    assert change_since("files", before) == 0


def test_a_child_process_is_counted_until_it_ends(before):
    code = "print('ready', flush=True); input()"
    command = [sys.executable, "-S", "-c", code]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()

    assert change_since("children", before) == 1
    assert child.pid in process.children_of(os.getpid())
    assert "-c" in process.process_name(child.pid).split()

    child.communicate(b"\n")
    assert change_since("children", before) == 0
    assert process.process_name(child.pid) == "gone"
    assert process.process_anonymous(child.pid) is None


def test_a_childs_own_child_is_listed_behind_it():
    inner = "print('ready', flush=True); input()"
    code = (
        "import subprocess, sys;"
        f"subprocess.run([sys.executable, '-S', '-c', {inner!r}])"
    )
    command = [sys.executable, "-S", "-c", code]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()

    first, second = process.children_of(os.getpid())[-2:]

    assert first == child.pid
    assert process.children_of(child.pid) == [second]
    child.communicate(b"\n")


def test_a_thread_is_counted_while_it_runs():
    """In a forked process, where no thread of another test can end meanwhile."""

    def count_with_one_more():
        before = process.quick_counters()
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        with_thread = change_since("threads", before)
        stop.set()
        thread.join()
        queue.put((before["threads"], with_thread))

    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=count_with_one_more)
    child.start()

    assert queue.get() == (1, 1)
    child.join()


def test_files_that_are_mapped_are_counted(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"x" * 4096)
    before = process.mappings()

    maps = [np.memmap(file, mode="r") for _ in range(5)]

    assert process.mappings() - before >= 5 - 1
    assert len(maps) == 5


def test_a_process_is_seen_from_outside():
    code = "payload = bytearray(50 << 20); print('ready', flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()

        readings = process.counters_of(child.pid)

        assert 50 * MIB < readings["anonymous"] < 90 * MIB
        assert readings["files"] >= 3
        child.stdin.close()
    assert process.counters_of(child.pid) == {}


def test_shares_of_pages_are_added_up_over_processes():
    readings, missing = process.full_counters([os.getpid()])

    assert not missing
    assert 0 < readings["proportional"] <= readings["tree_proportional"]
    assert readings["private"] == readings["tree_private"]


def test_without_proc_psutil_tells_what_it_can(monkeypatch):
    # As on macOS and Windows: the folder cannot be taken away here.
    monkeypatch.setattr(process, "PROC", "/nowhere")

    readings = process.quick_counters()

    assert readings["resident"] > MIB
    assert readings["threads"] >= 1
    assert "anonymous" not in readings
    assert process.counters_of(2**30) == {}
    assert process.mappings() is None


def test_another_allocator_is_not_asked(monkeypatch):
    process._find_mallinfo.cache_clear()
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")

    assert process.malloc_heap() is None

    process._find_mallinfo.cache_clear()
