"""What is said of sending an object is what happens when it is sent."""

import array
import io
import multiprocessing
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import types
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from holders import Holder, LeavesOut, Slotted

from loaderkit import SafeDataset
from loaderkit.memory import tensorless_pickles
from loaderkit.sending import can_fork, find_obstacle

SPAWN, FORK = multiprocessing.get_context("spawn"), multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _no_file_is_run_first(monkeypatch):
    """As in a worker of xdist: "pytest" might make modules in a new process."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))


def why_unsendable(parts, method):
    """Say what is in the way; empty where nothing is."""
    obstacle = find_obstacle(parts, method)
    return "" if obstacle is None else obstacle.why


def of_nowhere():
    """Give an object whose module no file can give again."""
    module = types.ModuleType("made_at_run_time")
    exec("class Made: pass", module.__dict__)
    sys.modules["made_at_run_time"] = module
    return module.Made()


HELD = {
    "numbers": lambda: [1, 2.5, "text", None],
    "array": lambda: np.arange(3),
    "tensor": lambda: torch.arange(3),
    "shared number": lambda: SPAWN.Value("i", 3),
    "shared array": lambda: SPAWN.Array("d", 3),
    "raw array": lambda: SPAWN.RawArray("d", 3),
    "lock": SPAWN.Lock,
    "event": SPAWN.Event,
    "condition": SPAWN.Condition,
    "queue": SPAWN.Queue,
    "simple queue": SPAWN.SimpleQueue,
    "pipe": lambda: SPAWN.Pipe()[0],
    "lock of a fork": FORK.Lock,
    "queue of a fork": FORK.Queue,
    "lock of threads": threading.Lock,
    "lambda": lambda: lambda: None,
    "generator": lambda: (number for number in range(3)),
    "database": lambda: sqlite3.connect(":memory:"),
    "stream": lambda: sys.stdout,
    "bytes in memory": lambda: io.BytesIO(b"abc"),
    "builtin": lambda: len,
    "class of nowhere": of_nowhere,
}


def fails_to_arrive(thing):
    """Send a thing to a process that Python starts anew."""
    process = SPAWN.Process(target=id, args=(thing,))
    try:
        process.start()
    except Exception:  # noqa: BLE001 -- whatever pickle raises
        return True
    process.join()
    return process.exitcode != 0


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD)
def test_what_is_said_not_to_arrive_is_what_does_not(name):
    held = HELD[name]()
    # Test files are modules that only pytest can import.
    thing = types.SimpleNamespace(held=[held])

    assert bool(why_unsendable({"dataset": thing}, "spawn")) == fails_to_arrive(thing)

    if isinstance(held, sqlite3.Connection):
        held.close()  # from Python 3.13 on it warns otherwise


LARGE = {
    "bytes": lambda size: b"x" * size,
    "bytearray": bytearray,
    "text": lambda size: "x" * size,
    "array of Python": lambda size: array.array("b", bytes(size)),
    "array": lambda size: np.zeros(size, np.uint8),
    "read-only array": lambda size: np.frombuffer(bytes(size), np.int16),
    "order of Fortran": lambda size: np.zeros((size // 32, 4), order="F"),
    "view with gaps": lambda size: np.zeros(size)[::2],
    "no axes": lambda size: np.zeros((), f"V{size}"),
    "dates": lambda size: np.zeros(size // 8, "datetime64[s]"),
    "texts": lambda size: np.array(["x"] * size, dtype=object),
    "records": lambda size: np.zeros(size // 16, [("x", "f8"), ("y", "i8")]),
    "buffer": lambda size: pickle.PickleBuffer(bytearray(size)),
    "tensor": lambda size: torch.zeros(size),
    "lambda beside it": lambda size: (np.zeros(size), lambda: None),
    "mapping": lambda size: types.MappingProxyType({"x": np.zeros(size)}),
}


@pytest.mark.parametrize("size", [64, 65_536 - 64, 65_536, 1 << 20])
@pytest.mark.parametrize("name", LARGE)
def test_what_is_large_can_be_sent_as_pickle_can(name, size):
    held = LARGE[name](size)
    try:
        ForkingPickler(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(held)
    except Exception:  # noqa: BLE001 -- whatever pickle raises
        is_sent = False
    else:
        is_sent = True

    assert bool(why_unsendable({"dataset": held}, "spawn")) is not is_sent
    assert bool(tensorless_pickles.why_unsendable(held)) is not is_sent


def test_the_part_that_cannot_be_sent_is_named():
    part = types.SimpleNamespace(reader=types.SimpleNamespace(function=lambda: None))

    reason = why_unsendable({"collate_fn": len, "dataset": part}, "spawn")

    assert reason.startswith("dataset.reader.function: ")
    reason = why_unsendable({"dataset": Holder(of_nowhere())}, "spawn")
    assert "module without a file" in reason


def test_a_device_or_an_open_file_is_not_forked(tmp_path):
    assert can_fork(dataset=Holder(None))
    with sqlite3.connect(tmp_path / "rows.db") as database:
        assert not can_fork(dataset=Holder(database))
    database.close()


MANY_TENSORS = """
import multiprocessing, resource, sys, torch, loaderkit

class Views:
    def __init__(self, count):
        self.bases = [torch.zeros(2) for _ in range(count)]
        self.views = [base[:1] for base in self.bases]
        self.large = torch.arange(1 << 18)
    def __len__(self):
        return len(self.views)
    def __getitem__(self, row):
        self.bases[row][0] = self.large[row]
        return {"x": self.views[row].clone()}

class Stream(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.views = Views(count)
    def __iter__(self):
        return map(self.views.__getitem__, range(len(self.views)))

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
    for dataset in (Views(400), Stream(400)):
        loader = loaderkit.build_loader(dataset, num_workers=1, batch_size=50)
        rows = torch.cat([batch["x"] for batch in loader]).flatten()
        print(rows.int().tolist())
    cache = loaderkit.pack(Views(400), sys.argv[1] + "/asked.lk", workers=1)
    print([int(sample["x"]) for sample in cache])
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    cache = loaderkit.pack([{"x": i} for i in range(20_000)], sys.argv[1] + "/c.lk")
    print(len(cache), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
"""


@pytest.mark.slow
def test_more_tensors_than_open_files_are_sent_and_still_share_memory(tmp_path):
    """By loaders and by a packing worker; what lies in a list is sent to nobody."""
    script = tmp_path / "views.py"
    script.write_text(MANY_TENSORS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    run = subprocess.run(
        [sys.executable, "-W", "ignore", script, tmp_path],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )

    wanted = str(list(range(400)))
    assert run.stdout.splitlines() == [wanted] * 3 + ["20000 0.0"], run.stderr


def of_local_class(base, *arguments):
    """Give an object of a class that pickle cannot name."""

    class Local(base):
        pass

    return Local(*arguments)


class Counting(SafeDataset):
    """Four samples."""

    def keys(self):
        return range(4)

    def load(self, number):
        return {"x": torch.full((2,), float(number))}


def opened(base, folder):
    """Give a dataset that has mapped files and locks, which it does not send."""
    dataset = of_local_class(base, None, folder / "c")
    assert len(dataset) == 4
    assert dataset[0]["x"].sum() == 0
    return dataset


UNSENDABLE = {
    "local class": lambda _: of_local_class(Holder, 3),
    "local class that leaves out": lambda _: of_local_class(LeavesOut),
    "held local class": lambda _: Holder(of_local_class(LeavesOut)),
    "beside what is left out": lambda _: Holder([LeavesOut(), lambda: None]),
    "slots": lambda _: Slotted(threading.Lock()),
    "slots of a local class": lambda _: of_local_class(Slotted, 3),
    "opened dataset": lambda folder: opened(Counting, folder),
    "held dataset": lambda folder: Holder(opened(Counting, folder)),
}


@pytest.mark.parametrize("name", UNSENDABLE)
def test_what_is_said_to_be_in_the_way_is_what_pickle_stumbles_over(tmp_path, name):
    thing = UNSENDABLE[name](tmp_path)
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)) as refusal:
        ForkingPickler.dumps(thing)

    reason = why_unsendable({"dataset": thing}, "spawn")

    assert str(refusal.value) in reason


def function_in_a_function():
    """Give a function that pickle cannot name."""

    def local(sample):
        return sample

    return local


LEFT_OUT = "make it when a sample is first read, and leave it out in __getstate__"
FIXES = {
    "lambda": (lambda: lambda: None, "def a function at the top of a module"),
    "local function": (function_in_a_function, "define local at the top of a module"),
    "local class": (
        lambda: of_local_class(Holder, 3),
        "define Local at the top of a module",
    ),
    "class of nowhere": (of_nowhere, "write it into a file beside"),
    "lock": (threading.Lock, LEFT_OUT),
    "stream": (lambda: sys.stdout, LEFT_OUT),
    "generator": (lambda: (number for number in range(3)), LEFT_OUT),
}


@pytest.mark.parametrize("name", FIXES)
@pytest.mark.parametrize("hold", [lambda held: held, Holder, Slotted])
def test_what_to_do_follows_from_what_is_in_the_way(name, hold):
    make, fix = FIXES[name]

    obstacle = find_obstacle({"transform": hold(make())}, "spawn")

    assert obstacle.fix.startswith(fix)


def test_what_an_object_leaves_out_of_its_pickle_is_not_in_the_way():
    assert why_unsendable({"dataset": Holder(LeavesOut())}, "spawn") == ""
