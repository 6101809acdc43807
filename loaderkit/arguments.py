"""Values of arguments, taken or refused with one that could be given.  Pure."""

from __future__ import annotations

import contextlib
import difflib
import math
import operator
import re
from typing import TYPE_CHECKING, Any

from loaderkit.errors import OptionError, VariableError
from loaderkit.fixes import Setting
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from collections.abc import Callable


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
    if getattr(value, "ndim", 0):
        # Older versions of numpy take an array of one number for it, and warn.
        return max(least, 1)
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


def check_variable(
    name: str,
    text: str,
    parse: Callable[[str], object],
    check: Callable[[str, object], Any],
) -> Any:
    """Read a variable of the environment.

    Args:
        name: Its name.
        text: What it is set to.
        parse: Makes a value of it, in small letters and without blanks around; a
            ``KeyError`` or ``ValueError`` says that it is none.
        check: Takes the name and the value, and gives the value or refuses it.

    Returns:
        The value.

    Raises:
        VariableError: It reads as no value, or as one that is refused.

    >>> check_variable("DEPTH", " 3", int, check_integer)
    3
    """
    value: object = text
    with contextlib.suppress(KeyError, ValueError):
        value = parse(text.strip().lower())
    try:
        return check(name, value)
    except OptionError as refused:
        # Every variable is a text, and whoever sets it writes no quotes.
        why = "it does not read as one" if isinstance(value, str) else refused.why
        fix = str(refused.fix).replace("'", "")
        raise VariableError(refused.what, why=why, fix=fix) from None


def read_truth(text: str) -> bool:
    """Read a word for true or false, in small letters.

    Raises:
        KeyError: It is none.

    >>> read_truth("off")
    False
    """
    return TRUTHS[text]


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
