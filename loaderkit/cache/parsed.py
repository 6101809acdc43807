"""Values of parsed JSON that nobody vouches for, taken for what they must be.  Pure."""

from __future__ import annotations

from typing import Any

_SHOWN = 40
"""Characters of a wrong value that a message repeats; it may be of any length.  Chosen:
half a line of a terminal."""


def record(value: object) -> dict[str, Any]:
    """Take a value for an object; raise TypeError where it is none.

    >>> record({"a": 1})
    {'a': 1}
    """
    if not isinstance(value, dict):
        raise TypeError(_instead_of("an object", value))
    return value


def list_of_values(value: object) -> list[Any]:
    """Take a value for a list; raise TypeError where it is none."""
    if not isinstance(value, list):
        raise TypeError(_instead_of("a list", value))
    return value


def text(value: object) -> str:
    """Take a value for a text; raise TypeError where it is none."""
    if not isinstance(value, str):
        raise TypeError(_instead_of("a text", value))
    return value


def optional_text(value: object) -> str | None:
    """Take a value for a text or null; raise TypeError where it is neither."""
    return None if value is None else text(value)


def boolean(value: object) -> bool:
    """Take a value for true or false; raise TypeError where it is neither."""
    if not isinstance(value, bool):
        raise TypeError(_instead_of("true or false", value))
    return value


def integer(value: object) -> int:
    """Take a value for a whole number that fits 64 bits.

    >>> integer(-(2**63)), integer(3)
    (-9223372036854775808, 3)
    >>> integer(True)
    Traceback (most recent call last):
    ValueError: 'True' stands where a whole number should
    """
    fits = isinstance(value, int) and not isinstance(value, bool)
    if not fits or not -(1 << 63) <= value < 1 << 63:  # type: ignore[operator]
        raise ValueError(_instead_of("a whole number", value))
    return value  # type: ignore[return-value]


def integers(value: object) -> list[int]:
    """Take a value for a list of whole numbers of 64 bits.

    >>> integers([1, -2])
    [1, -2]
    """
    values = list_of_values(value)
    # All at once: there are hundreds in each group of shards.
    are_whole = not set(map(type, values)) - {int}
    if not are_whole or (values and max(max(values), ~min(values)) >= 1 << 63):
        return [integer(number) for number in values]  # which says what is wrong
    return values


def optional_integer(value: object) -> int | None:
    """Take a value for a whole number of 64 bits, or null."""
    return None if value is None else integer(value)


def _instead_of(wanted: str, value: object) -> str:
    return f"{str(value)[:_SHOWN]!r} stands where {wanted} should"
