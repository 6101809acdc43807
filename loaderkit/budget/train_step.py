"""One training step, the way PyTorch and PyG users write it.

The same step runs with fake floats to be tracked, and for real to be measured.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from loaderkit.pyg import is_pyg_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch_geometric.data.data import BaseData

_OPTIMIZERS = ("adam", "adamw", "sgd", "rmsprop", "adagrad")
VARIANTS = ("default", "loop", "foreach", "fused")


class StepError(ValueError):
    """What was passed cannot make a training step, however it is run."""


@dataclass(frozen=True)
class DeviceSpec:
    """A device that need not be here."""

    kind: str = "cpu"
    """"cpu", "cuda", "xpu" or "mps"; ROCm counts as cuda."""
    memory_bytes: int | None = None
    """What it has; None if unknown."""

    @property
    def foreach(self) -> bool:
        """Whether torch's optimizers update all parameters at once by default.

        Source: ``torch/utils/_foreach_utils.py`` of torch 2.13.
        """
        return self.kind in {"cuda", "xpu"}

    @property
    def flash(self) -> bool:
        """Whether attention with dropout needs no length x length matrix."""
        return self.kind in {"cuda", "xpu"}


def device_spec(target: str | DeviceSpec | torch.device) -> DeviceSpec:
    """Read a target.

    Args:
        target: "cpu", "cuda:0", "mps", a device, or a specification.

    Returns:
        The specification.

    Raises:
        ValueError: It names no kind of device that is known.

    >>> device_spec("cuda:1").foreach
    True
    """
    if isinstance(target, DeviceSpec):
        return target
    kind = str(target).partition(":")[0]
    if kind not in {"cpu", "cuda", "xpu", "mps"}:
        msg = f"target must be cpu, cuda, xpu or mps, got {target!r}"
        raise StepError(msg)
    return DeviceSpec(kind)


def dtype_of(kind: str | torch.dtype | None) -> torch.dtype | None:
    """Read a type of tensor.

    Args:
        kind: A type, its name such as "bfloat16", or None for none.

    Returns:
        The type.

    Raises:
        ValueError: It is none.
    """
    dtype = getattr(torch, kind, None) if isinstance(kind, str) else kind
    if kind is not None and not isinstance(dtype, torch.dtype):
        msg = f"autocast must be a type of tensor such as bfloat16, got {kind!r}"
        raise StepError(msg)
    return dtype


@dataclass(frozen=True)
class Step:
    """How one step is made."""

    loss: Callable[..., Any] | None = None
    """``loss(output, target)`` for a batch ``(inputs, target)``, else ``loss(output,
    batch)`` or ``loss(output)``; the mean of all float outputs if None."""
    optimizer: Any = "adam"
    """A name, a class, a callable of the parameters, or an optimizer to be like."""
    variant: str = "default"
    """One of :data:`VARIANTS`."""
    autocast: torch.dtype | None = None
    """Type of autocast; None for none."""
    target: DeviceSpec = DeviceSpec()
    """The device it is for."""
    checkpoint: bool = False
    """Whether repeated blocks compute their activations again."""

    def but(self, **changes: Any) -> Step:
        """Give the step with something changed."""
        return replace(self, **changes)


def run_step(
    model: Any, batch: Any, optimizer: Any, step: Step, *,
    mark: Callable[[str], Any] = str,
) -> None:  # fmt: skip
    """Run one training step.

    Args:
        model: The module.
        batch: What it is called with.
        optimizer: Already made; None makes no update.
        step: Loss and autocast.
        mark: Called at the start of each phase.
    """
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
        value = loss_of(output, batch, step.loss)
    mark("backward")
    value.backward()
    mark("step")
    if optimizer is not None:
        optimizer.step()
    mark("end")


def call_model(model: Any, batch: Any, *, paired: bool) -> Any:
    """Call a model the way its batch asks for.

    Args:
        model: The module.
        batch: A tensor, a tuple of arguments, a dict of them, or a graph.
        paired: Whether a tuple of two is ``(inputs, target)``.

    Returns:
        What the model gives.
    """
    if paired and _is_pair(batch):
        batch = batch[0]
    if is_pyg_data(batch):
        named = _by_name(model, batch)
        return model(**_fields_of(model, batch)) if named else model(batch)
    if isinstance(batch, dict):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _parameters_of(model: Any) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(model.forward).parameters
    kinds = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    return {name: p for name, p in parameters.items() if p.kind not in kinds}


def _by_name(model: Any, batch: BaseData) -> bool:
    """Whether a model takes a graph's fields, as PyG's layers do, and not the graph."""
    needed = [
        name
        for name, p in _parameters_of(model).items()
        if p.default is inspect.Parameter.empty
    ]
    return bool(needed) and all(_field(batch, name) is not None for name in needed)


def _fields_of(model: Any, batch: BaseData) -> dict[str, Any]:
    found = {name: _field(batch, name) for name in _parameters_of(model)}
    return {name: value for name, value in found.items() if value is not None}


def _field(batch: BaseData, name: str) -> Any:
    """Give a field; of typed graphs also ``x_dict`` and its like.  None if absent."""
    value = getattr(batch, name, None)
    return None if callable(value) else value


def loss_of(output: Any, batch: Any, loss: Callable[..., Any] | None) -> Any:
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
        return loss(output, batch) if _takes_two(loss) else loss(output)
    floats = [t for t in tree_iter(output) if _trainable(t)]
    if not floats:
        msg = "the model's output has no float tensor with a gradient: pass loss="
        raise StepError(msg)
    total = floats[0].mean()
    for each in floats[1:]:
        total = total + each.mean()
    return total


def _trainable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _takes_two(loss: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):
        return True
    positional = [
        p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}
    ]
    needed = [p for p in positional if p.default is p.empty]
    return len(needed) != 1 or len(positional) > 1


def blocks_of(model: Any) -> list[Any]:
    """List the repeated blocks of a module.

    Args:
        model: The module.

    Returns:
        Children with parameters of a ``ModuleList`` or ``Sequential`` that has more
        than one of their class.
    """
    found = []
    for holder in model.modules():
        if isinstance(holder, (torch.nn.ModuleList, torch.nn.Sequential)):
            kinds = Counter(type(child) for child in holder)
            found += [
                child
                for child in holder
                if kinds[type(child)] > 1 and any(True for _ in child.parameters())
            ]
    return found


def checkpoint_blocks(model: Any) -> None:
    """Let the repeated blocks of a module compute their activations again.

    Args:
        model: Changed: its blocks are wrapped in ``torch.utils.checkpoint``.
    """
    for block in blocks_of(model):
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False
        )


def make_optimizer(parameters: Iterable[Any], step: Step) -> Any:
    """Make the optimizer of a step.

    Args:
        parameters: What it updates.
        step: Which one, and for which device.

    Returns:
        The optimizer; None when the step has none.

    Raises:
        ValueError: It is no optimizer.
    """
    parameters = [p for p in parameters if p.requires_grad]
    made = _made(parameters, step.optimizer)
    for group in made.param_groups if made is not None else ():
        _choose(group, step)
    if made is not None and _needs_closure(made):
        msg = f"{type(made).__name__} runs the model several times a step, as often as "
        msg += "its values ask for: estimate one run with optimizer='sgd'"
        raise StepError(msg)
    return made


def _needs_closure(optimizer: Any) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _made(parameters: list[Any], optimizer: Any) -> Any:
    if optimizer is None or not parameters:
        return None
    if isinstance(optimizer, str):
        kinds = {name.lower(): kind for name, kind in vars(torch.optim).items()}
        if optimizer.lower() not in _OPTIMIZERS:
            msg = f"optimizer must be one of {', '.join(_OPTIMIZERS)}, a class, a "
            msg += f"callable or an optimizer, got {optimizer!r}"
            raise StepError(msg)
        return kinds[optimizer.lower()](parameters, lr=1e-3)
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer)(parameters, **optimizer.defaults)
    if callable(optimizer):
        return optimizer(parameters)
    msg = "optimizer must be a name, a class, a callable or an optimizer"
    msg += f", got {optimizer!r}"
    raise StepError(msg)


def _choose(group: dict[str, Any], step: Step) -> None:
    """Pick the implementation the target would, unless the user did."""
    variant = step.variant
    if variant == "default":
        chosen = group.get("foreach") is not None or group.get("fused")
        if chosen or not step.target.foreach:
            return
        variant = "foreach"
    if "foreach" in group:
        group["foreach"] = variant == "foreach"
    if "fused" in group:
        group["fused"] = variant == "fused"
