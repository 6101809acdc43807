"""Objects that no variable leads to: the cause is right, or not known."""

import atexit
import ctypes
import functools
import gc
import types
import warnings

import pytest
import torch

from loaderkit.leaks.blame import find_growth
from loaderkit.leaks.census import take_census
from loaderkit.leaks.counter_trend import CounterTrend
from loaderkit.leaks.unrooted import count_outside, is_in_autograd_cycle

EPOCHS = 8
SIZE = 2_345


def do_nothing(*_):
    """Stand for a function that is called at exit."""


def with_an_exit_handler(tensor):
    atexit.register(functools.partial(do_nothing, tensor))


def with_a_handlers_arguments(tensor):
    atexit.register(do_nothing, tensor)


def with_a_stray_reference(tensor):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))


def in_a_cycle_through_autograd(tensor):
    tensor.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of this very cycle
        tensor.tanh().backward(torch.ones_like(tensor), create_graph=True)


def let_go_of(tensors):
    """Take back what a case keeps for ever."""
    atexit.unregister(do_nothing)
    for tensor in tensors:
        tensor.grad = None


# Each case has a size of its own: what a stray reference holds stays for ever, and
# would be among the tensors that the next case is judged by.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "pattern", "size"),
    [
        (with_an_exit_handler, "exit handlers", SIZE + 2),
        (with_a_handlers_arguments, "exit handlers", SIZE + 3),
        (with_a_stray_reference, "unknown holder", SIZE + 4),
        (in_a_cycle_through_autograd, "autograd cycle", SIZE + 5),
    ],
)
def test_the_cause_is_shown_or_not_known(keep, pattern, size):
    keep(torch.randn(size))  # loads modules
    handlers = count_outside().exit_handlers
    before = take_census(0)
    for _ in range(EPOCHS):
        keep(torch.randn(size))
    more = (count_outside().exit_handlers - handlers) / EPOCHS

    growths = find_growth(before, EPOCHS, rate=4.0 * size, more_exit_handlers=more)
    alive = [
        value
        for value in gc.get_objects()
        if type(value) is torch.Tensor and value.shape == (size,)
    ]
    let_go_of(alive)

    assert [growth.pattern for growth in growths] == [pattern]
    assert f"Tensor [{size}] float32 more each epoch" in str(growths[0])
    assert ("not known" in str(growths[0])) == (pattern == "unknown holder")


@pytest.mark.slow
def test_exit_handlers_that_come_beside_a_stray_reference_are_not_blamed():
    handlers = count_outside().exit_handlers
    before = take_census(0)
    for _ in range(EPOCHS):
        atexit.register(do_nothing)
        with_a_stray_reference(torch.randn(SIZE + 1))
    more = (count_outside().exit_handlers - handlers) / EPOCHS

    growths = find_growth(before, EPOCHS, rate=4.0 * SIZE, more_exit_handlers=more)
    atexit.unregister(do_nothing)

    assert [growth.pattern for growth in growths] == ["unknown holder"]


class KeepsItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.out = x.clone()
        return ctx.out

    @staticmethod
    def backward(_, grad):
        return grad


def test_a_cycle_is_walked():
    weight = torch.ones(3, requires_grad=True)

    assert is_in_autograd_cycle(KeepsItsOutput.apply(weight))
    assert not is_in_autograd_cycle(weight)
    assert not is_in_autograd_cycle((weight * 2).sum())
    assert not is_in_autograd_cycle(torch.ones(3))


@pytest.mark.slow
def test_texts_of_warnings_are_weighed_and_named():
    library = types.SimpleNamespace()
    vars(library)["__warningregistry__"] = {f"a warning {n}": True for n in range(4)}
    before = take_census(0)
    for n in range(100):
        library.__warningregistry__[f"sample {n} is cut, see the manual" * 9] = True

    growths = find_growth(before, EPOCHS)

    assert "warnings" in {growth.pattern for growth in growths}


def test_what_a_detector_made_is_nobodys_growth():
    # As a test runner keeps the reports of earlier tests, where no search looks.
    class Users(CounterTrend):
        """Of the user's module: the twin."""

    grown = {}
    for kind in (CounterTrend, Users):
        before = take_census(0)
        for _ in range(4 * EPOCHS):
            with_a_stray_reference(object.__new__(kind))
        growths = find_growth(before, EPOCHS, rate=1.0)
        grown[kind] = [growth.items for growth in growths]
    assert not any("CounterTrend" in items for items in grown[CounterTrend])
    assert any("Users" in items for items in grown[Users])
