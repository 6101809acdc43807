"""Read the clause with which a program's sentence begins.  Pure.

People put a subject, a time and a reason before what failed; programs begin with it,
behind labels ("RuntimeError: failed to allocate a buffer for the result").  So such a
sentence was printed, whatever articles and small words follow, which in other places
speak for a person.  ``clauses.txt`` makes the clauses of pieces: what is allocated, how
one asks for it, and what became of that.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.diagnosis.lexicon import (
    APOSTROPHE,
    Phrase,
    compile_words,
    put_in_pieces,
    read_table,
)
from loaderkit.budget.diagnosis.statements import Statement

if TYPE_CHECKING:
    from loaderkit.budget.diagnosis.folding import FoldedText

_LABELS = (
    r"[\s\"'`(\[{]{0,6}(?:[^\s:\]>,;.!?\"'`*\\](?:[^\s:\]>\"'`]|:(?=\w)){0,59}"
    r"(?: [^\s:\]>\"'`]{1,40}){0,4} ?(?:::?|\]|=?>| -{1,2})[\s\"'(\[]{1,3}"
    r"|(?-i:ERROR|FATAL|CRITICAL|SEVERE)[ \t]{1,8}(?=[^\W\d_])){0,4}"
)
"""Labels of a program's line, of up to five words each, or the level of a log alone."""
_SHOWN_BY_CPP = re.compile(r"\bwhat\(\): {1,4}")
"""Right before the text of an exception; what stands before it is its class."""
_SUBJECT = re.compile(
    r"mem|alloc|\brss\b|\bv?ram\b|\bhbm\b|heap|buffer|bytes|tensor|\d ?[kmgt]i?b?\b"
)
"""In small letters: a sentence without any of these begins with no such clause."""


class _Clause(NamedTuple):
    """One row of ``clauses.txt``."""

    phrase: Phrase
    """What it says."""
    condition: str
    """"clause": none; "error": only an error begins with it, a warning says the same;
    "alone": nothing follows in the line, which would say of what it is."""
    pattern: re.Pattern[str]
    """It behind the labels of a line."""


@functools.cache
def clause_patterns() -> tuple[_Clause, ...]:
    """Give the clauses of ``clauses.txt``, each behind the labels of a line."""
    pieces = {"apostrophe": APOSTROPHE}
    patterns = []
    for head, pattern in read_table("clauses.txt"):
        written = put_in_pieces(pattern, pieces)
        if head[0] == "piece":
            pieces[head[1]] = put_in_pieces(written, pieces)
        else:
            clause = compile_words(rf"(?P<labels>{_LABELS})(?P<clause>{written})")
            patterns.append(_Clause(Phrase[head[1]], head[0], clause))
    return tuple(patterns)


_LABEL_OF_AN_ERROR = re.compile(
    r"(?:\b(?:error|exception|fatal|critical|severe|failed|failure"
    r"|panic\w{0,4}|abort\w{0,3})"
    r"|(?-i:[a-z]Error|[a-z]Exception)|\[[EF])"
    r"[\])]{0,2} ?(?::|\]|=?>| -)?[\s\"'(\[]{0,3}\Z"
    r"|\b(?:error|exception|fatal|panic|failed)\b[\])]? ?:",
    re.IGNORECASE,
)
"""Among the labels of a line: what follows is the text of an error."""
_REST_OF_LINE = re.compile(r"[\s.!\"'`)\]}>]{0,9}?(?:\n|\Z)")
"""The end of a line, with the marks that close a sentence or a quotation."""


def find_clause(where: FoldedText, start: int, end: int) -> Statement | None:
    """Find what a sentence begins with, if that says that memory did not suffice.

    Args:
        where: A text without the breaks and prefixes of a log.
        start: Where the sentence begins.
        end: Where it ends.

    >>> from loaderkit.budget.diagnosis.folding import FoldedText
    >>> text = "core: error while reserving memory for the result"
    >>> clause = find_clause(FoldedText.of(text), 0, len(text))
    >>> text[clause.start : clause.end]
    'error while reserving memory'
    """
    if _SUBJECT.search(where.small, start, end) is None:
        return None
    shown = _SHOWN_BY_CPP.search(where.text, start, end)
    if shown is not None:
        start = shown.end()
    for row in clause_patterns():
        match = row.pattern.match(where.text, start, end)
        if match is None:
            continue
        if row.condition == "error" and not _LABEL_OF_AN_ERROR.search(match["labels"]):
            continue
        if row.condition == "alone" and not _REST_OF_LINE.match(where.text, end):
            continue
        return Statement(row.phrase, match.start("clause"), match.end("clause"))
    return None
