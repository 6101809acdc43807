"""Law: whatever a step's code changes outside of the model, an estimate puts back."""

import array
import collections
import copy
import dataclasses
import functools
import io
import itertools
import operator
import random
import threading
import types
import weakref

import numpy as np
import pytest
import torch
import torch_geometric
from observed_state import changes, state_of
from torch import nn

import loaderkit
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.train_step import Step

WIDTH = 4


class InSlots:
    __slots__ = ("count", "kept", "unset")

    def __init__(self):
        self.count, self.kept = 0, None


@dataclasses.dataclass
class InAttributes:
    kept: object = None


def with_other_methods(kind):
    """Make a subclass whose own methods neither read nor write what it holds."""

    def refuse(_self, *_args, **_named):
        raise TypeError

    names = ("__iter__", "__setitem__", "clear", "copy", "extend", "items", "update")
    methods = {name: refuse for name in names if hasattr(kind, name)}
    return type(f"Other{kind.__name__}", (kind,), methods)


OTHER = {
    kind: with_other_methods(kind)
    for kind in (list, set, dict, collections.deque, collections.OrderedDict)
}


def weak_dict():
    key = nn.Identity()
    return {"key": key, "kept": weakref.WeakKeyDictionary({key: 1})}


def graded_parameter():
    parameter = nn.Parameter(torch.zeros(WIDTH))
    parameter.grad = torch.ones(WIDTH)
    return parameter


def optimizer():
    return torch.optim.SGD([graded_parameter()], lr=1.0)


KINDS = {
    "torch's generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda kept, _output: torch.rand(1, generator=kept),
    ),
    "numpy's generator": (np.random.default_rng, lambda kept, _output: kept.random()),
    "numpy's older one": (np.random.RandomState, lambda kept, _output: kept.rand()),
    "Python's generator": (random.Random, lambda kept, _output: kept.random()),
    "an array": (lambda: np.zeros(3), lambda kept, _output: operator.iadd(kept, 1)),
    "an array of objects": (
        lambda: np.array([None, {}], dtype=object),
        lambda kept, output: operator.setitem(kept, 0, output),
    ),
    "bytes": (lambda: bytearray(3), lambda kept, _output: kept.append(1)),
    "an array of Python": (
        lambda: array.array("d", [0.5]),
        lambda kept, _output: kept.append(1),
    ),
    "a full deque": (
        lambda: collections.deque([1, 2], maxlen=2),
        lambda kept, output: kept.append(output),
    ),
    "a set": (set, lambda kept, output: kept.add(output)),
    **{
        f"a {kind.__name__} with other methods": (
            other,
            lambda kept, output, add=kind.add if kind is set else kind.append: add(
                kept, output
            ),
        )
        for kind, other in OTHER.items()
        if not issubclass(kind, dict)
    },
    **{
        f"a {kind.__name__} with other methods": (
            other,
            lambda kept, output, kind=kind: kind.__setitem__(kept, "a", output),
        )
        for kind, other in OTHER.items()
        if issubclass(kind, dict)
    },
    "a counter": (collections.Counter, lambda kept, _output: kept.update("a")),
    "a dict of lists": (
        lambda: collections.defaultdict(list),
        lambda kept, output: kept["a"].append(output),
    ),
    "an order": (
        lambda: collections.OrderedDict(a=1, b=2),
        lambda kept, _output: kept.move_to_end("a"),
    ),
    "a dict of its own kind": (
        collections.UserDict,
        lambda kept, output: kept.update(a=output),
    ),
    "a weak dict": (
        weak_dict,
        lambda kept, output: kept["kept"].update({kept["key"]: output}),
    ),
    "slots": (InSlots, lambda kept, output: setattr(kept, "kept", output)),
    "a number in slots": (
        InSlots,
        lambda kept, _output: setattr(kept, "count", kept.count + 1),
    ),
    "a slot that was empty": (
        InSlots,
        lambda kept, output: setattr(kept, "unset", output),
    ),
    "attributes": (InAttributes, lambda kept, output: setattr(kept, "kept", output)),
    "a new attribute": (
        InAttributes,
        lambda kept, output: setattr(kept, "new", output),
    ),
    "a namespace": (
        types.SimpleNamespace,
        lambda kept, output: setattr(kept, "kept", output),
    ),
    "a thread's own": (
        threading.local,
        lambda kept, output: setattr(kept, "kept", output),
    ),
    "a nest": (
        lambda: {"a": [InAttributes()]},
        lambda kept, output: setattr(kept["a"][0], "kept", output),
    ),
    "an attribute of a partial": (
        lambda: functools.partial(print),
        lambda kept, output: setattr(kept, "kept", output),
    ),
    "an attribute of a function": (
        lambda: lambda: None,
        lambda kept, output: setattr(kept, "kept", output),
    ),
    "a graph": (
        lambda: torch_geometric.data.Data(x=torch.ones(3)),
        lambda kept, output: setattr(kept, "kept", output),
    ),
    "a tensor": (lambda: torch.zeros(WIDTH), lambda kept, _output: kept.add_(1)),
    "integers": (
        lambda: torch.zeros(WIDTH, dtype=torch.long),
        lambda kept, _output: kept.add_(1),
    ),
    "a view": (lambda: torch.zeros(2, 2)[1], lambda kept, _output: kept.add_(1)),
    "a sparse tensor": (
        lambda: torch.eye(3).to_sparse(),
        lambda kept, _output: kept.mul_(2),
    ),
    "a tensor that is filled": (
        lambda: torch.zeros(WIDTH),
        lambda kept, output: kept.copy_(output.detach()[0]),
    ),
    "a tensor that gets a graph": (
        lambda: torch.zeros(WIDTH),
        lambda kept, output: kept.add_(output.sum()),
    ),
    "other data": (
        lambda: torch.zeros(WIDTH),
        lambda kept, output: setattr(kept, "data", output.detach()),
    ),
    "a tensor without a gradient": (
        lambda: torch.zeros(WIDTH),
        lambda kept, _output: kept.requires_grad_(),
    ),
    "an attribute of a tensor": (
        lambda: torch.zeros(WIDTH),
        lambda kept, output: setattr(kept, "kept", output),
    ),
    "a gradient": (graded_parameter, lambda kept, _output: kept.grad.zero_()),
    "a gradient's place": (
        graded_parameter,
        lambda kept, _output: setattr(kept, "grad", None),
    ),
    "statistics of a module": (
        lambda: nn.BatchNorm1d(WIDTH),
        lambda kept, output: kept(output.detach()),
    ),
    "the mode of a module": (
        lambda: nn.BatchNorm1d(WIDTH),
        lambda kept, _output: kept.eval(),
    ),
    "a hook of a module": (
        lambda: nn.BatchNorm1d(WIDTH),
        lambda kept, _output: kept.register_forward_hook(print),
    ),
    "a list of parameters": (
        nn.ParameterList,
        lambda kept, _output: kept.append(nn.Parameter(torch.zeros(1))),
    ),
    "an optimizer": (
        optimizer,
        lambda kept, _output: kept.param_groups[0].update(lr=2.0),
    ),
}
"""By name: how to make something, and how code that has an output changes it."""


def make_all():
    return {name: make() for name, (make, _change) in KINDS.items()}


def change_all(kept, output):
    for name, (_make, change) in KINDS.items():
        change(kept[name], output)


def state_of_all(kept):
    # What ``state_of`` does not read, or what is made anew each time it is read.
    read = {
        "bytes": bytes,
        "an array of Python": bytes,
        "an order": lambda order: repr(list(order)),
        "numpy's older one": lambda generator: repr(generator.get_state()),
        "a weak dict": lambda nest: repr(list(nest["kept"].values())),
        "a thread's own": vars,
        **{
            f"a {kind.__name__} with other methods": functools.partial(
                lambda kind, kept: repr(list(kind.__iter__(kept))), kind
            )
            for kind in OTHER
        },
    }
    return {
        name: state_of(read[name](part) if name in read else part)
        for name, part in kept.items()
    }


GLOBAL = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows):
        return self.layer(rows).mean()


def by_a_global(kept):
    global GLOBAL
    GLOBAL = kept

    class ReadsGlobal(Model):
        def forward(self, rows):
            change_all(GLOBAL, self.layer(rows))
            return super().forward(rows)

    return ReadsGlobal()


def by_a_class(kept):
    class HasState(Model):
        state = kept

        def forward(self, rows):
            change_all(self.state, self.layer(rows))
            return super().forward(rows)

    return HasState()


def by_a_default(kept):
    class HasDefault(Model):
        def forward(self, rows, kept=kept):
            change_all(kept, self.layer(rows))
            return super().forward(rows)

    return HasDefault()


def by_a_hook(kept):
    model = Model()
    model.layer.register_forward_hook(
        lambda _module, _inputs, output: change_all(kept, output)
    )
    return model


CALLS = {
    "fake": loaderkit.estimate_step,
    "real": lambda model, rows: measure_step(model, rows, Step(None)),
}


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("reach", [by_a_global, by_a_class, by_a_default, by_a_hook])
def test_what_a_steps_code_changes_is_put_back(reach, call):
    kept = make_all()
    model, rows = reach(kept), torch.rand(6, WIDTH)
    before = state_of_all(kept)

    CALLS[call](model, rows)

    assert without_versions(changes(before, state_of_all(kept))) == []


def test_its_twin_each_of_these_changes_is_seen():
    kept = make_all()
    before = state_of_all(kept)

    change_all(kept, torch.rand(6, WIDTH, requires_grad=True) * 1)

    seen = changes(before, state_of_all(kept))
    changed = {change.split("/")[1].split(":")[0] for change in seen}
    assert changed == KINDS.keys()


def without_versions(found):
    """Leave out how often a tensor was written to: what puts it back writes to it."""
    return [change for change in found if "/version: " not in change]


class Proxy:
    """Such as one of a request: outside of one it has no attributes, and says so."""

    def __getattr__(self, name):
        raise RuntimeError(f"no request has {name}")


REFUSING = {
    "a lock": threading.Lock,
    "a condition": threading.Condition,
    "a thread's own": threading.local,
    "a generator": lambda: iter(number for number in range(3)),
    "a file": lambda: io.BufferedReader(io.BytesIO()),
    "a weak method": lambda: weakref.WeakMethod(GLOBAL_OBJECT.method),
    "a class that is made otherwise": lambda: Tagged("tag", a=1),
    "a proxy": Proxy,
}
"""By name: what ``copy.deepcopy`` refuses."""


class Tagged(collections.OrderedDict):
    def __init__(self, tag, **items):
        super().__init__(**items)
        self.tag = tag


class WithMethod:
    def method(self):
        pass


GLOBAL_OBJECT = WithMethod()


class Holds(Model):
    """Changes what it holds beside what refuses to be copied."""

    def __init__(self, held):
        super().__init__()
        self.held, self.count, self.outputs = held, 0, []
        self.register_buffer("center", torch.zeros(WIDTH))

    def forward(self, rows):
        self.count += 1
        hidden = self.layer(rows)
        self.outputs.append(hidden)
        self.center += hidden.detach().mean(0)
        return hidden


PLACES = {
    "an attribute": lambda held: nn.Sequential(Holds(held)),
    "a module inside": lambda held: nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Holds(held)), nn.Linear(WIDTH, WIDTH)
    ),
    "a nest": lambda held: nn.Sequential(Holds({"a": [1, (held, [])]})),
    "an object": lambda held: nn.Sequential(Holds(InAttributes(held))),
}


@pytest.mark.many_cases(quick=5)
@pytest.mark.parametrize(
    ("kind", "place"), list(zip(REFUSING, itertools.cycle(PLACES), strict=False))
)
def test_what_refuses_to_be_copied_keeps_no_model_from_an_estimate(kind, place):
    held, rows = REFUSING[kind](), torch.rand(6, WIDTH)
    with pytest.raises(Exception, match=r".+"):
        copy.deepcopy(held)
    model, without = PLACES[place](held), PLACES[place](None)
    without.load_state_dict(model.state_dict())
    holder = next(part for part in model.modules() if isinstance(part, Holds))
    values = [value.clone() for value in model.state_dict().values()]

    for call in CALLS.values():
        # The same bytes as without it: nothing but what refuses is shared.
        result, expected = call(model, rows), call(without, rows)
        assert getattr(result, "peak", None) == getattr(expected, "peak", None)

    assert (holder.count, holder.outputs) == (0, [])
    assert all(map(torch.equal, model.state_dict().values(), values))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("call", CALLS)
def test_memory_that_a_step_frees_or_grows_is_as_it_was(call):
    # Without a look before: numpy would forbid it.
    freed, grown = torch.ones(WIDTH), torch.ones(WIDTH)

    class Resizes(Model):
        def forward(self, rows):
            freed.untyped_storage().resize_(0)
            grown.resize_(2 * WIDTH)
            return super().forward(rows)

    CALLS[call](Resizes(), torch.rand(6, WIDTH))

    assert freed.untyped_storage().nbytes() == freed.nbytes
    assert grown.shape == (WIDTH,)
    assert grown.tolist() == [1] * WIDTH
    if call == "real":
        # A step with fakes has no copy: no operator writes there.
        assert freed.tolist() == [1] * WIDTH
