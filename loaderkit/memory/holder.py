"""``Holder``: who keeps an object alive, in words.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from loaderkit.answers import answer_wrong_names
from loaderkit.notebook import HasCard

HolderKind: TypeAlias = Literal[
    "local variable",
    "fixture",
    "closure",
    "global",
    "class",
    "traceback",
    "context variable",
    "cycle",
    "native code",
]


@answer_wrong_names()
@dataclass(frozen=True)
class Holder(HasCard):
    """One way by which an object is kept."""

    kind: HolderKind
    """What the way begins with: a variable of some kind, or none."""
    path: str
    """How to write the object from there, such as ``history["loss"][3]``."""
    where: str
    """File, line and function of the variable; empty when unknown."""
    line: str
    """File and line that put it there, probably; empty when unknown."""
    through_graph: bool = False
    """What ``path`` leads to keeps the object in its autograd graph."""

    @property
    def held(self) -> bool:
        """Whether a variable leads to it: neither a cycle nor native code does."""
        return self.kind not in {"cycle", "native code"}

    def __str__(self) -> str:
        kind = f"the autograd graph of {self.kind}" if self.through_graph else self.kind
        location = f", {self.where}" if self.where else ""
        change = f"; change {self.line}" if self.line else ""
        return f"{kind} `{self.path}`{location}{change}"
