"""Printed results fit a terminal: long lines go on below their last column.  Pure."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDTH = 100
"""Letters of a line at most.  Chosen: what wide terminals and the cells of notebooks
show whole; the same everywhere, so that logs can be compared."""
_CODE_INDENT = 7
"""Spaces in front of code that is to be pasted, which stays in one line."""
_WIDEST_HANG = 52
"""Where the last column may begin that a line goes on below.  Chosen: that of a leak
report's table, which leaves 48 letters of a line."""
_HELD_SPACE = "\x00"
"""Stands for a space at which no line is broken."""


def wrap_lines(text: str, *, unbroken: Iterable[str] = ()) -> str:
    """Wrap the lines of a printed result.

    Args:
        text: Lines; columns are two spaces apart, and code is indented by seven.
        unbroken: Parts of it that stay in one line though they have spaces, such as
            paths: to be copied, or clicked.

    Returns:
        The same words; no line is longer than ``WIDTH``, but code and words that are.

    >>> print(wrap_lines("reading   " + "as much as fits " * 8))
    reading   as much as fits as much as fits as much as fits as much as fits as much as fits as much as
              fits as much as fits as much as fits
    """  # noqa: E501 -- this is the width
    # The longest first: another may be a part of it.
    for phrase in sorted(set(unbroken), key=len, reverse=True):
        text = text.replace(phrase, phrase.replace(" ", _HELD_SPACE))
    wrapped = "\n".join(map(_wrap_line, text.splitlines()))
    return wrapped.replace(_HELD_SPACE, " ")


def _wrap_line(line: str) -> str:
    indent = len(line) - len(line.lstrip())
    if len(line) <= WIDTH or indent >= _CODE_INDENT:
        return line
    columns = [gap.end() for gap in re.finditer(r"\S {2,}(?=\S)", line)]
    hang = max(
        (column for column in columns if column <= _WIDEST_HANG), default=indent + 2
    )
    return "\n".join(
        textwrap.wrap(
            line,
            WIDTH,
            subsequent_indent=" " * hang,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )
