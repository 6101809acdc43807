"""No deviation of pieces from the whole passes in silence, and none is invented."""

import copy

import pytest
import torch
from deviations import DEVIATING, EQUAL, Case, deviation, draw_case
from torch import nn

from loaderkit import MicroBatcher
from loaderkit.errors import BudgetError

SEEDS = (0, 1)
FLOATS = (torch.float32, torch.bfloat16)


def run(case, steps=1, **options):
    """Make steps, and give what was said of a deviation."""
    model = copy.deepcopy(case.model)
    sgd = torch.optim.SGD(model.parameters(), lr=options.pop("lr", 0.0))
    trainer = MicroBatcher(
        model,
        sgd,
        case.loss,
        micro_batch=case.piece,
        loss_mean_over=case.weigh,
        **options,
    )
    try:
        for _ in range(steps):
            trainer.step(case.batch)
    except BudgetError as error:
        return error.what
    return None


@pytest.mark.many_cases
@pytest.mark.parametrize("name", DEVIATING)
def test_a_deviation_of_a_hundredth_is_told(name):
    for seed in SEEDS:
        case = draw_case(name, seed)
        if deviation(case) > 0.01:
            assert run(case).startswith("Pieces do not equal the whole")


@pytest.mark.many_cases
@pytest.mark.parametrize("name", EQUAL)
def test_pieces_that_equal_the_whole_pass_in_every_precision(name):
    for seed in SEEDS:
        case = draw_case(name, seed)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        assert deviation(case) < 1e-6
        assert run(case) is None
        assert run(case, autocast=torch.bfloat16, scaler=scaler) is None


def test_a_short_type_of_parameters_is_no_deviation():
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)]
    )
    batch = (torch.randn(20, 6).bfloat16(), torch.randn(20, 6).bfloat16())

    assert run(Case(model.bfloat16(), batch, nn.functional.mse_loss)) is None


def test_a_model_that_has_converged_is_no_deviation():
    torch.manual_seed(0)
    model, x = nn.Linear(6, 2), torch.randn(12, 6)
    with torch.no_grad():
        case = Case(model, (x, model(x) + 1e-4 * torch.randn(12, 2)))
    loss = nn.functional.mse_loss

    assert run(Case(case.model, case.batch, loss), steps=40, lr=0.1) is None


class Rare(nn.Module):
    """A loss whose weights appear after some batches only."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x):
        return self.inner(x)


def test_a_deviation_that_begins_later_is_told_at_a_power_of_two():
    torch.manual_seed(0)
    model, weight = Rare(), torch.tensor([1.0, 1.0, 9.0])

    def loss(out, target):
        return nn.functional.cross_entropy(out, target, weight)

    trainer = MicroBatcher(
        model, torch.optim.SGD(model.parameters(), 0.0), loss, micro_batch=4
    )
    common = (torch.randn(16, 6), torch.arange(16) % 2)
    rare = (torch.randn(16, 6), torch.arange(16) % 3)
    for batch in [common] * 5 + [rare] * 2:
        trainer.step(batch)

    with pytest.raises(BudgetError, match="differ by"):
        trainer.step(rare)


def test_whole_batches_of_a_window_are_compared_too():
    case = draw_case("ignore_index", 0)
    model = copy.deepcopy(case.model)
    sgd = torch.optim.SGD(model.parameters(), 0.0)

    with pytest.raises(BudgetError, match="Pieces do not equal the whole"):
        list(MicroBatcher(model, sgd, case.loss).windows([case.batch] * 2, 2))


class Alone(nn.Module):
    """Raises where it is given a single sample."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x):
        if len(x) == 1:
            msg = "expected more than one sample"
            raise ValueError(msg)
        return self.inner(x)


def test_a_model_that_cannot_take_one_sample_is_compared_with_two_or_told():
    torch.manual_seed(0)
    batch = (torch.randn(12, 6), torch.randn(12, 5))
    loss = nn.functional.mse_loss

    assert run(Case(Alone(), batch, loss, piece=4)) is None
    assert "cannot be computed: ValueError" in run(Case(Alone(), batch, loss, piece=2))
    summed = Case(Alone(), batch, lambda o, t: loss(o, t, reduction="sum"), piece=4)
    assert "differ by" in run(summed)


def test_a_comparison_leaves_gradients_buffers_modes_and_random_numbers():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Dropout(0.5), nn.Linear(8, 5)
    )
    twin = copy.deepcopy(model)
    batch, gradients = (torch.randn(12, 6), torch.randn(12, 5)), []
    for network, verify in ((model, True), (twin, False)):
        torch.manual_seed(1)
        sgd = torch.optim.SGD(network.parameters(), 0.0)
        trainer = MicroBatcher(
            network, sgd, nn.functional.mse_loss, micro_batch=4, verify=verify
        )
        trainer.step(batch)
        gradients.append(
            [p.grad for p in network.parameters()] + list(network.buffers())
        )
        gradients[-1].append(torch.get_rng_state())

    assert all(map(torch.equal, *gradients))
    assert all(module.training for module in model.modules())
