"""Estimates for a CUDA GPU, held against what steps took on one.

``cuda_steps.json`` has the bytes that an H100's allocator counted, by the name of the
step; ``python -m benchmarks.cuda estimates`` makes the like of it on another GPU.
"""

import json
from pathlib import Path

import pytest
import torch
from drawn_for_gpu import named_steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it

from loaderkit.budget.step.devices import DeviceSpec
from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.reductions import Reduction, staging_bytes
from loaderkit.budget.step.train_step import Step

MIB = 2**20
CUDA = DeviceSpec("cuda")
FILE = Path(__file__).parents[1] / "corpora" / "cuda_steps.json"
TRUE_BYTES = json.loads(FILE.read_text())["steps"]
QUICK = [
    "loss: mse x 64",
    "loss: huber x 64",
    "loss: soft margin x 1",
    "loss: cross entropy x 64",
    "operator: max x 64",
    "operator: topk x 64",
    "operator: softmax x 64",
    "operator: index x 64",
    "operator: outer x 64",
    "operator: dropout x 64",
    "model: gru x 64",
    "model: lstm x 1",
    "model: GCN x 64",
    "model: SAGE x 64",
    "model: Adamax x 64",
    *(name for name in TRUE_BYTES if name.startswith("attention, ")),
    "between, float32: softmax",
]


@pytest.fixture(scope="module")
def steps():
    return named_steps(range(6))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_what_a_step_took_on_a_gpu_lies_in_its_interval(name, steps):
    model, batch, step = steps[name]()

    estimated = estimate(model, batch, step.replace(target=CUDA))

    assert estimated.low <= TRUE_BYTES[name] <= estimated.high


@pytest.mark.slow
def test_the_cpus_kernels_would_not_do(steps):
    """The twin: without what is known of CUDA, half of these are outside."""
    outside = 0
    for name in ("loss: mse x 64", "operator: max x 64", "model: lstm x 1"):
        model, batch, step = steps[name]()
        estimated = estimate(model, batch, step.replace(target=DeviceSpec("xpu")))
        outside += not estimated.low <= TRUE_BYTES[name] <= estimated.high
    assert outside >= 2


def test_a_few_outputs_are_summed_in_a_buffer():
    """Bytes are those that the allocator of an H100 recorded."""
    recorded = {
        ((4096, 256), (0,)): 8 * MIB,
        ((8192, 4096), (0,)): 132 * MIB,
        ((64, 256), (0,)): 0,
        ((4096, 256), (1,)): 0,
    }
    for (shape, axes), size in recorded.items():
        stride = (shape[1], 1)
        assert staging_bytes(Reduction(shape, stride, axes, 4)).likely == size


@pytest.mark.slow
def test_the_gradient_of_a_cells_bias_is_summed_in_a_buffer():
    """A GRU's has two, 192 numbers of 30,000 rows each, one after the other."""
    model, batch, step = named_steps(range(0))["cells: gru"]()
    buffer = staging_bytes(Reduction((30_000, 192), (192, 1), (0,), 4))

    estimated = estimate(model, batch, step.replace(target=CUDA))

    kept = 3 * 30_000 * (2 * 192 + 5 * 64 + 64) * 4
    gradients = 30_000 * (2 * 192 + 2 * 64) * 4
    assert estimated.phase == "backward"
    assert estimated.peak > kept + gradients + buffer.likely


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(layer(x), 0.1, self.training)
        return x


@pytest.mark.slow
def test_dropout_keeps_a_byte_for_each_number():
    batch = torch.randn(16_384, 64)

    on_cpu = estimate(Dropped(), batch, Step()).peak
    on_cuda = estimate(Dropped(), batch, Step(target=CUDA)).peak

    # The CPU keeps a mask of floats, 4 MiB a layer.
    assert 8 * 3 * MIB * 0.8 < on_cpu - on_cuda < 8 * 3 * MIB * 1.3


class Attending(nn.Module):
    """Attention whose mask is trained, such as the bias of a window's positions."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 96)
        self.bias = nn.Parameter(torch.zeros(1, 4, 14, 14))

    def forward(self, x):
        parts = self.inner(x).view(-1, 14, 3, 4, 8).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias)


def test_attention_adds_its_gradients_up_in_blocks():
    batch = torch.randn(128, 14, 8)

    estimated = estimate(Attending(), batch, Step(target=CUDA))

    assert estimated.phase == "backward"
    assert estimated.peak > 8 * MIB  # 512 blocks of 16 KiB


@pytest.mark.parametrize(
    ("kind", "times"), [("LSTM", 5 * 2 + 1), ("GRU", 6 * 2 + 1), ("RNN", 1 * 2 + 1)]
)
def test_recurrent_layers_keep_a_reserve(kind, times):
    layer = getattr(nn, kind)(16, 128, 2)
    batch = torch.randn(64, 128, 16)
    output_bytes = 64 * 128 * 128 * 4

    estimated = estimate(layer, batch, Step(target=CUDA, optimizer=None))

    kept = max(estimated.modules.values())
    assert kept >= times * output_bytes
    assert estimated.low < estimated.peak < estimated.high


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_cells_keep_what_their_kernel_does(cell):
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = cell(32, 64)

        def forward(self, x):
            state = self.inner(x)
            state = self.inner(x, state)
            return state[0] if isinstance(state, tuple) else state

    batch = torch.randn(4096, 32)

    on_cuda = estimate(Cells(), batch, Step(target=CUDA)).peak

    assert on_cuda > 2 * 12 * 4096 * 64 * 4


class WithItsOwnAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))

    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16):
            return self.layers(x).float()


@pytest.mark.slow
def test_a_models_own_autocast_is_told_where_it_is_off():
    model, batch = WithItsOwnAutocast(), torch.randn(8192, 256)
    narrow = estimate(model.layers, batch, Step(target=CUDA, autocast=torch.bfloat16))

    estimated = estimate(model, batch, Step(target=CUDA))

    assert estimated.low < narrow.peak < estimated.peak
    assert "asks for CUDA's autocast itself" in " ".join(estimated.assumptions)
    plain = estimate(model.layers, batch, Step(target=CUDA))
    assert "autocast" not in " ".join(plain.assumptions)
