"""Packed recurrences are written into a log from a few of their time steps."""

import itertools
import time

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.recurrences import RECORDINGS, _shortened
from loaderkit.budget.step.train_step import Step

_FEW_LONG = [26, 14, 13, 3, 1]
_EQUAL = [21] * 3


class Recurrent(nn.Module):
    """Reads all rows of a packed recurrence, or what it gives at last."""

    def __init__(self, inner, *, reads_last=False, twice=False):
        super().__init__()
        self.inner, self.reads_last, self.twice = inner, reads_last, twice

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(
            x, lengths, batch_first=self.inner.batch_first, enforce_sorted=False
        )
        out, last = self.inner(packed)
        if self.twice:
            # Gradients are added up before the step's own backward pass.
            out.data.sum().backward(retain_graph=True)
        if self.reads_last:
            return (last[0] if isinstance(last, tuple) else last).square().mean()
        padded, _ = rnn.pad_packed_sequence(out, batch_first=self.inner.batch_first)
        return padded.square().mean()


@pytest.mark.parametrize(
    ("inner", "lengths", "reads_last"),
    [
        (nn.LSTM(6, 8, bidirectional=True, proj_size=3), _FEW_LONG, False),
        (nn.GRU(6, 8, 2, batch_first=True, dropout=0.2), _EQUAL, False),
        (nn.RNN(6, 8, bidirectional=True, bias=False), _FEW_LONG, True),
    ],
)
@pytest.mark.slow
def test_a_packed_recurrence_takes_what_the_profiler_sees(inner, lengths, reads_last):
    model, step = Recurrent(inner, reads_last=reads_last), Step(optimizer=None)
    x = torch.randn(max(lengths), len(lengths), 6)
    batch = (x.transpose(0, 1) if inner.batch_first else x, torch.tensor(lengths))
    RECORDINGS.clear()

    estimated = estimate(model, batch, step)

    truth = max(measure_step(model, batch, step).values())
    assert estimated.peak == pytest.approx(truth, rel=1e-3)
    assert estimated.low <= truth <= estimated.high


@pytest.mark.slow
def test_what_needs_each_time_step_is_still_tracked():
    model, step = Recurrent(nn.GRU(6, 8), twice=True), Step(optimizer=None)
    batch = (torch.randn(14, 3, 6), torch.tensor([14, 9, 2]))

    estimated = estimate(model, batch, step)

    truth = max(measure_step(model, batch, step).values())
    assert estimated.method == "tracked"
    assert estimated.low <= truth <= estimated.high


@pytest.mark.slow
def test_a_long_recurrence_is_estimated_in_less_time_once_it_is_known():
    model, step = Recurrent(nn.GRU(6, 8)), Step(optimizer=None)
    batch = (torch.randn(150, 2, 6), torch.tensor([150, 70]))
    estimate(model, batch, step)

    started = time.process_time()
    estimate(model, batch, step)

    # Each of its time steps has some fifty operators, of 0.3 ms each.
    assert time.process_time() - started < 150 * 50 * 0.3e-3 / 3


def test_a_short_recurrence_tells_its_sizes_sums_and_differences_apart():
    sizes = _shortened([9] * 4 + [7] * 30 + [5, 4, 3, 2] + [1] * 40)

    levels = sorted(set(sizes))
    differences = [b - a for a, b in itertools.pairwise(levels)]
    named = [*levels, *differences, sum(sizes)]
    assert len(set(named)) == len(named)
    assert len(sizes) < 40
