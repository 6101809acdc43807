"""The wordings of ``wordings.txt``, compiled.  Pure but for reading that file."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

_SIZE = r"(\d[\d.,]* ?(?:bytes|[KMGTPE]?i?B))"
_PIECES = MappingProxyType(
    {
        "size": _SIZE,
        "requested": r"(?P<requested>\d[\d,]*)",
        "gpu": r"(?P<backend>CUDA|HIP|XPU|NPU|MLU|MUSA|HPU)",
        "torch_file": r"<?/?torch_(?P<pid>\d+)_",
        "errno": r"(?:[^\n]*?\((?P<errno>\d+)\))?",
        "nccl": r"(?:\S+:(?P<pid>\d+):\d+ \[(?P<device>\d+)\] [^\n]*)?NCCL WARN ",
    }
)
_PARTS = MappingProxyType(
    {
        "device": {
            "requested": r"Tried to allocate @size@|^Requested *: @size@",
            "device": r"\b[GNMX]PU (\d+)(?:;| has)|on device (\d+) would exceed",
            "capacity": (
                r"@size@ total capacity|total capac\w+ of @size@|"
                r"^Device limit *: @size@"
            ),
            "free": (
                r"@size@ free[;)]|of which @size@ is free|"
                r"^Free \(according to CUDA\): @size@"
            ),
            "allocated": (
                r"@size@ already allocated|memory @size@ is allocated by|"
                r"^Currently allocated *: @size@"
            ),
            "limit": r"@size@ allowed;|^PyTorch limit[^:]*: @size@",
            "reserved": r"@size@ (?:reserved in total|cached)",
            "reserved_unallocated": r"@size@ is reserved by \w+ but unalloc",
            "in_use": r"this process has @size@ memory in use",
            "private_pools": r"@size@ allocated in private pools",
        },
        "mps": {
            "requested": r"Tried to allocate @size@",
            "reserved": r"MPS allocated: @size@",
            "other": r"other allocations: @size@",
            "limit": r"max allowed: @size@",
            "pool": r"on (private|shared) pool",
        },
        "kernel": {
            "pid": r"\bkill(?:ed)? process (\d+)|task=[^,]*,pid=(\d+)",
            "total_vm": r"total-vm:(\d+ ?kB)",
            "anon_rss": r"anon-rss:(\d+ ?kB)",
        },
    }
)


@dataclass(frozen=True)
class Wording:
    """One way to say that memory ran out, or something that looks like it."""

    is_oom: bool | str
    """True, False or "maybe"."""
    kind: str
    """What happened."""
    backend: str | None
    """Where, unless the pattern's group ``backend`` says."""
    parts: str | None
    """Which table of :func:`parts_of` reads the rest of the text."""
    pattern: re.Pattern[str]
    """Its named groups are fields of a message."""


@functools.cache
def wordings() -> tuple[Wording, ...]:
    """Read the table, the surest wording first."""
    text = resources.files(__package__).joinpath("wordings.txt").read_text("utf-8")
    rows: list[tuple[list[str], str]] = []
    for line in text.splitlines():
        head, bar, pattern = line.partition(" | ")
        if line.startswith("#") or not bar:
            continue
        if head.strip():
            rows.append((head.split(), pattern))
        else:  # more alternatives of the row above
            rows[-1] = (rows[-1][0], f"{rows[-1][1]}|{pattern}")
    return tuple(_wording(head, pattern) for head, pattern in rows)


def _wording(head: list[str], pattern: str) -> Wording:
    sure, kind, backend, parts = (None if word == "-" else word for word in head)
    is_oom = {"yes": True, "no": False}.get(sure or "", "maybe")
    return Wording(is_oom, kind or "", backend, parts, _compiled(pattern))


@functools.cache
def parts_of(name: str) -> dict[str, re.Pattern[str]]:
    """Give the patterns of one table by field; the last group that matched counts."""
    return {field: _compiled(text) for field, text in _PARTS[name].items()}


def _compiled(pattern: str) -> re.Pattern[str]:
    for name, piece in _PIECES.items():
        pattern = pattern.replace(f"@{name}@", piece)
    return re.compile(pattern, re.IGNORECASE | re.MULTILINE)
