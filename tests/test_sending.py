"""What is said of sending an object is what happens when it is sent."""

import io
import multiprocessing
import sqlite3
import sys
import threading
import types

import numpy as np
import pytest
import torch

from loaderkit.sending import can_fork, why_unsendable

SPAWN, FORK = multiprocessing.get_context("spawn"), multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _no_file_is_run_first(monkeypatch):
    """As in a worker of xdist: "pytest" might make modules in a new process."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))


class Holder:
    """Holds something, as a dataset holds its counter or lock."""

    def __init__(self, held):
        self.held = held


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
