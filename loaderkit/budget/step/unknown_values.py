"""Tracks a step with other answers to the values that it reads and nobody knows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.step.assumed_scalars import LEAST, MOST, Assumed
from loaderkit.budget.step.peaks import peaks_of, totals
from loaderkit.budget.step.track import has_assumption, track_step
from loaderkit.budget.step.value_answers import ALL_CHOSEN, SCALAR

if TYPE_CHECKING:
    import torch

    from loaderkit.budget.step.allocation_log import Log
    from loaderkit.budget.step.train_step import Step


class TrackedAnswers(NamedTuple):
    """A step with its unknown values taken for something."""

    assumed: Assumed
    """For what."""
    log: Log
    """Of the step."""


def track_other_answers(
    model: torch.nn.Module, batch: object, step: Step, log: Log
) -> list[TrackedAnswers]:
    """Track a step with other answers than that all is chosen and all holds.

    Args:
        model: A module; it is not changed.
        batch: What it is called with.
        step: How a step is made.
        log: The step as it was tracked with those.

    Returns:
        The steps that ran: a model may refuse that nothing is chosen.
    """
    tracked = []
    for alternatives in _other_answers(log):
        for assumed in alternatives:
            try:
                other = track_step(model, batch, step, assumed=assumed)
            except Exception:  # noqa: BLE001 -- a model may need more than one element
                continue
            tracked.append(TrackedAnswers(assumed, other))
            break
    return tracked


def costliest_answers(
    model: torch.nn.Module, batch: object, step: Step, log: Log
) -> TrackedAnswers:
    """Find the answers with which a step takes most.

    Args:
        model: A module; it is not changed.
        batch: What it is called with.
        step: How a step is made.
        log: The step as it was tracked with all chosen and all conditions met.

    Returns:
        The step with these; as it was, where it asks for no unknown value.
    """
    as_it_was = TrackedAnswers(MOST, log)
    if not has_assumption(log, (ALL_CHOSEN, SCALAR)):
        return as_it_was
    others = track_other_answers(model, batch, step, log)
    return max([as_it_was, *others], key=_bytes_of_all_phases)


def _bytes_of_all_phases(tracked: TrackedAnswers) -> int:
    """Add up the peaks of the phases.

    The highest alone may be that of the optimizer, which is the same in all branches
    of a small batch.
    """
    return sum(totals(peaks_of(tracked.log)).values())


def _other_answers(log: Log) -> list[list[Assumed]]:
    """List what else unknown values may be, and what to try where a step refuses it."""
    # A check of the user's, or of torch's distributions, raises where nothing holds.
    # Rows that are split by counts take least where the parts are alike.
    answers = [[LEAST, replace(LEAST, conditions=(True,))], [Assumed(share=0.5)]]
    if log.assumed_conditions > 1:
        answers.append([Assumed(conditions=(True, False))])
        answers.append([Assumed(conditions=(False, True))])
    choices: list[tuple[float, ...]] = []
    if log.assumed_numbers:
        choices += [(-math.inf,), (math.inf,)]
    if log.assumed_numbers > 1:
        choices += [(math.inf, -math.inf), (-math.inf, math.inf)]
        # The smaller ones for what is computed of two: of infinite ones that is NaN.
        choices += [(3.0, -2.0), (-2.0, 3.0)]
    return answers + [[Assumed(numbers=numbers)] for numbers in choices]
