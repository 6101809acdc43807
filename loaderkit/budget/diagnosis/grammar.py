"""Read a message that no wording knows, from its words alone.  Pure.

A report that memory ran out has a phrase of exhaustion (``clues``), in a sentence
(``sentences``) that tells of an event (``reports``), and words that say of which memory
(``places``).  Advice, code and stories have the phrase too: they are told apart by what
stands before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.diagnosis.amounts import find_amounts
from loaderkit.budget.diagnosis.clues import (
    QUESTION,
    Clue,
    TextPhrases,
    clause_clues,
)
from loaderkit.budget.diagnosis.evidence import weigh_evidence
from loaderkit.budget.diagnosis.lexicon import (
    Phrase,
    compile_words,
    words_about_something_else,
)
from loaderkit.budget.diagnosis.moods import Span, find_mood
from loaderkit.budget.diagnosis.places import UNPLACED, which_memory
from loaderkit.budget.diagnosis.reports import is_report

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Exhaustion:
    """What the words of a text say."""

    kind: str
    """As :attr:`loaderkit.budget.diagnosis.messages.Message.kind`."""
    backend: str | None
    """Where, None where no word says so."""
    start: int
    """Where the phrase of exhaustion begins."""
    end: int
    """Where it ends."""
    region: tuple[int, int]
    """The part of the text that may belong to it."""
    stated: str
    """The words of that part which state something, without prose and other errors."""
    is_guess: bool = False
    """Whether the text itself only guesses so."""


def find_exhaustion(
    text: str, text_phrases: TextPhrases | None = None
) -> Exhaustion | None:
    """Find the surest report that memory ran out.

    Args:
        text: A text without the breaks and prefixes of a log.
        text_phrases: Its phrases, if somebody asked for them before.

    Returns:
        What it says; None where no sentence is such a report.

    >>> finding = find_exhaustion("fatal: acme failed to allocate 2 GiB of GPU memory")
    >>> finding.kind, finding.backend
    ('device_oom', 'cuda')
    >>> find_exhaustion("If you run out of memory, use a smaller batch.") is None
    True
    """
    text_phrases = text_phrases or TextPhrases(text)
    phrase_clues = tuple(
        clue
        for clue in text_phrases.clues
        if clue.start not in text_phrases.stretches_of_code
    )
    finding = _surest_report(phrase_clues)
    if finding is not None:
        return finding

    finding = _surest_report(
        clue
        for clue in clause_clues(text_phrases)
        if clue.start not in text_phrases.stretches_spoken_of
    )
    if finding is not None:
        return finding

    # Words that stand apart say no more than the phrase in their sentence does.
    statements = (
        clue
        for clue in text_phrases.loose_clues
        if clue.start not in text_phrases.stretches_spoken_of
        and clue.mood is None
        and not _is_dismissed_as_a_phrase(clue, text_phrases)
    )
    finding = _surest_report(statements)
    if finding is not None:
        return finding

    # Last, what says nothing of where, but was surely printed.
    return _surest_report(phrase_clues, was_printed=True)


def _is_dismissed_as_a_phrase(clue: Clue, text_phrases: TextPhrases) -> bool:
    """Whether the same is said by a listed phrase that was weighed and found no report.

    What the phrase weighs its surroundings tell; the loose words end elsewhere, so that
    their surroundings are others.  Where they are the same words, what the sentence
    does with them is the same too.
    """
    begin, end = clue.sentence()
    return any(
        phrase_clue.phrase is clue.phrase
        and phrase_clue.start < clue.end
        and clue.start < phrase_clue.end
        and (
            phrase_clue.evidence.weight < 0
            or (phrase_clue.mood is not None and phrase_clue.words == clue.words)
        )
        for phrase_clue in text_phrases.clues_between(begin, end)
    )


def _surest_report(
    clues: Iterable[Clue], *, was_printed: bool = False
) -> Exhaustion | None:
    first = None
    for clue in clues:
        finding = _report_of_clue(clue, was_printed=was_printed)
        # One that says where is surer than one that only says that it ran out.
        if finding is not None and finding.kind != UNPLACED:
            return finding
        first = first or finding
    return first


def _report_of_clue(clue: Clue, *, was_printed: bool = False) -> Exhaustion | None:
    if clue.reports_nothing:
        return None
    begin, end = clue.sentence()
    sentence = clue.text[begin:end]
    if was_printed:
        is_sure = clue.phrase is Phrase.RAN_OUT and clue.evidence.own >= _SURELY_PRINTED
    else:
        own_amounts = list(find_amounts(clue.text[begin : clue.message.end]))
        is_sure = is_report(clue, sentence, own_amounts)
    if not is_sure:
        return None

    memory = which_memory(clue, sentence, list(find_amounts(clue.stated)))
    return Exhaustion(
        kind=memory.kind,
        backend=memory.backend,
        start=clue.start,
        end=clue.end,
        region=clue.region(),
        stated=clue.stated,
        is_guess=_GUESSED.search(clue.text, begin, clue.start) is not None,
    )


_SURELY_PRINTED = 4
"""Evidence that is as good as a word for a device or an error: a label and nothing
against it, such as "alloc.cc:212] OOM"."""
_GUESSED = compile_words(
    r"\b(?:may|might|could) (?:also )?(?:be(?! caused)|have)\b"
    r"|\b(?:possibly|probably|perhaps|maybe|presumably)\b(?! (?:reason|cause)s?\b)"
)
"""Behind a label and before the phrase: the error is a fact, its cause is not."""


class Mention(NamedTuple):
    """Words of exhaustion that report nothing."""

    words: str
    """As they stand in the text."""
    reasons: tuple[str, ...]
    """What the text does with them, the surest first, or else what they lack."""


def find_mention(text_phrases: TextPhrases) -> Mention | None:
    """Give the first words of exhaustion of a text that reports none.

    >>> find_mention(TextPhrases("Try a smaller batch if it runs out of memory."))
    Mention(words='out of memory', reasons=('a condition',))
    >>> find_mention(TextPhrases("memory usage is above the budget")).reasons
    ('without an amount, and no error',)
    """
    text = text_phrases.text
    clues = text_phrases.clues or text_phrases.loose_clues
    if not clues:
        return None

    # Nothing of it depends on the phrases that it overlaps with.
    clue = replace(clues[0], spoken=None)
    phrase = Span(clue.start, clue.end)
    begin, end = clue.sentence()
    sentence = Span(begin, min(end, len(text)))
    mood = find_mood(text, phrase, sentence)
    if mood is not None:
        reasons: tuple[str, ...] = (mood.in_words,)
    elif QUESTION.match(text[begin : end + 1]):
        reasons = ("a question",)
    elif (other := words_about_something_else(text[begin:end])) is not None:
        reasons = (f'it is about "{" ".join(other.split())}"',)
    else:
        evidence = weigh_evidence(text, phrase, sentence)
        reasons = evidence.reasons_against
        if evidence.weight >= 0:
            reasons = (_LACKING[clue.phrase],)
    return Mention(" ".join(clue.words.split()), reasons)


_LACKING = {
    Phrase.RAN_OUT: "nothing says which memory, or that a program printed it",
    Phrase.FAILED: "nothing says that it was memory",
    Phrase.EXCEEDED: "without an amount, and no error",
    Phrase.KILLED: "nothing says that memory was the reason",
}
"""What words lack that could be a report, as far as their surroundings go."""
