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

from loaderkit.budget.train_step import Step

ACTIVATIONS = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.PReLU,
    nn.Softplus, nn.Hardswish, nn.Mish, nn.SELU, nn.RReLU, nn.Softsign, nn.LogSigmoid,
)  # fmt: skip
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
_CLASSES = {
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
class Drawn:
    """A step, and in words what was drawn."""

    words: str
    model: Any
    batch: Any
    step: Step
    threads: int

    def __str__(self) -> str:
        return self.words


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
        relations = [("a", "to", "b"), ("b", "back", "a"), ("a", "in", "a")]
        self.inner = g.HeteroConv({r: kind((-1, -1), width) for r in relations}, aggr)
        self.last = nn.Linear(width, 1)

    def forward(self, data):
        hidden = self.inner(data.x_dict, data.edge_index_dict)
        pooled = [
            g.global_mean_pool(hidden[t].relu(), data[t].batch) for t in ("a", "b")
        ]
        return self.last(sum(pooled))


def draw_step(seed):
    """Draw a step; the same seed always gives the same."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    family = r.choice([rows, rows, images, words, graphs, graphs, typed_graphs])
    spoken, model, batch, loss = family(r)
    name = r.choice(list(OPTIMIZERS))
    kind, options = _CLASSES[name.partition(",")[0]], OPTIMIZERS[name]
    autocast = torch.bfloat16 if r.random() < 0.15 else None
    checkpoint = r.random() < 0.1
    if r.random() < 0.2:
        frozen = list(model.parameters())[: r.randint(1, 2)]
        if len(frozen) < len(list(model.parameters())):
            spoken += ", first parameters frozen"
            for parameter in frozen:
                parameter.requires_grad = False
    step = Step(
        loss,
        lambda parameters: kind(parameters, lr=1e-3, **options),
        autocast=autocast,
        checkpoint=checkpoint,
    )
    spoken += f"; {name}"
    spoken += ", autocast" if autocast else ""
    spoken += ", checkpoint" if checkpoint else ""
    return Drawn(f"{seed}: {spoken}", model, batch, step, r.choice([1, 2]))


def rows(r):
    """Rows of numbers through linear layers, norms, and an operator at the end."""
    count, width = r.randint(3, 700), r.choice([5, 16, 33, 64, 128])
    layers, names, now = [], [], width
    for _ in range(r.randint(1, 5)):
        kind = r.choice(["linear", "linear", "activation", "norm", "dropout", "skip"])
        if kind == "linear":
            wider = r.choice([7, 32, 100, 256, 300])
            layers.append(nn.Linear(now, wider, bias=r.random() < 0.8))
            now = wider
        elif kind == "activation":
            layers.append(r.choice(ACTIVATIONS)())
        elif kind == "norm":
            layers.append(
                r.choice([nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm, _one_group])(now)
            )
        elif kind == "dropout":
            layers.append(r.choice([nn.Dropout, nn.AlphaDropout])(r.uniform(0.1, 0.5)))
        else:
            layers.append(Residual(nn.Sequential(nn.Linear(now, now), nn.ReLU())))
        names.append(_name(layers[-1]))
    layers.append(nn.Linear(now, 256))
    model, x = nn.Sequential(*layers), torch.randn(count, width)
    dtype = r.choice([None] * 6 + [torch.double, torch.bfloat16])
    if r.random() < 0.5 or dtype is not None:
        name = r.choice(list(LOSSES))
        target = torch.randn(count, 256)
        batch, loss = (x, target), LOSSES[name]
        if dtype is not None:
            model, batch = model.to(dtype), (x.to(dtype), target.to(dtype))
            names.append(str(dtype))
        names.append(f"loss {name}")
    else:
        name = r.choice(list(OPERATORS))
        count = max(24, count // 4 * 4)
        batch, loss = torch.randn(count, width), None
        model.append(Apply(OPERATORS[name]))
        names.append(f"operator {name}")
    return f"{count} rows, {', '.join(names)}", model, batch, loss


def images(r):
    """Images through convolutions of all kinds."""
    count, size, channels = (
        r.randint(2, 24),
        r.choice([9, 16, 24, 33]),
        r.choice([1, 3]),
    )
    layers, names, now = [], [], channels
    batch = torch.randn(count, channels, size, size)
    for _ in range(r.randint(1, 4)):
        kind = r.choice(["conv", "conv", "transposed", "pool", "norm", "up", "act"])
        if kind == "conv":
            groups = r.choice([1, 1, now])
            wider = groups * r.choice([4, 8, 16]) if groups == 1 else 2 * now
            kernel, stride = r.choice([1, 3, 5]), r.choice([1, 1, 2])
            padding, dilation = r.choice([0, 1, 2]), r.choice([1, 1, 2])
            with_bias = r.random() < 0.7
            layers.append(
                nn.Conv2d(
                    now, wider, kernel, stride, padding, dilation, groups, with_bias
                )
            )
            now = wider
        elif kind == "transposed":
            layers.append(nn.ConvTranspose2d(now, 6, r.choice([2, 3, 4]), 2, 1))
            now = 6
        elif kind == "pool":
            layers.append(r.choice([nn.MaxPool2d, nn.AvgPool2d])(2, ceil_mode=True))
        elif kind == "norm":
            layers.append(
                r.choice([nn.BatchNorm2d, nn.InstanceNorm2d, _one_group])(now)
            )
        elif kind == "up":
            layers.append(nn.Upsample(scale_factor=r.choice([2, 1.5]), mode="bilinear"))
        else:
            layers.append(r.choice(ACTIVATIONS)())
        names.append(_name(layers[-1]))
        with torch.no_grad():
            given = nn.Sequential(*layers)(batch[:2])
        if min(given.shape[2:]) < 6 or given[0].numel() > 60_000:
            break
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(now, 3)]
    model = nn.Sequential(*layers)
    # torch's own backward pass ends the process where GroupNorm gets images in
    # channels-last order that need no gradient
    if r.random() < 0.3 and "GroupNorm" not in names:
        batch = batch.to(memory_format=torch.channels_last)
        names.append("channels last")
    return f"{count} images of {size}, {', '.join(names)}", model, batch, None


def words(r):
    """Words through embeddings, attention and recurrence."""
    count, length = r.randint(1, 20), r.randint(5, 90)
    vocabulary, width = r.choice([50, 900, 5000]), r.choice([16, 32, 48, 64])
    table = nn.Embedding(vocabulary, width, padding_idx=r.choice([None, 0]))
    layers, names = [table], [f"{vocabulary} words"]
    for _ in range(r.randint(1, 3)):
        kind = r.choice(
            ["lstm", "gru", "rnn", "encoder", "attention", "decoder", "conv"]
        )
        dropout = r.choice([0.0, 0.0, 0.1])
        if kind in {"lstm", "gru", "rnn"}:
            made = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind]
            both = r.random() < 0.3
            inner = made(
                width, width // 2 if both else width, r.choice([1, 2]),
                batch_first=True, bidirectional=both,
            )  # fmt: skip
            layers.append(Recurrence(inner))
        elif kind == "encoder":
            layers.append(
                nn.TransformerEncoderLayer(
                    width, 4, 2 * width, dropout, r.choice([F.relu, F.gelu]),
                    batch_first=True, norm_first=r.random() < 0.5,
                )
            )  # fmt: skip
        elif kind == "attention":
            layers.append(
                SelfAttention(
                    width, r.choice([1, 4]), weights=r.random() < 0.5,
                    causal=r.random() < 0.5, dropout=dropout,
                )
            )  # fmt: skip
        elif kind == "decoder":
            layers.append(Decoder(width, 4, dropout))
        else:
            conv = nn.Conv1d(width, width, 3, padding=1)
            layers.append(Apply(lambda x: x.transpose(1, 2)))
            layers.append(conv)
            layers.append(Apply(lambda x: x.transpose(1, 2)))
        names.append(kind)
    head = nn.Linear(width, vocabulary, bias=False)
    if r.random() < 0.4:
        head.weight = table.weight
        names.append("tied")
    layers.append(head)
    tokens = torch.randint(0, vocabulary, (count, length))
    loss = None
    batch = tokens
    if r.random() < 0.7:
        target = tokens.clone()
        target[torch.rand(count, length) < 0.3] = -100
        target[0, 0] = 1
        batch, names = (tokens, target), [*names, "cross entropy"]

        def loss(out, wanted):
            return F.cross_entropy(out.flatten(0, 1), wanted.flatten())

    spoken = f"{count} x {length} tokens, {', '.join(names)}"
    return spoken, nn.Sequential(*layers), batch, loss


def some_graphs(r):
    """Draw a batch of graphs of different sizes, some without edges."""
    drawn = []
    for _ in range(r.randint(2, 24)):
        nodes = max(2, int(r.lognormvariate(3, 0.7)))
        edges = int(nodes * r.choice([0, 1, 3, 6, 6]))
        drawn.append(
            Data(
                x=torch.randn(nodes, 16),
                edge_index=torch.randint(0, nodes, (2, edges)),
                edge_attr=torch.randn(edges, 4),
                y=torch.randn(1),
            )
        )
    drawn[0].edge_index = torch.randint(0, drawn[0].num_nodes, (2, 40))
    drawn[0].edge_attr = torch.randn(40, 4)
    return Batch.from_data_list(drawn)


def _mlp(width, wider):
    return nn.Sequential(nn.Linear(width, wider), nn.ReLU(), nn.Linear(wider, wider))


CONVOLUTIONS = {
    "GCN": lambda i, o, r: Convolve(g.GCNConv(i, o, improved=r.random() < 0.5)),
    "GCN, weights": lambda i, o, r: Convolve(g.GCNConv(i, o), edges="weights"),
    "GAT": lambda i, o, r: Convolve(g.GATConv(i, o // 4, heads=4, dropout=0.1)),
    "GAT, edges": lambda i, o, r: Convolve(
        g.GATConv(i, o, heads=2, concat=False, edge_dim=4), edges="features"
    ),
    "GATv2": lambda i, o, r: Convolve(
        g.GATv2Conv(i, o // 2, heads=2, edge_dim=4, residual=r.random() < 0.5),
        edges="features",
    ),
    "SAGE": lambda i, o, r: Convolve(
        g.SAGEConv(
            i, o, aggr=r.choice(["mean", "max", "sum"]), project=r.random() < 0.5
        )
    ),
    "GIN": lambda i, o, r: Convolve(g.GINConv(_mlp(i, o), train_eps=True)),
    "GINE": lambda i, o, r: Convolve(
        g.GINEConv(_mlp(i, o), edge_dim=4), edges="features"
    ),
    "Graph": lambda i, o, r: Convolve(
        g.GraphConv(i, o, aggr=r.choice(["add", "max"])), edges="weights"
    ),
    "Transformer": lambda i, o, r: Convolve(
        g.TransformerConv(i, o // 4, heads=4, beta=r.random() < 0.5, edge_dim=4),
        edges="features",
    ),
    "PNA": lambda i, o, r: Convolve(
        g.PNAConv(
            i,
            o,
            r.sample(["mean", "max", "min", "std", "sum", "var"], 2),
            r.sample(["identity", "amplification", "attenuation", "linear"], 2),
            torch.ones(90),
            towers=r.choice([1, 4]),
        )
    ),
    "TAG": lambda i, o, r: Convolve(g.TAGConv(i, o, K=r.choice([1, 3]))),
    "Cheb": lambda i, o, r: Convolve(g.ChebConv(i, o, r.choice([2, 3]))),
    "ARMA": lambda i, o, r: Convolve(g.ARMAConv(i, o, num_stacks=r.choice([1, 2]))),
    "GEN": lambda i, o, r: Convolve(
        g.GENConv(i, o, aggr=r.choice(["softmax", "powermean"]))
    ),
    "ResGated": lambda i, o, r: Convolve(g.ResGatedGraphConv(i, o)),
    "Leading": lambda i, o, r: Convolve(g.LEConv(i, o)),
    "ClusterGCN": lambda i, o, r: Convolve(g.ClusterGCNConv(i, o)),
    "NN": lambda i, o, r: Convolve(
        g.NNConv(i, o, nn.Linear(4, i * o)), edges="features"
    ),
    "CG": lambda i, o, r: Convolve(g.CGConv(i, 4), edges="features"),
    "MF": lambda i, o, r: Convolve(g.MFConv(i, o, max_degree=5)),
    "EG": lambda i, o, r: Convolve(g.EGConv(i, o, num_heads=4, num_bases=2)),
    "Film": lambda i, o, r: Convolve(g.FiLMConv(i, o)),
    "General": lambda i, o, r: Convolve(
        g.GeneralConv(i, o, attention=r.random() < 0.5, heads=2)
    ),
    "SuperGAT": lambda i, o, r: Convolve(g.SuperGATConv(i, o // 2, heads=2)),
    "Edge": lambda i, o, r: Convolve(g.EdgeConv(_mlp(2 * i, o))),
    "GatedGraph": lambda i, o, r: Convolve(g.GatedGraphConv(o, 2)),
    "SSG": lambda i, o, r: Convolve(g.SSGConv(i, o, alpha=0.1, K=2)),
    "Feast": lambda i, o, r: Convolve(g.FeaStConv(i, o, heads=2)),
    "Hyper": lambda i, o, r: Convolve(g.SGConv(i, o, K=2)),
    "Anti": lambda i, o, r: Convolve(g.AntiSymmetricConv(i, num_iters=2)),
    "MixHop": lambda i, o, r: Convolve(g.MixHopConv(i, o, powers=[0, 1, 2])),
    "FA": lambda i, o, r: Convolve(_Twice(g.FAConv(i))),
    "linear": lambda i, o, r: OfNodes(nn.Linear(i, o)),
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
        OfNodes(g.PowerMeanAggregation(learn=True), batched=True), w
    ),
    "set2set": lambda w: (OfNodes(g.Set2Set(w, 2), batched=True), 2 * w),
    "attention": lambda w: (
        OfNodes(g.AttentionalAggregation(nn.Linear(w, 1)), batched=True), w
    ),
    "several": lambda w: (
        OfNodes(g.MultiAggregation(["mean", "max", "std"]), batched=True), 3 * w
    ),
    "sort": lambda w: (OfNodes(g.SortAggregation(5), batched=True), 5 * w),
    "gru": lambda w: (OfNodes(g.GRUAggregation(w, w), batched=True), w),
    "set transformer": lambda w: (
        OfNodes(g.SetTransformerAggregation(w, heads=4), batched=True), w
    ),
    "nodes": lambda w: (OfNodes(nn.Identity()), w),
}  # fmt: skip
_AS_WIDE = {"CG", "Anti", "FA"}
"""Convolutions whose output is as wide as their input."""


class _Twice(nn.Module):
    """Gives a convolution its input as the initial features too."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden, edge_index):
        return self.inner(hidden, hidden, edge_index)


def graphs(r):
    """Graphs through PyG's convolutions, norms and readouts."""
    batch = some_graphs(r)
    layers, names, now = [], [], 16
    for _ in range(r.randint(1, 3)):
        name, wider = r.choice(list(CONVOLUTIONS)), r.choice([16, 32, 64])
        if name == "GatedGraph":
            wider = max(now, wider)
        layers.append(CONVOLUTIONS[name](now, wider, r))
        now = now if name in _AS_WIDE else wider * (3 if name == "MixHop" else 1)
        names.append(name)
        if r.random() < 0.5:
            name = r.choice(list(NORMS))
            layers.append(NORMS[name](now))
            names.append(name)
        if r.random() < 0.8:
            layers.append(OfNodes(r.choice(ACTIVATIONS)()))
            names.append(_name(layers[-1].inner))
    name = r.choice(list(READOUTS))
    readout, wide = READOUTS[name](now)
    names.append(f"readout {name}")
    model = OverGraphs(layers, readout, nn.Linear(wide, 1))
    spoken = f"{batch.num_graphs} graphs of {batch.num_nodes} nodes, {', '.join(names)}"
    return spoken, model, batch, None


def typed_graph(r):
    """Draw a graph with two types of nodes, and features of two widths."""
    graph = HeteroData()
    sizes = {t: max(1, int(r.lognormvariate(2.5, 0.8))) for t in ("a", "b")}
    graph["a"].x = torch.randn(sizes["a"], 12)
    graph["b"].x = torch.randn(sizes["b"], 7)
    for source, name, target in (
        ("a", "to", "b"),
        ("b", "back", "a"),
        ("a", "in", "a"),
    ):
        edges = r.randint(1, 5 * sizes[source])
        graph[source, name, target].edge_index = torch.stack(
            [
                torch.randint(0, sizes[source], (edges,)),
                torch.randint(0, sizes[target], (edges,)),
            ]
        )
    return graph


def typed_graphs(r):
    """Typed graphs through ``HeteroConv``."""
    batch = Batch.from_data_list([typed_graph(r) for _ in range(r.randint(2, 20))])
    kinds = {"SAGE": g.SAGEConv, "Graph": g.GraphConv, "GAT": _attention_between}
    name, aggr = r.choice(list(kinds)), r.choice(["sum", "mean", "max"])
    model = Typed(kinds[name], r.choice([16, 32, 64]), aggr)
    with torch.no_grad():  # lazy layers take their width from the first batch
        model(batch)
    spoken = f"{batch.num_graphs} typed graphs, {name}, {aggr}"
    return spoken, model, batch, None


def _attention_between(widths, width):
    return g.GATConv(widths, width, add_self_loops=False)


def _one_group(width):
    return nn.GroupNorm(1, width)


def _name(layer):
    return type(layer).__name__
