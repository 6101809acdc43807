"""Steps drawn by a seed over the breadth of the libraries: functions, layers, models.

``drawn.py`` and ``drawn_models.py`` draw what people often write.  Here are functions
of torch in chains, each convolution, aggregation, pool and norm of PyG, and models that
Hugging Face makes from a small configuration.
"""

import copy
import itertools
import random
import warnings

import torch
import torch_geometric.nn as g
from drawn import DrawnStep, Trained
from drawn_models import OPTIMIZERS
from torch import nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it
from torch.nn.utils import parametrize
from torch_geometric.data import Batch, Data
from torch_geometric.utils import (
    coalesce,
    sort_edge_index,
)

from loaderkit.budget.step.train_step import Step

_W = 64
"""Columns of what a function of a chain is given, and gives."""


def _fit_to_width(h):
    """Bring what a function gives back to rows of 64 columns."""
    if h.is_complex():
        h = torch.view_as_real(h).flatten(-2)
    h = h.reshape(h.shape[0], -1).float() if h.dim() != 1 else h[:, None].float()
    if h.size(1) == _W:
        return h
    return h[:, :_W] if h.size(1) > _W else F.pad(h, (0, _W - h.size(1)))


def _make_positive_definite(h):
    """Small positive definite matrices."""
    m = h.view(-1, 8, 8)
    return m @ m.mT + 8 * torch.eye(8)


FUNCTIONS = {
    # Pointwise.
    "erf": torch.erf,
    "erfinv": lambda h: torch.erfinv(h.tanh() * 0.9),
    "lgamma": lambda h: torch.lgamma(h.abs() + 1),
    "digamma": lambda h: torch.digamma(h.abs() + 1),
    "xlogy": lambda h: torch.xlogy(h, h.abs() + 1),
    "sinc": torch.sinc,
    "hypot": lambda h: torch.hypot(h, h.flip(1)),
    "atan2": lambda h: torch.atan2(h, h.roll(1, 1)),
    "logaddexp": lambda h: torch.logaddexp(h, h.roll(1, 0)),
    "fmod": lambda h: torch.fmod(h, 0.7),
    "remainder": lambda h: torch.remainder(h, h.detach().abs() + 1),
    "lerp": lambda h: torch.lerp(h, h.flip(1), h.sigmoid()),
    "addcmul": lambda h: torch.addcmul(h, h, h.roll(1, 1), value=0.3),
    "addcdiv": lambda h: torch.addcdiv(h, h, h.abs() + 1, value=0.3),
    "clamp tensors": lambda h: h.clamp(-h.detach().abs() / 2, h.detach().abs() / 2),
    "nan_to_num": torch.nan_to_num,
    "frexp": lambda h: torch.frexp(h)[0],
    "copysign": lambda h: torch.copysign(h, h.roll(1, 0)),
    "float power": lambda h: torch.float_power(h.abs() + 0.1, 1.5),
    "polygamma": lambda h: torch.polygamma(1, h.abs() + 1),
    "special": lambda h: torch.special.i0e(h) + torch.special.ndtr(h),
    "log_ndtr": torch.special.log_ndtr,
    "bessel": lambda h: torch.special.i1(h.tanh()),
    "threshold": lambda h: F.threshold(h, 0.1, -1.0),
    "hardtanh": F.hardtanh,
    "celu": F.celu,
    "hardsigmoid": F.hardsigmoid,
    "tanhshrink": F.tanhshrink,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "softmin": lambda h: F.softmin(h, 1),
    "relu6 in place": lambda h: F.relu6(h * 1, inplace=True),
    "feature dropout": lambda h: F.feature_alpha_dropout(h.view(-1, 8, 8), 0.3),
    "dropout1d": lambda h: F.dropout1d(h.view(-1, 8, 8), 0.3),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "bernoulli": lambda h: h * torch.bernoulli(h.sigmoid()),
    "rsample": lambda h: torch.distributions.Normal(h, h.exp() + 1).rsample(),
    "gamma": lambda h: torch.distributions.Gamma(h.exp() + 1, 1.0).rsample(),
    "dirichlet": lambda h: torch.distributions.Dirichlet(h.exp() + 1).rsample(),
    "multivariate": lambda h: torch.distributions.MultivariateNormal(
        h.view(-1, 8, 8)[..., 0], _make_positive_definite(h)
    ).rsample(),
    # Reductions.
    "var": lambda h: h.var(1),
    "std_mean": lambda h: torch.stack(torch.std_mean(h, 1), 1),
    "amax": lambda h: h.amax(1),
    "aminmax": lambda h: torch.stack(tuple(torch.aminmax(h, dim=1)), 1),
    "quantile": lambda h: torch.quantile(h, 0.3, 1),
    "nanmedian": lambda h: h.nanmedian(1)[0],
    "nansum": lambda h: h.nansum(1),
    "mode": lambda h: h.mode(1)[0],
    "p norm": lambda h: torch.linalg.vector_norm(h, 3, 1),
    "renorm": lambda h: h.renorm(2, 0, 1.0),
    "dist": lambda h: h * torch.dist(h, h.flip(0)),
    "cov": lambda h: h @ torch.cov(h.t()),
    "corrcoef": lambda h: h @ torch.corrcoef(h.t()),
    "trapezoid": lambda h: torch.trapezoid(h, dim=1),
    "cumulative trapezoid": lambda h: torch.cumulative_trapezoid(h, dim=1),
    "cumsum": lambda h: h.cumsum(0),
    "cummin": lambda h: h.cummin(1)[0],
    "diff": lambda h: h.diff(dim=1),
    "gradient": lambda h: torch.gradient(h, dim=1)[0],
    "count": lambda h: h * h.count_nonzero(1)[:, None],
    "histogram": lambda h: h * torch.histc(h.detach(), 10).mean(),
    "bincount": lambda h: h * torch.bincount(h.detach().argmax(1), minlength=64),
    "searchsorted": lambda h: (
        h * torch.searchsorted(torch.linspace(-1, 1, 9), h.detach().contiguous())
    ),
    "bucketize": lambda h: h * torch.bucketize(h.detach(), torch.linspace(-1, 1, 9)),
    # Shapes.
    "roll": lambda h: h.roll((1, 2), (0, 1)),
    "rot90": lambda h: h.view(-1, 8, 8).rot90(1, (1, 2)),
    "tril": lambda h: h.view(-1, 8, 8).tril(),
    "diag_embed": lambda h: torch.diag_embed(h.view(-1, 8, 8)[..., 0]),
    "diagonal": lambda h: h.view(-1, 8, 8).diagonal(dim1=1, dim2=2),
    "block_diag": lambda h: torch.block_diag(*h.view(-1, 8, 8)[:8]).sum(0) + h,
    "tile": lambda h: h.tile(1, 3),
    "kron": lambda h: torch.kron(h[:, :8].contiguous(), h[:2, :8].contiguous()),
    "meshgrid": lambda h: sum(torch.meshgrid(h[:, 0], h[:, 1], indexing="ij")),
    "combinations": lambda h: torch.combinations(h[:40, 0]).sum(0).mean() * h,
    "cartesian": lambda h: torch.cartesian_prod(h[:, 0], h[:20, 1]),
    "vander": lambda h: torch.linalg.vander(h[:, 0].tanh(), N=12),
    "unflatten": lambda h: h.unflatten(1, (8, 8)).transpose(1, 2).contiguous(),
    "as_strided": lambda h: h.as_strided((len(h), 32), (64, 2)),
    "movedim": lambda h: h.view(-1, 4, 16).movedim(1, 2).reshape(len(h), -1),
    "pixel_shuffle": lambda h: F.pixel_shuffle(h.view(-1, 4, 4, 4), 2),
    "channel_shuffle": lambda h: F.channel_shuffle(h.view(-1, 4, 4, 4), 2),
    "unfold, fold": lambda h: F.fold(
        F.unfold(h.view(-1, 1, 8, 8), 3, padding=1), (8, 8), 3, padding=1
    ),
    "reflect": lambda h: F.pad(h.view(-1, 1, 64), (3, 3), "reflect"),
    "circular": lambda h: F.pad(h.view(-1, 1, 8, 8), (1, 1, 1, 1), "circular"),
    "replicate": lambda h: F.pad(h.view(-1, 1, 8, 8), (1, 1, 1, 1), "replicate"),
    # Selections and writes.
    "take_along_dim": lambda h: h.take_along_dim(h.detach().argsort(1), 1),
    "scatter_reduce": lambda h: torch.zeros_like(h).scatter_reduce(
        0, (torch.arange(len(h)) % 7)[:, None].expand_as(h), h, "amax"
    ),
    "scatter prod": lambda h: torch.ones_like(h).scatter_reduce(
        0, (torch.arange(len(h)) % 7)[:, None].expand_as(h), h, "prod"
    ),
    "scatter_add": lambda h: torch.zeros_like(h).scatter_add(
        0, (torch.arange(len(h)) % 7)[:, None].expand_as(h), h
    ),
    "index_reduce": lambda h: torch.zeros_like(h).index_reduce(
        0, torch.arange(len(h)) % 7, h, "mean"
    ),
    "index_copy": lambda h: torch.zeros_like(h).index_copy(
        0, torch.randperm(len(h)), h
    ),
    "index_fill": lambda h: h.index_fill(1, torch.tensor([0, 3]), 0.0),
    "index_put": lambda h: torch.zeros_like(h).index_put(
        (torch.arange(len(h)) % 5,), h, accumulate=True
    ),
    "slice_scatter": lambda h: h.slice_scatter(h[:, :8] * 2, 1, 8, 16),
    "select_scatter": lambda h: h.select_scatter(h[:, 0] * 2, 1, 3),
    "diagonal_scatter": lambda h: h.view(-1, 8, 8).diagonal_scatter(
        h[:, :8] * 1.0, dim1=1, dim2=2
    ),
    "put": lambda h: torch.zeros_like(h).put(
        torch.arange(h.numel()).view_as(h), h, accumulate=True
    ),
    "where three": lambda h: torch.where(h > 1, h, torch.where(h < -1, -h, h * 2)),
    "argsort": lambda h: h.gather(1, h.argsort(1)[:, :9]),
    "msort": torch.msort,
    "one_hot": lambda h: F.one_hot(h.argmax(1), 64).float() * h,
    "embedding by": lambda h: F.embedding(h.detach().argmax(1), h[:64].mT @ h[:64]),
    "heaviside": lambda h: h * torch.heaviside(h.detach(), torch.tensor(0.5)),
    # Products and decompositions.
    "einsum": lambda h: torch.einsum(
        "bij,bkj->bik", h.view(-1, 8, 8), h.view(-1, 8, 8)
    ),
    "einsum three": lambda h: torch.einsum("bi,bj,ij->b", h, h, torch.eye(64)),
    "tensordot": lambda h: torch.tensordot(h.view(-1, 8, 8), h.view(-1, 8, 8)[0], 1),
    "bilinear": lambda h: F.bilinear(h[:, :8].contiguous(), h, torch.ones(4, 8, 64)),
    "baddbmm": lambda h: torch.baddbmm(*[h.view(-1, 8, 8)] * 3),
    "chain_matmul": lambda h: torch.linalg.multi_dot([h, h.t(), h]),
    "matrix_power": lambda h: torch.linalg.matrix_power(h.view(-1, 8, 8).tanh(), 3),
    "inv": lambda h: torch.linalg.inv(_make_positive_definite(h)),
    "det": lambda h: torch.linalg.det(_make_positive_definite(h)),
    "slogdet": lambda h: torch.linalg.slogdet(_make_positive_definite(h))[1],
    "eigh": lambda h: torch.linalg.eigh(_make_positive_definite(h))[0],
    "qr": lambda h: torch.linalg.qr(h.view(-1, 8, 8) + torch.eye(8))[0],
    "cholesky solve": lambda h: torch.cholesky_solve(
        h.view(-1, 8, 8), torch.linalg.cholesky(_make_positive_definite(h))
    ),
    "triangular": lambda h: torch.linalg.solve_triangular(
        torch.linalg.cholesky(_make_positive_definite(h)), h.view(-1, 8, 8), upper=False
    ),
    "lstsq": lambda h: torch.linalg.lstsq(_make_positive_definite(h), h.view(-1, 8, 8))[
        0
    ],
    "svd": lambda h: torch.linalg.svd(_make_positive_definite(h))[1],
    "cross": lambda h: torch.linalg.cross(h[:, :3], h[:, 3:6]),
    "householder": lambda h: torch.linalg.householder_product(
        h.view(-1, 8, 8).tril(-1) * 0.1, h[:, :8].sigmoid()
    ),
    "cosine": lambda h: F.cosine_similarity(h[:, None], h[None, :30], dim=-1),
    "pairwise": lambda h: F.pairwise_distance(h, h.flip(0)),
    "pdist": lambda h: F.pdist(h[:50]).mean() * h,
    "cdist 1": lambda h: torch.cdist(h, h[:20], 1.0),
    # Fourier and complex.
    "fft2": lambda h: torch.fft.fft2(h.view(-1, 8, 8)).real,
    "hfft": lambda h: torch.fft.hfft(torch.complex(h, h.flip(1))),
    "stft": lambda h: torch.stft(
        h, 16, 4, window=torch.hann_window(16), return_complex=True
    ).abs(),
    "istft": lambda h: torch.istft(
        torch.stft(h, 16, 4, window=torch.hann_window(16), return_complex=True),
        16,
        4,
        window=torch.hann_window(16),
        length=64,
    ),
    "polar": lambda h: torch.polar(h.abs(), h),
    "complex product": lambda h: (c := torch.complex(h, h.flip(1))) * c.conj(),
    "complex linear": lambda h: (
        torch.complex(h, h) @ torch.complex(torch.eye(64), torch.ones(64, 64))
    ),
    "angle": lambda h: torch.complex(h, h.flip(1)).angle(),
    "fftshift": lambda h: torch.fft.fftshift(torch.fft.fft(h), 1),
    # Layers as functions.
    "local response": lambda h: F.local_response_norm(h.view(-1, 8, 8), 3),
    "rms_norm": lambda h: F.rms_norm(h, (64,)),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True),
    "lp_pool": lambda h: F.lp_pool1d(h.view(-1, 4, 16).abs() + 0.1, 2, 4),
    "avg_pool3d": lambda h: F.avg_pool3d(h.view(-1, 1, 4, 4, 4), 2),
    "fractional": lambda h: F.fractional_max_pool2d(
        h.view(-1, 1, 8, 8), 2, output_size=4
    ),
    "max_unpool": lambda h: F.max_unpool1d(
        *F.max_pool1d(h.view(-1, 4, 16), 2, return_indices=True), 2
    ),
    "adaptive max": lambda h: F.adaptive_max_pool2d(h.view(-1, 1, 8, 8), 3),
    "grid_sample": lambda h: F.grid_sample(
        h.view(-1, 1, 8, 8), h[:, :32].tanh().reshape(-1, 4, 4, 2), align_corners=False
    ),
    "affine_grid": lambda h: F.affine_grid(
        h[:, :6].view(-1, 2, 3), [len(h), 1, 4, 4], align_corners=False
    ),
    "bicubic": lambda h: F.interpolate(
        h.view(-1, 1, 8, 8), scale_factor=2, mode="bicubic"
    ),
    "trilinear": lambda h: F.interpolate(
        h.view(-1, 1, 4, 4, 4), scale_factor=2, mode="trilinear"
    ),
    "area": lambda h: F.interpolate(h.view(-1, 1, 8, 8), size=3, mode="area"),
    "conv of batch": lambda h: F.conv1d(
        h.view(1, -1, 16), torch.ones(h.numel() // 16, 1, 3), groups=h.numel() // 16
    ),
    "conv_tbc": lambda h: torch.conv_tbc(
        h.view(-1, 4, 16), torch.ones(3, 16, 16), torch.zeros(16), 1
    ),
    "attention causal": lambda h: F.scaled_dot_product_attention(
        *[h.view(1, 1, -1, 64)] * 3, is_causal=True
    ),
    "attention dropout": lambda h: F.scaled_dot_product_attention(
        *[h.view(1, 2, -1, 32)] * 3, dropout_p=0.1
    ),
    "gqa": lambda h: F.scaled_dot_product_attention(
        h.view(1, 4, -1, 16), *[h.view(1, 4, -1, 16)[:, :2]] * 2, enable_gqa=True
    ),
    "attention bias grad": lambda h: F.scaled_dot_product_attention(
        *[h.view(1, 1, -1, 64)] * 3, attn_mask=(h @ h.t())[None, None]
    ),
    # Transforms, types, views of other types.
    "vmap": lambda h: vmap(lambda row: row.view(8, 8) @ row[:8])(h),
    "jacobian": lambda h: vmap(jacrev(lambda row: row[:6].sin() * row[:6].sum()))(h),
    "half": lambda h: h.half().float().sin(),
    "bf16 product": lambda h: (h.bfloat16() @ h.bfloat16().t()[:, :32]).float(),
    "double": lambda h: (h.double() @ h.double().t()[:, :32]).float(),
    "quantised": lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127),
    "quantised axis": lambda h: torch.fake_quantize_per_channel_affine(
        h, torch.full((64,), 0.1), torch.zeros(64, dtype=torch.int32), 1, -128, 127
    ),
    "detach hook": lambda h: (h.register_hook(lambda grad: grad * 2), h)[1],
    "hook clone": lambda h: (h.register_hook(lambda grad: grad.clone()), h * 1)[1],
    "nested": lambda h: torch.cat(
        torch.nested.as_nested_tensor([h[:3], h[3:]], layout=torch.jagged)
        .sin()
        .unbind()
    ),
    "split cat": lambda h: torch.cat([part.exp() for part in h.tensor_split(5, 1)], 1),
    "hsplit": lambda h: torch.hstack([p * 2 for p in torch.hsplit(h, 4)]),
    "dsplit": lambda h: torch.dstack([h, h * 2]),
    "column_stack": lambda h: torch.column_stack([h[:, 0], h[:, 1:]]),
}


class FunctionChain(nn.Module):
    def __init__(self, names, width):
        super().__init__()
        self.names = names
        self.layers = nn.ModuleList(
            nn.Linear(width if n == 0 else _W, _W) for n in range(len(names))
        )

    def forward(self, x):
        for name, layer in zip(self.names, self.layers, strict=True):
            h = layer(x)
            x = _fit_to_width(FUNCTIONS[name](h))
            if len(x) != len(h):
                x = (
                    x[: len(h)]
                    if len(x) > len(h)
                    else F.pad(x, (0, 0, 0, len(h) - len(x)))
                )
        return x.square().mean()


def functions(rng):
    names = rng.sample(list(FUNCTIONS), rng.randint(1, 4))
    rows, width = rng.choice([40, 128, 600]), rng.choice([20, 64])
    return Trained(
        f"{rows} rows, {', '.join(names)}",
        FunctionChain(names, width),
        torch.randn(rows, width),
    ), {}


# Losses.

MORE_LOSSES = {
    "cosine embedding": lambda o, t: F.cosine_embedding_loss(o, t, torch.ones(len(o))),
    "margin ranking": lambda o, t: F.margin_ranking_loss(
        o[:, 0], t[:, 0], t[:, 1].sign()
    ),
    "multi margin": lambda o, t: F.multi_margin_loss(o, t.argmax(1)),
    "multilabel": lambda o, t: F.multilabel_soft_margin_loss(o, (t > 0).float()),
    "multilabel margin": lambda o, t: F.multilabel_margin_loss(o, (t > 0).long()),
    "nll": lambda o, t: F.nll_loss(o.log_softmax(1), t.argmax(1)),
    "smoothed": lambda o, t: F.cross_entropy(o, t.argmax(1), label_smoothing=0.1),
    "weighted": lambda o, t: F.cross_entropy(o, t.argmax(1), torch.rand(o.size(1))),
    "per row": lambda o, t: (
        F.cross_entropy(o, t.argmax(1), reduction="none") * t[:, 0]
    ).mean(),
    "focal": lambda o, t: ((1 - o.sigmoid()).pow(2) * F.softplus(-o) * t).mean(),
    "dice": lambda o, t: (
        1 - 2 * (o.sigmoid() * t).sum() / (o.sigmoid() + t.abs()).sum()
    ),
    "logcosh": lambda o, t: torch.log(torch.cosh(o - t)).mean(),
    "js": lambda o, t: F.kl_div(
        o.log_softmax(1), (o.softmax(1) + t.softmax(1)).log() / 2, log_target=True
    ),
    "triplet with distance": lambda o, t: F.triplet_margin_with_distance_loss(
        o, t, t.flip(0)
    ),
    "pairs of a batch": lambda o, t: F.cross_entropy(
        F.normalize(o) @ F.normalize(t).t(), torch.arange(len(o))
    ),
    "barlow": lambda o, t: ((o.t() @ t) / len(o) - torch.eye(o.size(1))).square().sum(),
    "mmd": lambda o, t: torch.exp(-torch.cdist(o, t)).mean(),
    "ctc": lambda o, t: F.ctc_loss(
        o.view(len(o), -1, 16).log_softmax(-1).transpose(0, 1),
        t.view(len(t), -1)[:, :2].abs().long().clamp(1, 15),
        torch.full((len(o),), o.size(1) // 16),
        torch.full((len(o),), 2),
    ),
    "gaussian full": lambda o, t: F.gaussian_nll_loss(
        o, t, torch.ones_like(o), full=True
    ),
    "poisson full": lambda o, t: F.poisson_nll_loss(
        o, t.abs(), full=True, log_input=False
    ),
    "categorical": lambda o, t: (
        -torch.distributions.Categorical(logits=o).log_prob(t.argmax(1)).mean()
    ),
    "mixture": lambda o, t: (
        -torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=o[:, :8]),
            torch.distributions.Normal(o[:, 8:16], o[:, 16:24].exp()),
        )
        .log_prob(t[:, 0])
        .mean()
    ),
    "bernoulli": lambda o, t: (
        -torch.distributions.Bernoulli(logits=o).log_prob((t > 0).float()).mean()
    ),
    "wasserstein": lambda o, t: (o.sort(1)[0] - t.sort(1)[0]).abs().mean(),
}


def losses(rng):
    name, rows = rng.choice(list(MORE_LOSSES)), rng.choice([6, 70, 512])
    width = rng.choice([32, 64, 512])
    model = nn.Sequential(
        nn.Linear(24, width),
        rng.choice([nn.ReLU, nn.GELU])(),
        nn.Linear(width, rng.choice([32, 64])),
    )
    dtype = rng.choice([torch.float32] * 4 + [torch.float64, torch.bfloat16])
    if name in {"multilabel margin", "multi margin", "ctc", "mmd", "pairs of a batch"}:
        dtype = torch.float32
    model = model.to(dtype)
    out = model[-1].out_features
    batch = (torch.randn(rows, 24, dtype=dtype), torch.randn(rows, out, dtype=dtype))
    options = {"autocast": torch.bfloat16} if rng.random() < 0.15 else {}
    return Trained(
        f"{rows} x {width} {name} {dtype}", model, batch, MORE_LOSSES[name]
    ), options


# Hugging Face.


def _transformers_models():
    import transformers as t

    small = {
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    grouped = small | {"num_key_value_heads": 2}
    seq2seq = {
        "vocab_size": 300,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }
    t5 = {
        "vocab_size": 300,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
    }
    causal = {
        "Llama": grouped,
        "Mistral": grouped,
        "Qwen2": grouped,
        "Qwen3": grouped | {"head_dim": 8},
        "Gemma": grouped | {"head_dim": 8},
        "Gemma2": grouped | {"head_dim": 8},
        "Phi": grouped,
        "Phi3": grouped,
        "StableLm": grouped,
        "Starcoder2": grouped,
        "Olmo": grouped,
        "Olmo2": grouped,
        "Cohere": grouped,
        "Granite": grouped,
        "Falcon": small,
        "GPTNeoX": small,
        "Persimmon": small,
        "Mixtral": grouped | {"num_local_experts": 4},
        "Qwen2Moe": grouped
        | {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts_per_tok": 2,
        },
        "OlmoE": {},
        "GPTNeo": {
            "vocab_size": 300,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 128,
        },
        "GPT2": {
            "vocab_size": 300,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
        },
        "GPTJ": {
            "vocab_size": 300,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "rotary_dim": 8,
        },
        "CodeGen": {
            "vocab_size": 300,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "rotary_dim": 8,
        },
        "GPTBigCode": {
            "vocab_size": 300,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
        },
        "Bloom": {"vocab_size": 300, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "Mpt": {
            "vocab_size": 300,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 128,
        },
        "OPT": {
            "vocab_size": 300,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 32,
            "pad_token_id": 0,
        },
        "Mamba": {
            "vocab_size": 300,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "pad_token_id": 0,
        },
        "Mamba2": {
            "vocab_size": 300,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "pad_token_id": 0,
        },
        "Rwkv": {
            "vocab_size": 300,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "context_length": 128,
            "attention_hidden_size": 32,
            "intermediate_size": 64,
        },
        "RecurrentGemma": grouped
        | {
            "num_hidden_layers": 3,
            "lru_width": 32,
            "attention_window_size": 16,
            "head_dim": 8,
        },
        "Jamba": grouped
        | {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
        "Zamba": {},
        "XGLM": {
            "vocab_size": 300,
            "d_model": 32,
            "ffn_dim": 64,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 128,
        },
        "DeepseekV3": {},
        "Nemotron": grouped,
        "Glm": grouped | {"head_dim": 8},
        "Ernie4_5": grouped | {"head_dim": 8},
        "SmolLM3": grouped,
        "Helium": grouped | {"head_dim": 8},
        "Diffllama": {},
    }
    masked = {
        "Bert": small,
        "Roberta": small,
        "Electra": small | {"embedding_size": 16},
        "Albert": small | {"embedding_size": 16},
        "Deberta": small,
        "DebertaV2": small
        | {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 16,
        },
        "MobileBert": small
        | {"intra_bottleneck_size": 16, "embedding_size": 16, "true_hidden_size": 16},
        "ConvBert": small | {"embedding_size": 16},
        "Nystromformer": small | {"num_landmarks": 8, "segment_means_seq_len": 32},
        "SqueezeBert": small | {"embedding_size": 32},
        "FNet": {
            "vocab_size": 300,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 128,
        },
        "MPNet": small,
        "XLMRoberta": small,
        "Camembert": small,
        "RoFormer": small | {"embedding_size": 16},
        "MegatronBert": small,
        "IBert": small,
        "Ernie": small,
        "BigBird": small | {"attention_type": "original_full"},
        "Yoso": small | {"use_expectation": True},
        "DistilBert": {
            "vocab_size": 300,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 128,
        },
        "XLM": {
            "vocab_size": 300,
            "emb_dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 128,
        },
        "Flaubert": {
            "vocab_size": 300,
            "emb_dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 128,
        },
        "Longformer": small | {"attention_window": 16},
        "ModernBert": small
        | {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2},
        "Reformer": {},
        "Perceiver": {},
        "Funnel": {
            "vocab_size": 300,
            "d_model": 32,
            "block_sizes": [1, 1],
            "n_head": 4,
            "d_head": 8,
            "d_inner": 64,
            "num_decoder_layers": 1,
        },
        "LayoutLM": small,
        "Esm": small | {"mask_token_id": 3},
    }
    conditional = {
        "T5": t5,
        "MT5": t5,
        "Bart": seq2seq,
        "MBart": seq2seq,
        "Pegasus": seq2seq,
        "Blenderbot": seq2seq,
        "Marian": seq2seq,
        "M2M100": seq2seq,
        "UMT5": t5,
        "LongT5": t5 | {"local_radius": 8, "encoder_attention_type": "local"},
        "PLBart": seq2seq,
        "ProphetNet": {},
        "SwitchTransformers": t5
        | {
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_experts": 2,
        },
        "LED": seq2seq
        | {
            "attention_window": 16,
            "max_encoder_position_embeddings": 128,
            "max_decoder_position_embeddings": 128,
        },
    }
    images = {
        "ViT": vision,
        "DeiT": vision,
        "Beit": vision,
        "Dinov2": vision,
        "ViTMSN": vision,
        "Data2VecVision": vision,
        "YolosX": {},
        "ConvNext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        "ConvNextV2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        "RegNet": {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "groups_width": 8,
        },
        "MobileNetV1": {"depth_multiplier": 0.25, "image_size": 32},
        "MobileNetV2": {"depth_multiplier": 0.35, "image_size": 32},
        "EfficientNet": {
            "width_coefficient": 0.3,
            "depth_coefficient": 0.3,
            "image_size": 32,
            "hidden_dim": 384,
        },
        "Swin": {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        "Swinv2": {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        "PoolFormer": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
        "Segformer": {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "sr_ratios": [2, 1],
            "num_attention_heads": [1, 2],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "mlp_ratios": [2, 2],
        },
        "Levit": {
            "image_size": 64,
            "hidden_sizes": [16, 32, 32],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
        "Cvt": {
            "embed_dim": [8, 16],
            "num_heads": [1, 2],
            "depth": [1, 1],
            "patch_sizes": [3, 3],
            "patch_stride": [2, 2],
            "patch_padding": [1, 1],
            "mlp_ratio": [2.0, 2.0],
            "attention_drop_rate": [0.0, 0.0],
            "drop_rate": [0.0, 0.0],
            "drop_path_rate": [0.0, 0.0],
            "qkv_bias": [True, True],
            "cls_token": [False, True],
            "qkv_projection_method": ["dw_bn", "dw_bn"],
            "kernel_qkv": [3, 3],
            "padding_kv": [1, 1],
            "stride_kv": [2, 2],
            "padding_q": [1, 1],
            "stride_q": [1, 1],
        },
        "Focalnet": {},
        "MobileViT": {
            "image_size": 32,
            "patch_size": 2,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
        },
        "PvtV2": {},
        "Hiera": {},
        "Bit": {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_groups": 4,
        },
    }
    audio = {
        "Wav2Vec2": {
            "vocab_size": 32,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "num_feat_extract_layers": 2,
            "mask_time_length": 2,
        },
        "Hubert": {
            "vocab_size": 32,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "num_feat_extract_layers": 2,
            "mask_time_length": 2,
        },
        "SEW": {
            "vocab_size": 32,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "num_feat_extract_layers": 2,
            "mask_time_length": 2,
        },
        "WavLM": {
            "vocab_size": 32,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "num_feat_extract_layers": 2,
            "mask_time_length": 2,
        },
    }
    found = []
    kinds = (
        (causal, "ForCausalLM", "LMHeadModel"),
        (masked, "ForMaskedLM", "WithLMHeadModel"),
        (conditional, "ForConditionalGeneration", ""),
        (images, "ForImageClassification", ""),
        (audio, "ForCTC", ""),
    )
    for number, (configurations, suffix, other) in enumerate(kinds):
        for name, values in configurations.items():
            if not values:
                continue
            config_class = getattr(t, name + "Config", None)
            model_class = getattr(t, name + suffix, None)
            if model_class is None and other:
                model_class = getattr(t, name + other, None)
            if config_class is not None and model_class is not None:
                found.append((name, number, config_class, model_class, values))
    return found


_TRANSFORMERS = []


class _LossOf(nn.Module):
    """Gives the loss that a model of Hugging Face's computes itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **batch):
        return self.inner(**batch).loss


def hugging_face(rng):
    if not _TRANSFORMERS:
        _TRANSFORMERS.extend(_transformers_models())
    name, kind, config_class, model_class, values = rng.choice(_TRANSFORMERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_class(**values)
        config.use_cache = rng.random() < 0.5
        if rng.random() < 0.3:
            config._attn_implementation = "eager"
        model = model_class(config)
    model.train()
    count, length = rng.choice([1, 2, 5]), rng.choice([16, 32, 64])
    if kind in (0, 1):
        words = torch.randint(3, 300, (count, length))
        batch = {"input_ids": words, "labels": words}
        if rng.random() < 0.4:
            mask = torch.ones_like(words)
            mask[0, length // 2 :] = 0
            batch["attention_mask"] = mask
    elif kind == 2:
        words = torch.randint(3, 300, (count, length))
        batch = {"input_ids": words, "labels": words[:, : length // 2].contiguous()}
    elif kind == 3:
        size = getattr(config, "image_size", None) or 32
        batch = {
            "pixel_values": torch.randn(count + 1, 3, size, size),
            "labels": torch.zeros(count + 1, dtype=torch.long),
        }
    else:
        batch = {
            "input_values": torch.randn(count, 400 + 20 * length),
            "labels": torch.randint(1, 30, (count, 4)),
        }
    return Trained(
        f"{name} {count} x {length}, {config._attn_implementation}",
        _LossOf(model),
        batch,
    ), {"autocast": torch.bfloat16} if rng.random() < 0.2 else {}


# PyG.


def _zoo_graph(rng):
    nodes = max(6, int(rng.lognormvariate(2.7, 0.7)))
    edges = rng.randint(nodes, 4 * nodes)
    index = torch.randint(nodes, (2, edges))
    index = coalesce(index[:, index[0] != index[1]], num_nodes=nodes)
    edges = index.size(1)
    return Data(
        x=torch.randn(nodes, 16),
        edge_index=index,
        edge_attr=torch.randn(edges, 4),
        weight=torch.rand(edges),
        edge_type=torch.randint(3, (edges,)),
        pos=torch.randn(nodes, 3),
        normal=F.normalize(torch.randn(nodes, 3)),
        y=torch.randn(1, 1),
        xs=torch.randn(nodes, 2, 16),
    )


def _mlp(*widths):
    layers = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


_E = "edge_index"
CONVS = {
    "APPNP": (lambda w: g.APPNP(3, 0.1, 0.2), _E),
    "AGNN": (lambda w: g.AGNNConv(), _E),
    "AntiSymmetric": (lambda w: g.AntiSymmetricConv(w, num_iters=2), _E),
    "Cheb": (lambda w: g.ChebConv(w, w, 3), _E),
    "ClusterGCN": (lambda w: g.ClusterGCNConv(w, w), _E),
    "EG": (lambda w: g.EGConv(w, w, ["sum", "mean", "max", "std"], 4, 3), _E),
    "Edge": (lambda w: g.EdgeConv(_mlp(2 * w, w)), _E),
    "FA": (lambda w: g.FAConv(w), "x0"),
    "Feast": (lambda w: g.FeaStConv(w, w, 3), _E),
    "GCN2": (lambda w: g.GCN2Conv(w, 0.1, 0.5, 2), "x0"),
    "Gated": (lambda w: g.GatedGraphConv(w, 3), _E),
    "GraphConv": (lambda w: g.GraphConv(w, w, "max"), "weight"),
    "GIN": (lambda w: g.GINConv(_mlp(w, w, w), train_eps=True), _E),
    "GAT res": (
        lambda w: g.GATConv(w, w, 2, concat=False, dropout=0.3, residual=True),
        _E,
    ),
    "GATv2": (
        lambda w: g.GATv2Conv(w, w // 4, 4, share_weights=True, edge_dim=4),
        "edge_attr",
    ),
    "General": (lambda w: g.GeneralConv(w, w, 4, attention=True, heads=2), "edge_attr"),
    "LE": (lambda w: g.LEConv(w, w), _E),
    "LG": (lambda w: g.LGConv(), _E),
    "MF": (lambda w: g.MFConv(w, w, max_degree=5), _E),
    "MixHop": (lambda w: g.MixHopConv(w, w, [0, 1, 2]), "wide"),
    "PNA": (
        lambda w: g.PNAConv(
            w,
            w,
            ["mean", "max", "std", "var"],
            ["identity", "attenuation", "linear"],
            torch.ones(20, dtype=torch.long),
            edge_dim=4,
            towers=2,
            divide_input=False,
        ),
        "edge_attr",
    ),
    "RGAT": (lambda w: g.RGATConv(w, w, 3, heads=2, concat=False, edge_dim=4), "rgat"),
    "RGAT blocks": (
        lambda w: g.RGATConv(w, w, 3, num_blocks=2, mod="f-scaled", dim=1),
        "edge_type",
    ),
    "RGCN blocks": (
        lambda w: g.RGCNConv(w, w, 3, num_blocks=4, aggr="sum"),
        "edge_type",
    ),
    "ResGated": (lambda w: g.ResGatedGraphConv(w, w, edge_dim=4), "edge_attr"),
    "SG": (lambda w: g.SGConv(w, w, 3), _E),
    "SSG": (lambda w: g.SSGConv(w, w, 0.1, 3), _E),
    "SAGE lstm": (lambda w: g.SAGEConv(w, w, aggr="lstm"), "sorted"),
    "SAGE project": (
        lambda w: g.SAGEConv(
            w, w, aggr=["mean", "softmax"], normalize=True, project=True
        ),
        _E,
    ),
    "Simple": (lambda w: g.SimpleConv("mean", "self_loop"), _E),
    "Spline-like": (lambda w: g.DirGNNConv(g.GCNConv(w, w), 0.3), _E),
    "SuperGAT": (lambda w: g.SuperGATConv(w, w // 4, 4, attention_type="SD"), _E),
    "TAG": (lambda w: g.TAGConv(w, w, 3), "weight"),
    "WL": (lambda w: g.WLConvContinuous(), "weight"),
    "PointNet": (lambda w: g.PointNetConv(_mlp(w + 3, w), _mlp(w, w)), "points"),
    "PointTransformer": (lambda w: g.PointTransformerConv(w, w), "points"),
    "PPF": (lambda w: g.PPFConv(_mlp(w + 4, w)), "ppf"),
    "PointGNN": (
        lambda w: g.PointGNNConv(_mlp(w, 3), _mlp(w + 3, w), _mlp(w, w)),
        "points",
    ),
    "CG": (lambda w: g.CGConv(w, 4, batch_norm=True), "edge_attr"),
    "Hypergraph": (lambda w: g.HypergraphConv(w, w, use_attention=False), _E),
    "Hypergraph attention": (
        lambda w: g.HypergraphConv(w, w, use_attention=True, heads=2, concat=False),
        "hyper",
    ),
    "HEAT": (lambda w: g.HEATConv(w, w, 2, 3, 8, 4, 8, heads=2, concat=False), "heat"),
    "Signed": (lambda w: g.SignedConv(w, w // 2, True), "signed"),
    "GPS": (lambda w: g.GPSConv(w, g.GINConv(_mlp(w, w)), heads=2, dropout=0.2), "gps"),
    "Mesh-like GMM": (
        lambda w: g.GMMConv(w, w, 4, 3, separate_gaussians=True),
        "edge_attr",
    ),
    "ECC": (lambda w: g.NNConv(w, w, _mlp(4, 8, w * w), aggr="mean"), "edge_attr"),
    "GEN": (
        lambda w: g.GENConv(
            w, w, "powermean", learn_p=True, msg_norm=True, learn_msg_scale=True
        ),
        _E,
    ),
    "GEN softmax": (
        lambda w: g.GENConv(w, w, "softmax", learn_t=True, t=0.5, edge_dim=4),
        "edge_attr",
    ),
    "ARMA": (lambda w: g.ARMAConv(w, w, 3, 2, shared_weights=True, dropout=0.2), _E),
    "PAN": (lambda w: g.PANConv(w, w, 2), "pan"),
    "KAN-like FiLM": (lambda w: g.FiLMConv(w, w, 3), "edge_type"),
    "MeanSubtraction": (lambda w: g.MeanSubtractionNorm(), "norm"),
    "Poly": (
        lambda w: g.PolyConv(w, w) if hasattr(g, "PolyConv") else g.SGConv(w, w),
        _E,
    ),
    "Transformer": (
        lambda w: g.TransformerConv(w, w, 2, concat=False, dropout=0.2),
        _E,
    ),
}


def _convolve_rows(kind, layer, x, x0, data):
    edge_index, pos = data.edge_index, data.pos
    if kind == "x0":
        return layer(x, x0, edge_index)
    if kind == "weight":
        return layer(x, edge_index, data.weight)
    if kind == "edge_attr":
        return layer(x, edge_index, data.edge_attr)
    if kind == "edge_type":
        return layer(x, edge_index, data.edge_type)
    if kind == "rgat":
        return layer(x, edge_index, data.edge_type, data.edge_attr)
    if kind == "sorted":
        return layer(x, sort_edge_index(edge_index, sort_by_row=False))
    if kind == "wide":
        return layer(x, edge_index)[:, : x.size(1)]
    if kind == "points":
        return layer(x, pos, edge_index)
    if kind == "ppf":
        return layer(x, pos, data.normal, edge_index)
    if kind == "hyper":
        return layer(x, edge_index, hyperedge_attr=x)
    if kind == "heat":
        node_type = data.batch % 2
        return layer(x, edge_index, node_type, data.edge_type, data.edge_attr)
    if kind == "signed":
        return layer(x, edge_index, edge_index.flip(0))
    if kind == "gps":
        return layer(x, edge_index, data.batch)
    if kind == "pan":
        return layer(x, edge_index)[0]
    if kind == "norm":
        return layer(x, data.batch)
    return layer(x, edge_index)


AGGREGATIONS = {
    "mean": lambda w: g.MeanAggregation(),
    "mul": lambda w: g.MulAggregation(),
    "std": lambda w: g.StdAggregation(),
    "var": lambda w: g.VarAggregation(),
    "softmax": lambda w: g.SoftmaxAggregation(1.0, learn=True, channels=w),
    "powermean": lambda w: g.PowerMeanAggregation(1.0, learn=True),
    "median": lambda w: g.MedianAggregation(),
    "quantile": lambda w: g.QuantileAggregation([0.2, 0.7]),
    "lstm": lambda w: g.LSTMAggregation(w, w),
    "gru": lambda w: g.GRUAggregation(w, w),
    "set2set": lambda w: g.Set2Set(w, 2),
    "sort": lambda w: g.SortAggregation(5),
    "equilibrium": lambda w: g.EquilibriumAggregation(w, 8, [16], 2),
    "mlp": lambda w: g.MLPAggregation(w, w, 200, hidden_channels=16, num_layers=2),
    "deep sets": lambda w: g.DeepSetsAggregation(_mlp(w, w), _mlp(w, w)),
    "set transformer": lambda w: g.SetTransformerAggregation(w, 2, 1, 1, 2),
    "gmt": lambda w: g.GraphMultisetTransformer(w, 4, 1, 2),
    "attentional": lambda w: g.AttentionalAggregation(_mlp(w, 1), _mlp(w, w)),
    "degree": lambda w: g.DegreeScalerAggregation(
        ["mean", "max"], ["identity", "linear"], torch.ones(100, dtype=torch.long)
    ),
    "patch": lambda w: g.aggr.PatchTransformerAggregation(w, w, 4, 8, 1, 2),
    "variance preserving": lambda w: g.aggr.VariancePreservingAggregation(),
    "multi attention": lambda w: g.MultiAggregation(
        ["mean", "max", "std"],
        mode="attn",
        mode_kwargs={"in_channels": w, "out_channels": w, "num_heads": 2},
    ),
    "multi projected": lambda w: g.MultiAggregation(
        ["sum", "median"],
        mode="proj",
        mode_kwargs={"in_channels": w, "out_channels": w},
    ),
}
NORMS = {
    "batch": lambda w: g.BatchNorm(w),
    "instance": lambda w: g.InstanceNorm(w, affine=True),
    "layer": lambda w: g.LayerNorm(w),
    "layer of nodes": lambda w: g.LayerNorm(w, mode="node"),
    "graph": lambda w: g.GraphNorm(w),
    "graph size": lambda w: g.GraphSizeNorm(),
    "pair": lambda w: g.PairNorm(),
    "mean subtraction": lambda w: g.MeanSubtractionNorm(),
    "diff group": lambda w: g.DiffGroupNorm(w, 3),
    "none": lambda w: None,
}
_WITHOUT_BATCH = {"batch", "layer of nodes", "diff group"}
POOLS = {
    "topk": lambda w: g.TopKPooling(w, 0.6),
    "topk score": lambda w: g.TopKPooling(w, min_score=0.3),
    "sag": lambda w: g.SAGPooling(w, 0.5, GNN=g.GraphConv),
    "asap": lambda w: g.ASAPooling(w, 0.5, dropout=0.1, add_self_loops=True),
    "pan": lambda w: g.PANPooling(w, 0.5),
    "edge": lambda w: g.EdgePooling(w),
    "mem": lambda w: g.MemPooling(w, w, 2, 4),
    "none": lambda w: None,
}


class GraphZoo(nn.Module):
    def __init__(self, convs, norms, aggr, pool, width):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.kinds = [CONVS[name][1] for name in convs]
        self.convs = nn.ModuleList(CONVS[name][0](width) for name in convs)
        self.norm_names = norms
        self.norms = nn.ModuleList(NORMS[n](width) or nn.Identity() for n in norms)
        self.aggr = AGGREGATIONS[aggr](width)
        self.pool_name, self.pool = pool, POOLS[pool](width)
        self.pan = g.PANConv(width, width, 2) if pool == "pan" else None
        self.last = nn.LazyLinear(1)

    def forward(self, data):
        x = x0 = self.first(data.x)
        for kind, layer, norm, name in zip(
            self.kinds, self.convs, self.norms, self.norm_names, strict=True
        ):
            x = _convolve_rows(kind, layer, x, x0, data)
            if name in _WITHOUT_BATCH:
                x = norm(x)
            elif name != "none":
                x = norm(x, data.batch)
            x = x.relu() + x0
        batch = data.batch
        if self.pool_name == "mem":
            out, loss = self.pool(x, batch)
            return self.last(out.mean(1)).mean() + g.MemPooling.kl_loss(loss)
        if self.pool_name == "pan":
            weights = self.pan(x, data.edge_index)[1]
            out = self.pool(x, weights, batch)
            x, batch = out[0], out[3]
        elif self.pool_name == "edge":
            out = self.pool(x, data.edge_index, batch)
            x, batch = out[0], out[2]
        elif self.pool_name == "asap" or self.pool_name != "none":
            out = self.pool(x, data.edge_index, batch=batch)
            x, batch = out[0], out[3]
        out = self.aggr(x, batch, dim_size=len(data.y))
        return F.mse_loss(self.last(out.flatten(1)), data.y)


def graph_zoo(rng):
    convs = rng.choices(list(CONVS), k=rng.randint(1, 3))
    norms = [rng.choice(list(NORMS)) for _ in convs]
    aggr = rng.choice(list(AGGREGATIONS))
    pool = rng.choice(list(POOLS) + ["none"] * 5)
    model = GraphZoo(convs, norms, aggr, pool, rng.choice([16, 32]))
    batch = Batch.from_data_list(
        [_zoo_graph(rng) for _ in range(rng.choice([2, 8, 32]))]
    )
    with torch.no_grad():
        model(batch)
    options = {"autocast": torch.bfloat16} if rng.random() < 0.1 else {}
    return Trained(f"{convs} {norms} {aggr}, pool {pool}", model, batch), options


# Ways to train.


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x.abs() < 1, scale)
        return x.sign() * scale

    @staticmethod
    def backward(ctx, grad):
        mask, scale = ctx.saved_tensors
        return grad * mask, (grad * scale).sum().view(1)


class _Halved(nn.Module):
    def forward(self, weight):
        return (weight + weight.t()) / 2


class Ways(nn.Module):
    def __init__(self, way, width):
        super().__init__()
        self.way = way
        self.net = nn.Sequential(
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.Dropout(0.1),
            nn.Linear(width, width),
        )
        if way == "symmetric":
            parametrize.register_parametrization(self.net[0], "weight", _Halved())
        if way in {"two nets", "gan"}:
            self.critic = nn.Sequential(
                nn.Linear(width, width), nn.SELU(), nn.Linear(width, 1)
            )
        if way == "average":
            self.slow = copy.deepcopy(self.net).requires_grad_(False)
        if way == "shared":
            self.net[3] = self.net[0]
        self.scale = nn.Parameter(torch.ones(1))
        if way == "hooks":
            self.net[0].register_full_backward_hook(
                lambda m, i, o: (i[0] * 0.5,) if i[0] is not None else None
            )
            self.net[3].register_forward_hook(lambda m, i, o: o * 2)
            self.net[5].register_forward_pre_hook(lambda m, i: (i[0].clone(),))
            for parameter in self.net.parameters():
                parameter.register_hook(lambda grad: grad.clamp(-1, 1))
        if way == "post accumulate":
            for parameter in self.net.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
        self.keep = []

    def forward(self, x):
        way = self.way
        if way == "meta":
            weights = dict(self.net.named_parameters())
            loss = functional_call(self.net, weights, (x,)).square().mean()
            grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            fast = {
                n: w - 0.1 * d for (n, w), d in zip(weights.items(), grads, strict=True)
            }
            return functional_call(self.net, fast, (x,)).square().mean()
        if way == "average":
            with torch.no_grad():
                for a, b in zip(
                    self.slow.parameters(), self.net.parameters(), strict=True
                ):
                    a.mul_(0.99).add_(b, alpha=0.01)
                target = self.slow(x)
            return F.mse_loss(self.net(x + 0.1 * torch.randn_like(x)), target)
        if way == "gan":
            fake = self.net(x)
            real_score, fake_score = self.critic(x), self.critic(fake.detach())
            critic = F.relu(1 - real_score).mean() + F.relu(1 + fake_score).mean()
            return critic - self.critic(fake).mean()
        if way == "two nets":
            return self.critic(self.net(x)).mean() + self.net(x.flip(0)).square().mean()
        if way == "r1":
            x = x.detach().requires_grad_()
            out = self.net(x)
            [grad] = torch.autograd.grad(out.sum(), x, create_graph=True)
            return out.mean() + 5 * grad.square().sum(1).mean()
        if way == "sign":
            return _Sign.apply(self.net(x), self.scale).square().mean()
        if way == "saved on":
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: t.clone(), lambda t: t
            ):
                return self.net(x).square().mean()
        if way == "saved half":
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: t.bfloat16() if t.is_floating_point() else t,
                lambda t: t.float() if t.dtype == torch.bfloat16 else t,
            ):
                return self.net(x).square().mean()
        if way == "save on cpu":
            with torch.autograd.graph.save_on_cpu():
                return self.net(x).square().mean()
        if way == "checkpoint parts":
            return (
                torch.utils.checkpoint.checkpoint_sequential(
                    self.net, 3, x, use_reentrant=False
                )
                .square()
                .mean()
            )
        if way == "checkpoint nested":

            def inner(h):
                return torch.utils.checkpoint.checkpoint(
                    self.net, h, use_reentrant=False
                )

            return (
                torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)
                .square()
                .mean()
            )
        if way == "many losses":
            h = self.net(x)
            return sum((h * k).sin().mean() for k in range(1, 6))
        if way == "deep equilibrium":
            z = torch.zeros_like(x)
            with torch.no_grad():
                for _ in range(8):
                    z = torch.tanh(self.net(z) + x)
            return torch.tanh(self.net(z) + x).square().mean()
        if way == "unrolled":
            z = x
            for _ in range(4):
                z = z + 0.1 * self.net(z)
            return z.square().mean()
        if way == "kept outputs":
            h = self.net(x)
            self.keep = [*self.keep[-1:], h.detach()]
            return (h - self.keep[0]).square().mean() + h.mean()
        if way == "grad of parts":
            h = self.net[0](x)
            h.retain_grad()
            return self.net[1:](h).square().mean()
        if way == "in place chain":
            h = self.net[0](x)
            h = F.relu_(h)
            h = h.mul(2).add_(1)
            return self.net[3](h).square_().mean()
        if way == "complex":
            return torch.fft.fft(self.net(x).to(torch.complex64)).abs().square().mean()
        if way == "no grad half":
            with torch.no_grad():
                weight = self.net(x).softmax(-1)
            return (self.net(x).log_softmax(-1) * weight).sum(-1).neg().mean()
        if way == "rows by rows":
            return torch.stack([self.net(row) for row in x[:12]]).square().mean()
        if way == "ensemble":
            stacked = {
                n: torch.stack([p, p * 1.1, p * 0.9])
                for n, p in self.net.named_parameters()
            }
            out = vmap(
                lambda w: functional_call(self.net, w, (x,)), randomness="different"
            )(stacked)
            return out.square().mean()
        return self.net(x).square().mean()


WAYS = [
    "plain",
    "symmetric",
    "two nets",
    "gan",
    "average",
    "shared",
    "hooks",
    "post accumulate",
    "meta",
    "r1",
    "sign",
    "saved on",
    "saved half",
    "save on cpu",
    "checkpoint parts",
    "checkpoint nested",
    "many losses",
    "deep equilibrium",
    "unrolled",
    "kept outputs",
    "grad of parts",
    "in place chain",
    "complex",
    "no grad half",
    "rows by rows",
    "ensemble",
]


def ways(rng):
    way, width = rng.choice(WAYS), rng.choice([32, 160, 400])
    rows = rng.choice([16, 200, 1500])
    model = Ways(way, width)
    options = {"autocast": torch.bfloat16} if rng.random() < 0.2 else {}
    return Trained(f"{way}, {rows} x {width}", model, torch.randn(rows, width)), options


KINDS = {
    "functions": functions,
    "losses": losses,
    "hugging face": hugging_face,
    "graph zoo": graph_zoo,
    "ways": ways,
}


def draw_zoo_step(seed, kind):
    """Draw a step of a kind; a seed always gives the same."""
    rng = random.Random(f"zoo {kind} {seed}")
    torch.manual_seed(seed)
    trained, options = KINDS[kind](rng)
    name = rng.choice(list(OPTIMIZERS))
    options = {**options, "optimizer": OPTIMIZERS[name]}
    description = f"{seed}: {trained.description}; {name}; {options.get('autocast')}"
    step = Step(trained.loss, **options)
    return DrawnStep(
        description, trained.model, trained.batch, step, rng.choice([1, 2])
    )
