"""The estimate of a step against what the same step really allocates."""

import resource
import statistics

import pytest
import torch
from models import DENSE, GRAPHS, Attention, TwoLayers, graphs, perceptron
from torch import nn
from torch_geometric.data import Batch, HeteroData
from torch_geometric.nn import GCNConv, HeteroConv, SAGEConv

from loaderkit import estimate_step
from loaderkit.budget.step import allocator
from loaderkit.budget.step.assumed_scalars import Assumed
from loaderkit.budget.step.devices import DeviceSpec
from loaderkit.budget.step.estimate import estimate, summarise
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.peaks import PARTS
from loaderkit.budget.step.track import track_step
from loaderkit.budget.step.train_step import Step
from loaderkit.datasets.ragged import Padded

MIB = 2**20


def cases():
    for name, make in GRAPHS.items():
        yield name, make, graphs(16)
    for name, (make, rows) in DENSE.items():
        yield name, make, rows(32)


@pytest.mark.slow
def test_estimates_are_within_a_thousandth_and_never_off_by_two_percent():
    errors = {}
    for name, make, batch in cases():
        torch.manual_seed(0)
        model = make()
        estimated = estimate(model, batch, Step())
        truth = max(measure_step(model, batch, Step()).values())
        errors[name] = abs(estimated.peak / truth - 1)
        assert estimated.low <= truth <= estimated.high, name
        assert estimated.real_bytes < 16 * MIB, name

    assert len(errors) >= 20
    assert statistics.median(errors.values()) <= 0.001
    assert max(errors.values()) <= 0.02, errors


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize(
    ("optimizer", "variant"),
    [
        (optimizer, variant)
        for optimizer in ("adam", "adamw", "sgd", "rmsprop", "adagrad")
        for variant in ("loop", "foreach", "fused")
        if (optimizer, variant) != ("rmsprop", "fused")  # torch has none
    ],
)
def test_the_implementation_of_an_optimizer_counts(optimizer, variant):
    model, batch = perceptron(), torch.randn(8, 784)
    step = Step(optimizer=optimizer, variant=variant)

    estimated_peak = estimate(model, batch, step).peak

    assert estimated_peak == pytest.approx(
        max(measure_step(model, batch, step).values()), rel=1e-3
    )


@pytest.mark.slow
def test_bfloat16_autocast_is_estimated():
    model, batch = Attention(), torch.randn(32, 40, 7)
    step = Step(autocast=torch.bfloat16)

    estimated_peak = estimate(model, batch, step).peak

    assert estimated_peak == pytest.approx(
        max(measure_step(model, batch, step).values()), rel=0.02
    )


@pytest.mark.slow
def test_checkpointed_blocks_are_estimated():
    model, batch = Attention(layers=4), torch.randn(32, 40, 7)
    step = Step(checkpoint=True)

    estimated_peak = estimate(model, batch, step).peak

    assert estimated_peak < 0.6 * estimate(model, batch, Step()).peak
    assert estimated_peak == pytest.approx(
        max(measure_step(model, batch, step).values()), rel=0.01
    )


@pytest.mark.slow
def test_a_checkpoint_drops_what_recurrent_kernels_keep_for_the_backward_pass():
    class Last(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.LSTM(16, 16, batch_first=True)

        def forward(self, x):
            return self.inner(x)[0]

    model, batch = torch.nn.Sequential(Last(), Last()), torch.randn(24, 60, 16)
    step = Step(checkpoint=True)

    estimated = estimate(model, batch, step)

    truth = max(measure_step(model, batch, step).values())
    assert estimated.low <= truth <= estimated.high
    assert estimated.peak == pytest.approx(truth, rel=0.01)


def test_parts_add_up_and_the_cause_is_named():
    estimated = estimate_step(perceptron(), torch.randn(4, 784))

    assert sum(estimated.parts.values()) == estimated.peak
    assert set(estimated.parts) == set(PARTS)
    parameters = 4 * (784 * 512 + 512 + 512 * 10 + 10)
    assert estimated.parts["parameters"] == parameters
    assert estimated.parts["gradients"] == parameters
    assert estimated.parts["optimizer state"] >= 2 * parameters
    assert estimated.phase == "step"


@pytest.mark.slow
def test_a_large_batch_peaks_in_activations():
    estimated = estimate_step(Attention(), torch.randn(64, 40, 7))

    assert estimated.phase == "forward"
    assert estimated.parts["activations"] > estimated.peak / 2
    assert next(iter(estimated.modules)).startswith("encoder.layers")
    assert "keeps most: encoder.layers" in str(estimated)


def test_the_cost_does_not_depend_on_the_batch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    estimated = estimate_step(perceptron(), torch.randn(1, 784).expand(10**6, 784))

    assert estimated.peak > 10**9
    assert estimated.real_bytes < MIB
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown << 10 < estimated.peak / 4


def test_nothing_of_the_model_or_the_random_numbers_changes():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = torch.get_rng_state()

    estimate_step(model, torch.randn(8, 4))

    assert torch.equal(numbers[:5], torch.get_rng_state()[:5])
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_every_way_to_call_a_model():
    def two(x, y):
        return model(x + y)

    model = nn.Linear(4, 2)

    class Named(nn.Linear):
        def forward(self, first, second):
            return super().forward(first + second)

    named, x = Named(4, 2), torch.zeros(8, 4)
    data = graphs(2)
    criterion = nn.functional.cross_entropy
    peaks = [
        estimate_step(named, {"first": x, "second": x}).peak,
        estimate_step(named, (x, x)).peak,
        estimate_step(model, (x, torch.zeros(8).long()), loss=criterion).peak,
        estimate_step(model, x, loss=lambda out: out.sum()).peak,
        estimate_step(model, x, loss=lambda out, batch: out.sum() + batch.sum()).peak,
        estimate_step(GCNConv(32, 4), data).peak,
        estimate_step(TwoLayers(GCNConv), data).peak,
    ]
    assert all(peak > 0 for peak in peaks)
    assert two(x, x).shape == (8, 2)


def test_optimizers_of_every_form():
    model, x = nn.Linear(64, 64), torch.zeros(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    by_name = estimate_step(model, x, optimizer="sgd").peak
    by_class = estimate_step(model, x, optimizer=torch.optim.Adam).peak
    like = estimate_step(model, x, optimizer=optimizer).parts["optimizer state"]
    none = estimate_step(model, x, optimizer=None)

    assert by_name < by_class
    assert like == 4 * (64 * 64 + 64)
    assert none.parts["optimizer state"] == 0


class EverySecond(torch.optim.SGD):
    """Keeps something of every second parameter, which its shape does not tell."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"][::2]:
                self.state[parameter].setdefault("first", parameter.grad.clone())


def momentum_in_one_group(parameters):
    first, *others = parameters
    groups = [{"params": [first]}, {"params": others, "momentum": 0.9}]
    return torch.optim.SGD(groups, lr=0.1)


OPTIMIZERS = [
    value
    for name, value in sorted(vars(torch.optim).items())
    if isinstance(value, type)
    # A base class; one that needs a closure; of sparse gradients; of matrices alone.
    and name not in {"Optimizer", "LBFGS", "SparseAdam", "Muon"}
]


@pytest.mark.many_cases
@pytest.mark.parametrize(
    "optimizer",
    [*OPTIMIZERS, EverySecond, momentum_in_one_group],
    ids=lambda optimizer: optimizer.__name__,
)
def test_equal_parameters_have_the_state_that_the_optimizer_makes(optimizer):
    model, x = nn.Sequential(*[nn.Linear(9, 9) for _ in range(3)]), torch.zeros(4, 9)
    torchs = optimizer(model.parameters())
    model(x).sum().backward()
    torchs.step()
    tensors = [value for state in torchs.state.values() for value in state.values()]
    held = sum(
        value.untyped_storage().nbytes() for value in tensors if value is not None
    )

    estimated = estimate_step(model, x, optimizer=optimizer)

    assert estimated.parts["optimizer state"] == held


@pytest.mark.slow
def test_kernels_are_those_of_the_target():
    model, x = Attention(layers=1), torch.randn(32, 128, 7)

    cpu = estimate_step(model, x)
    cuda = estimate_step(model, x, target="cuda")
    mps = estimate_step(model, x, target="mps")

    assert cuda.peak < cpu.peak / 2  # a fused kernel keeps no length x length matrix
    assert mps.peak == pytest.approx(cpu.peak, rel=0.3)
    assert any("a fused kernel" in assumption for assumption in cuda.assumptions)
    assert cuda.reserved >= cuda.peak
    assert cpu.reserved is None
    assert "modelled, not measured" in str(cuda)
    # cuda's default optimizer copies all parameters at once
    wide = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    on = {
        kind: estimate_step(wide, torch.zeros(2, 64), target=kind).phases["step"]
        for kind in ("cpu", "cuda")
    }
    assert on["cuda"] > 1.1 * on["cpu"]


@pytest.mark.slow
def test_what_cannot_be_known_is_an_interval():
    make, rows = DENSE["mask"]
    model, batch, step = make(), rows(2000), Step(target=DeviceSpec("cuda"))

    estimated = estimate_step(model, batch, target="cuda")

    nothing, everything = (
        summarise(
            track_step(model, batch, step, assumed=Assumed(share=share)), step
        ).peak
        for share in (0.0, 1.0)
    )
    assert estimated.low <= nothing < everything <= estimated.high
    assert any(
        "elements as are chosen" in assumption for assumption in estimated.assumptions
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LSTM", "conv3d", "convolutional"])
def test_the_upper_end_covers_what_kernels_take_inside(name):
    make, rows = DENSE[name]
    model, batch = make(), rows(32)

    estimated = estimate_step(model, batch, target="mps")  # whose kernels are not here

    truth = max(measure_step(model, batch, Step()).values())
    assert estimated.method == "tracked"
    assert estimated.low < truth <= estimated.high


class Stubborn(nn.Module):
    """Refuses fake tensors."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        if type(x) is not torch.Tensor:  # as extensions in C++ do
            msg = "a plain tensor is needed"
            raise TypeError(msg)
        return self.inner(x)


@pytest.mark.slow
def test_what_cannot_be_tracked_is_measured_small_and_extended():
    model, batch = Stubborn(), torch.randn(4096, 8)

    estimated = estimate_step(model, batch)

    truth = max(measure_step(model, batch, Step()).values())
    assert estimated.method == "measured and extended"
    assert estimated.peak == pytest.approx(truth, rel=0.05)
    assert estimated.low <= truth <= estimated.high
    assert "while tracking" in estimated.assumptions[0]


@pytest.mark.slow
def test_a_step_measured_small_has_the_phases_of_a_tracked_one():
    batch = torch.randn(4096, 8)

    tracked = estimate_step(Stubborn().inner, batch)
    extended = estimate_step(Stubborn(), batch)

    assert list(extended.phases) == list(tracked.phases)


def test_without_any_way_a_formula_says_so():
    model = Stubborn()
    # Too large to be run for real, within what an estimate may take.
    model.register_buffer("large", torch.zeros(4 << 20))

    estimated = estimate_step(model, torch.randn(1, 8))

    assert estimated.method == "formula"
    assert estimated.low < estimated.peak < estimated.high


def test_wrong_arguments_are_refused():
    model, x = nn.Linear(4, 2), torch.zeros(3, 4)
    for wrong, message in (
        ({"optimizer": "adamm"}, "optimizer must be one of"),
        ({"optimizer": 7}, "optimizer must be a name"),
        ({"target": "tpu"}, "target must be"),
    ):
        with pytest.raises(ValueError, match=message):
            estimate_step(model, x, **wrong)
    with pytest.raises(ValueError, match=r"model\(batch\) once, before"):
        estimate_step(nn.LazyLinear(3), x)
    with pytest.raises(ValueError, match="no float tensor with a gradient"):
        estimate_step(nn.Flatten(), x)


def test_a_specification_is_a_target():
    assert estimate_step(nn.Linear(2, 2), torch.zeros(1, 2), target=DeviceSpec("xpu"))


def test_the_allocator_joins_what_is_freed():
    model = allocator.CachingAllocator()

    blocks = [model.malloc(MIB // 2) for _ in range(4)]
    for block in blocks:
        model.free(block)
    model.malloc(MIB)

    assert model.reserved == 2 * MIB  # one small segment held them all


def test_the_allocator_does_not_join_across_what_is_live():
    model = allocator.CachingAllocator()

    first, _, third = (model.malloc(6 * MIB) for _ in range(3))
    model.free(first)
    model.free(third)
    model.malloc(12 * MIB)

    assert model.reserved == (20 + 12) * MIB


class Typed(nn.Module):
    """Takes the fields of a typed graph, as PyG's examples do."""

    def __init__(self):
        super().__init__()
        kinds = [("a", "to", "b"), ("b", "to", "a")]
        self.inner = HeteroConv({kind: SAGEConv((8, 8), 16) for kind in kinds})

    def forward(self, x_dict, edge_index_dict):
        return self.inner(x_dict, edge_index_dict)


@pytest.mark.parametrize("name", ["batch", "data", "graph", "ptr"])
def test_a_model_of_graphs_may_call_them_as_it_likes(name):
    class OfGraphs(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 4)

    source = f"def forward(self, {name}):\n    return self.linear({name}.x)"
    namespace = {}
    exec(source, namespace)
    OfGraphs.forward = namespace["forward"]

    estimated = estimate_step(OfGraphs(), graphs(4))

    assert estimated.method == "tracked"


class OfDicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, batch):
        return self.linear(batch["x"])


def test_a_model_may_take_a_dict_as_one_argument():
    estimate_of_dict = estimate_step(OfDicts(), {"x": torch.zeros(16, 8), "id": 1})

    assert estimate_of_dict.method == "tracked"


@pytest.mark.parametrize("features", [8, 2_000])
def test_what_forward_does_not_take_is_told_with_the_way_on(features):
    """Also of a model too large for small real steps, which has a formula instead."""
    model = nn.Linear(features, features)
    x = torch.zeros(4, features)

    with pytest.raises(ValueError, match="pass loss=f, called as f"):
        estimate_step(model, (x, torch.zeros(4)))
    with pytest.raises(
        ValueError, match=r"(?s)3 parts .* too many positional arguments"
    ):
        estimate_step(model, (x, x, x))
    with pytest.raises(ValueError, match="a batch of a, b does not fit the model"):
        estimate_step(model, {"a": x, "b": x})
    padded = Padded(x, torch.ones(4), torch.ones(4, features))
    with pytest.raises(ValueError, match=r"a Padded holds values") as caught:
        estimate_step(model, padded)
    assert caught.value.fix.startswith("batch.values, or ")


def test_typed_graphs_are_estimated():
    def typed(count):
        data = HeteroData()
        data["a"].x, data["b"].x = torch.randn(count, 8), torch.randn(2 * count, 8)
        data["a", "to", "b"].edge_index = torch.randint(0, count, (2, 5 * count))
        data["b", "to", "a"].edge_index = torch.randint(0, count, (2, 3 * count))
        return data

    batch = Batch.from_data_list([typed(50 + i) for i in range(8)])

    estimated_peak = estimate_step(Typed(), batch).peak

    truth = max(measure_step(Typed(), batch, Step()).values())
    assert estimated_peak == pytest.approx(truth, rel=1e-3)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        hidden = self.inner(x)
        return hidden / (1 + hidden.abs().max().item())


@pytest.mark.slow
def test_a_number_is_given_only_without_assumptions():
    x = torch.randn(64, 64)

    exact = estimate_step(nn.Linear(64, 64), torch.randn(6400, 64))
    small = estimate_step(nn.Linear(64, 64), x)
    on_a_device = estimate_step(nn.Linear(64, 64), x, target="mps")
    here = estimate_step(Scaled(), x)
    there = estimate_step(Scaled(), x, target="mps")

    assert exact.exact
    assert exact.high - exact.peak < 0.001 * exact.peak + 8192
    assert not small.assumptions
    assert not small.exact  # a few kB that are not seen are a share of it
    assert " to " in str(small).splitlines()[0]
    assert not on_a_device.exact
    assert "not in it: mps's own context" in str(on_a_device)
    truth = max(measure_step(Scaled(), x, Step()).values())
    for estimated in (here, there):
        assert any(
            "a scalar's value" in assumption for assumption in estimated.assumptions
        )
        assert estimated.low < truth < estimated.high


TOKENS = torch.zeros(100_000, 4, dtype=torch.long)
PARTS_OF_TABLES = {
    "rows": TOKENS[:32],
    "rows of one column": TOKENS[:32, :1],
    "every other row": TOKENS[:64:2],
    "booleans": torch.zeros(100_000, dtype=torch.bool)[:32, None],
    "floats": torch.zeros(100_000, 4)[:32],
}


class Looked(nn.Module):
    """Looks numbers up in a table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 8)

    def forward(self, numbers):
        return self.table(numbers.long())


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PARTS_OF_TABLES)
def test_of_a_table_only_the_part_that_is_the_batch_counts(name, target):
    part = PARTS_OF_TABLES[name]

    of_part = estimate_step(Looked(), part, target=target)

    assert of_part.peak == estimate_step(Looked(), part.clone(), target=target).peak
    if target == "cpu":
        truth = max(measure_step(Looked(), part, Step()).values())
        assert of_part.low <= truth <= of_part.high


def test_a_part_of_a_table_that_is_in_a_batch_twice_counts_once():
    class Both(Looked):
        def forward(self, first, second):
            return self.table(first) + self.table(second)

    part = TOKENS[:400]

    estimated = estimate_step(Both(), {"first": part, "second": part})

    truth = max(measure_step(Both(), {"first": part, "second": part}, Step()).values())
    assert estimated.peak == pytest.approx(truth, rel=0.001)
