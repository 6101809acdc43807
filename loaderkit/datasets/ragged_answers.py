"""What a tuple of a batch's tensors answers where its values are meant.  Pure.

``Padded`` and ``Packed`` are named tuples, so that trainers move them.  As those of a
tuple, operators, indices and searches would be silently wrong: ``batch["x"] * 2`` would
be a tuple of six tensors.  So they raise, and the fix has the same expression of
``values``.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch.overrides import resolve_name

from loaderkit.errors import NoSuchRowError, OptionError
from loaderkit.habits import REDUCTIONS
from loaderkit.operations import ARITHMETIC, COMPARISONS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

_ANSWERING: list[type] = []
"""The classes that answer so."""
_SIGNS = {"neg": "-", "abs": "abs", "invert": "~"}


def refuse_tensor_operations(cls: type[T]) -> type[T]:
    """Have what only a tensor can do say that the values have it.

    As those of a tuple, ``batch["x"] * 2`` would be a tuple of six tensors, and
    ``batch["x"] == 0`` False.
    """
    for method, symbol in (ARITHMETIC | COMPARISONS).items():
        _refuse_operator(cls, method, symbol)
    for method, symbol in _SIGNS.items():
        _refuse_sign(cls, method, symbol)
    for method, answer in _ANSWERS_OF_A_TUPLE.items():
        setattr(cls, method, answer)
    for name, value in _ASKED_BY_LIBRARIES.items():
        setattr(cls, name, value)
    _ANSWERING.append(cls)
    setattr(cls, "__hash__", tuple.__hash__)  # noqa: B010 -- __eq__ would take it away
    return cls


def _no_tensor_error(batch: Any, template: str) -> OptionError:
    """Say that a batch is no tensor, with the same expression of its values.

    Args:
        batch: What was computed with.
        template: The expression, with ``{}`` where the batch stands.
    """
    name = type(batch).__name__
    shown = template.format(name.lower())
    message = f"{name} is no tensor to compute with: {shown}."
    why = f"it holds {', '.join(batch._fields)}, and only values are the samples'"
    values = f"{name.lower()}.values"
    reductions = {f"torch.{reduction}({{0}})" for reduction in REDUCTIONS}
    # What stands behind the ends of samples belongs to none of them.
    if template in reductions and "mask" in batch._fields:
        values += f"[{name.lower()}.mask]"
    fix = template.format(values)
    if (
        template.startswith("torch.nn.functional.embedding(")
        and "mask" in batch._fields
    ):
        # A model's first layer: whoever gave the batch to a model has no such call.
        variable = name.lower()
        fix += f", or of a model: model({variable}.values, "
        fix += f"attention_mask={variable}.mask)"
    return OptionError(message, why=why, fix=fix)


def _refuse_operator(cls: type, method: str, symbol: str) -> None:
    """Give a class an operator that raises, and its reflection."""

    def operate(self: Any, other: object) -> Any:
        raise _no_tensor_error(self, f"{{}} {symbol} {_shown_operand(other)}")

    def operate_reflected(self: Any, other: object) -> Any:
        raise _no_tensor_error(self, f"{_shown_operand(other)} {symbol} {{}}")

    setattr(cls, f"__{method}__", operate)
    if method not in COMPARISONS:  # whose reflections are each other
        setattr(cls, f"__r{method}__", operate_reflected)


def _refuse_sign(cls: type, method: str, symbol: str) -> None:
    template = "abs({})" if symbol == "abs" else symbol + "{}"

    def operate(self: Any) -> Any:
        raise _no_tensor_error(self, template)

    setattr(cls, f"__{method}__", operate)


def _is_equal(self: Any, other: object) -> Any:
    _check_comparable(self, "==", other)
    return tuple.__eq__(self, other)


def _is_unequal(self: Any, other: object) -> Any:
    _check_comparable(self, "!=", other)
    return tuple.__ne__(self, other)


def _check_comparable(batch: Any, symbol: str, other: object) -> None:
    """Refuse to compare with numbers, and with a batch of other tensors.

    Raises:
        OptionError: The comparison is meant for the values.
    """
    if _is_numeric(other):
        raise _no_tensor_error(batch, f"{{}} {symbol} {_shown_operand(other)}")
    if not _has_other_parts(batch, other):
        return
    name = type(batch).__name__.lower()
    message = f"{type(batch).__name__} is no tensor to compare: {name} {symbol} other."
    why = f"it holds {', '.join(batch._fields)}, which are compared item by item"
    fix = "not " if symbol == "!=" else ""
    fix += f"torch.equal({name}.values, other.values)"
    raise OptionError(message, why=why, fix=fix)


def _is_numeric(value: object) -> bool:
    return isinstance(value, int | float | complex | torch.Tensor | np.ndarray)


def _has_item(self: Any, item: object) -> bool:
    if _is_numeric(item):
        raise _no_tensor_error(self, f"{_shown_operand(item)} in {{}}")
    return tuple.__contains__(self, item)


def _count_item(self: Any, item: object) -> int:
    raise _no_tensor_error(self, f"({{}} == {_shown_operand(item)}).sum()")


def _index_of_item(self: Any, item: object, *_: int) -> int:
    raise _no_tensor_error(self, f"({{}} == {_shown_operand(item)}).nonzero()")


def _get_item(self: Any, index: Any) -> Any:
    if isinstance(index, slice):
        return tuple.__getitem__(self, index)
    # A tensor of one number has an __index__ too, and is meant for the samples.
    if hasattr(index, "__index__") and not isinstance(index, torch.Tensor):
        _check_part(self, int(operator.index(index)))
        return tuple.__getitem__(self, index)

    indices = index if type(index) is tuple else (index,)
    shown = ", ".join(map(_shown_index, indices))
    refusal = _no_tensor_error(self, f"{{}}[{shown}]")
    if isinstance(index, str) and index in self._fields:
        name = type(self).__name__.lower()
        raise OptionError(refusal.what, why=refusal.why, fix=f"{name}.{index}")
    raise refusal


def _check_part(batch: Any, index: int) -> None:
    """Refuse the number of a sample as the number of a part.

    Raises:
        NoSuchRowError: There is no such part.
    """
    if -len(batch) <= index < len(batch):
        return
    name = type(batch).__name__
    message = f"{name} has no part {index}: {name.lower()}[{index}]."
    why = f"it is a tuple of {', '.join(batch._fields)}, and not of the samples"
    fix = f"{name.lower()}.to_list()[{index}]"
    raise NoSuchRowError(message, why=why, fix=fix)


def _torch_function(
    kind: type, function: object, _: Any, args: Any = (), kwargs: Any = None
) -> Any:
    batch, shown = _shown_call(function, kind, args, kwargs or {})
    raise _no_tensor_error(batch, shown)


def _as_numpy_array(self: Any, *_: Any, **__: Any) -> Any:
    raise _no_tensor_error(self, "numpy.asarray({})")


_ANSWERS_OF_A_TUPLE: dict[str, Callable[..., Any]] = {
    "__eq__": _is_equal,
    "__ne__": _is_unequal,
    "__contains__": _has_item,
    "__getitem__": _get_item,
    "count": _count_item,
    "index": _index_of_item,
}
"""In place of what a tuple would answer."""
_ASKED_BY_LIBRARIES: dict[str, object] = {
    # torch asks here before it computes with what is no tensor.
    "__torch_function__": classmethod(_torch_function),
    # numpy would make an array of three arrays; without ``__array_ufunc__`` it asks for
    # __radd__ and its like.
    "__array__": _as_numpy_array,
    "__array_ufunc__": None,
}


def _has_other_parts(batch: tuple[Any, ...], other: object) -> bool:
    """Tell whether comparing a batch would ask whether two tensors are equal."""
    if not isinstance(other, tuple) or len(other) != len(batch):
        return False
    return any(
        component is not other_component and isinstance(other_component, torch.Tensor)
        for component, other_component in zip(batch, other, strict=True)
    )


def _shown_call(
    function: object, kind: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, str]:
    """Write a call of torch's with ``{0}`` for the ragged batch that it was given.

    Returns:
        The batch, and the call.
    """
    name = resolve_name(function) or getattr(function, "__name__", str(function))
    batches: list[Any] = []

    def shown(argument: object) -> str:
        if isinstance(argument, kind):
            batches.append(argument)
            return "{0}"
        if type(argument) in {list, tuple}:
            return f"[{', '.join(map(shown, cast('list[object]', argument)))}]"
        if argument is None or isinstance(argument, bool | int | float | str):
            return repr(argument)
        return "tensor" if isinstance(argument, torch.Tensor) else "..."

    parts = [*map(shown, args)]
    # Functions of torch.nn.functional hand on what has a default, too.
    parts += [
        f"{key}={shown(value)}" for key, value in kwargs.items() if value is not None
    ]
    # torch comes here only where there is one; deeper down it is not looked for.
    batch = batches[0] if batches else object.__new__(kind)
    return batch, f"{name}({', '.join(parts)})"


def _shown_index(index: object) -> str:
    """Write an index as it stands in brackets."""
    if isinstance(index, slice):
        borders = (index.start, index.stop)
        return ":".join("" if border is None else str(border) for border in borders)
    if isinstance(index, torch.Tensor | np.ndarray):
        return "rows"
    return "..." if index is ... else repr(index)


def _shown_operand(operand: object) -> str:
    """Write a number as it is, and anything else by the name of its class."""
    if isinstance(operand, int | float | complex):
        return repr(operand)
    if isinstance(operand, torch.Tensor | np.ndarray):
        return "tensor"
    name = type(operand).__name__.lower()
    return f"{name}.values" if isinstance(operand, tuple(_ANSWERING)) else name
