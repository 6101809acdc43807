"""No estimate is below what lives throughout a step: parameters, buffers, batch."""

import pytest
import torch
from drawn import draw_step
from generated import make_step

from loaderkit.budget.step.devices import DeviceSpec
from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.train_step import Step
from loaderkit.nests import flatten_tensors

NAMES = (
    "loss: mse",
    "operator: max",
    "operator: attention",
    "operator: median of all",
    "operator: assign by a mask",
    "model: keeping",
    "model: tied",
)


def held_throughout(model, batch):
    tensors = [*model.parameters(), *model.buffers(), *flatten_tensors(batch)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def check_floor(model, batch, step):
    estimated = estimate(model, batch, step)

    assert held_throughout(model, batch) <= estimated.low <= estimated.peak
    assert estimated.peak <= estimated.high
    return estimated


@pytest.mark.many_cases
@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("name", NAMES)
def test_the_lower_end_is_no_less_than_what_is_held_throughout(name, kind):
    model, batch, step = make_step(name, 2)

    check_floor(model, batch, step.replace(target=DeviceSpec(kind)))


@pytest.mark.many_cases
@pytest.mark.parametrize("seed", range(8))
def test_so_it_is_of_drawn_steps(seed):
    drawn = draw_step(seed)

    check_floor(drawn.model, drawn.batch, drawn.step.replace(target=DeviceSpec("cuda")))


def test_so_it_is_of_a_tiny_model_on_a_gpu():
    # What libraries take there, 2 MiB, is more than the whole step.
    estimated = check_floor(
        torch.nn.Linear(8, 8), torch.randn(8, 8), Step(target=DeviceSpec("cuda"))
    )

    assert estimated.high > 2 << 20


@pytest.mark.slow
def test_so_it_is_where_the_step_was_measured():
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(8, 8)))

    estimated = check_floor(
        scripted, torch.randn(8, 8), Step(target=DeviceSpec("cuda"))
    )

    assert estimated.method == "measured and extended"
