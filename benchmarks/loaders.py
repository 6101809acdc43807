"""The automatic plan against every plan set by hand, and against other loaders.

Run it with ``python -m benchmarks.loaders [--scale 0.1] [--workload w1] [--save]``.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch_geometric.loader import DataLoader as GraphLoader
from torch_geometric.loader import DynamicBatchSampler

import loaderkit
from benchmarks.harness import (
    Row,
    compare_in_pairs,
    measure_peaks,
    measure_rates,
    report,
    rivals_near_best,
)
from benchmarks.read_epoch import litdata_loader, write_litdata
from benchmarks.workloads import (
    BATCH,
    COUNTS,
    InMemory,
    PtFiles,
    epoch_reader,
    make_clips,
    make_graphs,
    pad_clips,
    write_pt_files,
)
from loaderkit.loader.resumable import EpochBatches
from loaderkit.loader.samplers import BatchRule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchmarks.harness import ReadSamples
    from loaderkit.loader.plan import LoaderPlan

    Contestants = dict[str, ReadSamples]
    Collate = Callable[[list[Any]], Any]

GRAPH_CASES = ("cache", "InMemoryDataset", "files", "other ways")
CASES = {"w1": GRAPH_CASES, "w2": GRAPH_CASES, "w3": ("cache", "list", "other ways")}
"""Ways to keep the samples of a workload; each is one table."""
HAND_SET_WORKERS = (0, 2, 4)
FILES_SHARE = {"w1": 0.4, "w2": 1.0}
"""Part of an epoch read from files: whole epochs of W1 take 5 s a turn."""
LITDATA_SHARE = 0.1
STEP_S = 0.005
SAMPLER_SAMPLES = 10**7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=["w1", "w2", "w3", "all"], default="all")
    parser.add_argument("--case", help="only this one, such as files")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=40, help="runs of each pair")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--memory", action="store_true", help="measure peaks too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    # Each table has a process of its own: some contestants leave threads behind.
    spawn = multiprocessing.get_context("spawn")
    workloads = list(CASES) if options.workload == "all" else [options.workload]
    for workload in workloads:
        with tempfile.TemporaryDirectory() as folder:
            for case in [options.case] if options.case else CASES[workload]:
                arguments = (workload, case, Path(folder), options)
                process = spawn.Process(target=_compare_loaders, args=arguments)
                process.start()
                process.join()

    rows = _planning_costs()
    report("planning and sampling", rows, save="sampler" if options.save else None)


def _compare_loaders(
    workload: str, case: str, folder: Path, options: argparse.Namespace
) -> None:
    """Print the tables of one way to keep the samples."""
    warnings.simplefilter("ignore")
    # A spawned process would spawn its workers too.
    multiprocessing.set_start_method("fork", force=True)

    count = int(COUNTS[workload] * options.scale)
    contestants = _make_contestants(workload, case, count, folder)
    title = f"{workload}, {case}"
    slug = f"loaders_{workload}_{case.replace(' ', '_')}"

    def print_table(subtitle: str, rows: list[Row], suffix: str) -> None:
        save = f"{slug}{suffix}" if options.save else None
        report(f"{title}{subtitle}", rows, save=save)

    rows = measure_rates(contestants, rounds=options.rounds)
    print_table("", rows, "")

    first = next(iter(contestants))
    if first.startswith("automatic"):
        names = [first, *rivals_near_best(rows)]
        near_best = {name: contestants[name] for name in names}
        rows = compare_in_pairs(near_best, rounds=options.pairs)
        print_table(": pair by pair", rows, "_pairs")
        if options.memory:
            rows = measure_peaks(near_best, rounds=options.pairs // 2)
            print_table(": memory on top", rows, "_pairs_memory")
    if options.memory:
        print_table(": memory on top", measure_peaks(contestants), "_memory")


def _make_contestants(
    workload: str, case: str, count: int, folder: Path
) -> Contestants:
    """Set up all loaders for one way to keep the samples."""
    if workload == "w3":
        return _clip_contestants(case, make_clips(count), folder)
    graphs = make_graphs(workload, count)
    batch_size = BATCH[workload]
    if case == "files":
        files = PtFiles(write_pt_files(graphs, folder / "pt"))
        share = FILES_SHARE[workload]
        return _our_loaders(files, batch_size, share=share) | _usual_loaders(
            files, batch_size, share=share
        )
    cache = _pack_once(graphs, folder / "cache.lk")
    if case == "other ways":
        return _other_loaders(cache, graphs, batch_size, folder)

    in_memory = InMemory(graphs)
    # It keeps each graph it gave: forks after that would have them for nothing, and
    # contestants that come later would be faster.
    for row in range(count):
        _ = in_memory[row]
    dataset = cache if case == "cache" else in_memory
    return _our_loaders(dataset, batch_size) | _usual_loaders(in_memory, batch_size)


def _clip_contestants(
    case: str, clips: list[dict[str, Any]], folder: Path
) -> Contestants:
    batch_size = BATCH["w3"]
    cache = _pack_once(clips, folder / "cache.lk")
    if case == "other ways":
        loader = loaderkit.build_loader(cache, batch_size=batch_size, shuffle=True)
        ours = {"build_loader from a cache": epoch_reader(loader)}
        return ours | _litdata_contestant(clips, batch_size, folder, pad_clips)
    if case == "cache":
        ours = _our_loaders(cache, batch_size)
    else:
        ours = _our_loaders(clips, batch_size, collate_fn=pad_clips)
    return ours | _usual_loaders(clips, batch_size)


def _pack_once(samples: list[Any], path: Path) -> Any:
    """Pack for the first case of a workload; the others open what lies there."""
    if not path.exists():
        loaderkit.pack(samples, path)
    return loaderkit.open_cache(path)


def _other_loaders(
    cache: Any, graphs: list[Any], batch_size: int, folder: Path
) -> Contestants:
    """Batches limited by nodes, and litdata."""
    mean_nodes = sum(graph.num_nodes for graph in graphs) / len(graphs)
    max_nodes = int(mean_nodes * batch_size)
    in_memory = InMemory(graphs)
    sampler = DynamicBatchSampler(in_memory, max_nodes, mode="node", shuffle=True)
    of_pyg = GraphLoader(in_memory, batch_sampler=sampler)
    ours = loaderkit.build_loader(cache, max_nodes=max_nodes, shuffle=True)
    contestants = {
        "PyG DynamicBatchSampler": epoch_reader(of_pyg),
        f"build_loader, max_nodes={max_nodes}": epoch_reader(ours),
    }
    return contestants | _litdata_contestant(graphs, batch_size, folder)


def _litdata_contestant(
    samples: list[Any], batch_size: int, folder: Path, collate_fn: Collate | None = None
) -> Contestants:
    if importlib.util.find_spec("litdata") is None:
        print("litdata takes no part: pip install litdata")
        return {}
    chunks = write_litdata(samples, folder / "litdata")
    loader = litdata_loader(
        chunks, batch_size=batch_size, shuffle=True, collate_fn=collate_fn
    )
    name = f"litdata, 0 workers, {LITDATA_SHARE:.0%} of an epoch"
    return {name: epoch_reader(loader, share=LITDATA_SHARE)}


def _our_loaders(
    dataset: Any,
    batch_size: int,
    *,
    collate_fn: Collate | None = None,
    share: float = 1.0,
) -> Contestants:
    """Set up the automatic plan, and ``build_loader`` with workers set by hand."""
    batching: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": True,
        "collate_fn": collate_fn,
    }
    automatic = loaderkit.build_loader(dataset, **batching)
    plan = automatic.plan
    print(f"\n{plan}")
    name = f"automatic plan ({plan.num_workers.value} workers)"
    contestants = {name: epoch_reader(automatic, share=share)}
    for workers in HAND_SET_WORKERS:
        loader = loaderkit.build_loader(dataset, num_workers=workers, **batching)
        name = f"build_loader, {workers} workers by hand"
        contestants[name] = epoch_reader(loader, share=share)
        if workers == plan.num_workers.value:
            different = _different_settings(plan, loader.plan)
            print(
                f"by hand with {workers} workers, other settings: {different or 'none'}"
            )
    return contestants


def _different_settings(plan: LoaderPlan, by_hand: LoaderPlan) -> list[str]:
    """Name the settings that should be equal where the workers are, and are not."""
    settings = plan.settings()
    return [
        name
        for name, decision in by_hand.settings().items()
        # Each loader draws a seed of its own.
        if name != "seed" and decision.value != settings[name].value
    ]


def _usual_loaders(dataset: Any, batch_size: int, *, share: float = 1.0) -> Contestants:
    """Set up what people use today: PyG's loader for graphs, torch's for dicts."""
    loader_class: Any = GraphLoader
    library = "PyG"
    batching: dict[str, Any] = {"batch_size": batch_size, "shuffle": True}
    if isinstance(dataset[0], dict):
        loader_class = DataLoader
        library = "torch"
        batching["collate_fn"] = pad_clips

    contestants = {}
    for workers in HAND_SET_WORKERS:
        loader = loader_class(dataset, num_workers=workers, **batching)
        name = f"{library} DataLoader, {workers} workers"
        contestants[name] = epoch_reader(loader, share=share)
    return contestants


def _planning_costs() -> list[Row]:
    """Time to plan, sampling per sample, and input wait beside a training step."""
    graphs = make_graphs("w1", COUNTS["w1"])
    batching: dict[str, Any] = {"batch_size": BATCH["w1"], "shuffle": True}
    with tempfile.TemporaryDirectory() as folder:
        cache = loaderkit.pack(graphs, Path(folder, "w1.lk"))
        planning_s = _shortest_time(
            lambda: loaderkit.build_loader(cache, batch_size=BATCH["w1"])
        )
        ours = loaderkit.build_loader(cache, **batching)
        our_wait = min(_input_wait_share(ours) for _ in range(3))
        of_torch = DataLoader(cache, collate_fn=cache.collate, **batching)
        torch_wait = min(_input_wait_share(of_torch) for _ in range(3))

    by_count_us = _sampling_us(
        BatchRule(SAMPLER_SAMPLES, batch_size=BATCH["w1"], shuffle=True)
    )
    nodes = np.random.default_rng(0).integers(5, 40, SAMPLER_SAMPLES)
    by_nodes_us = _sampling_us(
        BatchRule(SAMPLER_SAMPLES, limits={"n": 2000}, sizes={"n": nodes}, shuffle=True)
    )
    return [
        _row_with_limit("planning, of 300 ms", planning_s * 1e3, "ms", 300),
        _row_with_limit("sampler, 10^7 samples, batches of 128", by_count_us, "us", 1),
        _row_with_limit(
            "sampler, 10^7 samples, at most 2,000 nodes", by_nodes_us, "us", 1
        ),
        _row_with_limit(
            "input wait, W1, step of 5 ms, build_loader", 100 * our_wait, "%", 5
        ),
        _row_with_limit(
            "input wait, W1, step of 5 ms, torch DataLoader", 100 * torch_wait, "%", 5
        ),
    ]


def _row_with_limit(name: str, value: float, unit: str, limit: float) -> Row:
    return Row.of_one_value(name, value, unit, ratio=limit / value)


def _sampling_us(rule: BatchRule) -> float:
    """Time one epoch of row numbers: microseconds a sample."""
    batches = EpochBatches(rule)
    epoch_s = _shortest_time(lambda: sum(map(len, batches)), times=2)
    return epoch_s / SAMPLER_SAMPLES * 1e6


def _input_wait_share(loader: Iterable[Any]) -> float:
    """Part of an epoch that a training loop waits for its batches."""
    waited_s = 0.0
    start = time.perf_counter()
    asked = start
    for _ in loader:
        waited_s += time.perf_counter() - asked
        time.sleep(STEP_S)
        asked = time.perf_counter()
    return waited_s / (time.perf_counter() - start)


def _shortest_time(run: Callable[[], object], times: int = 5) -> float:
    """Give the seconds of the run that others disturbed least."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
