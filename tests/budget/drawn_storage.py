"""Training steps drawn by a seed whose storages are not one for each output.

``drawn.py`` draws layers, each of which gives a new tensor.  Here operators write into
their operands, autocast keeps copies of weights, tables have sparse gradients, and
every row of a graph meets every other row.
"""

import random

import torch
import torch_geometric.nn as g
from drawn import DrawnStep, Trained, some_graphs
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it
from torch_geometric.utils import to_dense_batch

from loaderkit.budget.step.train_step import Step


class Chain(nn.Module):
    """Layers one after the other, with functions of the hidden rows between them."""

    def __init__(self, layers, functions):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.functions = functions
        width = layers[-1].out_features
        self.register_buffer("running", torch.zeros(width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        hidden = x
        for layer, function in zip(self.layers, self.functions, strict=True):
            hidden = function(layer(hidden), self)
        return hidden * self.scale


def _add_in_place(h, _):
    h += 1.0
    return h


def _add_skip(h, _):
    before = h.tanh()
    before += h
    return before


def _write_columns(h, _):
    h = h.clone()
    h[:, : h.size(1) // 2] = 0.0
    return h


def _write_columns_of_gradient(h, _):
    out = torch.zeros_like(h)
    out[:, ::2] = h[:, ::2] * 2
    return out


def _write_rows(h, _):
    out = h.new_zeros(2 * len(h), h.size(1))
    out[: len(h)] = h
    out[len(h) :].copy_(h)
    return out[: len(h)] + out[len(h) :]


def _mask_in_place(h, _):
    h = h * 2
    h[h.detach() > 0] *= 0.5
    return h


def _running_mean(h, model):
    with torch.no_grad():
        if h.size(1) == len(model.running):
            model.running.mul_(0.9).add_(h.float().mean(0), alpha=0.1)
        model.seen += len(h)
    return h


def _sum_of_powers(h, _):
    total = torch.zeros_like(h)
    for power in range(1, 4):
        total += h * power
    return total


def _accumulate_rows(h, _):
    rows = torch.arange(len(h)) // 3
    out = torch.zeros(len(h) // 3 + 1, h.size(1), dtype=h.dtype)
    out.index_add_(0, rows, h)
    return out[rows]


def _scatter_in_place(h, _):
    rows = (torch.arange(len(h)) // 2)[:, None].expand_as(h)
    return torch.zeros_like(h).scatter_add_(0, rows, h)


def _scatter_max(h, _):
    rows = (torch.arange(len(h)) // 2)[:, None].expand_as(h)
    return torch.zeros_like(h).scatter_reduce_(0, rows, h, "amax", include_self=False)


def _lerp(h, _):
    return h.exp().lerp_(h, 0.5)


def _join_chunks(h, _):
    left, right = h.chunk(2, 1)
    return torch.cat([left.sigmoid(), right.mul(2).relu_()], 1)


def _split_in_place(h, _):
    h = h.clone()
    h.narrow(1, 0, 3).zero_()
    h.select(0, 0).add_(1.0)
    return h


IN_PLACE = {
    "relu_": lambda h, _: h.relu_(),
    "inplace relu": lambda h, _: F.relu(h, inplace=True),
    "elu": lambda h, _: F.elu(h, inplace=True),
    "silu": lambda h, _: F.silu(h, inplace=True),
    "mish": lambda h, _: F.mish(h, inplace=True),
    "leaky": lambda h, _: F.leaky_relu(h, inplace=True),
    "hardtanh": lambda h, _: F.hardtanh(h, inplace=True),
    "hardswish": lambda h, _: F.hardswish(h, inplace=True),
    "hardsigmoid": lambda h, _: F.hardsigmoid(h, inplace=True),
    "selu": lambda h, _: F.selu(h, inplace=True),
    "celu": lambda h, _: F.celu(h, inplace=True),
    "rrelu": lambda h, _: F.rrelu(h, training=True, inplace=True),
    "threshold": lambda h, _: F.threshold(h, 0.1, 0.0, inplace=True),
    "dropout": lambda h, _: F.dropout(h, 0.3, inplace=True),
    "sigmoid_": lambda h, _: h.sigmoid_(),
    "tanh_": lambda h, _: h.tanh_(),
    "exp_": lambda h, _: h.clamp_(max=3).exp_(),
    "abs_": lambda h, _: h.abs_(),
    "sqrt_": lambda h, _: h.abs().add_(1).sqrt_(),
    "pow_": lambda h, _: h.abs().add(1).pow_(2.5),
    "square_": lambda h, _: h.square_(),
    "neg_": lambda h, _: h.neg_(),
    "clamp_": lambda h, _: h.clamp_(-1, 1),
    "mul_": lambda h, _: h.mul_(2.0),
    "mul_ by itself": lambda h, _: h.tanh().mul_(h),
    "div_": lambda h, _: h.div_(h.detach().norm(dim=1, keepdim=True) + 1),
    "div_ by a sum": lambda h, _: (e := h.exp()).div_(e.sum(1, keepdim=True) + 1),
    "sub_": lambda h, _: h.sub_(h.mean(0)),
    "add_": _add_in_place,
    "add_ a skip": _add_skip,
    "addcmul_": lambda h, _: h.sin().addcmul_(h, h, value=0.1),
    "addcdiv_": lambda h, _: h.sin().addcdiv_(h, h.abs() + 1),
    "addmm_": lambda h, _: h.cos().addmm_(h, torch.ones(h.size(1), h.size(1))),
    "baddbmm_": lambda h, _: h.cos()[None].baddbmm_(
        h[None], torch.ones(1, h.size(1), h.size(1))
    )[0],
    "lerp_": _lerp,
    "masked_fill_": lambda h, _: h.masked_fill_(torch.rand(h.shape) < 0.5, 0.0),
    "masked_fill_ of signs": lambda h, _: h.mul(2).masked_fill_(h > 0, 0.0),
    "where": lambda h, _: torch.where(h > 0, h, h.neg().mul_(0.1)),
    "write columns": _write_columns,
    "write columns of gradient": _write_columns_of_gradient,
    "write rows": _write_rows,
    "mask in place": _mask_in_place,
    "split in place": _split_in_place,
    "running mean": _running_mean,
    "accumulate": _sum_of_powers,
    "accumulate rows": _accumulate_rows,
    "scatter_add_": _scatter_in_place,
    "scatter_reduce_": _scatter_max,
    "index_copy_": lambda h, _: torch.zeros_like(h).index_copy_(
        0, torch.arange(len(h)).flip(0), h
    ),
    "index_fill_": lambda h, _: h.mul(2).index_fill_(0, torch.arange(2), 0.0),
    "put_": lambda h, _: h.mul(2).put_(torch.arange(5), h[0, :5]),
    "index_put_": lambda h, _: h.mul(2).index_put_(
        (torch.arange(3),), h[:3], accumulate=True
    ),
    "cumsum_": lambda h, _: h.mul(2).cumsum_(1),
    "tril_": lambda h, _: h.mul(2).tril_(),
    "t_": lambda h, _: (h.mul(2).t_() + 1).t(),
    "fill_diagonal_": lambda h, _: h.mul(2).fill_diagonal_(0.0),
    "copy_": lambda h, _: torch.empty_like(h).copy_(h),
    "copy_ a type": lambda h, _: (
        torch.empty_like(h, dtype=torch.double).copy_(h).float()
    ),
    "pieces": _join_chunks,
    "detach_": lambda h, _: h + h.exp().detach_(),
    "normal_": lambda h, _: h + torch.empty_like(h).normal_(),
    "bernoulli_": lambda h, _: h * torch.empty_like(h).bernoulli_(0.7).div_(0.7),
    "renorm": lambda h, _: h.mul(2).renorm_(2, 0, 1.0),
    "layer norm": lambda h, _: F.layer_norm(h, h.shape[1:]).mul_(2),
    "batch norm": lambda h, _: F.batch_norm(h, None, None, training=True).relu_(),
    "gelu": lambda h, _: F.gelu(h),
    "softmax": lambda h, _: h.softmax(1),
}


def in_place(rng):
    """Rows through linear layers and operators that write into their operands."""
    count = rng.choice([7, 60, 300, 900])
    in_width = rng.choice([16, 64])
    layers, functions, names = [], [], []
    width = in_width
    for _ in range(rng.randint(1, 4)):
        out_width = rng.choice([32, 100, 256])
        layers.append(nn.Linear(width, out_width, bias=rng.random() < 0.7))
        width = out_width
        chosen = rng.choices(list(IN_PLACE), k=rng.choice([1, 1, 2]))
        functions.append(_composed([IN_PLACE[name] for name in chosen]))
        names.append(" + ".join(chosen))
    model = Chain(layers, functions)
    words = f"in place: {count} rows, {', '.join(names)}"
    return Trained(words, model, torch.randn(count, in_width)), {}


def _composed(functions):
    def apply(hidden, model):
        for function in functions:
            hidden = function(hidden, model)
        return hidden

    return apply


class Region(nn.Module):
    """Layers under a region of autocast, or without it."""

    def __init__(self, inner, dtype, *, enabled, cached, times):
        super().__init__()
        self.inner, self.dtype, self.times = inner, dtype, times
        self.enabled, self.cached = enabled, cached

    def forward(self, x):
        region = torch.autocast(
            "cpu", self.dtype, enabled=self.enabled, cache_enabled=self.cached
        )
        with region:
            if not self.enabled:
                x = x.float()
            for _ in range(self.times):
                x = self.inner(x)
        return x


class Attending(nn.Module):
    """Attention of a sequence to itself, without a batch's rows in between."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x):
        return x + self.inner(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """A recurrent layer, without its state."""

    def __init__(self, kind, width):
        super().__init__()
        self.inner = kind(width, width, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


class WithoutGradient(nn.Module):
    """Asks a layer twice, once without gradients: autocast keeps its copies."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.no_grad():
            teacher = self.inner(x)
        return self.inner(x) + teacher


def _region_layer(rng, width):
    kind = rng.choice(
        [
            "linear",
            "linear",
            "mlp",
            "attention",
            "lstm",
            "gru",
            "norm",
            "conv",
            "teacher",
            "act",
        ]
    )
    layers = {
        "linear": lambda: nn.Linear(width, width, bias=rng.random() < 0.7),
        "mlp": lambda: nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        ),
        "attention": lambda: Attending(width),
        "lstm": lambda: Recurrent(nn.LSTM, width),
        "gru": lambda: Recurrent(nn.GRU, width),
        "norm": lambda: nn.LayerNorm(width),
        "conv": lambda: nn.Sequential(
            _Transposed(nn.Conv1d(width, width, 3, padding=1)), nn.ReLU()
        ),
        "teacher": lambda: WithoutGradient(nn.Linear(width, width)),
        "act": lambda: rng.choice([nn.SiLU, nn.Softplus, nn.GELU, nn.Tanh])(),
    }
    return kind, layers[kind]()


class _Transposed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


def autocast(rng):
    """Sequences through layers, some in regions of autocast, some shared."""
    count, length, width = (
        rng.choice([2, 8, 20]),
        rng.choice([5, 30]),
        rng.choice([32, 64, 128]),
    )
    layers, names = [], []
    for _ in range(rng.randint(1, 4)):
        kind, layer = _region_layer(rng, width)
        how = rng.choice(["plain", "region", "region", "off", "uncached", "shared"])
        names.append(f"{kind} {how}")
        dtype = torch.bfloat16 if rng.random() < 0.85 else torch.float16
        if how != "plain":
            layer = Region(
                layer,
                dtype,
                enabled=how != "off",
                cached=how != "uncached",
                times=2 if how == "shared" else 1,
            )
        layers.append(layer)
        if layers and rng.random() < 0.2:
            layers.append(layers[0])
            names.append("first again")
    head = nn.Linear(width, 10)
    model = nn.Sequential(*layers, _Float(), head)
    dtype = rng.choice([None, torch.bfloat16, torch.bfloat16])
    x = torch.randn(count, length, width)
    batch, loss = x, None
    if rng.random() < 0.5:
        batch = (x, torch.randint(0, 10, (count, length)))
        loss = _cross_entropy
        names.append("cross entropy")
    description = f"autocast: {count} x {length} x {width}, {', '.join(names)}"
    return Trained(description, model, batch, loss), {"autocast": dtype}


class _Float(nn.Module):
    def forward(self, x):
        return x.float()


def _cross_entropy(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Tables(nn.Module):
    """Tables of words, some with sparse gradients, each read once or twice."""

    def __init__(self, tables, head, *, twice, ways):
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self.head, self.twice, self.ways = head, twice, ways

    def forward(self, words):
        parts = []
        for table, way in zip(self.tables, self.ways, strict=True):
            parts.append(_look_up_words(table, words % table.num_embeddings, way))
            if self.twice:
                shifted = (words + 1) % table.num_embeddings
                parts.append(_look_up_words(table, shifted, way))
        hidden = torch.cat(parts, -1)
        return hidden if self.head is None else self.head(hidden)


def _look_up_words(table, words, way):
    if isinstance(table, nn.EmbeddingBag):
        return table(words)
    rows = table(words)
    if way == "mean":
        return rows.mean(1)
    if way == "scaled":
        return rows.sum(1) * 2
    return rows.flatten(1)


class DenseAndSparse(torch.optim.Optimizer):
    """SparseAdam for sparse tables, Adam for the rest, as recommenders train."""

    def __init__(self, sparse, dense):
        self.sparse = torch.optim.SparseAdam(sparse, lr=1e-3)
        self.dense = torch.optim.Adam(dense, lr=1e-3)
        groups = self.sparse.param_groups + self.dense.param_groups
        super().__init__(groups, {})

    def step(self, closure=None):  # noqa: ARG002 -- as torch's optimizers have it
        self.sparse.step()
        self.dense.step()
        self.state = {**self.sparse.state, **self.dense.state}


def sparse(rng):
    """Tables with sparse gradients, read by words, and sparse matrices."""
    if rng.random() < 0.3:
        return _sparse_matrix(rng)
    count, length = rng.choice([4, 30, 200]), rng.choice([1, 7, 20])
    tables, names, ways = [], [], []
    width = 0
    twice = rng.random() < 0.3
    for _ in range(rng.randint(1, 3)):
        rows, columns = rng.choice([50, 3000, 40_000]), rng.choice([8, 32, 64])
        is_sparse = rng.random() < 0.8
        way = rng.choice(["mean", "scaled", "flat"])
        if rng.random() < 0.3:
            table = nn.EmbeddingBag(
                rows, columns, mode=rng.choice(["sum", "mean"]), sparse=is_sparse
            )
            times = 1
        else:
            table = nn.Embedding(
                rows,
                columns,
                padding_idx=rng.choice([None, 0]),
                max_norm=rng.choice([None, None, None, 1.0]),
                scale_grad_by_freq=not is_sparse and rng.random() < 0.2,
                sparse=is_sparse,
            )
            times = length if way == "flat" else 1
        width += columns * times * (2 if twice else 1)
        tables.append(table)
        ways.append(way)
        names.append(
            f"{type(table).__name__} {rows} x {columns} {way} sparse {is_sparse}"
        )
    head = nn.Linear(width, 4) if rng.random() < 0.7 else None
    model = Tables(tables, head, twice=twice, ways=ways)
    batch = torch.randint(0, 40_000, (count, length))
    if rng.random() < 0.3:
        batch %= 10  # the same words again and again
        names.append("few words")
    optimizer = rng.choice(
        ["sgd", "sgd momentum", "sparse adam", "adagrad", "both", None]
    )
    names.append(f"twice {twice}, {optimizer}")

    def make(parameters):
        parameters = list(parameters)
        if optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.1)
        if optimizer == "sgd momentum":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        if optimizer == "sparse adam":
            return torch.optim.SparseAdam(parameters, lr=0.1)
        if optimizer == "adagrad":
            return torch.optim.Adagrad(parameters, lr=0.1)
        if head is None:
            return torch.optim.SGD(parameters, lr=0.1)
        order = [table.sparse for table in tables]
        chosen = [p for p, s in zip(parameters, order, strict=False) if s]
        others = [p for p in parameters if not any(p is c for c in chosen)]
        return DenseAndSparse(chosen, others)

    words = f"sparse: {count} x {length}, {', '.join(names)}"
    return Trained(words, model, batch), {"optimizer": make if optimizer else None}


class SparseProduct(nn.Module):
    """Multiplies by a sparse matrix that it holds, or makes."""

    def __init__(self, matrix, width, way):
        super().__init__()
        self.way, self.inner = way, nn.Linear(width, 32)
        if way == "weights":
            self.values = nn.Parameter(matrix.coalesce().values().clone())
            self.register_buffer("indices", matrix.coalesce().indices().clone())
            self.shape = matrix.shape
        else:
            self.register_buffer("matrix", matrix)

    def forward(self, x):
        hidden = self.inner(x)
        if self.way == "weights":
            matrix = torch.sparse_coo_tensor(self.indices, self.values, self.shape)
        else:
            matrix = self.matrix
        if self.way == "softmax":
            matrix = torch.sparse.softmax(matrix, 1)
        return torch.sparse.mm(matrix, hidden).relu()


def _sparse_matrix(rng):
    rows, width = rng.choice([50, 600]), rng.choice([8, 64])
    dense = torch.rand(rows, rows) * (torch.rand(rows, rows) < 0.1)
    way = rng.choice(["coo", "csr", "uncoalesced", "weights", "softmax"])
    matrix = dense.to_sparse()
    if way == "csr":
        matrix = dense.to_sparse_csr()
    elif way == "uncoalesced":
        matrix = torch.sparse_coo_tensor(
            matrix.indices().repeat(1, 2), matrix.values().repeat(2), matrix.shape
        )
    model = SparseProduct(matrix, width, way)
    return Trained(
        f"sparse matrix: {rows} x {width}, {way}", model, torch.randn(rows, width)
    ), {}


class AllPairs(nn.Module):
    """Every row meets every other, within its graph or across the batch."""

    def __init__(self, width, way):
        super().__init__()
        self.way, self.first = way, nn.Linear(16, width)
        self.pair = nn.Linear(2 * width + 1, width)
        self.last = nn.Linear(width, 1)
        self.conv = g.GCNConv(width, width)

    def forward(self, data):
        hidden = self.first(data.x)
        batch = data.batch
        if self.way == "cdist":
            distances = torch.cdist(hidden, hidden)
            hidden = (-distances).softmax(1) @ hidden
        elif self.way == "difference":
            hidden = (hidden[:, None] - hidden[None]).abs().sum(1)
        elif self.way == "same graph":
            same = batch[:, None] == batch[None]
            scores = (hidden @ hidden.t()).masked_fill(~same, -1e9)
            hidden = scores.softmax(1) @ hidden
        elif self.way == "pairs of the same graph":
            same = batch[:, None] == batch[None]
            source, target = same.nonzero().t()
            distance = (hidden[source] - hidden[target]).norm(dim=1, keepdim=True)
            pairs = torch.cat([hidden[source], hidden[target], distance], 1)
            messages = self.pair(pairs).relu()
            hidden = torch.zeros_like(hidden).index_add_(0, target, messages)
        elif self.way == "pairs":
            source, target = torch.triu_indices(len(hidden), len(hidden), 1)
            hidden = hidden.index_add(
                0, target, (hidden[source] * hidden[target]).relu()
            )
        elif self.way == "neighbours":
            near = torch.cdist(hidden, hidden).topk(5, largest=False).indices
            hidden = hidden + hidden[near].mean(1)
        elif self.way == "radius":
            near = (torch.cdist(data.x, data.x) < 4.0).nonzero().t()
            hidden = self.conv(hidden, near)
        elif self.way == "dense":
            dense, mask = to_dense_batch(hidden, batch)
            scores = (dense @ dense.transpose(1, 2)).masked_fill(~mask[:, None], -1e9)
            hidden = (scores.softmax(2) @ dense)[mask]
        elif self.way == "dense pairs":
            dense, mask = to_dense_batch(hidden, batch)
            pairs = dense[:, :, None] * dense[:, None]
            hidden = (pairs.relu().sum(2))[mask]
        elif self.way == "block by block":
            sizes = batch.bincount().tolist()
            parts = [
                (part @ part.t()).softmax(1) @ part for part in hidden.split(sizes)
            ]
            hidden = torch.cat(parts)
        return self.last(g.global_mean_pool(hidden, batch))


ALL_PAIRS = (
    "cdist",
    "difference",
    "same graph",
    "pairs of the same graph",
    "pairs",
    "neighbours",
    "radius",
    "dense",
    "dense pairs",
    "block by block",
)


def all_pairs(rng):
    """Graphs whose nodes all see each other."""
    batch = some_graphs(rng)
    way, width = rng.choice(ALL_PAIRS), rng.choice([8, 32])
    words = f"all pairs: {batch.num_nodes} nodes, {width}, {way}"
    return Trained(words, AllPairs(width, way), batch), {}


def _every_other_row(x):
    return x.repeat_interleave(2, 0)[::2]


VIEWS = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "last axes swapped": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "transposed in memory": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other row": _every_other_row,
    "a slice of columns": lambda x: torch.cat([x, x], 2)[..., : x.size(2)],
    "expanded": lambda x: x[:1].expand(len(x), -1, -1),
    "from the second row": lambda x: x[1:],
    "one row": lambda x: x[:1],
    "a step": lambda x: x[:, 1],
    "short": lambda x: x.bfloat16().float().transpose(0, 1),
}


def _attend_to_itself(x):
    return F.scaled_dot_product_attention(x, x, x)


def _bmm(x):
    return x @ x.transpose(-1, -2) if x.dim() == 3 else x @ x.t()


MIXING = {
    "attention": _attend_to_itself,
    "bmm": _bmm,
    "softmax": lambda x: x.softmax(-1),
    "softmax of the first axis": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(-1),
    "einsum": lambda x: torch.einsum("...i,...i->...", x, x),
    "einsum of rows": lambda x: torch.einsum(
        "...i,ij->...j", x, torch.ones(x.size(-1), 9)
    ),
    "tensordot": lambda x: torch.tensordot(x, torch.ones(x.size(-1), 9), 1),
    "contiguous": lambda x: x.contiguous() * 2,
    "reshape": lambda x: x.reshape(-1) * 2,
    "flatten": lambda x: x.flatten().exp(),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "cat": lambda x: torch.cat([x, x.neg()], -1),
    "pad": lambda x: F.pad(x, (1, 2)),
    "gelu": F.gelu,
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine": lambda x: F.cosine_similarity(x, x.flip(0), dim=-1),
    "var": lambda x: x.var(-1),
    "std of the first axis": lambda x: x.std(0, unbiased=False),
    "clamp": lambda x: x.clamp(-1, 1),
    "where": lambda x: torch.where(x > 0, x, 0.1),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(-1)[0],
    "pairwise": lambda x: F.pairwise_distance(x, x.flip(0)),
    "amax": lambda x: x.amax(-1),
    "prod": lambda x: x.prod(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "outer": lambda x: x.unsqueeze(-1) * x.unsqueeze(-2),
    "kron": lambda x: torch.kron(x, torch.ones(2)),
    "diff": lambda x: x.diff(dim=0),
    "mean of squares": lambda x: x.pow(2).mean(-1, keepdim=True).rsqrt() * x,
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "feature dropout": lambda x: F.dropout1d(x, 0.2, training=True),
    "unfold": lambda x: x.unfold(-1, 4, 2),
    "take_along_dim": lambda x: x.take_along_dim(x.detach().argsort(-1), -1),
    "repeat": lambda x: x.repeat(2, *[1] * (x.dim() - 1)),
    "stack": lambda x: torch.stack([x, x.tanh()]).mean(0),
    "chunk": lambda x: sum(part.sum() for part in x.chunk(3, -1)),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "baddbmm": lambda x: torch.baddbmm(x, _bmm(x), x) if x.dim() == 3 else x * 2,
    "lerp": lambda x: x.lerp(x.flip(0), 0.3),
    "logsumexp": lambda x: x.logsumexp(-1),
    "rotary": lambda x: torch.cat([x[..., ::2] * 0.5, x[..., 1::2] * -0.5], -1),
}


class OnViews(nn.Module):
    """Layers and functions on what does not lie row after row in memory."""

    def __init__(self, width, layers, view, function):
        super().__init__()
        self.first, self.layers = nn.Linear(width, width), nn.ModuleList(layers)
        self.view, self.function = view, function

    def forward(self, x):
        hidden = self.view(self.first(x))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.function(hidden)


def views(rng):
    """Layers, then an operator, on transposed, sliced and expanded inputs."""
    count, length, width = (
        rng.choice([6, 20, 60]),
        rng.choice([9, 30]),
        rng.choice([32, 64]),
    )
    name, function = rng.choice(list(VIEWS)), rng.choice(list(MIXING))
    layers = []
    for _ in range(rng.randint(0, 2)):
        kinds = [
            lambda: nn.Linear(width, width),
            lambda: nn.Linear(width, width, bias=False),
            lambda: nn.LayerNorm(width),
            lambda: nn.RMSNorm(width),
            nn.ReLU,
            nn.PReLU,
            nn.Softplus,
            lambda: nn.Dropout(0.2),
            lambda: nn.GRU(width, width),
            lambda: nn.LSTM(width, width),
            lambda: nn.MultiheadAttention(width, 4),
        ]
        layer = rng.choice(kinds)()
        if isinstance(layer, nn.RNNBase):
            layer = _First(layer)
        elif isinstance(layer, nn.MultiheadAttention):
            layer = _OfItself(layer)
        layers.append(layer)
    words = ", ".join(type(getattr(layer, "inner", layer)).__name__ for layer in layers)
    model = OnViews(width, layers, VIEWS[name], MIXING[function])
    words = (
        f"views: {count} x {length} x {width}, {name}, {words or 'nothing'}, {function}"
    )
    return Trained(words, model, torch.randn(count, length, width)), {}


class _First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class _OfItself(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x, x)[0]


FAMILIES = {
    "views": views,
    "in place": in_place,
    "autocast": autocast,
    "sparse": sparse,
    "all pairs": all_pairs,
}


def draw_storage_step(seed, family):
    """Draw a step of a family; the same seed always gives the same."""
    rng = random.Random(f"{family} {seed}")
    torch.manual_seed(seed)
    trained, options = FAMILIES[family](rng)
    if "optimizer" not in options:
        options["optimizer"] = rng.choice(["sgd", "adam", None])
    if "autocast" not in options and rng.random() < 0.15:
        options["autocast"] = torch.bfloat16
    if rng.random() < 0.1:
        options["checkpoint"] = True
    description = f"{seed}: {trained.description}; {options}"
    step = Step(trained.loss, **options)
    return DrawnStep(
        description, trained.model, trained.batch, step, rng.choice([1, 2])
    )
