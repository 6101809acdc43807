"""Steps whose memory follows from how CUDA attends, and from autocast's types there."""

import functools

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it

from loaderkit.budget.step.train_step import Step

BFLOAT16 = torch.bfloat16


class Attending(nn.Module):
    """Attends in layers, as language models do."""

    def __init__(self, heads, key_heads, width, mask=None):
        super().__init__()
        self.heads, self.key_heads, self.width, self.mask = (
            heads,
            key_heads,
            width,
            mask,
        )
        size = heads * width
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [nn.Linear(size, size)]
                + [nn.Linear(size, key_heads * width) for _ in range(2)]
            )
            for _ in range(2)
        )

    def forward(self, x):
        mask = self.mask
        if mask is not None:
            mask = mask.to(x.device)
            if torch.is_autocast_enabled(x.device.type):
                mask = mask.to(torch.get_autocast_dtype(x.device.type))
        for layer in self.layers:
            query, key, value = (
                linear(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
                for linear in layer
            )
            attended = F.scaled_dot_product_attention(
                query,
                key,
                value,
                mask,
                is_causal=mask is None,
                enable_gqa=self.heads != self.key_heads,
            )
            x = x + attended.transpose(1, 2).flatten(2)
        return x


def attending(autocast, *, heads=4, key_heads=4, width=32, masked=False):
    mask = torch.zeros(1, 1, 128, 128) if masked else None
    model = Attending(heads, key_heads, width, mask)
    return model, torch.randn(16, 128, heads * width), Step(autocast=autocast)


class Cells(nn.Module):
    """Passes a state through cells."""

    def __init__(self, kind):
        super().__init__()
        self.cells = nn.ModuleList(kind(64, 64) for _ in range(3))

    def forward(self, x):
        state = None
        for cell in self.cells:
            state = cell(x, state)
        return state[0] if isinstance(state, tuple) else state


def cells(kind):
    return Cells(kind), torch.randn(30_000, 64), Step()


class Between(nn.Module):
    """Two linear layers, and something between them."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)
        self.norm = nn.LayerNorm(256)
        self.function = function

    def forward(self, x):
        return self.second(self.function(self, self.first(x)))


BETWEEN = {
    "layer norm": lambda model, x: model.norm(x),
    "softmax": lambda model, x: x.softmax(-1),
    "power": lambda model, x: x**2,
    "exponential": lambda model, x: x.exp(),
    "root mean square": lambda model, x: x * torch.rsqrt(x.pow(2).mean(-1, True) + 1),
    "sum": lambda model, x: x / x.sum(-1, keepdim=True),
    "softplus": lambda model, x: F.softplus(x),
    "normalize": lambda model, x: F.normalize(x),
    "of the transposed": lambda model, x: (
        model.second(x.view(16, 256, 256).transpose(1, 2)).transpose(1, 2).flatten(0, 1)
    ),
    "scatter": lambda model, x: x.new_zeros(x.shape, dtype=torch.float32).scatter_add(
        0, torch.zeros_like(x, dtype=torch.int64), x
    ),
    "larger": lambda model, x: F.interpolate(x[None], scale_factor=2)[0, :, ::2],
}


def between(name, autocast):
    model = Between(BETWEEN[name])
    return model, torch.randn(4096, 256), Step(F.mse_loss, autocast=autocast)


def _with_target(make):
    model, batch, step = make()
    return model, (batch, torch.randn(batch.shape)), step


def named():
    """Give by its name what makes each step."""
    steps = {}
    for types in (None, BFLOAT16):
        where = "bfloat16" if types else "float32"
        for name, options in {
            "heads of their own": {},
            "heads that share keys": {"key_heads": 2},
            "with a mask": {"masked": True},
            "heads that share keys, with a mask": {"key_heads": 1, "masked": True},
            "odd width": {"width": 30},
            "odd width, with a mask": {"width": 30, "masked": True},
            "odder width": {"width": 31},
        }.items():
            make = functools.partial(attending, types, **options)
            steps[f"attention, {where}: {name}"] = make
        for name in BETWEEN:
            make = functools.partial(between, name, types)
            steps[f"between, {where}: {name}"] = functools.partial(_with_target, make)
    steps["cells: gru"] = functools.partial(cells, nn.GRUCell)
    steps["cells: lstm"] = functools.partial(cells, nn.LSTMCell)
    return steps
