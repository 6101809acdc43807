"""Seeds for the random numbers that are drawn while a batch, or a sample, is read.

A batch is read with numbers that follow from its seed, so they are equal for any number
of workers.  Afterwards the numbers of the training go on as if nothing had been drawn.
Samples are packed with seeds as well: forked workers start with equal states, and would
all draw the same numbers.

Reading and restoring the states of numpy and random through their public functions
creates 1,248 Python integers for each batch.  Copying the bytes of these states
directly was several times as fast, but it relied on how other libraries lay out their
objects in memory.
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
def preserve_random_states() -> Iterator[None]:
    """Restore the random states of torch, numpy and random after the block."""
    states = RandomStates.read()
    try:
        yield
    finally:
        states.put_back()


def seed_all(seed: int) -> None:
    """Seed torch, numpy and random."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def mix_seed(seed: int, epoch: int, number: int) -> int:
    """Mix three numbers into one seed, by the finalizer of splitmix64.

    Neighbouring epochs and numbers must give seeds that differ in many bits, because
    generators seeded with similar numbers may draw similar ones.

    Returns:
        From 0 to 2**63 - 1, which int64 and ``torch.manual_seed`` hold.
    """
    value = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + number) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return (value ^ (value >> 31)) % 2**63


class Seeded:
    """A block whose random numbers follow from a seed.

    The states are restored after the block, but not in a worker, where nothing draws
    between two batches.  Blocks can be nested: a sample may be read through a loader.

    Args:
        seed: Seed of torch, numpy and random within the block.
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
    """States of the global generators of torch, random and numpy."""

    torch: torch.Tensor
    python: tuple[Any, ...]
    numpy: Any
    """A dict, since the older tuple cannot hold generators other than MT19937."""

    @classmethod
    def read(cls) -> RandomStates:
        """Read all three states."""
        numpy = np.random.get_state(legacy=False)
        return cls(torch.get_rng_state(), random.getstate(), numpy)

    def put_back(self) -> None:
        """Restore these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
