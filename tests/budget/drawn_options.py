"""Steps drawn by a seed over options that the other grammars leave at their defaults.

Shapes and types of linear algebra and Fourier transforms, selections and segments,
sampling grids, recurrent layers with packed sequences, bags, masks of attention, sparse
layouts, options of PyG's layers, variants of optimizers, and what is wrapped around a
training: parametrizations, checkpoints, second derivatives, averages, ties.
"""

import random

import torch
import torch_geometric.nn as g
from drawn import DrawnStep, Trained
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vmap
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it
from torch.nn.utils import parametrizations as par
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint
from torch_geometric import utils
from torch_geometric.data import Batch, Data

from loaderkit.budget.step.train_step import Step


def _mean_of_squares(out):
    """A loss of whatever a function gives."""
    tensors = out if isinstance(out, (tuple, list)) else [out]
    total = 0.0
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            continue
        dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        dense = torch.view_as_real(dense) if dense.is_complex() else dense
        total = total + dense.square().mean()
    return total


class Mapped(nn.Module):
    """A linear layer, then a function of rows in a shape."""

    def __init__(self, function, shape, inputs=16, dtype=torch.float32):
        super().__init__()
        self.function, self.shape = function, shape
        self.map = nn.Linear(inputs, shape[-1], dtype=dtype)

    def forward(self, x):
        hidden = self.map(x)
        return _mean_of_squares(self.function(hidden.view(self.shape)))


def _mapped(words, function, shape, dtype=torch.float32):
    rows = 1
    for size in shape[:-1]:
        rows *= size
    words = f"{words} of {'x'.join(map(str, shape))} {dtype}"
    return Trained(
        words, Mapped(function, shape, dtype=dtype), torch.randn(rows, 16, dtype=dtype)
    )


_MATRICES = {
    "svdvals": torch.linalg.svdvals,
    "svd": lambda h: torch.linalg.svd(h, full_matrices=False),
    "pinv": torch.linalg.pinv,
    "pinv, rtol": lambda h: torch.linalg.pinv(h, rtol=1e-3),
    "qr": torch.linalg.qr,
    "lu": lambda h: torch.linalg.lu(h)[1:],
    "lstsq": lambda h: torch.linalg.lstsq(h, torch.ones_like(h[..., :3]))[0],
    "nuclear": lambda h: torch.linalg.matrix_norm(h, "nuc"),
    "spectral": lambda h: torch.linalg.matrix_norm(h, 2),
    "norm 1": lambda h: torch.linalg.matrix_norm(h, 1),
    "gram eigvalsh": lambda h: torch.linalg.eigvalsh(h.mH @ h),
    "gram eigh": lambda h: torch.linalg.eigh(h.mH @ h)[0],
    "gram pinv": lambda h: torch.linalg.pinv(h.mH @ h, hermitian=True),
    "multi_dot": lambda h: torch.linalg.multi_dot([h[0], h[0].mH, h[0]]),
    "vecdot": lambda h: torch.linalg.vecdot(h, h.flip(-2)),
    "half norm": lambda h: torch.linalg.vector_norm(h, 0.5, (-2, -1)),
    "zero norm": lambda h: h * torch.linalg.vector_norm(h, 0, -1, keepdim=True),
    "largest": lambda h: torch.linalg.vector_norm(h, float("inf"), -1),
    "matmul out of tall": lambda h: h @ h.mH,
    "bmm of halves": lambda h: h[..., ::2].mH @ h,
    "addbmm": lambda h: torch.addbmm(h[0] @ h[0].mT, h, h.mT),
    "inner": lambda h: torch.inner(h, h[0]),
    "low rank": lambda h: torch.svd_lowrank(h, q=3)[1],
}
_SQUARE = {
    "cond": torch.linalg.cond,
    "det": torch.linalg.det,
    "slogdet": lambda h: torch.linalg.slogdet(h)[1],
    "inv": lambda h: torch.linalg.inv(h + 9 * torch.eye(h.shape[-1], dtype=h.dtype)),
    "inv_ex": lambda h: torch.linalg.inv_ex(h)[0],
    "solve": lambda h: torch.linalg.solve(h, torch.ones_like(h[..., :2])),
    "solve from the right": lambda h: torch.linalg.solve(
        h, torch.ones_like(h), left=False
    ),
    "lu_solve": lambda h: torch.linalg.lu_solve(
        *torch.linalg.lu_factor(h), torch.ones_like(h[..., :2])
    ),
    "eigvals": torch.linalg.eigvals,
    "eig": lambda h: torch.linalg.eig(h)[1].abs(),
    "power": lambda h: torch.linalg.matrix_power(h.tanh(), 6),
    "power back": lambda h: torch.linalg.matrix_power(
        h + 9 * torch.eye(h.shape[-1], dtype=h.dtype), -2
    ),
    "matrix_exp": lambda h: torch.linalg.matrix_exp(h.tanh()),
    "triangular": lambda h: torch.linalg.solve_triangular(
        h.triu() + 9 * torch.eye(h.shape[-1], dtype=h.dtype), h, upper=True
    ),
    "cholesky": lambda h: torch.linalg.cholesky(
        h @ h.mH + torch.eye(h.shape[-1], dtype=h.dtype)
    ),
    "cholesky upper": lambda h: torch.linalg.cholesky(
        h @ h.mH + torch.eye(h.shape[-1], dtype=h.dtype), upper=True
    ),
    "trace": lambda h: h.diagonal(dim1=-2, dim2=-1).sum(-1),
}


def matrices(rng):
    name = rng.choice(sorted(_MATRICES))
    shape = rng.choice(
        [
            (60, 100, 8),
            (9, 300, 40),
            (50, 12, 40),
            (3, 40, 40),
            (200, 6, 6),
            (5, 3, 40, 20),
            (1, 500, 60),
            (30, 90, 17),
        ]
    )
    dtype = rng.choice([torch.float32] * 3 + [torch.float64, torch.complex64])
    return _mapped(name, _MATRICES[name], shape, dtype)


def square_matrices(rng):
    name = rng.choice(sorted(_SQUARE))
    size = rng.choice([5, 16, 33, 64, 128])
    shape = (rng.choice([1, 3, max(2, 40000 // size**2)]), size, size)
    dtype = rng.choice([torch.float32] * 3 + [torch.float64, torch.complex64])
    return _mapped(name, _SQUARE[name], shape, dtype)


_FOURIER = {
    "fft": lambda h, n: torch.fft.fft(h, n=n),
    "ifft": lambda h, n: torch.fft.ifft(h, n=n, norm="ortho"),
    "rfft": lambda h, n: torch.fft.rfft(h.real if h.is_complex() else h, n=n),
    "irfft": lambda h, n: torch.fft.irfft(h, n=n),
    "hfft": lambda h, n: torch.fft.hfft(h, n=n, norm="forward"),
    "ihfft": lambda h, n: torch.fft.ihfft(
        h.real if h.is_complex() else h, n=n
    ).resolve_conj(),
    "fft of rows": lambda h, n: torch.fft.fft(h, n=n, dim=-2),
    "fft2": lambda h, n: torch.fft.fft2(h, s=(n, n)),
    "rfft2": lambda h, _: torch.fft.rfft2(h.real if h.is_complex() else h),
    "irfft2": lambda h, _: torch.fft.irfft2(h),
    "fftn": lambda h, _: torch.fft.fftn(h),
    "rfftn": lambda h, _: torch.fft.rfftn(h.real if h.is_complex() else h),
    "there and back": lambda h, _: torch.fft.ifft2(
        torch.fft.ifftshift(torch.fft.fftshift(torch.fft.fft2(h)))
    ),
    "convolve": lambda h, _: torch.fft.irfft(
        torch.fft.rfft(h.real if h.is_complex() else h, n=2 * h.shape[-1])
        * torch.fft.rfft(torch.ones(h.shape[-1]), n=2 * h.shape[-1])
    ),
    "dct": lambda h, _: torch.fft.rfft(torch.cat([h, h.flip(-1)], -1).abs()),
    "stft": lambda h, _: torch.stft(
        (h.real if h.is_complex() else h).flatten(1),
        64,
        16,
        window=torch.ones(64, dtype=h.real.dtype),
        return_complex=True,
        center=False,
    ),
}


def fourier(rng):
    name = rng.choice(sorted(_FOURIER))
    shape = rng.choice([(9, 40, 64), (3, 100, 97), (2, 4, 60, 50), (60, 30, 30)])
    dtype = rng.choice([torch.float32] * 3 + [torch.float64, torch.complex64])
    length = rng.choice([None, 20, 50, 128])
    if name == "fft2":
        length = length or 33
    function = _FOURIER[name]
    return _mapped(f"{name} to {length}", lambda h: function(h, length), shape, dtype)


def _segments_of(count, groups):
    return torch.randint(groups, (count,)).sort()[0]


_SELECTIONS = {
    "unique inverse": lambda h, i: h[torch.unique(i, return_inverse=True)[1]],
    "unique counts": lambda h, i: (
        h[: len(torch.unique(i))] * torch.unique(i, return_counts=True)[1][:, None]
    ),
    "unique rows": lambda h, i: h[
        torch.unique(torch.stack([i, i % 3], 1), dim=0)[:, 0]
    ],
    "unique of floats": lambda h, _: h.unique(),
    "consecutive": lambda h, i: h[torch.unique_consecutive(i.sort()[0])],
    "nonzero": lambda h, i: h[torch.nonzero(i % 3, as_tuple=True)],
    "nonzero of floats": lambda h, _: h[h > 0.3].sum() + h.mean(),
    "argwhere": lambda h, _: h[torch.argwhere(h[:, 0] > 0)[:, 0]],
    "flatnonzero rows": lambda h, i: h[(i % 2 == 0)],
    "two masks": lambda h, i: h[(i % 2 == 0)][:, h.new_ones(h.size(1)).bool()],
    "segment sum": lambda h, i: torch.segment_reduce(
        h, "sum", lengths=torch.bincount(i % 9, minlength=9), axis=0
    ),
    "segment max": lambda h, i: torch.segment_reduce(
        h, "max", lengths=torch.bincount(i % 9, minlength=9), axis=0, initial=0
    ),
    "scatter mean": lambda h, i: utils.scatter(h, i, 0, reduce="mean"),
    "scatter max": lambda h, i: utils.scatter(h, i, 0, reduce="max"),
    "scatter min": lambda h, i: utils.scatter(h, i, 0, reduce="min"),
    "scatter mul": lambda h, i: utils.scatter(h.tanh(), i, 0, reduce="mul"),
    "scatter amin": lambda h, i: torch.zeros_like(h).scatter_reduce(
        0, i[:, None].expand_as(h) % 5, h, "amin", include_self=False
    ),
    "scatter mean, own": lambda h, i: torch.zeros_like(h).scatter_reduce(
        0, i[:, None].expand_as(h) % 5, h, "mean", include_self=True
    ),
    "segment": lambda h, i: utils.segment(
        h, torch.cat([i.new_zeros(1), torch.bincount(i % 9, minlength=9).cumsum(0)])
    ),
    "softmax of groups": lambda h, i: utils.softmax(h, i),
    "index_reduce amax": lambda h, i: torch.zeros_like(h).index_reduce(
        0, i % 7, h, "amax"
    ),
    "index_add alpha": lambda h, i: torch.zeros_like(h).index_add(
        0, i % 7, h, alpha=0.3
    ),
    "index_put two": lambda h, i: torch.zeros_like(h).index_put(
        (i, i % h.size(1)), h[:, 0], accumulate=True
    ),
    "take": lambda h, i: h.take(i),
    "masked_scatter": lambda h, i: h.masked_scatter((i % 2 == 0)[:, None], h.flip(0)),
    "masked_fill": lambda h, i: h.masked_fill((i % 2 == 0)[:, None], 0.0),
    "where index": lambda h, i: h[torch.where(i > 3)],
    "topk rows": lambda h, _: h.topk(5, 0, sorted=False)[0],
    "kth": lambda h, _: h.kthvalue(3, 0)[0],
    "sort stable": lambda h, _: torch.sort(h, dim=0, stable=True)[0],
    "argmax gather": lambda h, _: h.gather(0, h.argmax(0, keepdim=True)),
    "lexsort": lambda h, i: h[utils.lexsort([i, i % 3])],
    "repeat": lambda h, i: h.repeat_interleave(i % 3, 0),
    "repeat rows": lambda h, _: h.repeat_interleave(3, 1),
    "histogram": lambda h, i: h * torch.bincount(i, minlength=h.size(1))[: h.size(1)],
    "one hot": lambda h, i: F.one_hot(i % 50).float().t() @ h,
    "narrow": lambda h, _: h.narrow(0, 1, 20).clone(),
    "pad rows": lambda h, i: rnn.pad_sequence(
        list(h.split([*(1 + i[:9] % 3).tolist(), len(h) - int((1 + i[:9] % 3).sum())]))
    ),
    "to dense batch": lambda h, i: utils.to_dense_batch(h, (i % 11).sort()[0])[0],
    "bucketize": lambda h, i: h * torch.bucketize(h, torch.linspace(-1, 1, 7)),
    "cummax": lambda h, _: h.cummax(0)[0],
    "logcumsumexp": lambda h, _: h.logcumsumexp(1),
    "renorm": lambda h, _: h.renorm(1, 1, 0.5),
    "quantiles": lambda h, _: h.quantile(torch.tensor([0.1, 0.5, 0.9]), 0),
    "nanquantile": lambda h, _: h.nanquantile(0.4, 1),
    "median of rows": lambda h, _: h.median(0)[0],
    "mode": lambda h, _: h.mode(0)[0],
    "aminmax of all": lambda h, _: torch.stack(torch.aminmax(h)) * h.mean(),
    "isin": lambda h, i: h[torch.isin(i, torch.arange(9))],
    "roll rows": lambda h, _: h.roll((3, -2), (0, 1)),
}


class Selecting(nn.Module):
    def __init__(self, names, width):
        super().__init__()
        self.names = names
        self.map = nn.Linear(12, width)

    def forward(self, x, index):
        hidden = self.map(x)
        outs = [_SELECTIONS[name](hidden, index) for name in self.names]
        return _mean_of_squares(outs)


def selections(rng):
    names = rng.sample(sorted(_SELECTIONS), rng.choice([1, 1, 2]))
    rows, width = rng.choice([70, 300, 2000, 9000]), rng.choice([8, 40, 64])
    index = torch.randint(rng.choice([20, rows]), (rows,))
    words = f"{rows} x {width}, {', '.join(names)}"
    return Trained(words, Selecting(names, width), (torch.randn(rows, 12), index))


_IMAGES = {
    "nearest": lambda h, _: F.interpolate(h, scale_factor=1.7, mode="nearest"),
    "nearest-exact": lambda h, _: F.interpolate(h, size=11, mode="nearest-exact"),
    "bilinear": lambda h, a: F.interpolate(
        h, size=(13, 40), mode="bilinear", align_corners=a
    ),
    "bilinear aa": lambda h, _: F.interpolate(
        h, scale_factor=0.4, mode="bilinear", antialias=True
    ),
    "bicubic aa": lambda h, _: F.interpolate(
        h, size=(9, 9), mode="bicubic", antialias=True
    ),
    "bicubic": lambda h, a: F.interpolate(
        h, scale_factor=1.5, mode="bicubic", align_corners=a
    ),
    "area": lambda h, _: F.interpolate(h, scale_factor=0.5, mode="area"),
    "grid bilinear": lambda h, a: F.grid_sample(
        h, _grid_of(h), padding_mode="border", align_corners=a
    ),
    "grid nearest": lambda h, a: F.grid_sample(
        h, _grid_of(h), mode="nearest", align_corners=a
    ),
    "grid bicubic": lambda h, a: F.grid_sample(
        h, _grid_of(h), mode="bicubic", padding_mode="reflection", align_corners=a
    ),
    "grid of data": lambda h, a: F.grid_sample(
        h, _grid_of(h).detach(), padding_mode="zeros", align_corners=a
    ),
    "affine": lambda h, a: F.grid_sample(
        h,
        F.affine_grid(h[:, 0, :2, :3].contiguous(), list(h.shape), align_corners=a),
        align_corners=a,
    ),
    "max pool dilated": lambda h, _: F.max_pool2d(h, 3, 2, dilation=2),
    "max pool, indices": lambda h, _: F.max_unpool2d(
        *F.max_pool2d(h, 2, return_indices=True), 2
    ),
    "avg pool, no pad": lambda h, _: F.avg_pool2d(
        h, 3, 2, 1, ceil_mode=True, count_include_pad=False
    ),
    "lp pool": lambda h, _: F.lp_pool2d(h.abs() + 0.1, 3, 2),
    "adaptive": lambda h, _: F.adaptive_avg_pool2d(h, (5, None)),
    "adaptive max": lambda h, _: F.adaptive_max_pool2d(h, (None, 4)),
    "pixel unshuffle": lambda h, _: F.pixel_unshuffle(h[..., :12, :12], 2),
    "unfold dilated": lambda h, _: F.unfold(h, 3, dilation=2, stride=2),
    "group norm": lambda h, _: F.group_norm(h, 4),
    "instance norm": lambda h, _: F.instance_norm(h),
    "dropout2d": lambda h, _: F.dropout2d(h, 0.3),
    "local response": lambda h, _: F.local_response_norm(h, 5),
    "prelu": lambda h, _: F.prelu(h, torch.full((h.size(1),), 0.2)),
    "glu": lambda h, _: F.glu(h, 1),
    "reflect": lambda h, _: F.pad(h, (2, 1, 0, 3), "reflect"),
    "crop": lambda h, _: F.pad(h, (-2, -1, -1, -3)),
    "normalize": lambda h, _: F.normalize(h, p=3, dim=1),
    "conv": lambda h, _: F.conv2d(h, h.new_ones(6, h.size(1) // 2, 3, 3), groups=2),
}


def _grid_of(h):
    angles = h[:, :2].tanh().permute(0, 2, 3, 1)
    return angles[:, :7]


class OnImages(nn.Module):
    def __init__(self, names, channels, align):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.names, self.align = names, align

    def forward(self, x):
        hidden = self.first(x)
        return sum(
            _IMAGES[name](hidden, self.align).float().square().mean()
            for name in self.names
        )


def images(rng):
    names = rng.sample(sorted(_IMAGES), rng.choice([1, 1, 2]))
    channels, side = rng.choice([4, 8, 32]), rng.choice([14, 20, 33])
    x = torch.randn(rng.choice([2, 5, 24]), 3, side, side)
    model = OnImages(names, channels, rng.random() < 0.5)
    layout = ""
    if rng.random() < 0.4:
        x, layout = x.to(memory_format=torch.channels_last), "channels last"
        if rng.random() < 0.5:
            model = model.to(memory_format=torch.channels_last)
    return Trained(f"{list(x.shape)} {channels} {names} {layout}", model, x)


class OfSequences(nn.Module):
    """A recurrent layer over packed or padded sequences, with or without a state."""

    def __init__(self, inner, width, *, packed, sort, state):
        super().__init__()
        self.table = nn.Embedding(50, width, padding_idx=0)
        self.inner, self.packed, self.sort, self.state = inner, packed, sort, state

    def forward(self, words, lengths):
        hidden = self.table(words)
        state = self._state(hidden)
        if not self.inner.batch_first:
            hidden = hidden.transpose(0, 1)
        first = self.inner.batch_first
        if not self.packed:
            out, last = self.inner(hidden, state)
            return _mean_of_squares(
                [out, *(last if isinstance(last, tuple) else [last])]
            )
        packed = rnn.pack_padded_sequence(
            hidden, lengths, batch_first=first, enforce_sorted=self.sort
        )
        out, last = self.inner(packed, state)
        padded, _ = rnn.pad_packed_sequence(out, batch_first=first, padding_value=-1.0)
        return _mean_of_squares(
            [padded, *(last if isinstance(last, tuple) else [last])]
        )

    def _state(self, hidden):
        if not self.state:
            return None
        directions = 2 if self.inner.bidirectional else 1
        shape = (self.inner.num_layers * directions, len(hidden))
        size = self.inner.proj_size or self.inner.hidden_size
        first = hidden.new_zeros(*shape, size)
        if isinstance(self.inner, nn.LSTM):
            return first, hidden.new_zeros(*shape, self.inner.hidden_size)
        return first


def sequences(rng):
    kind = rng.choice(["LSTM", "LSTM", "GRU", "RNN"])
    width, size = rng.choice([12, 40]), rng.choice([10, 32])
    options = {
        "num_layers": rng.choice([1, 2, 3]),
        "bidirectional": rng.random() < 0.4,
        "batch_first": rng.random() < 0.5,
        "bias": rng.random() < 0.8,
        "dropout": rng.choice([0.0, 0.2]),
    }
    if options["num_layers"] == 1:
        options["dropout"] = 0.0
    if kind == "LSTM" and rng.random() < 0.3:
        options["proj_size"] = 6
    if kind == "RNN":
        options["nonlinearity"] = rng.choice(["tanh", "relu"])
    count, longest = rng.choice([3, 17, 60, 300]), rng.choice([5, 12, 30])
    packed, is_sorted = rng.random() < 0.6, rng.random() < 0.5
    lengths = torch.randint(1, longest + 1, (count,))
    lengths[0] = longest
    if is_sorted:
        lengths = lengths.sort(descending=True)[0]
    words = torch.randint(50, (count, longest))
    state = rng.random() < 0.4
    model = OfSequences(
        getattr(nn, kind)(width, size, **options),
        width,
        packed=packed,
        sort=is_sorted,
        state=state,
    )
    words_of = f"{kind} {width} {size} {options} packed {packed} state {state}"
    return Trained(f"{count} x {longest} {words_of}", model, (words, lengths))


class Bags(nn.Module):
    def __init__(self, rows, width, options, ways):
        super().__init__()
        self.bag = nn.EmbeddingBag(rows, width, **options)
        self.scores = nn.Embedding(rows, 1)
        self.last = nn.Linear(width, 5)
        self.ways = ways

    def forward(self, words, offsets):
        weights = None
        if "weights" in self.ways:
            weights = self.scores(words)[..., 0]
        if "two axes" in self.ways:
            words = words.view(-1, 5)
            weights = weights.view(-1, 5) if weights is not None else None
            return self.last(self.bag(words, per_sample_weights=weights)).mean()
        return self.last(self.bag(words, offsets, weights)).mean()


def bags(rng):
    rows, width, count = (
        rng.choice([30, 900, 4000]),
        rng.choice([4, 33, 100]),
        5 * rng.choice([8, 200, 3000]),
    )
    options = {"mode": rng.choice(["sum", "mean", "max"])}
    if rng.random() < 0.3:
        options["padding_idx"] = 0
    if rng.random() < 0.3 and options["mode"] != "max":
        options["sparse"] = True
    if rng.random() < 0.2:
        options["max_norm"] = 1.0
    if rng.random() < 0.3:
        options["scale_grad_by_freq"] = (
            not options.get("sparse") and options["mode"] != "max"
        )
    ways = []
    if options["mode"] == "sum" and not options.get("scale_grad_by_freq"):
        ways += ["weights"] if rng.random() < 0.5 else []
    ways += ["two axes"] if rng.random() < 0.3 else []
    last = rng.random() < 0.2 and "two axes" not in ways
    starts = torch.randint(count, (rng.choice([6, 500]),)).sort()[0]
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), starts])
    if last:
        options["include_last_offset"] = True
        offsets = torch.cat([offsets, torch.tensor([count])])
    model = Bags(rows, width, options, ways)
    words = f"{rows} x {width}, {count} words {options} {ways}"
    return Trained(words, model, (torch.randint(rows, (count,)), offsets))


class Masked(nn.Module):
    """Attention with a mask of a kind."""

    def __init__(self, heads, size, mask, options):
        super().__init__()
        self.heads, self.size, self.mask, self.options = heads, size, mask, options
        self.to_q = nn.Linear(16, heads * size)
        self.to_k = nn.Linear(16, heads * size)
        self.to_v = nn.Linear(16, heads * options.get("values", size))
        self.bias = nn.Parameter(torch.zeros(heads, 1, 1))

    def _split(self, h):
        return h.view(*h.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x, memory):
        q, k, v = self.to_q(x), self.to_k(memory), self.to_v(memory)
        q, k, v = self._split(q), self._split(k), self._split(v)
        mask = self._mask(q, k)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.options.get("dropout", 0.0),
            is_causal=self.mask == "causal",
            scale=self.options.get("scale"),
        )
        return out.transpose(1, 2).reshape(*x.shape[:2], -1).square().mean()

    def _mask(self, q, k):
        rows, columns = q.size(2), k.size(2)
        if self.mask == "bool":
            return torch.ones(rows, columns, dtype=torch.bool).tril(columns)
        if self.mask == "bool of samples":
            lengths = torch.arange(len(q)) % columns + 1
            return (torch.arange(columns) < lengths[:, None])[:, None, None]
        if self.mask == "bool of heads":
            return torch.ones(len(q), self.heads, rows, columns, dtype=torch.bool)
        if self.mask == "float":
            return torch.zeros(rows, columns, dtype=q.dtype)
        if self.mask == "float of samples":
            return torch.zeros(len(q), 1, rows, columns, dtype=q.dtype)
        if self.mask == "alibi":
            distance = torch.arange(columns) - torch.arange(rows)[:, None]
            return -distance.abs().to(q.dtype) * torch.rand(self.heads, 1, 1)
        if self.mask == "learnt":
            return (self.bias * torch.ones(rows, columns))[None].expand(
                len(q), -1, -1, -1
            )
        return None


def masks(rng):
    heads, size = rng.choice([1, 2, 4]), rng.choice([4, 8, 24, 40, 64, 96])
    mask = rng.choice(
        [
            "none",
            "causal",
            "bool",
            "bool of samples",
            "bool of heads",
            "float",
            "float of samples",
            "alibi",
            "learnt",
        ]
    )
    options = {}
    if rng.random() < 0.25:
        options["dropout"] = 0.2
    if rng.random() < 0.2:
        options["scale"] = 0.3
    if rng.random() < 0.2:
        options["values"] = size * 2
    count, rows = rng.choice([1, 3, 16]), rng.choice([7, 50, 130, 300])
    columns = rows if mask == "causal" or rng.random() < 0.6 else rng.choice([5, 77])
    x, memory = torch.randn(count, rows, 16), torch.randn(count, columns, 16)
    words = f"{count} x {rows} x {columns}, {heads} heads of {size}, {mask} {options}"
    return Trained(words, Masked(heads, size, mask, options), (x, memory))


class MultiHead(nn.Module):
    def __init__(self, width, options, call):
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 4, **options)
        self.call, self.first = call, options["batch_first"]
        self.options = options

    def forward(self, x, lengths):
        _count, longest = x.shape[:2]
        memory = x
        keys = {}
        if "kdim" in self.options:
            keys = {
                "key": x[..., : self.options["kdim"]],
                "value": x[..., : self.options["vdim"]],
            }
        query, key, value = x, keys.get("key", memory), keys.get("value", memory)
        if not self.first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        padding = torch.arange(longest) >= lengths[:, None]
        out, weights = self.inner(
            query,
            key,
            value,
            key_padding_mask=padding if "padding" in self.call else None,
            need_weights="weights" in self.call,
            average_attn_weights="each" not in self.call,
            attn_mask=torch.ones(longest, longest).triu(1).bool()
            if "mask" in self.call
            else None,
        )
        return _mean_of_squares([out, weights])


def multi_head(rng):
    options = {
        "batch_first": rng.random() < 0.6,
        "add_bias_kv": rng.random() < 0.2,
        "add_zero_attn": rng.random() < 0.2,
        "dropout": rng.choice([0.0, 0.1]),
        "bias": rng.random() < 0.8,
    }
    width = rng.choice([16, 64])
    if rng.random() < 0.25:
        options |= {"kdim": 12, "vdim": 8}
    call = [
        word for word in ("padding", "weights", "each", "mask") if rng.random() < 0.4
    ]
    count, longest = rng.choice([2, 13]), rng.choice([9, 80])
    lengths = torch.randint(1, longest + 1, (count,))
    x = torch.randn(count, longest, width)
    words = f"{count} x {longest} x {width} {options} {call}"
    return Trained(words, MultiHead(width, options, call), (x, lengths))


class Encoders(nn.Module):
    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x, lengths):
        padding = torch.arange(x.size(1)) >= lengths[:, None]
        options = {"src_key_padding_mask": padding} if "padding" in self.call else {}
        if "causal" in self.call:
            mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
            options |= {"mask": mask, "is_causal": True}
        return self.inner(x, **options).square().mean()


def encoders(rng):
    layer = nn.TransformerEncoderLayer(
        32,
        4,
        64,
        dropout=rng.choice([0.0, 0.1]),
        activation=rng.choice(["relu", "gelu"]),
        batch_first=True,
        norm_first=rng.random() < 0.5,
        bias=rng.random() < 0.7,
    )
    inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    call = [word for word in ("padding", "causal") if rng.random() < 0.4]
    count, longest = rng.choice([3, 20]), rng.choice([11, 60])
    lengths = torch.randint(1, longest + 1, (count,))
    words = f"{count} x {longest} {call}"
    return Trained(
        words, Encoders(inner, call), (torch.randn(count, longest, 32), lengths)
    )


class SparseProducts(nn.Module):
    def __init__(self, matrix, call, width):
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.map = nn.Linear(12, width)
        self.scores = nn.Parameter(torch.rand(matrix._nnz()))
        self.call = call

    def forward(self, x):
        hidden = self.map(x)
        if self.call == "matmul":
            return (self.matrix @ hidden).square().mean()
        if self.call == "sparse.mm":
            return torch.sparse.mm(self.matrix, hidden).square().mean()
        if self.call == "addmm":
            return torch.sparse.addmm(hidden, self.matrix, hidden).square().mean()
        if self.call == "twice":
            return (self.matrix @ (self.matrix @ hidden).relu()).square().mean()
        if self.call == "vector":
            return (self.matrix @ hidden[:, 0]).square().mean()
        weighted = torch.sparse_coo_tensor(
            self.matrix.indices(), self.scores, self.matrix.shape
        )
        if self.call == "softmax":
            weighted = torch.sparse.softmax(weighted, 1)
        return torch.sparse.mm(weighted, hidden).square().mean()


def sparse_products(rng):
    size = rng.choice([40, 300, 1500, 6000])
    dense = torch.rand(size, size) * (torch.rand(size, size) < 6 / size)
    layout = rng.choice(["coo", "csr", "csr"])
    call = rng.choice(["matmul", "sparse.mm", "addmm", "twice", "vector"])
    matrix = dense.to_sparse_csr() if layout == "csr" else dense.to_sparse()
    if layout == "coo" and rng.random() < 0.4:
        call = rng.choice(["learnt", "softmax"])
    width = rng.choice([4, 64])
    words = f"{layout} {size}, {call}, {width} columns"
    return Trained(words, SparseProducts(matrix, call, width), torch.randn(size, 12))


def _graph(nodes, width, degree=4):
    edges = torch.randint(nodes, (2, nodes * degree))
    return Data(
        x=torch.randn(nodes, width),
        edge_index=edges,
        edge_attr=torch.randn(edges.size(1), 5),
        edge_weight=torch.rand(edges.size(1)),
        pos=torch.randn(nodes, 3),
        y=torch.randint(3, (1,)),
    )


_CONVOLUTIONS = {
    "GCN cached": lambda w, _: (g.GCNConv(w, w, cached=True), "weight"),
    "GCN improved": lambda w, _: (g.GCNConv(w, w, improved=True, bias=False), "weight"),
    "GCN unnormalised": lambda w, _: (g.GCNConv(w, w, normalize=False), "weight"),
    "GAT no concat": lambda w, _: (
        g.GATConv(w, w, 4, concat=False, dropout=0.2, residual=True),
        "",
    ),
    "GAT edges": lambda w, _: (
        g.GATConv(w, w, 2, concat=False, edge_dim=5, fill_value="max"),
        "attr",
    ),
    "GATv2 shared": lambda w, _: (
        g.GATv2Conv(w, w, 2, concat=False, share_weights=True, edge_dim=5),
        "attr",
    ),
    "GATv2 no loops": lambda w, _: (
        g.GATv2Conv(w, w, 2, concat=False, add_self_loops=False),
        "",
    ),
    "SAGE max": lambda w, _: (g.SAGEConv(w, w, aggr="max", normalize=True), ""),
    "SAGE several": lambda w, _: (g.SAGEConv(w, w, aggr=["mean", "max", "std"]), ""),
    "SAGE median": lambda w, _: (g.SAGEConv(w, w, aggr="median"), ""),
    "SAGE softmax": lambda w, _: (
        g.SAGEConv(w, w, aggr="softmax", aggr_kwargs={"learn": True}),
        "",
    ),
    "SAGE no root": lambda w, _: (
        g.SAGEConv(w, w, root_weight=False, project=True),
        "",
    ),
    "GIN eps": lambda w, _: (g.GINConv(nn.Linear(w, w), train_eps=True), ""),
    "GINE": lambda w, _: (
        g.GINEConv(nn.Linear(w, w), edge_dim=5, train_eps=True),
        "attr",
    ),
    "Transformer beta": lambda w, _: (
        g.TransformerConv(w, w, 2, concat=False, beta=True, edge_dim=5, dropout=0.1),
        "attr",
    ),
    "PNA pre": lambda w, _: (
        g.PNAConv(
            w,
            w,
            ["mean", "var", "min"],
            ["identity", "linear", "inverse_linear"],
            torch.arange(12),
            edge_dim=5,
            towers=2,
            pre_layers=2,
            post_layers=2,
            divide_input=True,
        ),
        "attr",
    ),
    "NN mean": lambda w, _: (
        g.NNConv(w, w, nn.Linear(5, w * w), aggr="mean", root_weight=False),
        "attr",
    ),
    "Cheb rw": lambda w, _: (g.ChebConv(w, w, 3, normalization="rw"), "weight"),
    "ARMA shared": lambda w, _: (
        g.ARMAConv(w, w, 2, 3, shared_weights=True, dropout=0.1),
        "weight",
    ),
    "GEN power": lambda w, _: (
        g.GENConv(w, w, aggr="powermean", learn_p=True, msg_norm=True, edge_dim=5),
        "attr",
    ),
    "RGCN bases": lambda w, _: (g.RGCNConv(w, w, 3, num_bases=2), "type"),
    "RGCN fast": lambda w, _: (g.FastRGCNConv(w, w, 3, aggr="add"), "type"),
    "FiLM": lambda w, _: (g.FiLMConv(w, w, num_relations=3), "type"),
    "Res gated": lambda w, _: (g.ResGatedGraphConv(w, w, edge_dim=5), "attr"),
    "General": lambda w, _: (
        g.GeneralConv(
            w, w, in_edge_channels=5, attention=True, heads=2, l2_normalize=True
        ),
        "attr",
    ),
    "Super GAT": lambda w, _: (
        g.SuperGATConv(w, w, 2, concat=False, attention_type="SD", is_undirected=True),
        "",
    ),
    "DNA": lambda w, _: (g.DNAConv(w, heads=2, groups=2), "three"),
    "Cluster": lambda w, _: (g.ClusterGCNConv(w, w, diag_lambda=0.3), ""),
    "APPNP dropout": lambda _w, _: (g.APPNP(4, 0.1, dropout=0.2), "weight"),
    "SG cached": lambda w, _: (g.SGConv(w, w, K=3, cached=True), "weight"),
    "TAG": lambda w, _: (g.TAGConv(w, w, K=2, normalize=False), "weight"),
    "Mix hop": lambda w, _: (g.MixHopConv(w, w, powers=[0, 1, 3]), "weight"),
    "Edge": lambda w, _: (g.EdgeConv(nn.Linear(2 * w, w), aggr="add"), ""),
    "Dynamic edge": lambda w, _: (g.DynamicEdgeConv(nn.Linear(2 * w, w), 4), "alone"),
    "X": lambda w, _: (g.XConv(w, w, 3, 4), "positions"),
    "Point": lambda w, _: (
        g.PointNetConv(nn.Linear(w + 3, w), nn.Linear(w, w)),
        "positions and edges",
    ),
    "Hypergraph": lambda w, _: (g.HypergraphConv(w, w, dropout=0.1), ""),
    "CG": lambda w, _: (g.CGConv(w, dim=5, aggr="mean", batch_norm=True), "attr"),
    "WL": lambda w, _: (g.WLConvContinuous(), "weight"),
    "LEConv": lambda w, _: (g.LEConv(w, w), "weight"),
    "PDN": lambda w, _: (g.PDNConv(w, w, 5, 16), "attr"),
    "EG": lambda w, _: (g.EGConv(w, w, ["mean", "symnorm", "std"], 2, 3), ""),
    "GMM": lambda w, _: (g.GMMConv(w, w, 5, 3, separate_gaussians=True), "attr"),
    "Spline": lambda w, _: (g.FeaStConv(w, w, 4), ""),
    "Gated": lambda w, _: (g.GatedGraphConv(w, 2, aggr="mean"), "weight"),
    "GPS": lambda w, _: (
        g.GPSConv(w, g.GINConv(nn.Linear(w, w)), 2, attn_type="performer"),
        "batch",
    ),
    "GPS multihead": lambda w, _: (
        g.GPSConv(w, None, 2, dropout=0.1, norm="layer_norm"),
        "batch",
    ),
    "HEAT": lambda w, _: (
        g.HEATConv(w, w, 2, 3, 4, 5, 6, heads=2, concat=False),
        "heat",
    ),
    "RGAT": lambda w, _: (
        g.RGATConv(
            w, w, 3, num_bases=2, heads=2, concat=False, edge_dim=5, mod="scaled"
        ),
        "type and attr",
    ),
}
_POOLS = {
    "mean": lambda w: g.MeanAggregation(),
    "quantile": lambda w: g.QuantileAggregation([0.25, 0.75], interpolation="midpoint"),
    "softmax": lambda w: g.SoftmaxAggregation(learn=True, channels=w),
    "power": lambda w: g.PowerMeanAggregation(learn=True, channels=w),
    "set2set": lambda w: g.Set2Set(w, 3, num_layers=2),
    "lstm": lambda w: g.LSTMAggregation(w, w, num_layers=2),
    "gru": lambda w: g.GRUAggregation(w, w, bidirectional=True),
    "sort": lambda w: g.SortAggregation(5),
    "multi": lambda w: g.MultiAggregation(
        ["mean", "std", "max"],
        mode="proj",
        mode_kwargs={"in_channels": w, "out_channels": w},
    ),
    "multi attn": lambda w: g.MultiAggregation(
        ["mean", "max"],
        mode="attn",
        mode_kwargs={"in_channels": w, "out_channels": w, "num_heads": 2},
    ),
    "deep sets": lambda w: g.DeepSetsAggregation(nn.Linear(w, w), nn.Linear(w, w)),
    "transformer": lambda w: g.SetTransformerAggregation(w, heads=2, layer_norm=True),
    "gmt": lambda w: g.GraphMultisetTransformer(w, 4, 2, heads=2),
    "attention": lambda w: g.AttentionalAggregation(nn.Linear(w, 1), nn.Linear(w, w)),
    "mlp": lambda w: g.MLPAggregation(w, w, 60, num_layers=1),
    "var preserving": lambda w: g.VariancePreservingAggregation(),
    "median": lambda w: g.MedianAggregation(),
    "mul": lambda w: g.MulAggregation(),
    "degree": lambda w: g.DegreeScalerAggregation(
        ["mean", "max"], ["identity", "attenuation"], torch.arange(60)
    ),
}


class OddGraphs(nn.Module):
    def __init__(self, convolution, call, pool, width):
        super().__init__()
        self.map = nn.Linear(7, width)
        self.convolution, self.call, self.pool = convolution, call, pool

    def forward(self, data):
        h, edges = self.map(data.x), data.edge_index
        kinds = edges[0] % 3
        if self.call == "weight":
            h = self.convolution(h, edges, data.edge_weight)
        elif self.call == "attr":
            h = self.convolution(h, edges, data.edge_attr)
        elif self.call == "type":
            h = self.convolution(h, edges, kinds)
        elif self.call == "type and attr":
            h = self.convolution(h, edges, kinds, data.edge_attr)
        elif self.call == "three":
            h = self.convolution(torch.stack([h, h * 2, h * 3], 1), edges)
        elif self.call == "alone":
            h = self.convolution(h, data.batch)
        elif self.call == "positions":
            h = self.convolution(h, data.pos, data.batch)
        elif self.call == "positions and edges":
            h = self.convolution(h, data.pos, edges)
        elif self.call == "batch":
            h = self.convolution(h, edges, data.batch)
        elif self.call == "heat":
            node_kinds = data.batch % 2
            h = self.convolution(h, edges, node_kinds, kinds, data.edge_attr)
        else:
            h = self.convolution(h, edges)
        return self.pool(h, data.batch).square().mean()


def odd_graphs(rng):
    name, pool = rng.choice(sorted(_CONVOLUTIONS)), rng.choice(sorted(_POOLS))
    width = rng.choice([8, 32])
    convolution, call = _CONVOLUTIONS[name](width, rng)
    sizes = [rng.randint(5, 40) for _ in range(rng.choice([3, 12]))]
    data = Batch.from_data_list([_graph(size, 7) for size in sizes])
    model = OddGraphs(convolution, call, _POOLS[pool](width), width)
    return Trained(f"{sum(sizes)} nodes, {name}, {pool}, {width}", model, data)


def _perceptron(width, depth=3):
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 8))


_REPARAMETRISED = {
    "weight norm": par.weight_norm,
    "weight norm, all": lambda layer: par.weight_norm(layer, dim=None),
    "spectral norm": par.spectral_norm,
    "spectral norm, 3": lambda layer: par.spectral_norm(layer, n_power_iterations=3),
    "orthogonal": par.orthogonal,
    "cayley": lambda layer: par.orthogonal(layer, "weight", "cayley"),
    "householder": lambda layer: par.orthogonal(layer, "weight", "householder"),
}


def reparametrised(rng):
    name, width = rng.choice(sorted(_REPARAMETRISED)), rng.choice([16, 64, 200])
    model = _perceptron(width)
    model[2] = _REPARAMETRISED[name](model[2])
    if rng.random() < 0.3:
        model[4] = _REPARAMETRISED[name](model[4])
    rows = rng.choice([8, 300])
    return Trained(f"{rows} x {width} {name}", model, torch.randn(rows, width))


class Around(nn.Module):
    """A perceptron in one of the ways in which a step is made."""

    def __init__(self, way, width):
        super().__init__()
        self.way, self.net = way, _perceptron(width)
        if way == "averaged":
            self.average = torch.optim.swa_utils.AveragedModel(
                self.net,
                multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9),
            ).requires_grad_(False)
        if way == "tied":
            self.net[4].weight = self.net[2].weight
        if way == "tied, transposed":
            self.table = nn.Embedding(90, width)
        if way == "hooked":
            self.net[2].register_full_backward_pre_hook(lambda _m, go: (go[0] * 0.5,))
            self.net[0].register_forward_hook(lambda _m, _i, out: out + out.detach())
        if way == "frozen":
            self.net[:4].requires_grad_(False)
        if way == "kept":
            self.register_buffer("queue", torch.zeros(64, width))

    def forward(self, x):
        return getattr(self, "_" + self.way.replace(", ", "_").replace(" ", "_"))(x)

    def _nested(self, x):
        def part(h, first, last):
            return self.net[first:last](h)

        def half(h):
            h = checkpoint(part, h, 0, 2, use_reentrant=False)
            return checkpoint(part, h, 2, 4, use_reentrant=False)

        hidden = checkpoint(half, x, use_reentrant=False)
        return self.net[4:](hidden).square().mean()

    def _reentrant(self, x):
        hidden = checkpoint(self.net[:2], x.requires_grad_(), use_reentrant=True)
        return self.net[4:](
            checkpoint(self.net[2:4], hidden, use_reentrant=True)
        ).mean()

    def _in_a_loop(self, x):
        for _ in range(3):
            x = checkpoint(
                self.net[:2], x, use_reentrant=False, preserve_rng_state=False
            )
        return self.net[4:](x).square().mean()

    def _twice_differentiated(self, x):
        x = x.detach().requires_grad_()
        [slope] = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        [bend] = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        return bend.square().mean()

    def _jvp(self, x):
        _, tangents = jvp(self.net, (x,), (torch.ones_like(x),))
        return tangents.square().mean()

    def _jacobians(self, x):
        return vmap(jacfwd(lambda row: self.net(row)))(x[:6]).square().mean()

    def _hessians(self, x):
        return vmap(hessian(lambda row: self.net(row).sum()))(x[:3]).square().mean()

    def _gradients_of_samples(self, x):
        weights = dict(self.net.named_parameters())

        def loss(weights, row):
            return functional_call(self.net, weights, (row[None],)).square().sum()

        gradients = vmap(grad(loss), (None, 0))(weights, x[:9])
        return sum(value.square().mean() for value in gradients.values())

    def _ensemble(self, x):
        stacked = {n: torch.stack([p, p + 1]) for n, p in self.net.named_parameters()}
        return (
            vmap(lambda w: functional_call(self.net, w, (x,)))(stacked).square().mean()
        )

    def _in_chunks(self, x):
        return vmap(self.net, chunk_size=7)(x).square().mean()

    def _averaged(self, x):
        with torch.no_grad():
            self.average.update_parameters(self.net)
            target = self.average(x)
        return F.mse_loss(self.net(x), target)

    def _accumulated(self, x):
        parts = x.chunk(3)
        for part in parts[:-1]:
            self.net(part).square().mean().backward()
        return self.net(parts[-1]).square().mean()

    def _tied(self, x):
        return self.net(x).square().mean()

    _hooked = _frozen = _tied

    def _tied_transposed(self, x):
        words = (x[:, 0].detach() > 0).long() + 3
        return (
            (self.net[:6](self.table(words)) @ self.table.weight.t())
            .logsumexp(1)
            .mean()
        )

    def _without_gradients(self, x):
        with torch.no_grad():
            features = self.net[:4](x)
        with torch.inference_mode():
            scale = self.net[:2](x).abs().mean()
        return self.net[4:](features).square().mean() * float(scale > 0)

    def _kept(self, x):
        keys = self.net[:2](x)
        out = (keys @ self.queue.clone().t()).logsumexp(1).mean()
        with torch.no_grad():
            self.queue = torch.cat([keys.detach(), self.queue])[:64]
        return out + self.net[2:](keys).mean()

    def _accessed(self, x):
        with torch.autograd.graph.save_on_cpu():
            hidden = self.net[:4](x)
        return self.net[4:](hidden).square().mean()

    def _mixed(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.net[:4](x)
            with torch.autocast("cpu", enabled=False):
                hidden = self.net[4](hidden.float())
            return self.net[5:](hidden).float().square().mean()

    def _complex(self, x):
        hidden = torch.view_as_complex(self.net[:4](x).view(len(x), -1, 2))
        other = torch.polar(hidden.abs(), hidden.angle()).conj()
        return (hidden[:, :, None] * other[:, None, :]).sum(1).abs().mean()

    def _clipped_inside(self, x):
        out = self.net(x)
        gradients = torch.autograd.grad(
            out.square().mean(), list(self.net.parameters()), create_graph=True
        )
        norm = torch.nn.utils.get_total_norm(list(gradients))
        return out.mean() + (norm - 1).relu()


_AROUND = (
    "nested",
    "reentrant",
    "in a loop",
    "twice differentiated",
    "jvp",
    "jacobians",
    "hessians",
    "gradients of samples",
    "ensemble",
    "in chunks",
    "averaged",
    "accumulated",
    "tied",
    "hooked",
    "frozen",
    "tied, transposed",
    "without gradients",
    "kept",
    "accessed",
    "mixed",
    "complex",
    "clipped inside",
)


def around(rng):
    way, width = rng.choice(_AROUND), rng.choice([16, 64, 160, 300])
    rows = rng.choice([12, 200, 900])
    return Trained(
        f"{rows} x {width} {way}", Around(way, width), torch.randn(rows, width)
    )


class _OwnSum(torch.autograd.Function):
    """Adds terms of its own in its backward pass, in Python."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y + x * x

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        of_x = gradient * y + gradient * x * 2 + gradient * 0.0
        return of_x, (gradient * x).index_add(0, torch.arange(len(x)), gradient * 0.0)


class OwnSums(nn.Module):
    def __init__(self, width, *, alike):
        super().__init__()
        self.first, self.second = nn.Linear(16, width), nn.Linear(16, width)
        self.alike = alike

    def forward(self, x):
        h = self.first(x).tanh()
        other = h if self.alike else self.second(x)
        return (_OwnSum.apply(h, other) + h.square() * h).square().mean()


def own_sums(rng):
    width, rows = rng.choice([16, 256]), rng.choice([40, 900])
    alike = rng.random() < 0.5
    return Trained(
        f"{rows} x {width} {alike}", OwnSums(width, alike=alike), torch.randn(rows, 16)
    )


class Clipped(torch.optim.AdamW):
    """Clips before it updates."""

    def __init__(self, parameters, how, **options):
        self.how = how
        super().__init__(parameters, **options)

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.how == "value":
            nn.utils.clip_grad_value_(parameters, 0.1)
        elif self.how == "value, foreach":
            nn.utils.clip_grad_value_(parameters, 0.1, foreach=True)
        elif self.how == "largest":
            nn.utils.clip_grad_norm_(parameters, 1.0, norm_type=float("inf"))
        else:
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach="foreach" in self.how)
        return super().step(closure)


_O = torch.optim
OPTIMIZERS = {
    "none": None,
    "adam maximize": lambda p: _O.Adam(p, weight_decay=0.1, maximize=True),
    "adam fused amsgrad": lambda p: _O.Adam(p, fused=True, amsgrad=True),
    "adamw fused": lambda p: _O.AdamW(p, fused=True),
    "adamw foreach amsgrad": lambda p: _O.AdamW(p, foreach=True, amsgrad=True),
    "adam foreach": lambda p: _O.Adam(p, foreach=True, weight_decay=0.1),
    "adam tensor lr": lambda p: _O.Adam(p, lr=torch.tensor(1e-3)),
    "sgd fused": lambda p: _O.SGD(p, 0.1, 0.9, fused=True),
    "sgd foreach nesterov": lambda p: _O.SGD(
        p, 0.1, 0.9, nesterov=True, foreach=True, weight_decay=0.1
    ),
    "sgd dampened": lambda p: _O.SGD(p, 0.1, 0.9, dampening=0.1),
    "rmsprop foreach": lambda p: _O.RMSprop(
        p, foreach=True, centered=True, momentum=0.9, weight_decay=0.1
    ),
    "adagrad fused": lambda p: _O.Adagrad(p, fused=True),
    "adagrad decayed": lambda p: _O.Adagrad(p, lr_decay=0.1, weight_decay=0.1),
    "nadam foreach": lambda p: _O.NAdam(p, foreach=True, decoupled_weight_decay=True),
    "radam": lambda p: _O.RAdam(p, weight_decay=0.1, decoupled_weight_decay=True),
    "adamax": lambda p: _O.Adamax(p, weight_decay=0.1),
    "adadelta": lambda p: _O.Adadelta(p, weight_decay=0.1, foreach=True),
    "asgd": lambda p: _O.ASGD(p, weight_decay=0.1, foreach=True),
    "rprop foreach": lambda p: _O.Rprop(p, foreach=True),
    "adafactor foreach": lambda p: _O.Adafactor(p, foreach=True),
    "clipped by value": lambda p: Clipped(p, "value"),
    "clipped by value, foreach": lambda p: Clipped(p, "value, foreach", foreach=True),
    "clipped by largest": lambda p: Clipped(p, "largest"),
    "clipped, foreach": lambda p: Clipped(p, "norm, foreach", foreach=True),
    "clipped, fused": lambda p: Clipped(p, "norm", fused=True),
}


def optimizers(rng):
    width, rows = rng.choice([16, 64, 300, 700]), rng.choice([8, 100])
    model = _perceptron(width, rng.choice([1, 4]))
    if rng.random() < 0.3:
        model = model.double()
    elif rng.random() < 0.2:
        model = model.bfloat16()
    dtype = next(model.parameters()).dtype
    return Trained(
        f"{rows} x {width} {dtype}", model, torch.randn(rows, width, dtype=dtype)
    )


KINDS = {
    "matrices": matrices,
    "square matrices": square_matrices,
    "fourier": fourier,
    "selections": selections,
    "images": images,
    "sequences": sequences,
    "bags": bags,
    "masks": masks,
    "multi head": multi_head,
    "encoders": encoders,
    "sparse products": sparse_products,
    "odd graphs": odd_graphs,
    "reparametrised": reparametrised,
    "around": around,
    "own sums": own_sums,
    "optimizers": optimizers,
}


def draw_option_step(seed, kind):
    """Draw a step of a kind; a seed always gives the same."""
    rng = random.Random(f"options {kind} {seed}")
    torch.manual_seed(seed)
    trained = KINDS[kind](rng)
    name = rng.choice(sorted(OPTIMIZERS))
    if kind != "optimizers" and rng.random() < 0.5:
        name = "none"
    optimizer = OPTIMIZERS[name]
    if any(getattr(module, "sparse", False) for module in trained.model.modules()):
        # Most optimizers refuse sparse gradients.
        name, optimizer = "sgd", torch.optim.SGD
    is_short = kind in {"images", "masks", "encoders", "sequences", "multi head"}
    autocast = torch.bfloat16 if is_short and rng.random() < 0.25 else None
    step = Step(trained.loss, optimizer=optimizer, autocast=autocast)
    words = f"{kind} {seed}: {trained.description}; {name}; {autocast}"
    return DrawnStep(words, trained.model, trained.batch, step, rng.choice([1, 2]))
