"""Random numbers of a batch follow from its seed; those of the training go on after it.

So do those of a sample that is packed, whichever process reads it: forked workers begin
with one state, and each would draw the numbers that another has drawn.

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


def seed_all(seed: int) -> None:
    """Let the numbers of torch, numpy and random follow from a seed."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def mix_seed(seed: int, epoch: int, number: int) -> int:
    """Make one seed of three numbers (splitmix64's last step)."""
    value = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + number) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return (value ^ (value >> 31)) % 2**63


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
        seed_all(self.seed)

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
