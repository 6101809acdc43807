"""Names memory that leaks and that nothing which was found explains."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from loaderkit.leaks.growth import RESOURCES, Growth, explains, is_held
from loaderkit.leaks.verdict import effects_among

if TYPE_CHECKING:
    from loaderkit.leaks.finders.evidence import CounterEvidence
    from loaderkit.leaks.patterns import PatternName
    from loaderkit.memory.counters import CounterName


class _Unattributed(NamedTuple):
    counter: CounterName
    pattern: PatternName
    description: str


_UNATTRIBUTED = (
    _Unattributed("allocated", "device", "device memory"),
    _Unattributed("reserved", "reserved", "the cache of torch's allocator"),
    _Unattributed("driver", "driver", "device memory outside of tensors"),
    _Unattributed("pinned", "pinned", "page-locked memory"),
    _Unattributed("malloc", "native", "native memory"),
    _Unattributed("shared", "shared", "shared memory"),
    _Unattributed("anonymous", "outside malloc", "memory"),
    _Unattributed("resident", "native", "native memory"),
)
"""The most telling counter first: what malloc gives out is resident, too."""
_ON_DEVICE: frozenset[PatternName] = frozenset({"device", "reserved", "driver"})
_NEEDS_CENSUS: frozenset[CounterName] = frozenset({"malloc", "python_blocks"})
"""Counters of what Python objects may hold: before these were counted, nobody can say
that none of them does."""
_NO_MEMORY: frozenset[PatternName] = frozenset({*RESOURCES, "worker", "shm"})


def find_unattributed(evidence: CounterEvidence) -> list[Growth]:
    """Name memory without Python objects, by the first counters that see it.

    Args:
        evidence: Counters that leak, and what all other finders have named.

    Returns:
        One growth; on a device it may be two, tensors and what the driver holds beside
        them; none where what was found explains what leaks.
    """
    if not evidence.objects_counted and _NEEDS_CENSUS & evidence.leaking.keys():
        return []
    if _is_explained(evidence):
        return []
    rates = {name: trend.per_epoch for name, trend in evidence.leaking.items()}
    effects = effects_among(rates)
    growths = [
        Growth(row.pattern, row.description, "", 0, round(rates[row.counter]))
        for row in _UNATTRIBUTED
        if row.counter in rates
        and row.counter not in effects
        # Tensors on the device whose holder was named are not told a second time.
        and not (row.pattern == "device" and _are_named(evidence, rates[row.counter]))
    ]
    on_device = [growth for growth in growths if growth.pattern in _ON_DEVICE]
    return on_device or growths[:1]


def _are_named(evidence: CounterEvidence, bytes_per_epoch: float) -> bool:
    """Tell whether holders that were named explain what grows."""
    return explains(filter(is_held, evidence.named), bytes_per_epoch)


def _is_explained(evidence: CounterEvidence) -> bool:
    """Tell whether what was named makes up a tenth of the growth, or is no memory."""
    if any(growth.pattern in _NO_MEMORY for growth in evidence.named):
        return True
    counters: tuple[CounterName, ...] = ("malloc", "anonymous", "shared")
    for name in counters:
        if name in evidence.leaking:
            return explains(evidence.named, evidence.leaking[name].per_epoch)
    return False
