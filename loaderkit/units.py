"""Sizes and times as text: 1610612736 <-> "1.50 GiB".  Pure; nothing else does it."""

import math
import operator
import re
from typing import TypeGuard

from loaderkit.digits import digits_behind_point
from loaderkit.errors import OptionError
from loaderkit.time_units import time_unit_of

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB")
"""Each is 1024 of the one before.  64 bits count up to 16 EiB; sums, products and what
a wrong driver tells may be more."""

_MOST_BEFORE_POWERS = 1e6
"""Of the largest unit: more is told in powers of ten."""
_LARGEST_COUNT = 1e15
"""From here on counts are told in powers of ten.  Chosen: twenty digits say no more."""


def is_known(value: float | None) -> TypeGuard[float]:
    """Tell whether there is a value, and it is a finite number.

    >>> is_known(0), is_known(None), is_known(math.nan), is_known(math.inf)
    (True, False, False, False)
    """
    return value is not None and math.isfinite(value)


def _unknown_in_words(value: float | None) -> str:
    """Write what is no finite number."""
    if value is None or math.isnan(value):
        return "unknown"
    return "infinite" if value > 0 else "-infinite"


def format_bytes(n: float | None) -> str:
    """Write a size the way people read it.

    Args:
        n: Bytes; may be negative.

    Returns:
        Three significant digits and a binary unit; in words what is no finite number.

    >>> format_bytes(1610612736)
    '1.50 GiB'
    >>> format_bytes(-512)
    '-512 B'
    >>> format_bytes(1 << 70), format_bytes(None)
    ('1.00 ZiB', 'unknown')
    """
    if not is_known(n):
        return _unknown_in_words(n)
    size, unit = float(abs(n)), 0
    while size >= 1000 and unit < len(BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    sign = "-" if n < 0 else ""
    if size >= _MOST_BEFORE_POWERS:
        return f"{sign}{size:.2e} {BYTE_UNITS[unit]}"
    # There is no half of a byte.
    digits = 0 if unit == 0 else digits_behind_point(size)
    return f"{sign}{size:.{digits}f} {BYTE_UNITS[unit]}"


def format_amount(value: float | None, unit: str, *, short: bool = False) -> str:
    """Write a count or a size with its unit.

    Args:
        value: How many; what is no finite number is written in words.
        unit: "bytes", or the plural of what is counted.
        short: Leave out the unit of a count.

    Returns:
        Such as "1.50 GiB" or "12 threads".

    >>> format_amount(2048, "bytes"), format_amount(9.99, "threads")
    ('2.00 KiB', '10.0 threads')
    >>> format_amount(1, "processes")
    '1 process'
    """
    if not is_known(value):
        return _unknown_in_words(value)
    if unit == "bytes":
        return format_bytes(round(value))
    number = f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"
    if abs(value) >= _LARGEST_COUNT:
        number = f"{value:.2e}"
    if short:
        return number
    return f"{number} {_singular(unit) if value == 1 else unit}"


def count_of(number: int, plural: str) -> str:
    """Count things: one of them is told in the singular.

    >>> count_of(1, "graphs"), count_of(2000, "graphs")
    ('1 graph', '2,000 graphs')
    >>> count_of(1, "batches"), count_of(1, "processes"), count_of(1, "entries")
    ('1 batch', '1 process', '1 entry')
    """
    return f"{number:,} {_singular(plural) if number == 1 else plural}"


def _singular(plural: str) -> str:
    if plural.endswith("ies"):
        return f"{plural[:-3]}y"
    if plural.endswith(("ches", "shes", "sses", "xes")):
        return plural[:-2]
    return plural.removesuffix("s")


def format_seconds(seconds: float | None) -> str:
    """Write a time the way people read it.

    Args:
        seconds: May be negative.

    Returns:
        Three significant digits and a unit; in words what is no finite number.

    >>> format_seconds(0.000345), format_seconds(0.0123), format_seconds(75.0)
    ('345 us', '12.3 ms', '75.0 s')
    >>> format_seconds(0), format_seconds(600), format_seconds(60_000)
    ('0 s', '10.0 min', '16.7 h')
    """
    if not is_known(seconds):
        return _unknown_in_words(seconds)
    if seconds == 0:
        return "0 s"
    unit = time_unit_of(abs(seconds))
    value = seconds / unit.seconds
    if abs(value) >= _LARGEST_COUNT:
        return f"{value:.2e} {unit.name}"
    return f"{value:.{digits_behind_point(value)}f} {unit.name}"


_LEAST_WITHOUT_UNIT = 4096
"""A number in a text is bytes from here on: who writes less forgot the unit.  Chosen: a
page, of which all that is measured here has many."""


def parse_bytes(text: str) -> int:
    """Read a size the way people write it.

    Args:
        text: A number and a unit: B, KiB, MiB up to EiB, or KB, MB, GB (of 1000);
            bytes from 4096 on need none.

    Returns:
        Bytes.

    Raises:
        OptionError: It is no size; also a ``ValueError``.

    >>> parse_bytes("1.5 GiB"), parse_bytes("64MiB"), parse_bytes("2 MB")
    (1610612736, 67108864, 2000000)
    """
    given: object = text
    if not isinstance(given, str):
        message = f"a size that is read is a text, such as '256 MiB', got {given!r}"
        why = f"it is of type {type(given).__name__}"
        raise OptionError(message, why=why, fix="size_in_bytes(name, size) for both")
    match = re.fullmatch(
        r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([KMGTPE]?)(i?)B?\s*", text, re.IGNORECASE
    )
    if match is None:
        message = f"a size is a number and a unit, such as 256MiB, got {text!r}"
        why = "it does not read as one"
        percent = re.fullmatch(r"\s*([0-9]+\.?[0-9]*)\s*%\s*", text)
        if percent is not None:
            why = "of what it is a share is not said"
            fix = f"int({float(percent[1]) / 100:g} * total_bytes)"
            raise OptionError(message, why=why, fix=fix)
        raise OptionError(message, why=why, fix=repr(_size_meant_by(text)))
    number, prefix, binary = match.groups()
    has_unit = text.strip()[-1].isalpha()
    if not has_unit and 0 < float(number) < _LEAST_WITHOUT_UNIT:
        message = f"a size is a number and a unit, such as 256MiB, got {text!r}"
        why = "without a unit it would be bytes"
        raise OptionError(message, why=why, fix=f"'{number} GB', or '{number} B'")
    base = 1024 if binary else 1000
    power = " KMGTPE".index(prefix.upper() or " ")
    unit_bytes: int = base**power
    return round(float(number) * unit_bytes)


def _size_meant_by(text: str) -> str:
    """Guess which size was meant.

    >>> _size_meant_by("8 gigs"), _size_meant_by("much")
    ('8 GB', '256 MB')
    >>> _size_meant_by("1,000 MB"), _size_meant_by("1_000_000"), _size_meant_by("1e9")
    ('1000 MB', '1000000 B', '1000000000 B')
    """
    # Thousands parted by commas, blanks or underscores.
    text = re.sub(r"(?<=\d)[,_ ](?=\d{3}(\D|$))", "", text.replace("_", ","))
    try:
        nbytes = float(text)
    except ValueError:
        nbytes = math.nan
    if math.isfinite(nbytes) and nbytes >= _LEAST_WITHOUT_UNIT:
        return f"{round(nbytes)} B"
    # A comma where others write a point.
    text = re.sub(r"(?<=\d),(?=\d{1,2}(\D|$))", ".", text)
    match = re.match(
        r"\s*([0-9]+\.[0-9]+|[0-9]+|\.[0-9]+)\s*([KMGTPE]?)(i(?=B|\W|$))?"
        # How names of units go on, from "giga" and "gigs" to "exabytes".
        r"(?=B|ilo|eg|ig|er|et|xa|\W|$)",
        text,
        re.IGNORECASE,
    )
    if match is None or float(match[1]) == 0:
        return "256 MB"
    number, prefix, binary = match.groups()
    return f"{number} {prefix.upper() or 'M'}{'i' if binary else ''}B"


def size_in_bytes(name: str, amount: int | str, *, least: int = 0) -> int:
    """Take a size as a number of bytes, or as a text.

    Args:
        name: The option, for the message.
        amount: Such as 1000 or "256 MiB".
        least: The fewest bytes that make sense.

    Returns:
        Bytes.

    Raises:
        OptionError: It is neither, or too few.

    >>> size_in_bytes("limit", 1000), size_in_bytes("limit", "1 KB")
    (1000, 1000)
    """
    if isinstance(amount, str):
        try:
            number = parse_bytes(amount)
        except OptionError as error:
            message = f"{name} must be a size such as '256 MiB', got {amount!r}."
            fix = f"{name}={error.fix}"
            raise OptionError(message, why=error.why, fix=fix) from None
    else:
        try:
            number = operator.index(amount)
        except TypeError:
            number = -1
    if number < least or isinstance(amount, bool):
        message = f"{name} must be a number of bytes, or a text, got {amount!r}."
        fix = f"{name}='256 MiB'"
        # Whoever writes 1e9 means a number of bytes.
        value: object = amount
        if isinstance(value, float) and value.is_integer() and value > 0:
            fix = f"{name}={int(value)}"
        why = "it is no size"
        if isinstance(value, float) and 0 < value < 1:
            why = "it is bytes, and no share of a memory"
        raise OptionError(message, why=why, fix=fix)
    if least and not isinstance(amount, str) and number < _LEAST_WITHOUT_UNIT:
        # Whoever writes limit=24 means GB.
        message = f"{name} must be a size such as '256 MiB', got {amount!r}."
        fix = f"{name}='{number} GB', or {name}='{number} B'"
        raise OptionError(message, why="without a unit it is bytes", fix=fix)
    return number
