"""Leak detectors on the same leaks and look-alikes; what watching costs.

Run it with ``python -m benchmarks.leaks [--save] [NAME ...]``.  The cases are
those of ``tests/leaks``; each detector sees each case in a forked process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import psutil
import torch

import loaderkit
from benchmarks.harness import Row, report

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TrainStep: TypeAlias = Callable[[], Any]
Detector: TypeAlias = Callable[[TrainStep], bool]
"""Runs a step over and over, and says whether it leaks."""


class Case(Protocol):
    """What ``tests/leaks/cases.py`` calls one."""

    leaks: bool

    def make(self) -> TrainStep: ...


Answers: TypeAlias = dict[str, dict[str, "bool | None"]]
"""By case and detector; None where the detector failed."""

TESTS = Path(__file__).parents[1] / "tests" / "leaks"
EPOCHS, STEPS = 30, 10
WARM_UP_EPOCHS = EPOCHS // 3
LEAST_BYTES = 4096
"""Bytes a step that count as a leak."""
LEAST_BYTES_AFTER_WARM_UP = LEAST_BYTES * STEPS * (EPOCHS - WARM_UP_EPOCHS) / 2
"""Half of what the least leak takes, so that the thresholds of others find it."""
LONG_RUN_EPOCHS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--psleak", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help="only these cases")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = _load_cases(options.names)
    if options.psleak:
        print(json.dumps(_ask_detectors(cases, {"psleak": _detect_with_psleak})))
        return

    report(
        "what watching costs, epochs of 10 real steps of about 20 ms",
        _measure_costs(),
        save="leaks_cost" if options.save else None,
    )

    # What it imports at first use must not be in the children's readings.
    loaderkit.read_memory()
    answers = _ask_detectors(cases, DETECTORS)
    for name, psleak_answer in _ask_psleak_in_new_process().items():
        answers[name] |= psleak_answer
    report(
        f"found and false alarms, {len(cases)} cases of {EPOCHS * STEPS} steps",
        _score_detectors(cases, answers),
        save="leaks_found" if options.save else None,
    )
    _print_wrong_answers(cases, answers)


def _load_cases(names: list[str]) -> dict[str, Case]:
    """Import the cases of the tests; of these names only, if there are any."""
    sys.path[:0] = [str(TESTS), str(TESTS.parent / "corpora")]
    cases: dict[str, Case] = {}
    for module_name in ("cases", "leaks_corpus"):
        cases |= importlib.import_module(module_name).CASES
    return {name: cases[name] for name in names or cases}


def _print_wrong_answers(cases: Mapping[str, Case], answers: Answers) -> None:
    for name, case in cases.items():
        wrong_detectors = []
        for detector, answer in answers[name].items():
            if answer is None:
                wrong_detectors.append(f"{detector} (it failed)")
            elif answer != case.leaks:
                wrong_detectors.append(detector)
        if wrong_detectors:
            kind = "missed by" if case.leaks else "false alarm of"
            print(f"{name:<34} {kind} {', '.join(wrong_detectors)}")


# The detectors.


def _run_epochs(step: TrainStep, epochs: int) -> None:
    for _ in range(epochs * STEPS):
        step()


def _detect_with_loaderkit(step: TrainStep) -> bool:
    detector = loaderkit.LeakDetector("cpu", on_leak=lambda _: None)
    return detector.run(lambda: _run_epochs(step, 1), epochs=EPOCHS).leaking


def _detect_with_tracemalloc(step: TrainStep) -> bool:
    """Compare two snapshots, as the standard library's documentation does."""
    tracemalloc.start()
    _run_epochs(step, WARM_UP_EPOCHS)
    before = tracemalloc.take_snapshot()
    _run_epochs(step, EPOCHS - WARM_UP_EPOCHS)
    differences = tracemalloc.take_snapshot().compare_to(before, "lineno")
    return any(line.size_diff > LEAST_BYTES_AFTER_WARM_UP for line in differences)


def _detect_by_resident_memory(step: TrainStep) -> bool:
    """Compare resident memory before and after, past a third of the run."""
    process = psutil.Process()
    _run_epochs(step, WARM_UP_EPOCHS)
    gc.collect()
    rss_before = process.memory_info().rss
    _run_epochs(step, EPOCHS - WARM_UP_EPOCHS)
    gc.collect()
    grown_bytes = process.memory_info().rss - rss_before
    return bool(grown_bytes > LEAST_BYTES_AFTER_WARM_UP)


def _detect_with_psleak(step: TrainStep) -> bool:
    import psleak

    case = psleak.MemoryLeakTestCase()
    try:
        case.execute(step, times=STEPS, tolerance=LEAST_BYTES * STEPS // 2)
    except AssertionError:
        return True
    return False


def _detect_with_memray(step: TrainStep) -> bool:
    """Look at what is left, line by line, as pytest-memray's limit_leaks does."""
    import memray

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "allocations.bin")
        with memray.Tracker(file, native_traces=False):
            _run_epochs(step, EPOCHS)
        records = memray.FileReader(file).get_leaked_allocation_records()
        limit_bytes = LEAST_BYTES * EPOCHS * STEPS / 2
        return any(record.size > limit_bytes for record in records)


DETECTORS: dict[str, Detector] = {
    "loaderkit": _detect_with_loaderkit,
    "RSS threshold": _detect_by_resident_memory,
    "tracemalloc, two snapshots": _detect_with_tracemalloc,
    "memray, as limit_leaks": _detect_with_memray,
}


# Asking them.


def _ask_detectors(
    cases: Mapping[str, Case], detectors: Mapping[str, Detector]
) -> Answers:
    return {
        case_name: {
            name: _ask_in_fork(detector, case) for name, detector in detectors.items()
        }
        for case_name, case in cases.items()
    }


def _ask_psleak_in_new_process() -> Answers:
    """Ask psleak in an interpreter of its own: it needs PYTHONMALLOC=malloc."""
    command = [sys.executable, "-m", "benchmarks.leaks", *sys.argv[1:], "--psleak"]
    variables = {"PYTHONMALLOC": "malloc", "PYTHONUNBUFFERED": "1"}
    process = subprocess.run(
        command, env=os.environ | variables, stdout=subprocess.PIPE, check=True
    )
    # Steps may print too; the answers are the last line.
    answers: Answers = json.loads(process.stdout.splitlines()[-1])
    return answers


def _ask_in_fork(detector: Detector, case: Case) -> bool | None:
    """Ask a detector in a forked process; None when it failed."""
    with tempfile.NamedTemporaryFile() as answer_file:
        pid = os.fork()
        if pid == 0:
            _write_answer_and_exit(detector, case, Path(answer_file.name))
        os.waitpid(pid, 0)
        answer = Path(answer_file.name).read_text()
    _kill_process_group(pid)
    return json.loads(answer) if answer else None


def _write_answer_and_exit(detector: Detector, case: Case, answer_file: Path) -> None:
    # A group of its own, so that the workers it leaves behind can be killed with it.
    os.setsid()
    answer = None
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception):
        answer = detector(case.make())
    answer_file.write_text(json.dumps(answer))
    # Neither the parent's exit handlers nor its buffers are this process's to run.
    os._exit(0)


def _kill_process_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _score_detectors(cases: Mapping[str, Case], answers: Answers) -> list[Row]:
    leaking = [name for name, case in cases.items() if case.leaks]
    steady = [name for name, case in cases.items() if not case.leaks]
    rows = []
    for detector in [*DETECTORS, "psleak"]:
        rows.append(
            _share_of_alarms(f"{detector}: leaks found", detector, leaking, answers)
        )
        rows.append(
            _share_of_alarms(f"{detector}: false alarms", detector, steady, answers)
        )
    return rows


def _share_of_alarms(
    title: str, detector: str, names: list[str], answers: Answers
) -> Row:
    """Give the percent of the cases called leaks; low and high are the counts."""
    alarms = sum(answers[name][detector] is True for name in names)
    percent = 100 * alarms / max(1, len(names))
    return Row(title, percent, alarms, len(names), "%", 1)


# What watching costs.


class WatchedRun(NamedTuple):
    """Training that a detector watched."""

    watching_percent: float
    """Of the steps' processor time."""
    detector: loaderkit.LeakDetector


def _measure_costs() -> list[Row]:
    """Time what the detector does around real steps, and what is read alone."""
    # The first run loads modules.
    _watch_training(epochs=2)
    percents = [_watch_training(EPOCHS).watching_percent for _ in range(5)]
    long_run = _watch_training(LONG_RUN_EPOCHS)

    return [
        _row_with_limit(
            "watching 30 epochs, of 0.5 %", statistics.median(percents), "%", 0.5
        ),
        _row_with_limit(
            "watching 200 epochs, of 0.5 %", long_run.watching_percent, "%", 0.5
        ),
        _row_with_limit(
            "an epoch's reading", _time_ms(long_run.detector.end_epoch), "ms", 1.0
        ),
        _row_with_limit(
            "judging a steady run", _time_ms(long_run.detector.report), "ms", 100.0
        ),
        _row_with_limit(
            "read_memory(), everything",
            _time_ms(lambda: loaderkit.read_memory("cpu")),
            "ms",
            500.0,
        ),
        _row_with_limit(
            "importing the pytest plugin, of 15 ms", _plugin_import_ms(), "ms", 15.0
        ),
    ]


def _row_with_limit(name: str, value: float, unit: str, limit: float) -> Row:
    return Row.of_one_value(name, value, unit, ratio=limit / value)


def _watch_training(epochs: int) -> WatchedRun:
    """Measure what watching takes of real steps whose batches differ in size.

    Processor time, since the machine may be shared; steps of about 20 ms.
    """
    model = torch.nn.Sequential(*[torch.nn.Linear(640, 640) for _ in range(6)])
    optimizer = torch.optim.Adam(model.parameters())
    detector = loaderkit.LeakDetector("cpu", on_leak=lambda _: None)

    def train_epoch() -> None:
        for _ in range(STEPS):
            rows = int(torch.randint(40, 120, ()))
            optimizer.zero_grad()
            model(torch.rand(rows, 640)).square().mean().backward()
            optimizer.step()

    watching_s = _processor_seconds(detector.start)
    training_s = 0.0
    for _ in range(epochs):
        training_s += _processor_seconds(train_epoch)
        watching_s += _processor_seconds(detector.end_epoch)
    watching_s += _processor_seconds(detector.finish)
    return WatchedRun(100 * watching_s / training_s, detector)


def _processor_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _time_ms(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def _plugin_import_ms(times: int = 3) -> float:
    """Time the plugin beside pytest, which imports it; the shortest of some."""
    program = "import time, pytest; start = time.perf_counter()\n"
    program += "import loaderkit.leaks.pytest_plugin\n"
    program += "print(time.perf_counter() - start)"
    command = [sys.executable, "-c", program]
    seconds: Iterable[float] = (
        float(subprocess.check_output(command)) for _ in range(times)
    )
    return 1e3 * min(seconds)


if __name__ == "__main__":
    main()
