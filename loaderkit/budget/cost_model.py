"""Fits a surrogate to a model and a dataset, and solves for the largest batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loaderkit.budget.peaks import peaks_of, totals
from loaderkit.budget.surrogate import Surrogate, fit, price_error
from loaderkit.budget.track import track_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.budget.allocation_log import End
    from loaderkit.budget.samples import Samples
    from loaderkit.budget.train_step import Step

_COUNTS = {
    "samples": (2, 4, 6),
    "sequences": (2, 3, 4, 5, 6, 8),
    "graphs": (2, 3, 4, 5, 6, 8),
    "padded graphs": (2, 3, 4, 5, 6, 7, 8, 9),
}
"""Samples of the small steps a surrogate is made from: one step more than unknowns, the
last to see the error; never 1 alone, which takes other kernels."""
_COMPARED = 16
"""Samples of the batches that a fit is compared with."""
_LONGEST_OF_STEP = (1.0, 0.1, 0.5, 1.0, 0.25, 0.75, 0.9, 0.0)
"""Of a model that pads: the quantile of lengths that the longest sample of each small
step has.  The largest of all is in two steps: a square that is learnt from short ones
cannot be extended to a single giant (prices were a fifth of the peak)."""
_UNEXPLAINED = 0.05
"""Error above which graphs, nodes and edges do not explain a model.  Chosen between
what chance makes of them (self-loops that GCN and GAT replace: up to 0.025 in graphs
with random edges) and what padding does (0.5 and more).  Beyond it no bound of nodes
is given either: it would promise a price for larger batches than were ever tracked."""
_EPOCHS = (200, 20_000)
"""Epochs that are simulated: at least, at most."""
_DRAWS = 20_000_000
"""Samples drawn for it; the answer is then within a point or two (measured)."""
_AT_ONCE = 50


@dataclass(frozen=True)
class BatchCostModel:
    """A surrogate and the samples it prices."""

    model: Any
    """The module."""
    samples: Samples
    """The dataset's sizes."""
    step: Step
    """How a step is made."""
    surrogate: Surrogate
    """What a batch costs."""
    tracked: dict[tuple[int, ...], int] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Batches that were tracked for :meth:`direct` so far, and their peaks."""

    def under(self, step: Step) -> BatchCostModel:
        """Track other steps of the same samples; which are dearest stays as it was."""
        return replace(self, step=step, tracked={})

    def direct(self, rows: list[int]) -> int:
        """Track the batch of some rows, some 0.1 s: the upper end on a CPU.

        For a device, where it is wide, the likely peak: its margin is for the rest.
        """
        key = tuple(rows)
        if key not in self.tracked:
            log = track_step(self.model, self.samples.join(rows), self.step)
            end: End = "high" if self.step.target.kind == "cpu" else "likely"
            self.tracked[key] = max(totals(peaks_of(log, end)).values())
        return self.tracked[key]

    def likely(self, rows: list[int]) -> int:
        """Track the batch of some rows, and give the likely peak."""
        log = track_step(self.model, self.samples.join(rows), self.step)
        return max(totals(peaks_of(log)).values())

    def worst(self, count: int) -> int:
        """Track the dearest batch of so many samples, and bound what others take.

        Prices choose which is the dearest.  Where they may be wrong by a factor,
        another batch may take more than the tracked one: by that factor twice.
        """
        tracked = self.direct(self.samples.worst_rows(self.surrogate, count))
        return round(tracked * (1 + self.surrogate.error) ** 2)

    def largest(self, limit: int, most: int | None = None) -> int:
        """Solve for the most samples of which every batch fits.

        Args:
            limit: Bytes.
            most: Samples that are asked for; all there are if None.

        Returns:
            Samples; 0 when not even every single one fits.
        """
        prices = self.samples.worst(self.surrogate) * (1 + self.surrogate.error) ** 2
        guess = int(np.searchsorted(prices, limit, side="right"))
        most = len(self.samples) if most is None else min(most, len(self.samples))
        return last_that_fits(lambda count: self.worst(count) <= limit, guess, most)


def last_that_fits(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """Search from a guess in strides that double, then by halves.

    Args:
        fits: Whether so many fit; if so, fewer do.
        guess: Where to begin.
        most: How many there are.

    Returns:
        The largest number that fits, 0 if not even 1 does.

    >>> last_that_fits(lambda count: count <= 37, guess=20, most=100)
    37
    """
    low, high = 0, most + 1
    probe, stride = min(max(guess, 1), most), 1
    while high - low > 1:
        if fits(probe):
            low = probe
            probe += stride
        else:
            high = probe
            probe -= stride
        stride *= 2
        if not low < probe < high:
            probe = (low + high) // 2
    return low


def price(model: Any, samples: Samples, step: Step) -> BatchCostModel:
    """Track a few small batches of a dataset and fit the surrogate.

    Args:
        model: A module on the CPU.
        samples: The dataset's sizes.
        step: How a step is made.

    Returns:
        What any batch costs.
    """
    surrogate = _fitted(model, samples, step)
    if samples.kind == "graphs" and surrogate.error > _UNEXPLAINED:
        # padding inside the model: to_dense_batch, attention over all nodes
        padded = _fitted(model, samples.padded(), step)
        # Kernels whose workspace is only known within bounds miss by as much with
        # either description: padding must explain most of what is left.
        if padded.error < surrogate.error / 2:
            samples, surrogate = samples.padded(), padded
    return BatchCostModel(model, samples, step, surrogate)


def _fitted(model: Any, samples: Samples, step: Step) -> Surrogate:
    """Fit small steps, and compare with larger ones that the fit has not seen."""
    chosen = [
        _spread(samples, count, turn) for turn, count in enumerate(_counts(samples))
    ]
    sizes = [samples.describe(rows) for rows in chosen]
    logs = [track_step(model, samples.join(rows), step) for rows in chosen]
    surrogate = fit(samples.names, sizes, logs)
    pricing = BatchCostModel(model, samples, step, surrogate)
    error = max(_miss(pricing, rows) for rows in _unseen(samples, surrogate))
    return replace(surrogate, error=max(surrogate.error, error))


def _counts(samples: Samples) -> Sequence[int]:
    """Give the samples of each of the small steps."""
    if samples.kind != "typed graphs":
        return _COUNTS[samples.kind]
    return [2 + turn % 7 for turn in range(len(samples.names) + 2)]


def _miss(pricing: BatchCostModel, rows: list[int]) -> float:
    """Say how far the price of a batch is from its tracked step."""
    expected = pricing.surrogate.price(pricing.samples.describe(rows))
    return price_error(expected, [pricing.likely(rows)])


def _unseen(samples: Samples, surrogate: Surrogate) -> list[list[int]]:
    """Choose batches to compare with, which a fit has not seen.

    Two are drawn at random.  In one the largest sample is beside the smallest, which
    shows where others are padded to it.  The last is the dearest of its size.
    """
    count = min(_COMPARED, len(samples))
    rng = np.random.default_rng(0)
    drawn = [rng.choice(len(samples), n, replace=False) for n in (count, count // 2)]
    by_size = np.argsort(samples.sizes.sum(axis=1), kind="stable")
    unlike = np.append(by_size[: count - 1], by_size[-1])
    chosen = [rows.tolist() for rows in (*drawn, unlike) if len(rows)]
    return [*chosen, samples.worst_rows(surrogate, count)]


def _spread(samples: Samples, count: int, turn: int) -> list[int]:
    """Choose small samples whose sizes point in different directions."""
    rng = np.random.default_rng(turn)
    if samples.kind in {"padded graphs", "sequences"}:
        by_length = np.argsort(samples.sizes[:, 1], kind="stable")
        longest = round(_LONGEST_OF_STEP[turn] * (len(by_length) - 1))
        small = by_length[: max(longest, count)]
        picked = rng.choice(small, size=min(count, len(small)), replace=False)
        picked[-1] = by_length[longest]
    else:
        total = samples.sizes @ np.ones(samples.sizes.shape[1])
        small = np.argsort(total, kind="stable")[: max(count * 4, len(total) // 2)]
        picked = rng.choice(small, size=min(count, len(small)), replace=False)
    if samples.kind in {"graphs", "padded graphs"} and len(small) > count:
        ratio = samples.sizes[small, 2] / np.maximum(samples.sizes[small, 1], 1)
        picked[0] = small[ratio.argmax() if turn % 2 else ratio.argmin()]
    rows = [int(row) for row in dict.fromkeys(picked.tolist())]
    while len(rows) < count:  # a dataset smaller than the batch
        rows.append(rows[len(rows) % max(len(rows), 1)])
    return rows


class Slack(NamedTuple):
    """How wrong prices may be, as factors of at least 1."""

    below: float
    """How many times too high they may be."""
    above: float
    """How many times too low."""


class Chance(NamedTuple):
    """How likely some batch exceeds a limit, from 0 to 1."""

    low: float
    """If every price is as much too high as the fit may be."""
    likely: float
    """With the prices as they are."""
    high: float
    """If every price is as much too low, and the simulation was lucky."""

    def within(self, epochs: int) -> Chance:
        """Raise one epoch's chance to several, which are independent."""
        return Chance(*(1 - (1 - one) ** epochs for one in self))


def probability(
    pricing: BatchCostModel,
    batch_size: int,
    limit: int,
    *,
    epochs: int = 1,
    seed: int = 0,
    slack: Slack | None = None,
) -> Chance:
    """Estimate how likely some batch exceeds a limit within a number of epochs.

    Args:
        pricing: What a batch costs.
        batch_size: Samples of a batch, shuffled, the last one whatever is left.
        limit: Bytes.
        epochs: How many.
        seed: Of the simulated shuffles.
        slack: How wrong prices may be; the fit's own error if None.

    Returns:
        The chance with its ends; exactly 0 where not even the dearest batch exceeds.
    """
    samples, total = pricing.samples, len(pricing.samples)
    size = min(batch_size, total)
    if slack is None:
        slack = Slack(1 + pricing.surrogate.error, 1 + pricing.surrogate.error)
    limits = np.array([limit * slack.below, limit, limit / slack.above])
    dearest = samples.worst(pricing.surrogate)[size - 1]
    if dearest <= limits[2] and pricing.worst(size) <= limit:
        return Chance(0.0, 0.0, 0.0)
    rounds = int(np.clip(_DRAWS // total, *_EPOCHS))
    rng, failed = np.random.default_rng(seed), np.zeros(3)
    for start in range(0, rounds, _AT_ONCE):
        many = min(_AT_ONCE, rounds - start)
        orders = rng.permuted(np.tile(np.arange(total), (many, 1)), axis=1)
        failed += (_dearest_of(pricing, orders, size)[:, None] > limits).sum(axis=0)
    shares = failed / rounds
    # two standard errors; where none of n epochs failed, the rule of three
    spread = 2 * np.sqrt(shares * (1 - shares) / rounds) + 3 / rounds * (failed == 0)
    low = float(max(shares[0] - spread[0], 0.0))
    high = float(min(shares[2] + spread[2], 1.0))
    return Chance(low, float(shares[1]), high).within(epochs)


def _dearest_of(pricing: BatchCostModel, orders: Any, size: int) -> Any:
    """Price the dearest batch of each shuffled epoch ``[epochs, n]``."""
    many, total = orders.shape
    whole = total // size * size
    batches = orders[:, :whole].reshape(-1, size)
    prices = pricing.surrogate.price(pricing.samples.describe(batches))
    dearest = prices.reshape(many, -1).max(axis=1)
    if whole < total:
        last = pricing.samples.describe(orders[:, whole:])
        dearest = np.maximum(dearest, pricing.surrogate.price(last))
    return dearest


def budgets(
    pricing: BatchCostModel, limit: int, count: int, most: int
) -> dict[str, Any]:
    """Turn a limit into what ``build_loader`` takes.

    Args:
        pricing: What a batch costs.
        limit: Bytes.
        count: Samples of which every batch fits.
        most: Samples of a batch at most.

    Returns:
        ``max_nodes`` and ``max_edges`` for graphs, ``max_tokens`` for sequences end to
        end, each with ``batch_size``, the samples asked for: more were never priced,
        and each takes bytes of its own.  Only ``batch_size`` for padded ones, for equal
        samples, where the sizes do not explain the price, and where a single sample is
        beyond the bounds though it fits.  Every batch within them fits.
    """
    samples, lines = pricing.samples, pricing.surrogate.lines
    needed = {
        "graphs": ("nodes", "edges"),
        "typed graphs": ("nodes", "edges"),
        "sequences": ("tokens",),
    }
    if samples.kind not in needed or not samples.says(*needed[samples.kind]):
        return {"batch_size": count}
    if pricing.surrogate.error > _UNEXPLAINED:
        return {"batch_size": count}
    room = limit / (1 + pricing.surrogate.error) - lines[:, 0]
    room = room - np.maximum(lines[:, 1], 0) * most
    if samples.kind == "sequences":
        if (np.abs(lines[:, 3:]) > 1).any():  # bytes for each place, also padded ones
            return {"batch_size": count, "bucket_by": "tokens"}
        tokens = _least(room, lines[:, 2])
        if tokens < samples.sizes[:, 1].max():
            return {"batch_size": count}
        return {"max_tokens": tokens, "batch_size": most}
    # A loader's bounds are for all nodes and all edges: of typed graphs, each may be of
    # the dearest type.
    of_nodes = [i for i, name in enumerate(samples.names) if name.startswith("nodes")]
    of_edges = [i for i, name in enumerate(samples.names) if name.startswith("edges")]
    nodes_of_each = samples.sizes[:, of_nodes].sum(axis=1)
    edges_of_each = samples.sizes[:, of_edges].sum(axis=1)
    ratio = edges_of_each.sum() / max(nodes_of_each.sum(), 1)
    dearest_node = lines[:, [1 + i for i in of_nodes]].max(axis=1)
    dearest_edge = lines[:, [1 + i for i in of_edges]].max(axis=1)
    nodes = _least(room, dearest_node + ratio * dearest_edge)
    edges = int(nodes * ratio)
    if nodes < max(nodes_of_each.max(), 1) or edges < edges_of_each.max():
        return {"batch_size": count}
    bounds = {"max_nodes": nodes, "max_edges": edges, "batch_size": most}
    return {name: bound for name, bound in bounds.items() if bound > 0}


def _least(room: Any, each: Any) -> int:
    """Divide where one more costs something; 0 where nothing fits."""
    if (room < 0).any():
        return 0
    bounds = [r / e for r, e in zip(room, each, strict=True) if e > 0]
    return int(min(bounds)) if bounds else 0
