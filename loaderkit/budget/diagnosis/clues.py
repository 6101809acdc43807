"""Phrases of exhaustion, listed or put together, with what surrounds them.  Pure."""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loaderkit.budget.diagnosis.clauses import find_clause
from loaderkit.budget.diagnosis.evidence import Evidence, weigh_evidence
from loaderkit.budget.diagnosis.folding import FoldedText
from loaderkit.budget.diagnosis.lexicon import (
    Phrase,
    compile_words,
    is_about_something_else,
    phrases_in,
    position_before_split,
    split_names,
)
from loaderkit.budget.diagnosis.moods import (
    Mood,
    Span,
    find_mood,
    gives_last_reason,
    line_around,
)
from loaderkit.budget.diagnosis.sentences import (
    MEMORY_WORD,
    MOST_BEFORE,
    MOST_BEHIND,
    SENTENCE_END,
    message_around,
    sentence_around,
    statements_behind,
)
from loaderkit.budget.diagnosis.statements import find_statements

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_LONGEST_SENTENCE = 480
"""Characters read as one sentence: what is longer is no prose and no message."""


@dataclass(frozen=True)
class Clue:
    """One phrase of exhaustion and its surroundings."""

    phrase: Phrase
    start: int
    end: int
    text: str
    is_loose: bool = False
    """Whether other words stand between those that say it, so that more has to speak
    for a report."""
    begins_sentence: bool = False
    """Whether a program's sentence begins with it, see ``clauses``."""
    spoken: Span | None = None
    """With what other phrases it overlaps; None: with none."""

    @property
    def words(self) -> str:
        """The words that say it, as they stand in the text."""
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
        mood = find_mood(
            self.text,
            Span(self.start, self.end),
            self._sentence,
            is_scattered=self.is_loose,
        )
        if mood is not None or self.phrase is not Phrase.FAILED:
            return mood
        # What is said of a failure can stand behind what was asked for:
        # "failed to allocate | GPU memory if the batch is too large".
        thing = _OBJECT.match(self.text, self.end, self._sentence.end)
        if thing is None:
            return None
        whole = Span(self.start, thing.end())
        return find_mood(self.text, whole, self._sentence, is_scattered=self.is_loose)

    @functools.cached_property
    def evidence(self) -> Evidence:
        """What its surroundings say."""
        begin, end = self._sentence
        return weigh_evidence(
            self.text,
            self.spoken or Span(self.start, self.end),
            Span(begin, min(end, len(self.text))),
            is_scattered=self.is_loose,
            begins_sentence=self.begins_sentence,
        )

    @functools.cached_property
    def reports_nothing(self) -> bool:
        """Whether it is known to be no report; a clue is asked more than once."""
        return _reports_nothing(self)

    def region(self) -> tuple[int, int]:
        """The sentence and what may still belong to it."""
        begin, _ = self.sentence()
        return begin, min(len(self.text), self.end + MOST_BEHIND)

    @functools.cached_property
    def stated(self) -> str:
        """The sentence and what is stated behind it, without the prose between."""
        begin, end = self.sentence()
        return self.text[begin:end] + statements_behind(self.text, end)

    def surroundings(self) -> str:
        """The line it stands in and what may still belong to it."""
        earliest = max(0, self.start - MOST_BEFORE)
        line = self.text.rfind("\n", earliest, self.start) + 1
        if line and self.text.startswith("what():", line):
            # C++ names the exception in the line before.
            earliest_before = max(0, line - MOST_BEFORE)
            line = self.text.rfind("\n", earliest_before, line - 1) + 1
        begin = max(line, earliest)
        return self.text[begin : self.sentence().start] + self.stated


_OBJECT = compile_words(
    r"(?: (?!to\b|and\b|or\b|if\b|when\b)[\w/.'-]{1,24}){0,4}?"
    r" (?:memory|v?ram|buffers?|tensors?|arrays?)\b"
)
"""Behind "failed to allocate": what was to be allocated."""


def _reports_nothing(clue: Clue) -> bool:
    """Whether the sentence of a phrase speaks about exhaustion, or of something else.

    What is cheap to know and true of most sentences is asked first.
    """
    phrase = Span(clue.start, clue.end)
    sentence = clue.sentence()
    begin, end = sentence
    if clue.mood is not None:
        return True
    if QUESTION.match(clue.text[begin : end + 1]):
        return True
    if is_about_something_else(_with_its_own_limit(clue)) and not gives_last_reason(
        clue.text, phrase, sentence
    ):
        return True
    return clue.evidence.weight < 0


def _with_its_own_limit(clue: Clue) -> str:
    """Give the sentence; a quota that it says memory exceeded is one of memory."""
    begin, end = clue.sentence()
    if not (clue.begins_sentence and clue.phrase is Phrase.EXCEEDED):
        return clue.text[begin:end]
    words = clue.words
    if MEMORY_WORD.search(words):
        words = _QUOTA.sub("limit", words)
    return clue.text[begin : clue.start] + words + clue.text[clue.end : end]


_QUOTA = re.compile(r"\bquota\b", re.IGNORECASE)


QUESTION = re.compile(
    r"\s*(?:is|are|was|were|do|does|did|why|how|what|when|can|could|should|would|has|"
    r"have|any|anyone)\b[^:?\uff1f]*[?\uff1f]"
    # Whoever asks so does not always end with a question mark.
    r"|\s*(?:is|are|was|were|do|does|did|should|would)n['\u2019]t\b[^:]*\Z",
    re.IGNORECASE,
)


class TextPhrases:
    """The phrases of exhaustion of a text, each of them weighed at most once."""

    def __init__(self, text: str) -> None:
        """Take a text without the breaks and prefixes of a log."""
        self.text = text
        self.folded = FoldedText.of(text)

    @functools.cached_property
    def clues(self) -> tuple[Clue, ...]:
        """Each phrase of the text, in its order."""
        return tuple(_phrase_clues(self.folded))

    @functools.cached_property
    def loose_clues(self) -> tuple[Clue, ...]:
        """What its sentences state in words that no phrase lists."""
        return tuple(_find_loose_clues(self))

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

    def clues_between(self, begin: int, end: int) -> tuple[Clue, ...]:
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


def _stretches_of(clues: Iterable[Clue]) -> list[Span]:
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


def _phrase_clues(where: FoldedText) -> Iterator[Clue]:
    clues = [
        Clue(phrase, *span, where.text)
        for phrase, span in phrases_in(where)
        if phrase is Phrase.KILLED or not _CROSSES_SENTENCES.search(where.text, *span)
    ]
    clues.sort(key=lambda clue: clue.start)
    return _with_what_they_overlap(clues)


_CROSSES_SENTENCES = re.compile(r"[a-z][.!?][\"')]?\s+[A-Z]")
"""Two sentences share no phrase: "larger than the buffer. Memory was free".  What was
ended for its memory is said in two: "Low memory. Killing process 3"."""


def _with_what_they_overlap(clues: list[Clue]) -> Iterator[Clue]:
    """Add where phrases that overlap begin and end: "cannot allocate" and "memory"."""
    group: list[Clue] = []
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


def clause_clues(text_phrases: TextPhrases) -> Iterator[Clue]:
    """Find the clauses with which sentences of programs begin."""
    where = text_phrases.folded
    begin = 0
    for stop in itertools.chain(SENTENCE_END.finditer(where.text), (None,)):
        end = stop.start() if stop else len(where.text)
        clause = find_clause(where, begin, min(end, begin + _LONGEST_SENTENCE))
        if clause is not None:
            yield Clue(
                clause.phrase,
                clause.start,
                clause.end,
                where.text,
                begins_sentence=True,
            )
        begin = stop.end() if stop else end


def _find_loose_clues(text_phrases: TextPhrases) -> Iterator[Clue]:
    """Find what sentences state in words that no phrase lists."""
    where = text_phrases.folded
    begin = 0
    for stop in itertools.chain(SENTENCE_END.finditer(where.text), (None,)):
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


def _loose_clues_in(where: FoldedText, start: int, end: int) -> Iterator[Clue]:
    text = where.text
    has_statement = False
    for statement in find_statements(where, start, end):
        has_statement = True
        yield Clue(
            statement.phrase, statement.start, statement.end, text, is_loose=True
        )
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
        yield Clue(statement.phrase, first, last, text, is_loose=True)
