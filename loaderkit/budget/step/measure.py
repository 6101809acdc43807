"""Runs training steps for real and measures the bytes they hold, by the profiler."""

from __future__ import annotations

import copy
import functools
import io
import warnings
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from loaderkit.budget.step.memory_profile import memory_profile
from loaderkit.budget.step.peaks import PHASES
from loaderkit.budget.step.step_copies import StepCopies, copy_of_model, step_copies
from loaderkit.budget.step.train_step import (
    Step,
    checkpoint_blocks,
    make_optimizer,
    run_step,
)
from loaderkit.budget.step.users_state import preserve_users_state
from loaderkit.nests import flatten_tensors, map_tensors
from loaderkit.randomness import preserve_random_states

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from loaderkit.budget.step.allocation_log import LogPhase, Phase

_PHASE = "loaderkit: "
_FREED = "loaderkit freed: "
"""What names of ranges begin with; then comes the phase, or a number of bytes."""


def measure_step(model: torch.nn.Module, batch: object, step: Step) -> dict[Phase, int]:
    """Run two training steps on the CPU and find the peak of each phase.

    Args:
        model: A module on the CPU; a copy is trained.
        batch: What it is called with; a copy is used.
        step: How a step is made.

    Returns:
        Peak bytes by phase of parameters, buffers, batch and everything allocated, as
        the events of torch's own allocator add up; no allocator slack.
    """
    copies = real_copies(model, batch, step)
    twin, own_batch = copies.model, copies.batch
    optimizer = make_optimizer(model, copies)
    before_steps = [
        *copies.all_parameters(),
        *twin.buffers(),
        *flatten_tensors(own_batch),
        *optimizer_state(optimizer),
    ]
    base_bytes = held_bytes(before_steps)
    watched = _watch_storages(before_steps)
    del before_steps
    mark_phase = _PhaseRanges()
    with (
        warnings.catch_warnings(),
        preserve_random_states(),
        preserve_users_state(model, step.loss, with_values=True),
        memory_profile() as profiled,
    ):
        warnings.simplefilter("ignore")
        for _ in range(2):
            run_step(twin, own_batch, optimizer, copies.step, mark=mark_phase)
        mark_phase("end")
    peaks = _peaks_by_phase(profiled, base_bytes)
    # Until here, so that what is freed in the step is seen, and nothing else.
    del watched
    return peaks


def _watch_storages(tensors: list[Any]) -> list[weakref.ref[Any]]:
    """Write into a profile when storages are freed that were made before it began.

    The profiler leaves these events out.  A step frees such storages where it puts new
    ones in their place, as a slow copy of a model does by ``slow.data = ...``.
    """
    watched = {}
    for tensor in parts_of_nested(tensors):
        if has_one_storage(tensor):
            storage = tensor.untyped_storage()
            when_freed = functools.partial(_mark_freed, storage.nbytes())
            watched[storage._cdata] = weakref.ref(storage, when_freed)
    return list(watched.values())


def _mark_freed(nbytes: int, _ref: object) -> None:
    with record_function(f"{_FREED}{nbytes}"):
        pass


def real_copies(model: torch.nn.Module, batch: object, step: Step) -> StepCopies:
    """Copy what a step uses, to run it for real.

    Args:
        model: A module; not changed.
        batch: Not changed.
        step: How a step is made.

    Returns:
        What may be trained.
    """
    copies = step_copies(
        model,
        batch,
        step,
        copy_model=_copy_module,
        copy_batch=copied,
        copy_tensor=torch.clone,
    )
    if step.checkpoint:
        checkpoint_blocks(copies.model)
    return copies


def _copy_module(model: torch.nn.Module, copies: dict[int, Any]) -> Any:
    """Copy a module, and what torch cannot copy by itself in it."""
    # Torch cannot copy compressed sparse tensors so.
    copies |= {id(sparse): sparse.clone() for sparse in sparse_tensors_of(model)}
    for parameter in model.parameters():
        # Torch copies a parameter without what it is a part of, and buffers with it.
        if holds_more_than_it_shows(parameter):
            data = copy.deepcopy(parameter.detach(), copies)
            copies[id(parameter)] = torch.nn.Parameter(data, parameter.requires_grad)
    for module in model.modules():
        # The parameters of a copy of a compiled module would be no leaves.
        if isinstance(module, torch.jit.ScriptModule):
            copies[id(module)] = _copy_compiled(module)
    return copy_of_model(model, copies)


def _copy_compiled(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    loaded: torch.jit.ScriptModule = torch.jit.load(buffer)  # type: ignore[no-untyped-call]
    return loaded


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


def held_bytes(tensors: list[Any]) -> int:
    """Sum the storages behind tensors, each once; sparse ones have two or three."""
    bytes_by_storage = {}
    for tensor in parts_of_nested(tensors):
        components = [tensor]
        if not has_one_storage(tensor):
            components = parts_of_sparse(tensor.detach())
        for component in components:
            storage = component.untyped_storage()
            # An identity of the storage, which views of it have too; never read.
            bytes_by_storage[storage._cdata] = storage.nbytes()
    return sum(bytes_by_storage.values())


def has_one_storage(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is dense: sparse ones are made of several others."""
    return tensor.layout in {torch.strided, torch.jagged}


def sparse_tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """List the sparse tensors among a module's buffers and plain attributes."""
    values: list[object] = []
    for module in model.modules():
        values += [*module.buffers(recurse=False), *vars(module).values()]
    return [
        value
        for value in values
        if isinstance(value, torch.Tensor) and not has_one_storage(value)
    ]


def holds_more_than_it_shows(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a part of what it keeps in memory.

    >>> table = torch.zeros(10, 4)
    >>> holds_more_than_it_shows(table[2]), holds_more_than_it_shows(table.T)
    (True, False)
    """
    if tensor.is_nested or not has_one_storage(tensor):
        return False
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def parts_of_sparse(
    tensor: torch.Tensor, mode: AbstractContextManager[object] | None = None
) -> list[torch.Tensor]:
    """List the dense tensors that a sparse one is made of.

    Args:
        tensor: Of any sparse layout.
        mode: Of fake tensors, if it is one.

    Returns:
        Indices first, then values.
    """
    with mode or nullcontext():
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


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
        elif event.name().startswith(_FREED):
            live_bytes -= int(event.name().removeprefix(_FREED))
        elif event.name() == "[memory]":
            live_bytes += event.nbytes()
        peaks[phase] = max(peaks.get(phase, 0), live_bytes)
    # What lives ahead of the forward pass lives at its start, or at the end of the step
    # before: no peak is lost here.
    return {phase: peaks[phase] for phase in PHASES if phase in peaks}


def copied(batch: object) -> Any:
    """Copy a batch, so that no tensor is a view of a larger one; one stays one."""
    copies: dict[int, torch.Tensor] = {}

    def copy_once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.clone()
        return copies[id(tensor)]

    return map_tensors(copy_once, batch)
