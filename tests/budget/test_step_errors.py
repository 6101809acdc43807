"""Laws: what no training can run gives its own error, however large the model is."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it
from torch_geometric.nn import GCNConv

from loaderkit import estimate_step
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.step_errors import is_limit_of_fakes
from loaderkit.budget.step.train_step import Step
from loaderkit.errors import StepError


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x, mask=None):
        return self.inner(x, x, x, attn_mask=mask)[0]


class TwoArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, y):
        return self.inner(x) + y


def linear():
    return nn.Linear(4, 4)


rows, images = torch.randn(8, 4), torch.randn(8, 3, 9, 9)
BATCHES = {
    "width": (linear, torch.randn(8, 5)),
    "double": (linear, rows.double()),
    "half": (linear, rows.half()),
    "whole numbers": (linear, rows.long()),
    "masks": (linear, rows > 0),
    "an array": (linear, rows.numpy()),
    "three rows": (linear, [torch.randn(4)] * 3),
    "channels": (lambda: nn.Conv2d(3, 4, 3), torch.randn(8, 5, 9, 9)),
    "images of another type": (lambda: nn.Conv2d(3, 4, 3), images.double()),
    "no images": (lambda: nn.Conv2d(3, 4, 3), torch.randn(8, 3)),
    "small images": (lambda: nn.Conv2d(3, 4, 30), images),
    "words as floats": (lambda: nn.Embedding(9, 4), rows),
    "words of two bytes": (lambda: nn.Embedding(9, 4), torch.ones(8, 4).short()),
    "features of a batch norm": (lambda: nn.BatchNorm1d(5), rows),
    "axes of a batch norm": (lambda: nn.BatchNorm2d(4), rows),
    "width of a layer norm": (lambda: nn.LayerNorm(5), rows),
    "type of a layer norm": (lambda: nn.LayerNorm(4), rows.double()),
    "width of a sequence": (lambda: nn.LSTM(5, 6), torch.randn(8, 4, 4)),
    "type of a sequence": (lambda: nn.LSTM(4, 6), torch.randn(8, 4, 4).double()),
    "width of attention": (Attention, torch.randn(2, 8, 31)),
    "shape of a mask": (Attention, (torch.randn(2, 8, 32), torch.zeros(7, 7))),
    "type of a mask": (Attention, (torch.randn(2, 8, 32), torch.ones(8, 8).long())),
    "an argument too few": (TwoArguments, (torch.randn(3, 8),)),
    "one tensor for two": (TwoArguments, torch.randn(3, 8)),
    "rows that do not match": (TwoArguments, (torch.randn(3, 8), torch.randn(5, 8))),
}
LOSSES = {
    "a target too few": (F.cross_entropy, torch.zeros(7).long()),
    "targets of four bytes": (F.cross_entropy, torch.zeros(8).int()),
    "targets of another shape": (F.mse_loss, torch.zeros(8, 3)),
    "targets as whole numbers": (
        F.binary_cross_entropy_with_logits,
        torch.zeros(8, 4).long(),
    ),
    "no scalar": (lambda output, target: output - target, torch.zeros(8, 4)),
    "no gradient": (lambda _output, target: target.mean(), torch.zeros(8, 4)),
    "no loss": (lambda _output, _target: None, torch.zeros(8, 4)),
}
CASES = {
    **{name: (*case, None) for name, case in BATCHES.items()},
    **{name: (linear, (rows, target), loss) for name, (loss, target) in LOSSES.items()},
}


class WithLargeParameter(nn.Module):
    """Holds a gigabyte of parameters, without its memory, beside another module."""

    def __init__(self, make):
        super().__init__()
        with torch.device("meta"):
            self.inner = make()
            self.large = nn.Parameter(torch.zeros(1 << 28))

    def forward(self, *args):
        output = self.inner(*args)
        return output + self.large[0] if isinstance(output, torch.Tensor) else output


@pytest.mark.many_cases(quick=5)
@pytest.mark.parametrize("name", CASES)
def test_what_no_training_can_run_gives_its_own_error(name):
    make, batch, loss = CASES[name]
    model = make()
    with pytest.raises(Exception) as real:  # noqa: PT011 -- whatever torch raises
        measure_step(model, batch, Step(loss))

    with pytest.raises(StepError) as raised:
        estimate_step(model, batch, loss=loss)

    assert str(real.value) in str(raised.value)


@pytest.mark.many_cases
@pytest.mark.parametrize("name", CASES)
def test_so_it_does_where_the_model_is_too_large_to_be_run(name):
    make, batch, loss = CASES[name]

    with pytest.raises(StepError):
        estimate_step(WithLargeParameter(make), batch, loss=loss)


def test_its_twin_a_batch_that_fits_is_estimated():
    loss = F.cross_entropy, torch.zeros(8).long()

    for make in (linear, lambda: WithLargeParameter(linear)):
        estimated = estimate_step(make(), (rows, loss[1]), loss=loss[0])
        assert estimated.method == "tracked"


def test_two_inputs_with_a_loss_are_told_where_the_target_belongs():
    layer = GCNConv(8, 4)
    inputs = torch.rand(5, 8), torch.zeros(2, 6, dtype=torch.long)

    with pytest.raises(StepError, match=r"a batch \(\(x, edge_index\), target\)"):
        estimate_step(layer, inputs, loss=F.mse_loss)

    # As the fix says.
    estimate_step(layer, (inputs, torch.zeros(5, 4)), loss=F.mse_loss)


class ReadsMemory(nn.Module):
    """Does what runs for real only: it reads the address of a hidden tensor."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 64)

    def forward(self, x):
        hidden = self.inner(x)
        assert hidden.data_ptr()
        return hidden


@pytest.mark.slow
def test_what_runs_for_real_only_is_no_error_of_the_step():
    estimated = estimate_step(ReadsMemory(), rows)

    truth = max(measure_step(ReadsMemory(), rows, Step()).values())
    assert estimated.low <= truth <= estimated.high


@pytest.mark.parametrize(
    ("error", "is_limit"),
    [
        (RuntimeError("Cannot access data pointer of Tensor (e.g. FakeTensor)"), True),
        (NotImplementedError("Cannot copy out of meta tensor; no data!"), True),
        (RuntimeError("indices and values must have same nnz, but got nnz 0"), True),
        (RuntimeError("The size of tensor a (3) must match the size"), False),
        (TypeError("forward() missing 1 required positional argument"), False),
    ],
)
def test_limits_of_fake_tensors_are_told_from_errors_of_the_step(error, is_limit):
    assert is_limit_of_fakes(error) is is_limit
