"""What grew, and who holds it: finders are asked one after the other.

To know a new cause, write its finder as a file in ``leaks/finders`` and add its row
here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.leaks.census import look_at_heap
from loaderkit.leaks.finders.autograd_chain import find_autograd_chain
from loaderkit.leaks.finders.child_processes import find_growing_children
from loaderkit.leaks.finders.evidence import CounterEvidence, Finder, HeapEvidence
from loaderkit.leaks.finders.growing_array import find_growing_array
from loaderkit.leaks.finders.grown_containers import find_grown_containers
from loaderkit.leaks.finders.left_shared_memory import find_left_shared_memory
from loaderkit.leaks.finders.new_objects import find_new_objects
from loaderkit.leaks.finders.rebuilt_values import find_rebuilt_values
from loaderkit.leaks.finders.replaced_containers import find_replaced_containers
from loaderkit.leaks.finders.resources import find_resources
from loaderkit.leaks.finders.unattributed import find_unattributed
from loaderkit.leaks.growth import Growth, explains, is_held
from loaderkit.leaks.own_objects import OWN_ROOMS, ids_of_own_objects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loaderkit.leaks.census import Census
    from loaderkit.leaks.finders.evidence import Memory
    from loaderkit.leaks.patterns import PatternName

_LEAST_SHARE_OF_HEAVIEST = 0.05
_LEAST_SHARE_OF_RATE = 0.01
"""What weighs less beside the heaviest growth, or the growth of the process, is noise:
a log that gets a line an epoch.  Both chosen."""
_EXPLAINED_BY_HELD = 0.5
"""Of what grew, from which on what has no known holder is not named beside it."""
_MOST_NAMED = 5
"""Growths of a report.  Chosen: the resources that leak and the objects behind them."""
_SHOWN: frozenset[PatternName] = frozenset({"autograd cycle", "exit handlers"})
"""Causes without a variable that are proved, so that no other one is looked for."""
_WEAK_REFERENCES = ("ReferenceType", "weakref", "KeyedRef", "WeakMethod")
_FINALIZERS = "finalize._registry"
"""Where ``weakref.finalize`` keeps an entry for each object that is alive."""


class _ObjectRow(NamedTuple):
    """A finder among live objects."""

    find: Finder[HeapEvidence]
    only_if_unexplained: bool = False
    """It is asked only where the rows before it explain less than a tenth of what
    grew: it takes long, or finds what also comes and goes by itself."""


OBJECT_FINDERS = (
    _ObjectRow(find_grown_containers),
    _ObjectRow(find_autograd_chain),
    _ObjectRow(find_growing_array, only_if_unexplained=True),
    _ObjectRow(find_new_objects, only_if_unexplained=True),
    _ObjectRow(find_replaced_containers, only_if_unexplained=True),
    _ObjectRow(find_rebuilt_values, only_if_unexplained=True),
)
"""In the order in which they are asked; of what a later one finds more is said first,
since what was found before does not explain the growth, or holds it."""


def find_growth(
    before: Census,
    epoch: int,
    *,
    most: int = 3,
    rate: float = 0.0,
    memory: Memory = "host",
    most_bytes_per_epoch: float = math.inf,
    more_exit_handlers: float = 0.0,
    other_censuses: Sequence[Census] = (),
    collects_by_itself: bool = True,
) -> list[Growth]:
    """Compare what is alive with a census.

    Args:
        before: Taken some epochs ago.
        epoch: Epochs that have ended by now.
        most: Growths to name.
        rate: Bytes an epoch by which memory grows, to know a single array that grows.
        memory: Which memory that is.
        most_bytes_per_epoch: More than that nothing can have grown.
        more_exit_handlers: How many functions more atexit knows each epoch.
        other_censuses: More of them: what gets longer must be shorter in each.
        collects_by_itself: Python's collector is on.

    Returns:
        What grew, the heaviest first; empty when no Python object did.
    """
    heap = look_at_heap()
    # A list that we make now can have the number of one that was freed meanwhile.
    ignored_ids = ids_of_own_objects(heap.objects) | set(map(id, heap.lists))
    # One that was just taken shows no growth: at the epoch of a census a run may end.
    earlier = tuple(census for census in other_censuses if census.epoch < epoch)
    evidence = HeapEvidence(
        heap=heap,
        before=before,
        epochs=max(1, epoch - before.epoch),
        ignored_ids=ignored_ids,
        bytes_per_epoch=rate,
        memory=memory,
        more_exit_handlers=more_exit_handlers,
        other_censuses=earlier,
        collects_by_itself=collects_by_itself,
        older_ids=frozenset(before.ids.tolist()),
    )
    growths: list[Growth] = []
    for find, only_if_unexplained in OBJECT_FINDERS:
        held = [
            growth for growth in growths if is_held(growth) or growth.pattern in _SHOWN
        ]
        is_explained = bool(held) and explains(held, rate)
        if not (only_if_unexplained and is_explained):
            new_growths = [item for item in find(evidence) if not _is_ours(item)]
            growths = _once_a_holder([*new_growths, *growths])
    # Before shares are taken: an effect may weigh more than its cause.
    growths = _without_effects(growths, rate)
    heaviest = max((growth.bytes_per_epoch for growth in growths), default=0)
    least = max(_LEAST_SHARE_OF_HEAVIEST * heaviest, _LEAST_SHARE_OF_RATE * rate)
    heavy = [growth for growth in growths if growth.bytes_per_epoch >= least]
    most_bytes = min(rate or math.inf, most_bytes_per_epoch)
    return [_bounded(growth, most_bytes) for growth in heavy[:most]]


def _is_ours(growth: Growth) -> bool:
    """Whether a module of the detector's holds it, such as a cache of a search."""
    return growth.holder is not None and growth.holder.path.startswith(OWN_ROOMS)


def _once_a_holder(growths: list[Growth]) -> list[Growth]:
    """Keep the first of those that say the same of a variable: it knows more."""
    first: dict[tuple[str, str], Growth] = {}
    for growth in growths:
        if growth.holder is not None and is_held(growth):
            first.setdefault((growth.holder.path, growth.items), growth)
    return [
        growth
        for growth in growths
        if growth.holder is None
        or first.get((growth.holder.path, growth.items), growth) is growth
    ]


def _without_effects(growths: list[Growth], rate: float) -> list[Growth]:
    """Leave out what only follows from a growth whose holder is known.

    What a known holder explains is not said again of something without a holder, such
    as the dict in which Python lists a class's subclasses. Weak references keep
    nothing, so their containers grow because what they refer to is kept. So do
    finalizers, unless their arguments are the heaviest of all that grew.
    """
    keeping = [
        growth for growth in growths if not growth.items.startswith(_WEAK_REFERENCES)
    ]
    heaviest = max((growth.bytes_per_epoch for growth in keeping), default=0)
    keeping = [
        growth
        for growth in keeping
        if growth.bytes_per_epoch == heaviest or not _is_of_finalizers(growth)
    ]
    held = [growth for growth in keeping if is_held(growth)]
    if not held or not explains(held, rate):
        return growths
    held_bytes = sum(growth.bytes_per_epoch for growth in held)
    return held if held_bytes >= _EXPLAINED_BY_HELD * rate else keeping


def _is_of_finalizers(growth: Growth) -> bool:
    return growth.holder is not None and growth.holder.path.endswith(_FINALIZERS)


def find_causes(evidence: CounterEvidence) -> list[Growth]:
    """Name what grew: resources, objects, workers and what is left over.

    Args:
        evidence: Counters that leak, and objects that were found to grow.

    Returns:
        At most five growths, causes before effects.
    """
    for find in COUNTER_FINDERS:
        evidence = replace(evidence, named=(*evidence.named, *find(evidence)))
    return list(evidence.named[:_MOST_NAMED])


def _find_other_objects(evidence: CounterEvidence) -> list[Growth]:
    """Give the objects that grow, without those named as a resource already."""
    patterns = {growth.pattern for growth in evidence.named}
    return [growth for growth in evidence.objects if growth.pattern not in patterns]


COUNTER_FINDERS: tuple[Finder[CounterEvidence], ...] = (
    find_resources,
    _find_other_objects,
    find_left_shared_memory,
    find_growing_children,
    find_unattributed,
)
"""In the order in which a report names them."""


def _bounded(growth: Growth, most_bytes: float) -> Growth:
    """Bound an estimate by what memory grew: rows of one tensor weigh it all."""
    if growth.bytes_per_epoch <= most_bytes:
        return growth
    return replace(growth, bytes_per_epoch=round(most_bytes))
