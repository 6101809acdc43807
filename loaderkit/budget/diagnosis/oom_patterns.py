"""The wordings of ``oom_patterns.txt``, compiled.  Pure but for reading that file."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from loaderkit.budget.diagnosis.amounts import SIZE
from loaderkit.budget.diagnosis.lexicon import (
    compile_folded,
    put_in_pieces,
    read_table,
)

if TYPE_CHECKING:
    from loaderkit.budget.diagnosis.folding import FoldedPattern

_PIECES = MappingProxyType(
    {
        "size": rf"(?:{SIZE})",
        # Bounded, so that the time a text takes grows with its length and no faster.
        "gap": r"(?s:.{0,240}?)",
        "far": r"(?s:.{0,3000}?)",
        "gpu": r"(?P<backend>CUDA|HIP|XPU|NPU|MLU|MUSA|HPU)",
        "intel": r"(?:UR_RESULT_ERROR|PI_ERROR|ZE_RESULT_ERROR)",
        "torch_file": r"<?/?torch_(?P<pid>\d+)_",
        # An exit status is 128 and the signal, or the signal below zero: 9 is SIGKILL.
        "ended_with": (
            r"(?:\b(?:exit(?:ed|ing|s)?|returned|terminated|died|finished|ended|quit"
            r"|stopped|crashed|completed|closed|failed) (?:with |by )?(?:an? |the )?"
            r"(?:non-?zero )?(?:(?:exit|return|status) )?(?:code|status|value|rc)"
            r"|\b(?:non-?zero|exit|return)(?: (?:exit|return|status))?"
            r" (?:code|status|value))(?: of| is| was)?[ :=(]{1,3}"
        ),
        # joblib says which signal ended its workers: a fault is no memory that ran out.
        "by_no_other_signal": (
            r"(?!(?s:.{0,400}?)exit codes of the workers are \{"
            r"(?!(?s:[^}]{0,60})SIGKILL)(?:SIG|EXIT))"
        ),
        "errno": r"(?:(?s:.{0,80}?)\((?P<errno>\d+)\))?",
        "nccl": (
            r"(?:[\w.-]{1,60}:(?P<pid>\d+):\d+ \[(?P<device>\d+)\] (?s:.{0,120}?))?"
            r"NCCL WARN "
        ),
    }
)


@dataclass(frozen=True)
class MessagePattern:
    """One way to say that memory ran out, or something that looks like it."""

    is_oom: bool | str
    """True, False or "maybe"."""
    kind: str
    """What happened."""
    backend: str | None
    """Where, unless the pattern's group ``backend`` says."""
    pattern: FoldedPattern
    """Its named groups are fields of a message."""


@functools.cache
def message_patterns() -> tuple[MessagePattern, ...]:
    """Read the table, the surest wording first."""
    return tuple(
        _compile_row(head, text) for head, text in read_table("oom_patterns.txt")
    )


def _compile_row(head: tuple[str, ...], pattern: str) -> MessagePattern:
    sure, kind, backend = (None if word == "-" else word for word in head)
    is_oom = {"yes": True, "no": False}.get(sure or "", "maybe")
    pattern = put_in_pieces(pattern, _PIECES)
    return MessagePattern(is_oom, kind or "", backend, compile_folded(pattern))


def fields_of(match: re.Match[str]) -> dict[str, str]:
    """Give the fields a pattern found; ``errno_2`` is an alternative's ``errno``."""
    return {
        re.sub(r"_\d$", "", name): value
        for name, value in match.groupdict().items()
        if value is not None
    }
