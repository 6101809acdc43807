"""How native libraries parse their environment variables.  Pure.

They seldom parse them as one would expect.  MKL takes anything that is not a number for
1.  glibc reads a number up to its last digit, and ``010`` as eight.  OpenMP reports a
value that it cannot parse, and ignores it.  The tests compare each reader with the
library over generated values.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LARGEST = 2**64 - 1
_ASCII_BLANKS = " \t\n\v\f\r"
_SIGNED_32 = 2**31


class GlibcRange(NamedTuple):
    """The values that glibc accepts for a setting of its malloc."""

    tunable: str
    """Its name in ``GLIBC_TUNABLES``."""
    least: int
    most: int


class Tunable(NamedTuple):
    """One entry of ``GLIBC_TUNABLES``."""

    name: str
    value: str | None
    """None where the entry has no "="."""


GLIBC_RANGES = {
    "MALLOC_ARENA_MAX": GlibcRange("glibc.malloc.arena_max", 1, _LARGEST),
    "MALLOC_ARENA_TEST": GlibcRange("glibc.malloc.arena_test", 1, _LARGEST),
    "MALLOC_CHECK_": GlibcRange("glibc.malloc.check", 0, 3),
    "MALLOC_MMAP_MAX_": GlibcRange("glibc.malloc.mmap_max", 0, _SIGNED_32 - 1),
    "MALLOC_MMAP_THRESHOLD_": GlibcRange("glibc.malloc.mmap_threshold", 0, _LARGEST),
    "MALLOC_PERTURB_": GlibcRange("glibc.malloc.perturb", 0, 255),
    "MALLOC_TOP_PAD_": GlibcRange("glibc.malloc.top_pad", 0, _LARGEST),
    "MALLOC_TRIM_THRESHOLD_": GlibcRange("glibc.malloc.trim_threshold", 0, _LARGEST),
}
"""Settings of glibc's malloc by variable, from ``ld.so --list-tunables`` of glibc
2.36."""
MALLOC_TUNABLES = (
    *(limits.tunable for limits in GLIBC_RANGES.values()),
    "glibc.malloc.hugetlb",
    "glibc.malloc.mxfast",
    "glibc.malloc.tcache_count",
    "glibc.malloc.tcache_max",
    "glibc.malloc.tcache_unsorted_limit",
)
"""Names in ``GLIBC_TUNABLES`` that are about malloc."""
_BINDINGS = {"master", "close", "spread"}
"""Values of ``OMP_PROC_BIND`` other than true and false.  The libgomp of torch 2.13
does not know "primary"."""


class Form(NamedTuple):
    """How a variable of libgomp has to be written."""

    pattern: str
    """Matches every value that libgomp accepts, in upper or lower case."""
    description: str
    """In words, for the message."""


_FLAG = Form("true|false", "true or false")
_STACK = Form(r"\+?(?P<number>\d+)\s*(?P<unit>[bkmg])?", "a size such as 4M")
_STACK_UNITS = {"b": 0, "k": 10, "m": 20, "g": 30}
_COUNT = Form(r"[+-]?(?P<number>\d+)", "a number of threads from 1")
OPENMP_FORMS = {
    "OMP_DYNAMIC": _FLAG,
    "OMP_NESTED": _FLAG,
    "OMP_STACKSIZE": _STACK,
    "GOMP_STACKSIZE": _STACK,
    "OMP_THREAD_LIMIT": _COUNT,
    "OMP_WAIT_POLICY": Form("active|passive", "active or passive"),
    "GOMP_SPINCOUNT": Form(
        r"infinite|infinity|[+-]?(?P<number>\d+)\s*[kmgt]?",
        "a number such as 30000 or 10k, or infinite",
    ),
}
"""Variables whose value libgomp ignores unless it has this form."""


def is_read_by_libgomp(name: str, value: str) -> bool:
    """Tell whether libgomp accepts a value; otherwise it reports and ignores it.

    Args:
        name: A key of :data:`OPENMP_FORMS`.
        value: As it was set.

    >>> [is_read_by_libgomp("OMP_THREAD_LIMIT", value) for value in ("2", "0", "all")]
    [True, False, False]
    """
    pattern = rf"\s*(?:{OPENMP_FORMS[name].pattern})\s*"
    match = re.fullmatch(pattern, value, re.IGNORECASE | re.ASCII)
    if match is None:
        return False
    digits = match.groupdict().get("number")
    if digits is None:
        return True
    if name == "OMP_THREAD_LIMIT":
        # The library parses a signed 64-bit number, which must be above 0.
        return "-" not in value and 0 < int(digits) < 2**63
    if name in {"OMP_STACKSIZE", "GOMP_STACKSIZE"}:
        # Without a unit, the size is in KiB.
        return int(digits) << _STACK_UNITS[(match["unit"] or "k").lower()] <= _LARGEST
    return int(digits) <= _LARGEST


def mkl_threads(value: str) -> int | None:
    """Read ``MKL_NUM_THREADS`` as MKL does; None where it takes its default.

    >>> [mkl_threads(value) for value in ("4", "many", "4 threads", " 4", "0", "")]
    [4, 1, 1, 1, None, None]
    """
    if not value:
        return None
    if not re.fullmatch(r"\d+", value, re.ASCII):
        return 1
    # MKL keeps the low 32 bits of the number, as a signed integer.
    wrapped = (int(value) + _SIGNED_32) % (2 * _SIGNED_32) - _SIGNED_32
    return wrapped if wrapped > 0 else None


def mkl_follows_processors(value: str | None) -> bool:
    """Tell whether ``MKL_DYNAMIC`` lets MKL start fewer threads than requested.

    It then starts no more than there are processors.

    >>> [mkl_follows_processors(value) for value in (None, "FALSE", "false", "0")]
    [True, False, False, True]
    """
    return value is None or value.strip(_ASCII_BLANKS) not in {"FALSE", "false"}


def openmp_threads(value: str) -> int | None:
    """Read a number of threads as libgomp does; None where it ignores the value.

    >>> [openmp_threads(value) for value in ("4", " 2 ", "4,2", "0", "many", "-1")]
    [4, 2, 4, None, None, None]
    """
    # A C library accepts ASCII digits and blanks only.
    match = re.fullmatch(r"\s*\+?(\d+)\s*(?:,\s*\+?(\d+)\s*)*", value, re.ASCII)
    if match is None:
        return None
    counts = [int(number) for number in re.findall(r"\d+", value)]
    return counts[0] if all(counts) and max(counts) < 2**63 else None


def openmp_binding(value: str) -> bool | None:
    """Read ``OMP_PROC_BIND`` as libgomp does: whether threads are bound to processors.

    Returns:
        None where it reports and ignores the value.

    >>> [openmp_binding(value) for value in ("true", "FALSE", "close,spread", "yes")]
    [True, False, True, None]
    """
    words = [word.strip(_ASCII_BLANKS) for word in value.lower().split(",")]
    if words in (["true"], ["false"]):
        return words == ["true"]
    return True if set(words) <= _BINDINGS else None


def hangs_libgomp(value: str) -> bool:
    """Tell whether libgomp loops for ever on a value of ``GOMP_CPU_AFFINITY``.

    Its parser skips blanks and commas and reads a number.  Where there is no number it
    does not advance, and tries again (the libgomp of torch 2.13: ``import torch`` does
    not return).

    >>> [hangs_libgomp(value) for value in ("0-1", "0 1", "all", "0;1")]
    [False, False, True, True]
    """
    unread = value
    while unread:
        unread = unread.lstrip(_ASCII_BLANKS + ",")
        item = re.match(r"\+?(?:0[xX][0-9a-fA-F]+|\d+)(?:-\d*(?::\d*)?)?", unread)
        if item is None:
            return bool(unread) and not unread.startswith("-")
        unread = unread[item.end() :]
    return False


def glibc_number(value: str) -> int | None:
    """Read a number as glibc's loader does; None where it finds none.

    >>> [glibc_number(value) for value in ("64", "0x10", "010", "128M", "-1", "two")]
    [64, 16, 8, 128, 18446744073709551615, None]
    """
    match = re.match(
        r"[ \t]*([+-]?)"
        r"(?:0[xX](?P<hex>[0-9a-fA-F]+)|0(?P<octal>[0-7]*)|(?P<plain>\d+))",
        value,
        re.ASCII,
    )
    if match is None:
        return None
    if match["hex"] is not None:
        number = int(match["hex"], 16)
    elif match["octal"] is not None:
        number = int(match["octal"] or "0", 8)
    else:
        number = int(match["plain"])
    if number > _LARGEST:
        return _LARGEST
    return -number % (_LARGEST + 1) if match[1] == "-" else number


def glibc_setting(name: str, value: str) -> int | None:
    """Read a setting of glibc's malloc; None where glibc ignores the value.

    Args:
        name: A key of :data:`GLIBC_RANGES`.
        value: As it was set.

    >>> glibc_setting("MALLOC_ARENA_MAX", "2"), glibc_setting("MALLOC_PERTURB_", "999")
    (2, None)
    """
    number = glibc_number(value)
    limits = GLIBC_RANGES[name]
    if number is None or not limits.least <= number <= limits.most:
        return None
    return number


def split_tunables(value: str) -> list[Tunable]:
    """Split ``GLIBC_TUNABLES`` as glibc does.

    >>> split_tunables(  # doctest: +NORMALIZE_WHITESPACE
    ...     "glibc.malloc.arena_max=2:perturb"
    ... )
    [Tunable(name='glibc.malloc.arena_max', value='2'),
     Tunable(name='perturb', value=None)]
    """
    tunables = []
    for entry in value.split(":"):
        name, equals, number = entry.partition("=")
        if entry:
            value_of_entry = number if equals else None
            tunables.append(Tunable(name, value_of_entry))
    return tunables
