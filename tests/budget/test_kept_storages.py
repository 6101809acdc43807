"""The law of storages: a step holds what its tensors are parts of, once."""

import pytest
import torch
from torch import nn

from loaderkit.budget.step.devices import DeviceSpec
from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.train_step import Step

NUMBERS = 8000
PARTS = {
    "a row": lambda table: table.view(4, -1)[1],
    "a column": lambda table: table.view(-1, 4)[:, 1],
    "the first rows, transposed": lambda table: table.view(4, -1).T[:50],
    "one number, expanded": lambda table: table[:1].expand(4000),
    "a half": lambda table: table[: len(table) // 2],
    "all": lambda table: table,
}
DTYPES = (torch.int64, torch.bool, torch.float32, torch.float64)
HELD = ("buffer", "attribute", "list", "two buffers", "parameter")


class Reading(nn.Module):
    """Reads a part of a table, which it holds in one of the ways of ``HELD``."""

    def __init__(self, held, part, dtype):
        super().__init__()
        table = torch.randint(0, 50, (NUMBERS,)).to(dtype)
        self.linear, self.words = nn.Linear(50, 50), nn.Embedding(50, 50)
        self.held = held
        chosen = PARTS[part](table)
        if held == "list":
            self.parts = [chosen]
        elif held == "attribute":
            self.part = chosen
        elif held == "parameter":
            self.part = nn.Parameter(chosen, requires_grad=False)
        else:
            self.register_buffer("part", chosen)
        if held == "two buffers":
            self.register_buffer("other", PARTS["a row"](table))

    def read(self):
        """Give the part."""
        return self.parts[0] if self.held == "list" else self.part

    def forward(self, x):
        part = self.read().flatten()[:50]
        hidden = self.linear(x) + part.to(x.dtype)
        if not part.is_floating_point():
            hidden = hidden + self.words(part.long()).mean(0)
        if self.held == "two buffers":
            hidden = hidden + self.other[:50].to(x.dtype)
        return hidden


def truth_of(model, batch, step):
    """The profiler's peak; it does not know of plain attributes."""
    peak = max(measure_step(model, batch, step).values())
    if model.held in ("attribute", "list"):
        peak += model.read().untyped_storage().nbytes()
    return peak


@pytest.mark.many_cases(quick=2)
@pytest.mark.long_cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", HELD)
def test_a_part_keeps_the_whole_in_memory(held, dtype):
    step, batch = Step(optimizer="sgd"), torch.randn(40, 50)
    for part in PARTS:
        model = Reading(held, part, dtype)

        estimated = estimate(model, batch, step)

        truth = truth_of(model, batch, step)
        assert estimated.low <= truth <= estimated.high, part
        assert estimated.peak == pytest.approx(truth, rel=0.001), part


def test_the_elements_of_a_row_alone_are_too_little():
    model, batch = Reading("buffer", "a row", torch.float64), torch.randn(40, 50)
    estimated = estimate(model, batch, Step(optimizer="sgd"))

    kept_bytes = model.part.untyped_storage().nbytes()

    assert kept_bytes == 4 * model.part.nbytes
    truth = truth_of(model, batch, Step(optimizer="sgd"))
    assert truth > estimated.high - kept_bytes + model.part.nbytes


@pytest.mark.slow
def test_what_is_moved_to_a_device_is_its_elements():
    step = Step(optimizer="sgd", target=DeviceSpec("cuda"))
    for part in PARTS:
        model = Reading("two buffers", part, torch.float32)

        estimated = estimate(model, torch.randn(40, 50), step)

        elements_bytes = model.part.nbytes + model.other.nbytes
        assert estimated.parts["buffers"] == elements_bytes, part
