"""What the text of an out-of-memory error says: its kind and its numbers.  Pure.

``oom_patterns.txt`` lists the wordings of real reports in order of trust; what it does
not know is read from its words (``grammar.py``), and amounts always are
(``amounts.py``).
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from loaderkit.budget.diagnosis.amounts import (
    OVERFULL,
    SIZE,
    TOTAL,
    WHOLE,
    find_amounts,
    parse_size,
)
from loaderkit.budget.diagnosis.clues import TextPhrases
from loaderkit.budget.diagnosis.evidence import is_prose, weigh_evidence
from loaderkit.budget.diagnosis.grammar import find_exhaustion, find_mention
from loaderkit.budget.diagnosis.lexicon import (
    HOST_PLACE,
    backend_named,
    compile_words,
    is_about_something_else,
    speaks_of_the_host,
)
from loaderkit.budget.diagnosis.log_text import clean_log, with_levels_as_labels
from loaderkit.budget.diagnosis.moods import Span, find_mood
from loaderkit.budget.diagnosis.oom_patterns import (
    MessagePattern,
    fields_of,
    message_patterns,
)
from loaderkit.budget.diagnosis.quotations import set_quotations_apart
from loaderkit.budget.diagnosis.sentences import (
    is_of_another_message,
    sentence_around,
    statements_behind,
)
from loaderkit.budget.diagnosis.translations import in_english
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from loaderkit.budget.diagnosis.amounts import Amount
    from loaderkit.budget.diagnosis.grammar import Exhaustion

SIZES = (
    "requested",
    "free",
    "allocated",
    "reserved",
    "reserved_unallocated",
    "in_use",
    "private_pools",
    "other",
    "limit",
    "capacity",
    "total_vm",
    "anon_rss",
)
"""Fields of a message that are bytes, in the order in which they are printed."""
_WHOLE_NUMBERS = frozenset({"device", "pid", "errno"})
_LARGE_MAP_BYTES = 64 << 20
"""A mapping above it failed for its size, one below it for the number of mappings.
Chosen between a shared tensor of a batch and the weights of a model."""
_LONGEST_MESSAGE = 1500
"""Characters; the longest of the corpora, with torch's advice, has 900."""
_NEARBY = 300
"""Characters around a wording in which another system names a device or an amount."""
_MOST_UNREAD = 3
"""Amounts printed as not understood: more would bury the diagnosis."""
_MOST_REASONS = 3
"""Reasons printed why words report nothing."""
_ON_DEVICE = frozenset(
    {"device_oom", "device_oom_async", "device_limit", "buffer_too_large", "oom"}
)
_NAMES_A_DEVICE = _ON_DEVICE | {"library_alloc", "masked_oom"}
"""Kinds of failures on a device, inside of its libraries too."""
_DEVICE_ROLES = frozenset(SIZES) - {"total_vm", "anon_rss"}
_READ_ROLES: dict[str, frozenset[str]] = {
    "device_oom": _DEVICE_ROLES,
    "device_oom_async": _DEVICE_ROLES,
    "device_limit": _DEVICE_ROLES,
    "buffer_too_large": _DEVICE_ROLES,
    "oom": _DEVICE_ROLES,
    "host_alloc": frozenset({"requested", "free", "in_use", "limit"}),
    "killed": frozenset(
        {"total_vm", "anon_rss", "in_use", "limit", "capacity", "free"}
    ),
    "shm": frozenset({"requested", "free"}),
    **dict.fromkeys(
        ("map_count", "pinned", "pagefile", "comm_oom", "library_alloc", "masked_oom"),
        frozenset({"requested"}),
    ),
}
"""The amounts that a message of a kind has; others in it are about something else."""
_DEVICE = re.compile(r"\b(CUDA|HIP|ROCm|XPU|NPU|MPS)\b", re.IGNORECASE)
_DEVICE_INDEX = compile_words(
    r"\b(?:[A-Z]{1,2}PU|MLU|MUSA|DCU) (\d{1,3})(?:;| has|\.|,)|on device (\d{1,3})\b"
    r"|device ordinal (\d{1,3})\b"
    r"|\b(?:cuda|xpu|npu|hip|gpu):(\d{1,3})\b|\bGPU=(\d{1,3})\b|\bCUDA(\d{1,3}) buffer"
    r"|\bdevice\(id:(\d{1,3})\)|\bROCm(\d{1,3}) buffer"
    r"|\b(?:dev|device|gpu|npu|xpu|card)(?:[ _](?:id|idx|index|ordinal))?"
    r" ?[:=#]? ?[\[(]?"
    r"(\d{1,2})\b(?! ?(?:[KMGT]?i?B\b|[KMGT]i?\b|%|\.\d|/))"
)
_ANY_PROCESS = compile_words(r"\b(?:pid|process)(?:\(s\))?[ =:]{1,2}[\[(]?(\d{1,9})\b")
_SAID_BY_A_SHELL = compile_words(r": line \d{1,6}: +(\d{1,9}) Killed\b")
_LOGGED_BY = re.compile(r"\((?:[\w.:-]{1,60} ){0,3}")
"""Before a process at the start of a line: "(RayTrainWorker pid=2211, ip=10.0.0.3)"."""
_PROCESS = compile_words(rf"\bProcess (\d{{1,9}}) has ({SIZE}) memory in use")


@dataclass(frozen=True)
class Message:
    """What one error text states.  Amounts in bytes; None where it states nothing."""

    is_oom: bool | str = False
    """True, False, or "maybe" when the text alone cannot tell."""
    backend: str | None = None
    """"cuda", "hip", "xpu", "npu", "mps", "cpu" (an allocation) or "host" (limits)."""
    kind: str | None = None
    """Such as "device_oom", "device_limit", "shm", "killed"; None: not recognised."""
    device: int | None = None
    """Index of the device."""
    pid: int | None = None
    """Process named by the text."""
    requested: int | None = None
    """What was asked for."""
    capacity: int | None = None
    """What the whole device has."""
    free: int | None = None
    """What nobody had taken."""
    allocated: int | None = None
    """In live tensors."""
    reserved: int | None = None
    """Held by the allocator, live tensors included (on MPS: its heaps)."""
    reserved_unallocated: int | None = None
    """Held by the allocator and not in use."""
    in_use: int | None = None
    """Held by this process, its context and other libraries included."""
    private_pools: int | None = None
    """Inside graph-private pools."""
    limit: int | None = None
    """A cap set by software below the capacity."""
    other: int | None = None
    """MPS: held by Metal outside the heaps."""
    pool: str | None = None
    """MPS: "private" or "shared"."""
    procs: list[list[int]] | None = None
    """Processes on the device, each ``[pid, bytes]``."""
    shape: list[int] | None = None
    """Shape of the array that was asked for."""
    dtype: str | None = None
    """Its element type."""
    errno: int | None = None
    """Number of the system's error."""
    total_vm: int | None = None
    """Address space of a killed process."""
    anon_rss: int | None = None
    """Private memory of a killed process."""
    raw: str = field(default="", repr=False)
    """The text itself."""
    unread: tuple[str, ...] = ()
    """Parts of the text that look as if they mattered and were not understood."""


_REASON = 200
"""Characters on either side of a wording in which the system's reason stands."""
_OTHER_REASON = re.compile(
    r"permission denied|no such file|not permitted|read-only file", re.IGNORECASE
)
_REASON_BEHIND = re.compile(
    r"\w*(?: [\w-]{1,20}){0,3}? ?(?:[:(,]|-|\u2013) ?(?P<reason>[^\n;]{1,100})"
)
"""What a program says right behind what it could not do."""


def read_message(text: str) -> Message:
    """Recognise an error text and take its numbers.

    Args:
        text: A message, a traceback or a piece of a log; of several messages the
            surest counts.

    Returns:
        What it states; ``kind`` is None when nothing is recognised.

    >>> message = read_message("RuntimeError: Invalid buffer size: 19.45 GB")
    >>> message.kind, message.backend, message.requested
    ('buffer_too_large', 'mps', 20884278477)
    >>> read_message("a friend of mine ran out of memory").is_oom
    False
    >>> read_message("FATAL: memory usage exceeds the limit").is_oom
    True
    """
    cleaned = clean_log(in_english(text))
    if "\\u" in text:  # JSON writes other alphabets with escapes, which are read now
        cleaned = in_english(cleaned)
    message = _read_cleaned(set_quotations_apart(cleaned))
    if message.kind is None:
        # The level of a log is taken away with its prefixes, so that lines can be
        # joined; where nothing else says that it is an error's text, the level does.
        labelled = with_levels_as_labels(cleaned, text)
        if labelled != cleaned:
            as_error = _read_cleaned(set_quotations_apart(labelled))
            message = message if as_error.is_oom is False else as_error
    return replace(message, raw=text)


def _read_cleaned(cleaned: str) -> Message:
    """Recognise an error text without what a log added to it."""
    phrases = TextPhrases(cleaned)

    # A sure wording knows more than its words say: which number is which, and why.
    wording, match = _first_pattern_match(phrases)
    if wording is not None and match is not None and wording.is_oom is True:
        return _read_pattern_match(cleaned, wording, match)

    # Of one that is not sure, and of none, the words decide.
    finding = find_exhaustion(cleaned, phrases)
    if finding is not None and not _pattern_knows_better(wording, match, finding):
        return _read_finding(cleaned, finding)
    if wording is not None and match is not None:
        message = _read_pattern_match(cleaned, wording, match)
        if finding is not None and _confirms_pattern(finding, wording, match):
            message = replace(message, is_oom=True)
        return message

    # Nothing is reported: say which words only look like it.
    mention = find_mention(phrases)
    if mention is None:
        return Message()
    unread = f'"{mention.words}" tells of no event here'
    if mention.reasons:
        unread += f": {', '.join(mention.reasons[:_MOST_REASONS])}"
    return Message(unread=(unread,))


def _first_pattern_match(
    phrases: TextPhrases,
) -> tuple[MessagePattern | None, re.Match[str] | None]:
    text = phrases.text
    for wording in message_patterns():
        if not wording.pattern.can_match(phrases.folded.small):
            continue
        matches = itertools.islice(
            wording.pattern.finditer(phrases.folded), _MOST_MATCHES
        )
        for match in matches:
            if _is_of_a_device(wording, text, match):
                continue
            if _is_only_spoken_of(wording, phrases, match):
                continue
            if not _has_other_reason(wording, text, match):
                return wording, match
    return None, None


_MOST_MATCHES = 8
"""Of one wording: the first can stand in the line of code that a traceback shows, and
the error below it.  As many as lines that differ in their numbers only are kept."""


def _is_only_spoken_of(
    wording: MessagePattern, phrases: TextPhrases, match: re.Match[str]
) -> bool:
    """Whether a wording stands where nothing is reported.

    Args:
        wording: What was found.
        phrases: The text, and what it says of exhaustion.
        match: Where it was found.

    Returns:
        False where it can be a report.
    """
    text = phrases.text
    if _SAID_BY_A_SHELL.match(match.group()):
        return False  # what stands behind is the command as its script has it
    phrase = Span(match.start(), match.end())
    begin, end = sentence_around(text, phrase)
    sentence = Span(begin, min(end, len(text)))
    if find_mood(text, phrase, sentence, is_sure=True) is not None:
        return True
    if _joins_prose(text, phrase):
        return True
    if wording.is_oom is False:
        return False  # of look-alikes only the name would change
    if wording.is_oom is not True and match.start() in phrases.stretches_spoken_of:
        return True
    if wording.is_oom == "maybe" and wording.kind == "killed":
        around = text[max(0, match.start() - _REASON) : match.end() + _REASON]
        if _ENDED_BY_A_PROBE.search(around):
            return True
    if wording.is_oom is not True and wording.kind not in _WEIGHED_GUESSES:
        return False
    evidence = weigh_evidence(text, phrase, sentence)
    weight = evidence.weight + _WEIGHT_OF_A_WORDING
    if wording.is_oom is True and _has_figures(text, phrase):
        weight += _WEIGHT_OF_FIGURES
    return weight < 0


_WEIGHT_OF_FIGURES = 10
"""Who pastes an error above a sentence of his own pastes its class and its figures.
Chosen: as much as a person's sentence, with articles and clauses, speaks against it."""
_CLASS_BEFORE = re.compile(r"(?:\A|\n)[\w.]{0,100}(?:Error|Exception): \Z")
_FIGURE = re.compile(r"(?<![\w.])\d[\d.,]{0,20} ?(?:[KMGT]i?B\b|bytes\b)|\(\d[\d, ]*\)")


def _has_figures(text: str, phrase: Span) -> bool:
    """Whether a wording that follows an error's class has an amount."""
    start = max(0, phrase.start - _REASON)
    is_labelled = _CLASS_BEFORE.search(text[start : phrase.start]) is not None
    return is_labelled and _FIGURE.search(text[phrase.start : phrase.end]) is not None


def _joins_prose(text: str, phrase: Span) -> bool:
    """Whether a wording with a gap begins and ends in two sentences that are prose."""
    first = sentence_around(text, Span(phrase.start, phrase.start))
    if phrase.end <= first.end:
        return False
    last = sentence_around(text, Span(phrase.end, phrase.end))
    return all(is_prose(text[slice(*sentence)]) for sentence in (first, last))


_ENDED_BY_A_PROBE = re.compile(
    r"probe (?:of liveness )?fail|liveness probe|probe ?failure"
    r"|probe of liveness failed",
    re.IGNORECASE,
)
"""Beside a process that was killed: who killed it, and for what."""
_WEIGHED_GUESSES = frozenset({"killed", "library_alloc"})
"""Guesses whose words stand in manuals too; of others the text around says little."""
_WEIGHT_OF_A_WORDING = 4
"""What speaks for a report in the wording itself; from the same regression as the rows
of ``evidence.txt``."""


def _is_of_a_device(wording: MessagePattern, text: str, match: re.Match[str]) -> bool:
    """Whether a wording of programs on the host is used by one of a device here."""
    if wording.kind != "host_alloc" or speaks_of_the_host(match.group()):
        return False
    start, end = match.span()
    earliest, latest = max(0, start - _REASON), end + _REASON
    line_start = text.rfind("\n", earliest, start) + 1
    line_end = text.find("\n", end, latest)
    before = text[max(line_start, earliest) : start]
    behind = text[end : line_end if line_end >= 0 else latest]
    return any(
        backend_named(words) is not None and HOST_PLACE.search(words) is None
        for words in (before, behind)
    )


def _has_other_reason(wording: MessagePattern, text: str, match: re.Match[str]) -> bool:
    """Whether the text says for which other reason memory could not be had."""
    if wording.kind == "shm":
        around = text[max(0, match.start() - _REASON) : match.end() + _REASON]
        return _OTHER_REASON.search(around) is not None
    if wording.kind != "pinned":
        return False
    behind = _REASON_BEHIND.match(text, match.end())
    # As it would stand behind any other allocation that failed.
    return behind is not None and is_about_something_else(f"failed: {behind['reason']}")


def _confirms_pattern(
    finding: Exhaustion, wording: MessagePattern, match: re.Match[str]
) -> bool:
    """Whether such words stand beside a kill, or an error that hides its cause."""
    begin, end = finding.region
    if not (match.start() < end and begin < match.end()):
        return False
    if wording.kind == "masked_oom":
        is_apart = finding.end <= match.start() or match.end() <= finding.start
        return is_apart and not finding.is_guess and finding.kind in _ON_DEVICE
    return wording.kind == "killed" and finding.kind in {"oom", "killed", "host_alloc"}


def _pattern_knows_better(
    wording: MessagePattern | None,
    match: re.Match[str] | None,
    finding: Exhaustion,
) -> bool:
    """Whether a wording that is not sure knows better what a phrase is about."""
    if wording is None or match is None:
        return False
    if wording.is_oom == "maybe" and wording.kind != finding.kind:
        begin, end = finding.region
        return match.start() < end and begin < match.end()
    return match.start() < finding.end and finding.start < match.end()


def _read_pattern_match(
    text: str, wording: MessagePattern, match: re.Match[str]
) -> Message:
    groups = fields_of(match)
    backend = _canonical_backend(groups.pop("backend", None), wording.backend)
    values = {name: _field_value(name, words) for name, words in groups.items()}
    message = Message(
        is_oom=wording.is_oom, backend=backend, kind=wording.kind, **values
    )
    if wording.kind == "device_oom_async":
        message = _with_request_nearby(message, text, match)
    elif wording.kind in _READ_ROLES:
        end = min(
            _start_of_next(wording, text, match), match.start() + _LONGEST_MESSAGE
        )
        behind = sentence_around(text, Span(match.end(), match.end())).end
        stated = text[match.start() : min(behind, end)]
        if behind < end:
            stated += statements_behind(text, behind, end)
        message = _with_amounts(message, stated)
        if wording.kind == "pagefile" and message.requested is None:
            # A call and its arguments stand before the words of Windows.
            line = text.rfind("\n", max(0, match.start() - _NEARBY), match.start()) + 1
            before = _with_amounts(message, text[line : match.start()])
            message = replace(message, requested=before.requested)
    if message.is_oom is True:
        line_end = text.find("\n", match.end())
        if line_end < 0:
            line_end = len(text)
        message = _with_errno(message, text, match.start(), line_end)
    if message.kind == "killed" and message.pid is None:
        line = text.rfind("\n", max(0, match.start() - _NEARBY), match.start()) + 1
        message = replace(message, pid=_process_named(text, line, match.end()))
    if message.is_oom is True and message.backend is None:
        around = text[max(0, match.start() - _NEARBY) : match.end() + _NEARBY]
        message = replace(message, backend=backend_named(around))
    return _correct_kind_and_backend(message, text)


def _start_of_next(wording: MessagePattern, text: str, match: re.Match[str]) -> int:
    """Where the same message stands again, such as another rank's."""
    opening = match.group()[:_OPENING].lower()
    for again in wording.pattern.written.finditer(text, match.end()):
        if again.group()[:_OPENING].lower() == opening:
            return again.start()
    return len(text)


_OPENING = 10
"""Characters of a message that tell it from another one with the same meaning."""


def _with_request_nearby(message: Message, text: str, match: re.Match[str]) -> Message:
    """Where a driver's error stands beside an amount that was asked for, take it."""
    begin = max(0, match.start() - _NEARBY)
    begin = max(begin, text.rfind("\n", begin, match.start()) + 1)
    nearby = replace(message, kind="device_oom")
    behind = sentence_around(text, Span(match.end(), match.end())).end
    end = match.end() + _NEARBY
    stated = text[begin : min(behind, end)]
    if behind < end:
        stated += statements_behind(text, behind, end)
    nearby = _with_amounts(nearby, stated)
    if nearby.requested is None:
        return replace(message, device=nearby.device, capacity=nearby.capacity)
    return nearby


def _read_finding(text: str, finding: Exhaustion) -> Message:
    begin, end = finding.region
    is_oom = "maybe" if finding.is_guess else True
    empty = Message(is_oom=is_oom, backend=finding.backend, kind=finding.kind)
    message = _with_amounts(empty, finding.stated)
    if message.requested is None and "requested" in _READ_ROLES.get(finding.kind, ()):
        # What was asked for can stand in the line before, with all that belongs to it.
        lines_before = text[max(0, begin - _NEARBY) : begin].rstrip("\n")
        above = lines_before.rpartition("\n")[2]
        if is_of_another_message(above):
            above = ""
        before = _with_amounts(empty, above)
        if before.requested is not None:
            message = _fill_missing_sizes(message, before)
    message = _with_errno(message, text, begin, end)
    return _correct_kind_and_backend(message, finding.stated)


def _with_errno(message: Message, text: str, begin: int, end: int) -> Message:
    """Fill in the number of the system's error; a device has numbers of its own."""
    if message.backend not in {"host", "cpu"} or message.errno is not None:
        return message
    if message.kind == "pagefile":
        # Windows says the number before its words or behind them; it has only one.
        is_said = _ERROR_COMMITMENT_LIMIT.search(text) is not None
        return replace(message, errno=1455) if is_said else message
    match = _ERRNO.search(text, begin, end)
    if match is None:
        return message
    return replace(message, errno=int(match[match.lastindex or 0]))


_ERROR_COMMITMENT_LIMIT = re.compile(r"\b1455\b")
_ERRNO = compile_words(
    r"\berrno[ =:]{0,3}(\d{1,4})\b|(?:memory|device|unavailable) \((\d{1,3})\)"
    r"|os error (\d{1,4})\b|\((\d{1,4})(?:: ?|\) ?)cannot allocate memory"
)


def _fill_missing_sizes(message: Message, other: Message) -> Message:
    """Fill in the amounts that another part of the text states."""
    missing = [name for name in SIZES if getattr(message, name) is None]
    return replace(message, **{name: getattr(other, name) for name in missing})


def _with_amounts(message: Message, text: str) -> Message:
    """Fill in the amounts of a message; the first of a role counts."""
    roles = _READ_ROLES.get(message.kind or "", frozenset())
    sizes: dict[str, Any] = {}
    unread = []
    amounts = _tell_totals(list(find_amounts(text)))
    amounts = _tell_unnamed_apart(amounts)
    amounts = _tell_what_failed(amounts, text)
    for amount in sorted(amounts, key=_trust_order):
        field_name = _field_of_role(amount.role, message.kind, text)
        if field_name is None:
            unread.append(f"{format_bytes(amount.size_bytes)} in: {amount.words}")
        elif field_name in roles and getattr(message, field_name) is None:
            sizes.setdefault(field_name, amount.size_bytes)
    if "requested" in roles and message.device is None:
        device = _DEVICE_INDEX.search(text)
        if device is not None and message.kind in _NAMES_A_DEVICE:
            message = replace(message, device=int(device[device.lastindex or 0]))
    if message.kind in {"killed", "shm"} and message.pid is None:
        message = replace(message, pid=_process_named(text, 0, len(text)))
    if message.kind not in _ON_DEVICE:
        return replace(message, procs=None, unread=(), **sizes)
    return replace(
        message,
        procs=_processes_named(text) or None,
        unread=tuple(unread[:_MOST_UNREAD]),
        **sizes,
    )


def _processes_named(text: str) -> list[list[int]]:
    """Give each process on a device with what it holds, ``[pid, bytes]``."""
    processes = []
    for pid, size_text in _PROCESS.findall(text):
        size_bytes = _size_or_none(size_text)
        if size_bytes is not None:
            processes.append([int(pid), size_bytes])
    return processes


def _process_named(text: str, start: int, end: int) -> int | None:
    """Give the first process that the text names, but for who logged the line."""
    for process in _ANY_PROCESS.finditer(text, start, end):
        line = text.rfind("\n", 0, process.start()) + 1
        if _LOGGED_BY.fullmatch(text, line, process.start()) is None:
            return int(process[1])
    # A scheduler names its job, and the shell above it the process.
    said_by_a_shell = _SAID_BY_A_SHELL.search(text)
    return None if said_by_a_shell is None else int(said_by_a_shell[1])


def _tell_totals(amounts: list[Amount]) -> list[Amount]:
    """Say of each total whether it is the whole device or what is allocated of it."""
    parts = {"in_use", "free"}
    has_parts = any(amount.role in parts for amount in amounts)
    role = WHOLE if has_parts else "allocated"
    return [
        replace(amount, role=role) if amount.role == TOTAL else amount
        for amount in amounts
    ]


def _tell_unnamed_apart(amounts: list[Amount]) -> list[Amount]:
    """Give a role to two amounts that no word tells: what is larger was asked for."""
    unnamed = [amount for amount in amounts if amount.role is None]
    is_known = any(amount.role in {"requested", OVERFULL} for amount in amounts)
    if is_known or len(amounts) != 2 or len(unnamed) != 2:
        return amounts
    if unnamed[0].size_bytes <= unnamed[1].size_bytes:
        return amounts
    asked, whole = unnamed
    named = {id(asked): OVERFULL, id(whole): WHOLE}
    return [
        replace(amount, role=named.get(id(amount), amount.role)) for amount in amounts
    ]


_FAILED_ALLOCATION = compile_words(
    r"(?:alloc(?:ation)? (?:failed|failure)"
    r"|(?:failed|unable) to (?:re)?alloc(?:ate)?\b)"
    r"[^\n(]{0,80}\(\d[\d.,]{0,20} ?(?:[KMGT]?i?B|bytes)\)"
)
"""With an amount in brackets; "70B" in the name of a model is none."""


def _tell_what_failed(amounts: list[Amount], text: str) -> list[Amount]:
    """Give the only amount of a failed allocation its role: nothing else was counted.

    >>> from loaderkit.budget.diagnosis.amounts import find_amounts
    >>> text = "allocation failed for tensor 'blk.14' (4096 bytes)"
    >>> [amount.role for amount in _tell_what_failed(list(find_amounts(text)), text)]
    ['requested']
    """
    if len(amounts) != 1 or amounts[0].role is not None:
        return amounts
    if _FAILED_ALLOCATION.search(text) is None:
        return amounts
    return [replace(amounts[0], role="requested")]


def _trust_order(amount: Amount) -> int:
    """Order amounts; Python sorts stably, so that the first of equals stays first."""
    if amount.is_part:
        return 0
    if amount.is_bare:
        return 3
    # What "would be" in use is said where the usage itself is not.
    return 2 if amount.role == OVERFULL else 1


def _field_of_role(role: str | None, kind: str | None, text: str) -> str | None:
    """Give the field that an amount of a role belongs to, in a message of a kind."""
    is_device = kind in _ON_DEVICE
    if kind == "oom" and _OF_A_JOB.search(text):
        is_device = False
    if role == OVERFULL:
        return "requested" if is_device else "in_use"
    if role == "allocated" and kind == "killed":
        return "limit"  # a scheduler allocates what a job may use at most
    if role != WHOLE:
        return role
    # On the host a whole is the limit of a job, unless it is said to be the machine's.
    is_all = is_device or _OF_A_MACHINE.search(text) is not None
    return "capacity" if is_all else "limit"


_OF_A_JOB = compile_words(
    r"\b(?:container|job|pod|worker|replica)\b"
    r"|\b(?:quota|budget|limit) (?:was |is |has been )?(?:exceeded|reached|exhausted)\b"
)
"""Whose whole is a limit that software sets."""
_OF_A_MACHINE = compile_words(
    r"memory (?:on|of) (?:the |this )?(?:node|machine|host)|total capacity|node running"
    r"|(?:node|machine|host|system) memory"
)


def _canonical_backend(word: str | None, usual: str | None) -> str | None:
    if word is None:
        return usual
    name = word.lower()
    return {"gpu": "cuda", "rocm": "hip", "level_zero": "xpu"}.get(name, name)


def _size_or_none(text: str) -> int | None:
    """Read a size; None where what stands in its place is none."""
    try:
        return parse_size(text)
    except ValueError:
        return None


def _field_value(name: str, text: str) -> Any:
    if name in SIZES:
        return _size_or_none(text)
    if name in _WHOLE_NUMBERS:
        return int(text)
    if name == "shape":
        return [int(n) for n in re.findall(r"-?\d+", text)]
    return text.lower() if name == "pool" else text


def _correct_kind_and_backend(message: Message, text: str) -> Message:
    """Tell apart what one wording is used for."""
    if message.backend is None and (named := _DEVICE.search(text)):
        message = replace(message, backend=_canonical_backend(named[1], None))
    if message.kind == "map_count" and (message.requested or 0) >= _LARGE_MAP_BYTES:
        return replace(message, kind="host_alloc", backend="cpu")
    return message


def request_of(message: Message) -> int | None:
    """Give what was asked for, from the shape and element type where need be.

    >>> said = "Unable to allocate array with shape (9681, 9681) and data type float64"
    >>> request_of(read_message("MemoryError: " + said))
    749774088
    """
    if message.requested is not None or message.shape is None:
        return message.requested
    width = _WIDTHS.get((message.dtype or "").removeprefix("torch."))
    return None if width is None else width * math.prod(message.shape)


_WIDTHS = {
    **dict.fromkeys(("float64", "int64", "uint64", "double", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "float"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "half"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    "complex128": 16,
}


def as_fields(message: Message) -> dict[str, Any]:
    """Give every field by its name, for a program."""
    return {f.name: getattr(message, f.name) for f in fields(Message)}
