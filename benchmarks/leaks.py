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
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

import loaderkit
from benchmarks.harness import Row, report

if TYPE_CHECKING:
    from collections.abc import Callable

TESTS = Path(__file__).parents[1] / "tests" / "leaks"
EPOCHS, STEPS = 30, 10
LEAST = 4096
"""Bytes a step that count as a leak."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--psleak", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help="only these cases")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.psleak:
        print(json.dumps(_answers(_chosen(options), {"psleak": _psleak})))
        return
    report(
        "what watching costs, epochs of 10 real steps of about 20 ms",
        _costs(),
        save="leaks_cost" if options.save else None,
    )
    cases = _chosen(options)
    loaderkit.read_memory()
    answers = _answers(cases, DETECTORS)
    for name, said in _through_malloc().items():
        answers[name] |= said
    report(
        f"found and false alarms, {len(cases)} cases of {EPOCHS * STEPS} steps",
        _scores(cases, answers),
        save="leaks_found" if options.save else None,
    )
    for name, case in cases.items():
        wrong = [
            f"{each} (it failed)" if said is None else each
            for each, said in answers[name].items()
            if said != case.leaks
        ]
        if wrong:
            kind = "missed by" if case.leaks else "false alarm of"
            print(f"{name:<34} {kind} {', '.join(wrong)}")


def _loaderkit(step: Callable[[], Any]) -> bool:
    detector = loaderkit.LeakDetector("cpu", on_leak=lambda _: None)
    return detector.run(lambda: _epoch(step), epochs=EPOCHS).leaking


def _tracemalloc(step: Callable[[], Any]) -> bool:
    """Compare two snapshots, as the standard library's documentation does."""
    tracemalloc.start()
    for _ in range(EPOCHS // 3):
        _epoch(step)
    before = tracemalloc.take_snapshot()
    for _ in range(EPOCHS - EPOCHS // 3):
        _epoch(step)
    difference = tracemalloc.take_snapshot().compare_to(before, "lineno")
    steps = STEPS * (EPOCHS - EPOCHS // 3)
    return any(each.size_diff > LEAST * steps / 2 for each in difference)


def _resident(step: Callable[[], Any]) -> bool:
    """Compare resident memory before and after, past a third of the run."""
    process = psutil.Process()
    for _ in range(EPOCHS // 3):
        _epoch(step)
    gc.collect()
    before = process.memory_info().rss
    for _ in range(EPOCHS - EPOCHS // 3):
        _epoch(step)
    gc.collect()
    steps = STEPS * (EPOCHS - EPOCHS // 3)
    return bool(process.memory_info().rss - before > LEAST * steps / 2)


def _psleak(step: Callable[[], Any]) -> bool:
    import psleak

    case = psleak.MemoryLeakTestCase()
    try:
        case.execute(step, times=STEPS, tolerance=LEAST * STEPS // 2)
    except AssertionError:
        return True
    return False


def _memray(step: Callable[[], Any]) -> bool:
    """Look at what is left, place by place, as pytest-memray's limit_leaks does."""
    import memray

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.bin")
        with memray.Tracker(file, native_traces=False):
            for _ in range(EPOCHS):
                _epoch(step)
        records = memray.FileReader(file).get_leaked_allocation_records()
        return any(r.size > LEAST * EPOCHS * STEPS / 2 for r in records)


DETECTORS = {
    "loaderkit": _loaderkit,
    "RSS threshold": _resident,
    "tracemalloc, two snapshots": _tracemalloc,
    "memray, as limit_leaks": _memray,
}


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    cases = _cases()
    return {name: cases[name] for name in options.names or cases}


def _answers(cases: dict[str, Any], detectors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {each: _asked(ask, case) for each, ask in detectors.items()}
        for name, case in cases.items()
    }


def _through_malloc() -> dict[str, Any]:
    """Ask psleak in an interpreter of its own: it needs PYTHONMALLOC=malloc."""
    command = [sys.executable, "-m", "benchmarks.leaks", *sys.argv[1:], "--psleak"]
    more = {"PYTHONMALLOC": "malloc", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, env=os.environ | more, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _epoch(step: Callable[[], Any]) -> None:
    for _ in range(STEPS):
        step()


def _asked(ask: Callable[[Callable[[], Any]], bool], case: Any) -> bool | None:
    """Ask a detector in a forked process; None when it failed."""
    with tempfile.NamedTemporaryFile() as answer:
        pid = os.fork()
        if not pid:
            _answer(ask, case, answer.name)
        os.waitpid(pid, 0)
        text = Path(answer.name).read_text()
    _end_children(pid)
    return json.loads(text) if text else None


def _answer(ask: Callable[[Callable[[], Any]], bool], case: Any, file: str) -> None:
    os.setsid()
    said = None
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception):
        said = ask(case.make())
    Path(file).write_text(json.dumps(said))
    os._exit(0)


def _end_children(session: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, 9)


def _cases() -> dict[str, Any]:
    found: dict[str, Any] = {}
    sys.path.insert(0, str(TESTS))
    for name in ("cases", "corpus"):
        found |= importlib.import_module(name).CASES
    return found


def _scores(cases: dict[str, Any], answers: dict[str, Any]) -> list[Row]:
    rows = []
    leaks = [name for name, case in cases.items() if case.leaks]
    calm = [name for name in cases if name not in leaks]
    for each in [*DETECTORS, "psleak"]:
        found = sum(answers[name][each] is True for name in leaks)
        alarms = sum(answers[name][each] is True for name in calm)
        recall = 100 * found / max(1, len(leaks))
        rows.append(Row(f"{each}: leaks found", recall, found, len(leaks), "%", 1))
        share = 100 * alarms / max(1, len(calm))
        rows.append(Row(f"{each}: false alarms", share, alarms, len(calm), "%", 1))
    return rows


def _share_of_real_steps(epochs: int) -> tuple[float, loaderkit.LeakDetector]:
    """Measure what watching takes of real steps whose batches differ in size.

    Processor time, since the machine may be shared; steps of about 20 ms.

    Returns:
        Percent of the steps' time, and the detector.
    """
    model = torch.nn.Sequential(*[torch.nn.Linear(640, 640) for _ in range(6)])
    optimizer = torch.optim.Adam(model.parameters())
    detector = loaderkit.LeakDetector("cpu", on_leak=lambda _: None)
    begun = time.process_time()
    detector.start()
    watching, training = time.process_time() - begun, 0.0
    for _ in range(epochs):
        begun = time.process_time()
        for _ in range(STEPS):
            rows = int(torch.randint(40, 120, ()))
            optimizer.zero_grad()
            model(torch.rand(rows, 640)).square().mean().backward()
            optimizer.step()
        training += time.process_time() - begun
        begun = time.process_time()
        detector.end_epoch()
        watching += time.process_time() - begun
    begun = time.process_time()
    detector.finish()
    watching += time.process_time() - begun
    return 100 * watching / training, detector


def _costs() -> list[Row]:
    """Time what the detector does around real steps, and what is read alone."""
    _share_of_real_steps(2)  # loads modules
    shares = [_share_of_real_steps(EPOCHS)[0] for _ in range(5)]
    long_share, detector = _share_of_real_steps(200)
    start = time.perf_counter()
    detector.end_epoch()
    reading = time.perf_counter() - start
    start = time.perf_counter()
    detector.report()
    judged = time.perf_counter() - start
    start = time.perf_counter()
    loaderkit.read_memory("cpu")
    whole = time.perf_counter() - start
    code = "import time, pytest; s = time.perf_counter()\n"
    code += "import loaderkit.leaks.pytest_plugin; print(time.perf_counter() - s)"
    command = [sys.executable, "-c", code]
    plugin = min(float(subprocess.check_output(command)) for _ in range(3))
    values = [
        ("watching 30 epochs, of 0.5 %", statistics.median(shares), "%", 0.5),
        ("watching 200 epochs, of 0.5 %", long_share, "%", 0.5),
        ("an epoch's reading", 1e3 * reading, "ms", 1.0),
        ("judging a steady run", 1e3 * judged, "ms", 100.0),
        ("read_memory(), everything", 1e3 * whole, "ms", 500.0),
        ("importing the pytest plugin, of 15 ms", 1e3 * plugin, "ms", 15.0),
    ]
    return [Row(n, v, v, v, unit, limit / v) for n, v, unit, limit in values]


if __name__ == "__main__":
    main()
