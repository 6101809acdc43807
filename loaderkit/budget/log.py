"""What lived when in a training step.  Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Log:
    """What lived when.  Sizes in bytes."""

    events: list[tuple[int, int]] = field(default_factory=list)
    """(number of the storage, bytes), negative when it is freed."""
    marks: list[tuple[int, str]] = field(default_factory=list)
    """(events so far, phase that begins)."""
    owners: dict[int, str] = field(default_factory=dict)
    """What a storage is, where that is known: "parameters", "batch", ..."""
    modules: dict[int, str] = field(default_factory=dict)
    """Module that made a storage: its name in ``named_modules`` and its class."""
    assumptions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(what was assumed, operator) and how often."""
    workspace: int = 0
    """Highest sum if each opaque kernel copied twice what it reads and writes."""
    real_bytes: int = 0
    """Largest sum of real memory the tracking itself took."""
