"""Say what a sentence states of memory from its words, wherever they stand.  Pure.

``phrases.txt`` lists how words follow each other where that is sure.  Systems put other
words between them, turn them round, or use ones of their own, so ``statements.txt``
lists what words *mean* (something lacks, something is a limit, something was ended) and
which meanings in one sentence say that memory ran out.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.diagnosis.lexicon import (
    APOSTROPHE,
    Phrase,
    compile_folded,
    compile_words,
    read_table,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loaderkit.budget.diagnosis.folding import FoldedPattern, FoldedText


_SUBJECTS = ("memory", "block")
"""Meanings of which every statement has one; first in the table, since most sentences
have neither."""


class Statement(NamedTuple):
    """A stretch of text that says in some way that memory did not suffice."""

    phrase: Phrase
    start: int
    """Where its first word begins, in characters of the text."""
    end: int
    """Where its last word ends."""


class _Rule(NamedTuple):
    """One row "state" of the table."""

    phrase: Phrase
    """What it says."""
    width: int
    """Characters from the first to the last word."""
    meanings: tuple[tuple[str, ...], ...]
    """Each is given by any of its names."""


@functools.cache
def meanings() -> dict[str, FoldedPattern]:
    """Give what each word of ``statements.txt`` means, by its name."""
    patterns = {
        head[1]: pattern.replace("@apostrophe@", APOSTROPHE)
        for head, pattern in read_table("statements.txt")
        if head[0] == "word"
    }
    return {name: compile_folded(pattern) for name, pattern in patterns.items()}


@functools.cache
def _statement_rules() -> tuple[_Rule, ...]:
    return tuple(
        _Rule(
            Phrase[head[1]],
            int(head[2]),
            tuple(tuple(name.split("/")) for name in needed.split()),
        )
        for head, needed in read_table("statements.txt")
        if head[0] == "state"
    )


def find_statements(
    where: FoldedText, start: int = 0, end: int | None = None
) -> Iterator[Statement]:
    """Find what a sentence states of memory.

    Args:
        where: A text without the breaks and prefixes of a log.
        start: Where the sentence begins.
        end: Where it ends; None: with the text.

    Yields:
        At most one statement of each rule, in the order of the table.

    >>> from loaderkit.budget.diagnosis.folding import FoldedText
    >>> text = "The app was stopped because it had too little of the phone's memory"
    >>> [statement.phrase.name for statement in find_statements(FoldedText.of(text))]
    ['RAN_OUT', 'KILLED']
    """
    end = len(where.text) if end is None else end
    sentence = where.small[start:end]
    spans: dict[str, list[tuple[int, int]]] = {}

    def spans_of(name: str) -> list[tuple[int, int]]:
        if name not in spans:
            pattern = meanings()[name]
            can_match = pattern.can_match(sentence)
            spans[name] = list(pattern.spans(where, start, end)) if can_match else []
        return spans[name]

    # What is short comes first: most sentences of a log do not speak of it.
    if not any(map(spans_of, _SUBJECTS)):
        return
    for rule in _statement_rules():
        choices = []
        for names in rule.meanings:
            choice = sorted(span for name in names for span in spans_of(name))
            if not choice:
                break  # what else the rule asks for need not be looked for
            choices.append(choice)
        else:
            span = _narrowest_span(choices)
            if span is None or span[1] - span[0] > rule.width:
                continue
            if rule.phrase is Phrase.FAILED and _OTHER_CLAUSE.search(where.text, *span):
                continue  # "Cannot grow the vector when external memory is used"
            yield Statement(rule.phrase, *span)


_OTHER_CLAUSE = compile_words(
    r" (?:when|if|before|unless|as long as|until|(?:even )?though|although|despite) "
)
"""Between what failed and the memory: it is not the memory that was asked for."""


def _narrowest_span(choices: list[list[tuple[int, int]]]) -> tuple[int, int] | None:
    """Find the shortest stretch with one span of each choice, none of them twice.

    Around each span of the first choice the nearest of each other one is taken, so that
    the time grows with the number of words and not with their combinations.
    """
    best = None
    for begin, end in choices[0]:
        low, high = begin, end
        for others in choices[1:]:
            # "More memory than" is one of them with another one inside.
            other_words = [other for other in others if other != (begin, end)]
            if not other_words:
                break
            nearest = min(
                other_words, key=lambda span: max(low - span[1], span[0] - high, 0)
            )
            low, high = min(low, nearest[0]), max(high, nearest[1])
        else:
            is_shorter = best is None or high - low < best[1] - best[0]
            if is_shorter:
                best = low, high
    return best
