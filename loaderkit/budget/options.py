"""Further arguments by name, checked against a dataclass of them.  Pure."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")


def parse_options(kind: type[T], options: Mapping[str, Any], caller: str) -> T:
    """Make the options of a function.

    Args:
        kind: A dataclass.
        options: As they were given.
        caller: Name of the function, for the message.

    Returns:
        The options.

    Raises:
        TypeError: There is no such option.
    """
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            msg = f"{caller} has no option {name!r}; it has {', '.join(known)}"
            raise TypeError(msg)
    return kind(**options)
