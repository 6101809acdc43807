"""Fits a surrogate to a model and a dataset, and solves for the largest batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.budget.calibrate import Gap, measured_gap, size_of, tracked_phases
from loaderkit.budget.samples import NAMES, Samples
from loaderkit.budget.surrogate import Surrogate, fit, in_sizes
from loaderkit.budget.track import track_step

if TYPE_CHECKING:
    from loaderkit.budget.steps import Step

_COUNTS = {
    "samples": (2, 4, 6),
    "sequences": (2, 3, 4, 5, 6, 8),
    "graphs": (2, 3, 4, 5, 6, 8),
}
"""Samples of the small steps a surrogate is made from: one step more than unknowns, the
last to see the error; never 1 alone, which takes other kernels."""
_REFERENCE = 64
"""Samples of the batch whose parts are run for real, where kernels are opaque."""
_EPOCHS = (200, 20_000)
"""Epochs that are simulated: at least, at most."""
_DRAWS = 20_000_000
"""Samples drawn for it; the answer is then within a point or two (measured)."""
_AT_ONCE = 50


@dataclass(frozen=True)
class Pricing:
    """A surrogate and the samples it prices."""

    model: Any
    """The module."""
    samples: Samples
    """The dataset's sizes."""
    step: Step
    """How a step is made."""
    surrogate: Surrogate
    """What a batch costs."""
    gap: Gap | None = None
    """What real steps take on top, where that was measured."""

    def under(self, step: Step) -> Pricing:
        """Track other steps of the same samples; which are dearest stays as it was."""
        return replace(self, step=step)

    def direct(self, rows: list[int]) -> int:
        """Track the batch of some rows: exact, some 0.1 s."""
        batch = self.samples.join(rows)
        phases = tracked_phases(self.model, batch, self.step)
        if self.gap is not None:
            phases = self.gap.add(phases, size_of(batch))
        return max(phases.values())

    def worst(self, count: int) -> int:
        """Track the dearest batch of so many samples."""
        return self.direct(self.samples.worst_rows(self.surrogate, count))

    def largest(self, limit: int) -> int:
        """Solve for the most samples of which every batch fits.

        Args:
            limit: Bytes.

        Returns:
            Samples; 0 when not even every single one fits.
        """
        prices = self.samples.worst(self.surrogate)
        count = int(np.searchsorted(prices, limit, side="right"))
        while count and self.worst(count) > limit:
            count -= 1
        while count < len(self.samples) and self.worst(count + 1) <= limit:
            count += 1
        return count


def price(model: Any, samples: Samples, step: Step) -> Pricing:
    """Track a few small batches of a dataset and fit the surrogate.

    Args:
        model: A module on the CPU.
        samples: The dataset's sizes.
        step: How a step is made.

    Returns:
        What any batch costs.
    """
    chosen = [
        _spread(samples, count, turn)
        for turn, count in enumerate(_COUNTS[samples.kind])
    ]
    sizes = [samples.describe(rows) for rows in chosen]
    batches = [samples.join(rows) for rows in chosen]
    logs = [track_step(model, batch, step) for batch in batches]
    many = samples.join(list(range(min(len(samples), _REFERENCE))))
    gap = measured_gap(model, many, step, logs[-1])
    gaps = {}
    if gap is not None:
        weight = in_sizes(sizes, [size_of(batch) for batch in batches])
        first = np.eye(len(weight))[0]
        gaps = {
            phase: constant * first + slope * weight
            for phase, (constant, slope) in gap.lines.items()
        }
    surrogate = fit(NAMES[samples.kind], sizes, logs, gaps)
    return Pricing(model, samples, step, surrogate, gap)


def _spread(samples: Samples, count: int, turn: int) -> list[int]:
    """Choose small samples whose sizes point in different directions."""
    total = samples.sizes @ np.ones(samples.sizes.shape[1])
    small = np.argsort(total, kind="stable")[: max(count * 4, len(total) // 2)]
    rng = np.random.default_rng(turn)
    picked = rng.choice(small, size=min(count, len(small)), replace=False)
    if samples.kind == "graphs" and len(small) > count:
        ratio = samples.sizes[small, 2] / np.maximum(samples.sizes[small, 1], 1)
        picked[0] = small[ratio.argmax() if turn % 2 else ratio.argmin()]
    rows = [int(row) for row in dict.fromkeys(picked.tolist())]
    while len(rows) < count:  # a dataset smaller than the batch
        rows.append(rows[len(rows) % max(len(rows), 1)])
    return rows


def probability(
    pricing: Pricing, batch_size: int, limit: int, *, epochs: int = 1, seed: int = 0
) -> float:
    """Estimate how likely some batch exceeds a limit within a number of epochs.

    Args:
        pricing: What a batch costs.
        batch_size: Samples of a batch, shuffled, the last one whatever is left.
        limit: Bytes.
        epochs: How many.
        seed: Of the simulated shuffles.

    Returns:
        From 0 to 1; epochs are independent, so one epoch's is found by simulation and
        raised to their number.
    """
    samples, total = pricing.samples, len(pricing.samples)
    size = min(batch_size, total)
    prices = samples.worst(pricing.surrogate)
    if prices[size - 1] <= limit:
        return 0.0
    rounds = int(np.clip(_DRAWS // total, *_EPOCHS))
    rng, failed = np.random.default_rng(seed), 0
    for start in range(0, rounds, _AT_ONCE):
        many = min(_AT_ONCE, rounds - start)
        orders = rng.permuted(np.tile(np.arange(total), (many, 1)), axis=1)
        failed += int(_exceeds(pricing, orders, size, limit).sum())
    return float(1 - (1 - failed / rounds) ** epochs)


def _exceeds(pricing: Pricing, orders: Any, size: int, limit: int) -> Any:
    """Say of shuffled epochs ``[epochs, n]`` which have a batch beyond the limit."""
    many, total = orders.shape
    whole = total // size * size
    batches = orders[:, :whole].reshape(-1, size)
    prices = pricing.surrogate.price(pricing.samples.describe(batches))
    beyond = (prices > limit).reshape(many, -1).any(axis=1)
    if whole < total:
        last = pricing.samples.describe(orders[:, whole:])
        beyond |= pricing.surrogate.price(last) > limit
    return beyond


def budgets(pricing: Pricing, limit: int, count: int, most: int) -> dict[str, Any]:
    """Turn a limit into what ``build_loader`` takes.

    Args:
        pricing: What a batch costs.
        limit: Bytes.
        count: Samples of which every batch fits.
        most: Samples of a batch at most.

    Returns:
        ``max_nodes`` and ``max_edges`` for graphs, ``max_tokens`` for sequences end to
        end, ``batch_size`` for padded ones and for equal samples: every batch within
        them fits.
    """
    samples, lines = pricing.samples, pricing.surrogate.lines
    if samples.kind == "samples":
        return {"batch_size": count}
    room = limit * (1 - min(pricing.surrogate.error, 0.05)) - lines[:, 0]
    room = room - np.maximum(lines[:, 1], 0) * most
    if samples.kind == "sequences":
        if (np.abs(lines[:, 3:]) > 1).any():  # bytes for each place, also padded ones
            return {"batch_size": count, "bucket_by": "tokens"}
        tokens = _least(room, lines[:, 2])
        return {"max_tokens": tokens} if tokens > 0 else {"batch_size": count}
    nodes, edges = samples.sizes[:, 1].sum(), samples.sizes[:, 2].sum()
    ratio = edges / max(nodes, 1)
    nodes = _least(room, lines[:, 2] + ratio * lines[:, 3])
    bounds = {"max_nodes": nodes, "max_edges": int(nodes * ratio)}
    return {name: bound for name, bound in bounds.items() if bound > 0}


def _least(room: Any, each: Any) -> int:
    """Divide where one more costs something; 0 where nothing fits."""
    if (room < 0).any():
        return 0
    bounds = [r / e for r, e in zip(room, each, strict=True) if e > 0]
    return int(min(bounds)) if bounds else 0
