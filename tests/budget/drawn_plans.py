"""Models, data sets and limits drawn by a seed, to hold a plan's promises against.

Each family is one way in which a batch's bytes depend on its samples: sums of nodes and
edges, padding to the longest, pools that choose, nodes that hear all others, typed
graphs, words of different lengths, ragged fields of dicts; tables with sparse
gradients, targets of single nodes, mixed precision, and samples that are compared with
all others of their batch.
"""

import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as g
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import to_dense_batch

from loaderkit.budget.step.train_step import Step
from loaderkit.datasets.dict_batches import collate_samples


@dataclass(frozen=True)
class Planned:
    """What a plan is made for."""

    words: str
    model: Any
    data: list[Any]
    batch_size: int
    collate_fn: Any = None
    """How a list of these samples is joined."""
    options: dict[str, Any] = field(default_factory=dict)
    """What ``plan_batch`` is told of the step: loss, optimizer, autocast."""
    ragged: str | None = None
    """Of a cache that joins the samples itself; ``collate_fn`` does so for a list."""

    @property
    def step(self) -> Step:
        """The step that is told by the options."""
        return Step(**self.options)

    def __str__(self) -> str:
        return self.words


SIZES = ("alike", "uniform", "lognormal", "two kinds", "one giant", "equal", "pareto")


def draw_plan(seed, family=None):
    """Draw a model and a data set; the same seed always gives the same."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    name = family or rng.choice(sorted(FAMILIES))
    planned = FAMILIES[name](rng, draw_sizes(rng))
    return replace(planned, words=f"{seed}: {name}, {planned.words}")


class DrawnSizes(NamedTuple):
    """Of the samples of a data set."""

    kind: str
    """One of ``SIZES``."""
    sizes: list[int]


def draw_sizes(rng):
    """Draw the sizes of samples: alike, spread, heavy in the tail, or of two kinds."""
    count = rng.randint(40, 160)
    kind = rng.choice(SIZES)
    if kind == "equal":
        sizes = [rng.randint(4, 60)] * count
    elif kind == "pareto":
        sizes = [min(500, int(4 * rng.paretovariate(1.1))) for _ in range(count)]
    elif kind == "alike":
        sizes = [rng.randint(18, 22) for _ in range(count)]
    elif kind == "uniform":
        sizes = [rng.randint(3, 120) for _ in range(count)]
    elif kind == "lognormal":
        spread = rng.uniform(0.4, 1.1)
        sizes = [
            min(300, max(3, int(rng.lognormvariate(3.2, spread)))) for _ in range(count)
        ]
    elif kind == "two kinds":
        sizes = [
            rng.choice([rng.randint(5, 10), rng.randint(100, 140)])
            for _ in range(count)
        ]
    else:
        sizes = [rng.randint(10, 20) for _ in range(count)]
        sizes[rng.randrange(count)] = 400
    return DrawnSizes(kind, sizes)


def _draw_graphs(rng, sizes):
    degree = rng.choice([1, 3, 6])
    is_degree_varied = rng.random() < 0.5
    graphs = []
    for nodes in sizes:
        factor = rng.uniform(0.2, 2.0) if is_degree_varied else 1
        edges = max(1, int(nodes * degree * factor))
        x = torch.randn(nodes, 8)
        edge_index = torch.randint(0, nodes, (2, edges))
        graphs.append(Data(x=x, edge_index=edge_index))
    return graphs


class Stack(nn.Module):
    """Layers that are given the graph too, a readout and a linear layer."""

    def __init__(self, layers, readout=g.global_mean_pool):
        super().__init__()
        self.layers, self.readout = nn.ModuleList(layers), readout
        self.last = nn.LazyLinear(1)

    def forward(self, data):
        hidden, batch = data.x, data.batch
        for layer in self.layers:
            hidden = layer(hidden, data)
        return self.last(self.readout(hidden, batch))


class Convolve(nn.Module):
    """A convolution of PyG and an activation."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden, data):
        return self.inner(hidden, data.edge_index).relu()


class Dense(nn.Module):
    """Attention over all nodes of a graph, padded to the largest."""

    def __init__(self, width, *, weights):
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 4, batch_first=True)
        self.weights = weights

    def forward(self, hidden, data):
        padded, mask = to_dense_batch(hidden, data.batch)
        out = self.inner(
            padded, padded, padded, key_padding_mask=~mask, need_weights=self.weights
        )
        return hidden + out[0][mask]


class Global(nn.Module):
    """PyG's GPS layer."""

    def __init__(self, width):
        super().__init__()
        self.inner = g.GPSConv(width, g.GCNConv(width, width), heads=4)

    def forward(self, hidden, data):
        return self.inner(hidden, data.edge_index, data.batch)


class VirtualNode(nn.Module):
    """A node of each graph that hears all others."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden, data):
        heard = self.inner(g.global_add_pool(hidden, data.batch, data.num_graphs))
        return hidden + heard[data.batch]


class Between(nn.Module):
    """Distances between all nodes of the batch: quadratic in the nodes."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, hidden, data):
        del data
        near = torch.softmax(self.inner(hidden) @ hidden.t(), 1)
        return near @ hidden


class Choosing(nn.Module):
    """A pool that keeps a share of the nodes of each graph."""

    def __init__(self, kind, width):
        super().__init__()
        self.first, self.pool = g.GCNConv(8, width), kind(width, ratio=0.5)
        self.second, self.last = g.GCNConv(width, width), nn.Linear(width, 1)

    def forward(self, data):
        hidden = self.first(data.x, data.edge_index).relu()
        out = self.pool(hidden, data.edge_index, batch=data.batch)
        hidden = self.second(out[0], out[1]).relu()
        return self.last(g.global_mean_pool(hidden, out[3]))


CONVOLUTIONS = {
    "GCN": g.GCNConv,
    "SAGE": g.SAGEConv,
    "GAT": partial(g.GATConv, heads=2, concat=False),
    "Transformer": partial(g.TransformerConv, heads=2, concat=False),
    "GraphConv": g.GraphConv,
    "GEN": g.GENConv,
    "ResGated": g.ResGatedGraphConv,
}


def _with_widths_set(model, sample):
    """Give lazy layers their width, as the first batch of a training does."""
    with torch.no_grad():
        model(Batch.from_data_list([sample, sample]))
    return model


def _convolution_plan(rng, extra, sizes, words):
    width = rng.choice([16, 32, 64])
    name = rng.choice(sorted(CONVOLUTIONS))
    layers = [Convolve(CONVOLUTIONS[name](8, width))]
    layers += [make(width) for make in extra]
    if rng.random() < 0.2:
        layers.append(Convolve(CONVOLUTIONS[name](width, width)))
    data = _draw_graphs(rng, sizes)
    readout = rng.choice([g.global_mean_pool, g.global_max_pool, g.global_add_pool])
    model = _with_widths_set(Stack(layers, readout), data[0])
    size = rng.choice([4, 8, 16, 32])
    return Planned(f"{name} {width}, {words}, {size}", model, data, size)


def sums(rng, drawn):
    """Convolutions: bytes follow nodes and edges."""
    return _convolution_plan(rng, [], drawn.sizes, drawn.kind)


def padding(rng, drawn):
    """Attention within each graph, padded to the largest."""
    weights = rng.random() < 0.4
    return _convolution_plan(
        rng, [partial(Dense, weights=weights)], drawn.sizes, drawn.kind
    )


def gps(rng, drawn):
    """PyG's GPS layers."""
    return _convolution_plan(rng, [Global] * rng.randint(1, 2), drawn.sizes, drawn.kind)


def virtual_nodes(rng, drawn):
    """A node for each graph."""
    return _convolution_plan(rng, [VirtualNode], drawn.sizes, drawn.kind)


def all_pairs(rng, drawn):
    """Quadratic in all nodes of a batch, which no size of one sample tells."""
    kind, sizes = drawn
    return _convolution_plan(rng, [Between], [min(n, 60) for n in sizes], kind)


def pooling(rng, drawn):
    """Pools that choose."""
    kind, sizes = drawn
    pool = rng.choice([g.TopKPooling, g.SAGPooling])
    model = Choosing(pool, rng.choice([16, 32]))
    size = rng.choice([4, 8, 16])
    return Planned(
        f"{pool.__name__}, {kind}, {size}", model, _draw_graphs(rng, sizes), size
    )


class Typed(nn.Module):
    """Convolutions of a graph with several types of nodes."""

    def __init__(self, kind, width, relations, types):
        super().__init__()
        self.inner = g.HeteroConv({e: kind((-1, -1), width) for e in relations}, "sum")
        self.last, self.types = nn.LazyLinear(1), types

    def forward(self, data):
        hidden = self.inner(data.x_dict, data.edge_index_dict)
        pooled = [
            g.global_mean_pool(hidden[t].relu(), data[t].batch, len(data[t].ptr) - 1)
            for t in self.types
        ]
        return self.last(sum(pooled))


def typed(rng, drawn):
    """Typed graphs whose types do not grow together."""
    kind, sizes = drawn
    types = ["a", "b", "c"][: rng.randint(2, 3)]
    relations = [(s, f"{s}{t}", t) for s in types for t in types if rng.random() < 0.5]
    relations += [(types[0], "of", t) for t in types]
    data = []
    for n in sizes:
        graph = HeteroData()
        # Types do not grow together, which one number of nodes cannot say.
        count = {t: max(1, int(n * rng.choice([0.1, 1, 2]))) for t in types}
        for number, t in enumerate(types):
            graph[t].x = torch.randn(count[t], [5, 40, 100][number])
        for s, name, t in relations:
            edges = max(1, int(count[s] * rng.uniform(0.5, 4)))
            sources = torch.randint(0, count[s], (edges,))
            targets = torch.randint(0, count[t], (edges,))
            graph[s, name, t].edge_index = torch.stack([sources, targets])
        data.append(graph)
    conv = rng.choice(["SAGE", "Graph"])
    kinds = {"SAGE": g.SAGEConv, "Graph": g.GraphConv}
    model = _with_widths_set(
        Typed(kinds[conv], rng.choice([16, 32]), relations, types), data[0]
    )
    size = rng.choice([4, 8, 16])
    words = f"{conv}, {len(types)} types, {len(relations)} relations, {kind}, {size}"
    return Planned(words, model, data, size)


class Reader(nn.Module):
    """An encoder of words, named as Hugging Face names its arguments."""

    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(300, width)
        self.inner = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, batch_first=True
        )
        self.last = nn.Linear(width, 300)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.inner(
            self.table(input_ids), src_key_padding_mask=attention_mask == 0
        )
        out = self.last(hidden)
        return nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())


class Translator(nn.Module):
    """Two sequences of different lengths."""

    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(200, width)
        self.inner = nn.Transformer(width, 4, 1, 1, 2 * width, 0.0, batch_first=True)
        self.last = nn.Linear(width, 200)

    def forward(self, source, target):
        return self.last(self.inner(self.table(source), self.table(target)))


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.inner = nn.Embedding(300, width), nn.GRU(width, width)
        self.last = nn.Linear(width, 5)

    def forward(self, words):
        return self.last(self.inner(self.table(words))[0].mean(0))


def _pad_dicts(samples):
    batch = {}
    for name in samples[0]:
        values = [torch.as_tensor(sample[name]) for sample in samples]
        # -100 is what torch's cross entropy ignores.
        padding = -100 if name == "labels" else 0
        batch[name] = pad_sequence(values, batch_first=True, padding_value=padding)
    return batch


def words(rng, drawn):
    """Samples that are dicts of words, padded to the longest of the batch."""
    kind, sizes = drawn
    data = []
    for length in sizes:
        ids = torch.randint(1, 300, (length,))
        data.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones(length, dtype=torch.long),
                "labels": ids,
            }
        )
    size = rng.choice([4, 8, 16])
    model = Reader(rng.choice([16, 32]))
    return Planned(f"dicts of words, {kind}, {size}", model, data, size, _pad_dicts)


def translation(rng, drawn):
    """Dicts of two sequences that are padded each to its own longest."""
    kind, sizes = drawn
    data = [
        {
            "source": torch.randint(1, 200, (n,)),
            "target": torch.randint(1, 200, (max(1, int(n * rng.uniform(0.2, 2.5))),)),
        }
        for n in sizes
    ]
    size = rng.choice([4, 8])
    model = Translator(rng.choice([16, 32]))
    return Planned(f"two sequences, {kind}, {size}", model, data, size, _pad_dicts)


def recurrence(rng, drawn):
    """Ragged words through a recurrent layer, as lists of numbers."""
    kind, sizes = drawn
    data = [torch.randint(1, 300, (n,)) for n in sizes]
    size = rng.choice([4, 8, 16])
    model = Recurrent(rng.choice([16, 32]))
    return Planned(f"words, GRU, {kind}, {size}", model, data, size, pad_sequence)


class Atoms(nn.Module):
    """Nodes that are numbers of a table, whose gradients may be sparse."""

    def __init__(self, count, width, *, sparse):
        super().__init__()
        self.table = nn.Embedding(count, width, sparse=sparse)
        self.inner = g.SAGEConv(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, data):
        hidden = self.inner(self.table(data.z), data.edge_index).relu()
        return self.last(g.global_add_pool(hidden, data.batch))


def atoms(rng, drawn):
    """Regression of a number for each graph, from a table of its nodes."""
    kind, sizes = drawn
    data = _draw_graphs(rng, sizes)
    count, sparse = rng.choice([100, 20_000]), rng.random() < 0.5
    for graph in data:
        nodes = graph.num_nodes
        graph.z, graph.y = torch.randint(0, count, (nodes,)), torch.randn(1)
        del graph.x
        graph.num_nodes = nodes
    model = Atoms(count, rng.choice([16, 32]), sparse=sparse)
    size, optimizer = rng.choice([4, 8, 16]), rng.choice(["sgd", "adagrad"])
    options = {"loss": loss_of_graphs, "optimizer": optimizer}
    words = f"{count} atoms, sparse {sparse}, {optimizer}, {kind}, {size}"
    return Planned(words, model, data, size, options=options)


def loss_of_graphs(out, batch):
    """Squared differences to the targets of graphs."""
    return nn.functional.mse_loss(out.squeeze(-1), batch.y)


class MarkedNodes(nn.Module):
    """Predicts what only some of the nodes have: a mask chooses them."""

    def __init__(self, width):
        super().__init__()
        self.inner, self.last = g.GCNConv(8, width), nn.Linear(width, 3)

    def forward(self, data):
        return self.last(self.inner(data.x, data.edge_index).relu()[data.known])


def loss_of_marked(out, batch):
    """Squared differences to the targets of marked nodes."""
    return nn.functional.smooth_l1_loss(out, batch.y[batch.known])


def marked(rng, drawn):
    """Targets for single nodes, chosen by a mask."""
    kind, sizes = drawn
    data, share = _draw_graphs(rng, sizes), rng.choice([0.1, 0.5, 1.0])
    for graph in data:
        graph.known = torch.rand(graph.num_nodes) < share
        graph.known[0] = True
        graph.y = torch.randn(graph.num_nodes, 3)
    size = rng.choice([4, 8, 16])
    words = f"{share:.0%} of the nodes, {kind}, {size}"
    options = {"loss": loss_of_marked, "optimizer": rng.choice(["adam", "sgd"])}
    return Planned(
        words, MarkedNodes(rng.choice([16, 64])), data, size, options=options
    )


def mixed(rng, drawn):
    """Convolutions or attention in mixed precision."""
    make = rng.choice([sums, padding, virtual_nodes])
    planned = make(rng, drawn)
    options = {"autocast": torch.bfloat16, "optimizer": "adamw"}
    words = f"{make.__name__}, {planned.words}, bfloat16"
    return replace(planned, words=words, options=options)


class RaggedFields(nn.Module):
    """Reads one ragged field and a number, however the batch holds the field."""

    def __init__(self, width, *, attention):
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 1)
        self.attention = attention

    def forward(self, clip, label):
        if isinstance(clip, torch.Tensor):
            # Plain where all of a list's batch are as long, else torch's jagged.
            clip = clip.values() if clip.is_nested else clip
        else:
            clip = clip.values
        hidden = self.first(clip)
        if self.attention and hidden.dim() == 3:
            hidden = hidden + (hidden @ hidden.transpose(1, 2)).softmax(2) @ hidden
        out = self.last(hidden.relu())
        return nn.functional.softplus(out).mean() * label.float().mean()


def ragged(rng, drawn):
    """Dicts with a ragged field, in the layout that a cache gives."""
    kind, sizes = drawn
    data = [{"clip": torch.randn(n, 4), "label": i % 2} for i, n in enumerate(sizes)]
    size, layout = rng.choice([4, 8, 16]), rng.choice(["padded", "packed", "jagged"])
    attention = rng.random() < 0.5
    model = RaggedFields(rng.choice([16, 64]), attention=attention)
    collate = partial(collate_samples, ragged=layout)
    words = f"{layout}, attention {attention}, {kind}, {size}"
    return Planned(words, model, data, size, collate, ragged=layout)


class Contrasted(nn.Module):
    """Tells a sample from all others of its batch, of rows, words or graphs."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, batch):
        hidden = self.inner(batch)
        near = self.left(hidden) @ self.right(hidden).t()
        # Two tables of all pairs, as in a loss that weighs the hard ones.
        near = near * near.detach().exp().clamp(max=2)
        return nn.functional.cross_entropy(near, torch.arange(len(near)))


class MeanOfWords(nn.Module):
    """The mean of the words of each sequence."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 8)

    def forward(self, words):
        return self.table(words).mean(1)


class MeanOfNodes(nn.Module):
    """The mean of the nodes of each graph."""

    def forward(self, data):
        return g.global_mean_pool(data.x, data.batch)


def contrastive(rng, drawn):
    """Rows, words or graphs, each compared with all others of the batch."""
    kind, sizes = drawn
    # The tables of pairs are what takes most.
    size, what = rng.choice([16, 32]), rng.choice(["rows", "words", "graphs"])
    words = f"{what}, {kind}, {size}"
    if what == "rows":
        data = [torch.randn(8) for _ in sizes]
        return Planned(words, Contrasted(nn.Linear(8, 8)), data, size)
    if what == "graphs":
        return Planned(words, Contrasted(MeanOfNodes()), _draw_graphs(rng, sizes), size)
    data = [torch.randint(40, (min(length, 20),)) for length in sizes]
    collate = partial(pad_sequence, batch_first=True)
    return Planned(words, Contrasted(MeanOfWords()), data, size, collate)


_FAMILY_FUNCTIONS = (
    sums,
    padding,
    gps,
    virtual_nodes,
    all_pairs,
    pooling,
    typed,
    words,
    translation,
    recurrence,
    atoms,
    marked,
    mixed,
    ragged,
    contrastive,
)
FAMILIES = {family.__name__: family for family in _FAMILY_FUNCTIONS}
