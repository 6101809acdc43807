"""Sentences of a message, and what stands beside one and belongs to it.  Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from loaderkit.budget.diagnosis.amounts import find_amounts
from loaderkit.budget.diagnosis.evidence import is_prose
from loaderkit.budget.diagnosis.folding import FoldedText
from loaderkit.budget.diagnosis.lexicon import Phrase, compile_words, phrases_in
from loaderkit.budget.diagnosis.moods import (
    Mood,
    Span,
    find_mood,
    line_around,
    quotation_around,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_BEFORE, MOST_BEHIND = 240, 700
"""Characters of a message around its phrase: the longest of the corpora has 640."""
SENTENCE_END = re.compile(
    r"[.!?](?<!\b(?:vs|ca|cf).)(?<!\b(?:e\.g|i\.e|etc|max|min|avg|est).)"
    r"(?<!\bincl.)(?<!\bapprox.)[\"')]?\s|[\uff1f\u3002\uff01]|\n|\s[;|]\s"
    r"|;\s(?=(?-i:[A-Z])[a-z]{2,20}(?: [a-z]{1,20}){1,4}: )"
)
MEMORY_WORD = re.compile(
    r"mem(?:ory|s)?\b|memory|memalign|\b(?:[mc]|re)alloc\b|\bv?ram\b|\bhbm\b|heap|\bbytes?\b|buffer|tensor|arena"
    r"|\b(?-i:CMA|GTT)\b",
    re.IGNORECASE,
)


def sentence_around(text: str, phrase: Span) -> Span:
    """Give where the sentence around some words begins and ends.

    >>> sentence_around("It died. Out of memory. Why?", Span(9, 22))
    Span(start=9, end=22)
    """
    quotation = quotation_around(text, phrase)
    if quotation is not None:
        phrase = quotation  # who quotes a message quotes its sentences together
    begin = max(0, phrase.start - MOST_BEFORE)
    for stop in SENTENCE_END.finditer(text, begin, phrase.start):
        begin = stop.end()
    stop_behind = SENTENCE_END.search(text, phrase.end, phrase.end + MOST_BEFORE)
    end = stop_behind.start() if stop_behind else phrase.end + MOST_BEFORE
    return Span(begin, end)


def message_around(text: str, sentence: Span) -> Span:
    r"""Give the sentences that make one message with a sentence: its neighbours.

    Systems spread a report over sentences and lines: what failed, what was asked for,
    what became of the process.  So its parts may cross the border of a sentence, but
    neither into prose, which tells of something else, nor into another error's message.

    >>> text = "It is slow. Out of memory. Used: 8 GiB. ValueError: 7 GiB"
    >>> text[slice(*message_around(text, Span(12, 25)))]
    'Out of memory. Used: 8 GiB'
    """
    begin = sentence.start
    limit = max(0, begin - MOST_BEFORE)
    if not _NEW_MESSAGE.match(text[sentence.start : sentence.end]):
        for previous in reversed(list(_sentences(text, limit, begin))):
            words = text[slice(*previous)]
            is_apart = "\n" in text[previous.end : begin]
            if is_prose(words) or (is_apart and _is_another_message(words)):
                break
            begin = previous.start
            if _NEW_MESSAGE.match(words):
                break
    end = min(len(text), sentence.end)
    for following in _sentences(text, end, min(len(text), end + MOST_BEHIND)):
        words = text[slice(*following)]
        if is_prose(words) or _is_another_message(words):
            break
        end = following.end
    return Span(begin, end)


def statements_behind(text: str, begin: int, end: int | None = None) -> str:
    r"""Give what the sentences behind a place state, as they stand.

    Prose in other lines is left out, and so is what another error says, unless that one
    ran out of memory too.

    >>> statements_behind("Out of memory\nYou may need 2 GiB of it.\nUsed: 8 GiB", 13)
    '\n\n.\nUsed: 8 GiB'
    """
    end = min(len(text), begin + MOST_BEHIND if end is None else end)
    pieces = []
    previous_end = begin
    for sentence in _sentences(text, begin, end):
        words = text[slice(*sentence)]
        if _is_another_message(words):
            break
        pieces.append(text[previous_end : sentence.start])
        # Advice in the line of an error is a part of it; in a line of its own, people
        # and other programs speak too.
        is_apart = "\n" in text[begin : sentence.start]
        # The last sentence of a text still has its full stop.
        ends_as_prose = text[sentence.start : sentence.end + 1].endswith(
            (".", "!", "?")
        )
        line = text[slice(*line_around(text, sentence))]
        is_left_out = is_apart and (
            _lends_nothing(words, line, is_whole=ends_as_prose)
            or _only_speaks_of_it(text, sentence)
        )
        pieces.append("\n" if is_left_out else words)
        previous_end = sentence.end
    return "".join(pieces)


def is_of_another_message(line: str) -> bool:
    """Whether a line beside a message tells of something else.

    >>> is_of_another_message("Each of our workers can use up to 128 MB of memory.")
    True
    >>> is_of_another_message("Tried to map 128 MB")
    False
    """
    is_whole = line.rstrip().endswith((".", "!", "?"))
    return _lends_nothing(line, line, is_whole=is_whole) or _is_another_message(line)


def _lends_nothing(sentence: str, line: str, *, is_whole: bool) -> bool:
    """Whether a sentence in a line of its own says nothing of the error beside it.

    Args:
        sentence: Without its end.
        line: The line that it stands in.
        is_whole: It ends with a full stop.
    """
    if is_prose(sentence, is_whole=is_whole):
        return True
    if _WENT_WELL.search(line):
        return True
    # The end of a sentence that was broken by hand begins in its midst: "MiB is free."
    is_whole = is_whole and _BEGINS_SENTENCE.match(sentence) is not None
    return is_whole and _STATES_AMOUNTS.search(sentence) is None


def _only_speaks_of_it(text: str, sentence: Span) -> bool:
    """Whether the amounts of a sentence are of an exhaustion that it does not report.

    One without amounts may still say where: "try -ngl 0 if you run out of VRAM".
    """
    words = text[slice(*sentence)]
    if next(find_amounts(words), None) is None:
        return False
    spans = [
        Span(sentence.start + start, sentence.start + end)
        for _, (start, end) in phrases_in(FoldedText.of(words))
    ]
    moods = {find_mood(text, span, sentence) for span in spans}
    # What always happens is said in reports too: "which exceeds the threshold of 0.95".
    return bool(moods) and moods.isdisjoint({None, Mood.RULE, Mood.CODE})


_BEGINS_SENTENCE = re.compile(r"\W{0,3}[A-Z][a-z']*,? [\w`'\"]")
_WENT_WELL = compile_words(
    r"\b(?:finished|completed|succeeded) (?:in|after|with|\d)|\bfreed \d"
    r"|\bexceeds \d{1,3}% of|\bnot a failure\b|\bminimum memory limit\b"
    r"|\bephemeral.storage\b"
)
"""In the line of a log that tells of what goes on, beside an error or after it."""
_STATES_AMOUNTS = compile_words(
    r"[:=] ?[\[(]?\d|\A\W{0,4}\d|\d ?[KMGT]?i?B(?: (?:free|used|available|left))?[,;)/]"
    r"|\breturn(?:ed|s) (?:null|nullptr|none)\b|\b(?:fail\w{0,4}|unable|cannot"
    r"|could not|can't|tr(?:ied|ying)|attempt\w{0,4}"
    r"|request(?:ed|s|ing)?|requires?|required|needs?|needed|exceed\w{0,3}|used of)\b"
    r"|\b(?:limit|size|capacity|usage|heap|free|available|memory|total|peak)\b"
    r"[\w ()]{0,30} (?:is|was|of) (?:only )?\d|\bhas (?:a total|only|\d)|\bin use\b"
)
"""In a whole sentence: how systems state amounts.  Of the corpora's reports, 157 have
such a sentence in another line, and none has one without these words."""


def _is_another_message(words: str) -> bool:
    """Whether a sentence begins another message, and not one about memory."""
    if _NEW_MESSAGE.match(words) is None:
        return False
    return not any(
        phrase is not Phrase.EXCEEDED or MEMORY_WORD.search(words)
        for phrase, _ in phrases_in(FoldedText.of(words))
    )


_NEW_MESSAGE = re.compile(
    r"\s*(?:[\w.]{0,60}[a-z](?:Error|Exception|Warning)\b[^\n:]{0,40}: "
    r"|[IW]\d{4,8} [\d:.]{8,20} +\d{1,8} [^\n\]]{1,80}\]"
    r"|(?:[\w.-]{1,30}: )?Error response from [^\n:]{1,20}: "
    r"|(?-i:INFO|DEBUG|WARNING|WARN|Warning)\b)"
)
"""The class of an error, or the level of a record: what begins here says nothing of the
message before it."""


def _sentences(text: str, begin: int, end: int) -> Iterator[Span]:
    """Give the sentences of a part of a text, without their ends."""
    for stop in SENTENCE_END.finditer(text, begin, end):
        if stop.start() > begin:
            yield Span(begin, stop.start())
        begin = stop.end()
    if end > begin:
        yield Span(begin, end)
