"""Models that read their own outputs: as counts, as positions and in conditions."""

import torch
from torch import nn


class Reading(nn.Module):
    """Computes with what it reads of its own outputs."""

    def __init__(self, function):
        super().__init__()
        self.inner, self.function = nn.Linear(64, 64), function

    def forward(self, x):
        return self.function(self.inner(x))


def widened(rows):
    return rows.repeat(1, 4).mean()


COUNTS = {
    "of a mask": lambda h: (h[:, 0] > 0).sum(),
    "of a mask of floats": lambda h: (h[:, 0] > 0).float().sum().item(),
    "of a mask, rounded": lambda h: torch.ceil((h[:, 0] > 0).float().sum()).int(),
    "that are not 0": lambda h: torch.count_nonzero(h[:, 0] > 0),
    "along an axis": lambda h: torch.count_nonzero(h > 0, dim=0).max(),
    "from a share": lambda h: round((h[:, 0] > 0).float().mean().item() * len(h)),
    "summed up": lambda h: (h[:, 0] > 0).cumsum(0)[-1],
    "of the largest": lambda h: h[:, 0].argmax(),
    "of the first in order": lambda h: h[:, 0].argsort()[5],
    "of one of the best": lambda h: h[:, 0].topk(4).indices.max(),
    "in a table": lambda h: torch.bucketize(h[0, 0], torch.arange(0.0, 50_000.0)),
    "that is drawn": lambda h: torch.multinomial(h[:, 0].abs(), 1)[0],
}
BRANCHES = {
    "a maximum": lambda h: h.max().item() > 0.5,
    "a minimum": lambda h: h.min().item() < -0.5,
    "far off": lambda h: h.abs().max().item() > 1000,
    "between two": lambda h: -0.5 < h.mean().item() < 0.5,
    "of both signs": lambda h: h.max().item() > 0 and h.min().item() < 0,
    "of two": lambda h: h.max().item() > h.mean().item(),
    "their ratio": lambda h: h.max().item() / h.min().item() < 0,
    "one of two": lambda h: (h > 9).any() or (h > 0).any(),
    "one and not the other": lambda h: (h > 0).any() and not torch.isnan(h).any(),
    "a count": lambda h: (h > 0).sum() > 5,
    "equal": lambda h: torch.equal(h, h * 2),
    "close": lambda h: torch.allclose(h, h * 2),
    "as a list": lambda h: h[0].tolist()[0] > 0,
}


def by_experts(h):
    experts = h[:, :4].argmax(1)
    counts = torch.bincount(experts, minlength=4).tolist()
    rows, parts, begin = h[experts.argsort()], [], 0
    for count in counts:
        parts.append(rows[begin : begin + count].relu() * 2)
        begin += count
    return torch.cat(parts).mean()


def halves(h):
    count = (h[:, 0] > 0).sum().item()
    return sum(widened(part) for part in h.split([count, len(h) - count]))


READINGS = {
    **{
        f"rows, {name}": lambda h, count=count: widened(h[: int(count(h))])
        for name, count in COUNTS.items()
    },
    **{
        f"if {name}": lambda h, holds=holds: widened(h) if holds(h) else h.mean()
        for name, holds in BRANCHES.items()
    },
    "split by experts": by_experts,
    "split by a count": halves,
    "distinct ones": lambda h: widened(
        h[: len(torch.unique(h[:, 0].mul(1000).long()))]
    ),
}
