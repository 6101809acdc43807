"""The types of CUDA's autocast, held against those that torch gives fakes on CUDA.

torch has the lists of every kind of device in every build, and a fake tensor can lie on
a device that is not here.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it

from loaderkit.budget.step.allocation_log import Log
from loaderkit.budget.step.cuda_functions import CudaFunctions

NARROW = torch.bfloat16
ELEMENT_BY_ELEMENT = """
abs acos arccos arcsin asin atan cos cosh erf erfinv exp exp2 expm1 log log10 log1p log2
neg reciprocal relu rsqrt sigmoid sin sinh sqrt square tan tanh
"""
TOTALS = "sum mean prod std var norm amax median"
ALONG_AN_AXIS = "softmax log_softmax cumsum cumprod logsumexp logcumsumexp"
SPECIAL = "erfinv expm1 log1p"
SPECIAL_ALONG_AN_AXIS = "log_softmax logsumexp softmax"
PAIRS = """
mse_loss l1_loss smooth_l1_loss huber_loss poisson_nll_loss hinge_embedding_loss
soft_margin_loss cosine_similarity pairwise_distance binary_cross_entropy_with_logits
multilabel_soft_margin_loss
"""
ACTIVATIONS = "gelu silu elu softplus mish logsigmoid hardswish normalize"


def of_x(function, *more):
    return lambda x, _y, _wide: function(x, *more)


def of_both(function):
    return lambda x, y, _wide: function(x, y)


def calls():
    """Give by its name each call: of ``x`` and ``y``, [4, 8], and ``wide``, float32."""
    found = {}
    for name in [*ELEMENT_BY_ELEMENT.split(), *TOTALS.split()]:
        found[f"torch.{name}"] = of_x(getattr(torch, name))
        found[f"Tensor.{name}"] = of_x(getattr(torch.Tensor, name))
    for name in ALONG_AN_AXIS.split():
        found[f"torch.{name}"] = of_x(getattr(torch, name), -1)
        found[f"Tensor.{name}"] = of_x(getattr(torch.Tensor, name), -1)
    for name in SPECIAL.split():
        found[f"special.{name}"] = of_x(getattr(torch.special, name))
    for name in SPECIAL_ALONG_AN_AXIS.split():
        found[f"special.{name}"] = of_x(getattr(torch.special, name), -1)
    for name in PAIRS.split():
        found[f"F.{name}"] = of_both(getattr(F, name))
    for name in ACTIVATIONS.split():
        found[f"F.{name}"] = of_x(getattr(F, name))
    return found | OTHERS


def image(x):
    return x.view(1, 2, 4, 4)


def labels(x):
    return torch.zeros(len(x), dtype=torch.int64, device=x.device)


OTHERS = {
    "addcdiv": lambda x, y, wide: torch.addcdiv(wide, x, x),
    "addmv": lambda x, y, wide: torch.addmv(wide[:, 0], x, y[0]),
    "addr": lambda x, y, wide: torch.addr(wide, x[:, 0], y[0]),
    "atan2": lambda x, y, wide: torch.atan2(x, wide),
    "average pool of volumes": lambda x, y, wide: F.avg_pool3d(
        x.view(1, 2, 2, 2, 4), 2
    ),
    "bilinear form": lambda x, y, wide: F.bilinear(x[:, :4], y, wide[None]),
    "cosine loss": lambda x, y, wide: F.cosine_embedding_loss(x, y, wide[:, 0]),
    "cross": lambda x, y, wide: torch.cross(x[:, :3], wide[:, :3], dim=-1),
    # Of two types it is refused on a GPU (H200, torch 2.11).
    "linalg cross": lambda x, y, wide: torch.linalg.cross(x[:, :3], y[:, :3]),
    "distance": lambda x, y, wide: torch.dist(x, y),
    "dot": lambda x, y, wide: torch.dot(x[0], wide[0]),
    "vdot": lambda x, y, wide: torch.vdot(x[0], wide[0]),
    "grid": lambda x, y, wide: F.grid_sample(
        image(x), wide.view(1, 4, 4, 2), align_corners=False
    ),
    "put": lambda x, y, wide: wide.index_put((labels(x),), x),
    "power pool of rows": lambda x, y, wide: F.lp_pool1d(x, 2, 2),
    "power pool of volumes": lambda x, y, wide: F.lp_pool3d(
        x.view(1, 2, 2, 2, 4), 2, 2
    ),
    "ranking": lambda x, y, wide: F.margin_ranking_loss(x[:, 0], y[:, 0], wide[:, 0]),
    "margin": lambda x, y, wide: F.multi_margin_loss(x, labels(x)),
    "margins": lambda x, y, wide: F.multilabel_margin_loss(
        x, labels(x)[:, None].expand(4, 8)
    ),
    "matrix times vector": lambda x, y, wide: torch.mv(x, wide[0]),
    "several products": lambda x, y, wide: torch.linalg.multi_dot([x, wide.T, x]),
    "negative likelihood": lambda x, y, wide: F.nll_loss(x, labels(x)),
    "prelu": lambda x, y, wide: F.prelu(x, wide[0]),
    "renorm": lambda x, y, wide: torch.renorm(x, 2, 0, 1.0),
    "trace": lambda x, y, wide: torch.trace(x),
    "triplet": lambda x, y, wide: F.triplet_margin_loss(x, y, wide),
    "x ** 2": lambda x, y, wide: x**2,
    "2 ** x": lambda x, y, wide: 2**x,
    "1 / x": lambda x, y, wide: 1 / x,
    "x / y": lambda x, y, wide: x / y,
    "x * wide": lambda x, y, wide: x * wide,
    "pow": lambda x, y, wide: torch.pow(x, y),
    "sum by keyword": lambda x, y, wide: torch.sum(input=x),
    "softmax by keyword": lambda x, y, wide: F.softmax(input=x, dim=-1),
    "sum with a type": lambda x, y, wide: x.sum(dtype=NARROW),
    "softmax with a type": lambda x, y, wide: F.softmax(x, -1, dtype=torch.float64),
    "softmin": lambda x, y, wide: F.softmin(x, -1),
    "gumbel": lambda x, y, wide: F.gumbel_softmax(x),
    "linear": lambda x, y, wide: F.linear(x, wide),
    "matmul": lambda x, y, wide: x @ wide.T,
    "layer norm": lambda x, y, wide: F.layer_norm(x, (8,)),
    "group norm": lambda x, y, wide: F.group_norm(x, 2),
    "batch norm": lambda x, y, wide: F.batch_norm(x, None, None, training=True),
    "cdist": lambda x, y, wide: torch.cdist(x, y),
    "pdist": lambda x, y, wide: F.pdist(x),
    "cross entropy": lambda x, y, wide: F.cross_entropy(x, y),
    "vector norm": lambda x, y, wide: torch.linalg.vector_norm(x),
    "matrix norm": lambda x, y, wide: torch.linalg.matrix_norm(x),
    "linalg norm": lambda x, y, wide: torch.linalg.norm(x),
    "divergence": lambda x, y, wide: F.kl_div(x, y, reduction="batchmean"),
    "inner": lambda x, y, wide: torch.inner(x, wide),
    "tensordot": lambda x, y, wide: torch.tensordot(x, wide.T, 1),
    "addcmul": lambda x, y, wide: torch.addcmul(wide, x, x),
    "scatter add": lambda x, y, wide: wide.scatter_add(
        0, torch.zeros(4, 8, dtype=torch.int64, device=x.device), x
    ),
    "convolution": lambda x, y, wide: F.conv2d(image(x), wide.view(2, 2, 2, 4)),
    "average pool": lambda x, y, wide: F.avg_pool2d(image(x), 2),
    "power pool": lambda x, y, wide: F.lp_pool2d(image(x), 2, 2),
    "nearest": lambda x, y, wide: F.interpolate(image(x), scale_factor=2),
    "bilinear": lambda x, y, wide: F.interpolate(
        image(x), scale_factor=2, mode="bilinear"
    ),
    "reflected": lambda x, y, wide: F.pad(image(x), (1, 1, 1, 1), "reflect"),
    "attention": lambda x, y, wide: F.scaled_dot_product_attention(
        x[None, None], wide[None, None], x[None, None]
    ),
}


class NoTracker:
    """What these functions make is not logged here."""

    log = Log()


def dtype_on(device, call, dtype):
    """Call with fakes on a device, under its autocast; give the type of the output."""
    with FakeTensorMode():
        x = torch.empty(4, 8, device=device, dtype=dtype)
        y = torch.empty(4, 8, device=device, dtype=dtype)
        wide = torch.empty(4, 8, device=device)
        output = call(x, y, wide)
    return output.dtype


def dtype_of_torch(call, dtype):
    """Give None where this build asks CUDA itself, which a few operators do."""
    # torch.autocast asks for a GPU before it switches this on.
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", NARROW)
    try:
        return dtype_on("cuda", call, dtype)
    except RuntimeError as error:
        if "not linked with support for cuda" not in str(error):
            raise
        return None
    finally:
        torch.set_autocast_enabled("cuda", False)


def dtype_of_ours(call, dtype):
    with torch.autocast("cpu", NARROW), CudaFunctions(NoTracker()):
        return dtype_on("cpu", call, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [NARROW, torch.float32])
def test_functions_return_the_types_that_cudas_autocast_gives(dtype):
    differing, unanswered = {}, []
    for name, call in calls().items():
        expected = dtype_of_torch(call, dtype)
        if expected is None:
            unanswered.append(name)
            continue
        ours = dtype_of_ours(call, dtype)
        if ours is not expected:
            differing[name] = ours, expected
    assert not differing
    # Without CUDA products of vectors and losses of targets are not answered.
    assert len(unanswered) < 0.15 * len(calls()), unanswered


@pytest.mark.slow
def test_the_cpus_autocast_has_other_types():
    """The twin: without our lists many differ."""
    differing = 0
    for call in calls().values():
        try:
            with torch.autocast("cpu", NARROW):
                of_cpu = dtype_on("cpu", call, NARROW)
        except RuntimeError:  # it does not mix types
            of_cpu = None
        differing += of_cpu is not dtype_of_torch(call, NARROW)
    assert differing > 40
