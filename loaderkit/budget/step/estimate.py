"""The peak of a training step, without a device and without its memory."""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from loaderkit.answers import answer_wrong_names
from loaderkit.budget.step.allocator import reserved_peak
from loaderkit.budget.step.assumed_scalars import LEAST, Assumed
from loaderkit.budget.step.extrapolate import (
    REAL_BYTES,
    Points,
    measure_points,
    measure_whole,
    size_of,
)
from loaderkit.budget.step.history import history_of
from loaderkit.budget.step.measure import held_bytes, measure_step
from loaderkit.budget.step.misplaced import answer_misplaced
from loaderkit.budget.step.page import (
    history_sections,
    modules_sections,
    parts_section,
)
from loaderkit.budget.step.peaks import (
    PARTS,
    PARTS_ALWAYS_HELD,
    kept_by_module,
    parts_at,
    peaks_of,
    storage_parts,
    totals,
)
from loaderkit.budget.step.remembered import remembering
from loaderkit.budget.step.step_copies import bytes_of_loss
from loaderkit.budget.step.step_errors import (
    error_of_step,
    find_error_without_memory,
    is_refusal_of_subclass,
)
from loaderkit.budget.step.track import has_assumption, track_step
from loaderkit.budget.step.train_step import (
    Step,
    check_loss,
    device_spec,
    dtype_of,
)
from loaderkit.budget.step.unknown_values import track_other_answers
from loaderkit.budget.step.value_answers import (
    ALL_CHOSEN,
    CHOSEN_NOW,
    SCALAR,
    SCALAR_NOW,
)
from loaderkit.call_keywords import suggest_keywords
from loaderkit.error_texts import text_of_error
from loaderkit.errors import OptionError, StepError
from loaderkit.mistaken import (
    mistaken_for_batch,
    mistaken_for_model,
    mistaken_for_tensors,
)
from loaderkit.nests import flatten_tensors
from loaderkit.notebook import ShareBar, card, repr_in_a_line
from loaderkit.pages.document import HasPage, Listing, Page, Section
from loaderkit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from loaderkit.budget.keywords import Loss
    from loaderkit.budget.step.allocation_log import Log, Part, Phase
    from loaderkit.budget.step.devices import DeviceSpec, Kernels
    from loaderkit.budget.step.history import Moment


EstimateMethod = Literal["tracked", "measured and extended", "formula"]
"""A step with fake floats; small real steps, and a line through them; or parameters and
the outputs of all modules, where not even a small step runs."""

_MARGIN = 0.02
"""Share of the peak by which an assumption without bounds of its own may be wrong;
chosen between the errors that were seen, below 1 %, and an interval nobody can use."""
_CUDA_MARGIN = 0.06
"""The same of a step on a CUDA GPU, whose kernels are known in part.  Chosen: with what
is known of them, 96 % of 701 steps of an H100 were within it and the bytes below, and
83 % of those of 16 MiB and more; bounds of single kernels widen it for most others."""
_CUDA_UNSEEN_BYTES = 2 << 20
"""What libraries there take for a thread, such as 1 MiB of cuBLASLt (measured)."""
_ROUNDING = 0.001
"""The same where nothing was assumed; chosen: what is promised of most models."""
_EXACT = 0.005
"""Share of the peak by which an estimate that is called exact may be wrong; chosen:
less than anybody leaves free."""
_UNSEEN_BYTES = 6 << 10
"""What Python and torch make beside operators, such as numbers turned into tensors of 8
bytes.  Chosen; it counts in steps of 100 kB only."""
_LEAST_LINE_ERROR = 0.05
"""Share of the peak by which a line through small real steps may be wrong, however well
it goes through them; chosen, as the line is not checked at the size it is drawn to."""
_LINE_ERROR_FACTOR = 4
"""How many times farther off a line may be at the whole batch than at the last small
one; chosen."""
_BENT_LINE_FACTOR = 2.0
"""Graphs that are unlike the first ones, or attention, bend the line.  Chosen: a factor
of two either way beyond four times what was measured."""
_UNBENT_SIZES = 4
"""How many times the largest measured batch may grow before the line may bend; chosen.
"""
_SPARSE_COPIES = 6
"""What is made of a sparse gradient, at most, for one byte of it; chosen: beyond what
is tracked, tables took nothing under SGD, 2 under Adagrad and 3.5 under SparseAdam
(coalesced, squared, and the update itself)."""
_ASSUMED_OF_KERNELS: dict[Kernels, str] = {
    "of CUDA": "kernels of {} hold what they do on an H100",
    "unknown": "kernels of {} hold no more inside than the CPU's",
}
"""What is taken for granted of kernels that are not measured here, for a kind of
device."""
_MODULES_SHOWN = 3
"""In the text; all are in ``modules``."""
_FORMULA_FACTOR = 4
"""How many times too low the formula may be; chosen: attention and convolutions keep
several tensors for each output."""
_CHECKPOINT_BYTES = 2 * 5056
"""What a checkpoint makes beside operators: the state of the random numbers (5,056
bytes on the CPU), which it keeps for the backward pass and reads again there; what it
read is garbage of a cycle, and stays until Python collects that (measured)."""

_HELD_THROUGHOUT: tuple[Part, ...] = ("parameters", "buffers", "batch", "captured")
"""What lives before the step begins and after it: no peak is below their sum."""


@answer_wrong_names("parts", "phases", "modules")
@dataclass(frozen=True)
class StepEstimate(HasPage):
    """Peak bytes of one training step, by part, phase and module."""

    peak: int
    """Highest sum of live tensors; the device's own context is not in it."""
    low: int
    """Lower end; within 0.1 % and 6 kB of ``peak`` when nothing was assumed.  It is
    never below what is held in any case: parameters, buffers, the batch and what is
    captured."""
    high: int
    """Upper end."""
    phase: Phase
    """The phase in which the peak is."""
    parts: dict[Part, int]
    """What is live at the peak, by what it is used for."""
    phases: dict[Phase, int]
    """Peak of each phase."""
    modules: dict[str, int]
    """Activations kept for the backward pass by the module that made them, largest
    first."""
    target: DeviceSpec
    """The device it is for."""
    method: EstimateMethod
    """How it was found: the surest way that worked."""
    assumptions: list[str] = field(default_factory=list)
    """What had to be assumed; a number is only exact without any."""
    reserved: int | None = None
    """What the target's caching allocator would hold: modelled, not measured; None
    where it is not modelled."""
    seconds: float = 0.0
    """What the estimate took."""
    real_bytes: int = 0
    """Memory the estimate itself took for integers."""
    history: tuple[Moment, ...] = field(default=(), repr=False)
    """Memory over the step, moment by moment; empty where it was not tracked.  It is
    not in ``to_json``."""

    @property
    def exact(self) -> bool:
        """Whether nothing was assumed, and the peak holds to half a percent.

        What Python makes beside operators is a few kB: much, of a step of 100 kB.
        """
        return not self.assumptions and self.high <= self.peak * (1 + _EXACT)

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        return "\n".join(_text_lines(self))

    def _repr_html_(self) -> str:
        title, *_ = _text_lines(self)
        return card(
            title,
            heads=("part", "bytes", "share of the peak"),
            rows=[
                (name, format_bytes(size), ShareBar(size / max(self.peak, 1)))
                for name, size in self.parts.items()
            ],
            notes=[f"assumed: {assumption}" for assumption in self.assumptions],
            text=str(self),
        )

    def to_json(self) -> dict[str, Any]:
        """Give every field but the history, which is for pictures."""
        values = asdict(replace(self, history=()))
        del values["history"]
        return values

    def page(self) -> Page:
        """Show memory over the step by part, and what keeps most."""
        title, *lines = _text_lines(self)
        return Page(
            title,
            lead=tuple(line.strip() for line in lines if "assumed" in line),
            sections=(
                *history_sections(self.history),
                parts_section(self.parts, self.peak, self.phase),
                *modules_sections(self.modules),
                Section("As text", (Listing(str(self), folded="what print shows"),)),
            ),
        )


@suggest_keywords
@answer_misplaced()
def estimate_step(
    model: torch.nn.Module,
    batch: object,
    *,
    loss: Loss | None = None,
    optimizer: object = "adam",
    autocast: torch.dtype | str | None = None,
    target: str | DeviceSpec | torch.device = "cpu",
) -> StepEstimate:
    """Estimate the peak memory of forward, backward and optimizer step.

    The step runs with fake floats: no device, no float memory, and no arithmetic.

    Args:
        model: A module on the CPU; it is not changed.
        batch: What it is called with: a tensor, a tuple of arguments, a dict of them, a
            graph, or with a loss a pair ``(inputs, target)``.
        loss: ``loss(output, target)`` for a pair, else ``loss(output, batch)`` or
            ``loss(output)``; the mean of the outputs if None.
        optimizer: A name such as "adamw", a class, a callable of the parameters, or an
            optimizer to be like; None updates nothing.
        autocast: Such as ``torch.bfloat16``.
        target: The device it is for, which need not be here.

    Returns:
        Bytes by part, phase and module, with every assumption.

    Raises:
        StepError: The batch, loss or optimizer does not fit the model; an error of the
            model's own is its cause.
        OptionError: It is no model, or no batch but a loader, a dataset or the like.

    >>> import torch
    >>> layer = torch.nn.Linear(100, 100)
    >>> step = estimate_step(layer, torch.zeros(1000, 100), optimizer="sgd")
    >>> step.parts["parameters"], step.phase
    (40400, 'backward')
    """
    loss_argument = "" if loss is None else ", loss=loss"
    call = f"estimate_step(model, batch{loss_argument})"
    mistake = mistaken_for_model(model, call)
    if mistake is not None:
        raise OptionError(mistake.message, why=mistake.why, fix=mistake.instead)
    mistake = mistaken_for_batch(batch)
    if mistake is not None:
        fix = mistake.fix(f"estimate_step(model, {{}}{loss_argument})")
        raise OptionError(mistake.message, why=mistake.why, fix=fix)
    check_loss(loss)
    autocast_dtype = dtype_of(autocast)
    step = Step(loss, optimizer, autocast=autocast_dtype, target=device_spec(target))
    try:
        return estimate(model, batch, step)
    except StepError as error:
        mistake = mistaken_for_tensors(batch, model)
        if mistake is None:
            raise
        why = f"{mistake.why}: {error.what}"
        raise StepError(mistake.message, why=why, fix=mistake.instead) from error


def estimate(model: torch.nn.Module, batch: object, step: Step) -> StepEstimate:
    """Estimate a step, by the surest way that works.

    Args:
        model: A module.
        batch: What it is called with.
        step: How a step is made.

    Returns:
        The estimate, which names the way.

    Raises:
        ValueError: The step is wrong, so that no way works.
    """
    started = time.perf_counter()
    begun: list[Log] = []
    with remembering():
        try:
            step_estimate = _estimate_by_tracking(model, batch, step, begun)
        except StepError:
            raise
        except Exception as error:  # noqa: BLE001 -- any operator may refuse fakes
            seen_bytes = max((_highest_bytes(log) for log in begun), default=0)
            step_estimate = _estimate_without_tracking(
                model, batch, step, error, seen_bytes
            )
    return replace(step_estimate, seconds=time.perf_counter() - started)


def _highest_bytes(log: Log) -> int:
    """Give the most that lived at once in what was tracked of a step."""
    return max(itertools.accumulate(event.change for event in log.events), default=0)


def _estimate_by_tracking(
    model: torch.nn.Module, batch: object, step: Step, begun: list[Log]
) -> StepEstimate:
    """Track a step; a second time with real values where floats decide a shape.

    Without the values, as many elements are chosen as there are: the one end of what
    may be.  The other end is a step in which masks choose one element.
    """
    other_ends: list[Log] = []
    try:
        log = track_step(model, batch, step, begun=begun)
    except StepError:
        raise
    except Exception:  # noqa: BLE001 -- such as tolist() of a fake tensor
        log = _track_with_values_or_few(model, batch, step, begun)
    else:
        step_estimate = summarise(log, step)
        if _can_be_measured_instead(log, step_estimate, model, batch, step):
            return _measure_sparse(model, batch, step, step_estimate)
        if not has_assumption(log, (ALL_CHOSEN, SCALAR)):
            return step_estimate
        other_ends.append(log)
        log = _track_with_values(model, batch, step) or log

    step_estimate = summarise(log, step)
    if _can_be_measured_instead(log, step_estimate, model, batch, step):
        return _measure_sparse(model, batch, step, step_estimate)
    # A scalar of now is another one in the next step: a layer that is left out by a
    # number drawn at random (LayerDrop) is there again.
    if has_assumption(log, (ALL_CHOSEN, CHOSEN_NOW, SCALAR, SCALAR_NOW)):
        others_tracked = track_other_answers(model, batch, step, log)
        other_ends += [tracked.log for tracked in others_tracked]
        ends = [step_estimate, *(summarise(other, step) for other in other_ends)]
        if has_assumption(log, (ALL_CHOSEN, SCALAR)):
            # Some values are known of neither branch: the estimate is the upper end.
            step_estimate = max(ends, key=lambda end: end.peak)
        step_estimate = _widen_interval(step_estimate, ends)
    return step_estimate


def _can_be_measured_instead(
    log: Log,
    step_estimate: StepEstimate,
    model: torch.nn.Module,
    batch: object,
    step: Step,
) -> bool:
    """Tell whether a step with sparse tensors is small enough to be run for real."""
    is_cpu = step_estimate.target.kind == "cpu"
    is_guessed = log.sparse_bytes > 0 or log.has_unknown_sparse_calls
    if not is_cpu or not is_guessed:
        return False
    # A loss may reach more than it reads; all of it would be copied.
    reached_bytes = bytes_of_loss(model, batch, step)
    return max(step_estimate.high, reached_bytes) <= REAL_BYTES


def _measure_sparse(
    model: torch.nn.Module, batch: object, step: Step, step_estimate: StepEstimate
) -> StepEstimate:
    """Replace the bytes of a tracked step by those of a real one.

    Raises:
        StepError: It does not run.
    """
    try:
        phases = measure_step(model, batch, step)
    except NotImplementedError:
        # A model on "meta" has shapes only.
        return step_estimate
    except Exception as error:
        raise error_of_step(error) from error
    phase = max(phases, key=lambda name: phases[name])
    peak = phases[phase]
    margin = round(_MARGIN * peak) + _UNSEEN_BYTES

    parts = dict.fromkeys(PARTS, 0)
    for part in PARTS_ALWAYS_HELD:
        parts[part] = step_estimate.parts[part]
    held = min(_held_throughout(step_estimate.parts), peak)
    parts["temporaries"] = max(peak - sum(parts.values()), 0)
    return replace(
        step_estimate,
        peak=peak,
        low=max(peak - margin, held),
        high=peak + margin,
        phase=phase,
        phases=phases,
        parts=parts,
        method="measured and extended",
        assumptions=["what is made of sparse tensors: the step was run for real"],
        history=(),
    )


def _track_with_values(model: torch.nn.Module, batch: object, step: Step) -> Log | None:
    try:
        return track_step(model, batch, step, with_values=True)
    except Exception:  # noqa: BLE001 -- then nothing is known of the values
        return None


def _track_with_values_or_few(
    model: torch.nn.Module, batch: object, step: Step, begun: list[Log]
) -> Log:
    """Track a step that does not run with all that may be chosen.

    Raises:
        Exception: It does not run with its values either, nor where counts are 1 and no
            condition holds.
    """
    track = functools.partial(
        track_step, model, batch, step, with_values=True, begun=begun
    )
    try:
        return track()
    except Exception:  # noqa: BLE001 -- such as a split by counts that do not add up
        try:
            return track(assumed=Assumed(share=0.0))
        except Exception:  # noqa: BLE001 -- a branch that does not fit its batch
            return track(assumed=LEAST)


def _widen_interval(
    step_estimate: StepEstimate, ends: list[StepEstimate]
) -> StepEstimate:
    """Widen an estimate, which is one of several ends, to what all of them are."""
    low = min(end.low for end in ends)
    high = max(end.high for end in ends)
    if len(ends) <= 2:
        # One end could not be tracked: only what the step always holds is sure.
        held = sum(step_estimate.parts[name] for name in PARTS_ALWAYS_HELD)
        low = max(min(low, held), _held_throughout(step_estimate.parts))
    return replace(step_estimate, low=low, high=high)


def _held_throughout(parts: dict[Part, int]) -> int:
    """Sum what surely lives at the peak, however wrong an estimate is."""
    return sum(parts[name] for name in _HELD_THROUGHOUT)


_LACKS_AUTOCAST = (
    "float32 where the model asks for CUDA's autocast itself, which is off here: "
    "with autocast=torch.bfloat16 the estimate has its types"
)


def _bytes_of_activations(parts: dict[Part, int]) -> int:
    return parts.get("activations", 0) + parts.get("temporaries", 0)


class _Interval(NamedTuple):
    """Bytes."""

    low: int
    high: int


def upper_end(log: Log, step: Step) -> int:
    """Read the upper end of an estimate out of a log.  Pure.

    Args:
        log: What lived when.
        step: The step it is of.

    Returns:
        Bytes.
    """
    peak = max(totals(peaks_of(log)).values())
    kernels = step.target.traits.kernels
    is_assumed = bool(log.assumptions) or kernels in _ASSUMED_OF_KERNELS
    return _interval_of(log, peak, kernels, is_assumed=is_assumed).high


def _interval_of(
    log: Log, peak: int, kernels: Kernels, *, is_assumed: bool
) -> _Interval:
    """Say how far off the likely peak of a log may be."""
    share = _MARGIN if is_assumed else _ROUNDING
    margin = round(peak * share) + _UNSEEN_BYTES
    if kernels == "of CUDA":
        margin = round(peak * _CUDA_MARGIN) + _CUDA_UNSEEN_BYTES
    margin += _CHECKPOINT_BYTES * log.checkpoints
    low = max(min(max(totals(peaks_of(log, "low")).values()), peak) - margin, 0)
    high = max(max(totals(peaks_of(log, "high")).values()), peak) + margin
    if log.sparse_bytes:
        low = max(low - log.sparse_bytes, 0)
        high += _SPARSE_COPIES * log.sparse_bytes
    return _Interval(low, high)


def summarise(log: Log, step: Step) -> StepEstimate:
    """Read peak, parts, phases and modules out of a log.  Pure.

    Args:
        log: What lived when.
        step: The step it is of.

    Returns:
        The estimate.
    """
    peaks = peaks_of(log)
    highest = max(peaks.values(), key=lambda peak: peak.total)
    assumptions = [
        f"{assumption}: {operator}, {count} times"
        for (assumption, operator), count in log.assumptions.items()
    ]
    kernels = step.target.traits.kernels
    if kernels in _ASSUMED_OF_KERNELS:
        assumptions.append(_ASSUMED_OF_KERNELS[kernels].format(step.target.kind))

    interval = _interval_of(log, highest.total, kernels, is_assumed=bool(assumptions))
    if log.sparse_bytes:
        assumptions.append("no more of sparse tensors than some copies of each")

    part_of = storage_parts(log)
    parts = parts_at(log, highest, part_of)
    low = interval.low
    if log.lacks_autocast:
        assumptions.append(_LACKS_AUTOCAST)
        low -= _bytes_of_activations(parts) // 2  # all of them in half the bytes
    return StepEstimate(
        peak=highest.total,
        low=max(low, _held_throughout(parts)),
        high=interval.high,
        phase=highest.phase,
        parts=parts,
        phases=totals(peaks),
        modules=kept_by_module(log, part_of),
        target=step.target,
        method="tracked",
        assumptions=assumptions,
        reserved=reserved_peak(log.events, step.target.kind),
        real_bytes=log.real_bytes,
        history=history_of(log, part_of),
    )


def _estimate_without_tracking(
    model: torch.nn.Module, batch: object, step: Step, error: Exception, seen_bytes: int
) -> StepEstimate:
    """Extend small real steps; where there are none, use a formula.

    Args:
        model: A module.
        batch: What it is called with.
        step: How a step is made.
        error: With which tracking ended.
        seen_bytes: What lived at the highest until then.

    Returns:
        The estimate.

    Raises:
        StepError: The step does not run, whatever its tensors are.
    """
    first_line = next(iter(text_of_error(error).splitlines()), "")
    why = f"{type(error).__name__} while tracking: {first_line[:120]}"
    held = held_bytes([*model.parameters(), *model.buffers(), *flatten_tensors(batch)])
    points = _measure_points_if_cut(model, batch, step)
    if points is None:
        whole = _measure_whole_or_raise(model, batch, step)
        if whole is not None:
            return _estimate_as_measured(model, step, whole, why, held)
        own_error = find_error_without_memory(model, batch, step)
        if own_error is not None:
            raise error_of_step(own_error) from own_error
        return _estimate_by_formula(model, batch, step, why, seen_bytes)

    phases = points.extended(size_of(batch))
    interval = _interval_of_line(points, size_of(batch), held)
    return _coarse_estimate(model, step, phases, interval, "measured and extended", why)


def _interval_of_line(points: Points, size: int, held: int) -> _Interval:
    """Bound the peak that a line through small steps gives.

    Args:
        points: What small steps took.
        size: Of the batch that it is extended to.
        held: Bytes that live whatever the step does.
    """
    peak = max(points.extended(size).values())
    error_share = max(_LEAST_LINE_ERROR, points.error() * _LINE_ERROR_FACTOR)
    is_far = points.sizes[-1] < size // _UNBENT_SIZES
    factor = _BENT_LINE_FACTOR if is_far else 1.0

    # What was measured already is sure, unless the line itself falls below it.
    measured = max(points.peaks[-1].values())
    low = max(min(measured, peak), round(peak / factor)) * (1 - error_share)

    # A line and a parabola, where there are points enough.
    highest = peak
    for degree in range(1, min(len(points.sizes), 3)):
        highest = max(highest, *points.extended(size, degree).values())
    high = highest * (1 + error_share) * factor
    return _Interval(max(round(low), min(held, peak)), round(high))


def _measure_points_if_cut(
    model: torch.nn.Module, batch: object, step: Step
) -> Points | None:
    """Measure parts of a batch; None where they are no batches by themselves."""
    try:
        return measure_points(model, batch, step)
    except Exception:  # noqa: BLE001 -- whether the whole runs is asked next
        return None


def _measure_whole_or_raise(
    model: torch.nn.Module, batch: object, step: Step
) -> dict[Phase, int] | None:
    """Measure the step itself if it is small, and a mode of torch can watch it.

    Raises:
        StepError: It does not run.
    """
    try:
        return measure_whole(model, batch, step)
    except Exception as error:
        if is_refusal_of_subclass(error):
            return None
        raise error_of_step(error) from error


def _estimate_as_measured(
    model: torch.nn.Module, step: Step, phases: dict[Phase, int], why: str, held: int
) -> StepEstimate:
    """Give what the step itself took when it was run.

    Args:
        model: A module.
        step: How a step is made.
        phases: Peak of each phase.
        why: Why it was run.
        held: Bytes that live before the step begins and after it.

    Returns:
        The estimate.
    """
    peak = max(phases.values())
    # Other kernels, of another device, may take other bytes.
    share = _MARGIN if step.target.kind == "cpu" else 1.0
    margin = round(peak * share) + _UNSEEN_BYTES
    interval = _Interval(max(peak - margin, min(held, peak)), peak + margin)
    return _coarse_estimate(model, step, phases, interval, "measured and extended", why)


def _estimate_by_formula(
    model: torch.nn.Module, batch: object, step: Step, why: str, seen_bytes: int
) -> StepEstimate:
    """Parameters, gradients, two moments, and the outputs of every module twice.

    Or twice what lived in what could be tracked of the step, where that is more.
    """
    parameter_bytes = held_bytes(list(model.parameters()))
    batch_bytes = held_bytes(flatten_tensors(batch))
    layers = sum(1 for _ in model.modules())
    buffer_bytes = held_bytes(list(model.buffers()))
    # Once forward and once backward; an output is taken to be as large as the batch.
    peak = 4 * parameter_bytes + buffer_bytes + 2 * layers * batch_bytes
    peak = max(peak, 2 * seen_bytes)
    held = parameter_bytes + buffer_bytes + batch_bytes
    interval = _Interval(held, _FORMULA_FACTOR * peak)
    return _coarse_estimate(model, step, {"backward": peak}, interval, "formula", why)


def _coarse_estimate(
    model: torch.nn.Module,
    step: Step,
    phases: dict[Phase, int],
    interval: _Interval,
    method: EstimateMethod,
    why: str,
) -> StepEstimate:
    """Make an estimate that knows of parameters, and takes the rest for activations."""
    phase = max(phases, key=lambda name: phases[name])
    peak = phases[phase]
    parts: dict[Part, int] = dict.fromkeys(PARTS, 0)
    parts["parameters"] = min(peak, held_bytes(list(model.parameters())))
    parts["activations"] = peak - parts["parameters"]
    return StepEstimate(
        peak=peak,
        low=interval.low,
        high=interval.high,
        phase=phase,
        parts=parts,
        phases=phases,
        modules={},
        target=step.target,
        method=method,
        assumptions=[why],
    )


def _text_lines(step_estimate: StepEstimate) -> Iterator[str]:
    target = step_estimate.target.kind
    interval = ""
    if not step_estimate.exact:
        low, high = step_estimate.low, step_estimate.high
        ends = [format_bytes(low), format_bytes(high)]
        # Both ends may be the same in three digits.
        if set(ends) != {format_bytes(step_estimate.peak)}:
            interval = f" ({ends[0]} to {ends[1]})"
    yield (
        f"Peak: {format_bytes(step_estimate.peak)}{interval} in "
        f"{step_estimate.phase}, for {target}, {step_estimate.method} in "
        f"{format_seconds(step_estimate.seconds)}"
    )
    for part in PARTS:
        size = step_estimate.parts[part]
        if part == "captured" and not size:
            continue
        share = size / max(step_estimate.peak, 1)
        yield f"  {part:16} {format_bytes(size):>9} {share:6.1%}"
    by_size = sorted(step_estimate.phases.items(), key=lambda item: -item[1])
    order = " > ".join(f"{name} {format_bytes(size)}" for name, size in by_size)
    yield f"  phases: {order}"
    for name, size in list(step_estimate.modules.items())[:_MODULES_SHOWN]:
        yield f"  keeps most: {name} {format_bytes(size)}"
    if step_estimate.reserved is not None:
        reserved = format_bytes(step_estimate.reserved)
        yield f"  held by the caching allocator: {reserved} (modelled, not measured)"
    for assumption in step_estimate.assumptions:
        yield f"  assumed: {assumption}"
    if target != "cpu":
        yield f"  not in it: {target}'s own context and fragmentation"
