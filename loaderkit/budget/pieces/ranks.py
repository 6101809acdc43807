"""Steps of several ranks, none of which waits for a rank that ran out of memory.

``DistributedDataParallel`` communicates with the other ranks in its forward pass
(buffers) and in the backward pass (gradients).  A rank that retries a piece would do so
once more than the others, and all ranks would hang.  So pieces are computed without the
wrapper, and every rank does its communication once a step, in this order: broadcast the
buffers, agree that no rank failed, average the gradients, agree that all updated.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loaderkit.errors import BudgetError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


def is_distributed(model: torch.nn.Module) -> TypeGuard[DistributedDataParallel]:
    """Tell whether a model is wrapped for several ranks, and they are initialized."""
    wrapped = isinstance(model, DistributedDataParallel)
    return wrapped and dist.is_available() and dist.is_initialized()


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Give the module inside the wrapper, whose forward pass does not communicate."""
    return model.module if is_distributed(model) else model


def check_wrapper(model: torch.nn.Module) -> None:
    """Refuse a part of a wrapped model, and a wrapper inside of something else.

    Nobody would average the gradients of the one; the other communicates in each piece,
    and a rank that tries one again would wait for the others for ever.

    Args:
        model: That is trained in pieces.

    Raises:
        OptionError: It is one of these, and there are several ranks.
    """
    several = dist.is_available() and dist.is_initialized()
    if not several or is_distributed(model) or dist.get_world_size() == 1:
        return
    modules = set(model.modules())
    kind, wrapper = type(model).__name__, DistributedDataParallel.__name__
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        message = f"MicroBatcher was given {kind} with a {wrapper} inside."
        why = "it communicates in every piece: a rank that tries one again would wait "
        why += "for the others for ever"
        fix = f"MicroBatcher({wrapper}(model), ...), with the wrapper around all others"
        raise OptionError(message, why=why, fix=fix)
    # A module does not know what wraps it.  Asked of the type: a proxy may answer
    # isinstance by making what it stands for.
    for owner in gc.get_objects():
        is_wrapper = issubclass(type(owner), DistributedDataParallel)
        if is_wrapper and model in set(owner.modules()):
            message = f"MicroBatcher was given {kind}, which is inside a {wrapper}."
            why = "nobody would average its gradients over the ranks"
            fix = "MicroBatcher(ddp, ...) and not MicroBatcher(ddp.module, ...)"
            raise OptionError(message, why=why, fix=fix)


def broadcast_buffers(model: torch.nn.Module) -> None:
    """Broadcast the buffers of rank 0, as the wrapper does before a step."""
    if not is_distributed(model) or not model.broadcast_buffers:
        return
    with torch.no_grad():
        for buffer in model.module.buffers():
            dist.broadcast(buffer, 0, group=model.process_group)


def average_gradients(model: torch.nn.Module) -> None:
    """Average the gradients over all ranks, once a step."""
    if not is_distributed(model):
        return
    ranks = dist.get_world_size(model.process_group)
    for parameter in model.parameters():
        if parameter.requires_grad:
            # A rank whose data did not reach a parameter takes part all the same.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=model.process_group)
            parameter.grad.div_(ranks)


def agreed(model: torch.nn.Module, run: Callable[[], Result]) -> Result:
    """Call a function on every rank, and raise on all ranks if one of them failed.

    Args:
        model: The model; if it is not wrapped, the function is only called.
        run: The function.

    Returns:
        Its result.

    Raises:
        BudgetError: Another rank failed.  A rank that failed raises its own error.
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
    # 0 where the rank succeeded, so that rank 0 counts as 1.
    failed_rank = torch.zeros(1, dtype=torch.int64, device=model.device)
    if failure is not None:
        failed_rank += 1 + dist.get_rank(group)
    dist.all_reduce(failed_rank, op=dist.ReduceOp.MAX, group=group)

    if failure is not None:
        raise failure
    if int(failed_rank):
        message = (
            f"Rank {int(failed_rank) - 1} failed in this step, so no rank made it."
        )
        why = "the ranks would differ; its own output has the error"
        raise BudgetError(
            message, why=why, fix="the same step again, or a smaller batch"
        )
    return result  # type: ignore[return-value]
