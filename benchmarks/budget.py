"""Estimates of a step's peak, and recognising what ran out of memory.

Run it with ``python -m benchmarks.budget [--save]``.  The
truth is what the step really allocates on this CPU; models are those of
``tests/budget``.  Contestants that cannot run a model count as 100 % off.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

import loaderkit
from benchmarks.harness import MIB, Row, report
from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.extrapolate import measure_points, size_of
from loaderkit.budget.step.fake_tensors import fake_batch
from loaderkit.budget.step.measure import held_bytes, measure_step
from loaderkit.budget.step.train_step import Step, call_model, loss_of, run_step
from loaderkit.nests import flatten_tensors

MakeModel: TypeAlias = Callable[[], Any]
Estimator: TypeAlias = Callable[[MakeModel, Any], float]
"""Gives the peak of a training step in bytes, of the model and its batch."""
Recognizer: TypeAlias = Callable[[str], bool]
"""Says whether a message is of a step that ran out of memory."""

TESTS = Path(__file__).parents[1] / "tests" / "budget"
MESSAGES = TESTS.parent / "corpora" / "oom_messages.json"
GRAPHS_A_BATCH = 64
ROWS_A_BATCH = 128
COPIES_WITH_ADAM = 4.0
"""Of each parameter: weight, gradient, two moments."""
LEAST_ERROR = 1e-5
"""An estimate without any error must not be divided by."""


class StepCase(NamedTuple):
    """A step to estimate."""

    make_model: MakeModel
    batch: Any


class Trial(NamedTuple):
    """What came of one estimate."""

    error: float
    """As a share of the true peak."""
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()

    cases = _load_cases()
    trials = _try_estimators(cases)
    errors = {
        name: [trial.error for trial in estimator_trials]
        for name, estimator_trials in trials.items()
    }
    report(
        f"median error of the peak, {len(cases)} models",
        _rows_of_errors(errors, statistics.median),
        save="budget_median" if options.save else None,
    )
    report(
        "largest error of the peak",
        _rows_of_errors(errors, max),
        save="budget_worst" if options.save else None,
    )
    report(
        "seconds an estimate",
        _rows_of_seconds(trials),
        save="budget_seconds" if options.save else None,
    )

    messages = json.loads(MESSAGES.read_text())
    report(
        f"out-of-memory messages recognised, of {len(messages)}",
        _score_recognizers(messages),
        save="budget_messages" if options.save else None,
    )


def _load_cases() -> dict[str, StepCase]:
    """Import the models of the tests."""
    sys.path.insert(0, str(TESTS))
    models = importlib.import_module("models")
    batch = models.graphs(GRAPHS_A_BATCH)
    cases = {
        name: StepCase(make_model, batch) for name, make_model in models.GRAPHS.items()
    }
    for name, (make_model, make_rows) in models.DENSE.items():
        cases[name] = StepCase(make_model, make_rows(ROWS_A_BATCH))
    return cases


# The estimators.


def _estimate_by_parameters(make_model: MakeModel, batch: Any) -> float:
    parameter_bytes = held_bytes(list(make_model().parameters()))
    return COPIES_WITH_ADAM * parameter_bytes + held_bytes(flatten_tensors(batch))


def _estimate_by_saved_tensors(make_model: MakeModel, batch: Any) -> float:
    """Parameters and what autograd saves, from a real forward pass."""
    model = make_model()
    # By address: what is saved twice, or as a view, takes its memory once.
    storage_bytes: dict[int, int] = {}

    def note_storage(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storage_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note_storage, lambda saved: saved):
        loss_of(call_model(model, batch, paired=False), batch, None)
    parameter_bytes = held_bytes(list(model.parameters()))
    return COPIES_WITH_ADAM * parameter_bytes + sum(storage_bytes.values())


def _estimate_with_torchinfo(make_model: MakeModel, batch: Any) -> float:
    """What torchinfo calls the estimated total size."""
    import torchinfo

    summary = torchinfo.summary(make_model(), input_data=[batch], verbose=0)
    return float(
        summary.total_input + summary.total_output_bytes + summary.total_param_bytes
    )


def _estimate_with_mem_tracker(make_model: MakeModel, batch: Any) -> float:
    """Torch's own MemTracker under FakeTensorMode."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_batch(fake_mode, batch)
    with fake_mode:
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *flatten_tensors(fake))
        with tracker:
            # Adam makes its moments in the first step: the second one has the peak.
            for _ in range(2):
                run_step(model, fake, optimizer, Step())
                tracker.reset_mod_stats()
    peaks = tracker.get_tracker_snapshot("peak")
    return float(max(device_peak["Total"] for device_peak in peaks.values()))


def _estimate_by_small_steps(make_model: MakeModel, batch: Any) -> float:
    """A straight line through small real steps."""
    points = measure_points(make_model(), batch, Step())
    if points is None:
        return 0.0
    return float(max(points.extended(size_of(batch)).values()))


def _estimate_with_loaderkit(make_model: MakeModel, batch: Any) -> float:
    return float(estimate(make_model(), batch, Step()).peak)


ESTIMATORS: dict[str, Estimator] = {
    "4 x parameters": _estimate_by_parameters,
    "parameters and saved tensors": _estimate_by_saved_tensors,
    "torchinfo": _estimate_with_torchinfo,
    "two small real steps, extended": _estimate_by_small_steps,
    "torch MemTracker, fake tensors": _estimate_with_mem_tracker,
    "loaderkit": _estimate_with_loaderkit,
}


def _try_estimators(cases: dict[str, StepCase]) -> dict[str, list[Trial]]:
    """Print a line of errors a case, and give all trials by estimator."""
    trials: dict[str, list[Trial]] = {name: [] for name in ESTIMATORS}
    # Its first use imports modules, which is not of the first model's time.
    _estimate_with_loaderkit(lambda: torch.nn.Linear(2, 2), torch.zeros(1, 2))
    for case_name, case in cases.items():
        torch.manual_seed(0)
        measured = measure_step(case.make_model(), case.batch, Step())
        true_peak = max(measured.values())
        cells = []
        for name, estimator in ESTIMATORS.items():
            trial = _try_estimator(estimator, case, true_peak)
            trials[name].append(trial)
            cells.append(f"{trial.error:9.3%}")
        print(f"{case_name:24}{true_peak / MIB:9.1f} MiB {' '.join(cells)}")
    return trials


def _try_estimator(estimator: Estimator, case: StepCase, true_peak: int) -> Trial:
    torch.manual_seed(0)
    start = time.perf_counter()
    try:
        error = abs(estimator(case.make_model, case.batch) / true_peak - 1)
    except Exception:  # noqa: BLE001 -- many cannot run many of the models
        error = 1.0
    return Trial(error, time.perf_counter() - start)


def _rows_of_errors(
    errors: dict[str, list[float]], summarize: Callable[[list[float]], float]
) -> list[Row]:
    """Give errors in percent; the ratio says how many times the first's is as large."""
    baseline = summarize(next(iter(errors.values())))
    rows = []
    for name, values in errors.items():
        error = summarize(values)
        ratio = baseline / max(error, LEAST_ERROR)
        low, high = 100 * min(values), 100 * max(values)
        rows.append(Row(name, 100 * error, low, high, "%", ratio))
    return rows


def _rows_of_seconds(trials: dict[str, list[Trial]]) -> list[Row]:
    seconds = {
        name: [trial.seconds for trial in estimator_trials]
        for name, estimator_trials in trials.items()
    }
    baseline_s = statistics.median(next(iter(seconds.values())))
    rows = []
    for name, values in seconds.items():
        median_s = statistics.median(values)
        low_s, high_s = min(values), max(values)
        rows.append(Row(name, median_s, low_s, high_s, "s", baseline_s / median_s))
    return rows


# Recognising messages.


def _score_recognizers(messages: list[dict[str, Any]]) -> list[Row]:
    """Count the sure ones recognised; low and high are false and true alarms."""
    texts_of_oom = [
        message["text"] for message in messages if message["states"]["is_oom"] is True
    ]
    texts_of_others = [
        message["text"] for message in messages if message["states"]["is_oom"] is False
    ]
    rows: list[Row] = []
    for name, recognizes in _make_recognizers().items():
        hits = sum(map(recognizes, texts_of_oom))
        false_alarms = sum(map(recognizes, texts_of_others))
        baseline = rows[0].median if rows else hits
        title = f"{name} ({false_alarms} false)"
        ratio = hits / max(baseline, 1)
        rows.append(Row(title, hits, hits, len(texts_of_oom), "found", ratio))
    return rows


def _make_recognizers() -> dict[str, Recognizer]:
    """Set up what is installed here."""
    recognizers: dict[str, Recognizer] = {}
    with contextlib.suppress(ImportError):
        from lightning.pytorch.utilities.memory import is_oom_error

        recognizers["Lightning"] = lambda text: bool(is_oom_error(RuntimeError(text)))
    with contextlib.suppress(ImportError):
        from accelerate.utils.memory import should_reduce_batch_size

        recognizers["accelerate"] = lambda text: bool(
            should_reduce_batch_size(RuntimeError(text))
        )
    recognizers["loaderkit"] = lambda text: loaderkit.diagnose_oom(text).is_oom is True
    return recognizers


if __name__ == "__main__":
    main()
