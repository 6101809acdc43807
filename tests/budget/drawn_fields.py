"""Training steps as other fields write them: vision, sound, text, tables, science.

Where ``drawn_models.py`` holds kinds of models that this library was mended for, these
were written down before any estimate of them was seen.  Each kind draws its sizes; the
optimizers are those of torch that nothing else here draws, and ways to wrap one.
"""

import copy
import itertools
import random

import torch
from drawn import DrawnStep, Trained
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from loaderkit.budget.step.train_step import Step


def _mlp(*widths):
    layers = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


# Vision ------------------------------------------------------------------------------


class _ViT(nn.Module):
    def __init__(self, width, patch, size, depth):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        count = (size // patch) ** 2 + 1
        self.positions = nn.Parameter(torch.randn(1, count, width))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.mlp = nn.ModuleList(_mlp(width, 4 * width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for number, (qkv, mlp) in enumerate(zip(self.qkv, self.mlp, strict=True)):
            heads = qkv(self.norms[2 * number](x)).unflatten(2, (3, 4, -1))
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v)
            x = x + mixed.transpose(1, 2).flatten(2)
            x = x + mlp(self.norms[2 * number + 1](x))
        return self.head(x[:, 0])


def vit(rng):
    width, size = rng.choice([32, 64]), rng.choice([16, 32])
    images = torch.randn(rng.randint(3, 16), 3, size, size)
    return Trained(f"{width}, {size}", _ViT(width, 4, size, rng.randint(1, 3)), images)


class _Windows(nn.Module):
    """Shifted windows, as Swin has them."""

    def __init__(self, width, window):
        super().__init__()
        self.window = window
        self.first = nn.Conv2d(3, width, 1)
        self.inner = nn.MultiheadAttention(width, 2, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(window**2, window**2))
        self.merge = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, images):
        w = self.window
        x = self.first(images).permute(0, 2, 3, 1)
        n, height, width, c = x.shape
        x = torch.roll(x, (-w // 2, -w // 2), (1, 2))
        x = x.view(n, height // w, w, width // w, w, c).transpose(2, 3)
        x = x.reshape(-1, w * w, c)
        x = self.inner(x, x, x, attn_mask=self.bias, need_weights=False)[0]
        x = x.view(n, height // w, width // w, w, w, c).transpose(2, 3)
        x = x.reshape(n, height, width, c)
        quarters = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return self.merge(torch.cat(quarters, -1)).mean((1, 2))


def windows(rng):
    size = rng.choice([16, 24])
    images = torch.randn(rng.randint(2, 12), 3, size, size)
    return Trained(f"{size}", _Windows(rng.choice([16, 48]), 4), images)


class _ConvNeXt(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, 2)
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(1e-6 * torch.ones(width))

    def forward(self, images):
        x = self.stem(images)
        h = self.depthwise(x).permute(0, 2, 3, 1)
        h = self.scale * self.mlp(self.norm(h))
        # Stochastic depth: some samples skip the block.
        keep = torch.rand(len(x), 1, 1, 1) < 0.8
        return (x + h.permute(0, 3, 1, 2) * keep).mean((2, 3))


def convnext(rng):
    images = torch.randn(rng.randint(2, 12), 3, 24, 24)
    if rng.random() < 0.5:
        images = images.to(memory_format=torch.channels_last)
    return Trained("", _ConvNeXt(rng.choice([16, 40])), images)


class _Dense(nn.Module):
    """Each layer sees all layers before it."""

    def __init__(self, growth, layers):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(3 + growth * number),
                nn.ReLU(inplace=True),
                nn.Conv2d(3 + growth * number, growth, 3, padding=1, bias=False),
            )
            for number in range(layers)
        )

    def forward(self, images):
        features = [images]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


def densenet(rng):
    images = torch.randn(rng.randint(2, 10), 3, 20, 20)
    return Trained("", _Dense(rng.choice([8, 12]), rng.randint(2, 5)), images)


class _Inverted(nn.Module):
    """An inverted bottleneck with squeeze and excitation."""

    def __init__(self, channels, expansion):
        super().__init__()
        wide = channels * expansion
        self.expand = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU()
        )
        self.depthwise = nn.Conv2d(wide, wide, 5, 1, 2, groups=wide, bias=False)
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(wide, wide // 4, 1),
            nn.SiLU(),
            nn.Conv2d(wide // 4, wide, 1),
            nn.Hardsigmoid(),
        )
        self.project = nn.Conv2d(wide, channels, 1, bias=False)

    def forward(self, x):
        h = F.hardswish(self.depthwise(self.expand(x)), inplace=True)
        return x + self.project(h * self.squeeze(h))


def mobile(rng):
    channels = rng.choice([4, 8])
    images = torch.randn(rng.randint(2, 12), channels, 18, 18)
    blocks = [_Inverted(channels, rng.choice([4, 6])) for _ in range(rng.randint(1, 3))]
    return Trained("", nn.Sequential(*blocks), images)


def video(rng):
    clips = torch.randn(rng.randint(2, 5), 3, 6, 14, 14)
    model = nn.Sequential(
        nn.Conv3d(3, 8, (3, 3, 3), padding=1),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.MaxPool3d((1, 2, 2)),
        nn.Conv3d(8, 16, (3, 1, 1), padding=(1, 0, 0)),
        nn.InstanceNorm3d(16, affine=True),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    classes = torch.randint(5, (len(clips),))
    return Trained("", model, (clips, classes), F.cross_entropy)


def super_resolution(rng):
    factor = rng.choice([2, 3])
    small = torch.rand(rng.randint(2, 8), 3, 16, 16)
    large = F.interpolate(small, scale_factor=factor)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.Tanh(),
        nn.Conv2d(32, 3 * factor**2, 3, padding=1),
        nn.PixelShuffle(factor),
    )
    return Trained(
        f"x{factor}", model, (small, large), rng.choice([F.l1_loss, _psnr_loss])
    )


def _psnr_loss(output, target):
    return 10 * torch.log10((output - target).square().mean((1, 2, 3))).mean()


class _Style(nn.Module):
    """Adaptive instance norm and modulated convolutions, as generators have them."""

    def __init__(self, channels):
        super().__init__()
        self.mapping = _mlp(16, 64, 64)
        self.constant = nn.Parameter(torch.randn(1, channels, 4, 4))
        self.weight = nn.Parameter(torch.randn(channels, channels, 3, 3))
        self.scales = nn.Linear(64, channels)
        self.affine = nn.Linear(64, 2 * channels)
        self.colours = nn.Conv2d(channels, 3, 1)

    def forward(self, noise):
        style = self.mapping(noise)
        n = len(style)
        weight = self.weight * self.scales(style)[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), True) + 1e-8)
        x = self.constant.expand(n, -1, -1, -1)
        x = F.interpolate(x, scale_factor=2, mode="bilinear")
        x = x.reshape(1, -1, *x.shape[2:])
        x = F.conv2d(x, weight.flatten(0, 1), padding=1, groups=n)
        x = x.view(n, -1, *x.shape[2:])
        scale, shift = self.affine(style).chunk(2, 1)
        x = F.instance_norm(x) * scale[..., None, None] + shift[..., None, None]
        return self.colours(F.leaky_relu(x, 0.2) + torch.randn_like(x[:, :1]))


def style(rng):
    return Trained("", _Style(rng.choice([8, 24])), torch.randn(rng.randint(2, 9), 16))


class _Transformer2d(nn.Module):
    """A spatial transformer: a grid that the image itself chooses."""

    def __init__(self):
        super().__init__()
        self.localise = nn.Sequential(
            nn.Conv2d(1, 8, 7), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()
        )
        self.theta = nn.LazyLinear(6)
        self.head = nn.Conv2d(1, 8, 5)

    def forward(self, images):
        theta = self.theta(self.localise(images)).view(-1, 2, 3)
        grid = F.affine_grid(theta, images.shape, align_corners=False)
        return self.head(F.grid_sample(images, grid, align_corners=False))


def spatial_transformer(rng):
    images = torch.randn(rng.randint(2, 12), 1, 20, 20)
    model = _Transformer2d()
    with torch.no_grad():
        model(images)
    return Trained("", model, images)


class _Pyramid(nn.Module):
    """A feature pyramid with two heads, as detectors have it."""

    def __init__(self, channels):
        super().__init__()
        self.down = nn.ModuleList(
            nn.Conv2d(before, channels, 3, 2, 1) for before in (3, channels, channels)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in "123")
        self.classes = nn.Conv2d(channels, 2 * 4, 3, padding=1)
        self.boxes = nn.Conv2d(channels, 2 * 4, 3, padding=1)

    def forward(self, images):
        features = []
        for layer in self.down:
            images = layer(images).relu()
            features.append(images)
        above = None
        scores, boxes = [], []
        for lateral, feature in zip(self.lateral, reversed(features), strict=True):
            x = lateral(feature)
            if above is not None:
                x = x + F.interpolate(above, size=x.shape[2:], mode="nearest")
            above = x
            scores.append(self.classes(x).permute(0, 2, 3, 1).reshape(len(x), -1, 4))
            boxes.append(self.boxes(x).permute(0, 2, 3, 1).reshape(len(x), -1, 4))
        return torch.cat(scores, 1), torch.cat(boxes, 1)


def _detection_loss(output, target):
    scores, boxes = output
    anchors = scores.size(1)
    wanted = F.one_hot(target[:, :anchors], 5)[..., :4].float()
    chance = scores.sigmoid()
    p = chance * wanted + (1 - chance) * (1 - wanted)
    focal = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    focal = (focal * (1 - p).pow(2)).sum() / len(scores)
    positive = target[:, :anchors] < 4
    return focal + F.smooth_l1_loss(
        boxes[positive], torch.zeros(int(positive.sum()), 4)
    )


def detection(rng):
    images = torch.randn(rng.randint(2, 5), 3, 24, 24)
    classes = torch.randint(5, (len(images), 500))
    return Trained(
        "", _Pyramid(rng.choice([8, 16])), (images, classes), _detection_loss
    )


class _MaskedAutoencoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(48, width)
        self.mask = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = _mlp(width, 2 * width, 48)

    def forward(self, patches):
        n, count, _ = patches.shape
        kept = count // 4
        order = torch.rand(n, count).argsort(1)
        back = order.argsort(1)
        x = self.first(patches)
        width = x.size(2)
        x = x.gather(1, order[:, :kept, None].expand(-1, -1, width))
        x = self.encoder(x)
        x = torch.cat([x, self.mask.expand(n, count - kept, -1)], 1)
        x = x.gather(1, back[..., None].expand(-1, -1, width))
        is_masked = (back >= kept).float()
        error = (self.decoder(x) - patches).square().mean(2)
        return (error * is_masked).sum() / is_masked.sum()


def masked_autoencoder(rng):
    patches = torch.randn(rng.randint(2, 12), rng.choice([16, 36]), 48)
    return Trained("", _MaskedAutoencoder(rng.choice([32, 64])), patches)


class _VectorQuantised(nn.Module):
    """Codes nearest to what was encoded, straight through, with moving averages."""

    def __init__(self, codes, width):
        super().__init__()
        self.encode = nn.Conv2d(3, width, 4, 2, 1)
        self.decode = nn.ConvTranspose2d(width, 3, 4, 2, 1)
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))

    def forward(self, images):
        z = self.encode(images).permute(0, 2, 3, 1)
        flat = z.reshape(-1, z.size(-1))
        nearest = torch.cdist(flat, self.codes).argmin(1)
        chosen = F.embedding(nearest, self.codes).view_as(z)
        with torch.no_grad():
            one_hot = F.one_hot(nearest, len(self.codes)).float()
            self.counts.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
            sums = one_hot.t() @ flat
            self.codes.lerp_(sums / self.counts[:, None], 0.1)
        passed = z + (chosen - z).detach()
        out = self.decode(passed.permute(0, 3, 1, 2))
        return F.mse_loss(out, images) + 0.25 * F.mse_loss(z, chosen.detach())


def vector_quantised(rng):
    images = torch.randn(rng.randint(2, 8), 3, 16, 16)
    return Trained("", _VectorQuantised(rng.choice([64, 512]), 24), images)


def spectral_critic(rng):
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Conv2d(3, 16, 4, 2, 1)),
        nn.LeakyReLU(0.2, inplace=True),
        parametrizations.weight_norm(nn.Conv2d(16, 32, 4, 2, 1)),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        parametrizations.orthogonal(nn.Linear(32 * 16, 8)),
    )
    images = torch.randn(rng.randint(4, 16), 3, 16, 16)
    return Trained("", model, images, lambda out: F.softplus(-out).mean())


class _Perceiver(nn.Module):
    def __init__(self, latents, width):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, width))
        self.cross = nn.MultiheadAttention(width, 1, kdim=20, vdim=20, batch_first=True)
        layer = nn.TransformerEncoderLayer(
            width, 2, width, 0.0, batch_first=True, norm_first=True
        )
        self.layer = layer

    def forward(self, x):
        latents = self.latents.expand(len(x), -1, -1)
        latents = latents + self.cross(latents, x, x)[0]
        for _ in range(3):
            latents = self.layer(latents)
        return latents.mean(1)


def perceiver(rng):
    inputs = torch.randn(rng.randint(2, 6), rng.choice([200, 700]), 20)
    return Trained("", _Perceiver(rng.choice([8, 40]), 32), inputs)


class _Mixer(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.tokens, self.channels = _mlp(tokens, 64, tokens), _mlp(width, 128, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in "12")

    def forward(self, x):
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norms[1](x))
        # FNet: a Fourier transform in place of attention.
        return torch.fft.fft2(x).real


def mixer(rng):
    tokens, width = rng.choice([25, 49]), rng.choice([24, 64])
    return Trained(
        "", _Mixer(tokens, width), torch.randn(rng.randint(3, 20), tokens, width)
    )


class _Slots(nn.Module):
    """Slots that compete for inputs, by attention over the slots and a GRU cell."""

    def __init__(self, width):
        super().__init__()
        self.keys = nn.Linear(width, 2 * width)
        self.queries = nn.Linear(width, width)
        self.cell = nn.GRUCell(width, width)
        self.centre = nn.Parameter(torch.randn(width))

    def forward(self, x):
        n, _, width = x.shape
        k, v = self.keys(x).chunk(2, 2)
        slots = self.centre + torch.randn(n, 5, width)
        for _ in range(3):
            scores = torch.einsum("nsd,nkd->nsk", self.queries(slots), k)
            shares = scores.softmax(1) + 1e-8
            shares = shares / shares.sum(2, keepdim=True)
            updates = torch.einsum("nsk,nkd->nsd", shares, v)
            slots = self.cell(updates.flatten(0, 1), slots.flatten(0, 1))
            slots = slots.view(n, 5, width)
        return slots


def slots(rng):
    return Trained("", _Slots(32), torch.randn(rng.randint(3, 12), 60, 32))


# Sound -------------------------------------------------------------------------------


class _WaveNet(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv1d(1, channels, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(channels, 2 * channels, 2, dilation=2**k) for k in range(4)
        )
        self.skips = nn.ModuleList(nn.Conv1d(channels, 32, 1) for _ in range(4))

    def forward(self, wave):
        x = self.first(wave)
        total = 0
        for gate, skip in zip(self.gates, self.skips, strict=True):
            left = gate.dilation[0]
            filters, gates = gate(F.pad(x, (left, 0))).chunk(2, 1)
            h = filters.tanh() * gates.sigmoid()
            total = total + skip(h)
            x = x + h
        return total


def wavenet(rng):
    return Trained(
        "",
        _WaveNet(rng.choice([8, 16])),
        torch.randn(rng.randint(2, 6), 1, rng.choice([500, 2000])),
    )


class _Recogniser(nn.Module):
    """Sound to characters: a spectrogram, convolutions, GRUs, and CTC."""

    def __init__(self, kind):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, (7, 5), (2, 2), (3, 2))
        self.rnn = kind(4 * 33, 32, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 12)

    def forward(self, wave):
        spectrum = torch.stft(
            wave, 128, 64, window=torch.hann_window(128), return_complex=True
        )
        x = spectrum.abs().square().clamp(min=1e-6).log()[:, None]
        x = F.relu(self.conv(x)).permute(0, 3, 1, 2).flatten(2)
        return self.head(self.rnn(x)[0]).log_softmax(2).transpose(0, 1)


def _ctc_loss(output, target):
    frames = torch.full((output.size(1),), output.size(0))
    lengths = (target > 0).sum(1)
    return F.ctc_loss(output, target, frames, lengths)


def recogniser(rng):
    wave = torch.randn(rng.randint(2, 6), 4000)
    target = torch.randint(1, 12, (len(wave), 6))
    kind = rng.choice([nn.GRU, nn.LSTM, nn.RNN])
    return Trained(kind.__name__, _Recogniser(kind), (wave, target), _ctc_loss)


class _Transducer(nn.Module):
    """Encoder, predictor and joint network over all pairs of time and label."""

    def __init__(self, width):
        super().__init__()
        self.encoder = nn.LSTM(20, width, batch_first=True)
        self.predictor = nn.GRU(width, width, batch_first=True)
        self.embed = nn.Embedding(12, width)
        self.joint = nn.Linear(width, 12)

    def forward(self, sound, labels):
        times = self.encoder(sound)[0][:, :, None]
        tokens = self.predictor(self.embed(F.pad(labels, (1, 0))))[0][:, None]
        scores = self.joint((times + tokens).tanh()).log_softmax(3)
        blank = scores[..., 0]
        wanted = labels[:, None, :, None].expand(-1, scores.size(1), -1, 1)
        emit = scores[:, :, :-1].gather(3, wanted)[..., 0]
        # The forward variables, a diagonal at a time is faster; row by row is usual.
        alpha = F.pad(emit[:, 0].cumsum(1), (1, 0))
        for time in range(1, scores.size(1)):
            stay = alpha + blank[:, time - 1]
            row = [stay[:, 0]]
            for label in range(emit.size(2)):
                up = row[-1] + emit[:, time, label]
                row.append(torch.logaddexp(stay[:, label + 1], up))
            alpha = torch.stack(row, 1)
        return -(alpha[:, -1] + blank[:, -1, -1]).mean()


def transducer(rng):
    n = rng.randint(2, 5)
    sound, labels = torch.randn(n, 12, 20), torch.randint(1, 12, (n, 4))
    return Trained("", _Transducer(rng.choice([16, 32])), (sound, labels))


class _Conformer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.feed = _mlp(width, 4 * width, width)
        self.inner = nn.MultiheadAttention(width, 4, 0.1, batch_first=True)
        self.gate = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, 9, padding=4, groups=width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.LayerNorm(width)

    def forward(self, x):
        x = x + 0.5 * self.feed(x)
        x = x + self.inner(x, x, x, need_weights=False)[0]
        h = F.glu(self.gate(x.transpose(1, 2)), 1)
        h = F.silu(self.norm(self.depthwise(h))).transpose(1, 2)
        return self.last(x + h)


def conformer(rng):
    blocks = [_Conformer(32) for _ in range(rng.randint(1, 3))]
    return Trained("", nn.Sequential(*blocks), torch.randn(rng.randint(2, 8), 50, 32))


def temporal(rng):
    layers = []
    channels = 3
    for k in range(rng.randint(2, 4)):
        conv = nn.Conv1d(channels, 24, 3, padding=2**k, dilation=2**k)
        layers += [
            parametrizations.weight_norm(conv),
            nn.PReLU(24),
            nn.Dropout1d(0.1),
            nn.GroupNorm(3, 24),
        ]
        channels = 24
    layers += [nn.AvgPool1d(4), nn.Flatten(), nn.LazyLinear(1)]
    series = torch.randn(rng.randint(4, 20), 3, 200)
    model = nn.Sequential(*layers)
    model(series)
    return Trained("", model, (series, torch.rand(len(series), 1)), nn.HuberLoss())


# Text --------------------------------------------------------------------------------


class _Llama(nn.Module):
    """Rotary positions, grouped queries, RMS norms, a gated feed forward."""

    def __init__(self, width, heads, groups, vocabulary, *, tie, again):
        super().__init__()
        self.heads, self.groups, self.again = heads, groups, again
        head_width = width // heads
        self.embed = nn.Embedding(vocabulary, width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in "123")
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        powers = 10_000 ** (-torch.arange(0, head_width, 2) / head_width)
        self.register_buffer("powers", powers)

    def _rotate_pairs(self, x):
        angles = torch.arange(x.size(2))[:, None] * self.powers
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(3)

    def _attend_in_groups(self, x):
        h = self.norms[0](x)
        q = self.q(h).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(h).unflatten(2, (2, self.groups, -1)).unbind(2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        q, k = self._rotate_pairs(q), self._rotate_pairs(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        a, b = self.gate(self.norms[1](x)).chunk(2, 2)
        return x + self.down(F.silu(a) * b)

    def forward(self, words):
        x = self.embed(words)
        x = (
            checkpoint(self._attend_in_groups, x, use_reentrant=False)
            if self.again
            else self._attend_in_groups(x)
        )
        return self.head(self.norms[2](x))


def _next_word(output, words):
    return F.cross_entropy(output[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def llama(rng):
    vocabulary = rng.choice([200, 3000])
    words = torch.randint(vocabulary, (rng.randint(2, 8), rng.choice([16, 64])))
    tie, again = rng.random() < 0.5, rng.random() < 0.3
    model = _Llama(64, 8, rng.choice([1, 2, 8]), vocabulary, tie=tie, again=again)
    return Trained(f"tied {tie}, again {again}", model, words, _next_word)


class _LowRank(nn.Module):
    """A frozen layer with a product of two thin matrices beside it."""

    def __init__(self, inner, rank):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Linear(inner.in_features, rank, bias=False)
        self.b = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x):
        return self.inner(x) + 0.5 * self.b(F.dropout(self.a(x), 0.1))


def low_rank(rng):
    model = _Llama(64, 8, 2, 300, tie=True, again=rng.random() < 0.5)
    model.requires_grad_(False)
    for name in ("q", "kv", "gate"):
        setattr(model, name, _LowRank(getattr(model, name), rng.choice([2, 8])))
    words = torch.randint(300, (rng.randint(2, 8), 40))
    return Trained("", model, words, _next_word)


class _SeqToSeq(nn.Module):
    """Cells stepped word by word, with additive attention and teacher forcing."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(80, width, padding_idx=0)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.cell = nn.LSTMCell(2 * width, width)
        self.keys, self.query = nn.Linear(width, width), nn.Linear(width, width)
        self.score = nn.Linear(width, 1)
        self.head = nn.Linear(2 * width, 80)

    def forward(self, source, target):
        memory, (h, c) = self.encoder(self.embed(source))
        h, c = h[0], c[0]
        keys = self.keys(memory)
        padding = source == 0
        outputs = []
        for step in range(target.size(1)):
            scores = self.score((keys + self.query(h)[:, None]).tanh())[..., 0]
            shares = scores.masked_fill(padding, float("-inf")).softmax(1)
            context = (shares[:, None] @ memory)[:, 0]
            word = self.embed(target[:, step])
            h, c = self.cell(torch.cat([word, context], 1), (h, c))
            outputs.append(self.head(torch.cat([h, context], 1)))
        return torch.stack(outputs, 1)


def seq_to_seq(rng):
    n = rng.randint(2, 12)
    batch = torch.randint(1, 80, (n, 15)), torch.randint(1, 80, (n, rng.choice([4, 9])))
    return Trained("", _SeqToSeq(rng.choice([16, 48])), batch)


class _Translating(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(120, width)
        self.inner = nn.Transformer(width, 4, 1, 2, 2 * width, 0.1, batch_first=True)
        self.head = nn.Linear(width, 120)

    def forward(self, source, target):
        causal = self.inner.generate_square_subsequent_mask(target.size(1))
        padding = source == 0
        out = self.inner(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.head(out)


def translating(rng):
    n = rng.randint(2, 10)
    source = torch.randint(1, 120, (n, 20))
    source[0, 10:] = 0
    batch = source, torch.randint(1, 120, (n, rng.choice([7, 18])))
    return Trained("", _Translating(rng.choice([16, 32])), batch)


class _AdaptiveSoftmax(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.embed = nn.Embedding(words, 32)
        self.rnn = nn.GRU(32, 32, batch_first=True)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(32, words, [20, words // 3])

    def forward(self, words):
        hidden = self.rnn(self.embed(words))[0][:, :-1]
        return self.head(hidden.flatten(0, 1), words[:, 1:].flatten()).loss


def adaptive_softmax(rng):
    words = torch.randint(300, (rng.randint(2, 12), 20))
    return Trained("", _AdaptiveSoftmax(300), words)


class _CharacterCnn(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.embed = nn.Embedding(60, 16)
        self.convs = nn.ModuleList(nn.Conv1d(16, 24, width) for width in widths)
        self.highway = nn.Linear(24 * len(widths), 48 * len(widths))

    def forward(self, letters):
        x = self.embed(letters).transpose(1, 2)
        x = torch.cat([conv(x).amax(2) for conv in self.convs], 1)
        h, gate = self.highway(x).chunk(2, 1)
        gate = gate.sigmoid()
        return gate * h.relu() + (1 - gate) * x


def character_cnn(rng):
    letters = torch.randint(60, (rng.randint(4, 64), 30))
    return Trained("", _CharacterCnn([2, 3, 5][: rng.randint(1, 3)]), letters)


class _LinearAttention(nn.Module):
    def __init__(self, width, way):
        super().__init__()
        self.qkv, self.way = nn.Linear(width, 3 * width), way
        self.decay = nn.Parameter(torch.rand(4))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if self.way == "kernel":
            q, k = F.elu(q) + 1, F.elu(k) + 1
            states = torch.einsum("nhtd,nhte->nhtde", k, v).cumsum(2)
            sums = torch.einsum("nhtd,nhtd->nht", q, k.cumsum(2))
            return torch.einsum("nhtd,nhtde->nhte", q, states) / sums[..., None]
        length = x.size(1)
        apart = torch.arange(length)[:, None] - torch.arange(length)
        if self.way == "retention":
            powers = self.decay.sigmoid()[:, None, None] ** apart.clamp(min=0)
            scores = q @ k.transpose(2, 3) * powers.tril()
            return scores @ v / scores.abs().sum(3, keepdim=True).clamp(min=1)
        # Slopes by distance, and a window.
        bias = -self.decay[:, None, None] * apart.abs()
        bias = bias.masked_fill(apart.abs() > 8, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def linear_attention(rng):
    way = rng.choice(["kernel", "retention", "window"])
    x = torch.randn(rng.randint(2, 6), rng.choice([20, 50]), 32)
    return Trained(way, _LinearAttention(32, way), x)


class _Selective(nn.Module):
    """A selective state space, scanned step by step."""

    def __init__(self, width, states):
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.conv = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.parameters_of = nn.Linear(width, 2 * states + 1)
        self.a = nn.Parameter(torch.rand(width, states))
        self.last = nn.Linear(width, width)

    def forward(self, x):
        x, gate = self.first(x).chunk(2, 2)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.size(1)]).transpose(1, 2)
        delta, b, c = self.parameters_of(x).split([1, *[self.a.size(1)] * 2], 2)
        delta = F.softplus(delta)
        decay = torch.exp(-delta[..., None] * self.a.exp())
        state = x.new_zeros(len(x), *self.a.shape)
        outputs = []
        for t in range(x.size(1)):
            state = decay[:, t] * state + b[:, t, None] * (delta * x)[:, t, :, None]
            outputs.append((state * c[:, t, None]).sum(2))
        return self.last(torch.stack(outputs, 1) * F.silu(gate))


def selective(rng):
    return Trained("", _Selective(16, 8), torch.randn(rng.randint(2, 6), 12, 16))


class _Distilled(nn.Module):
    """A student, and a teacher without gradients; half of it under autocast."""

    def __init__(self, *, autocast):
        super().__init__()
        self.student, self.teacher = _mlp(64, 96, 20), _mlp(64, 512, 512, 20)
        self.autocast = autocast

    def forward(self, x):
        with torch.no_grad():
            wanted = (self.teacher(x) / 2).softmax(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            scores = self.student(x) / 2
        return F.kl_div(scores.float().log_softmax(1), wanted, reduction="batchmean")


def distilled(rng):
    autocast = rng.random() < 0.5
    return Trained(
        f"autocast {autocast}",
        _Distilled(autocast=autocast),
        torch.randn(rng.choice([50, 600]), 64),
    )


class _Momentum(nn.Module):
    """A queue of keys of a slow copy, as MoCo has it."""

    def __init__(self, length):
        super().__init__()
        self.fast = _mlp(48, 128, 32)
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(32, length), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        query = F.normalize(self.fast(x + 0.1 * torch.randn_like(x)), dim=1)
        with torch.no_grad():
            for slow, fast in zip(
                self.slow.parameters(), self.fast.parameters(), strict=True
            ):
                slow.data = slow.data * 0.99 + fast.data * 0.01
            key = F.normalize(self.slow(x), dim=1)
        own = torch.einsum("nc,nc->n", query, key)[:, None]
        others = torch.einsum("nc,ck->nk", query, self.queue.clone().detach())
        scores = torch.cat([own, others], 1) / 0.07
        place = int(self.place)
        self.queue[:, place : place + len(x)] = key.t()
        self.place[0] = (place + len(x)) % self.queue.size(1)
        return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


def momentum_contrast(rng):
    n = rng.choice([16, 64])
    return Trained("", _Momentum(n * rng.choice([4, 16])), torch.randn(n, 48))


class _Contrast(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Flatten())
        self.image_head = nn.Linear(16 * 16, 32)
        self.words = nn.EmbeddingBag(500, 32)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.way = way

    def forward(self, images, words):
        a = F.normalize(self.image_head(self.images(images)), dim=1)
        b = F.normalize(self.words(words), dim=1)
        scores = a @ b.t() * self.temperature.exp()
        if self.way == "sigmoid":
            signs = 2 * torch.eye(len(a)) - 1
            return -F.logsigmoid(signs * scores).sum() / len(a)
        if self.way == "mining":
            same = torch.eye(len(a), dtype=torch.bool)
            hardest = scores.masked_fill(same, -1e4).max(1).values
            return F.relu(0.2 + hardest - scores.diagonal()).mean()
        own = torch.arange(len(a))
        return F.cross_entropy(scores, own) + F.cross_entropy(scores.t(), own)


def contrast(rng):
    n = rng.choice([8, 40, 150])
    batch = torch.randn(n, 3, 16, 16), torch.randint(500, (n, 12))
    way = rng.choice(["softmax", "sigmoid", "mining"])
    return Trained(way, _Contrast(way), batch)


class _Actor(nn.Module):
    """A policy and its value, by clipped ratios or by a target network."""

    def __init__(self, way):
        super().__init__()
        self.body, self.policy = _mlp(24, 64, 64), nn.Linear(64, 6)
        self.value, self.way = nn.Linear(64, 1), way
        self.target = copy.deepcopy(nn.Sequential(self.body, self.policy))
        self.target.requires_grad_(False)

    def forward(self, states, actions, rewards):
        h = self.body(states)
        if self.way == "q":
            chosen = self.policy(h).gather(1, actions[:, None])[:, 0]
            with torch.no_grad():
                best = self.policy(h).argmax(1, keepdim=True)
                after = self.target(states.roll(-1, 0)).gather(1, best)[:, 0]
            return F.smooth_l1_loss(chosen, rewards + 0.9 * after)
        chances = torch.distributions.Categorical(logits=self.policy(h))
        value = self.value(h)[:, 0]
        log_chance = chances.log_prob(actions)
        ratio = (log_chance - log_chance.detach()).exp()
        gain = rewards - value.detach()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        error = (value - rewards).square().mean()
        return error - clipped.mean() - 0.01 * chances.entropy().mean()


def actor(rng):
    n = rng.choice([64, 900])
    batch = torch.randn(n, 24), torch.randint(6, (n,)), torch.randn(n)
    way = rng.choice(["clipped", "q"])
    return Trained(way, _Actor(way), batch)


# Tables and recommenders -------------------------------------------------------------


class _Recommender(nn.Module):
    """Bags of ids beside numbers, and the products of all pairs."""

    def __init__(self, tables, *, sparse):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, 16, mode="sum", sparse=sparse) for rows in tables
        )
        self.bottom, self.top = _mlp(13, 64, 16), None
        pairs = (len(tables) + 1) * len(tables) // 2
        self.top = _mlp(16 + pairs, 64, 1)

    def forward(self, numbers, ids):
        features = [self.bottom(numbers)]
        for table, column in zip(self.tables, ids.unbind(1), strict=True):
            features.append(table(column))
        x = torch.stack(features, 1)
        products = torch.bmm(x, x.transpose(1, 2))
        rows, columns = torch.tril_indices(x.size(1), x.size(1), -1)
        flat = products[:, rows, columns]
        return self.top(torch.cat([features[0], flat], 1)).sigmoid()


def recommender(rng):
    tables = [rng.choice([50, 1000, 30_000]) for _ in range(rng.randint(2, 4))]
    n = rng.choice([32, 256])
    sparse = rng.random() < 0.4
    batch = torch.randn(n, 13), torch.randint(50, (n, len(tables), 5))
    return Trained(
        f"{tables}, sparse {sparse}", _Recommender(tables, sparse=sparse), batch
    )


class _Factors(nn.Module):
    """A factorisation machine with a deep part."""

    def __init__(self, sparse):
        super().__init__()
        self.factors = nn.Embedding(5000, 16, sparse=sparse)
        self.weights = nn.Embedding(5000, 1, sparse=sparse)
        self.deep = _mlp(16 * 8, 32, 1)

    def forward(self, ids):
        v = self.factors(ids)
        pairs = v.sum(1).square() - v.square().sum(1)
        linear = self.weights(ids).sum(1)
        return linear[:, 0] + 0.5 * pairs.sum(1) + self.deep(v.flatten(1))[:, 0]


def factors(rng):
    ids = torch.randint(5000, (rng.choice([40, 400]), 8))
    sparse = rng.random() < 0.5
    clicks = torch.randint(2, (len(ids),)).float()
    return Trained(
        f"sparse {sparse}",
        _Factors(sparse),
        (ids, clicks),
        F.binary_cross_entropy_with_logits,
    )


class _Tokeniser(nn.Module):
    """Every column of a table is a token."""

    def __init__(self, numbers, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numbers, width))
        self.bias = nn.Parameter(torch.zeros(numbers, width))
        self.kinds = nn.ModuleList(nn.Embedding(9, width) for _ in range(3))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def forward(self, numbers, kinds):
        x = numbers[..., None] * self.weight + self.bias
        tokens = [table(kinds[:, k, None]) for k, table in enumerate(self.kinds)]
        return self.head(self.encoder(torch.cat([x, *tokens], 1)).mean(1))


def tokeniser(rng):
    n = rng.choice([16, 128])
    batch = torch.randn(n, 11), torch.randint(9, (n, 3))
    return Trained("", _Tokeniser(11, 32), batch)


class _Sparsemax(nn.Module):
    """Masks of columns that are mostly zero, and batches within the batch."""

    def __init__(self, columns):
        super().__init__()
        self.scores = nn.Linear(columns, columns)
        self.norm = nn.BatchNorm1d(columns)
        self.last = nn.Linear(columns, 2)

    def forward(self, x):
        z = torch.cat([self.norm(part) for part in self.scores(x).chunk(4)])
        ordered = z.sort(1, descending=True).values
        sums = ordered.cumsum(1)
        ranks = torch.arange(1, z.size(1) + 1)
        support = (1 + ranks * ordered > sums).sum(1, keepdim=True)
        threshold = (sums.gather(1, support - 1) - 1) / support
        return self.last(x * (z - threshold).clamp(min=0))


def sparsemax(rng):
    columns = rng.choice([12, 64])
    return Trained("", _Sparsemax(columns), torch.randn(rng.choice([64, 500]), columns))


# Science -----------------------------------------------------------------------------


class _Ode(nn.Module):
    def __init__(self, width, steps):
        super().__init__()
        self.f, self.steps = _mlp(width, 2 * width, width), steps

    def forward(self, x):
        h = 1 / self.steps
        for _ in range(self.steps):
            k1 = self.f(x)
            k2 = self.f(x + h / 2 * k1)
            k3 = self.f(x + h / 2 * k2)
            k4 = self.f(x + h * k3)
            x = torch.addcmul(x, k1 + 2 * k2 + 2 * k3 + k4, torch.tensor(h / 6))
        return x


def ode(rng):
    x = torch.randn(rng.choice([30, 400]), 32)
    return Trained("", _Ode(32, rng.randint(2, 6)), x)


class _Physics(nn.Module):
    """The residual of a differential equation at points."""

    def __init__(self, way):
        super().__init__()
        self.u, self.way = (
            nn.Sequential(
                nn.Linear(2, 40),
                nn.Tanh(),
                nn.Linear(40, 40),
                nn.Tanh(),
                nn.Linear(40, 1),
            ),
            way,
        )

    def forward(self, points):
        points = points.detach().requires_grad_()
        u = self.u(points)
        [d] = torch.autograd.grad(u.sum(), points, create_graph=True)
        if self.way == "hamilton":
            velocity = d @ torch.tensor([[0.0, -1.0], [1.0, 0.0]])
            return (velocity - points).square().mean()
        [dd] = torch.autograd.grad(d[:, 0].sum(), points, create_graph=True)
        return (d[:, 1] + u[:, 0] * d[:, 0] - 0.01 * dd[:, 0]).square().mean()


def physics(rng):
    way = rng.choice(["burgers", "hamilton"])
    return Trained(way, _Physics(way), torch.rand(rng.choice([100, 2000]), 2))


class _FourierOperator(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        weight = torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width
        self.weight = nn.Parameter(weight)
        self.lift = nn.Conv2d(3, width, 1)
        self.skip, self.last = nn.Conv2d(width, width, 1), nn.Conv2d(width, 1, 1)

    def forward(self, x):
        x = self.lift(x)
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        low = spectrum[..., : self.modes, : self.modes]
        out[..., : self.modes, : self.modes] = torch.einsum(
            "nihw,iohw->nohw", low, self.weight
        )
        x = F.gelu(torch.fft.irfft2(out, s=x.shape[2:]) + self.skip(x))
        return self.last(x)


def fourier_operator(rng):
    field = torch.randn(rng.randint(2, 8), 3, 24, 24)
    return Trained("", _FourierOperator(rng.choice([8, 20]), 6), field)


class _Flow(nn.Module):
    """Couplings whose likelihood is exact, and a linear map between them."""

    def __init__(self, width):
        super().__init__()
        self.nets = nn.ModuleList(_mlp(width // 2, 64, width) for _ in range(3))
        self.mixes = nn.ParameterList(torch.randn(width, width) for _ in range(3))

    def forward(self, x):
        log_det = 0
        for net, mix in zip(self.nets, self.mixes, strict=True):
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            scale = scale.tanh()
            x = torch.cat([a, b * scale.exp() + shift], 1) @ mix
            log_det = log_det + scale.sum(1) + torch.linalg.slogdet(mix)[1]
        normal = torch.distributions.Normal(0.0, 1.0)
        return -(normal.log_prob(x).sum(1) + log_det).mean()


def flow(rng):
    width = rng.choice([8, 32])
    return Trained("", _Flow(width), torch.randn(rng.choice([64, 700]), width))


class _Process(nn.Module):
    """The marginal likelihood of a Gaussian process with a deep kernel."""

    def __init__(self):
        super().__init__()
        self.features, self.noise = _mlp(6, 32, 4), nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        z = self.features(x)
        kernel = torch.exp(-torch.cdist(z, z).square() / 2)
        kernel = kernel + (self.noise.exp() + 1e-3) * torch.eye(len(z))
        factor = torch.linalg.cholesky(kernel)
        y = x.sum(1, keepdim=True).sin()
        solved = torch.cholesky_solve(y, factor)
        return (y * solved).sum() / 2 + factor.diagonal().log().sum()


def gaussian_process(rng):
    return Trained("", _Process(), torch.randn(rng.choice([30, 150]), 6))


class _Transport(nn.Module):
    """Optimal transport by iterations in logarithms, or a soft alignment."""

    def __init__(self, way):
        super().__init__()
        self.first, self.way = nn.Linear(8, 16), way

    def forward(self, x, y):
        cost = torch.cdist(self.first(x), self.first(y))
        if self.way == "sinkhorn":
            log_p = -cost / 0.1
            for _ in range(8):
                log_p = log_p - log_p.logsumexp(2, keepdim=True)
                log_p = log_p - log_p.logsumexp(1, keepdim=True)
            return (log_p.exp() * cost).sum((1, 2)).mean()
        rows = [cost[:, 0].cumsum(1)]
        for i in range(1, cost.size(1)):
            row = [rows[-1][:, 0] + cost[:, i, 0]]
            for j in range(1, cost.size(2)):
                steps = torch.stack([row[-1], rows[-1][:, j], rows[-1][:, j - 1]], 1)
                row.append(cost[:, i, j] - torch.logsumexp(-steps, 1))
            rows.append(torch.stack(row, 1))
        return rows[-1][:, -1].mean()


def transport(rng):
    way = rng.choice(["sinkhorn", "sinkhorn", "alignment"])
    length = 40 if way == "sinkhorn" else 6
    batch = torch.randn(rng.randint(2, 8), length, 8), torch.randn(1, length, 8)
    batch = batch[0], batch[1].repeat(len(batch[0]), 1, 1)
    return Trained(way, _Transport(way), batch)


class _Radiance(nn.Module):
    """Points along rays, encoded by sines, and what is seen along each ray."""

    def __init__(self):
        super().__init__()
        self.density, self.colour = _mlp(36, 64, 17), _mlp(16 + 3, 32, 3)

    def forward(self, origins, directions):
        depths = torch.linspace(0, 1, 12) + torch.rand(len(origins), 12) / 12
        points = origins[:, None] + depths[..., None] * directions[:, None]
        scaled = points[..., None] * 2.0 ** torch.arange(6)
        encoded = torch.cat([scaled.sin(), scaled.cos()], -1).flatten(2)
        raw, features = self.density(encoded).split([1, 16], 2)
        view = directions[:, None].expand(-1, 12, -1)
        colours = self.colour(torch.cat([features, view], 2)).sigmoid()
        alpha = 1 - torch.exp(-F.softplus(raw[..., 0]) / 12)
        passed = torch.cumprod(1 - alpha + 1e-10, 1)
        passed = torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], 1)
        return ((alpha * passed)[..., None] * colours).sum(1)


def radiance(rng):
    n = rng.choice([30, 300])
    return Trained("", _Radiance(), (torch.randn(n, 3), torch.randn(n, 3)))


class _Sines(nn.Module):
    """A complex-valued and a sine layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 64)
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.cfloat) / 8)

    def forward(self, x):
        h = (30 * self.first(x)).sin()
        z = torch.complex(h, h.cos()) @ self.weight
        return torch.view_as_real(z * torch.exp(1j * z.angle())).pow(2).sum(-1)


def sines(rng):
    return Trained("", _Sines(), torch.rand(rng.choice([60, 1500]), 2))


class _Kalman(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.move = nn.Parameter(torch.eye(width) * 0.9)
        self.see = nn.Parameter(torch.randn(3, width))

    def forward(self, series):
        width = self.move.size(0)
        state = series.new_zeros(len(series), width, 1)
        spread = torch.eye(width).expand(len(series), -1, -1)
        total = 0
        for seen in series.unbind(1):
            state = self.move @ state
            spread = self.move @ spread @ self.move.t() + 0.1 * torch.eye(width)
            innovation = seen[..., None] - self.see @ state
            s = self.see @ spread @ self.see.t() + 0.1 * torch.eye(3)
            gain = torch.linalg.solve(s, self.see @ spread).transpose(1, 2)
            state = state + gain @ innovation
            spread = spread - gain @ self.see @ spread
            total = total + innovation.square().mean() + torch.logdet(s).mean()
        return total


def kalman(rng):
    return Trained("", _Kalman(5), torch.randn(rng.choice([4, 40]), 6, 3))


class _Capsules(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 32, 5, 2)
        self.weight = nn.Parameter(torch.randn(1, 36 * 4, 5, 8, 8) * 0.01)

    def forward(self, images):
        u = self.conv(images).view(len(images), -1, 8)
        u = u * u.norm(dim=2, keepdim=True) / (1 + u.square().sum(2, keepdim=True))
        votes = (self.weight @ u[:, :, None, :, None])[..., 0]
        scores = torch.zeros(votes.shape[:3])
        for step in range(3):
            shares = scores.softmax(2)[..., None]
            v = (shares * votes).sum(1)
            if step < 2:
                scores = scores + (votes.detach() * v.detach()[:, None]).sum(3)
        return v.norm(dim=2)


def capsules(rng):
    return Trained("", _Capsules(), torch.randn(rng.randint(2, 10), 1, 15, 15))


class _Memory(nn.Module):
    """Keeps its hidden state from batch to batch, cut off from the graph."""

    def __init__(self):
        super().__init__()
        self.rnn, self.state = nn.GRU(8, 24), None
        self.head = nn.Linear(24, 8)

    def forward(self, series):
        out, state = self.rnn(series, self.state)
        self.state = state.detach()
        return self.head(out)


def memory(rng):
    return Trained("", _Memory(), torch.randn(12, rng.choice([3, 30]), 8))


class _Halting(nn.Module):
    """Computes as long as its own values ask for."""

    def __init__(self):
        super().__init__()
        self.cell, self.halt = nn.GRUCell(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        h = torch.zeros_like(x)
        total = torch.zeros(len(x), 1)
        for _ in range(6):
            h = self.cell(x, h)
            total = total + self.halt(h).sigmoid()
            if bool((total > 0.99).all()):
                break
        return h / total


def halting(rng):
    return Trained("", _Halting(), torch.randn(rng.choice([10, 200]), 16))


class _Segments(nn.Module):
    """Sums, means and maxima over parts of different lengths."""

    def __init__(self, way):
        super().__init__()
        self.first, self.way = nn.Linear(12, 32), way

    def forward(self, rows, lengths):
        h = self.first(rows)
        if self.way == "segment":
            return torch.segment_reduce(h, "max", lengths=lengths, axis=0)
        number = torch.arange(len(lengths)).repeat_interleave(lengths)
        if self.way == "reduce":
            index = number[:, None].expand_as(h)
            zeros = h.new_zeros(len(lengths), 32)
            return zeros.scatter_reduce(0, index, h, "amax", include_self=False)
        parts = torch.split(h, lengths.tolist())
        padded = nn.utils.rnn.pad_sequence(parts, batch_first=True)
        return padded.logsumexp(1)


def segments(rng):
    lengths = torch.randint(1, 20, (rng.choice([5, 60]),))
    rows = torch.randn(int(lengths.sum()), 12)
    way = rng.choice(["segment", "reduce", "padded"])
    return Trained(way, _Segments(way), (rows, lengths))


class _Fake(nn.Module):
    """Weights and activations rounded to eight bits, straight through."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(40, 80), nn.Linear(80, 10)])

    def _round_to_int8(self, x):
        scale = x.detach().abs().max() / 127
        return x + ((x / scale).round().clamp(-128, 127) * scale - x).detach()

    def forward(self, x):
        for layer in self.layers:
            x = F.linear(
                self._round_to_int8(x), self._round_to_int8(layer.weight), layer.bias
            )
            x = F.relu(x, inplace=True)
        return x


def rounded(rng):
    return Trained("", _Fake(), torch.randn(rng.choice([20, 700]), 40))


KINDS = {
    kind.__name__: kind
    for kind in (
        vit,
        windows,
        convnext,
        densenet,
        mobile,
        video,
        super_resolution,
        style,
        spatial_transformer,
        detection,
        masked_autoencoder,
        vector_quantised,
        spectral_critic,
        perceiver,
        mixer,
        slots,
        wavenet,
        recogniser,
        transducer,
        conformer,
        temporal,
        llama,
        low_rank,
        seq_to_seq,
        translating,
        adaptive_softmax,
        character_cnn,
        linear_attention,
        selective,
        distilled,
        momentum_contrast,
        contrast,
        actor,
        recommender,
        factors,
        tokeniser,
        sparsemax,
        ode,
        physics,
        fourier_operator,
        flow,
        gaussian_process,
        transport,
        radiance,
        sines,
        kalman,
        capsules,
        memory,
        halting,
        segments,
        rounded,
    )
}


class _Averaged(torch.optim.AdamW):
    """Clips by the norm of all gradients, and keeps a moving average of the weights."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        super().step(closure)
        with torch.no_grad():
            for p in parameters:
                state = self.state[p]
                if "average" in state:
                    state["average"].lerp_(p, 0.01)
                elif p.grad is not None:
                    state["average"] = p.clone()


class _Centred(torch.optim.SGD):
    """Takes the mean off each gradient, and scales it by the norm of its weight."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or p.grad.is_sparse or p.dim() < 2:
                    continue
                p.grad.sub_(p.grad.mean(tuple(range(1, p.dim())), keepdim=True))
                norm = torch.linalg.vector_norm(p) / torch.linalg.vector_norm(p.grad)
                p.grad.mul_(norm.clamp(max=10))
        return super().step(closure)


class _MuonAndAdam(torch.optim.Optimizer):
    """Muon for matrices, AdamW for the rest, as its authors ask for."""

    def __init__(self, parameters):
        parameters = list(parameters)
        matrices = [p for p in parameters if p.dim() == 2 and not p.is_complex()]
        others = [p for p in parameters if p.dim() != 2 or p.is_complex()]
        self.inner = []
        if matrices:
            self.inner.append(torch.optim.Muon(matrices, lr=1e-3))
        if others:
            self.inner.append(torch.optim.AdamW(others, lr=1e-3))
        groups = [group for inner in self.inner for group in inner.param_groups]
        super().__init__(groups, {})

    def step(self, closure=None):  # noqa: ARG002 -- as torch's optimizers have it
        for inner in self.inner:
            inner.step()
        self.state = {k: v for inner in self.inner for k, v in inner.state.items()}


OPTIMIZERS = {
    "adafactor": torch.optim.Adafactor,
    "muon": _MuonAndAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, foreach=True),
    "asgd": torch.optim.ASGD,
    "asgd foreach": lambda p: torch.optim.ASGD(p, foreach=True),
    "adadelta": torch.optim.Adadelta,
    "adadelta foreach": lambda p: torch.optim.Adadelta(p, foreach=True),
    "rprop": torch.optim.Rprop,
    "nadam": lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True),
    "radam foreach": lambda p: torch.optim.RAdam(p, foreach=True),
    "adamax foreach": lambda p: torch.optim.Adamax(p, foreach=True),
    "averaged": _Averaged,
    "centred": _Centred,
    "adamw": "adamw",
    "sgd": lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=1e-4),
    "none": None,
}


def draw_field_step(seed, kind):
    """Draw a step of a kind; a seed always gives the same."""
    rng = random.Random(f"fields {kind} {seed}")
    torch.manual_seed(seed)
    trained = KINDS[kind](rng)
    name = rng.choice(list(OPTIMIZERS))
    if any(getattr(module, "sparse", False) for module in trained.model.modules()):
        # Most optimizers refuse sparse gradients.
        name = rng.choice(["sgd", "adagrad", "none"])
    optimizer = OPTIMIZERS[name]
    if name == "adagrad":
        optimizer = torch.optim.Adagrad
    elif name == "sgd":
        optimizer = torch.optim.SGD
    autocast = torch.bfloat16 if rng.random() < 0.15 else None
    step = Step(trained.loss, optimizer=optimizer, autocast=autocast)
    words = f"{kind} {seed}: {trained.description}; {name}; {autocast}"
    return DrawnStep(words, trained.model, trained.batch, step, rng.choice([1, 2]))
