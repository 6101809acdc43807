"""Steps of the size that people train: seconds on a GPU, gigabytes of memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch_geometric.nn as g
from torch import nn
from torch_geometric.data import Batch

from benchmarks.workloads import make_graphs
from loaderkit.budget.step.train_step import Step

if TYPE_CHECKING:
    from collections.abc import Callable

BFLOAT16 = torch.bfloat16


class LargeStep(NamedTuple):
    """What is trained."""

    model: Any
    batch: Any
    step: Step


def _loss_of_output(output: Any, _batch: Any) -> Any:
    return output.loss


def _vision(name: str, samples: int, *, autocast: Any = None, **options: Any) -> Any:
    torchvision: Any = importlib.import_module("torchvision")
    model = getattr(torchvision.models, name)(**options)
    pair = torch.randn(samples, 3, 224, 224), torch.randint(1000, (samples,))
    return LargeStep(model, pair, Step(nn.functional.cross_entropy, autocast=autocast))


def _text(
    config_name: str,
    model_name: str,
    shape: tuple[int, int],
    *,
    step: Step,
    **options: Any,
) -> LargeStep:
    transformers: Any = importlib.import_module("transformers")
    config = getattr(transformers, config_name)(**options)
    model = getattr(transformers, model_name)(config)
    words = torch.randint(1000, shape)
    batch = {"input_ids": words, "labels": words}
    return LargeStep(model.train(), batch, step)


TEXT = Step(_loss_of_output, "adamw")
TEXT_BFLOAT16 = TEXT.replace(autocast=BFLOAT16)


def _pockets(make_model: Callable[[], Any], count: int) -> LargeStep:
    batch = Batch.from_data_list(make_graphs("w2", count))
    return LargeStep(make_model(), batch, Step())


class OfPockets(nn.Module):
    """Layers of PyG over the nodes, and a sum over each graph."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, batch: Any) -> Any:
        nodes = self.layers(batch.x, batch.edge_index)
        return g.global_add_pool(nodes, batch.batch, size=batch.num_graphs)


def _recurrent(kind: str, length: int, **options: Any) -> LargeStep:
    model = getattr(nn, kind)(256, 512, num_layers=3, batch_first=True, **options)
    return LargeStep(model, torch.randn(64, length, 256), Step())


def _encoder(*, autocast: Any = None) -> LargeStep:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.TransformerEncoder(layer, 6)
    return LargeStep(model, torch.randn(32, 512, 512), Step(autocast=autocast))


def _volumes() -> LargeStep:
    model = nn.Sequential(
        nn.Conv3d(1, 32, 3, padding=1),
        nn.BatchNorm3d(32),
        nn.ReLU(),
        nn.Conv3d(32, 64, 3, 2, 1),
        nn.BatchNorm3d(64),
        nn.ReLU(),
        nn.ConvTranspose3d(64, 32, 2, 2),
        nn.ReLU(),
        nn.Conv3d(32, 1, 1),
    )
    return LargeStep(model, torch.randn(4, 1, 64, 64, 64), Step())


def _perceptron(optimizer: str) -> LargeStep:
    layers = [nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(12)]
    model = nn.Sequential(*layers)
    return LargeStep(model, torch.randn(8192, 4096), Step(optimizer=optimizer))


GPT2 = {"n_layer": 6, "n_embd": 768, "n_head": 12}
LLAMA = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
}

LARGE_STEPS: dict[str, Callable[[], LargeStep]] = {
    "resnet50, 32 images": lambda: _vision("resnet50", 32),
    "resnet50, bfloat16": lambda: _vision("resnet50", 32, autocast=BFLOAT16),
    "vgg16, 8 images": lambda: _vision("vgg16", 8),
    "vit_b_16, 32 images": lambda: _vision("vit_b_16", 32),
    "vit_b_16, bfloat16": lambda: _vision("vit_b_16", 32, autocast=BFLOAT16),
    "convnext_tiny, 16 images": lambda: _vision("convnext_tiny", 16),
    "swin_t, 16 images": lambda: _vision("swin_t", 16),
    "efficientnet_b0, 32 images": lambda: _vision("efficientnet_b0", 32),
    "GPT2, 8 x 512": lambda: _text(
        "GPT2Config", "GPT2LMHeadModel", (8, 512), step=TEXT, **GPT2
    ),
    "GPT2, bfloat16": lambda: _text(
        "GPT2Config", "GPT2LMHeadModel", (8, 512), step=TEXT_BFLOAT16, **GPT2
    ),
    "BERT, 16 x 256": lambda: _text(
        "BertConfig", "BertForMaskedLM", (16, 256), step=TEXT, num_hidden_layers=6
    ),
    "Llama, bfloat16": lambda: _text(
        "LlamaConfig", "LlamaForCausalLM", (4, 1024), step=TEXT_BFLOAT16, **LLAMA
    ),
    "T5, 16 x 128": lambda: _text(
        "T5Config",
        "T5ForConditionalGeneration",
        (16, 128),
        step=TEXT,
        decoder_start_token_id=0,
    ),
    "GCN of pockets": lambda: _pockets(lambda: OfPockets(g.GCN(64, 128, 4)), 128),
    "GAT of pockets": lambda: _pockets(
        lambda: OfPockets(g.GAT(64, 128, 4, heads=4)), 64
    ),
    "GIN of pockets": lambda: _pockets(lambda: OfPockets(g.GIN(64, 256, 5)), 128),
    "GraphSAGE of pockets": lambda: _pockets(
        lambda: OfPockets(g.GraphSAGE(64, 256, 4)), 128
    ),
    "LSTM, 64 x 200": lambda: _recurrent("LSTM", 200),
    "GRU, both ways": lambda: _recurrent("GRU", 50, bidirectional=True),
    "RNN, dropout": lambda: _recurrent("RNN", 50, dropout=0.1),
    "encoder, 32 x 512": _encoder,
    "encoder, bfloat16": lambda: _encoder(autocast=BFLOAT16),
    "volumes": _volumes,
    "perceptron, Adam": lambda: _perceptron("adam"),
    "perceptron, SGD": lambda: _perceptron("sgd"),
}
"""By name; those of libraries that are missing fail when they are made."""
