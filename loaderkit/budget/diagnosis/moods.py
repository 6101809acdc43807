"""Say whether words of exhaustion report an event, or what else they do.  Pure.

"Out of memory" stands in advice, in documentation, in the source that a traceback shows
and in the message of an allocator that goes on in another way.  ``moods.txt`` lists how
each of these is told by the words around the phrase; what none of them tells of is a
report.
"""

from __future__ import annotations

import functools
import re
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.diagnosis.folding import FoldedText
from loaderkit.budget.diagnosis.lexicon import (
    compile_folded,
    compile_words,
    put_in_pieces,
    read_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from loaderkit.budget.diagnosis.folding import FoldedPattern


class Mood(Enum):
    """What a sentence does with words of exhaustion that it does not report."""

    CONDITION = "condition"
    """It says what would hold if that happened."""
    POSSIBLE = "possible"
    """It says that this can happen, or guesses so."""
    RULE = "rule"
    """It says what the words stand for, or what always happens."""
    NAMED = "named"
    """It speaks about such errors."""
    CODE = "code"
    """It is a line of a program."""
    PAGE = "page"
    """It is a heading, a cell of a table or a symptom in a list."""
    DENIED = "denied"
    """It says that it is not so."""
    TAKEN_BACK = "taken_back"
    """The program goes on in another way."""
    ANNOUNCED = "announced"
    """It says what is about to be done."""
    MOVED = "moved"
    """Something was taken out of memory."""

    @property
    def in_words(self) -> str:
        """Say it to the reader of a message that is no report."""
        return _MOODS_IN_WORDS.get(self.value, f"a {self.value}")


_MOODS_IN_WORDS = {
    "possible": "a possibility",
    "named": "errors as a topic",
    "code": "a program's text",
    "denied": "a denial",
    "taken_back": "the program goes on",
    "announced": "an announcement",
    "moved": "something moved out of memory",
}


class Span(NamedTuple):
    """A stretch of a text."""

    start: int
    end: int


_REACH = 240
"""Characters looked at before and behind a phrase: the longest sentence of the gathered
look-alikes that takes a phrase back, or says whose it is, has about 200."""

REGIONS: dict[str, Callable[[str, Span, Span], str]] = {
    "before": lambda text, phrase, sentence: text[sentence.start : phrase.start],
    "edge": lambda text, phrase, _: text[max(0, phrase.start - 40) : phrase.start],
    "behind": lambda text, phrase, _: _rest_of_paragraph(text, phrase),
    "next": lambda text, phrase, _: _rest_of_paragraph(text, phrase),
    "phrase": lambda text, phrase, _: text[phrase.start : phrase.end],
    "after": lambda text, phrase, _: text[phrase.end : phrase.end + _REACH],
    "whole": lambda text, phrase, _: text[phrase.start : phrase.end + _REACH],
    "sentence": lambda text, _, sentence: text[sentence.start : sentence.end],
    "line": lambda text, phrase, _: _line_before(text, phrase),
    "above": lambda text, _, sentence: text[
        max(0, sentence.start - _REACH) : sentence.start
    ],
    "row": lambda text, phrase, _: (
        _line_before(text, phrase) + _line_from(text, phrase)
    ),
    "beside": lambda text, phrase, _: _neighbouring_lines(text, phrase),
    "quoted": lambda text, phrase, _: _behind_quotation(text, phrase),
    "block": lambda text, phrase, _: _block(text, phrase),
    "intro": lambda text, phrase, _: _introduction(text, phrase),
}
ANCHORED_REGIONS = frozenset({"behind", "whole", "quoted"})
"""Regions at whose start a pattern has to match."""


_PARAGRAPH_END = "\n\n"
"""What :func:`loaderkit.budget.diagnosis.log_text.clean_log` leaves of blank lines."""
_LONGEST_BLOCK = 1200
"""Characters of a block of output that are still told by the sentence above it."""
_INTRODUCES = compile_words(
    r":\W{0,3}\Z|\b(?:following|like (?:this|these|so)|something like)\b"
    r"|\b(?:error|message|output|log|warning|line|one|trace\w{0,4})s? "
    r"(?:\w{1,12} ){0,2}below"
    r"|\bthis (?:error|message)\b(?!\W{0,3}\Z)[^.!?\n]{1,60}\W{0,3}\Z"
)
"""A sentence that says what the next paragraph is."""


def _rest_of_paragraph(text: str, phrase: Span) -> str:
    """Give what stands behind some words, as far as their paragraph goes."""
    end = min(len(text), phrase.end + _REACH)
    paragraph_end = text.find(_PARAGRAPH_END, phrase.end, end)
    return text[phrase.end : end if paragraph_end < 0 else paragraph_end]


def _introduction(text: str, phrase: Span) -> str:
    r"""Give the line above the paragraph of some words, if it says what that is.

    >>> _introduction("It may say:\n\nOut of memory", Span(13, 26))
    'It may say:'
    >>> _introduction("We use a card.\n\nOut of memory", Span(16, 29))
    ''
    """
    start = max(0, phrase.start - _LONGEST_BLOCK)
    end = text.rfind(_PARAGRAPH_END, start, phrase.start)
    if end < 0:
        return ""
    reach = max(0, end - _REACH)
    line = text[max(text.rfind("\n", reach, end) + 1, reach) : end]
    return line if _INTRODUCES.search(line) else ""


def _line_start(text: str, phrase: Span) -> int:
    start = max(0, phrase.start - _REACH)
    return text.rfind("\n", start, phrase.start) + 1 or start


def line_around(text: str, phrase: Span) -> Span:
    r"""Give the line that some words stand in, as far as it is looked at.

    >>> line_around("It died.\nOut of memory\nWhy?", Span(9, 22))
    Span(start=9, end=22)
    """
    end = min(len(text), phrase.end + _REACH)
    line_end = text.find("\n", phrase.end, end)
    if line_end < 0:
        line_end = end
    return Span(_line_start(text, phrase), line_end)


_CUT = "\N{CYRILLIC LETTER MULTIOCULAR O}"
"""Stands where a line goes on: a letter that no pattern names, so that none takes the
middle of a long line for its beginning or its end."""


def _line_before(text: str, phrase: Span) -> str:
    r"""Give what stands before some words in their line.

    >>> _line_before("It died.\nOut of memory", Span(16, 22))
    'Out of '
    """
    start = _line_start(text, phrase)
    is_whole = start == 0 or text[start - 1] == "\n"
    return text[start : phrase.start] if is_whole else _CUT + text[start : phrase.start]


def _line_from(text: str, phrase: Span) -> str:
    """Give some words, and what stands behind them in their line."""
    end = line_around(text, phrase).end
    is_whole = end == len(text) or text[end] == "\n"
    return text[phrase.start : end] if is_whole else text[phrase.start : end] + _CUT


_SHOWN_BY_A_TRACEBACK = re.compile(
    r"[ \t]*(?:File [\"']|-{2,}> ?\d|at \S{1,200} ?\(|~*\^+~*$|\d{1,6} "
    r"|\S{1,200}:\d{1,6}: \w{0,40}Warning: )"
)
"""A line that names a line of source, or the caret below it: the source that a
traceback or a warning of Python shows stands above the error, and says nothing of where
the error stands."""


def _neighbouring_lines(text: str, phrase: Span) -> str:
    r"""Give the lines right above and below, but for source that a traceback shows.

    >>> _neighbouring_lines("try {\nout of memory\n}", Span(6, 19))
    'try {\n}'
    >>> shown = 'File "a.py", line 3\n  return load()\nMemoryError'
    >>> _neighbouring_lines(shown, Span(36, 47))
    '\n'
    """
    start = _line_start(text, phrase)
    *_, over, above, _ = ["", "", *text[max(0, start - 2 * _REACH) : start].split("\n")]
    if _SHOWN_BY_A_TRACEBACK.match(over) or _SHOWN_BY_A_TRACEBACK.match(above):
        above = ""
    _, end = line_around(text, phrase)
    below, *_ = text[end + 1 : end + _REACH].split("\n")
    return f"{above}\n{below}"


def quotation_around(text: str, phrase: Span) -> Span | None:
    """Give the quotation in a line that some words are a part of, with its marks.

    >>> text = "When you see `Out of memory. Killed 3`, wait."
    >>> quotation_around(text, Span(14, 27))
    Span(start=13, end=38)
    """
    start = text.rfind("\n", max(0, phrase.start - _REACH), phrase.start) + 1
    start = max(start, phrase.start - _REACH, 0)
    end = text.find("\n", phrase.end, phrase.end + _LONGEST_QUOTATION)
    end = end if end >= 0 else min(len(text), phrase.end + _LONGEST_QUOTATION)
    for mark in _QUOTATION_MARKS:
        before = text[start : phrase.start]
        if mark == "`":
            before = _OLD_QUOTATION.sub("", before)
        is_inside = before.count(mark) % 2 == 1
        closing = text.find(mark, phrase.end, end)
        if is_inside and closing >= 0:
            return Span(text.rfind(mark, start, phrase.start), closing + 1)
    return None


_LONGEST_QUOTATION = 700
"""Characters behind a phrase; the longest message of the corpora has 640."""
_QUOTATION_MARKS = ("`", '"')
"""An apostrophe is none: it stands in words too."""
_OLD_QUOTATION = re.compile(r"`[^`'\n]{1,80}'(?!\w)")
"""As GNU's programs once quoted: "cannot open `image.png'"."""


def _behind_quotation(text: str, phrase: Span) -> str:
    """Give what is said behind the quotation that some words are a part of."""
    quotation = quotation_around(text, phrase)
    return "" if quotation is None else text[quotation.end : quotation.end + _REACH]


def _block(text: str, phrase: Span) -> str:
    r"""Give the line of some words between its neighbours.

    >>> _block("x = 1\n# out of memory\ny = 2", Span(8, 21))
    'x = 1\n# out of memory\ny = 2'
    """
    above, _, below = _neighbouring_lines(text, phrase).partition("\n")
    return f"{above}\n{text[slice(*line_around(text, phrase))]}\n{below}"


_PIECES = {
    # Whose memory, before a phrase that begins behind it.
    "whose": (
        r"(?:(?:cuda|gpu|hip|xpu|npu|mps|metal|host|device|system|kernel|memory|buffer"
        r"|the|an?|running) ){0,3}[\"'`]?"
    ),
    # A line of a program, in whatever language, or one that was commented out.
    "code": (
        r"(?:\s*(?:(?:#|//|--) ?)?"
        r"(?:[\w.]{1,60}(?:\[[^\]\n]{0,40}\])? ?[-+*/|:]?= ?\S[^\n]{0,160}"
        r"|(?:return|import|from|def|class|if|for|while|try|with|raise|assert|break"
        r"|continue|pass|else|SELECT|INSERT|UPDATE|CREATE)\b[^\n]{0,160}"
        r"|[\w.]{1,60}\([^\n]{0,160}\)[;,]?|[^\n]{0,160}[;{}]))"
    ),
}


class _MoodPattern(NamedTuple):
    """The rows of ``moods.txt`` of one mood and region."""

    mood: Mood
    region: str
    pattern: FoldedPattern


@functools.cache
def mood_patterns() -> tuple[_MoodPattern, ...]:
    """Give the rows of ``moods.txt``, those of one mood and region together.

    Of a hedge it matters where the first one stands: its rows are one pattern.  Others
    are searched for row by row, without the rows of which a text lacks a word.
    """
    rows_of: dict[tuple[Mood, str], list[str]] = {}
    for (mood_name, region), pattern in read_table("moods.txt"):
        rows = rows_of.setdefault((Mood(mood_name), region), [])
        rows.append(put_in_pieces(pattern, _PIECES))
    patterns: list[_MoodPattern] = []
    for (mood, region), rows in rows_of.items():
        if _is_hedge(mood, region):
            rows = ["|".join(rows)]
        compiled = map(compile_folded, rows)
        patterns += [_MoodPattern(mood, region, pattern) for pattern in compiled]
    return tuple(patterns)


def _is_hedge(mood: Mood, region: str) -> bool:
    """Whether a fact before it takes it back: what follows is the text of an error."""
    return mood in _HEDGES and region in {"before", "edge"}


_FACT_BEFORE = compile_words(
    r"occurred|happened|\w{0,40}(?:error|exception|failed|fatal) ?:"
    r"|\[(?:error|fatal|critical)\]"
    r"|\berror (?:on|from|at) \w|\b(?:unexpected|internal|fatal|unknown) error\b"
    r"|\b(?:encountered|caught|got|received|raised|hit) an? (?:\w{1,12} )?"
    r"(?:error|exception)\b"
)
"""Before a hedge: what follows is the text of an error that already happened."""
_WOULD_GIVE = compile_words(
    r"\b(?:will|would|can|could|may|might) "
    r"(?:cause|give|raise|throw|print|get|see|fail)\b[^\"'`\n]{0,30}[\"'`]"
)
"""A quotation of what would be said."""
_HEDGES = frozenset({Mood.CONDITION, Mood.POSSIBLE, Mood.RULE, Mood.NAMED})
_LAST_REASON = compile_words(
    r"(?:out of memory|cannot allocate memory|(?:not enough|insufficient|no) memory"
    r"(?: for \d[\d.,]{0,20} ?(?:\w{1,6})?)?|enomem)\W{0,3}\Z"
)
"""What systems call ENOMEM, at the end of a sentence."""
_GIVES_REASON = re.compile(r"\w (?:-|\u2013) ?$|\bfailed[:,] ?$")
"""Before it: what failed for this reason, whatever that was."""
_OPTION = re.compile(r"(?:^|\s)(?:-{1,2}[A-Za-z][^\s(]*|--)$")
"""Before the phrase: the beginning of an option of a command, such as Java's."""
_OPTION_EXCEEDED = compile_words(r"\bexceed\w{0,3} -[^\s(]*$")
"""An option is named because its value was exceeded."""
_OUT_OF = compile_words(r"out of")
_MOVED = compile_words(
    r"\b(?:migrat|mov|swapp|pag|cop|read|writt|remov|dropp|stream|tak|kept|keep|load|"
    r"flush|evict)\w{0,4} (?:\w{1,12} ){0,2}$"
)
"""Before "out of memory": what was in it is elsewhere now."""


def gives_last_reason(text: str, phrase: Span, sentence: Span) -> bool:
    """Whether a sentence ends with why something failed, whatever that was.

    >>> text = "unable to allocate file descriptor table - out of memory"
    >>> gives_last_reason(text, Span(43, 56), Span(0, 56))
    True
    """
    before = text[sentence.start : phrase.start]
    is_last = _LAST_REASON.match(text[: sentence.end], phrase.start) is not None
    return is_last and _GIVES_REASON.search(before) is not None


def find_mood(
    text: str,
    phrase: Span,
    sentence: Span,
    *,
    is_scattered: bool = False,
    is_sure: bool = False,
) -> Mood | None:
    """Say what a sentence does with words of exhaustion.

    Args:
        text: A text without the breaks and prefixes of a log.
        phrase: Where the words stand.
        sentence: Where their sentence stands.
        is_scattered: Other words stand between them, a hedge among these perhaps.
        is_sure: Nothing but an error has these words; its text can guess at the cause.

    Returns:
        None where they can be a report.

    >>> text = "To avoid CUDA out of memory errors, lower the batch size."
    >>> find_mood(text, Span(14, 27), Span(0, len(text))).value
    'condition'
    >>> find_mood("CUDA out of memory", Span(5, 18), Span(0, 18)) is None
    True
    """
    hedged = Span(phrase.end, phrase.end) if is_scattered else phrase
    before = text[sentence.start : hedged.start]
    if gives_last_reason(text, phrase, sentence):
        return Mood.POSSIBLE if _WOULD_GIVE.search(before) else None
    if _OPTION.search(before) and _OPTION_EXCEEDED.search(before) is None:
        return Mood.CODE
    if _OUT_OF.match(text, phrase.start) and _MOVED.search(before):
        return Mood.MOVED

    # Several moods look at one region: it is cut out once.
    surroundings: dict[str, FoldedText] = {}
    for mood, region, pattern in mood_patterns():
        if is_sure and mood is Mood.POSSIBLE:
            continue
        if region not in surroundings:
            is_before = region in {"before", "line"}
            around_what = hedged if is_before else phrase
            cut = REGIONS[region](text, around_what, sentence)
            surroundings[region] = FoldedText.of(cut)
        around = surroundings[region]
        if not pattern.can_match(around.small):
            continue
        if region in ANCHORED_REGIONS:
            if pattern.matches_start(around):
                return mood
            continue
        stretch = pattern.search(around)
        if stretch is None:
            continue
        if _is_hedge(mood, region):
            # The edge is a part of what stands before: a label can be further away.
            end = sentence.start + stretch[0] if region == "before" else phrase.start
            if _FACT_BEFORE.search(text[sentence.start : end]):
                continue
        return mood
    return None
