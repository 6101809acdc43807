"""Finds files that are left in /dev/shm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.leaks.growth import Growth

if TYPE_CHECKING:
    from loaderkit.leaks.finders.evidence import CounterEvidence

_KINDS_NAMED = 2
"""Those that grew most; chosen."""


def find_left_shared_memory(evidence: CounterEvidence) -> list[Growth]:
    """Name the kinds of files that grew most in the second half, in one growth.

    Args:
        evidence: Counters that leak, and the files.

    Returns:
        One growth; nothing where files in /dev/shm do not leak.
    """
    trend = evidence.leaking.get("shm_files")
    if trend is None:
        return []
    grown = evidence.shared_files.grown_late()
    kinds = [kind for kind, size in grown.most_common(_KINDS_NAMED) if size > 0]
    description = f"files {', '.join(kinds)}"
    return [Growth("shm", description, "", 0, round(trend.per_epoch))]
