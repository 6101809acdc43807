"""Assumes values of scalars that a step reads and that fake tensors do not have.

``if error.item() < limit`` and ``while not done`` ask for a number or a condition.
Each branch may take other memory, so a step is tracked with conditions that hold, and
again with conditions that do not.  A loop may wait for either, so after many readings
answers are drawn: then each loop ends, whatever it waits for.

Pure: it reads no tensor.
"""

from __future__ import annotations

import random

import torch

_MOST_ALIKE = 100
"""Readings that are answered alike; chosen: a loop of an iteration that converges takes
fewer, and a hundred rounds of a small one are tracked in about a second."""


class AssumedScalars:
    """Answers readings of scalars, one after the other."""

    def __init__(self, *, share: float, conditions: bool) -> None:
        """Begin a step.

        Args:
            share: What a float is taken for.
            conditions: What a condition is taken for.
        """
        self._share = share
        self._conditions = conditions
        self._readings = 0
        # Drawn, since a loop over several conditions could fit any fixed turn of them.
        self._draws = random.Random(0)

    def read(self, dtype: torch.dtype) -> bool | int | float:
        """Assume the value of a scalar.

        Args:
            dtype: Its type.

        Returns:
            A value of this type.

        >>> AssumedScalars(share=1.0, conditions=False).read(torch.bool)
        False
        """
        self._readings += 1
        is_drawn = self._readings > _MOST_ALIKE
        if dtype == torch.bool:
            return self._draws.random() < 0.5 if is_drawn else self._conditions
        if dtype.is_floating_point:
            return float(self._draws.randrange(2)) if is_drawn else self._share
        return 1
