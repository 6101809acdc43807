"""Laws: a plan is the same whatever lies around, and leaves little behind."""

import gc
from dataclasses import fields, replace

import pytest
import torch
import torch_geometric.nn as g
from drawn import draw_step
from drawn_families import draw_family_step
from drawn_graph_fields import draw_graph_field_step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_geometric.data import Data

from loaderkit import plan_batch
from loaderkit.budget.step.allocation_log import Event, Log, PhaseStart
from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.formulas import FORMULAS
from loaderkit.budget.step.kernels import KERNELS
from loaderkit.budget.step.layouts import LAYOUTS
from loaderkit.budget.step.newest import newest
from loaderkit.budget.step.optimizer_states import STATES
from loaderkit.budget.step.output_cache import OUTPUTS
from loaderkit.budget.step.remembered import remembering
from loaderkit.budget.step.track import track_step
from loaderkit.budget.step.train_step import Step, device_spec


class Cycle:
    """Garbage that only Python's collector frees, with a tensor in it."""

    def __init__(self):
        self.itself, self.tensor = self, torch.zeros(10)


class collecting:  # noqa: N801 -- a setting
    """Sets when Python collects cycles: never, at every turn, or with many planted."""

    def __init__(self, way):
        self.way = way

    def __enter__(self):
        self.before = gc.get_threshold()
        if self.way == "never":
            gc.disable()
        elif self.way == "often":
            gc.set_threshold(200, 20, 1_000)
        elif self.way == "planted":
            for _ in range(300):
                Cycle()

    def __exit__(self, *_):
        gc.enable()
        gc.set_threshold(*self.before)


WAYS = ("as it comes", "never", "often", "planted")
DRAWN = {
    "pools that choose": lambda: draw_family_step(1, "pool_hierarchy"),
    "autocast": lambda: draw_family_step(1, "attentive_fingerprint"),
    "forces": lambda: draw_family_step(1, "schnet"),
    "recurrent": lambda: draw_graph_field_step(1, "basic"),
    "rows": lambda: draw_step(1),
}
CASES = [
    *(("pools that choose", "cuda"), ("autocast", "cpu"), ("forces", "cpu")),
    *(("recurrent", "cpu"), ("rows", "cpu")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), CASES)
def test_an_estimate_is_the_same_whatever_garbage_lies_around(name, target):
    drawn = DRAWN[name]()
    step = replace(drawn.step, target=device_spec(target))
    found = []

    for way in WAYS:
        with collecting(way):
            found.append(estimate(drawn.model, drawn.batch, step))

    first = found[0]
    for way, other in zip(WAYS, found, strict=True):
        unlike = [
            f.name
            for f in fields(other)
            if f.name not in ("seconds", "real_bytes")
            and getattr(other, f.name) != getattr(first, f.name)
        ]
        assert not unlike, way


class Pooled(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.conv, self.pool = g.GCNConv(8, 16), pool
        self.last = nn.Linear(16, 1)

    def forward(self, data):
        x = self.conv(data.x, data.edge_index).relu()
        out = self.pool(x, data.edge_index, batch=data.batch)
        return self.last(g.global_mean_pool(out[0], out[3]))


@pytest.mark.slow
def test_a_plan_of_a_pool_is_the_same_whatever_garbage_lies_around():
    torch.manual_seed(0)
    model = Pooled(g.TopKPooling(16, 0.5))
    graphs = [
        Data(x=torch.randn(n, 8), edge_index=torch.randint(0, n, (2, 3 * n)))
        for n in torch.randint(5, 40, (30,)).tolist()
    ]
    plans = []

    for way in ("never", "often"):
        with collecting(way):
            plan = plan_batch(model, graphs, "cuda", limit="100 MiB", batch_size=8)
        plans.append(plan)

    first, second = plans
    assert repr(first.cost_model.peak_model) == repr(second.cost_model.peak_model)
    assert first.cost_model.tracked_peaks == second.cost_model.tracked_peaks
    # C is for what is free on this machine now.
    assert first.configurations[:2] == second.configurations[:2]
    assert replace(first.estimate, seconds=0) == replace(second.estimate, seconds=0)
    assert first.chances == second.chances
    assert first.savings == second.savings


def test_a_log_ends_with_its_step():
    """The twin of the law: what a cycle held of a step is freed behind it, unlogged."""

    class KeepsInCycles(nn.Module):
        def forward(self, x):
            kept = Cycle()
            kept.tensor = x * 2
            return kept.tensor.sum() * self.weight

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

    log = track_step(KeepsInCycles(), torch.randn(100, 10), Step())
    events = list(log.events)
    gc.collect()

    assert log.events == events
    assert sum(event.change for event in events) > 4_000


def test_frees_between_two_operators_come_in_the_order_of_what_was_made():
    log = Log(
        events=[
            *(Event(number, 8) for number in range(4)),
            *(Event(2, -8), Event(0, -8)),
            Event(6, 4),
            *(Event(3, -8), Event(1, -8), Event(6, -4)),
        ],
        marks=[PhaseStart(9, "end")],
    )

    log.order_frees()

    assert [event.number for event in log.events] == [0, 1, 2, 3, 0, 2, 6, 1, 3, 6]


# What is left behind ------------------------------------------------------------------


def tables_of(memory):
    return [table for table in vars(memory).values() if isinstance(table, dict)]


def test_outputs_of_calls_are_forgotten_when_the_outermost_block_ends():
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.zeros(4, 8)

    with remembering():
        estimate(model, batch, Step())
        within = len(OUTPUTS._by_call)
    after = len(OUTPUTS._by_call)

    assert within > 0
    assert after == 0


def test_an_error_ends_the_block_too():
    def fail():
        with remembering():
            estimate(nn.Linear(8, 8), torch.zeros(4, 8), Step())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert not OUTPUTS._by_call


@pytest.mark.parametrize("memory", [KERNELS, FORMULAS, LAYOUTS, OUTPUTS, STATES])
def test_however_much_is_remembered_little_stays(memory):
    torch_remembers = len(FakeTensorMode.cache)
    with remembering():
        for table in tables_of(memory):
            table.update((f"call {number}", None) for number in range(5_000))
        estimate(nn.Linear(8, 8), torch.zeros(4, 8), Step())

    kept = [list(table) for table in tables_of(memory)]
    for keys in kept:
        assert len(keys) <= 1_000
    # Small real calls of layouts and kernels may ask torch once.
    assert len(FakeTensorMode.cache) - torch_remembers <= 5
    memory.clear()


def test_a_table_that_is_not_full_stays_as_it_is():
    table = {number: number for number in range(5)}

    assert newest(table, 5) is table
    assert list(newest(table, 2)) == [3, 4]
