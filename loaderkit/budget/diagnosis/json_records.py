"""What records of JSON in a log say, as lines of a message.  Pure."""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING

from loaderkit.budget.diagnosis.broken_words import is_surely_broken
from loaderkit.budget.diagnosis.line_prefixes import (
    BEGINS_ANEW,
    kinds_of_prefixes,
    without_prefixes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


def without_json(text: str) -> str:
    """Write records of JSON as lines: their messages, and labels with their values."""
    pieces: list[str] = []
    position = failures = 0
    for opening in _RECORD_OPENING.finditer(text):
        start = opening.end() - len(opening["record"])
        if start < position or failures == _MOST_FAILURES:
            continue
        record, length = _decode_record(
            text[start : start + _LONGEST_RECORD], before=text[opening.start() : start]
        )
        if record is None:
            failures += 1
            continue
        pieces.append(text[position:start])
        pieces += [f"\n{BEGINS_ANEW}{field}" for field in _fields_of_record(record, ())]
        position = start + length
    return "".join([*pieces, text[position:]])


MOST_REPETITIONS = 8
_RECORD_OPENING = re.compile(
    r"^[^\n{]{0,200}?(?P<record>\{(?=\"|[ \t]*\n))", re.MULTILINE
)
"""A brace before a name, or before names on lines of their own."""
_END_OF_RECORD = re.compile(r"[ \t\r,'\")]*(?=\n|\Z)")
_MOST_FAILURES = 20
"""Openings that turn out to be none before the rest is left as it is: each is read up
to its first fault, so that the time stays linear."""
_LONGEST_RECORD = 20_000
"""Characters read as one record of JSON; the longest of the corpora has 2,000."""
MOST_NESTED = 8
"""Levels of a record; a pod's status, the deepest of the corpora, has six."""
_KEY_OF_A_MESSAGE = re.compile(
    r"(?:\w*(?:message|msg|text|trace|traceback|exception|log)|std(?:err|out)|output"
    r"|stack|what|body|detail)\Z",
    re.IGNORECASE,
)
"""What stands under such a key is what a program printed, and says so itself."""
_KEY_OF_A_LEVEL = re.compile(
    r"(?:log)?(?:level|lvl|severity)(?:name)?\Z", re.IGNORECASE
)
_KEY_OF_AN_ERROR = re.compile(r"err(?:or)?\Z", re.IGNORECASE)


def _decode_record(text: str, before: str = "") -> tuple[object, int]:
    r"""Read the record that a text begins with, up to the end of its last line.

    Args:
        text: What begins with the record.
        before: What stands before it in its line.

    >>> _decode_record('{"code": 137}\nkilled'), _decode_record('{"code": 137} died')
    (({'code': 137}, 13), (None, 0))
    >>> _decode_record('{"msg": "out of\nmemory"}')
    ({'msg': 'out of memory'}, 24)
    """
    try:
        record, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0
    line_end = _END_OF_RECORD.match(text, end)
    if line_end is None:
        return None, 0
    lines = f"{before}{text[:end]}".split("\n")
    if len(lines) > 1 and not _is_strict_json(text[:end]):
        # A break inside of a string is none of the record's, which would be escaped.
        joint = "" if _were_broken_by_terminal(lines) else " "
        first, *others = text[:end].split("\n")
        kinds = kinds_of_prefixes(lines)
        parts = [without_prefixes(line, kinds) for line in others]
        try:
            record, _ = _DECODER.raw_decode(joint.join([first, *parts]))
        except ValueError:
            return None, 0
    return record, line_end.end()


_DECODER = json.JSONDecoder(strict=False)


def _were_broken_by_terminal(lines: list[str]) -> bool:
    """Whether all lines but the last are full, and one of them ends inside a word."""
    *full_lines, _ = lines
    if {len(line) for line in full_lines} != {max(map(len, lines))}:
        return False
    return any(itertools.starmap(is_surely_broken, itertools.pairwise(lines)))


def _is_strict_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _fields_of_record(value: object, path: tuple[str, ...]) -> Iterator[str]:
    """Give what the fields of a record say, a line each.

    >>> list(_fields_of_record({"exit": {"code": 137}, "msg": "died"}, ()))
    ['exit code: 137', 'died']
    """
    if len(path) > MOST_NESTED:
        return
    if isinstance(value, dict):
        for key, member in value.items():
            # A level is left out as it is in front of a line.
            if _KEY_OF_A_LEVEL.match(key) and isinstance(member, str):
                continue
            yield from _fields_of_record(member, (*path, str(key)))
    elif isinstance(value, list):
        for member in value[:MOST_REPETITIONS]:
            yield from _fields_of_record(member, path)
    elif isinstance(value, str):
        # A line of a log can be one of another program's log.
        words = without_json(value)
        key = path[-1] if path and words == value else "message"
        yield _words_of_field(key, words, path)
    else:
        yield f"{' '.join(path)}: {json.dumps(value)}"


def _words_of_field(key: str, words: str, path: tuple[str, ...]) -> str:
    if _KEY_OF_A_MESSAGE.match(key):
        return words
    if _KEY_OF_AN_ERROR.match(key):
        return f"error: {words}"
    return f"{' '.join(path)}: {words}"
