"""Laws: what updates take, and that what they read decides nothing."""

import pytest
import torch
from drawn_optimizers import CLASSES, draw_update
from torch import nn

from loaderkit.budget.step import tracker
from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.train_step import Step


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_profilers_peak_is_in_the_interval_of_drawn_updates(name, seed):
    drawn = draw_update(seed, name)
    try:
        truth = max(measure_step(drawn.model, drawn.batch, drawn.step).values())
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"torch refuses it: {error}")

    estimated = estimate(drawn.model, drawn.batch, drawn.step)

    assert estimated.low <= truth <= estimated.high
    assert estimated.peak == pytest.approx(truth, rel=0.005)


class Filling(nn.Module):
    """Writes one number where a mask of unknown values holds."""

    def __init__(self, fill):
        super().__init__()
        self.inner, self.fill = nn.Linear(32, 48), fill

    def forward(self, x):
        h = self.inner(x).view(len(x), 6, 8)
        return self.fill(h, h.detach() > 0).square().mean()


def fill_by_rows(h, mask):
    h = h.clone()
    h[mask.any(2)] = 0.5
    return h


def fill_behind_an_axis(h, mask):
    h = h.clone()
    h[:, mask[0]] = 0
    return h


def fill_by_a_tensor(h, mask):
    h = h.tanh().clone()
    h[mask] = torch.tensor([3.0])
    return h


def fill_a_copy(h, mask):
    return h.index_put((mask,), torch.tensor(0.0))


def fill_with_what_is_trained(h, mask):
    return h.index_put((mask,), h.mean())


def fill_twice(h, mask):
    h = h.clone()
    h[mask] = 0
    h[~mask] = 1
    return h + h


FILLS = (
    fill_by_rows,
    fill_behind_an_axis,
    fill_by_a_tensor,
    fill_a_copy,
    fill_with_what_is_trained,
    fill_twice,
)


@pytest.mark.parametrize("fill", FILLS)
def test_numbers_that_are_written_where_a_mask_holds_are_no_choice(fill):
    model, x, step = Filling(fill), torch.randn(700, 32), Step(optimizer=None)

    estimated = estimate(model, x, step)

    truth = max(measure_step(model, x, step).values())
    assert estimated.low <= truth <= estimated.high
    if fill is not fill_with_what_is_trained:
        # Its gradient is taken out of the whole one, by as many places as there are.
        assert not estimated.assumptions
        assert estimated.peak == pytest.approx(truth, rel=0.005)


def test_taken_for_choices_they_would_be_seen(monkeypatch):
    # The same update, by a tracker that does not know how masks are filled.
    monkeypatch.setattr(tracker, "_fills_masked", lambda *_: False)
    model, x, step = Filling(fill_twice), torch.randn(700, 32), Step(optimizer=None)

    assert estimate(model, x, step).assumptions


class Reading(torch.optim.SGD):
    """An optimizer of the user's own, which reads a norm of each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(min(1.0, 10 / float(parameter.norm())))
        return super().step(closure)


class Choosing(nn.Module):
    """Keeps the rows that have a score above the others' mean."""

    def __init__(self):
        super().__init__()
        self.score, self.inner = nn.Linear(16, 1), nn.Linear(16, 300)

    def forward(self, x):
        score = self.score(x)[:, 0]
        return self.inner(x[score > score.mean() + score.std()]).exp().mean()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [Reading, torch.optim.Adafactor])
def test_what_the_present_parameters_choose_is_in_the_interval(optimizer):
    # whatever else is read, here by the update
    torch.manual_seed(0)
    model, x, step = Choosing(), torch.randn(900, 16), Step(optimizer=optimizer)

    estimated = estimate(model, x, step)

    truth = max(measure_step(model, x, step).values())
    assert estimated.low <= truth <= estimated.high
