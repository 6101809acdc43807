"""Functions that a caller gave, taken or refused.  Pure."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

from loaderkit.errors import OptionError
from loaderkit.fixes import Setting
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def check_callable(name: str, value: object, example: str, takes: str = "") -> Any:
    """Take something that can be called.

    Args:
        name: The option.
        value: What was given.
        example: What could be given, as code.
        takes: The one thing that it will be called with, in a word; empty where there
            are more, or fewer.

    Returns:
        The value.

    Raises:
        OptionError: It cannot be called, or not with that; or it makes a generator or a
            coroutine, whose code runs only when it is read; or it is a class whose
            instances are functions, such as a module of torch or a transform of PyG:
            calling that would make one.
    """
    if not callable(value):
        message = f"{name} must be a function, got {show_value(value)}."
        why = f"its type, {type(value).__name__}, cannot be called"
        if name in _OF_TRANSFORMS and _are_functions(value):
            why = "it holds functions, and is none"
            fix = f"{name}=torch_geometric.transforms.Compose([...]), which calls them "
            fix += "one after the other"
            raise OptionError(message, why=why, fix=fix)
        raise OptionError(message, why=why, fix=Setting(name, code=example))
    if isinstance(value, type) and any("__call__" in vars(k) for k in value.__mro__):
        message = f"{name} must be a function, got the class {value.__name__}."
        why = "its instances can be called as one; the class was not called yet"
        made = Setting(name, code=f"{value.__name__}(...)")
        raise OptionError(message, why=why, fix=made)
    refused = refusal_of_call(value, takes) if takes else None
    if refused is not None:
        message = f"{name} cannot be called: {refused}."
        why = f"it is called with one argument, the {takes}"
        raise OptionError(message, why=why, fix=Setting(name, code=example))
    _refuse_deferred(name, value, takes)
    return value


_OF_TRANSFORMS = frozenset({"transform", "batch_transform", "function"})


def _are_functions(value: object) -> bool:
    """Tell whether it is a list of functions, as several transforms are given."""
    return isinstance(value, list | tuple) and bool(value) and all(map(callable, value))


def check_function_of_samples(function: object, *, with_indices: bool) -> None:
    """Refuse what cannot be called with each sample, as ``map`` and ``filter`` do.

    Args:
        function: What was given.
        with_indices: It is called with the sample and its row.

    Raises:
        OptionError: It cannot be called, or not so.
    """
    check_callable("function", function, "lambda sample: ...")
    arguments = ("sample", "row") if with_indices else ("sample",)
    refused = refusal_of_call(cast("Callable[..., Any]", function), *arguments)
    if refused is None:
        return
    message = f"function cannot be called: {refused}."
    why = "it is called with one argument, the sample"
    fix = (
        "lambda sample: f(*sample) for samples that are tuples; with_indices=True, if "
        "the second argument is the sample's row"
    )
    takes_nothing = refusal_of_call(cast("Callable[..., Any]", function)) is None
    if takes_nothing:
        fix = "lambda sample: ..."
    if with_indices:
        why = "with_indices=True, so it is called with the sample and its row"
        fix = "lambda sample, row: ..., or drop with_indices"
    raise OptionError(message, why=why, fix=fix)


def refusal_of_call(function: Callable[..., Any], *arguments: str) -> str | None:
    """Say why a function cannot be called with some arguments by position.

    Args:
        function: The function.
        arguments: What it would be given, by name.

    Returns:
        Python's words; None where it can be, or does not say what it takes.

    >>> refusal_of_call(lambda: 3, "key")
    'too many positional arguments'
    >>> refusal_of_call(lambda key, seed=0: 3, "key") is None
    True
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C
        return None
    try:
        signature.bind(*arguments)
    except TypeError as refused:
        return str(refused)
    return None


def check_takes_nothing(name: str, function: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called without arguments, or does nothing then.

    Raises:
        OptionError: It needs some, as a method does that is decorated in its class; or
            it makes a generator or a coroutine, whose code runs only when it is read.
    """
    _refuse_deferred(name, function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of C, which does not say what it takes
        return
    needed = names_without_default(parameters)
    shown = getattr(function, "__name__", type(function).__name__)
    forward = getattr(function, "forward", None)
    if not needed and callable(forward):
        # A module's own call takes anything, and hands it on.
        shown = "model"
        needed = names_without_default(inspect.signature(forward).parameters.values())
    if needed:
        message = f"{name} must take nothing, and {shown} needs {', '.join(needed)}."
        why = "it is called again and again, as it is"
        call = f"{_name_in_code(shown, name)}({', '.join(needed)})"
        raise OptionError(message, why=why, fix=f"lambda: {call}")


def names_without_default(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """Name the parameters that a call must give."""
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    ]


def _refuse_deferred(name: str, function: Callable[..., Any], takes: str = "") -> None:
    """Refuse a function whose call runs none of its code.

    Args:
        name: The option.
        function: What was given.
        takes: The one thing that it is called with, in a word; empty for whatever it
            needs.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of C, whose code runs when it is called
        return
    called = _name_in_code(getattr(function, "__name__", ""), name)
    arguments = takes or ", ".join(names_without_default(parameters))
    head = f"lambda {arguments}:" if arguments else "lambda:"
    call = f"{called}({arguments})"
    if inspect.isgeneratorfunction(function):
        result, fix = "a generator", f"{head} list({call})"
    elif inspect.iscoroutinefunction(function):
        result = "a coroutine"
        fix = "\n".join([IMPORT_ASYNCIO, f"{head} asyncio.run({call})"])
    elif inspect.isasyncgenfunction(function):
        result = "an asynchronous generator"
        collected = f"{head} asyncio.run(read_all({call}))"
        fix = "\n".join([IMPORT_ASYNCIO, DEFINE_READ_ALL, collected])
    else:
        return
    message = f"{name} must do its work when it is called, and gives {result}."
    raise OptionError(message, why="none of its code has run by then", fix=fix)


IMPORT_ASYNCIO = "import asyncio"

DEFINE_READ_ALL = "async def read_all(items): return [item async for item in items]"
"""What a fix begins with that collects what is awaited item by item: Python has no
function for it."""


def _name_in_code(function_name: str, otherwise: str) -> str:
    """Give a function's name if code can say it; a lambda has none."""
    return function_name if function_name.isidentifier() else otherwise
