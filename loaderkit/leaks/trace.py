"""Where what grows was allocated: a second, shorter run under tracemalloc."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

_FRAMES = 12
_OURS = str(Path(__file__).parent.parent)


@dataclass(frozen=True)
class Site:
    """A place whose allocations stay."""

    lines: tuple[str, ...]
    """Files and lines, the innermost last, without those of the detector."""
    per_epoch: float
    """Allocations that stay, each epoch."""
    bytes_per_epoch: int
    """Their Python part; what a tensor takes itself, Python does not see."""

    def __str__(self) -> str:
        return (
            f"{self.per_epoch:.4g} allocations each epoch stay, "
            f"{format_bytes(self.bytes_per_epoch)} of Python's: "
            f"{' > '.join(self.lines)}"
        )


def allocation_sites(
    function: Callable[[], Any], *, epochs: int = 4, most: int = 3
) -> tuple[Site, ...]:
    """Run a function under tracemalloc and find the places whose allocations stay.

    Everything is some times slower meanwhile, which is why no detector does it unasked.

    Args:
        function: One epoch; takes nothing.
        epochs: Calls to compare, after two that are warm-up.
        most: Places to name.

    Returns:
        The places by the bytes that stay, the most first.
    """
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start(_FRAMES)
    try:
        for _ in range(2):
            function()
        before = tracemalloc.take_snapshot()
        for _ in range(epochs):
            function()
        after = tracemalloc.take_snapshot()
    finally:
        if started:
            tracemalloc.stop()
    grown = after.compare_to(before, "traceback")
    found = [
        Site(lines, each.count_diff / epochs, each.size_diff // epochs)
        for each in grown
        if each.count_diff >= epochs and (lines := _lines(each.traceback))
    ]
    return tuple(sorted(found, key=lambda site: -site.bytes_per_epoch)[:most])


def _lines(traceback: tracemalloc.Traceback) -> tuple[str, ...]:
    """Write the frames below the detector; of a library only the innermost."""
    names = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback
        if not frame.filename.startswith((_OURS, tracemalloc.__file__))
    ]
    return tuple(names[-4:])
