"""Words that a text must have for a pattern to match it, to try few patterns.  Pure.

Most of hundreds of patterns are about systems that a text does not speak of.  Whether a
word is in a text is known a thousand times faster than whether a pattern matches.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHORTEST = 3
"""Letters of a word worth looking for: nearly every text has any two letters."""
_MARKS = frozenset("/\"'`|*#=()[]{}<>$@&\u2018\u2019\u201c\u201d\u2013\u2014")
"""Marks that prose is mostly without: worth looking for where no word is known."""
_ESCAPE_OF_A_CLASS = frozenset("dDwWsSbBAZ")
_OPTIONAL = re.compile(r"[?*]|\{0?,")
_QUANTIFIER = re.compile(r"(?:[?*+]|\{\d{0,5}(?:,\d{0,5})?\})\??")
_GROUP_HEAD = re.compile(r"\?(?:P<\w+>|[:=!]|<[=!]|-?[aimsux]+(?:-[aimsux]+)?:)")


def has_all(lowered_text: str, groups: Iterable[frozenset[str]]) -> bool:
    """Say whether a text, in small letters, has a word of each group.

    >>> has_all("it was killed", (frozenset({"kill"}), frozenset({"died", "was"})))
    True
    """
    # This is asked most of all: calls of all() and any() double the time.
    for words in groups:
        for word in words:
            if word in lowered_text:
                break
        else:
            return False
    return True


class _Parsed(NamedTuple):
    """What is known of a part of a pattern."""

    groups: tuple[frozenset[str], ...]
    """Of each group one word is in whatever it matches; empty: nothing is known."""
    end: int
    """Where the part ends in the pattern."""


def required_groups(pattern: str) -> tuple[frozenset[str], ...]:
    r"""Give groups of words; each match of a pattern has a word of every group.

    Args:
        pattern: As in the tables of this folder: without blanks that are ignored, and
            without conditions or references to groups.

    Returns:
        The rarest group first, its words in small letters; none where there is nothing
        to look for.

    >>> [sorted(group) for group in required_groups(r"memory \w+ (?:full|gone)")]
    [['memory'], ['full', 'gone']]
    >>> [sorted(group) for group in required_groups(r"\bkilled\b|oom-?kill")]
    [['kill', 'killed']]
    >>> required_groups(r"\d+ MB?")
    ()
    """
    groups = dict.fromkeys(_parse_alternatives(pattern, 0).groups)
    return tuple(sorted(groups, key=_rarity, reverse=True))


def alternatives_of(pattern: str) -> list[str]:
    """Give the alternatives that a pattern is made of, outside of all groups.

    >>> alternatives_of("out of (?:memory|RAM)|[(|]oom")
    ['out of (?:memory|RAM)', '[(|]oom']
    """
    alternatives = []
    start = 0
    while start <= len(pattern):
        end = _parse_sequence(pattern, start).end
        alternatives.append(pattern[start:end])
        start = end + 1
    return alternatives


def _parse_alternatives(pattern: str, start: int) -> _Parsed:
    """Read alternatives up to the end of their group."""
    branches: list[tuple[frozenset[str], ...]] = []
    position = start
    while True:
        groups, position = _parse_sequence(pattern, position)
        branches.append(groups)
        if position >= len(pattern) or pattern[position] == ")":
            break
        position += 1
    if len(branches) == 1:
        return _Parsed(branches[0], position)
    rarest = [words for words in map(_rarest, branches) if words is not None]
    is_known = len(rarest) == len(branches)
    union = (frozenset().union(*rarest),) if is_known else ()
    return _Parsed(union, position)


def _parse_sequence(pattern: str, start: int) -> _Parsed:
    """Read what follows each other, and collect the words that all of it needs."""
    groups: list[frozenset[str]] = []
    run = ""
    position = start
    while position < len(pattern) and pattern[position] not in "|)":
        literal, inner, position = _parse_atom(pattern, position)
        quantifier = _QUANTIFIER.match(pattern, position)
        if quantifier is not None:
            position = quantifier.end()
            is_optional = _OPTIONAL.match(quantifier.group()) is not None
            if is_optional:
                literal, inner = "", ()
            groups += _words_of_run(run + literal)
            run = ""
        elif literal:
            run += literal
            continue
        else:
            groups += _words_of_run(run)
            run = ""
        groups += inner
    return _Parsed((*groups, *_words_of_run(run)), position)


def _parse_atom(
    pattern: str, start: int
) -> tuple[str, tuple[frozenset[str], ...], int]:
    """Read one character, class or group: its letter, its words, and where it ends."""
    character = pattern[start]
    if character == "\\":
        escaped = pattern[start + 1]
        is_letter = escaped not in _ESCAPE_OF_A_CLASS and not escaped.isalnum()
        return escaped if is_letter else "", (), start + 2
    if character == "[":
        end = end_of_class(pattern, start)
        marks = _marks_of_class(pattern[start + 1 : end - 1])
        return "", () if marks is None else (marks,), end
    if character == "(":
        head = _GROUP_HEAD.match(pattern, start + 1)
        inner_start = head.end() if head else start + 1
        inner = _parse_alternatives(pattern, inner_start)
        looks_around = head is not None and head.group()[1] in "=!<"
        return "", () if looks_around else inner.groups, inner.end + 1
    if character in ".^$ ":
        return "", (), start + 1
    return character.lower(), (), start + 1


def end_of_class(pattern: str, start: int) -> int:
    """Give where the class of characters that begins at a place ends.

    >>> end_of_class("x[^])]y", 1)
    6
    """
    position = start + 2 if pattern[start + 1] == "^" else start + 1
    # As the first of its characters a bracket is one of them, and ends nothing.
    if pattern[position] == "]":
        position += 1
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


def _words_of_run(run: str) -> list[frozenset[str]]:
    """Give a run of letters as a group of one word, if it is rare enough."""
    word = run.strip()
    is_rare = len(word) >= _SHORTEST or (word != "" and _MARKS.issuperset(word))
    return [frozenset({word})] if is_rare else []


def _rarest(groups: tuple[frozenset[str], ...]) -> frozenset[str] | None:
    """Give the group whose words are surest to be rare, the first of several."""
    return max(groups, key=_rarity, default=None)


def _rarity(words: frozenset[str]) -> tuple[int, int]:
    """Order alternatives: the longest shortest word, then the fewest words."""
    return min(len(word) for word in words), -len(words)
