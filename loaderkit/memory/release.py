"""``release``: give back what can be given back, in the order in which it works."""

from __future__ import annotations

import contextlib
import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.answers import answer_wrong_names
from loaderkit.call_keywords import suggest_keywords
from loaderkit.memory import process
from loaderkit.memory.clibrary import c_library
from loaderkit.memory.probes import (
    FAILURES,
    present_devices,
    present_kinds,
    probe_of,
    read_device,
)
from loaderkit.notebook import HasCard, repr_in_a_line
from loaderkit.units import count_of, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

HOST = "host"
"""The name of the host among devices."""


@answer_wrong_names()
@dataclass(frozen=True)
class Released(HasCard):
    """What a release brought, and what it cost."""

    returned_bytes: Mapping[str, int]
    """Given back, by "host" or a device's name with its index; what others took
    meanwhile is subtracted."""
    collected: int
    """Objects that the garbage collector found unreachable."""
    seconds: float
    """How long it took."""

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        # Of eight devices most give nothing back.
        amounts = [
            f"{format_bytes(size_bytes)} of {device}"
            for device, size_bytes in self.returned_bytes.items()
            if size_bytes or device == HOST
        ]
        return (
            f"released {', '.join(amounts)}; "
            f"{count_of(self.collected, 'objects')} collected, "
            f"{format_seconds(self.seconds)}"
        )


@suggest_keywords
def release() -> Released:
    """Collect garbage, then empty torch's caches on every device, then malloc's.

    The order matters: garbage still holds blocks that a cache could give back.

    Returns:
        Bytes that came back and time spent.  Nothing that is in use is touched.
    """
    begun = time.perf_counter()
    before = taken_bytes()
    # Twice, since finalizers may leave new garbage.
    collected = gc.collect() + gc.collect()
    for kind in present_kinds():
        # A device that fails must not keep the others from giving back.
        with contextlib.suppress(*FAILURES):
            probe_of(kind).empty()  # of all devices of the kind
    _trim_malloc()
    after = taken_bytes()
    returned_bytes = {
        device: size_bytes - after.get(device, size_bytes)
        for device, size_bytes in before.items()
    }
    return Released(returned_bytes, collected, time.perf_counter() - begun)


def taken_bytes() -> dict[str, int]:
    """Read what this process has taken from the host and from each device.

    Returns:
        Private memory of the host, and torch's reserved memory or what the driver gave.
    """
    readings = process.quick_counters()
    taken = {HOST: readings.get("anonymous", readings.get("resident", 0))}
    for device in present_devices():
        cached = cached_bytes(device)
        if cached.taken is not None:
            taken[str(device)] = cached.taken
    return taken


class CachedBytes(NamedTuple):
    """What torch's allocator holds on a device."""

    taken: int | None
    """Bytes it has taken from the device; None if unknown."""
    unused: int
    """Those of them that no tensor uses."""


def cached_bytes(device: torch.device) -> CachedBytes:
    """Read what torch's allocator holds, and how much of it is unused.

    Args:
        device: Such as ``torch.device("cuda")``.

    Returns:
        Bytes taken and unused.
    """
    values = read_device(device, full=False).values
    # MPS tells what the driver gave, in place of what the allocator reserved.
    taken = values.get("reserved", values.get("driver"))
    if taken is None:
        return CachedBytes(None, 0)
    return CachedBytes(taken, max(0, taken - values.get("allocated", taken)))


def _trim_malloc() -> None:
    """Ask glibc to give free pages back; other allocators have no such call."""
    library = c_library()
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
