"""Read a message that no wording knows, from its words alone.  Pure.

A report that memory ran out has a phrase of exhaustion, in a sentence that tells of
an event, and words that say of which memory.  Advice, code and stories have the phrase
too: they are told apart by what stands before it.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.diagnosis.amounts import SAID, Amount, find_amounts
from loaderkit.budget.diagnosis.evidence import is_prose, weigh_evidence
from loaderkit.budget.diagnosis.folding import FoldedText
from loaderkit.budget.diagnosis.lexicon import (
    ANY_DEVICE,
    BUDGET,
    COMPILER,
    ENDED,
    HOST_PLACE,
    NOT_MEMORY,
    ONE_BLOCK,
    OTHER_THING,
    PINNED,
    PLACES,
    SHARED,
    Phrase,
    compile_words,
    has_error_mark,
    is_about_something_else,
    phrases_in,
    position_before_split,
    split_names,
    with_name_parts,
)
from loaderkit.budget.diagnosis.moods import (
    Mood,
    Span,
    find_mood,
    gives_last_reason,
    line_around,
    quotation_around,
)
from loaderkit.budget.diagnosis.statements import find_statements

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from loaderkit.budget.diagnosis.evidence import Evidence

_LONGEST_SENTENCE = 480
"""Characters read as one sentence: what is longer is no prose and no message."""
_BEFORE, _BEHIND = 240, 700
"""Characters of a message around its phrase: the longest of the corpora has 640."""
_SENTENCE_END = re.compile(
    r"[.!?](?<!\b(?:vs|ca|cf).)(?<!\b(?:e\.g|i\.e|etc|max|min|avg|est).)"
    r"(?<!\bincl.)(?<!\bapprox.)[\"')]?\s|[\uff1f\u3002\uff01]|\n|\s[;|]\s"
    r"|;\s(?=(?-i:[A-Z])[a-z]{2,20}(?: [a-z]{1,20}){1,4}: )"
)
_ALLOCATOR_WORDING = re.compile(
    r"\b(?:CUDA|HIP|XPU|NPU|MLU|MUSA|HPU|DCU)\s+out\s+of\s+memory", re.IGNORECASE
)
_MEMORY_WORD = re.compile(
    r"mem(?:ory|s)?\b|memory|memalign|\b(?:[mc]|re)alloc\b|\bv?ram\b|\bhbm\b|heap|\bbytes?\b|buffer|tensor|arena",
    re.IGNORECASE,
)


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


@dataclass(frozen=True)
class _Clue:
    """One phrase of exhaustion and its surroundings."""

    phrase: Phrase
    start: int
    end: int
    text: str
    is_loose: bool = False
    """Whether other words stand between those that say it, so that more has to speak
    for a report."""
    spoken: Span | None = None
    """With what other phrases it overlaps; None: with none."""

    @property
    def words(self) -> str:
        return self.text[self.start : self.end]

    def sentence(self) -> Span:
        """The sentence around the phrase."""
        return self._sentence

    @functools.cached_property
    def _sentence(self) -> Span:
        return sentence_around(self.text, Span(self.start, self.end))

    @functools.cached_property
    def message(self) -> Span:
        """The sentence, and those beside it that were printed with it."""
        return message_around(self.text, self._sentence)

    @functools.cached_property
    def mood(self) -> Mood | None:
        """What the sentence does with the phrase, if that is known to be no report."""
        return find_mood(
            self.text,
            Span(self.start, self.end),
            self._sentence,
            is_scattered=self.is_loose,
        )

    @functools.cached_property
    def evidence(self) -> Evidence:
        """What its surroundings say."""
        begin, end = self._sentence
        return weigh_evidence(
            self.text,
            self.spoken or Span(self.start, self.end),
            Span(begin, min(end, len(self.text))),
            is_scattered=self.is_loose,
        )

    @functools.cached_property
    def reports_nothing(self) -> bool:
        """Whether it is known to be no report; a clue is asked more than once."""
        return _reports_nothing(self)

    def region(self) -> tuple[int, int]:
        """The sentence and what may still belong to it."""
        begin, _ = self.sentence()
        return begin, min(len(self.text), self.end + _BEHIND)

    @functools.cached_property
    def stated(self) -> str:
        """The sentence and what is stated behind it, without the prose between."""
        begin, end = self.sentence()
        return self.text[begin:end] + statements_behind(self.text, end)

    def surroundings(self) -> str:
        """The line it stands in and what may still belong to it."""
        line = self.text.rfind("\n", max(0, self.start - _BEFORE), self.start) + 1
        if line and self.text.startswith("what():", line):
            # C++ names the exception in the line before.
            line = self.text.rfind("\n", max(0, line - _BEFORE), line - 1) + 1
        begin = max(line, self.start - _BEFORE, 0)
        return self.text[begin : self.sentence().start] + self.stated


def sentence_around(text: str, phrase: Span) -> Span:
    """Give where the sentence around some words begins and ends.

    >>> sentence_around("It died. Out of memory. Why?", Span(9, 22))
    Span(start=9, end=22)
    """
    quotation = quotation_around(text, phrase)
    if quotation is not None:
        phrase = quotation  # who quotes a message quotes its sentences together
    begin = max(0, phrase.start - _BEFORE)
    for stop in _SENTENCE_END.finditer(text, begin, phrase.start):
        begin = stop.end()
    stop_behind = _SENTENCE_END.search(text, phrase.end, phrase.end + _BEFORE)
    end = stop_behind.start() if stop_behind else phrase.end + _BEFORE
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
    limit = max(0, begin - _BEFORE)
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
    for following in _sentences(text, end, min(len(text), end + _BEHIND)):
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
    end = min(len(text), begin + _BEHIND if end is None else end)
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
        phrase is not Phrase.EXCEEDED or _MEMORY_WORD.search(words)
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
    for stop in _SENTENCE_END.finditer(text, begin, end):
        if stop.start() > begin:
            yield Span(begin, stop.start())
        begin = stop.end()
    if end > begin:
        yield Span(begin, end)


class TextPhrases:
    """The phrases of exhaustion of a text, each of them weighed at most once."""

    def __init__(self, text: str) -> None:
        """Take a text without the breaks and prefixes of a log."""
        self.text = text
        self.folded = FoldedText.of(text)

    @functools.cached_property
    def clues(self) -> tuple[_Clue, ...]:
        """Each phrase of the text, in its order."""
        return tuple(_phrase_clues(self.folded))

    @functools.cached_property
    def stretches_spoken_of(self) -> Stretches:
        """The sentences and lines in which exhaustion is spoken of, not reported."""
        return Stretches(_stretches_of(self.clues))

    @functools.cached_property
    def stretches_of_code(self) -> Stretches:
        """The lines that are a program's text, as one phrase in them shows."""
        code = (clue for clue in self.clues if clue.mood is Mood.CODE)
        return Stretches(
            line_around(clue.text, Span(clue.start, clue.end)) for clue in code
        )

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [clue.start for clue in self.clues]

    def clues_between(self, begin: int, end: int) -> tuple[_Clue, ...]:
        """Give the phrases that begin in a part of the text."""
        first = bisect.bisect_left(self._starts, begin)
        return self.clues[first : bisect.bisect_left(self._starts, end)]


class Stretches:
    """Parts of a text, joined where they overlap."""

    def __init__(self, spans: Iterable[Span]) -> None:
        """Take them in any order."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(spans):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def __contains__(self, position: int) -> bool:
        """Say whether a position is in one of them.

        >>> 3 in Stretches([Span(2, 5), Span(0, 2)]), 5 in Stretches([Span(2, 5)])
        (True, False)
        """
        number = bisect.bisect_right(self._starts, position)
        return number > 0 and position < self._ends[number - 1]

    def contain(self, start: int, end: int) -> bool:
        """Say whether one of them has all positions from one to another.

        >>> Stretches([Span(0, 5)]).contain(1, 5), Stretches([]).contain(1, 5)
        (True, False)
        """
        number = bisect.bisect_right(self._starts, start)
        return number > 0 and end <= self._ends[number - 1]


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

    # Words that stand apart say no more than the phrase in their sentence does.
    loose_clues = (
        clue
        for clue in _loose_clues(text_phrases)
        if clue.start not in text_phrases.stretches_spoken_of
        and clue.mood is None
        and not _is_dismissed_as_a_phrase(clue, text_phrases)
    )
    finding = _surest_report(loose_clues)
    if finding is not None:
        return finding

    # Last, what says nothing of where, but was surely printed.
    return _surest_report(phrase_clues, was_printed=True)


_UNPLACED = "oom"
"""The kind of a report that does not say which memory ran out."""


def _stretches_of(clues: Iterable[_Clue]) -> list[Span]:
    spans = []
    for clue in clues:
        phrase = Span(clue.start, clue.end)
        sentence = clue.sentence()
        if clue.mood in _MOODS_OF_SENTENCES:
            spans.append(Span(sentence.start, min(sentence.end, len(clue.text))))
        elif clue.mood in _MOODS_OF_LINES:
            spans.append(line_around(clue.text, phrase))
    return spans


_MOODS_OF_SENTENCES = frozenset({Mood.RULE, Mood.DENIED})
"""Moods that a whole sentence has, and not only a part of it."""
_MOODS_OF_LINES = frozenset({Mood.CODE, Mood.PAGE})
"""Moods that a whole line has: no line is half a program's text, half a report."""


def _is_dismissed_as_a_phrase(clue: _Clue, text_phrases: TextPhrases) -> bool:
    """Whether the same is said by a listed phrase that was weighed and found no report.

    What the phrase weighs its surroundings tell; the loose words end elsewhere, so that
    their surroundings are others.
    """
    begin, end = clue.sentence()
    return any(
        phrase_clue.phrase is clue.phrase
        and phrase_clue.start < clue.end
        and clue.start < phrase_clue.end
        and phrase_clue.evidence.weight < 0
        for phrase_clue in text_phrases.clues_between(begin, end)
    )


def _surest_report(
    clues: Iterable[_Clue], *, was_printed: bool = False
) -> Exhaustion | None:
    first = None
    for clue in clues:
        finding = _report_of_clue(clue, was_printed=was_printed)
        # One that says where is surer than one that only says that it ran out.
        if finding is not None and finding.kind != _UNPLACED:
            return finding
        first = first or finding
    return first


class Mention(NamedTuple):
    """Words of exhaustion that report nothing."""

    words: str
    """As they stand in the text."""
    reasons: tuple[str, ...]
    """What the text does with them, the surest first; empty where nothing says so."""


def find_mention(text_phrases: TextPhrases) -> Mention | None:
    """Give the first phrase of exhaustion of a text that reports none.

    >>> find_mention(TextPhrases("Try a smaller batch if it runs out of memory."))
    Mention(words='out of memory', reasons=('a condition',))
    """
    if not text_phrases.clues:
        return None

    text = text_phrases.text
    # Nothing of it depends on the phrases that it overlaps with.
    clue = replace(text_phrases.clues[0], spoken=None)
    phrase = Span(clue.start, clue.end)
    begin, end = clue.sentence()
    sentence = Span(begin, min(end, len(text)))
    mood = find_mood(text, phrase, sentence)
    if mood is not None:
        reasons: tuple[str, ...] = (mood.in_words,)
    elif _QUESTION.match(text[begin : end + 1]):
        reasons = ("a question",)
    elif (other := NOT_MEMORY.search(text, begin, end)) is not None:
        reasons = (f'it is about "{" ".join(other.group().split())}"',)
    else:
        reasons = weigh_evidence(text, phrase, sentence).reasons_against
    return Mention(" ".join(clue.words.split()), reasons)


def _phrase_clues(where: FoldedText) -> Iterator[_Clue]:
    clues = [
        _Clue(phrase, *span, where.text)
        for phrase, span in phrases_in(where)
        if phrase is Phrase.KILLED or not _CROSSES_SENTENCES.search(where.text, *span)
    ]
    clues.sort(key=lambda clue: clue.start)
    return _with_what_they_overlap(clues)


_CROSSES_SENTENCES = re.compile(r"[a-z][.!?][\"')]?\s+[A-Z]")
"""Two sentences share no phrase: "larger than the buffer. Memory was free".  What was
ended for its memory is said in two: "Low memory. Killing process 3"."""


def _with_what_they_overlap(clues: list[_Clue]) -> Iterator[_Clue]:
    """Add where phrases that overlap begin and end: "cannot allocate" and "memory"."""
    group: list[_Clue] = []
    end = 0
    for clue in [*clues, None]:
        if clue is not None and group and clue.start < end:
            group.append(clue)
            end = max(end, clue.end)
            continue
        for member in group:
            yield replace(member, spoken=Span(group[0].start, end))
        if clue is not None:
            group, end = [clue], clue.end


def _loose_clues(text_phrases: TextPhrases) -> Iterator[_Clue]:
    """Find what sentences state in words that no phrase lists."""
    where = text_phrases.folded
    begin = 0
    for stop in itertools.chain(_SENTENCE_END.finditer(where.text), (None,)):
        end = stop.start() if stop else len(where.text)
        # What is only spoken of is not read: it would be left out afterwards.
        is_spoken_of = text_phrases.stretches_spoken_of.contain(begin, end)
        if not is_spoken_of and not _BEGINS_WITH_HEDGE.match(where.text, begin, end):
            for start in range(begin, end, _LONGEST_SENTENCE):
                yield from _loose_clues_in(
                    where, start, min(end, start + _LONGEST_SENTENCE)
                )
        begin = stop.end() if stop else end


_BEGINS_WITH_HEDGE = compile_words(
    r"\W{0,3}(?:if|unless|in case|until|to avoid|to prevent|when"
    r"|(?:you|it|this|they|we|users?) (?:may|might|could(?! not\b)|should|would)) "
)
"""A sentence that begins so has a mood whatever words come, see ``moods.txt``."""


def _loose_clues_in(where: FoldedText, start: int, end: int) -> Iterator[_Clue]:
    text = where.text
    has_statement = False
    for statement in find_statements(where, start, end):
        has_statement = True
        yield _Clue(statement.way, statement.start, statement.end, text, is_loose=True)
    if has_statement:
        return

    # A name can be the statement: MemoryLimitExceededException
    words = split_names(text[start:end])
    has_names = len(words) != end - start or "_" in text[start:end]
    if not has_names:
        return
    for statement in find_statements(FoldedText.of(words)):
        first = start + position_before_split(text[start:end], statement.start)
        last = start + position_before_split(text[start:end], statement.end)
        yield _Clue(statement.way, first, last, text, is_loose=True)


def _report_of_clue(clue: _Clue, *, was_printed: bool = False) -> Exhaustion | None:
    if clue.reports_nothing:
        return None
    begin, end = clue.sentence()
    sentence = clue.text[begin:end]
    amounts = list(find_amounts(clue.stated))
    own_amounts = list(find_amounts(clue.text[begin : clue.message.end]))
    if was_printed:
        is_report = (
            clue.phrase is Phrase.RAN_OUT and clue.evidence.own >= _SURELY_PRINTED
        )
    else:
        is_report = _is_report(clue, sentence, own_amounts)
    if not is_report:
        return None
    kind, backend = _kind_and_backend(clue, sentence, amounts)
    is_guess = _GUESSED.search(clue.text, begin, clue.start) is not None
    return Exhaustion(
        kind, backend, clue.start, clue.end, clue.region(), clue.stated, is_guess
    )


_GUESSED = compile_words(
    r"\b(?:may|might|could) (?:also )?(?:be(?! caused)|have)\b"
    r"|\b(?:possibly|probably|perhaps|maybe|presumably)\b(?! (?:reason|cause)s?\b)"
)
"""Behind a label and before the phrase: the error is a fact, its cause is not."""


def _reports_nothing(clue: _Clue) -> bool:
    """Whether the sentence of a phrase speaks about exhaustion, or of something else.

    What is cheap to know and true of most sentences is asked first.
    """
    phrase = Span(clue.start, clue.end)
    sentence = clue.sentence()
    begin, end = sentence
    if clue.mood is not None:
        return True
    if _QUESTION.match(clue.text[begin : end + 1]):
        return True
    if is_about_something_else(clue.text[begin:end]) and not gives_last_reason(
        clue.text, phrase, sentence
    ):
        return True
    return clue.evidence.weight < 0


_SURELY_PRINTED = 4
"""Evidence that is as good as a word for a device or an error: a label and nothing
against it, such as "alloc.cc:212] OOM"."""
_QUESTION = re.compile(
    r"\s*(?:is|are|was|were|do|does|did|why|how|what|when|can|could|should|would|has|"
    r"have|any|anyone)\b[^:?\uff1f]*[?\uff1f]"
    # Whoever asks so does not always end with a question mark.
    r"|\s*(?:is|are|was|were|do|does|did|should|would)n['\u2019]t\b[^:]*\Z",
    re.IGNORECASE,
)


def _is_report(clue: _Clue, sentence: str, amounts: list[Amount]) -> bool:
    """Whether the sentence tells of an event, and of memory."""
    if clue.is_loose:
        return _is_sure_event(clue, sentence, amounts)
    if clue.phrase is Phrase.FAILED:
        # An address or a license can be allocated too.  Of a sentence that names
        # nothing ("Failed to allocate again.") the ones beside it say what was.
        asked = any(amount.role == "requested" for amount in amounts)
        names_nothing = len(sentence.strip()) <= len(clue.words) + _BARE_SENTENCE
        where = clue.surroundings() if names_nothing else sentence
        if asked or _MEMORY_WORD.search(with_name_parts(where)):
            return True
        # "failed to alloc ctrl->tag_set, ret -12": drivers need not say of what.
        if _STATUS_OF_THE_SYSTEM.search(sentence):
            return True
        # A runtime's status: nrt_load status=4 message="Allocation Failure"
        is_status = _ALLOCATION_FAILED.search(clue.words) is not None
        return is_status and place_named(sentence) is not None
    if clue.phrase is Phrase.EXCEEDED:
        if _WARNING_LEVEL.search(sentence):
            return False
        has_consequence = has_error_mark(sentence) or _process_was_ended(clue)
        if _EXCEEDED_ITS_SHARE.search(sentence) and _is_terse(sentence):
            has_consequence = True
        if _EXCEEDED_AN_AMOUNT.search(sentence):
            has_consequence = True
        is_refused = has_consequence or ONE_BLOCK.search(sentence) is not None
        if _is_input(clue):
            return False
        if _is_above_limit(amounts) and OTHER_THING.search(sentence) is None:
            is_refused = True
        has_free = any(amount.role in _ROLES_OF_MEMORY for amount in amounts)
        return is_refused and (has_free or _MEMORY_WORD.search(sentence) is not None)
    if clue.phrase is Phrase.KILLED:
        return (
            re.search(r"mem|oom|rss|pss|swap|jetsam", sentence, re.IGNORECASE)
            is not None
        )
    placed = (
        place_named(sentence) is not None or HOST_PLACE.search(sentence) is not None
    )
    # An error can be told by its constant alone: RMM_ERROR_OUT_OF_MEMORY.
    is_error = has_error_mark(with_name_parts(sentence))
    if placed or amounts or is_error or _process_was_ended(clue):
        return True
    return _is_headline(clue, sentence)


def _is_sure_event(clue: _Clue, sentence: str, amounts: list[Amount]) -> bool:
    """Whether words that only stand in one sentence can be trusted.

    They are said of much else, so the first reason for or against them decides, the
    surest first.  Beside a reason stands what would be misread without it.
    """
    # "WARNING: mlock failed; buffer will not be swap-protected": it goes on.
    if _WARNED.search(clue.surroundings()):
        return False
    # "Terminated due to memory issue"
    if clue.phrase is Phrase.KILLED or _asks_for_more_than_is_free(amounts):
        return True
    # "Memory specification can not be satisfied", of a job that is to wait.
    if OTHER_THING.search(sentence) and _OUT_OF.match(clue.words) is None:
        return False
    # "Segment size 40960 exceeds maximum buffer size 32768"
    if clue.phrase is Phrase.EXCEEDED and _is_input(clue):
        return False
    # As in "memory budget exceeded: 10240 bytes requested, 67108864 bytes in budget".
    if clue.phrase is Phrase.EXCEEDED and _is_above_limit(amounts):
        return True
    # As in "The Merge buffer is too big (CL_DEVICE_MAX_MEM_ALLOC_SIZE=402653184)".
    if clue.phrase is Phrase.EXCEEDED and ONE_BLOCK.search(sentence):
        return True
    # "GPU memory budget exceeded."; in a longer sentence somebody explains a rule.
    if _SHARE_WAS_EXCEEDED.match(sentence) and _is_terse(sentence):
        return True
    if _EXCEEDED_ITS_SHARE.search(sentence) and _is_terse(sentence):
        return True
    # "createBuffer failed, size is too large": a mere size may be that of a picture.
    if clue.phrase is Phrase.FAILED and _PIECE_TOO_LARGE.search(sentence):
        return has_error_mark(sentence)
    has_amounts = any(amount.start < len(sentence) for amount in amounts)
    # "Maximum call stack size exceeded"; an array can exceed what an index counts.
    if not has_amounts and _MEMORY.search(sentence) is None:
        return False
    # "This tab could not get enough memory and was closed."
    if clue.phrase is Phrase.FAILED:
        return True
    # As in "heap exhausted (512 pages)", and nothing else.
    if clue.phrase is Phrase.RAN_OUT and (_is_placed(sentence) or _is_terse(sentence)):
        return True
    # As in "job exceeded maxPSS: 15360 MB, current PSS 15872 MB. Killing job 105194".
    if _process_was_ended(clue):
        return True
    return has_error_mark(clue.text[slice(*clue.message)])


_PIECE_TOO_LARGE = compile_words(
    r"\b(?:size|length|allocation|buffer|texture|tensor|array|image|heap)"
    r"(?: \([^()\n]{1,40}\)| \d[\d.,]{0,20}(?: ?(?:[KMGT]?i?B|bytes))?)? (?:is |was )?"
    r"too (?:large|big) for (?:the |this |its )?"
    r"(?:implementation|device|gpu|adapter|driver|browser|platform|system|machine|process)\b"
)
"""What could not be made was larger than what makes it allows."""
_OUT_OF = compile_words(
    r"(?:r[au]n|runs|running|is|was|are|were)? ?out of (?:\w{1,12} )?\w{3,12}\Z"
)
"""It says itself what ran out, whatever else the sentence names."""


def _asks_for_more_than_is_free(amounts: list[Amount]) -> bool:
    """Whether words name a request, and less that is free: nothing else is so told."""
    requests = [amount.size_bytes for amount in amounts if amount.role == "requested"]
    free_sizes = [amount.size_bytes for amount in amounts if amount.role == "free"]
    if not requests or not free_sizes:
        return False
    return max(requests) > max(free_sizes)


def _is_above_limit(amounts: list[Amount]) -> bool:
    """Whether what was asked for is larger than its limit, which is said last.

    It was refused then, whether it is said or not.  Where words name a limit and a
    usage, these are compared, in whatever order they stand.
    """
    if len(amounts) < 2:
        return False
    *parts, last = [amount.size_bytes for amount in amounts]
    if sum(parts) > last:
        return True
    limits = [amount.size_bytes for amount in amounts if amount.role == "limit"]
    usages = [amount.size_bytes for amount in amounts if amount.role in _ROLES_OF_USAGE]
    if not limits or not usages:
        return False
    return max(usages) > max(limits)


_EXCEEDED_ITS_SHARE = compile_words(
    r"\b(?:exceeded|reached|overran|overshot|surpassed|outgrew|violated|breached"
    r"|crossed|topped|hit|(?:went|ran|grew|got) (?:over|past|above|beyond)"
    r"|blew (?:past|through)|broke through) (?:(?:its|their|the) )?(?:\w{1,12} ){0,3}"
    r"(?:mem(?:ory)?|v?ram|hbm) (?:usage |pool )?(?:soft |hard )?"
    r"(?:limit|cap|capacity|ceiling|allocation|allowance|budget|quota|share|reservation|request)\b"
    r"|\bexceeded (?:(?:the|its|their|all) )?(?:allowed|allocated|allotted|requested"
    r"|reserved|granted|assigned|permitted|available) (?:memory|v?ram)\b"
    r"|\b(?:used|took|consumed|occupied|held) more (?:\w{1,12} ){0,2}"
    r"(?:memory|v?ram) than (?:it |was |is |the |its )*"
    r"(?:allowed|allocated|allotted|requested|asked|given|reserved|granted|assigned|permitted|available|limit|request)"
)
"""In the past, of something's own share: told of an event, and not of a rule."""
_SHARE_WAS_EXCEEDED = compile_words(
    r"\W{0,3}(?:(?!note|tip|hint|warning|example)(?:[\w.-]{1,20} ){1,4}?[:(\u2013-] ?"
    r"|(?:[\w.-]{1,20} ?){1,3}[:,] "
    r"|(?:[\w.-]{1,20} ){1,4}(?:because of|due to) (?:the |its )?)?"
    r"(?:\w{1,20} ){0,3}(?:mem(?:ory)?|v?ram|hbm) (?:usage )?"
    r"(?:limit|cap|ceiling|allocation|allowance|budget|quota|share|reservation) "
    r"(?:was |is |has been |have been )?"
    r"(?:exceeded|reached|overrun|surpassed|exhausted|used up)\b"
)
"""A sentence that begins with the share and says that it was too small."""
_INPUT = compile_words(
    r"\b(?:files?|segments?|packets?|messages?|strings?|lines?|payload|body|requests?"
    r"|headers?|frames?|records?|attributes?|inputs?|images?|challenge|names?|paths?"
    r"|fields?|columns?|rows?|text|json|commands?)\b"
)
"""What a program reads into a buffer of its own."""
_ALLOCATED = compile_words(
    r"alloc|\bbuffers?\b|tensor|\barrays?\b|texture|memory|\bv?ram\b|\bmodel\b"
)
"""What is a piece of memory itself."""

_OVERSTEPPED = compile_words(r"\b(?:exceed|(?:larger|greater|bigger|longer) than)")
_OWN_BUFFER = compile_words(r"\bmax(?:imum)? (?:allowed )?buffer (?:size|length)\b")
"""A limit that devices have too; its subject tells which of both is meant."""


def _is_input(clue: _Clue) -> bool:
    """Whether what is larger than a buffer is something that is read into it."""
    begin, end = clue.sentence()
    if _OWN_BUFFER.search(clue.text, clue.start, end) is None:
        return False
    before = _OVERSTEPPED.split(clue.text[begin:end], maxsplit=1)[0]
    return _INPUT.search(before) is not None and _ALLOCATED.search(before) is None


_EXCEEDED_AN_AMOUNT = compile_words(
    r"\bexceeded (?:[\w-]{1,20} ){0,4}memory limit of \d[\d.]{0,12} ?"
    r"(?:[KMGT]?i?B|bytes)\b"
)
"""In the past, of a limit that has an amount: nobody tells a rule so."""
_ROLES_OF_MEMORY = frozenset({"free", "capacity"})
"""Roles of amounts that only memory has in such a sentence."""
_ROLES_OF_USAGE = frozenset({"in_use", "requested", SAID})
"""Roles of amounts that have to fit into a limit; a peak is said besides the usage."""
_TERSE = 90
"""Characters of a sentence that says one thing; chosen: the gathered reports without a
name of a device or an error have 30 to 70."""
_TELLER = re.compile(r"\b(?:I|we|my|our|you|he|she|they|friend)\b|\?", re.IGNORECASE)


def _is_terse(sentence: str) -> bool:
    """Whether a sentence says nothing else, as a program would, and not a person."""
    told = _ADVICE.sub("", sentence).strip()
    return len(told) <= _TERSE and _TELLER.search(told) is None


_ADVICE = compile_words(r"[,;:(] ?please \w[^\n]{0,120}\Z")
"""What a program tells its user to do, behind what happened."""


def _is_placed(sentence: str) -> bool:
    return (
        place_named(sentence) is not None
        or speaks_of_the_host(sentence)
        or ANY_DEVICE.search(sentence) is not None
    )


_STATUS_OF_THE_SYSTEM = compile_words(
    r"\b(?:ret(?:urn(?:ed|s)?|val)?|rc|err(?:or|no|code)?|status|code|result)"
    r"\W{1,4}(?:code )?-12\b"
)
"""ENOMEM, as drivers return it."""
_ALLOCATION_FAILED = re.compile(r"alloc(?:ation)?[\s_]+(?:fail|error)", re.IGNORECASE)
_MEMORY = compile_words(
    r"mem(?:ory|s)?\b|\bv?ram\b|\bhbm|heap|bytes|swap space|huge ?pages"
    r"|metaspace|perm ?gen\b|code ?cache|garbage collect"
    r"|(?:global|local|trail|control|data|java) stack"
)
_WARNED = re.compile(r"\bwarn(?:ing)?\b", re.IGNORECASE)
_WARNING_LEVEL = compile_words(r"\bwarning (?:threshold|level|limit)\b")
"""What was exceeded is only where a watchdog begins to warn."""
_BARE_SENTENCE = 12
"""Characters beside the phrase in a sentence with nothing else, such as "again."."""
_SUBJECT = re.compile(r"(?!(?:I|We|You|They|It|He|She|This|That)\b)[A-Z]\w*(?: \w+)?$")
_LABEL = re.compile(
    r":$|\b(?:reason|cause|code|status|result|err(?:or)?)=$", re.IGNORECASE
)
_STORY = re.compile(r"\b(?:ran|runs?|running|goes|going|went)$", re.IGNORECASE)


def _is_headline(clue: _Clue, sentence: str) -> bool:
    """Whether a sentence is "out of memory", with at most a subject: "Prefill ..."."""
    begin, _ = clue.sentence()
    before = clue.text[begin : clue.start].strip(" \"'([{<*#-")
    if not before or _LABEL.search(before):
        return True
    behind = sentence[clue.end - begin :].strip(" .!\"')]}")
    is_subject = _SUBJECT.match(before) is not None and not _STORY.search(before)
    return is_subject and not behind


def _process_was_ended(clue: _Clue) -> bool:
    """Whether something of the host was killed, said in the line or the next one."""
    begin = clue.text.rfind("\n", max(0, clue.start - _BEFORE), clue.start) + 1
    begin = max(begin, clue.start - _BEFORE, clue.message.start)
    _, end = clue.sentence()
    end = min(clue.message.end, end + _BEFORE)
    for ending in ENDED.finditer(clue.text, begin, end):
        span = Span(*ending.span())
        if "\n" not in clue.text[min(clue.end, span.start) : max(clue.start, span.end)]:
            return True
        mood = find_mood(clue.text, span, sentence_around(clue.text, span))
        if mood in {None, Mood.CODE}:
            return True
    return False


def _kind_and_backend(
    clue: _Clue, sentence: str, amounts: list[Amount]
) -> tuple[str, str | None]:
    """Decide of which memory it tells: the sentence counts before its surroundings."""
    resource = _host_resource(clue, sentence, amounts)
    if resource is not None:
        return resource, "host"
    # Before the devices: "Host ran out of memory" is printed by their drivers, whose
    # names stand beside it ("[gfx/vulkan]", "CL_OUT_OF_HOST_MEMORY").
    if _HOSTS_MEMORY.search(clue.text, max(0, clue.start - _SUBJECT_OF_HOST), clue.end):
        return "host_alloc", "cpu"
    around = clue.surroundings()
    if COMPILER.search(clue.text, clue.sentence()[0], clue.start):
        return _UNPLACED, None  # not the device that it compiles for
    backend = place_named(sentence) or _host_backend(sentence)
    if backend == "cpu" and _DEVICE_MEMORY.search(sentence):
        backend = None  # "malloc" is a word of devices too
    # An allocation of the host can fail, and its process end: that is no limit.
    is_watched = backend is None or (
        backend == "cpu" and clue.phrase is Phrase.EXCEEDED
    )
    if is_watched and clue.phrase is not Phrase.FAILED and _process_was_ended(clue):
        return "killed", "host"
    subject = clue.text[clue.sentence()[0] : clue.end]
    is_budget = BUDGET.search(around) is not None
    if is_budget and (_host_backend(subject) is None or BUDGET.search(subject)):
        is_allocator = _ALLOCATOR_WORDING.search(sentence) is not None
        kind = "device_oom" if is_allocator else "device_limit"
        return kind, place_named(sentence) or place_named(around) or "cuda"
    if backend is None:
        host = None if _DEVICE_MEMORY.search(sentence) else _host_backend(around)
        backend = place_named(around) or host
    if backend == "cpu":
        return "host_alloc", "cpu"
    if ONE_BLOCK.search(sentence):
        return "buffer_too_large", backend
    if backend is None and ANY_DEVICE.search(sentence) is None:
        return "oom", None
    asked = any(amount.role == "requested" for amount in amounts)
    numbered = asked or _ALLOCATOR_WORDING.search(
        clue.text[clue.start - 6 : clue.end + 1]
    )
    return "device_oom" if numbered else "device_oom_async", backend


_SUBJECT_OF_HOST = 10
"""Characters before "out of memory" in which "host ran" stands."""
_DEVICE_MEMORY = compile_words(
    r"device[ _-]+mem|OutOfDeviceMem|\bdevice ?\d{1,3} out of memory|\bw(?:eb)?gpu\b"
)
_HOSTS_MEMORY = re.compile(
    r"of[ _]?host[ _]?mem|host_mem|\bhost (?:has )?(?:is|r[au]n|was|went) out of mem",
    re.IGNORECASE,
)


def _host_resource(clue: _Clue, sentence: str, amounts: list[Amount]) -> str | None:
    """Give the kind where it is no allocation but a limit of the host."""
    if clue.phrase is Phrase.KILLED and not _is_refusal(clue, amounts):
        return "killed"
    if PINNED.search(sentence):
        return "pinned"
    return "shm" if SHARED.search(sentence) else None


def _is_refusal(clue: _Clue, amounts: list[Amount]) -> bool:
    """Whether a limit was told to what asked for too much, which goes on living."""
    is_limit = re.search(r"limit", clue.words, re.IGNORECASE) is not None
    asked = any(amount.role == "requested" for amount in amounts)
    return is_limit and asked and not _process_was_ended(clue)


def place_named(text: str) -> str | None:
    """Give the device that the words of a text, or parts of its names, speak of.

    >>> place_named("in ggml_backend_vulkan"), place_named("on the host")
    ('vulkan', None)
    """
    text = with_name_parts(text)
    for place in PLACES:
        if place.words.search(text):
            return place.backend
    return None


def speaks_of_the_host(text: str) -> bool:
    """Whether words, or parts of names, are of the processor's memory.

    >>> speaks_of_the_host("DefaultCPUAllocator: not enough memory")
    True
    """
    return HOST_PLACE.search(with_name_parts(text)) is not None


def _host_backend(text: str) -> str | None:
    return "cpu" if HOST_PLACE.search(text) else None
