"""What a plan promises, held against real steps under the profiler."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from drawn_plans import Contrasted, draw_plan
from readings import READINGS, Reading
from torch import nn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import EdgeConv, EdgePooling, global_max_pool
from torch_geometric.utils import to_dense_batch

from loaderkit import build_loader, estimate_step, pack, plan_batch
from loaderkit.budget.batch.cost_model import (
    BatchBudget,
    BatchCostModel,
    choose_budget,
    fit_cost_model,
)
from loaderkit.budget.batch.peak_model import PeakModel, fit_peak_model
from loaderkit.budget.batch.samples import Samples, read_samples
from loaderkit.budget.step.allocation_log import Event
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.track import track_step
from loaderkit.budget.step.train_step import Step

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
    data, model = unequal(60), Padding()
    limit = 2 * MIB

    plan = plan_batch(model, data, "cpu", limit=limit, batch_size=16)

    generator = torch.Generator().manual_seed(1)
    batches = [
        Batch.from_data_list([data[i] for i in rows.tolist()])
        for rows in torch.randperm(60, generator=generator).split(16)
    ]
    peaks = [max(measure_step(model, batch, Step()).values()) for batch in batches]
    sizes = [(b.num_graphs, b.num_nodes, b.num_edges) for b in batches]
    slack = 1 + plan.cost_model.peak_model.error
    assert max(peaks) > limit
    assert plan.chances[1].high > 0.9
    for predicted, peak in zip(plan.predict_peaks(sizes), peaks, strict=True):
        assert peak <= predicted * slack
    bounds = plan.configurations[0].budget.loader_options()
    loader = build_loader(data, "cpu", shuffle=True, seed=0, num_workers=0, **bounds)
    for batch in loader:
        assert max(measure_step(model, batch, Step()).values()) <= limit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "seed"),
    [
        ("all_pairs", 402),
        ("contrastive", 500),
    ],
)
def test_batches_in_which_all_meets_all_are_predicted(family, seed):
    drawn, r = draw_plan(seed, family), random.Random(seed)
    samples = read_samples(drawn.data, collate=drawn.collate_fn)

    cost_model = fit_cost_model(drawn.model, samples, drawn.step, drawn.batch_size)

    assert cost_model.samples.kind.startswith("paired")
    for count in (5, 16, 30):
        rows = r.sample(range(len(samples)), count)
        peaks = measure_step(drawn.model, samples.join(rows), drawn.step)
        predicted = cost_model.predict(rows)[0]
        assert predicted == pytest.approx(max(peaks.values()), rel=0.02)
        dearest = cost_model.samples.worst_peaks(cost_model.peak_model)[count - 1]
        assert predicted <= dearest * 1.0001


@pytest.mark.slow
def test_pairs_are_seen_in_large_batches_though_small_ones_hide_them():
    model = Contrasted(nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 8)))
    data = [torch.randn(8) for _ in range(600)]

    plan = plan_batch(model, data, "cpu", limit="40 MiB", batch_size=500)

    assert plan.cost_model.samples.kind == "paired samples"
    batch = torch.stack(data[:500])
    peak = max(measure_step(model, batch, Step()).values())
    [predicted] = plan.predict_peaks([500])
    assert predicted == pytest.approx(peak, rel=0.02)


class Nodes(nn.Module):
    """One layer over the nodes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, data):
        return self.inner(data.x)


@pytest.mark.slow
def test_a_plan_for_a_list_gives_bounds_that_its_loader_keeps():
    data, model = unequal(30), Padding()
    nodes = Nodes()
    limit = 40 * 2**10

    by_nodes = plan_batch(nodes, data, "cpu", limit=limit, batch_size=8)
    by_samples = plan_batch(model, data, "cpu", limit="1 MiB", batch_size=8)

    bounds = by_nodes.configurations[0].budget.loader_options()
    assert list(bounds) == ["batch_size", "max_nodes", "max_edges"]
    for batch in build_loader(data, "cpu", shuffle=True, num_workers=0, **bounds):
        assert max(measure_step(nodes, batch, Step()).values()) <= limit
    # What a model pads is no sum over its nodes.
    assert list(by_samples.configurations[0].budget.loader_options()) == ["batch_size"]


@pytest.mark.slow
def test_a_chance_prints_its_ends():
    plan = plan_batch(Nodes(), unequal(60), "cpu", limit="220 KiB", batch_size=32)

    chance = json.loads(json.dumps(plan.to_json()))["chances"]["1"]
    assert 0 < chance["low"] < chance["likely"] < chance["high"] < 1
    assert " to " in next(
        line for line in str(plan).splitlines() if "one epoch" in line
    )


def lopsided(count):
    """Typed graphs of which each has many nodes of one type only."""
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for n in torch.randint(3, 90, (count,), generator=generator).tolist():
        few, many = (2, n) if n % 2 else (n, 2)
        graph = HeteroData()
        graph["a"].x, graph["b"].x = torch.randn(few, 4), torch.randn(many, 64)
        ends = torch.stack([torch.arange(n) % few, torch.arange(n) % many])
        graph["a", "to", "b"].edge_index = ends
        graph["b", "back", "a"].edge_index = ends.flip(0)
        graphs.append(graph)
    return graphs


class Types(nn.Module):
    def __init__(self):
        super().__init__()
        self.of_a, self.of_b = nn.Linear(4, 8), nn.Linear(64, 8)

    def forward(self, data):
        a, b = self.of_a(data["a"].x), self.of_b(data["b"].x)
        source, target = data["a", "to", "b"].edge_index
        return (a[source] * b[target]).sum(1)


@pytest.mark.slow
def test_typed_graphs_are_priced_by_the_nodes_of_each_type():
    data, model = lopsided(30), Types()
    samples = read_samples(data)

    cost_model = fit_cost_model(model, samples, Step())

    assert samples.names == ("graphs", "nodes of a", "nodes of b", "edges a to b")
    assert cost_model.peak_model.error < 1e-6
    for rows in (range(8), range(8, 30)):
        batch = samples.join(list(rows))
        truth = max(measure_step(model, batch, Step()).values())
        predicted = cost_model.predict(list(rows))[0]
        assert predicted == pytest.approx(truth, rel=0.01)
    with pytest.raises(ValueError, match="graphs, nodes of a, nodes of b"):
        samples.with_padding([[8, 100, 200]])


class Pairs(nn.Module):
    """Each token looks at all of its sequence; with ``across``, at all of the batch."""

    def __init__(self, *, across=False):
        super().__init__()
        self.table, self.across = nn.Embedding(9, 4), across

    def forward(self, words):
        hidden = self.table(words)
        hidden = hidden.flatten(0, 1)[None] if self.across else hidden
        return (hidden @ hidden.transpose(1, 2)).softmax(2).mean()


def ragged(lengths):
    return [torch.zeros(n, dtype=torch.long) for n in lengths]


def together(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


@pytest.mark.slow
def test_squares_of_long_sequences_are_seen_though_most_are_short():
    # short ones alone cannot tell places from their squares
    data = ragged([5 + i % 5 for i in range(40)] + [100 + i for i in range(20)])

    cost_model = fit_cost_model(Pairs(), read_samples(data, collate=together), Step())

    assert cost_model.peak_model.error < 1e-6


class Nearest(nn.Module):
    """Joins each node to the nearest ones, of which it compares all of a batch."""

    def __init__(self):
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(2 * width, 16), nn.ReLU(), nn.Linear(16, 16))
            for width in (8, 16)
        ]
        self.first, self.second = map(EdgeConv, layers)
        self.last = nn.Linear(16, 1)

    def neighbours(self, points, batch):
        is_foreign = batch[:, None] != batch
        distances = torch.cdist(points, points).masked_fill(is_foreign, 1e9)
        nearest = distances.topk(6, largest=False).indices.reshape(-1)
        return torch.stack([nearest, torch.arange(len(points)).repeat_interleave(6)])

    def forward(self, data):
        hidden = self.first(data.x, self.neighbours(data.pos, data.batch)).relu()
        hidden = self.second(hidden, self.neighbours(hidden, data.batch)).relu()
        return self.last(global_max_pool(hidden, data.batch))


@pytest.mark.slow
def test_nodes_of_a_batch_meet_though_the_small_steps_have_few():
    # with a long tail of sizes, most graphs are of ten nodes: small steps have 20
    r = random.Random(1)
    sizes = [max(10, min(400, int(4 * r.paretovariate(1)))) for _ in range(40)]
    data = [
        Data(x=torch.randn(n, 8), pos=torch.randn(n, 3), edge_index=torch.ones(2, n))
        for n in sizes
    ]
    samples, step = read_samples(data), Step(optimizer="sgd")

    cost_model = fit_cost_model(Nearest(), samples, step, 32)

    assert cost_model.samples.kind == "paired graphs"
    for count in (6, 20):
        rows = r.sample(range(40), count)
        truth = max(measure_step(Nearest(), samples.join(rows), step).values())
        assert cost_model.predict(rows)[0] == pytest.approx(truth, rel=0.02)


@pytest.mark.slow
def test_where_sizes_do_not_explain_the_price_the_largest_batch_leaves_room():
    data = ragged([4 + 7 * i % 40 for i in range(14)])
    samples = read_samples(data, collate=together)
    model = Pairs(across=True)

    cost_model = fit_cost_model(model, samples, Step())

    assert cost_model.peak_model.error > 0.05
    limit = cost_model.worst_peak(6)
    count = cost_model.largest_batch(limit)
    rows = sorted(range(14), key=lambda row: -len(data[row]))[:count]
    assert count >= 1
    assert max(measure_step(model, samples.join(rows), Step()).values()) <= limit


class Cached:
    """Sizes of graphs, as a cache tells them."""

    def __init__(self, nodes, edges):
        self.nodes, self.edges = nodes, edges

    def sizes(self):
        return {"nodes": self.nodes, "edges": self.edges}


def priced_graphs(r, error):
    """Graphs of a cache and lines that price them, drawn at random."""
    numpy_random = np.random.default_rng(r.randrange(2**32))
    nodes = numpy_random.lognormal(3, r.uniform(0.1, 1.5), r.randint(20, 80)).astype(
        int
    )
    nodes = np.maximum(nodes, 1)
    edges = (nodes * numpy_random.uniform(0.5, r.uniform(1, 9), len(nodes))).astype(int)
    costs = [[0, 4000, 50_000], [0, 200, 3000], [16, 400, 2000], [-90, 64, 900]]
    lines = np.array([[r.choice(cost) for cost in costs] for _ in range(2)], float)
    sizes = np.stack([np.ones(len(nodes)), nodes, edges], axis=1).astype(float)
    samples = Samples(Cached(nodes, edges), "graphs", sizes, join=list)
    peak_model = PeakModel(samples.names, lines, error)
    return BatchCostModel(None, samples, Step(), peak_model)


def allowed(cost_model, bounds, r):
    """The batches of an epoch that a loader within such bounds makes."""
    rows, batch = list(range(len(cost_model.samples))), []
    r.shuffle(rows)
    for row in sorted(
        rows, key=lambda row: r.choice([row, cost_model.samples.sizes[row, 1]])
    ):
        _, nodes, edges = cost_model.samples.sizes[[*batch, row]].sum(axis=0)
        is_full = nodes > bounds.get("max_nodes", nodes)
        is_full = is_full or edges > bounds.get("max_edges", edges)
        if is_full or len(batch) == bounds["batch_size"]:
            yield batch
            batch = []
        batch = [*batch, row]
    yield batch


@pytest.mark.parametrize("seed", range(60))
def test_every_batch_that_the_bounds_allow_has_its_price_below_the_limit(seed):
    r = random.Random(seed)
    cost_model, most = priced_graphs(r, error=0.0), r.choice([2, 8, 32])
    worst_peaks = cost_model.samples.worst_peaks(cost_model.peak_model)
    count = r.randint(1, most)
    limit = int(worst_peaks[min(count, len(worst_peaks)) - 1] * r.uniform(1.0, 5.0))

    bounds = choose_budget(cost_model, limit, count, most).loader_options()

    assert bounds["batch_size"] <= most
    for batch in allowed(cost_model, bounds, r):
        assert len(batch) > 0  # no sample is beyond the bounds on its own
        assert cost_model.predict(batch)[0] <= limit


def test_typed_graphs_without_edges_are_bounded_by_nodes():
    sizes = np.array([[1, 3, 9], [1, 8, 2]], float)
    names = ("graphs", "nodes of a", "nodes of b")
    dataset = Cached(sizes[:, 1:].sum(axis=1), np.zeros(2))
    samples = Samples(dataset, "typed graphs", sizes, join=list, columns=names)
    peak_model = PeakModel(names, np.array([[0.0, 0.0, 10.0, 20.0]]), 0.0)
    cost_model = BatchCostModel(None, samples, Step(), peak_model)

    assert choose_budget(cost_model, 1000, 2, 2) == BatchBudget(2, max_nodes=50)


def test_sizes_that_explain_nothing_give_no_bounds_of_nodes():
    cost_model = priced_graphs(random.Random(0), error=2.0)

    assert choose_budget(cost_model, 10**12, 3, 8) == BatchBudget(batch_size=3)


@pytest.mark.slow
def test_what_a_plan_gives_the_loader_of_a_cache_fits(tmp_path):
    data, model = unequal(40), Nodes()
    cached = pack(data, tmp_path / "graphs", workers=0)
    limit = 400_000  # many times a batch of 4, so that only the asked-for size holds

    plan = plan_batch(model, cached, "cpu", limit=limit, batch_size=4)

    bounds = plan.configurations[0].budget.loader_options()
    assert bounds["max_nodes"] > 0
    assert bounds["batch_size"] == 4
    loader = build_loader(cached, "cpu", shuffle=True, seed=0, num_workers=0, **bounds)
    for batch in loader:
        assert batch.num_graphs <= 4
        assert max(measure_step(model, batch, Step()).values()) <= limit


class Table(nn.Module):
    """A table of numbers whose gradients are sparse."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(50, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, words):
        return self.last(self.table(words).mean(1))


@pytest.mark.slow
def test_what_torch_refuses_to_do_smaller_is_left_out_of_a_plan():
    # fused updates of sparse gradients; the plan raised torch's own error
    data = [torch.zeros(6, dtype=torch.long)] * 8

    plan = plan_batch(Table(), data, "cpu", limit="1 MiB", optimizer="sgd")

    smallest = plan.configurations[1]
    assert smallest.ok
    assert smallest.optimizer == "loop"
    assert "fused" not in {gain.remedy.name for gain in plan.savings}


class Probabilities(nn.Module):
    """Refuses to work in bfloat16."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, rows):
        if torch.is_autocast_enabled("cpu"):
            msg = "not in bfloat16"
            raise RuntimeError(msg)
        return self.inner(rows).sigmoid()


@pytest.mark.slow
def test_a_model_that_refuses_mixed_precision_is_planned_without():
    plan = plan_batch(
        Probabilities(), [torch.zeros(4)] * 8, "cpu", limit="1 MiB", batch_size=4
    )

    assert plan.configurations[1].ok
    assert plan.configurations[1].precision == "float32"
    assert "bfloat16 autocast" not in {gain.remedy.name for gain in plan.savings}


class Jagged(nn.Module):
    """Reads the values of torch's jagged tensors."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, clip):
        return self.inner(clip.values() if clip.is_nested else clip)


def jagged_batch(samples):
    clips = [torch.as_tensor(sample["clip"]) for sample in samples]
    return {"clip": torch.nested.as_nested_tensor(clips, layout=torch.jagged)}


@pytest.mark.slow
def test_jagged_batches_are_planned():
    # estimates and plans ended in an error of torch's own
    data = [{"clip": torch.ones(3 + 5 * i % 40, 4)} for i in range(20)]
    batch = jagged_batch(data[:8])

    estimated = estimate_step(Jagged(), batch)
    plan = plan_batch(
        Jagged(), data, "cpu", limit="100 KiB", batch_size=8, collate_fn=jagged_batch
    )

    truth = max(measure_step(Jagged(), batch, Step()).values())
    assert estimated.low <= truth <= estimated.high
    assert estimated.peak == pytest.approx(truth, rel=0.01)
    largest = sorted(data, key=lambda sample: -len(sample["clip"]))[: plan.micro_batch]
    peak = max(measure_step(Jagged(), jagged_batch(largest), Step()).values())
    assert peak <= 100 * 1024


@pytest.mark.slow
@pytest.mark.long_cases
@pytest.mark.parametrize("name", READINGS)
def test_a_plan_is_made_for_the_branch_that_takes_most(name):
    model, rows = Reading(READINGS[name]), list(torch.randn(4_000, 64))

    plan = plan_batch(
        model, rows, "cpu", limit=2 * MIB, optimizer="sgd", batch_size=4_000
    )

    pieces = torch.stack(rows[: plan.micro_batch])
    truth = max(measure_step(model, pieces, Step(optimizer="sgd")).values())
    assert 0.3 * plan.limit < truth <= plan.limit


class Hardest(nn.Module):
    """Learns from the hardest samples of a batch, of which there must be so many."""

    def __init__(self, count):
        super().__init__()
        self.inner, self.count = nn.Linear(64, 64), count

    def forward(self, x):
        return self.inner(x).pow(2).mean(1).topk(self.count).values.mean()


NEEDS = {
    "statistics of a batch": (nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), 2),
    "the two hardest": (Hardest(2), 2),
    "the five hardest": (Hardest(5), 5),
    "the twelve hardest": (Hardest(12), 12),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_a_step_that_needs_several_samples_is_planned_with_as_many(name):
    model, fewest = NEEDS[name]
    rows = list(torch.randn(400, 64))

    roomy, tight, hopeless = (
        plan_batch(model, rows, "cpu", limit=limit, optimizer="sgd", batch_size=64)
        for limit in (8 * MIB, 64 << 10, "1 KiB")
    )

    assert roomy.micro_batch == 64
    assert roomy.configurations[1].micro_batch == fewest
    assert tight.micro_batch not in range(1, fewest)
    assert hopeless.micro_batch == 0
    assert hopeless.configurations[1].micro_batch == 0
    with pytest.raises((RuntimeError, ValueError)):
        model(torch.stack(rows[: fewest - 1]))


@pytest.mark.slow
def test_pieces_are_no_equal_results_where_layers_normalise_by_their_batch():
    rows = list(torch.randn(400, 64))
    costs = {}
    for name, layer in (("batch", nn.BatchNorm1d(64)), ("layer", nn.LayerNorm(64))):
        model = nn.Sequential(nn.Linear(64, 64), layer)
        plan = plan_batch(model, rows, "cpu", limit=8 * MIB, batch_size=256)
        remedies = {saving.remedy.name: saving.remedy for saving in plan.savings}
        costs[name] = remedies["micro-batches"]

    assert costs["batch"].cost == "numerics"
    assert "MicroBatcher" not in costs["batch"].code
    assert costs["layer"].cost == "equal results"


class Quantised(nn.Module):
    """Looks its pixels up in a codebook, as a VQ-VAE does."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Conv2d(3, 16, 4, 4)
        self.decode = nn.ConvTranspose2d(16, 3, 4, 4)
        self.codes = nn.Embedding(64, 16)

    def forward(self, images):
        encoded = self.encode(images).permute(0, 2, 3, 1)
        distances = torch.cdist(encoded.reshape(-1, 16), self.codes.weight)
        looked_up = self.codes(distances.argmin(1)).view_as(encoded)
        loss = (looked_up - encoded).pow(2).mean()
        passed_on = encoded + (looked_up - encoded).detach()
        decoded = self.decode(passed_on.permute(0, 3, 1, 2))
        return (decoded - images).pow(2).mean() + loss


@pytest.mark.slow
def test_a_peak_of_another_moment_than_in_small_steps_is_predicted():
    model, images = Quantised(), list(torch.randn(300, 3, 24, 24))

    plan = plan_batch(model, images, "cpu", limit=6 * MIB, batch_size=256)

    step = Step(optimizer="adam")
    pieces = torch.stack(images[: plan.micro_batch])
    truth = max(measure_step(model, pieces, step).values())
    assert plan.cost_model.peak_model.error < 0.01
    assert 0.97 * plan.limit < truth <= plan.limit


def with_a_rehearsal(log, nbytes):
    """Give a log in which an optimizer made its state in an update of its own first."""
    begins_at = log.marks[0].position
    rehearsal = [Event(-1, nbytes), Event(-1, -nbytes)]
    return replace(
        log,
        events=log.events[:begins_at] + rehearsal + log.events[begins_at:],
        marks=[mark._replace(position=mark.position + 2) for mark in log.marks],
        inside={
            position + 2 * (position >= begins_at): held
            for position, held in log.inside.items()
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [0, 4096, 64 * MIB])
def test_what_lies_before_the_step_changes_no_prediction(nbytes):
    """The first step that a process tracks with an optimizer has more events."""
    sizes = [[2], [4], [6]]
    logs = [
        track_step(Quantised(), torch.randn(size, 3, 24, 24), Step(optimizer="adam"))
        for [size] in sizes
    ]

    alike = fit_peak_model(["samples"], sizes, logs)
    first_rehearses = [with_a_rehearsal(logs[0], nbytes), *logs[1:]]
    unlike = fit_peak_model(["samples"], sizes, first_rehearses)

    assert unlike.predict([[1], [100]]) == pytest.approx(alike.predict([[1], [100]]))
    assert unlike.error == pytest.approx(alike.error)


class Merging(nn.Module):
    """Merges the nodes of the edges with the highest scores, which it reads one by one.

    A position that is read may be the last, and not the one behind it.
    """

    def __init__(self):
        super().__init__()
        self.first, self.pool = nn.Linear(8, 32), EdgePooling(32)
        self.last = nn.Linear(32, 1)

    def forward(self, data):
        hidden = self.first(data.x)
        hidden, *_ = self.pool(hidden, data.edge_index, data.batch)
        return self.last(hidden)


@pytest.mark.slow
def test_a_pool_that_reads_positions_one_by_one_is_planned():
    model, limit = Merging(), 192 << 10
    data = [
        Data(x=torch.randn(n, 8), edge_index=torch.randint(0, n, (2, 2 * n)))
        for n in (4, 5, 6, 7, 8, 10, 12, 14) * 2
    ]

    plan = plan_batch(model, data, "cpu", limit=limit, batch_size=8)

    batch_size = plan.configurations[0].budget.loader_options()["batch_size"]
    rng = random.Random(0)
    for _ in range(5):
        batch = Batch.from_data_list(rng.sample(data, batch_size))
        assert max(measure_step(model, batch, Step()).values()) <= limit
