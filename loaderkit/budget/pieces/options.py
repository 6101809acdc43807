"""What a trainer in pieces is built of, checked when it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loaderkit.arguments import check_choice, check_integer, check_positive, check_truth
from loaderkit.budget.cutting import WEIGHTS
from loaderkit.budget.step.train_step import check_loss, needs_closure
from loaderkit.errors import BudgetError, OptionError, StepError
from loaderkit.fixes import Setting
from loaderkit.function_arguments import check_callable
from loaderkit.mistaken import mistaken_for_model
from loaderkit.units import count_of
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loaderkit.budget.keywords import Loss

_AUTOCAST_TYPES = (torch.bfloat16, torch.float16)
"""What ``torch.autocast`` computes in; with another type it warns, and does nothing."""
_SCALER_METHODS = ("scale", "unscale_", "step", "update")


def check_model_and_optimizer(
    model: object, optimizer: object, loss: Loss | None
) -> None:
    """Refuse what cannot train: no model, no optimizer, or one of another model.

    Args:
        model: What was given as the module.
        optimizer: What was given as the optimizer.
        loss: Of the step; a module may have parameters of its own.

    Raises:
        OptionError: One of them is something else, or the optimizer updates none of the
            parameters, or runs the model by itself.
    """
    mistake = mistaken_for_model(model, "MicroBatcher(model, optimizer, loss)")
    if mistake is not None:
        raise OptionError(mistake.message, why=mistake.why, fix=mistake.instead)
    methods = ("step", "zero_grad")
    missing = [name for name in methods if not hasattr(optimizer, name)]
    if missing or isinstance(optimizer, type):
        name = (missing or methods)[0]
        message = f"optimizer has no {name}(): {show_value(optimizer)}."
        why = "it is called once for all pieces of a batch"
        if hasattr(optimizer, "optimizer"):
            why = "it is a scheduler, which has an optimizer, and steps by itself"
            raise OptionError(message, why=why, fix="optimizer=scheduler.optimizer")
        fix = "optimizer=torch.optim.AdamW(model.parameters())"
        if isinstance(optimizer, type):
            why = "it is a class, which was not called yet"
            if optimizer.__module__.startswith("torch.optim."):
                fix = f"optimizer=torch.optim.{optimizer.__name__}(model.parameters())"
        raise OptionError(message, why=why, fix=fix)
    if needs_closure(optimizer):
        name = type(optimizer).__name__
        message = f"{name}.step() cannot be called without a closure."
        why = "its closure would run the whole batch, which is trained in pieces here"
        fix = "optimizer=torch.optim.AdamW(model.parameters())"
        raise OptionError(message, why=why, fix=fix)
    check_loss(loss)
    assert isinstance(model, torch.nn.Module)
    _refuse_optimizer_of_another_model(model, optimizer, loss)


def _refuse_optimizer_of_another_model(
    model: torch.nn.Module, optimizer: object, loss: object
) -> None:
    """Refuse an optimizer that has none of the parameters that are there.

    That it has others too is usual: those of a loss that is learned.  That it lacks
    some is usual as well: those that are frozen.
    """
    there = {id(parameter) for parameter in model.parameters()}
    if isinstance(loss, torch.nn.Module):
        there |= {id(parameter) for parameter in loss.parameters()}
    updated = {id(parameter) for parameter in parameters_of(optimizer)}
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    # A model that is frozen serves a loss that is learned, whatever function that is.
    # An optimizer of another library may hide what it updates.
    if is_trained and updated and not there & updated:
        message = "optimizer has none of the parameters of model: nothing would be "
        message += "trained."
        raise OptionError(message, why=_OF_ANOTHER, fix=_made_again(optimizer))


def check_gradients(model: torch.nn.Module, optimizer: object) -> str:
    """See whether the gradients of a step are those that the optimizer updates by.

    Args:
        model: It has its gradients.
        optimizer: It has not updated yet.

    Returns:
        A warning, where a part of the model has gradients and is not updated, while the
        optimizer has parameters of something else without any; empty if all is well.

    Raises:
        BudgetError: No parameter of the optimizer has a gradient.
    """
    updated = list(parameters_of(optimizer))
    if not updated:
        return ""
    if all(parameter.grad is None for parameter in updated):
        message = "This step trains nothing: none of the parameters of optimizer has a "
        message += "gradient."
        raise BudgetError(message, why=_OF_ANOTHER, fix=_made_again(optimizer))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ids_updated = {id(parameter) for parameter in updated}
    idle = [p for p in updated if p.grad is None and id(p) not in names]
    left_out = [
        names[id(p)]
        for p in model.parameters()
        if p.grad is not None and id(p) not in ids_updated
    ]
    if not idle or not left_out:
        return ""
    count = count_of(len(idle), "tensors")
    return (
        f"{left_out[0]} is not in optimizer, which has {count} that "
        "are not in model and have no gradient: a part of the model was probably "
        "replaced after the optimizer was made\n"
        f"  fix: {_made_again(optimizer)}, after that"
    )


def check_has_gradient(loss: torch.Tensor, model: torch.nn.Module) -> None:
    """Refuse a loss that nothing can be trained by; torch says "element 0 of tensors".

    Raises:
        StepError: It has no gradient.
    """
    if loss.requires_grad:
        return
    message = "This step trains nothing: its loss has no gradient."
    why, fix = "the loss was probably detached, or is a number of Python's", "loss=f"
    if not torch.is_grad_enabled():
        why, fix = (
            "torch.no_grad() is on",
            "with torch.enable_grad(): batcher.step(batch)",
        )
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        why, fix = "no parameter of model requires one", "model.requires_grad_(True)"
    raise StepError(message, why=why, fix=fix)


_OF_ANOTHER = "it was probably made for another model, or for this one before it was "
_OF_ANOTHER += "copied, loaded or built again"


def _made_again(optimizer: object) -> str:
    """Write how the optimizer is made of the model's parameters."""
    kind = type(optimizer)
    module = "torch.optim." if kind.__module__.startswith("torch.optim") else ""
    rate = getattr(optimizer, "defaults", {}).get("lr")
    rate_text = f", lr={rate:g}" if isinstance(rate, int | float) else ""
    return f"optimizer={module}{kind.__name__}(model.parameters(){rate_text})"


def parameters_of(optimizer: object) -> Iterator[torch.Tensor]:
    """Go through what an optimizer updates."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def check_pieces(micro_batch: object, loss_mean_over: object) -> None:
    """Refuse pieces of no size, and what they cannot be weighed by.

    Raises:
        OptionError: One of the two has a value that it cannot have.
    """
    if micro_batch is not None:
        check_integer("micro_batch", micro_batch, least=1)
    if not callable(loss_mean_over):
        check_choice(
            "loss_mean_over", loss_mean_over, WEIGHTS, otherwise="a function of a piece"
        )
    else:
        check_callable("loss_mean_over", loss_mean_over, "len", "piece")


def check_step_options(
    clip_norm: object,
    scaler: object,
    autocast: object,
    *,
    device: torch.device,
    independent: object,
    verify: object,
) -> None:
    """Refuse values that the other options of a trainer in pieces cannot have.

    Args:
        clip_norm: As for ``MicroBatcher``, and the next ones.
        scaler: Of the loss.
        autocast: A type.
        device: The model's.
        independent: True or False.
        verify: True or False.

    Raises:
        OptionError: One has such a value.
    """
    if clip_norm is not None:
        check_positive("clip_norm", clip_norm)
    lacks_methods = any(not hasattr(scaler, name) for name in _SCALER_METHODS)
    if scaler is not None and (lacks_methods or isinstance(scaler, type)):
        message = f"scaler must be a torch.amp.GradScaler, got {show_value(scaler)}."
        why = "its methods scale the loss and update the parameters"
        fix = f"scaler=torch.amp.GradScaler({device.type!r})"
        raise OptionError(message, why=why, fix=fix)
    if autocast is not None and autocast not in _AUTOCAST_TYPES:
        message = "autocast must be torch.bfloat16 or torch.float16, got "
        message += f"{show_value(autocast)}."
        is_half = "16" in str(autocast) and "b" not in str(autocast)
        code = "torch.float16" if is_half else "torch.bfloat16"
        why = "torch.autocast computes in one of these, or does nothing"
        raise OptionError(message, why=why, fix=Setting("autocast", code=code))
    check_truth("independent", independent)
    check_truth("verify", verify)
