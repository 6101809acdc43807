"""Laws: steps that do more than to make new tensors of others."""

import pytest
import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from loaderkit import estimate_step
from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.storage_ledger import StorageLedger
from loaderkit.budget.step.train_step import Step


class Around(nn.Module):
    """A linear layer, and a function of what it gives."""

    def __init__(self, function):
        super().__init__()
        self.inner, self.function = nn.Linear(16, 48), function

    def forward(self, x):
        return self.function(self.inner(x)).square().mean()


def write_to_an_empty_tensor(h):
    squares = torch.empty(0)
    torch.mul(h.detach(), h.detach(), out=squares)
    return h + squares


def resize_as_another(h):
    scale = h.detach().new()
    scale.resize_as_(h).fill_(2.0)
    return h * scale


def resize_and_shrink(h):
    table = torch.empty(10)
    table.resize_(4 * h.numel()).zero_()
    table.resize_(h.numel())
    return h + table.view(h.shape)


def join_into_an_empty_tensor(h):
    joined = torch.empty(0)
    torch.cat([h.detach(), h.detach()], out=joined)
    return joined.mean() + h


def normalise_across_channels(h):
    return nn.functional.local_response_norm(h.view(-1, 6, 2, 4), 3)


def normalise_as_of_old(h):
    # written by hand in Python, with ``resize_as_`` and ``out=``
    return nn.CrossMapLRN2d(3)(h.view(4, 6, -1, 4))


RESIZING = (
    write_to_an_empty_tensor,
    resize_as_another,
    resize_and_shrink,
    join_into_an_empty_tensor,
    normalise_across_channels,
    normalise_as_of_old,
)


@pytest.mark.many_cases(quick=6)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("function", RESIZING)
def test_what_is_resized_takes_its_new_size(function, autocast):
    step = Step(optimizer=None, autocast=autocast)
    model, x = Around(function), torch.randn(600, 16)

    estimated = estimate(model, x, step)

    truth = max(measure_step(model, x, step).values())
    assert estimated.low <= truth <= estimated.high
    assert estimated.peak == pytest.approx(truth, rel=0.002)


def test_its_twin_that_looks_at_no_sizes_would_be_seen(monkeypatch):
    # No model makes the tracker pass over a size: the look at it is taken out.
    monkeypatch.setattr(StorageLedger, "note_written", lambda *_: None)
    step, x = Step(optimizer=None), torch.randn(600, 16)

    estimated = estimate(Around(normalise_as_of_old), x, step)

    truth = max(measure_step(Around(normalise_as_of_old), x, step).values())
    assert truth > estimated.high


LENGTHS = [5, 9, 1, 20, 65]


def pad_ragged(h):
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    ragged = torch.nested.nested_tensor_from_jagged(h, ends)
    return torch.nested.to_padded_tensor(ragged * 2, 0.0)


def test_ragged_sizes_are_known():
    step = Step(optimizer="sgd")
    model, x = Around(pad_ragged), torch.randn(sum(LENGTHS), 16)

    estimated = estimate(model, x, step)

    truth = max(measure_step(model, x, step).values())
    assert estimated.method == "tracked"
    assert estimated.low <= truth <= estimated.high
    assert estimated.peak == pytest.approx(truth, rel=0.005)


def prod_of_columns(h):
    return h.prod(1)


def prod_of_groups(h):
    return h.view(-1, 6, 8).prod(1, keepdim=True)


def prod_of_all(h):
    return h.prod()


@pytest.mark.parametrize("function", [prod_of_columns, prod_of_groups, prod_of_all])
def test_products_are_taken_for_those_without_zeros(function):
    step, x = Step(optimizer=None), torch.randn(700, 16)

    estimated = estimate(Around(function), x, step)

    truth = max(measure_step(Around(function), x, step).values())
    assert estimated.low <= truth <= estimated.high
    assert estimated.peak == pytest.approx(truth, rel=0.005)


def test_products_of_zeros_are_in_the_interval():
    def prod_of_zeros(h):
        return (0.0 * h).prod(1)

    step, x = Step(optimizer=None), torch.randn(700, 16)

    estimated = estimate(Around(prod_of_zeros), x, step)

    truth = max(measure_step(Around(prod_of_zeros), x, step).values())
    assert estimated.low <= truth <= estimated.high


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", torch.optim.RMSprop])
@pytest.mark.parametrize("compile_part", [torch.jit.script, torch.jit.trace])
def test_a_model_of_which_a_part_is_compiled_is_estimated(compile_part, optimizer):
    x = torch.randn(100, 16)
    part = nn.Sequential(nn.Linear(16, 64), nn.GELU())
    arguments = (x,) if compile_part is torch.jit.trace else ()
    model = nn.Sequential(compile_part(part, *arguments), nn.Linear(64, 3))

    estimated = estimate_step(model, x, optimizer=optimizer)

    truth = max(measure_step(model, x, Step(optimizer=optimizer)).values())
    assert estimated.method == "measured and extended"
    assert estimated.low <= truth <= estimated.high


SIZES_BY_OPERATORS = {
    "rounded down": lambda n: torch.div(n, 8, rounding_mode="trunc"),
    "rounded": lambda n: int(torch.div(n, 8).round()),
    "floored": lambda n: torch.floor_divide(n, 8),
    "multiplied": lambda n: int(torch.mul(n, 0.125)),
}


@pytest.mark.parametrize("size", SIZES_BY_OPERATORS)
def test_numbers_given_to_operators_decide_shapes(size):
    def in_windows(h):
        count = SIZES_BY_OPERATORS[size](len(h))
        return h.view(count, 8, -1).transpose(1, 2) @ h.view(count, 8, -1)

    model, x = Around(in_windows), torch.randn(640, 16)

    estimated = estimate_step(model, x)

    truth = max(measure_step(model, x, Step()).values())
    assert estimated.exact
    assert estimated.peak == pytest.approx(truth, rel=0.002)


class LowerRight(nn.Module):
    """Attention with a mask of torch's own class, which is not made under a mode."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows):
        heads = self.layer(rows)
        mask = causal_lower_right(heads.shape[-2], heads.shape[-2])
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, mask)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_tensor_that_no_mode_lets_be_made_keeps_no_step_from_an_estimate(target):
    model, rows = LowerRight(), torch.rand(2, 3, 5, 4)
    model(rows).mean().backward()
    assert max(measure_step(model, rows, Step(None)).values()) > 0

    result = estimate_step(model, rows, target=target)

    assert result.method == "formula"
    assert "already associated" in str(result)
