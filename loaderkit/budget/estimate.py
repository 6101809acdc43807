"""The peak of a training step, without a device and without its memory."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from loaderkit.budget.allocator import reserved_peak
from loaderkit.budget.calibrate import measured_gap, measured_line, size_of
from loaderkit.budget.measure import held_bytes, tensors_of
from loaderkit.budget.peaks import (
    PARTS,
    fates_of,
    kept_by_module,
    parts_at,
    peaks_of,
)
from loaderkit.budget.steps import DeviceSpec, Step, device_spec, dtype_of
from loaderkit.budget.track import track_step
from loaderkit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from loaderkit.budget.log import Log


_MARGIN = 0.02
"""Share by which an assumption may be wrong: the bar that calibrated ones keep."""


@dataclass(frozen=True)
class StepEstimate:
    """Peak bytes of one training step, by part, phase and module."""

    peak: int
    """Highest sum of live tensors; the device's own context is not in it."""
    low: int
    """Lower end; equal to ``peak`` when nothing was assumed."""
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
    """"tracked", "tracked and calibrated", "measured and extended" or "formula"."""
    assumptions: list[str] = field(default_factory=list)
    """What had to be assumed; a number is only exact without any."""
    reserved: int | None = None
    """What the target's caching allocator would hold: modelled, not measured; None
    where it is not modelled."""
    seconds: float = 0.0
    """What the estimate took."""
    real_bytes: int = 0
    """Memory the estimate itself took for integers."""

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def to_json(self) -> dict[str, Any]:
        """Give every field."""
        return asdict(self)


def estimate_step(
    model: Any, batch: Any, *,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = "adam",
    autocast: torch.dtype | str | None = None,
    target: str | DeviceSpec | torch.device = "cpu",
) -> StepEstimate:  # fmt: skip
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
        model: A module on the CPU.
        batch: What it is called with.
        step: How a step is made.

    Returns:
        The estimate, which names the way.

    Raises:
        ValueError: The step is wrong, so that no way works.
    """
    started = time.perf_counter()
    try:
        log = track_step(model, batch, step)
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001 -- any operator may refuse fake tensors
        return _without_tracking(model, batch, step, error)
    made = summarised(log, step)
    gap = measured_gap(model, batch, step, log)
    if gap is not None:
        made |= _calibrated(made, gap.add(made["phases"], size_of(batch)))
    elif any("chosen" in what for what, _ in log.assumptions):
        made |= _lower_end(model, batch, step, made)
    if made["assumptions"]:  # what has no bound of its own
        margin = round(made["peak"] * _MARGIN)
        made["low"] = min(made["low"], made["peak"] - margin)
        made["high"] = max(made["high"], made["peak"] + margin)
    made["seconds"] = time.perf_counter() - started
    return StepEstimate(**made)


def summarised(log: Log, step: Step) -> dict[str, Any]:
    """Read peak, parts, phases and modules out of a log.  Pure.

    Args:
        log: What lived when.
        step: The step it is of.

    Returns:
        Fields of a :class:`StepEstimate`.
    """
    peaks, phases = peaks_of(log)
    at = max(peaks, key=lambda each: each[0])
    fate = fates_of(log)
    return {
        "peak": at[0],
        "low": at[0],
        "high": max(at[0], log.workspace),
        "phase": at[2],
        "parts": parts_at(log, at[1], fate),
        "phases": phases,
        "modules": kept_by_module(log, fate),
        "target": step.target,
        "method": "tracked",
        "assumptions": [
            f"{what}: {op}, {n} times" for (what, op), n in log.assumptions.items()
        ],
        "reserved": reserved_peak(log.events, step.target.kind),
        "real_bytes": log.real_bytes,
    }


def _calibrated(made: dict[str, Any], found: dict[str, int]) -> dict[str, Any]:
    """Replace tracked peaks by calibrated ones."""
    phase = max(found, key=lambda name: found[name])
    peak = found[phase]
    margin = round(peak * _MARGIN)
    more = made["parts"]["temporaries"] + peak - made["peak"]
    return {
        "peak": peak,
        "low": peak - margin,
        "high": peak + margin,
        "phase": phase,
        "phases": found,
        "parts": made["parts"] | {"temporaries": max(0, more)},
        "method": "tracked and calibrated",
    }


def _lower_end(
    model: Any, batch: Any, step: Step, made: dict[str, Any]
) -> dict[str, Any]:
    """Track again with masks that choose nothing but one element."""
    try:
        few = summarised(track_step(model, batch, step, chosen=0.0), step)
    except Exception:  # noqa: BLE001 -- a model may need more than one element
        return {"low": sum(made["parts"][name] for name in PARTS[:4])}
    return {"low": few["peak"]}


def _without_tracking(
    model: Any, batch: Any, step: Step, error: Exception
) -> StepEstimate:
    """Extend small real runs; where a batch has no small ones, use a formula."""
    started = time.perf_counter()
    why = f"{type(error).__name__} while tracking: {str(error).splitlines()[0][:120]}"
    phases = measured_line(model, batch, step)
    method, share = "measured and extended", 0.05
    if phases is None:
        phases = {"backward": _formula(model, batch)}
        method, share = "formula", 0.5
    phase = max(phases, key=lambda name: phases[name])
    peak = phases[phase]
    parts = dict.fromkeys(PARTS, 0)
    parts["parameters"] = held_bytes(list(model.parameters()))
    parts["activations"] = peak - parts["parameters"]
    return StepEstimate(
        peak=peak,
        low=round(peak * (1 - share)),
        high=round(peak * (1 + share)),
        phase=phase,
        parts=parts,
        phases=phases,
        modules={},
        target=step.target,
        method=method,
        assumptions=[why],
        seconds=time.perf_counter() - started,
    )


def _formula(model: Any, batch: Any) -> int:
    """Parameters, gradients, two moments, and the outputs of every module twice."""
    parameters = held_bytes(list(model.parameters()))
    layers = sum(1 for _ in model.modules())
    return 4 * parameters + 2 * layers * held_bytes(tensors_of(batch))


def _lines(found: StepEstimate) -> Iterator[str]:
    span = ""
    if found.low != found.high:
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
