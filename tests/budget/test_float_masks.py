"""Laws of attention with masks of floats, and of blocks that are computed again."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it
from torch.utils.checkpoint import checkpoint

from loaderkit.budget.step.estimate import estimate
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.track import track_step
from loaderkit.budget.step.train_step import Step

MASKS = {
    "learned": lambda bias, dtype: bias[None],
    "learned, cast": lambda bias, dtype: bias[None].to(dtype),
    "learned and hidden": lambda bias, dtype: (
        torch.zeros(2, 1, 40, 40, dtype=dtype).masked_fill(
            torch.arange(40) > 30, -torch.inf
        )
        + bias.to(dtype)
    ),
    "floats": lambda bias, dtype: torch.zeros(2, 1, 40, 40, dtype=dtype),
    "booleans": lambda bias, dtype: (torch.arange(40) < 30).expand(2, 1, 40, 40),
}


class Attention(nn.Module):
    """Attention with a mask; the bias of some masks is learned, as in Swin."""

    def __init__(self, mask):
        super().__init__()
        self.project, self.mask = nn.Linear(32, 96), MASKS[mask]
        self.bias = nn.Parameter(torch.zeros(4, 40, 40))

    def forward(self, x):
        rows = self.project(x).unflatten(-1, (3, 4, 8))
        query, key, value = rows.permute(2, 0, 3, 1, 4).unbind(0)
        mask = self.mask(self.bias, query.dtype)
        return F.scaled_dot_product_attention(query, key, value, mask)


@pytest.mark.many_cases(quick=5)
@pytest.mark.parametrize(
    ("mask", "autocast"), [*itertools.product(MASKS, (None, torch.bfloat16))]
)
def test_attention_adds_a_mask_of_floats_in_place(mask, autocast):
    # 5 and 14 % too high where types were mixed
    step = Step(optimizer="sgd", autocast=autocast)
    model, batch = Attention(mask), torch.randn(2, 40, 32)

    estimated = estimate(model, batch, step)

    truth = max(measure_step(model, batch, step).values())
    assert estimated.low <= truth <= estimated.high
    assert estimated.peak == pytest.approx(truth, rel=0.001)


class Blocks(nn.Module):
    """Blocks that are computed again."""

    def __init__(self, count, *, reentrant):
        super().__init__()
        self.reentrant, self.first = reentrant, nn.Linear(32, 32)
        layers = (nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1))
        self.blocks = nn.ModuleList(
            nn.Sequential(*layers, nn.Linear(64, 32)) for _ in range(count)
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_a_block_that_is_computed_again_counts_once(count, reentrant):
    # Those of transformers counted 13 times each, with room for a random state each
    model = Blocks(count, reentrant=reentrant)

    assert track_step(model, torch.randn(64, 32), Step()).checkpoints == count
