"""Classes that answer wrong names of attributes and of arguments.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar

from loaderkit.call_keywords import suggest_keywords
from loaderkit.errors import NoSuchAttributeError, OptionError
from loaderkit.habits import ATTRIBUTES, Hint
from loaderkit.nearest_names import nearest_name, suggest_name
from loaderkit.operations import answer_operations, usual_variable
from loaderkit.value_words import show_value

Kind = TypeVar("Kind", bound=type)


def answer_wrong_names(*parts: str) -> Callable[[Kind], Kind]:
    """Have a class answer names that it lacks with the nearest that it has.

    Its constructor and public methods answer keywords and numbers of arguments as
    ``suggest_keywords`` does, and operators that it lacks are answered as
    ``answer_operations`` does.  An attribute that is not there is answered with what
    ``habits`` says of it, with the part of the object that has it, or with the nearest
    name.  Type checkers are not told, and go on to find misspelt names.

    Args:
        parts: Attributes to look into, each an object or a mapping.

    Returns:
        The decorator; above ``@dataclass``, whose constructor it decorates too.

    >>> @answer_wrong_names("sizes")
    ... class Report:
    ...     def __init__(self):
    ...         self.leaking, self.sizes = False, {"weights": 3}
    >>> Report().is_leaking
    Traceback (most recent call last):
    loaderkit.errors.NoSuchAttributeError: Report has no attribute 'is_leaking'.
      why: none of its attributes has that name
      fix: did you mean 'leaking'?
    >>> Report().weights
    Traceback (most recent call last):
    loaderkit.errors.NoSuchAttributeError: Report has no attribute 'weights'.
      why: it is in sizes
      fix: report.sizes['weights']
    """

    def decorate(kind: Kind) -> Kind:
        answer_wrong_calls(kind)

        def answer(self: Any, name: str) -> Any:
            # Protocols are asked for by libraries; a name that the class has is a
            # property that raised, or a field that is not set yet: raise that again.
            if name.startswith("_") or hasattr(kind, name) or name in _fields_of(self):
                return object.__getattribute__(self, name)
            raise no_such_attribute(self, name, parts)

        def answer_brackets(self: Any, name: object) -> Any:
            raise _no_brackets(self, name)

        if not hasattr(kind, "__getitem__"):
            setattr(kind, "__getitem__", answer_brackets)  # noqa: B010
        # Set like this, type checkers do not see that any name may be asked for.
        setattr(kind, "__getattr__", answer)  # noqa: B010
        return answer_operations(kind)

    return decorate


def answer_wrong_calls(kind: Kind) -> Kind:
    """Have the constructor and the public methods of a class answer wrong arguments.

    Args:
        kind: The class; its methods are replaced in place.

    Returns:
        It.
    """
    for name, member in list(vars(kind).items()):
        is_public = name in {"__init__", "__call__"} or not name.startswith("_")
        if is_public and isinstance(member, FunctionType):
            setattr(kind, name, suggest_keywords(member))
    return kind


def no_such_attribute(
    owner: object, name: str, parts: tuple[str, ...] = ()
) -> NoSuchAttributeError:
    """Make the error for an attribute that an object lacks.

    Args:
        owner: The object.
        name: What was asked for.
        parts: Attributes of it to look into.

    Returns:
        The error, to be raised by the caller.
    """
    kind = type(owner)
    message = f"{kind.__name__} has no attribute {name!r}."
    hint = _hint_for(kind, name)
    if hint is not None:
        why = hint.why or "it has another name here"
        return NoSuchAttributeError(message, why=why, fix=hint.fix)
    variable = usual_variable(kind)
    for part_name in parts:
        inner = vars(owner).get(part_name) if hasattr(owner, "__dict__") else None
        if inner is None:
            inner = getattr(owner, part_name, None)
        if isinstance(inner, Mapping):
            keys = [key for key in inner if str(key).replace(" ", "_") == name]
            if keys:
                why = f"it is in {part_name}"
                fix = f"{variable}.{part_name}[{keys[0]!r}]"
                return NoSuchAttributeError(message, why=why, fix=fix)
        elif inner is not None and _has(inner, name):
            # In the class first: a property is not computed, nor warns, for a message.
            member = getattr(type(inner), name, None) or getattr(inner, name)
            call = "()" if callable(member) else ""
            why, fix = f"{part_name} has it", f"{variable}.{part_name}.{name}{call}"
            return NoSuchAttributeError(message, why=why, fix=fix)
    named = {*dir(owner), *_fields_of(owner)}
    names = sorted(attribute for attribute in named if not attribute.startswith("_"))
    why = "none of its attributes has that name"
    return NoSuchAttributeError(message, why=why, fix=suggest_name(name, names))


def _has(inside: object, name: str) -> bool:
    return hasattr(type(inside), name) or hasattr(inside, name)


def _no_brackets(owner: object, name: object) -> OptionError:
    """Say how what was asked for in brackets, as of a dict, is asked for."""
    kind = type(owner).__name__
    message = f"{kind} has nothing in brackets: [{show_value(name)}]."
    names = [attribute for attribute in dir(owner) if not attribute.startswith("_")]
    fix = f"its attributes are {', '.join(names)}"
    if type(name) is int and name == 0:
        # Python asks for [0] where it looks for an item, or loops over what has
        # brackets and no __iter__.  Without these it would say "not iterable".
        message = f"{kind} is no collection: it has no [0], and is not looped over."
        whole = [method for method in ("settings", "to_json") if method in names]
        if whole:
            fix = f"{usual_variable(type(owner))}.{whole[0]}()"
    if isinstance(name, str):
        near = name if name in names else nearest_name(name, names)
        variable = usual_variable(type(owner))
        fix = f"{variable}.{near}" if near is not None else fix
    return OptionError(message, why="it is read by attributes", fix=fix)


def _hint_for(kind: type, name: str) -> Hint | None:
    for base in kind.__mro__:
        hint = ATTRIBUTES.get(base.__name__, {}).get(name)
        if hint is not None:
            return hint
    return None


def _fields_of(owner: object) -> Mapping[str, Any]:
    """Give the fields of a dataclass, which an object that is being made lacks yet."""
    fields: Mapping[str, Any] = getattr(type(owner), "__dataclass_fields__", {})
    return fields
