"""Adds to a log what a step with fake floats does not show.

Kernels take buffers that no operator gives (``kernels`` knows them), and some formulas
of autograd take other storages while they are tracked than in a training (``formulas``
knows those).  What is only known within bounds widens the interval, and is told.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from loaderkit.budget.step.allocation_log import UncertainBytes
from loaderkit.budget.step.cuda_kernels import inside_cuda_kernel, kept_by_cuda
from loaderkit.budget.step.formulas import (
    FORMULAS,
    DifferentiatedCall,
    guess_node,
)
from loaderkit.budget.step.kernels import KERNELS, SizedCall
from loaderkit.budget.step.step_errors import error_of_step

if TYPE_CHECKING:
    from loaderkit.budget.step.allocation_log import Log
    from loaderkit.budget.step.devices import Kernels
    from loaderkit.budget.step.kernels import Workspace
    from loaderkit.budget.step.tracked_calls import TrackedCall, TrackedCalls

_REAL_BYTES = 14 << 20
"""What values and one call may take for real; derived: below the 16 MB that the
documentation states, less what Python takes."""
_RECURRENT_BYTES = 20
"""What a recurrent kernel keeps for one byte of its output (17 measured on oneDNN)."""
_OPAQUE_FACTOR = 2
"""How many times what a kernel touches it may hold inside, where nothing was measured;
chosen: packed copies of all operands, and of all outputs."""
_RECURRENT = ("_rnn", "_lstm", "_gru")
"""Words in the names of operators that keep a workspace for the backward pass."""


_LESS_THAN_TRACKED = 4
"""What share of a storage a formula that takes less than it was tracked with may still
take more at one place; chosen: one buffer of four."""
_SHARE_BY_SIZE = 1.5
"""How many times as much more a formula may take in other proportions of the sizes than
in the small call that was made; chosen: two buffers where another has three."""
_NOTHING = UncertainBytes.exactly(0)


_ELEMENT_BY_ELEMENT = frozenset({"prims::add", "prims::mul", "prims::sub"})
"""Parts that hold nothing beside their outputs, as in derivatives that go forward."""


def add_workspaces(calls: list[TrackedCall], log: Log, kernels: Kernels) -> None:
    """Add what kernels hold inside to a log, as far as small real calls tell.

    Args:
        calls: Of the step.
        log: Of the step; changed.
        kernels: Of the device that the step is for; what was measured here is an upper
            end for any but the CPU's.

    Raises:
        StepError: A kernel refuses the types of its operands.
    """
    sized_calls = {
        SizedCall(tracked.call, tracked.outputs)
        for tracked in calls
        if tracked.call is not None
    }
    is_cpu = kernels == "of this CPU"
    probe_limit_bytes = max(_REAL_BYTES - log.real_bytes, 0) if is_cpu else 0
    workspaces = KERNELS.workspaces(sized_calls, probe_limit_bytes)
    for tracked in calls:
        workspace = None
        if tracked.call is not None:
            workspace = workspaces[SizedCall(tracked.call, tracked.outputs)]
            # Rules for fake tensors do not look at all types; the kernel does.  In a
            # backward pass they may give another type than the kernel, which the next
            # one then refuses: that of a layer norm does, of short inputs.
            if workspace is None and any(tracked.with_grad):
                sized = SizedCall(tracked.call, tracked.outputs)
                type_error = KERNELS.type_error(sized)
                if type_error is not None:
                    raise error_of_step(type_error) from type_error
        if workspace is None or not is_cpu:
            _add_unmeasured(tracked, workspace, log)
            if kernels == "of CUDA":
                _add_of_cuda(tracked, log)
        else:
            _add_measured(tracked, workspace, log)


def _add_measured(tracked: TrackedCall, workspace: Workspace, log: Log) -> None:
    """Add what a kernel of this CPU takes, as it was measured."""
    if not workspace.exact:
        assumption = "a workspace in proportion to that of smaller calls"
        log.assumptions[assumption, tracked.name] += 1
    log.holds_inside(tracked.position, workspace.held)

    output = workspace.output
    if output is None or not tracked.fake or not tracked.numbers:
        return
    if output != UncertainBytes.exactly(tracked.made_bytes):
        more = UncertainBytes(*(end - tracked.made_bytes for end in output))
        log.corrections.setdefault(_storage_to_correct(tracked, log), more)


def _add_unmeasured(
    tracked: TrackedCall, workspace: Workspace | None, log: Log
) -> None:
    """Widen the upper end by what a kernel may take that was not measured."""
    is_opaque = workspace is None or (tracked.call is not None and tracked.call.opaque)
    high = 0
    if tracked.name in _ELEMENT_BY_ELEMENT:
        assumption = "a part of an operator that torch takes apart"
        log.assumptions[assumption, tracked.name] += 1
    elif is_opaque:
        assumption = "no more inside the kernel than twice what it touches"
        log.assumptions[assumption, tracked.name] += 1
        high = _OPAQUE_FACTOR * tracked.touched_bytes
    if workspace is not None:
        high = max(high, workspace.held.high)
    log.holds_inside(tracked.position, UncertainBytes(0, 0, high))
    if tracked.name.startswith("prims::"):
        # Parts of an operator that torch takes apart for fakes, and may not otherwise.
        for number in tracked.numbers:
            size = log.events[number].change
            log.corrections.setdefault(number, UncertainBytes(-size, 0, 0))

    is_recurrent = any(word in tracked.name for word in _RECURRENT)
    if is_recurrent and tracked.numbers:
        kept_bytes = _RECURRENT_BYTES * max(tracked.outputs, default=0)
        number = _storage_to_correct(tracked, log)
        log.corrections[number] = UncertainBytes(0, 0, kept_bytes)


def _add_of_cuda(tracked: TrackedCall, log: Log) -> None:
    """Add what a kernel of CUDA takes, as far as torch's source tells."""
    if tracked.call is None:
        return
    inside = inside_cuda_kernel(tracked.call, tracked.touched_bytes)
    log.holds_inside(tracked.position, inside)
    kept_bytes = kept_by_cuda(tracked.call)
    if kept_bytes and tracked.numbers:
        number = _storage_to_correct(tracked, log)
        log.corrections.setdefault(number, UncertainBytes(0, kept_bytes, kept_bytes))


def _storage_to_correct(tracked: TrackedCall, log: Log) -> int:
    """Choose the output that takes more for real than as a fake.

    It is the one that is empty as a fake: what a recurrent kernel keeps for its
    backward pass, and a checkpoint drops while the outputs beside it live on.
    """
    empty = [number for number in tracked.numbers if not log.events[number].change]
    return empty[-1] if empty else tracked.numbers[0]


def add_formulas(tracked_calls: TrackedCalls, log: Log) -> None:
    """Widen the interval where autograd takes other storages without a mode."""
    differentiated = [call for call in tracked_calls.calls if any(call.with_grad)]
    formulas = FORMULAS.different(
        DifferentiatedCall(tracked.call, tracked.with_grad)
        for tracked in differentiated
        if tracked.call is not None
    )
    times_by_node = {f.node: f.times for f in formulas if f.times is not None}
    # Nothing is known of the formulas of calls that cannot be made for real.
    unknown_nodes = tuple(
        guess_node(tracked.name) for tracked in differentiated if tracked.call is None
    )
    unknown_nodes += tuple(f.node for f in formulas if f.times is None)
    groups = [
        (node, list(gradients))
        for node, gradients in itertools.groupby(
            tracked_calls.made_by_formulas, key=lambda gradient: gradient.node
        )
    ]
    # A formula ends where the next one makes its first storage.
    ends = [gradients[0].numbers[0] for _, gradients in groups[1:]]
    ends.append(len(log.events))
    for (node, gradients), end in zip(groups, ends, strict=True):
        times = times_by_node.get(node, 1.0)
        is_unknown = bool(unknown_nodes) and node.startswith(unknown_nodes)
        if times == 1.0 and not is_unknown:
            continue
        assumption = "a formula of autograd that is not tracked"
        log.assumptions[assumption, node] += len(gradients)
        numbers = [number for gradient in gradients for number in gradient.numbers]
        if times > 1.0 and not is_unknown:
            _raise_highest(numbers, times, log)
            continue
        likely_share = 1.0 if is_unknown else _share_made(numbers, times, end, log)
        for number in numbers:
            size = log.events[number].change
            high = size if is_unknown else size // _LESS_THAN_TRACKED
            likely = 0
            if _is_freed_before(end, number, log):
                likely = round((likely_share - 1) * size)
            log.corrections[number] = UncertainBytes(-size, likely, high)


def _is_freed_before(end: int, number: int, log: Log) -> bool:
    """Tell whether a formula frees a storage that it made: it is no gradient."""
    return any(event.number == number for event in log.events[number + 1 : end])


def _share_made(numbers: list[int], times: float, end: int, log: Log) -> float:
    """Tell which share of its temporaries a formula makes without a mode.

    Such as that of a product over an axis: with a mode it is ready for zeros, of which
    there are none in most trainings.

    Args:
        numbers: Storages that it made under a mode.
        times: What it takes without, for one byte with a mode; at the highest.
        end: The event with which it has ended.
        log: Of the step.

    Returns:
        From 0 to 1; what it gives is made in any case.
    """
    temporaries = {n for n in numbers if _is_freed_before(end, n, log)}
    gradients = set(numbers) - temporaries
    live_gradients = live_temporaries = 0
    highest = (0, 0, 0)
    for number, change in log.events[min(numbers) : end]:
        if number in temporaries:
            live_temporaries += change
        elif number in gradients:
            live_gradients += change
        total = live_gradients + live_temporaries
        highest = max(highest, (total, live_temporaries, live_gradients))
    total, live_temporaries, live_gradients = highest
    if not live_temporaries:
        return 1.0
    share = (times * total - live_gradients) / live_temporaries
    return min(max(share, 0.0), 1.0)


def _raise_highest(numbers: list[int], times: float, log: Log) -> None:
    """Add what a formula takes more without a mode, where it takes most under one.

    While a formula runs, nothing else is made or freed: the peak is higher by what it
    takes more at its own highest point, wherever that is.

    Args:
        numbers: Storages that it made under a mode.
        times: What it takes without, for one byte with a mode.
        log: Of the step; changed.
    """
    own_numbers = set(numbers)
    live = highest = 0
    position = numbers[0]
    for here in range(min(numbers), max(numbers) + 1):
        number, change = log.events[here]
        if number in own_numbers:
            live += change
        inside = log.inside.get(here, _NOTHING)
        if live + inside.likely > highest:
            highest, position = live + inside.likely, here
    more = round((times - 1) * highest)
    inside = log.inside.get(position, _NOTHING)
    log.inside[position] = UncertainBytes(
        inside.low, inside.likely + more, inside.high + round(_SHARE_BY_SIZE * more)
    )
