"""Runs training steps for real and measures the bytes they hold, by the profiler."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_iter, tree_map

from loaderkit.budget.steps import (
    Step,
    checkpoint_blocks,
    make_optimizer,
    run_step,
)

_PHASE = "loaderkit: "


def measure_step(model: Any, batch: Any, step: Step) -> dict[str, int]:
    """Run two training steps on the CPU and find the peak of each phase.

    Args:
        model: A module on the CPU; a copy is trained.
        batch: What it is called with; a copy is used.
        step: How a step is made.

    Returns:
        Peak bytes by phase of parameters, buffers, batch and everything allocated, as
        the events of torch's own allocator add up; no allocator slack.
    """
    twin, held = copy.deepcopy(model), copied(batch)
    if step.checkpoint:
        checkpoint_blocks(twin)
    optimizer = make_optimizer(twin.parameters(), step)
    held_before = [*twin.parameters(), *twin.buffers(), *tensors_of(held)]
    base = held_bytes(held_before + state_of(optimizer))
    marks = _Marks()
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        warnings.simplefilter("ignore")
        for _ in range(2):
            run_step(twin, held, optimizer, step, mark=marks)
        marks("end")
    return _highest(profiled, base)


class _Marks:
    """Writes the phases into the profile."""

    def __init__(self) -> None:
        self.open: Any = None

    def __call__(self, phase: str) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
        self.open = record_function(_PHASE + phase) if phase != "end" else None
        if self.open is not None:
            self.open.__enter__()


def state_of(optimizer: Any) -> list[Any]:
    """List the tensors of an optimizer's state."""
    states = getattr(optimizer, "state", {}).values()
    return [t for t in tree_iter(list(states)) if isinstance(t, torch.Tensor)]


def held_bytes(tensors: list[Any]) -> int:
    """Sum the storages behind tensors, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _highest(profiled: Any, base: int) -> dict[str, int]:
    """Add up the allocator's events in the order of their start."""
    events = profiled.profiler.kineto_results.events()
    rows = [(e.start_ns(), e.name(), e.nbytes()) for e in events]
    now, phase, highest = base, "base", {"base": base}
    for _, name, change in sorted(rows, key=lambda row: row[0]):
        if name.startswith(_PHASE):
            phase = name.removeprefix(_PHASE)
        elif name == "[memory]":
            now += change
        highest[phase] = max(highest.get(phase, 0), now)
    return highest


def copied(batch: Any) -> Any:
    """Copy a batch, so that no tensor is a view of a larger one."""
    if hasattr(batch, "clone") and not isinstance(batch, torch.Tensor):
        return batch.clone()
    return tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, batch)


def tensors_of(batch: Any) -> list[Any]:
    """List the tensors of a batch: a tensor, a nest of them, or a graph."""
    if hasattr(batch, "to_dict") and hasattr(batch, "apply"):
        batch = batch.to_dict()
    return [t for t in tree_iter(batch) if isinstance(t, torch.Tensor)]
