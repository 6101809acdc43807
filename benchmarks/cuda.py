"""On a CUDA GPU: estimates against the allocator, loaders around real steps, watching.

``python -m benchmarks.cuda estimates [--share 0/4] [--seeds 0:10] [--save FILE]`` runs
the drawn steps of ``tests/budget`` on the GPU; several shares can run side by side, and
``estimates --join FILE ...`` prints their table.  ``loaders`` trains on W1, W2 and
images from each loader in turn; ``watching`` times steps with a LeakDetector around
them.  Each takes about a minute.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch_geometric.loader import DataLoader as GraphLoader
from torch_geometric.nn import GINEConv, global_add_pool

import loaderkit
from benchmarks.harness import MIB, RESULTS, Row, describe_machine, report
from benchmarks.large_models import LARGE_STEPS
from benchmarks.workloads import BATCH, InMemory, make_graphs
from loaderkit.budget.step.devices import DeviceSpec
from loaderkit.budget.step.estimate import StepEstimate, estimate
from loaderkit.budget.step.step_copies import copy_of_model, step_copies
from loaderkit.budget.step.train_step import (
    Step,
    call_model,
    checkpoint_blocks,
    loss_of,
    make_optimizer,
)
from loaderkit.nests import map_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

MakeStep: TypeAlias = Callable[[], tuple[Any, Any, Step]]
"""Makes a model, a batch and how it is trained."""

TESTS = Path(__file__).parents[1] / "tests" / "budget"
DEVICE = torch.device("cuda")
STEPS_A_RUN = 2
"""The second holds the optimizer's state and the gradients of the first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["estimates", "loaders", "watching"])
    parser.add_argument("--share", default="0/1", help="of the steps, such as 0/4")
    parser.add_argument("--seeds", default="0:4", help="drawn for each family")
    parser.add_argument("--join", nargs="+", type=Path, help="files of shares")
    parser.add_argument("--file", type=Path, help="where a share is kept")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    if options.what == "estimates" and options.join:
        _report_trials(_read_trials(options.join), save=options.save)
    elif options.what == "estimates":
        trials = _try_estimates(options.share, options.seeds)
        if options.file:
            content = json.dumps([asdict(trial) for trial in trials], indent=1)
            options.file.write_text(content + "\n")
        else:
            _report_trials(trials, save=options.save)
    elif options.what == "loaders":
        _compare_loaders(save=options.save)
    else:
        _time_watching(save=options.save)


# Estimates.


@dataclass(frozen=True)
class Trial:
    """A step that was estimated, and then run on the GPU.  Bytes."""

    name: str
    peak: int
    low: int
    high: int
    reserved: int
    truth: int
    """``max_memory_allocated``, less what was taken before the model was there."""
    true_reserved: int
    failure: str = ""
    """Why there is no truth, or no estimate."""

    @property
    def error(self) -> float:
        """Of the peak, as a share of the truth."""
        return self.peak / max(1, self.truth) - 1

    @property
    def is_inside(self) -> bool:
        """Whether the truth lies in the interval."""
        return self.low <= self.truth <= self.high


def _try_estimates(share: str, seeds: str) -> list[Trial]:
    number, count = map(int, share.split("/"))
    first, end = map(int, seeds.split(":"))
    steps = list(_named_steps(range(first, end)).items())
    _warm_up()
    return [_try_estimate(name, make) for name, make in steps[number::count]]


def _named_steps(seeds: range) -> dict[str, MakeStep]:
    """Give by its name what makes each step: large ones, and those of the tests."""
    sys.path.insert(0, str(TESTS))
    drawn: dict[str, MakeStep] = importlib.import_module("drawn_for_gpu").named_steps(
        seeds
    )
    large = {f"large: {name}": make for name, make in LARGE_STEPS.items()}
    return {**large, **drawn}


def _try_estimate(name: str, make: MakeStep) -> Trial:
    """Estimate a step, run it, and compare."""
    try:
        model, batch, step = make()
        step = step.replace(target=DeviceSpec("cuda"))
        estimated = estimate(model, batch, step)
    except Exception as error:  # noqa: BLE001 -- told in the table
        return _failed(name, f"estimate: {type(error).__name__}: {error}")
    try:
        truth, true_reserved = measure_on_gpu(model, batch, step)
    except Exception as error:  # noqa: BLE001 -- told in the table
        return _failed(name, f"step: {type(error).__name__}: {error}")
    return _trial_of(name, estimated, truth, true_reserved)


def _trial_of(
    name: str, estimated: StepEstimate, truth: int, true_reserved: int
) -> Trial:
    return Trial(
        name,
        estimated.peak,
        estimated.low,
        estimated.high,
        estimated.reserved or 0,
        truth,
        true_reserved,
    )


def _failed(name: str, why: str) -> Trial:
    return Trial(name, 0, 0, 0, 0, 0, 0, failure=why[:300])


def _warm_up() -> None:
    """Have the libraries of the GPU take their workspaces, forward and backward."""
    x = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    loss: Any = (x @ x).sum()
    loss.backward()
    images = torch.randn(2, 3, 8, 8, device=DEVICE)
    nn.Conv2d(3, 4, 3, device=DEVICE)(images).sum().backward()
    torch.cuda.synchronize()


def measure_on_gpu(model: Any, batch: Any, step: Step) -> tuple[int, int]:
    """Run steps on the GPU.

    Args:
        model: On the CPU; a copy is trained.
        batch: On the CPU; a copy is moved.
        step: How a step is made.

    Returns:
        The most that tensors took, and that the allocator held, beyond what was taken
        before; bytes.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    taken = torch.cuda.memory_allocated()
    held = torch.cuda.memory_reserved()
    # What the loss reaches, such as a teacher or weights of classes, is moved too.
    copies = step_copies(
        model,
        batch,
        step,
        copy_model=_copy_to_gpu,
        copy_batch=_moved,
        copy_tensor=_moved,
    )
    if step.checkpoint:
        checkpoint_blocks(copies.model)
    optimizer = make_optimizer(model, copies)
    for _ in range(STEPS_A_RUN):
        _train_once(copies.model, copies.batch, optimizer, copies.step)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - taken
    return peak, torch.cuda.max_memory_reserved() - held


def _copy_to_gpu(model: nn.Module, copies: dict[int, Any]) -> nn.Module:
    twin: nn.Module = copy_of_model(model, copies).to(DEVICE)
    return twin


def _train_once(model: Any, batch: Any, optimizer: Any, step: Step) -> None:
    if optimizer is None:
        model.zero_grad(set_to_none=True)
    else:
        optimizer.zero_grad(set_to_none=True)
    enabled = step.autocast is not None
    with torch.autocast("cuda", step.autocast or torch.bfloat16, enabled=enabled):
        output = call_model(model, batch, paired=step.loss is not None)
        loss = loss_of(output, batch, step.loss)
    loss.backward()
    if optimizer is not None:
        optimizer.step()


def _read_trials(files: Iterable[Path]) -> list[Trial]:
    return [Trial(**entry) for file in files for entry in json.loads(file.read_text())]


def _report_trials(trials: list[Trial], *, save: bool) -> None:
    """Print what came of all, then of the large ones, then what is wrong."""
    print(describe_machine(), torch.cuda.get_device_name())
    run = [trial for trial in trials if not trial.failure]
    for least in (0, MIB, 16 * MIB):
        some = [trial for trial in run if trial.truth >= least]
        if some:
            _print_summary(f"steps of {least / MIB:.0f} MiB and more", some)
    for trial in sorted(run, key=lambda trial: trial.error):
        if not trial.is_inside:
            print(
                f"  {trial.name[:70]:<70} {trial.truth / MIB:9.3f} MiB, estimated "
                f"{trial.error:+8.2%} [{trial.low / trial.truth - 1:+.2%}, "
                f"{trial.high / trial.truth - 1:+.2%}]"
            )
    for trial in trials:
        if trial.failure:
            print(f"  {trial.name[:50]}: {trial.failure[:160]}")
    if save:
        content = {
            "machine": f"{describe_machine()}; {torch.cuda.get_device_name()}",
            "trials": [asdict(trial) for trial in trials],
        }
        file = RESULTS / "cuda_estimates.json"
        file.write_text(json.dumps(content, indent=0) + "\n")


def _print_summary(title: str, trials: list[Trial]) -> None:
    errors = sorted(abs(trial.error) for trial in trials)
    missed = [trial for trial in trials if not trial.is_inside]
    modelled = [trial for trial in trials if trial.true_reserved]
    reserved = [abs(trial.reserved / trial.true_reserved - 1) for trial in modelled]
    print(
        f"{len(trials)} {title}: median error {statistics.median(errors):.4%}, "
        f"90 % within {errors[len(errors) * 9 // 10]:.2%}, largest {errors[-1]:.1%}; "
        f"{len(missed)} outside the interval; reserved: median error "
        f"{statistics.median(reserved or [0.0]):.2%}"
    )


# Loaders around real steps.


class Molecules(nn.Module):
    """Three convolutions with edges, as people train on QM9."""

    def __init__(self, inputs: int, edges: int, outputs: int) -> None:
        super().__init__()
        width = 128
        self.first = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(
            GINEConv(
                nn.Sequential(
                    nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
                ),
                edge_dim=edges,
            )
            for _ in range(3)
        )
        self.last = nn.Linear(width, outputs)

    def forward(self, batch: Any) -> Any:
        hidden = self.first(batch.x)
        for layer in self.layers:
            hidden = hidden + layer(hidden, batch.edge_index, batch.edge_attr).relu()
        pooled = global_add_pool(hidden, batch.batch, size=batch.num_graphs)
        return (self.last(pooled) - batch.y).square().mean()


class Images(nn.Module):
    """A small convolutional network over images of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 7, 4), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, batch: Any) -> Any:
        scores = self.layers(batch["image"].float() / 255)
        return nn.functional.cross_entropy(scores, batch["label"])


IMAGES = 2048
IMAGES_A_BATCH = 64
WIDTHS = {"w1": (11, 4, 19), "w2": (64, 8, 512)}
ROUNDS = 3


def _compare_loaders(*, save: bool) -> None:
    """Train an epoch from each loader in turn, and print samples a second."""
    with tempfile.TemporaryDirectory() as folder:
        for workload, widths in WIDTHS.items():
            loaders = _graph_loaders(workload, Path(folder))
            model = Molecules(*widths).to(DEVICE)
            _train_in_turn(workload, model, loaders, save=save)
        _train_in_turn(
            "images", Images().to(DEVICE), _image_loaders(Path(folder)), save=save
        )


def _graph_loaders(workload: str, folder: Path) -> dict[str, Any]:
    graphs = make_graphs(workload, {"w1": 12_800, "w2": 2_000}[workload])
    size = BATCH[workload]
    cache = loaderkit.pack(graphs, folder / workload)
    planned = loaderkit.build_loader(cache, "cuda", batch_size=size, shuffle=True)
    print(planned.plan)
    no_workers = loaderkit.build_loader(
        cache, "cuda", batch_size=size, shuffle=True, num_workers=0
    )
    memory = InMemory(graphs)
    loaders: dict[str, Any] = {
        "InMemoryDataset, 0 workers": GraphLoader(memory, size, shuffle=True),
    }
    for workers in (4, 8):
        loaders[f"InMemoryDataset, {workers} workers, pinned"] = GraphLoader(
            memory, size, shuffle=True, num_workers=workers,
            persistent_workers=True, pin_memory=True,
        )  # fmt: skip
    loaders["build_loader"] = planned
    loaders["build_loader, 0 workers"] = no_workers
    loaders["build_loader, DevicePrefetcher"] = _prefetched(planned)
    loaders["build_loader, 0 workers, DevicePrefetcher"] = _prefetched(no_workers)
    return loaders


def _prefetched(loader: Any) -> Any:
    from loaderkit.loader.device_prefetch import DevicePrefetcher

    return DevicePrefetcher(loader, DEVICE)


def _image_loaders(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    samples = [
        {
            "image": torch.randint(256, (3, 224, 224), dtype=torch.uint8),
            "label": number % 10,
        }
        for number in range(IMAGES)
    ]
    cache = loaderkit.pack(samples, folder / "images")
    planned = loaderkit.build_loader(
        cache, "cuda", batch_size=IMAGES_A_BATCH, shuffle=True
    )
    print(planned.plan)
    images: Any = samples
    loaders: dict[str, Any] = {
        f"list, {workers} workers, pinned": DataLoader(
            images,
            IMAGES_A_BATCH,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=True,
        )
        for workers in (0, 4, 8)
    }
    loaders["build_loader"] = planned
    loaders["build_loader, DevicePrefetcher"] = _prefetched(planned)
    return loaders


def _train_in_turn(
    workload: str, model: Any, loaders: dict[str, Any], *, save: bool
) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    contestants: dict[str, Callable[[], float]] = {
        name: functools.partial(_epoch_rate, model, optimizer, loader)
        for name, loader in loaders.items()
    }
    resident = next(iter(loaders.values()))
    batches = [_moved(batch) for batch, _ in zip(resident, range(64), strict=False)]
    contestants["no loading: 64 batches that stay on the GPU"] = lambda: _epoch_rate(
        model, optimizer, batches
    )
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(ROUNDS + 1):
        for name, run in contestants.items():
            rate = run()
            if turn:
                rates[name].append(rate)
    baseline = statistics.median(next(iter(rates.values())))
    rows = [
        Row.of_values(name, values, "samples/s", baseline=baseline)
        for name, values in rates.items()
    ]
    title = f"training on {workload} on {torch.cuda.get_device_name()}"
    report(title, rows, save=f"cuda_loaders_{workload}" if save else None)


def _epoch_rate(model: Any, optimizer: Any, loader: Iterable[Any]) -> float:
    samples = 0
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for batch in loader:
        moved = _moved(batch)
        optimizer.zero_grad()
        model(moved).backward()
        optimizer.step()
        is_dict = isinstance(moved, dict)
        samples += len(moved["label"]) if is_dict else moved.num_graphs
    torch.cuda.synchronize()
    return samples / (time.perf_counter() - begin)


def _moved(batch: Any) -> Any:
    """Move a batch as training loops do: beside the step, where it is page-locked."""
    return map_tensors(lambda tensor: tensor.to(DEVICE, non_blocking=True), batch)


# Watching.

WATCHED_EPOCHS = 30
STEPS_AN_EPOCH = 30


def _time_watching(*, save: bool) -> None:
    """Time epochs of steps of some milliseconds, watched and not, in turn."""
    torch.backends.cuda.matmul.allow_tf32 = True
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24))).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    times: dict[str, list[float]] = {"not watched": [], "watched": []}
    detector = loaderkit.LeakDetector("cuda", every=STEPS_AN_EPOCH)

    def train_epoch(*, watched: bool) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for step in range(STEPS_AN_EPOCH):
            x = torch.randn(4096 + 64 * (step % 7), 2048, device=DEVICE)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if watched:
                detector.step()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    train_epoch(watched=False)
    for _ in range(WATCHED_EPOCHS):
        times["not watched"].append(train_epoch(watched=False))
        times["watched"].append(train_epoch(watched=True))
    step_ms = {
        name: [1000 * seconds / STEPS_AN_EPOCH for seconds in values]
        for name, values in times.items()
    }
    baseline = statistics.median(step_ms["not watched"])
    rows = [
        Row.of_values(name, values, "ms a step", baseline=baseline)
        for name, values in step_ms.items()
    ]
    report(
        f"steps with and without a LeakDetector on {torch.cuda.get_device_name()}",
        rows,
        save="cuda_watching" if save else None,
    )
    print(detector.finish())


if __name__ == "__main__":
    main()
