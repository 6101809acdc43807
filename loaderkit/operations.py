"""Classes that answer operations of Python that they do not have.  Pure.

An operation is answered only where that makes no other library believe that it works.
``callable(dataset)`` or ``isinstance(loader, Iterator)`` must go on to be False, so
that calls, ``next``, ``len``, ``float`` and ``**`` are left to Python's own words.
Operators, comparisons, formats and assignments are asked for by nobody beforehand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any, TypeVar, cast

from loaderkit.errors import NotChangeableError, OptionError
from loaderkit.habits import NUMBERS, OPERATORS
from loaderkit.nearest_names import nearest_name
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Kind = TypeVar("Kind", bound=type)
T = TypeVar("T")

ARITHMETIC = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "matmul": "@",
    "and": "&",
    "or": "|",
    "xor": "^",
}
"""Operators that have a reflected method too, by the name of the method."""
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
SIGNS = {"neg": "-", "pos": "+", "invert": "~"}
"""Operators with one operand, by the name of the method."""
_NOTHING = object()
"""No operand; None may be one."""
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_OF_TEXTS = re.compile(r"(.?[<>^])?\d*(\.\d+)?s?")
"""What texts can be formatted with: columns, and letters at most."""


def answer_operations(kind: Kind) -> Kind:
    """Have a class answer operators, formats and assignments that it lacks.

    Args:
        kind: The class; what it defines itself stays as it is.

    Returns:
        It.
    """
    for method, symbol in ARITHMETIC.items():
        _set_missing(kind, f"__{method}__", _refused_operator(method, symbol))
        _set_missing(kind, f"__r{method}__", _refused_reflection(symbol))
    for method, symbol in COMPARISONS.items():
        _set_missing(kind, f"__{method}__", _refused_operator(method, symbol))
    for method, symbol in SIGNS.items():
        _set_missing(kind, f"__{method}__", _refused_sign(symbol))
    _set_missing(kind, "__format__", _format_result)
    _set_missing(kind, "__setitem__", _refuse_item)
    _set_missing(kind, "__delitem__", _refuse_deletion)
    parameters = getattr(kind, "__dataclass_params__", None)
    if issubclass(kind, tuple) or (parameters is not None and parameters.frozen):
        # A dataclass has made these itself, and they say "cannot assign to field".
        setattr(kind, "__setattr__", _refuse_attribute)  # noqa: B010
        setattr(kind, "__delattr__", _refuse_to_delete_attribute)  # noqa: B010
    if parameters is not None and parameters.frozen and parameters.eq:
        # That of a dataclass fails for a field that is a dict or a list.
        setattr(kind, "__hash__", _hash_of_fields)  # noqa: B010
    return kind


def refuse_new_attributes(kind: Kind) -> Kind:
    """Have objects of a class refuse attributes that they did not have when made.

    A setting under a wrong name would be set, and nobody would read it.  A user's
    subclass may have more.

    Args:
        kind: The class.

    Returns:
        It.
    """
    make = kind.__init__  # type: ignore[misc]
    # Of the class, which mypy takes for that of an object.
    set_attribute = cast("Callable[[Any, str, object], None]", kind.__setattr__)

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        make(self, *args, **kwargs)
        vars(self)["_is_made"] = True

    def __setattr__(self: Any, name: str, value: object) -> None:  # noqa: N807
        # What a class gives a value is a setting that nobody has changed yet.
        is_setting = name in vars(self) or _is_value(getattr(kind, name, _NOTHING))
        is_new = not name.startswith("_") and not is_setting
        if type(self) is kind and "_is_made" in vars(self) and is_new:
            raise _no_such_setting(self, name, value)
        set_attribute(self, name, value)

    setattr(kind, "__init__", __init__)  # noqa: B010
    setattr(kind, "__setattr__", __setattr__)  # noqa: B010
    return kind


def _is_value(of_class: object) -> bool:
    """Tell a value that a class gives its objects from its methods and properties."""
    is_code = callable(of_class) or hasattr(of_class, "__get__")
    return of_class is not _NOTHING and not is_code


def usual_variable(kind: type) -> str:
    """Name the variable that holds one: the last word of the class's name.

    >>> class BatchPlan: ...
    >>> usual_variable(BatchPlan)
    'plan'
    """
    words: list[str] = re.findall(r"[A-Z]?[^A-Z]+|[A-Z]+", kind.__name__)
    return words[-1].lower()


def refuse_operator(
    owner: object, symbol: str, *, left: object = _NOTHING, right: object = _NOTHING
) -> OptionError:
    """Make the error for an operator that an object does not have.

    Args:
        owner: The object; it stands where no other operand does.
        symbol: The operator, such as "*".
        left: The operand on the left, if the object is the other one.
        right: The operand on the right, if the object is the other one.

    Returns:
        The error, to be raised by the caller.
    """
    kind = type(owner)
    shown = _show_operator(symbol, usual_variable(kind), left, right, usual_variable)
    message = f"{kind.__name__} has no operator {symbol!r}: {shown}."
    hint = _said_of_class(OPERATORS, kind, {}).get(symbol)
    if hint is not None:
        return OptionError(message, why=hint.why, fix=hint.fix)
    number = _said_of_class(NUMBERS, kind, "")
    if not number:
        why = "it holds several values, and is none itself"
        return OptionError(message, why=why, fix=_its_attributes(owner))
    why = "it holds several values; this one was probably meant"
    fix = _show_operator(symbol, number, left, right, _number_or_variable)
    return OptionError(message, why=why, fix=fix)


def _show_operator(
    symbol: str,
    shown: str,
    left: object,
    right: object,
    show_kind: Callable[[type], str],
) -> str:
    """Write an operator and its operands, as code."""
    if left is not _NOTHING:
        return f"{_show_operand(left, show_kind)} {symbol} {shown}"
    if right is not _NOTHING:
        return f"{shown} {symbol} {_show_operand(right, show_kind)}"
    return f"{symbol}{shown}"


def _show_operand(operand: object, show_kind: Callable[[type], str]) -> str:
    """Write a number as it is, and anything else by what its class is called."""
    if operand is None or isinstance(operand, int | float | complex):
        return repr(operand)
    return show_kind(type(operand))


def _number_or_variable(kind: type) -> str:
    return _said_of_class(NUMBERS, kind, "") or usual_variable(kind)


def _said_of_class(hints: Mapping[str, T], kind: type, default: T) -> T:
    """Find what is said of a class, or of a base of its own."""
    names = (base.__name__ for base in kind.__mro__)
    return next((hints[name] for name in names if name in hints), default)


def _set_missing(kind: type, name: str, method: Callable[..., Any]) -> None:
    """Set a method that neither the class nor a base of its own defines."""
    owner = next((base for base in kind.__mro__ if name in vars(base)), object)
    if owner is object:
        setattr(kind, name, method)


def _refused_operator(method: str, symbol: str) -> Callable[[Any, object], Any]:
    def operate(self: Any, other: object) -> Any:
        reflected = _MIRRORED.get(method, f"r{method}")
        result = _ask_other(other, f"__{reflected}__", self)
        if result is NotImplemented:
            raise refuse_operator(self, symbol, right=other)
        return result

    return operate


def _refused_reflection(symbol: str) -> Callable[[Any, object], Any]:
    def operate(self: Any, other: object) -> Any:
        raise refuse_operator(self, symbol, left=other)

    return operate


def _refused_sign(symbol: str) -> Callable[[Any], Any]:
    def operate(self: Any) -> Any:
        raise refuse_operator(self, symbol)

    return operate


def _ask_other(other: object, method: str, operand: object) -> Any:
    """Do an operation as an object of another library does it, which Python asks next.

    Returns:
        What it gives; ``NotImplemented`` where it does not do it.
    """
    kind = type(other)
    # As Python does, in the class itself: its metaclass has an ``__or__`` of types.
    owner = next((base for base in kind.__mro__ if method in vars(base)), object)
    if owner is object or kind.__module__ == "builtins":
        return NotImplemented
    reflected = vars(owner)[method]
    if getattr(reflected, "__module__", None) == __name__:
        return NotImplemented
    return reflected.__get__(other, kind)(operand)


def _format_result(self: Any, spec: str) -> str:
    """Format as the text that is printed, which has columns and no decimals."""
    if not spec:
        return str(self)
    kind = type(self)
    variable = usual_variable(kind)
    message = f"{kind.__name__} has no format {spec!r}."
    fix = f'f"{{str({variable})}}"'
    if _OF_TEXTS.fullmatch(spec) and "." not in spec:
        fix = f'f"{{str({variable}):{spec}}}"'
        raise OptionError(message, why="that is a format of texts", fix=fix)
    number = _said_of_class(NUMBERS, kind, "")
    if number:
        # Before Python 3.12 the quotes within an f-string are others than its own.
        fix = "f'" if '"' in number else 'f"'
        fix += f"{{{number}:{spec}}}{fix[-1]}"
    raise OptionError(message, why="that is a format of numbers", fix=fix)


def _refuse_item(self: Any, index: object, _: object) -> None:
    item = f"[{show_value(index)}] = ..."
    variable = usual_variable(type(self))
    fix = f"{variable}.values{item}" if "values" in _fields_of(self) else ""
    raise _cannot_change(self, item, fix)


def _refuse_deletion(self: Any, index: object) -> None:
    raise _cannot_change(self, f"del [{show_value(index)}]")


def _refuse_attribute(self: Any, name: str, _: object) -> None:
    fields = _fields_of(self)
    variable = usual_variable(type(self))
    fix = f"copy = dataclasses.replace({variable}, {name}=...)"
    if isinstance(self, tuple):
        fix = f"copy = {variable}._replace({name}=...)"
    if name not in fields:
        fix = f"keep it beside it: {name} = ..."
    raise _cannot_change(self, f"{name} = ...", fix)


def _refuse_to_delete_attribute(self: Any, name: str) -> None:
    fix = f"del {usual_variable(type(self))}, which is whole or not at all"
    raise _cannot_change(self, f"del {name}", fix)


def _cannot_change(owner: object, wish: str, fix: str = "") -> NotChangeableError:
    message = f"{type(owner).__name__} cannot be changed: {wish}."
    why = "it says what was read, measured or decided, and stays so"
    return NotChangeableError(message, why=why, fix=fix or _its_attributes(owner))


def _no_such_setting(owner: object, name: str, value: object) -> NotChangeableError:
    kind = type(owner)
    message = f"{kind.__name__} has no setting {name!r}."
    names = sorted(setting for setting in vars(owner) if not setting.startswith("_"))
    nearest = nearest_name(name, names)
    fix = f"its settings are {', '.join(names)}"
    if hasattr(kind, name):
        message = f"{kind.__name__}.{name} cannot be replaced."
    elif nearest is not None:
        fix = f"{usual_variable(kind)}.{nearest} = {show_value(value)}"
    return NotChangeableError(message, why="nobody would read it", fix=fix)


def _hash_of_fields(self: Any) -> int:
    """Hash what can be hashed: objects that are equal have equal fields."""
    hashes: list[int] = []
    for name in _fields_of(self):
        # A dict, a list or an array has no hash, and no equal of it has one.
        with contextlib.suppress(TypeError):
            hashes.append(hash(getattr(self, name)))
    return hash((type(self), *hashes))


def _fields_of(owner: object) -> tuple[str, ...]:
    """Name the fields of a dataclass, or of a named tuple."""
    if isinstance(owner, tuple):
        return tuple(getattr(owner, "_fields", ()))
    if dataclasses.is_dataclass(owner):
        return tuple(field.name for field in dataclasses.fields(owner))
    return ()


def _its_attributes(owner: object) -> str:
    names = [name for name in dir(owner) if not name.startswith("_")]
    return f"its attributes are {', '.join(names)}"
