"""Runs a training step whose floats are fake, and logs every byte it would hold.

Only integers and booleans decide shapes; they are small and stay real, so that what
depends on their values runs truly.  Floats are fake: no memory, no arithmetic.  Where
floats decide a shape all the same, their values are computed beside, within a bound.
"""

from __future__ import annotations

import functools
import logging
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from loaderkit.budget.accumulation import references_alone
from loaderkit.budget.allocation_log import Bounds, Log
from loaderkit.budget.fake_tensors import attention_of, fake_batch, fake_model
from loaderkit.budget.formulas import FORMULAS, DifferentiatedCall
from loaderkit.budget.kernels import KERNELS
from loaderkit.budget.measure import state_of, tensors_of
from loaderkit.budget.tracker import ReadsValues, Tracker
from loaderkit.budget.train_step import (
    Step,
    blocks_of,
    checkpoint_blocks,
    make_optimizer,
    run_step,
)
from loaderkit.budget.values import RealValues

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loaderkit.budget.kernels import Workspace
    from loaderkit.budget.tracker import TrackedCall

_REAL_BYTES = 14 << 20
"""What values and one call may take for real: below the 16 MB of the documentation."""
_KEPT_BYTES = 1 << 10
"""What a model may keep between steps before a second one is tracked; as little as
nobody sees in a peak."""
_RECURRENT_BYTES = 20
"""What a recurrent kernel keeps for one byte of its output (17 measured on oneDNN)."""


def track_step(
    model: Any, batch: Any, step: Step, *,
    chosen: float = 1.0, with_values: bool = False,
) -> Log:  # fmt: skip
    """Run a training step with fake floats, as it is once the training runs.

    Args:
        model: A module; it is not changed.
        batch: What it is called with; not changed.
        step: How a step is made.
        chosen: Share of elements that a mask of unknown values is taken to choose.
        with_values: Compute the floats that decide a shape, if they are few.

    Returns:
        The log; the optimizer has its state from the beginning.

    Raises:
        ValueError: A lazy module has no parameters yet.
    """
    values = RealValues() if with_values else None
    log, differs = _tracked(model, batch, step, chosen, values, give_state=True)
    if differs:
        values = RealValues() if with_values else None
        log, _ = _tracked(model, batch, step, chosen, values, give_state=False)
    return log


def _tracked(
    model: Any, batch: Any, step: Step, chosen: float, values: RealValues | None, *,
    give_state: bool,
) -> tuple[Log, bool]:  # fmt: skip
    """Track one step, or two; tell whether the second differs from the one tracked.

    A parameter without a gradient has no state, which was given to it; and what a model
    keeps from one step to the next, such as its last output, is there in the second.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    log = Log()
    twin, held = fake_model(fake, model), fake_batch(fake, batch)
    if step.checkpoint:
        log.checkpoints = len(blocks_of(twin))
        checkpoint_blocks(twin)
    tracker = Tracker(fake, log, chosen=chosen, values=values)
    for part, tensors in (
        ("parameters", twin.parameters()),
        ("buffers", twin.buffers()),
        ("batch", tensors_of(held)),
    ):
        for tensor in tensors:
            tracker.add(tensor, part)
    if values is not None:
        _give_values(values, (twin, held), (model, batch))
    optimizer = make_optimizer(twin.parameters(), step)
    for tensor in state_of(optimizer):  # Adagrad makes it at once
        tracker.add(tensor, "optimizer state")
    references_alone()  # looked up outside of any mode
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_quiet())
        stack.enter_context(_for_functions(step, tracker))
        stack.enter_context(_named(twin, step, tracker))
        stack.enter_context(tracker)
        given = give_state and _give_state(twin, optimizer, tracker)
        if not given:
            run_step(twin, held, optimizer, step, mark=tracker.mark)
        run_step(twin, held, optimizer, step, mark=tracker.mark)
        tracker.label_gradients(twin)
        tracker.label_state(optimizer)
    with warnings.catch_warnings():  # about values that were invented
        warnings.simplefilter("ignore")
        _add_workspaces(tracker.calls, log, cpu=step.target.kind == "cpu")
        _add_formulas(tracker, log)
    unused = any(p.grad is None for p in twin.parameters())
    return log, given and (unused or tracker.kept_bytes() > _KEPT_BYTES)


def _give_values(
    values: RealValues, fakes: tuple[Any, Any], reals: tuple[Any, Any]
) -> None:
    """Name the values of parameters and batch (shared) and of buffers (copied)."""
    for fake, real in zip(fakes[0].parameters(), reals[0].parameters(), strict=True):
        values.give(fake, real, trained=True)
    for fake, real in zip(fakes[0].buffers(), reals[0].buffers(), strict=True):
        if real.device.type == "cpu":
            values.give(fake, real.detach().clone(), trained=False)
    for fake, real in zip(tensors_of(fakes[1]), tensors_of(reals[1]), strict=True):
        values.give(fake, real, trained=False)


def _give_state(model: Any, optimizer: Any, tracker: Tracker) -> bool:
    """Let the optimizer make its state, as the first step of a training does."""
    parameters = list(model.parameters())
    if optimizer is None:
        return True
    if not all(p.requires_grad for p in parameters):
        return False
    if any(getattr(module, "sparse", False) for module in model.modules()):
        return False  # their gradients are sparse, which cannot be made of zeros
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tracker.label_state(optimizer)
    return True


def _add_workspaces(calls: list[TrackedCall], log: Log, *, cpu: bool) -> None:
    """Add what kernels hold inside to a log, as far as small real calls tell.

    Args:
        calls: Of the step.
        log: Of the step; changed.
        cpu: Whether the step is for a CPU; else what was measured is an upper end.
    """
    pairs = {(each.call, each.outputs) for each in calls if each.call is not None}
    room = max(_REAL_BYTES - log.real_bytes, 0) if cpu else 0
    known = KERNELS.workspaces(pairs, room)
    for each in calls:
        workspace = None if each.call is None else known[each.call, each.outputs]
        if workspace is None or not cpu:
            _add_unknown(each, workspace, log)
            continue
        if not workspace.exact:
            what = "a workspace in proportion to that of smaller calls"
            log.assumptions[what, each.name] += 1
        log.holds_inside(each.position, workspace.held)
        output = workspace.output
        if each.fake and each.numbers and output not in {None, (each.made,) * 3}:
            more = Bounds(*(end - each.made for end in output))
            log.corrections.setdefault(_storage_to_correct(each, log), more)


def _storage_to_correct(each: TrackedCall, log: Log) -> int:
    """Choose the output that takes more for real than as a fake.

    It is the one that is empty as a fake: what a recurrent kernel keeps for its
    backward pass, and a checkpoint drops while the outputs beside it live on.
    """
    empty = [number for number in each.numbers if not log.events[number][1]]
    return empty[-1] if empty else each.numbers[0]


def _add_formulas(tracker: Tracker, log: Log) -> None:
    """Widen the interval where autograd takes other storages without a mode."""
    differentiated = [
        DifferentiatedCall(each.call, each.with_grad)
        for each in tracker.calls
        if each.call is not None and any(each.with_grad)
    ]
    different = FORMULAS.different(differentiated)
    # calls that cannot be made for real: nothing is known of their formulas
    unknown = tuple(
        _node_of(each.name)
        for each in tracker.calls
        if each.call is None and any(each.with_grad)
    )
    for node, numbers in tracker.by_formula:
        times = different.get(node, 1.0)
        if times == 1.0 and not (unknown and node.startswith(unknown)):
            continue
        log.assumptions["a formula of autograd that is not tracked", node] += 1
        for number in numbers:
            size = log.events[number][1]
            log.corrections[number] = Bounds(-size, 0, round(size * max(times, 1.0)))


def _node_of(name: str) -> str:
    """Guess autograd's name of an operator's formula, as its code generator does."""
    words = name.removeprefix("aten::").partition(".")[0].split("_")
    return "".join(word.capitalize() for word in words) + "Backward"


def _add_unknown(each: TrackedCall, workspace: Workspace | None, log: Log) -> None:
    """Widen the upper end by what a kernel may take that was not measured."""
    opaque = workspace is None or (each.call is not None and each.call.opaque)
    if opaque:
        what = "no more inside the kernel than twice what it touches"
        log.assumptions[what, each.name] += 1
    high = 2 * each.touched if opaque else 0
    if workspace is not None:
        high = max(high, workspace.held.high)
    log.holds_inside(each.position, Bounds(0, 0, high))
    recurrent = any(word in each.name for word in ("_rnn", "_lstm", "_gru"))
    if recurrent and each.numbers:
        kept = _RECURRENT_BYTES * max(each.outputs, default=0)
        log.corrections[_storage_to_correct(each, log)] = Bounds(0, 0, kept)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from writing errors of fakes to stderr: there is another way."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _for_functions(step: Step, tracker: Tracker) -> Iterator[None]:
    """Choose the target's attention, and answer what reads values."""
    with attention_of(step, tracker.log), ReadsValues(tracker):
        yield


@contextmanager
def _named(model: Any, step: Step, tracker: Tracker) -> Iterator[None]:
    """Tell the tracker which module computes."""
    path: list[str] = []
    hooks = []
    again = ExitStack()

    def enter(name: str, module: Any, _args: Any) -> None:
        # autograd runs the backward pass without modes of functions, and with it
        # blocks that are computed again
        if tracker.phase == "backward" and not path:
            again.enter_context(_for_functions(step, tracker))
        path.append(f"{name} {type(module).__name__}".strip())
        tracker.module = path[-1]

    def leave(_module: Any, _args: Any, _out: Any) -> None:
        path.pop()
        tracker.module = path[-1] if path else ""
        if not path:
            again.close()

    for name, module in model.named_modules():
        hooks += [
            module.register_forward_pre_hook(functools.partial(enter, name)),
            # also where checkpoint ends a block early, which it does by an exception
            module.register_forward_hook(leave, always_call=True),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def holds_assumption(log: Log, words: tuple[str, ...]) -> bool:
    """Tell whether one of some assumptions was made."""
    return any(what in words for what, _ in log.assumptions)
