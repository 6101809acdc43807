"""The largest batch that fits, and three ways to train within a limit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from loaderkit.arguments import parse_arguments
from loaderkit.budget.cost_model import (
    BatchCostModel,
    Chance,
    Slack,
    budgets,
    price,
    probability,
)
from loaderkit.budget.estimate import StepEstimate, estimate
from loaderkit.budget.samples import Samples, read_samples
from loaderkit.budget.savings import RemedySaving, explain_peak, savings
from loaderkit.budget.surrogate import price_error
from loaderkit.budget.train_step import (
    DeviceSpec,
    Step,
    StepError,
    blocks_of,
    device_spec,
    dtype_of,
)
from loaderkit.errors import BudgetError
from loaderkit.memory.host import read_host
from loaderkit.memory.probes import free_bytes
from loaderkit.notebook import Bar, card
from loaderkit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Unpack

    from loaderkit.budget.keywords import PlanKeywords
    from loaderkit.budget.samples import Floats

_MARGIN = 0.1
_MOST_GAINS_SHOWN = 5
"""In a notebook's card; all are in the text."""
"""Of a device's memory: context, workspaces and fragmentation are not tracked."""


@dataclass(frozen=True)
class PlanOptions:
    """Everything else that can be told to ``plan_batch``."""

    loss: Callable[..., Any] | None = None
    """As for ``estimate_step``."""
    optimizer: Any = "adam"
    """As for ``estimate_step``."""
    autocast: Any = None
    """As for ``estimate_step``."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Joins samples; the dataset's own way, PyG's or torch's if None."""
    epochs: int = 100
    """Epochs the run shall survive."""
    margin: float | None = None
    """Share of the limit left free; None: 0 on a CPU, 0.1 on devices, for what no
    estimate sees."""


@dataclass(frozen=True)
class BatchConfiguration:
    """One way to train."""

    name: str
    """"A (balanced)", "B (minimum)" or "C (CPU)"."""
    micro_batch: int
    """Samples of one piece; every one of that many fits."""
    accumulation: int
    """Pieces of a step, so that a step still sees the batch size asked for."""
    peak: int
    """Bytes of the dearest piece."""
    limit: int
    """Bytes it may take, the margin taken off."""
    device: str
    """Kind of device."""
    precision: str
    """"float32" or the type of autocast."""
    checkpointing: bool
    """Whether blocks compute activations again."""
    optimizer: str
    """Its implementation: "default", "loop", "foreach" or "fused"."""
    budget: dict[str, Any]
    """Arguments for ``build_loader``, such as ``max_nodes``."""

    @property
    def ok(self) -> bool:
        """Whether a single sample fits."""
        return self.micro_batch > 0

    def __str__(self) -> str:
        if not self.ok:
            return (
                f"{self.name:13} nothing fits: one sample takes "
                f"{format_bytes(self.peak)} of {format_bytes(self.limit)}"
            )
        extras = [self.precision]
        extras += ["checkpointing"] if self.checkpointing else []
        extras += [f"{self.optimizer} optimizer"] * (self.optimizer != "default")
        bounds = ", ".join(
            f"{name}={_said(value)}" for name, value in self.budget.items()
        )
        takes = f"{format_bytes(self.peak)} of {format_bytes(self.limit)}"
        return (
            f"{self.name:13} {self.micro_batch:,} samples x {self.accumulation}, "
            f"{takes} on {self.device}, {', '.join(extras)}"
            f"{'; ' if bounds else ''}{bounds}"
        )


@dataclass(frozen=True)
class BatchPlan:
    """What fits, what does not, and how likely a run ends out of memory."""

    batch_size: int
    """Samples of a step that were asked for."""
    configurations: list[BatchConfiguration]
    """A (balanced), B (minimum) and C (CPU)."""
    estimate: StepEstimate
    """A step with the dearest batch of that size."""
    cause: str
    """What its peak is made of."""
    savings: list[RemedySaving]
    """What each remedy saves for it."""
    limit: int
    """Bytes, the margin taken off."""
    epochs: int
    """Epochs the run shall survive."""
    chances: dict[int, Chance]
    """Probability to run out of memory within so many epochs with ``batch_size``."""
    notes: list[str] = field(default_factory=list)
    """What to know about the numbers."""
    pricing: BatchCostModel | None = field(default=None, repr=False, compare=False)
    """Prices any batch; see :meth:`probability` and :meth:`price`."""

    @property
    def micro_batch(self) -> int:
        """Samples of the balanced configuration."""
        return self.configurations[0].micro_batch

    @property
    def ok(self) -> bool:
        """Whether the balanced configuration fits."""
        return self.configurations[0].ok

    def price(self, sizes: Any) -> Floats:
        """Price batches by their sizes.

        Args:
            sizes: For graphs ``[batches, (graphs, nodes, edges)]``; for sequences
                ``[batches, (samples, tokens, padded, padded squared)]``: places with
                padding, and places times the longest.  A model that pads graphs is
                priced as if each was as large as the largest of all, unless the places
                and their squares are given too.

        Returns:
            Peak bytes ``[batches]``.

        Raises:
            BudgetError: The plan was read from a file.
        """
        pricing = self._pricing()
        return pricing.surrogate.price(pricing.samples.complete(sizes))

    def probability(self, batch_size: int, *, epochs: int = 1, seed: int = 0) -> Chance:
        """Estimate how likely some batch exceeds the limit.

        Args:
            batch_size: Samples of a batch, shuffled.
            epochs: Within so many.
            seed: Of the simulated shuffles.

        Returns:
            The chance and its ends, from 0 to 1.

        Raises:
            BudgetError: The plan was read from a file.
        """
        pricing = self._pricing()
        size = min(self.batch_size, len(pricing.samples))
        slack = _slack(pricing, self.estimate, size)
        return probability(
            pricing, batch_size, self.limit, epochs=epochs, seed=seed, slack=slack
        )

    def _pricing(self) -> BatchCostModel:
        if self.pricing is None:
            what = "This plan has no model to price batches with."
            raise BudgetError(what, fix="plan_batch(model, dataset, device)")
        return self.pricing

    def _repr_html_(self) -> str:
        title, *_ = _lines(self)
        rows = [
            (
                each.name,
                f"{each.micro_batch:,} x {each.accumulation}",
                format_bytes(each.peak),
                Bar(each.peak / max(each.limit, 1)),
            )
            for each in self.configurations
        ]
        worth = [gain for gain in self.savings if gain.saves > 0][:_MOST_GAINS_SHOWN]
        saves = [f"{g.remedy.name}: saves {format_bytes(g.saves)}" for g in worth]
        return card(
            title,
            mood="good" if self.ok else "bad",
            heads=("configuration", "samples x pieces", "peak", "of its limit"),
            rows=rows,
            notes=[self.cause, *saves, *self.notes],
            text=str(self),
        )

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def to_json(self) -> dict[str, Any]:
        """Give everything as plain values."""
        return {
            "batch_size": self.batch_size,
            "configurations": [asdict(each) for each in self.configurations],
            "estimate": self.estimate.to_json(),
            "cause": self.cause,
            "savings": [
                {"name": g.remedy.name, "cost": g.remedy.cost, "saves": g.saves,
                 "peak": g.peak}
                for g in self.savings
            ],
            "limit": self.limit,
            "epochs": self.epochs,
            "chances": {str(k): v._asdict() for k, v in self.chances.items()},
            "notes": self.notes,
        }  # fmt: skip


def plan_batch(
    model: torch.nn.Module,
    dataset: Any,
    device: str | DeviceSpec | torch.device,
    *,
    limit: int | str | None = None,
    batch_size: int = 32,
    **options: Unpack[PlanKeywords],
) -> BatchPlan:
    """Find the largest batch that fits, before anything is moved to a device.

    A few tiny steps are tracked with fake floats; every batch is then priced by its
    sizes alone, and the answer is checked by tracking the dearest batch directly.

    Args:
        model: A module on the CPU; it is not changed.
        dataset: Ours, PyG's, a list of graphs, or any other with a length.
        device: Where it shall train, here or not: "cuda", "mps", "cpu", ...
        limit: Bytes, or a size such as "8 GiB"; what the device has free if None.
        batch_size: Samples of a step; accumulation keeps it.
        **options: Fields of :class:`PlanOptions`: ``loss``, ``optimizer``, ...

    Returns:
        Configurations, chances and what each remedy saves.

    Raises:
        ValueError: The batch size, an option or the dataset makes no sense.
        BudgetError: There is no limit to plan for.
    """
    if batch_size < 1:
        msg = f"batch_size must be at least 1, got {batch_size}"
        raise StepError(msg)
    chosen = parse_arguments(PlanOptions, options, "plan_batch")
    spec = device_spec(device)
    kind = dtype_of(chosen.autocast)
    step = Step(chosen.loss, chosen.optimizer, autocast=kind, target=spec)
    whole, told = _limit(limit, device)
    margin = _MARGIN if chosen.margin is None else chosen.margin
    margin = 0.0 if chosen.margin is None and spec.kind == "cpu" else margin
    samples = read_samples(dataset, collate=chosen.collate_fn)
    planner = _Planner(model, samples, step, round(whole * (1 - margin)), batch_size)
    plan = planner.plan(chosen.epochs)
    notes = [f"limit {format_bytes(whole)} {told}, {margin:.0%} of it left free"]
    return replace(plan, notes=notes + _notes(plan, samples))


def _said(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else repr(value)


def _limit(
    limit: int | str | None, device: str | DeviceSpec | torch.device
) -> tuple[int, str]:
    """Find the bytes to plan for, and say where they come from."""
    spec = device_spec(device)
    if limit is not None:
        size = parse_bytes(limit) if isinstance(limit, str) else limit
        if size < 1:
            msg = f"limit must be positive, got {limit}"
            raise StepError(msg)
        return size, "as told"
    if spec.memory_bytes is not None:
        return spec.memory_bytes, "of the specification"
    place = spec.kind if isinstance(device, DeviceSpec) else device
    free = free_bytes(torch.device(place))
    if free is None:
        what = f"There is no {place} here that tells how much memory is free."
        raise BudgetError(what, fix='plan_batch(..., limit="8 GiB")')
    return free.amount, f"free now ({free.known_from})"


@dataclass(frozen=True)
class _Planner:
    model: Any
    samples: Samples
    step: Step
    limit: int
    batch_size: int

    def plan(self, epochs: int) -> BatchPlan:
        pricing = price(self.model, self.samples, self.step)
        size = min(self.batch_size, len(self.samples))
        samples = pricing.samples
        batch = samples.join(samples.worst_rows(pricing.surrogate, size))
        base = estimate(self.model, batch, self.step)
        found = savings(self.model, batch, self.step, base)
        horizon = sorted({1, 5, epochs})
        slack = _slack(pricing, base, size)
        one = probability(pricing, size, self.limit, slack=slack)
        balanced = self._configured("A (balanced)", pricing, self.limit)
        return BatchPlan(
            batch_size=self.batch_size,
            configurations=[
                balanced,
                self._smallest(pricing),
                self._on_cpu(balanced),
            ],
            estimate=base,
            cause=explain_peak(base, found),
            savings=found,
            limit=self.limit,
            epochs=epochs,
            chances={epochs: one.within(epochs) for epochs in horizon},
            pricing=pricing,
        )

    def _configured(
        self, name: str, pricing: BatchCostModel, limit: int
    ) -> BatchConfiguration:
        most = min(self.batch_size, len(self.samples))
        count = pricing.largest(limit, most)
        made = self._of(name, pricing, limit, count)
        bounds = budgets(pricing, limit, count, most) if count else {}
        return replace(made, budget=bounds)

    def _of(
        self, name: str, pricing: BatchCostModel, limit: int, count: int
    ) -> BatchConfiguration:
        step = pricing.step
        return BatchConfiguration(
            name=name,
            micro_batch=count,
            accumulation=math.ceil(self.batch_size / count) if count else 0,
            peak=pricing.worst(max(count, 1)),
            limit=limit,
            device=step.target.kind,
            precision=str(step.autocast or torch.float32).removeprefix("torch."),
            checkpointing=step.checkpoint,
            optimizer=step.variant,
            budget={},
        )

    def _smallest(self, pricing: BatchCostModel) -> BatchConfiguration:
        """One sample a piece, with everything that makes it smaller."""
        for step in self._smaller_steps():
            tried = self._tried(pricing, step)
            if tried:
                best = min(tried, key=lambda each: each.peak)
                if best.peak > self.limit:
                    return replace(best, micro_batch=0, accumulation=0)
                return best
        # never reached in a plan: the step as it is was priced already
        return replace(self._of("B (minimum)", pricing, self.limit, 1), micro_batch=0)

    def _smaller_steps(self) -> Iterator[Step]:
        """Give steps with fewer and fewer remedies: not every model takes all."""
        blocks = bool(blocks_of(self.model))
        if self.step.autocast is None:
            yield self.step.but(checkpoint=blocks, autocast=torch.bfloat16)
        yield self.step.but(checkpoint=blocks)
        yield self.step

    def _tried(self, pricing: BatchCostModel, step: Step) -> list[BatchConfiguration]:
        """Price a step with each optimizer's implementation that torch accepts."""
        tried = []
        variants = ("loop", "fused") if step.optimizer is not None else ("default",)
        for variant in variants:
            smaller = pricing.under(step.but(variant=variant))
            try:
                tried.append(self._of("B (minimum)", smaller, self.limit, 1))
            except RuntimeError:
                # Torch refuses fused updates of sparse gradients, and some losses and
                # operators in bfloat16.
                continue
        return tried

    def _on_cpu(self, balanced: BatchConfiguration) -> BatchConfiguration:
        if self.step.target.kind == "cpu":
            return replace(balanced, name="C (CPU)")
        step = self.step.but(target=DeviceSpec("cpu"), variant="default")
        limit = read_host().available_bytes
        return self._configured("C (CPU)", price(self.model, self.samples, step), limit)


def _slack(pricing: BatchCostModel, base: StepEstimate, size: int) -> Slack:
    """Say how wrong the prices of batches of a size may be.

    Args:
        pricing: What a batch costs.
        base: Of the dearest batch of that size.
        size: Samples.

    Returns:
        The fit's error, also on that batch, times what the estimate leaves open.
    """
    rows = pricing.samples.worst_rows(pricing.surrogate, size)
    told = pricing.surrogate.price(pricing.samples.describe(rows))
    factor = 1 + max(pricing.surrogate.error, price_error(told, [base.peak]))
    peak = max(base.peak, 1)
    return Slack(factor * peak / max(base.low, 1), factor * base.high / peak)


def _notes(plan: BatchPlan, samples: Samples) -> list[str]:
    notes = []
    error = plan.pricing.surrogate.error if plan.pricing is not None else 0.0
    if error > 0.001:
        notes.append(f"batches are priced within {error:.1%} of the steps tracked")
    if samples.partly:
        notes.append(
            f"only {len(samples):,} samples were looked at: pack the dataset into a "
            "cache, whose offsets tell the sizes of all"
        )
    if plan.estimate.target.kind != "cpu":
        notes.append("the device's own context and fragmentation are not in it")
    return notes + [f"assumed: {each}" for each in plan.estimate.assumptions]


def _lines(plan: BatchPlan) -> Iterator[str]:
    total = plan.estimate
    yield (
        f"The dearest batch of {plan.batch_size:,}: {format_bytes(total.peak)} "
        f"of {format_bytes(plan.limit)} ({total.method})"
    )
    yield f"  {plan.cause}"
    for epochs, chance in plan.chances.items():
        within = "one epoch" if epochs == 1 else f"{epochs} epochs"
        span = f" ({chance.low:.1%} to {chance.high:.1%})" if chance.high else ""
        yield f"  out of memory within {within}: {chance.likely:.1%}{span}"
    for configuration in plan.configurations:
        yield str(configuration)
    worth = [gain for gain in plan.savings if gain.saves > plan.estimate.peak // 100]
    for number, gain in enumerate(worth, 1):
        yield f"  {number}. {gain}"
    idle = [gain.remedy.name for gain in plan.savings if gain not in worth]
    if idle:
        yield f"  saves nothing here: {', '.join(idle)}"
    for note in plan.notes:
        yield f"  note: {note}"
