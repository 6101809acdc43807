"""Which processors libgomp ties threads to, by ``OMP_PLACES`` and its like.  Pure.

Measured on the libgomp that torch 2.13 brings along: its tests compare what is said
here with what the library does, over generated values.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_BLANKS = r"[ \t\n\v\f\r]*"
_TOPOLOGY = re.compile(
    rf"{_BLANKS}(?:threads|cores|sockets){_BLANKS}"
    rf"(?:\({_BLANKS}(?P<count>[+-]?\d+){_BLANKS}\){_BLANKS})?",
    re.IGNORECASE | re.ASCII,
)
_NUMBER = r"[+]?\d*"
"""The library reads no digits as 0, so that "{}" is processor 0."""
_ITEM = re.compile(
    rf"{_BLANKS}(?P<removed>!)?{_BLANKS}(?P<first>{_NUMBER}){_BLANKS}"
    rf"(?::{_BLANKS}(?P<length>{_NUMBER}){_BLANKS}"
    rf"(?::{_BLANKS}(?P<stride>[+-]?\d*){_BLANKS})?)?",
    re.ASCII,
)
_PLACE = re.compile(
    rf"{_BLANKS}(?P<removed>!)?{_BLANKS}\{{(?P<items>[^{{}}]{{0,4000}})\}}{_BLANKS}"
    rf"(?::{_BLANKS}(?P<length>{_NUMBER}){_BLANKS}"
    rf"(?::{_BLANKS}(?P<stride>[+-]?\d*){_BLANKS})?)?",
    re.ASCII,
)
_MOST_PLACES = 65535
"""A longer interval of places is refused."""
_BITS_OF_A_WORD = 64
"""The kernel's sets of processors are whole words; higher numbers are out of range."""


class Places(NamedTuple):
    """What threads are tied to."""

    first: frozenset[int] | None
    """Processors of the first place, where the initial thread stays; None: they follow
    from the machine's topology ("cores")."""

    def holds_back(self, usable: frozenset[int]) -> bool:
        """Whether the initial thread, and what is forked from it, loses processors."""
        return self.first is None or not usable <= self.first


class _InvalidPlacesError(ValueError):
    """The library reports the value and drops it."""


def read_places(value: str, usable: frozenset[int]) -> Places | None:
    """Read ``OMP_PLACES`` as libgomp does.

    Args:
        value: As it was set.
        usable: Numbers of the processors that this process may use.

    Returns:
        Its places; None where the library reports the value and drops it.

    >>> both = frozenset({0, 1})
    >>> read_places("{0},{1}", both), read_places("core", both)
    (Places(first=frozenset({0})), None)
    """
    topology = _TOPOLOGY.fullmatch(value)
    if topology is not None:
        count = topology["count"]
        return None if count is not None and int(count) == 0 else Places(None)
    try:
        places = _explicit_places(value, _numbers_in_range(usable))
    except _InvalidPlacesError:
        return None
    remaining = [place & usable for place in places if place & usable]
    return Places(remaining[0]) if remaining else None


def read_affinity(value: str, usable: frozenset[int]) -> Places | None:
    """Read ``GOMP_CPU_AFFINITY`` as libgomp does, one place a processor.

    Args:
        value: One that :func:`~.native_readers.hangs_libgomp` does not name.
        usable: Numbers of the processors that this process may use.

    Returns:
        Its places; None where the library reports and drops the value, or cannot tie
        the initial thread to its first processor.

    >>> both = frozenset({0, 1})
    >>> read_affinity("1 0", both), read_affinity("1-0", both)
    (Places(first=frozenset({1})), None)
    """
    first_processor = None
    for item in re.split(r"[ \t\n\v\f\r,]+", value.strip(" \t\n\v\f\r,")):
        match = re.fullmatch(
            r"\+?(0[xX][0-9a-fA-F]+|\d+)(?:-(\d*)(?::(\d*))?)?", item, re.ASCII
        )
        if item and match is None:
            return None
        # An empty value is processor 0 to the library.
        begin = 0
        if match is not None:
            first_number, last_number, stride = match.groups()
            base = 16 if first_number.lower().startswith("0x") else 10
            begin = int(first_number, base)
            if last_number and int(last_number) < begin:
                return None
            if stride is not None and int(stride or 0) == 0:
                return None
        if first_processor is None:
            first_processor = begin

    # The initial thread stays on the first processor: the others do not matter here.
    if first_processor not in usable:
        return None
    return Places(frozenset({first_processor}))


def _numbers_in_range(usable: frozenset[int]) -> range:
    words = max(usable, default=0) // _BITS_OF_A_WORD + 1
    return range(words * _BITS_OF_A_WORD)


def _explicit_places(value: str, in_range: range) -> list[frozenset[int]]:
    """Expand "{0:2}:3:2,!{2}".

    Raises:
        _InvalidPlacesError: It is no such list.
    """
    places: list[frozenset[int]] = []
    position = 0
    while True:
        match = _PLACE.match(value, position)
        if match is None:
            raise _InvalidPlacesError
        place = _read_processors(match["items"], in_range)
        length = _read_length(match["length"], most=_MOST_PLACES)
        if match["removed"]:
            if length != 1 or place not in places:
                raise _InvalidPlacesError
            places.remove(place)
        else:
            stride = 1 if match["stride"] is None else _read_number(match["stride"])
            places.extend(_repeat_place(place, length, stride, in_range))
        position = match.end()
        if position == len(value):
            return places
        if value[position] != ",":
            raise _InvalidPlacesError
        position += 1


def _read_processors(items: str, in_range: range) -> frozenset[int]:
    processors: set[int] = set()
    removed = []
    for text in items.split(","):
        match = _ITEM.fullmatch(text)
        if match is None:
            raise _InvalidPlacesError
        first = _read_number(match["first"])
        length = _read_length(match["length"])
        stride = 1 if match["stride"] is None else _read_number(match["stride"])
        if match["removed"]:
            if length != 1:
                raise _InvalidPlacesError
            removed.append(first)
            continue
        numbers = {first + step * stride for step in range(min(length, len(in_range)))}
        if any(number not in in_range for number in numbers):
            raise _InvalidPlacesError
        processors |= numbers
    # Wherever they stand, removals come last.
    for number in removed:
        if number not in processors:
            raise _InvalidPlacesError
        processors.remove(number)
    return frozenset(processors)


def _repeat_place(
    place: frozenset[int], length: int, stride: int, in_range: range
) -> Iterator[frozenset[int]]:
    """Repeat a place, each time ``stride`` processors further.

    Raises:
        _InvalidPlacesError: A number is out of range.
    """
    # Anything but a stride of 0 is out of range by then.
    for step in range(min(length, len(in_range) + 1)):
        numbers = frozenset(number + step * stride for number in place)
        if any(number not in in_range for number in numbers):
            raise _InvalidPlacesError
        yield numbers


def _read_length(text: str | None, most: int = 2**63) -> int:
    if text is None:
        return 1
    length = _read_number(text)
    if not 0 < length <= most:
        raise _InvalidPlacesError
    return length


def _read_number(text: str) -> int:
    return int(text) if text.strip("+-") else 0
