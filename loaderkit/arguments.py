"""Arguments by name, checked against a dataclass of them, and their values.  Pure."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import math
import operator
import os
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from typing_extensions import ParamSpec

from loaderkit.errors import OptionError
from loaderkit.fixes import Either, Setting
from loaderkit.habits import (
    CALL_HINTS,
    DEVICES,
    KEYWORDS,
    MODELS,
    OF_OTHER_LIBRARIES,
    OPTIONS_ELSEWHERE,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
    if name == "__call__":
        return f"{kind.__name__}()"
    return kind.__name__ if name == "__init__" else f"{kind.__name__}.{name}"


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
    required = _names_without_default(parameters)
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
    hint = CALL_HINTS.get(function.__qualname__.removesuffix(".__init__"))
    if hint:
        fix = hint.fix
        why = hint.why or why
    return OptionError(message, why=why, fix=fix)


def _as_code(value: object) -> str:
    """Write a value as a caller would; "..." for what is no number, truth or text."""
    is_short = isinstance(value, bool | int | float | str | None)
    return show_value(value) if is_short else "..."


def _names_without_default(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """Name the parameters that a call must give."""
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    ]


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


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Name the nearest of the names there are, or all of them.

    >>> suggest_name("batchsize", ["batch_size", "shuffle"])
    "did you mean 'batch_size'?"
    >>> suggest_name("xylophone", {"shuffle", "batch_size"})
    'it is one of batch_size, shuffle'
    """
    # The order of a set differs from process to process.
    names = sorted(known) if isinstance(known, AbstractSet) else list(known)
    nearest = nearest_name(name, names)
    if nearest is not None:
        return f"did you mean {nearest!r}?"
    if not names:
        return "drop it: there is none"
    return f"it is one of {', '.join(names)}"


_COMMON_WORDS = frozenset(
    {"num", "n", "max", "min", "total", "is", "has", "get", "set", "to", "from", "of"}
    | {"the", "by", "all", "per", "byte", "memory", "at", "in", "on", "ha", "i", "it"}
)
"""Words in many names, which say nothing about what was meant."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Find the name that was probably meant.

    That is one that is spelt alike, or else one that shares the most words: people
    write ``is_leaking`` for ``leaking`` and ``peak_memory`` for ``peak``.

    Args:
        name: What was written.
        known: The names there are.

    Returns:
        One of them; None where none is near.

    >>> nearest_name("bach_size", ["batch_size"]), nearest_name("peak_memory", ["peak"])
    ('batch_size', 'peak')
    >>> nearest_name("anything", ["peak"]) is None
    True
    """
    return _nearest_name(name, tuple(known))


@functools.lru_cache(maxsize=256)
def _nearest_name(name: str, names: tuple[str, ...]) -> str | None:
    """Find the nearest name; the last ones are kept.

    ``hasattr`` asks as well, torch and trainers with one name again and again, and it
    takes a third of a millisecond.
    """
    # A letter too many or too few; from 0.85 on no two words of a name differ wholly.
    alike = difflib.get_close_matches(name, names, 1, cutoff=0.85)
    if alike:
        return alike[0]
    words = _words_of(name)

    def nearness(candidate: str) -> tuple[int, int, int]:
        shared = words & _words_of(candidate)
        # Of equal ones the shortest, which says the least beyond what was asked for.
        return len(shared - _COMMON_WORDS), len(shared), -len(candidate)

    best = max(names, key=nearness, default="")
    # Common words alone say nothing: num_columns is not meant for num_workers.
    meant = words & _words_of(best)
    if meant - _COMMON_WORDS or (meant and meant == _words_of(best)):
        return best
    return similar_name(name, names)


def similar_name(name: str, names: Iterable[str]) -> str | None:
    """Find the name that is spelt most alike; None where none is.

    >>> similar_name("head", ["shard"]), similar_name("bb", ["b"])
    (None, 'b')
    """
    for match in difflib.get_close_matches(name, list(names), 1):
        # From 0.6 to 0.7 are words that only share letters, "head" and "shard", unless
        # one is the beginning of the other.
        if match.startswith(name) or name.startswith(match):
            return match
        if difflib.SequenceMatcher(None, match, name).ratio() >= 0.7:
            return match
    return None


def _words_of(name: str) -> set[str]:
    """Take a name apart; "growths" and "growth" are one word."""
    return {word.removesuffix("s") or word for word in name.lower().split("_") if word}


def suggest_device(device: object) -> str:
    """Name the device of torch's that was probably meant.

    >>> suggest_device("gpu:1"), suggest_device("cdua"), suggest_device("H100")
    ('cuda:1', 'cuda', 'cuda')
    >>> suggest_device("npu:0")  # the right name, where its library is not
    'cpu'
    """
    kind, colon, index = str(device).lower().partition(":")
    if kind in OF_OTHER_LIBRARIES:
        return "cpu"
    if kind in DEVICES:
        return f"{DEVICES[kind]}{colon}{index}"
    for pattern, torch_name in MODELS.items():
        if re.fullmatch(pattern, kind):
            return f"{torch_name}{colon}{index}"
    nearest = difflib.get_close_matches(kind, sorted({*DEVICES.values()}), 1)
    return f"{nearest[0]}{colon}{index}" if nearest else "cpu"


def refuse_value(name: str, value: object, wanted: str, example: object) -> OptionError:
    """Make the error for a value that an option cannot have.

    Args:
        name: The option.
        value: What was given.
        wanted: What it must be, in words.
        example: A value that it could have.

    Returns:
        The error, to be raised by the caller.
    """
    message = f"{name} must be {wanted}, got {show_value(value)}."
    # Its type is right where any number is wanted, whichever the example is.
    is_number = type(value) in {int, float} and " number" in f" {wanted}"
    is_number = is_number and "whole" not in wanted
    if type(value) is not type(example) and not is_number:
        why = "it is None" if value is None else f"its type is {type(value).__name__}"
    elif isinstance(value, str):
        why = "it does not read as one"
    else:
        why = "it is out of range"
    return OptionError(message, why=why, fix=Setting(name, example))


def with_article(name: str) -> str:
    """Write the name of a class as the beginning of a sentence does.

    >>> with_article("IterableDataset"), with_article("DatasetDict")
    ('An IterableDataset', 'A DatasetDict')
    >>> with_article("NoneType"), with_article("ndarray")
    ('None', 'An ndarray')
    """
    if name == "NoneType":
        return "None"
    is_spelt_as_vowel = name.startswith("ndarray")  # read letter by letter: en, dee
    is_vowel = name[:1] in "AEIOaeio" or is_spelt_as_vowel
    return f"An {name}" if is_vowel else f"A {name}"


def with_small_article(name: str) -> str:
    """Put "a" or "an" before the name of a class, within a sentence.

    >>> with_small_article("Subset"), with_small_article("int")
    ('a Subset', 'an int')
    """
    return f"a{with_article(name)[1:]}"


def kind_of(value: object) -> str:
    """Say of what kind a value is, within a sentence.

    >>> kind_of(3), kind_of("x"), kind_of(None)
    ('an int', 'a str', 'None')
    """
    name = type(value).__name__
    return "None" if value is None else with_small_article(name)


def show_value(value: object) -> str:
    """Show a value in a message: short, and also where it cannot show itself.

    >>> show_value([0] * 100)[-5:]
    ' 0...'
    """
    try:
        shown = repr(value)
    except Exception:  # noqa: BLE001 -- the message is about the value's type then
        return kind_of(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def check_integer(
    name: str, value: object, *, least: int | None = None, most: int | None = None
) -> int:
    """Take an integer of Python or numpy, and nothing else.

    Args:
        name: The option.
        value: What was given.
        least: The smallest value allowed.
        most: The largest value allowed.

    Returns:
        It, as an int.

    Raises:
        OptionError: It is not an integer, or out of range.  True is not one: whoever
            writes ``batch_size=True`` means something else.
    """
    # The user may have given anything: whether it is an integer is seen by trying.
    wanted = "an integer"
    if least is not None:
        wanted += f" of at least {least}"
    if most is not None:
        wanted += f" of at most {most}" if least is None else f" and at most {most}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise refuse_value(name, value, wanted, _nearest_integer(value, least or 0))
    if (least is not None and number < least) or (most is not None and number > most):
        nearest = least if least is not None and number < least else most
        raise refuse_value(name, value, wanted, nearest)
    return number


def _nearest_integer(value: object, least: int) -> int:
    """Guess which integer was meant: "32" is 32, "1,000" is 1000, 2.5 is 2."""
    if isinstance(value, str):
        text = value.strip()
        if _GROUPED.fullmatch(text):
            value = re.sub(r"[ ,._']", "", text)
        elif _IN_THOUSANDS.fullmatch(text):
            value = f"{text[:-1]}e{3 if text[-1] in 'kK' else 6}"
    try:
        return max(least, int(float(value)))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return max(least, 1)


_GROUPED = re.compile(r"[+-]?\d{1,3}([ ,._']\d{3})+")
"""A whole number whose digits are grouped, as people write them."""
_IN_THOUSANDS = re.compile(r"[+-]?\d+(\.\d+)?[kKmM]")
"""A number of thousands, or millions."""


def check_number(name: str, value: object, *, least: float) -> float:
    """Take a finite number that is not smaller than ``least``.

    Raises:
        OptionError: It is no number, not finite, or too small.
    """
    wanted = f"a finite number of at least {least:g}"
    number = _finite_number(value)
    if isinstance(value, str) or number is None or number < least:
        # "0.5" was meant as what it reads as.
        is_meant = isinstance(value, str) and number is not None and number >= least
        example = number if is_meant else least
        raise refuse_value(name, value, wanted, example)
    return number


def check_positive(name: str, value: object) -> float:
    """Take a finite number above 0.

    Raises:
        OptionError: It is no number, not finite, or not above 0.
    """
    number = _finite_number(value)
    if isinstance(value, str) or number is None or number <= 0:
        is_meant = isinstance(value, str) and number is not None and number > 0
        example = number if is_meant else 1.0
        raise refuse_value(name, value, "a finite number above 0", example)
    return number


def check_share(name: str, value: object) -> float:
    """Take a share of something that leaves some of it: from 0 to below 1.

    Raises:
        OptionError: It is no such number; per cent are answered with their share.
    """
    number = _finite_number(value)
    if isinstance(value, str) or number is None or not 0 <= number < 1:
        if isinstance(value, str):
            number = _finite_number(value.strip().removesuffix("%"))
        if number is not None and 1 <= number < 100:
            number /= 100
        example = number if number is not None and 0 <= number < 1 else 0.1
        raise refuse_value(name, value, "a number from 0 to below 1", example)
    return number


def check_text(name: str, value: object, example: str) -> str:
    """Take a text that is not empty.

    Raises:
        OptionError: It is none.
    """
    if not isinstance(value, str) or not value:
        raise refuse_value(name, value, "a text", example)
    return value


def _finite_number(value: object) -> float | None:
    """Read a number, also one that was written as a text; None where it is none."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def check_truth(name: str, value: object) -> bool:
    """Take True or False, of Python or numpy.

    Raises:
        OptionError: It is neither; 1 and "yes" are refused too.
    """
    # numpy.bool_ is no subclass of bool, and this module does not import numpy.
    if not isinstance(value, bool) and type(value).__name__ not in {"bool", "bool_"}:
        raise refuse_value(name, value, "True or False", truth_meant(value) or False)
    return bool(value)


TRUTHS = {
    **dict.fromkeys(("true", "yes", "on", "1", "y", "t"), True),
    **dict.fromkeys(("false", "no", "off", "0", "n", "f"), False),
}
"""What words are read as, in small letters."""


def truth_meant(value: object) -> bool | None:
    """Read which truth was meant by a text or a number; None where it is neither.

    >>> truth_meant("False"), truth_meant("on"), truth_meant(2), truth_meant("x")
    (False, True, True, None)
    """
    if isinstance(value, str):
        word = value.strip().lower()
        return False if word in {"", "none", "null"} else TRUTHS.get(word)
    return bool(value) if isinstance(value, int | float) else None


def check_choice(
    name: str, value: object, choices: tuple[Any, ...], otherwise: str = ""
) -> Any:
    """Take one of a few values.

    Args:
        name: The option.
        value: What was given.
        choices: What it may be.
        otherwise: What else the caller would have taken, in words.

    Returns:
        The value.

    Raises:
        OptionError: It is none of them; the message has the nearest.
    """
    for choice in choices:
        # 1 == True and 0 == False in Python: the type must agree too.
        if type(choice) is type(value) and choice == value:
            return choice
    words = [choice for choice in choices if isinstance(choice, str)]
    text = value if isinstance(value, str) else show_value(value)
    nearest = difflib.get_close_matches(text, words, 1)
    meant = nearest[0] if nearest else choices[0]
    if True in choices and (truth := truth_meant(value)) is not None:
        meant = truth
    words_for_choices = list(map(repr, choices))
    if otherwise:
        words_for_choices.append(otherwise)
    *others, last = words_for_choices
    wanted = f"{', '.join(others)} or {last}"
    refused = refuse_value(name, value, wanted, meant)
    if isinstance(value, str):
        raise OptionError(refused.what, why="it is none of them", fix=refused.advice)
    raise refused


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
        raise OptionError(message, why=why, fix=Setting(name, code=example))
    if isinstance(value, type) and any("__call__" in vars(k) for k in value.__mro__):
        message = f"{name} must be a function, got the class {value.__name__}."
        why = "its instances can be called as one; the class was not called yet"
        raise OptionError(message, why=why, fix=f"{name}={value.__name__}(...)")
    refused = refusal_of_call(value, takes) if takes else None
    if refused is not None:
        message = f"{name} cannot be called: {refused}."
        why = f"it is called with one argument, the {takes}"
        raise OptionError(message, why=why, fix=Setting(name, code=example))
    _refuse_deferred(name, value, takes)
    return value


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
    needed = _names_without_default(parameters)
    shown = getattr(function, "__name__", type(function).__name__)
    forward = getattr(function, "forward", None)
    if not needed and callable(forward):
        # A module's own call takes anything, and hands it on.
        shown = "model"
        needed = _names_without_default(inspect.signature(forward).parameters.values())
    if needed:
        message = f"{name} must take nothing, and {shown} needs {', '.join(needed)}."
        why = "it is called again and again, as it is"
        call = f"{_name_in_code(shown, name)}({', '.join(needed)})"
        raise OptionError(message, why=why, fix=f"lambda: {call}")


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
    arguments = takes or ", ".join(_names_without_default(parameters))
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


def check_order(
    call: str, other: object, path: object, example: str, *, where: str = "second"
) -> None:
    """Refuse a path in the place of samples and samples in the place of a path.

    Args:
        call: What was called.
        other: What was given beside the path.
        path: What was given in the place of the path.
        example: The call as it should be, with ``{path}`` for what is the path then.
        where: The place of the path.

    Raises:
        OptionError: The two were exchanged.
    """
    is_exchanged = isinstance(other, str | os.PathLike) and not (
        path is None or isinstance(path, str | os.PathLike)
    )
    if is_exchanged:
        message = f"{call} takes the path {where}, and got {show_value(path)} there."
        # Only here: samples may be too many to write, or raise an error of their own.
        fix = example.replace("{path}", repr(other))
        raise OptionError(message, why="the two were exchanged", fix=fix)


def refuse_odd_path(path: object) -> None:
    """Refuse a path that no system has, and one that only a shell can read.

    A shell reads "~/..." as the home folder, and Python does not.

    Args:
        path: What was given as a path.

    Raises:
        OptionError: It begins with "~", of which a folder would be made, or it holds
            a zero byte.
    """
    if isinstance(path, str) and "\0" in path:
        message = f"A path holds a zero byte: {show_value(path)}."
        why = "systems end a path there; it was probably read from a file of bytes"
        raise OptionError(message, why=why, fix=repr(path.replace("\0", "")))
    if isinstance(path, str) and re.match(r"~[\w.-]*([/\\]|$)", path):
        message = f"A path begins with the home folder: {path!r}."
        why = "only a shell reads ~ so; Python would make a folder of that name"
        fix = Either(f"os.path.expanduser({path!r})", f"without quotes: {path}")
        raise OptionError(message, why=why, fix=fix)


def check_path(name: str, value: object, example: str) -> Path:
    """Take the path of a file or a folder.

    Args:
        name: The option.
        value: What was given.
        example: What could be given.

    Returns:
        The path.

    Raises:
        OptionError: It is no path, an empty one, or one that only a shell can read.
    """
    # "" is the current folder to Python, and mostly a variable that was not set.
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise refuse_value(name, value, "a path", example)
    refuse_odd_path(os.fspath(value))
    return Path(value)


def check_cache_path(path: object) -> None:
    """Refuse what names no single cache.

    Args:
        path: What was given as a cache's folder or URL.

    Raises:
        OptionError: It is no path: several, a dataset, samples ...
    """
    if isinstance(path, str | os.PathLike):
        refuse_odd_path(os.fspath(path))
        if not os.fspath(path):
            message = "The path of the cache is empty."
            why = "to Python that is the current folder; mostly, a variable was not set"
            raise OptionError(message, why=why, fix="'.' for the current folder")
        return
    message = f"A cache is named by a path or a URL, got {show_value(path)}."
    why = f"it is {kind_of(path)}"
    fix = "open_cache('molecules.lk')"
    if isinstance(path, bytes):
        fix = f"os.fsdecode({path!r})"
    elif isinstance(path, Mapping):
        fix = "{name: open_cache(path) for name, path in paths.items()}"
    elif isinstance(path, list | tuple) and all(
        isinstance(item, str | os.PathLike) for item in path
    ):
        why = "each cache has a path"
        fix = "concat(paths, path) to make one cache of them, or open each by itself"
    elif isinstance(path, list | tuple):
        fix = "pack(samples, path), then open_cache(path)"
    elif hasattr(path, "cache"):
        why = "it is a dataset"
        fix = "dataset.cache is its path"
    raise OptionError(message, why=why, fix=fix)


def check_names(name: str, value: object) -> tuple[str, ...]:
    """Take several names.

    Raises:
        OptionError: It is one string, whose letters would be the names, or holds
            something else than strings.
    """
    if isinstance(value, str):
        raise refuse_value(name, value, "a list of names", [value])
    try:
        names: tuple[Any, ...] = tuple(value)  # type: ignore[arg-type]
    except TypeError:
        raise refuse_value(name, value, "a list of names", ["x"]) from None
    if not all(isinstance(text, str) for text in names):
        raise refuse_value(name, value, "a list of names", ["x"])
    return names
