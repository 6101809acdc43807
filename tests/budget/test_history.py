"""Memory over a step: it adds up, holds the peak, and names who made it."""

import pytest
import torch

from loaderkit import estimate_step
from loaderkit.budget.step.allocation_log import Log, UncertainBytes
from loaderkit.budget.step.history import MOST_MOMENTS, history_of
from loaderkit.budget.step.peaks import PARTS, storage_parts


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


def estimate_of(blocks, **options):
    model = torch.nn.Sequential(*(Block(16) for _ in range(blocks)))
    return estimate_step(model, torch.zeros(64, 16), **options)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 3, 40])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", None])
def test_the_highest_moment_is_the_peak_and_moments_add_up(blocks, optimizer):
    estimate = estimate_of(blocks, optimizer=optimizer)

    highest = max(estimate.history, key=lambda moment: moment.total)

    assert highest.total == estimate.peak
    assert dict(zip(PARTS, highest.parts, strict=True)) == estimate.parts
    assert highest.phase == estimate.phase
    for moment in estimate.history:
        assert moment.total == sum(moment.parts)
        assert min(moment.parts) >= 0


@pytest.mark.slow
def test_a_long_step_is_thinned_and_keeps_every_phase():
    estimate = estimate_of(120)

    assert MOST_MOMENTS // 2 < len(estimate.history) <= MOST_MOMENTS + 4
    phases = dict.fromkeys(moment.phase for moment in estimate.history)
    assert list(phases) == ["forward", "loss", "backward", "step"]


def test_the_backward_pass_names_the_module_it_differentiates():
    estimate = estimate_of(3)

    modules = [m.module for m in estimate.history if m.phase == "backward" and m.module]

    order = list(dict.fromkeys(name.split()[0].split(".")[0] for name in modules))
    assert order == ["2", "1", "0"]


def test_a_module_is_told_with_the_users_own_forward_around_it():
    estimate = estimate_of(1)

    linear = next(m for m in estimate.history if m.module == "0.linear Linear")

    line = Block.forward.__code__.co_firstlineno
    assert linear.forward == f"test_history.py:{line}"


def test_what_a_kernel_holds_inside_is_a_temporary():
    log = Log(events=[(0, 100), (1, 50), (1, -50)], marks=[(0, "forward")])
    log.owners[0] = "batch"
    log.holds_inside(1, UncertainBytes.exactly(30))

    totals = [moment.total for moment in history_of(log, storage_parts(log))]

    assert totals == [100, 180, 100]


def test_json_leaves_the_history_out():
    assert "history" not in estimate_of(1).to_json()


def test_an_estimate_has_a_page_with_the_peak_marked(tmp_path):
    estimate = estimate_of(2)

    text = estimate.to_html(tmp_path / "step.html").read_text()

    totals = [moment.total for moment in estimate.history]
    assert "Memory over the step" in text
    assert f'"first": {totals.index(max(totals))}' in text
