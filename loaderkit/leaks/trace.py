"""Where what grows was allocated: a second, shorter run that is traced.

Python's memory by tracemalloc; a device's by the allocator's own history, where torch
keeps one (CUDA, ROCm, XPU).
"""

from __future__ import annotations

import itertools
import os
import sysconfig
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from loaderkit.memory.probes import probe_of, read_blocks
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Frame: TypeAlias = tuple[str, int]
Blocks: TypeAlias = dict[tuple[Frame, ...], tuple[int, int]]
"""Count and bytes of a device's memory in use, by the frames that asked for it."""

_FRAMES = 12
_OWN_SHOWN = 3
_OURS = str(Path(__file__).parent.parent) + os.sep
_HIDDEN = (_OURS, tracemalloc.__file__)
_LIBRARIES = ("<frozen", *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
_NO_FRAME = "no Python line: backward() or native code asked for it"


@dataclass(frozen=True)
class Site:
    """A place whose allocations stay."""

    lines: tuple[str, ...]
    """Files and lines, the innermost last, without those of the detector, and of a
    library only the innermost."""
    per_epoch: float
    """Allocations that stay, each epoch."""
    bytes_per_epoch: int
    """What they take; of a tensor on the host, Python sees only its object."""
    memory: str = "of Python's"
    """Which memory that is, such as "on cuda:0"."""

    def __str__(self) -> str:
        size = f"{format_bytes(self.bytes_per_epoch)} {self.memory}"
        many = "allocation stays" if self.per_epoch == 1 else "allocations stay"
        place = " > ".join(self.lines)
        return f"{self.per_epoch:.4g} {many} each epoch, {size}: {place}"


def allocation_sites(
    function: Callable[[], Any],
    *,
    device: torch.device | None = None,
    epochs: int = 4,
    most: int = 3,
) -> tuple[Site, ...]:
    """Run a function traced, and find the places whose allocations stay.

    Everything is some times slower meanwhile, which is why no detector does it unasked.

    Args:
        function: One epoch; takes nothing.
        device: Whose allocator is traced too, if torch can; none if None.
        epochs: Calls to compare, after two that are warm-up.
        most: Places to name of each memory.

    Returns:
        The places by the bytes that stay, the most first; the device's before Python's.
    """
    place = torch.device("cpu") if device is None else device
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start(_FRAMES)
    try:
        with probe_of(place).recording():
            for _ in range(2):
                function()
            blocks, before = [live_blocks(place)], tracemalloc.take_snapshot()
            for _ in range(epochs):
                function()
                blocks.append(live_blocks(place))
            after = tracemalloc.take_snapshot()
    finally:
        if started:
            tracemalloc.stop()
    grown = after.compare_to(before, "traceback")
    found = [
        Site(lines, each.count_diff / epochs, each.size_diff // epochs)
        for each in grown
        if each.count_diff >= epochs
        and (lines := _lines([(f.filename, f.lineno) for f in each.traceback]))
    ]
    on_device = device_sites(blocks, place, epochs=epochs, most=most)
    return on_device + _heaviest(found, most)


def live_blocks(device: torch.device) -> Blocks:
    """Count the memory of a device that is in use, by who asked for it.

    Args:
        device: Whose.

    Returns:
        Empty where torch does not tell.
    """
    found: Blocks = {}
    for block in read_blocks(device):
        count, size = found.get(block.frames, (0, 0))
        found[block.frames] = count + 1, size + block.size
    return found


def device_sites(
    blocks: Sequence[Blocks], device: torch.device, *, epochs: int, most: int = 3
) -> tuple[Site, ...]:
    """Find the places whose memory on a device became more, and never less.

    Args:
        blocks: From :func:`live_blocks`, two or more times.
        device: To name.
        epochs: Between the first and the last.
        most: Places to name.

    Returns:
        The places by the bytes that stay, the most first.
    """
    found = []
    for frames in blocks[-1]:
        counts, sizes = zip(*(each.get(frames, (0, 0)) for each in blocks), strict=True)
        steps = [after - before for before, after in itertools.pairwise(sizes)]
        more = counts[-1] - counts[0]
        longer = len(steps) > 1 and 2 * sum(step > 0 for step in steps) >= len(steps)
        if min(steps) >= 0 and (2 * more >= epochs or longer):
            lines = _lines(frames) or (_NO_FRAME,)
            size = sum(steps) // epochs
            found.append(Site(lines, more / epochs, size, f"on {device}"))
    return _heaviest(found, most)


def _heaviest(sites: list[Site], most: int) -> tuple[Site, ...]:
    return tuple(sorted(sites, key=lambda site: -site.bytes_per_epoch)[:most])


def _lines(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Write frames, the innermost last; of libraries only that."""
    seen = [each for each in frames if not each[0].startswith(_HIDDEN)]
    own = [each for each in seen[:-1] if not each[0].startswith(_LIBRARIES)]
    shown = own[-_OWN_SHOWN:] + seen[-1:]
    return tuple(f"{Path(name).name}:{line}" for name, line in shown)
