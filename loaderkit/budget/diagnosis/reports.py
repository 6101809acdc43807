"""Whether a sentence with words of exhaustion reports that memory ran out.  Pure.

``clues`` has left out what only speaks of it: advice, questions, code, stories.  What
is left may tell of something else that ran out, was exceeded or failed, or of nothing
that happened.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from loaderkit.budget.diagnosis.amounts import SAID, Amount
from loaderkit.budget.diagnosis.lexicon import (
    ANY_DEVICE,
    ENDED,
    HOST_PLACE,
    ONE_BLOCK,
    OTHER_THING,
    Phrase,
    backend_named,
    compile_words,
    has_error_mark,
    speaks_of_the_host,
    with_name_parts,
)
from loaderkit.budget.diagnosis.moods import Mood, Span, find_mood
from loaderkit.budget.diagnosis.sentences import (
    MEMORY_WORD,
    MOST_BEFORE,
    sentence_around,
)

if TYPE_CHECKING:
    from loaderkit.budget.diagnosis.clues import Clue


def is_report(clue: Clue, sentence: str, amounts: list[Amount]) -> bool:
    """Whether a sentence tells of an event, and of memory.

    Args:
        clue: Words of exhaustion that are not only spoken of.
        sentence: The sentence around them.
        amounts: Those of the message that the sentence is a part of.
    """
    if clue.begins_sentence:
        return not _WARNED.search(clue.surroundings())
    if clue.is_loose:
        return _is_sure_event(clue, sentence, amounts)
    if clue.phrase is Phrase.KILLED:
        return _MEMORY_OF_A_PROCESS.search(sentence) is not None
    if clue.phrase is Phrase.EXCEEDED:
        return _was_memory_exceeded(clue, sentence, amounts)
    if clue.phrase is Phrase.FAILED:
        return _was_memory_asked_for(clue, sentence, amounts)
    return _is_told_by_a_system(clue, sentence, amounts)


def _was_memory_exceeded(clue: Clue, sentence: str, amounts: list[Amount]) -> bool:
    """Whether a limit that was exceeded is one of memory, and something followed."""
    if _WARNING_LEVEL.search(sentence) or _is_input(clue):
        return False
    if not _was_refused(clue, sentence, amounts):
        return False
    has_free = any(amount.role in _ROLES_OF_MEMORY for amount in amounts)
    return has_free or MEMORY_WORD.search(sentence) is not None


def _was_refused(clue: Clue, sentence: str, amounts: list[Amount]) -> bool:
    """Whether what exceeded a limit had a consequence: rules are stated alike."""
    if has_error_mark(sentence) or process_was_ended(clue):
        return True
    if _EXCEEDED_ITS_SHARE.search(sentence) and _is_terse(sentence):
        return True
    if _EXCEEDED_AN_AMOUNT.search(sentence) or ONE_BLOCK.search(sentence):
        return True
    return _is_above_limit(amounts) and OTHER_THING.search(sentence) is None


def _was_memory_asked_for(clue: Clue, sentence: str, amounts: list[Amount]) -> bool:
    """Whether what could not be allocated was memory, and no address or license."""
    # Of a sentence that names nothing ("Failed to allocate again.") the ones beside it
    # say what was.
    names_nothing = len(sentence.strip()) <= len(clue.words) + _BARE_SENTENCE
    where = clue.surroundings() if names_nothing else sentence
    if has_request(amounts) or MEMORY_WORD.search(with_name_parts(where)):
        return True
    # "failed to alloc ctrl->tag_set, ret -12": drivers need not say of what.
    if _STATUS_OF_THE_SYSTEM.search(sentence):
        return True
    # A runtime's status: nrt_load status=4 message="Allocation Failure"
    is_status = _ALLOCATION_FAILED.search(clue.words) is not None
    return is_status and backend_named(sentence) is not None


def _is_told_by_a_system(clue: Clue, sentence: str, amounts: list[Amount]) -> bool:
    """Whether a sentence has what people who tell of "out of memory" leave out."""
    if amounts or backend_named(sentence) is not None or HOST_PLACE.search(sentence):
        return True
    # An error can be told by its constant alone: RMM_ERROR_OUT_OF_MEMORY.
    if has_error_mark(with_name_parts(sentence)) or process_was_ended(clue):
        return True
    return _is_headline(clue, sentence)


_MEMORY_OF_A_PROCESS = re.compile(r"mem|oom|rss|pss|swap|jetsam", re.IGNORECASE)


def has_request(amounts: list[Amount]) -> bool:
    """Whether one of the amounts was asked for."""
    return any(amount.role == "requested" for amount in amounts)


def _is_sure_event(clue: Clue, sentence: str, amounts: list[Amount]) -> bool:
    """Whether words that only stand in one sentence can be trusted.

    They are said of much else, so the first reason for or against them decides, the
    surest first.  Beside a reason stands what would be misread without it.
    """
    # "Terminated due to memory issue"; what was ended is often only warned of.
    if clue.phrase is Phrase.KILLED:
        return True
    # "WARNING: mlock failed; buffer will not be swap-protected": it goes on.
    if _WARNED.search(clue.surroundings()):
        return False
    if _asks_for_more_than_is_free(amounts):
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
    if process_was_ended(clue):
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


def _is_input(clue: Clue) -> bool:
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
    without_advice = _ADVICE.sub("", sentence).strip()
    return len(without_advice) <= _TERSE and _TELLER.search(without_advice) is None


_ADVICE = compile_words(r"[,;:(] ?please \w[^\n]{0,120}\Z")
"""What a program tells its user to do, behind what happened."""


def _is_placed(sentence: str) -> bool:
    return (
        backend_named(sentence) is not None
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
    r"|(?:global|local|trail|control|data|java) stack|(?:object|plasma) store"
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


def _is_headline(clue: Clue, sentence: str) -> bool:
    """Whether a sentence is "out of memory", with at most a subject: "Prefill ..."."""
    begin, _ = clue.sentence()
    before = clue.text[begin : clue.start].strip(" \"'([{<*#-")
    if not before or _LABEL.search(before):
        return True
    behind = sentence[clue.end - begin :].strip(" .!\"')]}")
    is_subject = _SUBJECT.match(before) is not None and not _STORY.search(before)
    return is_subject and not behind


def process_was_ended(clue: Clue) -> bool:
    """Whether something of the host was killed, said in the line or the next one."""
    begin = clue.text.rfind("\n", max(0, clue.start - MOST_BEFORE), clue.start) + 1
    begin = max(begin, clue.start - MOST_BEFORE, clue.message.start)
    _, end = clue.sentence()
    end = min(clue.message.end, end + MOST_BEFORE)
    for ending in ENDED.finditer(clue.text, begin, end):
        span = Span(*ending.span())
        if "\n" not in clue.text[min(clue.end, span.start) : max(clue.start, span.end)]:
            return True
        mood = find_mood(clue.text, span, sentence_around(clue.text, span))
        if mood in {None, Mood.CODE}:
            return True
    return False
