"""Arguments in each other's place: what was given where, and the call that works.

Models, losses, optimizers, datasets, batches, devices and sizes can be told apart by
what they are, so that a call with two of them exchanged, one left out or one in
another's place is answered with the call that was meant.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import ParamSpec

from loaderkit.budget.keywords import FitKeywords, PlanKeywords
from loaderkit.budget.step.devices import TRAITS, DeviceSpec
from loaderkit.errors import LoaderkitError, OptionError
from loaderkit.pyg import is_pyg_data
from loaderkit.units import parse_bytes
from loaderkit.value_words import show_value, with_small_article

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


class Role(Enum):
    """What a value is to a training step."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    LOSS = "loss"
    DATASET = "dataset"
    LOADER = "loader"
    BATCH = "batch"
    DEVICE = "device"
    LIMIT = "limit"
    COUNT = "count"
    DTYPE = "autocast"


class _Place(NamedTuple):
    """An argument, by what it is called; the calls agree on that."""

    takes: frozenset[Role]
    """What is not misplaced there."""
    example: str
    """What is written there when nothing of that kind was given."""


_SAMPLES = frozenset({Role.DATASET, Role.BATCH, Role.LOADER})
"""Lists and tensors may be either; a loader in their place is answered elsewhere."""
_PLACES: dict[str, _Place] = {
    "model": _Place(frozenset({Role.MODEL}), "model"),
    "optimizer": _Place(frozenset({Role.OPTIMIZER}), "optimizer"),
    # A module may be a loss of the user's own.
    "loss": _Place(frozenset({Role.LOSS, Role.MODEL}), "loss"),
    "dataset": _Place(_SAMPLES, "dataset"),
    # Some models take numbers.
    "batch": _Place(_SAMPLES | {Role.COUNT}, "batch"),
    "device": _Place(frozenset({Role.DEVICE}), "'cpu'"),
    "target": _Place(frozenset({Role.DEVICE}), "'cpu'"),
    "limit": _Place(frozenset({Role.LIMIT, Role.COUNT}), "'8 GiB'"),
    "batch_size": _Place(frozenset({Role.COUNT}), "32"),
    "micro_batch": _Place(frozenset({Role.COUNT}), "8"),
    "autocast": _Place(frozenset({Role.DTYPE}), "torch.bfloat16"),
}
_HOMES: dict[Role, tuple[str, ...]] = {
    Role.MODEL: ("model",),
    Role.OPTIMIZER: ("optimizer",),
    Role.LOSS: ("loss",),
    Role.DATASET: ("dataset", "batch"),
    Role.LOADER: ("dataset", "batch"),
    Role.BATCH: ("batch", "dataset"),
    Role.DEVICE: ("device", "target"),
    Role.LIMIT: ("limit",),
    Role.COUNT: ("batch_size", "micro_batch"),
    Role.DTYPE: ("autocast",),
}
"""Where each belongs: a call has at most one of the names."""
_NAMES_SHOWN = 4
"""Of a call's arguments, in a message."""
_OPTIONS = PlanKeywords.__optional_keys__ | FitKeywords.__optional_keys__
"""Of calls that take options by any name; what they lack, they refuse themselves."""
_LEAST_LIMIT = 1 << 20
"""From here on a whole number is bytes, and below it samples; chosen: no batch has a
million samples, and no device less than a MiB."""


def answer_misplaced(
    *, either: tuple[str, ...] = (), owner: str = ""
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function answer arguments in each other's place.

    Args:
        either: Parameters with a default of which one has to be given.
        owner: Of a method, the variable that its object usually is.

    Returns:
        The decorator; below ``suggest_keywords``, which answers calls that Python
        itself refuses for another reason.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        is_method = "self" in signature.parameters
        if is_method:
            without_self = list(signature.parameters.values())[1:]
            signature = signature.replace(parameters=without_self)
        name = f"{owner}.{function.__name__}" if owner else function.__name__
        call = Call(name, signature, either)

        @functools.wraps(function)
        def with_answers(*args: P.args, **kwargs: P.kwargs) -> R:
            __tracebackhide__ = True  # of pytest, see suggest_keywords
            refuse_misplaced(call, args[is_method:], kwargs)
            return function(*args, **kwargs)

        return with_answers

    return decorate


class Call(NamedTuple):
    """What is called."""

    name: str
    """As its caller writes it."""
    signature: inspect.Signature
    """Without ``self``; options that are taken as ``**options`` are not in it."""
    either: tuple[str, ...] = ()
    """See ``answer_misplaced``."""

    @classmethod
    def of_class(cls, kind: type) -> Call:
        """Give the call that makes an object."""
        return cls(kind.__name__, inspect.signature(kind))

    def parameters(self) -> dict[str, inspect.Parameter]:
        """Give what is taken by name."""
        return {
            name: parameter
            for name, parameter in self.signature.parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        }

    def by_position(self) -> list[str]:
        """Name what is taken by position."""
        return [
            name
            for name, parameter in self.parameters().items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]

    def needed(self) -> list[str]:
        """Name what must be given."""
        return [
            name
            for name, parameter in self.parameters().items()
            if parameter.default is parameter.empty
        ]

    def takes(self, name: str) -> bool:
        """Tell whether there is such a parameter, or an option that may be one."""
        options = any(
            parameter.kind is parameter.VAR_KEYWORD
            for parameter in self.signature.parameters.values()
        )
        return name in self.parameters() or (options and name in _OPTIONS)


def refuse_misplaced(
    call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Refuse arguments in each other's place.

    Args:
        call: What is called.
        args: Given by position, as many as there may be.
        kwargs: Given by name.

    Raises:
        OptionError: Some argument is what belongs into another place, or is None where
            something is needed; the fix is the call that was meant.
    """
    names = call.by_position()
    extra = [f"argument {number + 1}" for number in range(len(names), len(args))]
    by_position = dict(zip([*names, *extra], args, strict=False))
    is_twice = bool(by_position.keys() & kwargs.keys())
    has_homes = not extra or any(_role_of(by_position[name]) for name in extra)
    if is_twice or not has_homes or not all(map(call.takes, kwargs)):
        return  # Python says so, or the options' own check
    given = {**by_position, **kwargs}
    # Who names an argument knows which it is: its own check has more to say.
    wrong = [name for name in by_position if _is_misplaced(name, call, given)]
    missing = [name for name in call.needed() if name not in given]
    if not wrong and not missing:
        return
    message = f"{call.name} was called without {' and '.join(missing)}."
    if wrong:
        shown = [f"{_describe(given[name])} was given as {name}" for name in wrong]
        message = f"{', and '.join(shown)}."
        message = message[0].upper() + message[1:]

    values = _put_right(call, given, wrong, frozenset(kwargs))
    why = f"by position it takes {', '.join(names[:_NAMES_SHOWN])}"
    if len(names) > _NAMES_SHOWN:
        why += ", ..."
    by_name = [name for name in values if name not in names and name not in kwargs]
    if by_name:
        why += f"; {' and '.join(by_name)} by name"
    raise OptionError(message, why=why, fix=_write_call(call, values))


def _is_misplaced(name: str, call: Call, given: Mapping[str, Any]) -> bool:
    """Tell whether a value is surely something else than its place takes."""
    value = given[name]
    if name.startswith("argument "):
        return True  # one too many
    if name not in _PLACES:
        return False
    if value is None:
        # None as the optimizer updates nothing, where an optimizer may be left out; as
        # a batch, it is answered with what gives one.
        return name in call.needed() and name != "batch"
    role = _role_of(value)
    if role is None or role in _PLACES[name].takes:
        return False
    if _PLACES[name].takes == {Role.COUNT} and not any(map(call.takes, _HOMES[role])):
        return False  # a number in another type, such as [2]
    if name == "optimizer" and role is Role.LOSS:
        # A function that makes an optimizer; a trainer in pieces has to have it made.
        return "optimizer" in call.needed()
    if name == "model" and isinstance(value, Mapping):
        return not _is_state_dict(value)
    return True


def _is_state_dict(value: Mapping[Any, Any]) -> bool:
    """Recognise what ``state_dict`` gave, which is answered elsewhere."""
    return hasattr(value, "_metadata") or any("." in str(name) for name in value)


def _role_of(value: object) -> Role | None:
    """Tell what a value is; None where it may be anything."""
    if isinstance(value, torch.nn.Module):
        has_weights = any(True for _ in value.parameters())
        is_of_torch = type(value).__module__ == "torch.nn.modules.loss"
        is_loss = is_of_torch or type(value).__name__.endswith("Loss")
        return Role.LOSS if is_loss and not has_weights else Role.MODEL
    if isinstance(value, torch.optim.Optimizer):
        return Role.OPTIMIZER
    if isinstance(value, type):
        return Role.OPTIMIZER if issubclass(value, torch.optim.Optimizer) else None
    if isinstance(value, DataLoader):
        return Role.LOADER
    if isinstance(value, Dataset):
        return Role.DATASET
    if isinstance(value, torch.device | DeviceSpec):
        return Role.DEVICE
    if isinstance(value, torch.dtype):
        return Role.DTYPE
    if isinstance(value, str):
        return _role_of_text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return Role.LIMIT if value >= _LEAST_LIMIT else Role.COUNT
    if isinstance(value, torch.Tensor | np.ndarray | tuple | dict):
        return Role.BATCH
    if isinstance(value, list):
        return Role.DATASET
    if is_pyg_data(value):
        return Role.BATCH
    is_function = inspect.isroutine(value) or isinstance(value, functools.partial)
    return Role.LOSS if is_function else None


def _role_of_text(text: str) -> Role | None:
    if text.partition(":")[0] in TRAITS:
        return Role.DEVICE
    if isinstance(getattr(torch, text, None), torch.dtype):
        return Role.DTYPE
    try:
        parse_bytes(text)
    except LoaderkitError:
        return None
    return Role.LIMIT


def _describe(value: object) -> str:
    """Say what was given, within a sentence."""
    if value is None or isinstance(value, str | int | torch.device | torch.dtype):
        return show_value(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', 'given')}"
    return with_small_article(type(value).__name__)


def _home_of(call: Call, value: object) -> str | None:
    """Name the argument that a value is meant for; None where it fits none."""
    role = _role_of(value)
    homes = _HOMES[role] if role is not None else ()
    return next((place for place in homes if call.takes(place)), None)


def _put_right(
    call: Call, given: Mapping[str, Any], wrong: list[str], by_name: frozenset[str]
) -> dict[str, Any]:
    """Give the arguments of the call that was meant; None where an example stands."""
    values: dict[str, Any] = {}
    # Where two values belong into one place, the one that stands there is right.
    for name, value in given.items():
        if name not in wrong:
            home = _home_of(call, value)
            is_fixed = name in by_name or name not in _PLACES
            if is_fixed or home is None or home in values:
                home = name
            if values.get(home) is None:
                values[home] = value
    for name in wrong:
        home = _home_of(call, given[name])
        if home is not None and values.get(home) is None:
            values[home] = given[name]

    needed = call.needed()
    if not any(values.get(name) is not None for name in call.either):
        needed += call.either[:1]
    parameters = call.parameters()
    for name, parameter in parameters.items():
        if name in needed:
            values.setdefault(name, None)
        elif name in values and _is_same(values[name], parameter.default):
            del values[name]
    ordered = [name for name in parameters if name in values]
    return {name: values[name] for name in [*ordered, *values]}


def _is_same(value: object, default: object) -> bool:
    """Tell whether an option has its default; tensors and models have none."""
    return type(value) is type(default) and value == default


def _write_value(call: Call, name: str, value: object) -> str:
    """Write a value as code: itself if that is short, else its usual name."""
    if isinstance(value, torch.device):
        return repr(str(value))
    if isinstance(value, str | int | float | torch.dtype | DeviceSpec):
        return repr(value)
    if isinstance(value, DataLoader):
        return "loader.dataset" if name == "dataset" else "next(iter(loader))"
    if isinstance(value, Dataset) and name == "batch":
        return "next(iter(loaderkit.build_loader(dataset, batch_size=32)))"
    if isinstance(value, type) and value.__module__.startswith("torch.optim."):
        is_made = "optimizer" in call.needed()
        parameters = "(model.parameters())" if is_made else ""
        return f"torch.optim.{value.__name__}{parameters}"
    return _PLACES[name].example if name in _PLACES else name


def _write_call(call: Call, values: Mapping[str, Any]) -> str:
    """Write a call; by name from the first argument on that is left out."""
    by_position = call.by_position()
    parts = []
    for number, (name, value) in enumerate(values.items()):
        if value is None and name in _PLACES:
            code = _PLACES[name].example
        else:
            code = _write_value(call, name, value)
        is_in_order = by_position[: number + 1] == [*values][: number + 1]
        parts.append(code if is_in_order else f"{name}={code}")
    return f"{call.name}({', '.join(parts)})"
