"""Families of models and an architecture of transformers, against the profiler."""

import pytest
import torch
from drawn_families import FAMILIES, draw_family_step

from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.measure import measure_step

QUICK = ("walk_embeddings", "two_optimizers", "label_propagation", "knowledge_jumps")


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize(
    "family",
    [
        family if family in QUICK else pytest.param(family, marks=pytest.mark.slow)
        # each once, though some of the quick ones are among every fourth
        for family in dict.fromkeys([*list(FAMILIES)[::4], *QUICK])
    ],
)
def test_the_profilers_peak_of_a_family_is_in_the_interval(family):
    drawn, before = draw_family_step(0, family), torch.get_num_threads()
    torch.set_num_threads(drawn.threads)
    try:
        truth = max(measure_step(drawn.model, drawn.batch, drawn.step).values())
        estimated = estimate(drawn.model, drawn.batch, drawn.step)
    finally:
        torch.set_num_threads(before)

    assert estimated.low <= truth <= estimated.high
    if estimated.exact:
        assert estimated.peak == pytest.approx(truth, rel=0.005)
