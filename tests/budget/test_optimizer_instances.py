"""A law: an optimizer that is given made takes what a training with it takes.

The truth is measured with optimizers that torch itself makes, of the measured model's
own parameters.
"""

import inspect
import threading

import pytest
import torch

from loaderkit import MicroBatcher, assert_fits, estimate_step
from loaderkit.budget.step import optimizer_copies
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.train_step import Step
from loaderkit.errors import OptionError, StepError

NAMES = [
    name
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value)
    and issubclass(value, torch.optim.Optimizer)
    # One is abstract, the next refused, and the last updates by sparse gradients.
    and name not in {"Optimizer", "LBFGS", "SparseAdam"}
]
GROUPINGS = {
    "some": lambda p: [p[0]],
    "groups": lambda p: [{"params": p[:1], "lr": 0.1}, {"params": p[1:]}],
    "all": lambda p: [(str(number), each) for number, each in enumerate(p)],
    "groups of some": lambda p: [{"params": [p[2]], "weight_decay": 0.1, "x": 1}],
}
"""How the matrices of a model are given to an optimizer."""


class ArgumentOfItsOwn(torch.optim.Optimizer):
    """Its argument is no default, and its state is made with it."""

    def __init__(self, params, momenta):
        super().__init__(params, {})
        self.momenta = momenta
        for group in self.param_groups:
            for p in group["params"]:
                zeros = [torch.zeros_like(p) for _ in range(momenta)]
                self.state[p] = {"momenta": zeros}

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002 -- as torch's optimizers have it
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    for momentum in self.state[p]["momenta"][: self.momenta]:
                        momentum.add_(p.grad)
                    p.sub_(p.grad)


class DerivedAdam(torch.optim.AdamW):
    """AdamW with an argument that it keeps, and what cannot be copied."""

    def __init__(self, params, scale=2.0, lr=1e-3, **others):
        super().__init__(params, lr=lr, **others)
        self.scale = scale
        self.lock = threading.Lock()


def model_of_matrices():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(24, 24, bias=False) for _ in range(3)]
    return torch.nn.Sequential(*layers)


def makers():
    for name in NAMES:
        yield name, getattr(torch.optim, name)
    yield "own", lambda p: ArgumentOfItsOwn(p, 3)
    yield "derived", DerivedAdam


MAKERS = dict(makers())


@pytest.mark.many_cases(quick=4)
@pytest.mark.long_cases
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_an_instance_takes_what_a_training_with_it_takes(grouping, name):
    make, group, x = MAKERS[name], GROUPINGS[grouping], torch.randn(3, 24)
    model = model_of_matrices()
    optimizer = make(group(list(model.parameters())))
    before = repr(optimizer)

    estimated = estimate_step(model, x, optimizer=optimizer)

    called = lambda p: make(group(p))  # noqa: E731 -- of the copy's
    by_callable = estimate_step(model, x, optimizer=called)
    truth = max(measure_step(model, x, Step(optimizer=called)).values())
    measured = measure_step(model, x, Step(optimizer=optimizer))
    assert estimated.peak == by_callable.peak, grouping
    if name != "Rprop":  # masks of unknown values decide its memory
        assert estimated.peak == pytest.approx(truth, rel=1e-3), grouping
    assert max(measured.values()) == truth, grouping
    assert repr(optimizer) == before
    assert all(p.grad is None for p in model.parameters())


def test_an_optimizer_taken_for_one_of_all_parameters_would_be_seen(monkeypatch):
    # No instance hides its groups: the copy is made without them.
    monkeypatch.setattr(optimizer_copies, "_groups_of_twins", lambda *_: [])

    with pytest.raises(AssertionError, match="some"):
        test_an_instance_takes_what_a_training_with_it_takes("some", "AdamW")


@pytest.mark.parametrize("name", ["AdamW", "own"])
def test_an_instance_that_trains_already_and_has_a_scheduler_is_not_stepped(name):
    model, x = model_of_matrices(), torch.randn(3, 24)
    fresh = MAKERS[name](model.parameters())
    fresh_peak = estimate_step(model, x, optimizer=fresh).peak
    optimizer = MAKERS[name](model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]

    peak = estimate_step(model, x, optimizer=optimizer).peak
    measure_step(model, x, Step(optimizer=optimizer))

    assert peak == fresh_peak
    assert calls == [1]
    assert all(map(torch.equal, weights, model.parameters()))


def test_an_optimizer_of_another_model_and_of_a_loss_is_one_to_be_like():
    model, x = model_of_matrices(), torch.randn(3, 24)
    peak = estimate_step(model, x, optimizer=torch.optim.AdamW).peak
    other = torch.optim.AdamW(model_of_matrices().parameters())
    learned = torch.nn.Parameter(torch.zeros(100_000))
    both = torch.optim.AdamW([*model.parameters(), learned])

    assert estimate_step(model, x, optimizer=other).peak == peak
    assert estimate_step(model, x, optimizer=both).peak == peak
    assert_fits(model, x, "1 GiB", device="cpu", optimizer=both)


@pytest.mark.parametrize("cls", [torch.optim.Muon, ArgumentOfItsOwn])
def test_a_class_that_all_parameters_are_not_enough_for_is_told_as_such(cls):
    model, x = torch.nn.Linear(8, 8), torch.randn(3, 8)
    with pytest.raises(StepError, match="optimizer cannot be made") as caught:
        estimate_step(model, x, optimizer=cls)
    assert "optimizer itself" in str(caught.value.fix)


class NeedsFunction(torch.optim.SGD):
    """Its argument has a name of its own."""

    def step(self, evaluate):
        evaluate()
        return super().step()


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, NeedsFunction])
def test_an_optimizer_that_runs_the_model_is_refused_when_it_is_given(cls):
    model, x = model_of_matrices(), torch.randn(3, 24)
    optimizer = cls(model.parameters())
    with pytest.raises(OptionError, match="cannot be called without a closure"):
        MicroBatcher(model, optimizer, lambda output, _: output.mean())
    with pytest.raises(StepError, match="runs the model several times"):
        estimate_step(model, x, optimizer=optimizer)

    plain = torch.optim.SGD(model.parameters())
    torch.optim.lr_scheduler.ConstantLR(plain)
    MicroBatcher(model, plain, lambda output, _: output.mean())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(OptionError, match="cannot be called without a closure"):
        MicroBatcher(model, optimizer, lambda output, _: output.mean())
