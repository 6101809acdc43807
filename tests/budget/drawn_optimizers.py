"""Updates drawn by a seed: torch's optimizers and their options, kinds of parameters.

Parameters take nearly all of these steps: few large ones and many small ones, of any
type, some of them one and the same, some frozen, some with sparse gradients.
"""

import inspect
import random

import torch
from drawn import DrawnStep
from torch import nn

from loaderkit.budget.step.train_step import Step

CLASSES = {
    name: value
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value)
    and issubclass(value, torch.optim.Optimizer)
    # LBFGS runs the model several times a step.
    and name not in {"Optimizer", "LBFGS"}
}
OPTIONS = {
    "maximize": True,
    "weight_decay": 0.1,
    "decoupled_weight_decay": True,
    "amsgrad": True,
    "centered": True,
    "momentum": 0.9,
    "dampening": 0.1,
    "lr_decay": 0.01,
}
TYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.complex64)


class Parameters(nn.Module):
    """Parameters alone, and a table whose gradient is sparse."""

    def __init__(self, large, small, table=None):
        super().__init__()
        self.large, self.small = nn.ParameterList(large), nn.ParameterList(small)
        self.table = table

    def forward(self, words):
        losses = [_mean_of_squares(weight) for weight in (*self.large, *self.small)]
        if self.table is not None:
            losses.append(self.table(words).mean())
        return sum(losses)


def _mean_of_squares(weight):
    real = torch.view_as_real(weight) if weight.is_complex() else weight
    return real.square().mean().float()


def draw_options(rng, optimizer_class):
    """Draw some of the options that a class has."""
    names = inspect.signature(optimizer_class).parameters
    options = {
        name: value
        for name, value in OPTIONS.items()
        if name in names and rng.random() < 0.4
    }
    if "momentum" in options and "nesterov" in names and rng.random() < 0.4:
        options["nesterov"] = True
        options.pop("dampening", None)
    way = rng.choice(["", "loop", "foreach", "fused"])
    if way in {"loop", "foreach"} and "foreach" in names:
        options["foreach"] = way == "foreach"
    elif way == "fused" and "fused" in names:
        options["fused"] = True
        if rng.random() < 0.3:
            options["lr"] = torch.tensor(1e-3)
    return options


def draw_update(seed, optimizer_name=None):
    """Draw a step of an optimizer; a seed always gives the same.

    Torch refuses some: not all optimizers take complex numbers or sparse gradients.
    """
    rng = random.Random(f"optimizers {seed}")
    torch.manual_seed(seed)
    name = optimizer_name or rng.choice(sorted(CLASSES))
    optimizer_class = CLASSES[name]
    options = draw_options(rng, optimizer_class)
    dtype = rng.choice(TYPES)
    words = [name, *(f"{key}={value}" for key, value in options.items()), str(dtype)]

    shape = rng.choice([(300, 300), (64, 500), (1000, 64)])
    large = [nn.Parameter(torch.randn(shape, dtype=dtype))]
    large += [
        nn.Parameter(torch.randn(shape, dtype=dtype)) for _ in range(rng.choice([0, 1]))
    ]
    if rng.random() < 0.2:
        large.append(large[0])
        words.append("tied")
    small = [
        nn.Parameter(torch.randn(rng.choice([1, 8, 100]), dtype=dtype))
        for _ in range(rng.choice([0, 3, 30]))
    ]
    if name == "Muon":
        # It updates matrices alone.
        small = []
    table = None
    if name == "SparseAdam" or rng.random() < 0.1:
        table = nn.Embedding(*shape, sparse=True)
        words.append("sparse")
        if name == "SparseAdam":
            large = small = []
    model = Parameters(large, small, table)
    parameters = list(model.parameters())
    if len(parameters) > 1 and rng.random() < 0.2:
        parameters[0].requires_grad_(False)
        words.append("frozen")

    words += [f"{len(large)} of {shape}", f"{len(small)} small"]
    batch = torch.randint(shape[0], (rng.choice([30, 3000]),))
    step = Step(
        optimizer=lambda parameters: optimizer_class(parameters, **options),
    )
    return DrawnStep(f"{seed}: {', '.join(words)}", model, batch, step, 1)
