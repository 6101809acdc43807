"""One training step, the way PyTorch and PyG users write it.

The same step runs with fake floats to be tracked, and for real to be measured.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

from loaderkit.budget.step.devices import TRAITS, DeviceSpec
from loaderkit.budget.step.optimizer_copies import optimizer_like
from loaderkit.error_texts import error_in_words, text_of_error
from loaderkit.errors import LoaderkitError, OptionError, StepError
from loaderkit.fixes import Either, Setting
from loaderkit.function_arguments import check_callable
from loaderkit.nearest_names import suggest_device
from loaderkit.nests import flatten_tensors
from loaderkit.pyg import is_pyg_data
from loaderkit.value_words import kind_of, show_value, with_small_article

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_geometric.data.data import BaseData

    from loaderkit.budget.step.allocation_log import LogPhase
    from loaderkit.budget.step.step_copies import StepCopies

_OPTIMIZERS = ("adam", "adamw", "sgd", "rmsprop", "adagrad")
OptimizerVariant = Literal["default", "loop", "foreach", "fused"]
"""How an optimizer updates its parameters: one after the other, several at once, in one
kernel, or as torch chooses for the target."""


def device_spec(
    target: str | DeviceSpec | torch.device, name: str = "target"
) -> DeviceSpec:
    """Read a target.

    Args:
        target: "cpu", "cuda:0", "mps", a device, or a specification.
        name: What the caller's argument is called.

    Returns:
        The specification.

    Raises:
        OptionError: It names no kind of device that is known.

    >>> device_spec("cuda:1")
    DeviceSpec(kind='cuda', memory_bytes=None)
    """
    if isinstance(target, DeviceSpec):
        return target
    kind = str(target).partition(":")[0]
    if kind not in TRAITS:
        *others, last = map(repr, TRAITS)
        message = f"{name} must be {', '.join(others)} or {last}, got "
        message += f"{show_value(target)}."
        why = "what a step takes is known of these kinds of device"
        meant = suggest_device(target)
        if meant.partition(":")[0] not in TRAITS:
            meant = "cpu"
        fix = Setting(name, meant)
        raise OptionError(message, why=why, fix=fix)
    return DeviceSpec(kind)


DTYPES_ELSEWHERE = MappingProxyType(
    {
        "fp16": "float16",
        "f16": "float16",
        "16": "float16",
        "16-mixed": "float16",
        "bf16": "bfloat16",
        "bf16-mixed": "bfloat16",
        "fp32": "float32",
        "f32": "float32",
        "fp64": "float64",
        "f64": "float64",
    }
)
"""Types of tensors by the names that trainers and papers have for them."""


def dtype_of(kind: str | torch.dtype | None) -> torch.dtype | None:
    """Read a type of tensor.

    Args:
        kind: A type, its name such as "bfloat16", or None for none.

    Returns:
        The type.

    Raises:
        OptionError: It is none.
    """
    dtype = getattr(torch, kind, None) if isinstance(kind, str) else kind
    if kind is not None and not isinstance(dtype, torch.dtype):
        message = f"autocast must be a type of tensor, got {show_value(kind)}."
        why = "torch has no such type"
        meant = DTYPES_ELSEWHERE.get(str(kind), "bfloat16")
        raise OptionError(message, why=why, fix=Setting("autocast", meant))
    if dtype is not None and not dtype.is_floating_point:
        message = f"autocast must be a type of floating-point numbers, got {dtype}."
        why = "torch.autocast would warn, and do nothing"
        raise OptionError(message, why=why, fix=Setting("autocast", "bfloat16"))
    return dtype


def check_loss(loss: object) -> None:
    """Refuse what is no loss.

    Args:
        loss: What was given; None for the mean of the outputs.

    Raises:
        OptionError: It cannot be called, or is a class; a name, as libraries of
            configurations take it, is answered with torch's function.

    >>> check_loss("mse")
    Traceback (most recent call last):
    loaderkit.errors.OptionError: loss must be a function, got 'mse'.
      why: its type, str, cannot be called
      fix: loss=torch.nn.functional.mse_loss
    """
    if loss is None:
        return
    example = "lambda output, batch: output.mean()"
    if isinstance(loss, str):
        wish = loss.lower().removesuffix("loss").strip("_ ")
        losses = ("_loss", "cross_entropy", "cross_entropy_with_logits")
        functions = dir(torch.nn.functional)
        names = {f.removesuffix("_loss"): f for f in functions if f.endswith(losses)}
        nearest = difflib.get_close_matches(wish, names, 1, cutoff=0.7)
        if nearest:
            example = f"torch.nn.functional.{names[nearest[0]]}"
    check_callable("loss", loss, example)


@dataclass(frozen=True)
class Step:
    """How one step is made."""

    loss: Callable[..., Any] | None = None
    """``loss(output, target)`` for a batch ``(inputs, target)``, else ``loss(output,
    batch)`` or ``loss(output)``; the mean of all float outputs if None."""
    optimizer: Any = "adam"
    """A name, a class, a callable of the parameters, or an optimizer to be like."""
    variant: OptimizerVariant = "default"
    """Implementation of the optimizer."""
    autocast: torch.dtype | None = None
    """Type of autocast; None for none."""
    target: DeviceSpec = field(default_factory=DeviceSpec)
    """The device it is for."""
    checkpoint: bool = False
    """Whether repeated blocks compute their activations again."""

    def replace(self, **changes: Any) -> Step:
        """Give the step with something changed."""
        return replace(self, **changes)


def run_step(
    model: torch.nn.Module,
    batch: object,
    optimizer: torch.optim.Optimizer | None,
    step: Step,
    *,
    mark: Callable[[LogPhase], object] | None = None,
) -> None:
    """Run one training step.

    Args:
        model: The module.
        batch: What it is called with.
        optimizer: Already made; None makes no update.
        step: Loss and autocast.
        mark: Called with the name of each phase at its start, and with "end".
    """
    if mark is None:
        mark = _do_not_mark
    mark("zero_grad")
    if optimizer is None:
        model.zero_grad(set_to_none=True)
    else:
        optimizer.zero_grad(set_to_none=True)
    mark("forward")
    autocast: Any = nullcontext()
    if step.autocast is not None:
        autocast = torch.autocast("cpu", step.autocast)
    with autocast:
        output = call_model(model, batch, paired=step.loss is not None)
        mark("loss")
        loss = loss_of(output, batch, step.loss)
    mark("backward")
    loss.backward()
    mark("step")
    if optimizer is not None:
        optimizer.step()
    mark("end")


def _do_not_mark(_phase: LogPhase) -> None:
    pass


def call_model(model: torch.nn.Module, batch: object, *, paired: bool) -> Any:
    """Call a model the way its batch asks for.

    Args:
        model: The module.
        batch: A tensor, a tuple of arguments, a dict of them, or a graph.
        paired: Whether a tuple of two is ``(inputs, target)``.

    Returns:
        What the model gives.

    Raises:
        StepError: ``forward`` does not take what the batch holds.
    """
    if paired and _is_pair(batch):
        _refuse_pair_of_inputs(model, batch)
        batch = batch[0]
    if is_pyg_data(batch):
        if _takes_fields(model, batch):
            return model(**_fields_taken(model, batch))
        return model(batch)
    if isinstance(batch, PackedSequence):
        # It is a tuple too, but no tuple of arguments.
        return model(batch)
    if isinstance(batch, Mapping):
        mismatch = _signature_mismatch(model, **batch)
        if mismatch is None:
            return model(**batch)
        message = f"a batch of {', '.join(map(str, batch))} does not fit the model."
        why = f"{type(model).__name__}.forward has {mismatch}"
        fix = "give the batch the names that forward takes, or forward(self, batch)"
        if _signature_mismatch(model, batch) is not None:
            raise StepError(message, why=why, fix=fix)
        try:
            return model(batch)  # forward(self, batch) takes the dict itself
        except TypeError as error:
            why += f", and given the dict itself: {text_of_error(error)}"
            raise StepError(message, why=why, fix=fix) from error
    if isinstance(batch, (tuple, list)):
        mismatch = _signature_mismatch(model, *batch)
        if mismatch is None:
            return model(*batch)
        message = f"a batch of {len(batch)} parts does not fit the model."
        why = f"{type(model).__name__}.forward has {mismatch}"
        parts_fix: str | Setting = "give the parts that forward takes, in its order"
        if _is_pair(batch) and not paired:
            why += "; for (inputs, target) pass loss=f, called as f(output, target)"
            code = f"torch.nn.functional.{_usual_loss(batch[1])}"
            parts_fix = Setting("loss", code=code)
        names = getattr(batch, "_fields", ())
        if names and _signature_mismatch(model, batch[0]) is None:
            # such as Padded, which is a named tuple of values, lengths and mask
            why += f"; a {type(batch).__name__} holds {', '.join(names)}"
            parts_fix = f"batch.{names[0]}, or forward(self, {', '.join(names)})"
        raise StepError(message, why=why, fix=parts_fix)
    return model(batch)


def _refuse_pair_of_inputs(model: torch.nn.Module, batch: Sequence[Any]) -> None:
    """Refuse two inputs where ``(inputs, target)`` is meant, as of a graph's layers.

    Raises:
        StepError: The model takes both parts, and not the first alone.
    """
    inputs = batch[0]
    if not isinstance(inputs, torch.Tensor):
        return
    mismatch = _signature_mismatch(model, inputs)
    if mismatch is None or _signature_mismatch(model, *batch) is not None:
        return
    first, second = [*_parameters_of(model), "a", "b"][:2]
    message = "with a loss, a batch of two is (inputs, target), and this model takes "
    message += "two inputs."
    why = f"{type(model).__name__}.forward has {mismatch}"
    fix = f"a batch (({first}, {second}), target), for loss(output, target)"
    raise StepError(message, why=why, fix=fix)


def _usual_loss(target: object) -> str:
    """Name the loss that a target is usually given to: classes are whole numbers."""
    is_class = isinstance(target, torch.Tensor) and not target.is_floating_point()
    return "cross_entropy" if is_class else "mse_loss"


def _signature_mismatch(
    model: torch.nn.Module, *args: Any, **kwargs: Any
) -> str | None:
    """Say why ``forward`` cannot be called so; None where it can, or may be."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None  # what is written in C may not tell
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _is_pair(batch: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _parameters_of(model: torch.nn.Module) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(model.forward).parameters
    kinds = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in kinds
    }


_BOOKKEEPING = frozenset({"batch", "ptr"})
"""Fields that PyG adds to a batch: which graph a node belongs to."""


def _takes_fields(model: torch.nn.Module, batch: BaseData) -> bool:
    """Tell whether a model takes a graph's fields, as PyG's layers do."""
    needed = [
        name
        for name, parameter in _parameters_of(model).items()
        if parameter.default is inspect.Parameter.empty
    ]
    # "forward(self, batch)" is called with the graphs: their bookkeeping alone, which
    # has the same name, is nothing to train on.
    if set(needed) <= _BOOKKEEPING:
        return False
    return all(_field_of_graph(batch, name) is not None for name in needed)


def _fields_taken(model: torch.nn.Module, batch: BaseData) -> dict[str, Any]:
    fields = {name: _field_of_graph(batch, name) for name in _parameters_of(model)}
    return {name: value for name, value in fields.items() if value is not None}


def _field_of_graph(batch: BaseData, name: str) -> Any:
    """Give a field; of typed graphs also ``x_dict`` and its like.  None if absent."""
    value = getattr(batch, name, None)
    return None if callable(value) else value


def loss_of(output: object, batch: object, loss: Callable[..., Any] | None) -> Any:
    """Compute the loss.

    Args:
        output: What the model gave.
        batch: What it was called with.
        loss: See :class:`Step`.

    Returns:
        A scalar with a gradient.

    Raises:
        ValueError: Nothing in the output can be trained on.
    """
    if loss is not None:
        if _is_pair(batch):
            return loss(output, batch[1])
        if not _takes_two(loss):
            return loss(output)
        _refuse_batch_as_target(loss, batch)
        return loss(output, batch)
    outputs = [tensor for tensor in flatten_tensors(output) if tensor.requires_grad]
    if not outputs:
        message = "the model's output has no float tensor with a gradient."
        why = "a step needs a number to go back from"
        fix = "loss=f, called as f(output) or f(output, target)"
        raise StepError(message, why=why, fix=fix)
    total = outputs[0].mean()
    for tensor in outputs[1:]:
        total = total + tensor.mean()
    return total


_TARGETS = ("y", "labels", "label", "target", "targets")
"""What a batch's target is usually called."""


def _refuse_batch_as_target(loss: Callable[..., Any], batch: object) -> None:
    """Refuse to give a loss of torch's a graph or a dict as its target.

    torch would fail within, with "'dict' object has no attribute 'size'".

    Raises:
        StepError: The loss is torch's own, and the batch no tensor.
    """
    is_module = isinstance(loss, torch.nn.Module)
    module = type(loss).__module__ if is_module else getattr(loss, "__module__", None)
    if isinstance(batch, torch.Tensor) or not str(module).startswith("torch.nn."):
        return
    name = type(loss).__name__ if is_module else getattr(loss, "__name__", "loss")
    message = f"{name} would be given the whole batch as its target, "
    message += f"{with_small_article(type(batch).__name__)}."
    why = "only a batch (inputs, target) says which part of it is the target"
    fix = f"loss=lambda output, batch: {_call_of_loss(loss)}(output, "
    fix += f"{_target_of(batch)})"
    raise StepError(message, why=why, fix=fix)


def _call_of_loss(loss: Callable[..., Any]) -> str:
    """Write a loss of torch's as code."""
    if isinstance(loss, torch.nn.Module):
        return f"torch.nn.{type(loss).__name__}()"
    return f"torch.nn.functional.{loss.__name__}"


def _target_of(batch: object) -> str:
    """Write what is probably the target of a batch, as code."""
    if isinstance(batch, Mapping):
        names = [name for name in _TARGETS if name in batch]
        return f"batch[{(names or _TARGETS)[0]!r}]"
    if isinstance(batch, list | tuple):
        return "batch[1]"
    names = [name for name in _TARGETS if getattr(batch, name, None) is not None]
    return f"batch.{(names or _TARGETS)[0]}"


def _takes_two(loss: Callable[..., Any]) -> bool:
    # A module's own call takes anything, and hands it on.
    called = loss.forward if isinstance(loss, torch.nn.Module) else loss
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        # Built-in functions do not tell; losses of torch take two.
        return True
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    }
    positional = [p for p in parameters if p.kind in kinds]
    needed = [p for p in positional if p.default is inspect.Parameter.empty]
    return len(needed) != 1 or len(positional) > 1


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """List the repeated blocks of a module.

    Args:
        model: The module.

    Returns:
        Children with parameters of a ``ModuleList`` or ``Sequential`` that has more
        than one of their class.
    """
    blocks = []
    for holder in model.modules():
        if not isinstance(holder, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        counts = Counter(type(child) for child in holder)
        for child in holder:
            has_parameters = any(True for _ in child.parameters())
            if counts[type(child)] > 1 and has_parameters:
                blocks.append(child)
    return blocks


def checkpoint_blocks(model: torch.nn.Module) -> None:
    """Let the repeated blocks of a module compute their activations again.

    Args:
        model: Changed: its blocks are wrapped in ``torch.utils.checkpoint``.
    """
    for block in blocks_of(model):
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False
        )


def make_optimizer(model: torch.nn.Module, copies: StepCopies) -> Any:
    """Make the optimizer of a step.

    Args:
        model: What the user trains; an optimizer to be like has parameters of it.
        copies: What the step is run on; those parameters of model and loss that are
            trained are updated.

    Returns:
        The optimizer; None when the step has none.

    Raises:
        ValueError: It is no optimizer.
    """
    step = copies.step
    trained = [p for p in copies.all_parameters() if p.requires_grad]
    if step.optimizer is None or not trained:
        return None
    if isinstance(step.optimizer, torch.optim.Optimizer):
        optimizer = optimizer_like(step.optimizer, model, copies)
    else:
        optimizer = _new_optimizer(trained, step.optimizer)
    for group in optimizer.param_groups:
        _choose_variant(group, step)
    if needs_closure(optimizer):
        name = type(optimizer).__name__
        message = f"{name} runs the model several times a step."
        why = "how often, its values decide, which nobody knows beforehand"
        fix = "optimizer='sgd' estimates one run"
        raise StepError(message, why=why, fix=fix)
    return optimizer


def needs_closure(optimizer: Any) -> bool:
    """Tell whether ``step`` cannot be called without a function that it calls.

    >>> needs_closure(torch.optim.LBFGS([torch.zeros(3)]))
    True
    >>> needs_closure(torch.optim.SGD([torch.zeros(3)]))
    False
    """
    try:
        parameters = inspect.signature(optimizer.step).parameters.values()
    except (TypeError, ValueError):
        return False  # what is written in C may not tell
    variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    # A scheduler replaces the method by a function with the class's signature.
    return any(
        parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind not in variable and parameter.name != "self"
    )


def _new_optimizer(parameters: list[torch.nn.Parameter], optimizer: object) -> Any:
    """Make an optimizer by its name, its class or a callable."""
    if isinstance(optimizer, str):
        classes = {name.lower(): value for name, value in vars(torch.optim).items()}
        refused = refusal_of_optimizer(optimizer)
        if refused is not None:
            raise refused
        return classes[optimizer.lower()](parameters, lr=1e-3)
    if callable(optimizer):
        try:
            return optimizer(parameters)
        except LoaderkitError:
            raise  # it says itself what was wrong
        except (TypeError, ValueError) as error:
            # Such as Muon, which takes matrices alone, or an argument that is missing.
            message = "optimizer cannot be made of the model's parameters: "
            message += error_in_words(error)
            why = "it is called with all of them that are trained, and nothing else"
            fix = "pass the optimizer itself, made as training makes it"
            raise StepError(message, why=why, fix=fix) from error
    message = "optimizer must be a name, a class, a callable or an optimizer"
    message += f", got {optimizer!r}."
    why = f"it is {kind_of(optimizer)}"
    raise StepError(message, why=why, fix=Setting("optimizer", "adam"))


def refusal_of_optimizer(name: str) -> StepError | None:
    """Say why an optimizer cannot be made by a name; None where it can.

    >>> refusal_of_optimizer("AdamW") is None
    True
    """
    if name.lower() in _OPTIMIZERS:
        return None
    message = f"optimizer must be one of {', '.join(_OPTIMIZERS)}, a class, a "
    message += f"callable or an optimizer, got {name!r}."
    fix = _nearest_optimizer(name)
    return StepError(message, why="there is none of that name", fix=fix)


def _nearest_optimizer(name: str) -> Setting | Either:
    """Write the name, or the class, that was probably meant.

    >>> print(_nearest_optimizer("adma"), _nearest_optimizer("NAdam"))
    optimizer='adam' optimizer=torch.optim.NAdam
    """
    near = difflib.get_close_matches(name.lower(), _OPTIMIZERS, 1)
    nearest = Setting("optimizer", near[0] if near else "adam")
    if not hasattr(torch.optim, name):
        return nearest
    # A command line takes names alone.
    code = f"optimizer=torch.optim.{name}"
    return Either(code, f"--optimizer {nearest.value}")


def _choose_variant(group: dict[str, Any], step: Step) -> None:
    """Pick the implementation the target would, unless the user did."""
    variant = step.variant
    if variant == "default":
        is_chosen_by_user = group.get("foreach") is not None or group.get("fused")
        if is_chosen_by_user or not step.target.traits.foreach_optimizers:
            return
        variant = "foreach"
    if "foreach" in group:
        group["foreach"] = variant == "foreach"
    if "fused" in group:
        group["fused"] = variant == "fused"
