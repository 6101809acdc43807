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

from loaderkit.budget.lexicon import compile_words, read_table

if TYPE_CHECKING:
    from collections.abc import Iterator

_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50, "E": 60}
_NAMES = {"kilo": "K", "kibi": "K", "mega": "M", "mebi": "M", "giga": "G", "gibi": "G"}
_UNIT = r"(?:(?:kilo|kibi|mega|mebi|giga|gibi)?bytes?|[KMGTPE]?i?B|[KMGTPE]i?)\b"
SIZE = rf"(?:0x[0-9a-f]{{2,16}} ?bytes?\b|\d[\d.,]{{0,30}}(?: ?|-){_UNIT})"
"""A number and its unit; KB and KiB are both 1024 bytes, as allocators mean them."""
_AMOUNT = compile_words(
    rf"(?<![\w.,])(?P<size>{SIZE})"
    r"(?: ?\( ?(?P<exact>\d[\d,]{0,24}) ?(?:bytes?|B) ?\))?"
    r"|(?<![\w.,])(?P<free>\d[\d.]{0,12})(?: ?[KMGT]i?B)? ?/ ?"
    r"(?P<total>\d[\d.]{0,12} ?[KMGT]i?B)\b"
)
_BARE = compile_words(
    r"(?:buffer|memory|block|data|array|tensor|malloc|calloc|realloc)?"
    r"(?: of)? ?\b(?:size|length)(?: of| =| ?:{1,2}|=)? ?(?P<bare>\d[\d,]{2,24}|"
    r"0x[0-9a-f]{2,16})\b(?! ?(?:[KMGTPE]i?B?\b|bytes|/|\.\d))"
    r"|\b(?:free|available|requested|required|used|total) (?:\w{1,10} )?memory ?[:=] ?"
    r"(?P<labelled>\d{4,24})\b(?! ?(?:[KMGTPE]i?B?\b|bytes|/|\.\d))"
)
"""Without a unit it is in bytes, but only behind "size" or a label such as "free
memory:": most numbers are no sizes."""

_CONTEXT = 90
"""Characters looked at on either side; the longest phrase of the table has 60."""
SAID = "said"
"""The role of an amount that other words of the message say too."""


class _Roles(NamedTuple):
    """The table of ``amount_roles.txt``, compiled."""

    behind: dict[str, re.Pattern[str]]
    before: dict[str, re.Pattern[str]]


@functools.cache
def _roles() -> _Roles:
    roles = _Roles({}, {})
    for (side, role), pattern in read_table("amount_roles.txt"):
        if side == "behind":
            words = rf"[ ,]{{0,3}}\)?[ ,]{{0,3}}(?:{pattern})"
            roles.behind[role] = compile_words(words)
        else:
            words = rf"\b(?:{pattern})(?P<mark>[ (=:\[]{{0,24}})$"
            roles.before[role] = compile_words(words)
    return roles


@dataclass(frozen=True)
class Amount:
    """One amount and what it is."""

    role: str | None
    """A field of :class:`~loaderkit.budget.messages.Message`; :data:`SAID` for one that
    other words say too, such as the active part of what is allocated; None: not
    understood."""
    size_bytes: int
    """How much."""
    start: int
    """Where it stands in the text."""
    words: str
    """The words around it."""


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

    >>> [_plain_number(said) for said in ("1900,00", "25,600,000", "1,024.5", "3,5")]
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
    """
    matches = [*_AMOUNT.finditer(text), *_BARE.finditer(text)]
    matches.sort(key=lambda match: match.start())
    previous_end = 0
    for match in matches:
        if match.start() < previous_end:
            continue
        # Versions and times have dots as well, and a letter behind them.
        with contextlib.suppress(ValueError):
            yield from list(_amounts_of(match, text, previous_end))
            previous_end = match.end()


def _amounts_of(match: re.Match[str], text: str, previous_end: int) -> Iterator[Amount]:
    said = match.groupdict()
    around = text[max(0, match.start() - 40) : match.end() + 40]
    words = " ".join(around.split())
    if said.get("bare") is not None:
        yield Amount("requested", parse_size(said["bare"]), match.start(), words)
    elif said.get("labelled") is not None:
        before = text[max(previous_end, match.start()) : match.start("labelled")]
        size = parse_size(said["labelled"])
        yield Amount(_role(before, ""), size, match.start(), words)
    elif said["free"] is not None:
        yield from _fraction(match, text, words)
    else:
        before = text[max(previous_end, match.start() - _CONTEXT) : match.start()]
        behind = text[match.end() : match.end() + _CONTEXT]
        size = parse_size(said["exact"] or said["size"])
        yield Amount(_role(before, behind), size, match.start(), words)


def _fraction(match: re.Match[str], text: str, words: str) -> Iterator[Amount]:
    """Read "(67.24/79.25 GiB)": a part of the whole, free or used."""
    total = match["total"]
    unit = total.lstrip("0123456789. ")
    part, whole = parse_size(f"{match['free']} {unit}"), parse_size(total)
    before = text[max(0, match.start() - _CONTEXT) : match.start()].lower()
    role = "free" if before.rfind("free") > before.rfind("used") else "in_use"
    yield Amount(role, part, match.start(), words)
    yield Amount("capacity", whole, match.start(), words)


def _role(before: str, behind: str) -> str | None:
    """Decide what an amount is; a label with a colon before it is never in doubt."""
    labels = [
        (role, match)
        for role, words in _roles().before.items()
        if (match := words.search(before))
    ]
    labelled = [
        (match.end() - match.start(), role)
        for role, match in labels
        if re.search(r"[:=]", match["mark"])
    ]
    if labelled:
        return max(labelled)[1]
    if any(role == SAID for role, _ in labels):
        return SAID
    for role, words in _roles().behind.items():
        if words.match(behind):
            return role
    if labels:
        return max((match.end() - match.start(), role) for role, match in labels)[1]
    return None
