"""``Throttle``: lets costly work happen as seldom as it may cost of the time."""

from __future__ import annotations

import time


class Throttle:
    """Work that takes long: due as often as comes to a share of the time.

    Args:
        max_share: Of the time.
        free_s: Work that takes no longer is always due.
    """

    def __init__(self, max_share: float = 0.001, free_s: float = 0.0) -> None:
        self.max_share, self.free_s = max_share, free_s
        self.next_due = 0.0
        self._begun = 0.0

    @property
    def due(self) -> bool:
        """Whether its time has come again."""
        return time.monotonic() >= self.next_due

    def __enter__(self) -> None:
        self._begun = time.monotonic()

    def __exit__(self, *_: object) -> None:
        took = time.monotonic() - self._begun
        pause = took / self.max_share if took > self.free_s else 0.0
        self.next_due = self._begun + pause
