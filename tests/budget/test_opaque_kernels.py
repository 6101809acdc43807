"""Kernels and formulas of linear algebra and alignments, over sizes drawn at random."""

import random

import pytest
import torch
from torch import nn
from torch.nn.functional import ctc_loss

from loaderkit.budget.step.accumulation import RunningNode
from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.shape_rules import shape_rule
from loaderkit.budget.step.train_step import Step


def _positive_definite(h):
    return h @ h.mT + 3 * torch.eye(h.shape[-1])


OPERATORS = {
    "cholesky": lambda h: torch.linalg.cholesky(_positive_definite(h)),
    "cholesky_ex": lambda h: torch.linalg.cholesky_ex(_positive_definite(h))[0],
    "cholesky_inverse": lambda h: torch.cholesky_inverse(
        torch.linalg.cholesky(_positive_definite(h))
    ),
    "cholesky_solve": lambda h: torch.cholesky_solve(
        h, torch.linalg.cholesky(_positive_definite(h))
    ),
    "det": lambda h: torch.linalg.det(_positive_definite(h)),
    "logdet": lambda h: torch.logdet(_positive_definite(h)),
    "slogdet": lambda h: torch.linalg.slogdet(_positive_definite(h))[1],
    "inv": lambda h: torch.linalg.inv(_positive_definite(h)),
    "solve": lambda h: torch.linalg.solve(_positive_definite(h), h),
    "lu": lambda h: torch.linalg.lu(_positive_definite(h))[2],
    "lu_factor": lambda h: torch.linalg.lu_factor(_positive_definite(h))[0],
    "svdvals": torch.linalg.svdvals,
    "pinv": lambda h: torch.linalg.pinv(_positive_definite(h)),
    "lstsq": lambda h: torch.linalg.lstsq(_positive_definite(h), h)[0],
    "lstsq of few equations": lambda h: torch.linalg.lstsq(h[:, ::2], h[:, ::2])[0],
}
WIDEST = 0.25
"""Of the truth; before pivots and positive definite operands were invented, up to
100 %."""


class OfMatrices(nn.Module):
    def __init__(self, operator, width):
        super().__init__()
        self.map = nn.Linear(width, width)
        self.operator = operator
        self.last = nn.Linear(1, 1)

    def forward(self, x):
        return self.last(self.operator(self.map(x)).flatten()[:, None]).mean()


class Aligned(nn.Module):
    """A CTC loss; torch itself reads lengths that are lists out of memory."""

    def __init__(self, classes):
        super().__init__()
        self.map = nn.Linear(32, classes)

    def forward(self, x):
        scores = self.map(x).log_softmax(-1)
        steps, samples, _ = scores.shape
        longest = max(2, steps // 4)
        targets = torch.ones(samples, longest, dtype=torch.long)
        input_lengths = torch.full((samples,), steps)
        target_lengths = torch.full((samples,), longest)
        return ctc_loss(scores, targets, input_lengths, target_lengths)


def _compared(model, batch):
    step = Step(optimizer="sgd")
    truth = max(measure_step(model, batch, step).values())
    return truth, estimate(model, batch, step)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [None, [-1], [0], [0, 1]])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (1, 1, 1), (2, 3)])
def test_norms_have_the_shapes_of_torchs_kernel(shape, dim, keepdim):
    rule = shape_rule(torch.ops.aten.linalg_vector_norm.default)
    vectors = torch.randn(shape)

    norm = rule(vectors.to("meta"), 2, dim, keepdim)

    assert norm.shape == torch.linalg.vector_norm(vectors, 2, dim, keepdim).shape


def test_a_number_has_a_norm():
    rule = shape_rule(torch.ops.aten.linalg_vector_norm.default)

    assert rule(torch.tensor(3.0, device="meta"), 2, [0]).shape == ()


@pytest.mark.parametrize("driver", [None, "gels", "gelsy", "gelsd", "gelss"])
@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (12, 8), (8, 12)])
@pytest.mark.parametrize("right_shape", [(3,), ()])
def test_least_squares_give_what_torchs_driver_gives(
    driver, rows, columns, right_shape
):
    left, right = torch.randn(5, rows, columns), torch.randn(5, rows, *right_shape)
    rule = shape_rule(torch.ops.aten.linalg_lstsq.default)

    expected = torch.ops.aten.linalg_lstsq(left, right, driver=driver)
    for tensor, of_torch in zip(
        rule(left, right, driver=driver), expected, strict=True
    ):
        assert (tensor.shape, tensor.dtype) == (of_torch.shape, of_torch.dtype)
    solution, *_ = rule(left, right, driver=driver)
    storage_bytes = solution.untyped_storage().nbytes()
    assert storage_bytes == expected[0].untyped_storage().nbytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_linear_algebra_is_known_in_any_size(name):
    rng = random.Random(name)
    width = rng.choice([8, 13, 24, 32, 48, 64])
    samples = max(8, 300_000 // width**2 // rng.choice([1, 2, 3]))
    batch = torch.randn(samples, width, width) * 0.2

    truth, estimated = _compared(OfMatrices(OPERATORS[name], width), batch)

    assert estimated.low <= truth <= estimated.high
    assert estimated.high - estimated.low <= WIDEST * truth
    if estimated.exact:
        assert estimated.peak == pytest.approx(truth, rel=0.005)


@pytest.mark.parametrize("shape", [(30, 40, 8), (20, 8, 40), (40, 90, 8)])
@pytest.mark.parametrize(
    "operator",
    [
        pytest.param(torch.linalg.pinv, id="pinv"),
        pytest.param(
            lambda h: torch.linalg.lstsq(h, torch.ones_like(h[..., :3]))[0], id="lstsq"
        ),
    ],
)
def test_formulas_that_add_terms_of_their_own_are_exact(operator, shape):
    # Their sums were taken for gradients that meet, which are added in place: tall and
    # wide matrices were 4 to 13 % too low.
    batch = torch.randn(shape[0] * shape[1] * shape[2] // 8, 8)
    model = nn.Sequential(nn.Linear(8, 8), _OnMatrices(operator, shape))

    truth, estimated = _compared(model, batch)

    assert estimated.low <= truth <= estimated.high
    assert estimated.peak == pytest.approx(truth, rel=1e-4)
    assert estimated.high - estimated.low <= 0.05 * truth


def test_their_twin_that_adds_terms_in_place_would_be_seen(monkeypatch):
    # torch's own formulas say which add terms: what reads them is taken out.
    monkeypatch.setattr(RunningNode, "adds_own_term", lambda *_: False)
    model = nn.Sequential(nn.Linear(8, 8), _OnMatrices(torch.linalg.pinv, (30, 40, 8)))

    truth, estimated = _compared(model, torch.randn(30 * 40, 8))

    assert estimated.peak < 0.97 * truth


class _OnMatrices(nn.Module):
    """An operator on what it is given, as matrices of a shape."""

    def __init__(self, operator, shape):
        super().__init__()
        self.operator, self.shape = operator, shape

    def forward(self, x):
        return self.operator(x.view(self.shape)).square().mean()


class Exponential(nn.Module):
    """Of matrices whose norms, and so the terms of their series, differ."""

    def __init__(self, norms, width):
        super().__init__()
        self.map = nn.Linear(width, width)
        self.register_buffer("norms", norms[:, None, None])
        self.last = nn.Linear(1, 1)

    def forward(self, x):
        h = self.map(x)
        rows = h.abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
        exponentials = torch.matrix_exp(h / rows * self.norms)
        return self.last(exponentials.flatten()[:, None]).tanh().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lowest", "highest"), [(-9, -9), (-4, -1), (-1, 2), (0.5, 3), (2, 2)]
)
def test_an_exponential_of_many_matrices_has_a_lower_end(lowest, highest):
    samples, width = 60, 16
    norms = 10 ** torch.linspace(lowest, highest, samples)
    batch = torch.randn(samples, width, width)

    truth, estimated = _compared(Exponential(norms, width), batch)

    assert estimated.low <= truth <= estimated.high
    # With floats of one kind the lower end was 0, which was 76 % below the truth.
    assert estimated.low >= 0.5 * truth


@pytest.mark.parametrize("norm", [1e-9, 1e-2, 1.0, 5.0])
def test_so_it_is_for_a_single_matrix_which_takes_the_series_it_needs(norm):
    # Several take the longest series, one takes that which its norm asks for.
    model = Exponential(torch.tensor([norm]), 96)

    truth, estimated = _compared(model, torch.randn(1, 96, 96))

    assert estimated.low <= truth <= estimated.high


def test_an_exponential_of_two_matrices_is_known():
    # However their norms differ, squaring takes less than the series did.
    batch = torch.randn(2, 96, 96)

    truth, estimated = _compared(Exponential(torch.tensor([0.1, 300.0]), 96), batch)

    assert estimated.low <= truth <= estimated.high
    assert estimated.high - estimated.low <= 0.05 * truth


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "samples", "classes"), [(60, 8, 32), (150, 32, 12), (400, 8, 5)]
)
def test_the_alignments_of_a_ctc_loss_are_counted(steps, samples, classes):
    batch = torch.randn(steps, samples, 32)

    truth, estimated = _compared(Aligned(classes), batch)

    assert estimated.low <= truth <= estimated.high
    assert estimated.peak == pytest.approx(truth, rel=0.005)
    assert estimated.high - estimated.low <= 0.05 * truth
