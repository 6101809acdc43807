"""Models and batches to estimate: PyG, attention, convolutions, recurrence."""

import torch
import torch_geometric.nn as g
from torch import nn
from torch_geometric.data import Batch, Data


def graph(nodes, edges, generator):
    return Data(
        x=torch.randn(nodes, 32, generator=generator),
        edge_index=torch.randint(0, nodes, (2, edges), generator=generator),
        edge_attr=torch.randn(edges, 1, generator=generator),
        y=torch.randn(1, generator=generator),
    )


def graphs(count, nodes=100, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [graph(nodes + i, 8 * nodes, generator) for i in range(count)]
    return Batch.from_data_list(made)


class TwoLayers(nn.Module):
    """Two convolutions, a pool over nodes and a linear layer."""

    def __init__(self, kind, *args, weighted=False):
        super().__init__()
        self.first, self.second = kind(32, 64, *args), kind(64, 64, *args)
        self.last, self.weighted = nn.Linear(64, 1), weighted

    def forward(self, data):
        extra = {"edge_weight": data.edge_attr.view(-1)} if self.weighted else {}
        hidden = self.first(data.x, data.edge_index, **extra).relu()
        hidden = self.second(hidden, data.edge_index, **extra).relu()
        return self.last(g.global_mean_pool(hidden, data.batch))


class Isomorphism(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = g.GINConv(nn.Sequential(nn.Linear(32, 64), nn.ReLU()))
        self.last = nn.Linear(64, 1)

    def forward(self, data):
        hidden = self.first(data.x, data.edge_index)
        return self.last(g.global_add_pool(hidden, data.batch))


class Pooled(nn.Module):
    """Chooses nodes by their scores, which no estimate knows."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.pool = g.GCNConv(32, 64), kind(64, ratio=0.5)
        self.last = nn.Linear(64, 1)

    def forward(self, data):
        hidden = self.first(data.x, data.edge_index).relu()
        out = self.pool(hidden, data.edge_index, batch=data.batch)
        return self.last(g.global_mean_pool(out[0], out[3]))


class Attention(nn.Module):
    def __init__(self, dropout=0.1, layers=2):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout, batch_first=True)
        self.first = nn.Linear(7, 64)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.last = nn.Linear(64, 1)

    def forward(self, x):
        return self.last(self.encoder(self.first(x))[:, -1])


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.last = kind(16, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, x):
        return self.last(self.inner(x)[0][:, -1])


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        hidden = self.inner(x)
        return self.inner(hidden[hidden[:, 0] > 0])


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(500, 64), nn.Linear(64, 5)

    def forward(self, words):
        return self.last(self.table(words).mean(1))


class Unused(nn.Module):
    """Has a parameter that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(64, 64), nn.Linear(640, 640)

    def forward(self, x):
        return self.used(x)


def perceptron():
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))


def convolutional(*, norm=True):
    sizes = ((3, 16), (16, 32), (32, 32))
    blocks = [
        nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1, stride=2),
            nn.BatchNorm2d(o) if norm else nn.Identity(),
            nn.ReLU(),
        )
        for i, o in sizes
    ]
    return nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


def solid():
    return nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv3d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(8, 1),
    )


def _normal_rows(*shape):
    return lambda count: torch.randn(count, *shape)


GRAPHS = {
    "GCN": lambda: TwoLayers(g.GCNConv),
    "GCN, weighted": lambda: TwoLayers(g.GCNConv, weighted=True),
    "GAT": lambda: TwoLayers(g.GATConv),
    "GATv2": lambda: TwoLayers(g.GATv2Conv),
    "SAGE": lambda: TwoLayers(g.SAGEConv),
    "GraphConv": lambda: TwoLayers(g.GraphConv),
    "Transformer": lambda: TwoLayers(g.TransformerConv),
    "TAG": lambda: TwoLayers(g.TAGConv),
    "Cheb": lambda: TwoLayers(g.ChebConv, 3),
    "SG": lambda: TwoLayers(g.SGConv),
    "ARMA": lambda: TwoLayers(g.ARMAConv),
    "ResGated": lambda: TwoLayers(g.ResGatedGraphConv),
    "GEN": lambda: TwoLayers(g.GENConv),
    "GIN": Isomorphism,
    "TopKPooling": lambda: Pooled(g.TopKPooling),
    "SAGPooling": lambda: Pooled(g.SAGPooling),
}
DENSE = {
    "perceptron": (perceptron, _normal_rows(784)),
    "convolutional": (convolutional, _normal_rows(3, 32, 32)),
    "attention with dropout": (Attention, _normal_rows(40, 7)),
    "attention": (lambda: Attention(0.0), _normal_rows(40, 7)),
    "LSTM": (lambda: Recurrent(nn.LSTM), _normal_rows(20, 16)),
    "GRU": (lambda: Recurrent(nn.GRU), _normal_rows(10, 16)),
    "conv3d": (solid, _normal_rows(1, 12, 12, 12)),
    "mask": (Masked, _normal_rows(64)),
    "embedding": (Words, lambda count: torch.randint(0, 500, (count, 20))),
    "unused parameter": (Unused, _normal_rows(64)),
}
