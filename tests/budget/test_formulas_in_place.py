"""Law: formulas that write in place without a mode are estimated as they run."""

import itertools

import pytest
import torch

from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.train_step import Step

F = torch.nn.functional
SHAPES = {"none": None, "a column": (16,), "one": (1,), "all": (512, 16)}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", SHAPES)
def test_logits_with_weights_are_exact(reduction, weight):
    model = torch.nn.Linear(16, 16)
    batch = (torch.randn(512, 16), torch.ones(512, 16))
    weights = None if SHAPES[weight] is None else torch.ones(SHAPES[weight])

    for of_positives, of_samples in itertools.product([None, weights], repeat=2):
        step = Step(
            lambda output, target: F.binary_cross_entropy_with_logits(
                output,
                target,
                weight=of_samples,  # noqa: B023 -- called in this turn
                pos_weight=of_positives,  # noqa: B023
                reduction=reduction,
            ).mean(),
            "sgd",
        )

        estimated = estimate(model, batch, step)

        truth = max(measure_step(model, batch, step).values())
        assert estimated.peak == truth
        assert not estimated.assumptions
