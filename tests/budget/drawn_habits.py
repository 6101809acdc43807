"""Training steps in ways of writing that the other grammars do not draw.

Packed recurrences of many kinds, state-space models by hand, convolutions by Fourier
transforms, attention in einsum, networks that make weights, derivatives inside a step,
checkpoints within checkpoints, complex and other algebras, graphs that update edges,
ragged rows, writes in place, several backward passes, and optimizers of users' own.
All were written down before any estimate of them was seen.
"""

import copy
import itertools
import random

import torch
import torch_geometric.nn as g
from drawn import DrawnStep, Trained
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it
from torch.nn.utils import parametrize, rnn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import scatter, softmax

from loaderkit.budget.step.train_step import Step


def _mlp(*widths):
    layers = []
    for width, wider in itertools.pairwise(widths):
        layers += [nn.Linear(width, wider), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Do(nn.Module):
    """Holds layers by name, and does with them what a function says."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            if isinstance(layer, torch.Tensor) and not isinstance(layer, nn.Parameter):
                self.register_buffer(name, layer)
            else:
                setattr(self, name, layer)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def _parameter(*shape):
    return nn.Parameter(torch.randn(*shape) * 0.1)


# Recurrences -------------------------------------------------------------------------


def packed_projected(rng):
    width, steps, count = rng.choice([8, 48]), rng.choice([5, 12]), rng.choice([4, 30])
    layers = rng.choice([1, 2])
    lstm = nn.LSTM(
        16, width, layers, bidirectional=True, proj_size=width // 2, dropout=0.1
    )

    def forward(m, x, lengths):
        out, (h, _) = m.lstm(rnn.pack_padded_sequence(x, lengths, enforce_sorted=False))
        padded, _ = rnn.pad_packed_sequence(out, total_length=steps)
        return padded.square().mean() + h.mean()

    lengths = torch.randint(1, steps + 1, (count,))
    batch = (torch.randn(steps, count, 16), lengths)
    words = f"{steps} x {count}, {layers} x {width}"
    return Trained(words, Do(forward, lstm=lstm), batch)


def packed_rows(rng):
    """A layer on the rows of a packed sequence, and recurrent layers around it."""
    width, count = rng.choice([16, 64]), rng.choice([3, 25])
    first = nn.GRU(20, width, batch_first=True)
    second = nn.RNN(width, width, nonlinearity=rng.choice(["relu", "tanh"]), bias=False)

    def forward(m, x, lengths):
        packed = rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        out, _ = m.first(packed)
        hidden = F.silu(m.between(out.data))
        out, _ = m.second(out._replace(data=hidden))
        return out.data.square().mean()

    lengths = torch.randint(2, 15, (count,))
    model = Do(forward, first=first, between=nn.Linear(width, width), second=second)
    return Trained(f"{count}, {width}", model, (torch.randn(count, 14, 20), lengths))


def packed_words(rng):
    """Embeds, packs, reads the last state, and scores classes."""
    width, count = rng.choice([16, 64]), rng.choice([6, 40])
    kind = rng.choice([nn.LSTM, nn.GRU])
    cell = kind(width, width, rng.choice([1, 2]), bidirectional=rng.random() < 0.5)

    def forward(m, words, lengths):
        hidden = F.dropout(m.table(words), 0.2, m.training)
        packed = rnn.pack_padded_sequence(hidden, lengths, enforce_sorted=False)
        out, _ = m.cell(packed)
        rows, lengths = rnn.pad_packed_sequence(out)
        mask = torch.arange(len(rows))[:, None] < lengths
        scores = m.score(rows).squeeze(-1).masked_fill(~mask, -torch.inf).softmax(0)
        return (scores[..., None] * rows).sum(0).square().mean()

    outputs = width * (2 if cell.bidirectional else 1)
    model = Do(
        forward,
        table=nn.Embedding(300, width, padding_idx=0),
        cell=cell,
        score=nn.Linear(outputs, 1),
    )
    batch = (torch.randint(300, (12, count)), torch.randint(1, 13, (count,)))
    return Trained(f"{count}, {width} {kind.__name__}", model, batch)


def cells(rng):
    """A cell in a loop, fed with its own answer or the truth."""
    width, count, steps = rng.choice([16, 64]), rng.choice([8, 100]), rng.choice([4, 9])
    kind = rng.choice(["gru", "lstm", "rnn"])
    cell = {"gru": nn.GRUCell, "lstm": nn.LSTMCell, "rnn": nn.RNNCell}[kind](8, width)

    def forward(m, x):
        state, value, out = None, x[:, 0], []
        for step in range(steps):
            state = m.cell(value, state)
            hidden = state[0] if kind == "lstm" else state
            value = m.head(hidden)
            out.append(value)
            if step % 3 == 2:
                value = x[:, step]
        return F.mse_loss(torch.stack(out, 1), x)

    model = Do(forward, cell=cell, head=nn.Linear(width, 8))
    return Trained(f"{kind} {count} {steps}", model, torch.randn(count, steps, 8))


def truncated(rng):
    """Parts of a sequence, each with its own backward pass; the state goes on."""
    width, count = rng.choice([16, 64]), rng.choice([4, 40])

    def forward(m, x):
        state = None
        *parts, last = x.chunk(3, 1)
        for part in parts:
            out, state = m.gru(part, state)
            out.square().mean().backward()
            state = state.detach()
        return m.gru(last, state)[0].square().mean()

    model = Do(forward, gru=nn.GRU(10, width, batch_first=True))
    return Trained(f"{count} {width}", model, torch.randn(count, 18, 10))


# States, scans, Fourier --------------------------------------------------------------


def diagonal_states(rng):
    """S4D: a kernel from complex powers, and a convolution by Fourier transforms."""
    width, states, length = rng.choice([8, 32]), 16, rng.choice([30, 200])

    def forward(m, x):
        step = m.log_step.exp()
        poles = -m.log_real.exp() + 1j * m.imaginary
        weights = torch.view_as_complex(m.weights)
        powers = (poles * step[:, None])[..., None] * torch.arange(length)
        scale = weights * (poles * step[:, None]).exp().sub(1) / poles
        kernel = 2 * torch.einsum("hn,hnl->hl", scale, powers.exp()).real
        spectrum = torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(
            kernel, n=2 * length
        )
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
        return F.glu(m.out(F.gelu(y + m.skip[:, None] * x)), 1).square().mean()

    model = Do(
        forward,
        log_step=_parameter(width),
        log_real=_parameter(width, states),
        imaginary=_parameter(width, states),
        weights=_parameter(width, states, 2),
        skip=_parameter(width),
        out=nn.Conv1d(width, 2 * width, 1),
    )
    count = rng.choice([2, 16])
    batch = torch.randn(count, width, length)
    return Trained(f"{count} x {width} x {length}", model, batch)


def doubling_scan(rng):
    """A linear recurrence whose steps are joined in powers of two."""
    width, length, count = (
        rng.choice([8, 40]),
        rng.choice([16, 50]),
        rng.choice([3, 20]),
    )

    def forward(m, x):
        a, b = torch.sigmoid(m.decay(x)), m.value(x)
        shift = 1
        while shift < length:
            before_a = F.pad(a[:, :-shift], (0, 0, shift, 0), value=1.0)
            before_b = F.pad(b[:, :-shift], (0, 0, shift, 0))
            a, b = a * before_a, a * before_b + b
            shift *= 2
        return m.out(b).square().mean()

    layers = {n: nn.Linear(width, width) for n in ("decay", "value", "out")}
    batch = torch.randn(count, length, width)
    return Trained(f"{count} x {length} x {width}", Do(forward, **layers), batch)


def chunked_states(rng):
    """Mamba 2: chunks of a sequence, masks of summed decays, states between chunks."""
    heads, width, states = rng.choice([2, 4]), rng.choice([8, 24]), 8
    chunks, size, count = rng.choice([2, 5]), rng.choice([8, 16]), rng.choice([2, 8])

    def segment_sums(decays):
        length = decays.size(-1)
        rows = decays[..., None].expand(*decays.shape, length)
        below = torch.ones(length, length, dtype=torch.bool).tril(-1)
        sums = rows.masked_fill(~below, 0).cumsum(-2)
        on_or_below = torch.ones(length, length, dtype=torch.bool).tril()
        return sums.masked_fill(~on_or_below, -torch.inf)

    def forward(m, x):
        n = len(x)
        parts = m.into(x).split([heads * width, states, states, heads], -1)
        shape = (n, chunks, size)
        v = parts[0].view(*shape, heads, width)
        b, c = parts[1].view(*shape, states), parts[2].view(*shape, states)
        decay = -F.softplus(parts[3]).view(*shape, heads).permute(0, 3, 1, 2)
        sums = decay.cumsum(-1)
        mask = segment_sums(decay).exp()
        inside = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, mask, v)
        to_end = (sums[..., -1:] - sums).exp()
        state = torch.einsum("bcln,bhcl,bclhp->bchpn", b, to_end, v)
        state = torch.cat([torch.zeros_like(state[:, :1]), state], 1)
        between = segment_sums(F.pad(sums[..., -1], (1, 0))).exp()
        state = torch.einsum("bhzc,bchpn->bzhpn", between, state)[:, :-1]
        across = torch.einsum("bcln,bchpn,bhcl->bclhp", c, state, sums.exp())
        return m.out((inside + across).reshape(n, chunks * size, -1)).square().mean()

    model = Do(
        forward,
        into=nn.Linear(12, heads * width + 2 * states + heads),
        out=nn.Linear(heads * width, 12),
    )
    words = f"{count} x {chunks} x {size}, {heads} x {width}"
    return Trained(words, model, torch.randn(count, chunks * size, 12))


def long_filters(rng):
    """Hyena: filters made by a network from positions, gates in between."""
    width, length, count = (
        rng.choice([8, 32]),
        rng.choice([40, 150]),
        rng.choice([2, 9]),
    )

    def forward(m, x):
        positions = torch.linspace(0, 1, length)[:, None]
        features = torch.cat(
            [positions, (positions * 9).sin(), (positions * 9).cos()], 1
        )
        filters = m.filters(features).view(length, 2, width).permute(1, 2, 0)
        filters = filters * (-3 * positions.T).exp()
        short = m.short(m.into(x).transpose(1, 2))[..., :length]
        v, *gates = short.chunk(3, 1)
        for gate, kernel in zip(gates, filters, strict=True):
            product = torch.fft.rfft(v, 2 * length) * torch.fft.rfft(kernel, 2 * length)
            v = (
                gate
                * torch.fft.irfft(product, 2 * length, norm="backward")[..., :length]
            )
        return v.square().mean()

    model = Do(
        forward,
        into=nn.Linear(width, 3 * width),
        short=nn.Conv1d(3 * width, 3 * width, 3, padding=2, groups=3 * width),
        filters=_mlp(3, 32, 2 * width),
    )
    batch = torch.randn(count, length, width)
    return Trained(f"{count} x {length} x {width}", model, batch)


def mixed_frequencies(rng):
    """AFNO: a perceptron on blocks of complex frequencies, shrunk softly."""
    blocks, width, size = 4, rng.choice([4, 12]), rng.choice([8, 20])
    count = rng.choice([2, 12])

    def forward(m, x):
        z = torch.fft.rfft2(x, dim=(1, 2), norm="ortho")
        z = z.reshape(*z.shape[:3], blocks, width)
        w1, w2 = torch.view_as_complex(m.first), torch.view_as_complex(m.second)
        hidden = torch.einsum("bxyki,kio->bxyko", z, w1)
        hidden = torch.complex(hidden.real.relu(), hidden.imag.relu())
        hidden = torch.einsum("bxyki,kio->bxyko", hidden, w2)
        pairs = F.softshrink(torch.view_as_real(hidden), 0.01)
        z = torch.view_as_complex(pairs).reshape(*z.shape[:3], blocks * width)
        y = torch.fft.irfft2(z, s=(size, size), dim=(1, 2), norm="ortho") + x
        return m.head(y).square().mean()

    model = Do(
        forward,
        first=_parameter(blocks, width, width, 2),
        second=_parameter(blocks, width, width, 2),
        head=nn.Linear(blocks * width, 3),
    )
    batch = torch.randn(count, size, size, blocks * width)
    return Trained(f"{count} x {size} x {width}", model, batch)


# Attention in einsum -----------------------------------------------------------------


def einsum_attention(rng):
    heads, width = rng.choice([1, 4]), rng.choice([8, 16])
    length, count = rng.choice([6, 70]), rng.choice([2, 12])
    way = rng.choice(["cosine", "relative", "talking", "decay", "softcap"])

    def forward(m, x):
        q, k, v = (
            torch.einsum("bld,hdk->bhlk", x, weight) for weight in (m.q, m.k, m.v)
        )
        if way == "cosine":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        scores = torch.einsum("bhik,bhjk->bhij", q, k)
        if way == "relative":
            offset = torch.arange(length)[:, None] - torch.arange(length) + length
            scores = scores + torch.einsum("bhik,ijk->bhij", q, m.table(offset))
        if way == "softcap":
            scores = 30 * torch.tanh(scores / 30)
        if way == "decay":
            steps = torch.arange(length)
            decay = 0.9 ** (steps[:, None] - steps).clamp(min=0)
            weights = scores * decay.tril()
        else:
            weights = scores.softmax(-1)
        if way == "talking":
            weights = torch.einsum("bhij,hg->bgij", weights, m.talk)
        out = torch.einsum("bhij,bhjk->bihk", weights, v).flatten(2)
        return m.out(out).square().mean()

    model = Do(
        forward,
        **{name: _parameter(heads, 20, width) for name in "qkv"},
        table=nn.Embedding(2 * length + 1, width) if way == "relative" else None,
        talk=_parameter(heads, heads) if way == "talking" else None,
        out=nn.Linear(heads * width, 20),
    )
    words = f"{way} {count} x {length}, {heads} x {width}"
    return Trained(words, model, torch.randn(count, length, 20))


def nystrom(rng):
    """Attention by landmarks, with an inverse that is found in steps."""
    width, length, count = (
        rng.choice([8, 32]),
        rng.choice([32, 96]),
        rng.choice([2, 10]),
    )

    def forward(m, x):
        q, k, v = m.qkv(x).chunk(3, -1)
        near_q, near_k = (t.view(count, 8, -1, width).mean(2) for t in (q, k))
        first = (q @ near_k.mT).softmax(-1)
        middle = (near_q @ near_k.mT).softmax(-1)
        last = (near_q @ k.mT).softmax(-1)
        eye = torch.eye(8)
        z = middle.mT / (middle.abs().sum(-2).max() * middle.abs().sum(-1).max())
        for _ in range(3):
            product = middle @ z
            inner = 7 * eye - product
            z = 0.25 * z @ (13 * eye - product @ (15 * eye - product @ inner))
        return (first @ z @ (last @ v)).square().mean()

    model = Do(forward, qkv=nn.Linear(width, 3 * width))
    batch = torch.randn(count, length, width)
    return Trained(f"{count} x {length} x {width}", model, batch)


def triangles(rng):
    """Pairs of residues: products along the third one, and means of outer products."""
    count, rows, width = rng.choice([1, 3]), rng.choice([6, 24]), rng.choice([4, 16])

    def forward(m, pairs, rows_of_many):
        a, b = m.a(rows_of_many), m.b(rows_of_many)
        pairs = pairs + m.outer(torch.einsum("bsia,bsjc->bijac", a, b).flatten(-2) / 5)
        normed = m.norm(pairs)
        left = m.left(normed) * m.left_gate(normed).sigmoid()
        right = m.right(normed) * m.right_gate(normed).sigmoid()
        pairs = pairs + m.out(torch.einsum("bikd,bjkd->bijd", left, right))
        pairs = pairs + m.out(torch.einsum("bkid,bkjd->bijd", left, right))
        return pairs.square().mean()

    names = ("left", "right", "left_gate", "right_gate", "out")
    model = Do(
        forward,
        **{name: nn.Linear(width, width) for name in names},
        norm=nn.LayerNorm(width),
        a=nn.Linear(9, 4),
        b=nn.Linear(9, 4),
        outer=nn.Linear(16, width),
    )
    batch = (torch.randn(count, rows, rows, width), torch.randn(count, 5, rows, 9))
    return Trained(f"{count} x {rows} x {width}", model, batch)


def random_features(rng):
    """Performer: positive features, sums before products, causal by cumsum."""
    width, length, count = rng.choice([8, 32]), rng.choice([20, 90]), rng.choice([2, 9])
    causal = rng.random() < 0.5

    def forward(m, x):
        q, k, v = m.qkv(x).chunk(3, -1)

        def features(t):
            scores = t @ m.directions - t.square().sum(-1, keepdim=True) / 2
            return (scores - scores.amax(-1, keepdim=True).detach()).exp() + 1e-4

        q, k = features(q), features(k)
        if causal:
            context = torch.einsum("blm,bld->blmd", k, v).cumsum(1)
            out = torch.einsum("blm,blmd->bld", q, context)
            scale = torch.einsum("blm,blm->bl", q, k.cumsum(1))
        else:
            out = torch.einsum("blm,bmd->bld", q, torch.einsum("blm,bld->bmd", k, v))
            scale = torch.einsum("blm,bm->bl", q, k.sum(1))
        return (out / scale[..., None]).square().mean()

    model = Do(
        forward, qkv=nn.Linear(width, 3 * width), directions=torch.randn(width, 12)
    )
    batch = torch.randn(count, length, width)
    return Trained(f"{causal} {count} x {length} x {width}", model, batch)


# Weights from networks ---------------------------------------------------------------


def hyper_convolution(rng):
    """A network makes each image's kernels, which one grouped convolution applies."""
    channels, size, count = (
        rng.choice([4, 12]),
        rng.choice([8, 20]),
        rng.choice([3, 12]),
    )

    def forward(m, images, codes):
        kernels = m.make(codes).view(count * channels, channels, 3, 3)
        kernels = kernels * kernels.square().sum((1, 2, 3), True).add(1e-6).rsqrt()
        rows = images.reshape(1, count * channels, size, size)
        out = F.conv2d(rows, kernels, padding=1, groups=count)
        return F.leaky_relu(out.view_as(images) + images).square().mean()

    model = Do(forward, make=_mlp(10, 32, 9 * channels**2))
    batch = (torch.randn(count, channels, size, size), torch.randn(count, 10))
    return Trained(f"{count} x {channels} x {size}", model, batch)


def hyper_network(rng):
    """All weights of a small network are made by another, and called by name."""
    inner = _mlp(3, rng.choice([16, 48]), 1)
    shapes = {name: p.shape for name, p in inner.named_parameters()}
    count = rng.choice([50, 900])

    def forward(m, x):
        rows = m.make(m.code)
        weights, first = {}, 0
        for name, shape in shapes.items():
            weights[name] = rows[first : first + shape.numel()].view(shape)
            first += shape.numel()
        return functional_call(inner, weights, (x,)).square().mean()

    total = sum(shape.numel() for shape in shapes.values())
    model = Do(forward, make=_mlp(12, 32, total), code=_parameter(12))
    return Trained(f"{count}, {total}", model, torch.randn(count, 3))


def mixed_kernels(rng):
    """Several kernels and a mixture for each image; weights are standardised."""
    channels, size, count = (
        rng.choice([6, 16]),
        rng.choice([9, 24]),
        rng.choice([3, 10]),
    )

    def forward(m, images):
        shares = m.shares(images.mean((2, 3))).softmax(1)
        bank = m.bank - m.bank.mean((2, 3, 4), keepdim=True)
        bank = bank / (bank.std((2, 3, 4), keepdim=True) + 1e-5)
        kernels = torch.einsum("bn,noihw->boihw", shares, bank)
        out = vmap(lambda x, k: F.conv2d(x[None], k, padding=1)[0])(images, kernels)
        return m.norm(out).relu_().square().mean()

    model = Do(
        forward,
        shares=nn.Linear(channels, 4),
        bank=_parameter(4, channels, channels, 3, 3),
        norm=nn.GroupNorm(2, channels),
    )
    batch = torch.randn(count, channels, size, size)
    return Trained(f"{count} x {channels} x {size}", model, batch)


class _Skew(nn.Module):
    def forward(self, x):
        upper = x.triu(1)
        return upper - upper.T


class _Exponential(nn.Module):
    def forward(self, x):
        return torch.matrix_exp(x)


class _Positive(nn.Module):
    def forward(self, x):
        return F.softplus(x)

    def right_inverse(self, x):
        return x.expm1().clamp(min=1e-6).log()


def constrained(rng):
    """Parametrizations one on the other, cached in a step that uses them twice."""
    width, count = rng.choice([8, 40]), rng.choice([20, 400])
    net = _mlp(width, width, width, 2)
    parametrize.register_parametrization(net[0], "weight", _Skew())
    parametrize.register_parametrization(net[0], "weight", _Exponential())
    parametrize.register_parametrization(net[2], "bias", _Positive(), unsafe=True)
    cached = rng.random() < 0.5

    def forward(m, x):
        if not cached:
            return (m.net(x) + m.net(x.flip(0))).square().mean()
        with parametrize.cached():
            return (m.net(x) + m.net(x.flip(0))).square().mean()

    return Trained(
        f"{count} x {width} {cached}", Do(forward, net=net), torch.randn(count, width)
    )


def old_norms(rng):
    """Hooks of torch's older functions, that compute a weight before each call."""
    width, count = rng.choice([8, 60]), rng.choice([20, 300])
    net = _mlp(width, 2 * width, width, 3)
    # The older weight_norm makes models that copy.deepcopy refuses.
    nn.utils.spectral_norm(net[2], n_power_iterations=rng.choice([1, 3]))
    return Trained(
        f"{count} x {width}",
        Do(lambda m, x: m.net(x).square().mean(), net=net),
        torch.randn(count, width),
    )


# Derivatives inside a step -----------------------------------------------------------


def meta_learning(rng):
    """Two inner steps for each task, differentiated through, by functional calls."""
    width, tasks, rows = rng.choice([16, 48]), rng.choice([2, 5]), rng.choice([10, 60])
    first_order = rng.random() < 0.3
    net = _mlp(4, width, width, 1)

    def forward(m, x, y):
        losses = []
        for task in range(tasks):
            weights = dict(m.net.named_parameters())
            for _ in range(2):
                out = functional_call(m.net, weights, (x[task],))
                slopes = torch.autograd.grad(
                    F.mse_loss(out, y[task]),
                    list(weights.values()),
                    create_graph=not first_order,
                )
                pairs = zip(weights.items(), slopes, strict=True)
                weights = {name: w - 0.1 * s for (name, w), s in pairs}
            losses.append(
                F.mse_loss(functional_call(m.net, weights, (x[task],)), y[task])
            )
        return torch.stack(losses).mean()

    batch = (torch.randn(tasks, rows, 4), torch.randn(tasks, rows, 1))
    words = f"{first_order} {tasks} x {rows} x {width}"
    return Trained(words, Do(forward, net=net), batch)


def private(rng):
    """Gradients of each sample, clipped by its norm, put into .grad."""
    width, count = rng.choice([16, 40]), rng.choice([6, 40])
    net = _mlp(7, width, width, 3)

    def forward(m, x, y):
        weights = {n: p.detach() for n, p in m.net.named_parameters()}

        def loss(weights, row, label):
            out = functional_call(m.net, weights, (row[None],))
            return F.cross_entropy(out, label[None])

        slopes = vmap(grad(loss), (None, 0, 0))(weights, x, y)
        norms = torch.stack([s.flatten(1).norm(dim=1) for s in slopes.values()]).norm(
            dim=0
        )
        factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, parameter in m.net.named_parameters():
            parameter.grad = torch.einsum("b,b...->...", factors, slopes[name])
        return 0.0 * sum(p.sum() for p in m.net.parameters())

    batch = (torch.randn(count, 7), torch.randint(3, (count,)))
    return Trained(f"{count} x {width}", Do(forward, net=net), batch)


def tangent_kernel(rng):
    width, count = rng.choice([8, 24]), rng.choice([4, 14])
    net = _mlp(5, width, 2)

    def forward(m, x):
        weights = dict(m.net.named_parameters())

        def outputs(weights, row):
            return functional_call(m.net, weights, (row,))

        slopes = vmap(jacrev(outputs), (None, 0))(weights, x)
        kernel = sum(
            torch.einsum("iap,jbp->ijab", s.flatten(2), s.flatten(2))
            for s in slopes.values()
        )
        matrix = kernel.mean((2, 3)) + 0.1 * torch.eye(count)
        return torch.linalg.slogdet(matrix)[1] / count

    return Trained(f"{count} x {width}", Do(forward, net=net), torch.randn(count, 5))


def laplacian(rng):
    """Second derivatives along each axis, by a forward over a backward pass."""
    width, count, axes = rng.choice([16, 48]), rng.choice([10, 120]), rng.choice([2, 3])
    net = nn.Sequential(
        nn.Linear(axes, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 1),
    )

    def forward(m, x):
        def value(row):
            return m.net(row).squeeze(-1)

        def along(row, direction):
            return jvp(grad(value), (row,), (direction,))[1] @ direction

        sums = vmap(lambda row: vmap(lambda d: along(row, d))(torch.eye(axes)).sum())(x)
        return (sums - 1).square().mean()

    return Trained(
        f"{count} x {axes} x {width}", Do(forward, net=net), torch.randn(count, axes)
    )


def pulled_back(rng):
    """The norm of a random vector times the Jacobian, and one power iteration."""
    width, count = rng.choice([16, 80]), rng.choice([10, 200])
    net = _mlp(width, width, width)

    def forward(m, x):
        out, pull = vjp(m.net, x)
        [slope] = pull(torch.randn_like(out))
        direction = F.normalize(slope, dim=-1).detach()
        _, stretched = jvp(m.net, (x,), (direction,))
        return out.square().mean() + stretched.norm(dim=-1).mean()

    return Trained(
        f"{count} x {width}", Do(forward, net=net), torch.randn(count, width)
    )


def langevin(rng):
    """An energy whose samples are found by noisy steps along its slope."""
    width, count, steps = (
        rng.choice([16, 80]),
        rng.choice([20, 300]),
        rng.choice([2, 6]),
    )

    def forward(m, x):
        samples = torch.randn_like(x)
        for _ in range(steps):
            samples = samples.detach().requires_grad_()
            [slope] = torch.autograd.grad(m.energy(samples).sum(), samples)
            samples = samples - 0.1 * slope + 0.01 * torch.randn_like(x)
        low, high = m.energy(x), m.energy(samples.detach())
        return (low - high).mean() + 0.1 * (low.square() + high.square()).mean()

    return Trained(
        f"{count} x {width} x {steps}",
        Do(forward, energy=_mlp(6, width, width, 1)),
        torch.randn(count, 6),
    )


# Checkpoints -------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, width, inner=None):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), _mlp(width, 4 * width, width)
        self.inner = inner

    def _without_checkpoint(self, x):
        x = x + self.mlp(self.norm(x))
        return x if self.inner is None else self.inner(x)

    def forward(self, x):
        if not self.training:
            return self._without_checkpoint(x)
        return checkpoint(self._without_checkpoint, x, use_reentrant=False)


def nested_checkpoints(rng):
    width, count, depth = (
        rng.choice([16, 48]),
        rng.choice([30, 300]),
        rng.choice([2, 3]),
    )
    block = None
    for _ in range(depth):
        block = _Block(width, block)

    def forward(m, x):
        return m.second(m.first(x)).square().mean()

    model = Do(forward, first=block, second=copy.deepcopy(block))
    return Trained(f"{count} x {width} x {depth}", model, torch.randn(count, width))


def sequential_checkpoints(rng):
    width, count, parts = (
        rng.choice([16, 64]),
        rng.choice([30, 300]),
        rng.choice([2, 3]),
    )
    net = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.SiLU())
            for _ in range(6)
        )
    )

    def forward(m, x):
        return (
            checkpoint_sequential(m.net, parts, x, use_reentrant=False).square().mean()
        )

    return Trained(
        f"{count} x {width} / {parts}", Do(forward, net=net), torch.randn(count, width)
    )


def chunked_head(rng):
    """Cross entropy over a large table, computed again chunk by chunk."""
    width, count, words = (
        rng.choice([16, 48]),
        rng.choice([60, 300]),
        rng.choice([500, 3000]),
    )

    def loss(rows, weight, labels):
        return F.cross_entropy(rows @ weight.T, labels, reduction="sum")

    def forward(m, x, labels):
        hidden, total = m.net(x), 0.0
        for rows, some in zip(hidden.split(50), labels.split(50), strict=True):
            total = total + checkpoint(loss, rows, m.table, some, use_reentrant=False)
        return total / count

    model = Do(forward, net=_mlp(8, width, width), table=_parameter(words, width))
    batch = (torch.randn(count, 8), torch.randint(words, (count,)))
    return Trained(f"{count} x {width} x {words}", model, batch)


# Other numbers -----------------------------------------------------------------------


def complex_network(rng):
    width, count = rng.choice([8, 40]), rng.choice([20, 200])

    def forward(m, x):
        z = torch.fft.fft(x)
        z = m.first(z)
        size = z.abs()
        z = F.relu(size + m.shift) * z / (size + 1e-5)
        centred = z - z.mean(0)
        z = centred / (centred * centred.conj()).real.mean(0).add(1e-5).sqrt()
        z = m.second(z)
        return (z.abs().square() + z.angle().cos()).mean()

    model = Do(
        forward,
        first=nn.Linear(24, width, dtype=torch.complex64),
        second=nn.Linear(width, 6, dtype=torch.complex64),
        shift=_parameter(width),
    )
    return Trained(f"{count} x {width}", model, torch.randn(count, 24))


def complex_images(rng):
    channels, size, count = rng.choice([3, 8]), rng.choice([8, 18]), rng.choice([2, 8])

    def forward(m, x):
        z = m.conv(torch.fft.fftshift(torch.fft.fft2(x), dim=(-2, -1)))
        z = torch.complex(F.gelu(z.real), F.gelu(z.imag))
        return torch.fft.ifft2(m.back(z)).abs().mean()

    model = Do(
        forward,
        conv=nn.Conv2d(2, channels, 3, padding=1, dtype=torch.complex64),
        back=nn.Conv2d(channels, 2, 1, dtype=torch.complex64),
    )
    return Trained(
        f"{count} x {channels} x {size}", model, torch.randn(count, 2, size, size)
    )


def quaternions(rng):
    width, count = rng.choice([4, 30]), rng.choice([20, 250])

    def forward(m, x):
        r, i, j, k = m.parts
        rows = [[r, -i, -j, -k], [i, r, -k, j], [j, k, r, -i], [k, -j, i, r]]
        weight = torch.cat([torch.cat(row, 1) for row in rows])
        out = F.linear(x, weight).view(count, 4, width)
        return F.normalize(out, dim=1).prod(1).sum()

    model = Do(forward, parts=_parameter(4, width, width))
    return Trained(f"{count} x {width}", model, torch.randn(count, 4 * width))


def hyperbolic(rng):
    """Words in the ball of Poincare, and distances of pairs."""
    width, count = rng.choice([4, 20]), rng.choice([50, 900])

    def forward(m, pairs):
        rows = m.table(pairs)
        rows = rows * (0.9 / rows.norm(dim=-1, keepdim=True).clamp(min=0.9))
        u, v = rows.unbind(1)
        gap = (u - v).square().sum(-1)
        room = (1 - u.square().sum(-1)) * (1 - v.square().sum(-1))
        return torch.acosh(1 + 2 * gap / room + 1e-6).mean()

    return Trained(
        f"{count} x {width}",
        Do(forward, table=nn.Embedding(200, width)),
        torch.randint(200, (count, 2)),
    )


# Graphs ------------------------------------------------------------------------------


def _some_graphs(rng, width=12):
    graphs = []
    for _ in range(rng.choice([3, 14])):
        nodes = rng.randint(4, 30)
        edges = torch.randint(nodes, (2, 3 * nodes))
        graphs.append(
            Data(
                x=torch.randn(nodes, width),
                edge_index=edges,
                edge_attr=torch.randn(edges.size(1), 5),
                pos=torch.randn(nodes, 3),
            )
        )
    return Batch.from_data_list(graphs)


def edge_updates(rng):
    """Edges, nodes and a state of each graph, one after the other, twice."""
    data, width = _some_graphs(rng), rng.choice([8, 40])

    def forward(m, data):
        src, dst = data.edge_index
        h, e = m.nodes_in(data.x), m.edges_in(data.edge_attr)
        u = h.new_zeros(data.num_graphs, width)
        for edge, node, whole in m.rounds:
            e = e + edge(torch.cat([h[src], h[dst], e, u[data.batch[src]]], 1))
            into = scatter(e, dst, 0, len(h), "mean")
            h = h + node(torch.cat([h, into, u[data.batch]], 1))
            totals = [scatter(h, data.batch, 0, reduce=way) for way in ("sum", "max")]
            u = u + whole(torch.cat([u, *totals], 1))
        return u.square().mean()

    rounds = nn.ModuleList(
        nn.ModuleList(
            [
                _mlp(4 * width, width, width),
                _mlp(3 * width, width),
                _mlp(3 * width, width),
            ]
        )
        for _ in range(2)
    )
    model = Do(
        forward,
        nodes_in=nn.Linear(12, width),
        edges_in=nn.Linear(5, width),
        rounds=rounds,
    )
    return Trained(f"{data.num_nodes} {width}", model, data)


def gated_messages(rng):
    """Messages by hand, a GRU cell at the nodes, and layers that jump ahead."""
    data, width = _some_graphs(rng), rng.choice([8, 40])
    mode = rng.choice(["lstm", "max", "cat"])
    options = {"channels": width, "num_layers": 3} if mode == "lstm" else {}

    def forward(m, data):
        src, dst = data.edge_index
        h, rows = m.into(data.x), []
        for _ in range(3):
            messages = m.message(h)[src] * m.gate(data.edge_attr).sigmoid()
            summed = torch.zeros_like(h).index_add_(0, dst, messages)
            h = m.cell(summed, h)
            rows.append(h)
        return g.global_add_pool(m.jump(rows), data.batch).square().mean()

    model = Do(
        forward,
        into=nn.Linear(12, width),
        message=nn.Linear(width, width),
        gate=nn.Linear(5, width),
        cell=nn.GRUCell(width, width),
        jump=g.JumpingKnowledge(mode, **options),
    )
    return Trained(f"{data.num_nodes} {width} {mode}", model, data)


def by_hand_attention(rng):
    """Softmax over the edges of each node, by scattered maxima and sums."""
    data, heads, width = _some_graphs(rng), rng.choice([1, 4]), rng.choice([8, 24])
    way = rng.choice(["own", "pyg", "csr"])

    def forward(m, data):
        src, dst = data.edge_index
        order = dst.argsort()
        src, dst, attr = src[order], dst[order], data.edge_attr[order]
        q, k, v = m.qkv(data.x).view(-1, 3, heads, width).unbind(1)
        scores = (q[dst] * (k[src] + m.edge(attr).view(-1, heads, width))).sum(-1)
        if way == "own":
            index = dst[:, None].expand_as(scores)
            top = scores.new_full((len(q), heads), -torch.inf)
            top = top.scatter_reduce(0, index, scores.detach(), "amax")
            weights = (scores - top[dst]).exp()
            sums = torch.zeros_like(top).scatter_add(0, index, weights)
            weights = weights / (sums[dst] + 1e-9)
        elif way == "pyg":
            weights = softmax(scores, dst, num_nodes=len(q))
        else:
            ptr = F.pad(torch.bincount(dst, minlength=len(q)).cumsum(0), (1, 0))
            weights = softmax(scores, ptr=ptr)
        rows = (v[src] * weights[..., None]).flatten(1)
        return scatter(rows, dst, 0, len(q)).square().mean()

    model = Do(
        forward, qkv=nn.Linear(12, 3 * heads * width), edge=nn.Linear(5, heads * width)
    )
    return Trained(f"{way} {data.num_nodes} {heads} x {width}", model, data)


def many_reductions(rng):
    """Eight statistics of each neighbourhood, torch's own reductions."""
    data, width = _some_graphs(rng), rng.choice([8, 40])

    def forward(m, data):
        src, dst = data.edge_index
        rows = m.message(torch.cat([data.x[src], data.x[dst]], 1))
        index = dst[:, None].expand_as(rows)
        zeros = rows.new_zeros(data.num_nodes, width)
        columns = [
            zeros.scatter_reduce(0, index, rows, way, include_self=way != "mean")
            for way in ("sum", "mean", "amax", "amin")
        ]
        columns.append(zeros.index_reduce(0, dst, rows, "amax"))
        mean = columns[1]
        square = zeros.scatter_reduce(0, index, rows.square(), "mean")
        columns.append((square - mean.square()).relu().add(1e-5).sqrt())
        return m.out(torch.cat(columns, 1)).square().mean()

    model = Do(forward, message=_mlp(24, width, width), out=nn.Linear(6 * width, 4))
    return Trained(f"{data.num_nodes} {width}", model, data)


def heterogeneous(rng):
    """Types of nodes with layers that know of types."""
    data, width = HeteroData(), rng.choice([8, 32])
    counts = {"user": rng.randint(5, 60), "item": rng.randint(5, 60), "tag": 7}
    for name, count in counts.items():
        data[name].x = torch.randn(count, 10)
    for a, b in (("user", "item"), ("item", "user"), ("item", "tag"), ("tag", "item")):
        ends = (torch.randint(counts[a], (90,)), torch.randint(counts[b], (90,)))
        data[a, "to", b].edge_index = torch.stack(ends)
    kind = rng.choice(["hgt", "han", "hetero"])
    if kind == "hgt":
        layer = g.HGTConv(width, width, data.metadata(), heads=2)
    elif kind == "han":
        layer = g.HANConv(width, width, data.metadata(), heads=2, dropout=0.1)
    else:
        layer = g.HeteroConv(
            {
                edge: g.GATv2Conv((-1, -1), width, add_self_loops=False)
                for edge in data.edge_types
            },
            "mean",
        )

    def forward(m, data):
        rows = {name: m.into[name](x).relu() for name, x in data.x_dict.items()}
        for _ in range(2):
            new = m.layer(rows, data.edge_index_dict)
            rows = {n: new[n] if new.get(n) is not None else rows[n] for n in rows}
        return m.head(rows["item"]).square().mean()

    into = nn.ModuleDict({name: nn.Linear(10, width) for name in counts})
    model = Do(forward, into=into, layer=layer, head=nn.Linear(width, 3))
    model(data)
    return Trained(f"{kind} {counts} {width}", model, data)


def evolving(rng):
    """A convolution whose weights a recurrent cell makes for each snapshot."""
    width, nodes, times = rng.choice([8, 24]), rng.choice([20, 150]), rng.choice([3, 6])

    def forward(m, x, edges):
        weight, state, losses = m.start, None, []
        norm = 1 / torch.bincount(edges[1], minlength=nodes).clamp(min=1).sqrt()
        for snapshot in x:
            weight = m.cell(weight, weight)
            rows = (snapshot @ weight) * norm[:, None]
            rows = scatter(rows[edges[0]], edges[1], 0, nodes) * norm[:, None]
            state = m.nodes(rows.relu(), state)
            losses.append(m.head(state).square().mean())
        return torch.stack(losses).sum()

    model = Do(
        forward,
        start=_parameter(width, width),
        cell=nn.GRUCell(width, width),
        nodes=nn.GRUCell(width, width),
        head=nn.Linear(width, 1),
    )
    batch = (torch.randn(times, nodes, width), torch.randint(nodes, (2, 4 * nodes)))
    return Trained(f"{times} x {nodes} x {width}", model, batch)


def vectors_at_nodes(rng):
    """PaiNN: scalars and vectors along edges, with bases of distances."""
    data, width = _some_graphs(rng), rng.choice([8, 24])

    def forward(m, data):
        src, dst = data.edge_index
        gap = data.pos[src] - data.pos[dst]
        far = gap.norm(dim=1, keepdim=True) + 1e-3
        bases = (far * torch.arange(1, 9) * 0.6).sin() / far
        s, v = m.into(data.x), data.x.new_zeros(data.num_nodes, width, 3)
        for message, filters, update in m.rounds:
            parts = (message(s)[src] * filters(bases)).chunk(3, 1)
            along = parts[1][..., None] * (gap / far)[:, None]
            v = v + scatter(v[src] * parts[2][..., None] + along, dst, 0, len(s))
            s = s + scatter(parts[0], dst, 0, len(s))
            lengths = v.square().sum(-1).add(1e-6).sqrt()
            a, b = update(torch.cat([s, lengths], 1)).chunk(2, 1)
            s, v = s + a, v * b[..., None]
        return (s.mean() + v.square().mean()).square()

    rounds = nn.ModuleList(
        nn.ModuleList(
            [
                _mlp(width, width, 3 * width),
                nn.Linear(8, 3 * width),
                _mlp(2 * width, width, 2 * width),
            ]
        )
        for _ in range(2)
    )
    model = Do(forward, into=nn.Linear(12, width), rounds=rounds)
    return Trained(f"{data.num_nodes} {width}", model, data)


# Ragged rows, and writes -------------------------------------------------------------


def jagged(rng):
    """Ragged rows as a nested tensor, through layers and sums of rows."""
    width, count = rng.choice([8, 32]), rng.choice([4, 30])
    lengths = torch.randint(1, 12, (count,))
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    way = rng.choice(["linear", "padded", "pointwise"])

    def forward(m, rows, offsets):
        ragged = torch.nested.nested_tensor_from_jagged(rows, offsets)
        hidden = F.silu(m.first(ragged))
        if way == "padded":
            hidden = torch.nested.to_padded_tensor(hidden, 0.0)
            return m.second(hidden).square().mean()
        if way == "pointwise":
            hidden = hidden * hidden.sigmoid() + hidden
        return m.second(hidden.values()).square().mean()

    model = Do(forward, first=nn.Linear(9, width), second=nn.Linear(width, 4))
    batch = (torch.randn(int(lengths.sum()), 9), offsets)
    return Trained(f"{way} {count} x {width}", model, batch)


def preallocated(rng):
    """Results are written into buffers that were made before."""
    width, count, parts = rng.choice([8, 60]), rng.choice([20, 300]), 4

    def forward(m, x):
        out = x.new_empty(count, parts, width)
        for part, layer in enumerate(m.layers):
            out[:, part] = layer(x).relu_()
        out.mul_(m.scale).add_(1)
        out[:, 0].tanh_()
        with torch.no_grad():
            m.mean.lerp_(out.mean((0, 1)), 0.1)
            torch.add(m.mean, 1, out=m.shifted)
        total = x.new_zeros(count, width)
        for part in range(parts):
            total += out[:, part]
        return (total - m.shifted).square().mean()

    model = Do(
        forward,
        layers=nn.ModuleList(nn.Linear(width, width) for _ in range(parts)),
        scale=_parameter(width),
        mean=torch.zeros(width),
        shifted=torch.zeros(width),
    )
    return Trained(f"{count} x {width}", model, torch.randn(count, width))


def two_passes(rng):
    """Two backward passes through one graph, the first kept; a third through parts."""
    width, count = rng.choice([16, 70]), rng.choice([20, 400])

    def forward(m, x):
        hidden = m.net(x)
        first = m.a(hidden).square().mean()
        first.backward(retain_graph=True)
        norms = [p.grad.norm() for p in m.net.parameters()]
        torch.autograd.backward([m.b(hidden.detach()).abs().mean()])
        return m.b(hidden).square().mean() / (1 + torch.stack(norms).sum())

    model = Do(
        forward, net=_mlp(8, width, width), a=nn.Linear(width, 3), b=nn.Linear(width, 2)
    )
    return Trained(f"{count} x {width}", model, torch.randn(count, 8))


def balanced_losses(rng):
    """PCGrad: gradients of each loss by themselves, projected, put together."""
    width, count = rng.choice([16, 70]), rng.choice([20, 300])

    def forward(m, x):
        hidden = m.net(x)
        losses = [head(hidden).square().mean() for head in m.heads]
        shared = list(m.net.parameters())
        slopes = [
            torch.cat(
                [
                    s.flatten()
                    for s in torch.autograd.grad(loss, shared, retain_graph=True)
                ]
            )
            for loss in losses
        ]
        mixed = []
        for slope in slopes:
            kept = slope.clone()
            for other in slopes:
                dot = kept @ other
                kept = (
                    kept
                    - torch.where(dot < 0, dot / (other @ other + 1e-9), 0.0) * other
                )
            mixed.append(kept)
        total = torch.stack(mixed).sum(0)
        shapes = [p.numel() for p in shared]
        surrogate = sum(
            (p * part.view_as(p)).sum()
            for p, part in zip(shared, total.split(shapes), strict=True)
        )
        heads = sum(head(hidden.detach()).square().mean() for head in m.heads)
        return surrogate + heads

    heads = nn.ModuleList(nn.Linear(width, n) for n in (1, 2, 3))
    return Trained(
        f"{count} x {width}",
        Do(forward, net=_mlp(8, width, width), heads=heads),
        torch.randn(count, 8),
    )


# Losses and layers of fields ---------------------------------------------------------


def chain_crf(rng):
    """The log partition of a chain, by a loop over its steps."""
    labels, steps, count = rng.choice([4, 12]), rng.choice([5, 15]), rng.choice([4, 40])

    def forward(m, x, tags):
        scores = m.scores(x)
        alpha = scores[:, 0]
        for step in range(1, steps):
            alpha = torch.logsumexp(alpha[:, :, None] + m.moves, 1) + scores[:, step]
        gold = scores.gather(2, tags[..., None]).sum((1, 2))
        gold = gold + m.moves[tags[:, :-1], tags[:, 1:]].sum(1)
        return (alpha.logsumexp(1) - gold).mean()

    model = Do(forward, scores=nn.Linear(10, labels), moves=_parameter(labels, labels))
    batch = (torch.randn(count, steps, 10), torch.randint(labels, (count, steps)))
    return Trained(f"{count} x {steps} x {labels}", model, batch)


def soft_warping(rng):
    """Soft dynamic time warping by a double loop."""
    length, count, width = rng.choice([4, 7]), rng.choice([5, 60]), rng.choice([4, 30])

    def forward(m, x, y):
        costs = torch.cdist(m.net(x), m.net(y)).square()
        big = costs.new_full((count,), 1e5)
        row = [costs.new_zeros(count)] + [big] * length
        for i in range(length):
            new = [big]
            for j in range(length):
                before = torch.stack([row[j], row[j + 1], new[j]])
                new.append(costs[:, i, j] - torch.logsumexp(-before, 0))
            row = new
        return row[-1].mean()

    batch = (torch.randn(count, length, 5), torch.randn(count, length, 5))
    return Trained(
        f"{count} x {length} x {width}", Do(forward, net=_mlp(5, width, width)), batch
    )


def splines(rng):
    """A coupling by rational quadratic splines, with bins that are searched."""
    width, bins, count = rng.choice([16, 40]), 8, rng.choice([40, 500])

    def forward(m, x):
        fixed, moved = x.chunk(2, 1)
        raw = m.net(fixed).view(count, 3, 3 * bins + 1)
        widths = raw[..., :bins].softmax(-1)
        heights = raw[..., bins : 2 * bins].softmax(-1)
        slopes = F.softplus(raw[..., 2 * bins :]) + 1e-3
        left = F.pad(widths.cumsum(-1), (1, 0))
        low = F.pad(heights.cumsum(-1), (1, 0))
        inside = moved.sigmoid()
        found = torch.searchsorted(
            left.detach().contiguous(), inside.detach()[..., None]
        )
        index = (found - 1).clamp(0, bins - 1)
        w, h = widths.gather(-1, index), heights.gather(-1, index)
        d0, d1 = slopes.gather(-1, index), slopes.gather(-1, index + 1)
        t = (inside[..., None] - left.gather(-1, index)) / w
        s = h / w
        top = h * (s * t.square() + d0 * t * (1 - t))
        bottom = s + (d0 + d1 - 2 * s) * t * (1 - t)
        y = low.gather(-1, index) + top / bottom
        slope = s.square() * (
            d1 * t.square() + 2 * s * t * (1 - t) + d0 * (1 - t).square()
        )
        return -(slope.log() - 2 * bottom.abs().log()).mean() + y.square().mean()

    model = Do(forward, net=_mlp(3, width, 3 * (3 * bins + 1)))
    return Trained(f"{count} x {width}", model, torch.randn(count, 6))


def hash_grid(rng):
    """Points looked up in hashed grids of several sizes, eight corners each."""
    count, levels, width = (
        rng.choice([100, 1500]),
        rng.choice([2, 5]),
        rng.choice([16, 32]),
    )
    corners = torch.tensor([[i >> 2 & 1, i >> 1 & 1, i & 1] for i in range(8)])

    def forward(m, points, cells):
        rows = []
        for level in range(levels):
            place = points * 2.0 ** (level + 2)
            share = place - place.floor()
            base = cells[:, level, None] + corners
            keys = (
                base[..., 0] ^ base[..., 1] * 2654435761 ^ base[..., 2] * 805459861
            ) % 512
            values = m.tables[level](keys)
            weights = torch.where(
                corners.bool(), share[:, None], 1 - share[:, None]
            ).prod(-1)
            rows.append((values * weights[..., None]).sum(1))
        return m.net(torch.cat(rows, 1)).sigmoid().square().mean()

    tables = nn.ModuleList(nn.Embedding(512, 2) for _ in range(levels))
    points = torch.rand(count, 3)
    cells = torch.stack(
        [(points * 2.0 ** (k + 2)).floor().long() for k in range(levels)], 1
    )
    model = Do(forward, tables=tables, net=_mlp(2 * levels, width, 4), corners=corners)
    return Trained(f"{count} x {levels}", model, (points, cells))


def point_cloud(rng):
    """Nearest neighbours by distances, features of their offsets, the largest kept."""
    points, width, count, k = (
        rng.choice([20, 80]),
        rng.choice([8, 32]),
        rng.choice([2, 8]),
        6,
    )

    def forward(m, x):
        h = x
        for layer in m.layers:
            gaps = torch.cdist(h.detach(), h.detach())
            near = gaps.topk(k, largest=False).indices
            rows = torch.arange(len(h))[:, None, None]
            others = h[rows, near]
            edges = torch.cat(
                [h[:, :, None].expand_as(others), others - h[:, :, None]], -1
            )
            h = layer(edges).amax(2)
        return h.mean(1).square().mean()

    layers = nn.ModuleList([_mlp(6, width, width), _mlp(2 * width, width)])
    return Trained(
        f"{count} x {points} x {width}",
        Do(forward, layers=layers),
        torch.randn(count, points, 3),
    )


def correlation_volume(rng):
    """RAFT: all pairs of two images' features, looked up around moving centres."""
    channels, size, count = rng.choice([8, 24]), rng.choice([6, 10]), rng.choice([1, 4])

    def forward(m, a, b):
        fa, fb = m.encode(a), m.encode(b)
        pairs = torch.einsum("bcij,bckl->bijkl", fa, fb) / channels**0.5
        pyramid = [pairs.reshape(-1, 1, size, size)]
        pyramid.append(F.avg_pool2d(pyramid[0], 2))
        steps = torch.arange(size, dtype=torch.float32)
        y, x = torch.meshgrid(steps, steps, indexing="ij")
        flow = torch.stack([x, y], -1).expand(count, size, size, 2)
        offsets = torch.stack(
            torch.meshgrid(torch.arange(-1.0, 2), torch.arange(-1.0, 2), indexing="ij"),
            -1,
        )
        state = torch.tanh(fa)
        for _ in range(2):
            flow = flow.detach()
            centres = flow.reshape(-1, 1, 1, 2)
            looked = []
            for level, volume in enumerate(pyramid):
                grid = (centres / 2**level + offsets) * 2 / max(
                    volume.size(-1) - 1, 1
                ) - 1
                looked.append(
                    F.grid_sample(volume, grid, align_corners=True).view(
                        count, size, size, 9
                    )
                )
            features = torch.cat([*looked, flow], -1).permute(0, 3, 1, 2)
            rows = torch.cat([state, features], 1)
            update = m.update(rows).sigmoid()
            state = (1 - update) * state + update * m.new(rows).tanh()
            flow = flow + m.flow(state).permute(0, 2, 3, 1)
        return flow.square().mean()

    model = Do(
        forward,
        encode=nn.Conv2d(3, channels, 4, 4),
        update=nn.Conv2d(channels + 20, channels, 3, padding=1),
        new=nn.Conv2d(channels + 20, channels, 3, padding=1),
        flow=nn.Conv2d(channels, 2, 3, padding=1),
    )
    images = [torch.randn(count, 3, 4 * size, 4 * size) for _ in range(2)]
    return Trained(f"{count} x {channels} x {size}", model, tuple(images))


def convolutional_states(rng):
    """ConvLSTM over frames."""
    channels, size, frames = (
        rng.choice([4, 12]),
        rng.choice([8, 16]),
        rng.choice([3, 6]),
    )
    count = rng.choice([2, 6])

    def forward(m, x):
        h = c = x.new_zeros(count, channels, size, size)
        for frame in x.unbind(1):
            i, f, o, u = m.gates(torch.cat([frame, h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * u.tanh()
            h = o.sigmoid() * c.tanh()
        return m.head(h).square().mean()

    model = Do(
        forward,
        gates=nn.Conv2d(2 + channels, 4 * channels, 3, padding=1),
        head=nn.Conv2d(channels, 1, 1),
    )
    return Trained(
        f"{count} x {frames} x {channels} x {size}",
        model,
        torch.randn(count, frames, 2, size, size),
    )


def involution(rng):
    """Kernels made at each place, applied to unfolded neighbours."""
    channels, groups, size, count = (
        rng.choice([8, 16]),
        2,
        rng.choice([8, 18]),
        rng.choice([2, 8]),
    )

    def forward(m, x):
        kernels = m.span(F.relu(m.squeeze(x))).view(count, groups, 1, 9, size, size)
        near = F.unfold(x, 3, padding=1).view(
            count, groups, channels // groups, 9, size, size
        )
        return (kernels * near).sum(3).reshape_as(x).add(x).square().mean()

    model = Do(
        forward, squeeze=nn.Conv2d(channels, 4, 1), span=nn.Conv2d(4, 9 * groups, 1)
    )
    return Trained(
        f"{count} x {channels} x {size}",
        model,
        torch.randn(count, channels, size, size),
    )


def masked_pixels(rng):
    """PixelCNN: masked kernels, a mixture of logistics as the loss."""
    channels, size, count = rng.choice([8, 20]), rng.choice([6, 14]), rng.choice([2, 8])
    mask = torch.ones(5, 5)
    mask[3:] = mask[2, 3:] = 0

    def forward(m, x):
        h = F.conv2d(x, m.kernel * m.mask, padding=2)
        h = m.second(F.elu(torch.cat([h, -h], 1)))
        logits, means, scales = h.view(count, 3, 5, size, size).unbind(1)
        centred = x - means
        narrow = torch.exp(-scales.clamp(min=-7))
        cdf = torch.sigmoid(narrow * (centred + 1 / 255)) - torch.sigmoid(
            narrow * (centred - 1 / 255)
        )
        return -torch.logsumexp(
            logits.log_softmax(1) + cdf.clamp(min=1e-9).log(), 1
        ).mean()

    model = Do(
        forward,
        kernel=_parameter(channels, 1, 5, 5),
        mask=mask,
        second=nn.Conv2d(2 * channels, 15, 1),
    )
    return Trained(
        f"{count} x {channels} x {size}", model, torch.rand(count, 1, size, size)
    )


def preferences(rng):
    """DPO: log-likelihoods of chosen and rejected words under two models."""
    width, length, count = (
        rng.choice([16, 40]),
        rng.choice([6, 30]),
        rng.choice([2, 10]),
    )
    policy = nn.Sequential(
        nn.Embedding(120, width), _mlp(width, 2 * width, width), nn.Linear(width, 120)
    )
    reference = copy.deepcopy(policy).requires_grad_(False)

    def likelihood(net, words, mask):
        scores = net(words[:, :-1]).log_softmax(-1)
        return (scores.gather(2, words[:, 1:, None]).squeeze(2) * mask[:, 1:]).sum(1)

    def forward(m, words, lengths):
        mask = (torch.arange(length) < lengths[:, None]).float()
        ours = likelihood(m.policy, words, mask)
        with torch.no_grad():
            theirs = likelihood(m.reference, words, mask)
        good, bad = (ours - theirs).chunk(2)
        return -F.logsigmoid(0.1 * (good - bad)).mean()

    batch = (
        torch.randint(120, (2 * count, length)),
        torch.randint(2, length + 1, (2 * count,)),
    )
    return Trained(
        f"{count} x {length} x {width}",
        Do(forward, policy=policy, reference=reference),
        batch,
    )


def inducing_points(rng):
    """A variational Gaussian process with some points that stand for all."""
    count, points, width = (
        rng.choice([30, 300]),
        rng.choice([5, 20]),
        rng.choice([2, 6]),
    )

    def forward(m, x, y):
        def kernel(a, b):
            return (
                -torch.cdist(a / m.scale.exp(), b / m.scale.exp()).square() / 2
            ).exp()

        base = kernel(m.points, m.points) + 1e-2 * torch.eye(points)
        lower = torch.linalg.cholesky(base)
        across = torch.linalg.solve_triangular(lower, kernel(m.points, x), upper=False)
        cover = m.spread.tril()
        mean = across.T @ m.mean
        variance = 1 - across.square().sum(0) + (cover.T @ across).square().sum(0)
        q = torch.distributions.MultivariateNormal(
            m.mean, scale_tril=cover + 2 * torch.eye(points)
        )
        p = torch.distributions.MultivariateNormal(
            torch.zeros(points), torch.eye(points)
        )
        fit = ((y - mean).square() + variance).mean()
        return fit + torch.distributions.kl_divergence(q, p) / count

    model = Do(
        forward,
        points=_parameter(points, width),
        scale=_parameter(width),
        mean=_parameter(points),
        spread=_parameter(points, points),
    )
    return Trained(
        f"{count} x {points}", model, (torch.randn(count, width), torch.randn(count))
    )


def quantised_codes(rng):
    """Codes chosen by distance, moved by averages of what chose them, as buffers."""
    width, codes, count = (
        rng.choice([8, 32]),
        rng.choice([16, 100]),
        rng.choice([40, 500]),
    )

    def forward(m, x):
        z = m.encode(x)
        index = torch.cdist(z.detach(), m.codes).argmin(1)
        chosen = F.embedding(index, m.codes)
        with torch.no_grad():
            hot = F.one_hot(index, codes).float()
            m.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            m.sums.mul_(0.9).add_(hot.T @ z, alpha=0.1)
            m.codes.copy_(m.sums / (m.sizes[:, None] + 1e-3))
        commit = F.mse_loss(z, chosen.clone())
        straight = z + (chosen - z).detach()
        return F.mse_loss(m.decode(straight), x) + 0.25 * commit

    model = Do(
        forward,
        encode=_mlp(10, 30, width),
        decode=_mlp(width, 30, 10),
        codes=torch.randn(codes, width),
        sums=torch.randn(codes, width),
        sizes=torch.ones(codes),
    )
    return Trained(f"{count} x {codes} x {width}", model, torch.randn(count, 10))


# Optimizers --------------------------------------------------------------------------


class _Lion(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002 -- as torch's optimizers have it
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                update = state["average"].mul(0.9).add_(p.grad, alpha=0.1).sgn_()
                p.mul_(1 - 1e-5).add_(update, alpha=-group["lr"])
                state["average"].mul_(0.99).add_(p.grad, alpha=0.01)


class _Lamb(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002 -- as torch's optimizers have it
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["square"] = (
                        torch.zeros_like(p),
                        torch.zeros_like(p),
                    )
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["mean"] / (state["square"].sqrt() + 1e-6) + 0.01 * p
                trust = p.norm() / (update.norm() + 1e-6)
                p.sub_(update * trust.clamp(max=10) * group["lr"])


class _Lookahead(torch.optim.AdamW):
    """Keeps slow copies, which the fast ones go back to."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-3)
        self.slow = [
            p.detach().clone() for group in self.param_groups for p in group["params"]
        ]

    def step(self, closure=None):
        super().step(closure)
        fast = [p.detach() for group in self.param_groups for p in group["params"]]
        torch._foreach_lerp_(self.slow, fast, 0.5)
        torch._foreach_copy_(fast, self.slow)


class _Clipped(torch.optim.Adam):
    def __init__(self, parameters, foreach):
        super().__init__(parameters, amsgrad=True, foreach=False)
        self.with_foreach = foreach

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 0.1, foreach=self.with_foreach)
        return super().step(closure)


class _Lbfgs(torch.optim.LBFGS):
    """One step along the gradient that is there: its closure computes nothing new."""

    def step(self, closure=None):  # noqa: ARG002 -- as torch's optimizers have it
        return super().step(lambda: torch.zeros(()))


class _Shampoo(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002 -- as torch's optimizers have it
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                slope = p.grad.reshape(len(p), -1) if p.dim() else p.grad.reshape(1, 1)
                if max(slope.shape) > 150 or slope.is_complex():
                    p.add_(p.grad, alpha=-group["lr"])
                    continue
                state = self.state[p]
                if not state:
                    state["left"] = torch.eye(len(slope)) * 1e-3
                    state["right"] = torch.eye(slope.size(1)) * 1e-3
                state["left"] += slope @ slope.T
                state["right"] += slope.T @ slope
                sides = []
                for matrix in (state["left"], state["right"]):
                    values, vectors = torch.linalg.eigh(matrix)
                    sides.append(
                        vectors @ (values.clamp(min=1e-6) ** -0.25).diag() @ vectors.T
                    )
                p.sub_((sides[0] @ slope @ sides[1]).view_as(p), alpha=group["lr"])


class _LowRankMoments(torch.optim.Optimizer):
    """GaLore: moments of a projection of each matrix's gradient."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002 -- as torch's optimizers have it
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                slope = p.grad
                state = self.state[p]
                if p.dim() == 2 and min(p.shape) > 4 and not p.is_complex():
                    if "basis" not in state:
                        state["basis"] = torch.linalg.svd(slope, full_matrices=False)[
                            0
                        ][:, :4].contiguous()
                    slope = state["basis"].T @ slope
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(slope)
                state["mean"].mul_(0.9).add_(slope, alpha=0.1)
                update = state["mean"].sgn()
                if "basis" in state:
                    update = state["basis"] @ update
                p.add_(update, alpha=-group["lr"])


def _averaged_copies(parameters):
    """Adam with a hook behind each step that moves copies after the parameters."""
    parameters = list(parameters)
    copies = [p.detach().clone() for p in parameters]

    def follow(_optimizer, _args, _kwargs):
        for copied, parameter in zip(copies, parameters, strict=True):
            copied.mul_(0.99).add_(parameter.detach(), alpha=0.01)

    optimizer = torch.optim.Adam(parameters)
    optimizer.register_step_post_hook(follow)
    return optimizer


OPTIMIZERS = {
    "lion": _Lion,
    "lamb": _Lamb,
    "lookahead": _Lookahead,
    "clipped amsgrad": lambda p: _Clipped(p, foreach=False),
    "clipped amsgrad, foreach": lambda p: _Clipped(p, foreach=True),
    "lbfgs": lambda p: _Lbfgs(p, max_iter=2, history_size=3),
    "shampoo": _Shampoo,
    "low rank": _LowRankMoments,
    "copies": _averaged_copies,
    "sgd": torch.optim.SGD,
    "none": None,
}


KINDS = {
    function.__name__.replace("_", " "): function
    for function in (
        *(packed_projected, packed_rows, packed_words, cells, truncated),
        *(diagonal_states, doubling_scan, chunked_states, long_filters),
        *(mixed_frequencies, einsum_attention, nystrom, triangles, random_features),
        *(hyper_convolution, hyper_network, mixed_kernels, constrained, old_norms),
        *(meta_learning, private, tangent_kernel, laplacian, pulled_back, langevin),
        *(nested_checkpoints, sequential_checkpoints, chunked_head),
        *(complex_network, complex_images, quaternions, hyperbolic),
        *(edge_updates, gated_messages, by_hand_attention, many_reductions),
        *(heterogeneous, evolving, vectors_at_nodes, jagged, preallocated),
        *(two_passes, balanced_losses, chain_crf, soft_warping, splines, hash_grid),
        *(point_cloud, correlation_volume, convolutional_states, involution),
        *(masked_pixels, preferences, inducing_points, quantised_codes),
    )
}


def draw_habit_step(seed, kind):
    """Draw a step of a kind; a seed always gives the same."""
    rng = random.Random(f"habits {kind} {seed}")
    torch.manual_seed(seed)
    trained = KINDS[kind](rng)
    name = rng.choice(list(OPTIMIZERS))
    step = Step(trained.loss, optimizer=OPTIMIZERS[name])
    words = f"{kind} {seed}: {trained.description}; {name}"
    return DrawnStep(words, trained.model, trained.batch, step, rng.choice([1, 2]))
