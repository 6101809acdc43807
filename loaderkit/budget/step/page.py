"""An estimate as a page: memory over the step, its parts, its modules.  Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from loaderkit.budget.step.peaks import PARTS
from loaderkit.pages.charts import COLOURS, Band, Bar, Bars, Curves, Limit, Series
from loaderkit.pages.document import Section
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loaderkit.budget.step.allocation_log import Part, Phase
    from loaderkit.budget.step.history import Moment
    from loaderkit.pages.document import Block

_MOST_MODULES = 30
"""Chosen: what fits a screen; the rest is summed up in one bar."""
_COLOUR_OF_PART = dict(zip(PARTS, COLOURS, strict=True))


def history_sections(
    history: Sequence[Moment], limit: Limit | None = None
) -> tuple[Section, ...]:
    """Draw memory over the step, by part.

    Args:
        history: Its moments.
        limit: What the step may take.

    Returns:
        One section; none where the step was not tracked.
    """
    if len(history) < 2:
        return ()

    peak = max(range(len(history)), key=lambda index: history[index].total)
    series = [
        Series(
            part,
            tuple(float(moment.parts[index]) for moment in history),
            _COLOUR_OF_PART[part],
        )
        for index, part in enumerate(PARTS)
    ]
    chart = Curves(
        label=(
            f"Live bytes over one training step; the peak of "
            f"{format_bytes(history[peak].total)} is in {history[peak].phase}."
        ),
        x=tuple(float(moment.event) for moment in history),
        x_name="allocations and releases of the step, in their order (no time)",
        # A part that a step never has, such as buffers, needs no colour in the legend.
        series=tuple(layer for layer in series if any(layer.values)),
        unit="bytes",
        readouts=tuple(_readout_text(moment) for moment in history),
        first_readout=peak,
        stacked=True,
        bands=tuple(_phase_bands(history)),
        limits=() if limit is None else (limit,),
    )
    caption = (
        "Point at the plot or tap it, or step through it with the arrow keys; Escape "
        "goes back to the peak."
    )
    return (Section("Memory over the step", (chart,), caption=caption),)


def parts_section(parts: Mapping[Part, int], peak: int, phase: Phase) -> Section:
    """Draw what is live at the peak.

    Args:
        parts: Bytes by part.
        peak: Their sum.
        phase: Where the peak is.

    Returns:
        A section with a bar for each part.
    """
    bars = tuple(
        Bar(
            part,
            size,
            f"{format_bytes(size)}, {size / max(peak, 1):.1%}",
            _COLOUR_OF_PART[part],
        )
        for part, size in parts.items()
    )
    chart = Bars(f"Bytes live at the peak of {format_bytes(peak)}, in {phase}.", bars)
    return Section("What is live at the peak", (chart,))


def modules_sections(modules: Mapping[str, int]) -> tuple[Section, ...]:
    """Draw what each module keeps for the backward pass.

    Args:
        modules: Bytes by module, largest first.

    Returns:
        One section; none where the step was not tracked.
    """
    if not modules:
        return ()
    shown = list(itertools.islice(modules.items(), _MOST_MODULES))
    hidden = list(modules.values())[_MOST_MODULES:]
    if hidden:
        shown.append((count_of(len(hidden), "more modules"), sum(hidden)))
    bars = tuple(Bar(name, size, format_bytes(size)) for name, size in shown)
    blocks: tuple[Block, ...] = (
        Bars("Activations that each module keeps for the backward pass.", bars),
    )
    return (Section("Which modules keep most", blocks),)


class _PhaseStart(NamedTuple):
    """Where a phase begins."""

    phase: Phase
    event: int


def _phase_bands(history: Sequence[Moment]) -> list[Band]:
    """Find where each phase begins and ends."""
    starts: list[_PhaseStart] = []
    for phase, moments in itertools.groupby(history, key=lambda moment: moment.phase):
        starts.append(_PhaseStart(phase, next(moments).event))

    # Each phase ends where the next begins.
    ends = [start.event for start in starts[1:]] + [history[-1].event]
    return [
        Band(start.event, end, start.phase)
        for start, end in zip(starts, ends, strict=True)
    ]


def _readout_text(moment: Moment) -> str:
    """Say what was live at a moment, and which module computed."""
    doing: str = moment.phase
    if moment.module:
        doing += f" of {moment.module}"
    if moment.forward:
        doing += f", called in forward at {moment.forward}"
    parts = ", ".join(
        f"{part} {format_bytes(size)}"
        for part, size in zip(PARTS, moment.parts, strict=True)
        if size
    )
    return f"{format_bytes(moment.total)} in {doing}\n{parts}"
