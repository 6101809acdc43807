"""What a plan promises, held against real steps under the profiler."""

import json

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.utils import to_dense_batch

from loaderkit import build_loader, plan_batch
from loaderkit.budget.measure import measure_step
from loaderkit.budget.steps import Step

MIB = 2**20


class Padding(nn.Module):
    """Attention over all nodes of a graph, padded to the largest."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 1)
        self.inner = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, data):
        hidden, mask = to_dense_batch(self.first(data.x), data.batch)
        out = self.inner(
            hidden, hidden, hidden, key_padding_mask=~mask, need_weights=False
        )
        return self.last(out[0][mask])


def unequal(count):
    generator = torch.Generator().manual_seed(0)
    sizes = (torch.randn(count, generator=generator).exp() * 30).clamp(5, 250).long()
    return [
        Data(
            x=torch.randn(n, 8, generator=generator),
            edge_index=torch.randint(0, n, (2, 4 * n), generator=generator),
        )
        for n in sizes.tolist()
    ]


@pytest.mark.slow
def test_padding_inside_a_model_is_priced_and_its_promise_kept():
    data, model = unequal(100), Padding()
    limit = 4 * MIB

    plan = plan_batch(model, data, "cpu", limit=limit, batch_size=32)

    generator = torch.Generator().manual_seed(1)
    batches = [
        Batch.from_data_list([data[i] for i in rows.tolist()])
        for rows in torch.randperm(100, generator=generator).split(32)
    ]
    peaks = [max(measure_step(model, batch, Step()).values()) for batch in batches]
    sizes = [(b.num_graphs, b.num_nodes, b.num_edges) for b in batches]
    slack = 1 + plan.pricing.surrogate.error
    assert max(peaks) > limit
    assert plan.chances[1].high > 0.9
    for price, peak in zip(plan.price(sizes), peaks, strict=True):
        assert peak <= price * slack
    budget = plan.configurations[0].budget
    loader = build_loader(data, "cpu", shuffle=True, seed=0, num_workers=0, **budget)
    for batch in loader:
        assert max(measure_step(model, batch, Step()).values()) <= limit


class Nodes(nn.Module):
    """One layer over the nodes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, data):
        return self.inner(data.x)


def test_a_plan_for_a_list_gives_bounds_that_its_loader_takes():
    data = unequal(30)

    plan = plan_batch(Nodes(), data, "cpu", limit="1 MiB", batch_size=8)

    bounds = plan.configurations[0].budget
    assert list(bounds) == ["batch_size"]
    assert len(list(build_loader(data, "cpu", num_workers=0, **bounds)))


def test_a_chance_prints_its_ends():
    plan = plan_batch(Nodes(), unequal(60), "cpu", limit="220 KiB", batch_size=32)

    chance = json.loads(json.dumps(plan.to_json()))["chances"]["1"]
    assert 0 < chance["low"] < chance["likely"] < chance["high"] < 1
    assert " to " in next(
        line for line in str(plan).splitlines() if "one epoch" in line
    )
