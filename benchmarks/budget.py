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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import loaderkit
from benchmarks.harness import Row, report
from loaderkit.budget.estimate import estimate
from loaderkit.budget.fake_tensors import fake_batch
from loaderkit.budget.measure import held_bytes, measure_step, tensors_of
from loaderkit.budget.train_step import Step, call_model, loss_of, run_step

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[[], Any]

TESTS = Path(__file__).parents[1] / "tests" / "budget"
MESSAGES = TESTS / "known_messages.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    models = importlib.import_module("models")
    cases = {name: (make, models.graphs(64)) for name, make in models.GRAPHS.items()}
    cases |= {name: (make, rows(128)) for name, (make, rows) in models.DENSE.items()}
    errors, seconds = _estimates(cases)
    save = "budget_{}" if options.save else None
    for title, key, rows in (
        (f"median error of the peak, {len(cases)} models", "median", _middle(errors)),
        ("largest error of the peak", "worst", _largest(errors)),
        ("seconds an estimate", "seconds", _rows(seconds, "s")),
    ):
        report(title, rows, save=save and save.format(key))
    records = json.loads(MESSAGES.read_text())
    title = f"out-of-memory messages recognised, of {len(records)}"
    report(title, _recognised(records), save=save and save.format("messages"))


def _parameters(make: Make, batch: Any) -> float:
    """Four times the parameters: weights, gradients, two moments."""
    return 4.0 * held_bytes(list(make().parameters())) + held_bytes(tensors_of(batch))


def _saved(make: Make, batch: Any) -> float:
    """Parameters and what autograd saves, from a real forward pass."""
    model = make()
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss_of(call_model(model, batch, paired=False), batch, None)
    weights = held_bytes(list(model.parameters()))
    return 4.0 * weights + sum(storages.values())


def _torchinfo(make: Make, batch: Any) -> float:
    """What torchinfo calls the estimated total size."""
    import torchinfo

    found = torchinfo.summary(make(), input_data=[batch], verbose=0)
    return float(found.total_input + found.total_output_bytes + found.total_param_bytes)


def _torch_tools(make: Make, batch: Any) -> float:
    """Torch's own MemTracker under FakeTensorMode."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    held = fake_batch(fake, batch)
    with fake:
        model = make()
        optimizer = torch.optim.Adam(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *tensors_of(held))
        with tracker:
            for _ in range(2):
                run_step(model, held, optimizer, Step())
                tracker.reset_mod_stats()
    peak = tracker.get_tracker_snapshot("peak")
    return float(max(parts["Total"] for parts in peak.values()))


def _tiny(make: Make, batch: Any) -> float:
    """A straight line through small real steps."""
    from loaderkit.budget.extend import measure_points, size_of

    points = measure_points(make(), batch, Step())
    return float(max(points.extended(size_of(batch)).values())) if points else 0.0


def _ours(make: Make, batch: Any) -> float:
    return float(estimate(make(), batch, Step()).peak)


ESTIMATORS: dict[str, Callable[[Make, Any], float]] = {
    "4 x parameters": _parameters,
    "parameters and saved tensors": _saved,
    "torchinfo": _torchinfo,
    "two small real steps, extended": _tiny,
    "torch MemTracker, fake tensors": _torch_tools,
    "loaderkit": _ours,
}


def _estimates(cases: Any) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    errors: dict[str, list[float]] = {name: [] for name in ESTIMATORS}
    seconds: dict[str, list[float]] = {name: [] for name in ESTIMATORS}
    _ours(lambda: torch.nn.Linear(2, 2), torch.zeros(1, 2))
    for case, (make, batch) in cases.items():
        torch.manual_seed(0)
        truth = max(measure_step(make(), batch, Step()).values())
        line = []
        for name, estimator in ESTIMATORS.items():
            torch.manual_seed(0)
            begun = time.perf_counter()
            try:
                error = abs(estimator(make, batch) / truth - 1)
            except Exception:  # noqa: BLE001 -- many cannot run many of the models
                error = 1.0
            seconds[name].append(time.perf_counter() - begun)
            errors[name].append(error)
            line.append(f"{error:9.3%}")
        print(f"{case:24}{truth / 2**20:9.1f} MiB {' '.join(line)}")
    return errors, seconds


def _middle(errors: dict[str, list[float]]) -> list[Row]:
    return _table({k: statistics.median(v) for k, v in errors.items()}, errors)


def _largest(errors: dict[str, list[float]]) -> list[Row]:
    return _table({k: max(v) for k, v in errors.items()}, errors)


def _table(found: dict[str, float], errors: dict[str, list[float]]) -> list[Row]:
    first = next(iter(found.values()))
    return [
        Row(name, 100 * value, 100 * min(errors[name]), 100 * max(errors[name]), "%",
            first / max(value, 1e-5))
        for name, value in found.items()
    ]  # fmt: skip


def _rows(seconds: dict[str, list[float]], unit: str) -> list[Row]:
    first = statistics.median(next(iter(seconds.values())))
    rows = []
    for name, each in seconds.items():
        middle = statistics.median(each)
        rows.append(Row(name, middle, min(each), max(each), unit, first / middle))
    return rows


def _recognised(records: list[Any]) -> list[Row]:
    """Count the sure ones recognised; low and high are false and true alarms."""
    rows: list[Row] = []
    for name, knows in _recognisers().items():
        said = [bool(knows(each["text"])) for each in records]
        sure = [each["states"]["is_oom"] is True for each in records]
        wrong = [each["states"]["is_oom"] is False for each in records]
        hits = sum(a and b for a, b in zip(said, sure, strict=True))
        false = sum(a and b for a, b in zip(said, wrong, strict=True))
        first = rows[0].median if rows else hits
        title = f"{name} ({false} false)"
        rows.append(Row(title, hits, hits, sum(sure), "found", hits / max(first, 1)))
    return rows


def _recognisers() -> dict[str, Callable[[str], Any]]:
    found: dict[str, Callable[[str], Any]] = {}
    with contextlib.suppress(ImportError):
        from lightning.pytorch.utilities.memory import is_oom_error

        found["Lightning"] = lambda text: is_oom_error(RuntimeError(text))
    with contextlib.suppress(ImportError):
        from accelerate.utils.memory import should_reduce_batch_size

        found["accelerate"] = lambda text: should_reduce_batch_size(RuntimeError(text))
    found["loaderkit"] = lambda text: loaderkit.diagnose_oom(text).is_oom is True
    return found


if __name__ == "__main__":
    main()
