"""Run cases through the public API, each in a forked process of its own; print JSON.

``python run_cases.py [--epochs 30] [--of leaks_corpus] [--objects new] [NAME ...]``
"""

import argparse
import gc
import importlib
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "corpora"))
sys.path.insert(0, str(Path(__file__).parent))

import loaderkit

STEPS = 10


def run(case, epochs):
    """Judge one case; called in a process of its own."""
    torch.set_num_threads(1)
    step = case.make()

    def epoch():
        for _ in range(STEPS):
            step()

    detector = loaderkit.LeakDetector("cpu", on_leak=lambda report: None)
    report = detector.run(epoch, epochs=epochs)
    return {"verdict": report.verdict, "seconds": report.seconds, "text": str(report)}


def in_child(name, case, epochs):
    """Fork, so that torch is imported once; give a pipe to read the answer from."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        answer_through(writing, name, case, epochs)
    os.close(writing)
    return pid, name, reading


def answer_through(writing, name, case, epochs):
    # What a case prints when its objects end must not stand between the answers.
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        answer = run(case, epochs)
    except BaseException as error:  # noqa: BLE001 -- told to the parent
        answer = {"verdict": "failed", "seconds": 0, "text": repr(error)}
    with os.fdopen(writing, "w") as pipe:
        json.dump({"name": name, "leaks": case.leaks} | answer, pipe)
    os._exit(0)  # without waiting for the threads of a leak


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--of", choices=("cases", "leaks_corpus"), default="cases")
    parser.add_argument(
        "--objects",
        choices=("all", "new"),
        default="all",
        help="search all objects, or those alone that torch has not made when imported",
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if options.objects == "new":
        gc.freeze()
    table = importlib.import_module(options.of)
    todo = table.CASES
    with_pyg = getattr(table, "WITH_PYG", ())  # the corpus has none
    if options.names:
        todo = {name: todo[name] for name in options.names}
    loaderkit.read_memory()  # everything is imported before the first fork
    loaderkit.LeakDetector("cpu")
    gc.collect()
    # Those behind the others: PyG doubles the heap of whatever is forked from then on.
    waiting = sorted(todo.items(), key=lambda item: item[0] in with_pyg)
    running = []
    while waiting or running:
        while waiting and len(running) < options.jobs:
            name, case = waiting.pop(0)
            if name in with_pyg:
                importlib.import_module("torch_geometric.data")
            running.append(in_child(name, case, options.epochs))
        pid, name, reading = running.pop(0)
        with os.fdopen(reading) as pipe:
            answer = pipe.read() or json.dumps({"name": name, "verdict": "died"})
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
