r"""Put a traceback that somebody folded into one line back onto lines.  Pure.

Collectors of logs, spreadsheets and chats make blanks of line breaks.  Then the source
that a traceback shows stands in the line of the error that it ends with, and speaks for
a program's text and against a report.
"""

from __future__ import annotations

import re

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r"[ \t]{0,40}File \"[^\"\n]{1,300}\", line \d")
_BEGINS_LINE = re.compile(
    r"(?<=\S)[ \t]{1,40}(?=File \"[^\"\n]{1,300}\", line \d"
    r"|Traceback \(most recent call last\):"
    r"|During handling of the above exception|The above exception was the direct cause)"
)
"""Blanks in whose place a line began."""
_RAISED = re.compile(
    r"(?<![\w.(\"'=@])(?<!except )(?<!raise )"
    r"(?:(?:[A-Za-z_]\w{0,60}\.){1,8}[A-Z]\w{0,60}(?=:\s)"
    r"|(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]?\w{0,60}"
    r"(?:Error|Exception|Interrupt|Exit|Iteration|Warning)(?=:\s|\s{0,9}\Z))"
)
"""The class of an error, as Python prints it: nothing of an expression beside it.
Without the usual endings it is told by its module."""


def unfold_tracebacks(text: str, begin: str = "") -> str:
    r"""Break lines at the frames of tracebacks, and before the errors they end with.

    Args:
        text: Of a log; one without a folded traceback stays as it is.
        begin: What each line that is made begins with.

    >>> folded = (
    ...     'Traceback (most recent call last): File "a.py", line 3 x() MemoryError'
    ... )
    >>> print(unfold_tracebacks(folded))
    Traceback (most recent call last):
    File "a.py", line 3 x()
    MemoryError
    """
    if _HEADER not in text:
        return text
    lines = text.split("\n")
    return "\n".join(f"\n{begin}".join(_unfold_line(line)) for line in lines)


def _unfold_line(line: str) -> list[str]:
    if 'File "' not in line:
        return [line]
    parts = _BEGINS_LINE.sub("\n", line).split("\n")
    lines: list[str] = []
    for part, next_part in zip(parts, [*parts[1:], ""], strict=True):
        frame = _FRAME.match(part)
        is_last_frame = frame is not None and _FRAME.match(next_part) is None
        raised = _RAISED.search(part, frame.end()) if frame and is_last_frame else None
        if raised is None:
            lines.append(part)
        else:
            lines += [part[: raised.start()].rstrip(), part[raised.start() :]]
    return lines
