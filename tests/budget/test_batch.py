"""The largest batch against brute force, and chances against simulated epochs."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import DENSE, GRAPHS, Attention, TwoLayers, graph, perceptron
from torch_geometric.nn import GATConv, GCNConv

import loaderkit
from loaderkit import build_loader, open_cache, pack, plan_batch
from loaderkit.budget.batch.cost_model import (
    BatchBudget,
    choose_budget,
    fit_cost_model,
    probability_of_running_out,
)
from loaderkit.budget.batch.samples import read_samples
from loaderkit.budget.step.devices import DeviceSpec
from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.train_step import Step
from loaderkit.errors import BudgetError, StepError
from loaderkit.memory import probes

MIB = 2**20


def unequal(count, seed=0):
    """Graphs of very different sizes."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    nodes = np.minimum(rng.lognormal(3.5, 1, count), 2000).astype(int) + 10
    edges = (nodes * rng.uniform(1, 20, count)).astype(int)
    return [graph(int(n), int(e), generator) for n, e in zip(nodes, edges, strict=True)]


@functools.cache
def costs_of_graphs(name):
    """What a model costs over 200 graphs; fitted once, for tests that only ask it."""
    return fit_cost_model(GRAPHS[name](), read_samples(unequal(200)), Step())


def costs_of_others(name, data):
    """What the same model costs over other graphs, without another fit."""
    cost_model = costs_of_graphs(name)
    samples = read_samples(data)
    if cost_model.samples.kind == "graphs with self-loops":
        samples = samples.with_self_loops()
    return replace(cost_model, samples=samples, tracked_peaks={})


def solvable():
    """One model of each form of cost: the search sees a model by its costs alone."""
    data = unequal(8)
    for name in ("GCN", "SAGE", "Transformer"):
        yield name, GRAPHS[name](), data
    for name in ("perceptron", "attention with dropout"):
        make, rows = DENSE[name]
        yield name, make(), list(rows(8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "data"), [pytest.param(*case[1:], id=case[0]) for case in solvable()]
)
def test_the_largest_batch_equals_brute_force(model, data):
    cost_model = fit_cost_model(model, read_samples(data), Step())
    peaks = [cost_model.worst_peak(count) for count in range(1, len(data) + 1)]
    smallest, largest = min(peaks), max(peaks)

    for share in (0.2, 0.5, 0.8):
        limit = int(smallest + share * (largest - smallest))
        brute = max(n for n, peak in enumerate(peaks, 1) if peak <= limit)
        assert cost_model.largest_batch(limit) == brute
    assert cost_model.largest_batch(smallest - 1) == 0
    assert cost_model.largest_batch(largest) == len(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GCN", "GAT", "SAGE"])
def test_merged_batches_are_priced_within_half_a_percent(name):
    cost_model = costs_of_graphs(name)
    rng = np.random.default_rng(0)

    for count in (8, 32, 64):
        rows = rng.choice(200, count, replace=False).tolist()
        predicted = cost_model.predict(rows)[0]
        assert predicted == pytest.approx(cost_model.track_likely_peak(rows), rel=0.005)


def looped(count, share, sizes, seed=0):
    """Graphs of which some edges begin and end at the same node, each another share."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        nodes = int(rng.choice(sizes))
        item = graph(nodes, nodes * int(rng.integers(2, 12)), generator)
        source, target = item.edge_index
        is_loop = torch.rand(len(source), generator=generator) < rng.uniform(0, share)
        others = torch.where(source == target, (source + 1) % nodes, target)
        item.edge_index = torch.stack([source, torch.where(is_loop, source, others)])
        made.append(item)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.05, 0.9])
# the smaller half of the graphs are all alike where there are two sizes
@pytest.mark.parametrize("sizes", [range(10, 90), [8, 200]], ids=["any", "two"])
@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_convolutions_that_replace_self_loops_are_priced_by_their_number(
    name, sizes, share
):
    samples = read_samples(looped(100, share, sizes))

    cost_model = fit_cost_model(GRAPHS[name](), samples, Step())

    assert cost_model.samples.kind == "graphs with self-loops"
    assert cost_model.peak_model.error < 1e-6
    rng = np.random.default_rng(0)
    for count in (2, 16, 64):
        rows = rng.choice(100, count, replace=False).tolist()
        peak = cost_model.track_likely_peak(rows)
        assert cost_model.predict(rows)[0] == pytest.approx(peak, rel=1e-6)
        # Who does not know how many there are gets the most that it may be.
        sizes_without = samples.batch_sizes(rows)
        most = cost_model.peak_model.predict(
            cost_model.samples.with_padding(sizes_without)
        )
        assert most[0] >= peak * (1 - 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share"),
    [("GCN", 0.0), ("SAGE", 0.9)],
    ids=["none there", "none replaced"],
)
def test_self_loops_are_not_asked_for_where_they_change_nothing(name, share):
    samples = read_samples(looped(60, share, range(10, 90)))

    cost_model = fit_cost_model(GRAPHS[name](), samples, Step())

    assert cost_model.samples.kind == "graphs"
    assert cost_model.peak_model.error < 1e-6


def costs_on_mps(name):
    if name in GRAPHS:
        model, data = GRAPHS[name](), unequal(40)
    else:
        make, rows = DENSE[name]
        model, data = make(), list(rows(40))
    return fit_cost_model(model, read_samples(data), Step(target=DeviceSpec("mps")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SAGE", "mask"])
def test_what_is_fitted_for_a_device_holds_where_the_kernels_are_the_same(name):
    on_mps = costs_on_mps(name)

    on_cpu = on_mps.with_target(Step(), batch_size=32)

    assert on_cpu.peak_model.lines is on_mps.peak_model.lines
    rng = np.random.default_rng(0)
    for count in (2, 5, 20, 40):
        rows = rng.choice(40, count, replace=False).tolist()
        peak = on_cpu.track_likely_peak(rows)
        factor = 1.001 + on_cpu.peak_model.error
        assert peak / factor <= on_cpu.predict(rows)[0] <= peak * factor


@pytest.mark.slow
# the CPU has other kernels than MPS for convolutions and for attention
@pytest.mark.parametrize("name", ["convolutional", "attention"])
def test_another_device_is_fitted_anew_where_its_kernels_differ(name):
    on_mps = costs_on_mps(name)

    on_cpu = on_mps.with_target(Step(), batch_size=32)

    fitted = fit_cost_model(on_mps.model, on_mps.samples, Step(), 32)
    assert not np.array_equal(on_cpu.peak_model.lines, on_mps.peak_model.lines)
    assert np.array_equal(on_cpu.peak_model.lines, fitted.peak_model.lines)


@pytest.mark.slow
def test_the_dearest_batch_is_dearer_than_random_ones():
    # Few, so that those drawn at random come near the dearest ones.
    cost_model = costs_of_others("GAT", unequal(60))
    samples = cost_model.samples
    rng = np.random.default_rng(0)

    prices = samples.worst_peaks(cost_model.peak_model)

    for count in (1, 7, 20):
        drawn = np.stack([rng.permutation(60)[:count] for _ in range(500)])
        assert cost_model.predict(drawn).max() <= prices[count - 1]


@pytest.mark.slow
def test_the_chance_of_running_out_is_that_of_simulated_epochs():
    cost_model = costs_of_others("GAT", unequal(300))
    epochs = _dearest_batches(cost_model, 16, 40_000)
    limit = int(np.quantile(epochs, 0.75))

    chance = probability_of_running_out(cost_model, 16, limit, seed=1)
    five = probability_of_running_out(cost_model, 16, limit, epochs=5, seed=1)

    rng = np.random.default_rng(9)
    fives = rng.choice(epochs, (100_000, 5)).max(axis=1)
    assert chance.likely == pytest.approx((epochs > limit).mean(), abs=0.02)
    assert five.likely == pytest.approx((fives > limit).mean(), abs=0.02)
    assert five.likely > 0.7  # "it crashed in the 5th epoch"
    assert chance.low < (epochs > limit).mean() < chance.high


def _dearest_batches(cost_model, size, rounds):
    """The dearest batch of each of many shuffled epochs."""
    rng, total = np.random.default_rng(5), len(cost_model.samples)
    orders = rng.random((rounds, total)).argsort(axis=1)
    parts = np.split(orders, range(size, total, size), axis=1)
    prices = [cost_model.predict(p) for p in parts]
    return np.max(prices, axis=0)


@pytest.mark.slow
def test_a_limit_no_batch_reaches_is_safe_and_one_below_all_is_not():
    cost_model = costs_of_graphs("GCN")

    never = probability_of_running_out(cost_model, 8, 10**12, epochs=1000)

    assert never == (0.0, 0.0, 0.0)
    assert probability_of_running_out(cost_model, 8, 1).likely == 1.0


@pytest.mark.slow
def test_every_batch_within_the_node_budget_fits(tmp_path):
    data, model = unequal(120), TwoLayers(GATConv)
    limit = 24 * MIB
    cached = pack(data, tmp_path / "graphs.lk")

    plan = plan_batch(model, cached, "cpu", limit=limit, batch_size=32)

    budget = plan.configurations[0].budget
    bounds = budget.loader_options()
    loader = build_loader(
        cached, "cpu", shuffle=True, seed=1, num_workers=0, oversized="alone", **bounds
    )
    sizes = [(b.num_graphs, b.num_nodes, b.num_edges) for b in loader]
    assert plan.predict_peaks(sizes).max() <= limit
    assert max(nodes for _, nodes, _ in sizes) > 0.5 * budget.max_nodes


@pytest.mark.slow
def test_a_plan_prints_configurations_chances_and_gains():
    data, model = unequal(100), TwoLayers(GCNConv)

    plan = plan_batch(model, data, "mps", limit="16 MiB", batch_size=16, epochs=20)

    text = str(plan)
    for words in ("A (balanced)", "B (minimum)", "C (CPU)", "out of memory within 5"):
        assert words in text
    assert plan.micro_batch < 16
    first, smallest, cpu = plan.configurations
    assert first.accumulation * first.micro_batch >= 16
    assert smallest.peak < first.peak
    assert (cpu.device, cpu.micro_batch) == ("cpu", 16)
    assert plan.chances[20] >= plan.chances[5] >= plan.chances[1]
    assert plan.to_json()["configurations"][0]["micro_batch"] == plan.micro_batch
    assert plan.ok


@pytest.mark.slow
def test_the_batch_is_not_blamed_for_the_optimizer():
    data = list(torch.randn(32, 784))

    plan = plan_batch(perceptron(), data, "mps", limit="1 GiB", batch_size=8)

    assert "the peak is in step" in plan.cause.lower()
    assert "the batch is not the cause" in plan.cause
    saved = {gain.remedy.name: gain.saves for gain in plan.savings}
    assert saved["fused optimizer"] > 10 * saved["micro-batches"]


@pytest.mark.slow
def test_each_gain_is_the_estimate_made_again():
    data = list(torch.randn(32, 40, 7))
    model = Attention(layers=2)

    plan = plan_batch(model, data, "cpu", limit="1 GiB", batch_size=32)

    savings = {gain.remedy.name: gain for gain in plan.savings}
    batch = torch.stack(data)
    base = estimate(model, batch, Step()).peak
    half = estimate(model, batch[:16], Step()).peak
    again = estimate(model, batch, Step(checkpoint=True)).peak
    assert savings["micro-batches"].saves == base - half
    assert savings["checkpointing"].saves == base - again


class Ragged(torch.utils.data.Dataset):
    """Sequences of unequal lengths, padded to the longest of a batch."""

    lengths = (5, 40, 12, 33, 8, 25, 17, 60, 9, 14, 21, 30)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, row):
        return torch.randn(self.lengths[row], 7)


class Measured(Ragged):
    """The same, which says how long each sequence is."""

    def sizes(self):
        return {"tokens": np.array(self.lengths)}


def pad(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


@pytest.mark.slow
def test_sequences_are_planned_by_tokens():
    plan = plan_batch(
        Attention(layers=1),
        Ragged(),
        "cpu",
        limit="2 MiB",
        batch_size=12,
        collate_fn=pad,
    )

    cost_model = plan.cost_model
    assert cost_model.samples.kind == "sequences"
    rows = [7, 1, 3]
    predicted = cost_model.predict(rows)[0]
    assert predicted == pytest.approx(cost_model.track_likely_peak(rows), rel=0.005)
    best = plan.configurations[0]
    assert cost_model.worst_peak(best.micro_batch) <= plan.limit
    assert cost_model.worst_peak(best.micro_batch + 1) > plan.limit
    # the dataset says no sizes, without which a loader takes no buckets
    assert best.budget == BatchBudget(batch_size=best.micro_batch)
    bounds = choose_budget(
        replace(cost_model, samples=replace(cost_model.samples, dataset=Measured())),
        plan.limit,
        best.micro_batch,
        12,
    )
    assert bounds == BatchBudget(best.micro_batch, bucket_by="tokens")
    for dataset, budget in ((Ragged(), best.budget), (Measured(), bounds)):
        options = budget.loader_options()
        assert len(build_loader(dataset, "cpu", collate_fn=pad, **options))


@pytest.mark.slow
def test_nothing_fits_is_said():
    plan = plan_batch(perceptron(), list(torch.randn(4, 784)), "cpu", limit="1 MiB")

    assert not plan.ok
    assert "nothing fits: one sample takes" in str(plan)
    assert plan.micro_batch == 0


@pytest.mark.slow
def test_limits_are_asked_of_the_device_or_the_specification():
    model, data = perceptron(), list(torch.randn(8, 784))

    card = plan_batch(model, data, DeviceSpec("cuda", memory_bytes=2**30))
    host = plan_batch(model, data, "cpu")

    assert card.limit == round(0.9 * 2**30)
    assert any("free now" in note for note in host.notes)
    if not torch.cuda.is_available():
        with pytest.raises(BudgetError, match="There is no cuda here that tells"):
            plan_batch(model, data, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("started", [False, True])
def test_free_memory_is_found_before_a_device_is_used(started, monkeypatch):
    cuda = SimpleNamespace(  # what torch.cuda answers on a card of 80 GiB
        is_available=lambda: True,
        device_count=lambda: 2,
        is_initialized=lambda: started,
        mem_get_info=lambda _: (79 << 30, 80 << 30),
        memory_reserved=lambda _: 3 << 30,
        memory_allocated=lambda _: 1 << 30,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: cuda)
    if hasattr(torch, "accelerator"):  # torch's optimizers ask it, and then the driver
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)

    plan = plan_batch(perceptron(), list(torch.randn(8, 784)), "cuda:1")

    told_by = (
        "the driver of cuda" if started else "the driver of cuda, started to ask it"
    )
    assert probes.free_bytes(torch.device("cuda")) == (81 << 30, told_by)
    assert plan.limit == round(0.9 * (81 << 30))


def test_free_memory_of_apples_device_is_what_metal_recommends():
    metal = SimpleNamespace(
        recommended_max_memory=lambda: 10 << 30,
        current_allocated_memory=lambda: 2 << 30,
    )
    probe = probes.MpsProbe(metal)
    probe.available = lambda _: True

    assert probes.free_bytes(torch.device("mps"), probe=probe).amount == 8 << 30


def test_wrong_arguments_are_refused():
    model, data = perceptron(), list(torch.randn(8, 784))
    for wrong in ({"batch_size": 0}, {"limit": 0}, {"limit": "much"}):
        with pytest.raises(ValueError, match=r"batch_size|positive|size"):
            plan_batch(model, data, "cpu", **wrong)
    with pytest.raises(TypeError, match="no option 'speed'"):
        plan_batch(model, data, "cpu", limit="1 GiB", speed=3)
    with pytest.raises(ValueError, match="empty"):
        plan_batch(model, [], "cpu", limit="1 GiB")


@pytest.mark.slow
def test_budgets_of_equal_samples_are_their_number():
    cost_model = fit_cost_model(
        perceptron(), read_samples(list(torch.randn(8, 784))), Step()
    )

    assert choose_budget(cost_model, 2**30, 5, 8) == BatchBudget(batch_size=5)


class Clips(torch.nn.Module):
    """Reads text and video, padded or end to end."""

    def __init__(self):
        super().__init__()
        self.text, self.video = torch.nn.Linear(64, 32), torch.nn.Linear(16, 32)
        self.last = torch.nn.Linear(32, 1)

    def forward(self, text, video):
        return self.last((self.text(text.values) + self.video(video.values)).tanh())


@pytest.mark.slow
@pytest.mark.parametrize("ragged", ["padded", "packed"])
def test_clips_of_several_modalities_fit_as_planned(tmp_path, ragged):
    lengths = torch.randint(5, 80, (60,), generator=torch.Generator().manual_seed(0))
    widths = {"text": 64, "video": 16}
    clips = [{k: torch.zeros(n, w) for k, w in widths.items()} for n in lengths]
    pack(clips, tmp_path / "clips.lk")
    cached = open_cache(tmp_path / "clips.lk", ragged=ragged)
    model = Clips()

    plan = plan_batch(model, cached, "cpu", limit="500 KiB", batch_size=32)

    bounds = plan.configurations[0].budget.loader_options()
    assert ("max_tokens" in bounds) == (ragged == "packed")
    loader = build_loader(cached, "cpu", shuffle=True, seed=0, num_workers=0, **bounds)
    peaks = [max(measure_step(model, batch, Step()).values()) for batch in loader]
    assert 250 * 1024 < max(peaks) <= 500 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LSTM", "conv3d"])
def test_what_kernels_take_inside_is_planned_for_on_the_cpu(name):
    make, rows = DENSE[name]
    model, data = make(), list(rows(64))
    small = max(measure_step(model, torch.stack(data[:20]), Step()).values())

    plan = plan_batch(model, data, "cpu", limit=small, batch_size=64)

    count = plan.micro_batch
    real = max(measure_step(model, torch.stack(data[:count]), Step()).values())
    more = max(measure_step(model, torch.stack(data[: count + 2]), Step()).values())
    assert real <= 1.02 * small < 1.04 * more
    assert 16 <= count <= 22


class Positives(torch.nn.Module):
    """How many numbers it squares depends on their values."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        hidden = self.layer(x)
        return hidden[hidden > 0].pow(2).sum()


@pytest.mark.slow
def test_a_plan_names_the_operator_that_leaves_the_chance_open():
    model, data = Positives(), [torch.randn(64) for _ in range(64)]
    sure = plan_batch(model, data, "cpu", limit="1 MiB", batch_size=32)

    tight = sure.estimate.peak - 1
    vague = plan_batch(model, data, "cpu", limit=tight, batch_size=32)

    [note] = [note for note in vague.notes if "chances are uncertain" in note]
    assert "depending on what aten::index.Tensor" in note


@pytest.mark.slow
def test_a_limit_that_the_estimate_cannot_tell_from_the_peak_is_said():
    # numbers that Python turns into tensors are much, of a step of a few kB
    model, data = torch.nn.Linear(8, 8), [torch.randn(8) for _ in range(64)]
    sure = plan_batch(model, data, "cpu", limit="1 MiB")

    vague = plan_batch(model, data, "cpu", limit=sure.estimate.peak + 1)

    assert vague.chances[1].high - vague.chances[1].low > 0.5
    assert any("chances are uncertain" in note for note in vague.notes)
    assert any("likely peak) it fits in any case" in note for note in vague.notes)
    assert not any("chances are uncertain" in note for note in sure.notes)


@pytest.mark.slow
def test_samples_of_unlike_shapes_are_to_be_packed(tmp_path):
    sequences = [{"x": torch.zeros(length, 8)} for length in (3, 5, 4)]

    with pytest.raises(StepError, match="cannot be joined") as caught:
        plan_batch(_Sequences(), sequences, "cpu", limit="1 MiB", batch_size=2)

    assert isinstance(caught.value.__cause__, RuntimeError)
    names = {"dataset": sequences, "path": tmp_path / "c.lk", "loaderkit": loaderkit}
    code, _, _ = caught.value.fix.partition(", whose")
    code = code.replace("device)", "'cpu', limit='1 MiB', batch_size=2)")
    names |= {"plan_batch": plan_batch, "model": _Sequences()}
    assert eval(code, names).batch_size == 2


class _Sequences(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(x if torch.is_tensor(x) else x.values)
