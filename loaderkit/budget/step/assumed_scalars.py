"""Assumes what a step reads and fake tensors do not have.

``if error.item() < limit`` and ``while not done`` ask for a number or a condition,
``h[: int(is_far.sum())]`` for a count.  Each answer may take other memory, so a step is
tracked with one end of what they may be, and again with the other.  A loop may wait for
either, so after many readings answers are drawn: then each loop ends, whatever it waits
for.

Pure: it reads no tensor.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch

_MOST_ALIKE = 100
"""Readings that are answered alike; chosen: a loop of an iteration that converges takes
fewer, and a hundred rounds of a small one are tracked in about a second."""


@dataclass(frozen=True)
class Assumed:
    """What a step's unknown values are taken for, while it is tracked once."""

    share: float = 1.0
    """Of its elements a mask chooses this share; a count is this share of the most that
    it can be, and 1 at least."""
    numbers: tuple[float, ...] = (1.0,)
    """What floats are, turn about.  An infinite one is beyond any limit that it is held
    against, and cannot be taken for a count of rounds: its ``int`` raises."""
    conditions: tuple[bool, ...] = (True,)
    """What conditions are, turn about."""


MOST = Assumed()
"""All elements chosen, counts as large as they can be, and conditions that hold."""

LEAST = Assumed(share=0.0, numbers=(0.0,), conditions=(False,))
"""One element chosen, counts of 1, and conditions that do not hold."""


class AssumedScalars:
    """Answers readings of scalars, one after the other."""

    def __init__(self, assumed: Assumed) -> None:
        """Begin a step.

        Args:
            assumed: What is answered.
        """
        self._share = assumed.share
        self._numbers = itertools.cycle(assumed.numbers)
        self._conditions = itertools.cycle(assumed.conditions)
        self._readings = 0
        # Drawn, since a loop over several conditions could fit any fixed turn of them.
        self._draws = random.Random(0)

    def read(self, dtype: torch.dtype, most: int | None = None) -> bool | int | float:
        """Assume the value of a scalar.

        Args:
            dtype: Its type.
            most: What it can be at most, where it is a count or a position.

        Returns:
            A value of this type.

        >>> scalars = AssumedScalars(Assumed(share=0.5, conditions=(False,)))
        >>> scalars.read(torch.bool), scalars.read(torch.int64, most=60)
        (False, 30)
        """
        self._readings += 1
        is_drawn = self._readings > _MOST_ALIKE
        if dtype == torch.bool:
            return self._draws.random() < 0.5 if is_drawn else next(self._conditions)
        if dtype.is_floating_point and is_drawn:
            return float(self._draws.randrange(2))
        if dtype.is_floating_point and most is None:
            return next(self._numbers)
        count = 1
        if most is not None and not is_drawn:
            count = max(1, round(self._share * most))
        return float(count) if dtype.is_floating_point else count
