"""Training steps drawn by a seed: layers, losses, optimizers, types and sizes.

Unlike the entries of ``generated.py``, which are chosen one by one, these are what a
grammar makes: four families (rows, images, words, graphs), each a chain of layers with
options at random, under a loss and an optimizer with options at random.
"""

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as g
from generated import LOSSES, OPERATORS
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it
from torch_geometric.data import Batch, Data, HeteroData

from loaderkit.budget.step.train_step import Step

ACTIVATIONS = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.Tanh,
    nn.Sigmoid,
    nn.LeakyReLU,
    nn.PReLU,
    nn.Softplus,
    nn.Hardswish,
    nn.Mish,
    nn.SELU,
    nn.RReLU,
    nn.Softsign,
    nn.LogSigmoid,
)
OPTIMIZERS = {
    "sgd": {},
    "sgd, momentum": {"momentum": 0.9, "nesterov": True},
    "adam": {},
    "adam, amsgrad": {"amsgrad": True},
    "adamw": {"weight_decay": 0.1},
    "adamw, foreach": {"foreach": True},
    "adam, fused": {"fused": True},
    "rmsprop": {},
    "rmsprop, centred": {"centered": True, "momentum": 0.5},
    "adagrad": {},
    "nadam": {},
    "radam": {},
    "adamax": {},
    "sgd, maximize": {"maximize": True, "foreach": True},
}
_OPTIMIZER_CLASSES = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
}


@dataclass(frozen=True)
class Trained:
    """What a family draws."""

    description: str
    model: Any
    batch: Any
    loss: Any = None
    """Of the output and the target; None for the mean of the output."""


@dataclass(frozen=True)
class DrawnStep:
    """A step, and in words what was drawn."""

    description: str
    model: Any
    batch: Any
    step: Step
    threads: int
    """With which the step is run: some kernels have buffers for each."""

    def __str__(self) -> str:
        return self.description


class Residual(nn.Module):
    """Adds what a layer gives to what it was given."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Recurrence(nn.Module):
    """A recurrent layer, without its state."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class SelfAttention(nn.Module):
    """Attention of a sequence to itself, with or without weights and a causal mask."""

    def __init__(self, width, heads, *, weights, causal, dropout):
        super().__init__()
        self.inner = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.weights, self.causal = weights, causal

    def forward(self, x):
        mask = None
        if self.causal:
            length = x.size(1)
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.inner(x, x, x, attn_mask=mask, need_weights=self.weights)[0]


class Decoder(nn.Module):
    """Decoder layers that look at their own input as memory."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        layer = nn.TransformerDecoderLayer(
            width, heads, 3 * width, dropout, batch_first=True
        )
        self.inner = nn.TransformerDecoder(layer, 1)

    def forward(self, x):
        return self.inner(x, x.flip(1))


class OverGraphs(nn.Module):
    """Convolutions with norms and activations between, and a readout."""

    def __init__(self, layers, readout, last):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.readout, self.last = readout, last

    def forward(self, data):
        hidden = data.x
        for layer in self.layers:
            hidden = layer(hidden, data)
        return self.last(self.readout(hidden, data))


class Convolve(nn.Module):
    """A convolution of PyG, given what it asks for."""

    def __init__(self, inner, *, edges=None):
        super().__init__()
        self.inner, self.edges = inner, edges

    def forward(self, hidden, data):
        if self.edges == "weights":
            return self.inner(hidden, data.edge_index, data.edge_attr[:, 0].abs())
        if self.edges == "features":
            return self.inner(hidden, data.edge_index, data.edge_attr)
        return self.inner(hidden, data.edge_index)


class OfNodes(nn.Module):
    """A layer of nodes; of each graph's nodes if it asks for ``batch``."""

    def __init__(self, inner, *, batched=False):
        super().__init__()
        self.inner, self.batched = inner, batched

    def forward(self, hidden, data):
        return self.inner(hidden, data.batch) if self.batched else self.inner(hidden)


class VirtualNode(nn.Module):
    """A node of each graph that hears all others, and speaks to them."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, hidden, data):
        heard = self.inner(g.global_add_pool(hidden, data.batch, data.num_graphs))
        return hidden + heard[data.batch]


class Typed(nn.Module):
    """Convolutions of a graph with two types of nodes."""

    def __init__(self, kind, width, aggr):
        super().__init__()
        convolutions = {relation: kind((-1, -1), width) for relation in RELATIONS}
        self.inner = g.HeteroConv(convolutions, aggr)
        self.last = nn.Linear(width, 1)

    def forward(self, data):
        hidden = self.inner(data.x_dict, data.edge_index_dict)
        pooled = [
            g.global_mean_pool(hidden[node_type].relu(), data[node_type].batch)
            for node_type in ("a", "b")
        ]
        return self.last(sum(pooled))


def draw_step(seed):
    """Draw a step; the same seed always gives the same."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    draw_trained = rng.choice([rows, rows, images, words, graphs, graphs, typed_graphs])
    trained = draw_trained(rng)
    description = f"{seed}: {trained.description}"

    optimizer_name = rng.choice(list(OPTIMIZERS))
    optimizer_class = _OPTIMIZER_CLASSES[optimizer_name.partition(",")[0]]
    options = OPTIMIZERS[optimizer_name]
    autocast = torch.bfloat16 if rng.random() < 0.15 else None
    checkpoint = rng.random() < 0.1

    if rng.random() < 0.2:
        parameters = list(trained.model.parameters())
        frozen = parameters[: rng.randint(1, 2)]
        # A step without any gradient is none.
        if len(frozen) < len(parameters):
            description += ", first parameters frozen"
            for parameter in frozen:
                parameter.requires_grad = False

    step = Step(
        trained.loss,
        lambda parameters: optimizer_class(parameters, lr=1e-3, **options),
        autocast=autocast,
        checkpoint=checkpoint,
    )
    description += f"; {optimizer_name}"
    description += ", autocast" if autocast else ""
    description += ", checkpoint" if checkpoint else ""
    return DrawnStep(
        description, trained.model, trained.batch, step, rng.choice([1, 2])
    )


def rows(rng):
    """Rows of numbers through linear layers, norms, and an operator at the end."""
    count = rng.randint(3, 700)
    in_width = rng.choice([5, 16, 33, 64, 128])
    layers = []
    names = []
    width = in_width
    for _ in range(rng.randint(1, 5)):
        kind = rng.choice(["linear", "linear", "activation", "norm", "dropout", "skip"])
        if kind == "linear":
            out_width = rng.choice([7, 32, 100, 256, 300])
            layers.append(nn.Linear(width, out_width, bias=rng.random() < 0.8))
            width = out_width
        elif kind == "activation":
            layers.append(rng.choice(ACTIVATIONS)())
        elif kind == "norm":
            norms = [nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm, _group_norm]
            layers.append(rng.choice(norms)(width))
        elif kind == "dropout":
            dropout_class = rng.choice([nn.Dropout, nn.AlphaDropout])
            layers.append(dropout_class(rng.uniform(0.1, 0.5)))
        else:
            inner = nn.Sequential(nn.Linear(width, width), nn.ReLU())
            layers.append(Residual(inner))
        names.append(_class_name(layers[-1]))
    # The losses and operators of ``generated.py`` are for 256 columns.
    layers.append(nn.Linear(width, 256))
    model = nn.Sequential(*layers)
    x = torch.randn(count, in_width)

    dtype = rng.choice([None] * 6 + [torch.double, torch.bfloat16])
    if rng.random() < 0.5 or dtype is not None:
        name = rng.choice(list(LOSSES))
        loss = LOSSES[name]
        target = torch.randn(count, 256)
        if dtype is not None:
            model = model.to(dtype)
            x, target = x.to(dtype), target.to(dtype)
            names.append(str(dtype))
        batch = (x, target)
        names.append(f"loss {name}")
    else:
        name = rng.choice(list(OPERATORS))
        loss = None
        # Some operators fold rows into groups of four.
        count = max(24, count // 4 * 4)
        batch = torch.randn(count, in_width)
        model.append(Apply(OPERATORS[name]))
        names.append(f"operator {name}")
    return Trained(f"{count} rows, {', '.join(names)}", model, batch, loss)


def images(rng):
    """Images through convolutions of all kinds."""
    count = rng.randint(2, 24)
    size = rng.choice([9, 16, 24, 33])
    channels = rng.choice([1, 3])
    batch = torch.randn(count, channels, size, size)

    layers = []
    names = []
    for _ in range(rng.randint(1, 4)):
        layer, channels = _image_layer(rng, channels)
        layers.append(layer)
        names.append(_class_name(layer))
        with torch.no_grad():
            output = nn.Sequential(*layers)(batch[:2])
        # Smaller ones would not fit the next kernel, larger ones take minutes.
        if min(output.shape[2:]) < 6 or output[0].numel() > 60_000:
            break
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3)]
    model = nn.Sequential(*layers)

    # torch's own backward pass ends the process where GroupNorm gets images in
    # channels-last order that need no gradient
    if rng.random() < 0.3 and "GroupNorm" not in names:
        batch = batch.to(memory_format=torch.channels_last)
        names.append("channels last")
    return Trained(f"{count} images of {size}, {', '.join(names)}", model, batch)


def _image_layer(rng, channels):
    """Draw a layer for so many channels; give it with the channels it gives."""
    kind = rng.choice(["conv", "conv", "transposed", "pool", "norm", "up", "act"])
    if kind == "conv":
        layer = _draw_convolution(rng, channels)
        return layer, layer.out_channels
    if kind == "transposed":
        return nn.ConvTranspose2d(channels, 6, rng.choice([2, 3, 4]), 2, 1), 6
    if kind == "pool":
        pool_class = rng.choice([nn.MaxPool2d, nn.AvgPool2d])
        return pool_class(2, ceil_mode=True), channels
    if kind == "norm":
        norms = [nn.BatchNorm2d, nn.InstanceNorm2d, _group_norm]
        return rng.choice(norms)(channels), channels
    if kind == "up":
        factor = rng.choice([2, 1.5])
        return nn.Upsample(scale_factor=factor, mode="bilinear"), channels
    return rng.choice(ACTIVATIONS)(), channels


def _draw_convolution(rng, channels):
    groups = rng.choice([1, 1, channels])
    # Depthwise, each channel has two filters of its own.
    out_channels = 2 * channels if groups > 1 else rng.choice([4, 8, 16])
    kernel, stride = rng.choice([1, 3, 5]), rng.choice([1, 1, 2])
    padding, dilation = rng.choice([0, 1, 2]), rng.choice([1, 1, 2])
    return nn.Conv2d(
        channels,
        out_channels,
        kernel,
        stride,
        padding,
        dilation,
        groups,
        bias=rng.random() < 0.7,
    )


def words(rng):
    """Words through embeddings, attention and recurrence."""
    count = rng.randint(1, 20)
    length = rng.randint(5, 90)
    vocabulary = rng.choice([50, 900, 5000])
    width = rng.choice([16, 32, 48, 64])
    embedding = nn.Embedding(vocabulary, width, padding_idx=rng.choice([None, 0]))
    layers = [embedding]
    names = [f"{vocabulary} words"]
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(
            ["lstm", "gru", "rnn", "encoder", "attention", "decoder", "conv"]
        )
        layers.append(_word_layer(rng, kind, width))
        names.append(kind)

    head = nn.Linear(width, vocabulary, bias=False)
    if rng.random() < 0.4:
        head.weight = embedding.weight
        names.append("tied")
    layers.append(head)

    tokens = torch.randint(0, vocabulary, (count, length))
    batch = tokens
    loss = None
    if rng.random() < 0.7:
        target = tokens.clone()
        target[torch.rand(count, length) < 0.3] = -100
        # A loss without any target is not a number.
        target[0, 0] = 1
        batch = (tokens, target)
        loss = _cross_entropy_of_words
        names.append("cross entropy")
    description = f"{count} x {length} tokens, {', '.join(names)}"
    return Trained(description, nn.Sequential(*layers), batch, loss)


def _word_layer(rng, kind, width):
    """Draw a layer that gives as many columns as it gets."""
    dropout = rng.choice([0.0, 0.0, 0.1])
    if kind in {"lstm", "gru", "rnn"}:
        recurrent_class = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind]
        bidirectional = rng.random() < 0.3
        hidden = width // 2 if bidirectional else width
        return Recurrence(
            recurrent_class(
                width,
                hidden,
                rng.choice([1, 2]),
                batch_first=True,
                bidirectional=bidirectional,
            )
        )
    if kind == "encoder":
        return nn.TransformerEncoderLayer(
            width,
            4,
            2 * width,
            dropout,
            rng.choice([F.relu, F.gelu]),
            batch_first=True,
            norm_first=rng.random() < 0.5,
        )
    if kind == "attention":
        return SelfAttention(
            width,
            rng.choice([1, 4]),
            weights=rng.random() < 0.5,
            causal=rng.random() < 0.5,
            dropout=dropout,
        )
    if kind == "decoder":
        return Decoder(width, 4, dropout)
    return nn.Sequential(
        Apply(_swap_length_and_width),
        nn.Conv1d(width, width, 3, padding=1),
        Apply(_swap_length_and_width),
    )


def _swap_length_and_width(x):
    return x.transpose(1, 2)


def _cross_entropy_of_words(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def some_graphs(rng):
    """Draw a batch of graphs of different sizes, some without edges."""
    drawn = []
    for _ in range(rng.randint(2, 24)):
        nodes = max(2, int(rng.lognormvariate(3, 0.7)))
        edges = int(nodes * rng.choice([0, 1, 3, 6, 6]))
        drawn.append(
            Data(
                x=torch.randn(nodes, 16),
                edge_index=torch.randint(0, nodes, (2, edges)),
                edge_attr=torch.randn(edges, 4),
                y=torch.randn(1),
            )
        )
    # A batch without any edge is refused by some convolutions.
    first = drawn[0]
    first.edge_index = torch.randint(0, first.num_nodes, (2, 40))
    first.edge_attr = torch.randn(40, 4)
    return Batch.from_data_list(drawn)


def _mlp(width, wider):
    return nn.Sequential(nn.Linear(width, wider), nn.ReLU(), nn.Linear(wider, wider))


CONVOLUTIONS = {
    "GCN": lambda i, o, rng: Convolve(g.GCNConv(i, o, improved=rng.random() < 0.5)),
    "GCN, weights": lambda i, o, rng: Convolve(g.GCNConv(i, o), edges="weights"),
    "GAT": lambda i, o, rng: Convolve(g.GATConv(i, o // 4, heads=4, dropout=0.1)),
    "GAT, edges": lambda i, o, rng: Convolve(
        g.GATConv(i, o, heads=2, concat=False, edge_dim=4), edges="features"
    ),
    "GATv2": lambda i, o, rng: Convolve(
        g.GATv2Conv(i, o // 2, heads=2, edge_dim=4, residual=rng.random() < 0.5),
        edges="features",
    ),
    "SAGE": lambda i, o, rng: Convolve(
        g.SAGEConv(
            i, o, aggr=rng.choice(["mean", "max", "sum"]), project=rng.random() < 0.5
        )
    ),
    "GIN": lambda i, o, rng: Convolve(g.GINConv(_mlp(i, o), train_eps=True)),
    "GINE": lambda i, o, rng: Convolve(
        g.GINEConv(_mlp(i, o), edge_dim=4), edges="features"
    ),
    "Graph": lambda i, o, rng: Convolve(
        g.GraphConv(i, o, aggr=rng.choice(["add", "max"])), edges="weights"
    ),
    "Transformer": lambda i, o, rng: Convolve(
        g.TransformerConv(i, o // 4, heads=4, beta=rng.random() < 0.5, edge_dim=4),
        edges="features",
    ),
    "PNA": lambda i, o, rng: Convolve(
        g.PNAConv(
            i,
            o,
            rng.sample(["mean", "max", "min", "std", "sum", "var"], 2),
            rng.sample(["identity", "amplification", "attenuation", "linear"], 2),
            torch.ones(90),
            towers=rng.choice([1, 4]),
        )
    ),
    "TAG": lambda i, o, rng: Convolve(g.TAGConv(i, o, K=rng.choice([1, 3]))),
    "Cheb": lambda i, o, rng: Convolve(g.ChebConv(i, o, rng.choice([2, 3]))),
    "ARMA": lambda i, o, rng: Convolve(g.ARMAConv(i, o, num_stacks=rng.choice([1, 2]))),
    "GEN": lambda i, o, rng: Convolve(
        g.GENConv(i, o, aggr=rng.choice(["softmax", "powermean"]))
    ),
    "ResGated": lambda i, o, rng: Convolve(g.ResGatedGraphConv(i, o)),
    "Leading": lambda i, o, rng: Convolve(g.LEConv(i, o)),
    "ClusterGCN": lambda i, o, rng: Convolve(g.ClusterGCNConv(i, o)),
    "NN": lambda i, o, rng: Convolve(
        g.NNConv(i, o, nn.Linear(4, i * o)), edges="features"
    ),
    "CG": lambda i, o, rng: Convolve(g.CGConv(i, 4), edges="features"),
    "MF": lambda i, o, rng: Convolve(g.MFConv(i, o, max_degree=5)),
    "EG": lambda i, o, rng: Convolve(g.EGConv(i, o, num_heads=4, num_bases=2)),
    "Film": lambda i, o, rng: Convolve(g.FiLMConv(i, o)),
    "General": lambda i, o, rng: Convolve(
        g.GeneralConv(i, o, attention=rng.random() < 0.5, heads=2)
    ),
    "SuperGAT": lambda i, o, rng: Convolve(g.SuperGATConv(i, o // 2, heads=2)),
    "Edge": lambda i, o, rng: Convolve(g.EdgeConv(_mlp(2 * i, o))),
    "GatedGraph": lambda i, o, rng: Convolve(g.GatedGraphConv(o, 2)),
    "SSG": lambda i, o, rng: Convolve(g.SSGConv(i, o, alpha=0.1, K=2)),
    "Feast": lambda i, o, rng: Convolve(g.FeaStConv(i, o, heads=2)),
    "Hyper": lambda i, o, rng: Convolve(g.SGConv(i, o, K=2)),
    "Anti": lambda i, o, rng: Convolve(g.AntiSymmetricConv(i, num_iters=2)),
    "MixHop": lambda i, o, rng: Convolve(g.MixHopConv(i, o, powers=[0, 1, 2])),
    "FA": lambda i, o, rng: Convolve(_Twice(g.FAConv(i))),
    "linear": lambda i, o, rng: OfNodes(nn.Linear(i, o)),
}
NORMS = {
    "BatchNorm": lambda w: OfNodes(g.BatchNorm(w)),
    "GraphNorm": lambda w: OfNodes(g.GraphNorm(w), batched=True),
    "PairNorm": lambda w: OfNodes(g.PairNorm(), batched=True),
    "LayerNorm": lambda w: OfNodes(g.LayerNorm(w), batched=True),
    "InstanceNorm": lambda w: OfNodes(g.InstanceNorm(w), batched=True),
    "GraphSizeNorm": lambda w: OfNodes(g.GraphSizeNorm(), batched=True),
    "MeanSubtraction": lambda w: OfNodes(g.MeanSubtractionNorm(), batched=True),
    "MessageNorm": lambda w: OfNodes(Apply(lambda h: F.normalize(h, dim=-1))),
    "DiffGroupNorm": lambda w: OfNodes(g.DiffGroupNorm(w, 4)),
    "VirtualNode": VirtualNode,
}
READOUTS = {
    "mean": lambda w: (OfNodes(g.MeanAggregation(), batched=True), w),
    "max": lambda w: (OfNodes(g.MaxAggregation(), batched=True), w),
    "sum": lambda w: (OfNodes(g.SumAggregation(), batched=True), w),
    "std": lambda w: (OfNodes(g.StdAggregation(), batched=True), w),
    "median": lambda w: (OfNodes(g.MedianAggregation(), batched=True), w),
    "softmax": lambda w: (OfNodes(g.SoftmaxAggregation(learn=True), batched=True), w),
    "powermean": lambda w: (
        OfNodes(g.PowerMeanAggregation(learn=True), batched=True),
        w,
    ),
    "set2set": lambda w: (OfNodes(g.Set2Set(w, 2), batched=True), 2 * w),
    "attention": lambda w: (
        OfNodes(g.AttentionalAggregation(nn.Linear(w, 1)), batched=True),
        w,
    ),
    "several": lambda w: (
        OfNodes(g.MultiAggregation(["mean", "max", "std"]), batched=True),
        3 * w,
    ),
    "sort": lambda w: (OfNodes(g.SortAggregation(5), batched=True), 5 * w),
    "gru": lambda w: (OfNodes(g.GRUAggregation(w, w), batched=True), w),
    "set transformer": lambda w: (
        OfNodes(g.SetTransformerAggregation(w, heads=4), batched=True),
        w,
    ),
    "nodes": lambda w: (OfNodes(nn.Identity()), w),
}
_KEEPING_WIDTH = {"CG", "Anti", "FA"}
"""Convolutions whose output is as wide as their input."""


class _Twice(nn.Module):
    """Gives a convolution its input as the initial features too."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden, edge_index):
        return self.inner(hidden, hidden, edge_index)


def graphs(rng):
    """Graphs through PyG's convolutions, norms and readouts."""
    batch = some_graphs(rng)
    layers = []
    names = []
    width = batch.num_node_features
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(CONVOLUTIONS))
        out_width = rng.choice([16, 32, 64])
        if name == "GatedGraph":
            # It pads its input to its output, and cannot make it narrower.
            out_width = max(width, out_width)
        layers.append(CONVOLUTIONS[name](width, out_width, rng))
        names.append(name)
        if name == "MixHop":
            width = 3 * out_width  # one part for each of its three powers
        elif name not in _KEEPING_WIDTH:
            width = out_width

        if rng.random() < 0.5:
            name = rng.choice(list(NORMS))
            layers.append(NORMS[name](width))
            names.append(name)
        if rng.random() < 0.8:
            activation = rng.choice(ACTIVATIONS)()
            layers.append(OfNodes(activation))
            names.append(_class_name(activation))

    name = rng.choice(list(READOUTS))
    readout, readout_width = READOUTS[name](width)
    names.append(f"readout {name}")
    model = OverGraphs(layers, readout, nn.Linear(readout_width, 1))
    size = f"{batch.num_graphs} graphs of {batch.num_nodes} nodes"
    return Trained(f"{size}, {', '.join(names)}", model, batch)


RELATIONS = (("a", "to", "b"), ("b", "back", "a"), ("a", "in", "a"))


def typed_graph(rng):
    """Draw a graph with two types of nodes, and features of two widths."""
    graph = HeteroData()
    nodes = {node_type: max(1, int(rng.lognormvariate(2.5, 0.8))) for node_type in "ab"}
    graph["a"].x = torch.randn(nodes["a"], 12)
    graph["b"].x = torch.randn(nodes["b"], 7)
    for source, name, target in RELATIONS:
        edges = rng.randint(1, 5 * nodes[source])
        sources = torch.randint(0, nodes[source], (edges,))
        targets = torch.randint(0, nodes[target], (edges,))
        graph[source, name, target].edge_index = torch.stack([sources, targets])
    return graph


def typed_graphs(rng):
    """Typed graphs through ``HeteroConv``."""
    batch = Batch.from_data_list([typed_graph(rng) for _ in range(rng.randint(2, 20))])
    convolutions = {
        "SAGE": g.SAGEConv,
        "Graph": g.GraphConv,
        "GAT": _attention_between_types,
    }
    name = rng.choice(list(convolutions))
    aggregation = rng.choice(["sum", "mean", "max"])
    model = Typed(convolutions[name], rng.choice([16, 32, 64]), aggregation)
    # Lazy layers take their width from the first batch.
    with torch.no_grad():
        model(batch)
    description = f"{batch.num_graphs} typed graphs, {name}, {aggregation}"
    return Trained(description, model, batch)


def _attention_between_types(widths, width):
    # A node of one type has no edge to itself among those of another.
    return g.GATConv(widths, width, add_self_loops=False)


def _group_norm(width):
    return nn.GroupNorm(1, width)


def _class_name(layer):
    return type(layer).__name__
