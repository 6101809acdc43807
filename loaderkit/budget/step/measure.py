"""Runs training steps for real and measures the bytes they hold, by the profiler."""

from __future__ import annotations

import copy
import io
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from loaderkit.budget.step.memory_profile import memory_profile
from loaderkit.budget.step.peaks import PHASES
from loaderkit.budget.step.train_step import (
    Step,
    checkpoint_blocks,
    make_optimizer,
    run_step,
)
from loaderkit.nests import flatten_tensors, map_tensors

if TYPE_CHECKING:
    from loaderkit.budget.step.allocation_log import LogPhase, Phase

_PHASE = "loaderkit: "


def measure_step(model: torch.nn.Module, batch: Any, step: Step) -> dict[Phase, int]:
    """Run two training steps on the CPU and find the peak of each phase.

    Args:
        model: A module on the CPU; a copy is trained.
        batch: What it is called with; a copy is used.
        step: How a step is made.

    Returns:
        Peak bytes by phase of parameters, buffers, batch and everything allocated, as
        the events of torch's own allocator add up; no allocator slack.
    """
    twin, own_batch = _copy_module(model), copied(batch)
    if step.checkpoint:
        checkpoint_blocks(twin)
    optimizer = make_optimizer(twin.parameters(), step)
    before_steps = [
        *twin.parameters(),
        *twin.buffers(),
        *flatten_tensors(own_batch),
        *optimizer_state(optimizer),
    ]
    base_bytes = held_bytes(before_steps)
    mark_phase = _PhaseRanges()
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        memory_profile() as profiled,
    ):
        warnings.simplefilter("ignore")
        for _ in range(2):
            run_step(twin, own_batch, optimizer, step, mark=mark_phase)
        mark_phase("end")
    return _peaks_by_phase(profiled, base_bytes)


def _copy_module(model: torch.nn.Module) -> Any:
    """Copy a module; deepcopy would make the parameters of a scripted one no leaves."""
    if not isinstance(model, torch.jit.ScriptModule):
        return copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.jit.save(model, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)  # type: ignore[no-untyped-call]


class _PhaseRanges:
    """Writes the phases into the profile, each as a range until the next begins."""

    def __init__(self) -> None:
        self._open_range: Any = None

    def __call__(self, phase: LogPhase) -> None:
        if self._open_range is not None:
            self._open_range.__exit__(None, None, None)
            self._open_range = None
        if phase != "end":
            self._open_range = record_function(_PHASE + phase)
            self._open_range.__enter__()


def optimizer_state(optimizer: torch.optim.Optimizer | None) -> list[Any]:
    """List the tensors of an optimizer's state."""
    # Its keys are parameters: only the values are state.
    return flatten_tensors(list(getattr(optimizer, "state", {}).values()))


def held_bytes(tensors: list[torch.Tensor]) -> int:
    """Sum the storages behind tensors, each once; those of sparse ones are values."""
    bytes_by_storage = {}
    for tensor in parts_of_nested(tensors):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            # An identity of the storage, which views of it have too; never read.
            bytes_by_storage[storage._cdata] = storage.nbytes()
        else:
            bytes_by_storage[id(tensor)] = tensor.detach()._values().nbytes
    return sum(bytes_by_storage.values())


def parts_of_nested(tensors: list[Any]) -> list[torch.Tensor]:
    """Replace torch's jagged tensors by the tensors they are made of."""
    parts = []
    for tensor in tensors:
        is_jagged = tensor.is_nested and tensor.layout is torch.jagged
        parts += [tensor.values(), tensor.offsets()] if is_jagged else [tensor]
    return parts


def _peaks_by_phase(profiled: Any, base_bytes: int) -> dict[Phase, int]:
    """Add up the allocator's events in the order of their start."""
    events = sorted(
        profiled.kineto_results.events(), key=lambda event: int(event.start_ns())
    )
    live_bytes = base_bytes
    phase = "base"
    peaks: dict[str, int] = {}
    for event in events:
        if event.name().startswith(_PHASE):
            phase = event.name().removeprefix(_PHASE)
        elif event.name() == "[memory]":
            live_bytes += event.nbytes()
        peaks[phase] = max(peaks.get(phase, 0), live_bytes)
    # What lives ahead of the forward pass lives at its start, or at the end of the step
    # before: no peak is lost here.
    return {phase: peaks[phase] for phase in PHASES if phase in peaks}


def copied(batch: Any) -> Any:
    """Copy a batch, so that no tensor is a view of a larger one; one stays one."""
    copies: dict[int, torch.Tensor] = {}

    def copy_once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.clone()
        return copies[id(tensor)]

    return map_tensors(copy_once, batch)
