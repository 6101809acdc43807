"""Laws: what a profile tells is of its own block of code."""

import gc

import pytest
import torch
from torch import nn

from loaderkit.budget.step import memory_profile
from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.kernels import KERNELS
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.train_step import Step


class Busy(nn.Module):
    """Makes enough objects for Python to collect cycles in its forward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        hidden = self.first(x)
        self.objects = [[number] for number in range(3000)]
        return self.last(hidden.relu())


class Holder:
    """A cycle, with a tensor in it."""

    def __init__(self, tensor):
        self.tensor, self.itself = tensor, self


class LeavesCycle(nn.Module):
    """Fails, and leaves a tensor in a cycle."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 640)

    def forward(self, x):
        Holder(self.inner(x).detach())
        msg = "fails"
        raise ValueError(msg)


def leave_garbage(x):
    for _ in range(4):
        with pytest.raises(ValueError, match="fails"):
            measure_step(LeavesCycle(), x, Step())


def test_what_a_failed_step_left_is_not_taken_off_the_next_ones_peak():
    model, x = Busy(), torch.randn(300, 64)
    alone = measure_step(model, x, Step())

    leave_garbage(x)

    assert measure_step(model, x, Step()) == alone
    leave_garbage(x)
    KERNELS.clear()
    estimated = estimate(model, x, Step())
    assert estimated.low <= max(alone.values()) <= estimated.high


class Collects(Busy):
    """Has cycles collected in its forward pass, as Python does when it likes."""

    def forward(self, x):
        gc.collect()
        return super().forward(x)


def test_its_twin_that_collects_meanwhile_would_be_seen():
    model, x = Collects(), torch.randn(300, 64)
    alone = measure_step(model, x, Step())
    gc.disable()  # else what is left may be gone before the step begins
    try:
        leave_garbage(x)

        assert measure_step(model, x, Step()) != alone
    finally:
        gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_as_it_was_afterwards(enabled):
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with memory_profile.memory_profile():
            during = gc.isenabled()
        afterwards = gc.isenabled()
    finally:
        (gc.enable if was_enabled else gc.disable)()

    assert not during
    assert afterwards == enabled
