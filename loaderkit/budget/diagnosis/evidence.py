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

from loaderkit.budget.diagnosis.folding import FoldedText
from loaderkit.budget.diagnosis.lexicon import compile_folded, read_table
from loaderkit.budget.diagnosis.moods import (
    ANCHORED_REGIONS,
    REGIONS,
    Span,
    line_around,
)

if TYPE_CHECKING:
    from loaderkit.budget.diagnosis.folding import FoldedPattern


class _Sign(NamedTuple):
    """One row of ``evidence.txt``."""

    weight: int
    """Above zero it speaks for a report."""
    region: str
    """Where it has to stand."""
    reason: str
    """What it is a sign of."""
    pattern: FoldedPattern
    """How it is told."""


class Evidence(NamedTuple):
    """What speaks for and against a report."""

    weight: int
    """The sum; below zero it is none."""
    reasons_against: tuple[str, ...]
    """What it is instead, the strongest sign first."""
    own: int = 0
    """The sum without other sentences, where the sum with them is not below zero."""


@functools.cache
def signs() -> tuple[_Sign, ...]:
    """Give the rows of ``evidence.txt``."""
    return tuple(
        _Sign(
            int(weight),
            region,
            reason.replace("-", " "),
            compile_folded(pattern),
        )
        for (weight, region, reason), pattern in read_table("evidence.txt")
    )


@functools.cache
def _signs_by_region() -> dict[str, tuple[_Sign, ...]]:
    by_region: dict[str, list[_Sign]] = {}
    for sign in signs():
        by_region.setdefault(sign.region, []).append(sign)
    return {region: tuple(of_region) for region, of_region in by_region.items()}


# Several phrases stand in one sentence or line, and are weighed one after the other.
# Each entry has at most one paragraph, so that all of them take less than 200 kB.
@functools.lru_cache(maxsize=128)
def _signs_in(region: str, surroundings: str) -> tuple[_Sign, ...]:
    """Give the signs that stand in a region."""
    around = FoldedText.of(surroundings)
    return tuple(
        sign
        for sign in _signs_by_region()[region]
        if sign.pattern.can_match(around.small) and _stands_in(around, sign)
    )


_PROSE = -1
"""A sentence with less is prose.  Chosen: of 2,500 reports of the corpora one has less
in its own sentence, and of the sentences that state amounts for another one eight."""


def weigh_evidence(
    text: str,
    phrase: Span,
    sentence: Span,
    *,
    is_scattered: bool = False,
    begins_sentence: bool = False,
) -> Evidence:
    """Add up what the surroundings of some words of exhaustion say.

    What stands in other sentences of the line may speak against a report.  It may speak
    for one too (a label, what was done about it), but not where the sentence itself is
    prose: an error that another sentence names makes no report of a story.

    Args:
        text: A text without the breaks and prefixes of a log.
        phrase: Where the words stand.
        sentence: Where their sentence stands.
        is_scattered: Other words stand between them.
        begins_sentence: A program's sentence begins with them, see ``clauses``.

    Returns:
        The sum and what speaks against.

    >>> from loaderkit.budget.diagnosis.moods import Span
    >>> weigh_evidence("worker.cc:41: out of memory", Span(14, 27), Span(0, 27)).weight
    18
    >>> text = "The OOM killer is a part of the kernel"
    >>> weigh_evidence(text, Span(4, 7), Span(0, 38)).reasons_against[0]
    'errors as a topic'
    """
    evidence = _weigh_surroundings(
        text, phrase, sentence, begins_sentence=begins_sentence
    )
    if evidence.weight < 0:
        return evidence
    begin, end = sentence
    own_end = end + len(".")
    is_only_clause = "," not in text[phrase.end : end]
    if is_only_clause and _SUBJECT.fullmatch(text, begin, phrase.start):
        # "Acme ran out of memory. Close other tabs": what to do is a part of it.
        own_end += _NEXT_WORDS
    own = _weigh_surroundings(
        text[begin:own_end],
        Span(phrase.start - begin, phrase.end - begin),
        Span(0, end - begin),
        begins_sentence=begins_sentence,
    )
    # Of words that stand apart nothing may speak against a report.
    if own.weight < (0 if is_scattered else _PROSE):
        return own
    return evidence._replace(own=own.weight)


_SUBJECT = re.compile(r"\W{0,3}(?:(?:[Tt]he|[Yy]our|[Tt]his) )?(?:[\w.-]{1,20} ){0,3}")
"""All that stands before the words of a sentence which says what happened to what."""
_NEXT_WORDS = 30
"""Characters of the next sentence in which an instruction is known by its verb."""


def is_prose(sentence: str, *, is_whole: bool = False) -> bool:
    """Whether a sentence was written by a person, as far as its words show.

    Args:
        sentence: Of a text without the prefixes of a log.
        is_whole: It ends with a full stop, so that less has to speak for a person.

    Returns:
        Whether its words do.

    >>> is_prose("For example, we need some 8 GB on the card")
    True
    >>> is_prose("Requested: 2088, available 1552, missing: 536")
    False
    """
    if _LABELLED.match(sentence) or _NEED.match(sentence):
        return False
    words = sentence.strip()
    if is_whole and _LONG_SENTENCE.match(words):
        # People name amounts too: that there is one is no sign of a program.
        words = _AMOUNT.sub("some", words)
        return sum(sign.weight for sign in _signs_in("sentence", words)) < 0
    weight = sum(sign.weight for sign in _signs_in("sentence", words))
    return weight < _PROSE


_LONG_SENTENCE = re.compile(
    r"(?!(?:Need|Needs|Needed|Require[ds]?|Request\w{0,3}|Available|Free|Used|Using"
    r"|Limit|Total|Current\w{0,2}|Tried|Failed|Max\w{0,4}|Only)\b)"
    r"[A-Z][a-z']{0,20}(?: [\w'%/.-]{1,24},?){6}"
)
"""Its first words, in the letters of prose; not those of a report's amounts."""
_AMOUNT = re.compile(r"`?\b\d[\d.,]{0,12} ?(?:[KMGT]i?B|bytes)\b`?")
_LABELLED = re.compile(
    r"\s*(?!(?:Note|Tip|Hint|Edit|Update|Warning|Example|Reference)\b)"
    r"[A-Z][a-z]{2,20}: "
)
"""A field of a report, such as "Diagnosis: "."""
_NEED = re.compile(r"\s*You need (?:[a-z.]{1,12} ){0,3}\d")
"""What a program tells its user."""


_STYLE = frozenset({"articles", "a clause", "a sentence"})
"""Signs of a person's sentence that a program's has as well, once it has said what
failed: "failed to allocate memory for the result while building the index"."""


def _weigh_surroundings(
    text: str, phrase: Span, sentence: Span, *, begins_sentence: bool
) -> Evidence:
    phrase = _with_its_label(text, phrase)
    surroundings = {
        region: cut(text, phrase, sentence) for region, cut in REGIONS.items()
    }
    signs_around: list[_Sign] = []
    for region in _signs_by_region():
        signs_around += _signs_in(region, surroundings[region])
    if begins_sentence:
        signs_around = [sign for sign in signs_around if sign.reason not in _STYLE]
    against = [sign for sign in signs_around if sign.weight < 0]
    against.sort(key=_weight_of)
    reasons = dict.fromkeys(sign.reason for sign in against)
    weight = sum(sign.weight for sign in signs_around)
    if _is_alone(surroundings["line"], surroundings["behind"]):
        weight += _WEIGHT_OF_STANDING_ALONE
    elif _is_one_row_of_several(text, phrase):
        weight += _WEIGHT_OF_A_ROW
        reasons["a list"] = None
    return Evidence(weight, tuple(reasons))


_LABEL = re.compile(
    r"(?:[\w.]{0,60}(?:Error|Exception)(?: \([^()\n]{0,40}\))?: ?){1,2}\Z"
)
_LONGEST_LABEL = 140


def _with_its_label(text: str, phrase: Span) -> Span:
    """Extend some words over the class of an error before them.

    Who quotes an error quotes its class too, so that it does not speak for a report.
    """
    start = max(0, phrase.start - _LONGEST_LABEL)
    label = _LABEL.search(text[start : phrase.start])
    return phrase if label is None else Span(start + label.start(), phrase.end)


_WORDS = re.compile(r"[^\W\d_][\w'\u2019/-]*(?: [^\W\d_][\w'\u2019/-]*)*")
_NUMBER = re.compile(r"\d[\d.,]*")
_MARKED_ROW = re.compile(r"[^w\s.:]|n")
"""A shape with more than words and labels: a number, a bullet, a quotation, a cell."""
_RECORD = re.compile(r"w: ?(?:w|n)")
"""The shape of a field and its value, which stand together in reports."""
_WEIGHT_OF_A_ROW = -8
"""Chosen: more than speaks for any wording, an amount and a label included."""


def _is_one_row_of_several(text: str, phrase: Span) -> bool:
    r"""Whether a line beside it is built alike, of other words: a table or a list.

    A log repeats its words with other numbers, a table of errors its form with others.

    >>> _is_one_row_of_several("3 = out of memory\n4 = no such file", Span(4, 17))
    True
    >>> _is_one_row_of_several(
    ...     "GPU 1: out of memory\nGPU 2: out of memory", Span(7, 20)
    ... )
    False
    """
    start, end = line_around(text, phrase)
    row = text[start:end]
    shape = _shape_of(row)
    if _MARKED_ROW.search(shape) is None or _RECORD.fullmatch(shape):
        return False
    above = text[max(0, start - _LONGEST_ROW) : max(0, start - 1)].rpartition("\n")[2]
    below = text[end + 1 : end + _LONGEST_ROW].partition("\n")[0]
    words = set(_WORD.findall(row.lower()))
    for other in (above, below):
        shared = words & set(_WORD.findall(other.lower()))
        if _shape_of(other) == shape and len(shared) * 2 < len(words):
            return True
    return False


_LONGEST_ROW = 240
_WORD = re.compile(r"[^\W\d_]+")


def _shape_of(row: str) -> str:
    return _NUMBER.sub("n", _WORDS.sub("w", row.strip()))


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


def _stands_in(around: FoldedText, sign: _Sign) -> bool:
    if sign.region in ANCHORED_REGIONS:
        return sign.pattern.matches_start(around)
    return sign.pattern.search(around) is not None


def _weight_of(sign: _Sign) -> int:
    return sign.weight
