"""Finds lists, dicts, sets and deques that hold more than they did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loaderkit.leaks.census import containers_in, item_count
from loaderkit.leaks.finders.array_holder import holder_of_array
from loaderkit.leaks.finders.bounds import bound_of
from loaderkit.leaks.finders.items import (
    EPOCHS_AN_ITEM,
    MOST_WEIGHED,
    describe_items,
    newest_of,
    pattern_of,
    weigh_item,
)
from loaderkit.leaks.growth import Growth
from loaderkit.memory.holders import holders_of
from loaderkit.memory.tensors import is_a

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.leaks.census import Heap
    from loaderkit.leaks.finders.evidence import HeapEvidence

_FEWEST_ITEMS = 2
"""In a short run; one item more may be the last batch, which a variable holds."""
_MOST_NAMED = 6
"""Containers whose holders are looked for, the heaviest."""


class _GrownContainer(NamedTuple):
    container: Any
    more_items: int


class _WeighedContainer(NamedTuple):
    container: Any
    newest: list[Any]
    items_per_epoch: float
    bytes_per_epoch: int


def find_grown_containers(evidence: HeapEvidence) -> list[Growth]:
    """Find containers that hold more than they did, and weigh what came.

    Args:
        evidence: What is alive now, and was then.

    Returns:
        The heaviest, with their holders.
    """
    grown = _grown_containers(evidence)
    grown.sort(key=lambda row: -row.more_items)
    older_tensor_ids = frozenset(evidence.before.tensor_ids.tolist())

    def is_older(item: object) -> bool:
        return id(item) in evidence.older_ids or id(item) in older_tensor_ids

    weighed = [_weigh_growth(row, evidence, is_older) for row in grown[:MOST_WEIGHED]]
    weighed.sort(key=lambda row: -row.bytes_per_epoch)
    # What this search keeps would be found to hold the containers, too.
    ignore = [grown, weighed, *evidence.heap.lists]
    return [
        _name_growth(row, ignore, evidence.heap)
        for row in weighed[:_MOST_NAMED]
        if row.bytes_per_epoch > 0
    ]


def _grown_containers(evidence: HeapEvidence) -> list[_GrownContainer]:
    """List by how much containers grew.

    The arrays are let go of on return: what a running function has would be taken for
    something that the user keeps.
    """
    fewest = max(_FEWEST_ITEMS, evidence.epochs / EPOCHS_AN_ITEM)
    containers = containers_in(evidence.heap)
    ids = np.fromiter(map(id, containers), np.int64, len(containers))
    lengths = np.fromiter(map(item_count, containers), np.int64, len(containers))
    more_items = lengths - evidence.before.lengths_of(ids)
    return [
        _GrownContainer(containers[index], int(more_items[index]))
        for index in np.flatnonzero(more_items >= fewest)
        if int(ids[index]) not in evidence.ignored_ids
    ]


def _weigh_growth(
    grown: _GrownContainer,
    evidence: HeapEvidence,
    is_older: Callable[[object], bool],
) -> _WeighedContainer:
    container, more_items = grown
    epochs = evidence.epochs
    newest = newest_of(container, more_items, is_older)
    item_bytes = weigh_item(container, newest, evidence.older_ids)
    return _WeighedContainer(
        container=container,
        newest=newest,
        items_per_epoch=more_items / epochs,
        bytes_per_epoch=item_bytes * more_items // epochs,
    )


def _name_growth(
    weighed: _WeighedContainer,
    ignore: Sequence[Any],
    heap: Heap,
) -> Growth:
    """Say who holds a container, and what it keeps."""
    container, newest, items_per_epoch, bytes_per_epoch = weighed
    holder = holders_of(container, most=1, ignore=[*ignore, weighed, newest])[0]
    if is_a(container, np.ndarray) and not holder.held:
        holder = holder_of_array(container, heap)
    bound = bound_of(container, items_per_epoch)
    if not holder.held:
        # Its type is no variable's name, and nothing shows who keeps it.
        return Growth(
            pattern="unknown holder",
            what=f"a {type(container).__name__}",
            items=describe_items(newest),
            per_epoch=items_per_epoch,
            bytes_per_epoch=bytes_per_epoch,
        )
    return Growth(
        pattern=pattern_of(container, newest, holder) if bound is None else "bounded",
        what=type(container).__name__,
        items=describe_items(newest),
        per_epoch=items_per_epoch,
        bytes_per_epoch=bytes_per_epoch,
        holder=holder,
        bound=bound,
    )
