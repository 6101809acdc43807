"""Where what grows was allocated: a second, shorter run that is traced.

Python's memory by tracemalloc; a device's by the allocator's own history, where torch
keeps one (CUDA, ROCm, XPU).
"""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from loaderkit.library_files import is_library_file, is_own_file
from loaderkit.memory.probes import probe_of, read_blocks, with_index
from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Frame: TypeAlias = tuple[str, int]
"""File and line."""
Blocks: TypeAlias = dict[tuple[Frame, ...], tuple[int, int]]
"""Count and bytes of a device's memory in use, by the frames that asked for it."""

_FRAMES_TRACED = 12
"""Chosen: a line of the user's is seldom further from what allocates; each frame costs
tracemalloc time and memory at each allocation."""
_USERS_FRAMES_SHOWN = 3
"""Of the user's: the line, what called it, and the loop."""
_NO_FRAME = "no Python line: backward() or native code asked for it"
_WARM_UP_CALLS = 2
"""The first call under tracemalloc fills caches of Python's and of torch's."""


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
        lines = " > ".join(self.lines)
        return f"{self.per_epoch:.4g} {many} each epoch, {size}: {lines}"


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
    traced_device = torch.device("cpu") if device is None else with_index(device)
    begins_here = not tracemalloc.is_tracing()
    if begins_here:
        tracemalloc.start(_FRAMES_TRACED)
    try:
        with probe_of(traced_device).recording():
            for _ in range(_WARM_UP_CALLS):
                function()
            blocks = [live_blocks(traced_device)]
            before = tracemalloc.take_snapshot()
            for _ in range(epochs):
                function()
                blocks.append(live_blocks(traced_device))
            after = tracemalloc.take_snapshot()
    finally:
        # A trace of the user's goes on.
        if begins_here:
            tracemalloc.stop()
    on_device = device_sites(blocks, traced_device, epochs=epochs, most=most)
    return on_device + _heaviest_sites(_host_sites(before, after, epochs), most)


def live_blocks(device: torch.device) -> Blocks:
    """Count the memory of a device that is in use, by who asked for it.

    Args:
        device: Whose.

    Returns:
        Empty where torch does not tell.
    """
    blocks: Blocks = {}
    for block in read_blocks(device):
        count, size = blocks.get(block.frames, (0, 0))
        blocks[block.frames] = count + 1, size + block.size
    return blocks


def device_sites(
    blocks: Sequence[Blocks],
    device: torch.device,
    *,
    epochs: int,
    most: int = 3,
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
    sites = []
    for frames in blocks[-1]:
        amounts = [snapshot.get(frames, (0, 0)) for snapshot in blocks]
        counts, sizes = zip(*amounts, strict=True)
        more_blocks = counts[-1] - counts[0]
        steps = [after - before for before, after in itertools.pairwise(sizes)]
        rises = sum(step > 0 for step in steps)
        # One block may be made again, larger each time: what is joined to itself.
        gets_larger = len(steps) > 1 and 2 * rises >= len(steps)
        if min(steps) >= 0 and (2 * more_blocks >= epochs or gets_larger):
            site = Site(
                lines=_write_frames(frames) or (_NO_FRAME,),
                per_epoch=more_blocks / epochs,
                bytes_per_epoch=sum(steps) // epochs,
                memory=f"on {device}",
            )
            sites.append(site)
    return _heaviest_sites(sites, most)


def _host_sites(
    before: tracemalloc.Snapshot,
    after: tracemalloc.Snapshot,
    epochs: int,
) -> list[Site]:
    """Find the places whose allocations by Python stay, at least one each epoch."""
    sites = []
    for change in after.compare_to(before, "traceback"):
        frames = [(frame.filename, frame.lineno) for frame in change.traceback]
        lines = _write_frames(frames)
        # Without lines it is the detector's own, or tracemalloc's.
        if lines and change.count_diff >= epochs:
            per_epoch = change.count_diff / epochs
            sites.append(Site(lines, per_epoch, change.size_diff // epochs))
    return sites


def _heaviest_sites(sites: list[Site], most: int) -> tuple[Site, ...]:
    return tuple(sorted(sites, key=lambda site: -site.bytes_per_epoch)[:most])


def _write_frames(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Write frames, the innermost last; of libraries only that."""
    shown = [
        frame
        for frame in frames
        if not is_own_file(frame[0]) and frame[0] != tracemalloc.__file__
    ]
    users = [frame for frame in shown[:-1] if not is_library_file(frame[0])]
    lines = users[-_USERS_FRAMES_SHOWN:] + shown[-1:]
    return tuple(f"{Path(file).name}:{number}" for file, number in lines)
