"""The options of ``plan_batch`` and ``assert_fits`` as a type checker sees them.

``PlanOptions`` and ``FitOptions`` check names when a program runs; these types tell of
a wrong name or a wrong type before.  A test holds each pair to the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

if TYPE_CHECKING:
    import torch

Loss: TypeAlias = Callable[[Any, Any], Any] | Callable[[Any], Any]
"""Called with what the model gives and the batch or its targets, or with the first
alone.  With ``...`` for its arguments a strict checker would not know those of a
lambda."""


class StepKeywords(TypedDict, total=False):
    """What a training step is made of; see ``estimate_step``."""

    loss: Loss | None
    optimizer: Any
    autocast: torch.dtype | str | None


class PlanKeywords(StepKeywords, total=False):
    """Fields of ``PlanOptions``, where what each one means is told."""

    collate_fn: Callable[[list[Any]], Any] | None
    epochs: int
    margin: float | None


class LoaderBounds(TypedDict, total=False):
    """The bounds of a ``BatchBudget`` as ``build_loader`` takes them."""

    batch_size: int
    max_nodes: int
    max_edges: int
    max_tokens: int
    bucket_by: str


class FitKeywords(StepKeywords, total=False):
    """Fields of ``FitOptions``, where what each one means is told."""

    name: str | None
    rise: float
