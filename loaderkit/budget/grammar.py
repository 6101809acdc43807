"""Read a message that no wording knows, from its words alone.  Pure.

A report that memory ran out has a phrase of exhaustion, in a sentence that tells of
an event, and words that say of which memory.  Advice, code and stories have the phrase
too: they are told apart by what stands before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loaderkit.budget.amounts import Amount, find_amounts
from loaderkit.budget.lexicon import (
    ANY_DEVICE,
    BUDGET,
    HOST_PLACE,
    ONE_BLOCK,
    PINNED,
    PLACES,
    SHARED,
    Phrase,
    has_error_mark,
    is_negated,
    phrases,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_BEFORE, _BEHIND = 240, 700
"""Characters of a message around its phrase: the longest of the corpora has 640."""
_SENTENCE_END = re.compile(r"[.!?][\"')]?\s|\n|\s[;|]\s")
_TAKEN_BACK = re.compile(r"is\s+not\s+a\s+failure", re.IGNORECASE)
"""In the sentence behind: an allocator that tries another way after all."""
_ALLOCATOR_WORDING = re.compile(
    r"\b(?:CUDA|HIP|XPU|NPU|MLU|MUSA|HPU)\s+out\s+of\s+memory", re.IGNORECASE
)
_MEMORY_WORD = re.compile(
    r"memory|memalign|\bv?ram\b|\bhbm\b|heap|\bbytes?\b|buffer|tensor|arena",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Finding:
    """What the words of a text say."""

    kind: str
    """As :attr:`loaderkit.budget.messages.Message.kind`."""
    backend: str | None
    """Where, None where no word says so."""
    start: int
    """Where the phrase of exhaustion begins."""
    end: int
    """Where it ends."""
    region: tuple[int, int]
    """The part of the text that its amounts may stand in."""


@dataclass(frozen=True)
class _Clue:
    """One phrase of exhaustion and its surroundings."""

    phrase: Phrase
    start: int
    end: int
    text: str

    @property
    def words(self) -> str:
        return self.text[self.start : self.end]

    def sentence(self) -> tuple[int, int]:
        """The sentence around the phrase."""
        begin = max(0, self.start - _BEFORE)
        for stop in _SENTENCE_END.finditer(self.text, begin, self.start):
            begin = stop.end()
        stop_behind = _SENTENCE_END.search(self.text, self.end, self.end + _BEFORE)
        return begin, stop_behind.start() if stop_behind else self.end + _BEFORE

    def region(self) -> tuple[int, int]:
        """The sentence and what may still belong to it."""
        begin, _ = self.sentence()
        return begin, min(len(self.text), self.end + _BEHIND)


def find_exhaustion(text: str) -> Finding | None:
    """Find the surest report that memory ran out.

    Args:
        text: A text without the breaks and prefixes of a log.

    Returns:
        What it says; None where no sentence is such a report.

    >>> finding = find_exhaustion("fatal: acme failed to allocate 2 GiB of GPU memory")
    >>> finding.kind, finding.backend
    ('device_oom', 'cuda')
    >>> find_exhaustion("If you run out of memory, use a smaller batch.") is None
    True
    """
    findings = [finding for clue in _clues(text) if (finding := _judged(clue))]
    if not findings:
        return None
    # The first that says where is surer than one that only says that it ran out.
    placed = [finding for finding in findings if finding.kind != "oom"]
    return (placed or findings)[0]


def mentions_exhaustion(text: str) -> str | None:
    """Give the first phrase of exhaustion of a text, whether it reports one or not."""
    clue = next(_clues(text), None)
    return None if clue is None else " ".join(clue.words.split())


def _clues(text: str) -> Iterator[_Clue]:
    found = [
        _Clue(phrase, match.start(), match.end(), text)
        for phrase, words in phrases().items()
        for match in words.finditer(text)
    ]
    return iter(sorted(found, key=lambda clue: clue.start))


def _judged(clue: _Clue) -> Finding | None:
    begin, end = clue.sentence()
    sentence = clue.text[begin:end]
    if is_negated(sentence, clue.start - begin):
        return None
    if _TAKEN_BACK.search(clue.text, clue.end, clue.end + _BEFORE):
        return None
    region = clue.region()
    around = clue.text[region[0] : region[1]]
    amounts = list(find_amounts(clue.text[begin : region[1]]))
    if not _is_report(clue, sentence, amounts):
        return None
    kind, backend = _place(clue, sentence, around, amounts)
    return Finding(kind, backend, clue.start, clue.end, region)


def _is_report(clue: _Clue, sentence: str, amounts: list[Amount]) -> bool:
    """Whether the sentence tells of an event, and of memory."""
    begin, _ = clue.sentence()
    before = clue.text[begin : clue.start].strip(" \"'([{-")
    is_head = not before or before.endswith(":")
    if clue.phrase is Phrase.FAILED:
        # A port or a licence can be allocated too.
        asked = any(amount.role == "requested" for amount in amounts)
        return asked or _MEMORY_WORD.search(sentence) is not None
    if clue.phrase is Phrase.EXCEEDED:
        return has_error_mark(sentence) and _MEMORY_WORD.search(sentence) is not None
    if clue.phrase is Phrase.KILLED:
        return re.search(r"mem|oom|rss", sentence, re.IGNORECASE) is not None
    placed = any(place.words.search(sentence) for place in PLACES)
    placed = placed or HOST_PLACE.search(sentence) is not None
    return is_head or placed or bool(amounts) or has_error_mark(sentence)


def _place(
    clue: _Clue, sentence: str, around: str, amounts: list[Amount]
) -> tuple[str, str | None]:
    """Decide of which memory it tells: the sentence counts before its surroundings."""
    resource = _host_resource(clue, sentence)
    if resource is not None:
        return resource, "host"
    if BUDGET.search(around):
        is_allocator = _ALLOCATOR_WORDING.search(sentence) is not None
        return "device_oom" if is_allocator else "device_limit", "cuda"
    backend = _backend(sentence) or _host(sentence)
    if backend is None:
        backend = _backend(around) or _host(around)
    if backend is None and ANY_DEVICE.search(sentence) is None:
        return "oom", None
    if backend == "cpu":
        return "host_alloc", "cpu"
    if ONE_BLOCK.search(sentence):
        return "buffer_too_large", backend
    asked = any(amount.role == "requested" for amount in amounts)
    numbered = asked or _ALLOCATOR_WORDING.search(
        clue.text[clue.start - 6 : clue.end + 1]
    )
    return "device_oom" if numbered else "device_oom_async", backend


def _host_resource(clue: _Clue, sentence: str) -> str | None:
    """Give the kind where it is no allocation but a limit of the host."""
    if clue.phrase is Phrase.KILLED:
        return "killed"
    if PINNED.search(sentence):
        return "pinned"
    return "shm" if SHARED.search(sentence) else None


def _backend(text: str) -> str | None:
    for place in PLACES:
        if place.words.search(text):
            return place.backend
    return None


def _host(text: str) -> str | None:
    return "cpu" if HOST_PLACE.search(text) else None
