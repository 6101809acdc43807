"""Amounts of memory in a text and what each is: asked for, free, held, a limit.  Pure.

What an amount is, the words around it say, in whatever order a system writes them:
"1.20 GiB is free", "free: 1.20 GiB", "of which only 1.20 GiB is available".
"""

from __future__ import annotations

import contextlib
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.diagnosis.lexicon import compile_words, read_table, split_names

if TYPE_CHECKING:
    from collections.abc import Iterator

_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50, "E": 60}
_NAMES = {"kilo": "K", "kibi": "K", "mega": "M", "mebi": "M", "giga": "G", "gibi": "G"}
_UNIT = r"(?:(?:kilo|kibi|mega|mebi|giga|gibi)?bytes?|[KMGTPE]?i?Bs?|[KMGT]i?)\b"
SIZE = rf"(?:0x[0-9a-f]{{2,16}} ?bytes?\b|\d[\d.,]{{0,30}}(?: ?|-){_UNIT})"
"""A number and its unit; KB and KiB are both 1024 bytes, as allocators mean them."""
_AMOUNT = compile_words(
    rf"(?<![\w.,])(?<!\s-)(?P<part>\d[\d.]{{0,12}})(?P<part_unit> ?{_UNIT})?"
    rf" ?(?:/|of(?: its| the| a total of)?) ?(?P<whole>\d[\d.]{{0,12}} ?{_UNIT})"
    rf"|(?<![\w.,])(?<!\s-)(?!(?<=[a-z]-)\d{{1,4}}b\b)(?P<size>{SIZE})"
    r"(?: ?\( ?(?P<exact>\d[\d,]{0,24}) ?(?:bytes?|B) ?\))?"
)
"""With a sign before it, it is what is missing, and no amount of anything; "llama-70b"
counts the parameters of a model."""
_BARE = compile_words(
    r"(?:buffer|memory|block|data|array|tensor|malloc|calloc|realloc)?"
    r"(?: of)? ?\b(?:size|length|len(?==))(?: of| =| ?:{1,2}|=)? ?[(\[]?"
    r"(?P<bare>\d[\d,]{2,24}|0x[0-9a-f]{2,16}|(?<=request\sof\ssize\s)\d{1,2})\b"
    r"(?! ?(?:[KMGTPE]i?B?\b|bytes|/|\.\d))"
    r"|\b(?:free|available|requested|required|used|total) (?:\w{1,10} )?"
    r"(?:memory ?(?:[:=]|of|is|was) ?(?=\d{4}|0\b)|bytes ?(?:[:=]|of|is|was) ?)"
    r"(?P<labelled>\d{1,24})\b(?! ?(?:[KMGTPE]i?B?\b|bytes|/|\.\d))"
    r"|\b(?:free|available|requested|required|needed)\W{1,3}"
    r"(?P<listed>\d{3,24})(?=[,;)\]]| but\b|\.?$)"
)
"""Without a unit it is in bytes, but only behind "size" or a label such as "free
memory:": most numbers are no sizes."""
_SIZED_LABEL = compile_words(
    r"\b(?P<label>(?:(?!\d)[\w-]{1,24} ){0,3}(?!\d)[\w-]{1,30}?)"
    rf"(?: ?[(\[](?:in )?|,? in |_)(?P<label_unit>{_UNIT})[)\]]?[\"']?"
    r" ?[:=]{1,2} ?(?P<sized>\d[\d.,]{0,24})\b(?!\.\d)"
    rf"(?! ?{_UNIT})"
)
"""A number whose unit stands in its label: "required (MB): 512", "limit_bytes=512"."""
_ENUMERATED = compile_words(
    rf"(?<![\w.,])(?P<first>\d[\d.,]{{0,24}}) ?(?P<shared_unit>{_UNIT})"
    rf"(?P<first_words>(?: (?!\d)\w{{1,12}}){{1,3}})(?:,| and|, and|, but) "
    rf"(?P<second>\d[\d.,]{{0,24}})(?! ?(?:/|%|{_UNIT}))"
    r"(?= (?:requested|required|needed|free|available|used|in use|allocated|reserved"
    r"|left|remaining)\b)"
)
"""Two amounts of which only the first says its unit: "0 bytes free, 48 requested"."""
_ARGUMENT = compile_words(
    r"\b(?:\w{0,20}alloc|mmap)\((?:[A-Z_|]{1,60}, ?)?(?P<argument>\d{1,20})\)"
    r"|\b\w{0,20}(?:m(?:re)?map|alloc|memalign|commit|reserve)\w{0,20}"
    r"\((?:(?!\d{4})[^(),\n]{1,40}, ?){0,3}"
    r"(?P<argument_of_several>\d{4,20})(?=, ?[\w(]|\))"
)
"""What a function that allocates was called with: its only argument, or the first long
number beside addresses and flags."""
_DESCRIBED = compile_words(
    r"(?<![\w.,])(?P<described>\d[\d.,]{0,24}) "
    r"(?P<adjective>free|available|unused|used|allocated) "
    r"(?P<described_unit>bytes|[KMGT]i?B)\b"
)
"""A number, what it is, and then its unit: "0 free bytes"."""
_PLAIN = compile_words(
    rf"(?<![\w.,:/#+-])(?P<plain>\d{{5,20}})\b(?![.,:/-]?\d)(?! ?{_UNIT})"
    r"(?! ?(?:tokens?|blocks?|samples?|steps?|rows?|ports?|files?|threads?|processes|"
    r"workers?|elements?|items?|images?|pages?|chunks?|nodes?|tasks?|jobs?|requests?|"
    r"times|characters?|param\w{0,6}|epochs?|iterations?|pixels?|points?|events?|"
    r"objects?|keys?|records?|vectors?|m?s|seconds?|milliseconds?)\b)"
)
"""A long number without a unit, and not of something else, such as tokens.  It is in
bytes where the words beside it say what of memory it is."""
_OF_A_NAME = compile_words(
    r"\bshape\W{0,3}(?:\d{1,12}, ?){0,5}$|"
    r"\b(?:[pugt]?id|port|seed|step|epoch|line|node|job|task|worker|process|"
    r"(?:\w{0,40}_)?(?:pages|count|tokens|rows|blocks|ids))\W{0,3}$"
)
"""Words before a number that is no amount."""
_BY_A_PROCESS = compile_words(r"\bby (?:this |the )?process\W{0,3}$")
_LARGEST_PROCESS_ID = 1 << 22
"""PID_MAX_LIMIT of Linux; Windows and macOS give smaller ones."""
_COMPARED = compile_words(
    r"(?<![\w.,])(?P<more>\d{5,20})(?:\.0{1,6})? ?> ?(?:\w{1,10}: ?)?"
    r"(?P<less>\d{5,20})(?:\.0{1,6})?(?![\w.])"
    rf"|(?<![\w.,])(?P<more_size>{SIZE}) ?>=? ?(?P<less_size>{SIZE})"
)
"""What was asked for, or is in use, and the smaller number that it had to fit into."""

_CONTEXT = 90
"""Characters looked at on either side; the longest phrase of the table has 60."""
SAID = "said"
"""The role of an amount that other words of the message say too."""
WHOLE = "whole"
"""The role of what another amount is a part of: a device, a machine or a limit."""
TOTAL = "total"
"""The role of what is only called a total: of what there is where what is used or free
stands beside it, else of what is allocated."""
OVERFULL = "overfull"
"""The role of a part that is larger than its whole: in use beyond a limit, or, on a
device, needed, since nothing can take more than a device has."""


_HEDGES = r"currently|about|approx\.?|approximately|around|roughly|just|still"
"""Between a label and its number: "request size (currently 8 GiB)"."""


class _Roles(NamedTuple):
    """The table of ``amount_roles.txt``, compiled."""

    behind: dict[str, re.Pattern[str]]
    before: dict[str, re.Pattern[str]]


@functools.cache
def _role_patterns() -> _Roles:
    roles = _Roles({}, {})
    for (side, role), pattern in read_table("amount_roles.txt"):
        if side == "word":
            continue
        if side == "behind":
            words = rf" {{0,3}}(?P<apart>,)? {{0,3}}\)?[ ,]{{0,3}}(?:{pattern})"
            roles.behind[role] = compile_words(words)
        else:
            mark = r"(?P<mark>[ (=:\[\"']{0,24})"
            words = rf"\b(?:{pattern})(?: reported)?{mark}(?:(?:{_HEDGES}) )?\Z"
            roles.before[role] = compile_words(words)
    return roles


@dataclass(frozen=True)
class Amount:
    """One amount and what it is."""

    role: str | None
    """A field of :class:`~loaderkit.budget.diagnosis.messages.Message`;
    :data:`WHOLE` and :data:`OVERFULL` in "2.1 GB of 2 GB"; :data:`TOTAL` for one that
    only its neighbours tell; :data:`SAID` for one that
    other words say too, such as the active part of what is allocated; None: not
    understood."""
    size_bytes: int
    """How much."""
    start: int
    """Where it stands in the text."""
    words: str
    """The words around it."""
    is_part: bool = False
    """Whether it stands with its whole, such as "2.1 GB of 2 GB": surer than alone."""
    is_bare: bool = False
    """Whether it is a number without a unit that only words of its clause tell."""


def parse_size(text: str) -> int:
    """Read a size as the allocators print it.

    Args:
        text: A number and a unit, a number of bytes, or a hexadecimal number.

    Returns:
        Bytes; KB and KiB are both 1024.

    Raises:
        ValueError: It is no size.

    >>> parse_size("1.5 GiB"), parse_size("25,600,000 bytes"), parse_size("1900,00 MiB")
    (1610612736, 25600000, 1992294400)
    """
    text = text.strip()
    if text.lower().startswith("0x"):
        return int(text.split()[0], 16)
    match = re.match(r"(\d[\d.,]*)\s*([a-z]*)", text, re.IGNORECASE)
    if match is None:
        msg = f"not a size: {text!r}"
        raise ValueError(msg)
    number = _plain_number(match[1].rstrip(".,"))
    unit = match[2].lower()
    power = _POWERS[_NAMES.get(unit[:4], unit[:1].upper().replace("B", ""))]
    if "." not in number:
        return int(number) << power
    return round(float(number) * (1 << power))


_WITH_COMMAS = re.compile(r"\d+(?:,\d+)*(?:\.\d+)?")
"""Commas between thousands (or lakhs), and a decimal point."""
_WITH_DOTS = re.compile(r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}")
"""The other way round; a single dot without a comma is a decimal point."""
_DECIMAL_COMMA = re.compile(r"\d+,(?:\d{1,2}|\d{4,})")


def _plain_number(digits: str) -> str:
    """Tell a decimal comma from the commas, or dots, between thousands.

    Raises:
        ValueError: It is no number, such as a time or a version.

    >>> [
    ...     _plain_number(digits)
    ...     for digits in ("1900,00", "25,600,000", "1,024.5", "3,5")
    ... ]
    ['1900.00', '25600000', '1024.5', '3.5']
    >>> _plain_number("25.600.000"), _plain_number("25.600,5")
    ('25600000', '25600.5')
    """
    if _DECIMAL_COMMA.fullmatch(digits):
        return digits.replace(",", ".")
    if _WITH_COMMAS.fullmatch(digits):
        return digits.replace(",", "")
    if _WITH_DOTS.fullmatch(digits):
        return digits.replace(".", "").replace(",", ".")
    msg = f"not a number: {digits!r}"
    raise ValueError(msg)


def find_amounts(text: str) -> Iterator[Amount]:
    """Find every amount of a text, in its order, with its role.

    Args:
        text: A message without the breaks and prefixes of a log.

    Yields:
        Amounts; an exact number in parentheses behind a rounded one replaces it.

    >>> text = "Tried to allocate 2 GiB. 1 GiB is free; capacity: 8 GiB"
    >>> [(amount.role, amount.size_bytes >> 30) for amount in find_amounts(text)]
    [('requested', 2), ('free', 1), ('capacity', 8)]
    >>> text = "in use: 7 of 8 GiB; limit=1073741824"
    >>> [(amount.role, amount.size_bytes >> 30) for amount in find_amounts(text)]
    [('in_use', 7), ('whole', 8), ('limit', 1)]
    """
    matches = [
        match for pattern in _AMOUNT_PATTERNS for match in pattern.finditer(text)
    ]
    # Of two at the same place the one that reads more of it is right.
    matches.sort(key=lambda match: (match.start(), -match.end()))
    previous_end = 0
    for match in matches:
        if match.start() < previous_end:
            continue
        # Versions and times have dots as well, and a letter behind them.
        with contextlib.suppress(ValueError):
            amounts = list(_amounts_of(match, text, previous_end))
            if amounts:
                yield from amounts
                previous_end = match.end()


_AMOUNT_PATTERNS = (
    _AMOUNT,
    _BARE,
    _COMPARED,
    _ARGUMENT,
    _DESCRIBED,
    _SIZED_LABEL,
    _ENUMERATED,
    _PLAIN,
)


def _amounts_of(match: re.Match[str], text: str, previous_end: int) -> Iterator[Amount]:
    """Give what one match says, and what of memory that is.

    Which group is filled tells which of ``_AMOUNT_PATTERNS`` it is a match of: each
    looks for the words of its role in other places.
    """
    groups = match.groupdict()
    around = text[max(0, match.start() - 40) : match.end() + 40]
    words = " ".join(around.split())
    # Not further back than the amount before this one: its words are its own.
    before = text[max(previous_end, match.start() - _CONTEXT) : match.start()]
    behind = text[match.end() : match.end() + _CONTEXT]
    if groups.get("bare") is not None:
        # "malloc of size 1073741824 failed": a size is what was asked for, unless the
        # words before it say otherwise.
        label = before + text[match.start() : match.start("bare")]
        role = _role_of_amount(label, "") or "requested"
        yield Amount(role, parse_size(groups["bare"]), match.start(), words)
    elif groups.get("labelled") is not None or groups.get("listed") is not None:
        # "Requested memory: 9013395456", "Requested: 400, available 264": the match
        # has the label in it, and what stands before it is of something else.
        name = "listed" if groups.get("labelled") is None else "labelled"
        label = text[match.start() : match.start(name)]
        size = parse_size(groups[name])
        yield Amount(_role_of_amount(label, ""), size, match.start(), words)
    elif groups.get("argument") or groups.get("argument_of_several"):
        size = parse_size(groups["argument"] or groups["argument_of_several"])
        yield Amount("requested", size, match.start(), words)
    elif groups.get("described") is not None:
        size = parse_size(f"{groups['described']} {groups['described_unit']}")
        # "0 free bytes", read as if it were "0 bytes free".
        described_role = _role_of_amount("", f" {groups['adjective']}")
        yield Amount(described_role, size, match.start(), words)
    elif groups.get("sized") is not None:
        # "model_memory_gb: 26.4"; the table of roles has words without underscores.
        size = parse_size(f"{groups['sized']} {groups['label_unit']}")
        label_role = _role_of_amount(f"{split_names(groups['label'])}: ", "")
        yield Amount(label_role, size, match.start(), words)
    elif groups.get("first") is not None:
        # "16 bytes available, 32 requested"
        first = parse_size(f"{groups['first']} {groups['shared_unit']}")
        second = parse_size(f"{groups['second']} {groups['shared_unit']}")
        first_role = _role_of_amount(before, groups["first_words"])
        yield Amount(first_role, first, match.start(), words)
        yield Amount(_role_of_amount("", behind), second, match.end(), words)
    elif groups.get("plain") is not None:
        # "Limit: 7463639450"; with neither a unit nor a label it is no amount at all.
        size = parse_size(groups["plain"])
        plain_role = None
        if not _is_name_or_count(size, before):
            plain_role = _role_of_amount(before, behind)
        if plain_role is not None:
            yield Amount(plain_role, size, match.start(), words, is_bare=True)
    elif groups.get("more") is not None or groups.get("more_size") is not None:
        yield from _amounts_of_comparison(match, text, words)
    elif groups.get("part") is not None:
        yield from _amounts_of_fraction(match, text, words)
    else:
        size = parse_size(groups["exact"] or groups["size"])
        yield Amount(_role_of_amount(before, behind), size, match.start(), words)


def _is_name_or_count(number: int, before: str) -> bool:
    """Whether a number without a unit names something, or counts it.

    >>> _is_name_or_count(1289748480, "Memory used by process ")
    False
    """
    if _BY_A_PROCESS.search(before) and number > _LARGEST_PROCESS_ID:
        return False
    clause = before[_clause_start(before) :]
    return _OF_A_NAME.search(before) is not None or _COUNTED.search(clause) is not None


_FREE = compile_words(r"free|avail|left\b|remaining")
_USED = compile_words(r"used|usage|using|was\b|in use")
_ASKED = compile_words(r"\balloc|request|\bacquire|\breserve")


def _amounts_of_fraction(
    match: re.Match[str], text: str, words: str
) -> Iterator[Amount]:
    """Read "(67.24/79.25 GiB)": a part of the whole, free, used or asked for."""
    whole_bytes = parse_size(match["whole"])
    unit = match["part_unit"] or match["whole"].lstrip("0123456789. ")
    if match["part_unit"] is None and _is_rounding(match["part"], whole_bytes):
        # "[1984585910/1.8gb]" is one amount, twice
        before = text[max(0, match.start() - _CONTEXT) : match.start()]
        behind = text[match.end() : match.end() + _CONTEXT]
        size = int(match["part"])
        yield Amount(_role_of_amount(before, behind), size, match.start(), words)
        return
    part_bytes = parse_size(f"{match['part']} {unit}")
    before = text[max(0, match.start() - _CONTEXT) : match.start()]
    role = "in_use"
    if _last_position(_FREE, before) > _last_position(_USED, before):
        role = "free"
    elif part_bytes > whole_bytes:
        role = OVERFULL
    yield Amount(role, part_bytes, match.start(), words, is_part=True)
    yield Amount(WHOLE, whole_bytes, match.start(), words)


def _is_rounding(digits: str, rounded_bytes: int) -> bool:
    """Whether a whole number is what another, rounded one says in bytes."""
    if not digits.isdigit():
        return False
    # "1.8gb" stands for anything up to 3 % away, "2gb" for more: chosen well above both
    # and below the next fraction that is told so, a tenth of a device in use.
    return abs(int(digits) - rounded_bytes) <= 0.1 * rounded_bytes


def _last_position(words: re.Pattern[str], text: str) -> int:
    """Where the last of some words stands, -1 where none does."""
    return max((match.start() for match in words.finditer(text)), default=-1)


_SLURM = re.compile("slurm", re.IGNORECASE)


def _amounts_of_comparison(
    match: re.Match[str], text: str, words: str
) -> Iterator[Amount]:
    """Read "exceeded memory limit (4213032 > 4194304)"."""
    # Slurm counts in KiB, without saying so.
    unit = 1 << 10 if _SLURM.search(text) else 1
    if match["more"] is None:
        more, less = parse_size(match["more_size"]), parse_size(match["less_size"])
    else:
        more, less = int(match["more"]) * unit, int(match["less"]) * unit
    before = text[max(0, match.start() - _CONTEXT) : match.start()]
    # "requested 8 GiB > 4 GiB" says what is free, "4213032 > 4194304" what is allowed.
    is_request = _ASKED.search(before) is not None
    role_of_more = "requested" if is_request else "in_use"
    yield Amount(role_of_more, more, match.start(), words)
    role_of_less = "free" if is_request else "limit"
    start = max(match.start("less"), match.start("less_size"))
    yield Amount(role_of_less, less, start, words)


def _role_of_amount(before: str, behind: str) -> str | None:
    """Decide what an amount is; a label with a colon before it is never in doubt."""
    labels = _labels_at_end(before) or _labels_at_end(_EXPLAINED.sub("", before))
    labelled = [
        (match.end() - match.start(), role)
        for role, match in labels
        # "Allocation failed: 300 MiB unused" labels no amount.
        if re.search(r"[:=]", match["mark"]) and "fail" not in match.group().lower()
    ]
    if labelled:
        return max(labelled)[1]
    if any(role == SAID for role, _ in labels):
        return SAID
    for role, words in _role_patterns().behind.items():
        match_behind = words.match(behind)
        if match_behind is None:
            continue
        # Behind a comma stands what the next number is, if words before this one fit,
        # or if that number follows: "size: 712 MiB, available 300 MiB".
        is_of_next = labels or _NEXT_NUMBER.match(behind, match_behind.end())
        if not (match_behind["apart"] and is_of_next):
            return role
    if labels:
        return max((match.end() - match.start(), role) for role, match in labels)[1]
    return _role_of_clause(before, behind)


_NEXT_NUMBER = re.compile(r"[ :=]{0,3}(?:(?:is|of|memory) )?\d")
_EXPLAINED = re.compile(
    r"\s{0,3}\((?![kmgt]?i?b(?:ytes)?\b)[^()\d]{1,60}\)(?=\s{0,40}[:=]\s{0,3}\Z)",
    re.IGNORECASE,
)
"""What explains a label, between it and its colon: "PyTorch limit (set by user-supplied
memory fraction) : 2.00 GiB".  A unit there is none."""


def _labels_at_end(before: str) -> list[tuple[str, re.Match[str]]]:
    """List the roles whose words end a text, and where they match."""
    return [
        (role, match)
        for role, words in _role_patterns().before.items()
        if (match := words.search(before))
    ]


_CLAUSE_START = re.compile(r"[,;:()|=.\]](?=[^\w]{0,4}[A-Za-z])|\n|\b\d+(?=\s)")
"""Before a number: where the clause begins that labels it.  A mark with nothing but
brackets between it and the number belongs to the label."""
_LIST_OF_LABELS = re.compile(r"(?<![\w/])[a-z]+/[a-z]+/[a-z]", re.IGNORECASE)
"""One label for several numbers: "current/max/try size = 20 GiB, 23 GiB, 15 GiB"."""
_COUNTED = compile_words(
    r"\b(?:tokens?|seq|sequence|len|length|rows|count|number of|blocks|pages|samples)\b"
)
"""In a clause: its number without a unit counts something, and is in no bytes."""
_CLAUSE_END = re.compile(r"[,;:()|.\n\]]|\d|\s--?\s")
_DIRECTLY = compile_words(
    r"[ )\]]{0,3}(?:(?:of|is|are|was|were|being|been|still|already|memory) ){0,3}"
    r"(\w{1,20})"
)
"""Behind a number: its own word, as in "are still free"."""


@functools.cache
def _role_words() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Give the single words of roles, the one first that decides beside others."""
    return tuple(
        (role, compile_words(rf"(?<![a-z])(?:{words})"))
        for (side, role), words in read_table("amount_roles.txt")
        if side == "word"
    )


def _clause_start(before: str) -> int:
    """Give where the clause begins that ends with this text."""
    return max((match.end() for match in _CLAUSE_START.finditer(before)), default=0)


def _role_of_clause(before: str, behind: str) -> str | None:
    """Decide by single words of the clause that a number stands in.

    >>> _role_of_clause("Out of memory, max alloc size supported by it is ", " bytes")
    'limit'
    """
    before = before[_clause_start(before) :]
    if _LIST_OF_LABELS.search(before):
        return None
    end = _CLAUSE_END.search(behind)
    behind = behind[: end.start()] if end else behind
    directly = _DIRECTLY.match(behind)
    for clause in (directly[1] if directly else "", before, behind):
        words = split_names(clause)
        for role, pattern in _role_words():
            if pattern.search(words):
                return role
    return None
