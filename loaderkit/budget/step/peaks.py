"""Reads the peak of a step, its parts, phases and modules out of a log.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, get_args

from loaderkit.budget.step.allocation_log import Part, Phase

if TYPE_CHECKING:
    from typing import TypeGuard

    from loaderkit.budget.step.allocation_log import End, Log, LogPhase

PHASES: tuple[Phase, ...] = get_args(Phase)
"""The phases of a step, in their order."""
PARTS: tuple[Part, ...] = get_args(Part)
"""What memory is used for, in the order in which it is shown."""
PARTS_ALWAYS_HELD: tuple[Part, ...] = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer state",
    "captured",
)
"""Those whose size does not depend on the batch."""


class Peak(NamedTuple):
    """The highest sum of live bytes within a phase."""

    total: int
    """Live bytes, including what kernels hold inside."""
    inside: int
    """Of these, what a kernel held inside."""
    position: int
    """The event after which it was reached."""
    phase: Phase


def is_in_step(phase: LogPhase) -> TypeGuard[Phase]:
    """Tell the phases of a step from what lies around them."""
    return phase in PHASES


def phases_of(log: Log) -> list[LogPhase]:
    """Name the phase of every event; "base" before the first mark."""
    phases: list[LogPhase] = ["base"] * len(log.events)
    for position, phase in log.marks:
        phases[position:] = [phase] * (len(phases) - position)
    return phases


def changes_of(log: Log, end: End = "likely") -> list[int]:
    """Give the bytes that each event adds, corrected.

    Args:
        log: What lived when.
        end: Which end of what is not known exactly.

    Returns:
        Bytes, negative where a storage is freed.
    """
    changes = []
    live: set[int] = set()
    for number, size in log.events:
        correction = log.corrections.get(number)
        more = correction.at(end) if correction is not None else 0
        # The sign does not tell whether it is made or freed: what is empty as a fake is
        # both with 0 bytes.
        is_freed = number in live
        changes.append(size - more if is_freed else size + more)
        live.add(number)
    return changes


def peaks_of(log: Log, end: End = "likely") -> dict[Phase, Peak]:
    """Find the highest sum of each phase.

    Args:
        log: What lived when.
        end: Which end of what is not known exactly.

    Returns:
        The peaks by phase, in the order of :data:`PHASES`.
    """
    highest: dict[Phase, Peak] = {}
    phase_starting_at = {
        position: phase for position, phase in log.marks if is_in_step(phase)
    }
    phases = phases_of(log)
    live = 0
    for position, change in enumerate(changes_of(log, end)):
        starting_phase = phase_starting_at.get(position)
        if starting_phase is not None:
            # What lives already counts, even if the phase allocates nothing more.
            _raise_peak(highest, Peak(live, 0, position - 1, starting_phase))

        live += change
        phase = phases[position]
        if is_in_step(phase):
            held = log.inside.get(position)
            inside = held.at(end) if held is not None else 0
            _raise_peak(highest, Peak(live + inside, inside, position, phase))
    return {phase: highest[phase] for phase in PHASES if phase in highest}


def highest_before_step(log: Log) -> int:
    """Find the highest sum before the first phase, while an optimizer makes its state.

    Args:
        log: What lived when.

    Returns:
        Bytes.
    """
    first_position = log.marks[0].position if log.marks else len(log.events)
    live = highest = 0
    for position, change in enumerate(changes_of(log)[:first_position]):
        live += change
        held = log.inside.get(position)
        inside_bytes = 0 if held is None else held.likely
        highest = max(highest, live + inside_bytes)
    return highest


def totals(peaks: dict[Phase, Peak]) -> dict[Phase, int]:
    """Give the bytes of peaks by phase."""
    return {phase: peak.total for phase, peak in peaks.items()}


def _raise_peak(highest: dict[Phase, Peak], peak: Peak) -> None:
    if peak.phase not in highest or peak.total > highest[peak.phase].total:
        highest[peak.phase] = peak


def storage_parts(log: Log) -> dict[int, Part]:
    """Say which part each storage belongs to, from when it was allocated and freed.

    What is allocated before the backward pass and lives until then is an activation.

    Args:
        log: What lived when.

    Returns:
        The part by the storage's number.
    """
    before_backward = {"forward", "loss"}
    part_of: dict[int, Part] = {}
    for (number, _), phase in zip(log.events, phases_of(log), strict=True):
        is_allocated_here = number not in part_of
        if is_allocated_here and phase in before_backward:
            part_of[number] = "activations"
        elif is_allocated_here or phase in before_backward:
            # Allocated later, or freed before the backward pass.
            part_of[number] = "temporaries"
    # What the tracker was told is surer than what follows from the order.
    return part_of | log.owners


def parts_at(log: Log, peak: Peak, part_of: dict[int, Part]) -> dict[Part, int]:
    """Sum what is live at a peak, by part."""
    parts: dict[Part, int] = dict.fromkeys(PARTS, 0)
    until_peak = changes_of(log)[: peak.position + 1]
    for position, change in enumerate(until_peak):
        number, _ = log.events[position]
        parts[part_of[number]] += change
    parts["temporaries"] += peak.inside
    return parts


def kept_by_module(log: Log, part_of: dict[int, Part]) -> dict[str, int]:
    """Sum the activations of the last step by module."""
    starts = [position for position, phase in log.marks if phase == "forward"]
    begin = starts[-1] if starts else len(log.events)
    kept_bytes: dict[str, int] = {}
    changes = changes_of(log)
    for position in range(begin, len(log.events)):
        number, _ = log.events[position]
        if changes[position] > 0 and part_of[number] == "activations":
            module = log.modules.get(number) or "(the model itself)"
            kept_bytes[module] = kept_bytes.get(module, 0) + changes[position]
    return dict(sorted(kept_bytes.items(), key=lambda item: -item[1]))
