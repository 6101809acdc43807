"""The automatic plan against every plan set by hand, and against other loaders.

Run it with ``python -m benchmarks.loaders [--scale 0.1] [--workload w1] [--save]``.
"""

from __future__ import annotations

import argparse
import functools
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
from benchmarks.harness import Row, duels, peaks, rates, report, rivals
from benchmarks.read_epoch import litdata_items, streamed
from benchmarks.workloads import (
    BATCH,
    COUNTS,
    InMemory,
    PtFiles,
    make,
    make_clips,
    pad_clips,
    write_files,
)
from loaderkit.loader.plan import SETTINGS
from loaderkit.loader.resumable import EpochBatches
from loaderkit.loader.samplers import BatchRule

if TYPE_CHECKING:
    from collections.abc import Callable

SPAWN = multiprocessing.get_context("spawn")
GRAPHS = ("cache", "InMemoryDataset", "files", "other ways")
CASES = {"w1": GRAPHS, "w2": GRAPHS, "w3": ("cache", "list", "other ways")}
HANDS = (0, 2, 4)
"""Workers that are set by hand."""
STEP_S = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=["w1", "w2", "w3", "all"], default="all")
    parser.add_argument("--case", help="only this one, such as files")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=40, help="runs of each duel")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--memory", action="store_true", help="measure peaks too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    names = ("w1", "w2", "w3") if options.workload == "all" else (options.workload,)
    for name in names:
        count = int(COUNTS[name] * options.scale)
        with tempfile.TemporaryDirectory() as folder:
            for case in [options.case] if options.case else CASES[name]:
                settings = (name, case, count, Path(folder), options)
                child = SPAWN.Process(target=_compare, args=settings)
                child.start()
                child.join()
    report("planning and sampling", _costs(), save="sampler" if options.save else None)


def _compare(name: str, case: str, count: int, folder: Path, options: Any) -> None:
    """Run one table in a process of its own: some contenders leave threads behind."""
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method("fork", force=True)  # a spawned child would spawn
    entrants = _entrants(name, case, count, folder)
    rows = rates(entrants, rounds=options.rounds)
    _report(f"{name}, {case}", rows, "", options)
    first = next(iter(entrants))
    if first.startswith("automatic"):
        near = {each: entrants[each] for each in [first, *rivals(rows)]}
        pairs = duels(near, rounds=options.pairs)
        _report(f"{name}, {case}: pair by pair", pairs, "_pairs", options)
        if options.memory:
            most = peaks(near, rounds=options.pairs // 2)
            _report(f"{name}, {case}: memory on top", most, "_pairs_memory", options)
    if options.memory:
        _report(f"{name}, {case}: memory on top", peaks(entrants), "_memory", options)


def _report(title: str, rows: list[Row], kind: str, options: Any) -> None:
    slug = "loaders_" + title.partition(":")[0].replace(", ", "_").replace(" ", "_")
    report(title, rows, save=slug + kind if options.save else None)


def _entrants(
    name: str, case: str, count: int, folder: Path
) -> dict[str, Callable[[], int]]:
    """Set up all loaders for one way to keep the samples."""
    batch = BATCH[name]
    samples: Any = make_clips(count) if name == "w3" else make(name, count)
    if not (folder / "cache.lk").exists():
        loaderkit.pack(samples, folder / "cache.lk")
    cache = loaderkit.open_cache(folder / "cache.lk")
    if name == "w3" and case == "other ways":
        loader = loaderkit.build_loader(cache, batch_size=batch, shuffle=True)
        found = {"build_loader from a cache": _epoch(loader)}
        return found | _through_litdata(samples, batch, folder, pad_clips)
    if name == "w3":
        ours: Any = cache if case == "cache" else samples
        collate = None if case == "cache" else pad_clips
        return _ours(ours, batch, collate) | _theirs(samples, batch)
    if case == "files":
        files = PtFiles(write_files(samples, folder / "pt"))
        part = 1.0 if name == "w2" else 0.4  # whole epochs of W1 take 5 s a turn
        return _ours(files, batch, part=part) | _theirs(files, batch, part)
    memory = InMemory(samples)
    for row in range(count):
        _ = memory[row]  # it keeps each graph it gave: later forks would gain
    if case == "other ways":
        nodes = int(sum(each.num_nodes for each in samples) / count * batch)
        return _other_ways(cache, samples, batch, nodes, folder)
    ours = cache if case == "cache" else memory
    return _ours(ours, batch) | _theirs(memory, batch)


def _other_ways(
    cache: Any, graphs: Any, batch: int, nodes: int, folder: Path
) -> dict[str, Callable[[], int]]:
    """Batches limited by nodes, and litdata."""
    sized = loaderkit.build_loader(cache, max_nodes=nodes, shuffle=True)
    found = {
        "PyG DynamicBatchSampler": _dynamic(InMemory(graphs), nodes),
        f"build_loader, max_nodes={nodes}": _epoch(sized),
    }
    return found | _through_litdata(graphs, batch, folder)


def _through_litdata(
    samples: list[Any], batch: int, folder: Path, collate: Any = None
) -> dict[str, Callable[[], int]]:
    if importlib.util.find_spec("litdata") is None:
        print("litdata takes no part: pip install litdata")
        return {}
    chunks = litdata_items(samples, folder / "litdata")
    loader = streamed(chunks, batch_size=batch, shuffle=True, collate=collate)
    return {"litdata, 0 workers, 10% of an epoch": _epoch(loader, 0.1)}


def _ours(
    dataset: Any, batch: int, collate: Any = None, *, part: float = 1.0
) -> dict[str, Callable[[], int]]:
    settings = {"batch_size": batch, "shuffle": True, "collate_fn": collate}
    automatic = loaderkit.build_loader(dataset, **settings)
    plan = automatic.plan
    print(f"\n{plan}")
    found = {f"automatic plan ({plan.num_workers} workers)": _epoch(automatic, part)}
    for workers in HANDS:
        loader = loaderkit.build_loader(dataset, num_workers=workers, **settings)
        found[f"build_loader, {workers} workers by hand"] = _epoch(loader, part)
        if workers == plan.num_workers:
            others = [
                s
                for s in SETTINGS
                if getattr(plan, s) != getattr(loader.plan, s) and s != "seed"
            ]
            print(f"by hand with {workers} workers, other settings: {others or 'none'}")
    return found


def _theirs(
    dataset: Any, batch: int, part: float = 1.0
) -> dict[str, Callable[[], int]]:
    graphs = not isinstance(dataset[0], dict)
    kind: Any = GraphLoader if graphs else DataLoader
    more = {} if graphs else {"collate_fn": pad_clips}
    name = "PyG" if graphs else "torch"
    return {
        f"{name} DataLoader, {workers} workers": _epoch(
            kind(dataset, batch_size=batch, shuffle=True, num_workers=workers, **more),
            part,
        )
        for workers in HANDS
    }


def _dynamic(dataset: Any, nodes: int) -> Callable[[], int]:
    sampler = DynamicBatchSampler(dataset, nodes, mode="node", shuffle=True)
    return _epoch(GraphLoader(dataset, batch_sampler=sampler))


def _epoch(loader: Any, part: float = 1.0) -> Callable[[], int]:
    return functools.partial(_read, loader, part)


def _read(loader: Any, part: float) -> int:
    count = 0
    most = max(1, int(len(loader) * part)) if part < 1 else None
    for number, batch in enumerate(loader, 1):
        count += _samples(batch)
        if number == most:
            break
    return count


def _samples(batch: Any) -> int:
    return len(batch["label"]) if isinstance(batch, dict) else int(batch.num_graphs)


def _costs() -> list[Row]:
    """Time to plan, sampling per sample, and input wait beside a training step."""
    graphs = make("w1", 20_000)
    with tempfile.TemporaryDirectory() as folder:
        cache = loaderkit.pack(graphs, Path(folder, "w1.lk"))
        planning = _best(lambda: loaderkit.build_loader(cache, batch_size=128))
        loader = loaderkit.build_loader(cache, batch_size=128, shuffle=True)
        waits = [_wait(loader) for _ in range(3)]
        plain = DataLoader(
            cache, batch_size=128, shuffle=True, collate_fn=cache.collate
        )
        before = [_wait(plain) for _ in range(3)]
    many = 10**7
    sizes = {"n": np.random.default_rng(0).integers(5, 40, many)}
    rules = [
        BatchRule(many, batch_size=128, shuffle=True),
        BatchRule(many, limits={"n": 2000}, sizes=sizes, shuffle=True),
    ]
    each = [_sampled(EpochBatches(rule)) / many * 1e6 for rule in rules]
    values = [
        ("planning, of 300 ms", planning * 1e3, "ms", 300),
        ("sampler, 10^7 samples, batches of 128", each[0], "us", 1),
        ("sampler, 10^7 samples, at most 2,000 nodes", each[1], "us", 1),
        ("input wait, W1, step of 5 ms, build_loader", 100 * min(waits), "%", 5),
        ("input wait, W1, step of 5 ms, torch DataLoader", 100 * min(before), "%", 5),
    ]
    return [Row(n, v, v, v, unit, limit / v) for n, v, unit, limit in values]


def _sampled(sampler: EpochBatches) -> float:
    return _best(lambda: sum(map(len, sampler)), 2)


def _wait(loader: Any) -> float:
    """Part of an epoch that a training loop waits for its batches."""
    waited, begun = 0.0, time.perf_counter()
    asked = begun
    for _ in loader:
        waited += time.perf_counter() - asked
        time.sleep(STEP_S)
        asked = time.perf_counter()
    return waited / (time.perf_counter() - begun)


def _best(run: Callable[[], Any], times: int = 5) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
