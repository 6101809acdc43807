"""Leaks and look-alikes of ``leak_cases``: what is called a leak, and who is blamed.

``python -m pytest tests/soak/leaks_of_strangers.py``, or for a table of every case
``python tests/soak/leaks_of_strangers.py [--of leak_cases] [NAME ...]``. Each case runs
in a forked process; what needs more epochs gets them, as often as it asks.
"""

import argparse
import contextlib
import gc
import importlib
import inspect
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import loaderkit

EPOCHS, STEPS, MOST_EPOCHS = 30, 10, 400
SETS = ("leak_cases", "leak_cases_blind", "leak_cases_third", "leak_cases_fourth")
VERDICTS = ("steady", "needs more epochs")
SHM, LEFT_OVER = Path("/dev/shm"), "stranger_"
"""How files begin that cases leave there."""


def load(name):
    return importlib.import_module(name).CASES


def lines_that_grow(make):
    lines, first = inspect.getsourcelines(make)
    return [first + i for i, line in enumerate(lines) if "# grows" in line]


def judge(case):
    """Run a case until it is decided; called in a process of its own."""
    torch.set_num_threads(1)
    step = case.make()

    def epoch():
        for _ in range(STEPS):
            step()

    epochs = EPOCHS
    first = report = loaderkit.LeakDetector("cpu", on_leak=lambda _: None).run(
        epoch, epochs=epochs
    )
    while case.leaks and report.verdict == "needs more epochs" and epochs < MOST_EPOCHS:
        epochs += report.more_epochs
        detector = loaderkit.LeakDetector("cpu", on_leak=lambda _: None)
        report = detector.run(epoch, epochs=min(epochs, MOST_EPOCHS))
    return {
        "first": first.verdict,
        "verdict": report.verdict,
        "epochs": report.epochs,
        "blame": [blame_of(growth, case) for growth in report.growths],
        "texts": report.growth_texts,
        "text": str(report),
    }


def blame_of(growth, case):
    """Tell whether a cause is right, not known or wrong; and its line."""
    subject = growth.text().split(": ")[0]
    names = [re.escape(name) for name in case.names]
    is_named = any(re.search(name, subject + growth.pattern) for name in names)
    holder = growth.holder
    if is_named:
        return "right" if is_right_line(holder, case.make) else "right, wrong line"
    if (holder is None or not holder.held) and growth.pattern in {
        "native",
        "unknown holder",
        "outside malloc",
        "frozen",
    }:
        return "not known"
    return "wrong"


def is_right_line(holder, make):
    """Tell whether no line is named, or one that is marked; a call may span three."""
    own_file = Path(inspect.getfile(make)).name
    if holder is None or own_file not in holder.line:
        return True
    # Of several lines that add to it, all are named, or the first and the last.
    numbers = [int(number) for number in re.findall(r"\.py:(\d+)", holder.line)]
    marked = lines_that_grow(make)
    return not marked or any(
        min(numbers) - 2 <= mark <= max(numbers) + 2 for mark in marked
    )


def in_fork(name, case):
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()
        os.close(reading)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            answer = judge(case)
        except BaseException as error:  # noqa: BLE001 -- told to the parent
            answer = {"verdict": "failed", "text": repr(error), "blame": []}
        with os.fdopen(writing, "w") as pipe:
            print(json.dumps({"name": name, "leaks": case.leaks} | answer), file=pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        # Not to its end: a process that the case started may hold the pipe open.
        answer = pipe.readline()
    os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return json.loads(answer or json.dumps({"name": name, "verdict": "died"}))


@pytest.fixture(scope="module", params=SETS)
def answers(request):
    return list(judge_all(load(request.param)))


def test_nearly_all_leaks_of_strangers_are_found(answers):
    leaks = [answer for answer in answers if answer["leaks"]]

    missed = [answer for answer in leaks if answer["verdict"] != "leaking"]

    assert len(missed) <= 0.02 * len(leaks), missed


def test_no_lookalike_is_called_a_leak(answers):
    lookalikes = [answer for answer in answers if not answer["leaks"]]

    assert [answer for answer in lookalikes if answer["verdict"] == "leaking"] == []
    assert all(answer["verdict"] in VERDICTS for answer in lookalikes)


def test_the_holder_is_right_or_not_known_and_never_wrong(answers):
    blamed = [answer for answer in answers if answer["leaks"]]

    wrong = [a for a in blamed if not set(a["blame"]) <= {"right", "not known"}]

    assert wrong == []
    assert sum("right" in answer["blame"] for answer in blamed) >= 0.9 * len(blamed)


def judge_all(cases):
    loaderkit.read_memory()
    loaderkit.LeakDetector("cpu")
    gc.collect()
    for name, case in cases.items():
        shared_before = set(SHM.iterdir())
        yield in_fork(name, case)
        for file in set(SHM.iterdir()) - shared_before:
            if file.name.startswith(LEFT_OVER):
                file.unlink(missing_ok=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", choices=SETS, default="leak_cases")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    cases = load(options.of)
    cases = {name: cases[name] for name in options.names or cases}
    for answer in judge_all(cases):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
