"""Law: formulas that write in place without a mode are estimated as they run."""

import itertools

import pytest
import torch

from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.train_step import Step

F = torch.nn.functional
SHAPES = {"none": None, "a column": (16,), "one": (1,), "all": (512, 16)}


@pytest.mark.many_cases(quick=2)
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
        # The profiler does not see what was there before, such as these weights.
        assert estimated.peak - estimated.parts["captured"] == truth
        assert not estimated.assumptions


def _rounded(hidden):
    return torch.fake_quantize_per_tensor_affine(hidden, 0.1, 0, -128, 127)


def _rounded_by_tensors(hidden):
    zero = torch.tensor(0, dtype=torch.int32)
    scale = torch.tensor(0.1)
    return torch.fake_quantize_per_tensor_affine(hidden, scale, zero, -128, 127)


def _rounded_by_channel(hidden):
    scales, zeros = torch.full((16,), 0.1), torch.zeros(16, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(hidden, scales, zeros, 1, -128, 127)


def _reduced(reduction, *, by_lengths):
    def reduce(hidden):
        count = len(hidden) // 8
        ends = torch.arange(count + 1) * 8
        rows = {"lengths": torch.full((count,), 8)} if by_lengths else {"offsets": ends}
        return torch.segment_reduce(hidden, reduction, axis=0, **rows)

    return reduce


REAL_VALUES_ONLY = {
    "rounded": _rounded,
    "rounded by tensors": _rounded_by_tensors,
    "rounded by channel": _rounded_by_channel,
    **{
        f"{reduction} by {'lengths' if by_lengths else 'offsets'}": _reduced(
            reduction, by_lengths=by_lengths
        )
        for reduction in ("sum", "mean", "max", "min", "prod")
        for by_lengths in (True, False)
    },
}
"""Kernels that cannot be made with invented operands: they would read elsewhere."""


class _Applied(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.function = torch.nn.Linear(16, 16), function

    def forward(self, x):
        return self.function(self.inner(x))


@pytest.mark.many_cases(quick=15)
@pytest.mark.parametrize("name", REAL_VALUES_ONLY)
@pytest.mark.parametrize("rows", [512, 2048])
def test_kernels_that_cannot_be_tried_are_exact(name, rows):
    model, batch = _Applied(REAL_VALUES_ONLY[name]), torch.randn(rows, 16)

    estimated = estimate(model, batch, Step(optimizer="sgd"))

    truth = max(measure_step(model, batch, Step(optimizer="sgd")).values())
    assert estimated.peak == pytest.approx(truth, abs=64)
    assert estimated.low <= truth <= estimated.high
    assert not estimated.assumptions


def _forward_over(function):
    return lambda hidden: torch.func.jvp(
        function, (hidden,), (torch.ones_like(hidden),)
    )[1].square()


GOING_FORWARD = {
    "product": _forward_over(lambda x: x @ torch.ones(16, 16)),
    "two layers": _forward_over(
        lambda x: F.linear(F.linear(x, torch.ones(8, 16)).tanh(), torch.ones(4, 8))
    ),
    "softmax": _forward_over(lambda x: F.linear(x, torch.ones(8, 16)).softmax(-1)),
    "norm": _forward_over(lambda x: F.layer_norm(x, (16,))),
}


@pytest.mark.parametrize("name", GOING_FORWARD)
def test_derivatives_that_go_forward_are_within_a_narrow_interval(name):
    model, batch = _Applied(GOING_FORWARD[name]), torch.randn(2048, 16)

    estimated = estimate(model, batch, Step(optimizer="sgd"))

    truth = max(measure_step(model, batch, Step(optimizer="sgd")).values())
    assert estimated.peak == pytest.approx(truth, rel=1e-3)
    assert estimated.low <= truth <= estimated.high <= 1.04 * estimated.peak
