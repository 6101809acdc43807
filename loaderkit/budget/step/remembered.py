"""How long estimates remember what they learnt: as long as a plan, and little beyond.

What operators give for fakes, what kernels take, and what optimizers keep is asked for
again by the next step of a plan, and by the next estimate of a model.  A step over
packed sequences leaves 50 MB of it, which the training that follows needs more.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from loaderkit.budget.step.formulas import FORMULAS
from loaderkit.budget.step.kernels import KERNELS
from loaderkit.budget.step.layouts import LAYOUTS
from loaderkit.budget.step.optimizer_states import STATES
from loaderkit.budget.step.output_cache import OUTPUTS

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Memory(Protocol):
    def trim(self) -> None:
        """Forget all but the newest things."""


_MEMORIES: tuple[_Memory, ...] = (OUTPUTS, KERNELS, FORMULAS, LAYOUTS, STATES)


class _Depth:
    """How many estimates and plans run now, within each other or in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0

    def begin(self) -> None:
        """Count one that begins."""
        with self._lock:
            self._running += 1

    def end(self) -> None:
        """Count one that ends; after the last of all, trim what is remembered."""
        with self._lock:
            self._running -= 1
            if not self._running:
                for memory in _MEMORIES:
                    memory.trim()


_DEPTH = _Depth()


@contextmanager
def remembering() -> Iterator[None]:
    """Remember all until the block ends, and after the outermost one little."""
    _DEPTH.begin()
    try:
        yield
    finally:
        _DEPTH.end()
