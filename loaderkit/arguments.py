"""Arguments by name, checked against a dataclass of them.  Pure."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")


def parse_arguments(kind: type[T], given: Mapping[str, Any], caller: str) -> T:
    """Make the options of a function.

    Args:
        kind: A dataclass.
        given: Its fields by name, as the caller gave them; "auto" leaves one as it is.
        caller: Name of the function, for the message.

    Returns:
        The options.

    Raises:
        TypeError: There is no such option; the message names the nearest, or all.
    """
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {known}"
            msg = f"{caller} has no option {name!r}; {hint}"
            raise TypeError(msg)
    set_by_hand = {
        name: each for name, each in given.items()
        if not (isinstance(each, str) and each == "auto")
    }  # fmt: skip
    return kind(**set_by_hand)
