"""Search a text for patterns in which capitals do not count, in two steps.  Pure.

Where capitals do not count, ``re`` enters every alternative at every character.  In a
text of small letters alone it passes over those that begin with another letter, which
takes a half to a fifth of the time.  So each pattern has a *finder* besides: the same
in small letters, without what asks for capitals.  Wherever the pattern matches, its
finder does too; the pattern itself is tried only there.
"""

from __future__ import annotations

import heapq
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.diagnosis.literals import end_of_class, has_all

if TYPE_CHECKING:
    from collections.abc import Iterator

_FOLDED_BY_RE = str.maketrans({"\u0130": "i", "\u0131": "i", "\u017f": "s"})
"""Letters that ``re`` takes for a Latin one besides those that ``str.lower`` does."""


def fold_case(text: str) -> str:
    r"""Write a text in small letters, each where it stood before.

    >>> fold_case("CUDA Out of Memory")
    'cuda out of memory'
    >>> len(fold_case("\u0130")), len("\u0130".lower())
    (1, 2)
    """
    folded = text if text.isascii() else text.translate(_FOLDED_BY_RE)
    folded = folded.lower()
    if len(folded) == len(text):
        return folded
    # A letter that becomes two small ones would move all that follow it: it stays.
    folded_letters = []
    for letter in text.translate(_FOLDED_BY_RE):
        small = letter.lower()
        folded_letters.append(small if len(small) == 1 else letter)
    return "".join(folded_letters)


class FoldedText(NamedTuple):
    """A text with capitals and without."""

    text: str
    """As it was written."""
    small: str
    """In small letters, each where it stands in the text."""

    @classmethod
    def of(cls, text: str) -> FoldedText:
        """Fold a text."""
        return cls(text, fold_case(text))


@dataclass(frozen=True)
class FoldedPattern:
    """A pattern of a table, and what finds where it may match."""

    written: re.Pattern[str]
    """As the table has it; capitals do not count but where it says so."""
    finder: re.Pattern[str]
    """For a text in small letters."""
    is_exact: bool
    """Whether both match the same stretches: nothing in it asks for capitals."""
    words: tuple[frozenset[str], ...]
    """One of each of these, in small letters, is in whatever it matches."""

    def can_match(self, small: str) -> bool:
        """Say whether a text, in small letters, has what the pattern needs."""
        return has_all(small, self.words)

    def finditer(
        self, where: FoldedText, start: int = 0, end: int = sys.maxsize
    ) -> Iterator[re.Match[str]]:
        """Give what ``written.finditer(where.text, start, end)`` gives."""
        while (candidate := self.finder.search(where.small, start, end)) is not None:
            match = self.written.match(where.text, candidate.start(), end)
            if match is None:
                start = candidate.start() + 1
                continue
            yield match
            start = match.end()
            if match.start() == match.end():
                start += 1  # as re's finditer goes on behind an empty match

    def spans(
        self, where: FoldedText, start: int = 0, end: int = sys.maxsize
    ) -> Iterator[tuple[int, int]]:
        """Give where :meth:`finditer` finds something."""
        matches = (
            self.finder.finditer(where.small, start, end)
            if self.is_exact
            else self.finditer(where, start, end)
        )
        return (match.span() for match in matches)

    def search(self, where: FoldedText) -> tuple[int, int] | None:
        """Give the first stretch that it matches."""
        if not self.is_exact:
            return next(self.spans(where), None)
        match = self.finder.search(where.small)
        return match.span() if match is not None else None

    def matches_start(self, where: FoldedText) -> bool:
        """Say whether it matches at the start."""
        if self.finder.match(where.small) is None:
            return False
        return self.is_exact or self.written.match(where.text) is not None


@dataclass(frozen=True)
class FoldedAlternatives:
    """A pattern as its alternatives, of which a text is searched for few.

    One alternative has words that a text lacks, another begins with letters that ``re``
    passes over the text for; together they would all be tried at every character.
    """

    patterns: tuple[FoldedPattern, ...]
    """In the order in which they are tried where several match."""

    def spans(self, where: FoldedText) -> Iterator[tuple[int, int]]:
        """Give where ``finditer`` of the whole pattern finds something."""
        firsts: list[tuple[int, int, int]] = []
        for rank, pattern in enumerate(self.patterns):
            if pattern.can_match(where.small):
                self._add_next(firsts, rank, where, 0)
        position = 0
        while firsts:
            start, rank, end = heapq.heappop(firsts)
            if start >= position:
                yield start, end
                position = end + 1 if end == start else end
            # What begins inside of the stretch is not looked at any more.
            self._add_next(firsts, rank, where, position)

    def _add_next(
        self,
        firsts: list[tuple[int, int, int]],
        rank: int,
        where: FoldedText,
        position: int,
    ) -> None:
        span = next(self.patterns[rank].spans(where, position), None)
        if span is not None:
            start, end = span
            heapq.heappush(firsts, (start, rank, end))


def fold_pattern(pattern: str, words: tuple[frozenset[str], ...] = ()) -> FoldedPattern:
    r"""Compile a pattern for both steps.

    Args:
        pattern: Without references to groups.
        words: What it needs, see :func:`.literals.required_groups`.

    >>> folded = fold_pattern(r"Worker (?-i:Killed)|OOM\S")
    >>> folded.finder.pattern, folded.is_exact
    ('worker (?:killed)|oom\\S', False)
    """
    finder, is_exact = _without_capitals(pattern)
    return FoldedPattern(
        re.compile(pattern, re.IGNORECASE | re.MULTILINE),
        re.compile(finder, re.MULTILINE),
        is_exact,
        words,
    )


_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")
_NAMED_GROUP = re.compile(r"\(\?P<\w+>")
_ASKS_FOR_CAPITALS = "(?-i:"
_MEMBER_OF_CLASS = re.compile(r"(\\.)|([A-Z]+)")


def _without_capitals(pattern: str) -> tuple[str, bool]:
    """Write a pattern in small letters, and say whether it asked for no capitals."""
    pieces: list[str] = []
    is_exact = True
    position = capitals_end = 0
    while position < len(pattern):
        end = position + 1
        piece = pattern[position].lower()
        if pattern[position] == "\\":
            end = position + 2
            piece = pattern[position:end]
        elif pattern[position] == "[":
            end = end_of_class(pattern, position)
            piece = _MEMBER_OF_CLASS.sub(_fold_member, pattern[position:end])
        elif _LOOKS_AROUND.match(pattern, position):
            # What is forbidden in small letters may be allowed with capitals.
            group_end = _end_of_group(pattern, position)
            group = pattern[position:group_end]
            if position < capitals_end or _ASKS_FOR_CAPITALS in group:
                is_exact = False
                end, piece = group_end, ""
        elif pattern.startswith(_ASKS_FOR_CAPITALS, position):
            is_exact = False
            capitals_end = max(capitals_end, _end_of_group(pattern, position))
            end, piece = position + len(_ASKS_FOR_CAPITALS), "(?:"
        elif (name := _NAMED_GROUP.match(pattern, position)) is not None:
            end, piece = name.end(), "(?:"
        pieces.append(piece)
        position = end
    return "".join(pieces), is_exact


def _fold_member(match: re.Match[str]) -> str:
    escape, capitals = match.groups()
    return escape or capitals.lower()


def _end_of_group(pattern: str, start: int) -> int:
    """Give where the group that begins at a place ends, with its closing mark."""
    depth = 0
    position = start
    while True:
        if pattern[position] == "[":
            position = end_of_class(pattern, position)
            continue
        if pattern[position] == "\\":
            position += 2
            continue
        if pattern[position] == "(":
            depth += 1
        elif pattern[position] == ")":
            depth -= 1
        position += 1
        if depth == 0:
            return position
