"""Random numbers of a batch follow from its seed; those of the training go on after it.

Asking numpy and random for their states, and giving them back, makes 1,248 Python
numbers a batch.  Copying the bytes where they lie was several times as quick, but it
read and wrote the memory of other libraries' objects, which is not ours to know.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave the random numbers of torch, numpy and random as they were."""
    states = RandomStates.read()
    try:
        yield
    finally:
        states.put_back()


class Seeded:
    """A block that draws random numbers from a seed; then they go on as before.

    A worker has nobody to go on for, so there nothing is put back.  Blocks can be
    nested: a sample may be read through a loader.

    Args:
        seed: What the numbers of torch, numpy and random follow from within.
    """

    __slots__ = ("_states", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        self._states = RandomStates.read() if get_worker_info() is None else None
        torch.default_generator.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._states is not None:
            self._states.put_back()


@dataclass(frozen=True)
class RandomStates:
    """The generators behind the functions of torch, random and numpy, as they were."""

    torch: torch.Tensor
    python: tuple[Any, ...]
    numpy: Any
    """A dict, and not the older tuple: another generator may be behind them."""

    @classmethod
    def read(cls) -> RandomStates:
        """Ask for all three states."""
        numpy = np.random.get_state(legacy=False)
        return cls(torch.get_rng_state(), random.getstate(), numpy)

    def put_back(self) -> None:
        """Go on from these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
