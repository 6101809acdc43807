"""``release``: give back what can be given back, in the order in which it works."""

from __future__ import annotations

import contextlib
import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loaderkit.memory import process
from loaderkit.memory.clibrary import c_library
from loaderkit.memory.probes import FAILURES, present_devices, probe_of, read_device
from loaderkit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

HOST = "host"
"""The name of the host among devices."""


@dataclass(frozen=True)
class Released:
    """What a release brought, and what it cost."""

    returned_bytes: Mapping[str, int]
    """Given back, by "host" or device; what others took meanwhile is subtracted."""
    collected: int
    """Objects that the garbage collector found unreachable."""
    seconds: float
    """How long it took."""

    def __str__(self) -> str:
        parts = [f"{format_bytes(n)} of {d}" for d, n in self.returned_bytes.items()]
        return (
            f"released {', '.join(parts)}; {self.collected:,} objects collected, "
            f"{format_seconds(self.seconds)}"
        )


def release() -> Released:
    """Collect garbage, then empty torch's caches on every device, then malloc's.

    The order matters: garbage still holds blocks that a cache could give back.

    Returns:
        Bytes that came back and time spent.  Nothing that is in use is touched.
    """
    begun = time.perf_counter()
    before = taken_bytes()
    collected = gc.collect() + gc.collect()  # finalizers may leave new garbage
    for device in present_devices():
        with contextlib.suppress(*FAILURES):
            probe_of(device).empty()
    _trim()
    after = taken_bytes()
    returned = {name: size - after.get(name, size) for name, size in before.items()}
    return Released(returned, collected, time.perf_counter() - begun)


def taken_bytes() -> dict[str, int]:
    """Read what this process has taken from the host and from each device.

    Returns:
        Private memory of the host, and torch's reserved memory or what the driver gave.
    """
    quick = process.quick_counters()
    found = {HOST: quick.get("anonymous", quick.get("resident", 0))}
    for device in present_devices():
        size = cached_bytes(device)[0]
        if size is not None:
            found[str(device)] = size
    return found


def cached_bytes(device: torch.device) -> tuple[int | None, int]:
    """Read what torch's allocator holds, and how much of it is unused.

    Args:
        device: Such as ``torch.device("cuda")``.

    Returns:
        Bytes it has taken, None if unknown; and those no tensor uses.
    """
    values, _ = read_device(device, full=False)
    taken = values.get("reserved", values.get("driver"))
    if taken is None:
        return None, 0
    return taken, max(0, taken - values.get("allocated", taken))


def _trim() -> None:
    """Ask glibc to give free pages back; other allocators have no such call."""
    library = c_library()
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
