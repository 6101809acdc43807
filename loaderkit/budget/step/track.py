"""Runs a training step whose floats are fake, and logs every byte it would hold.

Only integers and booleans decide shapes; they are small and stay real, so that what
depends on their values runs truly.  Floats are fake: no memory, no arithmetic.  Where
floats decide a shape all the same, their values are computed beside, within a bound.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from loaderkit.budget.step.accumulation import references_alone
from loaderkit.budget.step.allocation_log import Log
from loaderkit.budget.step.assumed_scalars import MOST, Assumed
from loaderkit.budget.step.cuda_functions import CudaFunctions
from loaderkit.budget.step.fake_tensors import (
    attention_of,
    fake_copies,
    make_fake_mode,
    without_torch_logging,
)
from loaderkit.budget.step.measure import (
    has_one_storage,
    held_bytes,
    optimizer_state,
    sparse_tensors_of,
)
from loaderkit.budget.step.memory_profile import no_collection
from loaderkit.budget.step.optimizer_states import STATES
from loaderkit.budget.step.peaks import highest_before_step, peaks_of, totals
from loaderkit.budget.step.real_values import RealValues
from loaderkit.budget.step.remembered import remembering
from loaderkit.budget.step.tracker import ReadsValues, Tracker
from loaderkit.budget.step.train_step import (
    Step,
    blocks_of,
    checkpoint_blocks,
    make_optimizer,
    run_step,
)
from loaderkit.budget.step.unseen_memory import add_formulas, add_workspaces
from loaderkit.budget.step.users_state import preserve_users_state
from loaderkit.library_files import is_library_file
from loaderkit.nests import flatten_tensors
from loaderkit.randomness import preserve_random_states

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from loaderkit.budget.step.allocation_log import Part
    from loaderkit.budget.step.step_copies import StepCopies


_KEPT_BYTES = 1 << 10
"""What a model may keep between steps before a second one is tracked; chosen: as little
as nobody sees in a peak."""


_AUTOCAST_IS_OFF = r".*CUDA is not available.*[Dd]isabling"
"""Torch's words where a model asks for ``torch.autocast("cuda")`` without a GPU."""


def track_step(
    model: torch.nn.Module,
    batch: object,
    step: Step,
    *,
    assumed: Assumed = MOST,
    with_values: bool = False,
    begun: list[Log] | None = None,
) -> Log:
    """Run a training step with fake floats, as it is once the training runs.

    Args:
        model: A module; it is not changed.
        batch: What it is called with; not changed.
        step: How a step is made.
        assumed: What masks and scalars of unknown values are taken for.
        with_values: Compute the floats that decide a shape, if they are few.
        begun: Gets each log at its beginning: what is in it remains where a step cannot
            be tracked to its end.

    Returns:
        The log; the optimizer has its state from the beginning.

    Raises:
        ValueError: A lazy module has no parameters yet.
    """
    for give_state in (True, False):
        values = RealValues() if with_values else None
        log = Log()
        if begun is not None:
            begun.append(log)
        fake = make_fake_mode()
        with (
            remembering(),
            no_collection(),
            preserve_users_state(model, step.loss) as snapshots,
        ):
            tracker = Tracker(
                fake, log, snapshots=snapshots, assumed=assumed, values=values
            )
            is_like_later_steps = _track_once(
                model, batch, step, tracker, give_state=give_state
            )
        if is_like_later_steps:
            break
    return log


def _track_once(
    model: torch.nn.Module,
    batch: object,
    step: Step,
    tracker: Tracker,
    *,
    give_state: bool,
) -> bool:
    """Track one step where the optimizer can be given its state, else two.

    With a state that was given, the second step may still differ: a parameter without a
    gradient has no state in a training, and what a model keeps from one step to the
    next, such as its last output, is there in the second only.  And the first update
    may take more than the second.

    Returns:
        Whether the second step of a training would be like this one.
    """
    fake, log, values = tracker.fake, tracker.log, tracker.values
    copies = fake_copies(fake, model, batch, step)
    twin, twin_batch, step = copies.model, copies.batch, copies.step
    if step.checkpoint:
        log.checkpoints = len(blocks_of(twin))
        checkpoint_blocks(twin)

    _add_sparse(tracker, sparse_tensors_of(twin), sparse_tensors_of(model), "buffers")
    _add_sparse(tracker, _sparse_in(twin_batch), _sparse_in(batch), "batch")
    tracker.ledger.add_all(twin.parameters(), "parameters")
    tracker.ledger.add_all(twin.buffers(), "buffers")
    tracker.ledger.add_all(flatten_tensors(twin_batch), "batch")
    if values is not None:
        _name_model_values(values, twin, model)
        _name_batch_values(values, twin_batch, batch)
    optimizer = make_optimizer(model, copies)
    tracker.note_optimizer(optimizer)
    # Adagrad makes its state at once, others in the first step.
    tracker.ledger.add_all(optimizer_state(optimizer), "optimizer state")

    # Looked up here, since it cannot be under a mode.
    references_alone()
    with ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message=_AUTOCAST_IS_OFF)
        stack.enter_context(preserve_random_states())
        stack.enter_context(without_torch_logging())
        stack.enter_context(_function_modes(step, tracker))
        stack.enter_context(_modules_named(twin, step, tracker))
        stack.enter_context(tracker)
        has_state = give_state and _give_state(copies, optimizer, tracker)
        if not has_state:
            run_step(twin, twin_batch, optimizer, step, mark=tracker.mark)
        run_step(twin, twin_batch, optimizer, step, mark=tracker.mark)
        tracker.ledger.label_gradients(copies.all_parameters())
        tracker.ledger.label_state(optimizer)
    log.lacks_autocast |= bool(caught)
    tracker.ledger.move_captured_to_beginning()

    with warnings.catch_warnings():
        # Small calls are made with invented values, of which torch may warn.
        warnings.simplefilter("ignore")
        add_workspaces(tracker.tracked.calls, log, step.target.traits.kernels)
        add_formulas(tracker.tracked, log)
    may_change = has_state and _may_change(copies, tracker)
    tracker.ledger.end()
    return not may_change


def _may_change(copies: StepCopies, tracker: Tracker) -> bool:
    """Tell whether a second step may take something else than the one that was run."""
    parameters = copies.all_parameters()
    has_unused = any(parameter.grad is None for parameter in parameters)
    keeps_something = tracker.ledger.unowned_bytes() > _KEPT_BYTES
    # An optimizer that finds a basis for its gradients does so in its first update.
    update_bytes = totals(peaks_of(tracker.log)).get("step", 0)
    takes_more_at_first = highest_before_step(tracker.log) > update_bytes
    return has_unused or keeps_something or takes_more_at_first


def _sparse_in(batch: object) -> list[torch.Tensor]:
    tensors = flatten_tensors(batch)
    return [tensor for tensor in tensors if not has_one_storage(tensor)]


def _add_sparse(
    tracker: Tracker,
    fakes: Sequence[torch.Tensor],
    reals: Sequence[torch.Tensor],
    owner: Part,
) -> None:
    """Add sparse tensors of the user's: their fakes forget what they hold."""
    for fake, real in zip(fakes, reals, strict=True):
        if not tracker.sparse.name_elements(fake, real):
            tracker.log.sparse_bytes += held_bytes([real])
            tracker.ledger.add(real, owner)


def _name_model_values(
    values: RealValues, twin: torch.nn.Module, model: torch.nn.Module
) -> None:
    """Name the values of parameters, which are shared, and of buffers, copied."""
    for fake, real in zip(twin.parameters(), model.parameters(), strict=True):
        values.name_value(fake, real, trained=True)
    for fake_buffer, buffer in zip(twin.buffers(), model.buffers(), strict=True):
        if buffer.device.type == "cpu":
            # A step may write to a buffer, and the user's must not change.
            values.name_value(fake_buffer, buffer.detach().clone(), trained=False)


def _name_batch_values(values: RealValues, twin_batch: object, batch: object) -> None:
    fakes, reals = flatten_tensors(twin_batch), flatten_tensors(batch)
    for fake, real in zip(fakes, reals, strict=True):
        values.name_value(fake, real, trained=False)


def _give_state(
    copies: StepCopies, optimizer: torch.optim.Optimizer | None, tracker: Tracker
) -> bool:
    """Let the optimizer make its state, as the first step of a training does.

    Returns:
        Whether it has one now; if not, a first step must be tracked to make it.
    """
    if optimizer is None:
        return True
    parameters = copies.all_parameters()
    if not all(parameter.requires_grad for parameter in parameters):
        return False
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not all(id(parameter) in updated for parameter in parameters):
        # The gradients of the others are kept from step to step: none frees them.
        return False
    if any(getattr(module, "sparse", False) for module in copies.model.modules()):
        # Their gradients are sparse, which cannot be made of zeros.
        return False
    STATES.give(optimizer)
    tracker.ledger.label_state(optimizer)
    return True


@contextmanager
def _function_modes(step: Step, tracker: Tracker) -> Iterator[None]:
    """Choose the target's attention and operators, and answer what reads values."""
    is_cuda = step.target.traits.kernels == "of CUDA"
    of_target = CudaFunctions(tracker.ledger) if is_cuda else nullcontext()
    with attention_of(step, tracker.log), ReadsValues(tracker), of_target:
        yield


@contextmanager
def _modules_named(
    model: torch.nn.Module, step: Step, tracker: Tracker
) -> Iterator[None]:
    """Tell the tracker which module computes."""
    path: list[str] = []
    hooks = []
    modes_of_backward = ExitStack()

    def enter(name: str, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        # Autograd runs the backward pass without modes of functions, and with it the
        # blocks that a checkpoint computes again.
        if tracker.phase == "backward" and not path:
            modes_of_backward.enter_context(_function_modes(step, tracker))
            tracker.checkpoints.note_block()
        tracker.ledger.note_resized(flatten_tensors(args))
        path.append(_label_of(name, module))
        tracker.ledger.modules.name = path[-1]

    def leave(_module: torch.nn.Module, args: tuple[Any, ...], _out: object) -> None:
        tracker.ledger.note_resized(flatten_tensors(args))
        path.pop()
        tracker.ledger.modules.name = path[-1] if path else ""
        if not path:
            modes_of_backward.close()

    for name, module in model.named_modules():
        tracker.log.forwards[_label_of(name, module)] = _line_of_forward(model, name)
        hooks += [
            module.register_forward_pre_hook(functools.partial(enter, name)),
            # Always: a checkpoint ends a block early, by an exception.
            module.register_forward_hook(leave, always_call=True),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _label_of(name: str, module: torch.nn.Module) -> str:
    return f"{name} {type(module).__name__}".strip()


def _line_of_forward(model: torch.nn.Module, name: str) -> str:
    """Find the code of the user's own that calls a module.

    It is the ``forward`` of the module itself, or of the nearest one around it, whose
    class is no library's: nobody changes ``torch.nn.Linear``, or what torch.fx wrote,
    whose name has a number that differs from run to run.
    """
    path = name.split(".") if name else []
    for length in range(len(path), -1, -1):
        around = model.get_submodule(".".join(path[:length]))
        if isinstance(around, GraphModule):
            continue
        code = getattr(type(around).forward, "__code__", None)
        if code is not None and not is_library_file(code.co_filename):
            return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    return ""


def has_assumption(log: Log, assumptions: tuple[str, ...]) -> bool:
    """Tell whether one of some assumptions was made."""
    return any(assumption in assumptions for assumption, _ in log.assumptions)
