"""The progress bar of packing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tqdm import auto, std

if TYPE_CHECKING:
    from pathlib import Path

_IN_TERMINAL = auto.notebook_tqdm is std.tqdm
"""Where a bar is drawn for people alone; in a notebook stderr is no terminal either."""


class ProgressBar(auto.tqdm):  # type: ignore[misc]
    """A progress bar that no other process can hold up.

    tqdm's own lock is shared with forked processes: one that is killed while it holds
    the lock would hang every other that packs.
    """

    _lock = threading.RLock()
    monitor_interval = 0


def progress_bar(total: int | None, path: Path, done: int = 0) -> ProgressBar:
    """Make the bar of one packing run.

    Args:
        total: How many samples there are; None where that is not known.
        path: The cache's folder.
        done: How many were packed before.
    """
    return ProgressBar(
        total=total,
        initial=done,
        desc=f"packing {path.name}",
        unit=" samples",
        disable=None if _IN_TERMINAL else False,
        smoothing=0.1,
    )
