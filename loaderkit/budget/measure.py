"""Runs training steps for real and measures the bytes they hold, by the profiler."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_iter, tree_map

from loaderkit.budget.memory_profile import memory_profile
from loaderkit.budget.train_step import (
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
    twin, held = _own_copy(model), copied(batch)
    if step.checkpoint:
        checkpoint_blocks(twin)
    optimizer = make_optimizer(twin.parameters(), step)
    held_before = [*twin.parameters(), *twin.buffers(), *tensors_of(held)]
    base = held_bytes(held_before + state_of(optimizer))
    marks = _Marks()
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        memory_profile() as profiled,
    ):
        warnings.simplefilter("ignore")
        for _ in range(2):
            run_step(twin, held, optimizer, step, mark=marks)
        marks("end")
    return _highest(profiled, base)


def _own_copy(model: Any) -> Any:
    """Copy a module; deepcopy would make the parameters of a scripted one no leaves."""
    if not isinstance(model, torch.jit.ScriptModule):
        return copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.jit.save(model, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)  # type: ignore[no-untyped-call]


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
    """Sum the storages behind tensors, each once; those of sparse ones are values."""
    sizes = {}
    for tensor in parts_of_nested(tensors):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
        else:
            sizes[id(tensor)] = tensor.detach()._values().nbytes
    return sum(sizes.values())


def parts_of_nested(tensors: list[Any]) -> list[Any]:
    """Replace torch's jagged tensors by the tensors they are made of."""
    parts = []
    for tensor in tensors:
        is_jagged = tensor.is_nested and tensor.layout is torch.jagged
        parts += [tensor.values(), tensor.offsets()] if is_jagged else [tensor]
    return parts


def _highest(profiled: Any, base: int) -> dict[str, int]:
    """Add up the allocator's events in the order of their start."""
    events = profiled.kineto_results.events()
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
    """Copy a batch, so that no tensor is a view of a larger one; one stays one."""
    if hasattr(batch, "clone") and not isinstance(batch, torch.Tensor):
        return batch.clone()
    copies: dict[int, Any] = {}

    def copy_once(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return copies.setdefault(id(leaf), leaf.clone())
        return leaf

    return tree_map(copy_once, batch)


def tensors_of(batch: Any) -> list[Any]:
    """List the tensors of a batch: a tensor, a nest of them, or a graph."""
    if hasattr(batch, "to_dict") and hasattr(batch, "apply"):
        batch = batch.to_dict()
    return [t for t in tree_iter(batch) if isinstance(t, torch.Tensor)]
