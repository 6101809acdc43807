"""Whole models drawn by a seed, as people write them, and how they train them.

``drawn.py`` draws layers one after the other.  Here a family is a model with its own
loop, loss and state: caches of keys, towers, copies that lag behind, functions with a
backward pass of their own, graphs within graphs.
"""

import copy
import random

import torch
import torch_geometric.nn as g
from drawn import DrawnStep, Trained, typed_graph
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Batch, Data
from torch_geometric.utils import negative_sampling, to_dense_adj, to_dense_batch

from loaderkit.budget.step.train_step import Step

BFLOAT16 = {"autocast": torch.bfloat16}


class Decoder(nn.Module):
    """A language model in two chunks, the second over the first one's keys."""

    def __init__(self, vocabulary, width, heads, layers, tied):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(
                nn.RMSNorm(width),
                nn.Linear(width, 4 * width),
                nn.SiLU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.heads = heads

    def forward(self, words):
        chunks = words.chunk(2, 1)
        cache = [None] * len(self.qkv)
        outputs = []
        for chunk in chunks:
            hidden = self.table(chunk)
            for number, (qkv, mlp) in enumerate(zip(self.qkv, self.mlp, strict=True)):
                parts = qkv(hidden).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
                query, key, value = parts.unbind(2)
                if cache[number] is not None:
                    key = torch.cat([cache[number][0], key], 2)
                    value = torch.cat([cache[number][1], value], 2)
                cache[number] = key, value
                seen = F.scaled_dot_product_attention(
                    query, key, value, is_causal=key.size(2) == query.size(2)
                )
                hidden = hidden + seen.transpose(1, 2).flatten(2)
                hidden = hidden + mlp(hidden)
            outputs.append(self.head(hidden))
        return torch.cat(outputs, 1)


def _next_word(output, words):
    return F.cross_entropy(output[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def decoder(rng):
    width, vocabulary = rng.choice([32, 64, 96]), rng.choice([100, 2000])
    model = Decoder(vocabulary, width, 4, rng.randint(1, 4), rng.random() < 0.6)
    words = torch.randint(vocabulary, (rng.randint(1, 8), 2 * rng.randint(4, 60)))
    options = BFLOAT16 if rng.random() < 0.6 else {}
    return Trained("decoder", model, words, _next_word), options


class UNet(nn.Module):
    """Volumes or images down and up again, with skips; blocks may be computed twice."""

    def __init__(self, dims, width, depth, reentrant):
        super().__init__()
        conv = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
        up = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]
        pool = {2: nn.MaxPool2d, 3: nn.MaxPool3d}[dims]

        def block(before, after):
            return nn.Sequential(
                conv(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.ReLU()
            )

        widths = [width * 2**level for level in range(depth)]
        self.first = conv(1, width, 1)
        self.down = nn.ModuleList(block(w, 2 * w) for w in widths)
        self.pool = pool(2)
        self.up = nn.ModuleList(up(2 * w, w, 2, stride=2) for w in reversed(widths))
        self.after = nn.ModuleList(block(3 * w, w) for w in reversed(widths))
        self.last = conv(width, 1, 1)
        self.reentrant = reentrant

    def _run_block(self, block, x):
        if self.reentrant is None:
            return block(x)
        return checkpoint(block, x, use_reentrant=self.reentrant)

    def forward(self, x):
        x = self.first(x)
        skips = []
        for block in self.down:
            x = self._run_block(block, x)
            skips.append(x)
            x = self.pool(x)
        for up, block, skip in zip(self.up, self.after, reversed(skips), strict=True):
            # Twice as wide below as the block above asks for.
            x = up(x)
            x = self._run_block(block, torch.cat([x, skip], 1))
        return self.last(x)


def unet(rng):
    dims, depth = rng.choice([2, 3]), rng.choice([1, 2])
    size = 4 * 2**depth if dims == 3 else rng.choice([16, 32])
    model = UNet(dims, rng.choice([4, 8]), depth, rng.choice([None, False, True]))
    images = torch.randn(rng.randint(1, 6), 1, *[size] * dims)
    return Trained(
        f"unet {dims}d", model, (images, torch.randn(images.shape)), F.mse_loss
    ), {}


class Diffusion(nn.Module):
    """Noise at a time drawn by chance, and a copy that follows slowly."""

    def __init__(self, width, conditioned):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(4, width, 3, padding=1),
            nn.SiLU(),
            nn.GroupNorm(4, width),
            nn.Conv2d(width, 3, 3, padding=1),
        )
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("betas", torch.linspace(1e-4, 0.02, 100))
        self.conditioned = conditioned

    def forward(self, images):
        with torch.no_grad():
            for slow, fast in zip(
                self.teacher.parameters(), self.net.parameters(), strict=True
            ):
                slow.lerp_(fast, 0.01)
        times = torch.randint(0, 100, (len(images),))
        kept = (1 - self.betas).cumprod(0)[times].view(-1, 1, 1, 1)
        noise = torch.randn_like(images)
        noisy = kept.sqrt() * images + (1 - kept).sqrt() * noise
        when = (times / 100).view(-1, 1, 1, 1).expand(-1, 1, *images.shape[2:])
        predicted = self.net(torch.cat([noisy, when], 1))
        loss = F.mse_loss(predicted, noise)
        if self.conditioned:
            with torch.no_grad():
                wanted = self.teacher(torch.cat([noisy, when], 1))
            loss = loss + F.smooth_l1_loss(predicted, wanted)
        return loss


def diffusion(rng):
    images = torch.randn(rng.randint(2, 16), 3, 16, 16)
    return Trained(
        "diffusion", Diffusion(rng.choice([8, 32]), rng.random() < 0.7), images
    ), {}


class Towers(nn.Module):
    """Two towers and a table of all pairs; a queue of older answers, if asked for."""

    def __init__(self, width, queue, momentum):
        super().__init__()
        self.images = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(width)
        )
        self.words = nn.EmbeddingBag(500, width)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.slow = copy.deepcopy(self.words) if momentum else None
        if queue:
            self.register_buffer("queue", torch.randn(queue, width))
        self.has_queue = bool(queue)

    def forward(self, images, words):
        left = F.normalize(self.images(images), dim=-1)
        right = F.normalize(self.words(words), dim=-1)
        keys = right
        if self.slow is not None:
            with torch.no_grad():
                keys = F.normalize(self.slow(words), dim=-1)
        if self.has_queue:
            keys = torch.cat([keys, self.queue.clone()])
        near = left @ keys.t() * self.temperature.exp()
        truth = torch.arange(len(left))
        loss = F.cross_entropy(near, truth)
        if near.size(0) == near.size(1):
            loss = loss + F.cross_entropy(near.t(), truth)
        if self.has_queue:
            with torch.no_grad():
                rest = self.queue[len(right) :]
                self.queue.copy_(torch.cat([right.detach(), rest])[: len(self.queue)])
        return loss


def towers(rng):
    count = rng.choice([4, 32, 128])
    model = Towers(rng.choice([16, 128]), rng.choice([0, 256]), rng.random() < 0.5)
    batch = {
        "images": torch.randn(count, 3, 16, 16),
        "words": torch.randint(500, (count, 12)),
    }
    with torch.no_grad():
        model(**batch)
    return Trained("towers", model, batch), BFLOAT16 if rng.random() < 0.3 else {}


class Packed(nn.Module):
    """Sequences of different lengths through a recurrent layer, packed."""

    def __init__(self, kind, width, layers, two_ways, ctc):
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.inner = kind(
            width,
            width,
            layers,
            batch_first=True,
            bidirectional=two_ways,
            dropout=0.1 if layers > 1 else 0.0,
        )
        self.last = nn.Linear(width * (1 + two_ways), 50)
        self.ctc = ctc

    def forward(self, words, lengths):
        packed = rnn.pack_padded_sequence(
            self.table(words), lengths, batch_first=True, enforce_sorted=False
        )
        hidden, _ = rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True)
        scores = self.last(hidden)
        if self.ctc:
            targets = words[:, : max(1, int(lengths.min()) // 3)].clamp(min=1)
            return F.ctc_loss(
                scores.log_softmax(-1).transpose(0, 1),
                targets,
                lengths,
                torch.full((len(words),), targets.size(1)),
                zero_infinity=True,
            )
        return F.cross_entropy(
            scores.flatten(0, 1), words[:, : scores.size(1)].flatten()
        )


def packed(rng):
    kind = rng.choice([nn.LSTM, nn.GRU, nn.RNN])
    count = rng.randint(2, 12)
    lengths = torch.tensor([rng.randint(3, 30) for _ in range(count)])
    model = Packed(
        kind, rng.choice([16, 40]), rng.choice([1, 2]), rng.random() < 0.5,
        rng.random() < 0.3,
    )  # fmt: skip
    batch = {
        "words": torch.randint(50, (count, int(lengths.max()))),
        "lengths": lengths,
    }
    return Trained(f"packed {kind.__name__} ctc {model.ctc}", model, batch), {}


class _Cubed(torch.autograd.Function):
    """Keeps its input, and computes its gradient itself."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.pow(3)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.pow(2).mul_(3)


class _Straight(torch.autograd.Function):
    """Rounds, and lets the gradient through."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_non_differentiable(mask := x.abs() < 1)
        ctx.mask = mask
        return x.round(), mask

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient * ctx.mask


class _FusedLoss(torch.autograd.Function):
    """A linear layer and its loss in chunks, with the gradients made at once."""

    @staticmethod
    def forward(ctx, hidden, weight, truth):
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for start in range(0, len(hidden), 16):
            rows = slice(start, start + 16)
            scores = hidden[rows] @ weight.t()
            total += F.cross_entropy(scores, truth[rows], reduction="sum")
            scores = scores.softmax(-1)
            scores[torch.arange(len(scores)), truth[rows]] -= 1
            grad_hidden[rows] = scores @ weight
            grad_weight.addmm_(scores.t(), hidden[rows])
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, gradient):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.mul_(gradient), grad_weight.mul_(gradient), None


class OwnFunctions(nn.Module):
    def __init__(self, width, which):
        super().__init__()
        self.first, self.second = nn.Linear(32, width), nn.Linear(width, width)
        self.which = which

    def forward(self, x):
        hidden = self.first(x)
        if "cubed" in self.which:
            hidden = _Cubed.apply(hidden)
        hidden = self.second(hidden)
        if "straight" in self.which:
            hidden, mask = _Straight.apply(hidden)
            hidden = hidden * mask
        if "fused" in self.which:
            truth = torch.arange(len(x)) % hidden.size(1)
            return _FusedLoss.apply(hidden, self.second.weight, truth)
        return hidden.square().mean()


def own_functions(rng):
    which = rng.sample(["cubed", "straight", "fused"], rng.randint(1, 3))
    model = OwnFunctions(rng.choice([64, 300]), which)
    return Trained(
        f"functions {which}", model, torch.randn(rng.choice([20, 700]), 32)
    ), {}


class Accumulated(nn.Module):
    """A batch in pieces, whose losses are added up."""

    def __init__(self, inner, pieces):
        super().__init__()
        self.inner, self.pieces = inner, pieces

    def forward(self, x):
        return torch.stack(
            [self.inner(p).square().mean() for p in x.chunk(self.pieces)]
        ).sum()


def accumulated(rng):
    width = rng.choice([64, 200])
    inner = nn.Sequential(
        nn.Linear(48, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(width, 8),
    )  # fmt: skip
    model = Accumulated(inner, rng.choice([2, 3, 5]))
    return Trained(
        "accumulated", model, torch.randn(rng.choice([50, 500, 2000]), 48)
    ), {}


class Penalised(nn.Module):
    """A critic whose gradient is asked to be small: differentiated twice."""

    def __init__(self, width, activation):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(24, width), activation(), nn.Linear(width, width), activation(),
            nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, x):
        x = x.clone().requires_grad_()
        score = self.net(x)
        [slope] = torch.autograd.grad(score.sum(), x, create_graph=True)
        return -score.mean() + (slope.norm(dim=1) - 1).square().mean()


def penalised(rng):
    activation = rng.choice([nn.Tanh, nn.SiLU, nn.Softplus, nn.ReLU, nn.GELU])
    model = Penalised(rng.choice([32, 200]), activation)
    return Trained(
        f"penalised {activation.__name__}",
        model,
        torch.randn(rng.choice([16, 800]), 24),
    ), {}


class Experts(nn.Module):
    """Tokens to their best expert, with room for some only."""

    def __init__(self, width, count, dense):
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.w1 = nn.Parameter(torch.randn(count, width, 2 * width) * 0.1)
        self.w2 = nn.Parameter(torch.randn(count, 2 * width, width) * 0.1)
        self.dense = dense

    def forward(self, x):
        count = len(self.w1)
        shares = self.gate(x).softmax(-1)
        room = max(1, 2 * len(x) // count)
        if self.dense:
            hidden = torch.einsum("td,edh->eth", x, self.w1).relu()
            return torch.einsum("eth,ehd,te->td", hidden, self.w2, shares)
        weight, tokens = shares.t().topk(min(room, len(x)), dim=1)
        hidden = torch.bmm(x[tokens], self.w1).relu()
        out = torch.bmm(hidden, self.w2) * weight[..., None]
        return torch.zeros_like(x).index_add(0, tokens.flatten(), out.flatten(0, 1))


def experts(rng):
    width = rng.choice([16, 64])
    model = Experts(width, rng.choice([2, 8]), rng.random() < 0.4)
    return Trained(
        f"experts dense {model.dense}", model, torch.randn(rng.choice([30, 600]), width)
    ), {}


class Scan(nn.Module):
    """A state carried over the steps of a sequence, by a loop or by a transform."""

    def __init__(self, width, way):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.rates = nn.Parameter(torch.rand(width))
        self.cell = nn.GRUCell(width, width)
        self.way = way

    def forward(self, x):
        if self.way == "fft":
            length = x.size(1)
            kernel = torch.exp(-self.rates * torch.arange(length)[:, None])
            wide = torch.fft.rfft(x, 2 * length, dim=1)
            narrow = torch.fft.rfft(kernel, 2 * length, dim=0)
            return self.inner(torch.fft.irfft(wide * narrow, dim=1)[:, :length])
        state = torch.zeros_like(x[:, 0])
        states = []
        for step in x.unbind(1):
            if self.way == "cell":
                state = self.cell(step, state)
            else:
                state = state + 0.1 * torch.tanh(self.inner(state) + step)
            states.append(state)
        return torch.stack(states, 1)


def scan(rng):
    width, way = rng.choice([16, 64]), rng.choice(["fft", "cell", "euler"])
    x = torch.randn(rng.randint(2, 20), rng.randint(5, 40), width)
    return Trained(f"scan {way}", Scan(width, way), x), {}


class Reparametrised(nn.Module):
    """Weights that are computed anew: normed, orthogonal, low rank."""

    def __init__(self, width, which):
        super().__init__()
        layers = []
        for name in which:
            layer = nn.Linear(width, width)
            if name == "weight norm":
                layer = parametrizations.weight_norm(layer)
            elif name == "spectral norm":
                layer = parametrizations.spectral_norm(layer)
            elif name == "orthogonal":
                layer = parametrizations.orthogonal(layer)
            elif name == "low rank":
                layer = LowRank(layer)
            layers += [layer, nn.ELU()]
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return self.net(x)


class LowRank(nn.Module):
    """A frozen layer and a trained correction."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, inner.in_features))
        self.b = nn.Parameter(torch.zeros(inner.out_features, 4))

    def forward(self, x):
        return self.inner(x) + F.linear(F.linear(x, self.a), self.b)


def reparametrised(rng):
    names = ["weight norm", "spectral norm", "orthogonal", "low rank"]
    which = rng.sample(names, rng.randint(1, 3))
    width = rng.choice([24, 96, 200])
    model = Reparametrised(width, which)
    return Trained(
        f"weights {which}", model, torch.randn(rng.choice([10, 400]), width)
    ), {}


class Vision(nn.Module):
    """Patches, masked at random, through a transformer of torch's."""

    def __init__(self, width, layers, kept, norm_first):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.1, F.gelu, batch_first=True, norm_first=norm_first
        )
        self.inner = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.hidden = nn.Parameter(torch.zeros(1, 1, width))
        self.last = nn.Linear(width, 48)
        self.kept = kept

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        order = torch.rand(x.shape[:2]).argsort(1)
        kept = order[:, : int(self.kept * x.size(1))]
        seen = self.inner(x.gather(1, kept[..., None].expand(-1, -1, x.size(2))))
        rest = self.hidden.expand(len(x), x.size(1) - seen.size(1), -1)
        all_places = torch.cat([seen, rest], 1)
        back = order.argsort(1)[..., None].expand_as(all_places)
        out = self.last(all_places.gather(1, back))
        truth = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5)
        return F.mse_loss(out, truth.reshape(out.shape))


def vision(rng):
    model = Vision(
        rng.choice([32, 64]),
        rng.choice([1, 3]),
        rng.choice([0.25, 0.6]),
        rng.random() < 0.5,
    )
    images = torch.randn(rng.randint(2, 10), 3, 32, 32)
    return Trained("vision", model, images), BFLOAT16 if rng.random() < 0.5 else {}


class Variational(nn.Module):
    def __init__(self, width, quantised):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Linear(100, width), nn.ReLU(), nn.Linear(width, 32)
        )
        self.decode = nn.Sequential(
            nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 100)
        )
        self.codes = nn.Embedding(64, 16)
        self.quantised = quantised

    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, -1)
        if self.quantised:
            near = torch.cdist(mean, self.codes.weight).argmin(1)
            code = self.codes(near)
            commit = F.mse_loss(code, mean.detach()) + 0.2 * F.mse_loss(
                mean, code.detach()
            )
            return F.mse_loss(self.decode(mean + (code - mean).detach()), x) + commit
        normal = torch.distributions.Normal(mean, F.softplus(spread) + 1e-3)
        prior = torch.distributions.Normal(0.0, 1.0)
        kl = torch.distributions.kl_divergence(normal, prior).sum(-1).mean()
        return (
            F.binary_cross_entropy_with_logits(
                self.decode(normal.rsample()), x.sigmoid()
            )
            + kl
        )


def variational(rng):
    model = Variational(rng.choice([64, 400]), rng.random() < 0.5)
    return Trained(
        f"variational quantised {model.quantised}",
        model,
        torch.randn(rng.choice([30, 900]), 100),
    ), {}


class Mapped(nn.Module):
    """Gradients of single samples, or an ensemble, by transforms of functions."""

    def __init__(self, width, way):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 1))
        self.way = way

    def forward(self, x):
        if self.way == "jacobian":
            jacobian = torch.func.vmap(torch.func.jacrev(self.net))(x)
            return jacobian.square().mean()
        if self.way == "offload":
            with torch.autograd.graph.save_on_cpu():
                return self.net(x).mean()
        return torch.func.functional_call(
            self.net, {n: p * 2 for n, p in self.net.named_parameters()}, (x,)
        ).mean()


def mapped(rng):
    way = rng.choice(["jacobian", "offload", "call"])
    return Trained(
        f"func {way}",
        Mapped(rng.choice([32, 128]), way),
        torch.randn(rng.choice([9, 600]), 12),
    ), {}


class Rendered(nn.Module):
    """Colours along rays: waves of positions, products along an axis, samples read."""

    def __init__(self, width, sampled):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3 * 12, width), nn.ReLU(), nn.Linear(width, 4)
        )
        self.grid = nn.Parameter(torch.randn(1, 4, 16, 16))
        self.sampled = sampled

    def forward(self, rays):
        depth = torch.linspace(0.1, 2, 24)
        places = rays[:, None] * depth[:, None]
        powers = 2.0 ** torch.arange(6)
        waves = (places[..., None] * powers).flatten(-2)
        out = self.net(torch.cat([waves.sin(), waves.cos()], -1))
        if self.sampled:
            where = places[None, ..., :2].clamp(-1, 1)
            out = out + F.grid_sample(self.grid, where, align_corners=False)[0].permute(
                1, 2, 0
            )
        opacity = 1 - torch.exp(-F.relu(out[..., 3]) * 0.1)
        clear = torch.cumprod(1 - opacity + 1e-6, -1)
        return ((opacity * clear)[..., None] * out[..., :3].sigmoid()).sum(1)


def rendered(rng):
    model = Rendered(rng.choice([32, 128]), rng.random() < 0.5)
    return Trained(
        f"rendered sampled {model.sampled}",
        model,
        torch.randn(rng.choice([20, 400]), 3),
    ), {}


class Clipped(torch.optim.AdamW):
    """Clips the gradients before it updates."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        return super().step(closure)


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, params, lr=1e-4):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                update = state["mean"].clone().mul_(0.9).add(p.grad, alpha=0.1).sign_()
                p.add_(update, alpha=-group["lr"])
                state["mean"].mul_(0.99).add_(p.grad, alpha=0.01)


def _split_by_weight_decay(parameters):
    parameters = list(parameters)
    flat = [p for p in parameters if p.dim() < 2]
    wide = [p for p in parameters if p.dim() >= 2]
    groups = [{"params": flat, "weight_decay": 0.0}, {"params": wide, "lr": 1e-4}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], foreach=True
    )


OPTIMIZERS = {
    "adam": "adam",
    "sgd": "sgd",
    "foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach sgd": lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, foreach=True),
    "adafactor": torch.optim.Adafactor,
    "groups": _split_by_weight_decay,
    "clipped": Clipped,
    "clipped foreach": lambda p: Clipped(p, foreach=True),
    "own": Lion,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True),
    "fused sgd": lambda p: torch.optim.SGD(p, 0.1, 0.9, fused=True),
    "fused adagrad": lambda p: torch.optim.Adagrad(p, fused=True),
    "none": None,
}


# Graphs.


def _draw_graph(rng, width=16, edge_width=5):
    nodes = max(2, int(rng.lognormvariate(2.7, 0.7)))
    edges = rng.randint(nodes, 4 * nodes)
    return Data(
        x=torch.randn(nodes, width),
        edge_index=torch.randint(nodes, (2, edges)),
        edge_attr=torch.randn(edges, edge_width),
        edge_type=torch.randint(4, (edges,)),
        pos=torch.randn(nodes, 3) * 2,
        z=torch.randint(1, 10, (nodes,)),
        y=torch.randn(1, 1),
    )


def _draw_graphs(rng, **widths):
    count = rng.choice([2, 8, 40])
    return Batch.from_data_list([_draw_graph(rng, **widths) for _ in range(count)])


class DenseGraphs(nn.Module):
    """Attention of all nodes of a graph to each other, biased by its edges."""

    def __init__(self, width, layers, weights):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.bias = nn.Linear(5, 4)
        self.inner = nn.ModuleList(
            nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(layers)
        )
        self.last = nn.Linear(width, 1)
        self.weights = weights

    def forward(self, data):
        x, mask = to_dense_batch(self.first(data.x), data.batch)
        near = to_dense_adj(data.edge_index, data.batch, data.edge_attr)
        bias = self.bias(near).permute(0, 3, 1, 2).flatten(0, 1)
        bias = bias.masked_fill(~mask.repeat_interleave(4, 0)[:, None], -1e9)
        for layer in self.inner:
            x = x + layer(x, x, x, attn_mask=bias, need_weights=self.weights)[0]
        return F.mse_loss(self.last((x * mask[..., None]).sum(1)), data.y)


def dense_graphs(rng):
    model = DenseGraphs(rng.choice([16, 64]), rng.choice([1, 3]), rng.random() < 0.5)
    return Trained("dense graph attention", model, _draw_graphs(rng)), {}


class OfEdges(nn.Module):
    """Convolutions that are given the edges' features."""

    def __init__(self, layers, normed):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = g.GraphNorm(32) if normed else None
        self.last = nn.Linear(32, 1)

    def forward(self, data):
        x = data.x
        for layer in self.layers:
            if isinstance(layer, (g.RGCNConv, g.FastRGCNConv)):
                x = layer(x, data.edge_index, data.edge_type)
            elif isinstance(
                layer,
                (
                    g.GATConv,
                    g.PDNConv,
                    g.TransformerConv,
                    g.NNConv,
                    g.GINEConv,
                    g.GMMConv,
                    g.CGConv,
                    g.GENConv,
                ),
            ):
                x = layer(x, data.edge_index, data.edge_attr)
            else:
                x = layer(x, data.edge_index)
            if self.norm is not None:
                x = self.norm(x, data.batch)
            x = x.relu()
        return F.mse_loss(self.last(g.global_mean_pool(x, data.batch)), data.y)


def _edge_layer(rng, name, before):
    return {
        "nn": lambda: g.NNConv(before, 32, nn.Linear(5, before * 32)),
        "gine": lambda: g.GINEConv(nn.Linear(before, 32), edge_dim=5),
        "transformer": lambda: g.TransformerConv(before, 8, 4, edge_dim=5, beta=True),
        "gat": lambda: g.GATConv(before, 8, 4, edge_dim=5),
        "gmm": lambda: g.GMMConv(before, 32, 5, 3),
        "pdn": lambda: g.PDNConv(before, 32, 5, 16),
        "rgcn": lambda: g.RGCNConv(before, 32, 4, num_bases=rng.choice([None, 2])),
        "fast rgcn": lambda: g.FastRGCNConv(before, 32, 4),
        "gen": lambda: g.GENConv(before, 32, edge_dim=5),
        "sage": lambda: g.SAGEConv(before, 32, aggr="max"),
        "film": lambda: g.FiLMConv(before, 32),
        "arma": lambda: g.ARMAConv(before, 32, 2, 2),
    }[name]()


def of_edges(rng):
    names = [
        "nn",
        "gine",
        "transformer",
        "gat",
        "gmm",
        "pdn",
        "rgcn",
        "fast rgcn",
        "gen",
        "film",
        "arma",
        "sage",
    ]
    chosen = rng.choices(names, k=rng.randint(1, 3))
    widths = [16, 32, 32]
    layers = [_edge_layer(rng, name, widths[i]) for i, name in enumerate(chosen)]
    return Trained(
        f"edges {chosen}", OfEdges(layers, rng.random() < 0.4), _draw_graphs(rng)
    ), {}


class _Homogeneous(nn.Module):
    def __init__(self, width, kind):
        super().__init__()
        if kind == "sage":
            self.a, self.b = g.SAGEConv((-1, -1), width), g.SAGEConv((-1, -1), width)
        else:
            self.a = g.GATv2Conv((-1, -1), width, edge_dim=3, add_self_loops=False)
            self.b = g.GATv2Conv((-1, -1), width, edge_dim=3, add_self_loops=False)
        self.kind = kind

    def forward(self, x, edge_index, edge_attr):
        if self.kind == "sage":
            return self.b(self.a(x, edge_index).relu(), edge_index)
        return self.b(self.a(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


class OfTypes(nn.Module):
    def __init__(self, inner, attributes):
        super().__init__()
        self.inner, self.attributes = inner, attributes

    def forward(self, data):
        arguments = [data.x_dict, data.edge_index_dict]
        if self.attributes:
            arguments.append(data.edge_attr_dict)
        out = self.inner(*arguments)
        return sum(x.square().mean() for x in out.values())


def to_types(rng):
    graphs = []
    for _ in range(rng.randint(2, 16)):
        graph = typed_graph(rng)
        for edge_type in graph.edge_types:
            graph[edge_type].edge_attr = torch.randn(graph[edge_type].num_edges, 3)
        graphs.append(graph)
    batch = Batch.from_data_list(graphs)
    way = rng.choice(["sage", "gat", "hgt", "han"])
    width = rng.choice([16, 32])
    if way in {"sage", "gat"}:
        inner = g.to_hetero(
            _Homogeneous(width, way),
            batch.metadata(),
            aggr=rng.choice(["sum", "mean", "max"]),
        )
        model = OfTypes(inner, True)
    else:
        kind = {"hgt": g.HGTConv, "han": g.HANConv}[way]
        model = OfTypes(
            kind({"a": 12, "b": 7}, width, batch.metadata(), heads=4), False
        )
    with torch.no_grad():
        model(batch)
    return Trained(f"typed {way}", model, batch), {}


class Links(nn.Module):
    """Links are told from pairs drawn by chance."""

    def __init__(self, width, variational):
        super().__init__()
        self.inner = g.GCNConv(16, width)
        self.mean, self.spread = g.GCNConv(width, width), g.GCNConv(width, width)
        self.variational = variational

    def forward(self, data):
        hidden = self.inner(data.x, data.edge_index).relu()
        z = self.mean(hidden, data.edge_index)
        loss = 0.0
        if self.variational:
            spread = self.spread(hidden, data.edge_index)
            loss = -0.5 * (1 + 2 * spread - z**2 - spread.exp() ** 2).sum(1).mean()
            z = z + torch.randn_like(spread) * spread.exp()
        wrong = negative_sampling(data.edge_index, data.num_nodes)
        for pairs, truth in ((data.edge_index, 1.0), (wrong, 0.0)):
            scores = (z[pairs[0]] * z[pairs[1]]).sum(-1)
            loss = loss + F.binary_cross_entropy_with_logits(
                scores, torch.full_like(scores, truth)
            )
        return loss


def links(rng):
    return Trained(
        "links", Links(rng.choice([16, 64]), rng.random() < 0.5), _draw_graphs(rng)
    ), {}


class Pooled(nn.Module):
    """Graphs made smaller on the way: chosen, clustered, condensed."""

    def __init__(self, way, width):
        super().__init__()
        self.first = g.GCNConv(16, width)
        self.way = way
        if way == "diff":
            self.assign = g.DenseSAGEConv(width, 8)
            self.after = g.DenseSAGEConv(width, width)
        elif way == "dmon":
            self.pool = g.DMoNPooling(width, 8)
        elif way == "mincut":
            self.assign = nn.Linear(width, 8)
        elif way == "sag":
            self.pool = g.SAGPooling(width, 0.5)
        elif way == "asap":
            self.pool = g.ASAPooling(width, 0.5)
        elif way == "gmt":
            self.pool = g.aggr.GraphMultisetTransformer(width, 6, heads=2)
        elif way == "set transformer":
            self.pool = g.aggr.SetTransformerAggregation(width, heads=2)
        elif way == "attentional":
            self.pool = g.aggr.AttentionalAggregation(nn.Linear(width, 1))
        elif way == "deep sets":
            self.pool = g.aggr.DeepSetsAggregation(nn.Linear(width, width))
        else:
            self.pool = g.aggr.MultiAggregation(["mean", "std", "max"])
        self.last = nn.LazyLinear(1)

    def forward(self, data):
        x = self.first(data.x, data.edge_index).relu()
        loss = 0.0
        if self.way in {"diff", "dmon", "mincut"}:
            dense, mask = to_dense_batch(x, data.batch)
            near = to_dense_adj(data.edge_index, data.batch)
            if self.way == "diff":
                x, near, a, b = g.dense_diff_pool(
                    dense, near, self.assign(dense, near), mask
                )
                x, loss = self.after(x, near).mean(1), a + b
            elif self.way == "dmon":
                _, x, near, a, b, c = self.pool(dense, near, mask)
                x, loss = x.mean(1), a + b + c
            else:
                x, near, a, b = g.dense_mincut_pool(
                    dense, near, self.assign(dense), mask
                )
                x, loss = x.mean(1), a + b
        elif self.way in {"sag", "asap"}:
            out = self.pool(x, data.edge_index, batch=data.batch)
            x = g.global_max_pool(out[0], out[3])
        else:
            x = self.pool(x, data.batch)
        return F.mse_loss(self.last(x), data.y) + loss


POOLS = [
    "diff",
    "dmon",
    "mincut",
    "sag",
    "asap",
    "gmt",
    "set transformer",
    "attentional",
    "deep sets",
    "multi",
]


def pooled(rng):
    way, batch = rng.choice(POOLS), _draw_graphs(rng)
    model = Pooled(way, rng.choice([16, 32]))
    with torch.no_grad():
        model(batch)
    return Trained(f"pooled {way}", model, batch), {}


class Atoms(nn.Module):
    """Forces of an energy: the gradient of the output is trained on."""

    def __init__(self, width, forces):
        super().__init__()
        self.table = nn.Embedding(10, width)
        self.near = nn.Sequential(
            nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.last = nn.Sequential(
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )
        self.forces = forces

    def forward(self, data):
        pos = data.pos.requires_grad_(self.forces)
        source, target = data.edge_index
        apart = (pos[source] - pos[target] + 1e-3).norm(dim=-1, keepdim=True)
        waves = torch.exp(-((apart - torch.linspace(0, 5, 16)) ** 2))
        messages = self.near(waves) * self.table(data.z)[source]
        hidden = torch.zeros(len(data.z), messages.size(1)).index_add(
            0, target, messages
        )
        energy = g.global_add_pool(self.last(hidden), data.batch)
        loss = F.l1_loss(energy, data.y)
        if self.forces:
            [force] = torch.autograd.grad(energy.sum(), pos, create_graph=True)
            loss = loss + force.square().mean()
        return loss


def atoms(rng):
    return Trained(
        "atoms", Atoms(rng.choice([16, 64]), rng.random() < 0.6), _draw_graphs(rng)
    ), {}


class Jumping(nn.Module):
    def __init__(self, width, mode, deep):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.layers = nn.ModuleList(
            g.DeepGCNLayer(
                g.GENConv(width, width),
                nn.LayerNorm(width),
                nn.ReLU(),
                deep,
                0.1,
                ckpt_grad=deep == "res",
            )
            for _ in range(3)
        )
        self.jump = g.JumpingKnowledge(mode, width, 3)
        self.last = nn.LazyLinear(1)

    def forward(self, data):
        x = self.first(data.x)
        hidden = []
        for layer in self.layers:
            x = layer(x, data.edge_index)
            hidden.append(x)
        if x.size(1) == hidden[0].size(1):
            x = self.jump(hidden)
        return F.mse_loss(self.last(g.global_mean_pool(x, data.batch)), data.y)


def jumping(rng):
    model = Jumping(
        16, rng.choice(["cat", "max", "lstm"]), rng.choice(["res", "res+", "plain"])
    )
    batch = _draw_graphs(rng)
    with torch.no_grad():
        model(batch)
    return Trained("jumping", model, batch), {}


class Global(nn.Module):
    def __init__(self, width, kind, norm):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.places = g.GINEConv(nn.Linear(width, width), edge_dim=5)
        self.inner = g.GPSConv(width, self.places, heads=4, attn_type=kind, norm=norm)
        self.last = nn.Linear(width, 1)

    def forward(self, data):
        x = self.inner(
            self.first(data.x), data.edge_index, data.batch, edge_attr=data.edge_attr
        )
        return F.mse_loss(self.last(g.global_add_pool(x, data.batch)), data.y)


def global_attention(rng):
    kind = rng.choice(["multihead", "performer"])
    norm = rng.choice(["batch_norm", "layer_norm", None])
    return Trained(
        f"global {kind}", Global(rng.choice([16, 64]), kind, norm), _draw_graphs(rng)
    ), {}


MODELS = (
    decoder,
    unet,
    diffusion,
    towers,
    packed,
    own_functions,
    accumulated,
    penalised,
    experts,
    scan,
    reparametrised,
    vision,
    variational,
    mapped,
    rendered,
)
GRAPH_MODELS = (
    dense_graphs,
    of_edges,
    to_types,
    links,
    pooled,
    atoms,
    jumping,
    global_attention,
)
FAMILIES = {"models": MODELS, "graph models": GRAPH_MODELS}


def draw_model_step(seed, family):
    """Draw a model of a family and how it is trained; a seed always gives the same."""
    rng = random.Random(f"{family} {seed}")
    torch.manual_seed(seed)
    kinds = FAMILIES[family]
    trained, options = kinds[seed % len(kinds)](rng)
    name = rng.choice(list(OPTIMIZERS))
    options = {**options, "optimizer": OPTIMIZERS[name]}
    description = f"{seed}: {trained.description}; {name}; {options.get('autocast')}"
    step = Step(trained.loss, **options)
    return DrawnStep(
        description, trained.model, trained.batch, step, rng.choice([1, 2])
    )
