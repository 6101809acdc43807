"""Steps to hold an estimate against the profiler: losses, operators, layers.

Each entry makes a fresh ``(model, batch, step)``.  ``scale`` multiplies the samples.
"""

import torch
import torch_geometric.nn as g
from models import (
    GRAPHS,
    Attention,
    Recurrent,
    TwoLayers,
    convolutional,
    graphs,
    perceptron,
    solid,
)
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it

from loaderkit.budget.step.train_step import Step


class Then(nn.Module):
    """A linear layer, and then a function of its output."""

    def __init__(self, function):
        super().__init__()
        self.inner, self.function = nn.Linear(32, 256), function

    def forward(self, x):
        return self.function(self.inner(x))


LOSSES = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "bce": lambda o, t: F.binary_cross_entropy(o.sigmoid(), t.sigmoid()),
    "bce with logits": lambda o, t: F.binary_cross_entropy_with_logits(o, t.sigmoid()),
    "bce with weights": lambda o, t: F.binary_cross_entropy_with_logits(
        o, t.sigmoid(), pos_weight=torch.ones(256)
    ),
    "kl": lambda o, t: F.kl_div(o.log_softmax(1), t.softmax(1), reduction="batchmean"),
    "cross entropy of shares": lambda o, t: F.cross_entropy(o, t.softmax(1)),
    "cross entropy": lambda o, t: F.cross_entropy(o, t.argmax(1)),
    "poisson": F.poisson_nll_loss,
    "gaussian": lambda o, t: F.gaussian_nll_loss(o, t, o.exp()),
    "soft margin": F.soft_margin_loss,
    "hinge": lambda o, t: F.hinge_embedding_loss(o, t.sign()),
    "triplet": lambda o, t: F.triplet_margin_loss(o, t, t * 2),
}
OPERATORS = {
    "max": lambda h: h.max(1)[0],
    "max of all": lambda h: h.max(),
    "topk": lambda h: h.topk(8, 1)[0],
    "sort": lambda h: h.sort(1)[0],
    "median": lambda h: h.median(1)[0],
    "median of all": lambda h: h.median(),
    "kthvalue": lambda h: h.kthvalue(3, 1)[0],
    "cummax": lambda h: h.cummax(1)[0],
    "cumprod": lambda h: h.sigmoid().cumprod(1),
    "prod": lambda h: h.prod(1),
    "logcumsumexp": lambda h: h.logcumsumexp(1),
    "logsumexp": lambda h: h.logsumexp(1),
    "index": lambda h: h[:, torch.arange(8)],
    "index_select": lambda h: h.index_select(0, torch.arange(20)),
    "gather": lambda h: h.gather(1, torch.zeros(len(h), 8, dtype=torch.long)),
    "take": lambda h: h.take(torch.arange(300)),
    "mask": lambda h: h[h[:, 0] > 0],
    "masked_select": lambda h: h.masked_select(torch.arange(256) > 100),
    "masked_scatter": lambda h: torch.zeros_like(h).masked_scatter(h > 0, h),
    "where": lambda h: torch.where(h > 0, h, -h),
    "norm": lambda h: h.norm(dim=1),
    "normalize": F.normalize,
    "cdist": lambda h: torch.cdist(h, h),
    "softmax": lambda h: h.softmax(1),
    "gumbel": lambda h: F.gumbel_softmax(h, hard=True),
    "glu": F.glu,
    "softplus": F.softplus,
    "prelu": lambda h: F.prelu(h, torch.tensor(0.2)),
    "dropout": F.dropout,
    "layer_norm": lambda h: F.layer_norm(h, (256,)),
    "group_norm": lambda h: F.group_norm(h.view(-1, 16, 16), 8),
    "instance_norm": lambda h: F.instance_norm(h.view(-1, 8, 256)),
    "max_pool": lambda h: F.max_pool1d(h.view(-1, 8, 256), 4),
    "interpolate": lambda h: F.interpolate(h.view(-1, 8, 256), scale_factor=2),
    "attention": lambda h: F.scaled_dot_product_attention(
        *[h.view(2, -1, 4, 64).transpose(1, 2)] * 3,
        attn_mask=torch.ones(len(h) // 2, len(h) // 2, dtype=torch.bool),
    ),
    "matrix_exp": lambda h: torch.matrix_exp(h.view(-1, 16, 16) * 0.01),
    "pinv": lambda h: torch.linalg.pinv(h.view(-1, 16, 16)),
    "fft": lambda h: torch.fft.rfft(h).abs(),
    "einsum": lambda h: torch.einsum("ni,nj->ij", h, h),
    "outer": lambda h: torch.outer(h[:, 0], h[:, 1]),
    "double": lambda h: h.double().exp(),
    "two types": lambda h: h * torch.ones(256, dtype=torch.double),
    "complex": lambda h: torch.view_as_complex(h.view(-1, 128, 2)).abs(),
    "solve": lambda h: torch.linalg.solve(h.T @ h + torch.eye(256), h.T),
    "cholesky": lambda h: torch.linalg.cholesky(h.T @ h + torch.eye(256)),
    "svd": lambda h: torch.linalg.svdvals(h),
    "unfold": lambda h: h.unfold(1, 8, 4),
    "repeat_interleave": lambda h: h.repeat_interleave(2, 0),
    "stack": lambda h: torch.stack([h, h * 2]).sum(0),
    "item": lambda h: h * float(h.detach().abs().max()),
    "tolist": lambda h: h * max(h.detach()[0].tolist()),
    "numpy": lambda h: h * float(h.detach().numpy().max()),
    "unique": lambda h: h.detach().round().unique().sum() * h,
    "fill a mask": lambda h: h.masked_fill(h > 0, 0.0),
    "assign by a mask": lambda h: _zero_where_positive(h.clone()),
    "scatter": lambda h: torch.zeros(10, 256).index_add(
        0, torch.zeros(len(h), dtype=torch.long), h
    ),
}


def _zero_where_positive(h):
    h[h > 0] = 0.0
    return h


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(2000, 64), nn.Linear(64, 2000, bias=False)
        self.last.weight = self.table.weight

    def forward(self, words):
        return self.last(self.table(words))


class Experts(nn.Module):
    """Each token goes to two of four experts, by what a layer says."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(4)
        )

    def forward(self, x):
        x = x.reshape(-1, 64)
        shares, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]) * shares[rows, place, None])
        return out


class Keeping(nn.Module):
    """Keeps what it gave in the step before."""

    def __init__(self):
        super().__init__()
        self.inner, self.given = nn.Linear(64, 256), None

    def forward(self, x):
        made = self.inner(x).relu()
        self.given = made.detach() * 2
        return made


class Sequences(nn.Module):
    """A recurrent layer that is too large to be tried at its own size."""

    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(64, 128, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


class FloatMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        mask = torch.zeros(x.size(1), x.size(1))
        return self.inner(x, x, x, attn_mask=mask, need_weights=False)[0]


class Near(nn.Module):
    """A radius graph of positions, made in the forward pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 32)

    def forward(self, x):
        other = ~torch.eye(len(x), dtype=torch.bool)
        source, target = ((torch.cdist(x, x) < 1.0) & other).nonzero().t()
        return self.inner(torch.cat([x[source], x[target]], 1)).relu()


class Edges(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.pool = g.GCNConv(32, 16), g.EdgePooling(16)

    def forward(self, data):
        hidden = self.inner(data.x, data.edge_index)
        return self.pool(hidden, data.edge_index, data.batch)[0]


class Grouped(nn.Module):
    """A pool over nodes, of one of PyG's kinds."""

    def __init__(self, kind, *args):
        super().__init__()
        self.inner, self.pool = nn.Linear(32, 64), kind(*args)

    def forward(self, data):
        return self.pool(self.inner(data.x), data.batch)


def transposed():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1)
    )


def rows(*shape):
    return lambda scale: torch.randn(16 * scale, *shape)


def words(limit):
    return lambda scale: torch.randint(0, limit, (8 * scale, 32))


def some_graphs(scale):
    return graphs(8 * scale, nodes=40)


def few_graphs(scale):
    """For a pool that walks the edges one by one: 9 s of CPU for 16 graphs."""
    return graphs(2 * scale, nodes=40)


SGD = Step(optimizer="sgd")
BFLOAT16 = Step(autocast=torch.bfloat16)
MODELS = {
    "tied": (Tied, words(2000), Step()),
    "tied, sgd": (Tied, words(2000), SGD),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(9000, 32, sparse=True), nn.Linear(32, 4)),
        words(9000),
        SGD,
    ),
    "sparse adam": (
        lambda: nn.Sequential(nn.Embedding(9000, 32, sparse=True)),
        words(9000),
        Step(optimizer=lambda p: torch.optim.SparseAdam(p)),
    ),
    "bag": (lambda: nn.EmbeddingBag(9000, 32), words(9000), Step()),
    "experts": (Experts, rows(20, 64), Step()),
    "keeping": (Keeping, rows(20, 64), Step()),
    "long sequences": (Sequences, rows(50, 64), Step()),
    "float mask": (FloatMask, rows(64, 64), Step()),
    "radius graph": (Near, lambda scale: torch.randn(60 * scale, 3), Step()),
    "edge pooling": (Edges, few_graphs, Step()),
    "lstm aggregation": (
        lambda: Grouped(g.LSTMAggregation, 64, 64),
        some_graphs,
        Step(),
    ),
    "median aggregation": (lambda: Grouped(g.MedianAggregation), some_graphs, Step()),
    "softmax aggregation": (
        lambda: Grouped(g.SoftmaxAggregation, 1.0, True),
        some_graphs,
        Step(),
    ),
    "set2set": (lambda: Grouped(g.Set2Set, 64, 2), some_graphs, Step()),
    "sort aggregation": (lambda: Grouped(g.SortAggregation, 10), some_graphs, Step()),
    "diff group norm": (
        lambda: Grouped(lambda: _OnlyFirst(g.DiffGroupNorm(64, 4))),
        some_graphs,
        Step(),
    ),
    "pna": (
        lambda: TwoLayers(
            g.PNAConv, ["mean", "max", "std"], ["identity", "linear"], torch.ones(99)
        ),
        some_graphs,
        Step(),
    ),
    "convolutions": (convolutional, rows(3, 24, 24), Step()),
    "transposed convolution": (transposed, rows(3, 24, 24), Step()),
    "conv3d": (solid, rows(1, 10, 10, 10), Step()),
    "lstm": (lambda: Recurrent(nn.LSTM), rows(20, 16), Step()),
    "gru": (lambda: Recurrent(nn.GRU), rows(10, 16), Step()),
    "autocast": (perceptron, rows(784), BFLOAT16),
    "autocast, attention": (Attention, rows(40, 7), BFLOAT16),
    "autocast, graphs": (GRAPHS["GCN"], some_graphs, BFLOAT16),
    "checkpoint": (lambda: Attention(layers=3), rows(40, 7), Step(checkpoint=True)),
    "bfloat16": (
        lambda: perceptron().bfloat16(),
        lambda scale: torch.randn(16 * scale, 784).bfloat16(),
        Step(),
    ),
    **{
        f"{name}": (perceptron, rows(784), Step(optimizer=getattr(torch.optim, name)))
        for name in ("Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "Adadelta")
    },
    **{name: (make, some_graphs, Step()) for name, make in GRAPHS.items()},
}


class _OnlyFirst(nn.Module):
    """Drops the second argument."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, _batch):
        return self.inner(x)


def make_step(name, scale):
    """Make the model, the batch and the step of an entry."""
    torch.manual_seed(0)
    kind, _, which = name.partition(": ")
    if kind == "loss":
        pair = (torch.randn(64 * scale, 32), torch.randn(64 * scale, 256))
        return nn.Linear(32, 256), pair, Step(loss=LOSSES[which])
    if kind == "operator":
        return Then(OPERATORS[which]), torch.randn(64 * scale, 32), Step()
    make, batch, step = MODELS[which]
    return make(), batch(scale), step


NAMES = [
    *(f"loss: {name}" for name in LOSSES),
    *(f"operator: {name}" for name in OPERATORS),
    *(f"model: {name}" for name in MODELS),
]
