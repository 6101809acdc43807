"""How libraries in C read their variables, which is seldom how they look.  Pure.

MKL takes whatever is no number for 1, glibc a number up to where its digits end and
``010`` for eight, OpenMP reports and drops what it cannot read.  The tests compare each
reader with the library over generated values.
"""

from __future__ import annotations

import re

_LARGEST = 2**64 - 1
_ASCII_BLANKS = " \t\n\v\f\r"
_SIGNED_32 = 2**31

GLIBC_RANGES = {
    "MALLOC_ARENA_MAX": ("glibc.malloc.arena_max", 1, _LARGEST),
    "MALLOC_ARENA_TEST": ("glibc.malloc.arena_test", 1, _LARGEST),
    "MALLOC_CHECK_": ("glibc.malloc.check", 0, 3),
    "MALLOC_MMAP_MAX_": ("glibc.malloc.mmap_max", 0, _SIGNED_32 - 1),
    "MALLOC_MMAP_THRESHOLD_": ("glibc.malloc.mmap_threshold", 0, _LARGEST),
    "MALLOC_PERTURB_": ("glibc.malloc.perturb", 0, 255),
    "MALLOC_TOP_PAD_": ("glibc.malloc.top_pad", 0, _LARGEST),
    "MALLOC_TRIM_THRESHOLD_": ("glibc.malloc.trim_threshold", 0, _LARGEST),
}
"""Settings of glibc's malloc: the tunable that each stands for, and its least and
greatest value (``ld.so --list-tunables`` of glibc 2.36)."""
MALLOC_TUNABLES = (
    *(tunable for tunable, _, _ in GLIBC_RANGES.values()),
    "glibc.malloc.hugetlb",
    "glibc.malloc.mxfast",
    "glibc.malloc.tcache_count",
    "glibc.malloc.tcache_max",
    "glibc.malloc.tcache_unsorted_limit",
)
"""Names of ``GLIBC_TUNABLES`` that are about malloc."""
_BINDINGS = {"master", "close", "spread"}
"""Of ``OMP_PROC_BIND``, beside true and false; libgomp of torch 2.13 knows no
"primary"."""


def mkl_threads(value: str) -> int | None:
    """Read ``MKL_NUM_THREADS`` as MKL does; None where it takes its default.

    >>> [mkl_threads(value) for value in ("4", "many", "4 threads", " 4", "0", "")]
    [4, 1, 1, 1, None, None]
    """
    if not value:
        return None
    if not re.fullmatch(r"\d+", value, re.ASCII):
        return 1
    wrapped = (int(value) + _SIGNED_32) % (2 * _SIGNED_32) - _SIGNED_32
    return wrapped if wrapped > 0 else None


def mkl_follows_processors(value: str | None) -> bool:
    """Tell whether MKL keeps to the processors there are, by ``MKL_DYNAMIC``.

    >>> [mkl_follows_processors(value) for value in (None, "FALSE", "false", "0")]
    [True, False, False, True]
    """
    return value is None or value.strip(_ASCII_BLANKS) not in {"FALSE", "false"}


def openmp_threads(value: str) -> int | None:
    """Read a number of threads as libgomp does; None: it ignores the value.

    >>> [openmp_threads(value) for value in ("4", " 2 ", "4,2", "0", "many", "-1")]
    [4, 2, 4, None, None, None]
    """
    # A C library: ASCII digits and blanks only.
    match = re.fullmatch(r"\s*\+?(\d+)\s*(?:,\s*\+?(\d+)\s*)*", value, re.ASCII)
    if match is None:
        return None
    counts = [int(number) for number in re.findall(r"\d+", value)]
    return counts[0] if all(counts) and max(counts) < 2**63 else None


def openmp_binding(value: str) -> bool | None:
    """Read ``OMP_PROC_BIND`` as libgomp does: whether threads are tied to processors.

    Returns:
        None where it reports the value and drops it.

    >>> [openmp_binding(value) for value in ("true", "FALSE", "close,spread", "yes")]
    [True, False, True, None]
    """
    words = [word.strip(_ASCII_BLANKS) for word in value.lower().split(",")]
    if words in (["true"], ["false"]):
        return words == ["true"]
    return True if set(words) <= _BINDINGS else None


def hangs_libgomp(value: str) -> bool:
    """Tell a ``GOMP_CPU_AFFINITY`` that libgomp never ends reading.

    It skips blanks and commas, reads a number, and looks again at what is no number:
    for ever (libgomp of torch 2.13, where ``import torch`` does not return).

    >>> [hangs_libgomp(value) for value in ("0-1", "0 1", "all", "0;1")]
    [False, False, True, True]
    """
    left = value
    while left:
        left = left.lstrip(_ASCII_BLANKS + ",")
        item = re.match(r"\+?(?:0[xX][0-9a-fA-F]+|\d+)(?:-\d*(?::\d*)?)?", left)
        if item is None:
            return bool(left) and not left.startswith("-")
        left = left[item.end() :]
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
    _, least, most = GLIBC_RANGES[name]
    return number if number is not None and least <= number <= most else None


def split_tunables(value: str) -> list[tuple[str, str | None]]:
    """Split ``GLIBC_TUNABLES`` as glibc does: names, and values or None without "=".

    >>> split_tunables("glibc.malloc.arena_max=2:glibc.malloc.perturb")
    [('glibc.malloc.arena_max', '2'), ('glibc.malloc.perturb', None)]
    """
    pairs = [part.partition("=") for part in value.split(":") if part]
    return [(name, number if equals else None) for name, equals, number in pairs]
