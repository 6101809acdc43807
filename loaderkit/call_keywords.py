"""Keywords of a call, answered with the nearest that its function has.  Pure."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import ParamSpec

from loaderkit.errors import OptionError
from loaderkit.function_arguments import names_without_default
from loaderkit.habits import CALL_HINTS, KEYWORDS, OPTIONS_ELSEWHERE
from loaderkit.nearest_names import suggest_name
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from loaderkit.habits import Hint

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def parse_arguments(
    kind: type[T], given: Mapping[str, Any], function: Callable[..., Any]
) -> T:
    """Make the options of a function.

    Args:
        kind: A dataclass.
        given: Its fields by name, as the caller gave them; "auto" leaves one as it is.
        function: What was called; its own parameters are offered too.

    Returns:
        The options.

    Raises:
        OptionError: There is no such option; the message names the nearest, or all.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            own_names = _keywords_of(function)
            raise refuse_keyword(
                function.__name__,
                name,
                [*own_names, *known],
                value=given[name],
            )
    set_by_hand = {
        name: value
        for name, value in given.items()
        if not (isinstance(value, str) and value == "auto")
    }
    return kind(**set_by_hand)


def suggest_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function answer a keyword that it lacks with the nearest that it has.

    Python says "got an unexpected keyword argument", which leaves users of other
    libraries to search for the name that it has here.

    Args:
        function: Or an ``__init__``, which speaks for its class.

    Returns:
        The function, which raises ``OptionError``, also a ``TypeError``, for such a
        keyword.
    """
    signature = inspect.signature(function)
    known = _keywords_of(function)
    takes_any_keyword = any(
        parameter.kind is parameter.VAR_KEYWORD
        for parameter in signature.parameters.values()
    )

    @functools.wraps(function)
    def with_suggestions(*args: P.args, **kwargs: P.kwargs) -> R:
        # pytest shows no frames of functions that set this, so a failed assertion of
        # ours ends at the user's line.
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except OptionError:
            raise  # a TypeError too, which says already what was wrong
        except TypeError as error:
            # Only now is it looked at whether the call was the fault: a call that
            # works costs nothing.
            refused = _refused_by(signature, args, kwargs)
            if refused is None:
                raise
            caller = _name_of_call(function, args)
            unknown = [] if takes_any_keyword else [k for k in kwargs if k not in known]
            if unknown:
                raise refuse_keyword(
                    caller,
                    unknown[0],
                    known,
                    value=kwargs[unknown[0]],
                    hints=_keyword_hints(function, args),
                ) from None
            del error
            raise _refuse_call(caller, function, signature, refused, args) from None

    return with_suggestions


def _refused_by(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TypeError | None:
    """Say what is wrong with the arguments of a call; None where they can be bound."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return error
    return None


def _name_of_call(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Name what was called as its caller wrote it: a method by the object's own class.

    ``batch`` is defined by a base class that no user has heard of.
    """
    owner, dot, name = function.__qualname__.rpartition(".")
    if not dot or owner.endswith("<locals>"):
        return name
    if not args:
        return name if name != "__init__" else owner.rpartition(".")[2]
    kind = args[0] if isinstance(args[0], type) else type(args[0])
    if _lacks_self(function, args):
        return name
    if name == "__call__":
        return f"{kind.__name__}()"
    return kind.__name__ if name == "__init__" else f"{kind.__name__}.{name}"


def _lacks_self(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Tell whether a method was called on its class: ``SafeDataset.load("a")``."""
    owner, dot, name = function.__qualname__.rpartition(".")
    if not dot or owner.endswith("<locals>") or name == "__init__" or not args:
        return False
    kind = args[0] if isinstance(args[0], type) else type(args[0])
    return all(base.__qualname__ != owner for base in kind.__mro__)


def _keyword_hints(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> Mapping[str, Hint]:
    """Find what is known about keywords of a function, or of a class and its bases."""
    owner, _, name = function.__qualname__.rpartition(".")
    if name != "__init__":
        return KEYWORDS.get(name, {})
    kinds = [kind.__name__ for kind in type(args[0]).__mro__] if args else [owner]
    return next((KEYWORDS[kind] for kind in kinds if kind in KEYWORDS), {})


def _refuse_call(
    caller: str,
    function: Callable[..., Any],
    signature: inspect.Signature,
    error: TypeError,
    args: tuple[Any, ...],
) -> OptionError:
    """Make the error for a call with too many arguments, or too few.

    Args:
        caller: What was called, as its caller wrote it.
        function: It.
        signature: Its.
        error: What Python says of the call.
        args: What was given by position, with ``self`` of a method.
    """
    parameters = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    required = names_without_default(parameters)
    by_position = [
        parameter.name
        for parameter in parameters
        if parameter.kind
        in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    ]
    message = f"{caller} was called with other arguments than it takes: {error}."
    why = "it takes nothing"
    if parameters:
        why = f"by position it takes {', '.join(by_position) or 'nothing'}"
        names = [parameter.name for parameter in parameters]
        others = [name for name in names if name not in by_position]
        if others:
            why += "; the others by name"
    fix = f"{caller}({', '.join(required)})"
    too_many = args[len(signature.parameters) - len(parameters) + len(by_position) :]
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if too_many and len(too_many) <= len(by_name):
        # In the order in which the function names them: probably so they were meant.
        pairs = zip(by_name, too_many, strict=False)
        named = [f"{name}={_as_code(value)}" for name, value in pairs]
        fix = f"{caller}({', '.join([*by_position, *named])})"
    if _lacks_self(function, args):
        why = "it is a method of an object, and was called on the class"
        fix = f"dataset = loaderkit.open_cache(path), then dataset.{fix}"
        return OptionError(message, why=why, fix=fix)
    hint = CALL_HINTS.get(function.__qualname__.removesuffix(".__init__"))
    if hint:
        fix = hint.fix
        why = hint.why or why
    return OptionError(message, why=why, fix=fix)


def _as_code(value: object) -> str:
    """Write a value as a caller would; "..." for what is no number, truth or text."""
    is_short = isinstance(value, bool | int | float | str | None)
    return show_value(value) if is_short else "..."


def _keywords_of(function: Callable[..., Any]) -> list[str]:
    """Name what a function takes by name."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
    ]


def refuse_keyword(
    caller: str,
    name: str,
    known: Iterable[str],
    *,
    value: object = None,
    hints: Mapping[str, Hint] | None = None,
) -> OptionError:
    """Make the error for a keyword that a function does not take.

    Args:
        caller: The function, or the class whose constructor it is.
        name: The keyword.
        known: Those that it takes.
        value: What it was given, for the fix.
        hints: What to say of names that other libraries have; those of ``caller`` if
            None.

    Returns:
        The error, to be raised by the caller.

    >>> print(refuse_keyword("pack", "num_workers", ["workers", "overwrite"], value=8))
    pack has no option 'num_workers'.
      why: it has another name here
      fix: workers=8
    """
    message = f"{caller} has no option {name!r}."
    hint = (KEYWORDS.get(caller, {}) if hints is None else hints).get(name)
    if hint is not None:
        fix = hint.fix if hint.why else rename_in_hint(hint.fix, value)
        return OptionError(message, why=hint.why or _OTHER_NAME, fix=fix)
    elsewhere = OPTIONS_ELSEWHERE.get(name)
    if elsewhere is not None:
        return OptionError(message, why=elsewhere.why, fix=elsewhere.fix)
    own_names = [parameter for parameter in known if parameter != "self"]
    return OptionError(message, why=_NO_SUCH_NAME, fix=suggest_name(name, own_names))


def rename_in_hint(fix: str, value: object) -> str:
    """Put what a keyword was given in the place of the examples that it fits.

    Args:
        fix: Options with an example each.
        value: What was given under another name.

    >>> rename_in_hint("target='cuda'", "mps"), rename_in_hint("rank=0", "node")
    ("target='mps'", 'rank=0')
    >>> rename_in_hint("tolerance=16384, or limit='1MiB'", "2 MB")
    "tolerance='2 MB', or limit='2 MB'"
    """
    return ", or ".join(_with_value(part, value) for part in fix.split(", or "))


def _with_value(fix: str, value: object) -> str:
    """Put a value in the place of an example of its type; an amount in an amount's."""
    name, _, example = fix.partition("=")
    try:
        example_value = ast.literal_eval(example)
    except (ValueError, SyntaxError):
        return fix
    is_amount = name in _AMOUNTS and _is_amount(value)
    if is_amount or type(value) is type(example_value):
        return f"{name}={value!r}"
    return fix


_AMOUNTS = frozenset({"tolerance", "limit", "shard_bytes", "max_bytes", "mirror_bytes"})
"""Options that are a number of bytes, or a text with a unit."""


def _is_amount(value: object) -> bool:
    """Whether a value is a number of bytes, or a text such as "1 MiB"."""
    if isinstance(value, str):
        return bool(re.fullmatch(r"\s*[\d.]+\s*[kmgt]?i?b\s*", value, re.IGNORECASE))
    # Of fewer bytes than a page it is not known whether they were meant.
    return isinstance(value, int) and value >= 4096


_NO_SUCH_NAME = "none of its options has that name"

_OTHER_NAME = "it has another name here"
