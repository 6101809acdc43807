"""The largest batch that fits, and three ways to train within a limit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from loaderkit.answers import answer_wrong_names
from loaderkit.arguments import check_integer, check_share
from loaderkit.budget.batch.cost_model import (
    BatchBudget,
    BatchCostModel,
    Chance,
    ErrorFactors,
    choose_budget,
    fit_cost_model,
    probability_of_running_out,
)
from loaderkit.budget.batch.page import (
    batch_size_sections,
    chances_section,
    remedies_sections,
)
from loaderkit.budget.batch.peak_model import prediction_error
from loaderkit.budget.batch.samples import Samples, read_samples
from loaderkit.budget.batch.savings import (
    RemedySaving,
    estimate_savings,
    explain_peak,
)
from loaderkit.budget.step.devices import DeviceSpec
from loaderkit.budget.step.estimate import StepEstimate, estimate
from loaderkit.budget.step.misplaced import answer_misplaced
from loaderkit.budget.step.page import history_sections
from loaderkit.budget.step.remembered import remembering
from loaderkit.budget.step.train_step import (
    OptimizerVariant,
    Step,
    blocks_of,
    check_loss,
    device_spec,
    dtype_of,
)
from loaderkit.call_keywords import parse_arguments, suggest_keywords
from loaderkit.errors import BudgetError, OptionError, StepError
from loaderkit.fixes import Setting
from loaderkit.function_arguments import check_callable
from loaderkit.memory.host import read_host
from loaderkit.memory.probes import free_bytes
from loaderkit.memory.reading import device_of
from loaderkit.mistaken import mistaken_for_model
from loaderkit.notebook import HasCard, ShareBar, card, mood_of, repr_in_a_line
from loaderkit.pages.charts import Limit
from loaderkit.pages.document import HasPage, Listing, Page, Section
from loaderkit.units import count_of, format_bytes, size_in_bytes
from loaderkit.wrapping import wrap_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from loaderkit.array_types import Floats
    from loaderkit.budget.keywords import Loss, PlanKeywords

_DEVICE_MARGIN = 0.1
"""Share of a device's memory that is left free; chosen: the context of CUDA, the
workspaces of its libraries and fragmentation are not tracked, and take some hundred MB
of a card of 8 GB or more.  A CPU has none of them."""
_MOST_SAVINGS_SHOWN = 5
"""In a notebook's card; all are in the text."""
_SHOWN_SHARE = 0.01
"""Of the peak: remedies that save less are named in one line."""
_VAGUE_CHANCE = 0.5
"""Width of a chance's interval above which a plan says why.  Chosen: the answer is
then neither yes nor no."""
_SHOWN_ERROR = 0.001
"""Error of the predictions from which a note tells it: below, it is rounding."""


@dataclass(frozen=True)
class PlanOptions:
    """Everything else that can be told to ``plan_batch``."""

    loss: Loss | None = None
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

    def checked(self) -> PlanOptions:
        """Refuse values that make no sense.

        Returns:
            The options, with integers of numpy as Python's.

        Raises:
            OptionError: A value makes no sense.
        """
        epochs = check_integer("epochs", self.epochs, least=1)
        check_loss(self.loss)
        if self.collate_fn is not None:
            example = "lambda samples: samples"
            check_callable("collate_fn", self.collate_fn, example, "samples")
        if self.margin is not None:
            check_share("margin", self.margin)
        return replace(self, epochs=epochs)


@answer_wrong_names("budget")
@dataclass(frozen=True)
class BatchConfiguration(HasCard):
    """One way to train."""

    name: str
    """"A (balanced)", "B (minimum)" or "C (CPU)"."""
    micro_batch: int
    """Samples of one piece; every one of that many fits."""
    accumulation: int
    """Pieces of a step, so that a step still sees the batch size asked for."""
    peak: int
    """Bytes of the worst piece."""
    limit: int
    """Bytes it may take, the margin taken off."""
    device: str
    """Kind of device."""
    precision: str
    """"float32" or the type of autocast."""
    checkpointing: bool
    """Whether blocks compute activations again."""
    optimizer: OptimizerVariant
    """Its implementation."""
    budget: BatchBudget = field(default_factory=BatchBudget)
    """Bounds for the loader; ``budget.loader_options()`` is what ``build_loader``
    takes."""

    @property
    def ok(self) -> bool:
        """Whether a single sample fits."""
        return self.micro_batch > 0

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        of_limit = f"{format_bytes(self.peak)} of {format_bytes(self.limit)}"
        if not self.ok:
            return f"{self.name:13} nothing fits: one sample takes {of_limit}"

        ways = [self.precision]
        if self.checkpointing:
            ways.append("checkpointing")
        if self.optimizer != "default":
            ways.append(f"{self.optimizer} optimizer")
        pieces = f"{count_of(self.micro_batch, 'samples')} x {self.accumulation}"
        text = f"{self.name:13} {pieces}, {of_limit} on {self.device}, "
        text += ", ".join(ways)
        bounds = str(self.budget)
        return f"{text}; {bounds}" if bounds else text


@answer_wrong_names()
@dataclass(frozen=True)
class BatchPlan(HasPage):
    """What fits, what does not, and how likely a run ends out of memory."""

    batch_size: int
    """Samples of a step that were asked for."""
    configurations: list[BatchConfiguration]
    """A (balanced), B (minimum) and C (CPU)."""
    estimate: StepEstimate
    """A step with the worst batch of that size."""
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
    cost_model: BatchCostModel | None = field(default=None, repr=False, compare=False)
    """What any batch takes; see :meth:`predict_peaks` and :meth:`probability`."""

    @property
    def micro_batch(self) -> int:
        """Samples of the balanced configuration."""
        return self.configurations[0].micro_batch

    @property
    def ok(self) -> bool:
        """Whether the balanced configuration fits."""
        return self.configurations[0].ok

    def predict_peaks(self, sizes: ArrayLike) -> Floats:
        """Predict what batches take by their sizes.

        Args:
            sizes: For graphs ``[batches, (graphs, nodes, edges)]``; for sequences
                ``[batches, (samples, tokens, padded, padded squared)]``: places with
                padding, and places times the longest.  For a model that pads graphs,
                each is taken to be as large as the largest of all, unless the places
                and their squares are given too; what is squared for a model that
                compares all with all is computed.

        Returns:
            Peak bytes ``[batches]``.

        Raises:
            BudgetError: The plan has no cost model.
        """
        cost_model = self._require_cost_model()
        complete_sizes = cost_model.samples.with_padding(sizes)
        return cost_model.peak_model.predict(complete_sizes)

    def probability(self, batch_size: int, *, epochs: int = 1, seed: int = 0) -> Chance:
        """Estimate how likely some batch exceeds the limit.

        Args:
            batch_size: Samples of a batch, shuffled.
            epochs: Within so many.
            seed: Of the simulated shuffles.

        Returns:
            The chance and its ends, from 0 to 1.

        Raises:
            BudgetError: The plan has no cost model.
        """
        cost_model = self._require_cost_model()
        # ``estimate`` is of the worst batch of this size, whatever is asked about: how
        # wrong predictions are was seen there.
        size = min(self.batch_size, len(cost_model.samples))
        return probability_of_running_out(
            cost_model,
            batch_size,
            self.limit,
            epochs=epochs,
            seed=seed,
            errors=_error_factors(cost_model, self.estimate, size),
        )

    def _require_cost_model(self) -> BatchCostModel:
        if self.cost_model is None:
            message = "This plan has no model of what batches take."
            why = "plan_batch, which measures that, did not make it"
            fix = "plan_batch(model, dataset, device)"
            raise BudgetError(message, why=why, fix=fix)
        return self.cost_model

    def _repr_html_(self) -> str:
        title, *_ = _plan_lines(self)
        rows = [
            (
                configuration.name,
                f"{configuration.micro_batch:,} x {configuration.accumulation}",
                format_bytes(configuration.peak),
                ShareBar(configuration.peak / max(configuration.limit, 1)),
            )
            for configuration in self.configurations
        ]
        worthwhile = [saving for saving in self.savings if saving.saves > 0]
        saving_notes = [
            f"{saving.remedy.name}: saves {format_bytes(saving.saves)}"
            for saving in worthwhile[:_MOST_SAVINGS_SHOWN]
        ]
        return card(
            title,
            mood=mood_of(ok=self.ok),
            heads=("configuration", "samples x pieces", "peak", "of its limit"),
            rows=rows,
            notes=[self.cause, *saving_notes, *self.notes],
            text=str(self),
        )

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        return wrap_lines("\n".join(_plan_lines(self)))

    def page(self) -> Page:
        """Show which batch fits, and what would change that."""
        dearest, *_ = _plan_lines(self)
        limit = Limit(self.limit, f"limit: {format_bytes(self.limit)}")
        batch_sizes: tuple[Section, ...] = ()
        if self.cost_model is not None:
            batch_sizes = batch_size_sections(
                self.cost_model.worst_peak,
                self.batch_size,
                limit,
                samples=len(self.cost_model.samples),
            )
        return Page(
            self._answer_in_a_line(),
            mood=mood_of(ok=self.ok),
            lead=(dearest, self.cause, *self.notes),
            sections=(
                *batch_sizes,
                *remedies_sections(self.savings, self.estimate.peak, limit),
                *history_sections(self.estimate.history, limit),
                chances_section(self.chances),
                Section("As text", (Listing(str(self), folded="what print shows"),)),
            ),
        )

    def _answer_in_a_line(self) -> str:
        """Say in a line what fits."""
        balanced = self.configurations[0]
        if not balanced.ok:
            return f"Not even one sample fits {format_bytes(self.limit)}"
        if balanced.accumulation == 1:
            return f"Batches of {self.batch_size:,} fit {format_bytes(self.limit)}"
        return (
            f"{count_of(balanced.micro_batch, 'samples')} at once fit "
            f"{format_bytes(self.limit)}: "
            f"{count_of(balanced.accumulation, 'pieces')} make a step of "
            f"{self.batch_size:,}"
        )

    def to_json(self) -> dict[str, Any]:
        """Give everything as plain values."""
        configurations = [
            {
                **asdict(configuration),
                "budget": configuration.budget.loader_options(),
            }
            for configuration in self.configurations
        ]
        savings = [
            {
                "name": saving.remedy.name,
                "cost": saving.remedy.cost,
                "saves": saving.saves,
                "peak": saving.peak,
            }
            for saving in self.savings
        ]
        chances = {
            str(epochs): chance._asdict() for epochs, chance in self.chances.items()
        }
        return {
            "batch_size": self.batch_size,
            "configurations": configurations,
            "estimate": self.estimate.to_json(),
            "cause": self.cause,
            "savings": savings,
            "limit": self.limit,
            "epochs": self.epochs,
            "chances": chances,
            "notes": self.notes,
        }


@suggest_keywords
@answer_misplaced()
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

    A few tiny steps are tracked with fake floats; what any batch takes is then
    predicted from its sizes alone, and the answer is checked by tracking the worst
    batch itself.

    Args:
        model: A module on the CPU; it is not changed.
        dataset: Ours, PyG's, a list of graphs, or any other with a length; of a stream
            of events (PyG's ``TemporalData``), each event is a sample.  Samples are
            read here; global random numbers are as before behind it.
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
    loss_argument = ", loss=loss" if options.get("loss") is not None else ""
    shown = device if isinstance(device, str | torch.device) else "cpu"
    call = f"plan_batch(model, dataset, {str(shown)!r}{loss_argument})"
    mistake = mistaken_for_model(model, call)
    if mistake is not None:
        raise OptionError(mistake.message, why=mistake.why, fix=mistake.instead)
    batch_size = check_integer("batch_size", batch_size, least=1)
    chosen = parse_arguments(PlanOptions, options, plan_batch).checked()
    spec = device_spec(device, "device")
    autocast = dtype_of(chosen.autocast)
    step = Step(chosen.loss, chosen.optimizer, autocast=autocast, target=spec)

    available = _available_bytes(limit, device)
    default_margin = 0.0 if spec.kind == "cpu" else _DEVICE_MARGIN
    margin = default_margin if chosen.margin is None else chosen.margin
    usable_bytes = round(available.amount * (1 - margin))

    samples = read_samples(dataset, collate=chosen.collate_fn)
    planner = _Planner(model, samples, step, usable_bytes, batch_size)
    try:
        with remembering():
            plan = planner.plan(chosen.epochs)
    except StepError as error:
        fix = samples.as_one_stream()
        if not fix:
            raise
        why = "joined as graphs, each has nodes of its own: their numbers were shifted"
        message = f"Events in several parts do not fit the model: {error.what}"
        raise StepError(message, why=why, fix=fix) from error
    limit_note = (
        f"limit {format_bytes(available.amount)} {available.known_from}, "
        f"{margin:.0%} of it left free"
    )
    return replace(plan, notes=[limit_note, *_plan_notes(plan, samples)])


class _AvailableBytes(NamedTuple):
    """Memory to plan for."""

    amount: int
    """Bytes, the margin still in."""
    known_from: str
    """Who said so, to be printed after the amount."""


def _available_bytes(
    limit: int | str | None, device: str | DeviceSpec | torch.device
) -> _AvailableBytes:
    """Find the bytes to plan for: the user's limit, the specification's, what is free.

    Raises:
        BudgetError: Nobody says.
    """
    spec = device_spec(device, "device")
    if limit is not None:
        return _AvailableBytes(size_in_bytes("limit", limit, least=1), "as told")
    if spec.memory_bytes is not None:
        return _AvailableBytes(spec.memory_bytes, "of the specification")
    name = spec.kind if isinstance(device, DeviceSpec) else device
    # Of this very device: "cuda:1" may be free where "cuda:0" is not.
    free = free_bytes(device_of(name))
    if free is None:
        message = f"There is no {name} here that tells how much memory is free."
        why = "it is not on this machine, or torch has no way to ask it"
        limited = Setting("limit", "8 GiB", within="plan_batch(..., {})")
        raise BudgetError(message, why=why, fix=limited)
    return _AvailableBytes(free.amount, f"free now ({free.known_from})")


@dataclass(frozen=True)
class _Planner:
    """One model, its samples and its limit."""

    model: Any
    samples: Samples
    step: Step
    limit: int
    """Bytes, the margin taken off."""
    batch_size: int
    """Samples of a step that were asked for."""

    def plan(self, epochs: int) -> BatchPlan:
        cost_model = fit_cost_model(
            self.model, self.samples, self.step, self.batch_size
        )
        # Its samples may be those of a model that pads.
        samples = cost_model.samples
        size = min(self.batch_size, len(samples))
        worst_batch = samples.join(samples.worst_rows(cost_model.peak_model, size))

        step_estimate = estimate(self.model, worst_batch, self.step)
        savings = estimate_savings(self.model, worst_batch, self.step, step_estimate)
        # Shuffles are simulated for one epoch; of more epochs the chance follows, since
        # each is shuffled anew.
        one_epoch = probability_of_running_out(
            cost_model,
            size,
            self.limit,
            errors=_error_factors(cost_model, step_estimate, size),
        )
        horizons = sorted({1, 5, epochs})
        balanced = self._largest_configuration("A (balanced)", cost_model, self.limit)
        return BatchPlan(
            batch_size=self.batch_size,
            configurations=[
                balanced,
                self._smallest_configuration(cost_model),
                self._cpu_configuration(cost_model, balanced),
            ],
            estimate=step_estimate,
            cause=explain_peak(step_estimate, savings),
            savings=savings,
            limit=self.limit,
            epochs=epochs,
            chances={count: one_epoch.within(count) for count in horizons},
            cost_model=cost_model,
        )

    def _largest_configuration(
        self, name: str, cost_model: BatchCostModel, limit: int
    ) -> BatchConfiguration:
        """Choose the largest pieces that fit, and the bounds for the loader."""
        most = min(self.batch_size, len(self.samples))
        count = cost_model.largest_batch(limit, most)
        configuration = self._make_configuration(name, cost_model, limit, count)
        if not count:
            return configuration
        budget = choose_budget(cost_model, limit, count, most)
        return replace(configuration, budget=budget)

    def _make_configuration(
        self, name: str, cost_model: BatchCostModel, limit: int, count: int
    ) -> BatchConfiguration:
        """Describe training in pieces of so many samples; 0 says that nothing fits."""
        step = cost_model.step
        return BatchConfiguration(
            name=name,
            micro_batch=count,
            accumulation=math.ceil(self.batch_size / count) if count else 0,
            # Where nothing fits, what the smallest step that runs would take.
            peak=cost_model.worst_peak(max(count, cost_model.fewest)),
            limit=limit,
            device=step.target.kind,
            precision=str(step.autocast or torch.float32).removeprefix("torch."),
            checkpointing=step.checkpoint,
            optimizer=step.variant,
        )

    def _smallest_configuration(self, cost_model: BatchCostModel) -> BatchConfiguration:
        """As few samples a piece as it needs, with all that makes a step smaller."""
        for step in self._smaller_steps():
            configurations = self._with_each_optimizer(cost_model, step)
            if configurations:
                smallest = min(configurations, key=lambda option: option.peak)
                if smallest.peak > self.limit:
                    return replace(smallest, micro_batch=0, accumulation=0)
                return smallest
        # Never reached in a plan: the step as it is was tracked already.
        as_it_is = self._make_configuration(
            "B (minimum)", cost_model, self.limit, cost_model.fewest
        )
        return replace(as_it_is, micro_batch=0)

    def _smaller_steps(self) -> Iterator[Step]:
        """Give steps with fewer and fewer remedies: not every model takes all."""
        has_blocks = bool(blocks_of(self.model))
        if self.step.autocast is None:
            yield self.step.replace(checkpoint=has_blocks, autocast=torch.bfloat16)
        yield self.step.replace(checkpoint=has_blocks)
        yield self.step

    def _with_each_optimizer(
        self, cost_model: BatchCostModel, step: Step
    ) -> list[BatchConfiguration]:
        """Track a step with each optimizer's implementation that torch accepts."""
        variants: tuple[OptimizerVariant, ...] = ("default",)
        if step.optimizer is not None:
            # Never "foreach": it updates all parameters at once, with room for all.
            variants = ("loop", "fused")
        configurations = []
        for variant in variants:
            smaller = cost_model.with_step(step.replace(variant=variant))
            try:
                configuration = self._make_configuration(
                    "B (minimum)", smaller, self.limit, smaller.fewest
                )
            except StepError:
                # Torch refuses fused updates of sparse gradients, and some losses and
                # operators in bfloat16.
                continue
            configurations.append(configuration)
        return configurations

    def _cpu_configuration(
        self, cost_model: BatchCostModel, balanced: BatchConfiguration
    ) -> BatchConfiguration:
        """The same on the CPU of this machine, with what it has available now."""
        if self.step.target.kind == "cpu":
            return replace(balanced, name="C (CPU)")

        step = self.step.replace(target=DeviceSpec("cpu"), variant="default")
        on_cpu = cost_model.with_target(step, self.batch_size)
        limit = read_host().available_bytes
        return self._largest_configuration("C (CPU)", on_cpu, limit)


def _error_factors(
    cost_model: BatchCostModel, step_estimate: StepEstimate, size: int
) -> ErrorFactors:
    """Say how wrong the predictions for batches of a size may be.

    Args:
        cost_model: What a batch takes.
        step_estimate: Of the worst batch of that size.
        size: Samples.

    Returns:
        The fit's error, also on that batch, times what the estimate leaves open.
    """
    # The fit's own error is that of small batches; this one is as large as those that
    # the chance is about, and was tracked anyway.
    rows = cost_model.samples.worst_rows(cost_model.peak_model, size)
    error_here = prediction_error(cost_model.predict(rows), [step_estimate.peak])
    factor = 1 + max(cost_model.peak_model.error, error_here)
    peak = max(step_estimate.peak, 1)
    return ErrorFactors(
        too_high=factor * peak / max(step_estimate.low, 1),
        too_low=factor * step_estimate.high / peak,
    )


def _why_vague(estimate: StepEstimate) -> str:
    """Say why the chances are far apart, and how to learn more.

    Args:
        estimate: Of the worst batch.
    """
    low, high = format_bytes(estimate.low), format_bytes(estimate.high)
    note = "the chances are uncertain because the memory of the worst batch is: it "
    note += f"takes between {low} and {high}"
    # An assumption is told as "what is assumed: operator, how often".
    operators = [
        text.partition(": ")[2].partition(",")[0]
        for text in estimate.assumptions
        if ": " in text
    ]
    if operators:
        named = ", ".join(operators[:_MOST_OPERATORS_NAMED])
        note += f", depending on what {named} will need"
    share = estimate.high / max(estimate.peak, 1) - 1
    note += f". With a limit of {high} or more ({share:.0%} above the likely peak) it "
    note += "fits in any case"
    if estimate.target.traits.caching_allocator:
        measured = f"torch.{estimate.target.kind}.max_memory_allocated()"
        note += ". To find out what it takes, run one step with it on the device, "
        note += f"and read {measured}"
    return note


_MOST_OPERATORS_NAMED = 3


def _plan_notes(plan: BatchPlan, samples: Samples) -> list[str]:
    notes = []
    error = 0.0 if plan.cost_model is None else plan.cost_model.peak_model.error
    if error > _SHOWN_ERROR:
        notes.append(f"batches are predicted within {error:.1%} of the steps tracked")
    if samples.partly:
        notes.append(
            f"only {count_of(len(samples), 'samples')} looked at: pack the dataset "
            "into a cache, whose offsets tell the sizes of all"
        )
    if plan.estimate.target.kind != "cpu":
        notes.append("the device's own context and fragmentation are not in it")
    widths = [chance.high - chance.low for chance in plan.chances.values()]
    if max(widths, default=0.0) > _VAGUE_CHANCE:
        notes.append(_why_vague(plan.estimate))
    notes += [f"assumed: {assumption}" for assumption in plan.estimate.assumptions]
    return notes


def _plan_lines(plan: BatchPlan) -> Iterator[str]:
    step_estimate = plan.estimate
    yield (
        f"The worst batch of {plan.batch_size:,}: {format_bytes(step_estimate.peak)} "
        f"of {format_bytes(plan.limit)} ({step_estimate.method})"
    )
    yield f"  {plan.cause}"
    for epochs, chance in plan.chances.items():
        within = "one epoch" if epochs == 1 else count_of(epochs, "epochs")
        yield f"  out of memory within {within}: {chance}"
    for configuration in plan.configurations:
        yield str(configuration)

    least_shown = round(step_estimate.peak * _SHOWN_SHARE)
    worthwhile = [saving for saving in plan.savings if saving.saves > least_shown]
    for number, saving in enumerate(worthwhile, 1):
        yield f"  {number}. {saving}"
    useless = [saving for saving in plan.savings if saving not in worthwhile]
    if useless:
        names = ", ".join(saving.remedy.name for saving in useless)
        yield f"  saves nothing here: {names}"
    for note in plan.notes:
        yield f"  note: {note}"
