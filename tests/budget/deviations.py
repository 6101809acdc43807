"""Steps whose pieces equal the whole, and steps whose pieces do not, drawn by chance.

Whether they do is not what anybody says of them: :func:`deviation` computes it in
float64, from the gradients of the whole batch and of its pieces.
"""

import copy
import random
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch_geometric.nn as g
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it
from torch_geometric.data import Batch, Data

from loaderkit.budget.pieces import count_samples, cut, in_float64, weight_of
from loaderkit.budget.train_step import call_model, loss_of


@dataclass(frozen=True)
class Case:
    """A step in pieces."""

    model: Any
    batch: Any
    loss: Any = None
    weigh: Any = "samples"
    piece: int = 3


def deviation(case):
    """Say by how much pieces differ from the whole, as a share of the gradient."""
    model = copy.deepcopy(case.model).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    batch = in_float64(case.batch)
    total = count_samples(batch)
    starts = range(0, total, case.piece)
    pieces = [cut(batch, i, min(i + case.piece, total)) for i in starts]
    whole = _gradient(model, [(batch, 1.0)], case.loss)
    weights = [weight_of(piece, case.weigh) for piece in pieces]
    shares = [weight / sum(weights) for weight in weights]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a statistic of one sample
        parts = _gradient(model, list(zip(pieces, shares, strict=True)), case.loss)
    return float((whole - parts).norm() / whole.norm())


def _gradient(model, pieces, loss):
    state = copy.deepcopy(model.state_dict())
    model.zero_grad()
    for piece, share in pieces:
        output = call_model(model, piece, paired=loss is not None)
        (loss_of(output, piece, loss) * share).backward()
    model.load_state_dict(state)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([grad.flatten() for grad in grads])


# Rows of numbers, and losses over them.


def _net(r, wide=5):
    return nn.Sequential(
        nn.Linear(6, 16), r.choice([nn.ReLU, nn.Tanh, nn.GELU])(), nn.Linear(16, wide)
    )


def _rows(r, loss, target=None, **options):
    count = r.randint(7, 24)
    wanted = torch.randn(count, 5) if target is None else target(count)
    return Case(
        _net(r), (torch.randn(count, 6), wanted), loss, piece=r.randint(2, 6), **options
    )


def _classes(count):
    return torch.randint(0, 5, (count,))


def class_weights(r):
    weight = torch.tensor([r.uniform(0.1, 3) for _ in range(5)])
    return _rows(r, lambda o, t: F.cross_entropy(o, t, weight.to(o)), _classes)


def class_weights_sorted(r):
    """Labels in order: the first samples are of one class."""
    weight = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0])
    return _rows(
        r,
        lambda o, t: F.cross_entropy(o, t, weight.to(o)),
        lambda n: torch.arange(n) * 5 // n,
    )


def ignore_index(r):
    def some(count):
        target = _classes(count)
        target[torch.rand(count) < r.uniform(0.2, 0.6)] = -100
        target[-1] = 1
        return target

    return _rows(r, F.cross_entropy, some)


def ignore_late(r):
    """Nothing is ignored in the first samples."""

    def some(count):
        target = _classes(count)
        target[count * 2 // 3 : -1] = -100
        return target

    return _rows(r, F.cross_entropy, some)


def summed(r):
    return _rows(r, lambda o, t: F.mse_loss(o, t, reduction="sum"))


def root(r):
    return _rows(r, lambda o, t: F.mse_loss(o, t).sqrt())


def largest(r):
    return _rows(r, lambda o, t: (o - t).square().mean(1).max())


def median(r):
    return _rows(r, lambda o, t: (o - t).abs().mean(1).median())


def hardest(r):
    """A mean over the two worst samples, which only pieces of three can show."""
    case = _rows(
        r, lambda o, t: (o - t).square().mean(1).topk(min(2, len(o)))[0].mean()
    )
    return replace(case, piece=r.randint(3, 6))


def info_nce(r):
    def loss(o, t):
        near = F.normalize(o) @ F.normalize(t).t() / 0.2
        return F.cross_entropy(near, torch.arange(len(o)))

    return _rows(r, loss)


def supervised_contrast(r):
    def loss(o, t):
        near = F.normalize(o) @ F.normalize(o).t()
        same = (t[:, None] == t[None]).to(o)
        return ((near - same) ** 2).mean()

    return _rows(r, loss, _classes)


def decorrelation(r):
    """Barlow twins: a correlation over the batch."""

    def loss(o, t):
        a, b = (o - o.mean(0)) / (o.std(0) + 1e-3), (t - t.mean(0)) / (t.std(0) + 1e-3)
        return ((a.t() @ b / len(o) - torch.eye(5).to(o)) ** 2).mean()

    return _rows(r, loss)


def variance(r):
    return _rows(r, lambda o, t: F.mse_loss(o, t) + F.relu(1 - o.var(0)).mean())


def cox(r):
    """A partial likelihood: each sample against those that live longer."""

    def loss(o, t):
        risk = o.mean(1)[t.argsort(descending=True)]
        return -(risk - risk.logcumsumexp(0)).mean()

    return _rows(r, loss, lambda n: torch.rand(n))


def balance(r):
    """A mixture of experts' loss: shares over the batch, squared."""

    def loss(o, t):
        shares = o.softmax(1).mean(0)
        return F.mse_loss(o, t) + 0.1 * (shares**2).sum()

    return _rows(r, loss)


def dice(r):
    def loss(o, t):
        p, t = o.sigmoid(), (t > 0).to(o)
        return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)

    return _rows(r, loss)


def masked_mean(r):
    def loss(o, t):
        mask = (t > 0.3).to(o)
        return ((o - t) ** 2 * mask).sum() / mask.sum().clamp(min=1)

    return _rows(r, loss)


def divided_by_a_number(r):
    """A sum over samples, divided by what is right for full batches only."""
    return _rows(r, lambda o, t: ((o - t) ** 2).sum() / 32)


def in_training_only(r):
    """A norm of its own that uses the batch's mean while it trains."""
    case = _rows(r, F.mse_loss)
    return Case(
        nn.Sequential(case.model[:2], _Centred(), case.model[2:]), case.batch,
        case.loss, piece=case.piece,
    )  # fmt: skip


class _Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0) if self.training else x


def in_training_beside_dropout(r):
    case = in_training_only(r)
    return Case(
        nn.Sequential(case.model, nn.Dropout(0.3)), case.batch, case.loss,
        piece=case.piece,
    )  # fmt: skip


def batch_attention(r):
    """Rows that look at each other."""
    case = _rows(r, F.mse_loss)
    return Case(
        nn.Sequential(case.model, _Look()), case.batch, case.loss, piece=case.piece
    )


class _Look(nn.Module):
    def forward(self, x):
        return x + (x @ x.t()).softmax(1) @ x


# Words: means over tokens of sequences that are padded.


class _Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(30, 8), nn.Linear(8, 30)

    def forward(self, input_ids, attention_mask, labels):
        out = self.last(self.table(input_ids) * attention_mask[..., None])
        return F.cross_entropy(out.flatten(0, 1), labels.flatten())


def _words(r, ignored, weigh):
    count, length = r.randint(6, 16), r.randint(6, 20)
    lengths = torch.tensor([r.randint(2, length) for _ in range(count)])
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    ids = torch.randint(0, 30, (count, length))
    labels = ids.masked_fill(mask == 0, -100)
    if ignored:  # prompts, which are not learnt
        labels[:, : r.randint(1, 2)] = -100
        labels[torch.rand(count, length) < r.uniform(0, 0.5)] = -100
        labels[:, -1], labels[0, 2] = -100, 1
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return Case(_Tagger(), batch, weigh=weigh, piece=r.randint(2, 4))


def causal_words_by_sample(r):
    return _words(r, False, "samples")


def prompts_by_token(r):
    return _words(r, True, "tokens")


# Graphs: norms and pools that are not told which nodes are of which graph.


class _OverGraphs(nn.Module):
    def __init__(self, norm, pool=g.global_mean_pool, told=False):
        super().__init__()
        self.first, self.norm = g.GCNConv(5, 12), norm
        self.second, self.last = g.GCNConv(12, 12), nn.Linear(12, 1)
        self.pool, self.told = pool, told

    def forward(self, data):
        hidden = self.first(data.x, data.edge_index).relu()
        if self.norm is not None:
            hidden = self.norm(hidden, data.batch) if self.told else self.norm(hidden)
        hidden = self.second(hidden, data.edge_index).relu()
        return self.last(self.pool(hidden, data.batch))


def _graphs(r, model, loss=None, weigh="samples", nodes=None):
    made = []
    for _ in range(r.randint(6, 14)):
        n = nodes or r.randint(3, 25)
        made.append(
            Data(
                x=torch.randn(n, 5) + 1,
                edge_index=torch.randint(0, n, (2, 3 * n)),
                y=torch.randn(1, 1),
            )
        )
    batch = Batch.from_data_list(made)
    return Case(
        model, batch, loss or (lambda o, b: F.mse_loss(o, b.y)), weigh, r.randint(2, 4)
    )


def _norm_without_batch(kind):
    def make(r):
        return _graphs(r, _OverGraphs(kind()))

    return make


class _ByNodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = g.GCNConv(5, 12), nn.Linear(12, 1)

    def forward(self, data):
        return self.last(self.first(data.x, data.edge_index).relu())


def nodes_by_sample(r):
    """A mean over nodes, weighed as if over graphs."""
    return _graphs(r, _ByNodes(), lambda o, b: o.square().mean())


def softmax_over_all_nodes(r):

    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(12, 1)

        def forward(self, hidden, batch):
            return g.global_add_pool(self.gate(hidden).softmax(0) * hidden, batch)

    return _graphs(r, _OverGraphs(None, Pool()))


DEVIATING = {
    **{
        kind.__name__: kind
        for kind in (
            class_weights, class_weights_sorted, ignore_index, ignore_late, summed,
            root, largest, median, hardest, info_nce, supervised_contrast,
            decorrelation, variance, cox, balance, dice, masked_mean,
            divided_by_a_number,
            in_training_only, in_training_beside_dropout, batch_attention,
            causal_words_by_sample, prompts_by_token, nodes_by_sample,
            softmax_over_all_nodes,
        )
    },
    **{
        f"{name} without batch": _norm_without_batch(kind)
        for name, kind in {
            "GraphNorm": lambda: g.GraphNorm(12),
            "PairNorm": lambda: g.PairNorm(),
            "LayerNorm": lambda: g.LayerNorm(12),
            "InstanceNorm": lambda: g.InstanceNorm(12),
            "MeanSubtractionNorm": lambda: g.MeanSubtractionNorm(),
            "GraphSizeNorm": lambda: g.GraphSizeNorm(),
        }.items()
    },
}  # fmt: skip


# What pieces do equal.


def means(r):
    losses = [
        F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss,
        lambda o, t: F.kl_div(
            o.log_softmax(1), t.softmax(1), reduction="batchmean"
        ),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.sigmoid()),
    ]  # fmt: skip
    return _rows(r, r.choice(losses))


def penalised(r):
    """Weight decay in the loss, which pieces share like the mean."""
    case = _rows(r, F.mse_loss)
    model = case.model

    class Penal(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x), sum(p.square().sum() for p in self.parameters())

    return Case(
        Penal(), case.batch, lambda o, t: F.mse_loss(o[0], t) + 0.1 * o[1],
        piece=case.piece,
    )  # fmt: skip


def dropped(r):
    case = _rows(r, F.mse_loss)
    return Case(
        nn.Sequential(case.model, nn.Dropout(0.4)), case.batch, case.loss,
        piece=case.piece,
    )  # fmt: skip


def equal_classes(r):
    return _rows(r, F.cross_entropy, _classes)


def words_by_mask(r):
    return _words(r, False, "tokens")


def graphs_told(r):
    norm = r.choice([g.GraphNorm, g.LayerNorm, g.InstanceNorm])
    return _graphs(r, _OverGraphs(norm(12), told=True))


def nodes_by_node(r):
    return _graphs(r, _ByNodes(), lambda o, b: o.square().mean(), "nodes")


def needs_two(r):
    """A model that squeezes: a piece of one sample would lose its dimension."""
    case = _rows(r, F.mse_loss)
    count = len(case.batch[0]) // 4 * 4

    def loss(o, t):
        return (torch.stack([o[:, 0], o[:, 1]]).squeeze() - t.t()[:2]).square().mean()

    return Case(
        nn.Sequential(case.model, _Squeezed()),
        tuple(each[:count] for each in case.batch), loss, piece=4,
    )  # fmt: skip


class _Squeezed(nn.Module):
    def forward(self, x):
        x = x.squeeze()
        return x * x.new_ones(x.size(0), x.size(1))


EQUAL = {
    kind.__name__: kind
    for kind in (
        means, penalised, dropped, equal_classes, words_by_mask, graphs_told,
        nodes_by_node, needs_two,
    )
}  # fmt: skip


def draw_case(name, seed):
    """Draw a case of a kind; the same seed always gives the same."""
    torch.manual_seed(seed)
    return {**DEVIATING, **EQUAL}[name](random.Random(seed))
