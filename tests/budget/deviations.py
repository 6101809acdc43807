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

from loaderkit.budget.cutting import count_samples, cut, in_float64, weight_of
from loaderkit.budget.step.train_step import call_model, loss_of


@dataclass(frozen=True)
class Case:
    """A step in pieces."""

    model: Any
    batch: Any
    loss: Any = None
    """Of the output and the target; None where the model gives its own."""
    weigh: Any = "samples"
    """What says how much a piece counts: samples, nodes, tokens."""
    piece: int = 3
    """Samples of a piece."""


def deviation(case):
    """Say by how much pieces differ from the whole, as a share of the gradient."""
    model = copy.deepcopy(case.model).double()
    # Dropout draws other numbers for pieces: that is chance, and no deviation.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()

    batch = in_float64(case.batch)
    total = count_samples(batch)
    starts = range(0, total, case.piece)
    pieces = [cut(batch, start, min(start + case.piece, total)) for start in starts]

    whole = _gradient_of_pieces(model, [(batch, 1.0)], case.loss)
    weights = [weight_of(piece, case.weigh) for piece in pieces]
    shares = [weight / sum(weights) for weight in weights]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a statistic of one sample
        in_pieces = _gradient_of_pieces(
            model, list(zip(pieces, shares, strict=True)), case.loss
        )
    return float((whole - in_pieces).norm() / whole.norm())


def _gradient_of_pieces(model, pieces, loss):
    # The statistics of a norm move with every call; the next caller wants its own.
    state = copy.deepcopy(model.state_dict())
    model.zero_grad()
    for piece, share in pieces:
        output = call_model(model, piece, paired=loss is not None)
        (loss_of(output, piece, loss) * share).backward()
    model.load_state_dict(state)
    gradients = [
        parameter.grad.flatten()
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    return torch.cat(gradients)


# Rows of numbers, and losses over them.


def _small_net(rng, wide=5):
    return nn.Sequential(
        nn.Linear(6, 16), rng.choice([nn.ReLU, nn.Tanh, nn.GELU])(), nn.Linear(16, wide)
    )


def _rows_case(rng, loss, target=None, **options):
    count = rng.randint(7, 24)
    wanted = torch.randn(count, 5) if target is None else target(count)
    return Case(
        _small_net(rng),
        (torch.randn(count, 6), wanted),
        loss,
        piece=rng.randint(2, 6),
        **options,
    )


def _draw_classes(count):
    return torch.randint(0, 5, (count,))


def class_weights(rng):
    weight = torch.tensor([rng.uniform(0.1, 3) for _ in range(5)])
    return _rows_case(
        rng, lambda o, t: F.cross_entropy(o, t, weight.to(o)), _draw_classes
    )


def class_weights_sorted(rng):
    """Labels in order: the first samples are of one class."""
    weight = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0])
    return _rows_case(
        rng,
        lambda o, t: F.cross_entropy(o, t, weight.to(o)),
        lambda n: torch.arange(n) * 5 // n,
    )


def ignore_index(rng):
    def some(count):
        target = _draw_classes(count)
        target[torch.rand(count) < rng.uniform(0.2, 0.6)] = -100
        target[-1] = 1
        return target

    return _rows_case(rng, F.cross_entropy, some)


def ignore_late(rng):
    """Nothing is ignored in the first samples."""

    def some(count):
        target = _draw_classes(count)
        target[count * 2 // 3 : -1] = -100
        return target

    return _rows_case(rng, F.cross_entropy, some)


def summed(rng):
    return _rows_case(rng, lambda o, t: F.mse_loss(o, t, reduction="sum"))


def root(rng):
    return _rows_case(rng, lambda o, t: F.mse_loss(o, t).sqrt())


def largest(rng):
    return _rows_case(rng, lambda o, t: (o - t).square().mean(1).max())


def median(rng):
    return _rows_case(rng, lambda o, t: (o - t).abs().mean(1).median())


def hardest(rng):
    """A mean over the two worst samples, which only pieces of three can show."""
    case = _rows_case(
        rng, lambda o, t: (o - t).square().mean(1).topk(min(2, len(o)))[0].mean()
    )
    return replace(case, piece=rng.randint(3, 6))


def info_nce(rng):
    def loss(o, t):
        near = F.normalize(o) @ F.normalize(t).t() / 0.2
        return F.cross_entropy(near, torch.arange(len(o)))

    return _rows_case(rng, loss)


def supervised_contrast(rng):
    def loss(o, t):
        near = F.normalize(o) @ F.normalize(o).t()
        same = (t[:, None] == t[None]).to(o)
        return ((near - same) ** 2).mean()

    return _rows_case(rng, loss, _draw_classes)


def decorrelation(rng):
    """Barlow twins: a correlation over the batch."""

    def loss(o, t):
        a, b = (o - o.mean(0)) / (o.std(0) + 1e-3), (t - t.mean(0)) / (t.std(0) + 1e-3)
        return ((a.t() @ b / len(o) - torch.eye(5).to(o)) ** 2).mean()

    return _rows_case(rng, loss)


def variance(rng):
    return _rows_case(rng, lambda o, t: F.mse_loss(o, t) + F.relu(1 - o.var(0)).mean())


def cox(rng):
    """A partial likelihood: each sample against those that live longer."""

    def loss(o, t):
        risk = o.mean(1)[t.argsort(descending=True)]
        return -(risk - risk.logcumsumexp(0)).mean()

    return _rows_case(rng, loss, lambda n: torch.rand(n))


def balance(rng):
    """A mixture of experts' loss: shares over the batch, squared."""

    def loss(o, t):
        shares = o.softmax(1).mean(0)
        return F.mse_loss(o, t) + 0.1 * (shares**2).sum()

    return _rows_case(rng, loss)


def dice(rng):
    def loss(o, t):
        p, t = o.sigmoid(), (t > 0).to(o)
        return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)

    return _rows_case(rng, loss)


def masked_mean(rng):
    def loss(o, t):
        mask = (t > 0.3).to(o)
        return ((o - t) ** 2 * mask).sum() / mask.sum().clamp(min=1)

    return _rows_case(rng, loss)


def divided_by_a_number(rng):
    """A sum over samples, divided by what is right for full batches only."""
    return _rows_case(rng, lambda o, t: ((o - t) ** 2).sum() / 32)


def in_training_only(rng):
    """A norm of its own that uses the batch's mean while it trains."""
    case = _rows_case(rng, F.mse_loss)
    model = nn.Sequential(case.model[:2], _CentredInTraining(), case.model[2:])
    return replace(case, model=model)


class _CentredInTraining(nn.Module):
    def forward(self, x):
        return x - x.mean(0) if self.training else x


def in_training_beside_dropout(rng):
    case = in_training_only(rng)
    return replace(case, model=nn.Sequential(case.model, nn.Dropout(0.3)))


def batch_attention(rng):
    """Rows that look at each other."""
    case = _rows_case(rng, F.mse_loss)
    return replace(case, model=nn.Sequential(case.model, _AttentionOverBatch()))


class _AttentionOverBatch(nn.Module):
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


def _words_case(rng, ignored, weigh):
    count, length = rng.randint(6, 16), rng.randint(6, 20)
    lengths = torch.tensor([rng.randint(2, length) for _ in range(count)])
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    ids = torch.randint(0, 30, (count, length))
    labels = ids.masked_fill(mask == 0, -100)
    if ignored:
        # Prompts, which are not learnt.
        labels[:, : rng.randint(1, 2)] = -100
        labels[torch.rand(count, length) < rng.uniform(0, 0.5)] = -100
        labels[:, -1], labels[0, 2] = -100, 1
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return Case(_Tagger(), batch, weigh=weigh, piece=rng.randint(2, 4))


def causal_words_by_sample(rng):
    return _words_case(rng, False, "samples")


def prompts_by_token(rng):
    return _words_case(rng, True, "tokens")


# Graphs: norms and pools that are not told which nodes are of which graph.


class _NormedGraphs(nn.Module):
    def __init__(self, norm, pool=g.global_mean_pool, gets_batch=False):
        super().__init__()
        self.first, self.norm = g.GCNConv(5, 12), norm
        self.second, self.last = g.GCNConv(12, 12), nn.Linear(12, 1)
        self.pool, self.gets_batch = pool, gets_batch

    def forward(self, data):
        hidden = self.first(data.x, data.edge_index).relu()
        if self.norm is not None:
            arguments = (hidden, data.batch) if self.gets_batch else (hidden,)
            hidden = self.norm(*arguments)
        hidden = self.second(hidden, data.edge_index).relu()
        return self.last(self.pool(hidden, data.batch))


def _graphs_case(rng, model, loss=None, weigh="samples"):
    loss = loss or _mse_of_graphs
    graphs = []
    for _ in range(rng.randint(6, 14)):
        nodes = rng.randint(3, 25)
        graphs.append(
            Data(
                x=torch.randn(nodes, 5) + 1,
                edge_index=torch.randint(0, nodes, (2, 3 * nodes)),
                y=torch.randn(1, 1),
            )
        )
    batch = Batch.from_data_list(graphs)
    return Case(model, batch, loss, weigh, rng.randint(2, 4))


def _mse_of_graphs(output, batch):
    return F.mse_loss(output, batch.y)


def _norm_without_batch(kind):
    def make(rng):
        return _graphs_case(rng, _NormedGraphs(kind()))

    return make


class _NodeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = g.GCNConv(5, 12), nn.Linear(12, 1)

    def forward(self, data):
        return self.last(self.first(data.x, data.edge_index).relu())


def nodes_by_sample(rng):
    """A mean over nodes, weighed as if over graphs."""
    return _graphs_case(rng, _NodeModel(), lambda o, b: o.square().mean())


def softmax_over_all_nodes(rng):

    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(12, 1)

        def forward(self, hidden, batch):
            return g.global_add_pool(self.gate(hidden).softmax(0) * hidden, batch)

    return _graphs_case(rng, _NormedGraphs(None, Pool()))


NORMS_WITHOUT_BATCH = {
    "GraphNorm": lambda: g.GraphNorm(12),
    "PairNorm": lambda: g.PairNorm(),
    "LayerNorm": lambda: g.LayerNorm(12),
    "InstanceNorm": lambda: g.InstanceNorm(12),
    "MeanSubtractionNorm": lambda: g.MeanSubtractionNorm(),
    "GraphSizeNorm": lambda: g.GraphSizeNorm(),
}
_DEVIATING_KINDS = (
    class_weights,
    class_weights_sorted,
    ignore_index,
    ignore_late,
    summed,
    root,
    largest,
    median,
    hardest,
    info_nce,
    supervised_contrast,
    decorrelation,
    variance,
    cox,
    balance,
    dice,
    masked_mean,
    divided_by_a_number,
    in_training_only,
    in_training_beside_dropout,
    batch_attention,
    causal_words_by_sample,
    prompts_by_token,
    nodes_by_sample,
    softmax_over_all_nodes,
)
DEVIATING = {kind.__name__: kind for kind in _DEVIATING_KINDS}
for name, make_norm in NORMS_WITHOUT_BATCH.items():
    DEVIATING[f"{name} without batch"] = _norm_without_batch(make_norm)


# What pieces do equal.


def means(rng):
    losses = [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.soft_margin_loss,
        lambda o, t: F.kl_div(o.log_softmax(1), t.softmax(1), reduction="batchmean"),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.sigmoid()),
    ]
    return _rows_case(rng, rng.choice(losses))


def penalised(rng):
    """Weight decay in the loss, which pieces share like the mean."""
    case = _rows_case(rng, F.mse_loss)
    model = case.model

    class WithPenalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            penalty = sum(weight.square().sum() for weight in self.parameters())
            return self.inner(x), penalty

    def loss(output, target):
        prediction, penalty = output
        return F.mse_loss(prediction, target) + 0.1 * penalty

    return replace(case, model=WithPenalty(), loss=loss)


def dropped(rng):
    case = _rows_case(rng, F.mse_loss)
    return replace(case, model=nn.Sequential(case.model, nn.Dropout(0.4)))


def equal_classes(rng):
    return _rows_case(rng, F.cross_entropy, _draw_classes)


def words_by_mask(rng):
    return _words_case(rng, False, "tokens")


def graphs_told(rng):
    norm = rng.choice([g.GraphNorm, g.LayerNorm, g.InstanceNorm])
    return _graphs_case(rng, _NormedGraphs(norm(12), gets_batch=True))


def nodes_by_node(rng):
    return _graphs_case(rng, _NodeModel(), lambda o, b: o.square().mean(), "nodes")


def needs_two(rng):
    """A model that squeezes: a piece of one sample would lose its dimension."""
    case = _rows_case(rng, F.mse_loss)
    count = len(case.batch[0]) // 4 * 4

    def loss(o, t):
        return (torch.stack([o[:, 0], o[:, 1]]).squeeze() - t.t()[:2]).square().mean()

    x, target = case.batch
    return Case(
        nn.Sequential(case.model, _Squeezed()),
        (x[:count], target[:count]),
        loss,
        piece=4,
    )


class _Squeezed(nn.Module):
    def forward(self, x):
        x = x.squeeze()
        return x * x.new_ones(x.size(0), x.size(1))


_EQUAL_KINDS = (
    means,
    penalised,
    dropped,
    equal_classes,
    words_by_mask,
    graphs_told,
    nodes_by_node,
    needs_two,
)
EQUAL = {kind.__name__: kind for kind in _EQUAL_KINDS}


def draw_case(name, seed):
    """Draw a case of a kind; the same seed always gives the same."""
    torch.manual_seed(seed)
    return {**DEVIATING, **EQUAL}[name](random.Random(seed))
