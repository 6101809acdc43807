"""Finds lists and dicts of which a longer one takes the place: ``x = x + [item]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.leaks.census import containers_in, item_count
from loaderkit.leaks.finders.items import (
    EPOCHS_AN_ITEM,
    LEAST_SHARE,
    MOST_SHARE,
    MOST_WEIGHED,
    describe_items,
    newest_of,
    pattern_of,
    weigh_item,
)
from loaderkit.leaks.growth import Growth
from loaderkit.memory.holders import holders_of

if TYPE_CHECKING:
    from loaderkit.leaks.finders.evidence import HeapEvidence

_FEWEST_ITEMS = 3
"""One more than in ``grown_containers``: of two items are many containers."""


def find_replaced_containers(evidence: HeapEvidence) -> list[Growth]:
    """Look for a container that came since the census, and holds all that grew.

    The object is another one in each epoch, so no census has its length.  That it
    holds as much as has grown since the run began tells it from a list of the epoch's
    predictions, say.

    Args:
        evidence: What is alive now, and was then.

    Returns:
        The one that comes nearest to what grew; else nothing.
    """
    epochs, grown_bytes = evidence.run_epochs, evidence.grown_bytes
    if grown_bytes <= 0:
        return []
    nearest, share = None, 0.0
    for container in _other_containers(evidence, epochs):
        share_here = _bytes_in(container, evidence) / grown_bytes
        is_nearer = nearest is None or abs(share_here - 1) < abs(share - 1)
        if LEAST_SHARE <= share_here <= MOST_SHARE and is_nearer:
            nearest, share = container, share_here
    if nearest is None:
        return []
    newest = newest_of(nearest)
    ignore = [newest, *evidence.heap.lists]
    holder = holders_of(nearest, most=1, ignore=ignore)[0]
    if not holder.held:
        return []
    return [
        Growth(
            pattern=pattern_of(nearest, newest, holder),
            what=type(nearest).__name__,
            items=describe_items(newest),
            per_epoch=item_count(nearest) / epochs,
            bytes_per_epoch=round(evidence.bytes_per_epoch),
            holder=holder,
        )
    ]


def _other_containers(evidence: HeapEvidence, epochs: int) -> list[Any]:
    """List containers that the census does not have as they are, the longest first."""
    fewest = max(_FEWEST_ITEMS, epochs / EPOCHS_AN_ITEM)
    containers = containers_in(evidence.heap)
    ids = np.fromiter(map(id, containers), np.int64, len(containers))
    lengths = np.fromiter(map(item_count, containers), np.int64, len(containers))
    is_other = lengths != evidence.before.lengths_of(ids)
    chosen = [
        index
        for index in np.flatnonzero(is_other & (lengths >= fewest)).tolist()
        if int(ids[index]) not in evidence.ignored_ids
    ]
    chosen.sort(key=lambda index: -int(lengths[index]))
    return [containers[index] for index in chosen[:MOST_WEIGHED]]


def _bytes_in(container: object, evidence: HeapEvidence) -> int:
    """Weigh a container by its newest items."""
    newest = newest_of(container)
    return weigh_item(container, newest, evidence.older_ids) * item_count(container)
