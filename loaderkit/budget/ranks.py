"""Steps of several ranks that do not wait for one that ran out of memory.

``DistributedDataParallel`` talks to the other ranks in its forward pass (buffers) and
in the backward pass (gradients).  A piece that is tried again on one rank would do so
once more than the others, and all would wait for ever.  So pieces are computed without
the wrapper, and what it would have sent is sent once a step, by every rank, in this
order: buffers, whether all went well, gradients, whether all updated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loaderkit.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


def is_distributed(model: Any) -> bool:
    """Tell whether a model is wrapped, and there are ranks to talk to."""
    wrapped = isinstance(model, DistributedDataParallel)
    return wrapped and dist.is_available() and dist.is_initialized()


def unwrapped(model: Any) -> Any:
    """Give the module inside the wrapper, whose forward pass waits for nobody."""
    return model.module if is_distributed(model) else model


def broadcast_buffers(model: Any) -> None:
    """Send the first rank's buffers to all, as the wrapper does before a step."""
    if not is_distributed(model) or not model.broadcast_buffers:
        return
    with torch.no_grad():
        for buffer in model.module.buffers():
            dist.broadcast(buffer, 0, group=model.process_group)


def average_gradients(model: Any) -> None:
    """Average the gradients over all ranks, once a step."""
    if not is_distributed(model):
        return
    ranks = dist.get_world_size(model.process_group)
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=model.process_group)
            parameter.grad.div_(ranks)


def agreed(model: Any, run: Callable[[], Result]) -> Result:
    """Do something on every rank; raise on all of them where one failed.

    Args:
        model: Wrapped, or not: then it is only done.
        run: What is done.

    Returns:
        Its result.

    Raises:
        BudgetError: Another rank failed; the one that did raises its own error.
    """
    if not is_distributed(model):
        return run()
    failure: Exception | None = None
    result: Result | None = None
    try:
        result = run()
    except Exception as error:  # noqa: BLE001 -- raised below, once the others know
        failure = error
    group = model.process_group
    failed = torch.zeros(1, dtype=torch.int64, device=model.device)
    failed += 0 if failure is None else 1 + dist.get_rank(group)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if failure is not None:
        raise failure
    if int(failed):
        what = f"Rank {int(failed) - 1} failed in this step, so no rank made it."
        why = "the ranks would differ; its own output has the error"
        raise BudgetError(what, why=why, fix="the same step again, or a smaller batch")
    return result  # type: ignore[return-value]
