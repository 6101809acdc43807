"""The peak of a training step, without a device and without its memory."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from loaderkit.budget.allocator import reserved_peak
from loaderkit.budget.extend import measure_points, size_of
from loaderkit.budget.measure import held_bytes, tensors_of
from loaderkit.budget.peaks import (
    PARTS,
    fates_of,
    kept_by_module,
    parts_at,
    peaks_of,
    totals,
)
from loaderkit.budget.track import holds_assumption, track_step
from loaderkit.budget.tracker import ALL_CHOSEN, CHOSEN_NOW, SCALAR
from loaderkit.budget.train_step import (
    DeviceSpec,
    Step,
    StepError,
    device_spec,
    dtype_of,
)
from loaderkit.notebook import Bar, card
from loaderkit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from loaderkit.budget.allocation_log import Log


_MARGIN = 0.02
"""Share of the peak by which an assumption without bounds of its own may be wrong;
chosen between the errors that were seen, below 1 %, and an interval nobody can use."""
_ROUNDING = 0.001
"""The same where nothing was assumed."""
_EXACT = 0.005
"""Share of the peak by which an estimate that is called exact may be wrong."""
_UNSEEN_BYTES = 6 << 10
"""What Python and torch make beside operators, such as numbers turned into tensors of 8
bytes."""
_CHECKPOINT_BYTES = 2 * 5056
"""What a checkpoint makes beside operators: the state of the random numbers (5,056
bytes on the CPU), which it keeps for the backward pass and reads again there; what it
read is garbage of a cycle, and stays until Python collects that (measured)."""


@dataclass(frozen=True)
class StepEstimate:
    """Peak bytes of one training step, by part, phase and module."""

    peak: int
    """Highest sum of live tensors; the device's own context is not in it."""
    low: int
    """Lower end; within 0.1 % and 6 kB of ``peak`` when nothing was assumed."""
    high: int
    """Upper end."""
    phase: str
    """Where the peak is: "forward", "loss", "backward" or "step"."""
    parts: dict[str, int]
    """What is live at the peak, by :data:`PARTS`."""
    phases: dict[str, int]
    """Peak of each of :data:`PHASES`."""
    modules: dict[str, int]
    """Activations kept for the backward pass by the module that made them, largest
    first."""
    target: DeviceSpec
    """The device it is for."""
    method: str
    """"tracked", "measured and extended" or "formula"."""
    assumptions: list[str] = field(default_factory=list)
    """What had to be assumed; a number is only exact without any."""
    reserved: int | None = None
    """What the target's caching allocator would hold: modelled, not measured; None
    where it is not modelled."""
    seconds: float = 0.0
    """What the estimate took."""
    real_bytes: int = 0
    """Memory the estimate itself took for integers."""

    @property
    def exact(self) -> bool:
        """Whether nothing was assumed, and the peak holds to half a percent.

        What Python makes beside operators is a few kB: much, of a step of 100 kB.
        """
        return not self.assumptions and self.high <= self.peak * (1 + _EXACT)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        title, *_ = _lines(self)
        return card(
            title,
            heads=("part", "bytes", "share of the peak"),
            rows=[
                (name, format_bytes(size), Bar(size / max(self.peak, 1)))
                for name, size in self.parts.items()
            ],
            notes=[f"assumed: {each}" for each in self.assumptions],
            text=str(self),
        )

    def to_json(self) -> dict[str, Any]:
        """Give every field."""
        return asdict(self)


def estimate_step(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = "adam",
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
        ValueError: The batch, loss or optimizer does not fit the model.

    >>> import torch
    >>> layer = torch.nn.Linear(100, 100)
    >>> found = estimate_step(layer, torch.zeros(1000, 100), optimizer="sgd")
    >>> found.parts["parameters"], found.phase
    (40400, 'backward')
    """
    kind = dtype_of(autocast)
    step = Step(loss, optimizer, autocast=kind, target=device_spec(target))
    return estimate(model, batch, step)


def estimate(model: Any, batch: Any, step: Step) -> StepEstimate:
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
    try:
        made = _tracked(model, batch, step)
    except StepError:
        raise
    except Exception as error:  # noqa: BLE001 -- any operator may refuse fake tensors
        made = _without_tracking(model, batch, step, error)
    return replace(made, seconds=time.perf_counter() - started)


def _tracked(model: Any, batch: Any, step: Step) -> StepEstimate:
    """Track a step; a second time with real values where floats decide a shape."""
    try:
        log = track_step(model, batch, step)
    except StepError:
        raise
    except Exception:  # noqa: BLE001 -- such as tolist() of a fake tensor
        log, other_ends = track_step(model, batch, step, with_values=True), []
    else:
        if not holds_assumption(log, (ALL_CHOSEN, SCALAR)):
            return summarised(log, step)
        other_ends = [log]
        log = _with_values(model, batch, step) or log
    made = summarised(log, step)
    if holds_assumption(log, (ALL_CHOSEN, CHOSEN_NOW, SCALAR)):
        other_ends += _few_chosen(model, batch, step)
        made = _spanning(made, [summarised(other, step) for other in other_ends])
    return made


def _with_values(model: Any, batch: Any, step: Step) -> Log | None:
    try:
        return track_step(model, batch, step, with_values=True)
    except Exception:  # noqa: BLE001 -- then nothing is known of the values
        return None


def _few_chosen(model: Any, batch: Any, step: Step) -> list[Log]:
    """Track with masks that choose nothing but one element."""
    try:
        return [track_step(model, batch, step, chosen=0.0)]
    except Exception:  # noqa: BLE001 -- a model may need more than one element
        return []


def _spanning(made: StepEstimate, others: list[StepEstimate]) -> StepEstimate:
    """Widen an estimate to what it would be with other values."""
    low = min([made.low, *(other.low for other in others)])
    if len(others) < 2:  # one end could not be tracked: only what stays is sure
        low = min(low, sum(made.parts[name] for name in PARTS[:4]))
    return replace(made, low=low, high=max([made.high, *(o.high for o in others)]))


def summarised(log: Log, step: Step) -> StepEstimate:
    """Read peak, parts, phases and modules out of a log.  Pure.

    Args:
        log: What lived when.
        step: The step it is of.

    Returns:
        The estimate.
    """
    peaks = peaks_of(log)
    highest = max(peaks.values(), key=lambda peak: peak.total)
    low = max(totals(peaks_of(log, "low")).values())
    high = max(totals(peaks_of(log, "high")).values())
    assumptions = [
        f"{what}: {operator}, {count} times"
        for (what, operator), count in log.assumptions.items()
    ]
    if step.target.kind != "cpu":
        kind = step.target.kind
        assumptions.append(f"kernels of {kind} hold no more inside than the CPU's")
    share = _MARGIN if assumptions else _ROUNDING
    margin = round(highest.total * share) + _UNSEEN_BYTES
    margin += _CHECKPOINT_BYTES * log.checkpoints
    low, high = min(low, highest.total - margin), max(high, highest.total + margin)
    fate = fates_of(log)
    return StepEstimate(
        peak=highest.total,
        low=low,
        high=high,
        phase=highest.phase,
        parts=parts_at(log, highest, fate),
        phases=totals(peaks),
        modules=kept_by_module(log, fate),
        target=step.target,
        method="tracked",
        assumptions=assumptions,
        reserved=reserved_peak(log.events, step.target.kind),
        real_bytes=log.real_bytes,
    )


def _without_tracking(
    model: Any, batch: Any, step: Step, error: Exception
) -> StepEstimate:
    """Extend small real steps; where there are none, use a formula."""
    first_line = next(iter(str(error).splitlines()), "")
    why = f"{type(error).__name__} while tracking: {first_line[:120]}"
    points = measure_points(model, batch, step)
    if points is None:
        return _by_formula(model, batch, step, why)
    phases = points.extended(size_of(batch))
    peak = max(phases.values())
    share = max(0.05, points.error() * 4)
    # Graphs that are unlike the first ones, or attention, bend the line.  Chosen: a
    # factor of two either way beyond four times what was measured.
    times = 1.0 if points.sizes[-1] >= size_of(batch) // 4 else 2.0
    measured = max(points.peaks[-1].values())
    low = max(min(measured, peak), round(peak / times)) * (1 - share)
    ends = (round(low), round(peak * (1 + share) * times))
    return _untracked(model, step, phases, ends, "measured and extended", why)


def _by_formula(model: Any, batch: Any, step: Step, why: str) -> StepEstimate:
    """Parameters, gradients, two moments, and the outputs of every module twice."""
    parameters = held_bytes(list(model.parameters()))
    layers = sum(1 for _ in model.modules())
    sure = parameters + held_bytes(tensors_of(batch))
    peak = 4 * parameters + 2 * layers * held_bytes(tensors_of(batch))
    return _untracked(model, step, {"backward": peak}, (sure, 4 * peak), "formula", why)


def _untracked(
    model: Any, step: Step, phases: dict[str, int], ends: tuple[int, int], method: str,
    why: str,
) -> StepEstimate:  # fmt: skip
    phase = max(phases, key=lambda name: phases[name])
    peak = phases[phase]
    parts = dict.fromkeys(PARTS, 0)
    parts["parameters"] = min(peak, held_bytes(list(model.parameters())))
    parts["activations"] = peak - parts["parameters"]
    return StepEstimate(
        peak=peak, low=ends[0], high=ends[1], phase=phase, parts=parts, phases=phases,
        modules={}, target=step.target, method=method, assumptions=[why],
    )  # fmt: skip


def _lines(found: StepEstimate) -> Iterator[str]:
    span = ""
    if not found.exact:
        span = f" ({format_bytes(found.low)} to {format_bytes(found.high)})"
    yield (
        f"Peak: {format_bytes(found.peak)}{span} in {found.phase}, "
        f"for {found.target.kind}, {found.method} in {format_seconds(found.seconds)}"
    )
    for name in PARTS:
        share = found.parts[name] / max(found.peak, 1)
        yield f"  {name:16} {format_bytes(found.parts[name]):>9} {share:6.1%}"
    order = " > ".join(
        f"{name} {format_bytes(size)}"
        for name, size in sorted(found.phases.items(), key=lambda each: -each[1])
    )
    yield f"  phases: {order}"
    for name, size in list(found.modules.items())[:3]:
        yield f"  keeps most: {name} {format_bytes(size)}"
    if found.reserved is not None:
        held = format_bytes(found.reserved)
        yield f"  held by the caching allocator: {held} (modelled, not measured)"
    for each in found.assumptions:
        yield f"  assumed: {each}"
    if found.target.kind != "cpu":
        yield f"  not in it: {found.target.kind}'s own context and fragmentation"
