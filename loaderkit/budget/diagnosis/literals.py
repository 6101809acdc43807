"""Words that a text must have for a pattern to match it, to try few patterns.  Pure.

Most of hundreds of patterns are about systems that a text does not speak of.  Whether a
word is in a text is known a thousand times faster than whether a pattern matches.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_SHORTEST = 3
"""Letters of a word worth looking for: nearly every text has any two letters."""
_MARKS = frozenset("/\"'`|*#=()[]{}<>$@&\u2018\u2019\u201c\u201d\u2013\u2014")
"""Marks that prose is mostly without: worth looking for where no word is known."""
_ESCAPE_OF_A_CLASS = frozenset("dDwWsSbBAZ")
_OPTIONAL = re.compile(r"[?*]|\{0?,")
_QUANTIFIER = re.compile(r"(?:[?*+]|\{\d{0,5}(?:,\d{0,5})?\})\??")
_GROUP_HEAD = re.compile(r"\?(?:P<\w+>|[:=!]|<[=!]|-?[aimsux]+(?:-[aimsux]+)?:)")


def has_any(lowered_text: str, words: frozenset[str] | None) -> bool:
    """Say whether a text, in small letters, has one of some words; None: of any.

    >>> has_any("it was killed", frozenset({"kill"})), has_any("it died", None)
    (True, True)
    """
    if words is None:
        return True
    # A loop takes half the time of any() over a generator, and this is asked most.
    for word in words:  # noqa: SIM110
        if word in lowered_text:
            return True
    return False


class _Parsed(NamedTuple):
    """What is known of a part of a pattern."""

    words: frozenset[str] | None
    """One of these is in whatever it matches; None: nothing is known."""
    end: int
    """Where the part ends in the pattern."""


def required_words(pattern: str) -> frozenset[str] | None:
    r"""Give words of which each match of a pattern has at least one, in small letters.

    Args:
        pattern: As in the tables of this folder: without blanks that are ignored, and
            without conditions or references to groups.

    Returns:
        None where there are none to look for.

    >>> sorted(required_words(r"(?:CUDA|HIP) error:? out of"))
    ['error']
    >>> sorted(required_words(r"\bkilled\b|oom-?kill"))
    ['kill', 'killed']
    >>> required_words(r"\d+ MB?") is None
    True
    """
    return _parse_alternatives(pattern, 0).words


def _parse_alternatives(pattern: str, start: int) -> _Parsed:
    """Read alternatives up to the end of their group."""
    found: set[str] = set()
    is_known = True
    position = start
    while True:
        branch = _parse_sequence(pattern, position)
        if branch.words is None:
            is_known = False
        else:
            found |= branch.words
        position = branch.end
        if position >= len(pattern) or pattern[position] == ")":
            return _Parsed(frozenset(found) if is_known else None, position)
        position += 1


def _parse_sequence(pattern: str, start: int) -> _Parsed:
    """Read what follows each other, and keep the words that are surest to be rare."""
    best: frozenset[str] | None = None
    run = ""
    position = start
    while position < len(pattern) and pattern[position] not in "|)":
        literal, words, position = _parse_atom(pattern, position)
        quantifier = _QUANTIFIER.match(pattern, position)
        if quantifier is not None:
            position = quantifier.end()
            is_optional = _OPTIONAL.match(quantifier.group()) is not None
            if is_optional:
                literal, words = "", None
            best = _rarer(best, run + literal)
            run = ""
        elif literal:
            run += literal
            continue
        else:
            best = _rarer(best, run)
            run = ""
        if words is not None:
            best = _rarest(best, words)
    return _Parsed(_rarer(best, run), position)


def _parse_atom(pattern: str, start: int) -> tuple[str, frozenset[str] | None, int]:
    """Read one character, class or group: its letter, its words, and where it ends."""
    character = pattern[start]
    if character == "\\":
        escaped = pattern[start + 1]
        is_letter = escaped not in _ESCAPE_OF_A_CLASS and not escaped.isalnum()
        return escaped if is_letter else "", None, start + 2
    if character == "[":
        end = _end_of_class(pattern, start)
        return "", _marks_of_class(pattern[start + 1 : end - 1]), end
    if character == "(":
        head = _GROUP_HEAD.match(pattern, start + 1)
        inner = _parse_alternatives(pattern, head.end() if head else start + 1)
        looks_around = head is not None and head.group()[1] in "=!<"
        return "", None if looks_around else inner.words, inner.end + 1
    if character in ".^$ ":
        return "", None, start + 1
    return character.lower(), None, start + 1


def _end_of_class(pattern: str, start: int) -> int:
    position = start + 2 if pattern[start + 1] == "^" else start + 1
    position += pattern[position] == "]"
    while pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return position + 1


_MEMBER = re.compile(r"\\u([0-9a-f]{4})|\\?([^\\])")


def _marks_of_class(members: str) -> frozenset[str] | None:
    r"""Give the members of a class of characters if all of them are marks.

    >>> sorted(_marks_of_class("\"'")), _marks_of_class('"a-z'), _marks_of_class("^'")
    (['"', "'"], None, None)
    """
    marks = set()
    position = 0
    while position < len(members):
        member = _MEMBER.match(members, position)
        if member is None:
            return None
        mark = chr(int(member[1], 16)) if member[1] else member[2]
        if mark not in _MARKS:
            return None
        marks.add(mark)
        position = member.end()
    return frozenset(marks)


def _rarer(best: frozenset[str] | None, run: str) -> frozenset[str] | None:
    """Keep a run of letters if it is rarer than what is known."""
    word = run.strip()
    is_rare = len(word) >= _SHORTEST or (word != "" and _MARKS.issuperset(word))
    return _rarest(best, frozenset({word})) if is_rare else best


def _rarest(
    best: frozenset[str] | None, words: frozenset[str]
) -> frozenset[str] | None:
    if best is None:
        return words
    return words if _rarity(words) > _rarity(best) else best


def _rarity(words: frozenset[str]) -> tuple[int, int]:
    """Order alternatives: the longest shortest word, then the fewest words."""
    return min(len(word) for word in words), -len(words)
