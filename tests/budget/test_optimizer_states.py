"""A law: the state that is given is the one that torch's own first step makes."""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from loaderkit.budget.step import optimizer_states
from loaderkit.budget.step.allocation_log import Log
from loaderkit.budget.step.fake_tensors import fake_like
from loaderkit.budget.step.optimizer_states import OptimizerStates
from loaderkit.budget.step.state_snapshots import Snapshots
from loaderkit.budget.step.tracker import Tracker

OPTIONS = {
    "weight_decay": 0.1,
    "amsgrad": True,
    "momentum": 0.9,
    "centered": True,
    "foreach": True,
    "maximize": True,
    "capturable": True,
}
"""Options that choose what is kept, of the optimizers that have them."""
REFUSING = {"LBFGS", "SparseAdam"}
"""One runs the model by itself, the other takes sparse gradients alone."""
CLASSES = {
    name: value
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
    and name not in REFUSING
}


def option_sets(cls):
    names = inspect.signature(cls).parameters
    singles = [{name: OPTIONS[name]} for name in OPTIONS if name in names]
    return [{}, *singles]


def parameters_for(name):
    shapes = [(5, 3), (5, 3), (3, 5), (7, 2)]
    if name != "Muon":
        # Muon updates matrices alone.
        shapes += [(), (4,), (4,), (1,), (2, 3, 4)]
    tensors = [torch.rand(shape) for shape in shapes]
    transposed = torch.rand(6, 4).t()
    return [*tensors, transposed, torch.rand(5, 3).bfloat16()]


def layout_of(value):
    if not isinstance(value, torch.Tensor):
        return value
    return tuple(value.shape), value.stride(), value.dtype


def layouts_of(optimizer):
    return [
        {name: layout_of(value) for name, value in optimizer.state[parameter].items()}
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def given_states(states, cls, reals, options):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [torch.nn.Parameter(fake_like(mode, real)) for real in reals]
    optimizer = cls(fakes, lr=1e-3, **options)
    with Tracker(mode, Log(), snapshots=Snapshots()):
        states.give(optimizer)
    assert all(fake.grad is None for fake in fakes)
    return optimizer


def wrong_states(name):
    """Compare with real first steps; one memory serves all options of a class."""
    cls, states, wrong = CLASSES[name], OptimizerStates(), []
    for options in option_sets(cls):
        reals = [torch.nn.Parameter(real) for real in parameters_for(name)]
        trained = cls(reals, lr=1e-3, **options)
        for real in reals:
            real.grad = torch.zeros_like(real)
        try:
            trained.step()
        except AssertionError:
            # "capturable" is for accelerators alone
            continue
        for _ in range(2):
            given = given_states(states, cls, reals, options)
            if layouts_of(given) != layouts_of(trained):
                wrong.append(options)
    return wrong


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("name", CLASSES)
def test_what_is_given_is_what_a_first_step_makes(name):
    assert wrong_states(name) == []


def test_what_is_remembered_for_other_options_would_be_seen(monkeypatch):
    # No options make two kinds one: what tells them apart is taken out.
    monkeypatch.setattr(
        optimizer_states, "_kind_of", lambda parameter, *_: parameter.shape
    )

    assert {"amsgrad": True} in wrong_states("Adam")
