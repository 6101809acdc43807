"""Weigh whether words of exhaustion were printed by a program that ran out.  Pure.

The same words stand in errors, in manuals, in threads about errors and in source code.
No list of wordings tells these apart, but their structure does: what a program prints
has labels, names of errors, numbers and few small words; what a person writes has
articles, clauses and verbs in the present; code has keywords, quotes and semicolons.
``evidence.txt`` gives each such sign a weight.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.diagnosis.lexicon import compile_words, read_table
from loaderkit.budget.diagnosis.moods import ANCHORED_PLACES, PLACES

if TYPE_CHECKING:
    from loaderkit.budget.diagnosis.moods import Span


class _Sign(NamedTuple):
    """One row of ``evidence.txt``."""

    weight: int
    """Above zero it speaks for a report."""
    place: str
    """Where it has to stand."""
    reason: str
    """What it is a sign of."""
    pattern: re.Pattern[str]
    """How it is told."""


class Evidence(NamedTuple):
    """What speaks for and against a report."""

    weight: int
    """The sum; below zero it is none."""
    reasons_against: tuple[str, ...]
    """What it is instead, the strongest sign first."""


@functools.cache
def _signs() -> tuple[_Sign, ...]:
    return tuple(
        _Sign(int(weight), place, reason.replace("-", " "), compile_words(pattern))
        for (weight, place, reason), pattern in read_table("evidence.txt")
    )


def weigh_evidence(text: str, phrase: Span, sentence: Span) -> Evidence:
    """Add up what the surroundings of some words of exhaustion say.

    Args:
        text: A text without the breaks and prefixes of a log.
        phrase: Where the words stand.
        sentence: Where their sentence stands.

    Returns:
        The sum and what speaks against.

    >>> from loaderkit.budget.diagnosis.moods import Span
    >>> weigh_evidence("worker.cc:41: out of memory", Span(14, 27), Span(0, 27)).weight
    8
    >>> text = "The OOM killer is a part of the kernel"
    >>> weigh_evidence(text, Span(4, 7), Span(0, 38)).reasons_against[0]
    'errors as a topic'
    """
    surroundings = {place: cut(text, phrase, sentence) for place, cut in PLACES.items()}
    found = [sign for sign in _signs() if _stands_in(surroundings[sign.place], sign)]
    against = sorted((sign for sign in found if sign.weight < 0), key=_weight_of)
    reasons = dict.fromkeys(sign.reason for sign in against)
    weight = sum(sign.weight for sign in found)
    if _is_alone(surroundings["line"], surroundings["behind"]):
        weight += _WEIGHT_OF_STANDING_ALONE
    return Evidence(weight, tuple(reasons))


_OPENING_MARKS = re.compile(r"[\s\"'(\[{<]{0,8}")
_CLOSING_MARKS = re.compile(
    r"[\"')\]}>.!:]{0,6}(?:[ \t]{0,8}(?:\n|\Z)|, ?[\"'][\w.]{1,40}[\"'] ?:)"
)
"""The end of the line, or the next field of JSON."""
_WEIGHT_OF_STANDING_ALONE = 6
"""Chosen: more than speaks against any wording that users paste alone, such as "OOM",
and less than what speaks against a line of a comment or of a list."""


def _is_alone(before: str, behind: str) -> bool:
    """Whether a line says nothing else: nobody writes a sentence of one name."""
    is_at_start = _OPENING_MARKS.fullmatch(before) is not None
    return is_at_start and _CLOSING_MARKS.match(behind) is not None


def _stands_in(surroundings: str, sign: _Sign) -> bool:
    if sign.place in ANCHORED_PLACES:
        return sign.pattern.match(surroundings) is not None
    return sign.pattern.search(surroundings) is not None


def _weight_of(sign: _Sign) -> int:
    return sign.weight
